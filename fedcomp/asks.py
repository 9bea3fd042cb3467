"""Requests and answers of a program in plain values; :mod:`fedcomp.program` defines how they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from fedcomp.errors import FedcompError
from fedcomp.layout import Vector
from fedcomp.params import shown
from fedcomp.rules import REQUIRED, Configured, rules_of
from fedcomp.wire import Frame

Frames = Mapping[str, Frame]
"""Bytes by name."""

NO_FRAMES: Frames = {}

HELLO = "query.hello"
"""Kind of an ask that comes before a round's training: words up and down, no model, and no memory changes."""

SHOW = "query.show"
"""Kind of a question that the app helps to answer: its message holds the strategy's configuration, as one to train."""

EVALUATE = "evaluate"
"""Kind of an ask that brings the model to be evaluated; the app evaluates once the half has read it."""


class AnswerError(FedcompError, ValueError):
    """An answer or its values do not match the ask; only this answer is refused."""


class Said(Configured):
    """The plain values of an ask or an answer: a frozen dataclass with a rule for every field."""

    def entries(self) -> dict[str, Any]:
        """Return the fields as plain entries, without those that their absence stands for."""
        kind: Any = type(self)
        rules, found = rules_of(kind), {}
        for name, rule in rules.items():
            value = getattr(self, name)
            if value != rule.missing:
                found[name] = rule.write(value)
        return found

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        """Return the object described by the entries of a message.

        Raises
        ------
        AnswerError
            Naming the entry that is missing, unknown or breaks its rule, or saying why fields contradict each other.
        """
        kind: Any = cls
        rules = rules_of(kind)
        if unknown := sorted(entries.keys() - rules.keys()):
            raise AnswerError(f"{cls.__name__} has no entries {unknown[:5]}")
        found = {}
        for name, rule in rules.items():
            value = entries.get(name, rule.missing)
            if value is REQUIRED:
                raise AnswerError(f"{name!r} of {cls.__name__} is missing, expected {rule}")
            try:
                found[name] = rule.read(value) if name in entries else value
            except ValueError:
                raise AnswerError(f"{name!r} of {cls.__name__} is {shown(value)}, expected {rule}") from None
        try:
            return cls(**found)
        except FedcompError as why:
            raise AnswerError(f"not a valid {cls.__name__}: {why}") from why


class Post(NamedTuple):
    """Bytes from one client to another.

    Attributes
    ----------
    source, to : int
        Nodes.
    name : str
        Kind of content, 1 to 200 characters. Every relay can read it, and ``data``, too, unless that is sealed.
    data : bytes
    """

    source: int
    to: int
    name: str
    data: Frame


class Ask(NamedTuple):
    """A request to one node. Nodes are partitions; a driver knows their addresses.

    Attributes
    ----------
    node : int
    kind : str
        "train": the app trains when the client half asks for an update. "query": it is not called, and the round goes
        on that a training ask began. :data:`HELLO`: it is asked beforehand; the answer holds words alone.
        :data:`EVALUATE`: of :meth:`System.evaluation` alone; memory does not change.
    say : Said, optional
        Plain values of the request.
    frames : mapping of str to bytes
        Bytes for this node only.
    blobs : mapping of str to bytes
        Bytes shared by rounds or nodes (a basis, an autoencoder): a driver sends them only to nodes that lack them.
    expects : type of Said, optional
        Type of the answer's plain values; the driver refuses any other.
    dense : bool
        Whether a trained model is accepted from a client without a half for this system, as :attr:`Answer.update`.
        Otherwise the driver refuses it.
    mail : tuple of Post
        Messages of other clients to this one; the driver fills it in.
    model : bool
        Whether the node needs the round's model: a training ask carries it, and a query follows one that did. Without
        it any node can be asked, whether or not its app has trained in this round; a node without memory then has an
        empty memory and an empty layout.
    """

    node: int
    kind: str = "train"
    say: Said | None = None
    frames: Frames = NO_FRAMES
    blobs: Frames = NO_FRAMES
    expects: type[Said] | None = None
    dense: bool = False
    mail: tuple[Post, ...] = ()
    model: bool = True


class Answer(NamedTuple):
    """The answer of a client half.

    Attributes
    ----------
    node : int
    weight : float
        Weight in a mean; set by the driver from the app's metrics. 0 until the app has trained.
    say : Said, optional
    frames : mapping of str to bytes
    sent : bytes, optional
        The frame by which mass leaves the memory, if the frame named :attr:`System.SENT` is only a part of it.
    update : float32 array, optional
        From a client without this half, in place of frames: its update, or with :attr:`System.whole` its model.
    post : tuple of Post
        Messages for other clients, delivered with their next ask.
    keep : mapping of str to bytes
        Data that the node stores besides its memory, by name: it survives sessions, restarts of the server and resets
        of the memory. :attr:`Me.kept` reads it.
    bare : bool
        Whether nothing of the app's reply is sent with this answer: no weight, metrics or buffers.
    """

    node: int
    weight: float = 0.0
    say: Said | None = None
    frames: Frames = NO_FRAMES
    sent: Frame | None = None
    update: Vector | None = None
    post: tuple[Post, ...] = ()
    keep: Frames = NO_FRAMES
    bare: bool = False


@dataclass(frozen=True)
class Wait:
    """An exchange that need not wait for all answers. Later answers are refused as late.

    Attributes
    ----------
    asks : sequence of Ask
    seconds : float, optional
        Longest time to wait; the driver's own timeout applies as well.
    enough : callable, optional
        ``enough(answers)``, with the answers so far in the order of nodes: whether waiting ends.
    """

    asks: Sequence[Ask]
    seconds: float | None = None
    enough: Callable[[Sequence[Answer]], bool] | None = None


def wait_for(wanted: Sequence[Ask] | Wait) -> Wait:
    """Return what a program yielded as a wait; by itself asks wait for everybody."""
    return wanted if isinstance(wanted, Wait) else Wait(wanted)


def mark_of(sequence: int, generation: int) -> bytes:
    """Return 16 bytes that name what left a memory: number of the exchange, and that with which the memory began."""
    return sequence.to_bytes(8, "little") + generation.to_bytes(8, "little")


def read_mark(mark: bytes) -> tuple[int, int]:
    """Return sequence and generation; raise AnswerError where a mark is none."""
    if len(mark) != 16:
        raise AnswerError(f"a mark has {len(mark)} bytes, expected 16")
    return int.from_bytes(mark[:8], "little"), int.from_bytes(mark[8:], "little")
