"""Whole decentralised runs in one process: :class:`fedcomp.systems.gossip.Gossip` on the in-memory driver.

The same program and the same nodes as over a network, so the same trajectory, bit for bit, for the same seeds. Faults
can be injected where a network would have them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import numpy as np

from fedcomp.codecs import State
from fedcomp.errors import ConfigError, StateError
from fedcomp.gossip.base import Algorithm, Real
from fedcomp.gossip.events import RunReport
from fedcomp.gossip.topology import Topology
from fedcomp.gossip.traffic import GossipTraffic
from fedcomp.gossip.tuning import DivergenceWatch, Observer
from fedcomp.layout import Layout
from fedcomp.local import Local
from fedcomp.program import Me
from fedcomp.rng import Key
from fedcomp.systems.gossip import Arrays, Course, Gossip, Learnt, state_of, waiting

KINDS: Final = ("silent", "crash", "lost", "late", "twice", "stale", "wiped")
"""What can happen to an ask, beside nothing (``""``); see :class:`fedcomp.local.Local`."""

Faults = Callable[[int, int], str]
"""``faults(node, attempt)``: one of :data:`KINDS`, or ``""``; ``attempt`` counts the exchanges, 1, 2, ..."""


@dataclass(frozen=True)
class FaultPlan:
    """Random faults, the same in every run of the same seed.

    Parameters
    ----------
    seed : int
    rates : mapping of str to float
        The probability of every kind; together at most 1.
    until : int, optional
        No faults after this exchange.

    Raises
    ------
    ConfigError
        For an unknown kind, or values that are not probabilities.

    Examples
    --------
    >>> faults = FaultPlan(1, {"silent": 0.5, "lost": 0.25}, until=100)
    >>> [faults(node, 1) for node in range(4)] == [faults(node, 1) for node in range(4)]
    True
    >>> faults(0, 101)
    ''
    """

    seed: int
    rates: Mapping[str, float]
    until: int | None = None

    def __post_init__(self) -> None:
        unknown = set(self.rates) - set(KINDS)
        if unknown or min(self.rates.values(), default=0.0) < 0.0 or sum(self.rates.values()) > 1.0:
            raise ConfigError(f"rates={dict(self.rates)} are not valid: probabilities of {KINDS}, together at most 1")

    def __call__(self, node: int, attempt: int) -> str:
        """Return what happens to the ask of ``node`` in exchange ``attempt``."""
        if self.until is not None and attempt > self.until:
            return ""
        # By attempt and node: a fault does not depend on what happened to the other nodes, or in other exchanges.
        drawn = float(Key(self.seed, "gossip/faults", attempt, node).uniform(1)[0])
        for kind, rate in self.rates.items():
            # One draw against the cumulated rates: at most one fault befalls an ask.
            drawn -= rate
            if drawn < 0.0:
                return kind
        return ""


class LocalData(Protocol):
    """A node's own data; :class:`fedcomp.gossip.local.FlatObjective` is one."""

    def gradient(self, z: Real, key: Key) -> Real:
        """Return the (stochastic) gradient at ``z``, same shape and dtype; ``key`` chooses the batch."""
        ...

    def change(self) -> Real | None:
        """Return how the forward pass of the last :meth:`gradient` moved parts of the model that follow no gradient
        (running statistics), shape ``(d,)``; None when there are none."""
        ...


@dataclass(frozen=True)
class _Here:
    """The contents of a node in this process."""

    model: Real
    local: LocalData | None

    @property
    def learns(self) -> bool:
        return self.local is not None

    def start(self, me: Me, dtype: str) -> tuple[Real, Arrays]:
        return self.model, {}

    def learn(self, me: Me, z: Real, own: Arrays, key: Key) -> Learnt:
        assert self.local is not None
        return Learnt(self.local.gradient(z, key), self.local.change())

    def evaluate(self, me: Me, z: Real, own: Arrays) -> Mapping[str, float]:
        return {}


@dataclass(frozen=True, slots=True)
class GossipOutcome:
    """The result of a run.

    Attributes
    ----------
    models : dict of int to ndarray
        The final model of every member.
    states : dict of int to State
    curve : list of (int, Any)
        Iterations begun, and what ``observe`` returned; the last one is of the final models.
    traffic : GossipTraffic
    report : RunReport
    last : dict of int to State
        Final states, including the last ones of nodes that left or were excluded.
    """

    models: dict[int, Real]
    states: dict[int, State]
    curve: list[tuple[int, Any]]
    traffic: GossipTraffic
    report: RunReport
    last: dict[int, State] = field(repr=False)


@dataclass(frozen=True)
class SimulationSettings:
    """Settings of :func:`simulate`, apart from the algorithm and its data.

    Parameters
    ----------
    faults : Faults, optional
        For example a :class:`FaultPlan`.
    skew_rounds : int or "auto"
        Closing iterations without gradients, in which models travel whole (push-sum only). ``"auto"``: as many as the
        graph needs to average.
    patience : int
        See :class:`fedcomp.systems.gossip.Gossip`.
    members : collection of int, optional
        The initial members; default: every vertex.
    watch : Observer or bool
        Gets the nodes' figures of every iteration and ends the run by raising Diverged; True: a
        :class:`~fedcomp.gossip.tuning.DivergenceWatch`, False: nobody.
    every : int
        Call ``observe`` each time so many iterations are complete, and before the first; 0: only at the end.
    observe : callable, optional
        ``observe(iterations complete, models by node)``; what it returns goes into the curve. Observing never changes a
        run. While faults keep a node from answering, its model is missing.
    before : callable, optional
        Is called with the :class:`Simulation` before every round: to let nodes leave and join.
    """

    faults: Faults | None = None
    skew_rounds: int | Literal["auto"] = 0
    patience: int = 5
    members: Collection[int] | None = None
    watch: Observer | bool = True
    every: int = 0
    observe: Callable[[int, Mapping[int, Real]], Any] | None = None
    before: Callable[[Simulation], None] | None = None


class Simulation:
    """A run under way.

    Parameters
    ----------
    As of :func:`simulate`.

    Attributes
    ----------
    system : Gossip
    local : Local
        The driver: memories, mailbox, faults.
    present : set of int
        Who can be reached; a node that is no member joins once it answers.
    traffic, report : GossipTraffic, RunReport
        So far.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        topology: Topology,
        locals: Sequence[LocalData | None] | None,
        starts: Real | Sequence[Real],
        *,
        layout: Layout,
        seed: int,
        settings: SimulationSettings | None = None,
    ) -> None:
        how = self.settings = settings or SimulationSettings()
        n, one = topology.n, isinstance(starts, np.ndarray)
        if not one and len(starts) != n:
            raise ConfigError(
                f"{len(starts)} models to start with; expected one for each of {n} nodes, or a single one"
            )
        models = [starts] * n if isinstance(starts, np.ndarray) else list(starts)
        self.system = Gossip(
            algorithm,
            topology,
            models[0].dtype.name,
            unlike=any(not np.array_equal(model, models[0]) for model in models),
            patience=how.patience,
            skew_rounds=topology.averaging_rounds() if how.skew_rounds == "auto" else how.skew_rounds,
        )
        self.present = set(range(n)) if how.members is None else set(how.members)
        if not self.present or not self.present <= set(range(n)):
            raise ConfigError(f"members {how.members} are not valid: vertices of a graph of {n}, at least one")
        self.local = Local(
            self.system,
            layout,
            np.zeros(layout.size, np.float32),
            lambda number, node, start: start,
            lambda node: 1.0,
            n,
            seed,
            data={i: _Here(models[i], None if locals is None else locals[i]) for i in range(n)},
            fault=lambda number, node, exchange: how.faults(node, self.local.sequence) if how.faults else "",
        )
        self.traffic, self.report = GossipTraffic(), RunReport()
        self._watch: Observer | None = DivergenceWatch() if how.watch is True else (how.watch or None)
        self.course = Course(members=set(self.present))

    def step(self, number: int, *, last: bool = False) -> None:
        """Run one round; with ``last`` what closes the run.

        Raises
        ------
        Diverged, Saturated
            When the iterates grow, are not finite, or leave a given scale.
        """
        program = self.system.closing if last else None
        try:
            self.local.step(number, sorted(self.present), program)
        except StateError as error:
            why = [reason for reasons in self.local.refused.values() for reason in reasons]
            # What a node says is the cause, where nodes are gone because they break.
            if not why:
                raise
            raise StateError(f"{error}. Node {why[0]}") from error
        told = self.local.told
        self.course = told["course"]
        self.traffic.add(told["traffic"])
        self.report.add(told)
        if self._watch is not None:
            self.report.watched(self._watch, told["figures"])

    @property
    def members(self) -> tuple[int, ...]:
        """Who takes part, ascending."""
        return tuple(sorted(self.course.members))

    def leave(self, node: int) -> None:
        """Let a member leave in good order with its next turn."""
        self.local.state = self.system.leave(self.local.state, node)

    def join(self, node: int) -> None:
        """Let a node that is no member enter with the next round and a new state."""
        self.local.state = self.system.join(self.local.state, node)
        self.present.add(node)

    def models(self) -> dict[int, Real]:
        """Return the models of all members that have answered, after the messages that wait; nothing changes.

        Of a synchronous run they are of one iteration; before the first one they are what the nodes begin with.
        """
        run, local = self.course, self.local
        if not run.turns:
            return {node: local.data[node].model for node in sorted(run.members)}
        found: dict[int, Real] = {}
        for node in sorted(run.members - local.mailbox.asked.keys() - run.starts.keys()):
            ask = self.system.question(run, node, () if run.torn else waiting(local.mailbox, node))
            me = Me(node, run.iteration, local.seed, local.layout, lambda: local.model, _no_training, local.data[node])
            _, answer = self.system.client(dict(local.client(node).memory), ask, me)
            if "model" in answer.frames:
                found[node] = np.frombuffer(answer.frames["model"], self.system.dtype)
        return found


def _no_training(*args: object) -> Any:
    raise AssertionError("nothing trains where a model is looked at")


def simulate(
    algorithm: Algorithm,
    topology: Topology,
    locals: Sequence[LocalData | None] | None,
    starts: Real | Sequence[Real],
    iterations: int,
    *,
    layout: Layout,
    seed: int,
    settings: SimulationSettings | None = None,
) -> GossipOutcome:
    """Run an algorithm on a graph.

    Parameters
    ----------
    algorithm, topology : Algorithm, Topology
    locals : sequence of LocalData, or None
        By node; None, as a whole or for one node: no gradients.
    starts : ndarray, shape (d,), or sequence of ndarray
        One model for all, or one each, of which nodes then know nothing of each other: float32 or float64.
    iterations : int
        Iterations with gradients.
    layout : Layout
        The model's.
    seed : int
        The run's.
    settings : SimulationSettings, optional
        Faults, observers, and how long the nodes wait for each other.

    Raises
    ------
    ConfigError
        For what cannot be run.
    Diverged, Saturated
        When the iterates grow, are not finite, or leave a given scale.
    """
    run = Simulation(algorithm, topology, locals, starts, layout=layout, seed=seed, settings=settings)
    how, curve = run.settings, list[tuple[int, Any]]()
    for number in range(1, iterations + 2):
        done = number - 1
        ends = done == iterations and not run.system.skew_rounds
        if how.observe is not None and how.every and done % how.every == 0 and not ends:
            curve.append((done, how.observe(done, run.models())))
        if how.before is not None:
            how.before(run)
        run.step(number, last=done == iterations)
    states = {node: state_of(run.local.client(node).memory) for node in sorted(run.course.members)}
    models = {node: algorithm.model(state) for node, state in states.items()}
    if how.observe is not None:
        total = iterations + run.system.skew_rounds
        curve.append((total, how.observe(total, models)))
    last = {node: state_of(client.memory) for node, client in run.local.clients.items()}
    return GossipOutcome(models, states, curve, run.traffic, run.report, last)
