"""The definition of an experiment: a question, the systems compared, its options, and its claims.

A module in :mod:`fedcomp.experiments.catalog` builds one :class:`Experiment`. It names no file and prints nothing;
running it, storing it and reporting it are the work of :mod:`experiments.run`, :mod:`fedcomp.experiments.store` and
:mod:`fedcomp.experiments.report`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from fedcomp.errors import ConfigError, nearest
from fedcomp.experiments.engines import ENGINES
from fedcomp.experiments.findings import Figure, Table
from fedcomp.experiments.options import Config, Value, option, show_value
from fedcomp.experiments.spec import RunSpec


@dataclass(frozen=True)
class Curve:
    """A plot of rows.

    Parameters
    ----------
    y, x : str
        Keys of :data:`AXES`.
    rows : sequence of str
        Labels, the first one drawn broad; empty for all.
    title, caption : str
        Title: empty for the two axes.
    """

    y: str = "test accuracy, %"
    x: str = "uplink payload so far"
    rows: Sequence[str] = ()
    title: str = ""
    caption: str = ""


@dataclass(frozen=True)
class Studied:
    """What a study found.

    Attributes
    ----------
    quantities : mapping
        Numbers by name; by ``(row, name)`` where they are a row's.
    tables, figures, tasks : sequence
        As of :class:`~fedcomp.experiments.findings.Findings`.
    skipped : mapping
        Quantities that were not measured, and why; by name, or by ``(row, name)``.
    statements : mapping
        Privacy statements by row.
    """

    quantities: Mapping[Any, Value] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    tasks: Sequence[Mapping[str, Any]] = ()
    skipped: Mapping[Any, str] = field(default_factory=dict)
    statements: Mapping[str, Any] = field(default_factory=dict)


Rows = Mapping[str, str]
"""By label, the system and its settings: ``"topk feedback=true codec.density={codec.density}"``. A word in braces is
the value of an option. ``task=NAME``, ``rounds=N``, ``clients=N`` and ``seed=N`` are a row's own in place of the
experiment's."""

Study = Callable[[Any], Studied]
Columns = Mapping[str, str | Callable[[Any, str], Any]] | Sequence[str]
"""Quantities by name; or, by heading, a quantity or a function of what was found and a label."""


class Line(NamedTuple):
    """A claim as it is written: ``row | quantity | bound | gate or goal: reason``. A run fails with a gate; a goal is
    shown as missed. Without a row the quantity is the study's. Rows, or quantities, that ``&`` joins are a claim each.
    """

    row: str
    quantity: str
    bound: str
    gate: bool
    reason: str


def read_claims(text: str) -> list[Line]:
    """Read claims, one a line; a line without ``|`` goes on with the reason, one that begins with ``#`` is a comment.

    Raises
    ------
    ConfigError
        When a line has another form; what its bound may be is :func:`~fedcomp.experiments.tables.claims_of`'s.
    """
    whole: list[str] = []
    for line in (" ".join(each.split()) for each in text.splitlines()):
        if not line or line.startswith("#"):
            continue
        if "|" in line or not whole:
            whole.append(line)
        else:
            whole[-1] += f" {line}"
    lines: list[Line] = []
    for written in whole:
        parts = [part.strip() for part in written.split("|")]
        kind, colon, reason = parts[-1].partition(":")
        if len(parts) != 4 or not colon or kind not in ("gate", "goal") or not parts[1] or not reason.strip():
            raise ConfigError(f"claim {written!r}; expected 'row | quantity | bound | gate or goal: reason'")
        pairs = product(parts[0].split(" & "), parts[1].split(" & "))
        lines += [Line(row, quantity, parts[2], kind == "gate", reason.strip()) for row, quantity in pairs]
    return lines


@dataclass(frozen=True)
class Experiment:
    """A question, what is compared, and what is claimed.

    Parameters
    ----------
    name : str
        The name on the command line.
    question : str
        One sentence that ends in a question mark.
    rounds, clients : int
        Default size of a run.
    task : str
        What rows learn: a name known to :func:`fedcomp.tasks.get_task`.
    rows : mapping or callable
        See :data:`Rows`; or a function from a :class:`Config` to them.
    each : str or callable
        Settings of every row, ``"epochs=1 evaluate_every=1"``; or a function from a :class:`Config` to them.
    options : mapping
        Every key of ``--set`` with its :class:`Option`, or with its default where it is one that experiments share
        (:data:`fedcomp.experiments.options.SHARED`). Rows take those of the task and of training.
    tune : mapping
        Settings that are chosen for each row by itself on a validation split, with the option that lists what is tried.
    train : callable
        From a :class:`RunSpec` and a :class:`~fedcomp.experiments.tables.Training` to the record of a training:
        :func:`~fedcomp.experiments.tables.without_messages`, or one of the page's own; default
        :func:`~fedcomp.experiments.tables.by_messages`.
    tunes_without_messages : bool
        Whether settings are chosen without messages: the same models, sooner.
    rivals : mapping
        Systems that are tried here only, by the name in a row's text: a function from the settings ``codec.*`` to a
        program.
    last : int
        The score is the mean accuracy of the last so many evaluated rounds.
    baseline : str
        Label of the row that others are compared with; empty for the first.
    columns : sequence or mapping
        See :data:`Columns`; empty for no table of the rows.
    title, caption : str
        Of that table.
    curves : sequence of Curve
    claims : str or callable
        One a line: ``row | quantity | bound | gate or goal: reason``; or a function from a
        :class:`~fedcomp.experiments.tables.Found` to them.
    answer : str or callable
        A template: ``{row | quantity:.1f}``; or a function from a ``Found`` to it.
    study : callable, optional
        What rows do not show: from a ``Found`` to :class:`Studied`.
    repeats : bool
        Whether rows are trained once for each of ``seeds``; False where these are of what the study trains.
    engines : tuple of str
        Those that it runs on.
    notes : str
        What a reader must know to judge the result; plain text, paragraphs separated by an empty line.
    measures_privately : bool
        Whether what the study trains keeps the configuration's budget, so that there can be one without private rows.
    minutes : float
        What a run at the defaults takes on two cores, measured; 0 where nobody has.
    quick : tuple of str
        What ``--quick`` sets, as ``key=value``; ``rounds`` and ``clients`` may be among them. The smallest sizes that
        still exercise everything.

    Examples
    --------
    >>> experiment = Experiment(
    ...     "levels", "Does QSGD train as well?", rounds=20, clients=10, task="digits", options={"lr": 0.1},
    ...     rows={"dense": "fedavg", "127 levels": "qsgd codec.levels=127"},
    ...     claims="127 levels | points lost | <= 1.0 | goal: of this package",
    ...     answer="QSGD loses {127 levels | points lost:.1f} points.",
    ... )
    >>> experiment.configure(assignments=["lr=0.3"]).settings
    {'lr': 0.3}
    """

    name: str
    question: str
    rows: Any = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 0
    clients: int = 1
    baseline: str = ""
    notes: str = ""
    engines: tuple[str, ...] = tuple(ENGINES)
    measures_privately: bool = False
    minutes: float = 0.0
    quick: tuple[str, ...] = ()
    task: str = ""
    each: str | Callable[[Config], str] = ""
    tune: Mapping[str, str] = field(default_factory=dict)
    train: Callable[[RunSpec, Any], Mapping[str, Any]] | None = None
    tunes_without_messages: bool = True
    rivals: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    last: int = 5
    columns: Columns = ()
    title: str = ""
    caption: str = ""
    curves: Sequence[Curve] = ()
    claims: str | Callable[[Any], str] = ""
    answer: str | Callable[[Any], str] = ""
    study: Study | None = None
    repeats: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", {key: option(key, given) for key, given in self.options.items()})
        if not callable(self.claims):
            read_claims(self.claims)

    @property
    def trains_itself(self) -> bool:
        """Whether rows are tuned or repeated, which is not the runner's work."""
        return bool(self.tune) or (self.repeats and "seeds" in self.options)

    def configure(
        self,
        *,
        engine: str | None = None,
        rounds: int | None = None,
        clients: int | None = None,
        seed: int = 0,
        assignments: Sequence[str] = (),
        budget: float | None = None,
        quick: bool = False,
    ) -> Config:
        """Return the configuration a command line asks for.

        ``assignments`` are ``"key=value"`` texts; they and the other arguments go before what ``quick`` sets. Raises
        :class:`ConfigError` with one line that names the nearest right name for a wrong engine, key or value.
        """
        engine = self.engines[0] if engine is None else engine
        if engine not in self.engines:
            raise ConfigError(f"no engine {engine!r}{nearest(engine, self.engines)}")
        least = dict(text.split("=", 1) for text in self.quick) if quick else {}
        sizes = {"rounds": self.rounds, "clients": self.clients}
        sizes |= {size: int(least.pop(size)) for size in sizes if size in least}
        rounds = sizes["rounds"] if rounds is None else rounds
        clients = sizes["clients"] if clients is None else clients
        if rounds < 0:
            raise ConfigError(f"--rounds must be at least 0, not {rounds}")
        if clients < 1:
            raise ConfigError(f"--clients must be at least 1, not {clients}")
        if not 0 <= seed < 2**63:
            raise ConfigError(f"--seed must be at least 0 and below 2**63, not {seed}")
        check_budget(budget)
        settings = {key: option.default for key, option in self.options.items()}
        settings.update(self._assigned([f"{key}={value}" for key, value in least.items()]))
        settings.update(self._assigned(assignments))
        return Config(self.name, engine, rounds, clients, seed, settings, budget, quick)

    def changed(self, config: Config) -> list[str]:
        """Return what ``config`` sets differently from the defaults, as ``key=value`` texts, the seed left out."""
        now: dict[str, Any] = {"rounds": config.rounds, "clients": config.clients, "budget": config.budget}
        usual: dict[str, Any] = {"rounds": self.rounds, "clients": self.clients, "budget": None}
        now |= config.settings
        usual |= {key: option.default for key, option in self.options.items() if not option.neutral}
        return [f"{key}={show_value(now[key])}" for key, default in usual.items() if now[key] != default]

    def _assigned(self, assignments: Sequence[str]) -> dict[str, Value]:
        given: dict[str, Value] = {}
        for text in assignments:
            key, sign, value = text.partition("=")
            key = key.strip()
            if not sign:
                raise ConfigError(f"--set needs key=value, not {text!r}{nearest(key, self.options)}")
            if key not in self.options:
                raise ConfigError(f"experiment {self.name!r} has no setting {key!r}{nearest(key, self.options)}")
            given[key] = self.options[key].parse(key, value)
        return given


def check_budget(budget: float | None) -> None:
    """Raise :class:`ConfigError` unless ``budget`` is none, or an epsilon that can be kept."""
    if budget is not None and not 0.0 < budget < math.inf:
        raise ConfigError(f"--budget must be an epsilon greater than 0 and finite, not {budget:g}")
