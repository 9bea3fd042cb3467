"""The server half: ownership of nodes, the rows that clients' plans need, and their delivery.

    who        which part are you; asked of nodes that are new or were silent
    plan       every client says which rows of other owners its next steps use
    fetch      feature norms and rows of the adjacency, where a plan cannot go on without them; then the plan again;
               then feature rows, from their owners. No exchange where nobody needs any

Clients cannot reach each other, so rows travel through the server. An owner may be absent: not there, without an
answer, or with one that cannot be used. The clients that wanted its rows, and no others, plan again without it; later
plans leave it out from the start. An owner that refuses one client's list of nodes is absent for that client alone: one
of the two is wrong, and it is not known which. Every part can become absent only once, so a conversation ends, and a
node that did not answer in it is not waited for again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from fedcomp.errors import ConfigError, FedcompError
from fedcomp.graphs.base import GraphError, Ids
from fedcomp.graphs.ids import decode_ids, decode_norms, encode_ids
from fedcomp.graphs.rowcodecs import RowCodec, get_row_codec
from fedcomp.graphs.structure_rows import decode_structure
from fedcomp.program import EVALUATE, Answer, Ask, Now, Wait
from fedcomp.systems.graphs.options import GraphOptions
from fedcomp.systems.graphs.traffic import FetchTraffic
from fedcomp.systems.graphs.words import (
    IDS,
    NORMS,
    ROWS,
    STRUCTURE,
    Fetch,
    Needs,
    Owner,
    Plan,
    Planned,
    Refused,
    Turn,
    Who,
    by_part,
    named,
)
from fedcomp.wire import Frame

Answers = Generator[Sequence[Ask] | Wait, Sequence[Answer], Any]

STATE: Final = "graph"
"""Where :attr:`fedcomp.program.Now.state` has what is known of owners."""

OTHERS: Final = "others"
"""Where whoever drives the program says in it which nodes are there and do not take part: they hand out rows."""

THERE: Final = "there"
"""Where it says, after each exchange, which nodes are there, whether their answers can be used or not."""

_FIGURES: Final = {ROWS: "id_bytes", STRUCTURE: "structure_bytes", NORMS: "setup_bytes"}
"""The figure in which the bytes of id lists count, by kind of request; bytes of rows have separate figures."""


@dataclass
class Requester:
    """One client of a turn, and the state of its plan.

    Attributes
    ----------
    part : int
    absent : frozenset of int
        Owners that its plan does without.
    planned : bool
    plans : int
        How often it was asked for a plan.
    needs : str
        What the frames of ``wants`` name.
    wants : dict of int to ndarray of int64
        Ids by owner.
    refused : set of int
        Owners that refuse this client.
    figures : Planned or None
    rows : dict of int to bytes
        Frames of feature rows by owner, ready for its training.
    brought : dict of str to bytes
        Norms and rows of the adjacency for its next plan.
    """

    part: int
    absent: frozenset[int]
    planned: bool = False
    plans: int = 0
    needs: str = ""
    wants: dict[int, Ids] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    figures: Planned | None = None
    rows: dict[int, Frame] = field(default_factory=dict)
    brought: dict[str, Frame] = field(default_factory=dict)
    _fetched: dict[int, Ids] = field(default_factory=dict)

    def missing(self) -> dict[int, Ids]:
        """Return the ids whose rows have not been fetched."""
        return {owner: ids for owner, ids in self.wants.items() if not self._has(owner, ids)}

    def open(self) -> set[int]:
        """Return the owners from which something is still wanted."""
        return set(self.missing() if self.needs == ROWS else self.wants)

    def take(self, owner: int, ids: Ids, frame: Frame) -> None:
        """Keep feature rows."""
        self.rows[owner], self._fetched[owner] = frame, ids

    def settle(self, codec: RowCodec) -> None:
        """Keep only those fetched rows that the last plan uses: the client refuses others."""
        self.rows = {
            owner: self.rows[owner]
            if np.array_equal(ids, self._fetched[owner])
            else codec.select(self.rows[owner], ids)
            for owner, ids in self.wants.items()
        }

    # Rows that were fetched for an earlier plan count as well; settle() cuts away what the last one does not use.
    def _has(self, owner: int, ids: Ids) -> bool:
        held = self._fetched.get(owner)
        return held is not None and bool(np.isin(ids, held, assume_unique=True).all())


class Conversation:
    """What the server says in one turn, a round's training or its evaluation.

    Parameters
    ----------
    system : GraphOptions
    now : Now
    purpose : {"train", "evaluate"}

    Attributes
    ----------
    traffic : FetchTraffic
    owners : dict of int to Owner
        By part, those that are known.
    absent, lost : dict of int to str
        Owners that the turn goes on without, and clients that do not contribute to its result; with the reason.
    requesters : dict of int to Requester
        By part; who cannot go on is taken out.
    silent : set of int
        Owners that left their last ask without an answer.
    """

    def __init__(self, system: GraphOptions, now: Now, purpose: str) -> None:
        self.system, self.now, self.purpose = system, now, purpose
        self.traffic = FetchTraffic()
        self.absent: dict[int, str] = {}
        self.lost: dict[int, str] = {}
        self.requesters: dict[int, Requester] = {}
        held: Mapping[str, Any] = now.state.get(STATE, {})
        self.owners = {int(part): Owner.of(said) for part, said in held.get("owners", {}).items()}
        self.silent = set[int](held.get("silent", ()))
        self._barred = set[int](held.get("barred", ()))
        # Those that were silent in this round's training are not asked in its evaluation: each would cost a timeout.
        self._dropped = set(self.silent) if held.get("round") == now.number else set[int]()
        self._common: tuple[Any, ...] | None = tuple(held["common"]) if held.get("common") else None
        self._before, self._present = set[int](held.get("present", ())), set[int]()
        self._apart = set[int]()

    @property
    def codec(self) -> RowCodec:
        """Of feature rows."""
        return get_row_codec(self.system.rows.codec)

    @property
    def parts(self) -> int:
        """Of the graph; 0 before anybody has answered."""
        return 0 if self._common is None else int(self._common[1])

    @property
    def nodes(self) -> int:
        """Of the graph."""
        assert self._common is not None
        return int(self._common[2])

    def keep(self) -> None:
        """Leave what is known of owners for the next turn."""
        self.now.state[STATE] = {
            "owners": {str(part): owner.entries() for part, owner in sorted(self.owners.items())},
            "silent": sorted(self.silent),
            "barred": sorted(self._barred),
            "present": sorted(self._present),
            "round": self.now.number,
            "common": [] if self._common is None else list(self._common),
        }

    def turn(self) -> Answers:
        """Plan, fetch, and let the clients that can train; return their answers. In an evaluation the driver takes what
        the last ask brings."""
        clients = yield from self._greet(self.now.nodes)
        self._present |= {*clients, *(yield from self._greet(self.now.state.get(OTHERS, ())))}
        for part in range(self.parts):
            if part not in self._present:
                self._miss(part, "no node of this part is there")
            elif part in self.silent:
                self._miss(part, "its node does not answer")
        if self.purpose == "train":
            # Lost as clients only: as owners they go on handing out rows.
            for part in [part for part in clients if not self.owners[part].train]:
                self.lost[part] = "its part has no node to learn from"
                clients.remove(part)
        yield from self._prepared(clients)
        asks = []
        for part, r in self.requesters.items():
            say = Turn(self.purpose, tuple(sorted(r.absent)))
            asks.append(Ask(part, "train" if self.purpose == "train" else EVALUATE, say, named(ROWS, r.rows)))
            self.traffic.count(asks[-1].frames, "feature_bytes_link")
            self.traffic.rows_received[part] = sum(map(len, r.wants.values()))
        self.traffic.carried_out(r.figures for r in self.requesters.values() if r.figures is not None)
        self.traffic.absent = len(self.absent)
        answers = yield from self._exchange(asks)
        self.traffic.clients = len(answers)
        for part in self.requesters.keys() - {answer.node for answer in answers}:
            self.lost[part] = "it did not answer, or its answer was refused"
        self.keep()
        return answers

    def _exchange(self, asks: Sequence[Ask]) -> Answers:
        """Ask nodes in one exchange; those that do not answer count as silent. Without nodes there is no exchange."""
        if not asks:
            return []
        self.traffic.trips += 1
        answers = yield Wait(asks, self.system.rounds.timeout)
        there = {answer.node for answer in answers}.union(self.now.state.get(THERE, ()))
        self.silent = (self.silent | ({ask.node for ask in asks} & self.owners.keys())) - there
        return answers

    # Who owns what.

    def _greet(self, nodes: Sequence[int]) -> Answers:
        """Ask new and silent nodes which part they own; return the nodes that are known to own one."""
        asked = [node for node in nodes if self._unknown(node)]
        answers = yield from self._exchange([Ask(n, "query", Who(), expects=Owner, model=False) for n in asked])
        found: dict[int, Owner] = {}
        for answer in answers:
            owner = answer.say
            if owner.index != answer.node:
                self.now.refuse(answer.node, f"says it holds part {owner.index}, and is node {answer.node}")
                self.owners.pop(answer.node, None)
                self._barred.add(answer.node)
                continue
            found[answer.node] = owner
        # All of a first exchange at once: which of two graphs is the run's must not depend on who answered first.
        self._agree(list(found.values()))
        for part, owner in list(found.items()):
            if owner.common == self._common:
                self.owners[part] = owner
                self._barred.discard(part)
                continue
            del found[part]
            self.owners.pop(part, None)
            self._barred.add(part)
            self.now.refuse(part, f"holds a part of {_told(owner.common)}; this run is of {_told(self._common)}")
        return [node for node in sorted({*nodes, *found}) if node in self.owners]

    def _unknown(self, node: int) -> bool:
        if node in self.now.strangers:
            return True
        if node in self.owners:
            if node not in self._before:
                # It was away, and may have been started again with another graph.
                return True
            return node in self.silent and node not in self._dropped
        return node not in self._barred

    def _agree(self, owners: Sequence[Owner]) -> None:
        """Use what most of the first nodes have in common as the settings of the run.

        Raises
        ------
        ConfigError
            If there is no such majority, or it does not know what was agreed about its edges.
        """
        if self._common is not None or not owners:
            return
        (common, count), *_ = Counter(owner.common for owner in owners).most_common()
        if 2 * count <= len(owners):
            kinds: dict[Any, list[int]] = {}
            for owner in owners:
                kinds.setdefault(owner.common, []).append(owner.index)
            found = "; ".join(f"parts {sorted(parts)} are of {_told(each)}" for each, parts in kinds.items())
            raise ConfigError(
                f"the nodes do not hold parts of one graph: {found}. Give all of them the same task, options and seed; "
                "a partition method 'auto' is another one where a package is missing: name the method"
            )
        if common[-1] != self.system.structure:
            raise ConfigError(
                f"the nodes know structure {common[-1]!r} of the graph, this strategy was made for "
                f"{self.system.structure!r}; set structure={common[-1]!r}, or the task's option to "
                f"{self.system.structure!r}"
            )
        self._common = common

    # Plans.

    def _prepared(self, clients: Iterable[int]) -> Answers:
        """Plan and fetch until the clients that are left can train."""
        for part in clients:
            if part in self.absent:
                self.lost[part] = self.absent[part]
            else:
                self.requesters[part] = Requester(part, frozenset(self.absent))
        while True:
            yield from self._plan()
            if self._replan():
                continue
            # Feature rows last: what a plan wants of them is known only once it is complete.
            kinds = {r.needs for r in self.requesters.values()}
            if NORMS in kinds or STRUCTURE in kinds:
                yield from self._bring(NORMS if NORMS in kinds else STRUCTURE)
            elif any(r.missing() for r in self.requesters.values()):
                yield from self._rows()
            else:
                break
            self._replan()
        for requester in self.requesters.values():
            requester.settle(self.codec)

    def _plan(self) -> Answers:
        """Ask every client without a plan for one."""
        todo = [r for r in self.requesters.values() if not r.planned]
        asks = []
        for r in todo:
            r.plans += 1
            say = Plan(self.purpose, tuple(sorted(r.absent)))
            asks.append(Ask(r.part, "query", say, r.brought, model=False))
            for name, data in r.brought.items():
                self.traffic.count({name: data}, _FIGURES[name.partition("/")[0]])
        answers = yield from self._exchange(asks)
        came = {answer.node: answer for answer in answers}
        for r in todo:
            if r.part not in came:
                # One that fails at its plan can still hand out rows.
                if r.part in self.silent:
                    self._miss(r.part, "its plan did not come")
                self._lose(r.part, "its plan did not come")
                continue
            answer = came[r.part]
            kind = answer.say.kind if isinstance(answer.say, Needs) else ROWS
            self.traffic.count(answer.frames, _FIGURES[kind])
            try:
                self._take_plan(r, answer, kind)
            except FedcompError as why:
                self.now.refuse(r.part, f"its plan: {why}")
                self._lose(r.part, f"its plan: {why}")

    def _take_plan(self, requester: Requester, answer: Answer, kind: str) -> None:
        """Check which rows a client wants from which owners; a request that no plan can contain is a FedcompError."""
        if not isinstance(answer.say, Needs | Planned):
            raise GraphError("it answers a question for a plan with something else")
        if isinstance(answer.say, Planned):
            requester.figures = answer.say
        wants: dict[int, Ids] = {}
        for owner, data in by_part(answer.frames, self.parts, IDS)[IDS].items():
            if owner == requester.part or owner in requester.absent:
                raise GraphError(f"it asks for rows of part {owner}, which are its own or not available")
            # Nobody has more rows than it owns: a longer list would make the server hold what no owner can answer.
            limit = self.owners[owner].owned if owner in self.owners else None
            ids = decode_ids(data, nodes=self.nodes, limit=limit)
            # Nothing is asked of an owner whose list is empty.
            if len(ids):
                wants[owner] = ids
        if kind != ROWS and not wants:
            raise GraphError(f"it needs {kind} and does not say which")
        requester.wants, requester.needs, requester.planned, requester.brought = wants, kind, True, {}

    def _replan(self) -> bool:
        """Withdraw plans that wait for absent owners; return whether any must be made again."""
        for part, requester in list(self.requesters.items()):
            without = self.absent.keys() | requester.refused
            # Rows that came before their owner fell away are as good as any.
            if requester.planned and without & requester.open():
                self.traffic.replans += 1
                requester.planned = False
            if not requester.planned:
                requester.absent = frozenset(without)
                # Its norms, and a hop less than layers, for each set of owners that it had to do without.
                layers, sampler = self.system.sampler.layers, self.system.sampler
                if requester.plans >= (layers + sampler.measures) * (2 + len(without)):
                    self._lose(part, f"it was asked for a plan {requester.plans} times and has none")
        return any(not r.planned for r in self.requesters.values())

    # What owners are asked for.

    def _bring(self, kind: str) -> Answers:
        """Fetch norms, or rows of the adjacency, for the clients that wait for them."""
        waiting = {part: r for part, r in self.requesters.items() if r.needs == kind}
        asked = _by_owner({part: requester.wants for part, requester in waiting.items()})
        found = yield from self._fetch(Fetch(kind, kind == STRUCTURE and self.system.sampler.measures), asked)
        # A client can be gone by now: it was an owner in the same exchange, and did not answer.
        for part in waiting.keys() & self.requesters.keys():
            r = waiting[part]
            r.brought = named(kind, {owner: frames[part] for owner, frames in found.items() if part in frames})
            # The same question names the owners that fell away meanwhile.
            self.traffic.replans += bool((self.absent.keys() | r.refused) & r.wants.keys())
            r.wants, r.needs, r.planned = {}, "", False

    def _rows(self) -> Answers:
        """Fetch the feature rows that clients lack."""
        asked = _by_owner({part: requester.missing() for part, requester in self.requesters.items()})
        together = {}
        if self.system.rows.dedupe:
            # Under the owner's own number, which no requester of its rows has.
            shared = {o: by_part for o, by_part in asked.items() if len(by_part) > 1 and o not in self._apart}
            together = {owner: {owner: _union(by_part.values())} for owner, by_part in shared.items()}
        found = yield from self._fetch(Fetch(ROWS), {**asked, **together})
        for owner, frames in sorted(found.items()):
            for part, ids in asked[owner].items():
                requester = self.requesters.get(part)
                frame = frames.get(owner if owner in together else part)
                if requester is not None and frame is not None:
                    requester.take(owner, ids, self.codec.select(frame, ids) if owner in together else frame)

    def _fetch(self, say: Fetch, asked: Mapping[int, Mapping[int, Ids]]) -> Answers:
        """Ask owners for rows of one kind; return the usable frames by owner and requester.

        An owner that does not answer, or gives a wrong answer, counts as absent from now on.
        """
        asks = []
        for owner, wanted in sorted(asked.items()):
            lists = named(IDS, {part: encode_ids(ids) for part, ids in wanted.items()})
            asks.append(Ask(owner, "query", say, lists, model=False))
            self.traffic.count(lists, _FIGURES[say.kind])
        answers = yield from self._exchange(asks)
        found: dict[int, dict[int, Frame]] = {}
        for answer in answers:
            owner, frames = answer.node, answer.frames
            size = self.traffic.count(frames, "feature_bytes_logical" if say.kind == ROWS else _FIGURES[say.kind])
            if say.kind == ROWS:
                # The leg to the server. The other one is counted when the rows go out to requesters.
                self.traffic.feature_bytes_link += size
            try:
                found[owner] = self._take_rows(answer, say.kind, asked[owner])
            except FedcompError as why:
                self.now.refuse(owner, f"its rows: {type(why).__name__}: {why}")
                self._miss(owner, f"its rows: {type(why).__name__}: {why}")
                continue
            if say.kind == ROWS:
                rows = sum(len(asked[owner][part]) for part in found[owner])
                self.traffic.rows_fetched += rows
                self.traffic.rows_sent[owner] = self.traffic.rows_sent.get(owner, 0) + rows
        for owner in asked.keys() - {answer.node for answer in answers}:
            self._miss(owner, "its rows did not come")
            # One that fails at its rows hands out nothing, but may still train.
            if owner in self.silent:
                self._lose(owner, "its rows did not come")
        return found

    def _take_rows(self, answer: Answer, kind: str, asked: Mapping[int, Ids]) -> dict[int, Frame]:
        """Return the rows that an owner sent, by requester.

        Raises
        ------
        FedcompError
            If some are missing, damaged, of another length, or of other nodes than requested.
        """
        frames = by_part(answer.frames, self.parts, kind)[kind]
        refused = answer.say if isinstance(answer.say, Refused) else None
        without = set() if refused is None else asked.keys() & set(refused.requesters)
        if frames.keys() != asked.keys() - without:
            raise GraphError(f"{kind} for parts {sorted(frames)}, expected {sorted(asked.keys() - without)}")
        ids_of = self._reader(kind)
        for part, data in frames.items():
            if not np.array_equal(ids_of(data, len(asked[part])), asked[part]):
                raise GraphError(f"those for part {part} are not of the {len(asked[part])} nodes that were asked for")
        if refused is not None:
            self._refuse(answer.node, without, refused.reason)
        return frames

    def _reader(self, kind: str) -> Callable[[Frame, int], Ids]:
        """Return a function that reads a whole frame of at most this number of nodes and returns their ids."""
        assert self._common is not None
        if kind == STRUCTURE:
            read = partial(decode_structure, nodes=self.nodes, parts=self.parts)
            return lambda frame, limit: read(frame, limit=limit)[0].ids
        if kind == NORMS:
            return lambda frame, limit: decode_norms(frame, nodes=self.nodes, limit=limit)[0]
        # As float32: a client that learns in it could not read what is too large for it.
        features = int(self._common[3])
        return lambda frame, limit: self.codec.decode(frame, features=features, nodes=self.nodes, limit=limit)[0]

    # Who drops out.

    def _refuse(self, owner: int, parts: set[int], reason: str) -> None:
        """Let the refused requesters continue without an owner; a refused list of several requesters is split first."""
        if owner in parts:
            self._apart.add(owner)
        for part in sorted((parts - {owner}) & self.requesters.keys()):
            self.requesters[part].refused.add(owner)
            self.now.note(f"part {owner} gives part {part} no rows: {reason[:200]}")

    def _miss(self, part: int, reason: str) -> None:
        """Continue without an owner; the first reason counts."""
        self.absent.setdefault(part, reason)

    def _lose(self, part: int, reason: str) -> None:
        """Continue without a client."""
        if self.requesters.pop(part, None) is not None:
            self.lost.setdefault(part, reason)


def _told(common: tuple[Any, ...] | None) -> str:
    assert common is not None
    digest, parts, nodes, features, structure = common
    return (
        f"a graph of {nodes} nodes in {parts} parts with {features} features, structure {structure!r}, digest "
        f"{digest[:16]}"
    )


def _by_owner(wants: Mapping[int, Mapping[int, Ids]]) -> dict[int, dict[int, Ids]]:
    """Return the requests to each owner, by requester, from the wishes of each requester, by owner."""
    asked: dict[int, dict[int, Ids]] = {}
    for part, by_owner in wants.items():
        for owner, ids in by_owner.items():
            asked.setdefault(owner, {})[part] = ids
    return asked


def _union(lists: Iterable[Ids]) -> Ids:
    return np.unique(np.concatenate(list(lists))).astype(np.int64)
