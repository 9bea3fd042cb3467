"""One round of several exchanges: what clients say after training, and the values they send, as they come in.

A client answers several messages of a round, so what is known of it grows from exchange to exchange
(:class:`Client`). What all send on is the same for all: a support, once a leader's choice was accepted
(:class:`SupportRound`), or a basis (:mod:`fedcomp.strategies.power_sgd`). The exchanges themselves are written in
:mod:`fedcomp.strategies.waiting`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from flwr.app import ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.codecs.base import Codec
from fedcomp.codecs.scalecom import LeaderSelected, Supports, everything, open_support, support_frame
from fedcomp.codecs.waiting import Waiting
from fedcomp.errors import FedcompError
from fedcomp.exact import check_exact, decode_exact
from fedcomp.flower.payload import NODE_RECORD, has_frame, payload_bytes, take_frame, take_node
from fedcomp.flower.protocol import EXACT, PREFIX, SUPPORT, UPDATE
from fedcomp.flower.records import config_in
from fedcomp.flower.report import Report, shorten
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.strategies.receiving import Reception
from fedcomp.strategies.replies import Rejected, SentMessage, integer, strip, text, weight_of
from fedcomp.wire import Bundle, Frame

C = TypeVar("C", bound=Waiting)
L = TypeVar("L", bound=LeaderSelected)


@dataclass
class Client:
    """What has come from one client in the current round.

    Attributes
    ----------
    sent : SentMessage
        The last message it answered.
    content : RecordDict
        Its metrics and whatever else its app replied.
    values : Bundle or None
        Its values on the support, once they are here.
    payload : int
        Bytes of payload in what it answered, both exchanges together.
    norm : float or None
        Of its values; an ``outlier`` is one that a guard refused.
    """

    sent: SentMessage
    content: RecordDict
    weight: float
    generation: int
    partition: int
    values: Bundle | None = None
    exact: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    payload: int = 0
    norm: float | None = None
    outlier: bool = False

    @property
    def sequence(self) -> int:
        """Number of the last message it answered."""
        return self.sent.sequence


@dataclass
class WaitingRound(Generic[C]):
    """The moving parts of one round in whose second exchange waiting updates are sent.

    Attributes
    ----------
    half : str
        The client half that answers.
    reception : Reception
        What is known of the clients; acknowledges what was used.
    weight_key : str
        The metric that weighs a client.
    partitions : dict of int to int
        By node: the partition it said first, which holds for good.
    version : int
        Version of the model in the messages.
    block : bytes
        What the second exchange brings, as it travels; empty until it is known.
    silent : set of int
        Nodes that are not asked again in this round.
    lacking : set of int
        Nodes that say they lack what messages named by a number.
    senders_hold : bool
        Whether those that sent hold the block that goes down with the step.
    """

    half: ClassVar[str]

    number: int
    codec: C
    seed: int
    layout: Layout
    model: Mapping[str, NDArray[Any]]
    report: Report
    reception: Reception
    weight_key: str
    partitions: dict[int, int]
    version: int
    clients: list[Client] = field(default_factory=list)
    block: Frame = b""
    silent: set[int] = field(default_factory=set)
    lacking: set[int] = field(default_factory=set)
    senders_hold: bool = True

    @property
    def fixed(self) -> Codec:
        """The codec of the values that clients send."""
        raise NotImplementedError

    @property
    def name_of_block(self) -> int:
        """What messages call that on which clients send."""
        raise NotImplementedError

    def step(self, total: Update) -> tuple[Frame, Codec]:
        """Return the mean as it goes down, with what reads it, and turn ``total``, which was gathered, into it."""
        raise NotImplementedError

    def norm_of(self, client: Client) -> float:
        """Return the norm of what a client adds to the sum, by which a guard judges it."""
        assert client.values is not None
        # Of the values on the support: it sends nothing else of its update.
        return self.fixed.norm(client.values, self.layout)

    def usable(self, senders: list[Client]) -> list[Client]:
        """Return those of ``senders`` whose values can be summed; who is left out keeps what it sent."""
        return senders

    def gathered(self, total: Update, shares: Mapping[int, float]) -> None:
        """Turn a sum into values where it is not one of values, before it is scaled; ``shares`` are nodes' weights."""

    def note_trained(self, client: Client, reply: Message) -> None:
        """Take what a reply to training holds beside values."""

    def metrics(self) -> dict[str, float]:
        """Return figures of the round to be reported with the clients' metrics."""
        return {}

    @property
    def senders(self) -> list[Client]:
        """The clients whose values are here, in partition order."""
        found = [client for client in self.clients if client.values is not None]
        return sorted(found, key=lambda client: (client.partition, client.sent.node))

    def trained(self, sent: SentMessage, reply: Message) -> Client:
        """Return what a client says after training.

        Raises
        ------
        Rejected
            When the reply cannot be used.
        """
        header = config_in(reply.content, NODE_RECORD)
        if any(not name.startswith(PREFIX) for name in reply.content.array_records):
            said = header.get("unsupported")
            why = (
                said
                if isinstance(said, str)
                else f"is it the first of its mods, and does it accept {self.codec.codec_id!r}?"
            )
            raise Rejected(f"the client answered with a model: its app lacks the half {self.half}() ({why})")
        _require_answer(header, sent)
        _, weight = weight_of(reply.content, self.weight_key)
        text(header, "record")
        partition = take_node(reply)
        if partition is None:
            raise Rejected("the reply does not say which partition it comes from")
        # The first word holds: the turn to lead goes by partition, and a node could move itself to the front.
        partition = self.partitions.setdefault(sent.node, partition)
        payload = payload_bytes(reply)
        client = Client(sent, strip(reply.content), weight, integer(header, "generation"), partition, payload=payload)
        self.note_trained(client, reply)
        self.reception.note_version(sent, reply, self.version)
        self._note_header(client, header)
        if client.generation == sent.sequence:
            self.report.fresh.append(sent.node)
        if not has_frame(reply.content, UPDATE):
            # A reply without values takes nothing from the memory: it may be acknowledged at once.
            self.acknowledge([client])
        return client

    def answered(self, client: Client, asked: SentMessage, reply: Message) -> Client:
        """Check the header of an answer to a query; from now on the client's sequence is the query's.

        Raises
        ------
        Rejected
            When it answers another message, or with another memory.
        """
        header = config_in(reply.content, NODE_RECORD)
        _require_answer(header, asked)
        if integer(header, "generation") != client.generation:
            raise Rejected("the client's memory is not the one it trained with")
        # What is acknowledged later is the answer to the query, in which the values are.
        client.sent = asked
        client.payload += payload_bytes(reply)
        self._note_header(client, header)
        return client

    def _note_header(self, client: Client, header: ConfigRecord) -> None:
        node = client.sent.node
        if header.get("rolled-back") is True and node not in self.report.rolled_back:
            self.report.rolled_back.append(node)
        if header.get("lacks") is True:
            self.lacking.add(node)
        said = header.get("remark")
        if isinstance(said, str):
            self.report.remarks[node] = shorten(said)
        ratio = header.get("memory")
        if isinstance(ratio, float) and 0.0 <= ratio < float("inf"):
            self.report.memory[node] = ratio

    def acknowledge(self, clients: Iterable[Client]) -> None:
        """Note what was consumed of some clients."""
        self.reception.acknowledge((c.sent.node, c.sequence, c.generation) for c in clients)

    def take_values(self, client: Client, reply: Message) -> None:
        """Take a client's values on the round's support, and its exact buffers.

        Raises
        ------
        FedcompError
            When they are not what a client sends on this support.
        """
        frame = take_frame(reply.content, UPDATE)
        if frame is None:
            raise Rejected("the reply holds no values")
        values = self.fixed.open(frame, self.layout)
        received = decode_exact(take_frame(reply.content, EXACT), self.layout)
        client.exact = {t.name: check_exact(received[t.name], t, self.model[t.name]) for t in self.layout.exact}
        # Last: a client with values is a sender, whose buffers have been checked by then.
        client.values = values


@dataclass
class SupportRound(WaitingRound[L]):
    """The moving parts of one round on a shared support.

    Attributes
    ----------
    supports : Supports or None
        The support, None until a leader has chosen; ``block`` is its index block.
    leader : int or None
        Partition of the client that chose the support.
    """

    half = "learned_gradients"

    supports: Supports | None = None
    leader: int | None = None

    @property
    def fixed(self) -> Codec:
        """The codec of the values on the support."""
        assert self.supports is not None
        return self.codec.on(self.supports, self.number)

    @property
    def name_of_block(self) -> int:
        """The round's number."""
        return self.number

    def step(self, total: Update) -> tuple[Frame, Codec]:
        """Return the mean on the support."""
        assert self.supports is not None
        # Float32 whatever the values came in: rounding the mean once more would be an error nobody remembers.
        mean = self.codec.mean(self.supports, self.number)
        return mean.encode(total, {}, Key(self.seed, "downlink", self.number))[0], mean

    def take_lead(self, client: Client, reply: Message) -> bool:
        """Take the support a leader chose, and its values on it.

        Return whether they can be used; what cannot is reported.
        """
        try:
            self.supports, self.block = self.support_in(reply)
            self.note_lead(client, reply)
            self.take_values(client, reply)
        except FedcompError as reason:
            # Back to nobody: the next candidate is asked, and its support is the one that all will use.
            self.supports = None
            self.report.refuse(client.sent.node, f"as leader: {reason}")
            return False
        self.leader = client.partition
        return True

    def note_lead(self, client: Client, reply: Message) -> None:
        """Take what a leader sends beside support and values.

        Raises
        ------
        FedcompError
            When it cannot be used.
        """

    @property
    def frames(self) -> dict[str, Frame]:
        """What those that wait are sent."""
        return {SUPPORT: self.block}

    def support_in(self, reply: Message) -> tuple[Supports, Frame]:
        """Return the support a leader sent, checked, and its index block.

        Raises
        ------
        FedcompError
            When there is none, or it is not one of this model and density.
        """
        block = take_frame(reply.content, SUPPORT)
        if block is None:
            raise Rejected(f"the client was asked to lead and sent no {SUPPORT}")
        if self.codec.dense:
            # There is nothing to choose, so nothing of the leader's choice is read.
            supports = everything(self.codec.leader, self.layout)
            return supports, support_frame(supports, self.codec, self.layout)
        return open_support(block, self.codec, self.layout), block


def _require_answer(header: ConfigRecord, sent: SentMessage) -> None:
    if integer(header, "sequence") != sent.sequence:
        raise Rejected(f"the reply answers message {header['sequence']!r}, expected {sent.sequence}: a stale reply")
