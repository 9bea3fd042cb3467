"""The contract of systems where several rounds are in flight: a client's memory has its mass once, whatever is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg
from program_runs import owed
from registry import ENTRIES, Entry
from toy import client_app, model

from fedcomp.clients.compressed import compression
from fedcomp.errors import ConfigError
from fedcomp.flower.faults import Delivery, RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.records import to_arrays
from fedcomp.flower.rounds import drive, exchanges_of
from fedcomp.layout import Layout
from fedcomp.program import Mean, Now, Step
from fedcomp.rng import Key
from fedcomp.strategies.overlap import Buffered, Overlap, Overlapping, PipelinedStrategy
from fedcomp.strategies.server import Running, Server

NODES = 6
QUIET = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}
FAULTS = {"lost_reply": 0.1, "silent": 0.05, "duplicate": 0.08, "duplicate_reply": 0.05, "raise": 0.08, "late": 0.08}

# Whose messages bring no more than models and updates.
PLAIN = {name: entry for name, entry in ENTRIES.items() if not (entry.outer or entry.data)}
STATELESS = {
    name: entry
    for name, entry in PLAIN.items()
    if entry.law is not None and not (entry.system.KEEPS or entry.system.KEYS or entry.system.LOST == "again")
}


class Watched(Server):
    """Counts what of each client is in the model."""

    def __init__(self, entry: Entry) -> None:
        system = entry.system
        super().__init__(system, FedAvg(**QUIET), downlink=system.codecs[0] if system.makes_steps else None)
        self.delivered: dict[int, Any] = {}

    def _take(self, x: Running, now: Now, step: Step | None) -> Any:
        codec, given = x.given
        out = super()._take(x, now, step)
        if step is not None and out[0] is not None:
            assert codec is not None
            for each in given:
                self.delivered[each.node] = self.delivered.get(each.node, 0.0) + codec.decode(each.frame, x.layout)
        return out


def overlapped(server: Server, how: str) -> Overlapping:
    if how == "buffered":
        return Buffered(server, 4, 2, timeout=20.0, max_staleness=2)
    return PipelinedStrategy(server, int(how[-1]), timeout=20.0, warmup_rounds=2)


def pace(delivery: Delivery) -> float:
    """Seconds that are sometimes more than anybody waits."""
    draw = Key(17, "pace", delivery.exchange, delivery.partition).generator()
    return float((1 + delivery.partition) * draw.exponential())


class Books:
    """What clients made and owe, by partition, those memories included that were wiped."""

    def __init__(self, server: Watched, grid: InProcessGrid) -> None:
        self.server, self.grid = server, grid
        self.layout = Layout.of(to_arrays(model()), server.policy)
        self.rest = {partition: np.zeros(self.layout.size) for partition in range(NODES)}

    def settle(self, node: int) -> None:
        """Enter all that a node has in its state."""
        context = self.grid.context(node)
        if "toy.sum" not in context.state:
            return
        made = np.zeros(self.layout.size)
        # Of the app's own order of tensors.
        parts = np.split(context.state["toy.sum"]["sum"].numpy(), [1200])
        for name, part in zip(("weight", "bias"), parts, strict=True):
            made[self.layout.by_name[name].slice] = part
        self.rest[int(context.node_config["partition-id"])] += made - owed(self.server, context, node, self.layout)

    def missing(self) -> float:
        """Return how much of what was made is nowhere."""
        for node in self.grid.get_node_ids():
            self.settle(node)
        lost = [rest - self.server.delivered.get(partition, 0.0) for partition, rest in self.rest.items()]
        # What travels dense is remembered nowhere: it is lost with a message.
        return float(np.abs(np.array(lost)[:, : self.layout.compressed_size]).max())


def run(
    strategy: Overlapping, grid: MeteredGrid, rounds: int, forget: Callable[[int], None] = lambda number: None
) -> None:
    for number in range(1, rounds + 1):
        grid.round = number
        # From a model of zeros all clients start with integers, and steps are made on it, too.
        exchanges = exchanges_of(strategy, number, model(), ConfigRecord(), ConfigRecord(), grid, last=number == rounds)
        drive(exchanges, grid, timeout=60)
        forget(number)


def cases() -> list[Any]:
    found = []
    for name, entry in STATELESS.items():
        for how in ("width 2", *["width 3"] * (not entry.another), *["buffered"] * (entry.exchanges == 1)):
            daily = (name, how) in (("pair-topk", "width 2"), ("shared-support", "width 3"))
            found.append(pytest.param(entry, how, id=f"{name}, {how}", marks=() if daily else pytest.mark.long))
    return found


@pytest.mark.parametrize(("entry", "how"), cases())
def test_what_is_made_is_delivered_or_remembered_with_rounds_in_flight(entry: Entry, how: str) -> None:
    server = Watched(entry)
    strategy, rounds = overlapped(server, how), 40
    plan = RandomFaults(Key(9, "overlap"), FAULTS)  # type: ignore[arg-type]
    with InProcessGrid(client_app([compression()]), NODES, seed=5, fault=plan, compute_seconds=pace) as inner:
        books, wiped = Books(server, inner), []

        def forget(number: int) -> None:
            for node in set(inner.get_node_ids()) - strategy.busy:
                if Key(13, "wipe", number, node % 1000).uniform(1)[0] < 0.02:
                    books.settle(node)
                    inner.wipe(node)
                    wiped.append(node)

        run(strategy, MeteredGrid(inner), rounds, forget)
        missing = books.missing()
    assert wiped
    reports = [strategy.reports[number] for number in range(1, rounds + 1)]
    assert entry.law is not None
    assert missing <= entry.law * 1e5
    assert strategy.steps > rounds // 3
    assert sum(report.lost for report in reports) + sum(report.section(Overlap).late for report in reports) > 10
    assert sum(len(report.refused) for report in reports) > 3
    assert sum(len(report.rolled_back) for report in reports) > 1


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=name, marks=[pytest.mark.long] * entry.another)
        for name, entry in PLAIN.items()
        if entry.system.KEEPS and Mean in entry.system.RULES
    ],
)
def test_who_keeps_something_between_rounds_is_refused_by_name(entry: Entry) -> None:
    with pytest.raises(ConfigError) as refused:
        PipelinedStrategy(Watched(entry))
    assert f"{type(entry.system).__name__}(" in str(refused.value)
    assert "from round to round" in str(refused.value)
