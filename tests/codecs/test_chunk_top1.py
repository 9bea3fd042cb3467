"""Chunk top-1: one coordinate per chunk, bytes, bound, and why chunks do not cross tensors."""

from __future__ import annotations

import numpy as np
import pytest
from codec_examples import model, update
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp import wire
from fedcomp.codecs import ChunkTop1, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

KEY = Key(9, "codec", round=1, partition=2)


def sent(codec: ChunkTop1 | TopK, given_: Update) -> tuple[bytes, np.ndarray]:
    frame, _ = codec.encode(given_, codec.init(given_.layout), KEY)
    return frame, codec.decode(frame, given_.layout)


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


@pytest.mark.parametrize(("values", "size"), [("float32", 4), ("fp16", 2), ("bf16", 2)])
@pytest.mark.parametrize(("n", "chunk", "width"), [(1000, 10, 4), (4097, 64, 6), (100_000, 100, 7)])
def test_bytes(values: str, size: int, n: int, chunk: int, width: int) -> None:
    """Spec 5: ceil(n/c) (b_v + ceil(log2 c)) bits and a header; below top-k of as many values."""
    layout = Layout.flat(n)
    codec = ChunkTop1(1 / chunk, values=values)
    x = update(layout)
    frame, _ = sent(codec, x)
    k = -(-n // chunk)
    assert codec.open(frame, layout)[0].index == f"bins:{chunk}"
    assert 0 < len(frame) - (size * k + (width * k + 7) // 8) <= 44
    assert len(frame) < len(sent(TopK(k / n, values=values), x)[0])


def test_values_travel_as_asked() -> None:
    layout = Layout.flat(300)
    x = update(layout)
    chosen = chunkwise(x.vector, 10)
    for values, form in (("float32", wire.Raw), ("fp16", wire.Fp16), ("bf16", wire.Bf16)):
        _, decoded = sent(ChunkTop1(0.1, values=values), x)
        np.testing.assert_array_equal(decoded, form(chosen).decode())


def test_zeros_do_not_travel() -> None:
    """A zero vector is a valid empty frame; where chunks of zeros are left out the support is written otherwise."""
    layout = Layout.flat(5000)
    codec = ChunkTop1(0.01)
    x = np.zeros(5000, np.float32)
    empty, decoded = sent(codec, Update(x, layout))
    assert codec.open(empty, layout)[0].values.k == 0
    assert len(empty) < 40
    assert not decoded.any()
    x[4321] = 1e-42
    frame, decoded = sent(codec, Update(x, layout))
    np.testing.assert_array_equal(decoded, x)
    assert len(empty) < len(frame) < 50
    assert not codec.open(frame, layout)[0].index.startswith("bins")
    full = update(layout).vector.copy()
    full[200:300] = 0.0
    frame, decoded = sent(codec, Update(full, layout))
    np.testing.assert_array_equal(decoded, chunkwise(full, 100))
    assert codec.open(frame, layout)[0].values.k == 49
    tiny = np.where(np.arange(5000) % 100 == 7, np.float32(1e-9), np.float32(0))
    frame, _ = sent(ChunkTop1(0.01, values="fp16"), Update(tiny, layout))
    assert wire.decode(frame)[0].values.k == 0


def test_density_one_is_everything() -> None:
    layout = Layout.flat(700)
    x = update(layout)
    _, decoded = sent(ChunkTop1(1.0), x)
    np.testing.assert_array_equal(decoded, x.vector)


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


def test_densities_of_tensors() -> None:
    def policy(name: str, shape: tuple[int, ...], dtype: str) -> float | None:
        return 1.0 if len(shape) < 2 else 0.5 if name == "head.weight" else None

    layout = Layout.of(model(), policy)
    frame, _ = sent(ChunkTop1(0.1), update(layout))
    assert [t.values.k for t in wire.decode(frame).tensors] == [120, 750, layout.dense_size]
    assert ChunkTop1(0.1).contraction(layout) == 0.1
    with pytest.raises(ConfigError, match="scope='layer'"):
        ChunkTop1(0.1, scope="global").init(layout)


def test_more_values_than_chunks_are_refused() -> None:
    layout = Layout.flat(1000)
    x = update(layout)
    dense, _ = ChunkTop1(0.1).encode(x, {}, KEY)
    with pytest.raises(wire.WireError):
        ChunkTop1(0.05).decode(dense, layout)
    seeded = wire.seeded((1000,), 1, 100, np.ones(100, np.float32))
    with pytest.raises(wire.WireError):
        ChunkTop1(0.1).decode(wire.encode([seeded]), layout)
    # Which of its coordinates a client sends is its own matter, as long as they are not more.
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


def test_keeps_less_than_top_k_where_the_energy_is_clustered() -> None:
    """Spec 5: chunks that hold little send as much as those that hold everything; error feedback mends it."""
    layout = Layout.flat(10_000)
    x = update(layout)
    x.vector[:] *= np.repeat(10.0 ** np.linspace(-4, 0, 100), 100).astype(np.float32)
    energy = float((x.vector.astype(np.float64) ** 2).sum())
    kept = [float((sent(c, x)[1].astype(np.float64) ** 2).sum()) / energy for c in (ChunkTop1(0.01), TopK(0.01))]
    assert kept[0] < 0.7 * kept[1]
    codec = ErrorFeedback(ChunkTop1(0.01))
    state, total = codec.init(layout), np.zeros(layout.size)
    for t in range(30):
        frame, state = codec.encode(x, state, KEY.at(round=t))
        total += codec.decode(frame, layout)
    np.testing.assert_allclose(total + state["memory"], 30.0 * x.vector, rtol=1e-4, atol=1e-3)
