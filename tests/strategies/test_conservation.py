"""Nothing is lost: conservation of update mass under faults (flower spec 7.3), on exact integer vectors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import program_runs
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp.strategy import FedAvg
from plain_grid import PlainGrid
from program_runs import owed
from toy import ONE, client_app, fingerprint, model, stack, training

from fedcomp.clients.compressed import compression
from fedcomp.codecs import TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import StateError
from fedcomp.flower import checkpoint
from fedcomp.flower.asks import AskHead
from fedcomp.flower.faults import Delivery, Fault, RandomFaults, ScriptedFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.records import to_record
from fedcomp.flower.rounds import fit
from fedcomp.flower.state import UNSETTLED
from fedcomp.layout import Layout, SmallDense
from fedcomp.rng import Key
from fedcomp.stateful import next_epoch, within_epoch
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.overlap import PipelinedStrategy


class Sum(FedAvg):
    """Adds every decoded update to the model, unweighted, and keeps per partition what was delivered."""

    def __init__(self, **options) -> None:
        super().__init__(**{**ONE, "fraction_evaluate": 0.0, **options})
        self.delivered: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(1212))
        self.seen: list[tuple[float, float]] = []
        self.base = model()

    def configure_train(self, server_round, arrays, config, grid):
        self.base = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        total = stack(self.base)
        for reply in replies:
            if reply.has_error():
                continue
            record = next(iter(reply.content.array_records.values()))
            metrics = next(iter(reply.content.metric_records.values()))
            moved = stack(record) - stack(self.base)
            self.delivered[int(metrics["partition"])] += moved
            self.seen.append((metrics["seen"], fingerprint(self.base)))
            total = total + moved
        out, offset = {}, 0
        for name, array in self.base.items():
            size = array.numpy().size
            out[name] = Array(total[offset : offset + size].reshape(array.shape).astype(np.float32))
            offset += size
        return ArrayRecord(out), None


def in_order(layout: Layout, vector: np.ndarray) -> np.ndarray:
    """Return a layout vector in the model's own tensor order, float64."""
    return np.concatenate([v.reshape(-1).astype(np.float64) for v in layout.unflatten(vector).values()])


def residual(context: Context, strategy: Compressed, node: int) -> np.ndarray:
    """Return what a client still owes: its memory, plus a pending frame the server never consumed."""
    layout = Layout.of({k: v.numpy() for k, v in model().items()}, strategy.policy)
    return in_order(layout, program_runs.owed(strategy, context, node, layout).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("error_state", ["discard", "keep"])
def test_conservation_under_faults(error_state: str) -> None:
    """10 clients, 48 rounds, 10 % each of lost, duplicated, late and crashed, nodes wiped at random.

    For every life of every node: updates made = delivered + owed, exactly.
    """
    plan = RandomFaults(
        Key(11, "faults"), {"lost_reply": 0.1, "duplicate": 0.1, "late": 0.1, "raise": 0.1, "corrupt": 0.02}, pushes=1
    )
    grid = InProcessGrid(client_app([compression()]), 10, seed=5, fault=plan, error_state=error_state)
    inner = Sum()
    # With a part that travels dense.
    strategy = Compressed(inner, ErrorFeedback(TopK(density=0.01)), policy=SmallDense())
    arrays = model()
    made: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(1212))
    owed: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(1212))
    nodes = list(grid.get_node_ids())
    partition = {n: int(grid.context(n).node_config["partition-id"]) for n in nodes}

    def settle(node: int) -> None:
        context = grid.context(node)
        if "toy.sum" in context.state:
            made[partition[node]] += context.state.array_records["toy.sum"]["sum"].numpy()
        owed[partition[node]] += residual(context, strategy, node)

    wipes = 0
    for round_ in range(1, 49):
        # The bare Grid: a MeteredGrid would remove the duplicates before the strategy sees them.
        replies = grid.send_and_receive(strategy.configure_train(round_, arrays, ConfigRecord(), grid), timeout=9)
        new, _ = strategy.aggregate_train(round_, replies)
        arrays = new if new is not None else arrays
        for node in nodes:
            if Key(13, "wipe", round_, partition[node]).uniform(1)[0] < 0.01:
                settle(node)
                grid.wipe(node)
                wipes += 1
    for node in nodes:
        settle(node)

    assert wipes >= 2
    reports = strategy.reports.values()
    assert sum(r.lost for r in reports) > 24
    assert sum(len(r.refused) for r in reports) > 24
    assert sum(len(r.rolled_back) for r in reports) > 24
    assert sum(r.duplicates for r in reports) > 12
    for p in range(10):
        np.testing.assert_array_equal(inner.delivered[p] + owed[p], made[p])
    np.testing.assert_array_equal(stack(arrays), sum(inner.delivered.values()))


@pytest.mark.slow
def test_replicas_never_diverge_silently() -> None:
    """Compressed downlink under faults and wipes: whoever trains holds the server's reference, bit for bit."""
    plan = RandomFaults(Key(17, "faults"), {"lost_reply": 0.1, "duplicate": 0.1, "late": 0.1, "raise": 0.1})
    grid = InProcessGrid(client_app([compression()]), 10, seed=6, fault=plan)
    inner = Sum()
    strategy = Compressed(inner, TopK(density=0.02), downlink=TopK(density=0.05))
    metered = MeteredGrid(grid, TrafficLedger())
    arrays = model()
    nodes = list(grid.get_node_ids())
    full = 0
    for round_ in range(1, 41):
        messages = list(strategy.configure_train(round_, arrays, ConfigRecord(), metered))
        full += sum(1 for m in messages if len(m.content.array_records))
        reference = to_record(strategy.layout.unflatten(strategy.down.broadcast.reference, {}))
        replies = metered.send_and_receive(messages, timeout=9)
        for reply in replies:
            if not reply.has_error():
                metrics = next(iter(reply.content.metric_records.values()))
                assert metrics["seen"] == fingerprint(reference)
        new, _ = strategy.aggregate_train(round_, replies)
        arrays = new if new is not None else arrays
        for i, node in enumerate(nodes):
            if Key(19, "wipe", round_, i).uniform(1)[0] < 0.01:
                grid.wipe(node)
    resyncs = [r for report in strategy.reports.values() for r in report.refused.values() if "resync" in r]
    assert resyncs, "no wiped node ever asked for a full model: the faults did not reach the code"
    assert 10 < full < 40, "full models go to new and resynchronised nodes only"


@pytest.mark.parametrize("lost", [False, True], ids=["used", "lost"])
def test_a_node_that_comes_back_under_another_id_sends_nothing_twice(lost: bool) -> None:
    """What of its last frame had not arrived is gone, at most that frame; the report says that it is not known."""
    app = client_app([compression()])
    plan = ScriptedFaults({(3, 0): "lost_reply"} if lost else {})
    before = InProcessGrid(app, 1, seed=2, fault=plan)

    def with_its_memory(msg: Message, context: Context) -> Message:
        if not context.state:
            context.state.update(before.context(old).state)
        return app(msg, context)

    after = InProcessGrid(with_its_memory, 1, seed=3)
    (old,), (new,) = before.get_node_ids(), after.get_node_ids()
    assert old != new
    inner = Sum()
    strategy = Compressed(inner, TopK(density=0.01))
    arrays = model()
    for number in range(1, 8):
        grid = before if number <= 3 else after
        replies = grid.send_and_receive(strategy.configure_train(number, arrays, ConfigRecord(), grid), timeout=9)
        arrays = strategy.aggregate_train(number, replies)[0] or arrays
    context = after.context(new)
    made = context.state.array_records["toy.sum"]["sum"].numpy()
    apart = made - inner.delivered[0] - residual(context, strategy, new)
    assert np.count_nonzero(apart) == (13 if lost else 0)
    assert [report.remarks for report in strategy.reports.values()] == [{}, {}, {}, {new: UNSETTLED}, {}, {}, {}]


def test_statistics_that_were_lost_are_not_applied_twice() -> None:
    """A running variance moves from 1 to 0.25 on one of two nodes; after three lost replies it must arrive as 0.25.

    Treated as a change with memory it would arrive as 1 - 4 * 0.75 = -2: a mean of -0.5, whose square root is NaN.
    """

    def step(arrays: dict[str, Any], number: int, partition: int) -> dict[str, Any]:
        moved = {"weight": arrays["weight"] + 1, "bn.running_var": np.full(2048, 0.25, np.float32)}
        return arrays if partition else moved

    initial = ArrayRecord(
        {"weight": Array(np.zeros(4096, np.float32)), "bn.running_var": Array(np.ones(2048, np.float32))}
    )
    faults = {(server_round, 0): "lost_reply" for server_round in (1, 2, 3)}
    grid = InProcessGrid(training(step, [compression()]), 2, seed=1, fault=ScriptedFaults(faults))
    strategy = Compressed(FedAvg(**ONE, fraction_evaluate=0.0), TopK(density=1.0))
    result = strategy.start(MeteredGrid(grid, TrafficLedger()), initial, num_rounds=4, timeout=9)
    np.testing.assert_array_equal(result.arrays["bn.running_var"].numpy(), np.full(2048, 0.625, np.float32))
    np.testing.assert_array_equal(result.arrays["weight"].numpy(), np.full(4096, 2.0, np.float32))


# A server that is killed and resumed among clients that were not set back: numbers, versions, and nothing lost.

LAYOUT = Layout.of({name: array.numpy() for name, array in model().items()}, SmallDense())
NODES = 4


def compressed() -> Compressed:
    return Compressed(Sum(), TopK(density=0.05), policy=SmallDense())


def downlink() -> Compressed:
    return Compressed(Sum(), TopK(density=0.05), TopK(density=0.1), policy=SmallDense())


class Watching(PlainGrid):
    """An engine that stores nothing, and notes the sequence numbers it is given."""

    def __init__(self, world: World) -> None:
        super().__init__(world.engine)
        self.world = world

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        batch = list(messages)
        found = [config.get("fedcomp.sequence", 0) for m in batch for config in m.content.config_records.values()]
        self.world.sequences += [number for number in found if number]
        return super().push_messages(batch)


@dataclass
class World:
    """Clients that outlive their server, which reaches them through a grid that stores nothing."""

    dying: bool = False
    sequences: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = InProcessGrid(client_app([compression()]), NODES, seed=3, fault=self.fault)

    def fault(self, delivery: Delivery) -> Fault:
        return Fault("lost_reply" if self.dying else "none")

    def grid(self) -> MeteredGrid:
        return MeteredGrid(Watching(self))

    def owed(self, strategy: Any) -> np.ndarray:
        contexts = [(node, self.engine.context(node)) for node in self.engine.get_node_ids()]
        made = sum(context.state.array_records["toy.sum"]["sum"].numpy() for _, context in contexts)
        left = sum(owed(strategy, context, node, LAYOUT) for node, context in contexts)
        return made - in_order(LAYOUT, np.float32(left))


def run_until(world: World, strategy: Any, path: Path, *, saved: int, killed: int, start: int = 1, arrays=None) -> None:
    """Run to round ``killed`` with a checkpoint after ``saved``; all replies after it are lost."""
    grid = world.grid()
    arrays = model() if arrays is None else arrays

    def keep(number: int, now: ArrayRecord, outcome: Any) -> None:
        if number == saved:
            checkpoint.save(path, server_round=number, arrays=now, strategy=strategy, grid=grid)
            world.dying = True

    fit(strategy, grid, arrays, killed, start_round=start, timeout=0.01, on_round=keep)
    world.dying = False


@pytest.mark.slow
@pytest.mark.parametrize("make", [compressed, downlink], ids=["feedback", "downlink"])
def test_updates_of_rounds_beyond_the_checkpoint_go_back_exactly(make: Callable[[], Any], tmp_path: Path) -> None:
    world, path = World(), tmp_path / "run.ckpt"
    run_until(world, make(), path, saved=5, killed=7)
    before, world.sequences = world.sequences, []
    strategy, grid = make(), world.grid()
    found = checkpoint.resume(path, strategy, grid)
    result = fit(strategy, grid, found.arrays, 10, start_round=6, timeout=0.01)
    assert max(before) == 7 < min(world.sequences) == (1 << 32) + 1
    first = strategy.reports[6]
    # Nobody answered from its stored reply, nobody had to be sent the model again, nobody began anew.
    assert (len(first.rolled_back), first.used, first.refused, first.fresh) == (NODES, NODES, {}, [])
    np.testing.assert_array_equal(stack(result.arrays), world.owed(strategy))


@pytest.mark.slow
def test_an_acknowledged_update_is_gone_with_the_model_it_was_in(tmp_path: Path) -> None:
    """With checkpoints every other round the frames of the round between are lost, and no others."""
    world, path = World(), tmp_path / "run.ckpt"
    strategy, grid = compressed(), world.grid()
    models: dict[int, ArrayRecord] = {}

    def keep(number: int, now: ArrayRecord, outcome: Any) -> None:
        models[number] = now
        if number == 5:
            checkpoint.save(path, server_round=number, arrays=now, strategy=strategy, grid=grid)

    # Round 6 is acknowledged by the message of round 7, whose replies arrive and are in no checkpoint.
    fit(strategy, grid, model(), 7, timeout=0.01, on_round=keep)
    again, grid = compressed(), world.grid()
    found = checkpoint.resume(path, again, grid)
    result = fit(again, grid, found.arrays, 9, start_round=6, timeout=0.01)
    gone = stack(models[6]) - stack(models[5])
    assert np.abs(gone).sum() > 0
    np.testing.assert_array_equal(stack(result.arrays) + gone, world.owed(again))


@pytest.mark.slow
def test_two_restarts_from_one_checkpoint_share_no_number(tmp_path: Path) -> None:
    world, path = World(), tmp_path / "run.ckpt"
    run_until(world, compressed(), path, saved=5, killed=6)
    used = [set(world.sequences)]
    for _ in range(2):
        world.sequences = []
        strategy, grid = compressed(), world.grid()
        found = checkpoint.resume(path, strategy, grid)
        world.dying = True
        fit(strategy, grid, found.arrays, 7, start_round=6, timeout=0.01)
        world.dying = False
        used.append(set(world.sequences))
    assert max(used[0]) < min(used[1])
    assert max(used[1]) < min(used[2])
    # apply() alone leaves the file as it is: the next restart would begin with the same numbers.
    numbers = []
    for _ in range(2):
        strategy = compressed()
        checkpoint.load(path).apply(strategy, world.grid())
        numbers.append(strategy.sequence)
    assert numbers[0] == numbers[1]


def test_a_wrapper_around_the_drop_in_strategy_passes_the_restart_on(tmp_path: Path) -> None:
    strategy = PipelinedStrategy(compressed(), 1)
    strategy.inner.sequence = 5
    checkpoint.save(tmp_path / "c", server_round=5, arrays=model(), strategy=strategy)
    for expected in (1 << 32, 2 << 32):
        again = PipelinedStrategy(compressed(), 1)
        checkpoint.resume(tmp_path / "c", again, World().grid())
        assert again.inner.sequence == expected


def test_numbers_stay_integers_that_a_message_holds() -> None:
    assert next_epoch(0) == 1 << 32 == next_epoch((1 << 32) - 1)
    assert within_epoch(next_epoch(9) + 3) == 3
    last = ((1 << 31) - 1) << 32
    assert next_epoch(last - 1) == last < 2**63
    AskHead(number=1, seed=0, session=b"session!", sequence=last).check()
    with pytest.raises(StateError, match="start a new run"):
        next_epoch(last)
