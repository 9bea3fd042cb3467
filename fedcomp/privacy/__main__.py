"""``python -m fedcomp.privacy``: the cost of releases by every accountant, and the noise that a budget needs.

``table`` prints the figures of ``docs/background/privacy.md``; ``plan`` answers "how much noise, how many
rounds".
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fedcomp import params
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.privacy.accounting import (
    Cost,
    Unaccountable,
    classical_epsilon,
    compose,
    compose_rounds,
    gaussian_epsilon,
    noise_multiplier_for,
    profile,
    prv_epsilon,
    rdp_epsilon,
    releases_for,
)
from fedcomp.privacy.events import ADJACENCIES, FINE, Event
from fedcomp.privacy.ledger import check_population
from fedcomp.privacy.sampling import Sampling

DELTA: Final = 1e-5

DATALENS: Final = (
    ("MNIST, F-MNIST, epsilon 1", 200, 5000, 1290),
    ("CelebA-Gender, epsilon 1", 700, 9000, 1188),
    ("CelebA-Hair, epsilon 1", 700, 9000, 1200),
    ("MNIST, epsilon 10", 300, 800, 1635),
    ("F-MNIST, epsilon 10", 350, 1000, 2190),
    ("CelebA-Gender, epsilon 10", 500, 700, 729),
    ("CelebA-Hair, epsilon 10", 500, 700, 750),
)
"""Settings of DataLens' released code (read): votes k, noise on the sum of votes, releases until its rule stops it."""

SAMPLED: Final = ((0.01, 1.0, 1000), (0.1, 1.0, 100), (0.1, 2.0, 100), (0.5, 2.0, 50))
"""Rate, noise multiplier, rounds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fedcomp.privacy", description="What releases cost, and how much noise a budget needs."
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("table", help="print the figures of docs/background/privacy.md (default)")
    plan = commands.add_parser("plan", help="how much noise for how many rounds")
    plan.add_argument("--epsilon", type=float, help="budget; or give --noise-multiplier to learn what it costs")
    plan.add_argument("--delta", type=float, default=DELTA, help="default %(default)g")
    plan.add_argument("--releases", type=int, help="rounds; or give both others to learn how many there may be")
    plan.add_argument("--noise-multiplier", type=float, help="standard deviation of the noise over the sensitivity")
    plan.add_argument("--rate", type=float, default=1.0, help="Poisson sampling probability, default 1: no sampling")
    plan.add_argument("--cap", type=int, default=0, help="rounds one unit takes part in, at most; 0: all")
    plan.add_argument("--population", type=int, default=0, help="number of units; delta must be below one over it")
    plan.add_argument("--adjacency", choices=ADJACENCIES, default="zero_out")
    plan.add_argument("--bound", type=float, default=1.0, help="L2 bound of one contribution, default 1")
    args = parser.parse_args(argv)
    try:
        lines = planned(args) if args.command == "plan" else tables()
        for line in lines:
            print(line)
    # What was asked for cannot be had: one line, no traceback.
    except FedcompError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def planned(args: argparse.Namespace) -> Iterator[str]:
    """Yield the answer to ``plan``: the one of budget, rounds and noise that was left out, and what it comes to."""
    epsilon, delta, z, releases = args.epsilon, args.delta, args.noise_multiplier, args.releases
    if sum(value is None for value in (epsilon, z, releases)) != 1:
        raise ConfigError("give two of --epsilon, --noise-multiplier and --releases; the third is computed")
    if args.cap:
        # The rate is handed on to be refused: a cap and Poisson sampling are two promises.
        sampling = Sampling("capped", rate=args.rate, cap=args.cap)
    else:
        sampling = Sampling("poisson", rate=args.rate) if args.rate != 1.0 else Sampling("everyone")
    sampling.check(args.adjacency)
    if args.population:
        check_population(delta, args.population)
    params.positive("bound", args.bound)
    rate = sampling.event_rate
    if z is None:
        z = noise_multiplier_for(epsilon, delta, releases=releases, rate=rate, cap=args.cap)
    elif releases is None:
        releases = releases_for(epsilon, delta, z, rate=rate)
        # No unit is in more rounds than the cap, however many there are.
        if args.cap and releases >= args.cap:
            yield f"any number of rounds: {args.cap} of each unit are within the budget, which would allow {releases}"
            releases = args.cap
        elif releases == 0:
            least = _up(noise_multiplier_for(epsilon, delta, releases=1, rate=rate))
            raise ConfigError(
                f"not one release of noise multiplier {z:g} fits into epsilon={epsilon:g}; add noise: {least} or more"
            )
    cost = _cost(z, rate, releases, delta, args.cap)
    plain = _cost(z, 1.0, releases, delta, 0)
    sensitivity = args.bound * (2.0 if args.adjacency == "replace" else 1.0)
    yield f"noise multiplier {_up(z)}: standard deviation {_up(z * sensitivity)} on a sum of contributions of norm"
    yield f"  at most {args.bound:g}, of which one moves the sum by at most {sensitivity:g} ({args.adjacency})"
    yield f"releases {releases}; {sampling.describe('unit')}"
    yield f"epsilon {_up(cost.epsilon)} at delta {delta:g} for integer noise of {FINE:g} grid steps ({cost.accountant})"
    yield f"had every unit been in every release: epsilon {_up(plain.epsilon)} ({plain.accountant})"


def tables() -> Iterator[str]:
    """Yield the tables, line by line."""
    yield f"DataLens' released settings, replacing one record of one teacher, delta {DELTA:g}"
    yield from _rows(
        ("setting", "z", "releases", "classical", "RDP", "PRV", "exact"),
        [
            (
                name,
                f"{_z(k, sigma):.2f}",
                str(n),
                *(_figure(f, Event("gaussian", _z(k, sigma), releases=n)) for f in ALL),
            )
            for name, k, sigma, n in DATALENS
        ],
    )
    yield ""
    yield "the same, for a record that two teachers hold: half the noise multiplier"
    yield from _rows(
        ("setting", "exact"),
        [
            (name, _figure(_exact, Event("gaussian", _z(k, sigma) / 2.0, releases=n)))
            for name, k, sigma, n in (DATALENS[0], DATALENS[3])
        ],
    )
    yield ""
    yield f"sampling and adjacency, delta {DELTA:g}"
    yield from _rows(
        ("rate", "z", "rounds", "PRV", "RDP", "asymptotic", "all", "capped", "all, replace"),
        [_sampled(rate, z, n) for rate, z, n in SAMPLED],
    )
    yield ""
    yield f"noise for one release, delta {DELTA:g}: what the textbook formula gives, and what is needed"
    yield from _rows(
        ("epsilon", "sqrt(2 ln(1.25/delta))/epsilon", "needed"),
        [
            (
                f"{epsilon:g}",
                f"{math.sqrt(2.0 * math.log(1.25 / DELTA)) / epsilon:.4f}",
                f"{noise_multiplier_for(epsilon, DELTA, releases=1, grid_sigma=math.inf):.5f}",
            )
            for epsilon in (0.5, 1.0, 10.0)
        ],
    )
    yield ""
    yield f"integer noise, z = 1, one release of norm 1 in 1000 coordinates, delta {DELTA:g}"
    yield from _rows(("grid steps", "Gaussian", "Skellam"), [_integer(sigma) for sigma in (1.0, FINE, 100.0, 1e4)])


def _sampled(rate: float, z: float, rounds: int) -> tuple[str, ...]:
    here = [Event("gaussian", z, rate=rate)] * rounds
    everywhere = profile(Event("gaussian", z))
    return (
        f"{rate:g}",
        f"{z:g}",
        str(rounds),
        _figure(prv_epsilon, here),
        _figure(rdp_epsilon, here),
        f"{asymptotic_epsilon(rate, z, rounds):.3f}",
        f"{compose_rounds({everywhere: rounds}, DELTA).epsilon:.2f}",
        f"{compose_rounds({everywhere: rounds}, DELTA, cap=round(rate * rounds)).epsilon:.2f}",
        f"{compose_rounds({profile(Event('gaussian', z / 2.0)): rounds}, DELTA).epsilon:.2f}",
    )


def asymptotic_epsilon(rate: float, noise_multiplier: float, rounds: int) -> float:
    """Return what the central-limit formula for sampled Gaussians says (Bu et al. 2020, recalled). It is not a bound.

    Opacus has it as ``gdp``. It is here to be compared with, and used for nothing.
    """
    mu = rate * math.sqrt(rounds * math.expm1(noise_multiplier**-2))
    return gaussian_epsilon(mu, DELTA)


def _integer(sigma: float) -> tuple[str, ...]:
    steps = min(math.sqrt(1000.0) * sigma, sigma**2)  # whole numbers: their L1 norm is at most the squared L2 norm
    return (
        f"{sigma:g}",
        f"{compose([Event('discrete_gaussian', 1.0, grid_sigma=sigma)], DELTA).epsilon:.3f}",
        f"{compose([Event('skellam', 1.0, grid_sigma=sigma, grid_l1=steps)], DELTA).epsilon:.3f}",
    )


def _cost(z: float, rate: float, releases: int, delta: float, cap: int) -> Cost:
    # On the coarsest grid that is accounted as continuous: the plan then holds on any finer one.
    event = Event("discrete_gaussian", z, grid_sigma=FINE, rate=rate)
    return compose_rounds({profile(event): releases}, delta, cap=cap)


def _up(value: float) -> str:
    """Return six digits, rounded up, because less noise than planned would exceed the budget."""
    if not 0.0 < value < math.inf:
        return f"{value:.6g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 5)
    return f"{math.ceil(value / unit) * unit:.6g}"


def _exact(events: Sequence[Event], delta: float) -> float:
    return compose(events, delta).epsilon


ALL: Final = (classical_epsilon, rdp_epsilon, prv_epsilon, _exact)


def _figure(accountant: Callable[..., float], events: Event | Sequence[Event]) -> str:
    try:
        return f"{accountant([events] if isinstance(events, Event) else events, DELTA):.4f}"
    except Unaccountable:
        return "-"


def _z(k: int, sigma: float) -> float:
    # One teacher that votes otherwise in every place moves a sum by 2 sqrt(k).
    return sigma / (2.0 * math.sqrt(k))


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        first, *others = (
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  " + "  ".join([first, *others])


if __name__ == "__main__":
    sys.exit(main())
