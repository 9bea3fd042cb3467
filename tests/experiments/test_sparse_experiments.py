"""The experiments on sparsifiers, very small: all is measured, every setting is read, every claim has a value."""

from __future__ import annotations

import math

import pytest
from experiment_runs import Ran, ran

from fedcomp.experiments.catalog.sparsifiers import _BOUNDS, EXPERIMENT
from fedcomp.experiments.findings import Curves
from fedcomp.experiments.studies import sparsifiers

LABELS = [*sparsifiers.SCHEMES, *sparsifiers.BASELINES]


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
        patch.setattr(sparsifiers, "GRID", sparsifiers.GRID[3:5])
        patch.setattr(sparsifiers, "EXAMPLES", 100)
        for name, some in (("RULES", ("FedAvg", "FedMedian")), ("RULE_CODECS", ("random-k, shared", "random-k, own"))):
            patch.setattr(sparsifiers, name, {key: getattr(sparsifiers, name)[key] for key in some})
        return ran(EXPERIMENT, *small, rounds=3, clients=3)


@pytest.mark.long
def test_the_table_has_every_method_on_both_partitions(table: Ran) -> None:
    findings = table.findings
    assert len(set(LABELS)) == len(LABELS)
    for found, partition in zip(findings.tables, sparsifiers.PARTITIONS, strict=False):
        assert partition in found.title
        assert [row[0] for row in found.rows] == LABELS
        dense, oracle = found.rows[0], found.rows[1]
        assert dense[3] == dense[4] == 1.0
        assert all(isinstance(cell, float) for row in found.rows for cell in row[1:3])
        assert oracle[5] is None
        with_overlap = [row[0] for row in found.rows if row[5] is not None]
        assert with_overlap == [label for label in LABELS if label.startswith("CLT-k")]
    assert all(isinstance(figure, Curves) for figure in findings.figures)
    assert len(findings.tasks) == 2


@pytest.mark.long
def test_simulated_and_sent_runs_agree_to_the_bit(table: Ran) -> None:
    findings, claims = table.findings, table.findings.claims
    rows = findings.tables[-1].rows
    assert [row[0] for row in rows] == ["dense", "top-k + EF", "top-k + EF, FedAdam", "CLT-k"]
    assert all(row[2] == row[3] < row[4] and row[5] == 0 for row in rows)
    exact = [claim for claim in claims if claim.op == "=="]
    assert len(exact) == 8
    assert all(claim.ok for claim in exact)


@pytest.mark.long
def test_b6_every_server_is_tuned_and_stands_beside_itself_on_dense_updates(table: Ran) -> None:
    findings, claims = table.findings, table.findings.claims
    (found,) = (t for t in findings.tables if t.title.startswith("Server optimisers"))
    names = [row[0] for row in found.rows]
    assert names == [", ".join(row) for row in sparsifiers.SERVER_ROWS]
    for (server, way), cells in zip(sparsifiers.SERVER_ROWS, found.rows, strict=True):
        tuned = server != "FedAvg"
        assert ((cells[1], cells[2]) in sparsifiers.GRID) is tuned
        assert way != sparsifiers.DENSE or cells[4] == 0.0
        # What the pair does leaves nothing of the step where nothing arrived.
        assert way != sparsifiers.TOPK or cells[5] == (0 if tuned else None)
        assert way != sparsifiers.DENSE or cells[5] is None
    lost = [claim for claim in claims if claim.name.startswith("Fed") and "accuracy lost" in claim.name]
    assert [claim.name.split(",")[0] for claim in lost] == ["FedAdam", "FedYogi", "FedAdagrad"]
    assert all(claim.bound == 2.0 for claim in lost)


@pytest.mark.long
def test_b8_the_small_cnn_saves_fifty_times_whatever_it_learns(table: Ran) -> None:
    """Bytes do not depend on the rounds: biases travel dense and cost little, one coordinate in a hundred the rest."""
    findings, claims = table.findings, table.findings.claims
    (found,) = (t for t in findings.tables if t.title.startswith("A CNN"))
    assert [row[0] for row in found.rows] == list(sparsifiers.CNN)
    assert all(lr in sparsifiers.RATES for _, lr in sparsifiers.CNN.values())
    (ratio,) = (claim for claim in claims if claim.name == f"CNN, {sparsifiers.HALVED}: times fewer uplink bytes")
    assert ratio.ok


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

    for label in LABELS:
        relative = [loss(p, label) / loss(p, sparsifiers.DENSE) for p in sparsifiers.PARTITIONS]
        shown = [row[3] for found in findings.tables[:2] for row in found.rows if row[0] == label]
        assert shown == [round(value, 3) for value in relative]
        if label in _BOUNDS:
            claim = named[f"{label}: train loss over dense, the worse partition"]
            assert (claim.value, claim.bound) == (max(relative), _BOUNDS[label])
    assert not any(math.isnan(claim.value) for claim in claims)


def test_few_clients_still_hold_every_digit() -> None:
    for clients, shards in ((1, 10), (3, 4), (5, 2), (8, 2)):
        assert sparsifiers.partition_of("label-sorted", clients) == f"shards:{shards}"
