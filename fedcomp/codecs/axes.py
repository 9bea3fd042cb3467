"""Reading order of convolution tensors: elements that resemble each other are placed side by side to compress better.

Letters name the axes as torch stores a two-dimensional convolution: filters, depth, height, width. "HWDF" and "HWFD"
put together what all filters and channels do at one place of the kernel.
"""

from __future__ import annotations

from itertools import permutations
from typing import Final

from fedcomp.layout import Vector

NATURAL: Final = "FDHW"
ORDERS: Final = tuple("".join(letters) for letters in permutations(NATURAL))
"""All orders of axes, the slowest first."""


def order_conflict(order: str, scope: str) -> str:
    """Return why ``order`` does not suit ``scope``; empty where it does."""
    return (
        ""
        if order == NATURAL or scope == "layer"
        else f"order={order!r} needs scope='layer': a whole model has no axes"
    )


def read_in(values: Vector, shape: tuple[int, ...], order: str) -> None:
    """Put the elements of a flat tensor of ``shape`` into another order of its axes, in place.

    Only tensors of four dimensions have such axes; others stay as they are.
    """
    if order != NATURAL and len(shape) == len(NATURAL):
        values[...] = values.reshape(shape).transpose(_axes(order)).reshape(-1)


def write_back(values: Vector, shape: tuple[int, ...], order: str) -> None:
    """Undo :func:`read_in`."""
    if order != NATURAL and len(shape) == len(NATURAL):
        axes = _axes(order)
        ordered = values.reshape([shape[axis] for axis in axes]).copy()
        values.reshape(shape).transpose(axes)[...] = ordered


def _axes(order: str) -> list[int]:
    return [NATURAL.index(letter) for letter in order]
