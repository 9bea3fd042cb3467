"""The models of four rounds of gradient codes with losses are, bit for bit, what they were."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result
from gradient_toy import app_of
from round_paths import NODES, quiet

from fedcomp.flower.faults import ScriptedFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.strategies.coded.strategy import CodedFedAvg

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
