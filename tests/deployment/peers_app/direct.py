"""Decentralised trainings one after the other on one deployment, and what each left in models, ledger and reports."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedcomp.clients.client import client as around
from fedcomp.clients.gossip import GossipSetup, gossip_node
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key
from fedcomp.strategies.gossip.strategy import GossipRelay

NODES = 3


class Pull:
    """Every node pulls towards its own number."""

    def __init__(self, partition: int) -> None:
        self.partition = partition

    def gradient(self, arrays: Mapping[str, np.ndarray], key: Key) -> dict[str, np.ndarray]:
        return {name: array - np.float32(self.partition) for name, array in arrays.items()}

    def buffers_after(self) -> dict[str, np.ndarray]:
        return {}

    def evaluate(self, arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {"first": float(arrays["weight"].flat[0])}


def pull(message: Message, context: Context, setup: GossipSetup) -> Pull:
    return Pull(int(context.node_config["partition-id"]))


client = around(ClientApp(), gossip_node(pull))
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    while len(list(grid.get_node_ids())) < NODES:
        time.sleep(0.05)
    found = {}
    for name, transport, graph, nodes, columns in json.loads(str(context.run_config["runs"])):
        # No folders of this machine: nodes here have addresses, or are reached through the server.
        options = {"transport": "peers", "spool": ""} if transport == "peers" else {}
        relay = GossipRelay(
            {"name": "choco", "lr": 0.1, "gamma": 0.4}, graph, nodes=nodes, dense_below=0, observe_every=1, **options
        )
        metered = MeteredGrid(grid)
        start = ArrayRecord({"weight": Array(np.random.default_rng(0).standard_normal((20, columns)).astype("f4"))})
        models: list[str] = []

        def after(server_round: int, arrays: ArrayRecord, outcome: object, models: list[str] = models) -> None:
            models.append(hashlib.sha256(arrays["weight"].numpy().tobytes()).hexdigest())

        fit(relay, metered, start, int(context.run_config["rounds"]), timeout=120.0, on_round=after)
        sections = relay.reports.sections("gossip")
        found[name] = {
            "models": models,
            "mailbox": [[n for n in relay.reports[r].notes if n.startswith("link ")] for r in sections],
            "events": sorted({kind for section in sections.values() for kind in section.events}),
            "edge": [section.traffic["edge"] for section in sections.values()],
            "messages": [section.traffic["edge.messages"] for section in sections.values()],
            "hub": metered.ledger.total("wire", round=2, message_type="train", link="hub"),
            "peer": metered.ledger.total("wire", link="peer"),
        }
    out = Path(str(context.run_config["out"]))
    (out / "found.partial").write_text(json.dumps(found))
    (out / "found.partial").rename(out / "found.json")
