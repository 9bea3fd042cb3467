"""SIDCo: the threshold of top-k, estimated from moments of the magnitudes instead of by selection.

A. M. Abdelmoniem, A. Elzanaty, M.-S. Alouini, M. Canini, "An Efficient Statistical-based Gradient Compression Technique
for Distributed Training Systems", MLSys 2021, arXiv:2101.10761 (abstract and the authors' public code read).

On a CPU the exact :class:`~fedcomp.codecs.TopK` of this package is faster (measured), so SIDCo is here as the published
compressor, for comparison and for accelerators, not as the default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.codecs.base import State
from fedcomp.codecs.forms import FORMS, RESTS
from fedcomp.codecs.listed import INDICES, ListedCodec
from fedcomp.codecs.positional import SCOPES, AdaptiveCodec, Stretch
from fedcomp.errors import optional
from fedcomp.kernels import Exceedances, exceedances, select_above, select_topk
from fedcomp.kernels.tiers import Tier
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.rules import Density, Int, Maybe, OneOf, Switch
from fedcomp.wire import Tensor

Family = Literal["exponential", "pareto", "gamma-pareto"]
FAMILIES: tuple[str, ...] = get_args(Family)

Adapt = Literal["reversing", "published", "off"]
ADAPTS: tuple[str, ...] = get_args(Adapt)

FIRST: Final = 0.25
"""Density of the first of several stages (code read)."""

PERIOD: Final = 5
"""Estimates between two decisions about the stages (code read)."""

BAND: Final = (0.8, 1.2)
"""Mean of selected / wanted over a period within which nothing is changed (code read)."""

EVENTS: Final = ("empty", "constant", "exhausted", "largest", "trimmed", "short")
"""What is counted per stretch: a zero vector; magnitudes without spread, to which no family can be fitted; a stage that
no exceedance was left for; an estimate above every magnitude, so that the largest alone was sent; more than twice what
was wanted, cut to the exact top k; less than half of it."""

_STEP = 20  # first-stage densities are kept as multiples of 1/20
_FIRST_RANGE = (1, 10)
# More than log2(n / k) of any tensor that fits a machine, which bounds the stages in any case.
_MOST_STAGES = 64


class Estimate(NamedTuple):
    """What :func:`estimate_threshold` found.

    Attributes
    ----------
    threshold : float
        Exactly a float32. Everything with a larger magnitude is meant to be sent.
    stages : int
        Fits that were made; 0 when every non-zero element is wanted.
    nonzero : int
        Elements that are not zero: the fits are to these.
    flaw : {None, "constant", "exhausted"}
        Why the estimate cannot be trusted, see :data:`EVENTS`.
    """

    threshold: float
    stages: int
    nonzero: int
    flaw: str | None


def estimate_threshold(
    vector: Vector,
    density: float,
    family: str = "pareto",
    stages: int = 2,
    first: float = FIRST,
    *,
    tier: Tier = "auto",
) -> Estimate:
    """Estimate the magnitude that a fraction ``density`` of all elements exceeds.

    Peaks over threshold: the first stage fits all non-zero magnitudes and takes the quantile of density ``first``, each
    further stage fits what exceeds the threshold so far and moves it up by that fit's quantile of the ratio
    ``(density / first) ** (1 / (stages - 1))``. One fused pass per stage (two for the gamma fit), nothing is copied.
    Exact zeros stay out of the fits, and the density is taken relative to the rest (derived: the logarithm and the
    spread of a gradient with a quarter of zeros would ruin the fits otherwise).

    Parameters
    ----------
    vector : float32 array of shape (n,)
    density : float
        In (0, 1]; of all elements, zeros included.
    family : {"exponential", "pareto", "gamma-pareto"}
        Of the magnitudes: exponential, by the mean; generalised Pareto, by mean and variance; gamma in the first stage,
        by the closed-form approximation to its maximum likelihood, and generalised Pareto in the others.
    stages : int
        At least 1. When ``density`` of the non-zero elements is at least ``first``, one stage is all there is to do.
    first : float
        Density of the first of several stages.
    tier : {"auto", "numba", "numpy"}
        Does not change the result.

    Raises
    ------
    NonFiniteUpdate
        When the vector holds NaN or infinity.
    """
    tail = exceedances(vector, 0.0, logs=family == "gamma-pareto", tier=tier)
    nonzero = tail.count
    wanted = density * vector.size
    if wanted >= nonzero:
        return Estimate(0.0, 0, nonzero, None)
    ratio = wanted / nonzero
    ratios = [ratio]
    if stages > 1 and ratio < first:
        ratios = [first] + [(ratio / first) ** (1.0 / (stages - 1))] * (stages - 1)
    threshold = 0.0
    for stage, r in enumerate(ratios):
        if stage:
            tail = exceedances(vector, threshold, tier=tier)
            if tail.count == 0:
                return Estimate(threshold, stage, nonzero, "exhausted")
        step = _quantile("gamma" if family == "gamma-pareto" and stage == 0 else family, tail, r)
        # An infinite threshold would say no more than one above every magnitude.
        threshold = float(np.float32(min(threshold + step, float(np.finfo(np.float32).max))))
        if tail.variance == 0.0:
            return Estimate(threshold, stage + 1, nonzero, "constant")
    return Estimate(threshold, len(ratios), nonzero, None)


def _quantile(family: str, tail: Exceedances, ratio: float) -> float:
    """Return the value that a fraction ``ratio`` in (0, 1) of the exceedances should exceed."""
    mean = tail.mean
    if family == "exponential":
        return -mean * math.log(ratio)
    if tail.variance == 0.0:
        return mean  # the limit of both families below
    if family == "gamma":
        with optional("SIDCo's gamma family"):
            from scipy.special import gammainccinv  # heavy; only this family needs it

        # About half the relative variance; the logarithms do not resolve less than this.
        s = max(math.log(mean) - tail.log_mean, 1e-12)
        shape = (3.0 - s + math.sqrt((s - 3.0) ** 2 + 24.0 * s)) / (12.0 * s)
        return mean / shape * float(gammainccinv(shape, ratio))
    # Mean and variance of a generalised Pareto distribution, solved for its shape and scale.
    square = mean**2 / tail.variance
    kappa = 0.5 * (square - 1.0)
    scale = 0.5 * mean * (square + 1.0)
    logarithm = math.log(ratio)
    # expm1 keeps the quotient exact on the way to its limit -ln(ratio) at kappa = 0, where the exponential lies.
    return -scale * (math.expm1(kappa * logarithm) / kappa if kappa else logarithm)


class _Search(NamedTuple):
    """The integers of a stretch's adaptation, in the order of the array ``search`` in the state.

    Attributes
    ----------
    stages : int
    direction : int
        The sign of the next step of ``stages``. 2 or -2 keeps the direction even if that step makes things worse.
    moves : int
        Steps since the first-stage density last changed.
    moved : int
        Whether the last decision was a step.
    calls : int
        Estimates in this period.
    first : int
        First-stage density, in twentieths.
    first_direction : int
        The sign of its next step after under-selection.
    """

    stages: int
    direction: int
    moves: int = 0
    moved: int = 0
    calls: int = 0
    first: int = round(FIRST * _STEP)
    first_direction: int = 1


@dataclass(frozen=True, repr=False, eq=False)
class SIDCo(AdaptiveCodec, ListedCodec):
    """Send the coordinates above an estimated threshold: about ``k = max(1, ceil(density * n))``.

    The estimated threshold selects the exact top k̂ for some k̂. Two safeguards bound it (derived here): if k̂ > 2 k,
    the exact top k are sent, and if k̂ = 0, the single largest, so that a frame holds at least one (where fp16 or bf16
    do not round it to zero) and at most 2 k coordinates of a vector that is not zero. A zero vector is an empty frame.
    :meth:`events` counts how often that happened.

    Parameters
    ----------
    density : float
        Target fraction of coordinates to send, in (0, 1]. With ``scope="layer"`` the layout's policy may set another
        one per tensor.
    family : {"pareto", "exponential", "gamma-pareto"}
        See :func:`estimate_threshold`. ``"gamma-pareto"`` needs scipy.
    stages : int, optional
        Stages of the first estimates. None or 0 chooses: 2, for the exponential family 1 from density 0.1 on, 2 from
        0.01 on and 3 below. Always at most ``ceil(log2(1 / density))``.
    adapt : {"reversing", "published", "off"}
        How the stages adapt after every five estimates whose mean of selected / wanted lies outside 0.8 .. 1.2.
        ``"published"`` is the authors' rule: a stage less after over-selection, a stage more after under-selection.
        That is right for tails lighter than the family's and wrong for heavier ones, where it sticks at the fewest
        stages (measured). ``"reversing"`` adds stages first, turns when a step made things worse, and turns at the
        first and last number of stages, where the next step may make things worse once: what is bad at 2 may be good at
        3. The authors' code has reversing modes, too, off by default; these rules are ours.
    adapt_first : bool
        Whether the density of the first stage, 0.25, may change as well, by 0.05 within 0.05 .. 0.5, when half of all
        possible steps of the stages have not helped (code read; only with adaptation).
    scope : {"global", "layer"}
        Fit the whole model as one vector, or every tensor by itself.
    values, rest, index : str
        As of :class:`~fedcomp.codecs.TopK`.

    Notes
    -----
    State per stretch: ``search`` (int64: stages, direction, counters), ``ratios`` (float64: the sum of selected /
    wanted of this period, the mean of the last one), ``events`` (int64 counters). It belongs to one client and one
    stretch; in the authors' code it is shared by all layers of a process. One call per round means a decision every
    five rounds.

    Examples
    --------
    >>> SIDCo(density=0.5).preview([0.5, -3.0, 1.0, 0.25])
    array([ 0., -3.,  1.,  0.], dtype=float32)
    """

    codec_id: ClassVar[str] = "sidco"
    finds_non_finite = True

    density: Density
    family: Annotated[str, OneOf(*FAMILIES)] = "pareto"
    stages: Annotated[int | None, Maybe(Int(0, _MOST_STAGES))] = None
    adapt: Annotated[str, OneOf(*ADAPTS)] = "reversing"
    adapt_first: Switch = False
    scope: Annotated[str, OneOf(*SCOPES)] = "global"
    values: Annotated[str, OneOf(*FORMS)] = "float32"
    index: Annotated[str, OneOf(*INDICES)] = "auto"
    rest: Annotated[str, OneOf(*RESTS)] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        params.assign(self, stages=self.stages or None)

    def count(self, stretch: Stretch) -> int:
        """Return k of ``stretch``, what is wanted."""
        return params.count(self.density if stretch.density is None else stretch.density, stretch.size)

    def most(self, stretch: Stretch) -> int:
        """Return 2 k: what is more was cut to k."""
        return min(2 * self.count(stretch), stretch.size)

    def most_stages(self, stretch: Stretch) -> int:
        """Return ``ceil(log2(n / k))``, at least 1 (code read)."""
        return max(1, math.ceil(math.log2(stretch.size / self.count(stretch))))

    def start(self, stretch: Stretch) -> State:
        stages = self.stages
        if stages is None:
            fraction = self.count(stretch) / stretch.size
            stages = 2 if self.family != "exponential" or 0.01 <= fraction < 0.1 else 1 if fraction >= 0.1 else 3
        search = _Search(min(stages, self.most_stages(stretch)), 1)
        return {
            "search": np.array(search, np.int64),
            "ratios": np.zeros(2),
            "events": np.zeros(len(EVENTS), np.int64),
        }

    def pack_next(self, values: Vector, stretch: Stretch, state: State, key: Key) -> tuple[Tensor, State]:
        """Return the sparse tensor of what exceeds the estimate, and the state with this estimate counted."""
        k = self.count(stretch)
        search = _Search(*state["search"].tolist())
        low, high = _FIRST_RANGE
        # A stored state is checked for dtype and shape, not for range; what is out of range is clamped.
        search = search._replace(first=min(max(search.first, low), high))
        # A stored state may come from another density, whose limit was higher.
        stages = min(max(search.stages, 1), self.most_stages(stretch))
        estimate = estimate_threshold(values, k / stretch.size, self.family, stages, search.first / _STEP)
        indices = select_above(values, estimate.threshold)
        found = indices.size
        events = {
            "empty": estimate.nonzero == 0,
            "constant": estimate.flaw == "constant",
            "exhausted": estimate.flaw == "exhausted",
            "largest": found == 0 < estimate.nonzero,
            "trimmed": found > 2 * k,
            "short": estimate.stages > 0 and 2 * found < k,
        }
        if events["largest"]:
            indices = select_topk(values, 1)
        elif events["trimmed"]:
            # The top k of what exceeds the estimate is the top k of all, and far fewer elements have to be ranked.
            indices = indices[select_topk(values[indices], k)]
        after: State = dict(state)
        after["events"] = state["events"] + np.array([events[name] for name in EVENTS], np.int64)
        # Without a fit, when every non-zero element is wanted, the outcome says nothing about the number of stages.
        if estimate.stages and self.adapt != "off":
            total, previous = state["ratios"].tolist()
            search = search._replace(stages=stages, calls=search.calls + 1)
            # What the estimate gave, before the safety net trims or completes it: that is what the stages are judged
            # by.
            total += found / k
            if search.calls >= PERIOD:
                mean = total / search.calls
                search = self._decide(search._replace(calls=0), mean, previous, self.most_stages(stretch))
                total, previous = 0.0, mean
            after["search"], after["ratios"] = np.array(search, np.int64), np.array([total, previous])
        return self.listed(indices, values[indices], stretch), after

    def _decide(self, search: _Search, mean: float, previous: float, limit: int) -> _Search:
        """Return the search after a period with the given ``mean``; ``previous`` is the mean of the previous period."""
        if BAND[0] <= mean <= BAND[1]:
            return search._replace(moved=0)
        over = mean > 1.0
        # Only after a step: a mean that grew worse without one is the data's doing.
        worse = bool(search.moved) and _error(mean) > _error(previous)
        if self.adapt == "published":
            direction = -1 if over else 1
        else:
            patient, direction = abs(search.direction) > 1, 1 if search.direction > 0 else -1
            if worse and not patient:
                direction = -direction
            if not 1 <= search.stages + direction <= limit:
                direction *= -2
        stages = min(max(search.stages + (1 if direction > 0 else -1), 1), limit)
        moved = int(stages != search.stages)
        search = search._replace(stages=stages, direction=direction, moved=moved, moves=search.moves + moved)
        if self.adapt_first and search.moves >= math.ceil(limit / 2):
            search = self._shift_first(search, over, worse, limit)
        return search

    @staticmethod
    def _shift_first(search: _Search, over: bool, worse: bool, limit: int) -> _Search:
        """Return the search with another first-stage density and the middle number of stages."""
        low, high = _FIRST_RANGE
        direction = -search.first_direction if worse else search.first_direction
        first = search.first - direction if over else search.first + direction
        if not low <= first <= high:
            first, direction = round(FIRST * _STEP), -direction
        return search._replace(first=first, first_direction=direction, stages=math.ceil(limit / 2), moves=0, moved=0)

    def contraction(self, layout: Layout) -> float | None:
        """Return 1/n of the longest stretch: the largest coordinate always travels. On data that a family fits it is
        that of top-k."""
        return self.contraction_of_largest(layout)

    @staticmethod
    def events(state: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, int]]:
        """Return how often each of :data:`EVENTS` happened, by the index of the stretch.

        ``state`` is one of this codec, alone or inside that of a wrapper (error feedback, a chain).
        """
        counters = {name.split(".")[-2]: array for name, array in state.items() if name.endswith(".events")}
        return {index: dict(zip(EVENTS, array.tolist(), strict=True)) for index, array in counters.items()}

    @staticmethod
    def stages_of(state: Mapping[str, NDArray[Any]]) -> dict[str, int]:
        """Return the number of stages of the next estimate, by the index of the stretch; ``state`` as above."""
        found = {name.split(".")[-2]: array for name, array in state.items() if name.endswith(".search")}
        return {index: _Search(*array.tolist()).stages for index, array in found.items()}


def _error(ratio: float) -> float:
    """Return the error of selected / wanted; twice too many counts as much as twice too few."""
    # A period in which nothing was selected has ratio 0.
    return abs(math.log(max(ratio, 1e-9)))
