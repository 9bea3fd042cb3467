"""Replies on their way into an aggregation: matched to what was sent, checked completely, put in partition order.

Nothing here adds anything to anything. A reply either becomes an :class:`Arrival`, whole and checked, or a reason in
the round's report; only then does an aggregation begin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcomp.codecs import Codec
from fedcomp.errors import FedcompError
from fedcomp.exact import decode_exact
from fedcomp.flower.payload import NODE_RECORD, frames, take_frame, take_node
from fedcomp.flower.protocol import EXACT, UPDATE
from fedcomp.layout import Layout
from fedcomp.wire import Frame


class Rejected(FedcompError):
    """A reply cannot be used; the message says why."""


@dataclass
class Peer:
    """What the server knows of one node.

    Attributes
    ----------
    acknowledged : int
        Sequence number of the last update consumed from it; 0 for none.
    generation : int
        Generation of the node's memory that update came from.
    version : int
        Version of the model the node is known to hold; 0 when unknown.
    """

    acknowledged: int = 0
    generation: int = 0
    version: int = 0


@dataclass(frozen=True)
class Sent:
    """One message of the current exchange. ``base`` is set when the node got a model of its own."""

    message: Message
    node: int
    sequence: int
    base: Mapping[str, NDArray[Any]] | None = None


@dataclass
class Arrival:
    """A checked reply: either a frame or, from a client without the mod, plain arrays.

    The frame is kept as bytes, which are in the message anyway, and parsed again when it is added: parsed frames of all
    clients side by side would make memory grow with their number.
    """

    sent: Sent
    message: Message
    content: RecordDict
    record: str
    metrics_name: str
    weight: float
    exact: Mapping[str, NDArray[Any]]
    frame: Frame | None = None
    plain: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    sequence: int = 0
    generation: int = 0


@dataclass
class RoundReport:
    """What happened in one training round, by node id.

    Attributes
    ----------
    sent : int
        Messages sent.
    compressed, plain : int
        Updates that arrived as frames, and as ordinary arrays from clients without the mod.
    lost : int
        Messages without any reply in time.
    rejected : dict
        Replies that could not be used, error replies among them, with the reason.
    unsupported : dict
        Clients that have the mod but could not use the codec, with their reason.
    rolled_back, fresh : list
        Clients that put an unacknowledged update back into their memory; clients whose memory began in this round.
    duplicates, unmatched : int
        Second replies of a node, and replies to nothing that was sent.
    """

    round: int
    sent: int = 0
    compressed: int = 0
    plain: int = 0
    lost: int = 0
    duplicates: int = 0
    unmatched: int = 0
    rejected: dict[int, str] = field(default_factory=dict)
    unsupported: dict[int, str] = field(default_factory=dict)
    rolled_back: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def reject(self, node: int, reason: str) -> None:
        """Record that the reply of ``node`` was not used."""
        self.rejected[node] = reason

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-able dictionary; node ids become strings, as JSON keys are."""
        return {
            k: {str(n): reason for n, reason in v.items()} if isinstance(v, dict) else v
            for k, v in asdict(self).items()
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RoundReport:
        """Restore what :meth:`to_json` returned."""
        fields: dict[str, Any] = {
            k: {int(n): r for n, r in v.items()} if isinstance(v, dict) else v for k, v in value.items()
        }
        return cls(**fields)


def match_replies(sent: list[Sent], replies: Iterable[Message], report: RoundReport) -> Iterator[tuple[Sent, Message]]:
    """Yield each message with its first reply, in the order of partition ids; count the rest in ``report``.

    Replies are joined by the id of the message they answer: the source of an error made by a SuperLink is the
    SuperLink, not the node.
    """
    by_id = {s.message.metadata.message_id: s for s in sent if s.message.metadata.message_id}
    by_node = {s.node: s for s in sent}
    first: dict[int, tuple[Sent, Message]] = {}
    for reply in replies:
        match = by_id.get(reply.metadata.reply_to_message_id)
        if match is None and not by_id:
            match = by_node.get(reply.metadata.src_node_id)
        if match is None:
            report.unmatched += 1
        elif match.node in first:
            report.duplicates += 1
        else:
            first[match.node] = (match, reply)
    report.lost += len(sent) - len(first)
    order = {s.node: i for i, s in enumerate(sent)}

    def place(pair: tuple[Sent, Message]) -> tuple[bool, int, int]:
        partition = take_node(pair[1])
        return partition is None, partition or 0, order[pair[0].node]

    yield from sorted(first.values(), key=place)


def admit(sent: Sent, reply: Message, codec: Codec, layout: Layout, weight_key: str, report: RoundReport) -> Arrival:
    """Check ``reply`` completely and return it parsed.

    Raises
    ------
    Rejected
        When anything about it is wrong.
    """
    content = reply.content
    header = content.config_records.get(NODE_RECORD, ConfigRecord())
    metrics_name, weight = _weight(content, weight_key)
    try:
        frame = take_frame(content, UPDATE)
        if frame is None:
            arrival = _admit_plain(sent, reply, layout, metrics_name, weight)
            report.plain += 1
        else:
            sequence = _integer(header, "sequence")
            if sequence != sent.sequence:
                raise Rejected(f"update answers message {sequence}, expected {sent.sequence}: a stale reply")
            codec.open(frame, layout)
            name = header.get("record")
            if not isinstance(name, str) or not name:
                raise Rejected("update does not name its ArrayRecord")
            arrival = Arrival(
                sent,
                reply,
                _strip(content),
                name,
                metrics_name,
                weight,
                decode_exact(take_frame(content, EXACT), layout),
                frame,
                sequence=sequence,
                generation=_integer(header, "generation") if "generation" in header else 0,
            )
            report.compressed += 1
    except Rejected:
        raise
    except FedcompError as error:
        raise Rejected(f"{type(error).__name__}: {error}") from error
    if header.get("rolled-back") is True:
        report.rolled_back.append(sent.node)
    if arrival.generation and arrival.generation == arrival.sequence:
        report.fresh.append(sent.node)
    if isinstance(header.get("unsupported"), str):
        report.unsupported[sent.node] = str(header["unsupported"])
    return arrival


def consistent(arrivals: list[Arrival], report: RoundReport) -> list[Arrival]:
    """Return the arrivals whose records and metrics are named like the first one's; report the others.

    Flower ends the whole run when replies disagree; here one odd client costs its own update only.
    """
    kept: list[Arrival] = []
    for arrival in arrivals:
        names = (arrival.record, arrival.metrics_name, set(arrival.content[arrival.metrics_name]))
        if kept:
            first = kept[0]
            wanted = (first.record, first.metrics_name, set(first.content[first.metrics_name]))
            if names != wanted:
                report.reject(arrival.sent.node, f"records {names} differ from the first reply's {wanted}")
                continue
        kept.append(arrival)
    return kept


def _admit_plain(sent: Sent, reply: Message, layout: Layout, metrics_name: str, weight: float) -> Arrival:
    records = reply.content.array_records
    if len(records) != 1:
        raise Rejected(f"reply holds {len(records)} ArrayRecords, expected exactly one")
    name, record = next(iter(records.items()))
    try:
        arrays = {k: v.numpy() for k, v in record.items()}
    except (TypeError, ValueError) as error:
        raise Rejected(f"arrays cannot be read: {error}") from error
    layout.check(arrays)
    for k, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise Rejected(f"tensor {k!r} holds non-finite values")
    exact = {t.name: arrays[t.name] for t in layout.exact}
    return Arrival(sent, reply, _strip(reply.content), name, metrics_name, weight, exact, plain=arrays)


def _strip(content: RecordDict) -> RecordDict:
    """Return the content without arrays, frames and our header: metrics and whatever else the app sent."""
    ours = {NODE_RECORD, *frames(content)}
    return RecordDict({k: v for k, v in content.items() if k not in ours and not isinstance(v, ArrayRecord)})


def _weight(content: RecordDict, key: str) -> tuple[str, float]:
    metrics = [(k, v) for k, v in content.items() if isinstance(v, MetricRecord)]
    if len(metrics) != 1:
        raise Rejected(f"reply holds {len(metrics)} MetricRecords, expected exactly one")
    name, record = metrics[0]
    weight = record.get(key)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise Rejected(f"metric {key!r} is {weight!r}, expected a finite number >= 0: it is the update's weight")
    return name, weight


def _integer(header: ConfigRecord, name: str) -> int:
    value = header.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Rejected(f"header field {name!r} is {value!r}, expected an integer")
    return value
