"""The collector of captured factors, which the client half opens around an app and training finds by itself.

So an app that captures works with every strategy: where nobody has opened such a place nothing is captured, and what is
captured leaves in no other way than through the half that asked for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.factors.outer import OuterProducts, inner

Wanted = Callable[[int, int, int, int], bool]
"""``wanted(count, rows, columns, slopes)``: whether so many outer products of a matrix are of use; ``slopes`` is the
number of them that stand for a left side whose signs both ends draw, 0 for other left sides."""

_CLOSE: Final = 1e-4
"""Relative difference up to which the captured products count as equal to the change."""

_ROUNDED: Final = 4.0 * float(np.finfo(np.float32).eps)
"""Relative to the weights: the float32 rounding error in the difference of two weights."""


_LARGE: Final = 1 << 31
"""A codec that cannot use a single outer product for a matrix this large cannot use any."""


class Captured:
    """What one training captured.

    Parameters
    ----------
    wanted : callable, optional
        By default nothing is.
    seed : int, optional
        Of the signs that both ends draw, where they do.

    Attributes
    ----------
    wanted : callable
    seed : int, optional
    outer : dict of name to OuterProducts
        By name of the parameter.
    notes : list of str
        What was not captured, and why.
    """

    def __init__(self, wanted: Wanted | None, seed: int | None = None) -> None:
        self.wanted: Wanted = wanted or (lambda *_: False)
        self.seed = seed
        self.outer: dict[str, OuterProducts] = {}
        self.notes: list[str] = []
        self._too_many: set[str] = set()
        self._rows: Counter[str] = Counter()

    def more_rows(self, name: str, count: int) -> int:
        """Return how many rows of signs were drawn for a matrix before these ``count``: no step repeats another's."""
        self._rows[name] += count
        return self._rows[name] - count

    def stack(self, name: str, outer: OuterProducts) -> None:
        """Add outer products to those of a matrix; more than are of use are none."""
        known = self.outer.get(name)
        if known is not None:
            outer = known.beside(outer)
        slopes = 0 if outer.signed is None else outer.signed.slopes.shape[1]
        if name in self._too_many or not self.wanted(outer.count, outer.left.shape[1], outer.right.shape[1], slopes):
            self._too_many.add(name)
            self.outer.pop(name, None)
        else:
            self.outer[name] = outer

    def clear(self) -> None:
        """Forget what was captured."""
        self.outer, self._too_many = {}, set()

    @property
    def useful(self) -> bool:
        """Whether any outer products are of use."""
        return self.wanted(1, _LARGE, _LARGE, 0)

    def explaining(
        self, changes: Mapping[str, NDArray[Any]], before: Mapping[str, NDArray[Any]]
    ) -> dict[str, OuterProducts]:
        """Return the outer products whose sum is what changed; note the others.

        Parameters
        ----------
        changes, before : mapping of name to array
            What training changed of the model's tensors, and what they were; of the parameters' own shapes.
        """
        found: dict[str, OuterProducts] = {}
        for name, outer in self.outer.items():
            if name not in changes:
                self.notes.append(f"{name} is not a tensor of the model that is sent")
                continue
            rows, columns = outer.left.shape[1], outer.right.shape[1]
            change = changes[name].reshape(rows, columns)
            noise = _ROUNDED * float(np.linalg.norm(before[name].astype(np.float64)))
            fitted = _fitted(outer, change, noise)
            if fitted is None:
                self.notes.append(
                    f"{name} did not change by what came back to it: momentum, weight decay, clipping, or another "
                    "use of it"
                )
            else:
                found[name] = fitted
        return found


def _fitted(outer: OuterProducts, change: NDArray[Any], noise: float) -> OuterProducts | None:
    """Return the outer products, scaled if necessary, that equal ``change``; None if no multiple does."""
    formed = outer.matrix()
    allowed = _CLOSE * float(np.linalg.norm(change)) + noise
    if float(np.linalg.norm(change - formed)) <= allowed:
        return outer
    # Whoever writes out the steps, or clips the gradient of a single one, has a step size that nobody told us.
    energy = inner(outer, outer)
    factor = float((change.astype(np.float64) * formed).sum()) / energy if energy > 0.0 else 0.0
    if factor == 0.0 or not float(np.linalg.norm(change - np.float32(factor) * formed)) <= allowed:
        return None
    return outer.scaled(factor)


_current: ContextVar[Captured | None] = ContextVar("fedcomp_factors", default=None)


def current() -> Captured | None:
    """Return the place that was opened around the caller, or None."""
    return _current.get()


@contextmanager
def collecting(wanted: Wanted | None, seed: int | None = None) -> Iterator[Captured]:
    """Open a place for what the body captures; where ``wanted`` has no use for anything, training captures nothing."""
    found = Captured(wanted, seed)
    token = _current.set(found if found.useful else None)
    try:
        yield found
    finally:
        _current.reset(token)
