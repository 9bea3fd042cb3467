"""More rows of advice: states, packets, ledgers, nodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from advice import LAYOUT, Row, damaged, decoded, ledger, points_the_same_way, row
from advice_of_flower import context
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedcomp.clients.app import NodeJob
from fedcomp.clients.messages import require_partition
from fedcomp.codecs import KeyRegion
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.registry import codecs
from fedcomp.codecs.topk import TopK
from fedcomp.coding.code import PacketPlace
from fedcomp.coding.gradvalues import PrimeArithmetic
from fedcomp.coding.mds import MdsEncoder
from fedcomp.coding.prime import PrimeField
from fedcomp.coding.rlnc import RlncEncoder
from fedcomp.flower import store
from fedcomp.gossip.power_gossip import PowerGossip
from fedcomp.gossip.topology import topology_of
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.kernels.tiers import ops
from fedcomp.timing.dropout import OnOff

HALF = ErrorFeedback(TopK(0.1), memory="float16")
REGION = KeyRegion()
PLACE = PacketPlace(1, 2, 3)
PAYLOAD = bytes(range(200))


def changed(**arrays: Any) -> Any:
    return lambda state: {**state, **arrays}


def region(value: float) -> Any:
    """Encode with one array of the state full of a value."""
    state = REGION.init(LAYOUT)
    name = next(name for name, array in state.items() if array.dtype.kind == "f")
    return damaged(REGION, changed(**{name: np.full_like(state[name], value)}))


def coded_with(kind: Any, **options: Any) -> bool:
    """Whether as many packets as there are symbols are made."""
    encoder = kind(PAYLOAD, PLACE, **options)
    return encoder.symbols > 0


def another(name: str, replace: bool = False) -> Any:
    """Register a class under an id, and take it out again."""
    kind = type("Another", (TopK,), {"codec_id": name, "__module__": "advice"})
    held = dict(codecs._classes)
    try:
        return codecs.register(kind, replace=replace) is kind
    finally:
        codecs._classes.clear()
        codecs._classes.update(held)


def job(clients: int, **node: Any) -> NodeJob:
    content = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord({"clients": clients})})
    # Of a message nothing else is read.
    message: Any = SimpleNamespace(content=content)
    return NodeJob.read(message, context(**node))


def opened_twice(path: Path) -> None:
    first = ledger(path=path / "spent")
    try:
        ledger(path=path / "spent")
    finally:
        first.close()


def opened_after_it_ended(path: Path) -> bool:
    ledger(path=path / "spent").close()
    second = ledger(path=path / "spent")
    second.close()
    return True


def opened(path: Path, *, before: bool) -> bool:
    made = ledger(population=0)
    if before:
        made.declare(10)
    made.open(path / "spent")
    made.close()
    return True


ROWS: tuple[Row, ...] = (
    row(
        "kept; start from init(layout)",
        lambda: damaged(HALF, changed(memory=np.ones(LAYOUT.size, np.float16), exponent=np.array(9999))),
        lambda: points_the_same_way(HALF),
    ),
    row(
        "expected one number; start from init(layout)",
        lambda: damaged(HALF, changed(memory=np.ones(LAYOUT.size, np.float16), exponent=np.zeros(3))),
        lambda: points_the_same_way(HALF),
    ),
    row(
        "can cause: the stored state was damaged; start from init(layout)",
        lambda: region(np.nan),
        lambda: points_the_same_way(REGION),
    ),
    row("of another codec or model. Start ", lambda: decoded(REGION, state={}), lambda: points_the_same_way(REGION)),
    row(
        "choose another id, or pass replace=True to replace it for the whole process",
        lambda: another("topk"),
        lambda: another("topk-of-mine") and another("topk", replace=True),
    ),
    row(
        "Make at least {} shards, or fewer symbols",
        lambda: coded_with(MdsEncoder, symbols=5, shards=4),
        lambda: coded_with(MdsEncoder, symbols=5, shards=5) and coded_with(MdsEncoder, symbols=4, shards=4),
    ),
    row(
        "are needed. Take fewer symbols, or code 'rlnc' if threshold is 0",
        lambda: coded_with(MdsEncoder, symbols=5, shards=400),
        lambda: coded_with(RlncEncoder, symbols=5, shards=400) and coded_with(MdsEncoder, symbols=5, shards=200),
    ),
    row(
        "Use code 'mds'",
        lambda: coded_with(RlncEncoder, symbols=5, threshold=1),
        lambda: coded_with(MdsEncoder, symbols=5, threshold=1),
    ),
    row(
        "has no room for the sum of {} rows; use a larger prime",
        lambda: PrimeArithmetic(PrimeField(251), 100, 1.0),
        lambda: PrimeArithmetic(PrimeField(65521), 100, 1.0),
    ),
    row(
        "larger limit, which makes the step coarser, or a larger prime",
        lambda: PrimeArithmetic(PrimeField(65521), 3, 1.0).pack(np.full(3, 2.0), np.zeros(0)),
        lambda: PrimeArithmetic(PrimeField(65521), 3, 4.0).pack(np.full(3, 2.0), np.zeros(0)).size == 3,
    ),
    row(
        "start the SuperNode with --node-config 'partition-id=0 ",
        lambda: require_partition(context(), "it has to"),
        lambda: require_partition(context(**{"partition-id": 0, "num-partitions": 4}), "it has to") == 0,
    ),
    row(
        "start the SuperNode with --node-config ",
        lambda: job(2),
        lambda: job(2, **{"partition-id": 0, "num-partitions": 2}).partition == 0,
    ),
    row(
        "or start {} nodes",
        lambda: job(3, **{"partition-id": 0, "num-partitions": 2}),
        lambda: (
            job(2, **{"partition-id": 0, "num-partitions": 2}) and job(3, **{"partition-id": 0, "num-partitions": 3})
        ),
    ),
    row(
        "give its owner state_dict() and load_state_dict()",
        lambda: store.dumps({"x": object()}, "test"),
        lambda: store.loads(store.dumps({"x": {"count": 1}}, "test"), "test") == {"x": {"count": 1}},
    ),
    Row("two writers would each spend the budget; end the other run", opened_twice, opened_after_it_ended),
    Row("ledger's file is opened", lambda path: opened(path, before=False), lambda path: opened(path, before=True)),
    row(
        "first, or one number for all",
        lambda: SamplerSettings(layers=2, n=(3, 4, 5)),
        lambda: SamplerSettings(layers=2, n=(3, 4)) and SamplerSettings(layers=2, n=3),
    ),
    row(
        "give horizon, the seconds of a round",
        lambda: OnOff(mean_on=1.0, mean_off=1.0),
        lambda: OnOff(mean_on=1.0, mean_off=1.0, horizon=9.0)(1, 0),
    ),
    row(
        "reaches to 2**32 elements, not {}; use 'auto' or 'numpy'",
        lambda: ops("numba", 1 << 32),
        lambda: ops("auto", 1 << 32) and ops("numpy", 1 << 32),
    ),
    row(
        "its W must be symmetric and stay the same; use 1.0",
        lambda: PowerGossip(rate="auto").fitted(topology_of("directed-ring", 4)),
        lambda: PowerGossip(rate=1.0).fitted(topology_of("directed-ring", 4)).rate == 1.0,
    ),
)
