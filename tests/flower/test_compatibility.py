"""Flowers of other versions: both signatures of grids, messages that were not pushed, private names that are gone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from plain_grid import PlainGrid
from toy import client_app, fedavg, model, stack

from fedcomp.clients.compressed import compression
from fedcomp.clients.edge import node
from fedcomp.clients.edge.events import EventLog
from fedcomp.clients.edge.options import parse
from fedcomp.codecs import TopK
from fedcomp.errors import ConfigError
from fedcomp.flower import _private
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import wire_bytes
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.pipeline import Await, Send
from fedcomp.flower.rounds import ExchangeStrategy, drive, fit
from fedcomp.flower.wrapper import GridWrapper
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.overlap import Buffered, PipelinedStrategy

HERE = Path(__file__).parents[2]
NODES = 5


class LaterGrid(PlainGrid):
    """As the grid of Flower 1.43's deployments: names every message, answers ``""`` for one that was not pushed, and
    pulls with or without a filter.

    Attributes
    ----------
    refused : set of int
        Nodes whose messages are not pushed.
    asked : set of str
        Ids that were asked for.
    """

    def __init__(self, engine: InProcessGrid, refused: Iterable[int] = ()) -> None:
        super().__init__(engine)
        self.refused, self.asked = set(refused), set()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            if message.metadata.dst_node_id in self.refused:
                message.metadata.__dict__["_message_id"] = f"{len(ids):064d}"
                ids.append("")
            else:
                ids += self.engine.push_messages([message])
        return ids

    def pull_messages(
        self, reply_to_message_ids: Iterable[str] | None = None, *, message_ids: Iterable[str] | None = None
    ) -> list[Message]:
        assert message_ids is None, "deprecated"
        if reply_to_message_ids is None:
            return self.engine.pull_messages()
        ids = list(reply_to_message_ids)
        self.asked |= set(ids)
        return self.engine.pull_messages(ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages([each for each in self.push_messages(messages) if each])


def batch(grid: Any) -> list[Message]:
    record = RecordDict({"arrays": model(1.0), "config": ConfigRecord({"server-round": 1})})
    return [Message(record, node_id, "train") for node_id in grid.get_node_ids()]


def not_pushed(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "not pushed" in r.getMessage()]


@pytest.fixture
def engine() -> Iterable[InProcessGrid]:
    with InProcessGrid(client_app([compression()]), NODES, seed=3) as grid:
        yield grid


@pytest.mark.parametrize("kind", [PlainGrid, LaterGrid], ids=["message_ids", "reply_to_message_ids"])
@pytest.mark.parametrize("wrap", [GridWrapper, MeteredGrid, lambda grid: MeteredGrid(GridWrapper(grid))])
def test_replies_are_pulled_by_either_name_from_grids_of_either_signature(
    wrap: Callable[[Any], Any], kind: type[PlainGrid], engine: InProcessGrid
) -> None:
    grid = wrap(kind(engine))
    ids = list(grid.push_messages(batch(grid)))
    assert len(list(grid.pull_messages(ids[:2]))) == 2
    assert len(list(grid.pull_messages(message_ids=ids[2:3]))) == 1
    assert len(list(grid.pull_messages(reply_to_message_ids=iter(ids[3:])))) == NODES - 3
    assert list(grid.pull_messages([])) == []
    with pytest.raises(TypeError, match="not both"):
        grid.pull_messages(ids, message_ids=ids)


def test_without_a_filter_every_reply_that_is_there_is_pulled_and_counted_once(engine: InProcessGrid) -> None:
    grid = MeteredGrid(LaterGrid(engine))
    ids = grid.push_messages(batch(grid))
    first = grid.pull_messages(ids[:1])
    rest = grid.pull_messages()
    assert {r.metadata.reply_to_message_id for r in first + rest} == set(ids)
    assert len(rest) == NODES - 1
    assert grid.pull_messages() == []
    assert sum(grid.ledger.by("node", "wire", direction="up").values()) == sum(map(wire_bytes, first + rest))


def test_a_message_that_was_not_pushed_is_lost_said_once_and_not_waited_for(
    engine: InProcessGrid, caplog: pytest.LogCaptureFixture
) -> None:
    gone = list(engine.get_node_ids())[1]
    later = LaterGrid(engine, {gone})
    grid = MeteredGrid(later)
    sent = batch(grid)
    # Without a limit: whoever waited for it would wait for ever.
    replies = grid.send_and_receive(sent)
    assert len(replies) == NODES - 1
    assert not any(reply.has_error() for reply in replies)
    assert [m.metadata.dst_node_id for m in sent if not m.metadata.message_id] == [gone]
    assert later.asked == {m.metadata.message_id for m in sent} - {""}
    assert len(grid.ledger.by("node", "wire", direction="down")) == NODES - 1
    assert not_pushed(caplog) == [f"1 of {NODES} messages were not pushed: they are lost, and not waited for"]
    sent = batch(grid)
    assert [not each for each in grid.push_messages(sent)] == [m.metadata.dst_node_id == gone for m in sent]


@pytest.mark.parametrize("wrap", [lambda grid: grid, MeteredGrid], ids=["bare", "metered"])
def test_an_exchange_under_way_does_not_wait_for_what_was_not_pushed(
    wrap: Callable[[Any], Any], engine: InProcessGrid, caplog: pytest.LogCaptureFixture
) -> None:
    later = LaterGrid(engine, list(engine.get_node_ids())[2:4])
    grid = wrap(later)

    def exchange():
        messages = batch(grid)
        yield Send(messages)
        return (yield Await(messages))

    assert len(drive(exchange(), grid)) == NODES - 2
    assert len(later.asked) == NODES - 2
    assert len(not_pushed(caplog)) == 1


@pytest.mark.parametrize("codec", [None, TopK(density=0.1)], ids=["plain", "topk"])
@pytest.mark.parametrize("kind", ["rounds", "pipelined", "buffered"])
def test_strategies_report_as_lost_what_was_not_pushed(
    kind: str, codec: TopK | None, engine: InProcessGrid, caplog: pytest.LogCaptureFixture
) -> None:
    inner = Compressed(fedavg(fraction_evaluate=0.0), codec) if codec else fedavg(fraction_evaluate=0.0)
    strategy: Any = {
        "rounds": lambda: inner if codec else Compressed(inner, TopK(density=1.0)),
        "pipelined": lambda: PipelinedStrategy(inner, width=2, timeout=20),
        "buffered": lambda: Buffered(inner, concurrency=NODES, buffer=NODES - 1, timeout=20),
    }[kind]()
    gone = next(iter(engine.get_node_ids()))
    later = LaterGrid(engine, {gone})
    result = fit(strategy, MeteredGrid(later), model(), 3)
    assert np.any(stack(result.arrays))
    # In cohorts not every round asks the node that is gone.
    lost = [strategy.reports[number].lost for number in (1, 2, 3)]
    assert max(lost) == 1
    assert not any(strategy.reports[number].refused for number in (1, 2, 3))
    assert "" not in later.asked
    assert not_pushed(caplog)


class Count(ExchangeStrategy):
    """Adds 1 to the model in every round."""

    def round(self, server_round, arrays, config, grid):
        yield []
        return ArrayRecord({k: type(a)(a.numpy() + 1) for k, a in arrays.items()}), MetricRecord({"n": server_round})


def test_the_wrapped_strategys_start_gets_whatever_flower_gives_it(engine: InProcessGrid) -> None:
    class Stopping(FedAvg):
        """Has the loop of a Flower that can stop, whatever the installed one can."""

        def start(self, grid, initial_arrays, num_rounds=3, *, should_stop=None, **options):
            for number in range(1, num_rounds + 1):
                result = super().start(grid, initial_arrays, 1, **options)
                if should_stop is not None and should_stop(number, result):
                    break
            self.ended = number
            return result

    strategy = Compressed(Stopping(fraction_evaluate=0.0), TopK(density=0.5))
    strategy.start(MeteredGrid(engine), model(), 4, should_stop=lambda number, result: number == 2)
    assert strategy.ended == 2


# Flowers without a private name.


@pytest.fixture
def otherwise(monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    """A Flower that writes one thing more into its messages."""
    deflate = Message.deflate
    monkeypatch.setattr(Message, "deflate", lambda self: deflate(self) + b"more")
    caches = (_private.engine_unsupported, _private._warn_of_weighing)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_a_flower_that_writes_messages_otherwise_is_noticed_and_weighs_them_itself(
    engine: InProcessGrid, otherwise: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert "deflates messages in another way" in _private.engine_unsupported()
    (message, *_) = batch(engine)
    alone = sum(len(part) for part in (message.deflate(), *(array.data for array in model(1.0).values())))
    assert alone < wire_bytes(message) < alone + 2500
    assert wire_bytes(message) == wire_bytes(message)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "counted by Flower's own serialisation" in warnings[0]
    with pytest.raises(ConfigError, match="another way"):
        InProcessGrid(client_app(), 2)


def test_flowers_own_weight_is_that_of_the_ledger_but_for_a_few_bytes(engine: InProcessGrid) -> None:
    for message in (*batch(engine), *engine.send_and_receive(batch(engine))):
        assert _private._weigh_by_flower(message) == pytest.approx(wire_bytes(message), abs=100)


def test_the_superlinks_own_id_is_flowers() -> None:
    from flwr.common.constant import SUPERLINK_NODE_ID

    assert _private.SUPERLINK_NODE_ID == SUPERLINK_NODE_ID


WITHOUT = """
import importlib, sys
import flwr.app, flwr.clientapp, flwr.serverapp.strategy
module, name = sys.argv[1].split(":")
delattr(importlib.import_module(module), name)

import numpy as np
import fedcomp as fc
from flwr.app import Array, ArrayRecord, Context, MetricRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from fedcomp.flower.metered import MeteredGrid

identity = [v for k, v in sys.modules.items() if k == "flwr.supercore.task_identity"][0]
identity = identity.TaskIdentity if hasattr(identity, "TaskIdentity") else Message.__init__.__globals__["TaskIdentity"]
identity.run_id, identity.node_id, identity.task_id = 1, 1, 1
app = ClientApp(mods=[fc.compression()])

@app.train()
def train(message, context):
    arrays = {k: Array(a.numpy() + 1) for k, a in message.content["arrays"].items()}
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1})}),
                   reply_to=message)

class Direct(Grid):
    contexts = {n: Context(1, n, {"partition-id": n - 2, "num-partitions": 2}, RecordDict(), {}) for n in (2, 3)}
    run = property(lambda self: None)
    set_run = create_message = send_and_receive = None
    def get_node_ids(self):
        return list(self.contexts)
    def push_messages(self, messages):
        self.replies = {}
        for message in messages:
            name = message.metadata.__dict__["_message_id"] = message.object_id
            identity.node_id = message.metadata.dst_node_id
            reply = self.replies[name] = app(message, self.contexts[message.metadata.dst_node_id])
            identity.node_id = 1
            reply.metadata.__dict__["_message_id"] = reply.object_id
        return list(self.replies)
    def pull_messages(self, message_ids):
        return [self.replies[name] for name in message_ids]

grid = MeteredGrid(Direct())
strategy = fc.Compressed(FedAvg(fraction_evaluate=0.0), fc.TopK(density=0.5))
result = strategy.start(grid, ArrayRecord({"w": Array(np.zeros(4096, np.float32))}), 2)
assert not any(report.refused for report in strategy.reports.values()), strategy.reports
print("changed", np.count_nonzero(result.arrays["w"].numpy()))
print("wire", grid.ledger.total("wire", direction="up"))
try:
    from fedcomp.flower.grid import InProcessGrid
    InProcessGrid(app, 2)
except fc.FedcompError as error:
    print("refused", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["flwr.supercore.constant:HEAD_BODY_DIVIDER", "flwr.supercore.task_identity:TaskIdentity"]
)
def test_the_pair_trains_and_is_counted_where_a_private_name_is_gone(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, name], capture_output=True, text=True, check=False, cwd=HERE, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert int(said["changed"]) == 4096
    # Two rounds, two clients, 2048 values of four bytes and more than 4096 bits of indices.
    assert 2 * 2 * (4 * 2048 + 512) < int(said["wire"]) < 2 * 2 * (4 * 2048 + 512 + 3000)
    assert name.partition(":")[2] in said["refused"]
    assert (done.stdout + done.stderr).count("counted by Flower's own serialisation") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "push_message"], ids=["as installed", "without push_message"])
def test_a_node_takes_flowers_own_executor_where_a_part_is_missing_and_says_so_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Read by every interpreter that is started with this folder on its path.
    (tmp_path / "sitecustomize.py").write_text(
        f"from flwr.supernode.runtime import run_clientapp\ndelattr(run_clientapp, {name!r})\n" if name else ""
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    written = StringIO()
    options = parse(["--superlink", "127.0.0.1:1", "--partition", "0", "--of", "1", "--insecure"])
    log = EventLog(json=False, stream=written)
    programs = [service.name for service in node.services(options, tmp_path / "secret", log)]
    warnings = [line for line in written.getvalue().splitlines() if "WARNING" in line]
    if name:
        assert len(programs) == 1
        (warning,) = warnings
        assert "messages are handled by Flower's own" in warning
        assert name in warning
    else:
        assert programs[1:] == ["executor"]
        assert not warnings
