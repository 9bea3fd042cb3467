"""A fault at every message of a turn, clients that lost their state, and what may stand around a graph run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from flwr.serverapp.strategy import FedAdam
from graph_federation import (
    ENOUGH,
    LR,
    PARTS,
    Meddler,
    averaging,
    bits,
    client,
    gradients_on_one_machine,
    graph,
    grid,
    initial,
    reports,
    run,
    strategy,
    total,
)

from fedcomp.codecs import TopK, chain
from fedcomp.errors import ConfigError
from fedcomp.flower.faults import Delivery
from fedcomp.flower.gcn import EVALUATE_TYPE, PLAN_TYPE, ROWS_TYPE, SETUP_TYPE, TRAIN_TYPE, Fetch, Needs
from fedcomp.flower.payload import frames
from fedcomp.privacy.local import Privatise
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.gcn.strategy import SkewedGCN

FEW = 3
"""Owners of the runs below."""

FIGURES = ("id_bytes", "setup_bytes", "structure_bytes", "feature_bytes_logical")
QUERIES = (SETUP_TYPE, PLAN_TYPE, ROWS_TYPE)


STRUCK = ((PLAN_TYPE, 0), (ROWS_TYPE, 0), (PLAN_TYPE, 1), (ROWS_TYPE, 1), (TRAIN_TYPE, 0))
"""Messages of a node's turn with structure "halo": the plan, rows of the adjacency, the plan again, rows, training."""


class Incidents:
    """An app and a plan of faults: in round 2 + i something happens at message ``STRUCK[i]`` of partition i % FEW."""

    def __init__(self, app: Any, kind: str) -> None:
        self.app, self.kind = app, kind
        self.seen: Counter[tuple[int, int, str]] = Counter()
        self.now = False
        self.struck: dict[int, str] = {}

    def fault(self, delivery: Delivery) -> str:
        where = (delivery.round, delivery.partition, delivery.message_type)
        index = delivery.round - 2
        self.now = 0 <= index < len(STRUCK) and delivery.partition == index % FEW
        self.now &= self.now and (delivery.message_type, self.seen[where]) == STRUCK[index]
        self.seen[where] += 1
        if self.now:
            self.struck[delivery.round] = delivery.message_type
        return self.kind if self.now and self.kind != "forgets" else "none"

    def __call__(self, message: Message, context: Any) -> Message:
        if self.now and self.kind == "forgets":
            context.state = RecordDict()
        return self.app(message, context)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["silent", "lost_reply", "late", "forgets"])
def test_7_14_a_fault_at_any_message_of_a_turn_costs_its_node_that_round_at_most(kind: str) -> None:
    parts = graph(parts=FEW, nodes=24, structure="halo")
    app = Incidents(client(parts), kind)
    options = {"mode": "measured", "structure": "halo", "cache": "lru", "cache_bytes": 100}
    of = strategy(n=12, batch_size=4, **options)
    over = grid(parts, app, fault=app.fault, error_state="keep")
    found = run(of, over, 2 + len(STRUCK))
    assert list(app.struck.values()) == [kind for kind, _ in STRUCK]
    for report in reports(of):
        struck = app.struck.get(report.round, "")
        # Who forgets between its last plan and training is lost for that round; before it, it makes no difference.
        costs = bool(struck) and (kind != "forgets" or report.round >= 5)
        assert set(report.lost) | set(report.absent) == ({(report.round - 2) % FEW} if costs else set())
        assert report.train.clients == FEW - costs
        assert report.train.trips <= 10
    assert sum(total(of, name) for name in FIGURES) == over.ledger.total("payload", message_type=QUERIES)
    assert all(np.isfinite(value).all() for value in found.values())


def test_an_owner_that_breaks_over_its_rows_is_there_and_trains_all_the_same() -> None:
    breaks = grid(graph(), fault=lambda d: "raise" if (d.partition, d.message_type) == (1, ROWS_TYPE) else "none")
    of = strategy(n=ENOUGH)
    run(of, breaks, 1)
    assert list(of.reports[1].gcn.absent) == [1]
    assert (of.reports[1].gcn.lost, of.reports[1].gcn.train.clients) == ({}, PARTS)


# Clients that lost what they were sent.


def forgetting(parts: Any, *rounds: int) -> Meddler:
    """Return an app of which part 1 loses its state before it plans, in some rounds."""
    app = Meddler(client(parts))
    for number in rounds:
        app.before[number, 1, PLAN_TYPE] = lambda message, context: setattr(context, "state", RecordDict())
    return app


@pytest.mark.slow
def test_a_node_that_lost_its_norms_and_kept_its_id_is_told_them_again_in_the_same_round() -> None:
    parts, alone = graph(), strategy(averaging(), mode="measured")
    run(alone, grid(parts, forgetting(parts, 2)), 3)
    first, second, third = reports(alone)
    assert [report.lost for report in reports(alone)] == [{}] * 3
    assert second.train.clients == PARTS
    assert second.train.trips == third.train.trips + 1
    # Norms of one client alone, and not the lists they were asked for with.
    assert 0 < second.train.setup_bytes < first.train.setup_bytes / 2
    assert third.train.setup_bytes == 0
    assert second.train.replans == 0


@pytest.mark.slow
def test_one_that_asks_for_norms_for_ever_is_given_up_for_that_round() -> None:
    def again(message: Message, reply: Message) -> None:
        for name in list(reply.content):
            del reply.content[name]
        Needs("norms", 0).put(reply.content)

    for mode, said in (("measured", "that it was sent just now"), ("matched", "norms that nobody sent it")):
        app = Meddler(client(parts := graph(parts=FEW, nodes=24)))
        app.after[2, 1, PLAN_TYPE] = again
        of = strategy(mode=mode)
        run(of, grid(parts, app), 2)
        assert list(of.reports[2].gcn.lost) == [1]
        assert said in of.reports[2].gcn.lost[1]
        # Plan, rows, training; who may have lost something is asked once more.
        assert of.reports[2].gcn.train.trips == 3 + (mode == "measured")
        assert (of.reports[2].gcn.absent, of.reports[2].gcn.train.clients) == ({}, FEW - 1)


@pytest.mark.slow
def test_a_run_after_another_on_the_same_nodes_finds_their_caches_and_nothing_else() -> None:
    """Resumed runs, too, meet nodes that have a state and others that are new."""
    parts = graph(parts=FEW, nodes=24)
    options = {"n": ENOUGH, "batch_size": 0, "cache": "all"}
    over = grid(parts, nodes=FEW)
    model = run(strategy(**options), over, 2)
    second = strategy(**options)
    assert bits(run(second, over, 1)) == bits(run(strategy(**options), grid(parts), 1))
    assert total(second, "rows_fetched") == 0 < total(second, "remote_inputs")
    # The nodes of an interrupted run have been replaced when it goes on: they are asked again who they are.
    before = strategy(**options, mode="measured")
    begun = run(before, over, 1)
    after = strategy(**options, mode="measured")
    after.load_state_dict(before.state_dict())
    for part in range(FEW):
        over.remove_node(part)
        over.add_node(part)
    assert bits(run(after, over, 2, first=2, start=begun)) == bits(model)
    assert after.reports[2].gcn.train.clients == FEW
    assert after.reports[2].gcn.train.setup_bytes == before.reports[1].gcn.train.setup_bytes > 0


# Epochs.


@pytest.mark.slow
def test_the_adaptive_scale_is_searched_once_an_epoch() -> None:
    """Of 48 nodes of 4 owners each learns from 10: batches of 4 make an epoch of three rounds."""
    of = strategy(mode="adaptive", n=ENOUGH, batch_size=4)
    over, scales = grid(graph()), []
    run(of, over, 2, on_round=lambda *_: scales.append(set(of.scales.values())))
    # Resumed within an epoch.
    again = strategy(mode="adaptive", n=ENOUGH, batch_size=4)
    again.load_state_dict(of.state_dict())
    run(again, over, 4, first=3, on_round=lambda *_: scales.append(set(again.scales.values())))
    assert scales == [{1.0}, {1.0}, {2.0}, {2.0}]


# What stands inside and outside.


@pytest.mark.slow
def test_7_06_a_server_adam_steps_as_on_one_machine() -> None:
    """Its pseudo-gradient is the learning rate times the gradient on the union of the batches."""
    rates = {"eta": 0.05, "eta_l": LR, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}
    least = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
    found = run(strategy(FedAdam(fraction_evaluate=0.0, **rates, **least), n=ENOUGH), grid(graph()), 3)
    model = initial()
    first, second = ({name: np.zeros_like(value) for name, value in model.items()} for _ in range(2))
    for number in (1, 2, 3):
        for name, gradient in gradients_on_one_machine(model, number, 6).items():
            delta = -LR * gradient
            first[name] = 0.9 * first[name] + 0.1 * delta
            second[name] = 0.99 * second[name] + 0.01 * delta**2
            bias = np.sqrt(1 - 0.99 ** (number + 1)) / (1 - 0.9 ** (number + 1))
            model[name] = model[name] + 0.05 * bias * first[name] / (np.sqrt(second[name]) + 1e-3)
    for name, value in model.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-10)


def test_codecs_that_make_updates_private_and_coded_rounds_are_refused_around_rows_in_the_clear() -> None:
    codec = chain(Privatise(clip=1.0, noise_multiplier=1.0), TopK(density=0.5))
    with pytest.raises(ConfigError, match="feature rows leave them in the clear"):
        SkewedGCN(Compressed(averaging(), codec, feedback=False))
    with pytest.raises(ConfigError, match="CodedFedAvg writes its rounds as exchanges"):
        SkewedGCN(CodedFedAvg(averaging(), construction="relay"))
    for outer in (CodedFedAvg, lambda inner: Compressed(inner, TopK(density=0.5))):
        with pytest.raises(ConfigError, match="SkewedGCN writes its rounds as exchanges"):
            outer(strategy())


@pytest.mark.slow
def test_labels_travel_nowhere_and_rows_only_from_their_owner_to_those_who_use_them() -> None:
    parts = graph(parts=FEW, nodes=24)
    seen: list[tuple[str, int, dict[str, bytes], Message]] = []

    class Tap:
        def __call__(self, message: Message, context: Any) -> Message:
            reply = app(message, context)
            for one in (message, reply):
                seen.append((message.metadata.message_type, int(context.node_config["partition-id"]), one))
            return reply

    app = client(parts)
    of = strategy(averaging(evaluate=True), mode="measured", n=6)
    run(of, grid(parts, Tap()), 2)
    owner_of = {row.tobytes(): part.index for part in parts for row in part.features}
    labels = [part.labels.tobytes()[: 8 * 4] for part in parts]
    places: Counter[str] = Counter()
    for kind, node, message in seen:
        named = frames(message.content)
        blob = b"".join(named.values()) + repr(message.content).encode()
        assert not any(some in blob for some in labels)
        for name, data in named.items():
            for row, owner in owner_of.items():
                if row in data:
                    places[kind] += 1
                    at = int(name.rsplit("/", 1)[1])
                    assert name.startswith("fedcomp.gcn/rows/")
                    assert (owner == node != at) if kind == ROWS_TYPE else (owner == at != node)
    assert set(places) == {ROWS_TYPE, TRAIN_TYPE, EVALUATE_TYPE}


def test_owners_are_told_of_the_noise_they_add_and_of_the_norms_that_go_with_rows_of_the_adjacency() -> None:
    app, said = Meddler(client(parts := graph(parts=FEW, nodes=24, structure="halo"))), []
    for part in range(FEW):
        app.before[1, part, ROWS_TYPE] = lambda message, context: said.append(Fetch.take(message))
    run(strategy(mode="measured", structure="halo", noise=0.5), grid(parts, app), 1)
    assert {(fetch.kind, fetch.norms) for fetch in said} == {("structure", True), ("rows", False)}
    assert {fetch.noise for fetch in said if fetch.kind == "rows"} == {0.5}
