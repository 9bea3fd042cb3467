"""What the tests of strategies with two exchanges share: what a client still owes, and what was in the messages."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict

from fedcomp.flower.payload import BLOB, STEP, frames, take_frame
from fedcomp.flower.protocol import UPDATE
from fedcomp.flower.wrapper import GridWrapper
from fedcomp.layout import Layout

KEPT = (UPDATE, "arrays")


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


def owed(context: Context, strategy: Any, node: int, layout: Layout) -> np.ndarray:
    """Return what a client still owes: memory, an update that waits, and a frame the server never consumed."""
    meta = context.state.config_records.get("fedcomp.uplink")
    if meta is None:
        return np.zeros(layout.size)
    state = {k: v.numpy() for k, v in context.state.array_records["fedcomp.uplink.memory"].items()}
    peer = strategy.reception.peers[node]
    if (peer.acknowledged, peer.generation) != (meta["pending"], meta["generation"]):
        prefix = "fedcomp.uplink.reply/"
        reply = {k.removeprefix(prefix): v for k, v in context.state.items() if k.startswith(prefix)}
        frame = take_frame(RecordDict(reply), UPDATE)
        if frame is not None:
            state = strategy.codec.rollback(state, frame, layout)
    # What waits for an answer is in the memory once it is settled; other codecs send at once.
    settled = strategy.codec.settle(state, layout) if hasattr(strategy.codec, "settle") else state
    return settled["memory"].astype(np.float64)


def number_of(msg: Message) -> int:
    """Return the round of a training message, 0 of one that does not say."""
    return int(msg.content.config_records.get("config", {}).get("server-round", 0))
