"""Who takes part: caps that hold, draws that are independent, and claims that are refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.privacy.accounting import compose
from fedcomp.privacy.entropy import Entropy, make_entropy
from fedcomp.privacy.events import Adjacency, Event
from fedcomp.privacy.gaussian import gaussian_epsilon
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.mechanism import GridGaussian
from fedcomp.privacy.sampling import Sampling
from fedcomp.rng import Key

NODES = [2**62 + 5 * n for n in range(400)]


def make(sampling: Sampling) -> PrivacyLedger:
    return PrivacyLedger(delta=1e-5, population=400, adjacency="zero_out", sampling=sampling)


def seeded(seed: int) -> Entropy:
    return make_entropy(Key(seed, "sampling"), insecure_deterministic=True)


def test_everyone_is_everyone() -> None:
    sampling = Sampling("everyone")
    assert sampling.draw(NODES, make(sampling), 1, seeded(0)) == NODES
    assert sampling.expected(400) == 400.0
    assert sampling.event_rate == 1.0


@pytest.mark.slow
def test_poisson_draws_independently_with_the_rate_it_claims() -> None:
    sampling, rounds = Sampling("poisson", rate=0.3), 300
    ledger, entropy = make(sampling), seeded(1)
    drawn = np.zeros((rounds, len(NODES)))
    place = {node: i for i, node in enumerate(NODES)}
    for number in range(rounds):
        chosen = sampling.draw(NODES, ledger, number, entropy)
        assert chosen == [node for node in NODES if node in set(chosen)]
        drawn[number, [place[node] for node in chosen]] = 1.0
    total, mean, deviation = drawn.size, 0.3, (0.3 * 0.7) ** 0.5
    assert abs(drawn.mean() - mean) < 5.0 * deviation / total**0.5
    sizes = drawn.sum(axis=1)
    assert 0.7 < sizes.var() / (len(NODES) * 0.21) < 1.35, "sizes of independent draws vary"
    pairs = (drawn[:, :-1] * drawn[:, 1:]).mean()
    assert abs(pairs - 0.09) < 5.0 * (0.09 * 0.91 / total) ** 0.5 * 1.5
    assert sampling.expected(400) == pytest.approx(120.0)
    assert sampling.event_rate == 0.3


def test_poisson_never_draws_more_often_than_claimed() -> None:
    """The rate is rounded down to the grid of the draws."""

    class Words(Entropy):
        secure = False
        description = "the word just at the rate, and just below it"

        def bytes(self, count: int) -> bytes:
            edge = int(0.1 * 2**53)
            return np.array([edge << 11, (edge - 1) << 11], "<u8").tobytes()[:count]

    sampling = Sampling("poisson", rate=0.1)
    assert sampling.draw([10, 11], make(sampling), 1, Words()) == [11]


def test_an_empty_round_is_a_round() -> None:
    sampling = Sampling("poisson", rate=1e-9)
    assert sampling.draw(NODES, make(sampling), 1, seeded(2)) == []


@pytest.mark.slow
def test_a_round_that_is_drawn_twice_is_two_rounds() -> None:
    """As two events on one sample they would cost 0.009: with next to no noise two samples find twice as many units."""
    sampling = Sampling("poisson", rate=5e-4)
    ledger = PrivacyLedger(delta=9e-4, population=1000, adjacency="zero_out", sampling=sampling)
    event = Event("gaussian", 0.2, rate=5e-4)
    for _ in range(2):
        sampling.draw(NODES, ledger, 1, seeded(4))
        ledger.record(event, round=1)
    assert ledger.epsilon() == compose([event, event], 9e-4).epsilon > 0.07
    assert ledger.rounds == 2
    # Further events after one draw are on its units.
    ledger.record(event, round=1)
    assert ledger.rounds == 2


def test_a_unit_drawn_twice_in_one_round_was_in_two() -> None:
    sampling = Sampling("capped", cap=2)
    ledger, entropy = make(sampling), seeded(5)
    for _ in range(2):
        assert sampling.draw([1, 2], ledger, 1, entropy) == [1, 2]
        ledger.record(Event("gaussian", 30.0), round=1, participants=[1, 2])
    assert ledger.participations == {1: 2, 2: 2}
    assert sampling.draw([1, 2], ledger, 1, entropy) == []


def test_the_cap_holds_over_a_whole_run() -> None:
    sampling = Sampling("capped", cap=3)
    ledger, entropy = make(sampling), seeded(3)
    event = Event("gaussian", 30.0)
    nodes = NODES[:20]
    for number in range(1, 100):
        chosen = sampling.draw(nodes, ledger, number, entropy, count=7)
        if not chosen:
            break
        ledger.record(event, round=number, participants=chosen)
    assert set(ledger.participations.values()) == {3}
    assert number == 10, "nine rounds of at most seven use up 20 * 3 participations"


def test_a_fixed_number_is_drawn_uniformly_in_the_order_of_the_nodes() -> None:
    sampling = Sampling("capped", cap=10**6)
    ledger, entropy = make(sampling), seeded(4)
    counts: dict[int, int] = dict.fromkeys(NODES[:10], 0)
    for number in range(2000):
        chosen = sampling.draw(NODES[:10], ledger, number, entropy, count=4)
        assert len(chosen) == 4
        assert chosen == sorted(chosen)
        for node in chosen:
            counts[node] += 1
    assert all(abs(count - 800) < 5 * (2000 * 0.24) ** 0.5 for count in counts.values())
    assert sampling.expected(400, count=4) == 4.0
    assert sampling.expected(3, count=4) == 3.0
    assert sampling.event_rate == 1.0, "a fixed number amplifies nothing"


def test_the_systems_entropy_does_not_repeat() -> None:
    sampling = Sampling("poisson", rate=0.5)
    ledger = make(sampling)
    assert sampling.draw(NODES, ledger, 1, make_entropy()) != sampling.draw(NODES, ledger, 1, make_entropy())
    assert sampling.draw(NODES, ledger, 1, seeded(5)) == sampling.draw(NODES, ledger, 1, seeded(5))


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "everyone", "rate": 0.5},
        {"kind": "capped", "cap": 5, "rate": 0.1},
        {"kind": "capped"},
        {"kind": "poisson", "rate": 0.1, "cap": 3},
    ],
)
def test_figures_that_contradict_each_other_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Sampling(**arguments)


def test_amplification_is_refused_where_it_does_not_hold() -> None:
    Sampling("poisson", rate=0.1).check("zero_out")
    Sampling("poisson", rate=0.1).check("add_remove")
    Sampling("capped", cap=1).check("replace")
    with pytest.raises(ConfigError, match="under replace"):
        Sampling("poisson", rate=0.1).check("replace")


@pytest.mark.parametrize("sampling", [Sampling("everyone"), Sampling("capped", cap=3)])
def test_a1_add_remove_with_fixed_count_is_refused(sampling: Sampling) -> None:
    def ledger(adjacency: Adjacency) -> PrivacyLedger:
        return PrivacyLedger(delta=1e-5, population=10, adjacency=adjacency, sampling=sampling)

    with pytest.raises(ConfigError, match=r"takes its place.*sampling='poisson' with rate = count / population.*repl"):
        sampling.check("add_remove", count=9)
    # By hand as well: whoever draws asks a ledger, and the ledger knows the adjacency.
    with pytest.raises(ConfigError, match="takes its place"):
        sampling.draw(NODES[:10], ledger("add_remove"), 1, seeded(7), count=9)
    assert sampling.draw(NODES[:10], ledger("add_remove"), 1, seeded(7)) == NODES[:10]
    for adjacency in ("zero_out", "replace"):
        assert len(sampling.draw(NODES[:10], ledger(adjacency), 1, seeded(7), count=9)) == 9  # type: ignore[arg-type]
    Sampling("poisson", rate=0.9).check("add_remove")


def swapped_epsilon(adjacency: Adjacency, *, units: int, count: int, z: float, delta: float) -> float:
    """Return the exact epsilon of removing one of ``units`` where ``count`` are drawn, from the sums of all draws.

    The unit's contribution is the opposite of everybody else's. With it the sum is a mixture over the draws; without it
    every draw gives the same sum.
    """
    mechanism = GridGaussian(clip=1.0, size=1, noise_multiplier=z, adjacency=adjacency)
    sums = [
        sum(int(mechanism.admit(np.array([-1.0 if unit == 0 else 1.0]))[0]) for unit in drawn)
        for drawn in itertools.combinations(range(units), count)
    ]
    without = count * int(mechanism.admit(np.array([1.0]))[0])
    moved = sum(total != without for total in sums) / len(sums)
    mu = max(abs(total - without) for total in sums) / mechanism.grid_sigma
    # (1 - p) Q + p N against Q: the divergence at epsilon log(1 + p (e^a - 1)) is p times that of N against Q at a.
    return math.log1p(moved * math.expm1(gaussian_epsilon(mu, delta / moved)))


def test_a1_the_statement_for_replace_covers_a_removal_that_lets_another_take_the_place() -> None:
    sampling, z = Sampling("everyone"), 1.0
    stated = {}
    for adjacency in ("add_remove", "replace"):
        mechanism = GridGaussian(clip=1.0, size=1, noise_multiplier=z, adjacency=adjacency)  # type: ignore[arg-type]
        ledger = PrivacyLedger(delta=1e-5, population=10, adjacency=adjacency, sampling=sampling)  # type: ignore[arg-type]
        ledger.record(mechanism.event(size=1), round=1)
        stated[adjacency] = ledger.epsilon()
    exact = {a: swapped_epsilon(a, units=10, count=9, z=z, delta=1e-5) for a in ("add_remove", "replace")}  # type: ignore[arg-type]
    assert stated["add_remove"] == pytest.approx(4.377, abs=2e-3), "what was claimed"
    assert exact["add_remove"] == pytest.approx(9.84, abs=0.01), "what it costs: why the pair is refused"
    assert exact["replace"] <= stated["replace"]
    assert exact["replace"] > 0.9 * stated["replace"], "no factor is given away"


def test_draws_that_cannot_be_made_are_refused() -> None:
    poisson = Sampling("poisson", rate=0.5)
    with pytest.raises(ConfigError, match="vary in size"):
        poisson.draw(NODES, make(poisson), 1, seeded(6), count=5)
    with pytest.raises(ConfigError, match="twice"):
        poisson.draw([1, 1], make(poisson), 1, seeded(6))
    with pytest.raises(ConfigError, match="population"):
        poisson.expected(0)
