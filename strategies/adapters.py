"""Adapters over Flower: any strategy whose clients fine-tune a large model by LoRA (:mod:`fedcomp.adapters`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from flwr.serverapp.strategy import Strategy

from fedcomp.adapters import PEFT, AdapterNames
from fedcomp.codecs import EDEN, Codec
from fedcomp.strategies.compressed import DEFAULT_CODEC, Compressed

DEFAULT_DOWNLINK: Final = EDEN(bits=1, scale="least")
"""What goes down unless another codec is named."""


class Adapters(Compressed):
    """Average LoRA adapters exactly, and send half of them, compressed both ways.

    Of each adapter B A one half, A, is the same everywhere: server and clients draw it from the seed, and it never
    travels. Clients train B, and the mean of B is the mean of the products. The app's record holds both halves, under
    its own names; it must not train A (:func:`fedcomp.adapters.freeze`).

    Parameters
    ----------
    inner : Strategy
        As of :class:`~fedcomp.strategies.compressed.Compressed`. Its hooks see the tensors that travel; its loop,
        ``evaluate_fn`` and the result have the whole adapters.
    codec : Codec or dict, optional
        The codec of the uplink. Default: EDEN with one bit per value and without memory, also for sampled clients.
    downlink : Codec or dict, optional
        The codec of the downlink. Default: one bit per value, scaled to be a contraction. None sends B as it is.
    also : sequence of str
        Names, or shell patterns, of tensors beside the adapters that may travel. Others are refused by name, so that no
        table of the base model travels by accident; magnitude vectors of DoRA may travel.
    pairs : sequence of (str, str)
        Parts of names that tell the two halves of an adapter apart; default PEFT's.
    base : str
        :func:`fedcomp.flower.records.base_digest` of the base model. Clients that know theirs,
        ``compression(base=...)``, refuse to train another one. Default: nobody compares.
    packed : bool
        Send whole models in fewer bytes and without loss; on, since no client of adapters can do without
        :func:`~fedcomp.clients.compressed.compression`.
    **options
        As of :class:`~fedcomp.strategies.compressed.Compressed`.

    Raises
    ------
    ConfigError
        As :class:`~fedcomp.strategies.compressed.Compressed`; with the first model by name for what may not travel.

    Notes
    -----
    Which half is A follows from the first model, not from names: the one that is not zero. All clients must use the
    same scale alpha / r, which is in no message. Ratios in reports compare with B in float32.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> strategy = Adapters(FedAvg())
    >>> strategy.codec, strategy.downlink
    (EDEN(), EDEN(scale='least'))
    """

    def __init__(
        self,
        inner: Strategy,
        codec: Codec | dict[str, Any] = DEFAULT_CODEC,
        downlink: Codec | dict[str, Any] | None = DEFAULT_DOWNLINK,
        *,
        also: Sequence[str] = (),
        pairs: Sequence[tuple[str, str]] = PEFT,
        base: str = "",
        packed: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(inner, codec, downlink, packed=packed, **options)
        self.adapters = AdapterNames(tuple(also), tuple(pairs), base)

    def identity(self) -> dict[str, str]:
        """Return what must not change within a run."""
        return {**super().identity(), "adapters": repr(self.adapters)}
