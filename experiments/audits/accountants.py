"""A comparison of our accountants with Opacus and dp-accounting on the same events.

``python -m fedcomp.experiments.audits.accountants`` prints the table. If dp-accounting is installed (``pip install
'.[dp]'``), it is in the comparison; otherwise the table says so. Every figure is computed when the command runs.
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
"""Differences of epsilon below this one are numerical."""

Costs = tuple[float | None, ...]
"""Epsilons at :data:`DELTA`; None for events that an accountant does not support."""

COLUMNS: Final = ("ours", "Opacus RDP", "Opacus PRV", "dp-accounting RDP", "dp-accounting PLD")


@dataclass(frozen=True)
class Case:
    """One event, composed ``times`` times.

    ``ours`` is None if nothing here draws such noise. ``opacus`` is a noise multiplier and a sampling rate, its whole
    description of an event. ``google(dp_accounting)`` is dp-accounting's event, passed once for each time if
    ``singly``, with its name for the ``relation`` of neighbours. ``stays`` is the reason to keep our accountant
    although another one is tighter.
    """

    name: str
    times: int
    ours: Event | None = None
    opacus: tuple[float, float] | None = None
    google: Callable[[Any], Any] | None = None
    stays: str = ""
    singly: bool = False
    relation: str = "ADD_OR_REMOVE_ONE"

    def verdict(self, epsilons: Costs) -> str:
        """Return the verdict on our own accountant from the costs by each of :data:`COLUMNS`."""
        own, *others = epsilons
        known = {name: found for name, found in zip(COLUMNS[1:], others, strict=True) if found is not None}
        if own is None:
            return "nothing here draws such noise"
        if not known:
            return "stays: no other one knows it"
        name, best = min(known.items(), key=lambda item: item[1])
        if best >= own - TOLERANCE:
            return f"stays: none is tighter ({name} {best - own:+.4f})"
        return f"{name} is {own - best:.3f} tighter; stays: {self.stays or 'TO BE REPLACED'}"

    def costs(self) -> Costs:
        """Return the cost by each of :data:`COLUMNS`."""
        own = None if self.ours is None else compose([self.ours] * self.times, DELTA).epsilon
        return (own, *self._by_opacus(), *(self.by_google() if installed() else (None, None)))

    def _by_opacus(self) -> Costs:
        if self.opacus is None:
            return None, None
        from opacus.accountants import PRVAccountant, RDPAccountant

        found = []
        for accountant in (RDPAccountant(), PRVAccountant()):
            accountant.history = [(*self.opacus, self.times)]
            with warnings.catch_warnings():
                # Its orders end before the minimum of the figure.
                warnings.simplefilter("ignore")
                found.append(float(accountant.get_epsilon(DELTA)))
        return tuple(found)

    def by_google(self) -> Costs:
        """Return the epsilons by dp-accounting's RDP and PLD."""
        if self.google is None:
            return None, None
        import dp_accounting
        from dp_accounting import pld, rdp

        found: list[float | None] = []
        relation, event = dp_accounting.NeighboringRelation[self.relation], self.google(dp_accounting)
        for accountant in (
            rdp.RdpAccountant(neighboring_relation=relation),
            pld.PLDAccountant(neighboring_relation=relation),
        ):
            if not accountant.supports(event):
                found.append(None)
                continue
            # One by one if the number of times is ignored (:data:`RESPONSE`).
            for _ in range(self.times if self.singly else 1):
                accountant.compose(event, 1 if self.singly else self.times)
            epsilon = float(accountant.get_epsilon(DELTA))
            found.append(epsilon if math.isfinite(epsilon) else None)
        return tuple(found)


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


def installed() -> bool:
    """Whether dp-accounting is available for the comparison."""
    return importlib.util.find_spec("dp_accounting") is not None


def main(cases: Sequence[Case] = CASES) -> int:
    """Print the table as Markdown."""
    print(f"| event, at delta {DELTA:g} | times | {' | '.join(COLUMNS)} | verdict |")
    print(f"|---|---|{'---|' * len(COLUMNS)}---|")
    for case in cases:
        costs = case.costs()
        shown = ["-" if found is None else f"{found:.4f}" for found in costs]
        print(f"| {case.name} | {case.times} | {' | '.join(shown)} | {case.verdict(costs)} |")
    if installed():
        by_number, singly = (replace(RESPONSE, singly=way).by_google()[1] for way in (False, True))
        print(f"\ndp-accounting's PLD of 10 randomised responses: {by_number:.4f}, {singly:.4f} one by one.")
    else:
        print("\ndp-accounting is not installed, so its columns are empty: pip install '.[dp]'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
