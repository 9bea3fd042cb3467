"""Modular sums: exact in every grouping, uniform errors, room by construction, and composition with other sums.

The tests of the section on modular sums in the specification are all here; each says which.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from codec_examples import LAYOUTS, update
from scipy import stats

from fedcomp import wire
from fedcomp.codecs import FixedPoint, ModularSum, RandomBlock, RandomK
from fedcomp.coding.prime import FIELDS
from fedcomp.coding.sumcode import prime_for
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.wire import SEED, SchemaMismatch

KEY = Key(11, "uplink", round=2)
LAYOUT = LAYOUTS["model"]
CLIENTS = 5
CODECS = (
    ModularSum(RandomK(1.0), clip=4.0, levels=20, summands=CLIENTS),
    ModularSum(RandomK(0.1), clip=4.0, summands=CLIENTS),
    ModularSum(RandomBlock(0.2), clip=2.0, levels=32767, summands=CLIENTS),
    ModularSum(RandomK(0.3, scope="layer"), clip=8.0, levels=6, summands=300, modulus=4096),
)


def frames_of(codec: ModularSum, scale: float = 1.0) -> list[bytes]:
    return [codec.encode(update(LAYOUT, seed=c, scale=scale), {}, KEY.at(partition=c))[0] for c in range(CLIENTS)]


def ones(count: int = CLIENTS) -> dict[int, int]:
    return dict.fromkeys(range(count), 1)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_sum_is_that_of_what_each_frame_says_in_every_order_and_grouping(codec: ModularSum) -> None:
    """3.4, first. Exactly: integers add, and the same dithers are taken off, in one order."""
    frames = frames_of(codec)
    flat = codec.add(frames, LAYOUT)
    exact = sum(codec.grid.integers(codec.open(frame, LAYOUT)) for frame in frames)
    np.testing.assert_array_equal(codec.total(flat, LAYOUT), exact)
    trees = [
        [frames[4], frames[2], frames[0], frames[3], frames[1]],
        [codec.add(frames[:2], LAYOUT), codec.add(frames[2:], LAYOUT)],
        [frames[0], codec.add([codec.add(frames[1:3], LAYOUT), codec.add([frames[3]], LAYOUT)], LAYOUT), frames[4]],
    ]
    for tree in trees:
        assert codec.add(tree, LAYOUT) == flat
    placed = codec.place(codec.total(flat, LAYOUT), CLIENTS, LAYOUT, KEY, ones())
    mean = sum(codec.decode(frame, LAYOUT).astype(np.float64) for frame in frames) / CLIENTS
    np.testing.assert_allclose(placed, mean, rtol=0, atol=1e-6 * codec.clip)
    # Dithers are taken off in one order, whoever is named first.
    backwards = dict(reversed(list(ones().items())))
    assert placed.tobytes() == codec.place(codec.total(flat, LAYOUT), CLIENTS, LAYOUT, KEY, backwards).tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_one_frame_leaves_a_relay_however_many_came(codec: ModularSum) -> None:
    """Bits on the wire are ceil(log2 M) for each value, and a head. 3.4, sixth."""
    frames = frames_of(codec)
    sums = [len(codec.add(frames[:n], LAYOUT)) for n in range(1, CLIENTS + 1)]
    assert len(set(sums)) == 1
    # Ten bytes name a client's dithers; padding moves by at most seven.
    assert abs(len(frames[0]) - sums[0] - 10) <= 7
    width = (codec.m - 1).bit_length()
    values = sum(-(-tensor.values.k * width // 8) for tensor in codec.open(frames[0], LAYOUT).tensors)
    assert values < len(frames[0]) < values + 150


def flat_frames(codec: ModularSum, clients: int, size: int, seed: int = 0) -> tuple[np.ndarray, list[bytes], Layout]:
    layout = Layout.flat(size)
    x = Key(seed, "modular/test").generator().uniform(-0.9, 0.9, (clients, size)).astype(np.float32)
    frames = [codec.encode(Update(row, layout), {}, KEY.at(partition=c))[0] for c, row in enumerate(x)]
    return x, frames, layout


def test_the_error_is_uniform_within_half_a_step_and_does_not_depend_on_the_value() -> None:
    """3.4, second and third: mean within four deviations of 0, variance step²/12 within 5 %."""
    codec = ModularSum(RandomK(1.0), clip=1.0, levels=8, summands=1)
    x, (frame,), layout = flat_frames(codec, 1, 60_000)
    error = (codec.decode(frame, layout) - x[0]) / codec.step
    assert np.abs(error).max() <= 0.5 + 1e-5
    assert abs(error.mean()) <= 4 * np.sqrt(1 / 12 / error.size)
    assert error.var() == pytest.approx(1 / 12, rel=0.05)
    assert stats.kstest(error, "uniform", (-0.5, 1.0)).pvalue > 1e-4
    assert abs(np.corrcoef(error, np.abs(x[0]) % codec.step)[0, 1]) < 0.02
    # Without the dither taken off the error depends on the value, and is twice as large in the mean.
    plain = FixedPoint(RandomK(1.0), clip=1.0, levels=8)
    same, _ = plain.encode(Update(x[0], layout), {}, KEY)
    rounded = (plain.decode(same, layout) - x[0]) / codec.step
    assert rounded.var() == pytest.approx(1 / 6, rel=0.05)


@pytest.mark.parametrize(("variant", "times"), [("right", 1.0), ("none", 2.0), ("wrong", 3.0)])
def test_dithers_have_to_be_the_clients_own(variant: str, times: float) -> None:
    """3.4, fifth: C step²/12 with the right ones, twice that without, three times with others'."""
    codec = ModularSum(RandomK(1.0), clip=1.0, levels=10, summands=CLIENTS)
    x, frames, layout = flat_frames(codec, CLIENTS, 40_000)
    total = codec.total(codec.add(frames, layout), layout)
    key = KEY if variant != "wrong" else KEY.at(round=3)
    found = total * codec.step if variant == "none" else codec.place(total, 1, layout, key, ones()).astype(np.float64)
    error = (found - x.astype(np.float64).sum(axis=0)) / codec.step
    assert error.var() == pytest.approx(times * CLIENTS / 12, rel=0.05)


def test_no_sum_wraps_at_the_worst_input() -> None:
    """3.4, fourth: all as large as they can be, all of one sign, as many as there is room for."""
    codec = ModularSum(RandomK(1.0), clip=1.0, levels=10, summands=CLIENTS)
    assert (codec.m, codec.grid.bits) == (101, 7)
    layout = Layout.flat(400)
    for value in (1.0, -1.0, 1e30, -1e30):
        full = Update(np.full(400, value, np.float32), layout)
        frames = [codec.encode(full, {}, KEY.at(partition=c))[0] for c in range(CLIENTS)]
        total = codec.total(codec.add(frames, layout), layout)
        np.testing.assert_array_equal(total, np.sign(value) * 10 * CLIENTS)
    # One summand more does wrap, and is refused before it can.
    more = codec.add([*frames, frames[0]], layout)
    assert codec.total(more, layout).max() > 0
    with pytest.raises(ConfigError, match="may leave the modulus 101; raise summands=5 to 6"):
        codec.place(codec.total(more, layout), 6, layout, KEY, ones(6))


def test_a_smaller_modulus_needs_a_word_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"no room for 5 summands of 10 levels, which need 101; .*allow_wrap=True"):
        ModularSum(RandomK(1.0), clip=1.0, levels=10, summands=5, modulus=64)
    codec = ModularSum(RandomK(1.0), clip=1.0, levels=10, summands=5, modulus=64, allow_wrap=True)
    _x, frames, layout = flat_frames(codec, CLIENTS, 500)
    total = codec.total(codec.add(frames, layout), layout)
    exact = sum(codec.grid.integers(codec.open(frame, layout)) for frame in frames)
    # Small sums come out; those that wrap are off by the modulus.
    assert set(np.unique((total - exact) // 64)) <= {-1, 0, 1}
    codec.place(total, 5, layout, KEY, ones())
    assert "may leave the modulus 64" in caplog.text
    with pytest.raises(ConfigError, match="modulus"):
        ModularSum(RandomK(1.0), clip=1.0, levels=10, modulus=20, allow_wrap=True)


def test_summands_for_which_no_modulus_has_room_are_refused() -> None:
    with pytest.raises(ConfigError):
        ModularSum(RandomK(1.0), clip=1.0, summands=10**9)


def test_weights_multiply_integers_and_dithers_alike() -> None:
    weights = {0: 3, 1: 1, 2: 7}
    codec = ModularSum(RandomK(0.5), clip=4.0, levels=50, summands=11)
    frames = frames_of(codec)[:3]
    total = sum(w * codec.grid.integers(codec.open(f, LAYOUT)) for w, f in zip(weights.values(), frames, strict=True))
    placed = codec.place(total, 11, LAYOUT, KEY, weights)
    decoded = [codec.decode(f, LAYOUT).astype(np.float64) for f in frames]
    mean = sum(w * d for w, d in zip(weights.values(), decoded, strict=True)) / 11
    np.testing.assert_allclose(placed, mean, rtol=0, atol=1e-6 * codec.clip)
    with pytest.raises(ConfigError, match="raise summands=11 to 12"):
        codec.place(total, 12, LAYOUT, KEY, {**weights, 3: 1})


def test_who_is_in_a_sum_has_to_be_known() -> None:
    codec = CODECS[0]
    total = codec.total(codec.add(frames_of(codec), LAYOUT), LAYOUT)
    for nobody in (None, {}):
        with pytest.raises(ConfigError, match="has to be known"):
            codec.place(total, CLIENTS, LAYOUT, KEY, nobody)
    # A contributor too few leaves its dither in: no more than that.
    right, wrong = (codec.place(total, CLIENTS, LAYOUT, KEY, ones(n)) for n in (CLIENTS, CLIENTS - 1))
    assert 0 < np.abs(right - wrong).max() <= codec.step / 2 / CLIENTS * (1 + 1e-5)


def test_sums_in_a_prime_field_compose_bit_for_bit() -> None:
    codec = CODECS[0]
    frames = frames_of(codec)
    field = prime_for(CLIENTS, codec.levels)
    assert field in FIELDS
    centred = field.lift(
        field.sum([field.residues(codec.grid.integers(codec.open(frame, LAYOUT))) for frame in frames])
    )
    plain = codec.place(codec.total(codec.add(frames, LAYOUT), LAYOUT), CLIENTS, LAYOUT, KEY, ones())
    assert codec.place(centred, CLIENTS, LAYOUT, KEY, ones()).tobytes() == plain.tobytes()


def test_a_frame_says_whose_dithers_it_has_and_others_are_refused() -> None:
    codec = CODECS[1]
    frame = frames_of(codec)[1]
    codec.verify(frame, LAYOUT, KEY.at(partition=1))
    for other in (KEY.at(partition=2), KEY.at(partition=1, round=3), Key(12, "uplink", 2, 1)):
        with pytest.raises(SchemaMismatch):
            codec.verify(frame, LAYOUT, other)
    bundle = wire.decode(frame)
    chosen = wire.encode(bundle.tensors, tlvs=((SEED, bytes(8)),))
    codec.open(chosen, LAYOUT)
    with pytest.raises(SchemaMismatch, match="not those of this round and sender"):
        codec.verify(chosen, LAYOUT, KEY.at(partition=1))
    with pytest.raises(SchemaMismatch, match="of a sum, use total"):
        codec.open(wire.encode(bundle.tensors), LAYOUT)


def test_a_client_cannot_exceed_its_share_of_a_sum() -> None:
    """A residue beyond the levels is well-formed, as sums are; of one client it is refused."""
    codec = ModularSum(RandomK(1.0), clip=1.0, levels=10, summands=5)
    _, (frame,), layout = flat_frames(codec, 1, 4)
    (tensor,) = wire.decode(frame).tensors
    values = codec.grid.values(np.array([0, 11, 0, 0]))
    forged = wire.encode([replace(tensor, values=values)], tlvs=((SEED, bytes(8)),))
    codec.total(forged, layout)
    with pytest.raises(SchemaMismatch, match="integer of 11, beyond 10"):
        codec.open(forged, layout)


@pytest.mark.parametrize(
    "other",
    [
        ModularSum(RandomK(0.1), clip=4.0, summands=6),
        ModularSum(RandomK(0.1), clip=4.1, summands=CLIENTS),
        FixedPoint(RandomK(0.1), clip=4.0),
    ],
)
def test_frames_of_another_grid_are_not_added(other: Any) -> None:
    codec = CODECS[1]
    foreign, _ = other.encode(update(LAYOUT), {}, KEY)
    with pytest.raises(wire.WireError):
        codec.add([frames_of(codec)[0], foreign], LAYOUT)


def test_frames_of_other_rounds_are_not_added_and_nothing_is_not_a_sum() -> None:
    codec = CODECS[1]
    later, _ = codec.encode(update(LAYOUT), {}, KEY.at(round=9))
    with pytest.raises(SchemaMismatch, match="different supports"):
        codec.add([frames_of(codec)[0], later], LAYOUT)
    with pytest.raises(ConfigError, match="no frames"):
        codec.add([], LAYOUT)


@pytest.mark.parametrize("modulus", [2, 3, 7, 8, 101, 2**16, 2**32 - 1, 2**32])
def test_residues_are_centred_as_masks_are(modulus: int) -> None:
    half = modulus // 2
    span = np.unique(np.concatenate([np.arange(-min(half, 50), min(half, 50)), [-half, (modulus - 1) // 2, 0]]))
    span = span[(span >= -half) & (span <= (modulus - 1) // 2)]
    values = wire.Residues(span % modulus, modulus, 1.0)
    np.testing.assert_array_equal(values.centred(), span)
