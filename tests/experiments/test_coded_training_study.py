"""The study of coded training; and its system through the command line's way."""

from __future__ import annotations

import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments.catalog.coded_training import EXPERIMENT
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.studies.coded_training import COPIES, SPARSE, LinearProblem, descend, facts, plan_of
from fedcomp.experiments.systems import check, get_system

LINEAR = {"parities": 2, "lr": 0.3, "task.l2": 0.001}
CONFIG = EXPERIMENT.configure(assignments=("parities=4", "draws=200", "trials=400"), rounds=3, clients=8)


@pytest.mark.long
def test_training_under_losses_pauses_with_its_oracle() -> None:
    problem, plan = LinearProblem.of(CONFIG, "svm"), plan_of(CONFIG, COPIES, 0)
    found = descend(problem, plan, 0.3, 60, 1)
    assert 10 < found["decoded"] < 60
    assert found["worst"] < 1e-12
    assert descend(problem, plan, 0.0, 5, 1)["decoded"] == 5


@pytest.mark.long
def test_sparse_codes_move_half_of_the_bytes_in_the_mean_and_no_code_beats_the_bound() -> None:
    for label in SPARSE:
        found = facts(label, config=CONFIG)
        assert abs(found["mean"] - 0.5) < 0.04
        assert found["over_bound"] is None or found["over_bound"] >= 1.0


@pytest.mark.long
@pytest.mark.parametrize("model", ["logistic", "svm"])
def test_the_system_runs_end_to_end(model: str) -> None:
    settings = LINEAR | {"task.model": model, "code": "gaussian", "payload": "float32"}
    result = engines.run(RunSpec("coded-linear", task="breast-cancer", rounds=3, clients=6, settings=settings))
    assert [record.round for record in result] == [0, 1, 2, 3]
    assert all(record.failures == 0 for record in result)
    assert result.final.loss < result.rounds[0].loss
    assert result.final.metrics["linear.examples"] == 456
    assert result.rounds[1].metrics["linear.setup_bytes"] > 0 == result.final.metrics["linear.setup_bytes"]
    assert result.uplink_wire_bytes == result.ledger.total("wire", direction="up", link="hub")


@pytest.mark.parametrize(
    ("task", "settings", "said"),
    [
        ("digits", {}, "not linear in its inputs"),
        ("digits-zero", {"momentum": 0.9}, "momentum=0.9 does not fit"),
        ("digits-zero", {"epochs": 2}, "epochs=2 does not fit"),
        ("digits-zero", {"inner": "fedadam"}, "inner='fedadam' does not fit"),
        ("digits-zero", {"code": "vandermonde"}, "code must be one of"),
        ("digits-zero", {"transport": "post"}, "transport='post'"),
    ],
)
def test_what_cannot_work_is_found_before_anything_starts(task: str, settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(RunSpec("coded-linear", task=task, clients=6, settings=settings))
    assert get_system("coded-linear").needs == {"task": "linear"}
