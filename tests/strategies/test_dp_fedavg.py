"""DP-FedAvg around codecs: clipped on the server, noised on what is released, and nothing else of the data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from private_runs import federation, inner, play
from toy import model, stack, update, with_halves

from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import private
from fedcomp.codecs import QSGD, Identity, RandomBlock, RandomK, SignSGD, TopK, chain
from fedcomp.codecs.clip import Clip
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.layout import Layout, SmallDense
from fedcomp.privacy.mechanism import GridGaussian
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg

BASIC = {"noise_multiplier": 0.0, "population": 3, "delta": 1e-3}
SIZE = 1212  # of the toy model
SHAPES = ((40, 30), (12,))
BOUND = 2048  # grid steps of the clip norm for 1212 coordinates


def honest(round_: int, partition: int) -> np.ndarray:
    return np.concatenate([update(round_, partition, s, i).reshape(-1) for i, s in enumerate(SHAPES)])


def fit_once(strategy, mods, nodes: int = 3, initial=None, **options) -> np.ndarray:
    result = strategy.start(federation(mods, nodes, **options), initial or model(), num_rounds=1, timeout=9)
    return stack(result.arrays)


@pytest.mark.parametrize("codec", [None, Identity(), TopK(density=1.0), QSGD(levels=30000)], ids=str)
def test_without_noise_and_within_the_clip_it_is_the_equal_mean(codec) -> None:
    clip = 1e5
    strategy = DpFedAvg(inner(), clip=clip, **BASIC)
    out = fit_once(strategy if codec is None else Compressed(strategy, codec), [compression(), private()])
    # Rounding to the grid; QSGD's own error of one level, which does not average out with one client alone.
    slack = clip / BOUND / 2 + (3e4 / 30000 if isinstance(codec, QSGD) else 0) + 0.01
    np.testing.assert_allclose(out, sum(honest(1, p) for p in range(3)) / 3, atol=slack)


def test_a_long_update_is_clipped_as_a_whole_and_not_by_tensor() -> None:
    clip = 100.0
    out = fit_once(DpFedAvg(inner(), clip=clip, **{**BASIC, "population": 1}), [private()], 1)
    given = honest(1, 0)
    assert clip * 0.98 < np.linalg.norm(out) <= clip * (1 + 1e-6)
    assert out @ given / np.linalg.norm(out) / np.linalg.norm(given) > 0.99
    # Each tensor clipped by itself makes sqrt(2) times the bound.
    parts = np.concatenate([p * clip / np.linalg.norm(p) for p in (given[:1200], given[1200:])])
    assert np.linalg.norm(parts) > 1.4 * clip


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["discrete_gaussian", "skellam", "gaussian"])
@pytest.mark.parametrize(("adjacency", "factor"), [("zero_out", 1.0), ("replace", 2.0)])
def test_noise_on_every_tensor_has_the_scale_that_is_accounted(noise, adjacency, factor) -> None:
    clip, z, rounds = 0.5, 1.5, 4
    strategy = DpFedAvg(inner(), clip=clip, **{**BASIC, "noise_multiplier": z}, adjacency=adjacency, noise=noise)
    grid = federation([private()], 3, fault=lambda delivery: "silent")
    arrays, residuals = model(), []
    for r in range(1, rounds + 1):
        messages = strategy.configure_train(r, arrays, ConfigRecord(), grid)
        after, _ = strategy.aggregate_train(r, grid.send_and_receive(messages, timeout=1))
        residuals.append((stack(after) - stack(arrays)) * 3)
        arrays = after
    sigma = z * clip * factor
    assert strategy.privacy.events[0].noise_multiplier == z
    for part in (slice(0, 1200), slice(1200, 1212)):
        noise_of = np.concatenate([r[part] for r in residuals]) / sigma
        n = noise_of.size
        assert abs(np.sum(noise_of**2) - n) < 6 * math.sqrt(2 * n)


class Spy(DpFedAvg):
    """Keeps the norms of what enters the sums, in units of the clip norm."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.lengths: list[float] = []
        self.given: list[float] = []

    def mechanism(self, layout, server_round) -> GridGaussian:
        own = super().mechanism(layout, server_round)
        spy = self

        class Seen(GridGaussian):
            def admit(self, contribution):
                out = super().admit(contribution)
                spy.lengths.append(float(np.linalg.norm(out) / self.bound))
                spy.given.append(float(np.linalg.norm(contribution)) / self.clip)
                return out

        return Seen(**vars(own))


@pytest.mark.slow
def test_error_feedback_may_exceed_the_clip_and_the_contribution_does_not() -> None:
    strategy = Spy(inner(), clip=6e3, **BASIC)
    pair = Compressed(strategy, ErrorFeedback(TopK(density=0.05)))
    result = pair.start(federation([compression(), private()], 3), model(), num_rounds=6, timeout=9)
    assert result.arrays is not None
    # The mutant that clips the update before the memory is added would send what is beyond the bound here.
    assert max(strategy.given) > 1.5
    assert max(strategy.lengths) <= 1.0
    # All were acknowledged: nothing was put back into a memory.
    assert all(not r.rolled_back and not r.refused for r in pair.reports.values())


def test_a_compressed_downlink_carries_what_was_released() -> None:
    plain = DpFedAvg(inner(), clip=1e5, **BASIC)
    strategy = DpFedAvg(inner(), clip=1e5, **BASIC)
    pair = Compressed(strategy, Identity(), downlink=TopK(density=0.3))
    grid = federation([compression(), private()], 3)
    result = pair.start(grid, model(), num_rounds=3, timeout=9)
    expected = plain.start(federation([private()], 3), model(), num_rounds=3, timeout=9)
    # The toy app adds the same whatever model it is given: the sum is that of whole models, whoever holds which.
    np.testing.assert_allclose(stack(result.arrays), stack(expected.arrays), atol=3 * 1e5 / BOUND)
    assert all(report.compressed == 3 and not report.refused for report in pair.reports.values())
    # The first two models are sent whole, a mere difference follows.
    down = [grid.ledger.total("wire", round=r, direction="down") for r in (1, 2, 3)]
    assert down[2] < down[0] / 2


def test_reports_of_private_rounds_tell_less() -> None:
    pair = Compressed(DpFedAvg(inner(), clip=1e5, **BASIC), TopK(density=0.05))
    open_pair = Compressed(inner(), TopK(density=0.05))
    for strategy in (pair, open_pair):
        strategy.start(federation([compression(), private()], 3), model(), num_rounds=2, timeout=9)
    told, usual = pair.reports[2], open_pair.reports[2]
    assert (told.changed, told.tensor_bytes, told.memory) == (0, {}, {})
    assert usual.changed > 0
    assert usual.tensor_bytes
    assert usual.memory
    assert told.compressed == 3


@pytest.mark.parametrize("codec", [RandomK(density=0.1), RandomBlock(density=0.1, scope="global")], ids=str)
@pytest.mark.parametrize("remember", [False, True])
def test_2_6_a_public_mask_confines_sum_and_noise(codec, remember) -> None:
    clip, z = 1e3, 1.0
    strategy = DpFedAvg(inner(), clip=clip, insecure_deterministic=True, **{**BASIC, "noise_multiplier": z})
    pair = Compressed(strategy, ErrorFeedback(codec) if remember else codec, policy=SmallDense())
    out = fit_once(pair, [compression(), private()])
    layout = Layout.of({k: a.numpy() for k, a in model().items()}, SmallDense())
    support = codec.common_support(layout, Key(0, "uplink", 1))
    assert support.size == 120 + 12  # a tenth of the weights, and the bias, which travels dense
    off = np.ones(SIZE, bool)
    off[support] = False
    assert not out[off].any()
    assert np.count_nonzero(out[support]) > 123
    # Noise energy is that of k coordinates: chi-squared around the clipped mean.
    mean = sum(v[support] * min(1, clip / np.linalg.norm(v[support])) for v in (honest(1, p) for p in range(3))) / 3
    energy = np.sum((3 * (out[support] - mean) / (z * clip)) ** 2)
    assert abs(energy - support.size) < 6 * math.sqrt(2 * support.size)
    # Another seed of the data, the same seed of the mask: the mask does not know the data.
    assert np.array_equal(support, codec.common_support(layout, Key(0, "uplink", 1, 7)))
    assert not np.array_equal(support, codec.common_support(layout, Key(0, "uplink", 2)))


def test_2_6_an_update_is_clipped_after_masking() -> None:
    support = np.arange(0, 64, 8)
    given = np.full(64, 100.0, np.float32)
    given[support] = 0.1
    kept = play(DpFedAvg(inner(), clip=1.0, **{**BASIC, "population": 1}), {1: given}, support=support)
    np.testing.assert_allclose(kept[support], 0.1, atol=1.0 / 256)
    assert not np.delete(kept, support).any()
    # Clipped before masking next to nothing would be left.
    assert np.linalg.norm((given / np.linalg.norm(given))[support]) < 0.001


def test_a_client_without_the_mod_is_in_the_masked_sum_as_the_others_are() -> None:
    codec = RandomK(density=0.2, unbiased=True)
    mixed, all_ = (Compressed(DpFedAvg(inner(), clip=1e6, **BASIC), codec) for _ in range(2))
    expected = fit_once(all_, [compression(), private()])
    out = fit_once(mixed, [private()])
    np.testing.assert_array_equal(out, expected)
    assert mixed.reports[1].plain == 3


def test_codecs_without_a_common_support_say_so() -> None:
    layout = Layout.flat(4000)
    for codec in (
        RandomK(density=0.1, shared=False),
        TopK(density=0.1),
        Identity(),
        chain(Clip(1.0), TopK(density=0.1)),
    ):
        assert codec.common_support(layout, Key(1)) is None
    wrapped = chain(Clip(1.0), ErrorFeedback(RandomK(density=0.1)))
    np.testing.assert_array_equal(
        wrapped.common_support(layout, Key(1)), RandomK(density=0.1).common_support(layout, Key(1))
    )


def test_a_codec_that_votes_needs_a_strategy_that_counts_votes() -> None:
    with pytest.raises(ConfigError, match="takes updates, but SignSGD"):
        Compressed(DpFedAvg(inner(), clip=1.0, **BASIC), SignSGD(step=0.1))


def batchnorm_app(mods) -> ClientApp:
    """An app whose model has running statistics and a counter, which it changes by what only its data can tell."""
    app = with_halves(mods)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        record = msg.content["arrays"]
        partition = int(context.node_config["partition-id"])
        out = {name: array.numpy() + (7 + partition) for name, array in record.items()}
        out["num_batches_tracked"] = out["num_batches_tracked"].astype(np.int64)
        arrays = ArrayRecord({name: Array(np.asarray(a)) for name, a in out.items()})
        metrics = MetricRecord({"num-examples": 3, "loss": 0.1234})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    return app


def batchnorm_model() -> ArrayRecord:
    return ArrayRecord(
        {
            "w": Array(np.zeros(64, np.float32)),
            "bn.running_mean": Array(np.float32([0.25, -0.5])),
            "bn.running_var": Array(np.float32([1.5, 2.0])),
            "num_batches_tracked": Array(np.array(2**60 + 1, np.int64)),
            "mask": Array(np.array([True, False])),
            "half": Array(np.zeros(2, np.float16)),
            "double": Array(np.zeros(2, np.float64)),
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("mods", [[compression(), private()], [compression()], [private()], []], ids=len)
@pytest.mark.parametrize("codec", [None, TopK(density=0.5), Identity()], ids=str)
def test_buffers_keep_the_servers_values_and_get_no_noise(codec, mods) -> None:
    strategy = DpFedAvg(inner(), clip=50.0, **{**BASIC, "noise_multiplier": 1.0})
    grid = InProcessGrid(batchnorm_app(mods), 3, seed=1)
    initial = batchnorm_model()
    result = (strategy if codec is None else Compressed(strategy, codec)).start(grid, initial, num_rounds=2, timeout=9)
    for name in ("bn.running_mean", "bn.running_var", "num_batches_tracked", "mask"):
        before, after = initial[name].numpy(), result.arrays[name].numpy()
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(after, before)
    for name in ("w", "half", "double"):
        assert result.arrays[name].numpy().dtype == initial[name].numpy().dtype
        assert result.arrays[name].numpy().any()
    assert set(strategy.privacy.participations.values()) == {2}
    assert len(strategy.privacy.participations) == 3
    assert [len(strategy.reports[number].notes) for number in (1, 2)] == [1, 1]
    assert "4 tensor(s), first 'bn.running_mean', keep their first values" in strategy.reports[1].notes[0]
    assert list(result.arrays) == list(initial)
