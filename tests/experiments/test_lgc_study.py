"""The study ``lgc``: its trainings send real frames."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.codecs import ScaleCom
from fedcomp.experiments.catalog.lgc import _RIVALS, EXPERIMENT
from fedcomp.experiments.central import Sending
from fedcomp.experiments.studies.lgc import (
    BEST,
    COPY,
    DENSITY,
    EXACT,
    FULL,
    INT8,
    OWN,
    RAW,
    RING_BYTES,
    SHARED,
    TOP_QUARTER,
    ZEROS,
    OneForAll,
    codings,
)
from fedcomp.experiments.tables import Training, rival
from fedcomp.layout import EndsDense, Layout
from fedcomp.rng import Key
from fedcomp.systems.shared_support import SharedSupport

SHAPES = {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "conv3": (64, 32, 3, 3), "linear": (10, 576)}
LAYOUT = Layout.of({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, EndsDense())


def vectors(number: int, count: int = 4) -> list[np.ndarray]:
    return list(Key(0, "toy", number).generator().standard_normal((count, LAYOUT.size)).astype(np.float32))


def training(rounds: int) -> Training:
    return Training.of(EXPERIMENT, EXPERIMENT.configure(rounds=rounds))


def test_rivals_send_no_more_in_the_last_stage() -> None:
    """From real frames, all parts counted: latents beside 8 bits, innovations and latents beside one node's values."""
    last: dict[str, int] = {}
    rows = training(8)
    assert {label for label, text in rows.rows.items() if text.startswith("lgc ")} == set(_RIVALS)
    for label in {*_RIVALS, *_RIVALS.values(), FULL}:
        sending = Sending(rival(rows.spec(label), rows), LAYOUT, 4, 0)
        for number in range(1, 9):
            _, cost = sending.send(number, vectors(number))
        last[label] = cost.uplink - sending.local.state.get("spared", 0)
    for label, other in _RIVALS.items():
        assert last[other] <= 1.02 * last[label], (label, other)
    assert last[EXACT] < 0.75 * last[FULL]


def test_one_node_speaks_for_all() -> None:
    sent, weights = vectors(1), [1.0, 1.0, 2.0, 4.0]
    costs = {}
    for kind in (SharedSupport, OneForAll):
        sending = Sending(kind(ScaleCom(DENSITY)), LAYOUT, 4, 0, weights.__getitem__)
        _, costs[kind] = sending.send(3, sent)
    local = sending.local
    end = LAYOUT.compressed_size
    chosen = np.flatnonzero(local.model[:end])
    np.testing.assert_array_equal(local.model[chosen], sent[2][chosen])
    assert chosen.size == sum(-(-t.size * 5 // 100) for t in LAYOUT.compressed)
    mean = np.average([vector[end:] for vector in sent], axis=0, weights=weights)
    np.testing.assert_allclose(local.model[end:], mean, rtol=1e-5, atol=1e-6)
    for vector, client in zip(sent, local.clients.values(), strict=True):
        assert not client.memory["memory"][chosen].any()
        rest = np.setdiff1d(np.arange(end), chosen)
        np.testing.assert_array_equal(client.memory["memory"][rest], vector[rest])
    assert costs[OneForAll].uplink - local.state["spared"] < 0.5 * costs[SharedSupport].uplink


@pytest.mark.long
def test_a_training_has_three_stages_and_counts_weights_apart() -> None:
    ours = training(20).run("LGC, server", 3, lr=0.02)
    # These have one stage.
    plain, dense = (training(2).run(label, 3, lr=0.02) for label in (FULL, "dense"))
    assert ours["last"] < plain["last"] < dense["last"]
    assert ours["weights"] == 4 * 692_172
    assert plain["weights"] == 0
    assert ours["dense"] == 10 * plain["dense"] == 20 * 4 * 4 * 29_066
    # One dense step, nine of values and ten of latents.
    assert ours["uplink"] > 10 * ours["last"] + dense["last"]
    assert training(4).run(EXACT, 3, lr=0.02)["weights"] == 4 * 692_172 + 4 * 174_908


@pytest.mark.long
def test_codings_are_measured_on_steps_that_were_not_trained_with() -> None:
    found = codings(0, trained=2, held_out=3)["missed"]
    assert set(found) == {*RING_BYTES, *(f"node/{name}" for name in (SHARED, OWN, COPY, ZEROS))}
    assert 0.0 < found[INT8] < 1e-3 < found[TOP_QUARTER] < 1.0
    # Two steps have taught nothing.
    assert found[BEST] > 0.5
    assert found[RAW] > 10.0
    assert 0.0 < found[f"node/{ZEROS}"] < 1.0
