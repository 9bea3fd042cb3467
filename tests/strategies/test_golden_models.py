"""The models of four rounds with losses are, bit for bit, what they were: no path of updates changed its arithmetic."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result
from gradient_toy import app_of
from round_paths import NODES, PATHS, quiet, run

from fedcomp.flower.faults import ScriptedFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.strategies.coded.strategy import CodedFedAvg

FAULTS = ScriptedFaults({(2, 1): "lost_reply", (2, 3): "silent", (3, 0): "duplicate_reply", (3, 4): "raise"})

GOLDEN = {
    "mean": "8a686f3e573793d5",
    "mean of whole models": "f062726a330fe77d",
    "mean of votes": "05bb6a649c6cae02",
    "mean with momentum": "5846037ba7a88d3f",
    "adaptive": "66afa712221ed07c",
    "median": "eb7fd3cfae6c1093",
    "trimmed mean": "f172c4e331e98588",
    "a strategy of one's own": "aa395adff74e55c5",
    "shared support": "c6961b007045d812",
    "shared support, stale leader": "0e9d91d308776572",
    "shared basis": "09364eac67555cfc",
    "shared basis, two exchanges": "960eeb413f2e3c1d",
    "relay": "8a686f3e573793d5",
    "groups": "55c0050094545d41",
    "tree of groups": "29627004c3deef66",
    "coded sum": "597bbbfa528c3f2a",
    "distributed noise": "8082268ec759edfe",
    "private mean": "bf66dae6164cd269",
    "private mean on a support of all": "5ed99f2aeba2415b",
    "private mean, adaptive clip": "5352c22079808a37",
    "private mean alone": "1db3236e319dcae2",
    "private votes": "0421b822f6620942",
    "private votes alone": "0421b822f6620942",
    "local privacy": "2c9c9a1bbdc3e1a6",
    "private records": "d9042e3e47853ec5",
    "private records, compressed": "8d7e6d7eb47fc0f1",
}
"""SHA-256 of names and bytes of all tensors, the first 16 digits."""

LIBRARIES = (
    "private factors",
    "fitted basis",
    "fitted basis, shared grids",
    "latents in a ring",
    "latents of a common node",
)
"""Paths whose carriers come from LAPACK, or weights from torch, whose last bits differ between machines."""


GRADIENT_CODES = {"fractional": "e9a3c2cf08fa5474", "cyclic": "ed9c0c752f75f8fe"}
"""Of gradient codes, which need an app of their own; the cyclic one over a field, as LAPACK finds the other's."""


def digest(result: Result) -> str:
    made = b"".join(key.encode() + array.numpy().tobytes() for key, array in result.arrays.items())
    return hashlib.sha256(made).hexdigest()[:16]


@pytest.mark.parametrize("scheme", GRADIENT_CODES)
def test_the_model_of_a_gradient_code_is_what_it_was(scheme: str) -> None:
    def train(msg, context):
        partition = int(context.node_config["partition-id"])
        trained = {name: Array(0.75 * array.numpy() + partition / 3) for name, array in msg.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": 2 * partition + 1, "loss": partition / 7})
        return Message(RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics}), reply_to=msg)

    losses, arithmetic = (2, "float64") if scheme == "fractional" else (1, "gf31")
    strategy = CodedFedAvg(
        quiet(), construction="gradcode", scheme=scheme, losses=losses, arithmetic=arithmetic, limit=512.0
    )
    lost = {(2, 1): "lost_reply", (3, 0): "duplicate_reply", (3, 4): "raise", (4, 3): "silent"}
    arrays = ArrayRecord({"weight": Array(np.arange(24, dtype=np.float32).reshape(4, 6)), "steps": Array(np.ones(3))})
    with InProcessGrid(app_of(train), NODES + 1, seed=4, fault=ScriptedFaults(lost)) as grid:
        result = strategy.start(grid, arrays, num_rounds=4, timeout=9.0)
    assert [strategy.reports[r].coded.received for r in (1, 2, 3, 4)] == [6, 5, 5, 5]
    assert digest(result) == GRADIENT_CODES[scheme]


@pytest.mark.parametrize("name", PATHS)
def test_the_model_is_what_it_was(name: str) -> None:
    _, result = run(PATHS[name], 4, fault=FAULTS)
    if name in GOLDEN:
        assert digest(result) == GOLDEN[name]
    else:
        assert name in LIBRARIES
