"""A gossip row without messages: the same algorithm, graph, data and seeds in one process, to compare bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.experiments.findings import Claim, Table, different_bytes
from fedcomp.experiments.kit import Say, claim, table
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.strategies.parts import TASK_PREFIX


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


@dataclass(frozen=True)
class Apart:
    """How a run with messages differs from the same run in one process: bytes of the mean model and of messages."""

    model: int
    messages: int


def beside(results: Mapping[str, RunResult], say: Say, caption: str) -> tuple[Table, dict[str, Apart]]:
    """Return the runs that went through messages beside the same runs in one process, and how they differ."""
    rows: list[dict[str, Any]] = []
    found: dict[str, Apart] = {}
    for label, result in results.items():
        say(f"{label} without messages")
        central, sent = without_messages(result.spec), edge_bytes(result)
        found[label] = Apart(different_bytes(result.arrays, central.arrays), abs(sent - central.edge_bytes))
        rows.append(
            {
                "system": label,
                "iterations": result.spec.rounds,
                "edge bytes, messages": sent,
                "edge bytes, one process": central.edge_bytes,
                "whole messages, bytes": result.uplink_wire_bytes + result.downlink_wire_bytes,
                "model bytes that differ": found[label].model,
            }
        )
    columns = ("system", "iterations", "edge bytes, messages", "edge bytes, one process", "whole messages, bytes")
    names = (*columns, "model bytes that differ")
    return table("The same runs with messages and without", {name: name for name in names}, rows, caption), found


def claims_of_messages(
    differ: Mapping[str, Apart], name: str, bound: str, source: str, *, sent: str = "messages"
) -> list[Claim]:
    """Return that messages change nothing: neither the models nor what is sent.

    Parameters
    ----------
    name : str
        Of a claim, with ``{label}`` and ``{what}``: the model, or what ``sent`` says.
    """
    return [
        claim(name.format(label=label, what=what), count, bound, source)
        for label, apart in differ.items()
        for what, count in (("the model", apart.model), (sent, apart.messages))
    ]
