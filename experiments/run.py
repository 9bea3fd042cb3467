"""The command line: ``python -m experiments.run [NAME]``.

Exit codes: 0 when every claim holds, 1 when a claim fails, 2 for a wrong name, key or value, 3 when a run
broke, 130 when it was interrupted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, TextIO

import click
import typer
from rich.console import Console

from experiments import console as show
from experiments import engines
from experiments.catalog import CATALOG, get_experiment
from experiments.experiment import Config, Experiment, show_value
from experiments.page import render_html
from experiments.report import failed_claims, summarise, verdict
from experiments.spec import RoundRecord, RunResult, RunSpec
from experiments.store import RunFolder, to_json_text, write_json, write_text
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower.offline import go_offline

OK, CLAIM_FAILED, WRONG_INPUT, BROKEN, INTERRUPTED = 0, 1, 2, 3, 130
DEFAULT = "quickstart"
RESUMABLE = frozenset({"inprocess"})
"""Engines that continue an unfinished row where it stopped; on the others such a row starts again."""


class Engine(Protocol):
    """Runs one row; :func:`experiments.engines.run` is the one that users meet."""

    def __call__(
        self, spec: RunSpec, *, on_round: Callable[[RoundRecord], None] | None, checkpoint: Path | None
    ) -> RunResult:
        """Return the finished row; call ``on_round`` after every round, continue from ``checkpoint``."""


@dataclass(frozen=True)
class Setup:
    """What the command line works with: the experiments it knows and the engine that runs their rows."""

    catalog: Mapping[str, str | Experiment] = field(default_factory=lambda: CATALOG)
    engine: Engine = engines.run


@dataclass(frozen=True)
class Request:
    """The arguments of one call, unchecked."""

    name: str | None
    engine: str | None
    rounds: int | None
    clients: int | None
    seed: int | None
    assignments: tuple[str, ...]
    resume: str | None
    as_json: bool
    out: Path


app = typer.Typer(add_completion=False)


@app.command(name="python -m experiments.run")
def command(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help=f"Experiment to run.  [default: {DEFAULT}]")] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the experiments, or the settings of NAME, and stop.")
    ] = False,
    engine: Annotated[str | None, typer.Option(help="inprocess, ray or superlink.  [default: inprocess]")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random decision.  [default: 0]")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Continue a run: its name, its path, or 'last'.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON document and nothing else.")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are made.")] = Path("runs"),
) -> None:
    """Run an experiment, write its report, and check its claims."""
    setup: Setup = context.obj or Setup()
    request = Request(name, engine, rounds, clients, seed, tuple(set_ or ()), resume, as_json, out)
    code = _list(setup, request) if list_ else _run(setup, request)
    raise typer.Exit(code)


def main(arguments: Sequence[str] | None = None, *, setup: Setup | None = None) -> int:
    """Run the command line and return its exit code; every error becomes one line on standard error."""
    try:
        code = app(
            args=None if arguments is None else list(arguments),
            standalone_mode=False,
            obj=setup or Setup(),
        )
    except click.ClickException as error:
        return _complain(error.format_message(), WRONG_INPUT)
    except ConfigError as error:
        return _complain(str(error), WRONG_INPUT)
    except FedcompError as error:
        return _complain(str(error), BROKEN)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; the run itself is stored.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return OK
    return int(code or OK)


def _list(setup: Setup, request: Request) -> int:
    if request.name is None:
        found = [get_experiment(name, setup.catalog) for name in setup.catalog]
        documents = [{"experiment": e.name, "question": e.question} for e in found]
        table = show.names_table("experiment", ((e.name, e.question) for e in found), "question")
    else:
        experiment = get_experiment(request.name, setup.catalog)
        documents = [
            {"key": key, "default": option.default, "help": option.help} for key, option in experiment.options.items()
        ]
        entries = ((key, show_value(o.default) or '""', o.help) for key, o in experiment.options.items())
        table = show.names_table("--set", entries, "default", "meaning")
    if request.as_json:
        print(to_json_text({"list": documents}))
    else:
        Console().print(table)
    return OK


def _run(setup: Setup, request: Request) -> int:
    experiment, config, specs, folder = _prepare(setup, request)
    # Flower reads its telemetry switch when it is imported, so it must be off before anything brings Flower
    # in.
    go_offline()
    errors = Console(stderr=True)
    with _clean_stdout(request.as_json) as stdout:
        if not request.as_json:
            _announce(experiment, config, specs)
        try:
            summary = _execute(setup, experiment, config, specs, folder, errors)
        except KeyboardInterrupt:
            return _interrupted(folder, request)
        except ConfigError as error:
            # The engine's own checks come before its first round; a run without a round is not worth keeping.
            folder.discard_if_empty()
            return _complain(str(error), WRONG_INPUT)
        except Exception as error:
            return _broken(folder, request, error)
        _close(summary, folder, request.as_json, stdout)
    return CLAIM_FAILED if failed_claims(summary) else OK


def _prepare(setup: Setup, request: Request) -> tuple[Experiment, Config, list[RunSpec], RunFolder]:
    """Check everything a user can get wrong, then make or find the run's folder."""
    if request.resume is None:
        experiment = get_experiment(request.name or DEFAULT, setup.catalog)
        config = experiment.configure(
            engine=request.engine,
            rounds=request.rounds,
            clients=request.clients,
            seed=request.seed or 0,
            assignments=request.assignments,
        )
        specs = _specs(experiment, config)
        return experiment, config, specs, RunFolder.create(request.out, config, specs)
    folder = RunFolder.find(request.out, request.resume)
    stored = folder.config
    if request.name not in (None, stored.experiment):
        raise ConfigError(
            f"run {folder.name} is of experiment {stored.experiment!r}, not {request.name!r}; "
            f"leave the name out or start a new run"
        )
    experiment = get_experiment(stored.experiment, setup.catalog)
    asked = experiment.configure(
        engine=request.engine if request.engine is not None else stored.engine,
        rounds=request.rounds if request.rounds is not None else stored.rounds,
        clients=request.clients if request.clients is not None else stored.clients,
        seed=request.seed if request.seed is not None else stored.seed,
        assignments=request.assignments,
    )
    given = {text.partition("=")[0].strip() for text in request.assignments}
    kept = {key: value for key, value in stored.settings.items() if key not in given}
    config = replace(asked, settings={**asked.settings, **kept})
    specs = _specs(experiment, config)
    folder.require_same(experiment, config, specs)
    folder.tidy()
    return experiment, config, specs, folder


def _specs(experiment: Experiment, config: Config) -> list[RunSpec]:
    # A spec is a run of at least one round; with none asked for, the rows are still named and checked.
    return experiment.specs(config if config.rounds else replace(config, rounds=1))


def _execute(
    setup: Setup,
    experiment: Experiment,
    config: Config,
    specs: Sequence[RunSpec],
    folder: RunFolder,
    errors: Console,
) -> dict[str, Any]:
    results: dict[str, RunResult] = {}
    if config.rounds:
        with _logged(folder.path / "log.txt"), show.Watch(errors, specs) as watch:
            recorded = folder.rounds()
            for spec in specs:
                result = folder.load(spec)
                kept = result is not None
                if result is None:
                    watch.start(spec, max((record.round for record in recorded[spec.label]), default=0))
                    checkpoint = folder.checkpoint(spec) if config.engine in RESUMABLE else None
                    result = setup.engine(spec, on_round=_recorder(folder, spec, watch), checkpoint=checkpoint)
                    folder.save(result)
                results[spec.label] = result
                watch.done(spec, result.accuracy, kept=kept)
    claims = experiment.claims(config, results) if results else []
    rounds = {label: result.rounds for label, result in results.items()}
    summary = summarise(experiment, config, specs, rounds, results, claims, str(folder.path))
    write_json(folder.path / "summary.json", summary)
    write_text(folder.path / "report.html", render_html(summary, rounds))
    return summary


def _recorder(folder: RunFolder, spec: RunSpec, watch: show.Watch) -> Callable[[RoundRecord], None]:
    def on_round(record: RoundRecord) -> None:
        folder.append(spec, record)
        watch.round(spec, record)

    return on_round


def _announce(experiment: Experiment, config: Config, specs: Sequence[RunSpec]) -> None:
    console = Console()
    console.print(f"[bold]{experiment.name}[/bold]: {experiment.question}", highlight=False)
    console.print(
        f"{len(specs)} systems, {config.rounds} rounds, {config.clients} clients, engine {config.engine}, "
        f"seed {config.seed}. Offline: Flower's telemetry and update check are off.",
        highlight=False,
    )


def _close(summary: Mapping[str, Any], folder: RunFolder, as_json: bool, stdout: TextIO) -> None:
    if as_json:
        stdout.write(to_json_text(summary) + "\n")
        stdout.flush()
        return
    console = Console(file=stdout)
    console.print()
    console.print(show.result_table(summary, console.width))
    console.print()
    if summary["claims"]:
        console.print(show.claim_table(summary["claims"], console.width))
        console.print()
    if failed_claims(summary) and summary["changed"]:
        console.print(f"Changed from the defaults the bounds were set for: {', '.join(summary['changed'])}.")
    console.print(verdict(summary), style="bold", highlight=False)
    console.print(f"Report: {folder.path / 'report.html'}", highlight=False, soft_wrap=True)


def _interrupted(folder: RunFolder, request: Request) -> int:
    finished = sum(len(records) for records in folder.rounds().values())
    if folder.discard_if_empty():
        print("interrupted before the first round was finished; nothing to keep", file=sys.stderr)
    else:
        print(f"interrupted: {finished} finished rounds are kept in {folder.path}", file=sys.stderr)
        print(f"continue with: {_resume_command(folder, request)}", file=sys.stderr)
    return INTERRUPTED


def _broken(folder: RunFolder, request: Request, error: Exception) -> int:
    file = folder.path / "error.txt"
    write_text(file, "".join(traceback.format_exception(error)))
    reason = str(error) if isinstance(error, FedcompError) else f"{type(error).__name__}: {error}"
    return _complain(
        f"the run broke: {reason}; details in {file}; continue with: {_resume_command(folder, request)}",
        BROKEN,
    )


def _resume_command(folder: RunFolder, request: Request) -> str:
    where = "" if request.out == Path("runs") else f" --out {request.out}"
    return f"python -m experiments.run --resume {folder.name}{where}"


def _complain(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _clean_stdout(wanted: bool) -> Iterator[TextIO]:
    """Keep standard output for one document: whatever else is printed, by us or below us, goes to standard error."""
    stdout = sys.stdout
    if not wanted:
        yield stdout
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if stdout is sys.__stdout__:
            # Ray and the SuperLink are other processes and C++ threads: they write to the descriptor.
            stdout.flush()
            saved = os.dup(1)
            os.dup2(2, 1)
            real = stack.enter_context(os.fdopen(saved, "w", encoding="utf-8"))
            stack.callback(_restore_stdout, saved)
            yield real
        else:
            yield stdout


def _restore_stdout(saved: int) -> None:
    os.dup2(saved, 1)


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Send what Flower logs and what Python warns about into ``path`` instead of through the progress display."""
    from flwr.common.logger import FLOWER_LOGGER

    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    warnings = logging.getLogger("py.warnings")
    before, propagate = list(FLOWER_LOGGER.handlers), FLOWER_LOGGER.propagate
    FLOWER_LOGGER.handlers, FLOWER_LOGGER.propagate = [handler], False
    warnings.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        warnings.removeHandler(handler)
        FLOWER_LOGGER.handlers, FLOWER_LOGGER.propagate = before, propagate
        handler.close()


if __name__ == "__main__":
    sys.exit(main())
