"""Benchmarks at their smallest sizes: rows of what they measure, nothing that decides, no times."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from fedcomp import heap
from fedcomp.codecs import Identity
from fedcomp.experiments.bench import BENCHMARKS, gossip, graphs, server, state
from fedcomp.experiments.bench import round as rounds
from fedcomp.experiments.bench.graph_rows import id_table, row_table
from fedcomp.gossip import get_algorithm
from fedcomp.graphs.ids import encode_ids
from fedcomp.graphs.rowcodecs import ROW_CODECS
from fedcomp.layout import Layout
from fedcomp.measuring import Found, run
from fedcomp.rng import Key

Rows = list[dict[str, Any]]


def of_state(rows: Rows) -> None:
    assert [row["what"] for row in rows] == ["save", "load", "look at the head", "write and flush"]
    assert {row["state in MB"] for row in rows} == {state.SIZES[0] / 1e6}
    assert rows[-1]["times write and flush"] == 1.0
    (goal,) = quick("state").claims
    assert goal.value == rows[0]["times write and flush"]


def of_upkeep(rows: Rows) -> None:
    kinds = ["step", "checkpoint", "checkpoint", *(["arrays"] if heap.is_glibc() else [])]
    assert [row["what"] for row in rows] == kinds
    assert all(row["ratio"] > 0 for row in rows)
    (step,) = (row for row in rows if row["what"] == "step")
    assert step["peak in models"] < step["run on it, peak"]


def of_round(rows: Rows) -> None:
    """Both halves of every system, and of other codecs with the fewest replies."""
    found = {(row["system"], row["replies"]): row for row in rows}
    counts = {name: {rounds.FEW, rounds.MANY} if name in rounds.SYSTEMS else {rounds.FEW} for name in rounds.CODECS}
    counts[rounds.PLAIN] = {rounds.FEW, rounds.MANY}
    assert set(found) == {(system, count) for system, several in counts.items() for count in several}
    whole = found[rounds.PLAIN, rounds.FEW]["kB up"]
    for (system, _), row in found.items():
        assert row["server, read passes"] > 0
        assert row["server, models"] > 0
        if system != rounds.PLAIN:
            assert row["client, read passes"] > 0
        codec, downlink = rounds.CODECS.get(system, (Identity(), None))
        assert (row["kB up"] < whole / 4) == (codec != Identity())
        assert (row["kB down"] < whole / 4) == (downlink is not None)


def of_gigabytes(rows: Rows) -> None:
    """Both halves of the pair, a base model that is read and not sent, and a state that comes back as it was."""
    assert [row["system"] for row in rows if "system" in row] == list(rounds.SYSTEMS)
    found = {row["what"]: row for row in rows if "what" in row}
    values = 64 * (100 + 2 * 12 * 64)
    assert found["digest"]["base, values"] == found["client"]["base, values"] == values
    assert 0 < 1e3 * found["client"]["kB up"] < values / 8
    assert found["save"]["bytes left"] > 1e6 * found["save"]["MB"], "a message carries so small a state"
    assert found["load"]["differ"] == found["load the checkpoint"]["differ"] == 0


def of_server(rows: Rows) -> None:
    """With more clients than distinct updates: a codec that draws for each sender needs a frame from each."""
    found = {(row["codec"], row["clients"]): row for row in rows}
    assert {codec for codec, _ in found} == {server.PLAIN, *server.CODECS}
    assert {clients for _, clients in found} == {2, 12}
    for (codec, _), row in found.items():
        assert row["ms per client and million values"] > 0
        # All but plain models take fewer bytes, or a header more.
        assert row["bytes of a reply"] <= 80_000 + 44 * (codec != server.PLAIN)
    assert len(quick("server").claims) == 3 * len(server.CODECS)


def of_graphs(rows: Rows) -> None:
    steps = [row for row in rows if "step_ms" in row]
    small, large = graphs.QUICK
    owned = small // graphs.PARTS
    asked = [(small, graphs.PARTS), (large, graphs.PARTS), (large, large // owned)]
    assert [(row["nodes"], row["parts"]) for row in steps] == asked
    assert steps[-1]["owned"] == owned == steps[0]["owned"]
    # Each edge in both directions and a loop for each node.
    assert all(row["entries"] == 2 * row["edges"] + row["nodes"] for row in steps)
    assert all(row["step_ms"] == pytest.approx(row["plan_ms"] + row["gather_ms"] + row["train_ms"]) for row in steps)
    # Inputs alone: nodes kept, 64 float32 each.
    assert all(row["step_kb"] > 0.9 * 256 * min(graphs.KEPT, row["nodes"]) / 1e3 for row in steps)
    whole = [row for row in rows if "round_ms" in row]
    assert all(row["link_bytes"] >= 2 * 256 * row["remote_inputs"] > 0 for row in whole)
    assert len([row for row in rows if "times_faster" in row]) == len(graphs.QUICK)


def of_gossip(rows: Rows) -> None:
    runs = [row for row in rows if "algorithm" in row]
    sizes = {(4, 8), (8, 24)}, {(4, 8), (8, 16)}
    for graph, expected in zip(("exponential", "ring"), sizes, strict=True):
        assert {(row["nodes"], row["edges"]) for row in runs if row["graph"] == graph} == expected
    assert {row["graph"] for row in runs} == {"exponential", "ring"}
    assert {row["gradient"] for row in runs} == {"synthetic", "torch"}
    assert all(row["us_per_edge"] > 1.0 for row in runs)
    assert any("protocol" in row for row in rows)


def of_graph_rows(rows: Rows) -> None:
    values = [row for row in rows if "rows" in row]
    assert {(row["rows"], row["features"]) for row in values} == {
        (n, kind) for n in (128, 20) for kind in ("binary", "rows")
    }
    assert {row["ids"] for row in rows if "ids" in row} == {128, 20}
    assert all(row["per_row"] == row["bytes"] / row["rows"] for row in values)


MEASURES: dict[str, Callable[[Rows], None]] = {
    "state": of_state,
    "upkeep": of_upkeep,
    "round": of_round,
    "gigabytes": of_gigabytes,
    "server": of_server,
    "graphs": of_graphs,
    "graph_rows": of_graph_rows,
    "gossip": of_gossip,
}
"""What is seen of each benchmark's rows."""


@cache
def quick(name: str) -> Found:
    said: list[str] = []
    found = run(importlib.import_module(BENCHMARKS[name][0]).cases(True), quick=True, say=said.append)
    assert all(said)
    assert 0 < len(said) <= len(found.rows)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in ("round", "gigabytes", "server") else ())
        for name in MEASURES
    ],
)
def test_a_quick_run_measures_what_it_says_and_gates_nothing(name: str) -> None:
    found = quick(name)
    MEASURES[name](found.rows)
    assert not any(claim.gate for claim in found.claims), "figures of the smallest sizes say nothing"


def test_the_reference_draws_the_columns_of_its_rows_and_weighs_them_as_published() -> None:
    matrix = csr_matrix(np.array([[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 1.0, 0], [0.25, 0.25, 0.25, 0.25]]))
    (operator,) = graphs.ladies(matrix, np.array([0, 1]), 2, 1, np.random.default_rng(0))
    p = np.array([0.25, 0.5, 0.25, 0.0])
    dense = operator.toarray()
    assert dense.shape == (2, 2)
    whole = matrix.toarray()[:2]
    columns = [next(i for i in range(4) if np.allclose(dense[:, k] * 2 * p[i], whole[:, i])) for k in range(2)]
    assert len(set(columns)) == 2
    assert 3 not in columns


def test_the_time_of_an_iteration_leaves_out_the_first_and_no_other() -> None:
    sgp = get_algorithm({"name": "sgp"})
    ticks, _ = gossip.clocked("ring", 3, 3, sgp, np.zeros(4), Layout.flat(4), None)
    assert len(ticks) == 4, "one before each iteration, and one before the round that only delivers"
    assert gossip.iteration([0.0, 50.0, 51.0, 54.0]) == 2.0


IDS = np.arange(2, 200, 9)
WORDS = (Key(1, "bench words").uniform(IDS.size * 300).reshape(IDS.size, 300) < 0.05).astype(np.float32)


def test_row_tables_measure_frames() -> None:
    lines = {line["what"]: line for line in row_table(IDS, WORDS / 3, repeats=1)}
    assert {*ROW_CODECS, "np.savez_compressed", "zlib"} <= set(lines)
    for name, codec in ROW_CODECS.items():
        assert lines[name]["bytes"] == len(codec.encode(IDS, WORDS / 3))
        assert lines[name]["per_row"] == lines[name]["bytes"] / IDS.size
    exact = {name for name, line in lines.items() if line["error"] == 0.0}
    assert exact >= {n for n, c in ROW_CODECS.items() if c.exact_for(np.float32)} | {"np.savez_compressed", "zlib"}
    assert 0 < lines["csr-f16"]["error"] < 1e-3
    assert lines["auto"]["chosen"] == "binary-rice"
    # Codecs that cannot hold the rows are left out.
    mixed = WORDS * np.arange(1, 301, dtype=np.float32)
    assert {line["what"] for line in row_table(IDS, mixed, repeats=1)} == set(lines) - {"binary-rice"}


def test_id_tables_measure_frames() -> None:
    gaps, plain = id_table(IDS, repeats=1)
    assert gaps["bytes"] == len(encode_ids(IDS)) == round(gaps["per_id"] * IDS.size)
    assert plain["what"] == "int32 + zlib"
