"""The client half of one system as one object: a mod, handlers, and its position among other systems' mods.

:func:`fedcomp.clients.client.client` puts such halves around an app.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, overload

import numpy as np
from flwr.app import Context, Message

from fedcomp.clients.kept import keep
from fedcomp.codecs.base import underflowing
from fedcomp.errors import ConfigError

CallNext = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, CallNext], Message]
Handler = Callable[[Message, Context], Message]

P = ParamSpec("P")


@dataclass(frozen=True, eq=False)
class ClientHalf:
    """The client half of one system.

    Attributes
    ----------
    name : str
        Name by which other halves refer to this one.
    mod : callable, optional
        Sees every message of the app before its handlers do, and every reply after them.
    handlers : mapping of str to callable
        Handlers of the system's own message types, such as ``"train.gcn"``. All mods wrap them, the app's own included.
    outside, inside : tuple of str
        Names of the halves that this one's mod wraps, and of those that wrap it. A name that is not among an app's
        halves has no effect.
    needs : tuple of str
        Names of the halves without which this one does not work.
    drop_in : bool
        Whether the mod may be listed in ``ClientApp(mods=[...])``, because it needs no order relative to other halves.

    Examples
    --------
    A mod that prints the reply before the coding mod codes it:

    >>> def watch(msg, context, call_next):
    ...     reply = call_next(msg, context)
    ...     print(sorted(reply.content))
    ...     return reply
    >>> half = ClientHalf("watch", watch, inside=("compression",))
    """

    name: str
    mod: Mod | None = None
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    drop_in: bool = False

    def __post_init__(self) -> None:
        handlers = {kind: underflowing(handler) for kind, handler in self.handlers.items()}
        object.__setattr__(self, "handlers", handlers)
        if self.mod is not None:
            object.__setattr__(self, "mod", _underflowing(self.mod))

    def __call__(self, msg: Message, context: Context, call_next: CallNext) -> Message:
        """Run the mod of a half that may stand in ``ClientApp(mods=[...])``.

        Raises
        ------
        ConfigError
            When it may not.
        """
        if self.mod is None or not self.drop_in:
            raise ConfigError(
                f"{self.name} cannot be used in ClientApp(mods=[...]), which does not check its order; use "
                "fedcomp.client(app)"
            )
        mod = self.mod
        # Nothing else in such a list keeps the node's state where it has a folder for it.
        return keep(msg, context, lambda message, state: mod(message, state, call_next))


def _underflowing(mod: Mod) -> Mod:
    """Return a mod in which numbers may underflow, around an app in which numpy does what the app has asked of it."""

    @functools.wraps(mod)
    def eased(msg: Message, context: Context, call_next: CallNext) -> Message:
        own = np.geterr()

        def app(message: Message, state: Context) -> Message:
            with np.errstate(**own):
                return call_next(message, state)

        with np.errstate(under="ignore"):
            return mod(msg, context, app)

    return eased


class DropIn(Protocol[P]):
    """A function that returns a half, and is itself the mod of the half with its defaults."""

    @overload
    def __call__(self, msg: Message, context: Context, call_next: CallNext, /) -> Message: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ClientHalf: ...


def drop_in(make: Callable[P, ClientHalf]) -> DropIn[P]:
    """Let a function that returns a half stand for its mod with the defaults: ``mods=[compression]``.

    Flower looks at no mod when an app is built, so that the missing parentheses would show as an error in every reply.
    """

    @functools.wraps(make)
    def factory(*args: Any, **kwargs: Any) -> Any:
        # No argument of a factory is a Message, so this is Flower calling the function itself as a mod.
        if len(args) == 3 and isinstance(args[0], Message):
            return make()(*args)  # type: ignore[call-arg]
        return make(*args, **kwargs)

    return factory
