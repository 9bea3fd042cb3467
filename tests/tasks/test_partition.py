"""Partitioners: every example in exactly one partition, the promised skew, and assignments that never change."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp.errors import ConfigError
from fedcomp.rng import Key
from fedcomp.tasks.partition import Partitioner, dirichlet, iid, natural, parse_partitioner, permutation, shards

KEY = Key(3, "partition/test")
LABELS = np.random.default_rng(0).integers(0, 10, 2000)
IDS = np.random.default_rng(1).integers(0, 12, 2000) * 7


def _entropies(assignment: np.ndarray, labels: np.ndarray, partitions: int) -> np.ndarray:
    """Entropy of the label distribution of each partition, in units of the uniform one's."""
    classes = labels.max() + 1
    out = []
    for p in range(partitions):
        share = np.bincount(labels[assignment == p], minlength=classes) / max((assignment == p).sum(), 1)
        share = share[share > 0]
        out.append(-(share * np.log(share)).sum() / np.log(classes))
    return np.array(out)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    text=st.sampled_from(
        ["iid", "dirichlet:0.05", "dirichlet:50", "shards:1", "shards:3", "pieces:1", "pieces:2", "sorted", "natural"]
    ),
    partitions=st.integers(10, 12),
    seed=st.integers(0, 2**63),
)
def test_every_example_has_exactly_one_partition_and_none_is_left_empty(text: str, partitions: int, seed: int) -> None:
    key = Key(seed, "partition")
    part = parse_partitioner(text)
    out = part.assign(partitions, key, labels=LABELS, ids=IDS)
    assert out.shape == LABELS.shape
    assert out.dtype == np.int64
    # Values in range make the parts disjoint and complete; all of them present leaves none empty.
    assert np.array_equal(np.unique(out), np.arange(partitions))
    np.testing.assert_array_equal(out, part.assign(partitions, key, labels=LABELS, ids=IDS))


@pytest.mark.parametrize("text", ["iid", "dirichlet:0.5", "shards:2"])
def test_another_key_gives_another_assignment(text: str) -> None:
    part = parse_partitioner(text)
    one, two = (part.assign(10, Key(seed, "partition"), labels=LABELS) for seed in (0, 1))
    assert np.mean(one != two) > 0.3


@pytest.mark.parametrize(
    ("text", "partitions", "digest"),
    [
        ("iid", 7, "78b213f407061ba3"),
        ("dirichlet:0.1", 10, "638a4c2acf634cda"),
        ("dirichlet:5", 10, "8f7c6980a6e2cdb2"),
        ("shards:2", 10, "f7f7026c0b4f6a7d"),
        ("natural", 5, "85513da1dbc8dca5"),
    ],
)
def test_assignments_are_stable_for_ever(text: str, partitions: int, digest: str) -> None:
    labels, ids = np.arange(1000) % 10, np.arange(1000) ** 2 % 17
    out = parse_partitioner(text).assign(partitions, Key(0, "partition"), labels=labels, ids=ids)
    assert hashlib.sha256(out.astype("<i8").tobytes()).hexdigest()[:16] == digest


def test_permutation_is_one() -> None:
    assert sorted(permutation(1000, KEY).tolist()) == list(range(1000))


def test_iid_sizes_differ_by_at_most_one_and_labels_are_even() -> None:
    out = iid(2000, 7, KEY)
    sizes = np.bincount(out)
    assert sizes.max() - sizes.min() <= 1
    # Pearson's statistic against independence of label and partition has (7-1)(10-1) = 54 degrees of freedom; its
    # 99.99 % quantile is 100.
    table = np.array([np.bincount(LABELS[out == p], minlength=10) for p in range(7)], float)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    assert ((table - expected) ** 2 / expected).sum() < 100


def test_alpha_governs_the_skew() -> None:
    skewed = _entropies(dirichlet(LABELS, 10, 0.05, KEY), LABELS, 10)
    middle = _entropies(dirichlet(LABELS, 10, 0.5, KEY), LABELS, 10)
    even = _entropies(dirichlet(LABELS, 10, 1000.0, KEY), LABELS, 10)
    assert skewed.mean() < 0.5 < middle.mean() < 0.9
    assert even.min() > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.3, 1.0, 2.5])
def test_shares_have_the_dirichlet_mean_and_variance(alpha: float) -> None:
    n, draws, size = 5, 400, 1000
    shares = np.array(
        [
            np.bincount(dirichlet(np.zeros(size, int), n, alpha, Key(s, "d"), min_examples=0), minlength=n) / size
            for s in range(draws)
        ]
    )
    mean, variance = 1 / n, (1 / n) * (1 - 1 / n) / (n * alpha + 1)
    assert np.abs(shares.mean(0) - mean).max() < 5 * np.sqrt(variance / draws)
    assert shares.var() == pytest.approx(variance, rel=0.15)


def test_tiny_alpha_does_not_underflow_and_minimum_is_kept() -> None:
    out = dirichlet(LABELS, 20, 1e-4, KEY, min_examples=15)
    assert np.bincount(out, minlength=20).min() >= 15
    bare = dirichlet(LABELS, 20, 1e-4, KEY, min_examples=0)
    assert np.bincount(bare, minlength=20).min() == 0
    assert len(bare) == len(LABELS)


@settings(deadline=None, max_examples=40)
@given(per_client=st.integers(1, 6), clients=st.integers(10, 40), seed=st.integers(0, 1000))
def test_shards_bound_the_labels_of_a_client(per_client: int, clients: int, seed: int) -> None:
    out = shards(LABELS, clients, per_client, Key(seed, "shards"))
    for p in range(clients):
        assert 1 <= len(np.unique(LABELS[out == p])) <= per_client


def test_shards_have_nearly_equal_sizes_for_equal_classes() -> None:
    labels = np.repeat(np.arange(10), 200)
    sizes = np.bincount(shards(labels, 20, 2, KEY))
    assert sizes.min() == sizes.max() == 100


def test_pieces_are_of_one_size_and_follow_the_labels() -> None:
    labels = np.repeat(np.arange(10), 160)[permutation(1600, Key(1, "mixed"))]
    out = parse_partitioner("pieces:2").assign(8, KEY, labels=labels)
    assert np.bincount(out).tolist() == [200] * 8
    # Every piece is a stretch of the sorted examples: what one partition holds are at most two stretches.
    owners = out[np.argsort(labels, kind="stable")]
    assert np.count_nonzero(np.diff(owners)) <= 2 * 8 - 1
    # 0.625 of a class long, a piece straddles two labels in places: some partition sees three, none more than four.
    seen = [np.unique(labels[out == p]).size for p in range(8)]
    assert 3 <= max(seen) <= 4
    with pytest.raises(ConfigError, match="1600000 pieces are too many"):
        parse_partitioner("pieces:200000").assign(8, KEY, labels=labels)


def test_natural_keeps_ids_together() -> None:
    exact = natural(IDS, 12)
    for number, value in enumerate(np.unique(IDS)):
        assert np.all(exact[value == IDS] == number)
    joined = natural(IDS, 4)
    for value in np.unique(IDS):
        assert np.unique(joined[value == IDS]).size == 1
    sizes = np.bincount(joined)
    assert sizes.max() - sizes.min() < np.bincount(IDS).max()


def test_sorted_pieces_follow_the_labels_and_differ_by_one_example_at_most() -> None:
    labels = np.array([3, 0, 1, 3, 2, 0, 1, 1, 2, 0, 3])
    out = parse_partitioner("sorted").assign(4, KEY, labels=labels)
    # In order of label, then of position: 1 5 9 | 2 6 7 | 4 8 0 | 3 10.
    np.testing.assert_array_equal(out, [2, 0, 1, 3, 2, 0, 1, 1, 2, 0, 3])
    np.testing.assert_array_equal(out, parse_partitioner("sorted").assign(4, Key(99, "other"), labels=labels))
    with pytest.raises(ConfigError, match="no single class"):
        parse_partitioner("sorted").assign(4, KEY, labels=None, ids=labels)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("dirchlet:0.5", "did you mean 'dirichlet'"),
        ("shard:2", "did you mean 'shards'"),
        ("dirichlet", "positive concentration"),
        ("dirichlet:0", "positive concentration"),
        ("dirichlet:nan", "positive concentration"),
        ("dirichlet:inf", "positive concentration"),
        ("shards:1.5", "whole number"),
        ("shards:0", "whole number"),
        ("shards:inf", "whole number"),
        ("pieces", "whole number of pieces"),
        pytest.param("shards:" + "9" * 400, "whole number", id="400 digits"),
        ("dirichlet:1e-320", "positive concentration"),
        pytest.param(10**5000, "written down", id="5001 digits"),
        ("iid:3", "takes no number"),
        ("sorted:3", "takes no number"),
        ("", "known"),
    ],
)
def test_parse_errors_say_what_to_write(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_partitioner(text)


@pytest.mark.parametrize(
    "text",
    [
        "iid",
        "sorted",
        "natural",
        "dirichlet:0.5",
        "dirichlet:1",
        "dirichlet:0.12345678",
        "dirichlet:1234567.5",
        "shards:2",
        "pieces:2",
        "shards:1234567",
        f"shards:{2**53 + 1}",
    ],
)
def test_text_round_trip(text: str) -> None:
    assert str(parse_partitioner(f" {text.upper()} ")) == text
    assert parse_partitioner(parse_partitioner(text)) == parse_partitioner(text)


@settings(deadline=None)
@given(alpha=st.floats(1e-300, exclude_max=True, max_value=float("inf")), count=st.integers(1, 2**63))
def test_no_digit_of_the_number_is_lost(alpha: float, count: int) -> None:
    assert parse_partitioner(str(Partitioner("dirichlet", alpha))).value == alpha
    assert parse_partitioner(str(Partitioner("dirichlet", np.float64(alpha)))).value == alpha
    assert parse_partitioner(str(Partitioner("shards", count))).value == count


@pytest.mark.parametrize("text", ["iid", "dirichlet:0.5", "shards:1", "pieces:1", "sorted"])
def test_more_partitions_than_examples_are_refused_alike(text: str) -> None:
    labels = np.arange(20) % 4
    with pytest.raises(ConfigError, match="20 examples cannot give 21 partitions at least 1 each"):
        parse_partitioner(text).assign(21, KEY, labels=labels)


@pytest.mark.parametrize("text", ["iid", "dirichlet:0.1", "shards:2", "pieces:2", "sorted", "natural"])
def test_min_examples_holds_for_every_partitioner(text: str) -> None:
    labels, ids = np.arange(100) % 5, np.arange(100) % 8
    part = parse_partitioner(text)
    for least in (0, 1, 10):
        out = part.assign(8, KEY, labels=labels, ids=ids, min_examples=least)
        assert np.bincount(out, minlength=8).min() >= least
    with pytest.raises(ConfigError, match="smaller min_examples"):
        part.assign(8, KEY, labels=labels, ids=ids, min_examples=13)


def test_partitions_that_cannot_be_filled_up_are_refused() -> None:
    # One shard per client: the client of the small class cannot take examples of another.
    labels = np.repeat([0, 1], [95, 5])
    with pytest.raises(ConfigError, match="smallest of 2 partitions holds 5 examples, at least 6"):
        shards(labels, 2, 1, KEY, min_examples=6)
    with pytest.raises(ConfigError, match="smallest of 2 partitions holds 5 examples, at least 6"):
        natural(labels, 2, min_examples=6)


def test_only_min_examples_zero_allows_empty_partitions() -> None:
    sizes = np.bincount(iid(5, 7, KEY, min_examples=0), minlength=7)
    assert sorted(sizes.tolist()) == [0, 0, 1, 1, 1, 1, 1]
    with pytest.raises(ConfigError, match="cannot give 7 partitions"):
        iid(5, 7, KEY)
    with pytest.raises(ConfigError, match="min_examples"):
        iid(5, 2, KEY, min_examples=-1)


@pytest.mark.parametrize("text", ["shards:1e18", "shards:9223372036854775807", "shards:1e300", "shards:201"])
def test_too_many_shards_are_refused_before_they_are_counted(text: str) -> None:
    with pytest.raises(ConfigError, match=r"shards are too many for 2000 examples"):
        parse_partitioner(text).assign(10, KEY, labels=LABELS, min_examples=0)


def test_as_many_shards_as_examples_are_allowed() -> None:
    assert np.array_equal(np.bincount(shards(np.arange(8) % 4, 4, 2, KEY)), [2, 2, 2, 2])


def test_impossible_partitions_are_refused() -> None:
    with pytest.raises(ConfigError, match="fewer partitions"):
        dirichlet(np.zeros(5, int), 6, 1.0, KEY)
    with pytest.raises(ConfigError, match="cannot hold 10 classes"):
        shards(LABELS, 4, 2, KEY)
    with pytest.raises(ConfigError, match="too many"):
        shards(np.zeros(5, int), 3, 2, KEY)
    with pytest.raises(ConfigError, match="12 ids"):
        natural(IDS, 13)
    with pytest.raises(ConfigError, match="at least 1"):
        iid(10, 0, KEY)
    with pytest.raises(ConfigError, match="no natural ids"):
        parse_partitioner("natural").assign(2, KEY, labels=LABELS)
    with pytest.raises(ConfigError, match="no single class"):
        parse_partitioner("dirichlet:1").assign(2, KEY, labels=None, ids=IDS)


@pytest.mark.parametrize("text", ["dirichlet:0.5", "shards:2", "pieces:2", "sorted"])
@pytest.mark.parametrize("labels", [np.zeros((20, 1), int), np.eye(4)[np.arange(20) % 4]])
def test_labels_that_are_not_one_for_each_example_are_refused(text: str, labels: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"labels have shape \(20, [14]\)"):
        parse_partitioner(text).assign(4, KEY, labels=labels)
