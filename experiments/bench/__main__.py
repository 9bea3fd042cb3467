"""The command line of the benchmarks: ``python -m experiments.bench NAME [--quick] [--json]``.

Exit codes as for :mod:`experiments.run`: 0 when every claim that gates holds, 1 when one fails, 2 for a wrong name or
option, 3 when the benchmark broke, 130 when it was interrupted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TextIO

import typer

from fedcomp.errors import ConfigError, FedcompError, nearest
from fedcomp.experiments import console as show
from fedcomp.experiments.bench import BENCHMARKS
from fedcomp.experiments.commands import BROKEN, INTERRUPTED, OK, clean_stdout, command_line, complain, invoke
from fedcomp.experiments.report import environment, outcome
from fedcomp.experiments.sheets import Sheet, claims_sheet
from fedcomp.experiments.store import to_json_text
from fedcomp.flower.offline import go_offline
from fedcomp.measuring import conclude, run

Benchmarks = Mapping[str, tuple[str, str]]
"""Module path and description by name."""


@dataclass(frozen=True)
class BenchRequest:
    """The arguments of one call. Typer reads the command line from these fields."""

    name: Annotated[str | None, typer.Argument(help="Benchmark to run.", show_default=False)] = None
    show_list: Annotated[bool, typer.Option("--list", help="List the benchmarks and stop.")] = False
    quick: Annotated[bool, typer.Option("--quick", help="Smallest sizes; figures are not representative.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document and nothing else.")] = (
        False
    )


app = command_line(BenchRequest, "Run a benchmark and check its claims.")


def main(
    arguments: Sequence[str] | None = None,
    *,
    benchmarks: Benchmarks = BENCHMARKS,
    program: str = "python -m experiments.bench",
) -> int:
    """Run the command line and return its exit code; every error becomes one line on standard error."""

    def bench(request: BenchRequest) -> int:
        return _list(benchmarks, request.as_json) if request.show_list else _bench(benchmarks, request)

    return invoke(app, program, arguments, bench)


def _list(benchmarks: Benchmarks, as_json: bool) -> int:
    entries = [(name, summary) for name, (_, summary) in benchmarks.items()]
    if as_json:
        print(to_json_text({"list": [{"benchmark": name, "measures": text} for name, text in entries]}))
    else:
        show.make_console().print(show.table_of(Sheet("", ["benchmark", "measures"], entries, [False] * 2)))
    return OK


def _bench(benchmarks: Benchmarks, request: BenchRequest) -> int:
    name = request.name
    if name is None:
        raise ConfigError(f"name a benchmark: {', '.join(benchmarks)}")
    if name not in benchmarks:
        raise ConfigError(f"no benchmark {name!r}{nearest(name, benchmarks)}")
    go_offline()
    cases = importlib.import_module(benchmarks[name][0]).cases
    with clean_stdout(request.as_json) as stdout:
        try:
            say = partial(print, " ", file=sys.stderr, flush=True)
            found = run(cases(request.quick), quick=request.quick, say=say)
        except KeyboardInterrupt:
            return INTERRUPTED
        except FedcompError:
            raise
        except Exception as error:
            return complain(f"benchmark {name!r} broke: {type(error).__name__}: {error}", BROKEN)
        show_it = partial(_show, as_json=request.as_json, stdout=stdout)
        return conclude(name, found, show_it, quick=request.quick, environment=environment())


def _show(summary: Mapping[str, Any], *, as_json: bool, stdout: TextIO) -> None:
    if as_json:
        stdout.write(to_json_text(summary) + "\n")
        stdout.flush()
        return
    console = show.make_console(file=stdout)
    for table in show.rows_tables(summary["rows"]):
        console.print(table)
        console.print()
    if summary["claims"]:
        console.print(show.table_of(claims_sheet(summary["claims"], wide=console.width >= show.WIDE)))
        console.print()
    console.print(outcome(summary["claims"]).capitalize() + ".", style="bold", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
