"""A node's half of conditional rounds with sensors below it: windows, deployments, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from toy import client_app, fedavg, fingerprint, model

from fedcomp.clients.compressed import compression
from fedcomp.clients.conditional import Sensors, conditional
from fedcomp.clients.sensors import StoredEdge
from fedcomp.codecs import TopK
from fedcomp.drift.edge import Arrays, Deployments, SensorEndpoint, local_link
from fedcomp.drift.schedule import ScheduleSettings
from fedcomp.drift.sensor import SensorSettings, Upload
from fedcomp.drift.statistics import confidence
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import round_of
from fedcomp.flower.rounds import fit
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.conditional import Conditional, Quietness

SETTLED = ScheduleSettings(window=2, low=0.1, consecutive=1, patience=0)
WINDOW = 20
SURE = [10.0, 0.0, 0.0, 0.0]


class Site:
    """A node with one sensor: what it absorbed, and its loss, which rises with what it absorbed."""

    def __init__(self, folder: Path, partition: int) -> None:
        self.folder = folder / str(partition)
        self.absorbed: list[float] = []
        shapes = {name: array.numpy() for name, array in model().items()}
        self.shapes = shapes
        self.here, there = local_link()
        settings = SensorSettings(window=WINDOW, consecutive=1)
        self.sensor = SensorEndpoint(partition, shapes, there, codec=TopK(density=0.1), settings=settings)

    def edge(self) -> StoredEdge:
        return StoredEdge(self.folder, Deployments(self.shapes, TopK(density=0.1), window=WINDOW))

    def tick(self, odd: bool) -> None:
        """Let the sensor infer, and its edge hear of it."""
        edge = self.edge()
        self.sensor.heartbeat()
        edge.serve(self.here)
        self.sensor.update()
        logits = np.zeros((WINDOW, 4)) if odd else np.repeat([SURE], WINDOW, axis=0)
        self.sensor.observe(logits, np.full((WINDOW, 3), float(odd), np.float32), np.zeros(WINDOW, np.int64))
        edge.serve(self.here)


def run(tmp_path: Path, rounds: int, odd_at: int = 0, fault: Any = None, query: bool = True) -> Any:
    sites = [Site(tmp_path, partition) for partition in range(3)]

    def site(context: Context) -> Site:
        return sites[int(context.node_config["partition-id"])]

    def watch(msg: Message, context: Context) -> float:
        return 1.0 + len(site(context).absorbed)

    def absorb(msg: Message, context: Context, windows: Sequence[Upload]) -> None:
        site(context).absorbed += [float(window.samples.mean()) for window in windows]

    def measure(msg: Message, context: Context, arrays: Arrays) -> np.ndarray:
        return np.repeat(confidence([SURE]), 100)

    sensors = Sensors(lambda context: site(context).edge(), measure, absorb)
    app = client_app([compression(), conditional(watch, sensors=sensors, settings=SETTLED)])
    strategy = Conditional(Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.2)), max_skip=50, query=query)

    def after(number: int, arrays: Any, outcome: Any) -> None:
        for partition, each in enumerate(sites):
            each.tick(odd=number == odd_at and partition == 1)

    with InProcessGrid(app, 3, seed=4, fault=fault) as inner:
        fit(strategy, MeteredGrid(inner), model(), rounds, on_round=after)
    return strategy, sites


def quiet(strategy: Conditional) -> list[int]:
    return [len(strategy.reports[number].section(Quietness).quiet) for number in sorted(strategy.reports)]


@pytest.mark.parametrize("query", [True, False])
def test_drift_below_a_node_makes_it_speak_until_it_has_settled_again(tmp_path: Path, query: bool) -> None:
    strategy, sites = run(tmp_path, 12, odd_at=6, query=query)
    found = quiet(strategy)
    assert found[5] == 3
    # The node takes its sensor's window in round 7, and losses have to settle again; the others stay quiet.
    assert found[6:] == ([2, 2, 3, 3, 3, 3] if query else [2, 3, 3, 3, 3, 3])
    assert [site.absorbed for site in sites] == [[], [1.0], []]
    # The first model, that of settled losses, and for the one site that of losses that settled again.
    assert [site.edge().version for site in sites] == [2, 3, 2]
    assert [site.sensor.sensor.version for site in sites] == [2, 3, 2]
    assert not any(site.edge().windows() for site in sites)


@pytest.mark.parametrize("helps", [True, False])
def test_a_node_whose_own_training_helps_it_is_never_quiet(helps: bool) -> None:
    """Its losses stand still, for others pull the model back: without its updates the model would move."""

    def watch(msg: Message, context: Context) -> float:
        (record,) = msg.content.array_records.values()
        # The toy's model as it came is the server's; trained, it is another one than the round's.
        return 1.0 if fingerprint(record) == came[round_of(msg)] or not helps else 0.5

    came: dict[int | None, float] = {}
    app = client_app([compression(), conditional(watch, settings=replace(SETTLED, patience=1))])

    def noted(message: Message, context: Context) -> Message:
        for record in message.content.array_records.values():
            came[round_of(message)] = fingerprint(record)
        return app(message, context)

    strategy = Conditional(Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.2)))
    with InProcessGrid(noted, 3, seed=4) as inner:
        fit(strategy, inner, model(), 8)
    assert (max(quiet(strategy)) == 0) == helps
