"""Two heterogeneous convex problems on a ring, their exact optima, and loops that run gossip algorithms on them.

Every node's objective has an optimum of its own, far from the others', which is what parts exact from inexact methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from fedcomp.gossip.base import Algorithm, GossipMessage, State, View, deliver, messages_of
from fedcomp.layout import Layout
from fedcomp.rng import Key

Vectors = np.ndarray
"""One row per node, shape (n, d), float64."""


@dataclass(frozen=True)
class Problem:
    """f_i of every node by data matrix, targets and ridge; ``kind`` is "logistic" or "squares"."""

    kind: str
    features: np.ndarray
    targets: np.ndarray
    ridge: float
    smoothness: float
    optimum: np.ndarray = field(repr=False)

    @property
    def n(self) -> int:
        return len(self.features)

    @property
    def d(self) -> int:
        return self.features.shape[2]

    @property
    def layout(self) -> Layout:
        return Layout.flat(self.d)

    def without(self, node: int) -> Problem:
        """Return what the other nodes have in common."""
        kept = [i for i in range(self.n) if i != node]
        features, targets = self.features[kept], self.targets[kept]
        optimum = _solve(self.kind, features, targets, self.ridge)
        return replace(self, features=features, targets=targets, optimum=optimum)

    def gradient(self, node: int, x: np.ndarray) -> np.ndarray:
        """Return the full gradient of ``node``'s objective, computed in float64, in the dtype of ``x``."""
        return _gradient(self.kind, self.features[node], self.targets[node], self.ridge, x.astype(float)).astype(
            x.dtype
        )

    def gradients(self, xs: Vectors) -> Vectors:
        return np.stack([self.gradient(i, xs[i]) for i in range(self.n)])

    def error(self, xs: Iterable[np.ndarray]) -> float:
        """Return the distance of all models to the optimum of the sum, relative to its norm (root mean square)."""
        off = np.stack(list(xs)).astype(float) - self.optimum
        return float(np.linalg.norm(off) / np.sqrt(self.n) / np.linalg.norm(self.optimum))


def _gradient(kind: str, a: np.ndarray, b: np.ndarray, ridge: float, x: np.ndarray) -> np.ndarray:
    scores = a @ x
    pull = -b / (1.0 + np.exp(np.minimum(b * scores, 700.0))) if kind == "logistic" else scores - b
    return a.T @ pull / len(b) + ridge * x


def _hessian(kind: str, a: np.ndarray, b: np.ndarray, ridge: float, x: np.ndarray) -> np.ndarray:
    weight = np.ones(len(b))
    if kind == "logistic":
        chance = 1.0 / (1.0 + np.exp(-(a @ x)))
        weight = chance * (1.0 - chance)
    return a.T @ (a * weight[:, None]) / len(b) + ridge * np.eye(len(x))


def _normal(key: Key, *shape: int) -> np.ndarray:
    return key.generator().standard_normal(shape)


def _solve(kind: str, features: np.ndarray, targets: np.ndarray, ridge: float) -> np.ndarray:
    """Return the minimiser of the sum by Newton's method, to a gradient of 1e-13."""
    x = np.zeros(features.shape[2])
    for _ in range(50):
        g = np.mean([_gradient(kind, a, b, ridge, x) for a, b in zip(features, targets, strict=True)], axis=0)
        if np.linalg.norm(g) < 1e-13:
            return x
        h = np.mean([_hessian(kind, a, b, ridge, x) for a, b in zip(features, targets, strict=True)], axis=0)
        x = x - np.linalg.solve(h, g)
    raise AssertionError("Newton's method did not converge")


@lru_cache(maxsize=4)
def problem(kind: str = "logistic", n: int = 10, d: int = 50, kappa: float = 2.8, seed: int = 0) -> Problem:
    """Return a problem whose nodes see different data of different truths; ``kappa`` bounds L/µ of every node."""
    key, m = Key(seed, "problem"), 80
    truths = _normal(key.at(layer=1), n, d)
    shift = _normal(key.at(layer=2), n, 1, d)
    features = _normal(key.at(layer=3), n, m, d) + 0.3 * shift
    scores = np.einsum("imd,id->im", features, truths)
    targets = np.where(scores >= 0, 1.0, -1.0) if kind == "logistic" else scores + _normal(key.at(layer=4), n, m)
    curvature = 0.25 if kind == "logistic" else 1.0
    largest = max(curvature * np.linalg.eigvalsh(a.T @ a / m)[-1] for a in features)
    ridge = largest / (kappa - 1.0)
    return Problem(kind, features, targets, ridge, largest + ridge, _solve(kind, features, targets, ridge))


def ring_weights(n: int) -> np.ndarray:
    """Return Metropolis weights of the undirected ring, shape (n, n)."""
    w = np.zeros((n, n))
    for i in range(n):
        w[i, [(i - 1) % n, i, (i + 1) % n]] = 1.0 / 3.0
    return w


def view_of(weights: np.ndarray, node: int, iteration: int, *, resync: bool = False) -> View:
    """Return what ``node`` is told on an undirected graph; ``resync``: all neighbours get its whole estimate."""
    row = {j: float(weights[node, j]) for j in np.flatnonzero(weights[node]).tolist() if j != node}
    return View(node, iteration, column=row, row=row, resync=frozenset(row if resync else ()))


Harm = Callable[[int, GossipMessage], GossipMessage | None]
Watch = Callable[[int, Sequence[State]], object]


@dataclass
class Ran:
    """What a run left: final states (all messages applied), the error after each iteration, sizes of messages by
    edge."""

    states: list[State]
    errors: np.ndarray
    payloads: dict[tuple[int, int], list[int]]


def run(
    algorithm: Algorithm,
    task: Problem,
    iterations: int,
    *,
    weights: np.ndarray | None = None,
    starts: Sequence[np.ndarray] | None = None,
    states: Sequence[State] | None = None,
    dtype: str = "float64",
    harm: Harm | None = None,
    watch: Watch | None = None,
    begin: int = 0,
    resync: bool = False,
    stop_at: float = 1e8,
) -> Ran:
    """Run ``algorithm`` on all nodes: all begin an iteration, all messages arrive, all finish it.

    ``watch(k, states)`` is called after every iteration; a run whose error passes ``stop_at`` ends early. With
    ``resync`` the first messages carry whole estimates. ``harm(k, message)`` is what arrives in place of a message;
    None: nothing.
    """
    weights = ring_weights(task.n) if weights is None else weights
    if states is None:
        common = np.zeros(task.d, dtype)
        starts = [common] * task.n if starts is None else starts
        states = [algorithm.init(start.astype(dtype), task.layout, common=common) for start in starts]
    now, errors, payloads = list(states), [], {}
    for k in range(begin, begin + iterations):
        inboxes: dict[int, list[GossipMessage]] = {i: [] for i in range(task.n)}
        for i in range(task.n):
            view = view_of(weights, i, k, resync=resync and k == begin)
            now[i], outbox = algorithm.send(now[i], lambda z, i=i: task.gradient(i, z), view)
            for message in messages_of(i, outbox):
                payloads.setdefault((message.source, message.destination), []).append(len(message.payload))
                arrived = message if harm is None else harm(k, message)
                if arrived is not None:
                    inboxes[message.destination].append(arrived)
        now = [algorithm.receive(now[i], inboxes[i]) for i in range(task.n)]
        errors.append(task.error(algorithm.model(s) for s in now))
        if watch is not None:
            watch(k, now)
        if not errors[-1] < stop_at:
            break
    return Ran(now, np.array(errors), payloads)


def gossip(
    algorithm: Algorithm,
    states: Sequence[State],
    views: Callable[[int, int], View],
    iterations: int,
    gradient: Callable[[np.ndarray], np.ndarray] | None = None,
    *,
    begin: int = 0,
    watch: Callable[[int, list[State], list[State]], object] | None = None,
) -> list[State]:
    """Run iterations in which every message arrives; ``watch(k, begun states, finished states)``."""
    now = list(states)
    for k in range(begin, begin + iterations):
        begun = [algorithm.send(state, gradient, views(i, k)) for i, state in enumerate(now)]
        inboxes = deliver({i: outbox for i, (_, outbox) in enumerate(begun)})
        now = [algorithm.receive(state, inboxes[i]) for i, (state, _) in enumerate(begun)]
        if watch is not None:
            watch(k, [state for state, _ in begun], now)
    return now


def views_of(weights: np.ndarray) -> Callable[[int, int], View]:
    """Return what every node is told in an iteration on an undirected graph that stays."""
    return lambda node, k: view_of(weights, node, k)


def slope(errors: np.ndarray, low: float = 1e-9, high: float = 1e-1) -> tuple[float, float]:
    """Return the rate per iteration, exp(slope of the log error), and R² of the line, where ``low < error < high``."""
    found = np.flatnonzero((errors < high) & (errors > low))
    k, y = found.astype(float), np.log(errors[found])
    a, b = np.polyfit(k, y, 1)
    return float(np.exp(a)), float(1.0 - np.var(y - a * k - b) / np.var(y))


def largest(v: Vectors, k: int, dtype: str = "float64") -> Vectors:
    """Return the k entries of largest magnitude of every row, ties to the lowest index, as ``dtype`` carries them."""
    out = np.zeros_like(v)
    for row, into in zip(v, out, strict=True):
        at = np.argsort(-np.abs(row), kind="stable")[:k]
        into[at] = row[at].astype(dtype)
    return out


def nids(task: Problem, weights: np.ndarray, lr: float, iterations: int) -> list[Vectors]:
    """Return x of every iteration of NIDS as its two-step recursion, coded from its formula, first step mixed:
    x¹ = W̃(x⁰ - η g⁰), x^{k+2} = W̃(2x^{k+1} - x^k - η(g^{k+1} - g^k)), W̃ = (I + W)/2."""
    half = (np.eye(task.n) + weights) / 2.0
    old = np.zeros((task.n, task.d))
    g_old = task.gradients(old)
    new, found = half @ (old - lr * g_old), []
    for _ in range(iterations):
        found.append(new)
        g_new = task.gradients(new)
        old, new, g_old = new, half @ (2.0 * new - old - lr * (g_new - g_old)), g_new
    return found
