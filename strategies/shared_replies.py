"""One round on a shared support: what came from each client, checked, and what the clients have in common.

Nothing here adds anything to anything; see :mod:`fedcomp.strategies.shared_support` for the exchanges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict
from numpy.typing import NDArray

from fedcomp.codecs.scalecom import FixedSupport, ScaleCom, Supports, open_support, support_frame
from fedcomp.codecs.similarity import similarity
from fedcomp.exact import check_exact, decode_exact
from fedcomp.flower.payload import take_frame
from fedcomp.flower.protocol import EXACT, PROBE, UPDATE
from fedcomp.flower.report import Report
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.strategies.replies import Rejected, SentMessage
from fedcomp.wire import Frame


@dataclass
class Client:
    """What has come from one client in the current round.

    Attributes
    ----------
    sent : SentMessage
        The last message it answered.
    content : RecordDict
        Its metrics and whatever else its app replied.
    frame : bytes or None
        Its values on the support, once they are here.
    sample : tuple of two float32 arrays, or None
        Its memory and its memory plus update at the probed coordinates.
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
    frame: Frame | None = None
    exact: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    sample: tuple[Vector, Vector] | None = None
    payload: int = 0
    norm: float | None = None
    outlier: bool = False

    @property
    def sequence(self) -> int:
        """Number of the last message it answered."""
        return self.sent.sequence


@dataclass
class SupportRound:
    """The moving parts of one round.

    Attributes
    ----------
    supports, block
        The support, and its index block as it travels; None and empty until a leader has chosen.
    silent : set of int
        Nodes that were asked to lead and did not.
    """

    number: int
    codec: ScaleCom
    seed: int
    layout: Layout
    model: Mapping[str, NDArray[Any]]
    report: Report
    clients: list[Client] = field(default_factory=list)
    supports: Supports | None = None
    block: Frame = b""
    silent: set[int] = field(default_factory=set)

    @property
    def fixed(self) -> FixedSupport:
        """The codec of the values on the support."""
        assert self.supports is not None
        return self.codec.on(self.supports, self.number)

    @property
    def senders(self) -> list[Client]:
        """The clients whose values are here, in partition order."""
        found = [client for client in self.clients if client.frame is not None]
        return sorted(found, key=lambda client: (client.partition, client.sent.node))

    def support_in(self, reply: Message, key: str) -> tuple[Supports, Frame]:
        """Return the support a leader sent under ``key``, checked, and its index block.

        Raises
        ------
        FedcompError
            When there is none, or it is not one of this model and density.
        """
        block = take_frame(reply.content, key)
        if block is None:
            raise Rejected(f"the client was asked to lead and sent no {key}")
        if self.codec.dense:
            # There is nothing to choose, so nothing of the leader's choice is read.
            supports = self.codec.everything(self.layout)
            return supports, support_frame(supports, self.codec, self.layout)
        return open_support(block, self.codec, self.layout), block

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
        self.fixed.open(frame, self.layout)
        received = decode_exact(take_frame(reply.content, EXACT), self.layout)
        client.exact = {t.name: check_exact(received[t.name], t, self.model[t.name]) for t in self.layout.exact}
        client.frame = frame

    def sample_in(self, reply: Message) -> tuple[Vector, Vector] | None:
        """Return the sampled memory and memory plus update of a client that was asked for them.

        Raises
        ------
        FedcompError
            When they are missing, or sampled elsewhere.
        """
        codec = self.codec.sampler
        if codec is None:
            return None
        found = []
        for name in ("memory", "sum"):
            frame = take_frame(reply.content, f"{PROBE}.{name}")
            if frame is None:
                raise Rejected(f"the reply lacks the sample {name!r} that was asked for")
            bundle = codec.verify(frame, self.layout, self._probe_key)
            parts = bundle.tensors[: len(codec.stretches(self.layout))]
            found.append(np.concatenate([t.values.decode() for t in parts]) if parts else np.zeros(0, np.float32))
        return found[0], found[1]

    def similarity(self) -> dict[str, float]:
        """Return the similarity figures of the senders by name; none when no samples were asked for."""
        codec = self.codec.sampler
        if codec is None or self.supports is None:
            return {}
        chosen, parts, start = [np.zeros(0, np.bool_)], [], 0
        for stretch, support in zip(codec.stretches(self.layout), self.supports, strict=True):
            positions = codec.positions(stretch, self._probe_key.at(layer=stretch.index))
            chosen.append(np.isin(positions, support, assume_unique=True))
            parts.append(slice(start, start + positions.size))
            start += positions.size
        samples = [(c.sample, c.weight) for c in self.senders if c.sample is not None]
        memories = [memory for (memory, _), _ in samples]
        totals = [total for (_, total), _ in samples]
        weights = [weight for _, weight in samples]
        return similarity(memories, totals, weights, np.concatenate(chosen), parts).to_metrics()

    @property
    def _probe_key(self) -> Key:
        return Key(self.seed, "probe", self.number)
