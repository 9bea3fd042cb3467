"""Every private name of Flower that this project uses, in one place.

Flower moves these helpers in nearly every minor release (the dependency is pinned for that reason). Whoever lifts
the pin repairs this file and nothing else.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from flwr.app import Array, ArrayRecord, Context, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.client.mod.utils import make_ffn
from flwr.clientapp import ClientApp
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.constant import HEAD_BODY_DIVIDER, HEAD_VALUE_DIVIDER, SYSTEM_MESSAGE_TYPE
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_body,
    get_object_head_values_from_object_content,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedcomp.errors import ConfigError

__all__ = [
    "SUPERLINK_NODE_ID",
    "ErrorCode",
    "IdentityClaim",
    "Packed",
    "Packer",
    "Run",
    "Unpacker",
    "WrappedApp",
    "acting_as",
    "adopt_identity",
    "claim_identity",
    "content_from_bytes",
    "content_to_bytes",
    "context_from_bytes",
    "context_to_bytes",
    "current_identity",
    "error_from_superlink",
    "mods_of",
    "release_identity",
    "set_message_id",
    "set_source",
    "unpack",
]

_ID_LENGTH = 64
"""Length of an object id: a SHA-256 in hexadecimal."""

_ARRAY_HEAD = f"{Array.__qualname__}{HEAD_VALUE_DIVIDER}".encode()
"""How a deflated Array begins."""

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

    A packer lives for one batch only, since it recognises what is shared by object identity.
    """

    def __init__(self) -> None:
        # The objects are kept beside what was made of them, so that no identity is reused while the packer lives.
        self._done: dict[int, tuple[InflatableObject, ObjectTree, dict[str, bytes]]] = {}

    def pack(self, message: Message) -> Packed:
        """Return ``message`` with every nested object deflated; the message itself is not changed."""
        contents: dict[str, bytes] = {}
        children: list[ObjectTree] = []
        # One for the whole message: a record is asked for its id by all that hold it, and deflated for each answer.
        with no_object_id_recompute():
            if message.has_content():
                tree, nested = self._pack(message.content)
                contents.update(nested)
                children.append(tree)
            body = message.deflate()
        # What message.object_id would be; asking for that would deflate the message a second time.
        root = hashlib.sha256(body).hexdigest()
        contents[root] = body
        tree = ObjectTree(object_id=root, children=children)
        wire = sum(map(len, contents.values())) + tree.ByteSize() + _envelope_bytes(message, body)
        return Packed(root, contents, wire)

    def _pack(self, item: InflatableObject) -> tuple[ObjectTree, dict[str, bytes]]:
        known = self._done.get(id(item))
        if known is None:
            contents: dict[str, bytes] = {}
            # Inside no_object_id_recompute() Flower believes a stale id if another object of the message happens to
            # have that content; arrays alone notice when they change. So the ids of records are forgotten first.
            item.__dict__.pop("_object_id", None)
            # Metric and configuration records have no children: Flower deflates them as one object.
            nested = list(item.values()) if isinstance(item, RecordDict | ArrayRecord) else []
            trees: dict[str, ObjectTree] = {}
            for child in nested:
                tree, below = _deflate_array(child) if isinstance(child, Array) else self._pack(child)
                trees[tree.object_id] = tree
                contents.update(below)
            object_id = item.object_id
            contents[object_id] = item.deflate()
            # Equal children are one object.
            tree = ObjectTree(object_id=object_id, children=list(trees.values()))
            known = self._done[id(item)] = (item, tree, contents)
        return known[1], known[2]


def _deflate_array(array: Array) -> tuple[ObjectTree, dict[str, bytes]]:
    """Deflate an array and its chunks.

    Flower caches chunks with their ids inside the array. Filling that cache here deflates and hashes each chunk once,
    where Flower's own way does so up to three times per message. It is emptied again: Ray would send it along with the
    data, twice the bytes.
    """
    contents: dict[str, bytes] = {}
    data = memoryview(array.data)
    chunks = []
    for start in range(0, len(data), FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE):
        chunk = ArrayChunk(data[start : start + FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE])
        content = chunk.deflate()
        chunk_id = hashlib.sha256(content).hexdigest()
        contents[chunk_id] = content
        chunks.append((chunk_id, chunk))
    children = [ObjectTree(object_id=chunk_id) for chunk_id in contents]
    # object_id and deflate() below find the chunks here, and do not make and hash them again.
    array.__dict__["_chunks"] = chunks
    try:
        object_id = array.object_id
        contents[object_id] = array.deflate()
    finally:
        array.__dict__.pop("_chunks", None)
    return ObjectTree(object_id=object_id, children=children), contents


def _envelope_bytes(message: Message, body: bytes) -> int:
    """Size of the metadata that accompanies the objects, with ids of the deployment's length.

    The simulation engine names messages by 36-character UUIDs and an unsent message has no name yet; a deployment
    always has 64 characters. Counting those makes the figure the same on every engine. The id a reply answers is in
    ``body``, the deflated message, too.
    """
    metadata = copy.copy(message.metadata)
    metadata.__dict__["_message_id"] = "0" * _ID_LENGTH
    # 0: a message that answers none.
    foreign = len(metadata.reply_to_message_id) not in (0, _ID_LENGTH)
    if foreign:
        metadata.__dict__["_reply_to_message_id"] = "0" * _ID_LENGTH
    error = message.error if message.has_error() else None
    named = make_message(metadata, message.content if error is None else None, error)
    size = int(message_to_proto(remove_content_from_message(named)).ByteSize())
    return size + (len(named.deflate()) - len(body) if foreign else 0)


class Unpacker:
    """Inflates messages; array data that several messages of one batch share is put together once.

    Every message gets Array objects of its own. Only their data, which is immutable bytes, may be the same.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def unpack(self, packed: Packed) -> Message:
        """Return a new message made of ``packed``'s bytes alone; no mutable object is shared with anyone."""
        objects: dict[str, InflatableObject] = {}
        for object_id, content in packed.contents.items():
            if content.startswith(_ARRAY_HEAD):
                known = self._arrays.get(object_id)
                if known is None:
                    known = self._arrays[object_id] = _inflate_array(content, packed.contents)
                # An Array can be written to, so no two messages share one.
                objects[object_id] = Array(known.dtype, known.shape, known.stype, known.data)
        # Contents are kept: a message is unpacked again for a duplicate, an error reply, and every look at its reply.
        inflated = inflate_object_from_contents(
            packed.root, packed.contents, keep_object_contents=True, objects=objects
        )
        message = cast(Message, inflated)
        set_message_id(message, packed.root)
        return message


def unpack(packed: Packed) -> Message:
    """Return a new message made of ``packed``'s bytes alone."""
    return Unpacker().unpack(packed)


def _inflate_array(content: bytes, contents: dict[str, bytes]) -> Array:
    """Do what ``Array.inflate`` does with one copy of the data instead of three."""
    _, chunk_ids, _ = get_object_head_values_from_object_content(content)
    fields = json.loads(get_object_body(content, Array))
    # The head lists each distinct chunk once; the body says by index in which order they follow.
    chunks = [contents[chunk_ids[index]] for index in fields["arraychunk_ids"]]
    bodies = [memoryview(c)[c.index(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER) :] for c in chunks]
    return Array(fields["dtype"], tuple(fields["shape"]), fields["stype"], b"".join(bodies))


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
    return bytes(context_to_proto(context).SerializeToString())


def context_from_bytes(data: bytes) -> Context:
    """Return a new context from its serialised form."""
    return context_from_proto(ProtoContext.FromString(data))


def content_to_bytes(content: RecordDict) -> bytes:
    """Serialise a message's content, records and entries in their order; the same content gives the same bytes."""
    return bytes(recorddict_to_proto(content).SerializeToString(deterministic=True))


def content_from_bytes(data: bytes) -> RecordDict:
    """Return the content :func:`content_to_bytes` serialised.

    Raises
    ------
    ValueError
        When the bytes, which may come from anybody, are no content. Whoever reads the records checks them.
    """
    try:
        return recorddict_from_proto(ProtoRecordDict.FromString(data))
    # Flower's converters take a well-formed proto for granted, and fail on others as Python happens to.
    except (DecodeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{len(data)} bytes are no message content: {error}") from error


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
        self._handlers = {kind: make_ffn(handler, app._mods) for kind, handler in handlers.items()}
        for kind in app._registered_funcs:
            # Flower registers a handler without an action as "train.default".
            self._require_free(*kind.split("."))
        call: Handler = self._innermost
        for mod in reversed(mods):
            call = partial(_call_mod, mod, call)
        # ClientApp calls _call, where it is set, before it looks for a handler.
        self._call = call

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


def _call_mod(
    mod: Callable[[Message, Context, Handler], Message], call_next: Handler, message: Message, context: Context
) -> Message:
    return mod(message, context, call_next)
