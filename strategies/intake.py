"""One training exchange as the server reads it: a single reply becomes an update, or is rejected with a reason.

:class:`Intake` knows what the clients were sent, and checks a reply against it: its frame or its model, its buffers,
its weight and its names. Which replies are read, and in which order they are used, is decided in
:mod:`fedcomp.strategies.replies`; :mod:`fedcomp.strategies.sinks` adds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from flwr.app import Array, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.codecs import Codec
from fedcomp.codecs.base import norm
from fedcomp.errors import FedcompError, LayoutError
from fedcomp.exact import check_exact, decode_exact
from fedcomp.factors.collect import Captured
from fedcomp.flower.payload import NODE_RECORD, models, payload_bytes, take_frame, take_node
from fedcomp.flower.protocol import EXACT, PREFIX, UPDATE
from fedcomp.flower.records import config_in, read_array
from fedcomp.flower.report import Report, shorten
from fedcomp.layout import Layout, TensorSpec, Update, Vector
from fedcomp.rng import Key
from fedcomp.strategies.replies import (
    Arrays,
    Arrival,
    Rejected,
    SentMessage,
    beside,
    integer,
    strip,
    text,
    weight_of,
)
from fedcomp.wire import Bundle, Frame


@dataclass
class Intake:
    """One training exchange as it is received.

    Attributes
    ----------
    report : Report
    sent : sequence of SentMessage
    layout : Layout
    model : mapping of name to ndarray
        The server's model, against which buffers and plain arrays are checked.
    codec : Codec
        What clients encode with.
    key : Key
        The round's random stream without the partition: a sender does not choose its own random coordinates.
    weight_key : str or None
        The metric that weighs an update; None when the inner strategy has no such notion.
    record : str
        Name of the model in the messages.
    scales : mapping of node to float
        What an update is multiplied by beside its weight: an old one counts less. 1 for a node that is not named.
    compensation : float
        λ of delay compensation: ``u - λ u² (now - then)`` takes the place of the mean update ``u`` of clients whose
        model, ``then``, is no longer the server's.
    captured : Captured, optional
        Gets the outer products of which the mean update is the sum, where what goes down has a use for them.
    summands : list, optional
        Gets the frames themselves with their weights, where what goes down repeats them.
    updates_only : bool
        Read the update alone, as a private round does: neither weights nor metrics, and buffers keep the values of
        ``model``, whatever a reply holds.
    models_asked : bool
        Whether clients were asked for whole models, so that frames are not missed.
    stepped : frozenset of str
        Tensors that travel as values for their dtype alone, beside a lossless codec: what clients changed of them is
        added to the server's model where that is no longer the one they trained from.
    errors : list of Message
        What stands for the replies that could not be used, for the inner strategy.
    parsed_bytes : int
        Memory that parsed frames take which :meth:`keep` kept, in bytes; at most a model of float32.
    """

    report: Report
    sent: Sequence[SentMessage]
    layout: Layout
    model: Arrays
    codec: Codec
    key: Key
    weight_key: str | None = None
    record: str = "arrays"
    scales: Mapping[int, float] = field(default_factory=dict)
    compensation: float = 0.0
    captured: Captured | None = None
    summands: list[tuple[Frame | Bundle, float]] | None = None
    updates_only: bool = False
    models_asked: bool = False
    stepped: frozenset[str] = frozenset()
    errors: list[Message] = field(default_factory=list)
    parsed_bytes: int = 0

    @cached_property
    def vector(self) -> Vector:
        """The server's model as one vector."""
        return self.layout.flatten(self.model)

    @cached_property
    def start(self) -> Vector:
        """What clients trained from, where that is one model; else :attr:`vector`, as if they had trained from it.

        It is :attr:`vector` itself unless a lossy downlink brought them something else, or the server's model changed.
        """
        origins = {id(sent.origin) for sent in self.sent}
        return self.start_of(self.sent[0]) if len(origins) == 1 else self.vector

    def start_of(self, sent: SentMessage) -> Vector:
        """Return what the client of a message trained from."""
        origin = sent.origin
        if origin is None or (origin.reference is None and origin.model is self.model):
            return self.vector
        return origin.start

    def trained(self, sent: SentMessage) -> Arrays:
        """Return the tensors that the client of a message trained from, in their own dtypes."""
        if sent.base is not None:
            return sent.base
        if sent.origin is None:
            return self.model
        reference = sent.origin.reference
        return sent.origin.model if reference is None else self.layout.unflatten(reference, sent.origin.model)

    def changes_of(self, vector: Vector) -> dict[str, Vector]:
        """Return a copy of what ``vector``, a change, holds of tensors that float32 would round."""
        return {t.name: vector[t.slice].copy() for t in self.layout.wide}

    def scale_of(self, sent: SentMessage) -> float:
        """Return what an update is multiplied by beside its weight."""
        return self.scales.get(sent.node, 1.0)

    def moves(self, sent: SentMessage) -> bool:
        """Whether a client's whole model has to be :meth:`placed`."""
        return self.start_of(sent) is not self.start or self.scale_of(sent) != 1.0

    def placed(self, sent: SentMessage, trained: Vector) -> Vector:
        """Return a model that a client trained as it were from :attr:`start`, its change scaled; may overwrite it."""
        if not self.moves(sent):
            return trained
        trained -= self.start_of(sent)
        trained *= np.float32(self.scale_of(sent))
        trained += self.start
        return trained

    def placed_values(self, arrival: Arrival) -> Arrays:
        """Return the tensors of an arrival that travel as values, those of :attr:`stepped` as they were trained from
        the server's own model."""
        sent = arrival.sent
        then = None if sent.base is not None or sent.origin is None else sent.origin.model
        scale = self.scale_of(sent)
        if not self.stepped or then is None or (then is self.model and scale == 1.0):
            return arrival.exact
        placed = dict(arrival.exact)
        for name in self.stepped & set(placed):
            own = self.model[name].astype(np.float64)
            change = placed[name].astype(np.float64) - then[name].astype(np.float64)
            step = change * scale
            if self.compensation:
                step -= self.compensation * step * step * (own - then[name].astype(np.float64))
            placed[name] = own + step
        return placed

    @property
    def buffers(self) -> dict[str, NDArray[Any]]:
        """The server's tensors that travel as values."""
        return {t.name: self.model[t.name] for t in self.layout.exact}

    @cached_property
    def support(self) -> NDArray[np.int64] | None:
        """Coordinates that the codec draws for all clients alike, ascending; None where each client has its own."""
        return self.codec.common_support(self.layout, self.key)

    @property
    def summed(self) -> Layout:
        """Layout of what :meth:`update` returns."""
        return self.layout

    def read(self, sent: SentMessage, reply: Message, *, measured: bool = True, takes_plain: bool = True) -> Arrival:
        """Check ``reply`` completely and return it.

        Parameters
        ----------
        measured : bool
            Whether the update's norm may be known.
        takes_plain : bool
            Whether the model of a client that encoded nothing can be used.

        Raises
        ------
        Rejected
            When anything about it is wrong.
        """
        try:
            arrival = self._opened(sent, reply, measured)
            if arrival.plain is not None and not takes_plain:
                raise Rejected("an update that its client did not privatise; its app lacks the mod")
            if arrival.plain is not None and (self.codec.votes or (self.updates_only and self.support is not None)):
                # A plain update among votes, or on a support shared by all, is made what the others' are.
                arrival.frame = self._encoded(arrival.plain, sent.key(self.key, take_node(reply)))
        except Rejected:
            raise
        except FedcompError as error:
            raise Rejected(f"{type(error).__name__}: {error}") from error
        if self.updates_only:
            # What a reply says decides about itself alone: names of records and metrics are not put to a majority.
            arrival.record, arrival.content = self.record, RecordDict()
        else:
            _note_memory(arrival, config_in(reply.content, NODE_RECORD))
        return arrival

    def keep(self, arrival: Arrival) -> None:
        """Keep what was parsed of a frame until it is added, or parse it again then.

        All that is kept takes no more than a model: beyond that memory would grow with the number of clients.
        """
        if arrival.parsed is not None:
            arrival.parsed.forget()
            held = arrival.parsed.held_bytes()
            if self.parsed_bytes + held <= 4 * self.layout.size:
                self.parsed_bytes += held
            else:
                arrival.parsed = None

    def update(self, arrival: Arrival) -> Vector:
        """Return the update of an arrival; it may overflow to infinity.

        Plain arrays, and frames of a lossless codec, hold whole models; the update is what they changed.
        """
        base = self.start_of(arrival.sent) if arrival.sent.base is None else self.layout.flatten(arrival.sent.base)
        # Finite models may differ by more than float32 holds; the aggregate is checked before it is taken.
        with np.errstate(over="ignore", invalid="ignore"):
            if arrival.opened is not None:
                vector = arrival.sent.codec(self.codec).decode(arrival.opened, self.layout)
                return vector - base if self.codec.lossless else vector
            assert arrival.plain is not None
            vector = self.layout.flatten(arrival.plain) - base
            self.layout.difference_of_wide(vector, arrival.plain, self.trained(arrival.sent))
            return vector

    def account(self, arrivals: Sequence[Arrival]) -> None:
        """Add up what the usable replies took, and what as many full models take."""
        report = self.report
        # A frame made here of a plain reply never travelled.
        exact = sum(len(take_frame(a.message.content, EXACT) or b"") for a in arrivals if a.sizes is not None)
        sizes = [a.sizes for a in arrivals if a.sizes is not None]
        report.account(self.codec, self.layout, sizes, exact_bytes=exact)
        report.payload_bytes = sum(payload_bytes(a.message) for a in arrivals)
        # What apps put beside the model travels with compression and without, so it counts on both sides.
        beside_models = [record for a in arrivals for record in a.content.array_records.values()]
        report.model_bytes = len(arrivals) * sum(array.nbytes for array in self.model.values()) + sum(
            len(array.data) for record in beside_models for array in record.values()
        )

    def _opened(self, sent: SentMessage, reply: Message, measured: bool) -> Arrival:
        content, codec, layout = reply.content, sent.codec(self.codec), self.layout
        header = config_in(content, NODE_RECORD)
        metrics_name, weight = weight_of(content, self.weight_key)
        frame = take_frame(content, UPDATE)
        rest = strip(content)
        if not self.updates_only:
            rest.update(beside(content, "" if frame is not None else _model_in(sent, reply)))
        if frame is None:
            arrival = self._bare_model(sent, reply) if self.updates_only else self._whole_model(sent, reply, rest)
        else:
            # A late reply to an older message: its frame would be acknowledged under the wrong number.
            sequence = integer(header, "sequence")
            if sequence != sent.sequence:
                raise Rejected(f"update answers message {sequence}, expected {sent.sequence}: a stale reply")
            # With the key, so that random coordinates are compared with those that this round and partition draw.
            bundle = codec.verify(frame, layout, sent.key(self.key, take_node(reply)))
            # A private round keeps the server's buffers: they would be a release that no ledger accounts for.
            received = self.model if self.updates_only else decode_exact(take_frame(content, EXACT), layout)
            exact = {t.name: check_exact(received[t.name], t, self.model[t.name]) for t in layout.exact}
            arrival = Arrival(sent, reply, rest, text(header, "record"), exact, frame)
            arrival.sequence, arrival.sizes = sequence, bundle.sizes
            arrival.parsed = bundle
            arrival.generation = integer(header, "generation") if "generation" in header else 0
            # From the parsed frame: most codecs need no vector for it.
            if measured and not codec.lossless:
                arrival.norm = codec.norm(bundle, layout)
            if measured:
                arrival.figures = codec.figures(bundle, layout)
        if measured and arrival.norm is None:
            # Whole models arrived: the update is what they changed.
            whole = layout.flatten(arrival.plain) if arrival.plain is not None else codec.decode(bundle, layout)
            with np.errstate(over="ignore"):
                arrival.norm = norm(whole, self.start_of(sent) if sent.base is None else layout.flatten(sent.base))
        # The decoded model will stand under this name, and must replace nothing.
        if arrival.record in rest or arrival.record.startswith(PREFIX):
            raise Rejected(f"the update's record is named {arrival.record!r}, like another record of the reply")
        arrival.metrics_name, arrival.weight = metrics_name, weight
        numbers = header.get("unchanged")
        if frame is not None and isinstance(numbers, list) and not self.updates_only:
            arrival.unchanged = frozenset(number for number in numbers if isinstance(number, int))
        if frame is not None and not self.updates_only:
            arrival.copies = _copies(header.get("copies"), layout)
        # Of any other type it says nothing: what is only reported refuses no update.
        arrival.rolled_back = header.get("rolled-back") is True
        unsupported, said = header.get("unsupported"), header.get("remark")
        arrival.unsupported = unsupported if isinstance(unsupported, str) else ""
        arrival.said = said if isinstance(said, str) and not self.updates_only else ""
        return arrival

    def _whole_model(self, sent: SentMessage, reply: Message, rest: RecordDict) -> Arrival:
        name, layout = _model_in(sent, reply), self.layout
        record = reply.content.array_records[name]
        # As sets: a client's framework may list the tensors in another order.
        if set(record) != set(layout.order):
            raise Rejected(f"reply holds the tensors {sorted(record)[:5]}..., expected {sorted(layout.order)[:5]}...")
        plain = {t.name: _read_array(record[t.name], t) for t in (*layout.tensors, *layout.exact)}
        exact = {t.name: check_exact(plain[t.name], t, self.model[t.name]) for t in layout.exact}
        require_finite(plain, layout)
        return Arrival(sent, reply, rest, name, exact, plain=plain)

    def _bare_model(self, sent: SentMessage, reply: Message) -> Arrival:
        """Return a dense reply's tensors of the vector, with the server's buffers; what else it holds is not read."""
        records = reply.content.array_records
        # A private round reads no names, so it cannot tell which of several is the model.
        if len(records) != 1:
            raise Rejected(f"reply holds {len(records)} ArrayRecords, expected exactly one")
        name, record = next(iter(records.items()))
        missing = [t.name for t in self.layout.tensors if t.name not in record]
        if missing:
            raise Rejected(f"reply lacks the tensors {missing[:5]}")
        found = {t.name: _read_array(record[t.name], t) for t in self.layout.tensors}
        require_finite(found, self.layout)
        return Arrival(sent, reply, RecordDict(), name, self.buffers, plain=found | self.buffers)

    def _encoded(self, plain: Arrays, key: Key) -> bytes:
        """Return what the codec makes of the update of a client without the mod: its vote, for one."""
        vector = self.layout.flatten(plain)
        with np.errstate(over="ignore"):
            # From what clients trained from, which with a lossy downlink is not the server's own model.
            vector -= self.start
        return self.codec.encode(Update(vector, self.layout), self.codec.init(self.layout), key)[0]


def _copies(given: object, layout: Layout) -> dict[int, int]:
    """Return which tensors a client says to be another name of an earlier one; what cannot be is left out."""
    numbers = given if isinstance(given, list) else []
    found: dict[int, int] = {}
    for second, first in zip(numbers[::2], numbers[1::2], strict=False):
        # Not of a subclass: True would pass for 1.
        whole = type(second) is int and type(first) is int
        if whole and 0 <= first < second < len(layout.tensors) and first not in found:
            one, other = layout.tensors[first], layout.tensors[second]
            if (one.shape, one.dtype) == (other.shape, other.dtype):
                found[second] = first
    return found


def require_finite(arrays: Arrays, layout: Layout) -> None:
    """Check the tensors of the vector.

    Raises
    ------
    Rejected
        When one of them holds NaN or infinity.
    """
    for t in layout.tensors:
        if not np.isfinite(arrays[t.name]).all():
            raise Rejected(f"tensor {t.name!r} holds non-finite values")


def _note_memory(arrival: Arrival, header: ConfigRecord) -> None:
    memory = header.get("memory")
    if isinstance(memory, float) and 0.0 <= memory < math.inf:
        arrival.memory = memory
    elif memory is not None:
        # What is only reported costs nobody an update.
        arrival.remark = shorten(f"a client's memory ratio is {memory!r}, expected a finite number >= 0; left out")


def _model_in(sent: SentMessage, reply: Message) -> str:
    """Return the name of the model in a dense reply: the message's own, or the only one."""
    found = models(reply.content)
    if sent.record in found:
        return sent.record
    if len(found) != 1:
        raise Rejected(
            f"reply holds {len(found)} ArrayRecords {sorted(found)[:5]}, expected exactly one, the model, or the "
            f"message's own name for it, {sent.record!r}, among them"
        )
    return next(iter(found))


def _read_array(array: Array, spec: TensorSpec) -> NDArray[Any]:
    try:
        return read_array(array, spec.name, spec.shape, spec.dtype)
    except LayoutError as error:
        raise Rejected(str(error)) from error
