"""Multi-source mixing in Flower: relays send random combinations of whole updates. An option to study, not to rely on.

``CodedFedAvg(..., mix=True)``: every client hands its whole reply to ``shards`` relays, relays answer with combinations
of all they hold, and the server solves for everybody at once (:mod:`fedcomp.coding.mixing`). All or nothing: with fewer
independent combinations than clients nobody is decoded, and one wrong combination spoils everybody's update; both cost
the round, never the model. Between clients it moves K times the bytes of the plain relay. Replies are padded to one
length, ``mix_bytes``, which has to be given for compressed updates to stay small.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from flwr.app import Message

from fedcomp.coding.mixing import FRAMING, MixPlan, Mixture
from fedcomp.coding.sealing import OVERHEAD
from fedcomp.coding.transport import HEADER_BYTES
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower.coded import MIXED, Combine, Combined, Indexed, MixTraining, take_bundle
from fedcomp.flower.rounds import Exchanges
from fedcomp.strategies.coded.settings import CodedSettings
from fedcomp.strategies.coded.sharing import Collection, Sharing
from fedcomp.strategies.coded.strategy import limited
from fedcomp.strategies.replies import Rejected

MIX_SLACK = 4096
"""Bytes for which a symbol has room by default beside the model's: header, metrics, names."""


def check_mix(settings: CodedSettings) -> None:
    """Refuse what has no meaning for mixed payloads.

    Raises
    ------
    ConfigError
    """
    if settings.code != "rlnc":
        raise ConfigError(f"mix=True combines what relays hold at random; code={settings.code!r} cannot, use 'rlnc'")
    for name in ("symbols", "threshold", "groups"):
        if getattr(settings, name):
            raise ConfigError(f"{name}={getattr(settings, name)} has no meaning with mix=True: clients are the symbols")


def symbol_bytes(mix_bytes: int, model_bytes: int) -> int:
    """Return the length of a symbol: room for ``mix_bytes`` of reply, or for a dense model where that is 0."""
    return -(-((mix_bytes or model_bytes + MIX_SLACK) + FRAMING.size) // 64) * 64


@dataclass
class MixSharing(Sharing):
    """One mixed round.

    Attributes
    ----------
    symbol_bytes : int
    """

    symbol_bytes: int = 64
    kind: int = MIXED
    training: ClassVar[type[Indexed]] = MixTraining
    announces: ClassVar[bool] = False  # of combinations nobody can announce a hash

    def __post_init__(self) -> None:
        super().__post_init__()
        now = self.now
        mix = MixPlan(len(now.members), self.symbol_bytes, now.number, now.settings.seed)
        self.longest = mix.max_packet + (OVERHEAD if self.seal else 0) + HEADER_BYTES
        self.numbers = {
            "mix_bytes": mix.symbol_bytes,
            "clients": mix.clients,
            "seed": mix.seed,
            "shards": self.plan.shards,
        }
        self.collection = MixCollection(self, mix)
        now.report.symbols = len(now.members)

    def payload(self, source: int) -> bytes:
        """Return what a source shared."""
        if source in self.failed:
            raise Rejected("the client says that it failed")
        return self.collection.payload(source)


class MixCollection(Collection):
    """The combinations that came back, of all payloads at once."""

    def __init__(self, sharing: Sharing, mix: MixPlan) -> None:
        super().__init__(sharing)
        self.mix = mix
        self.decoder = self.mixture = Mixture(mix)

    def collect(self) -> Exchanges[None]:
        """Ask as many as are needed for combinations, until everybody is determined or nobody has anything new."""
        sharing, members = self.sharing, self.now.members
        asked: dict[int, int] = {}
        # Through the hub nothing was put into a relay that was away; between peers those come last.
        order = sorted(range(len(members)), key=lambda i: i not in sharing.alive)
        left = [i for i in order if i in sharing.alive or not sharing.hub]
        while left and self.mixture.rank < self.mix.clients:
            missing = self.mix.clients - self.mixture.rank
            batch = left[:missing]
            # Where relays are fewer than what is missing, each sends several combinations.
            count = -(-missing // len(batch))
            queries = {}
            for i in batch:
                first = asked.get(i, 0)
                queries[members[i].node] = {**sharing.numbers, "index": i, "first": first, "count": count}
                # The next wave goes on from here: a number seeds its combination, and would bring the same one again.
                asked[i] = first + count
            got = yield from self.ask(queries, Combine)
            for i in batch:
                before = self.mixture.rank
                reply = got.get(members[i].node)
                if reply is not None:
                    self._take_combinations(i, reply, count)
                if self.mixture.rank == before:
                    left.remove(i)  # silent, or with nothing the others did not have

    def _take_combinations(self, relay: int, reply: Message, count: int) -> None:
        report, sharing = self.now.report, self.sharing
        try:
            header = self.now.answer(reply, Combined)
            items = take_bundle(reply.content, most=count, longest=sharing.longest)
            report.count("hub_up", sum(map(len, items)))
            # Each combination is eliminated as it comes in: this is the decoding.
            began = time.perf_counter()
            for data in items:
                self.mixture.add(relay, data)
            report.decode_seconds += time.perf_counter() - began
            self.count_held(relay, header.held)
            for reason in limited(header.refused, len(sharing.owners), "reasons"):
                report.refuse(f"relay {relay}: {reason}")
        except FedcompError as error:
            report.refuse(f"relay {relay}: {error}")

    def recollect(self) -> Exchanges[None]:
        """Ask nobody again: waves go on until nothing new comes."""
        # Yields nothing: it makes this a generator, as the method it replaces is.
        yield from ()

    def payload(self, source: int) -> bytes:
        """Return what a source shared, as it committed itself to it."""
        payload = self.mixture.payload(source)
        self.collector.check(source, payload)
        return payload
