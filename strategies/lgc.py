"""The server half of LGC: values on shared supports train an autoencoder, and then its latents take their place.

Rounds are those of ScaleCom: a leader selects the support, everybody sends on it. In the first rounds everything
travels. In the next ones the server trains an autoencoder on the values that come; its weights stay here. From then on
clients send latents (the ring instance), or the leader alone does and all send innovations (the server instance), and
the mean is what the decoder makes of them.

Weights travel as frames, with the next message to every node that needs them and does not have them; messages name
them by their ids, and latents of another encoder are refused. What goes down is the decoded mean, not latents: models
have to be the same bit for bit, and two machines may not decode alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedcomp import params
from fedcomp.codecs import Codec
from fedcomp.codecs.autoencoder import IdentityDecoder, IdentityEncoder, LatentDecoder, LatentEncoder
from fedcomp.codecs.lgc import FEWEST, LGC, Innovation, NodeEstimate
from fedcomp.codecs.scalecom import LeaderSelected, support_frame
from fedcomp.errors import ConfigError
from fedcomp.flower.logs import log
from fedcomp.flower.payload import put_frame, take_frame
from fedcomp.flower.protocol import DECODER, ENCODER, PROBE
from fedcomp.flower.rounds import Exchanges
from fedcomp.layout import DensityPolicy, EndsDense, Update, Vector
from fedcomp.stateful import nested
from fedcomp.strategies.autoencoder_training import AutoencoderTraining, learn
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.loans import Loans
from fedcomp.strategies.replies import Rejected, SentMessage
from fedcomp.strategies.shared_replies import Client, SupportRound
from fedcomp.strategies.waiting import WaitingStrategy, waiting_system
from fedcomp.wire import Frame

CODERS: Final = ("convolutions", "identity")

_LARGEST: Final = float(np.finfo(np.float32).max)

PUBLISHED: Final[Mapping[str, Any]] = {
    "codec": {"id": LGC.codec_id, "density": 0.001, "innovation": 0.00001, "instance": "server", "raw": 0},
    "policy": EndsDense(first=1, last=2),
    "warmup_rounds": 200,
    "training_rounds": 300,
    "training": AutoencoderTraining(optimizer="sgd", lr=0.001),
}
"""Arguments of :class:`LearnedGradients` with the values of the third party's implementation (read). It does not
normalise, which does not work (measured) and cannot be selected."""

_CANDIDATES: Final = 4
"""How many clients are asked to lead in one round before it is given up."""

S = TypeVar("S", bound="SupportRound[Any]")


class LeaderStrategy(WaitingStrategy[S]):
    """Base of strategies in which one client selects the support of all.

    Parameters
    ----------
    codec : LeaderSelected or dict, optional
        Of the class :attr:`CODEC`; default one with its own defaults.
    server_lr, warmup_rounds, policy, guard, seed, **cohort
        As of :class:`LearnedGradients`.

    Attributes
    ----------
    leaders : dict of int to int
        Partition of the client whose support each round used.
    """

    STATE: ClassVar[Mapping[str, Any]] = {**WaitingStrategy.STATE, "leaders": dict[int, int]}

    def __init__(
        self,
        codec: LeaderSelected | Mapping[str, Any] | None = None,
        *,
        server_lr: float = 1.0,
        warmup_rounds: int = 0,
        policy: DensityPolicy | None = None,
        guard: Norms | None = None,
        seed: int = 0,
        **cohort: Any,
    ) -> None:
        super().__init__(
            codec,
            server_lr=server_lr,
            warmup_rounds=warmup_rounds,
            policy=policy,
            guard=guard,
            seed=seed,
            **cohort,
        )
        self.leaders: dict[int, int] = {}

    def _exchanges(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        report = self.reports.begin(server_round)
        now, nodes = self._begin("train", report, arrays, config, grid)
        now.codec = self._stage(now)
        # The turn goes by partition, since node ids are redrawn in every run. Replies say which partition a node holds,
        # so in the first round nobody is appointed, on any engine, and the leader is chosen after training.
        known = [node for node in nodes if node in self._partitions]
        appointed = known[self._turn(now, len(known))] if known else None
        sent = self._messages({node: int(node == appointed) for node in nodes}, now, config, "train")
        replies = yield [s.message for s in sent]
        self._take_trained(sent, replies, now, appointed)
        if now.supports is None:
            yield from self._elect(now)
        if now.supports is None:
            report.notes.append("no client could choose a support: the model is unchanged")
            return None, None
        assert now.leader is not None
        self.leaders[server_round] = now.leader
        yield from self._gather(now, now.frames)
        return self._aggregate(now)

    def _stage(self, now: S) -> Any:
        """Return the codec of the round."""
        return replace(self.codec, dense=True) if now.number <= self.warmup_rounds else self.codec

    def _turn(self, now: S, candidates: int) -> int:
        """Return which of the candidates, in the order of their partitions, is the first to be asked."""
        return (now.number - 1) % candidates

    def _take_trained(self, sent: list[SentMessage], replies: Iterable[Message], now: S, appointed: int | None) -> None:
        """Check the answers to training; take the leader's support."""

        def read(each: SentMessage, reply: Message) -> tuple[Client, Message]:
            return now.trained(each, reply), reply

        arrived: list[tuple[Client, str, RecordDict]] = []
        for client, reply in self.reception.received(sent, replies, now.report, read):
            # What a leader sent that cannot be used goes back into its memory: it is not acknowledged.
            # One that lacks what it needs waits like the others, and is sent it when it is asked again.
            leads = client.sent.node == appointed and appointed not in now.lacking
            if not leads or now.take_lead(client, reply):
                arrived.append((client, "", client.content))
        now.clients = self.reception.agreeing(arrived, now.report, lambda client: client.sent.node, "train")

    def _elect(self, now: S) -> Exchanges[None]:
        """Ask a few of those that trained, one after the other from the turn on, to lead until one does.

        Each that stays silent costs a timeout; a round in which several in a row do is better given up.
        """
        waiting = [client for client in now.clients if client.values is None]
        waiting.sort(key=lambda client: (client.partition, client.sent.node))
        turn = self._turn(now, len(waiting)) if waiting else 0
        for client in [*waiting[turn:], *waiting[:turn]][:_CANDIDATES]:
            asked = self._messages({client.sent.node: 1}, now, ConfigRecord(), "query")
            # Before the answer: who does not lead now is not asked for values either, which could cost another timeout.
            now.silent.add(client.sent.node)
            replies = yield [each.message for each in asked]

            def check(each: SentMessage, reply: Message, client: Client = client) -> tuple[Client, Message]:
                return now.answered(client, each, reply), reply

            for _, reply in self.reception.received(asked, replies, now.report, check, role="as leader: "):
                now.take_lead(client, reply)
            if now.supports is not None:
                return


@dataclass
class LatentRound(SupportRound[LGC]):
    """The moving parts of one round of LGC, in any of its stages.

    Attributes
    ----------
    encoder : LatentEncoder
        Of the last stage.
    decoders : mapping of int to LatentDecoder
        By node; that of 0 for all others.
    latents : float32 array or None
        The common node's, in the server instance, once they are here.
    latents_frame : bytes
        As they came.
    scales : dict of int to float
        By node: the root mean square of its values on the support, as it says itself.
    source : int or None
        The node whose latents they are.
    lent : int
        Bytes of weights in the messages of the round.
    """

    half = "learned_gradients"

    encoder: LatentEncoder = field(default_factory=IdentityEncoder)
    decoders: Mapping[int, LatentDecoder] = field(default_factory=dict)
    latents: Vector | None = None
    latents_frame: Frame = b""
    scales: dict[int, float] = field(default_factory=dict)
    source: int | None = None
    lent: int = 0

    @property
    def by_node(self) -> bool:
        """Whether this is a round in which one client sends latents, and all innovations."""
        return self.codec.sends_latents and self.codec.instance == "server"

    @property
    def fixed(self) -> Codec:
        """The codec of what clients send."""
        if not self.codec.sends_latents:
            return super().fixed
        if self.by_node:
            return self.codec.innovations(self.layout)
        assert self.supports is not None
        return self.codec.latents_on(self.supports, self.number, self.layout, self.encoder, self.decoder(0))

    @property
    def frames(self) -> dict[str, Frame]:
        """The support; with it the common node's latents where clients decode."""
        with_latents = self.by_node and self.codec.ef == "decoded"
        return {**super().frames, **({PROBE: self.latents_frame} if with_latents else {})}

    def decoder(self, node: int) -> LatentDecoder:
        """Return the decoder of a node."""
        return self.decoders[node] if node in self.decoders else self.decoders[0]

    def note_lead(self, client: Client, reply: Message) -> None:
        """Take the leader's scale, and its latents where it is the common node."""
        if self.codec.dense:
            return
        self.codec = replace(self.codec, scale=self._scale_of(client))
        if not self.by_node:
            return
        frame = take_frame(reply.content, PROBE)
        if frame is None:
            raise Rejected("the reply of the common node holds no latents")
        assert self.supports is not None
        where = self.codec.shared_positions(self.supports, self.layout)
        self.latents = self.codec.open_latents(frame, where.size)
        self.latents_frame, self.source = frame, client.sent.node

    def _note_header(self, client: Client, header: ConfigRecord) -> None:
        super()._note_header(client, header)
        scale, node = header.get("scale"), client.sent.node
        # As it is used: infinite as a float32 it would be a model of NaN, and negative one that moves the other way.
        if isinstance(scale, float) and 0.0 < scale <= _LARGEST:
            self.scales[node] = scale

    def take_values(self, client: Client, reply: Message) -> None:
        """Take a client's values; in the server instance they need a scale of their own."""
        if self.by_node:
            self._scale_of(client)
        super().take_values(client, reply)

    def _scale_of(self, client: Client) -> float:
        scale = self.scales.get(client.sent.node)
        if scale is None:
            raise Rejected("the reply does not say by what its values are divided")
        return scale

    def norm_of(self, client: Client) -> float:
        """Return the norm of what a client adds: in the server instance with what is decoded, as it says itself."""
        found = super().norm_of(client)
        if not self.by_node or self.supports is None:
            return found
        # A decoded value has a mean square of about 1, and is multiplied by the client's own scale.
        count = self.codec.shared_positions(self.supports, self.layout).size
        return math.hypot(found, self.scales[client.sent.node] * math.sqrt(count))

    def usable(self, senders: list[Client]) -> list[Client]:
        """Return nobody where the common node's latents are missing: clients have taken them for delivered."""
        senders = super().usable(senders)
        if not self.by_node or not senders:
            return senders
        if self.source not in {client.sent.node for client in senders}:
            self.report.notes.append("the common node's latents cannot be used: nobody's values can be decoded")
            return []
        return senders

    def gathered(self, total: Update, shares: Mapping[int, float]) -> None:
        """Decode what was summed (ring), or add what the server makes of each client's innovation (server)."""
        if not self.codec.sends_latents:
            return
        codec = self.fixed
        if not isinstance(codec, Innovation):
            codec.conclude(total)
            return
        assert self.supports is not None
        assert self.latents is not None
        where, used = self.codec.shared_positions(self.supports, self.layout), []
        for client in self.senders:
            node = client.sent.node
            if node in shares:
                assert client.values is not None
                estimate = NodeEstimate(self.latents, self.decoder(node), self.scales[node])
                estimate.add(codec, client.values, where, shares[node], total)
                used.append(client.values)
        # What goes down lies where anything arrived.
        self.supports = self.codec.reached(self.supports, used, self.layout)
        self.block = support_frame(self.supports, self.codec, self.layout)
        self.senders_hold = False

    def metrics(self) -> dict[str, float]:
        """Return the bytes of weights that went out."""
        found = super().metrics()
        if self.codec.sends_latents:
            found["autoencoder-bytes"] = float(self.lent)
        return found


class LearnedGradients(LeaderStrategy[LatentRound]):
    """Average updates that travel as latents of an autoencoder, trained on the updates of earlier rounds.

    Parameters
    ----------
    codec : LGC or dict, optional
        Instance, densities, error feedback.
    warmup_rounds : int
        Rounds of the first stage, in which everything travels.
    training_rounds : int
        Rounds of the second, in which the autoencoder is trained on values that travel as ScaleCom's do. Its last
        stage follows; it waits for a first step of training, which a round without usable replies does not bring.
    coder : {"convolutions", "identity"}
        The identity makes ScaleCom of the ring instance, bit for bit.
    common : {"turn", "first"}
        Who leads in the last stage: the turn goes round those present, or it is the first partition that is there, so
        that a single node needs the encoder in the server instance. When the leader is lost, the next one stands by.
    training : AutoencoderTraining, optional
        With which settings it is trained; default Adam, a step in each round. It begins afresh, with ``seed``.
    **options
        ``server_lr``, ``policy``, ``guard``, ``seed`` and who takes part, as of
        :class:`~fedcomp.strategies.shared_support.SharedSupport`; the policy's default is
        :class:`fedcomp.layout.EndsDense`, with which the first tensor travels dense.

    Raises
    ------
    ConfigError
        For another codec, and for one that names an autoencoder.

    Notes
    -----
    Clients need numpy only; the server needs torch for the training.

    Examples
    --------
    >>> from fedcomp.codecs import LGC
    >>> strategy = LearnedGradients(LGC(density=0.01), warmup_rounds=5, training_rounds=50)
    >>> published = LearnedGradients(**PUBLISHED)
    """

    CODEC = LGC
    ROUND = LatentRound

    STATE: ClassVar[Mapping[str, Any]] = {
        **LeaderStrategy.STATE,
        "training": nested("training"),
        "_encoders": nested("_encoders"),
        "_decoders": nested("_decoders"),
        "_scale": float,
    }

    def __init__(
        self,
        codec: LGC | dict[str, Any] | None = None,
        *,
        warmup_rounds: int = 5,
        training_rounds: int = 50,
        training: AutoencoderTraining | None = None,
        coder: str = "convolutions",
        common: str = "turn",
        **options: Any,
    ) -> None:
        super().__init__(codec, warmup_rounds=warmup_rounds, **{"policy": EndsDense(), **options})
        if self.codec.sends_latents:
            raise ConfigError("the ids of the autoencoder are set by the server; leave encoder and decoder at 0")
        self.training_rounds = params.integer("training_rounds", training_rounds, low=0)
        self.coder = params.choice("coder", coder, CODERS)
        self.common = params.choice("common", common, ("turn", "first"))
        self.training = (AutoencoderTraining() if training is None else training).afresh(self.seed)
        self._encoders = Loans()
        self._decoders = Loans()
        self._scale = 1.0

    def summary(self) -> None:
        """Log the codec and the stages."""
        super().summary()
        until = self.warmup_rounds + self.training_rounds
        log.info("\t│\t└──> all until round %d, values until %d, then latents", self.warmup_rounds, until)

    def _stage(self, now: LatentRound) -> LGC:
        codec = replace(super()._stage(now), scale=self._scale)
        if now.number <= self.warmup_rounds + self.training_rounds:
            return codec
        if self.coder == "identity":
            now.encoder, now.decoders = IdentityEncoder(), {0: IdentityDecoder()}
        elif self.training.steps:
            now.encoder = self.training.encoder
            now.decoders = {node: self.training.decoder(node) for node in self.training.known}
            now.decoders[0] = self.training.decoder(None)
        else:
            now.report.notes.append("the autoencoder was not trained in a single round: values travel instead")
            return codec
        return replace(codec, encoder=now.encoder.id, decoder=now.decoder(0).id)

    def _turn(self, now: LatentRound, candidates: int) -> int:
        first = self.common == "first" and now.codec.sends_latents
        return 0 if first else super()._turn(now, candidates)

    def _beside(self, node: int, content: RecordDict, fields: dict[str, Any], now: LatentRound) -> None:
        codec = now.codec
        # An evaluation announces none: it needs no weights.
        if "codec" not in fields or not codec.sends_latents:
            return
        if codec.instance == "ring" or fields["leader"]:
            self._lend(self._encoders, ENCODER, now.encoder, node, content, now)
        if codec.ef == "decoded":
            decoder = now.decoder(node)
            fields["codec"] = {**fields["codec"], "decoder": decoder.id}
            self._lend(self._decoders, DECODER, decoder, node, content, now)

    def _lend(
        self,
        loans: Loans,
        key: str,
        half: LatentEncoder | LatentDecoder,
        node: int,
        content: RecordDict,
        now: LatentRound,
    ) -> None:
        frame = half.frame()
        # The identity has no weights.
        if frame and not loans.holds(node, half.id, self.reception.peers[node].version):
            put_frame(content, key, frame)
            loans.lend(node, half.id, now.version)
            now.lent += len(frame)

    def _take_trained(
        self,
        sent: list[SentMessage],
        replies: Iterable[Message],
        now: LatentRound,
        appointed: int | None,
    ) -> None:
        super()._take_trained(sent, replies, now, appointed)
        # What they lost comes with the next message, which for those that wait is this round's query.
        for node in now.lacking:
            self._encoders.forget(node)
            self._decoders.forget(node)

    def _aggregate(self, now: LatentRound) -> tuple[ArrayRecord | None, MetricRecord | None]:
        if now.lent:
            log.info("round %d: %d bytes of the autoencoder's weights went out", now.number, now.lent)
        model, metrics = super()._aggregate(now)
        self._scale = now.codec.scale
        if model is None or metrics is None or now.codec.sends_latents or now.codec.dense or self.coder == "identity":
            return model, metrics
        return model, MetricRecord({**metrics, **self._learn(now)})

    def _learn(self, now: LatentRound) -> dict[str, float]:
        """Train the autoencoder on the round's values; return its losses."""
        coded = now.codec.coded(now.layout)
        senders = [client for client in now.senders if not client.outlier and client.values is not None]
        vectors: dict[int, Vector] = {}
        for client in senders:
            assert client.values is not None
            found = [tensor.values.decoded() for tensor in client.values.tensors[:coded]]
            vectors[client.sent.node] = np.concatenate(found) if found else np.zeros(0, np.float32)
        assert now.supports is not None
        if now.codec.coded_support(now.supports, now.layout).size < FEWEST:
            now.report.notes.append("too few values travel for an autoencoder: raise density, or lower raw")
            return {}
        weights = [client.weight for client in senders]
        losses = learn(self.training, now.codec, now.layout, now.supports, vectors, weights, now.number)
        if not losses:
            now.report.notes.append("the autoencoder's loss is not finite: this round does not train it")
        return losses


SYSTEM: Final = waiting_system(
    "lgc",
    "LGC",
    "Abrahamyan et al. 2022, Learned gradient compression for distributed deep learning",
    "entries that a leader chose, as latents of an autoencoder that the server trained on the first rounds; or one "
    "client's latents, and of all others a few values",
    LearnedGradients,
    ("density", "innovation", "instance", "ef"),
    ("training_rounds", "coder", "common"),
)
