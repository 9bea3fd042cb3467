"""A matrix as a sum of outer products, and its best approximation by fewer of them.

For a linear map z = W x + b the gradient of W is the sum over all rows of a batch of (dloss/dz)(x)', and that of b the
sum of dloss/dz: two thin matrices say what one of the layer's size says. Baker, Calhoun, Pearlmutter, Plis, "Peering
Beyond the Gradient Veil with Distributed Auto Differentiation", arXiv:2102.09631 (abstract; their code was read).

All sums are in float64, so that no result depends on the number of BLAS threads beyond what float32 rounds away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.factors.signed import SignedRows
from fedcomp.rng import Key
from fedcomp.rules import BelowOne, Configured, Int, OneOf

Rows = NDArray[np.float32]
Real = NDArray[np.float64]

SOLVERS: Final = ("auto", "qr", "power")
STOPS: Final = ("sigma", "distance")

FEW: Final = 128
"""Rows up to which "auto" takes the exact solver: it costs rows^2 (m + p)."""

_NOISE: Final = 16.0 * float(np.finfo(np.float32).eps)
"""A singular value this small relative to the largest is zero up to float32 rounding."""

_LEAST: Final = -96
_MOST: Final = 126
"""Exponents of the largest magnitude of a left side for which float32 keeps all digits."""

ONE_THREAD: Final = 1 << 18
"""Multiplications in a product of matrices up to which OpenBLAS uses one thread."""

_TILE: Final = 64

MOST_PRODUCTS: Final = 1 << 42
"""Multiplications that the power iterations of one matrix may take: some ten minutes. Rank and iterations may come from
a server."""


@dataclass(frozen=True, eq=False)
class OuterProducts:
    """A matrix of m rows and p columns: the sum over i of ``left[i]`` times ``right[i]'``.

    Attributes
    ----------
    left : float32 array, shape (n, m)
        For a layer: what came back to each row of its output, times minus the step size.
    right : float32 array, shape (n, p)
        Its inputs.
    at_input : bool
        Whether ``right`` holds what the model was given, rows of the data themselves.
    signed : SignedRows, optional
        Slopes and signs of which ``left`` is made, see :meth:`of_signed`.
    """

    left: Rows
    right: Rows
    at_input: bool = False
    signed: SignedRows | None = None

    @classmethod
    def of_signed(cls, signed: SignedRows, right: Rows, at_input: bool = False) -> OuterProducts:
        """Return the outer products whose left sides are slopes times signs."""
        return cls(signed.matrix(), right, at_input, signed)

    @property
    def count(self) -> int:
        """How many outer products there are."""
        return len(self.left)

    def matrix(self) -> Rows:
        """Return the matrix, float32 of shape (m, p)."""
        out = np.zeros((self.left.shape[1], self.right.shape[1]), np.float32)
        add_outer(out, self.left, self.right)
        return out

    def scaled(self, factor: float) -> OuterProducts:
        """Return the outer products of ``factor`` times the matrix."""
        if self.signed is not None:
            return self.of_signed(self.signed.scaled(factor), self.right, self.at_input)
        return OuterProducts(self.left * np.float32(factor), self.right, self.at_input)

    def beside(self, other: OuterProducts) -> OuterProducts:
        """Return the outer products of the sum of two matrices."""
        sides = ((self.left, other.left), (self.right, other.right))
        left, right = (np.concatenate(pair) for pair in sides)
        signed = self.signed.followed_by(other.signed) if self.signed and other.signed else None
        return OuterProducts(left, right, self.at_input or other.at_input, signed)

    def norm(self) -> float:
        """Return the Frobenius norm of the matrix, which is not formed."""
        return math.sqrt(max(0.0, inner(self, self)))


def inner(a: OuterProducts, b: OuterProducts) -> float:
    """Return the sum over all entries of the product of two matrices of one shape; neither is formed."""
    sides = ((a.left, b.left), (a.right, b.right))
    left, right = (np.asarray(x, np.float64) @ np.asarray(y, np.float64).T for x, y in sides)
    return float((left * right).sum())


def add_outer(out: NDArray[Any], left: NDArray[Any], right: NDArray[Any], scale: float = 1.0) -> None:
    """Do ``out += scale * left.T @ right`` in place: summed in float64, rounded, then scaled and added in out's dtype.

    Parameters
    ----------
    out : float array, shape (m, p)
    left, right : float arrays, shapes (n, m) and (n, p)
    """
    m, p = out.shape
    across = max(1, ONE_THREAD // (_TILE * max(1, len(left))))
    wide = np.asarray(right, np.float64)
    for top in range(0, m, _TILE):
        tall = np.asarray(left[:, top : top + _TILE], np.float64).T
        for start in range(0, p, across):
            into = out[top : top + _TILE, start : start + across]
            into += out.dtype.type(scale) * (tall @ wide[:, start : start + across]).astype(out.dtype)


@dataclass(frozen=True, slots=True)
class Reduction(Configured):
    """How a matrix becomes few outer products.

    Parameters
    ----------
    rank : int
        The most that are kept.
    iterations : int
        Power iterations for each, of the solver "power".
    theta : float
        One whose singular value is at most this part of the largest ends the search, in [0, 1).
    solver : {"auto", "qr", "power"}
        "qr": the best sum of so many, by QR of both sides and the SVD of a small core. "power": one after the other by
        power iterations with deflation, from random starts. "auto": "qr" up to 128 rows, "power" above.
    stop : {"sigma", "distance"}
        "distance" is the rule of the authors' code (read), for "power": a direction within ``theta`` of the one before
        it ends the search, whatever its singular value.

    Raises
    ------
    ConfigError
        For anything else.
    """

    rank: Annotated[int, Int(1)] = 10
    iterations: Annotated[int, Int(1)] = 3
    theta: BelowOne = 1e-3
    solver: Annotated[str, OneOf(*SOLVERS)] = "auto"
    stop: Annotated[str, OneOf(*STOPS)] = "sigma"

    def of(self, given: OuterProducts, key: Key) -> OuterProducts:
        """Return at most ``rank`` outer products whose sum is near that of ``given``: orthogonal left sides, with the
        singular values as their lengths, and right sides of length 1, the largest first. Where float32 cannot hold such
        a length, a power of two is moved from one side to the other.

        Their number is the effective rank. The squared error is what the squares of the singular values lack of the
        squared norm of the matrix.
        """
        n, m, p = given.count, given.left.shape[1], given.right.shape[1]
        if n >= min(m, p):
            # No thinner than the matrix itself.
            return self.of_matrix(given.matrix(), key)
        b, c = given.left.T.astype(np.float64), given.right.T.astype(np.float64)
        if self.solver == "qr" or (self.solver == "auto" and n <= FEW):
            return self._exact(b, c)
        gram = c.T @ c
        self._require_worth(n * (m + p), m, p)
        return self._powers(lambda v: b @ (gram @ (b.T @ v)), lambda v: c @ (b.T @ v), m, p, key)

    def of_matrix(self, matrix: NDArray[Any], key: Key) -> OuterProducts:
        """Return the same of a matrix that is given in full, shape (m, p)."""
        m, p = matrix.shape
        wide = matrix.astype(np.float64)
        if self.solver == "qr" or (self.solver == "auto" and min(m, p) <= FEW):
            return self._exact(wide, np.eye(p)) if m > p else self._exact(np.eye(m), wide.T)
        self._require_worth(m * p, m, p)
        return self._powers(lambda v: wide @ (wide.T @ v), lambda v: wide.T @ v, m, p, key)

    def _require_worth(self, products: int, m: int, p: int) -> None:
        """Refuse power iterations that would take too long with this number of products each, since the server chooses
        their number."""
        steps = min(self.rank, m, p) * self.iterations
        if steps * products > MOST_PRODUCTS:
            raise ConfigError(
                f"rank={self.rank} with iterations={self.iterations} takes {steps} steps on a matrix of {m} by {p}: "
                f"more than {MOST_PRODUCTS} products; lower them"
            )

    def _exact(self, b: Real, c: Real) -> OuterProducts:
        """Return the best sum for ``b @ c.T``."""
        if not b.any() or not c.any():
            return _none(len(b), len(c))
        (left, r_left), (right, r_right) = np.linalg.qr(b), np.linalg.qr(c)
        u, sigma, v = np.linalg.svd(r_left @ r_right.T)
        kept = int(np.count_nonzero(sigma[: self.rank] > max(self.theta, _NOISE) * sigma[0])) if sigma[0] > 0.0 else 0
        return _result((left @ u[:, :kept]) * sigma[:kept], right @ v[:kept].T)

    def _powers(
        self, square: Callable[[Real], Real], across: Callable[[Real], Real], m: int, p: int, key: Key
    ) -> OuterProducts:
        """Return directions, found one after the other; ``square`` is M M', ``across`` is M'."""
        found, sides, sigmas = np.zeros((0, m)), np.zeros((0, p)), np.zeros(0)
        for number in range(min(self.rank, m, p)):
            v = _beside(key.at(layer=number).uniform(m) - 0.5, found)
            if v is None:
                break
            for _ in range(self.iterations):
                u = square(v)
                u = u - (sigmas**2 * (found @ v)) @ found
                following = _unit(u)
                if following is None:
                    break
                v = following
            if self.stop == "distance" and number and np.linalg.norm(v - found[-1]) < self.theta:
                break
            # Few iterations leave a rest along earlier directions, and their lengths would count twice.
            v = _beside(v, found)
            if v is None:
                break
            side = across(v)
            sigma = float(np.linalg.norm(side))
            least = _NOISE if self.stop == "distance" else max(self.theta, _NOISE)
            if sigma == 0.0 or not math.isfinite(sigma) or (number and sigma <= least * sigmas.max()):
                break
            found, sides, sigmas = np.vstack([found, v]), np.vstack([sides, side / sigma]), np.append(sigmas, sigma)
        order = np.argsort(-sigmas, kind="stable")
        return _result((found * sigmas[:, None])[order].T, sides[order].T)


def _beside(vector: Real, found: Real) -> Real | None:
    """Return the unit vector of the part of ``vector`` orthogonal to orthonormal rows; None if it is rounding noise.

    Once the rank of a matrix is found, deflation leaves only rounding errors. They point in any direction, also along
    earlier rows, whose part would then count twice.
    """
    left = vector
    # Twice: one pass leaves a rest where most of the vector cancels.
    for _ in range(2):
        left = left - (found @ left) @ found
    return _unit(left) if float(np.linalg.norm(left)) > _NOISE * float(np.linalg.norm(vector)) else None


def _unit(vector: Real) -> Real | None:
    length = float(np.linalg.norm(vector))
    return vector / length if 0.0 < length < math.inf else None


def _none(m: int, p: int) -> OuterProducts:
    return OuterProducts(np.zeros((0, m), np.float32), np.zeros((0, p), np.float32))


def _result(left: Real, right: Real) -> OuterProducts:
    # A singular value may leave float32's range where no entry of the matrix does. A power of two from one side to the
    # other changes no bit of their product.
    exponent = np.frexp(np.abs(left).max(axis=0, initial=0.0))[1]
    shift = np.clip(exponent, _LEAST, _MOST) - exponent
    left, right = np.ldexp(left, shift), np.ldexp(right, -shift)
    return OuterProducts(np.ascontiguousarray(left.T, np.float32), np.ascontiguousarray(right.T, np.float32))
