"""An experiment's rows, trained and measured by name: bytes sent, accuracy reached, and claims about them.

A row is a label and the text that a user would type after ``compare``: ``"topk feedback=true codec.density=0.01"``.
Rows are trained by the runner on the engine of the run, one training each; or, where an experiment tunes or repeats,
by :meth:`Training.run` with seeds of their own. What came out is asked by name: :data:`QUANTITIES` are the columns of
tables, the axes of curves, the words of claims and of the answer. What is mathematics of one system is a *study*, a
function that returns :class:`Studied`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fedcomp.errors import ConfigError, nearest
from fedcomp.experiments.experiment import Curve, Experiment, Rows, Studied, read_claims
from fedcomp.experiments.findings import Claim, Curves, Findings, Say, Table, different_bytes, mean, spread
from fedcomp.experiments.kit import Record, Records, Sweep, curves, learning_line, over_seeds, repetitions, table
from fedcomp.experiments.options import OF_EVERY_ROW, Config, numbers, show_value
from fedcomp.experiments.spec import RunResult, RunSpec, parse_settings
from fedcomp.strategies.parts import BUDGET

if TYPE_CHECKING:
    from fedcomp.experiments.central import Plan
    from fedcomp.program import System

TUNING_SEED: Final = 2**32
"""Added to the seed of the trainings by which settings are chosen: no figure of a table is from such draws."""

Value = str | float | None


class Found:
    """What an experiment's rows came to.

    Attributes
    ----------
    experiment, config, say
        Of the run.
    results : mapping
        Rows that the runner trained, by label.
    rows : Rows
    chosen : mapping
        By label, the settings that were tuned.
    groups : mapping
        By label, a record for every seed: see :meth:`Training.run`.
    studied : Studied
    """

    def __init__(self, experiment: Experiment, config: Config, results: Mapping[str, RunResult], say: Say) -> None:
        self.experiment, self.config, self.results, self.say = experiment, config, results, say
        self.rows = rows_of(experiment, config)
        self.chosen: Mapping[str, Mapping[str, Any]] = {}
        self.tried: Mapping[str, Records] = {}
        self.groups: Mapping[str, Records] = {}
        self.studied = Studied()

    @property
    def workers(self) -> int:
        """Processes that may train side by side."""
        return int(self.config.settings.get("workers", 1))

    @property
    def baseline(self) -> str:
        """The row that others are compared with."""
        return self.experiment.baseline or next(iter(self.rows), "")

    def each(self, row: str, name: str) -> list[Any]:
        """Return a field of a row's records, one for every seed."""
        return self.groups[row].each(name)

    def mean(self, row: str, name: str) -> float:
        """Return the mean over seeds of a field of a row's records, NaN where one has none."""
        values = self.each(row, name)
        return math.nan if None in values else mean(values)

    def ratio(self, row: str, *names: str, other: str = "") -> float:
        """Return how many times smaller a row's sum of fields is than the baseline's, or that of another row."""
        whole, own = (sum(self.mean(each, name) for name in names) for each in (other or self.baseline, row))
        return whole / own if own else math.nan

    def of(self, row: str, quantity: str) -> Value:
        """Return a quantity of a row; of the study where ``row`` is empty.

        ``"points lost against QSGD"`` compares with that row and not with the baseline.

        Raises
        ------
        ConfigError
            When there is no such quantity or row.
        """
        found = self.studied.quantities
        key = (row, quantity) if row else quantity
        if key in found:
            return found[key]
        if not row:
            raise ConfigError(
                f"the study found no {quantity!r}{nearest(quantity, [k for k in found if isinstance(k, str)])}"
            )
        if row not in self.groups:
            raise ConfigError(f"no row {row!r}{nearest(row, self.groups)}")
        name, _, other = quantity.partition(" against ")
        if name not in QUANTITIES:
            raise ConfigError(f"no quantity {name!r}{nearest(name, QUANTITIES)}")
        if other and other not in self.groups:
            raise ConfigError(f"quantity {quantity!r}: no row {other!r}{nearest(other, self.groups)}")
        return QUANTITIES[name].of(self, row, other)

    def number(self, row: str, quantity: str) -> float:
        """Return a quantity that is a number; NaN where there is none."""
        value = self.of(row, quantity)
        return math.nan if value is None else float(value)

    def sweep(self, run: Callable[..., Mapping[str, Any]], axes: Any, title: str = "", **shared: Any) -> Records:
        """Run the cells of a study: see :class:`~fedcomp.experiments.kit.Sweep`."""
        return Sweep(run, axes, title, shared)(self.say, self.workers)


class Quantity(NamedTuple):
    """What a row came to: a function of what was found, the row and the row compared with, and decimals in tables."""

    of: Callable[[Found, str, str], Value]
    digits: int | None = None


def _times(*names: str) -> Callable[[Found, str, str], float]:
    return lambda found, row, other: found.ratio(row, *names, other=other)


def _part(*names: str) -> Callable[[Found, str, str], float]:
    return lambda found, row, other: found.ratio(other or found.baseline, *names, other=row)


def _each(name: str, *, rounds: bool = True) -> Callable[[Found, str, str], float]:
    """A sum of the whole run, by client, and by round if ``rounds``."""

    def each(found: Found, row: str, other: str) -> float:
        parts = found.config.clients * (found.config.rounds if rounds else 1)
        return found.mean(row, name) / parts if parts else math.nan

    return each


def _lost(found: Found, row: str, other: str) -> float:
    return found.mean(other or found.baseline, "score") - found.mean(row, "score")


def _range(found: Found, row: str, other: str) -> str:
    losses = found.each(row, "loss")
    return f"{mean(losses):.3f}±{spread(losses):.3f}"


def _differing(found: Found, row: str, other: str) -> float:
    """Of rows that the runner trained: final models are compared byte by byte."""
    return different_bytes(found.results[other or found.baseline].arrays, found.results[row].arrays)


QUANTITIES: Final[Mapping[str, Quantity]] = {
    "step size": Quantity(lambda found, row, other: found.chosen[row].get("lr")),
    "test, %": Quantity(lambda found, row, other: found.mean(row, "score"), 1),
    "±": Quantity(lambda found, row, other: spread(found.each(row, "score")), 1),
    "final test, %": Quantity(lambda found, row, other: found.mean(row, "accuracy"), 1),
    "final loss": Quantity(lambda found, row, other: found.mean(row, "loss")),
    "loss, ± half its range": Quantity(_range),
    "times the loss": Quantity(_part("loss"), 4),
    "points lost": Quantity(_lost, 1),
    "uplink bytes": Quantity(_each("uplink"), 0),
    "downlink bytes": Quantity(_each("downlink"), 0),
    "last downlink bytes": Quantity(_each("late", rounds=False), 0),
    "bits per weight": Quantity(lambda found, row, other: 32 / found.ratio(row, "uplink"), 3),
    "times fewer up": Quantity(_times("uplink"), 1),
    "times fewer down": Quantity(_times("downlink"), 1),
    "times fewer both ways": Quantity(_times("uplink", "downlink"), 1),
    "times fewer up, as messages": Quantity(_times("wire_up"), 2),
    "times fewer down, as messages": Quantity(_times("wire_down"), 2),
    "times fewer, as messages": Quantity(_times("wire_up", "wire_down"), 2),
    "part of the uplink bytes": Quantity(_part("uplink"), 3),
    "part of all bytes": Quantity(_part("uplink", "downlink"), 3),
    "simulated seconds": Quantity(lambda found, row, other: found.mean(row, "simulated"), 1),
    "seconds here": Quantity(lambda found, row, other: found.mean(row, "seconds"), 2),
    "bytes of the model that differ": Quantity(_differing, 0),
}
"""By name. Bytes are of payload, per client and round; ``times fewer`` compares with the baseline or with the row after
``against``; ``as messages`` counts serialised messages with Flower's own fields. ``bits per weight`` counts all that a
client sends, of 32 of the baseline."""

AXES: Final[Mapping[str, int]] = {
    "round": 0,
    "test accuracy, %": 1,
    "uplink payload so far": 2,
    "payload so far, up and down": 3,
    "messages so far, up and down": 4,
}
"""Columns of a training's ``points``. Bytes are of all clients."""


def rows_of(experiment: Experiment, config: Config) -> Rows:
    """Return an experiment's rows in this configuration."""
    return experiment.rows(config) if callable(experiment.rows) else experiment.rows


@dataclass(frozen=True)
class Training:
    """How rows are trained, without what is made of it: this goes to other processes.

    Attributes
    ----------
    config : Config
    rows : Rows
    task, each, train, rivals, last, tunes_without_messages
        As of :class:`~fedcomp.experiments.experiment.Experiment`.
    tunes : bool
        Whether rows are tuned, so that some trainings are judged on a validation split.
    """

    config: Config
    rows: Rows
    task: str
    each: str
    train: Callable[[RunSpec, Training], Mapping[str, Any]]
    rivals: Mapping[str, Callable[..., System]]
    last: int
    tunes: bool
    tunes_without_messages: bool

    @classmethod
    def of(cls, experiment: Experiment, config: Config) -> Training:
        """Return how the rows of an experiment are trained in this configuration."""
        return cls(
            config,
            rows_of(experiment, config),
            experiment.task,
            experiment.each(config) if callable(experiment.each) else experiment.each,
            experiment.train or by_messages,
            experiment.rivals,
            experiment.last,
            bool(experiment.tune),
            experiment.tunes_without_messages,
        )

    def spec(self, label: str, **fixed: Any) -> RunSpec:
        """Return the run of a row; ``fixed`` settings go before its own.

        Raises
        ------
        ConfigError
            When its text is not a system's name and settings, or names an option that there is not.
        """
        config = self.config

        def value(match: re.Match[str]) -> str:
            if match[1] not in config.settings:
                raise ConfigError(f"row {label!r}: no setting {match[1]!r}{nearest(match[1], config.settings)}")
            return show_value(config.settings[match[1]])

        system, _, settings = re.sub(r"\{([\w.]+)\}", value, self.rows[label]).strip().partition(" ")
        own: dict[str, Any] = {
            key: each for key, each in config.settings.items() if key.startswith("task.") or key in OF_EVERY_ROW
        }
        own |= {**parse_settings(self.each), **parse_settings(settings), **fixed}
        return RunSpec(
            system,
            label,
            str(own.pop("task", self.task)),
            config.engine,
            int(own.pop("rounds", config.rounds)),
            int(own.pop("clients", config.clients)),
            int(own.pop("seed", config.seed)),
            own,
        )

    def run(self, label: str, seed: int, *, tuning: bool = False, **chosen: Any) -> dict[str, Any]:
        """Train a row once; on the validation split, with other draws, if ``tuning``.

        Returns
        -------
        dict
            ``points`` (rows of :data:`AXES`), ``score`` (mean accuracy in percent of the last rounds), ``accuracy``,
            ``loss``, bytes of the whole run (``uplink``, ``downlink``, ``late``: of the last round; ``wire_up``,
            ``wire_down``, ``peer``), ``simulated`` and ``seconds``. A page's own training may leave out what it does
            not measure, and say in ``tie`` which of equal scores is better.
        """
        split = {"task.validation": tuning} if self.tunes else {}
        spec = replace(self.spec(label, **chosen, **split), seed=seed + tuning * TUNING_SEED)
        # What has no row in the table of systems cannot run over messages; a page's own training knows what to do.
        rivals = spec.system in self.rivals and self.train is by_messages
        simply = self.tunes_without_messages if tuning else rivals
        return dict((without_messages if simply else self.train)(spec, self))


def run_one(training: Training, **cell: Any) -> dict[str, Any]:
    """Train the row of a cell: :meth:`Training.run`, as a function of a module."""
    return training.run(**cell)


def specs_of(experiment: Experiment, config: Config) -> list[RunSpec]:
    """Return the rows that the runner trains: none where the experiment tunes or repeats, which it does itself. Private
    ones get the run's budget, where their own is not smaller.

    Raises
    ------
    ConfigError
        When there is a budget and neither a row nor the study could keep it.
    """
    training = Training.of(experiment, config)
    specs = [] if experiment.trains_itself else [training.spec(label) for label in training.rows]
    if config.budget is not None:
        from fedcomp.experiments.systems import get_system

        for i, spec in enumerate(specs):
            if get_system(spec.system).private:
                own = float(spec.settings.get(BUDGET, 0.0)) or math.inf
                specs[i] = replace(spec, settings={**spec.settings, BUDGET: min(config.budget, own)})
        if not experiment.measures_privately and not any(BUDGET in spec.settings for spec in specs):
            raise ConfigError(
                f"experiment {experiment.name!r} has no private system that a budget could end; leave --budget out"
            )
    return specs


def fields_of(result: RunResult, last: int) -> dict[str, Any]:
    """Return what is asked of a training, JSON-able: see :meth:`Training.run`."""
    line = learning_line(result.rounds)
    return {
        "points": line,
        "score": mean([point[1] for point in line][-last:]),
        "accuracy": line[-1][1] if line else math.nan,
        "loss": result.final.loss if result.rounds else math.nan,
        "uplink": result.uplink_payload_bytes,
        "downlink": result.downlink_payload_bytes,
        # What a round takes once every node holds a model.
        "late": result.rounds[-1].downlink_payload_bytes if result.rounds else 0,
        "wire_up": result.uplink_wire_bytes,
        "wire_down": result.downlink_wire_bytes,
        "peer": result.peer_wire_bytes,
        "simulated": result.simulated_seconds,
        "seconds": result.seconds,
    }


def by_messages(spec: RunSpec, training: Training) -> dict[str, Any]:
    """Train a row through Flower's messages, in this process."""
    from fedcomp.experiments.engines import inprocess
    from fedcomp.flower.logs import quiet

    with quiet():
        return fields_of(inprocess.run(spec), training.last)


def without_messages(spec: RunSpec, training: Training) -> dict[str, Any]:
    """Train a row without messages, with real frames: the same model, sooner. What only messages have is None."""
    from fedcomp.experiments.central import simulate
    from fedcomp.flower.logs import quiet

    with quiet():
        out = simulate(*planned(spec, training))
    line = [(float(p.round), 100 * p.accuracy, float(p.uplink), None, None) for p in out.points]
    nothing = dict.fromkeys(("downlink", "late", "wire_up", "wire_down", "peer", "simulated", "seconds"))
    return {
        "points": line,
        "score": mean([point[1] for point in line][-training.last :]),
        "accuracy": line[-1][1] if line else math.nan,
        "loss": out.final.loss,
        # What diverged did not send the rest of its rounds: fewer bytes are no merit of it.
        "uplink": math.nan if out.diverged else out.uplink,
        "diverged": out.diverged,
        **nothing,
    }


def measured(spec: RunSpec, training: Training) -> dict[str, Any]:
    """Train a row without messages and look into what was sent: :func:`fedcomp.experiments.central.measured`."""
    from fedcomp.experiments import central

    return central.measured(*planned(spec, training))


def planned(spec: RunSpec, training: Training) -> tuple[Plan, System]:
    """Return how a row is trained without messages, and its program."""
    from fedcomp.experiments.central import Plan

    if spec.system not in training.rivals:
        return Plan.of(spec)
    # What is tried here only has no row in the table of systems: the plan is that of plain averaging.
    own = {key: value for key, value in spec.settings.items() if not key.startswith("codec.")}
    return Plan.of(replace(spec, system="fedavg", settings=own))[0], rival(spec, training)


def rival(spec: RunSpec, training: Training) -> System:
    """Return the program of a row that is tried here only, from its settings ``codec.*``."""
    given = {key.removeprefix("codec."): value for key, value in spec.settings.items() if key.startswith("codec.")}
    return training.rivals[spec.system](**given)


def of_codec(id: str, feedback: bool = False, **options: Any) -> System:  # what configurations call it
    """Return the program of a codec by its name, a rival of rows ``"codec codec.id=fft codec.density=0.15"``.

    Every tensor that the codec takes is coded, also where the table's system of that name would send it whole.
    """
    from fedcomp.codecs import get_codec
    from fedcomp.experiments.central import program_of

    codec = {"id": id, **options}
    return program_of(get_codec({"id": "feedback", "codec": codec} if feedback else codec))


def findings(experiment: Experiment, config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Train what the runner did not, study, and return what was found.

    Parameters
    ----------
    results : mapping
        By label, what came of :func:`specs_of`.
    """
    found = Found(experiment, config, results, say)
    if experiment.trains_itself:
        _train_all(found)
    else:
        found.groups = {
            label: Records([Record(fields_of(result, experiment.last))]) for label, result in results.items()
        }
    if experiment.study is not None:
        found.studied = experiment.study(found)
    shown = [_table(found)] if experiment.columns else []
    return Findings(
        tables=[*shown, *found.studied.tables],
        figures=[*(_curve(found, each) for each in experiment.curves), *found.studied.figures],
        claims=claims_of(found),
        answer=filled(experiment.answer(found) if callable(experiment.answer) else experiment.answer, found),
        tasks=list(found.studied.tasks),
        statements=found.studied.statements,
    )


def _train_all(found: Found) -> None:
    experiment, config = found.experiment, found.config
    grids = {key: numbers(str(config.settings[name])) for key, name in experiment.tune.items()}
    seeds = repetitions(config) if "seeds" in config.settings else range(config.seed, config.seed + 1)
    found.groups, found.tried = trained(found, experiment, seeds, grids)
    found.chosen = {label: {key: group[0][key] for key in grids} for label, group in found.groups.items()}


def trained(
    found: Found, experiment: Experiment, seeds: Sequence[int], grids: Mapping[str, Sequence[float]]
) -> tuple[dict[str, Records], dict[str, Records]]:
    """Train the rows of ``experiment``, which is that of ``found`` or one beside it, once for each seed.

    Parameters
    ----------
    grids : mapping
        By setting, the values of which every row by itself gets those that do best on a validation split.

    Returns
    -------
    groups, tried : dict of str to Records
        By row: the trainings, which hold what was chosen; and what was tried for that.
    """
    training = replace(Training.of(experiment, found.config), tunes=bool(grids))
    cells = [
        {"label": label, **dict(zip(grids, each, strict=True))}
        for label in training.rows
        for each in product(*grids.values())
    ]
    tried: dict[str, Records] = {}
    if grids:
        asked = [{**cell, "seed": found.config.seed} for cell in cells]
        tried = found.sweep(partial(run_one, tuning=True), asked, "tuning", training=training).groups("label")
        best = {label: max(group, key=_worth) for label, group in tried.items()}
        cells = [{"label": label, **{key: best[label][key] for key in grids}} for label in training.rows]
    asked = [{**cell, "seed": seed} for cell in cells for seed in seeds]
    return found.sweep(run_one, asked, training=training).groups("label"), tried


def _worth(tried: Record) -> tuple[float, ...]:
    # What diverged comes last, also where NaN would be the largest by its place.
    if tried.get("diverged") is not None or math.isnan(tried.score):
        return (-math.inf,)
    return tried.score, tried.get("tie", 0.0)


def _table(found: Found) -> Table:
    experiment = found.experiment
    given = (
        experiment.columns if isinstance(experiment.columns, Mapping) else {name: name for name in experiment.columns}
    )
    columns: dict[str, Any] = {"row": lambda label: label}
    columns |= {heading: partial(_cell, found, each) for heading, each in given.items()}
    caption = experiment.caption or _caption(found)
    return table(experiment.title or "Rows", columns, found.rows, caption, optional=list(given))


def _cell(found: Found, column: Any, label: str) -> Any:
    if callable(column):
        return column(found, label)
    value, digits = found.of(label, column), None
    name = column.partition(" against ")[0]
    if name in QUANTITIES:
        digits = QUANTITIES[name].digits
    if digits is None or not isinstance(value, float) or not math.isfinite(value):
        return value
    return round(value, digits) if digits else round(value)


def _caption(found: Found) -> str:
    """Say what the numbers are means of, and how settings were chosen."""
    experiment = found.experiment
    over = "Means over seeds; test" if "seeds" in found.config.settings else "Test"
    last = f"is the mean of the last {experiment.last} rounds" if experiment.last > 1 else "is that of the last round"
    parts = [f"{over} accuracy {last}{', ± half the range over seeds' if over[0] == 'M' else ''}."]
    if experiment.tune:
        parts.append(
            f"Each row by itself has the {' and '.join(_WORDS.get(key, key) for key in experiment.tune)} of the grid "
            "that did best on a validation split of the training examples."
        )
    parts.append(f"Bytes of payload are per client and round; ratios compare with {found.baseline}.")
    return " ".join(parts)


_WORDS: Final = {"lr": "step size"}


def _curve(found: Found, each: Curve) -> Curves:
    for label in each.rows:
        if label not in found.groups:
            raise ConfigError(f"curve of {each.y!r}: no row {label!r}{nearest(label, found.groups)}")
    by_bytes = "so far" in each.x
    return curves(
        each.title or f"{each.y.partition(',')[0].capitalize()} against {each.x}",
        each.rows or found.rows,
        lambda label: over_seeds(found.groups[label], AXES[each.x]),
        lambda label: over_seeds(found.groups[label], AXES[each.y]),
        str,
        x_label=each.x + (", all clients" if by_bytes else ""),
        y_label=each.y,
        log_x=by_bytes,
        x_bytes=by_bytes,
        caption=each.caption,
    )


def claims_of(found: Found) -> list[Claim]:
    """Check an experiment's claims. A bound is a comparison and a number, ``<= 1.2``, or what an answer is filled with.

    Raises
    ------
    ConfigError
        When one is about what nobody measured, or its bound has another form.
    """
    written = found.experiment.claims
    made = []
    for line in read_claims(written(found) if callable(written) else written):
        name = f"{line.row}: {line.quantity}" if line.row else line.quantity
        given = found.studied.skipped
        skipped = given.get((line.row, line.quantity), given.get(line.quantity, ""))
        value = math.nan if skipped else found.number(line.row, line.quantity)
        bound = filled(line.bound, found)
        op, _, number = bound.partition(" ")
        try:
            made.append(Claim(name, value, op, float(number), line.reason, line.gate, skipped))
        except ValueError as error:
            raise ConfigError(
                f"claim {name!r}: bound {bound!r} is not a comparison and a number such as '<= 1.2'"
            ) from error
    return made


def filled(template: str, found: Found) -> str:
    """Return an answer with its numbers: ``{row | quantity:.1f}``, or ``{quantity:.1f}`` of the study.

    Raises
    ------
    ConfigError
        When nobody measured what it asks for.
    """

    def value(match: re.Match[str]) -> str:
        inside, colon, form = match[1].rpartition(":")
        row, _, quantity = (inside if colon else match[1]).rpartition("|")
        return format(found.of(row.strip(), quantity.strip()), form if colon else "")

    return re.sub(r"\{([^{}]+)\}", value, template)
