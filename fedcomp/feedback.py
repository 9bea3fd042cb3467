"""Error feedback: what was not sent is remembered and sent later. One wrapper for every codec.

The classical memory (Seide et al. 2014; Stich et al. 2018), ScaleCom's low-pass filter (Chen et al. 2020,
arXiv:2104.11125) and deep gradient compression's momentum correction with factor masking (Lin et al. 2018,
arXiv:1712.01887) differ in two lines and share everything else, so they are options of one class (formulas from
secondary sources and the authors' public code; combinations derived).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs import params
from fedcomp.codecs.base import Codec, State, all_finite, require_finite
from fedcomp.codecs.clip import norm
from fedcomp.codecs.positional import frame_of
from fedcomp.codecs.registry import codecs
from fedcomp.codecs.topk import TopK
from fedcomp.codecs.wrapper import Wrapper
from fedcomp.errors import ConfigError, NonFiniteUpdate, StateError
from fedcomp.kernels import feedback_step
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.wire import Bundle, Frame

_INNER = "codec."


@codecs.register
@dataclass(frozen=True, repr=False, eq=False)
class ErrorFeedback(Wrapper):
    """Wrap ``codec`` with a memory m of what it did not send.

    Each round, with update g and the frame's decoded content q (from the bytes, so that quantisation errors are kept)::

        u = momentum * u + g                       # momentum == 0: u = g
        p = decay * m + u                          # nesterov: u = momentum * (u + g), p = decay * m + u + g
        frame = codec.encode(p)
        m = (1 - beta) * m + beta * (p - q)        # beta == 1: m = p - q
        u[support of the frame] = 0                # with masking

    The memory stays bounded when the codec contracts. An unbiased codec with ω >= 1, such as a scaled random-k, does
    not: use its unscaled form here.

    With ``decay=1`` and no guard nothing is lost: Σ sent + m / beta = Σ u, elementwise. Tensors that travel dense leave
    no memory; they share the momentum, which masking does not touch (as in deep gradient compression's public code).

    Parameters
    ----------
    codec : Codec or config mapping
        Any one-exchange codec without memory of its own.
    decay : float
        Factor of the memory per round, in [0, 1]. 0 forgets: no error feedback.
    beta : float
        ScaleCom's low-pass filter, in [0, 1]. Sent coordinates keep (1 - beta) of their memory, not zero. 0 freezes the
        memory at zero: explicitly no memory.
    momentum : float
        Momentum correction, in [0, 1). The server must then not use momentum of its own.
    nesterov : bool
        Nesterov's form of the momentum.
    masking : bool
        Clear the momentum of coordinates that were sent. With density 1 this makes it plain SGD.
    max_age : int, optional
        Drop memory and momentum after this many missed rounds (by the key's round), at least 1.
    norm_guard : float, optional
        Scale the memory down to this many times ‖g‖ when it is longer; a zero update sets no bound. What is cut away
        is lost on purpose.

    Notes
    -----
    Model-sized arrays per call: one is allocated (the new memory, in which p is formed and from which q is subtracted),
    one more with momentum (the new momentum), and one temporary for ``beta < 1`` or ``nesterov``. The old state is only
    read, so that an error or a lost process leaves it whole; this is why the addition is not done in place. Around a
    global TopK with float32 values, addition and threshold search are one pass; the frame's bytes are the same.
    Momentum that was held over missed rounds is scaled by ``momentum ** missed``.

    State: ``memory`` (float32, the vector's size), ``momentum`` (the same, if used), ``masked`` (the momentum cleared
    by the last frame, O(k)), ``round`` (of the last frame), ``threshold`` (a warm start that never changes a result),
    and the codec's own state under ``codec.``.
    """

    codec_id: ClassVar[str] = "feedback"
    remembers = True

    codec: Codec
    decay: float = 1.0
    beta: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = True
    max_age: int | None = None
    norm_guard: float | None = None

    def __post_init__(self) -> None:
        codec = codecs.get(self.codec)
        if codec.remembers or codec.phases != 1:
            why = "has memory of its own" if codec.remembers else f"needs {codec.phases} exchanges"
            raise ConfigError(f"{codec!r} {why}; error feedback wraps a one-exchange codec without memory")
        params.assign(
            self,
            codec=codec,
            decay=params.unit("decay", self.decay),
            beta=params.unit("beta", self.beta),
            momentum=params.number("momentum", self.momentum, rule="a number in [0, 1)", ok=lambda v: 0.0 <= v < 1.0),
            nesterov=params.boolean("nesterov", self.nesterov),
            masking=params.boolean("masking", self.masking),
        )
        if self.max_age is not None:
            params.assign(self, max_age=params.integer("max_age", self.max_age, low=1))
        if self.norm_guard is not None:
            params.assign(self, norm_guard=params.positive("norm_guard", self.norm_guard))
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov=True needs momentum > 0")

    def get_config(self) -> dict[str, Any]:
        """Return the parameters, the inner codec as a nested configuration."""
        return params.dataclass_config(self)

    def __repr__(self) -> str:
        return params.dataclass_repr(self)

    def init(self, layout: Layout) -> State:
        """Return a state with empty memory."""
        state: State = {"memory": np.zeros(layout.size, np.float32)}
        if self.momentum:
            state["momentum"] = np.zeros(layout.size, np.float32)
        return state | _prefixed(self.codec.init(layout))

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        """Encode update plus memory; see :meth:`fedcomp.codecs.base.Codec.encode`."""
        memory, velocity = self._recall(update.layout, state, key)
        gradient, velocity = self._accelerate(update, velocity)
        inner = _inner(state)
        after: State = {"round": np.asarray(key.round, np.int64)}
        if self._fusible:
            frame, left, threshold = self._fused(gradient, memory, state, update)
            content: Frame | Bundle = frame
            if threshold is not None:
                after["threshold"] = np.asarray(threshold, np.float32)
        else:
            frame, content, left, inner = self._general(gradient, memory, inner, key, update)
        if self.beta != 1.0:
            left *= np.float32(self.beta)
            left += np.float32(1.0 - self.beta) * memory
        self._guard(left, update.vector)
        after["memory"] = left
        if velocity is not None:
            after["momentum"] = velocity
            if self.masking:
                support = self.codec.support(content, update.layout)
                after["masked"] = velocity[support]
                velocity[support] = 0.0
        return frame, after | _prefixed(inner)

    def rollback(self, state: State, frame: Frame, layout: Layout) -> State:
        """Return ``state`` with the frame's mass back in the memory and its masked momentum back in place.

        Exact for values that travel as float32, otherwise to one rounding. Copies the memory, and the momentum if any.
        """
        back = {name: array for name, array in state.items() if not name.startswith(_INNER)}
        memory = state["memory"].copy()
        self.codec.accumulate(frame, self.beta, Update(memory, layout))
        back["memory"] = memory
        if "masked" in state:
            velocity = state["momentum"].copy()
            velocity[self.codec.support(frame, layout)] = back.pop("masked")
            back["momentum"] = velocity
        return back | _prefixed(self.codec.rollback(_inner(state), frame, layout))

    @property
    def _fusible(self) -> bool:
        codec = self.codec
        return type(codec) is TopK and codec.scope == "global" and codec.values == "float32"

    def _recall(self, layout: Layout, state: State, key: Key) -> tuple[Vector, Vector | None]:
        """Return memory and momentum as they are to be used this round."""
        memory = state.get("memory")
        velocity = state.get("momentum")
        if memory is None or (self.momentum and velocity is None):
            raise StateError("the state holds no memory of this codec; start from init(layout)")
        if memory.shape != (layout.size,):
            raise StateError(
                f"the memory holds {memory.size} elements, the layout {layout.size}: another model's state"
            )
        missed = key.round - int(state["round"]) - 1 if "round" in state else 0
        if self.max_age is not None and missed >= self.max_age:
            return np.zeros_like(memory), None if velocity is None else np.zeros_like(velocity)
        if velocity is not None and missed > 0:
            velocity = velocity * np.float32(self.momentum**missed)
        return memory, velocity

    def _accelerate(self, update: Update, velocity: Vector | None) -> tuple[Vector, Vector | None]:
        """Return what is added to the memory, and the new momentum (a new array)."""
        if velocity is None:
            return update.vector, None
        mu = np.float32(self.momentum)
        # Wrong numbers are reported by the codec; here they only must not warn.
        with np.errstate(over="ignore", invalid="ignore"):
            if not self.nesterov:
                velocity = velocity * mu
                velocity += update.vector
                return velocity, velocity
            velocity = velocity + update.vector
            velocity *= mu
            return velocity + update.vector, velocity

    def _fused(
        self, gradient: Vector, memory: Vector, state: State, update: Update
    ) -> tuple[Frame, Vector, float | None]:
        """Return frame, p - q and the new threshold; addition, selection and clearing in one pass."""
        codec = self.codec
        assert isinstance(codec, TopK)
        left = np.empty_like(memory)
        tensors = []
        threshold = None
        end = 0
        for stretch in codec.stretches(update.layout):
            end = stretch.stop
            warm = float(state["threshold"]) if "threshold" in state else None
            try:
                step = feedback_step(
                    memory[:end],
                    gradient[:end],
                    codec.count(stretch),
                    decay=self.decay,
                    threshold=warm,
                    out=left[:end],
                )
            except NonFiniteUpdate:
                raise _non_finite(update, memory) from None
            threshold = step.threshold
            tensors.append(codec.pack_selected(step.indices, step.values, stretch))
        rest = np.add(memory[end:] * np.float32(self.decay), gradient[end:], out=left[end:])
        if not all_finite(rest):
            raise _non_finite(update, memory)
        frame = frame_of(tensors, rest)
        rest.fill(0.0)
        return frame, left, threshold

    def _general(
        self, gradient: Vector, memory: Vector, inner: State, key: Key, update: Update
    ) -> tuple[Frame, Bundle, Vector, State]:
        """Return frame, its content, p - q and the codec's state, for any codec."""
        with np.errstate(over="ignore", invalid="ignore"):
            if self.decay == 1.0:
                total = memory + gradient
            else:
                total = memory * np.float32(self.decay)
                total += gradient
        held = Update(total, update.layout)
        try:
            frame, inner = self.codec.encode(held, inner, key)
        except NonFiniteUpdate as error:
            raise error if all_finite(total) else _non_finite(update, memory) from None
        content = self.codec.open(frame, update.layout)
        self.codec.accumulate(content, -1.0, held)
        return frame, content, total, inner

    def _guard(self, memory: Vector, gradient: Vector) -> None:
        """Scale ``memory`` down in place when it is too long for ``gradient``."""
        if self.norm_guard is None:
            return
        bound, length = self.norm_guard * norm(gradient), norm(memory)
        if 0.0 < bound < length:
            memory *= np.float32(bound / length)


def _prefixed(inner: Mapping[str, NDArray[Any]]) -> State:
    return {_INNER + name: array for name, array in inner.items()}


def _inner(state: State) -> State:
    return {name.removeprefix(_INNER): array for name, array in state.items() if name.startswith(_INNER)}


def _non_finite(update: Update, memory: Vector) -> NonFiniteUpdate:
    """Return the error that names the update's tensor, or says that only the sum with the memory overflowed."""
    try:
        require_finite(update)
    except NonFiniteUpdate as error:
        return error
    return NonFiniteUpdate(
        f"update plus memory (largest magnitude {float(np.abs(memory).max()):g}) overflows float32; "
        "nothing was sent and no state was changed"
    )
