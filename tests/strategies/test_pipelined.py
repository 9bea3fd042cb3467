"""Pipelined rounds: the recursion, its start and end, cohorts, faults, late replies, checkpoints.

Numbers are those of the test list for Pipe-SGD: 1 width one, 2 the recursion, 3 warm-up, 5 cohorts, 8 a node
that never answers. 6, 7 and 10 are in tests/timing; 9, server work that is hidden, needs real seconds and is in
test_coded_deployment.py.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian
from round_paths import quiet
from toy import client_app, model, with_halves

from fedcomp.clients.compressed import compression
from fedcomp.codecs import Codec, Identity, RandomK, SignSGD, TopK
from fedcomp.errors import ConfigError, NoUsableReply
from fedcomp.flower import checkpoint
from fedcomp.flower.faults import Delivery, Fault, RandomFaults, ScriptedFaults, late
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.deadlines import Deadline
from fedcomp.strategies.overlap import Buffered, Overlap, PipelinedStrategy

SIZE = 6
STEP = np.float32(0.2)


def problem(partition: int) -> tuple[np.ndarray, np.ndarray]:
    """Return matrix and right-hand side of a client's least squares, float32."""
    draw = Key(5, "pipelined", partition=partition).generator()
    return draw.standard_normal((8, SIZE)).astype(np.float32) / 3, draw.standard_normal(8).astype(np.float32)


def gradient(weights: np.ndarray, partition: int) -> np.ndarray:
    matrix, right = problem(partition)
    return matrix.T @ (matrix @ weights - right)


def squares(halves: Any = (), log: list[tuple[int, int, np.ndarray]] | None = None) -> Callable[..., Message]:
    """Return an app that takes one gradient step, and counts its rounds in its context."""
    app = with_halves(halves)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        (name, record), config = next(iter(msg.content.array_records.items())), msg.content.config_records
        number = int(next(iter(config.values()))["server-round"])
        partition = int(context.node_config["partition-id"])
        weights = record["w"].numpy()
        if log is not None:
            log.append((number, partition, weights.copy()))
        count = int(context.state.config_records.get("count", ConfigRecord({"n": 0}))["n"]) + 1
        context.state["count"] = ConfigRecord({"n": count})
        moved = weights - STEP * gradient(weights, partition)
        metrics = MetricRecord({"num-examples": 1, "count": count})
        content = RecordDict({name: ArrayRecord({"w": Array(moved)}), "metrics": metrics})
        content["fedcomp.node"] = ConfigRecord({"partition-id": partition})
        return Message(content, reply_to=msg)

    return app


def start(dtype: str = "float32") -> ArrayRecord:
    return ArrayRecord({"w": Array(np.linspace(-1, 1, SIZE).astype(np.float32).astype(dtype))})


def run(
    strategy: Any,
    rounds: int,
    nodes: int = 4,
    *,
    app: Any = None,
    dtype: str = "float32",
    on_round: Any = None,
    **engine: Any,
) -> tuple[np.ndarray, InProcessGrid]:
    """Return the last weights, and the engine, whose clock stands where the run ended."""
    with InProcessGrid(app or squares(), nodes, seed=3, **engine) as inner:
        result = fit(strategy, MeteredGrid(inner), start(dtype), rounds, on_round=on_round)
    return result.arrays["w"].numpy(), inner


def sparse(density: float = 0.3, inner: FedAvg | None = None, **options: Any) -> Compressed:
    return Compressed(inner or quiet(), TopK(density=density), **options)


def pipe(inner: FedAvg | None = None, width: int = 2, **options: Any) -> PipelinedStrategy:
    return PipelinedStrategy(inner or quiet(), width, **options)


def turns(width: int, nodes: int = 4) -> Callable[[int], list[int]]:
    """Return who takes part in a round: the cohorts take turns."""
    return lambda number: list(range(nodes))[(number - 1) % width :: width]


def recursion(rounds: int, width: int, warmup: int, members: Callable[[int], list[int]], wrong: str = "") -> np.ndarray:
    """Return the weights after each applied update, in float64 but for the clients' own float32 steps.

    ``wrong`` is a mistake at the switch from warm-up to the pipe: its first update is "twice" applied, or "dropped"; or
    it is one in the end: those that are left are "not drained".
    """
    weights = [start()["w"].numpy().astype(np.float64)]
    sent: dict[int, np.ndarray] = {}

    def apply(number: int) -> None:
        mean = np.mean([gradient(sent[number], p).astype(np.float64) for p in members(number)], axis=0)
        weights.append(weights[-1] - float(STEP) * mean)

    queue: list[int] = []
    for number in range(1, rounds + 1):
        sent[number] = weights[-1].astype(np.float32)
        queue.append(number)
        while len(queue) >= (1 if number <= warmup else width):
            apply(oldest := queue.pop(0))
            if oldest == warmup + 1 and wrong == "twice":
                apply(oldest)
            if oldest == warmup + 1 and wrong == "dropped":
                weights.append(weights[-2])
    while queue and wrong != "not drained":
        apply(queue.pop(0))
    return np.array(weights)


@pytest.mark.parametrize("inner", [FedAvg, FedAdam, FedAvgM, FedMedian])
def test_1_width_one_is_the_strategy_itself_bit_for_bit(inner: type[FedAvg]) -> None:
    results = []
    for strategy in (sparse(0.5, quiet(inner)), pipe(sparse(0.5, quiet(inner)), 1)):
        with InProcessGrid(squares([compression()]), 4, seed=3) as grid:
            results.append(strategy.start(MeteredGrid(grid), start(), num_rounds=6, timeout=60))
    plain, piped = results
    assert plain.arrays["w"].numpy().tobytes() == piped.arrays["w"].numpy().tobytes()
    assert list(plain.train_metrics_clientapp) == list(piped.train_metrics_clientapp)


@pytest.mark.parametrize("width", [2, 3])
def test_2_wider_ones_are_the_closed_recursion_from_the_first_step_to_the_drain(width: int) -> None:
    rounds, strategy = 11, pipe(width=width)
    seen: list[np.ndarray] = []
    run(strategy, rounds, 6, on_round=lambda r, arrays, _: seen.append(arrays["w"].numpy().copy()))
    wanted = recursion(rounds, width, 0, turns(width, 6))
    assert len(wanted) == rounds + 1, "every update is applied once, those of the drain included"
    # Nothing is applied while the pipe fills, and the last round applies all that is left.
    for number in range(1, rounds):
        np.testing.assert_allclose(seen[number - 1], wanted[max(0, number - width + 1)], atol=2e-6)
    np.testing.assert_allclose(seen[-1], wanted[-1], atol=2e-6)
    assert strategy.steps == rounds
    delays = [max(strategy.reports[r].overlap.staleness.values()) for r in range(1, rounds + 1)]
    assert delays == [min(r - 1, width - 1) for r in range(1, rounds + 1)]


@pytest.mark.parametrize(("dtype", "within"), [("float64", 2e-6), ("float16", 4e-3)])
@pytest.mark.parametrize("lossless", [True, False])
def test_2_models_of_other_floats_follow_the_same_recursion(dtype: str, within: float, lossless: bool) -> None:
    """Beside a lossless codec they travel as values, of which the mean is no step."""
    strategy = pipe() if lossless else pipe(sparse(1.0, feedback=False))
    end, _ = run(strategy, 10, app=squares([] if lossless else [compression()]), dtype=dtype)
    assert end.dtype == dtype
    np.testing.assert_allclose(end, recursion(10, 2, 0, turns(2))[-1], atol=within)


def test_2_averaging_models_instead_would_be_two_trainings() -> None:
    """The classic mistake is not what happens: with it even and odd rounds never see each other."""
    piped, _ = run(pipe(), 10)
    for cohort in ([0, 2], [1, 3]):
        alone = recursion(5, 1, 0, lambda _, cohort=cohort: cohort)[-1]
        assert np.abs(piped - alone).max() > 0.05


@pytest.mark.parametrize("warmup", [1, 3, 20])
def test_3_the_switch_after_warm_up_neither_drops_nor_doubles_a_gradient(warmup: int) -> None:
    strategy = pipe(warmup_rounds=warmup)
    end, _ = run(strategy, 9)
    wanted = recursion(9, 2, warmup, turns(2))
    np.testing.assert_allclose(end, wanted[-1], atol=2e-6)
    assert Counter(strategy.reports[r].used for r in range(1, 10)) == {2: 9}
    for wrong in ("twice", "dropped", "not drained") if warmup < 8 else ():
        mistaken = recursion(9, 2, warmup, turns(2), wrong)
        assert np.abs(end - mistaken[-1]).max() > 1e-3, wrong


class Watching(MeteredGrid):
    """Notes how many nodes are at work, of whom none has two messages."""

    def __init__(self, inner: InProcessGrid, strategy: Any) -> None:
        super().__init__(inner)
        self.strategy, self.busy = strategy, list[int]()

    def push_messages(self, messages: Any) -> Any:
        nodes = [sent.node for each in self.strategy.flights for sent in each.waiting]
        self.busy.append(len(nodes))
        assert len(set(nodes)) == len(nodes)
        return super().push_messages(messages)


@pytest.mark.parametrize("width", [2, 3])
def test_5_no_node_has_two_messages_and_every_node_keeps_its_memory(width: int) -> None:
    strategy = pipe(sparse(), width)
    with InProcessGrid(squares([compression()]), 6, seed=3) as inner:
        grid = Watching(inner, strategy)
        result = fit(strategy, grid, start(), 12)
        counts = {node.partition: node.context().state["count"]["n"] for node in inner._nodes.values()}
    assert max(grid.busy) == 6
    assert counts == dict.fromkeys(range(6), 12 // width)
    assert all(not strategy.reports[r].rolled_back for r in range(1, 13))
    assert len(result.train_metrics_clientapp) == 12 - width + 1


def test_5_newcomers_join_the_smaller_cohort_and_stay() -> None:
    strategy = pipe(width=2)
    with InProcessGrid(squares(), 3, seed=3) as inner:
        grid = MeteredGrid(inner)

        def joins(number: int, arrays: ArrayRecord, _: Any) -> None:
            if number == 3:
                inner.add_node(3)

        fit(strategy, grid, start(), 8, on_round=joins)
    assert sorted(strategy.cohorts.values()) == [0, 0, 1, 1]
    assert [strategy.reports[r].used for r in (7, 8)] == [2, 2]


def test_8_a_node_that_never_answers_costs_one_timeout_and_blocks_no_other_round() -> None:
    def fault(delivery: Delivery) -> str | None:
        return "silent" if delivery.round == 3 and delivery.partition == 2 else None

    strategy = pipe(width=2, timeout=10.0)
    _, grid = run(strategy, 8, fault=fault, compute_seconds=1.0)
    assert [strategy.reports[3].lost, strategy.reports[3].used] == [1, 1]
    assert [strategy.reports[r].used for r in (4, 6, 8)] == [2, 2, 2]
    # Eight rounds of one second, of which two always overlap, and once the timeout.
    assert 4.0 <= grid.clock <= 4.0 + 10.0 + 1.0
    # It may be at work still, and is not given a second message before that time has passed once more.
    assert [strategy.reports[r].overlap.held_back for r in (5, 7)] == [1, 1]


def test_8_a_late_reply_is_dropped_said_and_put_back_by_its_client() -> None:
    def slow(delivery: Delivery) -> float:
        return 12.0 if (delivery.round, delivery.partition) == (3, 2) else 1.0

    strategy = pipe(sparse(), 2, timeout=10.0)
    run(strategy, 12, app=squares([compression()]), compute_seconds=slow)
    reports = [strategy.reports[r] for r in range(1, 13)]
    assert sum(report.overlap.late for report in reports) == 1
    assert [report.round for report in reports if report.rolled_back] != []
    assert reports[2].lost == 1
    assert reports[-1].used == 2, "the node is back"


def test_a_reply_that_waits_for_later_pushes_is_late_too() -> None:
    strategy = pipe(width=1, timeout=5.0)
    run(strategy, 4, fault=ScriptedFaults({(2, 1): late(1)}))
    assert strategy.reports[2].lost == 1
    assert sum(strategy.reports[r].overlap.late for r in (1, 2, 3, 4)) == 1


def test_clients_evaluate_on_a_drained_pipe() -> None:
    strategy = PipelinedStrategy(
        FedAvg(min_train_nodes=1, min_available_nodes=1, min_evaluate_nodes=1), evaluate_every=3
    )
    with InProcessGrid(client_app(), 4, seed=3) as inner:
        result = fit(strategy, MeteredGrid(inner), model(), 7)
    assert list(result.evaluate_metrics_clientapp) == [3, 6]
    assert strategy.steps == 7
    # In the round after a drain the pipe fills again.
    assert [max(strategy.reports[r].overlap.staleness.values()) for r in range(1, 8)] == [0, 1, 1, 0, 1, 1, 0]


def test_a_deadline_names_the_setting_that_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"quantile=80 is not valid: quantile must be a number in \(0, 1\]"):
        Deadline(80)


def test_an_adaptive_deadline_leaves_the_slow_out_and_asks_them_again() -> None:
    def seconds(delivery: Delivery) -> float:
        return 30.0 if delivery.partition == 4 else 1.0 + 0.1 * delivery.partition

    strategy = pipe(sparse(), 1, timeout=40.0, deadline=Deadline(0.8, 1.5))
    _, grid = run(strategy, 40, 5, app=squares([compression()]), compute_seconds=seconds)
    used = [strategy.reports[r].used for r in range(1, 41)]
    assert used[0] == 5, "nobody is known yet, so all are waited for"
    assert set(used[1:]) == {4}
    assert grid.clock < 30.0 + 39 * 3.0
    assert sum(strategy.reports[r].overlap.late for r in range(1, 41)) >= 1


@pytest.mark.parametrize(
    ("quorum", "grace", "used", "seconds"),
    [(2, 0.0, {0, 1}, 2.0), (2, 1.5, {0, 1, 2}, 3.5), (4, 0.0, {0, 1, 2, 3}, 9.0), (0, 1.0, {0, 1, 2, 3}, 9.0)],
    ids=["no grace", "grace", "everybody", "without a quorum"],
)
def test_a_round_ends_a_grace_after_its_quorum(quorum: int, grace: float, used: set[int], seconds: float) -> None:
    """Clients take 1, 2, 3 and 9 seconds, then the slow ones are the fast ones. Late answers are reported, and put back
    by their clients when these are asked again.
    """
    strategy = pipe(sparse(), 1, quorum=quorum, grace=grace)

    def compute(delivery: Delivery) -> float:
        first = (1.0, 2.0, 3.0, 9.0)[delivery.partition]
        return first if delivery.round == 1 else 1.0 - 0.1 * delivery.partition

    with InProcessGrid(squares([compression()]), 4, seed=3, compute_seconds=compute) as inner:
        ends: list[float] = []
        nodes = list(inner.get_node_ids())
        fit(strategy, MeteredGrid(inner), start(), 20, on_round=lambda *_: ends.append(inner.clock))
    numbers = {node: number for number, node in enumerate(nodes)}
    assert {numbers[node] for node in strategy.reports[1].weights} == used
    assert ends[0] == pytest.approx(seconds)
    late = sum(strategy.reports[r].overlap.late for r in range(1, 21))
    back = {numbers[node] for r in range(1, 21) for node in strategy.reports[r].rolled_back}
    assert (late > 0) is (len(used) < 4)
    assert {0, 1, 2, 3} - used <= back
    assert bool(back) is bool(late)


def test_failures_are_no_part_of_a_quorum() -> None:
    def failing(delivery: Delivery) -> Fault | None:
        return Fault("raise") if delivery.partition == 0 else None

    strategy, pace = pipe(sparse(), 1, quorum=2), lambda delivery: 1.0 + delivery.partition
    _, grid = run(strategy, 1, app=squares([compression()]), fault=failing, compute_seconds=pace)
    nodes = list(grid.get_node_ids())
    assert {nodes.index(node) for node in strategy.reports[1].weights} == {1, 2}


PACES = (1.0, 1.37, 2.11, 3.3, 5.71)
"""Seconds that each client of a buffer takes; no two ever finish at once."""

NODES = len(PACES)


def seconds(delivery: Delivery) -> float:
    return PACES[delivery.partition]


def both_ways() -> Compressed:
    return sparse(inner=quiet(FedAdam), downlink=TopK(density=0.5), seed=1)


@pytest.mark.parametrize(
    ("build", "engine", "at", "waiting"),
    [
        (lambda: pipe(both_ways(), 2, warmup_rounds=1), {}, 5, {3}),
        (lambda: pipe(both_ways(), 3, warmup_rounds=1), {}, 5, {4}),
        # Three of four: the step freed two clients, of whom nobody was asked yet.
        (
            lambda: Buffered(both_ways(), concurrency=4, buffer=2, max_staleness=3),
            {"compute_seconds": seconds},
            9,
            {1, 2, 3},
        ),
    ],
    ids=["width 2", "width 3", "buffered"],
)
def test_a_checkpoint_with_updates_under_way_goes_on_bit_for_bit(
    build: Callable[[], Any], engine: dict[str, Any], at: int, waiting: set[int], tmp_path: Path
) -> None:
    app, path, nodes = squares([compression()]), tmp_path / "run.ckpt", NODES if engine else 6
    whole, _ = run(build(), 2 * at, nodes, app=app, **engine)

    def under_way(strategy: Any) -> int:
        return sum(len(each.waiting) for each in strategy.flights)

    with InProcessGrid(app, nodes, seed=3, **engine) as inner:
        strategy, grid = build(), MeteredGrid(inner)

        def keep(number: int, arrays: ArrayRecord, _: Any) -> None:
            if number == at:
                checkpoint.save(path, server_round=at, arrays=arrays, strategy=strategy, grid=grid)
                assert under_way(strategy) in waiting

        fit(strategy, grid, start(), at + 2, on_round=keep)
    stored = checkpoint.load(path)
    with InProcessGrid(app, nodes, seed=3, **engine) as inner:
        strategy, grid = build(), MeteredGrid(inner)
        stored.apply(strategy, grid)
        assert under_way(strategy) in waiting
        end = fit(strategy, grid, stored.arrays, 2 * at, start_round=at + 1)
    assert end.arrays["w"].numpy().tobytes() == whole.tobytes()


KILLED = """
import os, signal, sys
from fedcomp.flower import checkpoint
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from test_pipelined import killed_build, squares, start
from fedcomp.clients.compressed import compression

app = squares([compression()])

def dying(message, context):
    reply = app(message, context)
    number = int(next(iter(message.content.config_records.values()))["server-round"])
    if number == 6 and context.node_config["partition-id"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return reply

with InProcessGrid(dying, 6, seed=3) as inner:
    strategy, grid = killed_build(), MeteredGrid(inner)

    def keep(number, arrays, _):
        checkpoint.save(sys.argv[1], server_round=number, arrays=arrays, strategy=strategy, grid=grid)

    fit(strategy, grid, start(), 9, on_round=keep)
"""


def killed_build() -> PipelinedStrategy:
    return pipe(both_ways())


def test_a_server_killed_between_push_and_pull_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """SIGKILL while clients of round 6 run and round 5 waits for its step: both are made, once, bit for bit."""
    app, path = squares([compression()]), tmp_path / "run.ckpt"
    whole, _ = run(killed_build(), 9, 6, app=app)
    places = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([places, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()[-2000:]
    stored = checkpoint.load(path)
    assert stored.server_round == 5
    with InProcessGrid(app, 6, seed=3) as inner:
        strategy, grid = killed_build(), MeteredGrid(inner)
        stored.apply(strategy, grid)
        assert [each.now.number for each in strategy.flights] == [5]
        end = fit(strategy, grid, stored.arrays, 9, start_round=6)
    assert end.arrays["w"].numpy().tobytes() == whole.tobytes()
    assert all(not strategy.reports[number].rolled_back for number in range(5, 10))


def test_an_engine_that_cannot_be_stored_has_the_rounds_in_flight_sent_again(tmp_path: Any) -> None:
    """With the models they were sent with: the same recursion, although every node is a new one."""
    path = tmp_path / "run.ckpt"
    with InProcessGrid(squares(), 4, seed=3) as inner:
        strategy, grid = pipe(), MeteredGrid(inner)

        def keep(number: int, arrays: ArrayRecord, _: Any) -> None:
            if number == 5:
                checkpoint.save(path, server_round=5, arrays=arrays, strategy=strategy)

        fit(strategy, grid, start(), 6, on_round=keep)
    stored = checkpoint.load(path)
    with InProcessGrid(squares(), 4, seed=4) as inner:
        strategy, grid = pipe(), MeteredGrid(inner)
        checkpoint.restore_strategy(strategy, stored.strategy_state)
        end = fit(strategy, grid, stored.arrays, 9, start_round=6)
    wanted = recursion(9, 2, 0, turns(2))
    np.testing.assert_allclose(end.arrays["w"].numpy(), wanted[-1], atol=2e-6)


def test_votes_may_be_in_a_pipe() -> None:
    strategy = pipe(Compressed(quiet(), SignSGD(step=0.01)), 2)
    end, _ = run(strategy, 6, app=squares([compression()]))
    assert strategy.steps == 6
    # Cohorts of two vote; each step is one of the codec's size at most.
    assert 0 < np.abs(end - start()["w"].numpy()).max() <= 6 * 0.01 + 1e-6


# Buffered asynchronous rounds: the step, staleness, memory of clients, faults, checkpoints.


def flight(strategy: Buffered, number: int) -> Overlap:
    return strategy.reports[number].section(Overlap)


def definition(rounds: int, buffer: int, eta: float) -> tuple[np.ndarray, float, list[list[int]]]:
    """Play FedBuff by its definition; return the weights, the last second, and how old each step's updates were."""
    weights, steps, ages = start()["w"].numpy().astype(np.float64), 0, []
    busy = {p: (PACES[p], 0, weights) for p in range(NODES)}
    arrived: list[tuple[int, int, np.ndarray]] = []
    clock = 0.0
    while steps < rounds:
        client = min(busy, key=lambda p: busy[p][0])
        clock, step, sent = busy.pop(client)
        change = -float(STEP) * gradient(sent.astype(np.float32), client).astype(np.float64)
        arrived.append((client, steps - step, change))
        if len(arrived) == buffer:
            weights = weights + eta * sum(change / np.sqrt(1.0 + age) for _, age, change in arrived) / buffer
            steps += 1
            ages.append(sorted(age for _, age, _ in arrived))
            # All that are waiting go on, with the new model.
            busy |= {p: (clock + PACES[p], steps, weights) for p, _, _ in arrived}
            arrived = []
    return weights, clock, ages


@pytest.mark.parametrize(
    ("codec", "eta"), [(None, 1.0), (TopK(density=1.0), 0.5), (Identity(), 0.5)], ids=["plain", "topk", "identity"]
)
@pytest.mark.parametrize(("dtype", "within"), [("float32", 3e-6), ("float64", 3e-6), ("float16", 8e-3)])
def test_the_steps_are_those_of_the_definition_event_by_event(
    codec: Codec | None, eta: float, dtype: str, within: float
) -> None:
    """Every client busy, so that the clock alone decides who is asked."""
    inner = quiet() if codec is None else Compressed(quiet(), codec, feedback=False)
    strategy = Buffered(inner, concurrency=NODES, buffer=2, server_lr=eta)
    app = squares([] if codec is None else [compression()])
    end, grid = run(strategy, 14, NODES, app=app, dtype=dtype, compute_seconds=seconds)
    wanted, clock, ages = definition(14, 2, eta)
    np.testing.assert_allclose(end, wanted, atol=within)
    assert grid.clock == pytest.approx(clock)
    assert [sorted(flight(strategy, r).staleness.values()) for r in range(1, 15)] == ages
    assert max(map(max, ages)) >= 3, "the slowest client's updates are old"


def test_median_and_adam_get_scaled_updates_on_the_model_of_now() -> None:
    ends = {}
    for kind in (FedAvg, FedMedian, FedAdam):
        strategy = Buffered(quiet(kind), concurrency=NODES, buffer=2)
        ends[kind], _ = run(strategy, 14, NODES, compute_seconds=seconds)
    # Of two values the median is the mean.
    np.testing.assert_allclose(ends[FedMedian], ends[FedAvg], atol=3e-6)
    assert np.abs(ends[FedAdam] - ends[FedAvg]).max() > 0.01


def test_no_client_has_two_messages_and_as_many_are_busy_as_were_asked_for() -> None:
    strategy = Buffered(quiet(), concurrency=3, buffer=2, seed=4)
    with InProcessGrid(client_app(), 6, seed=3, compute_seconds=lambda d: 1.0 + d.partition / 7) as inner:
        grid = Watching(inner, strategy)
        fit(strategy, grid, model(), 20)
    assert set(grid.busy) == {3}
    assert set(Counter(n for r in range(1, 21) for n in flight(strategy, r).staleness)) == set(
        strategy.inner.roster.peers
    )


def test_an_update_that_is_too_old_is_refused_said_and_put_back_by_its_client() -> None:
    strategy = Buffered(sparse(0.25), concurrency=NODES, buffer=2, max_staleness=2, weight="constant")

    def once_slow(delivery: Delivery) -> float:
        return 9.0 if (delivery.exchange, delivery.partition) == (0, 4) else 1.0 + delivery.partition / 7

    with InProcessGrid(client_app([compression()]), NODES, seed=3, compute_seconds=once_slow) as grid:
        fit(strategy, MeteredGrid(grid), model(), 30)
        slow = next(node for node in grid.get_node_ids() if grid.partition_of(node) == 4)
    refused = [(r, node, why) for r in range(1, 31) for node, why in strategy.reports[r].refused.items()]
    assert len(refused) == 1
    assert refused[0][1] == slow
    assert "more than max_staleness=2" in refused[0][2]
    # A step is made of as many updates as ever: one that is refused fills no place.
    assert {strategy.reports[r].used for r in range(1, 31)} == {2}
    # The same client comes back with what it had tried to send, and says so.
    returned = [(r, node) for r in range(1, 31) for node in strategy.reports[r].rolled_back]
    assert len(returned) == 1
    assert returned[0][1] == slow
    assert returned[0][0] > refused[0][0]


def test_a_silent_client_is_given_up_and_another_one_asked() -> None:
    def fault(delivery: Delivery) -> str | None:
        return "silent" if delivery.partition == 1 else None

    strategy = Buffered(quiet(), concurrency=2, buffer=1, timeout=20.0)
    run(strategy, 60, NODES, fault=fault, compute_seconds=1.0)
    assert strategy.steps == 60
    assert sum(strategy.reports[r].lost for r in range(1, 61)) >= 1


def test_a_step_that_cannot_be_filled_says_so() -> None:
    def fault(delivery: Delivery) -> str | None:
        return "raise" if delivery.exchange > 6 else None

    strategy = Buffered(quiet(), concurrency=3, buffer=2)
    run(strategy, 12, 3, fault=fault, compute_seconds=seconds)
    notes = [note for r in range(1, 13) for note in strategy.reports[r].notes]
    assert any("instead of 2 updates" in note for note in notes)
    assert strategy.steps < 12


def test_clients_that_all_fail_from_the_start_end_the_run() -> None:
    strategy = Buffered(quiet(), concurrency=3, buffer=2)
    with pytest.raises(NoUsableReply):
        run(strategy, 3, 3, fault=lambda _: "raise")


@pytest.mark.parametrize(
    "make", [lambda: pipe(timeout=5.0), lambda: Buffered(quiet(), concurrency=3, buffer=2, timeout=5.0)]
)
def test_a_run_in_which_nobody_ever_answers_is_an_error_that_says_so(make: Callable[[], Any]) -> None:
    """Silence is no reason to stop in the first round; it is one at the end of the last."""

    silent = True
    fault = lambda _: "silent" if silent else None  # noqa: E731
    with InProcessGrid(squares(), 4, seed=3, fault=fault, compute_seconds=1.0) as grid:
        with pytest.raises(NoUsableReply, match=r"learnt nothing.*messages without a reply"):
            fit(make(), MeteredGrid(grid), start(), 4)
        silent, learning = False, make()
        fit(learning, MeteredGrid(grid), start(), 4)
        assert learning.steps


def test_random_faults_cost_updates_and_nothing_else() -> None:
    plan = RandomFaults(Key(9), {"lost_reply": 0.1, "raise": 0.1, "late": 0.1, "duplicate": 0.1, "offline": 0.1})
    strategy = Buffered(sparse(0.5, downlink=TopK(density=0.5)), concurrency=3, buffer=2, timeout=9.0)
    end, _ = run(strategy, 80, NODES, app=squares([compression()]), fault=plan, compute_seconds=seconds)
    pairs = [problem(p) for p in range(NODES)]
    best = np.linalg.solve(sum(m.T @ m for m, _ in pairs), sum(m.T @ right for m, right in pairs))
    assert np.abs(end - best).max() < 0.5 * np.abs(start()["w"].numpy() - best).max()


def test_the_log_tells_of_what_is_asked_and_not_of_all_nodes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), InProcessGrid(squares(), NODES, seed=3, compute_seconds=seconds) as grid:
        strategy = Buffered(quiet(), concurrency=2, buffer=1)
        strategy.start(MeteredGrid(grid), start(), num_rounds=3)
    assert "Sampled" not in caplog.text
    assert "staleness up to" in caplog.text
    assert "under way when the run ended" in caplog.text


def test_a_slow_reply_is_not_lost_however_many_quick_ones_pass_it() -> None:
    """A hundred messages are pushed while one client works."""
    strategy = Buffered(quiet(), concurrency=2, buffer=1, max_staleness=1000)
    pace = {0: 1.0, 1: 1.0, 2: 101.5}
    run(strategy, 104, 3, compute_seconds=lambda d: pace[d.partition])
    assert max(max(flight(strategy, r).staleness.values()) for r in range(1, 105)) >= 100
    assert all(not strategy.reports[r].refused for r in range(1, 105))


def test_random_coordinates_are_those_of_the_round_that_sent_the_message() -> None:
    """Which a server checks: with the stream of the round that makes the step old updates would be refused."""
    strategy = Buffered(Compressed(quiet(), RandomK(density=0.5)), concurrency=NODES, buffer=2)
    run(strategy, 20, NODES, app=squares([compression()]), compute_seconds=seconds)
    assert max(max(flight(strategy, r).staleness.values()) for r in range(1, 21)) >= 3
    assert [strategy.reports[r].refused for r in range(1, 21)] == [{}] * 20


class Haunted(MeteredGrid):
    """Shows a node that is not there any more."""

    def get_node_ids(self) -> list[int]:
        return [*super().get_node_ids(), 12345]


def test_a_node_that_has_left_is_not_waited_for() -> None:
    for strategy in (
        Buffered(quiet(), concurrency=4, buffer=2, timeout=50.0),
        PipelinedStrategy(quiet(), timeout=50.0),
    ):
        with InProcessGrid(squares(), 3, seed=3, compute_seconds=1.0) as grid:
            fit(strategy, Haunted(grid), start(), 12)
            assert grid.clock < 20.0, "nobody waited for a timeout"
        assert strategy.steps == 12
        assert sum(strategy.reports[r].lost for r in range(1, 13)) >= 1
