"""Noise in shares: the sum has the promised noise, also when as many vanish or tell as may."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp.codecs import Identity, RandomK, get_codec
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Update
from fedcomp.privacy import distributed
from fedcomp.privacy.bounded import BoundedFixedPoint
from fedcomp.privacy.bounds import rounding_bound
from fedcomp.privacy.distributed import DistributedSum, divergence, room, tail
from fedcomp.privacy.entropy import SeededEntropy
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.noise import draw
from fedcomp.privacy.rotation import largest_coordinate, rotate, unrotate
from fedcomp.rng import Key

KEY = Key(3, "uplink", 2, 1)


def stream(name: str) -> SeededEntropy:
    return SeededEntropy(Key(6, f"test/distributed/{name}"), insecure_deterministic=True)


def mechanism(**changes) -> DistributedSum:
    given = {"noise_multiplier": 1.0, "clip": 2.0, "size": 400, "contributors": 10, "tolerated": 3}
    return DistributedSum(**{**given, **changes})


# The rotation.


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100, 1000, 1500, 4096])
def test_the_rotation_is_linear_and_orthogonal_and_undone(size: int) -> None:
    one, other = Key(2, layer=size).generator().normal(size=(2, size))
    assert float(np.linalg.norm(rotate(one, 5))) == pytest.approx(float(np.linalg.norm(one)), rel=1e-12)
    np.testing.assert_allclose(unrotate(rotate(one, 5), 5), one, atol=1e-12)
    if size > 10:
        assert not np.allclose(rotate(one, 5), rotate(one, 6))
    np.testing.assert_allclose(rotate(one + 3 * other, 5), rotate(one, 5) + 3 * rotate(other, 5), atol=1e-10)
    assert float(rotate(one, 5) @ rotate(other, 5)) == pytest.approx(float(one @ other), abs=1e-10)


@pytest.mark.parametrize("size", [100, 1000, 1500])
def test_no_coordinate_keeps_the_whole_norm_wherever_it_was(size: int) -> None:
    most = largest_coordinate(size, 1e-6)
    assert most < 0.8
    for at in (0, 1, size // 2, size - 1):
        spike = np.zeros(size)
        spike[at] = 1.0
        for seed in range(1, 4):
            assert np.abs(rotate(spike, seed)).max() <= most
    assert largest_coordinate(1, 1e-6) == 1.0


# The mechanism.


@pytest.mark.parametrize(("variance", "tau"), [(0.25, 9.7), (0.5, 0.166), (1.0, 5.5e-4), (4.0, 7.2e-17)])
def test_divergence_of_a_sum_of_a_hundred_discrete_gaussians(variance: float, tau: float) -> None:
    assert divergence(100, variance) == pytest.approx(tau, rel=0.01)
    assert divergence(1, variance) == 0.0


@pytest.mark.parametrize(
    ("contributors", "tolerated", "honest", "counted"),
    [(10, 0, 1.0, 10), (10, 3, 1.0, 7), (10, 3, 0.8, 5), (10, 0, 0.25, 2)],
)
def test_a_share_is_made_for_those_that_are_left_and_silent(contributors, tolerated, honest, counted) -> None:
    made = mechanism(contributors=contributors, tolerated=tolerated, honest=honest)
    assert made.counted == counted
    assert made.share_sigma**2 * counted == pytest.approx(made.grid_sigma**2)
    assert made.least == contributors - tolerated


@pytest.mark.parametrize("noise", ["discrete_gaussian", "skellam"])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
def test_audit_B_shares_that_are_left_add_up_to_the_promised_noise(noise: str, adjacency: str) -> None:
    made = mechanism(size=30_000, noise=noise, adjacency=adjacency)
    source = stream(f"sum/{noise}/{adjacency}")
    total = sum(made.share(source) for _ in range(made.counted)) / made.grid_sigma
    z = (float(np.sum(total**2)) - total.size) / math.sqrt(2 * total.size)
    assert abs(z) < 4.9
    # The same when the mechanism draws it in one place, for simulations.
    alone = made.perturb(np.zeros(30_000, np.int64), source) / made.sigma
    assert abs(float(np.sum(alone**2)) - alone.size) / math.sqrt(2 * alone.size) < 4.9


def test_add_remove_is_refused() -> None:
    """One share more is seen at once, whatever its client contributed."""
    with pytest.raises(ConfigError, match="brings no noise"):
        mechanism(adjacency="add_remove")


def test_shares_too_small_for_their_sum_are_refused() -> None:
    with pytest.raises(ConfigError, match="variance"):
        mechanism(noise_multiplier=0.05, scale=64)
    mechanism(noise_multiplier=0.05, scale=64, noise="skellam")
    assert mechanism(noise_multiplier=0.0).share_sigma == 0.0
    just = 2.0 * math.sqrt(7) / mechanism(scale=64).bound
    assert mechanism(noise_multiplier=just * 1.001, scale=64).share_sigma == pytest.approx(2.0, rel=0.01)
    with pytest.raises(ConfigError, match="variance"):
        mechanism(noise_multiplier=just * 0.999, scale=64)


def test_the_event_pays_for_the_divergence_and_says_how_coarse_shares_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mechanism(contributors=100, tolerated=0)
    event = made.event(size=400)
    assert event.noise_multiplier == 1.0
    assert event.grid_sigma == pytest.approx(made.grid_sigma / 10)
    assert 0.0 < event.delta < 1e-15
    # With shares of variance 1/4, which are refused otherwise, next to nothing is left of the multiplier.
    monkeypatch.setattr(distributed, "LEAST_VARIANCE", 0.0)
    small = mechanism(contributors=100, tolerated=0, noise_multiplier=5.0 / made.bound, scale=made.scale)
    assert small.share_sigma**2 == pytest.approx(0.25)
    assert 1.0 / small.event().noise_multiplier == pytest.approx(1.0 / small.noise_multiplier + 9.70 * 20.0, rel=1e-3)
    skellam = mechanism(noise="skellam").event()
    assert skellam.noise_multiplier == 1.0
    assert skellam.grid_sigma == mechanism(noise="skellam").grid_sigma
    assert skellam.grid_l1 > 0


@pytest.mark.parametrize("noise", ["discrete_gaussian", "skellam"])
@pytest.mark.parametrize("sigma", [0.7, 2.0, 50.0])
def test_the_room_for_a_share_is_enough_and_no_more_than_a_little(noise: str, sigma: float) -> None:
    draws = np.abs(draw(noise, sigma, 200_000, stream("tail")))
    for reach in (2 * sigma, 3 * sigma, 4 * sigma):
        assert float(np.mean(draws > reach)) <= tail(noise, sigma, reach) + 1e-4
    needed = room(noise, sigma, 1e-30)
    assert tail(noise, sigma, needed) <= 1e-30 < tail(noise, sigma, needed - 1)
    assert needed < 14 * sigma + 60
    assert room(noise, 0.0, 1e-30) == 0


def test_what_is_admitted_is_bounded() -> None:
    made = mechanism()
    assert made.admit(np.zeros(400, np.int32)).dtype == np.int64
    edge = np.zeros(400, np.int64)
    edge[0] = math.floor(made.bound)
    made.admit(edge)
    for bad in (
        edge + np.eye(1, 400, 0, dtype=np.int64)[0],
        np.zeros(399, np.int64),
        np.zeros(400),
        np.zeros(400, np.uint8),
    ):
        with pytest.raises(Unbounded):
            made.admit(bad)


@pytest.mark.parametrize("size", [1, 10, 1000, 10**6])
@pytest.mark.parametrize("contributors", [2, 100, 1000])
@pytest.mark.parametrize("z", [0.3, 1.0, 10.0])
def test_the_grid_is_fine_enough_for_rounding_and_for_shares(size: int, contributors: int, z: float) -> None:
    made = DistributedSum(noise_multiplier=z, clip=1.0, size=size, contributors=contributors)
    assert made.share_sigma >= 10.0
    assert made.scale >= 4 * math.sqrt(size)
    if size >= 1000:
        assert made.bound <= 1.013 * made.scale


@pytest.mark.parametrize("wrong", [{"tolerated": 10}, {"honest": 0.3}])
def test_mechanisms_that_promise_nothing_are_refused(wrong) -> None:
    with pytest.raises(ConfigError):
        mechanism(**wrong)


# The codec.

LAYOUT = Layout.of({"w": np.zeros((12, 30), np.float32), "b": np.zeros(40, np.float32)})


def codec(**changes) -> BoundedFixedPoint:
    return BoundedFixedPoint.of(mechanism(**changes), RandomK(1.0))


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from([1e-30, 1e-3, 1.0, 2.0, 1e3, 1e30]), st.booleans())
def test_integers_never_exceed_their_norm(seed: int, length: float, spiky: bool) -> None:
    vector = Key(seed).generator().normal(size=400) ** (9 if spiky else 1)
    vector *= length / np.linalg.norm(vector)
    for made in (codec(), codec(rotation=9)):
        integers = made.bounded(vector.astype(np.float32), KEY)
        assert sum(x * x for x in integers.tolist()) <= rounding_bound(made.scale, 400) ** 2
        assert np.abs(integers).max() <= made.reach
        made.require_bounded(integers)


@pytest.mark.parametrize("rotation", [0, 4])
def test_frames_hold_the_clipped_update(rotation: int) -> None:
    made = codec(rotation=rotation)
    vector = Key(8).generator().normal(size=400).astype(np.float32)
    frame, _ = made.encode(Update(vector, LAYOUT), made.init(LAYOUT), KEY)
    decoded = made.decode(frame, LAYOUT)
    clipped = vector * (2.0 / np.linalg.norm(vector))
    # A rounding moves each coordinate by less than a step.
    assert float(np.linalg.norm(decoded - clipped)) < math.sqrt(400) * made.step
    assert float(decoded @ clipped) == pytest.approx(4.0, rel=0.05)
    # A sum of integers, placed, is the sum of frames.
    integers = made.grid.integers(made.open(frame, LAYOUT))
    np.testing.assert_allclose(made.place(2 * integers, 2.0, LAYOUT, KEY), decoded, atol=1e-6)
    assert get_codec(made.to_config()) == made


def test_short_updates_are_rounded_without_bias_and_zero_stays_zero() -> None:
    made = codec()
    vector = np.full(400, 0.3 * made.step, np.float32)
    drawn = [made.bounded(vector, KEY.at(round=i)) for i in range(50)]
    assert float(np.mean(drawn)) == pytest.approx(0.3, abs=5 * 0.46 / math.sqrt(50 * 400))
    assert not made.bounded(np.zeros(400, np.float32), KEY).any()


def test_noise_is_added_once_with_its_deviation_and_within_the_levels() -> None:
    made = BoundedFixedPoint.of(mechanism(size=20_000), RandomK(1.0))
    integers = made.bounded(np.ones(20_000, np.float32), KEY)
    noise = made.noised(integers, stream("noised")) - integers
    z = (float(np.sum((noise / made.sigma) ** 2)) - noise.size) / math.sqrt(2 * noise.size)
    assert abs(z) < 4.9

    narrow = replace(made, levels=made.reach)
    assert np.abs(narrow.noised(integers, stream("cut"))).max() <= narrow.levels


def test_integers_that_were_not_bounded_get_no_noise() -> None:
    made = codec()
    for forged in (np.full(400, made.scale), np.array([made.reach + 1, *[0] * 399])):
        with pytest.raises(Unbounded):
            made.noised(forged, stream("forged"))


def test_error_feedback_remembers_what_was_clipped_and_no_noise() -> None:
    # With the noise in the frame the memory would take it back in the next round.
    made = codec()
    around = ErrorFeedback(made)
    vector = Key(9).generator().normal(size=400).astype(np.float32)
    frames, memory = [], around.init(LAYOUT)
    for round_ in range(3):
        frame, memory = around.encode(Update(vector, LAYOUT), memory, KEY.at(round=round_))
        frames.append(around.decode(frame, LAYOUT))
        made.require_bounded(made.grid.integers(made.open(frame, LAYOUT)))
    np.testing.assert_allclose(memory["memory"], 3 * vector - sum(frames), atol=1e-4)
    again, _ = around.encode(Update(vector, LAYOUT), around.init(LAYOUT), KEY.at(round=0))
    np.testing.assert_array_equal(around.decode(again, LAYOUT), frames[0])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: BoundedFixedPoint.of(mechanism(noise_multiplier=300.0), RandomK(1.0)), "32767"),
        (lambda: BoundedFixedPoint(RandomK(1.0), clip=1.0, levels=10, scale=64), "room"),
        (lambda: BoundedFixedPoint(Identity(), clip=1.0, levels=100), "whole models"),
        (lambda: BoundedFixedPoint(RandomK(0.1, shared=False), clip=1.0, levels=100), "every client"),
    ],
)
def test_codecs_that_cannot_be_summed_are_refused(make, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make()
