"""Flower's own differential-privacy wrappers beside compression: whose clip binds, and who is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)
from toy import stack, training

from fedcomp.clients.compressed import compression
from fedcomp.codecs import QSGD, Clip, Codec, Identity, RandomK, TopK, chain
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError, NoUsableReply
from fedcomp.flower.grid import InProcessGrid
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed

NODES, SIZE, CLIP = 4, 2000, 0.5

Wrap = Callable[[Strategy], Strategy]


def client_fixed(strategy: Strategy) -> Strategy:
    return DifferentialPrivacyClientSideFixedClipping(strategy, 0.0, CLIP, NODES)


def client_adaptive(strategy: Strategy) -> Strategy:
    return DifferentialPrivacyClientSideAdaptiveClipping(strategy, 0.0, NODES, initial_clipping_norm=CLIP)


def server_fixed(strategy: Strategy, noise: float = 0.0) -> Strategy:
    return DifferentialPrivacyServerSideFixedClipping(strategy, noise, CLIP, NODES)


def server_adaptive(strategy: Strategy) -> Strategy:
    return DifferentialPrivacyServerSideAdaptiveClipping(strategy, 0.0, NODES, initial_clipping_norm=CLIP)


class Plain(Strategy):
    """A wrapper that passes everything on and calls what it wraps by a name of its own."""

    def __init__(self, within: Strategy) -> None:
        self._within = within

    def configure_train(self, *args):
        return self._within.configure_train(*args)

    def aggregate_train(self, *args):
        return self._within.aggregate_train(*args)

    def configure_evaluate(self, *args):
        return self._within.configure_evaluate(*args)

    def aggregate_evaluate(self, *args):
        return self._within.aggregate_evaluate(*args)

    def summary(self) -> None:
        self._within.summary()


class Watched(FedAvg):
    """FedAvg that keeps the length of every update it is given."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        self.lengths: list[float] = []
        self._model = np.zeros(0)

    def configure_train(self, server_round, arrays, config, grid):
        self._model = stack(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        kept = list(replies)
        for reply in kept:
            if not reply.has_error():
                (record,) = reply.content.array_records.values()
                self.lengths.append(float(np.linalg.norm(stack(record) - self._model)))
        return super().aggregate_train(server_round, kept)


def learnt(partition: int) -> np.ndarray:
    """Return a client's update, the same in every round; its length is about 45."""
    return Key(3, "update", partition=partition).generator().normal(size=SIZE).astype(np.float32)


def app_of(mods: Iterable) -> ClientApp:
    """Return clients that add :func:`learnt` to the model and weigh alike."""
    return training(lambda arrays, number, partition: {"w": arrays["w"] + learnt(partition)}, mods)


def run(strategy: Strategy, mods: Iterable, rounds: int = 1) -> np.ndarray:
    """Return the model after ``rounds`` from zeros."""
    grid = InProcessGrid(app_of(mods), NODES, seed=2)
    arrays = strategy.start(grid, ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))}), num_rounds=rounds).arrays
    return arrays["w"].numpy() if arrays else np.zeros(SIZE, np.float32)


ENLARGING = [TopK(0.1), ErrorFeedback(TopK(0.1)), QSGD(3), RandomK(0.1, unbiased=True), TopK(0.1, values="bf16")]


@pytest.mark.parametrize("codec", ENLARGING, ids=repr)
@pytest.mark.parametrize("wrap", [client_fixed, client_adaptive])
@pytest.mark.parametrize("again", [lambda s: s, Plain, server_fixed], ids=["", "plain", "server"])
def test_a2_client_side_wrappers_are_refused_where_the_codec_may_enlarge(codec: Codec, wrap: Wrap, again: Wrap) -> None:
    """However deep they stand: what clients clipped is longer when it was decoded, and the noise does not cover it."""
    wrapped = again(wrap(Watched()))
    with pytest.raises(ConfigError, match=r"ClientSide.*DpFedAvg"):
        Compressed(wrapped, codec, feedback=None if codec == TopK(0.1) else False)


@pytest.mark.parametrize("wrap", [client_fixed, client_adaptive])
@pytest.mark.parametrize("again", [lambda s: s, Plain], ids=["", "plain"])
def test_a2_client_side_wrappers_around_are_refused_before_anyone_is_asked(wrap: Wrap, again: Wrap) -> None:
    watched = Watched()
    strategy = again(wrap(again(Compressed(watched, TopK(0.1)))))
    with pytest.raises(ConfigError, match=r"ClientSide.*DpFedAvg"):
        run(strategy, [compression(), fixedclipping_mod])
    assert not watched._model.size, "the inner strategy was asked"


@pytest.mark.parametrize("codec", [TopK(0.1), Identity()], ids=repr)
@pytest.mark.parametrize("wrap", [server_fixed, server_adaptive])
@pytest.mark.parametrize("again", [lambda s: s, Plain], ids=["", "plain"])
def test_a2_server_side_wrappers_around_are_refused_before_anyone_is_asked(
    codec: Codec, wrap: Wrap, again: Wrap
) -> None:
    """They look for arrays in the replies, find none in frames, and would add noise to what nobody clipped."""
    watched = Watched()
    with pytest.raises(ConfigError, match="clip nothing"):
        run(again(wrap(again(Compressed(watched, codec)))), [compression()])
    assert not watched._model.size, "the inner strategy was asked"


@pytest.mark.slow
@pytest.mark.parametrize("codec", [TopK(0.1), Identity(), RandomK(0.3), chain(Clip(20.0), TopK(0.1))], ids=repr)
@pytest.mark.parametrize(("wrap", "mod"), [(client_fixed, fixedclipping_mod), (client_adaptive, adaptiveclipping_mod)])
@pytest.mark.parametrize("outside", [False, True])
def test_a2_client_side_clip_binds_with_codecs_that_never_enlarge(codec: Codec, wrap, mod, outside: bool) -> None:
    watched = Watched()
    if outside:
        strategy = wrap(Plain(Compressed(watched, codec, feedback=False)))
    else:
        strategy = Compressed(wrap(watched), codec, feedback=False)
    moved = np.linalg.norm(run(strategy, [compression(), mod]))
    assert 0.05 * CLIP < moved <= CLIP * (1 + 1e-5)
    if not outside:  # around, the updates are summed before the inner strategy sees them
        assert len(watched.lengths) == NODES
        assert 0.25 * CLIP < max(watched.lengths) <= CLIP * (1 + 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [server_fixed, server_adaptive])
@pytest.mark.parametrize("codec", [TopK(0.01), QSGD(3, bucket=SIZE)], ids=repr)
def test_a2_server_side_clip_binds_on_what_arrives(codec: Codec, wrap: Wrap) -> None:
    """Decoded updates outgrow what the clients learnt; what is averaged is clipped after that, in every round."""
    watched = Watched()
    run(Compressed(wrap(watched), codec), [compression()], rounds=5)
    assert len(watched.lengths) == 5 * NODES
    fixed = CLIP if wrap is server_fixed else None
    for length in watched.lengths:
        assert length <= (fixed or 2 * CLIP) * (1 + 1e-5)
        assert fixed is None or length >= fixed * (1 - 1e-5), "the clip binds"


def test_a2_server_side_clip_is_that_of_the_decoded_updates() -> None:
    """One round without noise: the mean of the decoded updates, each scaled to the clip norm."""
    codec = TopK(0.05)
    layout = Layout.flat(SIZE)
    expected = np.zeros(SIZE)
    for partition in range(NODES):
        frame, _ = codec.encode(Update(learnt(partition), layout), {}, Key(0, "uplink", 1, partition))
        decoded = codec.decode(frame, layout).astype(np.float64)
        expected += decoded * CLIP / np.linalg.norm(decoded) / NODES
    got = run(Compressed(server_fixed(Watched()), codec), [compression()])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-7)


def test_a2_server_side_noise_is_sized_for_the_clip_that_binds() -> None:
    """Standard deviation noise multiplier * clip / clients on every coordinate, to five standard errors."""
    codec = TopK(0.05)
    quiet = run(Compressed(server_fixed(Watched()), codec), [compression()])
    noisy = run(Compressed(server_fixed(Watched(), noise=2.0), codec), [compression()])
    deviation = 2.0 * CLIP / NODES
    assert abs(float(np.std(noisy - quiet)) / deviation - 1.0) < 5.0 / np.sqrt(2.0 * SIZE)


@pytest.mark.parametrize("mod", [fixedclipping_mod, adaptiveclipping_mod, LocalDpMod(CLIP, 0.1, 1.0, 1e-5)])
def test_a2_flowers_mods_outside_of_compression_let_nothing_pass(mod) -> None:
    """They need arrays, and outside of compression() there is a frame: no update arrives that they did not clip."""
    watched = Watched()
    strategy = Compressed(client_fixed(watched), TopK(0.1), feedback=False)
    with pytest.raises(NoUsableReply):
        run(strategy, [mod, compression()])
    assert not watched.lengths
    assert len(strategy.reports[1].refused) == NODES


@pytest.mark.parametrize("feedback", [False, True])
def test_a2_noise_of_local_dp_mod_goes_before_the_codec(feedback: bool) -> None:
    """Inside of compression() it noises what is then selected, so that memory holds noised values alone."""
    strategy = Compressed(Watched(), TopK(0.1), feedback=feedback)
    moved = run(strategy, [compression(), LocalDpMod(CLIP, 1e3, 1.0, 1e-5)])
    assert len(strategy.reports[1].refused) == 0
    sent = np.count_nonzero(moved)
    assert SIZE // 10 <= sent <= NODES * SIZE // 10, "noise after the codec would be everywhere"
    assert np.abs(moved).max() > 1000.0, "an update of length 0.5 would not be"
