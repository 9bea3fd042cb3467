"""Which nodes take part in a round of a strategy that samples by itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from flwr.serverapp import Grid

from fedcomp.flower.logs import log
from fedcomp.rng import Key

_POLL_SECONDS: Final = 1.0


def draw_cohort(
    grid: Grid, key: Key, *, fraction: float, least: int, available: int, partitions: Mapping[int, int]
) -> list[int]:
    """Wait, as Flower's strategies do, until enough nodes are connected; return those that take part.

    Parameters
    ----------
    key : Key
        Names the draw: seed, purpose and round.
    fraction : float
        Share of the connected nodes that takes part, rounded down.
    least : int
        Fewer than these are never asked, unless fewer are connected.
    available : int
        How many nodes must be connected.
    partitions : mapping of node id to partition
        Of the nodes whose partition is known: the result is in this order, the others after them by id.

    Notes
    -----
    The draw is by node id, which is new in every run: a partition is a client's own word, and one that is drawn often
    could be searched for.
    """
    while len(found := list(grid.get_node_ids())) < available:
        log.info("Waiting for nodes to connect: %d connected of %d", len(found), available)
        time.sleep(_POLL_SECONDS)
    online = sorted(found, key=lambda node: (partitions.get(node, 1 << 31), node))
    count = min(len(online), max(least, int(len(online) * fraction)))
    if count == len(online):
        return online
    drawn = set(sorted(online, key=lambda node: key.at(purpose=f"{key.purpose}/{node}").u64())[:count])
    return [node for node in online if node in drawn]
