"""Which nodes a private round shows its inner strategy: those that were drawn, and no others."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp.flower.logs import flowers, log
from fedcomp.flower.metered import partition_lookup
from fedcomp.flower.wrapper import GridWrapper

_POLL_SECONDS: Final = 1.0
_MINIMA: Final = ("min_train_nodes", "min_available_nodes")


def online(grid: Grid, inner: Strategy) -> list[int]:
    """Wait, as Flower's strategies do, until enough nodes are connected; return them in the order of their partitions.

    Where the grid does not know partitions the order is that of the node ids.
    """
    least = getattr(inner, "min_available_nodes", 1)
    # As Flower's strategies do before their first round; a private round would else draw from too few.
    while len(found := list(grid.get_node_ids())) < least:
        log.info("Waiting for nodes to connect: %d connected of %d", len(found), least)
        time.sleep(_POLL_SECONDS)
    # Node ids differ from run to run; in the order of partitions a seeded draw repeats.
    partition = partition_lookup(grid)

    def place(node: int) -> tuple[bool, int, int]:
        known = partition(node)
        return known is None, known or 0, node

    return sorted(found, key=place)


@contextmanager
def muted(hidden: bool) -> Iterator[None]:
    """Keep what Flower logs inside of the block, how many nodes it sampled, to itself when ``hidden``."""
    # Warnings and errors pass: they are about settings and lost nodes, not about who was sampled.
    drop = lambda record: not hidden or record.levelno > logging.INFO  # noqa: E731
    flowers.addFilter(drop)
    try:
        yield
    finally:
        flowers.removeFilter(drop)


class Shown(GridWrapper):
    """A view of a grid with some of its nodes.

    Parameters
    ----------
    grid : Grid
    nodes : sequence of int
    """

    def __init__(self, grid: Grid, nodes: Sequence[int]) -> None:
        super().__init__(grid)
        self.nodes = list(nodes)

    @contextmanager
    def minima(self, inner: Strategy) -> Iterator[Shown]:
        """Yield this view while ``inner`` asks all of its nodes, however few: Flower's would wait for more to come."""
        held = {name: getattr(inner, name) for name in _MINIMA if hasattr(inner, name)}
        try:
            for name in held:
                setattr(inner, name, len(self.nodes))
            yield self
        finally:
            for name, value in held.items():
                setattr(inner, name, value)

    def get_node_ids(self) -> list[int]:
        """Return the nodes that are shown."""
        return list(self.nodes)
