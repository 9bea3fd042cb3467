"""Left factors of outer products built from a few slopes and many signs, where one seed generates all signs.

What comes back to a layer's output, measured along random signs in place of being back-propagated, is one slope for
each example and pass times signs that whoever knows the seed draws again (derived from Ren, Kornblith, Liao, Hinton,
"Scaling forward gradient with local losses", ICLR 2023, abstract and configuration read).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedcomp.rng import Key, signs_of


@dataclass(frozen=True, eq=False)
class SignedRows:
    """Rows that are the sum over all passes of a slope times signs, float32 of shape (n, width).

    Attributes
    ----------
    slopes : float32 array, shape (n, passes)
        As they are added: what they are divided by is in them.
    seed : int
        Eight bytes that name the signs, with ``name``.
    name : str
        Of the matrix whose left sides they are.
    width : int
        Rows of that matrix.
    start : int
        Rows of the same signs that were drawn before these.

    Examples
    --------
    >>> rows = SignedRows(np.float32([[0.5], [2.0]]), seed=7, name="w", width=4)
    >>> np.abs(rows.matrix())
    array([[0.5, 0.5, 0.5, 0.5],
           [2. , 2. , 2. , 2. ]], dtype=float32)
    """

    slopes: NDArray[np.float32]
    seed: int
    name: str
    width: int
    start: int = 0

    def signs(self, passed: int) -> NDArray[np.float32]:
        """Return the signs of one pass, float32 of shape (n, width).

        A row begins at a word of its own, so that rows drawn together are those drawn one after the other.
        """
        words = -(-self.width // 64)
        stream = Key(self.seed, f"signs/{self.name}", layer=passed)
        drawn = stream.bits(len(self.slopes) * words, start=self.start * words)
        return signs_of(drawn.reshape(len(self.slopes), words), self.width)

    def matrix(self) -> NDArray[np.float32]:
        """Return the rows: products are exact, and added in the order of the passes, so that both ends have the same
        bits."""
        out = np.zeros((len(self.slopes), self.width), np.float32)
        for passed in range(self.slopes.shape[1]):
            out += self.slopes[:, passed, None] * self.signs(passed)
        return out

    def scaled(self, factor: float) -> SignedRows:
        """Return ``factor`` times the rows."""
        return replace(self, slopes=self.slopes * np.float32(factor))

    def followed_by(self, other: SignedRows) -> SignedRows | None:
        """Return these rows and those of ``other``; None where the signs of ``other`` are not the ones that follow."""
        follows = replace(self, start=self.start + len(self.slopes), slopes=other.slopes)
        if (follows.seed, follows.name, follows.start) != (other.seed, other.name, other.start):
            return None
        if self.slopes.shape[1] != other.slopes.shape[1]:
            return None
        return replace(self, slopes=np.concatenate([self.slopes, other.slopes]))
