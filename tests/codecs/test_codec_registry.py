"""Names, configurations and what happens when they are wrong."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

from fedcomp.codecs import Chain, Clip, Identity, TopK, UnknownCodec, get_codec, known, registry
from fedcomp.codecs.base import Codec
from fedcomp.codecs.registry import Registry
from fedcomp.errors import ConfigError
from fedcomp.feedback import ErrorFeedback


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


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"id": "topk"}, "density"),
        ({"id": "topk", "density": 0.1, "densty": 1}, "densty"),
        ({"id": "topk", "density": 0}, "density"),
        ({"id": "topk", "density": -1}, "density"),
        ({"id": "topk", "density": 2}, "density"),
        ({"id": "topk", "density": float("nan")}, "density"),
        ({"id": "topk", "density": "x"}, "density"),
        ({"id": "topk", "density": None}, "density"),
        ({"id": "topk", "density": True}, "density"),
        ({"id": "topk", "density": 0.1, "scope": "modell"}, "scope"),
        ({"id": "topk", "density": 0.1, "values": "fp8"}, "values"),
        ({"id": "topk", "density": 0.1, "index": "ryce"}, "did you mean 'rice'"),
        ({"id": "randomk", "density": 0.1, "shared": 1}, "shared"),
        ({"id": "randomk", "density": 0}, "density"),
        ({"id": "qsgd", "levels": 0}, "levels"),
        ({"id": "qsgd", "levels": 2.5}, "levels"),
        ({"id": "qsgd", "bucket": float("inf")}, "bucket"),
        ({"id": "identity", "density": 1}, "density"),
        ({"id": "chain", "transforms": [{"id": "clip", "max_norm": 0}], "codec": {"id": "identity"}}, "max_norm"),
        ({"id": "chain", "transforms": [{"id": "clop"}], "codec": {"id": "identity"}}, "did you mean 'clip'"),
        ({"id": "feedback", "codec": {"id": "nothing"}}, "nothing"),
    ],
)
def test_bad_parameters_name_parameter_and_rule(config: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        get_codec(config)


def test_nested_configurations() -> None:
    config = {
        "id": "chain",
        "transforms": [{"id": "clip", "max_norm": 1.0}],
        "codec": {"id": "feedback", "codec": {"id": "topk", "density": 0.01}, "beta": 0.5},
    }
    codec = get_codec(config)
    assert codec == Chain([Clip(1.0)], ErrorFeedback(TopK(0.01), beta=0.5))
    assert get_codec(codec) is codec


def test_entry_points_load_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    class Point(EntryPoint):
        def load(self) -> type:
            loaded.append(self.name)
            return Loud

    offered = [Point("loud", "nowhere:Loud", "fedcomp.codecs")]
    monkeypatch.setattr(
        registry, "entry_points", lambda group, name=None: [p for p in offered if name in (None, p.name)]
    )
    names: Registry[Codec] = Registry(Codec, "codec_id", "fedcomp.codecs")
    assert names.known() == ("loud",)
    assert loaded == []
    assert names.get({"id": "loud"}) == Loud()
    assert names.get({"id": "loud"}) == Loud()
    assert loaded == ["loud"]


def test_known_lists_what_is_built_in() -> None:
    assert {"identity", "topk", "randomk", "qsgd", "chain", "feedback"} <= set(known())
