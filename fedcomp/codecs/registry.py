"""Names that travel: from the configuration a server sends to the codec (or transform) it means.

Other packages add their own through the entry-point group ``fedcomp.codecs`` (or ``fedcomp.transforms``), whose entries
are loaded only when their name is asked for.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast, overload

from fedcomp.codecs.base import Codec
from fedcomp.errors import ConfigError, nearest

T = TypeVar("T")
C = TypeVar("C", bound=type)


class UnknownCodec(ConfigError):
    """No codec (or transform) of that name is known here."""


class Registry(Generic[T]):
    """Classes of one kind by the id they declare.

    Parameters
    ----------
    base : type
        What every registered class derives from.
    id_attribute : str
        The class attribute that holds the name.
    group : str
        The entry-point group of other packages.
    lazy : mapping of str to str
        Ids of this package's own classes in modules that are imported, and then register themselves, on demand.
    """

    def __init__(self, base: type, id_attribute: str, group: str, lazy: Mapping[str, str] | None = None) -> None:
        self.base: Any = base
        self.id_attribute = id_attribute
        self.group = group
        self._lazy = dict(lazy or {})
        self._classes: dict[str, type[T]] = {}

    @overload
    def register(self, cls: C, *, replace: bool = False) -> C: ...
    @overload
    def register(self, cls: None = None, *, replace: bool = False) -> Callable[[C], C]: ...
    def register(self, cls: Any = None, *, replace: bool = False) -> Any:
        """Make ``cls`` known by its id. Use it as a decorator, with or without arguments, or as a function.

        Raises
        ------
        ConfigError
            When the id is missing, or taken by another class and ``replace`` is not given.
        """
        if cls is None:
            return functools.partial(self.register, replace=replace)
        name = getattr(cls, self.id_attribute, None)
        if not (isinstance(cls, type) and issubclass(cls, self.base)) or not isinstance(name, str) or not name:
            raise ConfigError(
                f"cannot register {cls!r}: expected a {self.base.__name__} subclass with a non-empty "
                f"{self.id_attribute}"
            )
        held = self._classes.get(name)
        same = held is not None and (held.__module__, held.__qualname__) == (cls.__module__, cls.__qualname__)
        if held is not None and not same and not replace:
            raise ConfigError(
                f"{self.id_attribute} {name!r} already names {held.__module__}.{held.__qualname__}; "
                "choose another id, or pass replace=True to replace it for the whole process"
            )
        self._classes[name] = cls
        return cls

    def known(self) -> tuple[str, ...]:
        """Return all ids, sorted: registered, built in, and offered by entry points (which are not loaded)."""
        offered = {point.name for point in entry_points(group=self.group)}
        return tuple(sorted({*self._classes, *self._lazy, *offered}))

    def find(self, name: str) -> type[T]:
        """Return the class that ``name`` stands for, loading its module or entry point when need be.

        Raises
        ------
        UnknownCodec
            Naming the nearest known id.
        """
        if name not in self._classes and name in self._lazy:
            importlib.import_module(self._lazy[name])
        if name not in self._classes:
            for point in entry_points(group=self.group, name=name):
                self.register(point.load())
        if name not in self._classes:
            raise UnknownCodec(f"no {self.base.__name__.lower()} {name!r}{nearest(name, self.known())}")
        return self._classes[name]

    def get(self, config: Mapping[str, Any] | T) -> T:
        """Return the object that ``config``, ``{"id": ..., **parameters}``, describes; an object returns itself.

        Raises
        ------
        UnknownCodec
            When the id is not known.
        ConfigError
            When a parameter is unknown, missing or invalid.
        """
        if isinstance(config, self.base):
            return cast(T, config)
        kind = self.base.__name__.lower()
        if not isinstance(config, Mapping) or not isinstance(config.get("id"), str):
            raise ConfigError(f"a {kind} is a {self.base.__name__} or a mapping with a string 'id', not {config!r}")
        cls: Any = self.find(config["id"])
        parameters = {k: v for k, v in config.items() if k != "id"}
        try:
            inspect.signature(cls).bind(**parameters)
        except TypeError as error:
            accepted = ", ".join(inspect.signature(cls).parameters) or "none"
            raise ConfigError(f"{kind} {config['id']!r}: {error}; its parameters are: {accepted}") from None
        created: T = cls.from_config(parameters)
        return created


# ErrorFeedback wraps codecs and so stands above this package; its name is resolved on demand.
codecs: Registry[Codec] = Registry(Codec, "codec_id", "fedcomp.codecs", {"feedback": "fedcomp.feedback"})
