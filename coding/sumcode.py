"""Coded sums: the shard of a sum is the sum of the shards, so the server decodes only the clients' total.

Every contributor cuts its vector of integers into K pieces, adds T pieces of randomness, and gives relay i the
combination of them that row i of a matrix over GF(p) names. A relay adds what it got from a set of contributors on
which all relays were told to agree, and any K + T such sums determine the pieces of the sum. No single vector is
determined by them. Server traffic is (K + T) / K vectors, however many contributors there are (Shamir's scheme with
packed secrets; derived here from recalled sources).

In ``mode="mask"`` the code carries a random mask instead: the contributor sends its masked vector to the server in
full, the relays send the sum of the masks' pieces. That is LightSecAgg (So et al., MLSys 2022; recalled).

What it protects, and what not: any T relays together, with the server until it collects, learn nothing of a vector;
afterwards the server learns the sum over the set and its weight. It takes as given that relays answer one collection a
round, that shards are closed to the server on their way, that at least two contributors of the set keep to
themselves, and that nobody lies: a check symbol finds accidents, not intent.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.errors import CorruptGeneration, NotDecodable
from fedcomp.coding.prime import FIELDS, PrimeField, ReadBytes, Residues, inverse
from fedcomp.errors import ConfigError

MODES: Final = ("share", "mask")

MOST: Final[Mapping[str, int]] = {"contributors": 1 << 20, "relays": 1024, "checks": 16, "extras": 16}
"""A plan comes from the server, and each of these costs who works by it: rows, bits of a set, lengths of vectors."""

MOST_SYMBOLS: Final = 1 << 30
"""Field elements of one contributor's shards together, and of a vector with its check symbols: 4 GiB at most."""

_RETRIES: Final = 64
"""How many relays are left out, one after the other, when a check is violated and there are more than are needed. Each
costs an inversion and a product."""


def prime_for(contributors: int, bound: int, max_weight: int = 1) -> PrimeField:
    """Return the smallest field in which no sum wraps around: contributors * max_weight * bound <= (p - 1) / 2.

    Raises
    ------
    ConfigError
        When not even 2^31 - 1 is large enough.
    """
    magnitude = contributors * max_weight * bound
    for field in FIELDS:
        if magnitude <= field.half:
            return field
    raise ConfigError(_wraps(FIELDS[-1], contributors, max_weight, bound))


@dataclass(frozen=True)
class SumPlan:
    """The parameters of one round's coded sum, common to all parties.

    Parameters
    ----------
    field : PrimeField
    size : int
        Integers in a contributor's vector, d.
    bound : int
        Largest magnitude of one of them, the quantiser's levels.
    contributors : int
        The most contributors a sum can have, C.
    relays : int
        Shards made of one vector, N; relay i gets the i-th.
    symbols : int
        Pieces a vector is cut into, K.
    threshold : int
        T, the privacy threshold: what any T relays hold together says nothing of a vector. It is also how many random
        pieces are coded beside the K, and not what decoding takes, which is K + T.
    max_weight : int
        Largest integer weight a contributor multiplies its vector by.
    extras : tuple of int
        Largest values of further numbers >= 0 of which only the sums are wanted; they are not weighed.
    seed : int
        Public; the check symbols come from it. One seed a round.
    checks : int
        Check symbols; 0 stands for what leaves a missed accident to one in 65 000 rounds or rarer.
    least : int
        A relay sums at least this many contributors, since a sum over one contributor is its vector.
    mode : {"share", "mask"}

    Raises
    ------
    ConfigError
        When a sum could wrap around, a row of the code could repeat, or a number makes no sense.

    Examples
    --------
    Two vectors, five relays that add what they got, and any three of their sums:

    >>> plan = SumPlan(FIELDS[1], size=3, bound=100, contributors=2, relays=5, symbols=2, threshold=1)
    >>> first, second = (shares(plan, contribution(plan, np.array(v))) for v in ([1, -2, 3], [10, 20, -30]))
    >>> decode(plan, {relay: plan.field.sum([first[relay], second[relay]]) for relay in (0, 2, 4)}).integers
    array([ 11,  18, -27])
    """

    field: PrimeField
    size: int
    bound: int
    contributors: int
    relays: int
    symbols: int
    threshold: int = 0
    max_weight: int = 1
    extras: tuple[int, ...] = ()
    seed: int = 0
    checks: int = 0
    least: int = 2
    mode: str = "share"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode={self.mode!r} is not one of {', '.join(map(repr, MODES))}")
        # An accident passes with probability p^-checks: 251^-3 is one in 16 million, 65521^-1 one in 65 000.
        object.__setattr__(self, "checks", self.checks or (3 if self.field.order < 1 << 15 else 1))
        object.__setattr__(self, "extras", tuple(self.extras))
        lows = {"size": 0, "bound": 1, "contributors": 1, "relays": 1, "symbols": 1, "threshold": 0}
        for name, low in {**lows, "max_weight": 1, "checks": 1, "least": 1}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name}={value!r} is not valid: it must be a whole number of at least {low}")
        if self.needed > self.relays:
            raise ConfigError(
                f"{self.symbols} pieces and {self.threshold} random ones need {self.needed} relays to decode, the plan "
                f"has {self.relays}; lower symbols or threshold, or have more relays"
            )
        if self.relays >= self.field.order:
            raise ConfigError(
                f"{self.field.name} has {self.field.order - 1} different rows for relays, the plan has {self.relays}; "
                "use a larger prime"
            )
        for name, most in MOST.items():
            count = len(self.extras) if name == "extras" else getattr(self, name)
            if count > most:
                raise ConfigError(f"the plan has {name}={count}; at most {most} are worked with")
        if max(self.checks * self.length, self.relays * self.shard_symbols) > MOST_SYMBOLS:
            raise ConfigError(
                f"{self.relays} shards of {self.shard_symbols} symbols, {self.checks} checks of {self.length}: more "
                f"than {MOST_SYMBOLS}. Have more symbols (K), or fewer shards"
            )
        if self.contributors * self.max_weight * self.bound > self.field.half:
            raise ConfigError(_wraps(self.field, self.contributors, self.max_weight, self.bound))
        for most in self.extras:
            if most < 0 or self.contributors * most > self.field.half:
                raise ConfigError(
                    f"{self.contributors} numbers of up to {most} may sum to {self.contributors * most}, beyond "
                    f"{self.field.half} = (p-1)/2 of {self.field.name}; use a larger prime"
                )

    @property
    def needed(self) -> int:
        """Relays whose sums decode, K + T."""
        return self.symbols + self.threshold

    @property
    def length(self) -> int:
        """Field elements that stand for one contributor: vector, weight, extras, check symbols."""
        return self.size + 1 + len(self.extras) + self.checks

    @property
    def shard_symbols(self) -> int:
        """Field elements of one shard, S = ceil(length / K)."""
        return -(-self.length // self.symbols)

    def config(self) -> dict[str, Any]:
        """Return the plan as numbers and names: what travels, and :meth:`from_config` reads."""
        code = {name: getattr(self, name) for name in ("size", "bound", "contributors", "relays", "symbols")}
        # The key from before the parameter was called threshold: the digest in every shard is taken of this text.
        code["private"] = self.threshold
        rest = {name: getattr(self, name) for name in ("max_weight", "seed", "checks", "least", "mode")}
        return {"p": self.field.order, **code, **rest, "extras": list(self.extras)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SumPlan:
        """Return the plan that :meth:`config` described, checked like any other.

        Raises
        ------
        ConfigError
            When it is incomplete or does not hold together.
        """
        numbers = dict(config)
        try:
            field = next((f for f in FIELDS if f.order == numbers["p"]), None)
            extras = tuple(int(most) for most in numbers["extras"])
            own = {k: v for k, v in numbers.items() if k not in ("p", "extras", "private")}
            if field is None:
                raise ConfigError(f"unknown field of {numbers['p']!r} elements; known are 251, 65521 and 2^31 - 1")
            return cls(field=field, extras=extras, threshold=numbers["private"], **own)
        except (KeyError, TypeError, ValueError) as error:
            # A ConfigError is a ValueError too, and says already what is wrong.
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"cannot read a plan from {sorted(numbers)}: {error!r}") from error

    @property
    def digest(self) -> bytes:
        """Eight bytes that stand in every shard: shards of different plans are never added."""
        text = repr(sorted(self.config().items())).encode()
        return hashlib.blake2b(text, digest_size=8).digest()

    def matrix(self) -> Residues:
        """Return V, (N, K + T): row i holds the powers 0 to K + T - 1 of the point i + 1.

        The points differ, so any K + T rows are invertible; none is 0, so any T rows of the last T columns are, too,
        and T shards of random pieces are uniform whatever the others are.
        """
        point = np.arange(1, self.relays + 1, dtype=np.int64)
        rows = np.ones((self.relays, self.needed), np.int64)
        for power in range(1, self.needed):
            # Reduced at each power, both factors are below 2^31 and no product leaves 64 bits.
            rows[:, power] = rows[:, power - 1] * point % self.field.order
        return rows.astype(self.field.dtype)

    def challenge(self) -> Residues:
        """Return the rows of the check symbols, (checks, length - checks), uniform over GF(p) from the public seed.

        Powers of one point would be shorter to write, but miss the errors that are polynomials with that root: with as
        many coefficients as there are points that is every point.
        """
        from fedcomp.coding.stream import SplitMix64, derive

        stream = SplitMix64(derive("sumcode/check", self.seed))
        return self.field.random((self.checks, self.length - self.checks), stream)


def contribution(plan: SumPlan, integers: NDArray[Any], weight: int = 1, extras: Sequence[int] = ()) -> Residues:
    """Return what one contributor adds to the sum, (length,) residues: weighed vector, weight, extras, check symbols.

    Raises
    ------
    ConfigError
        When a number is out of the plan's bounds, which would make the sum wrap around.
    """
    values = np.asarray(integers)
    if values.shape != (plan.size,) or values.dtype.kind not in "iu":
        raise ConfigError(f"the plan sums {plan.size} integers, this vector is {values.dtype}{values.shape}")
    # As Python integers: the magnitude of the smallest int64 is no int64.
    largest = max(int(values.max(initial=0)), -int(values.min(initial=0)))
    if largest > plan.bound:
        raise ConfigError(f"an integer of magnitude {largest} exceeds the plan's bound {plan.bound}; quantise to it")
    if not 0 <= weight <= plan.max_weight:
        raise ConfigError(
            f"weight {weight} is not within 0 to {plan.max_weight}, for which the plan has room; raise max_weight"
        )
    if len(extras) != len(plan.extras) or any(not 0 <= n <= most for n, most in zip(extras, plan.extras, strict=False)):
        raise ConfigError(f"the plan sums numbers of up to {plan.extras} beside the vector, got {tuple(extras)}")
    out = np.empty(plan.length, plan.field.dtype)
    data = out[: plan.length - plan.checks]
    # bound * max_weight is within (p - 1) / 2, so this product cannot leave 64 bits.
    data[: plan.size] = plan.field.residues(values.astype(np.int64) * weight)
    data[plan.size :] = (weight, *extras)
    # Linear in the data: check symbols added up are the check symbols of the sum.
    out[plan.length - plan.checks :] = plan.field.dot(plan.challenge(), data)
    return out


def shares(plan: SumPlan, vector: Residues, read: ReadBytes = os.urandom) -> Residues:
    """Return the shards of ``vector`` (length,), (N, S): row i for relay i.

    Parameters
    ----------
    read : callable
        The source of the random pieces. A party that can predict it can remove them, whatever the threshold:
        :func:`predictable` is for tests.
    """
    if vector.shape != (plan.length,) or vector.dtype != plan.field.dtype:
        raise ConfigError(f"shards are made of {plan.field.dtype}({plan.length},), got {vector.dtype}{vector.shape}")
    rows = np.zeros((plan.needed, plan.shard_symbols), plan.field.dtype)
    # The rest of the last piece stays zero, and is a check of its own when the sum is decoded.
    rows[: plan.symbols].reshape(-1)[: plan.length] = vector
    rows[plan.symbols :] = plan.field.secret((plan.threshold, plan.shard_symbols), read)
    return plan.field.matmul(plan.matrix(), rows)


def mask(plan: SumPlan, read: ReadBytes = os.urandom) -> Residues:
    """Return a uniform vector, (length,): what hides a contribution from the server in mode "mask"."""
    return plan.field.secret(plan.length, read)


def predictable(seed: int) -> ReadBytes:
    """Return a source of bytes that everybody who knows ``seed`` can repeat: for tests, never for secrets."""
    from fedcomp.coding.stream import SplitMix64, derive

    stream = SplitMix64(derive("sumcode/predictable", seed))
    return lambda count: stream.bytes(count).tobytes()


def choose_set(held: NDArray[np.bool_], needed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the contributors to be summed and the relays that can sum all of them, U and R.

    Every relay must add the same set: a sum that lacks one shard decodes to noise in every coordinate. So sources that
    fewer than ``needed`` relays hold are dropped; then the relays count that miss nothing of the rest; and while these
    are too few, the source that most relays miss is dropped, the last one among equals.

    Parameters
    ----------
    held : ndarray of bool, (relays, sources)
        What each relay reported; a relay that did not report holds nothing.
    needed : int
        K + T.

    Returns
    -------
    sources, relays : tuple of int
        Ascending; no sources when nothing can be decoded. All relays are named that qualify.
    """
    held = np.asarray(held, np.bool_)
    sources = np.flatnonzero(held.sum(axis=0) >= needed)
    while sources.size:
        complete = np.flatnonzero(held[:, sources].all(axis=1))
        if complete.size >= needed:
            return tuple(sources.tolist()), tuple(complete.tolist())
        missing = (~held[:, sources]).sum(axis=0)
        # argmax returns the first of equals, which in reversed order is the last.
        worst = sources.size - 1 - int(np.argmax(missing[::-1]))
        sources = np.delete(sources, worst)
    return (), ()


@dataclass(frozen=True, eq=False)
class Summed:
    """A decoded sum.

    Attributes
    ----------
    integers : ndarray of int64, (size,)
        Sum of weight times vector.
    weight : int
        Sum of the weights.
    extras : tuple of int
        Sums of the further numbers.
    left_out : tuple of int
        Relays whose sums contradict the others'; they were not used.
    """

    integers: NDArray[np.int64]
    weight: int
    extras: tuple[int, ...]
    left_out: tuple[int, ...] = ()


def decode(
    plan: SumPlan, sums: Mapping[int, Residues], masked: Residues | None = None, contributors: int | None = None
) -> Summed:
    """Return the sum of contributions from the sums of at least K + T relays.

    Parameters
    ----------
    sums : mapping of int to ndarray, (S,)
        By relay. With more than are needed a relay that contradicts the others is found: those used first are left out
        one after the other, the first 64 of them.
    masked : ndarray, (length,), optional
        In mode "mask", the sum of the masked contributions over the same set.
    contributors : int, optional
        How many are in the sum; default as many as the plan allows.

    Raises
    ------
    NotDecodable
        With fewer than K + T relays.
    CorruptGeneration
        When a check symbol is violated: the relays did not add the same contributions, or a shard was damaged. Or when
        the sum is one that contributions within the plan's bounds cannot have.
    ConfigError
        When ``masked`` does not fit the mode.
    """
    if (masked is None) != (plan.mode == "share"):
        raise ConfigError(
            f"mode {plan.mode!r}: the sum of masked vectors is {'missing' if masked is None else 'extra'}"
        )
    relays = sorted(sums)
    if len(relays) < plan.needed:
        raise NotDecodable(f"{len(relays)} of the {plan.needed} relays that decode have answered")
    for relay in relays:
        if not 0 <= relay < plan.relays or sums[relay].shape != (plan.shard_symbols,):
            raise ConfigError(f"the sum of relay {relay} is {sums[relay].shape}, the plan has {plan.shard_symbols}")
    surplus = len(relays) > plan.needed
    # None first: honest relays are the usual case, and each further choice costs an inversion.
    without: list[int | None] = [None, *(relays[: min(plan.needed, _RETRIES)] if surplus else [])]
    code, challenge, beyond = plan.matrix(), plan.challenge(), ""
    for dropped in without:
        used = [relay for relay in relays if relay != dropped][: plan.needed]
        solving = inverse(plan.field, code[used])
        stacked = np.stack([sums[relay] for relay in used])
        # The random pieces are needed only to predict what surplus relays should have sent.
        pieces = plan.field.matmul(solving if surplus else solving[: plan.symbols], stacked)
        vector = pieces[: plan.symbols].reshape(-1)
        if masked is not None:
            # A view of the pieces, from which it is predicted below what surplus relays should have sent.
            vector = vector.copy()
            vector[: plan.length] = plan.field.subtract(masked, vector[: plan.length])
        # Bounds are looked at last: a sum that fails its check symbols says nothing about contributors.
        if not _consistent(plan, challenge, vector):
            continue
        lifted = plan.field.lift(vector[: plan.length - plan.checks])
        integers, (weight, *extras) = lifted[: plan.size], lifted[plan.size :].tolist()
        reason = _beyond(plan, plan.contributors if contributors is None else contributors, integers, weight, extras)
        if reason:
            beyond = beyond or reason
            continue
        others = [relay for relay in relays if relay not in used]
        again = plan.field.matmul(code[others], pieces) if others else pieces[:0]
        # A wrong relay among the surplus cannot have spoilt the sum; it is named all the same.
        wrong = [r for r, row in zip(others, again, strict=True) if not np.array_equal(row, sums[r])]
        return Summed(integers, weight, tuple(extras), tuple(wrong))
    tried = f" and without each of {len(without) - 1} relays" if surplus else ""
    raise CorruptGeneration(
        beyond
        or f"a check symbol of the sum is violated with {plan.needed} relays{tried}: they did not add the same "
        "contributions, or a shard was damaged. The sum cannot be used"
    )


def _consistent(plan: SumPlan, challenge: Residues, vector: Residues) -> bool:
    """Whether check symbols and padding of a decoded sum are what they must be."""
    data, checks = np.split(vector[: plan.length], [plan.length - plan.checks])
    return not vector[plan.length :].any() and np.array_equal(plan.field.dot(challenge, data), checks)


def _beyond(plan: SumPlan, contributors: int, integers: NDArray[np.int64], weight: int, extras: Sequence[int]) -> str:
    """Return what of a sum no contributions within the bounds can have; empty when they can.

    Of weights w >= 0 and vectors |q| <= bound the sum of w q is at most bound times the sum of w. Shards with true
    check symbols may hold anything else, up to (p - 1) / 2: with this the mean stays within the bound all the same.
    """
    if not 0 <= weight <= contributors * plan.max_weight:
        return _impossible(f"the weights sum to {weight}, {contributors} of up to {plan.max_weight} cannot")
    largest = max(int(integers.max(initial=0)), -int(integers.min(initial=0)))
    if largest > plan.bound * weight:
        return _impossible(f"an integer of {largest}, where weights of {weight} allow {plan.bound * weight}")
    for number, most in zip(extras, plan.extras, strict=True):
        if not 0 <= number <= contributors * most:
            return _impossible(f"numbers of up to {most} sum to {number}, {contributors} of them cannot")
    return ""


def _impossible(what: str) -> str:
    return f"the sum does not lie within the plan's bounds: {what}. A contributor exceeded them"


def _wraps(field: PrimeField, contributors: int, max_weight: int, bound: int) -> str:
    magnitude = contributors * max_weight * bound
    most = math.floor(field.half / (max_weight * bound))
    return (
        f"{contributors} contributors with weights of up to {max_weight} and integers of up to {bound} may sum to "
        f"{magnitude}, beyond {field.half} = (p-1)/2 of {field.name}, and would wrap around; this allows {most} "
        "contributors. Lower the levels or the largest weight, or use a larger prime"
    )
