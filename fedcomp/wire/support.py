"""Named supports: only a seed or an id is sent in place of the indices.

Seeded supports are k of n indices both ends derive from one 64-bit seed, scattered (algorithm 1) or a block (2). Exact
and stable for ever, in pure 64-bit integer arithmetic, so that any language can reproduce it:

1. ``mix(z)``: ``z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31``
   modulo 2**64 (the finaliser of SplitMix64: Steele, Lea, Flood, OOPSLA 2014).
2. Word ``j = 1, 2, ...`` of the stream is ``mix(mix(seed) + j * 0x9E3779B97F4A7C15)``.
3. A word's candidate is its top ``w`` bits, ``w = bit_length(n - 1)``; candidates ``>= n`` are dropped, which makes the
   rest exactly uniform.
4. With ``m = min(k, n - k)``, the first ``m`` distinct candidates in stream order are a uniform sample without
   replacement. They are the support when ``k <= n - k``, else its complement.

Algorithm 2 takes the first candidate alone, s, and the support is ``{s, s + 1, ..., s + k - 1}`` modulo n: a block that
goes on at 0 where it reaches the end, so that every index has the same chance k/n. Cut off at the end instead, it would
give the first indices less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.wire.limits import MAX_SIZE

SCATTERED: Final = 1
BLOCK: Final = 2

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_WORDS = 1 << 16
"""Number of words computed at once, few enough for their temporaries to stay in the cache."""


@dataclass(frozen=True, slots=True)
class Seeded:
    """The support is drawn by ``seed``: nine bytes of parameters, no section.

    ``algorithm`` 1 draws single indices (:func:`seeded_support`), 2 a contiguous block
    (:func:`seeded_block`). Another algorithm is another support, and compares unequal.
    """

    seed: int
    algorithm: int = SCATTERED

    def __post_init__(self) -> None:
        _require_u64("seed", self.seed)
        if self.algorithm not in (SCATTERED, BLOCK):
            raise ConfigError(f"support algorithm {self.algorithm!r} is unknown; expected {SCATTERED} or {BLOCK}")

    def __repr__(self) -> str:
        other = "" if self.algorithm == SCATTERED else f", algorithm={self.algorithm}"
        return f"Seeded(seed={self.seed}{other})"

    def indices(self, n: int, k: int) -> NDArray[np.int64]:
        """Return the ``k`` of ``n`` indices, ascending."""
        return drawn_support(self.algorithm, self.seed, n, k)


@dataclass(frozen=True, slots=True)
class SharedSupport:
    """The support is one both ends hold under ``support_id``: eight bytes of parameters, no section."""

    support_id: int

    def __post_init__(self) -> None:
        _require_u64("support id", self.support_id)


def _require_u64(what: str, value: int) -> None:
    if not 0 <= value < 1 << 64:
        raise ConfigError(f"{what} {value} does not fit 64 bits; expected 0 <= {what} < 2**64")


def seeded_support(seed: int, n: int, k: int) -> NDArray[np.int64]:
    """Return ``k`` distinct indices of ``range(n)`` in ascending order, uniformly drawn by ``seed``.

    Parameters
    ----------
    seed : int
        Any integer; taken modulo 2**64.
    n, k : int
        ``0 <= k <= n <= 2**62``. Time O(k log k); memory O(min(k, n - k)) besides the result.

    Returns
    -------
    ndarray of int64, shape (k,)
    """
    _require_sizes(n, k)
    # The smaller side is drawn: with k near n almost every candidate would repeat an earlier one.
    few = min(k, n - k)
    drawn = _first_distinct(seed, n, few)
    return drawn if few == k else complement(drawn, n)


def seeded_block(seed: int, n: int, k: int) -> NDArray[np.int64]:
    """Return ``k`` consecutive indices of ``range(n)``, going on at 0 after n - 1, from a uniform start.

    Parameters
    ----------
    seed : int
        Any integer; taken modulo 2**64.
    n, k : int
        ``0 <= k <= n <= 2**62``. Time and memory O(k).

    Returns
    -------
    ndarray of int64, shape (k,)
        Ascending; a block that goes on at 0 begins with that part.
    """
    _require_sizes(n, k)
    block = np.arange(k)
    if 0 < k < n:
        start = _first_candidate(seed, n)
        # The part that goes on at 0 comes first, so that the indices ascend.
        wrapped = max(0, start + k - n)
        block[wrapped:] += start - wrapped
    return block


def drawn_support(algorithm: int, seed: int, n: int, k: int) -> NDArray[np.int64]:
    """Return the support of ``seed`` by the algorithm of that number."""
    return (seeded_block if algorithm == BLOCK else seeded_support)(seed, n, k)


def drawn_bytes(algorithm: int, n: int, k: int) -> int:
    """Return an upper bound on the bytes :func:`drawn_support` allocates, its result included."""
    if algorithm == BLOCK:
        return 8 * k
    few = min(k, n - k)
    return 48 * few + 8 * k + (n if few < k else 0)


def _require_sizes(n: int, k: int) -> None:
    if not 0 <= k <= n <= MAX_SIZE:
        raise ConfigError(f"a support of k={k} out of n={n} indices needs 0 <= k <= n <= 2**62")


def complement(indices: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Return the indices of ``range(n)`` that are not in ``indices`` (ascending, distinct), ascending."""
    absent = np.ones(n, np.bool_)
    absent[indices] = False
    return np.flatnonzero(absent)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _M1) & _MASK
    z = ((z ^ (z >> 27)) * _M2) & _MASK
    return z ^ (z >> 31)


def _candidates(start: int, first: int, count: int, n: int) -> NDArray[np.uint64]:
    """Return the candidates below ``n`` of words ``first .. first + count - 1``, in stream order."""
    if count <= _WORDS:
        return _few_candidates(start, first, count, n)
    parts = (
        _few_candidates(start, word, min(_WORDS, first + count - word), n)
        for word in range(first, first + count, _WORDS)
    )
    return np.concatenate(list(parts))


def _few_candidates(start: int, first: int, count: int, n: int) -> NDArray[np.uint64]:
    z = np.arange(count, dtype=np.uint64)
    z *= np.uint64(_GAMMA)
    z += np.uint64((start + first * _GAMMA) & _MASK)
    for shift, factor in ((30, _M1), (27, _M2)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    width = (n - 1).bit_length()
    # One element needs no bits, and a shift by all 64 is undefined.
    if width == 0:
        return np.zeros(count, np.uint64)
    z >>= np.uint64(64 - width)
    # Dropped, not reduced modulo n, which would favour the small indices.
    return z[z < np.uint64(n)]


def _first_candidate(seed: int, n: int) -> int:
    """Return the first candidate below ``n``, ``n >= 2``: two words on average, at most."""
    state = _mix(seed & _MASK)
    while True:
        state = (state + _GAMMA) & _MASK
        candidate = _mix(state) >> 64 - (n - 1).bit_length()
        if candidate < n:
            return candidate


def _first_distinct(seed: int, n: int, m: int) -> NDArray[np.int64]:
    if m == 0:
        return np.zeros(0, np.int64)
    # Mixed first: the streams of two seeds that differ by a multiple of the increment would be one stream, shifted.
    start = _mix(seed & _MASK)
    # Words needed: about m (1 + m / 2n) candidates, of which the share n / 2**width is accepted. The estimate decides
    # only how many are computed at once, never which are taken.
    spread = 1 << (n - 1).bit_length()
    batch = (m + m * m // n + m // 32 + 16) * spread // n
    stream = np.zeros(0, np.uint64)
    word = 1
    while True:
        fresh = _candidates(start, word, batch, n)
        stream = np.concatenate((stream, fresh)) if stream.size else fresh
        word += batch
        if stream.size >= m:
            chosen = _take_distinct(stream, n, m)
            if chosen.size == m:
                return chosen
        batch = max(64, batch // 4)


def _take_distinct(stream: NDArray[np.uint64], n: int, m: int) -> NDArray[np.int64]:
    """Return the first ``m`` distinct numbers of ``stream``, ascending; fewer if it does not have that many."""
    bits = (stream.size - 1).bit_length()
    if (n - 1).bit_length() + bits <= 64:
        # Sorting (number, position) as one word is several times faster than a stable argsort.
        keys = stream << np.uint64(bits)
        keys |= np.arange(stream.size, dtype=np.uint64)
        keys.sort()
        numbers = keys >> np.uint64(bits)
        position = keys
        position &= np.uint64((1 << bits) - 1)
        head = np.empty(stream.size, np.bool_)
        head[0] = True
        np.not_equal(numbers[1:], numbers[:-1], out=head[1:])
        numbers, position = numbers[head], position[head]
    else:
        numbers, first = np.unique(stream, return_index=True)
        position = first.astype(np.uint64)
    if numbers.size > m:
        # The first m in stream order. The smallest m would be no uniform sample, and depend on how many words were
        # computed.
        last = np.partition(position, m - 1)[m - 1]
        numbers = numbers[position <= last]
    return numbers.astype(np.int64)
