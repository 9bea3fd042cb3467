"""Graph learning over parts of a graph: P, samplers and plans, layers, and the bytes of rows and ids.

Names are imported when they are asked for: this package brings neither torch nor scipy. Partitioning stands in
:mod:`fedcomp.graphs.partition`, the torch layers in :mod:`fedcomp.graphs.layers`, bytes in
:mod:`fedcomp.graphs.rowcodecs` and beside it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fedcomp.graphs.adjacency import Adjacency, FullStructure, HaloStructure, normalised
    from fedcomp.graphs.base import (
        Conditions,
        GraphError,
        GraphPart,
        MissingRows,
        Operator,
        Rows,
        StepPlan,
        Structure,
        UnknownStructure,
    )
    from fedcomp.graphs.layers import GraphConvolutions
    from fedcomp.graphs.plan import draw_batch, plan_round, plan_step, wanted
    from fedcomp.graphs.scale import AdaptiveScale
    from fedcomp.graphs.settings import SAMPLERS, SamplerSettings

__all__ = [
    "SAMPLERS",
    "AdaptiveScale",
    "Adjacency",
    "Conditions",
    "FullStructure",
    "GraphConvolutions",
    "GraphError",
    "GraphPart",
    "HaloStructure",
    "MissingRows",
    "Operator",
    "Rows",
    "SamplerSettings",
    "StepPlan",
    "Structure",
    "UnknownStructure",
    "draw_batch",
    "normalised",
    "plan_round",
    "plan_step",
    "wanted",
]

_MODULES: Final = {
    "adjacency": ("Adjacency", "FullStructure", "HaloStructure", "normalised"),
    "layers": ("GraphConvolutions",),
    "plan": ("draw_batch", "plan_round", "plan_step", "wanted"),
    "scale": ("AdaptiveScale",),
    "settings": ("SAMPLERS", "SamplerSettings"),
}
_WHERE: Final = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE.get(name, 'base')}"), name)
