"""The client half of multi-source mixing: hand one's whole reply to relays; as relay, combine what is held."""

from __future__ import annotations

import numpy as np
from flwr.app import Message, RecordDict

from fedcomp.clients.coded.shards import PAYLOAD, REASON, SHARED, Shards
from fedcomp.clients.half import CallNext
from fedcomp.coding.code import payload_digest
from fedcomp.coding.errors import CodingError
from fedcomp.coding.mixing import MixPlan
from fedcomp.coding.relay import RelayPlan
from fedcomp.flower.coded import MIXED, Combine, Combined, MixTraining, Shared, pack_content, put_bundle


def mix_in(client: Shards, call_next: CallNext) -> Message:
    """Train unless that was done already, and hand the whole reply, as one symbol, to every relay."""
    exchange = client.exchange
    asked = exchange.take(MixTraining)
    mix = MixPlan(asked.clients, asked.mix_bytes, asked.round, asked.seed)
    terms = client.terms(asked, RelayPlan("rlnc", 1, asked.shards, asked.round))
    if exchange.numbers.get(SHARED) == exchange.round and PAYLOAD in exchange.arrays:
        payload = exchange.arrays[PAYLOAD].tobytes()
    else:
        reply = call_next(exchange.plain_message(), exchange.context)
        if reply.has_error():
            return reply
        payload = pack_content(reply.content)
    symbol = mix.packet(terms.source, payload)
    exchange.numbers[SHARED] = exchange.round
    exchange.arrays = {PAYLOAD: np.frombuffer(payload, np.uint8)}
    content = RecordDict()
    said = {**client.news(terms), **client.send(terms, [symbol] * len(terms.relays), content, MIXED)}
    exchange.save()
    return exchange.reply(Shared, content, **said, payload=len(payload), digest=payload_digest(payload))


def combine(client: Shards) -> Message:
    """Answer with combinations of the symbols held here."""
    exchange = client.exchange
    asked = exchange.take(Combine)
    mix = MixPlan(asked.clients, asked.mix_bytes, asked.round, asked.seed)
    bodies, held, refused = client.opened(asked, MIXED)
    sound = []
    for source, body in bodies:
        try:
            mix.parse(body)
            sound.append(body)
        except CodingError as error:
            refused.append(f"source {source}: {error}"[:REASON])
    content = RecordDict()
    put_bundle(content, mix.combine(sound, asked.index, asked.first, asked.count))
    return exchange.reply(Combined, content, refused=refused, held=[] if exchange.transport is None else held)
