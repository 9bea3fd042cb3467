"""What the tests of the mailbox protocol share: cheap objectives, faults, and an account of all mass there is."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Algorithm, GossipMessage, Gradient, Multicast, Outbox, Real, State, View
from fedcomp.gossip.topology import topology_of
from fedcomp.gossip_simulation import GossipOutcome, Simulation, SimulationSettings, simulate
from fedcomp.layout import Layout
from fedcomp.mailbox import Mailbox, Post
from fedcomp.program import Ask
from fedcomp.rng import Key
from fedcomp.systems.gossip import RETURNED, Course, state_of, turns_of

FAULTS = {"silent": 0.06, "crash": 0.08, "lost": 0.12, "twice": 0.18, "stale": 0.06}
"""Every kind but the loss of a node's memory, and answers that come in the next exchange."""


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


@dataclass
class Poison(Quadratic):
    """Gradients that are not finite in some iterations."""

    times: Container[int] = range(4, 1000)

    def gradient(self, z: Real, key: Key) -> Real:
        return super().gradient(z, key) * (np.nan if key.round in self.times else 1.0)


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

    A node counts by its last answer: an ask that is open has not happened.
    """

    seen: list[tuple[float, Real]] = field(default_factory=list)
    history: dict[tuple[int, int], State] = field(default_factory=dict)

    def __call__(self, run: Simulation) -> None:
        total, rounds = self.total(run), run.report.rounds
        if rounds < 40 or rounds % 16 == 0:
            self.seen.append(total)

    def total(self, run: Simulation) -> tuple[float, Real]:
        for node, client in run.local.clients.items():
            self.history[node, turns_of(client.memory)] = state_of(client.memory)
        course, mailbox = run.course, run.local.mailbox
        asks = {node: stamped.ask for node, stamped in mailbox.asked.items()}
        there = sorted(course.members | course.departing)
        found = [self.of(run, node, asks.get(node), course, mailbox) for node in there]
        return sum(w for w, _ in found), np.sum([x for _, x in found], axis=0)

    def of(
        self, run: Simulation, node: int, ask: Ask | None, course: Course, mailbox: Mailbox, *, inbox: bool = True
    ) -> tuple[float, Real]:
        """Return what a node holds, with what comes back to it, and with the messages that wait for it."""
        algorithm, model = run.system.algorithm, run.local.data[node].model
        usual = "" if course.turns else "common"
        begins = course.starts.get(node, usual) if ask is None else ask.say.start
        if begins:
            held = algorithm.join(model, LAYOUT) if begins == "empty" else algorithm.init(model, LAYOUT, common=ZERO)
        else:
            held = self.history[node, course.turns[node] - (ask is not None)]
        posts = sorted((*(ask.mail if ask else ()), *mailbox.waiting.get(node, ())), key=lambda post: post.source)
        if inbox:
            held = algorithm.receive(held, [post_of(p, node) for p in posts if not p.name.startswith(RETURNED)])
        back = [GossipMessage(node, p.source, p.data) for p in posts if p.name.startswith(RETURNED)]
        held = algorithm.take_back(held, back) if back else held
        return float(held["w"]), held["x"]

    def drift(self) -> tuple[float, float]:
        """Return how far the sums of w and of x ever were from what they were at first."""
        w0, x0 = self.seen[0]
        return (
            max(abs(w - w0) for w, _ in self.seen),
            max(float(np.abs(x - x0).max()) for _, x in self.seen),
        )


def post_of(post: Post, node: int) -> GossipMessage:
    return GossipMessage(post.source, node, post.data)


def both(*hooks: Callable[[Simulation], None]) -> Callable[[Simulation], None]:
    """Return a hook that calls all of ``hooks``."""

    def call(run: Simulation) -> None:
        for hook in hooks:
            hook(run)

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
LOSS = {"silent": 0.1, "lost": 0.1}

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
    mass = Mass()
    before = options.pop("before", None)
    outcome = simulate(
        algorithm,
        topology_of(graph, n, 0),
        None,
        starts,
        iterations,
        layout=LAYOUT,
        seed=0,
        settings=SimulationSettings(before=both(mass, before) if before else mass, **options),
    )
    return outcome, mass


def learn(config: dict[str, Any], graph: str, iterations: int, dtype: str = "float32", **options: Any) -> GossipOutcome:
    """Train on quadratics with different optima and, unless ``noise`` is 0, noisy gradients."""
    noise = options.pop("noise", Quadratic.noise)
    locals = options.pop("locals", [Quadratic(centre, noise) for centre in vectors(N, D, dtype)])
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
