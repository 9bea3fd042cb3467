"""State that a class declares is saved and restored in one place, and nothing but such a state is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from fedcomp.errors import StateError
from fedcomp.flower import store
from fedcomp.plain import Count, PlainError
from fedcomp.stateful import Stateful, each, nested


@dataclass
class Seat:
    node: int
    key: bytes


class Book(Stateful):
    STATE: ClassVar[Mapping[str, Any]] = {"names": dict[int, str]}

    def __init__(self) -> None:
        self.names: dict[int, str] = {}


class Run(Stateful):
    STATE: ClassVar[Mapping[str, Any]] = {
        "book": nested("book"),
        "spare": nested("spare"),
        "_books": each("_books", lambda run, key: run.open(key)),
        "_round": Count,
        "_seats": dict[int, Seat],
        "_mass": NDArray[np.float32] | None,
        "_away": set[int],
    }

    def __init__(self, rate: float = 0.5) -> None:
        self.rate = rate
        self.book, self.spare = Book(), None
        self._books: dict[int, Book] = {}
        self._round = 0
        self._seats: dict[int, Seat] = {}
        self._mass: NDArray[np.float32] | None = None
        self._away: set[int] = set()
        self.derived = 0

    def open(self, key: int) -> Book:
        self._books[key] = Book()
        return self._books[key]

    def identity(self) -> Any:
        return {"rate": self.rate}

    def check_state(self, values: Mapping[str, Any]) -> None:
        if values["_round"] == 13:
            raise StateError("there is no round 13")

    def restored(self) -> None:
        self.derived = 2 * self._round


class Longer(Run):
    STATE: ClassVar[Mapping[str, Any]] = {"more": list[float]}

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__(rate)
        self.more = [1.0]


def used() -> Longer:
    run = Longer()
    run.book.names = {5: "five"}
    run.open(-3).names = {1: "one"}
    run._round, run._seats, run._away = 4, {2: Seat(9, b"k")}, {8, 7}
    run._mass, run.more = np.arange(3, dtype=np.float32), [0.5, 2]
    return run


def test_a_state_survives_the_file_with_that_of_parts_and_bases() -> None:
    old, new = used(), Longer()
    new.open(99)
    new.load_state_dict(store.loads(store.dumps(old.state_dict(), "test"), "test"))
    assert new.book.names == old.book.names
    assert {key: book.names for key, book in new._books.items()} == {-3: {1: "one"}}
    assert (new._round, new._seats, new._away, new.more) == (4, {2: Seat(9, b"k")}, {7, 8}, [0.5, 2.0])
    assert new._mass is not None
    assert old._mass is not None
    assert np.array_equal(new._mass, old._mass)
    assert new.derived == 8


def test_nothing_is_shared_with_the_state() -> None:
    old, new = used(), Longer()
    new.load_state_dict(old.state_dict())
    assert old._mass is not None
    old._mass += 1
    old._away.add(1)
    old._seats[2].node = 0
    assert new._mass is not None
    assert (new._mass[0], new._away, new._seats[2].node) == (0.0, {7, 8}, 9)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"identity": {"rate": 0.25}}, StateError, r"saved with .*0\.25.* same settings"),
        ({"round": -1}, PlainError, r"Longer\.round is -1"),
        ({"round": 13}, StateError, "no round 13"),
        ({"seats": {"2": {"node": 9}}}, PlainError, r"seats\['2'\] lacks"),
        ({"mass": np.zeros(3)}, PlainError, "Longer.mass"),
        ({"away": {7: 8}}, PlainError, "expected list"),
        ({"more": None}, PlainError, "expected list"),
        ({"nothing": 1}, PlainError, r"\['nothing'\]"),
        ({"round": ...}, PlainError, r"\['round'\]"),
        ({"identity": ...}, PlainError, r"\['identity'\]"),
        ({"book": None}, PlainError, "book"),
        ({"book": {"names": {"5": 5}}}, PlainError, r"Book\.names"),
        ({"spare": {}}, PlainError, "spare"),
        ({"books": {"one": {}}}, PlainError, "books"),
    ],
    ids=str,
)
def test_another_state_is_refused_and_changes_no_attribute(
    change: dict[str, Any], error: type[Exception], said: str
) -> None:
    state = {key: value for key, value in {**used().state_dict(), **change}.items() if value is not ...}
    new = Longer()
    with pytest.raises(error, match=said):
        new.load_state_dict(state)
    assert (new._round, new._seats, new._mass, new._away, new.more, new.derived) == (0, {}, None, set(), [1.0], 0)


@pytest.mark.parametrize("state", [None, 3, [], "x"])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(PlainError, match="expected a dictionary"):
        Book().load_state_dict(state)
