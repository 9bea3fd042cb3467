"""What an experiment is: a question, the systems compared, the settings a user may change, and the claims.

A module in :mod:`fedcomp.experiments.catalog` builds one :class:`Experiment`. It names no file and prints nothing;
running it, storing it and reporting it are the work of :mod:`experiments.run`, :mod:`fedcomp.experiments.store` and
:mod:`fedcomp.experiments.report`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from fedcomp.errors import ConfigError, FedcompError, nearest
from fedcomp.experiments.engines import ENGINES
from fedcomp.experiments.findings import Findings, Say
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.params import shown
from fedcomp.rules import Rule, Text
from fedcomp.strategies.parts import BUDGET

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
    >>> Option(0.01, Real(above=0.0, most=1.0), "share of the coordinates sent").parse("codec.density", "0.1")
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
                raise ConfigError(f"{key} cannot be {text!r}: {_one_line(error)}") from error
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

    def spec(self, system: str, label: str, task: str, *, take: Iterable[str] = (), **fixed: Value) -> RunSpec:
        """Return the :class:`RunSpec` of one row.

        ``take`` lists the settings the row uses; a name that ends in ``"."`` takes every setting below it.
        ``fixed`` are settings this row sets itself (underscores stay, keys with dots go through
        ``**{"codec.density": 0.01}``).
        """
        wanted = tuple(take)
        chosen = {
            key: value
            for key, value in self.settings.items()
            if any(key == want or (want.endswith(".") and key.startswith(want)) for want in wanted)
        }
        return RunSpec(
            system=system,
            label=label,
            task=task,
            engine=self.engine,
            rounds=self.rounds,
            clients=self.clients,
            seed=self.seed,
            settings={**chosen, **fixed},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as a JSON-able dictionary."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"settings": dict(self.settings)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the configuration that :meth:`to_json` wrote."""
        # Runs that were stored before there were budgets or quick runs lack them.
        return cls(**{f.name: document[f.name] for f in fields(cls) if f.name in document})


Rows = Callable[[Config], list[RunSpec]]
Measure = Callable[[Config, Mapping[str, RunResult], Say], Findings]


def no_rows(config: Config) -> list[RunSpec]:
    """Return no row: the ``rows`` of an experiment that only measures."""
    return []


@dataclass(frozen=True)
class Experiment:
    """A question and how it is answered.

    Parameters
    ----------
    name : str
        The name on the command line and of the module in :mod:`fedcomp.experiments.catalog`.
    question : str
        One sentence that ends in a question mark.
    rows : callable
        From a :class:`Config` to one :class:`RunSpec` per system compared; labels are unique.
        :func:`no_rows` for an experiment that only measures.
    measure : callable
        From the configuration, the results of the rows by label and a :class:`~fedcomp.experiments.findings.Say` to
        :class:`~fedcomp.experiments.findings.Findings`: whatever else has to be run, tables, figures, claims and the
        answer. Called when all rows are finished.
    baseline : str
        Label of the row the ratio column compares with; empty for the first.
    options : mapping
        Every key of ``--set`` with its :class:`Option`.
    rounds, clients : int
        Default size of a run.
    notes : str
        What a reader must know to judge the result; plain text, paragraphs separated by an empty line.
    measures_privately : bool
        Whether what ``measure`` trains keeps the configuration's budget, so that there can be one without private rows.
    minutes : float
        What a run at the defaults takes on two cores, measured; 0 where nobody has.
    quick : tuple of str
        What ``--quick`` sets, as ``key=value``; ``rounds`` and ``clients`` may be among them. The smallest sizes that
        still exercise everything.

    Examples
    --------
    >>> def rows(config):
    ...     return [config.spec(system, system, "digits", take=("lr",)) for system in ("fedavg", "qsgd")]
    >>> def measure(config, results, say):
    ...     return Findings(answer=f"QSGD reaches {100 * results['qsgd'].accuracy:.1f} %.")
    >>> from fedcomp.rules import Real
    >>> options = {"lr": Option(0.1, Real(above=0.0), "step size of the clients' SGD")}
    >>> experiment = Experiment("levels", "Does QSGD train as well?", rows, measure, options, rounds=20, clients=10)
    >>> [spec.settings["lr"] for spec in experiment.specs(experiment.configure(assignments=["lr=0.3"]))]
    [0.3, 0.3]
    """

    name: str
    question: str
    rows: Rows
    measure: Measure
    options: Mapping[str, Option]
    rounds: int
    clients: int
    baseline: str = ""
    notes: str = ""
    engines: tuple[str, ...] = tuple(ENGINES)
    measures_privately: bool = False
    minutes: float = 0.0
    quick: tuple[str, ...] = ()

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

    def specs(self, config: Config) -> list[RunSpec]:
        """Return the rows of ``config``; raises :class:`ConfigError` when two rows share a label, or when there is a
        budget and neither a row nor the measurement could keep it."""
        specs = self.rows(config)
        if config.budget is not None:
            specs = [within(spec, config.budget) for spec in specs]
            if not self.measures_privately and not any(BUDGET in spec.settings for spec in specs):
                raise ConfigError(f"experiment {self.name!r} has nothing that a budget could end; leave --budget out")
        labels = [spec.label for spec in specs]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ConfigError(f"experiment {self.name!r} has two rows called {twice[0]!r}; labels must be unique")
        return specs

    def idle(self, config: Config) -> bool:
        """Whether ``config`` asks for no round of an experiment that has rounds: nothing is measured or claimed."""
        return self.rounds > 0 and config.rounds == 0

    def changed(self, config: Config) -> list[str]:
        """Return what ``config`` sets differently from the defaults, as ``key=value`` texts, the seed left out."""
        pairs: list[tuple[str, Value, Value]] = [
            ("rounds", config.rounds, self.rounds),
            ("clients", config.clients, self.clients),
        ]
        if config.budget is not None:
            pairs.append(("budget", config.budget, ""))
        matter = {key: option for key, option in self.options.items() if not option.neutral}
        pairs += [(key, config.settings[key], option.default) for key, option in matter.items()]
        return [f"{key}={show_value(value)}" for key, value, default in pairs if value != default]

    def _assigned(self, assignments: Sequence[str]) -> dict[str, Value]:
        given: dict[str, Value] = {}
        for text in assignments:
            key, sign, value = text.partition("=")
            key = key.strip()
            if not sign:
                raise ConfigError(f"--set needs key=value, not {text!r}{self._hint(key)}")
            if key not in self.options:
                raise ConfigError(f"experiment {self.name!r} has no setting {key!r}{self._hint(key)}")
            given[key] = self.options[key].parse(key, value)
        return given

    def _hint(self, key: str) -> str:
        # Users write the part after the dot ("density"), so that is compared as well as the full name.
        for full in self.options:
            if key and full.rpartition(".")[2] == key:
                return f"; did you mean {full!r}?"
        return nearest(key, self.options)


def check_budget(budget: float | None) -> None:
    """Raise :class:`ConfigError` unless ``budget`` is none, or an epsilon that can be kept."""
    if budget is not None and not 0.0 < budget < math.inf:
        raise ConfigError(f"--budget must be an epsilon greater than 0 and finite, not {budget:g}")


def within(spec: RunSpec, budget: float) -> RunSpec:
    """Return ``spec`` with ``budget``, or its own smaller one, if its system promises privacy; else as it is."""
    from fedcomp.experiments.systems import get_system

    if not get_system(spec.system).private:
        return spec
    own = float(spec.settings.get(BUDGET, 0.0))
    return replace(spec, settings={**spec.settings, BUDGET: min(budget, own or math.inf)})


def show_value(value: Value) -> str:
    """Return ``value`` as a user would type it after ``--set key=``."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
