"""Fixed point with a bounded norm: a client's contribution to a sum with distributed noise.

:class:`~fedcomp.codecs.FixedPoint` cuts every coordinate, which bounds nothing that a guarantee could use: the norm of
a million cut coordinates is a thousand times one of them. Here the L2 norm of all values is clipped, and the rounding
to integers is drawn again until their norm is bounded, too (Kairouz, Liu and Steinke 2021; recalled).

The noise is not part of the frame. What error feedback remembers is the difference between update and frame: with the
noise in it, the next update would take the noise back, and over the rounds all of it would cancel out of the model.
:mod:`fedcomp.clients.private.distributed_dp` adds the share to the integers on their way out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import params, wire
from fedcomp.codecs import FixedPoint, register
from fedcomp.codecs.base import Codec, State
from fedcomp.errors import ConfigError, LayoutError
from fedcomp.layout import Layout, Update, Vector
from fedcomp.privacy.bounds import round_conditionally, rounding_bound, squared_norm
from fedcomp.privacy.distributed import DistributedSum, share_of_noise
from fedcomp.privacy.entropy import Entropy
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.rotation import rotate, unrotate
from fedcomp.rng import Key
from fedcomp.rules import Int, NotNegative, OneOf, Switch
from fedcomp.wire import Bundle, Frame


@register
@dataclass(frozen=True, repr=False, eq=False)
class BoundedFixedPoint(FixedPoint):
    """Clip the values that ``codec`` sends to an L2 norm, and round them to integers of bounded norm, with room for
    noise.

    Parameters
    ----------
    codec : Codec or config mapping
        As for :class:`~fedcomp.codecs.FixedPoint`.
    clip : float
        L2 norm of all values together, in the units of the update.
    levels : int
        Largest magnitude of an integer with its share of noise, 1 to 32767.
    scale : int
        Grid steps of the clip norm.
    reach : int
        Largest magnitude of an integer before noise; 0 for ``scale``.
    rotation : int
        Seed of a public rotation; 0 for none.
    noise : {"discrete_gaussian", "skellam"}
    sigma : float
        Standard deviation of one share, in steps.
    least : int
        Contributors for whose noise the share is made: with fewer, the sum is not private.
    insecure_deterministic : bool
        Let clients draw their shares from the run's seed, which the server knows: for tests and repeatable experiments.
    """

    codec_id: ClassVar[str] = "bounded"

    scale: Annotated[int, Int(1, 32767)] = 64
    reach: Annotated[int, Int(0, 32767)] = 0
    rotation: Annotated[int, Int()] = 0
    noise: Annotated[str, OneOf("discrete_gaussian", "skellam")] = "discrete_gaussian"
    sigma: NotNegative = 0.0
    least: Annotated[int, Int(1)] = 1
    insecure_deterministic: Switch = False

    def __post_init__(self) -> None:
        super().__post_init__()
        params.assign(self, reach=self.reach or self.scale)
        if self.reach > self.levels:
            raise ConfigError(
                f"levels={self.levels} leave no room for integers of magnitude {self.reach}, before noise"
            )

    @classmethod
    def of(cls, mechanism: DistributedSum, codec: Codec, *, insecure_deterministic: bool = False) -> BoundedFixedPoint:
        """Return the codec whose frames ``mechanism`` sums.

        Raises
        ------
        ConfigError
            When the integers need more than 16 bits.
        """
        if mechanism.levels > 32767:
            raise ConfigError(
                f"an integer with its share of noise needs {mechanism.levels} steps, 32767 is the most; lower scale "
                f"(now {mechanism.scale}), rotate, tolerate fewer losses, or ask more clients"
            )
        return cls(
            codec,
            clip=mechanism.clip,
            levels=mechanism.levels,
            scale=mechanism.scale,
            reach=mechanism.reach,
            rotation=mechanism.rotation,
            noise=mechanism.noise,
            sigma=mechanism.share_sigma,
            least=mechanism.least,
            insecure_deterministic=insecure_deterministic,
        )

    @property
    def step(self) -> float:
        """The grid's spacing: a float32, as a Python float."""
        with np.errstate(over="ignore", under="ignore"):
            return float(np.float32(self.clip / self.scale))

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        """Encode with the inner codec, then clip, rotate and round all its values together."""
        frame, state = self.codec.encode(update, state, key)
        tensors = self.codec.open(frame, update.layout).tensors
        values = [t.values.decode() for t in tensors]
        # All tensors together: the promise bounds one norm over the whole update.
        if not values:
            return wire.encode(()), state
        integers = self.bounded(np.concatenate(values), key)
        parts = np.split(integers.astype(np.int32), np.cumsum([v.size for v in values])[:-1])
        pairs = zip(tensors, parts, strict=True)
        # This frame, without its noise, never leaves the client: compressing it gains nothing.
        return wire.encode([replace(t, values=self.grid.values(part), backend="none") for t, part in pairs]), state

    def bounded(self, values: NDArray[Any], key: Key) -> NDArray[np.int64]:
        """Return integers of L2 norm ``rounding_bound(scale, size)`` at most that stand for ``values``."""
        real = values.astype(np.float64)
        length = math.sqrt(float(np.dot(real, real)))
        # The float32 step times the scale, not the clip norm itself: the bound is one on integers.
        real *= min(1.0, self.step * self.scale / length if length else 1.0) / self.step
        if self.rotation:
            real = rotate(real, self.rotation)
        # Cutting a coordinate only shortens the vector, so the bound on the norm holds as before.
        np.clip(real, -self.reach, self.reach, out=real)
        return round_conditionally(real, rounding_bound(self.scale, real.size), _Tries(key))

    def require_bounded(self, integers: NDArray[np.int64]) -> None:
        """Check the norm of integers before they get their noise.

        Raises
        ------
        Unbounded
            When they are too long to be a contribution of this codec.
        """
        bound = rounding_bound(self.scale, integers.size)
        if squared_norm(integers) > math.floor(bound * bound) or int(np.abs(integers).max(initial=0)) > self.reach:
            raise Unbounded(f"the integers to be shared exceed their norm of {bound:.6g} steps, or {self.reach} in one")

    def noised(self, integers: NDArray[np.int64], entropy: Entropy) -> NDArray[np.int64]:
        """Return ``integers`` with one share of the noise, all within ``levels``.

        A share that has no room is cut, with a probability that the events of a run pay for.
        """
        self.require_bounded(integers)
        share = share_of_noise(self.noise, self.sigma, integers.size, entropy)
        return np.clip(integers + share, -self.levels, self.levels)

    def real(self, bundle: Bundle) -> Bundle:
        """Return the bundle with its values as float32, rotated back."""
        plain = super().real(bundle)
        if not self.rotation or not plain.tensors:
            return plain
        values = [t.values.decode() for t in plain.tensors]
        back = unrotate(np.concatenate(values), self.rotation)
        parts = np.split(back, np.cumsum([v.size for v in values])[:-1])
        # Turning zeros back leaves some of them with a sign.
        made = [p.astype(v.dtype) + v.dtype.type(0) for p, v in zip(parts, values, strict=True)]
        return Bundle(tuple(replace(t, values=wire.Raw(v)) for t, v in zip(plain.tensors, made, strict=True)))

    def place(
        self,
        integers: NDArray[Any],
        divisor: float,
        layout: Layout,
        key: Key,
        contributors: Mapping[int, int] | None = None,
    ) -> Vector:
        """Return the update that a sum of integers, noise included, stands for."""
        if not self.rotation:
            return super().place(integers, divisor, layout, key)
        if integers.shape != (self.count(layout),):
            raise LayoutError(f"a frame of this layout holds {self.count(layout)} integers, not {integers.shape}")
        values = unrotate(integers * (self.step / divisor), self.rotation)
        return self.spread(values.astype(np.float32), layout, key)


class _Tries:
    """Uniform numbers of one key, new ones at every call."""

    def __init__(self, key: Key) -> None:
        self._key = key.at(purpose=f"{key.purpose}/bounded")
        self._tries = 0

    def uniform(self, count: int) -> NDArray[np.float64]:
        self._tries += 1
        # Another layer at each try: the same numbers would round the same way again.
        return self._key.at(layer=self._tries).uniform(count)
