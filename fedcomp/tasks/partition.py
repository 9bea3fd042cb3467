"""Partitions of examples over clients: IID, Dirichlet label skew, shards and pieces by label, sorted, natural ids.

A partitioner returns an *assignment*: one partition id per example, int64, shape ``(N,)``. Being a function
from examples to partitions it is disjoint and complete by construction; what is left to check is balance and
skew.

Every assignment is computed from the raw words of a :class:`~fedcomp.rng.Key` with arithmetic spelled out
here, never with numpy's distributions, so it does not change with the numpy version. The Dirichlet draw also
uses the C library's ``log``, ``cos`` and ``exp``; those may differ in the last bit between platforms, which
moves an example only if a class boundary falls within that bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, nearest
from fedcomp.params import shown
from fedcomp.rng import Key
from fedcomp.tasks.options import plain

Assignment = NDArray[np.int64]

KINDS: Final = ("iid", "dirichlet", "shards", "pieces", "sorted", "natural")
"""The partitioners' names; "dirichlet", "shards" and "pieces" take a number after a colon."""

_COUNTED: Final = ("shards", "pieces")

_LEAST_ALPHA: Final = 1e-300
"""Below it the logarithm of a gamma draw, up to 37 / alpha in size, leaves the range of a double."""


def permutation(n: int, key: Key) -> Assignment:
    """Return a uniform permutation of ``range(n)``: the order that sorts ``n`` random words of ``key``."""
    return np.argsort(key.bits(n), kind="stable").astype(np.int64)


def iid(n: int, num_partitions: int, key: Key, *, min_examples: int = 1) -> Assignment:
    """Deal ``n`` examples at random; sizes differ by at most one.

    Raises
    ------
    ConfigError
        When there are not enough examples for ``min_examples`` everywhere; 0 allows empty partitions.
    """
    _check_count(n, num_partitions, min_examples)
    out = np.empty(n, np.int64)
    out[permutation(n, key)] = np.arange(n) % num_partitions
    return out


def dirichlet(
    labels: NDArray[Any],
    num_partitions: int,
    alpha: float,
    key: Key,
    *,
    min_examples: int = 1,
) -> Assignment:
    """Split every class over the partitions in proportions drawn from Dirichlet(alpha, ..., alpha).

    Small ``alpha`` puts a class on few partitions, large ``alpha`` approaches the uniform split (Hsu, Qi and
    Brown 2019, arXiv 1909.06335, in the per-class form that is common in federated learning code).

    Parameters
    ----------
    labels : ndarray of int, shape (N,)
        Class of each example.
    num_partitions : int
    alpha : float
        Concentration, > 0.
    key : Key
        Names the draw.
    min_examples : int
        Partitions below this size are filled with examples taken from the largest partition, one at a time; 0
        allows empty partitions.

    Raises
    ------
    ConfigError
        When ``alpha`` is not positive or there are not enough examples for ``min_examples`` everywhere.
    """
    labels = _checked(labels)
    n = len(labels)
    _check_count(n, num_partitions, min_examples)
    if not _LEAST_ALPHA <= alpha < math.inf:
        raise ConfigError(f"dirichlet alpha is {alpha!r}; expected a positive number, e.g. 'dirichlet:0.5'")
    out = np.empty(n, np.int64)
    for position, label in enumerate(np.unique(labels)):
        members = np.flatnonzero(labels == label)
        members = members[permutation(len(members), key.at(purpose=f"{key.purpose}/order", layer=position))]
        log_gamma = _log_gammas(alpha, num_partitions, key.at(purpose=f"{key.purpose}/gamma", layer=position))
        # Relative to the largest: with a small alpha the draws themselves are below the smallest double.
        top = max(log_gamma)
        weights = [math.exp(g - top) for g in log_gamma]
        # Cumulated shares are rounded: sizes rounded one by one would not add up to the class.
        edges = np.floor(np.cumsum(weights) / math.fsum(weights) * len(members) + 0.5).astype(np.int64)
        # However the sums were rounded, the last example goes to the last partition.
        edges[-1] = len(members)
        # From the right: a partition with no share has the same edge as the one before it, and is skipped.
        out[members] = np.searchsorted(edges, np.arange(len(members)), side="right")
    return _fill_up(out, num_partitions, min_examples, key)


def shards(
    labels: NDArray[Any], num_partitions: int, shards_per_client: int, key: Key, *, min_examples: int = 1
) -> Assignment:
    """Cut the label-sorted examples into shards of one label each and deal ``shards_per_client`` to every
    partition.

    No partition sees more than ``shards_per_client`` labels. McMahan et al. (2017, arXiv 1602.05629) cut
    equal shards, which may straddle two labels; here each class gets a number of shards in proportion to its
    size (largest remainder, at least one), so that the bound on labels is exact and shard sizes differ
    slightly instead. No shard is empty, so no partition is, even with ``min_examples`` 0.

    Raises
    ------
    ConfigError
        When there are fewer shards than classes, a class has fewer examples than shards, or a partition gets
        fewer than ``min_examples``: examples cannot be moved to it without breaking the bound on labels.
    """
    labels = _checked(labels)
    _check_count(len(labels), num_partitions, min_examples)
    if shards_per_client < 1:
        raise ConfigError(f"shards per client is {shards_per_client!r}; expected at least 1, e.g. 'shards:2'")
    classes, sizes = np.unique(labels, return_counts=True)
    total = num_partitions * shards_per_client
    if total < len(classes):
        raise ConfigError(
            f"{num_partitions} partitions x {shards_per_client} shards = {total} shards cannot hold "
            f"{len(classes)} classes; use more shards per client"
        )
    # Bounded before it is apportioned, where a product with the sizes would leave 64 bits.
    counts = _apportion(sizes, total) if total <= len(labels) else None
    if counts is None or np.any(counts > sizes):
        raise ConfigError(
            f"{shown(total)} shards are too many for {len(labels)} examples; use fewer partitions or shards per client"
        )
    pieces: list[Assignment] = []
    for position, label in enumerate(classes):
        members = np.flatnonzero(labels == label)
        members = members[permutation(len(members), key.at(purpose=f"{key.purpose}/order", layer=position))]
        pieces.extend(np.array_split(members, counts[position]))
    # Places in a random order, cut into runs of that length: every partition gets as many shards.
    owner = permutation(total, key.at(purpose=f"{key.purpose}/deal")) // shards_per_client
    out = np.empty(len(labels), np.int64)
    for piece, partition in zip(pieces, owner, strict=True):
        out[piece] = partition
    return _check_smallest(out, num_partitions, min_examples)


def pieces(
    labels: NDArray[Any], num_partitions: int, pieces_per_client: int, key: Key, *, min_examples: int = 1
) -> Assignment:
    """Cut the label-sorted examples into pieces of one size, to within one, and deal ``pieces_per_client`` to every
    partition.

    The split of McMahan et al. (2017, arXiv 1602.05629): a piece may straddle two labels or more, so that a partition
    sees a label or two more than with :func:`shards`, and all are of the same size.

    Raises
    ------
    ConfigError
        When there are fewer examples than pieces, or a partition gets fewer than ``min_examples``.
    """
    labels = _checked(labels)
    _check_count(len(labels), num_partitions, min_examples)
    if pieces_per_client < 1:
        raise ConfigError(f"pieces per client is {pieces_per_client!r}; expected at least 1, e.g. 'pieces:2'")
    total = num_partitions * pieces_per_client
    if total > len(labels):
        raise ConfigError(
            f"{shown(total)} pieces are too many for {len(labels)} examples; use fewer partitions or pieces per client"
        )
    owner = permutation(total, key.at(purpose=f"{key.purpose}/deal")) // pieces_per_client
    return _check_smallest(_cut(labels, owner), num_partitions, min_examples)


def by_label(labels: NDArray[Any], num_partitions: int, *, min_examples: int = 1) -> Assignment:
    """Cut the examples, in order of label and then of position, into contiguous pieces whose sizes differ by at most
    one; piece i belongs to partition i, so that neighbours in a ring hold similar data. Nothing is drawn.

    Raises
    ------
    ConfigError
        When there are not enough examples for ``min_examples`` everywhere.
    """
    labels = _checked(labels)
    _check_count(len(labels), num_partitions, min_examples)
    return _cut(labels, np.arange(num_partitions))


def _checked(labels: NDArray[Any]) -> NDArray[Any]:
    """Return labels as an array.

    Raises
    ------
    ConfigError
        If there is not one label for each example.
    """
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ConfigError(
            f"labels have shape {labels.shape}; expected (N,), a class for each example: labels.reshape(-1) of a "
            "column, labels.argmax(1) of one-hot rows"
        )
    return labels


def _cut(labels: NDArray[Any], owner: Assignment) -> Assignment:
    """Cut the examples, in order of label and then of position, into a contiguous piece for each entry of ``owner``."""
    out = np.empty(len(labels), np.int64)
    for rows, partition in zip(np.array_split(np.argsort(labels, kind="stable"), len(owner)), owner, strict=True):
        out[rows] = partition
    return out


def natural(ids: NDArray[Any], num_partitions: int, *, min_examples: int = 1) -> Assignment:
    """Keep the examples of one id (a speaker, a writer, a phone) together.

    With as many partitions as ids each partition is one id, in sorted order of the ids. With fewer, whole ids
    are joined: the largest first, each to the partition that is smallest so far.

    Raises
    ------
    ConfigError
        When there are more partitions than ids, or one gets fewer than ``min_examples``.
    """
    values, index, sizes = np.unique(np.asarray(ids), return_inverse=True, return_counts=True)
    if num_partitions < 1 or num_partitions > len(values):
        raise ConfigError(
            f"the natural partition has {len(values)} ids, {num_partitions} partitions were asked for; "
            f"use 1 to {len(values)}"
        )
    if num_partitions == len(values):
        return _check_smallest(index.astype(np.int64), num_partitions, min_examples)
    owner = np.empty(len(values), np.int64)
    load = np.zeros(num_partitions, np.int64)
    # Largest first: small ids at the end level out what large ones left uneven. Ties in order of the id.
    for value in np.argsort(-sizes, kind="stable"):
        owner[value] = np.argmin(load)
        load[owner[value]] += sizes[value]
    return _check_smallest(owner[index], num_partitions, min_examples)


@dataclass(frozen=True, slots=True)
class Partitioner:
    """A partitioner as it is written in a configuration; ``str()`` gives the text back, with every digit.

    Parameters
    ----------
    kind : str
        One of :data:`KINDS`.
    value : float, int or None
        alpha of "dirichlet" (float), how many per client of "shards" and "pieces" (int), None for the others.

    Examples
    --------
    >>> labels = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    >>> Partitioner("shards", 2).assign(2, Key(0, "partition"), labels=labels).tolist()
    [1, 1, 0, 0, 1, 1, 0, 0]
    >>> str(Partitioner("dirichlet", 0.5))
    'dirichlet:0.5'
    """

    kind: str
    value: float | None = None

    def __str__(self) -> str:
        # repr is the shortest text that reads back as the same number; "dirichlet:1" stays without ".0".
        if self.value is None:
            return self.kind
        number = repr(int(self.value) if self.kind in _COUNTED else float(self.value))
        return f"{self.kind}:{number.removesuffix('.0')}"

    def assign(
        self,
        num_partitions: int,
        key: Key,
        *,
        labels: NDArray[Any] | None,
        ids: NDArray[Any] | None = None,
        n: int | None = None,
        min_examples: int = 1,
    ) -> Assignment:
        """Return the assignment of the examples to ``num_partitions`` partitions.

        Parameters
        ----------
        labels : ndarray of shape (N,), or None
            Classes; None for sets without one class per example, which then cannot be split by label.
        ids : ndarray of shape (N,), or None
            Natural ids; None where the set has none.
        n : int, optional
            Number of examples, needed only when neither labels nor ids are given.
        min_examples : int
            No partition is smaller; 0 allows empty ones. "dirichlet" moves examples to reach it.

        Raises
        ------
        ConfigError
            When the data lacks what the partitioner splits by, or ``min_examples`` cannot be kept.
        """
        if self.kind == "natural":
            if ids is None:
                raise ConfigError("this data has no natural ids; use 'iid', 'dirichlet:0.5' or 'shards:2'")
            return natural(ids, num_partitions, min_examples=min_examples)
        if self.kind == "iid":
            size = next((len(a) for a in (labels, ids) if a is not None), n)
            if size is None:
                raise ConfigError("iid needs the number of examples: give labels, ids or n")
            return iid(size, num_partitions, key, min_examples=min_examples)
        if labels is None:
            raise ConfigError(f"{self} splits by class, but an example of this data has no single class; use 'natural'")
        if self.kind == "sorted":
            return by_label(labels, num_partitions, min_examples=min_examples)
        assert self.value is not None
        if self.kind == "dirichlet":
            return dirichlet(labels, num_partitions, self.value, key, min_examples=min_examples)
        deal = shards if self.kind == "shards" else pieces
        return deal(labels, num_partitions, int(self.value), key, min_examples=min_examples)


def parse_partitioner(text: str | Partitioner) -> Partitioner:
    """Return the partitioner that ``text`` names: ``iid``, ``dirichlet:ALPHA``, ``shards:COUNT``, ``pieces:COUNT``,
    ``sorted`` or ``natural``.

    Raises
    ------
    ConfigError
        When the name is unknown (the message gives the nearest) or the number is missing, superfluous or
        impossible.
    """
    if isinstance(text, Partitioner):
        return text
    kind, colon, number = plain("partition", text).strip().lower().partition(":")
    if kind not in KINDS:
        raise ConfigError(f"unknown partitioner {shown(kind)}{nearest(kind[:80], KINDS)}")
    if kind in ("iid", "sorted", "natural"):
        if colon:
            raise ConfigError(f"partitioner {kind!r} takes no number, got {shown(text)}; write {kind!r}")
        return Partitioner(kind)
    try:
        value = float(number)
    except ValueError:
        # NaN fails every comparison below, and their messages say what is wanted.
        value = math.nan
    if kind == "dirichlet" and not (_LEAST_ALPHA <= value < math.inf):
        raise ConfigError(f"{shown(text)} needs a positive concentration, e.g. 'dirichlet:0.5'")
    if kind in _COUNTED:
        if not (1 <= value < math.inf and value == math.floor(value)):
            raise ConfigError(f"{shown(text)} needs a whole number of {kind} per client, e.g. '{kind}:2'")
        # Read as an integer where it is written as one: a double holds only 53 bits.
        return Partitioner(kind, int(number) if number.strip().isdecimal() else int(value))
    return Partitioner(kind, value)


def _check_count(n: int, num_partitions: int, min_examples: int = 0) -> None:
    if num_partitions < 1:
        raise ConfigError(f"num_partitions is {num_partitions}; expected at least 1")
    if min_examples < 0 or n < num_partitions * min_examples:
        raise ConfigError(
            f"{n} examples cannot give {num_partitions} partitions at least {min_examples} each; "
            "use fewer partitions or a smaller min_examples"
        )


def _check_smallest(assignment: Assignment, num_partitions: int, min_examples: int) -> Assignment:
    """Return ``assignment`` if every partition holds at least ``min_examples``."""
    least = int(np.bincount(assignment, minlength=num_partitions).min())
    if least < min_examples:
        raise ConfigError(
            f"the smallest of {num_partitions} partitions holds {least} examples, at least {min_examples} are asked "
            "for; use fewer partitions or a smaller min_examples"
        )
    return assignment


def _apportion(sizes: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Return whole numbers >= 1 that sum to ``total`` in proportion to ``sizes`` (largest remainder)."""
    # One each is set aside first, so that no class goes without.
    spare = total - len(sizes)
    share, remainder = np.divmod(sizes * spare, int(sizes.sum()))
    counts = 1 + share
    counts[np.argsort(-remainder, kind="stable")[: spare - int(share.sum())]] += 1
    return counts


def _fill_up(assignment: Assignment, num_partitions: int, min_examples: int, key: Key) -> Assignment:
    """Move examples from the largest partition to those with fewer than ``min_examples`` (see
    :func:`dirichlet`)."""
    sizes = np.bincount(assignment, minlength=num_partitions)
    if sizes.min() >= min_examples:
        return assignment
    out = assignment.copy()
    order = permutation(len(out), key.at(purpose=f"{key.purpose}/fill"))
    for poor in np.flatnonzero(sizes < min_examples):
        # The mean is at least min_examples (_check_count), so while one is below it the largest is above it.
        while sizes[poor] < min_examples:
            rich = int(np.argmax(sizes))
            moved = order[np.flatnonzero(out[order] == rich)[0]]
            out[moved] = poor
            sizes[rich] -= 1
            sizes[poor] += 1
    return out


def _log_gammas(alpha: float, count: int, key: Key) -> list[float]:
    """Return the logarithms of ``count`` draws from Gamma(alpha, 1).

    Marsaglia and Tsang (2000), "A simple method for generating gamma variables": for shape a >= 1, with d = a
    - 1/3, c = 1/sqrt(9 d), x normal and u uniform, d v with v = (1 + c x)^3 is accepted when
    log u < x^2/2 + d - d v + d log v. For alpha < 1, Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha), taken in
    logarithms because the power underflows for small alpha.
    """
    words = _uniforms(key)
    boost = alpha < 1.0
    d = (alpha + 1.0 if boost else alpha) - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    out: list[float] = []
    while len(out) < count:
        # Box and Muller (1958): 1 - u lies in (0, 1], so the logarithm is finite.
        radius = math.sqrt(-2.0 * math.log(1.0 - next(words)))
        x = radius * math.cos(2.0 * math.pi * next(words))
        accept = math.log(1.0 - next(words))
        root = 1.0 + c * x
        # (1 + c x)^3 would not be positive: such a draw is rejected, and log_v would not exist.
        if root <= 0.0:
            continue
        log_v = 3.0 * math.log(root)
        if accept >= 0.5 * x * x + d - d * root**3 + d * log_v:
            continue
        value = math.log(d) + log_v
        if boost:
            value += math.log(1.0 - next(words)) / alpha
        out.append(value)
    return out


def _uniforms(key: Key, block: int = 256) -> Iterator[float]:
    """Yield doubles in [0, 1): block b comes from the key's purpose with ``/b`` appended."""
    number = 0
    while True:
        yield from key.at(purpose=f"{key.purpose}/{number}").uniform(block).tolist()
        number += 1
