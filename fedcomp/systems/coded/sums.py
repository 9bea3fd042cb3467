"""Coded sums: the server decodes the sum of its clients' updates, and no single one.

Every client cuts its update, integers on a shared grid, into shards, one for every relay, and the relays, which are the
clients again, add the shards of all; the shard of the sum is the sum of the shards (:mod:`fedcomp.coding.sumcode`).
What the server receives is (K + T) / K updates a round, however many clients take part.

1. *Share*: train; post one sealed shard to every relay. The answer itself holds no update, no weight and no metric.
2. *Report*: every relay says what it holds.
3. *Freeze*: contributors U and relays R that hold all of U. Contributors whose answer was lost may be in U: their
   shards say which message they answer.
4. *Add*: relays of R answer with one sum over U each, as many as are needed, and with no second one in this round,
   whatever run, session or memory the server names (:attr:`fedcomp.program.Answer.keep`).
5. Decode, check, mean. U is acknowledged, so that error feedback is exact: whoever is not in U keeps its update.

With ``mode="mask"`` clients upload their updates in full, masked, and the relays add shards of the masks.

What it does not protect from: a server that names keys of its own, relays that answer twice, clients that lie, a set U
of which the server owns all but one, and what the sum itself says. Shamir 1979 with packed secrets; So et al. 2022 for
the masks; the round is derived here.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.asks import mark_of, read_mark
from fedcomp.codecs import Codec, FixedPoint, ModularSum, State, fixed_point_of, get_codec
from fedcomp.coding.errors import CodingError, CorruptGeneration, NotDecodable, PacketError
from fedcomp.coding.plan import success
from fedcomp.coding.prime import FIELDS, PrimeField, Residues
from fedcomp.coding.sumcode import MODES, Summed, SumPlan, choose_set, contribution, decode, mask, prime_for, shares
from fedcomp.coding.sumcode import MOST as MOST_OF_PLAN
from fedcomp.coding.sumshards import (
    MASKED,
    SHARE,
    SUM,
    TAG_BYTES,
    AnsweredSets,
    HeldTags,
    Shard,
    make_tag,
    read_tag,
    set_digest,
)
from fedcomp.errors import ConfigError
from fedcomp.program import (
    NO_FRAMES,
    Answer,
    AnswerError,
    Ask,
    Frames,
    Me,
    Mean,
    Now,
    Round,
    Said,
    Step,
    System,
    Wait,
)
from fedcomp.rng import Key
from fedcomp.rules import Data, Int, Made, Many, OneOf, Switch, Text
from fedcomp.systems.coded.shards import MOST, PEERS, Coded, Peer, Relay, counted, listed, peers_of
from fedcomp.systems.pair import Pair
from fedcomp.wire import Frame

DEFAULT_LOSS: Final = 0.1
"""Fraction of relays that is expected to vanish, unless ``loss`` is given."""

CUT_STEPS: Final = 1000
"""The share of values at the clip is summed in steps of one in so many, fewer where the field is small."""

EVERY_SUM: Final = 2
"""Contributors that every sum has: of fewer it would be somebody's own update."""

RUNS: Final = 64
"""Runs for which one node adds up. Forgetting one would allow a second answer in it."""

BOOK: Final = "coded-sum"
"""What a node keeps: of which set it has given the sum, by run."""

Plan = Annotated[str, Text(1 << 12, least=1)]
"""The numbers of the code, as JSON."""


@dataclass(frozen=True, repr=False, eq=False)
class ShareUp(Said):
    """Train, and share; ``weight`` names the metric that weighs the update, empty where all count the same."""

    plan: Plan
    weight: Annotated[str, Text(128)] = ""


@dataclass(frozen=True, repr=False, eq=False)
class Tagged(Said):
    """The name of the encoding that was shared."""

    tag: Annotated[bytes, Data(TAG_BYTES, TAG_BYTES)]


@dataclass(frozen=True, repr=False, eq=False)
class Report(Said):
    """Say what you hold; ``unknown`` are the contributors whose tags nobody has said."""

    plan: Plan
    unknown: Annotated[tuple[int, ...], Many(Int(0, MOST - 1), MOST, ascending=True)] = ()


@dataclass(frozen=True, repr=False, eq=False)
class HeldBy(Said):
    """What a relay holds, as :class:`fedcomp.coding.sumshards.HeldTags` has it."""

    bitmap: Annotated[bytes, Data(MOST)]
    digest: Annotated[bytes, Data(8, 8)]
    sources: Annotated[tuple[int, ...], Many(Int(0, MOST - 1), MOST, ascending=True)] = ()
    tags: Annotated[bytes, Data(TAG_BYTES * MOST)] = b""


@dataclass(frozen=True, repr=False, eq=False)
class AddUp(Said):
    """Add the shards of a set: a bit for each contributor, and the name of the set."""

    plan: Plan
    chosen: Annotated[bytes, Data(MOST, 1)]
    name: Annotated[bytes, Data(TAG_BYTES, TAG_BYTES)]


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class CodedSum(Coded, id="coded-sum"):
    """The server learns only the sum of the clients' integers over a fixed set of clients, once per round.

    Parameters
    ----------
    codec : Codec or dict
        Sends integers: :class:`fedcomp.codecs.FixedPoint`, with or without error feedback.
    mode : {"share", "mask"}
        What is coded: the updates, or masks of updates that go to the server in full.
    weight : str
        The metric that weighs an update; empty gives everybody weight 1, which needs a smaller field.
    max_weight : int
        The largest weight there is room for; 0 takes as much as 2^31 - 1 leaves.
    metrics : bool
        Let the clients' training metrics travel, in the clear and with them their weights.
    min_contributors : int
        Contributors below which a sum is neither asked for nor given. With more than 2 a client whose update is zero in
        more than half of its coordinates shares nothing and says why.
    others
        As of :class:`fedcomp.systems.coded.shards.Coded`.

    Raises
    ------
    ConfigError
        When the codec cannot be summed, or an option makes no sense.
    """

    RULES: ClassVar[tuple[type, ...]] = (Mean,)
    SAYS: ClassVar[tuple[type[Said], ...]] = (ShareUp, Tagged, Report, HeldBy, AddUp)

    hides_zeros: ClassVar[bool] = False
    """Whether what is shared has noise in every coordinate."""

    codec: Annotated[Codec, Made(get_codec)]
    mode: Annotated[str, OneOf(*MODES)] = "share"
    weight: Annotated[str, Text(128)] = ""
    max_weight: Annotated[int, Int()] = 0
    metrics: Switch = False
    min_contributors: Annotated[int, Int(1)] = 2

    def conflict(self) -> str:
        fixed = fixed_point_of(self.codec)
        if isinstance(fixed, ModularSum) and self.weight:
            return (
                "in a coded sum the server knows no single weight, so it cannot remove the dithers of "
                f"{fixed!r}; set weighted=False, or use FixedPoint, which has none"
            )
        if self.shards and self.symbols + self.threshold > self.shards:
            return f"shards={self.shards} are fewer than the {self.symbols + self.threshold} that decoding needs"
        if self.symbols == 1 and not self.threshold:
            return (
                "symbols=1 with threshold=0 makes every share the update itself, which each relay could read; set "
                "threshold >= 1, so that T relays together learn nothing, or symbols >= 2"
            )
        if self.mode == "mask" and not self.threshold:
            return "mode='mask' hides updates behind masks that T relays must not know: set threshold >= 1"
        return ""

    @property
    def updates(self) -> System:
        return Pair(self.codec)

    @property
    def fixed(self) -> FixedPoint:
        """The codec of the integers."""
        return fixed_point_of(self.codec)

    def divisor(self, summed: Summed) -> float:
        """Return what makes the sum a mean."""
        return float(summed.weight)

    # The plan.

    def plan(self, clients: int, now: Now) -> SumPlan:
        """Return the plan of a round with so many clients.

        Raises
        ------
        NotDecodable
            When these are too few: another round may have more.
        ConfigError
            When a sum over them would wrap around.
        """
        relays, levels = self.shards or min(clients, MOST_OF_PLAN["relays"]), self.fixed.levels
        least = self.min_contributors
        needed = max(least, self.shards, max(1, self.symbols) + self.threshold)
        if clients < needed:
            raise NotDecodable(
                f"{clients} clients take part, the code needs {needed} (symbols + threshold = {self.symbols} + "
                f"{self.threshold}, shards {self.shards}, min_contributors {least}): lower these options, or ask more "
                "clients (fraction_train, min_available_nodes)"
            )
        # Where nobody sets a limit, the largest weight for which the largest field still has room.
        max_weight = (self.max_weight or max(1, FIELDS[-1].half // (clients * levels))) if self.weight else 1
        prime = prime_for(clients, levels, max_weight)
        return SumPlan(
            field=prime,
            size=self.fixed.count(now.layout),
            bound=levels,
            contributors=clients,
            relays=relays,
            symbols=self.symbols or self._symbols(relays),
            threshold=self.threshold,
            max_weight=max_weight,
            extras=self.extras(prime, clients),
            seed=Key(now.seed, "sumcode", now.number).u64(),
            least=least,
            mode=self.mode,
        )

    def extras(self, prime: PrimeField, clients: int) -> tuple[int, ...]:
        """Return the largest values of what is summed beside the integers: the share of values at the clip."""
        # As fine as the field has room for, since all clients' shares are added in it.
        return (min(CUT_STEPS, prime.half // clients),)

    def _symbols(self, relays: int) -> int:
        """Return the largest K for which enough relays stay with the wanted probability."""
        # More pieces mean shorter shards, so the largest K that is safe enough is the cheapest.
        for symbols in range(relays - self.threshold, 0, -1):
            if self._odds(symbols + self.threshold, relays) >= self.target:
                return symbols
        # One piece is the most that can be done; the round's report says how likely it is enough.
        if relays > self.threshold:
            return 1
        raise NotDecodable(f"{relays} relays leave no piece beside {self.threshold} random ones")

    def _odds(self, needed: int, relays: int) -> float:
        return success(needed, relays, DEFAULT_LOSS if self.loss is None else self.loss, None)

    # The server.

    def round(self, now: Now) -> Round:
        if exact := [t.name for t in now.layout.exact]:
            # With noise there is no other construction.
            relay = "" if self.hides_zeros else ", or construction='relay'"
            raise ConfigError(
                f"the model has {len(exact)} buffer(s) that are sent as values, first {exact[0]!r}; a coded sum "
                f"omits them. Use a model without running statistics and counters (group or layer normalisation){relay}"
            )
        nodes, peers = listed(now)
        told: dict[str, Any] = {"planned": len(nodes), "threshold": self.threshold, "left_out": {}}
        now.told["coded"] = told
        for node in set(now.nodes) - set(nodes):
            now.refuse(node, "not in the sum: it has told no key, to which the others could send their shards")
        try:
            plan = self.plan(len(nodes), now)
            told |= {"relays": plan.relays, "shards": plan.relays, "symbols": plan.symbols}
            self._warn(plan, now)
            summing = _Summing(now, self, plan, nodes, peers)
            summing.shared((yield Wait(summing.training(), self.share_timeout)))
            summing.reported((yield Wait(summing.questions(), self.collect_timeout)))
            summing.freeze()
            while summing.summed is None:
                summing.added((yield Wait(summing.sums_wanted(), self.collect_timeout)))
            return summing.step()
        except NotDecodable as why:
            now.skip(str(why), too_few=not self._suffice(len(now.nodes), now))
            return None

    def _suffice(self, clients: int, now: Now) -> bool:
        """Whether this number of clients is enough for a round in which none of them is lost."""
        try:
            self.plan(clients, now)
        except NotDecodable:
            return False
        return True

    def _warn(self, plan: SumPlan, now: Now) -> None:
        odds = self._odds(plan.needed, plan.relays)
        if not self.symbols and odds < self.target:
            now.note(f"{plan.relays} relays decode with probability {odds:.3g}: not even one piece is safer")
        if plan.needed == 1:
            now.note(
                f"{plan.relays} relays leave one piece and no random one: a share is the update itself, which its "
                "relay could read; set threshold >= 1"
            )

    # The client.

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        relay, say = Relay.of(memory, ask, me), ask.say
        if not isinstance(say, ShareUp | Report | AddUp):
            raise AnswerError(f"a coded sum asks for no {type(say).__name__}")
        (peers, index), plan = peers_of(ask), plan_of(say.plan)
        if plan.contributors != len(peers):
            raise AnswerError(f"a plan for {plan.contributors} contributors, and {len(peers)} take part")
        if isinstance(say, ShareUp):
            return self._share(relay, plan, say, [*peers], index)
        held = held_by(relay, plan, {peer.node: i for i, peer in enumerate(peers)}, row_of(plan, me.number, index))
        if isinstance(say, AddUp):
            return relay.memory(), _add_up(relay, plan, say, held)
        report = HeldTags.of(plan, {source: [shard.tag] for source, shard in held.items()}, say.unknown)
        sources, tags = zip(*report.details, strict=True) if report.details else ((), ())
        return relay.memory(), Answer(
            me.node, say=HeldBy(report.bitmap, report.digest, sources, b"".join(tags)), bare=True
        )

    def _share(self, relay: Relay, plan: SumPlan, say: ShareUp, peers: list[Peer], index: int) -> tuple[State, Answer]:
        me, fixed = relay.me, self.fixed
        if fixed.levels != plan.bound:
            raise AnswerError(f"the codec has {fixed.levels} levels, the plan {plan.bound}")
        frame, own = self.codec.encode(me.update(), relay.own, me.key)
        # The frame was made in this very call: no limits have to be known for it.
        integers, keep = self.integers(fixed.grid.integers(wire.decode(frame)), plan, say, me)
        self._look_for_alone(integers, plan)
        tag = make_tag(*read_mark(me.mark()))
        vector = contribution(plan, integers, _weight(me, say.weight, plan), _cut(fixed, integers, plan))
        frames = {}
        if plan.mode == "mask":
            hidden = mask(plan)
            frames["masked"] = Shard(MASKED, 0, index, tag, plan.field.add(vector, hidden)).to_bytes(plan)
            vector = hidden
        made = [Shard(SHARE, row, index, tag, body).to_bytes(plan) for row, body in enumerate(shares(plan, vector))]
        posts = relay.send([peers[i] for i in relays_of(plan, me.number)], made)
        said = Tagged(tag)
        return relay.memory(own), Answer(
            me.node, say=said, frames=frames, sent=frame, post=posts, keep=keep, bare=not self.metrics
        )

    def integers(
        self, integers: NDArray[np.int64], plan: SumPlan, say: ShareUp, me: Me
    ) -> tuple[NDArray[np.int64], Frames]:
        """Return what is shared of an update's integers, and what the node keeps of it."""
        return integers, NO_FRAMES

    def _look_for_alone(self, integers: NDArray[np.int64], plan: SumPlan) -> None:
        """Warn that a sum hides a coordinate only if others have also changed it.

        Raises
        ------
        ConfigError
            Instead of the warning, if more contributors are required than the two that every sum has.
        """
        changed = int(np.count_nonzero(integers))
        if self.hides_zeros or 2 * changed >= integers.size:
            return
        alone = (
            f"this update changes {changed} of {integers.size} coordinates: what no other client changes, the sum "
            "shows as it is"
        )
        if plan.least > EVERY_SUM:
            raise ConfigError(
                f"{alone}, and min_contributors={plan.least} are asked for. Train dense layers alone, use a finer grid "
                "(a smaller clip, more levels), or add noise (DistributedDp)"
            )
        warnings.warn(
            f"{alone}. Train dense layers alone, use a finer grid (a smaller clip, more levels), or add noise "
            "(DistributedDp)",
            stacklevel=2,
        )


@dataclass
class _Summing:
    """The state of one round; clients are numbered by their index among the participants.

    Attributes
    ----------
    tags : dict of int to bytes
        By source, the tag of the valid encoding.
    held : dict of int to dict
        By row of a relay that has reported, its tags by source.
    masked : dict of int to ndarray
        In mode "mask", the uploads by source.
    sequence : int
        Number of the message to answer.
    chosen : tuple of int
        U.
    left : list of int
        Rows of the relays of R that have not been asked yet.
    sums : dict of int to ndarray
        By row.
    name : bytes
        Of the set.
    contradiction : str
        The reason why the received sums do not decode.
    """

    now: Now
    system: CodedSum
    plan: SumPlan
    nodes: Sequence[int]
    peers: Frame
    tags: dict[int, bytes] = field(default_factory=dict)
    held: dict[int, dict[int, tuple[bytes, ...]]] = field(default_factory=dict)
    masked: dict[int, Residues] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    sequence: int = 0
    chosen: tuple[int, ...] = ()
    qualified: int = 0
    left: list[int] = field(default_factory=list)
    sums: dict[int, Residues] = field(default_factory=dict)
    name: bytes = b""
    contradiction: str = ""
    summed: Summed | None = None

    def __post_init__(self) -> None:
        self.relays = relays_of(self.plan, self.now.number)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.row = {self.nodes[i]: row for row, i in enumerate(self.relays)}
        self.words = json.dumps(self.plan.config(), separators=(",", ":"))

    def _ask(self, row: int, say: Said, expects: type[Said] | None = None) -> Ask:
        node = self.nodes[self.relays[row]]
        return Ask(node, "query", say, blobs={PEERS: self.peers}, expects=expects, model=False)

    def training(self) -> list[Ask]:
        """Return the first asks."""
        say = ShareUp(self.words, self.system.weight)
        return [Ask(node, "train", say, blobs={PEERS: self.peers}, expects=Tagged) for node in self.nodes]

    def shared(self, answers: Sequence[Answer]) -> None:
        """Take the names of the shared encodings."""
        found: dict[int, bytes] = {}
        for answer in answers:
            assert isinstance(answer.say, Tagged)
            source = self.index[answer.node]
            self.alive.add(source)
            if self.plan.mode == "mask":
                try:
                    shard = Shard.from_bytes(answer.frames.get("masked", b""), self.plan)
                    if (shard.kind, shard.source, shard.tag) != (MASKED, source, answer.say.tag):
                        raise PacketError("the masked update differs from the answer")
                except CodingError as why:
                    self.now.refuse(answer.node, f"masked update: {why}")
                    continue
                self.masked[source] = shard.body
            found[source] = answer.say.tag
        # All answer one message: another number, acknowledged, would make a client forget what is not in the model, or
        # put back what is.
        self.sequence = _most([read_tag(tag)[0] for tag in found.values()])
        for source, tag in found.items():
            if reason := self._wrong(tag):
                self.now.refuse(self.nodes[source], reason)
            else:
                self.tags[source] = tag

    def _wrong(self, tag: bytes) -> str:
        """Return the reason why an encoding does not belong to this round; empty if it does."""
        sequence, generation = read_tag(tag)
        if sequence != self.sequence:
            return f"its shards answer message {sequence}, expected {self.sequence}: stale ones"
        if generation > sequence:
            return f"its shards are of a memory that began with message {generation}, after {sequence}"
        return ""

    def questions(self) -> list[Ask]:
        """Return the asks to the present relays for what they hold."""
        say = Report(self.words, tuple(sorted(set(range(len(self.nodes))) - self.tags.keys())))
        return [self._ask(row, say, HeldBy) for row, i in enumerate(self.relays) if i in self.alive]

    def reported(self, answers: Sequence[Answer]) -> None:
        """Take the reports of what relays hold."""
        for answer in answers:
            said = answer.say
            assert isinstance(said, HeldBy)
            try:
                if len(said.tags) != TAG_BYTES * len(said.sources):
                    raise PacketError(f"{len(said.tags)} bytes are not {len(said.sources)} tags")
                tags = [said.tags[i : i + TAG_BYTES] for i in range(0, len(said.tags), TAG_BYTES)]
                report = HeldTags(said.bitmap, said.digest, tuple(zip(said.sources, tags, strict=True)))
                self.held[self.row[answer.node]] = report.tags(self.plan, self.tags)
            except CodingError as why:
                self.now.refuse(answer.node, f"report: {why}")

    def freeze(self) -> None:
        """Decide once which encodings are added, and by which relays.

        Raises
        ------
        NotDecodable
            If the relays have too little in common.
        """
        matrix = np.zeros((self.plan.relays, self.plan.contributors), np.bool_)
        for source in range(self.plan.contributors):
            found = Counter(tag for tags in self.held.values() for tag in set(tags.get(source, ())))
            # Without its upload a mask is of no use.
            if not found or (self.plan.mode == "mask" and source not in self.masked):
                continue
            # The encoding that most relays hold; among equals the one that its contributor announced.
            tag = max(found, key=lambda tag: (found[tag], tag == self.tags.get(source), tag))
            # A masked update whose tag was refused has none, whatever relays hold of it.
            if self._wrong(tag) or (self.plan.mode == "mask" and tag != self.tags.get(source)):
                continue
            self.tags[source] = tag
            for row, tags in self.held.items():
                matrix[row, source] = tag in tags.get(source, ())
        self.chosen, relays = choose_set(matrix, self.plan.needed)
        for source, node in enumerate(self.nodes):
            if source not in self.chosen:
                count, needed = int(matrix[:, source].sum()), self.plan.needed
                # Nobody's fault: it keeps its update.
                self.now.told["coded"]["left_out"][node] = (
                    f"{count} relays hold its shards, {needed} that hold everybody's are needed"
                )
        if len(self.held) < self.plan.needed:
            raise NotDecodable(
                f"{len(self.held)} of {self.plan.relays} clients answered, {self.plan.needed} are needed (symbols + "
                "threshold)"
            )
        if len(self.chosen) < self.plan.least:
            raise NotDecodable(
                f"{len(self.held)} of {self.plan.relays} relays reported, and {self.plan.needed} of them hold the same "
                f"{len(self.chosen)} contributors; at least {self.plan.least} are needed (min_contributors)"
            )
        # Relays compare this name with what they hold, and answer for one name a round only.
        self.name = set_digest(self.plan, self.now.number, {source: self.tags[source] for source in self.chosen})
        start = self.now.number % len(relays)
        self.left, self.qualified = [*relays[start:], *relays[:start]], len(relays)  # the work goes round

    def sums_wanted(self) -> list[Ask]:
        """Return the asks to relays for their sums: as many as needed, with replacements for absent ones.

        Raises
        ------
        NotDecodable
            If no relay is left, or the answers contradict each other.
        """
        # After a contradiction everybody is asked: with enough of them the wrong one can be found.
        wanted = len(self.left) if self.contradiction else self.plan.needed - len(self.sums)
        batch, self.left = self.left[:wanted], self.left[wanted:]
        if not batch:
            raise NotDecodable(
                self.contradiction
                or f"{len(self.sums)} of {self.qualified} relays answered with their sums, {self.plan.needed} are "
                "needed"
            )
        bits = np.zeros(self.plan.contributors, np.bool_)
        bits[list(self.chosen)] = True
        say = AddUp(self.words, np.packbits(bits).tobytes(), self.name)
        counted(self.now, "waves", 1)
        counted(self.now, "asked", len(batch))
        return [self._ask(row, say) for row in batch]

    def added(self, answers: Sequence[Answer]) -> None:
        """Take sums, and decode if they suffice."""
        for answer in answers:
            row = self.row[answer.node]
            try:
                shard = Shard.from_bytes(answer.frames.get("sum", b""), self.plan)
                if (shard.kind, shard.relay, shard.source, shard.tag) != (SUM, row, len(self.chosen), self.name):
                    raise PacketError("the sum is of another relay or another set")
            except CodingError as why:
                self.now.refuse(answer.node, f"sum: {why}")
                continue
            counted(self.now, "received", 1)
            self.sums[row] = shard.body
        if len(self.sums) < self.plan.needed:
            return
        masked = None
        if self.plan.mode == "mask":
            masked = self.plan.field.sum([self.masked[source] for source in self.chosen])
        try:
            self.summed = decode(self.plan, self.sums, masked, len(self.chosen))
        except CorruptGeneration as why:
            self.contradiction = str(why)
            self.now.note(self.contradiction)

    def step(self) -> Step:
        """Return the mean, with the contributors' marks.

        Raises
        ------
        NotDecodable
            If the weights of all updates are zero.
        """
        summed, now, system = self.summed, self.now, self.system
        assert summed is not None
        if summed.weight <= 0:
            raise NotDecodable("the contributors' weights sum to 0")
        told = now.told["coded"]
        told |= {"innovative": self.plan.needed, "dependent": len(self.sums) - self.plan.needed}
        for row in summed.left_out:
            now.note(f"the sum of relay {row} contradicts the others and was left out")
        members = tuple(self.nodes[source] for source in self.chosen)
        # Of weights the server knows the sum alone: a codec that has to know whose integers these are takes equal ones.
        mean = system.fixed.place(
            summed.integers,
            system.divisor(summed),
            now.layout,
            # The stream of the clients' codecs: a support that they share is drawn again from it.
            now.key("uplink"),
            dict.fromkeys(members, 1),
        )
        for source in self.chosen:
            now.credit(self.nodes[source], mark_of(*read_tag(self.tags[source])))
        own: dict[str, Any] = {"coded.contributors": len(members), "coded.weight": summed.weight}
        if self.plan.extras:
            own["coded.cut"] = summed.extras[0] / (self.plan.extras[0] * len(members))
        return Step(members, change=mean, support=system.codec.sparse(now.layout), metrics=own)


def _most(numbers: Sequence[int]) -> int:
    """Return the most frequent number, the largest of equally frequent ones; 0 for an empty list."""
    counts = Counter(numbers)
    return max(counts, key=lambda number: (counts[number], number), default=0)


def relays_of(plan: SumPlan, number: int) -> list[int]:
    """Return which clients are the relays of a round, by row of the code."""
    # With fewer relays than clients the work goes round, as do the memories that it fills.
    start = (number - 1) * plan.relays if plan.relays < plan.contributors else 0
    return [(start + row) % plan.contributors for row in range(plan.relays)]


def row_of(plan: SumPlan, number: int, index: int) -> int:
    """Return a client's row of the code; raise AnswerError where it is no relay."""
    relays = relays_of(plan, number)
    if index not in relays:
        raise AnswerError(f"client {index} of the round is none of its {plan.relays} relays")
    return relays.index(index)


def plan_of(text: str) -> SumPlan:
    """Return the plan of a message.

    Raises
    ------
    FedcompError
        When it is none.
    """
    try:
        config = json.loads(text)
    except ValueError as why:
        raise AnswerError(f"the plan is no JSON: {why}") from why
    if not isinstance(config, dict):
        raise AnswerError("the plan is no mapping")
    return SumPlan.from_config(config)


def held_by(relay: Relay, plan: SumPlan, index: Mapping[int, int], row: int) -> dict[int, Shard]:
    """Return the shards that a relay can read, by source."""
    found = {}
    for node in relay.sealed:
        try:
            shard = Shard.from_bytes(relay.open(node), plan)
        except CodingError:
            # A shard that is lost: the report does not name its source.
            continue
        if (shard.kind, shard.relay, shard.source) == (SHARE, row, index.get(node)):
            found[shard.source] = shard
    return found


def _add_up(relay: Relay, plan: SumPlan, say: AddUp, held: Mapping[int, Shard]) -> Answer:
    """Answer with the sum over the frozen set, once per round, even if the server names other runs in between."""
    me, bits = relay.me, np.frombuffer(say.chosen, np.uint8)
    if bits.size != -(-plan.contributors // 8):
        raise AnswerError("the set that is asked for is not written as one of this plan")
    sources = np.flatnonzero(np.unpackbits(bits)).tolist()
    if missing := [source for source in sources if source not in held]:
        raise NotDecodable(f"this relay lacks the shards of {len(missing)} contributor(s), first {missing[0]}")
    chosen = {source: held[source].tag for source in sources}
    if set_digest(plan, me.number, chosen) != say.name:
        # Said before the one answer of this round is spent.
        raise NotDecodable("this relay holds other encodings than those that are to be added")
    # By run, and kept longer than one: a server that renames its run, or has the memory begin anew, must not get a
    # second sum.
    book: dict[str, list[Any]] = json.loads(bytes(me.kept.get(BOOK, b"{}")))
    run = me.run.hex()
    last, name = book.get(run, (0, ""))
    if me.number < last:
        raise CodingError(f"this relay has added up round {last} of this run; round {me.number} is over")
    if run not in book and len(book) >= RUNS:
        raise CodingError(f"this relay has added up for {RUNS} runs, and for no more with this state; restart it")
    answered = AnsweredSets({last: bytes.fromhex(name)} if name else {})
    total = answered.add_up(plan, me.number, chosen, held)
    book[run] = [me.number, answered.answered[me.number].hex()]
    return Answer(me.node, frames={"sum": total.to_bytes(plan)}, keep={BOOK: json.dumps(book).encode()}, bare=True)


def _cut(codec: FixedPoint, integers: NDArray[np.int64], plan: SumPlan) -> tuple[int, ...]:
    """Return the fraction of values at the clip, in steps of the plan, rounded up since the sum reveals it."""
    return tuple(-(-most * codec.grid.saturated(integers) // max(1, integers.size)) for most in plan.extras)


def _weight(me: Me, metric: str, plan: SumPlan) -> int:
    """Return the update's weight as an integer that fits the plan; 1 if all have equal weight.

    Raises
    ------
    ConfigError
        Without the number itself, because the server must learn only the sum of the weights.
    """
    if not metric:
        return 1
    value = me.weight(metric)
    if value < 0 or value % 1:
        raise ConfigError(f"metric {metric!r} is not a whole number >= 0, which a weight in a sum must be")
    if value > plan.max_weight:
        raise ConfigError(
            f"metric {metric!r} is more than the {plan.max_weight} for which the sum has room; raise max_weight if it "
            "is given, lower the codec's levels if not, or use weighted=False"
        )
    return int(value)
