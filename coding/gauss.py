"""The compiled loops of :mod:`fedcomp.coding.elimination`; importing this file imports numba, so import it where it is
used.

Rows are machine words of 8 field elements, in lines of 8 words, and a multiple of a row is an XOR of its doublings (x,
2x, 4x ...): no tables of products, no special instructions, and LLVM makes vectors of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def add_multiple(target: Any, source: Any, factor: Any) -> None:
    """Do ``target += factor * source`` on two rows of uint64 words, shapes equal; ``factor`` is a field element."""
    low, high = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(0x0101010101010101)
    full, none = np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(0)
    # Doubling x^7 gives x^4 + x^3 + x^2 + 1: the top bit comes back in bits 0, 2, 3 and 4.
    one, two, three, four, seven = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4), np.uint64(7)
    # Masks of a whole word in place of eight branches: the loop has none, and LLVM can make vectors of it.
    m0 = full if factor & 1 else none
    m1 = full if factor & 2 else none
    m2 = full if factor & 4 else none
    m3 = full if factor & 8 else none
    m4 = full if factor & 16 else none
    m5 = full if factor & 32 else none
    m6 = full if factor & 64 else none
    m7 = full if factor & 128 else none
    for w in range(source.size):
        value = source[w]
        total = target[w] ^ (value & m0)
        carry = (value >> seven) & high
        value = ((value & low) << one) ^ carry ^ (carry << two) ^ (carry << three) ^ (carry << four)
        total ^= value & m1
        carry = (value >> seven) & high
        value = ((value & low) << one) ^ carry ^ (carry << two) ^ (carry << three) ^ (carry << four)
        total ^= value & m2
        carry = (value >> seven) & high
        value = ((value & low) << one) ^ carry ^ (carry << two) ^ (carry << three) ^ (carry << four)
        total ^= value & m3
        carry = (value >> seven) & high
        value = ((value & low) << one) ^ carry ^ (carry << two) ^ (carry << three) ^ (carry << four)
        total ^= value & m4
        carry = (value >> seven) & high
        value = ((value & low) << one) ^ carry ^ (carry << two) ^ (carry << three) ^ (carry << four)
        total ^= value & m5
        carry = (value >> seven) & high
        value = ((value & low) << one) ^ carry ^ (carry << two) ^ (carry << three) ^ (carry << four)
        total ^= value & m6
        carry = (value >> seven) & high
        value = ((value & low) << one) ^ carry ^ (carry << two) ^ (carry << three) ^ (carry << four)
        total ^= value & m7
        target[w] = total


@njit(cache=True, nogil=True)
def absorb(words: Any, vector: Any, reciprocals: Any) -> bool:
    """Reduce the vector by the rows of an echelon form and, if something is left, make that a row; return whether.

    Row p of ``words`` is zero or starts with a 1 in column p; its last row is where the vector is worked on.
    """
    symbols, width = words.shape[0] - 1, words.shape[1]
    cells = words.view(np.uint8)
    row = cells[symbols]
    for w in range(width):
        words[symbols, w] = np.uint64(0)
    for p in range(symbols):
        row[p] = vector[p]
    for p in range(symbols):
        factor = row[p]
        if factor == 0:
            continue
        start = p >> 6 << 3  # what comes before is zero, and whole lines are quicker than a remainder
        # No row starts here, so the vector is new. Row p is all zero: adding the multiple writes it, scaled to start
        # with 1.
        if cells[p, p] == 0:
            add_multiple(words[p, start:], words[symbols, start:], reciprocals[factor])
            return True
        add_multiple(words[symbols, start:], words[p, start:], factor)
    return False


@njit(cache=True, nogil=True)
def arrange(cells: Any, vectors: Any, coded: Any, slot_of: Any, right: int) -> None:
    """Write ``[A | B I]`` of the packets in slots ``coded`` into ``cells``, which is zero, of shape (e, bytes).

    A are the coefficients of the symbols without a slot; the rest is from byte ``right`` on, in slot order.
    """
    for i in range(coded.size):
        column = 0
        for p in range(slot_of.size):
            if slot_of[p] < 0:
                cells[i, column] = vectors[coded[i], p]
                column += 1
            else:
                cells[i, right + slot_of[p]] = vectors[coded[i], p]
        cells[i, right + coded[i]] = 1


@njit(cache=True, nogil=True)
def eliminate(words: Any, e: int, reciprocals: Any) -> bool:
    """Reduce the first ``e`` columns of ``words`` (e, lines of 8) to the identity; return False when they are singular.

    Row by row; :func:`fedcomp.coding.kernels.reduce` is quicker from a dozen rows on.
    """
    cells = words.view(np.uint8)
    for p in range(e):
        pivot = p
        while pivot < e and cells[pivot, p] == 0:
            pivot += 1
        if pivot == e:
            return False
        start = p >> 6 << 3
        if pivot != p:
            for w in range(start, words.shape[1]):
                words[p, w], words[pivot, w] = words[pivot, w], words[p, w]
        # 1/c times the row is the row plus (1/c + 1) times it.
        add_multiple(words[p, start:], words[p, start:].copy(), reciprocals[cells[p, p]] ^ 1)
        for i in range(e):
            factor = cells[i, p]
            if factor != 0 and i != p:
                add_multiple(words[i, start:], words[p, start:], factor)
    return True
