"""The client half of the drop-in pair: one mod, no configuration.

``ClientApp(mods=[compression()])`` is all a Flower app needs. The server's announcement says which codec to use; a
message without one passes through untouched. Put the mod first in the list: it must be the last to touch the outgoing
reply, outside of everything that changes the update (clipping, noise).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.codecs import Codec, get_codec
from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.exact import check_exact, encode_exact
from fedcomp.flower.payload import NODE_RECORD, PARTITION_KEY, put_frame, take_frame
from fedcomp.flower.protocol import EXACT, OWN_CONFIG, PROTOCOL, RESYNC, STALE, STEP, UPDATE, Announcement
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.state import Replica, StaleMessage, Uplink
from fedcomp.layout import Layout, Update, policy_from_config
from fedcomp.rng import Key
from fedcomp.versions import Step, advance, digest

CallNext = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, CallNext], Message]

_MOD_FAILED_PRECONDITION = 6  # Flower's ErrorCode of that name; the enumeration itself is private


def compression(accept: Collection[str] | None = None) -> Mod:
    """Return the compression mod.

    Parameters
    ----------
    accept : collection of str, optional
        Codec ids this client agrees to use, wrappers ("feedback", "chain") included; default all registered ones. A
        codec outside of it is answered densely and reported to the server, never silently.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp(mods=[compression()])
    """

    def compression_mod(msg: Message, context: Context, call_next: CallNext) -> Message:
        return _handle(msg, context, call_next, accept)

    return compression_mod


def _handle(msg: Message, context: Context, call_next: CallNext, accept: Collection[str] | None) -> Message:
    announcement = _announcement(msg.content)
    if announcement is None:
        return call_next(msg, context)

    codec, unsupported = _choose(announcement, announcement.codec, accept)
    downlink, no_downlink = _choose(announcement, announcement.downlink, accept)
    unsupported = unsupported or no_downlink
    try:
        record, replica = _receive(msg.content, announcement, downlink, context)
    except FedcompError as error:
        return Message(Error(_MOD_FAILED_PRECONDITION, f"{RESYNC}: {error}"), reply_to=msg)

    layout: Layout | None = None
    uplink: Uplink | None = None
    before: dict[str, NDArray[Any]] = {}
    if codec is not None:
        before = to_arrays(record)
        layout = Layout.of(before, policy_from_config(announcement.policy), cast_floats=not codec.lossless)
        if codec.remembers:
            try:
                uplink = Uplink.begin(context, announcement, codec, layout)
            except StaleMessage as error:
                return Message(Error(_MOD_FAILED_PRECONDITION, f"{STALE}: {error}"), reply_to=msg)
            if uplink.redelivery is not None:
                # Already trained for this message: the frame that may have been consumed is the one to send again.
                return Message(uplink.redelivery, reply_to=msg)

    msg.content = _plain_content(msg.content, announcement, record)
    reply = call_next(msg, context)
    if reply.has_error():
        return reply

    header = ConfigRecord(dict(reply.content.config_records.get(NODE_RECORD, {})))
    partition = _partition(context)
    header[PARTITION_KEY] = partition
    if replica is not None:
        header["version"] = replica.version
    if unsupported:
        header["unsupported"] = unsupported
    content = RecordDict({k: v for k, v in reply.content.items() if k != NODE_RECORD})
    content[NODE_RECORD] = header

    if codec is not None and layout is not None:
        name, after = _reply_arrays(content)
        layout.check(after)
        exact_arrays = {t.name: check_exact(after[t.name], t, before[t.name]) for t in layout.exact}
        vector = layout.flatten(after)
        if not codec.lossless:
            vector -= layout.flatten(before)
        update = Update(vector, layout)
        key = Key(announcement.seed, "uplink", announcement.round, partition)
        frame, state = codec.encode(update, uplink.state if uplink else codec.init(layout), key)
        header["record"] = name
        header["sequence"] = announcement.sequence
        if uplink is not None:
            header["generation"] = uplink.generation
            header["rolled-back"] = uplink.rolled_back
        del content[name]
        put_frame(content, UPDATE, frame)
        exact = encode_exact(exact_arrays, layout)
        if exact is not None:
            put_frame(content, EXACT, exact)
        if uplink is not None:
            uplink.commit(context, state, announcement, codec, layout, content)
    if replica is not None:
        replica.save(context)
    reply.content = content
    return reply


def _announcement(content: RecordDict) -> Announcement | None:
    for config in content.config_records.values():
        found = Announcement.read(config)
        if found is not None:
            return found
    return None


def _choose(
    announcement: Announcement, config: dict[str, Any], accept: Collection[str] | None
) -> tuple[Codec | None, str]:
    """Return the codec of ``config``, or None and the reason why it cannot be used (none if none is announced)."""
    if announcement.protocol != PROTOCOL:
        return None, f"server speaks protocol {announcement.protocol}, this client {PROTOCOL}"
    if not config:
        return None, ""
    try:
        codec = get_codec(config)
    except ConfigError as error:
        return None, str(error)
    if codec.phases != 1:
        return None, f"{codec!r} needs {codec.phases} exchanges; the drop-in pair has one"
    refused = [] if accept is None else [i for i in _ids(config) if i not in accept]
    if refused:
        return None, f"this client accepts the codecs {sorted(accept or ())}, not {refused}"
    return codec, ""


def _ids(config: Any) -> list[str]:
    if isinstance(config, dict):
        own = [config["id"]] if isinstance(config.get("id"), str) else []
        return own + [i for v in config.values() for i in _ids(v)]
    return [i for v in config for i in _ids(v)] if isinstance(config, list) else []


def _receive(
    content: RecordDict, announcement: Announcement, codec: Codec | None, context: Context
) -> tuple[ArrayRecord, Replica | None]:
    """Return the model of the message as an ordinary ArrayRecord, and the replica to keep, if any.

    Without a usable downlink codec the node keeps no replica, and is sent the full model each time.

    Raises
    ------
    FedcompError
        When the replica cannot be brought to the announced version, or is not the announced model.
    """
    models = content.array_records
    # A server of another protocol version does not name its record; there is only one model anyway.
    plain = models.get(announcement.record) or (next(iter(models.values())) if len(models) == 1 else None)
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
        if held is None:
            raise StateError(f"this node holds no model, but the message starts from version {announcement.base}")
        layout = _downlink_layout(held, announcement, codec)
        steps = [_step(content, v) for v in range(announcement.base + 1, announcement.version + 1)]
        exact = {t.name: held.arrays[t.name] for t in layout.exact}
        vector, exact, version = advance(layout.flatten(held.arrays), exact, held.version, steps, codec, layout)
        replica = Replica(version, layout.unflatten(vector, exact))
    if replica.version != announcement.version or digest(vector, exact) != announcement.digest:
        raise StateError(
            f"the replica (version {replica.version}) is not the server's model of version {announcement.version}: "
            "digests differ"
        )
    record = plain if plain is not None else to_record(replica.arrays)
    return record, replica


def _downlink_layout(replica: Replica, announcement: Announcement, codec: Codec) -> Layout:
    return Layout.of(dict(replica.arrays), policy_from_config(announcement.policy), cast_floats=not codec.lossless)


def _step(content: RecordDict, version: int) -> Step:
    frame = take_frame(content, f"{STEP}.{version}")
    if frame is None:
        raise StateError(f"the message lacks step {version} of the model")
    return Step(version, frame, take_frame(content, f"{STEP}.{version}.exact"))


def _plain_content(content: RecordDict, announcement: Announcement, record: ArrayRecord) -> RecordDict:
    """Return the message content as the app would have seen it without compression."""
    out = RecordDict()
    if announcement.record and announcement.record not in content:
        out[announcement.record] = record
    for name, value in content.items():
        if name.startswith(STEP):
            continue
        if isinstance(value, ConfigRecord):
            value = ConfigRecord(dict(value))
            Announcement.erase(value)
            if name == OWN_CONFIG and not value:
                continue
        out[name] = value
    return out


def _reply_arrays(content: RecordDict) -> tuple[str, dict[str, NDArray[Any]]]:
    records = content.array_records
    if len(records) != 1:
        raise ConfigError(
            f"the reply holds {len(records)} ArrayRecords {sorted(records)}; compression() needs exactly "
            "one, the trained model"
        )
    name, record = next(iter(records.items()))
    return name, to_arrays(record)


def _partition(context: Context) -> int:
    """Return the partition id, or a number drawn from the node id where the deployment configures none."""
    value = context.node_config.get(PARTITION_KEY)
    return value if isinstance(value, int) else context.node_id % (1 << 31)
