"""Advice of algorithms of decentralised learning, of their graphs and estimates, and of runs over messages."""

from __future__ import annotations

from typing import Any

import numpy as np
from advice import Row, row
from estimate_streams import IDENTITY, SPLIT, draw, pair_view
from estimate_streams import D as LONG
from flwr.app import Array, ArrayRecord
from gossip_faults import Quadratic, vectors
from gossip_toy import grid, model, strategy
from toy import client_app

from fedcomp.clients.compressed import compression
from fedcomp.flower.rounds import fit
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Algorithm, View, messages_of
from fedcomp.gossip.cold import COLD
from fedcomp.gossip.coordinate_push import CoordinatePush
from fedcomp.gossip.dyna_cold import DynaCOLD
from fedcomp.gossip.estimates import absorb, along_edge, broadcast, disagreement, open_estimates
from fedcomp.gossip.power_gossip import PowerGossip
from fedcomp.gossip.sparse_push import SparsePush
from fedcomp.gossip.topology import Ring, topology_of
from fedcomp.gossip.tuning import tune_gamma
from fedcomp.gossip_simulation import SimulationSettings, simulate
from fedcomp.layout import Layout
from fedcomp.systems.gossip import Gossip

N, D = 4, 12
CENTRES = vectors(N, D, seed=3)
MEAN = np.mean(CENTRES, axis=0)
ZERO = np.zeros(D)


def ended(algorithm: Algorithm | dict[str, Any], graph: str = "ring", iterations: int = 60, **how: Any) -> Any:
    """Return the models of a run, a row for each node; node i is drawn to ``CENTRES[i]``."""
    made = get_algorithm(algorithm) if isinstance(algorithm, dict) else algorithm
    learns, starts, n = how.pop("learns", True), how.pop("starts", ZERO), how.pop("n", N)
    locals_ = [Quadratic(CENTRES[i % N], noise=0.0) for i in range(n)] if learns else None
    layout, settings = Layout.flat(D), SimulationSettings(**how)
    ran = simulate(made, topology_of(graph, n), locals_, starts, iterations, layout=layout, seed=0, settings=settings)
    return np.stack([ran.models[i] for i in sorted(ran.models)])


def near(models: Any, target: Any = MEAN) -> float:
    """Return how far the farthest node is from a target, where one that talks to nobody would be 1 from it."""
    alone = np.linalg.norm(np.stack(CENTRES) - MEAN, axis=1).max()
    return float(np.linalg.norm(models - target, axis=1).max() / alone)


def learns(algorithm: Algorithm | dict[str, Any], *arguments: Any, **how: Any) -> bool:
    return near(ended(algorithm, *arguments, **how)) < 0.5


def averages(algorithm: Algorithm | dict[str, Any], *arguments: Any, **how: Any) -> bool:
    """Whether nodes that begin apart and learn nothing end with the mean."""
    given = {"starts": CENTRES, "learns": False}
    return near(ended(algorithm, *arguments, **{**given, **how})) < 0.05


def choco(**options: Any) -> dict[str, Any]:
    return {"name": "choco", "lr": 0.1, "gamma": 0.3, "compressor": {"id": "topk", "density": 0.5}, **options}


def cold(gamma: float | str) -> COLD:
    return COLD(lr=0.5, gamma=gamma, compressor={"id": "dithering", "bits": 1})


LARGE = [(1e30 * centre).astype(np.float32) for centre in CENTRES]


def shaken(gamma: float) -> bool:
    """Whether nodes average models that begin near the largest numbers of float32."""
    lossy = choco(gamma=gamma, compressor={"id": "terngrad"})
    models = ended(lossy, iterations=160, starts=LARGE, learns=False, watch=False)
    return near(models / 1e30) < 0.1


def largest_step() -> float:
    """Begin with 0.001 and double it while runs converge; return the last one."""
    gamma = 0.001
    while gamma <= 0.5 and near(ended(cold(2.0 * gamma), iterations=12, watch=False)) < 1.0:
        gamma *= 2.0
    return gamma


def pushed(**options: Any) -> SparsePush:
    return SparsePush(**{"lr": 0.1, "compressor": {"id": "dithering", "bits": 1}, **options})


def tuned() -> SparsePush:
    found = tune_gamma(lambda gamma: pushed(gamma=gamma), lambda made: near(ended(made, "exponential", 20)), start=0.5)
    assert isinstance(found.algorithm, SparsePush)
    return found.algorithm


def everywhere(**options: Any) -> SparsePush:
    return SparsePush(**{"density": 0.5, "gamma": 0.5, "estimates": "broadcast", **options})


def one_bit(**options: Any) -> DynaCOLD:
    return DynaCOLD(**{"scale": "geometric", "lr": 0.5, "gamma": 0.3, "rho": 0.8, "s0": 0.8, **options})


def silent_at_first(patience: int) -> bool:
    return learns(choco(), faults=lambda node, attempt: "silent" if attempt < 4 else "none", patience=patience)


def sent_by(algorithm: Algorithm, graph: str = "ring") -> Any:
    made = topology_of(graph, N)
    view = made.view(0, 0, seed=0, directed_algorithm=algorithm.directed)
    return algorithm.send(algorithm.init(ZERO, Layout.flat(D)), None, view)


def left(view: View) -> bool:
    """Whether all that a node had is with its neighbour when it has left."""
    sgp, layout = get_algorithm({"name": "sgp"}), Layout.flat(D)
    first, second = (sgp.init(centre, layout) for centre in CENTRES[:2])
    gone, outbox = sgp.leave(first, view)
    heir = sgp.receive(second, messages_of(0, outbox))
    mean = np.allclose(sgp.model(heir), np.mean(CENTRES[:2], axis=0))
    return bool(mean and sgp.invariants([gone])["sum_w"] == 0.0 and sgp.invariants([heir])["sum_w"] == 2.0)


def heard(weights: tuple[float, float], copies: bool, *, whole: bool = False, restart: bool = False) -> bool:
    """Whether two nodes know in the second iteration how far they are apart; they send everything."""
    start = {"z": np.zeros(LONG)}
    nodes = [open_estimates({}, start, SPLIT, copies=copies) for _ in range(2)]
    for k, weight in enumerate(weights):
        if restart:
            nodes = [open_estimates(state, start, SPLIT, copies=copies) for state in nodes]
        inboxes = []
        for i in range(2):
            resync = frozenset({1 - i} if whole and k else ())
            view = View(i, k, {1 - i: weight}, {1 - i: weight}, resync=resync)
            sent = broadcast(nodes[i], {"z": draw("x", i, k)}, IDENTITY, view)
            nodes[i] = sent.state
            inboxes.append(messages_of(i, sent.outbox))
        nodes = [absorb(nodes[i], inboxes[1 - i], ("z",), IDENTITY).state for i in range(2)]
    apart = draw("x", 1, 1) - draw("x", 0, 1)
    return all(np.allclose(disagreement(nodes[i], "z"), weights[1] * (apart, -apart)[i]) for i in range(2))


def along(edges: bool) -> bool:
    """Whether what is sent along an edge arrives."""
    here, there = (open_estimates({}, {"z": np.zeros(LONG)}, SPLIT, edges=edges) for _ in range(2))
    target = draw("x")
    _, message, _ = along_edge(here, {"z": target}, IDENTITY, pair_view(0, 0), 1)
    received = absorb(there, messages_of(0, (message,)), ("z",), IDENTITY, complete=False)
    return np.array_equal(received.state["z/0"], target)


def pushes(text: str) -> bool:
    """Whether nodes with these shares agree on the mean of what they began with."""
    third = np.mean(CENTRES[:3], axis=0)
    return near(ended({"name": "sgp"}, text, n=3, starts=CENTRES[:3], learns=False), third) < 0.05


def trained(start: Any = None, **options: Any) -> ArrayRecord:
    """Return what a run over messages ends with."""
    relay, over = strategy("choco", **options), grid()
    with over.inner:
        return fit(relay, over, model() if start is None else start, 2, timeout=9).arrays


def with_type(dtype: str) -> ArrayRecord:
    arrays = {name: array.numpy() for name, array in model().items()}
    return ArrayRecord({n: Array(a.astype(dtype) if a.dtype.kind == "f" else a) for n, a in arrays.items()})


def moves(start: ArrayRecord, **options: Any) -> bool:
    """Whether training changes the model and leaves its types."""
    after = trained(start, **options)
    same = {name: array.dtype for name, array in after.items()} == {name: array.dtype for name, array in start.items()}
    return same and not np.array_equal(after["weight"].numpy(), start["weight"].numpy())


ALGORITHMS = (
    row(
        "run it without objectives, or train with sparse-push or sgp",
        lambda: learns(CoordinatePush(density=0.5), "exponential"),
        lambda: (
            averages(CoordinatePush(density=0.5), "exponential")
            and learns(SparsePush(density=0.5), "exponential")
            and learns({"name": "sgp"}, "exponential")
        ),
    ),
    row("it while runs converge", lambda: learns(cold("auto")), lambda: near(ended(cold(largest_step()))) < 0.1),
    row(
        "Give a number in (0, 1], or find one with fedcomp.gossip.tuning",
        lambda: learns(pushed(), "exponential"),
        lambda: learns(pushed(gamma=0.2), "exponential") and learns(tuned(), "exponential"),
    ),
    row(
        "use a static graph ({}) or an algorithm for graphs that change: sgp, or sparse-push with estimates='edge'",
        lambda: learns(everywhere(), "one-peer"),
        lambda: (
            all(
                learns(everywhere(), graph, 30)
                for graph in ("ring", "torus", "complete", "directed-ring", "exponential")
            )
            and learns({"name": "sgp"}, "one-peer")
            and learns(everywhere(estimates="edge"), "one-peer")
        ),
    ),
    row(
        "Lower the learning rate or the consensus step gamma",
        lambda: learns(choco(lr=1e154), watch=False),
        lambda: learns(choco(lr=0.1)) and shaken(0.1),
    ),
    row(
        "a node does not know the graph; use fitted(graph)",
        lambda: sent_by(PowerGossip(rate="auto")),
        lambda: sent_by(PowerGossip(rate="auto").fitted(topology_of("ring", N))) and learns(PowerGossip(rate="auto")),
    ),
    row(
        "Let the scale fall more slowly (a larger rho), begin with a larger one, or let it adapt (scale='zoom')",
        lambda: learns(one_bit()),
        lambda: learns(one_bit(rho=0.95)) and learns(one_bit(s0=20.0)) and learns(one_bit(scale="zoom")),
    ),
    row("allow more patience, and restart", lambda: silent_at_first(patience=2), lambda: silent_at_first(patience=5)),
    row("it leave in an iteration in which it has one", lambda: left(View(0, 0)), lambda: left(View(0, 1, {1: 0.5}))),
    row(
        "its own share must be positive: give less than 1 in all",
        lambda: pushes("edges:0>1=0.5,0>2=0.5,1>2=0.3,2>0=0.3"),
        lambda: pushes("edges:0>1=0.4,0>2=0.5,1>2=0.3,2>0=0.3"),
    ),
)


ESTIMATES = (
    row(
        "holds for one row only. Keep single copies (copies=True), or restart",
        lambda: heard((0.5, 0.25), copies=False),
        lambda: heard((0.5, 0.25), copies=True) and heard((0.5, 0.25), copies=False, restart=True),
    ),
    row(
        "which cannot replace a part of a sum; restart, or keep copies=True",
        lambda: heard((0.5, 0.5), copies=False, whole=True),
        lambda: (
            heard((0.5, 0.5), copies=False, whole=True, restart=True) and heard((0.5, 0.5), copies=True, whole=True)
        ),
    ),
    row("open_estimates first, with the same kind of streams", lambda: along(edges=False), lambda: along(edges=True)),
)


RUNS = (
    row(
        "closing iterations are for push-sum algorithms; leave it at 0",
        lambda: Gossip(choco(), Ring(4), skew_rounds=3),
        lambda: Gossip(choco(), Ring(4), skew_rounds=0),
    ),
    row(
        "has nothing to learn from: write app = fc.client(app, fc.gossip_node(...))",
        lambda: fit(strategy("choco", patience=1), grid(client_app([compression()])), model(), 1, timeout=9),
        lambda: np.any(trained()["weight"].numpy()),
    ),
    row(
        "vertices; leave nodes out",
        lambda: strategy("choco", topology=Ring(4), nodes=5),
        lambda: trained(topology=Ring(4)) == trained(topology="ring", nodes=4),
    ),
    row(
        "set dtype='float64', or convert the model to float32",
        lambda: moves(with_type("float64")),
        lambda: moves(with_type("float64"), dtype="float64") and moves(with_type("float32")),
    ),
)


ROWS: tuple[Row, ...] = (*ALGORITHMS, *ESTIMATES, *RUNS)
