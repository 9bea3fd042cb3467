"""The client half of coded gradient descent: keeps a combination of data partitions and multiplies with it.

**Privacy.** The device sends its raw training data to other devices, or through the server, and its labels to the
server: use it inside one trust domain only; see :mod:`fedcomp.coding.datacode`, which also says what of this is our
reconstruction.

The combination and the id of its plan live in ``context.state`` and nowhere else; every answer is a function of them
and of the message, so that a message may be delivered twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.clients.half import ClientHalf, Handler
from fedcomp.clients.peers import peer_link
from fedcomp.coding.datacode import encode_rows
from fedcomp.coding.datapacket import pack_partition, unpack_partition
from fedcomp.coding.errors import PacketError
from fedcomp.coding.transport import MAX_STORE_BYTES, Parcel, PeerTransport, deliver
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import linear
from fedcomp.flower.logs import log
from fedcomp.flower.payload import PARTITION_KEY, PayloadError, put_frame, put_node, take_frame

Real = NDArray[np.float64]

_PLAN: Final = "fedcomp.linear.plan"
_ROWS: Final = "fedcomp.linear.rows"
_ID: Final = 8
_MOST: Final = 2**31 - 1
_PARTITION_KIND: Final = 0
_WAIT_SECONDS: Final = 5.0


@dataclass(frozen=True)
class LinearRows:
    """The examples a device owns.

    Attributes
    ----------
    x : ndarray of float64, shape (m, d)
        Without a constant column; the server says whether there is a bias.
    y : ndarray of float64, shape (m,)
        0 and 1 for classes.
    loss : str
        What the device's task minimises: "logistic", "hinge" or "squares"; the server compares it with its own.
    """

    x: Real
    y: Real
    loss: str


RowsOf = Callable[[Message, Context, int], LinearRows]
"""``rows(message, context, partitions)``: the examples of this device's own partition, of so many."""


def linear_device(rows: RowsOf) -> ClientHalf:
    """Return the client half of coded gradient descent.

    Parameters
    ----------
    rows : callable
        Called where a device owns a partition. The node configuration's ``partition-id`` is the number of the device;
        devices with numbers below ``partitions`` own that partition, the others own nothing.

    Examples
    --------
    >>> import numpy as np
    >>>     >>> from fedcomp.clients.client import client
    >>> x, y = np.eye(4), np.array([0.0, 1.0, 0.0, 1.0])
    >>> app = client(ClientApp(), linear_device(lambda msg, context, partitions: LinearRows(x, y, "logistic")))
    """

    def set_up(msg: Message, context: Context) -> Message:
        header = linear.header_of(msg)
        stage = linear.text_of(header, "stage")
        stages = {linear.JOIN: _join, linear.SHARE: _share, linear.BUILD: _build}
        if stage not in stages:
            raise ConfigError(f"coded set-up has no stage {stage!r}; server and client are of different versions")
        return stages[stage](msg, context, header, rows)

    handlers: dict[str, Handler] = {
        f"query.{linear.SETUP}": set_up,
        f"train.{linear.PHASE1}": partial(_multiply, take=linear.MODEL, give=linear.MARGINS, transposed=False),
        f"train.{linear.PHASE2}": partial(_multiply, take=linear.RESIDUALS, give=linear.GRADIENT, transposed=True),
    }
    return ClientHalf("linear", handlers=handlers)


def _join(msg: Message, context: Context, header: ConfigRecord, rows: RowsOf) -> Message:
    """Say which device this is, what it holds already, and, of an owner, size, loss and labels."""
    device = _device(context)
    partitions = linear.integer_of(header, "partitions", 1, _MOST)
    said = ConfigRecord()
    held = context.state.config_records.get(_PLAN)
    if held is not None:
        said["plan"] = linear.bytes_of(held, "plan", _ID)
    link = _link(context, header, device)
    # Where simulated links lead the server knows; what it is told would be believed on every machine.
    if link is not None and not link.address.startswith("spool:"):
        said["address"] = link.address
    out = RecordDict({linear.HEADER: said})
    if device < partitions:
        own = rows(msg, context, partitions)
        said["rows"], said["columns"], said["loss"] = len(own.x), int(own.x.shape[1]), own.loss
        # Tells data apart of which all that the server sees is equal.
        said["data"] = hashlib.blake2b(own.x.astype("<f8").tobytes("C"), digest_size=linear.DIGEST).digest()
        if header.get("labels") is True:
            small = bool(np.isin(own.y, (0.0, 1.0)).all())
            said["label-type"] = "int8" if small else "float64"
            linear.put_vector(out, linear.LABELS, own.y, "int8" if small else "float64")
    put_node(out, device)
    return Message(out, reply_to=msg)


def _share(msg: Message, context: Context, header: ConfigRecord, rows: RowsOf) -> Message:
    """Hand over the own partition: to each device that combines it, or to the server, which forwards it."""
    device = _device(context)
    plan = linear.bytes_of(header, "plan", _ID)
    own = rows(msg, context, linear.integer_of(header, "partitions", 1, _MOST))
    packed = pack_partition(own.x, device, plan)
    said = ConfigRecord({"plan": plan})
    out = RecordDict({linear.HEADER: said})
    link = _link(context, header, device)
    if link is None:
        put_frame(out, linear.PARTITION, packed)
    else:
        targets = msg.content.config_records.get(linear.TARGETS, ConfigRecord())
        to, addresses = linear.integers_of(targets, "to"), linear.texts_of(targets, "addresses")
        parcels = [Parcel(plan, 0, _PARTITION_KIND, device, i, packed) for i in to]
        deliveries = deliver(link, list(zip(addresses, parcels, strict=True)))
        # All that was handed to a link counts, whether or not it was taken at the other end.
        said["sent"] = [delivery.handed_over for delivery in deliveries]
        failed = [str(delivery.error) for delivery in deliveries if delivery.error is not None]
        if failed:
            log.warning("device %d could not hand over its partition %d times: %s", device, len(failed), failed[0])
    put_node(out, device)
    return Message(out, reply_to=msg)


def _build(msg: Message, context: Context, header: ConfigRecord, rows: RowsOf) -> Message:
    """Combine the own partition and those of others, and keep the result under the plan's id."""
    device = _device(context)
    plan = linear.bytes_of(header, "plan", _ID)
    out = RecordDict({linear.HEADER: ConfigRecord({"plan": plan})})
    put_node(out, device)
    held = context.state.config_records.get(_PLAN)
    if held is not None and held.get("plan") == plan:
        # Delivered twice, or asked again because the answer was lost: what peers sent again is of no use.
        link = _link(context, header, device)
        if link is not None:
            link.store.take(plan, 0)
        return Message(out, reply_to=msg)
    sizes = linear.integers_of(header, "sizes")
    columns = linear.integer_of(header, "columns", 1, _MOST)
    row = linear.take_vector(msg.content, linear.ROW, len(sizes), "float64")
    wanted = np.flatnonzero(row).tolist()
    shapes = {j: (sizes[j], columns) for j in wanted if j != device}
    link = _link(context, header, device)
    parts = _arrived(msg, shapes, plan) if link is None else _delivered(link, shapes, plan)
    if device in wanted:
        own = rows(msg, context, len(sizes))
        if own.x.shape != (sizes[device], columns):
            raise StateError(
                f"this device's partition has shape {own.x.shape}, the plan says {(sizes[device], columns)}; all nodes "
                "must use the same task options and data"
            )
        parts[device] = own.x
    coded = encode_rows(row, parts, max(sizes), columns, bias=header.get("bias") is True)
    context.state[_ROWS] = ArrayRecord({"rows": Array(coded)})
    context.state[_PLAN] = ConfigRecord({"plan": plan})
    if link is not None:
        link.store.take(plan, 0)
    return Message(out, reply_to=msg)


def _arrived(msg: Message, shapes: Mapping[int, tuple[int, int]], plan: bytes) -> dict[int, Real]:
    """Return the partitions that came with the message."""
    found = {j: take_frame(msg.content, f"{linear.PARTITION}.{j}") for j in shapes}
    return dict(unpack_partition(data, plan, {j: shapes[j]}) for j, data in found.items() if data is not None)


def _delivered(link: PeerTransport, shapes: Mapping[int, tuple[int, int]], plan: bytes) -> dict[int, Real]:
    """Return the partitions that came from peers; what is no such thing is passed over."""
    parts: dict[int, Real] = {}
    # The owners have answered that they sent theirs; what is not here by now may be a moment late, or is lost.
    for parcel in link.recv(plan, 0, _WAIT_SECONDS, expect=len(shapes)):
        try:
            j, x = unpack_partition(parcel.body, plan, shapes)
        except PacketError as error:
            log.warning("a parcel of device %d was passed over: %s", parcel.source, error)
            continue
        parts[j] = x
    return parts


def _link(context: Context, header: ConfigRecord, device: int) -> PeerTransport | None:
    """Return this device's end of its peer links; None when partitions travel through the server.

    Raises
    ------
    ConfigError, StateError
        When it has none.
    """
    if header.get("peers") is not True:
        return None
    return peer_link(context, device, linear.text_of(header, "spool"), MAX_STORE_BYTES)


def _multiply(msg: Message, context: Context, *, take: str, give: str, transposed: bool) -> Message:
    """Answer one phase: the stored rows, or their transpose, times the vector of the message."""
    header = linear.header_of(msg)
    plan = linear.bytes_of(header, "plan", _ID)
    out = RecordDict({linear.HEADER: ConfigRecord({"plan": plan})})
    put_node(out, _device(context))
    held = context.state.config_records.get(_PLAN)
    if held is None or held.get("plan") != plan:
        # An ordinary reply, not an error: the server sets the device up again.
        out[linear.HEADER] = ConfigRecord({"unready": True})
        return Message(out, reply_to=msg)
    kind = linear.text_of(header, "type")
    if kind not in linear.VECTOR_TYPES:
        raise PayloadError(f"vectors of type {kind!r} are not known; expected one of {linear.VECTOR_TYPES}")
    coded = context.state.array_records[_ROWS]["rows"].numpy()
    matrix = coded.T if transposed else coded
    vector = linear.take_vector(msg.content, take, matrix.shape[1], kind)
    linear.put_vector(out, give, matrix @ vector, kind)
    return Message(out, reply_to=msg)


def _device(context: Context) -> int:
    """Return the number of this device: the node's partition id."""
    value = context.node_config.get(PARTITION_KEY)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"this node's {PARTITION_KEY} is {value!r}; coded gradient descent needs numbered devices: start the "
            "SuperNode with --node-config 'partition-id=0 num-partitions=4'"
        )
    return value
