"""Chunked top-k: the largest coordinates of every chunk, without a global threshold.

One of every chunk is ScaleCom's chunk-wise quasi-sort (Chen et al. 2020, arXiv:2104.11125; recalled) as a codec of its
own, a few bits per index. Several of every chunk is how SparseLoCo selects (2025; abstract read, details recalled).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from fedcomp import params
from fedcomp.codecs.forms import FORMS, RESTS
from fedcomp.codecs.listed import INDICES, ListedCodec
from fedcomp.codecs.positional import SCOPES, Stretch, with_rest
from fedcomp.kernels import select_bins, select_of_bins
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.rules import Density, Int, OneOf
from fedcomp.wire import Expected, Tensor

_LONGEST_CHUNK = 1 << 40


@dataclass(frozen=True, repr=False, eq=False)
class ChunkTop1(ListedCodec):
    """Send the coordinate of largest magnitude of every chunk of ``c = round(1 / density)`` consecutive coordinates.

    Of n coordinates ``k = ceil(n / c)`` are chosen, one per chunk, the last of which may be shorter; ties go to the
    lowest index. Chosen coordinates that are zero do not travel, nor do those fp16 or bf16 round to zero: the frame of
    a zero vector is empty. An index costs ``ceil(log2 c)`` bits where every chunk sends one; otherwise the support is
    written in whichever way is shortest.

    Selection is one pass without a threshold, but a chunk that holds little sends as much as one that holds everything,
    so that tensors of different scale belong in chunks of their own. The gradients of a digits network kept 0.18 of
    their energy in chunks of 100, and 0.48 under top-k at the same density (measured).

    Parameters
    ----------
    density : float
        1/c, in (0, 1]; c is rounded to an integer, halves to the even one, so that 0.3 is a chunk of 3 and everything
        above 2/3 one of 1. With ``scope="layer"`` the layout's policy may set another density per tensor.
    scope : {"layer", "global"}
        Chunks of every tensor by itself, or of the whole model as one vector, where they straddle its tensors.
    values, rest : str
        How the chosen values and the dense rest travel, as for :class:`~fedcomp.codecs.TopK`.

    Examples
    --------
    >>> ChunkTop1(density=0.5).preview([0.5, -3.0, 1.0, 0.25])
    array([ 0., -3.,  1.,  0.], dtype=float32)
    """

    codec_id: ClassVar[str] = "chunk"
    finds_non_finite = True
    index = "auto"

    density: Density
    scope: Annotated[str, OneOf(*SCOPES)] = "layer"
    values: Annotated[str, OneOf(*FORMS)] = "float32"
    rest: Annotated[str, OneOf(*RESTS)] = "auto"

    def chunk(self, stretch: Stretch) -> int:
        """Return c of ``stretch``, at most its size."""
        density = self.density if stretch.density is None else params.to_float(stretch.density)
        # 1 / density may be beyond float64; a chunk is never longer than the stretch.
        return min(round(1.0 / density), stretch.size) if density * stretch.size > 0.5 else stretch.size

    def most(self, stretch: Stretch) -> int:
        return -(-stretch.size // self.chunk(stretch))

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        chunk = self.chunk(stretch)
        indices = select_bins(values, chunk)
        # The shorter of the two is never longer than "auto", by which `longest` bounds the frame.
        return replace(self.listed(indices, values[indices], stretch), index=f"auto+bins:{chunk}")

    def expect(self, stretch: Stretch) -> Expected:
        expected = super().expect(stretch)
        return replace(expected, index_codecs=(expected.index_codecs or frozenset()) | {"bins"})

    def contraction(self, layout: Layout) -> float | None:
        """Return 1/c of the longest chunk: the largest square of a chunk is at least the mean of its squares (derived).

        Reached by equal magnitudes in chunks of full length. Times what the form of the values keeps, as for
        :class:`~fedcomp.codecs.TopK`.
        """
        form = self.value_form
        bounds = [
            None if (kept := form.kept(self.most(s))) is None else kept / self.chunk(s) for s in self.stretches(layout)
        ]
        return with_rest(self, bounds, layout)


@dataclass(frozen=True, repr=False, eq=False)
class ChunkTopK(ListedCodec):
    """Send the ``k = max(1, ceil(density * c))`` largest coordinates of every chunk of c consecutive coordinates.

    The last chunk of a tensor is usually shorter and sends as many as the density asks of it; ties go to the lowest
    index. Coordinates that are zero, or are rounded to zero, do not travel.

    Parameters
    ----------
    density : float
        Fraction of every chunk that travels, in (0, 1]. With ``scope="layer"`` the layout's policy may set another one
        per tensor.
    chunk : int
        c, at least 1.
    scope : {"layer", "global"}
        Chunks of every tensor by itself, or of the whole model as one vector, where they straddle its tensors.
    values, rest, index : str
        As of :class:`~fedcomp.codecs.TopK`.

    Examples
    --------
    >>> ChunkTopK(density=0.5, chunk=4).preview([0.5, -3.0, 1.0, 0.25, 7.0, 5.0, 6.0, 8.0])
    array([ 0., -3.,  1.,  0.,  7.,  0.,  0.,  8.], dtype=float32)
    """

    codec_id: ClassVar[str] = "chunk-topk"
    finds_non_finite = True

    density: Density
    chunk: Annotated[int, Int(1, _LONGEST_CHUNK)] = 4096
    scope: Annotated[str, OneOf(*SCOPES)] = "layer"
    values: Annotated[str, OneOf(*FORMS)] = "float32"
    index: Annotated[str, OneOf(*INDICES)] = "auto"
    rest: Annotated[str, OneOf(*RESTS)] = "auto"

    def counts(self, stretch: Stretch) -> tuple[int, int]:
        """Return how many of a full chunk of ``stretch`` travel, and how many of a shorter last one (0: none is)."""
        density = self.density if stretch.density is None else stretch.density
        left = stretch.size % self.chunk
        return params.count(density, self.chunk), params.count(density, left) if left else 0

    def most(self, stretch: Stretch) -> int:
        full, last = self.counts(stretch)
        return stretch.size // self.chunk * full + last

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        indices = select_of_bins(values, self.chunk, *self.counts(stretch))
        return self.listed(indices, values[indices], stretch)

    def contraction(self, layout: Layout) -> float | None:
        """Return the smallest k/c of all chunks, times what the form of the values keeps (derived).

        Of every chunk at least k/c of its energy is chosen, with equality for equal magnitudes.
        """
        bounds = []
        for stretch in self.stretches(layout):
            full, last = self.counts(stretch)
            shares = [full / self.chunk] if stretch.size >= self.chunk else []
            shares += [last / (stretch.size % self.chunk)] if last else []
            kept = self.value_form.kept(self.most(stretch))
            bounds.append(None if kept is None else kept * min(shares))
        return with_rest(self, bounds, layout)
