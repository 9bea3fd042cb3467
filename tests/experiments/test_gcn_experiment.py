"""The experiment on skewed sampling: figures are those of real messages, variances exact, and claims can fail."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from experiment_runs import Ran, ran, resumes

from fedcomp.errors import ConfigError
from fedcomp.experiments.catalog import gcn
from fedcomp.experiments.catalog.gcn import CROSS, CUT, FULL, LOCAL, PARTITIONS, RANDOM, SHORT, UNSKEWED
from fedcomp.experiments.graph_runs import outcome, train
from fedcomp.experiments.graph_variance import Batches, as_many_rows, bias_of, measured, remote_inputs, with_input_layer
from fedcomp.experiments.kit import Record, Records
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.tables import specs_of
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.tasks import get_task
from fedcomp.tasks.graph import GraphTask

SMALL = ("seeds=2", "workers=1", "n=48", "batch_size=16", "task.hidden=4", "draws=3", "cut=greedy")

Asked = list[tuple[int, RunSpec]]


@pytest.fixture(scope="module")
def made() -> Iterator[Asked]:
    """Cells that were to be trained: a few of them are, the others come to what the nearest of those came to."""
    asked: Asked = []
    known: dict[tuple[str, str, int], dict[str, Any]] = {}

    def run(label: str, seed: int, specs: dict[str, RunSpec]) -> dict[str, Any]:
        spec = specs[label]
        asked.append((seed, spec))
        sampler = str(spec.settings.get("sampler", "skewed"))
        place = (spec.task, sampler if sampler in ("local", "full") else "skewed", spec.rounds)
        if place not in known:
            known[place] = train(label, seed, {label: dataclasses.replace(spec, rounds=1)})
        return {**known[place], "points": [(float(i), *known[place]["points"][-1][1:]) for i in range(spec.rounds + 1)]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gcn, "train", run)
        patch.setattr(gcn, "SWEEP", (1.0, 1.5))
        patch.setattr(gcn, "SCALES", (4.0,))
        patch.setattr(gcn, "MEASURED_ROUNDS", 1)
        yield asked


@pytest.fixture(scope="module")
def run(made: Asked) -> Ran:
    # Those that rows take by name are read without being asked for one by one.
    return ran(gcn.EXPERIMENT, *SMALL, rounds=2, clients=3, unread=gcn.TAKEN)


@pytest.mark.long
def test_rows_are_what_messages_carried_and_rules_ask_for_fewer_in_their_order(run: Ran) -> None:
    config, results, _, _, _ = run
    found = {label.removeprefix(f"{CUT}: "): Record(outcome(result)) for label, result in results.items()}
    assert list(found) == list(gcn.compared(config))
    rows = {label: run.per_batch for label, run in found.items()}
    assert rows[FULL] > rows[UNSKEWED] > rows["skewed, D = 1.5"] > rows[LOCAL] == 0
    for label, run in found.items():
        assert (run.gap_asked, run.gap_link) == (0, 0)
        assert run.batches == 2 * 3
        # 64 float32, header and ids on top; a row that two clients want travels twice.
        assert run.feature_bytes_logical >= 256 * run.rows_fetched
        assert run.feature_bytes_link == 2 * run.feature_bytes_logical
        assert bool(run.setup_bytes) == label.startswith("measured")
    # Two directions of a network 64-4-10 in float32, with the headers of frames or arrays, 6 trainings.
    size = 4 * (64 * 4 + 4 + 4 * 10 + 10)
    assert 12 * size < found[LOCAL].model_bytes < 12 * (size + 600)


def test_a_figure_that_is_not_the_ledgers_shows(run: Ran) -> None:
    result = run.results[f"{CUT}: {UNSKEWED}"]
    record = result.rounds[-1]
    for figure, gap in (
        ("feature_bytes_logical", "gap_asked"),
        ("feature_bytes_link", "gap_link"),
        ("id_bytes", "gap_asked"),
    ):
        metrics = {**record.metrics, f"gcn.{figure}": record.metrics[f"gcn.{figure}"] + 1}
        wrong = dataclasses.replace(result, rounds=[*result.rounds[:-1], dataclasses.replace(record, metrics=metrics)])
        assert outcome(wrong)[gap] == 1


def test_every_axis_is_trained_and_rows_are_not_trained_again(run: Ran, made: Asked) -> None:
    config = run.config
    names = [(spec.name, seed) for seed, spec in made]
    assert len(names) == len(set(names))
    assert not {(label, 0) for label in run.results} & set(names)
    settings = [spec.settings for _, spec in made]

    def used(key: str) -> set[Any]:
        return {own[key] for own in settings if key in own}

    assert used("task.cut") == {"greedy", "random"}
    assert used("sampler") == {"full", "local", "node", "ladies", "fastgcn", "boundary"}
    assert used("mode") == {"fixed", "measured", "worst"}
    assert used("variance_budget") == {1.1, 1.5, 2.0}
    assert used("cache") == {"lru", "all"}
    assert used("row_codec") == {*gcn.ROW_CODECS}
    assert used("estimator") == {"multinomial"}
    assert used("fraction_evaluate") == {1.0}
    assert {seed for seed, spec in made if spec.task == CROSS} == {0, 1}
    full = dataclasses.replace(config, settings={**dict(config.settings), "full": True})
    more = gcn.trainings(full, {CUT: {}, CROSS: {}})
    assert {len(seeds) for _, seeds in more.values()} == {2}
    for label in gcn.families(config):
        assert {gcn.name(SHORT[where], label) for where in PARTITIONS} <= set(more)


def test_every_seed_has_a_drawn_graph_of_its_own(run: Ran) -> None:
    spec = dataclasses.replace(gcn.cross_spec(run.config, LOCAL, {"sampler": "local"}), rounds=1)
    found = [train(LOCAL, seed, {LOCAL: spec})["task"] for seed in (3, 4)]
    assert [task["options"]["graph_seed"] for task in found] == [3, 4]


def test_a_resumed_run_trains_nothing_anew(run: Ran, made: Asked) -> None:
    before = len(made)
    assert resumes(gcn.EXPERIMENT, run)
    assert len(made) == before


def test_claims_are_the_goals(run: Ran) -> None:
    found = run.findings.claims
    goals = {(claim.op, claim.bound) for claim in found if claim.source.startswith(gcn.GOAL) and claim.gate}
    assert goals == {(">=", 4.0), ("<=", 1.0), ("<=", 0.5), (">=", 0.93), (">=", 3.0)}
    exact = [claim for claim in found if claim.op == "=="]
    assert len(exact) == 3
    assert all(claim.ok and claim.gate for claim in exact)


class Figures:
    """Groups, variances and biases with which every claim holds; ``change`` makes one figure another."""

    def __init__(self, config: Config) -> None:
        self.config = config
        labels = (*gcn.rules(config), *gcn.caches(config), *gcn.crossing(config), gcn.BOUNDARY, gcn.UNIFORM)
        where = (CUT, CROSS, *SHORT.values())
        self.groups = {gcn.name(place, label): self._runs(label) for place in where for label in labels}
        self.exact = {
            gcn.name(place, label): {"second_moment": 1.2, "kept": 1.0, "candidates": 2.0}
            for place in PARTITIONS
            for label in gcn.rules(config)
        }
        self.biases = {label: {"distance": 1.0, "noise": 1.0} for label in (UNSKEWED, *gcn.families(config))}
        self.biases |= {LOCAL: {"distance": 1.0, "noise": 0.0}, gcn.RENORMALISED: {"distance": 4.0, "noise": 1.0}}

    def _runs(self, label: str) -> Records:
        # Skew saves eight times without a cache, and three times with one.
        plain, kept = label.startswith(UNSKEWED), label.endswith("cache all")
        learns = 0.3 if label == LOCAL else 0.95
        fields = {
            **dict.fromkeys(("gap_asked", "gap_link"), 0),
            "accuracy": 0.9,
            "feature_bytes_logical": 5,
            "feature_bytes_link": 10,
            "per_batch": 10.0 if plain else 1.0,
            "rows_fetched": (3.0 if kept else 8.0) if plain else 1.0,
            "points": [(when, learns, 0.0) for when in self.config_rounds],
        }
        return Records([Record({"seed": seed, **fields}) for seed in (0, 1)])

    @property
    def config_rounds(self) -> tuple[float, float]:
        early, late = (int(self.config.settings[key]) for key in ("cross_rounds", "cross_long"))
        return float(early), float(late)

    def failed(self) -> list[str]:
        found = gcn.Found(self.config, self.groups, self.exact, self.biases, {})
        return [claim.name for claim in gcn.claims_of(found) if not claim.ok]

    def change(self, kind: str, key: str, **fields: Any) -> list[str]:
        """Return the claims that fail with other fields at one place."""
        held = getattr(self, kind)
        before = held[key]
        changed = Records([Record({**run, **fields}) for run in before]) if kind == "groups" else {**before, **fields}
        held[key] = changed
        found = self.failed()
        held[key] = before
        return found


def test_every_claim_can_fail_by_itself(run: Ran) -> None:
    figures = Figures(run.config)
    assert figures.failed() == []
    (early, late), (norms, worst, mine) = figures.config_rounds, gcn.promising(run.config)
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        *(
            ("groups", gcn.name(CUT, label), fields)
            for label in (norms, mine)
            for fields in ({"per_batch": 3.0}, {"accuracy": 0.8})
        ),
        ("exact", gcn.name(CUT, UNSKEWED), {"kept": 2.0}),
        *(
            ("groups", gcn.name(CROSS, label), {"points": [(early, value, 0.0), (late, value, 0.0)]})
            for label, value in ((LOCAL, 0.6), (mine, 0.9))
        ),
        ("groups", gcn.name(CROSS, gcn.EIGHT), {"per_batch": 5.0}),
        *(
            ("groups", gcn.name(CROSS, rival), {"points": [(early, first, 0.0), (late, second, 0.0)]})
            for rival in (gcn.BOUNDARY, gcn.UNIFORM)
            for first, second in ((0.99, 0.9), (0.9, 0.99))
        ),
        *(
            ("groups", gcn.name(SHORT[CUT], FULL), {field: value})
            for field, value in (("gap_asked", 1), ("gap_link", 1), ("feature_bytes_link", 11))
        ),
        *(
            ("exact", gcn.name(where, label), {"second_moment": 2.0})
            for where in PARTITIONS
            for label in (norms, worst, mine)
        ),
        *(
            ("groups", gcn.name(SHORT[where], gcn.cached(UNSKEWED, "all")), {"rows_fetched": 20.0})
            for where in PARTITIONS
        ),
        ("biases", UNSKEWED, {"distance": 1.6}),
        ("biases", gcn.RENORMALISED, {"distance": 1.9}),
    ]
    caught = [figures.change(kind, key, **fields) for kind, key, fields in wrong]
    assert [len(names) for names in caught] == [1] * len(wrong)
    every = {claim.name for claim in run.findings.claims}
    # Skew that learns nothing early is behind its rivals, too.
    last = f"{CROSS}, {gcn.EIGHT}: accuracy, worst seed"
    assert {names[0] for names in caught} == every - {last}
    assert last in figures.change("groups", gcn.name(CROSS, gcn.EIGHT), points=[(early, 0.9, 0.0), (late, 0.95, 0.0)])


def test_what_was_not_measured_is_no_success(run: Ran) -> None:
    figures = Figures(run.config)
    figures.groups = {
        key: Records([Record({**dict.fromkeys(run, math.nan), "points": []}) for run in runs])
        for key, runs in figures.groups.items()
    }
    figures.exact, figures.biases = (
        {key: dict.fromkeys(found, math.nan) for key, found in held.items()} for held in (figures.exact, figures.biases)
    )
    assert len(figures.failed()) == len(run.findings.claims)


def test_a_single_owner_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(ConfigError, match=r"clients=1 is not valid.*2 or more"):
        specs_of(gcn.EXPERIMENT, gcn.EXPERIMENT.configure(clients=1))


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
    assert found.batches == 2
    assert found.second_moment == pytest.approx(totals[1] / totals[0])
    assert found.variance == pytest.approx(totals[3] / totals[2])
    assert found.remote < found.remote_unskewed
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


def test_the_report_of_an_axis_names_how_it_was_trained(run: Ran) -> None:
    _, _, findings, _, _ = run
    titles = [table.title for table in findings.tables]
    assert f"Parts with {CUT}, 2 seeds, 2 rounds" in titles
    assert "Partitions and budgets, one seed, 2 rounds" in titles
    rules = next(table for table in findings.tables if table.title.startswith("Partitions"))
    assert {str(row[0]).partition(":")[0] for row in rules.rows} == {CUT, RANDOM}
    lines = [len(getattr(figure, "series", ())) for figure in findings.figures]
    crossed = len(gcn.crossing(run.config)) + 2
    assert lines == [len(gcn.compared(run.config)) + 2, len(gcn.rules(run.config)), crossed, 6, 6]
