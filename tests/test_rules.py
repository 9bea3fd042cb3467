"""One rule language: what constructors take, messages are read by, and refusals say."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from typing import Annotated, Any

import numpy as np
import pytest

from fedcomp.codecs.registry import codecs
from fedcomp.errors import ConfigError
from fedcomp.flower.schema import Schema
from fedcomp.rules import Configured, Flag, Int, Made, Many, Maybe, OneOf, Real, Rule, Text, rules_of

LEAST = Real(least=0.0)


BEYOND = (True, "3", None, math.nan, math.inf, 10, -6, 10**400, [3], np.zeros(1))
"""None of them is a number from -5 to 9."""


def refuses(read: Callable[[Any], Any], value: Any) -> bool:
    try:
        read(value)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize(
    ("rule", "value", "found"),
    [
        (Int(0, 9), np.int8(3), 3),
        (Int(0, 9), 3.0, 3),
        (Int(), Fraction(4, 2), 2),
        (Real(), np.float32(0.1), 0.1),
        (Real(), 3, 3.0),
        (OneOf("a", "b"), np.str_("a"), "a"),
        (Many(Int(), 3), [np.int64(1), 2.0], (1, 2)),
        (Maybe(Int()), None, None),
        (Maybe(Int()), np.int64(2), 2),
        (Made(int), "7", 7),
    ],
)
def test_a_caller_may_say_it_in_numbers_of_others_and_gets_those_of_python(rule: Rule, value: Any, found: Any) -> None:
    taken = rule.take(value)
    assert (taken, type(taken)) == (found, type(found))


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        *(
            (rule, value)
            for rule in (Int(-5, 9), Real(-5.0, 9.0))
            for value in (True, "3", None, math.nan, math.inf, 10)
        ),
        *((rule, value) for rule in (Int(-5, 9), Real(-5.0, 9.0)) for value in (-6, 10**400, [3], np.zeros(1))),
        *((Int(), value) for value in (2.5, -1, 2**63, Fraction(1, 2), 1j)),
        *((Real(above=0.0, below=1.0), value) for value in (0.0, 1.0, -0.0, 5e-324 - 5e-324)),
        (Flag(), 1),
        (Flag(), np.True_),
        (OneOf("a"), "b"),
        (OneOf("a"), None),
        (Many(Int(), 2), [1, 2, 3]),
        (Many(Int(), 2, least=1), []),
        (Many(Int(), 2), "12"),
        (Many(Int(), 3, ascending=True), [1, 1]),
        (Many(Int(), 3), [1, "2"]),
        (Maybe(Int()), "x"),
        (Text(3), "long"),
    ],
)
def test_neither_a_caller_nor_a_message_may_say_what_breaks_a_rule(rule: Rule, value: Any) -> None:
    assert refuses(rule.take, value)
    assert refuses(rule.read, value)


@pytest.mark.parametrize(
    ("rule", "value"),
    [(Int(), 3.0), (Int(), np.int64(3)), (Real(), np.float32(1)), (Real(), Fraction(1, 2)), (OneOf("a"), np.str_("a"))],
)
def test_a_message_is_not_converted(rule: Rule, value: Any) -> None:
    assert not refuses(rule.take, value)
    assert refuses(rule.read, value)


@pytest.mark.parametrize(
    ("rule", "text", "found"),
    [
        (Int(0, 9), " 7 ", 7),
        (Real(), "1e-3", 0.001),
        (Real(most=1.0), "1", 1.0),
        *((Flag(), text, True) for text in ("true", "Yes", " on ", "1")),
        *((Flag(), text, False) for text in ("False", "no", "OFF", "0")),
        (OneOf("a", "b"), "b", "b"),
        (Text(), "b=c", "b=c"),
        (Many(Int(), 3), "256, 32,", (256, 32)),
        (Many(Int(), 3), " ", ()),
        (Maybe(Int()), "3", 3),
        (Maybe(Int()), "", None),
        (Made(int), "7", 7),
    ],
)
def test_a_text_means_a_value_of_the_rules_type(rule: Rule, text: str, found: Any) -> None:
    parsed = rule.parse(text)
    assert (parsed, type(parsed)) == (found, type(found))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        *((Int(0, 9), text) for text in ("", "x", "3.0", "1e3", "10", "-1", "9" * 5000)),
        *((Real(least=0.0), text) for text in ("", "x", "-1e-9", "nan", "inf", "1e400", "3,5")),
        *((Flag(), text) for text in ("", "maybe", "2", "tru")),
        (Many(Int(), 2), "1,2,3"),
        (Many(Int(), 2, ascending=True), "2,1"),
        (Maybe(Int()), "none"),
        (Text(3), "four"),
    ],
)
def test_a_text_that_breaks_the_rule_is_refused_without_words_of_pythons_own(rule: Rule, text: str) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        rule.parse(text)


def test_a_text_that_is_none_of_several_gets_the_advice_of_a_callers() -> None:
    with pytest.raises(ValueError, match="did you mean 'left'"):
        OneOf("left", "right").parse("lft")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Int(1), "an integer >= 1"),
        (Int(-2, 5), "an integer in [-2, 5]"),
        (Int(-(2**63)), "an integer"),
        (Real(), "a finite number"),
        (Real(above=0.0), "a positive finite number"),
        (Real(above=0.0, most=1.0), "a number in (0, 1]"),
        (Real(least=0.0, below=1.0), "a number in [0, 1)"),
        (Real(least=0.0), "a finite number >= 0"),
        (Real(above=1.0), "a finite number > 1"),
        (Real(most=2.0), "a finite number <= 2"),
        (Real(below=2.0), "a finite number < 2"),
        (Real(finite=False), "a number"),
        (Maybe(Int(1)), "an integer >= 1 or None"),
        (OneOf("a", "b"), "one of 'a', 'b'"),
    ],
)
def test_the_words_of_a_rule(rule: Rule, words: str) -> None:
    assert str(rule) == words


@dataclass(frozen=True, repr=False, eq=False)
class Toy(Configured):
    name: Annotated[str, OneOf("left", "right")]
    most: Annotated[int, Int(1, 9)] = 3
    share: Annotated[float | None, Maybe(LEAST)] = None

    def conflict(self) -> str:
        return "most=9 needs name='left'" if self.most == 9 and self.name != "left" else ""


def test_an_object_is_what_its_parameters_say() -> None:
    toy = Toy("left", most=np.int64(4))  # type: ignore[arg-type]
    assert repr(toy) == "Toy(name='left', most=4)"
    assert Toy.from_config(toy.get_config()) == toy
    assert hash(Toy("left", 4)) == hash(toy)
    assert Toy("left", 5) != toy


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "lefd"}, "name='lefd' is not valid: name must be one of 'left', 'right'; did you mean 'left'?"),
        ({"name": "left", "most": 0}, "most=0 is not valid: most must be an integer in [1, 9]"),
        ({"name": "left", "share": -1}, "share=-1 is not valid: share must be a finite number >= 0 or None"),
        ({"name": "right", "most": 9}, "most=9 needs name='left'"),
    ],
)
def test_a_refusal_names_field_value_and_rule(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Toy(**given)
    assert str(refused.value) == words


def test_a_field_has_one_rule() -> None:
    @dataclass(frozen=True)
    class Two(Configured):
        x: Annotated[int, Int(1), Int(2)] = 3

    with pytest.raises(TypeError, match="field 'x' of Two has 2 rules"):
        Two()


def test_every_field_of_every_codec_has_a_rule() -> None:
    """A subclass that declares a field of its base anew without its rule would take anything."""
    for name in codecs.known():
        kind: Any = codecs.find(name)
        if is_dataclass(kind):
            assert set(rules_of(kind)) == {f.name for f in fields(kind)}, name


READ_BACK = ("Epochs", "Event", "LedgerEntry", "Statement")
"""Made by the code alone; their rules are those of the files that they are read from (:mod:`fedcomp.plain`)."""


@pytest.mark.parametrize("package", ["codecs", "factors", "gossip", "drift", "forward", "privacy"])
def test_whatever_has_rules_checks_them(package: str) -> None:
    place = importlib.import_module(f"fedcomp.{package}").__path__
    for module in pkgutil.iter_modules(place, f"fedcomp.{package}."):
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and is_dataclass(kind) and not issubclass(kind, Rule) and rules_of(kind):
                assert issubclass(kind, Configured | Schema) or kind.__name__ in READ_BACK, kind
