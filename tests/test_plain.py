"""Values of declared types survive as plain data; anything else is refused, and the error says where."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from fedcomp.plain import Count, OrInfinite, PlainError, from_plain, to_plain
from fedcomp.rules import Real


@dataclass(frozen=True)
class Leaf:
    count: Count
    name: str = ""


@dataclass
class Tree:
    kind: Literal["oak", "elm"]
    leaves: dict[int, Leaf] = field(default_factory=dict)
    rate: Annotated[float, Real(least=0.0, most=1.0)] = 0.5
    best: Leaf | None = None
    path: tuple[int, str] = (0, "")
    marks: set[int] = field(default_factory=set)


TREE = Tree("oak", {3: Leaf(1, "a"), -2: Leaf(0)}, 1.0, Leaf(7), (4, "x"), {2, 1})


def test_a_value_survives_json() -> None:
    assert from_plain(Tree, json.loads(json.dumps(to_plain(TREE)))) == TREE


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("kind",), "ash", r"tree\.kind is 'ash' .*expected one of"),
        (("kind",), None, "expected one of"),
        (("leaves", "3", "count"), -1, r"tree\.leaves\['3'\]\.count is -1"),
        (("leaves", "3", "count"), True, "expected int"),
        (("leaves", "3", "count"), 1.0, "expected int"),
        (("leaves", "3", "name"), b"a", "expected str"),
        (("leaves", "3"), {}, "lacks the fields"),
        (("leaves", "3"), [1], "expected dict"),
        (("leaves",), {"one": {"count": 1, "name": ""}}, "not a whole number"),
        (("leaves",), {1: {"count": 1, "name": ""}}, "expected str"),
        (("leaves",), {"3": {"count": 1, "name": ""}, "03": {"count": 2, "name": ""}}, "one key twice"),
        (("rate",), float("nan"), r"expected a number in \[0, 1\]"),
        (("rate",), 1.5, r"expected a number in \[0, 1\]"),
        (("rate",), "1", "expected a number"),
        (("rate",), True, "expected a number"),
        (("best",), 3, "expected Leaf or NoneType"),
        (("path",), [1, "x", 2], "expected 2 entries"),
        (("path",), ["x", 1], "expected int"),
        (("marks",), {"1": 2}, "expected list"),
        (("more",), 1, "unknown fields"),
    ],
)
def test_another_value_is_refused_where_it_stands(where: tuple[str, ...], value: Any, said: str) -> None:
    plain = to_plain(TREE)
    at = plain
    for name in where[:-1]:
        at = at[name]
    at[where[-1]] = value
    with pytest.raises(PlainError, match=said):
        from_plain(Tree, plain, "tree")


def test_arrays_keep_their_dtype() -> None:
    array = np.arange(3, dtype=np.float32)
    again = from_plain(NDArray[np.float32], to_plain(array))
    assert np.array_equal(again, array)
    assert again.dtype == array.dtype
    assert not np.shares_memory(again, array)
    for wrong in (array.astype(np.float64), [0.0, 1.0], np.array([None])):
        with pytest.raises(PlainError, match="expected"):
            from_plain(NDArray[np.float32], wrong)
    assert from_plain(NDArray[Any] | None, None) is None


def test_what_a_class_refuses_is_named() -> None:
    @dataclass
    class Even:
        number: int

        def __post_init__(self) -> None:
            if self.number % 2:
                raise ValueError("odd")

    with pytest.raises(PlainError, match="value is not a valid Even: odd"):
        from_plain(Even, {"number": 3})


def test_null_stands_for_what_json_lacks_where_the_type_says_so() -> None:
    assert from_plain(dict[str, OrInfinite], {"a": None, "b": 2}) == {"a": np.inf, "b": 2.0}
    with pytest.raises(PlainError, match="expected a number"):
        from_plain(float, None)


def test_a_count_may_be_a_hash_of_64_bits():
    assert from_plain(Count, 2**64 - 1) == 2**64 - 1
    for wrong in (-1, 2**64, 1.0, True):
        with pytest.raises(PlainError, match=r"expected (an integer >= 0|int)"):
            from_plain(Count, wrong)
