"""Common parts of all commands: exit codes, one-line errors, and one document on standard output."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import click
import typer

from fedcomp.errors import ConfigError, FedcompError, MissingExtra, optional

OK, CLAIM_FAILED, WRONG_INPUT, BROKEN, INTERRUPTED = 0, 1, 2, 3, 130


def command_line(kind: type, help: str) -> typer.Typer:
    """Return the command whose arguments and options are the fields of a dataclass, annotated as Typer reads them:
    ``Annotated[int, typer.Option(help=...)]``. Calling it makes one."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=help)(kind)
    return app


def invoke(app: typer.Typer, program: str, arguments: Sequence[str] | None, run: Callable[[Any], int]) -> int:
    """Read ``arguments`` (the process's own when ``None``), give them to ``run`` and return its exit code.

    Errors of usage and of this project become one line on standard error.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Sum:
    ...     first: int
    ...     second: int = 2
    >>> invoke(command_line(Sum, "Add."), "sum", ["1"], lambda asked: print(asked.first + asked.second) or 0)
    3
    0
    """
    try:
        with optional("this command"):
            # Standalone, click would print errors its own way and end the process.
            words = None if arguments is None else list(arguments)
            asked = app(args=words, standalone_mode=False, prog_name=program)
            # After --help there is nothing to run.
            return asked if isinstance(asked, int) else run(asked)
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
