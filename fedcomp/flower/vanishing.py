"""The in-process engine with devices that vanish inside a round, by the clock and by the bytes they really send.

:mod:`fedcomp.timing.dropout` says when a device can be reached and how long bytes take; this grid lets the messages of
a run live or die by it. A device that is away when a message comes does not get it; a reply that does not get through
in time, or before its sender leaves, is lost although the client has run. What clients send each other is none of the
grid's messages: a hook follows them and says when a client was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from flwr.app import Message

from fedcomp.asks import HELLO
from fedcomp.flower import store
from fedcomp.flower._private import Packer
from fedcomp.flower.asks import find_ask
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.nodes import GridError
from fedcomp.flower.wrapper import Enough, GridWrapper
from fedcomp.plain import Count, from_plain, to_plain
from fedcomp.rules import NotNegative
from fedcomp.timing.dropout import NEVER, Compute, Failures, Situation
from fedcomp.timing.links import Link

Trained = Mapping[int, tuple[float, Message]]
"""By client: when it has trained, and the message it was asked with."""

Shared = Callable[[Situation, Trained], Mapping[int, float]]
"""From the situation and who trained to when each has sent its peers everything, infinity if it never has. Called when
all clients of an exchange have run: what would not have reached a peer is to be taken away there and then."""

_SNAPSHOT: Final = "vanishing grid snapshot"


@dataclass
class RoundTrace:
    """What became of the messages of one round.

    Attributes
    ----------
    seconds : float
        How long the round lasted.
    last : float
        When the last reply came that the server got.
    trained, answered : set of int
        Clients that ran the training message, and those whose reply to it got through.
    spent : dict of str to float
        By message type, bytes of replies that left clients and came to nothing.
    """

    seconds: float = 0.0
    last: float = 0.0
    trained: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    spent: dict[str, float] = field(default_factory=dict)


class VanishingGrid(GridWrapper):
    """Passes on what gets through.

    Parameters
    ----------
    inner : InProcessGrid
        Without links, compute time and faults of its own.
    failures : callable
        From round and partition to when the device can be reached.
    compute : Compute
    server, peer : Link
        Every device's links, to the server and to each other.
    deadlines : tuple of two floats
        Seconds from a round's beginning until shards no longer land, and until the server takes nothing more.
    chunk : int
        Bytes of a reply that survive when its sender leaves and comes back; 0: a reply restarts.
    shared : callable, optional
        Follows what clients send each other.

    Attributes
    ----------
    clock : float
        Simulated seconds of all rounds so far.
    log : dict of int to RoundTrace

    Notes
    -----
    An exchange ends with its last reply, or at its timeout when one is missing; without a timeout, at the round's end.
    """

    def __init__(
        self,
        inner: InProcessGrid,
        failures: Failures,
        compute: Compute,
        *,
        server: Link,
        peer: Link,
        deadlines: tuple[float, float],
        chunk: int = 0,
        shared: Shared | None = None,
    ) -> None:
        super().__init__(inner)
        self._devices = inner
        # Round 0 holds what is exchanged before a driver sets the first one.
        self.log: dict[int, RoundTrace] = {0: RoundTrace()}
        self._failures = failures
        self._compute = compute
        self._server = server
        self._peer = peer
        self._deadlines = deadlines
        self._chunk = chunk
        self._shared = shared
        self._round = 0
        self._before = 0.0
        self._now = 0.0
        self._situation = self._begin()

    @property
    def clock(self) -> float:
        """Simulated seconds since the first round began."""
        return self._before + self._now

    @property
    def round(self) -> int:
        """The current round; setting it begins one."""
        return self._round

    @round.setter
    def round(self, value: int | None) -> None:
        self._devices.round = value
        if value is None:
            # The round is over, and no other one begins.
            return
        # The clock is read before the round's own seconds return to 0.
        self._before, self._now = self.clock, 0.0
        self._round = value
        self.log[value] = RoundTrace()
        self._situation = self._begin()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None, enough: Enough | None = None
    ) -> list[Message]:
        """Send ``messages`` and return the replies that got through before ``timeout``, or until there are
        ``enough``."""
        batch = list(messages)
        if all(map(_sets_up, batch)):
            return self._devices.send_and_receive(batch)
        self._meet()
        limit = self._situation.end if timeout is None else min(self._situation.end, self._now + timeout)
        begins = self._arrivals(batch, limit)
        taken = [message for message in batch if message.metadata.dst_node_id in begins]
        # Clients run here and now, whatever the clock says; what would not have come in time is dropped below.
        replies = self._devices.send_and_receive(taken) if taken else []
        starts = self._starts(taken, replies, begins)
        arrived: list[tuple[float, int, Message]] = []
        for client, (start, reply) in starts.items():
            at = self._travel(reply, client, start, limit)
            if at <= limit:
                arrived.append((at, client, reply))
        # Without the message, which cannot be compared: two that arrive together stand in the clients' order.
        arrived.sort(key=lambda item: item[:2])
        come: list[Message] = []
        for at, _, reply in arrived:
            come.append(reply)
            self.log[self._round].last = at
            if enough is not None and enough(come):
                self._advance(at)
                return come
        # One that is missing is waited for to the end: the server cannot know that it will not come.
        complete = len(come) == len(batch)
        self._advance(max((at for at, _, _ in arrived), default=self._now) if complete else limit)
        return come

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refused: what gets through depends on how long the server waits.

        Raises
        ------
        GridError
            Always.
        """
        raise GridError("devices vanish in whole exchanges only; use send_and_receive, or the grid inside this one")

    def dump(self) -> dict[str, Any]:
        """Return what :meth:`snapshot` stores, as plain data."""
        return {
            "inner": self._devices.dump(),
            "round": self._round,
            "before": self._before,
            "now": self._now,
            "log": to_plain(self.log),
        }

    def snapshot(self) -> bytes:
        """Return everything that changes during a run: the inner grid's snapshot, the clock, the round and the log."""
        return store.dumps(self.dump(), _SNAPSHOT)

    def restore(self, data: bytes | Mapping[str, Any]) -> None:
        """Continue from :meth:`snapshot`'s bytes, or from what was read of :meth:`dump`'s data.

        Failures, compute times, links and deadlines stay those of this grid.

        Raises
        ------
        fedcomp.flower.store.StoreError
            When the bytes are damaged, or those of another grid.
        GridError
            When the inner grid refuses its part.
        """
        state = store.loads(data, _SNAPSHOT) if isinstance(data, bytes) else data
        with store.reading(_SNAPSHOT):
            # Read before anything is changed.
            current = from_plain(Count, state["round"], "round")
            before, now = (from_plain(NotNegative, state[name], name) for name in ("before", "now"))
            log = from_plain(dict[int, RoundTrace], state["log"], "log")
            self._devices.restore(state["inner"])
        self._devices.round = self._round = current
        self._before, self._now, self.log = before, now, log
        self._situation = self._begin()

    def _begin(self) -> Situation:
        """Return the current round: when each client is present. The time at which a client is ready is known after its
        training."""
        # By partition id, which indexes the list: one that has left keeps its place.
        presence = [
            self._failures(self._round, client) for client in range(max(self._devices.partitions, default=-1) + 1)
        ]
        return Situation(presence, [NEVER] * len(presence), self._server, self._peer, *self._deadlines)

    def _meet(self) -> None:
        """Ask the failure model about nodes that have joined since the round began."""
        met = len(self._situation.presence)
        if max(self._devices.partitions, default=-1) >= met:
            whole = self._begin()
            # What the round began with is kept as it is: the shards that were followed refer to it.
            presence = [*self._situation.presence, *whole.presence[met:]]
            self._situation = replace(whole, presence=presence)

    def _arrivals(self, batch: Sequence[Message], limit: float) -> dict[int, float]:
        """Return the arrival time of each message that reaches its node in time."""
        packer = Packer()
        begins: dict[int, float] = {}
        for message in batch:
            client = self._devices.partition_of(message.metadata.dst_node_id)
            if client is None:
                continue
            # Bandwidth alone: the device has to stay for the transfer, and the latency is added once at its end.
            seconds = 8.0 * packer.pack(message).wire / self._server.down_bits_per_s
            there = self._situation.presence[client].whole(self._now, seconds) + self._server.latency_s
            if there < limit:
                begins[message.metadata.dst_node_id] = there
        return begins

    def _starts(
        self, taken: Sequence[Message], replies: Sequence[Message], begins: Mapping[int, float]
    ) -> dict[int, tuple[float, Message]]:
        """Return by client its reply and the time at which it starts to send."""
        asked = {message.metadata.message_id: message for message in taken}
        starts: dict[int, tuple[float, Message]] = {}
        trained: dict[int, tuple[float, Message]] = {}
        for reply in replies:
            message = asked[reply.metadata.reply_to_message_id]
            node = message.metadata.dst_node_id
            client = cast(int, self._devices.partition_of(node))
            # Anything but training takes no time on the device.
            starts[client] = begins[node], reply
            if _trains(message):
                trained[client] = begins[node] + self._compute(self._round, client), message
        self.log[self._round].trained |= set(trained)
        done = {client: at for client, (at, _) in trained.items()}
        if self._shared is not None and trained:
            # Replaces the time of training: a client replies when it has sent its peers everything.
            done |= self._shared(self._situation, trained)
        return starts | {client: (at, starts[client][1]) for client, at in done.items()}

    def _travel(self, reply: Message, client: int, start: float, limit: float) -> float:
        """Return the time at which ``reply`` is at the server. For a late or lost reply, the part that left the sender
        is recorded."""
        log, kind, size = self.log[self._round], reply.metadata.message_type, self._devices.wire_bytes(reply)
        at = self._situation.upload(client, start, size, self._chunk)
        if at > limit:
            # Bytes that crossed a link for nothing are part of what a scheme costs.
            log.spent[kind] = log.spent.get(kind, 0.0) + self._situation.spent(client, start, size, limit)
            return NEVER
        if _trains(reply):
            log.answered.add(client)
        return at

    def _advance(self, to: float) -> None:
        self._now = max(self._now, to)
        self.log[self._round].seconds = self._now


def _sets_up(message: Message) -> bool:
    """Whether a message ignores absence and takes no time: the roll call and the hello, once per run."""
    kind = message.metadata.message_type
    return kind == HELLO or (kind == "query" and find_ask(message.content) is None)


def _trains(message: Message) -> bool:
    return message.metadata.message_type.partition(".")[0] == "train"
