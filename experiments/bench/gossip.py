"""Decentralised runs in one process: time per edge as the graph grows, cost of a message, share of the protocol.

Every message is compressed and read once, so a run takes time in proportion to its edges; what would make it grow
faster is looked for by comparing 64 nodes with 8. Ratios gate; times are reported only, since they say more about the
machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, ClassVar, Final

import numpy as np

from fedcomp.experiments.bench.readpass import median_seconds
from fedcomp.experiments.findings import Claim
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Algorithm, GossipMessage, Gradient, Multicast, Outbox, Real, State, View
from fedcomp.gossip.compressor import Compressor, get_compressor
from fedcomp.gossip.topology import topology_of
from fedcomp.gossip_simulation import LocalData, Simulation, SimulationSettings, simulate
from fedcomp.layout import Layout
from fedcomp.rng import Key

SIZE: Final = 2410
"""Parameters of the digits network, 64-32-10."""

_PUSH: Final[Mapping[str, Any]] = {"name": "sparse-push", "density": 0.01}
_CASES: Final = (
    ("exponential", _PUSH),
    ("exponential", {"name": "sgp"}),
    ("ring", _PUSH),
    ("ring", {"name": "cold", "gamma": 0.02, "compressor": {"id": "topk", "density": 0.02}}),
)
_COMPRESSORS: Final = (
    {"id": "identity"},
    {"id": "topk", "density": 0.01},
    {"id": "topk", "density": 0.1},
    {"id": "randomk", "density": 0.1},
    {"id": "scaledsign"},
    {"id": "dithering", "bits": 2},
)


def run(*, quick: bool = False, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measure.

    Returns
    -------
    dict
        ``rows``: of whole runs by graph, algorithm, gradient and number of nodes (seconds by the clock; microseconds of
        processor time per message on an edge and per iteration of a node, medians over iterations); of compressors
        (bytes, microseconds to write and to read a message); of the protocol without an algorithm.
        ``claims``: time per edge on the largest against the smallest graph; what the protocol costs by itself.
    """
    say = progress or (lambda _line: None)
    sizes, iterations, many = ((4, 8), 5, 4) if quick else ((8, 16, 32, 64), 100, 500)
    runs: list[dict[str, Any]] = []
    claims: list[Claim] = []
    for gradient, cases in (("synthetic", _CASES), ("torch", _CASES[:1] if quick else _CASES)):
        for graph, config in cases:
            measured = []
            for n in sizes:
                say(f"{config['name']} on {graph}, {gradient} gradient, {n} nodes, {iterations} iterations")
                measured.append(_whole_run(graph, get_algorithm(dict(config)), n, iterations, gradient))
            runs += measured
            # A quick run has five iterations on 4 and 8 nodes: too few to judge growth by.
            claims.append(_linear(measured, gate=not quick))
    say(f"a long run: sparse-push on exponential, torch gradient, {sizes[-1]} nodes, {many} iterations")
    long = _whole_run("exponential", get_algorithm(dict(_PUSH)), sizes[-1], many, "torch")
    claims.append(
        Claim(
            f"{sizes[-1]} nodes, {many} iterations of sparse-push with a network: seconds",
            long["seconds"],
            "<=",
            600.0,
            "goal of this project: minutes; depends on the machine",
            gate=False,
        )
    )
    bare = [_bare(graph, n, iterations, say) for graph in ("exponential", "ring") for n in (sizes[0], sizes[-1])]
    claims.append(
        Claim(
            "the protocol's own cost, microseconds per iteration of a node",
            max(row["us_per_node"] for row in bare),
            "<=",
            100.0,
            "goal of this project; depends on the machine",
            gate=False,
        )
    )
    share = bare[0]["us_per_node"] / runs[0]["us_per_node"]
    name = f"the protocol's share of {runs[0]['algorithm']} on {runs[0]['graph']}, {sizes[0]} nodes"
    claims.append(Claim(name, share, "<=", 0.2, "goal of this project, on the same machine", gate=not quick))
    return {"rows": [*runs, long, *_messages(quick, say), *bare], "claims": claims}


def _linear(measured: Sequence[Mapping[str, Any]], *, gate: bool) -> Claim:
    few, many = measured[0], measured[-1]
    return Claim(
        f"{few['algorithm']} on {few['graph']}, {few['gradient']} gradient, time per edge: "
        f"{many['nodes']} nodes / {few['nodes']}",
        many["us_per_edge"] / few["us_per_edge"],
        "<=",
        1.5,
        "cost is linear in the number of edges (derived); 1.5 leaves room for caches",
        gate=gate,
    )


class _Synthetic:
    """The gradient of half the squared distance to a point: next to no work."""

    def __init__(self, centre: Real) -> None:
        self.centre = centre

    def gradient(self, z: Real, key: Key) -> Real:
        out: Real = z - self.centre
        return out

    def change(self) -> None:
        return None


class RoundClock:
    """Notes when every round begins, in processor time: what other processes take is not the run's."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def __call__(self, run: Simulation) -> None:
        self.ticks.append(time.process_time())

    @property
    def median(self) -> float:
        """Seconds of an iteration."""
        # Without the first, in which tables and caches are made. The last tick is the beginning of the round that only
        # delivers, and so the end of the last iteration.
        return median(np.diff(self.ticks[1:]).tolist())


def _whole_run(graph: str, algorithm: Algorithm, n: int, iterations: int, gradient: str) -> dict[str, Any]:
    start, layout, locals = _torch(n) if gradient == "torch" else _synthetic(n)
    clock = RoundClock()
    begin = time.perf_counter()
    outcome = simulate(
        algorithm,
        topology_of(graph, n, 0),
        locals,
        start,
        iterations,
        layout=layout,
        seed=0,
        settings=SimulationSettings(before=clock),
    )
    seconds = time.perf_counter() - begin
    edges = outcome.traffic.messages / iterations
    return {
        "graph": graph,
        "algorithm": algorithm.name,
        "gradient": gradient,
        "nodes": n,
        "edges": round(edges),
        "iterations": iterations,
        "seconds": seconds,
        "us_per_edge": 1e6 * clock.median / edges,
        "us_per_node": 1e6 * clock.median / n,
    }


def _synthetic(n: int) -> tuple[Real, Layout, Sequence[LocalData]]:
    locals = [
        _Synthetic((Key(0, "bench-gossip", partition=i).uniform(SIZE) - 0.5).astype(np.float32)) for i in range(n)
    ]
    return np.zeros(SIZE, np.float32), Layout.flat(SIZE), locals


def _torch(n: int) -> tuple[Real, Layout, Sequence[LocalData]]:
    from fedcomp.gossip.local import FlatObjective
    from fedcomp.gossip.vector import GossipPolicy, flatten
    from fedcomp.tasks import get_task
    from fedcomp.tasks.local import LocalObjective

    task = get_task("digits")
    objectives = [LocalObjective(task, i, n, seed=0) for i in range(n)]
    start = objectives[0].start()
    layout = Layout.of(start, GossipPolicy())
    return flatten(start, layout, "float32"), layout, [FlatObjective(objective, layout) for objective in objectives]


def _messages(quick: bool, say: Callable[[str], None]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for size in (SIZE,) if quick else (SIZE, 100 * SIZE):
        v = (Key(1, "bench-gossip").uniform(size) - 0.5).astype(np.float32)
        for config in _COMPRESSORS:
            compressor, key = get_compressor(config), Key(1, "bench-gossip/support")
            say(f"messages of {compressor.codec!r}, {size} elements")
            data = compressor.encode(v, size, key)
            # Fewer repetitions of long vectors, so that both sizes take about as long.
            repeat = 3 if quick else max(5, 200 * SIZE // size)
            write = partial(compressor.encode, v, size, key)
            # A copy: reading adds to its vector, and writing must go on with the same v.
            read = partial(_read, compressor, data, v.copy(), key)
            rows.append(
                {
                    "compressor": repr(compressor.codec),
                    "elements": size,
                    "bytes": len(data),
                    "write_us": 1e6 * median_seconds(write, repeat),
                    "read_us": 1e6 * median_seconds(read, repeat),
                }
            )
    return rows


def _read(compressor: Compressor, data: bytes, out: Real, key: Key) -> None:
    compressor.decode(memoryview(data), out.size, out.size, out.dtype, key).add_to(out, 1.0)


class _Idle(Algorithm):
    """Does nothing and says eight bytes to everybody: what is left is the protocol."""

    name: ClassVar[str] = "idle"
    directed = time_varying = asynchronous = True

    def get_config(self) -> dict[str, Any]:
        return {}

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        return {"x": model}

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        return state

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        # Eight zero bytes: the server reads no message, and this algorithm's receive none either.
        return state, tuple(Multicast((j,), bytes(8)) for j in view.column)

    def model(self, state: State) -> Real:
        return state["x"]

    def facts(self, state: State) -> dict[str, float]:
        # Constant and above the watcher's floor, so that watching is part of what is timed.
        return {"innovation": 1.0}


def _bare(graph: str, n: int, iterations: int, say: Callable[[str], None]) -> dict[str, Any]:
    say(f"the protocol alone on {graph}, {n} nodes, {iterations} iterations")
    clock = RoundClock()
    topology = topology_of(graph, n, 0)
    simulate(
        _Idle(),
        topology,
        None,
        np.zeros(1),
        iterations,
        layout=Layout.flat(1),
        seed=0,
        settings=SimulationSettings(before=clock),
    )
    return {"protocol": "alone", "graph": graph, "nodes": n, "us_per_node": 1e6 * clock.median / n}
