"""The entry point for clients: ``app = client(app)`` puts the client halves of all systems around a Flower app.

Which system a message belongs to, the message says; a half lets messages of other systems pass. So one app serves every
strategy of this project, and ordinary Flower strategies as before.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Final

from flwr.clientapp import ClientApp

from fedcomp.clients.compressed import compression
from fedcomp.clients.half import ClientHalf
from fedcomp.clients.kept import keep
from fedcomp.clients.private.local_dp import local_privacy
from fedcomp.clients.private.mod import private
from fedcomp.errors import ConfigError
from fedcomp.flower._private import WrappedApp, mods_of

HALVES: Final[Mapping[str, Callable[[], ClientHalf]]] = {
    "local_privacy": local_privacy,
    "compression": compression,
    "private": private,
}
"""The halves that need nothing from the app's author, by name."""


def client(app: ClientApp, *halves: ClientHalf, only: Iterable[str | ClientHalf] | None = None) -> ClientApp:
    """Return an app that answers the messages of this project's strategies, with ``app`` inside.

    The order of the halves does not matter, because each declares which others it wraps. The app's own mods (clipping,
    for instance) are inside all halves. Handlers can be registered before or after, on the given or on the returned
    app.

    Parameters
    ----------
    app : ClientApp
        Trains and evaluates; its mods and its ``lifespan`` are kept.
    *halves : ClientHalf
        Halves that need code from the app's author (:func:`fedcomp.clients.gossip.gossip_node`,
        :func:`fedcomp.clients.gcn.graph_owner`, :func:`fedcomp.clients.private.datalens.datalens_teachers`,
        :func:`fedcomp.clients.coded.linear.linear_device`, :func:`fedcomp.clients.private.dpsgd.record_dp`,
        :func:`fedcomp.clients.private.topagg.votes_only`, :func:`fedcomp.clients.conditional.conditional`), and those
        that replace one of :data:`HALVES`.
    only : iterable of str or ClientHalf, optional
        Which of :data:`HALVES`, by name or as an object; default all.

    Raises
    ------
    ConfigError
        When a half is not known, stands twice, lacks one that it needs, or cannot be ordered; when two of them, or one
        and the app, handle the same message type; when halves are among the app's own mods.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> app = client(ClientApp())
    >>> app = client(ClientApp(), only=["compression", "private"])
    """
    if not isinstance(app, ClientApp | WrappedApp):
        raise ConfigError(f"app={app!r} is not valid: a ClientApp")
    if isinstance(app, WrappedApp):
        raise ConfigError("client() already made this app; pass all halves in one call")
    for mod in mods_of(app):
        # The functions as well: a half may be listed without its parentheses.
        if isinstance(mod, ClientHalf) or mod is compression or mod in HALVES.values():
            name = getattr(mod, "name", None) or getattr(mod, "__name__", "?")
            raise ConfigError(
                f"{name} is among the app's own mods, which run inside those that client() adds; remove it from "
                "ClientApp(mods=[...])"
            )
    chosen = _chosen(halves, only)
    for half in chosen.values():
        missing = [name for name in half.needs if name not in chosen]
        if missing:
            raise ConfigError(f"{half.name} does not work without {' and '.join(missing)}; add it to only=[...]")
    handlers = {}
    for half in chosen.values():
        for message_type, handler in half.handlers.items():
            if message_type in handlers:
                raise ConfigError(f"two halves handle messages of type {message_type!r}; leave {half.name} out")
            handlers[message_type] = handler
    mods = [half.mod for half in in_order(chosen) if half.mod is not None]
    # Outside of all halves, whatever they declare: what a reply says has to be on the disk before it leaves.
    return WrappedApp(app, handlers, [keep, *mods])


def _chosen(halves: Iterable[ClientHalf], only: Iterable[str | ClientHalf] | None) -> dict[str, ClientHalf]:
    """Return the halves of an app by name."""
    chosen: dict[str, ClientHalf] = {}
    if isinstance(only, str):
        raise ConfigError(f"only={only!r} is not valid: a list of halves, such as only=[{only!r}]")
    own = [_half(half) for half in halves]
    named = {half.name for half in own}
    # A half that was given replaces its namesake; where ``only`` names it as well, nobody can tell which is meant.
    rest = [name for name in HALVES if name not in named] if only is None else only
    for half in [*own, *map(_half, rest)]:
        if half.name in chosen:
            raise ConfigError(f"{half.name} is given twice; leave one out")
        chosen[half.name] = half
    return chosen


def _half(named: str | ClientHalf) -> ClientHalf:
    if isinstance(named, ClientHalf):
        return named
    if not isinstance(named, str):
        if not callable(named):
            raise ConfigError(f"{named!r} is not a client half; expected one of {', '.join(HALVES)}")
        name = getattr(named, "__name__", type(named).__name__)
        raise ConfigError(f"{name} is not a client half; write {name}(), or its name in quotes")
    if named not in HALVES:
        close = difflib.get_close_matches(named, HALVES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(HALVES)}"
        raise ConfigError(f"there is no client half called {named!r}; {hint}")
    return HALVES[named]()


def in_order(halves: Mapping[str, ClientHalf]) -> list[ClientHalf]:
    """Return ``halves`` from the outermost to the innermost.

    Raises
    ------
    ConfigError
        When what they declare is a circle.
    """
    # Every half is a node of the graph, also one that declares no order.
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(halves, ()))
    for half in halves.values():
        for inner in half.outside:
            if inner in halves:
                # The sorter is told predecessors: a half stands before those that it is outside of.
                sorter.add(inner, half.name)
        sorter.add(half.name, *(outer for outer in half.inside if outer in halves))
    try:
        return [halves[name] for name in sorter.static_order()]
    except CycleError as error:
        circle = " outside of ".join(error.args[1])
        raise ConfigError(f"these halves cannot be ordered: {circle}; correct their declarations") from error
