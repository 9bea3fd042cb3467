"""What the tests of coded rounds over Flower share: a run, what went to and fro, and ways to lose clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp.strategy import Result, Strategy
from toy import client_app, model

from fedcomp.clients.compressed import compression
from fedcomp.flower import asks
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit

Plan = Callable[[Delivery], Any]


class Tap(MeteredGrid):
    """A grid that keeps what the server sends and receives."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[Message] = []
        self.received: list[Message] = []

    def send_and_receive(self, messages: Iterable[Message], **options: Any) -> list[Message]:
        batch = list(messages)
        self.sent += batch
        replies = list(super().send_and_receive(batch, **options))
        self.received += replies
        return replies

    def asked(self, word: str) -> list[Message]:
        """Return the messages that ask in words of this kind."""
        return [message for message in self.sent if word_of(message) == word]

    def answered(self, word: str) -> list[Message]:
        """Return the answers in words of this kind."""
        heads = ((reply, asks.find_answer(reply.content)) for reply in self.received if reply.has_content())
        return [reply for reply, head in heads if head is not None and head.say == word]


def word_of(message: Message) -> str:
    """Return the kind of words in which a message asks; empty for none."""
    head = asks.find_ask(message.content)
    return "" if head is None else head.say


def tapped(nodes: int, *, client: Any = None, fault: Plan | None = None, **options: Any) -> Tap:
    """Return a grid of the toy app."""
    app = client or client_app([compression()])
    return Tap(InProcessGrid(app, nodes, **{"seed": 4, "fault": fault, **options}), TrafficLedger())


def run(
    strategy: Strategy,
    nodes: int = 10,
    *,
    rounds: int = 1,
    fault: Plan | None = None,
    app: Callable[[Message, Context], Message] | None = None,
    initial: ArrayRecord | None = None,
    timeout: float = 9.0,
    **engine: Any,
) -> tuple[Result, Tap]:
    """Run ``strategy`` in process."""
    grid = tapped(nodes, client=app, fault=fault, **engine)
    return fit(strategy, grid, initial or model(), rounds, timeout=timeout), grid


def bits(result: Result) -> bytes:
    """Return the final model's bytes."""
    return b"".join(np.ascontiguousarray(array.numpy()).tobytes() for array in result.arrays.values())


def after_sharing(lost: Iterable[int], kind: str = "silent") -> Plan:
    """Lose the given partitions once they have shared: they answer no query of a round any more, the hello apart."""
    gone = set(lost)

    def plan(delivery: Delivery) -> str | None:
        return kind if delivery.partition in gone and delivery.message_type == "query" else None

    return plan


def before_sharing(lost: Iterable[int], kind: str = "silent") -> Plan:
    """Lose the given partitions before they train."""
    gone = set(lost)

    def plan(delivery: Delivery) -> str | None:
        return kind if delivery.partition in gone and delivery.message_type == "train" else None

    return plan
