"""Composition: transforms in order, then one codec, with one explicit state per stage.

``chain(Clip(1.0), ErrorFeedback(TopK(0.01)))`` clips what was learnt, adds the memory, selects, packs. The order of
the arguments is the order of execution, as in optax.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from fedcomp.codecs.base import Codec, State
from fedcomp.codecs.registry import Registry, codecs
from fedcomp.codecs.wrapper import Wrapper
from fedcomp.errors import ConfigError, StateError
from fedcomp.layout import Layout, Update, Vector
from fedcomp.params import shown
from fedcomp.rng import Key
from fedcomp.rules import Configured
from fedcomp.wire import Frame


class Transform(Configured, ABC):
    """A transform: turns an update into another one of the same layout before encoding. Subclasses are frozen
    dataclasses.

    The receiver does not invert a transform; an operation that must be inverted is a codec.
    """

    transform_id: ClassVar[str]
    never_enlarges: bool = False
    """Whether no update leaves longer than it came, whatever the state."""

    def init(self, layout: Layout) -> State:
        """Return the state of a client that has sent nothing yet."""
        return {}

    @abstractmethod
    def apply(self, update: Update, state: State, key: Key) -> tuple[Update, State]:
        """Return the transformed update and the state after it. Neither argument is modified."""

    def rollback(self, state: State) -> State:
        """Return ``state`` (which :meth:`apply` returned) as if its update had never left."""
        return state

    def to_config(self) -> dict[str, Any]:
        """Return ``{"id": transform_id, **get_config()}``."""
        return {"id": self.transform_id, **self.get_config()}


# Imported when it is named: that package builds on this module, and an import from here would be a circle.
_LAZY: Final = {"privatise": "fedcomp.privacy.local"}

registry: Registry[Transform] = Registry(Transform, "transform_id", "fedcomp.transforms", lazy=_LAZY)
get_transform = registry.get


def nest(states: Sequence[State]) -> State:
    """Return one state that holds the states of several stages: keys get the stage's number as a prefix."""
    return {f"{i}.{name}": array for i, state in enumerate(states) for name, array in state.items()}


def unnest(state: State, stages: int) -> list[State]:
    """Return the stages' states out of :func:`nest`'s.

    Raises
    ------
    StateError
        When an array belongs to no stage.
    """
    parts: dict[str, State] = {str(i): {} for i in range(stages)}
    for name, array in state.items():
        stage, _, inner = name.partition(".")
        if stage not in parts or not inner:
            raise StateError(
                f"the state holds {shown(name)}, which belongs to none of the chain's {stages} stages; it is another "
                "codec's state: start from init(layout)"
            )
        parts[stage][inner] = array
    return list(parts.values())


class Chain(Wrapper):
    """Transforms, then a codec. Make it with :func:`chain`.

    Parameters
    ----------
    transforms : sequence of Transform or config mappings
    codec : Codec or config mapping

    Examples
    --------
    >>> from fedcomp.codecs import Clip, TopK
    >>> Chain([Clip(1.5)], TopK(density=0.5)).preview([0.0, -3.0])
    array([ 0.       , -1.4999999], dtype=float32)
    """

    codec_id: ClassVar[str] = "chain"

    def __init__(self, transforms: Sequence[Transform | Mapping[str, Any]], codec: Codec | Mapping[str, Any]) -> None:
        if not isinstance(transforms, Sequence) or isinstance(transforms, str | bytes | bytearray):
            raise ConfigError(f"transforms={shown(transforms)} is not valid: transforms must be a list of transforms")
        self.transforms = tuple(map(get_transform, transforms))
        self.codec = codecs.get(codec)
        if self.codec.phases != 1:
            raise ConfigError(f"{self.codec!r} needs {self.codec.phases} exchanges and cannot be chained")
        # With a transform in front, what the codec promises holds for the transformed update, not for the one that came
        # in.
        if not self.transforms:
            self.lossless = self.codec.lossless
            self.linear = self.codec.linear
            self.unbiased = self.codec.unbiased
        self.remembers = self.codec.remembers
        self.votes = self.codec.votes
        self.gain = self.codec.gain
        # A transform may hand on an update with what is known of it, as a clip does that cuts nothing.
        self.exposes = self.codec.exposes
        self.never_enlarges = self.codec.never_enlarges and all(t.never_enlarges for t in self.transforms)

    def get_config(self) -> dict[str, Any]:
        return {"transforms": [t.to_config() for t in self.transforms], "codec": self.codec.to_config()}

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, (*self.transforms, self.codec)))})"

    def init(self, layout: Layout) -> State:
        return nest([*(t.init(layout) for t in self.transforms), self.codec.init(layout)])

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        *before, last = unnest(state, len(self.transforms) + 1)
        after = []
        for transform, stage in zip(self.transforms, before, strict=True):
            update, stage_after = transform.apply(update, stage, key)
            after.append(stage_after)
        frame, last = self.codec.encode(update, last, key)
        return frame, nest([*after, last])

    def rollback(self, state: State, frame: Frame, layout: Layout) -> State:
        *before, last = unnest(state, len(self.transforms) + 1)
        last = self.codec.rollback(last, frame, layout)
        stages = [t.rollback(s) for t, s in zip(self.transforms, before, strict=True)]
        return nest([*stages, last])

    def residual(self, state: State) -> Vector | None:
        return self.codec.residual(unnest(state, len(self.transforms) + 1)[-1])

    def contraction(self, layout: Layout) -> float | None:
        """Return the codec's δ when there is no transform: a transformed update has no bound in the original one."""
        return None if self.transforms else self.codec.contraction(layout)

    def variance(self, layout: Layout) -> float | None:
        """Return the codec's ω when there is no transform."""
        return None if self.transforms else self.codec.variance(layout)


def chain(*stages: Transform | Codec) -> Chain:
    """Compose transforms and one codec, in the order of execution; a chain at the end is flattened.

    Raises
    ------
    ConfigError
        When the last stage is not a codec, or an earlier one is not a transform.

    Examples
    --------
    >>> from fedcomp.codecs.clip import Clip
    >>> from fedcomp.codecs.feedback import ErrorFeedback
    >>> from fedcomp.codecs.topk import TopK
    >>> chain(Clip(1.0), ErrorFeedback(TopK(density=0.01)))
    chain(Clip(max_norm=1.0), ErrorFeedback(codec=TopK(density=0.01)))
    """
    *before, last = stages or (None,)
    if not isinstance(last, Codec):
        raise ConfigError(f"a chain ends with a codec, not with {last!r}")
    for stage in before:
        if not isinstance(stage, Transform):
            raise ConfigError(f"{stage!r} comes before the end of a chain but is not a transform")
    head = [stage for stage in before if isinstance(stage, Transform)]
    if isinstance(last, Chain):
        return Chain([*head, *last.transforms], last.codec)
    return Chain(head, last)
