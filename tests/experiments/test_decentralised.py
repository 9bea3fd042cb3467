"""Decentralised trainings: what they report is what happened, in their figures and in their bytes."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments.averaging import fit_line
from fedcomp.experiments.convex import Convex, ErrorCurve, error_curve
from fedcomp.experiments.decentralised import (
    ENERGY_OPTIONS,
    Energy,
    GossipTraining,
    cost_table,
    honest_ratio,
    ratio,
    run,
    traffic_of,
    train,
)
from fedcomp.experiments.kit import Record
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.local import FlatObjective
from fedcomp.gossip.topology import topology_of
from fedcomp.gossip.traffic import GossipTraffic
from fedcomp.gossip.vector import GossipPolicy, flatten, unflatten
from fedcomp.gossip_simulation import simulate
from fedcomp.layout import Layout
from fedcomp.tasks import get_task
from fedcomp.tasks.linear import linear_rows
from fedcomp.tasks.local import LocalObjective

NODES = 4
SGP = {"name": "sgp", "lr": 0.1}
DPSGD = {"name": "dpsgd", "lr": 0.1}


def plan(algorithm: dict, graph: str = "exponential", **other: object) -> GossipTraining:
    made = GossipTraining(
        get_task("digits", hidden="16"), get_algorithm(algorithm), topology_of(graph, NODES), 6, seed=3, every=3
    )
    return dataclasses.replace(made, **other)


@pytest.fixture(scope="module")
def problem() -> Convex:
    return Convex.of(get_task("breast-cancer", l2=0.1, partition="sorted"), NODES)


@pytest.mark.slow
def test_the_optimum_is_a_zero_of_the_gradient_written_out_by_hand(problem: Convex) -> None:
    task = get_task("breast-cancer", l2=0.1, partition="sorted")
    named = unflatten(problem.optimum, problem.layout)
    weight, bias = (named[name].reshape(-1) for name in problem.objectives[0].parameters)
    pull, push = [], []
    for i in range(NODES):
        x, y = linear_rows(task, task.client(i, NODES))
        residual = 1 / (1 + np.exp(-(x @ weight + bias))) - y
        pull.append(x.T @ residual / len(y) + 0.1 * weight)
        push.append(residual.mean())
    # Nodes count alike, whatever they hold; one of them alone is far from its minimum there.
    assert np.abs(np.mean(pull, axis=0)).max() < 1e-14
    assert abs(np.mean(push)) < 1e-14
    assert min(np.linalg.norm(p) for p in pull) > 0.05
    assert np.linalg.norm(problem.gradients(problem.optimum).mean(axis=0)) < 1e-14
    # The bias is a feature of ones that is not regularised; a logistic loss is most curved at zero, where it is 1/4.
    penalty = np.diag([0.1] * len(weight) + [0.0])
    rows = [linear_rows(task, task.client(i, NODES))[0] for i in range(NODES)]
    full = [np.c_[x, np.ones(len(x))] for x in rows]
    curvature = [np.linalg.eigvalsh(x.T @ x / (4 * len(x)) + penalty)[-1] for x in full]
    assert problem.smoothness == pytest.approx(max(curvature), rel=1e-12)


@pytest.mark.slow
def test_an_error_curve_is_linear_for_nids_and_counts_the_bits_of_its_messages(problem: Convex) -> None:
    algorithm = get_algorithm({"name": "nids", "lr": 1 / problem.smoothness})
    curve = error_curve(problem, algorithm, topology_of("ring", NODES), 60)
    assert curve.errors[0] == 1.0
    assert curve.errors.shape == (61,)
    d = problem.layout.size
    # Float64 whole in every message, and eight bytes of header.
    np.testing.assert_array_equal(curve.bits, 8 * (8 + 8 * d) * np.arange(61))
    np.testing.assert_array_equal(curve.payload_bits, 64 * d * np.arange(61))
    assert curve.traffic.edge["train"].messages == 60 * 2 * NODES
    assert not curve.stopped
    assert curve.errors[-1] < curve.errors[20] < curve.errors[0]


@pytest.mark.slow
def test_an_unstable_run_ends_and_says_why(problem: Convex) -> None:
    algorithm = get_algorithm({"name": "nids", "lr": 200 / problem.smoothness})
    curve = error_curve(problem, algorithm, topology_of("ring", NODES), 3000)
    assert any(word in curve.stopped for word in ("iverged", "NonFinite", "would move by"))
    assert not curve.saturated
    assert curve.first() is None
    assert len(curve.errors) < 3000


def _curve(errors: list[float]) -> ErrorCurve:
    values = np.array(errors)
    return ErrorCurve(values, values, values, GossipTraffic(), {})


def test_the_fit_finds_the_rate_of_a_geometric_sequence_between_its_limits() -> None:
    # Flat at first, then 0.9 per iteration, then a floor.
    errors = [0.5] * 20 + [0.09 * 0.9**k for k in range(150)] + [1e-11] * 40
    rate, r2 = _curve(errors).fit()
    assert rate == pytest.approx(0.9, rel=1e-12)
    assert r2 == pytest.approx(1.0, abs=1e-12)
    assert fit_line(errors)[1] < 0.97
    rate, r2 = fit_line([0.9**k * (2.0 if k % 2 else 0.5) for k in range(100)])
    assert rate == pytest.approx(0.9, rel=1e-3)
    assert 0.9 < r2 < 0.97
    assert math.isnan(fit_line([1.0, 0.0, 0.1])[0])


def test_iterations_count_from_where_the_error_stays_below() -> None:
    assert _curve([1.0, 1e-3, 1e-7, 1e-3, 1e-7, 1e-8]).first() == 4
    assert _curve([1.0, 1e-7, 1e-3]).first() is None
    assert _curve([1e-9, 1e-9]).first() == 0
    assert _curve([1.0, math.nan]).first() is None


def test_a_training_reports_the_models_that_the_simulation_ends_with() -> None:
    asked = plan(SGP, every=2, batch_size=8)
    found = train(asked)
    objectives = [LocalObjective(asked.task, i, NODES, seed=3, batch_size=8) for i in range(NODES)]
    start = objectives[0].start()
    layout = Layout.of(start, GossipPolicy())
    out = simulate(
        get_algorithm(SGP),
        topology_of("exponential", NODES),
        [FlatObjective(f, layout) for f in objectives],
        flatten(start, layout, "float32"),
        6,
        layout=layout,
        seed=3,
    )
    each = [objectives[0].evaluate(unflatten(out.models[i], layout)) for i in range(NODES)]
    assert found.accuracy == pytest.approx(np.mean([e["accuracy"] for e in each]), rel=1e-15)
    assert found.worst == min(e["accuracy"] for e in each) <= found.accuracy
    assert found.loss == pytest.approx(np.mean([e["loss"] for e in each]), rel=1e-15)
    average = np.mean([out.models[i] for i in range(NODES)], axis=0, dtype=np.float64)
    whole = objectives[0].evaluate(unflatten(average.astype(np.float32), layout))
    assert found.average == whole["accuracy"]
    apart = [np.sum((out.models[i] - average) ** 2, dtype=np.float64) for i in range(NODES)]
    assert found.consensus == pytest.approx(math.sqrt(np.mean(apart)) / np.linalg.norm(average), rel=1e-6)
    assert found.consensus > 0
    assert [p["iteration"] for p in found.points] == [0, 2, 4, 6]
    assert found.points[0]["consensus"] < 1e-7
    assert found.traffic == out.traffic
    assert found.points[-1]["edge_bytes"] == out.traffic.edge_bytes > found.points[1]["edge_bytes"] > 0
    assert found.invariants["sum_w"] == pytest.approx(NODES, abs=1e-12)


@pytest.mark.slow
def test_running_statistics_are_mixed_and_moved_by_the_forward_pass() -> None:
    task = get_task("digits", model="cnn", batch_norm=True)
    dense, local = (
        train(plan(DPSGD, "ring", task=task, iterations=2, batch_size=8, policy=GossipPolicy(buffers=kind)))
        for kind in ("dense", "local")
    )
    sizes = [t.traffic.edge["train"].bodies / t.traffic.edge["train"].messages for t in (dense, local)]
    # Mean and variance of every channel, float32.
    model = task.model(0)
    assert sizes[0] - sizes[1] == 4 * 2 * (len(model.norm1.running_mean) + len(model.norm2.running_mean))
    assert dense.loss != local.loss


def test_lost_messages_cost_no_mass_and_are_counted() -> None:
    found = train(plan(SGP, iterations=30, drop=0.3, batch_size=4, every=0))
    assert found.invariants["sum_w"] == pytest.approx(NODES, abs=1e-12)
    assert found.events["repeated"] > 10
    assert found.events["gone"] == 0
    with pytest.raises(ConfigError, match=r"drop=1\.0"):
        GossipTraining(get_task("digits"), get_algorithm(SGP), topology_of("ring", 4), 1, drop=1.0)


def test_a_diverged_training_is_an_outcome_that_can_be_kept() -> None:
    asked = plan({"name": "dpsgd", "lr": 1e30}, "ring", iterations=40)
    found = train(asked)
    assert found.diverged
    assert math.isnan(found.accuracy)
    assert found.loss == math.inf
    read = Record(json.loads(json.dumps(run(asked))))
    assert read.loss == math.inf
    assert math.isnan(read.accuracy)
    assert read.diverged == found.diverged
    assert traffic_of(read) == found.traffic


def _traffic(messages: int, body: int, closing: int = 0) -> GossipTraffic:
    traffic = GossipTraffic()
    for _ in range(messages):
        traffic.count(8 + body, {"train": 1})
    for _ in range(closing):
        traffic.count(8 + 1000, {"dense": 1})
    return traffic


def test_ratios_leave_headers_and_closing_iterations_out_only_where_they_say_so() -> None:
    dense, sparse = _traffic(100, 1000), _traffic(50, 12, closing=3)
    assert ratio(sparse, dense) == pytest.approx(1000 / 12)
    assert ratio(sparse, dense, headers=True) == pytest.approx(1008 / 20)
    assert honest_ratio(sparse, dense) == pytest.approx(50 * 1008 / (50 * 20 + 3 * 1008))
    assert honest_ratio(dense, dense) == 1.0


def test_cost_rows_have_joules_only_when_both_figures_are_given() -> None:
    dense, sparse = _traffic(10, 1000), _traffic(10, 12)
    default = {name: option.default for name, option in ENERGY_OPTIONS.items()}
    table = cost_table("Costs", "run", {"sparse": (sparse, dense)}, Energy.of(default))
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert not {"joules", "overhead bytes"} & row.keys()
    assert row["run"] == "sparse"
    assert row["edge bytes"] == row["node bytes"] == 200
    for half in ({"energy_tx": "1e-9", "energy_rx": ""}, {"energy_tx": " ", "energy_rx": "0"}):
        with pytest.raises(ConfigError, match="give both, or neither"):
            Energy.of(half)
    given = Energy.of({"energy_tx": "2e-9", "energy_rx": "1e-9"})
    assert given.per_byte == pytest.approx(8 * 3e-9)
    with_joules = cost_table("Costs", "run", {"sparse": (sparse, dense)}, given)
    assert with_joules.columns[-1] == "joules"
    assert with_joules.rows[0][-1] == pytest.approx(8 * 200 * 3e-9)
    for wrong in ("-1", "nan", "much"):
        with pytest.raises(ConfigError, match="energy_tx cannot be"):
            ENERGY_OPTIONS["energy_tx"].parse("energy_tx", wrong)


def test_statistics_that_stay_at_home_are_those_of_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    task = get_task("digits", model="cnn", batch_norm=True)
    judged: list[dict] = []
    plain = LocalObjective.evaluate

    def evaluate(self: LocalObjective, arrays: dict) -> dict:
        judged.append({name: array.copy() for name, array in arrays.items() if "running_mean" in name})
        return plain(self, arrays)

    monkeypatch.setattr(LocalObjective, "evaluate", evaluate)
    train(plan(DPSGD, "ring", task=task, iterations=2, batch_size=8, policy=GossipPolicy(buffers="local"), every=0))
    nodes = judged[:NODES]
    assert len(nodes) == NODES
    assert nodes[0]
    for name in nodes[0]:
        assert all(np.abs(node[name]).max() > 0 for node in nodes), f"{name} is where it started"
        assert len({node[name].tobytes() for node in nodes}) == NODES
