"""A decentralised federation of four: both apps, and a server that waits for the test at the turning points."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedcomp.clients.client import client as around
from fedcomp.clients.gossip import gossip_node
from fedcomp.flower.gossip import GossipSetup
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import RoundOutcome, fit
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.run import Observer
from fedcomp.rng import Key
from fedcomp.strategies.gossip.strategy import GossipRelay

NODES, LAST = 4, 6
PAUSED_AFTER, KILLED_AFTER = 1, 3
"""Rounds after which node 3 is paused (it goes on after the next one), and killed."""


class Pull:
    """Every node pulls towards its own number."""

    def __init__(self, partition: int) -> None:
        self.partition = partition

    def gradient(self, arrays: Mapping[str, np.ndarray], key: Key) -> dict[str, np.ndarray]:
        return {name: array - np.float32(self.partition) for name, array in arrays.items()}

    def buffers_after(self) -> dict[str, np.ndarray]:
        return {}

    def evaluate(self, arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {"first": float(arrays["weight"].flat[0]), "partition": float(self.partition)}


def pull(message: Message, context: Context, setup: GossipSetup) -> Pull:
    return Pull(int(context.node_config["partition-id"]))


client = around(ClientApp(), gossip_node(pull))


def initial() -> ArrayRecord:
    return ArrayRecord({"weight": Array(np.zeros((20, 10), np.float32)), "bias": Array(np.zeros(10, np.float32))})


def relay(watch: Observer | bool = True) -> GossipRelay:
    algorithm = get_algorithm({"name": "sparse-push", "lr": 0.1, "density": 0.2, "gamma": 0.3})
    return GossipRelay(algorithm, "complete", nodes=NODES, skew_rounds=1, patience=3, observe_every=100, watch=watch)


class Told(MeteredGrid):
    """Does not wait for a node of which it knows that it cannot answer; no timeout would be right on every machine."""

    missing = False

    def send_and_receive(self, messages, *, timeout=None, enough=None):
        early = (lambda replies: len(replies) == NODES - 1) if self.missing else enough
        return super().send_and_receive(messages, timeout=timeout, enough=early)


def wait_for(path: Path, limit: float = 120.0) -> None:
    end = time.monotonic() + limit
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"nobody made {path}")
        time.sleep(0.05)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    folder = Path(str(context.run_config["out"]))
    metered = Told(grid)
    while len(list(metered.get_node_ids())) < NODES:
        time.sleep(0.05)
    weights: list[float] = []
    strategy = relay(lambda iteration, facts: weights.extend(facts[i]["weight"] for i in facts if i == NODES - 1))
    lost: list[float] = []

    def after(server_round: int, arrays: ArrayRecord, outcome: RoundOutcome) -> None:
        (folder / f"round-{server_round}").touch()
        if server_round in (PAUSED_AFTER, PAUSED_AFTER + 1, KILLED_AFTER):
            wait_for(folder / f"go-on-{server_round}")
        metered.missing = server_round in (PAUSED_AFTER, KILLED_AFTER)
        if server_round == KILLED_AFTER:
            lost.append(weights[-1])
            # The new process is another node to the SuperLink; the dead one is listed as online for a while.
            while len(list(metered.get_node_ids())) < NODES + 1:
                time.sleep(0.05)

    result = fit(strategy, metered, initial(), LAST, timeout=120.0, on_round=after)
    rounds = strategy.reports.sections("gossip")
    told = {str(r): {"events": g.events, "members": g.members, "traffic": g.traffic} for r, g in rounds.items()}
    facts = {
        "rounds": told,
        "figures": rounds[LAST].observed,
        "lost": lost,
        "repeated": repeated(strategy),
    }
    np.savez(folder / "arrays.npz", allow_pickle=False, **{name: a.numpy() for name, a in result.arrays.items()})
    (folder / "facts.partial").write_text(json.dumps(facts))
    (folder / "facts.partial").rename(folder / "facts.json")


def repeated(strategy: GossipRelay) -> int:
    return strategy.relay.report.repeated
