"""Epsilon of a list of events: the exact curve where one exists, else Opacus' accountants for sampled units.

Four accountants, from the loosest to the tightest: the classical conversion of Rényi privacy (what DataLens' released
code prints), the improved one, the composition of privacy loss distributions (PRV), and the exact curve of the Gaussian
mechanism, which needs no sampling. :func:`compose` picks the tightest that holds and says in its result which one it
was. Opacus' ``gdp`` accountant is never used: it is an asymptotic formula that reports less than was spent.

An epsilon is an upper bound everywhere here: errors of the numerics are added to it, what integer noise costs beyond
the curve of the continuous one is taken off delta, and where an accountant cannot answer, the next looser one does,
under its own name. Opacus is imported inside the functions that sample (it brings torch); a run without sampling never
loads it.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import ConfigError, optional
from fedcomp.privacy.errors import PrivacyError
from fedcomp.privacy.events import FINE, Event
from fedcomp.privacy.gaussian import (
    check_delta,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    lattice_delta,
)

__all__ = [
    "Cost",
    "Unaccountable",
    "classical_epsilon",
    "compose",
    "gaussian_delta",
    "gaussian_epsilon",
    "noise_multiplier_for",
    "prv_epsilon",
    "rdp_epsilon",
    "releases_for",
]

PRV_ERROR: Final = 0.01
"""Largest error of PRV in epsilon; it is part of the epsilon that is returned."""

_PRV_POINTS: Final = 1 << 23
"""Maximum number of points of the distribution in PRV (64 MiB per array, about eight arrays). Tiny rates over many
releases would need more and more."""

_PRV_LOSS: Final = 600.0
"""Largest privacy loss that PRV may tabulate. exp(709) is the last double, and an overflow would give a result that is
too small."""

_PRV_DELTA: Final = 1e-11
"""Smallest delta for PRV: its Fourier transforms carry an error of about 1e-16 a point."""

_PRV_KINDS: Final = 24
"""Maximum number of distinct (rate, noise multiplier) pairs in PRV, since a budget is checked every round."""


def _orders() -> NDArray[np.float64]:
    low = [1.001, 1.002, 1.005, 1.01, 1.02, 1.05]
    dense = [1.0 + tenth / 10.0 for tenth in range(1, 100)] + [float(order) for order in range(11, 64)]
    high = np.unique(np.floor(np.geomspace(64.0, 1024.0, 48)))
    beyond = np.unique(np.floor(np.geomspace(1100.0, 2.0**24, 160)))
    return np.array([*low, *dense, *high, *beyond])


ORDERS: Final = _orders()
"""Rényi orders: Opacus' own, closer to 1 for large and up to 2^24 for small epsilons. Shape (n,)."""

_SAMPLED_ORDERS: Final = 1024.0
"""Highest order at which a sampled mechanism is evaluated; higher binomial coefficients overflow a double."""

CLASSICAL_ORDERS: Final = np.array([1.1, *range(2, 200)])
"""The orders of DataLens' released code."""


class Unaccountable(PrivacyError, ArithmeticError):
    """An accountant cannot say what the events cost; another one must."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The privacy cost of releases.

    Attributes
    ----------
    epsilon : float
        Infinite where nothing is protected.
    delta : float
        Of the whole guarantee, the failure probabilities of the events included.
    accountant : str
        The analysis that gave epsilon, and the reason if a tighter one was not used.
    error : float
        Numerical error that is part of ``epsilon``.
    order : float
        Rényi order it was found at; NaN where no orders are involved.
    """

    epsilon: float
    delta: float
    accountant: str
    error: float = 0.0
    order: float = math.nan


# Rényi privacy.


@dataclass(frozen=True, slots=True, order=True)
class _Part:
    """A joint cost on the same units: equal noise, and one draw of the participants.

    Attributes
    ----------
    inverse : float
        Sum of 1/z^2 over the releases: they are one Gaussian of noise multiplier inverse^(-1/2).
    rate : float
    kind : str
        "smooth" (continuous, or integer on a fine grid), "coarse" (integer, zCDP only), "skellam", or "none".
    slope, extra, most : float
        Of Skellam noise, whose curve is at most min(slope * order + extra, most) above the Gaussian one
        (:func:`renyi_curve`).
    grid : float
        Smallest standard deviation of integer noise among "smooth" releases, in grid steps; infinite for continuous.
    """

    inverse: float
    rate: float
    kind: str
    slope: float = 0.0
    extra: float = 0.0
    most: float = 0.0
    grid: float = math.inf


Profile = tuple[tuple[_Part, ...], float]
"""One round as an accountant sees it: its parts, and the failure probability of its events."""


def is_fine(event: Event) -> bool:
    """Whether Gaussian noise is continuous, or integer and so fine that it is accounted as such."""
    # A mechanism that refines its grid to just this size may miss it by the last bit.
    return event.noise == "gaussian" or (event.noise == "discrete_gaussian" and event.grid_sigma >= FINE * (1.0 - 1e-9))


def profile(events: Event | Sequence[Event]) -> Profile:
    """Return one round's events without what does not change their cost (labels, order)."""
    group = (events,) if isinstance(events, Event) else tuple(events)
    if not group:
        raise ConfigError("a round without events cannot be accounted; leave it out")
    drawn = max((event.rate for event in group if event.rate < 1.0), default=1.0)
    inverse: dict[tuple[float, str], float] = {}
    grid: dict[tuple[float, str], float] = {}
    parts: list[_Part] = []
    for event in group:
        if event.noise_multiplier == 0.0:
            # A sum without noise is a kind of its own and not a division by 0: every accountant answers infinity for
            # it.
            parts.append(_Part(math.inf, 1.0, "none"))
            continue
        # Not by the square, which may be too small for a double.
        spent = event.releases / event.noise_multiplier / event.noise_multiplier
        if event.noise == "skellam":
            variance = event.grid_sigma**2
            # Skellam's bound needs the variance and both sensitivities in grid steps; their ratio alone does not
            # determine it.
            l1, l2 = event.grid_l1, event.grid_sigma / event.noise_multiplier
            if not (0.0 < l1 < math.inf and math.isfinite(variance)):
                raise ConfigError("an event with Skellam noise needs grid_sigma and grid_l1, in grid steps")
            count = event.releases
            slope = count * 2.0 * l2**2 / (4.0 * variance**2)
            extra = count * (6.0 * l1 - l2**2) / (4.0 * variance**2)
            parts.append(_Part(spent, 1.0, "skellam", slope, extra, count * 3.0 * l1 / (2.0 * variance)))
            continue
        # Who takes part in a round is drawn once: its releases are one Gaussian on one sample, not several samples.
        # Where they claim several rates it is a sample of the largest: as independent ones they would cost too little.
        fine = is_fine(event)
        key = (drawn if fine and event.rate < 1.0 else 1.0, "smooth" if fine else "coarse")
        inverse[key] = inverse.get(key, 0.0) + spent
        # The coarsest grid decides: how far the integers' curve may exceed the continuous one falls with its square.
        grid[key] = min(grid.get(key, math.inf), event.grid_sigma if fine else math.inf)
    parts += [_Part(total, *key, grid=grid[key]) for key, total in inverse.items()]
    # Sorted, so that rounds of equal cost are equal keys: a ledger counts kinds of rounds, however many it holds.
    return tuple(sorted(parts)), math.fsum(event.delta for event in group)


Rounds = Mapping[Profile, int]


def _rounds(events: Iterable[Event | Sequence[Event]]) -> Counter[Profile]:
    counted: Counter[Profile] = Counter()
    for group in events:
        counted[profile(group)] += 1
    return counted


# Enough for the orders of a few hundred mechanisms; a plan asks two accountants about each it tries.
@lru_cache(maxsize=1 << 16)
def _sampled_order(rate: float, noise_multiplier: float, order: float) -> float:
    """Return Opacus' figure for one sampled Gaussian at one Rényi order; raises the exceptions of its series."""
    with optional("accounting of sampled rounds"):
        from opacus.accountants.analysis import rdp

    with np.errstate(all="ignore"):
        return float(rdp.compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=1, orders=float(order)))


@lru_cache(maxsize=512)
def _sampled_curve(rate: float, noise_multiplier: float) -> NDArray[np.float64]:
    """Return Opacus' Rényi curve of one sampled Gaussian at :data:`ORDERS`."""
    # Sampling never costs more than taking part for certain (joint quasi-convexity), at any order.
    curve = ORDERS / (2.0 * noise_multiplier**2)
    for i, order in enumerate(ORDERS):
        if order > _SAMPLED_ORDERS:
            break
        try:
            value = _sampled_order(rate, noise_multiplier, float(order))
        except (ValueError, OverflowError, ZeroDivisionError):
            continue  # the series of a fractional order lost its digits; the bound without sampling remains
        # Also false for NaN and for the negative values that cancelled digits can give: the bound without sampling
        # stays.
        if 0.0 <= value < curve[i]:
            curve[i] = value
    # The result is cached; a caller that scaled it in place would change every later account.
    curve.flags.writeable = False
    return curve


def renyi_curve(part: _Part) -> NDArray[np.float64]:
    """Return the Rényi curve of a part at :data:`ORDERS`, infinite where no bound is known. Shape (n,)."""
    if part.kind == "none":
        return np.full(ORDERS.shape, math.inf)
    if part.kind == "smooth" and part.rate < 1.0:
        return _sampled_curve(part.rate, part.inverse**-0.5)
    curve = ORDERS * (part.inverse / 2.0)
    if part.kind == "skellam":
        # Agarwal, Kairouz and Liu 2021 (recalled), for whole orders: beside alpha D2^2 / (2 v) at most
        # min(((2 alpha - 1) D2^2 + 6 D1) / (4 v^2), 3 D1 / (2 v)), with v the variance. Checked against sums in tests.
        beyond = np.minimum(part.slope * ORDERS + part.extra, part.most)
        return np.where(np.floor(ORDERS) == ORDERS, curve + beyond, math.inf)
    return curve


def _rdp_total(rounds: Rounds, cap: int) -> NDArray[np.float64]:
    """Return the Rényi curve of all rounds, or of the ``cap`` most expensive ones at each order. Shape (n,)."""
    curves = [
        (sum((renyi_curve(part) for part in parts), np.zeros(ORDERS.shape)), n) for (parts, _), n in rounds.items()
    ]
    if not curves:
        return np.zeros(ORDERS.shape)
    if not cap or cap >= sum(rounds.values()):
        return np.sum([curve * n for curve, n in curves], axis=0)
    # No unit was in more than `cap` rounds: whichever those were, they cost no more than the dearest at this order.
    table = np.stack([curve for curve, _ in curves])
    counts = np.array([n for _, n in curves])
    # At each order by itself: the curves of two kinds of noise may cross.
    order = np.argsort(-table, axis=0, kind="stable")
    taken = np.cumsum(counts[order], axis=0)
    used = np.clip(cap - (taken - counts[order]), 0, counts[order])
    # No round of an infinite cost is infinity times 0, a NaN that np.where then leaves out.
    with np.errstate(invalid="ignore"):
        return np.where(used > 0, np.take_along_axis(table, order, axis=0) * used, 0.0).sum(axis=0)


def _convert(
    curve: NDArray[np.float64], delta: float, *, orders: NDArray[np.float64] | None = None, classical: bool = False
) -> tuple[float, float]:
    """Return (epsilon, order) of a Rényi curve (Balle et al. 2020, recalled; or the classical conversion)."""
    alpha = ORDERS if orders is None else orders
    if classical:
        epsilon = curve - math.log(delta) / (alpha - 1.0)
    else:
        epsilon = curve + np.log1p(-1.0 / alpha) - (math.log(delta) + np.log(alpha)) / (alpha - 1.0)
    best = int(np.argmin(epsilon))
    # The improved conversion goes below 0 for curves that cost next to nothing; epsilon 0 is what is then proven.
    return max(0.0, float(epsilon[best])), float(alpha[best])


# Accountants by name: each answers for the whole list of events, without picking.


def rdp_epsilon(events: Iterable[Event | Sequence[Event]], delta: float) -> float:
    """Return epsilon by Rényi privacy with the improved conversion: Opacus' ``RDPAccountant`` at more orders.

    Parameters
    ----------
    events : iterable of Event, or of sequences of them
        Items are rounds; the events of one round are on the same units.
    delta : float
        Of the whole; failure probabilities of the events are taken off.
    """
    rounds, left = _prepare(events, delta)
    return _convert(_rdp_total(rounds, 0), left)[0] if left > 0.0 else math.inf


def classical_epsilon(events: Iterable[Event | Sequence[Event]], delta: float) -> float:
    """Return epsilon by the conversion R(alpha) + log(1/delta) / (alpha - 1), as DataLens' released code does (read).

    Raises
    ------
    ConfigError
        For sampled events: that code samples nothing.
    """
    rounds, left = _prepare(events, delta)
    if left <= 0.0:
        return math.inf
    total = 0.0
    for (parts, _), n in rounds.items():
        if any(part.rate < 1.0 or part.kind == "skellam" for part in parts):
            raise ConfigError("the classical rule is for Gaussian noise without sampling")
        total += n * math.fsum(part.inverse for part in parts)
    return _convert(CLASSICAL_ORDERS * (total / 2.0), left, orders=CLASSICAL_ORDERS, classical=True)[0]


def prv_epsilon(events: Iterable[Event | Sequence[Event]], delta: float, *, error: float = PRV_ERROR) -> float:
    """Return epsilon by Opacus' ``PRVAccountant``: an upper bound that includes its ``error``.

    Raises
    ------
    Unaccountable
        When the distribution would not fit into memory or into double precision, or noise is not a smooth Gaussian.
    """
    rounds, _ = _prepare(events, delta)
    left = _left(rounds, delta, 0)
    return _prv(rounds, left, error) if left > 0.0 else math.inf


def _prv(rounds: Rounds, delta: float, error: float) -> float:
    history: Counter[tuple[float, float]] = Counter()
    for (parts, _), n in rounds.items():
        for part in parts:
            if part.kind == "none":
                return math.inf
            if part.kind != "smooth":
                raise Unaccountable("PRV knows the Gaussian mechanism only")
            history[part.inverse**-0.5, part.rate] += n
    if not history:
        return 0.0
    return _prv_of(tuple(sorted(history.items())), delta, error)


@lru_cache(maxsize=256)
def _prv_of(history: tuple[tuple[tuple[float, float], int], ...], delta: float, error: float) -> float:
    if len(history) > _PRV_KINDS:
        raise Unaccountable(
            f"{len(history)} different noise multipliers or rates, PRV is asked for {_PRV_KINDS} at most"
        )
    if delta < _PRV_DELTA:
        raise Unaccountable(f"delta={delta:.3g} is below the {_PRV_DELTA:g} PRV resolves")
    with optional("PRV accounting"):
        from opacus.accountants.analysis import prv

    # Opacus' default, written out because the size of its table, which is checked below, follows from it.
    delta_error = delta / 1000.0
    pairs = [prv.PoissonSubsampledGaussianPRV(rate, z) for (z, rate), _ in history]
    counts = [n for _, n in history]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # Opacus warns about the orders it sizes its table with, and takes the logarithm of 0 at rate 1.
        warnings.simplefilter("ignore")
        try:
            reach = _reach(history, error, delta_error)
            # The steps of ``PRVAccountant.get_epsilon`` from here on, by the same functions: it would find the reach,
            # which takes most of the time, once more, and allocate the table before anybody could measure it.
            mesh = float(error / np.sqrt(sum(counts) * np.log(12.0 / delta_error) / 2.0))
            points = 2.0 * reach / mesh
            if not reach <= _PRV_LOSS:
                raise Unaccountable(f"losses up to {reach:.3g} do not fit into double precision")
            if points > _PRV_POINTS:
                raise Unaccountable(f"its table would have {points:.3g} points, at most {_PRV_POINTS:.3g} are allowed")
            domain = prv.Domain.create_aligned(-reach, reach, mesh)
            losses = [
                prv.discretize(prv.TruncatedPrivacyRandomVariable(pair, domain.t_min, domain.t_max), domain)
                for pair in pairs
            ]
            composed = prv.compose_heterogeneous(dprvs=losses, num_self_compositions=counts)
            # The upper bound: a guarantee and no estimate.
            epsilon = float(composed.compute_epsilon(delta, delta_error, error)[2])
        except (RuntimeError, ValueError, OverflowError, ZeroDivisionError, MemoryError) as problem:
            raise Unaccountable(f"Opacus' PRV accountant gave up: {problem}") from problem
    if not math.isfinite(epsilon):
        raise Unaccountable(f"Opacus' PRV accountant answered {epsilon}")
    return max(0.0, epsilon)


def _reach(history: Sequence[tuple[tuple[float, float], int]], error: float, delta_error: float) -> float:
    """Return the range of losses, bit for bit the same as Opacus' ``compute_safe_domain_size``.

    Opacus evaluates every order of every mechanism twice; this function uses those that the Rényi curve has evaluated.
    """
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis import rdp

    orders = RDPAccountant.DEFAULT_ALPHAS
    curves = [(np.array([_sampled_order(rate, z, order) for order in orders]), n) for (z, rate), n in history]

    def epsilon(curve: NDArray[np.float64], delta: float) -> float:
        return float(rdp.get_privacy_spent(orders=orders, rdp=curve, delta=delta)[0])

    together = epsilon(sum((curve * n for curve, n in curves), np.zeros(len(orders))), delta_error / 4)
    alone = delta_error / (8 * sum(n for _, n in curves))
    return max(together, *(epsilon(curve, alone) for curve, _ in curves), error) + 3.0


# The one everybody calls.


def compose(events: Iterable[Event | Sequence[Event]], delta: float, *, cap: int = 0) -> Cost:
    """Return the total cost of several rounds, by the tightest valid accountant.

    Parameters
    ----------
    events : iterable of Event, or of sequences of them
        Items are rounds. The events of one round are on the same units: where these are sampled, they were drawn once.
    delta : float
        Of the whole guarantee; the failure probabilities of the events are taken off it.
    cap : int
        Largest number of rounds that any unit was in (0: all of them). The most expensive ones are charged.

    Notes
    -----
    ==================================================  ===========================================================
    events                                              accountant
    ==================================================  ===========================================================
    Gaussian, continuous or on a fine grid, rate 1      the exact curve at mu = sqrt(sum of releases / z^2)
    the same, some with rate < 1                        PRV, and RDP beside it; PRV must not be above RDP
    integer noise below 10 grid steps, Skellam          RDP without amplification: no curve of the sampled one is known
    ==================================================  ===========================================================

    Rates below 1 are right for ``zero_out`` and ``add_remove`` only; :class:`fedcomp.privacy.sampling.Sampling` refuses
    them elsewhere.

    Examples
    --------
    >>> cost = compose([Event("gaussian", noise_multiplier=2.0)] * 3, 1e-5)
    >>> round(cost.epsilon, 2), cost.accountant
    (3.71, 'Gaussian, closed form')
    """
    rounds = _rounds(events)
    return compose_rounds(rounds, delta, cap=cap)


def compose_rounds(rounds: Rounds, delta: float, *, cap: int = 0) -> Cost:
    """As :func:`compose`, for rounds that are counted already: how often each :func:`profile` occurs."""
    check_delta(delta)
    params.integer("cap", cap, low=0)
    left = _left(rounds, delta, cap)
    parts = [part for (group, _), n in rounds.items() if n for part in group]
    sampled = any(part.rate < 1.0 for part in parts)
    # Amplification needs independent draws, and a cap makes a draw depend on the earlier ones.
    if sampled and cap:
        raise ConfigError(
            "a participation cap and Poisson sampling are two different promises; account for one of them"
        )
    if not parts:
        return Cost(0.0, delta, "nothing was released")
    if any(part.kind == "none" for part in parts):
        return Cost(math.inf, delta, "none: a sum was released without noise")
    # Not a delta of 0 for the accountants: failures that use up the whole delta leave no guarantee to state.
    if left <= 0.0:
        return Cost(math.inf, delta, f"none: the failure probabilities of the events use up delta={delta:g}")
    if all(part.kind == "smooth" for part in parts):
        if not sampled:
            return Cost(gaussian_epsilon(total_mu(rounds, cap), left), delta, "Gaussian, closed form")
        return _sampled(rounds, delta, left)
    epsilon, order = _convert(_rdp_total(rounds, cap), left)
    kinds = {part.kind for part in parts}
    name = "zCDP" if kinds <= {"smooth", "coarse"} and not sampled else "RDP"
    if "skellam" in kinds:
        name += ", Skellam's curve"
    return Cost(epsilon, delta, name, order=order)


def _sampled(rounds: Rounds, delta: float, left: float) -> Cost:
    """Return the cost of sampled Gaussians: the tightest of the three bounds PRV, RDP and no amplification."""
    with optional("accounting of sampled rounds"):
        import opacus

    version = f"Opacus {opacus.__version__}"
    rdp, order = _convert(_rdp_total(rounds, 0), left)
    plain = gaussian_epsilon(total_mu(rounds, 0), left)
    why = ""
    found: list[Cost] = []
    try:
        prv = _prv(rounds, left, PRV_ERROR)
    except Unaccountable as problem:
        why = f"; no PRV: {problem}"
    else:
        # Its upper end lies up to twice the error above the truth, and the others cannot lie below the truth.
        if prv > min(rdp, plain) + 2.5 * PRV_ERROR:
            raise PrivacyError(
                f"two accountants contradict each other: PRV says epsilon={prv:.6g} with an error of {PRV_ERROR:g}, "
                f"{min(rdp, plain):.6g} was proven without it; neither is reported. A bug, here or in {version}"
            )
        found = [Cost(prv, delta, f"PRV ({version})", error=PRV_ERROR)]
    found += [
        Cost(rdp, delta, f"RDP ({version}){why or ', tighter than PRV with its error'}", order=order),
        Cost(plain, delta, f"Gaussian, closed form, no amplification: nothing tighter was found{why}"),
    ]
    return min(found, key=lambda cost: cost.epsilon)


def total_mu(rounds: Rounds, cap: int) -> float:
    """Return sqrt(sum of releases / z^2) over all rounds, or over the ``cap`` dearest."""
    return math.sqrt(_largest(((math.fsum(p.inverse for p in parts), n) for (parts, _), n in rounds.items()), cap))


def failures(rounds: Rounds, cap: int) -> float:
    """Return the failure probability of the events any one unit can be in."""
    return _largest(((delta, n) for (_, delta), n in rounds.items()), cap)


def _largest(values: Iterable[tuple[float, int]], cap: int) -> float:
    """Return the sum of the ``cap`` largest values (0: of all); each value comes with its count."""
    total, room = 0.0, cap or math.inf
    for value, count in sorted(values, reverse=True):
        taken = min(count, room)
        if taken <= 0:
            break
        total += value * taken
        room -= taken
    return total


def upper_bound(rounds: Rounds, delta: float, *, cap: int = 0) -> float:
    """Return a quick upper bound of :func:`compose_rounds`: equal to it without sampling, RDP's with it."""
    if not any(part.rate < 1.0 for parts, _ in rounds for part in parts):
        return compose_rounds(rounds, delta, cap=cap).epsilon
    # Not ``cap``: a cap and sampling together are refused.
    left = _left(rounds, delta, 0)
    return _convert(_rdp_total(rounds, 0), left)[0] if left > 0.0 else math.inf


def _left(rounds: Rounds, delta: float, cap: int) -> float:
    """Return ``delta`` minus the parts for failures and for the lattice of integer noise; 0 or less if nothing remains.

    Rényi curves hold for integers directly (Canonne et al. 2020, recalled), so if only they are used, nothing is
    subtracted for the lattice.
    """
    left = delta - failures(rounds, cap)
    grid = grid_of(rounds)
    return lattice_delta(total_mu(rounds, cap), left, grid) if left > 0.0 else left


def grid_of(rounds: Rounds) -> float:
    """Return the smallest grid sigma that is accounted as continuous, infinite where none is."""
    parts = [part for (group, _), n in rounds.items() if n for part in group]
    return min((part.grid for part in parts), default=math.inf) if all(p.kind == "smooth" for p in parts) else math.inf


# Planning.


def noise_multiplier_for(
    epsilon: float,
    delta: float,
    *,
    releases: int,
    rate: float = 1.0,
    cap: int = 0,
    grid_sigma: float = FINE,
) -> float:
    """Return the smallest noise multiplier that keeps ``releases`` within (epsilon, delta), on the safe side.

    With sampling it is at most 1e-4 of itself larger than necessary; without, the last bits are right.

    Parameters
    ----------
    releases : int
        Each of them a round of its own: at ``rate < 1`` each redraws who takes part.
    rate : float
        Poisson sampling probability.
    cap : int
        Releases any one unit is in, at most (0: all).
    grid_sigma : float
        Standard deviation of the noise in grid steps, at least. Default: the least that is accounted as continuous, so
        that the plan keeps a budget whichever mechanism it is used for; infinite for continuous noise.

    Raises
    ------
    ConfigError
        When epsilon or delta are out of range; an infinite epsilon needs no plan.

    Examples
    --------
    >>> z = noise_multiplier_for(1.0, 1e-5, releases=100)
    >>> round(z, 2), releases_for(1.0, 1e-5, z)
    (37.36, 100)
    """
    params.positive("epsilon", epsilon)
    check_delta(delta)
    count = params.integer("releases", releases, low=1)
    charged = min(count, params.integer("cap", cap, low=1)) if cap else count
    before, mu = math.inf, gaussian_mu(epsilon, delta)
    while abs(before - mu) > 1e-14 * mu:  # what is taken off delta depends on mu, a little
        before, mu = mu, gaussian_mu(epsilon, lattice_delta(mu, delta, grid_sigma))
    plain = math.sqrt(charged) / mu

    def fits(z: float) -> bool:
        rounds = {profile(_planned(z, rate, grid_sigma)): count}
        # The quick bound first; the slow accountant is asked only where it decides.
        quick = upper_bound(rounds, delta, cap=cap) <= epsilon
        return quick or compose_rounds(rounds, delta, cap=cap).epsilon <= epsilon

    while not fits(plain):
        plain = math.nextafter(plain, math.inf)  # the division and the root rounded down
    if rate == 1.0:
        return plain
    low, high = plain, plain
    # Sampling only lowers the cost, so the answer is not above the noise without it: halve until that is too little.
    while low > 1e-3 and fits(low):
        low, high = low / 2.0, low
    while high / low > 1.0 + 1e-4:
        # The geometric mean, since what is tolerated is a fraction.
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _planned(noise_multiplier: float, rate: float, grid_sigma: float) -> Event:
    noise = "gaussian" if grid_sigma == math.inf else "discrete_gaussian"
    return Event(noise, noise_multiplier, grid_sigma=grid_sigma, rate=rate)


def releases_for(
    epsilon: float, delta: float, noise_multiplier: float, *, rate: float = 1.0, grid_sigma: float = FINE
) -> int:
    """Return how many releases of one unit fit into (epsilon, delta); 0 when not even one does.

    Under a participation cap this is the largest cap that can be afforded. ``grid_sigma`` and errors as in
    :func:`noise_multiplier_for`.
    """
    params.positive("epsilon", epsilon)
    check_delta(delta)
    if noise_multiplier == 0.0:
        return 0
    one = profile(_planned(noise_multiplier, rate, grid_sigma))

    def fits(count: int) -> bool:
        rounds = {one: count}
        return upper_bound(rounds, delta) <= epsilon or compose_rounds(rounds, delta).epsilon <= epsilon

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _prepare(events: Iterable[Event | Sequence[Event]], delta: float) -> tuple[Counter[Profile], float]:
    check_delta(delta)
    rounds = _rounds(events)
    return rounds, delta - failures(rounds, 0)
