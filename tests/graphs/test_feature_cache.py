"""What is kept of fetched rows: exact, within its limit, deterministic; and noise that no repetition removes."""

from __future__ import annotations

import sys
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest

from fedcomp.errors import ConfigError, StateError
from fedcomp.graphs.base import GraphError, MissingRows
from fedcomp.graphs.cache import ROW_BYTES, FeatureCache, noisy_rows
from fedcomp.rng import Key

NODES, D = 120, 24
ROW = 4 * D + 1 + ROW_BYTES
"""What a row without zeros costs."""


def features(dtype: type = np.float32) -> np.ndarray:
    """Return rows of every kind: without zeros, with one value beside 0, with a few, with none."""
    draws = Key(5, "cache").uniform(NODES * D).reshape(NODES, D)
    rows = draws + 0.5
    rows[1::4] = draws[1::4] < 0.2
    rows[2::4] = np.where(draws[2::4] < 0.2, draws[2::4], 0)
    rows[3::8] = 0
    rows[7, 3] = -0.0
    return rows.astype(dtype)


X = features()
FULL = np.arange(0, NODES, 4)
"""Nodes whose rows have no zeros: all cost the same."""


def held(cache: FeatureCache) -> list[int]:
    """Return which rows are held, the least recently used one first."""
    return cache.to_arrays()["ids"].tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("d", [1, 2, D])
def test_rows_come_back_bit_for_bit_in_any_order(dtype: type, d: int) -> None:
    rows = features(dtype)[:, :d]
    cache = FeatureCache("all")
    cache.put(np.arange(0, NODES, 2), rows[::2])
    cache.put(np.arange(1, NODES, 2), rows[1::2])
    order = np.argsort(Key(1, "order").bits(NODES))
    found = cache.get(order)
    assert found.dtype == dtype
    assert found.tobytes() == np.ascontiguousarray(rows[order]).tobytes()
    assert cache.ids.tolist() == list(range(NODES))
    assert len(cache) == NODES


def test_the_policy_none_keeps_nothing() -> None:
    cache = FeatureCache("none")
    cache.put(FULL, X[FULL])
    assert cache.ids.size == len(cache) == cache.nbytes == 0
    with pytest.raises(MissingRows):
        cache.get([0])
    assert cache.get([]).shape == (0, 0)


def test_a_row_larger_than_the_limit_is_not_kept_and_drives_nothing_out() -> None:
    zeros = np.zeros((1, D), np.float32)
    cache = FeatureCache("lru", ROW - 1)
    cache.put([3], zeros)
    cache.put([0], X[[0]])
    assert held(cache) == [3]
    assert cache.get([3]).tobytes() == zeros.tobytes()


def test_it_is_the_least_recently_used_cache_of_a_plain_model() -> None:
    """Against lists and sums: the same rows, in the same order, and at no time above the limit."""
    limit = 9 * ROW
    cache, model = FeatureCache("lru", limit), OrderedDict()
    singles = {}
    for node in range(NODES):
        one = FeatureCache("all")
        one.put([node], X[[node]])
        singles[node] = one.nbytes
    draws = Key(2, "use").bits(4000).astype(np.int64)
    for step in range(200):
        some = draws[step * 10 : step * 10 + 1 + step % 9] % NODES
        hits = [int(n) for n in some if int(n) in model]
        assert cache.get(hits).tobytes() == X[hits].tobytes()
        for n in hits:
            model.move_to_end(n)
        misses = sorted({int(n) for n in some} - set(hits))
        cache.put(misses, X[misses])
        for n in misses:
            while sum(singles[m] for m in model) + singles[n] > limit:
                model.popitem(last=False)
            model[n] = None
        assert held(cache) == list(model)
        assert cache.nbytes == sum(singles[m] for m in model) <= limit
    assert 8 < len(model) < NODES


def test_rows_are_held_in_their_shortest_form() -> None:
    cost = {}
    for name, node in (("full", 0), ("zeros", 3), ("one value", 1), ("few", 2)):
        cache = FeatureCache("all")
        cache.put([node], X[[node]])
        cost[name] = cache.nbytes - ROW_BYTES - 1
    ones, few = int(np.count_nonzero(X[1])), int(np.count_nonzero(X[2]))
    assert cost == {"full": 4 * D, "zeros": 0, "one value": 4 + ones, "few": 5 * few}


@pytest.mark.parametrize("policy", ["lru", "all"])
def test_state_survives_a_round_trip_bit_for_bit(policy: str) -> None:
    first = FeatureCache(policy, 40 * ROW, key="cora/csr")
    first.put(np.arange(NODES)[::-1], X[::-1])
    first.get([5, 3])
    arrays = first.to_arrays()
    assert len(arrays) <= 5
    assert sum(a.nbytes for a in arrays.values()) == first.nbytes + 32 + 24
    second = FeatureCache.from_arrays(arrays, policy, 40 * ROW, key="cora/csr")
    again = second.to_arrays()
    assert all(arrays[n].tobytes() == again[n].tobytes() and arrays[n].dtype == again[n].dtype for n in arrays)
    for cache in (first, second):
        assert cache.get(first.ids).tobytes() == X[first.ids].tobytes()
    assert second.nbytes == first.nbytes
    # Both go on alike.
    for cache in (first, second):
        cache.put(FULL, X[FULL])
    assert held(first) == held(second)


def test_rows_of_another_graph_or_codec_are_not_used() -> None:
    cache = FeatureCache("all", key="graph a/csr")
    cache.put(FULL, X[FULL])
    for key in ("graph b/csr", "graph a/int8", ""):
        other = FeatureCache.from_arrays(cache.to_arrays(), "all", key=key)
        assert len(other) == 0
        other.put([0], X[[0], :3])
        assert other.get([0]).shape == (1, 3)


def test_a_lower_limit_keeps_the_most_recent() -> None:
    cache = FeatureCache("all")
    cache.put(FULL, X[FULL])
    cache.get([8])
    fewer = FeatureCache.from_arrays(cache.to_arrays(), "lru", 2 * ROW)
    assert held(fewer) == [int(FULL[-1]), 8]
    assert len(FeatureCache.from_arrays(cache.to_arrays(), "none")) == 0


@pytest.mark.parametrize("name", ["form", "ids", "lengths", "rows"])
def test_damaged_state_is_refused(name: str) -> None:
    cache = FeatureCache("all")
    cache.put(FULL, X[FULL])
    for damaged in (
        lambda a: a[:-1],
        *(lambda a, i=i: np.where(np.arange(a.size) == i % a.size, a ^ 1, a) for i in (0, 1, -1)),
    ):
        arrays = cache.to_arrays()
        with pytest.raises(StateError, match="damaged"):
            FeatureCache.from_arrays({**arrays, name: damaged(arrays[name])}, "all")
    del arrays[name]
    with pytest.raises(StateError, match="missing"):
        FeatureCache.from_arrays(arrays, "all")


def test_absent_rows_are_named_and_nothing_changes() -> None:
    cache = FeatureCache("lru", 10 * ROW)
    cache.put([0, 4, 8], X[[0, 4, 8]])
    with pytest.raises(MissingRows) as caught:
        cache.get([0, 2, 3])
    assert caught.value.ids.tolist() == [2, 3]
    assert held(cache) == [0, 4, 8]


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="'lru'"):
        FeatureCache("lru2")
    with pytest.raises(ConfigError, match="limit_bytes=0 is not valid"):
        FeatureCache("lru", 0)
    cache = FeatureCache("all")
    cache.put([1], X[[1]])
    for ids, rows in (
        ([1, 2], X[[1]]),
        ([1], X[1]),
        ([2], X[[2], :5]),
        ([2], X[[2]].astype(np.float64)),
        ([2], X[[2]] > 0),
    ):
        with pytest.raises(GraphError):
            cache.put(ids, rows)
    assert cache.ids.tolist() == [1]
    with pytest.raises(ValueError, match="read-only"):
        cache.ids[0] = 7


def test_operations_do_not_depend_on_what_is_held() -> None:
    """Use and replacement of ten rows, with 300 and with 30 000 others: as many lines run, as much memory is taken."""

    def cost(size: int) -> tuple[int, int]:
        rows = np.ones((size, 1), np.float32)
        cache = FeatureCache("lru", size * (1 + 4 + ROW_BYTES))
        cache.put(np.arange(size), rows)
        used, new = np.arange(size - 10, size), np.arange(size, size + 10)
        lines = 0

        def count(frame: object, event: str, argument: object) -> object:
            nonlocal lines
            lines += event == "line"
            return count

        before = sys.gettrace()
        tracemalloc.start()
        sys.settrace(count)
        try:
            cache.get(used)
            cache.put(new, rows[:10])
        finally:
            sys.settrace(before)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert len(cache) == size
        return lines, peak

    few, many = cost(300), cost(30_000)
    assert many[0] == few[0]
    # An array of one byte for each row that is held would be 30 000.
    assert many[1] < few[1] + 10_000


SECRET = b"the owner's own, from os.urandom"


def test_noise_is_the_same_each_time_a_row_leaves() -> None:
    """So that the mean of a thousand fetches is what one fetch was."""
    ids = np.arange(NODES)
    sent = noisy_rows(X, ids, 0.3, SECRET)
    assert sent.dtype == np.float32
    for some in ([5], [7, 5], range(3, 90, 7)):
        some = np.array(some)
        assert noisy_rows(X[some], some, 0.3, SECRET).tobytes() == sent[some].tobytes()


def test_noise_is_gaussian_and_independent_between_nodes() -> None:
    rows = np.zeros((NODES, 401))
    noise = noisy_rows(rows, np.arange(NODES), 2.0, SECRET) / 2.0
    count = noise.size
    assert abs(noise.mean()) < 4 / count**0.5
    assert abs((noise**2).mean() - 1) < 4 * (2 / count) ** 0.5
    assert abs((noise**4).mean() - 3) < 4 * (96 / count) ** 0.5
    # The fourth moment's spread, and the tail beyond 3: 0.0027.
    assert abs((np.abs(noise) > 3).mean() - 0.0027) < 4 * (0.0027 / count) ** 0.5
    neighbours = (noise[1:] * noise[:-1]).mean()
    halves = (noise[:, :200] * noise[:, 201:]).mean()
    assert abs(neighbours) < 4 / count**0.5
    assert abs(halves) < 4 * (2 / count) ** 0.5


def test_another_secret_or_deviation_is_other_noise() -> None:
    zeros = np.zeros((1, 50))
    base = noisy_rows(zeros, [3], 1.0, SECRET)
    for other in (
        noisy_rows(zeros, [3], 1.0, SECRET[::-1]),
        noisy_rows(zeros, [4], 1.0, SECRET),
        noisy_rows(zeros, [3], 2.0, SECRET) / 2,
    ):
        assert np.abs(np.corrcoef(base[0], other[0])[0, 1]) < 0.6
        assert not np.isin(np.round(base, 9), np.round(other, 9)).any()


def test_no_noise_leaves_rows_as_they_are_and_wrong_arguments_are_refused() -> None:
    assert noisy_rows(X, np.arange(NODES), 0.0, SECRET) is X
    for std, secret in ((-1.0, SECRET), (float("nan"), SECRET), (float("inf"), SECRET), (1.0, b"short")):
        with pytest.raises(ConfigError):
            noisy_rows(X, np.arange(NODES), std, secret)
    with pytest.raises(GraphError):
        noisy_rows(X, np.arange(3), 1.0, SECRET)
