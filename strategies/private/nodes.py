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
from fedcomp.strategies.private.promise import Promise

_POLL_SECONDS: Final = 1.0
_MINIMA: Final = ("min_train_nodes", "min_available_nodes")


def online(grid: Grid, inner: Strategy) -> list[int]:
    """Wait, as Flower's strategies do, until enough nodes are connected; return them in the order of their partitions.

    Where the grid does not know partitions the order is that of the node ids.
    """
    least = getattr(inner, "min_available_nodes", 1)
    while len(found := list(grid.get_node_ids())) < least:
        log.info("Waiting for nodes to connect: %d connected of %d", len(found), least)
        time.sleep(_POLL_SECONDS)
    partition = partition_lookup(grid)

    def place(node: int) -> tuple[bool, int, int]:
        known = partition(node)
        return known is None, known or 0, node

    return sorted(found, key=place)


def draw(promise: Promise, grid: Grid, server_round: int) -> tuple[list[int], str]:
    """Return the nodes that are asked in a round, and why nobody is, empty when somebody may be.

    Parameters
    ----------
    promise : Promise
        Whose budget, population and sampling decide.
    """
    if reason := promise.over(server_round):
        return [], reason
    nodes = online(grid, promise.inner)
    if len(nodes) > promise.population:
        # Not an error that ends the run: a client that came back may for a while be there under its former id as well.
        return [], (
            f"{len(nodes)} clients are online, and the population was given as {promise.population}. Delta and the "
            "mean's denominator rest on the number of all that may ever take part: end this run, and begin one that "
            "says it"
        )
    for node in promise.privacy.surplus(nodes):
        promise.warn_once(
            f"node {node} is not asked: the {promise.population} clients of the population have all taken part, and "
            "under another id one of them would have its turns again"
        )
    entropy = promise.entropy("sampling", server_round)
    chosen = promise.sampling.draw(nodes, promise.privacy, server_round, entropy, count=promise.count)
    if promise.sampling.kind == "capped" and nodes and not chosen:
        promise.exhausted = "every client that is online has taken part as often as it may"
    return chosen, promise.exhausted


@contextmanager
def unheard(hidden: bool) -> Iterator[None]:
    """Keep what Flower logs inside of the block, how many nodes it sampled, to itself when ``hidden``."""
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
