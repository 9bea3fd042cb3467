"""rANS: round trips, one set of bytes in both tiers, the entropy, and streams that nobody wrote."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import wire
from fedcomp.kernels import tiers
from fedcomp.wire import rans
from fedcomp.wire.bits import put_varint
from fedcomp.wire.gamma import pack_gamma

TIERS: tuple[tiers.Tier, ...] = ("numpy", "numba") if tiers.has_numba() else ("numpy",)
ANY = 1 << 40


def cases() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    found = {
        "one": np.array([5], np.uint16),
        "two": np.array([65535, 65000], np.uint16),
        "equal": np.full(5000, 9, np.uint16),
        "one rare": (np.arange(40_000) == 777).astype(np.uint16),
        "largest alphabet": rng.permutation(np.arange(4096, dtype=np.uint16)),
        "largest range": np.array([61_440] * 50 + [65_535], np.uint16),
        "skewed": rng.geometric(0.3, 70_000).astype(np.uint16),
    }
    # Around every change of the number of lanes, and rows that are full, one too long and one too short.
    for count in (4095, 4096, 8191, 8192, 32_767, 32_768, 65_535, 65_536, 65_537, 524_287, 524_289):
        found[f"{count} uniform"] = rng.integers(100, 117, count).astype(np.uint16)
    return found


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_all_tiers_write_and_read_the_same_bytes(name: str) -> None:
    numbers = CASES[name]
    streams = [rans.pack_rans(numbers, ANY, tier=tier) for tier in TIERS]
    assert streams[0] is not None
    assert len(set(streams)) == 1
    for tier in TIERS:
        got = rans.unpack_rans(memoryview(streams[0]), numbers.size, tier)
        assert got.dtype == np.uint16
        assert np.array_equal(got, numbers)


@pytest.mark.slow
@given(st.lists(st.integers(0, 300), min_size=1, max_size=400), st.integers(0, 65_000))
def test_round_trip(numbers: list[int], low: int) -> None:
    array = np.array(numbers, np.uint16) + np.uint16(low)
    stream = rans.pack_rans(array, ANY)
    assert stream is not None
    assert len(stream) >= rans.least_bytes(array.size)
    assert np.array_equal(rans.unpack_rans(stream, array.size), array)


@pytest.mark.parametrize(
    ("name", "golden"),
    [
        ("one", "435e0ea260767ca4"),
        ("one rare", "7f95c43d4f7fb4a5"),
        ("largest alphabet", "5536e73cba3e8e30"),
        ("skewed", "0b47d58c546bba9d"),
        ("65537 uniform", "b44b2432e48c1424"),
    ],
)
def test_bytes_are_fixed(name: str, golden: str) -> None:
    stream = rans.pack_rans(CASES[name], ANY)
    assert stream is not None
    assert hashlib.sha256(stream).hexdigest()[:16] == golden


def test_a_stream_by_hand() -> None:
    # Least number and range; a table of five bytes; one lane, with a state that two steps of half the slots have left.
    stream = rans.pack_rans(np.array([3, 4], np.uint16), ANY)
    table = pack_gamma(np.array([2048, 2048], np.uint32))
    # 2**16 // 2048 * 4096 + 2048 is 133120, and 133120 // 2048 * 4096 is 266240.
    assert stream == bytes((3, 2, len(table))) + table + (266_240).to_bytes(4, "little")


@pytest.mark.parametrize("levels", [1, 7, 127])
@pytest.mark.parametrize("heavy", [False, True])
def test_size_is_near_the_entropy(levels: int, heavy: bool) -> None:
    rng = np.random.default_rng(levels)
    x = rng.standard_t(4, 300_000) if heavy else rng.standard_normal(300_000)
    coded = wire.QsgdLevels.quantise(x.astype(np.float32), levels, 512, rng.random(x.size))
    numbers = (coded.levels + levels).astype(np.uint16)
    share = np.bincount(numbers) / x.size
    share = share[share > 0]
    entropy = -float(share @ np.log2(share)) * x.size / 8
    stream = rans.pack_rans(numbers, ANY)
    assert stream is not None
    # A lane for 2344 numbers costs three bytes, most beside a quarter of a bit each.
    assert len(stream) <= (1.05 if levels == 1 else 1.02) * entropy


def test_frequencies_add_up_and_leave_nobody_out() -> None:
    rng = np.random.default_rng(3)
    for counts in (np.array([1]), np.array([1 << 46, 0, 1]), np.ones(4096, np.int64), rng.integers(0, 9, 4000)):
        table = rans.frequencies(counts.astype(np.int64))
        assert int(table.sum()) == rans.TOTAL
        assert np.array_equal(table > 0, counts > 0)


def test_what_is_not_worth_it_is_not_written() -> None:
    numbers = CASES["skewed"]
    stream = rans.pack_rans(numbers, ANY)
    assert stream is not None
    assert rans.pack_rans(numbers, len(stream)) is None
    assert rans.pack_rans(numbers, len(stream) + 1) == stream
    assert rans.pack_rans(np.array([0, 4096], np.uint16), ANY) is None


def forged() -> dict[str, tuple[bytes, int]]:
    """Streams that break one rule each, and the numbers that they claim to hold."""
    stream = rans.pack_rans(CASES["skewed"][:3000], ANY)
    assert stream is not None
    half = pack_gamma(np.array([2048, 2048], np.uint32))

    def made(table: bytes, low: int = 0, span: int = 2, state: int = 266_240, words: bytes = b"") -> bytes:
        head = put_varint(low) + put_varint(span) + put_varint(len(table))
        return head + table + state.to_bytes(4, "little") + words

    def gamma(*frequencies: int) -> bytes:
        return pack_gamma(np.array(frequencies, np.uint32))

    assert rans.unpack_rans(made(half), 2).tolist() == [0, 1]
    return {
        "empty": (b"", 1),
        "cut": (stream[:-2], 3000),
        "cut inside a word": (stream[:-1], 3000),
        "longer": (stream + bytes(2), 3000),
        "fewer numbers": (stream, 2999),
        "more numbers": (stream, 3001),
        "no range": (made(b"", span=0), 2),
        "a range above 4096": (made(half, span=4097), 2),
        "numbers above 16 bits": (made(half, low=65_535), 2),
        "a sum above 4096": (made(gamma(2048, 2049)), 2),
        "a sum below 4096": (made(gamma(2048, 2047)), 2),
        "zero first": (made(gamma(0, 2048, 2048), span=3), 2),
        "zero last": (made(gamma(2048, 2048, 0), span=3), 2),
        "a state below the least": (made(half, state=65_535), 2),
        "another last state": (made(half, state=266_241 + 4096), 2),
        "a word too many": (made(half, words=b"ab"), 2),
        "a word too few": (made(half, state=65_536), 2),
        "a table that ends early": (made(half[:-1]), 2),
        "a table longer than all": (put_varint(0) + put_varint(2) + put_varint(1 << 40) + half, 2),
    }


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", forged())
def test_forged_streams_are_refused(name: str, tier: tiers.Tier) -> None:
    stream, count = forged()[name]
    with pytest.raises(wire.WireError):
        rans.unpack_rans(stream, count, tier)


@pytest.mark.parametrize("tier", TIERS)
def test_changed_streams_are_refused_or_have_one_encoding(tier: tiers.Tier) -> None:
    """What is accepted under the encoder's own table is exactly what the encoder writes for it."""
    numbers = CASES["skewed"][:2500]
    stream = rans.pack_rans(numbers, ANY)
    assert stream is not None
    rng = np.random.default_rng(11)
    refused = 0
    for _ in range(300):
        changed = bytearray(stream)
        changed[int(rng.integers(len(stream)))] ^= 1 << int(rng.integers(8))
        try:
            got = rans.unpack_rans(bytes(changed), numbers.size, tier)
        except wire.WireError:
            refused += 1
            continue
        assert not np.array_equal(got, numbers)
    assert refused > 290
