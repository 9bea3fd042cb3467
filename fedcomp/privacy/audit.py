"""Empirical privacy audits: lower bounds on epsilon from a mechanism's outputs alone.

A wrong noise scale raises no error and moves no accuracy anybody would look at, so it has to be looked for. Six tiers,
each of which sees what the others cannot:

====  =============================  ==================================================================================
tier  asks                           answers with
====  =============================  ==================================================================================
A     how far can one unit go        :func:`farthest`: exhaustive where small, random and adversarial where not
B     is the noise as large as said  :func:`noise_scale`: chi-square of residuals, two-sided
C     can two worlds be told apart   :func:`audit_canary`: a lower bound on mu from the worst pair, end to end
D     does a whole run leak grossly  :func:`audit_run`: coin-flipped canaries in one run (Steinke, Nasr, Jagielski 2023)
E     do the last bits leak          :func:`off_grid`: outputs that lie beside the public grid (Mironov 2012)
F     is the noise fresh             :func:`likeness`: correlation of two rounds' noise
====  =============================  ==================================================================================

mu is the parameter of Gaussian differential privacy: telling two neighbouring data sets apart is as hard as telling
N(0, 1) from N(mu, 1). A Gaussian release has mu = sensitivity / standard deviation, and T of them have sqrt(T) times
as much. An audit can refute a claim; it never proves one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, optional
from fedcomp.rng import Key

Floats = NDArray[np.float64]
Unit = TypeVar("Unit")

CHANCE: Final = 1e-6
"""Probability with which a correct mechanism fails a test of noise scale or freshness."""

TIGHT: Final = 0.99
"""Share of the claimed sensitivity that a search must reach: a bound nobody reaches is a wrong formula, too."""

SLACK: Final = 1e-9
"""Relative rounding error of float64 that is not a violation."""

_NORMAL: Final = NormalDist()


class Distance(NamedTuple):
    """Largest L2 distance of the sums of two neighbouring data sets that a search found, what was claimed, in the same
    units, and how many pairs were tried."""

    found: float
    claimed: float
    pairs: int

    @property
    def ok(self) -> bool:
        """Whether no pair is farther apart than claimed, which NaN and infinity never are, and some pair comes as far
        as 99 % of the claim."""
        return TIGHT * self.claimed <= self.found <= self.claimed * (1.0 + SLACK)


class Tested(NamedTuple):
    """What noise is, and the two-sided p-value of that under what was claimed of it."""

    value: float
    p: float

    @property
    def ok(self) -> bool:
        """Whether right noise would look like this once in 10^6 times or more often."""
        return self.p >= CHANCE


def farthest(
    release: Callable[[Sequence[Unit]], NDArray[Any]],
    pairs: Iterable[tuple[Sequence[Unit], Sequence[Unit]]],
    claimed: float,
) -> Distance:
    """Return the largest distance of ``release`` over neighbouring data sets.

    Parameters
    ----------
    release : callable
        From a data set (a sequence of units) to the sum without noise: the code path with noise multiplier 0.
    pairs : iterable of pairs of data sets
        Each of two data sets that differ by one unit.
    claimed : float
        Sensitivity that the noise was drawn for, in the units of ``release``.

    Raises
    ------
    ConfigError
        Without a single pair: an empty search finds nothing wrong.
    """
    worst, count = 0.0, 0
    for first, second in pairs:
        gap = np.asarray(release(first), np.float64) - np.asarray(release(second), np.float64)
        far = float(np.linalg.norm(gap.ravel()))
        # NaN compares false with everything: it has to end the search, not to be passed over.
        worst = far if math.isnan(far) or far > worst else worst
        count += 1
        if math.isnan(worst):
            break
    if count == 0:
        raise ConfigError("a search over no pairs finds nothing; give at least one pair of data sets")
    return Distance(worst, float(claimed), count)


def adversarial(size: int, clip: float, key: Key, *, count: int = 32) -> list[Floats]:
    """Return vectors chosen to break a bound of L2 norm ``clip``: at the boundary, far beyond it, concentrated, equal.

    Parameters
    ----------
    size : int
        Coordinates.
    clip : float
        The bound; in the units of the vectors.
    key : Key
        Of the random ones.
    count : int
        How many random directions.

    Notes
    -----
    Every vector is there with its opposite, which is the worst pair of ``"replace"``; disjoint supports and vectors
    that round upwards in every coordinate are among them. All are finite: what is not must be refused, and is a test
    of its own.
    """
    flat = np.ones(size) / math.sqrt(size)
    first = np.zeros(size)
    first[0] = 1.0
    last = np.zeros(size)
    last[-1] = 1.0
    half = np.zeros(size)
    half[: max(1, size // 2)] = 1.0
    half /= np.linalg.norm(half)
    draws = key.generator().standard_normal((count, size))
    # Rounding moves the flat one farthest; the first and the last share no coordinate.
    directions = [flat, first, last, half, *(draws / np.linalg.norm(draws, axis=1, keepdims=True))]
    # At the bound, by rounding beyond it, and far beyond: where a comparison or a quotient that is wrong shows.
    lengths = (clip, clip * (1.0 + 1e-12), clip * 3.0, clip * 1e6)
    # The squared norm of the last ones overflows float32, then float64.
    extreme = [1e30 * flat, 1e200 * first]
    made = [length * direction for direction in directions for length in lengths]
    made += [clip / 3.0 * direction for direction in directions[:4]] + extreme
    return [sign * vector for vector in made for sign in (1.0, -1.0)]


def noise_scale(residuals: NDArray[Any], sigma: float) -> Tested:
    """Test that ``residuals`` (outputs minus the sum without noise) are independent draws of standard deviation sigma;
    the value is their root mean square over sigma, the test chi-square.

    Parameters
    ----------
    residuals : ndarray
        Any shape.
    sigma : float
        Claimed standard deviation, in the same units.

    Raises
    ------
    ConfigError
        Without residuals, or when ``sigma`` is not positive.
    """
    with optional("an audit"):
        from scipy.special import gammainc, gammaincc

    values = np.asarray(residuals, np.float64).ravel()
    if values.size == 0 or not 0.0 < sigma < math.inf:
        raise ConfigError(f"{values.size} residuals against sigma={sigma!r}: at least one, and a positive number")
    scaled = values / sigma
    statistic = float(scaled @ scaled)
    if not math.isfinite(statistic):
        return Tested(math.inf, 0.0)
    half = values.size / 2.0
    # Two-sided: too much noise is a wrong formula, too.
    p = 2.0 * min(float(gammainc(half, statistic / 2.0)), float(gammaincc(half, statistic / 2.0)))
    return Tested(math.sqrt(statistic / values.size), min(p, 1.0))


def most_errors(errors: NDArray[Any] | int, trials: int, confidence: float) -> NDArray[np.float64]:
    """Return Clopper and Pearson's upper bound on a probability of which ``errors`` of ``trials`` were seen, one-sided.

    Parameters
    ----------
    errors : ndarray of int, or int
    trials : int
    confidence : float
        Probability with which the bound holds.
    """
    with optional("an audit"):
        from scipy.special import betaincinv

    seen = np.asarray(errors, np.float64)
    # The bound solves P[Binomial(trials, p) <= errors] = 1 - confidence; all errors leave it at 1.
    return np.where(seen >= trials, 1.0, betaincinv(np.minimum(seen, trials - 1.0) + 1.0, trials - seen, confidence))


def _distance(errors: NDArray[Any] | int, trials: int, confidence: float) -> Floats:
    """Return the distance of a world beyond the threshold, in standard deviations, for which it errs no more often than
    observed."""
    with optional("an audit"):
        from scipy.special import ndtri

    # 99 % for both worlds together: half of what may go wrong for each.
    bound = most_errors(errors, trials, 1.0 - (1.0 - confidence) / 2.0)
    return -np.asarray(ndtri(bound), np.float64)


def audit_canary(absent: NDArray[Any], present: NDArray[Any], threshold: float, *, confidence: float = 0.99) -> float:
    """Return a lower bound on mu, never negative, from what an attacker sees in two neighbouring worlds who knows
    everything but whether the canary is in. A claim below it is refuted, but for the error probability of the bound.

    Parameters
    ----------
    absent, present : ndarray, (R,)
        One score per run: the projection of the output on the direction in which the canary moves it
        (:func:`project`); of several rounds, the sum over the rounds.
    threshold : float
        Scores above it are taken for "present". Fixed before the runs, at the midpoint of both worlds: one chosen on
        the scores would need other scores to test it.
    confidence : float
        Of the bound.

    Notes
    -----
    mu_low = -Phi^-1(FPR+) - Phi^-1(FNR+) with Clopper and Pearson's bounds FPR+ and FNR+ on both kinds of error:
    for a mu-GDP mechanism no test has Phi^-1(1 - FPR) - Phi^-1(FNR) > mu (Dong, Roth, Su 2022; recalled).
    """
    without, within = np.asarray(absent, np.float64).ravel(), np.asarray(present, np.float64).ravel()
    if without.size != within.size or without.size == 0:
        raise ConfigError(f"{without.size} scores without and {within.size} with the canary: as many of both, not none")
    # A comparison would silently count NaN as "absent".
    if not (np.isfinite(without).all() and np.isfinite(within).all()):
        raise ConfigError("a score is NaN or infinite: what the mechanism released can be told apart by that alone")
    false_alarms = int(np.count_nonzero(without > threshold))
    misses = int(np.count_nonzero(within <= threshold))
    found = _distance(np.array([false_alarms, misses]), without.size, confidence)
    # When one world was always taken for the other, its bound is minus infinity: nothing was shown.
    return max(0.0, float(found.sum())) if np.isfinite(found).all() else 0.0


def project(outputs: NDArray[Any], without: NDArray[Any], within: NDArray[Any]) -> tuple[Floats, float]:
    """Return the outputs' projections on the canary's direction, and the midpoint of both worlds.

    Parameters
    ----------
    outputs : ndarray, (R, d)
        Noisy outputs.
    without, within : ndarray, (d,)
        What the two worlds give without noise.

    Returns
    -------
    scores : ndarray of float64, (R,)
        0 is the world without the canary, the distance of both worlds the world with it.
    threshold : float
        Half that distance.

    Raises
    ------
    ConfigError
        When both worlds are the same: there is no direction to look in.
    """
    start = np.asarray(without, np.float64).ravel()
    gap = np.asarray(within, np.float64).ravel() - start
    length = float(np.linalg.norm(gap))
    if not 0.0 < length < math.inf:
        raise ConfigError(f"the canary moves the output by {length}; choose one of a finite distance above 0")
    rows = np.asarray(outputs, np.float64).reshape(-1, start.size)
    return (rows - start) @ (gap / length), length / 2.0


@lru_cache(maxsize=8)
def _reach(trials: int, confidence: float) -> Floats:
    """Return :func:`_distance` for 0 to ``trials`` errors, shape (trials + 1,); minus infinity is given as -40."""
    # Not minus infinity, which times a probability of 0 would make the mean NaN.
    return np.maximum(_distance(np.arange(trials + 1), trials, confidence), -40.0)


def power(mu: float, claimed: float, trials: int, *, confidence: float = 0.99) -> tuple[float, float]:
    """Return how probable it is that a canary audit refutes ``claimed`` when ``mu`` is true, and its mean bound.

    Computed, not simulated: both kinds of errors are binomial when the threshold is the midpoint.
    """
    with optional("an audit"):
        from scipy.special import bdtr

    # With the threshold half-way between the worlds both kinds of error have this probability.
    rate = _NORMAL.cdf(-mu / 2.0)
    errors = np.arange(trials + 1)
    reach = _reach(trials, confidence)
    below = np.asarray(bdtr(errors, trials, rate), np.float64)
    mass = np.diff(below, prepend=0.0)
    # reach falls with the errors: of those of one world, count how many of the other still refute.
    fewest = np.searchsorted(-reach, reach - claimed, side="left")
    refuted = np.where(fewest > 0, below[np.maximum(fewest, 1) - 1], 0.0)
    return float(mass @ refuted), 2.0 * float(mass @ reach)


def guess_p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Return an upper bound on the probability of ``correct`` or more right guesses under (epsilon, delta)-DP.

    Source: Steinke, Nasr, Jagielski 2023, "Privacy auditing with one (1) training run", theorem 5.2 (recalled):
    P[W >= v] <= P[W* >= v] + 2 m delta max_i P[v > W* >= v - i] / i with W* ~ Binomial(r, e^eps / (1 + e^eps)).
    """
    with optional("an audit"):
        from scipy.special import bdtr, bdtrc

    if not 0 <= correct <= guesses <= canaries:
        raise ConfigError(f"{correct} correct of {guesses} guesses on {canaries} canaries cannot be")
    if correct == 0:
        return 1.0
    rate = 1.0 / (1.0 + math.exp(-epsilon))
    tail = float(bdtrc(correct - 1, guesses, rate))
    steps = np.arange(1, correct + 1)
    lower = np.where(steps < correct, bdtr(np.maximum(correct - 1 - steps, 0), guesses, rate), 0.0)
    between = float(bdtr(correct - 1, guesses, rate)) - lower
    return min(1.0, tail + 2.0 * canaries * delta * float((between / steps).max()))


def _epsilon_low(correct: int, guesses: int, canaries: int, delta: float, confidence: float) -> float:
    alpha = 1.0 - confidence
    if guess_p_value(correct, guesses, canaries, 0.0, delta) > alpha:
        return 0.0
    low, high = 0.0, 1.0
    while guess_p_value(correct, guesses, canaries, high, delta) <= alpha:
        low, high = high, 2.0 * high
    # To about the last bit of a double.
    for _ in range(60):
        middle = (low + high) / 2.0
        refuted = guess_p_value(correct, guesses, canaries, middle, delta) <= alpha
        low, high = (middle, high) if refuted else (low, middle)
    return low


def audit_run(
    scores: NDArray[Any],
    included: NDArray[Any],
    *,
    guesses: int,
    delta: float,
    confidence: float = 0.95,
) -> tuple[int, float]:
    """Guess which canaries were in a run; return how many guesses are right, and the lower bound on epsilon that they
    give. A claim below it is refuted, but for the error probability of the bound.

    Parameters
    ----------
    scores : ndarray, (m,)
        One per canary: the larger, the likelier it was in.
    included : ndarray of bool, (m,)
        What a fair coin decided for each.
    guesses : int
        The largest half of them is guessed "in", the smallest half "out"; the rest is not guessed at.
    delta : float
        Of the claim.
    confidence : float
        Of the bound.

    Notes
    -----
    A smoke alarm for gross mistakes: a hundred guesses, all of them right, certify no more than 3.5, and canaries that
    are weaker than the worst case certify less.
    """
    values, inside = np.asarray(scores, np.float64).ravel(), np.asarray(included, bool).ravel()
    if values.size != inside.size or not 2 <= guesses <= values.size:
        raise ConfigError(
            f"{guesses} guesses on {values.size} scores of {inside.size} canaries: at least 2, at most all"
        )
    order = np.argsort(values, kind="stable")
    # The least certain are left out: a wrong guess costs more than one that was not made.
    lowest, highest = order[: guesses // 2], order[values.size - (guesses - guesses // 2) :]
    correct = int(np.count_nonzero(~inside[lowest]) + np.count_nonzero(inside[highest]))
    return correct, _epsilon_low(correct, guesses, values.size, delta, confidence)


def off_grid(outputs: NDArray[Any], step: float) -> float:
    """Return the share of ``outputs`` that are not whole multiples of ``step``.

    An attacker computes it for two worlds. Where it differs, the last bits tell them apart, whatever the noise.
    """
    values = np.asarray(outputs, np.float64).ravel()
    if values.size == 0 or not 0.0 < step < math.inf:
        raise ConfigError(f"{values.size} outputs on a grid of {step!r}: at least one, and a positive step")
    # As a mechanism computes them, whole number times step: on the grid means equal to the last bit.
    return float(np.count_nonzero(np.rint(values / step) * step != values)) / values.size


def likeness(first: NDArray[Any], second: NDArray[Any]) -> Tested:
    """Test that the noise of two releases, at least 30 draws each, is independent; the value is their correlation.

    Raises
    ------
    ConfigError
        When there are fewer, or not as many of both.
    """
    a, b = np.asarray(first, np.float64).ravel(), np.asarray(second, np.float64).ravel()
    if a.size != b.size or a.size < 30:
        raise ConfigError(f"{a.size} and {b.size} draws: as many of both, at least 30")
    a, b = a - a.mean(), b - b.mean()
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    if lengths == 0.0:
        # Constant "noise" is no noise; two of them say nothing else.
        return Tested(1.0, 0.0)
    correlation = float(a @ b) / lengths
    return Tested(correlation, 2.0 * _NORMAL.cdf(-abs(correlation) * math.sqrt(a.size)))
