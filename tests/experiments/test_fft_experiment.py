"""The experiment ``fft``: what its rows send, what its rivals are, and that its claims catch what they are about."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import fedcomp.experiments.catalog.fft as module
from fedcomp.codecs import get_codec
from fedcomp.experiments.catalog.fft import (
    BUDGETS,
    COMPLEX,
    COSINES,
    EXPERIMENT,
    FEDAVG,
    FFT,
    GIVEN,
    LAYERS,
    NOISE,
    ORDERED,
    RISING,
    ROWS,
    STEPS,
    TOPK,
    WAVES,
    codec_of,
    complex_bins,
    errors,
    noise,
    rounding,
)
from fedcomp.experiments.conv_gradients import WORKERS, gradients
from fedcomp.experiments.findings import Say
from fedcomp.layout import Layout
from fedcomp.rng import Key


def config(*assignments: str) -> Any:
    return EXPERIMENT.configure(assignments=("seeds=2", "workers=1", *assignments))


def test_every_row_is_a_codec_of_its_own_and_rivals_send_as_many_numbers() -> None:
    made = {label: get_codec(codec_of(label, 40)) for label in ROWS}
    assert len(set(map(repr, made.values()))) == len(ROWS)
    layout = Layout.flat(10_000)
    shares = {
        label: codec.contraction(layout)
        for label, codec in made.items()
        if "15 %" in label and "memory" not in label and label != RISING
    }
    assert len(shares) == 3
    assert len(set(shares.values())) == 1
    # A quarter of the rounds each: half of the numbers, then all of them.
    assert codec_of(RISING, 40)["schedule"] == ((21, 0.5), (31, 1.0))
    assert codec_of(RISING, 1)["schedule"] == ((1, 1.0),)


@pytest.mark.parametrize("n", [64, 65])
def test_complex_bins_are_those_of_the_paper(n: int) -> None:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    np.testing.assert_allclose(complex_bins(x, 1.1), x, atol=1e-6)
    wave = np.cos(2 * np.pi * 5 * np.arange(n) / n).astype(np.float32)
    np.testing.assert_allclose(complex_bins(wave, 2 / n), wave, atol=1e-6)
    # One bin is two numbers.
    kept = np.fft.rfft(complex_bins(x, 10 / n))
    assert np.count_nonzero(np.abs(kept) > 1e-4) == 5


def test_errors_are_of_what_arrives_and_fall_with_the_budget() -> None:
    rng = np.random.default_rng(3)
    smooth = np.cumsum(rng.standard_normal(8 * 8 * 9)).reshape(3, 3, 8, 8).transpose(3, 2, 0, 1)
    found = {budget: errors(np.ascontiguousarray(smooth, np.float32), budget) for budget in BUDGETS}
    for name in (TOPK, GIVEN, WAVES, COMPLEX, COSINES, ORDERED):
        assert found[0.05][name] > found[0.1][name] > found[0.3][name] > 0
    assert found[0.05][WAVES] < 0.1 < 0.5 < found[0.05][TOPK]
    heavy = noise(NOISE[1], 0)
    assert errors(heavy, 0.1)[WAVES] > 1.2 * errors(heavy, 0.1)[TOPK]
    forms = rounding(heavy.reshape(-1))
    assert forms["uniform"] > 2 * forms["range"] > 0


def test_gradients_are_those_of_every_worker_at_the_step() -> None:
    found = gradients({1, 3}, seed=5)
    again = gradients({3}, seed=5)
    assert sorted(found) == [1, 3]
    assert all(len(workers) == WORKERS for workers in found.values())
    shapes = {name: g.shape for name, g in found[3][0].items()}
    assert (shapes["conv2"], shapes["conv3"]) == ((32, 16, 3, 3), (64, 32, 3, 3))
    assert sum(g.size for g in found[3][0].values()) == 29_066
    assert all(found[3][w][n].tobytes() == again[3][w][n].tobytes() for w in range(WORKERS) for n in shapes)
    assert found[3][0]["conv2"].tobytes() != found[3][1]["conv2"].tobytes()


GOOD = {TOPK: 0.4, GIVEN: 0.5, WAVES: 0.2, COMPLEX: 0.5, COSINES: 0.3, ORDERED: 0.3}


def made_up() -> dict[str, Any]:
    """What claims hold of."""
    by_budget = {f"{budget:g}": dict(GOOD) for budget in BUDGETS}
    found = {f"{layer}, step {step}": copy.deepcopy(by_budget) for layer in LAYERS for step in STEPS}
    for step in STEPS:
        found[f"conv3, step {step}"]["0.3"][WAVES] = 0.6
    found[NOISE[0]] = {b: {**GOOD, WAVES: 0.4} for b in by_budget}
    found[NOISE[1]] = {b: {**GOOD, WAVES: 0.6} for b in by_budget}
    return {"errors": found, "rounding": {f"step {s}": {"range": 1.0, "uniform": 3.0, "q8": 1.5} for s in STEPS}}


def failed(
    monkeypatch: pytest.MonkeyPatch, change: Any = None, accuracies: dict[str, float] | None = None
) -> list[str]:
    """Return the gating claims that fail on made-up figures."""

    def signals(seed: int, *, last: int) -> dict[str, Any]:
        found = made_up()
        if change is not None:
            change(found)
        return found

    def train(label: str, lr: float, seed: int, *, config: Any, tuning: bool = False) -> dict[str, Any]:
        settled = (accuracies or {}).get(label, 95.0) - abs(lr - 0.1)
        return {"points": [(1.0, settled, 10.0)], "settled": settled, "uplink": 1000.0 if label == FEDAVG else 100.0}

    monkeypatch.setattr(module, "signals", signals)
    monkeypatch.setattr(module, "train", train)
    return [claim.name for claim in module.measure(config(), {}, Say()).claims if claim.gate and not claim.ok]


def test_claims_catch_what_they_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed(monkeypatch) == []

    def worse(name: str, budget: str, method: str, value: float) -> Any:
        def change(found: dict[str, Any]) -> None:
            for signal, errors_ in found["errors"].items():
                if signal.startswith(name):
                    errors_[budget][method] = value

        return change

    for change, words in (
        (worse("conv2", "0.05", WAVES, 0.39), "conv2, 5 % of the numbers"),
        (worse("conv2", "0.05", GIVEN, 0.2), "over DFT, F,D,H,W"),
        (worse("conv3", "0.3", WAVES, 0.4), "conv3, 30 %"),
        (worse(NOISE[0], "0.1", COMPLEX, 0.4), "complex bins"),
        (worse(NOISE[0], "0.1", WAVES, 0.5), "less 1"),
        (worse(NOISE[1], "0.1", WAVES, 0.4), NOISE[1]),
        (lambda found: found["rounding"]["step 100"].update(uniform=1.5), "uniform codes"),
    ):
        names = failed(monkeypatch, change)
        assert len(names) == 1
        assert words in names[0]
    lost = failed(monkeypatch, accuracies={FFT: 80.0})
    assert len(lost) == 1
    assert "lost against FedAvg" in lost[0]


def test_noise_is_the_same_for_a_seed() -> None:
    for name in NOISE:
        assert noise(name, 1).tobytes() == noise(name, 1).tobytes() != noise(name, 2).tobytes()
        assert noise(name, 1).shape == (32, 16, 3, 3)
    assert Key(1, NOISE[0]) != Key(1, NOISE[1])
