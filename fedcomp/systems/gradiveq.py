"""GradiVeQ in cycles: sample dense rounds, fit a basis to their means, then send slices in it.

Yu et al., "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN Training",
NeurIPS 2018, arXiv 1811.03617; what was read of it, and what is derived, is in :mod:`fedcomp.codecs.subspace`.

One party fits, the server: eigenvectors differ between builds of linear algebra. Frames name the basis they are in, and
one of another basis is refused: coefficients in two bases must never be added. With ``levels`` clients round on grids
that all share, and a round has two exchanges: the first brings everybody's largest coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedcomp.codecs import Codec, GradiVeQ, State, get_codec
from fedcomp.codecs.cycle import COMPRESSION, SAMPLING, Cycle
from fedcomp.codecs.fixedpoint import IntegerGrid
from fedcomp.codecs.gradiveq import open_steps, steps_frame
from fedcomp.codecs.subspace import Moments, SliceBasis
from fedcomp.layout import Layout, Vector
from fedcomp.plain import to_plain
from fedcomp.program import NO_FRAMES, Answer, Ask, Encoded, Frames, Me, Now, Round, Said, Step
from fedcomp.rules import Int, Made, NotNegative, Positive


@dataclass(frozen=True, repr=False, eq=False)
class Drift(Said):
    """What a client says of its update in a basis.

    Attributes
    ----------
    drift : float
        Share of the energy in its slices that the basis misses; above 1 where the basis's mean leads away from it.
    """

    drift: NotNegative


@dataclass(frozen=True, repr=False, eq=False)
class FittedBasis(Encoded, id="gradiveq"):
    """GradiVeQ: average updates in a basis fitted to earlier averages.

    Rounds run in cycles: ``sampling`` rounds with whole updates, whose means are sampled, then ``compression`` rounds
    in the basis fitted to them. A round without a step does not count.

    Parameters
    ----------
    codec : GradiVeQ or dict
        Slices, basis, form of the coefficients.
    sampling, compression : int
        Rounds of each phase. The last fifth of the samples, one at least, is held out to choose the dimension: chosen
        on the samples that the basis was fitted to, it is far too small (measured).
    server_lr : float
        Step size of the server: model += server_lr * mean. Must be 1 if the codec centres, since the constant in a mean
        must not be scaled.
    warmup_rounds : int
        Rounds with whole updates before the first sample, because early updates differ from all later ones.
    """

    KEEPS: ClassVar[bool] = True

    SAYS: ClassVar = (Drift,)

    codec: Annotated[GradiVeQ, Made(get_codec)]
    sampling: Annotated[int, Int(3)] = 20
    compression: Annotated[int, Int(1)] = 130
    server_lr: Positive = 1.0
    warmup_rounds: Annotated[int, Int()] = 0

    def conflict(self) -> str:
        if not isinstance(self.codec, GradiVeQ):
            return f"FittedBasis needs a codec of the class GradiVeQ, got {self.codec!r}; Pair takes the others"
        if self.codec.center and self.server_lr != 1.0:
            return (
                f"server_lr={self.server_lr} would scale coefficients without the mean that they are measured from; "
                "use 1, or center=False"
            )
        return ""

    @property
    def several(self) -> bool:
        return bool(self.codec.levels)

    def round(self, now: Now) -> Round:
        codec, layout = self.codec, now.layout
        cycle, moments = self._resumed(now)
        blobs = {"basis": now.state["basis"]} if cycle.phase == COMPRESSION else NO_FRAMES
        basis = self._basis(blobs, layout)
        says, rounds = Drift if basis.subspaces else None, codec.rounds(basis)
        grids: tuple[IntegerGrid, ...] = ()
        answers = yield [Ask(node, blobs=blobs, expects=None if rounds else says) for node in now.nodes]
        if rounds:
            peaks = now.read(answers, "peaks", lambda frame: open_steps(frame, len(basis.subspaces)))
            if not peaks:
                return None
            grids = codec.grids(list(peaks.values()))
            frames = {"steps": steps_frame(np.array([grid.step for grid in grids], np.float32))}
            answers = yield [Ask(node, "query", frames=frames, blobs=blobs, expects=says) for node in peaks]
        fixed = codec.on(basis, grids)
        total = now.mean_of(fixed, answers, raw=True)
        if total is None or (mean := now.downward(total, self.server_lr)) is None:
            return None
        metrics = {}
        # The mean's coefficients go down; its tensors are formed once, whatever the number of clients.
        frame = fixed.sum_frame(mean)
        fixed.conclude(mean)
        if basis.subspaces:
            metrics["basis-dimension"] = float(np.mean(basis.dimensions))
            if (drift := _drift(answers, total.consumed)) is not None:
                metrics["basis-drift"] = drift
        self._count(now, cycle, moments, mean.vector, metrics.get("basis-drift"))
        return Step(total.consumed, frame=frame, blobs=blobs, codec=codec.mean(basis), metrics=metrics)

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        codec, layout, basis = self.codec, me.layout, self._basis(ask.blobs, me.layout)
        if ask.kind == "train":
            memory = codec.begin(me.update(), memory, me.key)
            if codec.rounds(basis):
                return memory, Answer(me.node, frames={"peaks": steps_frame(codec.peaks(memory, basis, layout))})
        steps = ask.frames.get("steps")
        grids = () if steps is None else codec.grids_of(open_steps(steps, len(basis.subspaces)))
        frame, after = codec.send(memory, basis, layout, me.key, grids)
        say = Drift(codec.drift(memory, basis, layout)) if basis.subspaces else None
        return after, Answer(me.node, say=say, frames={"values": frame})

    def residual(self, memory: State, layout: Layout) -> Vector | None:
        return self.codec.settle(memory, layout)["memory"] if self.codec.memory else None

    def reads(self, blobs: Frames, number: int, layout: Layout) -> Codec:
        return self.codec.mean(self._basis(blobs, layout))

    def _basis(self, blobs: Frames, layout: Layout) -> SliceBasis:
        """Return the basis of a round from its blobs, or none if everything is sent."""
        return self.codec.read_basis(blobs["basis"], layout) if "basis" in blobs else SliceBasis.nothing(layout)

    def _resumed(self, now: Now) -> tuple[Cycle, Moments]:
        """Return the phase of the round, and the sums of the samples so far."""
        cycle, moments = Cycle(self.warmup_rounds, self.sampling, self.compression), self._empty(now.layout)
        if not now.state and not moments.slices.parts:
            now.note(
                f"no tensor of the model has two slices of {self.codec.width}: everything is sent as it is; lower width"
            )
        if now.state:
            cycle.load_state_dict(now.state["cycle"])
            if now.state["sampled"] != to_plain(moments.identity()):
                now.note("the model has other tensors than before: sampling begins again")
                cycle.restart()
            elif cycle.phase == SAMPLING:
                moments.load_state_dict(now.state["sums"])
        return cycle, moments

    def _empty(self, layout: Layout) -> Moments:
        return Moments(self.codec.slices(layout), self.codec.fit, self.sampling - max(1, self.sampling // 5))

    def _count(self, now: Now, cycle: Cycle, moments: Moments, moved: Vector, drift: float | None) -> None:
        """Count a round that made a step: sample it, fit a basis after the last sample, and drop a basis that
        drifts."""
        phase, most = cycle.phase, self.codec.refresh_tol
        refit = most is not None and drift is not None and drift > most
        if phase == SAMPLING:
            moments.add(moved)
        if refit:
            now.note(f"the basis misses {drift:.3g} of the updates, more than {most}: sampling begins again")
        cycle.advance(refit=refit)
        if phase == SAMPLING and cycle.phase == COMPRESSION:
            basis, moments = moments.basis(), self._empty(now.layout)
            now.state["basis"] = basis.frame()
            now.note(
                f"fitted a basis of {len(basis.frame())} bytes; of {now.layout.size} numbers {basis.size} travel "
                f"(slices of {self.codec.width} in {', '.join(map(str, basis.dimensions)) or 'no'} dimensions)"
            )
        now.state.update(cycle=cycle.state_dict(), sampled=to_plain(moments.identity()))
        # While a basis serves, all sums are zeros, as large as some models.
        now.state["sums"] = moments.state_dict() if cycle.phase == SAMPLING else None


def _drift(answers: Sequence[Answer], consumed: Sequence[int]) -> float | None:
    """Return the weighted mean of the fraction that the basis misses, over clients whose values were used; None if
    their weights are zero."""
    found = [(a.say.drift, a.weight) for a in answers if a.node in consumed and isinstance(a.say, Drift)]
    total = sum(weight for _, weight in found)
    # Nobody misses more than everything: one client's word counts for its weight and no more.
    return sum(min(drift, 1.0) * (weight / total) for drift, weight in found) if total > 0 else None
