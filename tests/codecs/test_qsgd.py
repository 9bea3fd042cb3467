"""QSGD and dithering: bounds, buckets, blocks, bytes and memory. What they send: test_sparsification_deterministic.py,
its mean and variance: test_sparsification_statistical.py."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from codec_examples import update

from fedcomp import wire
from fedcomp.codecs import QSGD, Dithering
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

KEY = Key(8, "codec")


@pytest.mark.parametrize(("levels", "bucket"), [(127, 512), (1, 512), (4, 64), (1, 2)])
def test_declared_bound(levels: int, bucket: int) -> None:
    """min(B/(4 s²), sqrt(B)/s), with B no larger than the vector."""
    codec = QSGD(levels, bucket)
    assert codec.variance(Layout.flat(10_000)) == min(bucket / (4 * levels**2), math.sqrt(bucket) / levels)
    small = min(bucket, 100)
    assert codec.variance(Layout.flat(100)) == min(small / (4 * levels**2), math.sqrt(small) / levels)


def test_a_spike_is_exact_and_levels_stay_in_range() -> None:
    """A bucket with one non-zero value has it as its norm: the top level, no error, never level s + 1."""
    layout = Layout.flat(512)
    x = np.zeros(512, np.float32)
    x[100] = -np.float32(0.1)
    for r in range(50):
        frame, _ = QSGD(127).encode(Update(x, layout), {}, KEY.at(round=r))
        np.testing.assert_array_equal(QSGD(127).decode(frame, layout), x)


def test_other_parameters_are_refused() -> None:
    layout = Layout.flat(1000)
    frame, _ = QSGD(7, bucket=100).encode(update(layout), {}, KEY)
    for other in (QSGD(8, bucket=100), QSGD(7, bucket=50)):
        with pytest.raises(wire.SchemaMismatch, match="levels in buckets"):
            other.decode(frame, layout)


@pytest.mark.parametrize("levels", [1, 127, 32767])
def test_the_smallest_bucket_makes_frames_that_receivers_take(levels: int) -> None:
    layout = Layout.flat(5000)
    given = Update(np.random.default_rng(0).normal(size=5000).astype(np.float32), layout)
    codec = QSGD(levels, bucket=2)
    frame, _ = codec.encode(given, {}, KEY)
    assert codec.decode(frame, layout).size == 5000
    with pytest.raises(ConfigError, match="bucket=1 "):
        QSGD(levels, bucket=1)


def test_packing_holds_blocks_not_vectors() -> None:
    """Four bytes of level per value grow with the vector, and little else does: 9 bytes at a million (30 when every
    draw was held; measured)."""
    layout = Layout.flat(1 << 20)
    given = update(layout).vector
    (stretch,) = QSGD().stretches(layout)
    QSGD().pack(given, stretch, KEY)
    tracemalloc.start()
    try:
        QSGD().pack(given, stretch, KEY)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * layout.size


def test_a_norm_that_overflows_is_refused() -> None:
    layout = Layout.flat(512)
    with pytest.raises(NonFiniteUpdate, match="overflows"):
        QSGD(7).encode(Update(np.full(512, 3e38, np.float32), layout), {}, KEY)


def dithered(x: np.ndarray, bits: int) -> tuple[int, float]:
    """Return the bytes of a frame, and those of its levels' order-0 entropy."""
    codec, layout = Dithering(bits), Layout.flat(x.size)
    frame, _ = codec.encode(Update(x.astype(np.float32), layout), {}, Key(1, "dithering"))
    values = codec.open(frame, layout).tensors[0].values
    assert isinstance(values, wire.QsgdLevels)
    shares = np.unique(values.levels, return_counts=True)[1] / x.size
    return len(frame), float(-(shares * np.log2(shares)).sum()) * x.size / 8


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 11])
@pytest.mark.parametrize("freedom", [3, 30])
def test_dithering_takes_about_the_entropy_of_its_levels(bits: int, freedom: int) -> None:
    size, entropy = dithered(np.random.default_rng(bits).standard_t(freedom, 60_000), bits)
    assert size <= 1.07 * entropy + 200


@pytest.mark.parametrize("n", [1, 2, 9, 300, 5000])
@pytest.mark.parametrize("bits", [1, 2, 7, 12, 16])
@pytest.mark.parametrize("kind", ["zeros", "one-hot", "equal", "two magnitudes", "uniform", "denormal", "huge"])
def test_dithering_is_never_longer_than_fields(n: int, bits: int, kind: str) -> None:
    draws = np.random.default_rng(n)
    x = {
        "zeros": np.zeros(n),
        "one-hot": np.eye(1, n).reshape(-1),
        "equal": np.full(n, -0.3),
        "two magnitudes": np.where(np.arange(n) % 3, 1.0, -1e-3),
        "uniform": draws.uniform(-1.0, 1.0, n),
        "denormal": draws.standard_normal(n) * 1e-41,
        "huge": draws.uniform(-3e38, 3e38, n),
    }[kind]
    layout = Layout.flat(n)
    size, _ = dithered(x, bits)
    levels = wire.QsgdLevels(np.ones(n, int), 2 ** (bits - 1), 0, np.ones(1, np.float32), fixed=True)
    assert size <= len(wire.encode([wire.Tensor(levels, (n,))]))
    assert size <= Dithering(bits).longest(layout)
