"""The client half of coded rounds: one mod, no configuration, outside of all other mods.

The mod takes the complete reply that the app and the other mods made and codes it; it keeps shards for others and
answers the server's queries about them. Messages without a plan pass through untouched, so the same app serves plain
servers.

A construction's client half is a class named in :data:`HANDLERS`, made for each message as ``Class(exchange)`` and
asked to ``answer(call_next)``. :class:`CodedMessage` is what it works with: the plan, who this node is, and its state.
State is read from ``context.state`` (or the node's spool directory) and written once, by :meth:`CodedMessage.save`, as
the last act before the handler returns.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.clients.edge.node_config import PEER_ADDRESS
from fedcomp.clients.half import CallNext, ClientHalf
from fedcomp.clients.messages import asked_config, partition_of
from fedcomp.clients.peers import identity_in, keep_identity, link_tls, own_end, sender_of
from fedcomp.clients.private.mod import discreet, wants_private
from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.flower.coded import (
    BUNDLE,
    CODED,
    HELLO,
    MAX_STORE_BYTES,
    THROUGH_SERVER,
    Header,
    Hello,
    Query,
    speaks,
    take_bundle,
)
from fedcomp.flower.logs import log
from fedcomp.flower.payload import NODE_RECORD, put_node
from fedcomp.flower.protocol import STALE, refusal
from fedcomp.flower.schema import OtherVersion
from fedcomp.flower.state import StaleMessage

if TYPE_CHECKING:
    from fedcomp.coding.peertls import PeerTls
    from fedcomp.coding.sealing import PeerIdentity
    from fedcomp.coding.transport import MemoryStore, ParcelStore, PeerTransport, Sender

HANDLERS: Final[Mapping[str, str]] = {
    "relay": "fedcomp.clients.coded.relay:RelayClient",
    "sumcode": "fedcomp.clients.coded.sums:SumCodeClient",
    "noisysum": "fedcomp.clients.private.distributed_dp:NoisySumClient",
}
"""Where each construction's client half stands; imported when a message asks for it."""

SUMMED_ONLY: Final = ("bounded",)
"""Codecs whose integers get their noise behind the compression mod."""

KEEPS_ROUNDS: Final = 2
"""Parcels of this many rounds are kept: the newest one this node was told about, and the one before."""

REASON: Final = 300
"""Characters of a reason that travels to the server, which keeps no more."""

_META: Final = "fedcomp.coded.meta"
_OWN: Final = "fedcomp.coded.own"
_STORE: Final = "fedcomp.coded.store"


Q = TypeVar("Q", bound=Query)


class Handler(Protocol):
    """A construction's client half; made as ``Class(exchange)``."""

    def answer(self, call_next: CallNext) -> Message:
        """Answer the message of the exchange; ``call_next`` runs the app and the other mods, for training messages."""
        ...


def coded(max_store_bytes: int = MAX_STORE_BYTES) -> ClientHalf:
    """Return the client half of coded rounds.

    Parameters
    ----------
    max_store_bytes : int
        What this node keeps for others at most; the server may ask for less.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> app = client(ClientApp(), only=[coded(), "compression"])
    """
    if isinstance(max_store_bytes, bool) or not isinstance(max_store_bytes, int) or max_store_bytes < 0:
        raise ConfigError(f"max_store_bytes={max_store_bytes!r} is not valid: it must be a whole number >= 0")

    def coded_mod(msg: Message, context: Context, call_next: CallNext) -> Message:
        if not speaks(msg.content):
            if for_sums_only(msg.content):
                reason = "updates that get their noise on the way into a sum are not sent without one"
                return refusal(msg, reason)
            return call_next(msg, context)
        raised: list[Exception] = []
        secret = wants_private(msg.content)

        def guarded(message: Message, ctx: Context) -> Message:
            try:
                if secret:
                    return discreet(msg, lambda: call_next(message, ctx))
                return call_next(message, ctx)
            except Exception as error:
                # Kept to be told apart by identity: an app may raise errors of this package's types itself.
                raised.append(error)
                raise

        try:
            exchange = CodedMessage(msg, context, max_store_bytes)
            if exchange.kind == HELLO:
                return exchange.hello()
            return _handler(exchange).answer(guarded)
        except StaleMessage as error:
            return refusal(msg, f"{STALE}: {error}")
        except FedcompError as error:
            if any(error is known for known in raised):
                raise  # the app's own: it ends as it would without this mod
            return refusal(msg, f"{type(error).__name__}: {error}")

    inner = ("local_privacy", "record_dp", "compression", "private")
    return ClientHalf("coded", coded_mod, outside=inner)


def for_sums_only(content: RecordDict) -> bool:
    """Whether a message asks for a codec whose frames must not leave as they are."""
    try:
        config: Any = asked_config(content)
    except OtherVersion:
        # No frame of this project comes of it.
        return False
    while isinstance(config, Mapping):
        if config.get("id") in SUMMED_ONLY:
            return True
        # Codecs nest: one that must not leave may stand inside another.
        config = config.get("codec")
    return False


def _handler(exchange: CodedMessage) -> Handler:
    name = exchange.query.construction
    if name not in HANDLERS:
        raise StateError(f"the server asks for construction {name!r}; this client knows {', '.join(sorted(HANDLERS))}")
    module, _, attribute = HANDLERS[name].partition(":")
    handler: Handler = getattr(importlib.import_module(module), attribute)(exchange)
    return handler


class CodedMessage:
    """One message of a coded round, on the client.

    Attributes
    ----------
    msg, context
    query : Query
        What every message of the server says; :meth:`take` returns all of it.
    kind : str
        The message type.
    run : bytes
        Names the server's strategy object.
    round : int
    partition : int
        Of this node.
    numbers : dict
        The construction's own scalars, kept from message to message (ConfigRecord values); empty in a new run.
    arrays : dict of str to ndarray
        Its own arrays, kept likewise.
    store : ParcelStore
        What this node keeps for others: in ``context.state``, or in the node's spool directory when shards travel
        between peers and this one can be reached.
    transport : PeerTransport or None
    tls : PeerTls or None
        Key and list of a node whose links are secured.
    """

    def __init__(self, msg: Message, context: Context, max_store_bytes: int = MAX_STORE_BYTES) -> None:
        self.msg = msg
        self.context = context
        self.query = Query.take(msg, partly=True)
        self.kind = msg.metadata.message_type
        self.run, self.round = self.query.run, self.query.round
        self.partition = partition_of(context)
        self.max_store_bytes = min(max_store_bytes, self.query.max_store)
        meta = context.state.config_records.get(_META)
        # What another run left behind is not read: its rounds were counted from their own beginning.
        known = meta is not None and meta["run"] == self.run
        own = context.state.array_records.get(_OWN) if known else None
        self.newest = int(meta["newest"]) if known and meta is not None else 0  # type: ignore[arg-type]
        """Newest round this node was told about in this run, as it was before this message."""
        self.numbers: dict[str, Any] = (
            {k.removeprefix("own."): v for k, v in meta.items() if k.startswith("own.")} if known and meta else {}
        )
        self.arrays: dict[str, NDArray[Any]] = {} if own is None else {k: a.numpy() for k, a in own.items()}
        self._known = known
        self._identity: PeerIdentity | None = None
        self._store: ParcelStore | None = None

    def take(self, schema: type[Q]) -> Q:
        """Return the whole of what the server says."""
        return schema.take(self.msg)

    def asks(self, entry: str) -> bool:
        """Whether the server's message has an entry of this name."""
        return entry in self.msg.content.config_records[CODED]

    # Who this node is.

    @property
    def identity(self) -> PeerIdentity:
        """The node's key pair: made at the first need, kept in the state by :meth:`save`."""
        if self._identity is None:
            self._identity = identity_in(self.context)
        return self._identity

    @functools.cached_property
    def tls(self) -> PeerTls | None:
        """This node's key and the list of the others', where it has them."""
        return link_tls(self.context)

    @property
    def hub(self) -> bool:
        """Whether all shards travel through the server."""
        return self.query.transport == "hub"

    @functools.cached_property
    def transport(self) -> PeerTransport | None:
        """This node's end of its peer links; None when it cannot be reached, or shards travel through the server."""
        return None if self.hub else own_end(self.context, self.partition, self.query.spool, self.max_store_bytes)

    @property
    def sender(self) -> Sender:
        """What shards are sent with between peers."""
        return sender_of(self.context, self.transport)

    def hello(self) -> Message:
        """Answer who this node is."""
        content = RecordDict()
        put_node(content, self.partition)
        self.take(Query)
        Hello(partition=self.partition, **self._self()).put(content)
        self.save()
        return Message(content, reply_to=self.msg)

    def news(self, planned: bytes, signature: bytes) -> dict[str, Any]:
        """Return who this node is where the server does not know it: its state was lost, or it was given keys."""
        known = planned == self.identity.public and bool(signature) == (self.tls is not None)
        return {} if known else self._self()

    def _self(self) -> dict[str, Any]:
        """Return what peers need to reach this node: key and address. The server knows where simulated links lead."""
        from fedcomp.coding.sealkeys import sign

        found: dict[str, Any] = {"public": self.identity.public, "address": ""}
        if PEER_ADDRESS in self.context.node_config and self.transport is not None:
            found["address"] = self.transport.address
        elif self.transport is None and not self.hub:
            found["address"] = THROUGH_SERVER
        if self.tls is not None:
            found["signature"] = sign(self.tls, self.run, self.identity.public)
        return found

    # What it keeps.

    @property
    def store(self) -> ParcelStore:
        """The parcels kept for others."""
        if self._store is None:
            self._store = self._memory() if self.transport is None else self.transport.store
        return self._store

    def _memory(self) -> MemoryStore:
        """Return the store in the state; an empty one in a new run."""
        from fedcomp.coding.errors import TransportError
        from fedcomp.coding.transport import MemoryStore

        held = self.context.state.array_records.get(_STORE) if self._known else None
        if held is not None:
            try:
                return MemoryStore.from_arrays({k: a.numpy() for k, a in held.items()}, self.max_store_bytes)
            except TransportError:
                # The limit was lowered since: what no longer fits is lost to the code, as if this relay had been away.
                log.warning("what this node keeps exceeds the new limit of %d bytes: dropped", self.max_store_bytes)
        return MemoryStore(self.max_store_bytes)

    def keep(self, destination: int, *, most: int) -> tuple[int, list[str]]:
        """Put the parcels that the server forwards into the store; return how many it keeps, and why not the others.

        Parameters
        ----------
        destination : int
            What this node is called as a relay.
        most : int
            How many parcels are read.
        """
        from fedcomp.coding.transport import Parcel

        kept, refused = 0, []
        # Each parcel is measured by itself: one that is too long must not cost the others.
        for data in take_bundle(self.msg.content, most=most, longest=1 << 32):
            try:
                parcel = Parcel.from_bytes(data, self.max_store_bytes)
                if (parcel.run, parcel.round, parcel.destination) != (self.run, self.round, destination):
                    raise StateError("a parcel of another run, round or destination")
                self.store.put(parcel)
                kept += 1
            except FedcompError as error:
                refused.append(str(error)[:REASON])
        return kept, refused

    def enter(self) -> None:
        """Take note of the message's round: older ones are refused, parcels two rounds old are dropped.

        Raises
        ------
        StaleMessage
            When a message of a later round was answered already.
        """
        if self.round < self.newest:
            raise StaleMessage(
                f"this node already takes part in round {self.newest}; a message of round {self.round} came too late"
            )
        if self.round > self.newest:
            self.store.drop_before(self.run, self.round - KEEPS_ROUNDS + 1)

    def save(self) -> None:
        """Write everything into the state; the last act before the answer. Another run's things are dropped."""
        state = self.context.state
        keep_identity(self.context, self.identity)
        numbers = {f"own.{name}": value for name, value in self.numbers.items()}
        # max(): a hello does not pass through enter(), and a late one must not set the round back.
        state[_META] = ConfigRecord({"run": self.run, "newest": max(self.newest, self.round), **numbers})
        _put(state, _OWN, self.arrays)
        # A spool has its parcels on disk already; only a store in memory goes into the state.
        memory = getattr(self._store, "to_arrays", None)
        if memory is not None:
            _put(state, _STORE, memory())
        # This message never opened the store: what a former run left in the state goes unread.
        elif not self._known:
            _put(state, _STORE, {})

    # How it answers.

    def plain_message(self) -> Message:
        """Return the message as the app and the other mods would have got it without coding."""
        content = RecordDict({k: v for k, v in self.msg.content.items() if k not in (CODED, BUNDLE)})
        self.msg.content = content
        return self.msg

    def reply(self, schema: type[Header], content: RecordDict | None = None, **fields: Any) -> Message:
        """Return the answer: a header with ``fields``, who answers, and what ``content`` holds."""
        content = RecordDict() if content is None else content
        if NODE_RECORD not in content:
            put_node(content, self.partition)
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        schema(round=self.round, **values).put(content)
        return Message(content, reply_to=self.msg)


def _put(state: RecordDict, name: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    if arrays:
        state[name] = ArrayRecord({k: Array(np.asarray(a)) for k, a in arrays.items()})
    elif name in state:
        del state[name]
