"""Who owns which part of the graph: the server's exchanges with the owners, and what it knows of them.

A part has one seat. Its node may be away for a round, come back, or come back as another node without its state; two
nodes may claim the same part. Seats are settled at the beginning of a round, and a node that was silent once in a round
is not waited for again in that round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower.gcn import IDS, NORMS, SETUP_TYPE, GraphHello, GraphSetup, Refused, expect, put_frames, take_frames
from fedcomp.flower.logs import log
from fedcomp.flower.rounds import Exchanges, Push
from fedcomp.graphs.base import GraphError, Ids
from fedcomp.graphs.ids import decode_ids, decode_norms
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.gcn.report import Fetching, FetchTraffic
from fedcomp.strategies.partitions import Holders

_OWN_ERRORS: Final = (2, 6)
"""Codes of errors that an app raises: its node is there, whatever it refuses. All others come from a SuperLink, or from
a process that has died."""

_SETUP_FRAMES: Final = {"": "setup_bytes"}


@dataclass(frozen=True)
class NoAnswer:
    """Why there is no answer; ``gone`` unless the node itself says so."""

    reason: str
    gone: bool


@dataclass(frozen=True)
class Answers:
    """The outcome of one exchange.

    Attributes
    ----------
    found : dict of int to Message
        Replies with content, by the keys of their messages, ascending.
    failures : dict of int to NoAnswer
    replies : list of Message
        All replies, errors included, as the driver handed them over.
    """

    found: dict[int, Message] = field(default_factory=dict)
    failures: dict[int, NoAnswer] = field(default_factory=dict)
    replies: list[Message] = field(default_factory=list)


@dataclass
class Talk:
    """The conversation of one round.

    Attributes
    ----------
    session : str
    key : str
        Name of the record with the run's configuration.
    config : ConfigRecord
    grid : Grid
    timeout : float or None
        Seconds to wait for the replies of each exchange.
    report : Fetching
    traffic : FetchTraffic
        Whose trips these are: of the training, or of the evaluation.
    silent : set of int
        Nodes that left their last message unanswered.
    """

    session: str
    key: str
    config: ConfigRecord
    grid: Grid
    timeout: float | None
    report: Fetching
    traffic: FetchTraffic
    silent: set[int]

    def message(
        self, node: int, kind: str, request: Any, frames: Mapping[str, Mapping[int, bytes]] | None = None
    ) -> Message:
        """Return a query: the run's configuration, a request, and frames by kind and place."""
        content = RecordDict({self.key: self.config})
        request.put(content)
        for name, by_place in (frames or {}).items():
            put_frames(content, name, by_place)
        return Message(content, node, kind, group_id=str(self.report.round))

    def ask(self, messages: Mapping[int, Message]) -> Exchanges[Answers]:
        """Send messages in one exchange; without any there is no exchange.

        An error from the SuperLink counts as silence, as no reply does.
        """
        # An empty push would be counted as a trip.
        if not messages:
            return Answers()
        self.traffic.trips += 1
        replies = yield Push(list(messages.values()), self.timeout)
        # A message that the engine did not take has no id: its node has gone.
        by_id = {m.metadata.message_id: place for place, m in messages.items() if m.metadata.message_id}
        found: dict[int, Message] = {}
        failures = {place: NoAnswer("nothing came back in time", True) for place in messages}
        for reply in replies:
            place = by_id[reply.metadata.reply_to_message_id]
            if reply.has_error():
                reason = f"error {reply.error.code}: {reply.error.reason}"
                failures[place] = NoAnswer(reason, reply.error.code not in _OWN_ERRORS)
            else:
                del failures[place]
                found[place] = reply
        for place, message in messages.items():
            node = message.metadata.dst_node_id
            if place in failures and failures[place].gone:
                self.silent.add(node)
            else:
                self.silent.discard(node)
        # In order of parts, not of arrival: the round must not depend on who was faster.
        return Answers(dict(sorted(found.items())), failures, replies)


def received(
    reply: Message, kind: str, asked: Mapping[int, Ids], parts: int, ids_of: Callable[[bytes, int], Ids]
) -> tuple[dict[int, bytes], set[int], str]:
    """Return the frames of an owner's reply by requester, the requesters it refuses, and why.

    Parameters
    ----------
    kind : str
        Of the frames.
    asked : mapping of int to ndarray of int64
        The nodes that each requester asked for.
    parts : int
        Of the graph.
    ids_of : callable
        ``ids_of(frame, limit)`` reads a frame to its end, of at most ``limit`` nodes, and returns its ids.

    Raises
    ------
    FedcompError
        When frames are missing, damaged, of another length, or not of the nodes that were asked for.
    """
    frames = take_frames(reply, parts, kind)[kind]
    refused = Refused.find(reply)
    without = set() if refused is None else set(refused.requesters)
    expect(frames, asked.keys() - without, kind)
    for part, data in frames.items():
        if not np.array_equal(ids_of(data, len(asked[part])), asked[part]):
            raise GraphError(f"those for part {part} are not of the {len(asked[part])} nodes that were asked for")
    return frames, without & asked.keys(), "" if refused is None else refused.reason


def sent(messages: Iterable[Message]) -> list[Message]:
    """Return those of some messages that an engine took."""
    return [message for message in messages if message.metadata.message_id]


@dataclass(frozen=True)
class Common:
    """What all owners of a run have in common."""

    digest: str
    parts: int
    nodes: int
    features: int
    structure: str

    @classmethod
    def of(cls, hello: GraphHello) -> Common:
        """Return it as one of their hellos says it."""
        return cls(hello.digest, hello.parts, hello.nodes, hello.features, hello.structure)

    def __str__(self) -> str:
        return (
            f"{self.parts} parts of a graph of {self.nodes} nodes with {self.features} features, "
            f"structure {self.structure!r}, digest {self.digest[:16]}"
        )


@dataclass
class Owners(Stateful):
    """Which node holds which part, and what each was sent.

    Parameters
    ----------
    structure : {"full", "halo"}
        What they have to know about the edges.
    norms : bool
        Whether the sampler uses the norms of remote features.
    layers : int
        Of the model.

    Attributes
    ----------
    common : Common or None
        None before anybody has answered.
    met : dict of int to Hello or None
        By node; None for a node that cannot take part.
    seats : dict of int to int
        The node of each part that has one online.
    holders : Holders
        What the nodes say, and who holds a part that several declare.
    dropped : set of int
        Silent nodes that are not asked again in this round.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "common": Common | None,
        "met": dict[int, GraphHello | None],
        "seats": dict[int, int],
        "holders": nested("holders"),
        "_wanted": dict[int, dict[int, bytes]],
        "_norms": dict[int, dict[int, bytes]],
        "_delivered": dict[int, dict[int, bytes]],
        "_counts": dict[int, dict[int, int]],
    }

    structure: str
    norms: bool = False
    layers: int = 1
    common: Common | None = None
    met: dict[int, GraphHello | None] = field(default_factory=dict)
    seats: dict[int, int] = field(default_factory=dict)
    holders: Holders = field(default_factory=Holders)
    dropped: set[int] = field(default_factory=set)
    _wanted: dict[int, dict[int, bytes]] = field(default_factory=dict)
    _norms: dict[int, dict[int, bytes]] = field(default_factory=dict)
    _delivered: dict[int, dict[int, bytes]] = field(default_factory=dict)
    _counts: dict[int, dict[int, int]] = field(default_factory=dict)

    @property
    def silent(self) -> set[int]:
        """Nodes that left their last message unanswered; a conversation adds to the same set."""
        return self.holders.silent

    def hello(self, part: int) -> GraphHello:
        """Return the hello of the node in a seat."""
        found = self.met[self.seats[part]]
        assert found is not None
        return found

    def part_of(self, node: int) -> int | None:
        """Return the part whose seat a node has."""
        return next((part for part, seated in self.seats.items() if seated == node), None)

    def away(self) -> dict[int, str]:
        """Return the parts whose owners cannot be asked, with the reason."""
        out = {}
        for part in range(self.common.parts if self.common is not None else 0):
            if part not in self.seats:
                out[part] = "no node of this part is online"
            elif self.seats[part] in self.silent:
                out[part] = "its node does not answer"
        return out

    def meet(self, talk: Talk) -> Exchanges[None]:
        """Ask new nodes, and those that were silent, for a hello; settle the seats.

        Where a newcomer claims a part that another node holds, that node is asked for a hello too: a killed process is
        still listed as online for a while. A node that answers keeps its seat, and has it back where another one took
        it meanwhile. Of several newcomers that claim one part none is seated.

        Raises
        ------
        ConfigError
            When the first nodes hold parts of different graphs, or do not know of its edges what was agreed on.
        """
        online = list(talk.grid.get_node_ids())
        present = set(online)
        # Who went offline is asked for a hello again when it is back: it may have restarted without its state.
        self.met = {node: hello for node, hello in self.met.items() if node in present}
        self.seats = {part: node for part, node in self.seats.items() if node in present}
        self.holders.meet(talk.grid)
        newcomers = [node for node in online if node not in self.met]
        # Those that were silent in this round's training are not asked in its evaluation: each would cost a timeout.
        suspects = sorted(node for node in self.silent - self.dropped if node in self.met)
        yield from self._ask_hello([*newcomers, *suspects], talk)
        claims = {hello.index for node in newcomers if (hello := self.met.get(node)) is not None}
        # Asked after the newcomers, not with them: which seats are in doubt is known from their claims alone.
        contested = [n for part, n in sorted(self.seats.items()) if part in claims and n not in self.silent]
        yield from self._ask_hello(contested, talk)
        self._seat(newcomers, talk.report)
        if self.norms:
            yield from self._fetch_norms(talk)

    def _ask_hello(self, nodes: list[int], talk: Talk) -> Exchanges[None]:
        asking = GraphSetup(talk.session, "hello", self.norms, self.layers)
        messages = {node: talk.message(node, SETUP_TYPE, asking) for node in nodes}
        answers = yield from talk.ask(messages)
        replies = answers.found
        talk.traffic.count_frames(replies.values(), _SETUP_FRAMES)
        for failure in answers.failures.values():
            talk.report.note("unknown", f"a node could not say which part it holds: {failure.reason}")
        known = self.holders.known
        hellos: dict[int, tuple[GraphHello, dict[int, bytes]]] = {}
        for node, reply in replies.items():
            try:
                hello = GraphHello.take(reply)
                # An engine that knows who holds what is believed, not the node.
                if known.get(node) not in (None, hello.index):
                    raise GraphError(f"the node of partition {known[node]} says it holds part {hello.index}")
                wants = take_frames(reply, hello.parts, IDS)[IDS]
                # Read for the check alone: a list nobody can read turns its node away now, not in the middle of a
                # round.
                for ids in wants.values():
                    decode_ids(ids, nodes=hello.nodes)
            except FedcompError as error:
                self.met[node] = None
                talk.report.note("refused", f"a node cannot be an owner: {error}")
                continue
            hellos[node] = hello, wants
        # All of a first exchange at once: which of two graphs is the run's must not depend on who answered first.
        self._agree([hello for hello, _ in hellos.values()])
        for node, (hello, wants) in hellos.items():
            if Common.of(hello) != self.common:
                self.met[node] = None
                reason = f"part {hello.index}: its node holds {Common.of(hello)}; this run is of {self.common}"
                talk.report.note("refused", reason)
                log.warning("round %d: %s", talk.report.round, reason)
                continue
            self.met[node] = hello
            if self.norms:
                self._wanted[hello.index] = {owner: ids for owner, ids in wants.items() if owner != hello.index}
                # A new node of the part has a new state: what the old one was sent, this one lacks.
                for book in (self._norms, self._delivered, self._counts):
                    book.pop(hello.index, None)
        # A suspect that was asked again may have been refused just now, and loses its seat.
        self.seats = {part: node for part, node in self.seats.items() if self.met.get(node) is not None}

    def _agree(self, hellos: list[GraphHello]) -> None:
        """Take what the first nodes have in common for the run's; raise ConfigError when that is not one graph."""
        if self.common is not None or not hellos:
            return
        kinds: dict[Common, list[int]] = {}
        for hello in hellos:
            kinds.setdefault(Common.of(hello), []).append(hello.index)
        if len(kinds) > 1:
            found = "; ".join(f"parts {sorted(parts)} are {common}" for common, parts in kinds.items())
            raise ConfigError(
                f"the nodes do not hold parts of one graph: {found}. Give all of them the same task, options and seed; "
                "a partition method 'auto' is another one where a package is missing: name the method"
            )
        (common,) = kinds
        if common.structure != self.structure:
            raise ConfigError(
                f"the nodes know structure {common.structure!r} of the graph, this strategy was made for "
                f"{self.structure!r}; set structure={common.structure!r}, or the task's option to {self.structure!r}"
            )
        self.common = common

    def _seat(self, newcomers: list[int], report: Fetching) -> None:
        # Who cannot be an owner declares nothing.
        owners = {node: hello.index for node, hello in self.met.items() if hello is not None}
        self.holders.claims = {node: part for node, part in self.holders.claims.items() if node in owners}
        answers = {node: part for node, part in owners.items() if node not in self.silent}
        refused = self.holders.settle((), answers)
        # Beside newcomers who had a seat that somebody else has back.
        reasons = [reason for node, reason in refused.items() if node in newcomers or self.part_of(node) is not None]
        self.seats |= self.holders.held
        for reason in reasons:
            report.note("unknown", reason)
        for reason in sorted(set(reasons)):
            log.warning("round %d: %s", report.round, reason)

    # Norms of features, for the sampler's mode "measured".

    def norms_for(self, part: int) -> Mapping[int, bytes]:
        """Return the norms a client has not been sent yet, frames by owner."""
        return self._norms.get(part, {})

    def norms_of(self, part: int) -> int:
        """Return how many norms a client has once it has read :meth:`norms_for`."""
        return sum(self._counts.get(part, {}).values())

    def delivered(self, part: int) -> None:
        """Record that a client has received :meth:`norms_for`."""
        if part in self._norms:
            self._delivered.setdefault(part, {}).update(self._norms.pop(part))

    def forgotten(self, part: int) -> None:
        """Record that a client has lost all norms that it was sent."""
        # What came since wins over what was delivered before.
        self._norms[part] = {**self._delivered.pop(part, {}), **self._norms.get(part, {})}

    def _fetch_norms(self, talk: Talk) -> Exchanges[None]:
        """Ask owners for the norms that some client still lacks."""
        away, asked = self.away(), dict[int, dict[int, bytes]]()
        for part, wants in sorted(self._wanted.items()):
            for owner, ids in wants.items():
                # For a part without a node nothing is fetched: the hello of its next node would drop it again.
                if owner not in away and part in self.seats:
                    asked.setdefault(owner, {})[part] = ids
        asking = GraphSetup(talk.session, "norms")
        messages = {o: talk.message(self.seats[o], SETUP_TYPE, asking, {IDS: ids}) for o, ids in sorted(asked.items())}
        answers = yield from talk.ask(messages)
        talk.traffic.count_frames(sent(messages.values()), _SETUP_FRAMES)
        talk.traffic.count_frames(answers.found.values(), _SETUP_FRAMES)
        reasons = {owner: failure.reason for owner, failure in answers.failures.items()}
        for owner, reply in answers.found.items():
            try:
                self._take_norms(owner, asked[owner], reply, talk.report)
            except FedcompError as error:
                reasons[owner] = str(error)
        for owner, reason in sorted(reasons.items()):
            talk.report.note("norms", f"part {owner} sent no norms, and is asked again in the next round: {reason}")

    def _take_norms(self, owner: int, asked: Mapping[int, bytes], reply: Message, report: Fetching) -> None:
        assert self.common is not None
        nodes = self.common.nodes
        wanted = {part: decode_ids(ids, nodes=nodes) for part, ids in asked.items()}
        frames, without, reason = received(
            reply, NORMS, wanted, self.common.parts, lambda f, most: decode_norms(f, nodes=nodes, limit=most)[0]
        )
        for part, data in frames.items():
            self._norms.setdefault(part, {})[owner] = data
            self._counts.setdefault(part, {})[owner] = len(wanted[part])
        for part in asked:
            # Also those of a refused requester, which goes without: its list would be refused again.
            del self._wanted[part][owner]
        if without:
            report.note("norms", f"part {owner} gives parts {sorted(without)} no norms: {reason}")
