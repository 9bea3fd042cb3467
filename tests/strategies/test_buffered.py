"""Buffered asynchronous rounds: the step, staleness, memory of clients, faults, checkpoints."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian
from round_paths import quiet
from test_pipelined import STEP, gradient, problem, squares, start
from toy import client_app, model

from fedcomp.clients.compressed import compression
from fedcomp.codecs import Codec, Identity, RandomK, TopK
from fedcomp.errors import NoUsableReply
from fedcomp.flower import checkpoint
from fedcomp.flower.faults import Delivery, RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.overlap import Buffered, Overlap, PipelinedStrategy

PACES = (1.0, 1.37, 2.11, 3.3, 5.71)
"""Seconds that each client takes; no two ever finish at once."""

NODES = len(PACES)


def flight(strategy: Buffered, number: int) -> Overlap:
    return strategy.reports[number].section(Overlap)


def seconds(delivery: Delivery) -> float:
    return PACES[delivery.partition]


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


@pytest.mark.parametrize("eta", [1.0, 0.5])
@pytest.mark.parametrize("codec", [None, TopK(density=1.0), Identity()], ids=["plain", "topk", "identity"])
@pytest.mark.parametrize(("dtype", "within"), [("float32", 3e-6), ("float64", 3e-6), ("float16", 8e-3)])
def test_the_steps_are_those_of_the_definition_event_by_event(
    codec: Codec | None, eta: float, dtype: str, within: float
) -> None:
    """Every client busy, so that the clock alone decides who is asked."""
    inner = quiet() if codec is None else Compressed(quiet(), codec, feedback=False)
    strategy = Buffered(inner, concurrency=NODES, buffer=2, server_lr=eta)
    app = squares([] if codec is None else [compression()])
    with InProcessGrid(app, NODES, seed=3, compute_seconds=seconds) as grid:
        end = fit(strategy, MeteredGrid(grid), start(dtype), 14).arrays["w"].numpy()
        took = grid.clock
    wanted, clock, ages = definition(14, 2, eta)
    np.testing.assert_allclose(end, wanted, atol=within)
    assert took == pytest.approx(clock)
    assert [sorted(flight(strategy, r).staleness.values()) for r in range(1, 15)] == ages
    assert max(map(max, ages)) >= 3, "the slowest client's updates are old"


def test_median_and_adam_get_scaled_updates_on_the_model_of_now() -> None:
    ends = {}
    for kind in (FedAvg, FedMedian, FedAdam):
        strategy = Buffered(quiet(kind), concurrency=NODES, buffer=2)
        with InProcessGrid(squares(), NODES, seed=3, compute_seconds=seconds) as grid:
            ends[kind] = fit(strategy, MeteredGrid(grid), start(), 14).arrays["w"].numpy()
    # Of two values the median is the mean.
    np.testing.assert_allclose(ends[FedMedian], ends[FedAvg], atol=3e-6)
    assert np.abs(ends[FedAdam] - ends[FedAvg]).max() > 0.01


def test_no_client_has_two_messages_and_as_many_are_busy_as_were_asked_for() -> None:
    strategy = Buffered(quiet(), concurrency=3, buffer=2, seed=4)
    busy: list[int] = []

    class Watching(MeteredGrid):
        def push_messages(self, messages: Any) -> Any:
            nodes = [sent.node for each in strategy.flights for sent in each.waiting]
            assert len(set(nodes)) == len(nodes)
            busy.append(len(nodes))
            return super().push_messages(messages)

    with InProcessGrid(client_app(), 6, seed=3, compute_seconds=lambda d: 1.0 + d.partition / 7) as grid:
        fit(strategy, Watching(grid), model(), 20)
    assert set(busy) == {3}
    assert set(Counter(n for r in range(1, 21) for n in flight(strategy, r).staleness)) == set(
        strategy.inner.roster.peers
    )


def test_an_update_that_is_too_old_is_refused_said_and_put_back_by_its_client() -> None:
    strategy = Buffered(
        Compressed(quiet(), TopK(density=0.25)), concurrency=NODES, buffer=2, max_staleness=2, weight="constant"
    )

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
    with InProcessGrid(squares(), NODES, seed=3, fault=fault, compute_seconds=1.0) as grid:  # type: ignore[arg-type]
        fit(strategy, MeteredGrid(grid), start(), 60)
    assert strategy.steps == 60
    assert sum(strategy.reports[r].lost for r in range(1, 61)) >= 1


def test_a_step_that_cannot_be_filled_says_so() -> None:
    def fault(delivery: Delivery) -> str | None:
        return "raise" if delivery.exchange > 6 else None

    strategy = Buffered(quiet(), concurrency=3, buffer=2)
    with InProcessGrid(squares(), 3, seed=3, fault=fault, compute_seconds=seconds) as grid:  # type: ignore[arg-type]
        fit(strategy, MeteredGrid(grid), start(), 12)
    notes = [note for r in range(1, 13) for note in strategy.reports[r].notes]
    assert any("instead of 2 updates" in note for note in notes)
    assert strategy.steps < 12


def test_clients_that_all_fail_from_the_start_end_the_run() -> None:
    strategy = Buffered(quiet(), concurrency=3, buffer=2)
    with InProcessGrid(squares(), 3, seed=3, fault=lambda _: "raise") as grid, pytest.raises(NoUsableReply):
        fit(strategy, MeteredGrid(grid), start(), 3)


def test_random_faults_cost_updates_and_nothing_else() -> None:
    plan = RandomFaults(Key(9), {"lost_reply": 0.1, "raise": 0.1, "late": 0.1, "duplicate": 0.1, "offline": 0.1})
    strategy = Buffered(
        Compressed(quiet(), TopK(density=0.5), downlink=TopK(density=0.5)), concurrency=3, buffer=2, timeout=9.0
    )
    app = squares([compression()])
    with InProcessGrid(app, NODES, seed=3, fault=plan, compute_seconds=seconds) as grid:
        end = fit(strategy, MeteredGrid(grid), start(), 80).arrays["w"].numpy()
    pairs = [problem(p) for p in range(NODES)]
    best = np.linalg.solve(sum(m.T @ m for m, _ in pairs), sum(m.T @ right for m, right in pairs))
    assert np.abs(end - best).max() < 0.5 * np.abs(start()["w"].numpy() - best).max()


def test_a_checkpoint_with_updates_under_way_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def build() -> Buffered:
        inner = Compressed(quiet(FedAdam), TopK(density=0.3), downlink=TopK(density=0.5), seed=1)
        return Buffered(inner, concurrency=4, buffer=2, max_staleness=3)

    app, path = squares([compression()]), tmp_path / "run.ckpt"
    with InProcessGrid(app, NODES, seed=3, compute_seconds=seconds) as grid:
        whole = fit(build(), MeteredGrid(grid), start(), 20).arrays["w"].numpy()
    with InProcessGrid(app, NODES, seed=3, compute_seconds=seconds) as grid:
        strategy, metered = build(), MeteredGrid(grid)

        def keep(number: int, arrays: Any, _: Any) -> None:
            if number == 9:
                checkpoint.save(path, server_round=9, arrays=arrays, strategy=strategy, grid=metered)
                # Three of four: the step freed two clients, of whom nobody was asked yet.
                assert 1 <= sum(len(each.waiting) for each in strategy.flights) <= 3

        fit(strategy, metered, start(), 11, on_round=keep)
    stored = checkpoint.load(path)
    with InProcessGrid(app, NODES, seed=3, compute_seconds=seconds) as grid:
        strategy, metered = build(), MeteredGrid(grid)
        stored.apply(strategy, metered)
        end = fit(strategy, metered, stored.arrays, 20, start_round=10)
    assert end.arrays["w"].numpy().tobytes() == whole.tobytes()


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
    with InProcessGrid(squares(), 3, seed=3, compute_seconds=lambda d: pace[d.partition]) as grid:
        fit(strategy, MeteredGrid(grid), start(), 104)
    assert max(max(flight(strategy, r).staleness.values()) for r in range(1, 105)) >= 100
    assert all(not strategy.reports[r].refused for r in range(1, 105))


def test_random_coordinates_are_those_of_the_round_that_sent_the_message() -> None:
    """Which a server checks: with the stream of the round that makes the step old updates would be refused."""
    strategy = Buffered(Compressed(quiet(), RandomK(density=0.5)), concurrency=NODES, buffer=2)
    with InProcessGrid(squares([compression()]), NODES, seed=3, compute_seconds=seconds) as grid:
        fit(strategy, MeteredGrid(grid), start(), 20)
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
