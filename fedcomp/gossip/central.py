"""A whole decentralised run in one process: the relay and all nodes' states, without messages.

The same relay and the same nodes as over a network, so the same trajectory, bit for bit, for the same seeds. Faults can
be injected where a network would have them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from fedcomp.errors import ConfigError
from fedcomp.gossip.base import Algorithm, Real, State, largest_message
from fedcomp.gossip.errors import StaleInstruction
from fedcomp.gossip.events import RelayReport
from fedcomp.gossip.node import NodeData, NodeMemory, handle
from fedcomp.gossip.protocol import Instruction, NodeAnswer
from fedcomp.gossip.relay import Observer, Relay, RelaySettings
from fedcomp.gossip.topology import Topology
from fedcomp.gossip.traffic import GossipTraffic
from fedcomp.layout import Layout
from fedcomp.rng import Key

KINDS: Final = ("silent", "raise", "raise_after", "lost_reply", "duplicate", "late_duplicate", "wiped")
"""What can happen to an instruction, beside nothing (``"none"``).

``silent``: it does not arrive. ``raise``: the node breaks before it has stored anything. ``raise_after``: it breaks
after that. ``lost_reply``: its answer does not arrive. ``duplicate``: it arrives twice, and so does the answer.
``late_duplicate``: after it the one before it arrives once more. ``wiped``: the node has lost its memory.
"""

Faults = Callable[[int, int], str]
"""``faults(node, attempt)``: a kind or ``"none"``; ``attempt`` is the relay's round, 1, 2, ..."""


@dataclass(frozen=True)
class FaultPlan:
    """Random faults, the same in every run of the same seed.

    Parameters
    ----------
    seed : int
    rates : mapping of str to float
        The probability of every kind; together at most 1.
    until : int, optional
        No faults after this round.

    Raises
    ------
    ConfigError
        For an unknown kind, or values that are not probabilities.

    Examples
    --------
    >>> faults = FaultPlan(1, {"silent": 0.5, "lost_reply": 0.25}, until=100)
    >>> [faults(node, 1) for node in range(4)] == [faults(node, 1) for node in range(4)]
    True
    >>> faults(0, 101)
    'none'
    """

    seed: int
    rates: Mapping[str, float]
    until: int | None = None

    def __post_init__(self) -> None:
        unknown = set(self.rates) - set(KINDS)
        if unknown or min(self.rates.values(), default=0.0) < 0.0 or sum(self.rates.values()) > 1.0:
            raise ConfigError(f"rates={dict(self.rates)} are not valid: probabilities of {KINDS}, together at most 1")

    def __call__(self, node: int, attempt: int) -> str:
        """Return what happens to the instruction of ``node`` in round ``attempt``."""
        if self.until is not None and attempt > self.until:
            return "none"
        # By attempt and node: a fault does not depend on what happened to the other nodes, or in other rounds.
        drawn = float(Key(self.seed, "gossip/faults", attempt, node).uniform(1)[0])
        for kind, rate in self.rates.items():
            # One draw against the cumulated rates: at most one fault befalls an instruction.
            drawn -= rate
            if drawn < 0.0:
                return kind
        return "none"


@dataclass(frozen=True, slots=True)
class GossipOutcome:
    """What came of a run.

    Attributes
    ----------
    models : dict of int to ndarray
        The final model of every member.
    states : dict of int to State
    curve : list of (int, Any)
        Iterations begun, and what ``observe`` returned; the last one is of the final models.
    traffic : GossipTraffic
    report : RelayReport
    memories : dict of int to NodeMemory
        Also of nodes that have left or were given up.
    """

    models: dict[int, Real]
    states: dict[int, State]
    curve: list[tuple[int, Any]]
    traffic: GossipTraffic
    report: RelayReport
    memories: dict[int, NodeMemory] = field(repr=False)


class SimulatedNodes:
    """All nodes of a run in one process, and the faults between them and the relay.

    Parameters
    ----------
    algorithm : Algorithm
    locals : sequence of NodeData, or None
        By node; None, as a whole or for one node: no gradients.
    starts : ndarray or sequence of ndarray
        One model for all, or one each.
    layout : Layout
    common : ndarray, optional
        Where estimates begin; needed when nodes start with different models.
    faults : Faults, optional
    """

    def __init__(
        self,
        algorithm: Algorithm,
        locals: Sequence[NodeData | None] | None,
        starts: Real | Sequence[Real],
        layout: Layout,
        *,
        common: Real | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.algorithm, self.layout, self.common, self.faults = algorithm, layout, common, faults
        self.locals, self.starts = locals, starts
        self.memories: dict[int, NodeMemory] = {}
        self._last: dict[int, Instruction] = {}

    def start(self, node: int) -> Real:
        """Return the model a node begins with."""
        return self.starts if isinstance(self.starts, np.ndarray) else self.starts[node]

    def carry_out(
        self, instructions: Mapping[int, Instruction], attempt: int
    ) -> tuple[dict[int, NodeAnswer], dict[int, str]]:
        """Deliver instructions and return the answers that arrive, and why others do not."""
        answers: dict[int, NodeAnswer] = {}
        errors: dict[int, str] = {}
        for node, instruction in instructions.items():
            kind = "none" if self.faults is None else self.faults(node, attempt)
            answer = self._deliver(node, instruction, kind)
            if isinstance(answer, NodeAnswer):
                answers[node] = answer
            else:
                errors[node] = answer
        return answers, errors

    def _deliver(self, node: int, instruction: Instruction, kind: str) -> NodeAnswer | str:
        if kind == "silent":
            return "no connection"
        if kind == "wiped":
            self.memories.pop(node, None)
        answer = self._handle(node, instruction, keep=kind != "raise")
        if kind in ("raise", "raise_after"):
            return f"injected fault {kind!r}"
        if kind == "duplicate":
            again = self._handle(node, instruction)
            # Identity: the second answer must come from memory, not from carrying it out once more.
            if again is not answer:
                raise AssertionError(f"node {node} answered instruction {instruction.serial} twice, differently")
        if self.faults is not None:
            older = self._last.get(node)
            self._last[node] = instruction
            # A repeated instruction is not older than itself, and answering it again is right.
            if kind == "late_duplicate" and older is not None and older.serial < instruction.serial:
                try:
                    self._handle(node, older)
                except StaleInstruction:
                    pass  # nobody waits for the answer to it
                else:
                    raise AssertionError(f"node {node} carried out instruction {older.serial} after a newer one")
        return "the answer was lost" if kind == "lost_reply" else answer

    def _handle(self, node: int, instruction: Instruction, *, keep: bool = True) -> NodeAnswer:
        local = None if self.locals is None else self.locals[node]
        memory, answer = handle(
            self.algorithm,
            self.memories.get(node),
            instruction,
            local,
            self.start(node),
            self.layout,
            common=self.common,
        )
        # A node stores its memory before it answers: what breaks before that leaves it as it was.
        if keep and memory is not None:
            self.memories[node] = memory
        return answer

    def observe(self, relay: Relay) -> dict[int, Real]:
        """Return the models after the inbox that waits; nothing changes."""
        answers = {node: self._handle(node, asked) for node, asked in relay.observe().items()}
        return {node: answer.model for node, answer in answers.items() if answer.model is not None}


@dataclass(frozen=True)
class SimulationSettings:
    """How :func:`simulate` runs, beside what it runs.

    Parameters
    ----------
    common : ndarray, optional
        Where all nodes' estimates of each other begin; give it when the nodes start with different models.
    faults : Faults, optional
        For example a :class:`FaultPlan`.
    skew_rounds, patience, members, watch, session
        See :class:`~fedcomp.gossip.relay.RelaySettings`.
    every : int
        Call ``observe`` each time so many iterations are complete, and before the first; 0: only at the end.
    observe : callable, optional
        ``observe(iterations complete, models by node)``; what it returns goes into the curve. Observing never changes a
        run. While faults keep a node from answering, its model is missing.
    before : callable, optional
        Is called with the relay and the nodes before every round: to let nodes leave and join.
    """

    common: Real | None = None
    faults: Faults | None = None
    skew_rounds: int | Literal["auto"] = 0
    every: int = 0
    observe: Callable[[int, Mapping[int, Real]], Any] | None = None
    before: Callable[[Relay, SimulatedNodes], None] | None = None
    patience: int = 5
    members: Collection[int] | None = None
    watch: Observer | bool = True
    session: str = "central"


def simulate(
    algorithm: Algorithm,
    topology: Topology,
    locals: Sequence[NodeData | None] | None,
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
    locals : sequence of NodeData, or None
        By node; None, as a whole or for one node: no gradients.
    starts : ndarray, shape (d,), or sequence of ndarray
        One model for all, or one each; float32 or float64.
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
        For what cannot be run; also when ``starts`` differ and there is no ``common``.
    Diverged, Saturated
        When the iterates grow, are not finite, or leave a given scale.
    """
    how = SimulationSettings() if settings is None else settings
    every, observe = how.every, how.observe
    _check_starts(starts, topology.n, how.common)
    topology.check(algorithm)
    algorithm = algorithm.fitted(topology)
    nodes = SimulatedNodes(algorithm, locals, starts, layout, common=how.common, faults=how.faults)
    relay = Relay(
        algorithm,
        topology,
        RelaySettings(
            iterations,
            how.session,
            seed,
            largest_message(algorithm, layout.size, nodes.start(0).dtype.itemsize),
            patience=how.patience,
            skew_rounds=how.skew_rounds,
            members=how.members,
            watch=how.watch,
        ),
    )
    curve: list[tuple[int, Any]] = []
    seen = -1
    while not relay.done:
        # ``seen``: with faults, rounds pass in which no new iteration begins.
        due = bool(every) and relay.iteration % every == 0 and not relay.finishing and relay.iteration != seen
        if observe is not None and due and (algorithm.asynchronous or relay.settled):
            seen = relay.iteration
            # Before the first iteration no node has a memory to look at.
            models = nodes.observe(relay) if seen else {node: nodes.start(node) for node in relay.members}
            curve.append((seen, observe(seen, models)))
        if how.before is not None:
            how.before(relay, nodes)
        answers, errors = nodes.carry_out(relay.ask(), relay.report.rounds)
        relay.take(answers, errors)
    states = {node: nodes.memories[node].state for node in relay.members}
    models = {node: algorithm.model(state) for node, state in states.items()}
    if observe is not None:
        total = relay.iterations + relay.skew_rounds
        curve.append((total, observe(total, models)))
    return GossipOutcome(models, states, curve, relay.traffic, relay.report, nodes.memories)


def _check_starts(starts: Real | Sequence[Real], n: int, common: Real | None) -> None:
    if isinstance(starts, np.ndarray):
        return
    if len(starts) != n:
        raise ConfigError(f"{len(starts)} models to start with; expected one for each of {n} nodes, or a single one")
    if common is None and any(not np.array_equal(start, starts[0]) for start in starts):
        raise ConfigError("nodes start with different models: give common=, where their estimates of each other begin")
