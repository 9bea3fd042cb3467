"""A grid that, like Flower's simulation and deployments, does not know which partition a node holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedcomp.flower.grid import InProcessGrid


class Blind(InProcessGrid):
    """Knows no more of its nodes than a deployment does: what they say."""

    def partition_of(self, node_id: int) -> None:
        return None


class PlainGrid(Grid):
    """Hands everything on to an engine, and knows nothing of partitions."""

    def __init__(self, engine: InProcessGrid) -> None:
        self.engine = engine

    def set_run(self, run: Any) -> None:
        self.engine.set_run(run)

    @property
    def run(self) -> Any:
        return self.engine.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self.engine.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        return self.engine.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.engine.push_messages(list(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.engine.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.engine.send_and_receive(list(messages), timeout=timeout)
