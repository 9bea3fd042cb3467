"""FedAvg returns the mean it is given, so it is not run on it; whatever else is about the aggregation still is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM

from fedcomp.flower._private import acting_as
from fedcomp.flower.records import to_record
from fedcomp.strategies.means import aggregate_once, returns_mean

CONTENTS = [RecordDict({"metrics": MetricRecord({"num-examples": n, "loss": n / 7})}) for n in (1, 2, 5)]


class Checked(FedAvg):
    """Aggregates as FedAvg does, by way of a method of its own."""

    seen = 0

    def _check_and_log_replies(self, *args: Any, **options: Any) -> Any:
        self.seen += 1
        return super()._check_and_log_replies(*args, **options)


def mean() -> ArrayRecord:
    values = np.array([0.1, -0.0, 1e-42, 3e38, np.inf], np.float32)
    arrays = {"w": values, "half": values.astype(np.float16), "0d": np.float32(0.3), "steps": np.array([2.5])}
    return to_record({name: np.asarray(array) for name, array in arrays.items()})


def once(strategy: Any, received: tuple[int, int] | None = (3, 1)) -> tuple[dict[str, bytes], Any]:
    with acting_as(1, 0), np.errstate(over="ignore"):
        asked = Message(RecordDict(), 5, "train")
        arrays, metrics = aggregate_once(strategy, 1, ("arrays", mean()), asked, CONTENTS, received=received)
    assert arrays is not None
    return {name: array.numpy().tobytes() for name, array in arrays.items()}, metrics


@pytest.mark.parametrize("received", [(3, 1), None])
def test_it_is_what_fedavg_makes_of_one_reply(
    received: tuple[int, int] | None, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for strategy in (FedAvg(), checked := Checked()):
        caplog.clear()
        found.append((once(strategy, received), [(r.levelno, r.getMessage()) for r in caplog.records]))
    assert checked.seen == 1
    assert found[0] == found[1]
    said = "Received the sum of the round's updates" if received is None else "Received 3 results and 1 failures"
    assert [text for _, text in found[0][1]] == [f"aggregate_train: {said}"]
    assert found[0][0][1]["loss"] == pytest.approx((1 + 4 + 25) / 7 / 8)


def test_metrics_are_aggregated_by_the_strategys_own_function() -> None:
    asked = []

    def count(records: list[RecordDict], key: str) -> MetricRecord:
        asked.append((len(records), key))
        return MetricRecord({"n": len(records)})

    assert once(FedAvg(train_metrics_aggr_fn=count))[1] == MetricRecord({"n": 3})
    assert asked == [(3, "num-examples")]


def test_a_method_put_into_the_instance_is_called() -> None:
    strategy, calls = FedAvg(), []
    theirs = strategy.aggregate_train

    def own(server_round: int, replies: Any) -> Any:
        calls.append(server_round)
        return theirs(server_round, replies)

    strategy.aggregate_train = own  # type: ignore[method-assign]
    assert once(strategy)[0] == once(FedAvg())[0]
    assert calls == [1]


def test_only_fedavg_returns_the_mean() -> None:
    class Named(FedAvg):
        def configure_train(self, *args: Any, **options: Any) -> Any:
            return super().configure_train(*args, **options)

    class Own(FedAvg):
        def aggregate_train(self, *args: Any, **options: Any) -> Any:
            return super().aggregate_train(*args, **options)

    assert [returns_mean(each()) for each in (FedAvg, Named, Own, Checked, FedAdam)] == [True, True, *[False] * 3]
    assert not returns_mean(FedAvgM(server_momentum=0.9))
