"""The in-process engine: no server, Ray or sockets, but every message is really serialised.

:class:`InProcessGrid` runs a ClientApp for each message inside the caller's own thread. Messages and client states
pass through Flower's own serialisation both ways, so that a client never sees an object of the server's, byte counts
are those of a deployment, and what works here works there. Faults are injected per message, replies are shuffled to
expose code that depends on their order, and a virtual clock turns byte counts into seconds. Nothing ever sleeps.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self, cast
from weakref import WeakKeyDictionary

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.flower import ledger, store
from fedcomp.flower._private import (
    SUPERLINK_NODE_ID,
    ErrorCode,
    IdentityClaim,
    Packer,
    Run,
    Unpacker,
    claim_identity,
    error_from_superlink,
    release_identity,
    require_engine,
    set_message_id,
    unpack,
)
from fedcomp.flower.delivery import ClientCall, ClientRunner, Compute, ErrorState, Flights
from fedcomp.flower.faults import Delivery, FaultPlan
from fedcomp.flower.nodes import GridError, GridNodes, Links, NodeConfig
from fedcomp.flower.payload import round_of
from fedcomp.flower.wrapper import Enough, as_batch, awaited_ids
from fedcomp.logs import log
from fedcomp.rng import Key

_SNAPSHOT: Final = "grid snapshot"

EXPIRY: Final = 64
"""Pushes for which a reply waits to be pulled; a SuperLink keeps it for its time to live."""

_LOOKS: Final = 5
_WAIT_SECONDS: Final = (0.5, 30.0)
"""Waiting is futile after this number of polls of the same nodes, with this interval and without a message in
between."""


class InProcessGrid(GridNodes, Grid):
    """Run clients in this process behind Flower's Grid interface.

    Parameters
    ----------
    client_app : ClientApp
        The app under test, or any callable ``(Message, Context) -> Message``.
    num_nodes : int
        Nodes with partition ids 0 to ``num_nodes - 1``.
    run_config : mapping, optional
        The clients' ``context.run_config``.
    seed : int
        Seeds node ids (62 bits on purpose: a float cast would damage them), reply order and corruption.
    fault : FaultPlan, optional
        Decides per message what goes wrong; see :mod:`fedcomp.flower.faults`.
    shuffle_replies : bool
        Return replies in a seeded random order; False returns them in the order of the messages.
    error_state : {"discard", "keep"}
        State after an exception in the app. Flower's simulation engine discards the changes, a deployment keeps partial
        ones (measured); an app must work correctly under both.
    links : Link, sequence or mapping by partition id, optional
        Bandwidth and latency per node. A sequence has one for every partition, and more for nodes that join later;
        nodes missing from a mapping have no link. Without a link transfers take no time. The server's own bandwidth is
        unlimited.
    compute_seconds : float or callable of a Delivery
        Simulated seconds a client computes per message.
    node_config : mapping or callable of a partition id, optional
        Added to each node's ``partition-id`` and ``num-partitions``.
    states : Path, optional
        An existing folder for the clients' states between messages, one file per client with state, for states that
        together exceed memory. Default: this process's memory. The files are deleted with the grid; a snapshot holds
        all states at once.

    Attributes
    ----------
    clock : float
        Simulated seconds since the start. An exchange lasts as long as its slowest node: latency, download, compute,
        upload, latency. A node works on one message at a time.
    exchange : int
        Batches pushed so far.
    round : int or None
        Server round, set by the driver, for fault plans. If None, a message's own ``server-round`` is used.

    Notes
    -----
    Creating a grid sets Flower's process identity, which ``Message()`` needs; :meth:`close` (or leaving the
    ``with`` block) restores the former one. With several grids the one created last sets it, and they may be closed in
    any order. A message to an unknown node gets the id ``""`` in its slot and no reply. Two messages to one node in one
    batch run one after the other, each on the state that the previous one left; on Ray they would race. Not
    thread-safe.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> with InProcessGrid(ClientApp(), 4) as grid:
    ...     len(list(grid.get_node_ids()))
    4
    """

    def __init__(
        self,
        client_app: ClientCall,
        num_nodes: int,
        run_config: Mapping[str, bool | int | float | str] | None = None,
        seed: int = 0,
        fault: FaultPlan | None = None,
        shuffle_replies: bool = True,
        error_state: ErrorState = "discard",
        links: Links = None,
        compute_seconds: Compute = 0.0,
        node_config: NodeConfig = None,
        states: Path | None = None,
    ) -> None:
        require_engine()
        if not callable(client_app):
            raise ConfigError(f"client_app={client_app!r} is not valid: a ClientApp")
        num_nodes, seed = params.integer("num_nodes", num_nodes, low=0), params.seed(seed)
        self._key = Key(seed, "grid")
        super().__init__(num_nodes, self._key, run_config or {}, node_config, links, states)
        self._runner = ClientRunner(client_app, self._key, self.links, fault, error_state, compute_seconds)
        self._flights = Flights(EXPIRY)
        self.shuffle_replies = shuffle_replies
        self.exchange = 0
        self.round: int | None = None
        self._seed = seed
        self._pulls = 0
        # Weak: a figure goes when its message does, or a long run would keep all its messages alive.
        self._sizes: WeakKeyDictionary[Message, int] = WeakKeyDictionary()
        self._arrivals: WeakKeyDictionary[Message, float] = WeakKeyDictionary()
        self._looks, self._looked, self._found = 0, -math.inf, list[int]()
        self._claim: IdentityClaim | None = None
        self._identify(self.run_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the process identity back, unless someone else has taken it since; remove the files of states."""
        self._identify(None)
        self.close_states()

    def _identify(self, run_id: int | None) -> None:
        """Release the process identity, and take that of a run instead if one is given."""
        if self._claim is not None:
            release_identity(self._claim)
            self._claim = None
        if run_id is not None:
            # Message() refuses to work without a task id; which one it is means nothing here.
            self._claim = claim_identity((run_id, SUPERLINK_NODE_ID, 1))

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes, in partition order.

        Raises
        ------
        GridError
            When it is asked again and again in vain, as a strategy does that waits for nodes: nobody joins meanwhile.
        """
        found, now = super().get_node_ids(), time.monotonic()
        # Flower's strategies look once a second; code that just uses the list does not pause between two looks.
        waits = _WAIT_SECONDS[0] <= now - self._looked < _WAIT_SECONDS[1] and found == self._found
        self._looks = self._looks + 1 if waits else 0
        self._looked, self._found = now, found
        if self._looks >= _LOOKS:
            raise GridError(
                f"a strategy waits for more nodes than the {len(found)} of this process, and none joins later: it "
                "would wait for ever. Give InProcessGrid more nodes, or the strategy smaller min_available_nodes, "
                "min_train_nodes and min_evaluate_nodes"
            )
        return found

    def set_run(self, run: Run) -> None:
        """Take over the run id of ``run``; contexts made before keep theirs."""
        self.run_id = run.run_id
        self._identify(self.run_id)

    @property
    def run(self) -> Run:
        """The run, of which only the id means something here."""
        return Run.create_empty(self.run_id)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message; kept for Flower's interface, ``Message(...)`` does the same."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send ``messages`` and run their clients; return one message id per message, ``""`` for unknown nodes.

        Raises
        ------
        ConfigError
            When ``messages`` is a generator: a deployment iterates it twice and would send nothing.
        """
        batch = as_batch(messages)
        if not batch:
            return []
        self._looks = 0
        exchange, self.exchange = self.exchange, self.exchange + 1
        self._flights.expire(self.exchange, self.clock)
        # For this batch only: the packer goes by object identity, and the unpacker keeps all array data it has seen.
        packer, unpacker = Packer(), Unpacker()
        slots: Counter[int] = Counter()
        ids: list[str] = []
        for message in batch:
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
            # An id is a hash of the message: pushed again while its reply waits, it is the same one and runs once.
            if packed.root in self._flights:
                continue
            server_round = self.round if self.round is not None else round_of(message)
            delivery = Delivery(
                exchange, server_round or 0, node.partition, slots[node_id], message.metadata.message_type
            )
            # Two messages to one node in one batch meet faults of their own.
            slots[node_id] += 1
            replies = self._runner.deliver(packed, unpacker, node, delivery, self.run_id, self.clock)
            self._flights.add(packed.root, exchange, replies)
        return ids

    def pull_messages(  # type: ignore[override]  # as Flower 1.43 has it; earlier ones name the first otherwise
        self, reply_to_message_ids: Iterable[str] | None = None, *, message_ids: Iterable[str] | None = None
    ) -> list[Message]:
        """Return the replies that are there, each once; the clock moves to the latest of them.

        An id that is unknown, or whose replies were all pulled, yields error reply code 3, as with a SuperLink. An id
        whose reply is late or lost yields nothing. Arguments as for :func:`~fedcomp.flower.wrapper.awaited_ids`.
        """
        wanted = awaited_ids(reply_to_message_ids, message_ids)
        return self._collect(list(self._flights) if wanted is None else wanted, float("inf"))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None, enough: Enough | None = None
    ) -> list[Message]:
        """Push ``messages`` and return the replies that came.

        ``timeout`` is in simulated seconds: slower replies are not returned (they can still be pulled later), and when
        any reply is missing the clock moves on by the whole timeout. Without a timeout a missing reply costs nothing.
        ``enough`` is asked after every reply, in the order of their arrival: when it says so the exchange is over, and
        slower replies are not returned.
        """
        return self.receive(self.push_messages(messages), timeout=timeout, enough=enough)

    def receive(
        self, message_ids: Collection[str], *, timeout: float | None = None, enough: Enough | None = None
    ) -> list[Message]:
        """Wait for replies to messages that were pushed before; arguments and result of :meth:`send_and_receive`."""
        deadline = float("inf") if timeout is None else self.clock + timeout
        satisfied = None if enough is None else self._flights.enough_at(message_ids, self.exchange, deadline, enough)
        # What arrived while the server was busy is there now, however little would be enough.
        until = deadline if satisfied is None else max(satisfied, self.clock)
        replies = self._collect(message_ids, until)
        # Whatever is still in flight did not come in time, and a server waits for it to the end.
        if satisfied is None and timeout is not None and any(message_id in self._flights for message_id in message_ids):
            self.clock = deadline
        return replies

    def arrived(self, reply: Message) -> float:
        """Return the simulated second in which a reply that was handed out had arrived."""
        return self._arrivals.get(reply, self.clock)

    def _collect(self, message_ids: Iterable[str], deadline: float) -> list[Message]:
        replies: list[Message] = []
        # The empty id stands for a message to an unknown node; an id given twice must not be taken for pulled already.
        for message_id in dict.fromkeys(filter(None, message_ids)):
            there = self._flights.take(message_id, self.exchange, deadline)
            if there is None:
                reason = "The message is unknown or its reply was already pulled."
                replies.append(error_from_superlink(self.run_id, message_id, ErrorCode.MESSAGE_UNAVAILABLE, reason))
                continue
            for reply in there:
                message = unpack(reply.packed)
                self._sizes[message] = reply.packed.wire
                self._arrivals[message] = reply.arrival
                replies.append(message)
                # Never back: a reply may be pulled long after it arrived.
                self.clock = max(self.clock, reply.arrival)
        self._pulls += 1
        if self.shuffle_replies and len(replies) > 1:
            # Sorting random words gives a permutation; by the number of the pull it is a new one each time.
            words = self._key.at(purpose="reply-order", round=self._pulls).bits(len(replies))
            replies = [replies[i] for i in np.argsort(words, kind="stable")]
        return replies

    def wire_bytes(self, message: Message) -> int:
        """Return what ``message`` weighed when this grid shipped it, without serialising it again."""
        size = self._sizes.get(message)
        return ledger.wire_bytes(message) if size is None else size

    def dump(self) -> dict[str, Any]:
        """Return what :meth:`snapshot` stores, as plain data in which the contexts are lasting values."""
        return {
            "seed": self._seed,
            "run_id": self.run_id,
            "exchange": self.exchange,
            "pulls": self._pulls,
            "clock": self.clock,
            "nodes": self.dump_nodes(),
            "flight": self._flights.dump(),
        }

    def snapshot(self) -> bytes:
        """Return everything that changes during a run: contexts, replies on their way, clock and counters."""
        return store.dumps(self.dump(), _SNAPSHOT)

    def restore(self, data: bytes | Mapping[str, Any]) -> None:
        """Continue from :meth:`snapshot`'s bytes, or from what was read of :meth:`dump`'s data where these were stored.

        App, faults and links stay those of this grid.

        Raises
        ------
        fedcomp.flower.store.StoreError
            When the bytes are damaged.
        GridError
            When they were taken from a grid with another seed or number of nodes, or the sequence ``links`` is too
            short for its nodes.
        """
        state = store.loads(data, _SNAPSHOT) if isinstance(data, bytes) else data
        with store.reading(_SNAPSHOT):
            if state["seed"] != self._seed:
                raise GridError(f"snapshot was taken with seed {state['seed']}, this grid has seed {self._seed}")
            self.load_nodes(state["nodes"])
            self.run_id = state["run_id"]
            self.exchange, self._pulls, self.clock = state["exchange"], state["pulls"], state["clock"]
            self._flights.load(state["flight"])
        # The run id is the snapshot's now, and Message() takes it from the process identity.
        self._identify(self.run_id)


def in_process(grid: Grid) -> InProcessGrid | None:
    """Return the in-process grid behind ``grid`` and its wrappers, or None on another engine."""
    while not isinstance(grid, InProcessGrid):
        inner = getattr(grid, "inner", None)
        if inner is None:
            return None
        grid = cast(Grid, inner)
    return grid
