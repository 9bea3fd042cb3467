"""Fixed point: one grid and one support for all clients, so that frames add up as integers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from codec_examples import EXAMPLES, LAYOUTS, update

from fedcomp import wire
from fedcomp.codecs import (
    QSGD,
    Clip,
    Codec,
    Domain,
    FixedPoint,
    Identity,
    RandomBlock,
    RandomK,
    RandomProjection,
    Rotation,
    ScaledSign,
    SignSGD,
    TopK,
    chain,
    fixed_point_of,
)
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.fixedpoint import IntegerGrid
from fedcomp.errors import ConfigError, LayoutError
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

KEY = Key(11, "uplink", round=2)
LAYOUT = LAYOUTS["model"]
CODECS = (
    FixedPoint(RandomK(0.1), clip=4.0),
    FixedPoint(RandomK(1.0), clip=1.0, levels=1),
    FixedPoint(RandomBlock(0.2), clip=2.0, levels=32767),
    FixedPoint(RandomK(0.3, scope="layer"), clip=8.0, levels=6),
)


def frame_of(codec: FixedPoint, client: int, scale: float = 1.0) -> bytes:
    return codec.encode(update(LAYOUT, seed=client, scale=scale), {}, KEY.at(partition=client))[0]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_sum_of_integers_is_the_weighted_mean_of_the_frames(codec: FixedPoint) -> None:
    """To the precision of float32: what is summed in the field is what would have been summed as floats."""
    weights = [3, 1, 5]
    frames = [frame_of(codec, client) for client in range(3)]
    total = sum(w * codec.grid.integers(codec.open(f, LAYOUT)) for w, f in zip(weights, frames, strict=True))
    placed = codec.place(total, 9, LAYOUT, KEY.at(partition=77))
    mean = sum(w * codec.decode(f, LAYOUT).astype(np.float64) for w, f in zip(weights, frames, strict=True)) / 9
    assert placed.dtype == np.float32
    np.testing.assert_allclose(placed, mean, rtol=3e-7, atol=3e-7 * codec.clip)
    assert np.abs(total).max() <= 9 * codec.levels


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_mean_of_many_lies_within_a_step_of_the_true_one(codec: FixedPoint) -> None:
    """Against the float64 mean of what the inner codec would have sent, cut at the clip: no error above one step, and
    on average over the clients' own draws a fraction of it."""
    clients = 40
    exact = np.zeros(LAYOUT.size)
    total = np.zeros(codec.count(LAYOUT), np.int64)
    for client in range(clients):
        given = update(LAYOUT, seed=client)
        plain = codec.codec.decode(codec.codec.encode(given, {}, KEY)[0], LAYOUT)
        exact += np.clip(plain.astype(np.float64), -codec.clip, codec.clip) / clients
        total += codec.grid.integers(codec.open(codec.encode(given, {}, KEY.at(partition=client))[0], LAYOUT))
    error = codec.place(total, clients, LAYOUT, KEY) - exact
    assert np.abs(error).max() <= codec.step
    # The variance of one rounding is at most step^2 / 4; clients draw for themselves.
    assert np.sqrt(np.mean(error**2)) <= 0.5 * codec.step / np.sqrt(clients)


def test_what_is_on_the_grid_is_not_changed_and_what_is_beyond_is_cut() -> None:
    codec = FixedPoint(RandomK(1.0), clip=2.0, levels=8)
    values = np.array([0.0, -0.0, 0.25, -1.75, 2.0, -2.0, 2.01, -1e30, 3e38], np.float32)
    integers = codec.grid.round(values, KEY)
    np.testing.assert_array_equal(integers, [0, 0, 1, -7, 8, -8, 8, -8, 8])
    assert codec.grid.saturated(integers) == 5


def test_the_largest_draw_rounds_no_number_beyond_the_last_level() -> None:
    """32767 + (1 - 2**-53) is 32768 in float64."""

    class Largest:
        def generator(self) -> Largest:
            return self

        @property
        def bit_generator(self) -> Largest:
            return self

        def random_raw(self, count: int) -> np.ndarray:
            return np.full(count, 2**64 - 1, np.uint64)

    grid = IntegerGrid(1.0, 32767)
    values = np.float32([32767.0, 4e4, 32766.5, 12.5])
    assert grid.round(values, Largest()).tolist() == [32767, 32767, 32767, 13]


def test_frames_of_another_grid_or_seed_are_refused() -> None:
    codec = CODECS[0]
    for other in (FixedPoint(RandomK(0.1), clip=4.0, levels=126), FixedPoint(RandomK(0.1), clip=4.1)):
        with pytest.raises(wire.SchemaMismatch, match="grid"):
            codec.open(frame_of(other, 0), LAYOUT)
    with pytest.raises(wire.WireError):
        codec.open(RandomK(0.1).encode(update(LAYOUT), {}, KEY)[0], LAYOUT)
    frame = frame_of(codec, 3)
    codec.verify(frame, LAYOUT, KEY.at(partition=3))
    with pytest.raises(wire.SchemaMismatch, match="seed is not that of this round"):
        codec.verify(frame, LAYOUT, KEY.at(round=3))


def test_a_code_beyond_the_levels_is_refused() -> None:
    """Eight bits have room for 255, of which 127 levels use up to 254."""
    codec = FixedPoint(RandomK(1.0), clip=1.0)
    layout = Layout.flat(3)
    (tensor,) = wire.decode(codec.encode(update(layout), {}, KEY)[0]).tensors
    values = wire.Uniform([255, 0, 1], 8, 0, tensor.values.scales, tensor.values.zero_points, "stochastic")
    forged = wire.encode([wire.seeded((3,), tensor.index.seed, 3, values)])
    with pytest.raises(wire.SchemaMismatch, match="a code of 255, beyond 254"):
        codec.open(forged, layout)


REFUSED = {
    "not linear": (TopK(0.1), QSGD(7), ScaledSign(), chain(Clip(1.0), RandomK(0.1))),
    "a support for every client": (RandomK(0.1, shared=False), RandomBlock(0.1, shared=False)),
    "sends whole models": (Identity(),),
    "has memory": (ErrorFeedback(RandomK(0.1)),),
    "scales values by n/k": (RandomK(0.1, unbiased=True),),
    "name what they were drawn by": (
        RandomProjection(4, scale="least", shared=True),
        Domain(Rotation(), RandomProjection(4, scale="least", shared=True)),
    ),
}


@pytest.mark.parametrize(("message", "codec"), [(m, c) for m, codecs in REFUSED.items() for c in codecs])
def test_codecs_whose_frames_cannot_be_added_are_refused(message: str, codec: Codec) -> None:
    with pytest.raises(ConfigError, match=message):
        FixedPoint(codec, clip=1.0)
    if message != "has memory" and codec.codec_id != "chain":  # looked into, not judged
        with pytest.raises(ConfigError, match=message):
            fixed_point_of(codec)


def test_fixed_point_is_found_inside_of_wrappers() -> None:
    inner = CODECS[0]
    for codec in (inner, ErrorFeedback(inner), chain(Clip(2.0), ErrorFeedback(inner))):
        assert fixed_point_of(codec) is inner
    with pytest.raises(ConfigError, match=r"Use FixedPoint\(RandomK\(density=0.1\), clip=...\)"):
        fixed_point_of(ErrorFeedback(RandomK(0.1)))
    for codec in (SignSGD(0.1), ErrorFeedback(TopK(0.1))):
        with pytest.raises(ConfigError, match="not linear"):
            fixed_point_of(codec)
    with pytest.raises(ConfigError, match="not linear"):
        FixedPoint(inner, clip=1.0)


@pytest.mark.parametrize("parameters", [{"clip": 1e-40}, {"clip": 3e38, "levels": 64}])
def test_impossible_grids_are_refused(parameters: dict) -> None:
    with pytest.raises(ConfigError, match=r"clip|levels"):
        FixedPoint(RandomK(0.1), **parameters)


def test_a_sum_of_another_length_is_refused() -> None:
    with pytest.raises(LayoutError, match="integers, not"):
        CODECS[0].place(np.zeros(3, np.int64), 1, LAYOUT, KEY)


@pytest.mark.parametrize("codec", EXAMPLES, ids=repr)
def test_no_codec_brings_supports_of_the_clients_own_into_a_sum(codec) -> None:
    """Of every codec: two clients send the same coordinates, or it is refused with what to use instead."""
    layout = LAYOUT
    summed, refusal = codec, ""
    if not isinstance(codec, FixedPoint):
        try:
            summed = FixedPoint(codec, clip=1.0)
        except ConfigError as error:
            refusal = str(error)
    if refusal:
        assert re.search("shared=True|put it outside|use unbiased=False", refusal)
        return
    frames = [
        summed.encode(
            Update(np.eye(1, layout.size, at, dtype=np.float32)[0], layout),
            summed.init(layout),
            Key(0, "uplink", 1, partition),
        )[0]
        for partition, at in enumerate((3, layout.size - 1))
    ]
    one, other = (summed.open(frame, layout).tensors for frame in frames)
    for a, b in zip(one, other, strict=True):
        assert a.values.k == b.values.k
        np.testing.assert_array_equal(a.indices, b.indices)
