"""B6: adaptive server optimisers inside the drop-in pair step where something arrived, by their own rule."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedYogi
from toy import client_app, model, stack

from fedcomp.clients.compressed import compression
from fedcomp.codecs import QSGD, Identity, RandomK, TopK
from fedcomp.flower.grid import InProcessGrid
from fedcomp.layout import Layout, SmallDense
from fedcomp.strategies.compressed import Compressed

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


def burst(size: int = 2000) -> ClientApp:
    """Return an app whose update is 0.5 at the first coordinate in round 1, and at the second one from then on."""
    app = ClientApp(mods=[compression()])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        weights = msg.content["arrays"]["w"].numpy().copy()
        number = int(msg.content["config"]["server-round"])
        weights[0 if number == 1 else 1] += 0.5
        reply = {"arrays": ArrayRecord({"w": Array(weights)}), "m": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(reply), reply_to=msg)

    return app


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
    assert not TopK(0.01).sparse(Layout.flat(50, density=1.0)), "a model that travels dense has nothing to list"
