"""The kernel benchmark: claims that fail when a kernel is slow, and that every case is measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
import pytest

from fedcomp.experiments.bench import kernels
from fedcomp.experiments.bench.readpass import LAYERS, layered
from fedcomp.kernels import select_bins
from fedcomp.measuring import Case, Claim, Found, Times, run


def claims(case: Case, passes: Mapping[str, float]) -> list[Claim]:
    """Return what is claimed of methods that take so many read passes, under load that slows everything alike."""
    found = Found()
    found.times = Times({}, 0)
    found.times.limits = [1.0, 3.0, 2.0]
    found.times.seconds = {name: [noise * p for noise in found.times.limits] for name, p in passes.items()}
    return [bound.claim(found, False) for bound in case.bounds]


def test_noise_that_scales_everything_cancels_and_a_slow_kernel_fails_its_claims() -> None:
    case = kernels.ranked(layered(1000), 1, 0.01)
    ours = {"top-k": 2.0, "top-k to bytes, Rice": 3.0, "error feedback": 4.0, "top-k to bytes, auto": 3.5}
    theirs = {"np.partition + flatnonzero": 25.0, "torch.topk": 170.0}
    right = claims(case, ours | theirs)
    assert all(claim.ok for claim in right)
    assert [claim.value for claim in right if "times faster" in claim.name] == [85.0]
    failed = [c.name for c in claims(case, {name: 13.0 * p for name, p in ours.items()} | theirs) if not c.ok]
    assert len(failed) == 6
    assert all("density 0.01" in name for name in failed)


def test_the_other_sparsifiers_fail_when_slow() -> None:
    """At the measured figures every claim holds, beyond the slack every bound fails, and so does torch's at last."""
    vector = layered(1000)
    density, bins = kernels.of_density(vector, 1, 0.01), kernels.adaptive(vector, 1, 50)
    for slow, failed_bounds, failed_peers in ((1.0, 0, 0), (1.4, 6, 0), (11.0, 6, 4)):
        figures = {name: slow * figure for name, figure in kernels.FIGURES[0.01].items()}
        found = claims(density, figures | {f"{name}, torch": 40.0 for name in figures})
        found += claims(bins, {"AdaComp select": slow * kernels.ADAPTIVE[50][0], "AdaComp step": slow * 6.0})
        assert len(found) == 10
        assert all(claim.gate for claim in found)
        failed = [claim.name for claim in found if not claim.ok]
        assert sum("read passes" in name for name in failed) == failed_bounds
        assert sum("torch" in name for name in failed) == failed_peers


@pytest.mark.slow
def test_every_case_is_measured_and_goals_are_claimed_of_the_whole_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = layered(60_000)
    scales = [np.abs(layer).mean() for layer in np.array_split(vector, LAYERS)]
    assert max(scales) / min(scales) > 10
    for name, value in (("SMALL", 10_000), ("PRIME", 997), ("layered", lambda _: vector), ("worst", lambda *_: ())):
        monkeypatch.setattr(kernels, name, value)
    told: list[str] = []
    found = run(kernels.cases(True), say=told.append)
    modelled = 3 * len(kernels.MODELLED) + 1
    assert len(told) == len(kernels.RANKED) + 1 + 2 + 3 + len(kernels.FIGURES) + len(kernels.ADAPTIVE) + modelled + 2
    for density in kernels.RANKED:
        methods = {row["method"] for row in found.rows if row.get("density") == density}
        assert methods >= {"read pass", "top-k", "error feedback", "scatter-add", "torch.topk", "chunk top-1"}
    sizes = {n: [row["n"] for row in found.rows if row["method"].startswith(n)] for n in ("FFT", "PowerSGD")}
    assert sizes["FFT"] == [60 * 128] * 2 + [60 * 960] * 2 + [997] * 2
    assert sizes["PowerSGD"] == [100**2] * 2 + [244**2] * 2
    assert all(row["milliseconds"] >= 0 for row in found.rows)
    assert sum("streams at a time" in row["method"] for row in found.rows) == 2 * 2 * len(kernels.MODELLED)
    assert all(1.0 < row["sent per bin"] < 12.0 for row in found.rows if "sent per bin" in row)
    names = [claim.name for claim in found.claims]
    assert len(set(names)) == len(names)
    assert all(names.count(f"{name}: read passes") == 1 for name in kernels.LIMITS)


@pytest.mark.slow
def test_without_torch_what_is_compared_with_it_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes every import of torch fail, as it does where torch is not installed.
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(kernels, "layered", lambda _size: layered(30_000))
    monkeypatch.setattr(kernels, "worst", lambda *_: ())
    found = run(kernels.cases(True), quick=True)
    skipped = [claim for claim in found.claims if claim.ok is None]
    assert len(skipped) == len([claim for claim in found.claims if "torch" in claim.name]) > 2
    assert {(claim.skipped, claim.gate) for claim in skipped} == {("torch is not installed: pip install torch", False)}
    assert not [row for row in found.rows if "torch" in row["method"]]
    assert [claim for claim in found.claims if claim.ok is not None]


@pytest.mark.long
def test_inputs_that_are_hard_to_rank_are_measured_beside_the_usual() -> None:
    """A row for every input at every density; claims are about the slowest of them."""
    found = run(kernels.worst(layered(30_000), 1))
    assert len({row["input"] for row in found.rows}) == 10
    assert len(found.rows) == 10 * 2
    assert len(found.claims) == 8
    slow = next(claim for claim in found.claims if claim.name.startswith("top-k at density 0.1,"))
    assert slow.value == max(row["top-k"] for row in found.rows if row["density"] == 0.1)


@pytest.mark.slow
def test_the_torch_forms_do_the_same() -> None:
    """A comparison with something that does less would be worth nothing."""
    import torch

    vector = layered(60_003)
    tensor = torch.from_numpy(vector)
    for length in (10, 100, 1000):
        np.testing.assert_array_equal(kernels.chunks_torch(tensor, length).numpy(), select_bins(vector, length))
    for stages in (1, 2, 4):
        ours, theirs = kernels.sidco(vector, 0.01, stages), kernels.sidco_torch(tensor, 0.01, stages).numpy()
        assert ours.size > 100
        # Their means are float32 sums: thresholds differ in the last digits.
        assert np.setxor1d(ours, theirs).size <= 2
