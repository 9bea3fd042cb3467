"""What works alone and not together: one warning each, when the strategy is built and nothing was trained in vain."""

from __future__ import annotations

from typing import Final

from flwr.serverapp.strategy import Strategy

from fedcomp.codecs import Codec
from fedcomp.flower.logs import log
from fedcomp.layout import Layout
from fedcomp.rng import Key
from strategies.means import MEANS, is_mean
from strategies.wrapping import held

_LARGE: Final = Layout.flat(1 << 16)
"""A tensor that no policy sends dense: codecs are asked what they do with it."""


def warn_of_pairing(inner: Strategy, codec: Codec) -> None:
    """Warn of a rule that looks at single replies beside a codec whose coordinates each client chooses for itself.

    A median of replies most of which are zero is zero, and a frame that the rule discards is acknowledged all the same:
    what was in it is lost. ``python -m experiments.run sparsifiers`` prints how far each rule gets with each kind of
    codec.
    """
    rule = held(inner)[-1]
    if is_mean(rule) or not codec.sparse(_LARGE) or codec.common_support(_LARGE, Key(0)) is not None:
        return
    log.warning(
        "%s looks at single replies, and with %r each client lists coordinates of its own: most replies are zero at "
        "most coordinates, and what the rule discards is lost. Use RandomK or RandomBlock, whose coordinates all "
        "clients share, a codec that sends all of them (QSGD, ScaledSign), or a weighted mean (%s)",
        type(rule).__name__,
        codec,
        ", ".join(MEANS),
    )
