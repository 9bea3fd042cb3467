"""Seeded supports: against a transcription of their definition, exactly uniform, cheap, stable for ever."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import wire
from fedcomp.errors import ConfigError
from fedcomp.wire import seeded_block, seeded_support

MASK = (1 << 64) - 1


def reference(seed: int, n: int, k: int) -> list[int]:
    """The definition in docs/formats/wire.md, one word at a time."""

    def mix(z: int) -> int:
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        return z ^ z >> 31

    state = mix(seed & MASK)
    few = min(k, n - k)
    width = (n - 1).bit_length()
    chosen: set[int] = set()
    while len(chosen) < few:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        candidate = mix(state) >> 64 - width if width else 0
        if candidate < n:
            chosen.add(candidate)
    return sorted(chosen) if k <= n - k else [i for i in range(n) if i not in chosen]


@given(st.integers(0, MASK), st.integers(1, 400), st.data())
def test_matches_the_definition(seed: int, n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    assert seeded_support(seed, n, k).tolist() == reference(seed, n, k)


@pytest.mark.parametrize(("n", "k"), [(2**40, 50), (2**62, 20), (10**6 + 3, 5000), (5000, 2500)])
def test_matches_the_definition_at_size(n: int, k: int) -> None:
    assert seeded_support(n + k, n, k).tolist() == reference(n + k, n, k)


def test_known_supports() -> None:
    # Written down once; another implementation must find the same.
    assert seeded_support(0, 10, 3).tolist() == [0, 1, 6]
    assert seeded_support(1, 1_000_000, 5).tolist() == [211874, 390482, 459573, 624707, 786168]
    far = [31416275894, 349882047878, 710673968069, 775327859584]
    assert seeded_support(2**64 - 1, 2**40, 4).tolist() == far


@pytest.mark.slow
def test_every_subset_is_equally_likely() -> None:
    n, k, draws = 6, 3, 20_000
    counts = Counter(tuple(seeded_support(seed, n, k).tolist()) for seed in range(draws))
    subsets = list(itertools.combinations(range(n), k))
    expected = draws / len(subsets)
    chi2 = sum((counts[s] - expected) ** 2 / expected for s in subsets)
    # 19 degrees of freedom: the 99.99 % quantile is 51.
    assert len(counts) == len(subsets)
    assert chi2 < 51


def test_memory_does_not_grow_with_n() -> None:
    seeded_support(1, 1000, 10)
    tracemalloc.start()
    support = seeded_support(3, 1 << 50, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert support.size == 1000
    assert peak < 200_000


def test_seeds_that_follow_each_other_do_not_share_words() -> None:
    a, b = seeded_support(10, 1 << 40, 500), seeded_support(11, 1 << 40, 500)
    assert np.intersect1d(a, b).size == 0


@pytest.mark.parametrize(("n", "k"), [(3, 4), (3, -1), (2**63, 1)])
def test_impossible_sizes(n: int, k: int) -> None:
    for draw in (seeded_support, seeded_block):
        with pytest.raises(ConfigError):
            draw(0, n, k)


@given(st.integers(0, MASK), st.integers(1, 400) | st.integers(1, 2**62), st.data())
def test_block_matches_its_definition(seed: int, n: int, data: st.DataObject) -> None:
    """Algorithm 2: the start is the one index algorithm 1 draws; the rest follows modulo n."""
    k = data.draw(st.integers(0, min(n, 400)))
    (start,) = reference(seed, n, 1)
    assert seeded_block(seed, n, k).tolist() == sorted((start + i) % n for i in range(k))


def test_known_blocks() -> None:
    # Written down once; another implementation must find the same.
    assert seeded_block(0, 10, 3).tolist() == [6, 7, 8]
    assert seeded_block(7, 10, 3).tolist() == [0, 8, 9]
    assert seeded_block(1, 1_000_000, 3).tolist() == [786168, 786169, 786170]
    assert seeded_block(2**64 - 1, 2**40, 2).tolist() == [710673968069, 710673968070]


def test_a_block_costs_no_more_than_itself() -> None:
    tracemalloc.start()
    block = seeded_block(3, 1 << 61, 100_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert block.size == 100_000
    assert peak < 8 * 100_000 + 10_000


def test_the_algorithm_travels() -> None:
    """One byte of the frame tells single indices from a block; whoever expects one sees which it got."""
    values = np.arange(1, 8, dtype=np.float32)
    frames = [wire.encode([wire.seeded((50,), 9, 7, values, algorithm=a)]) for a in (1, 2)]
    assert frames[0] == wire.encode([wire.seeded((50,), 9, 7, values)])
    assert sum(a != b for a, b in zip(frames[0][:-4], frames[1][:-4], strict=True)) == 1
    one, two = (wire.decode(frame)[0] for frame in frames)
    assert one.index == wire.Seeded(9) == wire.Seeded(9, algorithm=1) != two.index
    assert two.index == wire.Seeded(9, algorithm=2)
    for tensor, expected in ((one, seeded_support(9, 50, 7)), (two, seeded_block(9, 50, 7))):
        assert tensor.indices is not None
        assert tensor.indices.tolist() == expected.tolist()
        assert tensor.dense()[expected].tolist() == values.tolist()
    unresolved = wire.seeded((50,), 9, 7, values, algorithm=2)
    assert np.array_equal(unresolved.dense(), two.dense())
    assert [eval(repr(t.index), {"Seeded": wire.Seeded}) for t in (one, two)] == [one.index, two.index]


@pytest.mark.parametrize("algorithm", [0, 3, 255])
def test_other_algorithms_are_unknown(algorithm: int) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        wire.Seeded(1, algorithm)
    with pytest.raises(wire.UnsupportedCodec, match="1 and 2"):
        wire.INDEX_BY_NAME["seeded"].bounds(bytes((algorithm,)) + bytes(8), 10, 3)
