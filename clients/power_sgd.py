"""The client half of PowerSGD: one mod that sends matrices in the basis the server names, if this node has it.

Messages of servers that do not share a basis pass on to ``compression()``, so one app serves both kinds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict

from fedcomp.clients.half import ClientHalf
from fedcomp.clients.waiting import Exchange, waiting_half
from fedcomp.codecs import Codec, State
from fedcomp.codecs.coefficients import basis_id_of
from fedcomp.codecs.lowrank import Basis, Part
from fedcomp.codecs.positional import stretches
from fedcomp.codecs.power_sgd import PowerSGD, basis_key, basis_of_last_frame, nothing_factored
from fedcomp.errors import StateError
from fedcomp.flower.payload import put_frame
from fedcomp.flower.protocol import PROBE, Announcement
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.state import Uplink, remembered
from fedcomp.layout import Layout
from fedcomp.versions import CodecOf, Step
from fedcomp.wire import Frame, WireError

_HELD = "fedcomp.power-sgd"


def shared_basis(accept: Collection[str] | None = None) -> ClientHalf:
    """Return the client half of PowerSGD. Messages of servers that do not share a basis pass through untouched.

    Parameters
    ----------
    accept : collection of str, optional
        Codec ids this client agrees to use; default all registered ones.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> app = client(ClientApp(), only=[shared_basis()])
    """
    return waiting_half("shared_basis", PowerSGD, _Exchange, accept)


class _Exchange(Exchange[PowerSGD]):
    """One message of a shared-basis server.

    Besides the memory a node keeps the basis that follows from its model, ``basis`` with its ``id``, and the ``mean``
    that an evaluation brought before the memory could be corrected by it.
    """

    def __init__(self, msg: Message, context: Context, announcement: Announcement, codec: PowerSGD) -> None:
        super().__init__(msg, context, announcement, codec)
        held = context.state.get(_HELD)
        self._held: State = to_arrays(held) if isinstance(held, ArrayRecord) else {}
        self._last: tuple[Basis, Sequence[Part]] | None = None
        self._mean: Frame | None = self._held["mean"].tobytes() if "mean" in self._held else None
        self._start: Basis | None = None

    def prepare(self, layout: Layout, block: Frame | None) -> None:
        """Find what the server's next round begins with."""
        announced = self.announcement
        self._start = self._find(announced.support, announced.version, layout, block)

    def settled(self, uplink: Uplink, layout: Layout) -> State:
        """Return the memory, corrected by the mean its last frame is part of, if that was consumed and is here."""
        mean, self._mean = self._mean, None
        if mean is None or uplink.fresh or uplink.rolled_back:
            return uplink.state
        return self.codec.correct(uplink.state, mean, layout)

    def trained(self, state: State, layout: Layout, out: RecordDict) -> State:
        """Send in the basis, or what it will be made of; wait where this node lacks what the server named."""
        if self._start is None:
            return state
        if not self.codec.two_exchanges:
            return self._values(state, self._start, layout, out)
        put_frame(out, PROBE, self.codec.first(state, self._start, layout, self.key))
        return state

    def queried(self, state: State, layout: Layout, out: RecordDict, block: Frame | None) -> State:
        """Send in the basis of the message."""
        if block is None:
            raise StateError("the query holds no basis")
        return self._values(state, self.codec.open_basis(block, self.announcement.support, layout), layout, out)

    def _values(self, state: State, basis: Basis, layout: Layout, out: RecordDict) -> State:
        frame, after = self.codec.send(state, basis, layout, self.key)
        self.put_values(frame, state, out)
        return after

    def keep(self) -> None:
        """Write the basis that follows from the model, and a mean that waits."""
        held: State = {}
        if self._start is not None:
            held |= {"basis": np.frombuffer(self._start.frame(), np.uint8), "id": np.asarray(self._start.id)}
        if self._mean is not None:
            held["mean"] = np.frombuffer(self._mean, np.uint8)
        self.context.state[_HELD] = to_record(held)

    def codec_of(self, layout: Layout) -> CodecOf:
        """Return what reads a step: its factors, in the basis it names."""
        frame_in = {name: a for name in ("sent", "basis-id") if (a := remembered(self.context, name)) is not None}
        corrected_by = basis_of_last_frame(frame_in)

        def find(step: Step) -> Codec:
            number = basis_id_of(step.frame, stretches(layout, "layer"), layout)
            basis = self._find(number, step.version - 1, layout, step.support)
            if basis is None:
                raise StateError(f"this node does not hold the basis {number:x} of step {step.version}")
            codec = self.codec.mean(basis)
            self._last = basis, codec.coefficients(step.frame, layout)
            # The first of that basis: in a later round it may come back, and this node may have had no part in it.
            if number == corrected_by and self._mean is None:
                self._mean = step.frame
            return codec

        return find

    def _find(self, number: int, version: int, layout: Layout, block: Frame | None) -> Basis | None:
        """Return the basis that is called ``number``; None where this node cannot have it.

        ``version`` is that of the model the basis belongs to, ``block`` the basis as it came, if it did.
        """
        found = self._candidates(number, version, layout, block)
        return next((basis for basis in found if basis.id == number), None)

    def _candidates(self, number: int, version: int, layout: Layout, block: Frame | None) -> Iterator[Basis]:
        """Yield the bases this node can have, the likely ones first; what takes work is made when it is looked at."""
        codec, key = self.codec, basis_key(self.announcement.seed, version)
        if block is not None:
            yield codec.open_basis(block, number, layout)
        yield nothing_factored(codec, layout)
        if self._last is not None:
            yield codec.start(self._last, layout, key)
        context = self.context
        for kept, called in (
            (self._held.get("basis"), self._held.get("id")),
            (remembered(context, "basis"), remembered(context, "basis-id")),
        ):
            if kept is None or called is None or called.size != 1 or int(called) != number:
                continue
            try:
                yield codec.open_basis(kept.tobytes(), number, layout)
            except WireError:
                # Damaged where it was kept: as good as none, and the server sends it again.
                continue
        yield codec.start(None, layout, key)
