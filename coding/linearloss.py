"""Losses of linear models as functions of one margin per example, elementwise, and their derivatives.

The server's part of an iteration on coded data (:mod:`coding.datacode`): what is not linear happens here and nowhere
else.
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

    ``"logistic"``, labels 0/1: sigmoid(z) - y. ``"squares"``, labels real: z - y, of (z - y)^2/2. ``"hinge"``, labels
    0/1 standing for s = -1/+1: -s where s z < 1, else 0.

    Raises
    ------
    ConfigError
        For another loss.
    """
    if loss == "logistic":
        # Two branches, so that exp never overflows.
        e = np.exp(-np.abs(margins))
        return np.where(margins >= 0, 1.0, e) / (1.0 + e) - labels
    if loss == "squares":
        return margins - labels
    if loss == "hinge":
        signs = 2.0 * labels - 1.0
        return np.where(signs * margins < 1.0, -signs, 0.0)
    raise ConfigError(f"loss={loss!r} has no linear margins{nearest(loss, LOSSES)}")


def losses(loss: str, margins: Real, labels: Real) -> Real:
    """Return each example's loss, elementwise; what :func:`residuals` is the derivative of."""
    if loss == "squares":
        return 0.5 * (margins - labels) ** 2
    signed = (2.0 * labels - 1.0) * margins
    if loss == "logistic":
        return np.logaddexp(0.0, -signed)
    if loss == "hinge":
        return np.maximum(0.0, 1.0 - signed)
    raise ConfigError(f"loss={loss!r} has no linear margins{nearest(loss, LOSSES)}")
