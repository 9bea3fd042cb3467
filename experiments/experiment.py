"""What an experiment is: a question, the systems compared, the settings a user may change, and the claims.

A module in :mod:`fedcomp.experiments.catalog` builds one :class:`Experiment`. It names no file and prints nothing;
running it, storing it and reporting it are the work of :mod:`experiments.run`, :mod:`fedcomp.experiments.store` and
:mod:`fedcomp.experiments.report`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedcomp.errors import ConfigError, nearest
from fedcomp.experiments.engines import ENGINES
from fedcomp.experiments.findings import Findings, Say
from fedcomp.experiments.options import Config, Value, option, show_value
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.experiments.tables import (
    Columns,
    Curve,
    Found,
    Study,
    Training,
    by_messages,
    findings,
    read_claims,
    specs_of,
)
from fedcomp.strategies.parts import BUDGET


def no_rows(config: Config) -> list[RunSpec]:
    """Return no row: the ``rows`` of an experiment that only measures."""
    return []


Measure = Callable[[Config, Mapping[str, RunResult], Say], Findings]


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
        See :data:`fedcomp.experiments.tables.Rows`; or a function from a :class:`Config` to them.
    each : str or callable
        Settings of every row, ``"epochs=1 evaluate_every=1"``; or a function from a :class:`Config` to them.
    options : mapping
        Every key of ``--set`` with its :class:`Option`, or with its default where it is one that experiments share
        (:data:`fedcomp.experiments.options.SHARED`). Rows take those of the task and of training.
    tune : mapping
        Settings that are chosen for each row by itself on a validation split, with the option that lists what is tried.
    train : callable
        From a :class:`RunSpec` and a :class:`~fedcomp.experiments.tables.Training` to the record of a training:
        :func:`~fedcomp.experiments.tables.by_messages` or :func:`~fedcomp.experiments.tables.without_messages`.
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
        See :data:`fedcomp.experiments.tables.Columns`; empty for no table of the rows.
    title, caption : str
        Of that table.
    curves : sequence of Curve
    claims : str or callable
        One a line: ``row | quantity | bound | gate or goal: reason``; or a function from a
        :class:`~fedcomp.experiments.tables.Found` to them.
    answer : str or callable
        A template: ``{row | quantity:.1f}``; or a function from a ``Found`` to it.
    study : callable, optional
        What rows do not show: from a ``Found`` to :class:`~fedcomp.experiments.tables.Studied`.
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
    >>> [spec.settings["lr"] for spec in experiment.specs(experiment.configure(assignments=["lr=0.3"]))]
    [0.3, 0.3]
    """

    name: str
    question: str
    rows: Any = field(default_factory=dict)
    measure: Measure | None = None
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
    train: Callable[[RunSpec, Training], Mapping[str, Any]] = by_messages
    tunes_without_messages: bool = True
    rivals: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    last: int = 5
    columns: Columns = ()
    title: str = ""
    caption: str = ""
    curves: Sequence[Curve] = ()
    claims: str | Callable[[Found], str] = ""
    answer: str | Callable[[Found], str] = ""
    study: Study | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", {key: option(key, given) for key, given in self.options.items()})
        if not callable(self.claims):
            read_claims(self.claims)

    @property
    def trains_itself(self) -> bool:
        """Whether rows are tuned or repeated, which is not the runner's work."""
        return bool(self.tune) or "seeds" in self.options

    def findings(self, config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
        """Train what the runner did not, study, and return what was found.

        Parameters
        ----------
        results : mapping
            By label, what came of :meth:`specs`.
        """
        return findings(self, config, results, say) if self.measure is None else self.measure(config, results, say)

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
        specs = self.rows(config) if self.measure is not None else specs_of(self, config)
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
