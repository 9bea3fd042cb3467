"""Batch statistics that no name tells of: recognised, or kept positive and reported."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from toy import fedavg, with_halves

from fedcomp.clients.compressed import compression
from fedcomp.codecs import ScaleCom, TopK
from fedcomp.flower.grid import InProcessGrid
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.shared_support import SharedSupport

WIDTH = 1500


def norm_layer(*, counter: bool) -> ArrayRecord:
    """A kernel and torch's five tensors of batch normalisation, as a list: nothing has a name."""
    vectors = [np.ones(WIDTH), np.zeros(WIDTH), np.zeros(WIDTH), np.ones(WIDTH)]
    arrays = [np.zeros((100, 40), np.float32), *(v.astype(np.float32) for v in vectors)]
    return ArrayRecord([*arrays, np.array(0)] if counter else arrays)


def training(mod) -> ClientApp:
    """An app whose weights move at random and whose variances shrink towards small positive values."""
    app = with_halves([mod])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        ((name, record),) = msg.content.array_records.items()
        round_ = int(next(iter(msg.content.config_records.values()))["server-round"])
        out = {}
        for i, (k, array) in enumerate(record.items()):
            value = array.numpy()
            key = Key(3, "statistics", round_, int(context.node_config["partition-id"]), i)
            if k == "4":
                target = 0.01 + 0.02 * key.uniform(value.size)
                out[k] = Array((value + 0.9 * (target - value)).astype(np.float32))
            elif value.dtype.kind == "f":
                out[k] = Array(
                    (value + 0.3 * key.generator().normal(size=value.size).reshape(value.shape)).astype(np.float32)
                )
            else:
                out[k] = Array(np.asarray(value + 1))
        metrics = MetricRecord({"num-examples": 5})
        return Message(RecordDict({name: ArrayRecord(out), "metrics": metrics}), reply_to=msg)

    return app


def strategies():
    yield Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.05)), compression()
    yield SharedSupport(ScaleCom(density=0.05), fraction_evaluate=0.0), compression()


def lowest(strategy, mod, initial: ArrayRecord, rounds: int = 8) -> list[float]:
    """Return the smallest variance after every round."""
    found: list[float] = []

    def look(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        found.append(float(arrays["4"].numpy().min()))
        return MetricRecord({})

    strategy.start(InProcessGrid(training(mod), 3, seed=1), initial, num_rounds=rounds, timeout=9, evaluate_fn=look)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 3])
@pytest.mark.parametrize("index", [0, 1])
def test_b3_variances_stay_positive_and_the_report_says_so(
    index: int, dead: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a counter nothing tells a variance from a weight: error feedback would carry it below zero.

    A unit that never fires has a variance of exactly zero, and its neighbours' are variances all the same.
    """
    strategy, mod = list(strategies())[index]
    arrays = [array.numpy().copy() for array in norm_layer(counter=False).values()]
    arrays[4][:dead] = 0.0
    with caplog.at_level(logging.WARNING, logger="flwr.fedcomp"):
        found = lowest(strategy, mod, ArrayRecord(arrays))
    assert min(found) >= 0.0 if dead else min(found) > 0.0
    notes = [note for report in strategy.reports.values() for note in report.notes]
    assert any("would no longer have been positive" in note for note in notes), "the variances never came near zero"
    assert "named by position" in caplog.text
    assert "ArrayRecord(model.state_dict())" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_b3_torch_statistics_without_names_are_averaged_as_values(index: int) -> None:
    """What FedAvg makes of variances: all clients are near .02 after two rounds, compressed ones would lag behind."""
    strategy, mod = list(strategies())[index]
    found = lowest(strategy, mod, norm_layer(counter=True), rounds=3)
    assert found[-1] == pytest.approx(0.015, abs=0.01)
    assert not any(report.notes for report in strategy.reports.values())
