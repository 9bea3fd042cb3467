"""The client half of groups: hand one's reply to the aggregator; as aggregator, add integers and share their sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from fedcomp.clients.coded.mod import REASON
from fedcomp.clients.coded.shards import Shards, Terms, summable_frame, whole_weight
from fedcomp.clients.half import CallNext
from fedcomp.codecs import fixed_point_of, get_codec
from fedcomp.coding.errors import CodingError
from fedcomp.coding.packet import Packet
from fedcomp.coding.partial import GroupPart, PartialSum, empty_sum
from fedcomp.coding.relay import RelayPlan
from fedcomp.coding.sealing import seal
from fedcomp.coding.transport import Parcel, deliver
from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.flower.coded import (
    MEMBER,
    CollectFresh,
    GroupSum,
    GroupTraining,
    Handed,
    RelayTraining,
    Shared,
    open_content,
    pack_content,
    put_bundle,
    take_bundle,
)
from fedcomp.flower.payload import NODE_RECORD, PARTITION_KEY
from fedcomp.flower.records import config_in
from fedcomp.layout import Layout, TensorSpec
from fedcomp.rng import Key

MAX_WEIGHT: Final = 2**40
"""Weights at or above it are refused: 64-bit sums have room for many clients below it."""


def join(client: Shards, call_next: CallNext) -> Message:
    """Train unless that was done already, and hand the reply to the aggregator: the other half of its round begins."""
    exchange = client.exchange
    asked = exchange.take(GroupTraining)
    own, aggregator, longest, key = asked.index, asked.aggregator, asked.max_payload, asked.keys
    (address,) = asked.addresses or ("",)
    payload = client.trained(call_next)
    if isinstance(payload, Message):
        return payload
    if len(payload) > longest:
        raise ConfigError(f"the reply has {len(payload)} bytes, more than the {longest} this round accepts")
    client.remember(payload)
    header: dict[str, Any] = {}
    content = RecordDict()
    parcel = Parcel(exchange.run, exchange.round, MEMBER, own, aggregator, payload)
    if own == aggregator:
        header = exchange.news(key) if key else {}
        try:
            exchange.store.put(parcel)
        except CodingError as error:
            header["failed"] = [str(error)[:REASON]]
    else:
        if key:
            try:
                parcel = replace(parcel, body=seal(payload, key, parcel.coordinates))
            except CodingError as error:
                header["failed"] = [str(error)[:REASON]]
        if "failed" in header:
            address = ""  # a parcel that could not be sealed goes nowhere
        elif exchange.transport is None:
            put_bundle(content, [parcel.to_bytes()])
        if exchange.transport is not None and address:
            (delivery,) = deliver(exchange.transport, [(address, parcel)])
            header["sent"] = [delivery.handed_over]
            if delivery.error is not None:
                header["failed"] = [str(delivery.error)[:REASON]]
    exchange.save()
    return exchange.reply(Handed, content, **header)


def add_up(client: Shards) -> Message:
    """Add what the members of the group sent, and share the sum."""
    exchange = client.exchange
    asked = exchange.take(GroupSum)
    terms, plan = Terms.of(asked, asked.source), plan_of(asked)
    aggregation = _Aggregation(client, asked)
    payload = aggregation.run().to_bytes()
    packets = plan.packets(terms.source, payload)
    # Kept for the recollection, which may ask for fresh shards of the sum.
    exchange.arrays = {**exchange.arrays, array_of(terms.source): np.frombuffer(payload, np.uint8)}
    content = RecordDict()
    first = Packet.from_bytes(packets[0], plan.limits)
    sent = client.send(terms, packets, content)
    # No more reasons than the server accepts: it refuses answers with more of them.
    failed = [*aggregation.failed, *sent.pop("failed")][: plan.shards]
    exchange.save()
    return exchange.reply(Shared, content, **sent, failed=failed, payload=first.payload_bytes, digest=first.digest)


class _Aggregation:
    """Reads the replies of a group's members and adds their integers.

    A member whose reply cannot be used is left out, and says so in ``failed``; the others' sum does not suffer.
    """

    def __init__(self, client: Shards, asked: GroupSum) -> None:
        self.client, self.exchange = client, client.exchange
        self.own, self.sealed, self.weight = asked.index, asked.seal, asked.weight
        self.members = dict(zip(asked.members, asked.sequences, strict=True))
        spec = asked.spec
        try:
            self.codec = get_codec(spec["codec"])
            tensors = [TensorSpec(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in spec["tensors"]]
            self.key = Key(int(spec["seed"]), "uplink", self.exchange.round)
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"the description of the group's updates cannot be read: {error!r}") from error
        self.layout = Layout(tuple(tensors))
        self.fixed = fixed_point_of(self.codec)
        self.failed: list[str] = []

    def run(self) -> PartialSum:
        """Return the sum over all members whose reply is here and sound, in the order of the plan."""
        replies = self._replies()
        total = empty_sum(self.fixed.count(self.layout))
        for index, sequence in self.members.items():
            if index not in replies:
                continue
            try:
                total = total.plus(*self._member(index, sequence, replies[index]))
            except FedcompError as error:
                self.failed.append(f"member {index}: {error}"[:REASON])
        return total

    def _replies(self) -> dict[int, bytes]:
        """Return the members' replies: those that came from the server with the message, and those that lie here."""
        exchange = self.exchange
        parcels = exchange.store.list(exchange.run, exchange.round)
        for data in take_bundle(exchange.msg.content, most=len(self.members), longest=1 << 32):
            try:
                parcels.append(Parcel.from_bytes(data, exchange.max_store_bytes))
            except FedcompError as error:
                self.failed.append(str(error)[:REASON])
        found: dict[int, bytes] = {}
        for parcel in parcels:
            place = (parcel.run, parcel.round, parcel.kind, parcel.destination)
            if place != (exchange.run, exchange.round, MEMBER, self.own) or parcel.source not in self.members:
                continue
            try:
                # The aggregator's own reply never left this node, and was not sealed.
                body = self.client.open(parcel, self.sealed and parcel.source != self.own)
            except CodingError as error:
                self.failed.append(f"member {parcel.source}: {error}"[:REASON])
                continue
            # The first counts: a member that is delivered twice is added once.
            found.setdefault(parcel.source, body)
        return found

    def _member(self, index: int, sequence: int, reply: bytes) -> tuple[np.ndarray, GroupPart]:
        """Return a member's integers and its entry in the sum; everything about its frame is checked here."""
        content = open_content(reply)
        frame = summable_frame(content)
        header = config_in(content, NODE_RECORD)
        if header.get("sequence") != sequence:
            raise StateError(f"its update answers message {header.get('sequence')!r}, expected {sequence}")
        generation = integer_of(header, "generation")
        # Integers are added without another look: everything about a frame is checked before. The partition is the
        # member's own word; who claims another's has that one's dither, which the server does not take off.
        self.codec.verify(frame, self.layout, self.key.at(partition=integer_of(header, PARTITION_KEY)))
        weight = whole_weight(content, self.weight)
        if weight >= MAX_WEIGHT:
            raise StateError(f"metric {self.weight!r} is at least 2**40, more than a group's sum has room for")
        note = pack_content(RecordDict(dict(content.metric_records.items())))
        return self.fixed.integers(frame, self.layout), GroupPart(index, weight, sequence, generation, note)


def integer_of(header: ConfigRecord, name: str) -> int:
    """Return a whole number of a member's header, 0 where it is not there."""
    value = header.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise StateError(f"its {name} is {value!r}")
    return value


def plan_of(asked: RelayTraining | GroupSum | CollectFresh) -> RelayPlan:
    """Return the code that a message asks for; raise :class:`FedcompError` where there is no such one."""
    code: Literal["rlnc", "mds"] = "mds" if asked.code == "mds" else "rlnc"
    return RelayPlan(code, asked.symbols, asked.shards, asked.round, asked.private, asked.seed, asked.max_payload)


def array_of(source: int) -> str:
    """Return the name under which the sum of a group is kept."""
    return f"sum/{source}"
