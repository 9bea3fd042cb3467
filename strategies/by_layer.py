"""Factor sharing layer by layer: :class:`fedcomp.systems.factors.FactorSharing` over Flower's messages, one exchange
per layer.

A Flower client answers a message when it is done, so that every exchange but the first costs a round trip and hides
nothing: :func:`fedcomp.timing.pipeline.layered` says what it costs, and what it would gain if parts could leave while
the rest is still computed.
"""

from __future__ import annotations

from fedcomp.errors import ConfigError
from fedcomp.flower.privacy import find_private
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.flower_dp import promises
from fedcomp.strategies.server import Server
from fedcomp.systems.factors import DOWN, FactorSharing


class LayerByLayer(Server):
    """Collect a round's factors layer by layer, with one exchange per layer; the result is the same.

    Parameters
    ----------
    inner : Compressed
        With :class:`fedcomp.codecs.Factors`, alone or inside error feedback. This strategy uses its strategy, codecs
        and options, and runs the rounds. With ``downlink=Factors(mode="dad", ...)`` the server sends the factors of all
        clients where they are shorter than the model.

    Raises
    ------
    ConfigError
        For another inner strategy, other codecs, private strategies, and a first model that nodes are to make.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.codecs import Factors
    >>> strategy = LayerByLayer(Compressed(FedAvg(), Factors(rank=4), feedback=False))
    """

    def __init__(self, inner: Compressed) -> None:
        if not isinstance(inner, Compressed):
            raise ConfigError(f"inner is {inner!r}; expected Compressed(strategy, codec), whose frames are divided")
        if find_private(inner.inner) is not None or promises(inner.inner):
            raise ConfigError(
                f"{type(inner.inner).__name__} promises privacy by clipping and noising whole updates, but this "
                "strategy asks for parts of them"
            )
        if inner.first_model_at_nodes:
            raise ConfigError("first_model_at_nodes=True does not fit: this strategy sends the first model whole")
        down = inner.downlink == DOWN
        super().__init__(FactorSharing(inner.codec, by_layer=True, down=down), inner.inner, **inner.surroundings)
