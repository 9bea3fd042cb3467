"""What the tests of TopAgg share: the toy app behind the mods, one run of it, and what it should come to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.serverapp.strategy import FedAvg, Result
from toy import client_app, fedavg, model, update

from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import private
from fedcomp.clients.private.topagg import votes_only
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.privacy.votes import TopkSign, topk_stochastic_sign
from fedcomp.rng import Key
from fedcomp.strategies.private.topagg import TopAgg, topagg

SIZE = 1212
NODES = 8
BALLOT = TopkSign(k=50)
# A power of two, as is the number of nodes: steps of whole votes are exact in float32.
LR = 0.25

App = Callable[[Message, Context], Message]


def shifted(msg: Message, context: Context, call_next: App) -> Message:
    """A mod that adds one half to all coordinates of the trained model, so that no update holds an exact zero."""
    reply = call_next(msg, context)
    (name, record), *_ = reply.content.array_records.items()
    reply.content[name] = ArrayRecord({k: Array(v.numpy() + np.float32(0.5)) for k, v in record.items()})
    return reply


def inner(**options: Any) -> FedAvg:
    """Return FedAvg as private strategies want it."""
    return fedavg(fraction_evaluate=0.0, **options)


def strategy(ballot: TopkSign = BALLOT, *, pair: bool = True, **options: Any) -> Any:
    """Return TopAgg in the drop-in pair (or alone) with settings that repeat; noiseless by default."""
    chosen = {
        "server_lr": LR,
        "noise_multiplier": 0.0,
        "population": NODES,
        "delta": 1e-3,
        "insecure_deterministic": True,
        "seed": 7,
        **options,
    }
    if pair:
        return topagg(inner(), ballot, **chosen)
    chosen.pop("downlink", None)
    return TopAgg(inner(), ballot, **chosen)


HALVES = [votes_only(), compression(), private()]
"""Of a client that votes and does nothing else."""


def app() -> App:
    """Return the toy app with TopAgg's halves."""
    return client_app(HALVES)


def run(
    chosen: Any, *, nodes: int = NODES, rounds: int = 1, client: App | None = None, initial: Any = None, **engine: Any
) -> tuple[np.ndarray, Result, MeteredGrid]:
    """Run in process; return the final model as one vector, Flower's result and the metered grid."""
    with InProcessGrid(client or app(), nodes, **{"seed": 3, **engine}) as grid:
        metered = MeteredGrid(grid, TrafficLedger())
        result = fit(chosen, metered, initial or model(), rounds, timeout=9.0)
    return flat(result.arrays), result, metered


def flat(arrays: Any) -> np.ndarray:
    """Return the toy model as one vector."""
    return np.concatenate([arrays[name].numpy().reshape(-1) for name in ("weight", "bias")])


def learnt(server_round: int, partition: int) -> np.ndarray:
    """Return what the toy client learns in a round, as one vector."""
    return np.concatenate(
        [update(server_round, partition, (40, 30), 0).reshape(-1), update(server_round, partition, (12,), 1)]
    )


def ballots(server_round: int, partitions: Any = range(NODES), *, seed: int = 7, **options: Any) -> np.ndarray:
    """Return the votes of the toy clients from the definition, shape (clients, SIZE)."""
    k = options.pop("k", BALLOT.k)
    keys = (Key(seed, "uplink", server_round, partition) for partition in partitions)
    rows = [
        topk_stochastic_sign(learnt(server_round, p), k, uniforms=key, **options)
        for p, key in zip(partitions, keys, strict=True)
    ]
    return np.array(rows)
