"""The kernel benchmark's arithmetic: ratios per repetition, claims that fail when a kernel is slow."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from fedcomp.experiments.bench import kernels
from fedcomp.experiments.bench import sparsifiers as other
from fedcomp.experiments.bench.kernels import DENSITIES, Measured, measure
from fedcomp.experiments.bench.readpass import LAYERS, Times, layered
from fedcomp.experiments.bench.worst import worst
from fedcomp.kernels import select_bins


def _recorded(slow: float) -> Measured:
    found = Measured(1000, 0.01)
    for noise in (1.0, 3.0, 2.0):
        times = {"top-k": 2.0 * slow, "top-k to bytes, Rice": 3.0 * slow, "error feedback": 4.0 * slow}
        times["top-k to bytes, auto"] = 3.5 * slow
        others = {"np.partition + flatnonzero": 25.0, "torch.topk": 170.0}
        found.add({name: noise * t for name, t in (times | others).items()}, limit=noise)
    return found


def test_noise_that_scales_everything_cancels() -> None:
    found = _recorded(slow=1.0)
    assert found.multiple("top-k") == 2.0
    assert found.ratio("torch.topk", "top-k") == 85.0
    assert all(claim.ok for claim in found.claims(against_limit=True))


def test_a_slow_kernel_fails_its_claims() -> None:
    failed = [claim.name for claim in _recorded(slow=13.0).claims(against_limit=True) if not claim.ok]
    assert len(failed) == 6
    assert all("density 0.01" in name for name in failed)


@pytest.mark.slow
def test_every_method_is_measured() -> None:
    vector = layered(60_000)
    scales = [np.abs(layer).mean() for layer in np.array_split(vector, LAYERS)]
    assert max(scales) / min(scales) > 10
    for density in DENSITIES:
        rows = measure(vector, density, 2).rows(density=density)
        assert {row["method"] for row in rows} >= {"read pass", "top-k", "error feedback", "scatter-add", "torch.topk"}
        assert all(row["milliseconds"] >= 0 for row in rows)


def test_a_slow_rotation_fails_its_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = layered(30_000)
    for goal, holds in ((1e9, True), (0.0, False)):
        monkeypatch.setattr(kernels, "ROTATION_GOAL", goal)
        found = kernels.rotation(vector, 2, lambda _line: None, against_limit=True)
        assert [row["method"] for row in found["rows"]] == ["rotation", "rotation back"]
        assert [claim.ok for claim in found["claims"]] == [holds, holds]
    # On a vector that fits in the cache reading costs next to nothing.
    assert not kernels.rotation(vector, 2, lambda _line: None, against_limit=False)["claims"]


def test_a_slow_projection_fails_its_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = layered(30_000)
    monkeypatch.setattr(kernels, "SMALL_MODEL", 900)
    for goal, holds in ((1e9, True), (0.0, False)):
        monkeypatch.setattr(kernels, "LOW_RANK_GOALS", dict.fromkeys(kernels.LOW_RANK_GOALS, goal))
        found = kernels.low_rank(vector, 2, lambda _line: None, against_limit=True)
        assert [(row["n"], row["method"]) for row in found["rows"]] == [
            (n, name) for n in (900, 173 * 173) for name in kernels.LOW_RANK_GOALS
        ]
        assert [claim.ok for claim in found["claims"]] == [holds, holds]
    assert not kernels.low_rank(vector, 2, lambda _line: None, against_limit=False)["claims"]


def test_a_slow_transform_fails_its_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = layered(30_000)
    monkeypatch.setattr(kernels, "SMALL_MODEL", 9_000)
    monkeypatch.setattr(kernels, "PRIME", 997)
    for goal, holds in ((1e9, True), (0.0, False)):
        monkeypatch.setattr(kernels, "SPECTRUM_GOAL", goal)
        found = kernels.spectra(vector, 2, lambda _line: None, against_limit=True)
        assert [row["n"] for row in found["rows"]] == [60 * 128] * 2 + [60 * 448] * 2 + [997] * 2
        assert [claim.ok for claim in found["claims"]] == [holds, holds]
    assert not kernels.spectra(vector, 2, lambda _line: None, against_limit=False)["claims"]


def test_a_basis_of_slices_is_measured_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SMALL_MODEL", 9_000)
    rows = kernels.sliced(layered(30_000), 2, lambda _line: None)
    assert [(row["n"], row["method"].rpartition(" ")[2]) for row in rows] == [
        (n, which) for n in (9 * 31**2, 9 * 57**2) for which in ("encode", "decode")
    ]


def test_latents_are_measured_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SMALL_MODEL", 20_000)
    rows = kernels.latents(layered(50_000), 2, lambda _line: None)
    assert [(row["n"], row["method"].rpartition(" to ")[2]) for row in rows] == [
        (n, which) for n in (20_000, 50_000) for which in ("bytes", "values")
    ]


@pytest.mark.slow
def test_without_torch_what_is_compared_with_it_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes every import of torch fail, as it does where torch is not installed.
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(kernels, "layered", lambda _size: layered(30_000))
    monkeypatch.setattr(kernels, "worst", lambda *_, **__: {"rows": [], "claims": []})
    lines: list[str] = []
    found = kernels.run(quick=True, progress=lines.append)
    skipped = [claim for claim in found["claims"] if claim.ok is None]
    assert len(skipped) == len([claim for claim in found["claims"] if "torch" in claim.name]) > 2
    assert {(claim.skipped, claim.gate) for claim in skipped} == {("torch is not installed: pip install torch", False)}
    assert sum("torch" in line for line in lines) == 1
    assert not [row for row in found["rows"] if "torch" in row["method"]]
    assert [claim for claim in found["claims"] if claim.ok is not None]


@pytest.mark.long
def test_inputs_that_are_hard_to_rank_are_measured_beside_the_usual() -> None:
    """Every input at every density has a row per call; each claim names the slowest of them."""
    found = worst(layered(30_000), 1, lambda _line: None, claimed=True)
    inputs = {row["input"] for row in found["rows"]}
    assert len(inputs) == 10
    assert len(found["rows"]) == 10 * 3 * 2
    for claim in found["claims"]:
        assert any(claim.name.endswith(name) for name in inputs)
        assert claim.value > 0
    assert not worst(layered(30_000), 1, lambda _line: None, claimed=False)["claims"]


def _others_recorded(slow: float) -> tuple[Times, Times]:
    """Times of exactly the figures the bounds come from, times ``slow``; torch takes forty read passes."""
    by_density, adaptive = Times(1000), Times(1000)
    for noise in (1.0, 3.0, 2.0):
        figures = {"chunk top-1": other.CHUNKS[0.01]}
        figures |= {f"SIDCo-E, {m} stage{'s' if m > 1 else ''}": figure for m, figure in other.SIDCO[0.01].items()}
        peers = {f"{name}, torch": 40.0 for name in figures}
        times = {name: slow * figure for name, figure in figures.items()} | peers
        by_density.add({name: noise * t for name, t in times.items()}, noise)
        adaptive.add({"AdaComp select": noise * slow * other.ADAPTIVE[50], "AdaComp step": noise * slow * 6.0}, noise)
    return by_density, adaptive


def test_the_other_sparsifiers_fail_when_slow() -> None:
    """At the measured figures every claim holds, beyond the slack every bound fails, and so does torch's at last."""
    for slow, failed_bounds, failed_peers in ((1.0, 0, 0), (1.4, 6, 0), (11.0, 6, 4)):
        times, adaptive = _others_recorded(slow)
        claims = other.density_claims(times, 0.01, against_limit=True) + other.adaptive_claims(adaptive, 50)
        assert len(claims) == 10
        assert all(claim.gate for claim in claims)
        failed = [claim.name for claim in claims if not claim.ok]
        assert sum("read passes" in name for name in failed) == failed_bounds
        assert sum("torch" in name for name in failed) == failed_peers
    assert not any("read passes" in claim.name for claim in other.density_claims(times, 0.01, against_limit=False))


@pytest.mark.slow
def test_the_torch_forms_do_the_same() -> None:
    """A comparison with something that does less would be worth nothing."""
    import torch

    vector = layered(60_003)
    tensor = torch.from_numpy(vector)
    for length in (10, 100, 1000):
        np.testing.assert_array_equal(other.chunks_torch(tensor, length).numpy(), select_bins(vector, length))
    for stages in (1, 2, 4):
        ours, theirs = other.sidco(vector, 0.01, stages), other.sidco_torch(tensor, 0.01, stages).numpy()
        assert ours.size > 100
        # Their means are float32 sums: thresholds differ in the last digits.
        assert np.setxor1d(ours, theirs).size <= 2


@pytest.mark.slow
def test_every_sparsifier_is_measured() -> None:
    vector = layered(30_000)
    told: list[str] = []
    for against_limit in (False, True):
        result = other.sparsifiers(vector, 2, told.append, against_limit=against_limit)
        methods = {(row.get("density"), row.get("bin length"), row["method"]) for row in result["rows"]}
        assert len(methods) == len(result["rows"]) == 2 * (4 + 4 + 3) + 2 * 2
        assert len(result["claims"]) == (11 if not against_limit else 11 + 11 + 4)
    assert len(told) == 2 * 5
    assert 1.0 < other.adaptive(vector, 50)[1] < 6.0
