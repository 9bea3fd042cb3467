"""Our accountants beside Opacus' and dp-accounting's, for the same events: what each says they cost.

``python -m fedcomp.experiments.audits.accountants`` prints the table. dp-accounting is compared with where it is
installed (``pip install '.[dp]'``); without it the table says so. Every figure is worked out when the command runs.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fedcomp.privacy.accounting import compose
from fedcomp.privacy.events import Event

DELTA: Final = 1e-5

TOLERANCE: Final = 0.002
"""Differences of epsilon below this one are those of numerics."""

COLUMNS: Final = ("ours", "Opacus RDP", "Opacus PRV", "dp-accounting RDP", "dp-accounting PLD")


@dataclass(frozen=True)
class Case:
    """One event, so many times.

    ``ours`` is None where nothing here draws such noise; ``opacus`` a noise multiplier and a sampling rate, all that it
    knows of an event; ``google(dp_accounting)`` dp-accounting's event, given once for each time where ``singly``, under
    its name for the ``relation`` of neighbours. ``stays`` says why ours does although another one is tighter.
    """

    name: str
    times: int
    ours: Event | None = None
    opacus: tuple[float, float] | None = None
    google: Callable[[Any], Any] | None = None
    stays: str = ""
    singly: bool = False
    relation: str = "ADD_OR_REMOVE_ONE"


def _sampled(noise_multiplier: float, rate: float, times: int) -> Case:
    return Case(
        f"Gaussian, z = {noise_multiplier:g}, Poisson {rate:g}",
        times,
        Event("gaussian", noise_multiplier=noise_multiplier, rate=rate),
        (noise_multiplier, rate),
        lambda dp: dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise_multiplier)),
        "ours is Opacus' PRV, whose error is part of the figure; one package less",
    )


RESPONSE: Final = Case(
    "randomised response, p = 1/2 of 2",
    10,
    google=lambda dp: dp.RandomizedResponseDpEvent(0.5, 2),
    singly=True,
    relation="REPLACE_ONE",
)

CASES: Final = (
    Case(
        "Gaussian, z = 4",
        10,
        Event("gaussian", noise_multiplier=4.0),
        (4.0, 1.0),
        lambda dp: dp.GaussianDpEvent(4.0),
    ),
    Case("Gaussian on integers, z = 4", 10, Event("discrete_gaussian", noise_multiplier=4.0, grid_sigma=400.0)),
    _sampled(1.5, 0.1, 50),
    _sampled(1.0, 0.01, 1000),
    Case("Skellam, z = 4", 10, Event("skellam", noise_multiplier=4.0, grid_sigma=400.0, grid_l1=1000.0)),
    Case("Laplace, b = 2", 10, google=lambda dp: dp.LaplaceDpEvent(2.0)),
    RESPONSE,
)


@dataclass(frozen=True)
class Row:
    """What a case costs by each of :data:`COLUMNS`: epsilon at :data:`DELTA`, None of events that one does not know."""

    case: Case
    epsilons: tuple[float | None, ...]

    @property
    def verdict(self) -> str:
        """What follows for our own accountant."""
        own, *others = self.epsilons
        known = {name: found for name, found in zip(COLUMNS[1:], others, strict=True) if found is not None}
        if own is None:
            return "nothing here draws such noise"
        if not known:
            return "stays: no other one knows it"
        name, best = min(known.items(), key=lambda item: item[1])
        if best >= own - TOLERANCE:
            return f"stays: none is tighter ({name} {best - own:+.4f})"
        return f"{name} is {own - best:.3f} tighter; stays: {self.case.stays or 'TO BE REPLACED'}"


def installed() -> bool:
    """Whether dp-accounting can be compared with."""
    return importlib.util.find_spec("dp_accounting") is not None


def table(cases: Sequence[Case] = CASES) -> list[Row]:
    """Return what each case costs by each accountant."""
    with_google = installed()
    return [
        Row(case, (_ours(case), *_of_opacus(case), *(_of_google(case) if with_google else (None, None))))
        for case in cases
    ]


def counted_once() -> tuple[float | None, float | None]:
    """Return the epsilon of :data:`RESPONSE` by dp-accounting's PLD, composed by its number and one by one: the same,
    where the number is heeded."""
    return _of_google(replace(RESPONSE, singly=False))[1], _of_google(RESPONSE)[1]


def lines(rows: Sequence[Row]) -> list[str]:
    """Return the table as Markdown."""
    out = [
        f"| event, at delta {DELTA:g} | times | {' | '.join(COLUMNS)} | verdict |",
        f"|---|---|{'---|' * len(COLUMNS)}---|",
    ]
    for row in rows:
        shown = ["-" if found is None else f"{found:.4f}" for found in row.epsilons]
        out.append(f"| {row.case.name} | {row.case.times} | {' | '.join(shown)} | {row.verdict} |")
    return out


def _ours(case: Case) -> float | None:
    return None if case.ours is None else compose([case.ours] * case.times, DELTA).epsilon


def _of_opacus(case: Case) -> tuple[float | None, float | None]:
    if case.opacus is None:
        return None, None
    from opacus.accountants import PRVAccountant, RDPAccountant

    found = []
    for accountant in (RDPAccountant(), PRVAccountant()):
        accountant.history = [(*case.opacus, case.times)]
        with warnings.catch_warnings():
            # Its orders end where the figure would still fall a little.
            warnings.simplefilter("ignore")
            found.append(float(accountant.get_epsilon(DELTA)))
    return found[0], found[1]


def _of_google(case: Case) -> tuple[float | None, float | None]:
    if case.google is None:
        return None, None
    import dp_accounting
    from dp_accounting import pld, rdp

    found: list[float | None] = []
    relation = dp_accounting.NeighboringRelation[case.relation]
    for kind in (rdp.RdpAccountant, pld.PLDAccountant):
        accountant, event = kind(neighboring_relation=relation), case.google(dp_accounting)
        if not accountant.supports(event):
            found.append(None)
            continue
        # One by one where the number of times is not heeded (:func:`counted_once`).
        for _ in range(case.times if case.singly else 1):
            accountant.compose(event, 1 if case.singly else case.times)
        epsilon = float(accountant.get_epsilon(DELTA))
        found.append(epsilon if math.isfinite(epsilon) else None)
    return found[0], found[1]


def main() -> int:
    """Print the table."""
    print("\n".join(lines(table())))
    if installed():
        print("\ndp-accounting's PLD of 10 randomised responses: {:.4f}, {:.4f} one by one.".format(*counted_once()))
    else:
        print("\ndp-accounting is not installed, so that its columns are empty: pip install '.[dp]'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
