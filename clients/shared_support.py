"""The client half of ScaleCom: one mod that keeps what was learnt until the server says on which support to send it.

Messages of servers that do not share supports pass on to ``compression()``, so one app serves both kinds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from flwr.app import RecordDict

from fedcomp.clients.half import ClientHalf
from fedcomp.clients.waiting import Exchange, waiting_half
from fedcomp.codecs import Codec, State
from fedcomp.codecs.scalecom import (
    LeaderSelected,
    ScaleCom,
    Supports,
    held_support,
    open_support,
    support_frame,
    support_id_of,
)
from fedcomp.errors import StateError
from fedcomp.flower.payload import put_frame
from fedcomp.flower.protocol import SUPPORT
from fedcomp.flower.state import remembered
from fedcomp.layout import Layout
from fedcomp.versions import CodecOf, Step
from fedcomp.wire import Frame

L = TypeVar("L", bound=LeaderSelected)


def shared_support(accept: Collection[str] | None = None) -> ClientHalf:
    """Return the client half of ScaleCom. Messages of servers that do not share supports pass through untouched.

    Parameters
    ----------
    accept : collection of str, optional
        Codec ids this client agrees to use; default all registered ones.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> app = client(ClientApp(), only=[shared_support()])
    """
    return waiting_half("shared_support", ScaleCom, SupportExchange, accept)


class SupportExchange(Exchange[L]):
    """One message of a shared-support server."""

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
