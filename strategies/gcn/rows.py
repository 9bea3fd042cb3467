"""One turn of a graph round: what the clients' plans need, and how they get it.

    plan       every client says which rows of other owners its next steps use
    structure  rows of the adjacency, where a plan cannot go on without them; then the plan again
    rows       feature rows, from their owners; no exchange where nobody needs any

An owner may be absent: not online, silent, or with an answer that cannot be used. The clients that wanted its rows, and
no others, plan again without it; later plans leave it out from the start. An owner that refuses one client's list of
nodes is absent for that client alone: one of the two is wrong, and it is not known which. Every part can become absent
only once, so a turn ends, and a node that was silent in it is not waited for again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from flwr.app import Message

from fedcomp.errors import FedcompError
from fedcomp.flower.gcn import (
    FEATURES,
    IDS,
    NORMS,
    PLAN_TYPE,
    ROWS_TYPE,
    STRUCTURE,
    Fetch,
    Figures,
    Needs,
    PlanRequest,
    take_frames,
)
from fedcomp.flower.payload import payload_bytes
from fedcomp.flower.rounds import Exchanges
from fedcomp.graphs.base import GraphError, Ids
from fedcomp.graphs.ids import decode_ids, encode_ids
from fedcomp.graphs.rowcodecs import RowCodec, get_row_codec
from fedcomp.graphs.settings import RowSettings
from fedcomp.graphs.structure_rows import decode_structure
from fedcomp.strategies.gcn.owners import Owners, Talk, received, sent

_PLAN_FRAMES: Final = {"": "id_bytes", NORMS: "setup_bytes", STRUCTURE: "structure_bytes"}
_STRUCTURE_FRAMES: Final = {"": "structure_bytes"}


@dataclass
class Requester:
    """One client of a turn, and the state of its plan.

    Attributes
    ----------
    part, node : int
    ask : PlanRequest
        What its plan was made from; its training message says the same.
    planned : bool
    plans : int
        How often it was asked for a plan.
    needs : str
        What the frames of ``wants`` name.
    wants : dict of int to ndarray of int64
        Ids by owner.
    refused : set of int
        Owners that refuse this client.
    resent : bool
        Whether it has lost the norms that it was sent, and is sent them again.
    figures : Figures or None
    rows : dict of int to bytes
        Frames of feature rows by owner, ready for the training message.
    structure : dict of int to bytes
        Rows of the adjacency for its next plan.
    moved : int
        Bytes of payload that its plans and its rows have taken so far.
    """

    part: int
    node: int
    ask: PlanRequest
    planned: bool = False
    plans: int = 0
    needs: str = ""
    wants: dict[int, Ids] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    resent: bool = False
    figures: Figures | None = None
    rows: dict[int, bytes] = field(default_factory=dict)
    structure: dict[int, bytes] = field(default_factory=dict)
    moved: int = 0
    _fetched: dict[int, Ids] = field(default_factory=dict)

    def missing(self) -> dict[int, Ids]:
        """Return the ids whose rows have not been fetched."""
        return {owner: ids for owner, ids in self.wants.items() if not self._has(owner, ids)}

    def open(self) -> set[int]:
        """Return the owners from which something is still wanted."""
        return set(self.missing() if self.needs == FEATURES else self.wants)

    def take(self, owner: int, ids: Ids, frame: bytes) -> None:
        """Keep feature rows."""
        self.rows[owner], self._fetched[owner] = frame, ids
        self.moved += len(frame)

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


@dataclass
class Turn:
    """Plans and rows of one turn.

    Parameters
    ----------
    talk : Talk
    owners : Owners
    settings : RowSettings
        How feature rows travel.
    norms : bool
        Whether rows of the adjacency come with the norms of their nodes.
    layers : int
        Of the model: there are that many hops at most.

    Attributes
    ----------
    requesters : dict of int to Requester
        By part; who cannot go on is taken out.
    away : dict of int to str
        Owners that the turn does without, with the reason.
    """

    talk: Talk
    owners: Owners
    settings: RowSettings
    norms: bool
    layers: int
    requesters: dict[int, Requester] = field(default_factory=dict)
    away: dict[int, str] = field(default_factory=dict)
    _apart: set[int] = field(default_factory=set)

    @property
    def codec(self) -> RowCodec:
        """Of feature rows."""
        return get_row_codec(self.settings.codec)

    def run(self, asks: Mapping[int, PlanRequest]) -> Exchanges[dict[int, Requester]]:
        """Plan and fetch until the clients of some parts can train; return those that can, in order of parts."""
        for part, reason in self.owners.away().items():
            self._miss(part, reason)
        # Requests want them ascending.
        absent = tuple(sorted(self.away))
        self.requesters = {
            part: Requester(part, self.owners.seats[part], replace(ask, absent=absent))
            for part, ask in sorted(asks.items())
            if part not in self.away
        }
        for part in asks:
            if part in self.away:
                self.talk.report.lose(part, self.away[part])
        while True:
            yield from self._plan()
            if self._replan():
                continue
            # Structure before rows: what a plan wants of features is known only once it is complete.
            if any(r.needs == STRUCTURE for r in self.requesters.values()):
                yield from self._structure()
            elif any(r.missing() for r in self.requesters.values()):
                yield from self._rows()
            else:
                break
            self._replan()
        for requester in self.requesters.values():
            requester.settle(self.codec)
        self.talk.traffic.absent = len(self.away)
        return self.requesters

    # Plans.

    def _plan(self) -> Exchanges[None]:
        """Ask every client without a plan for one."""
        todo = {part: r for part, r in self.requesters.items() if not r.planned}
        messages = {part: self._plan_message(r) for part, r in todo.items()}
        answers = yield from self.talk.ask(messages)
        traffic = self.talk.traffic
        traffic.count_frames(sent(messages.values()), _PLAN_FRAMES)
        for part, failure in answers.failures.items():
            # Only a silent node is missed as an owner, too: one that answers with an error can still hand out rows.
            if failure.gone:
                self._miss(part, f"its plan: {failure.reason}")
            self._lose(part, f"its plan: {failure.reason}")
        for part, reply in answers.found.items():
            requester = todo[part]
            requester.moved += payload_bytes(messages[part]) + payload_bytes(reply)
            needs = ""
            try:
                needs = Needs.take(reply).needs
                self._take_plan(requester, reply, needs)
            except FedcompError as error:
                self._lose(part, f"its plan: {error}")
            traffic.count_frames([reply], _STRUCTURE_FRAMES if needs == STRUCTURE else _PLAN_FRAMES)

    def _plan_message(self, requester: Requester) -> Message:
        requester.plans += 1
        frames = {NORMS: self.owners.norms_for(requester.part), STRUCTURE: requester.structure}
        return self.talk.message(requester.node, PLAN_TYPE, requester.ask, frames)

    def _take_plan(self, requester: Requester, reply: Message, needs: str) -> None:
        """Check which rows a client wants, and of which owners.

        A client that lost its norms has no plan yet, and is sent them with the next question. Wishes that no valid plan
        has are a FedcompError.
        """
        common = self.owners.common
        assert common is not None
        if needs == NORMS:
            if requester.resent or not requester.ask.norms:
                raise GraphError("it needs norms that nobody sent it, or that it was sent just now")
            requester.resent = True
            self.owners.forgotten(requester.part)
            return
        if needs == FEATURES:
            requester.figures = Figures.take(reply)
        wants: dict[int, Ids] = {}
        for owner, data in take_frames(reply, common.parts, IDS)[IDS].items():
            if owner == requester.part or owner in requester.ask.absent:
                raise GraphError(f"it wants rows of part {owner}, which are its own or cannot be had")
            # Nobody has more rows than it owns: a longer list would make the server hold what no owner can answer.
            limit = self.owners.hello(owner).owned if owner in self.owners.seats else None
            ids = decode_ids(data, nodes=common.nodes, limit=limit)
            # Nothing is asked of an owner whose list is empty.
            if len(ids):
                wants[owner] = ids
        if needs == STRUCTURE and not wants:
            raise GraphError("it needs structure and does not say which")
        requester.wants, requester.needs, requester.planned = wants, needs, True
        requester.structure = {}
        # A client keeps the norms before it answers with a plan.
        self.owners.delivered(requester.part)

    def _replan(self) -> bool:
        """Withdraw plans that wait for owners who turned out to be absent; return whether any is to be made again."""
        for part, requester in list(self.requesters.items()):
            without = self.away.keys() | requester.refused
            # Rows that came before their owner fell away are as good as any.
            if requester.planned and without & requester.open():
                self.talk.traffic.replans += 1
                requester.planned = False
            if not requester.planned:
                requester.ask = replace(requester.ask, absent=tuple(sorted(without)))
                # A hop less than layers, for each set of owners that it had to do without.
                if requester.plans >= self.layers * (2 + len(without)) + requester.resent:
                    self._lose(part, f"it was asked for a plan {requester.plans} times and has none")
        return any(not r.planned for r in self.requesters.values())

    # What owners are asked for.

    def _structure(self) -> Exchanges[None]:
        """Fetch rows of the adjacency for the clients that wait for them."""
        waiting = {part: r for part, r in self.requesters.items() if r.needs == STRUCTURE}
        asked = _by_owner({part: requester.wants for part, requester in waiting.items()})
        found = yield from self._fetch(Fetch(self.talk.session, STRUCTURE, norms=self.norms), asked)
        # A client can be gone by now: it was an owner in the same exchange, and did not answer.
        for part, requester in waiting.items():
            if part not in self.requesters:
                continue
            requester.structure = {owner: frames[part] for owner, frames in found.items() if part in frames}
            # The same question names the owners that fell away meanwhile.
            self.talk.traffic.replans += bool((self.away.keys() | requester.refused) & requester.wants.keys())
            requester.wants, requester.needs, requester.planned = {}, "", False
            # It counts exchanges that brought something: without any the next question is the same one.
            if requester.structure:
                requester.ask = replace(requester.ask, hop=requester.ask.hop + 1)

    def _rows(self) -> Exchanges[None]:
        """Fetch the feature rows that some client lacks."""
        asked = _by_owner({part: requester.missing() for part, requester in self.requesters.items()})
        said = Fetch(self.talk.session, FEATURES, row_codec=self.settings.codec, noise=self.settings.noise)
        together = {}
        if self.settings.dedupe:
            # Under the owner's own number, which no requester of its rows has.
            shared = {o: by_part for o, by_part in asked.items() if len(by_part) > 1 and o not in self._apart}
            together = {owner: {owner: _union(by_part.values())} for owner, by_part in shared.items()}
        found = yield from self._fetch(said, {**asked, **together})
        for owner, frames in sorted(found.items()):
            for part, ids in asked[owner].items():
                requester = self.requesters.get(part)
                frame = frames.get(owner if owner in together else part)
                if requester is not None and frame is not None:
                    requester.take(owner, ids, self.codec.select(frame, ids) if owner in together else frame)

    def _fetch(self, said: Fetch, asked: Mapping[int, Mapping[int, Ids]]) -> Exchanges[dict[int, dict[int, bytes]]]:
        """Ask owners for rows of one kind; return the frames that can be used, by owner and requester.

        An owner that does not answer, or answers with anything else, is absent from now on.
        """
        lists = {o: {part: encode_ids(ids) for part, ids in by_part.items()} for o, by_part in sorted(asked.items())}
        messages = {
            owner: self.talk.message(self.owners.seats[owner], ROWS_TYPE, said, {IDS: frames})
            for owner, frames in lists.items()
        }
        answers = yield from self.talk.ask(messages)
        for owner, failure in answers.failures.items():
            self._miss(owner, f"its rows: {failure.reason}")
            # An owner that answers with an error hands out nothing, but may still train.
            if failure.gone:
                self._lose(owner, f"its rows: {failure.reason}")
        found: dict[int, dict[int, bytes]] = {}
        for owner, reply in answers.found.items():
            try:
                found[owner] = self._take_rows(owner, reply, said.kind, asked[owner])
            except FedcompError as error:
                self._miss(owner, f"its rows: {type(error).__name__}: {error}")
        self._count(said.kind, messages, answers.found, found, asked)
        return found

    def _take_rows(self, owner: int, reply: Message, kind: str, asked: Mapping[int, Ids]) -> dict[int, bytes]:
        """Return the rows an owner sent; raise FedcompError for damaged ones and for those that nobody asked for."""
        common = self.owners.common
        assert common is not None

        def ids_of(frame: bytes, limit: int) -> Ids:
            if kind == STRUCTURE:
                return decode_structure(frame, nodes=common.nodes, parts=common.parts, limit=limit)[0].ids
            # As float32: a client that learns in it could not read what is too large for it.
            return self.codec.decode(frame, features=common.features, nodes=common.nodes, limit=limit)[0]

        frames, without, reason = received(reply, kind, asked, common.parts, ids_of)
        if without:
            self._refuse(owner, without, reason)
        return frames

    def _count(
        self,
        kind: str,
        messages: Mapping[int, Message],
        replies: Mapping[int, Message],
        found: Mapping[int, Mapping[int, bytes]],
        asked: Mapping[int, Mapping[int, Ids]],
    ) -> None:
        traffic = self.talk.traffic
        down = _PLAN_FRAMES if kind == FEATURES else _STRUCTURE_FRAMES
        traffic.count_frames(sent(messages.values()), down)
        if kind == STRUCTURE:
            traffic.count_frames(replies.values(), down)
        else:
            before = traffic.feature_bytes_logical
            traffic.count_frames(replies.values(), {"": "feature_bytes_logical"})
            # The leg to the server. The other one is counted when the rows go out in the messages to requesters.
            traffic.feature_bytes_link += traffic.feature_bytes_logical - before
            for owner in found:
                rows = sum(len(asked[owner][part]) for part in found[owner])
                traffic.rows_fetched += rows
                traffic.rows_sent[owner] = traffic.rows_sent.get(owner, 0) + rows

    # Who drops out.

    def _refuse(self, owner: int, parts: set[int], reason: str) -> None:
        """Let the refused requesters do without an owner; a refused list of several requesters is split up first."""
        if owner in parts:
            self._apart.add(owner)
        for part in sorted((parts - {owner}) & self.requesters.keys()):
            self.requesters[part].refused.add(owner)
            self.talk.report.note("refused", f"part {owner} gives part {part} no rows: {reason}")

    def _miss(self, part: int, reason: str) -> None:
        """Do without an owner from now on."""
        if part not in self.away:
            self.away[part] = reason
            self.talk.report.miss(part, reason)

    def _lose(self, part: int, reason: str) -> None:
        """Go on without a client."""
        if self.requesters.pop(part, None) is not None:
            self.talk.report.lose(part, reason)


def _by_owner(wants: Mapping[int, Mapping[int, Ids]]) -> dict[int, dict[int, Ids]]:
    """Return what is asked of each owner, by requester, from what each requester wants, by owner."""
    asked: dict[int, dict[int, Ids]] = {}
    for part, by_owner in wants.items():
        for owner, ids in by_owner.items():
            asked.setdefault(owner, {})[part] = ids
    return asked


def _union(lists: Any) -> Ids:
    return np.unique(np.concatenate(list(lists))).astype(np.int64)
