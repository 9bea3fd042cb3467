"""Advice of apps, nodes, tasks, graphs and states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from advice import ALL, KEY, NODES, Followed, Row, ended, quiet, row, trains
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from toy import client_app, model, stack

import fedcomp as fc
from fedcomp.clients.edge import prepare
from fedcomp.clients.private.mod import private
from fedcomp.flower.checkpoint import capture_strategy, restore_strategy
from fedcomp.flower.folder import StateFolder
from fedcomp.flower.wrapper import as_batch
from fedcomp.gossip.topology import Edges, topology_of
from fedcomp.tasks.partition import parse_partitioner
from fedcomp.timing.links import parse_link

GOOD = ("--superlink", "localhost:9092", "--partition", "0", "--of", "2", "--insecure")


def option(text: str, wrong: Any, right: Any) -> Row:
    """Return a row of the command line of a node; ``wrong`` and ``right`` may be functions of a folder."""

    def called(words: Any) -> Followed:
        return lambda path: prepare([*GOOD, *(words(path) if callable(words) else words)])

    return Row(text, called(wrong), called(right))


LABELS = np.arange(60) % 6


def split(text: str, parts: int = 3, labels: Any = LABELS, **options: Any) -> bool:
    """Whether every example is in one partition."""
    given = {"n": len(LABELS), **options}
    found = parse_partitioner(text).assign(parts, KEY, labels=labels, **given)
    return len(found) == len(LABELS)


class Looping(FedAvg):
    """A server with a loop of its own."""

    def start(self, *arguments, **options):
        return super().start(*arguments, **options)


class Remembering(FedAvg):
    """A server that keeps something which is no plain data."""

    def __init__(self, **options):
        super().__init__(**options)
        self.kept = {object()}


class Stored(Remembering):
    """It says what of it is stored."""

    def state_dict(self):
        return {"kept": len(self.kept)}

    def load_state_dict(self, state):
        self.kept = {object() for _ in range(state["kept"])}


def started_again(other: bool) -> Any:
    strategy = fc.PipelinedStrategy(fc.Compressed(quiet(), fc.TopK(density=0.1)), 1)
    with fc.InProcessGrid(client_app([fc.compression()]), NODES) as grid:
        arrays = strategy.start(grid, model(), num_rounds=2).arrays
        return strategy.start(grid, model(5.0) if other else arrays, num_rounds=2).arrays


def looped() -> bool:
    with fc.InProcessGrid(client_app([fc.compression()]), NODES) as grid:
        result = fc.Compressed(Looping(**ALL)).start(grid, model(), num_rounds=2)
    return bool(np.abs(stack(result.arrays)).max() > 0)


def kept(strategy: Any) -> bool:
    """Whether what is stored of a strategy is there in another one."""
    state = capture_strategy(strategy)
    fresh = type(strategy)(**ALL)
    fresh.kept = set()
    restore_strategy(fresh, state)
    return len(fresh.kept) == 1


def folder(path: Path, mode: int) -> StateFolder:
    path = path / "state"
    path.mkdir()
    path.chmod(mode)
    return StateFolder(path, 0)


def below_a_file(path: Path) -> StateFolder:
    (path / "file").write_text("")
    return StateFolder(path / "file" / "state", 0)


def grid_of(partitions: int, **options: Any) -> fc.InProcessGrid:
    return fc.InProcessGrid(client_app(), partitions, **options)


def replaced_node() -> bool:
    with grid_of(2) as grid:
        grid.remove_node(grid.node_id_of(1))
        return grid.add_node(1) in set(grid.get_node_ids())


CLIENTS = (
    row(
        "is given twice; leave one out",
        lambda: fc.client(ClientApp(), only=["compression", "compression"]),
        lambda: fc.client(ClientApp(), only=["compression"]),
    ),
    row(
        "client() already made this app; pass all halves in one call",
        lambda: fc.client(fc.client(ClientApp()), only=["private"]),
        lambda: fc.client(ClientApp(), only=["compression", "private"]),
    ),
    row(
        "write {}(), or its name in quotes",
        lambda: fc.client(ClientApp(), only=[fc.compression]),
        lambda: fc.client(ClientApp(), only=[fc.compression()]) and fc.client(ClientApp(), only=["compression"]),
    ),
    row("remove it from ", lambda: fc.client(ClientApp(mods=[fc.compression()])), lambda: fc.client(ClientApp())),
    row(
        "does not work without {}; add it to only=[...]",
        lambda: fc.client(ClientApp(), only=[fc.votes_only(), "private"]),
        lambda: fc.client(ClientApp(), only=[fc.votes_only(), "private", "compression"]),
    ),
)


COMMAND = (
    option(
        "expected HOST:PORT without a scheme, e.g. 10.0.0.1:8000",
        ["--superlink", "http://10.0.0.1:8000"],
        ["--superlink", "10.0.0.1:8000"],
    ),
    option(
        "--privacy-ledger FILE, or --state-dir DIR",
        ["--privacy-budget", "1.5"],
        lambda path: ["--privacy-budget", "1.5", "--privacy-ledger", str(path / "spent")],
    ),
    option(
        "--privacy-delta has no effect without --privacy-budget",
        ["--privacy-delta", "1e-5"],
        lambda path: ["--privacy-delta", "1e-5", "--privacy-budget", "1", "--state-dir", str(path)],
    ),
    option(
        "configuration cannot hold; choose another",
        lambda path: ["--state-dir", str(path / "a'b")],
        lambda path: ["--state-dir", str(path / "ab")],
    ),
    option(
        "--peer-announce and --peer-store have no effect without --peer",
        ["--peer-announce", "a.b:9500"],
        ["--peer-announce", "a.b:9500", "--peer", "0.0.0.0:9500"],
    ),
    option(
        "which others cannot reach; give an address they can reach with --peer-announce",
        ["--peer", "0.0.0.0:9500"],
        ["--peer", "0.0.0.0:9500", "--peer-announce", "a.b:9500"],
    ),
)


TASKS = (
    row("classes; use more shards per client", lambda: split("shards:1"), lambda: split("shards:2")),
    row("or shards per client", lambda: split("shards:40"), lambda: split("shards:4", 2) and split("shards:2")),
    row("or pieces per client", lambda: split("pieces:40"), lambda: split("pieces:40", 1) and split("pieces:2")),
    row(
        "this data has no natural ids; use 'iid', 'dirichlet:0.5' or 'shards:2'",
        lambda: split("natural"),
        lambda: split("iid") and split("dirichlet:0.5") and split("shards:2"),
    ),
    row(
        "iid needs the number of examples: give labels, ids or n",
        lambda: split("iid", labels=None, n=None),
        lambda: split("iid", n=None) and split("iid", labels=None) and split("iid", labels=None, n=None, ids=LABELS),
    ),
    row(
        "an example of this data has no single class; use 'natural'",
        lambda: split("shards:2", labels=None),
        lambda: split("natural", labels=None, ids=LABELS),
    ),
    row("takes no number, got {}; write {}", lambda: split("iid:2"), lambda: split("iid")),
    row(
        "were asked for; ",
        lambda: split("natural", 9, ids=LABELS),
        lambda: split("natural", 1, ids=LABELS) and split("natural", 6, ids=LABELS),
    ),
    row(
        "partitions at least {} each; ",
        lambda: split("iid", min_examples=50),
        lambda: split("iid", 1, min_examples=50) and split("iid", min_examples=20),
    ),
    row(
        "is not a bandwidth; write e.g. '10mbit', '250kbit' or '1.5g'",
        lambda: parse_link("fast"),
        lambda: [parse_link(text).up_bits_per_s for text in ("10mbit", "250kbit", "1.5g")] == [1e7, 2.5e5, 1.5e9],
    ),
    row(
        "is not a latency; write e.g. '20ms' or '0.5s'",
        lambda: parse_link("1mbit@soon"),
        lambda: (parse_link("1mbit@20ms").latency_s, parse_link("1mbit@0.5s").latency_s) == (0.02, 0.5),
    ),
)


GOSSIP = (
    row(
        "fills no grid but 1 x {}; use ring, or ",
        lambda: topology_of("torus", 7),
        lambda: topology_of("ring", 7) and topology_of("torus", 8),
    ),
    row(
        "together may not be connected; ",
        lambda: topology_of("digraph:0.000001", 9).window,
        lambda: topology_of("digraph:0.5", 9).window,
    ),
    row("takes no parameter; write {}", lambda: topology_of("ring:3", 5), lambda: topology_of("ring", 5)),
    row("give only edges to others", lambda: topology_of("edges:0-0,0-1", 2), lambda: topology_of("edges:0-1", 2)),
    row(
        "weights for {} edges; give one weight per edge",
        lambda: Edges(3, [(0, 1), (1, 2)], [0.3], directed=False),
        lambda: Edges(3, [(0, 1), (1, 2)], [0.3, 0.3], directed=False),
    ),
)


FLOWER = (
    row("which fit() would bypass; call its ", lambda: ended(Looping(**ALL)), looped),
    row(
        "to continue, start it with the arrays it ended with",
        lambda: started_again(True),
        lambda: (
            np.abs(stack(started_again(False))).max() > 0
            and trains(fc.PipelinedStrategy(fc.Compressed(quiet(), fc.TopK(density=0.1)), 1), start=model(5.0))
        ),
    ),
    row("messages is a {}; pass a list", lambda: as_batch(iter([])), lambda: as_batch([]) == []),
    row(
        "Give InProcessGrid more nodes, or the strategy smaller min_available_nodes",
        lambda: ended(quiet(min_available_nodes=9)),
        lambda: trains(quiet(min_available_nodes=4)),
        long=True,
    ),
    row("partition {} already has a node; remove it first", lambda: grid_of(2).add_node(1), replaced_node),
    row("cannot be stored; give the ", lambda: capture_strategy(Remembering(**ALL)), lambda: kept(Stored(**ALL))),
    Row(
        "make it the node's own: chmod 700",
        lambda path: folder(path, 0o777),
        lambda path: folder(path / "x", 0o700) if (path / "x").mkdir() is None else None,
    ),
    Row("folder cannot be made: {}; name another one", below_a_file, lambda path: StateFolder(path / "other", 0)),
    row(
        "check its order; use ",
        lambda: private()(None, None, None),
        lambda: fc.client(ClientApp(), only=[private()]),
    ),
)


ROWS: tuple[Row, ...] = (*CLIENTS, *COMMAND, *FLOWER, *TASKS, *GOSSIP)
