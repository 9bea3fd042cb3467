"""Exact top-k by magnitude at about memory speed, and the error-feedback step built on it.

A threshold guessed from a small sample leaves a few more than k candidates after one pass; an exact selection on the
candidates finishes. The threshold rises on the way: once k candidates reach it, an element that only equals it loses
to all of them, and when the candidates become too many, the k largest of them say what later ones have to exceed. So a
low guess costs no second pass, and ties cost nothing. A guess that was too high costs one: the candidates that it left
tell how much too high it was. Zeros are never candidates; where less than k elements differ from zero, the first zeros
are added. Guesses decide about time only: the result is always the k largest magnitudes, ties by lowest index, indices
ascending.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, LayoutError, NonFiniteUpdate
from fedcomp.kernels import tiers
from fedcomp.kernels.checks import check_out, check_vector, require_finite
from fedcomp.kernels.interface import INFINITY, MAGNITUDE, Bits, Candidates, Floats, Found, Ops
from fedcomp.kernels.tiers import SMALL, Tier

__all__ = ["SMALL", "FeedbackStep", "Tier", "feedback_step", "select_topk"]

_RUN = 16  # elements of one sampled run: a cache line of float32
_FRACTION = 128
_MIN_SAMPLE = 4096
_SLACK = 4  # candidates for each of the k, and a sample's more, at which the k largest are kept and the others dropped
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
    # Nodes of decentralised runs may hold float64; the kernels are made for updates, which are float32.
    if vector.dtype == np.float64:
        return _select_wide(vector, k)
    check_vector("vector", vector)
    _check_k(k, vector.size)
    if (device := tiers.on_device(vector)) is not None:
        return np.asarray(device.select_topk(vector, k))
    vector = np.require(vector, requirements=["C", "A"])
    kernels = tiers.ops(tier, vector.size)
    bits = vector.view(np.int32)
    if k in (0, vector.size):
        require_finite(bits)
        return np.arange(k)
    lines = _magnitudes(_lines(bits, seed))
    guess = _guess(lines.reshape(-1), _expected(lines, bits.size, k))
    found, guess = _gather(kernels, bits, k, guess, lambda *to: kernels.collect(bits, *to))
    return _select(kernels, bits, k, guess, found, lambda: lines)[0]


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
    if (device := tiers.on_device(update)) is not None:
        return FeedbackStep(*device.feedback_step(memory, update, k, decay, out))
    memory = np.require(memory, requirements=["C", "A"])
    update = np.require(update, requirements=["C", "A"])
    if out is None:
        out = np.empty_like(memory)
    else:
        check_out(out, memory.shape)
    kernels = tiers.ops(tier, out.size)
    bits = out.view(np.int32)

    def add(*to: Any) -> None:
        kernels.add_collect(memory, update, decay, out, *to)

    def of_sample(at: int = 0) -> int:
        lines = _lines_of_sum(memory, update, decay, out, at, seed)
        return _guess(lines.reshape(-1), _expected(lines, out.size, k))

    if k in (0, out.size):
        # No candidates are wanted, only the sum: nothing finite reaches this threshold.
        _gather(kernels, bits, 1, INFINITY, add)
        require_finite(bits)
        # Here k is 0 or all: either way the list of indices is known without a search.
        indices = np.arange(k)
        return FeedbackStep(indices, kernels.take_clear(out, indices), out, 0.0)
    if threshold is None:
        found, guess = _gather(kernels, bits, k, of_sample(), add)
    else:
        found, guess = _gather(kernels, bits, k, _to_bits(threshold * _WARM), add, of_sample)
    # A stale guess costs one more pass over the sum that is in out already, not another addition.
    indices, smallest = _select(kernels, bits, k, guess, found, lambda: _magnitudes(_lines(bits, seed)))
    return FeedbackStep(indices, kernels.take_clear(out, indices), out, smallest)


def _gather(
    kernels: Ops,
    bits: Bits,
    k: int,
    guess: int,
    scan: Callable[[int, int, Candidates], None],
    better: Callable[[int], int] | None = None,
) -> tuple[Found, int]:
    """Return the elements >= a guess in one pass, and the guess; if there are k or more, the k largest and possibly
    others.

    ``scan`` is one of the kernels' two passes over ``bits`` with its arrays; memory is O(k) on any input. ``better``
    guesses again, given how far the pass has come, when the first guess proves much too low.
    """
    limit = min(bits.size, _SLACK * k + _MIN_SAMPLE)
    # Positions of 32 bits take half the memory.
    wide = np.uint32 if bits.size < 2**32 else np.int64
    candidates = Candidates(
        np.empty(limit + kernels.ROOM, wide),
        np.empty(limit + kernels.ROOM, np.int32),
        np.zeros(2, np.int64),
    )
    scan(guess, k, candidates)
    while candidates.state[1] < bits.size:
        if candidates.state[0] >= limit and better is not None:
            guess, better = max(guess, better(int(candidates.state[1]))), None
            _keep(candidates, np.flatnonzero(candidates.found[1] >= guess))
            scan(guess, k, candidates)
            continue
        if candidates.state[0] >= limit:
            magnitudes = candidates.found[1]
            places = np.arange(magnitudes.size, dtype=candidates.indices.dtype)
            _keep(candidates, kernels.finish((places, magnitudes), _smallest(magnitudes, k), k))
        # What comes later has a higher index, so it must exceed the smallest of these k or more. NaN of all ones has
        # no magnitude above it.
        scan(min(int(candidates.found[1].min()) + 1, MAGNITUDE), limit, candidates)
    return candidates.found, guess


def _keep(candidates: Candidates, which: NDArray[np.int64]) -> None:
    """Drop all candidates except those at the ascending positions ``which``."""
    candidates.indices[: which.size] = candidates.indices[which]
    candidates.magnitudes[: which.size] = candidates.magnitudes[which]
    candidates.state[0] = which.size


def _select(
    kernels: Ops, bits: Bits, k: int, guess: int, found: Found, sample: Callable[[], Bits]
) -> tuple[NDArray[np.int64], float]:
    """Return the top k and the smallest selected magnitude from the result of a pass at ``guess``."""

    def collect(*to: Any) -> None:
        kernels.collect(bits, *to)

    if found[0].size < k and guess > 1:
        lines = sample()
        # Large elements that lie side by side make a sample of runs much less certain than one of single elements:
        # the second guess allows for that, and for how far the first was off.
        hits = np.count_nonzero(lines >= guess, axis=1)
        # Of a vector shorter than one line there is no sample.
        spread = max(1.0, float(hits.var() / max(hits.mean(), 1e-9))) if hits.size else 1.0
        expected = max(hits.sum() * k / max(1, found[0].size), _expected(lines, bits.size, k))
        guess = min(_guess(lines.reshape(-1), expected, spread), guess - 1)
        found, guess = _gather(kernels, bits, k, guess, collect)
    if found[0].size < k and guess > 1:
        found, guess = _gather(kernels, bits, k, 1, collect)
    # NaN and infinity have the largest magnitudes of all, so they are always among the candidates.
    if found[0].size and found[1].max() >= INFINITY:
        require_finite(bits)
    if found[0].size < k:
        return _with_zeros(found[0].astype(np.int64), k), 0.0
    smallest = _smallest(found[1], k)
    return kernels.finish(found, smallest, k), float(np.int32(smallest).view(np.float32))


def _smallest(magnitudes: Bits, k: int) -> int:
    """Return the k-th largest of some magnitude bits."""
    return int(np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k])


def _with_zeros(nonzero: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """Return the positions of all non-zeros and of the first zeros, ``k`` in all, ascending."""
    missing = k - nonzero.size
    # The zeros before each non-zero. Up to the last zero that is wanted, everything is selected.
    before = nonzero - np.arange(nonzero.size)
    inside = int(np.searchsorted(before, missing))
    return np.concatenate([np.arange(missing + inside), nonzero[inside:]])


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
    return sample.view(np.int32) & np.int32(MAGNITUDE)


def _lines_of_sum(memory: Floats, update: Floats, decay: float, out: Floats, at: int, seed: int) -> Bits:
    """Return the sampled magnitudes of ``decay * memory + update``, of which ``out`` holds the first ``at`` already."""
    with np.errstate(all="ignore"):  # a non-finite update is reported once the sum exists
        total = _lines(memory, seed) * np.float32(decay) + _lines(update, seed)
    if at:
        # In place, the memory there is the sum by now.
        done = (_starts(out.size, seed) + 1) * _RUN <= at
        total[done] = _lines(out, seed)[done]
    return _magnitudes(total)


def _expected(sample: Bits, size: int, k: int) -> float:
    """Return the expected number of the k largest of ``size`` elements in a sample."""
    return k * sample.size / size


def _guess(sample: Bits, expected: float, spread: float = 1.0) -> int:
    """Return magnitude bits that very probably all wanted elements reach, and few others.

    The rank 1.1 e + 4 sqrt(e) for e expected sample hits (times ``spread`` under the root, their variance over that of
    independent elements): no fallback in 150 calls on layered heavy-tailed data, 1.1 to 2.2 k candidates (measured). A
    sample that is too small gives 1, so every non-zero element is a candidate.
    """
    rank = int(1.1 * expected + 4.0 * (spread * expected) ** 0.5) + 1
    # Without the zeros, of which numpy's partition is slow where there are many.
    nonzero = sample[sample != 0]
    # Where most elements are zero and the others hardly more than wanted, a guess would save next to nothing. Never 0,
    # at which every zero would become a candidate.
    if rank >= sample.size or nonzero.size <= max(rank, min(2 * rank, sample.size // 2)):
        return 1
    return int(np.partition(nonzero, nonzero.size - rank)[nonzero.size - rank])


def _to_bits(magnitude: float) -> int:
    """Return the magnitude bits of a non-negative float, at least 1."""
    return max(1, int(np.float32(magnitude).view(np.int32)))


def _check_k(k: int, size: int) -> None:
    if not 0 <= k <= size:
        raise ConfigError(f"k = {k} lies outside [0, {size}], the size of the vector")
