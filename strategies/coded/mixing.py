"""Multi-source mixing in Flower: relays send random combinations of whole updates. An option to study, not to rely on.

``CodedFedAvg(..., mix=True)``: every client hands its whole reply to ``shards`` relays, relays answer with combinations
of all they hold, and the server solves for everybody at once (:mod:`fedcomp.coding.mixing`). All or nothing: with fewer
independent combinations than clients nobody is decoded, and one wrong combination spoils everybody's update; both cost
the round, never the model. Between clients it moves K times the bytes of the plain relay. Replies are padded to one
length, ``mix_bytes``, which has to be given for compressed updates to stay small.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr.app import Message

from fedcomp.coding.mixing import FRAMING, MixPlan, Mixture
from fedcomp.coding.sealing import OVERHEAD
from fedcomp.coding.transport import HEADER_BYTES
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower.coded import COLLECT, MIXED, Combine, Combined, Indexed, MixTraining, Shared, take_bundle
from fedcomp.flower.rounds import Exchanges
from fedcomp.strategies.coded.sharing import Sharing
from fedcomp.strategies.coded.strategy import Settings, limited
from fedcomp.strategies.replies import Rejected

MIX_SLACK = 4096
"""Bytes beside the model's for which a symbol has room where nobody says: header, metrics, names."""


def check_mix(settings: Settings, mix_bytes: Any) -> None:
    """Refuse what has no meaning for mixed payloads.

    Raises
    ------
    ConfigError
    """
    if settings.code != "rlnc":
        raise ConfigError(f"mix=True combines what relays hold at random; code={settings.code!r} cannot, use 'rlnc'")
    for name in ("symbols", "private", "groups"):
        if getattr(settings, name):
            raise ConfigError(f"{name}={getattr(settings, name)} has no meaning with mix=True: clients are the symbols")
    if isinstance(mix_bytes, bool) or not isinstance(mix_bytes, int) or mix_bytes < 0:
        raise ConfigError(f"mix_bytes={mix_bytes!r} is not valid: it must be a whole number >= 0")


def symbol_bytes(mix_bytes: int, model_bytes: int) -> int:
    """Return the length of a symbol: room for ``mix_bytes`` of reply, for a dense model where nobody says."""
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

    def __post_init__(self) -> None:
        super().__post_init__()
        now = self.now
        self.mix = MixPlan(len(now.members), self.symbol_bytes, now.number, now.settings.seed)
        self.mixture = Mixture(self.mix)
        self.longest = self.mix.max_packet + (OVERHEAD if self.seal else 0) + HEADER_BYTES
        now.report.symbols = len(now.members)

    def _numbers(self) -> dict[str, Any]:
        return {
            "mix_bytes": self.mix.symbol_bytes,
            "clients": self.mix.clients,
            "seed": self.mix.seed,
            "shards": self.plan.shards,
        }

    def collect(self) -> Exchanges[None]:
        """Ask as many as are needed for combinations, until everybody is determined or nobody has anything new."""
        report, members = self.now.report, self.now.members
        asked: dict[int, int] = {}
        # Through the hub nothing was put into a relay that was away; between peers those come last.
        order = sorted(range(len(members)), key=lambda i: i not in self.alive)
        left = [i for i in order if i in self.alive or not self.hub]
        while left and self.mixture.rank < self.mix.clients:
            missing = self.mix.clients - self.mixture.rank
            batch = left[:missing]
            count = -(-missing // len(batch))
            queries = []
            for i in batch:
                first = asked.get(i, 0)
                fields = {**self._brief(), **self._numbers(), "index": i, "first": first, "count": count}
                queries.append(self.now.query(COLLECT, members[i].node, Combine, fields))
                asked[i] = first + count
            got = self.now.by_node(queries, (yield self.now.push(queries, self.timeout)))
            report.waves += 1
            report.asked += len(queries)
            for i in batch:
                before = self.mixture.rank
                reply = got.get(members[i].node)
                if reply is not None:
                    self._take_combinations(i, reply, count)
                if self.mixture.rank == before:
                    left.remove(i)  # silent, or with nothing the others did not have

    def _take_combinations(self, relay: int, reply: Message, count: int) -> None:
        report = self.now.report
        try:
            header = self.now.answer(reply, Combined)
            items = take_bundle(reply.content, most=count, longest=self.longest)
            report.count("hub_up", sum(map(len, items)))
            began = time.perf_counter()
            for data in items:
                self.mixture.add(relay, data)
            report.decode_seconds += time.perf_counter() - began
            self._count_held(relay, header.held)
            for reason in limited(header.refused, len(self.owners), "reasons"):
                report.refuse(f"relay {relay}: {reason}")
        except FedcompError as error:
            report.refuse(f"relay {relay}: {error}")

    def recollect(self) -> Exchanges[None]:
        """Ask nobody again: waves go on until nothing new comes."""
        yield from ()

    def _hashes_in(self, header: Shared) -> list[bytes]:
        return []  # relays hand out combinations, of which nobody can announce a hash

    def _payload(self, source: int) -> bytes:
        if source in self.barred:
            raise Rejected("the client says that it failed")
        payload = self.mixture.payload(source)
        self.collector.check(source, payload)
        return payload

    def _counted(self) -> tuple[int, int, int, Iterable[str]]:
        mixture = self.mixture
        return mixture.received, mixture.innovative, mixture.dependent, mixture.refused
