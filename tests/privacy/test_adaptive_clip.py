"""Adaptive clipping: the clip norm finds the quantile from anywhere, and bits and sum cost one event together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from private_runs import inner, play

from fedcomp.errors import ConfigError
from fedcomp.privacy.accounting import gaussian_epsilon
from fedcomp.privacy.adaptive import AdaptiveClip, NormBits, joint_event
from fedcomp.privacy.entropy import SystemEntropy
from fedcomp.privacy.gaussian import lattice_delta
from fedcomp.privacy.mechanism import GridGaussian
from fedcomp.privacy.sampling import Sampling
from fedcomp.strategies.private.dp_fedavg import DpFedAvg

CLIENTS = 40
NORMS = np.exp(np.linspace(-1.0, 1.0, CLIENTS))  # median 1
DIRECTIONS = np.eye(4, dtype=np.float32)


def updates(norms=NORMS) -> dict[int, np.ndarray]:
    return {i + 1: np.float32(n) * DIRECTIONS[i % 4] for i, n in enumerate(norms)}


def strategy(cls=DpFedAvg, *, z: float = 1.0, population: int = CLIENTS, seed: int = 0, **options) -> DpFedAvg:
    clip = AdaptiveClip(**options)
    return cls(
        inner(),
        clip=clip,
        noise_multiplier=z,
        population=population,
        delta=1e-3,
        insecure_deterministic=True,
        seed=seed,
    )


def settle(made: DpFedAvg, rounds: int = 60) -> float:
    """Return the geometric mean of the clip norm over the last third of the rounds."""
    given = updates()
    for r in range(1, rounds + 1):
        play(made, given, server_round=r)
    late = [made.clips[r] for r in range(rounds - rounds // 3, rounds + 1)]
    return float(np.exp(np.mean(np.log(late))))


@pytest.mark.slow
@pytest.mark.parametrize("start", [0.1, 0.9, 1.0, 1.2, 5.0])
def test_the_clip_norm_finds_the_median(start) -> None:
    # Noise on the share is 5 %; its effect on the logarithm of the clip norm stays below a tenth.
    assert settle(strategy(initial=start)) == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("quantile", [0.2, 0.8])
def test_the_clip_norm_finds_other_quantiles(quantile) -> None:
    expected = math.exp(2.0 * quantile - 1.0)
    assert settle(strategy(initial=1.0, quantile=quantile)) == pytest.approx(expected, rel=0.12)


def test_sum_and_bits_cost_one_event_at_the_noise_multiplier() -> None:
    made = strategy(z=0.8)
    play(made, updates())
    play(made, updates(), server_round=2)
    assert [(e.noise_multiplier, e.releases) for e in made.privacy.events] == [(0.8, 1), (0.8, 1)]
    mu, grid = math.sqrt(2.0) / 0.8, made.privacy.events[0].grid_sigma
    assert made.privacy.epsilon() == pytest.approx(gaussian_epsilon(mu, lattice_delta(mu, 1e-3, grid)), rel=1e-9)
    z_sum, z_bits = made.mechanism(_Layout(4), 3).noise_multiplier, made.new_bits(made.adaptive).mechanism
    assert z_bits.noise_multiplier == 2.0 * CLIENTS / 20
    assert 1 / z_sum**2 + 1 / z_bits.noise_multiplier**2 == pytest.approx(1 / 0.8**2, rel=1e-12)
    # The naive choice, z for the sum and the bits for nothing, costs more than is recorded.
    assert 1 / 0.8**2 + 1 / z_bits.noise_multiplier**2 > 1 / 0.8**2


class _Layout:
    def __init__(self, size: int) -> None:
        self.size = size


def test_the_share_is_of_the_public_number_and_stays_a_share() -> None:
    entropy = SystemEntropy()

    def share(bits, expected):
        counted = NormBits(0.0, "zero_out", "discrete_gaussian")
        for bit in bits:
            counted.add(bit)
        return counted.share(expected, entropy)

    assert share([True] * 3 + [False], 4.0) == 0.75
    assert share([True] * 3, 6.0) == 0.75  # the three that are missing are half within
    assert share([], 6.0) == 0.5
    assert share([True] * 9, 4.0) == 1.0
    assert share([False] * 9, 4.0) == 0.0
    low = NormBits(2000.0, "zero_out", "discrete_gaussian")
    assert all(0.0 <= low.share(2.0, entropy) <= 1.0 for _ in range(20))


def test_a_round_without_contributions_moves_the_clip_norm_by_noise_alone() -> None:
    made = strategy(initial=1.0)
    play(made, [], nodes=[1], size=4)
    assert 0.9 < made.clip < 1.1
    assert made.clip != 1.0
    assert made.clips == {1: 1.0}


def test_the_norm_counts_as_it_was_before_clipping_and_after_masking() -> None:
    support = np.array([0, 3])
    given = {i: np.float32([0.5, 100, 100, 0.5]) for i in range(1, 11)}
    made = strategy(z=0.0, population=10, initial=1.0)
    play(made, given, support=support)
    assert made.clip == pytest.approx(math.exp(-0.2 * 0.5))  # all are within: sqrt(0.5) < 1
    unmasked = strategy(z=0.0, population=10, initial=1.0)
    play(unmasked, given)
    assert unmasked.clip == pytest.approx(math.exp(0.2 * 0.5))


def test_a_refused_contribution_brings_no_bit() -> None:
    made = strategy(z=0.0, population=4, initial=1.0)
    play(made, {1: np.float32([0.1, 0]), 2: np.float32([np.nan, 0]), 3: np.float32([0.2, 0])})
    assert made.clip == pytest.approx(math.exp(-0.2 * 0.25))


class Counted(DpFedAvg):
    """Keeps the votes of its last round."""

    def concluded(self, server_round, entropy) -> None:
        self.votes = self.bits.votes
        super().concluded(server_round, entropy)


def votes_with(first: list[float] | None, adjacency: str = "zero_out") -> int:
    """Return the votes of seven clients within the clip norm, and of one that contributes ``first`` or nothing."""
    made = Counted(inner(), clip=AdaptiveClip(initial=1.0), noise_multiplier=0.0, population=10, adjacency=adjacency)
    given = {n: np.float32([0.1, 0.0]) for n in range(1, 8)} | ({} if first is None else {8: np.float32(first)})
    play(made, given, nodes=range(1, 9))
    return made.votes


@pytest.mark.parametrize("adjacency", ["zero_out", "add_remove", "replace"])
def test_a4_the_count_moves_by_what_its_noise_is_made_for_and_the_statement_says_by_what(adjacency) -> None:
    updates = {"zero": [0.0, 0.0], "short": [0.5, 0.0], "long": [9.0, 0.0]}
    present = {name: votes_with(update, adjacency) for name, update in updates.items()}
    absent = votes_with(None, adjacency)
    assert (present["zero"], absent) == (8, 7)
    # A refused update is absent from the count as it is from the sum.
    assert votes_with([math.nan, 0.0], adjacency) == votes_with([math.inf, 0.0], adjacency) == absent
    left_out = max(abs(votes - absent) for votes in present.values())
    exchanged = max(abs(one - other) for one in present.values() for other in present.values())
    assert (left_out, exchanged) == (1, 2)
    made = DpFedAvg(
        inner(), clip=AdaptiveClip(), noise_multiplier=1.0, population=CLIENTS, delta=1e-3, adjacency=adjacency
    )
    bits = made.new_bits(made.adaptive).mechanism
    assert bits.sensitivity * bits.step == (exchanged if adjacency == "replace" else left_out)
    # By zero is an exchange: promised under zero_out it would cost twice what is paid.
    told = made.statement().prose()
    assert "by zero" not in told
    said = {"zero_out": "out of every sum and count", "add_remove": "adding or removing", "replace": "exchanging one"}
    assert said[adjacency] in told


def test_bits_that_cost_more_than_both_may_are_refused() -> None:
    for z, noise in ((1.0, 0.5), (1.0, 0.25)):
        with pytest.raises(ConfigError, match=r"count_noise above 0\.5"):
            strategy(z=z, count_noise=noise)
    assert strategy(z=1.0, count_noise=0.51).clip == 0.1
    late = strategy(population=0)
    with pytest.raises(ConfigError, match="more than 5 clients"):
        late.declare(5)
    with pytest.raises(ConfigError, match="Gaussian"):
        DpFedAvg(inner(), clip=AdaptiveClip(), noise_multiplier=1.0, population=CLIENTS, delta=1e-3, noise="skellam")
    skellam = GridGaussian(clip=1.0, size=3, noise_multiplier=1.0, noise="skellam")
    with pytest.raises(ConfigError, match="Skellam"):
        joint_event(1.0, skellam, skellam, size=3)


def test_a_sampled_round_is_one_sampled_event() -> None:
    made = DpFedAvg(
        inner(),
        clip=AdaptiveClip(),
        noise_multiplier=1.0,
        population=200,
        delta=1e-3,
        sampling=Sampling("poisson", rate=0.5),
    )
    assert made.adaptive.multiplier(made.expected) == 2 * 100 / 20
    play(made, [], nodes=range(1, 201), size=4)
    [event] = made.privacy.events
    assert (event.rate, event.noise_multiplier, event.label) == (0.5, 1.0, "update and norm bits")


def test_the_clip_norm_survives_a_checkpoint() -> None:
    made, again, whole = strategy(), strategy(), strategy()
    for r in (1, 2, 3):
        play(made, updates(), server_round=r)
    again.load_state_dict(made.state_dict())
    assert (again.clip, again.clips) == (made.clip, made.clips)
    for r in (4, 5):
        play(again, updates(), server_round=r)
    for r in range(1, 6):
        play(whole, updates(), server_round=r)
    assert again.clips == whole.clips
    told = again.statement()
    assert told.sigma == pytest.approx(told.noise_multiplier * told.sensitivity)
    assert "together of noise multiplier 1" in told.prose()
