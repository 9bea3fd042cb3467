"""The experiment on COLD: bits are those of messages, what did not arrive counts as nothing, and claims can fail."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
from experiment_runs import Ran, ran, resumes

from fedcomp.experiments import convex
from fedcomp.experiments.catalog import cold
from fedcomp.experiments.catalog.cold import GEOMETRIC, NIDS, TOP20, TWO_BITS, ZOOM
from fedcomp.experiments.findings import different_bytes
from fedcomp.experiments.kit import Record
from fedcomp.experiments.relayed import without_messages

SMALL = ("most=14", "tolerance=0.09", "l2=5", "topology=complete", "energy_tx=2e-9", "energy_rx=1e-9")
D = 65


@pytest.fixture(scope="module")
def problem() -> convex.Convex:
    from fedcomp.tasks import get_task

    return convex.Convex.of(get_task(cold.TASK, partition="sorted", l2=5.0), 4)


@pytest.fixture(scope="module", autouse=True)
def one_problem(problem: convex.Convex) -> Iterator[None]:
    """Newton's method is the longest part of so short a run."""

    def known(task: Any, nodes: int) -> convex.Convex:
        assert (task.name, task.options["partition"], task.options["l2"], nodes) == (cold.TASK, "sorted", 5.0, 4)
        return problem

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convex.Convex, "of", known)
        yield


@pytest.fixture(scope="module")
def run(one_problem: None) -> Ran:
    """Everything on four fully connected nodes, for fourteen iterations at most."""
    return ran(cold.EXPERIMENT, *SMALL, rounds=4, clients=4, unread=cold.ENERGY_OPTIONS)


def courses(kept: dict[str, Any]) -> dict[str, Record]:
    return {name: Record({"run": name, **found}) for name, found in kept.items() if name != "fixed points"}


@pytest.mark.long
def test_bits_are_those_of_the_messages(run: Ran) -> None:
    found = courses(run.kept)
    digest = 8 * 8
    for name, body in ((NIDS, 8 * D), (GEOMETRIC, math.ceil(D / 8)), (ZOOM, math.ceil(D / 8))):
        course = found[name]
        first = 0 if name == NIDS else digest
        assert list(course.payload_bits) == [0, *(8 * body * k + first for k in range(1, 15))]
        assert [a - b for a, b in zip(course.bits, course.payload_bits, strict=True)] == [64 * k for k in range(15)]
    assert found[cold.FLOAT32].message == 4 * D
    assert cold.nids_bits(found) == 32 * D * found[NIDS].first
    # A norm in float32, and two bits of level with a sign.
    bits = 8 * (4 + math.ceil(3 * D / 8)) * found[TWO_BITS].first + digest
    assert cold.fewer(found, TWO_BITS) == cold.nids_bits(found) / bits


@pytest.mark.long
def test_methods_arrive_in_the_order_of_their_compression(run: Ran) -> None:
    found = courses(run.kept)
    assert found[NIDS].first <= 14
    assert cold.slowdown(found, NIDS) == 1.0
    assert math.isnan(cold.first(found[cold.SIGN]))
    assert found[cold.SIGN].errors[-1] > found[TOP20].errors[-1]
    assert cold.lowest(found, "D-PSGD") > found[NIDS].errors[-1]
    assert found["geometric, s0 / 100"].saturated
    assert not found[GEOMETRIC].saturated


@pytest.mark.long
def test_rows_over_flower_are_the_runs_in_one_process_and_a_wrong_one_shows(run: Ran) -> None:
    _, results, findings, _, _ = run
    apart = [claim for claim in findings.claims if "differ from the run in one process" in claim.name]
    assert [claim.name.partition(":")[0] for claim in apart] == [NIDS, ZOOM]
    assert all(claim.ok for claim in apart)
    (table,) = [t for t in findings.tables if t.title == "Over Flower's messages"]
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows[NIDS]["message with header, bytes"] == 8 + 8 * D
    assert rows[ZOOM]["message with header, bytes"] == 8 + math.ceil(D / 8)
    assert rows[NIDS]["edge bytes a round"] == 3 * rows[NIDS]["node bytes"]
    shorter = without_messages(dataclasses.replace(results[NIDS].spec, rounds=3))
    assert different_bytes(results[NIDS].arrays, shorter.arrays) > 0


@pytest.mark.long
def test_energy_is_what_was_given_per_bit_and_missing_otherwise(run: Ran) -> None:
    config, _, findings, kept, _ = run
    name = "joules per edge"
    column = findings.tables[0].columns.index(name)
    row = next(row for row in findings.tables[0].rows if row[0] == NIDS)
    assert row[column] == pytest.approx(3e-9 * cold.sent(courses(kept)[NIDS], headers=True))
    silent = dataclasses.replace(config, settings={**dict(config.settings), "energy_tx": "", "energy_rx": ""})
    table = cold._arrival_table(silent, courses(kept))
    assert table.columns == tuple(c for c in findings.tables[0].columns if c != name)
    assert table.rows[0] == tuple(cell for n, cell in enumerate(findings.tables[0].rows[0]) if n != column)


@pytest.mark.long
def test_a_resumed_run_computes_nothing_anew(run: Ran, monkeypatch: Any) -> None:
    def never(*args: Any, **how: Any) -> None:
        raise AssertionError("a run that was kept was made again")

    monkeypatch.setattr(convex, "error_curve", never)
    assert resumes(cold.EXPERIMENT, run)


@pytest.mark.long
def test_claims_are_the_goals_and_fail_when_nothing_arrived(run: Ran) -> None:
    config, _, findings, kept, _ = run
    found = {claim.name: claim for claim in findings.claims}
    assert [name for name, claim in found.items() if not claim.gate] == [f"{cold.NORM_SIGN}: R² of that line"]
    bounds = {(claim.op, claim.bound) for claim in found.values() if claim.source == cold.GOAL}
    assert bounds == {("<=", 1.2), (">=", 25.0), (">", 0.99)}
    lost = {"first": None, "rate": math.nan, "r2": math.nan, "conserved": math.nan, "saturated": False}
    nothing = {name: Record({**one, **lost, "errors": [math.nan] * 15}) for name, one in courses(kept).items()}
    assert not any(claim.ok for claim in cold.claims(config, nothing, dict.fromkeys(kept["fixed points"], math.nan)))


def test_c4_every_inexact_method_gets_the_same_steps_and_as_many_iterations() -> None:
    found = cold.floors(cold.EXPERIMENT.configure())
    assert {iterations for _, iterations in found.values()} == {1200}
    assert list(found) == [f"{label}, ηL = {s:g}" for label in cold.INEXACT for s in cold.FLOOR_STEPS]
    assert {make(0.5, 1.0)["lr"] for make, _ in found.values()} == {0.5 * s for s in cold.FLOOR_STEPS}


@pytest.mark.long
def test_c4_no_floor_is_claimed_by_theory_and_the_one_that_is_falls_with_the_step(run: Ran) -> None:
    """ "Lowest error > 0.05 (theory)" was a product of the grid: at 0.01/L the fixed point is at 0.034."""
    _, _, findings, kept, _ = run
    lowest = [c for c in findings.claims if "lowest error" in c.name]
    assert len(lowest) == 2
    assert all("theory" not in c.source and "not a bound" in c.source and "1200 iterations" in c.name for c in lowest)
    fixed = [kept["fixed points"][f"D-PSGD, ηL = {s:g}"] for s in (0.01, 0.003, 0.001)]
    assert fixed[0] > 3 * fixed[1] > 8 * fixed[2] > 0


@pytest.mark.long
def test_c4_runs_of_d_psgd_and_choco_end_at_the_fixed_point(problem: convex.Convex) -> None:
    from fedcomp.gossip import get_algorithm
    from fedcomp.gossip.topology import Complete

    weights, lr = Complete(4).mixing_matrix(0, symmetric=True), 0.3 / problem.smoothness
    for own, gamma in (({"name": "dpsgd"}, 1.0), ({"name": "choco", "gamma": 0.5, **cold.top(0.5)}, 0.5)):
        last = own["name"] == "choco"
        point = convex.fixed_point(problem, weights, lr, gamma=gamma, mixes_last=last)
        curve = convex.error_curve(problem, get_algorithm({**own, "lr": lr}), Complete(4), 60)
        assert curve.errors[-1] == pytest.approx(problem.distance(point), rel=1e-3)
        other = convex.fixed_point(problem, weights, lr, gamma=gamma, mixes_last=not last)
        assert curve.errors[-1] != pytest.approx(problem.distance(other), rel=1e-2)
