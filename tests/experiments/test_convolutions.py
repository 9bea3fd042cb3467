"""The training that ``fft``, ``gradiveq`` and ``lgc`` share: whose gradients, of which images, and what is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedcomp.experiments.catalog import get_experiment
from fedcomp.experiments.studies.convolutions import WORKERS, Descent, gradients, mean_of
from fedcomp.experiments.tables import Training


def test_gradients_are_those_of_every_worker_along_the_mean() -> None:
    descent = Descent(3)
    for _, workers in gradients(3, 3):
        ours = descent.workers()
        assert len(ours) == WORKERS
        assert all(np.array_equal(a[n], b[n]) for a, b in zip(ours, workers, strict=True) for n in a)
        assert ours[0]["conv2"].tobytes() != ours[1]["conv2"].tobytes()
        descent.move(mean_of(ours))
    assert len(descent.losses) == 3
    assert descent.losses[0] == pytest.approx(np.log(10), abs=0.2)
    assert {n: g.shape for n, g in ours[0].items()} == {n: w.shape for n, w in descent.weights.items()}
    assert ours[0]["conv2"].shape == (32, 16, 3, 3)
    assert sum(g.size for g in ours[0].values()) == 29_066


def test_splits_do_not_meet() -> None:
    def held(kind: str, seed: int) -> set[bytes]:
        images, _ = Descent(seed, held_out=kind)._held
        return {image.numpy().tobytes() for image in images}

    assert held("test", 0) == held("test", 7)
    assert not held("test", 0) & held("validation", 0)
    assert len(held("nothing", 0)) == 0


def toy(rows: dict[str, str], **rivals: Any) -> Training:
    experiment = get_experiment("gradiveq")
    whole = replace(experiment, rows=rows, rivals={**experiment.rivals, **rivals})
    return Training.of(whole, whole.configure(rounds=8))


@pytest.mark.long
def test_a_full_basis_is_the_dense_training_and_bytes_are_counted() -> None:
    """A7.2, d = K: the same losses to float tolerance, whole trajectory."""
    basis = "basis codec.warmup=0 codec.sampling=4 codec.compression=2 codec.width=48 codec.loss=1e-9"
    training = toy({"dense": "codec codec.id=identity", "full": basis})
    dense, full = (training.run(label, 3, lr=0.02) for label in training.rows)
    assert full["loss"] == pytest.approx(dense["loss"], rel=1e-3)
    assert dense["uplink"] == 8 * dense["last"] > dense["dense"] == 8 * 4 * 4 * (144 + 4608 + 18_432)
    assert dense["basis"] == 0
    # Bases of two tensors with 48 directions, of conv1 with those of its nine slices, and a header.
    floats = 48 * (48 + 48 + 9)
    assert 4 * 4 * floats < full["basis"] < 4 * (4 * floats + 200)
    (counted, formula), *more = full["cycles"]
    assert not more
    assert counted == pytest.approx(formula, rel=1e-12)
    assert dense["points"][-1] == [8.0, dense["score"], float(dense["uplink"])]
    assert dense["tie"] == -dense["loss"]


def test_a_training_that_diverges_says_when() -> None:
    training = toy({"dense": "codec codec.id=identity"})
    found = training.run("dense", 0, lr=1e30)
    assert found["diverged"] > 1
    assert found["score"] == 0.0
