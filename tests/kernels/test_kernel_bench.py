"""The kernel benchmark's arithmetic: ratios per repetition, claims that fail when a kernel is slow."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from fedcomp.experiments.bench import kernels
from fedcomp.experiments.bench import sparsifiers as other
from fedcomp.experiments.bench.readpass import LAYERS, Times, layered, measured
from fedcomp.experiments.bench.worst import worst
from fedcomp.kernels import select_bins


def _recorded(slow: float) -> Times:
    found = Times(1000)
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
    case = kernels.ranked(layered(1000), 0.01)
    assert all(claim.ok for claim in case.claims(found, against_limit=True))
    # On a vector that fits in the cache reading costs next to nothing.
    assert not any("read passes" in claim.name for claim in case.claims(found, against_limit=False))


def test_a_slow_kernel_fails_its_claims() -> None:
    claims = kernels.ranked(layered(1000), 0.01).claims(_recorded(slow=13.0), against_limit=True)
    failed = [claim.name for claim in claims if not claim.ok]
    assert len(failed) == 6
    assert all("density 0.01" in name for name in failed)


@pytest.mark.slow
def test_every_case_is_measured_and_goals_are_claimed_of_the_whole_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = layered(60_000)
    scales = [np.abs(layer).mean() for layer in np.array_split(vector, LAYERS)]
    assert max(scales) / min(scales) > 10
    monkeypatch.setattr(kernels, "SMALL_MODEL", 9_000)
    monkeypatch.setattr(kernels, "PRIME", 997)
    told: list[str] = []
    rows, claims = measured(kernels.cases(vector), 1, told.append, against_limit=True)
    assert len(told) == len(kernels.DENSITIES) + 1 + 2 + 3 + 2 + 2 + len(other.SIDCO) + len(other.ADAPTIVE)
    for density in kernels.DENSITIES:
        methods = {row["method"] for row in rows if row.get("density") == density}
        assert methods >= {"read pass", "top-k", "error feedback", "scatter-add", "torch.topk", "chunk top-1"}
    sizes = {name: [row["n"] for row in rows if row["method"].startswith(name)] for name in ("FFT", "PowerSGD", "LGC")}
    assert sizes["FFT"] == [60 * 128] * 2 + [60 * 960] * 2 + [997] * 2
    assert sizes["PowerSGD"] == [94**2] * 2 + [244**2] * 2
    assert sizes["LGC"] == [9_000] * 2 + [60_000] * 2
    assert all(row["milliseconds"] >= 0 for row in rows)
    names = [claim.name for claim in claims]
    assert len(set(names)) == len(names)
    for name in ("rotation back", *kernels.LOW_RANK_GOALS, "FFT, layers, sum of spectra to update"):
        assert names.count(f"{name}: read passes") == 1


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


def test_the_other_sparsifiers_fail_when_slow() -> None:
    """At the measured figures every claim holds, beyond the slack every bound fails, and so does torch's at last."""
    vector = layered(1000)
    cases = (other.of_density(vector, 0.01), other.adaptive(vector, 50))
    figures = {"chunk top-1": other.CHUNKS[0.01], "AdaComp select": other.ADAPTIVE[50], "AdaComp step": 6.0}
    figures |= {f"SIDCo-E, {m} stage{'s' if m > 1 else ''}": figure for m, figure in other.SIDCO[0.01].items()}
    for slow, failed_bounds, failed_peers in ((1.0, 0, 0), (1.4, 6, 0), (11.0, 6, 4)):
        times = Times(1000)
        for noise in (1.0, 3.0, 2.0):
            peers = {f"{name}, torch": noise * 40.0 for name in figures}
            times.add({name: noise * slow * figure for name, figure in figures.items()} | peers, noise)
        claims = [claim for case in cases for claim in case.claims(times, against_limit=True)]
        assert len(claims) == 10
        assert all(claim.gate for claim in claims)
        failed = [claim.name for claim in claims if not claim.ok]
        assert sum("read passes" in name for name in failed) == failed_bounds
        assert sum("torch" in name for name in failed) == failed_peers
    assert 1.0 < cases[1].columns["sent per bin"] < 6.0


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
