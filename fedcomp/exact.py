"""Integers, booleans and running statistics as one frame: carried beside the vector as values, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import NonFiniteUpdate
from fedcomp.layout import Layout
from fedcomp.wire import Expected, Frame, Limits, Schema, decode, dense, encode


def exact_schema(layout: Layout) -> Schema:
    """Return what a frame of the exact buffers of ``layout`` must hold: positional, in the layout's order."""
    return tuple(Expected("", t.shape, t.dtype) for t in layout.exact)


def encode_exact(arrays: Mapping[str, NDArray[Any]], layout: Layout) -> Frame | None:
    """Return the frame of the layout's exact buffers, or None when it has none.

    Raises
    ------
    NonFiniteUpdate
        When one of them holds NaN or infinity.
    """
    if not layout.exact:
        return None
    for t in layout.exact:
        if not np.isfinite(arrays[t.name]).all():
            raise NonFiniteUpdate(f"buffer {t.name!r} holds non-finite values; nothing was sent")
    return encode([dense(np.asarray(arrays[t.name], t.dtype)) for t in layout.exact])


def decode_exact(frame: Frame | None, layout: Layout) -> dict[str, NDArray[Any]]:
    """Return the exact buffers of ``frame`` by name.

    Raises
    ------
    fedcomp.wire.WireError
        When the frame is missing or is not one of these buffers. NaN and infinity are refused as in every frame.
    """
    if not layout.exact:
        return {}
    schema = exact_schema(layout)
    bundle = decode(frame or b"", schema, Limits.for_schema(schema))
    return {t.name: tensor.dense() for t, tensor in zip(layout.exact, bundle.tensors, strict=True)}
