"""Which of the nodes that a SuperLink lists are there: one that is dead stays in its list for up to a minute.

A SuperLink says of every node until when it counts as online, which moves on with each of its heartbeats: one in 17 to
23 s. A node that left all messages of a round unanswered, and was not heard of since it was sent the first, is skipped.
So it is missed for one round. It is asked again as soon as it gives a sign of life: a heartbeat, a late answer, or a
new connection. A node that is merely slow gives one at its next heartbeat.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from flwr.app import Message
from flwr.serverapp import Grid

from fedcomp.flower.grid import in_process
from fedcomp.flower.wrapper import GridWrapper
from fedcomp.strategies.replies import GONE

SLOWEST_BEAT: Final = 3600.0
"""Seconds between two heartbeats above which there are none: simulated nodes have no hearts."""


class Contact:
    """Who was heard of, and who is skipped.

    Parameters
    ----------
    grid : Grid
        Any. Where its engine knows of no heartbeats, nobody is ever skipped.

    Attributes
    ----------
    skipped : dict of int to float
        By node id: when it was heard of last, in the SuperLink's own seconds.
    """

    def __init__(self, grid: Grid) -> None:
        # Nodes of this process are there, or are not listed.
        while isinstance(grid, GridWrapper):
            grid = grid.inner
        self._beats = in_process(grid) is None
        self._engine: Any = grid
        self._asked: dict[int, float] = {}
        self._answered: set[int] = set()
        self.skipped: dict[int, float] = {}

    def ask(self, nodes: Iterable[int]) -> None:
        """Note that nodes are about to be sent messages."""
        new = [node for node in nodes if node not in self._asked]
        if new and self._beats:
            heard = self._heard()
            self._asked |= {node: heard[node] for node in new if node in heard}

    def hear(self, replies: Iterable[Message]) -> None:
        """Note replies, by their sources; errors that a SuperLink made of a node's silence are none."""
        for reply in replies:
            if not (reply.has_error() and reply.error.code in GONE):
                self._answered.add(reply.metadata.src_node_id)
                self.skipped.pop(reply.metadata.src_node_id, None)

    def close(self) -> list[int]:
        """End a round; return the nodes that are skipped from now on."""
        silent = {node: before for node, before in self._asked.items() if node not in self._answered}
        heard = self._heard() if silent else {}
        lost = {node: before for node, before in silent.items() if heard.get(node, before) <= before}
        new = [node for node in lost if node not in self.skipped]
        self.skipped |= lost
        self._asked, self._answered = {}, set()
        return new

    def look(self, listed: Collection[int]) -> list[int]:
        """Return the nodes that were skipped and are there again; forget those that are listed no longer."""
        if not self.skipped:
            return []
        heard = self._heard()
        back = [node for node, before in self.skipped.items() if node in listed and heard.get(node, before) > before]
        self.skipped = {node: before for node, before in self.skipped.items() if node in listed and node not in back}
        return back

    def _heard(self) -> Mapping[int, float]:
        return {
            info.node_id: float(info.online_until)
            for info in self._engine.get_nodes()
            if 0 < info.heartbeat_interval < SLOWEST_BEAT
        }
