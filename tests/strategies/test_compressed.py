"""The drop-in pair, end to end on the in-process Grid."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
)
from private_runs import forged
from toy import ONE, client_app, fedavg, model, put_sent_frame, stack, training, update

from fedcomp import wire
from fedcomp.clients import programs
from fedcomp.clients.compressed import compression
from fedcomp.codecs import DGC, EDEN, QSGD, Clip, Codec, Identity, TopK, chain
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError, NoUsableReply
from fedcomp.flower import asks
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.layout import SmallDense
from fedcomp.strategies.compressed import Compressed
from fedcomp.systems.pair import Pair


def run(strategy, app=None, *, nodes=4, rounds=3, counter=False, initial=None, **grid_options):
    """Run a strategy on a metered in-process Grid; return the result and the ledger."""
    app = client_app([compression()]) if app is None else app
    ledger = TrafficLedger()
    grid = MeteredGrid(InProcessGrid(app, nodes, **grid_options), ledger)
    result = strategy.start(grid, initial or model(counter=counter), num_rounds=rounds, timeout=60)
    return result, ledger


def same(a: ArrayRecord, b: ArrayRecord) -> bool:
    return list(a) == list(b) and all(
        a[k].numpy().dtype == b[k].numpy().dtype and a[k].numpy().tobytes() == b[k].numpy().tobytes() for k in a
    )


def noisy_model(seed=3):
    rng = np.random.default_rng(seed)
    record = model()
    return ArrayRecord({k: Array(rng.normal(size=v.shape).astype(np.float32)) for k, v in record.items()})


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: fedavg(),
        lambda: FedAvgM(server_momentum=0.9, server_learning_rate=0.7, **ONE),
        lambda: FedAdam(**ONE),
        lambda: FedAdagrad(**ONE),
        lambda: FedYogi(**ONE),
        lambda: FedProx(proximal_mu=0.1, **ONE),
        lambda: FedMedian(**ONE),
        lambda: FedTrimmedAvg(**ONE),
        lambda: Krum(num_malicious_nodes=1, **ONE),
        lambda: MultiKrum(num_malicious_nodes=1, num_nodes_to_select=2, **ONE),
    ],
)
def test_identity_is_bit_equal_to_the_inner_strategy_alone(make) -> None:
    """Flower spec, test 3: the identity codec changes not one bit, whatever the inner strategy."""
    plain, _ = run(make(), initial=noisy_model())
    wrapped, _ = run(Compressed(make(), Identity()), initial=noisy_model())
    # Flower's optimisers return float64; the wrapper keeps the model's own dtype.
    rounded = ArrayRecord({k: Array(v.numpy().astype(np.float32)) for k, v in plain.arrays.items()})
    if any(v.numpy().dtype != np.float32 for v in plain.arrays.values()):
        np.testing.assert_allclose(stack(rounded), stack(wrapped.arrays), rtol=2e-6, atol=1e-6)
    else:
        assert same(plain.arrays, wrapped.arrays)
    assert plain.train_metrics_clientapp.keys() == wrapped.train_metrics_clientapp.keys()
    for r, metrics in plain.train_metrics_clientapp.items():
        if any(v.numpy().dtype != np.float32 for v in plain.arrays.values()):
            continue
        assert dict(metrics) == dict(wrapped.train_metrics_clientapp[r])


def test_negative_zero_survives_the_mean() -> None:
    """A sum that starts at +0.0 would turn -0.0 into 0.0; Flower's does not."""
    app = training(lambda *_: {"w": np.full(4, -0.0, np.float32)}, [compression()])
    initial = ArrayRecord({"w": Array(np.ones(4, np.float32))})
    result, _ = run(Compressed(fedavg(fraction_evaluate=0.0), Identity()), app, initial=initial, rounds=1)
    assert np.signbit(result.arrays["w"].numpy()).all()


@pytest.mark.slow
def test_the_mean_path_and_the_dense_path_agree() -> None:
    """The one-buffer aggregation gives what decoding every reply and averaging gives."""

    class UnknownMean(FedAvg):
        def aggregate_train(self, server_round, replies):  # an override, so not on the list of known means
            return super().aggregate_train(server_round, replies)

    a, _ = run(Compressed(fedavg(), TopK(density=0.1)), counter=True)
    b, _ = run(Compressed(UnknownMean(**ONE), TopK(density=0.1)), counter=True)
    np.testing.assert_allclose(stack(a.arrays), stack(b.arrays), rtol=1e-6, atol=1e-3)
    assert a.arrays["num_batches_tracked"].numpy() == b.arrays["num_batches_tracked"].numpy()


def test_biased_codecs_get_feedback_and_unbiased_ones_do_not() -> None:
    assert isinstance(Compressed(fedavg(), TopK(density=0.1)).codec, ErrorFeedback)
    assert isinstance(Compressed(fedavg(), QSGD(levels=4)).codec, QSGD)
    assert isinstance(Compressed(fedavg(), TopK(density=0.1), feedback=False).codec, TopK)


def test_without_a_codec_clients_send_eden_of_one_bit_and_get_the_model_whole() -> None:
    announced = []

    def listening(msg: Message, context: Context) -> Message:
        announced.append(asks.find_ask(msg.content))
        return client_app([compression()])(msg, context)

    default, ledger = run(Compressed(fedavg(fraction_evaluate=0.0)), listening)
    explicit, _ = run(Compressed(fedavg(fraction_evaluate=0.0), EDEN(bits=1), None))
    assert same(default.arrays, explicit.arrays)
    assert len(announced) == 12
    assert all(each.system == Pair(EDEN(bits=1)).to_config() and each.downlink == {} for each in announced)
    dense = 4 * 1212
    assert ledger.total("payload", direction="down") >= 12 * dense
    assert ledger.total("payload", direction="up") < 12 * dense / 10


@pytest.mark.parametrize("codec", [EDEN(bits=1), TopK(density=0.01, values="q2"), QSGD(levels=7)], ids=repr)
@pytest.mark.parametrize("downlink", [None, TopK(density=0.05)], ids=repr)
def test_by_default_the_dense_rest_is_at_most_a_tenth_of_a_frame(codec: Codec, downlink: Codec | None) -> None:
    """Whatever the codec: one value in a hundred sent dense is three fourths of a frame of top-k in two bits."""
    strategy = Compressed(fedavg(), codec, downlink)
    run(strategy, rounds=2)
    for report in strategy.reports.values():
        assert report.compressed == 4
        assert 0 <= report.dense_bytes <= report.frame_bytes / 10
    small = Compressed(fedavg(), codec, downlink, policy=SmallDense())
    run(small, rounds=2)
    assert all(report.dense_bytes > 4 * 12 for report in small.reports.values()), "the model has a bias"
    assert small.reports[1].frame_bytes > strategy.reports[1].frame_bytes


@pytest.mark.slow
def test_a_custom_metrics_function_sees_every_reply_once() -> None:
    seen: list[int] = []

    def collect(records: list[RecordDict], key: str) -> MetricRecord:
        seen.append(len(records))
        assert all(len(r.metric_records) == 1 and not r.array_records for r in records)
        return MetricRecord({"replies": len(records)})

    result, _ = run(Compressed(fedavg(train_metrics_aggr_fn=collect), TopK(density=0.1)), rounds=2)
    assert seen == [4, 4]
    assert dict(result.train_metrics_clientapp[1]) == {"replies": 4}


def test_a_codec_the_client_does_not_accept_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building imports what an id names; and an accepted wrapper must not bring in another codec, however deep."""
    built: list[str] = []
    honest = programs.get_system
    monkeypatch.setattr(programs, "get_system", lambda config: (built.append(config["id"]), honest(config))[1])
    for codec in (ErrorFeedback(TopK(density=0.1)), chain(Clip(1.0), TopK(density=0.1))):
        strategy = Compressed(fedavg(), codec)
        run(strategy, client_app([compression(accept=["feedback", "chain", "clip"])]), rounds=1)
        assert all("['topk']" in reason for reason in strategy.reports[1].unsupported.values())
        assert len(strategy.reports[1].unsupported) == 4
    assert built == []


def test_arguments_in_the_wrong_order_or_form_are_refused_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"strategy comes first, then the codec: Compressed\(FedAvg\(\), TopK\("):
        Compressed(TopK(0.1), fedavg())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"not 'eden'; write EDEN\(\.\.\.\)$"):
        Compressed(fedavg(), "eden")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"not 'no such'$"):
        Compressed(fedavg(), "no such")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"EDEN\(\) on the downlink .*replicas would diverge"):
        Compressed(fedavg(), EDEN(bits=1), downlink=EDEN(bits=1))


def test_one_client_and_zero_rounds() -> None:
    strategy = Compressed(fedavg(), TopK(density=0.1), downlink=TopK(density=0.1))
    result, _ = run(strategy, nodes=1, rounds=2)
    assert strategy.reports[2].compressed == 1
    assert np.any(stack(result.arrays))
    nothing, ledger = run(Compressed(fedavg(), TopK(density=0.1)), rounds=0)
    assert np.array_equal(stack(nothing.arrays), stack(model()))
    assert ledger.total(value="wire") == 0


def peak_of_aggregation(strategy: Compressed, nodes: int, size: int = 200_000) -> int:
    """Return the peak bytes allocated inside aggregate_train, for a model of ``size`` elements."""
    step = lambda arrays, _, partition: {k: a + update(1, partition, a.shape) for k, a in arrays.items()}  # noqa: E731
    grid = InProcessGrid(training(step, [compression()]), nodes)
    initial = ArrayRecord({"w": Array(np.zeros(size, np.float32))})
    replies = grid.send_and_receive(strategy.configure_train(1, initial, ConfigRecord(), grid), timeout=9)
    tracemalloc.start()
    try:
        assert strategy.aggregate_train(1, replies)[0] is not None
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_memory_of_a_weighted_mean_does_not_grow_with_clients() -> None:
    """One buffer, whatever the number of clients; decoding every reply first would need a model for each."""
    few = peak_of_aggregation(Compressed(fedavg(), TopK(density=0.001)), 4)
    many = peak_of_aggregation(Compressed(fedavg(), TopK(density=0.001)), 40)
    assert many < few + 4 * 200_000, "less than one more model for 36 more clients"
    dense = peak_of_aggregation(Compressed(FedMedian(**ONE), TopK(density=0.001)), 40)
    assert dense > 36 * 4 * 200_000, "the measurement sees a strategy that needs every model"


@pytest.mark.parametrize("version", [3, 5])
def test_a_server_of_another_protocol_version_is_refused_by_name(version: int) -> None:
    """What else it asks for cannot be read: an app that answered might send what it must not."""

    def app(msg: Message, context: Context) -> Message:
        for config in msg.content.config_records.values():
            config["fedcomp.protocol"] = version
        return client_app([compression()])(msg, context)

    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.1))
    with pytest.raises(NoUsableReply, match=f"is {version}, expected version 4; run the same release"):
        run(strategy, app, rounds=1)


def test_a_policy_of_ones_own_travels_to_the_clients() -> None:
    """A density per tensor and an exact tensor, decided on the server, used by clients that know nothing of it."""

    def policy(name: str, shape: tuple[int, ...], dtype: str):
        return {"weight": 0.25, "bias": "exact"}[name]

    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.01, scope="layer"), policy=policy)
    result, _ = run(strategy, rounds=1, nodes=1)
    assert np.count_nonzero(result.arrays["weight"].numpy()) == 300
    np.testing.assert_array_equal(result.arrays["bias"].numpy(), update(1, 0, (12,), 1))


def test_a_client_cannot_go_on_with_the_first_rounds_density() -> None:
    """After the warm-up as many values as in it are refused, although they would still open."""
    many = [wire.sparse((1200,), np.arange(120), np.ones(120, np.float32)), wire.dense(np.ones(12, np.float32))]
    liar = forged(client_app([compression()]), lambda content: put_sent_frame(content, wire.encode(many)), 1)
    strategy = Compressed(fedavg(fraction_evaluate=0.0), DGC(0.01, warmup=1), policy=SmallDense())
    run(strategy, liar, nodes=3, seed=4)
    assert [r.compressed for r in strategy.reports.values()] == [3, 2, 2]
    reasons = [reason for r in strategy.reports.values() for reason in r.refused.values()]
    assert all("120 values, round" in reason and "allows 12" in reason for reason in reasons)
