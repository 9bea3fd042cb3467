"""State that an object keeps between rounds: declared once, saved, checked and restored in one place.

A class lists the attributes that are state, each with its type, in ``STATE``; :class:`Stateful` makes ``state_dict``
and ``load_state_dict`` of that. A state is plain data (:mod:`fedcomp.plain`). What is damaged, forged, of another class
or of a run with other settings is refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from fedcomp.errors import StateError
from fedcomp.plain import PlainError, from_plain, to_plain

_IDENTITY = "identity"

_EPOCH_BITS: Final = 32
_EPOCHS: Final = 2**31


def next_epoch(number: int) -> int:
    """Return the number after which a sender goes on whose receivers may know greater ones than ``number``.

    The bits above the 32nd count the restarts, and those below count what is sent in between: a restart skips all that
    can have been used.

    Raises
    ------
    StateError
        After 2^31 restarts: messages hold integers below 2^63.

    Examples
    --------
    >>> hex(next_epoch(5)), hex(next_epoch(next_epoch(5) + 7))
    ('0x100000000', '0x200000000')
    """
    epoch = epoch_of(number) + 1
    if epoch >= _EPOCHS:
        raise StateError(f"the numbers of this state are used up after {epoch} restarts; start a new run")
    return epoch << _EPOCH_BITS


def epoch_of(number: int) -> int:
    """Return how many restarts came before a number was used."""
    return number >> _EPOCH_BITS


def within_epoch(number: int) -> int:
    """Return a number without the restarts: what random streams are drawn by, the same for a run that was resumed."""
    return number & ((1 << _EPOCH_BITS) - 1)


@dataclass(frozen=True)
class StatePart:
    """State that is not a plain attribute: that of an object which is restored in place, or has to be made first.

    Attributes
    ----------
    save : callable
        ``save(owner)`` returns the state as plain data.
    load : callable
        ``load(owner, state)`` restores it.
    renumber : callable
        ``renumber(owner)`` is :meth:`Stateful.renumber` of what is inside.
    """

    save: Callable[[Any], Any]
    load: Callable[[Any, Any], None]
    renumber: Callable[[Any], None] = lambda owner: None


def nested(attribute: str) -> StatePart:
    """Return the part for an attribute that holds a :class:`Stateful`, or None for as long as the owner exists."""

    def save(owner: Any) -> Any:
        held = getattr(owner, attribute)
        return None if held is None else held.state_dict()

    def load(owner: Any, state: Any) -> None:
        held = getattr(owner, attribute)
        if (held is None) != (state is None):
            raise PlainError(f"{attribute.lstrip('_')} is {'not ' * (held is None)}expected to be None")
        if held is not None:
            held.load_state_dict(state)

    def renumber(owner: Any) -> None:
        held = getattr(owner, attribute)
        # Of a ledger nothing is numbered.
        if isinstance(held, Stateful):
            held.renumber()

    return StatePart(save, load, renumber)


def each(attribute: str, make: Callable[[Any, int], Stateful]) -> StatePart:
    """Return the part for an attribute that maps numbers to :class:`Stateful`.

    Parameters
    ----------
    make : callable
        ``make(owner, key)`` puts a new one into the mapping and returns it.
    """

    def save(owner: Any) -> Any:
        return {str(key): held.state_dict() for key, held in getattr(owner, attribute).items()}

    def load(owner: Any, state: Any) -> None:
        found = from_plain(dict[int, dict], state, attribute.lstrip("_"))
        getattr(owner, attribute).clear()
        for key, value in found.items():
            make(owner, key).load_state_dict(value)

    def renumber(owner: Any) -> None:
        for held in getattr(owner, attribute).values():
            held.renumber()

    return StatePart(save, load, renumber)


class Stateful:
    """Base of what can be saved and restored.

    Attributes
    ----------
    STATE : mapping of str to type or StatePart
        What is state, in the order in which it is restored: attributes by their names, with the type
        :func:`fedcomp.plain.from_plain` reads, and parts. That of base classes comes first.

    Examples
    --------
    >>> class Counter(Stateful):
    ...     STATE = {"_by_node": dict[int, int]}
    ...
    ...     def __init__(self):
    ...         self._by_node = {}
    >>> old, new = Counter(), Counter()
    >>> old._by_node[7] = 2
    >>> old.state_dict()
    {'by_node': {'7': 2}}
    >>> new.load_state_dict(old.state_dict())
    >>> new._by_node
    {7: 2}
    """

    STATE: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def declared_state(cls) -> dict[str, Any]:
        """Return ``STATE`` of the class and its bases."""
        declared: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            declared |= vars(base).get("STATE", {})
        return declared

    def identity(self) -> Any:
        """Return what must not change within a run, as plain data; a state of another identity is refused."""
        return None

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Refuse attributes that do not go together, or prepare for them; called before anything is restored.

        Parameters
        ----------
        values : mapping of str to object
            The plain attributes by name.

        Raises
        ------
        StateError
        """

    def restored(self) -> None:
        """Make what follows from the state; called when all of it is there."""

    def renumber(self) -> None:
        """Go on under numbers that were never used; called after a restart that did not set the receivers back.

        What was sent after the state was saved is unknown here and known there: under a number used twice two things
        would pass for one. By default what is inside does so.
        """
        for kind in self.declared_state().values():
            if isinstance(kind, StatePart):
                kind.renumber(self)

    def state_dict(self) -> dict[str, Any]:
        """Return what changes from round to round, as plain data."""
        identity = to_plain(self.identity())
        state = {} if identity is None else {_IDENTITY: identity}
        for name, kind in self.declared_state().items():
            state[_key(name)] = kind.save(self) if isinstance(kind, StatePart) else to_plain(getattr(self, name))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises
        ------
        StateError
            When it was saved with other settings.
        PlainError
            When it is damaged, or of another class; then nothing is changed, unless a part is what is wrong.
        """
        what, declared = type(self).__name__, self.declared_state()
        if not isinstance(state, Mapping):
            raise PlainError(f"the state of {what} is a {type(state).__name__}, expected a dictionary")
        mine = to_plain(self.identity())
        expected = {*map(_key, declared), *([] if mine is None else [_IDENTITY])}
        if wrong := sorted(map(str, expected ^ set(state))):
            raise PlainError(f"the state of {what} lacks, or has besides its own, {wrong[:5]}; it is of another class")
        if state.get(_IDENTITY) != mine:
            raise StateError(
                f"the state was saved with {state[_IDENTITY]}, this {what} has {mine}; resume with the same settings"
            )
        # Every attribute is read before anything is changed: a damaged one leaves the object as it was.
        values = {
            name: from_plain(kind, state[_key(name)], f"{what}.{_key(name)}")
            for name, kind in declared.items()
            if not isinstance(kind, StatePart)
        }
        self.check_state(values)
        for name, kind in declared.items():
            if isinstance(kind, StatePart):
                kind.load(self, state[_key(name)])
        for name, value in values.items():
            setattr(self, name, value)
        self.restored()


def _key(name: str) -> str:
    return name.lstrip("_")
