"""Who declares a partition while its holder is away gives it back, on every path that knows nodes by partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gossip_toy
import graph_federation
import linear_toy
import pytest
import toy
from flwr.app import ArrayRecord, ConfigRecord
from plain_grid import Blind

from fedcomp.clients.compressed import compression
from fedcomp.codecs import TopK
from fedcomp.flower.faults import Delivery
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import PARTITIONS
from fedcomp.flower.rounds import fit
from fedcomp.strategies.coded.linear import CodedLinearGD
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.partitions import Holders

NODES, TWIN, STOLEN, AWAY, ROUNDS = 4, 7, 2, 3, 6
"""The node added as ``TWIN`` after the first round declares ``STOLEN``, whose holder is away in round ``AWAY``."""


class Deployment(Blind):
    """Knows of its nodes what they say; some that are registered are not online."""

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(
            app, NODES, seed=4, node_config=lambda p: {"partition-id": STOLEN if p >= TWIN else p}, **options
        )
        self.offline: set[int] = set()

    def get_node_ids(self) -> list[int]:
        return [node for node in super().get_node_ids() if node not in self.offline]


PATHS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[], ArrayRecord], Callable[[Any], Holders]]] = {
    "pair": (
        lambda: Compressed(toy.fedavg(fraction_evaluate=0.0), TopK(1.0)),
        lambda: toy.client_app([compression()]),
        toy.model,
        lambda strategy: strategy.roster,
    ),
    "coded rounds": (
        lambda: CodedFedAvg(Compressed(toy.fedavg(), TopK(1.0)), construction="relay", symbols=2),
        lambda: toy.client_app([compression()]),
        toy.model,
        lambda strategy: strategy.roster,
    ),
    "gossip": (
        lambda: gossip_toy.strategy("sparse-push", nodes=NODES),
        gossip_toy.client,
        gossip_toy.model,
        lambda strategy: strategy.roster,
    ),
    "graph": (
        lambda: graph_federation.strategy(timeout=5.0),
        lambda: graph_federation.client(graph_federation.graph()),
        lambda: graph_federation.record(graph_federation.initial()),
        lambda strategy: strategy.roster,
    ),
    "coded data": (
        lambda: CodedLinearGD(partitions=3, parities=1, code="mds", lr=0.5),
        linear_toy.client,
        linear_toy.model,
        lambda strategy: strategy.roster,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("away", ["misses a reply", "is offline under a key"])
@pytest.mark.parametrize("path", PATHS)
def test_who_declares_a_partition_while_its_holder_is_away_is_refused_when_that_one_is_back(
    path: str, away: str
) -> None:
    make, app, model, holders_of = PATHS[path]
    silent = away == "misses a reply"

    def fault(delivery: Delivery) -> str:
        return "silent" if silent and (delivery.partition, delivery.round) == (STOLEN, AWAY) else "none"

    grid, strategy, seen = Deployment(app(), fault=fault), make(), {}
    holder = grid.node_id_of(STOLEN)

    def after(number: int, *_: Any) -> None:
        seen[number] = holders_of(strategy).held.get(STOLEN)
        if number == 1:
            grid.add_node(TWIN)
        grid.offline = {holder} if not silent and number == AWAY - 1 else set()

    config = ConfigRecord({"seed": 3})
    with grid:
        fit(
            strategy,
            MeteredGrid(grid),
            model(),
            ROUNDS,
            timeout=9,
            train_config=config,
            on_round=after,
        )
    twin = grid.node_id_of(TWIN)
    assert [seen[number] for number in (1, 2, ROUNDS - 1, ROUNDS)] == [holder] * 4
    if not silent:
        assert seen[AWAY] == twin, "a replacement is used while nobody else answers"
    later = " ".join(str(vars(strategy.reports[number])) for number in range(2, ROUNDS + 1))
    assert f"only node {holder}, which held it before, is used" in later


def test_what_is_said_of_a_node_that_is_gone_is_not_said_of_its_replacement() -> None:
    """A SuperNode that restarts without keys is asked beside its former self, for which the SuperLink answers."""
    gone: set[int] = set()
    strategy = Compressed(toy.fedavg(fraction_evaluate=0.0), TopK(1.0))
    app = toy.client_app([compression()])
    with Deployment(app, fault=lambda d: "offline" if d.partition in gone else None) as grid:
        before = fit(strategy, grid, toy.model(), 1).arrays
        holder, replacement = grid.node_id_of(STOLEN), grid.add_node(TWIN)
        gone.add(STOLEN)
        fit(strategy, grid, before, 2, start_round=2)
    report = strategy.reports[2]
    assert list(report.refused) == [holder]
    assert replacement in report.weights
    assert strategy.roster.peer(replacement).consumed > 0


def test_a_number_that_another_node_of_the_round_answers_under_is_refused() -> None:
    """The number that a node without a configured partition draws is contested by nobody, and may be guessed."""
    strategy, app = Compressed(toy.fedavg(fraction_evaluate=0.0), TopK(1.0)), toy.client_app([compression()])

    def declares(msg: Any, context: Any) -> Any:
        if context.node_config["partition-id"] < 2:
            context.node_config = {"partition-id": robbed % PARTITIONS}
        return app(msg, context)

    with Blind(declares, 3, seed=4) as grid:
        robbed, thief = grid.node_id_of(0), grid.node_id_of(1)
        fit(strategy, grid, toy.model(), 1)
    report = strategy.reports[1]
    assert list(report.refused) == [thief]
    assert robbed in report.weights
    assert report.used == 2


def test_links_lead_to_who_holds_a_partition_and_not_to_who_declares_it_too() -> None:
    strategy = CodedFedAvg(Compressed(toy.fedavg(), TopK(1.0)), construction="relay", symbols=2, transport="peers")
    with Deployment(toy.client_app([compression()])) as grid:
        before = fit(strategy, MeteredGrid(grid), toy.model(), 1).arrays
        holder, reached = grid.node_id_of(STOLEN), strategy.roster.reached()
        grid.add_node(TWIN)
        fit(strategy, MeteredGrid(grid), before, 2, start_round=2)
    assert sorted(reached) == list(range(NODES))
    assert strategy.roster.reached() == reached
    assert strategy.roster.reached()[STOLEN] is strategy.roster.peer(holder)
