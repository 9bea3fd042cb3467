"""Memory in codec state: storage, checks of loaded state, and errors for sums that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from fedcomp.codecs.base import State, all_finite, require_finite
from fedcomp.device import DeviceArray
from fedcomp.errors import FedcompError, NonFiniteUpdate, StateError
from fedcomp.layout import Layout, Update, Vector

MEMORIES: Final = ("float32", "float16")
"""The dtypes a memory can be kept in."""

_EXPONENT: Final = "exponent"
_LEAST, _MOST = -100, 113
"""Exponents whose powers of two and their inverses are normal float32 numbers. The least one is reached by memories
below 2**-85, the largest follows from the largest float32."""

_BELOW: Final = np.float32(2**15 - 16)
"""The largest float16 below 2**15."""


def kept(memory: Vector, dtype: str) -> State:
    """Return the entries of a state that keep a finite ``memory`` as ``dtype``, one of :data:`MEMORIES`.

    As float16 it is divided by a power of two, the ``exponent`` beside it, that takes its largest magnitude to between
    2**14 and 2**15: nothing overflows, and what is lost of a value v is at most ``max(2**-11 |v|, 2**-39 max |m|)``
    (derived; where the largest is below 2**-85, 2**-125 in place of the second).

    Examples
    --------
    >>> recalled(kept(np.float32([1e5, 0.1, -1e-9]), "float16"))
    array([ 9.9968000e+04,  9.9975586e-02, -0.0000000e+00], dtype=float32)
    """
    if dtype == "float32":
        return {"memory": memory}
    largest = max(float(memory.max(initial=0.0)), -float(memory.min(initial=0.0)))
    exponent = max(_LEAST, math.frexp(largest)[1] - 15)
    scaled = memory * np.float32(2.0**-exponent)
    if exponent == _MOST:
        # What would be rounded up to 2**15 would come back as infinity.
        np.clip(scaled, -_BELOW, _BELOW, out=scaled)
    return {"memory": scaled.astype(np.float16), _EXPONENT: np.asarray(exponent, np.int16)}


def recalled(state: State) -> Vector | None:
    """Return the memory of a state in float32, as :func:`kept` was given it but for rounding; None where there is none.

    Raises
    ------
    StateError
        When it is float16 and the exponent beside it is none that :func:`kept` writes.
    """
    memory = state.get("memory")
    if not isinstance(memory, np.ndarray) or memory.dtype != np.float16:
        return memory
    exponent = number_of(state, _EXPONENT, "i")
    if exponent is None or not _LEAST <= exponent <= _MOST:
        raise StateError(
            f"the state's exponent is {exponent}, expected {_LEAST} to {_MOST}: the memory was damaged where it was "
            "kept; start from init(layout)"
        )
    # Exact: a float16 has fewer digits than a float32, and the product is within its range.
    widened = memory.astype(np.float32)
    widened *= np.float32(2.0**exponent)
    return widened


def described(value: Any) -> str:
    """Return dtype and shape of an array of a state, or the type of what is there instead."""
    return f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray | DeviceArray) else f"a {type(value).__name__}"


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
    if not isinstance(array, np.ndarray | DeviceArray) or array.dtype != np.float32 or array.shape != (layout.size,):
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
        # What was given is finite, and by now the sum is in its place.
        if not update.given:
            require_finite(update)
    except NonFiniteUpdate as error:
        return error
    for name, array in held.items():
        if not all_finite(array):
            return StateError(
                f"the state's {name} holds NaN or infinity, which no update can cause: the stored state was damaged. "
                "Nothing was sent; start from init(layout)"
            )
    largest = max(float(np.abs(array).max(initial=0.0)) for array in held.values())
    return NonFiniteUpdate(
        f"update plus memory (largest magnitude {largest:g}) overflows float32; nothing was sent and no state was "
        "changed"
    )
