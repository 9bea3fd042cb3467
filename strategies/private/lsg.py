"""LSG-style training as a Flower strategy: :mod:`fedcomp.systems.private.lsg` over messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedcomp.codecs import Codec
from fedcomp.errors import ConfigError
from fedcomp.flower.records import to_arrays
from fedcomp.layout import Layout
from fedcomp.stateful import StatePart
from fedcomp.strategies.private.strategy import PrivateStrategy
from fedcomp.systems.private.lsg import KeptCoordinates, LowRank


class Lsg(PrivateStrategy, KeptCoordinates):
    """Federated averaging of clipped, low-rank and masked updates with noise.

    Do not put it inside ``Compressed``: it has its own encoding. A client without the mod replies with a dense model;
    the trusted server then shortens and clips it as that client would have.

    Parameters
    ----------
    inner : Strategy
        One of Flower's weighted means, with ``fraction_evaluate=0.0``.
    settings : LowRank
    **promise
        As :class:`fedcomp.systems.private.rule.Private`. The sensitivity is the clip norm; twice that with "replace".

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> settings = LowRank(clip=1.0, rank=8, keep=0.5)
    >>> strategy = Lsg(FedAvg(fraction_evaluate=0.0), settings, noise_multiplier=1.0, population=1000)
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "kept": StatePart(lambda owner: dict(owner.alone.state), lambda owner, state: owner.alone.state.update(state))
    }

    def __init__(self, inner: Strategy, settings: LowRank, **promise: Any) -> None:
        if not isinstance(settings, LowRank):
            raise ConfigError(f"settings={settings!r} is not valid: LowRank(clip=..., rank=...)")
        super().__init__(inner, settings=settings, **promise)
        # No pair around this tells what is released: it is always the kept coordinates.
        self._released = self._kept

    def program(self) -> LowRank:
        """Return the system that its clients take part in."""
        return self.settings

    def check_codec(self, codec: Codec) -> None:
        """Refuse any codec: what is sent is decided by the system."""
        raise ConfigError("Lsg sends bytes of its own; use it without Compressed, or DpFedAvg with a codec")

    def _kept(self, arrays: ArrayRecord, server_round: int) -> Layout:
        return self.settings.released(Layout.of(to_arrays(arrays, copy=False)), server_round)
