"""The client half of multi-source mixing: hand one's whole reply to relays; as relay, combine what is held."""

from __future__ import annotations

from flwr.app import Message, RecordDict

from fedcomp.clients.coded.mod import REASON
from fedcomp.clients.coded.shards import Shards, Terms
from fedcomp.clients.half import CallNext
from fedcomp.coding.code import payload_digest
from fedcomp.coding.errors import CodingError
from fedcomp.coding.mixing import MixPlan
from fedcomp.flower.coded import MIXED, Combine, Combined, MixTraining, Shared, put_bundle


def mix_in(client: Shards, call_next: CallNext) -> Message:
    """Train unless that was done already, and hand the whole reply, as one symbol, to every relay."""
    exchange = client.exchange
    asked = exchange.take(MixTraining)
    mix = MixPlan(asked.clients, asked.mix_bytes, asked.round, asked.seed)
    terms = Terms.of(asked, asked.source)
    payload = client.trained(call_next)
    if isinstance(payload, Message):
        return payload
    symbol = mix.packet(terms.source, payload)
    client.remember(payload)
    content = RecordDict()
    # Every relay gets the whole symbol: a part of one cannot be combined with other clients'.
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
            # One by one: combine() refuses everything for a single packet of another plan.
            mix.parse(body)
            sound.append(body)
        except CodingError as error:
            refused.append(f"source {source}: {error}"[:REASON])
    content = RecordDict()
    put_bundle(content, mix.combine(sound, asked.index, asked.first, asked.count))
    return exchange.reply(Combined, content, refused=refused, held=[] if exchange.hub else held)
