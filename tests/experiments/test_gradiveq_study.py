"""The study ``gradiveq``: its trainings send real frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedcomp.codecs import GradiVeQ, get_codec
from fedcomp.experiments.conv_gradients import Training, gradients, mean_of
from fedcomp.experiments.studies.gradiveq import (
    DENSE,
    KINDS,
    LAYERS,
    LAYOUTS,
    POOLED,
    RIVALS,
    ROWS,
    Aggregation,
    Sender,
    fits,
    layout_of,
    times,
    train,
)
from fedcomp.rng import Key


def vectors(layout: Any, number: int, count: int = 4) -> list[np.ndarray]:
    drawn = Key(0, "toy", number).generator().standard_normal((count, layout.size))
    return list(drawn.astype(np.float32))


def toy() -> Any:
    shapes = {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "conv3": (64, 32, 3, 3)}
    return layout_of({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})


def test_rows_are_codecs_of_their_own_and_rivals_remember() -> None:
    made = {label: get_codec(dict(row.codec)) for label, row in ROWS.items()}
    assert len({(repr(made[label]), row.sampling) for label, row in ROWS.items()}) == len(ROWS)
    assert all(isinstance(made[label], GradiVeQ) == bool(row.sampling) for label, row in ROWS.items())
    assert all(made[rival].remembers for rival in RIVALS)
    # The published eighth, unless a row says otherwise.
    assert made[POOLED].most * 8 == made[POOLED].width


def test_an_exchange_is_the_mean_until_it_compresses_and_counts_real_frames() -> None:
    layout, row = toy(), Sender({"id": "gradiveq", "width": 512, "most": 64, "loss": 1e-6}, 10, 2)
    exchange = Aggregation(row, layout, 4, seed=1, warm_up=1)
    for number in range(1, 15):
        sent = vectors(layout, number)
        arrived = exchange.step(number, sent)
        exact = np.mean(sent, axis=0, dtype=np.float64)
        off = np.linalg.norm(arrived - exact) / np.linalg.norm(exact)
        assert (off > 0.3) == (number in (12, 13)), number
    dense, short = exchange.sent[0], exchange.sent[11]
    assert exchange.sent == [dense] * 11 + [short] * 2 + [dense]
    assert exchange.uplink == 4 * sum(exchange.sent)
    # 9 and 36 slices of 64 coefficients, and 144 elements of conv1.
    assert 4 * (45 * 64 + 144) < short < 4 * (45 * 64 + 144) + 200
    (counted, formula), *more = exchange.cycles()
    assert not more
    assert counted == pytest.approx(formula, rel=1e-12)
    assert counted == pytest.approx(12 * dense / (10 * dense + 2 * short))
    assert 4 * 2 * 512 * 64 * 4 < exchange.basis_bytes < 4 * (2 * 512 * 64 * 4 + 200)


def test_grids_are_counted_and_ring_and_star_agree() -> None:
    layout, row = toy(), Sender({"id": "gradiveq", "width": 512, "most": 64, "loss": 1e-6, "levels": 7}, 10, 2)
    exchange = Aggregation(row, layout, 4, seed=1, warm_up=0)
    for number in range(1, 13):
        exchange.step(number, vectors(layout, number))
    assert exchange.grids_agree
    assert exchange.uplink == 4 * sum(exchange.sent) + 2 * 4 * 2 * 4
    assert exchange.sent[-1] < exchange.sent[0] / 15


@pytest.mark.long
def test_a_full_basis_is_the_dense_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A7.2, d = K: the same losses to float tolerance, whole trajectory."""
    full = Sender({"id": "gradiveq", "width": 48, "loss": 1e-9, "order": "HWFD"}, 4, 20)
    monkeypatch.setitem(ROWS, "full", full)  # type: ignore[arg-type]
    dense, found = (train(label, 0.02, 3, steps=8) for label in (DENSE, "full"))
    assert found["loss"] == pytest.approx(dense["loss"], rel=1e-3)
    assert found["compressed"] >= 1
    assert dense["uplink"] == 8 * 4 * dense["first"]


def test_the_training_is_the_one_of_the_gradients_and_splits_do_not_meet() -> None:
    training, found = Training(3), gradients([1, 3], seed=3)
    for step in (1, 2, 3):
        workers = training.workers()
        if step in found:
            for ours, theirs in zip(workers, found[step], strict=True):
                assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
        training.move(mean_of(workers))
    assert training.losses[0] == pytest.approx(np.log(10), abs=0.2)

    def held(kind: str, seed: int) -> set[bytes]:
        images, _ = Training(seed, held_out=kind)._held
        return {image.numpy().tobytes() for image in images}

    assert held("test", 0) == held("test", 7)
    assert not held("test", 0) & held("validation", 0)
    assert len(held("nothing", 0)) == 0


@pytest.mark.long
def test_bases_are_measured_after_their_window() -> None:
    found = fits(2, 0, sampled=3, later=2)
    assert set(found["missed"]) == {f"{o}/{k}/{layer}" for o in LAYOUTS for k in KINDS for layer in LAYERS}
    assert all(0.0 < share < 3.0 for share in found["missed"].values())
    assert 0.0 < found["apart"] < 2e-6


def test_a_code_that_can_be_added_gains_more_at_the_same_ratio() -> None:
    for count in (4, 16):
        at = times(count)
        assert at["summable"] < min(at["hop by hop"], at["gathered"], at["ring"])
