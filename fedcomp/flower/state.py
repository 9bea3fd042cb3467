"""Client state that survives faults: acknowledged, generation-stamped, rolled back when a reply was lost.

A reply can be lost after the client has updated its memory. Without care the mass of that payload is gone for ever. So
the client keeps its last reply as *pending* until a later message acknowledges its sequence number; a message that does
not is a negative acknowledgement and puts the mass back. A message that arrives twice gets the stored reply again, so
that what the server consumes and what the client remembers are the same frame. So does one that a restarted server
sends in place of a message whose reply it forgot: the same round, on the same model. The client has trained for it
already, and training again would put its update into the memory twice.

Everything lives in Flower's ``context.state``, is read without being modified, and is written once, as the last act
before a handler returns: an exception in between leaves the state as it was on every engine.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from numpy.typing import NDArray

from fedcomp.codecs import Codec, State, get_codec
from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.flower.logs import log
from fedcomp.flower.payload import NODE_RECORD, take_frame
from fedcomp.flower.protocol import UPDATE, Announcement
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.schema import Document, Schema, SchemaError
from fedcomp.layout import Layout
from fedcomp.rules import Data, Int, Text
from fedcomp.stateful import epoch_of

_MEMORY: Final = "fedcomp.uplink.memory"
_PENDING: Final = "fedcomp.uplink.reply/"
_MODEL: Final = "fedcomp.replica.model"

MOST_BYTES: Final = 2**31 - 2**20
"""Of a node's state, which Flower keeps as one serialised message: those end at 2 GiB."""


UNSETTLED: Final = (
    "whether its last update was used is not known here, and it is not sent again; a node with a key keeps its id"
)


class StaleMessage(StateError):
    """An older message arrived after a newer one was answered; answering it would count an update twice."""


@dataclass(frozen=True)
class UplinkRecord(Schema, key="fedcomp.uplink"):
    """What a node keeps beside its codec memory and its last reply.

    Attributes
    ----------
    generation, pending : int
        Sequence numbers of the message that created the memory, and of the one answered last.
    session, layout : bytes
        The server's session; the digest of the layout.
    codec : dict
        What made the last frame.
    lineage : str
        See :func:`lineage`.
    asked : bytes
        Names what the message answered last asked for (:func:`asked_of`); empty where that is not known.
    node : bytes
        The id under which the node answered it; empty where that is not known.
    made : int
        Sequence number of the message that the last reply was made for. A restarted server asks for it under another
        one, which is then ``pending``; 0 in states of before.
    """

    generation: Annotated[int, Int()]
    pending: Annotated[int, Int()]
    session: Annotated[bytes, Data(256, least=1)]
    codec: Annotated[Mapping[str, Any], Document(1 << 16)]
    lineage: Annotated[str, Text(1 << 16)]
    layout: Annotated[bytes, Data(256)]
    asked: Annotated[bytes, Data(64)] = b""
    node: Annotated[bytes, Data(8)] = b""
    made: Annotated[int, Int(absent=0)] = 0


@dataclass(frozen=True)
class ReplicaRecord(Schema, key="fedcomp.replica"):
    """Which version of the model a node holds."""

    version: Annotated[int, Int()]


@dataclass
class Uplink:
    """One training message's view of the client's codec memory.

    Attributes
    ----------
    state : State
        The memory to encode with, rolled back when the last reply was not acknowledged.
    generation : int
        The sequence number of the message that created this memory: another number means the memory was lost.
    redelivery : RecordDict or None
        The stored reply when this very message was already answered; it must be sent again as it is.
    repeated : bool
        Whether it answered a message in whose place a restarted server has sent this one: see :meth:`repeat`.
    rolled_back, fresh : bool
        What happened to the memory, for the reply's header.
    unsettled : bool
        Whether the node came back under another id, of which the server knows nothing. What became of its last frame
        cannot be told: it counts as delivered, since what is lost is less harm than what counts twice.
    """

    state: State
    generation: int
    redelivery: RecordDict | None = None
    repeated: bool = False
    rolled_back: bool = False
    fresh: bool = False
    unsettled: bool = False

    @classmethod
    def begin(
        cls, context: Context, announcement: Announcement, codec: Codec, layout: Layout, asked: bytes = b""
    ) -> Uplink:
        """Read the memory from ``context`` and settle its pending reply. Modifies nothing.

        ``asked`` is :func:`asked_of` the message, for clients whose training is one exchange.

        Raises
        ------
        ConfigError
            When the memory would be larger than a state can be: it would be written, and not be read again.
        StaleMessage
            When a newer message of the same session was already answered.
        """
        fresh = cls(codec.init(layout), announcement.sequence, fresh=True)
        size = _most_bytes(fresh.state, announcement, codec, layout)
        if size > MOST_BYTES:
            raise ConfigError(
                f"{codec!r} would remember up to {size:,} bytes on this node, its last reply among them, and a node's "
                f"state has {MOST_BYTES:,} at most; use memory='float16' where the codec has it, or a codec without "
                "memory, EDEN() or QSGD()"
            )
        try:
            meta = UplinkRecord.find(context.state)
        except SchemaError:
            # Damaged where it was kept: reported to the server as a memory that begins with this message.
            return fresh
        # What became of the last frame of another session is unknown: its memory cannot be continued honestly.
        if meta is None or meta.session != announcement.session:
            return fresh
        generation, pending = meta.generation, meta.pending
        # Before layout and codec are compared: an old message is refused even when it is about another model.
        if announcement.sequence < pending:
            raise StaleMessage(
                f"this node already answered message {pending}; message {announcement.sequence} came too late"
            )
        if meta.layout != layout.digest or meta.lineage != lineage(codec.to_config()):
            return fresh
        reply = _stored_reply(context)
        if pending == announcement.sequence:
            return cls({}, generation, redelivery=reply)
        memory = context.state.get(_MEMORY)
        state: State = to_arrays(memory) if isinstance(memory, ArrayRecord) else {}
        if (announcement.generation, announcement.acknowledged) > (generation, pending):
            # The server consumed a frame this memory knows nothing of, its own or one of a memory that began later:
            # it is an older copy, restored after a crash. Rolling back its own last frame, which was consumed too,
            # would send that one twice.
            return fresh
        # Both numbers: an acknowledgement of a memory that was lost since says nothing of the one that followed it.
        lost = not (pending == announcement.acknowledged and generation == announcement.generation)
        restarted = epoch_of(announcement.sequence) > epoch_of(pending)
        if lost and restarted and asked and meta.asked == asked:
            return cls({}, generation, redelivery=reply, repeated=True)
        unsettled = lost and announcement.acknowledged == 0 and meta.node not in (b"", _id_of(context))
        if unsettled:
            log.warning("this node came back under another id: %s", UNSETTLED)
            lost = False
        try:
            if lost:
                # With the codec that made the frame: the server may announce other parameters by now.
                state = _rolled_back(state, reply, meta.codec, layout)
            state = _fitted(state, fresh.state)
        except (FedcompError, ValueError):
            # Reported to the server as a memory that begins with this message.
            return fresh
        return cls(state, generation, rolled_back=lost, unsettled=unsettled)

    def commit(
        self,
        context: Context,
        state: State,
        announcement: Announcement,
        codec: Codec,
        layout: Layout,
        reply: RecordDict,
        asked: bytes = b"",
    ) -> None:
        """Write the memory after encoding and keep ``reply`` until it is acknowledged."""
        store = context.state
        # The former reply may have had other records; left behind, they would be sent again with this one.
        for name in [k for k in store if k.startswith(_PENDING)]:
            del store[name]
        store[_MEMORY] = to_record(state)
        for name, record in reply.items():
            # One by one under a prefix: a RecordDict cannot hold another.
            store[_PENDING + name] = record
        config = codec.to_config()
        UplinkRecord(
            # Not the sequence: a memory keeps the number of the message it began with for as long as it lives.
            self.generation,
            announcement.sequence,
            announcement.session,
            config,
            lineage(config),
            layout.digest,
            asked,
            _id_of(context),
            announcement.sequence,
        ).put(store)

    def repeat(self, context: Context, announcement: Announcement, replica: Replica | None) -> RecordDict:
        """Return the stored reply as one to a restarted server's message, under whose number it is kept from now on."""
        assert self.redelivery is not None
        header = self.redelivery[NODE_RECORD]
        assert isinstance(header, ConfigRecord)
        version = {} if replica is None else {"version": replica.version}
        content = RecordDict(dict(self.redelivery.items()))
        content[NODE_RECORD] = ConfigRecord({**header, "sequence": announcement.sequence, **version})
        context.state[_PENDING + NODE_RECORD] = content[NODE_RECORD]
        meta = UplinkRecord.find(context.state)
        assert meta is not None
        made = meta.made or meta.pending
        replace(meta, pending=announcement.sequence, node=_id_of(context), made=made).put(context.state)
        return content


def _most_bytes(begun: State, announcement: Announcement, codec: Codec, layout: Layout) -> int:
    """Return how large the state gets that begins as ``begun``, up to some hundred bytes: all that a node keeps between
    two messages, after the longest frame of any round."""
    vector = 4 * layout.size
    frame = codec.longest(layout) or vector
    size = frame + sum(array.nbytes for array in begun.values())
    if "momentum" in begun:
        # What was taken from it where values were sent, by which a lost frame is put back.
        size += sum(4 * expected.most_values for expected in codec.schema(layout))
    # With a compressed downlink the model itself is in the state, too.
    return size + (vector if announcement.downlink else 0)


def update_number(context: Context, announcement: Announcement) -> int:
    """Return the sequence number of the message for which the update that answers ``announcement`` was made.

    It is the announcement's own, unless a reply of before the server's restart answers it (:meth:`Uplink.repeat`);
    known when the reply is there. A codec without a state keeps no reply: its client trains again.

    Raises
    ------
    SchemaError
        When the state is damaged.
    """
    meta = UplinkRecord.find(context.state)
    if meta is None or (meta.session, meta.pending) != (announcement.session, announcement.sequence):
        return announcement.sequence
    return meta.made or meta.pending


def _id_of(context: Context) -> bytes:
    # Of 64 bits, more than an integer of a ConfigRecord has.
    return context.node_id.to_bytes(8, "big")


def remembered(context: Context, name: str) -> NDArray[Any] | None:
    """Return one array of the codec memory as it is stored, None when there is none.

    Unlike :meth:`Uplink.begin` this asks neither for the layout nor what became of the last reply.
    """
    memory = context.state.get(_MEMORY)
    return memory[name].numpy() if isinstance(memory, ArrayRecord) and name in memory else None


def _rolled_back(state: State, reply: RecordDict, config: Mapping[str, Any], layout: Layout) -> State:
    frame = take_frame(reply, UPDATE)
    # A reply in the middle of a round may carry no update: then nothing of the memory left with it.
    return state if frame is None else get_codec(dict(config)).rollback(state, frame, layout)


def _fitted(state: State, initial: State) -> State:
    """Return ``state`` with what a codec of other parameters needs in addition, as it begins.

    Raises
    ------
    StateError
        When an array has another shape than the codec's own.
    """
    for name, array in initial.items():
        if name in state and state[name].shape != array.shape:
            raise StateError(f"memory {name!r} has shape {state[name].shape}, the codec needs {array.shape}")
    # What is stored wins; the initial value only fills in arrays that the former parameters did not need.
    return {**initial, **state}


def asked_of(announcement: Announcement, model: Mapping[str, NDArray[Any]], *, checked: bool = False) -> bytes:
    """Return a name of what a training message asks for: the same for equal models in one round of one seed.

    Parameters
    ----------
    model : mapping of name to ndarray
        What the node trains from, in whichever form it travelled.
    checked : bool
        Whether it was found to be the model that the message's digest names: then it is not read again.
    """
    name = hashlib.blake2b(digest_size=16)
    own = [announcement.round, announcement.seed, announcement.codec, announcement.policy]
    name.update(json.dumps(own, sort_keys=True).encode())
    if checked:
        name.update(announcement.digest)
        return name.digest()
    for key, array in model.items():
        # As bytes: not every dtype can be shown as a buffer.
        values = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        # A checksum tells two models of one run apart, and takes a quarter of a hash's time in every round.
        name.update(f"{key}:{array.dtype.str}:{array.shape}:{zlib.crc32(values)}".encode())
    return name.digest()


# Made once: json.dumps() would make one for each text.
_COMPACT: Final = json.JSONEncoder(separators=(",", ":")).encode


def lineage(config: Mapping[str, Any]) -> str:
    """Return the nested codec ids of a codec's configuration, without parameters.

    Memory outlives a change of parameters (a density that falls over the rounds), but not a change of algorithm.
    """

    def ids(config: Any) -> Any:
        if isinstance(config, dict):
            return {k: ids(v) for k, v in sorted(config.items()) if k == "id" or configured(v)}
        if isinstance(config, list):
            return [ids(v) for v in config if isinstance(v, dict)]
        return config

    # A list of anything else is a parameter, as a schedule of densities is.
    def configured(value: Any) -> bool:
        return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value))

    own = {name: value for name, value in config.items() if name != "id"}
    return _COMPACT([config["id"], ids(own)])


@dataclass(frozen=True)
class Replica:
    """The model a node holds when the downlink is compressed: its version and its tensors by name, in model order."""

    version: int
    arrays: Mapping[str, NDArray[Any]]

    @classmethod
    def load(cls, context: Context) -> Replica | None:
        """Return the node's replica, or None when it holds none."""
        try:
            meta, model = ReplicaRecord.find(context.state), context.state.get(_MODEL)
        except SchemaError:
            # As good as none: the server is asked for the whole model.
            return None
        return cls(meta.version, to_arrays(model)) if meta is not None and isinstance(model, ArrayRecord) else None

    def save(self, context: Context) -> None:
        """Write the replica into ``context``."""
        context.state[_MODEL] = to_record(self.arrays)
        ReplicaRecord(self.version).put(context.state)


def _stored_reply(context: Context) -> RecordDict:
    return RecordDict({k.removeprefix(_PENDING): v for k, v in context.state.items() if k.startswith(_PENDING)})
