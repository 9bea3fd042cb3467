"""A server that is killed and resumed among clients that were not set back: numbers, versions, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp.strategy import FedAvg
from plain_grid import PlainGrid
from program_runs import owed
from toy import client_app, model, stack

from fedcomp.clients.compressed import compression
from fedcomp.codecs import TopK
from fedcomp.errors import StateError
from fedcomp.flower import checkpoint
from fedcomp.flower.asks import AskHead
from fedcomp.flower.faults import Delivery, Fault
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.layout import Layout, SmallDense
from fedcomp.stateful import next_epoch, within_epoch
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.overlap import PipelinedStrategy

LAYOUT = Layout.of({name: array.numpy() for name, array in model().items()}, SmallDense())
NODES = 4


class Sum(FedAvg):
    """Adds every update to the model, unweighted: what was delivered is the model itself."""

    def __init__(self) -> None:
        super().__init__(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
        self.base = model()

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Any:
        self.base = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        total = {name: array.numpy().astype(np.float64) for name, array in self.base.items()}
        for reply in replies:
            if not reply.has_error():
                record = next(iter(reply.content.array_records.values()))
                total = {k: v + record[k].numpy() - self.base[k].numpy() for k, v in total.items()}
        return ArrayRecord({k: Array(v.astype(np.float32)) for k, v in total.items()}), None


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
        return made - self.natural(left)

    def natural(self, vector: Any) -> np.ndarray:
        """Return a layout vector in the model's own order."""
        return np.concatenate([np.ravel(v).astype(np.float64) for v in LAYOUT.unflatten(np.float32(vector)).values()])


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
