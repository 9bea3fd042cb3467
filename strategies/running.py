"""One round in progress: the nodes asked, their answers, and the result by the inner strategy's rule."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Final, Protocol, TypeVar

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp.codecs import Codec
from fedcomp.codecs.base import norm
from fedcomp.flower.protocol import app_failure
from fedcomp.flower.records import to_arrays
from fedcomp.flower.report import Report, Reports
from fedcomp.layout import Layout, Vector
from fedcomp.mailbox import Mailbox
from fedcomp.program import AnswerError, Ask, Given, Mean, Now, Step, Wait
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.partitions import Holders
from fedcomp.strategies.replies import SentMessage
from fedcomp.wire import Bundle, FrameSizes

Arrays = Mapping[str, NDArray[Any]]

T = TypeVar("T")

Pushes = Generator[Iterable[Message], list[Message], T]
"""Exchanges one after the other: messages, perhaps with how long they are waited for, and their replies."""

ALL_WEIGHTLESS: Final = "weight 0, like all others of the round: nothing to average"


class Needs(Protocol):
    """What a strategy needs of updates, as :class:`fedcomp.strategies.sinks.UpdateRule` says it."""

    kind: ClassVar[type]
    takes_plain: bool
    measured: bool
    not_finite: ClassVar[str]

    @property
    def withholds(self) -> bool:
        """Whether neither log nor reports may say who took part."""
        ...

    @property
    def takes(self) -> Strategy:
        """The strategy that is handed what comes of updates."""
        ...

    def total(self, x: Running, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return what contributions come to."""
        ...


@dataclass
class Trained:
    """What came with a client's training beside the system's own.

    Attributes
    ----------
    reply : Message
    content : RecordDict
        Metrics, and whatever else the app replied beside the model.
    record : str
        Name of the model in the app's reply.
    sequence : int
        Of the message that it answers.
    exact : mapping of str to ndarray
        Its tensors that travel as values.
    metrics : str
        Name of the MetricRecord that weighs it.
    weight : float
    unchanged : frozenset of int
        Numbers of the tensors of which there was nothing to send.
    copies : dict of int to int
        Tensors that are another name of an earlier one, and that one.
    dense : bool
        Whether the app's model came as it is.
    unsupported : str
        Why it did.
    """

    reply: Message
    content: RecordDict
    record: str
    sequence: int
    exact: Arrays
    metrics: str = ""
    weight: float = 1.0
    unchanged: frozenset[int] = frozenset()
    copies: Mapping[int, int] = field(default_factory=dict)
    dense: bool = False
    unsupported: str = ""


@dataclass(frozen=True)
class Exchange:
    """Asks on their way as messages.

    Attributes
    ----------
    asks : dict of int to Ask
        By node.
    sent : list of SentMessage
    wait : Wait, optional
        How long it waits; None: for everybody.
    """

    asks: Mapping[int, Ask]
    sent: list[SentMessage]
    wait: Wait | None = None


class Start:
    """The model of a round, and what nodes without one of their own train from; made where somebody asks for it.

    Parameters
    ----------
    layout : Layout
    model : mapping of str to ndarray
    reference : callable, optional
        Returns what a downlink brings nodes in place of the model, None where it brings the model.
    """

    def __init__(self, layout: Layout, model: Arrays, reference: Callable[[], Vector | None] | None) -> None:
        self.layout, self.model, self._reference = layout, model, reference

    @cached_property
    def flat(self) -> Vector:
        """The model as one vector, not to be written to."""
        flat = self.layout.flatten(self.model)
        flat.setflags(write=False)
        return flat

    @cached_property
    def vector(self) -> Vector:
        """What nodes train from, as one vector; not to be written to. Where it is the model it is :attr:`flat`."""
        found = None if self._reference is None else self._reference()
        if found is None:
            return self.flat
        found.setflags(write=False)
        return found

    @cached_property
    def arrays(self) -> Arrays:
        """The same as tensors, in their own dtypes."""
        return self.model if self.vector is self.flat else self.layout.unflatten(self.vector, self.model)


@dataclass
class Running:
    """One round under way; clients by their numbers in the program.

    Attributes
    ----------
    report : Report
    arrays : ArrayRecord
        The model.
    model : mapping of str to ndarray
        It as views, not to be written to.
    start : Start
        The model that was sent.
    record : str
        Its name in messages.
    rule : Needs
        What the inner strategy needs of updates.
    base : dict of int to Message
        What the inner strategy sends.
    addresses : dict of int to int
    own : dict of int to mapping of str to ndarray
        The models of the nodes that are sent another one than the round's.
    trained : dict of int to Trained
    heard : set of int
        Who has answered more than a greeting.
    sent : dict of int to (int, int)
        Sequence and generation of the answer whose frame is in the memory's past.
    payload, exact_bytes : dict of int to int
    norms, sizes : dict
        Of what was verified last of a client.
    given : (Codec, list of Given)
        What was summed last.
    changed : int
        Values of the model that the round changes.
    errors : list of Message
        What stands for replies that could not be used, for the inner strategy.
    origins : dict of int to Start
        Of nodes that were asked in another round.
    mailbox : Mailbox
        What clients send each other, as the round leaves it.
    holders : Holders, optional
        Who held which partition before, where nobody is to take note of who does now; default the run's roster.
    began : int
        Number of the last exchange before the round.
    """

    report: Report
    arrays: ArrayRecord
    model: Arrays
    start: Start
    record: str
    rule: Needs
    base: dict[int, Message]
    addresses: dict[int, int]
    layout: Layout
    own: dict[int, Arrays]
    trained: dict[int, Trained] = field(default_factory=dict)
    heard: set[int] = field(default_factory=set)
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    payload: dict[int, int] = field(default_factory=dict)
    exact_bytes: dict[int, int] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, FrameSizes] = field(default_factory=dict)
    given: tuple[Codec | None, Sequence[Given]] = (None, ())
    changed: int = 0
    errors: list[Message] = field(default_factory=list)
    origins: dict[int, Start] = field(default_factory=dict)
    mailbox: Mailbox = field(default_factory=Mailbox)
    holders: Holders | None = None
    began: int = 0

    @property
    def vector(self) -> Vector:
        """The model as one vector, not to be written to."""
        return self.start.flat if self.model is self.start.model else self._moved

    @cached_property
    def _moved(self) -> Vector:
        vector = self.layout.flatten(self.model)
        vector.setflags(write=False)
        return vector

    def start_of(self, node: int) -> Arrays:
        """Return the tensors that a node trained from, in their own dtypes."""
        return self.own[node] if node in self.own else self.origins.get(node, self.start).arrays

    def onto(self, arrays: ArrayRecord) -> Running:
        """Return the round as one whose step is made on another model than the one that was sent."""
        return self if arrays is self.arrays else replace(self, arrays=arrays, model=to_arrays(arrays, copy=False))

    def aside(self) -> Running:
        """Return the same round as nobody has answered in it, to look at answers before they are taken."""
        return replace(
            self,
            report=Report(self.report.round),
            base=dict(self.base),
            addresses=dict(self.addresses),
            own=dict(self.own),
            trained=dict(self.trained),
            sent={},
            payload={},
            exact_bytes={},
            errors=[],
            origins=dict(self.origins),
            mailbox=self.mailbox.copy(),
            holders=Holders(),
        )

    def credit(self, node: int, sequence: int, generation: int) -> None:
        """Note what left a node's memory and came another way than in its answer.

        Raises
        ------
        AnswerError
            Where that was in no exchange of this round, or of a node that does not take part in it.
        """
        if sequence <= self.began or node not in self.addresses:
            raise AnswerError(f"what node {node} sent under number {sequence} belongs to no exchange of this round")
        self.sent[node] = sequence, generation

    def refuse(self, node: int, reason: str, reply: Message | None = None) -> None:
        """Report why a node's answer is not used; for the inner strategy it is a failed reply."""
        self.report.refuse(self.addresses[node], reason)
        failed = reply is not None and reply.has_error()
        self.errors.append(reply if reply is not None and failed else app_failure(self.base[node], reason))

    def weightless(self, given: Sequence[Given]) -> bool:
        """Whether contributions have no weight together, for which they are refused."""
        if not given or sum(each.weight for each in given) > 0:
            return False
        for each in given:
            self.refuse(each.node, ALL_WEIGHTLESS)
        return True

    def rename(self, node: int, declared: int) -> None:
        """Let a node go by the partition that it has declared from here on, and who was silent under it by its own."""
        sides: tuple[dict[int, Any], ...] = (self.base, self.addresses, self.own, self.origins)
        for each in sides:
            held = {declared: each.pop(node, None), node: each.pop(declared, None)}
            each.update({number: value for number, value in held.items() if value is not None})

    def seen(self, node: int, codec: Codec, came: Bundle | Vector, start: Callable[[], Vector]) -> None:
        """Note what was verified of a node: a lossless codec's frames hold models, of which the change counts."""

        def before() -> Vector:
            return self.layout.flatten(self.own[node]) if node in self.own else start()

        if isinstance(came, np.ndarray):
            if self.rule.measured:
                with np.errstate(over="ignore"):
                    self.norms[node] = norm(came, before()) if codec.lossless else norm(came)
            return
        trained = self.trained.get(node)
        # A frame that was made here of a model never travelled.
        if came.sizes is not None and not (trained is not None and trained.dense):
            self.sizes[node] = came.sizes
        if not self.rule.measured:
            return
        self.norms[node] = (
            norm(codec.decode(came, self.layout), before()) if codec.lossless else codec.norm(came, self.layout)
        )
        for name, value in codec.figures(came, self.layout, self.norms[node]).items():
            self.report.frames.setdefault(name, {})[self.addresses[node]] = value

    def weighted(self, used: Sequence[Trained]) -> dict[str, NDArray[Any]]:
        """Return the weighted mean of tensors that travel as values; the model's own where nothing of them came."""
        if not used:
            return {t.name: np.asarray(self.model[t.name]) for t in self.layout.exact}
        total = sum(each.weight for each in used)
        found: dict[str, NDArray[Any]] = {}
        for each in used:
            for name, array in each.exact.items():
                # numpy's promotion here is Flower's: int64 buffers become float64 means.
                part = array * (each.weight / total)
                found[name] = found[name] + part if name in found else part
        return found


Acknowledge = Callable[[Running, Iterable[int]], None]
"""``acknowledge(x, nodes)``: what the nodes sent is used, or dropped for good."""


class Judged:
    """A round's rule behind what the server looks at of contributions: norms, weights, outliers."""

    def __init__(self, x: Running, guard: Norms | None, past: Reports, acknowledge: Acknowledge) -> None:
        self._x, self._guard, self._past, self._acknowledge = x, guard, past, acknowledge

    @property
    def adds(self) -> bool:
        """Whether contributions may be added before all of them are known."""
        return self._guard is None and self._x.rule.kind is Mean

    def total(self, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return what the rule makes of contributions that are in the ordinary."""
        x, report = self._x, self._x.report
        for each in given if x.rule.measured else ():
            report.norms[x.addresses[each.node]] = x.norms[each.node]
            report.weights[x.addresses[each.node]] = each.weight
        if self._guard is not None:
            found = self._guard.outliers(report, self._past.before(now.number))
            refused = [each.node for each in given if x.addresses[each.node] in found]
            for node in refused:
                x.refuse(node, found[x.addresses[node]])
            # An outlier is dropped for good: put back into its client's memory, it would come again and again. Where
            # all of several are refused nobody can tell which is one.
            if not 1 < len(refused) == len(given):
                self._acknowledge(x, refused)
            given = [each for each in given if each.node not in refused]
        x.given = codec, given
        with np.errstate(over="ignore", invalid="ignore"):
            return x.rule.total(x, now, codec, given, raw=raw)


def copies_of(numbers: Sequence[int], layout: Layout) -> dict[int, int]:
    """Return which tensors a client says to be another name of an earlier one; what cannot be is left out."""
    found: dict[int, int] = {}
    for second, first in zip(numbers[::2], numbers[1::2], strict=True):
        if first < second < len(layout.tensors) and first not in found:
            one, other = layout.tensors[first], layout.tensors[second]
            if (one.shape, one.dtype) == (other.shape, other.dtype):
                found[second] = first
    return found
