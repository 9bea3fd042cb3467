"""Reading replies to training and reporting their metrics: all of them, or only the update in a private round. Which of
the two is decided once, by what the strategy needs of updates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp.codecs.base import all_finite
from fedcomp.exact import check_exact, decode_exact
from fedcomp.flower.asks import AnswerHead
from fedcomp.flower.payload import models
from fedcomp.flower.protocol import PREFIX, app_failure
from fedcomp.flower.records import read_array
from fedcomp.flower.report import Report, shorten
from fedcomp.layout import TensorSpec, Vector
from fedcomp.program import Answer
from fedcomp.strategies.means import weight_key_of
from fedcomp.strategies.replies import Rejected, SentMessage, Usual, agreeing, beside, strip, weight_of
from fedcomp.strategies.roster import Roster
from fedcomp.strategies.running import Running, Trained, copies_of
from fedcomp.wire import Frame


class Inbox:
    """Everything that an app replies is read, and reported.

    Parameters
    ----------
    inner : Strategy
        Says what updates weigh.

    Attributes
    ----------
    casts : bool
        Whether floats of all sizes are in the vector, as changes, whatever the system sends.
    """

    casts: ClassVar[bool] = False

    def __init__(self, inner: Strategy) -> None:
        self._inner = inner

    def begin(self, roster: Roster) -> None:
        """Prepare the register of nodes for a round."""

    def trained(self, x: Running, head: AnswerHead, reply: Message, exact: Frame | None) -> Trained:
        """Return what the app replied beside the model, which came as a frame.

        Raises
        ------
        FedcompError
            When it has no usable weight, or buffers that the model cannot take.
        """
        metrics, weight = weight_of(reply.content, weight_key_of(self._inner))
        content = strip(reply.content)
        content.update(beside(reply.content, ""))
        # The model will stand under this name in what the inner strategy sees, and must replace nothing.
        if not head.record or head.record in content or head.record.startswith(PREFIX):
            raise Rejected(f"the update's record is named {head.record!r}, like another record of the reply")
        received = decode_exact(exact, x.layout)
        return Trained(
            reply,
            content,
            head.record,
            head.sequence,
            {t.name: check_exact(received[t.name], t, x.model[t.name]) for t in x.layout.exact},
            metrics,
            weight,
            frozenset(head.unchanged),
            copies_of(head.copies, x.layout),
            unsupported=head.unsupported,
        )

    def dense(self, x: Running, node: int, reply: Message, sequence: int, *, whole: bool) -> tuple[Trained, Vector]:
        """Return what an app replied whose model came as it is, and its update, or with ``whole`` the model.

        Raises
        ------
        FedcompError
            When it is none, or is not finite.
        """
        layout, (name, plain) = x.layout, self._model(x, models(reply.content))
        exact = {t.name: check_exact(plain[t.name], t, x.model[t.name]) for t in layout.exact}
        if bad := next((t.name for t in layout.tensors if not np.isfinite(plain[t.name]).all()), ""):
            raise Rejected(f"tensor {bad!r} holds non-finite values")
        content, metrics, weight = self._beside(reply, name)
        if name.startswith(PREFIX):
            raise Rejected(f"the update's record is named {name!r}, like another record of the reply")
        update = layout.flatten(plain)
        if not whole:
            # What it trained from is what a lossy downlink made of the model, in the model's own dtypes.
            before = x.start_of(node)
            with np.errstate(over="ignore", invalid="ignore"):
                update -= layout.flatten(before)
            layout.difference_of_wide(update, plain, before)
            if not all_finite(update):
                raise Rejected("the model differs from the one it was trained from by more than float32 holds")
        return Trained(reply, content, name, sequence, exact, metrics, weight, dense=True), update

    def _model(self, x: Running, found: Mapping[str, ArrayRecord]) -> tuple[str, dict[str, NDArray[Any]]]:
        """Return the name of the model among a reply's records, and its tensors."""
        name = x.record if x.record in found else next(iter(found), "")
        wanted = (*x.layout.tensors, *x.layout.exact)
        _require(x, found, name, wanted, among=name == x.record)
        if set(found[name]) != set(x.layout.order):
            raise Rejected(
                f"reply holds the tensors {sorted(found[name])[:5]}..., expected {sorted(x.layout.order)[:5]}..."
            )
        return name, _read(found[name], wanted)

    def _beside(self, reply: Message, name: str) -> tuple[RecordDict, str, float]:
        """Return what a reply holds beside the model, the name of its metrics, and its weight."""
        metrics, weight = weight_of(reply.content, weight_key_of(self._inner))
        content = strip(reply.content)
        content.update(beside(reply.content, name))
        return content, metrics, weight

    def note(self, report: Report, node: int, head: AnswerHead) -> None:
        """Report what a client says of its memory and its update."""
        if head.memory >= 0.0:
            report.memory[node] = head.memory
        if head.remark:
            report.remarks[node] = shorten(head.remark)

    def agree(self, x: Running, answers: dict[int, Answer], sent: Sequence[SentMessage], usual: Usual) -> None:
        """Refuse what came of training in another form than most: Flower's own check would end the run over it."""
        numbers = {each.sequence for each in sent}
        new = [n for n in sorted(answers) if n in x.trained and x.trained[n].sequence in numbers]
        items = [(node, x.trained[node].record, x.trained[node].content) for node in new]
        kept = agreeing(items, x.report, x.addresses.__getitem__, usual)
        for node in set(new).difference(kept):
            x.errors.append(app_failure(x.base[node], x.report.refused[x.addresses[node]]))
            del answers[node], x.trained[node]

    def shown(self, used: list[Trained]) -> list[Trained]:
        """Return what came with updates, as far as the strategy that takes their mean may see it."""
        return used

    def received(self, x: Running, consumed: Sequence[int]) -> tuple[int, int] | None:
        """Return how many replies a mean stands for, and how many could not be used; None where nobody may know."""
        return len(consumed), len(x.report.refused)

    def account(self, x: Running, consumed: Sequence[int]) -> None:
        """Add up what the answers that are used took, and what as many full models take."""
        report, codec = x.report, x.given[0]
        report.changed = x.changed
        sizes = [x.sizes[node] for node in consumed if node in x.sizes]
        if codec is not None and sizes:
            report.account(codec, x.layout, sizes, exact_bytes=sum(x.exact_bytes.get(node, 0) for node in consumed))
        report.payload_bytes = sum(x.payload.get(node, 0) for node in consumed)
        # What apps put beside the model travels with compression and without, so it counts on both sides.
        trained = [x.trained[node] for node in consumed if node in x.trained]
        others = [record for each in trained for record in each.content.array_records.values()]
        report.model_bytes = len(consumed) * sum(array.nbytes for array in x.model.values())
        report.model_bytes += sum(len(array.data) for record in others for array in record.values())

    def kept(self, report: Report) -> None:
        """Report that the inner strategy made no model."""
        report.notes.append(f"{type(self._inner).__name__} returned no model for these replies; the model is kept")


class SecretInbox(Inbox):
    """The update is read and nothing else, and one client's part depends on nobody else's.

    No weights, metrics, names, majorities or preferences from earlier rounds; buffers would be a release that no ledger
    accounts for, so that the server's stay as they are; and a report says nothing that depends on the data.
    """

    casts: ClassVar[bool] = True

    def begin(self, roster: Roster) -> None:
        """Forget whom earlier rounds preferred."""
        roster.release()

    def trained(self, x: Running, head: AnswerHead, reply: Message, exact: Frame | None) -> Trained:
        """Return nothing of the reply."""
        own = {t.name: x.model[t.name] for t in x.layout.exact}
        return Trained(reply, RecordDict(), x.record, head.sequence, own, unsupported=head.unsupported)

    def dense(self, x: Running, node: int, reply: Message, sequence: int, *, whole: bool) -> tuple[Trained, Vector]:
        """Return nothing of the reply but the update."""
        return super().dense(x, node, reply, sequence, whole=False)

    def _model(self, x: Running, found: Mapping[str, ArrayRecord]) -> tuple[str, dict[str, NDArray[Any]]]:
        # No names are read, so nothing says which of several is the model.
        name = next(iter(found), "")
        _require(x, found, name, x.layout.tensors, among=False)
        return name, _read(found[name], x.layout.tensors) | {t.name: x.model[t.name] for t in x.layout.exact}

    def _beside(self, reply: Message, name: str) -> tuple[RecordDict, str, float]:
        return RecordDict(), "", 1.0

    def note(self, report: Report, node: int, head: AnswerHead) -> None:
        """Report nothing."""

    def agree(self, x: Running, answers: dict[int, Answer], sent: Sequence[SentMessage], usual: Usual) -> None:
        """Refuse nobody for what others sent."""

    def shown(self, used: list[Trained]) -> list[Trained]:
        """Return nothing: metrics depend on the data, and a round has paid for the update alone."""
        return []

    def received(self, x: Running, consumed: Sequence[int]) -> tuple[int, int] | None:
        """Return None."""
        return None

    def account(self, x: Running, consumed: Sequence[int]) -> None:
        """Report nothing."""

    def kept(self, report: Report) -> None:
        """Report nothing."""


def _require(
    x: Running, found: Mapping[str, ArrayRecord], name: str, wanted: Collection[TensorSpec], *, among: bool
) -> None:
    """Refuse records that hold no model, or with ``among`` false several."""
    if name not in found or (len(found) > 1 and not among):
        raise Rejected(
            f"reply holds {len(found)} ArrayRecords {sorted(found)[:5]}, expected exactly one, the model, or the "
            f"message's own name for it, {x.record!r}, among them"
        )
    # As sets: a client's framework may list the tensors in another order.
    if missing := {t.name for t in wanted} - set(found[name]):
        raise Rejected(f"reply lacks the tensors {sorted(missing)[:5]}")


def _read(record: ArrayRecord, wanted: Collection[TensorSpec]) -> dict[str, NDArray[Any]]:
    return {t.name: read_array(record[t.name], t.name, t.shape, t.dtype) for t in wanted}
