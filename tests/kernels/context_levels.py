"""Levels of matrices that the coder in contexts is tried on, and their bytes as they were first written.

``python tests/kernels/context_levels.py`` adds the bytes of cases that are not stored yet; what is stored is read and
written again for ever.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fedcomp.kernels import portable_contexts
from fedcomp.rng import Key

PATH = Path(__file__).with_name("contexts_golden.json")
Shapes = list[tuple[int, int]]
MOST = (1 << 17) - 1


def drawn(name: str, size: int) -> np.ndarray:
    """Uniform 64-bit words by the name of a case."""
    return Key(2026, f"levels {name}").bits(size)


def uniform(name: str, size: int, most: int) -> np.ndarray:
    """Levels from ``-most`` to ``most``."""
    return ((drawn(name, size) % np.uint64(2 * most + 1)).astype(np.int64) - most).astype(np.int32)


def spread(name: str, shapes: Shapes, rare: int) -> np.ndarray:
    """Small levels of both signs, rarer in later rows and columns; ``rare`` of 64 in the first are not 0."""
    parts = []
    for index, (rows, columns) in enumerate(shapes):
        words = drawn(f"{name} {index}", rows * columns).reshape(rows, columns)
        row, column = np.arange(rows)[:, None] * 4 // max(1, rows), np.arange(columns) * 3 // max(1, columns)
        kept = (words & np.uint64(63)) < (rare >> row >> column).astype(np.uint64)
        size = 1 + ((words >> np.uint64(8)) & np.uint64(1)) * ((words >> np.uint64(9)) % np.uint64(5))
        sign = 1 - 2 * ((words >> np.uint64(20)) & np.uint64(1)).astype(np.int64)
        parts.append((kept * size.astype(np.int64) * sign).reshape(-1))
    return np.concatenate(parts).astype(np.int32)


def carrying() -> tuple[np.ndarray, Shapes, int]:
    """Levels whose interval lies across a number that ends in many zeros until its last words.

    The lower end then begins with words of ones, through all of which a carry goes.
    """
    shapes, top = [(6, 10)], 17
    number = (
        portable_contexts.encode(uniform("17 bits", 60, MOST), shapes, top)[0][:80]
        + bytes(20)
        + drawn("carry", 12).tobytes()
    )
    levels = [0] * 60
    portable_contexts.code(portable_contexts.Reader(number), levels, shapes, top, 1 << 62)
    return np.array(levels, np.int32), shapes, top


def cases() -> dict[str, tuple[np.ndarray, Shapes, int]]:
    """By name: levels, shapes, bits of the largest level."""
    found: dict[str, tuple[np.ndarray, Shapes]] = {}
    for where in (0, 99):
        one = np.zeros(100, np.int32)
        one[where] = -3
        found[f"one at {where}"] = one, [(10, 10)]
    found["all 1"] = np.ones(120, np.int32), [(12, 10)]
    found["alternating"] = np.where(np.arange(90) % 2, 1, -1).astype(np.int32), [(9, 10)]
    found["largest"] = np.array([MOST, -MOST, 0, 1] * 6, np.int32), [(2, 12)]
    found["a single one"] = np.array([1], np.int32), [(1, 1)]
    for columns in range(1, 10):
        found[f"rows of {columns}"] = spread(f"rows of {columns}", [(11, columns)], 50), [(11, columns)]
    found["one row"] = spread("one row", [(1, 200)], 40), [(1, 200)]
    found["one column"] = spread("one column", [(150, 1)], 40), [(150, 1)]
    mixed = [(20, 12), (1, 20), (0, 7), (5, 0), (8, 20)]
    for rare in (2, 10, 30, 64):
        found[f"a model, {rare}"] = spread(f"a model, {rare}", mixed, rare), mixed
    found["17 bits"] = uniform("17 bits", 60, MOST), [(6, 10)]
    for bits in (1, 2, 3, 5, 9, 13):
        found[f"{bits} bits"] = uniform(f"{bits} bits", 96, (1 << bits) - 1), [(8, 12)]
    named = {name: (levels, shapes, int(np.abs(levels).max()).bit_length()) for name, (levels, shapes) in found.items()}
    return {**named, "a carry through words of ones": carrying()}


def load() -> dict[str, str]:
    """Return the stored bytes by name, in hexadecimal."""
    return json.loads(PATH.read_text()) if PATH.exists() else {}


if __name__ == "__main__":
    stored = load()
    stored |= {name: portable_contexts.encode(*case)[0].hex() for name, case in cases().items() if name not in stored}
    PATH.write_text(json.dumps(stored, indent=1) + "\n")
    print(f"{len(stored)} cases")
