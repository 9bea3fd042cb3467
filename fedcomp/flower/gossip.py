"""What the relay of a decentralised run and its nodes say to each other, as Flower's records.

Four kinds of messages, so that the ledger keeps them apart:

    query.gossip_hello     which vertex of the graph are you
    train.gossip_start     an instruction that needs the initial model: begins a run, or joins one; carries it
    train.gossip           every other instruction: gossip messages both ways, nothing else that grows with the model
    query.gossip_observe   the model as it is, and its figures: for reports, changes nothing

Scalars and short lists of an instruction or an answer are in one ConfigRecord; every gossip message is one frame,
whose bytes nobody but its receiver reads. Whether the parts fit each other is checked by
:mod:`fedcomp.gossip.protocol` and by those who act on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Self

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, StateError
from fedcomp.flower.coded import SIGNATURE
from fedcomp.flower.payload import PayloadError
from fedcomp.flower.records import to_arrays
from fedcomp.flower.schema import Document, Frames, Schema
from fedcomp.gossip.node import NodeMemory
from fedcomp.gossip.protocol import ACTIONS, STARTS, Instruction, NodeAnswer, Parts
from fedcomp.gossip.vector import GossipPolicy
from fedcomp.layout import Layout, TensorSpec
from fedcomp.rules import Data, Flag, Int, Many, OneOf, Real, Text

HELLO: Final = "gossip_hello"
START: Final = "gossip_start"
EXCHANGE: Final = "gossip"
OBSERVE: Final = "gossip_observe"
"""Actions of the messages; ``query.`` or ``train.`` before them makes their types."""

HEADER: Final = "fedcomp.gossip"
"""Name of the ConfigRecord with what an instruction or an answer says beside its gossip messages."""

SETUP: Final = "fedcomp.gossip.setup"
"""Name of the ConfigRecord that describes the algorithm."""

MODEL: Final = "arrays"
"""Name of the ArrayRecord with a whole model: the initial one down, an observed one up."""

FIGURES: Final = "metrics"
"""Name of the MetricRecord of an observation."""

HELLO_TYPE: Final = f"query.{HELLO}"
START_TYPE: Final = f"train.{START}"
EXCHANGE_TYPE: Final = f"train.{EXCHANGE}"
OBSERVE_TYPE: Final = f"query.{OBSERVE}"
TRAINING: Final = (START_TYPE, EXCHANGE_TYPE)
"""Types of the messages that carry gossip messages."""

MOST_MESSAGES: Final = 65_536
"""How many gossip messages one of Flower's may hold: more than any node has neighbours."""

Name = Annotated[str, Text(256, least=1)]
Count = Annotated[int, Int(absent=0)]
Switch = Annotated[bool, Flag(absent=False)]
Nodes = Annotated[tuple[int, ...], Many(Int(), MOST_MESSAGES)]
Weights = Annotated[tuple[float, ...], Many(Real(), MOST_MESSAGES)]
Texts = Annotated[tuple[str, ...], Many(Text(1 << 12), MOST_MESSAGES)]
Messages = Annotated[tuple[bytes, ...], Frames(MOST_MESSAGES)]


class _Parts(Schema):
    """A record with the parts of an instruction or an answer, see :mod:`fedcomp.gossip.protocol`."""

    @classmethod
    def from_parts(cls, parts: Parts) -> Self:
        values = {entry.field: parts[entry.name] for entry in cls.entries()}
        # Parts are plain data, which has lists; a record's fields are tuples.
        return cls(**{field: tuple(value) if isinstance(value, list) else value for field, value in values.items()})

    def to_parts(self) -> Parts:
        return {entry.name: getattr(self, entry.field) for entry in self.entries()}


@dataclass(frozen=True)
class InstructionRecord(_Parts, key=HEADER, separator="."):
    """An instruction beside its gossip messages; each of those is a frame. What is empty or zero is not sent."""

    session: Name
    serial: Count
    epoch: Count
    action: Annotated[str, OneOf(*ACTIONS)]
    start: Annotated[str, OneOf(*STARTS)]
    node: Count
    iteration: Count
    seed: Annotated[int, Int(least=-(2**63), absent=0)]
    dense: Switch
    resync: Nodes
    out: Nodes
    shares: Weights
    in_: Nodes
    weights: Weights
    inbox_from: Nodes
    inbox: Messages
    returned_to: Nodes
    returned: Messages


@dataclass(frozen=True)
class AnswerRecord(_Parts, key=HEADER, separator="."):
    """An answer beside its gossip messages, likewise."""

    session: Name
    serial: Count
    messages: Messages
    messages_to: Nodes
    messages_counts: Nodes
    needs: Nodes
    reasons: Texts
    lost: Texts
    noticed: Nodes
    remarks: Texts
    failed: Annotated[str, Text(1 << 12)]
    fresh: Switch
    facts: Annotated[tuple[str, ...], Many(Text(256), 4096)]
    # Not only finite numbers: a node whose figures overflow must be able to say so, for the watcher to judge.
    facts_values: Annotated[tuple[float, ...], Many(Real(finite=False), 4096)]


@dataclass(frozen=True)
class MemoryRecord(Schema, key="fedcomp.gossip.memory"):
    """Which instruction a node has carried out last; its answer is in a record beside this one."""

    session: Name
    serial: Count
    epoch: Count


KEY_BYTES: Final = 32

SIMULATED: Final = "spool:"
"""Address of a node that has a simulated link."""

_Key = Annotated[bytes, Data(KEY_BYTES)]
_Sizes = Annotated[tuple[int, ...], Many(Int(most=1 << 40), MOST_MESSAGES)]


@dataclass(frozen=True, kw_only=True)
class LinkTerms(Schema, key="fedcomp.gossip.links", separator="-"):
    """How gossip messages go from node to node; in every message of such a run. Without it the server carries them.

    Attributes
    ----------
    run : bytes
        Names the run in parcels.
    seal : bool
        Messages are sealed for their receivers.
    max_store : int
        What a node is asked to keep for others, in bytes.
    spool : str
        Folder of simulated links; empty where there are none.
    oldest : int
        Lowest iteration of which a message is under way: what is older may be forgotten.
    known : bytes
        This node's public key as the server has it; empty in a hello.
    to, addresses, keys : tuple of int, tuple of str, bytes
        The nodes to send to, where each is reached (empty: through the server), and their public keys.
    signatures : tuple of bytes
        By which these nodes prove that the keys are theirs; none where no node does.
    """

    run: Annotated[bytes, Data(8, least=8)]
    seal: Switch
    max_store: Annotated[int, Int()]
    spool: Annotated[str, Text(4096)] = ""
    oldest: Count = 0
    known: _Key = b""
    to: Nodes = ()
    addresses: Annotated[tuple[str, ...], Many(Text(), MOST_MESSAGES)] = ()
    keys: Annotated[bytes, Data(KEY_BYTES * MOST_MESSAGES)] = b""
    signatures: Annotated[tuple[bytes, ...], Many(Data(SIGNATURE), MOST_MESSAGES)] = ()

    def conflict(self) -> str:
        if len(self.known) not in (0, KEY_BYTES):
            return f"a public key of {len(self.known)} bytes, expected {KEY_BYTES}"
        if len(self.addresses) != len(self.to) or len(self.keys) != KEY_BYTES * len(self.to):
            return f"{len(self.addresses)} addresses and {len(self.keys)} bytes of keys for {len(self.to)} nodes"
        if len(self.signatures) not in (0, len(self.to)):
            return f"{len(self.signatures)} signatures for {len(self.to)} nodes"
        return ""


@dataclass(frozen=True, kw_only=True)
class LinkHello(Schema, key="fedcomp.gossip.link", separator="-"):
    """Where a node is reached, and its public key; in its hello, and whenever these are new.

    Attributes
    ----------
    public : bytes
    address : str
        Empty: it is not; :data:`SIMULATED`: in its folder below the one that the server names.
    signature : bytes
        Its node's, over that key; empty from a node without keys of its own.
    """

    public: Annotated[bytes, Data(KEY_BYTES, least=KEY_BYTES)]
    address: Annotated[str, Text()] = ""
    signature: Annotated[bytes, Data(SIGNATURE)] = b""


@dataclass(frozen=True, kw_only=True)
class LinkReport(Schema, key="fedcomp.gossip.sent", separator="-"):
    """What a node handed to its links: bytes for each receiver, failed attempts included, and why a message took the
    server instead; an empty reason is a delivery."""

    to: Nodes = ()
    sent: _Sizes = ()
    failed: Texts = ()

    def conflict(self) -> str:
        counts = {len(self.to), len(self.sent), len(self.failed)}
        return "" if len(counts) == 1 else f"{len(self.sent)} sizes and {len(self.failed)} reasons for {self.to} nodes"


_ANSWER: Final = "fedcomp.gossip.memory.answer"
_ARRAYS: Final = "fedcomp.gossip.memory.arrays"
_MODEL_OF: Final = "fedcomp.gossip.model"
_STYPE: Final = "fedcomp.arrays"


@dataclass(frozen=True)
class GossipSetup(Schema, key=SETUP, separator="-"):
    """What every instruction says of the run: enough for a process that knows nothing of it.

    Attributes
    ----------
    algorithm : dict
        What :func:`fedcomp.gossip.get_algorithm` takes.
    dtype : str
        Of the vectors: "float32" or "float64".
    dense_below, buffers
        See :class:`fedcomp.gossip.vector.GossipPolicy`.
    """

    algorithm: Annotated[Mapping[str, Any], Document(1 << 16)]
    dtype: Annotated[str, OneOf("float32", "float64")] = "float32"
    dense_below: Annotated[int, Int()] = 64
    buffers: Annotated[str, OneOf("dense", "local")] = "dense"

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float64"):
            raise ConfigError(f"dtype={self.dtype!r} is not valid: 'float32' or 'float64'")
        # Made for its checks: a wrong dense_below is reported here and not by every node.
        _ = self.policy

    @property
    def policy(self) -> GossipPolicy:
        """Which tensors are compressed."""
        return GossipPolicy(self.dense_below, self.buffers)  # type: ignore[arg-type]


def put_instruction(content: RecordDict, instruction: Instruction) -> None:
    """Write an instruction: its header, and one frame per gossip message."""
    InstructionRecord.from_parts(instruction.to_parts()).put(content)


def take_instruction(message: Message) -> Instruction:
    """Return the instruction a message carries.

    Raises
    ------
    PayloadError
        When it carries none, or not all of it.
    MessageError
        When its parts do not fit each other.
    """
    return Instruction.from_parts(InstructionRecord.take(message).to_parts())


def put_answer(content: RecordDict, answer: NodeAnswer) -> None:
    """Write an answer without its model: its header, and one frame per gossip message."""
    AnswerRecord.from_parts(answer.to_parts()).put(content)


def take_answer(message: Message) -> NodeAnswer:
    """Return the answer a reply carries.

    Raises
    ------
    PayloadError, AnswerError
        When it carries none, or what it says is not of an answer's form.
    """
    return NodeAnswer.from_parts(AnswerRecord.take(message).to_parts())


@dataclass(frozen=True)
class NodeStore:
    """All that a node has in its ``context.state``.

    Attributes
    ----------
    memory : NodeMemory
        See :class:`fedcomp.gossip.node.NodeMemory`.
    layout : Layout
        Of the model the run began with.
    own : dict of str to ndarray
        Buffers that never leave this node (``layout.exact``).
    """

    memory: NodeMemory
    layout: Layout
    own: Mapping[str, NDArray[Any]]

    @classmethod
    def load(cls, context: Context) -> NodeStore | None:
        """Return what this node keeps; None when it keeps nothing. Modifies nothing.

        Raises
        ------
        StateError
            When what is there cannot be read.
        """
        state = context.state
        try:
            last = MemoryRecord.find(state)
            if last is None:
                return None
            arrays, own = (_unpack(state, f"{_ARRAYS}/{name}") for name in ("state", "own"))
            answer = AnswerRecord.take(state, _ANSWER).to_parts()
            memory = NodeMemory.from_parts(arrays, asdict(last) | {f"answer.{name}": answer[name] for name in answer})
            return cls(memory, layout_of(str(state.config_records[_MODEL_OF]["layout"])), own)
        except (PayloadError, KeyError, ValueError, TypeError) as error:
            raise StateError(f"this node's memory of the run cannot be read: {error}; restart the node") from error

    def save(self, context: Context) -> None:
        """Write all of it; the last thing a handler does."""
        state = context.state
        memory = self.memory
        arrays, _ = memory.to_parts()
        _pack(state, f"{_ARRAYS}/state", arrays)
        _pack(state, f"{_ARRAYS}/own", self.own)
        state[_MODEL_OF] = ConfigRecord({"layout": layout_text(self.layout)})
        AnswerRecord.from_parts(memory.answer.to_parts()).put(state, _ANSWER)
        MemoryRecord(memory.session, memory.serial, memory.epoch).put(state)


def _pack(state: RecordDict, key: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Store named arrays as one: a state has dozens of them, and each one of Flower's has a price of its own."""
    # ascontiguousarray makes one-dimensional arrays of scalars: the reshape gives the shape back.
    whole = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    listed = json.dumps([[name, array.dtype.str, list(array.shape)] for name, array in whole.items()])
    data = b"".join(array.tobytes() for array in whole.values())
    # The table of contents is the name of the one array, which saves a record of its own.
    state[key] = ArrayRecord({listed: Array("uint8", (len(data),), _STYPE, data)})


def _unpack(state: RecordDict, key: str) -> dict[str, NDArray[Any]]:
    ((listed, held),) = state.array_records[key].items()
    found, at = {}, 0
    for name, kind, shape in json.loads(listed):
        dtype = np.dtype(kind)
        size = _elements(shape)
        # Read-only views of the record: arrays of a state are never written to.
        found[name] = np.frombuffer(held.data, dtype, size, at).reshape(shape)
        at += size * dtype.itemsize
    if at != len(held.data):
        raise ValueError(f"{len(held.data)} bytes of arrays, expected {at}")
    return found


def layout_text(layout: Layout) -> str:
    """Return a layout as one text, from which :func:`layout_of` makes it again."""
    groups = [[[t.name, list(t.shape), t.dtype, t.density] for t in group] for group in (layout.tensors, layout.exact)]
    return json.dumps([*groups, list(layout.order)], separators=(",", ":"))


def layout_of(text: str) -> Layout:
    """Recreate a layout from :func:`layout_text`.

    Raises
    ------
    PayloadError
        When ``text`` is not one.
    """
    try:
        tensors, exact, order = json.loads(text)
        made, offset = [], 0
        # Offsets are not stored: they follow from the order. Exact tensors are in no vector and have none.
        for name, shape, dtype, density in tensors:
            size = _elements(shape)
            made.append(TensorSpec(name, tuple(shape), dtype, offset, size, density))
            offset += size
        still = tuple(TensorSpec(n, tuple(shape), dtype, 0, _elements(shape), d) for n, shape, dtype, d in exact)
        return Layout(tuple(made), still, tuple(order))
    except (ValueError, TypeError) as error:
        raise PayloadError(f"the stored description of the model is damaged: {error}") from error


def take_model(message: Message) -> dict[str, Any]:
    """Return the whole model a message carries, by name.

    Raises
    ------
    PayloadError
        When it carries none, or one that cannot be read.
    """
    found = message.content.get(MODEL) if message.has_content() else None
    if not isinstance(found, ArrayRecord) or not found:
        raise PayloadError(f"the message has no model under {MODEL!r}")
    try:
        return to_arrays(found)
    # EOFError: numpy's reader at the end of an array that was cut short.
    except (ValueError, TypeError, EOFError) as error:
        raise PayloadError(f"the model under {MODEL!r} cannot be read: {error}") from error


def _elements(shape: list[int]) -> int:
    # Python's integers, since np.prod of a forged shape may wrap around to a plausible size.
    size = 1
    for extent in shape:
        if isinstance(extent, bool) or not isinstance(extent, int) or extent < 0:
            raise ValueError(f"{shape!r} is no shape")
        size *= extent
    return size
