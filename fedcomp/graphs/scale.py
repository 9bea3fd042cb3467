"""The scale s >= 1 by which owned columns are favoured, derived from a variance budget D.

The idea, a sampler that prefers local nodes by a factor an algorithm determines, is that of Jiang and Rumi (arXiv
2101.07706, abstract). The rules below are derived here: with base probabilities q_i, local mass lambda, and
``A = sum a_i / q_i`` over local and over remote columns, favouring local ones by s gives the second moment

    M(s) = (s lambda + 1 - lambda) (A_local / s + A_remote),

and s is the largest scale with ``M(s) <= D M(1)``. The modes differ in what is known of A:

* "matched": nothing; A is assumed to be spread like the mass. This is a model, close where base probabilities are near
  the optimum; it guarantees nothing.
* "measured": the norms of the vectors; exact.
* "worst": nothing, and nothing is assumed: it holds for any vectors, and saves little.
* "fixed": there is no budget; s is given by the user.

The variance of n multinomial draws is ``(M - ||Z||^2) / n``; that of a Poisson draw of the same expected size is at
most M / n, because no pi_i is below min(1, n p_i).
"""

from __future__ import annotations

import math
from typing import Final

from fedcomp.errors import ConfigError, nearest

MODES: Final = ("matched", "measured", "worst", "fixed")


def scale(
    mode: str,
    lam: float,
    D: float,
    *,
    s_max: float = 16.0,
    s: float = 1.0,
    a_local: float = math.nan,
    a_remote: float = math.nan,
) -> float:
    """Return the factor by which weights of local candidates are multiplied, from 1 to ``s_max``.

    Parameters
    ----------
    mode : str
        One of :data:`MODES`.
    lam : float
        lambda, the local mass of this layer and batch, from 0 to 1. At 0 there is nothing to favour, at 1 nothing to
        favour it over: s = 1 whatever the mode.
    D : float
        Budget, at least 1; infinite gives ``s_max``. At 1, s = 1 in the modes that have a budget.
    s_max : float
        Largest scale, at least 1.
    s : float
        Of "fixed": the scale, at least 1.
    a_local, a_remote : float
        Of "measured": sum of ``a_i / q_i`` over local and over remote candidates, q summing to 1 over both.

    Raises
    ------
    ConfigError
        For D, s or s_max below 1, lambda outside [0, 1], a NaN, missing or negative sums, or an unknown mode.
    """
    if mode not in MODES:
        raise ConfigError(f"unknown mode {mode!r} of the scale rule{nearest(mode, MODES)}")
    for name, value in (("budget", D), ("s_max", s_max), ("scale", s)):
        # Written this way round, NaN is refused, too.
        if not value >= 1.0:
            raise ConfigError(f"{name}={value!r} is not valid: at least 1")
    if not 0.0 <= lam <= 1.0:
        raise ConfigError(f"local mass {lam!r} is not valid: a share from 0 to 1 (NaN: a layer without candidates)")
    if mode == "measured":
        _check_sums(a_local, a_remote)
    # Exact values: local_mass() returns them where one side has no weight at all.
    if lam in (0.0, 1.0):
        return 1.0
    if mode == "fixed":
        return float(min(s, s_max))
    if D <= 1.0:
        return 1.0
    if math.isinf(D):
        return float(s_max)
    if mode == "matched":
        # M(s) / M(1) = 1 + lambda (1 - lambda) (s - 1)^2 / s = D
        # The larger root. Its discriminant c + c^2 / 4 is taken apart: c^2 would overflow for a tiny lambda.
        c = (D - 1.0) / lam / (1.0 - lam)
        found = 1.0 + c / 2.0 + math.sqrt(c) * math.sqrt(1.0 + c / 4.0)
    elif mode == "worst":
        # p_i(s) >= q_i / (s lambda + 1 - lambda) for every i, so that M(s) <= (1 + (s - 1) lambda) M(1) for any a
        found = 1.0 + (D - 1.0) / lam
    else:
        found = _measured(lam, D, a_local, a_remote)
    return float(min(found, s_max))


def moment_ratio(s: float, lam: float, a_local: float, a_remote: float) -> float:
    """Return ``M(s) / M(1)``: what favouring local columns by ``s`` does to the second moment.

    1 when nothing has energy.
    """
    largest = max(a_local, a_remote)
    if not largest > 0.0:
        return 1.0
    # Only their ratio matters, and sums of energies may be anywhere between 1e-300 and 1e300.
    near, far = a_local / largest, a_remote / largest
    return (s * lam + 1.0 - lam) * (near / s + far) / (near + far)


def _check_sums(a_local: float, a_remote: float) -> None:
    for name, value in (("a_local", a_local), ("a_remote", a_remote)):
        if not 0.0 <= value < math.inf:
            raise ConfigError(f"{name}={value!r} is not valid: mode 'measured' needs it, finite and at least 0")


def _measured(lam: float, D: float, a_local: float, a_remote: float) -> float:
    """Return the largest s with ``M(s) <= D M(1)``.

    In t = s - 1 the equation is ``a t^2 + b t - e = 0`` with e >= 0, so that one root is at least 0; in s the
    coefficients nearly cancel when D is near 1.
    """
    largest = max(a_local, a_remote)
    if not largest > 0.0:
        return math.inf
    near, far = a_local / largest, a_remote / largest
    e = (D - 1.0) * (near + far)
    a = lam * far
    b = lam * far - (1.0 - lam) * near - e
    # Of the two forms of the root the one that adds numbers of one sign: the other cancels.
    if b > 0.0:
        return 1.0 + 2.0 * e / (b + math.sqrt(b * b + 4.0 * a * e))
    # Without remote energy M(s) only falls as s grows: no budget limits it.
    if not a > 0.0:
        return math.inf
    return 1.0 + (-b + math.sqrt(b * b + 4.0 * a * e)) / (2.0 * a)
