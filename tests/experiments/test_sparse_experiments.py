"""The experiments on sparsifiers, very small: all is measured, every setting is read, every claim has a value."""

from __future__ import annotations

import math

import pytest
from experiment_runs import Ran, ran

from fedcomp.experiments import adaptive_servers, robust_rules, small_cnn
from fedcomp.experiments.catalog import sparsifiers
from fedcomp.experiments.findings import Curves


@pytest.fixture(scope="module")
def table() -> Ran:
    small = (
        "seeds=1",
        "task.hidden=20",
        "check_rounds=2",
        "server_rounds=2",
        "rule_rounds=1",
        "cnn_rounds=1",
        "cnn_seeds=1",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive_servers, "GRID", adaptive_servers.GRID[3:5])
        patch.setattr(small_cnn, "EXAMPLES", 100)
        patch.setattr(robust_rules, "RULES", {rule: robust_rules.RULES[rule] for rule in ("FedAvg", "FedMedian")})
        patch.setattr(
            robust_rules, "CODECS", {c: robust_rules.CODECS[c] for c in ("random-k, shared", "random-k, own")}
        )
        return ran(sparsifiers.EXPERIMENT, *small, rounds=3, clients=3)


@pytest.mark.long
def test_the_table_has_every_method_on_both_partitions(table: Ran) -> None:
    findings = table.findings
    labels = [method.label for method in sparsifiers.CANDIDATES]
    assert len(set(labels)) == len(labels)
    for found, partition in zip(findings.tables, sparsifiers.PARTITIONS, strict=False):
        assert partition in found.title
        assert [row[0] for row in found.rows] == labels
        dense, oracle = found.rows[0], found.rows[1]
        assert dense[4] == dense[5] == 1.0
        assert all(isinstance(cell, float) for row in found.rows for cell in row[1:3])
        assert oracle[8] is None
        with_overlap = [row[0] for row in found.rows if row[8] is not None]
        assert with_overlap == [label for label in labels if label.startswith("CLT-k")]
    assert all(isinstance(figure, Curves) for figure in findings.figures)
    assert len(findings.tasks) == 2


@pytest.mark.long
def test_simulated_and_sent_runs_agree_to_the_bit(table: Ran) -> None:
    findings, claims = table.findings, table.findings.claims
    rows = findings.tables[-1].rows
    assert [row[0] for row in rows] == [sparsifiers.DENSE, "top-k + EF", sparsifiers.ADAM, "CLT-k"]
    assert all(row[2] == row[3] < row[4] and row[5] == 0 for row in rows)
    exact = [claim for claim in claims if claim.op == "=="]
    assert len(exact) == 8
    assert all(claim.ok for claim in exact)


@pytest.mark.long
def test_b6_every_server_is_tuned_and_stands_beside_itself_on_dense_updates(table: Ran) -> None:
    findings, claims = table.findings, table.findings.claims
    (found,) = (t for t in findings.tables if t.title.startswith("Server optimisers"))
    names = [row[0] for row in found.rows]
    assert names == [f"{row.server}, {row.way}" for row in adaptive_servers.ROWS]
    for row, cells in zip(adaptive_servers.ROWS, found.rows, strict=True):
        tuned = row.server != "FedAvg"
        assert ((cells[1], cells[2]) in adaptive_servers.GRID) is tuned
        assert row.way != adaptive_servers.DENSE or cells[4] == 0.0
        # What the pair does leaves nothing of the step where nothing arrived.
        assert row.way != adaptive_servers.SPARSE or cells[5] == (0 if tuned else None)
        assert row.way != adaptive_servers.DENSE or cells[5] is None
    lost = [claim for claim in claims if claim.name.startswith("Fed") and "accuracy lost" in claim.name]
    assert [claim.name.split(",")[0] for claim in lost] == ["FedAdam", "FedYogi", "FedAdagrad"]
    assert all(claim.bound == 2.0 for claim in lost)


@pytest.mark.long
def test_b8_the_small_cnn_saves_fifty_times_whatever_it_learns(table: Ran) -> None:
    """Bytes do not depend on the rounds: biases travel dense and cost little, one coordinate in a hundred the rest."""
    findings, claims = table.findings, table.findings.claims
    (found,) = (t for t in findings.tables if t.title.startswith("A CNN"))
    assert [row[0] for row in found.rows] == [row.label for row in small_cnn.ROWS]
    assert all(row.lr in small_cnn.RATES for row in small_cnn.ROWS)
    (ratio,) = (claim for claim in claims if claim.name == f"CNN, {small_cnn.HALVED}: times fewer uplink bytes")
    assert ratio.ok
    assert ratio.value == pytest.approx(248_068 / found.rows[2][5], rel=0.01)


@pytest.mark.long
def test_b7_every_rule_meets_every_kind_of_codec(table: Ran) -> None:
    findings, claims = table.findings, table.findings.claims
    (found,) = (t for t in findings.tables if t.title.startswith("Rules"))
    assert [row[0] for row in found.rows] == ["FedAvg", "FedMedian"]
    assert found.columns[1:] == ("random-k, shared", "random-k, own")
    assert all(0.0 < cell <= 1.0 for row in found.rows for cell in row[1:])
    assert sum(claim.name.startswith("FedMedian") for claim in claims) == 2


@pytest.mark.long
def test_every_bound_of_the_table_is_claimed_for_both_partitions(table: Ran) -> None:
    """A claim is the worse quotient of the trainings themselves; the table shows it to three digits."""
    config, _, findings, trained, _ = table
    claims = findings.claims
    named = {claim.name: claim for claim in claims}

    def loss(partition: str, label: str) -> float:
        return trained[f"{partition}, {label}, seed {config.seed}"]["loss"]

    for method in sparsifiers.CANDIDATES:
        relative = [loss(p, method.label) / loss(p, sparsifiers.DENSE) for p in sparsifiers.PARTITIONS]
        shown = [row[4] for found in findings.tables[:2] for row in found.rows if row[0] == method.label]
        assert shown == [round(value, 3) for value in relative]
        if method.bound is not None:
            claim = named[f"{method.label}: train loss over dense, the worse partition"]
            assert (claim.value, claim.bound) == (max(relative), method.bound)
    assert not any(math.isnan(claim.value) for claim in claims)


def test_few_clients_still_hold_every_digit() -> None:
    for clients, shards in ((1, 10), (3, 4), (5, 2), (8, 2)):
        config = sparsifiers.EXPERIMENT.configure(clients=clients)
        assert sparsifiers.partition_of(sparsifiers.SORTED, config) == f"shards:{shards}"
