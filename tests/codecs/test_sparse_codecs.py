"""TopK and RandomK: counts, densities, bytes, and the equalities the literature states for them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from codec_examples import model, sent, update

from fedcomp import wire
from fedcomp.codecs import STC, ChunkTop1, Codec, RandomBlock, RandomK, SIDCo, TopK, chain
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.listed import INDICES
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.layout import Layout, Update
from fedcomp.params import count
from fedcomp.rng import Key

KEY = Key(3, "codec", round=1, partition=2)


def policy(name: str, shape: tuple[int, ...], dtype: str) -> float | None:
    """Dense biases and statistics, a density of its own for the head, the codec's for the rest."""
    if len(shape) < 2:
        return 1.0
    return 0.5 if name == "head.weight" else None


def test_count_is_the_ceiling() -> None:
    """k = max(1, ceil(d n)), without being fooled by 0.07 * 100 = 7.000000000000001."""
    assert [count(0.07, 100), count(0.01, 1), count(0.01, 101), count(1.0, 7), count(1e-9, 50)] == [7, 1, 2, 7, 1]
    assert count(0.1, 25_000_000) == 2_500_000


def test_count_is_exact_at_every_size() -> None:
    """Density 1 keeps all, k/n of n is k, narrow floats mean what they print, and halves stay halves at 10^13."""
    for n in (1, 10, 2**31, 2**33 + 1, 10**12, 10**13, 2**60 + 1):
        assert count(1.0, n) == n
    assert count(0.5, 10**13) == 5 * 10**12
    assert count(0.5, 10**13 + 1) == 5 * 10**12 + 1
    assert all(count(k / n, n) == k for n in (13, 97, 1000, 7919) for k in range(1, n + 1))
    assert count(np.nextafter(0.07, 1.0), 100) == 8
    stretch = TopK(1.0).stretches(Layout.flat(10))[0]
    assert [TopK(np.float32(d)).count(stretch) for d in (0.1, 0.3, 0.7)] == [1, 3, 7]
    assert count(np.float32(0.1), 10) == 1
    assert count(0.3, 0) == 0


@pytest.mark.parametrize("make", [TopK, ChunkTop1])
@pytest.mark.parametrize(("values", "tiny"), [("fp16", 1e-9), ("bf16", 1e-45), ("float32", 0.0)])
def test_what_rounds_to_zero_does_not_travel(make: type[Codec], values: str, tiny: float) -> None:
    layout, codec = Layout.flat(4), make(1.0, values=values)
    given = Update(np.array([tiny, tiny, 1.0, tiny], np.float32), layout)
    frame, decoded = sent(codec, given)
    np.testing.assert_array_equal(decoded, [0.0, 0.0, 1.0, 0.0])
    assert not np.signbit(decoded).any()
    assert wire.decode(frame).tensors[0].values.k == 1
    np.testing.assert_array_equal(codec.support(frame, layout), [2])


def test_topk_error_bound_is_reached_by_equal_magnitudes() -> None:
    """Spec 5: err = (1 - k/n)‖x‖² exactly when all magnitudes agree."""
    layout = Layout.flat(1000)
    x = np.where(np.arange(1000) % 2, 1.0, -1.0).astype(np.float32)
    _, decoded = sent(TopK(0.05), Update(x, layout))
    assert ((x - decoded) ** 2).sum() == 950
    assert TopK(0.05).contraction(layout) == 0.05


@pytest.mark.parametrize(
    "codec",
    [TopK(1.0, values="bf16"), TopK(0.4, values="bf16"), ChunkTop1(0.2, values="bf16"), SIDCo(0.1, values="bf16")],
)
@pytest.mark.parametrize("mantissa", [1 + 2.0**-8 + 2.0**-20, 1 + 3 * 2.0**-8, 2 - 2.0**-23])
def test_bf16_costs_what_is_declared(codec: Codec, mantissa: float) -> None:
    """Eight bits of precision: the relative error comes close to 2⁻⁸ just above 1 + 2⁻⁸. A cost of 2⁻¹⁸ is not kept."""
    layout = Layout.flat(1000)
    for exponent in (-100, 0, 127):
        x = np.full(1000, mantissa * 2.0**exponent, np.float32)
        _, decoded = sent(codec, Update(x, layout))
        error = ((x.astype(np.float64) - decoded) ** 2).sum() / (x.astype(np.float64) ** 2).sum()
        assert error <= 1 - codec.contraction(layout)
        kept = np.count_nonzero(decoded) / 1000
        if mantissa < 1.004:
            assert error > 1 - kept * (1 - 2.0**-17)


LAYERED = (TopK(0.1, "layer"), RandomK(0.1, scope="layer"), RandomBlock(0.1), ChunkTop1(0.1), STC(0.1, scope="layer"))


@pytest.mark.parametrize("codec", LAYERED, ids=repr)
def test_layer_scope_honours_densities_of_tensors(codec: Codec) -> None:
    """Every tensor gets ceil(d n) of its own, whatever the scale of the others, and the lowest counts for the bound."""
    layout = Layout.of(model(), policy)
    given = update(layout)
    layout.view(given.vector, "head.weight")[:] *= 1e-3
    frame, decoded = sent(codec, given)
    assert np.count_nonzero(layout.view(decoded, "embed.weight")) == 120
    assert np.count_nonzero(layout.view(decoded, "head.weight")) == 750
    tensors = wire.decode(frame).tensors
    assert [t.values.k for t in tensors] == [120, 750, layout.dense_size]
    assert codec.contraction(layout) == pytest.approx(1 / 750 if isinstance(codec, STC) else 0.1)


@pytest.mark.parametrize(
    "codec", [TopK(0.1), RandomK(0.1), RandomBlock(0.1, scope="global"), ChunkTop1(0.1, scope="global")], ids=repr
)
def test_global_scope_refuses_densities_of_tensors(codec: Codec) -> None:
    layout = Layout.of(model(), policy)
    with pytest.raises(ConfigError, match=r"head\.weight.*scope='layer'"):
        codec.init(layout)
    with pytest.raises(ConfigError, match="scope='layer'"):
        codec.encode(update(layout), {}, KEY)


DRAWN = pytest.mark.parametrize("drawn", [functools.partial(RandomK, scope="layer"), RandomBlock], ids=["k", "block"])
"""Codecs whose support follows from the key."""


@DRAWN
def test_a_chosen_support_is_refused(drawn: Callable[..., Codec]) -> None:
    """Listing the indices, even those of an honest seed, is not drawing them; nor are more or fewer of them."""
    layout = Layout.flat(1000)
    codec = drawn(0.01)
    honest = wire.decode(codec.encode(update(layout), {}, KEY)[0]).tensors[0]
    for index in ("auto", "bins:10", *wire.PLAIN):
        listed = wire.encode([wire.sparse((1000,), honest.indices, honest.values, index=index)])
        with pytest.raises(wire.WireError, match="index codec"):
            codec.open(listed, layout)
        with pytest.raises(wire.SchemaMismatch, match="seed"):
            codec.open(wire.decode(listed), layout)
    for density in (0.02, 0.005):
        with pytest.raises(wire.WireError):
            codec.open(drawn(density).encode(update(layout), {}, KEY)[0], layout)


@DRAWN
def test_a_chosen_seed_is_refused(drawn: Callable[..., Codec]) -> None:
    """``verify`` takes the seed of the round's key only; shared ones of any partition, others of their own."""
    layout = Layout.of(model(), policy)
    given = update(layout)
    for shared in (True, False):
        codec = drawn(0.1, shared=shared)
        frame, _ = codec.encode(given, {}, KEY)
        assert len(codec.verify(frame, layout, KEY)) == 3
        bad = [KEY.at(round=9), KEY.at(purpose="x")] + ([] if shared else [KEY.at(partition=9)])
        for codec_or_wrapper in (codec, ErrorFeedback(codec), chain(codec)):
            for key in bad:
                with pytest.raises(wire.SchemaMismatch, match="seed"):
                    codec_or_wrapper.verify(frame, layout, key)
        if shared:
            codec.verify(frame, layout, KEY.at(partition=9))
        first, *rest = wire.decode(frame).tensors
        other = wire.seeded(first.shape, 3, first.values.k, first.values, algorithm=first.index.algorithm)
        swapped = wire.encode([other, *rest])
        codec.open(swapped, layout)
        with pytest.raises(wire.SchemaMismatch, match="seed"):
            codec.verify(swapped, layout, KEY)
    frame, _ = TopK(0.1).encode(update(Layout.flat(50)), {}, KEY)
    assert len(TopK(0.1).verify(frame, Layout.flat(50), KEY.at(round=9))) == 1


def test_a_short_list_is_not_written_as_its_complement() -> None:
    """Expanding all other indices is work that a frame of k values must not cause; above n/2 it is the honest form."""
    layout = Layout.flat(1000)
    listed = [wire.sparse((1000,), np.arange(5), np.ones(5, np.float32), index="complement:rice")]
    with pytest.raises(wire.UnsupportedCodec, match="complement"):
        TopK(0.1).open(wire.encode(listed), layout)
    TopK(0.1, index="complement:rice").open(wire.encode(listed), layout)


@pytest.mark.slow
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("density", [0.01, 0.5, 0.51, 0.9, 1.0])
def test_every_index_codec_fits_the_receivers_limits(index: str, density: float) -> None:
    """Whatever the sender is configured to write, the receiver of the same configuration opens."""
    for size in (1, 1000, 30_000):
        given = update(Layout.flat(size))
        for vector in (given.vector, np.where(np.arange(size) < 5, given.vector, np.float32(0.0))):
            _, decoded = sent(TopK(density, index=index), Update(vector, given.layout))
            assert np.count_nonzero(decoded) == min(count(density, size), np.count_nonzero(vector))


@DRAWN
def test_scaling_that_overflows_is_refused(drawn: Callable[..., Codec]) -> None:
    layout = Layout.flat(100)
    with pytest.raises(NonFiniteUpdate, match="overflows"):
        drawn(0.01, unbiased=True).encode(Update(np.full(100, 3e38, np.float32), layout), {}, KEY)
