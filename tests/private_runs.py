"""Playing rounds of private strategies: with bare vectors, without any client, and with the toy app."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp import Grid
from toy import client_app, fedavg

from fedcomp.flower._private import claim_identity, release_identity
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.layout import Layout
from fedcomp.strategies.private.strategy import PrivateStrategy


class Room(Grid):
    """Nodes that are there and are never sent anything."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self.nodes = list(nodes)

    def get_node_ids(self) -> list[int]:
        return self.nodes

    def _never(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("nothing is sent here")

    set_run = create_message = push_messages = pull_messages = send_and_receive = _never  # type: ignore[assignment]

    @property
    def run(self) -> None:
        self._never()


@contextmanager
def server() -> Iterator[None]:
    """Be the server app of some run: Flower makes messages for nobody else."""
    claim = claim_identity((1, 1, 1))
    try:
        yield
    finally:
        release_identity(claim)


def inner(**options):
    """Return plain FedAvg as private strategies take it."""
    return fedavg(fraction_evaluate=0.0, **options)


def arrays_of(vector: np.ndarray) -> ArrayRecord:
    """Return a model of one tensor."""
    return ArrayRecord({"w": Array(np.asarray(vector, np.float32))})


def asked(strategy: PrivateStrategy, nodes: Sequence[int], server_round: int = 1, size: int = 4) -> list[int]:
    """Configure a round and return who is asked, sorted."""
    model = arrays_of(np.zeros(size))
    with server():
        messages = strategy.configure_train(server_round, model, ConfigRecord(), Room(nodes))
    return sorted(message.metadata.dst_node_id for message in messages)


def play(
    strategy: PrivateStrategy,
    updates: Mapping[int, np.ndarray] | Sequence[tuple[int, np.ndarray]],
    *,
    server_round: int = 1,
    nodes: Sequence[int] | None = None,
    support: np.ndarray | None = None,
    size: int | None = None,
) -> np.ndarray | None:
    """Play one round on a model of zeros and return the new model, None when there is none.

    ``updates`` are what the nodes contribute, in the order in which they arrive; ``nodes`` are online.
    """
    pairs = list(updates.items()) if isinstance(updates, Mapping) else list(updates)
    size = len(pairs[0][1]) if size is None else size
    online = [node for node, _ in pairs] if nodes is None else list(nodes)
    model = arrays_of(np.zeros(size))
    layout = Layout.of({"w": np.zeros(size, np.float32)})
    with server():
        strategy.configure_train(server_round, model, ConfigRecord(), Room(online))
        arrays, metrics = strategy.aggregate_updates(server_round, iter(pairs), layout, support=support)
    assert not metrics
    return None if arrays is None else arrays["w"].numpy()


def forged(honest, change, *culprits: int):
    """Return ``honest`` with some clients (default all) whose replies ``change`` alters, or replaces."""

    def app(msg: Message, context: Context) -> Message:
        reply = honest(msg, context)
        if not reply.has_error() and (not culprits or context.node_config["partition-id"] in culprits):
            changed = change(reply.content)
            reply.content = reply.content if changed is None else changed
        return reply

    return app


def federation(mods, nodes: int, *, change=None, culprit: int = 1, fault=None, metered: bool = True):
    """Return an in-process grid of toy clients; ``change`` may alter the reply of one of them.

    A metered grid drops duplicates before a strategy sees them.
    """
    app = client_app(mods) if change is None else forged(client_app(mods), change, culprit)
    options = {} if fault is None else {"fault": fault}
    grid = InProcessGrid(app, nodes, seed=4, **options)
    return MeteredGrid(grid, TrafficLedger()) if metered else grid
