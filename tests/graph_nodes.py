"""Clients of a graph run on toy parts: an app, its messages, and a whole turn by hand, without a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from graph_toys import CLASSES
from torch import nn
from toy import with_halves

from fedcomp.clients.gcn import Learner, graph_owner
from fedcomp.flower import gcn
from fedcomp.flower.gcn import Fetch, GraphSetup, Needs, PlanRequest, put_frames, take_frames
from fedcomp.flower.payload import models
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.graphs.base import GraphPart
from fedcomp.graphs.layers import GraphConvolutions
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.tasks.arrays import load_arrays
from fedcomp.tasks.arrays import to_arrays as arrays_of
from fedcomp.tasks.models import build

HIDDEN, SEED = 5, 3
FULL = SamplerSettings(sampler="full")


def network(part: GraphPart, *, layers: int = 2, dropout: float = 0.0, seed: int = 1) -> GraphConvolutions:
    """Return a network for the part's features, in their dtype."""
    made = build(lambda: GraphConvolutions(part.features.shape[1], HIDDEN, CLASSES, layers, dropout), seed)
    assert isinstance(made, GraphConvolutions)
    return made.to(torch.float64 if part.features.dtype == np.float64 else torch.float32)


def initial(parts: Sequence[GraphPart], **options: Any) -> ArrayRecord:
    """Return the values of :func:`network` as the server's model."""
    return to_record(arrays_of(network(parts[0], **options)))


def teaches(parts: Sequence[GraphPart], **options: Any) -> Callable[[Message, Context], Learner]:
    """Return what gives a client its learner; rates come from the message's ``config``, ``lr`` is 0.1 without one."""

    def learner(msg: Message, context: Context) -> Learner:
        model = network(parts[0], **options)
        ((name, record),) = models(msg.content).items()
        load_arrays(model, to_arrays(record), cast=True)
        sent = dict(msg.content.config_records.get("config", {}))
        rates = {"lr": 0.1, **{key: sent[key] for key in ("lr", "momentum", "weight_decay") if key in sent}}
        return Learner(name, model, nn.functional.cross_entropy, lambda z, y: z.argmax(1) == y, rates)

    return learner


def client(parts: Sequence[GraphPart], halves: Sequence[Any] = (), **options: Any) -> ClientApp:
    """Return an app whose node i owns ``parts[i]``."""

    def part_of(msg: Message, context: Context) -> GraphPart:
        return parts[int(context.node_config["partition-id"])]

    return with_halves([*halves, graph_owner(part_of, teaches(parts, **options))])


def node(index: int, parts: int = 4, **config: Any) -> Context:
    """Return the context of a node."""
    return Context(1, 100 + index, {"partition-id": index, "num-partitions": parts, **config}, RecordDict(), {})


def asking(settings: SamplerSettings | None = None, **changes: Any) -> PlanRequest:
    """Return a question about one training step in round 1."""
    usual = PlanRequest(
        "s", SEED, 1, "train", 1, 0, json.dumps((settings or SamplerSettings()).to_config()), "dense-f64"
    )
    return replace(usual, **changes)


def message(kind: str, said: Any, frames: Mapping[str, Mapping[int, bytes]] | None = None, **records: Any) -> Message:
    """Return a message of type ``kind`` with frames by kind and place."""
    content = RecordDict({"config": ConfigRecord({"server-round": 1}), **records})
    said.put(content)
    for name, by_place in (frames or {}).items():
        put_frames(content, name, by_place)
    return Message(content, 2, kind)


@dataclass
class Nodes:
    """Some owners, asked one after the other without a server.

    Attributes
    ----------
    parts : list of GraphPart
    app : ClientApp
    contexts : list of Context
    config : dict
        Added to the ``config`` of every message.
    log : list of (str, int, Message, Message)
        Message type, node, message and reply, in order.
    """

    parts: Sequence[GraphPart]
    app: Any = None
    contexts: list[Context] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    log: list[tuple[str, int, Message, Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.app = self.app or client(self.parts)
        self.contexts = [node(part.index, len(self.parts)) for part in self.parts]

    def tell(self, index: int, msg: Message) -> Message:
        """Give a node a message; return its reply."""
        if self.config:
            msg.content["config"] = ConfigRecord({**dict(msg.content["config"]), **self.config})
        reply = self.app(msg, self.contexts[index])
        self.log.append((msg.metadata.message_type, index, msg, reply))
        return reply

    def hello(self, index: int, **changes: Any) -> Message:
        return self.tell(index, message(gcn.SETUP_TYPE, GraphSetup("s", "hello", **changes)))

    def norms(self, index: int, layers: int = 2) -> dict[int, bytes]:
        """Return the frames of norms that a node's hello asks for, by owner."""
        asked = take_frames(self.hello(index, norms=True, layers=layers), len(self.parts), gcn.IDS)[gcn.IDS]
        found = {}
        for owner, ids in asked.items():
            reply = self.tell(owner, message(gcn.SETUP_TYPE, GraphSetup("s", "norms"), {gcn.IDS: {index: ids}}))
            found[owner] = take_frames(reply, len(self.parts), gcn.NORMS)[gcn.NORMS][index]
        return found

    def plan(
        self, index: int, ask: PlanRequest, norms: Mapping[int, bytes] | None = None
    ) -> tuple[PlanRequest, dict[int, bytes], Message]:
        """Let a node plan, with all the rows of the adjacency it needs on the way.

        Returns
        -------
        PlanRequest
            What training has to say.
        dict of int to bytes
            Frames of the ids it wants, by owner.
        Message
            Its last reply.
        """
        frames: dict[str, Mapping[int, bytes]] = {gcn.NORMS: norms or {}}
        while True:
            reply = self.tell(index, message(gcn.PLAN_TYPE, ask, frames))
            wants = take_frames(reply, len(self.parts), gcn.IDS)[gcn.IDS]
            if Needs.take(reply).needs == gcn.FEATURES:
                return ask, wants, reply
            said = Fetch(ask.session, gcn.STRUCTURE, norms=bool(norms))
            frames = {gcn.STRUCTURE: self.fetch(index, wants, said)}
            ask = replace(ask, hop=ask.hop + 1)

    def fetch(self, index: int, wants: Mapping[int, bytes], said: Fetch) -> dict[int, bytes]:
        """Return the frames of rows that owners send for a node, by owner."""
        found = {}
        for owner, ids in wants.items():
            reply = self.tell(owner, message(gcn.ROWS_TYPE, said, {gcn.IDS: {index: ids}}))
            found[owner] = take_frames(reply, len(self.parts), said.kind)[said.kind][index]
        return found

    def rows(self, index: int, ask: PlanRequest, wants: Mapping[int, bytes]) -> dict[int, bytes]:
        return self.fetch(index, wants, Fetch(ask.session, gcn.FEATURES, ask.row_codec, ask.noise))

    def carry_out(
        self, index: int, ask: PlanRequest, rows: Mapping[int, bytes], model: ArrayRecord | None = None, **config: Any
    ) -> Message:
        """Let a node train or evaluate, as its question says, with rows at hand."""
        kind = gcn.TRAIN_TYPE if ask.purpose == "train" else gcn.EVALUATE_TYPE
        record = ConfigRecord({"server-round": ask.round, **config})
        arrays = initial(self.parts) if model is None else model
        return self.tell(index, message(kind, ask, {gcn.FEATURES: rows}, arrays=arrays, config=record))

    def turn(self, index: int, ask: PlanRequest, model: ArrayRecord | None = None, **config: Any) -> Message:
        """Let a node plan, fetch, and do what it is asked; return its last reply."""
        ask, wants, _ = self.plan(index, ask)
        return self.carry_out(index, ask, self.rows(index, ask, wants), model, **config)


def ready(nodes: Nodes, index: int, ask: PlanRequest) -> tuple[PlanRequest, dict[int, bytes]]:
    """Let a node plan and fetch; return what a training message has to bring."""
    ask, wants, _ = nodes.plan(index, ask)
    return ask, nodes.rows(index, ask, wants)


def values(reply: Message) -> dict[str, np.ndarray]:
    """Return the model of a training reply."""
    return to_arrays(reply.content["arrays"])
