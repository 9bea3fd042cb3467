"""Gradient coding: devices send combinations of s + 1 partition gradients, and any n - s replies give the sum.

R. Tandon, Q. Lei, A. G. Dimakis, N. Karampatziakis, "Gradient Coding: Avoiding Stragglers in Distributed Learning",
ICML 2017 (recalled; the authors' code rashisht1/gradient_coding read). There are as many data partitions as devices.
Device i holds s + 1 of them, the least that survives any s losses, computes the gradient g_j of each and sends
f_i = sum_j B[i, j] g_j. Whoever has the answers of a set S solves a^T B_S = 1^T and has sum_i a_i f_i = sum_j g_j.

Nothing is saved: an answer is as long as a gradient, and every device computes s + 1 of them. What is bought is that a
round ends with the (n - s)-th answer and still has the exact sum. It works only where data may be replicated.

Two assignments:

- :class:`FractionalRepetition`, (s + 1) | n: groups of s + 1 devices hold the same s + 1 partitions and send their
  plain sum. Decoding takes one answer per group and adds; the coefficients are ones, so nothing is amplified and the
  result is bit for bit the same whoever answered.
- :class:`Cyclic`, any n: device i holds partitions i to i + s, wrapping round. The rows of B lie in the null space of a
  random s x n matrix H whose rows sum to zero, so that the all-ones vector lies there too. In floating point the
  decoding coefficients amplify rounding, so answers are float64 and H is redrawn until they are small; over a prime
  field everything is exact.

The authors' code enumerates all C(n, s) patterns of losses in advance; here a pattern is solved when it occurs, and
kept.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.errors import CodingError, NotDecodable
from fedcomp.coding.gradvalues import combine, solve_consistent
from fedcomp.coding.prime import inverse
from fedcomp.coding.stream import SplitMix64, derive
from fedcomp.errors import ConfigError

if TYPE_CHECKING:
    from fedcomp.coding.prime import PrimeField

Vector = NDArray[Any]

TOLERANCE: Final = 1e-6
"""Largest entry of a^T B_S - 1 of a decoding that is called exact; those of sound sets are 1e-9 and less (measured)."""

MAX_AMPLIFICATION: Final = 1e3
"""By how much a real cyclic code may amplify rounding: float64 answers then keep some 12 digits."""

SCHEMES: Final = ("auto", "fractional", "cyclic")

_KEPT: Final = 256
"""Patterns of losses whose decoding is kept."""

_ALL_SUBSETS: Final = 512
"""Up to so many patterns of losses all of them are tried when a code is drawn; beyond, a sample of them."""

_DRAWS: Final = 256


@dataclass(frozen=True)
class Decoding:
    """What the answers are multiplied with.

    Attributes
    ----------
    coefficients : ndarray, shape (n,)
        float64, or elements of the field; zero for every device that did not answer or is not needed.
    residual : float
        Euclidean length of a^T B_S - 1 where it was accepted as an approximation; 0.0 for a decoding that is exact (in
        floating point: within :data:`TOLERANCE`). sqrt(n) is the length when nothing answered.
    """

    coefficients: Vector
    residual: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether the sum of all partitions comes out."""
        return self.residual == 0.0

    @property
    def amplification(self) -> float:
        """The largest coefficient in magnitude: by how much a rounding error of one answer can grow."""
        return float(np.max(np.abs(self.coefficients.astype(np.float64)), initial=0.0))


class Assignment(ABC):
    """Which partitions every device holds, and how their gradients are combined and the sum is decoded.

    Parameters
    ----------
    n : int
        Devices, and data partitions.
    s : int
        Losses tolerated, 0 to n - 1. 0 codes nothing; n - 1 gives every device all data.
    field : PrimeField, optional
        Codes elements of this field, exactly. None codes float64.

    Raises
    ------
    ConfigError
        When n or s is out of range.
    """

    def __init__(self, n: int, s: int, field: PrimeField | None = None) -> None:
        for name, value in (("n", n), ("s", s)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} is {value!r}; expected a whole number")
        if n < 1:
            raise ConfigError(f"n is {n}; gradient coding needs at least one device")
        if not 0 <= s < n:
            raise ConfigError(f"s is {s}; of {n} devices 0 to {n - 1} may be lost")
        self.n, self.s, self.field = n, s, field
        self._kept: OrderedDict[tuple[int, bool], Decoding] = OrderedDict()

    @property
    @abstractmethod
    def scheme(self) -> str:
        """Name of the assignment, one of :data:`SCHEMES`."""

    @abstractmethod
    def partitions(self, i: int) -> tuple[int, ...]:
        """Return the s + 1 partitions that device ``i`` holds, in the order of :meth:`coefficients`."""

    @abstractmethod
    def coefficients(self, i: int) -> Vector:
        """Return device ``i``'s row of B on its partitions, shape (s + 1,), float64 or elements of the field."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the vectors that are combined: float64, or the field's."""
        return np.dtype(np.float64) if self.field is None else np.dtype(self.field.dtype)

    @property
    def matrix(self) -> Vector:
        """B, shape (n, n): row i is zero outside device i's partitions."""
        out = np.zeros((self.n, self.n), self.dtype)
        for i in range(self.n):
            out[i, list(self.partitions(i))] = self.coefficients(i)
        return out

    def holders(self, j: int) -> tuple[int, ...]:
        """Return the s + 1 devices that hold partition ``j``."""
        return tuple(i for i in range(self.n) if j in self.partitions(i))

    def combine(self, i: int, vectors: Sequence[Vector]) -> Vector:
        """Return device ``i``'s answer.

        Parameters
        ----------
        i : int
            Device, 0 to n - 1.
        vectors : sequence of ndarray, each of shape (d,)
            The gradients of :meth:`partitions`, in that order; float64, or elements of the field.

        Returns
        -------
        ndarray, shape (d,)

        Raises
        ------
        ConfigError
            When there are not s + 1 vectors of one length.
        """
        return combine(self.coefficients(i), vectors, self.field)

    def decoding(self, answered: Iterable[int], *, approximate: bool = False) -> Decoding:
        """Return what the answers of a set of devices are multiplied with; solved once per set and kept.

        Parameters
        ----------
        answered : iterable of int
        approximate : bool
            When the set does not determine the sum, return the least-squares coefficients instead of raising.

        Raises
        ------
        NotDecodable
            When the set does not determine the sum.
        ConfigError
            For a device that does not exist, or an approximation over a field where there is none.
        """
        devices = sorted(set(answered))
        for i in devices:
            if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < self.n:
                raise ConfigError(f"device {i!r} does not exist; there are {self.n}, from 0")
        # A set as the bits of one integer: a cheap key, whatever the order of arrival.
        mask = sum(1 << int(i) for i in devices)
        key = mask, approximate
        found = self._kept.get(key)
        if found is None:
            found = self._solve(devices, approximate)
            # The same array is handed out every time this set occurs.
            found.coefficients.setflags(write=False)
            self._kept[key] = found
            # The one used longest ago goes: patterns of losses tend to come again soon.
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return found

    def can_decode_sum(self, answered: Iterable[int]) -> bool:
        """Whether the answers of these devices determine the sum; any n - s do, some smaller sets too."""
        try:
            self.decoding(answered)
        except NotDecodable:
            return False
        return True

    def decode(self, answers: Mapping[int, Vector], *, approximate: bool = False) -> Vector:
        """Return the sum of all partitions' gradients.

        Parameters
        ----------
        answers : mapping of device to ndarray of shape (d,)
            What came; all of one length. Sums run in the order of the devices.
        approximate : bool
            As for :meth:`decoding`.

        Raises
        ------
        NotDecodable
            When the answers do not determine it.
        CodingError
            When answers differ in length or type, or hold something that is no finite number or element of the field.
        """
        first = self._check(answers)
        weights = self.decoding(answers, approximate=approximate).coefficients
        # In the order of the devices, not of arrival: the last bits of a floating-point sum depend on it.
        used = [i for i in sorted(answers) if weights[i]]
        if not used:
            return np.zeros_like(first)
        return combine(weights[used], [answers[i] for i in used], self.field)

    def disagreement(self, answers: Mapping[int, Vector]) -> float:
        """Return how far redundant answers contradict each other, relative to the largest number among them.

        0.0 when there are no more answers than needed. Every combination of answers that has to vanish is formed;
        honest devices that compute the same gradients leave rounding errors (nothing over a field). It tells that
        something differs, not who is wrong.
        """
        first = self._check(answers)
        devices = sorted(answers)
        checks = self._checks(devices)
        if not len(checks) or not first.size:
            return 0.0
        vectors = [answers[i] for i in devices]
        worst = 0.0
        for row in checks:
            used = np.flatnonzero(row)
            left = combine(row[used], [vectors[k] for k in used], self.field)
            if self.field is not None:
                # Nothing is rounded in a field: any difference is a whole one.
                worst = max(worst, float(np.any(left)))
                continue
            # Relative to the numbers that cancel, with which their rounding errors grow.
            scale = max(float(np.max(np.abs(vectors[k]))) * abs(float(row[k])) for k in used)
            worst = max(worst, float(np.max(np.abs(left))) / scale if scale else 0.0)
        return worst

    def _check(self, answers: Mapping[int, Vector]) -> Vector:
        if not answers:
            raise NotDecodable("no device has answered")
        first: Vector | None = None
        for i, vector in sorted(answers.items()):
            if vector.ndim != 1 or vector.dtype != self.dtype:
                raise CodingError(
                    f"answer of device {i} is {vector.dtype}{vector.shape}; expected one row of {self.dtype}"
                )
            if first is not None and vector.size != first.size:
                raise CodingError(f"answer of device {i} has {vector.size} numbers, the others have {first.size}")
            if self.field is None and not np.isfinite(vector).all():
                raise CodingError(f"answer of device {i} holds NaN or infinity")
            # The dtype holds numbers of p and more, with which products would not be exact.
            if self.field is not None and vector.size and int(vector.max()) >= self.field.order:
                raise CodingError(f"answer of device {i} holds {vector.max()}, not an element of {self.field.name}")
            first = vector if first is None else first
        assert first is not None
        return first

    @abstractmethod
    def _solve(self, devices: list[int], approximate: bool) -> Decoding:
        """Return the decoding of a set; raise :class:`NotDecodable`."""

    @abstractmethod
    def _checks(self, devices: list[int]) -> Vector:
        """Return rows N, shape (r, len(devices)), with N B_S = 0."""


class FractionalRepetition(Assignment):
    """Groups of s + 1 devices that hold the same s + 1 partitions and send their plain sum; (s + 1) must divide n.

    Any set with an answer of every group decodes, which may be as few as n / (s + 1) devices.

    Examples
    --------
    >>> code = FractionalRepetition(4, 1)
    >>> code.partitions(1), code.partitions(2)
    ((0, 1), (2, 3))
    >>> g = [np.full(2, float(j)) for j in range(4)]
    >>> answers = {i: code.combine(i, [g[j] for j in code.partitions(i)]) for i in (1, 2)}
    >>> code.decode(answers)
    array([6., 6.])
    """

    def __init__(self, n: int, s: int, field: PrimeField | None = None) -> None:
        super().__init__(n, s, field)
        if n % (s + 1):
            raise ConfigError(
                f"fractional repetition needs groups of s + 1 = {s + 1} devices, and {n} is not a multiple of it; "
                "use a cyclic assignment"
            )
        self._ones = np.ones(s + 1, self.dtype)
        self._ones.setflags(write=False)

    @property
    def scheme(self) -> str:
        """Name of the assignment."""
        return "fractional"

    def partitions(self, i: int) -> tuple[int, ...]:
        """Return the partitions of device ``i``: those of its group."""
        first = _device(i, self.n) // (self.s + 1) * (self.s + 1)
        return tuple(range(first, first + self.s + 1))

    def coefficients(self, i: int) -> Vector:
        """Return ones."""
        _device(i, self.n)
        return self._ones

    def _solve(self, devices: list[int], approximate: bool) -> Decoding:
        weights = np.zeros(self.n, self.dtype)
        groups = self._groups(devices)
        missing = self.n // (self.s + 1) - len(groups)
        if missing and not approximate:
            raise _refusal(self, devices)
        for members in groups.values():
            # One answer of each group: the others are copies of it.
            weights[members[0]] = 1
        # The partitions of a lost group are in nobody else's answer: leaving them out is the least-squares solution.
        return Decoding(weights, math.sqrt(missing * (self.s + 1)))

    def _checks(self, devices: list[int]) -> Vector:
        rows = []
        position = {device: k for k, device in enumerate(devices)}
        # The field's numbers are unsigned: there -1 is p - 1.
        minus = -1 if self.field is None else self.field.order - 1
        for members in self._groups(devices).values():
            for other in members[1:]:
                row = np.zeros(len(devices), self.dtype)
                row[position[members[0]]], row[position[other]] = 1, minus
                rows.append(row)
        return np.array(rows, self.dtype).reshape(len(rows), len(devices))

    def _groups(self, devices: list[int]) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for i in devices:
            groups.setdefault(i // (self.s + 1), []).append(i)
        return groups


class Cyclic(Assignment):
    """Device i holds partitions i to i + s, wrapping round; any n - s answers decode.

    H (s x n) is drawn with its last column minus the sum of the others, so that H 1 = 0. Row i of B is 1 at i and
    -H[:, i+1..i+s]^-1 H[:, i] on the s partitions after it, so that H B^T = 0.

    Parameters
    ----------
    n, s : int
    seed : int
        Names the draw; the same seed gives the same code on every machine up to the rounding of its linear algebra, so
        devices are told their rows instead of computing them.
    field : PrimeField, optional
        None draws H from normal numbers, again until no amplification exceeds ``max_amplification``. Over a field H is
        uniform, redrawn until the sets below decode.
    max_amplification : float
        Real codes only: bound on |a_i| max_j |B[i, j]|, by which rounding errors of the gradients can grow.

    Notes
    -----
    What is tried of every draw: all C(n, s) sets of n - s devices when these are at most 512, else the n sets that
    lose s neighbours, which are the worst (measured), and 400 drawn ones. A set that was not tried and does not decode
    raises :class:`NotDecodable` when it occurs.

    Raises
    ------
    ConfigError
        When no draw is good enough.

    Examples
    --------
    >>> code = Cyclic(5, 2)
    >>> g = [np.full(2, float(j)) for j in range(5)]
    >>> answers = {i: code.combine(i, [g[j] for j in code.partitions(i)]) for i in (0, 2, 3)}
    >>> np.round(code.decode(answers), 6)
    array([10., 10.])
    """

    def __init__(
        self,
        n: int,
        s: int,
        seed: int = 0,
        field: PrimeField | None = None,
        *,
        max_amplification: float = MAX_AMPLIFICATION,
    ) -> None:
        super().__init__(n, s, field)
        if not max_amplification > 0:
            raise ConfigError(f"max_amplification is {max_amplification!r}; expected a positive number")
        self.seed, self.max_amplification = seed, max_amplification
        self.redraws = 0
        for attempt in range(_DRAWS):
            rows = self._draw(SplitMix64(derive("gradcode", seed, n, s, attempt)))
            if rows is not None:
                self._rows = rows
                # Decodings that were kept belong to the rows of the last draw.
                self._kept.clear()
                if self._worst(max_amplification) <= max_amplification:
                    self._rows.setflags(write=False)
                    return
            self.redraws += 1
        raise ConfigError(
            f"no cyclic code for n={n}, s={s} that amplifies rounding by at most {max_amplification:g} was found in "
            f"{_DRAWS} draws; choose n as a multiple of {s + 1} for fractional "
            "repetition, code over a prime field, or allow a larger max_amplification"
        )

    @property
    def scheme(self) -> str:
        """Name of the assignment."""
        return "cyclic"

    def partitions(self, i: int) -> tuple[int, ...]:
        """Return i, i + 1, ..., i + s, modulo n."""
        first = _device(i, self.n)
        return tuple((first + k) % self.n for k in range(self.s + 1))

    def coefficients(self, i: int) -> Vector:
        """Return row i of B on its support; the first is 1."""
        row: Vector = self._rows[_device(i, self.n)]
        return row

    def _draw(self, stream: SplitMix64) -> Vector | None:
        """Return the rows of B on their supports, shape (n, s + 1); None when a square part of H is singular."""
        n, s = self.n, self.s
        rows = np.zeros((n, s + 1), self.dtype)
        rows[:, 0] = 1
        # B is the identity: nothing is coded.
        if s == 0:
            return rows
        if self.field is None:
            drawn = stream.normal(s * (n - 1)).reshape(s, n - 1)
            # The last column makes H 1 = 0: the all-ones vector is then in the span of the rows of B.
            check = np.concatenate([drawn, -drawn.sum(axis=1, keepdims=True)], axis=1)
        else:
            drawn = self.field.random((s, n - 1), stream)
            last = self.field.residues(-drawn.sum(axis=1, keepdims=True, dtype=np.int64))
            check = np.concatenate([drawn, last], axis=1)
        for i in range(n):
            after = [(i + k) % n for k in range(1, s + 1)]
            try:
                rows[i, 1:] = self._null(check[:, after], check[:, i])
            # A singular draw is redrawn like one that amplifies too much.
            except (NotDecodable, np.linalg.LinAlgError):
                return None
        return rows

    def _null(self, square: Vector, column: Vector) -> Vector:
        """Return -square^-1 column."""
        if self.field is None:
            return -np.linalg.solve(square, column)
        product = self.field.matmul(inverse(self.field, square), column[:, None])[:, 0]
        return self.field.residues(-product.astype(np.int64))

    def _worst(self, limit: float) -> float:
        """Return the largest amplification over the tried sets, or the first beyond ``limit``; over a field 1."""
        worst = 1.0
        # A row with a large entry makes a large answer: rounding grows with the product.
        sizes = np.max(np.abs(self._rows), axis=1)
        for answered in self._tried():
            try:
                found = self._solve(answered, False)
            except NotDecodable:
                return math.inf
            if self.field is None:
                worst = max(worst, float(np.max(np.abs(found.coefficients) * sizes)))
            if worst > limit:
                break
        return worst

    def _tried(self) -> Iterator[list[int]]:
        n, s = self.n, self.s
        if math.comb(n, s) <= _ALL_SUBSETS:
            yield from (list(kept) for kept in itertools.combinations(range(n), n - s))
            return
        for first in range(n):
            gone = {(first + k) % n for k in range(s)}
            yield [i for i in range(n) if i not in gone]
        stream = SplitMix64(derive("gradcode/subsets", self.seed, n, s))
        for _ in range(400):
            yield sorted(int(i) for i in stream.shuffle(n)[: n - s])

    def _solve(self, devices: list[int], approximate: bool) -> Decoding:
        if len(devices) < self.n - self.s and not approximate:
            # The rows of fewer devices do not span what they have to; a coincidence of numbers is not waited for.
            raise _refusal(self, devices)
        if self.field is not None:
            return self._solve_in_field(devices, approximate)
        weights = np.zeros(self.n)
        if not devices:
            if approximate:
                return Decoding(weights, math.sqrt(self.n))
            raise _refusal(self, devices)
        part = self.matrix[devices]
        # With more answers than needed this is the solution of least norm, which amplifies least.
        found = np.linalg.lstsq(part.T, np.ones(self.n), rcond=None)[0]
        left = part.T @ found - 1.0
        weights[devices] = found
        if np.isfinite(left).all() and float(np.max(np.abs(left))) < TOLERANCE:
            return Decoding(weights)
        if not approximate:
            raise _refusal(self, devices)
        return Decoding(weights, float(np.linalg.norm(left)))

    def _solve_in_field(self, devices: list[int], approximate: bool) -> Decoding:
        assert self.field is not None
        if approximate and not self.can_decode_sum(devices):
            raise ConfigError(
                "least squares do not exist in a field: a cyclic code over a prime field cannot be decoded "
                "approximately; use "
                "float64 (field=None), or fractional repetition"
            )
        weights = np.zeros(self.n, self.dtype)
        # Any n - s determine the sum; of more the first are enough, and fewer cannot have the rank that is needed.
        chosen = devices[: self.n - self.s]
        system = np.concatenate([self.matrix[chosen].T, np.ones((self.n, 1), self.dtype)], axis=1)
        solution = solve_consistent(system, self.field)
        if solution is None:
            raise _refusal(self, devices)
        weights[chosen] = solution
        return Decoding(weights)

    def _checks(self, devices: list[int]) -> Vector:
        """Each surplus answer is predicted from the first n - s; over the reals the null space of B_S^T is taken."""
        base, surplus = devices[: self.n - self.s], devices[self.n - self.s :]
        if not surplus:
            return np.zeros((0, len(devices)), self.dtype)
        if self.field is None:
            _, _, right = np.linalg.svd(self.matrix[devices].T)
            # Rows of B are orthogonal to the s rows of H, so their rank is n - s: all further right singular vectors
            # are the null space.
            null: Vector = right[self.n - self.s :]
            return null
        rows = np.zeros((len(surplus), len(devices)), self.dtype)
        for k, device in enumerate(surplus):
            system = np.concatenate([self.matrix[base].T, self.matrix[[device]].T], axis=1)
            solution = solve_consistent(system, self.field)
            if solution is None:
                raise NotDecodable(f"devices {_listed(base)} do not determine the answer of device {device}")
            rows[k, : len(base)] = solution
            # That is -1: the prediction less what was answered.
            rows[k, len(base) + k] = self.field.order - 1
        return rows


def _refusal(code: Assignment, devices: Sequence[int]) -> NotDecodable:
    lost = [i for i in range(code.n) if i not in devices]
    return NotDecodable(
        f"{len(lost)} of {code.n} devices did not answer ({_listed(lost)}); the code survives any {code.s}. Wait "
        "for more answers, choose a larger s, or accept an approximation"
    )


def assignment(
    n: int, s: int, *, scheme: str = "auto", seed: int = 0, field: PrimeField | None = None
) -> FractionalRepetition | Cyclic:
    """Return an assignment; ``"auto"`` takes fractional repetition where (s + 1) divides n, else the cyclic one.

    Raises
    ------
    ConfigError
        For an unknown scheme, and as the assignments do.
    """
    if scheme not in SCHEMES:
        raise ConfigError(f"unknown scheme {scheme!r}; choose one of {', '.join(SCHEMES)}")
    # Values that are no such numbers are refused by the constructors below.
    divisible = isinstance(n, int) and isinstance(s, int) and s >= 0 and n % (s + 1) == 0
    if scheme == "fractional" or (scheme == "auto" and divisible):
        return FractionalRepetition(n, s, field)
    return Cyclic(n, s, seed, field)


def _device(i: int, n: int) -> int:
    if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < n:
        raise ConfigError(f"device {i!r} does not exist; there are {n}, from 0")
    return int(i)


def _listed(devices: Sequence[int]) -> str:
    shown = ", ".join(map(str, devices[:8]))
    return f"{shown}, ..." if len(devices) > 8 else shown or "none"
