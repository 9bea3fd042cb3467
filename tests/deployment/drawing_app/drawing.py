"""Nodes that draw from every global random generator in each message, and a server that writes down what."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

MESSAGES = 3

client = ClientApp()
server = ServerApp()


@client.query("draw")
def draw(msg: Message, context: Context) -> Message:
    """Answer with a draw of each; torch is imported in the handler, as most apps do."""
    import torch

    drawn = {
        "python": random.random(),
        "numpy": float(np.random.random()),  # noqa: NPY002 (the global generator is what is tried)
        "torch": torch.rand(2, dtype=torch.float64).tolist(),
        "noise": torch.normal(0.0, 1.0, (2,)).tolist(),
    }
    return Message(RecordDict({"drawn": ConfigRecord({"json": json.dumps(drawn)})}), reply_to=msg)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Send the messages one after the other, each when the one before it was answered."""
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    lines = []
    for _ in range(MESSAGES):
        (reply,) = grid.send_and_receive([Message(RecordDict(), nodes[0], "query.draw")], timeout=120)
        lines.append(str(reply.content["drawn"]["json"]))
    Path(str(context.run_config["file"])).write_text("\n".join(lines), encoding="utf-8")
