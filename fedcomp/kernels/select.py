"""Exact top-k by magnitude at about the speed of memory, and the error-feedback step built on it.

A threshold guessed from a small sample leaves a few more than k candidates after one pass; an exact selection on the
candidates finishes. A guess that was too high or much too low costs a second, guaranteed pass. Guesses decide about
time only: the result is always the k largest magnitudes, ties by lowest index, indices ascending.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, LayoutError, NonFiniteUpdate
from fedcomp.kernels import tiers
from fedcomp.kernels.checks import check_out, check_vector, require_finite
from fedcomp.kernels.interface import BIN_SHIFT, BINS, INFINITY, MAGNITUDE, Bits, Floats, Found, Ops
from fedcomp.kernels.tiers import SMALL, Tier

__all__ = ["SMALL", "FeedbackStep", "Tier", "feedback_step", "select_topk"]

_RUN = 16  # elements of one sampled run: a cache line of float32
_FRACTION = 128
_MIN_SAMPLE = 4096
_WARM = 0.93  # last round's threshold times this keeps at least k candidates on slowly changing data (measured)


class FeedbackStep(NamedTuple):
    """What :func:`feedback_step` selected, and the memory after it.

    Attributes
    ----------
    indices : int64 array of shape (k,)
        Ascending.
    values : float32 array of shape (k,)
        ``decay * memory + update`` there.
    memory : float32 array of shape (n,)
        The same sum, zero on ``indices``.
    threshold : float
        The smallest selected magnitude: next round's warm start.
    """

    indices: NDArray[np.int64]
    values: Floats
    memory: Floats
    threshold: float


def select_topk(vector: NDArray[Any], k: int, *, tier: Tier = "auto", seed: int = 0) -> NDArray[np.int64]:
    """Return the indices of the ``k`` elements of largest magnitude.

    Parameters
    ----------
    vector : float32 or float64 array of shape (n,)
        float64 is ranked as it is, by a plain partition.
    k : int
        Between 0 and n.
    tier : {"auto", "numba", "numpy"}
        Does not change the result.
    seed : int
        Where the sample is taken. Does not change the result either.

    Returns
    -------
    int64 array of shape (k,)
        Strictly ascending; among equal magnitudes (0.0 and -0.0 are equal) the lowest indices.

    Raises
    ------
    NonFiniteUpdate
        When the vector holds NaN or infinity.
    ConfigError
        When ``k`` lies outside [0, n].

    Examples
    --------
    >>> select_topk(np.float32([0.5, -3.0, 1.0, 0.25]), 2)
    array([1, 2])
    """
    if vector.dtype == np.float64:
        return _select_wide(vector, k)
    check_vector("vector", vector)
    _check_k(k, vector.size)
    vector = np.require(vector, requirements=["C", "A"])
    kernels = tiers.ops(tier, vector.size)
    bits = vector.view(np.int32)
    if k in (0, vector.size):
        require_finite(bits)
        return np.arange(k)
    return _select(kernels, bits, k, None, seed)[0]


def _select_wide(vector: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    n = vector.size
    _check_k(k, n)
    if not np.isfinite(vector).all():
        raise NonFiniteUpdate(f"the vector holds {int(np.count_nonzero(~np.isfinite(vector)))} NaN or infinite values")
    if k in (0, n):
        return np.arange(k)
    magnitudes = np.abs(vector)
    threshold = np.partition(magnitudes, n - k)[n - k]
    # Ties at the threshold go to the lowest indices, as in the float32 path.
    keep = magnitudes > threshold
    missing = k - int(np.count_nonzero(keep))
    keep[np.flatnonzero(magnitudes == threshold)[:missing]] = True
    return np.flatnonzero(keep)


def feedback_step(
    memory: Floats,
    update: Floats,
    k: int,
    *,
    decay: float = 1.0,
    threshold: float | None = None,
    out: Floats | None = None,
    tier: Tier = "auto",
    seed: int = 0,
) -> FeedbackStep:
    """Add the update to the memory, select the top k of the sum, take them out: one pass over memory and update.

    Parameters
    ----------
    memory, update : float32 arrays of shape (n,)
    k : int
        Between 0 and n.
    decay : float
        The memory's factor: the sum is ``decay * memory + update``.
    threshold : float, optional
        :attr:`FeedbackStep.threshold` of the previous round, the first guess of this one. Without it a sample of the
        sum is taken. Never changes the result.
    out : float32 array of shape (n,), optional
        Where the new memory goes; a new array by default. ``out=memory`` works in place.

    Raises
    ------
    NonFiniteUpdate
        When the sum holds NaN or infinity. ``out`` then holds the sum; with ``out=memory`` the memory is spoilt, so a
        caller who must survive bad updates gives another array.
    """
    for name, vector in (("memory", memory), ("update", update)):
        check_vector(name, vector)
    if memory.shape != update.shape:
        raise LayoutError(f"memory has shape {memory.shape}, the update {update.shape}; they must agree")
    _check_k(k, memory.size)
    memory = np.require(memory, requirements=["C", "A"])
    update = np.require(update, requirements=["C", "A"])
    if out is None:
        out = np.empty_like(memory)
    else:
        check_out(out, memory.shape)
    kernels = tiers.ops(tier, out.size)
    bits = out.view(np.int32)
    if k in (0, out.size):
        # No candidates are wanted, only the sum: nothing finite reaches this threshold.
        kernels.add_collect(memory, update, decay, out, INFINITY, 0)
        require_finite(bits)
        # Here k is 0 or all: either way the list of indices is known without a search.
        indices = np.arange(k)
        return FeedbackStep(indices, kernels.take_clear(out, indices), out, 0.0)
    guess = _guess_of_sum(memory, update, decay, k, seed) if threshold is None else _to_bits(threshold * _WARM)
    found = kernels.add_collect(memory, update, decay, out, guess, _capacity(out.size, k))
    # A stale guess costs one more pass over the sum that is in out already, not another addition.
    indices, smallest = _select(kernels, bits, k, found, seed)
    return FeedbackStep(indices, kernels.take_clear(out, indices), out, smallest)


def _select(kernels: Ops, bits: Bits, k: int, found: Found | None, seed: int) -> tuple[NDArray[np.int64], float]:
    """Return the top k and the smallest selected magnitude, from the candidates in ``found``, or from scratch."""
    if found is None or found[0].size < k:
        guess = _guess(_magnitudes(_lines(bits, seed)), bits.size, k)
        found = kernels.collect(bits, guess, _capacity(bits.size, k))
    if found is None or found[0].size < k:
        # The guess failed: the lower edge of the bin that holds the k-th magnitude gives a superset for certain.
        reach = np.cumsum(kernels.histogram(bits)[::-1])
        # The first bin from above at which at least k magnitudes are reached.
        top = int(np.searchsorted(reach, k))
        found = kernels.collect(bits, (BINS - 1 - top) << BIN_SHIFT, int(reach[top]))
        assert found is not None
    magnitudes = found[1]
    # NaN and infinity have the largest magnitudes of all, so they are always among the candidates.
    if magnitudes.max() >= INFINITY:
        require_finite(bits)
    smallest = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    return kernels.finish(found, int(smallest), k), float(smallest.view(np.float32))


def _capacity(size: int, k: int) -> int:
    """Candidates beyond which a guess counts as failed; memory stays O(k)."""
    return min(size, 8 * k + _MIN_SAMPLE)


def _starts(size: int, seed: int) -> NDArray[np.int64]:
    """Return random line numbers for a sample of about ``size / 128`` elements (splitmix64 of seed and counter)."""
    # Whole cache lines are sampled: a single element costs the same miss as its fifteen neighbours.
    lines = size // _RUN
    count = min(lines, max(size // _FRACTION, _MIN_SAMPLE) // _RUN)
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(seed * 0xD1342543DE82EF95 & 0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    # A remainder favours small numbers a little, which does not matter: the sample decides about time only.
    return (x % np.uint64(max(lines, 1))).astype(np.int64)


def _lines(vector: NDArray[Any], seed: int) -> NDArray[Any]:
    """Return the sampled runs of ``vector``, shape (runs, 16)."""
    full = vector.size // _RUN * _RUN
    return np.asarray(np.take(vector[:full].reshape(-1, _RUN), _starts(vector.size, seed), axis=0))


def _magnitudes(sample: NDArray[Any]) -> Bits:
    return sample.reshape(-1).view(np.int32) & np.int32(MAGNITUDE)


def _guess_of_sum(memory: Floats, update: Floats, decay: float, k: int, seed: int) -> int:
    """Guess the threshold of ``decay * memory + update`` without forming it."""
    with np.errstate(all="ignore"):  # a non-finite update is reported once the sum exists
        total = _lines(memory, seed) * np.float32(decay) + _lines(update, seed)
    return _guess(_magnitudes(total), memory.size, k)


def _guess(sample: Bits, size: int, k: int) -> int:
    """Return magnitude bits that k elements very probably reach and few more do.

    The rank 1.1 e + 4 sqrt(e) for e expected sample hits: no fallback in 150 calls on layered heavy-tailed data, 1.1
    to 2.2 k candidates (measured). A sample too small to say so gives 1: every non-zero element is a candidate.
    """
    expected = k * sample.size / size
    rank = int(1.1 * expected + 4.0 * expected**0.5) + 1
    if rank >= sample.size:
        return 1
    # Never 0, at which every zero would become a candidate.
    return max(1, int(np.partition(sample, sample.size - rank)[sample.size - rank]))


def _to_bits(magnitude: float) -> int:
    """Return the magnitude bits of a non-negative float, at least 1."""
    return max(1, int(np.float32(magnitude).view(np.int32)))


def _check_k(k: int, size: int) -> None:
    if not 0 <= k <= size:
        raise ConfigError(f"k = {k} lies outside [0, {size}], the size of the vector")
