"""A client's memory of a system between messages, with transactions.

An answer can be lost after the client has updated its memory, and with it the mass of the frame in it. So the frame
stays *pending* until a message says that it was consumed; a training message that does not puts its mass back. A
message that comes twice is answered twice alike. So is one that a restarted server sends in place of a message whose
answer it forgot: training again would put the update into the memory twice. A round of several exchanges is then made
again as a whole, from the memory that it began with.

All of it lies in Flower's ``context.state``. It is read without being modified and written in one assignment, as the
last act before a reply leaves: whatever breaks before that leaves the state as it was, on every engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

import numpy as np
from flwr.app import ArrayRecord, Context, RecordDict
from numpy.typing import NDArray

from fedcomp.clients.optimizer import OptimizerRecord
from fedcomp.codecs import State
from fedcomp.codecs.base import norm
from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.flower import asks
from fedcomp.flower.asks import BLOBS_KEPT, AskHead
from fedcomp.flower.folder import IN_USE
from fedcomp.flower.logs import log
from fedcomp.flower.payload import FRAME, NODE_RECORD, put_frame, take_frame
from fedcomp.flower.records import Place, size_of, to_arrays, to_record
from fedcomp.flower.schema import Document, Schema, SchemaError
from fedcomp.flower.state import MOST_BYTES, UNSETTLED, ReplicaRecord, StaleMessage, lineage
from fedcomp.layout import Layout, Vector
from fedcomp.program import Answer, Frames, System
from fedcomp.rules import Data, Int, Real, Text
from fedcomp.stateful import epoch_of
from fedcomp.systems import get_system
from fedcomp.wire import Frame

MEMORY: Final = "fedcomp.memory"
"""The system's memory."""

PENDING: Final = "fedcomp.pending"
"""The frame that left it last, while it is not known whether the server has consumed it."""

BEFORE: Final = "fedcomp.before"
"""The memory that a round of several exchanges began with, until the next round begins."""

REPLY: Final = "fedcomp.reply/"
BLOB: Final = "fedcomp.kept/"
KEEP: Final = "fedcomp.keep/"
"""What the node keeps whatever becomes of its memory: :attr:`fedcomp.program.Answer.keep`."""

MODEL: Final = "fedcomp.replica.model"

_ROW: Final = 4096
"""Bytes in a row of words that are summed column by column."""

NOT_WAITING: Final = "this node has no update: it did not train in this round, or its state was lost"


@dataclass(frozen=True)
class Held(Schema, key="fedcomp.held"):
    """What a node keeps beside memory and reply.

    Attributes
    ----------
    session : bytes
        Of the server.
    sequence, number : int
        Of the message answered last, and its round.
    trained : int
        Sequence of the training message answered last.
    generation : int
        Sequence of the message with which the memory began.
    sent, before : int
        Sequence of the message that the last frame answered, 0 for none; and what that was when the round began.
    system : dict
        What made that answer.
    layout : str
        Of its updates.
    asked : bytes
        Names what the round asked for (:func:`asked_of`).
    node : bytes
        The id under which the node answered.
    length : float
        ‖update‖ of the round's training; 0 where it was not asked for.
    """

    session: Annotated[bytes, Data(8, 8)]
    sequence: Annotated[int, Int()]
    number: Annotated[int, Int()]
    trained: Annotated[int, Int()]
    generation: Annotated[int, Int()]
    sent: Annotated[int, Int()]
    before: Annotated[int, Int()]
    system: Annotated[Mapping[str, Any], Document(1 << 20, sort=True)]
    layout: Annotated[str, Text(1 << 24)]
    asked: Annotated[bytes, Data(16, 16)]
    node: Annotated[bytes, Data(8, 8)]
    length: Annotated[float, Real(least=0.0)]

    def made_by(self, system: System) -> bool:
        """Whether the memory is one of ``system``: it outlives other options, not another algorithm."""
        return self.system.get("id") == system.ID and lineage(self.system) == lineage(system.to_config())


@dataclass
class Memory:
    """One message's view of what the client remembers.

    Attributes
    ----------
    state : dict of str to ndarray
        The system's memory; arrays of it are not to be written to.
    layout : Layout
    asked : bytes
    generation : int
    sent : int
        Sequence of the message that the last frame answered; 0: none has left this memory.
    before : int
        What ``sent`` was when the round began.
    pending : bytes, optional
    what : str
        What became of the memory with this message: "begun", "rolled back", "repeated".
    unsettled : bool
        Whether the node came back under another id, of which the server knows nothing. What became of its last frame
        cannot be told: it counts as delivered, since what is lost is less harm than what counts twice.
    stored : bool
        Whether ``state`` is what was stored, as it was.
    length : float
        ‖update‖ of the round's training; 0 where it was not asked for.
    places : list of Place
        Arrays that may become part of the memory where they lie.
    """

    state: State
    layout: Layout
    asked: bytes
    generation: int
    sent: int = 0
    before: int = 0
    pending: Frame | None = None
    what: str = ""
    unsettled: bool = False
    stored: bool = False
    length: float = 0.0
    places: list[Place] = field(default_factory=list)

    @classmethod
    def without_model(cls, context: Context, head: AskHead, system: System, asked: bytes, *, train: bool) -> Memory:
        """Read the memory for a message that brings no model and goes on from none, settled where it is one to
        ``train``; an empty memory of an empty layout where there is none."""
        memory = cls.look(context, head, system)
        if memory is None:
            return cls({}, Layout(()), asked, head.sequence, what="begun")
        return cls.begin(context, head, system, memory.layout, asked) if train else memory

    @classmethod
    def begin(cls, context: Context, head: AskHead, system: System, layout: Layout, asked: bytes) -> Memory:
        """Read the memory for a training message, with its pending frame settled. Modifies nothing.

        Raises
        ------
        ConfigError
            When the memory would be larger than a state can be: it would be written, and not be read again.
        """
        begun = system.start(layout)
        _require_room(system, sum(array.nbytes for array in begun.values()))
        fresh = cls(begun, layout, asked, head.sequence, what="begun")
        held = _held(context, head)
        # What became of the last frame of another session is unknown: its memory cannot be continued honestly. An
        # answer to this very message of which nothing is left is as good as a damaged memory.
        if held is None or held.sequence == head.sequence:
            return fresh
        if held.layout != layout.text or not held.made_by(system):
            return fresh
        if (head.generation, head.consumed) > (held.generation, held.sent):
            # The server consumed a frame this memory knows nothing of, its own or one of a memory that began later:
            # it is an older copy, restored after a crash.
            return fresh
        try:
            memory = cls._settled(context, head, held, system, layout, asked)
            memory.state = _fitted(memory.state, begun)
        except (FedcompError, ValueError):
            # Damaged where it was kept: reported to the server as a memory that begins with this message.
            return fresh
        return memory

    @classmethod
    def _settled(
        cls, context: Context, head: AskHead, held: Held, system: System, layout: Layout, asked: bytes
    ) -> Memory:
        """Return the memory as the frame's fate leaves it."""
        state = context.state
        found = cls(_arrays(state, MEMORY, system), layout, asked, held.generation, held.sent, held.sent, stored=True)
        pending = _pending(state, system)
        # By the message that trained: others may have come since.
        again = epoch_of(head.sequence) > epoch_of(held.trained) and held.asked == asked
        if system.LOST == "again":
            found.what = "repeated" if again else ""
            return found
        # Both numbers: an acknowledgement of a memory that was lost since says nothing of the one that followed it.
        lost = (head.generation, head.consumed) != (held.generation, held.sent)
        if again and BEFORE in state and (lost or held.sent == held.before):
            found.state, found.sent, found.before = _arrays(state, BEFORE, system), held.before, held.before
            found.stored = False
            return found
        if pending is None or not lost:
            return found
        if again:
            found.what = "repeated"
        elif not found.state:
            # The answer was kept for the app's sake, and nothing left a memory with it.
            pass
        elif head.consumed == 0 and held.node != _id_of(context):
            log.warning("this node returned under another id: %s", UNSETTLED)
            found.unsettled = True
        else:
            # By the options that made the frame: the server may announce others by now.
            found.state = get_system(dict(held.system)).rollback(found.state, pending, layout)
            found.what, found.stored = "rolled back", False
        return found

    @classmethod
    def resume(cls, context: Context, head: AskHead, system: System) -> Memory:
        """Read the memory for a query, which continues the round that a training message began.

        Raises
        ------
        StateError
            When this is not the memory of that round.
        """
        memory, held = cls.look(context, head, system), _held(context, head)
        if memory is None or held is None or held.number != head.number:
            raise StateError(NOT_WAITING)
        return memory

    @classmethod
    def look(cls, context: Context, head: AskHead, system: System) -> Memory | None:
        """Read the memory as it is, whatever became of its last frame; None where there is none to go on with."""
        held = _held(context, head)
        if held is None or not held.made_by(system) or (head.generation, head.consumed) > (held.generation, held.sent):
            return None
        state = context.state
        layout = Layout.from_text(held.layout)
        memory = _arrays(state, MEMORY, system), layout, held.asked, held.generation, held.sent, held.before
        return cls(*memory, _pending(state, system), length=held.length)

    def ratio(self, system: System, state: State, answer: Answer) -> float | None:
        """Return ‖memory‖ / ‖update‖ after an answer that sends: grows without bound when what is sent never catches
        up; None for another answer, without a memory, and where nothing changed."""
        if self.length <= 0.0 or _left(system, answer) is None:
            return None
        owed = system.residual(state, self.layout)
        return None if owed is None else norm(owed) / self.length

    def commit(
        self,
        context: Context,
        head: AskHead,
        system: System,
        state: State,
        answer: Answer,
        reply: RecordDict,
        store: RecordDict,
        *,
        train: bool,
    ) -> None:
        """Write the memory after an answer, together with what else is new.

        Parameters
        ----------
        state : dict of str to ndarray
            The memory after it.
        reply : RecordDict
            The answer as it leaves.
        store : RecordDict
            The context's state with all else that is new; it takes its place.

        Raises
        ------
        ConfigError
            When the state would be larger than one can be.
        """
        keeps = bool(state) or bool(self.state)
        # Made again, the answer would be another one: the app's optimizer would step twice.
        repeats_app = OptimizerRecord.KEY in store
        left = _left(system, answer)
        repeats = system.LOST == "again"
        same = state.keys() == self.state.keys() and all(array is self.state[name] for name, array in state.items())
        # An answer that changes nothing is made again where it is asked for again; the one before it, of the round's
        # training, is what a restarted server asks for.
        if train or left is not None or not same:
            former = store.pop(MEMORY, None)
            if train:
                store.pop(BEFORE, None)
                # Who posted goes on in later exchanges, even where the frame has left.
                if keeps and not repeats and (left is None or answer.post):
                    store[BEFORE] = former if self.stored and former is not None else to_record(self.state)
            for name in [PENDING, *(key for key in store if key.startswith(REPLY))]:
                store.pop(name, None)
            if keeps:
                store[MEMORY] = to_record(state, self.places)
                # In the reply it is kept already.
                apart = self.pending if left is None else answer.sent
                if apart is not None:
                    put_frame(store, PENDING, apart)
            if keeps or repeats_app:
                # One by one under a prefix: a RecordDict cannot hold another.
                for name, record in reply.items():
                    store[REPLY + name] = record
        sent = head.sequence if keeps and left is not None else self.sent
        keep_in(store, answer.keep)
        former_held = _held(context, head)
        Held(
            head.session,
            head.sequence,
            head.number,
            head.sequence if train else 0 if former_held is None else former_held.trained,
            self.generation,
            sent,
            self.before,
            system.to_config(),
            self.layout.text,
            self.asked,
            _id_of(context),
            self.length,
        ).put(store)
        _require_room(system, sum(bytes_of(record) for name, record in store.items() if name.startswith("fedcomp.")))
        context.state = store

    def repeat(self, context: Context, head: AskHead, version: int, store: RecordDict) -> RecordDict:
        """Return the stored answer as one to a restarted server's message, and keep it under that message's number."""
        content = _stored(context.state)
        former, held = asks.find_answer(content), Held.take(context.state)
        if former is None:
            raise StateError("the stored answer has no head")
        asks.put(content, replace(former, sequence=head.sequence, version=version, state="repeated"))
        store[REPLY + NODE_RECORD] = content[NODE_RECORD]
        sequence = head.sequence
        sent = sequence if held.sent else 0
        replace(held, sequence=sequence, trained=sequence, sent=sent, node=_id_of(context)).put(store)
        context.state = store
        return content


def answered(context: Context, head: AskHead) -> RecordDict | None:
    """Return the answer to a message that was answered already, None for another one.

    Raises
    ------
    StaleMessage
        When a newer message of the session was answered.
    """
    held = _held(context, head)
    if held is None or head.sequence > held.sequence:
        return None
    if head.sequence < held.sequence:
        raise StaleMessage(f"this node already answered message {held.sequence}; message {head.sequence} came too late")
    content = _stored(context.state)
    try:
        former = asks.find_answer(content)
    except SchemaError:
        return None
    # Not kept of a system without memory, nor where it changed nothing: the client makes it again.
    return content if former is not None and former.sequence == head.sequence else None


def asked_of(head: AskHead, model: Mapping[str, NDArray[Any]], said: bytes = b"") -> bytes:
    """Return a name of what a training message asks for: the same for equal models, and what is ``said``, in one round
    of one seed."""
    name = hashlib.blake2b(said, digest_size=16)
    name.update(json.dumps([head.number, head.seed, head.system, head.policy], sort_keys=True).encode())
    if head.digest:
        name.update(head.digest)
        return name.digest()
    for key, array in model.items():
        # As bytes: not every dtype can be shown as a buffer.
        values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        whole = values.size // _ROW * _ROW
        # Sums of words, column by column, read all of it in one pass; a checksum of bytes takes seven, in every round.
        name.update(values[:whole].view(np.uint64).reshape(-1, _ROW // 8).sum(axis=0, dtype=np.uint64).tobytes())
        name.update(f"{key}:{array.dtype.str}:{array.shape}".encode() + values[whole:].tobytes())
    return name.digest()


def owed(state: RecordDict, system: System, layout: Layout, consumed: tuple[int, int]) -> Vector:
    """Return what a node's state has for a server, with what left last where that was not consumed.

    Parameters
    ----------
    consumed : tuple of int
        Generation and sequence of the node's last frame that the server consumed.
    """
    held = Held.find(state)
    # A frame that this memory knows nothing of: it is an older copy, and begins again.
    if held is None or MEMORY not in state or consumed > (held.generation, held.sent):
        return np.zeros(layout.size, np.float32)
    memory, frame = (
        {name: np.array(array) for name, array in _arrays(state, MEMORY, system).items()},
        _pending(state, system),
    )
    if held.sent and frame is not None and consumed != (held.generation, held.sent):
        memory = system.rollback(memory, frame, layout)
    residual = system.residual(memory, layout)
    return np.zeros(layout.size, np.float32) if residual is None else residual


def held_model(state: RecordDict) -> tuple[int, ArrayRecord] | None:
    """Return version and tensors of the model that a node holds, None when it holds none."""
    try:
        found, model = ReplicaRecord.find(state), state.get(MODEL)
    except SchemaError:
        # As good as none: the server is asked for the whole model.
        return None
    return (found.version, model) if found is not None and isinstance(model, ArrayRecord) else None


def hold_model(store: RecordDict, version: int, model: ArrayRecord) -> None:
    """Keep a model."""
    store[MODEL] = model
    ReplicaRecord(version).put(store)


def held_blob(state: RecordDict, digest: str) -> Frame | None:
    """Return a blob that is kept, None where it is not."""
    return take_frame(state, BLOB + digest)


def kept_in(state: RecordDict) -> Frames:
    """Return what a node keeps whatever becomes of its memory, by name."""
    found = {name.removeprefix(KEEP): take_frame(state, name) for name in state if name.startswith(KEEP)}
    return {name: data for name, data in found.items() if data is not None}


def keep_in(store: RecordDict, frames: Frames) -> None:
    """Keep what a half of a system wants kept, by name."""
    for name, data in frames.items():
        put_frame(store, KEEP + name, data)


def keep_blobs(store: RecordDict, blobs: Mapping[str, Frame]) -> None:
    """Keep blobs, by their digests, as the newest ones."""
    for digest, data in blobs.items():
        store.pop(BLOB + digest, None)
        put_frame(store, BLOB + digest, data)
    for name in [key for key in store if key.startswith(BLOB)][:-BLOBS_KEPT]:
        del store[name]


def _held(context: Context, head: AskHead) -> Held | None:
    """Return what the node keeps of the head's session; None where that is nothing, or is damaged."""
    try:
        held = Held.find(context.state)
    except SchemaError:
        return None
    return held if held is not None and held.session == head.session else None


def _arrays(state: RecordDict, name: str, system: System) -> State:
    """Return a memory, on the host unless ``system`` takes it where it is."""
    record = state.get(name)
    return to_arrays(record, copy=False, stay=system.on_device) if isinstance(record, ArrayRecord) else {}


def _stored(state: RecordDict) -> RecordDict:
    return RecordDict({k.removeprefix(REPLY): v for k, v in state.items() if k.startswith(REPLY)})


def _left(system: System, answer: Answer) -> Frame | None:
    """Return the frame by which mass leaves a memory with an answer."""
    return answer.frames.get(system.SENT) if answer.sent is None else answer.sent


def _pending(state: RecordDict, system: System) -> Frame | None:
    """Return the frame that left last, where its fate is not known."""
    frame = take_frame(state, PENDING)
    return asks.data_in(_stored(state), FRAME).get(system.SENT) if frame is None else frame


def _fitted(state: State, begun: State) -> State:
    """Return ``state`` with what a system of other options needs in addition, as it begins.

    Raises
    ------
    StateError
        When an array has another shape than the system's own.
    """
    for name, array in begun.items():
        if name in state and state[name].shape != array.shape:
            raise StateError(f"memory {name!r} has shape {state[name].shape}, the system needs {array.shape}")
    # What is stored wins; the initial value only fills in arrays that the former options did not need.
    return {**begun, **state}


def _id_of(context: Context) -> bytes:
    # Of 64 bits, more than an integer of a ConfigRecord has.
    return context.node_id.to_bytes(8, "big")


def bytes_of(record: Any) -> int:
    """Return the bytes of what is large in a record."""
    if isinstance(record, ArrayRecord):
        return sum(map(size_of, record.values()))
    return sum(len(value) for value in record.values() if isinstance(value, bytes | str))


def _require_room(system: System, size: int) -> None:
    if size <= MOST_BYTES:
        return
    folder = IN_USE.get()
    if folder is None:
        raise ConfigError(
            f"{system!r} would keep {size:,} bytes here, reply and optimizer included, of {MOST_BYTES:,} at most; give "
            "the node a state-dir, use memory='float16' where the codec has it, or a codec without memory, EDEN() or "
            "QSGD()"
        )
    room = folder.room()
    if size > room:
        raise ConfigError(
            f"{system!r} would keep {size:,} bytes, reply and optimizer included, in this node's state folder, whose "
            f"disk has room for {room:,}; free more, or use a codec without memory, EDEN() or QSGD()"
        )
