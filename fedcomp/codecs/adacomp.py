"""AdaComp: in each bin of a layer, sends the values that a look-ahead step lifts to the bin's maximum, with one scale.

Chen, Choi, Brand, Agrawal, Zhang, Gopalakrishnan, "AdaComp: Adaptive Residual Gradient Compression for Data-Parallel
Distributed Training", AAAI 2018, arXiv:1712.02679. The abstract was read; the algorithm is recalled. It reproduces the
abstract's ratios, and its scale is the least-squares optimum (both derived). Edge cases are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedcomp import wire
from fedcomp.codecs.base import State, all_finite
from fedcomp.codecs.forms import FORMS, RESTS, ValueForm
from fedcomp.codecs.memory import not_finite, vector_of
from fedcomp.codecs.positional import PositionalCodec, Stretch, expected_sparse, require_values
from fedcomp.errors import NonFiniteUpdate
from fedcomp.kernels import adaptive_step, select_bins
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.rules import Int, OneOf, Real, Switch
from fedcomp.wire import Bundle, Expected, Frame, SchemaMismatch, Tensor

# The wire's bins are no longer than that.
_LONGEST_BIN = 1 << 62


@dataclass(frozen=True, repr=False, eq=False)
class AdaComp(PositionalCodec):
    """Send the elements of every bin that the current update lifts to the bin's largest magnitude.

    Per tensor, with this round's update g and bins of L consecutive elements::

        G = residue + g
        H = G + (factor - 1) * g                       # a look-ahead: one more step of the update
        send j  when  |H_j| >= max |G| of its bin,  and G_j is not 0
        s = mean over all bins of max |G|              # one scale for the tensor, as float32
        q_j = s * sign(G_j) of sent j
        residue = G - q                                # sent elements keep their error against s

    The density cannot be set; it results from the data. Where the update agrees with the residue, several elements of a
    bin are sent; where it opposes the residue, perhaps none. In federated use g is the whole local update of the round.

    This is not a contraction: with the look-ahead the error can exceed ‖G‖². Twenty bins, one with a spike of 10, the
    others of 0.001 with g = G, give 3.28 ‖G‖² (derived, measured), because all the small elements are sent as s.
    Conservation holds: the sum of what was sent plus the residue equals the sum of all updates, up to one float32
    rounding each. If exactly the largest element of every bin is sent, the error is ‖G‖² - B s² with B bins (derived).

    Every tensor has its own scale and bins, regardless of the layout; densities of single tensors are refused. Signs
    and scale travel as :class:`~fedcomp.wire.SignScale`, the support as packed offsets within bins or as "auto" would
    write it, whichever is shorter.

    Parameters
    ----------
    bin : int
        Elements per bin, L, in fully connected, recurrent and embedding layers, at least 1.
    conv_bin : int
        L in convolutional layers: tensors of three and more dimensions.
    factor : float
        The soft threshold's factor, at least 1. With 1 there is no look-ahead: only each bin's largest magnitudes are
        sent.
    guard : bool
        Our addition: a tensor whose error would exceed ‖G‖², that is s·m > 2 Σ |G| over its m sent elements, sends the
        largest element of every bin instead. The error then never exceeds ‖G‖² (up to float32 rounding of s).
    rest : {"float32", "bf16", "q8"}
        How the dense rest travels; the residue keeps what is rounded away.

    Notes
    -----
    State: ``memory``, the residue, float32 of the vector's size; what travels dense as float32 leaves none. Two vectors
    of that size are held at once, the old and the new residue.

    Examples
    --------
    >>> AdaComp(bin=2).preview([0.5, -3.0, 1.0, 0.25])
    array([ 0., -2.,  2.,  0.], dtype=float32)
    """

    codec_id: ClassVar[str] = "adacomp"
    remembers = True
    scope = "layer"
    takes_densities = False

    bin: Annotated[int, Int(1, _LONGEST_BIN)] = 500
    conv_bin: Annotated[int, Int(1, _LONGEST_BIN)] = 50
    factor: Annotated[float, Real(least=1.0, most=1e6)] = 2.0
    guard: Switch = False
    rest: Annotated[str, OneOf(*RESTS[1:])] = "float32"

    @property
    def rest_form(self) -> ValueForm:
        return FORMS[self.rest]

    def length(self, stretch: Stretch) -> int:
        """Return the elements per bin of ``stretch``."""
        return self.conv_bin if len(stretch.shape) >= 3 else self.bin

    def init(self, layout: Layout) -> State:
        self.stretches(layout)
        return {"memory": np.zeros(layout.size, np.float32)}

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        layout = update.layout
        residue = vector_of(state, "memory", layout)
        # An array of its own, because a step that meets NaN spoils the one it writes to.
        left = np.empty_like(residue)
        parts = self.stretches(layout)
        # Sums that overflow are reported as what they are; before that they must not warn.
        with np.errstate(over="ignore", invalid="ignore"):
            try:
                tensors = [self._step(residue[s.slice], update.vector[s.slice], s, left[s.slice]) for s in parts]
            except NonFiniteUpdate:
                raise not_finite(update, {"memory": residue}) from None
            rest = slice(parts[-1].stop if parts else 0, None)
            # A frame that was lost left its dense tensors here.
            dense = np.add(residue[rest], update.vector[rest], out=left[rest])
            if not all_finite(dense):
                raise not_finite(update, {"memory": residue})
        frame = self.frame_of(tensors, dense)
        # Only after the frame was encoded: this is a view of the new residue.
        dense -= self.rest_form.code(dense).decode()
        return frame, {"memory": left}

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        """Return the tensor of a first round, without residue."""
        return self._step(np.zeros_like(values), values, stretch, np.empty_like(values))

    def _step(self, residue: Vector, update: Vector, stretch: Stretch, out: Vector) -> Tensor:
        """Return the tensor of ``stretch``, and write the new residue to ``out``."""
        length = self.length(stretch)
        step = adaptive_step(residue, update, length, self.factor, out=out)
        indices, negative, scale = step.indices, step.negative, np.float32(step.scale)
        if self.guard:
            total = residue[indices] + update[indices]
            # Sending m elements as s adds s * (s * m - 2 * sum of |G|) to the squared norm of the residue.
            if step.scale * indices.size > 2.0 * float(np.abs(total).sum(dtype=np.float64)):
                # The step has already subtracted the scale there; the sum is put back before bins are searched again.
                out[indices] = total
                indices = select_bins(out, length)
                indices = indices[out[indices] != 0.0]
                negative = out[indices] < 0.0
                out[indices] -= np.where(negative, -scale, scale)
        if scale == 0.0:  # nothing but zeros, or a mean below the smallest float32
            indices, negative = indices[:0], negative[:0]
        coded = wire.SignScale(negative, np.full(min(1, indices.size), scale))
        return wire.sparse((stretch.size,), indices, coded, index=f"auto+bins:{length}")

    def rollback(self, state: State, frame: Frame, layout: Layout) -> State:
        """Return ``state`` with what ``frame`` holds back in the residue, each element to one float32 rounding."""
        residue = vector_of(state, "memory", layout).copy()
        self.accumulate(frame, 1.0, Update(residue, layout))
        return {**state, "memory": residue}

    def per_bin(self, frame: Frame | Bundle, layout: Layout) -> dict[str, float]:
        """Return by tensor how many elements ``frame`` sends per bin, on average: how far the codec adapted."""
        bundle = self.open(frame, layout)
        return {
            s.name: tensor.values.k / -(-s.size // self.length(s))
            for tensor, s in zip(bundle.tensors, self.stretches(layout), strict=False)
        }

    def expect(self, stretch: Stretch) -> Expected:
        return expected_sparse(stretch.size, wire.SignScale, stretch.size, (*wire.PLAIN, "complement", "bins"))

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        require_values(tensor, wire.SignScale, sparse=True)
        coded = tensor.values
        assert isinstance(coded, wire.SignScale)
        if not isinstance(tensor.index, str) or coded.block:
            raise SchemaMismatch(
                f"{stretch.name}: expected a list of indices and one scale, the frame holds {tensor.index} and a scale "
                f"for every {coded.block or coded.k} values"
            )
