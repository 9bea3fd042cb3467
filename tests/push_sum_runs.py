"""Push-sum runs of a few nodes in one process, with messages delivered by hand: what the tests of the family share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from gossip_problems import largest

from fedcomp.gossip.base import Algorithm, Real, State, View, deliver
from fedcomp.gossip.topology import Topology
from fedcomp.layout import Layout
from fedcomp.rng import Key

UNBALANCED = "edges:0>1,0>2,0>3,1>2,2>3,3>4,4>5,5>0,6>0,7>6,5>7,2>7,4>2"
"""A static digraph on 8 nodes whose in-degrees are 1 to 3, so that weights settle away from 1."""

Views = Callable[[int, int], View]


def starts(n: int, d: int, dtype: str = "float64", seed: int = 0) -> list[Real]:
    """Return n different models around 1."""
    return [(1.0 + Key(seed, "start", i).generator().standard_normal(d)).astype(dtype) for i in range(n)]


def opened(algorithm: Algorithm, models: Sequence[Real]) -> dict[int, State]:
    """Return the states of nodes that begin with these models and know nothing of each other but zero."""
    d = models[0].size
    common = np.zeros(d, models[0].dtype)
    return {i: algorithm.init(x, Layout.flat(d), common=common) for i, x in enumerate(models)}


def views_of(topology: Topology, *, seed: int = 0, dense: bool = False, alive: set[int] | None = None) -> Views:
    """Return what each node is told in an iteration."""
    return lambda i, t: topology.view(i, t, seed=seed, alive=alive, directed_algorithm=True, dense=dense)


def audible(topology: Topology, seed: int = 0) -> Views:
    """Return views in which everybody hears everybody, and shares flow along the active edges alone: what broadcast
    estimates need on a graph that changes."""

    def view(i: int, t: int) -> View:
        active = topology.column(i, t)
        others = [j for j in range(topology.n) if j != i]
        return View(i, t, {j: active.get(j, 0.0) for j in others}, dict.fromkeys(others, 0.0), seed)

    return view


def rounds(
    algorithm: Algorithm,
    states: Mapping[int, State],
    views: Views,
    iterations: range,
    gradients: Callable[[int, int], Callable[[Real], Real] | None] = lambda i, t: None,
    watch: Callable[[int, dict[int, State]], None] = lambda t, states: None,
) -> dict[int, State]:
    """Run iterations to their end."""
    now = dict(states)
    for t in iterations:
        outboxes = {}
        for i in now:
            now[i], outboxes[i] = algorithm.send(now[i], gradients(i, t), views(i, t))
        inboxes = deliver(outboxes)
        now = {i: algorithm.receive(state, inboxes[i]) for i, state in now.items()}
        watch(t, now)
    return now


def disagreement(algorithm: Algorithm, states: Mapping[int, State], mean: Real) -> float:
    """Return the largest relative distance of a node's model from ``mean``."""
    return max(float(np.linalg.norm(algorithm.model(s) - mean)) for s in states.values()) / float(np.linalg.norm(mean))


def by_matrices(models: Sequence[Real], topology: Topology, iterations: int, *, k: int, gamma: float) -> Real:
    """Return the de-biased models, shape (n, d), after compressed push-sum written as matrices: no messages, no codecs.
    The one estimate per node is that of its de-biased model."""
    x, w = np.array(models), np.ones(len(models))
    known = np.zeros_like(x)
    for t in range(iterations):
        flows = topology.mixing_matrix(t, symmetric=False)
        flows = gamma * (flows - np.diag(np.diag(flows)))
        known = known + largest(x / w[:, None] - known, k)
        said = w[:, None] * known
        x = x + flows @ said - flows.sum(0)[:, None] * said
        w = w + flows @ w - flows.sum(0) * w
    return x / w[:, None]
