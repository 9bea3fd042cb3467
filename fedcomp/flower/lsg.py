"""What the server of an LSG run and its clients say to each other, beside the model.

Down: an :class:`LsgRequest`, the carriers, and the kept coordinates where the seed does not say which they are. Up: one
frame with as many float32 as coordinates are kept, in their order; no indices, no metrics.

Carriers travel, though a seed could name them: floating point differs between machines, and a client that projected
onto slightly other carriers would be undone by the wrong ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.flower.payload import PayloadError, put_frame, take_frame
from fedcomp.flower.schema import Schema
from fedcomp.layout import Layout
from fedcomp.privacy.lsg import Carriers, LowRankPlan, count_kept, kept
from fedcomp.rng import Key
from fedcomp.rules import Flag, Int, Real, Text
from fedcomp.wire import Expected
from fedcomp.wire.limits import DENSE, SPARSE

HEADER: Final = "fedcomp.lsg"
"""Name of the ConfigRecord that asks."""

CARRIERS: Final = "fedcomp.lsg.carriers"
KEPT: Final = "fedcomp.lsg.kept"
UPDATE: Final = "fedcomp.lsg.update"
"""Keys of the frames with carriers and coordinates, down, and with the update, up."""

SLACK: Final = 1e-5
"""How far beyond the clip norm an update may be, relatively: float32 rounds what a client has clipped."""


@dataclass(frozen=True)
class LsgRequest(Schema, key=HEADER):
    """What every message of a round says.

    Attributes
    ----------
    rank : int
        Of the carriers.
    whole : str
        Patterns of names that stay whole, separated by spaces.
    share : float
        Fraction of the coordinates that is kept.
    draw : int
        The public word the kept coordinates are drawn from.
    clip : float
        L2 norm that an update has at most, over all that is kept.
    chosen : bool
        The kept coordinates come along; they are not drawn.
    """

    rank: Annotated[int, Int(most=1 << 20)]
    whole: Annotated[str, Text(4096)]
    share: Annotated[float, Real(above=0.0, most=1.0)]
    draw: Annotated[int, Int(least=-(2**63))]
    clip: Annotated[float, Real(above=0.0)]
    chosen: Annotated[bool, Flag()]

    def plan(self, layout: Layout) -> LowRankPlan:
        """Return how the model of ``layout`` is shortened."""
        return LowRankPlan.of({t.name: t.shape for t in layout.tensors}, self.rank, self.whole.split())


def put_carriers(content: RecordDict, pairs: Carriers) -> None:
    """Write the carriers; nothing where no tensor is factored."""
    carriers = [carrier for pair in pairs if pair is not None for carrier in pair]
    if carriers:
        put_frame(content, CARRIERS, wire.encode([wire.dense(carrier) for carrier in carriers]))


def take_carriers(content: RecordDict, plan: LowRankPlan) -> Carriers:
    """Return the carriers that ``plan`` needs.

    Raises
    ------
    PayloadError, WireError
        When there are none, or others.
    """
    shapes = [shape for p in plan.factored for shape in ((p.matrix[0], p.rank), (p.rank, p.matrix[1]))]
    if not shapes:
        return tuple(None for _ in plan.pieces)
    frame = take_frame(content, CARRIERS)
    if frame is None:
        raise PayloadError("the message brings no carriers, and the model has matrices to be factored")
    # Shapes follow from the receiver's own plan, never from the frame.
    expect = tuple(Expected("", shape, kinds=frozenset({DENSE})) for shape in shapes)
    found = [np.asarray(t.values.decode(), np.float32).reshape(t.shape) for t in wire.decode(frame, expect).tensors]
    # Left and right carriers alternate, as put_carriers() writes them.
    pairs = iter(zip(found[::2], found[1::2], strict=True))
    return tuple(next(pairs) if piece.rank else None for piece in plan.pieces)


def put_kept(content: RecordDict, size: int, chosen: NDArray[np.int64]) -> None:
    """Write which of ``size`` coordinates are kept."""
    # Positions alone: ones take no bytes as values.
    put_frame(content, KEPT, wire.encode([wire.sparse((size,), chosen, wire.Ones(chosen.size))]))


def take_kept(content: RecordDict, request: LsgRequest, size: int) -> NDArray[np.int64]:
    """Return which of ``size`` coordinates are kept, ascending: drawn from the public word, or as they came.

    Raises
    ------
    PayloadError, WireError
        When they should have come and have not, or are too many or too few.
    """
    # A draw that both sides repeat takes no bytes.
    if not request.chosen:
        return drawn(request, size)
    frame = take_frame(content, KEPT)
    if frame is None:
        raise PayloadError("the message does not say which coordinates are kept, and no seed does")
    count = count_kept(size, request.share)
    expect = Expected("", (size,), max_k=count, kinds=frozenset({SPARSE}), value_codecs=frozenset({"ones"}))
    indices = wire.decode(frame, (expect,)).tensors[0].indices
    if indices is None or len(indices) != count:
        raise PayloadError(f"{0 if indices is None else len(indices)} coordinates are to be kept, expected {count}")
    return np.asarray(indices, np.int64)


def drawn(request: LsgRequest, size: int) -> NDArray[np.int64]:
    """Return the coordinates that the public word keeps of ``size``."""
    return kept(size, request.share, Key(request.draw, "lsg/kept"))


def pack(update: NDArray[np.float32]) -> bytes:
    """Return the frame of an update's kept coordinates."""
    return wire.encode([wire.dense(np.ascontiguousarray(update, np.float32))])


def unpack(frame: bytes, count: int) -> NDArray[np.float32]:
    """Return an update of ``count`` kept coordinates.

    Raises
    ------
    WireError
        When the frame holds anything else.
    """
    expect = Expected("", (count,), kinds=frozenset({DENSE}), value_codecs=frozenset({"raw"}))
    return np.asarray(wire.decode(frame, (expect,)).tensors[0].values.decode(), np.float32)
