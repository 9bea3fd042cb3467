"""Gossip rows that go through messages, and the same runs in one process, to compare bit by bit."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.experiments.decentralised import Energy
from fedcomp.experiments.findings import Table, different_bytes
from fedcomp.experiments.kit import table
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.experiments.tables import Found
from fedcomp.strategies.parts import TASK_PREFIX


def rows(systems: Mapping[str, str], config: Config, *, most: int = sys.maxsize) -> Mapping[str, str]:
    """Return rows of at most ``most`` rounds whose models are looked at once, at the end: a look fetches them all.

    Raises
    ------
    ConfigError
        When only one figure of energy is given; before anything runs.
    """
    Energy.of(config.settings)
    rounds = min(config.rounds, most)
    return {label: f"{text} rounds={rounds} evaluate_every={max(1, rounds)}" for label, text in systems.items()}


@dataclass(frozen=True)
class Central:
    """What a run comes to in one process.

    Attributes
    ----------
    arrays : dict of str to ndarray
        Mean of the nodes' models, as the server half returns it.
    edge_bytes : int
        Of all messages.
    """

    arrays: dict[str, NDArray[Any]]
    edge_bytes: int


def without_messages(spec: RunSpec) -> Central:
    """Run the gossip row of ``spec`` here.

    Raises
    ------
    ConfigError
        When the system is no gossip algorithm.
    """
    # Here, not above: a list of the experiments must not bring Flower.
    from fedcomp.experiments.systems import get_system
    from fedcomp.gossip.local import FlatObjective
    from fedcomp.gossip.vector import flatten, unflatten
    from fedcomp.gossip_simulation import SimulationSettings, simulate
    from fedcomp.layout import Layout
    from fedcomp.strategies.gossip.strategy import GossipRelay, mean_of
    from fedcomp.tasks import get_task
    from fedcomp.tasks.local import LocalObjective

    system = get_system(spec.system)
    settings = system.resolve(spec.settings)
    strategy = system.build(settings, spec.seed)
    if not isinstance(strategy, GossipRelay):
        raise ConfigError(f"{system.title} is not a decentralised algorithm; there is nothing to compare")
    options = {k.removeprefix(TASK_PREFIX): v for k, v in settings.items() if k.startswith(TASK_PREFIX)}
    task, how = get_task(spec.task, **options), strategy.settings
    batch = int(settings["batch_size"])
    objectives = [
        LocalObjective(task, i, spec.clients, seed=spec.seed, batch_size=batch, dtype=how.dtype)
        for i in range(spec.clients)
    ]
    start = objectives[0].start()
    layout = Layout.of(start, strategy.policy)
    # A home of its own for every node: its buffers move with its gradients, as they do on a node.
    locals_ = [
        FlatObjective(objective, layout, {t.name: start[t.name] for t in layout.exact}) for objective in objectives
    ]
    outcome = simulate(
        strategy.algorithm,
        strategy.graph(spec.clients),
        locals_,
        flatten(start, layout, how.dtype),
        spec.rounds,
        layout=layout,
        seed=spec.seed,
        settings=SimulationSettings(skew_rounds=strategy.settings.skew_rounds),
    )
    models = []
    for i in sorted(outcome.models):
        named = {**unflatten(outcome.models[i], layout), **locals_[i].at_home()}
        models.append({name: named[name] for name in layout.order})
    return Central({k: np.asarray(v) for k, v in mean_of(models).items()}, outcome.traffic.edge_bytes)


def edge_bytes(result: RunResult) -> int:
    """Return the bytes of all messages of a gossip row that was run as messages."""
    # Round 0 is the evaluation of the initial model and exchanges nothing.
    return sum(int(record.metrics["gossip.edge"]) for record in result.rounds if record.round)


def beside(found: Found, caption: str) -> tuple[Table, dict[tuple[str, str], float]]:
    """Return the runs that went through messages beside the same runs in one process, and by row how many ``model
    bytes that differ`` and ``message bytes that differ``."""
    shown: list[dict[str, Any]] = []
    for label, result in found.results.items():
        found.say(f"{label} without messages")
        central, sent = without_messages(result.spec), edge_bytes(result)
        shown.append(
            {
                "row": label,
                "iterations": result.spec.rounds,
                "edge bytes, messages": sent,
                "edge bytes, one process": central.edge_bytes,
                "whole messages, bytes": result.uplink_wire_bytes + result.downlink_wire_bytes,
                "model bytes that differ": different_bytes(result.arrays, central.arrays),
                "message bytes that differ": abs(sent - central.edge_bytes),
            }
        )
    differ = {(row["row"], name): row[name] for row in shown for name in row if name.endswith("that differ")}
    return table("The same runs with messages and without", {name: name for name in shown[0]}, shown, caption), differ
