"""Near misses of compressed push-sum, trained on the same task: what a first reading of the idea would program.

Four of them, and why they look right (:data:`READINGS`). All n nodes are rows of one matrix here: nothing is sent, as
what is asked is how far they come and not what they cost. Batches are those of
:mod:`fedcomp.experiments.decentralised`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.experiments.findings import Claim
from fedcomp.gossip.local import FlatObjective
from fedcomp.gossip.topology import Topology, topology_of
from fedcomp.gossip.vector import GossipPolicy, flatten, unflatten
from fedcomp.layout import Layout
from fedcomp.rng import Key

Matrix = NDArray[np.float64]

READINGS: Final[Mapping[str, str]] = {
    "local": "no communication",
    "updates": "the largest entries of the update, with error feedback, go one hop; models are never mixed",
    "stateless": "error feedback on the model itself, without estimates",
    "kept": "Sparse-Push; a lost share stays with its sender",
    "naive debit": "Sparse-Push; the sender gives its share away whether it arrives or not",
}

LABELS: Final[Mapping[str, str]] = {
    "local": "no letters at all",
    "updates": "2 % of the updates, one hop",
    "stateless": "2 % of the model, error feedback, no estimates",
    "kept": "2 %, 10 % of letters lost, shares kept",
    "naive debit": "2 %, 10 % of letters lost, shares given away",
}
"""Their names in tables, with the share of entries and the loss they are run with."""


@dataclass(frozen=True)
class Reading:
    """What a reading came to.

    Attributes
    ----------
    accuracy, worst : float
        On the test split, of the nodes' models: mean and minimum.
    loss : float
        Mean test loss; infinite when the models are not finite.
    sum_w : float
        Sum of the push-sum weights.
    """

    accuracy: float
    worst: float
    loss: float
    sum_w: float


@dataclass(frozen=True)
class ReadingCell:
    """One training, as plain data.

    Attributes
    ----------
    name : str
        Unique within the run.
    reading : str
        One of :data:`READINGS`.
    topology, nodes, iterations, seed, task, options
        As of :class:`fedcomp.experiments.decentralised.GossipCell`.
    lr, momentum : float
    decay : bool
        The step size falls to zero along half a cosine.
    batch_size : int
    fraction : float
        Of the entries that would be sent.
    gamma : float
        Consensus step of the readings that have one.
    drop : float
        Share of letters that are lost, of the readings that send shares.
    """

    name: str
    reading: str
    topology: str
    nodes: int
    iterations: int
    seed: int
    task: str = "digits"
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 0.02
    momentum: float = 0.9
    decay: bool = False
    batch_size: int = 32
    fraction: float = 0.02
    gamma: float = 0.05
    drop: float = 0.0

    def run(self) -> Reading:
        """Train."""
        from fedcomp.tasks import get_task
        from fedcomp.tasks.local import LocalObjective

        task = get_task(self.task, **self.options)
        own = [
            LocalObjective(task, i, self.nodes, seed=self.seed, batch_size=self.batch_size) for i in range(self.nodes)
        ]
        start = own[0].start()
        layout = Layout.of(start, GossipPolicy(dense_below=0))
        nodes = [FlatObjective(objective, layout) for objective in own]
        swarm = Swarm(self, topology_of(self.topology, self.nodes, self.seed), flatten(start, layout))
        with np.errstate(over="ignore", invalid="ignore"):
            for t in range(self.iterations):
                z = swarm.models.astype(np.float32)
                swarm.step(t, np.stack([f.gradient(z[i], self._batch(t, i)) for i, f in enumerate(nodes)]))
        models = swarm.models.astype(np.float32)
        if not np.isfinite(models).all():
            return Reading(0.0, 0.0, math.inf, float(swarm.w.sum()))
        found = [own[i].evaluate(unflatten(models[i], layout)) for i in range(self.nodes)]
        return Reading(
            accuracy=math.fsum(f["accuracy"] for f in found) / self.nodes,
            worst=min(f["accuracy"] for f in found),
            loss=math.fsum(f["loss"] for f in found) / self.nodes,
            sum_w=float(swarm.w.sum()),
        )

    def _batch(self, iteration: int, node: int) -> Key:
        return Key(self.seed, "gossip/gradient", iteration, node)


class Swarm:
    """All nodes of one reading: numerators x and momentum v, shape (n, d), weights w, shape (n,)."""

    def __init__(self, cell: ReadingCell, topology: Topology, start: NDArray[Any]) -> None:
        self.cell, self.topology = cell, topology
        n, d = topology.n, start.size
        self.k = math.ceil(cell.fraction * d)
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
        self.v = self.cell.momentum * self.v + gradients
        fall = 0.5 * (1.0 + math.cos(math.pi * t / self.cell.iterations)) if self.cell.decay else 1.0
        update = self.cell.lr * fall * self.v
        mixing = self.topology.mixing_matrix(t, symmetric=False)
        if self.cell.reading == "updates":
            asked = update + self.unsent
            sent = self._largest(asked)
            self.unsent = asked - sent
            own = np.diag(mixing)
            self.x = self.x - own[:, None] * update - (mixing - np.diag(own)) @ sent
            return
        self.x = self.x - update
        if self.cell.reading == "stateless":
            asked = self.models + self.unsent
            sent = self._largest(asked)
            self.unsent = asked - sent
            flow = self.cell.gamma * (mixing - np.diag(np.diag(mixing))) * self.w
            self.x = self.x + flow @ sent - flow.sum(axis=0)[:, None] * sent
            self.w = self.w + flow.sum(axis=1) - flow.sum(axis=0)
        elif self.cell.reading != "local":
            self._push(t)

    def _push(self, t: int) -> None:
        """Sparse-Push along every edge; what a lost letter does is the reading."""
        x, w, z = self.x.copy(), self.w.copy(), self.models
        for i, j in self.topology.edges(t):
            lost = Key(self.cell.seed, "lost", t, i, j).uniform(1)[0] < self.cell.drop
            share = self.cell.gamma * self.topology.column(i, t)[j] * self.w[i]
            known = self.known.get((i, j), self.start)
            if not lost:  # otherwise the estimate of neither end changes
                known = self.known[i, j] = known + self._largest((z[i] - known)[None])[0]
                x[j] += share * known
                w[j] += share
            if not lost or self.cell.reading == "naive debit":
                x[i] -= share * known
                w[i] -= share
        self.x, self.w = x, w

    def _largest(self, rows: Matrix) -> Matrix:
        """Return the rows with all but their k largest entries set to zero."""
        out = np.zeros_like(rows)
        kept = np.argpartition(np.abs(rows), rows.shape[1] - self.k, axis=1)[:, rows.shape[1] - self.k :]
        np.put_along_axis(out, kept, np.take_along_axis(rows, kept, axis=1), axis=1)
        return out


def claims_of_readings(
    values: Mapping[str, float], data: str, dense: float, nodes: int, rounding: float
) -> list[Claim]:
    """Return that the near misses miss: otherwise estimates, mixing and the debit would be for nothing.

    Parameters
    ----------
    values : mapping of str to float
        ``"reading NAME, DATA: accuracy"`` and ``"...: sum of weights"`` of every reading.
    data : str
        As in their names.
    dense : float
        Accuracy of SGP on these data.
    nodes : int
    rounding : float
        What the sum of weights may miss.
    """
    below = [
        Claim(
            f"{LABELS[reading]}, {data}: points below SGP",
            100 * (dense - values[f"reading {reading}, {data}: accuracy"]),
            ">=",
            10.0,
            "goal: what the method needs must be missed where it is left out",
        )
        for reading in ("local", "updates", "stateless")
    ]
    kept, gone = (values[f"reading {reading}, {data}: sum of weights"] for reading in ("kept", "naive debit"))
    source = "theory: a share that is given away and does not arrive is gone, and so is its part of the weights"
    return [
        *below,
        Claim(f"{LABELS['naive debit']}: sum of the weights", gone, "<=", nodes / 2, source),
        Claim(
            f"{LABELS['kept']}: error of the sum of the weights",
            abs(kept - nodes),
            "<=",
            rounding,
            "theory: what did not arrive is the sender's",
        ),
    ]
