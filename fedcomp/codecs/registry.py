"""The registry of codecs and transforms: from the name in a message to the object.

Other packages add their own through the entry-point group ``fedcomp.codecs`` (or ``fedcomp.transforms``), whose entries
are loaded only when their name is asked for.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Final, Generic, TypeVar, cast, overload

from fedcomp.codecs.base import Codec
from fedcomp.errors import ConfigError
from fedcomp.params import shown, similar

T = TypeVar("T")
C = TypeVar("C", bound=type)


MAX_NESTING: Final = 16
"""Lists and dictionaries inside one another in a configuration; far more than composition needs."""

_LONGEST_REASON = 200

_KEPT: Final = 64
"""Number of objects that a registry keeps for repeated configurations; an announced one comes with every message."""

_LONGEST_KEPT: Final = 256
"""Largest number of parts of a configuration, and of characters in one text, for which its object is kept."""


class UnknownCodec(ConfigError):
    """No codec (or transform) of that name is registered."""


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
        self._made = functools.lru_cache(_KEPT)(lambda described: self._make(described.config))

    @overload
    def register(self, cls: C, *, replace: bool = False) -> C: ...
    @overload
    def register(self, cls: None = None, *, replace: bool = False) -> Callable[[C], C]: ...
    def register(self, cls: Any = None, *, replace: bool = False) -> Any:
        """Register ``cls`` under its id. Use it as a decorator, with or without arguments, or as a function.

        Raises
        ------
        ConfigError
            When the id is missing, or taken by another class and ``replace`` is not given. The ids of modules that
            have not been imported yet are taken, too.
        """
        if cls is None:
            return functools.partial(self.register, replace=replace)
        name = getattr(cls, self.id_attribute, None)
        if not (isinstance(cls, type) and issubclass(cls, self.base)) or not isinstance(name, str) or not name:
            raise ConfigError(
                f"cannot register {shown(cls)}: expected a {self.base.__name__} subclass with a non-empty "
                f"{self.id_attribute}"
            )
        held = self._classes.get(name)
        if held is None and self._lazy.get(name, cls.__module__) != cls.__module__:
            importlib.import_module(self._lazy[name])
            held = self._classes.get(name)
        # By name, not by identity: a module that is reloaded registers its class again as another object.
        same = held is not None and (held.__module__, held.__qualname__) == (cls.__module__, cls.__qualname__)
        if held is not None and not same and not replace:
            raise ConfigError(
                f"{self.id_attribute} {name!r} already names {held.__module__}.{held.__qualname__}; "
                "choose another id, or pass replace=True to replace it for the whole process"
            )
        if held is not None and held is not cls:
            # In all registries: what one of them made may hold an object of another.
            _Described.replaced += 1
        self._classes[name] = cls
        return cls

    def known(self) -> tuple[str, ...]:
        """Return all ids, sorted: registered, built in, and offered by entry points (which are not loaded)."""
        offered = {point.name for point in entry_points(group=self.group)}
        return tuple(sorted({*self._classes, *self._lazy, *offered}))

    def find(self, name: str) -> type[T]:
        """Return the class with the id ``name``, loading its module or entry point when need be.

        Raises
        ------
        UnknownCodec
            Naming the nearest known id.
        """
        if name not in self._classes and name in self._lazy:
            importlib.import_module(self._lazy[name])
        if name not in self._classes:
            for point in entry_points(group=self.group, name=name):
                self.register(self._load(point))
        if name not in self._classes:
            raise UnknownCodec(f"no {self.base.__name__.lower()} {shown(name)}{similar(name, self.known())}")
        return self._classes[name]

    def _load(self, point: EntryPoint) -> Any:
        """Return the object that an entry point names; raise ConfigError if it cannot be imported or has another id."""
        try:
            cls = point.load()
        except Exception as error:  # whatever another package raises on import
            raise ConfigError(f"the entry point {point.name!r} = {point.value} cannot be loaded: {error}") from error
        if getattr(cls, self.id_attribute, None) != point.name:
            raise ConfigError(
                f"the entry point {point.name!r} = {point.value} of group {self.group} names an object whose "
                f"{self.id_attribute} is {shown(getattr(cls, self.id_attribute, None))}; they must agree"
            )
        return cls

    def get(self, config: Mapping[str, Any] | T) -> T:
        """Return the object that ``config``, ``{"id": ..., **parameters}``, describes; an object returns itself.

        Equal configurations may return the same object, because registered objects are immutable.

        Raises
        ------
        UnknownCodec
            When the id is not known.
        ConfigError
            When a parameter is unknown, missing or invalid, or more than :data:`MAX_NESTING` lists and dictionaries
            are nested.
        """
        if isinstance(config, self.base):
            return cast(T, config)
        kind = self.base.__name__.lower()
        if not isinstance(config, Mapping) or not isinstance(config.get("id"), str):
            known = isinstance(config, str) and config in self.known()
            example = f"; write {self.find(config).__name__}(...)" if isinstance(config, str) and known else ""
            raise ConfigError(
                f"a {kind} is a {self.base.__name__} or a mapping with a string 'id', not {shown(config)}{example}"
            )
        parts = _parts(config)
        return self._make(config) if parts is None else self._made(_Described(config, parts))

    def _make(self, config: Mapping[str, Any]) -> T:
        """Return a new object, see :meth:`get`."""
        kind = self.base.__name__.lower()
        if _nested_deeper(config, MAX_NESTING):
            raise ConfigError(
                f"the configuration of {kind} {shown(config['id'])} nests deeper than {MAX_NESTING} levels"
            )
        cls: Any = self.find(config["id"])
        parameters = {k: v for k, v in config.items() if k != "id"}
        try:
            # Bound before the call: a TypeError from inside the constructor would be taken for a wrong parameter.
            inspect.signature(cls).bind(**parameters)
        except TypeError as error:
            accepted = ", ".join(inspect.signature(cls).parameters) or "none"
            # Python repeats the name of the parameter, which is a peer's and may be of any length.
            reason = str(error)[:_LONGEST_REASON]
            raise ConfigError(f"{kind} {config['id']!r}: {reason}; its parameters are: {accepted}") from None
        created: T = cls.from_config(parameters)
        return created


class _Described:
    """A configuration as the key of its object. Two are equal if their parts are equal in type and text."""

    __slots__ = ("config", "parts")

    replaced: ClassVar[int] = 0
    """Classes that took the place of others since this module was imported."""

    def __init__(self, config: Mapping[str, Any], parts: tuple[Any, ...]) -> None:
        self.config = config
        self.parts = (self.replaced, *parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Described) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)


def _parts(config: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the unique key of a configuration; None for a long one and for values that are not JSON."""
    parts: list[Any] = []
    waiting: list[Any] = [config]
    while waiting:
        part = waiting.pop()
        kind = type(part)
        if kind is dict or kind is list:
            if len(part) > _LONGEST_KEPT:
                return None
            parts += [kind, len(part)]
            waiting += part if kind is list else [*part, *part.values()]
        elif kind is str and len(part) <= _LONGEST_KEPT:
            parts.append(part)
        elif part is None or kind in (bool, int, float):
            # To Python 1, 1.0 and True are equal, and so are the zeros of both signs.
            parts += [kind, part.hex() if kind is float else part]
        else:
            return None
        # How often one list stands in others is a sender's choice, too.
        if len(parts) > _LONGEST_KEPT:
            return None
    return tuple(parts)


def _nested_deeper(config: Any, most: int) -> bool:
    """Whether lists and dictionaries are nested more than ``most`` levels deep; computed without recursion."""
    level = {id(config): config}
    for _ in range(most):
        inner = (v for c in level.values() for v in (c.values() if isinstance(c, Mapping) else c))
        # By identity: one list that is in another many times over is looked at once, or the levels would grow
        # without bound.
        level = {id(v): v for v in inner if isinstance(v, Mapping | list | tuple)}
        if not level:
            return False
    return True


_LAZY: Final = {"topagg": "fedcomp.privacy.votes", "bounded": "fedcomp.privacy.bounded"}

codecs: Registry[Codec] = Registry(Codec, "codec_id", "fedcomp.codecs", _LAZY)
