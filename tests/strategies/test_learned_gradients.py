"""LGC as a strategy; the system itself: ``tests/systems``."""

from __future__ import annotations

import pytest

from fedcomp.codecs import LGC, ScaleCom
from fedcomp.errors import ConfigError
from fedcomp.layout import EndsDense, SmallDense, TensorShape
from fedcomp.strategies.lgc import PUBLISHED, LearnedGradients

SHAPES = {"first": (20, 20), "second": (40, 30), "third": (30, 30), "last": (20, 30), "bias": (12,)}


def test_what_it_does_not_take() -> None:
    with pytest.raises(ConfigError, match="needs LGC"):
        LearnedGradients(ScaleCom(0.1))
    with pytest.raises(ConfigError, match="set by the server"):
        LearnedGradients(LGC(encoder=5))
    for options in ({"common": "last"}, {"training_rounds": -1}):
        with pytest.raises(ConfigError):
            LearnedGradients(**options)
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
