"""The arithmetic of LGC's rounds without its messages: what ``clients/lgc.py`` and ``strategies/lgc.py`` do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedcomp.codecs import Codec, State
from fedcomp.codecs.lgc import FEWEST, LGC, NodeEstimate, scale_of
from fedcomp.codecs.scalecom import Supports, support_frame
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.strategies.autoencoder_training import AutoencoderTraining, learn
from fedcomp.wire import Bundle


@dataclass
class Learned:
    """All clients send on the support of the round's leader: values, then latents of what was trained on these.

    One object is one run: it trains, as the server does, until :meth:`start` forgets it.

    Parameters
    ----------
    codec : LGC
        Instance, densities and memory.
    stages : tuple of int
        The last round in which everything travels, and the last one in which values do.
    training : AutoencoderTraining
        What every run begins with, a copy of its settings.

    Attributes
    ----------
    weights : int
        Bytes of the autoencoder's weights that the clients were sent so far.
    """

    codec: LGC
    stages: tuple[int, int] = (5, 55)
    training: AutoencoderTraining = field(default_factory=AutoencoderTraining)
    weights: int = field(default=0, init=False)
    losses: list[float] = field(default_factory=list, init=False)
    _coder: AutoencoderTraining = field(init=False, repr=False)
    _lent: set[tuple[int, int]] = field(default_factory=set, init=False, repr=False)

    def start(self, layout: Layout, clients: int) -> list[State]:
        """Return the codec's initial states."""
        self._coder, self.weights, self.losses, self._lent = self.training.afresh(self.training.seed), 0, [], set()
        return [self.codec.init(layout) for _ in range(clients)]

    def round(
        self, updates: Sequence[Update], weights: Sequence[float], states: Sequence[State], key: Key
    ) -> tuple[Vector, list[State], int]:
        """Choose the support, send on it, decode; return the mean, the states after it and the uplink's bytes."""
        layout, clients = updates[0].layout, len(updates)
        codec, shares = self._stage(key.round), [weight / sum(weights) for weight in weights]
        keys, leader = [key.at(partition=i) for i in range(clients)], (key.round - 1) % clients
        waiting = [codec.begin(u, s, k) for u, s, k in zip(updates, states, keys, strict=True)]
        supports = codec.choose(waiting[leader], layout, keys[leader])
        block, out = len(support_frame(supports, codec, layout)), Update(np.full(layout.size, -0.0, np.float32), layout)
        where = codec.coded_support(supports, layout)
        own = [codec.total(state, layout)[where] for state in waiting]
        codec = replace(codec, scale=scale_of(own[leader]))
        if codec.sends_latents and codec.instance == "server":
            sent, uplink, supports = self._by_node(codec, waiting, own, shares, supports, keys, leader, out)
        else:
            sent, uplink, bundles = self._on_support(codec, waiting, shares, supports, keys, out)
            if not codec.dense and not codec.sends_latents and where.size >= FEWEST:
                # As they arrive: rounded, where they travel in fewer bits.
                coded = codec.coded(layout)
                vectors = {i: np.concatenate([t.values.decoded() for t in b.tensors[:coded]]) for i, b in bundles}
                found = learn(self._coder, codec, layout, supports, vectors, weights, key.round)
                self.losses += [found["autoencoder-loss"]] if found else []
        self._lend(codec, leader, clients)
        return out.vector, sent, uplink + block

    def _stage(self, number: int) -> LGC:
        if number <= self.stages[0]:
            return replace(self.codec, dense=True)
        if number <= self.stages[1] or not self._coder.steps:
            return self.codec
        return replace(self.codec, encoder=self._coder.encoder.id, decoder=self._coder.decoder(None).id)

    def _on_support(
        self, codec: LGC, waiting: list[State], shares: list[float], supports: Supports, keys: list[Key], out: Update
    ) -> tuple[list[State], int, list[tuple[int, Bundle]]]:
        """Send values or latents; return states, bytes and opened frames by client."""
        layout, number = out.layout, keys[0].round
        encoder, decoder = self._coder.encoder, self._coder.decoder(None)
        fixed: Codec = codec.on(supports, number)
        if codec.sends_latents:
            fixed = codec.latents_on(supports, number, layout, encoder, decoder)
        after, uplink, bundles = [], 0, []
        for i, (state, share, key) in enumerate(zip(waiting, shares, keys, strict=True)):
            if codec.sends_latents:
                frame, state = codec.send_latents(state, supports, number, layout, key, encoder, decoder)
            else:
                frame, state = codec.send(state, supports, number, layout, key)
            bundles.append((i, fixed.open(frame, layout)))
            fixed.gather(bundles[-1][1], share, out)
            after.append(state)
            uplink += len(frame)
        fixed.conclude(out)
        return after, uplink, bundles

    def _by_node(
        self,
        codec: LGC,
        waiting: list[State],
        own: list[Vector],
        shares: list[float],
        supports: Supports,
        keys: list[Key],
        leader: int,
        out: Update,
    ) -> tuple[list[State], int, Supports]:
        """Send innovations and the leader's latents; return states, bytes, and the support of what arrived."""
        layout, number, innovations = out.layout, keys[0].round, codec.innovations(out.layout)
        where = codec.shared_positions(supports, layout)
        common = codec.latents_frame(own[leader][: where.size], self._coder.encoder)
        latents = codec.open_latents(common, where.size)
        after, bundles, uplink = [], [], len(common)
        for i, (state, share, key) in enumerate(zip(waiting, shares, keys, strict=True)):
            decoder = self._coder.decoder(i)
            frame, state = codec.send_innovation(state, supports, number, layout, key, latents, decoder)
            bundles.append(innovations.open(frame, layout))
            innovations.gather(bundles[-1], share, out)
            after.append(state)
            uplink += len(frame)
        for i, (bundle, share) in enumerate(zip(bundles, shares, strict=True)):
            estimate = NodeEstimate(latents, self._coder.decoder(i), scale_of(own[i]))
            estimate.add(innovations, bundle, where, share, out)
        return after, uplink, codec.reached(supports, bundles, layout)

    def _lend(self, codec: LGC, leader: int, clients: int) -> None:
        """Count the weights that go out in a round: once to each client that needs them."""
        if not codec.sends_latents:
            return
        needs = {(i, 0) for i in range(clients) if codec.instance == "ring" or i == leader}
        if codec.ef == "decoded":
            needs |= {(i, 1) for i in range(clients)}
        sizes = len(self._coder.encoder.frame()), len(self._coder.decoder(None).frame())
        self.weights += sum(sizes[half] for _, half in needs - self._lent)
        self._lent |= needs
