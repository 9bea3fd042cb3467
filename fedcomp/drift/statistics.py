"""Per-inference statistics that reveal drift: confidence, or the error where labels are known.

Confidence sees inputs of another kind. It is blind where inputs look as before and their meaning has changed, as when
two labels swap: the model is as sure as ever, and wrong. The loss sees that, too, and needs labels. Any function of
logits and labels that returns one figure per example will do in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcomp import params
from fedcomp.errors import ConfigError

Statistic = Callable[[NDArray[Any], NDArray[Any] | None], NDArray[Any]]
"""``statistic(logits, labels or None) -> figures``, shapes (examples, classes), (examples,) and (examples,)."""


def confidence(logits: ArrayLike, labels: ArrayLike | None = None) -> NDArray[np.float64]:
    """Return the largest softmax probability of each row; labels are not looked at.

    Examples
    --------
    >>> confidence([[0.0, 0.0], [100.0, 0.0]]).tolist()
    [0.5, 1.0]
    """
    return np.exp(_log_softmax(logits).max(axis=1))


def cross_entropy(logits: ArrayLike, labels: ArrayLike | None = None) -> NDArray[np.float64]:
    """Return the loss of each row.

    Raises
    ------
    ConfigError
        Without labels.

    Examples
    --------
    >>> cross_entropy([[0.0, 0.0]], [1]).round(3).tolist()
    [0.693]
    """
    if labels is None:
        raise ConfigError("statistic='loss' needs labels, and there are none; use 'confidence'")
    found = _log_softmax(logits)
    return -found[np.arange(len(found)), np.asarray(labels, np.int64)]


def _log_softmax(logits: ArrayLike) -> NDArray[np.float64]:
    found = np.asarray(logits, np.float64)
    if found.ndim != 2:
        raise ConfigError(f"logits have shape {found.shape}, expected (examples, classes)")
    # NaN stays NaN here, and counts as drift where it is compared.
    shifted = found - found.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float64)


STATISTICS: Final[Mapping[str, Statistic]] = MappingProxyType({"confidence": confidence, "loss": cross_entropy})
"""The statistics that have names."""


def statistic_of(statistic: str | Statistic) -> Statistic:
    """Return the statistic of a name; a function is one already.

    Raises
    ------
    ConfigError
        For another name.
    """
    return statistic if callable(statistic) else STATISTICS[params.choice("statistic", statistic, STATISTICS)]
