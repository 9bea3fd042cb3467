"""The roster of a run: nodes are identified by partition, which lasts, not by Flower's node id.

A node that is restarted without a registered key, or that finds another SuperLink, has another id. What a strategy
keeps of it (what was acknowledged, which model and basis it holds, its vertex, its part in a plan) is under the id it
was first known by, and here stays so: that id is the node's *name*. Messages go to where the name is now, and replies
come back under it. A restarted server finds the names in its checkpoint.

Partitions are learnt from what nodes say in their replies, and by a roll call of query messages where that is not
enough: when cohorts are drawn, when more nodes are online than there are partitions, and when one that is known is
missing and another that is not may have come in its place. A node that has a registered key at a SuperLink with a
database keeps its id, and is known without being asked.

A node that is dead stays in a SuperLink's list for up to a minute. The SuperLink says of every node until when it
counts as online, which moves on with each of its heartbeats: one in 17 to 23 s. A node that left all messages of a
round unanswered, and was not heard of since it was sent the first, is skipped. So it is missed for one round. It is
asked again as soon as it gives a sign of life: a heartbeat, a late answer, or a new connection. A node that is merely
slow gives one at its next heartbeat. Where the engine knows of no heartbeats, nobody is ever skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcomp.flower._private import set_source
from fedcomp.flower.grid import in_process
from fedcomp.flower.metered import MeteredGrid, addressed, engine_lookup
from fedcomp.flower.payload import take_node
from fedcomp.flower.privacy import is_secret
from fedcomp.flower.wrapper import Enough, GridWrapper, as_batch, awaited_ids
from fedcomp.logs import log
from fedcomp.strategies.replies import GONE

ROLL_CALL_SECONDS: Final = 120.0
SLOWEST_BEAT: Final = 3600.0
"""Seconds between two heartbeats above which there are none: simulated nodes have no hearts."""


class Roll(GridWrapper):
    """A view of a grid on which nodes keep their names, and which leaves out those that are not there.

    Parameters
    ----------
    grid : MeteredGrid
    clients : int
        Number of partitions; nodes that hold none of them are not shown.
    query : ConfigRecord
        Configuration sent with the roll call.

    Attributes
    ----------
    reasons : list of str
        Of the current round: why newcomers were not taken in.
    returned : list of int
        Partitions that were recognised at another node id in the current round.

    Notes
    -----
    Once a run has begun no newcomer can end it: one that claims a partition which a node online holds, or none of the
    run's, is not shown. Who was silent in a round whose participants are secret is not looked at.
    """

    inner: MeteredGrid

    def __init__(self, grid: MeteredGrid, *, clients: int, query: ConfigRecord) -> None:
        super().__init__(grid)
        self.reasons: list[str] = []
        self.returned: list[int] = []
        self._clients = clients
        self._query = query
        # Who was sent messages in this round, and is skipped: when it was heard of last, in the SuperLink's seconds.
        self._sent: dict[int, float] = {}
        self._skipped: dict[int, float] = {}
        self._answered: set[int] = set()
        engine: Grid = grid
        while isinstance(engine, GridWrapper):
            engine = engine.inner
        # Nodes of this process are there, or are not listed.
        self._engine: Any = None if in_process(engine) is not None else engine
        self._partitions: dict[int, int] = {}
        # Those alone whose name is another: both ways.
        self._names: dict[int, int] = {}
        self._ids: dict[int, int] = {}
        self._asked: dict[int, int] = {}
        self._round = 0
        self.called = False

    @property
    def known(self) -> list[tuple[int, int]]:
        """Names and partitions of the nodes that are known: what a checkpoint has to keep."""
        self._learn(list(self.inner.get_node_ids()))
        return [(self._name(node), partition) for node, partition in self._partitions.items()]

    def recall(self, known: Iterable[tuple[int, int]]) -> None:
        """Take over :attr:`known` of an interrupted run: who comes is recognised."""
        self._partitions = {int(name): int(partition) for name, partition in known}
        self.called = self.called or bool(self._partitions)

    @property
    def skipped(self) -> list[int]:
        """Partitions of the nodes that are listed and not shown, because they missed a round and give no sign."""
        return sorted(self._partitions[node] for node in self._skipped if node in self._partitions)

    @property
    def round(self) -> int:
        """The current round; setting it ends the one before."""
        return self._round

    @round.setter
    def round(self, value: int) -> None:
        self._begin(value)

    def _begin(self, value: int) -> None:
        silent = {node: before for node, before in self._sent.items() if node not in self._answered}
        heard = self._heard() if silent else {}
        lost = {node: before for node, before in silent.items() if heard.get(node, before) <= before}
        for node in [node for node in lost if node not in self._skipped]:
            text = "%s missed round %d and has been silent since: it is skipped until it answers again"
            log.warning(text, self._title(node), self._round)
        self._skipped |= lost
        self._sent, self._answered = {}, set()
        self._round = value
        self.reasons, self.returned = [], []
        self.inner.round = value

    def there(self, *, partitions: bool = False) -> list[int]:
        """Return the names of the nodes that are there; with ``partitions`` of those alone whose partition is known."""
        listed = list(self.inner.get_node_ids())
        heard = self._heard() if self._skipped else {}
        for node, before in list(self._skipped.items()):
            back = node in listed and heard.get(node, before) > before
            if back:
                log.info("%s answers again and takes part again", self._title(node))
            if back or node not in listed:
                del self._skipped[node]
        online = [node for node in listed if node not in self._skipped]
        self._learn(listed)
        missing = not self._partitions.keys() <= set(online)
        if not (partitions or self.called or missing or len(listed) > self._clients):
            return [self._name(node) for node in online]
        # A node that joined, came back or could not answer is asked once a round who it is.
        unknown = [n for n in online if n not in self._partitions and self._asked.get(n) != self._round]
        if unknown:
            self.called = True
            taken = self._call_roll(unknown)
            self.reasons += [f"a node claims partition {partition}, which another node holds" for partition in taken]
        if not (partitions or self.called or len(listed) > self._clients):
            return [self._name(node) for node in online]
        return [self._name(node) for node in online if node in self._partitions]

    def partition_of(self, name: int) -> int | None:
        """Return the partition of a node as far as it is known."""
        node = self._id(name)
        known = self.inner.partition_of(node)
        return self._partitions.get(node) if known is None else known

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Push to where the names are now."""
        batch = as_batch(messages)
        with self._sent_to_ids(batch):
            return self.inner.push_messages(batch)

    def pull_messages(  # type: ignore[override]  # as Flower 1.43 has it; earlier ones name the first otherwise
        self, reply_to_message_ids: Iterable[str] | None = None, *, message_ids: Iterable[str] | None = None
    ) -> list[Message]:
        """Pull, under names; arguments as for :func:`~fedcomp.flower.wrapper.awaited_ids`."""
        return self._under_names(self.inner.pull_messages(awaited_ids(reply_to_message_ids, message_ids)))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None, enough: Enough | None = None
    ) -> list[Message]:
        """Send to where the names are now; return the replies under names."""
        batch = as_batch(messages)
        with self._sent_to_ids(batch):
            # Whom nobody waits for to the end has not missed the round.
            if enough is None:
                self._ask({m.metadata.dst_node_id for m in batch if not is_secret(m.content)})
            replies = list(self.inner.send_and_receive(batch, timeout=timeout, enough=enough))
        return self._under_names(self._hear(replies))

    def receive(
        self, message_ids: Collection[str], *, timeout: float | None = None, enough: Enough | None = None
    ) -> list[Message]:
        """Wait for replies to messages that were pushed before; return those that came, under names."""
        return self._under_names(self._hear(self.inner.receive(message_ids, timeout=timeout, enough=enough)))

    def record_peer(self, round: int, node_id: int, message_type: str, payload: int, wire: int) -> None:
        """Count bytes that a client handed to another one, as :class:`fedcomp.flower.metered.MeteredGrid` does."""
        self.inner.record_peer(round, self._id(node_id), message_type, payload, wire)

    def _heard(self) -> Mapping[int, float]:
        """Return until when each node counts as online."""
        return {
            info.node_id: float(info.online_until)
            for info in self._engine.get_nodes()
            if 0 < info.heartbeat_interval < SLOWEST_BEAT
        }

    def _ask(self, nodes: Iterable[int]) -> None:
        """Note that nodes are about to be sent messages."""
        new = [node for node in nodes if node not in self._sent]
        if new and self._engine is not None:
            heard = self._heard()
            self._sent |= {node: heard[node] for node in new if node in heard}

    def _hear(self, replies: list[Message]) -> list[Message]:
        """Note the sources of replies, and return them; errors that a SuperLink made of a node's silence are none."""
        for reply in replies:
            if not (reply.has_error() and reply.error.code in GONE):
                self._answered.add(reply.metadata.src_node_id)
                self._skipped.pop(reply.metadata.src_node_id, None)
        return replies

    def _name(self, node: int) -> int:
        return self._names.get(node, node)

    def _id(self, name: int) -> int:
        return self._ids.get(name, name)

    def _title(self, node: int) -> str:
        partition = self._partitions.get(node)
        return f"node {node}" if partition is None else f"the node of partition {partition}"

    @contextmanager
    def _sent_to_ids(self, batch: Sequence[Message]) -> Iterator[None]:
        """Address messages to ids for as long as they are being sent: whoever made them knows their nodes by name."""
        renamed = [(m, m.metadata.dst_node_id) for m in batch if m.metadata.dst_node_id in self._ids]
        for message, name in renamed:
            message.metadata.dst_node_id = self._ids[name]
        try:
            yield
        finally:
            for message, name in renamed:
                message.metadata.dst_node_id = name

    def _under_names(self, replies: Iterable[Message]) -> list[Message]:
        found = list(replies)
        for reply in found:
            if reply.metadata.src_node_id in self._names:
                set_source(reply, self._names[reply.metadata.src_node_id])
        return found

    def _learn(self, listed: Sequence[int]) -> None:
        """Take over what the meter believes of nodes that have answered, without asking them."""
        # An engine that knows its nodes need not recognise any.
        if not listed or engine_lookup(self.inner)(listed[0]) is not None:
            return
        held = set(self._partitions.values())
        for node in listed:
            partition = None if node in self._partitions else self.inner.partition_of(node)
            if partition is not None and partition < self._clients and partition not in held:
                self._partitions[node] = partition
                held.add(partition)

    def _call_roll(self, nodes: list[int]) -> list[int]:
        """Ask ``nodes`` for their partitions, remember the answers, and return the partitions that were taken already.

        Who is believed is the meter's decision: an engine that knows its nodes' partitions is asked, not they.
        """
        taken: list[int] = []
        if not nodes:
            return taken
        for node in self._skipped:
            # Listed, and no hindrance to whoever holds its partition now.
            self.inner.meter.release(node)
        content = RecordDict({"config": self._query})
        messages = [Message(content, node, "query") for node in nodes]
        self._asked |= dict.fromkeys(nodes, self._round)
        self._ask(nodes)
        replies = self._hear(list(self.inner.send_and_receive(messages, timeout=ROLL_CALL_SECONDS)))
        asked = dict(addressed(messages))
        online = set(self.inner.get_node_ids()) - self._skipped.keys()
        holders = {partition: node for node, partition in self._partitions.items()}
        for reply in replies:
            node = asked[reply.metadata.reply_to_message_id]
            known = self.inner.partition_of(node)
            partition = take_node(reply) if known is None else known
            # Node ids are redrawn in every run, so the reasons do not name them.
            if reply.has_error():
                self.reasons.append(f"a node could not answer the roll call: {reply.error.reason}")
            elif partition is None:
                self.reasons.append("a node does not say which partition it holds")
            elif partition >= self._clients:
                self.reasons.append(f"a node holds partition {partition} of a run with {self._clients} clients")
            else:
                other = holders.get(partition)
                holder = None if other == node else other
                if known is None or holder in online:
                    taken.append(partition)
                    continue
                # Where the node was known under another partition that one is free now.
                if (former := self._partitions.get(node)) is not None:
                    holders.pop(former, None)
                if holder is not None:
                    del self._partitions[holder]
                    self._rename(node, holder, partition)
                self._partitions[node] = partition
                holders[partition] = node
        return taken

    def _rename(self, node: int, former: int, partition: int) -> None:
        """Give ``node`` the name that its partition has had so far."""
        # An engine that knows who is who, and lets another node have a partition, means another node.
        if engine_lookup(self.inner)(node) is not None:
            return
        name = self._names.pop(former, former)
        self._names[node], self._ids[name] = name, node
        self.returned.append(partition)
        log.info("the node of partition %d has returned under another node id", partition)
