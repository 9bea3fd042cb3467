"""Rounds in flight: periods, stability, and the ring by its events (the spec's A4 and A7: 6, 7)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.rng import Key
from fedcomp.timing.collectives import Coding, Network
from fedcomp.timing.pipeline import Pipeline, log_normal, simulate, stable_step, star

TIMES = ((1.0, 0.3), (1.0, 1.0), (1.0, 2.5), (0.2, 3.0))


def measured(a: float, b: float, width: int, steps: int = 400) -> float:
    ends = simulate(np.full(steps, a), np.full(steps, b), width)
    return float((ends[-1] - ends[steps // 2 - 1]) / (steps - steps // 2))


@pytest.mark.parametrize(("times", "width"), list(itertools.product(TIMES, (1, 2, 3, 4))))
def test_6_the_period_is_that_of_the_events(times: tuple[float, float], width: int) -> None:
    assert np.isclose(measured(*times, width), Pipeline(*times, width).period, rtol=1e-9)


def test_6_known_periods_and_that_more_than_two_gain_nothing() -> None:
    found = [tuple(round(Pipeline(*times, width).period, 9) for width in (1, 2)) for times in TIMES]
    assert found == [(1.3, 1.0), (2.0, 1.0), (3.5, 2.5), (3.2, 3.0)]
    for a, b in TIMES:
        assert Pipeline(a, b, 2).period == Pipeline(a, b, 3).period == Pipeline(a, b, 8).period
        assert 1.0 <= Pipeline(a, b, 2).speed_up <= 2.0


@pytest.mark.parametrize(
    ("variation", "expected"),
    [(0.1, (1.89, 1.98, 1.99, 2.00)), (0.5, (1.59, 1.78, 1.84, 1.93)), (1.0, (1.38, 1.54, 1.63, 1.79))],
)
def test_6_with_uneven_times_more_than_two_do_gain(variation: float, expected: tuple[float, ...]) -> None:
    """The spec's table, of independent log-normal times of equal mean."""
    a, b = (log_normal(1.0, variation, 20_000, Key(1, f"pipeline/{which}")) for which in "ab")
    assert abs(a.mean() - 1.0) < 0.05
    assert abs(a.std() - variation) < 0.1
    alone = simulate(a, b, 1)[-1]
    for width, gain in zip((2, 3, 4, 8), expected, strict=True):
        assert abs(alone / simulate(a, b, width)[-1] - gain) <= 0.03


def ring_events(network: Network, nbytes: float) -> float:
    """Return the seconds of a ring all-reduce by playing its messages.

    Every worker sends a part to the next one, adds what it gets while parts are still partial, and goes on.
    """
    p, part = network.workers, nbytes / network.workers
    ready = np.zeros(p)
    for step in range(2 * (p - 1)):
        # From the worker before, which sends when it has the part and the receiver has taken the last one.
        arrived = np.maximum(np.roll(ready, 1), ready) + network.latency + part * network.per_byte
        ready = arrived + (part * network.add_per_byte if step < p - 1 else 0.0)
    return float(ready.max()) + network.fixed


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_6_the_ring_by_its_messages_is_the_formula(workers: int) -> None:
    for costs in ((1e-3, 2e-9, 5e-10, 0.01), (0.0, 1e-8, 0.0, 0.0), (0.2, 0.0, 1e-9, 0.0)):
        network = Network(workers, *costs)
        assert np.isclose(ring_events(network, 4e6), network.ring(4e6), rtol=1e-12)


def diverges(step: float, delay: int) -> bool:
    """Whether gradient descent on x^2 / 2 does, with gradients that are ``delay`` steps old."""
    past = [1.0] * (delay + 1)
    for _ in range(6000):
        past = [*past[1:], past[-1] - step * past[0]]
        if abs(past[-1]) > 1e6:
            return True
    return max(map(abs, past)) > 1.0


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_7_the_largest_stable_step_is_the_one_where_it_begins_to_diverge(delay: int) -> None:
    bound = stable_step(delay)
    assert not diverges(0.99 * bound, delay)
    assert diverges(1.01 * bound, delay)


def test_a_code_pays_off_where_it_takes_less_than_it_saves() -> None:
    network = Network(4, latency=1e-3, per_byte=1e-8)
    plain = Pipeline(0.2, network.ring(6e7))
    cheap, dear = (plain.coded(network, 6e7, Coding(4.0, cost)) for cost in (1e-10, 2e-8))
    assert cheap.period < plain.period < dear.period
    assert np.isclose(cheap.communicate, 6e-3 + 1.5 * 6e7 / 4 * 1e-8)


def test_a_round_of_unequal_clients_waits_for_the_slowest_or_for_the_servers_link() -> None:
    assert star([0.1, 0.4], [1.0, 0.2], [0.3, 0.9], server=1.0) == pytest.approx(1.5)
    assert star([0.1, 0.4], [1.0, 0.2], [0.3, 0.9], server=7.0) == 7.0


def test_wrong_parameters_are_refused() -> None:
    with pytest.raises(ConfigError):
        simulate([1.0], [1.0, 2.0], 2)
    with pytest.raises(ConfigError):
        stable_step(-1)
