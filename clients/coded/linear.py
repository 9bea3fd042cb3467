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
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.clients.half import ClientHalf, Handler
from fedcomp.clients.messages import require_partition
from fedcomp.clients.peers import peer_link
from fedcomp.coding.datacode import encode_rows
from fedcomp.coding.datapacket import pack_partition, unpack_partition
from fedcomp.coding.errors import PacketError
from fedcomp.coding.transport import MAX_STORE_BYTES, Parcel, PeerTransport, deliver
from fedcomp.errors import StateError
from fedcomp.flower import linear
from fedcomp.flower.logs import log
from fedcomp.flower.payload import put_frame, put_node, take_frame

Real = NDArray[np.float64]

_ROWS: Final = "fedcomp.linear.rows"
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
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> x, y = np.eye(4), np.array([0.0, 1.0, 0.0, 1.0])
    >>> app = client(ClientApp(), linear_device(lambda msg, context, partitions: LinearRows(x, y, "logistic")))
    """

    def set_up(msg: Message, context: Context) -> Message:
        asked = linear.take_stage(msg)
        if isinstance(asked, linear.Join):
            return _join(msg, context, asked, rows)
        if isinstance(asked, linear.Share):
            return _share(msg, context, asked, rows)
        return _build(msg, context, asked, rows)

    handlers: dict[str, Handler] = {
        f"query.{linear.SETUP}": set_up,
        f"train.{linear.PHASE1}": partial(_multiply, take=linear.MODEL, give=linear.MARGINS, transposed=False),
        f"train.{linear.PHASE2}": partial(_multiply, take=linear.RESIDUALS, give=linear.GRADIENT, transposed=True),
    }
    return ClientHalf("linear", handlers=handlers)


def _join(msg: Message, context: Context, asked: linear.Join, rows: RowsOf) -> Message:
    """Say which device this is, what it holds already, and, of an owner, size, loss and labels."""
    device = _device(context)
    held = linear.HeldPlan.find(context.state)
    link = _link(context, asked, device)
    # Where simulated links lead the server knows; what it is told would be believed on every machine.
    address = "" if link is None or link.address.startswith("spool:") else link.address
    joined = linear.Joined(plan=b"" if held is None else held.plan, address=address)
    out = RecordDict()
    if device < asked.partitions:
        own = rows(msg, context, asked.partitions)
        # Classes travel as a byte each, real targets as doubles.
        small = bool(np.isin(own.y, (0.0, 1.0)).all())
        joined = linear.Owner(
            **vars(joined),
            rows=len(own.x),
            columns=int(own.x.shape[1]),
            loss=own.loss,
            # In one byte order and layout: the same examples have the same digest on every machine.
            data=hashlib.blake2b(own.x.astype("<f8").tobytes("C"), digest_size=linear.DIGEST).digest(),
            label_type=("int8" if small else "float64") if asked.labels else "",
        )
    joined.put(out)
    if isinstance(joined, linear.Owner) and asked.labels:
        linear.put_vector(out, linear.LABELS, own.y, joined.label_type)
    put_node(out, device)
    return Message(out, reply_to=msg)


def _share(msg: Message, context: Context, asked: linear.Share, rows: RowsOf) -> Message:
    """Hand over the own partition: to each device that combines it, or to the server, which forwards it."""
    device = _device(context)
    plan = asked.plan
    own = rows(msg, context, asked.partitions)
    packed = pack_partition(own.x, device, plan)
    out = RecordDict()
    linear.Done(plan=plan).put(out)
    link = _link(context, asked, device)
    if link is None:
        put_frame(out, linear.PARTITION, packed)
    else:
        targets = linear.Targets.take(msg)
        # The plan's id stands for the run, and the set-up belongs to no round.
        parcels = [Parcel(plan, 0, _PARTITION_KIND, device, i, packed) for i in targets.to]
        deliveries = deliver(link, list(zip(targets.addresses, parcels, strict=True)))
        # All that was handed to a link counts, whether or not it was taken at the other end.
        linear.Done(plan=plan, sent=tuple(delivery.handed_over for delivery in deliveries)).put(out)
        failed = [str(delivery.error) for delivery in deliveries if delivery.error is not None]
        if failed:
            log.warning("device %d could not hand over its partition %d times: %s", device, len(failed), failed[0])
    put_node(out, device)
    return Message(out, reply_to=msg)


def _build(msg: Message, context: Context, asked: linear.Build, rows: RowsOf) -> Message:
    """Combine the own partition and those of others, and keep the result under the plan's id."""
    device = _device(context)
    plan, sizes, columns = asked.plan, asked.sizes, asked.columns
    out = RecordDict()
    linear.Done(plan=plan).put(out)
    put_node(out, device)
    held = linear.HeldPlan.find(context.state)
    if held is not None and held.plan == plan:
        # Delivered twice, or asked again because the answer was lost: what peers sent again is of no use.
        link = _link(context, asked, device)
        if link is not None:
            link.store.take(plan, 0)
        return Message(out, reply_to=msg)
    row = linear.take_vector(msg.content, linear.ROW, len(sizes), "float64")
    wanted = np.flatnonzero(row).tolist()
    shapes = {j: (sizes[j], columns) for j in wanted if j != device}
    link = _link(context, asked, device)
    parts = _arrived(msg, shapes, plan) if link is None else _delivered(link, shapes, plan)
    if device in wanted:
        own = rows(msg, context, len(sizes))
        if own.x.shape != (sizes[device], columns):
            raise StateError(
                f"this device's partition has shape {own.x.shape}, the plan says {(sizes[device], columns)}; all nodes "
                "must use the same task options and data"
            )
        parts[device] = own.x
    # Padded to the longest partition, so that the answers of all devices have one length.
    coded = encode_rows(row, parts, max(sizes), columns, bias=asked.bias)
    context.state[_ROWS] = ArrayRecord({"rows": Array(coded)})
    linear.HeldPlan(plan).put(context.state)
    if link is not None:
        link.store.take(plan, 0)
    return Message(out, reply_to=msg)


def _arrived(msg: Message, shapes: Mapping[int, tuple[int, int]], plan: bytes) -> dict[int, Real]:
    """Return the partitions that came with the message."""
    found = {j: take_frame(msg.content, f"{linear.PARTITION}.{j}") for j in shapes}
    return dict(unpack_partition(data, plan, {j: shapes[j]}) for j, data in found.items() if data is not None)


def _delivered(link: PeerTransport, shapes: Mapping[int, tuple[int, int]], plan: bytes) -> dict[int, Real]:
    """Return the partitions that came from peers; anything else among the parcels is skipped."""
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


def _link(context: Context, asked: linear.Join | linear.Share | linear.Build, device: int) -> PeerTransport | None:
    """Return this device's end of its peer links; None when partitions travel through the server.

    Raises
    ------
    ConfigError, StateError
        When it has none.
    """
    return peer_link(context, device, asked.spool, MAX_STORE_BYTES) if asked.peers else None


def _multiply(msg: Message, context: Context, *, take: str, give: str, transposed: bool) -> Message:
    """Answer one phase: the stored rows, or their transpose, times the vector of the message."""
    asked = linear.Phase.take(msg)
    held = linear.HeldPlan.find(context.state)
    ready = held is not None and held.plan == asked.plan
    out = RecordDict()
    # No error: a device that lost its state is to be set up again, and not taken for one that fails.
    (linear.Done(plan=asked.plan) if ready else linear.Done(unready=True)).put(out)
    put_node(out, _device(context))
    if not ready:
        return Message(out, reply_to=msg)
    coded = context.state.array_records[_ROWS]["rows"].numpy()
    matrix = coded.T if transposed else coded
    vector = linear.take_vector(msg.content, take, matrix.shape[1], asked.type)
    linear.put_vector(out, give, matrix @ vector, asked.type)
    return Message(out, reply_to=msg)


def _device(context: Context) -> int:
    """Return the number of this device: the node's partition id."""
    return require_partition(context, "coded gradient descent needs numbered devices")
