"""One rule language: what constructors take, messages are read by, and refusals say."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

from fedcomp.codecs import (
    DFT,
    LGC,
    Factors,
    FixedPoint,
    GradiVeQ,
    Identity,
    PowerSGD,
    RandomK,
    RandomProjection,
    ScaleCom,
    TopK,
    chain,
)
from fedcomp.errors import ConfigError
from fedcomp.flower.schema import Schema
from fedcomp.privacy.bounded import BoundedFixedPoint
from fedcomp.privacy.local import Privatise
from fedcomp.rng import Key
from fedcomp.rules import Configured, Data, Flag, Int, Made, Many, Maybe, OneOf, Real, Rule, Size, Text, rules_of
from fedcomp.systems import get_system
from fedcomp.systems.pair import Pair
from fedcomp.systems.private.record import DpSgdPlan

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
        (Maybe(Int(), "auto"), np.str_("auto"), "auto"),
        (Real(above=0.0, infinite=True), math.inf, math.inf),
        (Made(int), "7", 7),
    ],
)
def test_a_caller_may_say_it_in_numbers_of_others_and_gets_those_of_python(rule: Rule, value: Any, found: Any) -> None:
    taken = rule.take(value)
    assert (taken, type(taken)) == (found, type(found))


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        *((rule, value) for rule in (Int(-5, 9), Real(-5.0, 9.0)) for value in BEYOND),
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
        (Maybe(Int(), "auto"), None),
        (Maybe(Int(), "auto"), np.array(["auto"])),
        *((Real(above=0.0, infinite=True), value) for value in (-math.inf, math.nan, 0.0)),
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
        (Maybe(Int(), "auto"), "auto", "auto"),
        (Made(int), "7", 7),
        (Size(), "20 kB", 20_000),
        (Size(), "1.5G", 1_500_000_000),
        (Size(), str(2**63 - 1), 2**63 - 1),
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
        (Maybe(Int(), "auto"), ""),
        (Text(3), "four"),
        *((Size(), text) for text in ("", "kB", "-1", "1e3", "9" * 400, "9" * 5000)),
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
        (Maybe(Int(1), "auto"), "an integer >= 1 or 'auto'"),
        (Real(above=0.0, infinite=True), "a positive number"),
        (Real(least=1.0, infinite=True), "a number >= 1"),
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


MADE = (
    "FixedSupport",
    "Innovation",
    "LatentSupport",
    "Projection",
    "SliceProjection",
    "Statement",
    "_Delivered",
    "_Innovation",
)
"""Made by the code alone, of what was checked: codecs of one round, and what may be said of a ledger."""

WITHOUT_A_RULE = {
    "ChainLayer": "weight",  # any name of a tensor
    "CodedSettings": "spool options",  # a path; what the construction's own class checks
    "CohortSettings": "train_metrics_aggr_fn evaluate_metrics_aggr_fn",  # functions
    "Compute": "key",  # an object
    "Directions": "key",  # an object
    "EndsDense": "others",  # a function
    "Event": "label",  # any text, of a ledger of any age
    "GossipSettings": "watch spool",  # a function; a path
    "OnOff": "key",  # an object
    "PrivacySettings": "sampling",  # an object that checks itself
    "Push": "messages enough",  # messages; a function
    "SmallDense": "patterns",  # any texts
    "Trace": "stays",  # intervals, which Presence checks
}
"""Fields without a rule, and why."""

READ_BACK = ("Course", "Epochs", "LedgerEntry", "SavedMessage", "Stamp")
"""Made by the code alone; their rules are those of the files that they are read from (:mod:`fedcomp.plain`)."""

EXAMPLES: dict[str, dict[str, Any]] = {
    "BoundedFixedPoint": {"codec": RandomK(0.5)},
    "ChainLayer": {"weight": "w"},
    "ConditionalRounds": {"codec": TopK(0.1)},
    "Gossip": {"algorithm": {"name": "sgp"}, "graph": {"name": "ring", "n": 4}},
    "Directions": {"key": Key(0)},
    "Domain": {"codec": TopK(0.1), "transform": DFT()},
    "ErrorFeedback": {"codec": TopK(0.1)},
    "FactorSharing": {"codec": Factors()},
    "FittedBasis": {"codec": GradiVeQ()},
    "FixedPoint": {"codec": RandomK(0.5)},
    "NoisySum": {"codec": BoundedFixedPoint(RandomK(0.5), clip=1.0, levels=64), "threshold": 1},
    "LearnedGradients": {"codec": LGC()},
    "Local": {"codec": chain(Privatise(1.0, 1.0), TopK(0.1))},
    "ModularSum": {"codec": RandomK(0.5)},
    "OneForAll": {"codec": ScaleCom()},
    "Oracle": {"codec": ScaleCom()},
    "Pair": {"codec": TopK(0.1)},
    "Push": {"messages": ()},
    "Records": {"plan": DpSgdPlan(noise_multiplier=1.0, rate=0.1, steps=1, delta=1e-5)},
    "Replay": {"codec": RandomProjection()},
    "SharedBasis": {"codec": PowerSGD()},
    "SharedSupport": {"codec": ScaleCom()},
    "TopkSign": {"k": 2},
    "Trace": {"stays": {}},
}
"""Fields that say nothing about themselves: their rule is a function, or another field's absence asks for them."""

ROOT = Path(__file__).parent.parent
FOLDERS = ("fedcomp", "strategies", "clients", "experiments")


def modules() -> list[str]:
    """Return the modules that name the rules, or a class that has some."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if re.search(r"fedcomp\.rules|repr=False, eq=False", path.read_text()):
                found.append(name if folder == "fedcomp" else f"fedcomp.{name}")
    return found


@functools.cache
def kinds() -> list[type]:
    """Return the dataclasses of the product that check rules, or have some."""
    found = {kind: None for name in modules() for kind in vars(importlib.import_module(name)).values() if is_ours(kind)}
    return [kind for kind in found if issubclass(kind, Configured) or rules(kind)]


def is_ours(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind) and not issubclass(kind, Rule | Schema)


def rules(kind: type) -> dict[str, Rule]:
    try:
        return rules_of(kind)
    except NameError:  # a type that is there for type checkers alone: such a class checks nothing
        assert not issubclass(kind, Configured)
        return {}


def configured() -> list[Any]:
    return [kind for kind in kinds() if issubclass(kind, Configured) and kind.__name__ not in MADE]


@pytest.mark.slow
def test_whatever_has_rules_checks_them() -> None:
    for kind in kinds():
        assert issubclass(kind, Configured) or kind.__name__ in READ_BACK, kind


@pytest.mark.slow
def test_every_field_of_every_class_that_checks_itself_has_a_rule() -> None:
    """A subclass that declares a field of its base anew without its rule would take anything."""
    without = {
        kind.__name__: " ".join(f.name for f in fields(kind) if f.init and f.name not in rules_of(kind))
        for kind in configured()
    }
    assert {name: missing for name, missing in without.items() if missing} == WITHOUT_A_RULE


BY_HAND = re.compile(r"params\.(number|integer|seed|density|unit|positive|boolean|choice)\(")
AFTER_INIT = re.compile(r"    def __post_init__\(self\) -> None:\n((?: {8}.*\n|\n)+)")


def test_no_class_with_fields_checks_a_single_one_by_hand() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for body in AFTER_INIT.findall(path.read_text()):
                assert not BY_HAND.search(body), path


def example(rule: Rule) -> Any:
    """Return a value that follows the rule."""
    match rule:
        case Int():
            return rule.least
        case Real():
            low, high = max(rule.least, rule.above), min(rule.most, rule.below)
            return (low if rule.least > -math.inf else low + 1.0) if high == math.inf else (low + high) / 2
        case Flag():
            return True
        case OneOf():
            return rule.choices[0]
        case Maybe():
            return rule.unset
        case Text():
            return rule.take("x" * rule.least)
        case Data():
            return rule.take(b"x" * rule.least)
        case Many():
            return [example(rule.each)] * rule.least
        case Made(make=make):
            return Pair(Identity()) if make is get_system else FixedPoint(RandomK(1.0), clip=0.5)
    raise NotImplementedError(rule)


def wrong(rule: Rule) -> list[Any]:
    """Return values that break the rule, at its bounds first."""
    match rule:
        case Int():
            return [rule.least - 1, rule.most + 1, Fraction(2 * rule.least + 1, 2), None, "1", True]
        case Real():
            beyond = math.nextafter(rule.least, -math.inf), math.nextafter(rule.most, math.inf), rule.above, rule.below
            numbers = [*filter(math.isfinite, beyond), math.nan, -math.inf] if rule.finite else []
            return [*numbers, None, "1", True]
        case Flag():
            return [1, None, "true"]
        case OneOf():
            return [rule.choices[0] + "x", None, 1]
        case Maybe():
            return [value for value in wrong(rule.rule) if value != rule.unset]
        case Text() | Data():
            return [1]
        case Many():
            return ["x", *([value] for value in wrong(rule.each))]
    return []


@pytest.mark.slow
def test_a_class_takes_what_its_rules_say_and_refuses_the_rest() -> None:
    for kind in configured():
        if inspect.isabstract(kind):
            continue
        given = dict(next((EXAMPLES[k.__name__] for k in kind.__mro__ if k.__name__ in EXAMPLES), {}))
        for field in fields(kind):
            if field.init and field.name not in given and (field.default, field.default_factory) == (MISSING, MISSING):
                given[field.name] = example(rules_of(kind)[field.name])
        assert kind(**given)
        for name, value in ((name, value) for name, rule in rules_of(kind).items() for value in wrong(rule)):
            if name in inspect.signature(kind).parameters:
                with pytest.raises(ConfigError, match=re.escape(f"{name}=")):
                    raise AssertionError(f"{kind(**{**given, name: value})} with {name}={value!r}")
