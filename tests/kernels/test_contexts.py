"""Levels in contexts: every tier writes the same bytes, reads them back, and takes nothing that no encoder wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from context_levels import MOST, cases, load, spread

from fedcomp.errors import ConfigError
from fedcomp.kernels import contexts, portable_contexts
from fedcomp.kernels.contexts import Streams
from fedcomp.rng import Key

CASES = cases()
STORED = load()
WIDE = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])  # type: ignore[call-overload]
TIERS = [name for name in ("numpy", "numba", "c") if name != "c" or contexts.has_c()]
ENDLESS = 1 << 40


def kernels(tier: str) -> Any:
    return contexts.tier_of(1, tier)  # type: ignore[arg-type]


def shapes_of(tier: str, shapes: list[tuple[int, int]]) -> Any:
    return shapes if tier == "numpy" else np.array(shapes, np.int64)


def as_bytes(tier: str, levels: np.ndarray, shapes: list[tuple[int, int]], top: int) -> bytes:
    return kernels(tier).encode(levels, shapes_of(tier, shapes), top)[0]


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", CASES)
def test_levels_come_back_and_have_the_stored_bytes(name: str, tier: str) -> None:
    levels, shapes, top = CASES[name]
    coded, counted = kernels(tier).encode(levels, shapes_of(tier, shapes), top)
    assert coded.hex() == STORED[name]
    out = np.full_like(levels, 7)
    decisions = kernels(tier).decode(coded, shapes_of(tier, shapes), top, ENDLESS, out)
    np.testing.assert_array_equal(out, levels)
    # The work that is counted is the same on both sides.
    assert counted == decisions
    assert kernels(tier).decode(coded, shapes_of(tier, shapes), top, decisions - 1, out) == -1


def test_no_stored_case_is_lost() -> None:
    assert set(STORED) == set(CASES)
    assert len(STORED) >= 28
    assert 18 * "00" in STORED["a carry through words of ones"]


def test_the_tables_are_those_of_the_format() -> None:
    """Sums and ends of what is worked out when the module is imported."""
    assert portable_contexts.FIRST.shape == (400, 18)
    assert int(portable_contexts.FIRST.sum(dtype=np.int64)) == FIRST_SUM
    assert portable_contexts.RATES[[0, 1, 255]].tolist() == [40960, 25206, 255]
    assert portable_contexts.WINDOWS[[1, 16, 32]].tolist() == [65536, 4096, 2048]


FIRST_SUM = 75_393_926


@pytest.mark.slow
def test_a_thousand_spectra_in_every_tier() -> None:
    rng = np.random.default_rng(5)
    for _ in range(1000):
        shapes = [(int(rng.integers(1, 9)), int(rng.integers(0, 20))) for _ in range(3)]
        size = sum(rows * columns for rows, columns in shapes)
        if not size:
            continue
        levels = np.rint(rng.standard_t(2, size) * rng.choice([0.1, 1.0, 30.0])).clip(-MOST, MOST).astype(np.int32)
        top = max(1, int(np.abs(levels).max()).bit_length())
        coded, decisions = portable_contexts.encode(levels, shapes, top)
        for tier in TIERS[1:]:
            assert kernels(tier).encode(levels, shapes_of(tier, shapes), top) == (coded, decisions)
            out = np.empty_like(levels)
            assert kernels(tier).decode(coded, shapes_of(tier, shapes), top, ENDLESS, out) == decisions
            np.testing.assert_array_equal(out, levels)


def test_every_tier_quantises_alike() -> None:
    values = np.float32([0.0, -0.0, 0.6, 0.59999996, -0.6, 0.99999994, 1.0, 1.4999999, 1.5, -2.5, 3.4999998, 65535.5])
    values = np.concatenate([values, np.random.default_rng(1).standard_t(2, 500).astype(np.float32)])
    draws = (Key(1).bits(values.size) >> np.uint64(40)).astype(np.uint32)
    rounded = portable_contexts.quantise(values, 1.0)
    assert rounded[:12].tolist() == [0, 0, 1, 0, -1, 1, 1, 1, 2, -3, 3, 65536]
    for tier in TIERS[1:]:
        for inverse in (0.1, 1.0, 37.0):
            for drawn in (contexts.NONE, draws):
                np.testing.assert_array_equal(
                    kernels(tier).quantise(values, inverse, drawn), portable_contexts.quantise(values, inverse, drawn)
                )
        np.testing.assert_array_equal(kernels(tier).magnitudes(values), portable_contexts.magnitudes(values))


def mutate(coded: bytes, rng: np.random.Generator) -> bytes:
    body = bytearray(coded)
    kind = int(rng.integers(5))
    if kind == 0 and body:
        body[int(rng.integers(len(body)))] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del body[int(rng.integers(len(body) + 1)) :]
    elif kind == 2:
        body += rng.bytes(int(rng.integers(1, 12)))
    elif kind == 3:
        place = int(rng.integers(len(body) + 1))
        body[place : place + 4] = b"\xff\xff\xff\xff"
    else:
        body = bytearray(rng.bytes(int(rng.integers(1, 40))))
    return bytes(body)


def same_decisions(count: int, seed: int) -> tuple[int, int]:
    """Mutate ``count`` times; return how many were taken and given up. All tiers agree, and what is taken is written
    again as it was."""
    rng = np.random.default_rng(seed)
    small = [case for case in CASES.values() if len(case[0]) <= 120]
    taken = stopped = 0
    for _ in range(count):
        levels, shapes, top = small[int(rng.integers(len(small)))]
        mutant = mutate(as_bytes("numba", levels, shapes, top), rng)
        most = int(rng.choice([levels.size, 3 * levels.size, ENDLESS]))
        found = []
        for tier in TIERS:
            out = np.zeros_like(levels)
            found.append((kernels(tier).decode(mutant, shapes_of(tier, shapes), top, most, out), out))
        assert len({status for status, _ in found}) == 1, mutant.hex()
        status = found[0][0]
        stopped += status == -1
        if status >= 0:
            taken += 1
            assert all((out == found[0][1]).all() for _, out in found)
            assert as_bytes("numpy", found[0][1], shapes, top) == mutant
    return taken, stopped


@pytest.mark.slow
def test_mutants_are_taken_or_refused_alike() -> None:
    taken, stopped = same_decisions(600, 3)
    assert taken > 2
    assert stopped > 20


@pytest.mark.long
@pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "deep", reason="90 seconds: HYPOTHESIS_PROFILE=deep")
def test_two_hundred_thousand_mutants() -> None:
    same_decisions(200_000, 4)


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_a_number_above_the_range_is_refused(tier: str) -> None:
    """No encoder writes eight bytes of ones; compiled tiers took them once their words of 64 bits had run over."""
    shapes, out = [(130_000, 1)], np.zeros(130_000, np.int32)
    assert kernels(tier).decode(8 * b"\xff" + b"\1", shapes_of(tier, shapes), 17, ENDLESS, out) == -2


@pytest.mark.parametrize("tier", TIERS)
def test_work_that_costs_no_bytes_is_bounded(tier: str) -> None:
    """No byte at all stands for the largest level everywhere: what is read is always the first of two choices."""
    shapes, out = [(100, 7)], np.zeros(700, np.int32)
    assert kernels(tier).decode(b"", shapes_of(tier, shapes), 17, 700 * 31 // 10 + 1000, out) == -1
    assert kernels(tier).decode(b"", shapes_of(tier, shapes), 17, ENDLESS, out) == 700 * 34
    assert (out == -MOST).all()
    assert as_bytes(tier, out, shapes, 17) == b""


def order0(levels: np.ndarray) -> float:
    _, counts = np.unique(levels, return_counts=True)
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def test_contexts_gain_on_matrices_and_lose_nothing_without_order() -> None:
    """Spec 11: rows in another order cost about the same, values in no order what their frequencies say."""
    rng = np.random.default_rng(8)
    rows, columns = 150, 120
    scale = np.exp(rng.normal(size=(rows, 1))) * np.exp(rng.normal(size=columns))
    for step in (1.0, 6.0):
        levels = np.rint(rng.normal(size=(rows, columns)) * scale / step).astype(np.int32)
        top = int(np.abs(levels).max()).bit_length()

        def cost(matrix: np.ndarray, top: int = top) -> int:
            return 8 * len(as_bytes("numba", np.ascontiguousarray(matrix.reshape(-1)), [(rows, columns)], top))

        own = cost(levels)
        assert own < 0.9 * order0(levels)
        assert abs(cost(rng.permutation(levels)) / own - 1.0) < 0.05
        # And what learning of probabilities costs.
        assert cost(rng.permutation(levels.reshape(-1))) <= 1.02 * order0(levels) + 800


def test_bytes_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "_STREAM_BITS", 9)
    shapes = ((20, 60), (1, 60), (60, 40), (7, 9), (30, 30))
    levels = spread("threads", list(shapes), 50)
    top = int(np.abs(levels).max()).bit_length()
    streams = Streams(shapes, "numba", threads=1)
    assert 2 < len(streams.parts) <= 5
    assert [part.stop for part, _ in streams.parts][-1] == levels.size
    coded, decisions = streams.encode(levels, top)
    for threads in (2, 5):
        again = Streams(shapes, "numba", threads)
        assert again.encode(levels, top) == (coded, decisions)
        out = np.zeros_like(levels)
        assert again.decode(coded, top, ENDLESS, out) == decisions
        np.testing.assert_array_equal(out, levels)
    assert Streams(shapes, "numpy").encode(levels, top) == (coded, decisions)


def test_one_stream_below_four_million_and_sixteen_at_most() -> None:
    assert len(Streams(((2000, 2000),)).parts) == 1
    assert len(Streams(((1500, 1500), (1500, 1500))).parts) == 2
    assert len(Streams(((1000, 1000),) * 200).parts) == 16
    assert len(Streams(((1, 90_000_000),)).parts) == 1


def test_tiers_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown kernel tier"):
        contexts.tier_of(1, "fast")  # type: ignore[arg-type]
    monkeypatch.setattr(contexts.tiers, "has_numba", lambda: False)
    monkeypatch.setattr(contexts, "has_c", lambda: False)
    assert contexts.tier_of(1 << 20) is portable_contexts
    assert not contexts.compiled()
    for tier in ("numba", "c"):
        with pytest.raises(ConfigError, match="is not installed"):
            contexts.tier_of(1, tier)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize(
    "env",
    [
        {"NUMBA_DISABLE_JIT": "1"},
        {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
        {"NPY_DISABLE_CPU_FEATURES": " ".join(WIDE)},
    ],
    ids=["without numba", "compiled for any processor", "without wide vectors"],
)
def test_the_same_bytes_in_another_process(env: dict[str, str]) -> None:
    """Of what the processor can, numpy then uses nothing beyond what it was built for, and numba what all have."""
    code = (
        "import os, numpy\n"
        "left = numpy.show_config(mode='dicts')['SIMD Extensions'].get('found', [])\n"
        "assert not set(left) & set(os.environ.get('NPY_DISABLE_CPU_FEATURES', '').split()), left\n"
        "from context_levels import cases, load\n"
        "from fedcomp.kernels.contexts import has_c, tier_of, tiers\n"
        "stored = load()\n"
        "for tier in ['numpy', *['numba'] * tiers.has_numba(), *['c'] * has_c()]:\n"
        "    for name, (levels, shapes, top) in cases().items():\n"
        "        given = shapes if tier == 'numpy' else numpy.array(shapes, numpy.int64)\n"
        "        assert tier_of(1, tier).encode(levels, given, top)[0].hex() == stored[name], (tier, name)\n"
        "from test_auto import frames\n"
        # Without any compiled tier the codec sends frames of another one.
        "print(''.join(frames()) if has_c() else '')\n"
    )
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "codecs"), str(here.parent.parent)]

    def run(more: dict[str, str]) -> str:
        base = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}
        done = subprocess.run([sys.executable, "-c", code], env=base, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(env) == run({})
