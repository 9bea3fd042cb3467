"""The table of systems: everything that can be run, one row each.

The command line, ``flwr run``, the generic apps and the tests iterate over :data:`SYSTEMS`. A row is a server strategy
and the settings it understands; the client half is always the generic app, which learns from the server's messages what
to do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from fedcomp.errors import ConfigError, nearest
from fedcomp.experiments.graph_systems import GRAPH, check_graph, make_graph
from fedcomp.experiments.parts import (
    CODEC_PREFIX,
    CODEC_PREFIXES,
    DOWNLINK_PREFIX,
    PAIR_PREFIXES,
    PLAIN_PREFIXES,
    TASK_PREFIX,
    Settings,
    below,
    downlink,
    make_inner,
    policy,
    uplink,
)
from fedcomp.experiments.private_systems import make_private, private_settings
from fedcomp.experiments.rows import ROWS, Row
from fedcomp.experiments.spec import RunSpec, Scalar

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy

    from fedcomp.flower.privacy import Private
    from fedcomp.tasks.base import Task

COMPRESSOR_PREFIX: Final = "compressor."
ALGORITHM_PREFIX: Final = "algorithm."

CODED: Final[Settings] = MappingProxyType(
    {
        "symbols": 0,
        "shards": 0,
        "loss": 0.0,
        "target": 0.999,
        "seal": "",
        "groups": 0,
        "share_timeout": 0.0,
        "collect_timeout": 0.0,
        "spool": "",
    }
)
"""Settings of every coded row, with :class:`fedcomp.strategies.coded.strategy.CodedFedAvg`'s meaning; 0 and the empty
text leave the choice to it. ``seal`` is "yes" or "no"."""

GOSSIP: Final[Settings] = MappingProxyType(
    {
        "skew_rounds": "0",
        "patience": 5,
        "deadline": 0.0,
        "dtype": "float32",
        "dense_below": 64,
        "buffers": "dense",
    }
)
"""Settings of every gossip row, with :class:`fedcomp.strategies.gossip.strategy.GossipRelay`'s meaning; ``skew_rounds``
is a number or "auto", and ``deadline`` 0 leaves it to ``timeout``. A ``batch_size`` of 0 takes all of a node's
examples. Below ``algorithm.`` stand parameters of the algorithm that its row does not have."""

_PAIR: Final = ("codec", "feedback", "downlink")
"""Settings of the drop-in pair inside a coded row: the codec may be any, with its parameters below ``codec.``."""

TRAINING: Final[Settings] = MappingProxyType(
    {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "epochs": 1, "batch_size": 32, "max_steps": 0}
)
"""How a client trains in one round: SGD; ``max_steps`` 0 means no limit but the epochs."""

COMMON: Final[Settings] = MappingProxyType(
    {
        **TRAINING,
        "fraction": 1.0,
        "fraction_evaluate": 0.0,
        "evaluate_every": 1,
        "timeout": 3600.0,
        "start_timeout": 120.0,
        "link": "",
        "inner": "fedavg",
    }
)
"""Settings of every system.

``fraction`` and ``fraction_evaluate`` are the shares of clients that train and evaluate in a round;
``evaluate_every`` is the number of rounds between evaluations on the server's test split (the last round always is
one); ``timeout`` is what a round's exchange may take and ``start_timeout`` how long the server waits for its nodes, in
seconds; ``link`` is what :func:`fedcomp.timing.parse_link` reads, empty for no simulated time; ``inner`` is one of
:data:`fedcomp.experiments.parts.INNER`.
"""


@dataclass(frozen=True)
class System:
    """One row of the table.

    Attributes
    ----------
    name, title : str
        How it is called on the command line and in a table.
    paper : str
        Where it was published.
    summary : str
        One sentence: what a client sends.
    make_strategy : callable
        ``make_strategy(settings, seed) -> Strategy`` from resolved settings.
    defaults : mapping
        The settings this system has beyond :data:`COMMON`, with their defaults; the default's type is the type.
    prefixes : tuple of str
        Families of settings that are passed on to the system's parts.
    needs : mapping
        What it asks of the task ("task": "linear", "generator" or "graph") and the topology ("topology": "graph", a
        setting of that name); empty means any task that learns from records, star topology.
    private : bool
        Whether it promises privacy; its settings then include :data:`fedcomp.experiments.private_systems.PRIVATE`.
    """

    name: str
    title: str
    paper: str
    summary: str
    make_strategy: Callable[[Settings, int], Strategy]
    defaults: Settings = field(default_factory=dict)
    prefixes: tuple[str, ...] = PLAIN_PREFIXES
    needs: Mapping[str, str] = field(default_factory=dict)
    private: bool = False

    def known_settings(self) -> dict[str, Scalar]:
        """Return every setting with a fixed name and its default."""
        return {**COMMON, **self.defaults}

    def resolve(self, settings: Settings) -> dict[str, Scalar]:
        """Return ``settings`` checked, in the right types, and completed by the defaults.

        Raises
        ------
        ConfigError
            For an unknown name (the message gives the nearest) or a value of the wrong type or range.
        """
        known = self.known_settings()
        for key in settings:
            if key not in known and not key.startswith(self.prefixes):
                raise ConfigError(f"system {self.name!r} has no setting {key!r}{_nearest_setting(key, known)}")
        out = {
            key: _typed(key, settings[key], default) if key in settings else default for key, default in known.items()
        }
        out |= {key: value for key, value in settings.items() if key not in known}
        _check_ranges(out, all_examples="topology" in self.needs or self.needs.get("task") == "graph")
        return out


_FITS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "generator": "for a task such as 'digits-generator' use the system 'datalens'",
        "graph": "for a task such as 'digits-graph' use the system 'skewed-gcn'",
    }
)
"""Kinds of tasks that only some systems learn, and what to do with them."""


def get_system(name: str) -> System:
    """Return the row called ``name``; raises :class:`ConfigError` that names the nearest one."""
    if name not in SYSTEMS:
        raise ConfigError(f"unknown system {name!r}{nearest(name, SYSTEMS)}")
    return SYSTEMS[name]


def check(spec: RunSpec) -> None:
    """Raise :class:`ConfigError` when ``spec`` cannot run: wrong names, settings, or parameters of its parts.

    Everything is built once as the run will build it, so that a wrong value is found before any server starts.
    """
    from fedcomp.flower.privacy import find_private
    from fedcomp.tasks import get_task
    from fedcomp.timing import parse_link

    system = get_system(spec.system)
    settings = system.resolve(spec.settings)
    if settings["link"]:
        parse_link(str(settings["link"]))
    task = get_task(spec.task, **below(settings, TASK_PREFIX))
    task.assignment(spec.clients)
    if system.needs.get("task") == "linear":
        _ = task.linear_loss
    asked = system.needs.get("task", "")
    if task.needs != (asked if asked in _FITS else ""):
        raise ConfigError(
            f"system {system.name!r} does not fit task {task.name!r}: a generator learns from votes of discriminators, "
            "a graph from rows that its owners exchange, and everything else from records; "
            + _FITS.get(task.needs, f"task {task.name!r} is for systems that train on records, such as 'fedavg'")
        )
    strategy = system.make_strategy(settings, spec.seed)
    if "topology" in system.needs:
        strategy.graph(spec.clients)  # type: ignore[attr-defined]
    if task.needs == "graph":
        check_graph(strategy, task)  # type: ignore[arg-type]
    private = find_private(strategy)
    if private is not None:
        # A delta that is too large for so few clients, a cap, a budget: all of it is about the population.
        declare(private, spec, task)
        # What cannot be stated is not run.
        private.statement()


def declare(private: Private, spec: RunSpec, task: Task) -> None:
    """Tell a private strategy the public numbers its promise is about: of clients, and of records if it asks for them.

    Raises
    ------
    ConfigError
        When its delta is too large for so few.
    """
    if hasattr(private, "declare_records"):
        private.declare_records(task.train_split.num_examples)
    private.declare(spec.clients)


def _plain(settings: Settings, seed: int) -> Strategy:
    return make_inner(settings)


def _compressed(settings: Settings, seed: int, *, codec: str) -> Strategy:
    from fedcomp.strategies.compressed import Compressed

    return Compressed(
        make_inner(settings),
        uplink(settings, codec),
        downlink(settings),
        feedback=False,  # decided by the settings alone
        policy=policy(settings),
        seed=seed,
    )


def _shared_support(settings: Settings, seed: int) -> Strategy:
    from fedcomp.codecs import get_codec
    from fedcomp.strategies.shared_support import SharedSupport

    if settings["inner"] != "fedavg":
        raise ConfigError(
            f"inner={settings['inner']!r} does not fit: a shared support is averaged by its own strategy; "
            "use server_lr, or a system of the drop-in pair"
        )
    own = {key: settings[key] for key in ("server_lr", "warmup_rounds", "stale_leader")}
    evaluated = 1.0 if settings["fraction_evaluate"] else 0.0  # as for inner strategies, the server draws cohorts
    codec = get_codec({"id": "scalecom", **below(settings, CODEC_PREFIX)})
    options: dict[str, Any] = {**own, "fraction_evaluate": evaluated, "seed": seed}
    return SharedSupport(codec.to_config(), **options)


def _coded(settings: Settings, seed: int, *, row: Row) -> Strategy:
    from fedcomp.strategies.coded.strategy import CodedFedAvg

    own: dict[str, Any] = {key: settings[key] for key in (*CODED, *row.defaults) if key not in _PAIR and "." not in key}
    for key in ("loss", "share_timeout", "collect_timeout", "spool"):
        own[key] = own[key] or None
    if own["seal"] not in _SEAL:
        raise ConfigError(f"setting 'seal' is {own['seal']!r}; expected yes, no, or nothing for the system's choice")
    own["seal"] = _SEAL[str(own["seal"])]
    inner = _compressed(settings, seed, codec=str(settings["codec"]))
    return CodedFedAvg(inner, construction=row.construction, seed=seed, **own)


def _coded_mean(settings: Settings, seed: int, *, row: Row) -> Strategy:
    """Return a construction that adds updates itself: around the inner strategy, with nothing compressed."""
    from fedcomp.strategies.coded.strategy import CodedFedAvg

    own: dict[str, Any] = {key: settings[key] for key in row.defaults}
    own["collect_timeout"] = own["collect_timeout"] or None
    return CodedFedAvg(make_inner(settings), construction=row.construction, seed=seed, **own)


def _coded_linear(settings: Settings, seed: int, *, row: Row) -> Strategy:
    """Return full-batch gradient descent on coded data; loss and regulariser are the task's."""
    from fedcomp.strategies.coded.linear import CodedLinearGD

    unused = {"momentum": 0.0, "weight_decay": 0.0, "epochs": 1, "batch_size": 32, "max_steps": 0, "inner": "fedavg"}
    for key, default in {**unused, "fraction_evaluate": 0.0}.items():
        if settings[key] != default:
            raise ConfigError(
                f"{key}={settings[key]!r} does not fit: a round is one step of full-batch gradient descent, made by "
                "the server; use lr and task.l2, and more rounds"
            )
    own: dict[str, Any] = {key: settings[key] for key in row.defaults}
    loss = "hinge" if settings.get("task.model") == "svm" else "logistic"
    l2 = float(settings.get("task.l2", 0.0))
    return CodedLinearGD(loss=loss, lr=float(settings["lr"]), l2=l2, seed=seed, **own)


def _gossip(settings: Settings, seed: int, *, row: Row) -> Strategy:
    """Return the relay of a decentralised algorithm; every parameter of it is a setting, or has its own default."""
    from fedcomp.gossip import algorithm_class, get_algorithm
    from fedcomp.strategies.gossip.strategy import GossipRelay

    unused = {"weight_decay": 0.0, "epochs": 1, "max_steps": 0, "inner": "fedavg"}
    for key, default in {**unused, "fraction": 1.0, "fraction_evaluate": 0.0}.items():
        if settings[key] != default:
            raise ConfigError(
                f"{key}={settings[key]!r} does not fit: a round is one iteration of all nodes, with one gradient each; "
                "use lr, momentum (where the algorithm has it), batch_size, and more rounds"
            )
    allowed = inspect.signature(algorithm_class(row.name)).parameters
    own = {key: settings[key] for key in row.defaults if key in allowed} | below(settings, ALGORITHM_PREFIX)
    for key in own:
        if key not in allowed:
            raise ConfigError(f"{row.title} has no parameter {key!r}{nearest(key, allowed)}")
    own["lr"] = settings["lr"]
    if "momentum" in allowed:
        own["momentum"] = settings["momentum"]
    elif settings["momentum"]:
        raise ConfigError(f"momentum={settings['momentum']!r} does not fit: {row.title} has none; set momentum=0")
    for key in ("gamma", "rate"):
        if key in own:
            own[key] = _number_or(str(own[key]), "auto", key, float)
    options = below(settings, COMPRESSOR_PREFIX)
    if "compressor" in own:
        own["compressor"] = _compressor(row, str(settings["compressor"]), options)
    elif options:
        raise ConfigError(
            f"settings {sorted(options)} below {COMPRESSOR_PREFIX!r} do not fit: {row.title} has no compressor"
        )
    skew_rounds = _number_or(str(settings["skew_rounds"]), "auto", "skew_rounds", int)
    common: dict[str, Any] = {key: settings[key] for key in GOSSIP if key != "skew_rounds"}
    common["deadline"] = common["deadline"] or None
    return GossipRelay(
        get_algorithm({"name": row.name, **own}),
        str(settings["topology"]),
        skew_rounds=skew_rounds,
        observe_every=int(settings["evaluate_every"]),
        seed=seed,
        **common,
    )


def _compressor(row: Row, name: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of a compressor; the algorithm's own keeps its parameters unless they are given."""
    if "id" in options:
        raise ConfigError(f"{COMPRESSOR_PREFIX}id does not fit: set compressor={options['id']} itself")
    if name != row.defaults["compressor"]:
        return {"id": name, **options}
    from fedcomp.gossip import algorithm_class

    usual = algorithm_class(row.name)().get_config()["compressor"]
    if usual is None:
        return {"id": name, **options} if options else None
    return {**usual, **options}


def _number_or(text: str, word: str, key: str, kind: type[int] | type[float]) -> Any:
    if text == word:
        return word
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"setting {key!r} is {text!r}; expected {_EXPECTED[kind]} or {word!r}") from error


_SEAL: Final = {"": None, "yes": True, "no": False}


def _system(row: Row) -> System:
    if row.strategy == "coded" and not row.codec:
        make_mean = functools.partial(_coded_mean, row=row)
        return System(row.name, row.title, row.paper, row.summary, make_mean, row.defaults)
    if row.strategy == "coded":
        defaults = {"downlink": "", "feedback": False, "codec": row.codec, **CODED, **row.defaults}
        make_coded = functools.partial(_coded, row=row)
        return System(row.name, row.title, row.paper, row.summary, make_coded, defaults, PAIR_PREFIXES)
    if row.strategy == "coded_linear":
        make_linear = functools.partial(_coded_linear, row=row)
        needs = {"task": "linear"}
        return System(row.name, row.title, row.paper, row.summary, make_linear, row.defaults, (TASK_PREFIX,), needs)
    if row.strategy == "gossip":
        make_gossip = functools.partial(_gossip, row=row)
        settings, families = {**GOSSIP, **row.defaults}, (TASK_PREFIX, COMPRESSOR_PREFIX, ALGORITHM_PREFIX)
        graph = {"topology": "graph"}
        return System(row.name, row.title, row.paper, row.summary, make_gossip, settings, families, graph)
    if row.strategy == "private":
        promised, defaults = functools.partial(make_private, row=row), private_settings(row)
        downwards = (*PLAIN_PREFIXES, DOWNLINK_PREFIX) if "downlink" in row.defaults else PLAIN_PREFIXES
        parts = CODEC_PREFIXES if "codec" in row.defaults else downwards
        needs = {"task": row.task} if row.task else {}
        return System(row.name, row.title, row.paper, row.summary, promised, defaults, parts, needs, private=True)
    if row.strategy == "graph":
        settings, needs = {**GRAPH, **row.defaults}, {"task": row.task}
        return System(row.name, row.title, row.paper, row.summary, make_graph, settings, CODEC_PREFIXES, needs)
    if row.strategy == "shared_support":
        own = (TASK_PREFIX, CODEC_PREFIX)
        return System(row.name, row.title, row.paper, row.summary, _shared_support, row.defaults, own)
    make = functools.partial(_compressed, codec=row.codec) if row.codec else _plain
    extra = {"downlink": ""} if row.codec else {}
    prefixes = PAIR_PREFIXES if row.codec else PLAIN_PREFIXES
    return System(row.name, row.title, row.paper, row.summary, make, {**extra, **row.defaults}, prefixes)


SYSTEMS: Final[Mapping[str, System]] = MappingProxyType({row.name: _system(row) for row in ROWS})
"""The table, by name."""


def _nearest_setting(key: str, known: Settings) -> str:
    # Users write the part after the dot ("density"), so that is looked for as well.
    for name in known:
        if name.rpartition(".")[2] == key:
            return f"; did you mean {name!r}?"
    return nearest(key, known)


_EXPECTED: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _typed(key: str, value: Scalar, default: Scalar) -> Scalar:
    kind = type(default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and not isinstance(value, str):
        return str(value)
    if type(value) is not kind:
        raise ConfigError(f"setting {key!r} is {value!r}; expected {_EXPECTED[kind]}, for instance {default!r}")
    return value


_RANGES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "lr": (lambda v: 0 < v < float("inf"), "a positive number"),
    "momentum": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "weight_decay": (lambda v: 0 <= v < float("inf"), "a number of at least 0"),
    "epochs": (lambda v: v >= 1, "at least 1"),
    "batch_size": (lambda v: v >= 1, "at least 1"),
    "max_steps": (lambda v: v >= 0, "at least 0 (0: no limit)"),
    "fraction": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "fraction_evaluate": (lambda v: 0 <= v <= 1, "0 to 1"),
    "evaluate_every": (lambda v: v >= 1, "at least 1"),
    "timeout": (lambda v: 0 < v < float("inf"), "a positive number of seconds"),
    "start_timeout": (lambda v: 0 < v < float("inf"), "a positive number of seconds"),
}


def _check_ranges(settings: Settings, *, all_examples: bool) -> None:
    for key, (holds, expected) in _RANGES.items():
        if all_examples and key == "batch_size" and settings[key] == 0:
            continue
        if not holds(settings[key]):
            raise ConfigError(f"setting {key!r} is {settings[key]!r}; expected {expected}")
