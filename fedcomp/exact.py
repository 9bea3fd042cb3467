"""Integers, booleans and running statistics in a frame: sent as exact values beside the update vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import LayoutError, NonFiniteUpdate
from fedcomp.layout import Layout, TensorSpec
from fedcomp.wire import DENSE, Expected, Frame, Limits, Raw, Schema, decode, dense, encode

Arrays = Mapping[str, NDArray[Any]]

_KINDS = frozenset({DENSE})
_VALUES = frozenset({Raw.name})


def exact_schema(layout: Layout) -> Schema:
    """Return what a frame of the exact buffers of ``layout`` must hold: positional, in the layout's order."""
    return tuple(Expected("", t.shape, t.dtype, kinds=_KINDS, value_codecs=_VALUES) for t in layout.exact)


def check_exact(array: NDArray[Any], spec: TensorSpec, before: NDArray[Any]) -> NDArray[Any]:
    """Return ``array`` in the buffer's own dtype.

    Raises
    ------
    LayoutError
        When it has another shape, or a dtype that would lose information on the way.
    NonFiniteUpdate
        When it holds NaN or infinity where ``before``, the model's own value, does not hold the same.
    """
    array = np.asarray(array)
    if array.shape != spec.shape or not np.can_cast(array.dtype, spec.dtype, "same_kind"):
        raise LayoutError(
            f"buffer {spec.name!r} is {array.dtype}{array.shape}, the model holds {spec.dtype}{spec.shape}; it is "
            "sent exactly and not converted"
        )
    array = array.astype(spec.dtype, copy=False)
    odd = ~np.isfinite(array)
    # A model may hold infinities of its own, such as those of an attention mask; only new ones are an error.
    if odd.any() and not np.array_equal(array[odd], before[odd], equal_nan=array.dtype.kind == "f"):
        raise NonFiniteUpdate(f"buffer {spec.name!r} holds non-finite values that the model does not; nothing was sent")
    return array


def encode_exact(arrays: Arrays, layout: Layout) -> Frame | None:
    """Return the frame of the layout's exact buffers, or None when it has none."""
    if not layout.exact:
        return None
    return encode([dense(np.asarray(arrays[t.name], t.dtype)) for t in layout.exact])


def decode_exact(frame: Frame | None, layout: Layout) -> dict[str, NDArray[Any]]:
    """Return the exact buffers of ``frame`` by name; :func:`check_exact` then decides what may be non-finite.

    Raises
    ------
    fedcomp.wire.WireError
        When the frame is missing or is not one of these buffers.
    """
    if not layout.exact:
        return {}
    schema = exact_schema(layout)
    bundle = decode(frame or b"", schema, Limits.for_schema(schema, non_finite="allow"))
    return {t.name: tensor.dense() for t, tensor in zip(layout.exact, bundle.tensors, strict=True)}
