"""The declaration of a system: its name, source, settings, and construction.

A system is declared beside its strategy. Settings are parameters of the constructors that it is built with, documented
there and read from there (:func:`settings_of`); a declaration gives only those that have no default, or another one.
``fedcomp.experiments.systems`` is the list of all declarations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from fedcomp.errors import ConfigError, nearest
from fedcomp.rules import LARGEST, Flag, Int, Real, Rule
from fedcomp.strategies.parts import CODEC_PREFIX, PLAIN_PREFIXES, Scalar, Settings
from fedcomp.verdicts import Verdict, verdict_of

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy

    from fedcomp.tasks.base import Task

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
        "adaptive_deadline": "",
        "start_timeout": 120.0,
        "link": "",
        "inner": "fedavg",
    }
)
"""Settings of every system.

``fraction`` and ``fraction_evaluate`` are the shares of clients that train and evaluate in a round;
``evaluate_every`` is the number of rounds between evaluations on the server's test split (the last round always is
one); ``timeout`` is what a round's exchange may take and ``start_timeout`` how long the server waits for its nodes, in
seconds; ``adaptive_deadline`` ends exchanges earlier, by the clients' own past times (``auto``, or
``auto:QUANTILE:SLACK``, read by :meth:`fedcomp.strategies.deadlines.Deadline.parse`; empty for never); ``link`` is what
:func:`fedcomp.timing.parse_link` reads, empty for no simulated time; ``inner`` is one of
:data:`fedcomp.strategies.parts.INNER`.
"""


def nothing_to_check(strategy: Any, task: Task, clients: int) -> None:
    """Accept every task."""


@dataclass(frozen=True)
class System:
    """One system.

    Attributes
    ----------
    name, title : str
        How it is called on the command line and in a table.
    paper : str
        Where it was published.
    summary : str
        One sentence: what a client sends.
    build : callable
        ``build(settings, seed) -> Strategy`` from resolved settings.
    defaults : mapping
        The settings this system has beyond :data:`COMMON`, with their defaults; the default's type is the type.
    prefixes : tuple of str
        Families of settings that are passed on to the system's parts.
    needs : mapping
        What it asks of the task ("task": "linear", "generator" or "graph") and the topology ("topology": "graph", a
        setting of that name); empty means any task that learns from records, star topology.
    private : bool
        Whether it promises privacy; its settings then include :data:`fedcomp.strategies.private.system.PRIVATE`.
    check : callable
        ``check(strategy, task, clients)`` raises :class:`ConfigError` where what was built does not fit the task.
    """

    name: str
    title: str
    paper: str
    summary: str
    build: Callable[[Settings, int], Strategy]
    defaults: Settings = field(default_factory=dict)
    prefixes: tuple[str, ...] = PLAIN_PREFIXES
    needs: Mapping[str, str] = field(default_factory=dict)
    private: bool = False
    check: Callable[[Any, Any, int], None] = nothing_to_check

    @property
    def verdict(self) -> Verdict:
        """When to take it, by :mod:`fedcomp.verdicts`; raises :class:`KeyError` where that has no line for it."""
        return verdict_of(self.name)

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
                raise ConfigError(f"system {self.name!r} has no setting {key!r}{nearest(key, known)}")
        all_examples = "topology" in self.needs or self.needs.get("task") == "graph"
        rules = {**_RULES, **_ALL_EXAMPLES} if all_examples else _RULES
        # Below a prefix no type is declared: the part that gets them checks them.
        given = {k: _checked(k, v, known[k], rules) if k in known else v for k, v in settings.items()}
        return {**known, **given}


_EMPTY: Final[Mapping[str, Scalar]] = MappingProxyType({"bool": False, "int": 0, "float": 0.0, "str": ""})
"""What a setting has where the constructor's default is None, by the type that its annotation begins with."""


def settings_of(constructor: Callable[..., Any], *names: str) -> dict[str, Scalar]:
    """Return parameters of a constructor as settings, with their defaults; 0 or the empty text stand for None.

    Raises
    ------
    TypeError
        When a parameter has no default that could be a setting's; this is a mistake in a declaration.
    """
    parameters = inspect.signature(constructor).parameters
    out: dict[str, Scalar] = {}
    for name in names:
        default = parameters[name].default
        if default is None:
            # Annotations are strings here, with a rule or without: "float | None" begins with the type that counts.
            annotation = str(parameters[name].annotation).removeprefix("Annotated[")
            default = _EMPTY.get(annotation.partition(" ")[0])
        if not isinstance(default, bool | int | float | str):
            raise TypeError(f"parameter {name!r} of {constructor!r} has no default that a setting could have")
        out[name] = default
    return out


def codec_settings(codec: str, *names: str) -> dict[str, Scalar]:
    """Return parameters of a codec with its own defaults."""
    from fedcomp.codecs.registry import codecs

    return {f"{CODEC_PREFIX}{name}": value for name, value in settings_of(codecs.find(codec), *names).items()}


def arguments(constructor: Callable[..., Any], settings: Settings, names: Any) -> dict[str, Any]:
    """Return settings as arguments of a constructor: the reverse of :func:`settings_of`.

    0 and the empty text become None where that is the parameter's default.
    """
    parameters = inspect.signature(constructor).parameters
    optional = {name for name, parameter in parameters.items() if parameter.default is None}
    return {name: (settings[name] or None) if name in optional else settings[name] for name in names}


def refuse_others(settings: Settings, only: Settings, why: str, *, where: str = "") -> None:
    """Refuse settings of all systems that mean nothing for one.

    Parameters
    ----------
    only : mapping
        The one value that each of them may have.

    Raises
    ------
    ConfigError
        When one has another; ``why`` says what to use instead, ``where`` in which kind of system.
    """
    for key, default in only.items():
        if settings[key] != default:
            raise ConfigError(f"{key}={settings[key]!r} does not fit{where}: {why}")


_RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "lr": Real(above=0.0),
        "momentum": Real(least=0.0, below=1.0),
        "weight_decay": Real(least=0.0),
        "epochs": Int(1),
        "batch_size": Int(1),
        "max_steps": Int(0),
        "fraction": Real(above=0.0, most=1.0),
        "fraction_evaluate": Real(least=0.0, most=1.0),
        "evaluate_every": Int(1),
        "timeout": Real(above=0.0),
        "start_timeout": Real(above=0.0),
    }
)

_ALL_EXAMPLES: Final = {"batch_size": Int(0)}
"""0 means all examples at once, which only gossip and graph systems train with."""

TYPES: Final[Mapping[type, Rule]] = MappingProxyType({bool: Flag(), int: Int(-LARGEST - 1), float: Real(finite=False)})
"""The rules of settings that the parts check which get them."""


def _checked(key: str, value: Scalar, default: Scalar, rules: Mapping[str, Rule]) -> Scalar:
    if isinstance(default, str):
        return str(value)
    rule = rules.get(key, TYPES[type(default)])
    try:
        checked: Scalar = rule.read(value)
    except ValueError:
        raise ConfigError(f"setting {key!r} is {value!r}; expected {rule}, for instance {default!r}") from None
    return checked
