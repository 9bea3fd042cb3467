"""STC: zeros, its worst cases, bytes, foreign frames. What it sends: test_sparsification_deterministic.py."""

from __future__ import annotations

import numpy as np
import pytest
from codec_examples import through, update

from fedcomp import wire
from fedcomp.codecs import STC, TopK
from fedcomp.layout import Layout
from fedcomp.rng import Key

KEY = Key(12, "codec")


@pytest.mark.parametrize(("n", "k"), [(100, 1), (100, 5), (100, 10), (100, 50), (100, 100), (7, 3)])
def test_contraction_is_the_worst_of_two_ends(n: int, k: int) -> None:
    """k/n by equal magnitudes, 1/k approached by one coordinate over many small ones; nothing lies below both."""
    codec = STC(k / n)
    bound = codec.contraction(Layout.flat(n))
    assert bound == pytest.approx(min(k / n, 1 / k), rel=1e-12)

    def kept(x: np.ndarray) -> float:
        return float(1 - np.square(x - through(codec, x).astype(np.float64)).sum() / np.square(x).sum())

    equal = np.where(np.arange(n) % 2, 1.0, -1.0)
    assert kept(equal) == pytest.approx(k / n, rel=1e-9)
    spike = np.full(n, 2.0**-20)
    spike[n // 2] = 1.0
    assert kept(spike) == pytest.approx(1 / k, rel=1e-3)
    rng = np.random.default_rng(n + k)
    for power in (0.1, 1.0, 3.0, 10.0):
        x = (rng.normal(size=n) * rng.random(n) ** power).astype(np.float32)
        assert kept(x.astype(np.float64)) >= bound


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
    """A magnitude per block, a support that is drawn."""
    layout = Layout.flat(1000)
    codec = STC(0.05)
    own = wire.decode(codec.encode(update(layout), {}, KEY)[0]).tensors[0]
    blocks = wire.SignScale(own.values.negative, np.ones(5, np.float32), 10)
    with pytest.raises(wire.WireError):
        codec.decode(wire.encode([wire.sparse((1000,), own.indices, blocks)]), layout)
    with pytest.raises(wire.SchemaMismatch, match="list of indices"):
        codec.open(wire.decode(wire.encode([wire.seeded((1000,), 3, 50, own.values)])), layout)
