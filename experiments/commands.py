"""What every command of the project shares: exit codes, one-line errors, a standard output that holds one document."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

import click
import typer

from fedcomp.errors import ConfigError, FedcompError, MissingExtra, optional

OK, CLAIM_FAILED, WRONG_INPUT, BROKEN, INTERRUPTED = 0, 1, 2, 3, 130


def invoke(app: typer.Typer, program: str, arguments: Sequence[str] | None, setup: object) -> int:
    """Run ``app`` on ``arguments`` (the process's own when ``None``) and return its exit code.

    Errors of usage and of this project become one line on standard error. ``setup`` reaches the command as
    ``context.obj``.
    """
    try:
        with optional("this command"):
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
        stdout.flush()
        saved = os.dup(1)
        os.dup2(2, 1)
        try:
            with os.fdopen(os.dup(saved), "w", encoding="utf-8") as real:
                yield real
        finally:
            os.dup2(saved, 1)
            os.close(saved)
