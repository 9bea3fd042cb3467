"""A small federation for decentralised learning over messages, and the same run in one process without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from toy import with_halves

from fedcomp.clients.compressed import compression
from fedcomp.clients.gossip import GossipSetup, gossip_node
from fedcomp.clients.memory import MEMORY
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.records import to_arrays
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Algorithm
from fedcomp.gossip.local import FlatObjective
from fedcomp.gossip.topology import topology_of
from fedcomp.gossip.vector import GossipPolicy, flatten
from fedcomp.gossip_simulation import Faults, GossipOutcome, SimulationSettings, simulate
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.strategies.gossip.strategy import GossipRelay
from fedcomp.systems.gossip import state_of

NODES, ROUNDS, SEED = 4, 4, 5
SHAPES = {"weight": (8, 6), "bias": (6,), "norm.running_mean": (6,)}
DENSE_BELOW = 12


class Pull:
    """Every node pulls towards its own number, with noise; a running statistic follows the model, a counter counts."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.calls = 0
        self._after: dict[str, np.ndarray] = {}

    def gradient(self, arrays: Mapping[str, np.ndarray], key: Key) -> dict[str, np.ndarray]:
        self.calls += 1
        count, mean = arrays["norm.num_batches_tracked"], arrays["norm.running_mean"]
        seen = 0.9 * mean + 0.1 * arrays["bias"] + 0.01 * self.partition
        self._after = {"norm.num_batches_tracked": count + 1, "norm.running_mean": seen.astype(mean.dtype)}
        noise = key.uniform(48).reshape(8, 6) - 0.5
        out = {"weight": arrays["weight"] - self.partition + noise, "bias": arrays["bias"] + self.partition}
        return {name: out[name].astype(arrays[name].dtype) for name in out}

    def buffers_after(self) -> dict[str, np.ndarray]:
        return dict(self._after)

    def evaluate(self, arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {"loss": float(np.square(arrays["weight"] - 1.5).mean()), "batches": float(arrays[COUNTER])}


COUNTER = "norm.num_batches_tracked"


def model() -> ArrayRecord:
    arrays = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    return ArrayRecord({name: Array(a) for name, a in (arrays | {COUNTER: np.array(0, np.int64)}).items()})


def pull(message: Message, context: Context, setup: GossipSetup) -> Pull:
    return Pull(int(context.node_config["partition-id"]))


def client() -> ClientApp:
    return with_halves([compression(), gossip_node(pull)])


def graph_for(algorithm: Algorithm) -> str:
    return "exponential" if algorithm.directed else "ring"


def made(name: str, **options: Any) -> Algorithm:
    return get_algorithm({"name": name, "lr": 0.05, **options})


def strategy(algorithm: Algorithm | str, **options: Any) -> GossipRelay:
    algorithm = made(algorithm) if isinstance(algorithm, str) else algorithm
    usual = {"topology": graph_for(algorithm), "seed": SEED, "dense_below": DENSE_BELOW, "observe_every": 100}
    return GossipRelay(algorithm, **{**usual, **options})


def grid(app: Callable | None = None, nodes: int = NODES, **options: Any) -> MeteredGrid:
    return MeteredGrid(InProcessGrid(app or client(), nodes, **{"seed": 2, **options}))


def central(
    algorithm: Algorithm, *, dtype: str = "float32", faults: Faults | None = None, **options: Any
) -> GossipOutcome:
    named = {name: array.numpy() for name, array in model().items()}
    layout = Layout.of(named, GossipPolicy(DENSE_BELOW))
    home = {t.name: named[t.name] for t in layout.exact}
    return simulate(
        algorithm,
        topology_of(graph_for(algorithm), NODES, SEED),
        [FlatObjective(Pull(partition), layout, home) for partition in range(NODES)],
        flatten(named, layout, dtype),
        options.pop("iterations", ROUNDS),
        layout=layout,
        seed=SEED,
        settings=SimulationSettings(faults=faults, **options),
    )


def kept(grid: MeteredGrid, partition: int) -> dict[str, np.ndarray]:
    """Return a node's memory."""
    return to_arrays(grid.context(partition).state[MEMORY])


def bits(state: Mapping[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in state.items()}


def states(grid: MeteredGrid) -> dict[int, dict[str, Any]]:
    return {partition: bits(state_of(kept(grid, partition))) for partition in grid.partitions}


def states_of(outcome: GossipOutcome) -> dict[int, dict[str, Any]]:
    return {node: bits(state) for node, state in outcome.last.items()}
