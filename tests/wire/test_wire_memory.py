"""What decoding costs: no more than the codecs say, no more than the limits allow, and no honest frame is refused."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from fedcomp import wire
from fedcomp.wire.bins import Bins
from fedcomp.wire.support import complement, seeded_support

SPARSE_ONLY = frozenset({wire.SPARSE})
CASES = [(300, 6), (300, 150), (300, 299), (200_000, 1_000), (200_000, 100_000), (200_000, 199_000)]
N = 2_000_000
FEW = np.arange(100, dtype=np.int64) * 7


def peak(call: Callable[[], object]) -> int:
    """Return the extra memory of a call, refusals included."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with contextlib.suppress(wire.WireError):
            call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def buffers(count: int) -> int:
    """Return the room for buffers of a fixed size that work_bytes leaves out, as far as ``count`` fields use them."""
    return min(80 * count, 12 << 20) + (1 << 17)


def writers(n: int, k: int) -> list[str]:
    return [*wire.PLAIN, *(f"complement:{name}" for name in wire.PLAIN if 2 * k > n)]


def numbers(k: int) -> np.ndarray:
    return ((np.arange(k) * 37 % 101 - 50) / 8 + 1 / 16).astype(np.float32)


def forms(k: int) -> list[wire.Values]:
    """Return every value codec, also with a scale for every value and with the costliest packings."""
    x, half = numbers(k), np.full(k, 0.5)
    top = np.where(np.arange(k) % 50 == 0, 1 << 24, 0)
    return [
        wire.Raw(x),
        wire.Raw(x.astype(np.float64)),
        wire.Fp16(x),
        wire.Bf16(x),
        wire.Uniform.quantise(x, 5, 16),
        wire.Uniform.quantise(x, 16, 1),
        wire.SignScale.quantise(x, 0),
        wire.SignScale.quantise(x, 1),
        wire.Ternary.quantise(x),
        wire.Ternary(np.arange(k) % 9 == 0, 0.5),
        wire.QsgdLevels.quantise(x, 127, 512, half),
        wire.QsgdLevels.quantise(x, 1 << 24, 1, half),
        wire.QsgdLevels(top, 1 << 24, 1, np.ones(k, np.float32)),
        wire.RangeFloat.quantise(x, 8),
        wire.RangeFloat.quantise(x, 16),
        wire.Codebook.quantise(x),
        wire.Codebook(np.arange(k) % 256, np.ones(128), 8),
        wire.Natural.quantise(x),
        wire.Ones(k),
        wire.UnitSign(np.signbit(x)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), CASES)
def test_index_codecs_take_no_more_memory_than_they_say(n: int, k: int) -> None:
    support = wire.Support(seeded_support(1, n, k), n)
    coded = [(wire.INDEX_BY_NAME[name], *wire.INDEX_BY_NAME[name].encode(support)) for name in wire.PLAIN]
    wrapper = wire.INDEX_BY_NAME["complement"]
    coded += [
        (wrapper, bytes((codec.codec_id,)) + params, section)
        for codec, params, section in [
            (wire.INDEX_BY_NAME[name], *wire.INDEX_BY_NAME[name].encode(support.complement())) for name in wire.PLAIN
        ]
    ]
    coded += [(wire.INDEX_BY_NAME["seeded"], bytes((algorithm,)) + bytes(8), b"") for algorithm in (1, 2)]
    lengths = (1, 2, 3, 50, 200, 1 << 14, n)
    coded += [(wire.INDEX_BY_NAME["bins"], *Bins(length).encode(support)) for length in lengths]
    for codec, params, section in coded:
        codec.bounds(params, n, k)
        view = memoryview(section)
        said = codec.work_bytes(params, n, k, len(section))
        used = peak(lambda c=codec, p=params, s=view: c.decode(p, s, n, k))
        most = max(k, n - k) if codec is wrapper else k
        assert used <= said + buffers(max(most, n // 2) if codec.name == "bins" else most), codec.name


@pytest.mark.slow
@pytest.mark.parametrize("k", [6, 300, 100_000, 700_000])
def test_value_codecs_take_no_more_memory_than_they_say(k: int) -> None:
    for values in forms(k):
        for shuffled in (False, True):
            params, section = values.pack(shuffled)
            stored = memoryview(b"x" + bytes(section))[1:]

            def use(p: bytes = params, s: memoryview = stored, v: wire.Values = values) -> None:
                found = type(v).unpack(p, s, k, v.dtype)
                found.count_non_finite()
                found.decode()

            said = type(values).work_bytes(params, k, len(section), values.dtype)
            assert peak(use) <= said + buffers(k), (values.name, params)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["none", "zlib", "auto"])
@pytest.mark.parametrize(("n", "k"), CASES[:5])
def test_limits_of_a_schema_take_every_honest_frame(n: int, k: int, backend: str) -> None:
    support = seeded_support(1, n, k)
    x = numbers(k)
    schema = (wire.Expected("w", (n,), max_k=k, kinds=SPARSE_ONLY),)
    frames = [wire.encode([wire.sparse((n,), support, x, index=i, backend=backend)]) for i in ("auto", *writers(n, k))]
    frames += [wire.encode([wire.seeded((n,), 5, k, x, backend=backend, algorithm=a)]) for a in (1, 2)]
    fields = [k] * len(frames)
    for length in (1, 2, 3, 5, 50, 200, 1 << 14, n):
        frames.append(wire.encode([wire.sparse((n,), support, x, index=f"bins:{length}", backend=backend)]))
        fields.append(k + n // length)
    limits = wire.Limits.for_schema(schema)
    for frame, count in zip(frames, fields, strict=True):
        assert np.array_equal(wire.decode(frame, schema)[0].values.decode(), x)
        used = peak(lambda f=frame: wire.decode(f, schema))
        assert used <= limits.max_bytes_out + buffers(count)
        # Fields are unpacked through words of eight bytes, up to 2 MiB of them: empty bins, too, are fields.
        assert used <= 2 * (limits.max_bytes_in + limits.max_bytes_out) + (1 << 17) + 8 * (count - k)


@pytest.mark.parametrize("backend", ["none", "zlib", "auto"])
@pytest.mark.parametrize("n", [1, 300, 20_000])
def test_limits_of_a_dense_schema_take_every_honest_frame(n: int, backend: str) -> None:
    dense_only = frozenset({wire.DENSE})
    for values in forms(n):
        schema = (wire.Expected("w", (n,), values.dtype, kinds=dense_only),)
        if values.size_bits() > 32 * n and values.dtype == "float32":
            # A scale for every value: longer than the values themselves.
            continue
        frame = wire.encode([wire.Tensor(values, (n,), dtype=values.dtype, backend=backend)])
        assert np.array_equal(wire.decode(frame, schema)[0].values.decode(), values.decode())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["none", "zlib", "zstd"])
@pytest.mark.parametrize("inner", wire.PLAIN)
def test_the_complement_of_a_sparse_support_is_refused_before_it_costs_anything(inner: str, backend: str) -> None:
    if backend == "zstd":
        pytest.importorskip("zstandard")
    frame = wire.encode([wire.sparse((N,), FEW, numbers(100), index=f"complement:{inner}", backend=backend)])
    schema = (wire.Expected("w", (N,), max_k=N // 1000, kinds=SPARSE_ONLY),)
    for expect, limits in ((schema, None), (None, wire.Limits(max_bytes_out=1 << 20))):
        with pytest.raises(wire.LimitExceeded):
            wire.decode(frame, expect, limits)
        assert peak(lambda e=expect, m=limits: wire.decode(frame, e, m)) < 1 << 16


def test_compressed_supports_cannot_hide_what_they_cost() -> None:
    pytest.importorskip("zstandard")
    n = 64_000_000
    limits = wire.Limits(max_bytes_out=1 << 20)
    for index in ("bitmap", "rice", "elias-fano"):
        sparse = wire.sparse((n,), FEW, numbers(100), index=index, backend="zstd")
        frame = wire.encode([sparse])
        assert len(frame) < 4_000
        if index == "bitmap":
            with pytest.raises(wire.LimitExceeded):
                wire.decode(frame, limits=limits)
        assert peak(lambda f=frame: wire.decode(f, limits=limits)) < 2 * limits.max_bytes_out


def test_a_sender_cannot_make_the_default_limits_exceed_themselves() -> None:
    default = wire.Limits()
    assert default.max_bytes_out <= 1 << 30
    n = default.max_elements
    wide = wire.encode([wire.sparse((n + 1,), FEW, numbers(100), index="raw")])
    with pytest.raises(wire.LimitExceeded, match="elements"):
        wire.decode(wide)
    # The complement of almost nothing would take 64 million indices.
    small = wire.Limits(max_elements=N, max_bytes_out=(1 << 30) // (n // N))
    frame = wire.encode([wire.sparse((N,), FEW, numbers(100), index="complement:bitmap", backend="zlib")])
    used = peak(lambda: wire.decode(frame, limits=small))
    assert used <= small.max_bytes_out + (1 << 17)


@pytest.mark.parametrize("mode", ["one", "many", "all empty"])
def test_bins_take_no_more_memory_than_they_say_at_size(mode: str) -> None:
    n, length = 1_000_000, {"one": 8, "many": 8, "all empty": 1}[mode]
    indices = np.arange(0, n, length) if mode == "one" else np.arange(0, n, 50) if mode == "many" else FEW[:0]
    params, section = Bins(length).encode(wire.Support(indices, n))
    codec = wire.INDEX_BY_NAME["bins"]
    said = codec.work_bytes(params, n, indices.size, len(section))
    used = peak(lambda: codec.decode(params, memoryview(section), n, indices.size))
    assert 0.5 * said < used <= said + buffers(n)


def test_frames_without_sections_cannot_ask_for_more_than_the_limits() -> None:
    """A few bytes that stand for millions of ones, blocks or empty bins are refused before anything is allocated."""
    n = 6_000_000
    limits = wire.Limits(max_bytes_out=1 << 20)
    for tensor in (
        wire.Tensor(wire.Ones(n), (n,)),
        wire.seeded((n,), 1, n // 2, wire.Ones(n // 2), algorithm=2),
        wire.sparse((n,), FEW, wire.Ones(100), index="bins:1", backend="zlib"),
    ):
        frame = wire.encode([tensor])
        assert len(frame) < 10_000
        with pytest.raises(wire.LimitExceeded):
            wire.decode(frame, limits=limits)
        assert peak(lambda f=frame: wire.decode(f, limits=limits)) < 1 << 16


def test_the_complement_of_a_complement_is_the_support() -> None:
    assert np.array_equal(complement(complement(FEW, 1000), 1000), FEW)
