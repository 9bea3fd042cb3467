"""Adaptive server optimisers for sparse means: moments and steps change only where values arrived.

FedAdam and its kin take a coordinate of which nothing arrived for one whose gradient is zero. Its first moment is not
zero, though: the strategy goes on stepping along what arrived rounds ago, while its second moment fades and makes these
steps larger. With one coordinate in a hundred sent, half of the step's square lies on coordinates that no client spoke
of (measured: ``python -m experiments.run sparsifiers``), and the clients' memory of them no longer fits the model.

The remedy is that of optimisers for sparse gradients (LazyAdam of TensorFlow Addons, ``torch.optim.SparseAdam``;
documentation read): moments and parameters change on the gradient's support alone. The strategy's own rule runs
untouched; what it did elsewhere is taken back. FedAdagrad has no first moment and adds zero to the second: nothing
changes for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp.flower.records import to_arrays, to_record
from fedcomp.strategies.wrapping import held

Outcome = tuple[ArrayRecord | None, MetricRecord | None]

Arrived = Mapping[str, NDArray[np.bool_]]
"""By tensor, in its shape: of which values something arrived."""

_MOMENTS: Final = ("m_t", "v_t")
"""Where Flower's FedOpt strategies keep their first and second moments, by tensor; None before the first round."""

_STATE: Final = ("current_arrays", "momentum_vector", *_MOMENTS)
"""What Flower's strategies, and ours like them, replace when they make a step."""


def before_step(strategy: Strategy) -> Callable[[], None]:
    """Return what undoes a step of ``strategy``, or of one inside it, that turns out to be of no use."""
    states = [(own := vars(each), {k: v for k, v in own.items() if k in _STATE}) for each in held(strategy)]

    def undo() -> None:
        for own, before in states:
            own.update(before)

    return undo


def has_moments(strategy: Strategy) -> bool:
    """Whether the strategy keeps moments as Flower's FedAdam, FedYogi and FedAdagrad do."""
    return all(hasattr(strategy, name) for name in _MOMENTS)


def arrived_in(mean: ArrayRecord, inner: Strategy) -> Arrived:
    """Return where ``mean``, a mean of the clients' models, differs from the model ``inner`` steps from."""
    model: Mapping[str, NDArray[Any]] = inner.current_arrays  # type: ignore[attr-defined]
    return {name: np.asarray(array != model[name]) for name, array in to_arrays(mean, copy=False).items()}


def step_on_support(inner: Strategy, arrived: Arrived, step: Callable[[], Outcome]) -> Outcome:
    """Return what ``step`` returns, with moments and model changed only where something arrived.

    Parameters
    ----------
    inner : Strategy
        A strategy with moments (:func:`has_moments`).
    arrived : mapping of name to array of bool
        Where.
    step : callable
        Runs ``inner``'s own aggregation.
    """
    # The strategies replace these dictionaries and their arrays, and write into none of them.
    held: dict[str, Mapping[str, NDArray[Any]] | None] = {name: getattr(inner, name) for name in _MOMENTS}
    model: Mapping[str, NDArray[Any]] = dict(inner.current_arrays)  # type: ignore[attr-defined]
    arrays, metrics = step()
    # No step, no new moments: there is nothing to take back.
    if arrays is None:
        return arrays, metrics
    for moment, before in held.items():
        after: Mapping[str, NDArray[Any]] = getattr(inner, moment)
        # Before the first step there are no moments yet; Flower starts them at zero.
        setattr(inner, moment, {k: np.where(arrived[k], v, before[k] if before else 0) for k, v in after.items()})
    return to_record({k: np.where(arrived[k], v, model[k]) for k, v in to_arrays(arrays).items()}), metrics
