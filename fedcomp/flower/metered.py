"""A Grid wrapper that counts every message and returns replies in a reproducible order.

Works on the in-process engine, on Flower's simulation and on a deployment alike. It also smooths what differs
between them: replies are joined to messages by message id, duplicates are dropped, and errors the SuperLink makes in
its own name are given back to the node they concern.

What a reply says of itself is a client's word. A partition it claims counts only where the engine does not know better,
and never moves or merges what another node online is known by.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast
from weakref import WeakKeyDictionary

from flwr.app import Message
from flwr.serverapp import Grid

from fedcomp.errors import StateError
from fedcomp.flower import store
from fedcomp.flower._private import SUPERLINK_NODE_ID, set_source, weigher
from fedcomp.flower.ledger import Direction, TrafficLedger
from fedcomp.flower.payload import payload_bytes, round_of, take_node
from fedcomp.flower.privacy import is_secret
from fedcomp.flower.wrapper import Enough, GridWrapper, as_batch, awaited_ids, push
from fedcomp.logs import log
from fedcomp.stateful import Stateful

POLL_SECONDS: Final = 0.1
"""Between two looks for replies on an engine that runs by itself; Flower's own deployment grid waits 3 s."""

GRACE_SECONDS: Final = 5.0
"""For which a look may go on when the time is up."""

PartitionOf = Callable[[int], "int | None"]
Addressed = tuple[str, int]
"""Id of a message and the node it went to."""


def addressed(messages: Iterable[Message]) -> list[Addressed]:
    """Return id and destination of messages that were pushed."""
    return [(m.metadata.message_id, m.metadata.dst_node_id) for m in messages]


def join(sent: Sequence[Addressed], replies: Iterable[Message], partition_of: PartitionOf) -> list[Message]:
    """Match ``replies`` to the messages they answer and put them in partition order.

    Replies that answer none of ``sent``, and all but the first reply to a message, are dropped. An error that the
    SuperLink made gets the node it concerns as its source. The partition a reply declares is taken only for a node
    that ``partition_of`` does not know. Several replies of one partition follow each other in the order their messages
    were sent, and so do those without a partition, at the end.
    """
    # A message to an unknown node has the empty id.
    position = {message_id: index for index, (message_id, _) in enumerate(sent) if message_id}
    first: dict[int, Message] = {}
    for reply in replies:
        index = position.get(reply.metadata.reply_to_message_id)
        if index is None or index in first:
            continue
        if reply.metadata.src_node_id == SUPERLINK_NODE_ID:
            set_source(reply, sent[index][1])
        first[index] = reply

    def place(index: int) -> tuple[bool, int, int]:
        partition = partition_of(sent[index][1])
        if partition is None:
            partition = take_node(first[index])
        return partition is None, partition or 0, index

    # Sums of floats depend on the order of their terms: in partition order a run gives the same bits on every engine.
    return [first[index] for index in sorted(first, key=place)]


class _Look(threading.Thread):
    """One poll for replies, which may take minutes.

    In one call Flower fetches all replies that it finds, one after the other. If a node was cut off while sending, the
    call waits for the rest until the SuperLink gives up three minutes later (read in Flower's source, and measured).
    There is one poll at a time: the SuperLink answers a second poll for the same replies with an error (read; rounds
    lost replies this way).
    """

    def __init__(self, grid: Grid, missing: Collection[str]) -> None:
        super().__init__(name="fedcomp-look", daemon=True)
        self._grid, self._missing = grid, set(missing)
        self._found: list[Message] = []
        self._error: BaseException | None = None
        self._abandoned = False
        self.start()

    def run(self) -> None:
        try:
            self._found = list(self._grid.pull_messages(self._missing))
        # All of them: whoever waits raises it.
        except BaseException as error:
            self._error = error
            if self._abandoned:
                log.warning("fetching a late reply failed: %s", error)

    def replies(self) -> list[Message]:
        """Return the result of a finished poll, or raise its exception."""
        if self._error is not None:
            raise self._error
        return self._found

    def abandon(self) -> None:
        """Stop waiting for it."""
        self._abandoned = True


def poll(
    grid: Grid,
    missing: set[str],
    timeout: float | None,
    enough: Enough | None = None,
    *,
    seconds: float = POLL_SECONDS,
    arrive: Callable[[Message], None] | None = None,
    final: bool = False,
) -> list[Message]:
    """Look for replies until none of ``missing`` is left, ``timeout`` real seconds are over, or it is enough.

    Parameters
    ----------
    missing : set of str
        Ids of messages.
    seconds : float
        Between two looks.
    arrive : callable, optional
        Is shown each reply when it is found.
    final : bool
        Nobody asks for these replies again: one that has begun to arrive and is not whole in time is given up. Else it
        is waited for, as Flower does.
    """
    end = None if timeout is None else time.monotonic() + timeout
    replies: list[Message] = []
    while missing:
        look = _Look(grid, missing)
        # However short the timeout, there is one look.
        patience = None if end is None or not final else max(0.0, end - time.monotonic()) + GRACE_SECONDS
        look.join(patience)
        if look.is_alive():
            look.abandon()
            log.warning("a reply was cut off or is late: it and the replies behind it are dropped")
            break
        found = look.replies()
        if arrive is not None:
            for reply in found:
                arrive(reply)
        replies.extend(found)
        missing = missing - {reply.metadata.reply_to_message_id for reply in found}
        if not missing or (end is not None and time.monotonic() >= end):
            break
        # Nothing new, nothing to ask: ``enough`` may be costly.
        if enough is not None and found and enough(replies):
            break
        time.sleep(seconds)
    return replies


def partition_lookup(grid: Grid) -> PartitionOf:
    """Return the function by which ``grid`` knows a node's partition; one that knows none when it does not."""
    known = getattr(grid, "partition_of", None)
    return cast(PartitionOf, known) if callable(known) else lambda _node_id: None


def engine_lookup(grid: Grid) -> PartitionOf:
    """Return what the engine itself knows, without what a meter around it believes of the nodes' claims."""
    while isinstance(grid, MeteredGrid):
        grid = grid.inner
    return partition_lookup(grid)


_REMEMBERED: Final = 10_000
"""Number of unanswered messages that are remembered for late replies."""


@dataclass(frozen=True, slots=True)
class SentRecord:
    """What the ledger needs of a message when its reply comes, perhaps rounds later."""

    node_id: int
    round: int
    message_type: str
    secret: bool = False


class Meter(Stateful):
    """What crossed an engine's links, and which partition each node is known by.

    Parameters
    ----------
    engine : Grid
    ledger : TrafficLedger

    Attributes
    ----------
    sent : dict of str to SentRecord
        By message id: the messages whose replies have not come.
    partitions : dict of int to int
        By node id: the partition the engine last gave for it, or the first one it declared.
    """

    STATE: ClassVar[Mapping[str, Any]] = {"sent": dict[str, SentRecord], "partitions": dict[int, int]}

    def __init__(self, engine: Grid, ledger: TrafficLedger) -> None:
        self._engine = engine
        # Looked up once: with ten thousand nodes listed it is asked some sixty thousand times a round.
        self._known = partition_lookup(engine)
        self.ledger = ledger
        self.sent: dict[str, SentRecord] = {}
        self.partitions: dict[int, int] = {}

    def partition_of(self, node_id: int) -> int | None:
        """Return the partition of a node: from the engine if it knows, else as it was last known or first declared."""
        known = self._known(node_id)
        return self.partitions.get(node_id) if known is None else known

    def release(self, node_id: int) -> None:
        """Forget which partition a node that is lost was known by, until it says so again: another may hold it now."""
        self.partitions.pop(node_id, None)

    def name_of(self, node_id: int) -> int:
        """Return what a node's rows are under: its partition, its own id while that is not known."""
        partition = self.partition_of(node_id)
        return node_id if partition is None else partition

    def count_down(
        self, batch: Sequence[Message], sizes: list[int] | None, accepted: set[str], round: int | None
    ) -> None:
        """Record the messages whose ids are in ``accepted``; engines name also those they then refuse."""
        # So that the ledger's rows repeat, whatever the ids were drawn as.
        order = sorted(range(len(batch)), key=lambda index: self.place(batch[index].metadata.dst_node_id))
        for index in order:
            message = batch[index]
            meta = message.metadata
            if not meta.message_id or meta.message_id not in accepted:
                continue
            declared = round if round is not None else round_of(message)
            sent = SentRecord(meta.dst_node_id, declared or 0, meta.message_type, is_secret(message.content))
            self.sent[meta.message_id] = sent
            # Kept, for replies that come when the engine has forgotten the node.
            self._learn(sent.node_id, self._known(sent.node_id))
            wire = cast(Any, self._engine).wire_bytes(message) if sizes is None else sizes[index]
            self._record(sent, "down", message, wire)
        # The oldest first, in order of insertion; never one of this batch, however large it is.
        for message_id in list(self.sent)[: max(0, len(self.sent) - len(batch) - _REMEMBERED)]:
            del self.sent[message_id]

    def count_up(self, replies: Sequence[Message]) -> None:
        """Record replies that crossed a node's link, each once, and take over what they say of their nodes."""
        order = {message_id: index for index, message_id in enumerate(self.sent)}
        arrived: dict[str, tuple[int, SentRecord, Message]] = {}
        for reply in replies:
            meta = reply.metadata
            sent = self.sent.get(meta.reply_to_message_id)
            if sent is not None and meta.src_node_id != SUPERLINK_NODE_ID:
                # By the reply's own id: an engine may show one reply twice, while a client that ran twice made two.
                arrived.setdefault(meta.message_id, (order[meta.reply_to_message_id], sent, reply))
        # First in the order the messages were sent, then in partition order: nothing depends on the order of arrival.
        in_order = sorted(arrived.values(), key=lambda item: item[0])
        self._believe((sent, take_node(reply)) for _, sent, reply in in_order)
        in_order.sort(key=lambda item: self.place(item[1].node_id))
        # The in-process engine knows what it has shipped, so nothing is serialised for the count alone.
        weigh = getattr(self._engine, "wire_bytes", None) or weigher()
        for _, sent, reply in in_order:
            self._record(sent, "up", reply, weigh(reply))
        # Only now, or the second of two replies to one message would not be counted.
        for reply in replies:
            self.sent.pop(reply.metadata.reply_to_message_id, None)

    def _believe(self, claims: Iterable[tuple[SentRecord, int | None]]) -> None:
        """Accept the partitions that nodes claim, unless the engine knows better or another online node holds them.

        Replies of a secret round are not logged, because the lines would reveal which clients were drawn.
        """
        lookup = self._known
        holders: dict[int | None, int] = {}
        for sent, claim in claims:
            node_id = sent.node_id
            partition = lookup(node_id)
            if partition is None and claim is not None and node_id not in self.partitions:
                # Asked once, and only when there is a new claim: on a deployment it is a request.
                holders = holders or {self.partition_of(n): n for n in self._engine.get_node_ids()}
                # Of several new claims to a partition the first in the order of sending is believed.
                holder = holders.setdefault(claim, node_id)
                if holder != node_id:
                    if not sent.secret:
                        text = "node %d claims partition %d, which node %d holds: ignored"
                        log.warning(text, node_id, claim, holder)
                    continue
                partition = claim
            self._learn(node_id, partition)

    def _learn(self, node_id: int, partition: int | None) -> None:
        if partition is not None and self.partitions.get(node_id) != partition:
            self.partitions[node_id] = partition
            self.ledger.identify(node_id, partition)

    def place(self, node_id: int) -> tuple[bool, int]:
        """Sort key of a node: its partition, unknown ones last."""
        partition = self.partition_of(node_id)
        return partition is None, partition or 0

    def _record(self, sent: SentRecord, direction: Direction, message: Message, wire: int) -> None:
        node = self.name_of(sent.node_id)
        self.ledger.record(sent.round, node, direction, sent.message_type, "hub", payload_bytes(message), wire)


class MeteredGrid(GridWrapper):
    """Count every message to and from ``inner``, in both directions.

    Parameters
    ----------
    inner : Grid
        Any engine.
    ledger : TrafficLedger, optional
        The ledger for the rows; a new one by default.
    poll_seconds : float
        Seconds between two polls for replies on an engine that runs in other processes.

    Attributes
    ----------
    meter : Meter
    round : int or None
        Server round of the next messages; set by the driver. If None, a message's own ``server-round`` is used, or 0.

    Notes
    -----
    A message counts when it is pushed, whether or not its node is online; one to an unknown node does not.
    A reply counts when it is pulled, in the round of its request; a duplicate that arrived counts too, although it is
    not returned, while the same reply seen twice counts once. Errors made by a SuperLink never crossed a node's link
    and are not counted.

    If the engine does not know a node's partition, the first one that the node declares is final. A declaration is
    refused while another online node holds that partition; the node is then counted under its node id.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.flower.grid import InProcessGrid
    >>> with InProcessGrid(ClientApp(), 4) as inner:
    ...     grid = MeteredGrid(inner)
    ...     grid.ledger.total("wire")
    0
    """

    def __init__(self, inner: Grid, ledger: TrafficLedger | None = None, poll_seconds: float = POLL_SECONDS) -> None:
        super().__init__(inner)
        self.poll_seconds = poll_seconds
        self.meter = Meter(inner, TrafficLedger() if ledger is None else ledger)
        self._round: int | None = None
        # Weak: a time goes when its message does, or a long run would keep all its messages alive.
        self._arrivals: WeakKeyDictionary[Message, float] = WeakKeyDictionary()

    @property
    def ledger(self) -> TrafficLedger:
        """Where the rows go."""
        return self.meter.ledger

    @ledger.setter
    def ledger(self, value: TrafficLedger) -> None:
        self.meter.ledger = value

    @property
    def round(self) -> int | None:
        """Server round of the next messages."""
        return self._round

    @round.setter
    def round(self, value: int | None) -> None:
        self._round = value
        if hasattr(self.inner, "round"):
            self.inner.round = value

    def partition_of(self, node_id: int) -> int | None:
        """Return the partition of a node: from the engine if it knows, else as it was last known or first declared."""
        return self.meter.partition_of(node_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are online, in partition order as far as it is known."""
        return sorted(self.inner.get_node_ids(), key=lambda node_id: (*self.meter.place(node_id), node_id))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Push ``messages`` and count those that were pushed; return one id per message, ``""`` for the others.

        Raises
        ------
        ConfigError
            When ``messages`` is a generator.
        """
        batch = as_batch(messages)
        sizes = self._weighed(batch)
        self.meter.count_down(batch, sizes, set(push(self.inner, batch)), self._round)
        return [message.metadata.message_id for message in batch]

    def pull_messages(  # type: ignore[override]  # as Flower 1.43 has it; earlier ones name the first otherwise
        self, reply_to_message_ids: Iterable[str] | None = None, *, message_ids: Iterable[str] | None = None
    ) -> list[Message]:
        """Return the replies that have arrived, each counted, in partition order and without duplicates.

        Replies to messages that were not pushed through this meter, or were answered before, follow at the end,
        uncounted. Arguments as for :func:`~fedcomp.flower.wrapper.awaited_ids`.
        """
        wanted = awaited_ids(reply_to_message_ids, message_ids)
        replies = list(cast(Any, self.inner).pull_messages(wanted))
        ids = list(self.meter.sent) if wanted is None else wanted
        # Before count_up(), which forgets what was answered.
        sent = [(i, self.meter.sent[i].node_id) for i in ids if i in self.meter.sent]
        self.meter.count_up(replies)
        ours = {message_id for message_id, _ in sent}
        others = [reply for reply in replies if reply.metadata.reply_to_message_id not in ours]
        return join(sent, replies, self.partition_of) + others

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None, enough: Enough | None = None
    ) -> list[Message]:
        """Send ``messages`` and return at most one reply for each, in partition order; see :func:`join`.

        Once ``enough`` returns true for the replies so far, waiting ends; later ones are neither pulled nor counted.

        Raises
        ------
        ConfigError
            When ``messages`` is a generator.
        """
        batch = as_batch(messages)
        if not batch:
            return []
        if hasattr(self.inner, "wire_bytes"):
            # The in-process engine keeps simulated time and must see the timeout.
            early = {} if enough is None else {"enough": enough}
            replies = list(self.inner.send_and_receive(batch, timeout=timeout, **early))
            # After the exchange: before it the messages have no ids, and the engine no sizes.
            self.meter.count_down(batch, None, {m.metadata.message_id for m in batch}, self._round)
        else:
            sizes = self._weighed(batch)
            ids = set(push(self.inner, batch))
            self.meter.count_down(batch, sizes, ids, self._round)
            replies = self._poll(ids, timeout, enough, final=True)
        self.meter.count_up(replies)
        return join(addressed(batch), replies, self.partition_of)

    def receive(
        self, message_ids: Collection[str], *, timeout: float | None = None, enough: Enough | None = None
    ) -> list[Message]:
        """Wait for replies to messages pushed earlier; return those that arrived, each counted."""
        if hasattr(self.inner, "receive"):
            replies = list(self.inner.receive(message_ids, timeout=timeout, enough=enough))
        else:
            replies = self._poll(set(message_ids), timeout, enough)
        self.meter.count_up(replies)
        return replies

    def arrived(self, reply: Message) -> float:
        """Return the arrival time of a reply in seconds, on the engine's clock."""
        if hasattr(self.inner, "arrived"):
            return float(self.inner.arrived(reply))
        return self._arrivals.get(reply, time.monotonic())

    def _poll(
        self,
        missing: set[str],
        timeout: float | None,
        enough: Enough | None,
        *,
        final: bool = False,
    ) -> list[Message]:
        def arrive(reply: Message) -> None:
            self._arrivals[reply] = time.monotonic()

        return poll(self.inner, missing, timeout, enough, seconds=self.poll_seconds, arrive=arrive, final=final)

    def record_peer(self, round: int, node_id: int, message_type: str, payload: int, wire: int) -> None:
        """Count bytes that one client sent to another without the server, as the clients report them.

        Parameters
        ----------
        round : int
            Server round they belong to.
        node_id : int
            The sender, which is what the row counts for (link "peer", direction "up").
        message_type : str
            Of the message in whose answer they were reported, e.g. ``train``.
        payload, wire : int
            Bytes of the bodies, and of everything given to the transport, as reported by the sender or by receivers of
            the parcels.

        Raises
        ------
        ConfigError
            For negative numbers.
        """
        self.ledger.record(round, self.meter.name_of(node_id), "up", message_type, "peer", payload, wire)

    def dump(self) -> dict[str, Any]:
        """Return what :meth:`snapshot` stores, as plain data.

        Raises
        ------
        StateError
            When the inner grid cannot be stored (Ray and deployments keep client state themselves).
        """
        if not hasattr(self.inner, "dump"):
            raise StateError(f"{type(self.inner).__name__} has no snapshot(); only the in-process engine can resume")
        return {"inner": self.inner.dump(), "meter": self.meter.state_dict()}

    def snapshot(self) -> bytes:
        """Return the meter's state and the inner grid's as bytes; the ledger is stored separately.

        Raises
        ------
        StateError
            As :meth:`dump`.
        """
        return store.dumps(self.dump(), "meter snapshot")

    def restore(self, data: bytes | Mapping[str, Any]) -> None:
        """Continue from :meth:`snapshot`'s bytes, or from what was read of :meth:`dump`'s data.

        Raises
        ------
        fedcomp.flower.store.StoreError
            When the bytes are damaged.
        """
        state = store.loads(data, "meter snapshot") if isinstance(data, bytes) else data
        with store.reading("meter snapshot"):
            cast(Any, self.inner).restore(state["inner"])
            self.meter.load_state_dict(state["meter"])

    def _weighed(self, batch: Sequence[Message]) -> list[int] | None:
        """Weigh ``batch`` before it leaves, unless the engine weighs messages itself.

        Ray's threads pickle the very same objects once they are pushed; weighing fills caches inside them.
        """
        if hasattr(self.inner, "wire_bytes"):
            return None
        return list(map(weigher(), batch))
