"""The coefficient stream: SplitMix64, with the same bytes in every language, machine and library version.

Coefficients that travel as a seed are redrawn by the receiver, so their stream is part of the wire format. Library
generators give no such promise over versions; this one is a few lines of 64-bit arithmetic (Steele, Lea, Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014; recalled) and is pinned by byte vectors in
``docs/formats/packets.md``. It is no cipher: whoever knows a seed, or one word of output, knows the whole stream.
Nothing here may hide anything.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError

# 2^64 over the golden ratio, rounded to an odd number: the increment of the published generator.
GAMMA = 0x9E3779B97F4A7C15
MASK = 0xFFFFFFFFFFFFFFFF

# A lane for each kind of part: the number 1, the byte 1 and the text "1" name different seeds.
_INTEGER, _BYTES, _TEXT, _WIDE = 1, 2, 3, 4


class SplitMix64:
    """A stream of 64-bit words: word i (from 1) is ``finalise(seed + i * GAMMA)``, all modulo 2^64.

    Every method begins at the next unread word: what is left of a word after a call is never used.

    Parameters
    ----------
    seed : int
        0 <= seed < 2^64.

    Examples
    --------
    >>> SplitMix64(0).bytes(4).tobytes().hex()
    'afcd1d7b'
    """

    __slots__ = ("_seed", "_used")

    def __init__(self, seed: int) -> None:
        self._seed = operator.index(seed)
        if not 0 <= self._seed <= MASK:
            raise ConfigError(f"seed = {seed}; a stream starts from 64 bits, 0 <= seed < 2^64; see derive()")
        self._used = 0

    def __repr__(self) -> str:
        return f"SplitMix64(0x{self._seed:016x}) at word {self._used}"

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next ``count`` words, shape ``(count,)``."""
        found = self._peek(count)
        self._used += count
        return found

    def bytes(self, count: int) -> NDArray[np.uint8]:
        """Return the next ``count`` bytes: every word as 8 little-endian bytes. Shape ``(count,)``."""
        return self.words(-(-_count(count) // 8)).astype("<u8", copy=False).view(np.uint8)[:count]

    def below(self, bound: int, count: int) -> NDArray[np.int64]:
        """Return ``count`` exactly uniform integers in [0, bound), shape ``(count,)``.

        The stream is read as words of w = 1, 2 or 4 bytes, the smallest with bound <= 2^(8w). Words from the largest
        multiple of the bound on are skipped, of the others the remainder modulo the bound is taken. For 251 and 65521
        that multiple is the prime itself. The stream then stands behind the 8-byte word that held the last number.

        Raises
        ------
        ConfigError
            When the bound is below 1 or above 2^32.
        """
        _count(count)
        if not 1 <= bound <= 1 << 32:
            raise ConfigError(f"bound = {bound}; numbers are drawn below a bound of 1 to 2^32")
        width = 1 if bound <= 1 << 8 else 2 if bound <= 1 << 16 else 4
        per_word, accepted = 8 // width, ((1 << 8 * width) // bound) * bound
        parts: list[NDArray[np.int64]] = []
        missing = count
        while missing:
            # One look is enough for the primes in use, which skip at most 2 % of the words; other bounds go round
            # again.
            ahead = -(-missing // per_word) * 9 // 8 + 2
            numbers = self._peek(ahead).astype("<u8", copy=False).view(f"<u{width}")
            places = np.flatnonzero(numbers < accepted)[:missing]
            # Only what was needed is used up, so that the amount looked at ahead never shows in the stream.
            self._used += ahead if places.size < missing else int(places[-1]) // per_word + 1
            parts.append(numbers[places].astype(np.int64) % bound)
            missing -= places.size
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Return ``count`` doubles in [0, 1): the upper 53 bits of each word, shape ``(count,)``."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def normal(self, count: int) -> NDArray[np.float64]:
        """Return ``count`` standard normal doubles, shape ``(count,)`` (Box and Muller, one pair from two words).

        Logarithm and cosine may differ in the last bit between mathematical libraries: never for what two machines
        must redraw bit by bit.
        """
        pairs = self.uniform(2 * -(-_count(count) // 2)).reshape(-1, 2)
        # The logarithm of 1 - u and not of u: u may be 0, 1 - u never is.
        radius = np.sqrt(-2.0 * np.log1p(-pairs[:, 0]))
        angle = 2.0 * math.pi * pairs[:, 1]
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:count]

    def shuffle(self, count: int) -> NDArray[np.int64]:
        """Return a permutation of ``range(count)``: the order that sorts the next ``count`` words (stable)."""
        return np.argsort(self.words(count), kind="stable").astype(np.int64, copy=False)

    def _peek(self, count: int) -> NDArray[np.uint64]:
        steps = np.arange(self._used + 1, self._used + _count(count) + 1, dtype=np.uint64)
        # On arrays uint64 wraps around silently, which is what the definition asks for.
        return finalise(np.uint64(self._seed) + steps * np.uint64(GAMMA))


def finalise(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's finaliser of every word, same shape; a bijection of the 64-bit words."""
    # Shifts and factors of the published generator; receivers redraw coefficients with them, so they are wire format.
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def derive(*parts: int | bytes | str) -> int:
    """Return the 64-bit seed that the parts name, e.g. ``derive(run, round, source, shard)``.

    Starting from h = 0 every part is folded in by h = finalise((h XOR word) + lane * GAMMA). An integer in [0, 2^64) is
    one word in lane 1, so that ``derive(s)`` is the first word of ``SplitMix64(s)``. Bytes are their length and then
    their 8-byte little-endian words, zero-padded, in lane 2; text is its UTF-8 bytes in lane 3; any other integer is
    its shortest little-endian two's complement in lane 4. Not collision-resistant: a name, no commitment.
    """
    state = 0
    for part in parts:
        if isinstance(part, str):
            state = _fold_bytes(state, part.encode(), _TEXT)
        elif isinstance(part, bytes | bytearray | memoryview):
            state = _fold_bytes(state, bytes(part), _BYTES)
        else:
            number = operator.index(part)
            if 0 <= number <= MASK:
                state = _fold(state, number, _INTEGER)
            else:
                # A bit more than the magnitude has, for the sign.
                length = number.bit_length() // 8 + 1
                state = _fold_bytes(state, number.to_bytes(length, "little", signed=True), _WIDE)
    return state


def coefficients(seed: int, count: int) -> NDArray[np.uint8]:
    """Return the vector over GF(2^8) that a seed stands for: coefficient j is byte j of its stream, shape ``(count,)``.

    When all of them are zero the next seed is taken instead (modulo 2^64), and so on.
    """
    return coefficient_rows([seed], count)[0]


def coefficient_rows(seeds: Sequence[int], count: int) -> NDArray[np.uint8]:
    """Return :func:`coefficients` of every seed as one matrix of shape ``(len(seeds), count)``.

    Raises
    ------
    ConfigError
        When ``count`` is below 1: a vector without entries cannot be other than zero.
    """
    if count < 1:
        raise ConfigError(f"count = {count}; a coefficient vector has at least one entry")
    starts = np.array([operator.index(seed) & MASK for seed in seeds], np.uint64)
    steps = np.arange(1, -(-count // 8) + 1, dtype=np.uint64) * np.uint64(GAMMA)
    rows = np.empty((len(starts), count), np.uint8)
    todo = np.arange(len(starts))
    while todo.size:
        words = finalise(starts[todo, None] + steps[None, :])
        rows[todo] = words.astype("<u8", copy=False).view(np.uint8).reshape(todo.size, -1)[:, :count]
        todo = todo[~rows[todo].any(axis=1)]
        starts[todo] += np.uint64(1)
    return rows


def _count(count: int) -> int:
    if count < 0:
        raise ConfigError(f"count = {count}; a stream is read forwards")
    return count


def _fold(state: int, word: int, lane: int) -> int:
    word = ((state ^ word) + lane * GAMMA) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def _fold_bytes(state: int, data: bytes, lane: int) -> int:
    # The length goes first: neither padding nor the border between two parts can make different names equal.
    state = _fold(state, len(data), lane)
    for start in range(0, len(data), 8):
        state = _fold(state, int.from_bytes(data[start : start + 8], "little"), lane)
    return state
