"""Whether the two magnitudes of "q2" should be fitted to fewer values: in error, and in training."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fedcomp import wire
from fedcomp.codecs import ErrorFeedback, TopK
from fedcomp.codecs.forms import FORMS, ValueForm
from fedcomp.experiments.central import program_of, simulate
from fedcomp.experiments.studies.compressors import MODELS, captured, plan_of
from fedcomp.flower.logs import quiet
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

BLOCK, CLIENTS, ROUNDS, DENSITY = 1024, 10, 24, 0.03
MODEL = "MLP"


class Blocks(ValueForm):
    """Two magnitudes for every 1,024 values. They travel as floats: what arrives counts here, and not the bytes."""

    values = wire.Raw

    def code(self, chosen: np.ndarray) -> wire.Values:
        starts = range(0, max(1, chosen.size), BLOCK)
        return wire.Raw(np.concatenate([wire.Codebook.quantise(chosen[i : i + BLOCK]).decode() for i in starts]))

    def kept(self, k: int) -> None:
        return


def missing(update: Update) -> float:
    """Return the share of the energy that does not arrive."""
    codec = TopK(DENSITY, values="q2")
    layout = Layout.flat(update.layout.compressed_size)
    given = update.vector[: layout.size]
    frame, _ = codec.encode(Update(given, layout), {}, Key(0))
    off = given.astype(float) - codec.decode(frame, layout)
    return float(off @ off) / float(given.astype(float) @ given)


def loss(seed: int) -> float:
    """Return the mean test loss of the last five rounds, top-k with error feedback."""
    config = SimpleNamespace(clients=CLIENTS, rounds=ROUNDS, seed=seed)
    plan = plan_of(MODEL, MODELS[MODEL].lr, seed, config)
    with quiet():
        out = simulate(plan, program_of(ErrorFeedback(TopK(DENSITY, values="q2"))))
    return float(np.mean([point.loss for point in out.points[-5:]]))


@pytest.mark.long
def test_a_pair_for_every_block_is_nearer_and_trains_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why "q2" has one pair: with memory, what is rounded away is not lost, and a block's pair costs eight bytes."""
    updates = [update for sent in captured(MODEL, CLIENTS, ROUNDS, 0) for update in sent]
    seeds = (0, 1, 2)
    one = np.mean([missing(u) for u in updates]), np.mean([loss(seed) for seed in seeds])
    monkeypatch.setitem(FORMS, "q2", Blocks())
    many = np.mean([missing(u) for u in updates]), np.mean([loss(seed) for seed in seeds])
    print(f"missing energy {one[0]:.3f} -> {many[0]:.3f}, test loss {one[1]:.3f} -> {many[1]:.3f}")
    assert many[0] < one[0]
    assert one[1] < 1.01 * many[1]
