"""Owners that are away, die, come back or are doubted: a round goes on, does not wait, and says what it missed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from graph_federation import (
    ENOUGH,
    PARTS,
    bits,
    client,
    graph,
    grid,
    initial,
    record,
    reports,
    run,
    strategy,
)
from plain_grid import PlainGrid

from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.graphs.base import GraphPart
from fedcomp.strategies.gcn.strategy import SkewedGCN
from fedcomp.systems.graphs.words import TRAIN_TYPE

TIMEOUT = 5.0


def dead(partition: int, *rounds: int) -> Callable[[Delivery], str]:
    """Return the plan by which a node answers nothing in some rounds, but is still listed as online."""
    return lambda d: "silent" if d.partition == partition and d.round in rounds else "none"


def everything(**options: Any) -> SkewedGCN:
    """Return a strategy whose clients use all their neighbours, so that everybody wants something of everybody."""
    return strategy(**{"n": ENOUGH, "batch_size": 0, "timeout": TIMEOUT, **options})


def seconds(over: MeteredGrid, of: SkewedGCN, rounds: int) -> list[float]:
    """Run, and return how many simulated seconds each round took; clients that answer take none."""
    clock = [0.0]
    run(of, over, rounds, on_round=lambda *_: clock.append(over.clock))
    return [after - before for before, after in pairwise(clock)]


@pytest.mark.slow
def test_7_14_an_owner_that_leaves_is_done_without_and_is_used_again_at_once() -> None:
    over, of = grid(graph()), everything()

    def fate(number: int, *_: Any) -> None:
        if number == 1:
            over.remove_node(2)
        elif number == 3:
            over.add_node(2)

    run(of, over, 4, on_round=fate)
    for number in (2, 3):
        report = of.reports[number].gcn
        assert report.absent == {2: "no node of this part is there"}
        assert report.train.absent == 1
        assert report.train.clients == PARTS - 1
        assert report.train.replans == 0  # known beforehand
        assert report.train.trips == 3
        assert 0 < report.train.lost_mass < 1
        assert 2 not in report.train.rows_sent
    back = of.reports[4].gcn
    assert (back.absent, back.lost, back.train.lost_mass) == ({}, {}, 0.0)
    assert back.train.rows_sent == of.reports[1].gcn.train.rows_sent
    assert back.train.trips == 4  # who are you


def test_7_14_what_is_lost_is_the_share_of_the_weight_of_the_absent_owner() -> None:
    """By hand: of the last client's rows of P, the absolute values in the columns of the absent owner."""
    parts = graph()
    over, of = grid(parts), everything(structure="full")
    over.remove_node(1)
    run(of, over, 1)
    shares = []
    for part in parts[:1] + parts[2:]:
        inputs = np.unique(part.structure.rows(part.train).columns)
        rows = part.structure.rows(inputs)
        gone = part.structure.owner_of(rows.columns) == 1
        shares.append(rows.values[gone].sum() / rows.values.sum())
    assert of.reports[1].gcn.train.lost_mass == pytest.approx(np.mean(shares), rel=1e-12)


def test_7_14_one_that_all_others_have_left_learns_alone() -> None:
    over, of = grid(graph()), everything()
    run(of, over, 1)
    before = record(initial())
    for part in (0, 1, 3):
        over.remove_node(part)
    found = run(of, over, 2, first=2, start=before)
    report = of.reports[2].gcn
    assert sorted(report.absent) == [0, 1, 3]
    assert (report.train.clients, report.train.trips, report.train.rows_fetched) == (1, 2, 0)
    assert report.train.lost_mass > 0
    assert bits(found) != bits(initial())
    over.remove_node(2)
    # Nobody is there at all: nothing is asked, nothing is learnt, nothing breaks. Flower itself would wait for nodes.
    of.inner.configure_train = lambda *_: []  # type: ignore[method-assign]
    assert bits(run(of, over, 3, first=3, start=before)) == bits(initial())
    assert of.reports[3].gcn.train.trips == 0


@pytest.mark.slow
def test_7_14_a_dead_node_that_is_listed_costs_one_deadline_a_round_and_its_successor_none() -> None:
    parts = graph()
    over, of = grid(parts, fault=dead(1, 2, 3)), everything()
    took = seconds(over, of, 4)
    # In its first round it is missed with its plan; later it is asked for a sign before anybody counts on it.
    assert took == [0.0, TIMEOUT, TIMEOUT, 0.0]
    assert [r.train.replans for r in reports(of)] == [0, PARTS - 1, 0, 0]
    assert [sorted(r.absent) for r in reports(of)] == [[], [1], [1], []]
    assert of.reports[3].gcn.absent == {1: "its node does not answer"}
    assert of.reports[4].gcn.train.rows_sent == of.reports[1].gcn.train.rows_sent


# Messages that are lost, late or doubled.


# Who sits where.


def blind(parts: list[GraphPart], nodes: int = PARTS, **options: Any) -> InProcessGrid:
    """Return a grid of which every node beyond the parts says it holds part 1."""
    config = {"node_config": lambda partition: {"partition-id": 1 if partition >= PARTS else partition}}
    return InProcessGrid(client(parts), nodes, seed=2, **config, **options)


@pytest.mark.slow
def test_a_second_node_of_a_part_is_not_seated_while_the_first_one_answers_and_takes_over_when_it_does_not() -> None:
    within = blind(graph(), fault=dead(1, 3, 4))
    of = everything()

    def join(number: int, *_: Any) -> None:
        if number == 1:
            within.add_node(PARTS)

    fit(
        of, PlainGrid(within), record(initial()), 5, timeout=60.0, train_config=ConfigRecord({"seed": 3}), on_round=join
    )
    claim = f"2 nodes declare partition 1 .*only node {within.node_id_of(1)}"
    claimed = [[bool(re.search(claim, text)) for text in r.refused.values()] for r in of.reports.values()]
    # Until the first one has left a question unanswered; then the second one holds the part.
    assert [sum(found) for found in claimed] == [0, 1, 1, 0, 0]
    assert [sorted(r.absent) for r in reports(of)] == [[], [], [1], [], []]
    assert [r.train.clients for r in reports(of)] == [PARTS, PARTS, PARTS - 1, PARTS, PARTS]


def test_a_part_without_training_nodes_serves_its_rows_and_is_not_asked_to_train() -> None:
    parts = graph()
    parts[1] = replace(parts[1], train=np.zeros(0, np.int64))
    of = everything()
    run(of, over := grid(parts), 1)
    report = of.reports[1].gcn
    assert report.lost == {1: "its part has no node to learn from"}
    assert report.absent == {}
    assert report.train.rows_sent[1] > 0
    assert report.train.clients == PARTS - 1
    assert over.ledger.total("messages", message_type=TRAIN_TYPE, direction="down") == PARTS - 1
