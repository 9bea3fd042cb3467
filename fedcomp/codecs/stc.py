"""Sparse ternary compression: the largest coordinates, as signs times one magnitude (Sattler et al. 2019; recalled).

F. Sattler, S. Wiedemann, K.-R. Müller, W. Samek, "Robust and Communication-Efficient Federated Learning from
Non-i.i.d. Data", IEEE TNNLS 2020, arXiv:1903.02891. There it runs with error feedback, ``ErrorFeedback(STC(density))``,
and compresses the downlink, too. The paper's Golomb-coded gaps are here the wire's choice among its index codecs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedcomp import params
from fedcomp.codecs.forms import RESTS
from fedcomp.codecs.listed import ListedCodec
from fedcomp.codecs.positional import SCOPES, Stretch, with_rest
from fedcomp.kernels import select_topk
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.rules import Density, OneOf
from fedcomp.wire import Tensor


@dataclass(frozen=True, repr=False, eq=False)
class STC(ListedCodec):
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
    rest : {"float32", "bf16", "q8"}
        How the dense rest travels; error feedback keeps what is rounded away.

    Examples
    --------
    >>> STC(density=0.5).preview([0.5, -3.0, 1.0, 0.25])
    array([ 0., -2.,  2.,  0.], dtype=float32)
    """

    codec_id: ClassVar[str] = "stc"
    finds_non_finite = True
    values = "sign"
    index = "auto"

    density: Density
    scope: Annotated[str, OneOf(*SCOPES)] = "global"
    rest: Annotated[str, OneOf(*RESTS[1:])] = "float32"

    def most(self, stretch: Stretch) -> int:
        return params.count(self.density if stretch.density is None else stretch.density, stretch.size)

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        indices = select_topk(values, self.most(stretch))
        return self.listed(indices, values[indices], stretch)

    def contraction(self, layout: Layout) -> float | None:
        """Return the smallest ``min(k/n, 1/k)`` of all stretches, at least 1/n (derived).

        The energy sent is (sum of the k largest)²/k. Among vectors of given energy it is smallest at one of two ends:
        all magnitudes equal, k/n, or one coordinate that dwarfs the other k - 1, where the common magnitude costs most
        and 1/k is approached. What :class:`~fedcomp.codecs.TopK` keeps of the same support is never less. The factor
        1 - 2⁻⁴⁸ is the rounding of μ; vectors with μ below 1.2e-38 are excepted.
        """
        form = self.value_form
        return with_rest(self, [form.kept_of_top(self.most(s), s.size) for s in self.stretches(layout)], layout)
