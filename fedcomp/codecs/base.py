"""The codec protocol: encoding and decoding with explicit state.

A codec is immutable configuration. Everything that changes from round to round is in ``State``, a plain
``dict[str, ndarray]`` the caller owns, stores and rolls back; a codec remembers nothing but, at most, what it has
derived from its configuration and the last layout. Client half (``encode``) and server half (:class:`Receiver`) of a
codec are one class, so that they are read together.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcomp.errors import ConfigError, LayoutError, NonFiniteUpdate
from fedcomp.factors.outer import OuterProducts
from fedcomp.kernels import tiers
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.rules import Configured
from fedcomp.wire import FILLED, Bundle, Frame, Kind, Limits, Schema, decode, pad

T = TypeVar("T")

_BLOCK: Final = 1 << 16

State = dict[str, NDArray[Any]]
"""What a codec remembers between two updates of one client. Arrays only; counters are 0-d arrays."""


_COMPUTES: Final = ("encode", "rollback", "accumulate", "enter", "gather", "conclude", "decode", "norm", "figures")


def underflowing(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function in which what is too small for a number is zero.

    Also where an application has numpy raise at that, to find faults of its own.
    """

    # Not numpy's decorator of that purpose: what it returns cannot be pickled, and Ray sends apps.
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        with np.errstate(under="ignore"):
            return function(*args, **kwargs)

    return call


class Receiver(ABC):
    """The server's half of a codec: which frames are taken, and what is made of them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the arithmetic of every codec underflow; see :func:`underflowing`."""
        super().__init_subclass__(**kwargs)
        for name in _COMPUTES:
            if name in vars(cls):
                setattr(cls, name, underflowing(vars(cls)[name]))

    @abstractmethod
    def schema(self, layout: Layout) -> Schema:
        """Return the tensors a frame of this codec must hold for ``layout``: the receiver's own expectation."""

    def sparse(self, layout: Layout) -> bool:
        """Whether frames for ``layout`` list coordinates and deliver nothing to the others."""
        return any(expected.kinds == {Kind.SPARSE} for expected in self.schema(layout))

    def limits(self, layout: Layout) -> Limits:
        """Return the resource limits under which a frame for ``layout`` is parsed."""
        return Limits.for_schema(self.schema(layout))

    def longest(self, layout: Layout) -> int | None:
        """Return a number of bytes that no frame for ``layout`` exceeds, whatever was learnt; None: none is known."""
        return None

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        """Parse and check ``frame`` completely, adding nothing anywhere; a bundle comes back as the object it is.

        Raises
        ------
        fedcomp.wire.WireError
            For anything that is not exactly a frame of this codec and layout.
        """
        # A receiver opens a frame once, and then measures and adds the same bundle.
        return frame if isinstance(frame, Bundle) else decode(frame, self.schema(layout), self.limits(layout))

    def verify(self, frame: Frame | Bundle, layout: Layout, key: Key) -> Bundle:
        """Open ``frame`` and also check what it says was drawn at random, such as the seed of a support.

        For a receiver who knows the ``key`` the sender encodes with. Most codecs have no such draws.

        Raises
        ------
        fedcomp.wire.WireError
            As :meth:`open`, and when the draw is not that of ``key``.
        """
        return self.open(frame, layout)

    @abstractmethod
    def accumulate(self, frame: Frame | Bundle, weight: float, out: Update) -> None:
        """Add ``weight * decode(frame)`` into ``out.vector`` in place; O(k) work for a sparse frame.

        The frame is opened completely before the first element is touched: a bad frame leaves ``out`` unchanged.
        """

    def enter(self, update: Update) -> None:  # noqa: B027  # most codecs add up in the update's own coordinates
        """Bring an update that was not encoded into the coordinates in which :meth:`gather` adds, in place."""

    def gather(self, frame: Frame | Bundle, weight: float, total: Update) -> None:
        """Add ``weight`` times what ``frame`` says to ``total.vector``, the sum of a round, in place.

        What may be summed: frames of this codec, and updates that :meth:`enter` brought into its coordinates, for one
        layout. The sum becomes an update by :meth:`conclude` only. For most codecs this is :meth:`accumulate`; a
        :class:`~fedcomp.codecs.Domain` adds in its own coordinates, at the cost of the codec in it.
        """
        self.accumulate(frame, weight, total)

    def conclude(self, total: Update) -> None:  # noqa: B027  # most codecs have nothing to conclude
        """Turn the weighted sum of all contributions in ``total.vector`` into the update they stand for, in place.

        Called by the receiver once per round, after the last :meth:`gather`; the weights sum to 1. Votes become a step,
        and the coordinates of a domain those of the update; nothing happens for other codecs.
        """

    def tensor_names(self, layout: Layout) -> tuple[str, ...]:
        """Return a name for each tensor of a frame, in order: for reports, they do not travel."""
        return tuple(e.name or f"tensor {i}" for i, e in enumerate(self.schema(layout)))

    def decode(self, frame: Frame | Bundle, layout: Layout) -> Vector:
        """Return the decoded vector, float32 of shape ``(layout.size,)``."""
        # -0.0 is the exact identity of addition (0.0 would turn a decoded -0.0 into 0.0).
        out = Update(np.full(layout.size, -0.0, np.float32), layout)
        self.accumulate(frame, 1.0, out)
        return out.vector

    def norm(self, frame: Frame | Bundle, layout: Layout) -> float:
        """Return the Euclidean norm of ``decode(frame)``, in float64; most codecs need no vector for it.

        Where decoding rotates, that of the vector before: the same up to the rounding of float32.

        Raises
        ------
        fedcomp.wire.WireError
            As :meth:`open`.
        """
        return norm(self.decode(frame, layout))

    def outer(self, frame: Frame | Bundle, layout: Layout) -> Mapping[str, OuterProducts]:
        """Return of which outer products matrices are the sum, where ``frame`` says so; of most codecs none does."""
        return {}

    def figures(self, frame: Frame | Bundle, layout: Layout, length: float) -> Mapping[str, float]:
        """Return what a report shows of ``frame`` beside its size, by name, such as the ranks of its matrices.

        ``length`` is :meth:`norm` of it, which the receiver has at hand.
        """
        return {}

    def support(self, frame: Frame | Bundle, layout: Layout) -> NDArray[np.int64]:
        """Return the coordinates to which ``frame`` delivers something other than zero in sparse form, ascending.

        Empty for a dense frame, whose coordinates are not chosen.
        """
        return np.zeros(0, np.int64)


class Codec(Receiver, Configured):
    """Turns an update into a frame and back.

    Class attributes declare the codec's properties; shared tests check them.

    Attributes
    ----------
    codec_id : str
        The registered name by which messages refer to the codec.
    lossless : bool
        ``decode(encode(x)) == x`` bit for bit. The drop-in pair then sends the model itself instead of a difference.
    linear : bool
        For one support and one key, decoding commutes with addition: frames of several clients may be summed.
    unbiased : bool
        ``E[decode(encode(x))] == x``; for a non-uniform rotation, up to the deviation that its class states.
    remembers : bool
        The codec has its own memory of what was not sent, and needs no error feedback around it.
    never_enlarges : bool
        ``‖decode(encode(x))‖ <= ‖x‖`` for every x, every draw, every state and every shared basis, up to the rounding
        of float32: an update clipped before encoding is still within the clip norm after decoding.
    phases : int
        Number of exchanges that an encoding needs; 1 for codecs that work with Flower's own hooks.
    votes : bool
        A frame is a vote, not an estimate of the update; only :meth:`conclude` of the sum of all votes is an estimate.
        A receiver that uses single decoded frames (a median, a norm) cannot use votes.
    gain : float
        The factor by which the sum of sent values may exceed the sum of the updates in the long run: 1/(1 - momentum)
        with momentum correction.
    on_device : bool
        Updates and memories may be on a device (:class:`fedcomp.device.DeviceArray`), and what is kept stays there.
    exposes : str
        What a frame reveals about single examples beyond their sum, as a clause; empty for nothing. A client sends such
        a frame only if the app's author has agreed to it.
    """

    codec_id: ClassVar[str]
    lossless: bool = False
    linear: bool = False
    unbiased: bool = False
    remembers: bool = False
    never_enlarges: bool = False
    phases: int = 1
    votes: bool = False
    gain: float = 1.0
    on_device: bool = False
    exposes: str = ""

    def contraction(self, layout: Layout) -> float | None:
        """Return δ with ``‖x - C(x)‖² <= (1-δ)‖x‖²`` for every x, or None when no such bound holds.

        For a randomised codec the bound holds in expectation over the key. The loss of values below the smallest normal
        float32, 2^-126, is not counted.
        """
        return None

    def variance(self, layout: Layout) -> float | None:
        """Return ω with ``E‖C(x) - x‖² <= ω‖x‖²`` for an unbiased codec, or None when it is not one."""
        return None

    def to_config(self) -> dict[str, Any]:
        """Return ``{"id": codec_id, **get_config()}``: JSON-able, what :func:`fedcomp.codecs.get_codec` takes."""
        return {"id": self.codec_id, **self.get_config()}

    def init(self, layout: Layout) -> State:
        """Return the initial state of a client; refuse a layout that the codec does not support."""
        self.schema(layout)
        return {}

    @abstractmethod
    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        """Encode ``update``; return the frame and the state after it was sent.

        ``update`` and ``state`` are not modified, so that a caller whose message is lost can roll back.

        Raises
        ------
        NonFiniteUpdate
            When the update holds NaN or infinity; the state is then untouched.
        """

    def preview(self, values: ArrayLike, key: Key | None = None) -> Vector:
        """Return ``values`` as decoded from the frame of a single client, as float32 of the same length.

        For trying out a codec; no state is kept.

        Examples
        --------
        >>> from fedcomp.codecs import TopK
        >>> TopK(density=0.5).preview([0.5, -3.0, 1.0, 0.25])
        array([ 0., -3.,  1.,  0.], dtype=float32)
        """
        vector = np.array(values, np.float32).reshape(-1)
        layout = Layout.flat(vector.size)
        frame, _ = self.encode(Update(vector, layout), self.init(layout), key or Key(0, "preview"))
        out = Update(np.zeros(layout.size, np.float32), layout)
        self.gather(frame, 1.0, out)
        self.conclude(out)
        return out.vector

    def rollback(self, state: State, frame: Frame, layout: Layout) -> State:
        """Return ``state`` (which :meth:`encode` returned with ``frame``) as if ``frame`` had never been sent.

        Called when the server did not acknowledge the frame. Codecs with memory put the mass of ``frame`` back into it.
        """
        return state

    def residual(self, state: State) -> Vector | None:
        """Return the unsent part of updates that ``state`` holds, float32 of the layout's size; None without memory. A
        read-only view."""
        return state.get("memory") if self.remembers else None

    def common_support(self, layout: Layout, key: Key) -> NDArray[np.int64] | None:
        """Return the coordinates of the vector on which every frame of the round of ``key`` lies, ascending.

        None if senders choose their own coordinates, or send all of them. The result depends on the key and the layout
        only, never on an update.
        """
        return None


def norm(vector: NDArray[Any], origin: NDArray[Any] | None = None) -> float:
    """Return the Euclidean norm of ``vector``, or of ``vector - origin``.

    Summed in float64 by blocks: float32 sums over millions are off in the third digit, and squares of large float32
    values are not finite.
    """
    # No dot product: a threaded one stalls for milliseconds when other processes hold the cores (measured 14 ms).
    return math.sqrt(float(tiers.of("auto", vector).square_sums(vector, origin).sum()))


def all_finite(vector: Vector) -> bool:
    """Whether ``vector`` holds neither NaN nor infinity; one fast pass when it does not."""
    with np.errstate(over="ignore", invalid="ignore"):
        # The float32 sum is the fast one and can overflow; the float64 sum of finite float32 values cannot.
        return bool(np.isfinite(vector.sum()) or np.isfinite(vector.sum(dtype=np.float64)))


def require_finite(update: Update) -> None:
    """Raise :class:`NonFiniteUpdate` naming the first tensor of ``update`` that holds NaN or infinity."""
    if all_finite(update.vector):
        return
    # Only for the message: finding the tensor takes a pass over each.
    for t in update.layout.tensors:
        bad = int(np.count_nonzero(~np.isfinite(update.vector[t.slice])))
        if bad:
            raise NonFiniteUpdate(
                f"tensor {t.name!r} of the update holds {bad} non-finite value(s) of {t.size}; nothing was sent and no "
                "state was changed. Lower the learning rate or clip gradients before communicating"
            )
    raise LayoutError("the update's sum is not finite although every tensor is")


def padded(frame: Frame, codec: Codec, layout: Layout, key: Key) -> Frame:
    """Return ``frame`` padded to a length that follows from codec and layout alone.

    Raises
    ------
    ConfigError
        When the codec knows no such length, or the frame exceeds it.
    """
    longest = codec.longest(layout)
    if longest is None:
        raise ConfigError(f"{codec!r} knows no longest frame to pad others to; use another codec, or pad=False")
    # Padding needs FILLED bytes of its own, also where the frame is already the longest.
    return pad(frame, longest + FILLED, key.at(purpose="padding").digest())
