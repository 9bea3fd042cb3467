"""Masks cancel in the sum, to the bit; and noise shares survive the modulus."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.privacy.distributed import DistributedSum
from fedcomp.privacy.entropy import SeededEntropy
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.secagg_sim import MaskedSum, modulus_for
from fedcomp.rng import Key


def stream(name: str) -> SeededEntropy:
    return SeededEntropy(Key(5, f"test/secagg/{name}"), insecure_deterministic=True)


def vectors(clients: int, size: int, levels: int) -> np.ndarray:
    return Key(1, "vectors").generator().integers(-levels, levels + 1, (clients, size))


@pytest.mark.parametrize("modulus", [101, 1 << 16, (1 << 31) - 1, 1 << 62])
def test_the_masked_sum_is_the_plain_sum_bit_for_bit_whoever_vanishes(modulus: int) -> None:
    given = vectors(5, 40, 10)
    masked = MaskedSum.deal(5, 40, modulus, stream("sum"), least=1)
    uploads = {i: masked.upload(i, given[i]) for i in range(5)}
    for count in range(1, 6):
        for present in itertools.combinations(range(5), count):
            total = masked.total({i: uploads[i] for i in present})
            np.testing.assert_array_equal(total, given[list(present)].sum(axis=0))


def test_one_upload_is_uniform_whatever_is_in_it() -> None:
    masked = MaskedSum.deal(3, 50_000, 10, stream("uniform"))
    counts = np.bincount(masked.upload(1, np.full(50_000, 3)), minlength=10)
    assert counts.size == 10
    # Nine degrees of freedom: 45 is exceeded once in a million.
    assert float(np.sum((counts - 5000.0) ** 2 / 5000.0)) < 45
    assert not np.array_equal(masked.upload(1, np.full(50_000, 3)), masked.upload(0, np.full(50_000, 3)))


def test_there_is_room_for_every_sum_and_not_for_more() -> None:
    for clients, levels in ((2, 1), (10, 100), (7, 32767)):
        modulus = modulus_for(clients, levels)
        assert modulus >= 2 * clients * levels + 1 > modulus // 2
        masked = MaskedSum.deal(clients, 2, modulus, stream("room"))
        extreme = np.array([levels, -levels])
        total = masked.total({i: masked.upload(i, extreme) for i in range(clients)})
        np.testing.assert_array_equal(total, clients * extreme)
    # One more wraps around: a modulus too small is no matter of precision.
    masked = MaskedSum.deal(2, 1, 4, stream("room"))
    assert masked.total({i: masked.upload(i, np.array([1])) for i in range(2)}).tolist() == [-2]


def test_shares_of_noise_come_through_the_modulus_exactly() -> None:
    mechanism = DistributedSum(noise_multiplier=1.0, clip=1.0, size=500, contributors=8, tolerated=2, rotation=3)
    given = vectors(8, 500, 1)
    source = stream("shares")
    noised = np.stack([given[i] + mechanism.share(source) for i in range(8)])
    masked = MaskedSum.deal(8, 500, modulus_for(8, mechanism.levels), source, least=mechanism.least)
    uploads = {i: masked.upload(i, noised[i]) for i in range(8)}
    np.testing.assert_array_equal(masked.total(uploads), noised.sum(axis=0))
    # With as many lost as may be, the noise that is left is the promised one.
    left = {i: uploads[i] for i in range(6)}
    residual = (masked.total(left) - given[:6].sum(axis=0)) / mechanism.grid_sigma
    assert abs(float(np.sum(residual**2)) - 500) / math.sqrt(1000) < 5
    with pytest.raises(Unbounded, match="void"):
        masked.total({i: uploads[i] for i in range(5)})


@pytest.mark.parametrize(
    "wrong", [{"clients": 1}, {"size": 0}, {"modulus": 1}, {"modulus": (1 << 62) + 1}, {"least": 0}, {"clients": True}]
)
def test_numbers_that_make_no_sense_are_refused(wrong) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        MaskedSum.deal(**{"clients": 3, "size": 4, "modulus": 64, "entropy": stream("wrong"), **wrong})


def test_what_is_no_vector_of_integers_is_refused() -> None:
    masked = MaskedSum.deal(2, 3, 64, stream("wrong"))
    for vector in (np.zeros(3), np.zeros(4, np.int64), np.zeros(3, np.uint8)):
        with pytest.raises(Unbounded):
            masked.upload(0, vector)
