"""The length that no frame of a codec exceeds, and frames padded to it: the same for every update."""

from __future__ import annotations

import math

import numpy as np
import pytest
from codec_examples import LAYOUTS, update
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp import wire
from fedcomp.codecs import Codec, RandomK, TopK
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.wire import Expected

KEY = Key(5, "longest", round=1, partition=3)


def updates(layout: Layout) -> list[Update]:
    """Random, sparse and zero ones, and those whose supports are written in the costliest ways."""
    n = layout.size
    rng = np.random.default_rng(n)
    falling = np.linspace(1.0, 2.0, n)  # the last coordinates are the largest
    alone = np.zeros(n)
    alone[-1] = 3.0
    spread = np.where(np.arange(n) % max(1, n // 37) == 0, 5.0, 1e-6) * rng.choice([-1.0, 1.0], n)
    drawn = np.zeros(n)
    drawn[rng.choice(n, max(1, n // 7), replace=False)] = rng.normal(size=max(1, n // 7))
    even = rng.permutation(np.where(np.arange(n) < n // 2, 1.0, 1e-9))  # half of them: no support costs more
    given = [np.zeros(n), alone, drawn, spread, falling, falling[::-1], even, -np.ones(n), 1e30 * drawn, 1e-39 * drawn]
    return [update(layout), *(Update(v.astype(np.float32), layout) for v in given)]


def frames_of(codec: Codec, layout: Layout) -> list[bytes]:
    """Return the frames of all updates; with memory, of three rounds of each."""
    found = []
    for given_ in updates(layout):
        state = codec.init(layout)
        for r in range(2 if state else 1):
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                frame, state = codec.encode(given_, state, KEY.at(round=1 + r))
            found.append(frame)
    return found


@pytest.mark.slow
def test_a7_frames_are_no_longer_than_their_codec_says_and_padded_ones_equally_long(codec: Codec) -> None:
    """By the configuration alone: codec and layout. Padding changes nothing of what is decoded."""
    for layout in (LAYOUTS["model"], LAYOUTS["one element"]):
        most = codec.longest(layout)
        assert most is not None
        length = most + wire.FILLED
        assert length <= codec.limits(layout).max_bytes_in
        for frame in frames_of(codec, layout):
            assert len(frame) <= most
            padded = wire.pad(frame, length, KEY.digest())
            assert len(padded) == length
            np.testing.assert_array_equal(codec.decode(padded, layout), codec.decode(frame, layout))
            assert wire.tensor_bytes(padded) == wire.tensor_bytes(frame)
            assert codec.open(padded, layout).tlvs == codec.open(frame, layout).tlvs


def test_a7_the_bound_is_not_far_above_the_frames_of_random_updates() -> None:
    """What padding costs: a bound that doubles every frame would be safe, too."""
    layout = Layout.of({"w": np.zeros((1000, 300), np.float32)})
    for codec, within in ((TopK(0.01), 1.06), (TopK(0.1), 1.05), (RandomK(0.01), 1.01), (TopK(0.5), 1.07)):
        frame, _ = codec.encode(update(layout), {}, KEY)
        most = codec.longest(layout)
        assert most is not None
        assert len(frame) <= most <= within * len(frame), codec


INDICES = ("auto", *wire.PLAIN, *(f"complement:{name}" for name in wire.PLAIN), "auto+bins:16")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 20_000),
    st.floats(0.0, 1.0),
    st.sampled_from(["uniform", "first", "last", "clustered", "even"]),
    st.integers(0, 10**6),
)
def test_a7_supports_of_any_shape_stay_within_the_bound(n: int, density: float, shape: str, seed: int) -> None:
    """For every index codec and every number of indices up to the largest, not at the largest alone."""
    rng = np.random.default_rng(seed)
    most = max(1, math.ceil(density * n))
    k = int(rng.integers(0, most + 1))
    if shape == "first":
        indices = np.arange(k)
    elif shape == "last":
        indices = np.arange(n - k, n)
    elif shape == "even":
        indices = np.unique(np.linspace(0, n - 1, k).astype(np.int64)) if k else np.zeros(0, np.int64)
    elif shape == "clustered":
        start = int(rng.integers(0, n - k + 1))
        indices = np.sort(np.r_[np.arange(start, start + k // 2), rng.choice(n, 0)]).astype(np.int64)
    else:
        indices = np.sort(rng.choice(n, k, replace=False))
    expected = Expected("", (n,), "float32", most, frozenset({wire.SPARSE}), None, frozenset({"ones"}))
    for index in INDICES:
        frame = wire.encode([wire.sparse((n,), indices, wire.Ones(len(indices)), index=index)])
        assert len(frame) <= wire.longest((expected,), index), (index, k, most)


@given(st.integers(0, 400), st.integers(0, 40_000))
def test_a7_every_length_above_the_frame_can_be_reached(extra: int, more: int) -> None:
    frame = wire.encode([wire.dense(np.ones(5, np.float32))])
    for room in (extra, more):
        if room < wire.FILLED:
            with pytest.raises(ConfigError, match="cannot be padded"):
                wire.pad(frame, len(frame) + room, b"a")
            continue
        padded = wire.pad(frame, len(frame) + room, b"a")
        assert len(padded) == len(frame) + room
        np.testing.assert_array_equal(wire.decode(padded)[0].values.decode(), np.ones(5, np.float32))


@pytest.mark.parametrize("room", [wire.FILLED, 129, 130, 131, 500])
def test_a7_a_frame_with_all_fields_a_sender_may_write_can_be_padded(room: int) -> None:
    tensor = wire.dense(np.ones(1001, np.float32))  # long enough to be aligned, by one field more
    frame = wire.encode([tensor], tlvs=[(wire.USER_TAG, b"x")] * 61)
    padded = wire.decode(wire.pad(frame, len(frame) + room, b"a"))
    assert padded.tlvs == wire.decode(frame).tlvs
    with pytest.raises(ConfigError, match="at most 61"):
        wire.encode([tensor], tlvs=[(wire.USER_TAG, b"x")] * 62)


def test_a7_padded_frames_of_equal_updates_differ_and_repeat() -> None:
    """Equal messages would be stored once, which whoever counts bytes would see."""
    frame = wire.encode([wire.dense(np.zeros(3, np.float32))])
    padded = [wire.pad(frame, len(frame) + wire.FILLED, KEY.at(partition=p).digest()) for p in (0, 1, 0)]
    assert padded[0] == padded[2] != padded[1]


def test_a7_a_padded_frame_is_checked_like_any_other() -> None:
    frame = wire.encode([wire.dense(np.ones(9, np.float32))], tlvs=[(wire.USER_TAG, b"x")])
    padded = wire.pad(frame, len(frame) + 100, b"a")
    assert wire.decode(padded).tlv(wire.USER_TAG) == b"x"
    for at in range(0, len(padded), 7):
        broken = bytearray(padded)
        broken[at] ^= 16
        with pytest.raises(wire.WireError):
            wire.decode(bytes(broken))
    with pytest.raises(ConfigError, match="type 7"):
        wire.encode([], tlvs=[(7, b"")])


def test_a7_lengths_are_bounded_for_one_form_only() -> None:
    for expected in (
        Expected("", (9,)),
        Expected("", (9,), kinds=frozenset({wire.DENSE})),
        Expected("", (9,), kinds=frozenset({wire.SHARED}), value_codecs=frozenset({"raw"})),
    ):
        with pytest.raises(ConfigError, match="one form"):
            wire.longest((expected,))
