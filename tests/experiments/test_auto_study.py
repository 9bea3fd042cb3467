"""The experiment ``auto``: its rows are what they are called, its claims catch losses, and ten rounds of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg

import fedcomp as fc
import fedcomp.experiments.studies.auto as module
from fedcomp.codecs import ErrorFeedback, TopK, get_codec
from fedcomp.errors import ConfigError
from fedcomp.experiments.catalog.auto import EXPERIMENT
from fedcomp.experiments.central import Plan, program_of, simulate
from fedcomp.experiments.findings import Findings, Say, mean
from fedcomp.experiments.kit import Record, Records
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.studies.auto import (
    BETTER,
    DEFAULT,
    EARLY,
    FEDAVG,
    LATE,
    MEMORY,
    QUARTER,
    TOPK,
    RandomPart,
    above,
    lost,
    noise,
    places,
    rows,
)
from fedcomp.experiments.systems import get_system
from fedcomp.experiments.tables import Training
from fedcomp.experiments.tables import findings as measure
from fedcomp.layout import NONE_DENSE, Layout, Update
from fedcomp.rng import Key
from fedcomp.tasks import get_task


def config(*assignments: str, **sizes: int) -> Any:
    return EXPERIMENT.configure(assignments=("tasks=digits", "cohorts=3 clients", *assignments), **sizes)


def test_rows_are_what_they_are_called() -> None:
    training = Training.of(EXPERIMENT, config())
    spec = training.spec(f"digits, 3 clients: {DEFAULT}")
    system = get_system(spec.system)
    strategy = system.build(system.resolve(spec.settings), 0)
    same = fc.Compressed(FedAvg(), fc.Auto(bits=0.5, feedback=False), fc.Auto(bits=1, feedback=True))
    assert isinstance(strategy, fc.Compressed)
    assert (strategy.codec, strategy.downlink, strategy.policy) == (same.codec, same.downlink, same.policy)
    assert (spec.clients, spec.rounds, training.spec(f"digits: {DEFAULT}").clients) == (3, 30, 8)
    spec = training.spec(f"digits: {MEMORY}")
    strategy = system.build(system.resolve(spec.settings), 0)
    assert isinstance(strategy, fc.Compressed)
    assert strategy.codec == fc.Compressed(FedAvg(), fc.Auto(bits=0.1, feedback=True)).codec


def test_further_rows_and_cohorts_are_of_the_first_task() -> None:
    asked = EXPERIMENT.configure(assignments=("tasks=lstm,digits", "cohorts=5 of 50", "bits=3"))
    assert list(places(asked)) == ["lstm", "digits", "lstm, 5 of 50"]
    labels = [label for label in rows(asked) if "3 bits" in label]
    assert labels == ["lstm: Auto, 3 bits up", "lstm: Auto with feedback, 3 bits up"]
    assert Training.of(EXPERIMENT, asked).spec("lstm, 5 of 50: FedAvg").settings["task.speakers"] == 50


@pytest.mark.parametrize(
    ("text", "hint"),
    [("tasks=lstn", "lstm"), ("cohorts=5 of 5", "5 of 50"), ("tuned=lstm", "digits"), ("bits=0", "bits")],
)
def test_wrong_names_are_refused(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        config(text)


def path(*points: tuple[float, float]) -> Record:
    """Return a training of an evaluation every five rounds, from its accuracies and losses."""
    return Record({"path": [(5 * i, *point) for i, point in enumerate(points)]})


def test_the_tolerance_is_half_a_point_or_a_fiftieth_of_loss() -> None:
    dense = Records([path((10, 2.3), (60, 1.0), (90, 0.3))])
    for accuracy, loss, late in ((89.6, 9.0, 0.8), (0.0, 0.31, 0.5), (89.0, 0.33, 1.5), (95.0, 0.1, -10.0)):
        row = Records([path((10, 2.3), (59.9, 5.0), (accuracy, loss))])
        assert lost(dense, row, [10]) == pytest.approx(late)
        # A round in between is the last evaluation before it; the worst round counts.
        assert lost(dense, row, [7, 10]) == pytest.approx(max(0.2, late))


def test_noise_is_half_the_range_of_what_differs_from_seed_to_seed() -> None:
    rival = Records([path((10, 2.0), (50, 1.0)), path((10, 2.0), (50, 3.0))])
    for first, second, expected in ((1.1, 3.1, 0.1), (1.0, 3.4, 0.0), (0.5, 2.5, -0.5)):
        row = Records([path((10, 2.0), (50, first)), path((10, 2.0), (50, second))])
        assert above(row, rival, [5]) == pytest.approx(expected)


@pytest.mark.slow
def test_the_random_part_keeps_the_budget_and_is_unbiased() -> None:
    vector = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    codec, layout, total = RandomPart(0.3), Layout.flat(10_000), np.zeros(10_000)
    frames = [codec.encode(Update(vector, layout), codec.init(layout), Key(0, "uplink", 1, i))[0] for i in range(500)]
    assert max(map(len, frames)) <= 2048 // 8 + 64
    for frame in frames:
        total += codec.decode(frame, layout) / len(frames)
    # A fifth travels with EDEN's ω of 0.57: (1 + 0.57) 10,000/2048 - 1 of the square for one frame.
    variance = (1.57 * 10_000 / 2048 - 1) / len(frames)
    assert np.square(total - vector).sum() / np.square(vector).sum() == pytest.approx(variance, rel=0.1)


@pytest.mark.slow
def test_the_noise_of_edens_bit_is_the_same_for_every_update() -> None:
    small = config(rounds=2, clients=2)
    assert noise("digits", "eden", 1, config=small)["noise"] == pytest.approx(0.571, rel=0.05)
    assert noise("digits", "auto", 1, config=small)["noise"] < 0.4


def measured(changes: Mapping[str, tuple[float, float]], *assignments: str) -> Findings:
    """Measure with made-up trainings, all alike but for the accuracy and loss at round 10 of some rows."""

    def train(spec: RunSpec, training: Training) -> dict[str, Any]:
        ten = changes.get(spec.label, (90.0, 0.3))
        seen = [(0, 10.0, 2.3), (5, 60.0, 1.0), (10, *ten), (30, 95.0, 0.1)]
        wire = {"wire_up": 10.0, "wire_down": 10.0, "uplink": 10.0, "score": 95.0}
        return {**wire, "path": seen, "points": [(0.0, 9.0, 0.0, 0.0, 0.0)]}

    asked = config("seeds=1", "bits=0.1", "tuned=digits", "steps=1", *assignments, clients=2)
    return measure(replace(EXPERIMENT, train=train), asked, {}, Say())


def test_what_a_row_loses_fails_its_claim_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "noise", lambda task, codec, bits, *, config: {"noise": 0.01})
    assert [c.name for c in measured({}).claims if not c.ok] == [BETTER]
    for label, change, names in (
        (f"digits: {DEFAULT}", (89.0, 0.4), {EARLY, LATE}),
        (f"digits, 3 clients: {DEFAULT}", (89.0, 0.4), {EARLY, LATE}),
        (f"digits, tuned: {QUARTER}", (89.0, 0.4), {EARLY}),
        (f"digits: {MEMORY}", (90.0, 0.4), {"loss above that of top-k q2 and the noise, rounds 5 and 10"}),
    ):
        claims = measured({label: change}).claims
        assert {c.name for c in claims if not c.ok} == {BETTER, *(f"{label}: {name}" for name in names)}
    fine = measured(
        {f"digits: {DEFAULT}": (80.0, 0.31), f"digits: {TOPK}": (0.0, 9.0), f"digits: {FEDAVG}": (90.4, 0.3)}
    )
    assert {c.name for c in fine.claims if not c.ok} == {BETTER}


@pytest.mark.long
def test_in_ten_rounds_the_unbiased_form_follows_fedavg_and_feedback_is_ahead_of_top_k() -> None:
    """A quarter of a bit loses at most 0.06 of loss after 5 and 10 rounds; at 0.02 bits feedback is below top-k q2 of
    as many bytes after 10: means of three seeds, at FedAvg's step."""
    codecs = {
        "fedavg": {"id": "identity"},
        "unbiased": {"id": "auto", "bits": 0.25},
        "feedback": ErrorFeedback(fc.Auto(bits=0.02, feedback=True)),
        "topk": ErrorFeedback(TopK(0.0018, values="q2")),
    }
    task, training = get_task("digits", partition="dirichlet:0.3"), {"lr": 0.4, "batch_size": 16, "max_steps": 10}
    losses: dict[str, list[float]] = {}
    sent = {}
    for name, codec in codecs.items():
        outcomes = [
            simulate(
                Plan(task, 10, 10, seed, training, every=5, policy=NONE_DENSE, held_out=True),
                program_of(get_codec(codec)),
            )
            for seed in range(3)
        ]
        sent[name] = mean(out.uplink for out in outcomes)
        losses[name] = [mean(out.points[i].loss for out in outcomes) for i in (1, 2)]
    assert all(own <= dense + 0.06 for own, dense in zip(losses["unbiased"], losses["fedavg"], strict=True)), losses
    assert sent["feedback"] <= sent["topk"]
    assert losses["feedback"][1] < losses["topk"][1], losses
