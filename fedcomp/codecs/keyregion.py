"""KeyRegion: blocks with more energy send more of their coordinates, chosen by thresholds from histograms.

Derived by us. It stands in for the method of Guo, Liu, Zhang, Sensors 2021, 21(6), 1943 (abstract read), where a small
network predicts the distribution of the gradient, the gradient is split into a key and a sparse region, and a threshold
informed by the entropy decides within each. Neither network nor formulas are public: the prediction is here a running
histogram, and all rules and figures below are our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.codecs.base import State
from fedcomp.codecs.forms import FORMS, RESTS
from fedcomp.codecs.listed import INDICES, ListedCodec
from fedcomp.codecs.positional import SCOPES, AdaptiveCodec, Stretch
from fedcomp.errors import NonFiniteUpdate
from fedcomp.kernels import exceedances, select_above, select_topk, tiers
from fedcomp.kernels.checks import bits_of
from fedcomp.kernels.interface import BIN_SHIFT, INFINITY
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.rules import Density, OneOf, Real, Share
from fedcomp.wire import Tensor

BLOCK: Final = 256
"""Consecutive elements that are key or sparse together."""

COUNTERS: Final = 64
"""Bins of a running histogram, four per octave."""

_PER_OCTAVE: Final = 4
_LOWEST: Final = -7.0
_EDGES: Final = _LOWEST + np.arange(COUNTERS + 1) / _PER_OCTAVE
"""log2 of magnitude / mean magnitude. A fraction f of the elements exceeds at most mean / f (Markov), so that 2**9
suffices for every f >= 1/512; what lies beyond either end counts in the last bin there."""

_KEY, _SPARSE = 0, 1
_GAINS: Final = (1.0 / 8.0, 8.0)
_FADED: Final = 1e-30  # counters below it are forgotten: their shares and quotients would under- and overflow
_LEAST: Final = 1e-300  # a smaller fraction asks for one element as well, and would underflow on the way
_CANCELLED: Final = 1e-9  # a rest of the sum below this share of it is summed again: the difference is rounding errors
_CHUNK: Final = 1 << 16


def _fine_edges() -> NDArray[np.float64]:
    """Return log2 of the lower edges of the kernel's histogram bins, up to infinity's."""
    bits = np.arange((INFINITY >> BIN_SHIFT) + 1, dtype=np.int32) << BIN_SHIFT
    # Below the least normal number by hand: a processor that was told to flush such numbers to zero reads them as zero.
    values = np.where(bits < 1 << 23, bits * 2.0**-149, bits.view(np.float32).astype(np.float64))
    values[0] = 2.0**-150  # half the smallest float32
    values[-1] = 2.0**128
    return np.array([math.log2(value) for value in values.tolist()])


_FINE: Final = _fine_edges()


@dataclass(frozen=True, repr=False, eq=False)
class KeyRegion(AdaptiveCodec, ListedCodec):
    """Send a larger fraction of those blocks that hold more than their share of the energy (derived here).

    A block of 256 consecutive elements is *key* when its share of the energy exceeds ``kappa`` times its share of the
    elements, otherwise *sparse*. Each of the two regions keeps a histogram of its magnitudes over their mean, 64 bins,
    that fades by ``decay`` per round. With the histogram's entropy H, normalised to [0, 1], the region is to send

        fraction = density * 2 ** (H - 1)

    of its elements: fewer when the magnitudes are similar than when they spread. The threshold is the histogram's
    quantile for that fraction, times today's mean: nothing is sorted. A region's first round takes the exact quantile.

    Under error feedback the shape of what is to be encoded drifts, and a fading histogram lags: without a correction
    0.2 to 0.5 of the fraction were sent (measured). So the fraction is multiplied by a gain, which each round moves
    half-way, in logarithms, to the correct value. A selection of more than twice the fraction is cut to the region's
    exact largest elements, and the vector's largest element is always sent.

    Its purpose: blocks with little energy send their largest elements, too. No selection reaches a given energy with
    fewer values than top-k: on a gradient with 90 % of its energy in 5 % of the blocks the frame is 1.8 to 2 times as
    long as that of :class:`~fedcomp.codecs.TopK` for the same energy. Nor is it faster on a CPU (both measured).

    Parameters
    ----------
    key_density, sparse_density : float
        Fraction of a region's elements that travels at H = 1, in (0, 1].
    kappa : float
        Energy density of a key block relative to the mean, at least 1. Fewer than 1/kappa of the elements can be key.
    decay : float
        Factor of the histograms per round, in [0, 1]. With 0 only the current round counts.
    scope : {"global", "layer"}
        Treat the whole model as one vector, or every tensor by itself. Densities of single tensors are refused.
    values, rest, index : str
        As of :class:`~fedcomp.codecs.TopK`.

    Notes
    -----
    State per stretch: ``histograms`` (float64, 2 x 64; a row of zeros: a region not seen yet), ``gains`` (float64) and
    ``wanted`` (int64: what the fractions of the last round come to), key region first.

    Examples
    --------
    >>> KeyRegion().preview([0.5, -3.0, 1.0, 0.25])
    array([ 0., -3.,  0.,  0.], dtype=float32)
    """

    codec_id: ClassVar[str] = "keyregion"
    finds_non_finite = True
    takes_densities = False

    key_density: Density = 0.10
    sparse_density: Density = 0.005
    kappa: Annotated[float, Real(least=1.0)] = 2.0
    decay: Share = 0.9
    scope: Annotated[str, OneOf(*SCOPES)] = "layer"
    values: Annotated[str, OneOf(*FORMS)] = "float32"
    index: Annotated[str, OneOf(*INDICES)] = "auto"
    rest: Annotated[str, OneOf(*RESTS)] = "auto"

    def most(self, stretch: Stretch) -> int:
        """Return the largest number of values of any update: twice the largest total of the fractions, and 3.

        Twice, because that is where the regions are cut; the largest total is at H = 1 and with as many key blocks as
        there can be, or none; each region rounds up, and the largest element may come on top (derived).
        """
        share = 1.0 / self.kappa
        total = max(self.sparse_density, share * self.key_density + (1.0 - share) * self.sparse_density)
        # The shares are sums of rounded numbers.
        return min(2 * params.count(min(1.0, total * (1.0 + 1e-9)), stretch.size) + 3, stretch.size)

    def start(self, stretch: Stretch) -> State:
        return {"histograms": np.zeros((2, COUNTERS)), "gains": np.ones(2), "wanted": np.zeros(2, np.int64)}

    def pack_next(self, values: Vector, stretch: Stretch, state: State, key: Key) -> tuple[Tensor, State]:
        """Return the sparse tensor of what exceeds its region's threshold, and the state with this round in it."""
        is_key = self.key_blocks(values)
        after: State = {name: array.copy() for name, array in state.items()}
        # A region without blocks in this round wants nothing, whatever it wanted in the last.
        after["wanted"][:] = 0
        indices = np.zeros(0, np.int64)
        whole = _Magnitudes.of(values)
        if whole.nonzero:
            key_values = _gathered(values, is_key)
            first = _Magnitudes.of(key_values)
            # Counts subtract exactly, which saves a pass over the rest; only the sum can suffer, and is looked at
            # below.
            rest = whole.without(first)
            if rest.total < _CANCELLED * whole.total:
                rest = _Magnitudes.of(_gathered(values, ~is_key))
            regions = ((is_key, first), (~is_key, rest))
            indices = self._select(values, regions, after)
        return self.listed(indices, values[indices], stretch), after

    def key_blocks(self, values: Vector) -> NDArray[np.bool_]:
        """Return which blocks of ``values``, float32 of shape (n,), are key; shape (ceil(n / 256),).

        Raises
        ------
        NonFiniteUpdate
            When ``values`` hold NaN or infinity.
        """
        energies = _block_energies(values)
        total = float(energies.sum())
        if not math.isfinite(total):  # squares of finite float32 numbers cannot overflow float64
            raise NonFiniteUpdate("NaN and infinity have no place in an energy")
        sizes = np.full(energies.size, BLOCK)
        sizes[-1] = values.size - BLOCK * (energies.size - 1)
        # Multiplied out, so that a vector of zeros divides nothing by zero and has no key block.
        return np.asarray(energies * values.size > self.kappa * total * sizes)

    def _select(
        self, values: Vector, regions: tuple[tuple[NDArray[np.bool_], _Magnitudes], ...], after: State
    ) -> NDArray[np.int64]:
        """Return the ascending indices to send; ``after`` is updated in place."""
        histograms, gains, wanted = after["histograms"], after["gains"], after["wanted"]
        chosen: list[NDArray[np.int64]] = []
        # Nothing lies above infinity: a region without a threshold of its own takes no candidates.
        thresholds = np.full(2, np.inf)
        for region, density in ((_KEY, self.key_density), (_SPARSE, self.sparse_density)):
            blocks, seen = regions[region]
            if not seen.nonzero:
                continue
            known = histograms[region].any()
            histograms[region] *= self.decay
            histograms[region][histograms[region] < _FADED] = 0.0
            histograms[region] += seen.counters()
            fraction = max(_LEAST, density * 2.0 ** (_entropy(histograms[region]) - 1.0))
            wanted[region] = math.ceil(fraction * seen.size)
            if known:
                level = _quantile(histograms[region], min(1.0, fraction * float(np.clip(gains[region], *_GAINS))))
                thresholds[region] = seen.mean * 2.0**level
            else:
                local = select_topk(_gathered(values, blocks), int(wanted[region]))
                # Only the last block may be short, and it stays last when gathered: positions divide evenly.
                chosen.append(np.flatnonzero(blocks)[local // BLOCK] * BLOCK + local % BLOCK)
        # One pass above the lower threshold finds the candidates of both regions.
        lowest = float(thresholds.min())
        candidates = select_above(values, lowest) if lowest < np.inf else np.zeros(0, np.int64)
        magnitudes = np.abs(values[candidates])
        within = regions[_KEY][0][candidates // BLOCK]
        for region, inside in ((_KEY, within), (_SPARSE, ~within)):
            if not np.isfinite(thresholds[region]):
                continue
            found = candidates[inside & (magnitudes > thresholds[region])]
            k = int(wanted[region])
            # The root is half the way in logarithms; the ones keep a round that found nothing finite.
            gains[region] = np.clip(gains[region] * math.sqrt((k + 1) / (found.size + 1)), *_GAINS)
            chosen.append(found if found.size <= 2 * k else found[select_topk(values[found], k)])
        pool = np.concatenate([*chosen, candidates])
        if candidates.size or lowest == np.inf:
            largest = pool[np.argmax(np.abs(values[pool]))]
        else:
            # Below every threshold it may be in a region that chose nothing, beside one that chose exactly.
            largest = select_topk(values, 1)[0]
        # Regions interleave, and the largest element is mostly chosen already: this sorts and drops the duplicate.
        return np.union1d(np.concatenate(chosen), largest)

    def contraction(self, layout: Layout) -> float | None:
        """Return 1/n of the longest stretch: the largest coordinate always travels."""
        return self.contraction_of_largest(layout)


class _Magnitudes(NamedTuple):
    """The statistics of a region in one round: numbers of elements and non-zeros, sum and histogram of the
    magnitudes."""

    size: int
    nonzero: int
    total: float
    fine: NDArray[np.int64]

    @classmethod
    def of(cls, values: Vector) -> _Magnitudes:
        """Return the statistics of ``values``."""
        tail = exceedances(values)
        fine = tiers.ops("auto", values.size).histogram(bits_of(values))
        return cls(values.size, tail.count, tail.count * tail.mean if tail.count else 0.0, fine)

    def without(self, part: _Magnitudes) -> _Magnitudes:
        """Return the statistics of the rest, without ``part``."""
        total = self.total - part.total
        return _Magnitudes(self.size - part.size, self.nonzero - part.nonzero, total, self.fine - part.fine)

    @property
    def mean(self) -> float:
        """Mean magnitude of the non-zero elements."""
        return self.total / self.nonzero

    def counters(self) -> NDArray[np.float64]:
        """Return the counts of the running histogram's bins: the counts of the fine bins, split log-uniformly."""
        zeros = self.size - self.nonzero
        below = np.concatenate([[0.0], np.cumsum(self.fine[: _FINE.size - 1])])
        # Zeros have no logarithm to interpolate at; they are taken out here and counted in the lowest bin again.
        below[1:] -= zeros
        at = np.interp(_EDGES + math.log2(self.mean), _FINE, below)
        at[0], at[-1] = -zeros, below[-1]
        return np.diff(at)


def _block_energies(values: Vector) -> NDArray[np.float64]:
    """Return the sum of squares of each block, in float64."""
    energies = np.empty(-(-values.size // BLOCK))
    full = values.size // BLOCK * BLOCK
    for start in range(0, full, _CHUNK):
        part = values[start : min(start + _CHUNK, full)].astype(np.float64).reshape(-1, BLOCK)
        energies[start // BLOCK : start // BLOCK + len(part)] = np.square(part, out=part).sum(axis=1)
    if full < values.size:
        energies[-1] = np.square(values[full:].astype(np.float64)).sum()
    return energies


def _gathered(values: Vector, blocks: NDArray[np.bool_]) -> Vector:
    """Return the elements of some blocks in order; ``values`` itself for all blocks."""
    if blocks.all():
        return values
    full = values.size // BLOCK
    chosen = values[: full * BLOCK].reshape(full, BLOCK)[blocks[:full]].reshape(-1)
    return np.concatenate([chosen, values[full * BLOCK :]]) if blocks[full:].any() else chosen


def _entropy(histogram: NDArray[np.float64]) -> float:
    """Return the entropy of a histogram relative to one with equal bins, in [0, 1]."""
    share = histogram[histogram > 0.0] / histogram.sum()
    entropy = -math.fsum(s * math.log(s) for s in share.tolist()) / math.log(COUNTERS)
    # Twelve digits: logarithms differ between processors in the last place, which must not decide how much is sent.
    return min(1.0, max(0.0, round(entropy, 12)))


def _quantile(histogram: NDArray[np.float64], fraction: float) -> float:
    """Return the edge, in log2 of magnitude / mean, that ``fraction`` of a histogram lies above.

    Inside a bin the logarithm of the number above falls linearly, in the last occupied one the number itself. The
    lowest bin is not resolved: a quantile in it is its upper edge.
    """
    above = np.append(np.cumsum(histogram[::-1])[::-1], 0.0) / histogram.sum()
    # The last edge that at least the fraction lies above.
    bin_ = int(np.count_nonzero(above >= fraction)) - 1
    if bin_ <= 0:
        return float(_EDGES[1])
    high, low = above[bin_], above[bin_ + 1]
    inside = math.log(high / fraction) / math.log(high / low) if low > 0.0 else (high - fraction) / high
    return float(_EDGES[bin_]) + inside / _PER_OCTAVE
