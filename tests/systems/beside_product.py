"""A program on the driver in memory, and the strategy of today over Flower's messages: the same rounds, compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from toy import SHAPES, client_app, fingerprint, update

from fedcomp import versions
from fedcomp.clients.memory import MEMORY
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import FRAME, frames
from fedcomp.flower.rounds import drive
from fedcomp.flower.wrapper import GridWrapper
from fedcomp.layout import DensityPolicy, Layout, Vector
from fedcomp.local import Local
from fedcomp.program import HELLO, System
from fedcomp.rng import Key
from fedcomp.strategies.cohort import CohortSettings

Fault = Callable[[int, int, str], str]
"""``fault(round, partition, kind of message)``: a fault of :class:`fedcomp.local.Local`, or ""."""


class Toy:
    """A model of zeros, the toy app's updates of it, and its weights."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], policy: DensityPolicy | None = None) -> None:
        self.shapes = shapes
        self.start = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self.layout = Layout.of(self.start, policy)

    def made(self, number: int, node: int) -> Vector:
        """Return the update of a node in a round."""
        return self.layout.flatten({k: update(number, node, s, i) for i, (k, s) in enumerate(self.shapes.items())})

    def local(self, system: System, nodes: int = 4, **options: Any) -> Local:
        """Return the driver in memory."""
        return Local(
            system,
            self.layout,
            self.layout.flatten(self.start),
            lambda number, node, start: start + self.made(number, node),
            lambda node: 10.0 * (node + 1),
            nodes,
            **options,
        )


TOY = Toy(SHAPES)
LAYOUT = TOY.layout

WORDS = {"twice": "duplicate", "silent": "silent", "lost": "lost_reply", "crash": "raise", "": None}


@dataclass(frozen=True)
class Seen:
    """What is compared of one round.

    Attributes
    ----------
    frames : dict of (int, str) to bytes
        What reached the server, by node and name.
    down : list of bytes
        The step, where there is one.
    memories : dict of int to dict
        By node: all arrays.
    metrics : dict of str to float
        Of the training.
    """

    model: bytes
    frames: dict[tuple[int, str], bytes]
    down: list[bytes]
    memories: dict[int, dict[str, bytes]]
    metrics: dict[str, Any]


class _Heard(GridWrapper):
    """Keeps the frames in replies, by partition and name, and of which models clients say that they have them."""

    def __init__(self, inner: Any, partitions: Mapping[int, int]) -> None:
        super().__init__(inner)
        self.partitions = partitions
        self.frames: dict[tuple[int, str], bytes] = {}
        self.models: set[float] = set()

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for reply in replies:
            metrics = {} if reply.has_error() else reply.content.metric_records.get("metrics", {})
            self.models |= {metrics["seen"]} if "seen" in metrics else set()
            for key, frame in {} if reply.has_error() else frames(reply.content).items():
                if key.startswith(FRAME):
                    node = self.partitions[reply.metadata.src_node_id]
                    self.frames[node, key.removeprefix(FRAME)] = bytes(frame)
        return replies


def _bytes(arrays: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


def product(
    strategy: Any,
    half: Any,
    nodes: int,
    rounds: int,
    *,
    fault: Fault,
    present: Sequence[Sequence[int]],
    toy: Toy = TOY,
) -> list[Seen]:
    """Run a strategy; ``present`` says who takes part in each round. Clients train and evaluate on its own models."""

    def plan(delivery: Delivery) -> Any:
        if delivery.message_type == HELLO and strategy.system.KEYS:
            # Public keys are asked for beside the program.
            return None
        kind = delivery.message_type.partition(".")[0]
        return WORDS[fault(delivery.round, delivery.partition, kind)]

    grid = InProcessGrid(client_app([half]), nodes, seed=4, fault=plan)
    node_of = {p: grid.node_id_of(p) for p in range(nodes)}
    heard, found = _Heard(grid, {node: p for p, node in node_of.items()}), []
    arrays = ArrayRecord({name: Array(array) for name, array in toy.start.items()})
    down: list[bytes] = []
    push = versions.Broadcast.push

    def pushed(self: versions.Broadcast, frame: bytes, *args: Any) -> int:
        down.append(bytes(frame))
        return push(self, frame, *args)

    # Which partition a node holds is known from the first round on.
    strategy.roster.declared |= {node: p for p, node in node_of.items()}
    for number in range(1, rounds + 1):
        taking = [node_of[p] for p in present[number - 1]]
        heard.frames, heard.models, grid.round = {}, {fingerprint(arrays)}, number
        down.clear()
        drawn = mock.patch.object(CohortSettings, "draw", lambda self, *args, taking=taking: list(taking))
        with drawn, mock.patch.object(versions.Broadcast, "push", pushed):
            new, metrics = drive(strategy.round(number, arrays, ConfigRecord(), heard), heard, timeout=9)
        assert heard.models == {fingerprint(arrays)}
        arrays = arrays if new is None else new
        memories = {}
        for p, node in node_of.items():
            state = grid.context(node).state.array_records
            if MEMORY in state:
                memories[p] = _bytes({k: a.numpy() for k, a in state[MEMORY].items()})
        vector = toy.layout.flatten({name: array.numpy() for name, array in arrays.items()})
        found.append(Seen(vector.tobytes(), heard.frames, [*down], memories, dict(metrics or {})))
        heard.models = {fingerprint(arrays)}
        with drawn:
            drive(strategy.evaluate_round(number, arrays, ConfigRecord(), heard), heard, timeout=9)
        assert heard.models == {fingerprint(arrays)}
    return found


def program(
    system: System,
    nodes: int,
    rounds: int,
    *,
    fault: Fault,
    present: Sequence[Sequence[int]],
    toy: Toy = TOY,
    kinds: tuple[str, str] = ("train", "query"),
) -> tuple[list[Seen], Local]:
    """Run a program among the same clients; ``kinds`` are those of the first exchange of a round and of the others."""
    local = toy.local(
        system,
        nodes,
        fault=lambda number, node, exchange: fault(number, node, kinds[exchange > 1]),
    )
    found = []
    for number in range(1, rounds + 1):
        step = local.step(number, present[number - 1])
        memories = {node: _bytes(client.memory) for node, client in local.clients.items()}
        frames = {(answer.node, name): bytes(f) for answer in local.answers for name, f in answer.frames.items()}
        down = [] if step is None or step.frame is None else [bytes(step.frame)]
        metrics = {} if step is None else dict(step.metrics)
        found.append(Seen(local.model.tobytes(), frames, down, memories, metrics))
    return found, local


def no_fault(number: int, node: int, kind: str) -> str:
    """Return the fault of rounds without faults."""
    return ""


def faults(probability: float) -> Fault:
    """Return losses, silences, crashes and doubles, each kind of message on its own."""

    def fault(number: int, node: int, kind: str) -> str:
        drawn = Key(3, "faults/" + kind, number, node).uniform(1)[0] / max(probability, 1e-9)
        return (
            "lost"
            if drawn < 1.0
            else "silent"
            if drawn < 1.6
            else "crash"
            if drawn < 2.0
            else "twice"
            if drawn < 2.4
            else ""
        )

    return fault


def everybody(nodes: int, rounds: int) -> list[list[int]]:
    """Return who takes part where all do."""
    return [list(range(nodes))] * rounds


def some(nodes: int, rounds: int) -> list[list[int]]:
    """Return who takes part where everybody is away now and then."""
    there = [[p for p in range(nodes) if Key(5, "there", r, p).uniform(1)[0] < 0.7] for r in range(1, rounds + 1)]
    return [found or [0] for found in there]


def assert_equal(old: Sequence[Seen], new: Sequence[Seen]) -> None:
    """Require equal bytes of models, values and memories after every round."""
    assert len(old) == len(new)
    for number, (was, now) in enumerate(zip(old, new, strict=True), 1):
        # Those that the strategy was asked for; a program may name others.
        named = {name for seen in old for _, name in seen.frames}
        assert {at: f for at, f in now.frames.items() if at[1] in named} == was.frames, f"frames of round {number}"
        assert now.down == was.down, f"step of round {number}"
        assert now.model == was.model, f"model of round {number}"
        assert {name: was.metrics.get(name) for name in now.metrics} == now.metrics, f"metrics of round {number}"
        for node, memory in was.memories.items():
            assert now.memories[node] == memory, f"memory of node {node} after round {number}"
