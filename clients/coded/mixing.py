"""The client half of multi-source mixing: hand one's whole reply to relays; as relay, combine what is held."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Message, RecordDict

from fedcomp.clients.coded.shards import PAYLOAD, REASON, SHARED, Shards
from fedcomp.clients.half import CallNext
from fedcomp.coding.code import payload_digest
from fedcomp.coding.errors import CodingError
from fedcomp.coding.mixing import MAX_CLIENTS, MixPlan
from fedcomp.coding.relay import RelayPlan
from fedcomp.flower.coded import MIXED, Fields, pack_content, put_bundle

_MOST = 1 << 12


def mix_in(client: Shards, call_next: CallNext) -> Message:
    """Train unless that was done already, and hand the whole reply, as one symbol, to every relay."""
    exchange = client.exchange
    mix = _plan(client.fields, exchange.round)
    shards = client.fields.integer("shards", least=1, most=MAX_CLIENTS)
    terms = client.terms(RelayPlan("rlnc", 1, shards, exchange.round))
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
    header: dict[str, Any] = {
        **client.news(terms),
        **client.send(terms, [symbol] * len(terms.relays), content, MIXED),
        "payload": len(payload),
        "digest": payload_digest(payload),
    }
    exchange.save()
    return exchange.reply(header, content)


def combine(client: Shards) -> Message:
    """Answer with combinations of the symbols held here."""
    exchange, fields = client.exchange, client.fields
    mix = _plan(fields, exchange.round)
    index = fields.integer("index", most=2**32 - 1)
    first, count = (fields.integer(name, most=_MOST) for name in ("first", "count"))
    bodies, held, refused = client.opened(index, MIXED)
    sound = []
    for source, body in bodies:
        try:
            mix.parse(body)
            sound.append(body)
        except CodingError as error:
            refused.append(f"source {source}: {error}"[:REASON])
    content = RecordDict()
    put_bundle(content, mix.combine(sound, index, first, count))
    header: dict[str, Any] = {"refused": refused}
    if exchange.transport is not None:
        header["held"] = held
    return exchange.reply(header, content)


def _plan(fields: Fields, round_: int) -> MixPlan:
    return MixPlan(
        fields.integer("clients", least=1, most=MAX_CLIENTS),
        fields.integer("mix-bytes", least=64, most=2**32 - 64),
        round_,
        fields.integer("seed", 0, least=-(2**63)),
    )
