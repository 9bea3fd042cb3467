"""The experiment ``readme``: its safe row is the default, step sizes are chosen alike, its claims catch losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from flwr.serverapp.strategy import FedAvg

import fedcomp as fc
import fedcomp.experiments.studies.readme as module
from fedcomp.errors import ConfigError
from fedcomp.experiments.catalog.readme import EXPERIMENT
from fedcomp.experiments.engines import inprocess
from fedcomp.experiments.findings import Findings, Say
from fedcomp.experiments.studies.readme import COHORTS, FEDAVG, ROWS, SAFE, TASKS, spec_of, train
from fedcomp.experiments.systems import check, get_system
from fedcomp.experiments.tables import findings as measure

BOTH = "both ways: EDEN, 1 bit"


def config(*assignments: str, **sizes: int) -> Any:
    return EXPERIMENT.configure(assignments=("seeds=2", *assignments), **sizes)


def test_every_row_is_a_run_of_its_own_settings() -> None:
    for task in TASKS:
        for cohort in COHORTS:
            specs = [spec_of(task, cohort, row, 0.25, 7, config()) for row in ROWS]
            for spec in specs:
                check(spec)
                assert (spec.rounds, spec.seed, spec.settings["lr"]) == (40, 7, 0.25)
                # As many train in a round of either cohort, so that bytes can be compared.
                assert round(spec.clients * float(spec.settings.get("fraction", 1.0))) == 10
            assert len({(spec.system, str(sorted(spec.settings.items()))) for spec in specs}) == len(ROWS)


def test_the_safe_row_is_what_a_user_gets_who_names_no_codec() -> None:
    spec = spec_of("digits", "all", SAFE, 0.3, 0, config())
    system = get_system(spec.system)
    strategy = system.build(system.resolve(spec.settings), 0)
    default = fc.Compressed(FedAvg())
    assert isinstance(strategy, fc.Compressed)
    assert strategy.codec == default.codec
    assert (strategy.policy, strategy.downlink) == (default.policy, None)


def test_tuning_looks_at_other_data_and_other_draws() -> None:
    tuning = spec_of("mnist", "all", SAFE, 0.25, 7, config(), tuning=True)
    assert tuning.settings["task.validation"] is True
    assert tuning.seed != 7


@pytest.mark.long
def test_accuracy_after_three_rounds_is_that_of_the_whole_training() -> None:
    small = config(rounds=4, clients=2)
    spec = spec_of("digits", "all", SAFE, 0.3, 0, small)
    every = inprocess.run(replace(spec, settings={**spec.settings, "evaluate_every": 1}))
    found, dense = (train("digits", "all", row, 0.3, 0, config=small) for row in (SAFE, FEDAVG))
    assert found["short"] == 100 * every.rounds[3].accuracy
    assert found["middle"] == 100 * every.rounds[4].accuracy
    assert found["points"][-1][2] == found["up"] + found["down"] == every.uplink_wire_bytes + every.downlink_wire_bytes
    assert found["up"] < dense["up"] / 20
    assert found["points"][0][2] == 0


def measured(
    monkeypatch: pytest.MonkeyPatch,
    changes: Mapping[str, Mapping[str, float]],
    validation: Mapping[tuple[str, float], float] | None = None,
) -> tuple[Findings, dict[str, float]]:
    """Measure with made-up trainings, all alike but for ``changes``; return what was found and each row's step size."""
    taken: dict[str, float] = {}

    def made(task: str, cohort: str, row: str, lr: float, seed: int, *, config: Any, tuning: bool = False) -> Any:
        if tuning:
            return {"settled": (validation or {}).get((row, lr), 90.0)}
        taken[row] = lr
        usual = {"short": 60.0, "middle": 80.0, "settled": 95.0, "up": 10.0, "down": 100.0, "points": [(0.0, 9.0, 0.0)]}
        return {**usual, **changes.get(row, {})}

    monkeypatch.setattr(module, "train", made)
    return measure(EXPERIMENT, config("tasks=digits", "cohorts=all"), {}, Say()), taken


def test_a_loss_after_few_rounds_or_many_fails_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for field, value in (("short", 60.0), ("middle", 80.0), ("settled", 95.0)):
        for lost, holds in ((0.4, True), (0.6, False), (-3.0, True)):
            findings, _ = measured(monkeypatch, {SAFE: {field: value - lost}})
            assert [claim.ok for claim in findings.claims] == [holds]
    # What another row loses is in the table and in no claim.
    assert all(claim.ok for claim in measured(monkeypatch, {BOTH: {"settled": 50.0}})[0].claims)


def test_all_rows_have_fedavgs_step_size(monkeypatch: pytest.MonkeyPatch) -> None:
    low, usual, high = (TASKS["digits"][0] * times for times in (0.5, 1.0, 2.0))
    steps = measured(monkeypatch, {}, {(FEDAVG, usual): 95.0, (SAFE, high): 99.0})[1]
    assert steps.keys() == ROWS.keys()
    assert set(steps.values()) == {usual}
    # FedAvg itself has the smallest of those that are as good, but for chance.
    for reached, chosen in ((90.9, low), (91.1, high)):
        assert set(measured(monkeypatch, {}, {(FEDAVG, high): reached})[1].values()) == {chosen}


@pytest.mark.parametrize(("text", "hint"), [("tasks=mnits", "mnist"), ("cohorts=al", "all"), ("steps=0", "steps")])
def test_wrong_names_are_refused_with_the_nearest(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        config(text)
