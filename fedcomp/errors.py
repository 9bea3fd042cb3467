"""The base class of all errors of this package, and helpers for their messages.

An error says what was wrong, what was expected, and what to do. Errors that a peer can provoke with bytes are
:class:`fedcomp.wire.WireError`; errors a user can provoke with arguments are :class:`ConfigError`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Final


class FedcompError(Exception):
    """Base class of all errors raised by fedcomp and its sister packages."""


class ConfigError(FedcompError, ValueError):
    """A parameter, name or combination that cannot work."""


class LayoutError(FedcompError, ValueError):
    """Arrays do not have the expected names, shapes or dtypes."""


class NonFiniteUpdate(FedcompError, ValueError):
    """An update holds NaN or infinity; it is refused before any state is touched."""


class NoUsableReply(FedcompError, RuntimeError):
    """No reply is usable, or too few clients take part for any round to work, and no earlier round succeeded."""


class StateError(FedcompError, RuntimeError):
    """Client or server state is missing, belongs to another model, or disagrees with its peer."""


class MissingExtra(FedcompError, ImportError):
    """A library of an optional extra is not installed."""


@contextlib.contextmanager
def naming(path: object) -> Iterator[None]:
    """Let a system's error in the block name ``path``: that of a full disk names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise


EXTRAS: Final[Mapping[str, str]] = {
    "numba": "fast",
    "torch": "torch",
    "ray": "simulation",
    "opacus": "privacy",
    "scipy": "privacy",
    "galois": "coding",
    "networkx": "graph",
    "pymetis": "graph",
    "torch_geometric": "graph",
    "zstandard": "zstd",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "jinja2": "experiments",
    "matplotlib": "experiments",
    "rich": "experiments",
    "sklearn": "experiments",
    "typer": "experiments",
}
"""The extra of the distribution that installs a library, by the name it is imported by."""


@contextlib.contextmanager
def optional(purpose: str) -> Iterator[None]:
    """Around imports of optional libraries: a missing one becomes one line that says which extra installs it.

    Python's root logger keeps the handlers it has: one of these libraries, Opacus, adds its own, and every line of an
    app would be logged twice.

    Parameters
    ----------
    purpose : str
        What the library is needed for, the subject of the sentence.

    Raises
    ------
    MissingExtra
        When a library of :data:`EXTRAS` is missing. Any other import error passes unchanged.

    Examples
    --------
    >>> with optional("decoding"):
    ...     import math
    """
    handlers = list(logging.root.handlers)
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS:
            raise
        raise _missing(purpose, library) from error
    finally:
        logging.root.handlers[:] = handlers


def require_installed(purpose: str, library: str) -> None:
    """Refuse at once what would need a library of :data:`EXTRAS` only later; imports nothing.

    Raises
    ------
    MissingExtra
        When the library is not installed.

    Examples
    --------
    >>> require_installed("computing", "numpy")
    """
    if importlib.util.find_spec(library) is None:
        raise _missing(purpose, library)


def _missing(purpose: str, library: str) -> MissingExtra:
    extra = EXTRAS[library]
    return MissingExtra(
        f"{purpose} needs {library}, which is not installed: install fedcomp with its extra [{extra}] "
        f"(in a checkout: pip install '.[{extra}]')"
    )


def why_missing(library: str) -> str:
    """Return why what compares itself with ``library`` cannot do so, and what to install; empty where it is installed.

    Examples
    --------
    >>> why_missing("numpy")
    ''
    """
    found = importlib.util.find_spec(library) is not None
    return "" if found else f"{library} is not installed: pip install {library}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest of ``known``, or the list of them when none is close.

    Names that are equally close (q2, q4 and q8 to "q3") are all listed, three at most.
    """
    names = sorted(known)
    # Users write the part after the dot: "density" for "codec.density".
    close = [each for each in names if each.rpartition(".")[2] == name] if name else []
    if close := close or difflib.get_close_matches(name, names, n=3, cutoff=0.5):
        likeness = [difflib.SequenceMatcher(None, each, name).ratio() for each in close]
        best = sorted(each for each, ratio in zip(close, likeness, strict=True) if ratio == max(likeness))
        # Half of the letters make "q2" close to "q3", and not "sign" to "int8".
        if max(likeness) > 0.5 or name[0] in {each.rpartition(".")[2][0] for each in best}:
            return f"; did you mean {' or '.join(map(repr, best))}?"
    return f"; known: {', '.join(names)}" if names else "; none are known"
