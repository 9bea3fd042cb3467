"""Systems with coded rounds, around the drop-in pair or around the inner strategy itself."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import Any, Final

from fedcomp.strategies.coded.settings import CodedSettings, SumOptions
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.pair_systems import FIXED_POINT, build_pair
from fedcomp.strategies.parts import PAIR_PREFIXES, Settings, make_inner
from fedcomp.strategies.system import System, arguments, settings_of
from fedcomp.systems.coded.gradients import GradientCode

CODED: Final[Settings] = MappingProxyType(
    {
        **settings_of(CodedSettings, "symbols", "shards", "loss", "target"),
        **settings_of(CodedSettings, "share_timeout", "collect_timeout", "spool"),
    }
)
"""Settings of every system around the pair; 0 and the empty text leave the choice to :class:`CodedFedAvg`."""


def _around_pair(settings: Settings, seed: int, *, construction: str, names: tuple[str, ...]) -> CodedFedAvg:
    own = arguments(CodedSettings, settings, [*CODED, *names])
    inner = build_pair(settings, seed, codec=str(settings["codec"]))
    return CodedFedAvg(inner, construction=construction, seed=seed, **own)


def _around_mean(settings: Settings, seed: int, *, construction: str, names: tuple[str, ...]) -> CodedFedAvg:
    """Return a construction that adds updates itself: around the inner strategy, with nothing compressed."""
    # None of these is unset by default but the timeout, for which 0 stands.
    own = {name: settings[name] for name in names} | arguments(CodedSettings, settings, ["collect_timeout"])
    return CodedFedAvg(make_inner(settings), construction=construction, seed=seed, **own)


def _system(name: str, title: str, paper: str, summary: str, construction: str, own: Settings, **pair: Any) -> System:
    """Return a construction with settings of its own; around the pair where that has any."""
    make = _around_pair if pair else _around_mean
    build = partial(make, construction=construction, names=tuple(own))
    if not pair:
        return System(name, title, paper, summary, build, own)
    defaults = {"downlink": "", "feedback": False, **CODED, **pair, **own}
    return System(name, title, paper, summary, build, defaults, PAIR_PREFIXES)


SYSTEMS: Final = (
    _system(
        "relay-rlnc",
        "Coded relay, RLNC",
        "Ho et al. 2006, A random linear network coding approach to multicast; the relay of updates is derived here",
        "shards of the coded update, spread over the other clients, of which any K decode but for 0.4 %",
        "relay",
        {"code": "rlnc", "transport": "peers"},
        codec="qsgd",
    ),
    _system(
        "relay-mds",
        "Coded relay, MDS",
        "Blömer et al. 1995, An XOR-based erasure-resilient coding scheme; the relay of updates is derived here",
        "shards of the coded update, spread over the other clients, of which any K decode",
        "relay",
        {"code": "mds", "transport": "peers", **settings_of(CodedSettings, "threshold")},
        codec="qsgd",
    ),
    _system(
        "sumcode",
        "Coded sum",
        "So et al. 2022, LightSecAgg (mode mask); the sum of shares is Shamir 1979, How to share a secret, with packed "
        "secrets, as reconstructed here",
        "shards of integers over a prime field, one for every other client; the clients add them, and the server "
        "decodes the sum of all updates and no single one",
        "sumcode",
        {
            "transport": "peers",
            "threshold": 1,
            **settings_of(SumOptions, "mode", "weighted", "max_weight", "metrics", "min_contributors"),
        },
        codec="fixedpoint",
        **FIXED_POINT,
    ),
    _system(
        "gradient-code",
        "Gradient coding",
        "Tandon et al. 2017, Gradient coding: avoiding stragglers in distributed learning",
        "one combination of the updates of s + 1 partitions, of which any n - s give the sum over all partitions",
        "gradcode",
        {
            **settings_of(GradientCode, "losses", "scheme", "arithmetic", "limit", "approximate", "quorum"),
            **settings_of(CodedSettings, "collect_timeout"),
        },
    ),
)
