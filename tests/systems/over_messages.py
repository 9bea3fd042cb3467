"""What a strategy of today does over Flower's messages in process, round by round: what a program is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from beside_product import WORDS
from flwr.app import ArrayRecord

from fedcomp.clients.memory import MEMORY
from fedcomp.flower.asks import data_in
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.rounds import fit
from fedcomp.layout import Layout, Vector

Fault = Callable[[int, int, int], str]
"""``fault(round, partition, exchange)``, as :class:`fedcomp.local.Local` takes it."""


@dataclass
class Seen:
    """One round: the model after it; by partition the frames that came, and the memories of error feedback."""

    model: bytes
    frames: dict[int, list[bytes]] = field(default_factory=dict)
    memories: dict[int, bytes] = field(default_factory=dict)


class Heard(MeteredGrid):
    """Keeps the frames of replies by node."""

    heard: dict[int, list[bytes]]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for reply in replies:
            if reply.has_error():
                continue
            if (frame := data_in(reply.content, FRAME).get("values")) is not None:
                self.heard.setdefault(reply.metadata.src_node_id, []).append(bytes(frame))
        return replies


def product(
    strategy: Any, app: Any, nodes: int, layout: Layout, start: Vector, rounds: int, fault: Fault = lambda *_: ""
) -> list[Seen]:
    """Run a strategy from a model, and return what was seen of each round."""
    exchanges: dict[int, list[int]] = {}

    def plan(delivery: Delivery) -> Any:
        # Which exchange of its round a message is of.
        seen = exchanges.setdefault(delivery.round, [])
        if delivery.exchange not in seen:
            seen.append(delivery.exchange)
        return WORDS[fault(delivery.round, delivery.partition, len(seen))]

    found: list[Seen] = []
    with InProcessGrid(app, nodes, seed=4, fault=plan) as inner:
        grid = Heard(inner)
        grid.heard = {}
        partition_of = {inner.node_id_of(p): p for p in range(nodes)}

        def note(number: int, arrays: ArrayRecord, outcome: Any) -> None:
            vector = layout.flatten(to_arrays(arrays))
            frames = {partition_of[node]: frames for node, frames in grid.heard.items()}
            memories = {}
            for node, partition in partition_of.items():
                held = inner.context(node).state.array_records.get(MEMORY)
                if held is not None and "memory" in held:
                    memories[partition] = held["memory"].numpy().tobytes()
            found.append(Seen(vector.tobytes(), frames, memories))
            grid.heard = {}

        fit(strategy, grid, to_record(layout.unflatten(start)), rounds, timeout=9.0, on_round=note)
    return found
