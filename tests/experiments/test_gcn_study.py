"""The study of skewed sampling: figures are those of real messages, variances exact, NaN is no success."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import numpy as np
import pytest

from fedcomp.experiments import engines
from fedcomp.experiments.catalog import get_experiment
from fedcomp.experiments.kit import Record, Records
from fedcomp.experiments.studies import gcn
from fedcomp.experiments.studies.graph_runs import outcome, train
from fedcomp.experiments.studies.graph_variance import (
    Batches,
    as_many_rows,
    bias_of,
    measured,
    remote_inputs,
    with_input_layer,
)
from fedcomp.experiments.tables import specs_of
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.tasks import get_task
from fedcomp.tasks.graph import GraphTask

CONFIG = get_experiment("gcn").configure(quick=True)
EQUAL = gcn.rivals(CONFIG, {where: {"q": 0.1, "n": 20.0} for where in (gcn.CUT, gcn.CROSS)})


@pytest.mark.long
def test_rows_are_what_messages_carried_and_a_figure_that_is_not_the_ledgers_shows() -> None:
    specs = {spec.label.partition(": ")[2]: spec for spec in specs_of(get_experiment("gcn"), CONFIG)}
    assert list(specs) == list(gcn.COMPARED)
    results = {label: engines.run(spec) for label, spec in specs.items()}
    found = {label: Record(outcome(result)) for label, result in results.items()}
    rows = {label: run.per_batch for label, run in found.items()}
    assert rows[gcn.FULL] > rows[gcn.UNSKEWED] > rows[gcn.SKEWED] > rows[gcn.LOCAL] == 0
    for label, run in found.items():
        assert (run.gap_asked, run.gap_link, run.batches) == (0, 0, 2 * 3)
        # 64 float32, header and ids on top; a row that two clients want travels twice.
        assert run.feature_bytes_logical >= 256 * run.rows_fetched
        assert run.feature_bytes_link == 2 * run.feature_bytes_logical
        assert bool(run.setup_bytes) == (label == gcn.MEASURED)
    # Two directions of a network 64-4-10 in float32, with the headers of frames or arrays, 6 trainings.
    size = 4 * (64 * 4 + 4 + 4 * 10 + 10)
    assert 12 * size < found[gcn.LOCAL].model_bytes < 12 * (size + 600)
    result = results[gcn.UNSKEWED]
    record = result.rounds[-1]
    for figure, gap in (
        ("feature_bytes_logical", "gap_asked"),
        ("feature_bytes_link", "gap_link"),
        ("id_bytes", "gap_asked"),
    ):
        metrics = {**record.metrics, f"gcn.{figure}": record.metrics[f"gcn.{figure}"] + 1}
        wrong = dataclasses.replace(result, rounds=[*result.rounds[:-1], dataclasses.replace(record, metrics=metrics)])
        assert outcome(wrong)[gap] == 1


def test_rows_are_among_the_trainings_and_long_ones_have_all_seeds() -> None:
    config = dataclasses.replace(CONFIG, settings={**CONFIG.settings, "seeds": 2})
    made = gcn.trainings(config, EQUAL)
    assert {spec.label for spec in specs_of(get_experiment("gcn"), config)} <= set(made)
    assert {len(seeds) for label, (_, seeds) in made.items() if not label.startswith("short")} == {2}
    cuts = {
        where: {made[gcn.short(where, label)][0].settings["task.cut"] for label in gcn.SHORT[where]}
        for where in gcn.SHORT
    }
    assert cuts == {gcn.CUT: {"greedy"}, gcn.RANDOM: {"random"}}


def test_every_seed_has_a_drawn_graph_of_its_own() -> None:
    spec = dataclasses.replace(gcn.spec(CONFIG, gcn.CROSS, gcn.LOCAL, {"sampler": "local"}), rounds=1)
    found = [train(gcn.LOCAL, seed, {gcn.LOCAL: spec})["task"] for seed in (3, 4)]
    assert [task["options"]["graph_seed"] for task in found] == [3, 4]


def test_what_was_not_measured_is_no_success() -> None:
    fields = ("accuracy", "per_batch", "rows_fetched", "feature_bytes_logical", "feature_bytes_link")
    nothing = Record({**dict.fromkeys((*fields, "gap_asked", "gap_link"), math.nan), "points": []})
    groups = {label: Records([nothing]) for label in gcn.trainings(CONFIG, EQUAL)}
    nan = dict.fromkeys(("second_moment", "kept", "candidates", "distance", "noise"), math.nan)
    exact = {gcn.name(where, label): nan for where in gcn.PARTITIONS for label in gcn.RULES}
    biases = dict.fromkeys((gcn.UNSKEWED, gcn.RENORMALISED, gcn.LOCAL), nan)
    found = gcn.quantities(CONFIG, groups, exact, biases)
    assert len(found) == len(set(found)) > 20
    assert all(math.isnan(value) for value in found.values())


@pytest.fixture(scope="module")
def karate() -> GraphTask:
    return cast(GraphTask, get_task("karate", cut="random"))


def test_variance_ratios_are_those_worked_out_with_dense_matrices(karate: GraphTask) -> None:
    """One batch, one layer: M and V from P, the features and the definition, without any of the sampler's code."""
    from fedcomp.graphs.plan import plan_round

    settings = SamplerSettings(n=5, mode="fixed", scale=3.0, layers=1)
    found = Record(measured(Batches(karate, 2, 4, 1, 6), settings))
    p = np.zeros((34, 34))
    for node in range(34):
        row = karate.adjacency.rows(np.array([node]))
        p[node, row.columns] = row.values
    totals = np.zeros(4)
    for index in range(2):
        part = karate.shared(2).part(index)
        (plan,) = plan_round(part, settings, seed=4, round=1, steps=1, batch_size=6)
        u = p[plan.batch]
        a = (u**2).sum(0) * (karate.graph.features**2).sum(1)
        w, own = np.abs(u).sum(0), np.isin(np.arange(34), part.ids)
        for k, scaled in enumerate((w, np.where(own, 3.0 * w, w))):
            some = scaled > 0
            totals[k] += (a[some] / scaled[some]).sum() * scaled.sum()
            low, high = 0.0, 1e9
            for _ in range(200):  # the multiple at which five are expected
                middle = (low + high) / 2
                low, high = (middle, high) if np.minimum(1, middle * scaled).sum() < 5 else (low, middle)
            pi = np.minimum(1, high * scaled[some])
            totals[2 + k] += (a[some] * (1 / pi - 1)).sum()
    assert found.second_moment == pytest.approx(totals[1] / totals[0])
    assert found.variance == pytest.approx(totals[3] / totals[2])
    assert found.kept == pytest.approx(5)


@pytest.mark.long
def test_c5_rivals_fetch_as_many_rows_and_only_the_input_layer_pays_for_it(karate: GraphTask) -> None:
    batches = Batches(karate, 2, 7, 40, 6)
    skew = SamplerSettings(n=12, mode="fixed", scale=4.0, layers=2)
    boundary = SamplerSettings(sampler="boundary", layers=2)
    uniform = SamplerSettings(n=12, mode="fixed", scale=1.0, layers=2)
    wanted = remote_inputs(batches, skew)
    assert 0 < wanted < remote_inputs(batches, uniform)
    q, n = as_many_rows(batches, wanted, boundary, uniform)
    assert remote_inputs(batches, dataclasses.replace(boundary, q=q)) == pytest.approx(wanted, abs=0.15)
    shorter = with_input_layer(uniform, n)
    assert shorter.n == (n, 12)
    assert remote_inputs(batches, shorter) <= wanted < remote_inputs(batches, with_input_layer(uniform, n + 1))


@pytest.mark.long
def test_bias_is_that_of_samplers_that_have_one(karate: GraphTask) -> None:
    part = karate.shared(2).part(0)

    def of(**settings: Any) -> Any:
        return Record(bias_of(karate, part, SamplerSettings(n=6, **settings), batch=5, draws=300, seed=0))

    local, skewed = of(sampler="local"), of(mode="fixed", scale=4.0)
    assert local.noise == 0.0
    assert local.distance > 0.2
    assert skewed.distance < 1.5 * skewed.noise
    full = of(sampler="full")
    assert full.distance < 1e-9
    assert full.remote > skewed.remote > local.remote == 0
