"""Losses of linear models as elementwise functions of one margin per example, and their derivatives.

The server's part of an iteration on coded data (:mod:`fedcomp.coding.datacode`): what is not linear happens here and
nowhere else.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, nearest

Real = NDArray[np.float64]

LOSSES: Final = ("logistic", "squares", "hinge")


def residuals(loss: str, margins: Real, labels: Real) -> Real:
    """Return the derivative of each example's loss by its margin z, elementwise.

    ``"squares"``, labels real: z - y, of (z - y)^2/2. ``"logistic"``, classes y = 0/1 or what is between them:
    sigmoid(z) - y. ``"hinge"``, classes s = -1/+1: -s where s z < 1, else 0. Both take classes as 0/1 and as -1/+1.

    Raises
    ------
    ConfigError
        For another loss, and for labels that are no classes.
    """
    if loss == "squares":
        return margins - labels
    if loss == "logistic":
        # Two branches, so that exp never overflows.
        e = np.exp(-np.abs(margins))
        return np.where(margins >= 0, 1.0, e) / (1.0 + e) - _classes(loss, labels)
    if loss == "hinge":
        signs = 2.0 * _classes(loss, labels) - 1.0
        return np.where(signs * margins < 1.0, -signs, 0.0)
    raise ConfigError(f"loss={loss!r} has no linear margins{nearest(loss, LOSSES)}")


def losses(loss: str, margins: Real, labels: Real) -> Real:
    """Return each example's loss, elementwise; what :func:`residuals` is the derivative of. Raises what that raises."""
    if loss == "squares":
        return 0.5 * (margins - labels) ** 2
    if loss in ("logistic", "hinge"):
        signed = (2.0 * _classes(loss, labels) - 1.0) * margins
        # log(1 + exp(-x)) written out overflows for margins far on the wrong side.
        return np.logaddexp(0.0, -signed) if loss == "logistic" else np.maximum(0.0, 1.0 - signed)
    raise ConfigError(f"loss={loss!r} has no linear margins{nearest(loss, LOSSES)}")


def _classes(loss: str, labels: Real) -> Real:
    """Return classes as 0 and 1, which may also be given as -1 and +1."""
    classes = np.where(labels == -1.0, 0.0, labels)
    known = (classes == 0.0) | (classes == 1.0) if loss == "hinge" else (classes >= 0.0) & (classes <= 1.0)
    if not known.all():
        wrong = classes[~known].reshape(-1)[0]
        raise ConfigError(f"a label is {wrong!r}; loss={loss!r} takes the classes 0 and 1, or -1 and +1")
    return classes
