"""What a relay and a node say to each other, as plain values: one instruction down, one answer up.

Every instruction to a node has a serial number, one higher than the last. It is repeated *verbatim* (same serial, same
inbox) until its node answers or is given up, and a node that has carried it out answers from memory. So one number is
acknowledgement (serial s + 1 tells the node that answer s arrived), re-delivery and protection against duplicates.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from fedcomp.gossip.base import GossipMessage, Multicast, Real, View
from fedcomp.gossip.errors import MessageError, NodeAnswerError

Action = Literal["step", "finish", "leave", "observe"]
Start = Literal["", "common", "empty", "reset"]
ACTIONS: Final = get_args(Action)
STARTS: Final = get_args(Start)

_FACTS: Final = 32
"""Figures a node may report at once."""

Parts = dict[str, Any]
"""Scalars (int, float, str, bool) and lists of one of them or of bytes: what a record of any framework can hold."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """What one node is to do next.

    Attributes
    ----------
    session : str
        Names the run: memory of another one is not continued.
    serial : int
        1, 2, ...: of this node, one higher than its last. ``observe`` repeats the last one and changes nothing.
    epoch : int
        How often the set of nodes of a synchronous run has changed; always 0 in asynchronous runs.
    action : {"step", "finish", "leave", "observe"}
        ``step``: apply the inbox, then begin iteration ``view.iteration``. ``finish``: apply the inbox only. ``leave``:
        apply the inbox, then send away all there is. ``observe``: report the model as it would be after the inbox.
    view : View
        The iteration; of ``finish`` and ``observe`` only node, iteration and seed count.
    inbox : tuple of GossipMessage
        In order of source, of one source in the order they were sent; all to this node.
    returned : tuple of GossipMessage
        Own messages that will never be delivered, in the order they were sent.
    start : {"", "common", "empty", "reset"}
        How the state is made: go on with the old one, begin the run, join a run under way, or go on from the own model
        after the set of nodes has changed.
    """

    session: str
    serial: int
    epoch: int
    action: Action
    view: View
    inbox: tuple[GossipMessage, ...] = ()
    returned: tuple[GossipMessage, ...] = ()
    start: Start = ""

    @property
    def node(self) -> int:
        """Whom it is for."""
        return self.view.node

    @property
    def iteration(self) -> int:
        """Which iteration is begun."""
        return self.view.iteration

    def to_parts(self) -> Parts:
        """Return the instruction as scalars and lists; the messages as ``inbox`` and ``returned``, lists of bytes."""
        view = self.view
        return {
            "session": self.session,
            "serial": self.serial,
            "epoch": self.epoch,
            "action": self.action,
            "start": self.start,
            "node": view.node,
            "iteration": view.iteration,
            "seed": view.seed,
            "dense": view.dense,
            # In order, since the order of a set is not fixed and an instruction is repeated verbatim.
            "resync": sorted(view.resync),
            "out": list(view.column),
            "shares": [float(share) for share in view.column.values()],
            "in": list(view.row),
            "weights": [float(weight) for weight in view.row.values()],
            "inbox.from": [message.source for message in self.inbox],
            "inbox": [message.payload for message in self.inbox],
            "returned.to": [message.destination for message in self.returned],
            "returned": [message.payload for message in self.returned],
        }

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> Instruction:
        """Recreate an instruction.

        Raises
        ------
        MessageError
            When the parts are not those of an instruction.
        """
        try:
            node = int(parts["node"])
            if parts["action"] not in ACTIONS or parts["start"] not in STARTS:
                raise ValueError(f"action {parts['action']!r} with start {parts['start']!r}")
            return cls(
                session=str(parts["session"]),
                serial=int(parts["serial"]),
                epoch=int(parts["epoch"]),
                action=parts["action"],
                view=View(
                    node=node,
                    iteration=int(parts["iteration"]),
                    # strict: lists of unequal length would give shares and messages to the wrong nodes unnoticed.
                    column=dict(zip(parts["out"], parts["shares"], strict=True)),
                    row=dict(zip(parts["in"], parts["weights"], strict=True)),
                    seed=int(parts["seed"]),
                    dense=bool(parts["dense"]),
                    resync=frozenset(parts["resync"]),
                ),
                inbox=tuple(
                    GossipMessage(j, node, p) for j, p in zip(parts["inbox.from"], parts["inbox"], strict=True)
                ),
                returned=tuple(
                    GossipMessage(node, j, p) for j, p in zip(parts["returned.to"], parts["returned"], strict=True)
                ),
                start=parts["start"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise MessageError(f"this is not a gossip instruction: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """What a node answers to an instruction. Kept by the node until the next instruction, which acknowledges it.

    Attributes
    ----------
    session, serial : str, int
        Of the instruction that is answered.
    multicasts : tuple of Multicast
        Messages to active out-neighbours, at most one to each.
    needs : tuple of int
        Sources in the inbox whose messages, all of them, were not applied: their estimate is not in step, or their
        bytes are damaged. They go back to their senders, and whole estimates are wanted.
    reasons : tuple of str
        Why, one for each of ``needs``.
    failed : str
        Why nothing was sent (what would have left is not finite); empty when all went well. The inbox was applied.
    facts : mapping of str to float
        Small figures for reports and watchers: :meth:`fedcomp.gossip.Algorithm.facts`.
    fresh : bool
        The node has no memory of what it should go on with; nothing was done.
    model : ndarray, optional
        The answer to ``observe``.
    noticed : tuple of (int, str)
        Sources in the inbox, and what is odd about their messages, which were counted nevertheless.
    lost : tuple of str
        Why own messages that came back could not be taken back, one for each: their bytes were damaged on the way, and
        the mass they carried is gone.
    """

    session: str
    serial: int
    multicasts: tuple[Multicast, ...] = ()
    needs: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    failed: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)
    fresh: bool = False
    model: Real | None = None
    lost: tuple[str, ...] = ()
    noticed: tuple[tuple[int, str], ...] = ()

    def to_parts(self) -> Parts:
        """Return the answer as scalars and lists, but for its ``model``; the messages as a list of bytes."""
        return {
            "session": self.session,
            "serial": self.serial,
            "messages": [multicast.payload for multicast in self.multicasts],
            "messages.to": [to for multicast in self.multicasts for to in multicast.destinations],
            "messages.counts": [len(multicast.destinations) for multicast in self.multicasts],
            "needs": list(self.needs),
            "reasons": list(self.reasons),
            "lost": list(self.lost),
            "noticed": [source for source, _ in self.noticed],
            "remarks": [remark for _, remark in self.noticed],
            "failed": self.failed,
            "fresh": self.fresh,
            "facts": list(self.facts),
            "facts.values": [float(value) for value in self.facts.values()],
        }

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any], model: Real | None = None) -> NodeAnswer:
        """Recreate an answer; types are checked here, what it says is checked by the relay.

        Raises
        ------
        NodeAnswerError
            When the parts are not those of an answer.
        """
        try:
            to = [int(j) for j in parts["messages.to"]]
            counts = [int(c) for c in parts["messages.counts"]]
            payloads = parts["messages"]
            # A negative count could balance one that is too large, and the slices below would then overlap.
            if len(counts) != len(payloads) or min(counts, default=1) < 0 or sum(counts) != len(to):
                raise ValueError(f"{len(payloads)} messages for {counts} of {len(to)} destinations")
            if not all(isinstance(payload, bytes) for payload in payloads):
                raise TypeError("a message is not bytes")
            ends = list(itertools.accumulate(counts))
            return cls(
                session=str(parts["session"]),
                serial=int(parts["serial"]),
                multicasts=tuple(
                    Multicast(tuple(to[end - count : end]), payload)
                    for end, count, payload in zip(ends, counts, payloads, strict=True)
                ),
                needs=tuple(int(j) for j in parts["needs"]),
                reasons=tuple(str(reason) for reason in parts["reasons"]),
                lost=tuple(str(reason) for reason in parts["lost"]),
                noticed=tuple((int(j), str(w)) for j, w in zip(parts["noticed"], parts["remarks"], strict=True)),
                failed=str(parts["failed"]),
                facts={str(k): float(v) for k, v in zip(parts["facts"], parts["facts.values"], strict=True)},
                fresh=bool(parts["fresh"]),
                model=model,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise NodeAnswerError(
                f"this is not an answer to a gossip instruction: {type(error).__name__}: {error}"
            ) from error


def check(instruction: Instruction, answer: NodeAnswer, largest: int, *, synchronous: bool) -> None:
    """Refuse an answer that cannot be one to ``instruction``.

    Raises
    ------
    NodeAnswerError
        For messages to others than the active out-neighbours, two to one of them or, in a synchronous run, none; too
        large a message; messages of a node that says it sent none; or needs, or losses, of what it was not sent.
    """
    view = instruction.view
    # The other actions begin no iteration, so nothing may come with their answers.
    expected = set(view.column) if instruction.action in ("step", "leave") else set()
    to = [destination for multicast in answer.multicasts for destination in multicast.destinations]
    # Push-sum takes shares from whoever sends them, so only this keeps a node from writing to strangers.
    if not set(to) <= expected or len(set(to)) != len(to) or not all(p.destinations for p in answer.multicasts):
        raise NodeAnswerError(f"messages to nodes {to[:20]}; expected at most one to each of {sorted(expected)}")
    longest = max((len(multicast.payload) for multicast in answer.multicasts), default=0)
    if longest > largest:
        raise NodeAnswerError(f"a message of {longest} bytes; the largest this run has is {largest}")
    # Such a node has not begun the iteration: its neighbours must not get messages that it does not know of.
    silent = answer.fresh or bool(answer.failed) or (synchronous and bool(answer.needs))
    if silent and to:
        raise NodeAnswerError(f"messages to nodes {to[:20]} by a node that says it sent none")
    # Every neighbour waits for its message: one left out would stop the whole run.
    if synchronous and not silent and instruction.action == "step" and len(to) < len(expected):
        raise NodeAnswerError(f"messages to nodes {to[:20]} only; expected one to each of {sorted(expected)}")
    sources = {message.source for message in instruction.inbox}
    # A node may send back only what it was given: the relay returns everything these sources have sent to it.
    if not set(answer.needs) <= sources or len(answer.needs) != len(answer.reasons):
        raise NodeAnswerError(
            f"messages of nodes {answer.needs[:20]} refused for {len(answer.reasons)} reasons; had {sources}"
        )
    if not {source for source, _ in answer.noticed} <= sources or len(answer.noticed) > len(sources):
        raise NodeAnswerError(f"remarks on messages of nodes {[j for j, _ in answer.noticed][:20]}; had {sources}")
    if len(answer.lost) > len(instruction.returned):
        raise NodeAnswerError(f"{len(answer.lost)} messages lost that came back; {len(instruction.returned)} did")
    if answer.fresh and instruction.start in ("common", "empty"):
        raise NodeAnswerError("no memory, and none was needed: this instruction begins with a new state")
    if len(answer.facts) > _FACTS:
        raise NodeAnswerError(f"{len(answer.facts)} figures; at most {_FACTS} are taken")
