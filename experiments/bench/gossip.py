"""Decentralised runs in one process: time per edge as the graph grows, and the protocol's part of it.

Every message is compressed and read once, so a run takes time in proportion to its edges; what would make it grow
faster is looked for by comparing 64 nodes with 8. Ratios gate; times are reported only, since they say more about the
machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, ClassVar, Final

import numpy as np

from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Algorithm, GossipMessage, Gradient, Multicast, Outbox, Real, State, View
from fedcomp.gossip.topology import topology_of
from fedcomp.gossip_simulation import GossipOutcome, LocalData, SimulationSettings, simulate
from fedcomp.layout import Layout
from fedcomp.measuring import Bound, Case, Found, Row
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
NODE: Final = "us_per_node"
LINEAR: Final = "cost is linear in the number of edges (derived); 1.5 leaves room for caches"


def cases(quick: bool) -> Iterator[Case]:
    """Yield whole runs by graph, algorithm, gradient and number of nodes, and the protocol alone.

    Times are microseconds of processor time per message on an edge and per iteration of a node, medians over
    iterations. A quick run has five iterations on 4 and 8 nodes: too few to judge growth by.
    """
    sizes, iterations, many = ((4, 8), 5, 4) if quick else ((8, 16, 32, 64), 100, 500)
    few, most = sizes[0], sizes[-1]
    for gradient, runs in (("synthetic", _CASES), ("torch", _CASES[:1] if quick else _CASES)):
        for graph, config in runs:
            name, about = config["name"], f"{config['name']} on {graph}, {gradient} gradient"
            for n in sizes:
                how = (graph, config, n, iterations, gradient)
                yield Case(f"{about}, {n} nodes, {iterations} iterations", partial(_whole_run, *how))
            at = {"algorithm": name, "graph": graph, "gradient": gradient, "iterations": iterations}
            text = f"{about}, time per edge: {most} nodes / {few}"
            edges = ("us_per_edge", {**at, "nodes": most}, {**at, "nodes": few})
            yield Case(bounds=[Bound(text, edges, "<= 1.5", LINEAR)])
    long = f"{most} nodes, {many} iterations"
    text = f"a long run: sparse-push on exponential, torch gradient, {long}"
    minutes = "goal of this project: minutes; depends on the machine"
    seconds = f"{long} of sparse-push with a network: seconds"
    bound = Bound(seconds, ("seconds", {"iterations": many}), "<= 600", minutes, gate=False)
    yield Case(text, partial(_whole_run, "exponential", _PUSH, most, many, "torch"), [bound])
    for graph in ("exponential", "ring"):
        for n in (few, most):
            yield Case(f"the protocol alone on {graph}, {n} nodes", partial(_bare, graph, n, iterations))
    own = {"graph": "exponential", "protocol": "alone", "nodes": few}
    goal = "goal of this project; depends on the machine"
    run = {"algorithm": "sparse-push", "graph": "exponential", "gradient": "synthetic", "nodes": few}
    share = f"the protocol's share of sparse-push on exponential, {few} nodes"
    alone = "the protocol's own cost, microseconds per iteration of a node"
    yield Case(
        bounds=[
            Bound(alone, lambda f: max(r[NODE] for r in f.rows if "protocol" in r), "<= 100", goal, gate=False),
            Bound(share, (NODE, own, run), "<= 0.2", "goal of this project, on the same machine"),
        ]
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


def clocked(
    graph: str, n: int, iterations: int, algorithm: Algorithm, start: Real, layout: Layout, locals: Any
) -> tuple[list[float], GossipOutcome]:
    """Return when every round began, in processor time, and what came of the run: what other processes take is not the
    run's."""
    ticks: list[float] = []
    watched = SimulationSettings(before=lambda run: ticks.append(time.process_time()))
    topology = topology_of(graph, n, 0)
    return ticks, simulate(algorithm, topology, locals, start, iterations, layout=layout, seed=0, settings=watched)


def iteration(ticks: Sequence[float]) -> float:
    """Return the seconds of an iteration."""
    # Without the first, in which tables and caches are made. The last tick is the beginning of the round that only
    # delivers, and so the end of the last iteration.
    return median(np.diff(ticks[1:]).tolist())


def _whole_run(graph: str, config: Mapping[str, Any], n: int, iterations: int, gradient: str, _: Found) -> list[Row]:
    made, begin = _torch(n) if gradient == "torch" else _synthetic(n), time.perf_counter()
    ticks, outcome = clocked(graph, n, iterations, get_algorithm(dict(config)), *made)
    seconds, edges = time.perf_counter() - begin, outcome.traffic.messages / iterations
    return [
        {
            "graph": graph,
            "algorithm": config["name"],
            "gradient": gradient,
            "nodes": n,
            "edges": round(edges),
            "iterations": iterations,
            "seconds": seconds,
            "us_per_edge": 1e6 * iteration(ticks) / edges,
            NODE: 1e6 * iteration(ticks) / n,
        }
    ]


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


def _bare(graph: str, n: int, iterations: int, _: Found) -> list[Row]:
    ticks, _outcome = clocked(graph, n, iterations, _Idle(), np.zeros(1), Layout.flat(1), None)
    return [{"protocol": "alone", "graph": graph, "nodes": n, NODE: 1e6 * iteration(ticks) / n}]
