"""The server half of the drop-in pair: any Flower strategy, with compressed updates.

``Compressed(FedAvg(...), TopK(density=0.01))`` announces the codec, decodes what comes back and lets the inner strategy
do what it always does. When the inner strategy is a weighted mean the frames are summed straight into one buffer, so
that aggregation memory is one model whatever the number of clients; any other strategy is handed dense replies.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from fedcomp.codecs import Codec, get_codec
from fedcomp.errors import ConfigError, FedcompError, LayoutError
from fedcomp.feedback import ErrorFeedback
from fedcomp.flower.checkpoint import INNER
from fedcomp.flower.logs import log
from fedcomp.flower.payload import NODE_RECORD, payload_bytes, put_frame, take_frame, take_node
from fedcomp.flower.protocol import EXACT, RESYNC, STEP, Announcement, announce
from fedcomp.flower.records import finite_where, restore_dtypes, same_model, to_arrays, to_record
from fedcomp.flower.report import Report, Reports, shorten
from fedcomp.flower.rounds import own_loop
from fedcomp.layout import DensityPolicy, Layout, Update, Vector, policy_config
from fedcomp.plain import Count, Keys
from fedcomp.rng import Key
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.adaptive import Outcome, has_moments, step_on_support
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.means import MEANS, aggregate_once, is_mean, weight_key_of
from fedcomp.strategies.pairings import warn_of_pairing
from fedcomp.strategies.partitions import Holders
from fedcomp.strategies.private.flower_dp import promises, require_clip_holds, require_clip_is_seen
from fedcomp.strategies.private.strategy import PrivateStrategy
from fedcomp.strategies.private.updates import decoded_updates
from fedcomp.strategies.replies import (
    NOT_FINITE,
    Arrays,
    Arrival,
    Peer,
    Rejected,
    Sent,
    Usual,
    admit,
    admit_metrics,
    agreeing,
    consistent,
    match_replies,
)
from fedcomp.strategies.round_log import RoundLog, require_usable
from fedcomp.strategies.statistics import hold_in_record, warn_of_missing_names
from fedcomp.strategies.wrapping import held, loop_of, require_inner
from fedcomp.versions import Broadcast
from fedcomp.wire import FILLED, Frame

Named = dict[str, NDArray[Any]]

_APP_RAISED: Final = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION; the enumeration itself is private


class Compressed(Strategy, Stateful):
    """Compress what an inner Flower strategy exchanges with its clients.

    Parameters
    ----------
    inner : Strategy
        Any Flower 1.41 strategy that works through the ``configure_*``/``aggregate_*`` hooks, a private one included.
        With a codec that lists coordinates, FedAdam, FedYogi and FedAdagrad keep moments and steps to the coordinates
        of which something arrived (:mod:`fedcomp.strategies.adaptive`).
    codec : Codec or dict
        What clients send. The clients learn it from the server's messages.
    downlink : Codec or dict, optional
        What the server sends: compressed differences to nodes whose acknowledged version it knows, the full model to
        the others, every version checked by a digest. None sends the model as the inner strategy does.
    feedback : bool, optional
        Whether to wrap ``codec`` in error feedback. Default: when it is biased, has no memory of its own and does not
        vote.
    policy : DensityPolicy, optional
        Decides per tensor what travels dense; default :class:`fedcomp.layout.SmallDense`.
    guard : Norms, optional
        Refuses updates that are far longer, or weigh far more, than is usual; default nobody does. Not with a private
        strategy that bounds every update itself, as all do but local privacy.
    record : str, optional
        Name of the ArrayRecord that is the model, where messages of the inner strategy hold several. The others pass
        through as they are, unchecked and uncompressed, in both directions; so do those that replies hold beside the
        model, which then has this name there, too. Default: the only ArrayRecord of a message.
    seed : int
        Seed of the random streams of clients and server.

    Attributes
    ----------
    reports : Reports
        Per training round: who was asked, what arrived in which form, what was refused and why.
    evaluations : Reports
        The same for client evaluation.

    Raises
    ------
    ConfigError
        When the codec needs several exchanges, when it votes and the inner strategy is no weighted mean, when the
        inner strategy's rounds are not made by Flower's hooks, or when it is one of Flower's client-side privacy
        wrappers and the codec may enlarge an update.

    Notes
    -----
    An inner strategy that overrides ``start`` runs its own loop, with the hooks of this one. Attributes that this
    strategy does not have are the inner strategy's, for reading, calling and setting.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "inner": INNER,
        "_holders": nested("_holders"),
        "_broadcast": nested("_broadcast"),
        "_session": bytes,
        "_sequence": Count,
        "_peers": dict[int, Peer],
        "_usual": Annotated[dict[str, Usual], Keys(("train", "evaluate"))],
        "reports": Reports,
        "evaluations": Reports,
    }

    def __init__(
        self,
        inner: Strategy,
        codec: Codec | dict[str, Any],
        downlink: Codec | dict[str, Any] | None = None,
        *,
        feedback: bool | None = None,
        policy: DensityPolicy | None = None,
        guard: Norms | None = None,
        record: str | None = None,
        seed: int = 0,
    ) -> None:
        require_inner(inner, "Compressed")
        if any(isinstance(found, Compressed) for found in held(inner)):
            raise ConfigError(
                f"{type(inner).__name__} compresses already, and frames are not compressed again; put one Compressed "
                "around the strategy, with chain(...) for several steps and downlink= for the other direction"
            )
        chosen = get_codec(codec)
        if chosen.phases != 1:
            raise ConfigError(
                f"{chosen!r} needs {chosen.phases} exchanges per round; Flower's hooks offer one. Use its own strategy"
            )
        private = inner if isinstance(inner, PrivateStrategy) else None
        if guard is not None and not isinstance(guard, Norms):
            raise ConfigError(f"guard={guard!r} is not valid: an object, such as Norms(times_median=10)")
        if guard is not None and (promises(inner) if private is None else private.bounds_updates):
            raise ConfigError(
                f"{type(inner).__name__} bounds every update by itself, and a guard would make one client's part in "
                "the private sum depend on the others'; leave guard out"
            )
        if private is not None:
            private.check_codec(chosen)
        if chosen.votes and private is None and not is_mean(inner):
            raise ConfigError(
                f"{chosen!r} sends votes, of which only the weighted sum is an update; {type(inner).__name__} looks at "
                f"single updates. Use one of {', '.join(MEANS)}"
            )
        needless = chosen.lossless or chosen.unbiased or chosen.remembers or chosen.votes
        wanted = not needless if feedback is None else feedback
        if wanted and not chosen.remembers and not chosen.lossless:
            chosen = ErrorFeedback(chosen)
        require_clip_holds(inner, chosen)
        if private is None:
            warn_of_pairing(inner, chosen)
        self._private = private
        self.codec = chosen
        self.downlink = None if downlink is None else get_codec(downlink)
        self.policy = policy
        self.guard = guard
        self.record = record
        self.seed = seed
        self.reports = Reports()
        self.evaluations = Reports()
        self._log = RoundLog(f"Compressed({type(inner).__name__})")
        self._session = secrets.token_bytes(8)
        self._broadcast = None if self.downlink is None else Broadcast(self.downlink)
        self._peers: dict[int, Peer] = {}
        self._holders = Holders()
        self._usual = {"train": Usual(), "evaluate": Usual()}
        self._sequence = 0
        self._sent: list[Sent] = []
        self._record_name = "arrays"
        self._layout = Layout(())
        self._model: Named = {}
        # The last one: from here on what is not an attribute of this strategy is one of the inner's.
        self.inner = inner

    if not TYPE_CHECKING:  # or no attribute of this class would be checked

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the inner strategy."""
            inner = self.__dict__.get("inner")
            if inner is None or name.startswith("__"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(inner, name)

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute of this strategy here; any other, new ones included, on the inner strategy."""
            inner = self.__dict__.get("inner")
            own = inner is None or name in self.__dict__ or hasattr(type(self), name)
            object.__setattr__(self if own else inner, name, value)

    @property
    def own_loop(self) -> bool:
        """Whether the inner strategy overrides Flower's ``start``, and with it the rounds of this one."""
        return own_loop(self.inner)

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the inner strategy's ``start`` with these hooks in place of its own; its arguments, its result.

        Examples
        --------
        >>> from flwr.serverapp.strategy import FedAvg
        >>> from fedcomp.codecs import TopK
        >>> class Saving(FedAvg):
        ...     def start(self, *args, **kwargs):
        ...         result = super().start(*args, **kwargs)
        ...         self.saved = sorted(result.arrays)
        ...         return result
        >>> strategy = Compressed(Saving(), TopK(density=0.01))  # strategy.start(...) saves; strategy.saved says what
        """
        before = self._sequence
        result = loop_of(self.inner, self).start(*args, **kwargs)
        if self.own_loop and self._sequence == before:
            log.warning(
                "%s.start called none of this strategy's hooks: if it made rounds, nothing in them was compressed",
                type(self.inner).__name__,
            )
        return result

    @property
    def layout(self) -> Layout:
        """Layout of the round's updates: that of the model the last messages were made from."""
        return self._layout

    @property
    def sequences(self) -> dict[int, int]:
        """Sequence number of the last message to each node of the current exchange."""
        return {sent.node: sent.sequence for sent in self._sent}

    def summary(self) -> None:
        """Log the codecs, then the inner strategy's own summary."""
        log.info("\t├──> Compressed: uplink %r, downlink %r", self.codec, self.downlink or "dense")
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy configure the round, then announce the codec and compress the model.

        Raises
        ------
        ConfigError
            When one of Flower's privacy wrappers stands around this strategy and its clip would not hold.
        """
        require_clip_is_seen(self, self.codec)
        if self._private is not None:
            # Whom earlier rounds prefer would make one client's part in the sum depend on another's.
            self._holders = Holders()
        self._holders.meet(grid)
        if self._private is None:
            messages = list(self.inner.configure_train(server_round, arrays, config, grid))
            self._adopt(arrays)
        else:
            self._adopt(arrays)
            support = self.codec.common_support(self._layout, Key(self.seed, "uplink", server_round))
            self._private.adopt(arrays, self._layout if support is None else Layout.flat(int(support.size)))
            messages = self._private.ask(server_round, arrays, config, grid)
        return self._address(messages, arrays, server_round, train=True)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy configure evaluation; nodes that hold the model already get no model bytes."""
        messages = list(self.inner.configure_evaluate(server_round, arrays, config, grid))
        if self._broadcast is None or not messages:
            self._sent = [Sent(message, message.metadata.dst_node_id, 0) for message in messages]
            return messages
        self._adopt(arrays)
        return self._address(messages, arrays, server_round, train=False)

    def _adopt(self, arrays: ArrayRecord) -> None:
        self._model = to_arrays(arrays)
        # What is not in the vector is never released in a private round: floats are cast there, not sent beside it.
        cast = self._private is not None or not self.codec.lossless
        layout = Layout.of(self._model, self.policy, cast_floats=cast)
        if layout.order != self._layout.order:
            warn_of_missing_names(layout)
        self._layout = layout

    def _address(
        self, messages: list[Message], arrays: ArrayRecord, server_round: int, *, train: bool
    ) -> list[Message]:
        """Return the messages with an announcement each, and the model in the form each node can use."""
        # A strategy may put copies into its messages; one comparison per distinct record.
        distinct = {id(record): record for _, record in map(self._model_in, messages)}
        own = {key for key, record in distinct.items() if not same_model(record, arrays)}
        if own and train and self.codec.votes:
            raise ConfigError(
                f"{type(self.inner).__name__} sends {len(own)} model(s) beside the global one; their updates cannot "
                f"be put to the vote of {self.codec!r} with the others. Use a codec without votes"
            )
        downlink = self._publish() if messages and not own else None
        # One full model for all nodes that need it: copies would cost the server a model for each.
        whole = (
            None
            if downlink is None or self._broadcast is None
            else to_record(downlink.unflatten(self._broadcast.reference, self._broadcast.exact))
        )
        if train and messages:
            # One number for all: what counted messages would tell every client how many others were asked.
            self._sequence += 1
        self._sent = []
        out = []
        for message in messages:
            node = message.metadata.dst_node_id
            peer = self._peers.setdefault(node, Peer())
            name, record = self._model_in(message)
            self._record_name = name
            announcement = Announcement(record=name, round=server_round, seed=self.seed)
            content = RecordDict(dict(message.content.items()))
            fields: dict[str, Any] = {}
            if train:
                fields |= {
                    "codec": self.codec.to_config(),
                    "session": self._session,
                    "sequence": self._sequence,
                    "acknowledged": peer.acknowledged,
                    "generation": peer.generation,
                }
            if whole is not None:
                fields |= self._fill_model(content, name, peer, whole)
            if train or downlink is not None:
                fields["policy"] = policy_config(self.policy, self._layout)
            announce(content, replace(announcement, **fields))
            metadata = message.metadata
            addressed = Message(
                content, node, metadata.message_type, ttl=metadata.ttl, group_id=metadata.group_id or None
            )
            base = to_arrays(record) if id(record) in own else None
            self._sent.append(Sent(addressed, node, fields.get("sequence", 0), base, name))
            out.append(addressed)
        return out

    def _model_in(self, message: Message) -> tuple[str, ArrayRecord]:
        """Return name and arrays of the model in a message of the inner strategy."""
        found = {k: v for k, v in message.content.items() if isinstance(v, ArrayRecord)}
        name = next(iter(found), "") if self.record is None else self.record
        if name not in found or (self.record is None and len(found) > 1):
            wanted = "the only one" if self.record is None else f"one called {self.record!r}"
            raise ConfigError(
                f"the inner strategy put {len(found)} ArrayRecords {sorted(found)} into a message; Compressed takes "
                f"{wanted} as the model. Name it with record=...; the others pass through untouched"
            )
        if self._private is not None and len(found) > 1:
            raise ConfigError(
                f"messages of {type(self.inner).__name__} hold {len(found)} ArrayRecords {sorted(found)}; a private "
                "round exchanges the model and nothing else"
            )
        return name, found[name]

    def _publish(self) -> Layout | None:
        """Publish the current model on the downlink; return the downlink's layout, None when it is not compressed."""
        if self._broadcast is None or self.downlink is None:
            return None
        layout = Layout.of(self._model, self.policy, cast_floats=not self.downlink.lossless)
        exact = {t.name: self._model[t.name] for t in layout.exact}
        key = Key(self.seed, "downlink", self._broadcast.version + 1)
        self._broadcast.publish(layout.flatten(self._model), exact, layout, key)
        return layout

    def _fill_model(self, content: RecordDict, name: str, peer: Peer, whole: ArrayRecord) -> dict[str, Any]:
        """Put the model into ``content`` as steps or whole; return the announcement's fields for it."""
        broadcast = self._broadcast
        assert broadcast is not None
        steps = broadcast.steps_from(peer.version)
        if steps is None:
            content[name] = whole
        else:
            del content[name]
            for step in steps:
                put_frame(content, f"{STEP}.{step.version}", step.frame)
                if step.exact is not None:
                    put_frame(content, f"{STEP}.{step.version}.exact", step.exact)
        return {
            "downlink": broadcast.codec.to_config(),
            "version": broadcast.version,
            "base": 0 if steps is None else peer.version,
            "digest": broadcast.digest,
        }

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check and decode the replies in partition order and let the inner strategy aggregate them.

        A reply that cannot be used is reported and left out; its sender is not acknowledged, so that a client with
        memory puts the mass back. Returns ``(None, None)`` when nothing usable came.

        Raises
        ------
        NoUsableReply
            When clients were asked, no reply of theirs can be used, and no earlier round brought an update either.
        """
        began = time.perf_counter()
        report = self.reports.join(server_round)
        report.asked = len(self._sent)
        arrays, metrics = self._aggregate(server_round, replies, report)
        report.seconds += time.perf_counter() - began
        # A private round may have released, and paid for, its noise without a reply.
        if arrays is None and not self._withheld and not any(earlier.used for earlier in self.reports.values()):
            require_usable(report)
        self._log.conclude(report, withheld=self._withheld)
        return arrays, metrics

    def _aggregate(
        self, server_round: int, replies: Iterable[Message], report: Report
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        weight_key = weight_key_of(self.inner)
        key = Key(self.seed, "uplink", server_round)
        arrivals: list[Arrival] = []
        errors: list[Message] = []
        bare = self._private is not None
        bounded = self._private is not None and self._private.bounds_updates
        start = None if bounded else self._reference(self._layout.flatten(self._model))
        # A plain update among votes, or on a support shared by all, is made what the others' are.
        encoded = self.codec.votes or (bare and self.codec.common_support(self._layout, key) is not None)
        for sent, reply in match_replies(self._sent, replies, report, self._holders):
            if reply.has_error():
                self._note_error(sent, reply, report)
                errors.append(reply)
                continue
            try:
                arrival = admit(
                    sent, reply, self.codec, self._layout, self._model, weight_key, key, bare=bare, start=start
                )
                if encoded and arrival.plain is not None:
                    arrival.frame = self._vote(arrival.plain, key.at(partition=take_node(reply) or 0))
                arrivals.append(arrival)
                self._note_version(sent, reply)
            except Rejected as reason:
                report.refuse(sent.node, str(reason))
                errors.append(Message(Error(_APP_RAISED, str(reason)), reply_to=sent.message))
        if self._private is not None:
            arrivals = self._bared(self._private, arrivals, report)
        past = self.reports.before(server_round)
        usual = self._usual["train"] if self._private is None else None
        checked, arrivals = arrivals, consistent(arrivals, report, usual, self.guard, past)
        # An outlier is dropped for good: put back into its client's memory, it would come again and again.
        self._acknowledge([(a.sent.node, a.sequence, a.generation) for a in checked if a.outlier])
        if self._private is not None:
            return self._aggregate_private(server_round, self._private, arrivals, report, key)
        if not arrivals:
            return None, None
        self._account(arrivals, report)
        # Models of their own for some nodes cannot be summed as changes of one model.
        mean = is_mean(self.inner) and all(a.sent.base is None for a in arrivals)
        aggregate = self._aggregate_mean if mean else self._aggregate_dense
        with np.errstate(over="ignore", invalid="ignore"):
            arrays, metrics = aggregate(server_round, arrivals, errors, report)
        if arrays is None:
            if len(report.refused) + report.lost < report.asked:
                report.notes.append(f"{type(self.inner).__name__} made no model of the replies; the model is kept")
            return None, metrics
        consumed = [(a.sent.node, a.sequence, a.generation) for a in arrivals]
        if not self._accept(arrays, consumed, report):
            return None, None
        return self._restored(arrays, [a.exact for a in arrivals], report), metrics

    def check_summed(self) -> None:
        """Refuse what needs single updates, where only their sum will be known.

        Raises
        ------
        ConfigError
            When there is a guard.
        """
        if self.guard is not None:
            raise ConfigError(f"{self.guard!r} judges single updates, of which a coded sum shows none; leave guard out")

    def aggregate_sum(
        self,
        server_round: int,
        mean: Vector,
        weight: float,
        members: Iterable[tuple[int, int, int]],
        contents: Sequence[RecordDict] = (),
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take an update that was averaged elsewhere, in place of :meth:`aggregate_train`: nobody's own frame is here.

        The inner strategy runs once, on the mean, and the members are acknowledged. Buffers that travel as values keep
        the model's own: there is no sum of them.

        Parameters
        ----------
        mean : float32 array, shape (layout size,)
            The mean update, in the order of :attr:`layout`.
        weight : float
            The total weight it stands for.
        members : iterable of (node, sequence, generation)
            Whose frames are in it, by the numbers in their headers; a generation of 0 (no memory) acknowledges nothing.
        contents : sequence of RecordDict
            Replies whose metrics are aggregated.

        Raises
        ------
        ConfigError
            When the inner strategy is no weighted mean: it would need the single updates.
        LayoutError
            When ``mean`` does not have the layout's size and dtype.
        """
        if not is_mean(mean_of := self.inner if self._private is None else self._private.inner):
            raise ConfigError(
                f"{type(mean_of).__name__} looks at single updates, of which a coded sum shows none; use one of "
                f"{', '.join(MEANS)}"
            )
        self.check_summed()
        layout = self._layout
        if mean.shape != (layout.size,) or mean.dtype != np.float32:
            raise LayoutError(f"the mean is {mean.dtype}{mean.shape}, expected float32({layout.size},)")
        consumed = list(members)
        report = self.reports.join(server_round)
        report.asked = len(self._sent)
        report.lost = len(self._sent) - len(consumed)
        report.compressed = len(consumed)
        report.fresh = [node for node, sequence, generation in consumed if generation and generation == sequence]
        if not consumed or weight <= 0:
            report.notes.append("all replies have weight 0: nothing to average, the model is unchanged")
            self._log.conclude(report, withheld=self._withheld)
            return None, None
        report.changed = int(np.count_nonzero(mean[: layout.compressed_size]))
        with np.errstate(over="ignore", invalid="ignore"):
            moved = layout.flatten(self._model) + mean
            moved_to = to_record(layout.unflatten(moved, {t.name: self._model[t.name] for t in layout.exact}))
            named = (self._record_name, moved_to)
            received = None if self._private is not None else (len(consumed), report.lost)
            message, sparse = self._sent[0].message, self.codec.sparse(layout)
            arrays, metrics = aggregate_once(
                mean_of, server_round, named, message, contents, received=received, sparse=sparse
            )
        accepted = arrays is not None and self._accept(arrays, consumed, report)
        model = self._restored(arrays, [], report) if arrays is not None and accepted else None
        self._log.conclude(report, withheld=self._withheld)
        return model, None if model is None else metrics

    def skip_round(self, server_round: int) -> tuple[None, None]:
        """Report a round that was given up before any reply was there to aggregate; whoever gave it up says why."""
        lost = len(self._sent)
        report = self.reports.join(server_round)
        report.asked = report.lost = lost
        self._log.conclude(report, withheld=self._withheld)
        return None, None

    @property
    def _withheld(self) -> bool:
        """Whether neither log nor reports may say who took part."""
        return self._private is not None and self._private.withholds

    def _restored(self, arrays: ArrayRecord, sent: Sequence[Arrays], report: Report) -> ArrayRecord:
        """Return an aggregate in the model's own dtypes, without variances that turned negative."""
        restored = restore_dtypes(arrays, self._model, sent)
        if note := hold_in_record(restored, self._layout, self._model):
            report.notes.append(note)
        return restored

    def _accept(self, arrays: ArrayRecord, consumed: list[tuple[int, int, int]], report: Report) -> bool:
        """Return whether the aggregate can be the new model; if so, acknowledge (node, sequence, generation)."""
        if not finite_where(arrays, self._model):
            report.notes.append(NOT_FINITE)
            return False
        report.used += len(consumed)
        self._acknowledge(consumed)
        return True

    def _acknowledge(self, consumed: Iterable[tuple[int, int, int]]) -> None:
        for node, sequence, generation in consumed:
            # A reply without memory acknowledges nothing: the last frame of the memory stays the one consumed.
            if generation:
                peer = self._peers[node]
                peer.acknowledged, peer.generation = sequence, generation

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Note which versions the nodes hold, leave out replies that cannot be averaged, and let inner aggregate."""
        report = self.evaluations.begin(server_round)
        report.asked = len(self._sent)
        weight_key = weight_key_of(self.inner)
        usable: list[tuple[tuple[Sent, Message], str, RecordDict]] = []
        errors: list[Message] = []
        for sent, reply in match_replies(self._sent, replies, report, self._holders):
            if reply.has_error():
                self._note_error(sent, reply, report)
                errors.append(reply)
                continue
            try:
                admit_metrics(reply, weight_key)
            except Rejected as reason:
                report.refuse(sent.node, str(reason))
                continue
            self._note_version(sent, reply)
            if NODE_RECORD in reply.content:
                del reply.content[NODE_RECORD]
            usable.append(((sent, reply), "", reply.content))
        kept = agreeing(usable, report, lambda pair: pair[0].node, self._usual["evaluate"])
        self._log.warn(report)
        return self.inner.aggregate_evaluate(server_round, [*(reply for _, reply in kept), *errors])

    def _note_error(self, sent: Sent, reply: Message, report: Report) -> None:
        reason = f"error {reply.error.code}: {reply.error.reason}"
        if reply.error.reason and RESYNC in reply.error.reason:
            self._peers[sent.node].version = 0
        report.refuse(sent.node, reason)

    def _account(self, arrivals: list[Arrival], report: Report) -> None:
        """Add up what the usable replies took, and what as many full models take."""
        framed = [a for a in arrivals if a.frame is not None and a.plain is None]
        exact = sum(len(take_frame(a.message.content, EXACT) or b"") for a in framed)
        report.account(self.codec, self._layout, [a.frame for a in framed if a.frame is not None], exact_bytes=exact)
        report.payload_bytes = sum(payload_bytes(a.message) for a in arrivals)
        beside = [record for a in arrivals for record in a.content.array_records.values()]
        report.model_bytes = len(arrivals) * sum(array.nbytes for array in self._model.values()) + sum(
            len(array.data) for record in beside for array in record.values()
        )

    def _note_version(self, sent: Sent, reply: Message) -> None:
        header = reply.content.config_records.get(NODE_RECORD, ConfigRecord())
        version = header.get("version", 0)
        known = self._broadcast is not None and isinstance(version, int) and version == self._broadcast.version
        self._peers[sent.node].version = version if known else 0  # type: ignore[assignment]

    def _aggregate_mean(
        self, server_round: int, arrivals: list[Arrival], errors: list[Message], report: Report
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum all frames into one buffer with Flower's own weights, and hand the mean to the inner strategy."""
        # All replies have the same ones. The inner strategy sees the mean of the models in their place.
        if unread := sorted(arrivals[0].content.array_records):
            report.notes.append(
                f"replies hold the ArrayRecords {shorten(str(unread))} beside the model, which "
                f"{type(self.inner).__name__} does not read: they were sent for nothing, "
                "unless its train_metrics_aggr_fn, which is given them, uses them"
            )
        total = sum(a.weight for a in arrivals)
        if total <= 0:
            for arrival in arrivals:
                report.refuse(arrival.sent.node, "weight 0, as all others of the round: nothing to average")
            return None, None
        layout = self._layout
        # -0.0 is the exact identity of addition: the first contribution is stored, not added to +0.0.
        out = Update(np.full(layout.size, -0.0, np.float32), layout)
        model = layout.flatten(self._model)
        start = self._reference(model)
        exact: Named = {}
        for arrival in arrivals:
            factor = arrival.weight / total
            if arrival.frame is not None:
                self.codec.accumulate(arrival.frame, factor, out)
            elif arrival.plain is not None:
                vector = layout.flatten(arrival.plain)
                if not self.codec.lossless:
                    vector -= start
                vector *= np.float32(factor)
                np.add(out.vector, vector, out=out.vector)
            for name, array in arrival.exact.items():
                # numpy's promotion here is Flower's: int64 buffers become float64 means.
                exact[name] = exact[name] + array * factor if name in exact else array * factor
        # Infinities that are the model's own constants (masks), times a weight of 0, are not numbers.
        for name, array in exact.items():
            own = self._model[name]
            exact[name] = np.where(np.isnan(array) & ~np.isfinite(own), own, array)
        self.codec.conclude(out)
        moved = out.vector != start if self.codec.lossless else out.vector
        report.changed = int(np.count_nonzero(moved[: layout.compressed_size]))
        if not self.codec.lossless:
            np.add(model, out.vector, out=out.vector)
        elif start is not model:
            # Clients sent whole models grown from the reference: add what the reference lacks of the true model.
            np.add(out.vector, model - start, out=out.vector)
        first = arrivals[0]
        return aggregate_once(
            self.inner,
            server_round,
            (first.record, to_record(layout.unflatten(out.vector, exact))),
            first.sent.message,
            [a.content for a in arrivals],
            metrics_name=first.metrics_name,
            received=(len(arrivals), len(report.refused)),
            sparse=self.codec.sparse(layout),
        )

    def _bared(self, private: PrivateStrategy, arrivals: list[Arrival], report: Report) -> list[Arrival]:
        """Return the arrivals of a private round without all but their updates; reject what nobody privatised.

        What a reply says decides about itself alone: names of records and metrics are not put to a majority.
        """
        for arrival in arrivals:
            arrival.record, arrival.content, arrival.memory = self._record_name, RecordDict(), None
            if arrival.plain is not None and not private.takes_plain:
                report.refuse(arrival.sent.node, "an update that its client did not privatise; its app lacks the mod")
        return [arrival for arrival in arrivals if arrival.sent.node not in report.refused]

    def _aggregate_private(
        self, server_round: int, private: PrivateStrategy, arrivals: list[Arrival], report: Report, key: Key
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Hand the decoded updates, one after the other, to the private sum."""
        if private.pad and (longest := self.codec.longest(self._layout)) is not None:
            report.padded_bytes = longest + FILLED
        start = self._reference(self._layout.flatten(self._model))
        updates = decoded_updates(arrivals, self.codec, self._layout, start)
        support = self.codec.common_support(self._layout, key)
        arrays, metrics = private.aggregate_updates(server_round, updates, self._layout, report=report, support=support)
        used = [(a.sent.node, a.sequence, a.generation) for a in arrivals if a.sent.node not in report.refused]
        if arrays is None or not self._accept(arrays, used, report):
            return None, None
        return arrays, metrics

    def _aggregate_dense(
        self, server_round: int, arrivals: list[Arrival], errors: list[Message], report: Report
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode every reply into an ordinary dense one; memory grows with the number of replies, as in Flower."""
        layout = self._layout
        shared = layout.flatten(self._model)
        start = self._reference(shared)
        changed = np.zeros(layout.size, np.bool_)
        messages = []
        for arrival in arrivals:
            base = shared if arrival.sent.base is None else layout.flatten(arrival.sent.base)
            trained_from = start if arrival.sent.base is None else base
            if arrival.plain is not None:
                vector = layout.flatten(arrival.plain)
            elif arrival.frame is not None:
                vector = self.codec.decode(arrival.frame, layout)
            if arrival.plain is None and not self.codec.lossless:
                changed |= vector != 0.0
                vector += base
            else:
                changed |= vector != trained_from
                if start is not shared and arrival.sent.base is None:
                    vector += shared - start
            # First, as in the reply of an app that puts other records beside it.
            decoded = {arrival.record: to_record(layout.unflatten(vector, arrival.exact))}
            arrival.message.content = RecordDict({**decoded, **arrival.content})
            messages.append(arrival.message)
        report.changed = int(np.count_nonzero(changed[: layout.compressed_size]))

        def step() -> Outcome:
            return self.inner.aggregate_train(server_round, [*messages, *errors])

        if has_moments(self.inner) and self.codec.sparse(layout):
            where = {t.name: changed[t.slice].reshape(t.shape) for t in layout.tensors}
            where |= {t.name: np.ones(t.shape, np.bool_) for t in layout.exact}
            return step_on_support(self.inner, where, step)
        return step()

    def _vote(self, plain: Arrays, key: Key) -> Frame:
        """Return the vote of a client without the mod: what the codec makes of its update.

        Raises
        ------
        Rejected
            When there is none, as for an update that is not finite.
        """
        layout = self._layout
        vector = layout.flatten(plain)
        with np.errstate(over="ignore"):
            vector -= self._reference(layout.flatten(self._model))
        try:
            return self.codec.encode(Update(vector, layout), self.codec.init(layout), key)[0]
        except FedcompError as error:
            raise Rejected(f"{type(error).__name__}: {error}") from error

    def _reference(self, model: Vector) -> Vector:
        """Return the vector clients trained from, in the uplink's layout: ``model`` itself without a lossy downlink."""
        if self._broadcast is None or self._broadcast.version == 0 or self._broadcast.codec.lossless:
            return model
        layout = Layout.of(self._model, self.policy, cast_floats=True)
        return self._layout.flatten(layout.unflatten(self._broadcast.reference, self._broadcast.exact))

    def identity(self) -> dict[str, str]:
        """Return the codecs, which must not change within a run."""
        return {"uplink": repr(self.codec), "downlink": repr(self.downlink)}
