"""A program on the driver in memory, and the strategy of today over Flower's messages: the same rounds, compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord
from toy import client_app, model, update

from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import take_frame
from fedcomp.flower.protocol import UPDATE
from fedcomp.flower.rounds import drive
from fedcomp.flower.wrapper import GridWrapper
from fedcomp.layout import Layout, Vector
from fedcomp.local import Local
from fedcomp.program import System
from fedcomp.rng import Key

LAYOUT = Layout.of({name: array.numpy() for name, array in model().items()})

Fault = Callable[[int, int, str], str]
"""``fault(round, partition, kind of message)``: a fault of :class:`fedcomp.local.Local`, or ""."""

WORDS = {"silent": "silent", "lost": "lost_reply", "crash": "raise", "": None}


@dataclass(frozen=True)
class Seen:
    """What is compared of one round.

    Attributes
    ----------
    frames : list of bytes
        Values that reached the server, by node.
    memories : dict of int to dict
        By node: all arrays.
    """

    model: bytes
    frames: list[bytes]
    memories: dict[int, dict[str, bytes]]


class _Heard(GridWrapper):
    """Keeps the frames of values in replies."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.frames: dict[int, bytes] = {}

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for reply in replies:
            frame = None if reply.has_error() else take_frame(reply.content, UPDATE)
            if frame is not None:
                self.frames[reply.metadata.src_node_id] = bytes(frame)
        return replies


def _bytes(arrays: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


def product(
    strategy: Any, half: Any, nodes: int, rounds: int, *, fault: Fault, present: Sequence[Sequence[int]]
) -> list[Seen]:
    """Run a strategy; ``present`` says who takes part in each round."""

    def plan(delivery: Delivery) -> Any:
        kind = delivery.message_type.partition(".")[0]
        return WORDS[fault(delivery.round, delivery.partition, kind)]

    grid = InProcessGrid(client_app([half]), nodes, seed=4, fault=plan)
    heard, arrays, found = _Heard(grid), model(), []
    node_of = {p: grid.node_id_of(p) for p in range(nodes)}
    # Which partition a node holds is known from the first round on.
    strategy._partitions |= {node: p for p, node in node_of.items()}
    for number in range(1, rounds + 1):
        taking = [node_of[p] for p in present[number - 1]]
        heard.frames, grid.round = {}, number
        draw = type(strategy.cohort).draw
        try:
            type(strategy.cohort).draw = lambda self, *args, taking=taking: list(taking)
            new, _ = drive(strategy.round(number, arrays, ConfigRecord(), heard), heard, timeout=9)
        finally:
            type(strategy.cohort).draw = draw
        arrays = arrays if new is None else new
        memories = {}
        for p, node in node_of.items():
            state = grid.context(node).state.array_records
            if "fedcomp.uplink.memory" in state:
                memories[p] = _bytes({k: a.numpy() for k, a in state["fedcomp.uplink.memory"].items()})
        frames = [heard.frames[node_of[p]] for p in range(nodes) if node_of[p] in heard.frames]
        vector = LAYOUT.flatten({name: array.numpy() for name, array in arrays.items()})
        found.append(Seen(vector.tobytes(), frames, memories))
    return found


def program(
    system: System, nodes: int, rounds: int, *, fault: Fault, present: Sequence[Sequence[int]]
) -> tuple[list[Seen], Local]:
    """Run a program among the same clients."""
    kinds: dict[tuple[int, int], str] = {}

    def train(number: int, node: int, start: Vector) -> Vector:
        kinds[number, node] = "query"
        shapes = {t.name: t.shape for t in LAYOUT.tensors}
        steps = {name: update(number, node, shape, layer) for layer, (name, shape) in enumerate(shapes.items())}
        return start + LAYOUT.flatten(steps)

    local = Local(system, LAYOUT, np.zeros(LAYOUT.size, np.float32), train, lambda node: 10 * (node + 1), nodes)
    # What an exchange asks is its kind; the first one of a round trains.
    local.fault = lambda number, node, exchange: fault(number, node, "train" if exchange == 1 else "query")
    found = []
    for number in range(1, rounds + 1):
        local.step(number, present[number - 1])
        memories = {node: _bytes(client.memory) for node, client in local.clients.items()}
        frames = {answer.node: bytes(answer.frames["values"]) for answer in local.answers if "values" in answer.frames}
        found.append(Seen(local.model.tobytes(), [frames[node] for node in sorted(frames)], memories))
    return found, local


def no_fault(number: int, node: int, kind: str) -> str:
    """Return the fault of rounds without faults."""
    return ""


def faults(probability: float) -> Fault:
    """Return losses, silences and crashes, each kind of message on its own."""

    def fault(number: int, node: int, kind: str) -> str:
        drawn = Key(3, "faults/" + kind, number, node).uniform(1)[0] / max(probability, 1e-9)
        return "lost" if drawn < 1.0 else "silent" if drawn < 1.6 else "crash" if drawn < 2.0 else ""

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
        assert now.frames == was.frames, f"values of round {number}"
        assert now.model == was.model, f"model of round {number}"
        for node, memory in was.memories.items():
            assert now.memories[node] == memory, f"memory of node {node} after round {number}"
