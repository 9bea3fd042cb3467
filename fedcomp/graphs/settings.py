"""Settings of a sampler: which one, how much of a layer it may draw, and by what rule it favours owned nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Final

import numpy as np

from fedcomp.errors import ConfigError, nearest
from fedcomp.graphs.inclusion import WEIGHTS
from fedcomp.graphs.scale import MODES

SAMPLERS: Final = ("skewed", "node", "ladies", "fastgcn", "boundary", "local", "full")
ESTIMATORS: Final = ("poisson", "multinomial")
FAVOURED: Final = ("owned", "halo")

_LARGEST: Final = 1e9
"""Of a budget or a scale: what is favoured less keeps a probability that 53 random bits can tell from 0."""

MOST_LAYERS: Final = 64
"""Layers of a network."""

_MOST: Final = 1 << 31
"""Of n and fanout: more than any layer has candidates."""

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "sampler": SAMPLERS,
    "estimator": ESTIMATORS,
    "weight": WEIGHTS,
    "mode": MODES,
    "favour": FAVOURED,
}


@dataclass(frozen=True)
class SamplerSettings:
    """How the columns of every layer are chosen. Immutable and comparable; travels as :meth:`to_config`.

    Each setting belongs to the samplers that are named with it and means nothing to the others, so that samplers can be
    compared by changing one word. "skewed" is after Jiang and Rumi (arXiv 2101.07706, abstract); the rules of ``mode``
    are derived here. The unskewed sampler is ``mode="fixed", scale=1``.

    Parameters
    ----------
    sampler : str
        "skewed": layer-wise, owned candidates favoured. "node": every row draws among its own neighbours, owned ones
        favoured. "ladies" and "fastgcn": as published, nothing favoured. "boundary": all owned candidates, and each
        remote one with probability ``q``. "local": owned candidates only. "full": all.
    n : int or tuple of int
        skewed, ladies, fastgcn: columns per layer, input layer first; one number is for all of them. Expected number
        kept (Poisson), number of draws (multinomial, fastgcn) or number kept (ladies).
    fanout : int
        node: the same for one row.
    estimator : str
        skewed, node: "poisson" keeps each column at most once and weighs by the inverse inclusion probability, and is
        exact once ``n`` reaches the number of candidates; "multinomial" draws with replacement, and never is.
    weight : str
        skewed: base weight of a column, "l1", "count" or "l2sq" (:func:`~fedcomp.graphs.inclusion.base_weight`).
        Lost mass is reported in it for every sampler.
    mode : str
        skewed, node: rule of the scale (:func:`~fedcomp.graphs.scale.scale`).
    budget : float
        D >= 1 of the modes that have a budget.
    scale : float
        s >= 1 of mode "fixed".
    s_max : float
        Largest scale of any mode.
    keep_self : bool
        skewed, ladies, fastgcn, node: the own columns of owned rows are always kept, with weight 1, and count neither
        towards ``n`` nor in the weights. A kept column that other rows of the batch use has weight 1 there too (node:
        there each row draws for itself).
    favour : str
        skewed, node: who is favoured j layers above the input layer. "owned": owned nodes at every layer. "halo":
        nodes within j hops of an owned one, along rows of P.
    q : float
        boundary: probability of a remote candidate, in (0, 1].
    renormalise : bool
        ladies: whether every row is scaled to the sum that P's row has. The published code scales rows of a P with row
        sums 1 to sum 1, which is the same.
    layers : int
        Layers of the network, at least 1.

    Raises
    ------
    ConfigError
        For an unknown name, a number out of range, or a tuple ``n`` of another length than ``layers``.
    """

    sampler: str = "skewed"
    n: int | tuple[int, ...] = 512
    fanout: int = 5
    estimator: str = "poisson"
    weight: str = "l1"
    mode: str = "matched"
    budget: float = 1.5
    scale: float = 1.0
    s_max: float = 16.0
    keep_self: bool = False
    favour: str = "owned"
    q: float = 0.1
    renormalise: bool = False
    layers: int = 2

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                said = f"{value!r}"[:80]
                raise ConfigError(f"unknown {name} {said} of a sampler{nearest(str(value)[:64], known)}")
        for name, most in (("fanout", _MOST), ("layers", MOST_LAYERS)):
            _set(self, name, _count(name, getattr(self, name), most))
        for name in ("budget", "scale", "s_max"):
            _set(self, name, _number(name, getattr(self, name), f"a number from 1 to {_LARGEST:g}", 1.0))
        q = _number("q", self.q, "a probability in (0, 1]", 0.0)
        if not 0.0 < q <= 1.0:
            raise ConfigError(f"q={q!r} is not valid: q must be a probability in (0, 1]")
        _set(self, "q", q)
        for name in ("keep_self", "renormalise"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} is not valid: {name} must be true or false")
        _set(self, "n", self._per_layer(self.n))

    def _per_layer(self, n: Any) -> int | tuple[int, ...]:
        if not isinstance(n, list | tuple):
            return _count("n", n)
        if len(n) != self.layers:
            said = f"{tuple(n[:9])!r}"
            raise ConfigError(
                f"n={said} has {len(n)} numbers for {self.layers} layers; give one per layer, input layer "
                "first, or one number for all"
            )
        return tuple(_count("n", one) for one in n)

    def draws(self, layer: int) -> int:
        """Return ``n`` of a layer; 0 is the input layer."""
        return self.n[layer] if isinstance(self.n, tuple) else self.n

    @property
    def skews(self) -> bool:
        """Whether the sampler favours anything, so that ``mode`` and ``favour`` mean something."""
        return self.sampler in ("skewed", "node")

    @property
    def biased(self) -> str:
        """Why the expectation of a layer is not the sum over all neighbours; empty when it is."""
        if self.sampler == "ladies":
            also = ", and divides by a random row sum" if self.renormalise else ""
            return f"draws without replacement and weighs as if it were with replacement{also}"
        if self.sampler == "local":
            return "leaves out every neighbour that another owner has"
        return ""

    def to_config(self) -> dict[str, Any]:
        """Return the settings as plain scalars and lists."""
        config = {one.name: getattr(self, one.name) for one in fields(self)}
        config["n"] = list(self.n) if isinstance(self.n, tuple) else self.n
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SamplerSettings:
        """Return the settings that :meth:`to_config` described; what is not named has its default.

        Raises
        ------
        ConfigError
            For an unknown name or a value out of range.
        """
        known = [one.name for one in fields(cls)]
        for name in config:
            if name not in known:
                raise ConfigError(f"a sampler has no setting {str(name)[:64]!r}{nearest(str(name)[:64], known)}")
        return cls(**config)


def _set(settings: SamplerSettings, name: str, value: Any) -> None:
    object.__setattr__(settings, name, value)


def _count(name: str, value: Any, most: int = _MOST) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= most:
        said = f"{value!r}"[:80]
        raise ConfigError(f"{name}={said} is not valid: {name} must be a whole number of at least 1 and at most {most}")
    return int(value)


def _number(name: str, value: Any, rule: str, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating) or not least <= value <= _LARGEST:
        said = f"{value!r}"[:80]
        raise ConfigError(f"{name}={said} is not valid: {name} must be {rule}")
    return float(value)
