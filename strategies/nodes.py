"""The nodes that a strategy sees, and the time to wait for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp.flower.logs import flowers, log
from fedcomp.flower.metered import partition_lookup
from fedcomp.flower.wrapper import GridWrapper

_POLL_SECONDS: Final = 1.0
MINIMA: Final = ("min_train_nodes", "min_available_nodes")
"""By what Flower's strategies say how many nodes training waits for."""


def connected(grid: Grid, least: int) -> list[int]:
    """Wait, as Flower's strategies do, until enough nodes are connected; return them."""
    while len(found := list(grid.get_node_ids())) < least:
        log.info("Waiting for nodes to connect: %d connected of %d", len(found), least)
        time.sleep(_POLL_SECONDS)
    return found


def online(grid: Grid, inner: Strategy) -> list[int]:
    """Return the nodes that are connected, once they are enough for ``inner``, in the order of their partitions.

    Where the grid does not know partitions the order is that of the node ids.
    """
    # As Flower's strategies do before their first round; a private round would else draw from too few.
    found = connected(grid, getattr(inner, "min_available_nodes", 1))
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


class NodesShown(GridWrapper):
    """A view of a grid that shows a strategy some of the nodes only: those it may address.

    Parameters
    ----------
    inner : Grid
    nodes : callable
        ``() -> node ids``, in the order in which they are shown. It is asked each time, since strategies wait here for
        nodes to connect.

    Attributes
    ----------
    shown : list of int
        What was shown last.
    """

    def __init__(self, inner: Grid, nodes: Callable[[], Iterable[int]]) -> None:
        super().__init__(inner)
        self._nodes = nodes
        self.shown: list[int] = []

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that may be addressed."""
        self.shown = list(self._nodes())
        return self.shown


@contextmanager
def asked_for(inner: Strategy, count: int) -> Iterator[None]:
    """Let ``inner`` ask ``count`` nodes inside of the block, however few: Flower's strategies would wait for more."""
    held = {name: getattr(inner, name) for name in MINIMA if hasattr(inner, name)}
    try:
        for name in held:
            setattr(inner, name, count)
        yield
    finally:
        for name, value in held.items():
            setattr(inner, name, value)
