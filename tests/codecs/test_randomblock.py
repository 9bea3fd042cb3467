"""Random block: uniform inclusion with wrapping, the exact error formulas, bytes, seeds that cannot be chosen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from codec_examples import model, update

from fedcomp import wire
from fedcomp.codecs import RandomBlock, RandomK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.wire import seeded_block

KEY = Key(13, "codec", round=1, partition=2)


def cut_at_the_end(seed: int, n: int, b: int) -> np.ndarray:
    """Wrong (spec 4.3): the block stops where the vector ends; the first coordinates get fewer chances."""
    start = int(seeded_block(seed, n, 1)[0])
    return np.arange(start, min(n, start + b))


def pushed_back(seed: int, n: int, b: int) -> np.ndarray:
    """Wrong: the start is drawn where the block fits, so that both ends get fewer chances."""
    start = int(seeded_block(seed, n - b + 1, 1)[0])
    return np.arange(start, start + b)


def excess(draw: Callable[[int, int, int], np.ndarray], n: int, b: int, draws: int) -> float:
    """Return by how many standard deviations the chi-square of the inclusion counts exceeds its mean.

    A count is the sum of b neighbouring starts' counts, so counts are correlated. With uniform starts
    X = Σ (c - Db/n)² / (Db/n) has mean Σ w and variance 2 Σ w² over w = |λ|²/b, where λ are the n - 1 eigenvalues of
    that sum other than b itself (derived).
    """
    counts = np.zeros(n)
    for seed in range(draws):
        counts[draw(seed, n, b)] += 1
    expected = draws * b / n
    weights = np.abs(np.fft.fft(np.arange(n) < b)[1:]) ** 2 / b
    chi2 = float(((counts - expected) ** 2).sum() / expected)
    return (chi2 - weights.sum()) / np.sqrt(2 * (weights**2).sum())


@pytest.mark.slow
@pytest.mark.parametrize(("n", "b"), [(40, 7), (33, 32), (100, 1)])
def test_every_coordinate_has_the_same_chance(n: int, b: int) -> None:
    """Spec 4.3: inclusion b/n, chi-square over 1e5 draws, coordinates at both ends among them."""
    assert excess(seeded_block, n, b, 100_000 if b == 7 else 20_000) < 5


@pytest.mark.parametrize("wrong", [cut_at_the_end, pushed_back])
def test_blocks_that_do_not_wrap_fail_that_check(wrong: Callable[[int, int, int], np.ndarray]) -> None:
    assert excess(wrong, 40, 7, 5_000) > 50


def test_codec_sends_that_block() -> None:
    """The values at the wire's own block, also where it goes on at the beginning."""
    layout = Layout.flat(50)
    x = update(layout)
    codec = RandomBlock(0.3)
    wrapped = 0
    for r in range(60):
        frame, _ = codec.encode(x, {}, KEY.at(round=r))
        (tensor,) = codec.open(frame, layout).tensors
        assert isinstance(tensor.index, wire.Seeded)
        block = seeded_block(tensor.index.seed, 50, 15)
        np.testing.assert_array_equal(codec.positions(codec.stretches(layout)[0], KEY.at(round=r, layer=0)), block)
        expected = np.zeros(50, np.float32)
        expected[block] = x.vector[block]
        np.testing.assert_array_equal(codec.decode(frame, layout), expected)
        gaps = np.diff(block) > 1
        assert gaps.sum() <= 1
        wrapped += int(gaps.sum())
        assert (block[0] == 0 and block[-1] == 49) == bool(gaps.sum())
    assert 5 < wrapped < 35


def test_length_is_the_floor_of_the_density_as_written() -> None:
    """Spec 4.2: b = max(1, int(d n)); 0.29 of 100 is 29, although the binary 0.29 lies below it."""

    def length(density: float, n: int) -> int:
        codec = RandomBlock(density)
        return codec.count(codec.stretches(Layout.flat(n))[0])

    assert [length(d, n) for d, n in ((0.01, 50), (0.01, 199), (0.29, 100), (0.57, 100), (1.0, 7), (1e-9, 3))] == [
        1, 1, 29, 57, 7, 1,
    ]  # fmt: skip
    assert all(length(k / n, n) == k for n in (13, 97, 1000) for k in range(1, n + 1))
    assert length(np.float32(0.1), 1000) == 100
    assert length(float(np.nextafter(0.29, 0.0)), 100) == 28


@pytest.mark.slow
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("density", [0.3, 1 / 60])
def test_mean_error_is_exactly_the_formula(density: float, unbiased: bool) -> None:
    """Spec 4.2: (1 - b/n)‖x‖² unscaled, (n/b - 1)‖x‖² scaled. All n blocks occur, so the mean over them is exact."""
    layout = Layout.flat(60)
    codec = RandomBlock(density, unbiased=unbiased)
    x = update(layout)
    by_block = {}
    for r in range(700):
        frame, _ = codec.encode(x, {}, KEY.at(round=r))
        by_block[tuple(codec.support(frame, layout))] = codec.decode(frame, layout).astype(np.float64)
    assert len(by_block) == 60
    decoded = np.array(list(by_block.values()))
    exact = x.vector.astype(np.float64)
    error = ((decoded - exact) ** 2).sum(axis=1).mean() / (exact @ exact)
    b = codec.count(codec.stretches(layout)[0])
    np.testing.assert_allclose(decoded.mean(axis=0), exact if unbiased else exact * b / 60, rtol=1e-6)
    if unbiased:
        assert codec.contraction(layout) is None
        assert error == pytest.approx(codec.variance(layout), rel=1e-6)
        assert codec.variance(layout) == pytest.approx(60 / b - 1)
    else:
        assert codec.variance(layout) is None
        assert error == pytest.approx(1 - codec.contraction(layout), rel=1e-6)
        assert codec.contraction(layout) == pytest.approx(b / 60)


def test_densities_of_tensors() -> None:
    layout = Layout.of(model(), lambda name, shape, dtype: 1.0 if len(shape) < 2 else 0.5 if "head" in name else None)
    frame, _ = RandomBlock(0.1).encode(update(layout), {}, KEY)
    assert [t.values.k for t in wire.decode(frame).tensors] == [120, 750, layout.dense_size]
    with pytest.raises(ConfigError, match="scope='layer'"):
        RandomBlock(0.1, scope="global").init(layout)


def test_other_supports_are_refused() -> None:
    """A listed block, scattered indices of a seed, another length: each is refused before anything is added."""
    layout = Layout.flat(1000)
    codec = RandomBlock(0.01)
    honest = wire.decode(codec.encode(update(layout), {}, KEY)[0])[0]
    assert honest.indices is not None
    for index in ("auto", "bins:10", *wire.PLAIN):
        listed = wire.encode([wire.sparse((1000,), honest.indices, honest.values, index=index)])
        with pytest.raises(wire.WireError, match="index codec"):
            codec.open(listed, layout)
        with pytest.raises(wire.SchemaMismatch, match="seed"):
            codec.open(wire.decode(listed), layout)
    scattered = wire.encode([wire.seeded((1000,), honest.index.seed, 10, honest.values)])
    assert codec.open(wire.encode([honest]), layout)
    for frame in (scattered, wire.decode(scattered)):
        with pytest.raises(wire.SchemaMismatch, match="algorithm"):
            codec.open(frame, layout)
    for density in (0.02, 0.005):
        with pytest.raises(wire.WireError):
            codec.open(RandomBlock(density).encode(update(layout), {}, KEY)[0], layout)


def test_is_another_codec_than_random_k() -> None:
    layout = Layout.flat(1000)
    codecs = RandomK(0.1, scope="layer"), RandomBlock(0.1)
    assert codecs[0] != codecs[1]
    frames = [codec.encode(update(layout), {}, KEY)[0] for codec in codecs]
    assert not np.array_equal(codecs[0].support(frames[0], layout), codecs[1].support(frames[1], layout))
    for codec, frame in zip(codecs, reversed(frames), strict=True):
        with pytest.raises(wire.SchemaMismatch):
            codec.verify(frame, layout, KEY)


@pytest.mark.slow
def test_memory_beats_no_memory() -> None:
    """Spec 4.3, on a quadratic: with error feedback every coordinate gets there, without it at the pace of b/n."""
    layout = Layout.flat(400)
    rng = np.random.default_rng(3)
    curvature, optimum = rng.uniform(0.2, 1.0, 400), rng.normal(size=400)

    def distance(codec: RandomBlock | ErrorFeedback) -> float:
        x, state = np.zeros(400), codec.init(layout)
        for t in range(400):
            g = Update((0.05 * curvature * (x - optimum)).astype(np.float32), layout)
            frame, state = codec.encode(g, state, KEY.at(round=t))
            x -= codec.decode(frame, layout)
        return float(np.linalg.norm(x - optimum) / np.linalg.norm(optimum))

    assert distance(ErrorFeedback(RandomBlock(0.05))) < 0.5 * distance(RandomBlock(0.05))
