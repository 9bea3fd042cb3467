"""All private names of Flower that this package uses, with the fallback where a Flower version lacks one.

Flower moves such names in nearly every minor release, so nothing here goes by a version: what is needed is looked for.

- The drop-in pair needs none of the names that are imported under ``try``.
- Bytes are counted with Flower's own deflating instead (:func:`weigher`), with one warning.
- Nodes handle their messages with Flower's own executor instead (:func:`node_tasks_unsupported`), with one warning.
- The in-process engine has nothing to fall back on, and says what is missing (:func:`require_engine`).
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeVar

import flwr
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, Metadata, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedcomp.errors import ConfigError
from fedcomp.logs import log

_absent = ""
"""The names below that the installed Flower does not have."""

try:
    from flwr.app.message import make_message
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, INT64_MAX_VALUE, ErrorCode
    from flwr.common.serde import (
        recorddict_from_proto,
        user_config_from_proto,
        user_config_to_proto,
    )
    from flwr.common.serde_utils import (
        error_from_proto,
        error_to_proto,
        metadata_from_proto,
        metadata_to_proto,
        record_value_dict_from_proto,
        record_value_dict_to_proto,
    )
    from flwr.proto.message_pb2 import Context as ProtoContext
    from flwr.proto.message_pb2 import Message as ProtoMessage
    from flwr.proto.recorddict_pb2 import ConfigRecord as ProtoConfigRecord
    from flwr.proto.recorddict_pb2 import ConfigRecordValue as ProtoConfigRecordValue
    from flwr.proto.recorddict_pb2 import MetricRecord as ProtoMetricRecord
    from flwr.proto.recorddict_pb2 import MetricRecordValue as ProtoMetricRecordValue
    from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
    from flwr.supercore.constant import HEAD_BODY_DIVIDER, HEAD_VALUE_DIVIDER, SYSTEM_MESSAGE_TYPE
    from flwr.supercore.date import now
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    _absent = str(error)
    # Other modules import these by name.
    ErrorCode = Run = None  # type: ignore[assignment, misc]

__all__ = [
    "SUPERLINK_NODE_ID",
    "ErrorCode",
    "IdentityClaim",
    "NodeTask",
    "NodeTasks",
    "Packed",
    "Packer",
    "Run",
    "Unpacker",
    "WrappedApp",
    "abandon_task",
    "acting_as",
    "adopt_identity",
    "build_bundle",
    "claim_identity",
    "content_from_bytes",
    "content_to_bytes",
    "context_from_bytes",
    "context_to_bytes",
    "current_identity",
    "engine_unsupported",
    "error_from_superlink",
    "filled",
    "load_bundle",
    "make_array",
    "mods_of",
    "node_tasks_unsupported",
    "refuse_task",
    "release_identity",
    "require_engine",
    "run_task",
    "set_message_id",
    "set_source",
    "unpack",
    "unpack_bundle",
    "weigher",
]

SUPERLINK_NODE_ID: Final = 1
"""Node id of the SuperLink."""

_ID_LENGTH = 64
"""Length of an object id: a SHA-256 in hexadecimal."""

Record = ArrayRecord | ConfigRecord | MetricRecord
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)

_SCALARS: Final[Mapping[type, str]] = {bool: "bool", int: "sint64", float: "double", str: "string", bytes: "bytes"}
"""By type, the name under which Flower writes a value."""

_PLAIN_TYPES: Final[Mapping[type, tuple[type, ...]]] = {
    ConfigRecord: (bool, int, float, str, bytes),
    MetricRecord: (float, int),
}
"""The types that Flower looks for in the values of a record, in this order."""

Identity = tuple[int | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Packed:
    """A message as Flower sends it: every nested object deflated, under its id.

    ``wire`` is the number of bytes that cross a deployment's connection: all distinct objects, the tree of their ids,
    and the message's own metadata.
    """

    root: str
    contents: dict[str, bytes]
    wire: int


class Packer:
    """Deflates messages; records that several messages of one batch share are deflated once.

    The bytes are those of Flower's own ``deflate()``, which the tests compare. That asks every object for its id and
    for that of each of its children, and so deflates and hashes all but the leaves several times.

    A packer lives for one batch only, since it recognises what is shared by object identity.
    """

    def __init__(self) -> None:
        # The objects are kept beside what was made of them, so that no identity is reused while the packer lives.
        self._done: dict[int, tuple[Record, _Tree, dict[str, bytes]]] = {}

    def pack(self, message: Message) -> Packed:
        """Return ``message`` with every nested object deflated; the message itself is not changed."""
        contents: dict[str, bytes] = {}
        children: list[_Tree] = []
        if message.has_content():
            content = message.content
            trees = {name: self._pack(record, contents) for name, record in content.items()}
            children.append(_deflate_references(content, trees, contents))
        error = error_to_proto(message.error) if message.has_error() else None
        envelope = ProtoMessage(metadata=metadata_to_proto(message.metadata), error=error)
        # The id is a hash of the body, which therefore cannot hold it.
        envelope.metadata.message_id = ""
        body = _message_object(envelope, children)
        root = hashlib.sha256(body).hexdigest()
        contents[root] = body
        wire = sum(map(len, contents.values())) + _tree(root, children).size
        wire += _envelope_bytes(envelope, children, body)
        return Packed(root, contents, wire)

    def _pack(self, record: Record, contents: dict[str, bytes]) -> _Tree:
        """Put ``record`` and its contents into ``contents``; return the tree of their ids."""
        known = self._done.get(id(record))
        if known is None:
            own: dict[str, bytes] = {}
            if isinstance(record, ArrayRecord):
                tree = _deflate_references(record, {k: _deflate_array(a, own) for k, a in record.items()}, own)
            else:
                proto = ProtoConfigRecord() if isinstance(record, ConfigRecord) else ProtoMetricRecord()
                _write_values(record, proto)
                tree = _deflated(type(record), (), proto.SerializeToString(), own)
            known = self._done[id(record)] = (record, tree, own)
        contents.update(known[2])
        return known[1]


class _Tree(NamedTuple):
    """The id of a deflated object, and the size of the tree of ids that Flower sends for it and its contents."""

    object_id: str
    size: int


def _tree(object_id: str, children: Iterable[_Tree]) -> _Tree:
    # As a protocol buffer: each field is a tag of one byte, its length in groups of seven bits, and what it holds.
    sizes = (len(object_id), *(child.size for child in children))
    return _Tree(object_id, sum(1 + max(1, (size.bit_length() + 6) // 7) + size for size in sizes))


def _deflated(kind: type, children: Iterable[_Tree], body: bytes | memoryview, contents: dict[str, bytes]) -> _Tree:
    """Put one object with its own data ``body`` into ``contents``; return the tree of its ids."""
    # Equal children are one object.
    distinct = {tree.object_id: tree for tree in children}
    content = _object(kind, distinct, body)
    object_id = hashlib.sha256(content).hexdigest()
    contents[object_id] = content
    return _tree(object_id, distinct.values())


def _object(kind: type, children: Iterable[str], body: bytes | memoryview) -> bytes:
    """Return an object as Flower sends it: its kind, the ids of its children, the length of its body, and the body."""
    head = HEAD_VALUE_DIVIDER.join((kind.__qualname__, ",".join(children), str(len(body))))
    return b"".join((head.encode(), HEAD_BODY_DIVIDER, body))


def _deflate_references(
    item: RecordDict | ArrayRecord, trees: Mapping[str, _Tree], contents: dict[str, bytes]
) -> _Tree:
    """Deflate an object that holds other, already deflated objects by name."""
    body = json.dumps({name: tree.object_id for name, tree in trees.items()}).encode()
    return _deflated(type(item), trees.values(), body, contents)


def _deflate_array(array: Array, contents: dict[str, bytes]) -> _Tree:
    """Deflate an array and its chunks; equal chunks are one object."""
    data = memoryview(array.data)
    chunks = [
        _deflated(ArrayChunk, (), data[start : start + FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE], contents)
        for start in range(0, len(data), FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)
    ]
    places = {chunk.object_id: None for chunk in chunks}
    order = {chunk_id: place for place, chunk_id in enumerate(places)}
    fields = {
        "dtype": array.dtype,
        "shape": array.shape,
        "stype": array.stype,
        "arraychunk_ids": [order[chunk.object_id] for chunk in chunks],
    }
    return _deflated(Array, chunks, json.dumps(fields).encode(), contents)


def _write_values(record: ConfigRecord | MetricRecord, proto: ProtoConfigRecord | ProtoMetricRecord) -> None:
    """Write a record of plain values into an empty ``proto`` as Flower does."""
    # Also a record without entries is one.
    proto.SetInParent()
    value_type = ProtoConfigRecordValue if isinstance(record, ConfigRecord) else ProtoMetricRecordValue
    allowed = _PLAIN_TYPES[type(record)]
    for key, value in record.items():
        item = proto.items.add(key=key)
        name = _SCALARS.get(type(value))
        # Lists, large integers and subclasses are Flower's to write; nearly all values are none of these.
        if name is None or (isinstance(value, int) and value > INT64_MAX_VALUE):
            item.value.CopyFrom(record_value_dict_to_proto({key: value}, list(allowed), value_type)[key])  # type: ignore[arg-type]
        else:
            setattr(item.value, name, value)


def _message_object(envelope: ProtoMessage, children: Sequence[_Tree]) -> bytes:
    return _object(Message, [tree.object_id for tree in children], envelope.SerializeToString(deterministic=True))


def _envelope_bytes(envelope: ProtoMessage, children: Sequence[_Tree], body: bytes) -> int:
    """Size of the metadata that accompanies the objects, with ids of the deployment's length.

    The simulation engine names messages by 36-character UUIDs and an unsent message has no name yet; a deployment
    always has 64 characters. Counting those makes the figure the same on every engine. The id a reply answers is in
    ``body``, the deflated message, too.
    """
    grown = 0
    # 0: a message that answers none.
    if len(envelope.metadata.reply_to_message_id) not in (0, _ID_LENGTH):
        envelope.metadata.reply_to_message_id = "0" * _ID_LENGTH
        grown = len(_message_object(envelope, children)) - len(body)
    envelope.metadata.message_id = "0" * _ID_LENGTH
    if not envelope.HasField("error"):
        # A deployment sends the envelope with an empty content; the objects follow by themselves.
        envelope.content.SetInParent()
    return int(envelope.ByteSize()) + grown


class Unpacker:
    """Inflates messages; array data that several messages of one batch share is put together once.

    Every message gets Array objects of its own. Only their data, which is immutable bytes, may be the same.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def unpack(self, packed: Packed) -> Message:
        """Return a new message made of ``packed``'s bytes alone; no mutable object is shared with anyone."""
        _, children, body = _opened(packed.contents[packed.root])
        envelope = ProtoMessage.FromString(body)
        content = error = None
        if envelope.HasField("error"):
            error = error_from_proto(envelope.error)
        else:
            records: dict[str, Record] = {}
            names = json.loads(_opened(packed.contents[children[0]])[2])
            # Equal records are one object here, as they are in a deployment.
            for record_id in dict.fromkeys(names.values()):
                records[record_id] = self._record(packed.contents[record_id], packed.contents)
            content = filled(RecordDict(), {name: records[record_id] for name, record_id in names.items()})
        message = make_message(metadata_from_proto(envelope.metadata), content, error)
        set_message_id(message, packed.root)
        return message

    def _record(self, content: bytes, contents: Mapping[str, bytes]) -> Record:
        kind, _, body = _opened(content)
        if kind == ArrayRecord.__qualname__:
            references = json.loads(body)
            return filled(ArrayRecord(), {name: self._array(i, contents) for name, i in references.items()})
        if kind == ConfigRecord.__qualname__:
            return _values_from_proto(ConfigRecord(), ProtoConfigRecord.FromString(body))
        return _values_from_proto(MetricRecord(), ProtoMetricRecord.FromString(body))

    def _array(self, object_id: str, contents: Mapping[str, bytes]) -> Array:
        known = self._arrays.get(object_id)
        if known is None:
            known = self._arrays[object_id] = _inflate_array(contents[object_id], contents)
        # An Array can be written to, so no two messages share one.
        return make_array(known.dtype, known.shape, known.stype, known.data)


def unpack(packed: Packed) -> Message:
    """Return a new message made of ``packed``'s bytes alone."""
    return Unpacker().unpack(packed)


@cache
def engine_unsupported() -> str:
    """Return why messages cannot be taken apart and put together here as Flower does it; empty when they can.

    Beside the names, what is made with them is looked at: one small message, as Flower deflates it itself.
    """
    if _absent:
        return f"Flower {flwr.__version__} lacks a private part: {_absent}"
    try:
        values: dict[str, Any] = {"flag": True, "number": -3, "real": 0.5, "text": "a", "bytes": b"a", "list": [1, 2]}
        content = RecordDict(
            {
                "arrays": ArrayRecord({data: Array("uint8", (len(data),), "x", data.encode()) for data in ("", "abc")}),
                "config": ConfigRecord(values),
                "metrics": MetricRecord({"loss": 0.5, "count": 3}),
            }
        )
        metadata = Metadata(1, "", SUPERLINK_NODE_ID, 2, "", "", now().timestamp(), 9.0, "train")
        sent = make_message(metadata, content)
        packed = Packer().pack(sent)
        if packed.contents != _deflated_by_flower(sent):
            return f"Flower {flwr.__version__} deflates messages in another way"
        if _deflated_by_flower(unpack(packed)) != packed.contents:
            return f"Flower {flwr.__version__} inflates messages in another way"
        # Who a message is from, Message() asks for.
        with acting_as(1, SUPERLINK_NODE_ID):
            if Message(content, 2, "train").metadata.src_node_id != SUPERLINK_NODE_ID:
                return f"Flower {flwr.__version__} keeps the identity of a process elsewhere"
    # Whatever a name that means something else raises.
    except Exception as error:
        return f"Flower {flwr.__version__} works in another way: {type(error).__name__}: {error}"
    return ""


def require_engine() -> None:
    """Refuse to go on where :func:`engine_unsupported` gives a reason.

    Raises
    ------
    ConfigError
        With the reason.
    """
    if reason := engine_unsupported():
        raise ConfigError(
            f"this needs Flower's own form of messages: {reason}. Flower's simulation and deployments work"
        )


def _deflated_by_flower(item: Any) -> dict[str, bytes]:
    """Return an object and its contents, deflated by Flower, by id."""
    found: dict[str, bytes] = {}
    for child in (item.children or {}).values():
        found |= _deflated_by_flower(child)
    return {**found, item.object_id: item.deflate()}


def _tree_by_flower(item: Any) -> _Tree:
    return _tree(item.object_id, [_tree_by_flower(child) for child in (item.children or {}).values()])


def _weigh_by_flower(message: Message) -> int:
    contents = _deflated_by_flower(message)
    # The metadata goes a second time beside the objects, with the message's own id in place of that of its content.
    return sum(map(len, contents.values())) + _tree_by_flower(message).size + len(contents[message.object_id])


def weigher() -> Callable[[Message], int]:
    """Return the function that weighs the messages of one batch: bytes on a deployment's wire.

    Where :func:`engine_unsupported` gives a reason it has Flower deflate them: slower, and within 100
    bytes a message. The log says so once.
    """
    if reason := engine_unsupported():
        _warn_of_weighing(reason)
        return _weigh_by_flower
    packer = Packer()
    return lambda message: packer.pack(message).wire


@cache
def _warn_of_weighing(reason: str) -> None:
    log.warning("bytes are counted by Flower's own serialisation, which takes longer: %s", reason)


def _opened(content: bytes) -> tuple[str, list[str], bytes]:
    """Return the kind of a deflated object, the ids of its children, and its body."""
    end = content.index(HEAD_BODY_DIVIDER)
    kind, children, _ = content[:end].decode().split(HEAD_VALUE_DIVIDER)
    return kind, children.split(",") if children else [], content[end + len(HEAD_BODY_DIVIDER) :]


def _inflate_array(content: bytes, contents: Mapping[str, bytes]) -> Array:
    """Do the same as ``Array.inflate`` with one copy of the data instead of three."""
    _, chunk_ids, body = _opened(content)
    fields = json.loads(body)
    # The head lists each distinct chunk once; the body says by index in which order they follow.
    chunks = [contents[chunk_ids[index]] for index in fields["arraychunk_ids"]]
    bodies = [memoryview(c)[c.index(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER) :] for c in chunks]
    return make_array(fields["dtype"], tuple(fields["shape"]), fields["stype"], b"".join(bodies))


def make_array(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    """Return ``Array(dtype, shape, stype, data)`` of values that are known to be of these types.

    Flower's constructor tells its three ways of being called apart first, which takes longer than to copy a small
    tensor.
    """
    array = Array.__new__(Array)
    array.__dict__.update(dtype=dtype, shape=shape, stype=stype, data=data)
    return array


def filled(record: R, entries: Mapping[str, Any]) -> R:
    """Put ``entries``, known to be of the right types, into a new record; return it.

    Flower checks each entry by itself, and an ArrayRecord makes another Array of each that it is given.
    """
    record.__dict__["_data"].update(entries)
    return record


def _values_from_proto(record: R, proto: ProtoConfigRecord | ProtoMetricRecord) -> R:
    return filled(record, record_value_dict_from_proto({item.key: item.value for item in proto.items}))


def set_message_id(message: Message, message_id: str) -> None:
    """Name ``message`` the way an engine does when it is pushed."""
    message.metadata.__dict__["_message_id"] = message_id


def set_source(message: Message, node_id: int) -> None:
    """Set the node a reply comes from."""
    message.metadata.__dict__["_src_node_id"] = node_id


def error_from_superlink(
    run_id: int, reply_to: str, code: int, reason: str, instruction: Metadata | None = None
) -> Message:
    """Return the error reply a SuperLink makes on behalf of a node: its source is the SuperLink, not the node."""
    metadata = Metadata(
        run_id=run_id,
        message_id="",
        src_node_id=SUPERLINK_NODE_ID,
        dst_node_id=SUPERLINK_NODE_ID,
        reply_to_message_id=reply_to,
        group_id=instruction.group_id if instruction else "",
        message_type=instruction.message_type if instruction else SYSTEM_MESSAGE_TYPE,
        created_at=now().timestamp(),
        ttl=instruction.ttl if instruction else 0,
    )
    # As Flower's Message() does: the property raises KeyError where it was never set.
    metadata.delivered_at = ""
    return make_message(metadata, error=Error(code, reason))


def context_to_bytes(context: Context) -> bytes:
    """Serialise a client's context the way a SuperNode ships it to the app process."""
    proto = ProtoContext(
        run_id=context.run_id,
        node_id=context.node_id,
        node_config=user_config_to_proto(context.node_config),
        run_config=user_config_to_proto(context.run_config),
        series_id=context.series_id,
    )
    _write_records(context.state, proto.state)
    return bytes(proto.SerializeToString())


def context_from_bytes(data: bytes | memoryview) -> Context:
    """Return a new context from its serialised form, which :func:`context_to_bytes` has written."""
    proto = ProtoContext.FromString(data)
    return Context(
        run_id=proto.run_id,
        node_id=proto.node_id,
        node_config=user_config_from_proto(proto.node_config),
        state=_records_from_proto(proto.state),
        run_config=user_config_from_proto(proto.run_config),
        series_id=proto.series_id,
    )


def _write_records(records: RecordDict, proto: ProtoRecordDict) -> None:
    """Write ``records`` into an empty ``proto`` as Flower does, in place.

    In place, because a finished message that is put into another one is copied with its arrays, once for each level.
    """
    # Also no records are a content.
    proto.SetInParent()
    for name, record in records.items():
        item = proto.items.add(key=name)
        if isinstance(record, ArrayRecord):
            item.array_record.SetInParent()
            for key, array in record.items():
                value = item.array_record.items.add(key=key).value
                value.dtype, value.stype, value.data = array.dtype, array.stype, array.data
                value.shape.extend(array.shape)
        elif isinstance(record, ConfigRecord):
            _write_values(record, item.config_record)
        else:
            _write_values(record, item.metric_record)


def _records_from_proto(proto: ProtoRecordDict) -> RecordDict:
    records: dict[str, Record] = {}
    for item in proto.items:
        field = item.WhichOneof("value")
        if field == "array_record":
            arrays = {a.key: a.value for a in item.array_record.items}
            made = {k: make_array(a.dtype, tuple(a.shape), a.stype, a.data) for k, a in arrays.items()}
            records[item.key] = filled(ArrayRecord(), made)
        elif field == "config_record":
            records[item.key] = _values_from_proto(ConfigRecord(), item.config_record)
        else:
            records[item.key] = _values_from_proto(MetricRecord(), item.metric_record)
    return filled(RecordDict(), records)


def content_to_bytes(content: RecordDict) -> bytes:
    """Serialise a message's content, records and entries in their order; the same content gives the same bytes."""
    require_engine()
    proto = ProtoRecordDict()
    _write_records(content, proto)
    return bytes(proto.SerializeToString(deterministic=True))


def content_from_bytes(data: bytes) -> RecordDict:
    """Return the content :func:`content_to_bytes` serialised.

    Raises
    ------
    ValueError
        When the bytes, which may come from anybody, are no content. Whoever reads the records checks them.
    """
    require_engine()
    try:
        return recorddict_from_proto(ProtoRecordDict.FromString(data))
    # Flower's converters take a well-formed proto for granted, and fail on others as Python happens to.
    except (DecodeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{len(data)} bytes are not message content: {error}") from error


def current_identity() -> Identity:
    """Return (run id, node id, task id) of this process as Flower knows them; None where unset."""
    return TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id


def adopt_identity(identity: Identity) -> None:
    """Set what :func:`current_identity` returns; ``Message()`` reads it."""
    run_id, node_id, task_id = identity
    # The properties accept no None, but "unset" has to be restorable.
    for name, value in (("_run_id", run_id), ("_node_id", node_id), ("_task_id", task_id)):
        setattr(TaskIdentity, name, value)


@dataclass(eq=False, slots=True)
class IdentityClaim:
    """One holder's place in the order of those who set the process identity.

    Attributes
    ----------
    identity, former : tuple
        What the holder set, and what is to return when it lets go.
    """

    identity: Identity
    former: Identity


_CLAIMS: list[IdentityClaim] = []
"""Claims that were not released, the latest last. A property of the process, as the identity itself is; not
thread-safe, as it is not. A holder that never lets go leaves one small entry here."""


def claim_identity(identity: Identity) -> IdentityClaim:
    """Set the process identity until the claim that is returned is released; later claims come on top."""
    claim = IdentityClaim(identity, current_identity())
    _CLAIMS.append(claim)
    adopt_identity(identity)
    return claim


def release_identity(claim: IdentityClaim) -> None:
    """Take ``claim`` out of the order, in which it may stand anywhere; releasing it again changes nothing.

    Under a later claim the identity stays, and what was there before ``claim`` returns when the later one goes. The
    latest claim gives the former identity back, unless someone without a claim has set another one since.
    """
    index = next((i for i, held in enumerate(_CLAIMS) if held is claim), None)
    if index is None:
        return
    del _CLAIMS[index]
    if index < len(_CLAIMS):
        later = _CLAIMS[index]
        # The later claim would give back what this holder set, long after the holder has gone.
        if later.former == claim.identity:
            later.former = claim.former
    elif current_identity() == claim.identity:
        adopt_identity(claim.former)


@contextmanager
def acting_as(run_id: int, node_id: int, task_id: int = 1) -> Iterator[None]:
    """Let the code inside create messages as the given node; the former identity returns whatever happens."""
    # No claim: what is inside ends before this block does, so plain nesting restores the right one.
    before = current_identity()
    adopt_identity((run_id, node_id, task_id))
    try:
        yield
    finally:
        adopt_identity(before)


Handler = Callable[[Message, Context], Message]


def mods_of(app: ClientApp) -> Sequence[Any]:
    """Return the mods an app was made with."""
    return app._mods


class WrappedApp(ClientApp):
    """An app inside of mods that see every message, whether or not the app has a handler for it.

    Flower looks for a handler before it runs any mod, and takes mods only when an app is made. Here ``app`` may have
    handlers already; later ones can be registered with either.

    Parameters
    ----------
    app : ClientApp
        Gets the messages that ``handlers`` has no handler for.
    handlers : mapping of str to callable
        By message type; the app's own mods stand around them, too.
    mods : sequence of callable
        The outermost first.

    Raises
    ------
    ConfigError
        When the app has a handler for one of these message types, now or later.
    """

    def __init__(
        self,
        app: ClientApp,
        handlers: Mapping[str, Handler],
        mods: Sequence[Callable[[Message, Context, Handler], Message]],
    ) -> None:
        super().__init__()
        # The dictionary of handlers is shared with the app that was given, not its lifespan, which has to be outermost.
        self._inner = copy.copy(app)
        self._lifespan, self._inner._lifespan = app._lifespan, self._lifespan
        # Flower puts an app's mods around a handler when it is registered; these handlers never are.
        self._handlers = {kind: _inside(app._mods, handler) for kind, handler in handlers.items()}
        for kind in app._registered_funcs:
            # Flower registers a handler without an action as "train.default".
            self._require_free(*kind.split("."))
        # ClientApp calls _call, where it is set, before it looks for a handler.
        self._call = _inside(mods, self._innermost)

    def _innermost(self, message: Message, context: Context) -> Message:
        handler = self._handlers.get(message.metadata.message_type, self._inner)
        return handler(message, context)

    def _require_free(self, category: str, action: str) -> None:
        kind = category if action == "default" else f"{category}.{action}"
        if kind in self._handlers:
            raise ConfigError(
                f"messages of type {kind!r} belong to a half of client(); give the app's handler another name"
            )

    def train(self, action: str = "default", *, mods: list[Any] | None = None) -> Callable[[Handler], Handler]:
        """Register a train function with the app inside."""
        self._require_free("train", action)
        return self._inner.train(action, mods=mods)

    def evaluate(self, action: str = "default", *, mods: list[Any] | None = None) -> Callable[[Handler], Handler]:
        """Register an evaluate function with the app inside."""
        self._require_free("evaluate", action)
        return self._inner.evaluate(action, mods=mods)

    def query(self, action: str = "default", *, mods: list[Any] | None = None) -> Callable[[Handler], Handler]:
        """Register a query function with the app inside."""
        self._require_free("query", action)
        return self._inner.query(action, mods=mods)


def _inside(mods: Sequence[Callable[[Message, Context, Handler], Message]], call: Handler) -> Handler:
    """Return ``call`` wrapped in ``mods``, the outermost first."""
    for mod in reversed(mods):
        call = partial(_call_mod, mod, call)
    return call


def _call_mod(
    mod: Callable[[Message, Context, Handler], Message], call_next: Handler, message: Message, context: Context
) -> Message:
    return mod(message, context, call_next)


_RUNNER: Final = "flwr.supernode.runtime.run_clientapp"
_MESSAGE_WAIT: Final = (100, 0.05)

_RUNNER_CALLS: Final[Mapping[str, Sequence[str]]] = {
    "run_clientapp": (
        *("runtime_api_address", "token", "insecure", "certificates", "parent_pid", "runtime_dependency_install"),
    ),
    "pull_task_input": ("client",),
    "push_message": ("client", "message", "context"),
    "push_task_output": ("client", "context", "sub_status", "details"),
    # Bound in the runner, where others take their places.
    "install_from_fab": ("fab_file",),
    "get_load_client_app_fn": ("default_app_ref", "app_path", "multi_app"),
}
"""The functions of Flower's runner of client apps that are called here, with their positional arguments."""


def node_tasks_unsupported() -> str:
    """Return why this Flower's messages cannot be handled by :func:`run_task`; empty when they can."""
    try:
        parts, runner = _runtime(), _runner()
        for name, given in _RUNNER_CALLS.items():
            found = signature(getattr(runner, name)).parameters
            later = list(found.values())[len(given) :]
            if tuple(found)[: len(given)] != tuple(given) or any(p.default is Parameter.empty for p in later):
                return f"Flower {flwr.__version__} has {name}() with other arguments: {', '.join(found)}"
        # Put in the runner's place of it, and asked for these.
        getattr(runner, "RuntimeHttpClient")  # noqa: B009
        for name in ("AcquireTask", "PullMessages", "from_server_address", "close"):
            getattr(parts.client, name)
        # Made as they are when a node starts.
        parts.acquire_request(supported_task_types=["flwr-clientapp"])
        parts.pull_request()
        parts.version(component_name="SuperExec")
        parts.secret(master_secret=b"secret", protected_methods=set())
        parts.token("token")
        signature(parts.client.from_server_address).bind("", True, None, [])
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"Flower {flwr.__version__} misses a part of its executor: {error}"
    return ""


class _Runtime(NamedTuple):
    client: Any
    acquire_request: Any
    pull_request: Any
    version: Any
    secret: Any
    token: Any


@cache
def _runtime() -> _Runtime:
    """Import the connection to a SuperNode, which only executors of nodes need."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullAppMessagesRequest
    from flwr.supercore.interceptors import (
        RuntimeTokenHttpInterceptor,
        RuntimeVersionHttpInterceptor,
        SuperExecAuthHttpInterceptor,
    )
    from flwr.supercore.runtime import RuntimeHttpClient

    class Patient(RuntimeHttpClient):
        """Waits for a task's message. A SuperNode creates the task before its message, and a forked process can ask in
        between. Flower's own process takes seconds to start."""

        def PullMessages(self, request: Any) -> Any:
            tries, pause = _MESSAGE_WAIT
            for _ in range(tries):
                response = super().PullMessages(request)
                if response.messages_list:
                    break
                time.sleep(pause)
            return response

    return _Runtime(
        Patient,
        AcquireTaskRequest,
        PullAppMessagesRequest,
        RuntimeVersionHttpInterceptor,
        SuperExecAuthHttpInterceptor,
        RuntimeTokenHttpInterceptor,
    )


def _runner() -> ModuleType:
    return importlib.import_module(_RUNNER)


@dataclass(frozen=True, slots=True)
class NodeTask:
    """A message that waits on a SuperNode.

    Attributes
    ----------
    token : str
        Opens it, and nothing else.
    bundle : str
        SHA-256, in hexadecimal, of the app bundle it is for: what the SuperLink has said.
    """

    token: str
    bundle: str


REFUSALS: Final = 5
"""Requests in a row that a SuperNode refuses before the secret counts as the wrong one."""


class NodeTasks:
    """The messages that wait on a SuperNode with ``--isolation process``, as Flower's SuperExec takes them.

    Parameters
    ----------
    address : str
        ``HOST:PORT`` of its runtime API, on this machine: there is no TLS.
    secret : bytes or None
        What the SuperNode was given as ``--superexec-auth-secret-file``.
    """

    def __init__(self, address: str, secret: bytes | None) -> None:
        parts = _runtime()
        interceptors = [parts.version(component_name="SuperExec")]
        if secret is not None:
            interceptors.append(
                parts.secret(master_secret=secret, protected_methods={"/flwr.proto.Runtime/AcquireTask"})
            )
        # No retries: the caller has to notice that it is to stop.
        self._client = parts.client.from_server_address(address, True, None, interceptors)
        self._request = parts.acquire_request(supported_task_types=["flwr-clientapp"])
        self._address = address
        self._refused = 0

    def acquire(self) -> NodeTask | None:
        """Take the next message, if one waits.

        Raises
        ------
        ConnectionError
            When the SuperNode does not answer, or refuses a request that may have been signed by another clock than it
            was read by: while a request is under way the clock may be set.
        ConfigError
            When it refuses this executor again and again.
        """
        import httpx

        try:
            response = self._client.AcquireTask(self._request)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            self._refused += status in (401, 403)
            if self._refused >= REFUSALS:
                raise ConfigError(
                    f"the SuperNode at {self._address} refuses this executor (HTTP {status}); give both the same "
                    "secret file"
                ) from error
            raise ConnectionError(f"HTTP {status}") from error
        except (httpx.HTTPError, ValueError) as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        except SystemExit as error:
            # Flower's way to refuse a version; a signal that ends this process comes with status 0.
            if not error.code:
                raise
            raise ConfigError(f"the SuperNode at {self._address} is of another Flower version; see above") from error
        self._refused = 0
        if not response.HasField("task") or not response.token:
            return None
        return NodeTask(response.token, response.task.fab_hash)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def unpack_bundle(content: bytes) -> Path:
    """Unpack an app bundle into the node's Flower home, where it is not there yet; return its folder."""
    from flwr.cli.install import install_from_fab

    return Path(install_from_fab(content, skip_prompt=True))


def load_bundle(fab_id: str, version: str, bundle: str) -> ClientApp:
    """Import the client app of a bundle that is unpacked."""
    from flwr.clientapp.utils import get_load_client_app_fn

    return get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)(fab_id, version, bundle)


def run_task(
    address: str, token: str, unpack: Callable[[bytes], Path], load: Callable[[str, str, str], ClientApp]
) -> None:
    """Do with a message what Flower's ``flwr-clientapp`` does, and leave by :class:`SystemExit` as it does.

    It changes this process for good, which should be one of its own.

    Parameters
    ----------
    address, token : str
        Where the message waits.
    unpack, load : callable
        In the place of :func:`unpack_bundle` and :func:`load_bundle`. What they raise, the server gets to read.
    """
    runner = _runner()
    # The module's own names, not the functions: they are bound there.
    for name, value in {
        "RuntimeHttpClient": _runtime().client,
        "install_from_fab": lambda content, skip_prompt: unpack(content),
        "get_load_client_app_fn": lambda **options: load,
    }.items():
        setattr(runner, name, value)
    # Without a process to watch: that would be polled, and end by pushing an output, which makes a SuperNode wait for
    # ever for the reply.
    runner.run_clientapp(address, token, True, None, None, False)


def _holder(address: str, token: str) -> Any:
    parts = _runtime()
    interceptors = [parts.version(component_name="flwr-clientapp"), parts.token(token)]
    return parts.client.from_server_address(address, True, None, interceptors)


def refuse_task(address: str, token: str, reason: str) -> None:
    """Answer a message with Flower's error for a bundle that is not trusted; nothing of the bundle is run.

    As :func:`run_task`, it belongs into a process of its own.
    """
    runner, client = _runner(), _holder(address, token)
    message, context, _, _ = runner.pull_task_input(client)
    runner.push_message(client, Message(Error(ErrorCode.INVALID_FAB, reason), reply_to=message), context)
    runner.push_task_output(client, None, "failed", reason)
    client.close()


def abandon_task(address: str, token: str) -> None:
    """Let a task end by the expiry of its token, whose holder has died.

    A SuperNode answers, with error 8, only messages that were pulled; for others it would wait for ever.
    """
    import httpx

    parts = _runtime()
    client = _holder(address, token)
    # Mostly it was pulled, or all was answered and the token is no longer valid.
    with suppress(httpx.HTTPError):
        super(parts.client, client).PullMessages(parts.pull_request())
    client.close()


def build_bundle(folder: Path) -> bytes:
    """Return the bundle of the app in ``folder``, as ``flwr run`` sends it."""
    from flwr.cli.build import build_fab_from_disk

    return build_fab_from_disk(folder)
