"""The experiment on Sparse-Push: rows are what they say, both ends of a run are shown, bounds are the goals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from experiment_runs import Ran, ran

from fedcomp.errors import ConfigError
from fedcomp.experiments.catalog import sparse_push
from fedcomp.experiments.catalog.sparse_push import (
    DIGRAPH,
    GRAPHS,
    IID,
    LEVELS,
    ONE_PERCENT,
    PIECES,
    SGP,
    THREE_DIGITS,
    TWO,
    Setting,
)
from fedcomp.experiments.decentralised import GossipCell
from fedcomp.experiments.push_sum_variants import TRAINED, trained
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.topology import topology_of

pytestmark = pytest.mark.filterwarnings("ignore::fedcomp.tasks.sources.DataWarning")

SMALL = ("task.hidden=4", "check_rounds=2", "workers=1", "energy_tx=1e-9", "energy_rx=2e-9")


@pytest.fixture(scope="module")
def run() -> Ran:
    """Everything, with five nodes and a network of four hidden units, for two iterations."""
    return ran(sparse_push.EXPERIMENT, *SMALL, rounds=2, clients=5)


@pytest.mark.long
def test_the_rows_with_messages_are_those_without(
    run: Ran,
) -> None:
    _, results, findings, *_ = run
    assert len(results) == 2
    claims = {claim.name: claim for claim in findings.claims}
    assert [c.value for name, c in claims.items() if "that differ from the run with messages" in name] == [0.0] * 4
    assert all(claim.ok for name, claim in claims.items() if name.startswith("sum of the weights"))


@pytest.mark.long
def test_the_bounds_are_the_goals(run: Ran) -> None:
    gates = [claim for claim in run[2].claims if claim.gate]
    points = [c for c in gates if "points below SGP, closed" in c.name]
    assert [c.bound for c in points] == [1.0, 1.0]
    assert [(IID in c.name, ONE_PERCENT in c.name) for c in points] == [(True, False), (False, True)]
    assert PIECES in points[1].name
    assert "twice as long" in points[1].name
    assert [c.bound for c in gates if "before headers" in c.name] == [400.0]
    assert {c.bound for c in gates if "largest error" in c.name} == {1e-10}


@pytest.mark.long
def test_costs_are_counted_and_the_closing_phase_is_among_them(
    run: Ran,
) -> None:
    findings = run.findings
    size = 64 * 4 + 4 + 4 * 10 + 10
    costs = next(t for t in findings.tables if t.title == "Cost of a run")
    table = {row[0]: dict(zip(costs.columns, row, strict=True)) for row in costs.rows}
    dense, sparse = (table[f"5 nodes, exponential, {IID}, {level}"] for level in (SGP, TWO))
    assert dense["message, bytes"] == 8 + 4 * size
    assert dense["edge bytes"] == 2 * 15 * (16 + 4 * size)
    assert dense["of them closing"] == 0
    closing = topology_of("exponential", 5).averaging_rounds()
    assert sparse["of them closing"] == closing * 15 * (16 + 4 * size)
    assert sparse["edge bytes"] > sparse["of them closing"]
    assert sparse["whole run, times fewer"] < 1.0 < sparse["times smaller"]
    assert sparse["joules"] == pytest.approx(8 * 3e-9 * sparse["edge bytes"])
    # At two values: 8 of a share, indices and two float32; the first of both messages has a digest.
    assert 8 + 8 < sparse["message, bytes"] < 8 + 8 + 4 + 8
    curves = findings.figures[0]
    assert curves.series[0].x[-1] == dense["edge bytes"]


@pytest.mark.long
def test_a_run_shows_what_the_nodes_hold_before_and_after_the_closing_phase(
    run: Ran,
) -> None:
    findings = run.findings
    shown = next(t for t in findings.tables if t.title == "5 nodes, exponential")
    rows = {row[0]: dict(zip(range(len(row)), row, strict=True)) for row in shown.rows}
    row = rows[f"{THREE_DIGITS}, {ONE_PERCENT}"]
    assert row[4] > 10 * row[7]
    assert rows[f"{THREE_DIGITS}, {SGP}"][5] is None
    assert all(r[8] == pytest.approx(5.0, abs=1e-12) for r in rows.values())


@pytest.mark.long
def test_rows_are_the_product_or_what_the_claims_need() -> None:
    config = sparse_push.EXPERIMENT.configure()
    chosen = sparse_push.settings_of(config)
    assert len(set(chosen)) == len(chosen)
    for setting in chosen:
        assert dataclasses.replace(setting, level=SGP, lossy=False) in chosen
    assert {s.graph for s in chosen if s.lossy} == set(GRAPHS)
    assert {s.nodes for s in chosen} == {8, 16}
    whole = sparse_push.settings_of(sparse_push.EXPERIMENT.configure(assignments=("full=true",)))
    assert len(set(whole)) == len(whole) == 288 + 2
    assert {len(s.seeds(config)) for s in chosen if s.long} == {3}
    assert set(chosen) < set(whole)
    for setting in (*chosen, Setting(8, DIGRAPH, IID, "2 %")):
        topology_of(setting.graph, setting.nodes, 0).check(get_algorithm(setting.algorithm(config)))
    assert LEVELS[TWO] == {"density": 2 / (64 * 32 + 32 + 32 * 10 + 10)}


def test_a_consensus_step_that_is_none_is_refused() -> None:
    for wrong in ("0", "1.5", "large", "nan"):
        with pytest.raises(ConfigError):
            sparse_push.EXPERIMENT.configure(assignments=(f"gamma.digraph={wrong}",))
    assert [sparse_push.looks(n) for n in (1500, 7, 10, 0)] == [150, 1, 1, 1]


def test_variants_do_what_they_say() -> None:
    algorithm = {"name": "sparse-push", "density": 0.02, "gamma": 0.3, "lr": 0.02, "momentum": 0.9}
    cell = GossipCell(algorithm, "exponential", 4, 6, 1, options={"hidden": "4", "partition": "shards:3"})
    found = {}
    for variant in TRAINED:
        drop = 0.3 if variant in sparse_push.LOSSY else 0.0
        found[variant] = trained(variant, dataclasses.replace(cell, training={"drop": drop, "dense_below": 0}))
    assert found["kept"]["sum_w"] == pytest.approx(4.0, abs=1e-13)
    assert found["naive debit"]["sum_w"] < 3.5
    assert len({one["loss"] for one in found.values()}) == len(TRAINED)
    assert np.isfinite([one["accuracy"] for one in found.values()]).all()
    with pytest.raises(ValueError, match="no variant"):
        trained("another", cell)
