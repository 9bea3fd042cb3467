"""The experiments on sparsifiers, very small: all is measured, every setting is read, every claim has a value."""

from __future__ import annotations

import math

import pytest
from experiment_runs import Ran, ran

from fedcomp.experiments.catalog.sparsifiers import _BOUNDS, EXPERIMENT
from fedcomp.experiments.studies import sparsifiers

LABELS = [*sparsifiers.SCHEMES, *sparsifiers.baselines(0.05)]
GRID = {"inner.eta": (0.1, 0.3), "inner.tau": (1e-3,)}


@pytest.fixture(scope="module")
def table() -> Ran:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparsifiers, "GRID", GRID)
        for name, some in (("RULES", ("FedAvg", "FedMedian")), ("RULE_CODECS", ("random-k, shared", "random-k, own"))):
            patch.setattr(sparsifiers, name, {key: getattr(sparsifiers, name)[key] for key in some})
        # Flower's own rule goes on where nothing arrived, which takes two rounds to show.
        return ran(EXPERIMENT, *EXPERIMENT.quick[2:], "server_rounds=2", rounds=3, clients=3)


@pytest.mark.long
def test_the_table_has_every_method_on_both_partitions(table: Ran) -> None:
    """A claim is the worse quotient of the trainings themselves; the table shows it to three digits."""
    claimed = {claim.name: (claim.value, claim.bound) for claim in table.findings.claims}
    assert not any(math.isnan(value) for value, _ in claimed.values())

    def loss(label: str, where: str) -> float:
        return table.kept[f"{label}, {where}, seed 0"]["loss"]

    for found, where in zip(table.findings.tables, sparsifiers.PARTITIONS, strict=False):
        assert where in found.title
        assert [row[0] for row in found.rows] == LABELS
        assert [row[0] for row in found.rows if row[5] is not None] == [s for s in LABELS if s.startswith("CLT-k")]
        assert [row[3] for row in found.rows] == [round(loss(s, where) / loss("dense", where), 3) for s in LABELS]
    for label, most in _BOUNDS.items():
        worse = max(loss(label, where) / loss("dense", where) for where in sparsifiers.PARTITIONS)
        assert claimed[f"{label}: train loss over dense, the worse partition"] == (worse, most)


@pytest.mark.long
def test_simulated_and_sent_runs_agree_to_the_bit(table: Ran) -> None:
    rows = table.findings.tables[-1].rows
    assert [row[0] for row in rows] == ["dense", "top-k + EF", "top-k + EF, FedAdam", "CLT-k"]
    assert all(row[2] == row[3] < row[4] and row[5] == 0 for row in rows)
    assert [claim.ok for claim in table.findings.claims if claim.op == "=="] == [True] * 8


@pytest.mark.long
def test_b6_every_server_is_tuned_and_stands_beside_itself_on_dense_updates(table: Ran) -> None:
    (found,) = (t for t in table.findings.tables if t.title.startswith("Server optimisers"))
    assert [row[0] for row in found.rows] == list(sparsifiers.SERVER_ROWS)
    for name, eta, _, _, lost, stale in found.rows:
        server, way = name.split(", ", 1)
        tuned = server != "FedAvg"
        assert (eta in GRID["inner.eta"]) is tuned
        assert way != sparsifiers.DENSE or (lost, stale) == (0.0, None)
        # What the pair does leaves nothing of the step where nothing arrived.
        assert way != sparsifiers.TOPK or stale == (0 if tuned else None)
        assert way != sparsifiers.EVERYWHERE or stale > 0


@pytest.mark.long
def test_b8_the_small_cnn_saves_fifty_times_whatever_it_learns(table: Ran) -> None:
    """Bytes do not depend on the rounds: biases travel dense and cost little, one coordinate in a hundred the rest."""
    (found,) = (t for t in table.findings.tables if t.title.startswith("A CNN"))
    assert [row[0] for row in found.rows] == list(sparsifiers.CNN)
    assert all(row[1] in sparsifiers.RATES for row in found.rows)
    name = f"CNN, {sparsifiers.HALVED}: times fewer uplink bytes"
    assert next(claim for claim in table.findings.claims if claim.name == name).ok


@pytest.mark.long
def test_b7_every_rule_meets_every_kind_of_codec(table: Ran) -> None:
    (found,) = (t for t in table.findings.tables if t.title.startswith("Rules"))
    assert [row[0] for row in found.rows] == ["FedAvg", "FedMedian"]
    assert found.columns[1:] == ("random-k, shared", "random-k, own")
    assert all(0.0 < cell <= 1.0 for row in found.rows for cell in row[1:])


def test_few_clients_still_hold_every_digit() -> None:
    for clients, shards in ((1, 10), (3, 4), (5, 2), (8, 2)):
        assert sparsifiers.partition_of("label-sorted", clients) == f"shards:{shards}"
