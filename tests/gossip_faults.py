"""What the tests of the mailbox protocol share: cheap objectives, faults, and an account of all mass there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Algorithm, GossipMessage, Gradient, Multicast, Outbox, Real, State, View
from fedcomp.gossip.central import GossipOutcome, SimulatedNodes, SimulationSettings, simulate
from fedcomp.gossip.node import NodeMemory
from fedcomp.gossip.relay import Relay
from fedcomp.gossip.topology import topology_of
from fedcomp.layout import Layout
from fedcomp.rng import Key

FAULTS = {
    "silent": 0.08,
    "raise": 0.08,
    "raise_after": 0.08,
    "lost_reply": 0.08,
    "duplicate": 0.08,
    "late_duplicate": 0.1,
}
"""Every kind but the loss of a node's state."""


@dataclass
class Quadratic:
    """The gradient of ``‖z - centre‖² / 2``, with noise from the key."""

    centre: Real
    noise: float = 0.1
    drift: Real | None = None
    calls: int = 0

    def gradient(self, z: Real, key: Key) -> Real:
        self.calls += 1
        return np.asarray(z - self.centre + self.noise * (key.uniform(z.size) - 0.5), z.dtype)

    def change(self) -> Real | None:
        return self.drift


def vectors(n: int, d: int, dtype: str = "float64", seed: int = 0) -> list[Real]:
    """Return one vector per node, uniform in [-1, 1)."""
    return [(2.0 * Key(seed, "start", partition=i).uniform(d) - 1.0).astype(dtype) for i in range(n)]


def same_models(left: Mapping[int, Real], right: Mapping[int, Real]) -> bool:
    """Whether two runs ended with the same bits."""
    return left.keys() == right.keys() and all(left[i].tobytes() == right[i].tobytes() for i in left)


def same_states(left: Mapping[int, State], right: Mapping[int, State]) -> bool:
    """Whether two runs ended with the same states, bit for bit."""
    return left.keys() == right.keys() and all(
        left[i].keys() == right[i].keys() and all(left[i][k].tobytes() == right[i][k].tobytes() for k in left[i])
        for i in left
    )


@dataclass
class Mass:
    """All (x, w) of a push-sum run at one moment: what every node would hold if all messages arrived now.

    Messages in boxes, in unanswered instructions that were not carried out, and in answers that the relay has not got;
    messages on their way back. Of a node that carried its instruction out but could not say so, that instruction's
    inbox is in its state.
    """

    algorithm: Algorithm
    layout: Layout
    starts: Sequence[Real]
    common: Real | None = None
    seen: list[tuple[float, Real]] = field(default_factory=list)

    def __call__(self, relay: Relay, nodes: SimulatedNodes) -> None:
        rounds = relay.report.rounds
        if rounds < 40 or rounds % 16 == 0 or relay.finishing:
            self.seen.append(self.total(relay, nodes))

    def total(self, relay: Relay, nodes: SimulatedNodes) -> tuple[float, Real]:
        box = relay.outstanding.mailbox
        there = sorted(relay.nodes.members | relay.nodes.departing)
        waiting: dict[int, list[GossipMessage]] = {i: [] for i in there}
        back: dict[int, list[GossipMessage]] = {i: [] for i in there}
        states: dict[int, State] = {}
        for i in there:
            entry, memory = relay.outstanding.open.get(i), nodes.memories.get(i)
            done = entry is None or (memory is not None and memory.serial == entry.instruction.serial)
            if entry is not None and not done:
                waiting[i] += entry.instruction.inbox
                back[i] += entry.instruction.returned
            states[i] = self._state(i, entry, memory, done)
            waiting[i] += [parcel.message for parcel in box.look(i)]
            back[i] += box.look_returned(i)
        for i, entry in sorted(relay.outstanding.open.items()):
            memory = nodes.memories.get(i)
            if memory is None or memory.serial != entry.instruction.serial:
                continue
            for multicast in memory.answer.multicasts:
                for to in multicast.destinations:
                    message = GossipMessage(i, to, multicast.payload)
                    lost = to in box.broken(i) and to not in entry.instruction.view.resync
                    if to in relay.nodes.members and not lost:
                        waiting[to].append(message)
                    else:
                        back[i].append(message)
        w, x = 0.0, np.zeros(self.layout.size)
        for i in there:
            inbox = sorted(waiting[i], key=lambda message: message.source)
            state = self.algorithm.receive(states[i], inbox)
            if back[i]:
                state = self.algorithm.take_back(state, back[i])
            w += float(state["w"])
            x += state["x"]
        return w, x

    def _state(self, i: int, entry: Any, memory: NodeMemory | None, done: bool) -> State:
        start = "" if entry is None or done else entry.instruction.start
        if start == "empty":
            return self.algorithm.join(self.starts[i], self.layout)
        if memory is None or start == "common":
            return self.algorithm.init(self.starts[i], self.layout, common=self.common)
        return memory.state

    def drift(self) -> tuple[float, float]:
        """Return how far the sums of w and of x ever were from what they were at first."""
        w0, x0 = self.seen[0]
        return (
            max(abs(w - w0) for w, _ in self.seen),
            max(float(np.abs(x - x0).max()) for _, x in self.seen),
        )


def both(*hooks: Callable[[Relay, SimulatedNodes], None]) -> Callable[[Relay, SimulatedNodes], None]:
    """Return a hook that calls all of ``hooks``."""

    def call(relay: Relay, nodes: SimulatedNodes) -> None:
        for hook in hooks:
            hook(relay, nodes)

    return call


class Courier(Algorithm):
    """Averages nothing: every message has a number of its own, and the state remembers what became of each.

    ``"got"`` and ``"back"`` hold rows (source, destination, number) of messages that were applied and that came back,
    in their order. Numbers grow along an edge.
    """

    name: ClassVar[str] = "courier"
    directed = time_varying = asynchronous = True

    def get_config(self) -> dict[str, Any]:
        return {}

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        none = np.zeros((0, 3), np.int64)
        return {"x": model, "got": none, "back": none, "sent": none}

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        rows = [
            (message.source, message.destination, int.from_bytes(message.payload, "little")) for message in messages
        ]
        return {**state, "got": _append(state["got"], rows)}

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        if gradient is not None:
            gradient(state["x"])
        rows = [(view.node, to, view.iteration) for to in view.column]
        multicasts = tuple(Multicast((to,), view.iteration.to_bytes(12, "little")) for to in view.column)
        return {**state, "sent": _append(state["sent"], rows)}, multicasts

    def take_back(self, state: State, messages: Sequence[GossipMessage]) -> State:
        rows = [
            (message.source, message.destination, int.from_bytes(message.payload, "little")) for message in messages
        ]
        return {**state, "back": _append(state["back"], rows)}

    def model(self, state: State) -> Real:
        return state["x"]


def _append(rows: Any, more: list[tuple[int, int, int]]) -> Any:
    return np.concatenate([rows, np.array(more, np.int64).reshape(-1, 3)])


N, D = 6, 16
"""Nodes and elements of most runs."""
LAYOUT = Layout.flat(D)
ZERO = np.zeros(D)
LOSS = {"silent": 0.1, "lost_reply": 0.1}

SYNCHRONOUS: list[dict[str, Any]] = [
    {"name": "cold", "lr": 0.3, "gamma": 0.5, "digest_every": 1},
    {"name": "dyna-cold", "lr": 0.3},
    {"name": "choco", "lr": 0.1, "gamma": 0.2, "momentum": 0.5},
    {"name": "lead", "lr": 0.3},
    {"name": "beer", "lr": 0.1},
    {"name": "nids", "lr": 0.3},
    {"name": "gradient-tracking", "lr": 0.1},
    {"name": "dpsgd", "lr": 0.1},
    {"name": "deepsqueeze", "lr": 0.1},
    {"name": "power-gossip", "lr": 0.1},
]
EDGES: dict[str, Any] = {"name": "sparse-push", "density": 0.5, "gamma": 0.6, "digest_every": 1}
SPREAD: dict[str, Any] = {**EDGES, "estimates": "broadcast"}


def name_of(config: Any) -> str:
    return f"{config['name']}-{config['estimates']}" if "estimates" in config else str(config["name"])


def average(config: dict[str, Any], graph: str, iterations: int, **options: Any) -> tuple[GossipOutcome, Mass]:
    """Average starting points without gradients; the account is taken before every round."""
    algorithm = get_algorithm(config)
    n = options.pop("n", N)
    starts = options.pop("starts", vectors(n, D))
    mass = Mass(algorithm, LAYOUT, starts, np.zeros_like(starts[0]))
    before = options.pop("before", None)
    outcome = simulate(
        algorithm,
        topology_of(graph, n, 0),
        None,
        starts,
        iterations,
        layout=LAYOUT,
        seed=0,
        settings=SimulationSettings(
            common=np.zeros_like(starts[0]), before=both(mass, before) if before else mass, **options
        ),
    )
    return outcome, mass


def learn(config: dict[str, Any], graph: str, iterations: int, dtype: str = "float32", **options: Any) -> GossipOutcome:
    """Train on quadratics with different optima, noisy gradients."""
    locals = options.pop("locals", [Quadratic(centre) for centre in vectors(N, D, dtype)])
    return simulate(
        get_algorithm(config),
        topology_of(graph, N, 0),
        locals,
        np.zeros(D, dtype),
        iterations,
        layout=LAYOUT,
        seed=0,
        settings=SimulationSettings(**options),
    )


def error(outcome: GossipOutcome, mean: Real) -> float:
    return max(float(np.abs(model - mean).max()) for model in outcome.models.values())
