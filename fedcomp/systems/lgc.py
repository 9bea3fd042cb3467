"""LGC: values on shared supports train an autoencoder, and later rounds send its latents instead.

Abrahamyan, Chen, Bekoulis and Deligiannis, "Learned Gradient Compression for Distributed Deep Learning", IEEE TNNLS
33(12) 2022, arXiv 2103.08870; what was read of it, and what is derived, is in :mod:`fedcomp.codecs.lgc`; the training
of the autoencoder is in :mod:`fedcomp.systems.autoencoder`.

Rounds are those of ScaleCom. In the first ones everything travels; in the next ones the server trains on the values
that come; from then on clients send latents (the ring instance), or the leader alone does and all send innovations (the
server instance). What goes down is the decoded mean: models have to be the same bit for bit, and two machines may not
decode alike. The server alone needs torch, from its first step of training on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from fedcomp.codecs import Codec, State, get_codec
from fedcomp.codecs.autoencoder import (
    IDENTITY,
    ConvDecoder,
    ConvEncoder,
    IdentityDecoder,
    IdentityEncoder,
    LatentDecoder,
    LatentEncoder,
)
from fedcomp.codecs.lgc import FEWEST, LGC, SCALES, Innovation, NodeEstimate, scale_of
from fedcomp.codecs.scalecom import Supports, open_support, support_frame
from fedcomp.errors import StateError
from fedcomp.layout import Layout, Update, Vector
from fedcomp.program import NO_FRAMES, Answer, AnswerError, Ask, Encoded, Frames, Given, Me, Now, Round, Said, Step
from fedcomp.rng import Key
from fedcomp.rules import Flag, Int, Made, OneOf, Positive, Real
from fedcomp.systems.autoencoder import ADAM, AutoencoderTraining, drawn, half_of
from fedcomp.systems.shared_support import elect
from fedcomp.wire import Bundle, Frame


@dataclass(frozen=True, repr=False, eq=False)
class Stage(Said):
    """What a client is told of its part in a round.

    Attributes
    ----------
    lead : bool
        Whether it is to choose the support.
    encoder : int
        Id of the encoder whose latents travel; 0 while values do.
    scale : float
        The leader's: by which values are divided before they are encoded.
    """

    lead: Annotated[bool, Flag(absent=False)] = False
    encoder: Annotated[int, Int(absent=0)] = 0
    scale: Annotated[float, Real(*SCALES, absent=1.0)] = 1.0


@dataclass(frozen=True, repr=False, eq=False)
class Scale(Said):
    """What a client divides its values by: their root mean square."""

    scale: Annotated[float, Real(*SCALES)]


class Led(NamedTuple):
    """What a leader chose: the round's codec, that of what all send, the support, latents, the leader's own part."""

    codec: LGC
    fixed: Codec
    supports: Supports
    latents: Vector
    own: Given


@dataclass(frozen=True, repr=False, eq=False)
class LearnedGradients(Encoded, id="lgc"):
    """LGC: average updates that are sent as latents of an autoencoder trained on the updates of earlier rounds.

    Parameters
    ----------
    codec : LGC or dict
        Instance, densities, error feedback.
    warmup_rounds : int
        Rounds of the first stage, with whole updates.
    training_rounds : int
        Rounds of the second. The last stage waits for a first step of training, which a round without usable answers
        does not bring.
    server_lr : float
        Step size of the server: model += server_lr * mean.
    common : {"turn", "first"}
        The leader in the last stage: present nodes in turn, or always the first of them, so that in the server instance
        a single node needs the encoder.
    training : AutoencoderTraining or dict
        Settings of the autoencoder's training.
    """

    KEEPS: ClassVar[bool] = True
    SEVERAL: ClassVar[bool] = True

    SAYS: ClassVar[tuple[type[Said], ...]] = (Stage, Scale)
    SHARED: ClassVar[tuple[str, ...]] = ("support",)

    codec: Annotated[LGC, Made(get_codec)]
    warmup_rounds: Annotated[int, Int()] = 5
    training_rounds: Annotated[int, Int()] = 50
    server_lr: Positive = 1.0
    common: Annotated[str, OneOf("turn", "first")] = "turn"
    training: Annotated[AutoencoderTraining, Made(AutoencoderTraining.made)] = ADAM

    def conflict(self) -> str:
        if not isinstance(self.codec, LGC):
            return f"LearnedGradients needs LGC as its codec, got {self.codec!r}; Pair takes the others"
        if self.codec.sends_latents:
            return "the ids of the autoencoder are set by the server; leave encoder and decoder at 0"
        return ""

    def round(self, now: Now) -> Round:
        layout = now.layout
        codec, encoder, decoders = self._stage(now)
        by_node = _by_node(codec)

        def ask(node: int, kind: str, lead: bool, frames: Frames = NO_FRAMES, **blobs: Frame) -> Ask:
            if codec.sends_latents and (lead or not by_node):
                blobs["encoder"] = encoder.frame()
            if codec.sends_latents and codec.ef == "decoded":
                blobs["decoder"] = decoders.get(node, decoders[None]).frame()
            says = Scale if (lead and not codec.dense) or (by_node and kind == "query") else None
            # The identity has no weights.
            blobs = {name: data for name, data in blobs.items() if data}
            return Ask(node, kind, Stage(lead, codec.encoder, codec.scale), frames, blobs, says)

        def chosen(answer: Answer) -> Led | None:
            found = now.read([answer], "support", partial(_opened, codec, layout, answer)).get(answer.node)
            if found is None:
                return None
            scaled = replace(codec, scale=answer.say.scale) if isinstance(answer.say, Scale) else codec
            fixed: Codec = scaled.on(found[0], now.number)
            if codec.sends_latents and not by_node:
                fixed = scaled.latents_on(found[0], now.number, layout, encoder, decoders[None])
            given = verified([answer], scaled, fixed, found[0])
            return Led(scaled, fixed, *found, given[0]) if given else None

        def verified(answers: Sequence[Answer], codec: LGC, fixed: Codec, on: Supports) -> list[Given]:
            given = now.give(answers)
            if not by_node:
                return now.verified(fixed, given)
            scales, count = _scales(answers), codec.shared_positions(on, layout).size
            # Each by a codec of its own, which knows by what its values are multiplied.
            return [v for g in given for v in now.verified(_innovation(codec, layout, scales[g.node], count), [g])]

        turn = 0 if self.common == "first" and codec.sends_latents else now.number - 1
        led = yield from elect(now, ask, chosen, turn)
        if led is None:
            return None
        leader, (codec, fixed, supports, latents, own), others = led
        # In the server instance clients that subtract what is decoded have to decode it.
        frames = {"latents": leader.frames["latents"]} if by_node and codec.ef == "decoded" else NO_FRAMES
        sent = yield [ask(node, "query", False, frames, support=leader.frames["support"]) for node in others]
        given = sorted([own, *verified(sent, codec, fixed, supports)], key=lambda each: each.node)
        innovations = codec.innovations(layout)
        total = now.rule.total(now, innovations if by_node else fixed, given, raw=True)
        if total is None:
            return None
        assert total.change is not None
        out = Update(total.change, layout)
        used = [g for g in given if g.node in total.consumed]
        if by_node:
            if leader.node not in total.consumed:
                now.note("the common node's latents cannot be used, so no node's values can be decoded")
                return None
            where, weight = codec.shared_positions(supports, layout), sum(g.weight for g in used)
            scales = _scales([leader, *sent])
            bundles = [innovations.open(g.frame, layout) for g in used]
            with np.errstate(over="ignore", invalid="ignore"):
                for g, bundle in zip(used, bundles, strict=True):
                    estimate = NodeEstimate(latents, decoders.get(g.node, decoders[None]), scales[g.node])
                    estimate.add(innovations, bundle, where, g.weight / weight, out)
            # What goes down lies where anything arrived.
            supports = codec.reached(supports, bundles, layout)
        elif codec.sends_latents:
            fixed.conclude(out)
        change = now.downward(total, self.server_lr)
        if change is None:
            return None
        learns = not (codec.sends_latents or codec.dense)
        metrics = self._learn(now, codec, supports, used) if learns else {}
        # Float32 whatever the values came in: rounding the mean once more would be an error nobody remembers.
        mean = codec.mean(supports, now.number)
        frame, _ = mean.encode(change, {}, Key(now.seed, "downlink", now.number))
        blobs = {"support": support_frame(supports, codec, layout) if by_node else leader.frames["support"]}
        return Step(total.consumed, frame=frame, blobs=blobs, codec=mean, metrics=metrics)

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        stage = ask.say if isinstance(ask.say, Stage) else Stage()
        codec = replace(self._at(me.number), encoder=stage.encoder, scale=stage.scale)
        layout, number, frames = me.layout, me.number, dict[str, Frame]()
        if ask.kind == "train":
            memory = codec.begin(me.update(), memory, me.key)
        if stage.lead:
            supports = codec.choose(memory, layout, me.key)
            frames["support"] = support_frame(supports, codec, layout)
        elif "support" in ask.blobs:
            supports = open_support(ask.blobs["support"], codec, layout)
        else:
            return memory, Answer(me.node)
        values = codec.total(memory, layout)[codec.coded_support(supports, layout)]
        scale, by_node = scale_of(values), _by_node(codec)
        # On a support of its own a leader divides by a scale of its own, which all others will be told.
        if stage.lead:
            codec = replace(codec, scale=scale)
        decoder: LatentDecoder | None = IdentityDecoder() if stage.encoder == IDENTITY else None
        if "decoder" in ask.blobs:
            decoder = ConvDecoder.read(ask.blobs["decoder"])
        if by_node:
            size = codec.shared_positions(supports, layout).size
            if stage.lead:
                frames["latents"] = codec.latents_frame(values[:size], _encoder_in(ask, stage.encoder))
            common = frames.get("latents", ask.frames.get("latents"))
            # As the server reads them: in the form in which they travel.
            latents = None if common is None else codec.open_latents(common, size)
            sent = codec.send_innovation(memory, supports, number, layout, me.key, latents, decoder)
        elif codec.sends_latents:
            sent = codec.send_latents(
                memory, supports, number, layout, me.key, _encoder_in(ask, stage.encoder), decoder
            )
        else:
            sent = codec.send(memory, supports, number, layout, me.key)
        frames["values"], memory = sent
        says = by_node or (stage.lead and not codec.dense)
        return memory, Answer(me.node, say=Scale(scale) if says else None, frames=frames)

    def residual(self, memory: State, layout: Layout) -> Vector | None:
        # Elsewhere what is decoded of all is not the sum of what each gives away.
        if not (self.codec.memory and self.codec.ef == "decoded" and self.codec.instance == "server"):
            return None
        # Of what the filter lets through the memory holds a share alone.
        kept: Vector = self.codec.settle(memory, layout)["memory"]
        return kept / np.float32(self.codec.beta)

    def reads(self, blobs: Frames, number: int, layout: Layout) -> Codec:
        # In the server instance the support holds all innovations: as many as there are clients.
        return self.codec.mean(open_support(blobs["support"], replace(self.codec, dense=True), layout), number)

    def _at(self, number: int) -> LGC:
        return replace(self.codec, dense=True) if number <= self.warmup_rounds else self.codec

    def _stage(self, now: Now) -> tuple[LGC, LatentEncoder, Mapping[int | None, LatentDecoder]]:
        """Return the codec of a round, its encoder, and decoders by node; the decoder under None is for all other
        nodes."""
        codec, halves = self._at(now.number), now.state.get("halves")
        if now.number <= self.warmup_rounds + self.training_rounds or halves is None:
            if now.number > self.warmup_rounds + self.training_rounds:
                now.note("the autoencoder was not trained in any round: values are sent instead")
            return codec, IdentityEncoder(), {None: IdentityDecoder()}
        encoder, shared = half_of(ConvEncoder, halves["encoder"]), half_of(ConvDecoder, halves["decoder"])
        own: dict[int | None, LatentDecoder] = {
            node: half_of(ConvDecoder, halves[str(node)]) for node in now.nodes if str(node) in halves
        }
        return replace(codec, encoder=encoder.id), encoder, {None: shared, **own}

    def _learn(self, now: Now, codec: LGC, supports: Supports, used: Sequence[Given]) -> dict[str, float]:
        """Train on the values that nodes sent of their coded tensors; return the losses, or none if they are not
        finite."""
        layout, coded, fixed = now.layout, codec.coded(now.layout), codec.on(supports, now.number)
        if codec.coded_support(supports, layout).size < FEWEST:
            now.note("too few values are sent for an autoencoder: raise density, or lower raw")
            return {}
        vectors: dict[int, Vector] = {
            g.node: np.concatenate([t.values.decoded() for t in fixed.open(g.frame, layout).tensors[:coded]])
            for g in used
        }
        halves = now.state.get("halves") or drawn(now.seed)
        if codec.instance == "ring":
            unit = [vector / np.float32(codec.scale) for vector in vectors.values()]
            halves, losses = self.training.learn_ring(halves, unit, [g.weight for g in used])
        else:
            units = {node: vector / np.float32(scale_of(vector)) for node, vector in vectors.items()}
            innovations, key = codec.innovations(layout), Key(now.seed, "autoencoder/common", now.number)
            sides = {node: innovations.on_support(vector, supports, layout) for node, vector in units.items()}
            halves, losses = self.training.learn_nodes(halves, units, sides, key)
        if losses:
            now.state["halves"] = halves
        else:
            now.note("the autoencoder's loss is not finite: this round does not train it")
        return dict(zip(("autoencoder-loss", "latent-distance"), losses, strict=False))


def _by_node(codec: LGC) -> bool:
    """Whether one client sends latents and all send innovations."""
    return codec.sends_latents and codec.instance == "server"


@dataclass(frozen=True, repr=False, eq=False)
class _Innovation(Innovation):
    """A client's innovation. Its norm covers everything the client adds, including the decoded values, as the client
    reports."""

    scale: float = 1.0
    decoded: int = 0

    def norm(self, frame: Frame | Bundle, layout: Layout) -> float:
        # A decoded value has a mean square of about 1, and is multiplied by the client's own scale.
        return math.hypot(super().norm(frame, layout), self.scale * math.sqrt(self.decoded))


def _innovation(codec: LGC, layout: Layout, scale: float, decoded: int) -> _Innovation:
    """Return the codec for the innovation of a client with ``scale``, in addition to this number of decoded values."""
    return _Innovation(**codec.innovations(layout).get_config(), scale=scale, decoded=decoded)


def _scales(answers: Sequence[Answer]) -> dict[int, float]:
    return {answer.node: answer.say.scale for answer in answers if isinstance(answer.say, Scale)}


def _opened(codec: LGC, layout: Layout, answer: Answer, frame: Frame) -> tuple[Supports, Vector]:
    """Return the support that a leader chose, and its latents if it is the common node."""
    supports = open_support(frame, codec, layout)
    if not _by_node(codec):
        return supports, np.zeros(0, np.float32)
    if "latents" not in answer.frames:
        raise AnswerError("the answer of the common node holds no latents")
    return supports, codec.open_latents(answer.frames["latents"], codec.shared_positions(supports, layout).size)


def _encoder_in(ask: Ask, named: int) -> LatentEncoder:
    """Return the encoder of a message; the identity has no weights."""
    found = ConvEncoder.read(ask.blobs["encoder"]) if "encoder" in ask.blobs else IdentityEncoder()
    if found.id != named:
        raise StateError(f"the message brings the encoder {found.id:x} and names {named:x}")
    return found
