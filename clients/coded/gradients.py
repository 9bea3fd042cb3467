"""The client half of gradient coding: train on every partition of the plan, answer one combination of the updates.

A partition's update has to be a function of the model, the round and the partition alone: then whoever holds the
partition computes the same one, and the combinations fit together. So the app is called once per partition, as if this
node held that one, with the same message and the same state; an app (or a mod) that changes the node's state in between
would make the next partition's update depend on the former's, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcomp.clients.half import CallNext
from fedcomp.clients.messages import reply_arrays
from fedcomp.coding.errors import CodingError
from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.flower._private import content_from_bytes, content_to_bytes
from fedcomp.flower.gradients import ANSWER, Form, GradientAnswer, GradientPlan, change_of, checksum
from fedcomp.flower.payload import PARTITION_KEY, put_frame
from fedcomp.flower.records import to_arrays, widened
from fedcomp.layout import Layout

if TYPE_CHECKING:
    from fedcomp.clients.coded.mod import CodedMessage
    from fedcomp.coding.gradvalues import Arithmetic

MAX_WEIGHT = 2.0**63
"""Weights at or above it are refused, as the server does everywhere."""


class GradientCodeClient:
    """Answers one training message of a gradient-coded round; keeps nothing between messages."""

    def __init__(self, exchange: CodedMessage) -> None:
        self.exchange = exchange

    def answer(self, call_next: CallNext) -> Message:
        """Train on every partition of the plan and return the combination.

        Raises
        ------
        FedcompError
            When the plan, or what the app replied, cannot be coded.
        """
        from fedcomp.coding.gradvalues import combine, values_of

        exchange = self.exchange
        kind = exchange.kind.partition(".")[0]
        if kind != "train":
            raise StateError(f"a gradient code answers training messages, not {exchange.kind!r}")
        plan = exchange.take(GradientPlan)
        values = values_of(plan.arithmetic, plan.parts, plan.limit)
        size = len(plan.partitions) * values.dtype.itemsize
        if len(plan.coefficients) != size:
            raise StateError(f"the plan has {len(plan.coefficients)} bytes of coefficients, expected {size}")
        coefficients = np.frombuffer(plan.coefficients, values.dtype)
        rows: list[NDArray[Any]] = []
        forms: list[Form] = []
        message = exchange.plain_message()
        before, content = _model(message.content), message.content
        layout = Layout.of(before)
        for partition in plan.partitions:
            # Each partition trains on a fresh copy: its update may depend on nothing but model, round and partition.
            message.content = _copy(content)
            with _as_partition(exchange.context, partition):
                reply = call_next(message, exchange.context)
            if reply.has_error():
                return reply
            try:
                row, form = _row(reply.content, before, layout, plan.weight, values)
            except (FedcompError, CodingError) as error:
                raise CodingError(f"partition {partition}: {error}") from error
            rows.append(row)
            forms.append(form)
        if len(set(forms)) > 1:
            raise ConfigError(f"the app's replies differ in form from partition to partition: {forms[0]}, {forms[-1]}")
        data = combine(coefficients, rows, values.field).astype(values.dtype, copy=False).tobytes()
        out = RecordDict()
        put_frame(out, ANSWER, data)
        return exchange.reply(GradientAnswer, out, form=forms[0].to_text(), checksum=checksum(data))


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
            f"the app changed the node's state ({', '.join(names[:3])}) while it trained on partition {partition}; use "
            "an app, and mods, that keep none: devices that hold the same partition would disagree"
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


def _model(content: RecordDict) -> dict[str, NDArray[Any]]:
    if len(content.array_records) != 1:
        raise ConfigError(
            f"the message holds {len(content.array_records)} ArrayRecords; gradient coding needs exactly one, the model"
        )
    return to_arrays(next(iter(content.array_records.values())))


def _row(
    content: RecordDict, before: dict[str, NDArray[Any]], layout: Layout, weight_key: str, values: Arithmetic
) -> tuple[NDArray[Any], Form]:
    """Return a partition's row: the weighted change and, as scalars, weight, metrics and what is beside the vector."""
    name, after = reply_arrays(content, before)
    metrics = content.metric_records
    if len(metrics) != 1:
        raise ConfigError(f"the reply holds {len(metrics)} MetricRecords, expected exactly one")
    metrics_name, record = next(iter(metrics.items()))
    weight = record.get(weight_key) if weight_key else 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < MAX_WEIGHT:
        raise ConfigError(
            f"metric {weight_key!r} is {weight!r}, expected a number >= 0 and < 2**63: the update's weight"
        )
    form, numbers = Form.of(name, metrics_name, record, weight_key)
    vector, beside = change_of(before, after, layout)
    with np.errstate(over="ignore", invalid="ignore"):
        # The 1 in front becomes the weight, and its sum is what the server divides by.
        scalars = np.concatenate([[1.0], numbers, beside]) * float(weight)
        return values.pack(vector * float(weight), scalars), form
