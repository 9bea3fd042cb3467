"""A small graph that several owners share, over messages: clients with their own rows only, and the server around them.

The model is a network of two graph convolutions in float64, so that a run can be compared with training on one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy
from graph_toys import CLASSES, cut, toy_adjacency, toy_features, toy_owner
from numpy.typing import NDArray
from toy import with_halves

from fedcomp.clients.compressed import compression
from fedcomp.clients.gcn import Learner, graph_owner
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import models, round_of
from fedcomp.flower.rounds import RoundOutcome, fit
from fedcomp.graphs.base import GraphPart
from fedcomp.graphs.plan import plan_round
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.rng import Key
from fedcomp.strategies.gcn.report import Fetching
from fedcomp.strategies.gcn.strategy import RoundSettings, RowSettings, SkewedGCN

NODES, PARTS, DEGREE, FEATURES, HIDDEN, SEED, LR = 48, 4, 5.0, 6, 5, 3, 0.3

ENOUGH = NODES
"""Columns per layer with which nothing is sampled."""

Named = dict[str, NDArray[Any]]


def graph(parts: int = PARTS, structure: str = "full", **options: Any) -> list[GraphPart]:
    """Return the parts of the toy graph."""
    size = {"nodes": NODES, "degree": DEGREE, "seed": SEED, **options}
    adjacency = toy_adjacency(size["nodes"], parts, size["degree"], size["seed"])
    features = toy_features(size["nodes"], FEATURES, size["seed"])
    owner = toy_owner(size["nodes"], parts)
    return cut(adjacency, owner, features, structure=structure, seed=size["seed"])


def network(values: Mapping[str, NDArray[Any]]) -> Any:
    """Return the network with these values; draws nothing."""
    import torch

    from fedcomp.graphs.layers import GraphConvolutions

    with torch.device("meta"):
        made = GraphConvolutions(FEATURES, HIDDEN, CLASSES)
    made.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in values.items()}, assign=True)
    return made.requires_grad_()


def learner(message: Message, context: Context) -> Learner:
    """Return what :func:`fedcomp.clients.gcn.graph_owner` wants: the message's model, and plain SGD."""
    from torch.nn.functional import cross_entropy

    ((name, record),) = models(message.content).items()
    made = network({key: array.numpy() for key, array in record.items()})
    return Learner(name, made, cross_entropy, lambda outputs, labels: outputs.argmax(1) == labels, {"lr": LR})


def client(parts: Sequence[GraphPart]) -> ClientApp:
    """Return the app of all nodes; each looks at the part of its own partition."""

    def part_of(message: Message, context: Context) -> GraphPart:
        return parts[int(context.node_config["partition-id"])]

    return with_halves([graph_owner(part_of, learner), compression()])


def initial() -> Named:
    """Return the model every run begins with, float64."""
    shapes = {
        "layers.0.weight": (HIDDEN, FEATURES),
        "layers.0.bias": (HIDDEN,),
        "layers.1.weight": (CLASSES, HIDDEN),
        "layers.1.bias": (CLASSES,),
    }
    return {
        name: (Key(1, f"toy/{name}").uniform(int(np.prod(shape))).reshape(shape) - 0.5)
        for name, shape in shapes.items()
    }


def record(named: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in named.items()})


def averaging(evaluate: bool = False, **options: Any) -> FedAvg:
    """Return a FedAvg that asks everybody, however many there are."""
    least = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
    return FedAvg(**{"fraction_evaluate": float(evaluate), **least, **options})


def strategy(inner: Strategy | None = None, **options: Any) -> SkewedGCN:
    """Return a strategy; ``options`` are settings of the sampler, of rows and of a round, and the strategy's own."""
    usual = {"n": 12, "batch_size": 6, "codec": "dense-f64", "timeout": 5.0, "seed": SEED}
    return made(averaging() if inner is None else inner, **{**usual, **options})


def made(inner: Strategy, **options: Any) -> SkewedGCN:
    """Return a strategy whose settings are given by name alone."""
    kinds = (SamplerSettings, RowSettings, RoundSettings)
    sampler, rows, rounds = (
        kind(**{f.name: options.pop(f.name) for f in fields(kind) if f.name in options}) for kind in kinds
    )
    return SkewedGCN(inner, sampler, rows=rows, rounds=rounds, **options)


def gradients_on_one_machine(model: Mapping[str, NDArray[Any]], number: int, batch_size: int) -> Named:
    """Return the gradient on the union of the clients' batches of a round, with all neighbours, on one machine."""
    import torch
    from torch.nn.functional import cross_entropy

    from fedcomp.graphs.layers import whole

    parts, everything = graph(), SamplerSettings(sampler="full")
    labels = np.zeros(NODES, np.int64)
    for part in parts:
        labels[part.ids] = part.labels
    plans = [plan_round(part, everything, seed=SEED, round=number, steps=1, batch_size=batch_size) for part in parts]
    batch = torch.from_numpy(np.concatenate([plan.batch for (plan,) in plans]))
    made, features = network(model), torch.from_numpy(toy_features(NODES, FEATURES, SEED))
    outputs = made(features, whole(toy_adjacency(NODES, PARTS, DEGREE, SEED), 2, torch.float64))
    loss = cross_entropy(outputs[batch], torch.from_numpy(labels)[batch])
    found = torch.autograd.grad(loss, list(made.parameters()))
    return {name: slope.numpy() for (name, _), slope in zip(made.named_parameters(), found, strict=True)}


def grid(parts: Sequence[GraphPart], app: Callable | None = None, nodes: int = 0, **options: Any) -> MeteredGrid:
    made = InProcessGrid(app or client(parts), nodes or len(parts), **{"seed": 2, **options})
    return MeteredGrid(made)


def run(
    of: SkewedGCN,
    over: MeteredGrid,
    rounds: int,
    *,
    first: int = 1,
    start: Mapping[str, NDArray[Any]] | ArrayRecord | None = None,
    on_round: Callable[[int, ArrayRecord, RoundOutcome], None] | None = None,
) -> Named:
    """Run rounds up to number ``rounds``; return the model."""
    begin = start if isinstance(start, ArrayRecord) else record(initial() if start is None else start)
    config = {"train_config": ConfigRecord({"seed": SEED}), "evaluate_config": ConfigRecord({"seed": SEED})}
    result = fit(of, over, begin, rounds, start_round=first, timeout=60.0, on_round=on_round, **config)
    return {name: array.numpy() for name, array in result.arrays.items()}


def reports(of: SkewedGCN) -> list[Fetching]:
    return [of.reports[number].gcn for number in sorted(of.reports)]


def total(of: SkewedGCN, name: str, purpose: str = "train") -> Any:
    return sum(getattr(getattr(report, purpose), name) for report in reports(of))


def bits(named: Mapping[str, NDArray[Any]]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in named.items()}


class Meddler:
    """An app whose handlers are interfered with: ``before`` sees message and context, ``after`` may change the reply.

    Both are by round (0 is every round), partition and type of message.
    """

    def __init__(self, app: Callable) -> None:
        self.app = app
        self.before: dict[tuple[int, int, str], Callable[[Message, Context], None]] = {}
        self.after: dict[tuple[int, int, str], Callable[[Message, Message], None]] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        partition, kind = int(context.node_config["partition-id"]), message.metadata.message_type
        places = [(number, partition, kind) for number in (0, round_of(message))]
        for place in places:
            if place in self.before:
                self.before[place](message, context)
        reply = self.app(message, context)
        for place in places:
            if place in self.after:
                self.after[place](message, reply)
        return reply
