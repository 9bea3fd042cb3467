"""Scatter-add, compiling, caching: what it costs to import and what happens without a writable cache."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedcomp
from fedcomp.errors import ConfigError, LayoutError
from fedcomp.kernels import (
    adaptive_step,
    add_scaled,
    compiled,
    exceedances,
    feedback_step,
    portable,
    scatter_add,
    select_above,
    select_adaptive,
    select_bins,
    select_topk,
    tiers,
    warm,
)
from fedcomp.kernels.interface import BLOCK
from fedcomp.rng import Key


@pytest.mark.parametrize("tier", ["numba", "numpy"])
@pytest.mark.parametrize("weight", [1.0, -1.0, 0.3, 1 / 3])
def test_scatter_add_is_weight_times_dense(weight: float, tier: str) -> None:
    """Bit equal to adding float32(weight) times the dense vector."""
    rng = np.random.default_rng(1)
    start = rng.normal(size=5000).astype(np.float32)
    dense = np.zeros(5000, np.float32)
    indices = np.sort(rng.choice(5000, 700, replace=False))
    dense[indices] = rng.normal(size=700)
    out = start.copy()
    scatter_add(out, indices, dense[indices], weight, tier=tier)
    np.testing.assert_array_equal(out, start + np.float32(weight) * dense)


@pytest.mark.parametrize("tier", ["numba", "numpy"])
def test_scatter_add_refuses_indices_outside(tier: str) -> None:
    out = np.zeros(10, np.float32)
    for indices in ([-1, 2], [3, 10]):
        with pytest.raises(LayoutError, match="outside"):
            scatter_add(out, np.array(indices), np.ones(2, np.float32), tier=tier)
    with pytest.raises(LayoutError, match="do not fit"):
        scatter_add(out, np.array([1]), np.ones(2, np.float32), tier=tier)
    assert not out.any()
    scatter_add(out, np.zeros(0, np.int64), np.zeros(0, np.float32), tier=tier)


def test_histogram_counts_every_magnitude() -> None:
    x = np.random.default_rng(0).standard_t(1, 10_003).astype(np.float32)
    magnitudes = np.abs(x).view(np.int32) >> 20
    for tier in ("numba", "numpy"):
        counts = tiers.ops(tier, x.size).histogram(x.view(np.int32))
        np.testing.assert_array_equal(counts, np.bincount(magnitudes, minlength=2048))


def _run(
    code: list[str], env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA")}
    root = str(Path(fedcomp.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-W", "error", *code],
        env={**base, "PYTHONPATH": root, **(env or {})},
        capture_output=True,
        text=True,
        timeout=500,
        cwd=cwd,
        check=False,
    )


@pytest.mark.slow
def test_importing_does_not_import_numba() -> None:
    code = "import sys, fedcomp.codecs; print('numba' in sys.modules, 'torch' in sys.modules)"
    done = _run(["-c", code])
    assert done.stdout.split() == ["False", "False"], done.stderr


@pytest.mark.slow
def test_warm_is_idempotent_and_reports_one_line() -> None:
    assert warm() is not None
    again = warm()
    assert again is not None
    assert again < 0.1
    done = _run(["-m", "fedcomp.kernels"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fedcomp.kernels: ")
    assert done.stdout.count("\n") == 1


def test_warm_compiles_what_is_used() -> None:
    """One specialisation of every kernel, and none more for read-only, strided or reused arrays."""
    from fedcomp.kernels import compiled, compiled_adaptive, compiled_bins, compiled_tails

    modules = (compiled, compiled_adaptive, compiled_bins, compiled_tails)
    kernels = [
        value
        for module in modules
        for value in vars(module).values()
        if hasattr(value, "signatures")
        and value.__module__ == module.__name__
        and not value.targetoptions.get("forceinline")
    ]
    warm()
    assert kernels
    assert {len(kernel.signatures) for kernel in kernels} == {1}
    x = np.random.default_rng(0).normal(size=300).astype(np.float32)
    y = np.frombuffer(x.tobytes(), np.float32)
    for vector, other in ((y, x), (x[::2], y[1::2]), (x[:1], y[:1])):
        indices = select_topk(vector, 1, tier="numba")
        total = feedback_step(vector, other, 1, tier="numba").memory
        scatter_add(total, indices, other[indices], 0.5, tier="numba")
        select_bins(vector, 3, tier="numba")
        select_adaptive(vector, other, 3, tier="numba")
        adaptive_step(total, other, 3, out=total, tier="numba")
        exceedances(vector, np.float32(0.5), logs=True, tier="numba")
        select_above(vector, 0, tier="numba")
    assert {len(kernel.signatures) for kernel in kernels} == {1}


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" falls back to numpy; asking for numba by name says what to do."""
    monkeypatch.setattr(tiers, "has_numba", lambda: False)
    x = np.arange(50_000, dtype=np.float32)
    np.testing.assert_array_equal(select_topk(x, 2), [49_998, 49_999])
    with pytest.raises(ConfigError, match="not installed"):
        select_topk(x, 2, tier="numba")
    assert warm() is None


@pytest.mark.long
@pytest.mark.parametrize("user_cache", [True, False])
def test_read_only_package_compiles_without_warning(tmp_path: Path, user_cache: bool) -> None:
    """No cache beside the package: the user's cache is taken; without that one, none. Never a warning."""
    package = Path(fedcomp.__file__).parent
    shutil.copytree(package, tmp_path / "fedcomp", ignore=shutil.ignore_patterns("__pycache__"))
    # A plain file in the place of the cache directory: refuses writing also to a super-user.
    (tmp_path / "fedcomp" / "kernels" / "__pycache__").write_text("")
    home = tmp_path / "home"
    if user_cache:
        home.mkdir()
    else:
        home.write_text("")
    env = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = _run(["-m", "fedcomp.kernels"], env, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("fedcomp.kernels: all kernels ready")
    cached = list(home.rglob("*.nbi")) if user_cache else []
    assert bool(cached) == user_cache


@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64])
def test_packed_fields_are_read_alike(width: int) -> None:
    """Every place of a field in its word, words that two rows share, more columns than are read at once, any dtype."""
    for columns in (1, 5, 4097):
        words = Key(width, "fields").bits(width * columns).reshape(width, columns)
        for dtype in (np.uint8, np.uint16, np.uint32, np.int16, np.int32, np.int64, np.uint64):
            if width <= 8 * np.dtype(dtype).itemsize:
                out = [np.empty((64, columns), dtype) for _ in range(2)]
                compiled.unpack_columns(words, out[0])
                portable.unpack_columns(words, out[1])
                np.testing.assert_array_equal(out[0], out[1])
                # Whatever lies above the low bits of a field is left out.
                fields = out[0] | (out[0] << np.asarray(width % (8 * out[0].itemsize), dtype)) if width < 8 else out[0]
                back = [np.full_like(words, 1) for _ in range(2)]
                compiled.pack_columns(fields, back[0])
                portable.pack_columns(fields, back[1])
                np.testing.assert_array_equal(back[0], words)
                np.testing.assert_array_equal(back[1], words)
    # From the definition: row r is the r-th number of ``width`` bits of its column, read as one large integer.
    column = sum(int(word) << 64 * i for i, word in enumerate(words[:, 0].tolist()))
    expected = [column >> (width * row) & ((1 << width) - 1) for row in range(64)]
    fields = np.empty((64, columns), np.uint64)
    compiled.unpack_columns(words, fields)
    assert fields[:, 0].tolist() == expected


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.uint64])
def test_unary_streams_are_alike(dtype: type) -> None:
    for count in (1, 8, 5000):
        for most in (1, 2, 300):
            numbers = (Key(count, "unary").bits(count) % np.uint64(most)).astype(dtype)
            text = "".join("0" * int(number) + "1" for number in numbers)
            text += "0" * (-len(text) % 8)
            expected = bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))
            assert compiled.unary(numbers).tobytes() == expected
            assert portable.unary(numbers).tobytes() == expected


@pytest.mark.parametrize("density", [0.0, 0.03, 0.5, 1.0])
def test_ones_of_a_stream_are_alike(density: float) -> None:
    for size in (0, 1, 9, 4000):
        bits = Key(size, "ones").uniform(8 * size) < density
        stream, places = np.packbits(bits, bitorder="little"), np.flatnonzero(bits)
        for tier in (portable, compiled):
            found = tier.ones(stream, places.size)
            assert found is not None
            assert found.dtype == np.int64
            assert found.tolist() == places.tolist()
            assert tier.ones(stream, places.size + 1) is None
            # A stream with more than was said must not be written beyond the end of what was allocated for it.
            assert places.size == 0 or tier.ones(stream, 0) is None


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
@pytest.mark.parametrize(("count", "block"), [(1, 1), (5, 8), (300, 32), (320, 32), (5000, 5000)])
def test_gaps_are_joined_alike(dtype: type, count: int, block: int) -> None:
    words = Key(count, "join").bits(3 * count).reshape(3, count)
    for most in (0, 1, 31):
        widths = (words[0][: -(-count // block)] % np.uint64(most + 1)).astype(np.uint8)
        zeros = (words[1] % np.uint64(9)).astype(np.int64)
        width = np.repeat(widths, block)[:count].astype(np.int64)
        low = (words[2].astype(np.int64) & 0x7FFFFFFF) & (1 << width) - 1
        expected = np.cumsum((zeros << width) + low) + np.arange(count)
        for tier in (portable, compiled):
            joined = np.cumsum(zeros) + np.arange(count)
            tier.join_gaps(joined, low.astype(dtype), widths, block)
            assert joined.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_shifted_rows_are_added_alike(dtype: type) -> None:
    for shape in ((0, 4), (1, 1), (7, 256)):
        # At the limits that are stated: all numbers together just below 2**31 and 2**63.
        most = (2**31 if dtype is np.uint32 else 2**63) // max(1, shape[0] * shape[1])
        rows = (Key(shape[0], "rows").bits(shape[0] * shape[1]) % np.uint64(most)).astype(dtype).reshape(shape)
        for shift in (0, 1, 31):
            shifts = np.arange(shift, shift + shape[0], dtype=np.uint8) % 32
            expected = [sum(int(x) >> int(s) for x in row) for row, s in zip(rows, shifts, strict=True)]
            for tier in (portable, compiled):
                assert tier.shifted_sums(rows, shifts).tolist() == expected


def test_classes_of_gaps_are_exact() -> None:
    """At every power of two and just below, beyond what float64 holds exactly."""
    edges = [m * 2**e + d for e in range(60) for m in (1, 5, 6, 7) for d in (-1, 0, 1)]
    gaps = sorted({g for g in edges if 0 <= g < 2**62})

    def class_of(gap: int) -> int:
        e = gap.bit_length() - 1
        return gap if gap < 4 else 4 * (e - 1) + ((gap >> (e - 2)) & 3)

    small = [g for g in gaps if g < 2**32]
    for tier in (portable, compiled):
        assert tier.classes(np.array(gaps, np.uint64)).tolist() == [class_of(g) for g in gaps]
        assert tier.classes(np.array(small, np.uint32)).tolist() == [class_of(g) for g in small]


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_codes_are_looked_up_alike(bits: int) -> None:
    table = Key(bits, "table").uniform(1 << bits).astype(np.float32) - np.float32(0.5)
    for size in (0, 1, 5000):
        codes = (Key(size, "codes").bits(size) % np.uint64(1 << bits)).astype(np.uint8)
        made = compiled.look_up(table, codes)
        assert made.tobytes() == table[codes].tobytes() == portable.look_up(table, codes).tobytes()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4000, BLOCK, BLOCK + 1, 2 * BLOCK + 130])
def test_squares_are_added_in_the_same_order(size: int) -> None:
    vector = (Key(size, "squares").uniform(size) - 0.5).astype(np.float32) * np.float32(1e20)
    vector[::3] *= np.float32(1e-9)
    for origin in (None, vector[::-1].copy()):
        beside = np.zeros_like(vector) if origin is None else origin
        for kind in (np.float32, np.float64):
            made = compiled.square_sums(vector.astype(kind), origin)
            assert made.tobytes() == portable.square_sums(vector.astype(kind), origin).tobytes()
        exact = math.fsum((float(v) - float(o)) ** 2 for v, o in zip(vector, beside, strict=True))
        assert float(made.sum()) == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("bucket", [0, 1, 7, 512, 5000])
def test_levels_are_the_same_floats(bucket: int) -> None:
    numbers = (Key(bucket, "levels").bits(4000) % np.uint64(2**25)).astype(np.int32) - 2**24
    norms = Key(bucket, "norms").uniform(-(-4000 // bucket) if bucket else 1).astype(np.float32)
    for scale in (1.0, 3e38, 1e-40):
        given = norms * np.float32(scale)
        made = compiled.levels(numbers, given, bucket, 2**24)
        assert made.tobytes() == portable.levels(numbers, given, bucket, 2**24).tobytes()
        few = (numbers >> 12).astype(np.int16)
        made = compiled.levels(few, given, bucket, 2**13)
        assert made.tobytes() == portable.levels(few.astype(np.int32), given, bucket, 2**13).tobytes()
        assert made.tobytes() == portable.levels(few, given, bucket, 2**13).tobytes()
    assert compiled.levels(numbers[:0], norms[:0], bucket, 1).size == 0


@pytest.mark.parametrize("steps", [1, 2, 7, 98, 127, 206, 322, 8190, 2**14 - 1, 2**14])
def test_levels_that_fall_between_two_floats_are_rounded_alike(steps: int) -> None:
    """A product with 1 / steps may be off by 2**-52: with 98, 206 or 322 that shows where a quotient is a half."""
    levels = np.unique(np.linspace(-steps, steps, 200).astype(np.int32))
    # Multiples of steps / 2 times the smallest float32, and their neighbours: quotients of them are halves of it.
    multiples = np.arange(1, 40, dtype=np.uint32)[:, None] * np.uint32(max(1, steps // 2)) + np.uint32([0, 1])
    small = multiples.astype(np.uint32).reshape(-1).view(np.float32)
    normal = (np.arange(1, 400, dtype=np.uint32) * np.uint32(steps) + np.uint32(1 << 23)).view(np.float32)
    for norm in (*small, *normal, np.float32(3.4e38)):
        norms = np.full(1, norm, np.float32)
        exact = [np.float32(int(level) * float(norm) / steps) for level in levels]
        for kind in (np.int16, np.int32)[steps >= 2**14 :]:
            made = compiled.levels(levels.astype(kind), norms, 0, steps)
            assert made.tobytes() == np.array(exact, np.float32).tobytes()
            assert made.tobytes() == portable.levels(levels.astype(kind), norms, 0, steps).tobytes()


@pytest.mark.parametrize("size", [0, 1, 5000, 70_000])
def test_scaled_vectors_are_added_alike(size: int) -> None:
    out, values = (Key(size, name).uniform(size).astype(np.float32) - np.float32(0.5) for name in ("out", "values"))
    for weight in (1.0, -0.3):
        expected = out + np.float32(weight) * values
        for tier in ("numba", "numpy"):
            made = out.copy()
            add_scaled(made, values, weight, tier=tier)
            assert made.tobytes() == expected.tobytes()
    with pytest.raises(LayoutError, match="do not fit"):
        add_scaled(out, np.zeros(size + 1, np.float32))


_FRAMES = """
import hashlib, numpy as np
import fedcomp.codecs as c
from fedcomp.codecs.keyregion import _FINE
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
vector = np.random.default_rng(0).standard_normal(30_000).astype(np.float32)
layout, found = Layout.flat(vector.size), hashlib.sha256(_FINE.tobytes())
for codec in (c.TopK(density=0.01), c.QSGD(levels=7), c.EDEN(), c.KeyRegion(), c.AdaComp()):
    found.update(codec.encode(Update(vector, layout), codec.init(layout), Key(0))[0])
print(found.hexdigest())
"""


@pytest.mark.slow
def test_without_a_compiler_and_with_small_numbers_flushed_the_bytes_are_the_usual_ones() -> None:
    """A user may switch numba's compiler off, or have torch flush subnormal numbers before anything is imported."""
    flushed = "import torch; torch.set_flush_denormal(True)" + _FRAMES.replace(
        "vector = ", "torch.set_flush_denormal(False)\nvector = ", 1
    )
    runs = [_run(["-c", _FRAMES]), _run(["-c", _FRAMES], {"NUMBA_DISABLE_JIT": "1"}), _run(["-c", flushed])]
    assert [run.returncode for run in runs] == [0, 0, 0], [run.stderr for run in runs]
    assert len({run.stdout for run in runs}) == 1
