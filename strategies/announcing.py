"""What the server of the drop-in pair says with every message: the codec, and the model in the form a node can use."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.codecs import Codec
from fedcomp.errors import ConfigError
from fedcomp.factors.collect import Captured
from fedcomp.factors.outer import OuterProducts
from fedcomp.flower.logs import log
from fedcomp.flower.payload import put_frame
from fedcomp.flower.protocol import STEP, Announcement, announce
from fedcomp.flower.records import same_model, to_arrays, to_record
from fedcomp.flower.report import Report
from fedcomp.layout import DensityPolicy, Layout, Update, Vector, policy_config
from fedcomp.plain import Count
from fedcomp.rng import Key
from fedcomp.rules import LARGEST, Flag, Int, checked
from fedcomp.stateful import Stateful, nested, next_epoch, within_epoch
from fedcomp.strategies.intake import Intake
from fedcomp.strategies.replies import Origin, Peer, SentMessage
from fedcomp.strategies.statistics import warn_of_missing_names
from fedcomp.versions import FIRST, Broadcast, Summands

MAX_WAITING: Final = 64
"""Training exchanges that may wait for their replies at a time."""


class OpenExchanges:
    """The messages of training exchanges by their rounds, until a round is configured after they were answered."""

    def __init__(self) -> None:
        self._sent: dict[int, list[SentMessage]] = {}
        self._answered: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        return iter(self._sent)

    def hold(self, server_round: int, sent: list[SentMessage]) -> None:
        """Keep a round's messages until its replies are aggregated."""
        for former in self._answered:
            self._sent.pop(former, None)
        self._answered = set()
        self._sent[server_round] = sent
        for former in list(self._sent)[:-MAX_WAITING]:
            # Each holds a model; a loop that never aggregates would fill the memory.
            del self._sent[former]
            log.warning(
                "round %d: %d later rounds were configured before it was aggregated: it is given up",
                former,
                MAX_WAITING,
            )

    def of(self, server_round: int) -> list[SentMessage]:
        """Return the messages of a round.

        Raises
        ------
        ConfigError
            When there are none: the round was not configured, or another one was after its replies were aggregated.
        """
        if server_round not in self._sent:
            raise ConfigError(
                f"round {server_round} was not configured, or was aggregated before the last one was; rounds that wait "
                f"for replies: {sorted(self._sent)}"
            )
        return self._sent[server_round]

    def answer(self, server_round: int) -> None:
        """Note that a round's replies were aggregated."""
        self._answered.add(server_round)


class Announcer(Stateful):
    """Keeps the session, the versions of the model, and the messages of the current exchange.

    Parameters
    ----------
    downlink : Codec or None
        What the server sends; None sends models as they are.
    policy : DensityPolicy or None
    record : str or None
        Name of the ArrayRecord that is the model; None: the only one.
    seed : int
    first_at_nodes : bool
        Whether nodes make the model that the run begins with, so that it need not be sent.

    Attributes
    ----------
    layout : Layout
        That of the model the last messages were made from.
    sent : list of SentMessage
        The messages of the last exchange.
    waiting : OpenExchanges
        Those of training exchanges by their rounds.
    captured : Captured or None
        The outer products of which the last aggregate is the sum, for a downlink that has a use for them.
    summands : sequence of (frame, weight)
        The frames of which it is the sum, for a downlink that repeats them.
    broadcast : Broadcast or None
        The versions of the model that were sent; None without a downlink.
    sequence : int
        Number of the last training exchange.
    """

    STATE: ClassVar[Mapping[str, Any]] = {"broadcast": nested("broadcast"), "_session": bytes, "sequence": Count}

    def __init__(
        self,
        downlink: Codec | None,
        policy: DensityPolicy | None,
        record: str | None,
        seed: int,
        *,
        first_at_nodes: bool = False,
    ) -> None:
        if policy is not None and not callable(policy):
            raise ConfigError(f"policy={policy!r} is not valid: a DensityPolicy, such as SmallDense(min_size=1000)")
        if record is not None and not (isinstance(record, str) and record):
            raise ConfigError(f"record={record!r} is not valid: the name of an ArrayRecord")
        if checked("first_model_at_nodes", first_at_nodes, Flag()) and downlink is None:
            raise ConfigError(
                "first_model_at_nodes without a downlink: models travel whole in every round. Name a downlink, "
                "Identity() for models without loss, and give the clients compression(first_model=...)"
            )
        # Of a node that was never asked; the digest shows whether it is true.
        self._held_at_first = FIRST if first_at_nodes else 0
        self.layout = Layout(())
        self.sent: list[SentMessage] = []
        self.waiting = OpenExchanges()
        self.captured: Captured | None = None
        self.summands: Summands = []
        self._downlink = downlink
        self._policy = policy
        self._record = record
        self._seed: int = checked("seed", seed, Int(-LARGEST - 1))
        # Not from the seed: a second run with the same one must not go on with the clients' memory of the first.
        self._session = secrets.token_bytes(8)
        self.sequence = 0
        self.broadcast = None if downlink is None else Broadcast(downlink)
        self._adopted: list[Array] = []
        self._model: dict[str, NDArray[Any]] = {}

    @property
    def model(self) -> dict[str, NDArray[Any]]:
        """The tensors of the model that was adopted last."""
        return self._model

    @property
    def version(self) -> int:
        """Version of the model that was published last; 0 where models have none."""
        return 0 if self.broadcast is None else self.broadcast.version

    def restored(self) -> None:
        """Take the layout from the next model."""
        self.layout, self._adopted = Layout(()), []

    def renumber(self) -> None:
        """Number messages and versions so that none is taken for one that was sent after the state was saved."""
        super().renumber()
        self.sequence = next_epoch(self.sequence)

    def layout_of(self, arrays: ArrayRecord, codec: Codec, *, updates_only: bool) -> Layout:
        """Return the layout of updates of a model.

        What is not in the vector is never released in a private round: floats are cast there, not sent beside it.
        """
        return Layout.of(to_arrays(arrays), self._policy, cast_floats=updates_only or not codec.lossless)

    def adopt(self, arrays: ArrayRecord, codec: Codec, *, updates_only: bool) -> None:
        """Take the model of the messages to come, and of the updates that are added next."""
        # The same arrays are the same model: exchanges that share it are then known to.
        given = list(arrays.values())
        if self._adopted and list(map(id, given)) == list(map(id, self._adopted)) and list(arrays) == [*self._model]:
            return
        self._adopted, self._model = given, to_arrays(arrays)
        layout = Layout.of(self._model, self._policy, cast_floats=updates_only or not codec.lossless)
        # Once per model, not once per round.
        if layout.order != self.layout.order:
            warn_of_missing_names(layout)
        self.layout = layout

    def pass_through(self, messages: list[Message]) -> list[Message]:
        """Note messages that go out as they are."""
        self.sent = [SentMessage(message, message.metadata.dst_node_id, 0) for message in messages]
        return messages

    def address(
        self,
        messages: list[Message],
        arrays: ArrayRecord,
        server_round: int,
        peers: dict[int, Peer],
        codec: Codec | None,
    ) -> list[Message]:
        """Return the messages with an announcement each, and the model in the form each node can use.

        Parameters
        ----------
        arrays : ArrayRecord
            The model that was adopted.
        codec : Codec or None
            What clients are to encode with; None where they do not train.

        Raises
        ------
        ConfigError
            When a message does not hold one model that can be told.
        """
        # A strategy may put copies into its messages; one comparison per distinct record.
        distinct = {id(record): record for _, record in map(self._model_in, messages)}
        own = {key for key, record in distinct.items() if not same_model(record, arrays)}
        if own and codec is not None and codec.votes:
            raise ConfigError(
                f"the inner strategy sends {len(own)} model(s) beside the global one; their updates cannot be put to "
                f"the vote of {codec!r} with the others. Use a codec without votes"
            )
        # A broadcast has one model; where nodes get models of their own these travel as they are.
        downlink = self._publish() if messages and not own else None
        # One full model for all nodes that need it: copies would cost the server a model for each.
        whole = (
            None
            if downlink is None or self.broadcast is None
            else to_record(downlink.unflatten(self.broadcast.reference, self.broadcast.exact))
        )
        if codec is not None and messages:
            # One number for all: what counted messages would tell every client how many others were asked.
            self.sequence += 1
        self.sent = []
        origin = None
        if codec is not None and messages:
            # Now that the model is published: what a lossy downlink makes of it is what clients train from.
            origin = Origin.of(server_round, self._model, self._reference(), self.version, self.layout, codec)
        for message in messages:
            node = message.metadata.dst_node_id
            peer = peers.setdefault(node, Peer(version=self._held_at_first))
            name, record = self._model_in(message)
            # Strategies put the same records into all messages; what is added here is this node's alone.
            content = message.content.copy()
            fields: dict[str, Any] = {}
            if codec is not None:
                fields |= self.training_fields(peer, codec)
            if whole is not None and self.broadcast is not None:
                fields |= self.fill_model(content, name, peer, whole)
                fields["downlink"] = self.broadcast.codec.to_config()
            # Both ends lay the model out by the policy; without a codec nobody does.
            if codec is not None or downlink is not None:
                fields["policy"] = self.policy_fields()
            announce(content, replace(Announcement(record=name, round=server_round, seed=self._seed), **fields))
            metadata = message.metadata
            addressed = Message(
                content, node, metadata.message_type, ttl=metadata.ttl, group_id=metadata.group_id or None
            )
            # Kept to subtract from what this node sends back; for the others the model itself serves.
            base = to_arrays(record) if id(record) in own else None
            self.sent.append(SentMessage(addressed, node, fields.get("sequence", 0), base, name, origin))
        return [sent.message for sent in self.sent]

    def policy_fields(self) -> dict[str, Any]:
        """Return what tells a client which tensors travel dense."""
        return policy_config(self._policy, self.layout)

    def training_fields(self, peer: Peer, codec: Codec) -> dict[str, Any]:
        """Return what a training message announces: the codec, and which update of the node was consumed last."""
        return {
            "codec": codec.to_config(),
            "session": self._session,
            "sequence": self.sequence,
            "acknowledged": peer.acknowledged,
            "generation": peer.generation,
        }

    def fill_model(self, content: RecordDict, name: str, peer: Peer, whole: ArrayRecord) -> dict[str, Any]:
        """Put the broadcast model into ``content`` as the steps a node lacks, or whole; return what announces it.

        Parameters
        ----------
        whole : ArrayRecord
            The model, for a node that no steps lead from.
        """
        broadcast = self.broadcast
        assert broadcast is not None
        steps = broadcast.steps_from(peer.version)
        # The model leaves the message: steps take its place, or the reference does, which is what replicas hold.
        content.pop(name, None)
        if steps is None:
            content[name] = whole
        for step in steps or ():
            for suffix, part in {"": step.frame, ".exact": step.exact}.items():
                if part is not None:
                    put_frame(content, f"{STEP}.{step.version}{suffix}", part)
        return {
            "version": broadcast.version,
            "base": 0 if steps is None else peer.version,
            "digest": broadcast.digest,
        }

    def intake(
        self, report: Report, sent: Sequence[SentMessage], codec: Codec, weight_key: str | None, *, updates_only: bool
    ) -> Intake:
        """Return messages as their replies are to be received: updates will be added to the model adopted last."""
        report.asked = len(sent)
        stepped: frozenset[str] = frozenset()
        if codec.lossless and any(np.dtype(t.dtype).kind == "f" for t in self.layout.exact):
            # Beside a lossless codec floats of other sizes travel as values: not what the policy leaves out, too.
            steps = Layout.of(self._model, self._policy, cast_floats=True)
            stepped = frozenset(t.name for t in self.layout.exact) & {t.name for t in steps.tensors}
        return Intake(
            report,
            sent,
            self.layout,
            self._model,
            codec,
            # The stream that clients encode with; each reply adds its partition.
            Key(self._seed, "uplink", report.round),
            weight_key=weight_key,
            record=sent[0].record if sent else "arrays",
            updates_only=updates_only,
            stepped=stepped,
        )

    def _model_in(self, message: Message) -> tuple[str, ArrayRecord]:
        """Return name and arrays of the model in a message of the inner strategy."""
        found = {k: v for k, v in message.content.items() if isinstance(v, ArrayRecord)}
        name = next(iter(found), "") if self._record is None else self._record
        if name not in found or (self._record is None and len(found) > 1):
            wanted = "the only one" if self._record is None else f"one called {self._record!r}"
            raise ConfigError(
                f"the inner strategy put {len(found)} ArrayRecords {sorted(found)} into a message; Compressed takes "
                f"{wanted} as the model. Name it with record=...; the others pass through untouched"
            )
        return name, found[name]

    def _publish(self) -> Layout | None:
        """Publish the current model on the downlink; return the downlink's layout, None when it is not compressed."""
        if self.broadcast is None or self._downlink is None:
            return None
        # By the downlink's codec: its layout need not be the uplink's.
        layout = Layout.of(self._model, self._policy, cast_floats=not self._downlink.lossless)
        exact = {t.name: self._model[t.name] for t in layout.exact}
        # By version, not by round: evaluation publishes a model too, and an unchanged one not at all.
        key = Key(self._seed, "downlink", within_epoch(self.broadcast.version) + 1)
        captured, self.captured = self.captured, None
        explain = partial(_explained, captured, self.broadcast.reference)
        summands, self.summands = self.summands, []
        self.broadcast.publish(layout.flatten(self._model), exact, layout, key, explain, summands)
        return layout

    def _reference(self) -> Vector | None:
        """Return the vector clients trained from, in the uplink's layout; None where it is the model itself."""
        # A lossless downlink brings the model itself.
        if self.broadcast is None or self.broadcast.version == 0 or self.broadcast.codec.lossless:
            return None
        layout = Layout.of(self._model, self._policy, cast_floats=True)
        # By way of the tensors: the two layouts may differ in which of them are in the vector.
        return self.layout.flatten(layout.unflatten(self.broadcast.reference, self.broadcast.exact))


def _explained(captured: Captured | None, reference: Vector, change: Update) -> dict[str, OuterProducts]:
    """Return the outer products of which a step is the sum, where the last aggregate brought such."""
    if captured is None:
        return {}
    tensors = change.layout.tensors
    found = captured.explaining(
        {t.name: change.vector[t.slice] for t in tensors}, {t.name: reference[t.slice] for t in tensors}
    )
    for note in captured.notes:
        log.info("what goes down is not made of factors: %s", note)
    return found
