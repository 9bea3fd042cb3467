"""Gossip rows run through messages and again in one process, for a bit-by-bit comparison."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.experiments.decentralised import Energy, GossipTraining
from fedcomp.experiments.findings import Table, different_bytes
from fedcomp.experiments.kit import table
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.experiments.tables import Found
from fedcomp.strategies.parts import TASK_PREFIX, below


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


def without_messages(spec: RunSpec) -> tuple[dict[str, NDArray[Any]], int]:
    """Run the gossip row of ``spec`` here; return the mean of the nodes' models, as the server half has it, and the
    bytes of all messages.

    Raises
    ------
    ConfigError
        When the system is no gossip algorithm.
    """
    # Here, not above: a list of the experiments must not bring Flower.
    from fedcomp.experiments.systems import get_system
    from fedcomp.gossip.vector import unflatten
    from fedcomp.gossip_simulation import SimulationSettings
    from fedcomp.strategies.gossip.strategy import GossipRelay, mean_of
    from fedcomp.tasks import get_task

    system = get_system(spec.system)
    settings = system.resolve(spec.settings)
    strategy = system.build(settings, spec.seed)
    if not isinstance(strategy, GossipRelay):
        raise ConfigError(f"{system.title} is not a decentralised algorithm; there is nothing to compare")
    plan = GossipTraining(
        get_task(spec.task, **below(settings, TASK_PREFIX)),
        strategy.algorithm,
        strategy.graph(spec.clients),
        spec.rounds,
        seed=spec.seed,
        batch_size=int(settings["batch_size"]),
        dtype=strategy.settings.dtype,
        policy=strategy.policy,
    )
    nodes = plan.nodes()
    outcome = plan.run(nodes, SimulationSettings(skew_rounds=strategy.settings.skew_rounds))
    models = []
    for i in sorted(outcome.models):
        named = {**unflatten(outcome.models[i], plan.layout), **nodes[i].at_home()}
        models.append({name: named[name] for name in plan.layout.order})
    return {k: np.asarray(v) for k, v in mean_of(models).items()}, outcome.traffic.edge_bytes


def edge_bytes(result: RunResult) -> int:
    """Return the bytes of all messages of a gossip row that was run as messages."""
    # Round 0 is the evaluation of the initial model and exchanges nothing.
    return sum(int(record.metrics["gossip.edge"]) for record in result.rounds if record.round)


def beside(found: Found, caption: str) -> tuple[Table, dict[tuple[str, str], float]]:
    """Return the runs that went through messages beside the same runs in one process, and by row how many ``model
    bytes that differ`` and ``message bytes that differ``."""
    shown: list[dict[str, Any]] = []
    differ: dict[tuple[str, str], float] = {}
    for label, result in found.results.items():
        found.say(f"{label} without messages")
        (arrays, alone), sent = without_messages(result.spec), edge_bytes(result)
        differ[label, "model bytes that differ"] = different_bytes(result.arrays, arrays)
        differ[label, "message bytes that differ"] = abs(sent - alone)
        whole = result.uplink_wire_bytes + result.downlink_wire_bytes
        row = {"row": label, "iterations": result.spec.rounds, "edge bytes": sent, "whole messages, bytes": whole}
        shown.append(row | {name: value for (of, name), value in differ.items() if of == label})
    return table("The same runs with messages and without", {name: name for name in shown[0]}, shown, caption), differ
