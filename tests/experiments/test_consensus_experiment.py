"""The consensus experiment: what it fits, counts and compares, on runs of a few rounds."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from experiment_runs import Ran, ran, resumes

from fedcomp.errors import ConfigError
from fedcomp.experiments import averaging
from fedcomp.experiments.averaging import Track, average, by_matrices, fitted, starts
from fedcomp.experiments.catalog import consensus
from fedcomp.experiments.decentralised import Energy
from fedcomp.experiments.findings import Say
from fedcomp.experiments.push_sum_variants import COMPRESSED, averaged
from fedcomp.gossip.errors import TopologyError
from fedcomp.gossip.topology import Complete, DirectedRing, OnePeerExponential, Ring
from fedcomp.layout import Layout
from fedcomp.plain import from_fields
from fedcomp.rng import Key

SMALL = ("size=10", "k=2", "matrix=3", "dense_rounds=12", "sweep_rounds=2", "variant_rounds=20")
VALUES = starts(Key(1, "values"), 4, 10)
FLAT = Layout.flat(10)


@pytest.fixture(scope="module")
def run() -> Ran:
    """Every measurement, very small."""
    return ran(consensus.EXPERIMENT, *SMALL, rounds=6, clients=4)


def test_claims_of_theory_hold_in_a_run_of_any_length(run) -> None:
    findings = run.findings
    assert {table.title for table in findings.tables} >= {"Without compression", "What is conserved"}
    assert not findings.tasks
    claims = {claim.name: claim for claim in findings.claims}
    named = ("one round", "log2 n", "sums over all", "sum of w", "products of the matrices")
    theory = [claim for name, claim in claims.items() if any(part in name for part in named)]
    assert len(theory) == 7
    assert all(claim.ok for claim in theory)
    # What needs hundreds of rounds cannot hold after 6: the bounds say something.
    assert not claims["Sparse-Push, random digraph: last error"].ok


@pytest.mark.long
def test_a_resumed_run_finds_the_same(run) -> None:
    assert resumes(consensus.EXPERIMENT, run)


def test_compressed_rows_send_less_and_dense_rows_what_their_vectors_have(run) -> None:
    findings = run.findings
    tables = {table.title: table for table in findings.tables}
    compressed = [tables[f"Compressed, {kind} graphs"] for kind in ("directed", "undirected")]
    dense = {row[0]: row[5] for row in tables["Without compression"].rows}
    # Header, share of w, ten float64.
    assert dense["SGP, exponential"] == 8 + 8 + 80
    assert dense["D-PSGD, ring"] == 8 + 80
    assert all(0 < row[6] < 80 for table in compressed for row in table.rows)
    assert {table.columns[6] for table in compressed} == {"bytes a message"}


def test_joules_are_those_that_were_given_and_no_column_otherwise(run) -> None:
    cell = ("SGP", "directed-ring", 4)
    track = average({"name": "sgp"}, DirectedRing(4), VALUES, 12, layout=FLAT, seed=0, every=1, late=0.5)
    with_joules = consensus._dense_table({cell: track}, {cell: 0.7}, Energy(2e-9, 1e-9))
    assert with_joules.columns[-1] == "joules per digit"
    assert with_joules.rows[0][-1] == pytest.approx(8 * 3e-9 * 1e3 / track.digits)
    assert "joules per digit" not in {name for table in run.findings.tables for name in table.columns}


@pytest.mark.parametrize(
    ("clients", "assignments", "message"),
    [(3, (), "at least 4"), (4, ("size=10", "k=11"), "exceeds size=10"), (4, ("energy_tx=1e-9",), "give both")],
)
def test_sizes_that_cannot_be_are_refused(clients, assignments, message) -> None:
    config = consensus.EXPERIMENT.configure(clients=clients, assignments=assignments)
    with pytest.raises(ConfigError, match=message):
        consensus.measure(config, {}, Say())


def test_a_torus_is_left_out_where_there_is_none() -> None:
    config = consensus.EXPERIMENT.configure()
    assert consensus._possible(("ring", "torus"), 7, config) == ["ring"]
    assert consensus._possible(("ring", "torus"), 8, config) == ["ring", "torus"]
    with pytest.raises(TopologyError):
        consensus._possible(("digraph",), 8, dataclasses.replace(config, settings={**config.settings, "p": 1e-6}))


def test_fit_finds_slope_and_leaves_rounding_and_the_first_rounds_out() -> None:
    rounds = list(range(200))
    errors = [0.7**k + 0.3 * 0.2**k for k in rounds]
    rate, r2 = fitted(rounds, errors, late=0.5)
    assert rate == pytest.approx(0.7, rel=1e-4)
    assert r2 > 0.9999
    assert fitted(rounds, [max(e, 1e-16) for e in errors], late=0.5) == (rate, r2)
    stalled = fitted(rounds, [0.1 + 0.01 * (-1) ** k for k in rounds], late=0.5)
    assert stalled[0] == pytest.approx(1.0, abs=1e-3)
    assert stalled[1] < 0.1
    assert all(math.isnan(value) for value in fitted([0, 1], [1.0, 1e-20], late=0.5))


def test_average_is_the_product_of_the_matrices_and_counts_real_messages() -> None:
    graph = DirectedRing(4)
    track = average({"name": "sgp"}, graph, VALUES, 12, layout=FLAT, seed=0, every=1, late=0.5)
    np.testing.assert_allclose(track.errors, by_matrices(graph, VALUES, 12, symmetric=False), rtol=1e-9)
    assert track.rounds == list(range(13))
    assert (track.message, track.sent, track.least, track.most) == (96.0, 96.0, 1.0, 1.0)
    assert track.moved < 1e-14
    assert track.digits == pytest.approx(-math.log10(track.rate) / 0.096)
    assert track.joules(3e-8) == pytest.approx(3e-5 / track.digits)
    assert track.joules(None) is None
    assert dataclasses.replace(track, rate=1.0).joules(3e-8) is None
    assert from_fields(Track, json.loads(json.dumps(dataclasses.asdict(track)))) == track
    exact = average({"name": "dpsgd"}, Complete(4), VALUES, 3, layout=FLAT, seed=0, every=1)
    assert exact.rate == 0.0
    assert exact.final < 1e-15


@pytest.mark.long
def test_a_run_that_diverges_is_said_so_and_nothing_else_is_known() -> None:
    options = {"name": "choco", "gamma": 1.0, "compressor": {"id": "topk", "density": 0.1}}
    track = average(options, Ring(4), VALUES, 200, layout=FLAT, seed=0)
    assert track.diverged
    assert track.final == math.inf
    assert math.isnan(track.message)
    assert track.errors[-1] > averaging.GROWN
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
