"""Errors of transforms on gradients of convolutions and on noise, and of 8-bit formats on whole gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import repetitions, table
from fedcomp.experiments.tables import Found, of_codec

if TYPE_CHECKING:
    from fedcomp.codecs import Codec
    from fedcomp.program import System

BUDGETS: Final = (0.05, 0.1, 0.3)
"""Budgets: the fraction of real numbers that may be sent."""

STEPS: Final = (10, 100, 300, 690)
"""Steps of the training whose gradients are measured."""

LAYERS: Final = ("conv2", "conv3")
NOISE: Final = ("normal noise", "t(3) noise")

TOPK: Final = "top-k"
GIVEN: Final = "DFT, F,D,H,W"
WAVES: Final = "DFT, H,W,D,F"
COMPLEX: Final = "complex bins, H,W,D,F"
COSINES: Final = "DCT, F,D,H,W"
ORDERED: Final = "DCT, H,W,D,F"


def rising(density: float, order: str, rounds: int) -> System:
    """Return the program that sends more waves in the second half of the given number of rounds."""
    half, late = 1 + rounds // 2, 1 + 3 * rounds // 4
    # A run too short for both stages has only the last.
    stages = ((half, 0.5), (late, 1.0)) if late > half else ((late, 1.0),)
    return of_codec("fft", density=density, order=order, schedule=stages)


def cosines(density: float, values: str, feedback: bool = False) -> System:
    """Return the program of top-k of cosines, in the axis order that suits it: chunks cut waves along all filters."""
    topk = {"id": "topk", "density": density, "scope": "layer", "values": values}
    return of_codec("domain", feedback, transform={"id": "dct", "chunk": 1024}, codec=topk)


def few_waves(found: Found) -> Studied:
    """Compare transforms on gradients and noise, and 8-bit forms on gradients."""
    shared = {"last": int(found.config.settings["last_step"])}
    looked = found.sweep(signals, {"seed": list(repetitions(found.config))}, "gradients", **shared)

    def error(names: Sequence[str], budget: float, method: str) -> float:
        return mean(r.errors[name][f"{budget:g}"][method] for r in looked for name in names)

    def rounded(name: str, form: str) -> float:
        return mean(r.rounding[name][form] for r in looked)

    of = {layer: [f"{layer}, step {step}" for step in STEPS] for layer in LAYERS} | {name: [name] for name in NOISE}
    quantities = {
        f"{name}, {100 * budget:g} %: error of {method} over {other}'s": error(at, budget, method)
        / error(at, budget, other)
        for name, at in of.items()
        for budget in BUDGETS
        for method, other in ((WAVES, TOPK), (COMPLEX, TOPK), (WAVES, GIVEN))
    }
    apart = f"{NOISE[0]}, 10 %: error of {WAVES} over {TOPK}'s"
    whole = [f"step {step}" for step in STEPS]
    eight = {
        f"8 bits: error of {form} over that of range floats, least of all steps": min(
            rounded(step, code) / rounded(step, "range") for step in whole
        )
        for form, code in (("uniform codes", "uniform"), ("q8", "q8"))
    }
    by_signal: dict[str, Any] = {
        "signal": lambda at: at[0],
        "numbers sent": lambda at: at[1],
        **{
            method: (lambda at, method=method: round(error([at[0]], at[1], method), 3))
            for method in (TOPK, GIVEN, WAVES, COMPLEX, COSINES, ORDERED)
        },
    }
    by_form: dict[str, Any] = {
        "gradient": str,
        "range float, 8 bits, 4 of mantissa": lambda name: rounded(name, "range"),
        "uniform, 8 bits": lambda name: rounded(name, "uniform"),
        "q8, a scale for every 256": lambda name: rounded(name, "q8"),
        "uniform over range": lambda name: round(rounded(name, "uniform") / rounded(name, "range"), 2),
    }
    return Studied(
        quantities={**quantities, **eight, f"{apart}, less 1": abs(quantities[apart] - 1.0)},
        tables=[
            table(
                "Squared error over energy at so many real numbers",
                by_signal,
                [(name, budget) for names in of.values() for name in names for budget in BUDGETS],
                "Mean gradients of four workers at a step of training, of conv2, (32, 16, 3, 3), and conv3, (64, 32, "
                "3, 3); noise of the shape of conv2. Means over seeds. In complex bins, real and imaginary part count "
                "as two numbers.",
            ),
            table(
                "Squared error over energy of 8-bit values, a worker's whole gradient as one vector",
                by_form,
                whole,
                "Range floats and uniform codes have one range for all values. q8 has a scale for every 256 values, "
                "which takes an eighth of a bit per value.",
            ),
        ],
    )


def complex_bins(values: NDArray[np.float32], density: float) -> NDArray[np.float32]:
    """Return the decoded values when the largest complex bins are sent as published, with real and imaginary part.

    A bin counts as two numbers and is selected by its magnitude. The weight 2 of all bins except the first and last is
    ignored.
    """
    bins = np.fft.rfft(values.astype(np.float64))
    kept = np.argsort(-np.abs(bins), kind="stable")[: max(1, math.ceil(density * values.size / 2))]
    sparse = np.zeros_like(bins)
    sparse[kept] = bins[kept]
    return np.fft.irfft(sparse, values.size).astype(np.float32)


def errors(values: NDArray[np.float32], density: float) -> dict[str, float]:
    """Return by method the squared error over the energy of ``values``, a convolution of shape (F, D, H, W)."""
    from fedcomp.codecs import DCT, DFT, Domain, TopK
    from fedcomp.layout import Layout, SmallDense, Update
    from fedcomp.rng import Key

    layout, topk = Layout.of({"conv": values}, SmallDense(min_size=1)), TopK(density)
    flat = values.reshape(-1)
    methods: dict[str, Codec] = {
        TOPK: topk,
        GIVEN: Domain(DFT(), topk),
        WAVES: Domain(DFT(order="HWDF"), topk),
        COSINES: Domain(DCT(1024), topk),
        ORDERED: Domain(DCT(1024, order="HWDF"), topk),
    }

    def left(arrived: NDArray[np.float32], sent: NDArray[np.float32]) -> float:
        return float(np.square(arrived.astype(np.float64) - sent).sum() / np.square(sent.astype(np.float64)).sum())

    found = {}
    for name, codec in methods.items():
        frame, _ = codec.encode(Update(flat.copy(), layout), {}, Key(0))
        found[name] = left(codec.decode(frame, layout), flat)
    ordered = np.ascontiguousarray(values.transpose(2, 3, 1, 0)).reshape(-1)
    return found | {COMPLEX: left(complex_bins(ordered, density), ordered)}


def rounding(values: NDArray[np.float32]) -> dict[str, float]:
    """Return the squared error over the energy of 8-bit forms of all ``values``."""
    from fedcomp import wire

    x = values.astype(np.float64)
    forms: dict[str, wire.Values] = {
        "range": wire.RangeFloat.quantise(values, 8, 4),
        "uniform": wire.Uniform.quantise(values, 8),
        # One scale for every 256 values.
        "q8": wire.QsgdLevels.nearest(values, 127, 256),
    }
    return {name: float(np.square(form.decode() - x).sum() / (x @ x)) for name, form in forms.items()}


def noise(name: str, seed: int) -> NDArray[np.float32]:
    """Return noise of the shape of conv2."""
    from fedcomp.rng import Key

    rng, shape = Key(seed, name).generator(), (32, 16, 3, 3)
    drawn = rng.standard_normal(shape) if name == NOISE[0] else rng.standard_t(3, shape)
    return drawn.astype(np.float32)


def signals(seed: int, *, last: int) -> dict[str, Any]:
    """Return the errors of all methods on the gradients of a training and on noise, and the errors of 8-bit forms.

    If a training ends after ``last`` steps, its last gradient replaces the later ones.
    """
    from fedcomp.experiments.studies.convolutions import gradients, mean_of

    at = {step: min(step, last) for step in STEPS}
    found = {number: workers for number, workers in gradients(seed, max(at.values())) if number in at.values()}
    by_signal = {
        f"{layer}, step {step}": _by_budget(mean_of(found[at[step]])[layer]) for step in STEPS for layer in LAYERS
    }
    by_signal |= {name: _by_budget(noise(name, seed)) for name in NOISE}
    whole = {step: np.concatenate([g.reshape(-1) for g in found[at[step]][0].values()]) for step in STEPS}
    return {"errors": by_signal, "rounding": {f"step {step}": rounding(values) for step, values in whole.items()}}


def _by_budget(values: NDArray[np.float32]) -> dict[str, dict[str, float]]:
    return {f"{budget:g}": errors(values, budget) for budget in BUDGETS}
