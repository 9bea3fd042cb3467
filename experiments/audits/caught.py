"""Which tier catches which mutant: every one beside its original, on the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from flwr.app import ConfigRecord

from fedcomp.experiments.audits import cases, mutants, systems
from fedcomp.experiments.audits.flower_flaws import spread_norms
from fedcomp.experiments.audits.rounds import nobody
from fedcomp.experiments.audits.subjects import Subject
from fedcomp.experiments.audits.systems import dealt_by_hash, dealt_with_a_wrap
from fedcomp.experiments.audits.tiers import Verdict, tier_a, tier_b, tier_c, tier_d, tier_f
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.logs import quiet
from fedcomp.flower.records import to_record
from fedcomp.layout import Layout
from fedcomp.privacy.adaptive import AdaptiveClip
from fedcomp.privacy.mechanism import GridGaussian, Votes
from fedcomp.strategies.private.dp_fedavg import DpFedAvg

Verdicts = Callable[[], list[Verdict]]
Both = tuple[Verdicts, Verdicts]
Check = Callable[[Subject], list[Verdict]]


@dataclass(frozen=True)
class Mutant:
    """A wrong variant and its original under the tier that must tell them apart.

    Attributes
    ----------
    name, wrong : str
        What is wrong, in a few words.
    tier : str
    original, mutated : callable
        Audit the one and the other.
    """

    name: str
    wrong: str
    tier: str
    original: Verdicts
    mutated: Verdicts


def _a(subject: Subject) -> list[Verdict]:
    return [tier_a(subject)]


def _b(subject: Subject) -> list[Verdict]:
    return tier_b(subject, runs=20)


def _c(subject: Subject) -> list[Verdict]:
    return [tier_c(subject, runs=1000)]


def _c_few(subject: Subject) -> list[Verdict]:
    # Two worlds that no noise parts need few runs: 100 show a mu of 3.2.
    return [tier_c(subject, runs=100)]


def _c_rounds(subject: Subject) -> list[Verdict]:
    # Nine rounds have three times the mu of one, which 40 runs show.
    return [tier_c(subject, runs=40, rounds=9)]


def _f(subject: Subject) -> list[Verdict]:
    return [tier_f(subject)]


def tracked(kind: type[DpFedAvg], *, start: float = 0.5, rounds: int = 60) -> list[float]:
    """Return the clip norms of a strategy without noise whose clients' updates have a median norm of 1."""
    norms = spread_norms()
    arguments = cases.promise(0.0, 0) | {"population": len(norms)}
    strategy = kind(cases.mean(), clip=AdaptiveClip(initial=start), **arguments)
    model = {"w": np.zeros(4, np.float32)}
    layout, record = Layout.of(model), to_record(model)
    rows = [np.array([norm, 0, 0, 0], np.float32) for norm in norms]
    with quiet(), InProcessGrid(nobody, len(rows)) as grid:
        for place in range(rounds):
            strategy.configure_train(place + 1, record, ConfigRecord(), grid)
            strategy.aggregate_updates(place + 1, zip(grid.get_node_ids(), rows, strict=True), layout)
    return [*strategy.clips.values(), strategy.clip]


def _tracks(kind: type[DpFedAvg]) -> Verdicts:
    def check() -> list[Verdict]:
        found = tracked(kind)[-1]
        return [Verdict("clip", kind.__name__, "60 rounds", 1.0, found, "clip norm / median", 60, 0.9 < found < 1.1)]

    return check


def _strategy(check: Check, kind: type[DpFedAvg], **how: Any) -> Both:
    """Return the audits of DP-FedAvg and of a variant, on the same data."""
    return lambda: check(cases.dp_fedavg(**how)), lambda: check(cases.dp_fedavg(kind=kind, **how))


def _votes(check: Check, kind: type[Votes], **how: Any) -> Both:
    return lambda: check(cases.votes_sum(**how)), lambda: check(cases.votes_sum(kind=kind, **how))


def _grid(check: Check, kind: type[GridGaussian], **how: Any) -> Both:
    return lambda: check(cases.grid_sum(**how)), lambda: check(cases.grid_sum(kind=kind, **how))


def _held(deal: Callable[[Any, int], list[Any]]) -> Verdicts:
    """Audit DataLens in the worlds that one record of this deal parts."""
    return lambda: _a(systems.lessons(3, changed=systems.holders(deal)))


class Silent(Votes):
    """Draws no noise and claims it."""

    def perturb(self, total: Any, entropy: Any) -> Any:
        """Return the sum."""
        return total * self.step


def whole_run(kind: str, canaries: int, guesses: int, *, z: float = 2.0, seed: int = 0) -> Verdict:
    """Audit one run of a sum with as many canaries, every one a coordinate of its own.

    Parameters
    ----------
    kind : {"votes", "clipped vectors", "no noise"}
    """
    if kind == "clipped vectors":
        subject, rows = cases.grid_sum(z=z, width=canaries), cases.CLIP * np.eye(canaries)
    else:
        variant = Silent if kind == "no noise" else Votes
        subject, rows = cases.votes_sum(z=z, width=canaries, k=1, kind=variant), np.eye(canaries)
    dtype = float if kind == "clipped vectors" else np.int8
    return tier_d(subject, [(100 + i, row.astype(dtype)) for i, row in enumerate(rows)], guesses=guesses, seed=seed)


def _memory() -> Both:
    return (
        lambda: _a(cases.dp_fedavg(canary=mutants.remembered())),
        lambda: _a(cases.dp_fedavg(kind=mutants.NoClipStrategy, canary=mutants.remembered())),
    )


def _mutants() -> Iterator[Mutant]:
    replies, batch = {"messages": True}, {"rows": 4, "width": 60, "k": 6}
    table: tuple[tuple[str, str, str, Both], ...] = (
        ("no clip", "updates are summed as they come", "A", _strategy(_a, mutants.NoClipStrategy)),
        ("clip per tensor", "every tensor clipped to C, not the update", "A", _strategy(_a, mutants.ClipPerTensor)),
        ("clip before memory", "clipped, then error feedback adds what was not sent", "A", _memory()),
        (
            "noise on the mean",
            "noise for those expected, mean over those that came",
            "A",
            _strategy(_a, mutants.NoiseOnMean),
        ),
        (
            "noise per client",
            "clients add the noise, and it is averaged away",
            "B",
            _strategy(_b, mutants.NoisePerClientStrategy),
        ),
        (
            "noise in integers",
            "noise of buffers cast to integers",
            "B",
            _strategy(_b, mutants.NoiseCastToIntegers, **replies),
        ),
        (
            "weights",
            "clipped updates weighted by num-examples",
            "A",
            _strategy(_a, mutants.WeightedByExamples, **replies),
        ),
        (
            "C for 2C",
            "replace adjacency with the sensitivity of zero_out",
            "C",
            _grid(_c, mutants.OnlyC, adjacency="replace"),
        ),
        ("no root of k", "noise of z, not of z sqrt(k)", "C", _votes(_c, mutants.ForgotRootK)),
        ("event per batch", "one event for a batch of images", "C", _votes(_c, mutants.OneEventPerBatch, **batch)),
        ("accountant reset", "a new accountant in every round", "C", _strategy(_c_rounds, mutants.ForgetfulAccountant)),
        (
            "private support",
            "top-k of the exact sum, noise on those alone",
            "B",
            _strategy(_b, mutants.PrivateSupportStrategy),
        ),
        ("same seed", "the same noise in every round", "F", _strategy(_f, mutants.SameSeed)),
        ("metric leak", "the exact mean loss is released", "C", _strategy(_c_few, mutants.MetricLeak, **replies)),
        (
            "Flower's sign",
            'the bit "was clipped" in the rule for "was within"',
            "clip",
            (_tracks(DpFedAvg), _tracks(mutants.FlowersSign)),
        ),
        (
            "uncentred bits",
            "norm bits counted around 0, noise for 1/2",
            "A",
            (lambda: _a(cases.adaptive()), lambda: _a(cases.adaptive(kind=mutants.UncentredBits))),
        ),
        (
            "separate clips",
            "both low-rank products clipped to C, not together",
            "A",
            (lambda: _a(systems.lsg(keep=1.0)), lambda: _a(systems.lsg(kind=systems.SeparateClips, keep=1.0))),
        ),
        (
            "private support, low rank",
            "largest of the exact low-rank sum, noise on those alone",
            "B",
            (lambda: _b(systems.lsg()), lambda: _b(systems.lsg(kind=systems.PrivateSupportOfLsg))),
        ),
        ("record twice", "one record in two teachers", "A", (_held(dealt_by_hash), _held(dealt_with_a_wrap))),
    )
    for name, wrong, tier, (original, mutated) in table:
        yield Mutant(name, wrong, tier, original, mutated)


MUTANTS: Final = {mutant.name: mutant for mutant in _mutants()}
