"""STC: the least-squares magnitude, the error identity, contraction, bytes, memory."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from codec_examples import model, update

from fedcomp import wire
from fedcomp.codecs import STC, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

KEY = Key(12, "codec")


def _through(x: np.ndarray, codec: STC) -> np.ndarray:
    layout = Layout.flat(x.size)
    return codec.decode(codec.encode(Update(x.astype(np.float32), layout), {}, KEY)[0], layout)


def _squares(x: np.ndarray) -> Fraction:
    return sum((Fraction(float(v)) ** 2 for v in x), Fraction())


def _error(x: np.ndarray, decoded: np.ndarray) -> Fraction:
    """‖x - decoded‖² without rounding."""
    return sum(((Fraction(float(a)) - Fraction(float(b))) ** 2 for a, b in zip(x, decoded, strict=True)), Fraction())


@pytest.mark.parametrize("density", [0.001, 0.05, 1.0])
def test_signs_of_the_largest_times_their_mean(density: float) -> None:
    """The support of top-k, and the mean of its magnitudes rounded to float32 once."""
    x = update(Layout.flat(1000)).vector
    decoded = _through(x, STC(density))
    k = max(1, round(density * 1000))
    chosen = np.sort(np.argsort(-np.abs(x), kind="stable")[:k])
    np.testing.assert_array_equal(np.flatnonzero(decoded), chosen)
    mu = np.float32(float(sum(abs(Fraction(float(v))) for v in x[chosen]) / k))
    np.testing.assert_array_equal(decoded[chosen], np.sign(x[chosen]) * mu)


def test_the_magnitude_is_the_least_squares_one() -> None:
    """Spec 9.2: error ‖x‖² - k μ² and no better scale. The mean over all entries, k/n of ours, as one public
    implementation takes it, fails both."""
    rng = np.random.default_rng(3)
    x = rng.integers(-40, 41, 512) / np.float32(64)
    largest = np.argsort(-np.abs(x), kind="stable")[:64]
    x[largest[0]] += np.sign(x[largest[0]]) * np.float32(-float(np.abs(x[largest]).sum()) % 1.0)  # μ without rounding
    decoded = _through(x, STC(0.125))
    kept = decoded != 0
    mu = Fraction(float(np.abs(decoded).max()))

    def passes(candidate: np.ndarray) -> bool:
        scale = Fraction(float(np.abs(candidate).max()))
        return _error(x, candidate) == _squares(x) - int(kept.sum()) * scale**2

    assert passes(decoded)
    assert mu == sum(abs(Fraction(float(v))) for v in x[kept]) / 64
    over_all = np.where(kept, np.sign(x) * np.float32(np.abs(x[kept]).sum() / x.size), 0)
    assert not passes(over_all)
    for wrong in (over_all, 0.99 * decoded, 1.01 * decoded):
        assert _error(x, wrong) > _error(x, decoded)


def test_rounding_of_the_magnitude_enters_as_stated() -> None:
    """At most 2⁻⁴⁸ k μ² more than the identity."""
    for seed in range(5):
        x = update(Layout.flat(1000), seed=seed).vector
        decoded = _through(x, STC(0.07))
        kept = [abs(Fraction(float(v))) for v in x[decoded != 0]]
        excess = _error(x, decoded) - _squares(x) + sum(kept) ** 2 / 70
        assert 0 <= excess <= Fraction(1, 2**48) * sum(kept) ** 2 / 70


def test_zeros_never_travel_nor_enter_the_mean() -> None:
    x = np.zeros(5000)
    x[[7, 4321]] = 2.0, -4.0
    x[100:200] = -0.0
    layout = Layout.flat(5000)
    codec = STC(0.1)
    frame, _ = codec.encode(Update(x.astype(np.float32), layout), {}, KEY)
    np.testing.assert_array_equal(codec.support(frame, layout), [7, 4321])
    np.testing.assert_array_equal(codec.decode(frame, layout)[[7, 4321]], [3.0, -3.0])
    empty, _ = codec.encode(Update(np.zeros(5000, np.float32), layout), {}, KEY)
    assert wire.decode(empty).tensors[0].values.k == 0
    assert len(empty) < len(frame) < 60
    tiny = np.where(np.arange(5000) == 9, -1e-45, 0.0)
    np.testing.assert_array_equal(_through(tiny, STC(1e-6)), tiny.astype(np.float32))
    top = np.full(50, np.finfo(np.float32).max)
    np.testing.assert_array_equal(_through(top, STC(1.0)), top)


@pytest.mark.parametrize(("n", "k"), [(100, 1), (100, 5), (100, 10), (100, 50), (100, 100), (7, 3)])
def test_contraction_is_the_worst_of_two_ends(n: int, k: int) -> None:
    """k/n by equal magnitudes, 1/k approached by one coordinate over many small ones; nothing lies below both."""
    codec = STC(k / n)
    bound = codec.contraction(Layout.flat(n))
    assert bound == pytest.approx(min(k / n, 1 / k), rel=1e-12)

    def kept(x: np.ndarray) -> float:
        return float(1 - _error(x, _through(x, codec)) / _squares(x))

    equal = np.where(np.arange(n) % 2, 1.0, -1.0)
    assert kept(equal) == pytest.approx(k / n, rel=1e-9)
    spike = np.full(n, 2.0**-20)
    spike[n // 2] = 1.0
    assert kept(spike) == pytest.approx(1 / k, rel=1e-3)
    rng = np.random.default_rng(n + k)
    for power in (0.1, 1.0, 3.0, 10.0):
        x = (rng.normal(size=n) * rng.random(n) ** power).astype(np.float32)
        assert kept(x) >= bound


def test_layers_have_magnitudes_and_densities_of_their_own() -> None:
    layout = Layout.of(model(), lambda name, shape, dtype: 1.0 if len(shape) < 2 else 0.5 if "head" in name else None)
    given = update(layout)
    layout.view(given.vector, "head.weight")[:] *= 1e-3
    codec = STC(0.1, scope="layer")
    decoded = codec.decode(codec.encode(given, {}, KEY)[0], layout)
    for name, k in (("embed.weight", 120), ("head.weight", 750)):
        sent = np.abs(layout.view(decoded, name))
        assert np.count_nonzero(sent) == k
        exact = np.sort(np.abs(layout.view(given.vector, name)), axis=None)[-k:].mean(dtype=np.float64)
        np.testing.assert_allclose(sent[sent > 0], exact, rtol=1e-7)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 0.6, 1.0])
def test_bytes_are_the_index_block_of_topk_and_a_bit_each(density: float) -> None:
    """Spec 5 and 7.1.3: k bits and one float32 instead of 4 k bytes; the support costs what it costs top-k."""
    for n in (1000, 100_000):
        given = update(Layout.flat(n))
        ours, _ = STC(density).encode(given, {}, KEY)
        theirs, _ = TopK(density).encode(given, {}, KEY)
        k = STC(density).most(STC(density).stretches(given.layout)[0])
        assert abs(len(ours) - 4 - (-(-k // 8)) - (len(theirs) - 4 * k)) <= 2


def test_other_frames_are_refused() -> None:
    """More than k, a magnitude per block, a support that is drawn."""
    layout = Layout.flat(1000)
    codec = STC(0.05)
    own = wire.decode(codec.encode(update(layout), {}, KEY)[0]).tensors[0]
    more, _ = STC(0.1).encode(update(layout), {}, KEY)
    blocks = wire.SignScale(own.values.negative, np.ones(5, np.float32), 10)
    for frame in (
        more,
        TopK(0.05).encode(update(layout), {}, KEY)[0],
        wire.encode([wire.sparse((1000,), own.indices, blocks)]),
        wire.encode([wire.seeded((1000,), 3, 50, own.values)]),
    ):
        with pytest.raises(wire.WireError):
            codec.decode(frame, layout)
    with pytest.raises(wire.SchemaMismatch, match="list of indices"):
        codec.open(wire.decode(wire.encode([wire.seeded((1000,), 3, 50, own.values)])), layout)


@pytest.mark.slow
def test_memory_makes_the_average_right() -> None:
    """With error feedback the mean of what is sent approaches a constant update, and a lost frame returns."""
    layout = Layout.flat(200)
    given = update(layout)
    codec = ErrorFeedback(STC(0.05))
    state, total = codec.init(layout), np.zeros(200)
    for r in range(1, 401):
        frame, state = codec.encode(given, state, KEY.at(round=r))
        if r % 5 == 0:
            state = codec.rollback(state, frame, layout)
        else:
            total += codec.decode(frame, layout)
    x = given.vector.astype(np.float64)
    np.testing.assert_allclose(total + state["memory"], 400 * x, atol=0.02)
    assert np.linalg.norm(total / 400 - x) < 0.05 * np.linalg.norm(x)
    assert np.linalg.norm(_through(x, codec.codec) - x) > 0.5 * np.linalg.norm(x)
