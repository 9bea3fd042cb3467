"""The rules of receiving hold on every path: a fault costs its own update, a node counts once, no round is silent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from round_paths import NODES, PATHS, run

from fedcomp.errors import NoUsableReply

CULPRIT = 1

RELEASES = {name for name in PATHS if name.startswith("private ") and "records" not in name}
"""Paths whose rounds release noise, and a model, also when nobody's update can be used."""

SKIPS = {"groups", "coded sum", "distributed noise"}
"""Paths that give up a round whose sum cannot be made."""


SORTED = SKIPS | {"relay", "shared support", "shared support, stale leader"}
"""Paths with a driver of their own, which drops a second reply."""


def trained(kind: str, *partitions: int):
    """Return the plan that lets one thing happen to the training messages of some partitions."""
    return lambda d: kind if d.message_type.startswith("train") and d.partition in partitions else "none"


def outcome(name: str, fault=None, **options):
    """Return the bits of the model after one round, and the round's report."""
    strategy, result = run(PATHS[name], 1, fault=fault, **options)
    return b"".join(array.numpy().tobytes() for array in result.arrays.values()), strategy.reports[1]


@pytest.mark.long
@pytest.mark.parametrize("name", PATHS)
def test_a_reply_that_cannot_be_used_costs_its_own_update_and_is_accounted_for(name: str) -> None:
    without, report = outcome(name, trained("silent", CULPRIT))
    assert (report.asked, report.used) == (NODES, report.asked - report.lost - len(report.refused))
    for kind in ("raise", "lost_reply"):
        made, report = outcome(name, trained(kind, CULPRIT))
        assert made == without, kind
        assert report.asked == report.used + report.lost + len(report.refused) == NODES, kind


def dense(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[RecordDict], RecordDict]:
    """Answer as a client without the mod would, with a weight that ``change`` made."""

    def damage(content: RecordDict) -> RecordDict:
        rest = {name: record for name, record in content.items() if name in ("fedcomp.node", "record-dp")}
        tensors = {"weight": change(np.ones((40, 30), np.float32)), "bias": np.zeros(12, np.float32)}
        arrays = ArrayRecord({name: Array(np.asarray(values)) for name, values in tensors.items()})
        return RecordDict({**rest, "arrays": arrays, "metrics": MetricRecord({"num-examples": 3})})

    return damage


def cut(content: RecordDict) -> None:
    """Take the last byte off every frame, and a tensor off every model."""
    for record in content.config_records.values():
        for name, value in record.items():
            if isinstance(value, bytes):
                record[name] = value[:-1]
    for record in content.array_records.values():
        del record["weight"]


def late(content: RecordDict) -> None:
    """Answer another message than the one that was sent; what has no frame answers nothing."""
    if "sequence" in (header := content.config_records.get("fedcomp.node", ConfigRecord())):
        header["sequence"] = 10**6
    else:
        content.clear()


DAMAGES: dict[str, Callable[[RecordDict], RecordDict | None]] = {
    "nothing": lambda content: RecordDict(),
    "cut": cut,
    "late": late,
    "NaN": dense(lambda weight: np.where(weight.cumsum().reshape(weight.shape) == 7, np.nan, weight)),
    "infinity": dense(lambda weight: weight * np.float32(np.inf)),
    "another shape": dense(lambda weight: weight.T),
    "another dtype": dense(lambda weight: weight.astype(np.complex64)),
}


def damaging(kind: str):
    """Return the mod that damages what one client answers to a training message."""

    def mod(msg, context, call_next):
        reply = call_next(msg, context)
        mine = context.node_config["partition-id"] == CULPRIT and msg.metadata.message_type.startswith("train")
        if mine and not reply.has_error() and (changed := DAMAGES[kind](reply.content)) is not None:
            reply.content = changed
        return reply

    return mod


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PATHS if name not in SORTED])
def test_a_damaged_reply_is_refused_and_costs_nobody_else(name: str) -> None:
    without, _ = outcome(name, trained("silent", CULPRIT))
    for kind in DAMAGES:
        made, report = outcome(name, mods=[damaging(kind)])
        assert (len(report.refused), report.lost) == (1, 0), kind
        assert made == without, kind


@pytest.mark.long
@pytest.mark.parametrize("name", PATHS)
def test_an_answer_that_comes_twice_counts_once(name: str) -> None:
    once, _ = outcome(name)
    for kind in ("duplicate", "duplicate_reply"):
        # A metered grid would drop the second one before a strategy sees it.
        twice, report = outcome(name, trained(kind, *range(NODES)), metered=False)
        assert twice == once, kind
        assert report.used == NODES, kind
        assert report.duplicates == (0 if name in SORTED else NODES), kind


@pytest.mark.long
@pytest.mark.parametrize("name", PATHS)
def test_a_run_whose_clients_all_fail_ends_unless_the_round_is_paid_for_or_given_up(name: str) -> None:
    failing = trained("raise", *range(NODES))
    if name not in RELEASES | SKIPS:
        with pytest.raises(NoUsableReply, match=f"{NODES} clients were asked"):
            outcome(name, failing)
        return
    _, report = outcome(name, failing)
    assert report.used == 0
