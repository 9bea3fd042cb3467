"""Codecs on innovations: float32 and float64, sizes, strict parsing, bytes for ever; what codecs promise, they promise
themselves (tests/codecs), and sections, too (tests/wire)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedcomp.codecs import (
    DCT,
    EDEN,
    QSGD,
    STC,
    ChunkTop1,
    Codec,
    Dithering,
    Domain,
    Identity,
    NormSign,
    RandomK,
    ScaledSign,
    Threshold,
    TopK,
    get_codec,
)
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.compressor import Compressor, get_compressor
from fedcomp.gossip.dyna_cold import Sign
from fedcomp.gossip.errors import MessageError
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

KEY = Key(5, "compressors", 3, 2)
OWN = RandomK(0.2, shared=False)

ALL = [
    Identity(),
    TopK(0.1),
    TopK(0.3, index="bitmap", values="float64"),
    TopK(0.1, index="rice", values="fp16"),
    TopK(0.1, index="elias-fano"),  # which only frames have
    RandomK(0.2),
    OWN,
    ScaledSign(),
    NormSign(),
    Sign(),
    Dithering(2),
    Dithering(1),
    QSGD(),
    EDEN(2),
    Domain(DCT(16), TopK(0.1)),
    STC(0.2),
    Threshold(0.5),
    ChunkTop1(0.3, values="float64"),  # which takes float32 alone
]


def draw(n: int, dtype: str = "float64", purpose: str = "v") -> NDArray[Any]:
    return Key(9, purpose, n).generator().standard_normal(n).astype(dtype)


def through(codec: Codec | Compressor, v: NDArray[Any], key: Key = KEY) -> NDArray[Any]:
    c = codec if isinstance(codec, Compressor) else Compressor(codec)
    data, sent = c.compress(v, v.size, key)
    assert data == c.encode(v, v.size, key)
    assert len(data) <= c.most(v.size, v.size, v.dtype)
    q = c.decode(memoryview(data), v.size, v.size, v.dtype, key)
    # What the sender holds is what a reader gets, bit for bit: nothing else keeps two estimates equal.
    assert (sent.n, sent.values.dtype, sent.values.tobytes()) == (q.n, q.values.dtype, q.values.tobytes())
    assert (sent.indices is None) == (q.indices is None)
    assert sent.indices is None or np.array_equal(sent.indices, q.indices)
    out = q.dense()
    assert out.dtype == v.dtype
    assert q.n == v.size
    return out


def length(codec: Codec, v: NDArray[Any]) -> int:
    return len(Compressor(codec).encode(v, v.size, KEY))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 8, 65, 2410])
def test_7_17_messages_have_the_length_of_the_formula(n: int, dtype: str) -> None:
    v, bits = draw(n, dtype), math.ceil(math.log2(n))
    for density in {0.01, 0.1, 1.0}:
        k = max(1, math.ceil(density * n))
        fields = math.ceil(min(k * bits, n) / 8)
        assert length(TopK(density, index="fixed"), v) == fields + 4 * k
        assert length(TopK(density, index="fixed", values="fp16"), v) == fields + 2 * k
        assert length(TopK(density, index="fixed", values="float64"), v) == fields + v.itemsize * k
        assert length(RandomK(density), v) == 4 * k
    assert length(Identity(), v) == n * v.itemsize
    assert length(Sign(), v) == math.ceil(n / 8)
    assert length(ScaledSign(), v) == length(NormSign(), v) == 4 + math.ceil(n / 8)
    for b in (1, 2, 7):
        assert length(Dithering(b), v) == 4 + math.ceil(n * (b + 1) / 8)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_float32_vectors_arrive_as_from_a_frame_and_float64_ones_as_near(codec: Codec, dtype: str) -> None:
    """9000 elements: from 8192 on, fields of bits are packed in another layout."""
    v, layout = draw(9000, dtype), Layout.flat(9000)
    frame, _ = codec.encode(Update(v.astype(np.float32), layout), {}, Key(0, KEY.purpose, KEY.round, KEY.partition))
    here = through(codec, v, Key(0, KEY.purpose, KEY.round, KEY.partition))
    there = codec.decode(frame, layout)
    if dtype == "float32":
        assert here.tobytes() == (there + np.float32(0.0)).tobytes()
    else:  # a draw may fall on the other side for the rounding
        assert np.count_nonzero(np.abs(here - there) > 1e-6 * np.abs(there)) <= 2


def test_magnitudes_are_ranked_in_float64_before_they_are_rounded() -> None:
    v = np.array([1.0, 1.0 + 1e-12, 1.0 - 1e-12])
    assert np.flatnonzero(through(TopK(1 / 3), v)).tolist() == [1]
    assert np.flatnonzero(through(TopK(2 / 3), v)).tolist() == [0, 1]
    v = np.array([0.0, 1.0, -2.0, 2.0, -1.0, 1.0, 0.0])
    assert np.flatnonzero(through(TopK(3 / 7), v)).tolist() == [1, 2, 3]
    assert length(TopK(1.0, index="fixed"), v) == 1 + 5 * 4
    assert length(TopK(1.0), np.zeros(7)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-14, 1e-30, 1e30])
@pytest.mark.parametrize("codec", [c for c in ALL if not isinstance(c, Threshold)], ids=repr)
def test_innovations_keep_shrinking_at_any_size_the_wire_holds(codec: Codec, scale: float) -> None:
    v = draw(40) * scale
    if isinstance(codec, TopK) and codec.values == "fp16":
        return  # loses what is below 3e-8, and says so
    estimate, first, size = np.zeros_like(v), np.linalg.norm(v), scale
    for i in range(300):
        c = Compressor(codec, size / 2.0) if isinstance(codec, Sign) else Compressor(codec)
        estimate += through(c, v - estimate, KEY.at(round=i))
        size *= 0.9
        if isinstance(codec, NormSign | QSGD) or codec == Dithering(1):
            break  # no contraction in the worst case: one step must still be of the right size
    after = np.linalg.norm(v - estimate)
    assert after < (3.0 if i == 0 else 1e-3) * first
    assert np.any(estimate)


def test_what_the_wire_cannot_hold_is_cut_off_or_waits() -> None:
    v = np.array([1e300, -1e300, 1e-200, 0.0])
    largest = float(np.finfo(np.float32).max)
    for codec in (TopK(1.0), RandomK(1.0), TopK(1.0, values="bf16")):
        cut = float(np.float32(largest)) if "bf16" not in repr(codec) else 3.3895313892515355e38
        assert through(codec, v).tolist() == [cut, -cut, 0.0, 0.0]
    assert through(TopK(1.0, values="fp16"), v).tolist() == [65504.0, -65504.0, 0.0, 0.0]
    assert through(TopK(1.0, values="float64"), v).tolist() == v.tolist()
    tiny = np.full(8, 1e-200)
    assert length(TopK(0.5), tiny) == 0
    assert length(TopK(0.5, values="float64", index="fixed"), tiny) == 1 + 32
    for codec in (ScaledSign(), ScaledSign(block=2), NormSign(), Dithering(3)):
        assert np.isfinite(through(codec, v)).all()
        assert not through(codec, tiny).any()


@pytest.mark.parametrize("scale", [1e-20, 3.0])
@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_no_scale_makes_a_number_infinite(codec: Codec, scale: float) -> None:
    """What is too large when it is divided, or multiplied again, is the largest number there is: readers take it."""
    v = np.full(70, -1e38, np.float32)
    v[::2] = 3.4e38
    try:
        found = through(Compressor(codec).scaled(scale), v)
    except NonFiniteUpdate:
        assert isinstance(codec, QSGD | EDEN | Domain)  # whose norms are beyond float32
        return
    assert np.isfinite(found).all()


@pytest.mark.parametrize("codec", ALL, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nan_and_infinity_are_refused_and_no_elements_have_no_bytes(codec: Codec, dtype: str) -> None:
    c = Compressor(codec)
    for bad in (np.nan, np.inf):
        v = draw(20, dtype)
        v[7] = bad
        with pytest.raises(NonFiniteUpdate):
            c.encode(v, 20, KEY)
    assert c.encode(np.zeros(0, dtype), 0, KEY) == b""
    assert through(c, np.zeros(0, dtype)).size == 0
    with pytest.raises(MessageError):
        c.decode(memoryview(b"x"), 0, 0, dtype, KEY)


@pytest.mark.parametrize("codec", ALL, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_decoder_needs_no_seed_of_the_run(codec: Codec, dtype: str) -> None:
    c, v = Compressor(codec), draw(33, dtype)
    data = memoryview(c.encode(v, 33, KEY))
    mine, other = c.decode(data, 33, 33, dtype, KEY).dense(), Key(77, "elsewhere", 1, 8)
    if isinstance(codec, RandomK):
        other = Key(77, KEY.purpose, KEY.round, KEY.partition if codec == OWN else 8)
        elsewhere = c.decode(data, 33, 33, dtype, KEY.at(partition=8)).dense()
        assert (elsewhere.tolist() == mine.tolist()) == codec.shared
    assert c.decode(data, 33, 33, dtype, other).dense().tobytes() == mine.tobytes()


@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_contractions_are_the_codecs_but_for_the_rounding_of_float64(codec: Codec) -> None:
    declared = codec.contraction(Layout.flat(20))
    exact = isinstance(codec, Identity) or (isinstance(codec, TopK) and codec.values == "float64")
    expected = declared if declared is None or exact else declared * (1.0 - 2.0**-48)
    assert Compressor(codec).contraction(20) == expected
    assert Compressor(codec).contraction(0) is None
    # A spike, which signs fear most, of a number that float32 has to round.
    spike = np.zeros(20)
    spike[3] = math.pi
    if expected is not None and not isinstance(codec, RandomK | Dithering):
        assert np.sum((spike - through(codec, spike)) ** 2) <= (1.0 - expected) * math.pi**2 * (1.0 + 1e-12)


def test_zero_has_a_plus_on_both_ends() -> None:
    v = np.array([0.0, -0.0, -1.0, 1.0])
    assert through(Compressor(Sign(), 0.5), v).tolist() == [0.5, 0.5, -0.5, 0.5]
    assert through(NormSign(), v).tolist() == [0.5, 0.5, -0.5, 0.5]
    assert through(ScaledSign(), v).tolist() == [0.5, 0.5, -0.5, 0.5]
    assert Compressor(Sign(), 0.5).encode(v, 4, KEY) == b"\x04"


@pytest.mark.parametrize(
    "config",
    [
        {"id": "feedback", "codec": {"id": "topk", "density": 0.1}},
        {"id": "signsgd", "step": 0.1},
        {"id": "sidco", "density": 0.1},
    ],
    ids=lambda config: str(config["id"]),
)
def test_codecs_with_a_memory_or_votes_are_refused(config: dict[str, Any]) -> None:
    assert get_codec(config).codec_id == config["id"]  # a good codec, but not here
    with pytest.raises(ConfigError, match="cannot compress innovations"):
        get_compressor(config)


def test_a_compressor_is_its_codec() -> None:
    c = get_compressor({"id": "topk", "density": 0.1})
    assert c == get_compressor(c) == get_compressor(TopK(0.1)) == get_compressor(c.to_config())
    assert hash(c) == hash(get_compressor(TopK(0.1)))
    assert c != c.scaled(2.0)
    assert c != get_compressor(TopK(0.2))
    for config in ({"id": "top-k"}, {"id": "topk"}, {"id": "topk", "fraction": 0.1}, {}, "topk"):
        with pytest.raises(ConfigError):
            get_compressor(config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'choco' has no parameter 'gama'; did you mean 'gamma'"):
        get_algorithm({"name": "choco", "gama": 0.1})


@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_what_travels_whole_stands_behind_the_compressed_part(codec: Codec) -> None:
    c, v = Compressor(codec), draw(30)
    data = c.encode(v, 20, KEY)
    assert data == c.encode(v[:20], 20, KEY) + v[20:].tobytes()
    assert len(data) <= c.most(30, 20, v.dtype)
    out = c.decode(memoryview(data), 30, 20, v.dtype, KEY)
    assert out.dense()[:20].tobytes() == through(c, v[:20]).tobytes()
    assert out.dense()[20:].tobytes() == v[20:].tobytes()
    added, scaled = np.ones(30), np.ones(30)
    out.add_to(added)
    out.add_to(scaled, 0.5)
    assert np.array_equal(added, 1.0 + out.dense())
    assert np.array_equal(scaled, 1.0 + 0.5 * out.dense())
    with pytest.raises(MessageError):
        c.decode(memoryview(data[:79]), 30, 20, v.dtype, KEY)


VECTOR = [0.25, -3.0, 0.0, 1.0, -0.5, 0.125, 2.0, -0.0, 0.75, -1.5]
TWO = [0.0, -3.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]
THREE = [0.0, -3.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, -1.5]
SIGNS = np.array([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0, -1.0])

GOLDEN = [
    (Identity(), "0000803e000040c0000000000000803f000000bf0000003e00000040000000800000403f0000c0bf", VECTOR),
    (TopK(0.2, index="fixed"), "61000040c000000040", TWO),
    (TopK(0.3, index="fixed"), "4202000040c0000000400000c0bf", THREE),
    (TopK(0.3, index="bitmap"), "4202000040c0000000400000c0bf", THREE),
    (TopK(0.3, index="rice"), "02034202000040c0000000400000c0bf", THREE),
    (TopK(0.3, index="auto"), "014202000040c0000000400000c0bf", THREE),
    (TopK(0.2, index="auto"), "0061000040c000000040", TWO),
    (TopK(0.3, index="fixed", values="fp16"), "420200c2004000be", THREE),
    (RandomK(0.3, shared=False), "000000000000803f00000040", [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]),
    (ScaledSign(), "9a99693f1202", np.float32(0.9125) * SIGNS),
    (NormSign(), "0000c03f1202", 1.5 * SIGNS),
    (Sign(), "1202", SIGNS),
    (Dithering(2), "0000404083164d0b", [1.5, -3.0, 0.0, 1.5, -1.5, 0.0, 1.5, 0.0, 1.5, -1.5]),
]


@pytest.mark.parametrize(("codec", "data", "decoded"), GOLDEN, ids=lambda part: repr(part)[:60])
def test_messages_are_these_bytes_for_ever(codec: Codec, data: str, decoded: list[float]) -> None:
    c = Compressor(codec)
    assert c.encode(np.array(VECTOR, np.float32), 10, KEY).hex() == data
    q = c.decode(memoryview(bytes.fromhex(data)), 10, 10, np.float32, KEY)
    assert np.array_equal(q.dense(), np.array(decoded, np.float32))


@pytest.mark.parametrize(
    ("codec", "n", "data", "says"),
    [
        (TopK(0.5, index="fixed"), 8, bytes(3), "no number of indices"),
        (TopK(0.1, index="fixed"), 10, bytes(9), "at most 1"),
        (TopK(0.1), 16, b"\x03" + bytes(5), "names no layout"),
        (RandomK(0.1), 16, bytes(9), "at most 8"),
        (RandomK(0.05), 16, np.array([np.inf], "<f4").tobytes(), "infinite"),
        (NormSign(), 8, np.array([-1.0], "<f4").tobytes() + b"\x00", "negative"),
        (NormSign(), 8, np.array([np.nan], "<f4").tobytes() + b"\x00", "NaN"),
        (Sign(), 9, b"\x00", "2 to 2 bytes"),
        (Dithering(2), 2, bytes(6), "at most 5"),
        (Dithering(2), 2, np.array([1.0], "<f4").tobytes() + b"\x3f", "outside -2..2"),
        (Dithering(2), 2, np.array([-1.0], "<f4").tobytes() + b"\x01", "negative"),
        (QSGD(7, 8), 9, b"\x03\x00\x09\x08" + bytes(14), "expected 7 levels"),
        (TopK(0.1, index="elias-fano"), 9, b"FCW1", "not a section"),
        (Identity(), 2, bytes(15), "16 bytes"),
    ],
)
def test_messages_nobody_writes_are_refused(codec: Codec, n: int, data: bytes, says: str) -> None:
    with pytest.raises(MessageError, match=says):
        Compressor(codec).decode(memoryview(data), n, n, np.float64, KEY)
