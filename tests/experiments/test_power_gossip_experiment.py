"""The experiment on PowerGossip, very small: every setting is read, and figures are what the runs say."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from experiment_runs import Ran, ran

from fedcomp.errors import ConfigError
from fedcomp.experiments.catalog import power_gossip as module
from fedcomp.experiments.catalog.power_gossip import (
    CHANCE,
    CHOCO_SIGNS,
    CHOCO_TOP,
    DENSE,
    EXPERIMENT,
    RANK_1,
    RANK_2,
    ROWS,
    TUNED,
    Group,
)
from fedcomp.experiments.decentralised import Evaluation, Trained
from fedcomp.experiments.findings import Say
from fedcomp.experiments.relayed import beside, without_messages
from fedcomp.experiments.tables import specs_of
from fedcomp.gossip.power_gossip import PowerGossip
from fedcomp.gossip.traffic import GossipTraffic

SMALL = (
    "gammas=0.1,0.3",
    "task.hidden=8",
    "task.partition=iid",
    "relay_rounds=2",
    "matrix=8",
    "matrix_rounds=16",
    "energy_tx=1e-9",
    "energy_rx=1e-9",
)


@pytest.fixture(scope="module")
def small() -> Ran:
    return ran(EXPERIMENT, *SMALL, rounds=3, clients=3)


def test_7_16_messages_and_one_process_give_the_same_bits(small: Ran) -> None:
    exact = [claim for claim in small.findings.claims if "with messages and without" in claim.name]
    assert len(exact) == 2 * len(ROWS)
    assert all(claim.ok and claim.gate and claim.value == 0 for claim in exact)
    table = small.findings.tables[-1]
    assert [row[1] for row in table.rows] == [2] * len(ROWS)
    assert all(row[2] == row[3] > 0 for row in table.rows)


def test_another_iteration_would_show_as_other_bits(small: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    init = PowerGossip.__post_init__

    def slower(self: PowerGossip) -> None:
        init(self)
        object.__setattr__(self, "rate", 0.5)

    monkeypatch.setattr(PowerGossip, "__post_init__", slower)
    _, differ = beside({RANK_1: small.results[RANK_1]}, Say(), "")
    assert differ[RANK_1].model > 0
    assert differ[RANK_1].messages == 0


def test_messages_are_counted_with_headers_and_joules(small: Ran) -> None:
    costs = next(table for table in small.findings.tables if table.title.startswith("What was sent"))
    rows: dict[Any, dict[str, Any]] = {row[0]: dict(zip(costs.columns, row, strict=True)) for row in costs.rows}
    size = 64 * 8 + 8 + 8 * 10 + 10
    assert rows[DENSE]["message, bytes"] == 4 * size
    assert rows[DENSE]["edge bytes"] == 3 * 3 * 2 * (4 * size + 8)
    # Matrices 8 x 64 and 10 x 8, vectors of 18: two even steps and one odd.
    assert rows[RANK_1]["edge bytes"] == 3 * 2 * (2 * (4 * (64 + 8 + 18) + 8) + 4 * (8 + 10 + 18) + 8)
    for row in rows.values():
        assert row["joules"] == pytest.approx(2 * 8e-9 * row["edge bytes"])


def test_tables_figures_and_claims_are_whole(small: Ran) -> None:
    findings = small.findings
    assert [len(table.rows) for table in findings.tables] == [7, 6, 7, 10, 9, 3]
    assert len(findings.figures) == 4
    assert all(math.isfinite(claim.value) for claim in small.findings.claims)
    moved = next(claim for claim in small.findings.claims if "moved" in claim.name)
    assert moved.ok


def run_with(accuracy: float, diverged: str = "") -> Trained:
    point = Evaluation(1, accuracy, 0.8, 0.95, 0.1, 0.0, 10)
    traffic = GossipTraffic()
    traffic.count(100, {"train": 2})
    return Trained(accuracy, 0.8, 0.95, 0.1, 0.0, [point], traffic, {}, {}, diverged)


def test_c2_the_sweep_chooses_and_the_claims_are_about_tuned_signs_too() -> None:
    good, bad = Group([run_with(0.9)]), Group([run_with(0.9), run_with(0.9, "Diverged: it grew. Halve gamma")])
    assert bad.accuracy == CHANCE
    assert math.isnan(bad.late("accuracy"))
    groups = dict.fromkeys((*module.FIXED, *TUNED), good) | {RANK_1: Group([run_with(0.925)])}
    groups |= {CHOCO_SIGNS: Group([run_with(0.961)]), RANK_2: Group([run_with(0.944)])}
    sweep = {label: {0.1: good, 0.2: bad, 1.0: Group([run_with(0.8)])} for label in TUNED}
    sweep[CHOCO_SIGNS] = {0.1: good, 0.2: good, 1.0: Group([run_with(0.95)])}
    assert module.best(sweep[CHOCO_TOP]) == 0.1
    assert module.best(sweep[CHOCO_SIGNS]) == 1.0
    found = {claim.name: claim.value for claim in module.claims(groups, sweep)}
    assert found["CHOCO, top-k: runs of the sweep from twice the best gamma on that came to an end"] == 1.0
    assert found["CHOCO, scaled signs: runs of the sweep that diverged"] == 0.0
    for rank, behind in (("rank 1", -0.036), ("rank 2", -0.017)):
        name = f"{rank}, untuned: accuracy over CHOCO's with scaled signs, tuned"
        assert found[name] == pytest.approx(behind)
    assert module._tried(sweep).rows[1][-1] == "Diverged: it grew"


def test_c2_every_row_with_a_consensus_step_gets_the_same_grid_on_the_validation_split(small: Ran) -> None:
    (tried,) = [table for table in small.findings.tables if "validation split" in table.title]
    assert [(row[0], row[1]) for row in tried.rows] == [(label, gamma) for label in TUNED for gamma in (0.1, 0.3)]
    assert CHOCO_SIGNS in TUNED
    (final,) = [table for table in small.findings.tables if table.title.startswith("Accuracy")]
    chosen = {row[0]: row[1] for row in final.rows}
    for label in TUNED:
        accuracies = {row[1]: row[2] for row in tried.rows if row[0] == label}
        assert accuracies[chosen[label]] == max(accuracies.values())


def test_c2_nobody_trains_on_the_validation_split_and_nobody_tunes_on_the_test_split() -> None:
    config = EXPERIMENT.configure(rounds=1, clients=3, assignments=SMALL)
    task = module._cell(config, CHOCO_TOP, 0.1, 0).plan().task
    held = module._cell(config, CHOCO_TOP, 0.1, 0, validation=True).plan().task
    rows = {
        name: {row.tobytes() for row in split.x}
        for name, split in (("test", task.test), ("train", held.train_split), ("validation", held.test))
    }
    assert len(held.test) == round(0.2 * len(task.train_split))
    assert len(held.test) + len(held.train_split) == len(task.train_split)
    assert sum(len(held.client(i, 3)) for i in range(3)) == len(held.train_split)
    assert len(rows["validation"] & rows["train"]) <= 2  # two images of the set are there twice
    assert len(rows["validation"] & rows["test"]) <= 2


def test_wrong_settings_are_refused() -> None:
    for text in ("gammas=0", "gammas=2", "gammas=x", "fraction=0", "matrix=2"):
        with pytest.raises(ConfigError):
            EXPERIMENT.configure(assignments=[text])
    spec = specs_of(EXPERIMENT, EXPERIMENT.configure())[0]
    with pytest.raises(ConfigError, match="not a decentralised algorithm"):
        without_messages(dataclasses.replace(spec, system="fedavg", settings={}))
