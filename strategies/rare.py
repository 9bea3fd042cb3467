"""Rare exchanges as presets of the drop-in pair: DiLoCo and SparseLoCo.

Clients take many local steps between two exchanges; how many, and with which optimizer, is the app's
(:func:`fedcomp.clients.optimizer.kept` keeps that optimizer's state). Douillard et al. 2023, "DiLoCo: Distributed
low-communication training of language models" (arXiv:2311.08105; recalled). "Communication efficient LLM pre-training
with SparseLoCo" (2025; abstract read, details recalled): of every 4,096 values the 64 largest in two bits, error
feedback that decays, and no outer momentum. Frames of one bit in both directions, the outer step on top of SparseLoCo,
and the rates (0.9, 0.5) are derived here.
"""

from __future__ import annotations

from typing import Any, Final

from fedcomp.codecs import EDEN, ChunkTopK, Codec, ErrorFeedback
from fedcomp.layout import DensityPolicy
from fedcomp.strategies.compressed import DEFAULT_CODEC, Compressed
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.outer import Nesterov

OUTER: Final = (0.9, 0.5)
"""Learning rate and momentum of the outer step, for runs below about a hundred rounds."""

ONE_BIT_DOWN: Final = EDEN(bits=1, scale="least")
"""The downlink of :class:`DiLoCo`: nodes hold replicas, so that the error has to shrink, not to average out."""

SIXTEENTH_DOWN: Final = ChunkTopK(density=1 / 16, values="q2")
"""The downlink of :class:`SparseLoCo`: a mean of several clients' choices has more values than each of them."""


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
