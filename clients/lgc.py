"""The client half of LGC: ScaleCom's, and in the last stage latents of the encoder that the server names.

Messages of servers that train no autoencoder pass on to ``compression()``, so one app serves both kinds. A client needs
numpy only: training is the server's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict

from fedcomp.clients.half import ClientHalf
from fedcomp.clients.waiting import Exchange, waiting_half
from fedcomp.codecs import Codec, State
from fedcomp.codecs.autoencoder import (
    ConvDecoder,
    ConvEncoder,
    IdentityDecoder,
    IdentityEncoder,
    LatentDecoder,
    LatentEncoder,
)
from fedcomp.codecs.lgc import LGC, scale_of
from fedcomp.codecs.scalecom import Supports, held_support, open_support, support_frame, support_id_of
from fedcomp.errors import StateError
from fedcomp.flower.payload import NODE_RECORD, put_frame, take_frame
from fedcomp.flower.protocol import DECODER, ENCODER, PROBE, SUPPORT, Announcement
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.state import remembered
from fedcomp.layout import Layout, Vector
from fedcomp.versions import CodecOf, Step
from fedcomp.wire import Frame, WireError

_HELD = "fedcomp.lgc"

H = TypeVar("H", LatentEncoder, LatentDecoder)


def learned_gradients(accept: Collection[str] | None = None) -> ClientHalf:
    """Return the client half of LGC. Messages of servers that train no autoencoder pass through untouched.

    Parameters
    ----------
    accept : collection of str, optional
        Codec ids this client agrees to use; default all registered ones.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> app = client(ClientApp(), only=[learned_gradients()])
    """
    return waiting_half("learned_gradients", LGC, _Exchange, accept)


class _SupportExchange(Exchange[LGC]):
    """One message of a server that lets a leader choose the support."""

    def trained(self, state: State, layout: Layout, out: RecordDict) -> State:
        """Lead or wait."""
        return self._lead(state, layout, out) if self.announcement.leader else state

    def queried(self, state: State, layout: Layout, out: RecordDict, block: Frame | None) -> State:
        """Send on the support of the message, or on this node's own choice."""
        if self.announcement.leader:
            return self._lead(state, layout, out)
        if block is None:
            raise StateError("the query holds no index block")
        return self._values(state, open_support(block, self.codec, layout), layout, out)

    def _lead(self, state: State, layout: Layout, out: RecordDict) -> State:
        """Choose the support, send on it; return the state after it."""
        supports = self.codec.choose(state, layout, self.key)
        put_frame(out, SUPPORT, support_frame(supports, self.codec, layout))
        return self._values(state, supports, layout, out)

    def send(self, state: State, supports: Supports, layout: Layout, out: RecordDict) -> tuple[Frame, State]:
        """Return the frame of the values on ``supports``, and the state after it; what goes beside it into ``out``."""
        return self.codec.send(state, supports, self.announcement.support, layout, self.key)

    def _values(self, state: State, supports: Supports, layout: Layout, out: RecordDict) -> State:
        frame, after = self.send(state, supports, layout, out)
        self.put_values(frame, state, out)
        return after

    def codec_of(self, layout: Layout) -> CodecOf:
        """Return what reads a step: the mean on the support it came with, or on the one of this node's last frame."""

        def find(step: Step) -> Codec:
            wanted = support_id_of(step.frame, self.codec, layout)
            # A model without compressible tensors: its step is dense, and lies on no support.
            if wanted is None:
                return self.codec.mean((), 0)
            block = step.support
            if block is None:
                stored = {k: a for k in ("support", "support-id") if (a := remembered(self.context, k)) is not None}
                held = held_support(stored)
                if held is None or held[0] != wanted:
                    raise StateError(f"this node does not hold the support {wanted} of step {step.version}")
                block = held[1]
            # The step's own round may have been a dense one.
            return self.codec.mean(open_support(block, replace(self.codec, dense=True), layout), wanted)

        return find


class _Exchange(_SupportExchange):
    """One message of such a server. The node keeps the weights that it was sent last, as they came."""

    def __init__(self, msg: Message, context: Context, announcement: Announcement, codec: LGC) -> None:
        super().__init__(msg, context, announcement, codec)
        self._came = {key: frame for key in (ENCODER, DECODER) if (frame := take_frame(msg.content, key)) is not None}
        self._encoder: LatentEncoder | None = None
        self._decoder: LatentDecoder | None = None

    def prepare(self, layout: Layout, block: Frame | None) -> None:
        """Find the weights that the message names."""
        codec = self.codec
        if codec.sends_latents:
            self._encoder = self._find(ENCODER, codec.encoder, IdentityEncoder(), ConvEncoder.read)
            self._decoder = self._find(DECODER, codec.decoder, IdentityDecoder(), ConvDecoder.read)

    @property
    def _common(self) -> bool:
        """Whether this node's latents are the ones that all are decoded from."""
        return self.announcement.leader != 0

    @property
    def _lacks(self) -> bool:
        if not self.codec.sends_latents:
            return False
        encodes = self.codec.instance == "ring" or self._common
        return (encodes and self._encoder is None) or (self.codec.ef == "decoded" and self._decoder is None)

    def trained(self, state: State, layout: Layout, out: RecordDict) -> State:
        """Lead, send or wait as for ScaleCom; wait where this node lacks what the server named."""
        if self._lacks:
            out.config_records[NODE_RECORD]["lacks"] = True
            return state
        return super().trained(state, layout, out)

    def queried(self, state: State, layout: Layout, out: RecordDict, block: Frame | None) -> State:
        """Send on the support of the message, or on this node's own choice."""
        self.prepare(layout, block)
        if self._lacks:
            raise StateError("this node does not hold the weights that the message names")
        after = super().queried(state, layout, out, block)
        self.keep()
        return after

    def send(self, state: State, supports: Supports, layout: Layout, out: RecordDict) -> tuple[Frame, State]:
        """Return the frame of values, of latents or of an innovation; a common node's latents go beside it."""
        codec, number = self.codec, self.announcement.support
        if codec.dense:
            return super().send(state, supports, layout, out)
        values = codec.total(state, layout)[codec.coded_support(supports, layout)]
        scale = scale_of(values)
        by_node = codec.sends_latents and codec.instance == "server"
        if self._common or by_node:
            out.config_records[NODE_RECORD]["scale"] = scale
        # On a support of its own a leader divides by a scale of its own, which all others will be told.
        if self._common:
            codec = replace(codec, scale=scale)
        if by_node:
            return self._send_innovation(values, state, supports, layout, out)
        if codec.sends_latents:
            assert self._encoder is not None
            return codec.send_latents(state, supports, number, layout, self.key, self._encoder, self._decoder)
        return super().send(state, supports, layout, out)

    def _send_innovation(
        self, values: Vector, state: State, supports: Supports, layout: Layout, out: RecordDict
    ) -> tuple[Frame, State]:
        codec = self.codec
        count = codec.shared_positions(supports, layout).size
        frame: Frame | None
        if self._common:
            assert self._encoder is not None
            own = frame = codec.latents_frame(values[:count], self._encoder)
            put_frame(out, PROBE, own)
        else:
            frame = take_frame(self.msg.content, PROBE)
        # As the server reads them: in the form in which they travel.
        latents = None if frame is None else codec.open_latents(frame, count)
        return codec.send_innovation(
            state, supports, self.announcement.support, layout, self.key, latents, self._decoder
        )

    def keep(self) -> None:
        """Write the weights that came."""
        if self._came:
            held = self.context.state.get(_HELD)
            kept = to_arrays(held) if isinstance(held, ArrayRecord) else {}
            came = {key: np.frombuffer(frame, np.uint8) for key, frame in self._came.items()}
            self.context.state[_HELD] = to_record({**kept, **came})

    def _find(self, key: str, number: int, identity: H, read: Callable[[Frame], H]) -> H | None:
        """Return the weights that are called ``number``; None where this node does not have them."""
        if number == identity.id:
            return identity
        if key in self._came:
            found = read(self._came[key])
            if found.id == number:
                return found
        held = self.context.state.get(_HELD)
        frame = to_arrays(held).get(key) if isinstance(held, ArrayRecord) else None
        if frame is None:
            return None
        try:
            found = read(frame.tobytes())
        except WireError:
            # Damaged where they were kept: as good as none, and the server sends them again.
            return None
        return found if found.id == number else None
