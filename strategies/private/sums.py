"""The sink of private rounds: each update bounded or verified, integer sums, the event before the noise.

After the noise everything is post-processing: the noisy mean goes to the inner strategy as one reply.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcomp.flower.records import to_arrays, to_record
from fedcomp.layout import Layout, Vector
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.mechanism import PrivateSum
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.intake import Intake
from fedcomp.strategies.means import aggregate_once
from fedcomp.strategies.private.promise import Promise
from fedcomp.strategies.replies import Arrival
from fedcomp.strategies.sinks import Sink


class PrivateSink(Sink):
    """One private sum: the one path by which anything of updates becomes public.

    Parameters
    ----------
    strategy : Promise
        Says what a contribution is, what noise it takes and what it costs.
    intake : Intake
    """

    on_support: ClassVar[bool] = True
    """Whether a support that is drawn for all clients is all that is summed and released."""

    def __init__(self, strategy: Promise, intake: Intake) -> None:
        self.strategy = strategy
        self.intake = intake
        self.support = intake.support if self.on_support else None
        self.kept = intake.summed if self.support is None else Layout.flat(int(self.support.size))
        self.begin()

    def begin(self) -> None:
        """Open the sum."""
        number = self.intake.report.round
        self.mechanism = self.strategy.mechanism(self.kept, number)
        self.total = PrivateSum(self.mechanism, (self.kept.size,))
        self.strategy.begun(number)

    def add(self, arrival: Arrival) -> None:
        """Add one update, decoded now and forgotten before the next."""
        self.contribute(arrival.sent.node, self.intake.update(arrival))

    def contribute(self, node: int, update: Vector) -> None:
        """Add what ``node`` contributes.

        Raises
        ------
        Unbounded
            When it is left out.
        """
        # Only who was asked is recorded as a participant: anybody else's contribution would be charged to nobody.
        if node not in self.strategy.chosen:
            raise Unbounded(f"node {node} was not asked in this round")
        if update.shape != (self.intake.summed.size,):
            raise Unbounded(f"an update has shape {update.shape}, expected ({self.intake.summed.size},)")
        self.put(node, update if self.support is None else update[self.support])

    def put(self, node: int, update: Vector) -> None:
        """Bound or verify one contribution, and add it."""
        given = self.strategy.contribution(update, self.kept, self.intake.report.round)
        self.total.add(node, given)
        self.strategy.added(given)

    def step(self) -> Vector | None:
        """Write the event down, add the noise, and return the update that the sum stands for.

        A turn is taken by being asked: whoever answers with nothing of use would otherwise be asked again and again,
        in the place of others.

        Raises
        ------
        BudgetExceeded, PrivacyLedgerError
            Nothing was released.
        """
        strategy, number = self.strategy, self.intake.report.round
        # One source for the sum and for what the same event pays for beside it.
        entropy = strategy.entropy("noise", number)
        noisy = self.total.release(
            strategy.privacy,
            round=number,
            entropy=entropy,
            event=strategy.event(self.mechanism, self.kept.size),
            participants=strategy.chosen,
        )
        strategy.concluded(number, entropy)
        return strategy.released(noisy, self.kept, number)

    def finish(self) -> Outcome:
        """Release the sum and let the inner strategy make its step; buffers keep the server's values."""
        intake, layout = self.intake, self.intake.layout
        step = self.step()
        if step is None:
            return None, None
        # The inner strategy gets a model, not an update: its own step (momentum, Adam) starts from the same place.
        change = step
        if self.support is not None:
            change = np.zeros(layout.size, np.float32)
            change[self.support] = step
        moved = intake.vector.copy()
        if self.support is None:
            moved += step
        else:
            moved[self.support] += step
        # A round that nobody was drawn for has no message to answer.
        asked = intake.sent[0].message if intake.sent else Message(RecordDict(), 1, "train")
        mean = (intake.record, to_record(layout.added(intake.model, intake.changes_of(change), moved, intake.buffers)))
        sparse = self.support is not None
        arrays, _ = aggregate_once(self.strategy.inner, intake.report.round, mean, asked, (), sparse=sparse)
        if arrays is None:
            return None, None
        return to_record(to_arrays(arrays) | intake.buffers), MetricRecord()


class Nothing(PrivateSink):
    """The sink of a round that was not begun, or of which single updates are never used: nothing is released."""

    def begin(self) -> None:
        """Do nothing."""

    def add(self, arrival: Arrival) -> None:
        """Do nothing."""

    def contribute(self, node: int, update: Vector) -> None:
        """Do nothing."""

    def step(self) -> None:
        """Return None: the model stays what it is."""
        return


class LocalSink(PrivateSink):
    """The mean of messages that every client has noised itself: post-processing, which costs nothing."""

    on_support: ClassVar[bool] = False

    def begin(self) -> None:
        """Open the sum."""
        self._sum: NDArray[Any] = np.zeros(self.kept.size, np.float64)
        self._came = 0

    def put(self, node: int, update: Vector) -> None:
        """Add one message."""
        if not np.isfinite(update).all():
            raise Unbounded("the message holds values that are not finite")
        self._sum += update
        self._came += 1

    def step(self) -> Vector | None:
        """Return the mean of those that came; they hide nothing by their number."""
        return (self._sum / self._came).astype(np.float32) if self._came else None
