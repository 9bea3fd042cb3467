"""The client half of groups: hand one's reply to the aggregator; as aggregator, add integers and share their sum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from fedcomp.clients.coded.mod import REASON
from fedcomp.clients.coded.shards import Peer, Shards, Terms, summable_frame, whole_weight
from fedcomp.clients.half import CallNext
from fedcomp.codecs import fixed_point_of, get_codec
from fedcomp.coding.errors import CodingError
from fedcomp.coding.packet import Packet
from fedcomp.coding.partial import MAX_WEIGHT, GroupPart, PartialSum, empty_sum
from fedcomp.coding.relay import RelayPlan
from fedcomp.coding.transport import Parcel
from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.flower.coded import (
    GROUP,
    MEMBER,
    MOST_REASONS,
    CollectFresh,
    GroupForward,
    GroupSum,
    GroupTraining,
    Handed,
    MergedForward,
    MergedSum,
    RelayTraining,
    Shared,
    open_content,
    pack_content,
    take_bundle,
)
from fedcomp.flower.payload import NODE_RECORD, PARTITION_KEY
from fedcomp.flower.records import config_in
from fedcomp.flower.schema import MOST_VALUES
from fedcomp.layout import Layout, TensorSpec
from fedcomp.rng import Key

_ASKED: Final[Mapping[tuple[bool, bool], type[GroupSum | GroupForward | MergedSum | MergedForward]]] = {
    (False, False): GroupSum,
    (True, False): GroupForward,
    (False, True): MergedSum,
    (True, True): MergedForward,
}
"""What an aggregator may be asked: by whether it is to hand its sum on, and whether to add sums instead of replies."""


def join(client: Shards, call_next: CallNext) -> Message:
    """Train unless that was done already, and hand the reply to the aggregator: the other half of its round begins."""
    asked = client.exchange.take(GroupTraining)
    payload = client.trained(call_next)
    if isinstance(payload, Message):
        return payload
    client.remember(payload)
    return hand_over(client, asked, MEMBER, payload)


def hand_over(
    client: Shards,
    asked: GroupTraining | GroupForward | MergedForward,
    kind: int,
    payload: bytes,
    failed: Sequence[str] = (),
) -> Message:
    """Hand a payload to the aggregator that a message names; return the answer, which says what ``failed``."""
    exchange = client.exchange
    own, longest = asked.index, asked.max_payload
    (to,) = Peer.of(asked, [asked.aggregator])
    if len(payload) > longest:
        what = "reply" if kind == MEMBER else "sum"
        raise ConfigError(f"the {what} has {len(payload)} bytes, more than the {longest} this round accepts")
    header: dict[str, Any] = {"failed": list(failed)}
    content = RecordDict()
    parcel = Parcel(exchange.run, exchange.round, kind, own, to.called, payload)
    try:
        if own == to.called:
            header |= exchange.news(to.key, to.signature) if to.key else {}
            exchange.store.put(parcel)
        else:
            handed, missed = client.post([(to, client.sealed(parcel, to))], content)
            header |= {"sent": list(handed.values()), **missed}
    except CodingError as error:
        header["failed"].append(str(error)[:REASON])
    exchange.save()
    return exchange.reply(Handed, content, **header)


def add_up(client: Shards) -> Message:
    """Add what was handed to this aggregator, and share the sum, or hand it to the aggregator above."""
    exchange = client.exchange
    asked = exchange.take(_ASKED[exchange.asks("aggregator"), exchange.asks("levels")])
    aggregation = _Aggregation(client, asked)
    payload = aggregation.run().to_bytes()
    if isinstance(asked, GroupForward | MergedForward):
        # No more reasons than the server accepts: it refuses answers with more of them.
        kind = GROUP + (asked.level if isinstance(asked, MergedForward) else 1)
        return hand_over(client, asked, kind, payload, aggregation.failed[: MOST_REASONS - 1])
    terms, plan = Terms.of(asked, asked.source), plan_of(asked)
    packets = plan.packets(terms.source, payload)
    # Kept for the recollection, which may ask for fresh shards of the sum.
    exchange.arrays = {**exchange.arrays, array_of(terms.source): np.frombuffer(payload, np.uint8)}
    content = RecordDict()
    first = Packet.from_bytes(packets[0], plan.limits)
    sent = client.send(terms, packets, content)
    failed = [*aggregation.failed, *sent.pop("failed")][: plan.shards]
    exchange.save()
    return exchange.reply(Shared, content, **sent, failed=failed, payload=first.payload_bytes, digest=first.digest)


class _Aggregation:
    """Reads what an aggregator was handed, and adds it.

    What cannot be used is left out, and why is in ``failed``; the others' sum does not suffer.
    """

    def __init__(self, client: Shards, asked: GroupSum | GroupForward | MergedSum | MergedForward) -> None:
        self.client, self.exchange = client, client.exchange
        self.own, self.sealed = asked.index, asked.seal
        self.handed = (
            _Sums(asked) if isinstance(asked, MergedSum | MergedForward) else _Replies(asked, self.exchange.round)
        )
        self.failed: list[str] = []

    def run(self) -> PartialSum:
        """Return the sum over everything that is here and sound, in the order of the plan."""
        bodies = self._bodies()
        total = empty_sum(self.handed.count)
        for source in self.handed.sources:
            for body in bodies.get(source, []):
                try:
                    total = total.merged(self.handed.read(source, body)).reduced(self.handed.modulus)
                    # The first sound one counts: what is delivered twice is added once.
                    break
                except FedcompError as error:
                    self._fail(source, error)
        return total

    def _fail(self, source: int, error: Exception) -> None:
        self.failed.append(f"{self.handed.called} {source}: {error}"[:REASON])

    def _bodies(self) -> dict[int, list[bytes]]:
        """Return by source what came from the server with the message, and what lies here."""
        exchange = self.exchange
        parcels = exchange.store.list(exchange.run, exchange.round)
        for data in take_bundle(exchange.msg.content, most=len(self.handed.sources), longest=1 << 32):
            try:
                parcels.append(Parcel.from_bytes(data, exchange.max_store_bytes))
            except FedcompError as error:
                self.failed.append(str(error)[:REASON])
        found: dict[int, list[bytes]] = {}
        for parcel in parcels:
            place = (parcel.run, parcel.round, parcel.kind, parcel.destination)
            wanted = (exchange.run, exchange.round, self.handed.kind, self.own)
            if place != wanted or parcel.source not in self.handed.sources:
                continue
            try:
                # What the aggregator itself has never left this node, and was not sealed.
                body = self.client.open(parcel, self.sealed and parcel.source != self.own)
            except CodingError as error:
                self._fail(parcel.source, error)
                continue
            found.setdefault(parcel.source, []).append(body)
        return found


class _Replies:
    """Members' whole replies: everything about a frame is checked here, as integers are added without another look."""

    kind, called = MEMBER, "member"

    def __init__(self, asked: GroupSum | GroupForward, round: int) -> None:
        self.sources = self.sequences = dict(zip(asked.members, asked.sequences, strict=True))
        self.weight = asked.weight
        spec = asked.spec
        try:
            self.codec = get_codec(spec["codec"])
            tensors = [TensorSpec(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in spec["tensors"]]
            self.key = Key(int(spec["seed"]), "uplink", round)
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"the description of the group's updates cannot be read: {error!r}") from error
        ends = list(itertools.accumulate((t.size for t in tensors), initial=0))
        # A negative size would hide how large another one is.
        if any(
            (t.offset, t.size) != (at, math.prod(t.shape)) or t.size < 0 for t, at in zip(tensors, ends, strict=False)
        ):
            raise StateError("the description of the group's updates cannot be read: its tensors do not lie end to end")
        self.layout = Layout(tuple(tensors))
        # Nothing else has bounded it: no model of this node's has to be as large as the shapes that the server names.
        if self.layout.size > MOST_VALUES:
            raise StateError(f"updates of {self.layout.size} numbers: more than {MOST_VALUES}")
        self.fixed = fixed_point_of(self.codec)
        self.count, self.modulus = self.fixed.count(self.layout), self.fixed.m

    def read(self, source: int, body: bytes) -> PartialSum:
        """Return a member's integers, by its weight, and its entry."""
        content = open_content(body)
        frame = summable_frame(content)
        header, sequence = config_in(content, NODE_RECORD), self.sequences[source]
        if header.get("sequence") != sequence:
            raise StateError(f"its update answers message {header.get('sequence')!r}, expected {sequence}")
        generation = integer_of(header, "generation")
        # The partition is the member's own word; who claims another's has that one's dither, which the server does not
        # take off.
        self.codec.verify(frame, self.layout, self.key.at(partition=integer_of(header, PARTITION_KEY)))
        weight = whole_weight(content, self.weight)
        if weight >= MAX_WEIGHT:
            raise StateError(f"metric {self.weight!r} is at least 2**40, more than a group's sum has room for")
        note = pack_content(RecordDict(dict(content.metric_records.items())))
        part = GroupPart(source, weight, sequence, generation, note)
        return empty_sum(self.count).plus(self.fixed.integers(frame, self.layout), part)


class _Sums:
    """Sums of groups below: of their updates nothing is known here but how many integers they have, and how large."""

    called = "the sum of member"

    def __init__(self, asked: MergedSum | MergedForward) -> None:
        self.kind = GROUP + asked.level - 1
        self.count, self.levels, self.modulus = asked.count, asked.levels, asked.modulus
        members = iter(zip(asked.members, asked.sequences, strict=True))
        self.sources = {
            source: dict(itertools.islice(members, size))
            for source, size in zip(asked.sources, asked.sizes, strict=True)
        }

    def read(self, source: int, body: bytes) -> PartialSum:
        """Return a group's sum, in which is nobody but its members."""
        return PartialSum.from_bytes(body, self.count, self.sources[source], self.levels)


def integer_of(header: ConfigRecord, name: str) -> int:
    """Return a whole number of a member's header, 0 where it is not there."""
    value = header.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise StateError(f"its {name} is {value!r}")
    return value


def plan_of(asked: RelayTraining | GroupSum | MergedSum | CollectFresh) -> RelayPlan:
    """Return the code that a message asks for; raise :class:`FedcompError` where there is no such one."""
    code: Literal["rlnc", "mds"] = "mds" if asked.code == "mds" else "rlnc"
    return RelayPlan(code, asked.symbols, asked.shards, asked.round, asked.private, asked.seed, asked.max_payload)


def array_of(source: int) -> str:
    """Return the name under which the sum of a group is kept."""
    return f"sum/{source}"
