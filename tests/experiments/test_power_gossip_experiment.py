"""The experiment on PowerGossip, very small: every setting is read, and figures are what the runs say."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from noted_settings import Read

from experiments import engines
from experiments.catalog import power_gossip as module
from experiments.catalog.power_gossip import CHANCE, CHOCO, DENSE, EXPERIMENT, RANK_1, ROWS, Group
from experiments.claims import Claim
from experiments.decentralised import Point, Trained
from experiments.experiment import Config
from experiments.findings import Findings, Say
from experiments.relayed import beside, without_messages
from experiments.spec import RunResult
from fedcomp.errors import ConfigError
from fedcomp.gossip.power_gossip import PowerGossip
from fedcomp.gossip.traffic import Traffic

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


@dataclasses.dataclass
class Small:
    config: Config
    results: dict[str, RunResult]
    findings: Findings
    claims: list[Claim]
    used: set[str]


@pytest.fixture(scope="module")
def small() -> Small:
    config = EXPERIMENT.configure(rounds=3, clients=3, assignments=SMALL)
    settings = Read(config.settings)
    config = dataclasses.replace(config, settings=settings)
    specs = EXPERIMENT.specs(config)
    results = {spec.label: engines.run(spec) for spec in specs}
    assert EXPERIMENT.measure is not None
    findings = EXPERIMENT.measure(config, results, Say())
    used = settings.read | {key for spec in specs for key in spec.settings}
    return Small(config, results, findings, EXPERIMENT.claims(config, results, findings), used)


def test_every_setting_is_read(small: Small) -> None:
    assert set(EXPERIMENT.options) <= small.used


def test_7_16_messages_and_one_process_give_the_same_bits(small: Small) -> None:
    exact = [claim for claim in small.claims if "with messages and without" in claim.name]
    assert len(exact) == 2 * len(ROWS)
    assert all(claim.ok and claim.gate and claim.value == 0 for claim in exact)
    table = small.findings.tables[-1]
    assert [row[1] for row in table.rows] == [2] * len(ROWS)
    assert all(row[2] == row[3] > 0 for row in table.rows)


def test_another_iteration_would_show_as_other_bits(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    init = PowerGossip.__post_init__

    def slower(self: PowerGossip) -> None:
        init(self)
        object.__setattr__(self, "rate", 0.5)

    monkeypatch.setattr(PowerGossip, "__post_init__", slower)
    _, values = beside({RANK_1: small.results[RANK_1]}, Say(), "")
    assert values[f"{RANK_1}: bytes of the model that differ"] > 0
    assert values[f"{RANK_1}: bytes of letters that differ"] == 0


def test_letters_are_counted_with_headers_and_joules(small: Small) -> None:
    costs = next(table for table in small.findings.tables if table.title.startswith("What was sent"))
    rows: dict[Any, dict[str, Any]] = {row[0]: dict(zip(costs.columns, row, strict=True)) for row in costs.rows}
    size = 64 * 8 + 8 + 8 * 10 + 10
    assert rows[DENSE]["letter, bytes"] == 4 * size
    assert rows[DENSE]["edge bytes"] == 3 * 3 * 2 * (4 * size + 8)
    # Matrices 8 x 64 and 10 x 8, vectors of 18: two even steps and one odd.
    assert rows[RANK_1]["edge bytes"] == 3 * 2 * (2 * (4 * (64 + 8 + 18) + 8) + 4 * (8 + 10 + 18) + 8)
    for row in rows.values():
        assert row["joules"] == pytest.approx(2 * 8e-9 * row["edge bytes"])


def test_tables_figures_and_claims_are_whole(small: Small) -> None:
    findings = small.findings
    assert Findings.from_json(findings.to_json()).to_json() == findings.to_json()
    assert [len(table.rows) for table in findings.tables] == [8, 8, 10, 9, 3]
    assert len(findings.figures) == 4
    measured = [claim for claim in small.claims if "three times" not in claim.name]
    assert all(math.isfinite(claim.value) for claim in measured)
    moved = next(claim for claim in small.claims if "moved" in claim.name)
    assert moved.ok


def test_a_tripled_gamma_is_looked_up_and_a_run_that_diverged_guesses() -> None:
    point = Point(1, 0.9, 0.8, 0.95, 0.1, 0.0, 10)
    good = Trained(0.9, 0.8, 0.95, 0.1, 0.0, [point], Traffic(), {}, {})
    bad = dataclasses.replace(good, diverged="Diverged: node 0: it grew. Halve gamma")
    groups = {label: Group([good]) for label in EXPERIMENT_LABELS}
    groups |= {CHOCO.format(0.1): Group([good]), CHOCO.format(0.3): Group([good, bad])}
    assert groups[CHOCO.format(0.3)].accuracy == CHANCE
    assert math.isnan(groups[CHOCO.format(0.3)].late("accuracy"))
    for group in groups.values():
        for run in group.runs:
            run.traffic.post(100, {"train": 2})
    values = module._values(EXPERIMENT.configure(), groups)
    assert values["best gamma"] == 0.1
    assert values["lost by three times the best gamma"] == pytest.approx(0.8)
    assert module._accuracy(groups).rows[-1][-1] == "Diverged: node 0: it grew"


EXPERIMENT_LABELS = [label for label in module._algorithms(EXPERIMENT.configure()) if not label.startswith("CHOCO")]


def test_wrong_settings_are_refused() -> None:
    for text in ("gammas=0", "gammas=2", "gammas=x", "fraction=0", "matrix=2"):
        with pytest.raises(ConfigError):
            EXPERIMENT.configure(assignments=[text])
    spec = EXPERIMENT.specs(EXPERIMENT.configure())[0]
    with pytest.raises(ConfigError, match="no decentralised algorithm"):
        without_messages(dataclasses.replace(spec, system="fedavg", settings={}))
