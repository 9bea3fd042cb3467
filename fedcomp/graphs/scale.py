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
* "fixed", "adaptive": there is no budget; s is given by the user or by :class:`AdaptiveScale`.

The variance of n multinomial draws is ``(M - ||Z||^2) / n``; that of a Poisson draw of the same expected size is at
most M / n, because no pi_i is below min(1, n p_i).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from fedcomp.errors import ConfigError, StateError, nearest
from fedcomp.stateful import Stateful

MODES: Final = ("matched", "measured", "worst", "fixed", "adaptive")


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
        Of "fixed" and "adaptive": the scale, at least 1.
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
    if mode in ("fixed", "adaptive"):
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


class AdaptiveScale(Stateful):
    """Searches s by what moving features costs: one observation per epoch, no variance budget.

    While moving takes ``high`` or more of the time, s doubles, as long as it is below ``cap``. Once it takes less than
    ``low``, s becomes the mean of its last two values, and stays. Between the two, at the cap, and before the first
    doubling nothing changes. The rule is that of public code that continues the work named above (read); what is timed
    is up to the caller, and modelled link times give the same run on every machine.

    Parameters
    ----------
    cap : float
        No doubling from here on, at least 1.
    low, high : float
        Shares of time, ``0 < low <= high``.

    Attributes
    ----------
    s : float
        The scale to use now.
    previous : float
        The one before the last doubling; 0 before the first.
    frozen : bool
        Whether the search is over.

    Raises
    ------
    ConfigError
        For parameters out of range.

    Examples
    --------
    >>> search = AdaptiveScale()
    >>> [search.observe(share, 1.0) for share in (0.4, 0.3, 0.1, 0.3)]
    [2.0, 4.0, 3.0, 3.0]
    """

    STATE: ClassVar[Mapping[str, Any]] = {"s": float, "previous": float, "frozen": bool}

    def __init__(self, *, cap: float = 8.0, low: float = 0.15, high: float = 0.2) -> None:
        if not 1.0 <= cap < math.inf:
            raise ConfigError(f"cap={cap!r} is not valid: a scale, finite and at least 1")
        if not 0.0 < low <= high < math.inf:
            raise ConfigError(f"low={low!r} and high={high!r} are not valid: shares of time with 0 < low <= high")
        self.cap, self.low, self.high = float(cap), float(low), float(high)
        self.s = 1.0
        self.previous = 0.0
        self.frozen = False

    def observe(self, movement: float, execution: float) -> float:
        """Take how long moving features took in an epoch, and how long the epoch took; return the scale of the next.

        Raises
        ------
        ConfigError
            Unless ``0 <= movement`` and ``0 < execution``, both finite. Any unit will do, if it is the same for both.
        """
        if not 0.0 <= movement < math.inf or not 0.0 < execution < math.inf:
            raise ConfigError(f"movement={movement!r} of execution={execution!r} are not times, finite and positive")
        if self.frozen:
            return self.s
        share = movement / execution
        if share >= self.high and self.s < self.cap:
            self.previous, self.s = self.s, min(2.0 * self.s, self.cap)
        elif share < self.low and self.previous:
            self.s = (self.previous + self.s) / 2.0
            self.frozen = True
        return self.s

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Refuse a state that this search cannot be in."""
        s, previous = values["s"], values["previous"]
        # Doubled or halfway back, s stays above the value before the last doubling.
        begun = 1.0 <= previous < s <= self.cap
        if not (begun or (s == 1.0 and previous == 0.0 and not values["frozen"])):
            raise StateError(
                f"s={s!r} after {previous!r} is not a state of a search that doubles from 1 to {self.cap:g}"
            )
