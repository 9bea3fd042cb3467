"""Value codecs: round trips, layouts by hand, quantisers against their definitions, refused parameters."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedcomp import wire
from fedcomp.errors import ConfigError
from fedcomp.measuring import traced
from fedcomp.wire.bits import put_varint
from fedcomp.wire.rans import pack_rans

vectors = hnp.arrays(np.float32, st.integers(0, 90), elements=st.floats(-1e6, 1e6, width=32))


def through(values: wire.Values, dtype: str = "float32", backend: str = "none") -> wire.Values:
    """Send the values through a frame."""
    frame = wire.encode([wire.Tensor(values, (values.k,), dtype=dtype, backend=backend)])
    return wire.decode(frame, (wire.Expected("x", (values.k,), dtype),), wire.Limits(non_finite="allow"))[0].values


def uniforms(k: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(k)


@pytest.mark.slow
@given(vectors, st.integers(1, 16), st.integers(0, 40), st.sampled_from(["none", "zlib", "auto"]), st.integers(0, 99))
def test_round_trip(x: np.ndarray, bits: int, block: int, backend: str, seed: int) -> None:
    u = uniforms(x.size, seed)
    for values in (
        wire.Raw(x),
        wire.Fp16(x),
        wire.Bf16(x),
        wire.Uniform.quantise(x, bits, block),
        wire.Uniform.quantise(x, bits, block, u),
        wire.SignScale.quantise(x, block),
        wire.Ternary.quantise(x),
        wire.Ternary(np.where(u > 0.8, np.sign(x), 0), 3.0),
        wire.QsgdLevels.quantise(x, bits, block, u),
        wire.QsgdLevels.quantise(x, 1 << bits, block, u),
        wire.RangeFloat.quantise(x, max(2, bits)),
        wire.RangeFloat.quantise(x, max(2, bits), min(bits, 15), u),
        wire.Codebook.quantise(x),
        wire.Codebook((u * 32).astype(int), np.sort(np.random.default_rng(seed).random(16)).astype(np.float32), 5),
        wire.Natural.quantise(x),
        wire.Natural.quantise(x, u),
        wire.Ones(x.size),
        wire.UnitSign(np.signbit(x)),
        wire.Residues((u * 1000).astype(int), 1000, 0.25),
        wire.Residues((u * 2**32).astype(np.int64), 2**32, 1e-3),
        wire.Residues((u * 2).astype(int), 2, 1.0),
        wire.Planes(x),
        wire.Planes(np.repeat(x, 20)),
    ):
        got = through(values, backend=backend)
        assert type(got) is type(values)
        assert got.decode().tobytes() == values.decode().tobytes()
        assert got.decode().dtype == np.float32
        assert got.pack() == values.pack()


@pytest.mark.parametrize("dtype", list(wire.DTYPES.values()))
@pytest.mark.parametrize("backend", ["none", "zlib", "auto"])
def test_raw_carries_every_dtype_exactly(dtype: str, backend: str) -> None:
    raw = np.random.default_rng(1).integers(0, 256, 40 * np.dtype(dtype).itemsize, dtype=np.uint8)
    array = raw.astype(bool) if dtype == "bool" else raw.view(dtype)
    got = through(wire.Raw(array), dtype, backend).decode()
    assert got.dtype == np.dtype(dtype)
    assert got.tobytes() == array.tobytes()


def test_special_values_survive_raw() -> None:
    bits = np.array([0x7FC00001, 0xFFC00000, 0x7F800000, 0x80000000, 0x00000001], np.uint32)
    got = through(wire.Raw(bits.view(np.float32))).decode()
    assert got.view(np.uint32).tolist() == bits.tolist()


def test_fp16_rounds_and_saturates_but_keeps_infinity() -> None:
    got = through(wire.Fp16(np.array([1.0 + 2**-12, 1e6, -7e4, np.inf, np.nan, -0.0], np.float32))).decode()
    assert got[:4].tolist() == [1.0, 65504.0, -65504.0, np.inf]
    assert np.isnan(got[4])
    assert np.signbit(got[5])


def test_bf16_rounds_to_nearest_even() -> None:
    words = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0x7F800001], np.uint32)
    got = wire.Bf16(words.view(np.float32)).words
    # Ties go to the even neighbour; the largest float does not become infinity; a signalling NaN stays a NaN.
    assert [hex(v) for v in got.tolist()] == ["0x3f80", "0x3f82", "0x3f81", "0x7f7f", "0x7f80", "0x7fc0"]


@pytest.mark.slow
@given(vectors)
def test_bf16_is_as_near_as_eight_bits_allow(x: np.ndarray) -> None:
    got = wire.Bf16(x).decode()
    assert bool(np.all(np.abs(got - x) <= np.abs(x) * 2.0**-8 + 1e-37))


@pytest.mark.slow
@given(vectors, st.integers(2, 16), st.integers(0, 20))
def test_uniform_is_within_a_step_and_keeps_zero(x: np.ndarray, bits: int, block: int) -> None:
    values = wire.Uniform.quantise(x, bits, block)
    step = np.repeat(values.scales, block)[: x.size] if block else values.scales
    # Half a step for the code, half an ulp for the float32 it decodes to.
    assert bool(np.all(np.abs(values.decode() - x) <= 0.5001 * step + np.abs(x) * 2.0**-23 + 1e-37))
    assert bool(np.all(values.decode()[x == 0] == 0))


def test_uniform_of_one_bit_holds_the_larger_side() -> None:
    assert wire.Uniform.quantise(np.float32([3.0, 0.0, 1.0, -1.0]), 1).decode().tolist() == [3.0, 0.0, 0.0, 0.0]
    assert wire.Uniform.quantise(np.float32([-3.0, 0.0, -2.0, 1.0]), 1).decode().tolist() == [-3.0, 0.0, -3.0, 0.0]


def test_stochastic_rounding_is_unbiased() -> None:
    x = np.tile(np.float32([0.3, -1.0, 0.77, 0.0, 1.0]), 4000)
    for values in (
        wire.Uniform.quantise(x, 3, 0, uniforms(x.size, 0)),
        wire.QsgdLevels.quantise(x, 200, 0, uniforms(x.size, 1)),
        wire.Natural.quantise(x, uniforms(x.size, 2)),
    ):
        mean = values.decode().reshape(-1, 5).mean(axis=0)
        spread = values.decode().reshape(-1, 5).std(axis=0)
        assert np.all(np.abs(mean - x[:5]) <= 5 * spread / np.sqrt(4000) + 1e-6), type(values).__name__


def test_natural_rounds_to_powers_of_two() -> None:
    got = wire.Natural.quantise(np.float32([1.4, 1.5, -3.1, 0.0, 1e-40, 0.25])).decode()
    assert got.tolist() == [1.0, 2.0, -4.0, 0.0, 0.0, 0.25]
    assert len(wire.Natural.quantise(np.ones(80, np.float32)).pack()[1]) == 90


def test_sign_scale_is_the_mean_magnitude() -> None:
    values = wire.SignScale.quantise(np.float32([1, -2, 3, -6, 0]), 2)
    assert values.scales.tolist() == [1.5, 4.5, 0.0]
    assert values.decode().tolist() == [1.5, -1.5, 4.5, -4.5, 0.0]
    assert values.pack() == (b"\x02", np.float32([1.5, 4.5, 0.0]).tobytes() + b"\x0a")


def test_ones_are_a_set_of_indices() -> None:
    block = np.array([2, 3, 5, 11])
    for dtype in ("float16", "float32", "float64"):
        frame = wire.encode([wire.sparse((20,), block, wire.Ones(4), dtype=dtype)])
        got = wire.decode(frame, (wire.Expected("", (20,), dtype),))[0]
        assert got.dense().dtype == np.dtype(dtype)
        assert np.flatnonzero(got.dense()).tolist() == block.tolist()
        assert got.values.pack() == (b"", b"")
        assert got.values.size_bits() == 0
        assert got.values.decode().tolist() == [1.0] * 4
        assert got.values.zero_non_finite() is got.values
    # An index block is as long as its indices, and a section of any byte is refused.
    assert len(frame) == len(wire.encode([wire.sparse((20,), block, wire.Raw(np.ones(4)))])) - 4 * 8
    assert wire.Ones.bounds(b"", 10**9, "float32") == (0, 0)


def test_unit_signs_are_one_bit_and_no_scale() -> None:
    values = wire.UnitSign(np.array([True, False, False, True, True, False, False, False, True]))
    assert values.pack() == (b"", b"\x19\x01")
    assert values.decode().tolist() == [-1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 1.0, -1.0]
    assert through(values).decode().tolist() == values.decode().tolist()
    assert wire.UnitSign.bounds(b"", 9, "float32") == (2, 2)
    # Whatever bits a frame holds, no value is anything but -1 or +1.
    for section in (b"\x00\x00", b"\xff\x01", b"\xa5\x01"):
        assert set(wire.UnitSign.unpack(b"", section, 9, "float32").decode().tolist()) <= {-1.0, 1.0}


def test_ternary_layouts() -> None:
    dense = wire.Ternary(np.array([1, -1, 0, 0, 1, -1]), 2.0)
    # 1 + 2*3 + 0*9 + 0*27 + 1*81 = 88, then a lone -1 as 2.
    assert dense.pack() == (b"\x00", struct.pack("<f", 2.0) + bytes((88, 2)))
    k = 10_000
    trits = np.where(np.arange(k) % 100 == 7, 1 - 2 * (np.arange(k) % 200 == 7), 0)
    params, section = wire.Ternary(trits, 1.0).pack()
    assert params[0] == 1
    # A hundred positions at about log2(100) + 1.5 bits and a sign each, instead of 2000 bytes.
    assert len(section) < 130
    assert through(wire.Ternary(trits, 1.0)).decode().tolist() == trits.tolist()


def test_qsgd_takes_the_shorter_packing() -> None:
    many, few = np.arange(-50, 51), np.zeros(101, np.int64)
    assert wire.QsgdLevels(many, 50, 0, np.ones(1)).pack()[0][0] == 0
    params, section = wire.QsgdLevels(few, 50, 0, np.ones(1)).pack()
    assert params == b"\x01" + bytes((50, 0))
    assert len(section) == 4 + 13


@pytest.mark.slow
@given(vectors, st.integers(1, 1000), st.integers(0, 20))
def test_qsgd_levels_lie_beside_the_value(x: np.ndarray, s: int, bucket: int) -> None:
    values = wire.QsgdLevels.quantise(x, s, bucket, uniforms(x.size, 7))
    norm = np.repeat(values.norms, bucket)[: x.size] if bucket else values.norms
    assert bool(np.all(np.abs(values.decode() - x) <= norm / s * 1.001 + 1e-30))


BAD = [
    ("uniform scale", wire.Uniform(np.zeros(3), 2, 0, np.float32([1]), [0]), 0),
    ("sign scale", wire.SignScale(np.zeros(3, bool), np.float32([1])), 0),
    ("ternary scale", wire.Ternary(np.zeros(3), 1.0), 0),
    ("codebook magnitude", wire.Codebook(np.zeros(3, int), np.float32([1]), 1), 0),
    ("qsgd norm", wire.QsgdLevels(np.zeros(3), 4, 0, np.float32([1])), 0),
]


@pytest.mark.parametrize(("name", "values", "at"), BAD, ids=[b[0] for b in BAD])
@pytest.mark.parametrize("policy", ["reject", "zero", "allow"])
def test_parameters_must_be_finite_whatever_the_policy(name: str, values: wire.Values, at: int, policy: str) -> None:
    params, section = values.pack()
    for bad, error in ((np.nan, wire.NonFinite), (np.inf, wire.NonFinite), (-1.0, wire.Corrupt)):
        damaged = struct.pack("<f", bad) + bytes(section)[4:]
        with pytest.raises(error):
            type(values).unpack(params, damaged, 3, "float32")


def test_a_scale_that_overflows_is_not_finite() -> None:
    values = wire.Uniform(np.zeros(3), 8, 0, np.float32([3e37]), [0])
    with pytest.raises(wire.NonFinite, match="overflow"):
        through(values)


def test_impossible_contents_are_corrupt() -> None:
    cases = [
        (wire.Raw, b"\x02", "float32", "parameters"),
        (wire.Uniform, b"\x11\x00\x00", "float32", "bits"),
        (wire.Uniform, b"\x02\x00\x80", "float32", "cut short"),
        (wire.SignScale, b"", "float32", "cut short"),
        (wire.Ternary, b"\x02", "float32", "parameters"),
        (wire.QsgdLevels, b"\x00\x00\x00", "float32", "parameters"),
        (wire.RangeFloat, b"\x08\x04\x01", "float32", "needs bits"),
        (wire.RangeFloat, b"\x01\x04\x01\x01", "float32", "needs bits"),
        (wire.RangeFloat, b"\x11\x04\x01\x01", "float32", "needs bits"),
        (wire.RangeFloat, b"\x08\x10\x01\x01", "float32", "needs bits"),
        (wire.RangeFloat, b"\x08\x04\x00\x01", "float32", "impossible"),
        (wire.RangeFloat, b"\x08\x04\x01\x80\x02", "float32", "impossible"),
        (wire.RangeFloat, b"\x08\x00\xfe\x01\x02", "float32", "impossible"),
        (wire.RangeFloat, b"\x08\x04\x01\x80", "float32", "cut short"),
        (wire.RangeFloat, b"\x08\x04\x01\x01\x02", "float32", "parameters"),
        (wire.Codebook, b"", "float32", "bits"),
        (wire.Codebook, b"\x00", "float32", "bits"),
        (wire.Codebook, b"\x09", "float32", "bits"),
        (wire.Natural, b"\x02", "float32", "parameters"),
        (wire.Ones, b"\x00", "float32", "no parameters"),
        (wire.UnitSign, b"\x00", "float32", "no parameters"),
        (wire.Residues, b"\x01", "float32", "impossible"),
        (wire.Residues, b"\x07\x00", "float32", "impossible"),
        (wire.Residues, b"\x81\x80\x80\x80\x10", "float32", "impossible"),
        (wire.Residues, b"\x80", "float32", "cut short"),
        (wire.Planes, b"", "float32", "some of 4"),
        (wire.Planes, b"\x10", "float32", "some of 4"),
        (wire.Planes, b"\x00\x00", "float32", "some of 4"),
        (wire.Planes, b"\x08", "float32", "never deflated"),
    ]
    for codec, params, dtype, words in cases:
        with pytest.raises(wire.Corrupt, match=words):
            codec.bounds(params, 3, dtype)
    with pytest.raises(wire.Corrupt, match="neither 0 nor 1"):
        wire.Raw.unpack(b"", b"\x00\x02\x01", 3, "bool")
    with pytest.raises(wire.Corrupt, match="above 242"):
        wire.Ternary.unpack(b"\x00", b"\0\0\0\0\xf3", 3, "float32")
    with pytest.raises(wire.Corrupt, match="padding trits"):
        wire.Ternary.unpack(b"\x00", b"\0\0\0\0\x51", 3, "float32")
    with pytest.raises(wire.Corrupt, match="a residue modulo 7 is 7"):
        wire.Residues.unpack(b"\x07", b"\0\0\0\0\x07", 1, "float32")
    with pytest.raises(wire.NonFinite, match="overflow"):
        wire.Residues.unpack(b"\x7f", np.float32([1e38]).tobytes() + b"\0", 1, "float32")
    with pytest.raises(wire.Corrupt, match="padding bits"):
        wire.UnitSign.unpack(b"", b"\x08", 3, "float32")
    coded = [
        (wire.Natural, b"\x01", b""),
        (wire.Codebook, b"\x02\x01", np.zeros(2, np.float32).tobytes()),
        (wire.RangeFloat, b"\x08\x04\x01\x01\x01", b""),
        (wire.QsgdLevels, b"\x02\x02\x00", np.zeros(1, np.float32).tobytes()),
    ]
    for codec, params, head in coded:
        with pytest.raises(wire.Corrupt):
            codec.bounds(params, 0, "float32")
        # A stream of numbers that are none of the codec's.
        stream = pack_rans(np.full(9000, 600, np.uint16), 10**6)
        assert stream is not None
        with pytest.raises(wire.Corrupt, match=r"more than|outside|too many"):
            codec.unpack(params, head + stream, 9000, "float32")
    for codec, params, words in (
        (wire.Natural, b"\x02", "parameters"),
        (wire.Codebook, b"\x02\x02", "parameters"),
        (wire.Codebook, b"\x02\x01\x01", "parameters"),
        (wire.QsgdLevels, b"\x03\x01\x00", "packing"),
        (wire.QsgdLevels, b"\x02\x80\x10\x00", "entropy-coded"),
    ):
        with pytest.raises(wire.Corrupt, match=words):
            codec.bounds(params, 9000, "float32")
    # Bits that no number has: the second magnitude from the largest finite one on.
    with pytest.raises(wire.Corrupt, match="no finite number"):
        wire.RangeFloat.unpack(b"\x02\x00\xfe\x01\x01", b"\x0c", 2, "float32")
    with pytest.raises(wire.Corrupt, match="ascending"):
        wire.Codebook.unpack(b"\x02", np.float32([2, 1]).tobytes() + b"\0", 3, "float32")
    with pytest.raises(wire.Corrupt, match="outside"):
        wire.QsgdLevels.unpack(b"\x00\x01\x00", b"\0\0\0\0\x0f", 2, "float32")


def awkward(dtype: str) -> list[np.ndarray]:
    """Return arrays of one dtype that are hard to keep: every kind of bits, ties, constants, few values."""
    rng, size = np.random.default_rng(4), np.dtype(dtype).itemsize
    noise = rng.integers(0, 256, 20_000 * size, np.uint8).view(dtype)
    words = noise.view(f"u{size}")
    normal = (rng.standard_normal(20_000) * 40).astype(dtype)
    hot = np.zeros(20_000, dtype)
    hot[777] = 1
    found = [noise, normal, np.sort(words).view(dtype), (words & 1).view(dtype), np.zeros(20_000, dtype), hot]
    found += [np.full(20_000, words[3]).view(dtype), np.ones(20_000, dtype), normal[:10], normal[:1], normal[:0]]
    if dtype.startswith("float"):
        found += [np.resize(np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0], dtype), 20_000)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sorted(set(wire.DTYPES.values()) - {"bool"}))
def test_planes_keep_every_bit_and_enlarge_nothing(dtype: str) -> None:
    for array in awkward(dtype):
        values = wire.Planes(array)
        got = through(values, dtype)
        assert got.decode().tobytes() == array.tobytes()
        assert got.decode().dtype == array.dtype
        assert got.pack() == values.pack()
        params, section = values.pack()
        assert len(params) == 1
        assert len(section) <= array.nbytes
        least, most = wire.Planes.bounds(params, array.size, dtype)
        assert least <= len(section) <= most
        assert type(values.plain()) is wire.Raw


@pytest.mark.parametrize("words", ["<u2", "<u4", "<u8"])
def test_the_exponent_of_a_float_is_a_plane_of_its_own(words: str) -> None:
    """By hand: of each word the lowest bytes, then the eighth of them with the sign above, then eight exponent bits."""
    bits = 8 * np.dtype(words).itemsize
    word = (1 << bits - 1) | (0x96 << bits - 9) | 0x25
    expected = (0x96 << bits - 8) | (1 << bits - 9) | 0x25
    section = wire.Planes(np.array([word], words)).pack()
    assert section == (b"\x00", expected.to_bytes(bits // 8, "little"))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "least"), [("float32", 1.2), ("bfloat16", 1.5), ("bfloat16 in float32", 3.0)])
def test_planes_take_what_their_entropy_is(dtype: str, least: float) -> None:
    """Within 3 % of the order-0 entropy of the exponents, and all mantissas raw."""
    x = (np.random.default_rng(5).standard_normal(300_000) * 0.02).astype(np.float32)
    half = (x.view(np.uint32) >> 16).astype(np.uint16)
    values = {"float32": x, "bfloat16": half, "bfloat16 in float32": (half.astype(np.uint32) << 16).view(np.float32)}[
        dtype
    ]
    exponents = (x.view(np.uint32) >> 23) & 0xFF
    size = len(wire.Planes(values).pack()[1])
    mantissas = 3 * x.size if dtype == "float32" else x.size
    assert mantissas + 0.99 * entropy(exponents) <= size <= mantissas + 1.03 * entropy(exponents)
    assert values.nbytes / size > least


def test_forged_planes_are_refused_before_they_are_unpacked() -> None:
    k = 1000
    stream = zlib.compress(bytes(k))
    bomb = zlib.compress(bytes(50_000_000))

    def coded(data: bytes, length: int | None = None) -> bytes:
        return put_varint(len(data) if length is None else length) + data

    honest = coded(stream) + bytes(k)
    assert wire.Planes.unpack(b"\x01", honest, k, "uint16").decode().tolist() == [0] * k

    def refused() -> None:
        with pytest.raises(wire.Corrupt):
            wire.Planes.unpack(b"\x01", coded(bomb) + bytes(k), k, "uint16")

    # Of 50 MB: zlib keeps what it has not read, which is in the section already.
    assert traced(refused).peak < 1_000_000
    forged = [
        (wire.Truncated, honest[:-1]),
        (wire.Corrupt, honest + b"\0"),
        (wire.Truncated, coded(stream, 10**9) + bytes(k)),
        (wire.WireError, b"\x80" * 12 + honest),
        (wire.Corrupt, coded(zlib.compress(bytes(k - 1))) + bytes(k)),
        (wire.Corrupt, coded(zlib.compress(bytes(k + 1))) + bytes(k)),
        (wire.Corrupt, coded(stream + b"\0") + bytes(k)),
        (wire.Corrupt, coded(stream[:-1]) + bytes(k)),
        (wire.Corrupt, coded(bytes(20)) + bytes(k)),
        (wire.Truncated, b""),
    ]
    for error, section in forged:
        with pytest.raises(error):
            wire.Planes.unpack(b"\x01", section, k, "uint16")


def entropy(numbers: np.ndarray) -> float:
    """Bytes of numbers that are independent, with the frequencies that they have."""
    shares = np.unique(numbers, return_counts=True)[1] / numbers.size
    return float(-(shares @ np.log2(shares))) * numbers.size / 8


@pytest.mark.parametrize("kind", ["normal", "t(4)"])
def test_many_quantised_values_take_what_their_entropy_is(kind: str) -> None:
    """Within 5 % for every quantised form of a million values, and never more than the plain form."""
    rng = np.random.default_rng(8)
    n = 300_000
    x = (rng.normal(size=n) if kind == "normal" else rng.standard_t(4, n)).astype(np.float32)
    u = uniforms(n, 9)
    forms: list[tuple[wire.Values, np.ndarray, int]] = []
    for s in (1, 7, 127):
        levels = wire.QsgdLevels.quantise(x, s, 512, u)
        forms.append((levels, levels.levels, 4 * levels.norms.size))
    natural = wire.Natural.quantise(x, u)
    two = wire.Codebook.quantise(x)
    nearest = wire.QsgdLevels.nearest(x, 7, 256)
    forms += [(natural, natural.codes, 0), (two, two.codes, 8), (nearest, nearest.levels, 4 * nearest.norms.size)]
    for values, symbols, head in forms:
        params, section = values.pack()
        assert 0.999 * entropy(symbols) <= len(section) - head <= 1.05 * entropy(symbols), values.name
        plain = values.plain()
        assert len(plain.pack()[0] + bytes(plain.pack()[1])) > len(params + bytes(section))
        assert plain.decode().tobytes() == values.decode().tobytes()
        got = through(values)
        assert got.decode().tobytes() == values.decode().tobytes()
        assert got.pack() == (params, section)
        low, high = type(values).bounds(params, n, "float32")
        assert low <= len(section) <= high


def test_few_values_are_written_as_before() -> None:
    x = np.random.default_rng(1).normal(size=4095).astype(np.float32)
    for values in (
        wire.Natural.quantise(x),
        wire.Codebook.quantise(x),
        wire.QsgdLevels.quantise(x, 7, 64, uniforms(4095, 1)),
    ):
        assert values.pack()[0] in (b"", b"\x02", b"\x00\x07\x40", b"\x01\x07\x40")


@given(st.lists(st.floats(0, 2.0**100, width=32), max_size=9))
def test_two_magnitudes_leave_the_smallest_error(magnitudes: list[float]) -> None:
    """Against every way to put the values into two groups, not only those that cut the sorted ones in two."""
    x = np.array(magnitudes, np.float64)

    def error(group: np.ndarray) -> float:
        return float(np.square(x[group] - x[group].mean()).sum()) if group.any() else 0.0

    picks = (np.arange(1 << x.size)[:, None] >> np.arange(x.size)) & 1 == 1
    best = min(error(group) + error(~group) for group in picks)
    signs = np.where(np.arange(x.size) % 3 == 1, -1.0, 1.0)
    values = wire.Codebook.quantise(signs * x)
    decoded = values.decode().astype(np.float64)
    assert np.square(decoded - signs * x).sum() <= best + 1e-6 * np.square(x).sum()
    # Means of what they stand for: never longer than it, and with its signs.
    assert np.square(decoded).sum() <= (1 + 1e-6) * np.square(x).sum()
    assert bool(np.all((decoded * signs >= 0) | (x == 0)))


def test_non_finite_values_are_counted_and_zeroed() -> None:
    x = np.float32([1, np.nan, np.inf, -np.inf, 2])
    for values in (
        wire.Raw(x),
        wire.Planes(x),
        wire.Fp16(x),
        wire.Bf16(x),
        wire.Natural(np.array([127, 255, 511, 255, 128])),
    ):
        assert values.count_non_finite() == 3
        assert values.zero_non_finite().decode().tolist() == [1, 0, 0, 0, 2]


def test_constructors_check_their_arguments() -> None:
    for build in (
        lambda: wire.Uniform(np.array([4]), 2, 0, np.ones(1), [0]),
        lambda: wire.Uniform(np.array([1]), 17, 0, np.ones(1), [0]),
        lambda: wire.Uniform(np.array([1, 2]), 4, 1, np.ones(1), [0]),
        lambda: wire.SignScale(np.zeros(5, bool), np.ones(2), 4 * 5),
        lambda: wire.Ternary(np.array([2]), 1.0),
        lambda: wire.QsgdLevels(np.array([5]), 4, 0, np.ones(1)),
        lambda: wire.QsgdLevels(np.array([1]), 0, 0, np.ones(1)),
        lambda: wire.Codebook(np.array([4]), np.ones(2), 2),
        lambda: wire.Codebook(np.array([-1]), np.ones(2), 2),
        lambda: wire.Codebook(np.array([1]), np.ones(1), 2),
        lambda: wire.Codebook(np.array([1]), np.float32([2, 1]), 2),
        lambda: wire.Codebook(np.array([1]), np.ones(1), 0),
        lambda: wire.Codebook(np.array([1]), np.ones(256), 9),
        lambda: wire.Natural(np.array([512])),
        lambda: wire.Ones(-1),
        lambda: wire.Raw(np.array(["x"])),
        lambda: wire.Raw(np.array([1j])),
    ):
        with pytest.raises(ConfigError):
            build()


@pytest.mark.parametrize("codec", list(wire.VALUE_CODECS.values()), ids=list(wire.VALUE_BY_NAME))
def test_declarations(codec: type[wire.Values]) -> None:
    lossless = (wire.Raw, wire.Planes)
    assert codec.lossy == (codec not in lossless)
    assert codec.commutes_with_sum == (codec is wire.Raw)
    # Levels are values by the shapes of their matrices, which a receiver knows and no frame says.
    assert codec.needs == (("shapes",) if codec is wire.Levels else ())
    assert codec.accepts("float32")
    assert codec.accepts("int32") == (codec in lossless)


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.slow
@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("share", [[1.0], [-1.0], [1.0, 0.5], [1.0, -1e-38], [1.0, -0.5], [-1.0, 0.9], [1.0, -1.0]])
def test_uniform_never_makes_a_frame_its_receiver_refuses(bits: int, share: list[float]) -> None:
    x = (np.array(share) * LARGEST).astype(np.float32).astype(np.float64)
    values = wire.Uniform.quantise(x, bits)
    sent = wire.decode(wire.encode([wire.Tensor(values, x.shape)]))[0].dense()
    if bits > 1:
        assert np.all(np.abs(sent.astype(np.float64) - x) <= 1.001 * float(values.scales[0]))
    if len(share) == 1:
        assert sent[0] == pytest.approx(x[0], rel=2e-7)


def test_uniform_refuses_a_range_whose_unused_codes_overflow() -> None:
    x = (np.array([1.0, -1.49 / 5.51]) * LARGEST).astype(np.float32)
    with pytest.raises(ConfigError, match="too large for uniform codes of 3 bits"):
        wire.Uniform.quantise(x, 3)
    wire.Uniform.quantise(x / 2, 3)
