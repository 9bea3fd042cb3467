"""Decentralised systems: one for each training algorithm of :mod:`fedcomp.gossip`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from fedcomp.errors import ConfigError, nearest
from fedcomp.gossip import algorithm_class, get_algorithm
from fedcomp.strategies.gossip.settings import GossipSettings
from fedcomp.strategies.gossip.strategy import GossipRelay
from fedcomp.strategies.parts import TASK_PREFIX, Scalar, Settings, below
from fedcomp.strategies.system import TYPES, System, arguments, refuse_others, settings_of

if TYPE_CHECKING:
    from fedcomp.tasks.base import Task

COMPRESSOR_PREFIX: Final = "compressor."
ALGORITHM_PREFIX: Final = "algorithm."

GOSSIP: Final[Settings] = MappingProxyType(
    {
        "skew_rounds": "0",
        **settings_of(GossipSettings, "patience", "dtype", "dense_below", "buffers", "transport", "seal"),
    }
)
"""Settings of every algorithm; ``skew_rounds`` is a number or "auto". A ``batch_size`` of 0 takes all of a node's
examples. Parameters of the algorithm that its system does not show are set below ``algorithm.``."""

_UNUSED: Final[Settings] = MappingProxyType(
    {
        "weight_decay": 0.0,
        "epochs": 1,
        "max_steps": 0,
        "inner": "fedavg",
        "fraction": 1.0,
        "fraction_evaluate": 0.0,
    }
)


def _build(settings: Settings, seed: int, *, name: str, title: str, shown: Settings) -> GossipRelay:
    """Return the relay of a decentralised algorithm; every parameter of it is a setting, or has its own default."""
    refuse_others(
        settings,
        _UNUSED,
        "a round is one iteration of all nodes, with one gradient each; "
        "use lr, momentum (where the algorithm has it), batch_size, and more rounds",
    )
    allowed = inspect.signature(algorithm_class(name)).parameters
    # ``shown`` has settings of the relay, too, such as the graph.
    own = {key: settings[key] for key in shown if key in allowed} | below(settings, ALGORITHM_PREFIX)
    for key in own:
        if key not in allowed:
            raise ConfigError(f"{title} has no parameter {key!r}{nearest(key, allowed)}")
    own["lr"] = settings["lr"]
    if "momentum" in allowed:
        own["momentum"] = settings["momentum"]
    elif settings["momentum"]:
        raise ConfigError(f"momentum={settings['momentum']!r} does not fit: {title} has none; set momentum=0")
    # A setting has one type, so numbers that may also be "auto" are given as texts.
    for key in ("gamma", "rate"):
        if key in own:
            own[key] = _number_or(str(own[key]), "auto", key, float)
    options = below(settings, COMPRESSOR_PREFIX)
    if "compressor" in own:
        own["compressor"] = _compressor(name, str(shown["compressor"]), str(settings["compressor"]), options)
    elif options:
        raise ConfigError(
            f"settings {sorted(options)} below {COMPRESSOR_PREFIX!r} do not fit: {title} has no compressor"
        )
    skew_rounds = _number_or(str(settings["skew_rounds"]), "auto", "skew_rounds", int)
    # All systems have the setting timeout, so it is not among those of this one.
    common = arguments(GossipSettings, settings, ["timeout", *(key for key in GOSSIP if key != "skew_rounds")])
    return GossipRelay(
        get_algorithm({"name": name, **own}),
        str(settings["topology"]),
        skew_rounds=skew_rounds,
        observe_every=int(settings["evaluate_every"]),
        seed=seed,
        **common,
    )


def _compressor(algorithm: str, usual_id: str, name: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of a compressor; the algorithm's own keeps its parameters unless they are given."""
    if "id" in options:
        raise ConfigError(f"{COMPRESSOR_PREFIX}id does not fit: set compressor={options['id']} itself")
    if name != usual_id:
        return {"id": name, **options}
    # Unless another codec is chosen, the algorithm keeps its own parameters, such as the density.
    usual = algorithm_class(algorithm)().get_config()["compressor"]
    if usual is None:
        return {"id": name, **options} if options else None
    return {**usual, **options}


def _number_or(text: str, word: str, key: str, kind: type[int] | type[float]) -> Any:
    if text == word:
        return word
    try:
        return TYPES[kind].parse(text)
    except ValueError:
        raise ConfigError(f"setting {key!r} is {text!r}; expected {TYPES[kind]} or {word!r}") from None


def _check(strategy: GossipRelay, task: Task, clients: int) -> None:
    # Made once before any node is asked: a graph that does not fit the number of clients is refused at once.
    strategy.graph(clients)


def _system(
    name: str, title: str, paper: str, summary: str, *shown: str, topology: str = "ring", **own: Scalar
) -> System:
    """Return the system of an algorithm.

    Parameters
    ----------
    *shown : str
        Parameters of the algorithm that a user is likely to turn.
    **own : bool, int, float or str
        Those that are no plain value: texts that :func:`_build` reads, and the id of the compressor.
    """
    settings = {"topology": topology, **settings_of(algorithm_class(name), *shown), **own}
    families = (TASK_PREFIX, COMPRESSOR_PREFIX, ALGORITHM_PREFIX)
    build = partial(_build, name=name, title=title, shown=settings)
    return System(
        name, title, paper, summary, build, {**GOSSIP, **settings}, families, {"topology": "graph"}, check=_check
    )


SYSTEMS: Final = (
    _system(
        "dpsgd",
        "D-PSGD",
        "Lian et al. 2017, Can decentralized algorithms outperform centralized algorithms?",
        "the whole model to every neighbour, which takes a weighted mean",
        "gamma",
    ),
    _system(
        "sgp",
        "Stochastic gradient push",
        "Assran et al. 2019, Stochastic gradient push for distributed deep learning",
        "the whole model with a share of the sender's weight to every out-neighbour of a directed graph",
        topology="exponential",
    ),
    _system(
        "sparse-push",
        "Sparse-Push",
        "Aketi, Singh, Rabaey 2021, Sparse-Push: communication- and energy-efficient decentralized distributed "
        "learning over directed and time-varying graphs with non-IID datasets (abstract only; the iteration is "
        "derived here)",
        "the largest entries of the model's difference to what an out-neighbour knows, with a share of the weight",
        "gamma",
        "estimates",
        compressor="topk",
        topology="exponential",
    ),
    _system(
        "choco",
        "CHOCO-SGD",
        "Koloskova, Stich, Jaggi 2019, Decentralized stochastic optimization and gossip algorithms with compressed "
        "communication",
        "the compressed difference of the model to what the neighbours know of it",
        "gamma",
        compressor="topk",
    ),
    _system(
        "deepsqueeze",
        "DeepSqueeze",
        "Tang et al. 2019, DeepSqueeze: decentralization meets error-compensated compression",
        "the compressed model; what compression left out is added to the next one",
        "gamma",
        compressor="topk",
    ),
    _system(
        "nids",
        "NIDS",
        "Li, Shi, Yan 2019, A decentralized proximal-gradient method with network independent step-sizes and separated "
        "convergence rates",
        "the whole decision vector to every neighbour; a dual vector removes the bias of differing data",
    ),
    _system(
        "gradient-tracking",
        "Gradient tracking (DIGing)",
        "Nedić, Olshevsky, Shi 2017, Achieving geometric convergence for distributed optimization over time-varying "
        "graphs",
        "the whole model and an estimate of the mean gradient to every neighbour",
    ),
    _system(
        "lead",
        "LEAD",
        "Liu et al. 2021, Linear convergent decentralized optimization with compression",
        "the compressed innovation of the decision vector; a dual vector removes the bias of differing data",
        "alpha",
        gamma="1.0",
        compressor="dithering",
    ),
    _system(
        "beer",
        "BEER",
        "Zhao et al. 2022, BEER: fast O(1/T) rate for decentralized nonconvex optimization with communication "
        "compression",
        "the compressed differences of the model and of the tracked gradient to what the neighbours know of them",
        "gamma",
        compressor="topk",
    ),
    _system(
        "cold",
        "COLD",
        "Zhang, You, Xie 2023, Innovation compression for communication-efficient distributed optimization with linear "
        "convergence (abstract only; the iteration is derived here)",
        "the compressed innovation of the decision vector; a dual vector removes the bias of differing data",
        "gamma",
        compressor="topk",
    ),
    _system(
        "dyna-cold",
        "Dyna-COLD",
        "Zhang, You, Xie 2023, Innovation compression for communication-efficient distributed optimization with linear "
        "convergence (abstract only; the iteration is derived here)",
        "one bit per coordinate of the innovation, over a scale that both ends of an edge know without being told",
        "gamma",
        "scale",
        "rho",
        "s0",
    ),
    _system(
        "power-gossip",
        "PowerGossip",
        "Vogels, Karimireddy, Jaggi 2020, Practical low-rank communication compression in decentralized deep learning",
        "products of each weight matrix with a vector that both ends of an edge know: power steps on their difference",
        "rank",
        "steps",
        "warm_start",
        "overlap",
        rate="1.0",
    ),
)
