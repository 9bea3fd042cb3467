"""The rules of receiving hold on every path: a fault costs its own update, a node counts once, no round is silent."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from round_paths import NODES, PATHS, run

from fedcomp.errors import NoUsableReply
from fedcomp.flower.faults import late
from fedcomp.flower.rounds import ExchangeStrategy

CULPRITS = (1, 3)

RELEASES = {name for name in PATHS if name.startswith("private ") and "records" not in name}
"""Paths whose rounds release noise, and a model, also when nobody's update can be used."""

SKIPS = {"coded sum", "distributed noise"}
"""Paths that give up a round whose sum cannot be made."""


def dense(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[RecordDict], RecordDict]:
    """Answer as a client without the mod would, with a weight that ``change`` made."""

    def damage(content: RecordDict) -> RecordDict:
        rest: dict[str, ConfigRecord] = {
            name: ConfigRecord({entry: value for entry, value in content[name].items() if not isinstance(value, bytes)})
            for name in content
            if name in ("fedcomp.node", "record-dp")
        }
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


def stale(content: RecordDict) -> None:
    """Answer another message than the one that was sent; what has no frame answers nothing."""
    if "sequence" in (header := content.config_records.get("fedcomp.node", ConfigRecord())):
        header["sequence"] = 10**6
    else:
        content.clear()


def forged(content: RecordDict) -> None:
    """Claim another node's partition."""
    header = ConfigRecord(dict(content.config_records.get("fedcomp.node", {})))
    header["partition-id"] = 0
    content["fedcomp.node"] = header


def boastful(content: RecordDict) -> None:
    """Give a weight that would drown all others."""
    for record in content.metric_records.values():
        record["num-examples"] = 1.7e308


REPLACED: dict[str, Callable[[RecordDict], RecordDict | None]] = {
    "nothing": lambda content: RecordDict(),
    "cut": cut,
    "stale": stale,
    "NaN": dense(lambda weight: np.where(weight.cumsum().reshape(weight.shape) == 7, np.nan, weight)),
    "infinity": dense(lambda weight: weight * np.float32(np.inf)),
    "another shape": dense(lambda weight: weight.T),
    "another dtype": dense(lambda weight: weight.astype(np.complex64)),
    "forged partition": forged,
    "huge metric": boastful,
}
INJECTED = {"raised": "raise", "lost": "lost_reply", "late": late()}
PAIRS = [
    ("raised", "lost"),
    ("late", "nothing"),
    ("cut", "stale"),
    ("NaN", "infinity"),
    ("another shape", "another dtype"),
    ("huge metric", "huge metric"),
    ("forged partition", "forged partition"),
]
"""What happens to the two culprits. A path that reads no metrics, or knows the partitions, may take both updates."""


def trained(kinds):
    """Return the plan that lets one thing happen to the training message of each of some partitions."""
    return lambda d: kinds.get(d.partition, "none") if d.message_type.startswith("train") else "none"


def replaced(changes):
    """Return the mod that changes what some partitions reply to training, and to the query that asks for values."""

    def mod(msg: Message, context: Context, call_next) -> Message:
        sends = msg.metadata.message_type in ("train", "query")
        reply = call_next(msg, context)
        change = changes.get(context.node_config["partition-id"])
        if sends and change is not None and reply.has_content():
            changed = change(reply.content)
            reply.content = reply.content if changed is None else changed
        return reply

    return mod


def outcome(name: str, kinds=(), changes=(), **options):
    """Return the bits of the model after one round, and the round's report."""
    strategy, result = run(
        PATHS[name], 1, fault=trained(dict(kinds)), mods=(replaced(dict(changes)),) if changes else (), **options
    )
    return b"".join(array.numpy().tobytes() for array in result.arrays.values()), strategy.reports[1]


@cache
def undisturbed(name: str) -> bytes:
    return outcome(name)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", PATHS)
def test_a_reply_that_cannot_be_used_costs_its_own_update_and_is_accounted_for(name: str) -> None:
    without, report = outcome(name, dict.fromkeys(CULPRITS, "silent"))
    assert (report.asked, report.used, report.lost) == (NODES, NODES - 2, 2)
    for pair in PAIRS:
        at = dict(zip(CULPRITS, pair, strict=True))
        kinds = {partition: INJECTED[what] for partition, what in at.items() if what in INJECTED}
        changes = {partition: REPLACED[what] for partition, what in at.items() if what in REPLACED}
        made, report = outcome(name, kinds, changes)
        assert report.asked == report.used + report.lost + len(report.refused) == NODES, pair
        if "forged partition" in pair:
            # The engine knows better, so it takes nothing from anybody; at most the order of the sum is another.
            assert report.used in (NODES, NODES - 2), pair
            continue
        ignored = "huge metric" in pair and made == undisturbed(name)
        assert ignored or made == without, pair
        assert report.used == (NODES if ignored else NODES - 2), pair
        if not (kinds or ignored or name in SKIPS | {"relay"}):
            assert (len(report.refused), report.lost) == (2, 0), pair


@pytest.mark.slow
@pytest.mark.parametrize("name", PATHS)
def test_an_answer_that_comes_twice_counts_once(name: str) -> None:
    kinds = {partition: ("duplicate", "duplicate_reply")[partition % 2] for partition in range(NODES)}
    # A metered grid would drop the second one before a strategy sees it.
    twice, report = outcome(name, kinds, metered=False)
    assert twice == undisturbed(name)
    assert report.used == NODES
    # A driver of one's own drops a second reply.
    assert report.duplicates == (0 if isinstance(PATHS[name].strategy(), ExchangeStrategy) else NODES)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATHS)
def test_a_run_whose_clients_all_fail_ends_unless_the_round_is_paid_for(name: str) -> None:
    failing = dict.fromkeys(range(NODES), "raise")
    if name not in RELEASES:
        with pytest.raises(NoUsableReply, match=f"{NODES} clients were asked"):
            outcome(name, failing)
        return
    _, report = outcome(name, failing)
    assert report.used == 0
