"""Sections: exact round trips, lengths by formula, bytes for ever, strict reading within what was agreed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.errors import ConfigError
from fedcomp.wire import Section, Values
from fedcomp.wire.section import SECTION_INDEX, plain_bytes

LISTED = [name for name in SECTION_INDEX if name not in ("none", "known")]


def made(name: str, x: NDArray[np.float32]) -> Values:
    """Values of every kind of length: so many bytes each, so many bits each, one scale before them, none at all."""
    values: dict[str, Values] = {
        "float32": wire.Raw(x),
        "float64": wire.Raw(x.astype(np.float64)),
        "fp16": wire.Fp16(x),
        "natural": wire.Natural.quantise(x),
        "sign": wire.SignScale.quantise(x),
        "unit-sign": wire.UnitSign(x < 0),
        "ones": wire.Ones(x.size),
    }
    return values[name]


def agreed(name: str, n: int, index: str, max_k: int | None = None) -> Section:
    value = made(name, np.zeros(0, np.float32))
    dtype = "float64" if name == "float64" else "float32"
    return Section(n, type(value), index, max_k, dtype, b"\x00" if name == "sign" else b"")


def numbers(k: int) -> NDArray[np.float32]:
    return ((np.arange(k) * 37 % 101 - 50) / 8 + 1 / 16).astype(np.float32)


@given(
    st.integers(0, 70).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, max(0, n - 1)), max_size=n))),
    st.sampled_from(LISTED),
    st.sampled_from(["float32", "float64", "fp16", "natural", "sign", "unit-sign", "ones"]),
)
def test_any_support_comes_back_with_its_values(case: tuple[int, set[int]], index: str, name: str) -> None:
    n, chosen = case
    support = np.array(sorted(chosen), np.int64)
    section = agreed(name, n, index)
    values = made(name, numbers(support.size))
    data = section.write(values, support)
    tensor = section.read(data)
    assert tensor.indices is not None
    assert tensor.indices.tolist() == support.tolist()
    assert tensor.values.decode().tobytes() == values.decode().tobytes()
    assert len(data) <= section.most_bytes
    assert tensor.shape == (n,)


@pytest.mark.parametrize("n", [1, 2, 7, 50, 2410, 9000, 20_000])
def test_auto_is_the_shortest_and_one_byte(n: int) -> None:
    draw = np.random.default_rng(n)
    for k in sorted({1, n // 100, n // 20, n // 5, n // 2, n} - {0}):
        for support in (np.sort(draw.choice(n, k, replace=False)), np.arange(k)):
            sizes = {i: len(agreed("float32", n, i).write(wire.Raw(numbers(k)), support)) for i in LISTED}
            assert sizes["fixed"] == math.ceil(min(k * math.ceil(math.log2(n)), n) / 8) + 4 * k
            assert sizes["bitmap"] == math.ceil(n / 8) + 4 * k
            # Rice carries its byte in any case.
            assert sizes["auto"] == min(1 + sizes["fixed"], sizes["rice"])


def test_clustered_indices_are_cheapest_in_rice_code() -> None:
    sizes = {i: len(agreed("ones", 2000, i).write(wire.Ones(1200), np.arange(1200))) for i in LISTED}
    assert sizes["auto"] == sizes["rice"] < sizes["bitmap"] == sizes["fixed"]


@pytest.mark.parametrize("name", ["fp16", "float32", "float64"])
@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 50, 300])
def test_the_length_tells_k(n: int, name: str) -> None:
    size = {"fp16": 2, "float32": 4, "float64": 8}[name]
    lengths = [plain_bytes(n, k) + size * k for k in range(n + 1)]
    assert len(set(lengths)) == n + 1
    section = agreed(name, n, "fixed")
    for k in range(n + 1):
        support = np.arange(n - k, n)
        data = section.write(made(name, numbers(k)), support)
        assert len(data) == lengths[k]
        found = section.read(data).indices
        assert found is not None
        assert found.tolist() == support.tolist()


@pytest.mark.parametrize("params", [b"\x00\x08\x10", None])
def test_a_dense_section_is_its_values_and_what_is_not_known_of_them(params: bytes | None) -> None:
    levels = np.arange(40) % 17 - 8
    values = wire.QsgdLevels(levels, 8, 16, np.ones(3, np.float32), fixed=True)
    data = Section(40, wire.QsgdLevels, params=params).write(values)
    assert len(data) == 12 + 25 + (0 if params else 4)
    assert Section(40, wire.QsgdLevels, params=params).read(data).values.decode().tolist() == (levels / 8).tolist()


def test_levels_of_fixed_width_have_one_length_whatever_they_are() -> None:
    sizes = {
        fixed: {
            len(wire.QsgdLevels(np.full(64, level), 8, 0, np.ones(1, np.float32), fixed).pack()[1]) for level in (0, 8)
        }
        for fixed in (True, False)
    }
    assert len(sizes[True]) == 1
    assert min(sizes[False]) < min(sizes[True])


@pytest.mark.parametrize("name", ["qsgd", "natural", "codebook"])
def test_agreed_parameters_give_one_length_also_where_entropy_coding_is_shorter(name: str) -> None:
    """A private message must not tell by its length what it holds, however many values it has."""
    n = 6000
    most = np.zeros(n, np.float32)
    most[::10] = np.arange(n // 10) - 300
    made = {
        "qsgd": lambda x: wire.QsgdLevels.nearest(x, 7, 0),
        "natural": wire.Natural.quantise,
        "codebook": wire.Codebook.quantise,
    }[name]
    plain = made(most).plain()
    section = wire.Section(n, type(plain), "none", params=plain.pack()[0])
    coded = wire.Section(n, type(plain), "none", params=None)
    values = [made(x) for x in (most, np.zeros(n, np.float32), np.ones(n, np.float32))]
    assert len({len(section.write(v)) for v in values}) == 1
    # The same values do get shorter where nobody agreed on a length.
    assert len(coded.write(values[0])) < 0.6 * len(section.write(values[0]))
    assert section.read(section.write(values[0])).values.decode().tobytes() == values[0].decode().tobytes()
    assert coded.read(coded.write(values[0])).values.decode().tobytes() == values[0].decode().tobytes()


def test_a_known_support_costs_nothing() -> None:
    section = Section(9, wire.Raw, "known", 3)
    known = np.array([2, 5, 8])
    data = section.write(wire.Raw(numbers(3)))
    assert data == numbers(3).tobytes()
    assert section.read(data, known).dense()[known].tolist() == numbers(3).tolist()
    for other in (None, np.array([2, 5, 9]), np.arange(4)):
        with pytest.raises(wire.SchemaMismatch):
            section.read(data, other)


def test_blocks_follow_each_other() -> None:
    body = wire.put_block(b"") + wire.put_block(b"x" * 300) + b"rest"
    first, pos = wire.take_block(memoryview(body), 0)
    second, pos = wire.take_block(memoryview(body), pos)
    assert (bytes(first), bytes(second), body[pos:]) == (b"", b"x" * 300, b"rest")
    for cut in (b"", b"\x80", b"\x05four"):
        with pytest.raises(wire.WireError):
            wire.take_block(memoryview(cut), 0)


SUPPORT = np.array([1, 6, 9])
GOLDEN = [
    ("fixed", "float32", SUPPORT[:2], "610000" + "c6c0" + "0000c8bf"),
    ("fixed", "float32", SUPPORT, "42020000c6c00000c8bf00004440"),
    ("bitmap", "fp16", SUPPORT, "420230c640be2042"),
    ("rice", "float32", SUPPORT, "020342020000c6c00000c8bf00004440"),
    ("auto", "float32", SUPPORT, "0142020000c6c00000c8bf00004440"),
    ("auto", "float32", SUPPORT[:2], "00610000c6c00000c8bf"),
    ("auto", "ones", SUPPORT, "01034202"),
    ("fixed", "sign", SUPPORT, "034202abaa6640" + "03"),
    ("fixed", "unit-sign", SUPPORT[:0], "00"),
    ("auto", "float32", SUPPORT[:0], ""),
    ("bitmap", "float32", SUPPORT[:0], "0000"),
]


@pytest.mark.parametrize(("index", "name", "support", "data"), GOLDEN)
def test_sections_are_these_bytes_for_ever(index: str, name: str, support: NDArray[np.int64], data: str) -> None:
    section, values = agreed(name, 10, index), made(name, numbers(support.size))
    assert section.write(values, support).hex() == data
    tensor = section.read(bytes.fromhex(data))
    assert tensor.indices is not None
    assert tensor.indices.tolist() == support.tolist()
    assert tensor.values.decode().tolist() == values.decode().tolist()


F4 = np.array([np.nan], "<f4").tobytes()


@pytest.mark.parametrize(
    ("section", "data", "says"),
    [
        (agreed("float32", 8, "fixed", 4), bytes(3), "no number of indices"),
        (agreed("float32", 16, "fixed", 1), bytes(9), "at most 1"),
        (agreed("float32", 16, "fixed", 2), b"\x11" + bytes(8), "ascending"),
        (agreed("float32", 16, "fixed", 2), b"\x12" + bytes(8), "ascending"),
        (agreed("float32", 9, "fixed", 1), b"\x09" + bytes(4), "ascending"),
        (agreed("float32", 16, "fixed", 1), b"\x1f" + bytes(4), "padding"),
        (agreed("float32", 16, "fixed", 1), b"\x0f" + F4, "NaN"),
        (agreed("float32", 12, "bitmap", 1), b"\x01\x10" + bytes(4), "padding"),
        (agreed("float32", 12, "bitmap", 1), b"\x03\x00" + bytes(4), "2 bits set"),
        (agreed("float32", 12, "bitmap", 1), b"\x03", "cannot have 1"),
        (agreed("float32", 12, "bitmap", 1), b"", "cannot have 0"),
        (agreed("float32", 16, "auto", 1), b"\x03" + bytes(5), "names no layout"),
        (agreed("float32", 16, "auto", 1), b"\x04" + bytes(5), "names no layout"),
        (agreed("float32", 16, "auto", 1), b"\x00", "holds nothing"),
        (agreed("fp16", 9, "auto"), b"\x00\x07\x00" + bytes(6), "names fields and holds a bitmap"),
        (Section(9, wire.Raw, "fixed", dtype="int8"), b"\x03\x00" + bytes(2), "2 of 9 elements"),
        (agreed("float32", 16, "rice", 1), b"\x00" + bytes(5), "names no layout"),
        (agreed("float32", 16, "rice", 9), b"\x02\x0a" + bytes(40), "at most 9"),
        (agreed("float32", 16, "rice", 9), b"\x02\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "at most 9"),
        (agreed("float32", 16, "rice", 9), b"\x02\x00", "0 Rice-coded"),
        (agreed("float32", 16, "rice", 9), b"\xfe\x01\x01" + bytes(4), "rice needs one parameter"),
        (agreed("float32", 16, "rice", 9), b"\x02\x01\x00\x00\x01" + bytes(4), "beyond|found 3|bytes"),
        (agreed("ones", 16, "fixed", 2), b"\x03\x21\x04", "at most 2"),
        (agreed("ones", 16, "fixed", 2), b"\x02\x21\x00", "found 1"),
        (agreed("ones", 16, "bitmap", 2), b"\x01\x01", "2 bytes in a section"),
        (agreed("sign", 16, "fixed", 4), b"", "expected at byte 0"),
        (agreed("sign", 16, "none"), bytes(5), "found 5"),
        (agreed("sign", 16, "none"), np.array([-1.0], "<f4").tobytes() + bytes(2), "negative"),
        (agreed("float32", 3, "none"), bytes(11), "found 11"),
        (agreed("float32", 3, "none"), bytes(13), "at most 12"),
        (Section(3, wire.QsgdLevels, params=None), b"", "parameters"),
        (Section(3, wire.QsgdLevels, params=None), b"\x03\x00\x08", "parameters"),
        (Section(3, wire.QsgdLevels, params=None), b"\xff\x00\x08", "parameters"),
    ],
)
def test_sections_nobody_writes_are_refused(section: Section, data: bytes, says: str) -> None:
    with pytest.raises(wire.WireError, match=says):
        section.read(data)


def candidates() -> list[bytes]:
    """Every short head of a section, and values that are zero."""
    heads = [bytes((a, *b)) for a in range(256) for b in ((), *((c,) for c in range(4)))]
    heads += [bytes((k, b)) for k in range(3) for b in range(4, 256)]
    return [b"", *(head + bytes(k) for head in heads for k in range(10))]


@pytest.mark.parametrize("index", LISTED)
def test_a_support_has_one_encoding_per_layout_and_parameter(index: str) -> None:
    section = Section(9, wire.Raw, index, dtype="int8")
    named = index in ("rice", "auto")
    found: dict[object, bytes] = {}
    for data in (
        name + rest for name in ((b"\x00", b"\x01", b"\x02", b"\x06") if named else (b"",)) for rest in candidates()
    ):
        try:
            tensor = section.read(data)
        except wire.WireError:
            continue
        assert tensor.indices is not None
        key = (data[:1] if named else b"", *tensor.indices.tolist(), tensor.values.decode().tobytes())
        assert found.setdefault(key, data) == data
        if not named:
            assert section.write(tensor.values, tensor.indices) == data
    # Fields reach up to two of nine elements, a bitmap to all of them.
    assert {len(key) - 2 for key in found if isinstance(key, tuple)} >= set(range(1, 3 if index == "rice" else 10))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Section(4, wire.Raw, "raw"),
        lambda: Section(4, wire.Raw, "fixed", 5),
        lambda: Section(-1, wire.Raw),
        lambda: Section(4, wire.Raw, dtype="float7"),
        lambda: Section(4, wire.Fp16, dtype="int8"),
        lambda: Section(4, wire.Ternary, "fixed", params=None),
        lambda: agreed("float32", 4, "none").write(wire.Raw(numbers(3))),
        lambda: agreed("float32", 4, "none").write(wire.Fp16(numbers(4))),
        lambda: agreed("float32", 4, "fixed", 1).write(wire.Raw(numbers(2)), np.arange(2)),
        lambda: agreed("float32", 4, "fixed").write(wire.Raw(numbers(2)), np.array([2, 1])),
        lambda: agreed("float32", 4, "fixed").write(wire.Raw(numbers(2)), np.arange(3)),
        lambda: agreed("float32", 4, "fixed").write(wire.Raw(numbers(2))),
        lambda: agreed("sign", 4, "none").write(wire.SignScale.quantise(numbers(4), 2)),
    ],
)
def test_what_was_not_agreed_is_not_written(make: object) -> None:
    assert callable(make)
    with pytest.raises(ConfigError):
        make()
