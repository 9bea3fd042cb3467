"""Forward gradients: clients send only the loss's derivatives along random directions.

m numbers come up from each client whatever the size of the model, and what goes down are the numbers of all. The price
is variance: the estimate's squared error is (p - 1) / (m C) times the gradient's squared length, for p parameters and
C clients with directions of their own, and the step has to be smaller by as much.

Weight directions: BAFFLE (arXiv:2301.12195), Spry (NeurIPS 2024), FedKSeed (arXiv:2312.06353), of which abstracts and
code were read; the replay, the step and the clip as they are here are derived. Ren, Kornblith, Liao, Hinton ("Scaling
forward gradient with local losses", ICLR 2023; abstract and configuration read) perturb activities, not weights: that
estimate takes the inputs of each layer, which no server has. It is an option of a client's own training
(:mod:`fedcomp.forward.activity`), and leaves by any system that sends updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs import Codec, RandomProjection, Replay, State
from fedcomp.codecs.base import all_finite
from fedcomp.codecs.positional import SCOPES
from fedcomp.errors import ConfigError
from fedcomp.forward import Oracle
from fedcomp.forward.directions import step_scale
from fedcomp.layout import Layout, Vector
from fedcomp.program import Answer, AnswerError, Ask, Frames, Me, Mean, Now, Round, Said, Single, Step, System
from fedcomp.rules import Int, Maybe, NotNegative, OneOf, Positive, Real, Switch

if TYPE_CHECKING:
    from fedcomp.forward.evaluate import Objective

Measures = Callable[[Me, Iterable[Vector]], NDArray[np.float64]]
"""What an app brings: ``measures(me, directions)`` returns the slopes of its loss at ``me.start``, one for each
direction, NaN where one is not finite; :func:`slopes_along` does the work."""

SIGNS_A_SECOND: Final = 1e9
"""What one core draws and adds at least; for what a report says of a round's cost."""


@dataclass(frozen=True, repr=False, eq=False)
class Measure(Said):
    """What the server asks for.

    Attributes
    ----------
    step : float
        Step size by which slopes become an update; the same for all.
    """

    step: Annotated[float, Real(above=0.0)]


@dataclass(frozen=True, repr=False, eq=False)
class Measured(Said):
    """What a client says beside its numbers.

    Attributes
    ----------
    left_out : int
        Slopes that are not finite: they are left out of the mean.
    cut : int
        Slopes that the clip made smaller.
    """

    left_out: Annotated[int, Int(absent=0)] = 0
    cut: Annotated[int, Int(absent=0)] = 0


@dataclass(frozen=True, repr=False, eq=False)
class Forward(System, id="forward"):
    """Forward gradients: average gradient estimates from a few numbers per client, and broadcast these numbers.

    Under a weighted mean the numbers of all clients go down in place of the model. Not for private sums: slopes are
    neither bounded nor noised.

    Parameters
    ----------
    directions : int
        m, of each client and round, for each stretch.
    lr : float
        Step size, as for exact gradients.
    lr_scale : float, optional
        Factor of the step size. Default: m C / (m C + n - 1) for C clients and the n coordinates of the longest
        stretch, by which the largest stable step falls (:func:`fedcomp.forward.directions.step_scale`).
    scope : {"global", "layer"}
        One set of directions for the whole model, or one for each tensor: as many times the numbers and passes, and
        less variance.
    shared : bool
        The same directions for all clients.
    clip : float
        Largest magnitude of a slope; 0 for none.
    replay : bool
        Send the round's numbers down in place of the model, where that is shorter.
    most_signs : int
        Signs that the server may have to draw in a round; more are refused before anybody is asked.

    Examples
    --------
    >>> Forward(directions=32, lr=0.5).codec
    RandomProjection()
    """

    KEEPS: ClassVar[bool] = True

    APP: ClassVar[str] = "app = fc.client(app, fc.forward_gradients(...))"
    SAYS: ClassVar[tuple[type[Said], ...]] = (Measure, Measured)
    RULES: ClassVar[tuple[type, ...]] = (Mean, Single)

    directions: Annotated[int, Int(1)] = 32
    lr: Positive = 0.1
    lr_scale: Annotated[float | None, Maybe(Real(above=0.0))] = None
    scope: Annotated[str, OneOf(*SCOPES)] = "global"
    shared: Switch = False
    clip: NotNegative = 0.0
    replay: Switch = True
    most_signs: Annotated[int, Int(1)] = 10**12

    @property
    def makes_steps(self) -> bool:
        return self.replay

    @property
    def codec(self) -> RandomProjection:
        """What the numbers are products with."""
        return RandomProjection(self.directions, scope=self.scope, shared=self.shared)

    def step(self, layout: Layout, clients: int) -> float:
        """Return the step that clients take of their slopes, where so many are asked."""
        if self.lr_scale is not None:
            return float(self.lr * self.lr_scale)
        codec = self.codec
        longest = max((s.size for s in codec.stretches(layout) if not codec.whole(s)), default=1)
        return float(self.lr * step_scale(longest, (1 if self.shared else max(1, clients)) * self.directions))

    def cost(self, layout: Layout, clients: int) -> str:
        """Return what a round costs, in words.

        Raises
        ------
        ConfigError
            Where nobody would wait for it.
        """
        codec = self.codec
        signs, numbers = codec.signs(layout) * clients, sum(map(codec.count, codec.stretches(layout)))
        cost = (
            f"{clients} clients evaluate {numbers} directions of {layout.size} parameters each; the server draws "
            f"{signs:.3g} signs a round, about {signs / SIGNS_A_SECOND:.3g} s"
        )
        if signs > self.most_signs:
            raise ConfigError(
                f"{cost}, over most_signs={self.most_signs:.3g}; take fewer directions, or another codec: at this size "
                "top-k sends more of the gradient in as many bytes"
            )
        return f"{cost}; {4 * numbers} bytes of numbers up, {4 * layout.size} of model"

    def round(self, now: Now) -> Round:
        cost, step = self.cost(now.layout, len(now.nodes)), self.step(now.layout, len(now.nodes))
        if now.state.get("cost") != cost:
            now.state["cost"] = cost
            now.note(cost)
        answers = yield [Ask(node, say=Measure(step), expects=Measured) for node in now.nodes]
        for answer in answers:
            if self.SENT not in answer.frames:
                now.refuse(answer.node, "measured, and sends no numbers")
        total = now.mean_of(self.codec, answers)
        # Of those alone that are in the model: others may say anything.
        used = () if total is None else total.consumed
        said = [answer.say for answer in answers if answer.node in used and isinstance(answer.say, Measured)]
        now.told["measured"] = {
            "step": step,
            "signs": len(said) * self.codec.signs(now.layout),
            "left_out": sum(each.left_out for each in said),
            "cut": sum(each.cut for each in said),
        }
        # Single updates are somebody else's to add up, and a sum that is not finite is no step.
        if total is None or total.change is None or not self.replay or not all_finite(total.change):
            return total
        return self._replayed(now, total, [a for a in answers if a.node in total.consumed])

    def _replayed(self, now: Now, total: Step, answers: Sequence[Answer]) -> Step:
        """Return the step as the numbers from which it is computed if they are shorter than the model."""
        down, weight = Replay(self.codec), sum(answer.weight for answer in answers)
        shares = [answer.weight / weight * now.scales.get(answer.node, 1.0) for answer in answers]
        frames = [answer.frames[self.SENT] for answer in answers]
        frame = down.join(list(zip(frames, shares, strict=True)), now.layout)
        return replace(total, frame=frame, codec=down) if len(frame) <= down.room(now.layout) else total

    def reads(self, blobs: Frames, number: int, layout: Layout) -> Codec:
        return Replay(self.codec)

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        if not isinstance(ask.say, Measure):
            raise AnswerError("the ask does not say by which step slopes become an update")
        measures: Measures | None = me.data
        if measures is None:
            raise AnswerError(
                "this client's app cannot measure slopes: it lacks forward_gradients(); write "
                "app = fc.client(app, fc.forward_gradients(...))"
            )
        slopes = measures(me, self.codec.tangents(me.layout, me.key))
        cut = int(np.count_nonzero(np.abs(slopes) > self.clip)) if self.clip else 0
        said = Measured(int(np.isnan(slopes).sum()), cut)
        if self.clip:
            slopes = np.clip(slopes, -self.clip, self.clip)
        frame = self.codec.frame_of_products(-ask.say.step * slopes, me.layout, me.key)
        return memory, Answer(me.node, say=said, frames={self.SENT: frame})


def slopes_along(
    objective: Objective, directions: Iterable[Vector], layout: Layout, *, oracle: Oracle = "jvp", at_once: int = 1
) -> tuple[float, NDArray[np.float64]]:
    """Return an objective's loss and its slopes along directions of a layout's vector.

    Parameters
    ----------
    objective : Objective
        Its module holds the model; its parameters have the names of the layout's tensors.
    directions : iterable of float32 array, shape (layout size,)
    oracle : {"jvp", "differences"}
        How slopes are measured; central differences do for models that cannot be differentiated.
    at_once : int
        Directions in one pass, see :func:`fedcomp.forward.evaluate.slopes`.

    Raises
    ------
    LayoutError
        When a tensor of the layout is no parameter that is trained: directions would move it at random.
    """
    # torch, which who measures nothing does without
    from fedcomp.forward.evaluate import slopes, trained

    trained(objective.module, [t.name for t in layout.tensors])
    parts = ({t.name: each[t.slice].reshape(t.shape) for t in layout.tensors} for each in directions)
    # What a direction does not move needs no tangent.
    tangents = ({name: part for name, part in each.items() if part.any()} for each in parts)
    return slopes(objective, tangents, oracle=oracle, at_once=at_once)
