"""Systems, one file each, with both halves, the options and the citation. :func:`get_system` makes a system of its
options."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

from fedcomp.errors import ConfigError, nearest
from fedcomp.params import shown
from fedcomp.program import System

SYSTEMS: Final[dict[str, str | type[System]]] = {
    "coded-linear": "coded.linear:CodedLinear",
    "coded-relay": "coded.relay:CodedRelay",
    "coded-sum": "coded.sums:CodedSum",
    "conditional": "conditional:ConditionalRounds",
    "datalens": "private.datalens:Teachers",
    "factors": "factors:FactorSharing",
    "forward": "forward:Forward",
    "gossip": "gossip:Gossip",
    "gradient-code": "coded.gradients:GradientCode",
    "graphs": "graphs.system:Graphs",
    "gradiveq": "gradiveq:FittedBasis",
    "noisy-sum": "private.distributed:NoisySum",
    "lsg": "private.lsg:LowRank",
    "lgc": "lgc:LearnedGradients",
    "local-dp": "private.local:Local",
    "pair": "pair:Pair",
    "record-dp": "private.record:Records",
    "shared-support": "shared_support:SharedSupport",
    "power-sgd": "power_sgd:SharedBasis",
}
"""Where a system is, by its id, or the class itself."""


def get_system(config: Mapping[str, Any] | System) -> System:
    """Return the system of ``{"id": ..., **options}``; a system comes back as it is.

    Raises
    ------
    ConfigError
        For an id that no system has, or options that it does not take.

    Examples
    --------
    >>> from fedcomp.codecs import TopK
    >>> from fedcomp.systems.pair import Pair
    >>> get_system(Pair(TopK(density=0.01)).to_config())
    Pair(codec=TopK(density=0.01))
    """
    if isinstance(config, System):
        return config
    name = config.get("id")
    if not isinstance(name, str) or name not in SYSTEMS:
        raise ConfigError(f"there is no system {shown(name)}{nearest(str(name), SYSTEMS)}")
    found = SYSTEMS[name]
    if isinstance(found, str):
        module, _, kind = found.partition(":")
        found = getattr(importlib.import_module(f"{__name__}.{module}"), kind)
    options = {key: value for key, value in config.items() if key != "id"}
    try:
        system: System = found.from_config(options)
    except TypeError as error:
        raise ConfigError(f"system {name!r} does not take these options: {error}") from error
    return system
