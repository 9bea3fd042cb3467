"""The bins index codec: against a transcription of its definition, bytes by hand, sizes, and what a decoder refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp import wire
from fedcomp.errors import ConfigError
from fedcomp.wire.bins import Bins
from fedcomp.wire.bits import pack, put_varint
from fedcomp.wire.choose import encode_support, require_index
from fedcomp.wire.index import Support
from fedcomp.wire.rice import Rice

Case = tuple[int, int, list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return n, a bin length and a support: any, or exactly one index per bin."""
    n, length = draw(st.integers(0, 300)), draw(st.integers(1, 70))
    if draw(st.booleans()):
        ends = [min(n, start + length) for start in range(0, n, length)]
        return (
            n,
            length,
            [draw(st.integers(start, end - 1)) for start, end in zip(range(0, n, length), ends, strict=True)],
        )
    return n, length, sorted(draw(st.sets(st.integers(0, n - 1))) if n else [])


def transcribed(n: int, length: int, indices: list[int]) -> tuple[bytes, bytes]:
    """The definition in docs/formats/wire.md, one bin at a time; bin lengths and counts below 128."""
    length = max(1, min(length, n))
    width = math.ceil(math.log2(length))
    bins = [[i - start for i in indices if start <= i < start + length] for start in range(0, n, length)]
    if all(len(b) == 1 for b in bins):
        fields, params = [b[0] for b in bins], [0, length]
    else:
        fields, params = [], [1, length, sum(not b for b in bins)]
        for b in bins:
            fields += [offset + (2**width if offset == b[-1] else 0) for offset in b] or [2**width - 1]
        width += 1
    number = sum(field << i * width for i, field in enumerate(fields))
    head = b"".join(bytes((p & 127 | 128, p >> 7)) if p > 127 else bytes((p,)) for p in params)
    return head, number.to_bytes((len(fields) * width + 7) // 8, "little")


@pytest.mark.slow
@given(cases())
def test_matches_the_definition(case: Case) -> None:
    n, length, indices = case
    support = Support(np.array(indices, np.int64), n)
    params, section = Bins(length).encode(support)
    assert (params, section) == transcribed(n, length, indices)
    assert Bins().bounds(params, n, len(indices)) == (len(section), len(section))
    assert 8 * len(section) <= Bins(length).size_bits(n, len(indices))
    got = Bins().decode(params, section, n, len(indices))
    assert got.dtype == np.int64
    assert got.tolist() == indices


@pytest.mark.slow
@given(cases(), st.booleans(), st.sampled_from(["none", "zlib"]))
def test_round_trip_in_a_frame(case: Case, contest: bool, backend: str) -> None:
    n, length, indices = case
    name = f"{'auto+' * contest}bins:{length}"
    sent = wire.sparse((n,), np.array(indices, np.int64), wire.Ones(len(indices)), index=name, backend=backend)
    frame = wire.encode([sent])
    schema = (wire.Expected("x", (n,), max_k=len(indices), kinds=frozenset({wire.SPARSE})),)
    got = wire.decode(frame, schema).tensors[0]
    assert got.indices is not None
    assert got.indices.tolist() == indices
    if not contest:
        assert got.index == f"bins:{max(1, min(length, n))}"
        # What was found in the frame, asked for by name, gives the same frame again.
        again = wire.sparse((n,), got.indices, wire.Ones(len(indices)), index=got.index, backend=backend)
        assert wire.encode([again]) == frame


@pytest.mark.parametrize(("n", "k", "length"), [(20_000, 8192, 3), (100_000, 20_001, 9), (300_000, 150_000, 2)])
def test_round_trip_around_the_packing_threshold_and_the_stretches(n: int, k: int, length: int) -> None:
    support = wire.seeded_support(k, n, k)
    got = wire.decode(wire.encode([wire.sparse((n,), support, wire.Ones(k), index=f"bins:{length}")])).tensors[0]
    assert np.array_equal(got.indices, support)


def test_bytes_by_hand() -> None:
    # Bins of 4 with offsets 0 3 | 3 | none | none: 000 111 111 011 011, each from its low bit, low bits first.
    assert Bins(4).encode(Support(np.array([0, 3, 7]), 16)) == (b"\x01\x04\x02", b"\xf8\x37")
    # One each: offsets 1 2 3 0 in two bits.
    assert Bins(4).encode(Support(np.array([1, 6, 11, 12]), 16)) == (b"\x00\x04", b"\x39")


def test_length_one_is_the_bitmap() -> None:
    support = Support(np.array([1, 2, 5, 6, 7]), 11)
    assert Bins(1).encode(support)[1] == wire.INDEX_BY_NAME["bitmap"].encode(support)[1]


@pytest.mark.parametrize(("length", "paper"), [(50, 8), (63, 8), (64, 16), (500, 16), (16_383, 16)])
def test_an_index_with_its_sign_never_takes_more_than_the_papers_code(length: int, paper: int) -> None:
    """AdaComp's 8 bits below length 64 and 16 above (recalled), for a support without empty bins."""
    n = 400 * length
    indices = np.unique(np.arange(0, n, length)[:, None] + np.array([3, 17, 40]))
    section = Bins(length).encode(Support(indices, n))[1]
    signs = (indices.size + 7) // 8
    assert 8 * (len(section) + signs) <= paper * indices.size + 16


def test_one_per_bin_is_shorter_than_any_other_codec() -> None:
    n, length = 100_000, 100
    indices = np.arange(0, n, length) + wire.seeded_support(5, 1 << 30, n // length) % length
    support = Support(indices, n)
    codec, params, section, _, _ = encode_support(support, "auto+bins:100", "none")
    assert isinstance(codec, Bins)
    assert len(params) + len(section) == 2 + 7 * 1000 // 8
    # Rice spends the entropy of free places, 8.1 bits; inside a bin there are only log2 100 = 6.6 of them.
    assert len(Rice().encode(support)[1]) > 1.05 * len(section)


@pytest.mark.slow
@given(cases())
def test_the_shorter_of_both_is_never_longer_than_either(case: Case) -> None:
    n, length, indices = case
    support = Support(np.array(indices, np.int64), n)

    def size(name: str) -> int:
        _, params, section, _, stored = encode_support(support, name, "none")
        return len(params) + len(section if stored is None else stored)

    assert size(f"auto+bins:{length}") == min(size("auto"), size(f"bins:{length}"))


def test_auto_alone_never_makes_bins() -> None:
    n = 10_000
    indices = np.arange(0, n, 10) + np.arange(1000) * 7 % 10
    assert encode_support(Support(indices, n), "auto", "none")[0].name != "bins"


def test_the_shorter_of_both_takes_gap_bytes_where_they_win() -> None:
    pytest.importorskip("zstandard")
    n = 2_000_000
    # The same columns of every row, drawn at random: no gap is frequent, but all of them come again.
    clustered = (np.arange(80)[:, None] * 25_000 + wire.seeded_support(7, 25_000, 100)).reshape(-1)
    frame = wire.encode([wire.sparse((n,), clustered, wire.Ones(8000), index="auto+bins:50")])
    assert wire.decode(frame)[0].index == "gap-bytes"
    assert len(frame) < len(wire.encode([wire.sparse((n,), clustered, wire.Ones(8000), index="bins:50")]))


@pytest.mark.parametrize("name", ["bins:1", "bins:50", f"bins:{2**62}", "auto+bins:500", "auto", "complement:rice"])
def test_names_that_may_be_asked_for(name: str) -> None:
    assert require_index(name) == name


@pytest.mark.parametrize(
    "name",
    ["bins", "bins:", "bins:0", "bins:-4", "bins:05", "bins:٣", "bins:1e3", "bins:1.5", "bins: 5", "bins:5 ",
     "bins:5\n", f"bins:{2**62 + 1}", "bins:" + "9" * 5000, "auto+bins", "auto+rice", "complement:bins:5"],
)  # fmt: skip
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="bins:<length>"):
        wire.sparse((9,), np.array([1]), wire.Ones(1), index=name)


def test_impossible_lengths_are_refused() -> None:
    for length in (0, -1, 2**62 + 1):
        with pytest.raises(ConfigError, match="not possible"):
            Bins(length)


MANY = [
    # n = 10 in bins of 4: offsets of 2 bits, 4 above them for the last of a bin, 3 for an empty bin.
    ("offset beyond the last bin", [4, 4, 6], 0, 3, "below 10"),
    ("offset repeated", [1, 5, 4, 4], 0, 4, "ascending"),
    ("offset backwards", [2, 5, 4, 4], 0, 4, "ascending"),
    ("empty bin after an index that is not last", [0, 3, 4, 4], 1, 3, "empty bin follows"),
    ("too few bins", [0, 1, 6, 4], 0, 4, "4 indices and 2 bins"),
    ("too many bins", [4, 4, 4, 4], 0, 4, "more than 3 bins"),
    ("the last bin stays open", [0, 5, 4, 4, 0], 0, 5, "5 indices and 3 bins"),
    ("fewer indices than announced", [3, 3, 4], 1, 2, "1 indices and 3 bins"),
    ("more indices than announced", [0, 5, 4, 4], 1, 3, "more than 3 indices"),
]


@pytest.mark.parametrize(("what", "fields", "empty", "k", "words"), MANY, ids=[case[0] for case in MANY])
def test_fields_that_are_no_support_are_corrupt(what: str, fields: list[int], empty: int, k: int, words: str) -> None:
    params = bytes((1, 4, empty))
    section = pack(np.array(fields), 3)
    assert Bins().bounds(params, 10, k) == (len(section), len(section))
    with pytest.raises(wire.Corrupt, match=words):
        Bins().decode(params, section, 10, k)


def test_an_empty_bin_after_an_open_one_is_corrupt_between_stretches_too() -> None:
    """Fields are read 16384 at a time; the last of one stretch leaves its bin open, the first of the next is empty."""
    for extra in (0, 1):
        bins = (1 << 14) + extra
        fields = np.append(np.full(bins - 1, 4), [0, 3])
        params = bytes((1, 4)) + put_varint(1)
        with pytest.raises(wire.Corrupt, match="empty bin follows"):
            Bins().decode(params, pack(fields, 3), 4 * bins, bins)


def test_offsets_beyond_their_bin_are_corrupt() -> None:
    for params, fields, width in ((b"\x00\x05", [5, 0], 3), (b"\x00\x05", [0, 4], 3), (b"\x01\x05\x00", [13, 8], 4)):
        with pytest.raises(wire.Corrupt, match="beyond"):
            Bins().decode(params, pack(np.array(fields), width), 9, 2)


def test_padding_bits_must_be_zero() -> None:
    for params, section in ((b"\x00\x05", b"\x40"), (b"\x00\x05", b"\x80")):
        with pytest.raises(wire.Corrupt, match="padding"):
            Bins().decode(params, section, 9, 2)


@pytest.mark.parametrize(
    ("params", "n", "k"),
    [
        (b"", 10, 1),
        (b"\x00", 10, 1),
        (b"\x02\x04", 10, 3),
        (b"\x00\x00", 10, 3),
        (b"\x00\x0b", 10, 1),
        (b"\x00\x02", 0, 0),
        (b"\x00\x04", 10, 2),
        (b"\x00\x04", 10, 4),
        (b"\x00\x04\x00", 10, 3),
        (b"\x00\x84", 10, 3),
        (b"\x00\x84\x00", 10, 3),
        (b"\x01\x04", 10, 3),
        (b"\x01\x04\x04", 10, 0),
        (b"\x01\x04\x03", 10, 1),
        (b"\x01\x04\x01", 10, 1),
        (b"\x01\x04\x02", 10, 5),
        (b"\x01\x04\x02\x00", 10, 3),
        (b"\x01\x04" + b"\xff" * 9 + b"\x7f", 10, 3),
    ],
    ids=lambda v: v.hex() if isinstance(v, bytes) else None,
)
def test_impossible_parameters_are_corrupt(params: bytes, n: int, k: int) -> None:
    with pytest.raises(wire.Corrupt):
        Bins().bounds(params, n, k)


@pytest.mark.slow
@settings(max_examples=300)
@given(cases(), st.integers(0, 2**30), st.integers(0, 255))
def test_what_decodes_is_valid_and_encodes_back(case: Case, where: int, byte: int) -> None:
    """Any section that is accepted holds a strictly ascending support below n, and no other section holds the same."""
    n, length, indices = case
    params, section = Bins(length).encode(Support(np.array(indices, np.int64), n))
    if not section:
        return
    damaged = bytearray(section)
    damaged[where % len(damaged)] = byte
    try:
        got = Bins().decode(params, bytes(damaged), n, len(indices))
    except wire.WireError:
        return
    assert got.size == len(indices)
    assert bool(np.all(np.diff(got) > 0))
    assert all(0 <= i < n for i in got.tolist())
    assert (got.tolist() == indices) == (bytes(damaged) == section)
