"""Faults of single messages, and reproducible plans of them.

A plan is any callable from a :class:`Delivery` to a :class:`Fault`. It must be a pure function of the delivery, so
that a run repeats exactly, on resume too; the plans here are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, get_args

from flwr.app import Array, ArrayRecord, Message

from fedcomp.errors import ConfigError
from fedcomp.flower.payload import frames, put_frame
from fedcomp.rng import Key
from fedcomp.rules import Configured, Int, OneOf

Kind = Literal[
    "none",
    "offline",
    "raise",
    "silent",
    "lost_reply",
    "late",
    "duplicate",
    "duplicate_reply",
    "corrupt",
]

KINDS: Final[tuple[str, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Fault(Configured):
    """One outcome of a delivery.

    Parameters
    ----------
    kind : str
        ``none``: all goes well.
        ``offline``: the node does not take the message; the SuperLink answers with error 5 in its own name.
        ``raise``: the app runs to its end and raises then: error 2. Whether its state changes stay is the grid's
        ``error_state``.
        ``silent``: the client never runs and no reply ever comes.
        ``lost_reply``: the client runs and commits its state; its reply is lost.
        ``late``: the client runs; its reply can be pulled only after ``pushes`` more pushes.
        ``duplicate``: the message reaches the client twice, the client runs twice and both replies arrive.
        ``duplicate_reply``: the client runs once, its reply arrives twice.
        ``corrupt``: one bit of the reply's payload is flipped on the way to the server.
    pushes : int
        Delay of a late reply, at least 1.
    """

    kind: Annotated[Kind, OneOf(*KINDS)] = "none"
    pushes: Annotated[int, Int(1)] = 1


NO_FAULT: Final = Fault()


def late(pushes: int = 1) -> Fault:
    """Return the fault that holds a reply back for ``pushes`` pushes."""
    return Fault("late", pushes)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message about to reach one node: what a fault plan may look at.

    Parameters
    ----------
    exchange : int
        How many batches of messages were pushed before this one, from 0.
    round : int
        Server round, 0 when neither the driver nor the message says.
    partition : int
        Partition id of the node.
    slot : int
        How many messages of the same batch went to the same node before this one.
    message_type : str
        Flower's message type.
    """

    exchange: int
    round: int
    partition: int
    slot: int
    message_type: str


FaultPlan = Callable[[Delivery], "Fault | Kind | None"]


def resolve(outcome: Fault | str | None) -> Fault:
    """Return a plan's answer as a :class:`Fault`; None means none, a word means that kind."""
    if outcome is None:
        return NO_FAULT
    return outcome if isinstance(outcome, Fault) else Fault(outcome)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RandomFaults:
    """Independent faults with given probabilities, drawn from a counter-based stream.

    Parameters
    ----------
    key : Key
        Names the stream; each delivery uses ``key`` at its exchange, partition and slot.
    probabilities : mapping of kind to float
        For instance ``{"offline": 0.1, "lost_reply": 0.05}``; they must not sum to more than 1.
    pushes : int
        Delay of replies that come out ``late``.
    message_types : sequence of str, optional
        Only messages whose type starts with one of these can fail; default all.

    Raises
    ------
    ConfigError
        For an unknown kind, a negative probability, or a sum above 1.

    Examples
    --------
    >>> from fedcomp.rng import Key
    >>> plan = RandomFaults(Key(7), {"offline": 0.1, "lost_reply": 0.05})
    """

    key: Key
    probabilities: Mapping[Kind, float] = field(default_factory=dict)
    pushes: int = 1
    message_types: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for kind, probability in self.probabilities.items():
            # Made for its checks: a wrong kind is found when the plan is made, not in the round that draws it.
            Fault(kind, self.pushes)
            # Written this way round, it refuses NaN, too.
            if not probability >= 0:
                raise ConfigError(f"probability of {kind!r} is {probability!r}, expected a number >= 0")
        # Decimal fractions that add up to 1 may exceed it by rounding.
        if sum(self.probabilities.values()) > 1 + 1e-12:
            raise ConfigError(f"fault probabilities {dict(self.probabilities)} sum to more than 1")

    def __call__(self, delivery: Delivery) -> Fault:
        """Return the fault of ``delivery``."""
        if not _concerns(self.message_types, delivery.message_type):
            return NO_FAULT
        # By exchange, of which a round has several, and by partition: node ids are new in every run.
        key = self.key.at(round=delivery.exchange, partition=delivery.partition, layer=delivery.slot)
        left = float(key.uniform(1)[0])
        # One number decides between all kinds, so that they exclude each other; the rest of [0, 1) means no fault.
        for kind, probability in self.probabilities.items():
            if left < probability:
                return Fault(kind, self.pushes)
            left -= probability
        return NO_FAULT


@dataclass(frozen=True)
class ScriptedFaults:
    """Faults written down one by one.

    Parameters
    ----------
    script : mapping of (round, partition) to Fault or kind
        What happens to that node in that server round.
    message_types : sequence of str
        Only messages whose type starts with one of these are concerned; default ``("train",)``.

    Examples
    --------
    >>> plan = ScriptedFaults({(3, 0): "offline", (4, 1): "lost_reply"})
    """

    script: Mapping[tuple[int, int], Fault | Kind]
    message_types: Sequence[str] | None = ("train",)

    def __call__(self, delivery: Delivery) -> Fault:
        """Return the fault of ``delivery``."""
        if not _concerns(self.message_types, delivery.message_type):
            return NO_FAULT
        return resolve(self.script.get((delivery.round, delivery.partition)))


def _concerns(prefixes: Sequence[str] | None, message_type: str) -> bool:
    return prefixes is None or message_type.startswith(tuple(prefixes))


def corrupt(message: Message, key: Key) -> bool:
    """Flip one bit of ``message``'s payload in place, chosen by ``key``; return whether there was any.

    A frame is hit where there is one; otherwise the data of an Array is, which nothing but the receiver's own
    sanity checks can notice.
    """
    if not message.has_content():
        return False
    content = message.content
    # Which frame, which byte, which bit: words of 64 bits, whose remainders are uniform for all practical purposes.
    words = key.bits(3).tolist()
    # An empty frame has no bit to flip.
    holders = {name: frame for name, frame in frames(content).items() if frame}
    if holders:
        # By name: the order of records in a message is the app's affair.
        name = sorted(holders)[words[0] % len(holders)]
        put_frame(content, name, _flip(holders[name], words[1], words[2]))
        return True
    arrays = [
        (record, name)
        for record in content.values()
        if isinstance(record, ArrayRecord)
        for name, array in record.items()
        if array.data
    ]
    if not arrays:
        return False
    record, name = arrays[words[0] % len(arrays)]
    array = record[name]
    record[name] = Array(array.dtype, array.shape, array.stype, _flip(array.data, words[1], words[2]))
    return True


def _flip(data: bytes, position: int, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[position % len(damaged)] ^= 1 << (bit % 8)
    return bytes(damaged)
