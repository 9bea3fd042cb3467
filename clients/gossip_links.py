"""A node's end of the links of decentralised learning: messages to its neighbours, references to the server.

What a link acknowledged is on its receiver's disk; only then does the server hear of it, as a reference, and hands
that on. So a message that is in an inbox is there to be read, and one that no link took follows its reference through
the server, sealed for its receiver. The node keeps its own messages as long as they may come back to it, in
``context.state``, where they change together with everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from flwr.app import Array, ArrayRecord, Context, RecordDict
from numpy.typing import NDArray

from fedcomp.clients.peers import identity_in, keep_identity, link_tls, own_end, sender_of
from fedcomp.coding.errors import CodingError, SealError
from fedcomp.coding.sealing import seal
from fedcomp.coding.sealkeys import NO_RUN, require_signed, sign
from fedcomp.coding.transport import MAX_STORE_BYTES, MemoryStore, Parcel, deliver
from fedcomp.errors import ConfigError
from fedcomp.flower.coded import NO_ADDRESS
from fedcomp.flower.gossip import KEY_BYTES, SIMULATED, LinkHello, LinkReport, LinkTerms
from fedcomp.flower.logs import log
from fedcomp.gossip.base import GossipMessage, Multicast
from fedcomp.gossip.errors import MessageError
from fedcomp.gossip.protocol import Instruction, NodeAnswer
from fedcomp.gossip.reference import Reference

GOSSIP: Final = 48
"""Kind of a parcel that holds one gossip message."""

NOT_SENT: Final = "the message was not sent"
"""What a report says of a message that cannot be sealed for its receiver."""

_SENT: Final = "fedcomp.gossip.memory.sent"
_REASON: Final = 300


class GossipLinks:
    """The links of one message's run.

    Parameters
    ----------
    context : Context
    vertex : int
        This node's.
    terms : LinkTerms
    """

    def __init__(self, context: Context, vertex: int, terms: LinkTerms) -> None:
        self._context, self._vertex, self._terms = context, vertex, terms
        self._identity = identity_in(context)
        self._transport = own_end(context, vertex, terms.spool, min(terms.max_store, MAX_STORE_BYTES))
        self._tls = link_tls(context)
        self._parcels: dict[int, list[Parcel]] = {}
        # Why messages of the inbox could not be read, by source.
        self._missing: dict[int, str] = {}

    def introduce(self, content: RecordDict) -> None:
        """Say who this node is, where the server does not know it; the key that it says is kept."""
        if self._terms.known != self._identity.public:
            keep_identity(self._context, self._identity)
            address = "" if self._transport is None else self._transport.address
            if address.startswith(SIMULATED):
                address = SIMULATED  # the server knows where it leads
            # A node says who it is before its run has a name.
            signature = b"" if self._tls is None else sign(self._tls, NO_RUN, self._identity.public)
            LinkHello(public=self._identity.public, address=address, signature=signature).put(content)

    def opened(self, instruction: Instruction) -> Instruction:
        """Return an instruction with the messages in the place of their references; one that cannot be read is empty,
        which no message is."""
        return replace(
            instruction,
            inbox=tuple(replace(message, payload=self._received(message)) for message in instruction.inbox),
            returned=tuple(replace(message, payload=self._own(message)) for message in instruction.returned),
        )

    def sent(self, instruction: Instruction, answer: NodeAnswer, *, keep: bool) -> NodeAnswer:
        """Send an answer's messages, and write what became of them into the state.

        Parameters
        ----------
        instruction : Instruction
        answer : NodeAnswer
        keep : bool
            Messages may come back: they are kept, as they are, until none of their iteration can.

        Returns
        -------
        NodeAnswer
            With references in the place of messages, and why those that did not come could not be read.
        """
        self._forget()
        iteration = instruction.iteration
        payloads = {to: multicast.payload for multicast in answer.multicasts for to in multicast.destinations}
        addresses = dict(zip(self._terms.to, self._terms.addresses, strict=True))
        parcels, failed = {}, {to: NO_ADDRESS for to in payloads if not addresses.get(to)}
        for to, payload in payloads.items():
            try:
                parcels[to] = self._parcel(iteration, to, payload)
            except SealError as error:
                failed[to] = f"{NOT_SENT}: {error}"[:_REASON]
        handed = dict.fromkeys(payloads, 0)
        outgoing = [(addresses[to], parcel) for to, parcel in parcels.items() if to not in failed]
        for delivery in deliver(sender_of(self._context, self._transport), outgoing):
            to = delivery.parcel.destination
            handed[to] = delivery.handed_over
            if delivery.error is not None:
                failed[to] = str(delivery.error)[:_REASON]
        multicasts: list[Multicast] = []
        for multicast in answer.multicasts:
            reference = Reference.to(iteration, multicast.payload).to_bytes()
            if took := tuple(to for to in multicast.destinations if to not in failed):
                multicasts.append(Multicast(took, reference))
            for to in multicast.destinations:
                if to in failed:
                    multicasts.append(Multicast((to,), reference + (parcels[to].body if to in parcels else b"")))
        if keep:
            self._remember(iteration, answer)
        reasons = tuple(failed.get(to, "") for to in payloads)
        LinkReport(to=tuple(payloads), sent=tuple(handed.values()), failed=reasons).put(self._context.state)
        why = [self._missing.get(source, reason) for source, reason in zip(answer.needs, answer.reasons, strict=True)]
        return replace(answer, multicasts=tuple(multicasts), reasons=tuple(why))

    def _remember(self, iteration: int, answer: NodeAnswer) -> None:
        kept = self._kept()
        kept.drop_before(self._terms.run, self._terms.oldest)
        for payload in dict.fromkeys(multicast.payload for multicast in answer.multicasts):
            kept.put(Parcel(self._terms.run, iteration, GOSSIP, self._vertex, self._vertex, payload))
        arrays = {name: Array(array) for name, array in kept.to_arrays().items()}
        self._context.state[_SENT] = ArrayRecord(arrays)

    def _parcel(self, iteration: int, to: int, payload: bytes) -> Parcel:
        """Return a message as it leaves.

        Raises
        ------
        SealError
            When it would have to be sealed for a node that is not known, or does not prove that its key is its own.
        """
        parcel = Parcel(self._terms.run, iteration, GOSSIP, self._vertex, to, payload)
        if not self._terms.seal:
            return parcel
        if to not in self._terms.to:
            raise SealError("no key")
        place = self._terms.to.index(to)
        key = self._terms.keys[KEY_BYTES * place : KEY_BYTES * (place + 1)]
        if self._tls is not None:
            signature = self._terms.signatures[place] if self._terms.signatures else b""
            require_signed(self._tls.keys, to, NO_RUN, key, signature)
        return replace(parcel, body=seal(payload, key, parcel.coordinates))

    def _received(self, message: GossipMessage) -> bytes:
        try:
            reference, body = Reference.split(message.payload)
            coordinates = (reference.iteration, GOSSIP, message.source, self._vertex)
            # What passed the server was never a parcel, but is sealed as one.
            parcels = [Parcel(self._terms.run, *coordinates, body)] if body else self._stored(*coordinates)
            return self._fitting(reference, parcels)
        except (MessageError, CodingError, ConfigError) as error:
            self._missing[message.source] = str(error)[:_REASON]
            log.warning("node %d cannot read a message of node %d: %s", self._vertex, message.source, error)
            return b""

    def _own(self, message: GossipMessage) -> bytes:
        """Return a message of this node that comes back to it; empty when it was forgotten with the node's state."""
        try:
            reference, _ = Reference.split(message.payload)
        except MessageError:
            return b""
        parcels = self._kept().list(self._terms.run, reference.iteration)
        return next((parcel.body for parcel in parcels if reference.fits(parcel.body)), b"")

    def _forget(self) -> None:
        if self._transport is None:
            return
        try:
            self._transport.store.drop_before(self._terms.run, self._terms.oldest)
        except CodingError as error:
            # Until it is full, and then the server carries what it refuses.
            log.warning("node %d cannot clear its store: %s", self._vertex, error)

    def _stored(self, iteration: int, kind: int, source: int, destination: int) -> list[Parcel]:
        if self._transport is None:
            return []
        if iteration not in self._parcels:
            self._parcels[iteration] = self._transport.store.list(self._terms.run, iteration)
        wanted = (kind, source, destination)
        return [parcel for parcel in self._parcels[iteration] if parcel.order[:3] == wanted]

    def _fitting(self, reference: Reference, parcels: Iterable[Parcel]) -> bytes:
        """Return the message among parcels that may be anybody's."""
        reasons = []
        gone = "; it was acknowledged and is gone, or not sealed for this node"
        for parcel in parcels:
            try:
                sealed = self._terms.seal
                payload = self._identity.open(parcel.body, parcel.coordinates) if sealed else parcel.body
            except CodingError as error:
                reasons.append(str(error))
                continue
            if reference.fits(payload):
                return payload
            reasons.append(f"{len(payload)} bytes that are not the message of {reference.length} bytes it sent")
        raise MessageError(
            f"its message of iteration {reference.iteration} is not in this node's store"
            + (f" ({'; '.join(reasons)})" if reasons else gone)
        )

    def _kept(self) -> MemoryStore:
        held = self._context.state.array_records.get(_SENT)
        # The node's own, which go as soon as none can come back: nothing of them may be refused.
        limit = 1 << 40
        return MemoryStore(limit) if held is None else MemoryStore.from_arrays(_arrays(held), limit)


def _arrays(record: ArrayRecord) -> Mapping[str, NDArray[Any]]:
    return {name: array.numpy() for name, array in record.items()}
