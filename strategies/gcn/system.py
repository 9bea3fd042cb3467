"""The graph system: its settings, its construction from them, and which tasks it accepts."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.errors import ConfigError
from fedcomp.graphs.base import GraphError
from fedcomp.graphs.rowcodecs import get_row_codec
from fedcomp.graphs.settings import RoundSettings, RowSettings, SamplerSettings
from fedcomp.strategies.gcn.strategy import SkewedGCN
from fedcomp.strategies.parts import CODEC_PREFIXES, TASK_PREFIX, Settings, around, make_inner
from fedcomp.strategies.system import System, refuse_others, settings_of

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy

    from fedcomp.tasks.graph import GraphTask

_SAMPLER: Final = settings_of(
    *(SamplerSettings, "sampler", "fanout", "estimator", "weight", "mode", "scale", "s_max", "keep_self", "favour"),
    *("q", "renormalise"),
)
_ROWS: Final = settings_of(RowSettings, "cache", "dedupe", "noise")
_ROUNDS: Final = settings_of(RoundSettings, "local_steps", "evaluate")

GRAPH: Final[Settings] = MappingProxyType(
    {
        **_SAMPLER,
        "n": str(SamplerSettings.n),
        "layers": 0,
        "variance_budget": SamplerSettings.budget,
        **_ROWS,
        "cache_bytes": 0,
        "row_codec": RowSettings.codec,
        **_ROUNDS,
        "deadline": 0.0,
        "codec": "",
        "feedback": False,
        "downlink": "",
    }
)
"""Settings, with the meaning they have for the sampler, for rows and for rounds.

``n`` is how many nodes a layer keeps, or one number for each layer, input layer first, separated by commas;
``variance_budget`` is D, how many times the variance of the unskewed sampler is allowed (``budget`` is an epsilon
everywhere), ``scale`` the s of ``mode=fixed``. ``layers`` is how many the model has; 0 takes ``task.layers`` where that
is given, else two. ``cache_bytes`` is the limit of ``cache=lru``, 0 for the strategy's own; ``deadline`` 0 leaves
exchanges to ``timeout``. ``codec`` compresses the update as the drop-in pair does, and is empty for plain tensors. What
clients know of the edges is the task's option ``task.structure``. A client makes ``local_steps`` SGD steps a round on
batches of ``batch_size`` nodes, 0 for all it has to learn from.
"""

_UNUSED: Final[Settings] = MappingProxyType({"epochs": 1, "max_steps": 0})
# It holds rows with one value beside 0 only, so that whole sets of features do not fit it.
_PICKY: Final = "binary-rice"


def _build(settings: Settings, seed: int) -> Strategy:
    """Return the strategy; settings that have no place where a round is a few sampled steps are a ConfigError."""
    refuse_others(
        settings,
        _UNUSED,
        "a client makes local_steps SGD steps a round on sampled batches; use local_steps, batch_size, lr, more "
        "rounds, and a server optimiser such as inner=fedadam",
    )
    refuse_others(
        settings,
        {"fraction": 1.0},
        "nodes that do not train still must still answer with rows, but the strategy sees only the nodes of the "
        "cohort; "
        "set fraction=1",
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


def _check(strategy: SkewedGCN, task: GraphTask, clients: int) -> None:
    """Raise :class:`ConfigError` when the strategy does not fit the graph: its layers, or what its rows are.

    An owner whose codec cannot hold its rows would answer nobody, and the run go on without them, as if it were away.
    """
    layers = task.options["layers"]
    if strategy.system.sampler.layers != layers:
        raise ConfigError(
            f"the model of task {task.name!r} has {layers} layers, and the sampler should make "
            f"{strategy.system.sampler.layers}; set layers={layers}"
        )
    if strategy.system.rows.codec != _PICKY:
        return
    if strategy.system.rows.noise:
        raise ConfigError(f"row_codec={_PICKY} cannot hold rows with noise on them; use a dense row codec or noise=0")
    features = task.graph.features
    try:
        # Encoded and thrown away: only the codec knows what it can hold, and it names the node.
        get_row_codec(_PICKY).encode(np.arange(len(features)), features)
    except GraphError as error:
        raise ConfigError(f"row_codec={_PICKY} does not fit task {task.name!r}: {error}") from error


def sampler_settings(settings: Settings) -> SamplerSettings:
    """Return the sampler that resolved settings describe.

    Raises
    ------
    ConfigError
        For a value out of range, or one that the sampler has no use for.
    """
    own: dict[str, Any] = {key: settings[key] for key in _SAMPLER}
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
        found = tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"setting 'n' is {text!r}; expected a whole number such as 512, or several such as 512,384"
        ) from error
    return found[0] if len(found) == 1 else found


SYSTEM: Final = System(
    "skewed-gcn",
    "Skewed GCN sampling",
    "Jiang, Rumi 2021, Communication-efficient sampling for distributed training of graph convolutional networks "
    "(abstract only; the rule by which a variance budget sets the skew is derived here)",
    "model updates; and of its nodes' features, in clear, the rows that the sampled batches of other clients ask "
    "for: nodes that a client has itself are drawn more often, those of others less",
    _build,
    GRAPH,
    CODEC_PREFIXES,
    {"task": "graph"},
    check=_check,
)
