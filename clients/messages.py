"""What the client's mods do with every message: read the announcement, bring the model up to date, build the reply."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.codecs import Codec, State, get_codec
from fedcomp.codecs.base import norm
from fedcomp.codecs.chain import registry as transforms
from fedcomp.codecs.orthonormal import bases
from fedcomp.codecs.registry import codecs
from fedcomp.errors import ConfigError, StateError
from fedcomp.exact import check_exact
from fedcomp.flower.asks import find_ask
from fedcomp.flower.payload import NODE_RECORD, PARTITION_KEY, is_frame, models, take_frame
from fedcomp.flower.protocol import OWN_CONFIG, PROTOCOL, STEP, Announcement, is_own
from fedcomp.flower.records import BFLOAT16, config_in, to_arrays, to_record, widened
from fedcomp.flower.schema import OtherVersion
from fedcomp.flower.state import Replica
from fedcomp.layout import Layout, Update, Vector, policy_from_config
from fedcomp.params import shown, similar
from fedcomp.versions import FIRST, Step, advance, digest
from fedcomp.wire import Bf16

T = TypeVar("T")

NOT_WITHOUT_NOISE = (
    "the announced codec privatises updates, and this client cannot or may not use it; it sends nothing without that "
    "noise. Use the same release on both sides, and accept its codecs"
)
"""Why a client does not answer densely, as it does where a codec only compresses."""


class AppError(Exception):
    """The app answered with an error, which goes back as it is."""

    def __init__(self, reply: Message) -> None:
        super().__init__()
        self.reply = reply


def find_announcement(content: RecordDict) -> Announcement | None:
    # Not config_records: Flower makes a checked copy of it at every access, and every mod looks at every message.
    for record in content.values():
        found = Announcement.read(record) if isinstance(record, ConfigRecord) else None
        if found is not None:
            return found
    return None


def asked_config(content: RecordDict) -> Mapping[str, Any] | None:
    """Return the options of the system, or of the codec, that a message asks for; None where it asks for neither.

    Raises
    ------
    FedcompError
        When what it says cannot be read, or is of another version.
    """
    try:
        head = find_ask(content)
    except OtherVersion:
        announcement = find_announcement(content)
        if announcement is None or announcement.protocol != PROTOCOL:
            # Of another version nothing can be read, and the answer would be dense.
            raise
        return announcement.codec
    return None if head is None else head.system


def require_ids(accept: object, *others: str) -> frozenset[str] | None:
    """Return the ids of codecs that a client agrees to, or of ``others``; None: to all.

    Raises
    ------
    ConfigError
        When ``accept`` is not a collection of names, or one of them is not known: a client that accepts less than was
        meant answers densely.
    """
    if accept is None:
        return None
    if isinstance(accept, str) or not isinstance(accept, Collection) or not all(isinstance(i, str) for i in accept):
        raise ConfigError(
            f"accept={shown(accept)} is not valid: a list of ids of codecs, such as ['topk']. What clients send is the "
            "server's choice: Compressed(strategy, codec)"
        )
    known = (*codecs.known(), *transforms.known(), *bases.known(), *others)
    for name in accept:
        if name not in known:
            raise ConfigError(f"accept={shown(accept)}: no codec is called {name!r}{similar(name, known)}")
    return frozenset(accept)


def choose(
    announcement: Announcement, config: dict[str, Any], accept: Collection[str] | None
) -> tuple[Codec | None, str]:
    """Return the codec of ``config``, or None and the reason why it cannot be used (none if none is announced)."""
    if announcement.protocol != PROTOCOL:
        return None, f"server speaks protocol {announcement.protocol}, this client {PROTOCOL}"
    codec, refused = made(config, get_codec, accept)
    if codec is not None and codec.phases != 1:
        return None, f"{codec!r} needs {codec.phases} exchanges; here there is one"
    return codec, refused


def made(
    config: dict[str, Any], make: Callable[[dict[str, Any]], T], accept: Collection[str] | None
) -> tuple[T | None, str]:
    """Return what ``make`` makes of a configuration, or None and the reason why it may not or cannot be made (none if
    there is no configuration)."""
    if not config:
        return None, ""
    # Before it is built, which imports what its id names and may take what its parameters ask for.
    refused = [] if accept is None else [i for i in _ids(config) if i not in accept]
    if refused:
        return None, f"this client accepts the codecs {sorted(accept or ())}, not {shown(refused)}"
    try:
        return make(config), ""
    except ConfigError as error:
        return None, str(error)


def _ids(config: Any) -> list[str]:
    """Return the ids in a configuration: wrapped codecs stand inside that of their wrapper."""
    # An accepted "chain" must not bring in a codec that is not. No recursion: how deep it nests is the sender's choice.
    found: list[str] = []
    waiting = [config]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if isinstance(part.get("id"), str):
                found.append(part["id"])
            waiting += reversed(part.values())
        elif isinstance(part, list):
            waiting += reversed(part)
    return found


def receive(
    content: RecordDict,
    announcement: Announcement,
    codec: Codec | None,
    context: Context,
    first_model: Callable[[], ArrayRecord] | None = None,
) -> tuple[ArrayRecord, Replica | None]:
    """Return the model of the message as an ordinary ArrayRecord, and the replica to keep, if any.

    Without a usable downlink codec the node keeps no replica, and is sent the full model each time. ``first_model``
    makes the model that the run begins with, where the server leaves that to the nodes.

    Raises
    ------
    FedcompError
        When the replica cannot be brought to the announced version, or is not the announced model.
    """
    found = models(content)
    # A server of another protocol version does not name its record; there is only one model anyway.
    lone = next(iter(found.values())) if len(found) == 1 and not announcement.record else None
    plain = found.get(announcement.record, lone)
    # Base 0 is no version: the message holds the whole model.
    if codec is None or announcement.base == 0:
        if plain is None:
            raise StateError(f"the message holds no ArrayRecord {announcement.record!r} and no steps this node can use")
        if codec is None:
            return plain, None
        replica = Replica(announcement.version, to_arrays(plain))
        layout = _downlink_layout(replica, announcement, codec)
        vector = layout.flatten(replica.arrays)
        exact = {t.name: replica.arrays[t.name] for t in layout.exact}
    else:
        held = Replica.load(context)
        if announcement.base == FIRST and first_model is not None and (held is None or held.version != FIRST):
            held = Replica(FIRST, to_arrays(first_model()))
        if held is None:
            raise StateError(f"this node holds no model, but the message starts from version {announcement.base}")
        # Laid out as the server lays out its reference: the digest is over this very vector.
        layout = _downlink_layout(held, announcement, codec)
        steps = [_step(content, v) for v in range(announcement.base + 1, announcement.version + 1)]
        exact = {t.name: held.arrays[t.name] for t in layout.exact}
        vector, exact, version = advance(layout.flatten(held.arrays), exact, held.version, steps, codec, layout)
        replica = Replica(version, layout.unflatten(vector, exact))
    # Without this check a replica that differs in one bit would drift from the server's for the rest of the run.
    if replica.version != announcement.version or digest(vector, exact) != announcement.digest:
        raise StateError(
            f"the replica (version {replica.version}) is not the server's model of version {announcement.version}: "
            "digests differ"
        )
    # The message's own record where there is one: the model is not serialised again.
    record = plain if plain is not None else to_record(replica.arrays)
    return record, replica


def _downlink_layout(replica: Replica, announcement: Announcement, codec: Codec) -> Layout:
    return Layout.of(dict(replica.arrays), policy_from_config(announcement.policy), cast_floats=not codec.lossless)


def _step(content: RecordDict, version: int) -> Step:
    frame = take_frame(content, f"{STEP}.{version}")
    if frame is None:
        raise StateError(f"the message lacks step {version} of the model")
    return Step(version, frame, take_frame(content, f"{STEP}.{version}.exact"))


def plain_content(content: RecordDict, announcement: Announcement, record: ArrayRecord) -> RecordDict:
    """Return the message content as the app would have seen it without compression."""
    out = RecordDict()
    if announcement.record and announcement.record not in content:
        out[announcement.record] = record
    for name, value in content.items():
        if is_own(name):
            continue
        if isinstance(value, ConfigRecord) and not is_frame(value):
            # erase() works in place, and the record belongs to the message.
            value = value.copy()
            Announcement.erase(value)
            if name == OWN_CONFIG and not value:
                continue
        out[name] = widened(value) if isinstance(value, ArrayRecord) else value
    return out


def reply_arrays(
    content: RecordDict, before: Mapping[str, NDArray[Any]], record: str = ""
) -> tuple[str, dict[str, NDArray[Any]]]:
    """Return the model of an app's reply, to be read: the ArrayRecord called ``record``, else the only one.

    A tensor that comes in bfloat16 was trained from the bfloat16 nearest to that of ``before``, the model the app was
    given: what it changed is added to ``before``, so that changes below its spacing add up over rounds.

    Raises
    ------
    ConfigError
        When it holds several and none has that name, or none at all.
    """
    records = {name: holder for name, holder in content.items() if isinstance(holder, ArrayRecord)}
    name = record if record in records else next(iter(records), "")
    if not records or (len(records) > 1 and name != record):
        raise ConfigError(
            f"the reply holds {len(records)} ArrayRecords {sorted(records)}; expected exactly one, the trained model, "
            f"or several of which one is called {record!r}, as the model of the message was"
        )
    after = to_arrays(records[name], copy=False)
    for key, array in records[name].items():
        given = before.get(key)
        if array.dtype == BFLOAT16 and given is not None and given.shape == after[key].shape:
            nearest = Bf16(given).decode().reshape(given.shape)
            # Not where nothing changed: infinities of a mask have no difference.
            with np.errstate(invalid="ignore"):
                after[key] = np.where(after[key] == nearest, given, given + (after[key] - nearest))
    return name, after


def partition_of(context: Context) -> int:
    """Return the partition id, or a number drawn from the node id where the deployment configures none."""
    value = context.node_config.get(PARTITION_KEY)
    # Within the range of partition ids; the server knows this remainder as nobody's configuration.
    return value if isinstance(value, int) else context.node_id % (1 << 31)


def require_partition(context: Context, why: str) -> int:
    """Return the partition id that this node was started with.

    Parameters
    ----------
    why : str
        What it is needed for, as a clause of the error.

    Raises
    ------
    ConfigError
        When it is not a whole number >= 0.
    """
    value = context.node_config.get(PARTITION_KEY)
    # True is an integer, and would pass for partition 1.
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"this node's {PARTITION_KEY} is {value!r}; {why}: start the SuperNode with --node-config 'partition-id=0 "
            "num-partitions=4'"
        )
    return value


def learnt(
    content: RecordDict,
    before: dict[str, NDArray[Any]],
    layout: Layout,
    *,
    lossless: bool = False,
    record: str = "",
) -> tuple[str, Update, dict[str, NDArray[Any]]]:
    """Return what an app's reply changed: name of the model's record, the update, and the exact buffers.

    The update is the model itself where ``lossless``. Of several ArrayRecords the model is the one called ``record``.

    Raises
    ------
    FedcompError
        When the reply holds no model of this layout.
    """
    name, after = reply_arrays(content, before, record)
    return name, *changed(after, before, layout, lossless=lossless)


def changed(
    after: Mapping[str, NDArray[Any]],
    before: Mapping[str, NDArray[Any]],
    layout: Layout,
    *,
    lossless: bool = False,
    out: Vector | None = None,
) -> tuple[Update, dict[str, NDArray[Any]]]:
    """Return the update between two models, or ``after`` itself where ``lossless``, and the exact buffers; the update
    in ``out``, where that is given."""
    layout.check(after)
    exact = {t.name: check_exact(after[t.name], t, before[t.name]) for t in layout.exact}
    vector = layout.flatten(after, out) if lossless else layout.difference(after, before, out)
    return Update(vector, layout), exact


def header_of(reply: RecordDict, context: Context, replica: Replica | None, unsupported: str = "") -> ConfigRecord:
    """Return the reply's header: who answers, which model it holds now, and what it could not do."""
    header = config_in(reply, NODE_RECORD).copy()
    header[PARTITION_KEY] = partition_of(context)
    if replica is not None:
        header["version"] = replica.version
    if unsupported:
        header["unsupported"] = unsupported
    return header


def memory_ratio(codec: Codec, state: State, update: Update) -> float | None:
    """Return ‖memory‖ / ‖update‖ after sending: grows without bound when what is sent never catches up.

    None when the codec keeps no memory, or the update is zero.
    """
    memory = codec.residual(state)
    length = norm(update.vector)
    return norm(memory) / length if memory is not None and length > 0.0 else None
