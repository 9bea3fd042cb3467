"""Construction C: gradient descent on coded data. Exact for linear models; the data leave their owners.

**Privacy.** Raw or half-mixed training data leave the device that owns them: a parity device whose combination has one
term holds somebody's raw partition, two devices can cancel a third, and with transport through the server the server
sees the partitions themselves. In every iteration the server learns the margin and the label of each example. Use it
inside one trust domain only. Nothing here hides anything from anybody.

Z. Lin, K. G. Narra, M. Yu, S. Avestimehr, M. Annavaram, "Train Where the Data is: A Case for Bandwidth Efficient Coded
Training", arXiv:1910.10283. **Only the abstract could be read**: coded data on devices that come and go, built by
exchanging partitions without a central encoder, random linear codes so that not everybody exchanges with everybody,
logistic regression and SVM, half of the communication of MDS coded computation. The construction below is our own
reconstruction (derived), not the authors'.

Partitions X_1..X_k lie with n devices; G is real, n x k, and device i stores X~_i = sum_j G_ij X_j. A coefficient that
is zero is a partition that need not be sent: that is where the traffic is saved (derived). One iteration has two
phases, because the gradient is not linear in the data where there is a sigmoid or a hinge:

1. The server sends w; device i answers u_i = X~_i w. From the answers of a set S with rank(G_S) = k it solves for the
   margins z_j = X_j w of *every* partition, and computes the residuals r_j, e.g. sigmoid(z_j) - y_j.
2. It solves G_S^T V = R and sends v_i to the devices of S; device i answers X~_i^T v_i. The answers add up to
   sum_j X_j^T sum_i G_ij v_i = sum_j X_j^T r_j: the gradient, exactly.

A set that does not determine the margins is :class:`NotDecodable`, never numbers. All solves are in float64.

Wrong finite numbers are found by two checks that cost no message (derived). Surplus answers of phase 1 contradict each
other, and where one device contradicts all others it is found. And a device's two answers belong together: with h_i
that of phase 2, <h_i, w> = <v_i, u_i>, both being v_i^T X~_i w. The second check finds faults, not attacks: an error of
h_i at right angles to w passes, and a device that lies knows w. While w is zero, and all margins with it, some other
vector goes down in its place, so that there is something to check.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.encodings import encoding_matrix
from fedcomp.coding.errors import CorruptGeneration, IllConditioned, NotDecodable
from fedcomp.coding.linearloss import LOSSES, losses, residuals
from fedcomp.errors import ConfigError, nearest

if TYPE_CHECKING:
    from typing import Self

Real = NDArray[np.float64]

MAX_CONDITION: Final = 1e8
"""Above this condition number of G_S half of a double's digits are noise, and nothing is decoded."""

CONDITION_OF: Final[Mapping[str, float]] = {"float64": MAX_CONDITION, "float32": 4e3}
"""The same by the type in which vectors travel: the condition number multiplies what rounding them costs (derived)."""

CONTRADICTION: Final = 1e-6
"""Relative misfit of surplus answers above which they contradict each other; rounding to float32 gives 1e-7."""

_DETERMINED: Final = 1e-9


@dataclass(frozen=True)
class DataPlan:
    """Which device stores which combination, and which partitions it must receive. Made by :func:`data_plan`.

    Attributes
    ----------
    code : str
    matrix : ndarray of float64, shape (n, k)
        G, read-only. Device j < k owns partition j.
    """

    code: str
    matrix: Real

    @property
    def devices(self) -> int:
        """n."""
        return int(self.matrix.shape[0])

    @property
    def partitions(self) -> int:
        """k."""
        return int(self.matrix.shape[1])

    def wants(self, device: int) -> tuple[int, ...]:
        """Return the partitions in the combination of ``device``, ascending."""
        return tuple(np.flatnonzero(self.matrix[device]).tolist())

    @cached_property
    def transfers(self) -> tuple[tuple[int, int], ...]:
        """Every transfer of the set-up as (owner, receiver); the owner sends the partition of its own number."""
        receivers, owners = np.nonzero(self.matrix)
        return tuple((int(j), int(i)) for i, j in zip(receivers, owners, strict=True) if i != j)

    def plan_id(self, *circumstances: bytes) -> bytes:
        """Return 8 bytes that differ when the matrix or what the stored rows depend on does (sizes, task, labels)."""
        digest = hashlib.blake2b(self.code.encode() + self.matrix.astype("<f8").tobytes(), digest_size=8)
        for part in (str(self.matrix.shape).encode(), *circumstances):
            # With its length, or the end of one part could pass for the beginning of the next.
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()

    def subset(self, devices: Collection[int], max_condition: float = MAX_CONDITION) -> Subset:
        """Return what the answers of ``devices`` determine."""
        return Subset(self.matrix, tuple(sorted(devices)), max_condition)

    def choose(self, alive: Collection[int]) -> tuple[int, ...]:
        """Return as few of the ``alive`` devices as have all of their rank, ascending: k of them, if they decode.

        Devices that store a plain partition come first, then those whose rows add most to what is there: every device
        that is asked is one more that may be lost, and independent rows keep the condition number small.
        """
        order = sorted(alive)
        rows = self.matrix[order]
        lengths = np.linalg.norm(rows, axis=1)
        plain = np.count_nonzero(rows, axis=1) == 1
        left, chosen = rows.copy(), []
        for _ in range(min(len(order), self.partitions)):
            # Relative to the row's own length, so that the scale of the coefficients does not matter.
            share = np.divide(np.linalg.norm(left, axis=1), lengths, out=np.zeros(len(order)), where=lengths > 0)
            # A share is at most 1, so the 1 that is added puts every plain partition before all combinations.
            best = int(np.argmax(np.where(share > 1e-6, share + plain, 0.0)))
            if share[best] <= 1e-6:
                break
            chosen.append(order[best])
            # Twice: one pass of Gram-Schmidt leaves what rounding gave it.
            direction = left[best] / np.linalg.norm(left[best])
            for _ in range(2):
                left -= np.outer(left @ direction, direction)
        return tuple(sorted(chosen))


def data_plan(code: str, devices: int, partitions: int, *, density: float = 0.5, seed: int = 0) -> DataPlan:
    """Return the plan whose matrix is :func:`encoding_matrix` of the same arguments."""
    matrix = encoding_matrix(code, devices, partitions, density=density, seed=seed)
    matrix.flags.writeable = False
    return DataPlan(code, matrix)


class Subset:
    """Some devices, and what their rows of G determine.

    Attributes
    ----------
    devices : tuple of int
        Ascending.
    rank : int
        Of G_S, singular values below 1/``max_condition`` of the largest counted as zero.
    condition : float
        Largest over k-th singular value; infinite when there are fewer than k.
    determined : ndarray of bool, shape (k,)
        The partitions whose margins follow from the answers.
    """

    def __init__(self, matrix: Real, devices: tuple[int, ...], max_condition: float = MAX_CONDITION) -> None:
        self.devices = devices
        self._limit = max_condition
        self._rows = matrix[list(devices)]
        count = matrix.shape[1]
        # An empty set has no singular values at all.
        self._left, values, right = np.linalg.svd(self._rows, full_matrices=False)
        top = float(values[0]) if values.size else 0.0
        self.condition = top / float(values[count - 1]) if values.size >= count and values[count - 1] > 0 else math.inf
        # numpy's own rule for the rank: beyond it the k-th singular value is nothing but rounding.
        self._singular = self.condition * max(self._rows.shape) * np.finfo(np.float64).eps >= 1.0
        self.rank = int(np.count_nonzero(values > top / max_condition)) if top > 0 else 0
        self._left, self._values, self._right = self._left[:, : self.rank], values[: self.rank], right[: self.rank]
        # e_j lies in the row space exactly when nothing of it is left beside its projection; the length of the
        # projection itself would not tell a remainder of 1e-5 from none.
        beside = np.eye(count) - self._right.T @ self._right
        self.determined = np.linalg.norm(beside, axis=0) <= _DETERMINED

    @property
    def decodes_all(self) -> bool:
        """Whether the margins of all partitions follow."""
        return self.rank == self._rows.shape[1]

    def require(self) -> Self:
        """Return itself.

        Raises
        ------
        NotDecodable
            When rank(G_S) < k.
        IllConditioned
            When it is k, but with a condition number above the limit.
        """
        if self.decodes_all:
            return self
        count = self._rows.shape[1]
        if not self._singular:
            raise IllConditioned(
                f"the rows of devices {list(self.devices)} have condition number {self.condition:.1e}, at most "
                f"{self._limit:.0e} is decoded; wait for another device, or draw the code with another seed"
            )
        raise NotDecodable(
            f"{len(self.devices)} devices {list(self.devices)} have rank {self.rank}, {count} partitions need "
            f"rank {count}; wait for others, or use more parities or a denser code"
        )

    def margins(self, answers: Real, *, partial: bool = False) -> Real:
        """Return z_j = X_j w for every partition, shape ``(k, m)``.

        Parameters
        ----------
        answers : ndarray, shape (|S|, m)
            u_i in the order of :attr:`devices`.
        partial : bool
            Return the partitions that are determined, NaN for the others, instead of refusing.

        Raises
        ------
        NotDecodable, IllConditioned
            See :meth:`require`.
        CorruptGeneration
            When more answers than needed contradict each other.
        """
        if not partial:
            self.require()
        misfit = self._misfit(answers)
        if misfit > CONTRADICTION:
            raise CorruptGeneration(
                f"the answers of devices {list(self.devices)} contradict each other (relative misfit {misfit:.1e}): at "
                "least one is not the product of its stored rows with this model"
            )
        along = self._left.T @ answers
        z = self._right.T @ (along / self._values[:, None])
        z[~self.determined] = np.nan
        return z

    def odd_one(self, answers: Real) -> int | None:
        """Return the device whose answer contradicts all the others, which agree; None when that is not one alone."""
        found = []
        for place, device in enumerate(self.devices):
            others = np.delete(np.arange(len(self.devices)), place)
            if Subset(self._rows, tuple(others.tolist()), self._limit)._misfit(answers[others]) <= CONTRADICTION:
                found.append(device)
        # With a single surplus answer the others fit whoever is left out: then nobody is named.
        return found[0] if len(found) == 1 else None

    def _misfit(self, answers: Real) -> float:
        """Return what of the answers is no combination of the stored rows, relative to all; infinite never fit."""
        size = _length(answers)
        if not 0.0 < size < math.inf:
            return size
        return _length(answers - self._left @ (self._left.T @ answers)) / size

    def back_projection(self, residuals: Real) -> Real:
        """Return V with G_S^T V = R, shape ``(|S|, m)``, rows in the order of :attr:`devices`; the least if |S| > k.

        Parameters
        ----------
        residuals : ndarray, shape (k, m)
            R.

        Raises
        ------
        NotDecodable
            When no V gives R. With all partitions determined there always is one.
        """
        within = self._right @ residuals
        misfit = float(np.linalg.norm(residuals - self._right.T @ within))
        if misfit > _DETERMINED * float(np.linalg.norm(residuals)):
            raise NotDecodable(
                f"{len(self.devices)} devices {list(self.devices)} of rank {self.rank} cannot give this gradient of "
                f"{self._rows.shape[1]} partitions; wait for others, or use more parities or a denser code"
            )
        return self._left @ (within / self._values[:, None])


def _length(vector: Real) -> float:
    """Return the Euclidean norm, infinite without a warning where it is no double, NaN included."""
    with np.errstate(over="ignore", invalid="ignore"):
        length = float(np.sqrt(np.sum(vector * vector)))
    # A NaN is neither above nor below any limit: it would pass every comparison with one.
    return math.inf if math.isnan(length) else length


@dataclass
class CodedStep:
    """The server's arithmetic of one iteration, without messages: margins, residuals, assignments, and the sum.

    Call :meth:`decode`, then :meth:`assign` and :meth:`take`; while :meth:`take` says that something is missing, both
    again with the devices that are left, or :meth:`repeat` for those that were silent. The margins stay valid, and so
    do the parts that have arrived: a further assignment only makes up for those that were lost.

    Parameters
    ----------
    plan : DataPlan
    labels : sequence of ndarray
        y_j of every partition; their lengths may differ, the stored rows are padded with zeros to the longest.
    loss : str
        One of :data:`LOSSES`.
    approximate : bool
        When not all partitions are determined, go on with those that are: the sum is their exact gradient, and biased
        in that it lacks the others. :attr:`included` says how many examples it holds.
    max_condition : float
        Largest condition number that is decoded; :data:`CONDITION_OF` by the type in which the vectors travel.
    probe : bool
        The model is zero, so that all margins are known to be, and phase 1 has asked for the products with some other
        vector in its place: with zero nothing could be checked.

    Attributes
    ----------
    margins : ndarray of float64, shape (k, m)
        NaN where not determined.
    included : int
        Examples in the gradient (by :meth:`assign`).
    condition : float
        Of the rows that the margins were solved from.
    odd : list of int
        Devices whose first answers were left out because they contradict those of all others.
    gradient : ndarray of float64, shape (d,), or 0.0
        Sum of what arrived: when :meth:`take` returned True, of the gradients of all :attr:`included` examples. The
        number 0.0 if no device had to be asked.
    """

    plan: DataPlan
    labels: Sequence[Real]
    loss: str = "logistic"
    approximate: bool = False
    max_condition: float = MAX_CONDITION
    probe: bool = False
    margins: Real = field(init=False)
    included: int = field(init=False, default=0)
    condition: float = field(init=False, default=math.inf)
    odd: list[int] = field(init=False, default_factory=list)
    gradient: Real | float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ConfigError(f"loss={self.loss!r} has no linear margins{nearest(self.loss, LOSSES)}")
        if len(self.labels) != self.plan.partitions:
            raise ConfigError(
                f"labels of {len(self.labels)} partitions were given, the plan has {self.plan.partitions}"
            )
        self._sizes = np.array([len(y) for y in self.labels])
        self._rows = int(self._sizes.max())
        # True where there is an example, False where a shorter partition is padded.
        self._real = np.arange(self._rows) < self._sizes[:, None]
        self._y = np.zeros(self._real.shape)
        self._y[self._real] = np.concatenate([np.asarray(y, np.float64) for y in self.labels])
        self._left: Real | None = None
        self._answers: dict[int, Real] = {}
        self._assigned: dict[int, Real] = {}
        self._lost: dict[int, Real] = {}

    def decode(self, answers: Mapping[int, Real]) -> Real:
        """Solve for the margins from phase 1: u_i of shape ``(m,)`` by device; return them.

        Raises
        ------
        NotDecodable, IllConditioned, CorruptGeneration
            See :meth:`Subset.margins`; with ``approximate`` only when not a single partition is determined. One wrong
            answer is left out where it can be told which one it is.
        """
        subset = self.plan.subset(answers, self.max_condition)
        if not answers or (self.approximate and not subset.determined.any()):
            raise NotDecodable(f"the answers of devices {list(subset.devices)} determine no partition at all")
        stacked = np.stack([np.asarray(answers[i], np.float64) for i in subset.devices])
        try:
            self.margins = subset.margins(stacked, partial=self.approximate)
        except CorruptGeneration:
            odd = subset.odd_one(stacked)
            if odd is None:
                raise
            self.odd.append(odd)
            return self.decode({i: u for i, u in answers.items() if i != odd})
        if self.probe:
            # What was solved for are margins of the probe; those of the model itself, which is zero, are zero.
            self.margins = np.where(np.isnan(self.margins), np.nan, 0.0)
        self.condition = subset.condition
        self._answers = dict(zip(subset.devices, stacked, strict=True))
        self._left, self._lost = None, {}
        return self.margins

    def contradicts(self, model: Real, answers: Mapping[int, Real]) -> list[int]:
        """Return the devices whose answer to phase 2 does not fit theirs to phase 1; ask before :meth:`take`.

        To take such an answer for one that was lost is enough, whichever of the two is wrong: where others can make up
        for the device, the margins are those that they determine without it.

        Parameters
        ----------
        model : ndarray, shape (d,)
            w of phase 1, or what went in its place.
        answers : mapping of int to ndarray, shape (d,)
            h_i by device.

        Notes
        -----
        <h_i, w> and <v_i, u_i> may differ by :data:`CONTRADICTION` of |h_i| |w| + |v_i| |u_i|. Rounding u_i, v_i, w and
        h_i to float32 makes at most 1.2e-7 of it (derived: 6e-8 of either product for each of its factors), products in
        float64 made 3e-16 with 100 rows of 61 (measured), which leaves room for X~_i of which most cancels in X~_i w.
        """
        out = []
        for i in answers.keys() & self._assigned.keys():
            h, v, u = answers[i], self._assigned[i], self._answers[i]
            scale = _length(h) * _length(model) + _length(v) * _length(u)
            with np.errstate(over="ignore", invalid="ignore"):
                apart = abs(float(h @ model - v @ u))
            if not apart <= CONTRADICTION * scale < math.inf:
                out.append(i)
        return sorted(out)

    def assign(self, alive: Collection[int], *, whole: bool = False) -> dict[int, Real]:
        """Return v_i, shape ``(m,)``, for those of the ``alive`` devices that are to be asked.

        Parameters
        ----------
        whole : bool
            Do not give up a partition that the margins are known of, even with ``approximate``.

        Raises
        ------
        NotDecodable
            When they cannot give what is missing; with ``approximate`` when not a single example is left.
        """
        # Every device that is asked costs two vectors; the smallest set that decodes is tried first.
        subset = self.plan.subset(self.plan.choose(alive), self.max_condition)
        everybody = self.plan.subset(alive, self.max_condition)
        if subset.rank < everybody.rank:
            # As few as possible, but these few are too ill-conditioned.
            subset = everybody
        if self._left is None:
            self._start(self._known)
        assert self._left is not None
        try:
            vectors = subset.back_projection(self._left)
        except NotDecodable:
            known = subset.determined & self._known
            if whole or not self.approximate or not known.any():
                raise
            # What arrived belongs to a sum that can no longer be completed.
            self._start(known)
            vectors = subset.back_projection(self._left)
        # Zero but for rounding: a device without a part in the sum, or whose examples all have zero residuals.
        sizes = np.abs(vectors).max(axis=1, initial=0.0)
        least = 64 * np.finfo(np.float64).eps * sizes.max(initial=0.0)
        pairs = zip(subset.devices, vectors, sizes, strict=True)
        self._assigned = {i: vector for i, vector, size in pairs if size > least}
        return dict(self._assigned)

    @property
    def _known(self) -> NDArray[np.bool_]:
        return np.asarray(np.isfinite(self.margins).all(axis=1))

    def _start(self, known: NDArray[np.bool_]) -> None:
        self._left = np.zeros_like(self.margins)
        self._left[known] = residuals(self.loss, self.margins[known], self._y[known])
        # Padding adds nothing to the gradient, its rows being zero; without this, devices would be asked for it.
        self._left[~self._real] = 0.0
        self.included = int(self._sizes[known].sum())
        self.gradient = 0.0
        if not self.included:
            raise NotDecodable(f"partitions {np.flatnonzero(known).tolist()} are determined, and have no examples")

    def take(self, answers: Mapping[int, Real]) -> bool:
        """Add phase 2's h_i, shape ``(d,)`` by device, and return whether :attr:`gradient` is complete."""
        self._left = np.zeros_like(self.margins)
        self._lost = {}
        for i, vector in self._assigned.items():
            if i in answers:
                # What arrived stays valid when others make up for the lost: the sum is linear in the answers.
                self.gradient = self.gradient + answers[i]
            else:
                # Device i's part of the residuals, G_i^T v_i: what others have to make up for now.
                self._left += np.outer(self.plan.matrix[i], vector)
                self._lost[i] = vector
        self._assigned = {}
        return not self._lost

    def repeat(self) -> dict[int, Real]:
        """Return what the devices that were silent last time were asked, to ask them once more."""
        self._assigned = dict(self._lost)
        return dict(self._assigned)

    @property
    def margins_size(self) -> int:
        """m: elements of a device's answer in phase 1, and of what it gets in phase 2."""
        return self._rows

    @property
    def mean_loss(self) -> float:
        """Mean loss of the examples whose margins are known, at the model the margins belong to."""
        known = self._real & ~np.isnan(self.margins)
        return float(np.mean(losses(self.loss, self.margins[known], self._y[known])))


def encode_rows(row: Real, partitions: Mapping[int, Real], rows: int, features: int, *, bias: bool = True) -> Real:
    """Return X~ = sum_j G_ij X_j, float64 of shape ``(rows, features)``, with ``bias`` a constant column more.

    Parameters
    ----------
    row : ndarray, shape (k,)
        G_i.
    partitions : mapping of int to ndarray
        X_j, shape ``(m_j, features)`` with ``m_j <= rows``, for every nonzero coefficient; padded with zero rows.

    Raises
    ------
    NotDecodable
        When a partition of the combination is missing.
    """
    wanted = np.flatnonzero(row).tolist()
    missing = [j for j in wanted if j not in partitions]
    if missing:
        raise NotDecodable(f"partitions {missing} of this device's combination did not arrive")
    out = np.zeros((rows, features + bias))
    for j in wanted:
        x = partitions[j]
        out[: len(x), :features] += row[j] * x
        if bias:
            # Not sent: everybody knows it. Padding has none.
            out[: len(x), features] += row[j]
    return out
