"""Both halves: the server sends empty messages, one at a time, and the nodes reply."""

import time
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

client = ClientApp()
server = ServerApp()


@client.query("plain")
def plain(msg: Message, context: Context) -> Message:
    """Answer."""
    return Message(RecordDict(), reply_to=msg)


@client.query("torch")
def with_torch(msg: Message, context: Context) -> Message:
    """Import what every training does, and answer."""
    import torch  # noqa: F401

    return Message(RecordDict(), reply_to=msg)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Send all messages of one kind, then those of the next; note each when all nodes have answered."""
    config = context.run_config
    while len(nodes := list(grid.get_node_ids())) < int(config["nodes"]):
        time.sleep(0.2)
    with Path(str(config["file"])).open("w", encoding="utf-8") as file:
        for kind in str(config["kinds"]).split(","):
            for number in range(int(config["messages"])):
                asked = [Message(RecordDict(), node, f"query.{kind}") for node in nodes]
                replies = list(grid.send_and_receive(asked, timeout=120))
                if len(replies) < len(nodes) or any(reply.has_error() for reply in replies):
                    raise RuntimeError(f"message {number} of {kind} was not answered by all nodes")
                # The processes of the messages end a moment after their replies.
                time.sleep(1.0)
                file.write(f"{kind} {number}\n")
                file.flush()
                # Whoever watches has to look before the next message costs anything.
                time.sleep(1.0)
