"""Any systems on any task: the rows that were asked for, figures of their results, and clear refusals."""

from __future__ import annotations

import pytest
from experiment_runs import ran

from fedcomp.errors import ConfigError
from fedcomp.experiments.catalog.compare import EXPERIMENT
from fedcomp.experiments.studies.compare import KINDS, kind_of
from fedcomp.experiments.systems import SYSTEMS, check
from fedcomp.experiments.tables import specs_of


def labels(*assignments: str) -> list[str]:
    return [spec.label for spec in specs_of(EXPERIMENT, EXPERIMENT.configure(assignments=assignments))]


@pytest.mark.long
def test_systems_are_run_beside_a_reference_and_what_they_cost_is_theirs() -> None:
    asked = (
        "systems=topk codec.density=0.05 feedback=true,  qsgd",
        "task=digits hidden=8",
        "settings=lr=0.3 max_steps=1",
    )
    config, results, found, *_ = ran(EXPERIMENT, *asked, rounds=2, clients=3, seed=4)
    specs = specs_of(EXPERIMENT, config)
    assert [spec.label for spec in specs] == ["fedavg", "topk codec.density=0.05 feedback=true", "qsgd"]
    assert all(spec.settings["lr"] == 0.3 and spec.settings["task.hidden"] == 8 for spec in specs)
    assert (specs[1].settings["codec.density"], specs[1].settings["feedback"]) == (0.05, True)
    (made,) = found.tables
    rows = {row[0]: dict(zip(made.columns, row, strict=True)) for row in made.rows}
    dense, sparse = (results[label] for label in ("fedavg", specs[1].label))
    shown = rows[specs[1].label]
    assert shown["to the server, bytes"] == sparse.uplink_wire_bytes < dense.uplink_wire_bytes
    assert shown["points lost"] == pytest.approx(100 * (dense.accuracy - sparse.accuracy))
    both = [result.uplink_wire_bytes + result.downlink_wire_bytes for result in (dense, sparse)]
    assert shown["times fewer, all links"] == both[0] / both[1] > 1
    assert rows["fedavg"]["times fewer, all links"] == 1
    assert "between clients, bytes" not in made.columns, "nobody has links of their own here"
    assert found.answer.startswith("Against fedavg: topk codec.density=0.05 feedback=true: ")


def test_the_reference_can_be_chosen_and_is_listed_once() -> None:
    assert labels("systems=qsgd, fedavg") == ["fedavg", "qsgd"]
    assert labels("systems=qsgd", "reference=identity") == ["identity", "qsgd"]
    assert labels("systems=choco, sparse-push", "task=digits partition=iid")[0] == "dpsgd"
    assert labels("systems=skewed-gcn", "task=digits-graph") == ["skewed-gcn"]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_every_system_of_the_table_can_be_named(name: str) -> None:
    task = {"generator": "digits-generator", "graph": "digits-graph", "linear": "digits-zero"}.get(
        kind_of(name), "digits"
    )
    specs = specs_of(EXPERIMENT, EXPERIMENT.configure(assignments=[f"systems={name}", f"task={task}"]))
    assert specs[-1].system == name
    assert kind_of(name) in KINDS
    assert {spec.task for spec in specs} == {task}


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("systems=topk,choco", "'topk' trains on each client's records .* and 'choco' is decentralised"),
        ("systems=topkk", "unknown system 'topkk'; did you mean 'topk'"),
        ("systems=,", "name at least one system"),
        ("systems=topk density", "key=value"),
        ("task=digitz", "did you mean 'digits"),
        ("task=digits hiden=8", "hiden"),
        ("settings=lr", "key=value"),
        ("reference=choco", "'choco' is decentralised"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(assignment: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        labels(assignment)
    assert "\n" not in str(caught.value)


def test_a_system_that_does_not_fit_the_task_is_refused_before_anything_runs() -> None:
    (spec, *_) = specs_of(EXPERIMENT, EXPERIMENT.configure(assignments=["task=digits-graph"]))
    with pytest.raises(ConfigError, match="does not fit task 'digits-graph'"):
        check(spec)
