"""The one base class of every error this project raises, and the small helper that keeps messages useful.

An error says what was wrong, what was expected, and what to do. Errors that a peer can provoke with bytes are
:class:`fedcomp.wire.WireError`; errors a user can provoke with arguments are :class:`ConfigError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedcompError(Exception):
    """Base class of all errors raised by fedcomp and its sister packages."""


class ConfigError(FedcompError, ValueError):
    """A parameter, name or combination the user chose cannot work."""


class LayoutError(FedcompError, ValueError):
    """Arrays do not have the names, shapes or dtypes that were agreed on."""


class NonFiniteUpdate(FedcompError, ValueError):
    """An update holds NaN or infinity; it is refused before any state is touched."""


class NoUsableReply(FedcompError, RuntimeError):
    """Clients were asked, none of their replies can be used, and nothing was learnt before."""


class StateError(FedcompError, RuntimeError):
    """Client or server state is missing, belongs to another model, or disagrees with its peer."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest of ``known``, or the list of them when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else "; none are known"
