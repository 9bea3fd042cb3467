"""The study ``lgc``: its trainings send real frames."""

from __future__ import annotations

import numpy as np
import pytest

import fedcomp.experiments.studies.lgc as module
from fedcomp.codecs import LGC, ScaleCom
from fedcomp.experiments.central import Sending
from fedcomp.experiments.studies.lgc import (
    BEST,
    COPY,
    DENSE,
    DENSITY,
    EXACT,
    FULL,
    INNOVATION,
    INT8,
    OURS,
    OWN,
    RAW,
    RING_BYTES,
    RIVALS,
    ROWS,
    SERVER,
    SHARED,
    SHORT,
    TOP_QUARTER,
    ZEROS,
    OneForAll,
    codings,
    train,
)
from fedcomp.layout import EndsDense, Layout
from fedcomp.rng import Key
from fedcomp.systems.lgc import LearnedGradients
from fedcomp.systems.shared_support import SharedSupport

SHAPES = {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "conv3": (64, 32, 3, 3), "linear": (10, 576)}
LAYOUT = Layout.of({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, EndsDense())


def vectors(number: int, count: int = 4) -> list[np.ndarray]:
    return list(Key(0, "toy", number).generator().standard_normal((count, LAYOUT.size)).astype(np.float32))


def test_rows_are_schemes_of_their_own_and_every_row_of_ours_has_a_rival() -> None:
    made = {label: row(100) for label, row in ROWS.items()}
    assert len({repr(scheme.codec) + type(scheme).__name__ for scheme in made.values()}) == len(ROWS)
    assert {label for label, scheme in made.items() if isinstance(scheme, LearnedGradients)} == set(OURS) == set(RIVALS)
    for label in OURS:
        codec = made[label].codec
        assert isinstance(codec, LGC)
        assert (codec.density, codec.innovation) == (DENSITY, INNOVATION)
        assert (made[label].warmup_rounds, made[label].training_rounds) == (5, 45)


def test_rivals_send_no_more_in_the_last_stage() -> None:
    """From real frames, all parts counted: latents beside 8 bits, innovations and latents beside one node's values."""
    last: dict[str, int] = {}
    for label in {*OURS, *RIVALS.values(), FULL}:
        sending = Sending(ROWS[label](8), LAYOUT, 4, 0)
        for number in range(1, 9):
            _, cost = sending.send(number, vectors(number))
        last[label] = cost.uplink - sending.local.state.get("spared", 0)
    for label, rival in RIVALS.items():
        assert last[rival] <= 1.02 * last[label], (label, rival)
    assert last[EXACT] < 0.75 * last[FULL]
    assert last[SHORT] < last[EXACT]


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
    ours = train(SERVER, 0.02, 3, steps=20)
    # These have one stage.
    plain, dense = (train(label, 0.02, 3, steps=2) for label in (FULL, DENSE))
    assert ours["last"] < plain["last"] < dense["last"]
    assert ours["weights"] == 4 * 692_172
    assert plain["weights"] == 0
    assert ours["dense"] == 10 * plain["dense"] == 20 * 4 * 4 * 29_066
    # One dense step, nine of values and ten of latents.
    assert ours["uplink"] > 10 * ours["last"] + dense["last"]
    assert train(EXACT, 0.02, 3, steps=4)["weights"] == 4 * 692_172 + 4 * 174_908


@pytest.mark.long
def test_codings_are_measured_on_steps_that_were_not_trained_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_OUT", 3)
    found = codings(0, trained=2)["missed"]
    assert set(found) == {*RING_BYTES, *(f"node/{name}" for name in (SHARED, OWN, COPY, ZEROS))}
    assert 0.0 < found[INT8] < 1e-3 < found[TOP_QUARTER] < 1.0
    # Two steps have taught nothing.
    assert found[BEST] > 0.5
    assert found[RAW] > 10.0
    assert 0.0 < found[f"node/{ZEROS}"] < 1.0
