"""What a compressor of innovations is, and the change it describes."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp.gossip.base import Real
from fedcomp.gossip.errors import LetterError
from fedcomp.gossip.packet import all_finite
from fedcomp.rng import Key


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A decoded change of a vector of ``n`` elements.

    Attributes
    ----------
    n : int
    indices : ndarray of int64, shape (k,), or None
        Strictly ascending; None: ``values`` are those of ``[:values.size]``.
    values : ndarray, shape (k,), in the dtype of the estimate
    tail : ndarray, shape (m,), in the dtype of the estimate
        Change of the last m elements; none of ``indices`` lies there.
    """

    n: int
    indices: NDArray[np.int64] | None
    values: Real
    tail: Real

    def add_to(self, out: Real, scale: float = 1.0) -> None:
        """Add ``scale`` times the change to ``out`` (shape ``(n,)``, own dtype) in place.

        Both ends call this, so that both do the same arithmetic.
        """
        values, tail = self.values, self.tail
        if scale != 1.0:
            values, tail = out.dtype.type(scale) * values, out.dtype.type(scale) * tail
        if self.indices is None:
            out[: values.size] += values
        else:  # distinct, so that fancy assignment is addition
            out[self.indices] += values
        if tail.size:
            out[self.n - tail.size :] += tail

    def dense(self) -> Real:
        """Return the change as a fresh vector of shape ``(n,)``."""
        out = np.zeros(self.n, self.values.dtype)
        self.add_to(out)
        return out


class Compressor(ABC):
    """Compresses one stretch. Immutable configuration, a frozen dataclass; equal when class and parameters are equal.

    Attributes
    ----------
    id : str
        In configurations.
    """

    id: ClassVar[str]

    @abstractmethod
    def encode(self, v: Real, key: Key) -> bytes:
        """Return the section of ``v``, float32 or float64 of shape ``(n,)``.

        ``key`` names iteration, sender and stream, under the run's seed: where random compressors draw from.

        Raises
        ------
        NonFiniteUpdate
        """

    @abstractmethod
    def decode(self, data: memoryview, n: int, dtype: Any, key: Key) -> Delta:
        """Return the change that exactly ``data`` describes, of a stretch of ``n`` elements, in ``dtype``.

        ``key`` is the sender's but for the seed, which a receiver need not know: the rest is in envelope and header.

        Raises
        ------
        LetterError
            For every byte string that :meth:`encode` could not have written.
        """

    @abstractmethod
    def most(self, n: int, dtype: Any) -> int:
        """Return the bytes of the longest section of ``n`` elements: what a receiver is ready to read."""

    def contraction(self, n: int) -> float | None:
        """Return δ with ``E‖v - C(v)‖² <= (1 - δ)‖v‖²`` for all v of ``n`` elements (over the key), None without.

        Excepted are vectors whose values leave the wire's dtype: above 3.4e38, or below 1.2e-38, in float32.
        """
        return None

    def to_config(self) -> dict[str, Any]:
        """Return ``{"id": id, **parameters}``, JSON-able, what :func:`get_compressor` takes."""
        return {"id": self.id, **{name: getattr(self, name) for name in inspect.signature(type(self)).parameters}}


def nothing(dtype: Any) -> Real:
    return np.zeros(0, dtype)


def everything(values: Real) -> Delta:
    return Delta(values.size, None, values, values[:0])


def narrow(values: Real, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return finite ``values`` in the wire's ``dtype``; what lies beyond its largest becomes its largest."""
    if dtype.itemsize >= values.dtype.itemsize:
        return values.astype(dtype)
    largest = np.finfo(dtype).max
    return np.clip(values, -float(largest), float(largest)).astype(dtype)


def widen(values: NDArray[Any], dtype: Any) -> Real:
    """Return values from the wire in the estimate's dtype.

    Raises
    ------
    LetterError
        When one is NaN or infinite.
    """
    if not all_finite(values):
        raise LetterError(f"{int(np.count_nonzero(~np.isfinite(values)))} of {values.size} values are NaN or infinite")
    return values.astype(dtype)
