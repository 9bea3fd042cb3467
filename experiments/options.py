"""Options: the declaration of one option, the ones that many experiments share, and the configuration of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from fedcomp.errors import ConfigError, FedcompError, nearest
from fedcomp.params import shown
from fedcomp.rules import Int, Real, Rule, Text, checked

if TYPE_CHECKING:
    from typing import Self

Value = bool | int | float | str

TEXT: Final = Text(65_536)
"""The rule of a setting that is any text, or one that its own check reads."""


@dataclass(frozen=True)
class Option:
    """One setting a user may change with ``--set key=value``.

    Parameters
    ----------
    default : bool, int, float or str
        The value used when nothing is said.
    rule : Rule
        What a value may be, of the default's type.
    help : str
        One line: what it means, with its unit.
    check : callable, optional
        Receives the parsed value and raises ``ValueError`` when it cannot work.
    neutral : bool
        The setting changes no figure (how many processes work): a report does not list it as changed, and a run may
        be resumed with another value.

    Examples
    --------
    >>> from fedcomp.rules import Real
    >>> Option(0.01, Real(above=0.0, most=1.0), "fraction that is sent").parse("codec.density", "0.1")
    0.1
    """

    default: Value
    rule: Rule
    help: str
    check: Callable[[Any], object] | None = None
    neutral: bool = False

    def parse(self, key: str, text: str) -> Value:
        """Return the value that ``text`` means, or raise :class:`ConfigError` that names ``key``."""
        try:
            value: Value = self.rule.parse(text.strip())
        except ValueError as why:
            wanted = f"{self.rule} (default {show_value(self.default)})"
            raise ConfigError(f"{key} must be {wanted}, not {shown(text)}{why}") from None
        if self.check is not None:
            try:
                self.check(value)
            except (ValueError, FedcompError) as error:
                raise ConfigError(f"{key} cannot be {text!r}: {' '.join(str(error).split())}") from error
        return value


@dataclass(frozen=True)
class Config:
    """Everything that decides a run: the experiment's name, the engine, the size, the seed, all settings, and the
    epsilon that no private row may cross (None for what the rows say themselves). ``quick`` says that the size is the
    experiment's smallest, for which no bound was set."""

    experiment: str
    engine: str
    rounds: int
    clients: int
    seed: int
    settings: Mapping[str, Value]
    budget: float | None = None
    quick: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as a JSON-able dictionary."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"settings": dict(self.settings)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the configuration that :meth:`to_json` wrote."""
        return cls(**document)


_POSITIVE: Final = Real(above=0.0)


def numbers(text: str, each: Rule = _POSITIVE) -> tuple[float, ...]:
    """Return the different numbers in a text that separates them by commas, ascending.

    Parameters
    ----------
    each : Rule
        What every one of them has to be; positive where nothing is said.

    Raises
    ------
    ConfigError
        When one is not a number, or out of range.

    Examples
    --------
    >>> numbers("0.1, 0.01", each=Real(above=0.0, most=1.0))
    (0.01, 0.1)
    """
    return tuple(sorted({float(checked("entry", word.strip(), each, text=True)) for word in text.split(",")}))


_SHARE: Final = Real(above=0.0, most=1.0)

SHARED: Final[Mapping[str, Option]] = {
    "seeds": Option(3, Int(1, 100), "trainings per row, with the seeds from --seed on"),
    "workers": Option(1, Int(1, 256), "processes that train in parallel; affects only the time", neutral=True),
    "steps": Option(
        "0.1", TEXT, "step sizes of the clients' SGD to try; each row takes the best on a validation split", numbers
    ),
    "task.partition": Option("iid", TEXT, "how examples are partitioned: iid, dirichlet:ALPHA, shards:COUNT"),
    "task.hidden": Option("32", TEXT, "widths of the model's hidden layers; empty: none"),
    "lr": Option(0.1, _POSITIVE, "step size of the clients' SGD"),
    "momentum": Option(0.0, Real(least=0.0, most=0.999), "momentum of the clients' SGD"),
    "epochs": Option(1, Int(1), "passes of a client over its data in one round"),
    "max_steps": Option(0, Int(0), "most steps of a client in one round; 0: limited by epochs only"),
    "batch_size": Option(64, Int(0), "examples per step; 0: all of a client"),
    "fraction": Option(1.0, _SHARE, "fraction of the clients that train in a round"),
    "link": Option("10mbit", TEXT, "every client's link: a preset or UP[/DOWN][@LATENCY]; empty for none"),
    "codec.density": Option(0.01, _SHARE, "fraction of the coordinates that is sent"),
    "codec.levels": Option(127, Int(1, 32767), "positive levels of QSGD"),
    "delta": Option(1e-3, Real(above=0.0, most=0.1), "delta of every guarantee; below one over what it protects"),
}
"""By name; the default is what an experiment replaces."""

OF_EVERY_ROW: Final = frozenset({"lr", "momentum", "epochs", "max_steps", "batch_size", "fraction", "link"})
"""Settings that every row takes where an experiment has them, beside all of the task (``task.*``)."""


def option(key: str, given: Option | Value) -> Option:
    """Return the option called ``key``: ``given``, or the shared one with that default.

    Raises
    ------
    ValueError
        When no shared setting has this name.
    """
    if isinstance(given, Option):
        return given
    if key not in SHARED:
        raise ValueError(f"no shared setting {key!r}{nearest(key, SHARED)}; write an Option with a rule and a sentence")
    return replace(SHARED[key], default=given)


def show_value(value: Value) -> str:
    """Return ``value`` as a user would type it after ``--set key=``."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return str(value)
    # All of its digits where six are another number.
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
