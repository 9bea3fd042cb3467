"""Flower's differential-privacy wrappers together with compression: which of them keep their guarantee.

The client-side wrappers size their noise for updates that a mod clipped on the client, before the codec. Memory that is
added after the clip, and values that are rounded up, make an update longer than that noise covers. So they are accepted
with codecs alone that never enlarge an update. The server-side wrappers clip what reaches the server. Inside of
:class:`~fedcomp.strategies.compressed.Compressed` that is the decoded update, whatever the codec; around it they would
be given frames, find no arrays in them, and clip nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Final

from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)

from fedcomp.codecs import Codec
from fedcomp.errors import ConfigError
from fedcomp.strategies.wrapping import held

_CLIPPED_BY_CLIENTS: Final = (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyClientSideAdaptiveClipping,
)
_CLIPPED_HERE: Final = (
    DifferentialPrivacyServerSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
)
_REMEDY: Final = (
    "Use Compressed(DpFedAvg(FedAvg(...), clip=..., noise_multiplier=...), codec), which clips what arrived"
)


def promises(inner: Strategy) -> bool:
    """Whether one of Flower's privacy wrappers is anywhere inside of a strategy."""
    return any(isinstance(found, _CLIPPED_BY_CLIENTS + _CLIPPED_HERE) for found in held(inner))


def require_clip_holds(inner: Strategy, codec: Codec) -> None:
    """Refuse a client-side wrapper anywhere inside of a strategy when ``codec`` may lengthen what clients clipped.

    Parameters
    ----------
    inner : Strategy
        The strategy around which updates are compressed.
    codec : Codec
        What clients send, with the memory that is put around it.

    Raises
    ------
    ConfigError
    """
    for strategy in held(inner):
        _require_kept(strategy, codec)


def require_clip_is_seen(strategy: Strategy, codec: Codec) -> None:
    """Refuse, before a message leaves, wrappers around ``strategy`` that would clip nothing, or too early.

    Called from a hook: a wrapper does not tell the strategy in it that it is there, but it is what calls the hook.

    Raises
    ------
    ConfigError
    """
    # By their attributes: a loop that runs on behalf of a strategy shares them with it.
    inside = {id(vars(found)) for found in held(strategy)}
    for caller in _callers():
        if id(vars(caller)) in inside:
            continue
        # Around the pair as well as inside it: the clients clip before the codec either way.
        _require_kept(caller, codec)
        if isinstance(caller, _CLIPPED_HERE):
            raise ConfigError(
                f"{type(caller).__name__} wraps {type(strategy).__name__} and would receive compressed frames "
                "instead of arrays: it would add noise and clip nothing. Put it inside: "
                f"{type(strategy).__name__}({type(caller).__name__}(FedAvg(...), ...), codec)"
            )


def _require_kept(strategy: Strategy, codec: Codec) -> None:
    if isinstance(strategy, _CLIPPED_BY_CLIENTS) and not codec.never_enlarges:
        why = "adds memory after the clip" if codec.remembers else "may make a clipped update longer"
        raise ConfigError(
            f"{type(strategy).__name__} sizes its noise for updates that clients clipped, but {codec!r} {why}: the "
            f"noise would be too small. {_REMEDY}; or a codec that never enlarges an update, without memory, such as "
            "TopK(...) with feedback=False"
        )


def _callers() -> Iterator[Strategy]:
    """Yield the strategies whose methods are being executed, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        # By the name of a method's first parameter: a frame has no other link to its object.
        own = frame.f_locals.get("self")
        if isinstance(own, Strategy):
            yield own
        frame = frame.f_back
