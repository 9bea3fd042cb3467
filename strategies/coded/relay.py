"""The server half of relayed shards: a client's update is spread over the others, and decoded when the client is gone.

A round has three kinds of exchange. *Share*: everybody trains and hands one shard of its reply to every relay, from
client to client or, through the server, in the reply itself, which the server then *puts* into the relays. *Collect*:
as many relays as are needed are asked for what they hold, in waves, until every contributor is decoded or nobody is
left. A last exchange, the recollection, asks silent relays again, and contributors that are still there for fresh
shards. What was decoded are the bytes of the very replies an uncoded round would have brought;
``inner.aggregate_train`` gets them in the order it always gets them. So the result is that of the uncoded round over
the same contributors, bit for bit, and a client that vanished after sharing is in it, and acknowledged.

The server receives no less: K shards of a contributor are one update. Through the hub nothing is saved at all: every
shard crosses the server's link twice. It protects against losses, not from the server, which decodes every update; see
docs/systems/coded-relay.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from flwr.app import ArrayRecord

from fedcomp.coding.code import CodeName
from fedcomp.coding.errors import NotDecodable
from fedcomp.coding.relay import RelayPlan, check, choose
from fedcomp.flower.rounds import Exchanges, Push
from fedcomp.stateful import Stateful
from fedcomp.strategies.coded.settings import CodedSettings, NoOptions
from fedcomp.strategies.coded.sharing import Sharing
from fedcomp.strategies.coded.strategy import CodedRound, Outcome

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy


PAYLOAD_FACTOR: Final = 4
PAYLOAD_SLACK: Final = 1 << 20
"""A reply may have so many times the model's bytes, plus so many: the densest codec takes twice, metrics a little."""


class RelayedShards(Stateful):
    """The construction ``"relay"``, which has no options of its own."""

    def __init__(self, settings: CodedSettings, inner: Strategy) -> None:
        settings.own(NoOptions)
        # Before any round: what works with no number of relays must not be found out by losing rounds.
        check(code=settings.code, symbols=settings.symbols, shards=settings.shards, threshold=settings.threshold)
        self.settings = settings
        self.inner = inner
        # None leaves it to the construction, and this one seals.
        self.seal = settings.seal is not False

    def describe(self) -> str:
        """Return one line for the log."""
        s = self.settings
        return (
            f"relay, code {s.code}, K={s.symbols or 'auto'}, N={s.shards or 'all'}, T={s.threshold}, "
            f"transport {s.transport}, {'sealed' if self.seal else 'in the clear'}"
        )

    def round(self, now: CodedRound) -> Exchanges[Outcome]:
        """Share, collect, decode; the inner strategy aggregates what was decoded."""
        if not now.members:
            now.report.note("no client has the half coded(): the round is an ordinary one")
            return now.aggregate((yield Push(now.messages, self.settings.share_timeout)))
        try:
            symbols, shards = choose(
                len(now.members),
                code=self.settings.code,
                symbols=self.settings.symbols,
                shards=self.settings.shards,
                loss=self.settings.loss,
                target=self.settings.target,
                threshold=self.settings.threshold,
            )
        except NotDecodable as error:
            now.skip(str(error))
            return None, None
        plan = RelayPlan(
            cast(CodeName, self.settings.code),
            symbols,
            shards,
            now.number,
            self.settings.threshold,
            self.settings.seed,
            _payload_limit(now.arrays),
        )
        sharing = Sharing(now, plan, self.seal)
        yield from sharing.share()
        yield from sharing.collection.collect()
        yield from sharing.collection.recollect()
        return sharing.conclude()


def _payload_limit(arrays: ArrayRecord) -> int:
    return PAYLOAD_FACTOR * sum(len(array.data) for array in arrays.values()) + PAYLOAD_SLACK
