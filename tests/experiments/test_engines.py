"""The engines: what a run returns, resuming, cohorts, missing nodes; an interrupt on Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp import ServerApp

from fedcomp.clients.app import app as client_app
from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments.engines import ray
from fedcomp.experiments.federation import Cohorts, NodesMissing, wait_for_nodes
from fedcomp.experiments.findings import different_bytes
from fedcomp.experiments.serve import serve
from fedcomp.experiments.spec import RunSpec
from fedcomp.flower.faults import Fault
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid

SMALL = {"task.hidden": "32", "task.partition": "dirichlet:0.5"}


@pytest.mark.long
def test_rounds_are_reported_as_they_finish_and_add_up():
    seen = []
    spec = RunSpec("topk", rounds=3, clients=4, settings=SMALL | {"link": "10mbit"})
    result = engines.run(spec, on_round=seen.append)
    assert [record.to_json() for record in seen] == [record.to_json() for record in result.rounds]
    assert result.spec == spec
    assert result.simulated_seconds == pytest.approx(sum(r.simulated_seconds for r in seen))
    assert result.seconds > sum(r.wall_seconds for r in seen) > 0
    assert result.notes["messages"] == 3 * 4 * 2


@pytest.mark.long
def test_the_virtual_clock_agrees_with_the_link_model_on_counted_bytes():
    from fedcomp.experiments.serve import _rows
    from fedcomp.timing import parse_link, simulated_seconds

    settings = SMALL | {"link": "1mbit", "fraction_evaluate": 1.0}
    result = engines.run(RunSpec("topk", rounds=2, clients=3, settings=settings))
    for record in result.rounds[1:]:
        expected = simulated_seconds(_rows(result.ledger, record.round), parse_link("1mbit"))
        assert record.simulated_seconds == pytest.approx(expected, rel=1e-9)


def test_zero_rounds_evaluate_the_initial_model_and_send_nothing():
    result = engines.run(RunSpec("topk", rounds=0, clients=4, settings=SMALL))
    assert [record.round for record in result] == [0]
    assert len(result.ledger) == 0
    assert 0 < result.accuracy < 0.4


def test_one_client_only():
    result = engines.run(RunSpec("topk", rounds=2, clients=1, settings={"task.hidden": "32"}))
    assert [record.replies for record in result] == [0, 1, 1]
    assert result.final.loss < result.rounds[0].loss


@pytest.mark.long
def test_only_due_rounds_are_evaluated_but_always_the_last():
    settings = SMALL | {"evaluate_every": 3}
    result = engines.run(RunSpec("fedavg", rounds=5, clients=2, settings=settings))
    evaluated = [record.round for record in result if not np.isnan(record.accuracy)]
    assert evaluated == [0, 3, 5]


@pytest.mark.long
@pytest.mark.parametrize(
    ("system", "settings"),
    [
        ("topk", {"downlink": "topk", "downlink.density": 0.1}),
        ("topk", {"inner": "fedadam"}),
        ("fedavg", {"inner": "fedavgm", "inner.server_momentum": 0.5, "fraction": 0.5}),
    ],
)
def test_an_interrupted_run_continues_to_the_same_bits_and_bytes(tmp_path, system, settings):
    spec = RunSpec(system, rounds=4, clients=4, settings=SMALL | settings)
    whole = engines.run(spec)
    file = tmp_path / "checkpoint"

    def interrupt(record):
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engines.run(spec, on_round=interrupt, checkpoint=file)
    new = []
    resumed = engines.run(spec, on_round=new.append, checkpoint=file)
    assert [record.round for record in new] == [3, 4]
    assert [record.round for record in resumed] == [0, 1, 2, 3, 4]
    assert different_bytes(resumed.arrays, whole.arrays) == 0
    assert resumed.ledger == whole.ledger


@pytest.mark.long
def test_a_finished_checkpoint_is_only_read_and_may_be_extended(tmp_path):
    file = tmp_path / "checkpoint"
    spec = RunSpec("topk", rounds=2, clients=3, settings=SMALL)
    done = engines.run(spec, checkpoint=file)
    new = []
    again = engines.run(spec, on_round=new.append, checkpoint=file)
    assert new == []
    assert different_bytes(again.arrays, done.arrays) == 0
    longer = dataclasses.replace(spec, rounds=3)
    assert different_bytes(engines.run(longer, checkpoint=file).arrays, engines.run(longer).arrays) == 0


def test_an_engine_that_cannot_resume_says_so_before_starting_anything(tmp_path):
    with pytest.raises(ConfigError, match="cannot be resumed"):
        engines.run(RunSpec("topk", engine="ray", clients=2), checkpoint=tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="checkpoint_every is for engine="):
        engines.run(RunSpec("topk", engine="ray", clients=2), checkpoint_every=2)


def cohorts(grid, **shares) -> Cohorts:
    query = ConfigRecord({"clients": 10})
    made = Cohorts(grid, clients=10, seed=3, query=query, **{"train": 1.0, "evaluate": 0.0, **shares})
    made.prepare()
    return made


def drawn(view: Cohorts, grid: MeteredGrid, rounds: range) -> list[list[int]]:
    out = []
    for server_round in rounds:
        view.round = server_round
        out.append([grid.inner.partition_of(node) for node in view.get_node_ids()])
    return out


def test_cohorts_depend_on_seed_round_and_partition_alone():
    found = []
    for seed in (0, 1):  # other node ids, another order of replies
        with InProcessGrid(client_app, 10, seed=seed) as inner:
            grid = MeteredGrid(inner)
            found.append(drawn(cohorts(grid, train=0.3), grid, range(1, 30)))
    assert found[0] == found[1]
    assert all(len(cohort) == 3 and cohort == sorted(cohort) for cohort in found[0])
    counts = np.bincount(np.concatenate(found[0]), minlength=10)
    assert counts.min() >= 3  # 29 rounds x 3 of 10: 8.7 on average; a fixed cohort would leave zeros
    assert len({tuple(cohort) for cohort in found[0]}) > 15


def test_a_node_that_leaves_moves_nobody_else_out_of_the_cohort():
    with InProcessGrid(client_app, 10) as inner:
        grid = MeteredGrid(inner)
        view = cohorts(grid, train=0.3)
        (before,) = drawn(view, grid, range(7, 8))
        inner.remove_node(before[0])
        (after,) = drawn(view, grid, range(7, 8))
        assert set(before[1:]) < set(after)
        assert len(after) == 3
        # The node comes back under another id and takes its old place after one more question.
        inner.add_node(before[0])
        (again,) = drawn(view, grid, range(7, 8))
        assert again == before


def test_the_roll_call_is_counted_and_everybody_needs_none():
    for share, messages in ((0.5, 10), (1.0, 0)):
        with InProcessGrid(client_app, 10) as inner:
            grid = MeteredGrid(inner)
            cohorts(grid, train=share)
            assert grid.ledger.total("messages", message_type="query", direction="down") == messages
            assert grid.ledger.total("messages", message_type="query", direction="up") == messages


@pytest.mark.long
def test_training_and_evaluation_draw_cohorts_of_their_own():
    settings = SMALL | {"fraction": 0.5, "fraction_evaluate": 0.25}
    result = engines.run(RunSpec("fedavg", rounds=3, clients=8, settings=settings))
    assert [record.replies for record in result.rounds[1:]] == [4, 4, 4]
    assert result.ledger.total("messages", message_type="evaluate", direction="up") == 3 * 2
    assert 0 <= result.final.metrics["clients.accuracy"] <= 1


def test_missing_nodes_are_an_error_after_the_limit():
    with (
        InProcessGrid(client_app, 2) as grid,
        pytest.raises(NodesMissing, match=r"2 of 3 nodes are online after 0\.1 s"),
    ):
        wait_for_nodes(grid, 3, 0.1)


def test_nodes_beyond_the_partitions_are_left_out():
    with InProcessGrid(client_app, 4) as inner:
        spec = RunSpec("fedavg", rounds=1, clients=4, settings=SMALL)
        inner.add_node(4)  # a fifth node of a federation that was split in four
        result = serve(spec, inner)
        assert result.final.replies == 4
        assert result.final.failures == 0


def test_failed_clients_are_counted_and_their_reasons_kept():
    def fault(delivery):
        return Fault("raise") if delivery.partition == 1 and delivery.message_type == "train" else None

    with InProcessGrid(client_app, 3, fault=fault) as inner:
        result = serve(RunSpec("fedavg", rounds=1, clients=3, settings=SMALL), inner)
    assert (result.final.replies, result.final.failures) == (2, 1)
    assert result.final.metrics["report.errors_because"]


def test_an_interrupted_simulation_lets_its_process_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower runs the server app in a thread that no interrupt reaches, and which would keep the process alive."""
    begun, threads = threading.Event(), []

    def simulation(server_app: ServerApp, **options: Any) -> None:
        def serve() -> None:
            with contextlib.suppress(ray.SimulationError):
                server_app(grid, Context(grid.run.run_id, 0, {}, RecordDict(), {}))

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[0].start()
        begun.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "run_simulation", simulation)
    spec = RunSpec("topk", engine="ray", clients=2, rounds=100_000, settings=SMALL)
    with InProcessGrid(client_app, 2) as grid:
        with pytest.raises(KeyboardInterrupt):
            engines.run(spec, on_round=lambda record: begun.set())
        threads[0].join(300)
        assert not threads[0].is_alive()
