"""Random block: its length, and supports of another kind. What it sends: test_sparsification_deterministic.py; its
mean, error and draws: test_sparsification_statistical.py; the wire's blocks: wire/test_seeded_support.py."""

from __future__ import annotations

import numpy as np
import pytest
from codec_examples import update

from fedcomp import wire
from fedcomp.codecs import RandomBlock, RandomK
from fedcomp.layout import Layout
from fedcomp.rng import Key

KEY = Key(13, "codec", round=1, partition=2)


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


def test_scattered_indices_of_a_seed_are_refused() -> None:
    layout = Layout.flat(1000)
    codec = RandomBlock(0.01)
    honest = wire.decode(codec.encode(update(layout), {}, KEY)[0])[0]
    scattered = wire.encode([wire.seeded((1000,), honest.index.seed, 10, honest.values)])
    assert codec.open(wire.encode([honest]), layout)
    for frame in (scattered, wire.decode(scattered)):
        with pytest.raises(wire.SchemaMismatch, match="algorithm"):
            codec.open(frame, layout)


def test_is_another_codec_than_random_k() -> None:
    layout = Layout.flat(1000)
    codecs = RandomK(0.1, scope="layer"), RandomBlock(0.1)
    assert codecs[0] != codecs[1]
    frames = [codec.encode(update(layout), {}, KEY)[0] for codec in codecs]
    assert not np.array_equal(codecs[0].support(frames[0], layout), codecs[1].support(frames[1], layout))
    for codec, frame in zip(codecs, reversed(frames), strict=True):
        with pytest.raises(wire.SchemaMismatch):
            codec.verify(frame, layout, KEY)
