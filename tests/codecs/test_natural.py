"""NaturalCompression: exact probabilities over all of float32, what is refused, bytes. Its variance:
test_sparsification_statistical.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
from codec_examples import through, update

from fedcomp import wire
from fedcomp.codecs import NaturalCompression
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import NonFiniteUpdate
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

KEY = Key(10, "codec")
DRAWS = 4000
NORMAL = np.float32([4 / 3, -4 / 3, 1.0, -1.5, 1.999, 3.1e-5, -6e33, 1.2e-38, 2.0**126 * 1.7, 2.0**127, 0.0, 2.0**-126])
SUBNORMAL = np.float32([1e-45, -3e-42, 1e-40, -1.1e-38, 5e-39])


def _neighbours(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The powers of two around every magnitude; 0 and 2**-126 around subnormal ones."""
    exponent = np.frexp(np.abs(x).astype(np.float64))[1] - 1
    low = np.where(np.abs(x) < 2.0**-126, 0.0, np.ldexp(1.0, exponent))
    return low, np.where(low == 0.0, 2.0**-126, 2 * low)


def _mean_is(x: np.ndarray, drawn: np.ndarray) -> bool:
    """Spec 7.2: within five standard errors at every coordinate, by the exact variance (|x| - low)(high - |x|)."""
    exact = x.astype(np.float64)
    low, high = _neighbours(x)
    error = np.sqrt((np.abs(exact) - low) * (high - np.abs(exact)) / DRAWS)
    return bool((np.abs(drawn.reshape(DRAWS, x.size).mean(axis=0, dtype=np.float64) - exact) <= 5 * error).all())


@pytest.mark.parametrize("x", [NORMAL, SUBNORMAL], ids=["normal", "subnormal"])
def test_unbiased_over_all_of_float32(x: np.ndarray) -> None:
    """Taking the nearer power is not, nor is rounding subnormal numbers to zero."""
    copies = np.tile(x, DRAWS)
    drawn = through(NaturalCompression(), copies)
    assert _mean_is(x, drawn)
    low, high = _neighbours(copies)
    assert ((np.abs(drawn) == low) | (np.abs(drawn) == high)).all()
    assert not _mean_is(x, wire.Natural.quantise(copies).decode())
    flushed = wire.Natural.quantise(copies, KEY.uniform(copies.size)).decode()
    assert _mean_is(x, flushed) == (x is NORMAL)


def test_the_declared_variance_is_reached_at_four_thirds() -> None:
    assert NaturalCompression().variance(Layout.flat(10)) == 0.125
    x = np.full(200_000, np.float32(4 / 3))
    errors = (through(NaturalCompression(), x) / np.float64(x[0]) - 1.0) ** 2
    assert abs(errors.mean() - 0.125) <= 5 * errors.std() / math.sqrt(x.size)


def test_powers_of_two_and_zeros_arrive_exactly() -> None:
    powers = np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)
    x = np.concatenate([powers, -powers, np.float32([0.0, -0.0])])
    assert through(NaturalCompression(), x).tobytes() == x.tobytes()


@pytest.mark.parametrize("value", [np.nextafter(np.float32(2.0**127), np.float32(np.inf)), -3.4e38])
def test_what_cannot_be_rounded_up_is_refused(value: float) -> None:
    """Sending 2**127 for all of them would be biased by up to a half."""
    layout = Layout.flat(100)
    x = np.ones(100, np.float32)
    x[7] = value
    for codec in (NaturalCompression(), ErrorFeedback(NaturalCompression())):
        with pytest.raises(NonFiniteUpdate, match=r"2\*\*127"):
            codec.encode(Update(x, layout), codec.init(layout), KEY)


def test_many_values_take_what_they_tell() -> None:
    """Spec 5: in a million no more than the entropy of signs and exponents."""
    layout = Layout.flat(1_000_000)
    frame, _ = NaturalCompression().encode(update(layout), {}, KEY)
    codes = NaturalCompression().open(frame, layout).tensors[0].values.codes
    shares = np.bincount(codes)[np.bincount(codes) > 0] / codes.size
    entropy = -float(shares @ np.log2(shares)) * codes.size / 8
    assert 0.999 * entropy <= len(frame) <= 1.01 * entropy
