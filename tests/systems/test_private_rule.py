"""The rule of private rounds on the driver in memory: what is asked, drawn, bounded, booked and released, in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from private_runs import federation, inner
from toy import model, stack, update

from fedcomp.clients.compressed import compression
from fedcomp.codecs import QSGD, Codec, ErrorFeedback, Identity, RandomK, TopK
from fedcomp.flower.rounds import fit
from fedcomp.layout import NONE_DENSE, Layout, Vector
from fedcomp.local import Local
from fedcomp.privacy.adaptive import AdaptiveClip
from fedcomp.privacy.errors import BudgetExceeded
from fedcomp.privacy.sampling import Sampling
from fedcomp.privacy.votes import TopkSign
from fedcomp.program import Given, Now, Step, System
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.lsg import Lsg
from fedcomp.strategies.private.topagg import topagg
from fedcomp.systems.pair import Pair
from fedcomp.systems.private.ballots import Ballots
from fedcomp.systems.private.clipped import Clipped
from fedcomp.systems.private.lsg import KeptCoordinates, LowRank
from fedcomp.systems.private.rule import Private

NODES, ROUNDS, SEED = 4, 3, 7
PROMISE: dict[str, Any] = {
    "noise_multiplier": 1.0,
    "population": NODES,
    "delta": 1e-3,
    "insecure_deterministic": True,
    "seed": SEED,
}
BALLOT = TopkSign(k=50)
LOW = LowRank(clip=2000.0, rank=3, keep=0.5, mask="noisy_magnitude")


def layout(pair: bool = True) -> Layout:
    return Layout.of({name: array.numpy() for name, array in model().items()}, NONE_DENSE if pair else None)


def learnt(number: int, node: int, start: Vector) -> Vector:
    parts = [update(number, node, t.shape, i).reshape(-1) for i, t in enumerate(layout().tensors)]
    return start + np.concatenate(parts)


def driver(system: System, rule: Private) -> Local:
    laid = layout(isinstance(system, Pair))
    return Local(system, laid, np.zeros(laid.size, np.float32), learnt, lambda node: 1.0, NODES, SEED, rule)


def play(local: Local, number: int, nodes: Sequence[int] = range(NODES)) -> Step | None:
    """Play a round as a driver of private rounds does: who is drawn is asked, and nobody else."""
    rule, system = local.rule, local.system
    assert isinstance(rule, Private)
    released = local.layout
    if isinstance(system, LowRank):
        released = system.released(local.layout, number)
    elif (support := system.codecs[0].common_support(local.layout, _key(local, number))) is not None:
        released = Layout.flat(support.size)
    chosen, reason = rule.draw(lambda: list(nodes), released, number)
    if reason:
        return None
    rule.open(number, chosen)
    return local.step(number, chosen)


def _key(local: Local, number: int) -> Any:
    return Now(number, (), local.layout, lambda: local.model, local.seed).key("uplink")


PAIRS: dict[str, tuple[Any, Any, Any]] = {
    "clipped, memory": (
        ErrorFeedback(TopK(0.05)),
        lambda: Clipped(clip=5.0, **PROMISE),
        lambda codec: Compressed(DpFedAvg(inner(), clip=5.0, **PROMISE), codec, seed=SEED),
    ),
    "clipped, whole models": (
        Identity(),
        lambda: Clipped(clip=5.0, **PROMISE),
        lambda codec: Compressed(DpFedAvg(inner(), clip=5.0, **PROMISE), codec, seed=SEED),
    ),
    "clipped, shared support": (
        RandomK(0.1),
        lambda: Clipped(clip=5.0, **PROMISE),
        lambda codec: Compressed(DpFedAvg(inner(), clip=5.0, **PROMISE), codec, feedback=False, seed=SEED),
    ),
    "adaptive": (
        QSGD(levels=7),
        lambda: Clipped(clip=AdaptiveClip(initial=5.0, count_noise=3.0), **PROMISE),
        lambda codec: Compressed(
            DpFedAvg(inner(), clip=AdaptiveClip(initial=5.0, count_noise=3.0), **PROMISE), codec, seed=SEED
        ),
    ),
    "votes": (
        BALLOT,
        lambda: Ballots(BALLOT, server_lr=0.25, **PROMISE),
        lambda codec: topagg(inner(), BALLOT, server_lr=0.25, **PROMISE),
    ),
    "low rank": (LOW, lambda: KeptCoordinates(LOW, **PROMISE), lambda codec: Lsg(inner(), LOW, **PROMISE)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_in_memory_and_over_messages_the_same_is_released_and_paid(name: str) -> None:
    codec, rule_of, strategy_of = PAIRS[name]
    rule, strategy = rule_of(), strategy_of(codec)
    local = driver(Pair(codec) if isinstance(codec, Codec) else codec, rule)
    for number in range(1, ROUNDS + 1):
        assert play(local, number) is not None
    result = fit(strategy, federation([compression()], NODES), model(), ROUNDS, timeout=9)
    private = getattr(strategy, "inner", strategy)
    private = private if isinstance(private, Private) else strategy
    np.testing.assert_array_equal(local.model.astype(np.float64), stack(result.arrays))
    assert [(e.round, e.event) for e in rule.privacy.entries] == [(e.round, e.event) for e in private.privacy.entries]
    assert replace(rule.statement(), run="") == replace(private.statement(), run="")


def test_nobody_is_counted_before_the_budget_was_asked_and_nobody_is_drawn_beyond_it() -> None:
    local = driver(Pair(TopK(0.05)), Clipped(clip=5.0, **PROMISE, budget=6.0))
    rule = local.rule
    assert isinstance(rule, Private)
    made = [number for number in range(1, 9) if play(local, number) is not None]
    assert 0 < len(made) < 8
    assert rule.privacy.epsilon() <= 6.0
    chosen, reason = rule.draw(lambda: pytest.fail("somebody was counted"), local.layout, 9)
    assert (chosen, "budget" in reason) == ([], True)


def test_a_round_that_is_made_again_is_asked_for_as_what_it_will_be_booked_as() -> None:
    """A strategy that is used again counts its rounds from 1: their units are redrawn, and cost as others do."""
    rate = {**PROMISE, "population": 900, "sampling": Sampling("poisson", rate=0.1)}
    rule, laid = Clipped(clip=1.0, **rate), Layout.flat(4)
    cost = rule.event(rule.mechanism(laid, 1), 4)
    for number in (1, 2, 1, 2):
        rule.draw(lambda: list(range(9)), laid, number)
        rule.privacy.record(cost, round=number)
    spent = rule.privacy.epsilon()
    again = Clipped(clip=1.0, **rate, budget=spent)
    for number in (1, 2, 1, 2):
        assert again.draw(lambda: list(range(9)), laid, number)[1] == ""
        again.privacy.record(cost, round=number)
    assert again.draw(lambda: list(range(9)), laid, 3)[1].startswith("the budget")


def test_a_round_is_closed_before_it_is_paid_for() -> None:
    """What fails in the middle, or is totalled twice, is not released a second time."""
    local = driver(Pair(TopK(0.05)), Clipped(clip=5.0, **PROMISE, budget=6.0))
    rule = local.rule
    assert isinstance(rule, Clipped)
    now = Now(1, tuple(range(NODES)), local.layout, lambda: local.model, SEED)
    rule.draw(lambda: [0, 1], local.layout, 1)
    rule.open(1, [0, 1])
    rule.budget = rule.privacy.budget = 1e-6
    with pytest.raises(BudgetExceeded):
        rule.total(now, TopK(0.05), [])
    rule.budget = rule.privacy.budget = None
    assert rule.total(now, TopK(0.05), []) is None
    assert not rule.privacy.entries


def test_who_was_not_drawn_is_refused_and_units_are_charged() -> None:
    refused: dict[int, str] = {}
    rule = Clipped(clip=5.0, **PROMISE)
    laid = Layout.flat(8)
    now = Now(1, (0, 1, 2), laid, lambda: np.zeros(8, np.float32), refuse=refused.__setitem__)
    rule.draw(lambda: [10, 11], laid, 1)
    rule.open(1, [10, 11])
    given = [Given(node, 1.0, b"", np.ones(8, np.float32)) for node in (0, 1, 2)]
    assert rule.total(now, TopK(0.5), given, unit=lambda node: node + 10).consumed == (0, 1)
    assert "not asked" in refused[2]
    assert set(rule.privacy.participations) == {10, 11}


def test_one_place_releases_sums() -> None:
    """Wherever else a sum was made and released, the order of bounds, books and noise would be kept by hand."""
    root = Path(__file__).resolve().parents[2]
    files = [path for folder in ("fedcomp", "strategies", "clients") for path in (root / folder).rglob("*.py")]
    makes = {path.relative_to(root).as_posix() for path in files if re.search(r"\bPrivateSum\(", path.read_text())}
    assert makes == {"fedcomp/systems/private/rule.py"}


class Unit(int):
    """A client's number that counts how often it is compared with another."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Unit.compared += 1
        return int(self) == other


def test_a_round_compares_no_client_with_all_others() -> None:
    clients, flat = 300, Layout.flat(2)
    rule = Clipped(clip=1.0, **PROMISE | {"population": clients})
    chosen, _ = rule.draw(lambda: [Unit(n) for n in range(clients)], flat, 1)
    rule.open(1, chosen)
    Unit.compared = 0
    given = ((n, Unit(n), lambda: np.ones(2, np.float32)) for n in range(clients))
    step = rule.release(1, flat, None, given, lambda node, why: pytest.fail(why))
    assert step is not None
    assert len(step.consumed) == clients
    assert Unit.compared < 20 * clients
