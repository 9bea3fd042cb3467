"""What the relay of a decentralised run and its nodes say to each other, as Flower's records.

Four kinds of messages, so that the ledger keeps them apart:

    query.gossip_hello     which vertex of the graph are you
    train.gossip_start     an instruction that needs the initial model: begins a run, or joins one; carries it
    train.gossip           every other instruction: letters down, letters up, and nothing else that grows with the model
    query.gossip_observe   the model as it is, and its figures: for reports, changes nothing

Scalars and short lists of an instruction or an answer stand in one ConfigRecord; every letter is one frame, whose bytes
nobody but its receiver reads. What a message says is checked here by name and type, what it means by
:mod:`fedcomp.gossip.protocol` and by those who act on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, StateError
from fedcomp.flower.payload import PayloadError, put_frame, take_frame
from fedcomp.flower.records import to_arrays
from fedcomp.gossip.node import Memory
from fedcomp.gossip.protocol import Answer, Instruction, Parts
from fedcomp.gossip.vector import GossipPolicy
from fedcomp.layout import Layout, TensorSpec

HELLO: Final = "gossip_hello"
START: Final = "gossip_start"
EXCHANGE: Final = "gossip"
OBSERVE: Final = "gossip_observe"
"""Actions of the messages; ``query.`` or ``train.`` before them makes their types."""

HEADER: Final = "fedcomp.gossip"
"""Name of the ConfigRecord with what an instruction or an answer says beside its letters."""

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
"""Types of the messages that carry letters."""

MOST_LETTERS: Final = 65_536
"""How many letters a message may hold: more than any node has neighbours."""

_INSTRUCTION: Final[Mapping[str, Any]] = {
    "session": str,
    "serial": int,
    "epoch": int,
    "action": str,
    "start": str,
    "node": int,
    "iteration": int,
    "seed": int,
    "dense": bool,
    "resync": [int],
    "out": [int],
    "shares": [float],
    "in": [int],
    "weights": [float],
    "mail.from": [int],
    "mail": [bytes],
    "returned.to": [int],
    "returned": [bytes],
}
_ANSWER: Final[Mapping[str, Any]] = {
    "session": str,
    "serial": int,
    "postings": [bytes],
    "postings.to": [int],
    "postings.counts": [int],
    "needs": [int],
    "reasons": [str],
    "lost": [str],
    "noticed": [int],
    "remarks": [str],
    "failed": str,
    "fresh": bool,
    "facts": [str],
    "facts.values": [float],
}
"""Names and types of what is said; a list of a type is written in brackets. What is empty or zero is not sent."""

_MEMORY: Final[Mapping[str, Any]] = {
    "session": str,
    "serial": int,
    "epoch": int,
    **{f"answer.{name}": kind for name, kind in _ANSWER.items()},
}
_KEPT: Final = "fedcomp.gossip.memory"
_ARRAYS: Final = "fedcomp.gossip.memory.arrays"
_MODEL_OF: Final = "fedcomp.gossip.model"
_STYPE: Final = "fedcomp.arrays"


@dataclass(frozen=True)
class Setup:
    """What every instruction says of the run: enough for a process that has never heard of it.

    Attributes
    ----------
    algorithm : dict
        What :func:`fedcomp.gossip.get_algorithm` takes.
    dtype : str
        Of the vectors: "float32" or "float64".
    dense_below, buffers
        See :class:`fedcomp.gossip.vector.GossipPolicy`.
    """

    algorithm: Mapping[str, Any]
    dtype: str = "float32"
    dense_below: int = 64
    buffers: str = "dense"

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float64"):
            raise ConfigError(f"dtype={self.dtype!r} is not valid: 'float32' or 'float64'")
        _ = self.policy

    @property
    def policy(self) -> GossipPolicy:
        """Which tensors are compressed."""
        return GossipPolicy(self.dense_below, self.buffers)  # type: ignore[arg-type]

    def to_record(self) -> ConfigRecord:
        """Return the set-up as a record."""
        return ConfigRecord(
            {
                "algorithm": json.dumps(dict(self.algorithm), separators=(",", ":")),
                "dtype": self.dtype,
                "dense-below": self.dense_below,
                "buffers": self.buffers,
            }
        )

    @classmethod
    def of(cls, message: Message) -> Setup:
        """Return the set-up that a message describes.

        Raises
        ------
        PayloadError
            When it describes none.
        ConfigError
            When a value of it is not valid.
        """
        found = message.content.get(SETUP) if message.has_content() else None
        if not isinstance(found, ConfigRecord):
            raise PayloadError(f"the message has no record {SETUP!r}: it does not come from a gossip relay")
        said = _checked(found, {"algorithm": str, "dtype": str, "dense-below": int, "buffers": str}, SETUP)
        try:
            algorithm = json.loads(said["algorithm"])
        except json.JSONDecodeError as error:
            raise PayloadError(f"record {SETUP!r} describes no algorithm: {error}") from error
        if not isinstance(algorithm, dict):
            raise PayloadError(f"record {SETUP!r} describes an algorithm by {said['algorithm']!r}, expected an object")
        return cls(algorithm, said["dtype"], said["dense-below"], said["buffers"])


def put_instruction(content: RecordDict, instruction: Instruction) -> None:
    """Write an instruction: its header, and one frame per letter."""
    _put(content, HEADER, instruction.to_parts(), _INSTRUCTION)


def take_instruction(message: Message) -> Instruction:
    """Return the instruction a message carries.

    Raises
    ------
    PayloadError
        When it carries none, or not all of it.
    LetterError
        When its parts do not fit each other.
    """
    return Instruction.from_parts(_take(_content(message), HEADER, _INSTRUCTION))


def put_answer(content: RecordDict, answer: Answer, key: str = HEADER) -> None:
    """Write an answer without its model: its header, and one frame per posting."""
    _put(content, key, answer.to_parts(), _ANSWER)


def take_answer(message: Message) -> Answer:
    """Return the answer a reply carries.

    Raises
    ------
    PayloadError, AnswerError
        When it carries none, or what it says is not of an answer's form.
    """
    return Answer.from_parts(_take(_content(message), HEADER, _ANSWER))


@dataclass(frozen=True)
class Kept:
    """All that a node has in its ``context.state``.

    Attributes
    ----------
    memory : Memory
        See :class:`fedcomp.gossip.node.Memory`.
    layout : Layout
        Of the model the run began with.
    own : dict of str to ndarray
        Buffers that never leave this node (``layout.exact``).
    """

    memory: Memory
    layout: Layout
    own: Mapping[str, NDArray[Any]]

    @classmethod
    def load(cls, context: Context) -> Kept | None:
        """Return what this node keeps; None when it keeps nothing. Modifies nothing.

        Raises
        ------
        StateError
            When what is there cannot be read.
        """
        state = context.state
        if _KEPT not in state:
            return None
        try:
            arrays, own = (_unpack(state, f"{_ARRAYS}/{name}") for name in ("state", "own"))
            memory = Memory.from_parts(arrays, _take(state, _KEPT, _MEMORY))
            return cls(memory, layout_of(str(state.config_records[_MODEL_OF]["layout"])), own)
        except (PayloadError, KeyError, ValueError, TypeError) as error:
            raise StateError(f"this node's memory of the run cannot be read: {error}; restart the node") from error

    def save(self, context: Context) -> None:
        """Write all of it; the last thing a handler does."""
        state = context.state
        for name in [n for n in state if n.startswith(f"{_KEPT}/")]:
            del state[name]
        arrays, parts = self.memory.to_parts()
        _pack(state, f"{_ARRAYS}/state", arrays)
        _pack(state, f"{_ARRAYS}/own", self.own)
        state[_MODEL_OF] = ConfigRecord({"layout": layout_text(self.layout)})
        _put(state, _KEPT, parts, _MEMORY)


def _pack(state: RecordDict, key: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Store named arrays as one: a state has dozens of them, and each one of Flower's has a price of its own."""
    whole = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    listed = json.dumps([[name, array.dtype.str, list(array.shape)] for name, array in whole.items()])
    data = b"".join(array.tobytes() for array in whole.values())
    state[key] = ArrayRecord({listed: Array("uint8", (len(data),), _STYPE, data)})


def _unpack(state: RecordDict, key: str) -> dict[str, NDArray[Any]]:
    ((listed, held),) = state.array_records[key].items()
    found, at = {}, 0
    for name, kind, shape in json.loads(listed):
        dtype = np.dtype(kind)
        size = _elements(shape)
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
    found = _content(message).get(MODEL)
    if not isinstance(found, ArrayRecord) or not found:
        raise PayloadError(f"the message has no model under {MODEL!r}")
    try:
        return to_arrays(found)
    except (ValueError, TypeError, EOFError) as error:
        raise PayloadError(f"the model under {MODEL!r} cannot be read: {error}") from error


def _elements(shape: list[int]) -> int:
    size = 1
    for extent in shape:
        if isinstance(extent, bool) or not isinstance(extent, int) or extent < 0:
            raise ValueError(f"{shape!r} is no shape")
        size *= extent
    return size


def _content(message: Message) -> RecordDict:
    if not message.has_content():
        raise PayloadError("the message is an error and carries nothing")
    return message.content


def _put(content: RecordDict, key: str, parts: Parts, form: Mapping[str, Any]) -> None:
    header: dict[str, Any] = {}
    for name, kind in form.items():
        value = parts[name]
        if kind == [bytes]:
            for place, data in enumerate(value):
                put_frame(content, f"{key}/{name}/{place}", data)
        elif value:
            # Flower cannot measure a record with an empty list or text in it, and every message pays for every entry.
            header[name] = [kind[0](v) for v in value] if isinstance(kind, list) else kind(value)
    content[key] = ConfigRecord(header)


def _take(content: RecordDict, key: str, form: Mapping[str, Any]) -> Parts:
    holder = content.get(key)
    if not isinstance(holder, ConfigRecord):
        raise PayloadError(f"the message has no header {key!r}: it does not come from decentralised learning")
    parts = _checked(holder, {n: k for n, k in form.items() if k != [bytes]}, key)
    for name, kind in form.items():
        if kind == [bytes]:
            parts[name] = _frames(content, f"{key}/{name}/")
    return parts


def _frames(content: RecordDict, prefix: str) -> list[bytes]:
    """Return the frames under ``prefix`` followed by 0, 1, 2 and so on.

    Raises
    ------
    PayloadError
        When one is missing among them, or is none.
    """
    count = sum(name.startswith(prefix) for name in content)
    if count > MOST_LETTERS:
        raise PayloadError(f"{count} letters in one message; no node has more than {MOST_LETTERS} neighbours")
    found = [take_frame(content, f"{prefix}{place}") for place in range(count)]
    whole = [frame for frame in found if frame is not None]
    if len(whole) != count:
        raise PayloadError(f"letter {found.index(None)} of {count} under {prefix!r} is missing")
    return whole


def _checked(record: ConfigRecord, form: Mapping[str, Any], key: str) -> Parts:
    """Return the entries of a record with their types checked, completed by what was empty.

    Raises
    ------
    PayloadError
        For an unknown entry, or one of another type.
    """
    unknown = sorted(name for name in record if name not in form)
    if unknown:
        raise PayloadError(
            f"record {key!r} has unknown entries {unknown[:5]}; server and client are of different versions"
        )
    parts: Parts = {}
    for name, kind in form.items():
        value = record.get(name)
        if value is None:
            parts[name] = [] if isinstance(kind, list) else kind()
            continue
        items = value if isinstance(kind, list) else [value]
        wanted = kind[0] if isinstance(kind, list) else kind
        # type() and not isinstance(): True is an int.
        if not isinstance(items, list) or any(type(item) is not wanted for item in items):
            form_text = f"a list of {wanted.__name__}" if isinstance(kind, list) else f"one {wanted.__name__}"
            raise PayloadError(f"entry {name!r} of record {key!r} is {_shown(value)}, expected {form_text}")
        parts[name] = list(items) if isinstance(kind, list) else value
    return parts


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
