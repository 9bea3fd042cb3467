"""Compressors of innovations: sizes by formula, exact selection, declared contractions, strict parsing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedcomp import codecs
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.gossip import get_algorithm, sparse
from fedcomp.gossip.compressors import (
    Compressor,
    Dithered,
    FromCodec,
    Identity,
    NormSign,
    RandomK,
    ScaledSign,
    SignHalf,
    TopK,
    decode_parts,
    encode_parts,
    get_compressor,
    most_parts,
)
from fedcomp.gossip.errors import LetterError
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

KEY = Key(5, "compressors", 3, 2)

ALL = [
    Identity(),
    TopK(0.1),
    TopK(k=3, index="packed"),
    TopK(0.3, index="bitmap", values="float64"),
    TopK(0.1, index="rice", values="float16"),
    RandomK(0.2),
    ScaledSign(),
    NormSign(),
    SignHalf(0.7),
    Dithered(2),
    Dithered(1),
    FromCodec({"id": "qsgd"}),
    FromCodec({"id": "randomk", "density": 0.2}),
]


def draw(n: int, dtype: str = "float64", purpose: str = "v") -> NDArray[Any]:
    return Key(9, purpose, n).generator().standard_normal(n).astype(dtype)


def through(c: Compressor, v: NDArray[Any], key: Key = KEY) -> NDArray[Any]:
    data = c.encode(v, key)
    assert len(data) <= c.most(v.size, v.dtype)
    q = c.decode(memoryview(data), v.size, v.dtype, key)
    out = q.dense()
    assert out.dtype == v.dtype
    assert q.n == v.size
    return out


def naive_top(v: NDArray[Any], k: int) -> list[int]:
    return sorted(sorted(range(v.size), key=lambda i: (-abs(v[i]), i))[:k])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("n", "k"), [(2410, 24), (2410, 2), (2410, 240), (50, 5), (50, 20), (1, 1), (2, 1), (65, 0)])
def test_7_17_sparse_sections_have_the_length_of_the_formula(n: int, k: int, dtype: str) -> None:
    v = draw(n, dtype)
    b = math.ceil(math.log2(n))
    fields = math.ceil(k * b / 8) if k * b <= n else math.ceil(n / 8)
    assert len(TopK(k=k, index="packed").encode(v, KEY)) == fields + 4 * k
    assert len(TopK(k=k, index="packed", values="float16").encode(v, KEY)) == fields + 2 * k
    assert len(TopK(k=k, index="bitmap").encode(v, KEY)) == math.ceil(n / 8) + 4 * k
    assert len(RandomK(k=k).encode(v, KEY)) == 4 * k
    wide = 8 if dtype == "float64" else 4
    assert len(TopK(k=k, index="packed", values="float64").encode(v, KEY)) == fields + wide * k


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 8, 65, 2410])
def test_7_17_dense_sections_have_the_length_of_the_formula(n: int, dtype: str) -> None:
    v = draw(n, dtype)
    assert len(Identity().encode(v, KEY)) == n * v.itemsize
    assert len(SignHalf(0.5).encode(v, KEY)) == math.ceil(n / 8)
    assert len(ScaledSign().encode(v, KEY)) == len(NormSign().encode(v, KEY)) == 4 + math.ceil(n / 8)
    for bits in (1, 2, 7):
        assert len(Dithered(bits).encode(v, KEY)) == 4 + math.ceil(n * (bits + 1) / 8)


@pytest.mark.parametrize("n", [1, 2, 7, 50, 2410, 9000])
def test_auto_is_the_shortest_layout_and_one_byte(n: int) -> None:
    v = draw(n)
    for k in sorted({1, n // 100, n // 20, n // 5, n // 2, n} - {0}):
        sizes = {name: len(TopK(k=k, index=name).encode(v, KEY)) for name in sparse.LAYOUTS}
        # Rice carries its byte in any case.
        assert sizes["auto"] == min(1 + sizes["packed"], 1 + sizes["bitmap"], sizes["rice"])


def test_clustered_indices_are_cheapest_in_rice_code() -> None:
    v = np.zeros(2000)
    v[:1200] = 1.0
    sizes = {name: len(TopK(1.0, index=name).encode(v, KEY)) for name in sparse.LAYOUTS}
    assert sizes["auto"] == sizes["rice"] < sizes["bitmap"] == sizes["packed"]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 50, 300])
def test_the_length_of_a_packed_section_tells_k(n: int, size: int) -> None:
    lengths = [sparse.plain_bytes(n, k) + size * k for k in range(n + 1)]
    assert len(set(lengths)) == n + 1
    dtype = np.dtype(f"<f{size}")
    for k in range(n + 1):
        indices = np.arange(n - k, n)
        data = sparse.write(indices, np.ones(k, dtype), n, "packed")
        assert len(data) == lengths[k]
        assert sparse.read(memoryview(data), n, n, dtype, "packed")[0].tolist() == indices.tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("index", sparse.LAYOUTS)
@pytest.mark.parametrize("k", [0, 1, 7, 30, 60])
def test_topk_is_the_naive_selection(k: int, index: str, dtype: str) -> None:
    v = draw(60, dtype)
    v[::4] = np.round(v[::4])  # ties, and zeros among them
    out = through(TopK(k=k, index=index), v)
    expected = np.zeros_like(v)
    chosen = naive_top(v, k)
    expected[chosen] = v[chosen].astype(np.float32)
    assert out.tobytes() == (expected + 0.0).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_topk_of_long_vectors_is_the_naive_selection(dtype: str) -> None:
    v = np.round(draw(20_000, dtype), 2)
    ranked = np.lexsort((np.arange(v.size), -np.abs(v)))
    for k in (1, 200, 19_990):
        assert sparse.largest(v, k).tolist() == sorted(ranked[:k].tolist())


def test_ties_go_to_the_lowest_index_and_zeros_do_not_travel() -> None:
    v = np.array([0.0, 1.0, -2.0, 2.0, -1.0, 1.0, -0.0])
    assert np.flatnonzero(through(TopK(k=3), v)).tolist() == [1, 2, 3]
    q = TopK(k=6).decode(memoryview(TopK(k=6).encode(v, KEY)), 7, v.dtype, KEY)
    assert q.indices is not None
    assert q.indices.tolist() == [1, 2, 3, 4, 5]
    assert TopK(k=6).encode(np.zeros(7), KEY) == b""


def test_magnitudes_are_ranked_in_float64_before_they_are_rounded() -> None:
    v = np.array([1.0, 1.0 + 1e-12, 1.0 - 1e-12])
    assert np.flatnonzero(through(TopK(k=1), v)).tolist() == [1]
    assert np.flatnonzero(through(TopK(k=2), v)).tolist() == [0, 1]


@pytest.mark.long
@pytest.mark.parametrize("scale", [1e-14, 1e-30, 1e30])
@pytest.mark.parametrize("c", ALL, ids=repr)
def test_innovations_keep_shrinking_at_any_size_the_wire_holds(c: Compressor, scale: float) -> None:
    v = draw(40) * scale
    if isinstance(c, SignHalf):
        c = SignHalf(scale)
    if isinstance(c, TopK) and c.values == "float16":
        return  # loses what is below 3e-8, and says so
    estimate = np.zeros_like(v)
    first = np.linalg.norm(v)
    for i in range(300):
        estimate += through(c, v - estimate, KEY.at(round=i))
        if isinstance(c, SignHalf):
            c = SignHalf(c.scale * 0.9)
        if isinstance(c, (NormSign, FromCodec)) or c == Dithered(1):
            break  # no contraction in the worst case: one step must still be of the right size
    after = np.linalg.norm(v - estimate)
    assert after < (3.0 if i == 0 else 1e-3) * first
    assert np.any(estimate)


def test_what_the_wire_cannot_hold_is_cut_off_or_waits() -> None:
    v = np.array([1e300, -1e300, 1e-200, 0.0])
    largest = float(np.finfo(np.float32).max)
    assert through(TopK(k=4), v).tolist() == [largest, -largest, 0.0, 0.0]
    assert through(TopK(k=4, values="float16"), v).tolist() == [65504.0, -65504.0, 0.0, 0.0]
    assert through(TopK(k=4, values="float64"), v).tolist() == v.tolist()
    tiny = np.full(8, 1e-200)
    assert TopK(k=4).encode(tiny, KEY) == b""
    assert len(TopK(k=4, values="float64", index="packed").encode(tiny, KEY)) == 1 + 2 * 0 + 32
    for c in (ScaledSign(), NormSign(), Dithered(3)):
        assert np.isfinite(through(c, v)).all()
        assert not through(c, tiny).any()


@pytest.mark.parametrize("c", ALL, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nan_and_infinity_are_refused_and_no_elements_have_no_bytes(c: Compressor, dtype: str) -> None:
    for bad in (np.nan, np.inf):
        v = draw(20, dtype)
        v[7] = bad
        with pytest.raises(NonFiniteUpdate):
            c.encode(v, KEY)
    assert c.encode(np.zeros(0, dtype), KEY) == b""
    assert through(c, np.zeros(0, dtype)).size == 0


@pytest.mark.parametrize("c", ALL, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_decoder_needs_no_draws_of_the_sender(c: Compressor, dtype: str) -> None:
    v = draw(33, dtype)
    data = memoryview(c.encode(v, KEY))
    mine, other = c.decode(data, 33, dtype, KEY).dense(), Key(77, "elsewhere", 1, 8)
    if isinstance(c, RandomK):
        other = Key(77, KEY.purpose, KEY.round, KEY.partition)  # all but the seed of the run
        assert c.decode(data, 33, dtype, KEY.at(partition=8)).dense().tolist() != mine.tolist()
    assert c.decode(data, 33, dtype, other).dense().tobytes() == mine.tobytes()


def worst_cases(n: int) -> list[NDArray[Any]]:
    spike, flat = np.zeros(n), np.ones(n)
    spike[n // 2] = -3.0
    steep = 0.5 ** np.arange(n)
    return [spike, flat, steep, flat + 0.5 * draw(n), draw(n)]


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 2, 3, 20])
@pytest.mark.parametrize("c", [*ALL, Dithered(4), FromCodec({"id": "topk", "density": 0.25})], ids=repr)
def test_declared_contractions_hold_and_are_reached(c: Compressor, n: int) -> None:
    delta = c.contraction(n)
    if delta is None:
        return
    seen = []
    draws = 1
    if isinstance(c, (RandomK, Dithered)):
        draws = 300
    elif c == FromCodec({"id": "randomk", "density": 0.2}):
        draws = 60
    for v in worst_cases(n):
        errors = [np.sum((v - through(c, v, KEY.at(round=i))) ** 2) / np.sum(v * v) for i in range(draws)]
        noise = 4.0 * float(np.std(errors)) / math.sqrt(draws)
        assert np.mean(errors) <= (1.0 - delta) + noise + 1e-12
        seen.append(float(np.mean(errors)))
    if not isinstance(c, (Dithered, FromCodec)):
        tight = 0.02 if draws == 1 else 0.1
        assert max(seen) >= (1.0 - delta) - tight


def test_compressors_without_a_bound_declare_none_and_exceed_one() -> None:
    for c, v in ((NormSign(), worst_cases(20)[0]), (TopK(0.5, values="float16"), np.full(20, 1e-9))):
        assert c.contraction(20) is None
        assert np.sum((v - through(c, v)) ** 2) >= np.sum(v * v)
    assert Dithered(1).contraction(20) is None
    assert SignHalf(1.0).contraction(20) is None


@pytest.mark.parametrize("bits", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dithered_is_the_published_formula(bits: int, dtype: str) -> None:
    step = 2.0 ** (bits - 1)
    for purpose in "abcdef":  # norms that float32 rounds up, and down
        v = draw(50, dtype, purpose)
        norm = float(np.float32(np.abs(v).max()))
        if norm < float(np.abs(v).max()):
            norm = float(np.nextafter(np.float32(norm), np.float32(np.inf)))
        expected = norm / step * np.sign(v) * np.floor(step * np.abs(v).astype(float) / norm + KEY.uniform(50))
        assert np.array_equal(through(Dithered(bits), v), expected.astype(dtype))


@pytest.mark.long
def test_dithered_is_unbiased() -> None:
    v = draw(12)
    c = Dithered(2)
    mean = np.mean([through(c, v, KEY.at(round=i)) for i in range(1500)], axis=0)
    step = np.abs(v).max() / 2.0
    assert np.abs(mean - v).max() < 5.0 * step / 2.0 / math.sqrt(1500)


def test_zero_has_a_plus_on_both_ends() -> None:
    v = np.array([0.0, -0.0, -1.0, 1.0])
    assert through(SignHalf(2.0), v).tolist() == [1.0, 1.0, -1.0, 1.0]
    assert through(NormSign(), v).tolist() == [0.5, 0.5, -0.5, 0.5]
    assert through(ScaledSign(), v).tolist() == [0.5, 0.5, -0.5, 0.5]
    assert SignHalf(2.0).encode(v, KEY) == b"\x04"


def test_one_bit_halves_the_box() -> None:
    v = np.linspace(-1.0, 1.0, 41)
    assert np.abs(v - through(SignHalf(1.0), v)).max() <= 0.5
    assert np.abs(v - through(NormSign(), v)).max() <= 0.5


def test_random_supports_are_redrawn_and_uniform() -> None:
    c = RandomK(k=5)
    counts = np.zeros(20)
    for i in range(400):
        counts += through(c, np.ones(20), KEY.at(round=i))
    assert counts.sum() == 2000
    assert np.abs(counts - 100.0).max() < 5.0 * math.sqrt(400 * 0.25 * 0.75)


def test_codecs_decode_to_what_their_own_frames_decode_to() -> None:
    v, layout = draw(64, "float32"), Layout.flat(64)
    config = {"id": "topk", "density": 0.1}
    codec = codecs.get_codec(config)
    frame, _ = codec.encode(Update(v, layout), {}, KEY)
    c = FromCodec(config)
    assert c.encode(v, KEY) == frame
    assert through(c, v).tobytes() == (codec.decode(frame, layout) + np.float32(0.0)).tobytes()
    assert c.contraction(64) == codec.contraction(layout)


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
    assert codecs.get_codec(config).codec_id == config["id"]  # a good codec, but not here
    with pytest.raises(ConfigError, match="cannot compress innovations"):
        FromCodec(config)


@pytest.mark.parametrize("c", ALL, ids=repr)
def test_configurations_recreate_the_compressor(c: Compressor) -> None:
    again = get_compressor(c.to_config())
    assert again == c
    assert hash(again) == hash(c)
    assert get_compressor(c) is c


@pytest.mark.parametrize(
    "config",
    [
        {"id": "topk"},
        {"id": "topk", "fraction": 0.1, "k": 3},
        {"id": "topk", "fraction": 0.0},
        {"id": "topk", "fraction": 1.5},
        {"id": "topk", "k": -1},
        {"id": "topk", "k": 2.5},
        {"id": "topk", "k": 2, "values": "int8"},
        {"id": "topk", "k": 2, "index": "raw"},
        {"id": "topk", "density": 0.1},
        {"id": "randomk", "k": 2, "index": "packed"},
        {"id": "randomk", "k": 2, "seed": -1},
        {"id": "dithered", "bits": 0},
        {"id": "sign-half", "scale": 0.0},
        {"id": "sign-half", "scale": float("nan")},
        {"id": "codec", "codec": {"id": "nothing"}},
        {"id": "top-k", "k": 2},
        {},
        "topk",
    ],
)
def test_impossible_configurations_are_refused(config: Any) -> None:
    with pytest.raises(ConfigError):
        get_compressor(config)


def test_a_parameter_that_is_not_known_is_named_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match="'topk' has no parameter 'fracton'; did you mean 'fraction'"):
        get_compressor({"id": "topk", "fracton": 0.1})
    with pytest.raises(ConfigError, match="'choco' has no parameter 'gama'; did you mean 'gamma'"):
        get_algorithm({"name": "choco", "gama": 0.1})


def test_what_travels_whole_stands_behind_the_compressed_part() -> None:
    v = draw(30)
    for c in ALL:
        data = encode_parts(c, v, 20, KEY)
        assert data == c.encode(v[:20], KEY) + v[20:].tobytes()
        assert len(data) <= most_parts(c, 30, 20, v.dtype)
        out = decode_parts(c, memoryview(data), 30, 20, v.dtype, KEY)
        assert out.dense()[:20].tobytes() == through(c, v[:20]).tobytes()
        assert out.dense()[20:].tobytes() == v[20:].tobytes()
        added, scaled = np.ones(30), np.ones(30)
        out.add_to(added)
        out.add_to(scaled, 0.5)
        assert np.array_equal(added, 1.0 + out.dense())
        assert np.array_equal(scaled, 1.0 + 0.5 * out.dense())
        with pytest.raises(LetterError):
            decode_parts(c, memoryview(data[:79]), 30, 20, v.dtype, KEY)


VECTOR = [0.25, -3.0, 0.0, 1.0, -0.5, 0.125, 2.0, -0.0, 0.75, -1.5]
TWO = [0.0, -3.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]
THREE = [0.0, -3.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, -1.5]
SIGNS = np.array([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0, -1.0])

GOLDEN = [
    (Identity(), "0000803e000040c0000000000000803f000000bf0000003e00000040000000800000403f0000c0bf", VECTOR),
    (TopK(k=2, index="packed"), "61000040c000000040", TWO),
    (TopK(k=3, index="packed"), "4202000040c0000000400000c0bf", THREE),
    (TopK(k=3, index="bitmap"), "4202000040c0000000400000c0bf", THREE),
    (TopK(k=3, index="rice"), "02034202000040c0000000400000c0bf", THREE),
    (TopK(k=3, index="auto"), "014202000040c0000000400000c0bf", THREE),
    (TopK(k=2, index="auto"), "0061000040c000000040", TWO),
    (TopK(k=3, index="packed", values="float16"), "420200c2004000be", THREE),
    (RandomK(k=3), "000000000000803f00000040", [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]),
    (ScaledSign(), "9a99693f1202", np.float32(0.9125) * SIGNS),
    (NormSign(), "0000c03f1202", 1.5 * SIGNS),
    (SignHalf(1.0), "1202", 0.5 * SIGNS),
    (Dithered(2), "0000404031520429", [1.5, -3.0, 0.0, 1.5, -1.5, 0.0, 1.5, 0.0, 1.5, -1.5]),
]


@pytest.mark.parametrize(("c", "data", "decoded"), GOLDEN, ids=lambda part: repr(part)[:60])
def test_sections_are_these_bytes_for_ever(c: Compressor, data: str, decoded: list[float]) -> None:
    assert c.encode(np.array(VECTOR, np.float32), KEY).hex() == data
    q = c.decode(memoryview(bytes.fromhex(data)), 10, np.float32, KEY)
    assert np.array_equal(q.dense(), np.array(decoded, np.float32))


@pytest.mark.parametrize(
    ("c", "n", "data", "says"),
    [
        (TopK(0.5, index="packed"), 8, bytes(3), "no number of indices"),
        (TopK(k=1, index="packed"), 16, bytes(9), "at most 1"),
        (TopK(k=2, index="packed"), 16, b"\x11" + bytes(8), "ascending"),
        (TopK(k=2, index="packed"), 16, b"\x12" + bytes(8), "ascending"),
        (TopK(k=1, index="packed"), 9, b"\x09" + bytes(4), "ascending"),
        (TopK(k=1, index="packed"), 16, b"\x1f" + bytes(4), "padding"),
        (TopK(k=1, index="packed"), 16, b"\x0f" + np.array([np.nan], "<f4").tobytes(), "NaN"),
        (TopK(k=1, index="bitmap"), 12, b"\x01\x10" + bytes(4), "padding"),
        (TopK(k=1, index="bitmap"), 12, b"\x03\x00" + bytes(4), "2 bits set"),
        (TopK(k=1, index="bitmap"), 12, b"\x03", "cannot have 1"),
        (TopK(k=1, index="bitmap"), 12, b"", "cannot have 0"),
        (TopK(k=1, index="auto"), 16, b"\x03" + bytes(5), "names no layout"),
        (TopK(k=1, index="auto"), 16, b"\x04" + bytes(5), "names no layout"),
        (TopK(k=1, index="auto"), 16, b"\x00", "holds nothing"),
        (TopK(k=1, index="rice"), 16, b"\x00" + bytes(5), "names no layout"),
        (TopK(k=9, index="rice"), 16, b"\x02\x0a" + bytes(40), "at most 9"),
        (TopK(k=9, index="rice"), 16, b"\x02\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "at most 9"),
        (TopK(k=9, index="rice"), 16, b"\x02\x00", "0 Rice-coded"),
        (TopK(k=9, index="rice"), 16, b"\xfe\x01\x01" + bytes(4), "rice needs one parameter"),
        (TopK(k=9, index="rice"), 16, b"\x02\x01\x00\x00\x01" + bytes(4), "beyond|found 3|bytes"),
        (RandomK(k=3), 16, bytes(13), "12 bytes"),
        (RandomK(k=1), 16, np.array([np.inf], "<f4").tobytes(), "infinite"),
        (ScaledSign(), 9, b"", "4 bytes"),
        (ScaledSign(), 9, bytes(5), "need 2 bytes"),
        (ScaledSign(), 9, bytes(5) + b"\x02", "padding"),
        (NormSign(), 8, np.array([-1.0], "<f4").tobytes() + b"\x00", ">= 0"),
        (NormSign(), 8, np.array([np.nan], "<f4").tobytes() + b"\x00", "NaN"),
        (SignHalf(1.0), 9, b"\x00", "need 2 bytes"),
        (Dithered(2), 2, bytes(6), "5 bytes"),
        (Dithered(2), 2, np.array([1.0], "<f4").tobytes() + b"\x03", "levels up to 3"),
        (Dithered(2), 2, np.array([1.0], "<f4").tobytes() + b"\x04", "levels up to 0"),
        (Dithered(2), 2, np.array([0.0], "<f4").tobytes() + b"\x01", "norm of 0.0"),
        (Dithered(2), 2, np.array([-1.0], "<f4").tobytes() + b"\x01", "norm of -1.0"),
        (Identity(), 2, bytes(15), "16 bytes"),
        (FromCodec({"id": "qsgd"}), 9, b"FCW1", "no frame"),
        (Identity(), 0, b"x", "0 values"),
        (ScaledSign(), 0, b"x", "0 values"),
        (Dithered(2), 0, b"x", "0 levels"),
        (FromCodec({"id": "qsgd"}), 0, b"x", "0 values"),
    ],
)
def test_sections_nobody_writes_are_refused(c: Compressor, n: int, data: bytes, says: str) -> None:
    with pytest.raises(LetterError, match=says):
        c.decode(memoryview(data), n, np.float64, KEY)
