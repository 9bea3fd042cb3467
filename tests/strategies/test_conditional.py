"""Conditional rounds: who is quiet is not averaged, keeps memory and model, and costs little; and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from toy import client_app, fedavg, fingerprint, model, stack, update

from fedcomp.clients.compressed import compression
from fedcomp.clients.conditional import Sensors, conditional
from fedcomp.clients.sensors import StoredEdge
from fedcomp.codecs import Identity, TopK
from fedcomp.drift.edge import Arrays, Deployments, SensorEndpoint, local_link
from fedcomp.drift.schedule import ScheduleSettings
from fedcomp.drift.sensor import SensorSettings, Upload
from fedcomp.drift.statistics import confidence
from fedcomp.errors import ConfigError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import round_of
from fedcomp.flower.rounds import fit
from fedcomp.program import HELLO
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.conditional import Conditional, Quietness

SETTLED = ScheduleSettings(window=2, low=0.1, consecutive=1, patience=0)
"""Losses that are alike twice are stable: a constant loss is from the second round on."""

EMPTY = 560
"""Bytes of a reply of this type without a record, on a deployment's connection: ids, metadata, the tree of objects."""


Loss = Callable[[int, int], float]


def app(loss: Loss, *, settings: ScheduleSettings = SETTLED) -> ClientApp:
    """Return the toy app with a loss of each partition and round."""

    def watch(msg: Message, context: Context) -> float:
        number = int(msg.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
        return loss(int(context.node_config["partition-id"]), number)

    return client_app([compression(), conditional(watch, settings=settings)])


def still(partition: int, number: int) -> float:
    return 1.0


def moving(partition: int, number: int) -> float:
    return 2.0**-number


def odd_move(partition: int, number: int) -> float:
    """Partitions 0, 2, ... settle at once; the others do not."""
    return moving(partition, number) if partition % 2 else 1.0


def made(inner: Any = None, **options: Any) -> Conditional:
    return Conditional(inner or Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.2)), **options)


def run(
    strategy: Any, client: Any, rounds: int = 4, nodes: int = 3, fault: Any = None
) -> tuple[np.ndarray, MeteredGrid]:
    with InProcessGrid(client, nodes, seed=4, fault=fault) as inner:
        grid = MeteredGrid(inner)
        found = stack(fit(strategy, grid, model(), rounds).arrays)
    return found, grid


def said(strategy: Conditional, number: int) -> Quietness:
    return strategy.reports[number].section(Quietness)


@pytest.mark.parametrize("query", [True, False])
def test_nodes_that_are_never_quiet_give_what_the_inner_strategy_gives_bit_for_bit(query: bool) -> None:
    plain, _ = run(Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.2)), app(moving))
    found, _ = run(made(query=query), app(moving))
    assert found.tobytes() == plain.tobytes()


@pytest.mark.parametrize("query", [True, False])
def test_quiet_nodes_are_left_out_of_the_mean_not_averaged_as_zero(query: bool) -> None:
    """1.7, sixth: the average is that of the others. A mean over all would be three halves of it, or less."""
    strategy = made(Compressed(fedavg(fraction_evaluate=0.0), Identity()), query=query)
    # The second round settles partitions 0 and 2: in the third they are quiet, without a query in the second already.
    first = 3 if query else 2
    found, _ = run(strategy, app(odd_move), rounds=first)
    before, _ = run(made(Compressed(fedavg(fraction_evaluate=0.0), Identity()), query=query), app(odd_move), first - 1)
    own = np.concatenate([update(first, 1, shape, i).reshape(-1) for i, shape in enumerate([(40, 30), (12,)])])
    assert np.allclose(found - before, own)
    report = strategy.reports[first]
    assert len(said(strategy, first).quiet) == 2
    assert (report.asked, report.used, report.lost, report.refused) == (1, 1, 0, {})


@pytest.mark.parametrize("query", [True, False])
def test_a_quiet_answer_takes_less_than_300_bytes(query: bool) -> None:
    """1.7, fourth: the real serialised size, as the ledger counts it."""
    strategy = made(query=query)
    _, grid = run(strategy, app(still), rounds=6)
    kind = HELLO if query else "train"
    assert len(said(strategy, 6).quiet) == 3
    assert grid.ledger.total("messages", round=6, direction="up") == 3
    # Flower's own frame around an empty message takes EMPTY bytes; what stands in it is the node's.
    assert 0 < grid.ledger.total("wire", round=6, direction="up", message_type=kind) < 3 * (EMPTY + 300)


def test_a_query_spares_the_model_too() -> None:
    _, grid = run(made(query=True), app(still), rounds=6)
    assert grid.ledger.total("payload", round=6, direction="down") == 0
    assert 0 < grid.ledger.total("wire", round=6, direction="down") < 3 * (EMPTY + 600)


@pytest.mark.parametrize("query", [True, False])
def test_a_round_in_which_all_are_quiet_keeps_the_model_and_is_no_failure(query: bool, caplog: Any) -> None:
    strategy = made(query=query)
    long, _ = run(strategy, app(still), rounds=6)
    short, _ = run(made(query=query), app(still), rounds=2 if query else 1)
    assert long.tobytes() == short.tobytes()
    assert not [record for record in caplog.records if record.levelname == "WARNING" and "round 6" in record.message]
    assert strategy.reports[6].asked == 0
    assert len(said(strategy, 6).quiet) == 3


@pytest.mark.parametrize("query", [True, False])
def test_a_compressed_downlink_stays_in_step(query: bool) -> None:
    """Quiet nodes that were sent the model keep it; those that were not are brought up to date when they speak."""

    def loss(partition: int, number: int) -> float:
        return moving(partition, number) if partition == 1 or number > 5 else 1.0

    strategy = made(
        Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.2), downlink=TopK(density=0.3)),
        max_skip=20,
        query=query,
    )
    run(strategy, app(loss), rounds=9)
    assert all(strategy.reports[number].refused == {} for number in strategy.reports)
    assert len(said(strategy, 5).quiet) == 2


def test_quiet_nodes_are_not_sent_again_what_they_hold() -> None:
    """Their answer says which version they have; a model that does not change then costs nothing."""
    inner = Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.2), downlink=TopK(density=0.3))
    _, grid = run(made(inner, query=False, max_skip=20), app(still), rounds=30)
    # The last differences of a lossy downlink take some rounds; after that nothing is left to say.
    assert grid.ledger.total("payload", round=30, direction="down") == 0


@pytest.mark.parametrize(("options", "match"), [({"max_skip": -1}, "max_skip"), ({"query": 1}, "query")])
def test_settings_out_of_range_are_refused(options: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        made(**options)


# A node's half of conditional rounds with sensors below it: windows, deployments, and what a failure leaves.

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


def watched(tmp_path: Path, rounds: int, odd_at: int = 0, fault: Any = None, query: bool = True) -> Any:
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
    strategy, sites = watched(tmp_path, 12, odd_at=6, query=query)
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
