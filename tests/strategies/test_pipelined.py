"""Pipelined rounds: the recursion, its start and end, cohorts, faults, late replies, checkpoints.

Numbers are those of the test list for Pipe-SGD: 1 width one, 2 the recursion, 3 warm-up, 4 parity, 5 cohorts, 8 a node
that never answers. 6, 7 and 10 are in tests/timing; 9, server work that is hidden, needs real seconds and is in
test_pipelined_deployment.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, Result
from round_paths import BALLOT, NOISY, quiet
from toy import client_app, model, stack, with_halves

from fedcomp.clients.compressed import compression
from fedcomp.codecs import SignSGD, TopK
from fedcomp.errors import ConfigError
from fedcomp.flower import checkpoint
from fedcomp.flower.faults import Delivery, ScriptedFaults, late
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.deadlines import Deadline
from fedcomp.strategies.overlap import PipelinedStrategy
from fedcomp.strategies.private.topagg import topagg

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


def run(strategy: Any, rounds: int, nodes: int = 4, *, app: Any = None, **options: Any) -> Result:
    with InProcessGrid(app or squares(), nodes, seed=3, **options) as inner:
        return strategy.start(MeteredGrid(inner), start(), num_rounds=rounds, timeout=60)


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
    plain = run(Compressed(quiet(inner), TopK(density=0.5)), 6, app=squares([compression()]))
    piped = run(pipe(Compressed(quiet(inner), TopK(density=0.5)), 1), 6, app=squares([compression()]))  # type: ignore[arg-type]
    assert plain.arrays["w"].numpy().tobytes() == piped.arrays["w"].numpy().tobytes()
    assert list(plain.train_metrics_clientapp) == list(piped.train_metrics_clientapp)


@pytest.mark.parametrize("width", [2, 3])
def test_2_wider_ones_are_the_closed_recursion_from_the_first_step_to_the_drain(width: int) -> None:
    rounds, strategy = 11, pipe(width=width)
    seen: list[np.ndarray] = []
    with InProcessGrid(squares(), 6, seed=3) as inner:
        grid = MeteredGrid(inner)
        fit(strategy, grid, start(), rounds, on_round=lambda r, arrays, _: seen.append(arrays["w"].numpy().copy()))
    wanted = recursion(rounds, width, 0, turns(width, 6))
    assert len(wanted) == rounds + 1, "every update is applied once, those of the drain included"
    # Nothing is applied while the pipe fills, and the last round applies all that is left.
    for number in range(1, rounds):
        np.testing.assert_allclose(seen[number - 1], wanted[max(0, number - width + 1)], atol=2e-6)
    np.testing.assert_allclose(seen[-1], wanted[-1], atol=2e-6)
    assert strategy.steps == rounds
    delays = [max(strategy.reports[r].overlap.staleness.values()) for r in range(1, rounds + 1)]  # type: ignore[attr-defined]
    assert delays == [min(r - 1, width - 1) for r in range(1, rounds + 1)]


@pytest.mark.parametrize(("dtype", "within"), [("float64", 2e-6), ("float16", 4e-3)])
@pytest.mark.parametrize("lossless", [True, False])
def test_2_models_of_other_floats_follow_the_same_recursion(dtype: str, within: float, lossless: bool) -> None:
    """Beside a lossless codec they travel as values, of which the mean is no step."""
    strategy = pipe() if lossless else pipe(Compressed(quiet(), TopK(density=1.0), feedback=False))  # type: ignore[arg-type]
    app = squares([] if lossless else [compression()])
    with InProcessGrid(app, 4, seed=3) as inner:
        end = fit(strategy, MeteredGrid(inner), start(dtype), 10).arrays["w"].numpy()
    assert end.dtype == dtype
    np.testing.assert_allclose(end, recursion(10, 2, 0, turns(2))[-1], atol=within)


def test_2_averaging_models_instead_would_be_two_trainings() -> None:
    """The classic mistake is not what happens: with it even and odd rounds never see each other."""
    piped = run(pipe(), 10).arrays["w"].numpy()
    for cohort in ([0, 2], [1, 3]):
        alone = recursion(5, 1, 0, lambda _, cohort=cohort: cohort)[-1]
        assert np.abs(piped - alone).max() > 0.05


@pytest.mark.parametrize("warmup", [1, 3, 20])
def test_3_the_switch_after_warm_up_neither_drops_nor_doubles_a_gradient(warmup: int) -> None:
    strategy = pipe(warmup_rounds=warmup)
    end = run(strategy, 9).arrays["w"].numpy()
    wanted = recursion(9, 2, warmup, turns(2))
    np.testing.assert_allclose(end, wanted[-1], atol=2e-6)
    assert Counter(strategy.reports[r].used for r in range(1, 10)) == {2: 9}
    for wrong in ("twice", "dropped", "not drained") if warmup < 8 else ():
        mistaken = recursion(9, 2, warmup, turns(2), wrong)
        assert np.abs(end - mistaken[-1]).max() > 1e-3, wrong


@pytest.mark.parametrize("width", [2, 3])
def test_5_no_node_has_two_messages_and_every_node_keeps_its_memory(width: int) -> None:
    under_way: list[int] = []
    strategy = pipe(Compressed(quiet(), TopK(density=0.3)), width)  # type: ignore[arg-type]

    class Watching(MeteredGrid):
        def push_messages(self, messages: Any) -> Any:
            nodes = [sent.node for each in strategy.flights for sent in each.waiting]
            under_way.append(len(nodes))
            assert len(set(nodes)) == len(nodes)
            return super().push_messages(messages)

    with InProcessGrid(squares([compression()]), 6, seed=3) as inner:
        result = fit(strategy, Watching(inner), start(), 12)
        counts = {node.partition: node.context().state["count"]["n"] for node in inner._nodes.values()}
    assert max(under_way) == 6
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
    with InProcessGrid(squares(), 4, seed=3, fault=fault, compute_seconds=1.0) as inner:  # type: ignore[arg-type]
        fit(strategy, MeteredGrid(inner), start(), 8)
        took = inner.clock
    assert [strategy.reports[3].lost, strategy.reports[3].used] == [1, 1]
    assert [strategy.reports[r].used for r in (4, 6, 8)] == [2, 2, 2]
    # Eight rounds of one second, of which two always overlap, and once the timeout.
    assert 4.0 <= took <= 4.0 + 10.0 + 1.0
    # It may be at work still, and is not given a second message before that time has passed once more.
    assert [strategy.reports[r].overlap.held_back for r in (5, 7)] == [1, 1]  # type: ignore[attr-defined]


def test_8_a_late_reply_is_dropped_said_and_put_back_by_its_client() -> None:
    def slow(delivery: Delivery) -> float:
        return 12.0 if (delivery.round, delivery.partition) == (3, 2) else 1.0

    strategy = pipe(Compressed(quiet(), TopK(density=0.3)), 2, timeout=10.0)  # type: ignore[arg-type]
    app = squares([compression()])
    with InProcessGrid(app, 4, seed=3, compute_seconds=slow) as inner:
        fit(strategy, MeteredGrid(inner), start(), 12)
    reports = [strategy.reports[r] for r in range(1, 13)]
    assert sum(report.overlap.late for report in reports) == 1  # type: ignore[attr-defined]
    assert [report.round for report in reports if report.rolled_back] != []
    assert reports[2].lost == 1
    assert reports[-1].used == 2, "the node is back"


def test_a_reply_that_waits_for_later_pushes_is_late_too() -> None:
    strategy = pipe(width=1, timeout=5.0)
    run(strategy, 4, fault=ScriptedFaults({(2, 1): late(1)}))
    assert strategy.reports[2].lost == 1
    assert sum(strategy.reports[r].overlap.late for r in (1, 2, 3, 4)) == 1  # type: ignore[attr-defined]


def test_clients_evaluate_on_a_drained_pipe() -> None:
    strategy = PipelinedStrategy(
        FedAvg(min_train_nodes=1, min_available_nodes=1, min_evaluate_nodes=1), evaluate_every=3
    )
    with InProcessGrid(client_app(), 4, seed=3) as inner:
        result = fit(strategy, MeteredGrid(inner), model(), 7)
    assert list(result.evaluate_metrics_clientapp) == [3, 6]
    assert strategy.steps == 7
    # In the round after a drain the pipe fills again.
    assert [max(strategy.reports[r].overlap.staleness.values()) for r in range(1, 8)] == [0, 1, 1, 0, 1, 1, 0]  # type: ignore[attr-defined]


def test_delay_compensation_corrects_the_mean_update_by_what_the_model_has_moved() -> None:
    weights, strength, sent = [start()["w"].numpy().astype(np.float64)], 0.7, {}
    queue: list[int] = []

    def apply(number: int) -> None:
        then = sent[number]
        update = -float(STEP) * np.mean([gradient(then.astype(np.float32), p) for p in turns(2)(number)], axis=0)
        weights.append(weights[-1] + update - strength * update**2 * (weights[-1] - then))

    for number in range(1, 9):
        sent[number] = weights[-1]
        queue.append(number)
        if len(queue) == 2:
            apply(queue.pop(0))
    apply(queue.pop(0))
    end = run(pipe(compensation=strength), 8).arrays["w"].numpy()
    np.testing.assert_allclose(end, weights[-1], atol=5e-6)
    assert np.abs(end - recursion(8, 2, 0, turns(2))[-1]).max() > 1e-3


def test_an_adaptive_deadline_leaves_the_slow_out_and_asks_them_again() -> None:
    def seconds(delivery: Delivery) -> float:
        return 30.0 if delivery.partition == 4 else 1.0 + 0.1 * delivery.partition

    strategy = pipe(Compressed(quiet(), TopK(density=0.3)), 1, timeout=40.0, deadline=Deadline(0.8, 1.5))  # type: ignore[arg-type]
    with InProcessGrid(squares([compression()]), 5, seed=3, compute_seconds=seconds) as inner:
        fit(strategy, MeteredGrid(inner), start(), 40)
        took = inner.clock
    used = [strategy.reports[r].used for r in range(1, 41)]
    assert used[0] == 5, "nobody is known yet, so all are waited for"
    assert set(used[1:]) == {4}
    assert took < 30.0 + 39 * 3.0
    assert sum(strategy.reports[r].overlap.late for r in range(1, 41)) >= 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [2, 3])
def test_a_checkpoint_with_rounds_in_flight_goes_on_bit_for_bit(tmp_path: Any, width: int) -> None:
    def build() -> PipelinedStrategy:
        inner = Compressed(quiet(FedAdam), TopK(density=0.3), downlink=TopK(density=0.5), seed=1)
        return pipe(inner, width, warmup_rounds=1)  # type: ignore[arg-type]

    app = squares([compression()])
    with InProcessGrid(app, 6, seed=3) as inner:
        whole = fit(build(), MeteredGrid(inner), start(), 9).arrays["w"].numpy()
    path = tmp_path / "run.ckpt"
    with InProcessGrid(app, 6, seed=3) as inner:
        strategy, grid = build(), MeteredGrid(inner)

        def keep(number: int, arrays: ArrayRecord, _: Any) -> None:
            if number == 5:
                assert len(strategy.flights) == width - 1
                checkpoint.save(path, server_round=5, arrays=arrays, strategy=strategy, grid=grid)

        fit(strategy, grid, start(), 6, on_round=keep)
    stored = checkpoint.load(path)
    with InProcessGrid(app, 6, seed=3) as inner:
        strategy, grid = build(), MeteredGrid(inner)
        stored.apply(strategy, grid)
        assert sum(len(each.waiting) for each in strategy.flights) == (width - 1) * (6 // width)
        end = fit(strategy, grid, stored.arrays, 9, start_round=6)
    assert end.arrays["w"].numpy().tobytes() == whole.tobytes()


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
        checkpoint.restore_strategy(strategy, stored.strategy_state)  # type: ignore[arg-type]
        end = fit(strategy, grid, stored.arrays, 9, start_round=6)
    wanted = recursion(9, 2, 0, turns(2))
    np.testing.assert_allclose(end.arrays["w"].numpy(), wanted[-1], atol=2e-6)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: PipelinedStrategy(quiet(), 0), "width"),
        (lambda: PipelinedStrategy(quiet(FedMedian), compensation=0.1), "looks at single ones"),
        (lambda: PipelinedStrategy(topagg(quiet(), BALLOT, server_lr=0.25, **NOISY)), "promise"),
        (lambda: PipelinedStrategy(pipe()), "exchanges of its own"),
    ],
)
def test_what_cannot_be_in_a_pipe_is_refused(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_votes_may_be_in_a_pipe() -> None:
    strategy = pipe(Compressed(quiet(), SignSGD(step=0.01)), 2)  # type: ignore[arg-type]
    end = run(strategy, 6, app=squares([compression()])).arrays["w"].numpy()
    assert strategy.steps == 6
    # Cohorts of two vote; each step is one of the codec's size at most.
    assert 0 < np.abs(end - start()["w"].numpy()).max() <= 6 * 0.01 + 1e-6
    assert stack(ArrayRecord({"w": Array(end)})).size == SIZE


def test_a_cohort_that_is_too_small_for_its_strategy_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    strategy = PipelinedStrategy(FedAvg(min_train_nodes=1, min_available_nodes=2, fraction_evaluate=0.0), width=2)
    with InProcessGrid(squares(), 3, seed=3) as inner:
        grid = MeteredGrid(inner)
        # The third node is in the first cohort; one joins the second while the strategy waits there.
        node_ids, looks = inner.get_node_ids, []

        def joining() -> Any:
            looks.append(1)
            if len(looks) == 8:
                inner.add_node(3)
            return node_ids()

        inner.get_node_ids = joining  # type: ignore[method-assign]
        fit(strategy, grid, start(), 2)
    assert "start more nodes" in caplog.text
    # Flower's sample size is that of the nodes there were before it waited.
    assert [strategy.reports[r].used for r in (1, 2)] == [2, 1]
