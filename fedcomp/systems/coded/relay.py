"""Relayed updates: every reply is spread over the other clients, and decoded if its owner vanishes.

1. *Share*: everybody trains, cuts its whole reply into N packets of which any K (K + T) decode, and posts one to each
   of the N clients that follow it.
2. *Collect*, in waves: as many relays are asked for what they hold as are needed, until every source is decoded or
   nobody is left. In the end those that were silent are asked once more.
3. What was decoded are the bytes of the very replies that an uncoded round brings, and goes to the program of the
   system inside. So the result is that of the uncoded round over the same clients, bit for bit, and a client that
   vanished after it has shared is in it, and acknowledged.

Packets are never added: GF(2^8) adds by exclusive or. The server decodes every update: this protects from losses, not
from the server. Network coding: Ho et al. 2006 (``code="rlnc"``); Cauchy Reed-Solomon codes: Blömer et al. 1995
(``code="mds"``); the round is derived here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, cast

import numpy as np

from fedcomp.asks import wait_for
from fedcomp.codecs import Codec, State
from fedcomp.coding.code import CodeName
from fedcomp.coding.errors import CodingError, NotDecodable
from fedcomp.coding.packet import DIGEST_BYTES, Packet
from fedcomp.coding.relay import MOST_SYMBOLS, Collector, Commitment, RelayPlan, check, choose, packet_hash
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.layout import Layout
from fedcomp.program import (
    Answer,
    AnswerError,
    Ask,
    Frames,
    Me,
    Mean,
    Now,
    Released,
    Round,
    Said,
    Single,
    Step,
    System,
    Wait,
)
from fedcomp.rules import LARGEST, Data, Int, Made, Many, OneOf
from fedcomp.systems import get_system
from fedcomp.systems.coded.shards import MOST, PEERS, Coded, Relay, counted, listed, peers_of

PAYLOAD_FACTOR: Final = 4
PAYLOAD_SLACK: Final = 1 << 20
"""A reply may have so many times the model's bytes, plus so many: the densest codec takes twice, metrics a little."""


@dataclass(frozen=True, repr=False, eq=False)
class Share(Said):
    """Train, and share: what the packets are."""

    code: Annotated[str, OneOf("rlnc", "mds")]
    symbols: Annotated[int, Int(1, MOST_SYMBOLS)]
    shards: Annotated[int, Int(1, MOST)]
    threshold: Annotated[int, Int(0, MOST_SYMBOLS)]
    seed: Annotated[int, Int(-LARGEST - 1)]
    longest: Annotated[int, Int(1)]

    def plan(self, number: int) -> RelayPlan:
        """Return the code of a round."""
        code = cast(CodeName, self.code)
        return RelayPlan(code, self.symbols, self.shards, number, self.threshold, self.seed, self.longest)


@dataclass(frozen=True, repr=False, eq=False)
class Shared(Said):
    """What a client commits itself to: length and digest of its reply, and a hash of each packet, in their order."""

    payload: Annotated[int, Int()]
    digest: Annotated[bytes, Data(DIGEST_BYTES, DIGEST_BYTES)]
    hashes: Annotated[bytes, Data(DIGEST_BYTES * MOST)]


@dataclass(frozen=True, repr=False, eq=False)
class Collect(Said):
    """Hand out the packets of these clients."""

    sources: Annotated[tuple[int, ...], Many(Int(), MOST, least=1, ascending=True)]


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class CodedRelay(Coded, id="coded-relay"):
    """Send clients' replies to ``inner`` as coded shards through other clients.

    Parameters
    ----------
    inner : System or dict
        A system of one exchange.
    code : {"rlnc", "mds"}
        Any K packets of "mds" decode; of "rlnc" nearly always. A threshold needs "mds".
    others
        As of :class:`fedcomp.systems.coded.shards.Coded`.

    Raises
    ------
    ConfigError
        When the numbers can never work, or the system inside has several exchanges.
    """

    RULES: ClassVar[tuple[type, ...]] = (Mean, Single, Released)
    SAYS: ClassVar[tuple[type[Said], ...]] = (Share, Shared, Collect)

    inner: Annotated[System, Made(get_system)]
    code: Annotated[str, OneOf("rlnc", "mds")] = "rlnc"

    def conflict(self) -> str:
        # Before any round: what works with no number of relays must not be found out by losing rounds.
        check(code=self.code, symbols=self.symbols, shards=self.shards, threshold=self.threshold)
        return (
            f"{self.inner!r} has several exchanges, which a coded reply does not support" if self.inner.several else ""
        )

    @property
    def updates(self) -> System:
        return self.inner

    @property
    def codecs(self) -> list[Codec]:
        return self.inner.codecs

    @property
    def whole(self) -> bool:
        return self.inner.whole

    def round(self, now: Now) -> Round:
        nodes, peers = listed(now)
        inner = self.inner.round(now)
        asks = {ask.node: ask for ask in wait_for(next(inner)).asks}
        told: dict[str, Any] = {
            "planned": len(nodes),
            "relays": len(nodes),
            "threshold": self.threshold,
            "left_out": {},
        }
        now.told["coded"] = told
        # Who has no key takes part uncoded.
        plain = [ask for node, ask in asks.items() if node not in now.keys]
        if not nodes:
            now.note("no client takes coded rounds: the round is an ordinary one; write app = fc.client(app)")
            return _end(inner, (yield Wait(plain, self.share_timeout)))
        try:
            symbols, shards = self._chosen(len(nodes))
        except NotDecodable as why:
            now.skip(str(why), too_few=not self._suffice(len(now.nodes)))
            return None
        told |= {"symbols": symbols, "shards": shards}
        words = Share(self.code, symbols, shards, self.threshold, now.seed, _longest(now.layout))
        collecting = _Collecting(now, words.plan(now.number), nodes)
        coded = [
            asks[node]._replace(say=words, blobs={**asks[node].blobs, PEERS: peers}, expects=Shared) for node in nodes
        ]
        answers = yield Wait([*coded, *plain], self.share_timeout)
        decoded = collecting.expect(answers)
        while wanted := collecting.wanted() or collecting.once_more():
            collecting.take(wanted, (yield Wait(collecting.questions(wanted), self.collect_timeout)))
        return _end(inner, sorted([*decoded, *collecting.decoded()], key=lambda answer: answer.node))

    def _chosen(self, relays: int) -> tuple[int, int]:
        """Return K and N of a round with this number of relays; raise :class:`NotDecodable` if they are too few."""
        return choose(
            relays,
            code=self.code,
            symbols=self.symbols,
            shards=self.shards,
            loss=self.loss,
            target=self.target,
            threshold=self.threshold,
        )

    def _suffice(self, relays: int) -> bool:
        """Whether this number of clients is enough for a round in which none of them is lost."""
        try:
            self._chosen(relays)
        except NotDecodable:
            return False
        return True

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        relay = Relay.of(memory, ask, me)
        if isinstance(ask.say, Collect):
            return relay.memory(), Answer(me.node, frames=_held(relay, ask.say.sources), bare=True)
        share = ask.say
        if share is None:
            # Among those that take part uncoded.
            own, answer = self.inner.client(relay.own, ask._replace(mail=()), me)
            return relay.memory(own), answer
        if not isinstance(share, Share) or ask.kind != "train":
            raise AnswerError(f"a relay is not asked for {type(share).__name__}")
        # The plan is looked at whole before anything is done.
        (peers, index), plan = peers_of(ask), share.plan(me.number)
        own, answer = self.inner.client(relay.own, ask._replace(say=None, mail=()), me)
        payload = me.pack(answer)
        packets = plan.packets(index, payload)
        posts = relay.send([peers[i] for i in plan.holders(index, len(peers))], packets)
        # The digest in a packet covers its random symbols, too: one of the payload would let relays test guesses.
        said = Shared(
            len(payload), Packet.from_bytes(packets[0], plan.limits).digest, b"".join(map(packet_hash, packets))
        )
        sent = answer.frames.get(self.inner.SENT) if answer.sent is None else answer.sent
        return relay.memory(own), Answer(me.node, say=said, post=posts, sent=sent, keep=answer.keep, bare=True)


@dataclass
class _Collecting:
    """The packets of one round that have come back; clients are numbered by their index among the participants.

    Attributes
    ----------
    alive : set of int
        Clients whose last request was answered.
    silent : set of int
        Clients that were asked for their packets and did not answer.
    """

    now: Now
    plan: RelayPlan
    nodes: Sequence[int]
    alive: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    again: bool = False

    def __post_init__(self) -> None:
        self.collector = Collector(self.plan, range(len(self.nodes)))
        self.index = {node: i for i, node in enumerate(self.nodes)}

    def expect(self, answers: Sequence[Answer]) -> list[Answer]:
        """Take the commitments of sources; return the answers that arrived uncoded."""
        uncoded = []
        for answer in answers:
            if not isinstance(answer.say, Shared):
                uncoded.append(answer)
                if answer.node in self.index:
                    self.collector.give_up(self.index[answer.node])
                continue
            source, said = self.index[answer.node], answer.say
            self.alive.add(source)
            hashes = [said.hashes[i : i + DIGEST_BYTES] for i in range(0, len(said.hashes), DIGEST_BYTES)]
            if len(said.hashes) != DIGEST_BYTES * self.plan.shards or said.payload > self.plan.max_payload:
                self.now.refuse(
                    answer.node, f"a reply of {said.payload} bytes in {len(hashes)} packets; the plan differs"
                )
                self.collector.give_up(source)
                continue
            self.collector.expect(source, Commitment(said.payload, said.digest), hashes)
        return uncoded

    def wanted(self) -> dict[int, list[int]]:
        """Return the relays to ask next, each with its sources. Relays that were away are included only if the others
        are not enough."""
        left = set(range(len(self.nodes))) - self.silent
        return self.collector.ask(left & self.alive, left - self.alive)

    def once_more(self) -> dict[int, list[int]]:
        """Return the silent relays to ask once more, if they may still complete a source."""
        if self.again:
            return {}
        self.again = True
        wanted: dict[int, list[int]] = {}
        for source in self.collector.waiting:
            holders = self.silent.intersection(self.plan.holders(source, len(self.nodes)))
            if self.collector.missing(source) <= len(holders):
                for relay in holders:
                    wanted.setdefault(relay, []).append(source)
        counted(self.now, "recollects", len({source for sources in wanted.values() for source in sources}))
        return dict(sorted(wanted.items()))

    def questions(self, wanted: Mapping[int, Sequence[int]]) -> list[Ask]:
        """Return the asks to relays, each for packets of some sources."""
        return [
            Ask(self.nodes[relay], "query", Collect(tuple(self.nodes[source] for source in sources)), model=False)
            for relay, sources in wanted.items()
        ]

    def take(self, wanted: Mapping[int, Sequence[int]], answers: Sequence[Answer]) -> None:
        """Take the packets in the answers of relays."""
        counted(self.now, "waves", 1)
        counted(self.now, "asked", len(wanted))
        answered = {self.index[answer.node] for answer in answers}
        self.silent |= wanted.keys() - answered
        self.silent -= answered
        for answer in answers:
            relay = self.index[answer.node]
            for data in answer.frames.values():
                self.collector.add(relay, bytes(data), wanted[relay])

    def decoded(self) -> list[Answer]:
        """Return the decoded replies; refuse the others one by one."""
        found = []
        for source, node in enumerate(self.nodes):
            try:
                found.append(self.now.unpack(node, self.collector.payload(source)))
            except NotDecodable as why:
                # Nobody's fault: it keeps its update.
                self.now.told["coded"]["left_out"][node] = str(why)
            except FedcompError as why:
                self.now.refuse(node, str(why))
        collector, told = self.collector, self.now.told["coded"]
        told |= {name: getattr(collector, name) for name in ("received", "innovative", "dependent")}
        for reason in collector.refused:
            self.now.note(reason)
        return found


def _longest(layout: Layout) -> int:
    """Return the maximum size of a reply in bytes."""
    sizes = [math.prod(t.shape) * np.dtype(t.dtype).itemsize for t in (*layout.tensors, *layout.exact)]
    return PAYLOAD_FACTOR * sum(sizes) + PAYLOAD_SLACK


def _held(relay: Relay, sources: Sequence[int]) -> Frames:
    """Return the packets of some sources that a relay holds, as far as they can be opened."""
    found = {}
    for source in sources:
        try:
            found[f"packet.{source}"] = relay.open(source)
        except CodingError:
            # A packet that is lost: others hold others.
            continue
    return found


def _end(program: Round, answers: Sequence[Answer]) -> Step | None:
    """Give a program of one exchange its answers; return its result."""
    try:
        program.send(answers)
    except StopIteration as end:
        step: Step | None = end.value
        return step
    raise ConfigError("the system inside asks a second time, which a coded reply does not support")
