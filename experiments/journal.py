"""A perceptron on digits whose clients log every update, with a server that can be killed at any time.

A client appends a line to its journal before anything of its update is kept or sent: inner products of the update and
of its frame with fixed random vectors (:func:`fedcomp.experiments.chaos.projected`). The server keeps, in one file and
with the model, whose updates are in it. What is in a model that a killed server did not keep is in no list either.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from fedcomp.clients.client import client as wrapped
from fedcomp.clients.edge.node_config import DATA_PATH
from fedcomp.clients.half import CallNext, ClientHalf
from fedcomp.clients.memory import owed
from fedcomp.clients.messages import partition_of
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.topk import TopK
from fedcomp.experiments.chaos import PROJECTIONS, projected
from fedcomp.experiments.slow import begin, descended, examples
from fedcomp.flower import checkpoint
from fedcomp.flower.asks import data_in, find_answer, find_ask
from fedcomp.flower.folder import StateFolder
from fedcomp.flower.metered import MeteredGrid, addressed
from fedcomp.flower.payload import FRAME
from fedcomp.flower.records import to_arrays
from fedcomp.flower.rounds import RoundOutcome, fit
from fedcomp.flower.wrapper import Enough
from fedcomp.layout import Layout, policy_from_config
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.roster import Peer
from fedcomp.systems import get_system
from fedcomp.systems.pair import Pair
from fedcomp.tasks.partition import iid

APP: Final = Path(__file__).resolve().parent / "journal_app"
"""The Flower app that is bundled for the nodes: a few lines."""

HIDDEN: Final = 16
DENSITY: Final = 0.05
RATE: Final = 0.1
STEPS: Final = 2

CHECKPOINT, ROUNDS = "checkpoint", "rounds.jsonl"
"""What the server app writes: the last of its rounds that is whole, and a line for each as it ends."""

JOURNAL: Final = "journal.jsonl"
"""What a client writes, in the folder that its node names as its data."""

_trained: ContextVar[dict[str, NDArray[Any]] | None] = ContextVar("journal-trained", default=None)
"""Where the handler puts the model it has trained; the half around it makes the update of it."""

server = ServerApp()


def _journal(msg: Message, context: Context, call_next: CallNext) -> Message:
    """Write the journal, around compression."""
    head = find_ask(msg.content)
    if head is None:
        return call_next(msg, context)
    system, before = get_system(head.system), to_arrays(msg.content.array_records[head.model])
    assert isinstance(system, Pair)
    layout = Layout.of(before, policy_from_config(head.policy), cast_floats=head.cast)
    pause = float(str(msg.content.config_records["config"]["pause"]))
    trained: dict[str, NDArray[Any]] = {}
    token = _trained.set(trained)
    try:
        reply = call_next(msg, context)
    finally:
        _trained.reset(token)
    frame = None if reply.has_error() else data_in(reply.content, FRAME).get(system.SENT)
    answer = None if reply.has_error() else find_answer(reply.content)
    if frame is None or answer is None:
        return reply
    seed, partition = head.seed, partition_of(context)
    # A stored reply that is sent again, be it under another number, has no update of its own.
    update = layout.flatten(trained) - layout.flatten(before) if trained else np.zeros(layout.size, np.float32)
    held = owed(context.state, system, layout, (answer.generation, answer.sequence))
    line = {
        "node": partition,
        "sequence": answer.sequence,
        "update": projected(update, seed),
        "frame": projected(system.codec.decode(frame, layout), seed),
        # Beside the frame.
        "memory": projected(held, seed),
        "at": time.time(),
    }
    # At once and flushed: a line that is cut off belongs to an update of which nothing was kept or sent.
    with Path(str(context.node_config[DATA_PATH]), JOURNAL).open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")
        os.fsync(file.fileno())
    time.sleep(pause)
    return reply


_app = ClientApp()


@_app.train()
def train(msg: Message, context: Context) -> Message:
    """Take a few steps of gradient descent on this node's part of the digits."""
    (name, record), config = next(iter(msg.content.array_records.items())), msg.content.config_records["config"]
    seed, nodes, number = (int(str(config[key])) for key in ("seed", "nodes", "server-round"))
    partition = partition_of(context)
    mine = np.flatnonzero(iid(len(examples(False)[0][1]), nodes, Key(seed, "journal/split")) == partition)
    found = descended(record, mine, RATE, STEPS, Key(seed, "journal/batch", number, partition))
    trained = _trained.get()
    if trained is not None:
        trained |= found
    arrays = ArrayRecord({each: Array(value) for each, value in found.items()})
    # All weigh the same, so that the mean of a round follows from who is in it.
    return Message(RecordDict({name: arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)


client = wrapped(_app, ClientHalf("journal", _journal, outside=("compression",)), only=["compression"])


class Timely(FedAvg):
    """Federated averaging whose messages are not delivered any more when nobody waits for their replies.

    Otherwise a node that was away, or is slower than a round, finds the messages of all rounds since then, answers
    one after the other, and each of them late.
    """

    def __init__(self, deadline: float) -> None:
        super().__init__(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
        self.deadline = deadline

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the messages of the round end with it."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            message.metadata.ttl = self.deadline
        return messages


class Patient(MeteredGrid):
    """A grid that waits for the nodes that answered last time: a dead one costs one deadline, not all of them.

    The others are asked as well, and used when they are back; where none answered, all are waited for.
    """

    def __init__(self, inner: Grid, silent: Callable[[], Collection[int]]) -> None:
        super().__init__(inner)
        self._silent = silent

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None, enough: Enough | None = None
    ) -> list[Message]:
        """Send messages and return the replies, at most one for each."""
        batch = list(messages)
        awaited = {message.metadata.dst_node_id for message in batch} - set(self._silent())

        def there(replies: Sequence[Message]) -> bool:
            # Only now do the messages have their ids.
            asked = dict(addressed(batch))
            return awaited <= {asked.get(reply.metadata.reply_to_message_id) for reply in replies}

        return super().send_and_receive(batch, timeout=timeout, enough=there if awaited else enough)


def strategy(seed: int, deadline: float = 3600.0) -> Compressed:
    """Return a new strategy."""
    return Compressed(Timely(deadline), ErrorFeedback(TopK(density=DENSITY)), seed=seed)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds that the run configuration asks for, from where an app before this one was killed."""
    asked = json.loads(Path(str(context.run_config["asked"])).read_text(encoding="utf-8"))
    # Whoever is late for the first round is late for it in every run; later ones take whom they find.
    while not Path(asked["out"], CHECKPOINT).exists() and len(list(grid.get_node_ids())) < asked["nodes"]:
        time.sleep(0.2)
    serve(grid, asked, strategy(asked["seed"], asked["deadline"]))


def serve(grid: Grid, asked: dict[str, Any], ours: Compressed) -> None:
    """Run the rounds that are not in the checkpoint yet, with a strategy that is new.

    Parameters
    ----------
    asked : dict
        ``seed``, ``nodes``, ``rounds``; ``deadline``: seconds that a round waits for replies; ``pause``: seconds
        between a client's line in its journal and what follows it, in which a fault may find it; ``out``: absolute path
        of the folder for :data:`CHECKPOINT` and :data:`ROUNDS`.
    """
    out, kept = Path(asked["out"]), Path(asked["out"], CHECKPOINT)
    metered = Patient(grid, lambda: ours.roster.silent)
    arrays, first, rounds, partitions = begin(asked["seed"], HIDDEN), 1, list[Any](), dict[str, Any]()
    if kept.exists():
        found = checkpoint.resume(kept, ours, metered)
        arrays, first = found.arrays, found.server_round + 1
        rounds, partitions = list(found.extra["rounds"]), dict(found.extra["partitions"])

    def note(number: int, model: ArrayRecord, outcome: RoundOutcome) -> None:
        rounds.append(ended_of(ours, number))
        # The strategy forgets those that are not online.
        partitions.update({str(node): partition for node, partition in ours.roster.claims.items()})
        # The model and what is in it, in one file: a kill leaves both, or both of the round before.
        extra = {"rounds": rounds, "partitions": partitions}
        checkpoint.save(kept, server_round=number, arrays=model, strategy=ours, extra=extra)
        with (out / ROUNDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(rounds[-1]) + "\n")

    fit(
        ours,
        metered,
        arrays,
        asked["rounds"],
        start_round=first,
        timeout=asked["deadline"],
        train_config=ConfigRecord({name: asked[name] for name in ("seed", "nodes", "pause")}),
        on_round=note,
    )


def ended_of(ours: Compressed, number: int) -> dict[str, Any]:
    """Return what a strategy knows of the round that has just ended, nodes by partition.

    Returns
    -------
    dict
        ``round`` and ``sequence``, its number and that of its messages; ``used``: whose updates are in the model;
        ``fresh``: who began with an empty memory; ``rolled_back``: who put back an update; ``refused``: reasons;
        ``at``: when it ended, in seconds since the epoch.
    """
    report, claims = ours.reports[number], ours.roster.claims
    used = [node for node, peer in ours.roster.peers.items() if peer.consumed == ours.sequence]
    lists = {"used": used, "fresh": report.fresh, "rolled_back": report.rolled_back}
    return {
        "round": number,
        "sequence": ours.sequence,
        **{name: sorted(claims[node] for node in nodes) for name, nodes in lists.items()},
        "refused": sorted(report.refused.values()),
        "at": time.time(),
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a journal or of :data:`ROUNDS`: what is cut off was not kept or sent."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Kept:
    """What the server's last checkpoint holds.

    Attributes
    ----------
    rounds : list of dict
        See :func:`ended_of`.
    moved : tuple of float
        Inner products of the model's change since its beginning.
    peers : dict of int to Peer
        By partition: which update was used last.
    """

    def __init__(self, out: Path, seed: int) -> None:
        found, self.ours, self.seed = checkpoint.load(out / CHECKPOINT), strategy(seed), seed
        found.apply(self.ours)
        before, after = to_arrays(begin(seed, HIDDEN)), to_arrays(found.arrays)
        self.layout = Layout.of(after, self.ours.policy, cast_floats=not self.ours.system.whole)
        self.rounds: list[dict[str, Any]] = list(found.extra["rounds"])
        self.moved = projected(self.layout.flatten(after) - self.layout.flatten(before), seed)
        partitions = {int(node): int(partition) for node, partition in found.extra["partitions"].items()}
        self.peers = {partitions[node]: peer for node, peer in self.ours.roster.peers.items() if node in partitions}

    def owed(self, folder: Path, partition: int) -> tuple[float, ...]:
        """Return inner products of what a state folder has for this server, once it hears what was used last."""
        kept = StateFolder(folder, partition)
        for path in kept.stamps():
            state, peer = kept.load(path), self.peers.get(partition, Peer())
            consumed = peer.generation, peer.consumed
            return projected(owed(state or RecordDict(), self.ours.system, self.layout, consumed), self.seed)
        return (0.0,) * PROJECTIONS
