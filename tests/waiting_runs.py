"""What the tests of strategies with two exchanges share: what was in the messages."""

from __future__ import annotations

from typing import Any

from flwr.app import Message

from fedcomp.flower.payload import BLOB, STEP, frames
from fedcomp.flower.wrapper import GridWrapper

KEPT = ("arrays",)


class Sent(GridWrapper):
    """Keeps the keys of the frames in every message, by round, kind and node."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.messages: list[tuple[int, str, int, set[str]]] = []

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        for m in messages:
            keys = {k for k in m.content if k in KEPT or k.startswith("fedcomp.step")}
            # Those of programs are entries.
            keys |= {k.partition("blob")[1] or k for k in frames(m.content) if k.startswith((BLOB, STEP))}
            self.messages.append((int(m.metadata.group_id), m.metadata.message_type, m.metadata.dst_node_id, keys))
        return super().send_and_receive(messages, timeout=timeout)

    def holding(self, key: str) -> list[tuple[int, str]]:
        """Return round and kind of the messages with a frame under ``key``."""
        return [(number, kind) for number, kind, _, keys in self.messages if key in keys]


def number_of(msg: Message) -> int:
    """Return the round of a training message, 0 of one that does not say."""
    return int(msg.content.config_records.get("config", {}).get("server-round", 0))
