"""A node's objective, given by named arrays, as the flat vector that gossip mixes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcomp.gossip.vector import Real, flatten, unflatten
from fedcomp.layout import Layout
from fedcomp.rng import Key

Arrays = Mapping[str, NDArray[Any]]


class Objective(Protocol):
    """What is minimised, as a function of named arrays: :class:`fedcomp.tasks.local.LocalObjective`, or your own."""

    def gradient(self, arrays: Arrays, key: Key) -> Mapping[str, NDArray[Any]]:
        """Return the (stochastic) gradient by name of the parameter; ``key`` chooses the batch."""
        ...

    def buffers_after(self) -> Mapping[str, NDArray[Any]]:
        """Return what the last gradient's forward pass made of tensors that follow no gradient; {} when none do."""
        ...


class FlatObjective:
    """An :class:`Objective` on the vector of a layout: what :func:`fedcomp.gossip.node.handle` takes as ``local``.

    Parameters
    ----------
    objective : Objective
    layout : Layout
        Of the model. Tensors without a gradient (running statistics) have gradient zero and move by :meth:`change`.
        Tensors that stay at home (``layout.exact``) are taken from ``home``.
    home : mapping of str to ndarray, optional
        This node's own values of them; those the objective begins with when left out.

    Attributes
    ----------
    home : dict of str to ndarray
        The same, as the last gradient left them.

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

    def __init__(self, objective: Objective, layout: Layout, home: Arrays | None = None) -> None:
        self.objective, self.layout = objective, layout
        self.home = dict(home or {})
        self._change: Real | None = None

    def gradient(self, z: Real, key: Key) -> Real:
        """Return the gradient at ``z``, shape ``(d,)``, dtype of ``z``."""
        found = self.objective.gradient({**unflatten(z, self.layout), **self.home}, key)
        after = self.objective.buffers_after()
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
