"""The benchmark beside peers: what they send comes back as they promise, and what is not installed gates nothing."""

from __future__ import annotations

import math
import sys
from functools import partial

import numpy as np
import pytest

from fedcomp.experiments.bench import peers
from fedcomp.experiments.bench.peers import METHODS
from fedcomp.kernels import select_topk
from fedcomp.measuring import Case, Found, run

# No multiple of a block or a bucket, and layers of unlike scale.
N = 3 * peers.BLOCK + 777
VALUES = np.random.default_rng(5).standard_t(4, N).astype(np.float32)
VALUES[: N // 3] *= np.float32(0.01)
K = math.ceil(peers.DENSITY * N)
EXACT = np.zeros(N, np.float32)
EXACT[select_topk(VALUES, K)] = VALUES[select_topk(VALUES, K)]


def there_and_back(name: str, values: np.ndarray = VALUES) -> tuple[int, np.ndarray]:
    data = METHODS[name].encode(values)
    decoded = METHODS[name].decode(data, values.size)
    assert decoded.dtype == np.float32
    assert decoded.shape == values.shape
    return len(data), decoded


@pytest.mark.parametrize(
    ("name", "each"), [(peers.TORCH, 12), (peers.NUMPY, 8), (peers.ZSTD, None), (peers.ZLIB, None), (peers.EXACT, None)]
)
def test_lists_send_the_largest_values_bit_for_bit(name: str, each: int | None) -> None:
    size, decoded = there_and_back(name)
    assert decoded.tobytes() == EXACT.tobytes()
    assert size == each * K if each else size < 8 * K


@pytest.mark.parametrize("levels", [7, 127])
def test_a_byte_for_each_coordinate_is_rounded_to_a_level_of_its_buckets_norm(levels: int) -> None:
    size, decoded = there_and_back(f"int8 of {levels} levels")
    buckets = -(-N // peers.BUCKET)
    assert size == N + 4 * buckets
    for start in range(0, N, peers.BUCKET):
        part = slice(start, start + peers.BUCKET)
        step = np.linalg.norm(VALUES[part].astype(float)) / levels
        # Not beyond the next level on either side, and never across zero.
        assert np.abs(decoded[part] - VALUES[part]).max() < 1.00001 * step
        assert np.abs(decoded[part] / step - np.rint(decoded[part] / step)).max() < 1e-4
        assert (decoded[part] * VALUES[part] >= 0).all()
    # Unbiased: the sum of N independent errors of less than a step each stays within a few of its deviations.
    ones = np.full(N, 0.3, np.float32)
    mean = there_and_back(f"int8 of {levels} levels", ones)[1].mean()
    assert mean == pytest.approx(0.3, rel=5 * math.sqrt(math.sqrt(peers.BUCKET) / levels / N))


def test_dynamic_levels_are_symmetric_with_the_finest_steps_near_zero() -> None:
    levels = peers.dynamic_levels()
    assert levels.size == np.unique(levels).size == 256
    assert (levels[0], levels[-1]) == (-levels[-2], 1.0)
    assert 0.0 in levels
    assert np.abs(levels[levels != 0]).min() == pytest.approx(0.55e-6)
    tops = levels[levels > 0.1]
    # 64 in the top decade, and 1.
    assert tops.size == 65
    assert np.diff(tops)[:-1] == pytest.approx(0.9 / 64, rel=1e-4)


def test_blocks_round_to_the_nearest_level_of_their_largest_magnitude() -> None:
    size, decoded = there_and_back(peers.BLOCKS)
    assert size == N + 4 * 4
    for start in range(0, N, peers.BLOCK):
        part = slice(start, start + peers.BLOCK)
        largest = np.abs(VALUES[part]).max()
        every = peers.dynamic_levels() * largest
        nearest = np.abs(VALUES[part][:, None] - every).min(axis=1)
        assert np.abs(np.abs(decoded[part] - VALUES[part]) - nearest).max() < 1e-6 * largest
    assert not there_and_back(peers.BLOCKS, np.zeros(N, np.float32))[1].any()


@pytest.mark.parametrize("name", [peers.UNIFORM, peers.QUANTILES])
def test_codebooks_hold_the_means_of_their_levels(name: str) -> None:
    size, decoded = there_and_back(name)
    assert size == N + 4 * 256
    found, coded = np.unique(decoded, return_inverse=True)
    means = np.bincount(coded, VALUES.astype(float)) / np.bincount(coded)
    assert found == pytest.approx(means, rel=1e-4, abs=1e-6)
    # Levels are stretches of the real line, so that decoding keeps the order of values.
    assert (np.diff(decoded[np.argsort(VALUES, kind="stable")]) >= 0).all()
    if name == peers.QUANTILES:
        assert np.abs(np.bincount(coded) - N / 256).max() <= 2
    else:
        away = (VALUES - VALUES.mean()) / VALUES.std(ddof=1)
        inside = np.abs(away) < 2.95
        assert np.abs(decoded - VALUES)[inside].max() <= 1.001 * 6 * VALUES.std(ddof=1) / 256
        # What lies beyond three standard deviations shares the last level on its side.
        assert [np.unique(decoded[side]).size for side in (away < -3, away > 3)] == [1, 1]
        assert not np.isin(decoded[inside], (decoded.min(), decoded.max())).any()
    assert not there_and_back(peers.UNIFORM, np.zeros(N, np.float32))[1].any()


def test_float16_halves_and_rounds_relatively() -> None:
    size, decoded = there_and_back("float16")
    assert size == 2 * N
    normal = np.abs(VALUES) > 6.2e-5
    assert (np.abs(decoded - VALUES)[normal] <= 2.0**-11 * np.abs(VALUES)[normal]).all()


@pytest.mark.long
def test_what_is_measured_is_what_was_sent() -> None:
    found = run([Case("", partial(peers._measure, "here", VALUES, 1))])
    rows = {row["method"]: row for row in found.rows if "method" in row}
    assert set(rows) == set(METHODS)
    error = {name: row["error"] for name, row in rows.items()}
    lost = 1 - np.sum(EXACT.astype(float) ** 2) / np.sum(VALUES.astype(float) ** 2)
    for name in (peers.EXACT, peers.TORCH, peers.NUMPY, peers.ZSTD, peers.ZLIB):
        assert error[name] == pytest.approx(lost, rel=1e-4), "the same values, so the same error"
    assert error[peers.EXACT] < error[peers.TWO_BITS] < found.of(peers.RIVAL, update="here") < 1
    # EDEN's table, one draw of two blocks and a tail.
    assert error["our EDEN, 4 bits"] == pytest.approx(0.0096, rel=0.1)
    # The same quantiser in both, but for the draws.
    for levels in (7, 127):
        assert error[f"our QSGD({levels})"] / error[f"int8 of {levels} levels"] == pytest.approx(1.0, abs=0.1)
    row = rows["float16"]
    assert (row["update"], row["n"], row["bytes"], row["times fewer"]) == ("here", N, 2 * N, 2.0)


def test_bytes_at_the_same_error_count_a_bit_for_a_quarter_of_it() -> None:
    found = Found()
    found.rows = [
        {"update": "u", "method": name, "n": 1000, "bytes": size, "error": error}
        for name, size, error in (("a", 1000, 0.01), ("b", 500, 0.01), ("c", 1000, 0.0025))
    ]
    assert peers.at_error(found, "u", "b", "a") == 0.5
    assert peers.at_error(found, "u", "c", "a") == pytest.approx(7 / 8)
    assert peers.at_error(found, "u", "a", "c") == pytest.approx(9 / 8)


@pytest.mark.slow
def test_updates_are_trained_from_keys() -> None:
    for name in peers.UPDATES:
        first, data = peers.captured(name, quick=True)
        assert first.dtype == np.float32
        assert np.isfinite(first).all()
        assert np.count_nonzero(first) > first.size / 20
        assert data
        assert first.tobytes() == peers.captured(name, quick=True)[0].tobytes()
        assert first.tobytes() != peers.captured(name, 1, quick=True)[0].tobytes()


def quick() -> tuple[Found, list[str]]:
    lines: list[str] = []
    return run(peers.cases(True), quick=True, say=lines.append), lines


@pytest.mark.long
def test_a_quick_run_measures_everything_and_gates_nothing() -> None:
    found, lines = quick()
    updates = (*peers.UPDATES, peers.CONTROL)
    rows = [(row["update"], row["method"]) for row in found.rows if "method" in row]
    assert rows == [(u, m) for u in updates for m in METHODS]
    assert {claim.ok for claim in found.claims} <= {True, False}
    assert not any(claim.gate for claim in found.claims)
    assert len(found.claims) == len(updates) * (2 + 2 * len(peers.LISTS) + 1 + len(peers.DENSE))
    assert [line.partition(",")[0] for line in lines] == list(updates)
    assert all(": " in line for line in lines[:-1]), "which data they were trained on"


@pytest.mark.slow
def test_a_peer_that_is_not_installed_is_one_line_and_gates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes every import fail, as it does where a library is not installed.
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setattr(peers, "UPDATES", {})
    found, lines = quick()
    assert lines[0] == "zstandard is not installed: pip install zstandard; what is compared with it is not measured"
    assert [row["method"] for row in found.rows if "method" in row] == [name for name in METHODS if name != peers.ZSTD]
    skipped = [claim for claim in found.claims if claim.ok is None]
    assert {claim.name.partition(" over ")[2] for claim in skipped} == {peers.ZSTD}
    full = [bound.claim(found, False) for bound in peers._bounds(peers.CONTROL, "")]
    assert all(claim.gate is (claim.ok is not None) for claim in full)


@pytest.mark.slow
def test_without_torch_only_the_control_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found, lines = quick()
    assert lines[0] == "torch is not installed: pip install torch; what is compared with it is not measured"
    assert [row["method"] for row in found.rows if "method" in row] == [name for name in METHODS if name != peers.TORCH]
    for claim in found.claims:
        of_torch = not claim.name.startswith(peers.CONTROL) or "torch" in claim.name
        assert (claim.ok is None) is of_torch
        assert claim.skipped == ("torch is not installed: pip install torch" if of_torch else "")
