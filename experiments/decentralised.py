"""Decentralised trainings in one process and their traffic, shared by the gossip experiments.

:func:`train` runs an algorithm on a task and says how good the nodes' models are and what was sent. It is the program
that runs over messages (:mod:`fedcomp.gossip_simulation`): the same messages, the same bits. Convex problems,
whose optimum is known, are in :mod:`fedcomp.experiments.convex`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.experiments.findings import Table
from fedcomp.experiments.kit import Record, table
from fedcomp.experiments.options import TEXT, Option
from fedcomp.gossip.base import Algorithm
from fedcomp.gossip.errors import Diverged
from fedcomp.gossip.local import FlatObjective
from fedcomp.gossip.topology import Topology
from fedcomp.gossip.traffic import GossipTraffic
from fedcomp.gossip.vector import GossipPolicy, flatten, unflatten
from fedcomp.gossip_simulation import FaultPlan, GossipOutcome, Simulation, SimulationSettings, simulate
from fedcomp.layout import DensityPolicy, Layout
from fedcomp.plain import from_fields

if TYPE_CHECKING:
    # Listing the experiments needs no torch: it is imported when one is run.
    from fedcomp.tasks.base import Task
    from fedcomp.tasks.local import LocalObjective

Real = NDArray[Any]


@dataclass(frozen=True)
class GossipTraining:
    """One decentralised training.

    Parameters
    ----------
    task : Task
    algorithm : Algorithm
    topology : Topology
        Node i holds partition i of as many as there are vertices.
    iterations : int
        With gradients.
    seed : int
        Of initial model, batches and compressors.
    batch_size : int
        Examples of a gradient; 0 takes all of a partition.
    dtype : {"float32", "float64"}
        Of models and gradients.
    policy : callable, optional
        What of the model travels whole: :class:`~fedcomp.gossip.vector.GossipPolicy`.
    skew_rounds : int or "auto"
        Closing iterations in which whole models travel; push-sum only.
    every : int
        Iterations between evaluations; 0 evaluates the end only.
    drop : float
        Share of instructions whose node does not answer: half of them it never got, of the others the answer is lost.
    """

    task: Task
    algorithm: Algorithm
    topology: Topology
    iterations: int
    seed: int = 0
    batch_size: int = 32
    dtype: str = "float32"
    policy: DensityPolicy | None = field(default_factory=GossipPolicy)
    skew_rounds: int | Literal["auto"] = 0
    every: int = 0
    drop: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.drop < 1.0:
            raise ConfigError(f"drop={self.drop!r} is not valid: a share of instructions, at least 0 and below 1")

    @cached_property
    def objectives(self) -> tuple[LocalObjective, ...]:
        """Every node's objective, in order of the nodes."""
        from fedcomp.tasks.local import LocalObjective

        n = self.topology.n
        options: dict[str, Any] = {"seed": self.seed, "batch_size": self.batch_size, "dtype": self.dtype}
        return tuple(LocalObjective(self.task, i, n, **options) for i in range(n))

    @cached_property
    def start(self) -> dict[str, Real]:
        """The initial model, which is everybody's."""
        return self.objectives[0].start()

    @cached_property
    def layout(self) -> Layout:
        """Of that model."""
        return Layout.of(self.start, self.policy)

    def nodes(self) -> list[FlatObjective]:
        """Return what nodes compute, with a home of its own for each: its buffers move with its gradients."""
        home = {t.name: self.start[t.name] for t in self.layout.exact}
        return [FlatObjective(objective, self.layout, dict(home)) for objective in self.objectives]

    def run(self, nodes: Sequence[FlatObjective], settings: SimulationSettings) -> GossipOutcome:
        """Simulate; raises what :func:`fedcomp.gossip_simulation.simulate` raises, :class:`Diverged` among it."""
        return simulate(
            self.algorithm,
            self.topology,
            nodes,
            flatten(self.start, self.layout, self.dtype),
            self.iterations,
            layout=self.layout,
            seed=self.seed,
            settings=settings,
        )


def train(plan: GossipTraining) -> Record:
    """Run ``plan`` in this process. A run that diverges is an outcome, not an error.

    Returns
    -------
    Record
        ``points`` of evaluations, all messages of an iteration delivered: ``iteration`` (0 is the initial model),
        ``accuracy`` and ``worst`` (mean and minimum over the nodes' models, whole test split), ``average`` (accuracy of
        the average of the nodes' models), ``loss`` (mean test loss), ``consensus`` (root mean square over nodes of
        ``‖z_i - mean z‖``, relative to ``‖mean z‖``) and ``edge_bytes`` so far. Five of these of the last point, NaN
        and an infinite loss when the run diverged. ``traffic``, a :class:`~fedcomp.gossip.traffic.GossipTraffic`;
        ``invariants``, what the algorithm conserves over all nodes, after the last iteration; ``events``, how often
        something happened beside plain iterations; ``diverged``, why the run was ended, or empty.
    """
    objectives, layout, nodes = plan.objectives, plan.layout, plan.nodes()
    # They outlive a run that ends in an error, so that what was sent until then can be told.
    runs: list[Simulation] = []
    points: list[dict[str, Any]] = []

    def look(iteration: int, models: Mapping[int, Real]) -> None:
        # What stays at home moves with each node's own gradients.
        found = [objectives[i].evaluate({**unflatten(models[i], layout), **nodes[i].at_home()}) for i in sorted(models)]
        # In float64: near consensus the distances are of the size of float32's rounding.
        stack = np.stack([models[node] for node in sorted(models)]).astype(np.float64)
        mean = stack.mean(axis=0)
        averaged = {**unflatten(mean.astype(objectives[0].dtype), layout), **nodes[0].at_home()}
        spread = math.sqrt(float(np.mean(np.sum((stack - mean) ** 2, axis=1))))
        points.append(
            {
                "iteration": iteration,
                "accuracy": math.fsum(f["accuracy"] for f in found) / len(found),
                "worst": min(f["accuracy"] for f in found),
                "average": objectives[0].evaluate(averaged)["accuracy"],
                "loss": math.fsum(f["loss"] for f in found) / len(found),
                # A mean of zero has no relative distance.
                "consensus": spread / (float(np.linalg.norm(mean)) or math.nan),
                # The initial models are looked at before there is a run.
                "edge_bytes": runs[0].traffic.edge_bytes if runs else 0,
            }
        )

    # Both sides of a loss: of one half nothing was done, of the other all of it, and only the answer is missing.
    rates = {"silent": plan.drop / 2, "lost": plan.drop / 2}
    settings = SimulationSettings(
        faults=FaultPlan(plan.seed, rates) if plan.drop else None,
        skew_rounds=plan.skew_rounds,
        every=plan.every,
        observe=look,
        before=runs.append,
        # More than the default: losses in a row must not exclude a node.
        patience=20,
    )
    last = {**dict.fromkeys(("accuracy", "worst", "average", "consensus"), math.nan), "loss": math.inf}
    invariants: Mapping[str, float] = {}
    diverged = ""
    try:
        # Numbers that leave the range are what ends a run that diverges.
        with np.errstate(over="ignore", invalid="ignore"):
            outcome = plan.run(nodes, settings)
        last, invariants = points[-1], plan.algorithm.invariants(outcome.states.values())
    except (Diverged, NonFiniteUpdate) as error:
        diverged = f"{type(error).__name__}: {error}"
    counted = {f.name: getattr(runs[0].report, f.name) for f in fields(runs[0].report)} if runs else {}
    found = {
        **{name: last[name] for name in ("accuracy", "worst", "average", "loss", "consensus")},
        "points": points,
        "traffic": runs[0].traffic if runs else GossipTraffic(),
        "invariants": invariants,
        "events": {name: value if isinstance(value, int) else len(value) for name, value in counted.items()},
        "diverged": diverged,
    }
    return Record(found)


def run(plan: GossipTraining) -> dict[str, Any]:
    """Train; return what :func:`train` returns as plain data, for a sweep."""
    found = train(plan)
    return {**found, "traffic": asdict(found.traffic)}


def traffic_of(record: Record) -> GossipTraffic:
    """Return what was sent in the training of a sweep's record."""
    return from_fields(GossipTraffic, record.traffic)


def per_message(traffic: GossipTraffic, *, headers: bool) -> float:
    """Return the mean bytes of a message on an edge while training, without closing iterations and whole estimates."""
    count = traffic.edge["train"]
    return (count.bytes if headers else count.bodies) / count.messages if count.messages else math.nan


def ratio(traffic: GossipTraffic, dense: GossipTraffic, *, headers: bool = False) -> float:
    """Return how many times smaller a message is than the message of ``dense``, a run that was measured without
    compression."""
    return per_message(dense, headers=headers) / per_message(traffic, headers=headers)


def honest_ratio(traffic: GossipTraffic, dense: GossipTraffic) -> float:
    """Return how many times fewer edge bytes the whole run took than ``dense`` messages on the same edges would have.

    Headers, closing iterations and whole estimates count here; the baseline has headers and no closing iterations.
    """
    total = traffic.edge_bytes
    return traffic.edge["train"].messages * per_message(dense, headers=True) / total if total else math.nan


def _joules(value: str) -> float:
    number = float(value) if value else 0.0
    if not 0.0 <= number < math.inf:
        raise ValueError("expected joules per bit, a finite number of at least 0, or nothing")
    return number


ENERGY_OPTIONS: Final[Mapping[str, Option]] = {
    "energy_tx": Option("", TEXT, "joules per bit sent, of your radio; empty: no energy column", check=_joules),
    "energy_rx": Option("", TEXT, "joules per bit received; empty: no energy column", check=_joules),
}
"""Options of experiments with an energy column. There are no built-in figures."""


@dataclass(frozen=True)
class Energy:
    """Joules per bit as a user gave them; None where nothing was given."""

    sent: float | None = None
    received: float | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Energy:
        """Read the settings of :data:`ENERGY_OPTIONS`.

        Raises
        ------
        ConfigError
            When only one of the two is given.
        """
        given = [str(settings[name]).strip() for name in ENERGY_OPTIONS]
        if any(given) and not all(given):
            raise ConfigError(
                f"energy_tx={given[0]!r} and energy_rx={given[1]!r} do not go together: every message is sent and "
                "received; give both, or neither"
            )
        return cls(*(_joules(value) if value else None for value in given))

    @property
    def per_byte(self) -> float | None:
        """Joules of a byte that is sent once and received once, None without both figures."""
        return None if self.sent is None or self.received is None else 8.0 * (self.sent + self.received)

    def joules(self, traffic: GossipTraffic) -> float | None:
        """Return the energy of all messages on edges, None without both figures."""
        return None if self.sent is None or self.received is None else traffic.energy(self.sent, self.received)


COST_CAPTION: Final = (
    "Edge bytes: every message on every directed edge, headers and closing iterations included. Node bytes: every "
    "distinct message once. Relay bytes: what the star moves, never an algorithm's cost. Overhead: what the "
    "framework's messages hold beside those of the nodes. Times smaller: the body of a message against a dense one; "
    "whole run: all edge bytes against dense messages in the same iterations. Joules: bytes times the joules per bit "
    "that were given; empty when none were."
)


def cost_table(
    title: str,
    first: str,
    runs: Mapping[str, tuple[GossipTraffic, GossipTraffic]],
    energy: Energy | None = None,
    caption: str = "",
) -> Table:
    """Return what runs cost.

    Parameters
    ----------
    first : str
        Heading of the runs' names.
    runs : mapping of str to (GossipTraffic, GossipTraffic)
        By name: what was sent, and what a run with whole models sends on the same graph.
    energy : Energy, optional
    caption : str
        Goes before what the columns mean.
    """
    known = energy or Energy()
    columns: dict[str, Callable[[GossipTraffic, GossipTraffic], Any]] = {
        "message, bytes": lambda own, dense: per_message(own, headers=False),
        "times smaller": ratio,
        "with headers": lambda own, dense: ratio(own, dense, headers=True),
        "edge bytes": lambda own, dense: own.edge_bytes,
        "of them closing": lambda own, dense: own.edge["dense"].bytes,
        "whole run, times fewer": honest_ratio,
        "node bytes": lambda own, dense: own.node_bytes,
        "relay bytes": lambda own, dense: own.relay_bytes,
        "overhead bytes": lambda own, dense: own.overhead or None,
        "joules": lambda own, dense: known.joules(own),
    }
    shown = [{first: name, **{key: cost(*run) for key, cost in columns.items()}} for name, run in runs.items()]
    headings = {name: name for name in (first, *columns)}
    return table(title, headings, shown, caption + COST_CAPTION, optional=("overhead bytes", "joules"))
