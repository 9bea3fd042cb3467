"""Warnings about combinations that do not work together, one each, when the strategy is built."""

from __future__ import annotations

from typing import Final

from flwr.serverapp.strategy import FedAdagrad, Strategy

from fedcomp.codecs import Codec
from fedcomp.flower.logs import log
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.strategies.adaptive import has_moments
from fedcomp.strategies.means import MEANS, adds_to_mean
from fedcomp.strategies.wrapping import held

_LARGE: Final = Layout.flat(1 << 16)
"""A tensor that no policy sends dense: codecs are asked what they do with it."""


def warn_of_pairing(inner: Strategy, codec: Codec) -> None:
    """Warn of what the codec and the strategy, or the clients' training, are likely to spoil for each other."""
    _warn_of_own_coordinates(held(inner)[-1], codec)
    _warn_of_momentum(held(inner)[-1], codec)
    _warn_of_adagrad(held(inner)[-1], codec)


def _warn_of_adagrad(rule: Strategy, codec: Codec) -> None:
    """Warn of steps that are divided by what arrived so far: where little arrived they are as long as the first one."""
    if isinstance(rule, FedAdagrad) and codec.sparse(_LARGE):
        log.warning(
            "%s divides a coordinate's step by what has arrived for it so far; with %r most coordinates are updated "
            "seldom, so their steps stay as long as the first one: training may collapse within a few rounds. Use "
            "EDEN() or "
            "QSGD(levels=7), or FedAdam",
            type(rule).__name__,
            codec,
        )


def _warn_of_momentum(rule: Strategy, codec: Codec) -> None:
    """Warn of momentum correction: it lengthens the step, and clients and server may have momentum of their own.

    With one step of plain SGD a round it is momentum SGD, made for sparse updates (Lin et al. 2018). A client's update
    of many steps already has the length that averaging wants.
    """
    if codec.gain <= 1.0:
        return
    # The attribute is FedAvgM's, whose 0 means plain averaging.
    doubled = has_moments(rule) or bool(getattr(rule, "server_momentum", None))
    log.warning(
        "%r makes what clients send up to %g times as long in the long run. This acts as momentum for clients that "
        "make one step of plain SGD a round; with several steps a round, or with momentum on the clients, it adds to "
        "theirs: tune the clients' step size with it, or leave momentum out%s",
        codec,
        round(codec.gain, 1),
        f". {type(rule).__name__} has momentum, too: use FedAvg" if doubled else "",
    )


def _warn_of_own_coordinates(rule: Strategy, codec: Codec) -> None:
    """Warn of a rule that looks at single replies beside a codec whose coordinates each client chooses for itself.

    A median of replies most of which are zero is zero, and a frame that the rule discards is acknowledged all the same:
    what was in it is lost. ``python -m experiments.run sparsifiers`` prints how far each rule gets with each kind of
    codec.
    """
    # The question is whether a support is drawn for all, not which one, so any key will do.
    if adds_to_mean(rule) or not codec.sparse(_LARGE) or codec.common_support(_LARGE, Key(0)) is not None:
        return
    log.warning(
        "%s looks at single replies, but with %r each client chooses its own coordinates: most replies are zero at "
        "most coordinates, and what the rule discards is lost. Use RandomK or RandomBlock, whose coordinates all "
        "clients share, a codec that sends all of them (QSGD, ScaledSign), or a weighted mean (%s)",
        type(rule).__name__,
        codec,
        ", ".join(MEANS),
    )
