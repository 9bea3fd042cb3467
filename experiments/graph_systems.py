"""The rows of the table that learn on graphs: what their settings are, and how they become a strategy.

A row has ``strategy="graph"`` in :mod:`fedcomp.experiments.rows` and needs a task with a graph. What a sampler takes,
its own settings check (:class:`fedcomp.graphs.settings.SamplerSettings`); how rows of features travel, the strategy
does (:class:`fedcomp.strategies.gcn.strategy.SkewedGCN`).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.errors import ConfigError
from fedcomp.experiments.parts import TASK_PREFIX, Settings, make_inner
from fedcomp.experiments.private_systems import around
from fedcomp.graphs.base import GraphError

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy

    from fedcomp.graphs.settings import SamplerSettings
    from fedcomp.strategies.gcn.strategy import SkewedGCN
    from fedcomp.tasks.graph import GraphTask

GRAPH: Final[Settings] = MappingProxyType(
    {
        "sampler": "skewed",
        "n": "512",
        "layers": 0,
        "fanout": 5,
        "estimator": "poisson",
        "weight": "l1",
        "mode": "matched",
        "variance_budget": 1.5,
        "scale": 1.0,
        "s_max": 16.0,
        "keep_self": False,
        "favour": "owned",
        "q": 0.1,
        "renormalise": False,
        "cache": "none",
        "cache_bytes": 0,
        "row_codec": "dense-f32",
        "dedupe": False,
        "noise": 0.0,
        "local_steps": 1,
        "evaluate": "full",
        "deadline": 0.0,
        "codec": "",
        "feedback": False,
        "downlink": "",
    }
)
"""Settings of every graph row, with the meaning they have for the sampler and for
:class:`fedcomp.strategies.gcn.strategy.SkewedGCN`.

``n`` is how many nodes a layer keeps, or one number for each layer, input layer first, separated by commas;
``variance_budget`` is D, how many times the variance of the unskewed sampler is allowed (``budget`` is an epsilon
everywhere), ``scale`` the s of ``mode=fixed``. ``layers`` is how many the model has; 0 takes ``task.layers`` where that
is given, else two. ``cache_bytes`` is the limit of ``cache=lru``, 0 for the strategy's own; ``deadline`` 0 leaves
exchanges to ``timeout``. ``codec`` compresses the update as the drop-in pair does, and is empty for plain tensors. What
clients know of the edges is the task's option ``task.structure``. A client makes ``local_steps`` SGD steps a round on
batches of ``batch_size`` nodes, 0 for all it has to learn from.
"""

_UNUSED: Final[Settings] = MappingProxyType({"epochs": 1, "max_steps": 0})
_PICKY: Final = "binary-rice"
_SAMPLER: Final = ("sampler", "fanout", "estimator", "weight", "mode", "scale", "s_max", "keep_self", "favour", "q")


def make_graph(settings: Settings, seed: int) -> Strategy:
    """Return the strategy of a graph row.

    Raises
    ------
    ConfigError
        For settings that sampler or strategy refuse, or that have no place where a round is a few sampled steps.
    """
    from fedcomp.strategies.gcn.strategy import RoundSettings, RowSettings, SkewedGCN

    for key, default in _UNUSED.items():
        if settings[key] != default:
            raise ConfigError(
                f"{key}={settings[key]!r} does not fit: a client makes local_steps SGD steps a round on sampled "
                "batches; use local_steps, batch_size, lr, more rounds, and a server optimiser such as inner=fedadam"
            )
    if settings["fraction"] != 1.0:
        raise ConfigError(
            f"fraction={settings['fraction']!r} does not fit: whoever does not train has to answer with rows all the "
            "same, and a cohort shows the strategy no one else; set fraction=1"
        )
    if settings["fraction_evaluate"] not in (0.0, 1.0):
        raise ConfigError(
            f"fraction_evaluate={settings['fraction_evaluate']!r} does not fit: all owners evaluate on their own nodes "
            "(1), or none does (0)"
        )
    if settings["cache_bytes"] and settings["cache"] != "lru":
        raise ConfigError(
            f"cache_bytes={settings['cache_bytes']!r} does not fit cache={settings['cache']!r}; use cache=lru"
        )
    given: dict[str, Any] = dict(settings)
    if not given["deadline"] >= 0:
        raise ConfigError(f"deadline={given['deadline']!r} is not valid: give seconds, or 0 for the run's timeout")
    limit = {"cache_bytes": given["cache_bytes"]} if given["cache_bytes"] else {}
    return SkewedGCN(
        around(make_inner(settings), settings, seed),
        sampler_settings(settings),
        rows=RowSettings(
            codec=given["row_codec"],
            cache=given["cache"],
            dedupe=given["dedupe"],
            noise=float(given["noise"]),
            **limit,
        ),
        rounds=RoundSettings(
            local_steps=given["local_steps"],
            batch_size=int(given["batch_size"]),
            evaluate=given["evaluate"],
            timeout=float(given["deadline"]) or None,
        ),
        structure=str(settings.get(f"{TASK_PREFIX}structure", "full")),
        seed=seed,
    )


def check_graph(strategy: SkewedGCN, task: GraphTask) -> None:
    """Raise :class:`ConfigError` when the strategy does not fit the graph: its layers, or what its rows are.

    An owner whose codec cannot hold its rows would answer nobody, and the run go on without them, as if it were away.
    """
    layers = task.options["layers"]
    if strategy.sampler.layers != layers:
        raise ConfigError(
            f"the model of task {task.name!r} has {layers} layers, and the sampler is to make "
            f"{strategy.sampler.layers}; set layers={layers}"
        )
    if strategy.codec.name != _PICKY:
        return
    if strategy.rows.noise:
        raise ConfigError(f"row_codec={_PICKY} cannot hold rows with noise on them; use a dense row codec or noise=0")
    features = task.graph.features
    try:
        strategy.codec.encode(np.arange(len(features)), features)
    except GraphError as error:
        raise ConfigError(f"row_codec={_PICKY} does not fit task {task.name!r}: {error}") from error


def sampler_settings(settings: Settings) -> SamplerSettings:
    """Return the sampler that resolved settings of a graph row describe.

    Raises
    ------
    ConfigError
        For a value out of range, or one that the sampler has no use for.
    """
    from fedcomp.graphs.settings import SamplerSettings

    own: dict[str, Any] = {key: settings[key] for key in (*_SAMPLER, "renormalise")}
    layers: Any = settings["layers"] or settings.get(f"{TASK_PREFIX}layers", SamplerSettings.layers)
    return SamplerSettings(
        n=layer_sizes(str(settings["n"])), layers=layers, budget=float(settings["variance_budget"]), **own
    )


def layer_sizes(text: str) -> int | tuple[int, ...]:
    """Read ``"512"`` or ``"512,384"``: nodes kept at a layer, input layer first; one number is for all layers.

    Raises
    ------
    ConfigError
        When it is something else.
    """
    try:
        sizes = tuple(int(word) for word in text.split(","))
        return sizes[0] if len(sizes) == 1 else sizes
    except ValueError as error:
        raise ConfigError(
            f"setting 'n' is {text!r}; expected a whole number such as 512, or one per layer such as 512,384"
        ) from error
