"""The parts that systems are built from: Flower's inner strategies, codecs and density policies, made from settings.

Settings below a prefix are the parameters of the part of that name, which checks them itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from fedcomp.errors import ConfigError, nearest

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy

    from fedcomp.codecs import Codec
    from fedcomp.layout import DensityPolicy
    from fedcomp.strategies.compressed import Compressed

Scalar = bool | int | float | str
"""The values a setting may have: what Flower's run configuration can carry."""

Settings = Mapping[str, Scalar]

TASK_PREFIX: Final = "task."
INNER_PREFIX: Final = "inner."
CODEC_PREFIX: Final = "codec."
FEEDBACK_PREFIX: Final = "feedback."
DOWNLINK_PREFIX: Final = "downlink."
POLICY_PREFIX: Final = "policy."
PLAIN_PREFIXES: Final = (TASK_PREFIX, INNER_PREFIX)
CODEC_PREFIXES: Final = (*PLAIN_PREFIXES, CODEC_PREFIX, FEEDBACK_PREFIX, DOWNLINK_PREFIX)
"""Settings below these belong to the task, the inner strategy and the codecs, which check them themselves."""

PAIR_PREFIXES: Final = (*CODEC_PREFIXES, POLICY_PREFIX)
"""Those of a system that is the drop-in pair, which also asks what travels dense."""

BUDGET: Final = "budget"
"""The setting of private systems that a run can be given by itself: an epsilon."""

INNER: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fedavg": "FedAvg",
        "fedavgm": "FedAvgM",
        "fedadagrad": "FedAdagrad",
        "fedadam": "FedAdam",
        "fedyogi": "FedYogi",
        "fedprox": "FedProx",
        "fedmedian": "FedMedian",
        "fedtrimmedavg": "FedTrimmedAvg",
        "krum": "Krum",
        "multikrum": "MultiKrum",
        "bulyan": "Bulyan",
        "qfedavg": "QFedAvg",
        "nesterov": "Nesterov",
        "signstep": "SignStep",
    }
)
"""Strategies by the name of the setting ``inner``, Flower's and those of :mod:`fedcomp.strategies.outer`; their
parameters are the settings ``inner.*``."""

_MANAGED: Final = {"fraction_train": "fraction", "fraction_evaluate": "fraction_evaluate"}
"""Parameters of the inner strategy that the server main decides, and the setting to use instead."""


def below(settings: Settings, prefix: str) -> dict[str, Any]:
    """Return the settings whose names start with ``prefix``, without it."""
    return {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}


def make_inner(settings: Settings) -> Strategy:
    """Return the Flower strategy that ``inner`` and ``inner.*`` describe.

    Cohorts are drawn by the server main, reproducibly; the strategy itself takes every node it is shown.
    """
    from flwr.serverapp import strategy as flower

    from fedcomp.strategies import outer

    name = str(settings["inner"])
    if name not in INNER:
        raise ConfigError(f"inner={name!r} is not a strategy{nearest(name, INNER)}")
    cls: Callable[..., Strategy] = getattr(flower, INNER[name], None) or getattr(outer, INNER[name])
    options = below(settings, INNER_PREFIX)
    allowed = [p for p in inspect.signature(cls).parameters if p not in _MANAGED]
    for key in options:
        if key in _MANAGED:
            raise ConfigError(f"setting 'inner.{key}' is decided by the server; use {_MANAGED[key]!r}")
        if key not in allowed:
            raise ConfigError(f"inner strategy {name!r} has no parameter {key!r}{nearest(key, allowed)}")
    # The cohort is drawn before the strategy sees it, so the strategy's own share is all or nothing.
    evaluated = 1.0 if settings["fraction_evaluate"] else 0.0
    try:
        return cls(
            fraction_train=1.0,
            fraction_evaluate=evaluated,
            # Flower's default is 2: a run with one client would wait for a second for ever.
            **{"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1, **options},
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"inner strategy {name!r} refused its parameters {options}: {error}") from error


def uplink(settings: Settings, name: str) -> Codec:
    """Return the codec called ``name`` with the parameters below ``codec.``, in error feedback if ``feedback`` says so.

    Raises
    ------
    ConfigError
        For parameters that it does not have.
    """
    from fedcomp.codecs import get_codec
    from fedcomp.codecs.feedback import ErrorFeedback

    codec = get_codec(_nested(name, below(settings, CODEC_PREFIX)))
    memory = below(settings, FEEDBACK_PREFIX)
    if settings.get("feedback", False):
        try:
            return ErrorFeedback(codec, **memory)
        except TypeError as error:
            raise ConfigError(f"settings below {FEEDBACK_PREFIX!r}: {error}") from error
    # Nothing would read them, and the run would pass for one with memory.
    if memory:
        raise ConfigError(
            f"settings {sorted(memory)} below {FEEDBACK_PREFIX!r} need feedback=true on a system that has it"
        )
    return codec


def _nested(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a codec; with ``codec.codec`` that of one around another, which gets the parameters
    that the outer one does not have."""
    from fedcomp.codecs.registry import codecs

    # A codec around another one names it here; the flat settings are divided by what each constructor takes.
    if not isinstance(options.get("codec"), str):
        return {"id": name, **options}
    own = inspect.signature(codecs.find(name)).parameters
    inner = {key: value for key, value in options.items() if key not in own}
    outer = {key: value for key, value in options.items() if key in own and key != "codec"}
    return {"id": name, "codec": {"id": options["codec"], **inner}, **outer}


def downlink(settings: Settings) -> Codec | None:
    """Return the codec of the setting ``downlink`` with the parameters below ``downlink.``, None where it is empty.

    Raises
    ------
    ConfigError
        When there are parameters but no codec.
    """
    from fedcomp.codecs import get_codec

    name, options = str(settings["downlink"]), below(settings, DOWNLINK_PREFIX)
    if name:
        return get_codec({"id": name, **options})
    if options:
        raise ConfigError(
            f"settings {sorted(options)} below {DOWNLINK_PREFIX!r} need a codec, for instance downlink=topk"
        )
    return None


def policy(settings: Settings) -> DensityPolicy | None:
    """Return :class:`fedcomp.layout.SmallDense` with the parameters below ``policy.``; None, the strategy's default,
    where there are none.

    Raises
    ------
    ConfigError
        For parameters that it does not have, or that are out of range.
    """
    from fedcomp.layout import SmallDense

    options = below(settings, POLICY_PREFIX)
    allowed = ("min_size", "share")
    for key in options:
        if key not in allowed:
            raise ConfigError(f"the density policy has no parameter {key!r}{nearest(key, allowed)}")
    return SmallDense(**options) if options else None


def pair_of(settings: Settings) -> type[Compressed]:
    """Return the class of the drop-in pair: that of adapters where the setting ``adapters`` says so."""
    from fedcomp.strategies.adapters import Adapters
    from fedcomp.strategies.compressed import Compressed

    return Adapters if settings.get("adapters", False) else Compressed


def around(strategy: Strategy, settings: Settings, seed: int) -> Strategy:
    """Return ``strategy`` inside the drop-in pair with the codec that the settings name, or itself without one.

    Raises
    ------
    ConfigError
        When there are parameters of a codec but no codec.
    """
    name = str(settings["codec"])
    if name:
        pair = pair_of(settings)
        return pair(strategy, uplink(settings, name), downlink(settings), feedback=False, seed=seed)
    idle = [prefix for prefix in (CODEC_PREFIX, FEEDBACK_PREFIX, DOWNLINK_PREFIX) if below(settings, prefix)]
    idle += [key for key in ("feedback", "downlink", "adapters") if settings.get(key)]
    if idle:
        raise ConfigError(f"settings {idle} need a codec; set codec, for instance codec=qsgd")
    return strategy
