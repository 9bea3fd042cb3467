"""The client half of gradient codes: the app trains on several partitions as if the node owned them.

A partition's update has to be a function of the model, the round and the partition alone: then whoever holds the
partition computes the same one, and the combinations fit together. So the app is called once per partition, with the
same message and the same state; an app (or a mod) that changes the node's state in between would make the next
partition's update depend on the former's, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedcomp.clients.half import CallNext
from fedcomp.clients.messages import AppError, reply_arrays
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower._private import content_from_bytes, content_to_bytes
from fedcomp.flower.payload import PARTITION_KEY
from fedcomp.flower.records import to_arrays, widened
from fedcomp.program import Me
from fedcomp.systems.coded.gradients import Part, Trains


def partitions(msg: Message, context: Context, call_next: CallNext) -> Trains:
    """Return what trains the app on any partition, from a message as the app would see it."""
    content = msg.content

    def trains(me: Me, partition: int) -> Part:
        if len(content.array_records) != 1:
            raise ConfigError(
                f"the message holds {len(content.array_records)} ArrayRecords; gradient coding needs exactly one, the "
                "model"
            )
        before = to_arrays(next(iter(content.array_records.values())))
        # Each partition trains on a fresh copy: its update may depend on nothing but model, round and partition.
        msg.content = _copy(content)
        with _as_partition(context, partition):
            reply = call_next(msg, context)
        if reply.has_error():
            raise AppError(reply)
        _, after = reply_arrays(reply.content, before)
        metrics = reply.content.metric_records
        if len(metrics) != 1:
            raise ConfigError(f"the reply holds {len(metrics)} MetricRecords, expected exactly one")
        name, record = next(iter(metrics.items()))
        return Part(before, after, name, dict(record))

    return trains


@contextmanager
def _as_partition(context: Context, partition: int) -> Iterator[None]:
    """Let the context be that of a node that holds ``partition``; put everything back, also after an exception.

    Raises
    ------
    StateError
        When the state was changed meanwhile; it is put back first.
    """
    # Compared as bytes: an app may change an array in place, which no record shows.
    held, state = context.node_config, content_to_bytes(context.state)
    context.node_config = {**held, PARTITION_KEY: partition}
    try:
        yield
    finally:
        context.node_config = held
        changed = content_to_bytes(context.state) != state
        names = _changed(context.state, content_from_bytes(state)) if changed else []
        if changed:
            context.state = content_from_bytes(state)
    # After the finally block: raised inside, this would replace an exception of the app's own.
    if changed:
        raise StateError(
            # Short: a report keeps no more of it.
            f"the app changed the node's state ({', '.join(names[:3])}) while it trained on partition {partition}; "
            "use an app and mods that keep no state: devices that hold the same partition would disagree"
        )


def _changed(now: RecordDict, before: RecordDict) -> list[str]:
    names = sorted(set(now) | set(before))
    return [n for n in names if now.get(n) != before.get(n)] or ["order of records"]


def _copy(content: RecordDict) -> RecordDict:
    """Return the content with records of its own: an app may write to those of its message."""
    out = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            out[name] = ArrayRecord(dict(widened(record).items()))
        elif isinstance(record, ConfigRecord):
            out[name] = ConfigRecord(dict(record.items()))
        else:
            out[name] = MetricRecord(dict(record.items()))
    return out
