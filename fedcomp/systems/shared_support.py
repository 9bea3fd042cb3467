"""ScaleCom: a leader chooses the support, all clients send on it, and the same number of values comes back down.

Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed Training",
NeurIPS 2020, arXiv:2104.11125; what a client does with its update is in :mod:`fedcomp.codecs.scalecom`.

In a round all clients train; the leader, whose turn goes round those present, answers with the support it chose and its
values on it. The others are asked a second time, with the support. Where the leader is lost, or its support cannot be
read, those that trained are asked to lead, one after the other. Neither the mean nor the support grows with the number
of clients.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final, TypeVar

import numpy as np

from fedcomp.codecs import Codec, State, get_codec
from fedcomp.codecs.scalecom import ScaleCom, Supports, open_support, support_frame
from fedcomp.layout import Layout, Vector
from fedcomp.program import Answer, AnswerError, Ask, Encoded, Frames, Me, Now, Round, Said, Step
from fedcomp.rng import Key
from fedcomp.rules import Int, Made, Real, Switch
from fedcomp.wire import Frame

T = TypeVar("T")

_CANDIDATES: Final = 4
"""Number of clients, after the first, that are asked to lead before a round is given up; each may cost a timeout."""


@dataclass(frozen=True, repr=False, eq=False)
class Lead(Said):
    """Whether a client is to choose the support."""

    lead: Switch = False


@dataclass(frozen=True, repr=False, eq=False)
class SharedSupport(Encoded, id="shared-support"):
    """ScaleCom: average updates on a support that one client chooses for all.

    Parameters
    ----------
    codec : ScaleCom or dict
        Density, filter, selector, form of the values.
    warmup_rounds : int
        The first rounds are sent at density 1.
    server_lr : float
        Step size of the server: model += server_lr * mean.
    """

    SAYS: ClassVar[tuple[type[Said], ...]] = (Lead,)
    SEVERAL: ClassVar[bool] = True
    SHARED: ClassVar[tuple[str, ...]] = ("support",)

    codec: Annotated[ScaleCom, Made(get_codec)]
    warmup_rounds: Annotated[int, Int()] = 0
    server_lr: Annotated[float, Real(above=0.0)] = 1.0

    def conflict(self) -> str:
        if not isinstance(self.codec, ScaleCom):
            return f"SharedSupport needs ScaleCom as its codec, got {self.codec!r}; Pair takes the others"
        return ""

    def at(self, number: int) -> ScaleCom:
        """Return the codec of a round."""
        return replace(self.codec, dense=True) if number <= self.warmup_rounds else self.codec

    def round(self, now: Now) -> Round:
        codec, layout = self.at(now.number), now.layout

        def opened(frame: Frame) -> Supports:
            supports = open_support(frame, codec, layout)
            if codec.dense and sum(support.size for support in supports) < layout.compressed_size:
                raise AnswerError("a dense round is on all coordinates: there is nothing to choose")
            return supports

        def chosen(answer: Answer) -> Supports | None:
            return now.read([answer], "support", opened).get(answer.node)

        led = yield from elect(now, lambda node, kind, lead: Ask(node, kind, Lead(lead)), chosen, now.number - 1)
        if led is None:
            return None
        leader, supports, others = led
        support = leader.frames["support"]
        sent = yield [Ask(node, "query", blobs={"support": support}) for node in others]
        now.told["leader"] = leader.node
        return self.stepped(now, supports, support, sorted([leader, *sent], key=lambda answer: answer.node))

    def stepped(self, now: Now, supports: Supports, support: Frame, given: Sequence[Answer]) -> Step | None:
        """Return the step that values on ``supports``, whose index block is ``support``, come to."""
        codec = self.at(now.number)
        total = now.mean_of(codec.on(supports, now.number), given, raw=True)
        if total is None or (change := now.downward(total, self.server_lr)) is None:
            return None
        # Float32 whatever the values came in: rounding the mean once more would be an error nobody remembers.
        mean = codec.mean(supports, now.number)
        frame, _ = mean.encode(change, {}, Key(now.seed, "downlink", now.number))
        return Step(total.consumed, frame=frame, blobs={"support": support}, codec=mean)

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        codec, frames = self.at(me.number), dict[str, Frame]()
        if ask.kind == "train":
            memory = codec.begin(me.update(), memory, me.key)
        if isinstance(ask.say, Lead) and ask.say.lead:
            supports = codec.choose(memory, me.layout, me.key)
            frames["support"] = support_frame(supports, codec, me.layout)
        elif "support" in ask.blobs:
            supports = open_support(ask.blobs["support"], codec, me.layout)
        else:
            return memory, Answer(me.node)
        frames["values"], memory = codec.send(memory, supports, me.number, me.layout, me.key)
        return memory, Answer(me.node, frames=frames)

    def reads(self, blobs: Frames, number: int, layout: Layout) -> Codec:
        codec = self.at(number)
        return codec.mean(open_support(blobs["support"], codec, layout), number)

    def residual(self, memory: State, layout: Layout) -> Vector | None:
        if not self.codec.memory:
            return None
        # Of what the filter lets through the memory holds a share alone.
        kept = self.codec.settle(memory, layout)["memory"]
        return kept if self.codec.beta == 1.0 else np.divide(kept, self.codec.beta, dtype=np.float32)


def elect(
    now: Now,
    ask: Callable[[int, str, bool], Ask],
    chosen: Callable[[Answer], T | None],
    turn: int,
) -> Generator[Sequence[Ask], Sequence[Answer], tuple[Answer, T, list[int]] | None]:
    """Let all clients train, and one choose for all.

    Parameters
    ----------
    ask : callable
        ``ask(node, kind, lead)``.
    chosen : callable
        Returns what an answer with a support and values chose; None where it cannot be used.
    turn : int
        Of those present, and of those that stand by for a lost leader: whose turn it is.

    Returns
    -------
    (Answer, object, list of int) or None
        The leader's answer, what it chose, and those that trained and wait for it; None where nobody could choose.
    """
    if not now.nodes:
        return None

    def led(answer: Answer) -> T | None:
        # A support without values on it is as good as none.
        if {"support", "values"} <= answer.frames.keys():
            return chosen(answer)
        now.refuse(answer.node, "it was asked to lead, and its answer holds no support with values")
        return None

    # Of those whose answer goes by the number that they are asked by; where there is none, the first that trained.
    known = [node for node in now.nodes if node not in now.strangers]
    leader = known[turn % len(known)] if known else None
    answers = yield [ask(node, "train", node == leader) for node in now.nodes]
    waiting = [answer.node for answer in answers if answer.node != leader]
    answers = [answer for answer in answers if answer.node == leader]
    start = turn % max(1, len(waiting))
    candidates = [*waiting[start:], *waiting[:start]][:_CANDIDATES]
    while not answers or (found := led(answers[0])) is None:
        if not candidates:
            now.note("no client could choose a support: the model is unchanged")
            return None
        # Who was asked to lead and did not is asked for nothing else: that could cost another timeout.
        node = candidates.pop(0)
        waiting.remove(node)
        answers = yield [ask(node, "query", True)]
    return answers[0], found, waiting
