"""Presets of the drop-in pair for language models: DiLoCo and SparseLoCo, which exchange rarely, and DeMo.

Clients take many local steps between two exchanges; how many, and with which optimizer, is the app's
(:func:`fedcomp.clients.optimizer.kept` keeps that optimizer's state). Douillard et al. 2023, "DiLoCo: Distributed
low-communication training of language models" (arXiv:2311.08105; recalled). "Communication efficient LLM pre-training
with SparseLoCo" (2025; abstract read, details recalled): of every 4,096 values the 64 largest in two bits, error
feedback that decays, and no outer momentum. Frames of one bit in both directions, the outer step on top of SparseLoCo,
and the rates (0.9, 0.5) are derived here.

DeMo (Peng, Quesnelle, Kingma 2024, arXiv:2411.19870; abstract read, details recalled) exchanges after every step what
is largest of a momentum in the domain of cosines. That a client's momentum is error feedback which decays is derived
here: ``m ← β m + g``, send q, ``m ← m - q`` are its three lines.
"""

from __future__ import annotations

from typing import Any, Final

from fedcomp import params
from fedcomp.codecs import DCT, EDEN, ChunkTopK, Codec, Domain, ErrorFeedback, ScaledSign
from fedcomp.layout import DensityPolicy
from fedcomp.strategies.compressed import DEFAULT_CODEC, Compressed
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.outer import Nesterov, SignStep

OUTER: Final = (0.9, 0.5)
"""Learning rate and momentum of the outer step, for runs below about a hundred rounds."""

ONE_BIT_DOWN: Final = EDEN(bits=1, scale="least")
"""The downlink of :class:`DiLoCo`: nodes hold replicas, so that the error has to shrink, not to average out."""

SIXTEENTH_DOWN: Final = ChunkTopK(density=1 / 16, values="q2")
"""The downlink of :class:`SparseLoCo`: a mean of several clients' choices has more values than each of them."""

SIGNS_DOWN: Final = ScaledSign()
"""The downlink of :class:`DeMo`: it carries a step of one length for every value to the last bit of float32. Where some
values of a tensor do not move, those of the replicas are off by less than a step (measured)."""


def cosines(kept: int = 2, chunk: int = 64, values: str = "q2", decay: float = 0.95) -> ErrorFeedback:
    """Return the uplink of :class:`DeMo`, whose memory is the client's momentum."""
    kept = params.integer("kept", kept, low=1)
    transform = DCT(chunk=chunk)
    inner = ChunkTopK(density=min(1.0, kept / transform.chunk), chunk=chunk, values=values)
    return ErrorFeedback(Domain(transform, inner), decay=decay)


class DiLoCo(Compressed):
    """Many local steps, one bit a value in both directions, and an outer step of Nesterov's momentum.

    Short for ``Compressed(Nesterov(*outer, **flower), codec, downlink)``. Without ``codec`` and ``downlink`` (None),
    whole models travel, as published.

    Parameters
    ----------
    codec : Codec or dict, optional
        What clients send; one without memory, so that a node keeps its optimizer's state alone.
    downlink : Codec or dict, optional
        What the server sends; a contraction. None sends whole models.
    outer : (float, float)
        Learning rate and momentum of :class:`~fedcomp.strategies.outer.Nesterov`. The published (0.7, 0.9) are for
        runs of hundreds of rounds.
    policy, guard, seed
        Of :class:`~fedcomp.strategies.compressed.Compressed`.
    **flower
        Of Flower's FedAvg, such as ``fraction_train`` and ``min_train_nodes``.

    Examples
    --------
    >>> DiLoCo(fraction_evaluate=0.0)
    DiLoCo(Nesterov): EDEN(), downlink=EDEN(scale='least')
    """

    def __init__(
        self,
        codec: Codec | dict[str, Any] = DEFAULT_CODEC,
        downlink: Codec | dict[str, Any] | None = ONE_BIT_DOWN,
        *,
        outer: tuple[float, float] = OUTER,
        policy: DensityPolicy | None = None,
        guard: Norms | None = None,
        seed: int = 0,
        **flower: Any,
    ) -> None:
        super().__init__(Nesterov(*outer, **flower), codec, downlink, policy=policy, guard=guard, seed=seed)


class SparseLoCo(Compressed):
    """Many local steps, of every chunk a few values in two bits, error feedback that decays, and an outer step.

    Short for ``Compressed(Nesterov(*outer, **flower), ErrorFeedback(ChunkTopK(...), decay=decay), downlink)``. The
    outer step is not the paper's; ``outer=(1.0, 0.0)`` leaves it out. Clients must return: what a client did not send
    waits for it.

    Parameters
    ----------
    density, chunk, values
        Of :class:`~fedcomp.codecs.ChunkTopK`.
    decay : float
        What remains of a client's memory when the next round adds to it, in [0, 1].
    outer : (float, float)
        Learning rate and momentum of :class:`~fedcomp.strategies.outer.Nesterov`.
    downlink : Codec or dict, optional
        What the server sends; a contraction. None sends whole models.
    policy, guard, seed, **flower
        Of :class:`DiLoCo`.

    Examples
    --------
    >>> SparseLoCo(fraction_evaluate=0.0).codec
    ErrorFeedback(codec=ChunkTopK(density=0.015625, values='q2'), decay=0.95)
    """

    def __init__(
        self,
        density: float = 1 / 64,
        chunk: int = 4096,
        values: str = "q2",
        decay: float = 0.95,
        downlink: Codec | dict[str, Any] | None = SIXTEENTH_DOWN,
        *,
        outer: tuple[float, float] = OUTER,
        policy: DensityPolicy | None = None,
        guard: Norms | None = None,
        seed: int = 0,
        **flower: Any,
    ) -> None:
        codec = ErrorFeedback(ChunkTopK(density=density, chunk=chunk, values=values), decay=decay)
        super().__init__(Nesterov(*outer, **flower), codec, downlink, policy=policy, guard=guard, seed=seed)


class DeMo(Compressed):
    """One local step of plain SGD, the largest cosines of every client's momentum, a step by the sign of their mean.

    Short for ``Compressed(SignStep(lr, falls, **flower), codec, downlink)`` with the codec ``ErrorFeedback(Domain(
    DCT(chunk), ChunkTopK(...)), decay=decay)``. This error feedback is the momentum: let clients take one step of plain
    SGD, without momentum, at any rate that stays the same. A sign has no length, so that the rate does not matter.

    Parameters
    ----------
    kept : int
        Cosines of every chunk that travel, at least 1.
    chunk : int
        Values of a tensor that are transformed together, a power of two from 2 to 1024.
    values : str
        How cosines travel: see :class:`~fedcomp.codecs.ChunkTopK`.
    decay : float
        beta of the momentum, in [0, 1].
    downlink : Codec or dict, optional
        What the server sends; a contraction. None sends whole models.
    lr, falls
        Of :class:`~fedcomp.strategies.outer.SignStep`.
    policy, guard, seed, **flower
        Of :class:`DiLoCo`.

    Examples
    --------
    >>> DeMo(lr=0.002, fraction_evaluate=0.0).codec.codec
    Domain(transform=DCT(), codec=ChunkTopK(density=0.03125, chunk=64, values='q2'))
    """

    def __init__(
        self,
        kept: int = 2,
        chunk: int = 64,
        values: str = "q2",
        decay: float = 0.95,
        downlink: Codec | dict[str, Any] | None = SIGNS_DOWN,
        *,
        lr: float = 0.001,
        falls: int = 0,
        policy: DensityPolicy | None = None,
        guard: Norms | None = None,
        seed: int = 0,
        **flower: Any,
    ) -> None:
        codec = cosines(kept, chunk, values, decay)
        super().__init__(SignStep(lr, falls, **flower), codec, downlink, policy=policy, guard=guard, seed=seed)
