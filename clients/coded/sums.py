"""The client half of coded sums: share one's own update so that nobody can read it, add up what others share.

The update is what the compression mod made of it: a frame of integers (:class:`fedcomp.codecs.FixedPoint`), which the
mod keeps as pending until a later message acknowledges it. Here the frame is taken out of the reply, and with it the
weight and all metrics, unless the plan asks for these; what leaves are shards, or a masked vector and the shards of its
mask. A message that is delivered again is coded again, under a tag of its own: the server sees to it that relays add
shards of one tag. So is the update of a message that a restarted server sends under another number: it is the same
update, and is shared in one round only.

Two things are remembered for longer than a run, since a server that names another run, or sends an old message in a new
round, must not get past them: which sets this node added, and in which round it shared its last update.
"""

from __future__ import annotations

import struct
from typing import Any, ClassVar, Final

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.clients.coded.mod import REASON
from fedcomp.clients.coded.shards import Shards, Terms
from fedcomp.clients.half import CallNext
from fedcomp.clients.messages import find_announcement
from fedcomp.codecs import FixedPoint, fixed_point_of, get_codec
from fedcomp.coding.errors import CodingError, NotDecodable, PacketError
from fedcomp.coding.sumcode import SumPlan, contribution, mask, shares
from fedcomp.coding.sumshards import (
    MASKED,
    SHARE,
    TAG_BYTES,
    AnsweredSets,
    HeldTags,
    Shard,
    make_tag,
    set_digest,
)
from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.flower.coded import (
    COLLECT,
    MASKED_UPDATE,
    PUT,
    SUM,
    SUM_SHARD,
    Header,
    SumHeld,
    SumQuestion,
    SumReport,
    SumShared,
    SumTraining,
    put_bundle,
)
from fedcomp.flower.logs import log
from fedcomp.flower.payload import NODE_RECORD, has_frame, put_frame, take_frame
from fedcomp.flower.protocol import EXACT, UPDATE, Announcement
from fedcomp.flower.state import update_number

_BOOK: Final = "fedcomp.coded.sums"
_ENTRY: Final = struct.Struct("<8sQ24s")
"""Run, round and name of the last set that was added in the run."""

_EVERY_SUM: Final = 2
"""Contributors that every sum has: of fewer it would be somebody's own update."""

_RUNS: Final = 64
"""Runs for which one node adds up. Forgetting one would allow a second answer in it."""


class SumCodeClient(Shards):
    """Answers the messages of a coded sum.

    Attributes
    ----------
    hides_zeros : bool
        Whether what is shared has noise in every coordinate.
    """

    hides_zeros: ClassVar[bool] = False

    def answer(self, call_next: CallNext) -> Message:
        """Train and share, report what is held, or add it up."""
        kind = self.exchange.kind
        self.exchange.enter()
        if kind in (PUT, COLLECT):
            return self._report()
        if kind == SUM:
            return self._add_up()
        if kind.partition(".")[0] == "train":
            return self._share(call_next)
        raise StateError(f"a coded sum has no messages of type {kind!r}")

    # Sharing.

    def _share(self, call_next: CallNext) -> Message:
        exchange = self.exchange
        asked = exchange.take(SumTraining)
        plan = SumPlan.from_config(asked.plan)
        announcement = find_announcement(exchange.msg.content)
        if announcement is None:
            raise StateError(
                "the message announces no codec; a coded sum stands around fedcomp.strategies.compressed.Compressed"
            )
        # Before training: an update that was shared in another round is not computed again.
        self._require_unshared(announcement, announcement.sequence)
        reply = call_next(exchange.plain_message(), exchange.context)
        if reply.has_error():
            return reply
        # And when it is there: the answer may be an update that was made for another message.
        self._require_unshared(announcement, update_number(exchange.context, announcement))
        codec, integers = self._integers(reply.content, announcement, asked, plan)
        header = reply.content.config_records[NODE_RECORD]
        self._look_for_alone(integers, plan)
        tag = make_tag(_number(header, "sequence"), _number(header, "generation", 0))
        weight = self._weight(reply.content, asked.weight, plan)
        vector = contribution(plan, integers, weight, _cut(codec, integers, plan))
        source = asked.index
        content = RecordDict()
        if plan.mode == "mask":
            hidden = mask(plan)
            masked = Shard(MASKED, 0, source, tag, plan.field.add(vector, hidden))
            put_frame(content, MASKED_UPDATE, masked.to_bytes(plan))
            vector = hidden
        made = [Shard(SHARE, row, source, tag, body).to_bytes(plan) for row, body in enumerate(shares(plan, vector))]
        if asked.metrics:
            for name, record in reply.content.metric_records.items():
                content[name] = record
        if len(asked.relays) != plan.relays:
            raise StateError(f"the plan is for {plan.relays} relays, the message names {len(asked.relays)}")
        # Relays of a sum go by the row of the code that is theirs.
        terms = Terms.of(asked, source, range(plan.relays))
        said = {**self.news(terms), **self.send(terms, made, content, SUM_SHARD)}
        place = self._place()
        self._note(shared=self._update_name(announcement) + place, shared_round=_round_name(announcement) + place)
        exchange.save()
        return exchange.reply(SumShared, content, tag=tag, **said)

    def _look_for_alone(self, integers: NDArray[np.int64], plan: SumPlan) -> None:
        """Warn once in this node's log that a sum hides a coordinate only where others have changed it, too.

        Raises
        ------
        StateError
            In place of the warning, where more contributors are asked for than the two that every sum has.
        """
        changed = int(np.count_nonzero(integers))
        if self.hides_zeros or 2 * changed >= integers.size:
            return
        alone = (
            f"this update changes {changed} of {integers.size} coordinates: what no other client changes, the sum "
            "shows as it is"
        )
        if plan.least > _EVERY_SUM:
            raise StateError(
                f"{alone}, and min_contributors={plan.least} are asked for. Train dense layers alone, use a finer grid "
                "(a smaller clip, more levels), or add noise (DistributedDp)"
            )
        if not self._noted("alone", False):
            log.warning(
                "%s. Train dense layers alone, use a finer grid (a smaller clip, more levels), or add noise "
                "(DistributedDp)",
                alone,
            )
            self._note(alone=True)

    def _place(self) -> bytes:
        return self.exchange.run + self.exchange.round.to_bytes(8, "little")

    def _update_name(self, announcement: Announcement) -> bytes:
        """Return what names the update that answers a message, the same also after a restart of the server."""
        return _name(announcement.session, update_number(self.exchange.context, announcement))

    def _require_unshared(self, announcement: Announcement, number: int) -> None:
        """Refuse to share the update made for message ``number`` in a second round: two sums could differ by it alone.

        Where no reply is kept the client would train again for what may be the same update: then the round that the
        message names counts. A restarted server makes its round again, in which relays give no sum over another set.
        """
        for entry, name in (
            ("shared", _name(announcement.session, number)),
            ("shared_round", _round_name(announcement)),
        ):
            shared = self._noted(entry, b"")
            if shared.startswith(name) and shared != name + self._place():
                raise StateError(
                    f"the update made for message {number} of round {announcement.round} was shared in another round; "
                    "it is in one sum at most"
                )

    def _noted(self, name: str, default: Any) -> Any:
        return self.exchange.context.state.config_records.get(_BOOK, ConfigRecord()).get(name, default)

    def _note(self, **entries: Any) -> None:
        """Remember ``entries`` for as long as this node keeps its state, whatever run it takes part in."""
        state = self.exchange.context.state
        state[_BOOK] = ConfigRecord({**state.config_records.get(_BOOK, {}), **entries})

    def _integers(
        self, content: RecordDict, announcement: Announcement, asked: SumTraining, plan: SumPlan
    ) -> tuple[FixedPoint, NDArray[np.int64]]:
        """Return the codec, and what the compression mod sent in steps of its grid."""
        frame = _summable_frame(content)
        codec = fixed_point_of(get_codec(announcement.codec))
        if codec.levels != plan.bound:
            raise StateError(f"the codec has {codec.levels} levels, the plan {plan.bound}")
        # The frame was made in this very call: no limits have to be known for it.
        return codec, codec.grid.integers(wire.decode(frame))

    @staticmethod
    def _weight(content: RecordDict, key: str, plan: SumPlan) -> int:
        """Return the update's weight as an integer the plan has room for; 1 when all count the same."""
        value = _whole_weight(content, key)
        if value > plan.max_weight:
            # The number itself stays here: the server is to learn of weights no more than their sum.
            log.warning("metric %r is %s, more than the %d for which the sum has room", key, value, plan.max_weight)
            raise ConfigError(
                f"metric {key!r} is more than the {plan.max_weight} for which the sum has room; raise max_weight if it "
                "is given, lower the codec's levels if not, or use weighted=False"
            )
        return value

    # Holding.

    def _report(self) -> Message:
        """Keep what the server forwards, and say what is held for this round."""
        exchange = self.exchange
        asked = exchange.take(SumReport)
        plan, row = SumPlan.from_config(asked.plan), asked.row
        _, refused = exchange.keep(row, most=2 * plan.contributors)
        held, sizes = self._held(plan, row, asked.seal, refused)
        tags = {source: sorted(shards) for source, shards in held.items()}
        report = HeldTags.of(plan, tags, list(asked.unknown))
        exchange.save()
        return exchange.reply(
            SumHeld,
            bitmap=report.bitmap,
            digest=report.digest,
            sources=[source for source, _ in report.details],
            tags=b"".join(tag for _, tag in report.details),
            refused=refused,
            # What was handed over by contributors that can no longer say so themselves.
            sizes=[] if exchange.hub else [sizes[source] for source, _ in report.details],
        )

    def _held(
        self, plan: SumPlan, row: int, sealed: bool, refused: list[str]
    ) -> tuple[dict[int, dict[bytes, Shard]], dict[int, int]]:
        """Return the shards this relay can read, by source and tag, and the bytes of each source's parcels."""
        held: dict[int, dict[bytes, Shard]] = {}
        sizes: dict[int, int] = {}
        for parcel in self.stored(SUM_SHARD, row):
            try:
                shard = Shard.from_bytes(self.open(parcel, sealed), plan)
                if (shard.kind, shard.relay, shard.source) != (SHARE, row, parcel.source):
                    raise PacketError("the shard is not the one its parcel says")
                # The parcel is of the same source, but anybody may have made it: nothing else has bounded the number.
                if shard.source >= plan.contributors:
                    raise PacketError(f"the shard is of contributor {shard.source} of {plan.contributors}")
            except FedcompError as error:
                refused.append(f"source {parcel.source}: {error}"[:REASON])
                continue
            # By tag too: a message that was delivered twice was encoded twice, and the server says which encoding
            # counts.
            held.setdefault(shard.source, {})[shard.tag] = shard
            sizes[shard.source] = sizes.get(shard.source, 0) + len(parcel)
        return held, sizes

    # Adding.

    def _add_up(self) -> Message:
        """Answer with the sum over the frozen set; once a round, also when the server names other runs in between."""
        exchange = self.exchange
        asked = exchange.take(SumQuestion)
        plan = SumPlan.from_config(asked.plan)
        held, _ = self._held(plan, asked.row, asked.seal, [])
        chosen = self._chosen(asked, plan, held)
        if set_digest(plan, exchange.round, chosen) != asked.set:
            # Said before the one answer of this round is spent.
            raise NotDecodable("this relay holds other encodings than those that are to be added")
        # By run, and kept longer than one: a server that renames its run must not get a second sum.
        book = {entry[0]: entry for entry in map(_ENTRY.unpack, self._noted("sums", []))}
        _, last, name = book.get(exchange.run, (exchange.run, 0, b""))
        if exchange.round < last:
            raise CodingError(f"this relay has added up round {last} of this run; round {exchange.round} is over")
        if exchange.run not in book and len(book) == _RUNS:
            raise CodingError(f"this relay has added up for {_RUNS} runs, and for no more with this state; restart it")
        relay = AnsweredSets({last: name} if name else {})
        shards = {source: held[source][tag] for source, tag in chosen.items() if tag in held.get(source, {})}
        total = relay.add_up(plan, exchange.round, chosen, shards)
        book[exchange.run] = (exchange.run, exchange.round, relay.answered[exchange.round])
        self._note(sums=[_ENTRY.pack(*entry) for entry in book.values()])
        content = RecordDict()
        put_bundle(content, [total.to_bytes(plan)])
        exchange.save()
        return exchange.reply(Header, content)

    @staticmethod
    def _chosen(asked: SumQuestion, plan: SumPlan, held: dict[int, dict[bytes, Shard]]) -> dict[int, bytes]:
        """Return source and tag of the frozen set; tags the server left out are those of the only encoding held."""
        bitmap, named, tags = np.frombuffer(asked.chosen, np.uint8), asked.named, asked.tags
        if bitmap.size != -(-plan.contributors // 8):
            raise StateError("the set that is asked for is not written as one of this plan")
        explicit = {source: tags[TAG_BYTES * i : TAG_BYTES * (i + 1)] for i, source in enumerate(named)}
        chosen: dict[int, bytes] = {}
        for source in np.flatnonzero(np.unpackbits(bitmap)).tolist():
            encodings = held.get(source, {})
            if source in explicit:
                chosen[source] = explicit[source]
            elif len(encodings) == 1:
                (chosen[source],) = encodings
            else:
                raise CodingError(
                    f"this relay holds {len(encodings)} encodings of contributor {source}; which is meant?"
                )
        return chosen


def _cut(codec: FixedPoint, integers: NDArray[np.int64], plan: SumPlan) -> tuple[int, ...]:
    """Return the share of values at the clip, in steps of the plan, rounded up: it shows in the sum."""
    return tuple(-(-most * codec.grid.saturated(integers) // max(1, integers.size)) for most in plan.extras)


def _name(session: bytes, sequence: int) -> bytes:
    return session + b"/%d/" % sequence


def _round_name(announcement: Announcement) -> bytes:
    return _name(announcement.session, announcement.round)


def _number(header: ConfigRecord, name: str, default: int | None = None) -> int:
    value = header.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StateError(f"the reply's header field {name!r} is {value!r}, expected a whole number")
    return value


def _summable_frame(content: RecordDict) -> bytes:
    """Return the frame of integers in a reply.

    Raises
    ------
    ConfigError
        When there is none, or the reply holds buffers, which are no integers on the codec's grid.
    """
    frame = take_frame(content, UPDATE)
    if frame is None:
        header = content.config_records.get(NODE_RECORD)
        said = None if header is None else header.get("unsupported")
        why = said if isinstance(said, str) else "is compression() among its mods, behind coded()?"
        raise ConfigError(f"the app's reply holds no frame that could be added to others' ({why})")
    if has_frame(content, EXACT):
        raise ConfigError("the model has buffers that travel as values; of these there is no coded sum")
    return frame


def _whole_weight(content: RecordDict, key: str) -> int:
    """Return the metric that weighs an update in a sum of integers; 1 without a key.

    Raises
    ------
    ConfigError
        When it is not a whole number >= 0. The number itself is only logged here: the server is to learn of weights no
        more than their sum.
    """
    if not key:
        return 1
    found = [record[key] for record in content.metric_records.values() if key in record]
    # Where two records have such a metric, which of them weighs the update cannot be told.
    value = found[0] if len(found) == 1 else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer() or value < 0:
        log.warning("metric %r is %r: it cannot be the weight in a sum", key, value)
        raise ConfigError(f"metric {key!r} is no whole number >= 0, as the weight in a sum must be")
    return int(value)
