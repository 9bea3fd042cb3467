"""The interface of a kernel tier, and properties of float32 bit patterns that all tiers use."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.int32]
Floats = NDArray[np.float32]
Found = tuple[NDArray[np.uint32], Bits]

MAGNITUDE: Final = 0x7FFFFFFF
"""Clears the sign of a float32 seen as int32; what is left orders by magnitude, NaN above infinity above all."""

INFINITY: Final = 0x7F800000
"""The magnitude bits of infinity; every finite number lies below."""

BINS: Final = 2048
"""Histogram bins: the top eleven magnitude bits (eight of the exponent, three of the mantissa)."""

BIN_SHIFT: Final = 20

LANES: Final = 32
"""Lanes of the float64 sums over a tail."""

BLOCK: Final = 64 * LANES
"""Elements whose sums are formed lane by lane before they are added to the vector's."""


RANS_BITS: Final = 12
"""Frequencies of rANS add up to two to this power."""

RANS_LEAST: Final = 1 << 16
"""The least state of rANS between two symbols, and the one in which an encoder begins."""


class Candidates(NamedTuple):
    """What a pass has found so far, in buffers that it appends to.

    Attributes
    ----------
    indices : unsigned 32-bit or int64 array
        Positions, ascending.
    magnitudes : int32 array of the same length
        Their magnitude bits.
    state : int64 array of shape (2,)
        How many are written, and the position from which the pass goes on.
    """

    indices: NDArray[np.uint32]
    magnitudes: Bits
    state: NDArray[np.int64]

    @property
    def found(self) -> Found:
        """What is written."""
        written = int(self.state[0])
        return self.indices[:written], self.magnitudes[:written]


class Selection(Protocol):
    """Which elements are sent. ``bits`` are float32 vectors seen as int32; every threshold is in magnitude bits."""

    ROOM: int
    """Elements by which a pass may exceed its limit; the buffers are that much longer."""

    def collect(self, bits: Bits, threshold: int, limit: int, candidates: Candidates) -> None:
        """Go on appending elements >= ``threshold``; stop at the end, or with ``limit`` of them or a few more.

        The pass is over when the position in ``candidates.state`` is ``bits.size``.
        """

    def add_collect(
        self,
        memory: Floats,
        update: Floats,
        decay: float,
        out: Floats,
        threshold: int,
        limit: int,
        candidates: Candidates,
    ) -> None:
        """The same, writing ``decay * memory + update`` into ``out`` as it goes and collecting from the result."""

    def histogram(self, bits: Bits) -> NDArray[np.int64]:
        """Return the counts of the :data:`BINS` top-bit patterns of the magnitudes."""

    def finish(self, found: Found, threshold: int, k: int) -> NDArray[np.int64]:
        """Return the indices of everything above ``threshold`` and of the first ties, ``k`` in all, ascending."""

    def take_clear(self, values: Floats, indices: NDArray[np.int64]) -> Floats:
        """Return ``values[indices]`` and set those elements to zero."""

    def add_scaled(self, out: Floats, values: Floats, weight: np.float32) -> None:
        """Do ``out += weight * values`` in float32, both operations rounded."""

    def scatter_add(self, out: Floats, indices: NDArray[np.int64], values: Floats, weight: np.float32) -> None:
        """Do ``out[indices] += weight * values`` in float32, both operations rounded."""

    def bin_argmax(self, bits: Bits, length: int) -> tuple[NDArray[np.int64], bool]:
        """Return the first index of each bin's largest magnitude, and whether all magnitudes are finite.

        ``1 <= length <= bits.size``, here and below.
        """

    def select_adaptive(
        self, total: Floats, gradient: Floats, soft: np.float32, length: int
    ) -> tuple[NDArray[np.int64], float, bool]:
        """Select the j with ``|total + soft * gradient| >= max |total|`` of the bin and ``total != 0``.

        Returns the indices (ascending), the sum of the bins' maxima in float64, bin by bin, and whether both vectors
        are finite. When they are not, indices and sum mean nothing.
        """

    def add_adaptive(
        self, residue: Floats, update: Floats, soft: np.float32, length: int, out: Floats
    ) -> tuple[NDArray[np.int64], float, bool]:
        """Write ``residue + update`` into ``out`` (always all of it) and select from it with the update as gradient."""

    def take_scaled(self, values: Floats, indices: NDArray[np.int64], scale: np.float32) -> NDArray[np.bool_]:
        """Move ``values[indices]`` by ``scale`` towards zero and beyond; return which of them were negative."""

    def find_above(self, bits: Bits, limit: int) -> int:
        """Return the first index with a magnitude above ``limit``, -1 when there is none."""

    def select_above(self, bits: Bits, limit: int) -> tuple[NDArray[np.int64], bool]:
        """Return all indices with a magnitude above ``limit`` (ascending), and whether all of these are finite."""


class Codes(Protocol):
    """How numbers are written and read: fields, unary and entropy-coded streams, levels and codes."""

    def rans_encode(
        self, symbols: NDArray[np.uint16], table: NDArray[np.uint32], lanes: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
        """Return the last states of the lanes and the words, in the order in which a decoder takes them.

        ``table`` holds the symbols' frequencies, positive for those that occur, of a sum of 2**:data:`RANS_BITS`.
        """

    def rans_decode(
        self,
        states: NDArray[np.uint32],
        words: NDArray[np.uint16],
        symbols: NDArray[np.uint16],
        steps: NDArray[np.uint32],
        count: int,
    ) -> NDArray[np.uint16] | None:
        """Return ``count`` symbols; None unless that takes exactly these words and ends in the encoder's first states.

        ``symbols`` and ``steps`` have an entry per slot: its symbol, and frequency << 16 | place among the symbol's
        slots. No state is below :data:`RANS_LEAST`; they are overwritten.
        """

    def unary(self, numbers: NDArray[Any]) -> NDArray[np.uint8]:
        """Return at least one non-negative integer in unary: as many 0 bits as it says, then a 1 bit, lowest bit first.

        ``numbers`` are uint32, uint64 or int64 and may be overwritten; the bits fit into memory.
        """
        ...

    def ones(self, stream: NDArray[np.uint8], count: int) -> NDArray[np.int64] | None:
        """Return where the 1 bits of ``stream`` are, lowest bit first; None unless there are ``count``."""
        ...

    def join_gaps(self, ones: NDArray[np.int64], low: NDArray[Any], widths: NDArray[np.uint8], block: int) -> None:
        """Replace the places of the 1 bits of a unary stream by the indices whose gaps it begins, in place.

        Gap j is the number of 0 bits before the j-th 1 bit, shifted by the width of its block of ``block`` gaps, plus
        ``low[j]``; index j is the sum of the gaps up to j, plus j. ``low`` is int64 or uint32, and may be overwritten.
        All shifted numbers, and all of ``low``, add up to less than 2**62 each; there is at least one.
        """
        ...

    def classes(self, gaps: NDArray[Any]) -> NDArray[np.uint16]:
        """Return each gap below 4 itself, and for others ``4 (e - 1)`` plus the two bits below the leading one.

        ``gaps`` are uint32, or uint64 below 2**62; e is floor(log2(gap)).
        """
        ...

    def shifted_sums(self, rows: NDArray[Any], shifts: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the sum over each row of ``row >> shift``; ``rows`` are uint32 or uint64, shape (rows, columns).

        All numbers add up to less than 2**31 for uint32, less than 2**63 for uint64.
        """
        ...

    def pack_columns(self, fields: NDArray[Any], words: NDArray[np.uint64]) -> None:
        """Undo :meth:`unpack_columns`: write all of ``words`` from the low bits of integers, shape (64, columns)."""

    def unpack_columns(self, words: NDArray[np.uint64], out: NDArray[Any]) -> None:
        """Read fields that are packed column by column: field (row, column) of ``out``, shape (64, columns), is at bits
        ``row * width`` and on of a column of ``words``, shape (width, columns)."""

    def look_up(self, table: NDArray[np.float32], codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return ``table[codes]``; the caller has checked that all codes are in the table."""
        ...

    def levels(self, numbers: NDArray[Any], norms: NDArray[np.float32], bucket: int, steps: int) -> NDArray[np.float32]:
        """Return ``float32(norm * number / steps)``, worked out in float64, with a norm for every ``bucket`` numbers.

        ``numbers`` are of type int16 or int32. A bucket of 0: one norm for all.
        """


class Ops(Selection, Codes, Protocol):
    """What a tier implements: selection, codes, sums and a transform."""

    def tail_sums(self, bits: Bits, limit: int, about: float) -> tuple[int, NDArray[np.float64]]:
        """Return the count of magnitudes above ``limit`` and :data:`LANES` partial sums of d and of d * d.

        d is ``|x| - about`` in float64 above the limit and 0.0 elsewhere. Element i belongs to lane i % LANES. A lane's
        sum over a block of :data:`BLOCK` elements starts at 0.0 and adds in ascending order; the blocks' sums are added
        in ascending order, too. Zeros make a short last block full. Shape (2, LANES).
        """

    def tail_product(self, bits: Bits, limit: int, origin: float) -> tuple[int, NDArray[np.float64]]:
        """Return the product of ``|x| - origin`` over the magnitudes above ``limit``, as an exponent and mantissas.

        The product is 2**exponent times that of :data:`LANES` mantissas in [1, 2). Blocks, lanes and order are those of
        :meth:`tail_sums`; mantissas are brought back to [1, 2) after every block. ``origin`` is at most the limit.
        """

    def hadamard(
        self, values: NDArray[Any], before: NDArray[np.uint64], after: NDArray[np.uint64], scale: float
    ) -> None:
        """Multiply float32 or float64 ``values`` by ``scale``, transform them in place, and apply signs on both sides.

        Bit i % 64 of word i // 64 negates element i. Pairs at distance 1, 2, 4, ... become their sum and difference,
        the shortest distance first: the order of the additions is part of the result.
        """

    def add_signs(self, out: NDArray[np.float64], words: NDArray[np.uint64], scalars: NDArray[np.float64]) -> None:
        """Add each scalar to every element of ``out``, negated where its direction's bit is set.

        Bit i % 64 of word i // 64 of a column belongs to element i. Columns are added in their order.
        """

    def sign_products(self, vector: NDArray[np.float32], words: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return the sums of 64 lanes of the product of ``vector`` with each direction, shape (m, 64).

        Lane j sums elements j, j + 64, ... in that order, in float64.
        """

    def square_sums(self, vector: NDArray[Any], origin: NDArray[Any] | None) -> NDArray[np.float64]:
        """Return :data:`BLOCK` partial sums of the squares of ``vector``, or of ``vector - origin``, in float64.

        Element i belongs to sum i % BLOCK, which starts at 0.0 and adds in ascending order. Both vectors are float32 or
        float64.
        """
        ...
