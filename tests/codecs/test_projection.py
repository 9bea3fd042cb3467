"""Projections on random directions: their error, their bytes, what is refused, and the replay of what came up."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from fedcomp import wire
from fedcomp.codecs import RandomProjection, Replay, TopK, get_codec
from fedcomp.errors import ConfigError, LayoutError, NonFiniteUpdate
from fedcomp.forward.directions import Directions
from fedcomp.kernels import sign_products
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.versions import Broadcast, advance, digest

KEY = Key(5, "uplink", round=3, partition=2)
JOINED = "6c2ad55c3ab76615"


def vector(size: int, seed: int = 0) -> Vector:
    return (Key(seed, "test").uniform(size) * 4.0 - 2.0).astype(np.float32)


def frame_of(codec: RandomProjection, values: Vector, key: Key = KEY) -> wire.Frame:
    return codec.encode(Update(values, Layout.flat(values.size)), {}, key)[0]


def errors(codec: RandomProjection, values: Vector, draws: int) -> np.ndarray:
    layout = Layout.flat(values.size)
    found = [codec.decode(frame_of(codec, values, KEY.at(round=r)), layout) - values for r in range(draws)]
    return np.square(np.array(found, np.float64)).sum(axis=1) / np.square(values.astype(np.float64)).sum()


@pytest.mark.parametrize(("directions", "size"), [(1, 64), (8, 100), (32, 1000)])
def test_the_error_is_the_formulas(directions: int, size: int) -> None:
    """Unbiased (n - 1)/m, least (n - 1)/(m + n - 1): both within 5 %, of any vector, and each apart from the other."""
    layout, values = Layout.flat(size), vector(size)
    for scale, draws in (("unbiased", 3000 // directions), ("least", 3000 // directions)):
        codec = RandomProjection(directions, scale=scale)
        bound = codec.variance(layout) if scale == "unbiased" else 1.0 - (codec.contraction(layout) or 0.0)
        assert bound is not None
        assert errors(codec, values, draws).mean() == pytest.approx(bound, rel=0.05)
    spike = np.zeros(size, np.float32)
    spike[size // 2] = 3.0
    assert errors(RandomProjection(directions), spike, 40).mean() == pytest.approx((size - 1) / directions, rel=0.1)


def test_the_mean_over_clients_is_that_of_as_many_directions() -> None:
    """Own directions of 16 clients are 16 times as many; shared ones are not."""
    values, layout = vector(500), Layout.flat(500)
    for shared, expected in ((False, 499 / 128), (True, 499 / 8)):
        codec = RandomProjection(8, shared=shared)
        found = []
        for r in range(40):
            decoded = [codec.decode(frame_of(codec, values, KEY.at(round=r, partition=c)), layout) for c in range(16)]
            found.append(np.square(np.mean(decoded, axis=0) - values).sum() / np.square(values).sum())
        assert np.mean(found) == pytest.approx(expected, rel=0.1)


def test_products_of_shared_directions_may_be_summed() -> None:
    codec, layout = RandomProjection(16, shared=True), Layout.flat(300)
    one, two = vector(300, 1), vector(300, 2)
    bundles = [codec.open(frame_of(codec, v, KEY.at(partition=i)), layout) for i, v in enumerate((one, two, one + two))]
    products = [bundle.tensors[0].values.decode() for bundle in bundles]
    np.testing.assert_allclose(products[0] + products[1], products[2], rtol=1e-5, atol=1e-4)
    assert len({codec.seed_in(bundle) for bundle in bundles}) == 1


def test_a_frame_is_as_long_for_a_million_coordinates_as_for_a_thousand() -> None:
    """2.6: upload bytes independent of p; a size takes a byte or two more to write."""
    codec = RandomProjection(32)
    lengths = [len(frame_of(codec, vector(size))) for size in (1000, 100_000, 1_000_000)]
    assert max(lengths) - min(lengths) <= 2
    assert max(lengths) <= 4 * 32 + 50
    assert codec.longest(Layout.flat(1_000_000)) >= max(lengths)


def test_what_is_no_longer_than_the_directions_arrives_exactly() -> None:
    arrays = {"w": np.arange(300, dtype=np.float32).reshape(10, 30), "b": np.arange(10, dtype=np.float32)}
    layout = Layout.of(arrays, lambda name, shape, dtype: None)
    codec = RandomProjection(10, scope="layer")
    given = Update(layout.flatten(arrays), layout)
    decoded = layout.unflatten(codec.decode(codec.encode(given, {}, KEY)[0], layout), {})
    np.testing.assert_array_equal(decoded["b"], arrays["b"])
    assert not np.array_equal(decoded["w"], arrays["w"])
    assert codec.signs(layout) == 3000
    # Eleven coordinates and ten directions are an estimate again.
    assert not np.array_equal(RandomProjection(10).preview(np.arange(11.0)), np.arange(11.0))


def test_seeds_and_clips_are_the_receivers_own() -> None:
    codec, layout, values = RandomProjection(8, clip=20.0), Layout.flat(500), 20 * vector(500)
    frame = frame_of(codec, values)
    assert np.abs(codec.open(frame, layout).tensors[0].values.decode()).max() == 20.0
    codec.verify(frame, layout, KEY)
    for other in (KEY.at(partition=3), KEY.at(round=4)):
        with pytest.raises(wire.SchemaMismatch, match="not that of this round and sender"):
            codec.verify(frame, layout, other)
    beyond = frame_of(RandomProjection(8), values)
    with pytest.raises(wire.SchemaMismatch, match="beyond the clip 20"):
        codec.open(beyond, layout)
    RandomProjection(8, shared=True).verify(
        frame_of(RandomProjection(8, shared=True), values), layout, KEY.at(partition=9)
    )
    with pytest.raises(NonFiniteUpdate, match="not finite"):
        frame_of(RandomProjection(8), np.full(500, 3e38, np.float32))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 70_001])
def test_both_tiers_project_to_the_same_bits(size: int) -> None:
    directions, values = Directions(KEY, [size], 5), vector(size)
    found = [directions.project(values, tier=tier) for tier in ("numba", "numpy")]
    np.testing.assert_array_equal(*found)
    signs = np.stack([directions.signs(0, k) for k in range(5)]).astype(np.float64)
    np.testing.assert_allclose(found[0][0], signs @ values.astype(np.float64), rtol=1e-12, atol=1e-9)


def test_products_of_other_sizes_are_refused() -> None:
    with pytest.raises(LayoutError, match="no products"):
        Directions(KEY, [64], 2).project(vector(63))
    for values, words in (
        (vector(65), np.zeros((1, 1), np.uint64)),
        (vector(64).astype(np.float64), np.zeros((1, 1), np.uint64)),
        (vector(64), np.zeros((1, 1), np.int64)),
    ):
        with pytest.raises(LayoutError, match="do not fit"):
            sign_products(values, words)  # type: ignore[arg-type]


# What goes down.

P = 2410
LAYOUT = Layout.flat(P)
CODEC = RandomProjection(8)


def joined_round(r: int, clients: int = 4) -> list[tuple[wire.Frame, float]]:
    weights = np.arange(1.0, clients + 1.0)
    weights /= weights.sum()
    return [
        (frame_of(CODEC, vector(P, 100 * r + c), KEY.at(round=r, partition=c)), float(w)) for c, w in enumerate(weights)
    ]


def added(model: Vector, frames: list[tuple[wire.Frame, float]]) -> Vector:
    """What a server that adds frames makes of them."""
    total = Update(np.full(P, -0.0, np.float32), LAYOUT)
    for frame, weight in frames:
        CODEC.gather(frame, weight, total)
    return model + total.vector


def test_a_replayed_sum_is_the_servers_to_the_bit() -> None:
    frames, replay = joined_round(1), Replay(CODEC)
    step = replay.join(frames, LAYOUT)
    np.testing.assert_array_equal(replay.decode(step, LAYOUT) + vector(P), added(vector(P), frames))
    other = replay.join([(frame, weight * 1.01) for frame, weight in frames], LAYOUT)
    assert not np.array_equal(replay.decode(other, LAYOUT), replay.decode(step, LAYOUT))
    # 4 m C bytes, sixteen for each client's seed and weight, and a head.
    assert len(step) <= 4 * 8 * 4 + 16 * 4 + 70
    assert hashlib.sha256(step).hexdigest()[:16] == JOINED
    assert get_codec(replay.to_config()) == replay


def test_a_replica_follows_for_fifty_rounds_and_after_ten_that_it_missed() -> None:
    """2.6: the replayed client's model is the server's, bit for bit, by its digest."""
    replay = Replay(CODEC)
    server, model = Broadcast(replay), vector(P)
    server.publish(model.copy(), {}, LAYOUT, KEY)
    held, version = model.copy(), 1
    missed, whole = range(20, 30), 0
    for r in range(50):
        frames = joined_round(r)
        model = added(model, frames)
        server.publish(model.copy(), {}, LAYOUT, KEY, summands=frames)
        if r in missed:
            continue
        steps = server.steps_from(version)
        assert steps is not None
        assert len(steps) == (11 if r == 30 else 1)
        held, _, version = advance(held.copy(), {}, version, steps, replay, LAYOUT)
        assert digest(held, {}) == server.digest
        np.testing.assert_array_equal(held, model)
        whole += sum(step.nbytes for step in steps)
    assert whole < 50 * 4 * P / 20


def test_a_step_that_is_no_sum_goes_down_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Momentum, a frame left out, a weight rounded otherwise: replicas would drift, and nothing would say so."""
    for change in (
        lambda frames, model: (frames, added(model, frames) + np.float32(0.5) * vector(P, 9)),
        lambda frames, model: (frames[1:], added(model, frames)),
        lambda frames, model: ([(f, w * (1 + 1e-6)) for f, w in frames], added(model, frames)),
        lambda frames, model: ([], added(model, frames)),
    ):
        server, model = Broadcast(Replay(CODEC)), vector(P)
        server.publish(model.copy(), {}, LAYOUT, KEY)
        frames, target = change(joined_round(1), model)
        caplog.clear()
        with caplog.at_level("INFO", logger="flwr.fedcomp"):
            assert server.publish(target.copy(), {}, LAYOUT, KEY, summands=frames) == 2
        assert "is sent as the whole model" in caplog.text
        assert server.steps_from(1) is None
        np.testing.assert_array_equal(server.reference, target)
        # The next sum is a step again.
        again = joined_round(2)
        server.publish(added(target, again), {}, LAYOUT, KEY, summands=again)
        assert len(server.steps_from(2) or ()) == 1


def test_steps_that_cost_more_than_the_model_are_not_kept() -> None:
    """More bytes than the model, or more signs than a node draws."""
    rounds = [joined_round(r) for r in range(60)]
    for most, kept in ((10**10, 40), (10 * 4 * 8 * P, 10)):
        server, model = Broadcast(Replay(CODEC, most_signs=most)), vector(P)
        server.publish(model.copy(), {}, LAYOUT, KEY)
        for frames in rounds:
            model = added(model, frames)
            server.publish(model.copy(), {}, LAYOUT, KEY, summands=frames)
        reach = [missed for missed in range(1, 60) if server.steps_from(server.version - missed) is not None]
        assert kept * 0.7 <= max(reach) <= kept, (most, max(reach))
    many = Replay(CODEC).join(joined_round(1, clients=20), LAYOUT)
    with pytest.raises(wire.SchemaMismatch, match="signs of a step"):
        Replay(CODEC, most_signs=10 * 8 * P).open(many, LAYOUT)


def test_frames_of_sums_are_checked() -> None:
    replay, frames = Replay(CODEC), joined_round(1)
    step = replay.join(frames, LAYOUT)
    assert len(replay.open(step, LAYOUT).tensors) == 3
    for layout in (Layout.flat(P + 1), Layout.of({"a": vector(50), "b": vector(P)}, lambda *_: None)):
        joined = Replay(RandomProjection(8, scope="layer")) if len(layout.tensors) > 1 else Replay(RandomProjection(9))
        with pytest.raises(wire.WireError):
            joined.open(step, layout)
    bad = [wire.dense(np.zeros(4, np.int64)), wire.dense(np.zeros(3)), wire.dense(np.zeros((4, 8), np.float32))]
    with pytest.raises(wire.SchemaMismatch, match="not those of this model"):
        replay.open(wire.encode(bad), LAYOUT)
    with pytest.raises(wire.NonFinite):
        replay.open(wire.encode([bad[0], wire.dense(np.full(4, np.nan)), bad[2]]), LAYOUT)
    with pytest.raises(wire.WireError):
        replay.join([(TopK(0.1).encode(Update(vector(P), LAYOUT), {}, KEY)[0], 1.0)], LAYOUT)
    with pytest.raises(ConfigError, match="not those of TopK"):
        Replay(TopK(0.1))  # type: ignore[arg-type]
    for params in ({"directions": 0}, {"scope": "tensor"}, {"scale": "best"}, {"clip": -1.0}, {"clip": np.inf}):
        with pytest.raises(ConfigError):
            RandomProjection(**params)
