"""The kernel benchmark's arithmetic: ratios per repetition, claims that fail when a kernel is slow."""

from __future__ import annotations

import numpy as np

from experiments.bench.kernels import DENSITIES, LAYERS, Measured, layered, measure


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


def test_every_method_is_measured() -> None:
    vector = layered(60_000)
    scales = [np.abs(layer).mean() for layer in np.array_split(vector, LAYERS)]
    assert max(scales) / min(scales) > 10
    for density in DENSITIES:
        rows = measure(vector, density, 2).rows()
        assert {row["method"] for row in rows} >= {"read pass", "top-k", "error feedback", "scatter-add", "torch.topk"}
        assert all(row["milliseconds"] >= 0 for row in rows)
