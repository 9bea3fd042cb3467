"""Index codecs: exact round trips, bytes by hand, sizes against the entropy bound, the choice, canonical decoding."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedcomp import wire
from fedcomp.errors import ConfigError
from fedcomp.kernels import portable
from fedcomp.wire import choose
from fedcomp.wire.ans_gaps import AnsGaps
from fedcomp.wire.backends import available_backends, compress
from fedcomp.wire.choose import encode_support
from fedcomp.wire.index import Support
from fedcomp.wire.rice import BlockRice, EliasFano, Rice, best_block_rice, best_rice, elias_fano_size, rice_size

WRITERS = (*wire.PLAIN, *(f"complement:{name}" for name in wire.PLAIN))
WIDE = ("auto", "raw", "fixed", "rice", "elias-fano", *(f"bins:{1 << log2}" for log2 in (56, 59, 62)))


def entropy_bits(n: int, k: int) -> float:
    """log2 of the number of k-subsets of n."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def clustered(n: int, k: int, seed: int) -> np.ndarray:
    """A support whose density varies by a factor of a hundred between stretches."""
    rng = np.random.default_rng(seed)
    weight = np.repeat(10.0 ** rng.uniform(-2, 0, 64), -(-n // 64))[:n]
    return np.sort(rng.choice(n, k, replace=False, p=weight / weight.sum()))


@st.composite
def supports(draw: st.DrawFn) -> tuple[int, list[int]]:
    n = draw(st.integers(1, 500))
    return n, sorted(draw(st.sets(st.integers(0, n - 1))))


@pytest.mark.slow
@given(supports(), st.sampled_from(("auto", *WRITERS)))
def test_round_trip(case: tuple[int, list[int]], codec: str) -> None:
    n, indices = case
    sent = wire.sparse((n,), np.array(indices, np.int64), np.zeros(len(indices), np.float32), index=codec)
    got = wire.decode(wire.encode([sent]), (wire.Expected("x", (n,)),)).tensors[0]
    assert got.indices is not None
    assert got.indices.dtype == np.int64
    assert got.indices.tolist() == indices


@pytest.mark.slow
@given(st.sets(st.integers(0, 2**62 - 1), max_size=40), st.sampled_from(WIDE))
def test_round_trip_at_the_largest_size(chosen: set[int], codec: str) -> None:
    n, indices = 1 << 62, sorted(chosen)
    sent = wire.sparse((n,), np.array(indices, np.int64), np.zeros(len(indices), np.int8), index=codec)
    got = wire.decode(wire.encode([sent]), limits=wire.Limits(max_elements=n)).tensors[0]
    assert got.indices is not None
    assert got.indices.tolist() == indices


@pytest.mark.slow
@pytest.mark.parametrize("codec", WRITERS)
@pytest.mark.parametrize(("n", "k"), [(20_000, 8191), (20_000, 8192), (20_000, 11_809), (100_000, 20_001)])
def test_round_trip_around_the_packing_threshold(codec: str, n: int, k: int) -> None:
    support = clustered(n, k, k)
    values = wire.SignScale(support % 2 == 0, np.ones(1, np.float32))
    got = wire.decode(wire.encode([wire.sparse((n,), support, values, index=codec)])).tensors[0]
    assert np.array_equal(got.indices, support)
    assert np.array_equal(got.values.decode(), values.decode())


def test_bytes_by_hand() -> None:
    support = Support(np.array([0, 3, 7]), 16)
    # Gaps 0 2 3. Rice, b = 1: quotients 0 1 1 as 1 01 01, low bits 0 0 1.
    assert Rice().encode_with(support, 1) == (b"\x01", b"\x15\x04")
    # Elias-Fano, l = 2: high parts 0 0 1 as 1 1 01, low bits 00 11 11.
    assert EliasFano().encode(support) == (b"\x02", b"\x0b\x3c")
    assert choose.INDEX_BY_NAME["fixed"].encode(support) == (b"", b"\x30\x07")
    assert choose.INDEX_BY_NAME["bitmap"].encode(support) == (b"", b"\x89\x00")
    assert choose.INDEX_BY_NAME["raw"].encode(support) == (b"", b"\x00\0\0\0\x03\0\0\0\x07\0\0\0")
    assert choose.INDEX_BY_NAME["gap-bytes"].encode(support) == (b"\x01\x01", b"\x00\x02\x03")


def test_rice_with_parameter_zero_is_the_bitmap() -> None:
    support = np.array([1, 2, 5, 6, 7])
    _, section = Rice().encode_with(Support(support, 8), 0)
    assert section == choose.INDEX_BY_NAME["bitmap"].encode(Support(support, 8))[1]


@pytest.mark.parametrize(
    ("n", "k", "factor"),
    [
        (10**6, 100, 1.03),
        (10**6, 1000, 1.015),
        (10**6, 10_000, 1.015),
        (25 * 10**6, 2500, 1.01),
        (25 * 10**6, 25_000, 1.01),
    ],
)
def test_rice_is_near_the_bound_of_uniform_supports(n: int, k: int, factor: float) -> None:
    params, section = Rice().encode(Support(wire.seeded_support(17, n, k), n))
    assert 8 * (len(params) + len(section)) <= factor * entropy_bits(n, k)


@pytest.mark.parametrize("density", [1e-4, 1e-3, 0.03, 0.2, 0.38, 0.5, 0.62, 0.8, 0.97, 0.999])
def test_auto_is_near_the_bound_at_any_density(density: float) -> None:
    n = 50_000
    k = round(n * density)
    support = Support(wire.seeded_support(23, n, k), n)
    codec, params, section, _, stored = encode_support(support, "auto", "none")
    size = len(params) + len(section if stored is None else stored)
    assert size <= 1.045 * entropy_bits(n, k) / 8 + 16
    assert (codec.name == "complement") == (density > 0.5)


@pytest.mark.slow
@given(supports(), st.sampled_from(["none", "zlib"]))
@example((17, [0, 1, 2, 3, 4, 5, 6, 7, 8]), "none")
def test_auto_is_never_worse_than_rice_plus_one_byte(case: tuple[int, list[int]], backend: str) -> None:
    support = Support(np.array(case[1], np.int64), case[0])
    _, rice_params, rice = Rice(), *Rice().encode(support)
    _, params, section, _, stored = encode_support(support, "auto", backend)
    assert len(params) + len(section if stored is None else stored) <= len(rice_params) + len(rice) + 1


def test_auto_finds_the_best_codec_of_a_clustered_support() -> None:
    support = Support(clustered(400_000, 6000, 3), 400_000)
    sizes = [
        len(choose.INDEX_BY_NAME[name].encode(support)[1]) for name in ("rice", "block-rice", "elias-fano", "fixed")
    ]
    if "zstd" in available_backends():
        sizes.append(len(compress("zstd", choose.INDEX_BY_NAME["gap-bytes"].encode(support)[1])) + 8)
    codec, _, section, _, stored = encode_support(support, "auto", "none")
    assert len(section if stored is None else stored) <= min(sizes)
    assert codec.name != "rice"


@pytest.mark.parametrize(("n", "k", "seed"), [(1000, 10, 0), (60_000, 700, 1), (60_000, 9000, 2), (10**6, 20_000, 3)])
def test_predicted_sizes_are_exact(n: int, k: int, seed: int) -> None:
    for indices in (wire.seeded_support(seed, n, k), clustered(n, k, seed)):
        support = Support(indices, n)
        b, size = best_rice(support)
        assert size == len(Rice().encode_with(support, b)[1])
        assert size == min(rice_size(support, other) for other in range(20))
        table, size = best_block_rice(support)
        assert size == len(BlockRice().encode_with(support, table)[1])
        assert elias_fano_size(support) == len(EliasFano().encode(support)[1])


@pytest.mark.slow
@given(supports(), st.sampled_from([n for n in wire.INDEX_BY_NAME if n in wire.PLAIN]))
def test_declared_size_is_an_upper_bound(case: tuple[int, list[int]], name: str) -> None:
    n, indices = case
    codec = wire.INDEX_BY_NAME[name]
    params, section = codec.encode(Support(np.array(indices, np.int64), n))
    assert 8 * len(section) <= codec.size_bits(n, len(indices))
    low, high = codec.bounds(params, n, len(indices))
    assert low <= len(section) <= high


@pytest.mark.slow
@settings(max_examples=300)
@given(supports(), st.sampled_from(wire.PLAIN), st.integers(0, 2**30), st.integers(0, 255))
def test_what_decodes_is_valid_and_encodes_back(case: tuple[int, list[int]], name: str, where: int, byte: int) -> None:
    # Any section that is accepted holds a strictly ascending support below n, and only one section encodes it.
    n, indices = case
    codec = wire.INDEX_BY_NAME[name]
    params, section = codec.encode(Support(np.array(indices, np.int64), n))
    if not section:
        return
    damaged = bytearray(section)
    damaged[where % len(damaged)] = byte
    try:
        got = codec.decode(params, bytes(damaged), n, len(indices))
    except wire.WireError:
        return
    assert got.size == len(indices)
    assert bool(np.all(np.diff(got) > 0))
    assert all(0 <= i < n for i in got.tolist())
    if bytes(damaged) != section:
        assert got.tolist() != indices


@pytest.mark.parametrize(
    ("n", "indices"), [(5, [0, 5]), (5, [-1, 2]), (5, [3, 2]), (5, [2, 2]), (2**40, [0, 2**33, 5]), (9, [0, 2**32, 8])]
)
def test_the_encoder_refuses_indices_that_are_not_ascending_below_n(n: int, indices: list[int]) -> None:
    with pytest.raises(ConfigError):
        wire.encode([wire.sparse((n,), np.array(indices), np.zeros(len(indices), np.float32))])


def test_a_receiver_with_another_n_reads_raw_indices_beyond_it_as_corrupt() -> None:
    support = Support(np.array([2, 900]), 1000)
    for name in ("raw", "rice", "elias-fano", "gap-bytes"):
        params, section = wire.INDEX_BY_NAME[name].encode(support)
        with pytest.raises(wire.Corrupt):
            wire.INDEX_BY_NAME[name].decode(params, section, 500, 2)


def test_declarations() -> None:
    for codec in wire.INDEX_CODECS.values():
        assert not codec.lossy
        assert codec.unbiased
    assert wire.INDEX_BY_NAME["seeded"].commutes_with_sum
    assert wire.INDEX_BY_NAME["shared"].needs == ("support",)
    assert not wire.INDEX_BY_NAME["rice"].commutes_with_sum


@pytest.mark.parametrize("n", [100, 2**31 - 1, 2**31, 2**33, 2**62])
@pytest.mark.parametrize(
    "indices",
    [
        [0, 2**32 + 5, 10],
        [0, -(2**32) + 5, 10],
        [0, 2**31 + 5, 10],
        [0, -5, 10],
        [0, 5, 5],
        [5, 0, 10],
        [-(2**63), 3, 10],
        [3, 2**63 - 1, -(2**63), -(2**62) - 1, 10],
        [0, 2**62 - 1, 2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 2**62 - 1, -1, 10],
    ],
)
def test_indices_that_are_not_ascending_are_refused_whatever_their_low_bits(n: int, indices: list[int]) -> None:
    with pytest.raises(ConfigError):
        wire.Support(np.array(indices, np.int64), n)


@pytest.mark.parametrize("name", ["gap-bytes", "rice", "elias-fano", "raw", "fixed"])
def test_the_top_of_the_largest_tensor_can_be_reached(name: str) -> None:
    n = 2**62
    for indices in ([n - 1], [0, n - 1], [n // 3, n // 2, n - 2, n - 1], list(range(n - 9, n))):
        frame = wire.encode([wire.sparse((n,), np.array(indices), np.ones(len(indices), np.int8), index=name)])
        assert wire.decode(frame, (wire.Expected("", (n,), "int8"),))[0].indices.tolist() == indices


def test_gaps_that_add_up_beyond_the_largest_tensor_are_corrupt() -> None:
    n = 2**62
    gaps = np.array([n - 1] * 5, "<u8")
    with pytest.raises(wire.Corrupt, match="beyond"):
        wire.INDEX_BY_NAME["gap-bytes"].decode(b"\x08\x00", gaps.tobytes(), n, 5)


def test_streams_of_gaps_that_nobody_writes_are_refused() -> None:
    codec = AnsGaps()
    n, support = 1000, np.array([0, 1, 2, 40, 41, 300, 999])
    params, section = codec.encode(Support(support, n))
    assert codec.decode(params, section, n, 7).tolist() == support.tolist()
    length = section[0]
    stream, low = section[1 : 1 + length], section[1 + length :]
    with pytest.raises(wire.Corrupt, match="no parameters"):
        codec.bounds(b"\x00", n, 7)
    for data, size, words in (
        (bytes((len(section),)) + section[1:], n, "does not fit"),
        (bytes((length,)) + stream + low + b"\0", n, "open"),
        (bytes((length,)) + stream + low[:-1], n, "open"),
        (bytes((length - 2,)) + section[1:], n, "stream"),
        (section, 999, "beyond"),
        (section, 600, "beyond"),
    ):
        with pytest.raises(wire.WireError, match=words):
            codec.decode(params, data, size, 7)
    assert codec.encode_below(Support(support, n), len(section)) is None
    assert codec.encode_below(Support(support, n), len(section) + 1) == section


@pytest.mark.parametrize("density", [0.01, 0.1])
def test_clustered_gaps_take_what_their_classes_tell(density: float) -> None:
    """Within 2 % of the order-0 entropy of the classes, and less than every codec that has one parameter or some."""
    rng = np.random.default_rng(5)
    n = 1_000_000
    # Rows of a matrix of which some are hot: half of the gaps are short, the others long.
    hot = np.repeat(rng.random(n // 500) < 0.1, 500)
    support = np.flatnonzero(rng.random(n) < np.where(hot, 7 * density, density / 3))
    found = Support(support, n)
    symbols = portable.classes(found.gaps)
    shares = np.bincount(symbols)[np.bincount(symbols) > 0] / symbols.size
    low_bits = int(np.maximum((symbols >> 2).astype(int) - 1, 0).sum())
    entropy = low_bits - float(shares @ np.log2(shares)) * symbols.size
    _, section = AnsGaps().encode(found)
    assert 0.999 * entropy <= 8 * len(section) <= 1.02 * entropy
    others = [len(wire.INDEX_BY_NAME[name].encode(found)[1]) for name in ("rice", "elias-fano", "fixed", "bitmap")]
    assert len(section) < 0.97 * min(others)
    _, _, plain, _, stored = encode_support(found, "auto", "none")
    assert len(plain if stored is None else stored) <= 1.03 * len(section)
