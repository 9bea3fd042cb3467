"""Conditional rounds: nodes with nothing new send a few bytes instead of an update, and are left out of the mean.

FLARE (Chow, Raza, Mavromatis, Khan, arXiv:2305.08504) has an edge send when its training is not settled, or its sensors
saw something new, and not by the clock. Here the same decision stands one tier up, between nodes and server: a node has
something to send while the losses of the rounds' models on its own held-out data have not settled
(:mod:`fedcomp.drift.schedule`), and when a sensor below it has seen something new. What codecs remember stays as it is
while a node is quiet. The exchange, ``max_skip`` and the query are derived.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Protocol

import numpy as np

from fedcomp.codecs import State
from fedcomp.codecs.factors import wanted_by
from fedcomp.drift.schedule import DeploymentScheduler, ScheduleSettings
from fedcomp.drift.sensor import Upload
from fedcomp.errors import StateError
from fedcomp.layout import Update
from fedcomp.plain import Count
from fedcomp.program import HELLO, Answer, AnswerError, Ask, Me, Now, Round, Said
from fedcomp.rules import Flag, Int, Switch
from fedcomp.stateful import Stateful, nested
from fedcomp.systems.pair import Pair

DECIDES: Final = "decides"
"""Where a node's memory has what it decides by."""


class Watch(Protocol):
    """What an app brings: how good models are on a node's held-out data, and the sensors below it.

    Attributes
    ----------
    settings : ScheduleSettings
        What counts as stable.
    """

    settings: ScheduleSettings

    def loss(self, me: Me, update: Update | None = None) -> float:
        """Return the loss of the round's model on held-out data, or of what training has made of it."""
        ...

    def windows(self) -> Mapping[int, Upload]:
        """Return what sensors sent, by number."""
        ...

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop windows that are trained on, and whose use is remembered."""
        ...

    def absorb(self, windows: Sequence[Upload]) -> None:
        """Add what sensors sent to the data; the same windows may come again where the round failed after it."""
        ...

    def deploy(self, me: Me) -> None:
        """Give sensors the round's model."""
        ...


@dataclass(frozen=True, repr=False, eq=False)
class Offer(Said):
    """What the server says to those that it sends the model.

    Attributes
    ----------
    must : bool
        An update is wanted in any case; else the node may be quiet.
    """

    must: Annotated[bool, Flag(absent=False)] = False


@dataclass(frozen=True, repr=False, eq=False)
class Status(Said):
    """What a node says of itself: when it is asked, and when it is quiet or there is more to say than an update.

    Attributes
    ----------
    quiet : bool
        It has nothing to send.
    unaware : bool
        Its app brings nothing to decide by: it trains in every round.
    anew : bool
        What it decided by is of an app with other settings, and begins with this round.
    """

    quiet: Annotated[bool, Flag(absent=False)] = False
    unaware: Annotated[bool, Flag(absent=False)] = False
    anew: Annotated[bool, Flag(absent=False)] = False


class Decision(Stateful):
    """What a node decides by from round to round.

    Attributes
    ----------
    scheduler : DeploymentScheduler
    round : int
        The last round whose loss was noted: a round that is made again counts once.
    used : list of int
        Windows of sensors that are trained on. They are dropped with the next training: only then is it certain that
        the memory, which knows of them, was kept.
    anew : bool
        Whether what is remembered was decided by other settings, so that this begins.
    """

    STATE: ClassVar[Mapping[str, Any]] = {"scheduler": nested("scheduler"), "round": Count, "used": list[Count]}

    def __init__(self, settings: ScheduleSettings) -> None:
        self.scheduler = DeploymentScheduler(settings)
        self.round = 0
        self.used: list[int] = []
        self.anew = False

    @classmethod
    def of(cls, memory: State, settings: ScheduleSettings) -> Decision:
        """Return what a memory holds; what begins where it holds nothing, or what is of other settings.

        Raises
        ------
        FedcompError
            When it is damaged.
        """
        decision = cls(settings)
        if DECIDES not in memory:
            return decision
        try:
            held = json.loads(memory[DECIDES].tobytes())
        except ValueError as error:
            raise StateError(f"what this node decides by is damaged: {error}") from error
        try:
            decision.load_state_dict(held)
        except StateError:
            decision = cls(settings)
            decision.anew = True
        return decision

    def to_array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return this for a memory."""
        return np.frombuffer(json.dumps(self.state_dict()).encode(), np.uint8)


@dataclass(frozen=True, repr=False, eq=False)
class ConditionalRounds(Pair, id="conditional"):
    """Conditional rounds: nodes with nothing new send no update, and the mean is taken over the others.

    Not for private sums: whether a node answers follows from its data. Clients to which their apps bring nothing
    (:class:`Watch`) train in every round.

    Parameters
    ----------
    codec : Codec or dict
        Of those that send; as of :class:`~fedcomp.systems.pair.Pair`.
    max_skip : int
        Largest number of consecutive rounds in which a node may send no update; with 0 every node always sends.
    query : bool
        Ask first, without a model, and send the model only to nodes with an update to send. Otherwise all nodes receive
        the model, and may reply that they have nothing new.
    """

    APP: ClassVar[str] = "app = fc.client(app, fc.conditional(...))"
    SAYS: ClassVar[tuple[type[Said], ...]] = (Offer, Status)
    KEEPS: ClassVar[bool] = True
    BESIDE: ClassVar[tuple[str, ...]] = (DECIDES,)

    max_skip: Annotated[int, Int()] = 10
    query: Switch = True

    @property
    def several(self) -> bool:
        return self.query

    def round(self, now: Now) -> Round:
        skipped: dict[str, int] = now.state.get("skipped", {})
        due = [node for node in now.nodes if skipped.get(str(node), 0) >= self.max_skip]
        quiet, willing, unaware = list[int](), list[int](), list[int]()
        nodes, asked = list(now.nodes), [node for node in now.nodes if node not in due]
        if not self.query:
            asked = []
        if asked:
            answers = yield [Ask(node, HELLO, expects=Status) for node in asked]
            quiet, willing = self._sort(now, answers, unaware)
            nodes = sorted([*due, *willing])
        given = []
        if nodes:
            answers = yield [Ask(node, say=Offer(self.query or node in due)) for node in nodes]
            silent, _ = self._sort(now, answers, unaware)
            for node in silent:
                if self.query or node in due:
                    now.refuse(node, "it was asked to send, and has nothing to send")
                else:
                    quiet.append(node)
            given = [answer for answer in answers if answer.node not in silent]
        # Who did not answer has not been heard either, and is due again if it was; one that answered the query, and of
        # which only the update was lost, has.
        heard = {*willing, *(answer.node for answer in given)}
        # Those that have never answered may do so under other numbers.
        known = sorted({*now.nodes, *quiet, *heard} - ({*now.strangers} - {*quiet, *heard}))
        now.state["skipped"] = skipped | {str(n): 0 if n in heard else skipped.get(str(n), 0) + 1 for n in known}
        now.told["round"] = {"quiet": quiet, "queried": len(asked), "due": due, "unaware": sorted({*unaware})}
        return self.summed(now, given)

    def _sort(self, now: Now, answers: Sequence[Answer], unaware: list[int]) -> tuple[list[int], list[int]]:
        """Return the quiet nodes and the others; record nodes that cannot decide and nodes whose settings changed."""
        quiet, others = list[int](), list[int]()
        for answer in answers:
            say = answer.say if isinstance(answer.say, Status) else Status()
            (quiet if say.quiet else others).append(answer.node)
            if say.unaware:
                unaware.append(answer.node)
            if say.anew:
                now.note(f"node {answer.node} decides by other settings than before: losses count from this round on")
        return quiet, others

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        watch: Watch | None = me.data
        decision = None if watch is None else Decision.of(memory, watch.settings)
        if ask.kind == HELLO:
            if watch is None or decision is None:
                return memory, Answer(me.node, say=Status(unaware=True))
            waits = not watch.windows().keys() <= {*decision.used}
            return memory, Answer(me.node, say=Status(decision.scheduler.stable and not waits))
        if not isinstance(ask.say, Offer):
            raise AnswerError("the ask does not say whether an update is wanted in any case")
        if watch is None or decision is None:
            kept, answer = super().client(self.own(memory), ask, me)
            return kept, answer._replace(say=Status(unaware=True))
        watch.forget(decision.used)
        windows, scheduler = watch.windows(), decision.scheduler
        if windows:
            # Before the loss is measured: held-out data are to include what is new.
            watch.absorb([windows[number] for number in sorted(windows)])
            scheduler.drifted()
        before = watch.loss(me)
        if decision.round != me.number:
            decision.round = me.number
            if scheduler.note(before):
                watch.deploy(me)
        decision.used = sorted(windows)
        if scheduler.stable and not windows and not ask.say.must:
            return {**memory, DECIDES: decision.to_array()}, Answer(me.node, say=Status(quiet=True))
        update = me.update(whole=self.whole, collect=wanted_by(self.codec))
        scheduler.tried(before, watch.loss(me, update))
        frame, kept = self.encoded(update, self.own(memory), me)
        say = Status(anew=True) if decision.anew else None
        return {**kept, DECIDES: decision.to_array()}, Answer(me.node, say=say, frames={self.SENT: frame})
