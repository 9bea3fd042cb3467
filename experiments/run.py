"""The command line: ``python -m experiments.run [NAME]``; ``book`` in place of a name is :mod:`experiments.book`.

Exit codes: 0 when every claim holds, 1 when a claim fails, 2 for a wrong name, key or value, 3 when a run
broke, 130 when it was interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedcomp.errors import ConfigError, FedcompError
from fedcomp.experiments import board, engines, tables
from fedcomp.experiments import console as show
from fedcomp.experiments.catalog import CATALOG, get_experiment
from fedcomp.experiments.commands import (
    BROKEN,
    CLAIM_FAILED,
    INTERRUPTED,
    OK,
    WRONG_INPUT,
    clean_stdout,
    command_line,
    complain,
    invoke,
)
from fedcomp.experiments.definition import definition
from fedcomp.experiments.experiment import Experiment, check_budget
from fedcomp.experiments.findings import Say
from fedcomp.experiments.options import Config, show_value
from fedcomp.experiments.overview import write_index
from fedcomp.experiments.page import render_report
from fedcomp.experiments.progress import Watch
from fedcomp.experiments.report import count, failed_claims, rerun, summarise, takes, verdict
from fedcomp.experiments.sheets import Sheet
from fedcomp.experiments.spec import RoundRecord, RunResult, RunSpec
from fedcomp.experiments.store import RunFolder, to_json_text, write_text
from fedcomp.experiments.tables import specs_of
from fedcomp.experiments.two_runs import compare
from fedcomp.flower.offline import go_offline, proxied
from fedcomp.verdicts import VERDICTS

DEFAULT = "quickstart"
RESUMABLE = frozenset({"inprocess", "superlink"})
"""Engines that continue an unfinished row where it stopped; on the others such a row starts again."""


Engine = Callable[..., RunResult]
"""Runs one row, as :func:`fedcomp.experiments.engines.run` does: from a :class:`RunSpec` and, as keywords, ``on_round``
(called after every round), the path of a ``checkpoint`` to continue from, and that of what a private system releases
(``privacy``)."""


def _check_row(spec: RunSpec) -> None:
    from fedcomp.experiments.systems import check  # brings torch and Flower

    check(spec)


@dataclass(frozen=True)
class RunnerSetup:
    """What the command line works with: the experiments it knows, the engine that runs their rows, and the check
    that finds a row that cannot run before anything is started. ``program`` is what the command is called by."""

    catalog: Mapping[str, str | Experiment] = field(default_factory=lambda: CATALOG)
    engine: Engine = engines.run
    check: Callable[[RunSpec], None] = _check_row
    program: str = "python -m experiments.run"


@dataclass(frozen=True)
class Request:
    """The arguments of one call, unchecked. Typer reads the command line from these fields."""

    name: Annotated[
        str | None, typer.Argument(help="Experiment to run; book writes the book of results.", show_default=DEFAULT)
    ] = None
    show_list: Annotated[
        bool, typer.Option("--list", help="List the experiments, or the settings of NAME, and stop.")
    ] = False
    engine: Annotated[str | None, typer.Option(help=f"{', '.join(engines.ENGINES)}.", show_default="inprocess")] = None
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="A running Ray cluster, for --engine ray.", show_default=False),
    ] = None
    client_states: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for client memory, with the in-process engine.", show_default=False),
    ] = None
    checkpoint_every: Annotated[
        int | None, typer.Option(metavar="K", help="Rounds between two checkpoints.", show_default="1")
    ] = None
    rounds: Annotated[int | None, typer.Option(help="Rounds of training.", show_default="the experiment's")] = None
    clients: Annotated[int | None, typer.Option(help="Number of clients.", show_default="the experiment's")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of every random decision.", show_default="0")] = None
    budget: Annotated[
        float | None,
        typer.Option(metavar="EPS", help="Stop private systems before their epsilon crosses EPS.", show_default="none"),
    ] = None
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated.")
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help="Smallest sizes: a smoke test that checks no claim.")] = False
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Continue a run: its name, its path, or 'last'.")
    ] = None
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="RUN RUN", help="Compare two finished runs instead of running anything.", show_default=False
        ),
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON document and nothing else.")
    ] = False
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are made.")] = Path("runs")
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write the rounds for TensorBoard.", show_default=False)
    ] = None

    @property
    def places(self) -> dict[str, Any]:
        """Where a run takes place: options of :func:`fedcomp.experiments.engines.run`."""
        return {name: getattr(self, name) for name in ("ray_address", "client_states", "checkpoint_every")}

    def configure(self, experiment: Experiment, stored: Config | None = None) -> Config:
        """Return what is asked of an experiment; what is not given is the experiment's, or that of a ``stored`` run."""
        given = {name: getattr(self, name) for name in ("engine", "rounds", "clients", "seed")}
        if stored is None:
            kept: dict[str, Any] = {"seed": 0, "budget": self.budget, "quick": self.quick}
        else:
            kept = {name: getattr(stored, name) for name in (*given, "budget", "quick")}
        named = {name: value for name, value in given.items() if value is not None}
        # Some experiments train nothing, and have no rounds.
        if self.rounds == 0 and experiment.rounds:
            raise ConfigError("--rounds must be at least 1, not 0")
        return experiment.configure(assignments=self.assignments or (), **kept | named)


def main(
    arguments: Sequence[str] | None = None,
    *,
    setup: RunnerSetup | None = None,
    program: str = "python -m experiments.run",
) -> int:
    """Run the command line and return its exit code; every error becomes one line on standard error."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["book"]:
        from fedcomp.experiments import book  # its own options: no experiment has them

        return book.main(words[1:], program=f"{program} book")
    known = replace(setup or RunnerSetup(), program=program)

    def run(request: Request) -> int:
        if request.show_list:
            return _list(known.catalog, request)
        return _compare(request) if request.compare else _run(known, request)

    return invoke(app, program, words, run)


app = command_line(Request, "Run an experiment, write its report, and check its claims.")


def _list(catalog: Mapping[str, str | Experiment], request: Request) -> int:
    judged = [(name, *found) for section in VERDICTS.values() for name, found in section.items()]
    if request.name is None:
        known = [get_experiment(name, catalog) for name in catalog]
        documents = [{"experiment": e.name, "minutes": e.minutes or None, "question": e.question} for e in known]
        sheets = [
            Sheet(
                "", ["experiment", "on two cores", "question"], [(e.name, takes(e.minutes), e.question) for e in known]
            ),
            Sheet("", ["system or codec", "verdict", "why"], judged),
        ]
    else:
        options = get_experiment(request.name, catalog).options
        documents = [{"key": key, "default": option.default, "help": option.help} for key, option in options.items()]
        entries = [(key, show_value(option.default) or '""', option.help) for key, option in options.items()]
        sheets = [Sheet("", ["--set", "default", "meaning"], entries)]
    if request.as_json:
        verdicts = [dict(zip(("name", "verdict", "reason"), each, strict=True)) for each in judged]
        print(to_json_text({"list": documents} | ({} if request.name else {"verdicts": verdicts})))
        return OK
    console = show.make_console()
    for i, sheet in enumerate(sheets):
        if i:
            console.print()
        console.print(show.table_of(sheet))
    return OK


def _compare(request: Request) -> int:
    assert request.compare is not None
    found = compare(request.out, *request.compare)
    if request.as_json:
        print(to_json_text(found.to_json()))
        return OK
    console = show.make_console()
    for folder, summary in zip(found.folders, found.summaries, strict=True):
        console.print(f"{folder.name}: {verdict(summary)}", soft_wrap=True)
    for sheet in found.sheets:
        console.print()
        console.print(sheet.title, style="bold")
        if sheet.rows:
            console.print(show.table_of(sheet))
        if sheet.caption:
            console.print(sheet.caption, style="dim")
    console.print(found.verdict, style="bold")
    return OK


def _run(setup: RunnerSetup, request: Request) -> int:
    # Flower reads its telemetry switch when it is imported: it must be off before anything brings Flower in.
    go_offline()
    if request.tensorboard is not None:
        board.require()
    # Not part of the configuration: where a run takes place does not change what it finds.
    places = {name: place for name, place in request.places.items() if place is not None}
    setup = replace(setup, engine=functools.partial(setup.engine, **places))
    experiment, folder = _prepare(setup, request)
    errors = show.make_console(stderr=True)
    with clean_stdout(request.as_json) as stdout:
        if not request.as_json:
            _announce(experiment, folder)
        try:
            # A checkpoint holds all clients' states at once: what is kept in files may not fit.
            resumable = folder.config.engine in RESUMABLE and request.client_states is None
            summary, rounds = _execute(setup, experiment, folder, errors, resumable=resumable)
            if request.tensorboard is not None:
                board.export(request.tensorboard / folder.name, rounds)
        except KeyboardInterrupt:
            return _interrupted(folder, _resume_command(setup, folder, request))
        except ConfigError as error:
            # The engine's own checks come before its first round; a run without a round is not worth keeping.
            folder.discard_if_empty()
            return complain(str(error), WRONG_INPUT)
        except Exception as error:
            return _broken(folder, _resume_command(setup, folder, request), error)
        finally:
            _list_runs(folder)
        if request.as_json:
            stdout.write(to_json_text(summary) + "\n")
            stdout.flush()
        else:
            console = show.make_console(file=stdout)
            show.close(console, summary)
            console.print(f"Report: {folder.path / 'report.html'}", soft_wrap=True)
    return CLAIM_FAILED if failed_claims(summary) else OK


def _list_runs(folder: RunFolder) -> None:
    """Write down the session and the list of all runs, unless the run was discarded."""
    if not folder.path.is_dir():
        return
    try:
        folder.end_session()
        write_index(folder.path.parent)
    except OSError as error:
        complain(f"the list of runs could not be written: {error}", OK)


def _prepare(setup: RunnerSetup, request: Request) -> tuple[Experiment, RunFolder]:
    """Check everything a user can get wrong, then make or find the run's folder."""
    check_budget(request.budget)
    if request.resume is None:
        experiment = get_experiment(request.name or DEFAULT, setup.catalog)
        config = request.configure(experiment)
        specs = specs_of(experiment, config)
        # What the checks log is dropped: the folder for a log is made only once all rows have passed.
        with _logged(logging.NullHandler()):
            for spec in specs:
                setup.check(spec)
        return experiment, RunFolder.create(request.out, config, specs, definition(experiment))
    folder = RunFolder.find(request.out, request.resume)
    stored = folder.config
    if request.name not in (None, stored.experiment):
        raise ConfigError(
            f"run {folder.name} is of experiment {stored.experiment!r}, not {request.name!r}; "
            f"leave the name out or start a new run"
        )
    experiment = get_experiment(stored.experiment, setup.catalog)
    asked = request.configure(experiment, stored)
    given = {text.partition("=")[0].strip() for text in request.assignments or ()}
    # The stored values and not today's defaults, which another version may have changed.
    kept = {key: value for key, value in stored.settings.items() if key not in given}
    config = replace(asked, settings={**asked.settings, **kept})
    specs = specs_of(experiment, config)
    folder.require_same(experiment, config, specs)
    if request.budget is not None:
        # The one thing that may change: what was released stays paid, and what may still be released is set again.
        config = replace(config, budget=request.budget)
        specs = specs_of(experiment, config)
        folder.keep(config, specs)
    folder.tidy()
    return experiment, folder


def _execute(
    setup: RunnerSetup, experiment: Experiment, folder: RunFolder, errors: Console, *, resumable: bool
) -> tuple[dict[str, Any], dict[str, list[RoundRecord]]]:
    config, specs, recorded = folder.config, folder.specs, folder.rounds()
    results: dict[str, RunResult] = {}
    log = logging.FileHandler(folder.path / "log.txt", encoding="utf-8")
    with _logged(log), Watch(errors, specs, expected=60 * _known_minutes(experiment, config)) as watch:

        def on_round(spec: RunSpec, record: RoundRecord) -> None:
            # Stored before it is shown: a round that was reported survives a crash.
            folder.append(spec, record)
            watch.round(spec, record)

        for spec in specs:
            row = folder.row(spec)
            result = row.load()
            kept = result is not None
            if result is None:
                watch.start(spec, max((record.round for record in recorded[spec.label]), default=0))
                checkpoint = row.checkpoint if resumable else None
                told = functools.partial(on_round, spec)
                result = setup.engine(spec, on_round=told, checkpoint=checkpoint, privacy=row.privacy)
                row.save(result)
            results[spec.label] = result
            watch.done(spec, result.accuracy, result.final.round, kept=kept)
        say = Say(watch.say, folder.cells(), folder.keep_cell, watch.remaining.cells)
        findings = tables.findings(experiment, config, results, say)
    if config.quick:
        # The bounds were set for the default sizes; here they are shown but decide nothing.
        findings = replace(findings, claims=[replace(claim, gate=False) for claim in findings.claims])
    sessions = folder.sessions()
    facts = {
        # That of the run's beginning: parts of it may be older than today's. Earlier versions did not note it.
        "definition": folder.definition or definition(experiment),
        "run": str(folder.path),
        "began": sessions[0][0],
        "seconds": sum(seconds for _, seconds in sessions),
        "command": rerun(experiment, config, setup.program),
    }
    rounds = {label: result.rounds for label, result in results.items()}
    summary = summarise(experiment, config, specs, results, findings, facts)
    write_text(folder.path / "summary.json", to_json_text(summary) + "\n")
    write_text(folder.path / "report.html", render_report(summary, rounds))
    return summary, rounds


def _known_minutes(experiment: Experiment, config: Config) -> float:
    """Return what a run at the defaults was measured to take; 0 for other settings."""
    return experiment.minutes if config == experiment.configure(seed=config.seed) else 0.0


def _announce(experiment: Experiment, folder: RunFolder) -> None:
    config, systems = folder.config, len(folder.specs)
    console = show.make_console()
    console.print(f"{experiment.name}: {experiment.question}", style="bold")
    size = f"{count(config.rounds, 'round')}, {count(config.clients, 'client')}"
    if systems:
        size = f"{count(systems, 'system')}, {size}, engine {config.engine}"
    lines = [f"{size}, seed {config.seed}"]
    if _known_minutes(experiment, config):
        lines.append(f"takes {takes(experiment.minutes)} on two idle cores")
    lines.append("offline: Flower's telemetry and update check are off")
    if proxied(os.environ):
        lines.append("proxy: connections to this machine go past that of the environment")
    console.print("\n".join(lines), soft_wrap=True)


def _interrupted(folder: RunFolder, resume: str) -> int:
    finished = sum(len(records) for records in folder.rounds().values())
    cells = len(folder.cells())
    if folder.discard_if_empty():
        print("interrupted before the first round was finished; nothing was saved", file=sys.stderr)
    else:
        measured = f" and {cells} parts of the measurement" if cells else ""
        print(f"interrupted: {finished} finished rounds{measured} are kept in {folder.path}", file=sys.stderr)
        print(f"continue with: {resume}", file=sys.stderr)
    return INTERRUPTED


def _broken(folder: RunFolder, resume: str, error: Exception) -> int:
    file = folder.path / "error.txt"
    write_text(file, "".join(traceback.format_exception(error)))
    reason = str(error) if isinstance(error, FedcompError) else f"{type(error).__name__}: {error}"
    return complain(
        f"the run failed: {reason}; details in {file}; continue with: {resume}",
        BROKEN,
    )


def _resume_command(setup: RunnerSetup, folder: RunFolder, request: Request) -> str:
    where = [] if request.out == Path("runs") else ["--out", str(request.out)]
    places = [f"--{name.replace('_', '-')}={place}" for name, place in request.places.items() if place is not None]
    return f"{setup.program} {shlex.join(['--resume', folder.name, *where, *places])}"


@contextlib.contextmanager
def _logged(handler: logging.Handler) -> Iterator[None]:
    """Give ``handler`` what Flower logs and what Python warns about, which would tear the progress display."""
    import flwr.app  # noqa: F401  # gives Flower's logger its own handlers, which are set aside below

    flower = logging.getLogger("flwr")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    warnings = logging.getLogger("py.warnings")
    before, propagate = list(flower.handlers), flower.propagate
    flower.handlers, flower.propagate = [handler], False
    warnings.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        warnings.removeHandler(handler)
        flower.handlers, flower.propagate = before, propagate
        handler.close()


if __name__ == "__main__":
    sys.exit(main())
