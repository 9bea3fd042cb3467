"""The definition of GF(2^8): its polynomial, and the tables that every tier is derived from.

Polynomial 0x11D, x^8 + x^4 + x^3 + x^2 + 1, generator 2: the field of ISA-L, zfec, galois and the Reed-Solomon codes on
disks. It is not the field of AES (0x11B). All tables are read-only and made on first use.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

POLYNOMIAL: Final = 0x11D
ORDER: Final = 256


def _double(value: int) -> int:
    return (value << 1) ^ (POLYNOMIAL if value & 0x80 else 0)


def _fixed(table: NDArray[Any]) -> NDArray[Any]:
    table.flags.writeable = False
    return table


@functools.cache
def products() -> NDArray[np.uint8]:
    """Return every product, shape (256, 256); row c is multiplication by c."""
    table = np.zeros((ORDER, ORDER), np.uint8)
    table[1] = np.arange(ORDER)
    for c in range(2, ORDER):
        # c = 2 * (c // 2) + c % 2, and doubling is a row gather in a table of 256 doubles.
        table[c] = _doubles()[table[c >> 1]] ^ table[c & 1]
    return _fixed(table)


@functools.cache
def _doubles() -> NDArray[np.uint8]:
    return _fixed(np.array([_double(value) for value in range(ORDER)], np.uint8))


@functools.cache
def reciprocals() -> NDArray[np.uint8]:
    """Return 1 / c at index c, shape (256,); at index 0, which has none, 0."""
    table = np.zeros(ORDER, np.uint8)
    # Each c but 0 has exactly one partner with product 1; index 0 keeps its zero.
    rows, columns = np.nonzero(products() == 1)
    table[rows] = columns
    return _fixed(table)


@functools.cache
def rows() -> tuple[bytes, ...]:
    """Return the rows of :func:`products` as bytes: what ``bytes.translate`` takes."""
    return tuple(row.tobytes() for row in products())


@functools.cache
def nibbles() -> NDArray[np.uint8]:
    """Return, for every c, the products with 0, 1 .. 15 and with 0, 16 .. 240; shape (256, 32).

    c * x is the sum of an entry for the low and one for the high nibble of x: two byte shuffles, sixteen entries each.
    """
    return _fixed(np.concatenate([products()[:, :16], products()[:, ::16]], axis=1))


@functools.cache
def matrices() -> NDArray[np.uint64]:
    """Return multiplication by every c as an 8 x 8 bit matrix in the instruction's own order, shape (256,), uint64.

    Byte 7 - i of the word is the mask of the input bits whose parity is output bit i: the operand of GF2P8AFFINEQB. The
    instruction knows no polynomial, so it serves any; its sister GF2P8MULB is bound to that of AES.
    """
    found = np.zeros(ORDER, np.uint64)
    # Multiplication is linear over the bits: its products with the eight single bits are the columns of its matrix.
    powers = products()[:, 1 << np.arange(8)]
    for output in range(8):
        masks = np.zeros(ORDER, np.uint64)
        for bit in range(8):
            masks |= ((powers[:, bit] >> output) & 1).astype(np.uint64) << np.uint64(bit)
        found |= masks << np.uint64(8 * (7 - output))
    return _fixed(found)
