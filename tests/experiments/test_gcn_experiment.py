"""The experiment on skewed sampling: figures are those of real messages, variances exact, and claims can fail."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from noted_settings import Read

from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments import graph_tables as tables
from fedcomp.experiments.catalog import gcn
from fedcomp.experiments.experiment import Config
from fedcomp.experiments.findings import Findings, Say
from fedcomp.experiments.graph_runs import GraphCell, GraphRun, outcome
from fedcomp.experiments.graph_tables import CROSS, CUT, FULL, LOCAL, PARTITIONS, RANDOM, SHORT, UNSKEWED
from fedcomp.experiments.graph_variance import as_many_rows, bias_of, measured, remote_inputs, with_input_layer
from fedcomp.experiments.spec import RunResult
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.tasks import get_task
from fedcomp.tasks.graph import GraphTask

SMALL = ("seeds=2", "workers=1", "n=48", "batch_size=16", "task.hidden=4", "draws=3", "cut=greedy")

Ran = tuple[Config, dict[str, RunResult], Findings, dict[str, Any], Read]


@pytest.fixture(scope="module")
def made() -> Iterator[list[GraphCell]]:
    """Cells that were to be trained: a few of them are, the others come to what the nearest of those came to."""
    asked: list[GraphCell] = []
    known: dict[tuple[str, str, int], GraphRun] = {}
    train = GraphCell.run

    def run(cell: GraphCell) -> GraphRun:
        asked.append(cell)
        sampler = str(cell.settings.get("sampler", "skewed"))
        place = (cell.task, sampler if sampler in ("local", "full") else "skewed", cell.rounds)
        if place not in known:
            known[place] = train(dataclasses.replace(cell, rounds=1))
        points = [(float(i), *known[place].points[-1][1:]) for i in range(cell.rounds + 1)]
        return dataclasses.replace(known[place], points=points)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphCell, "run", run)
        patch.setattr(gcn, "SWEEP", (1.0, 1.5))
        patch.setattr(gcn, "SCALES", (4.0,))
        patch.setattr(gcn, "MEASURED_ROUNDS", 1)
        yield asked


@pytest.fixture(scope="module")
def ran(made: list[GraphCell]) -> Ran:
    config = gcn.EXPERIMENT.configure(rounds=2, clients=3, assignments=SMALL)
    settings = Read(config.settings)
    config = dataclasses.replace(config, settings=settings)
    results = {spec.label: engines.run(spec) for spec in gcn.EXPERIMENT.specs(config)}
    kept: dict[str, Any] = {}
    return config, results, gcn.measure(config, results, Say(keep=kept.__setitem__)), kept, settings


@pytest.mark.long
def test_rows_are_what_messages_carried_and_rules_ask_for_fewer_in_their_order(ran: Ran) -> None:
    config, results, _, _, _ = ran
    found = {label.removeprefix(f"{CUT}: "): outcome(result) for label, result in results.items()}
    assert list(found) == list(gcn.compared(config))
    rows = {label: run.per_batch for label, run in found.items()}
    assert rows[FULL] > rows[UNSKEWED] > rows["skewed, D = 1.5"] > rows[LOCAL] == 0
    for label, run in found.items():
        assert (run.gap_rows, run.gap_link, run.gap_ids) == (0, 0, 0)
        assert run.batches == 2 * 3
        # 64 float32, header and ids on top; a row that two clients want travels twice.
        assert run.feature_bytes_logical >= 256 * run.rows_fetched
        assert run.feature_bytes_link == 2 * run.feature_bytes_logical
        assert bool(run.setup_bytes) == label.startswith("measured")
    # Two directions of a network 64-4-10 in float32, with the headers of frames or arrays, 6 trainings.
    size = 4 * (64 * 4 + 4 + 4 * 10 + 10)
    assert 12 * size < found[LOCAL].model_bytes < 12 * (size + 600)


def test_a_figure_that_is_not_the_ledgers_shows(ran: Ran) -> None:
    result = ran[1][f"{CUT}: {UNSKEWED}"]
    record = result.rounds[-1]
    for figure, gap in (
        ("feature_bytes_logical", "gap_rows"),
        ("feature_bytes_link", "gap_link"),
        ("id_bytes", "gap_ids"),
    ):
        metrics = {**record.metrics, f"gcn.{figure}": record.metrics[f"gcn.{figure}"] + 1}
        wrong = dataclasses.replace(result, rounds=[*result.rounds[:-1], dataclasses.replace(record, metrics=metrics)])
        assert getattr(outcome(wrong), gap) == 1


def test_every_axis_is_trained_and_rows_are_not_trained_again(ran: Ran, made: list[GraphCell]) -> None:
    config = ran[0]
    names = [cell.name for cell in made]
    assert len(names) == len(set(names))
    assert not {f"{label}/seed 0" for label in ran[1]} & set(names)
    settings = [cell.settings for cell in made]

    def used(key: str) -> set[Any]:
        return {own[key] for own in settings if key in own}

    assert used("task.cut") == {"greedy", "random"}
    assert used("sampler") == {"full", "local", "node", "ladies", "fastgcn", "boundary"}
    assert used("mode") == {"fixed", "measured", "worst"}
    assert used("variance_budget") == {1.1, 1.5, 2.0}
    assert used("cache") == {"lru", "all"}
    assert used("row_codec") == {*tables.ROW_CODECS}
    assert used("estimator") == {"multinomial"}
    assert used("fraction_evaluate") == {1.0}
    assert {cell.seed for cell in made if cell.task == CROSS} == {0, 1}
    assert {own["task.graph_seed"] for own in settings if "task.graph_seed" in own} == {0, 1}
    more = gcn.cells(dataclasses.replace(config, settings={**dict(config.settings), "full": True}))
    assert {len(cells) for cells in more.values()} == {2}
    for label in gcn.families(config):
        assert {tables.name(SHORT[where], label) for where in PARTITIONS} <= set(more)


def test_findings_survive_json_and_a_resumed_run_trains_nothing_anew(ran: Ran, made: list[GraphCell]) -> None:
    config, results, findings, kept, _ = ran
    document = json.loads(json.dumps(findings.to_json(), allow_nan=False))
    assert Findings.from_json(document).to_json() == findings.to_json()
    before = len(made)
    again = gcn.measure(config, results, Say(kept=json.loads(json.dumps(kept))))
    assert len(made) == before
    assert again.to_json() == findings.to_json()


def test_claims_are_the_goals_and_fail_when_nothing_was_measured(ran: Ran) -> None:
    config, results, findings, _, _ = ran
    found = gcn.claims(config, results, findings)
    goals = {(claim.op, claim.bound) for claim in found if claim.source.startswith(gcn.GOAL) and claim.gate}
    assert goals == {(">=", 4.0), ("<=", 1.0), ("<=", 0.5), (">=", 0.93), (">=", 3.0)}
    exact = {claim.name: claim for claim in found if claim.op == "=="}
    assert len(exact) == 4
    assert all(claim.ok and claim.gate for claim in exact.values())
    nothing = dataclasses.replace(findings, values=dict.fromkeys(findings.values, math.nan))
    assert not any(claim.ok for claim in gcn.claims(config, results, nothing))


def test_every_claim_can_fail_by_itself(ran: Ran) -> None:
    config, results, findings, _, _ = ran
    wanted = {"kept": 0.5, "noise": 1.0, "ladies": 4.0, "cross, local: best": 0.3, "cross, rows": 4.0}
    ends = {": rows": 5.0, ": points": 0.5, ": worst": 0.95, ": M": 1.2, "of the saving": 0.5}
    good = {
        key: wanted.get(key, next((value for end, value in ends.items() if key.endswith(end)), 0.0))
        for key in findings.values
    }

    def failed(values: dict[str, float]) -> list[str]:
        made = gcn.claims(config, results, dataclasses.replace(findings, values=values))
        return [claim.name for claim in made if not claim.ok]

    assert failed(good) == []
    wrong = {"kept": 1.0, "noise": 1.6, "ladies": 1.9, "cross, local: best": 0.51, "cross, rows": 2.9}
    ends = {": rows": 3.9, ": points": 1.1, ": worst": 0.92, ": M": 2.0, "of the saving": 1.1}
    caught = []
    told = {f"cross, {label}: worst" for label in (UNSKEWED, LOCAL)}
    for key in set(good) - told:
        usual = -0.1 if key.startswith("cross, ahead of") else 1.0
        bad = wrong.get(key, next((value for end, value in ends.items() if key.endswith(end)), usual))
        caught += (one := failed({**good, key: bad}))
        assert len(one) == 1, key
    assert len(set(caught)) == len(gcn.claims(config, results, findings))


def test_a_single_owner_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(ConfigError, match=r"clients=1 is not valid.*2 or more"):
        gcn.EXPERIMENT.specs(gcn.EXPERIMENT.configure(clients=1))


def test_every_setting_is_read(ran: Ran) -> None:
    config, _, _, _, settings = ran
    # Those that rows take by name are read without being asked for one by one.
    assert set(gcn.OPTIONS) <= settings.read | set(gcn._TAKEN)
    assert gcn.EXPERIMENT.changed(config)


@pytest.fixture(scope="module")
def karate() -> GraphTask:
    return cast(GraphTask, get_task("karate", cut="random"))


def test_variance_ratios_are_those_worked_out_with_dense_matrices(karate: GraphTask) -> None:
    """One batch, one layer: M and V from P, the features and the definition, without any of the sampler's code."""
    from fedcomp.graphs.plan import plan_round

    settings = SamplerSettings(n=5, mode="fixed", scale=3.0, layers=1)
    found = measured(karate, settings, 2, seed=4, rounds=1, batch=6)
    p = np.zeros((34, 34))
    for node in range(34):
        row = karate.adjacency.rows(np.array([node]))
        p[node, row.columns] = row.values
    totals = np.zeros(4)
    for index in range(2):
        part = karate.part(index, 2)
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
    assert found.batches == 2
    assert found.second_moment == pytest.approx(totals[1] / totals[0])
    assert found.variance == pytest.approx(totals[3] / totals[2])
    assert found.remote < found.remote_unskewed
    assert found.kept == pytest.approx(5)


@pytest.mark.long
def test_c5_rivals_fetch_as_many_rows_and_only_the_input_layer_pays_for_it(karate: GraphTask) -> None:
    size = {"seed": 7, "rounds": 40, "batch": 6}
    skew = SamplerSettings(n=12, mode="fixed", scale=4.0, layers=2)
    boundary = SamplerSettings(sampler="boundary", layers=2)
    uniform = SamplerSettings(n=12, mode="fixed", scale=1.0, layers=2)
    wanted = remote_inputs(karate, skew, 2, **size)
    assert 0 < wanted < remote_inputs(karate, uniform, 2, **size)
    q, n = as_many_rows(karate, wanted, boundary, uniform, 2, **size)
    assert remote_inputs(karate, dataclasses.replace(boundary, q=q), 2, **size) == pytest.approx(wanted, abs=0.15)
    shorter = with_input_layer(uniform, n)
    assert shorter.n == (n, 12)
    assert (
        remote_inputs(karate, shorter, 2, **size)
        <= wanted
        < remote_inputs(karate, with_input_layer(uniform, n + 1), 2, **size)
    )


@pytest.mark.long
def test_bias_is_that_of_samplers_that_have_one(karate: GraphTask) -> None:
    part = karate.part(0, 2)

    def of(**settings: Any) -> Any:
        return bias_of(karate, part, SamplerSettings(n=6, **settings), batch=5, draws=300, seed=0)

    local, skewed = of(sampler="local"), of(mode="fixed", scale=4.0)
    assert local.noise == 0.0
    assert local.distance > 0.2
    assert skewed.distance < 1.5 * skewed.noise
    full = of(sampler="full")
    assert full.distance < 1e-9
    assert full.remote > skewed.remote > local.remote == 0


def test_the_report_of_an_axis_names_how_it_was_trained(ran: Ran) -> None:
    _, _, findings, _, _ = ran
    titles = [table.title for table in findings.tables]
    assert f"Parts with {CUT}, 2 seeds, 2 rounds" in titles
    assert "Partitions and budgets, one seed, 2 rounds" in titles
    rules = next(table for table in findings.tables if table.title.startswith("Partitions"))
    assert {str(row[0]).partition(":")[0] for row in rules.rows} == {CUT, RANDOM}
    lines = [len(getattr(figure, "series", ())) for figure in findings.figures]
    crossed = len(gcn.crossing(ran[0])) + 2
    assert lines == [len(gcn.compared(ran[0])) + 2, len(gcn.rules(ran[0])), crossed, 6, 6]
