"""What a system declares: settings are read from constructors, and come back to them as arguments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments.systems import SYSTEMS
from fedcomp.layout import EndsDense, SmallDense, TensorShape
from fedcomp.strategies.lgc import PUBLISHED, LearnedGradients
from fedcomp.strategies.parts import FEEDBACK_PREFIX, INNER_PREFIX, TASK_PREFIX
from fedcomp.strategies.system import COMMON, System, arguments, settings_of


def constructor(
    inner: object,
    *,
    rate: float,
    count: int = 3,
    name: str = "a",
    limit: float | None = None,
    folder: str | None = None,
) -> dict[str, object]:
    return {"rate": rate, "count": count, "name": name, "limit": limit, "folder": folder}


@dataclass(frozen=True, slots=True)
class Options:
    flag: bool = True
    size: int | None = None


def test_settings_are_the_constructors_defaults_and_arguments_are_the_way_back() -> None:
    names = ("count", "name", "limit", "folder")
    settings = settings_of(constructor, *names)
    assert settings == {"count": 3, "name": "a", "limit": 0.0, "folder": ""}
    assert [type(value) for value in settings.values()] == [int, str, float, str]
    given = arguments(constructor, settings, names)
    assert constructor(None, rate=1.0, **given) == constructor(None, rate=1.0)
    changed = arguments(constructor, {**settings, "limit": 2.5, "count": 0}, names)
    assert changed == {"count": 0, "name": "a", "limit": 2.5, "folder": None}, (
        "0 is None only where None is the default"
    )
    assert settings_of(Options, "flag", "size") == {"flag": True, "size": 0}


@pytest.mark.parametrize("name", ["rate", "inner"])
def test_a_parameter_without_a_default_is_no_setting_by_itself(name: str) -> None:
    with pytest.raises(TypeError, match=f"'{name}' .* has no default"):
        settings_of(constructor, name)


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_declarations_are_complete(system: System) -> None:
    assert all(text.strip() for text in (system.name, system.title, system.paper, system.summary))
    # But for the server's step, which a system may consist of.
    assert set(system.defaults) & set(COMMON) <= {"inner"}, "a setting of all systems has one default"
    assert {TASK_PREFIX} <= set(system.prefixes)
    owns = {key.partition(".")[0] + "." for key in system.defaults if "." in key}
    assert owns <= set(system.prefixes), "a setting below a prefix belongs to a part that the system has"
    assert (FEEDBACK_PREFIX in system.prefixes) <= (INNER_PREFIX in system.prefixes)
    assert list(inspect.signature(system.build).parameters)[:2] == ["settings", "seed"]


# LGC as a strategy; the system itself: ``tests/systems``.

SHAPES = {"first": (20, 20), "second": (40, 30), "third": (30, 30), "last": (20, 30), "bias": (12,)}


def test_rounds_that_cannot_be_are_refused_and_the_published_settings_are_those_of_the_paper() -> None:
    with pytest.raises(ConfigError, match="training_rounds"):
        LearnedGradients(training_rounds=-1)
    published = LearnedGradients(**PUBLISHED)
    assert (published.warmup_rounds, published.system.training_rounds) == (200, 300)
    assert (published.codec.density, published.codec.innovation) == (1e-3, 1e-5)
    assert (published.system.training.optimizer, published.system.training.lr) == ("sgd", 1e-3)


def test_the_policy_leaves_the_ends_dense() -> None:
    shapes = {name: TensorShape(shape, "float32") for name, shape in SHAPES.items()}
    found = EndsDense(first=1, last=2, others=SmallDense(share=0.0)).fit(shapes)
    decided = {name: found(name, t.shape, t.dtype) for name, t in shapes.items()}
    assert decided == {"first": 1.0, "second": None, "third": None, "last": 1.0, "bias": 1.0}
    # A first layer that is small anyway is the first one still; statistics are no weights.
    small = {"mean.running_mean": TensorShape((9,), "float32"), "tiny": TensorShape((2, 2), "float32"), **shapes}
    found = EndsDense().fit(small)
    decided = {name: found(name, t.shape, t.dtype) for name, t in small.items()}
    assert decided["mean.running_mean"] == "exact"
    assert [name for name, density in decided.items() if density is None] == ["first", "second", "third", "last"]
    with pytest.raises(ConfigError):
        EndsDense(first=-1)
