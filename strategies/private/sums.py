"""Private rounds of the pair as hooks make it (:class:`fedcomp.strategies.hooked.Hooked`)."""

from __future__ import annotations

from functools import partial
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict

from fedcomp.flower.records import to_arrays, to_record
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.intake import Intake
from fedcomp.strategies.means import aggregate_once
from fedcomp.strategies.replies import Arrival
from fedcomp.strategies.sinks import Sink


class PrivateSink(Sink):
    """Hands the updates of a round to the rule of a strategy.

    Parameters
    ----------
    strategy : PrivateStrategy
    intake : Intake
    """

    def __init__(self, strategy: Any, intake: Intake) -> None:
        self._strategy, self._intake = strategy, intake
        self._arrivals: list[Arrival] = []
        self._open = strategy.begins(intake.report, intake.codec, intake.layout)

    def add(self, arrival: Arrival) -> None:
        """Take one update; it is decoded when the others are."""
        self._arrivals.append(arrival)

    def finish(self) -> Outcome:
        """Release the sum and let the inner strategy make its step; buffers keep the server's values."""
        intake, layout, number = self._intake, self._intake.layout, self._intake.report.round
        if not self._open:
            return None, None
        reads = ((each.sent.node, each.sent.node, partial(intake.update, each)) for each in self._arrivals)
        step = self._strategy.release(number, layout, intake.support, reads, intake.report.refuse)
        if step is None or step.change is None:
            return None, None
        # The inner strategy gets a model, not an update: its own step (momentum, Adam) starts from the same place.
        moved = intake.vector + step.change
        asked = intake.sent[0].message if intake.sent else Message(RecordDict(), 1, "train")
        changes = intake.changes_of(step.change)
        mean = (intake.record, to_record(layout.added(intake.model, changes, moved, intake.buffers)))
        arrays, _ = aggregate_once(self._strategy.inner, number, mean, asked, (), sparse=step.support)
        return (None, None) if arrays is None else (to_record(to_arrays(arrays) | intake.buffers), MetricRecord())
