"""The client half of GradiVeQ: one mod that sends slices in the basis the server names, if this node has it.

Messages of servers that do not fit a basis pass on to ``compression()``, so one app serves both kinds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict

from fedcomp.clients.half import ClientHalf
from fedcomp.clients.waiting import Exchange, waiting_half
from fedcomp.codecs import Codec, State
from fedcomp.codecs.coefficients import basis_id_of
from fedcomp.codecs.gradiveq import GradiVeQ, open_steps, steps_frame
from fedcomp.codecs.subspace import SliceBasis
from fedcomp.errors import StateError
from fedcomp.flower.payload import NODE_RECORD, put_frame, take_frame
from fedcomp.flower.protocol import PROBE, SUPPORT, Announcement
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.layout import Layout
from fedcomp.versions import CodecOf, Step
from fedcomp.wire import Frame, WireError

_HELD = "fedcomp.gradiveq"


def fitted_basis(accept: Collection[str] | None = None) -> ClientHalf:
    """Return the client half of GradiVeQ. Messages of servers that do not fit a basis pass through untouched.

    Parameters
    ----------
    accept : collection of str, optional
        Codec ids this client agrees to use; default all registered ones.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> app = client(ClientApp(), only=[fitted_basis()])
    """
    return waiting_half("fitted_basis", GradiVeQ, _Exchange, accept)


class _Exchange(Exchange[GradiVeQ]):
    """One message of a server that fits a basis. The node keeps the last basis that it was sent, as it came."""

    def __init__(self, msg: Message, context: Context, announcement: Announcement, codec: GradiVeQ) -> None:
        super().__init__(msg, context, announcement, codec)
        self._block = take_frame(msg.content, SUPPORT)
        self._basis: SliceBasis | None = None
        # Bases that were read, by where they came from: every step that leads to the model asks for one.
        self._read: dict[str, SliceBasis] = {}

    def prepare(self, layout: Layout, block: Frame | None) -> None:
        """Find the round's basis."""
        self._basis = self._find(self.announcement.support, layout)

    def trained(self, state: State, layout: Layout, out: RecordDict) -> State:
        """Send in the basis, or what its grids are made of; wait where this node lacks the basis."""
        basis = self._basis
        if basis is None:
            return state
        if not self.codec.rounds(basis):
            return self._values(state, basis, layout, out, None)
        put_frame(out, PROBE, steps_frame(self.codec.peaks(state, basis, layout)))
        return state

    def queried(self, state: State, layout: Layout, out: RecordDict, block: Frame | None) -> State:
        """Send in the basis of the training message, or of this one, on the grids of this one."""
        basis = self._find(self.announcement.support, layout)
        if basis is None:
            raise StateError(f"this node does not hold the basis {self.announcement.support:x}")
        after = self._values(state, basis, layout, out, take_frame(self.msg.content, PROBE))
        self.keep()
        return after

    def _values(self, state: State, basis: SliceBasis, layout: Layout, out: RecordDict, steps: Frame | None) -> State:
        grids = () if steps is None else self.codec.grids_of(open_steps(steps, len(basis.subspaces)))
        frame, after = self.codec.send(state, basis, layout, self.key, grids)
        self.put_values(frame, state, out)
        if basis.subspaces:
            out.config_records[NODE_RECORD]["drift"] = self.codec.drift(state, basis, layout)
        return after

    def keep(self) -> None:
        """Write the basis that came."""
        if self._block is not None:
            self.context.state[_HELD] = to_record({"basis": np.frombuffer(self._block, np.uint8)})

    def codec_of(self, layout: Layout) -> CodecOf:
        """Return what reads a step: coefficients in the basis that it names."""

        def find(step: Step) -> Codec:
            number = basis_id_of(step.frame, self.codec.slices(layout).stretches, layout)
            basis = self._find(number, layout)
            if basis is None:
                raise StateError(f"this node does not hold the basis {number:x} of step {step.version}")
            return self.codec.mean(basis)

        return find

    def _find(self, number: int, layout: Layout) -> SliceBasis | None:
        """Return the basis that is called ``number``; None where this node does not have it."""
        return next((basis for basis in self._candidates(layout) if basis.id == number), None)

    def _candidates(self, layout: Layout) -> Iterator[SliceBasis]:
        yield SliceBasis.nothing(layout)
        if self._block is not None:
            yield self._open("message", self._block, layout)
        held = self.context.state.get(_HELD)
        frame = to_arrays(held).get("basis") if isinstance(held, ArrayRecord) else None
        if frame is None:
            return
        try:
            yield self._open("state", frame.tobytes(), layout)
        except WireError:
            # Damaged where it was kept: as good as none, and the server sends it again.
            return

    def _open(self, source: str, frame: Frame, layout: Layout) -> SliceBasis:
        if source not in self._read:
            self._read[source] = self.codec.read_basis(frame, layout)
        return self._read[source]
