"""Names, configurations and what happens when they are wrong."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from codec_examples import model

from fedcomp.codecs import Chain, Clip, Identity, TopK, UnknownCodec, get_codec, known, registry
from fedcomp.codecs.base import Codec
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.registry import Registry
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, repr=False, eq=False)
class Loud(Identity):
    """A codec from somewhere else."""

    codec_id: ClassVar[str] = "loud"


@pytest.fixture
def names() -> Registry[Codec]:
    """A registry of its own, so that no test changes the process's."""
    return Registry(Codec, "codec_id", "fedcomp.codecs")


def test_register_as_function_and_decorator(names: Registry[Codec]) -> None:
    assert names.register(Loud) is Loud
    assert names.register(replace=True)(Loud) is Loud
    assert names.get({"id": "loud"}) == Loud()
    assert names.known() == ("loud",)


def test_silent_replacement_is_refused(names: Registry[Codec]) -> None:
    names.register(Loud)
    names.register(Loud)  # the same class again is no replacement

    class Other(Loud):
        pass

    with pytest.raises(ConfigError, match="already names"):
        names.register(Other)
    assert names.find("loud") is Loud
    names.register(Other, replace=True)
    assert names.find("loud") is Other


def test_equal_configurations_are_one_codec() -> None:
    config = {"id": "feedback", "codec": {"id": "topk", "density": 0.1}, "decay": 0.0}
    made = get_codec(config)
    assert get_codec({**config, "codec": {"id": "topk", "density": 0.1}}) is made
    assert get_codec({**config, "codec": {"id": "topk", "density": 0.2}}) != made
    # Equal to Python, but another parameter: the zero of the other sign, and what only looks like a number.
    assert str(get_codec({**config, "decay": -0.0}).get_config()["decay"]) == "-0.0"
    for wrong in (False, np.bool_(False)):
        with pytest.raises(ConfigError, match="decay"):
            get_codec({**config, "decay": wrong})
    changed = {"id": "chain", "transforms": [{"id": "clip", "max_norm": 1.0}], "codec": {"id": "identity"}}
    first = get_codec(changed)
    changed["transforms"].append({"id": "clip", "max_norm": 2.0})
    assert get_codec(changed) != first


def test_a_replaced_class_makes_what_comes_after_it(names: Registry[Codec]) -> None:
    class Other(Loud):
        pass

    names.register(Loud)
    config = {"id": "loud"}
    first = names.get(config)
    assert names.get(dict(config)) is first
    names.register(Other, replace=True)
    assert type(names.get(config)) is Other


def test_what_describes_much_is_not_kept() -> None:
    long = {"id": "chain", "transforms": [{"id": "clip", "max_norm": 1.0}] * 200, "codec": {"id": "identity"}}
    assert get_codec(long) == get_codec(long)
    assert get_codec(long) is not get_codec(long)


def test_only_codecs_with_an_id_register(names: Registry[Codec]) -> None:
    for wrong in (int, Clip):
        with pytest.raises(ConfigError, match="cannot register"):
            names.register(wrong)


def test_unknown_id_names_the_nearest() -> None:
    with pytest.raises(UnknownCodec, match="'topk'"):
        get_codec({"id": "topkk", "density": 0.1})
    assert issubclass(UnknownCodec, ConfigError)


@pytest.mark.parametrize("config", [None, "topk", {}, {"density": 0.1}, {"id": 7}, TopK])
def test_configurations_of_the_wrong_form(config: object) -> None:
    with pytest.raises(ConfigError, match="'id'"):
        get_codec(config)  # type: ignore[arg-type]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"id": "topk", "density": 0.1, "densty": 1}, "densty"),
        ({"id": "identity", "density": 1}, "density"),
        ({"id": "topk"}, "density"),
        ({"id": "topk", "density": 0.1, "index": "ryce"}, "did you mean 'rice'"),
        ({"id": "dgc", "momentum": 0.0, "nesterov": True}, "nesterov"),
        ({"id": "dgc", "clip": 5e-324, "clients": 10**9}, "max_norm"),
        ({"id": "chain", "transforms": [{"id": "clip", "max_norm": 0}], "codec": {"id": "identity"}}, "max_norm"),
        ({"id": "chain", "transforms": [{"id": "clop"}], "codec": {"id": "identity"}}, "did you mean 'clip'"),
        ({"id": "feedback", "codec": {"id": "nothing"}}, "nothing"),
    ],
)
def test_unknown_missing_wrong_and_nested_parameters_are_named(config: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        get_codec(config)


@pytest.mark.parametrize(
    "config",
    [
        {"id": "adacomp"},
        {"id": "keyregion"},
        {"id": "scaledsign"},
        {"id": "signsgd", "step": 0.25, "scope": "layer"},
        {"id": "terngrad"},
        {"id": "threshold", "level": 1.0},
        {"id": "threshold", "level": 1.0, "scope": "layer"},
    ],
    ids=str,
)
def test_a_density_that_a_codec_cannot_honour_is_refused(config: dict) -> None:
    """What a policy asks of a tensor is not ignored by a codec that sends every coordinate or decides by itself."""
    layout = Layout.of(model(), lambda name, shape, dtype: 0.1 if name == "head.weight" else None)
    with pytest.raises(ConfigError, match=r"head\.weight"):
        get_codec(config).init(layout)


HUGE = json.loads("1" + "0" * 400)
NOT_NUMBERS = (
    HUGE, -HUGE, 10**5000, Fraction(HUGE), float("nan"), True, np.bool_(True), b"0.5", bytearray(b"0.5"), "0.5", [0.5],
    {}, np.array([0.5]), np.array(0.5), 1 + 0j, Decimal("0.5"),
)  # fmt: skip
BASES = {
    "topk": {"density": 0.5},
    "randomk": {"density": 0.5},
    "qsgd": {},
    "chain": {"transforms": [], "codec": {"id": "identity"}},
    "feedback": {"codec": {"id": "topk", "density": 0.5}},
}
NUMBERS = (
    ("topk", "density"),
    ("randomk", "density"),
    ("qsgd", "levels"),
    ("qsgd", "bucket"),
    *(("feedback", name) for name in ("decay", "beta", "momentum", "max_age", "norm_guard")),
)


@pytest.mark.parametrize(("name", "parameter"), NUMBERS)
def test_only_real_numbers_are_numbers(name: str, parameter: str) -> None:
    for value in NOT_NUMBERS:
        with pytest.raises(ConfigError, match=parameter) as caught:
            get_codec({"id": name, **BASES[name], parameter: value})
        assert len(str(caught.value)) < 300
    with pytest.raises(ConfigError, match="max_norm"):
        Clip(HUGE)


def test_numbers_of_every_real_type_are_taken() -> None:
    assert TopK(np.float32(0.1)) == TopK(0.1) == TopK(Fraction(1, 10))
    assert TopK(np.int64(1)).density == 1.0
    assert ErrorFeedback(TopK(0.1), max_age=2**53 + 1).max_age == 2**53 + 1
    assert json.dumps(TopK(np.float16(0.1)).to_config()) == json.dumps(TopK(0.1).to_config())


def _inside(depth: int, config: Any, wrap: Callable[[Any], Any]) -> Any:
    for _ in range(depth):
        config = wrap(config)
    return config


def test_messages_are_short() -> None:
    long = "x" * 100_000
    configs = (
        {"id": long},
        {"id": [[long]] * 1000},
        [long] * 99,
        {"id": "topk", long: 1},
        {"id": "topk", "density": long},
        {"id": "topk", "density": 0.5, "scope": long},
        {"id": "qsgd", "levels": [long] * 99},
    )
    for config in configs:
        with pytest.raises(ConfigError) as caught:
            get_codec(config)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 500


@pytest.mark.slow
@pytest.mark.parametrize("parameter", [p for b in BASES.values() for p in b] + ["scope", "shared", "transforms", "id"])
def test_no_configuration_raises_anything_but_a_config_error(parameter: str) -> None:
    """Whatever stands in any place of any codec's configuration, deep and huge values included."""
    deep = _inside(5000, [], lambda c: [c])
    odd = (None, 5, "abc", b"abc", {"id": "clip", "max_norm": 1.0}, [{"id": "clip", "max_norm": HUGE}], [5], deep)
    for value in (*NOT_NUMBERS, *odd, "x" * 100_000):
        for name, base in BASES.items():
            with contextlib.suppress(ConfigError):
                get_codec({"id": name, **base, parameter: value})
    with pytest.raises(ConfigError):
        get_codec({"id": "topk", 1: 2})


@pytest.mark.parametrize("transforms", [None, 5, "clip", b"clip", {"id": "clip", "max_norm": 1.0}], ids=repr)
def test_transforms_are_a_list(transforms: object) -> None:
    with pytest.raises(ConfigError, match="transforms"):
        get_codec({"id": "chain", "transforms": transforms, "codec": {"id": "identity"}})


@pytest.mark.parametrize("depth", [17, 50, 300, 900, 5000])
def test_nesting_is_bounded(depth: int) -> None:
    """Deeper than Python recurses, or not: the same error, before anything is made."""
    config = _inside(depth, {"id": "identity"}, lambda c: {"id": "chain", "transforms": [], "codec": c})
    with pytest.raises(ConfigError, match="nests deeper than 16"):
        get_codec(config)
    loop: dict[str, Any] = {"id": "chain", "transforms": []}
    loop["codec"] = loop
    with pytest.raises(ConfigError, match="nests deeper"):
        get_codec(loop)


def test_nesting_within_the_bound_works() -> None:
    config = _inside(15, {"id": "identity"}, lambda c: {"id": "chain", "transforms": [], "codec": c})
    assert get_codec(config).lossless


def test_nested_configurations() -> None:
    config = {
        "id": "chain",
        "transforms": [{"id": "clip", "max_norm": 1.0}],
        "codec": {"id": "feedback", "codec": {"id": "topk", "density": 0.01}, "beta": 0.5},
    }
    codec = get_codec(config)
    assert codec == Chain([Clip(1.0)], ErrorFeedback(TopK(0.01), beta=0.5))
    assert get_codec(codec) is codec


def _offer(monkeypatch: pytest.MonkeyPatch, name: str, load: Callable[[], Any]) -> None:
    class Point(EntryPoint):
        def load(self) -> Any:
            return load()

    offered = [Point(name, "elsewhere:Thing", "fedcomp.codecs")]
    monkeypatch.setattr(
        registry, "entry_points", lambda group, name=None: [p for p in offered if name in (None, p.name)]
    )


def test_entry_points_load_only_when_asked_for(monkeypatch: pytest.MonkeyPatch, names: Registry[Codec]) -> None:
    loaded = []
    _offer(monkeypatch, "loud", lambda: loaded.append("loud") or Loud)
    assert names.known() == ("loud",)
    assert loaded == []
    assert names.get({"id": "loud"}) == Loud()
    assert names.get({"id": "loud"}) == Loud()
    assert loaded == ["loud"]


def test_entry_points_must_hold_what_they_are_named_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin called quiet that brings another id, a lazily built-in one included, registers nothing."""
    taken = type("Taken", (Loud,), {"codec_id": "feedback", "__module__": __name__})
    for cls in (Loud, taken, int):
        _offer(monkeypatch, "quiet", lambda cls=cls: cls)
        names: Registry[Codec] = Registry(Codec, "codec_id", "fedcomp.codecs", {"feedback": "fedcomp.codecs.feedback"})
        with pytest.raises(ConfigError, match=r"entry point 'quiet'.*must agree"):
            names.find("quiet")
        assert names._classes == {}


def test_broken_entry_points_are_config_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        raise ImportError("no module named torchy")

    _offer(monkeypatch, "quiet", load)
    with pytest.raises(ConfigError, match="torchy"):
        get_codec({"id": "quiet"})


@pytest.mark.slow
def test_built_in_ids_are_taken() -> None:
    """In a process of its own: nothing replaces error feedback silently, and replacing it aloud survives its import."""
    code = """
from dataclasses import dataclass
from typing import ClassVar
from fedcomp.codecs import Identity, get_codec, register
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout
@dataclass(frozen=True, repr=False, eq=False)
class Mine(Identity):
    codec_id: ClassVar[str] = "feedback"
try:
    register(Mine)
except ConfigError as error:
    print(error)
print(type(get_codec({"id": "feedback", "codec": {"id": "identity"}})).__name__)
register(Mine, replace=True)
import fedcomp.codecs.feedback
print(type(get_codec({"id": "feedback"})).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    message, before, after = done.stdout.splitlines()
    assert "already names fedcomp.codecs.feedback.ErrorFeedback" in message
    assert (before, after) == ("ErrorFeedback", "Mine")


def test_known_lists_what_is_built_in() -> None:
    assert {"identity", "topk", "randomk", "qsgd", "chain", "feedback"} <= set(known())
