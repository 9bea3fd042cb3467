"""The client half of relayed shards: share one's own reply, keep what others share, hand it out when asked.

A message that is delivered again is answered with the same shards, made of the stored reply: training twice could give
other bytes, and shards of two payloads do not fit together.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from flwr.app import Message, RecordDict

from fedcomp.clients.coded.mod import REASON
from fedcomp.clients.coded.shards import Shards, Terms
from fedcomp.clients.half import CallNext
from fedcomp.coding.code import MAX_SYMBOLS
from fedcomp.coding.errors import CodingError, PacketError
from fedcomp.coding.packet import DIGEST_BYTES, Packet, PacketLimits
from fedcomp.coding.relay import RelayPlan, packet_hash
from fedcomp.errors import StateError
from fedcomp.flower.coded import (
    COLLECT,
    MOST_REASONS,
    PER_SOURCE,
    PUT,
    SHARD,
    Collect,
    Collected,
    CollectFresh,
    Indexed,
    Kept,
    RelayTraining,
    Shared,
    pack_content,
    put_bundle,
)

_UNKNOWN: Final = bytes(DIGEST_BYTES)

_PAYLOAD: Final = "payload"
_SHARED: Final = "shared"


class RelayClient(Shards):
    """Answers the messages of a relayed round."""

    def answer(self, call_next: CallNext) -> Message:
        """Train and share, keep, or hand out."""
        kind = self.exchange.kind
        self.exchange.enter()
        if kind == PUT:
            return self._keep()
        if kind == COLLECT:
            return self._hand_out()
        if kind.partition(".")[0] == "train":
            return self._share(call_next)
        raise StateError(f"a relayed round has no messages of type {kind!r}")

    # Sharing.

    def _share(self, call_next: CallNext) -> Message:
        """Train unless that was done already, then share; the plan is checked whole before anything is done."""
        exchange = self.exchange
        asked = exchange.take(RelayTraining)
        terms, plan = Terms.of(asked, asked.source), _plan_of(asked)
        kept = exchange.arrays if exchange.numbers.get(_SHARED) == exchange.round else {}
        if kept and _PAYLOAD not in kept:
            packets = [kept[f"{i}"].tobytes() for i in range(len(kept))]
        else:
            if kept:
                payload = kept[_PAYLOAD].tobytes()
            else:
                reply = call_next(exchange.plain_message(), exchange.context)
                if reply.has_error():
                    return reply
                payload = pack_content(reply.content)
            packets = plan.packets(terms.source, payload)
            exchange.numbers[_SHARED] = exchange.round
            exchange.arrays = {_PAYLOAD: np.frombuffer(payload, np.uint8)}
            if plan.threshold:
                # Every encoder draws its own random symbols, and shards of two do not decode together: keep these.
                exchange.arrays = {f"{i}": np.frombuffer(p, np.uint8) for i, p in enumerate(packets)}
        content = RecordDict()
        # Length and digest stand in every packet, also where only the packets were kept and not the payload.
        first = Packet.from_bytes(packets[0], plan.limits)
        said = {**self.news(terms), **self.send(terms, packets, content)}
        exchange.save()
        return exchange.reply(Shared, content, **said, payload=first.payload_bytes, digest=first.digest)

    # Keeping.

    def _keep(self) -> Message:
        """Put the parcels the server forwards into the store; what does not fit or belong is reported and dropped."""
        kept, refused = self.exchange.keep(self.exchange.take(Indexed).index, most=1 << 16)
        self.exchange.save()
        return self.exchange.reply(Kept, kept=kept, refused=refused)

    # Handing out.

    def _hand_out(self) -> Message:
        """Answer with the shards of the sources that are asked for, and with fresh shards of the own payload."""
        exchange = self.exchange
        asked = exchange.take(CollectFresh if exchange.asks("fresh") else Collect)
        bodies, held, refused = self._opened(asked)
        packets = self._sound(asked, bodies, refused)
        fresh = self._fresh(asked) if isinstance(asked, CollectFresh) else []
        content = RecordDict()
        put_bundle(content, [*packets, *fresh])
        held = [] if exchange.hub else held
        return exchange.reply(Collected, content, fresh=len(fresh), refused=refused[:MOST_REASONS], held=held)

    def _opened(self, asked: Collect) -> tuple[list[tuple[int, bytes]], list[int], list[str]]:
        """Return what this relay keeps: (source, body) of what it can open; source and size in turn; what it cannot."""
        bodies: list[tuple[int, bytes]] = []
        held: dict[int, int] = {}
        refused: list[str] = []
        wanted = set(asked.sources)
        for parcel in self.stored(SHARD, asked.index):
            # Before it is opened: its bytes crossed the link, readable or not.
            held.setdefault(parcel.source, len(parcel))
            if parcel.source not in wanted:
                continue
            try:
                bodies.append((parcel.source, self.open(parcel, asked.seal)))
            except CodingError as error:
                refused.append(f"source {parcel.source}: {error}"[:REASON])
        return bodies, [number for pair in held.items() for number in pair], refused[:MOST_REASONS]

    @staticmethod
    def _sound(asked: Collect, bodies: list[tuple[int, bytes]], refused: list[str]) -> list[bytes]:
        """Return those bodies that are the packet their source announced; a few of each source that announced none.

        Anybody may have put parcels in here; a flood of them must not crowd out the others' in one answer. What is left
        out is told in ``refused``.
        """
        joined = asked.hashes or _UNKNOWN * len(asked.sources)
        announced = {s: joined[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)] for i, s in enumerate(asked.sources)}
        # As wide as a header can say: the bodies are in memory already, and the server applies the plan's limits.
        limits = PacketLimits(
            max_symbol_bytes=2**32 - 1, max_payload=2**32 - 1, max_generations=2**16 - 1, max_symbols=MAX_SYMBOLS
        )
        found: dict[int, dict[bytes, None]] = {}
        for source, body in bodies:
            try:
                packet = Packet.from_bytes(body, limits)
                if packet.source != source:
                    raise PacketError(f"a packet of source {packet.source} in its parcel")
                if announced.get(source, _UNKNOWN) not in (_UNKNOWN, packet_hash(body)):
                    raise PacketError(f"a packet that is not the one source {source} announced for this relay")
            except CodingError as error:
                refused.append(f"source {source}: {error}"[:REASON])
                continue
            held = found.setdefault(source, {})
            if len(held) < PER_SOURCE:
                # A dict serves as an ordered set: equal bodies count once.
                held[body] = None
        return [body for held in found.values() for body in held]

    def _fresh(self, asked: CollectFresh) -> list[bytes]:
        """Return further shards of what this node shared; none when that was in another round."""
        exchange = self.exchange
        if exchange.numbers.get(_SHARED) != exchange.round or _PAYLOAD not in exchange.arrays:
            return []
        return _plan_of(asked).fresh(asked.source, exchange.arrays[_PAYLOAD].tobytes(), asked.fresh)


def _plan_of(asked: RelayTraining | CollectFresh) -> RelayPlan:
    """Return the code that a message asks for; raise :class:`FedcompError` where there is no such one."""
    code: Literal["rlnc", "mds"] = "mds" if asked.code == "mds" else "rlnc"
    return RelayPlan(code, asked.symbols, asked.shards, asked.round, asked.private, asked.seed, asked.max_payload)
