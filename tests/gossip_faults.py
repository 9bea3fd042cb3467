"""What the tests of the mailbox protocol share: cheap objectives, faults, and an account of all mass there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Algorithm, GossipMessage, Gradient, Multicast, Outbox, Real, State, View
from fedcomp.gossip.topology import topology_of
from fedcomp.gossip_simulation import GossipOutcome, Simulation, SimulationSettings, simulate
from fedcomp.layout import Layout
from fedcomp.mailbox import Post
from fedcomp.program import Ask
from fedcomp.rng import Key
from fedcomp.systems.gossip import RETURNED, state_of, turns_of, waiting

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


def open_asks(run: Simulation) -> dict[int, tuple[Ask, bool]]:
    """Return the asks without an answer, and whether the node has carried them out."""
    return {
        node: (stamped.ask, stamped.ask.say.turn == turns_of(run.local.client(node).memory))
        for node, stamped in run.local.mailbox.asked.items()
    }


@dataclass
class Mass:
    """All (x, w) of a push-sum run at one moment: what every node would hold if all messages arrived now.

    Messages in boxes, in asks that were not carried out, and in answers that did not arrive; messages on their way
    back. Of a node that carried its ask out but could not say so, the mail of that ask is in its state.
    """

    algorithm: Algorithm
    layout: Layout
    seen: list[tuple[float, Real]] = field(default_factory=list)

    def __call__(self, run: Simulation) -> None:
        rounds = run.report.rounds
        if rounds < 40 or rounds % 16 == 0:
            self.seen.append(self.total(run))

    def total(self, run: Simulation) -> tuple[float, Real]:
        course, local = run.course, run.local
        there = sorted(course.members | course.departing)
        mail: dict[int, list[Post]] = {i: [] for i in there}
        states: dict[int, State] = {}
        unanswered = open_asks(run)
        for i in there:
            ask, done = unanswered.get(i, (None, True))
            if ask is not None and not done:
                mail[i] += ask.mail
            states[i] = self._state(run, i, ask, done)
            mail[i] += waiting(local.mailbox, i)
        for i, (ask, done) in sorted(unanswered.items()):
            last = local.client(i).last
            if not done or i not in there:
                continue
            for post in last.answer.post:
                turn = ask.say
                lost = post.to in course.broken.get(i, ()) and post.to not in turn.resync
                if post.to in course.members and not lost:
                    mail[post.to].append(post)
                else:
                    mail[i].append(Post(post.to, i, RETURNED + post.name, post.data))
        w, x = 0.0, np.zeros(self.layout.size)
        for i in there:
            posts = sorted(mail[i], key=lambda post: post.source)
            inbox = [GossipMessage(p.source, i, p.data) for p in posts if not p.name.startswith(RETURNED)]
            back = [GossipMessage(i, p.source, p.data) for p in posts if p.name.startswith(RETURNED)]
            state = self.algorithm.receive(states[i], inbox)
            if back:
                state = self.algorithm.take_back(state, back)
            w += float(state["w"])
            x += state["x"]
        return w, x

    def _state(self, run: Simulation, i: int, ask: Ask | None, done: bool) -> State:
        start = (
            run.course.starts.get(i, "common" if not run.course.turns else "") if ask is None or done else ask.say.start
        )
        model = run.local.data[i].model
        if start == "empty":
            return self.algorithm.join(model, self.layout)
        if start == "common":
            return self.algorithm.init(model, self.layout, common=np.zeros_like(model))
        return state_of(run.local.client(i).memory)

    def drift(self) -> tuple[float, float]:
        """Return how far the sums of w and of x ever were from what they were at first."""
        w0, x0 = self.seen[0]
        return (
            max(abs(w - w0) for w, _ in self.seen),
            max(float(np.abs(x - x0).max()) for _, x in self.seen),
        )


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
    mass = Mass(algorithm, LAYOUT)
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
