"""More rows of advice: what settings of systems, graphs, tasks, coding and commands are told to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from advice import KEY, LAYOUT, PLAN, PRIVATE, PROMISE, VALUES, Followed, Row, ended, quiet, row, system, trains
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from toy import model

import fedcomp as fc
from fedcomp.clients.half import ClientHalf
from fedcomp.coding.encodings import encoding_matrix
from fedcomp.coding.prime import PrimeField
from fedcomp.experiments.program import main
from fedcomp.experiments.spec import RunSpec
from fedcomp.gossip.nids import NIDS
from fedcomp.gossip.sparse_push import SparsePush
from fedcomp.gossip.topology import topology_of
from fedcomp.layout import Update
from fedcomp.tasks import get_task

RECORD = {"noise_multiplier": 2.0}


def settings(text: str, name: str, wrong: dict[str, Any], *right: dict[str, Any]) -> Row:
    """Return a row of a system's settings."""
    return row(text, lambda: system(name, **wrong), lambda: [system(name, **each) for each in right])


def command(text: str, wrong: Followed, right: Followed) -> Row:
    """Return a row of a command line, which prints its error and returns a status."""

    def failing(path: Path) -> None:
        assert wrong(path) != 0
        raise SystemExit

    return Row(text, failing, lambda path: right(path) == 0)


def certificates(*words: str) -> Followed:
    return lambda path: main(["certificates", str(path / "keys"), *words])


def then(first: Followed, second: Followed) -> Followed:
    return lambda path: first(path) or second(path)


MADE = certificates("--host", "a.example", "--nodes", "1")


def statistics() -> ArrayRecord:
    return ArrayRecord({"bn.weight": Array(np.ones(3, np.float32)), "bn.running_mean": Array(np.zeros(3, np.float32))})


def integers() -> ArrayRecord:
    return ArrayRecord({"n": Array(np.zeros(3, np.int64))})


SYSTEMS = (
    settings(
        "does not fit cache={}; use cache=lru",
        "skewed-gcn",
        {"cache_bytes": 99, "cache": "none"},
        {"cache_bytes": 99, "cache": "lru"},
    ),
    settings(
        "is not valid: give seconds, or 0 for the run's timeout",
        "skewed-gcn",
        {"deadline": -1.0},
        {"deadline": 1.0},
        {"deadline": 0.0},
    ),
    settings(
        "id does not fit: set compressor={} itself",
        "choco",
        {"compressor.id": "randomk"},
        {"compressor": "randomk", "compressor.density": 0.1},
    ),
    settings("closing iterations are for ", "choco", {"skew_rounds": 2}, {"skew_rounds": 0}),
    settings("is decided by the server; use {}", "topk", {"inner.fraction_train": 0.5}, {"fraction": 0.5}),
    settings(
        "set codec, for instance codec=qsgd",
        "record-dp",
        {"codec": "", "downlink": "topk", **RECORD},
        {"codec": "qsgd", "downlink": "", **RECORD},
    ),
    settings("does its own averaging; use server_lr, or ", "scalecom", {"inner": "fedadam"}, {"server_lr": 0.5}),
    settings(
        "are set by the server; leave encoder and decoder at 0", "lgc", {"codec.encoder": 1}, {"codec.encoder": 0}
    ),
    settings(
        "use codec=randomk or codec=randomblock",
        "random-mask",
        {"codec": "topk", "codec.density": 0.1},
        {"codec": "randomk", "codec.density": 0.1, "codec.shared": True},
        {"codec": "randomblock", "codec.density": 0.1, "codec.shared": True},
    ),
    settings(
        "samples clients, but this system samples records; use record_rate",
        "record-dp",
        {"sampling": "capped", "cap": 3, **RECORD},
        {"record_rate": 0.2, **RECORD},
    ),
    row(
        "approximate=True, or leave it out",
        lambda: fc.CodedFedAvg(quiet(), construction="gradcode", losses=1, quorum=2),
        lambda: (
            fc.CodedFedAvg(quiet(), construction="gradcode", losses=1, quorum=2, approximate=True)
            and fc.CodedFedAvg(quiet(), construction="gradcode", losses=1)
        ),
    ),
    row(
        "has no bound. Use GroupNorm instead",
        lambda: fc.RecordDp(quiet(), PLAN, records=100).adopt(statistics()),
        lambda: fc.RecordDp(quiet(), PLAN, records=100).adopt(model()) is None,
    ),
    row(
        "Add parameters, or train without ",
        lambda: ended(fc.DpFedAvg(quiet(), clip=1.0, **PROMISE), PRIVATE, start=integers()),
        lambda: trains(fc.DpFedAvg(quiet(), clip=1.0, **PROMISE), PRIVATE),
    ),
    row(
        "whose own logs say more, and start again",
        lambda: ended(fc.Compressed(quiet(), fc.QSGD(7)), mods=[raising]),
        lambda: trains(fc.Compressed(quiet(), fc.QSGD(7))),
    ),
    row(
        "two halves handle messages of type {}; leave {} out",
        lambda: fc.client(ClientApp(), only=[evaluator("a"), evaluator("b")]),
        lambda: fc.client(ClientApp(), only=[evaluator("a")]),
    ),
)


def raising(message: Any, context: Any, call_next: Any) -> Any:
    raise ValueError("broken")


def evaluator(name: str) -> ClientHalf:
    return ClientHalf(name, handlers={"evaluate.own": lambda msg, context: msg})


OTHERS = (
    row(
        "use an undirected graph ",
        lambda: topology_of("directed-ring", 4).check(NIDS),
        lambda: [topology_of(text, 4).check(NIDS) for text in ("ring", "complete", "edges:0-1,1-2,2-3")],
    ),
    row(
        "add edges",
        lambda: topology_of("edges:0-1", 3).validate(symmetric=True),
        lambda: topology_of("edges:0-1,1-2", 3).validate(symmetric=True) is None,
    ),
    row(
        "they exclude each other: give one, or none for 1 %",
        lambda: SparsePush(density=0.1, compressor=fc.TopK(0.1)),
        lambda: SparsePush(density=0.1) and SparsePush(compressor=fc.TopK(0.1)) and SparsePush(),
    ),
    row(
        "use a linear task, such as 'digits-zero', ",
        lambda: get_task("digits").linear_loss,
        lambda: get_task("digits-zero").linear_loss and get_task("breast-cancer").linear_loss,
    ),
    row(
        "is not a word; write, say, codec.density=0.01",
        lambda: RunSpec("topk", settings={" x": 1}),
        lambda: RunSpec("topk", settings={"codec.density": 0.01}),
    ),
    row(
        "and under an identity they are not MDS; use 'mds'",
        lambda: encoding_matrix("vandermonde", 6, 4),
        lambda: encoding_matrix("mds", 6, 4).shape == (6, 4),
    ),
    row("give it memory of its own", lambda: product_into_operand(True), lambda: product_into_operand(False)),
    row(
        "a sum of no frames has no support; leave it out",
        lambda: RESIDUES.add([], LAYOUT),
        lambda: RESIDUES.add([RESIDUES.encode(Update(VALUES, LAYOUT), RESIDUES.init(LAYOUT), KEY)[0]], LAYOUT),
    ),
    command(
        "is neither a host name nor an IP address; give it without ",
        certificates("--host", "https://a.example:9092", "--nodes", "1"),
        MADE,
    ),
    command(
        "holds no ca.crt; make it first, with --host and --nodes",
        certificates("--add-nodes", "1"),
        then(MADE, certificates("--add-nodes", "1")),
    ),
    command(
        "use it with --nodes or ",
        then(MADE, certificates("--add-nodes", "1", "--host", "b.example")),
        then(MADE, certificates("--renew", "--host", "b.example")),
    ),
)

RESIDUES = fc.ModularSum(fc.RandomK(1.0), clip=8.0, levels=1000, summands=10)


def product_into_operand(same: bool) -> bool:
    field = PrimeField(65521)
    one = np.eye(3, dtype=field.dtype)
    out = one if same else np.empty_like(one)
    return bool((field.matmul(one, one, out=out) == np.eye(3)).all())


ROWS: tuple[Row, ...] = (*SYSTEMS, *OTHERS)
