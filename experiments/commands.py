"""What every command of the project shares: exit codes, one-line errors, a standard output that holds one document."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any, TextIO, TypeVar, get_type_hints

import click
import typer

from fedcomp.errors import ConfigError, FedcompError, MissingExtra, optional

Request = TypeVar("Request")

OK, CLAIM_FAILED, WRONG_INPUT, BROKEN, INTERRUPTED = 0, 1, 2, 3, 130


def command_line(kind: type[Request], run: Callable[[typer.Context, Request], int]) -> typer.Typer:
    """Return a command whose arguments and options are the fields of a dataclass.

    Parameters
    ----------
    kind : type
        A dataclass whose fields are annotated as Typer reads them: ``Annotated[int, typer.Option(help=...)]``.
    run : callable
        Receives the context and the arguments of the call, and returns the exit code; its docstring is the help text.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Sum:
    ...     first: int
    ...     second: int = 2
    >>> app = command_line(Sum, lambda context, asked: print(asked.first + asked.second) or 0)
    >>> invoke(app, "sum", ["1"], None)
    3
    0
    """

    def command(context: typer.Context, **given: Any) -> None:
        raise typer.Exit(run(context, kind(**given)))

    # Typer looks for the arguments of a command in its signature.
    hints = get_type_hints(kind, include_extras=True)
    found = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for each in fields(kind):  # type: ignore[arg-type]  # a type variable cannot be bound to dataclasses
        default = inspect.Parameter.empty if each.default is MISSING else each.default
        found.append(
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[each.name])
        )
    command.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in found}
    command.__doc__ = run.__doc__
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    return app


def invoke(app: typer.Typer, program: str, arguments: Sequence[str] | None, setup: object) -> int:
    """Run ``app`` on ``arguments`` (the process's own when ``None``) and return its exit code.

    Errors of usage and of this project become one line on standard error. ``setup`` reaches the command as
    ``context.obj``.
    """
    try:
        with optional("this command"):
            # Standalone, click would print errors its own way and end the process.
            code = app(
                args=None if arguments is None else list(arguments), standalone_mode=False, prog_name=program, obj=setup
            )
    except click.ClickException as error:
        return complain(error.format_message(), WRONG_INPUT)
    except (ConfigError, MissingExtra) as error:
        return complain(str(error), WRONG_INPUT)
    except FedcompError as error:
        return complain(str(error), BROKEN)
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return unread()
    return int(code or OK)


def unread() -> int:
    """Return success when whoever read the output has seen enough."""
    # Python would complain once more when it flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return OK


def complain(message: str, code: int) -> int:
    """Print ``message`` as one line on standard error and return ``code``."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


@contextlib.contextmanager
def clean_stdout(wanted: bool) -> Iterator[TextIO]:
    """Yield the real standard output; when ``wanted``, everything else printed meanwhile goes to standard error.

    That includes what other processes and native threads below this one write to the descriptor (Ray does).
    """
    stdout: TextIO = sys.stdout
    ours = stdout is sys.__stdout__
    if not wanted:
        yield stdout
        return
    with contextlib.redirect_stdout(sys.stderr):
        if not ours:
            # Somebody has already put another object in place: there is no descriptor of ours to keep clean.
            yield stdout
            return
        # What is still buffered belongs to standard output, and would be written to standard error.
        stdout.flush()
        saved = os.dup(1)
        os.dup2(2, 1)
        try:
            # A copy: closing the file closes its descriptor, and the other one is needed to restore descriptor 1.
            with os.fdopen(os.dup(saved), "w", encoding="utf-8") as real:
                yield real
        finally:
            os.dup2(saved, 1)
            os.close(saved)
