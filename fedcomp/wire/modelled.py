"""Levels of one step for a whole vector, entropy-coded by the magnitudes in their rows and columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels.contexts import MOST_BITS, Streams
from fedcomp.rng import Key
from fedcomp.wire.bits import Buffer, put_varint, take_varint
from fedcomp.wire.errors import Corrupt, LimitExceeded, NonFinite, SchemaMismatch, Truncated
from fedcomp.wire.quantised import require
from fedcomp.wire.support import seeded_support
from fedcomp.wire.values import Values

ROUNDED: Final = 0
"""Form F: levels stand for the means of what was rounded to them."""

DITHERED: Final = 1
"""Form U: rounded after a draw was added, which the reader subtracts."""

PART: Final = 2
"""Form U of columns that were drawn."""

LEAST_STEP: Final = 27 << 7
"""The step 2**-100: what is smaller than a normal float32 is no level, wherever it is taken for zero."""

MOST_STEP: Final = 253 << 7
"""The step 2**126; that the largest level is finite is checked for each frame."""

_MOST_VALUE: Final = 3e38

_NUMBERS: Final = {ROUNDED: 7, DITHERED: 4, PART: 6}
"""Bytes of the parameters."""

_SLACK: Final = 512
_BLOCK: Final = 1 << 16

Shapes = tuple[tuple[int, int], ...]


def width(step: int) -> np.float32:
    """Return the float32 of a step, which is its upper half."""
    return np.array([step << 16], np.uint32).view(np.float32)[0]


@dataclass(frozen=True)
class Terms:
    """What both ends know of levels beside the bytes.

    Attributes
    ----------
    shapes : tuple of (rows, columns)
        Of the matrices that the vector is made of; a vector or a number is one row.
    budget : int
        Bytes of parameters and section at most. Decisions are bounded by it, too.
    seed : int
        Of draws and columns.
    """

    shapes: Shapes
    budget: int
    seed: int = 0

    @cached_property
    def size(self) -> int:
        """Elements of the vector."""
        return sum(rows * columns for rows, columns in self.shapes)

    def most(self, size: int) -> int:
        """Return the decisions that ``size`` values may take: 3.1 each, 4 for each bit allowed, and a thousand."""
        return 31 * size // 10 + 32 * self.budget + 1000


@dataclass(frozen=True)
class Head:
    """The parameters of levels.

    Attributes
    ----------
    form : int
        :data:`ROUNDED`, :data:`DITHERED` or :data:`PART`.
    top : int
        Bits of the largest level, 0 to 17.
    step : int
        The upper half of the float32 that a level of 1 stands for; 0 where the whole vector is zero.
    shifts : tuple of int
        In 128ths of a step, -64 to 64, what is added to levels of 1, of 2 and of more; rounded levels only.
    fraction : int
        In 65536ths, which part of the columns travels.
    """

    form: int
    top: int = 0
    step: int = 0
    shifts: tuple[int, int, int] = (0, 0, 0)
    fraction: int = 1 << 16

    @property
    def width(self) -> np.float32:
        """The step."""
        return width(self.step)

    def pack(self) -> bytes:
        """Return the bytes."""
        head = bytes((self.form, self.top)) + self.step.to_bytes(2, "little")
        if self.form == ROUNDED:
            return head + bytes(shift & 0xFF for shift in self.shifts)
        return head if self.form == DITHERED else head + self.fraction.to_bytes(2, "little")

    @classmethod
    def unpack(cls, params: bytes) -> Self:
        """Read the bytes; raise Corrupt for what no encoder writes."""
        if len(params) < 4 or params[0] not in _NUMBERS or len(params) != _NUMBERS[params[0]]:
            raise Corrupt(f"levels have no parameters {params.hex()!r}")
        form, top, step = params[0], params[1], int.from_bytes(params[2:4], "little")
        shifts = tuple(byte - 256 * (byte > 127) for byte in params[4:]) if form == ROUNDED else (0, 0, 0)
        fraction = int.from_bytes(params[4:], "little") if form == PART else 1 << 16
        if top > MOST_BITS or max(map(abs, shifts)) > 64 or not fraction:
            raise Corrupt(f"levels have impossible parameters {params.hex()!r}")
        zero = not top and not step and not any(shifts)
        if not (zero or (LEAST_STEP <= step <= MOST_STEP and (top or form != ROUNDED))):
            raise Corrupt(f"levels of {top} bits cannot have the step {step:#06x} and shifts {shifts}")
        head = cls(form, top, step, shifts, fraction)  # type: ignore[arg-type]  # three of them
        if ((1 << top) + 1) * float(head.width) * 65536.0 / fraction > _MOST_VALUE:
            raise NonFinite("the step of levels is so large that they overflow float32")
        return head


class Levels(Values):
    """Integers times one step, in the bytes of a range coder whose contexts are the running means of rows and columns.

    What travels says neither how the vector is divided into matrices nor what was drawn: a reader knows the
    :class:`Terms`. Read from a frame, levels are not decoded before :meth:`opened`.

    Parameters
    ----------
    head : Head
    section : bytes-like
        What :meth:`coded` makes of levels.
    k : int
        Elements of the vector.

    Parameters on the wire: form u8, bits of the largest level u8, step u16; in form 0 three shifts i8, in form 2 the
    fraction u16. Section: the lengths of all streams but the last, varints; the streams.

    Examples
    --------
    >>> terms = Terms(((2, 3),), budget=256)
    >>> values = Levels.coded(Head(ROUNDED, 2, 0x3F80, (0, 16, 0)), np.array([0, 1, 0, -2, 0, 2], np.int32), terms)
    >>> values.decode()
    array([ 0.   ,  1.   ,  0.   , -2.125,  0.   ,  2.125], dtype=float32)
    """

    codec_id = 15
    name = "levels"
    unbiased = True
    needs = ("shapes",)

    def __init__(self, head: Head, section: Buffer, k: int) -> None:
        self.head, self.section, self._k = head, section, k
        self.terms: Terms | None = None
        self.decisions = 0
        self.levels: NDArray[Any] = np.zeros(0, np.int8)

    @classmethod
    def coded(cls, head: Head, levels: NDArray[np.int32], terms: Terms) -> Self:
        """Return ``levels``, as many as travel, in bytes; ``head.top`` is the bits of the largest."""
        streams = streams_of(head, terms)
        require(levels.size == streams.size, f"{streams.size} levels of these shapes, got {levels.size}")
        coded, decisions = streams.encode(levels, head.top) if head.top else ([], 0)
        lengths = b"".join(put_varint(len(part)) for part in coded[:-1])
        made = cls(head, lengths + b"".join(coded), terms.size)
        made.terms, made.levels, made.decisions = terms, narrowed(levels, head.top), decisions
        return made

    @property
    def k(self) -> int:
        return self._k

    @property
    def nbytes(self) -> int:
        """Parameters and section."""
        return _NUMBERS[self.head.form] + len(self.section)

    @property
    def taken(self) -> int:
        """Bytes that coded levels take of the budget: their own or, where that is the larger part of what is allowed,
        those that stand for the decisions of whoever reads them."""
        assert self.terms is not None
        return max(self.nbytes, -(-self.terms.budget * self.decisions // self.terms.most(self.levels.size)))

    def opened(self, terms: Terms) -> Levels:
        """Return these levels, decoded by ``terms``: checked completely.

        Raises
        ------
        WireError
            For more bytes or work than the budget allows, and for bytes that no encoder would have written.
        """
        if self.terms == terms:
            return self
        if terms.size != self.k or self.nbytes > terms.budget:
            raise LimitExceeded(f"levels of {self.nbytes} bytes for {self.k} values; expected {terms}")
        streams = streams_of(self.head, terms)
        levels, decisions = np.zeros(streams.size, np.int32), 0
        if self.head.top:
            coded = _taken(memoryview(self.section), len(streams.parts))
            most = terms.most(streams.size)
            decisions = streams.decode(coded, self.head.top, most, levels)
            if decisions == -1 or decisions > most:
                raise LimitExceeded(f"levels take more decisions than {terms.budget} bytes allow")
        found = type(self)(self.head, self.section, self.k)
        found.terms, found.levels = terms, narrowed(levels, self.head.top)
        if decisions < 0 or not _made_by(self.head, found.levels):
            raise Corrupt("levels are not what an encoder would have written")
        return found

    def decode(self) -> NDArray[Any]:
        if self.terms is None:
            raise SchemaMismatch("levels become values by the shapes of their matrices only: open them with these")
        if not self.head.step:
            return np.zeros(self.k, np.float32)
        if self.head.form == ROUNDED:
            return _looked_up(self.head, self.levels)
        values = _undithered(self.head, self.levels, self.terms.seed)
        if self.head.form == DITHERED:
            return values
        out = np.zeros(self.k, np.float32)
        for whole, part, columns in parts_of(self.head.fraction, self.terms):
            matrix = out[whole].reshape(-1, columns[0])
            # Not -1 for the rows: of a short row no column may be drawn.
            matrix[:, columns[1]] = values[part].reshape(matrix.shape[0], columns[1].size)
        return out

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        return self.head.pack(), self.section

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        return 0, 4 * k + _SLACK if Head.unpack(params).top else 0

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Self:
        return cls(Head.unpack(params), section, k)

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        # Levels as they are decoded and as they are kept, the means of columns, draws, what is decoded.
        return 32 * k + 2 * size

    @classmethod
    def agreed(cls, form: Any) -> bytes | None:
        return None

    @classmethod
    def accepts(cls, dtype: str) -> bool:
        return dtype == "float32"


def narrowed(levels: NDArray[np.int32], top: int) -> NDArray[Any]:
    """Return levels of so many bits in the smallest type."""
    return levels.astype(np.int8 if top < 8 else np.int16 if top < 16 else np.int32)


def streams_of(head: Head, terms: Terms) -> Streams:
    """Return how the levels that travel are coded."""
    if head.form != PART:
        return Streams(terms.shapes)
    kept = (columns[1].size for _, _, columns in parts_of(head.fraction, terms))
    return Streams(tuple((rows, count) for (rows, _), count in zip(terms.shapes, kept, strict=True)))


def parts_of(fraction: int, terms: Terms) -> Iterator[tuple[slice, slice, tuple[int, NDArray[np.int64]]]]:
    """Yield where each matrix lies in the vector and in what travels of it, how many columns it has and which are kept.

    Of C columns ``floor(fraction / 65536 * C + w)`` with a uniform w are kept, so that each has the same chance,
    exactly ``fraction / 65536``.
    """
    at = sent = 0
    for index, (rows, columns) in enumerate(terms.shapes):
        word, seed = Key(terms.seed, "columns", layer=index).bits(2).tolist()
        kept = fraction * columns + (word >> 48) >> 16
        size, part = rows * columns, rows * kept
        yield slice(at, at + size), slice(sent, sent + part), (columns, seeded_support(seed, columns, kept))
        at, sent = at + size, sent + part


def draws(seed: int, count: int, start: int = 0, purpose: str = "dither") -> NDArray[np.uint32]:
    """Return ``count`` draws below 2**24, those after the first ``start``, an even number."""
    words = Key(seed, purpose).bits((count + 1) // 2, start // 2)
    return words.astype("<u8", copy=False).view("<u4")[:count] >> np.uint32(8)


def _undithered(head: Head, levels: NDArray[Any], seed: int) -> NDArray[np.float32]:
    """Return ``(level - u) * step``, divided by the fraction of columns."""
    scale = float(head.width) * (1 << 16) / head.fraction
    out = np.empty(levels.size, np.float32)
    for start in range(0, levels.size, _BLOCK):
        part = levels[start : start + _BLOCK]
        drawn = draws(seed, part.size, start)
        out[start : start + _BLOCK] = (part + (0.5 - (2.0 * drawn + 1.0) * 2.0**-25)) * scale
    return out


def _looked_up(head: Head, levels: NDArray[Any]) -> NDArray[np.float32]:
    """Return the values of rounded levels."""
    table, out = _table(head), np.empty(levels.size, np.float32)
    for start in range(0, levels.size, _BLOCK):
        places = levels[start : start + _BLOCK].astype(np.intp)
        places += 1 << head.top
        # All are within the table; numpy has a buffer between where it may have to raise.
        table.take(places, out=out[start : start + _BLOCK], mode="clip")
    return out


def _table(head: Head) -> NDArray[np.float32]:
    """Return the values of all levels, from minus to plus two to the power of ``head.top``."""
    sizes = np.arange(1, (1 << head.top) + 1)
    # Exact before the product: 17 bits, and 7 below.
    positive = (sizes + np.array(head.shifts)[np.minimum(sizes, 3) - 1] / 128.0).astype(np.float32) * head.width
    return np.concatenate([-positive[::-1], np.zeros(1, np.float32), positive])


def _made_by(head: Head, levels: NDArray[Any]) -> bool:
    """Whether an encoder could have written this head for these levels."""
    largest = max(int(levels.max(initial=0)), -int(levels.min(initial=0)))
    if largest.bit_length() != head.top:
        return False
    # The shift of levels that there are not is 0.
    sizes = np.abs(levels)
    return not (
        (head.shifts[2] and largest < 3)
        or (head.shifts[1] and not (sizes == 2).any())
        or (head.shifts[0] and not (sizes == 1).any())
    )


def _taken(section: memoryview, count: int) -> Sequence[bytes]:
    """Return the bytes of each stream."""
    lengths, at = [], 0
    for _ in range(count - 1):
        length, at = take_varint(section, at, len(section))
        lengths.append(length)
    found = []
    for length in lengths:
        if length > len(section) - at:
            raise Truncated("a stream of levels is longer than their section")
        found.append(bytes(section[at : at + length]))
        at += length
    return [*found, bytes(section[at:])]


def with_shifts(head: Head, values: NDArray[np.float32], levels: NDArray[Any]) -> Head:
    """Return the head of rounded levels with the means of what ``values`` exceed them by, in steps.

    Integers are added up: neither the order nor the width of vectors matters.
    """
    at = np.flatnonzero(levels)
    sizes = np.abs(levels[at])
    over = np.abs(values[at]) * (np.float32(1.0) / head.width) - sizes.astype(np.float32)
    parts = np.floor(over * np.float32(1024.0) + np.float32(0.5)).astype(np.int64)
    shifts = []
    for of_class in (sizes == 1, sizes == 2, sizes > 2):
        count, total = int(np.count_nonzero(of_class)), int(parts[of_class].sum())
        # Half away from zero.
        nearest = (abs(total) * 256 + 1024 * count) // (2048 * count) if count else 0
        shifts.append(nearest if total >= 0 else -nearest)
    return replace(head, shifts=(shifts[0], shifts[1], shifts[2]))
