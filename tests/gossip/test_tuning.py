"""Consensus step sizes: the watch that sees divergence, the search for a gamma that works, and the proved one."""

from __future__ import annotations

import doctest
from collections.abc import Sequence

import numpy as np
import pytest
from gossip_problems import problem, ring_weights, run

from fedcomp.errors import ConfigError, FedcompError, NonFiniteUpdate
from fedcomp.gossip import tuning
from fedcomp.gossip.base import Algorithm, State
from fedcomp.gossip.choco import CHOCO
from fedcomp.gossip.compressors import get_compressor
from fedcomp.gossip.deepsqueeze import DeepSqueeze
from fedcomp.gossip.dyna_cold import DynaCOLD
from fedcomp.gossip.errors import Diverged, Saturated
from fedcomp.gossip.topology import Complete, DirectedRing, Ring
from fedcomp.gossip.tuning import Watch, safe_gamma, tune_gamma
from fedcomp.rng import Key

SPARSE = {"id": "topk", "fraction": 0.05}


def watched(algorithm: Algorithm, iterations: int, watch: Watch) -> float:
    """Run on the logistic problem with a watch on every node; return the last error."""
    task = problem(n=6, d=24)

    def tell(k: int, states: Sequence[State]) -> None:
        watch(k, {i: algorithm.facts(state) for i, state in enumerate(states)})

    return float(run(algorithm, task, iterations, watch=tell, stop_at=np.inf).errors[-1])


def choco(gamma: float) -> CHOCO:
    return CHOCO(lr=0.1 / problem(n=6, d=24).smoothness, gamma=gamma, compressor=SPARSE)


def test_the_watch_ends_runs_that_diverge_and_says_what_to_do() -> None:
    lr = 0.1 / problem(n=6, d=24).smoothness
    with pytest.raises(Diverged, match=r"node \d: the innovation grew from .* Halve gamma first, the learning rate"):
        watched(DeepSqueeze(lr=lr, momentum=0.9, gamma=1.0, compressor=SPARSE), 200, Watch(window=20))


@pytest.mark.parametrize("gamma", [0.25, 0.06])
def test_the_watch_leaves_runs_alone_that_work(gamma: float) -> None:
    assert watched(choco(gamma), 80, Watch(window=20)) < 1.3


def series(watch: Watch, values: Sequence[float]) -> int | None:
    """Return the iteration at which ``watch`` ends a node whose innovations are ``values``; None if it does not."""
    for k, value in enumerate(values):
        try:
            watch(k, {3: {"innovation": float(value)}})
        except Diverged:
            return k
    return None


@pytest.mark.parametrize("rate", [1.03, 1.1, 1.5])
def test_exponential_growth_is_seen_within_two_windows(rate: float) -> None:
    assert series(Watch(), rate ** np.arange(300.0)) == 99


def test_growth_from_rounding_is_seen_when_it_is_more() -> None:
    found = series(Watch(), 1e-17 * 1.08 ** np.arange(1000.0))
    assert found is not None
    assert 1e-6 < 1e-17 * 1.08**found < 3e-6


def test_growth_too_slow_for_a_window_is_seen_by_the_ceiling() -> None:
    found = series(Watch(), 1.01 ** np.arange(2000.0))
    assert found is not None
    assert 1.01 ** (found - 99) == pytest.approx(100.0, rel=0.02)


@pytest.mark.parametrize(
    "values",
    [
        1.0 - 0.98 ** np.arange(1000.0),  # rises to a plateau
        10.0 * 0.99 ** np.arange(1000.0),
        2.0 + 0.5 * np.sin(np.arange(1000.0) / 20.0),  # a slow wave
        1.0 + Key(0, "noise").uniform(2000),
        np.sqrt(np.arange(2000.0)),
        np.zeros(500),
        np.concatenate([np.zeros(90), np.full(300, 5.0)]),  # a step, once
        1e-17 * 1.08 ** np.minimum(np.arange(1000.0), 300.0),  # rounding that grows with the model
    ],
    ids=["plateau", "decay", "wave", "noise", "root", "zero", "step", "rounding"],
)
def test_what_does_not_grow_without_end_is_no_divergence(values: np.ndarray) -> None:
    assert series(Watch(), values) is None


def test_one_node_is_enough_and_is_named() -> None:
    watch = Watch(window=10)
    for k in range(19):
        watch(k, {2: {"innovation": 1.0}, 7: {"innovation": 1.2**k}})
    with pytest.raises(Diverged, match="node 7"):
        watch(19, {2: {"innovation": 1.0}, 7: {"innovation": 1.2**19}})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_figure_that_is_not_finite_ends_the_run_at_once(value: float) -> None:
    with pytest.raises(Diverged, match=r"node 1: weight is .* in iteration 5"):
        Watch()(5, {0: {"weight": 1.0}, 1: {"weight": value}})


def test_7_11_a_scale_that_falls_too_fast_is_reported_as_saturated() -> None:
    task = problem(n=6, d=24)
    for rho, ends in ((0.8, True), (0.97, False)):
        algorithm = DynaCOLD(lr=1.0 / task.smoothness, gamma=0.5, scale="geometric", rho=rho, s0=2.0)
        if ends:
            with pytest.raises(Saturated, match=r"larger rho.*zoom"):
                watched(algorithm, 60, Watch())
        else:
            watched(algorithm, 60, Watch())


def test_tune_gamma_halves_from_one_until_a_pilot_works_and_on_while_it_gets_better() -> None:
    def pilot(algorithm: Algorithm) -> float:
        return watched(algorithm, 60, Watch(window=20))

    found = tune_gamma(choco, pilot)
    assert 0.1 <= found.gamma <= 0.5
    assert found.algorithm == choco(found.gamma)
    assert found.trials[0].failure.startswith("Diverged: node")
    assert [trial.gamma for trial in found.trials] == [0.5**i for i in range(len(found.trials))]
    worked = [trial for trial in found.trials if not trial.failure]
    assert found.outcome == min(trial.outcome for trial in worked if trial.outcome is not None) < 1.0
    assert worked[-1].gamma == found.gamma / 2


def outcomes(*given: object) -> list[float]:
    """Return the gammas tried and, last, the one chosen, when pilots come to what is ``given``."""
    left = list(given)

    def pilot(algorithm: Algorithm) -> object:
        found = left.pop(0)
        if isinstance(found, FedcompError):
            raise found
        return found

    tuned = tune_gamma(choco, pilot)
    assert not left
    return [*(trial.gamma for trial in tuned.trials), tuned.gamma]


def test_tune_gamma_counts_every_way_to_fail() -> None:
    failures = [Diverged("grew"), NonFiniteUpdate("inf"), Saturated("full"), float("nan"), np.float64("inf")]
    assert outcomes(*failures, None) == [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125]


def test_tune_gamma_takes_the_first_that_works_or_the_best_loss() -> None:
    assert outcomes({"any": "thing"}) == [1.0, 1.0]
    assert outcomes(Diverged("grew"), True) == [1.0, 0.5, 0.5]
    assert outcomes(9.0, 4.0, 3.0, 3.5) == [1.0, 0.5, 0.25, 0.125, 0.25]
    assert outcomes(3.0, Diverged("odd, but possible")) == [1.0, 0.5, 1.0]
    assert outcomes(3.0, 3.0) == [1.0, 0.5, 1.0]


def test_tune_gamma_gives_up_with_the_reasons() -> None:
    def pilot(algorithm: Algorithm) -> float:
        raise Diverged("it grew")

    with pytest.raises(Diverged, match=r"no gamma from 1 down to 0.2 works; reduce the learning rate. 1: .*it grew"):
        tune_gamma(choco, pilot, least=0.2)
    with pytest.raises(ConfigError, match="least"):
        tune_gamma(choco, pilot, least=0.0)

    def broken(algorithm: Algorithm) -> float:
        raise ValueError("a mistake of the pilot's own")

    with pytest.raises(ValueError, match="own"):
        tune_gamma(choco, broken)


def test_the_proved_gamma_is_safe_and_far_too_small() -> None:
    compressor = get_compressor(SPARSE)
    gamma = safe_gamma(Ring(8), compressor, 40)
    assert 0.0 < gamma < 0.01
    assert safe_gamma(Complete(8), compressor, 40) > gamma
    eigenvalues = np.linalg.eigvalsh(ring_weights(8))
    gap, beta, delta = 1 - eigenvalues[-2], 1 - eigenvalues[0], compressor.contraction(40)
    assert gamma == pytest.approx(
        gap**2 * delta / (16 * gap + gap**2 + 4 * beta**2 + 2 * gap * beta**2 - 8 * gap * delta)
    )
    with pytest.raises(ConfigError, match="directed"):
        safe_gamma(DirectedRing(5), compressor, 40)


def test_a_watch_of_no_use_is_refused() -> None:
    for wrong in ({"window": 4}, {"growth": 1.0}, {"ceiling": 0.5}, {"floor": -1.0}):
        with pytest.raises(ConfigError):
            Watch(**wrong)


def test_the_example_runs() -> None:
    assert doctest.testmod(tuning, optionflags=doctest.ELLIPSIS).failed == 0
