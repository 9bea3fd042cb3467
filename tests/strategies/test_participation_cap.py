"""A participation cap counts who was asked: a client whose answers are of no use takes its turns as everybody does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from private_runs import inner
from test_distributed_dp import CLIP
from toy import SHAPES, client_app, model

from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import private
from fedcomp.codecs import QSGD, TopK
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.privacy import find_private
from fedcomp.privacy.local import Privatise
from fedcomp.privacy.sampling import Sampling
from fedcomp.privacy.votes import TopkSign
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.distributed_dp import DistributedDp
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.local_dp import local_dp
from fedcomp.strategies.private.lsg import Lsg
from fedcomp.strategies.private.settings import ShareSettings
from fedcomp.strategies.private.topagg import topagg
from fedcomp.systems.private.lsg import LowRank

NODES, CAP, CULPRIT = 6, 2, 4
PROMISE = {
    "noise_multiplier": 3.0,
    "delta": 1e-3,
    "population": NODES,
    "sampling": Sampling("capped", cap=CAP),
    "insecure_deterministic": True,
}
FEW = {**PROMISE, "count": 3}
NOISE = Privatise(clip=1.0, noise_multiplier=3.0, insecure_deterministic=True)
LOCAL = {key: FEW[key] for key in ("delta", "population", "sampling", "count")}

PATHS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "dense": (lambda: DpFedAvg(inner(), clip=1.0, **FEW), lambda: client_app([private()])),
    "pair": (
        lambda: Compressed(DpFedAvg(inner(), clip=1.0, **FEW), TopK(density=0.1)),
        lambda: client_app([compression(), private()]),
    ),
    "topagg": (
        lambda: topagg(inner(), TopkSign(k=40), server_lr=0.1, **FEW),
        lambda: client_app([compression(), private()]),
    ),
    "lsg": (
        lambda: Lsg(inner(), LowRank(clip=1.0, rank=0, keep=0.5), **FEW),
        lambda: client_app([compression(), private()]),
    ),
    "local": (
        lambda: local_dp(inner(), NOISE, QSGD(levels=8), **LOCAL),
        lambda: client_app([compression(), private()]),
    ),
    # Shares of noise are made for the number that is asked: all of them, every time.
    "distributed": (
        lambda: DistributedDp(inner(), ShareSettings(clip=CLIP, tolerated=2), **PROMISE),
        lambda: client_app([compression()]),
    ),
}


def asked_in(name: str, *, bad: str) -> tuple[Counter[int], Any]:
    """Run until nobody is asked; return how often each partition was, and the ledger."""
    make, make_app = PATHS[name]
    strategy, honest = make(), make_app()
    times: Counter[int] = Counter()

    def app(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        train = message.metadata.message_type == "train"
        if train and bad == "NaN" and context.node_config["partition-id"] == CULPRIT:
            arrays = ArrayRecord({k: Array(np.full(s, np.nan, np.float32)) for k, s in SHAPES.items()})
            reply.content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
        return reply

    def fault(delivery: Any) -> str | None:
        train = delivery.message_type == "train"
        times[delivery.partition] += train
        return "raise" if train and bad == "error" and delivery.partition == CULPRIT else None

    with InProcessGrid(app, NODES, seed=4, fault=fault) as grid:
        strategy.start(grid, model(1.0), num_rounds=7, timeout=9)
    return times, find_private(strategy).privacy


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["NaN", "error"])
@pytest.mark.parametrize("name", PATHS)
def test_a3_a_client_of_no_use_is_asked_no_more_often_than_the_cap(name: str, bad: str) -> None:
    times, ledger = asked_in(name, bad=bad)
    assert times == dict.fromkeys(range(NODES), CAP), "and so it takes nobody's place"
    assert set(ledger.participations.values()) == {CAP}
    assert len(ledger.participations) == NODES
    assert ledger.rounds == (2 if name == "distributed" else 4)
