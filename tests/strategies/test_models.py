"""Models beyond float32, tensors that nobody changes, and strategies that bend the rules."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedMedian, Strategy
from toy import ONE, by_partition, client_app, fedavg, model, training

from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import private
from fedcomp.codecs import EDEN, QSGD, Codec, Identity, RandomProjection, ScaledSign, SignSGD, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import NODE_RECORD
from fedcomp.flower.rounds import fit
from fedcomp.layout import DENSE, SmallDense
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg


def adding(step: float = 0.5, *, mods=True) -> ClientApp:
    """Return an app that adds ``step`` to finite float tensors and leaves everything else as it is."""

    def moved(arrays: dict, number: int, partition: int) -> dict:
        moves = {name: a.dtype.kind == "f" and np.isfinite(a).all() for name, a in arrays.items()}
        return {name: (a + step).astype(a.dtype) if moves[name] else a for name, a in arrays.items()}

    return training(moved, [compression()] if mods else [])


def go(strategy, initial, app=None, *, rounds=6, nodes=3, seed=3, grid=None):
    grid = grid or MeteredGrid(InProcessGrid(app or adding(), nodes, seed=seed), TrafficLedger())
    return strategy.start(grid, initial, num_rounds=rounds, timeout=9)


def record(**arrays) -> ArrayRecord:
    return ArrayRecord({k: Array(np.asarray(v)) for k, v in arrays.items()})


@pytest.mark.slow
def test_wide_integers_that_nobody_changes_stay_what_they_are() -> None:
    initial = record(
        w=np.zeros(2000, np.float32),
        a=np.int64(2**63 - 1),
        b=np.array([2**53 + 1, -(2**63)]),
        c=np.uint64(2**64 - 1),
        d=np.array([True, False]),
    )
    result = go(Compressed(FedAvg(**ONE, fraction_evaluate=0.0), TopK(density=0.5)), initial)
    for name in "abcd":
        np.testing.assert_array_equal(result.arrays[name].numpy(), initial[name].numpy())
        assert result.arrays[name].numpy().dtype == initial[name].numpy().dtype


@pytest.mark.slow
def test_models_of_buffers_only_and_of_nothing_large() -> None:
    for initial in (record(n=np.int64(3)), record(b=np.zeros(3, np.float32)), record(z=np.zeros((0, 4), np.float32))):
        strategy = Compressed(FedAvg(**ONE, fraction_evaluate=0.0), TopK(density=0.5), downlink=TopK(density=0.5))
        go(strategy, initial)
        assert all(r.compressed == 3 for r in strategy.reports.values())


@pytest.mark.slow
def test_a_strategy_that_copies_the_model_still_gets_the_downlink() -> None:
    class Copying(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            copy = ArrayRecord({k: Array(v.numpy()) for k, v in arrays.items()})
            return super().configure_train(server_round, copy, config, grid)

    ledgers = []
    for inner in (FedAvg, Copying):
        ledger = TrafficLedger()
        grid = MeteredGrid(InProcessGrid(adding(), 3, seed=3), ledger)
        strategy = Compressed(inner(**ONE, fraction_evaluate=0.0), TopK(density=0.1), downlink=TopK(density=0.1))
        go(strategy, record(w=np.zeros(2000, np.float32)), grid=grid)
        ledgers.append(ledger.total("payload", direction="down"))
    assert ledgers[0] == ledgers[1]


def test_a_strategy_without_weights() -> None:
    """A strategy of one's own that never asks for num-examples gets replies without it."""

    class Plain(Strategy):
        def configure_train(self, server_round, arrays, config, grid):
            content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": server_round})})
            return [Message(content, n, "train") for n in grid.get_node_ids()]

        def aggregate_train(self, server_round, replies):
            models = [r.content["arrays"] for r in replies if not r.has_error()]
            return ArrayRecord({k: Array(sum(m[k].numpy() for m in models) / len(models)) for k in models[0]}), None

        def configure_evaluate(self, server_round, arrays, config, grid):
            return []

        def aggregate_evaluate(self, server_round, replies):
            return None

        def summary(self):
            pass

    app = ClientApp(mods=[compression()])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        arrays = {k: Array(v.numpy() + 1) for k, v in msg.content["arrays"].items()}
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=msg)

    strategy = Compressed(Plain(), TopK(density=1.0))
    result = go(strategy, record(w=np.zeros(2000, np.float32)), app, rounds=3)
    assert all(r.compressed == 3 for r in strategy.reports.values())
    np.testing.assert_array_equal(result.arrays["w"].numpy(), np.full(2000, 3, np.float32))


def test_a_subclass_of_the_default_policy_travels_as_its_decisions() -> None:
    class Careful(SmallDense):
        def __call__(self, name, shape, dtype):
            return DENSE if name == "weight" else super().__call__(name, shape, dtype)

    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.01), policy=Careful())
    result = go(strategy, model(), client_app([compression()]), rounds=1)
    assert strategy.reports[1].compressed == 3
    assert np.count_nonzero(result.arrays["weight"].numpy()) > 1000


def test_a_node_that_does_not_know_the_downlink_codec_takes_part_with_full_models() -> None:
    picky, open_minded = client_app([compression(accept=["topk", "feedback"])]), client_app([compression()])
    app = by_partition(lambda partition: picky if partition == 0 else open_minded)
    strategy = Compressed(fedavg(), TopK(density=0.1), downlink=QSGD(levels=64, bucket=64))
    go(strategy, model(), app, rounds=3)
    assert [r.compressed for r in strategy.reports.values()] == [3, 3, 3]
    assert all(len(r.unsupported) == 1 for r in strategy.reports.values())


def test_a_round_without_memory_in_between_does_not_count_an_update_twice() -> None:
    grid = InProcessGrid(client_app([compression()]), 1, seed=3)
    metered = MeteredGrid(grid, TrafficLedger())
    feedback = ErrorFeedback(TopK(density=0.1))
    strategy = Compressed(fedavg(fraction_evaluate=0.0), feedback)
    arrays = model()
    for round_, codec in enumerate((feedback, Identity(), feedback, feedback), 1):
        strategy.codec = codec
        arrays = fit(strategy, metered, arrays, round_, start_round=round_, timeout=9).arrays
    assert not any(r.rolled_back for r in strategy.reports.values())


def test_full_models_of_one_exchange_share_their_data() -> None:
    grid = InProcessGrid(client_app([compression()]), 5, seed=3)
    strategy = Compressed(fedavg(), TopK(density=0.1), downlink=TopK(density=0.1))
    messages = list(strategy.configure_train(1, model(), ConfigRecord(), grid))
    assert len({id(m.content["arrays"]["weight"].data) for m in messages}) == 1


def test_a_strategy_that_sends_no_configuration() -> None:
    """The announcement travels in a record of its own; the app sees a message without any."""

    class Bare(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            return [Message(RecordDict({"arrays": arrays}), n, "train") for n in grid.get_node_ids()]

    seen: list[list[str]] = []

    def watching(msg: Message, context: Context, call_next) -> Message:
        seen.append(sorted(msg.content))
        return call_next(msg, context)

    app = training(lambda arrays, *place: arrays, [compression(), watching])
    strategy = Compressed(Bare(**ONE, fraction_evaluate=0.0), TopK(density=0.5))
    go(strategy, record(w=np.zeros(2000, np.float32)), app, rounds=2)
    assert [r.compressed for r in strategy.reports.values()] == [3, 3]
    assert all(names == ["arrays"] for names in seen)


MODEL = {
    "frozen": np.random.default_rng(0).standard_normal((60, 50)).astype(np.float32),
    "head": np.random.default_rng(1).standard_normal((30, 50)).astype(np.float32),
}


def app(trained: set[tuple[int, int]] | None = None, seen: list[object] | None = None) -> ClientApp:
    """Return an app that trains the head alone, and all in the rounds and partitions of ``trained``."""
    halves = [private(), compression()]

    def look(msg: Message, context, call_next) -> Message:
        reply = call_next(msg, context)
        if seen is not None:
            seen.append(reply.content[NODE_RECORD].get("unchanged"))
        return reply

    def moved(arrays: dict, *place: int) -> dict:
        moves = [key for key in arrays if key == "head" or (trained is not None and place in trained)]
        drawn = {key: np.random.default_rng([*place, len(key)]).standard_normal(arrays[key].shape) for key in moves}
        return arrays | {key: arrays[key] + np.float32(0.1) * step.astype(np.float32) for key, step in drawn.items()}

    return training(moved, [look, *halves] if seen is not None else halves, examples=lambda partition: partition + 1)


def run(strategy: Strategy, client: ClientApp, rounds: int = 3) -> dict[str, np.ndarray]:
    model = ArrayRecord({name: Array(array) for name, array in MODEL.items()})
    with InProcessGrid(client, 4, seed=2) as grid:
        result = strategy.start(grid, model, num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}


CODECS: list[Codec] = [
    EDEN(),
    EDEN(bits=4),
    SignSGD(step=0.01),
    RandomProjection(directions=64),
    QSGD(levels=7),
    ScaledSign(),
    TopK(density=0.1),
]


@pytest.mark.parametrize("rule", ["mean", "median"])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_nobody_changes_does_not_move_by_a_bit(codec: Codec, rule: str) -> None:
    if rule == "median" and codec.votes:
        pytest.skip("votes are no single updates")
    keys = {"min_train_nodes": 1, "min_available_nodes": 1, "min_evaluate_nodes": 1, "fraction_evaluate": 0.0}
    inner = FedMedian(**keys) if rule == "median" else fedavg(fraction_evaluate=0.0)  # type: ignore[arg-type]
    found = run(Compressed(inner, codec), app())
    np.testing.assert_array_equal(found["frozen"], MODEL["frozen"])
    assert (found["head"] != MODEL["head"]).any()


def test_one_client_that_changes_it_is_heard() -> None:
    found = run(Compressed(fedavg(fraction_evaluate=0.0), EDEN(bits=4)), app({(2, 3)}))
    assert (found["frozen"] != MODEL["frozen"]).mean() > 0.9


def test_what_a_memory_owes_is_still_sent() -> None:
    """A layer that was trained and then frozen: what error feedback kept of it must arrive, and nothing is lost."""
    codec = ErrorFeedback(RandomProjection(directions=400, scope="layer", scale="least"))
    trained = {(1, partition) for partition in range(4)}
    one = run(Compressed(fedavg(fraction_evaluate=0.0), codec), app(trained), rounds=1)
    many = run(Compressed(fedavg(fraction_evaluate=0.0), codec), app(trained), rounds=60)
    exact = run(fedavg(fraction_evaluate=0.0), app(trained), rounds=1)
    left, first = (np.linalg.norm(found["frozen"] - exact["frozen"]) for found in (many, one))
    assert left < 0.1 * first


def test_a_private_round_says_nothing_of_it() -> None:
    """Which tensors a client has changed follows from its data."""
    seen: list[object] = []
    mean = DpFedAvg(fedavg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=1.0, population=4)
    run(Compressed(mean, QSGD(levels=7)), app(seen=seen), rounds=1)
    assert seen == [None] * 4
    run(Compressed(fedavg(fraction_evaluate=0.0), QSGD(levels=7)), app(seen=seen), rounds=1)
    assert seen[4:] == [[0]] * 4
