"""The studies of decentralised learning: rows are what they say, bits those of messages, divergence is no gain."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments import averaging, convex
from fedcomp.experiments.averaging import average, fit_late
from fedcomp.experiments.catalog import get_experiment
from fedcomp.experiments.decentralised import GossipTraining
from fedcomp.experiments.findings import Say
from fedcomp.experiments.kit import Record, Records
from fedcomp.experiments.relayed import beside, without_messages
from fedcomp.experiments.studies import cold, consensus, power_gossip, sparse_push
from fedcomp.experiments.studies.push_sum_variants import COMPRESSED, TRAINED, averaged, trained
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.errors import TopologyError
from fedcomp.gossip.power_gossip import PowerGossip
from fedcomp.gossip.topology import Complete, DirectedRing, OnePeerExponential, Ring, topology_of
from fedcomp.gossip.vector import GossipPolicy
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.tasks import get_task

VALUES = Key(1, "values").generator().standard_normal((4, 10))
FLAT = Layout.flat(10)
D = 65
"""Parameters of the convex problem."""


def test_rows_of_sparse_push_are_what_the_claims_need() -> None:
    experiment = get_experiment("sparse_push")
    config = experiment.configure()
    chosen = sparse_push.settings_of(config)
    assert len({each.label for each in chosen}) == len(chosen)
    for each in chosen:
        assert dataclasses.replace(each, level=sparse_push.SGP, lossy=False) in chosen
        topology_of(each.graph, each.nodes(config), 0).check(get_algorithm(each.algorithm(config)))
    assert {each.graph for each in chosen if each.lossy} == set(sparse_push.GRAPHS)
    assert {len(each.seeds(config)) for each in chosen if each.long} == {3}
    assert sparse_push.LEVELS[sparse_push.TWO] == 2 / (64 * 32 + 32 + 32 * 10 + 10)


def test_incorrect_variants_do_what_they_say() -> None:
    algorithm = {"name": "sparse-push", "density": 0.02, "gamma": 0.3, "lr": 0.02, "momentum": 0.9}
    task, policy = get_task("digits", hidden="4", partition="shards:3"), GossipPolicy(dense_below=0)
    graph = topology_of("exponential", 4)
    plan = GossipTraining(task, get_algorithm(algorithm), graph, 6, seed=1, policy=policy)
    found = {}
    for variant in TRAINED:
        drop = 0.3 if variant in sparse_push.LOSSY else 0.0
        found[variant] = trained(variant, dataclasses.replace(plan, drop=drop))
    assert found["kept"]["sum_w"] == pytest.approx(4.0, abs=1e-13)
    assert found["naive debit"]["sum_w"] < 3.5
    assert len({one["loss"] for one in found.values()}) == len(TRAINED)
    assert np.isfinite([one["accuracy"] for one in found.values()]).all()
    with pytest.raises(ValueError, match="no variant"):
        trained("another", plan)


@pytest.mark.parametrize(
    ("clients", "assignments", "message"),
    [(3, (), "at least 4"), (4, ("size=10", "k=11"), "exceeds size=10"), (4, ("energy_tx=1e-9",), "give both")],
)
def test_sizes_that_cannot_be_are_refused(clients: int, assignments: tuple[str, ...], message: str) -> None:
    experiment = get_experiment("consensus")
    config = experiment.configure(clients=clients, assignments=assignments)
    with pytest.raises(ConfigError, match=message):
        consensus.study(SimpleNamespace(config=config))  # type: ignore[arg-type]


def test_half_a_figure_of_energy_is_refused_before_anything_runs() -> None:
    from fedcomp.experiments.tables import specs_of

    for name in ("sparse_push", "power_gossip", "cold"):
        experiment = get_experiment(name)
        with pytest.raises(ConfigError, match="give both"):
            specs_of(experiment, experiment.configure(assignments=("energy_rx=1e-9",)))


def test_a_torus_is_left_out_where_there_is_none() -> None:
    config = get_experiment("consensus").configure()
    assert consensus.possible(("ring", "torus"), 7, config) == ["ring"]
    assert consensus.possible(("ring", "torus"), 8, config) == ["ring", "torus"]
    with pytest.raises(TopologyError):
        consensus.possible(("nothing",), 8, config)


def test_fit_finds_slope_and_leaves_rounding_and_the_first_rounds_out() -> None:
    rounds = list(range(200))
    errors = [0.7**k + 0.3 * 0.2**k for k in rounds]
    rate, r2 = fit_late(rounds, errors, 0.5)
    assert rate == pytest.approx(0.7, rel=1e-4)
    assert r2 > 0.9999
    assert fit_late(rounds, [max(e, 1e-16) for e in errors], 0.5) == (rate, r2)
    stalled = fit_late(rounds, [0.1 + 0.01 * (-1) ** k for k in rounds], 0.5)
    assert stalled[0] == pytest.approx(1.0, abs=1e-3)
    assert stalled[1] < 0.1
    assert all(math.isnan(value) for value in fit_late([0, 1], [1.0, 1e-20], 0.5))


def test_average_is_the_product_of_the_matrices_and_counts_real_messages() -> None:
    graph = DirectedRing(4)
    track = average({"name": "sgp"}, graph, VALUES, 12, layout=FLAT, seed=0, every=1, late=0.5)
    errors = consensus.by_matrices(graph, VALUES, 12, symmetric=False)
    np.testing.assert_allclose(track["errors"], errors, rtol=1e-9)
    assert track["rounds"] == list(range(13))
    # Header, share of w, ten float64.
    assert (track["message"], track["sent"], track["least"]) == (96.0, 96.0, 1.0)
    assert track["moved"] < 1e-14
    assert track["digits"] == pytest.approx(-math.log10(track["rate"]) / 0.096)
    exact = average({"name": "dpsgd"}, Complete(4), VALUES, 3, layout=FLAT, seed=0, every=1)
    assert exact["rate"] == 0.0
    assert exact["last"] < 1e-15


@pytest.mark.long
def test_a_run_that_diverges_is_said_so_and_nothing_else_is_known() -> None:
    options = {"name": "choco", "gamma": 1.0, "compressor": {"id": "topk", "density": 0.1}}
    track = average(options, Ring(4), VALUES, 200, layout=FLAT, seed=0)
    assert track["last"] == math.inf
    assert math.isnan(track["message"])
    assert track["errors"][-1] > averaging.GROWN
    with pytest.raises(TopologyError, match="symmetric"):
        average(options, DirectedRing(4), VALUES, 2, layout=FLAT, seed=0)


@pytest.mark.long
def test_variants_without_loss_are_push_sum_and_with_it_only_one_converges() -> None:
    graph = OnePeerExponential(4)
    matrices = [graph.mixing_matrix(t) for t in range(2)]
    for kind in COMPRESSED:
        assert averaged(kind, matrices, VALUES, 10, 1.0, 2)[-1] < 1e-15
    # A hub: the weights change from round to round.
    hub = [np.array([[0.5, 0.5, 0, 0], [0, 0.5, 0, 0], [0, 0, 1, 0], [0.5, 0, 0, 1.0]]), np.eye(4)[[1, 2, 3, 0]] / 2]
    hub[1] = hub[1] + np.eye(4) / 2
    last = {kind: averaged(kind, hub, VALUES, 2, 0.1, 1500)[-1] for kind in COMPRESSED}
    assert last["estimates of z"] < 1e-12
    assert last["estimates of x"] > 1e-4
    assert last["models, error kept"] > 1e-3
    with pytest.raises(ValueError, match="no variant"):
        averaged("models", matrices, VALUES, 2, 0.1, 1)


@pytest.fixture(scope="module")
def problem() -> convex.Convex:
    return convex.Convex.of(get_task(cold.TASK, partition="sorted", l2=5.0), 4)


@pytest.fixture(scope="module")
def courses(problem: convex.Convex) -> dict[str, Record]:
    """Every run of COLD's study, for fourteen iterations at most."""
    config = get_experiment("cold").configure(quick=True)
    return {name: Record(cold.course(name, config=config, problem=problem)) for name in (*cold.RUNS, cold.FLOAT32)}


@pytest.mark.long
def test_bits_of_cold_are_those_of_the_messages(courses: dict[str, Record]) -> None:
    digest = 8 * 8
    for name, body in ((cold.NIDS, 8 * D), (cold.GEOMETRIC, math.ceil(D / 8)), (cold.ZOOM, math.ceil(D / 8))):
        course = courses[name]
        first = 0 if name == cold.NIDS else digest
        assert list(course.payload_bits) == [0, *(8 * body * k + first for k in range(1, 15))]
        assert [a - b for a, b in zip(course.bits, course.payload_bits, strict=True)] == [64 * k for k in range(15)]
    assert courses[cold.FLOAT32].message == 4 * D


@pytest.mark.long
def test_claims_of_cold_fail_when_nothing_arrived(courses: dict[str, Record]) -> None:
    assert courses["geometric, s0 / 100"].saturated
    assert not courses[cold.GEOMETRIC].saturated
    lost = {"first": None, "rate": math.nan, "r2": math.nan, "conserved": math.nan, "saturated": False}
    nothing = {name: Record({**one, **lost, "errors": [math.nan] * 15}) for name, one in courses.items()}
    fixed = dict.fromkeys([*cold.FLOORS, *(f"D-PSGD, ηL = {s:g}" for s in cold.SMALLER)], math.nan)
    found = cold.quantities(nothing, fixed, math.nan)
    assert found.pop("schedules that are too fast or too low: noticed, of 3") == 0
    assert all(math.isnan(value) for value in found.values())


@pytest.mark.long
def test_c4_runs_of_d_psgd_and_choco_end_at_the_fixed_point(problem: convex.Convex) -> None:
    weights, lr = Complete(4).mixing_matrix(0, symmetric=True), 0.3 / problem.smoothness
    choco = {"name": "choco", "gamma": 0.5, "compressor": {"id": "topk", "density": 0.5}}
    for own, gamma in (({"name": "dpsgd"}, 1.0), (choco, 0.5)):
        last = own["name"] == "choco"
        point = convex.fixed_point(problem, weights, lr, gamma=gamma, mixes_last=last)
        curve = convex.error_curve(problem, get_algorithm({**own, "lr": lr}), Complete(4), 60)
        assert curve.errors[-1] == pytest.approx(problem.distance(point), rel=1e-3)
        other = convex.fixed_point(problem, weights, lr, gamma=gamma, mixes_last=not last)
        assert curve.errors[-1] != pytest.approx(problem.distance(other), rel=1e-2)


def test_another_iteration_would_show_as_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcomp.experiments import engines
    from fedcomp.experiments.tables import specs_of

    experiment = get_experiment("power_gossip")
    (_, spec, _) = specs_of(experiment, experiment.configure(quick=True))
    found: Any = SimpleNamespace(results={spec.label: engines.run(spec)}, say=Say())
    assert set(beside(found, "")[1].values()) == {0}
    init = PowerGossip.__post_init__

    def slower(self: PowerGossip) -> None:
        init(self)
        object.__setattr__(self, "rate", 0.5)

    monkeypatch.setattr(PowerGossip, "__post_init__", slower)
    differ = beside(found, "")[1]
    assert differ[spec.label, "model bytes that differ"] > 0
    assert differ[spec.label, "message bytes that differ"] == 0
    with pytest.raises(ConfigError, match="not a decentralised algorithm"):
        without_messages(dataclasses.replace(spec, system="fedavg", settings={}))


def test_c2_a_step_that_diverged_is_ranked_as_guessing() -> None:
    point = {"accuracy": 0.9, "worst": 0.8}
    good, ended = ({"label": "CHOCO", "points": [point], "diverged": why} for why in ("", "Diverged: it grew"))
    assert power_gossip.accuracy(Records([Record(good)])) == 0.9
    bad = Records([Record(good), Record(ended)])
    assert power_gossip.accuracy(bad) == power_gossip.CHANCE
    assert math.isnan(power_gossip.late(bad, "accuracy"))


def test_c2_nobody_trains_on_the_validation_split_and_nobody_tunes_on_the_test_split() -> None:
    config = get_experiment("power_gossip").configure(quick=True)
    task = power_gossip.plan(config, power_gossip.CHOCO_TOP, 0.1, 0).task
    held = power_gossip.plan(config, power_gossip.CHOCO_TOP, 0.1, 0, validation=True).task
    rows = {
        name: {row.tobytes() for row in split.x}
        for name, split in (("test", task.test), ("train", held.train_split), ("validation", held.test))
    }
    assert len(held.test) == round(0.2 * len(task.train_split))
    assert len(held.test) + len(held.train_split) == len(task.train_split)
    assert sum(len(held.client(i, 3)) for i in range(3)) == len(held.train_split)
    assert len(rows["validation"] & rows["train"]) <= 2  # two images of the set are there twice
    assert len(rows["validation"] & rows["test"]) <= 2
