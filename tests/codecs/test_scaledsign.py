"""ScaledSign: its worst case, extremes and blocks. What it sends: test_sparsification_deterministic.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
from codec_examples import through, update

from fedcomp import wire
from fedcomp.codecs import ScaledSign
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout
from fedcomp.rng import Key

KEY = Key(6, "codec")
CODEC = ScaledSign()


@pytest.mark.parametrize("codec", [ScaledSign(), ScaledSign(block=64), ScaledSign(block=300)], ids=repr)
def test_contraction_is_reached_by_a_spike(codec: ScaledSign) -> None:
    """1/n of the largest block; normal values keep 2/π."""
    layout = Layout.flat(192)
    bound = codec.contraction(layout)
    assert bound == pytest.approx(1 / min(192, codec.block or 192), rel=1e-12)
    x = np.zeros(192)
    x[100] = -3.0
    assert ((x - through(codec, x)) ** 2).sum() / 9 == pytest.approx(1 - bound, abs=1e-12)
    normal = np.random.default_rng(1).normal(size=100_000).astype(np.float32)
    kept = 1 - ((normal - through(CODEC, normal)) ** 2).sum(dtype=np.float64) / (normal**2).sum(dtype=np.float64)
    assert kept == pytest.approx(2 / math.pi, abs=0.01)


def test_extremes_neither_overflow_nor_warn() -> None:
    top = np.full(1000, np.finfo(np.float32).max)
    np.testing.assert_array_equal(through(CODEC, top), top)
    least = np.full(1000, 1e-45)
    np.testing.assert_array_equal(through(CODEC, least), np.float32(least))
    np.testing.assert_array_equal(through(CODEC, np.array([1e-45, 0, 0, 0])), np.zeros(4))
    np.testing.assert_array_equal(through(CODEC, np.array([1.0, -0.0, 0.0])), np.full(3, np.float32(1 / 3)))


def test_other_blocks_are_refused() -> None:
    layout = Layout.flat(1000)
    frame, _ = ScaledSign(block=100).encode(update(layout), {}, KEY)
    for other in (ScaledSign(), ScaledSign(block=50), ScaledSign(block=1000)):
        with pytest.raises(wire.SchemaMismatch, match="blocks of"):
            other.decode(frame, layout)


def test_blocks_of_one_are_refused_and_all_others_fit_the_limits() -> None:
    """33 bits for a float32: a receiver's limits, which come from raw values, refuse that from 5e5 values on."""
    with pytest.raises(ConfigError, match="block=1 is not valid"):
        ScaledSign(block=1)
    layout = Layout.flat(600_000)
    for block in (2, 3):
        frame, _ = ScaledSign(block=block).encode(update(layout), {}, KEY)
        ScaledSign(block=block).open(frame, layout)
