"""Decentralised learning: graphs, their weights, and one file per algorithm."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from fedcomp.errors import ConfigError, nearest

if TYPE_CHECKING:
    from fedcomp.gossip.base import Algorithm

ALGORITHMS: Final[Mapping[str, str]] = {
    "dpsgd": "fedcomp.gossip.dpsgd:DPSGD",
    "sgp": "fedcomp.gossip.sgp:SGP",
    "sparse-push": "fedcomp.gossip.sparse_push:SparsePush",
    "choco": "fedcomp.gossip.choco:CHOCO",
    "deepsqueeze": "fedcomp.gossip.deepsqueeze:DeepSqueeze",
    "nids": "fedcomp.gossip.nids:NIDS",
    "gradient-tracking": "fedcomp.gossip.gradient_tracking:GradientTracking",
    "lead": "fedcomp.gossip.lead:LEAD",
    "beer": "fedcomp.gossip.beer:BEER",
    "cold": "fedcomp.gossip.cold:COLD",
    "dyna-cold": "fedcomp.gossip.dyna_cold:DynaCOLD",
    "power-gossip": "fedcomp.gossip.power_gossip:PowerGossip",
}
"""Module and class of each algorithm, imported when it is first asked for."""

AVERAGING: Final[Mapping[str, str]] = {"coordinate-push": "fedcomp.gossip.coordinate_push:CoordinatePush"}
"""Algorithms that only average and refuse gradients; no system trains with them."""


def algorithm_class(name: str) -> type[Algorithm]:
    """Return the class of the algorithm called ``name``.

    Raises
    ------
    ConfigError
        For an unknown name.
    """
    known = {**ALGORITHMS, **AVERAGING}
    if name not in known:
        raise ConfigError(f"unknown gossip algorithm {name!r}{nearest(name[:64], known)}")
    module, _, cls = known[name].partition(":")
    found: type[Algorithm] = getattr(importlib.import_module(module), cls)
    return found


def get_algorithm(config: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm that ``{"name": ..., parameters}`` describes.

    Raises
    ------
    ConfigError
        For an unknown name or parameter, or a value the algorithm refuses.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"algorithm={config!r} is not valid: an Algorithm, or a mapping such as {{'name': 'dpsgd'}}")
    options = dict(config)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"unknown gossip algorithm {name!r}{nearest('', ALGORITHMS)}")
    cls = algorithm_class(name)
    known = inspect.signature(cls).parameters
    for key in options:
        if key not in known:
            raise ConfigError(f"gossip algorithm {name!r} has no parameter {key!r}{nearest(str(key)[:64], known)}")
    try:
        return cls.from_config(options)
    except TypeError as error:
        raise ConfigError(f"gossip algorithm {name!r} refused its parameters {sorted(options)}: {error}") from error
