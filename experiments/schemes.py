"""How the clients of a round agree on one update: each by itself, all on the support that one of them chose, as values
or as latents, or all in one low-rank basis.

The arithmetic of a round's exchange without its messages, for :mod:`fedcomp.experiments.central`: what
:mod:`fedcomp.clients.compressed` and :class:`fedcomp.strategies.compressed.Compressed` do with one update per client,
``clients/shared_support.py`` with ``strategies/shared_support.py`` do on a shared support, ``clients/lgc.py`` with
``strategies/lgc.py`` by latents, and ``clients/power_sgd.py`` with ``strategies/power_sgd.py`` in a shared basis.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs import Codec, ErrorFeedback, State
from fedcomp.codecs.lgc import FEWEST, LGC, NodeEstimate, scale_of
from fedcomp.codecs.lowrank import Basis, Part
from fedcomp.codecs.positional import Stretch, stretches
from fedcomp.codecs.power_sgd import PowerSGD, basis_key
from fedcomp.codecs.scalecom import ScaleCom, Supports, support_frame
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.strategies.autoencoder_training import AutoencoderTraining, learn
from fedcomp.wire import Bundle


@dataclass(frozen=True)
class RoundExchange:
    """What one round's communication cost and delivered.

    Attributes
    ----------
    mean : float32 vector
        The weighted mean of what the clients' frames decode to; for lossless codecs the mean model itself.
    states : list of State
        The clients' states after it.
    uplink : int
        Bytes of all frames from the clients.
    downlink : int
        Bytes of the frames that would carry the mean to every client: on a support all clients know, its values alone;
        else values and the union of all supports, or all values where that is shorter.
    union : int
        Compressible coordinates at which the mean is not zero.
    kept : list of int
        Values of compressible coordinates that each client sent.
    overlap : float
        Share of the true top k of the mean of memory plus update that lies in the shared support: 1 - q/k. NaN where
        there is no shared support or nobody looked.
    seconds : float
        Processor time of encoding, decoding and adding up; that of the downlink's frames is not in it.
    """

    mean: Vector
    states: list[State]
    uplink: int
    downlink: int
    union: int
    kept: list[int]
    overlap: float = math.nan
    seconds: float = 0.0


def run_it_on_an_engine(why: str) -> NoReturn:
    """Refuse what only messages can do."""
    raise ConfigError(f"without messages {why}; run it on an engine")


class RoundScheme(Protocol):
    """How the clients of a round agree on one update."""

    @property
    def codec(self) -> Codec:
        """What encodes the updates."""

    @property
    def lossless(self) -> bool:
        """Whether the updates are the models themselves, not differences."""

    def start(self, layout: Layout, clients: int) -> list[State]:
        """Return the states of clients that have sent nothing yet."""

    def round(
        self, updates: Sequence[Update], weights: Sequence[float], states: Sequence[State], key: Key, *, look: bool
    ) -> RoundExchange:
        """Send ``updates``, one per client in the order of partitions, with the clients' ``weights`` in the mean.

        ``key`` is the round's key for purpose "uplink"; ``look`` asks for the figures that cost extra time.

        Raises
        ------
        NonFiniteUpdate
            When an update holds NaN or infinity.
        """


@dataclass(frozen=True)
class Separate:
    """Every client encodes by itself: what the drop-in pair does."""

    codec: Codec

    def __post_init__(self) -> None:
        if self.codec.exposes:
            run_it_on_an_engine(f"nothing is captured that {self.codec!r} could send")
        if self.codec.phases != 1:
            run_it_on_an_engine(f"the {self.codec.phases} exchanges of {self.codec!r} are not made")

    @property
    def lossless(self) -> bool:
        """Whether the codec is."""
        return self.codec.lossless

    def start(self, layout: Layout, clients: int) -> list[State]:
        """Return the codec's initial states."""
        return [self.codec.init(layout) for _ in range(clients)]

    def round(
        self, updates: Sequence[Update], weights: Sequence[float], states: Sequence[State], key: Key, *, look: bool
    ) -> RoundExchange:
        """Encode each update with its client's key and state; see :class:`RoundScheme`."""
        began = time.thread_time()
        layout = updates[0].layout
        total = sum(weights)
        out = _nothing(layout)
        after: list[State] = []
        kept: list[int] = []
        uplink = 0
        for i, (update, weight, state) in enumerate(zip(updates, weights, states, strict=True)):
            # A codec without memory starts every message from its initial state.
            before = state if self.codec.remembers else self.codec.init(layout)
            frame, state = self.codec.encode(update, before, key.at(partition=i))
            uplink += len(frame)
            content = self.codec.open(frame, layout)
            self.codec.gather(content, weight / total, out)
            # A frame carries the dense rest as well, which no codec compresses.
            kept.append(sum(t.values.k for t in content.tensors) - layout.dense_size)
            after.append(state)
        self.codec.conclude(out)
        seconds = time.thread_time() - began
        downlink = self._downlink(out, key) * len(updates)
        return RoundExchange(out.vector, after, uplink, downlink, _union(out), kept, seconds=seconds)

    def _downlink(self, mean: Update, key: Key) -> int:
        inner = self.codec
        # Wrappers such as error feedback are around the codec that chooses the support.
        while hasattr(inner, "codec"):
            inner = inner.codec
        if inner.linear and getattr(inner, "shared", False):
            # All clients redraw the support from the round's seed: only values travel.
            frame, _ = inner.encode(mean, inner.init(mean.layout), key.at(partition=0))
            return len(frame)
        return len(sum_frame(mean))


@dataclass(frozen=True)
class Led:
    """All clients send on one support: the choice of the round's leader, or, as an oracle, that of the mean.

    Parameters
    ----------
    codec : ScaleCom
        Selector, memory and filter.
    oracle : bool
        Select from the mean of all clients' memory plus update, which nobody can see before it was sent: the bound that
        no leader beats. Its index block counts as if the leader had sent it.

    Notes
    -----
    In round t, from 1, the client ``(t - 1) mod N`` leads, in the order of partitions. Sending on a fixed support with
    the codec's filter is error feedback around :class:`~fedcomp.codecs.scalecom.FixedSupport`, as in the codec itself.
    """

    codec: ScaleCom
    oracle: bool = False
    lossless: bool = field(default=False, init=False)

    def start(self, layout: Layout, clients: int) -> list[State]:
        """Return the codec's initial states."""
        return [self.codec.init(layout) for _ in range(clients)]

    def round(
        self, updates: Sequence[Update], weights: Sequence[float], states: Sequence[State], key: Key, *, look: bool
    ) -> RoundExchange:
        """Choose the support, send on it, add up; see :class:`RoundScheme`."""
        began = time.thread_time()
        layout = updates[0].layout
        codec, total, clients = self.codec, sum(weights), len(updates)
        leader = (key.round - 1) % clients
        if self.oracle:
            chosen_from = _weighted_mean([_total(s, u) for s, u in zip(states, updates, strict=True)], weights)
        else:
            chosen_from = _total(states[leader], updates[leader])
        supports = codec.choose_from(chosen_from, layout, key.at(partition=leader))
        on_support = codec.on(supports, key.round)
        feedback = ErrorFeedback(on_support, beta=codec.beta if codec.memory else 0.0, norm_guard=codec.norm_guard)
        out = _nothing(layout)
        after: list[State] = []
        block = len(support_frame(supports, codec, layout))
        uplink = block
        for i, (update, weight, state) in enumerate(zip(updates, weights, states, strict=True)):
            frame, sent = feedback.encode(update, state, key.at(partition=i))
            uplink += len(frame)
            on_support.accumulate(frame, weight / total, out)
            after.append(sent)
        seconds = time.thread_time() - began
        answer, _ = codec.mean(supports, key.round).encode(out, {}, key)
        return RoundExchange(
            out.vector,
            after,
            uplink,
            # The leader is not sent the support that it chose.
            (clients - 1) * block + clients * len(answer),
            _union(out),
            [sum(s.size for s in supports)] * clients,
            self._overlap(updates, states, weights, supports) if look else math.nan,
            seconds,
        )

    def _overlap(
        self,
        updates: Sequence[Update],
        states: Sequence[State],
        weights: Sequence[float],
        supports: Sequence[NDArray[np.int64]],
    ) -> float:
        layout = updates[0].layout
        parts = self.codec.leader.stretches(layout)
        end = layout.compressed_size
        chosen = np.zeros(end, np.bool_)
        for stretch, indices in zip(parts, supports, strict=True):
            chosen[indices + stretch.start] = True
        mean = np.zeros(end)
        for state, update, share in zip(
            states, updates, np.asarray(weights, np.float64) / np.sum(weights), strict=True
        ):
            mean += share * _total(state, update)[:end]
        energy, best = mean**2, np.zeros(end, np.bool_)
        for stretch in parts:
            k = int(np.count_nonzero(chosen[stretch.slice]))
            # Stable, so that ties go to the lowest index, as they do when a leader selects.
            best[np.argsort(-energy[stretch.slice], kind="stable")[:k] + stretch.start] = True
        return float(np.count_nonzero(best & chosen)) / max(1, int(np.count_nonzero(best)))


@dataclass
class Based:
    """All clients send in one low-rank basis, which follows from the last step.

    One object is one run: it keeps the last step, as the server does, until :meth:`start` forgets it.

    Parameters
    ----------
    codec : PowerSGD
        Rank, form and memory.
    """

    codec: PowerSGD
    lossless: bool = field(default=False, init=False)
    _last: tuple[Basis, Sequence[Part]] | None = field(default=None, init=False, repr=False)

    def start(self, layout: Layout, clients: int) -> list[State]:
        """Return the codec's initial states."""
        self._last = None
        return [self.codec.init(layout) for _ in range(clients)]

    def round(
        self, updates: Sequence[Update], weights: Sequence[float], states: Sequence[State], key: Key, *, look: bool
    ) -> RoundExchange:
        """Find the basis, send in it, add up; see :class:`RoundScheme`."""
        began = time.thread_time()
        layout = updates[0].layout
        codec, shares = self.codec, [weight / sum(weights) for weight in weights]
        keys = [key.at(partition=i) for i in range(len(updates))]
        waiting = [codec.begin(u, s, k) for u, s, k in zip(updates, states, keys, strict=True)]
        # Every round makes a version of the model, and the initial one is the first.
        drawn = basis_key(key.seed, key.round)
        basis = codec.start(self._last, layout, drawn)
        uplink = block = 0
        if codec.two_exchanges:
            firsts = [codec.first(state, basis, layout, k) for state, k in zip(waiting, keys, strict=True)]
            found = codec.mean(basis)
            factors = found.coefficients(found.sum_frame(_summed(found, firsts, shares, layout)), layout)
            basis = codec.between(factors, layout, drawn)
            uplink, block = sum(map(len, firsts)), len(basis.frame())
        sent = [codec.send(state, basis, layout, k) for state, k in zip(waiting, keys, strict=True)]
        on = codec.on(basis)
        out = _summed(on, [frame for frame, _ in sent], shares, layout)
        step = on.sum_frame(out)
        on.conclude(out)
        seconds = time.thread_time() - began
        self._last = basis, codec.mean(basis).coefficients(step, layout)
        return RoundExchange(
            out.vector,
            [codec.correct(state, step, layout) for _, state in sent],
            uplink + sum(len(frame) for frame, _ in sent),
            len(updates) * (len(step) + block),
            _union(out),
            [sum(t.values.k for t in on.open(frame, layout).tensors) - layout.dense_size for frame, _ in sent],
            seconds=seconds,
        )


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
        Bytes of the autoencoder's weights that the clients were sent so far; rounds count them as downlink.
    """

    codec: LGC
    stages: tuple[int, int] = (5, 55)
    training: AutoencoderTraining = field(default_factory=AutoencoderTraining)
    lossless: bool = field(default=False, init=False)
    weights: int = field(default=0, init=False)
    losses: list[float] = field(default_factory=list, init=False)
    _coder: AutoencoderTraining = field(init=False, repr=False)
    _lent: set[tuple[int, int]] = field(default_factory=set, init=False, repr=False)

    def start(self, layout: Layout, clients: int) -> list[State]:
        """Return the codec's initial states."""
        self._coder, self.weights, self.losses, self._lent = self.training.afresh(self.training.seed), 0, [], set()
        return [self.codec.init(layout) for _ in range(clients)]

    def round(
        self, updates: Sequence[Update], weights: Sequence[float], states: Sequence[State], key: Key, *, look: bool
    ) -> RoundExchange:
        """Choose the support, send on it, decode; see :class:`RoundScheme`."""
        began = time.thread_time()
        layout, clients = updates[0].layout, len(updates)
        codec, shares = self._stage(key.round), [weight / sum(weights) for weight in weights]
        keys, leader = [key.at(partition=i) for i in range(clients)], (key.round - 1) % clients
        waiting = [codec.begin(u, s, k) for u, s, k in zip(updates, states, keys, strict=True)]
        supports = codec.choose(waiting[leader], layout, keys[leader])
        block, out = len(support_frame(supports, codec, layout)), _nothing(layout)
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
        seconds = time.thread_time() - began
        answer, _ = codec.mean(supports, key.round).encode(out, {}, key)
        sizes = [sum(s.size for s in supports)] * clients
        lent = self._lend(codec, leader, clients)
        downlink = (clients - 1) * block + clients * len(answer) + lent
        return RoundExchange(out.vector, sent, uplink + block, downlink, _union(out), sizes, seconds=seconds)

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

    def _lend(self, codec: LGC, leader: int, clients: int) -> int:
        """Return the bytes of weights that go out in a round: once to each client that needs them."""
        if not codec.sends_latents:
            return 0
        needs = {(i, 0) for i in range(clients) if codec.instance == "ring" or i == leader}
        if codec.ef == "decoded":
            needs |= {(i, 1) for i in range(clients)}
        sizes = len(self._coder.encoder.frame()), len(self._coder.decoder(None).frame())
        lent = sum(sizes[half] for _, half in needs - self._lent)
        self._lent |= needs
        self.weights += lent
        return lent


def scheme_of(codec: Codec) -> RoundScheme:
    """Return the scheme in which ``codec`` is used.

    Raises
    ------
    ConfigError
        For a codec of what is captured while a client trains, which nobody does here, and for one whose exchanges are
        not written here.
    """
    if isinstance(codec, PowerSGD):
        return Based(codec)
    if isinstance(codec, LGC):
        return Learned(codec)
    return Led(codec) if isinstance(codec, ScaleCom) else Separate(codec)


def sum_frame(mean: Update) -> wire.Frame:
    """Return the shortest plain frame of a mean: of each compressible tensor its non-zero values and their indices, or
    all values where that is shorter; then the dense rest."""
    layout = mean.layout
    tensors = [_sum_tensor(mean.vector[s.slice], s) for s in stretches(layout, "layer")]
    rest = mean.vector[layout.compressed_size :]
    return wire.encode([*tensors, wire.dense(rest)] if rest.size else tensors)


def _sum_tensor(values: Vector, stretch: Stretch) -> wire.Tensor:
    indices = np.flatnonzero(values)
    # A bitmap, the cheapest list of many indices, takes a bit per element: 1/32 of the values.
    if indices.size > stretch.size * 31 // 32:
        return wire.dense(values)
    return wire.sparse((stretch.size,), indices, values[indices])


def _total(state: State, update: Update) -> Vector:
    """Return p, memory plus update: what a leader selects from."""
    return state["memory"] + update.vector


def _weighted_mean(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Return the mean in float64, rounded once."""
    total = np.zeros(vectors[0].size)
    for vector, weight in zip(vectors, weights, strict=True):
        total += weight / sum(weights) * vector
    return total.astype(np.float32)


def _summed(codec: Codec, frames: Sequence[wire.Frame], shares: Sequence[float], layout: Layout) -> Update:
    out = _nothing(layout)
    for frame, share in zip(frames, shares, strict=True):
        codec.gather(frame, share, out)
    return out


def _nothing(layout: Layout) -> Update:
    # -0.0 is the exact identity of addition, as in the strategy: the first contribution is stored, not added to +0.0.
    return Update(np.full(layout.size, -0.0, np.float32), layout)


def _union(mean: Update) -> int:
    return int(np.count_nonzero(mean.vector[: mean.layout.compressed_size]))
