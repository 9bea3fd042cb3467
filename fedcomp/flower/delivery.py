"""Delivery of one message in the in-process engine: to a client under a fault plan, and back.

:class:`ClientRunner` executes the app on a copy of the node's context and commits or discards that copy;
:class:`Flights` holds the replies until they are pulled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flwr.app import Context, Error, Message

from fedcomp.errors import ConfigError
from fedcomp.flower._private import (
    ErrorCode,
    Packed,
    Packer,
    Unpacker,
    acting_as,
    error_from_superlink,
    unpack,
)
from fedcomp.flower.faults import NO_FAULT, Delivery, Fault, FaultPlan, corrupt, resolve
from fedcomp.flower.logs import brief, log
from fedcomp.flower.nodes import GridError, Node, NodeLinks
from fedcomp.flower.wrapper import Enough
from fedcomp.rng import Key

ClientCall = Callable[[Message, Context], Message]
"""A ClientApp, or anything that is called like one."""

Compute = float | Callable[[Delivery], float]

ErrorState = Literal["discard", "keep"]


@dataclass(frozen=True, slots=True)
class InFlight:
    """A reply on its way: it can be pulled from push number ``available`` on and is there at second ``arrival``."""

    packed: Packed
    available: int
    arrival: float


@dataclass(frozen=True)
class ClientRunner:
    """Runs clients, one message at a time.

    Attributes
    ----------
    app : callable
    key : Key
        Chooses the bits that the fault ``corrupt`` flips.
    links : NodeLinks
    fault : FaultPlan or None
    error_state : {"discard", "keep"}
        What becomes of the state after an exception in the app.
    compute_seconds : float or callable of a Delivery

    Raises
    ------
    ConfigError
        For another ``error_state``.
    """

    app: ClientCall
    key: Key
    links: NodeLinks
    fault: FaultPlan | None = None
    error_state: ErrorState = "discard"
    compute_seconds: Compute = 0.0

    def __post_init__(self) -> None:
        if self.error_state not in ("discard", "keep"):
            raise ConfigError(f"error_state is {self.error_state!r}, expected 'discard' or 'keep'")

    def deliver(
        self, packed: Packed, unpacker: Unpacker, node: Node, delivery: Delivery, run_id: int, now: float
    ) -> list[InFlight]:
        """Run the client and return the replies on their way, subject to the fault plan."""
        fault = resolve(self.fault(delivery)) if self.fault is not None else NO_FAULT
        if fault.kind == "silent":
            return []
        # + 1: the grid counts a push before it pulls, so a reply in time belongs to the next number already.
        available = delivery.exchange + 1 + (fault.pushes if fault.kind == "late" else 0)
        if fault.kind == "offline":
            reason = "The node is offline (injected fault)."
            refusal = error_from_superlink(
                run_id, packed.root, ErrorCode.NODE_UNAVAILABLE, reason, unpack(packed).metadata
            )
            # At once: the SuperLink answers by itself, and no byte crosses the node's link.
            return [InFlight(Packer().pack(refusal), available, now)]
        replies = []
        for _ in range(2 if fault.kind == "duplicate" else 1):
            reply = self._run(packed, unpacker, node, delivery, fault, run_id)
            # A node works on one message at a time: the second of two begins when the first is done.
            node.free_at = max(now, node.free_at) + self._seconds(packed.wire, reply.wire, delivery)
            replies.append(InFlight(reply, available, node.free_at))
        # Only after the run: the client has changed its memory and spent the time, as if all had gone well.
        if fault.kind == "lost_reply":
            return []
        return replies * 2 if fault.kind == "duplicate_reply" else replies

    def _run(
        self, packed: Packed, unpacker: Unpacker, node: Node, delivery: Delivery, fault: Fault, run_id: int
    ) -> Packed:
        """Execute one message on a copy of the node's context and commit or discard that copy."""
        work = node.context()
        # A copy to compare with, since the app is given the very dictionary.
        run_config = dict(work.run_config)
        failure: tuple[int, str] | None = None
        try:
            with acting_as(run_id, node.id):
                out = self.app(unpacker.unpack(packed), work)
                # Within the try: a reply that no engine could send is the app's failure, and must not end the run.
                _require_answer(out, packed)
                reply = Packer().pack(out)
            if fault.kind == "raise":
                failure = ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "The app raised at its end (injected fault)."
        except SystemExit as error:
            # A deployment's app process would be gone without a reply and without a context to store. Only an
            # interrupt is for the run itself.
            log.warning("client of partition %d ended its process (%s): %s", node.partition, error.code, brief(error))
            log.debug("client of partition %d ended its process", node.partition, exc_info=True)
            failure = ErrorCode.CLIENT_APP_CRASHED, "ClientApp stopped responding."
        except Exception as error:
            # Engines turn whatever an app raises into an error reply; where it was raised would be lost without the
            # log. Most frames are this project's and Flower's, the same for every client and round.
            log.warning("client of partition %d raised %s", node.partition, brief(error))
            log.debug("client of partition %d raised", node.partition, exc_info=True)
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
            corrupt(
                damaged,
                self.key.at(
                    purpose="corrupt", round=delivery.exchange, partition=delivery.partition, layer=delivery.slot
                ),
            )
            reply = Packer().pack(damaged)
        return reply

    def _seconds(self, down: int, up: int, delivery: Delivery) -> float:
        """Return the seconds that the node is busy with a message and a reply of these sizes."""
        seconds = self.compute_seconds(delivery) if callable(self.compute_seconds) else self.compute_seconds
        link = self.links.of(delivery.partition)
        return seconds if link is None else seconds + link.down_seconds(down) + link.up_seconds(up)


def _require_answer(out: object, packed: Packed) -> None:
    if not isinstance(out, Message):
        raise GridError(f"the app returned a {type(out).__name__}, expected a Message")
    if out.metadata.reply_to_message_id != packed.root:
        raise GridError("the reply does not answer the message; create it with Message(..., reply_to=message)")


@dataclass(slots=True)
class _Flight:
    """A pushed message and its replies that have not been pulled yet; no replies if it was lost."""

    pushed: int
    replies: list[InFlight]


class Flights:
    """The replies on their way, by the id of the message they answer.

    Parameters
    ----------
    expiry : int
        Pushes after which replies nobody pulled are dropped, as a SuperLink drops them when their time to live is over.
    """

    def __init__(self, expiry: int) -> None:
        self._expiry = expiry
        self._by_message: dict[str, _Flight] = {}

    def __contains__(self, message_id: object) -> bool:
        return message_id in self._by_message

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of messages whose replies were not all pulled, in the order of their pushes."""
        return iter(self._by_message)

    def add(self, message_id: str, exchange: int, replies: list[InFlight]) -> None:
        """Hold the replies to a message of exchange number ``exchange``."""
        self._by_message[message_id] = _Flight(exchange, replies)

    def take(self, message_id: str, exchange: int, deadline: float) -> list[InFlight] | None:
        """Take out what is there after ``exchange`` pushes and by ``deadline``; None for an unknown message."""
        flight = self._by_message.get(message_id)
        if flight is None:
            return None
        # Two clocks: a late reply waits for a number of pushes, a slow one for a simulated second.
        there = [r for r in flight.replies if r.available <= exchange and r.arrival <= deadline]
        left = [r for r in flight.replies if r.available > exchange or r.arrival > deadline]
        # A message whose reply was lost stays known: pulling it brings nothing, where an unknown one brings error 3.
        if left or not flight.replies:
            flight.replies = left
        else:
            del self._by_message[message_id]
        return there

    def enough_at(self, message_ids: Iterable[str], exchange: int, deadline: float, enough: Enough) -> float | None:
        """Return the simulated second of the first reply with which there are ``enough``; None when that never is."""
        flights = [self._by_message[each] for each in dict.fromkeys(message_ids) if each in self._by_message]
        coming = [reply for flight in flights for reply in flight.replies if reply.available <= exchange]
        arrived: list[Message] = []
        for reply in sorted(coming, key=lambda reply: reply.arrival):
            if reply.arrival > deadline:
                break
            # A copy: what ``enough`` does to it must not show in the reply that is handed out.
            arrived.append(unpack(reply.packed))
            if enough(arrived):
                return reply.arrival
        return None

    def expire(self, exchange: int, now: float) -> None:
        """Forget messages whose replies have been there, unpulled, for too long; the oldest come first.

        What arrives only after second ``now`` has not been there yet, however many messages were pushed since.
        """
        for message_id, flight in list(self._by_message.items()):
            # Counted from when the last reply could be pulled: one that is late has waited for nobody before that.
            if max([flight.pushed, *(reply.available for reply in flight.replies)]) + self._expiry >= exchange:
                break
            if all(reply.arrival <= now for reply in flight.replies):
                del self._by_message[message_id]

    def dump(self) -> list[Any]:
        """Return everything as plain data."""
        return [
            [
                key,
                flight.pushed,
                [[r.packed.root, r.packed.contents, r.packed.wire, r.available, r.arrival] for r in flight.replies],
            ]
            for key, flight in self._by_message.items()
        ]

    def load(self, state: Sequence[Any]) -> None:
        """Continue from :meth:`dump`'s data."""
        self._by_message = {
            key: _Flight(pushed, [InFlight(Packed(*reply[:3]), *reply[3:]) for reply in replies])
            for key, pushed, replies in state
        }
