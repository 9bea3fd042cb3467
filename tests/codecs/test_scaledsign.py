"""ScaledSign: the error identity, the scale's rounding, blocks, bytes, EF-signSGD."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from codec_examples import model, update

from fedcomp import wire
from fedcomp.codecs import ScaledSign
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, SmallDense, Update
from fedcomp.rng import Key

KEY = Key(6, "codec")
CODEC = ScaledSign()


def _through(x: np.ndarray, codec: ScaledSign = CODEC) -> np.ndarray:
    layout = Layout.flat(x.size)
    return codec.decode(codec.encode(Update(x.astype(np.float32), layout), {}, KEY)[0], layout)


def _error(x: np.ndarray, decoded: np.ndarray) -> Fraction:
    """‖x - decoded‖² without rounding."""
    return sum(((Fraction(float(a)) - Fraction(float(b))) ** 2 for a, b in zip(x, decoded, strict=True)), Fraction())


def _identity(x: np.ndarray) -> Fraction:
    """‖x‖² - ‖x‖₁² / n without rounding."""
    exact = [abs(Fraction(float(v))) for v in x]
    return sum(v * v for v in exact) - sum(exact) ** 2 / len(exact)


def test_error_is_exactly_the_identity() -> None:
    """Spec 5, zeros included: every coordinate sends plus or minus the mean. Zeros that arrive as zeros, a scale of the
    non-zero values only, the largest magnitude or the root mean square give other errors."""
    rng = np.random.default_rng(0)
    x = rng.integers(-50, 51, 256) / np.float32(64)
    x[rng.random(256) < 0.3] = 0.0
    x[0] += np.float32(-float(np.abs(x).sum()) % 4.0)  # makes the mean a multiple of 1/64: no rounding anywhere
    decoded = _through(x)
    assert _error(x, decoded) == _identity(x)
    np.testing.assert_array_equal(decoded < 0, x < 0)
    scale = np.abs(decoded[0])
    kept = np.abs(x).sum() / np.count_nonzero(x)
    for wrong in (scale * np.sign(x), kept * np.sign(x), np.abs(x).max() * np.sign(decoded)):
        assert _error(x, wrong) != _identity(x)
    assert _error(x, np.sqrt(np.mean(x**2)) * np.sign(decoded)) > _identity(x)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_rounding_of_the_scale_enters_as_stated(size: int) -> None:
    """The error exceeds the identity by n (s - mean)², at most 2⁻⁴⁸ ‖x‖₁² / n."""
    for seed in range(5):
        x = update(Layout.flat(size), seed=seed).vector
        excess = _error(x, _through(x)) - _identity(x)
        total = sum(abs(Fraction(float(v))) for v in x)
        assert 0 <= excess <= Fraction(1, 2**48) * total**2 / size


@pytest.mark.parametrize("codec", [ScaledSign(), ScaledSign(block=64), ScaledSign(block=300)], ids=repr)
def test_contraction_is_reached_by_a_spike(codec: ScaledSign) -> None:
    """1/n of the largest block; normal values keep 2/π."""
    layout = Layout.flat(192)
    bound = codec.contraction(layout)
    assert bound == pytest.approx(1 / min(192, codec.block or 192), rel=1e-12)
    x = np.zeros(192)
    x[100] = -3.0
    assert _error(x, _through(x, codec)) / 9 == pytest.approx(1 - bound, abs=1e-12)
    normal = np.random.default_rng(1).normal(size=100_000).astype(np.float32)
    kept = 1 - ((normal - _through(normal)) ** 2).sum(dtype=np.float64) / (normal**2).sum(dtype=np.float64)
    assert kept == pytest.approx(2 / math.pi, abs=0.01)


def test_layers_have_scales_of_their_own() -> None:
    layout = Layout.of(model(), SmallDense(share=1.0))
    given = update(layout)
    layout.view(given.vector, "head.weight")[:] *= 1e-3
    error = {}
    for scope in ("layer", "global"):
        codec = ScaledSign(scope=scope)
        decoded = codec.decode(codec.encode(given, {}, KEY)[0], layout)
        head = layout.view(decoded, "head.weight")
        error[scope] = np.abs(head).mean() / np.abs(layout.view(given.vector, "head.weight")).mean()
    assert error["layer"] == pytest.approx(1.0, abs=1e-6)
    assert error["global"] > 100


def test_extremes_neither_overflow_nor_warn() -> None:
    top = np.full(1000, np.finfo(np.float32).max)
    np.testing.assert_array_equal(_through(top), top)
    least = np.full(1000, 1e-45)
    np.testing.assert_array_equal(_through(least), np.float32(least))
    np.testing.assert_array_equal(_through(np.array([1e-45, 0, 0, 0])), np.zeros(4))
    np.testing.assert_array_equal(_through(np.array([1.0, -0.0, 0.0])), np.full(3, np.float32(1 / 3)))


@pytest.mark.parametrize("block", [0, 300, 70_000])
def test_passes_by_blocks_do_not_show(block: int) -> None:
    """The scales of a long vector are those of one pass, and right in the last place of float32."""
    layout = Layout.flat((1 << 17) + 1000)
    x = update(layout).vector
    codec = ScaledSign(block=block)
    (tensor,) = codec.open(codec.encode(Update(x, layout), {}, KEY)[0], layout).tensors
    parts = np.split(np.abs(x), range(block, x.size, block)) if block else [np.abs(x)]
    exact = np.float32([math.fsum(p.tolist()) / p.size for p in parts])
    np.testing.assert_array_equal(tensor.values.scales, exact)


def test_bytes_are_one_bit_each_and_the_scales() -> None:
    """Spec 5: n bits, 32 per block, and a header that does not grow."""
    overhead = []
    for n, block in ((1000, 0), (8001, 0), (100_000, 0), (100_000, 64), (100_000, 512)):
        codec = ScaledSign(block=block)
        frame, _ = codec.encode(update(Layout.flat(n)), {}, KEY)
        overhead.append(len(frame) - (-(-n // 8)) - 4 * (-(-n // block) if block else 1))
    assert max(overhead) <= 52
    assert max(overhead) - min(overhead) <= 13


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


@pytest.mark.slow
def test_memory_makes_the_average_right() -> None:
    """EF-signSGD: all that was sent plus the memory is all that was given, and the mean of what is sent approaches a
    constant update; without memory it stays where it is."""
    layout = Layout.flat(200)
    given = update(layout)
    codec = ErrorFeedback(ScaledSign())
    state, total = codec.init(layout), np.zeros(200)
    for r in range(1, 1601):
        frame, state = codec.encode(given, state, KEY.at(round=r))
        total += codec.decode(frame, layout)
    x = given.vector.astype(np.float64)
    rounding = 1600 * 2.0**-23 * np.abs(state["memory"]).max()
    np.testing.assert_allclose(total + state["memory"], 1600 * x, rtol=1e-6, atol=rounding)
    length = np.linalg.norm(x)
    assert np.linalg.norm(total / 1600 - x) < 0.05 * length
    assert np.linalg.norm(_through(given.vector) - x) > 0.5 * length
