"""Checks of the state that codecs with memory are given, and the errors for sums that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedcomp.codecs.base import State, all_finite, require_finite
from fedcomp.errors import FedcompError, NonFiniteUpdate, StateError
from fedcomp.layout import Layout, Update, Vector


def described(value: Any) -> str:
    """Return dtype and shape of an array of a state, or the type of what is there instead."""
    return f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def vector_of(state: State, name: str, layout: Layout) -> Vector:
    """Return an array of ``state``, float32 of the layout's size.

    Raises
    ------
    StateError
        When there is none: the state is another codec's or another model's.
    """
    array = state.get(name)
    if array is None:
        raise StateError(f"the state holds no {name} of this codec; start from init(layout)")
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.shape != (layout.size,):
        raise StateError(
            f"the state's {name} is {described(array)}, the layout needs float32({layout.size},): another model's "
            "state; start from init(layout)"
        )
    return array


def number_of(state: State, name: str, kinds: str) -> float | None:
    """Return a number of ``state``, of one of numpy's ``kinds``; None when there is none.

    Raises
    ------
    StateError
        For anything else.
    """
    array = state.get(name)
    if array is None:
        return None
    if not isinstance(array, np.ndarray | np.generic) or array.size != 1 or array.dtype.kind not in kinds:
        raise StateError(f"the state's {name} is {described(array)}, expected one number; start from init(layout)")
    return array.item()


def not_finite(update: Update, held: Mapping[str, Vector]) -> FedcompError:
    """Return why a sum of ``update`` and what was ``held`` (by name, the memory among it) is not finite.

    The update's own tensor is named first, then a state that was damaged; what remains is an overflow of the sum.
    """
    try:
        require_finite(update)
    except NonFiniteUpdate as error:
        return error
    for name, array in held.items():
        if not all_finite(array):
            return StateError(
                f"the state's {name} holds NaN or infinity, which no update leaves there: it was damaged where it was "
                "kept. Nothing was sent; start from init(layout)"
            )
    largest = max(float(np.abs(array).max(initial=0.0)) for array in held.values())
    return NonFiniteUpdate(
        f"update plus memory (largest magnitude {largest:g}) overflows float32; nothing was sent and no state was "
        "changed"
    )
