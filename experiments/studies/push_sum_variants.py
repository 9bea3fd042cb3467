"""Incorrect variants of compressed push-sum, as a first attempt might write them, compared with the correct one.

:func:`averaged` shows, without gradients, that agreement depends on which quantity is compressed. :func:`trained` shows
that learning depends on every part of the method. All n nodes are rows of one matrix and nothing is sent, since the
question is how far the variants get, not what they cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.experiments.averaging import GROWN
from fedcomp.experiments.decentralised import GossipTraining
from fedcomp.gossip.sparse_push import SparsePush
from fedcomp.gossip.steps import falling
from fedcomp.gossip.vector import flatten, unflatten
from fedcomp.rng import Key

Matrix = NDArray[np.float64]

COMPRESSED: Final = ("models, error kept", "estimates of x", "estimates of z")
"""The quantity that :func:`averaged` compresses; the last one is Sparse-Push."""

TRAINED: Final[Mapping[str, str]] = {
    "local": "no messages at all",
    # The largest entries of the update, with error feedback, travel one hop; models are never mixed.
    "updates": "2 % of the updates, one hop",
    # Error feedback on the model itself.
    "stateless": "2 % of the model, error feedback, no estimates",
    # Sparse-Push; the sender keeps a lost share.
    "kept": "2 %, 10 % of messages lost, shares kept",
    # Sparse-Push; the sender gives its share away even if it does not arrive.
    "naive debit": "2 %, 10 % of messages lost, shares given away",
}
"""Variants of :func:`trained`, and their labels with these shares and losses. "kept" is the correct one."""


def averaged(kind: str, matrices: Sequence[Matrix], values: Matrix, k: int, gamma: float, rounds: int) -> list[float]:
    """Return the relative errors of compressed push-sum after 0, 1, ... rounds, computed on matrices.

    All weights are sent uncompressed. ``kind`` is the quantity that top-k with ``k`` compresses:

    * "models, error kept": ``q = C(x + e)``, ``e = x + e - q``, and x moves by the received q;
    * "estimates of x": ``h = h + C(x - h)``, and x moves by h;
    * "estimates of z": ``h = h + C(x / w - h)``, and x moves by ``w h``.

    Stops when an error exceeds :data:`~fedcomp.experiments.averaging.GROWN`. The matrices repeat.
    """
    if kind not in COMPRESSED:
        raise ValueError(f"no variant {kind!r}; expected one of {COMPRESSED}")
    mean, x, w = values.mean(axis=0), values.copy(), np.ones(len(values))
    known = np.zeros_like(x)
    start = float(np.linalg.norm(values - mean))
    errors = [1.0]
    for t in range(rounds):
        if kind == "models, error kept":
            wanted = x + known
            sent = _largest(wanted, k)
            known = wanted - sent
        elif kind == "estimates of x":
            known = known + _largest(x - known, k)
            sent = known
        else:
            known = known + _largest(x / w[:, None] - known, k)
            sent = w[:, None] * known
        p = matrices[t % len(matrices)]
        x = x + gamma * (p @ sent - sent)
        w = w + gamma * (p @ w - w)
        errors.append(float(np.linalg.norm(x / w[:, None] - mean)) / start)
        # ``not <`` also ends the run at NaN.
        if not errors[-1] < GROWN:
            break
    return errors


def trained(variant: str, plan: GossipTraining) -> dict[str, float]:
    """Train a variant on the task, the graph and the batches of a Sparse-Push training.

    Parameters
    ----------
    variant : str
        One of :data:`TRAINED`.
    plan : GossipTraining
        Its algorithm gives step size, momentum, density and consensus step; its ``drop`` is the fraction of lost
        messages.

    Returns
    -------
    dict
        ``accuracy`` and ``worst`` (mean and minimum over the nodes' models, test split), mean test ``loss`` (infinite
        if the models are not finite), and ``sum_w``, the sum of the push-sum weights.
    """
    n, layout, nodes = plan.topology.n, plan.layout, plan.nodes()
    swarm = Swarm(variant, plan, flatten(plan.start, layout))
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(plan.iterations):
            # As on the nodes: float64 numerators, and gradients at the float32 model.
            z = swarm.models.astype(np.float32)
            keys = [Key(plan.seed, "gossip/gradient", t, i) for i in range(n)]
            swarm.step(t, np.stack([nodes[i].gradient(z[i], keys[i]) for i in range(n)]))
    models, total = swarm.models.astype(np.float32), float(swarm.w.sum())
    if not np.isfinite(models).all():
        return {"accuracy": 0.0, "worst": 0.0, "loss": math.inf, "sum_w": total}
    found = [plan.objectives[i].evaluate(unflatten(models[i], layout)) for i in range(n)]
    return {
        "accuracy": math.fsum(f["accuracy"] for f in found) / n,
        "worst": min(f["accuracy"] for f in found),
        "loss": math.fsum(f["loss"] for f in found) / n,
        "sum_w": total,
    }


class Swarm:
    """All nodes of one variant: numerators x and momentum v of shape (n, d), and weights w of shape (n,)."""

    def __init__(self, variant: str, plan: GossipTraining, start: NDArray[Any]) -> None:
        if variant not in TRAINED or not isinstance(plan.algorithm, SparsePush):
            raise ValueError(f"no variant {variant!r} of {plan.algorithm}; expected one of {list(TRAINED)}")
        self.variant, self.plan, self.algorithm = variant, plan, plan.algorithm
        n, d = plan.topology.n, start.size
        self.gamma = float(self.algorithm.gamma)
        self.k = math.ceil((self.algorithm.density or 0.01) * d)
        self.x: Matrix = np.tile(start.astype(np.float64), (n, 1))
        self.w: Matrix = np.ones(n)
        self.v: Matrix = np.zeros((n, d))
        self.unsent: Matrix = np.zeros((n, d))
        self.known: dict[tuple[int, int], Matrix] = {}
        self.start: Matrix = start.astype(np.float64)

    @property
    def models(self) -> Matrix:
        """z = x / w, shape (n, d)."""
        return self.x / self.w[:, None]

    def step(self, t: int, gradients: NDArray[Any]) -> None:
        """Make one iteration with the gradients at :attr:`models`, shape (n, d)."""
        self.v = self.algorithm.momentum * self.v + gradients
        update = falling(self.algorithm.lr, self.algorithm.decay_over, t) * self.v
        mixing = self.plan.topology.mixing_matrix(t, symmetric=False)
        if self.variant == "updates":
            sent = self._compensated(update)
            # A node applies its own update uncompressed; only the neighbours get a sparse one.
            own = np.diag(mixing)
            self.x = self.x - own[:, None] * update - (mixing - np.diag(own)) @ sent
            return
        self.x = self.x - update
        if self.variant == "stateless":
            sent = self._compensated(self.models)
            # Column i times w_i is the share of its weight that node i pushes to each neighbour.
            flow = self.gamma * (mixing - np.diag(np.diag(mixing))) * self.w
            self.x = self.x + flow @ sent - flow.sum(axis=0)[:, None] * sent
            self.w = self.w + flow.sum(axis=1) - flow.sum(axis=0)
        elif self.variant != "local":
            self._push(t)

    def _compensated(self, rows: Matrix) -> Matrix:
        asked = rows + self.unsent
        sent = _largest(asked, self.k)
        self.unsent = asked - sent
        return sent

    def _push(self, t: int) -> None:
        """Sparse-Push along every edge; the variants differ in the effect of a lost message."""
        # z and the weights of shares are from before all edges, because all nodes send at once.
        x, w, z = self.x.copy(), self.w.copy(), self.models
        for i, j in self.plan.topology.edges(t):
            # Keyed by iteration and edge, so all variants lose the same messages.
            lost = Key(self.plan.seed, "lost", t, i, j).uniform(1)[0] < self.plan.drop
            share = self.gamma * self.plan.topology.column(i, t)[j] * self.w[i]
            # Sparse-Push also starts at the common initial model, which need not be sent.
            known = self.known.get((i, j), self.start)
            if not lost:  # otherwise neither end changes its estimate
                known = self.known[i, j] = known + _largest((z[i] - known)[None], self.k)[0]
                x[j] += share * known
                w[j] += share
            if not lost or self.variant == "naive debit":
                x[i] -= share * known
                w[i] -= share
        self.x, self.w = x, w


def _largest(rows: Matrix, k: int) -> Matrix:
    """Return the rows with all entries except the k largest magnitudes set to zero."""
    out = np.zeros_like(rows)
    # A partition is enough, because the order of the largest does not matter.
    at = np.argpartition(-np.abs(rows), k - 1, axis=1)[:, :k]
    np.put_along_axis(out, at, np.take_along_axis(rows, at, axis=1), axis=1)
    return out
