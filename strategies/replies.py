"""Replies before aggregation: matched to their requests, checked against each other, sorted by partition.

Nothing here adds anything to anything. A reply either becomes an :class:`Arrival`, whole and checked, or a reason in
the round's report; only then does an aggregation begin.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcomp.errors import FedcompError
from fedcomp.flower.payload import BYTES, models, take_node
from fedcomp.flower.protocol import PREFIX
from fedcomp.flower.report import Report, ReportSection, figure
from fedcomp.strategies.partitions import Holders

T = TypeVar("T")
Arrays = Mapping[str, NDArray[Any]]

MAX_WEIGHT: Final = 2**63
"""Weights at or above it are refused: their sum could overflow, and no client has that many examples."""

MAX_RECORDS: Final = 64
"""Records in a reply beside its frames: the model, metrics, a few of ours and of the app's. A larger reply is
refused."""

MAX_ENTRIES: Final = 1024
"""Entries of a MetricRecord or ConfigRecord of a reply. Flower checks, compares and averages them one by one. Also
frames that are records of their own: what a client posts to each of the others is one, where it is large."""

MAX_NUMBERS: Final = 2**16
"""Numbers in the lists of all its metrics and configurations together."""

GONE: Final = (3, 4, 5)
"""Codes of errors a SuperLink makes: no message, reply expired, node unavailable. With any other the node itself says
that it failed: it is there, and its memory may be as it was before."""


NOT_FINITE: Final = (
    "the aggregate is not finite: an update was too large to add, or the server's own step divides by zero; the "
    "model is kept"
)
"""What a report says of a mean of finite updates that cannot be a model."""


class Rejected(FedcompError):
    """A reply cannot be used; the message says why."""


@dataclass(frozen=True)
class SentMessage:
    """One message of an exchange; ``version`` is that of the model in it, 0 where it has none, and ``saved`` how many
    bytes fewer the model takes than it would plain."""

    message: Message
    node: int
    sequence: int
    version: int = 0
    saved: int = 0


@dataclass
class Packed(ReportSection, name="packed"):
    """What packing models adds to a report.

    Attributes
    ----------
    saved : int
        Bytes that all models of the round's messages take less than plain ones.
    """

    # Not public: it follows the number of nodes that were asked.
    saved: int = figure(unit="bytes")


@dataclass
class Usual:
    """The form that most replies had when last there was such a form; it decides where two are equally frequent."""

    form: str = ""


def match_replies(
    sent: list[SentMessage], replies: Iterable[Message], report: Report, holders: Holders
) -> Iterator[tuple[SentMessage, Message]]:
    """Yield each message with its first reply, in the order of partition ids; count the rest in ``report``.

    Replies are joined by the id of the message they answer: the source of an error made by a SuperLink is the
    SuperLink, not the node. Of several nodes that declare one partition the one that held it before is let through, or
    none. A reply that holds more than anybody could want is not read any further.

    Parameters
    ----------
    holders : Holders
        Who held which partition before: the run's own in every exchange of a round, or a new one where nobody's past
        may count.
    """
    by_id = {s.message.metadata.message_id: s for s in sent if s.message.metadata.message_id}
    by_node = {s.node: s for s in sent}
    first: dict[int, tuple[SentMessage, Message]] = {}
    for reply in replies:
        match = by_id.get(reply.metadata.reply_to_message_id)
        # Messages that no engine has sent have no ids, as where hooks are called by hand: then the source decides.
        if match is None and not by_id:
            match = by_node.get(reply.metadata.src_node_id)
        if match is None:
            report.unmatched += 1
        elif match.node in first:
            report.duplicates += 1
        else:
            first[match.node] = (match, reply)
    # Added, since a round may have several exchanges.
    report.lost += len(sent) - len(first)
    report.missed.update(each.node for each in sent if each.node not in first)
    order = {s.node: i for i, s in enumerate(sent)}
    answers = {
        node: None if reply.has_error() else take_node(reply)
        for node, (_, reply) in first.items()
        # An error that the SuperLink made is no sign of life.
        if not (reply.has_error() and reply.error.code in GONE)
    }
    for node, reason in holders.settle(order, answers).items():
        report.refuse(node, reason)
        del first[node]
    # After partitions were settled: a reply too large to be read is still an answer of its node.
    for node, (_, reply) in list(first.items()):
        if not reply.has_error() and (excess := _excess(reply.content)):
            report.refuse(node, excess)
            del first[node]

    def place(pair: tuple[SentMessage, Message]) -> tuple[bool, int, int]:
        partition = take_node(pair[1])
        return partition is None, partition or 0, order[pair[0].node]

    # Partition order fixes the order of float sums; the order of arrival would not repeat.
    yield from sorted(first.values(), key=place)


def _excess(content: RecordDict) -> str:
    """Return of what a reply holds too much to be looked at; empty when it does not. Costs a step per record."""
    others = sum(not name.startswith(BYTES) for name in content)
    if others > MAX_RECORDS:
        return f"the reply holds {others} records; at most {MAX_RECORDS} are read"
    if len(content) - others > MAX_ENTRIES:
        return f"the reply holds {len(content) - others} frames; at most {MAX_ENTRIES} are read"
    # The name of a post lists whom it is for.
    numbers = sum(name.count(",") for name in content)
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            continue
        if len(record) > MAX_ENTRIES:
            return f"record {name!r} of the reply holds {len(record)} entries; at most {MAX_ENTRIES} are read"
        # Of all records together, or many short lists would add up to a long one.
        numbers += sum(len(value) if isinstance(value, list) else key.count(",") for key, value in record.items())
    return f"the reply's lists hold {numbers} numbers; at most {MAX_NUMBERS} are read" if numbers > MAX_NUMBERS else ""


def agreeing(
    items: list[tuple[T, str, RecordDict]],
    report: Report,
    node_of: Callable[[T], int],
    usual: Usual | None = None,
) -> list[T]:
    """Return the items whose metrics have the most frequent form; reject the others in ``report``.

    Of equally frequent forms the one that was ``usual`` before counts. Where none was, all are rejected: with two
    clients nobody can tell which of them is the odd one.

    Parameters
    ----------
    items : list of (item, record name, content)
    usual : Usual, optional
        The form of earlier rounds; that of this one is written into it.
    """
    forms = [_form(name, content) for _, name, content in items]
    if not forms:
        return []
    # Flower's own check ends the run where one reply differs from the others; here that one alone is refused.
    counts = Counter(forms)
    most = max(counts.values())
    first = [form for form, count in counts.items() if count == most]
    known = "" if usual is None else usual.form
    taken = first[0] if len(first) == 1 else known if known in first else ""
    # A tie that nothing decided leaves the former form in place, to decide the next one.
    if usual is not None and taken:
        usual.form = taken
    kept = []
    for (item, _, _), form in zip(items, forms, strict=True):
        if form == taken:
            kept.append(item)
        elif taken:
            report.refuse(node_of(item), f"records and metrics {form} are not the others' {taken}")
        else:
            report.refuse(
                node_of(item),
                f"{len(first)} forms of records and metrics are equally frequent ({most} replies each), and no "
                f"earlier round decides which is right. This reply's form: {form}",
            )
    return kept


def _form(name: str, content: RecordDict) -> str:
    """Return the names and kinds of all metrics, and the names of arrays beside the model: what has to agree."""
    metrics = {k: r for k, r in content.items() if isinstance(r, MetricRecord)}
    kinds = {k: {key: len(v) if isinstance(v, list) else None for key, v in r.items()} for k, r in metrics.items()}
    # Lengths of lists belong to the form: Flower averages them element by element.
    return json.dumps([name, kinds, *sorted(models(content))], sort_keys=True)


def beside(content: RecordDict, model: str) -> dict[str, ArrayRecord]:
    """Return the ArrayRecords that an app put beside the one called ``model``, which is empty when that is a frame."""
    return {k: v for k, v in models(content).items() if k != model and not k.startswith(PREFIX)}


def strip(content: RecordDict) -> RecordDict:
    """Return the content without arrays, frames and our header: metrics and whatever else the app sent."""
    return RecordDict({k: v for k, v in content.items() if not k.startswith(PREFIX) and not isinstance(v, ArrayRecord)})


def weight_of(content: RecordDict, key: str | None) -> tuple[str, float]:
    """Return the name of a reply's MetricRecord, and the weight that stands in it under ``key`` (1 without a key).

    Raises
    ------
    Rejected
        When there is no usable weight.
    """
    metrics = [(k, v) for k, v in content.items() if isinstance(v, MetricRecord)]
    if any(name.startswith(PREFIX) for name, _ in metrics):
        raise Rejected(f"reply holds a MetricRecord under a reserved name ({PREFIX}...)")
    if key is None:
        return (metrics[0][0] if metrics else ""), 1.0
    # Flower's own aggregation takes one alone, and would raise in the middle of the round.
    if len(metrics) != 1:
        raise Rejected(f"reply holds {len(metrics)} MetricRecords, expected exactly one")
    name, record = metrics[0]
    weight = record.get(key)
    # NaN fails the comparison; as a weight it would spoil the mean for all.
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < MAX_WEIGHT:
        raise Rejected(f"metric {key!r} is {weight!r}, expected a number >= 0 and < 2**63: it is the update's weight")
    return name, weight
