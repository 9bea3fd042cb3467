"""The benchmark of graph learning, with its smallest sizes, and the sampler it compares with."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from fedcomp.experiments.bench import BENCHMARKS, graphs


@pytest.mark.slow
def test_the_quick_benchmark_measures_steps_rounds_samplers_and_rows() -> None:
    said: list[str] = []
    result = graphs.run(quick=True, progress=said.append)
    rows = result["rows"]
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
    sizes = {(row["row codec"], row["rows"]): row["per_row"] for row in rows if "row codec" in row}
    assert sizes["auto", "1433 words, 18 of them"] < 25 < 5732 < sizes["dense-f32", "1433 words, 18 of them"]
    assert not any(claim.gate for claim in result["claims"]), "figures of the smallest sizes say nothing"
    assert BENCHMARKS["graphs"][0] == graphs.__name__
    assert said


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
