"""dAD, edAD and rank-dAD: layer inputs and output gradients are sent in place of their product.

Baker, Khanal, Calhoun, Pearlmutter, Plis, "Peering Beyond the Gradient Veil with Distributed Auto Differentiation",
arXiv:2102.09631 (abstracts and the authors' code read); which form each tensor takes is in
:mod:`fedcomp.codecs.factors`.

What came up may go down in the same way: the factors of all clients beside each other, as long as they are shorter
than the model. And a frame may come layer by layer, the last layer first, as the authors average during
back-propagation: an ask for each layer, of which all but the first cost a round trip and hide nothing, since a client
answers when it is done (:func:`fedcomp.timing.pipeline.layered` says what it costs). The result is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final

import numpy as np

from fedcomp import wire
from fedcomp.codecs import Codec, Factors, State, get_codec
from fedcomp.codecs.factors import at_model, wanted_by
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.factors.collect import Captured
from fedcomp.layout import Layout, Vector
from fedcomp.program import Answer, AnswerError, Ask, Encoded, Frames, Given, Me, Mean, Now, Round, Said, Single, Step
from fedcomp.rules import Int, Made, Switch
from fedcomp.wire import Bundle, Frame, Limits

MAX_LAYERS: Final = 1 << 12

DOWN: Final = Factors(mode="dad", i_know_inputs_are_visible=True)
"""How a step is read that goes down as factors: exact, every tensor in its shortest form."""

_PART = "part"
_PARTS = "parts"


@dataclass(frozen=True, repr=False, eq=False)
class FetchPart(Said):
    """Which part of its frame a client is asked for, from 1; 0 is that of the last layer, which comes by itself."""

    part: Annotated[int, Int(1, MAX_LAYERS)]


@dataclass(frozen=True, repr=False, eq=False)
class FramePart(Said):
    """Which part of a frame an answer holds, and how many there are."""

    part: Annotated[int, Int(most=MAX_LAYERS)]
    parts: Annotated[int, Int(1, MAX_LAYERS)]

    def conflict(self) -> str:
        return f"part={self.part} of parts={self.parts}" if self.part >= self.parts else ""


@dataclass(frozen=True, repr=False, eq=False)
class FactorSharing(Encoded, id="factors"):
    """Average updates that are sent as outer products.

    Parameters
    ----------
    codec : Factors or dict
        Mode, rank, forms. With error feedback around it whole matrices are remembered and reduced, and nothing is
        captured.
    by_layer : bool
        An exchange for each layer in place of one.
    down : bool
        The mean goes down as the factors of all clients beside each other, where they are shorter than the model: what
        they show the server of each client, they then show every client.

    Examples
    --------
    >>> FactorSharing(Factors(rank=4), by_layer=True)
    FactorSharing(codec=Factors(rank=4), by_layer=True)
    """

    SAYS: ClassVar[tuple[type[Said], ...]] = (FetchPart, FramePart)
    BESIDE: ClassVar[tuple[str, ...]] = (_PART,)
    RULES: ClassVar[tuple[type, ...]] = (Mean, Single)

    codec: Annotated[Codec, Made(get_codec)]
    by_layer: Switch = False
    down: Switch = False

    def conflict(self) -> str:
        found = isinstance(_inner(self.codec), Factors)
        return "" if found else f"codec={self.codec!r}: expected Factors, or error feedback around it"

    @property
    def makes_steps(self) -> bool:
        return self.down

    @property
    def several(self) -> bool:
        return self.by_layer

    def at(self, model: Vector, layout: Layout) -> Codec:
        """Return the codec for updates of a model: edAD back-propagates through it."""
        return at_model(self.codec, lambda: layout.unflatten(model))

    def round(self, now: Now) -> Round:
        codec = self.at(now.model, now.layout)
        if self.by_layer:
            given = yield from self._by_layer(now, codec)
        else:
            answers = yield [Ask(node) for node in now.nodes]
            given = now.give(answers, self.SENT)
        total = now.total(codec, given)
        if total is None or total.change is None or not self.down:
            return total
        return self._downward(now, codec, total, given)

    def _by_layer(self, now: Now, codec: Codec) -> Generator[Sequence[Ask], Sequence[Answer], list[Given]]:
        """Collect frames in parts; return the complete ones."""
        count, limits = len(layers(now.layout)), codec.limits(now.layout)
        answers = yield [Ask(node, expects=FramePart) for node in now.nodes]
        weights = {answer.node: answer.weight for answer in answers}
        # A frame that cannot be divided comes in one part.
        whole, others = ([a for a in answers if (a.say == FramePart(0, 1)) is alone] for alone in (True, False))
        frames = self._read(now, whole, self.SENT, limits)
        given = [Given(node, weights[node], frame) for node, frame in frames.items()]
        held = {node: [part] for node, part in self._part(now, others, 0, count, limits).items()}
        for number in range(1, count):
            waiting = [node for node, parts in held.items() if len(parts) == number]
            if not waiting:
                break
            answers = yield [Ask(node, "query", say=FetchPart(number), expects=FramePart) for node in waiting]
            for node, part in self._part(now, answers, number, count, limits).items():
                held[node].append(part)
        complete = {node: parts for node, parts in held.items() if len(parts) == count}
        if given and count > 1:
            now.note(f"{len(given)} of {len(given) + len(held)} frames came in one part")
        given += [Given(node, weights[node], _joined(parts)) for node, parts in complete.items()]
        return sorted(given)

    def _part(self, now: Now, answers: Sequence[Answer], number: int, count: int, limits: Limits) -> dict[int, Bundle]:
        """Return by node the part with this number; refuse other answers."""
        # With the first one all of the update leaves the memory.
        asked, name = FramePart(number, count), _PART if number else self.SENT
        for answer in answers:
            if answer.say != asked or name not in answer.frames:
                now.refuse(answer.node, f"says {answer.say} of frames {sorted(answer.frames)[:5]}, expected {asked}")
        return self._read(now, [answer for answer in answers if answer.say == asked], name, limits)

    def _read(self, now: Now, answers: Sequence[Answer], name: str, limits: Limits) -> dict[int, Bundle]:
        return now.read(answers, name, lambda frame: wire.decode(frame, limits=limits))

    def _downward(self, now: Now, codec: Codec, total: Step, given: Sequence[Given]) -> Step | None:
        """Return the step as the factors of all its frames if they are shorter than the model."""
        layout, down = now.layout, now.downward(total, 1.0)
        if down is None:
            return None
        used = [g for g in given if g.node in total.consumed]
        captured, weight = Captured(DOWN.takes_outer), sum(g.weight for g in used)
        for g in used:
            for name, outer in _inner(codec).outer(g.frame, layout).items():
                captured.stack(name, outer.scaled(g.weight / weight * now.scales.get(g.node, 1.0)))
        changes, before = ({t.name: vector[t.slice] for t in layout.tensors} for vector in (down.vector, now.model))
        outer_of = captured.explaining(changes, before)
        for text in captured.notes:
            now.note(f"the downlink message is not made of factors: {text}")
        frame, _ = DOWN.encode(replace(down, outer=outer_of), {}, now.key("downlink"))
        return replace(total, frame=frame, codec=DOWN) if len(frame) < 4 * layout.size else total

    def reads(self, blobs: Frames, number: int, layout: Layout) -> Codec:
        return DOWN

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        if isinstance(ask.say, FetchPart):
            return memory, _kept(memory, ask.say.part, me)
        codec = self.at(me.start, me.layout)
        # Memory and update together are no sum of what was captured.
        update = me.update(collect=wanted_by(codec))
        frame, after = codec.encode(update, self.own(memory), me.key)
        if not self.by_layer:
            return after, Answer(me.node, frames={self.SENT: frame})
        first, *rest = split(frame, layers(me.layout))
        kept = {f"{_PART}/{number}": np.frombuffer(part, np.uint8) for number, part in enumerate(rest, start=1)}
        # They belong to this round alone.
        kept[_PARTS] = np.array([me.number, 1 + len(rest)])
        return {**after, **kept}, Answer(
            me.node, say=FramePart(0, 1 + len(rest)), frames={self.SENT: first}, sent=frame
        )

    def rollback(self, memory: State, frame: Frame, layout: Layout) -> State:
        # Parts belong to the frame that is put back.
        return self.codec.rollback(self.own(memory), frame, layout)


def _inner(codec: Codec) -> Codec:
    return codec.codec if isinstance(codec, ErrorFeedback) else codec


def _kept(memory: State, number: int, me: Me) -> Answer:
    part = memory.get(f"{_PART}/{number}")
    if part is None or memory[_PARTS][0] != me.number:
        raise AnswerError(f"this node has no part {number} of round {me.number}")
    return Answer(me.node, say=FramePart(number, int(memory[_PARTS][1])), frames={_PART: part.tobytes()})


def layers(layout: Layout) -> tuple[int, ...]:
    """Return how many tensors each layer has, in the layout's order: those whose names differ behind the last dot."""
    owners = (t.name.rpartition(".")[0] for t in layout.tensors)
    return tuple(len(list(group)) for _, group in itertools.groupby(owners))


def split(frame: Frame, tensors: Sequence[int]) -> list[Frame]:
    """Return a frame in parts, the last layer's first; the frame alone where it does not have a tensor for each."""
    found = wire.decode(frame).tensors
    if len(tensors) < 2 or len(found) != sum(tensors):
        return [frame]
    ends = list(itertools.accumulate(tensors))
    parts = [wire.encode(found[end - count : end]) for end, count in zip(ends, tensors, strict=True)][::-1]
    # A frame that says more than its tensors do would come out as another one.
    return parts if joined(parts) == frame else [frame]


def joined(parts: Sequence[Frame], limits: Limits | None = None) -> Frame:
    """Return the frame that was :func:`split` into ``parts``.

    Raises
    ------
    fedcomp.wire.WireError
        When one of them is no frame, or exceeds ``limits``.
    """
    found = [wire.decode(part) if limits is None else wire.decode(part, limits=limits) for part in parts]
    return wire.encode(_joined(found).tensors)


def _joined(parts: Sequence[Bundle]) -> Bundle:
    return Bundle(tuple(tensor for part in reversed(parts) for tensor in part.tensors))
