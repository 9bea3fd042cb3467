"""Chunk top-1: one coordinate per chunk, bound, zeros, and why chunks do not cross tensors."""

from __future__ import annotations

import numpy as np
import pytest
from codec_examples import sent, update
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp import wire
from fedcomp.codecs import ChunkTop1
from fedcomp.layout import Layout, Update


def chunkwise(x: np.ndarray, chunk: int) -> np.ndarray:
    """The definition: of each chunk the first of its largest magnitudes, everything else zero."""
    out = np.zeros_like(x)
    for start in range(0, x.size, chunk):
        j = start + int(np.argmax(np.abs(x[start : start + chunk])))
        out[j] = x[j]
    return out


@pytest.mark.slow
@settings(max_examples=80)
@given(st.integers(1, 400), st.integers(1, 500), st.integers(0, 10**6), st.sampled_from(["heavy", "ties", "sparse"]))
def test_sends_the_largest_of_every_chunk(n: int, chunk: int, seed: int, kind: str) -> None:
    """Spec 7.1.4: one index per chunk; ties go to the lowest; the last chunk may be short."""
    rng = np.random.default_rng(seed)
    x = {
        "heavy": rng.standard_t(3, n),
        "ties": rng.integers(-2, 3, n),
        "sparse": np.where(rng.random(n) < 0.05, rng.normal(size=n), 0.0),
    }[kind].astype(np.float32)
    codec = ChunkTop1(1.0 / chunk)
    layout = Layout.flat(n)
    frame, decoded = sent(codec, Update(x, layout))
    np.testing.assert_array_equal(decoded, chunkwise(x, chunk))
    (tensor,) = codec.open(frame, layout).tensors
    chunks = -(-n // chunk)
    assert codec.most(codec.stretches(layout)[0]) == chunks
    assert tensor.values.k == np.count_nonzero(decoded) <= chunks
    kept, energy = (decoded.astype(np.float64) ** 2).sum(), (x.astype(np.float64) ** 2).sum()
    assert kept >= codec.contraction(layout) * energy * (1 - 1e-12)


def test_chunk_is_the_rounded_inverse_of_the_density() -> None:
    (stretch,) = ChunkTop1(0.1).stretches(Layout.flat(1000))
    densities = {
        1.0: 1,
        0.9: 1,
        0.6: 2,
        0.5: 2,
        0.4: 2,
        0.3: 3,
        0.07: 14,
        0.01: 100,
        1e-3: 1000,
        1e-9: 1000,
        5e-324: 1000,
    }
    assert {d: ChunkTop1(d).chunk(stretch) for d in densities} == densities
    assert ChunkTop1(np.float32(0.1)).chunk(stretch) == 10


def test_bound_is_reached_by_equal_magnitudes() -> None:
    """δ = 1/c: equal magnitudes keep exactly one c-th where all chunks are full, more where the last one is short."""
    codec = ChunkTop1(0.02)
    for n, error in ((1000, 980), (1010, 989)):
        x = np.where(np.arange(n) % 2, 1.0, -1.0).astype(np.float32)
        _, decoded = sent(codec, Update(x, Layout.flat(n)))
        assert ((x - decoded) ** 2).sum() == error
        assert codec.contraction(Layout.flat(n)) == 0.02
    assert codec.contraction(Layout.flat(10)) == 0.1
    assert ChunkTop1(0.02, values="fp16").contraction(Layout.flat(1000)) is None
    assert 0.0199 < ChunkTop1(0.02, values="bf16").contraction(Layout.flat(1000)) < 0.02
    assert ChunkTop1(0.06).contraction(Layout.flat(10)) == 0.1, "a chunk is no longer than its tensor"


def test_chunks_stay_within_their_tensor() -> None:
    """By default every tensor has chunks of its own: a small one next to a large one keeps its share."""
    layout = Layout.of({"a": np.zeros((30, 50), np.float32), "b": np.zeros((1030, 1), np.float32)})
    x = update(layout)
    layout.view(x.vector, "b")[:] *= 1e-6
    frame, decoded = sent(ChunkTop1(0.01), x)
    for name in "ab":
        whole = layout.view(x.vector, name).reshape(-1)
        np.testing.assert_array_equal(layout.view(decoded, name).reshape(-1), chunkwise(whole, 100))
    assert [t.values.k for t in wire.decode(frame).tensors] == [15, 11]
    # As one vector of chunks of 1001 the border falls inside one: "b" loses the part that shares a chunk with "a".
    _, decoded = sent(ChunkTop1(1 / 1001, scope="global"), x)
    np.testing.assert_array_equal(decoded, chunkwise(x.vector, 1001))
    assert np.count_nonzero(layout.view(decoded, "b")) == 1


def test_which_coordinates_a_client_sends_is_its_own_matter() -> None:
    """As long as they are not more."""
    layout = Layout.flat(1000)
    several = wire.sparse((1000,), np.arange(100), np.ones(100, np.float32))
    assert np.count_nonzero(ChunkTop1(0.1).decode(wire.encode([several]), layout)) == 100


@pytest.mark.slow
def test_every_support_fits_the_receivers_limits() -> None:
    for n in (1, 7, 1000, 50_000):
        layout = Layout.flat(n)
        for density in (1.0, 0.5, 0.3, 0.01, 1e-5):
            for x in (update(layout).vector, np.where(np.arange(n) % 3 == 0, 1.0, 0.0).astype(np.float32)):
                _, decoded = sent(ChunkTop1(density), Update(x, layout))
                chunk = ChunkTop1(density).chunk(ChunkTop1(density).stretches(layout)[0])
                np.testing.assert_array_equal(decoded, chunkwise(x, chunk))
