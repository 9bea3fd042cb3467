"""TopAgg's votes: randomly drawn signs of the largest coordinates, packed, verified, summed and thresholded.

B. Wang, F. Wu, Y. Long, L. Rimanic, C. Zhang, B. Li, "DataLens: Scalable Privacy Preserving Training via Gradient
Compression and Aggregation", CCS 2021, arXiv:2103.11109 (abstract; the authors' published code, read). A contribution
is a vector of -1, 0 and 1 with at most ``k`` that are not 0, so its L2 norm is at most sqrt(k) by construction: no clip
norm is chosen, and a receiver checks the bound by counting (derived). Noise, accounting and the sum itself are
:class:`fedcomp.privacy.mechanism.Votes` and :class:`~fedcomp.privacy.mechanism.PrivateSum`.

Which sign is cast is drawn from a public :class:`~fedcomp.rng.Key`. That randomness is not part of the guarantee, which
holds for every outcome of it: it makes the sum of many votes an estimate of magnitudes.

Two departures from the published code (both ours): a coordinate that is exactly zero abstains, where that code casts a
fair coin or +1; and a gradient that is zero throughout, or not finite, casts no vote at all, where that code votes +1
on k arbitrary coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params, wire
from fedcomp.codecs import PositionalCodec, State, Stretch, register, require_finite
from fedcomp.codecs.positional import SCOPES, expected_sparse, require_values
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.kernels import select_topk
from fedcomp.layout import DENSE, Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.rules import Int, Maybe, OneOf, Real, Switch, checked
from fedcomp.wire import Bundle, Expected, Frame, Limits, SchemaMismatch, Tensor, UnitSign

__all__ = [
    "TopkSign",
    "decode_rows",
    "encode_rows",
    "entropy_bits",
    "expected_rows",
    "longest_rows",
    "pass_probability",
    "repeated_votes",
    "threshold",
    "topk_stochastic_sign",
]

VoteArray = NDArray[np.int8]

_PLAIN: Final = (*wire.PLAIN, "complement")

ORDER: Final = 0x0C
"""Flags of a frame that say in which order its supports are written: 0 for their own, else 4, 8 or 12 for index i as
``i a mod n`` with the first, second or third of the fixed factors a.

Gap codes suit supports that look uniform. Those of dense layers with dead inputs are periodic, and in their own order
up to 3 % longer than scattered ones; those of large layers are clustered, and up to 10 % shorter (both measured on
digits). So several orders are tried, and the shortest frame is sent.
"""

_FACTORS: Final = (2654435769, 1779033703, 1013904242)
"""2^32 times (sqrt 5 - 1)/2, sqrt 2 - 1 and sqrt 5 - 2: multiples of such numbers are spread evenly for any period of
the multiplied values."""

_FEW: Final = 1 << 16
"""Largest number of elements for which all factors are tried; for longer supports they differ by less than one per
cent."""

_LONGEST: Final = 1 << 31
"""Vectors of this many elements or more are not scattered, because products of two indices would not fit into 64
bits."""


def topk_stochastic_sign(
    gradients: NDArray[Any],
    k: int,
    *,
    saturation: float | None = None,
    stochastic: bool = True,
    uniforms: Key | NDArray[np.float64] | None = None,
) -> VoteArray:
    """Return the votes of each row: signs of the ``k`` largest magnitudes, 0 elsewhere.

    On the support S a vote is +1 with probability ``clip(1/2 + g/(2b), 0, 1)``, else -1, where
    ``b = min(max |g|, saturation)``; so ``E[vote] = clip(g/b, -1, 1)`` (derived). Ties for the last place go to the
    lowest index. A row that is zero or holds NaN or infinity casts no vote, and neither does an exact zero.

    Parameters
    ----------
    gradients : float array of shape (rows, d) or (d,)
    k : int
        At least 1; d and more take every coordinate.
    saturation : float, optional
        The published code's ``c``: magnitudes above it vote with certainty. None for none.
    stochastic : bool
        False casts the plain signs.
    uniforms : Key or float64 array of shape (rows, min(k, d)), optional
        Numbers in [0, 1), or the stream they come from, for the support of each row in ascending order of indices.
        Needed when ``stochastic``.

    Returns
    -------
    int8 array of the same shape

    Raises
    ------
    ConfigError
        For ``k < 1``, a saturation that is not positive, or missing or misshapen ``uniforms``.
    """
    k = params.integer("k", k, low=1)
    bound = _saturation(saturation)
    given = np.asarray(gradients)
    if given.ndim not in (1, 2) or given.dtype.kind not in "fiu":
        raise ConfigError(f"gradients are {given.dtype}{given.shape}; expected numbers of shape (rows, d) or (d,)")
    rows = np.atleast_2d(given)
    count, size = rows.shape
    votes = np.zeros(rows.shape, np.int8)
    kept = min(k, size)
    if not rows.size:
        return votes.reshape(given.shape)
    # A number of extended precision may become infinite here, which then counts as not finite.
    with np.errstate(over="ignore"):
        rows = rows.astype(np.float64)
        # A whole row at once: its largest magnitude scales every vote of the row.
        rows[~np.isfinite(rows).all(axis=1)] = 0.0
    columns = _largest(np.abs(rows), kept)
    values = np.take_along_axis(rows, columns, axis=1)
    drawn = _uniforms(uniforms, (count, kept)) if stochastic else None
    np.put_along_axis(votes, columns, _cast(values, bound, drawn), axis=1)
    return votes.reshape(given.shape)


def repeated_votes(
    gradients: NDArray[np.floating[Any]],
    k: int,
    times: int,
    *,
    stochastic: bool = True,
    uniforms: Key | None = None,
) -> VoteArray:
    """Return ``times`` draws of the votes of each row, int8 of shape ``(rows, times, d)``.

    For teachers whose gradients on several images are positive multiples of each other: the support and the chances of
    :func:`topk_stochastic_sign`, which do not change with a row's scale, are worked out once, and each image has coins
    of its own. There is no saturation, which would depend on the scale.

    Parameters
    ----------
    gradients : float array of shape (rows, d)
    k, stochastic, uniforms
        As in :func:`topk_stochastic_sign`; the stream gives ``(times, rows, min(k, d))`` numbers.
    times : int
        At least 1.

    Raises
    ------
    ConfigError
        For ``k < 1``, ``times < 1``, another shape, or missing ``uniforms``.
    """
    k, times = params.integer("k", k, low=1), params.integer("times", times, low=1)
    rows = np.asarray(gradients)
    if rows.ndim != 2 or rows.dtype.kind != "f":
        raise ConfigError(f"gradients are {rows.dtype}{rows.shape}; expected floats of shape (rows, d)")
    count, size = rows.shape
    kept = min(k, size)
    # A row that is not finite casts no vote at all: there is no largest magnitude to scale it by.
    finite = np.isfinite(rows).all(axis=1, keepdims=True)
    if not finite.all():
        rows = np.where(finite, rows, np.zeros_like(rows))
    columns = _largest(np.abs(rows), kept)
    values = np.take_along_axis(rows, columns, axis=1).astype(np.float64)
    drawn = _uniforms(uniforms, (times * count, kept)).reshape(times, count, kept) if stochastic else [None] * times
    votes = np.zeros((count, times, size), np.int8)
    for draw in range(times):
        np.put_along_axis(votes[:, draw], columns, _cast(values, math.inf, drawn[draw]), axis=1)
    return votes


def _largest(magnitudes: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Return the columns of the ``k`` largest values of each row in ascending order; the first of equal ones. Shape
    (rows, k)."""
    rows, size = magnitudes.shape
    if k == size:
        return np.broadcast_to(np.arange(size), (rows, size))
    last = np.partition(magnitudes, size - k, axis=1)[:, size - k, None]
    above = magnitudes > last
    missing = k - np.count_nonzero(above, axis=1, keepdims=True)
    tied = magnitudes == last
    # Without equal magnitudes every tie is taken; the running count is only worked out where it decides.
    if (np.count_nonzero(tied, axis=1, keepdims=True) != missing).any():
        tied &= np.cumsum(tied, axis=1) <= missing
    return np.nonzero(above | tied)[1].reshape(rows, k)


def _cast(values: NDArray[Any], saturation: float, uniforms: NDArray[np.float64] | None) -> VoteArray:
    """Return the votes for the chosen ``values``, shape (rows, k), finite float64."""
    signs = np.sign(values)
    if uniforms is not None:
        scale = np.minimum(np.abs(values).max(axis=1, keepdims=True, initial=0.0), saturation)
        # Halving first keeps the sum of two large numbers finite; a row of zeros has no scale and casts nothing.
        chance = 0.5 + np.divide(0.5 * values, scale, out=np.zeros_like(values), where=scale > 0.0)
        signs = np.where(signs != 0.0, np.where(uniforms < chance, 1.0, -1.0), 0.0)
    return signs.astype(np.int8)


def _saturation(value: float | None) -> float:
    return math.inf if value is None else params.positive("saturation", value)


def _uniforms(source: Key | NDArray[np.float64] | None, shape: tuple[int, int]) -> NDArray[np.float64]:
    if source is None:
        raise ConfigError("stochastic signs are drawn: pass uniforms=Key(...) or an array, or stochastic=False")
    if isinstance(source, Key):
        return source.uniform(shape[0] * shape[1]).reshape(shape)
    drawn = np.asarray(source, np.float64)
    if drawn.size != shape[0] * shape[1]:
        raise ConfigError(f"uniforms have shape {drawn.shape}, expected {shape}: one number for each vote")
    return drawn.reshape(shape)


@register
@dataclass(frozen=True, repr=False, eq=False)
class TopkSign(PositionalCodec):
    """Send stochastic signs of the k largest coordinates of the update: one vote each, no magnitude.

    Every float of the model votes, also what a density policy would send dense: a value that travels as a number has
    no bounded influence. Only integers and statistics stay outside, as they stay outside of every update.

    A frame holds one sparse tensor per stretch whose values are single bits (``unit-sign``): a vote other than -1 or +1
    cannot be written. Its support is written in whichever of the wire's index codecs is shortest for this message,
    among them Rice-coded gaps, a bitmap, and either of them for the absent indices; in its own order or, where that is
    shorter, in a scattered one (:data:`ORDER`).

    Inside :class:`fedcomp.strategies.private.topagg.TopAgg` the server sums votes, adds noise and thresholds. Inside a
    plain weighted mean the update is the mean vote, whose unit is votes: the inner strategy's server learning rate
    gives it a length.

    Parameters
    ----------
    k : int, optional
        Votes of one update, at least 1; all coordinates where there are fewer. Either this or ``density``.
    density : float, optional
        Fraction of the coordinates that vote, in (0, 1]; k is rounded up.
    scope : {"global", "layer"}
        Rank the whole model as one vector, or every tensor by itself. With "layer" and ``density`` a tensor has
        ``ceil(density n)`` votes, or what the layout's policy says in place of the density. With "layer" and ``k`` the
        tensors share exactly k votes in proportion to size times density, largest remainders first, at least one each.
        The bound sqrt(k) needs nothing but the total.
    saturation : float, optional
        Magnitudes above it vote with certainty.
    stochastic : bool
        False casts the plain signs.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcomp.layout import Layout, Update
    >>> from fedcomp.rng import Key
    >>> ballot, layout = TopkSign(k=2, stochastic=False), Layout.flat(4)
    >>> frame, _ = ballot.encode(Update(np.float32([0.1, -3, 2, 0]), layout), ballot.init(layout), Key(0))
    >>> ballot.decode(frame, layout).tolist()
    [0.0, -1.0, 1.0, 0.0]
    """

    codec_id: ClassVar[str] = "topagg"
    votes = True
    finds_non_finite = True

    k: Annotated[int | None, Maybe(Int(1))] = None
    density: Annotated[float | None, Maybe(Real(above=0.0, most=1.0))] = None
    scope: Annotated[str, OneOf(*SCOPES)] = "global"
    saturation: Annotated[float | None, Maybe(Real(above=0.0))] = None
    stochastic: Switch = True

    def conflict(self) -> str:
        """Return why the number of votes is not one."""
        if (self.k is None) != (self.density is None):
            return ""
        return f"give either k or density, the number of votes; got k={self.k!r} and density={self.density!r}"

    def stretches(self, layout: Layout) -> tuple[Stretch, ...]:
        """Return the whole vector, or every tensor of it, as what votes: nothing travels dense.

        Raises
        ------
        ConfigError
            When the policy asks for densities of single tensors and the scope is global, or when fewer votes than
            tensors are to be shared.
        """
        asked = [t.name for t in layout.tensors if t.density not in (None, DENSE)]
        if self.scope == "global":
            if asked:
                raise ConfigError(
                    f"the layout's density policy sets a density for {len(asked)} tensor(s), first {asked[0]!r}, but "
                    "scope='global' ranks the model as one vector; use scope='layer', or a policy of only None and 1.0"
                )
            return (Stretch(0, "the model", 0, layout.size, shape=(layout.size,)),) if layout.size else ()
        tensors = [t for t in layout.tensors if t.size]
        # "Dense" asks for values as they are, which a vote has not: such a tensor votes like any other.
        own = [None if t.density == DENSE else t.density for t in tensors]
        if self.k is not None:
            shares = _shares(self.k, [t.size for t in tensors], own)
            own = [share / t.size for share, t in zip(shares, tensors, strict=True)]
        return tuple(
            Stretch(i, t.name, t.offset, t.offset + t.size, density, t.shape)
            for i, (t, density) in enumerate(zip(tensors, own, strict=True))
        )

    def count(self, stretch: Stretch) -> int:
        """Return the largest number of votes of ``stretch``."""
        if stretch.density is not None:
            return params.count(stretch.density, stretch.size)
        if self.k is not None:
            return min(self.k, stretch.size)
        assert self.density is not None
        return params.count(self.density, stretch.size)

    def total(self, layout: Layout) -> int:
        """Return k of a whole update: what bounds its L2 norm, sqrt(k)."""
        return sum(self.count(s) for s in self.stretches(layout))

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        """Encode the votes of ``update``; see :meth:`fedcomp.codecs.base.Codec.encode`."""
        parts = self.stretches(update.layout)
        try:
            tensors, state = self.pack_all(update.vector, parts, state, key)
        except NonFiniteUpdate:
            require_finite(update)  # names the tensor
            raise
        return _shortest(tensors), state

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        """Parse ``frame`` and check its form, every tensor of it, and in which order its supports are written."""
        bundle = super().open(frame, layout)
        _check_order(bundle)
        return bundle

    def placed(self, bundle: Bundle, layout: Layout) -> Iterator[tuple[Tensor, slice]]:
        """Yield the frame's tensors in the vector's own order, with their places in it."""
        for tensor, where in super().placed(bundle, layout):
            yield _gather(tensor, bundle.flags) if bundle.flags else tensor, where

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        """Return the sparse tensor of votes. Their randomness is drawn from ``key``, one number per coordinate kept."""
        indices = select_topk(values, self.count(stretch))
        kept = values[indices].astype(np.float64)[None]
        drawn = key.uniform(indices.size)[None] if self.stochastic else None
        votes = _cast(kept, _saturation(self.saturation), drawn)[0]
        # An exact zero abstains, so a frame may hold fewer votes than k.
        cast = votes != 0
        return wire.sparse((stretch.size,), indices[cast], UnitSign(votes[cast] < 0))

    def expect(self, stretch: Stretch) -> Expected:
        """Return the stretch's shape, the most votes it may hold, and how their support may be written."""
        most = self.count(stretch)
        # The absent indices are written only where they are fewer: no reason to expand them for a short list.
        return expected_sparse(stretch.size, UnitSign, most, _PLAIN if 2 * most > stretch.size else wire.PLAIN)

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        """Require unit signs on a support that is listed."""
        require_values(tensor, UnitSign, sparse=True)
        if not isinstance(tensor.index, str):
            raise SchemaMismatch(f"{stretch.name}: expected a list of voters' indices, the frame holds {tensor.index}")

    def ballot(self, frame: Frame | Bundle, layout: Layout) -> VoteArray:
        """Return the votes of ``frame`` as int8, shape ``(layout.size,)``, after the checks of :meth:`open`."""
        return self.decode(frame, layout).astype(np.int8)


def _multiplier(n: int, order: int) -> int:
    """Return the factor of ``order`` (4, 8 or 12) for ``n`` elements, which is coprime to n."""
    a = max(1, n * _FACTORS[(order >> 2) - 1] >> 32)
    # Only a factor without a common divisor moves every index to a place of its own, so that it can be undone.
    while math.gcd(a, n) != 1:
        a += 1
    return a


def _scatter(tensor: Tensor, order: int) -> Tensor:
    """Return votes with every index i replaced by ``i a mod n``."""
    return _moved(tensor, _multiplier(tensor.size, order)) if tensor.size else tensor


def _gather(tensor: Tensor, order: int) -> Tensor:
    """Undo :func:`_scatter`."""
    return _moved(tensor, pow(_multiplier(tensor.size, order), -1, tensor.size)) if tensor.size else tensor


def _moved(tensor: Tensor, factor: int) -> Tensor:
    assert tensor.indices is not None
    assert isinstance(tensor.values, UnitSign)
    moved = tensor.indices * factor % tensor.size
    # The wire writes supports in ascending order, and signs move with their indices.
    places = np.argsort(moved)
    return wire.sparse(tensor.shape, moved[places], UnitSign(tensor.values.negative[places]))


def _shortest(tensors: list[Tensor]) -> Frame:
    """Return the shortest frame of votes over the tried orders; the first of equal ones."""
    frames = [wire.encode(tensors)]
    sizes = [tensor.size for tensor in tensors]
    if max(sizes, default=0) < _LONGEST:
        orders = (4, 8, 12) if sum(sizes) <= _FEW else (4,)
        frames += [wire.encode([_scatter(tensor, order) for tensor in tensors], flags=order) for order in orders]
    return min(frames, key=len)


def _check_order(bundle: Bundle) -> None:
    """Refuse a frame with flags other than :data:`ORDER`'s, or with these on vectors that are not scattered."""
    if bundle.flags & ~ORDER:
        raise SchemaMismatch(f"a frame of votes has flags 0, 4, 8 or 12, found {bundle.flags}")
    if bundle.flags and any(tensor.size >= _LONGEST for tensor in bundle.tensors):
        raise SchemaMismatch(f"votes on {_LONGEST} elements or more are never scattered")


def _shares(k: int, sizes: list[int], densities: list[float | None]) -> list[int]:
    """Split ``k`` votes over tensors in proportion to size times density, at least one and at most all of each.

    A tensor without its own density counts with the mean density, k over the sum of sizes.
    """
    total = sum(sizes)
    if k >= total:
        return sizes
    if k < len(sizes):
        raise ConfigError(
            f"k={k} votes cannot be shared by {len(sizes)} tensors with at least one each; raise k, or use "
            "scope='global'"
        )
    mean = k / total
    weights = np.array([n * (mean if d is None else d) for n, d in zip(sizes, densities, strict=True)])
    limits = np.array(sizes, np.float64)
    quotas = np.ones(len(sizes))
    # Tensors whose quota leaves [1, n] are held there, and the others share what is left.
    free = np.ones(len(sizes), np.bool_)
    while free.any():
        left = k - quotas[~free].sum()
        quotas[free] = weights[free] * (left / weights[free].sum())
        over, under = free & (quotas > limits), free & (quotas < 1.0)
        if not (over | under).any():
            break
        # Only the side that moves more votes is settled: holding both at once could hold a tensor for nothing.
        excess = (quotas - limits)[over].sum() - (1.0 - quotas)[under].sum()
        fixed = over if excess > 0 else under
        quotas[fixed] = limits[fixed] if excess > 0 else 1.0
        free &= ~fixed
    # A quota of 3 may come out as 2.999...; it is 3 votes, and no remainder.
    shares = np.floor(quotas + 1e-9).astype(np.int64)
    order = np.argsort(-(quotas - shares), kind="stable")
    for place in order[shares[order] < limits[order]][: k - int(shares.sum())]:
        shares[place] += 1
    return [int(share) for share in shares]


def encode_rows(votes: NDArray[Any]) -> bytes:
    """Return one frame of the votes of several rows: one sparse tensor of shape (rows, d).

    Parameters
    ----------
    votes : integer array of shape (rows, d), each -1, 0 or 1

    Raises
    ------
    ConfigError
        For another shape or other values.
    """
    array = np.asarray(votes)
    if array.ndim != 2 or array.dtype.kind != "i":
        raise ConfigError(f"votes are {array.dtype}{array.shape}; expected signed integers of shape (rows, d)")
    if array.size and (array.max() > 1 or array.min() < -1):
        raise ConfigError("a vote is not -1, 0 or 1")
    flat = array.reshape(-1)
    indices = np.flatnonzero(flat)
    return _shortest([wire.sparse(array.shape, indices, UnitSign(flat[indices] < 0))])


def longest_rows(rows: int, d: int, k: int) -> int:
    """Return a number of bytes that no frame of :func:`encode_rows` exceeds, with ``k`` votes a row at most."""
    return wire.longest((expected_rows(rows, d, k),))


def expected_rows(rows: int, d: int, k: int) -> Expected:
    """Return what a frame of :func:`encode_rows` has to hold, with ``k`` votes a row at most."""
    most = min(k, d)
    allowed = _PLAIN if 2 * most > d else wire.PLAIN
    return Expected(
        "", (rows, d), "float32", rows * most, frozenset({wire.SPARSE}), frozenset(allowed), frozenset({UnitSign.name})
    )


def decode_rows(data: bytes | Bundle, rows: int, d: int, k: int) -> VoteArray:
    """Return the votes of :func:`encode_rows`, int8 of shape (rows, d), after checking all that bounds them.

    Raises
    ------
    fedcomp.wire.WireError
        When the frame is damaged, of another shape or form, or a row holds more than ``k`` votes.
    """
    most, expected = min(k, d), expected_rows(rows, d, k)
    bundle = data if isinstance(data, Bundle) else wire.decode(data, (expected,), Limits.for_schema((expected,)))
    _check_order(bundle)
    tensor = bundle[0]
    require_values(tensor, UnitSign, sparse=True)
    # Back in the rows' own order, in which votes are counted below.
    tensor = _gather(tensor, bundle.flags) if bundle.flags else tensor
    assert tensor.indices is not None
    votes = np.zeros(rows * d, np.int8)
    votes[tensor.indices] = tensor.values.decode().astype(np.int8)
    # Row by row: the frame's schema bounds the votes of all rows together, and one row could hold another's.
    cast = np.bincount(tensor.indices // d, minlength=rows) if rows else np.zeros(1, np.int64)
    if int(cast.max()) > most:
        raise SchemaMismatch(f"row {int(cast.argmax())} holds {int(cast.max())} votes, at most {most} are allowed")
    return votes.reshape(rows, d)


def threshold(total: NDArray[Any], beta_n: float) -> VoteArray:
    """Return ``sign(V)`` where ``|V| > beta_n`` and 0 elsewhere, int8: what passes of a noisy sum of votes.

    Post-processing, which costs nothing as long as ``beta_n`` depends on public numbers only: it is a fraction of the
    number of clients *expected*, never of those that came.

    Raises
    ------
    ConfigError
        When ``beta_n`` is negative or not finite.
    """
    limit = checked("beta_n", beta_n, Real(least=0.0))
    return (np.sign(total) * (np.abs(total) > limit)).astype(np.int8)


def pass_probability(total: float, sigma: float, beta_n: float) -> tuple[float, float]:
    """Return the probabilities that a coordinate passes with the sign of ``total``, and with the other sign.

    Parameters
    ----------
    total : float
        The exact sum of its votes; with 0 the first figure is the probability of +1, the second that of -1.
    sigma : float
        Standard deviation of the noise on the sum, in votes; 0 for none.
    beta_n : float
        The threshold, in votes.

    Notes
    -----
    ``Phi((|V| - t)/sigma)`` and ``Phi(-(|V| + t)/sigma)`` (derived; continuous Gaussian noise, of which the integer
    noise of a fine grid differs by less than the grid).
    """
    size = abs(float(total))
    if sigma < 0.0 or beta_n < 0.0 or not math.isfinite(size + sigma + beta_n):
        raise ConfigError(
            f"total={total!r}, sigma={sigma!r}, beta_n={beta_n!r}: expected finite numbers, two of them >= 0"
        )
    if sigma == 0.0:
        return float(size > beta_n), 0.0
    return _tail((beta_n - size) / sigma), _tail((beta_n + size) / sigma)


def _tail(x: float) -> float:
    return 0.5 * math.erfc(x / math.sqrt(2.0))


def entropy_bits(d: int, k: int, rows: int = 1) -> float:
    """Return ``log2 C(d, k) + k`` bits per row: what k votes of which nothing is known need at least.

    A support that is uniform and signs that are fair coins; real votes can be shorter.
    """
    d, k = params.integer("d", d, low=0), params.integer("k", k, low=0)
    kept = min(k, d)
    # In logarithms: the binomial coefficient itself does not fit into a double.
    logs = math.lgamma(d + 1) - math.lgamma(kept + 1) - math.lgamma(d - kept + 1)
    return rows * (logs / math.log(2.0) + kept)
