"""An engine in one process: no server, no Ray, no sockets, and still everything is really serialised.

:class:`InProcessGrid` runs a ClientApp for each message inside the caller's own thread. Messages and client states
pass through Flower's own serialisation both ways, so that a client never sees an object of the server's, byte counts
are those of a deployment, and what works here works there. Faults are injected per message, replies are shuffled to
expose code that depends on their order, and a virtual clock turns byte counts into seconds. Nothing ever sleeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast
from weakref import WeakKeyDictionary

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from fedcomp.errors import ConfigError
from fedcomp.flower import ledger, store
from fedcomp.flower._private import (
    SUPERLINK_NODE_ID,
    ErrorCode,
    IdentityClaim,
    Packed,
    Packer,
    Run,
    Unpacker,
    acting_as,
    claim_identity,
    error_from_superlink,
    release_identity,
    set_message_id,
    unpack,
)
from fedcomp.flower.faults import NO_FAULT, Delivery, Fault, FaultPlan, corrupt, resolve
from fedcomp.flower.nodes import GridError, GridNodes, Links, Node, NodeConfig, NodeLinks
from fedcomp.flower.payload import round_of
from fedcomp.logs import log
from fedcomp.rng import Key

ClientCall = Callable[[Message, Context], Message]
"""A ClientApp, or anything that is called like one."""

Compute = float | Callable[[Delivery], float]

_SNAPSHOT: Final = "grid snapshot"


@dataclass(frozen=True, slots=True)
class _Reply:
    """A reply on its way: pullable from that push count on, there at that simulated second."""

    packed: Packed
    available: int
    arrival: float


@dataclass(slots=True)
class _Flight:
    """A message that was pushed and the replies to it that were not pulled yet; none if it was lost."""

    pushed: int
    replies: list[_Reply]


class InProcessGrid(Grid):
    """Runs clients in this process behind Flower's Grid interface.

    Parameters
    ----------
    client_app : ClientApp
        The app under test, or any callable ``(Message, Context) -> Message``.
    num_nodes : int
        Nodes with partition ids 0 to ``num_nodes - 1``.
    run_config : mapping, optional
        What clients find in ``context.run_config``.
    seed : int
        Seeds node ids (62 bits on purpose: a float cast would damage them), reply order and corruption.
    fault : FaultPlan, optional
        Decides per message what goes wrong; see :mod:`fedcomp.flower.faults`.
    shuffle_replies : bool
        Return replies in a seeded random order; False returns them in the order of the messages.
    error_state : {"discard", "keep"}
        State after an exception in the app. The simulation engine throws the changes away, a deployment keeps the
        half-done ones (measured); an app has to be right under both.
    links : Link, sequence or mapping by partition id, optional
        Bandwidth and latency per node. A sequence has one for every partition, more for nodes that join later; nodes
        that a mapping leaves out have no link. Without a link transfers take no time. The server's side is not a
        bottleneck.
    compute_seconds : float or callable of a Delivery
        Simulated seconds a client computes per message.
    node_config : mapping or callable of a partition id, optional
        Added to each node's ``partition-id`` and ``num-partitions``.
    expiry : int
        Pushes after which a reply nobody pulled is dropped, as a SuperLink drops it when its time to live is over.

    Attributes
    ----------
    clock : float
        Simulated seconds since the start. An exchange lasts as long as its slowest node: latency, download, compute,
        upload, latency. A node works on one message at a time.
    exchange : int
        Batches pushed so far.
    round : int or None
        Server round, set by the driver; used for fault plans. When None, a message's own ``server-round`` counts.

    Notes
    -----
    Creating a grid sets Flower's process identity, which ``Message()`` needs; :meth:`close` (or leaving the ``with``
    block) restores the former one. Of several grids the one created last has it, and they may be closed in any order.
    A message to an unknown node gets the id ``""`` in its slot and no reply. Two
    messages to one node in one batch run one after the other, each on the state the former left; on Ray they would
    race. Not thread-safe.
    """

    def __init__(
        self,
        client_app: ClientCall,
        num_nodes: int,
        run_config: Mapping[str, bool | int | float | str] | None = None,
        seed: int = 0,
        fault: FaultPlan | None = None,
        shuffle_replies: bool = True,
        error_state: Literal["discard", "keep"] = "discard",
        links: Links = None,
        compute_seconds: Compute = 0.0,
        node_config: NodeConfig = None,
        expiry: int = 64,
    ) -> None:
        if error_state not in ("discard", "keep"):
            raise ConfigError(f"error_state is {error_state!r}, expected 'discard' or 'keep'")
        self.client_app = client_app
        self.fault = fault
        self.shuffle_replies = shuffle_replies
        self.error_state = error_state
        self.compute_seconds = compute_seconds
        self.clock = 0.0
        self.exchange = 0
        self.round: int | None = None
        self._seed = seed
        self._key = Key(seed, "grid")
        self._links = NodeLinks(links, num_nodes)
        self._expiry = expiry
        self._pulls = 0
        self._run_id = self._key.at(purpose="run-id").u64() >> 2
        self._nodes = GridNodes(num_nodes, self._run_id, self._key, run_config or {}, node_config)
        self._flight: dict[str, _Flight] = {}
        self._sizes: WeakKeyDictionary[Message, int] = WeakKeyDictionary()
        self._claim: IdentityClaim | None = None
        self._adopt()

    def __enter__(self) -> InProcessGrid:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the process identity back, unless someone else has taken it since."""
        if self._claim is not None:
            release_identity(self._claim)
            self._claim = None

    def _adopt(self) -> None:
        self.close()
        self._claim = claim_identity((self._run_id, SUPERLINK_NODE_ID, 1))

    # Flower's Grid interface.

    def set_run(self, run: Run) -> None:
        """Take over the run id of ``run``; contexts made before keep theirs."""
        self._run_id = self._nodes.run_id = run.run_id
        self._adopt()

    @property
    def run(self) -> Run:
        """The run, of which only the id means something here."""
        return Run.create_empty(self._run_id)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message; kept for Flower's interface, ``Message(...)`` does the same."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes, in partition order."""
        return self._nodes.ids

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send ``messages`` and run their clients; return one message id per message, ``""`` for unknown nodes.

        Raises
        ------
        GridError
            When ``messages`` is a generator: a deployment iterates it twice and would send nothing.
        """
        if not isinstance(messages, Collection):
            raise GridError(
                f"messages is a {type(messages).__name__}; pass a list. A deployment iterates it twice, so a generator "
                "would send an empty batch there"
            )
        if not messages:
            return []
        exchange, self.exchange = self.exchange, self.exchange + 1
        self._expire()
        packer, unpacker = Packer(), Unpacker()
        slots: Counter[int] = Counter()
        ids: list[str] = []
        for message in messages:
            node_id = message.metadata.dst_node_id
            node = self._nodes.get(node_id)
            if node is None:
                log.warning("message to unknown node %d dropped", node_id)
                set_message_id(message, "")
                ids.append("")
                continue
            packed = packer.pack(message)
            set_message_id(message, packed.root)
            self._sizes[message] = packed.wire
            ids.append(packed.root)
            if packed.root in self._flight:
                continue
            server_round = self.round if self.round is not None else round_of(message)
            delivery = Delivery(
                exchange, server_round or 0, node.partition, slots[node_id], message.metadata.message_type
            )
            slots[node_id] += 1
            self._flight[packed.root] = _Flight(exchange, self._deliver(packed, unpacker, node, delivery))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are there for ``message_ids``, each once; the clock moves to the latest of them.

        An id that is unknown, or whose replies were all pulled, yields error reply code 3, as with a SuperLink. An id
        whose reply is late or lost yields nothing.
        """
        return self._collect(message_ids, float("inf"))

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,
        enough: Callable[[Sequence[Message]], bool] | None = None,
    ) -> list[Message]:
        """Push ``messages`` and return the replies that came.

        ``timeout`` is in simulated seconds: slower replies are not returned (they can still be pulled later), and when
        any reply is missing the clock moves on by the whole timeout. Without a timeout a missing reply costs nothing.
        ``enough`` is asked after every reply, in the order of their arrival: when it says so the exchange is over, and
        slower replies are not returned.
        """
        deadline = float("inf") if timeout is None else self.clock + timeout
        ids = self.push_messages(messages)
        satisfied = None if enough is None else self._satisfied(ids, deadline, enough)
        replies = self._collect(ids, deadline if satisfied is None else satisfied)
        if satisfied is None and timeout is not None and any(message_id in self._flight for message_id in ids):
            self.clock = deadline
        return replies

    # What a real engine does not offer.

    def wire_bytes(self, message: Message) -> int:
        """Return what ``message`` weighed when this grid shipped it, without serialising it again."""
        size = self._sizes.get(message)
        return ledger.wire_bytes(message) if size is None else size

    def partition_of(self, node_id: int) -> int | None:
        """Return the partition id of a node, None for an unknown one."""
        node = self._nodes.get(node_id)
        return None if node is None else node.partition

    def node_id_of(self, partition: int) -> int:
        """Return the id of the node that holds ``partition``.

        Raises
        ------
        GridError
            When there is none.
        """
        return self._nodes.find(partition).id

    @property
    def partitions(self) -> list[int]:
        """Partition ids of all nodes, ascending."""
        return self._nodes.partitions

    def context(self, node: int) -> Context:
        """Return a copy of a client's context; ``node`` is a node id or a partition id."""
        return self._nodes.find(node).context()

    def wipe(self, node: int) -> None:
        """Empty a client's state, as a restart of its SuperNode does; ``node`` is a node id or a partition id."""
        self._nodes.wipe(node)

    def add_node(self, partition: int | None = None) -> int:
        """Let a node join with empty state and return its id.

        ``partition`` defaults to the lowest free one. ``num-partitions`` stays what it was at the start, because the
        data were split then. A partition that comes back gets a new node id, as with a SuperNode without keys.

        Raises
        ------
        GridError
            When the partition is taken, or the sequence ``links`` has no entry for it.
        """
        if partition is None:
            partition = self._nodes.free_partition()
        self._links.require([partition])
        return self._nodes.add(partition, self.clock)

    def remove_node(self, node: int) -> None:
        """Let a node leave for good, its state with it; ``node`` is a node id or a partition id."""
        self._nodes.remove(node)

    def snapshot(self) -> bytes:
        """Return everything that changes during a run: contexts, replies on their way, clock and counters."""
        return store.dumps(
            {
                "seed": self._seed,
                "run_id": self._run_id,
                "exchange": self.exchange,
                "pulls": self._pulls,
                "clock": self.clock,
                "nodes": self._nodes.dump(),
                "flight": [
                    [
                        key,
                        flight.pushed,
                        [
                            [r.packed.root, r.packed.contents, r.packed.wire, r.available, r.arrival]
                            for r in flight.replies
                        ],
                    ]
                    for key, flight in self._flight.items()
                ],
            },
            _SNAPSHOT,
        )

    def restore(self, data: bytes) -> None:
        """Continue from :meth:`snapshot`'s bytes; app, faults and links stay those of this grid.

        Raises
        ------
        fedcomp.flower.store.StoreError
            When the bytes are damaged.
        GridError
            When they were taken from a grid with another seed or number of nodes, or the sequence ``links`` is too
            short for its nodes.
        """
        state = store.loads(data, _SNAPSHOT)
        with store.reading(_SNAPSHOT):
            self._restore(state)
        self._adopt()

    def _restore(self, state: Mapping[str, Any]) -> None:
        if state["seed"] != self._seed:
            raise GridError(f"snapshot was taken with seed {state['seed']}, this grid has seed {self._seed}")
        if state["nodes"]["num_partitions"] != self._nodes.num_partitions:
            raise GridError(
                f"snapshot is of a grid that began with {state['nodes']['num_partitions']} nodes, this one with "
                f"{self._nodes.num_partitions}; resume with the number the run was started with"
            )
        self._links.require(partition for _, partition, *_ in state["nodes"]["nodes"])
        self._run_id = self._nodes.run_id = state["run_id"]
        self.exchange, self._pulls, self.clock = state["exchange"], state["pulls"], state["clock"]
        self._nodes.load(state["nodes"])
        self._flight = {
            key: _Flight(
                pushed,
                [
                    _Reply(Packed(root, contents, wire), available, arrival)
                    for root, contents, wire, available, arrival in replies
                ],
            )
            for key, pushed, replies in state["flight"]
        }

    # The way of one message.

    def _deliver(self, packed: Packed, unpacker: Unpacker, node: Node, delivery: Delivery) -> list[_Reply]:
        """Run the client and return the replies on their way, subject to the fault plan."""
        fault = resolve(self.fault(delivery)) if self.fault is not None else NO_FAULT
        if fault.kind == "silent":
            return []
        available = self.exchange + (fault.pushes if fault.kind == "late" else 0)
        if fault.kind == "offline":
            reason = "The node is offline (injected fault)."
            refusal = error_from_superlink(
                self._run_id, packed.root, ErrorCode.NODE_UNAVAILABLE, reason, unpack(packed).metadata
            )
            return [_Reply(Packer().pack(refusal), available, self.clock)]
        runs = 2 if fault.kind == "duplicate" else 1
        replies = [self._run_client(packed, unpacker, node, delivery, fault, available) for _ in range(runs)]
        if fault.kind == "lost_reply":
            return []
        return replies * 2 if fault.kind == "duplicate_reply" else replies

    def _run_client(
        self, packed: Packed, unpacker: Unpacker, node: Node, delivery: Delivery, fault: Fault, available: int
    ) -> _Reply:
        """Execute one message on a copy of the node's context and commit or discard that copy."""
        work = node.context()
        run_config = dict(work.run_config)
        message = unpacker.unpack(packed)
        failure: tuple[int, str] | None = None
        with acting_as(self._run_id, node.id):
            try:
                out = self.client_app(message, work)
                self._check_reply(out, packed)
                reply = Packer().pack(out)
                if fault.kind == "raise":
                    failure = ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "The app raised at its end (injected fault)."
            except SystemExit as error:
                # A deployment's app process would be gone without a reply and without a context to store. Only an
                # interrupt is for the run itself.
                log.warning("client of partition %d ended its process (%s)", node.partition, error.code, exc_info=True)
                failure = ErrorCode.CLIENT_APP_CRASHED, "ClientApp stopped responding."
            except Exception as error:
                # Engines turn whatever an app raises into an error reply; the traceback would be lost without the log.
                log.warning("client of partition %d raised", node.partition, exc_info=True)
                failure = ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>"
        if failure is None and work.run_config != run_config:
            failure = ErrorCode.UNKNOWN, "The app changed context.run_config; the simulation engine refuses that."
        half_done = failure is not None and failure[0] == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        if failure is None or (half_done and self.error_state == "keep"):
            node.commit(work)
        if failure is not None:
            # unpack() again: the app may have changed its own copy of the message.
            reply = Packer().pack(Message(Error(*failure), reply_to=unpack(packed)))
        if fault.kind == "corrupt":
            damaged = unpack(reply)
            key = self._key.at(
                purpose="corrupt", round=delivery.exchange, partition=delivery.partition, layer=delivery.slot
            )
            corrupt(damaged, key)
            reply = Packer().pack(damaged)
        node.free_at = self._arrival(packed.wire, reply.wire, node, delivery)
        return _Reply(reply, available, node.free_at)

    def _check_reply(self, out: object, packed: Packed) -> None:
        if not isinstance(out, Message):
            raise GridError(f"the app returned a {type(out).__name__}, expected a Message")
        if out.metadata.reply_to_message_id != packed.root:
            raise GridError("the reply does not answer the message; create it with Message(..., reply_to=message)")

    def _arrival(self, down: int, up: int, node: Node, delivery: Delivery) -> float:
        """Return the simulated second at which the reply is back."""
        seconds = self.compute_seconds(delivery) if callable(self.compute_seconds) else self.compute_seconds
        link = self._links.of(node.partition)
        if link is not None:
            seconds += link.down_seconds(down) + link.up_seconds(up)
        return max(self.clock, node.free_at) + seconds

    def _collect(self, message_ids: Iterable[str], deadline: float) -> list[Message]:
        replies: list[Message] = []
        for message_id in dict.fromkeys(message_ids):
            if not message_id:
                continue
            flight = self._flight.get(message_id)
            if flight is None:
                reason = "The message is unknown or its reply was already pulled."
                replies.append(error_from_superlink(self._run_id, message_id, ErrorCode.MESSAGE_UNAVAILABLE, reason))
                continue
            left = []
            for reply in flight.replies:
                if reply.available > self.exchange or reply.arrival > deadline:
                    left.append(reply)
                    continue
                message = unpack(reply.packed)
                self._sizes[message] = reply.packed.wire
                replies.append(message)
                self.clock = max(self.clock, reply.arrival)
            if left or not flight.replies:
                flight.replies = left
            else:
                del self._flight[message_id]
        self._pulls += 1
        if self.shuffle_replies and len(replies) > 1:
            words = self._key.at(purpose="reply-order", round=self._pulls).bits(len(replies))
            replies = [replies[i] for i in np.argsort(words, kind="stable")]
        return replies

    def _satisfied(
        self, message_ids: Iterable[str], deadline: float, enough: Callable[[Sequence[Message]], bool]
    ) -> float | None:
        """Return the simulated second of the first reply with which there are ``enough``; None when that never is."""
        flights = [self._flight[message_id] for message_id in dict.fromkeys(message_ids) if message_id in self._flight]
        coming = [reply for flight in flights for reply in flight.replies if reply.available <= self.exchange]
        arrived: list[Message] = []
        for reply in sorted(coming, key=lambda reply: reply.arrival):
            if reply.arrival > deadline:
                break
            arrived.append(unpack(reply.packed))
            if enough(arrived):
                return reply.arrival
        return None

    def _expire(self) -> None:
        """Forget messages whose replies have been there, unpulled, for too long; the oldest come first."""
        for message_id, flight in list(self._flight.items()):
            if max([flight.pushed, *(reply.available for reply in flight.replies)]) + self._expiry >= self.exchange:
                break
            del self._flight[message_id]


def in_process(grid: Grid) -> InProcessGrid | None:
    """Return the in-process grid behind ``grid`` and its wrappers, or None on another engine."""
    while not isinstance(grid, InProcessGrid):
        inner = getattr(grid, "inner", None)
        if inner is None:
            return None
        grid = cast(Grid, inner)
    return grid
