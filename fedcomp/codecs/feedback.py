"""Error feedback: the part of an update that was not sent is remembered and added to later updates. One wrapper for
every codec.

The classical memory (Seide et al. 2014; Stich et al. 2018), ScaleCom's low-pass filter (Chen et al. 2020,
arXiv:2104.11125) and deep gradient compression's momentum correction with factor masking (Lin et al. 2018,
arXiv:1712.01887) differ in two lines and share everything else, so they are options of one class (formulas from
secondary sources and the authors' public code; combinations derived).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import params, wire
from fedcomp.codecs.auto import Auto
from fedcomp.codecs.base import Codec, State, all_finite, norm
from fedcomp.codecs.memory import MEMORIES, described, kept, not_finite, number_of, recalled, vector_of
from fedcomp.codecs.registry import codecs
from fedcomp.codecs.topk import TopK
from fedcomp.codecs.wrapper import Wrapper
from fedcomp.device import beside
from fedcomp.errors import ConfigError, NonFiniteUpdate, StateError
from fedcomp.kernels import feedback_step
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.rules import BelowOne, Int, Made, Maybe, OneOf, Real, Share, Switch
from fedcomp.wire import Bundle, Frame

_INNER = "codec."


@dataclass(frozen=True, repr=False, eq=False)
class ErrorFeedback(Wrapper):
    """Wrap ``codec`` with error feedback: a memory m of what it did not send.

    Each round, with update g and the frame's decoded content q (from the bytes, so that quantisation errors are kept)::

        u = momentum * u + g                       # momentum == 0: u = g
        p = decay * m + u                          # nesterov: u = momentum * (u + g), p = decay * m + u + g
        frame = codec.encode(p)
        m = (1 - beta) * m + beta * (p - q)        # beta == 1: m = p - q
        u[support of the frame] = 0                # with masking

    The memory stays bounded if the codec is a contraction. An unbiased codec with ω >= 1, such as a scaled random-k, is
    not one: use its unscaled form here.

    With ``decay=1``, ``beta > 0``, no guard and no ``max_age`` nothing is lost: Σ sent + m / beta equals, elementwise,
    the sum of all that was added to the memory: Σ g without momentum, Σ u with it (Σ (u + g) for Nesterov). Tensors
    sent dense leave only their rounding errors in the memory; they share the momentum, which masking does not change
    (as in deep gradient compression's public code).

    Parameters
    ----------
    codec : Codec or config mapping
        Any one-exchange codec without memory of its own.
    decay : float
        Factor of the memory per round, in [0, 1]. 0 forgets: no error feedback.
    beta : float
        ScaleCom's low-pass filter, in [0, 1]. Sent coordinates keep (1 - beta) of their memory instead of none. With 0
        there is no memory at all.
    momentum : float
        Momentum correction, in [0, 1). The server must then not use momentum of its own.
    nesterov : bool
        Nesterov's form of the momentum.
    masking : bool
        Clear the momentum of the coordinates to which a sparse frame delivered a value other than zero. At density 1
        this makes it plain SGD, with Nesterov (1 + momentum) times as fast. Dense codecs (Identity, QSGD) choose no
        coordinates: there it has no effect.
    max_age : int, optional
        Drop memory and momentum after this many missed rounds (by the key's round), at least 1.
    norm_guard : float, optional
        Scale the memory down to this many times ‖g‖ if its norm is larger; a zero update sets no bound. The bound also
        holds after a rollback. What is cut off is lost, by design.
    memory : {"float32", "float16"}
        The format of the stored memory. float16, with a shared power of two that follows the largest value, is half as
        large and cannot overflow. Every round then loses at most 2⁻¹¹ of each remembered value, or 2⁻³⁹ of the largest
        (derived; :func:`fedcomp.codecs.memory.kept`): what is sent and what is remembered add up to that rounding. The
        momentum stays float32. A stored memory of the other format is converted.

    Notes
    -----
    Model-sized arrays per call: one is allocated (the new memory, in which p is formed and from which q is subtracted;
    none for a global TopK to which the update is given: it becomes the memory), one more with momentum (the new
    momentum), and one temporary for ``beta < 1`` or ``nesterov``. The old state is only read, so that an error or a
    lost process leaves it whole; this is why the addition is not done in place. Around a global TopK with float32
    values, addition and threshold search are one pass; the frame's bytes are the same.
    Momentum that was held over missed rounds is scaled by ``momentum ** missed``.

    State: ``memory`` (float32 or float16, the vector's size; beside the latter ``exponent``), ``momentum`` (float32, of
    the same size, if used), ``masked`` (the momentum cleared by the last frame, O(k)), ``round`` (of the last frame),
    ``bound`` (what the guard allowed then), ``threshold`` (a warm start that never changes a result), and the codec's
    own state under ``codec.``. A state of another size, dtype or codec raises :class:`~fedcomp.errors.StateError`.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcomp.codecs.topk import TopK
    >>> from fedcomp.layout import Layout, Update
    >>> from fedcomp.rng import Key
    >>> update = Update(np.float32([3, 0, -2, 0, 0.5, 1, 0, -0.1]), Layout.flat(8))
    >>> codec = ErrorFeedback(TopK(density=0.25))
    >>> frame, state = codec.encode(update, codec.init(update.layout), Key(0))
    >>> codec.decode(frame, update.layout)
    array([ 3.,  0., -2.,  0.,  0.,  0.,  0.,  0.], dtype=float32)
    >>> codec.residual(state)
    array([ 0. ,  0. ,  0. ,  0. ,  0.5,  1. ,  0. , -0.1], dtype=float32)
    """

    codec_id: ClassVar[str] = "feedback"
    remembers = True

    codec: Annotated[Codec, Made(codecs.get)]
    decay: Share = 1.0
    beta: Share = 1.0
    momentum: BelowOne = 0.0
    nesterov: Switch = False
    masking: Switch = True
    max_age: Annotated[int | None, Maybe(Int(1))] = None
    norm_guard: Annotated[float | None, Maybe(Real(above=0.0))] = None
    memory: Annotated[str, OneOf(*MEMORIES)] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        codec = self.codec
        # Two memories would both hold what the inner codec left out, and send it twice.
        if codec.remembers or codec.phases != 1:
            why = "has memory of its own" if codec.remembers else f"needs {codec.phases} exchanges"
            raise ConfigError(f"{codec!r} {why}; error feedback wraps a one-exchange codec without memory")
        inmost: Codec = codec
        while isinstance(inner := getattr(inmost, "codec", None), Codec):
            inmost = inner
        if isinstance(inmost, Auto) and not inmost.rounded:
            raise ConfigError(
                f"{codec!r} is unbiased and adds noise as large as what is remembered, so that the memory would grow "
                "without bound; use Auto(feedback=True), or no error feedback"
            )
        if codec.votes:
            raise ConfigError(
                f"{codec!r} sends votes, which are not in the update's unit, so their error cannot be remembered. "
                "ScaledSign is the sign codec for error feedback"
            )
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov=True needs momentum > 0")
        # What momentum correction makes of a constant update.
        params.assign(self, gain=1.0 / (1.0 - self.momentum))

    def init(self, layout: Layout) -> State:
        state = kept(np.zeros(layout.size, np.float32), self.memory)
        if self.momentum:
            state["momentum"] = np.zeros(layout.size, np.float32)
        return state | _prefixed(self.codec.init(layout))

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        inner = _inner(state)
        after: State = {"round": np.asarray(key.round, np.int64)}
        # Sums that overflow are reported as what they are; before that they must not warn.
        with np.errstate(over="ignore", invalid="ignore"):
            memory, velocity = self._recall(update, state, key)
            # Only for the message when the sum is not finite: it says which part was to blame.
            held = {"memory": memory} | ({} if velocity is None else {"momentum": velocity})
            # Before the update is written to, where it is given.
            bound = None if self.norm_guard is None else self.norm_guard * norm(update.vector)
            gradient, velocity = self._accelerate(update, velocity)
            if self._fusible:
                frame, left, threshold = self._fused(gradient, held, number_of(state, "threshold", "f"), key, update)
                content: Frame | Bundle = frame
                if threshold is not None:
                    after["threshold"] = np.asarray(threshold, np.float32)
            else:
                frame, content, left, inner = self._general(gradient, held, inner, key, update)
        if self.beta != 1.0:
            # Here left is p - q; the old memory is still whole because the sum went into an array of its own.
            left *= np.float32(self.beta)
            left += np.float32(1.0 - self.beta) * memory
        if bound is not None:
            shorten(left, bound)
            # Rollback has no update at hand from which the bound could be taken again.
            after["bound"] = np.asarray(bound)
        after |= kept(left, self.memory)
        if velocity is not None:
            after["momentum"] = velocity
            if self.masking:
                support = self.codec.support(content, update.layout)
                # Indexing copies: rollback gets back what the next line clears, without keeping a second momentum.
                after["masked"] = velocity[support]
                velocity[support] = 0.0
        return frame, after | _prefixed(inner)

    def rollback(self, state: State, frame: Frame, layout: Layout) -> State:
        """Return ``state`` with the frame's mass back in the memory and its masked momentum back in place.

        Exact for values that travel as float32, otherwise to one rounding; a guard that was at its bound cuts again.
        Memory that had expired does not come back. Copies the memory, and the momentum if any.

        Raises
        ------
        StateError
            When ``state`` is not what :meth:`encode` returned with a frame like this.
        """
        back = {name: array for name, array in state.items() if not name.startswith(_INNER)}
        content = self.codec.open(frame, layout)
        memory = _memory_of(state, layout).copy()
        # Beta, not 1: the filter had taken only beta * q out of the memory.
        self.codec.accumulate(content, self.beta, Update(memory, layout))
        bound = number_of(state, "bound", "f")
        if self.norm_guard is not None and bound is not None:
            shorten(memory, bound)
        back |= kept(memory, self.memory)
        if "masked" in state:
            velocity = vector_of(state, "momentum", layout).copy()
            support = self.codec.support(content, layout)
            masked = back.pop("masked")
            if not isinstance(masked, np.ndarray) or masked.dtype != np.float32 or masked.shape != support.shape:
                raise StateError(
                    f"the state's masked momentum is {described(masked)}, but the frame delivers {support.size} "
                    "values; roll back the frame that came with this state"
                )
            velocity[support] = masked
            back["momentum"] = velocity
        return back | _prefixed(self.codec.rollback(_inner(state), frame, layout))

    def residual(self, state: State) -> Vector | None:
        """Return the memory, widened where it is kept as float16; not to be written to."""
        return recalled(state)

    def absorb(self, memory: Vector, update: Vector) -> Vector:
        """Return the memory after a round in which nothing of memory plus ``update`` was sent; no momentum."""
        left = memory * np.float32(self.decay) + update
        if self.beta != 1.0:
            left *= np.float32(self.beta)
            left += np.float32(1.0 - self.beta) * memory
        if self.norm_guard is not None:
            shorten(left, self.norm_guard * norm(update))
        return left

    @property
    def on_device(self) -> bool:  # type: ignore[override]  # an attribute of other classes
        """Whether memory and momentum may stay on a device: where the codec works there, without norms that change
        bits."""
        return self.codec.on_device and self.memory == "float32" and self.norm_guard is None

    @property
    def _fusible(self) -> bool:
        codec = self.codec
        # Exactly TopK: a subclass may select or pack in another way than the fused kernel.
        return type(codec) is TopK and codec.scope == "global" and codec.values != "float64"

    def _recall(self, update: Update, state: State, key: Key) -> tuple[Vector, Vector | None]:
        """Return memory and momentum for this round, where the update is."""
        memory: Vector = beside(_memory_of(state, update.layout), update.vector)
        velocity = beside(vector_of(state, "momentum", update.layout), update.vector) if self.momentum else None
        last = number_of(state, "round", "iu")
        # By the key, which has the server's round: a client that was away has not counted.
        missed = 0 if last is None else key.round - int(last) - 1
        if self.max_age is not None and missed >= self.max_age:
            # Dropped on purpose: the model has moved on from where this was learnt.
            return np.zeros_like(memory), None if velocity is None else np.zeros_like(velocity)
        if velocity is not None and missed > 0:
            # Not in place, here and below: the vector belongs to the caller's state, which an error must leave whole.
            velocity = velocity * np.float32(self.momentum**missed)
        return memory, velocity

    def _accelerate(self, update: Update, velocity: Vector | None) -> tuple[Vector, Vector | None]:
        """Return the vector to add to the memory, and the new momentum (a new array)."""
        if velocity is None:
            return update.vector, None
        mu = np.float32(self.momentum)
        if not self.nesterov:
            velocity = velocity * mu
            velocity += update.vector
            # One array may be both: it is masked only after the new memory has been formed from it.
            return velocity, velocity
        velocity = velocity + update.vector
        velocity *= mu
        return velocity + update.vector, velocity

    def _fused(
        self, gradient: Vector, held: State, warm: float | None, key: Key, update: Update
    ) -> tuple[Frame, Vector, float | None]:
        """Return frame, p - q and the new threshold, with addition, selection and clearing in one pass."""
        codec = self.codec
        assert isinstance(codec, TopK)
        memory = held["memory"]
        left = update.vector if update.given else np.empty_like(memory)
        tensors = []
        threshold = None
        end = 0
        for stretch in codec.stretches(update.layout):
            end = stretch.stop
            try:
                step = feedback_step(
                    memory[:end],
                    gradient[:end],
                    codec.count(stretch, key),
                    decay=self.decay,
                    threshold=warm,
                    out=left[:end],
                )
            except NonFiniteUpdate:
                # The kernel sees only the sum; this says whether the update, the memory or their addition is to blame.
                raise not_finite(update, held) from None
            threshold = step.threshold
            tensor = codec.pack_selected(step.indices, step.values, stretch)
            tensors.append(tensor)
            if not codec.value_form.exact:
                # The kernel has cleared what was selected. What is rounded away, or rounded to zero, stays.
                left[step.indices] = step.values
                left[tensor.indices] -= tensor.values.decode()
        rest = np.add(memory[end:] * np.float32(self.decay), gradient[end:], out=left[end:])
        if not all_finite(rest):
            raise not_finite(update, held)
        frame = codec.frame_of(tensors, rest)
        # After encoding, as it is a view of the new memory: what travelled as it is leaves nothing there.
        rest -= codec.rest_form.code(np.asarray(rest)).decode()
        return frame, left, threshold

    def _general(
        self, gradient: Vector, held: State, inner: State, key: Key, update: Update
    ) -> tuple[Frame, Bundle, Vector, State]:
        """Return frame, its content, p - q and the codec's state, for any codec."""
        memory = held["memory"]
        if self.decay == 1.0:
            total = memory + gradient
        else:
            total = memory * np.float32(self.decay)
            total += gradient
        sum_of_both = Update(total, update.layout)
        content: Frame | Bundle
        try:
            if type(self.codec) is Auto:
                # Its levels are known; to decode them again takes as long as to encode them.
                content, inner = self.codec.packed(sum_of_both, inner, key)
                frame = wire.encode(content.tensors, tlvs=content.tlvs)
            else:
                frame, inner = self.codec.encode(sum_of_both, inner, key)
                content = frame
        except NonFiniteUpdate as error:
            # A codec may overflow on a finite sum, as a scaled random-k does; then its own message is the right one.
            raise error if all_finite(total) else not_finite(update, held) from None
        content = self.codec.open(content, update.layout)
        # The Update shares the array, so this leaves p - q in total.
        self.codec.accumulate(content, -1.0, sum_of_both)
        return frame, content, total, inner


def _memory_of(state: State, layout: Layout) -> Vector:
    """Return the memory after checks; the caller must not write to it."""
    memory = recalled(state)
    return vector_of(state if memory is None else {"memory": memory}, "memory", layout)


def shorten(memory: Vector, bound: float) -> None:
    """Scale ``memory`` down in place to the norm ``bound`` when it is longer; 0 sets no bound."""
    length = norm(memory)
    if 0.0 < bound < length:
        memory *= np.float32(bound / length)


def _prefixed(inner: Mapping[str, NDArray[Any]]) -> State:
    return {_INNER + name: array for name, array in inner.items()}


def _inner(state: State) -> State:
    return {name.removeprefix(_INNER): array for name, array in state.items() if name.startswith(_INNER)}
