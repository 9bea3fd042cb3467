"""Sparse ternary compression: the largest coordinates, as signs times one magnitude (Sattler et al. 2019; recalled).

F. Sattler, S. Wiedemann, K.-R. Müller, W. Samek, "Robust and Communication-Efficient Federated Learning from
Non-i.i.d. Data", IEEE TNNLS 2020, arXiv:1903.02891. There it runs with error feedback, ``ErrorFeedback(STC(density))``,
and compresses the downlink, too. The paper's Golomb-coded gaps are here the wire's choice among its index codecs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcomp import params, wire
from fedcomp.codecs.positional import SCOPES, PositionalCodec, Stretch, expected_sparse, require_values
from fedcomp.kernels import select_topk
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.wire import Expected, SchemaMismatch, Tensor


@dataclass(frozen=True, repr=False, eq=False)
class STC(PositionalCodec):
    """Send the signs of the ``k = max(1, ceil(density * n))`` largest magnitudes, and their mean magnitude μ.

    μ is the mean over the coordinates that travel, not over all: of all scales it leaves the smallest error, which is
    ``‖x‖² - k μ²`` (derived). Rounding μ to float32 adds at most 2⁻⁴⁸ k μ² where μ is a normal number.

    Ties go to the lowest index, as in :class:`~fedcomp.codecs.TopK`. Exact zeros never travel and do not enter the
    mean: a vector with fewer than k other values sends only these.

    Parameters
    ----------
    density : float
        Fraction of coordinates that travels, in (0, 1]; k is rounded up. With ``scope="layer"`` the layout's policy
        may set another one per tensor.
    scope : {"global", "layer"}
        Rank the whole model as one vector with one μ, or every tensor by itself with a μ each.

    Examples
    --------
    >>> STC(density=0.5).preview([0.5, -3.0, 1.0, 0.25])
    array([ 0., -2.,  2.,  0.], dtype=float32)
    """

    codec_id: ClassVar[str] = "stc"
    never_enlarges = True
    finds_non_finite = True

    density: float
    scope: str = "global"

    def __post_init__(self) -> None:
        params.assign(self, density=params.density(self.density), scope=params.choice("scope", self.scope, SCOPES))

    def count(self, stretch: Stretch) -> int:
        """Return k of ``stretch``."""
        return params.count(self.density if stretch.density is None else stretch.density, stretch.size)

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        """Return the sparse tensor of signs on the support of the largest magnitudes."""
        indices = select_topk(values, self.count(stretch))
        kept = values[indices]
        # A zero would lower the mean of the others, and arrive as plus the mean itself.
        if not kept.all():
            indices, kept = indices[kept != 0.0], kept[kept != 0.0]
        return wire.sparse((stretch.size,), indices, wire.SignScale.quantise(kept))

    def expect(self, stretch: Stretch) -> Expected:
        """Return the stretch's shape, the most signs it may carry, and how their support may be written."""
        k = self.count(stretch)
        # The absent indices are written only where they are fewer: no reason to expand them for a short list.
        names = (*wire.PLAIN, "complement") if 2 * k > stretch.size else wire.PLAIN
        return expected_sparse(stretch.size, wire.SignScale, k, names)

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        """Require sparse signs with one scale on a support that is listed."""
        require_values(tensor, wire.SignScale, sparse=True)
        coded = tensor.values
        assert isinstance(coded, wire.SignScale)
        if coded.block or not isinstance(tensor.index, str):
            raise SchemaMismatch(
                f"{stretch.name}: expected a list of indices and one magnitude for all their signs, the frame holds "
                f"{tensor.index} and a magnitude for every {coded.block} (0: all)"
            )

    def contraction(self, layout: Layout) -> float:
        """Return the smallest ``min(k/n, 1/k)`` of all stretches, at least 1/n (derived).

        The energy sent is (sum of the k largest)²/k. Among vectors of given energy it is smallest at one of two ends:
        all magnitudes equal, k/n, or one coordinate that dwarfs the other k - 1, where the common magnitude costs most
        and 1/k is approached. What :class:`~fedcomp.codecs.TopK` keeps of the same support is never less. The factor
        1 - 2⁻⁴⁸ is the rounding of μ; vectors with μ below 1.2e-38 are excepted.
        """
        kept = [(self.count(s), s.size) for s in self.stretches(layout)]
        return (1.0 - 2.0**-48) * min((min(k / n, 1.0 / k) for k, n in kept), default=1.0)
