"""Gaussian elimination over GF(2^8) on coefficients only: whether a packet is innovative, and what the packets span.

A :class:`Basis` keeps the row echelon form of the coefficient vectors that were independent when they came. One arrival
costs O(K^2) whatever the symbols weigh: no payload byte is touched. :func:`recovery` solves for the symbols that
are missing, when there are enough. Both are compiled on first use and cached on disk (:mod:`fedcomp.coding.gauss`).
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding import kernels
from fedcomp.coding.errors import NotDecodable
from fedcomp.coding.kernels import tables
from fedcomp.errors import ConfigError, optional

_ROWS_FOR_KERNEL = 12
"""Systems of so many rows are solved by the kernel, whose call alone costs as much as eliminating a few rows."""


class Basis:
    """The row space of the vectors added so far, in GF(2^8)/0x11D.

    Parameters
    ----------
    symbols : int
        K, the length of the vectors; at least 1.

    Attributes
    ----------
    rank : int
        How many vectors were independent of those before them.
    """

    __slots__ = ("_absorb", "_cells", "_reciprocals", "_words", "rank", "symbols")

    def __init__(self, symbols: int) -> None:
        if symbols < 1:
            raise ConfigError(f"symbols = {symbols}; a generation has at least one symbol")
        self.symbols = symbols
        self.rank = 0
        # Row p is zero, or has its first non-zero element, a 1, in column p. The last row is for work on an arrival.
        self._words = np.zeros((symbols + 1, -(-symbols // 64) * 8), np.uint64)
        self._cells = self._words.view(np.uint8)
        self._absorb = _loops().absorb
        self._reciprocals = tables.reciprocals()

    def add(self, vector: NDArray[np.uint8]) -> bool:
        """Take in a vector of shape ``(K,)``; return whether it was outside the span of the former ones."""
        if vector.shape != (self.symbols,) or vector.dtype != np.uint8:
            raise ConfigError(
                f"vector is {vector.dtype} {vector.shape}; this basis takes uint8 vectors of {(self.symbols,)}"
            )
        # At full rank nothing can be new: late packets are spared the O(K^2) reduction.
        innovative = self.rank < self.symbols and bool(self._absorb(self._words, vector, self._reciprocals))
        self.rank += innovative
        return innovative

    def add_unit(self, symbol: int) -> bool:
        """Take in the vector that is 1 for one symbol and 0 for all others; return whether it was outside the span.

        O(1) as long as no row has its pivot in that column: such a vector is a row of an echelon form as it is.
        """
        if self.rank == self.symbols:
            return False
        if self._cells[symbol, symbol]:
            vector = np.zeros(self.symbols, np.uint8)
            vector[symbol] = 1
            return self.add(vector)
        self._cells[symbol, symbol] = 1
        self.rank += 1
        return True


def rank(matrix: NDArray[np.uint8]) -> int:
    """Return the rank over GF(2^8) of a uint8 matrix of shape ``(n, K)``, K >= 1, by adding row after row."""
    basis = Basis(matrix.shape[1])
    for vector in matrix:
        basis.add(vector)
    return basis.rank


def recovery(vectors: NDArray[np.uint8], coded: NDArray[np.int64], slot_of: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return how the missing symbols are made of K packets.

    In the e packets that are combinations, b = A x + B y with x the missing symbols and y those that are there, so
    x = A^-1 b + A^-1 B y: one e x e system, with B going along, gives e rows over all packets.

    Parameters
    ----------
    vectors : uint8 array of shape (K, K)
        Coefficients of the packets; slot i holds packet i.
    coded : int64 array of shape (e,)
        Slots of the packets that are combinations.
    slot_of : int64 array of shape (K,)
        The slot of every symbol that is there as itself; -1 for the e others.

    Returns
    -------
    uint8 array of shape (e, K)
        Times the bodies of all slots these are the missing symbols, ascending.

    Raises
    ------
    NotDecodable
        When the packets are not independent.
    """
    symbols, e = slot_of.size, coded.size
    right = -(-e // 64) * 64
    words = np.zeros((e, (right + -(-symbols // 64) * 64) // 8), np.uint64)
    cells = words.view(np.uint8)
    _loops().arrange(cells, vectors, coded, slot_of, right)
    few = e < _ROWS_FOR_KERNEL
    solved = _loops().eliminate(words, e, tables.reciprocals()) if few else kernels.reduce(cells, e) == e
    if not solved:
        raise NotDecodable(f"the {e} combinations do not determine the {e} symbols that are missing")
    return cells[:, right : right + symbols]


def warm() -> None:
    """Compile the loops now, or load them from the disk cache."""
    one = np.ones((1, 1), np.uint8)
    Basis(1).add(one[0])
    recovery(one, np.zeros(1, np.int64), np.full(1, -1))


@cache
def _loops() -> ModuleType:
    with optional("solving over GF(2^8)"):
        from fedcomp.coding import gauss

    return gauss
