"""A node's objective on named arrays as an objective on the flat vector that gossip mixes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import LayoutError
from fedcomp.gossip.vector import Real, flatten, unflatten
from fedcomp.layout import Layout
from fedcomp.rng import Key

Arrays = Mapping[str, NDArray[Any]]


class ArrayObjective(Protocol):
    """What is minimised, as a function of named arrays: :class:`fedcomp.tasks.local.LocalObjective`, or your own."""

    def gradient(self, arrays: Arrays, key: Key) -> Mapping[str, NDArray[Any]]:
        """Return the (stochastic) gradient by name of the parameter; ``key`` chooses the batch."""
        ...

    def buffers_after(self) -> Mapping[str, NDArray[Any]]:
        """Return what the last gradient's forward pass made of tensors that follow no gradient; {} when none do."""
        ...


class FlatObjective:
    """An :class:`ArrayObjective` on the vector of a layout: what a node learns from.

    Parameters
    ----------
    objective : ArrayObjective
    layout : Layout
        Of the model. Tensors without a gradient have gradient zero: running statistics move by :meth:`change`, others
        stay as they are, and are :attr:`untrained`.
        Tensors that stay at home (``layout.exact``) are taken from ``home``.
    home : mapping of str to ndarray, optional
        This node's own values of them; those the objective begins with when left out.

    Attributes
    ----------
    home : dict of str to ndarray
        The same, as the last gradient left them.
    untrained : list of str
        Tensors of which the last gradient had nothing, and its forward pass changed nothing.

    Examples
    --------
    >>> class Pull:
    ...     def gradient(self, arrays, key):
    ...         return {"w": arrays["w"] - 1.0}
    ...
    ...     def buffers_after(self):
    ...         return {}
    >>> layout = Layout.of({"w": np.zeros((2, 2), np.float32)})
    >>> FlatObjective(Pull(), layout).gradient(np.zeros(4, np.float32), Key(0, "batch"))
    array([-1., -1., -1., -1.], dtype=float32)
    """

    def __init__(self, objective: ArrayObjective, layout: Layout, home: Arrays | None = None) -> None:
        self.objective, self.layout = objective, layout
        self.home = dict(home or {})
        self.untrained: list[str] = []
        self._change: Real | None = None

    def gradient(self, z: Real, key: Key) -> Real:
        """Return the gradient at ``z``, shape ``(d,)``, dtype of ``z``.

        Raises
        ------
        LayoutError
            When the objective returns a gradient of a tensor that the model does not have, or of another shape, or of
            no tensor at all.
        """
        found = self.objective.gradient({**unflatten(z, self.layout), **self.home}, key)
        after = self.objective.buffers_after()
        self._check(found, after)
        out = np.zeros(self.layout.size, z.dtype)
        moved = None
        for t in self.layout.tensors:
            if t.name in found:
                out[t.slice] = found[t.name].reshape(-1)
            elif t.name in after:
                moved = np.zeros_like(out) if moved is None else moved
                # A difference: when it is applied the model has been mixed, and statistics as such would undo that.
                moved[t.slice] = after[t.name].reshape(-1) - z[t.slice]
        self._change = moved
        self.home |= {t.name: np.asarray(after[t.name]) for t in self.layout.exact if t.name in after}
        return out

    def _check(self, found: Arrays, after: Arrays) -> None:
        shapes = {t.name: t.shape for t in self.layout.tensors}
        known = shapes.keys() | {t.name for t in self.layout.exact}
        if unknown := sorted(found.keys() - known):
            # Wrappers add prefixes, such as "_module." or "_orig_mod.".
            raise LayoutError(
                f"there are gradients of {unknown[:3]}, which are not tensors of the model: it has {sorted(known)[:3]}"
            )
        if not found:
            raise LayoutError(f"no tensor has a gradient; the model has {sorted(known)[:3]}")
        for name, gradient in found.items():
            if name in shapes and np.shape(gradient) != shapes[name]:
                raise LayoutError(f"the gradient of {name!r} has shape {np.shape(gradient)}, expected {shapes[name]}")
        self.untrained = sorted(shapes.keys() - found.keys() - after.keys())

    def change(self) -> Real | None:
        """Return by how much the last :meth:`gradient`'s forward pass moved running statistics, shape ``(d,)``; None
        when the vector holds none, and until the next gradient."""
        # An iteration without a gradient must not apply the former one's again.
        change, self._change = self._change, None
        return change

    def at_home(self) -> dict[str, NDArray[Any]]:
        """Return what the last :meth:`gradient` made of the tensors that stay at home, to be given as ``home``."""
        return dict(self.home)

    def flatten(self, arrays: Arrays, dtype: str = "float32") -> Real:
        """Return ``arrays`` as the vector."""
        return flatten(arrays, self.layout, dtype)
