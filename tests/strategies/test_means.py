"""The mean as a strategy steps from it: FedAvg's shortcut, batch statistics, adaptive server optimisers (B6)."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi
from toy import client_app, fedavg, model, stack, training

from fedcomp.clients.compressed import compression
from fedcomp.codecs import DCT, FFT, QSGD, Clip, Domain, ErrorFeedback, Identity, RandomK, ScaleCom, TopK, chain
from fedcomp.flower._private import acting_as
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.records import to_record
from fedcomp.layout import Layout, SmallDense
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.means import aggregate_once, returns_mean
from fedcomp.strategies.shared_support import SharedSupport

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


WIDTH = 1500


def norm_layer(*, counter: bool) -> ArrayRecord:
    """A kernel and torch's five tensors of batch normalisation, as a list: nothing has a name."""
    vectors = [np.ones(WIDTH), np.zeros(WIDTH), np.zeros(WIDTH), np.ones(WIDTH)]
    arrays = [np.zeros((100, 40), np.float32), *(v.astype(np.float32) for v in vectors)]
    return ArrayRecord([*arrays, np.array(0)] if counter else arrays)


def normalising(mod) -> ClientApp:
    """An app whose weights move at random and whose variances shrink towards small positive values."""

    def step(arrays: dict[str, Any], number: int, partition: int) -> dict[str, Any]:
        out = {}
        for i, (k, value) in enumerate(arrays.items()):
            key = Key(3, "statistics", number, partition, i)
            if k == "4":
                target = 0.01 + 0.02 * key.uniform(value.size)
                out[k] = (value + 0.9 * (target - value)).astype(np.float32)
            elif value.dtype.kind == "f":
                out[k] = (value + 0.3 * key.generator().normal(size=value.shape)).astype(np.float32)
            else:
                out[k] = value + 1
        return out

    return training(step, [mod])


def strategies():
    yield Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.05)), compression()
    yield SharedSupport(ScaleCom(density=0.05), fraction_evaluate=0.0), compression()


def lowest(strategy, mod, initial: ArrayRecord, rounds: int = 8) -> list[float]:
    """Return the smallest variance after every round."""
    found: list[float] = []

    def look(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        found.append(float(arrays["4"].numpy().min()))
        return MetricRecord({})

    strategy.start(InProcessGrid(normalising(mod), 3, seed=1), initial, num_rounds=rounds, timeout=9, evaluate_fn=look)
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


ONE = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}
WEIGHTS = 1200
DENSE_BIAS = SmallDense(share=1.0)
ADAPTIVE = [FedAdam, FedYogi, FedAdagrad]


class Kept(FedAdam):
    """Flower's way to look at the model after a round; its replies are aggregated one by one."""

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.last = arrays
        return arrays, metrics


def rounds(strategy: Compressed, app: ClientApp, initial: ArrayRecord, count: int):
    """Yield the model before and after each round."""
    with InProcessGrid(app, 3, seed=3) as grid:
        arrays = initial
        for number in range(1, count + 1):
            replies = grid.send_and_receive(list(strategy.configure_train(number, arrays, ConfigRecord(), grid)))
            after, _ = strategy.aggregate_train(number, replies)
            assert after is not None
            yield stack(arrays), stack(after)
            arrays = after


def moments(strategy) -> np.ndarray:
    """Return first and second moments as one array of two rows, zeros before the first round."""
    held = [strategy.m_t, strategy.v_t]
    size = sum(v.size for v in held[0].values()) if held[0] else stack(model()).size
    return np.stack([np.concatenate([v.reshape(-1) for v in m.values()]) if m else np.zeros(size) for m in held])


def burst() -> ClientApp:
    """Return an app whose update is 0.5 at the first coordinate in round 1, and at the second one from then on."""

    def step(arrays: dict[str, Any], number: int, partition: int) -> dict[str, Any]:
        weights = arrays["w"].copy()
        weights[0 if number == 1 else 1] += 0.5
        return {"w": weights}

    return training(step, [compression()])


@pytest.mark.slow
@pytest.mark.parametrize("codec", [TopK(density=0.05), RandomK(density=0.05)], ids=["top-k", "shared random-k"])
@pytest.mark.parametrize("inner", ADAPTIVE, ids=lambda c: c.__name__)
def test_b6_coordinates_of_which_nothing_arrived_keep_value_and_moments(inner, codec) -> None:
    strategy = Compressed(inner(**ONE), codec, policy=DENSE_BIAS)
    held = moments(strategy.inner)
    quiet = 0
    for number, (before, after) in enumerate(rounds(strategy, client_app([compression()]), model(), 6), 1):
        now = moments(strategy.inner)
        # A moment that changed, or a coordinate that moved, was reported on in this round.
        changed = (now != held).any(axis=0) | (after != before)
        assert np.count_nonzero(changed[:WEIGHTS]) <= strategy.reports[number].changed
        assert changed[WEIGHTS:].all(), "the dense rest arrives in every round"
        quiet += np.count_nonzero(~changed & (held[1] > 0))
        held = now
    assert quiet > 100, "the test needs coordinates that were reported on before and are not now"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("inner", [*ADAPTIVE, Kept], ids=lambda c: c.__name__)
def test_b6_one_arrival_makes_one_step(inner, dtype: str) -> None:
    """Without support-wise moments FedAdam walks on for twenty rounds: seven times the step of the round itself."""
    initial = ArrayRecord({"w": Array(np.random.default_rng(1).normal(size=2000).astype(dtype))})
    steps = [*rounds(Compressed(inner(**ONE), TopK(0.001)), burst(), initial, 20)]
    path = np.array([after[0] for _, after in steps])
    assert path[0] > steps[0][0][0]
    np.testing.assert_array_equal(path, path[0])


@pytest.mark.slow
def test_b6_a_mean_that_is_zero_is_news_where_everything_travels() -> None:
    """Dense codecs choose no coordinates: there Flower's rule holds as it is, momentum included."""
    initial = ArrayRecord({"w": Array(np.zeros(2000, np.float32))})
    for codec in (Identity(), QSGD(levels=127)):
        path = [after[0] for _, after in rounds(Compressed(FedAdam(**ONE), codec), burst(), initial, 20)]
        assert path[-1] > 5.0 * path[0] > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("inner", ADAPTIVE, ids=lambda c: c.__name__)
def test_b6_what_arrives_in_every_round_takes_the_strategys_own_steps(inner) -> None:
    app = client_app([compression()])
    pair = (Compressed(inner(**ONE), codec, policy=DENSE_BIAS) for codec in (TopK(0.05), Identity()))
    sparse, dense = ([*rounds(strategy, app, model(), 5)][-1][1] for strategy in pair)
    np.testing.assert_allclose(sparse[WEIGHTS:], dense[WEIGHTS:], rtol=1e-5, atol=1e-6)
    assert not np.allclose(sparse[:WEIGHTS], dense[:WEIGHTS])


def test_b6_codecs_say_whether_they_list_coordinates() -> None:
    layout = Layout.flat(5000)
    assert TopK(0.01).sparse(layout)
    assert not QSGD(7).sparse(layout)
    # Whatever is around it: what arrives of a few cosines is dense.
    for codec in (FFT(), Domain(DCT(), TopK(0.01))):
        assert not any(each.sparse(layout) for each in (codec, ErrorFeedback(codec), chain(Clip(1.0), codec)))
    assert ErrorFeedback(TopK(0.01)).sparse(layout)
    assert not TopK(0.01).sparse(Layout.flat(50, density=1.0)), "a model that travels dense has nothing to list"
