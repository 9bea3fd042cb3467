"""Versioned replicas: a model broadcast as compressed differences, with error feedback at the server.

The server holds a *reference*: exactly the model its clients hold. A new version is the difference between the true
model and the reference, compressed, decoded and added to the reference at both ends. What compression dropped stays
in the next difference, which is error feedback without a second memory (derived here; the idea is that of
DoubleSqueeze and of EF21's server half). Sender and receivers perform the same float32 additions in the same order, so
replicas are equal bit for bit, and a digest proves it for every version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedcomp.codecs.base import Codec, State, require_finite
from fedcomp.codecs.projection import Replay
from fedcomp.errors import ConfigError, StateError
from fedcomp.exact import decode_exact, encode_exact
from fedcomp.factors.outer import OuterProducts
from fedcomp.layout import Layout, Update, Vector
from fedcomp.logs import log
from fedcomp.plain import Count
from fedcomp.rng import Key
from fedcomp.stateful import Stateful, next_epoch, within_epoch
from fedcomp.wire import Bundle, Frame

Arrays = Mapping[str, NDArray[Any]]

_KEY: Final = algorithms.AES(bytes(16))
_PIECE: Final = 1 << 30

FIRST: Final = 1
"""Version of the model a run begins with; a number that no later model ever has."""


@dataclass(frozen=True, slots=True)
class Step:
    """What turns version ``version - 1`` into ``version``.

    Attributes
    ----------
    version : int
    frame : bytes
        The change, or the model itself when the codec is lossless.
    exact : bytes or None
        The exact buffers.
    """

    version: int
    frame: Frame
    exact: Frame | None

    @property
    def nbytes(self) -> int:
        """Bytes that travel for this step at most."""
        return len(self.frame) + len(self.exact or b"")


Explain = Callable[[Update], Mapping[str, OuterProducts]]
"""The outer products of which matrices of a change are the sum, by name."""

Summands = Sequence[tuple[Frame | Bundle, float]]
"""Frames and their weights, in the order in which they were added."""

CodecOf = Callable[[Step], Codec]
"""Which codec reads a step."""


def digest(vector: Vector, exact: Arrays) -> bytes:
    """Return 16 bytes that name a model: the GMAC under a known key of the vector and the exact buffers.

    Models that differ by mistake have other ones. Whoever looks for two models with one name finds them, but has no use
    for that: the model is the server's own word.
    """
    # A polynomial over the words takes little more than reading them does; SHA-256 takes fourteen times as long.
    mac = Cipher(_KEY, modes.GCM(bytes(12))).encryptor()
    # Over the buffer itself, in pieces as long as OpenSSL takes them: its bytes would be a copy of the model.
    values = np.ascontiguousarray(vector).view(np.uint8)
    for start in range(0, values.size, _PIECE):
        mac.authenticate_additional_data(values[start : start + _PIECE].data)
    # By name, so that the order in which an end holds its buffers does not matter.
    for name in sorted(exact):
        mac.authenticate_additional_data(name.encode())
        mac.authenticate_additional_data(np.ascontiguousarray(exact[name]).tobytes())
    mac.finalize()
    return mac.tag


def check_codec(codec: Codec, layout: Layout) -> None:
    """Raise :class:`ConfigError` unless ``reference += C(target - reference)`` converges with ``codec``."""
    if codec.remembers:
        raise ConfigError(
            f"{codec!r} keeps its own memory, but difference coding already is error feedback on the downlink; "
            "pass the inner codec"
        )
    variance = codec.variance(layout)
    if not (codec.lossless or codec.contraction(layout) is not None or (variance is not None and variance < 1.0)):
        raise ConfigError(
            f"{codec!r} on the downlink can bring an error larger than what it sends: the clients' replicas would "
            'diverge from the server\'s model. Use EDEN(scale="least"), TopK, '
            "RandomK(unbiased=False), or QSGD with more levels or smaller buckets"
        )


class Broadcast(Stateful):
    """Server half: the reference all replicas share, and the recent steps that lead to it.

    Memory: one vector for the reference, and at most one dense model's worth of step bytes.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "version": Count,
        "reference": NDArray[np.float32],
        "exact": dict[str, NDArray[Any]],
        "digest": bytes,
        "_published": bytes,
        "_state": dict[str, NDArray[Any]],
        "_steps": list[Step],
    }

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.version = 0
        self.reference: Vector = np.empty(0, np.float32)
        self.exact: dict[str, NDArray[Any]] = {}
        self.digest = b""
        self._published = b""
        self._state: State = {}
        self._steps: list[Step] = []

    def renumber(self) -> None:
        """Give the current model a version of its own, which no steps lead to: replicas may hold other later ones."""
        if self.version:
            self.version = next_epoch(self.version) + within_epoch(self.version)
        self._steps = []

    def publish(
        self,
        target: Vector,
        exact: Arrays,
        layout: Layout,
        key: Key,
        explain: Explain = lambda change: {},
        summands: Summands = (),
    ) -> int:
        """Make ``target`` the current model; return its version.

        The version changes only when the model did: a node that already holds it needs no bytes at all. ``explain``
        says of which outer products a step's matrices are the sum, for a codec that has a use for them; ``summands``
        are the frames that were added to the last model, for one that repeats them. ``target`` is given: it is written
        to, or becomes the reference.

        Raises
        ------
        NonFiniteUpdate
            When the model holds NaN or infinity.
        """
        # The first model has no reference from which it could differ: it travels whole.
        if self.version == 0:
            if not isinstance(self.codec, Replay):
                check_codec(self.codec, layout)
            self._state = self.codec.init(layout)
            return self.adopt(target, exact, layout)
        # By its digest: the reference is not the model, and to keep that, too, would be another vector.
        published = digest(target, exact)
        if published == self._published:
            return self.version
        if isinstance(self.codec, Replay):
            version = self._replay(self.codec, target, exact, layout, summands)
            self._published = published
            return version
        # A codec refuses what is not finite, and the difference is not where the model is not.
        if not self.codec.lossless:
            np.subtract(target, self.reference, out=target)
        change = Update(target, layout)
        frame, self._state = self.codec.encode(replace(change, outer=explain(change)), self._state, key)
        version = self.push(frame, self.codec, exact, layout)
        self._published = published
        return version

    def is_current(self, model: Vector, exact: Arrays) -> bool:
        """Whether a model is the reference, and has the current buffers."""
        return self.version > 0 and np.array_equal(model, self.reference) and _same(exact, self.exact)

    def adopt(self, target: Vector, exact: Arrays, layout: Layout) -> int:
        """Make ``target``, which is given, the current model without a step that leads to it: every replica needs the
        full model.

        Raises
        ------
        NonFiniteUpdate
            When the model holds NaN or infinity.
        """
        require_finite(Update(target, layout))
        self.reference = target
        self._steps = []
        return self._advance(exact, layout)

    def push(self, frame: Frame, codec: Codec, exact: Arrays, layout: Layout) -> int:
        """Make the model that ``frame`` leads to the current one; for frames that were not made from a difference.

        Parameters
        ----------
        frame : bytes
        codec : Codec
            What reads the frame, here as at the replicas.
        """
        step = Step(self.version + 1, frame, encode_exact(exact, layout))
        self.reference = _apply(codec, frame, self.reference, layout)
        self._steps.append(step)
        self._trim(layout)
        return self._advance(exact, layout)

    def _replay(self, codec: Replay, target: Vector, exact: Arrays, layout: Layout, summands: Summands) -> int:
        """Return a step as the added frames if they lead to ``target`` bit for bit, otherwise as the whole model.

        It must be exact, because no later step would contain a part that is left out.
        """
        if summands:
            frame = codec.join(summands, layout)
            if np.array_equal(_apply(codec, frame, self.reference.copy(), layout), target):
                return self.push(frame, codec, exact, layout)
        log.info("version %d is not the sum of the updates, and is sent as the whole model", self.version + 1)
        return self.adopt(target, exact, layout)

    def _advance(self, exact: Arrays, layout: Layout) -> int:
        self.version += 1
        self.exact = {t.name: np.array(exact[t.name]) for t in layout.exact}
        self.digest = self._published = digest(self.reference, self.exact)
        return self.version

    def steps_from(self, version: int) -> list[Step] | None:
        """Return the steps a replica at ``version`` lacks, oldest first; None when only the full model helps."""
        if version == self.version:
            return []
        steps = [s for s in self._steps if s.version > version]
        complete = version > 0 and len(steps) == self.version - version
        return steps if complete else None

    def _trim(self, layout: Layout) -> None:
        full = self.codec.room(layout) if isinstance(self.codec, Replay) else layout.nbytes
        total = 0
        keep: list[Step] = []
        for step in reversed(self._steps):
            total += step.nbytes
            if total > full:
                break
            keep.append(step)
        self._steps = keep[::-1]


def advance(
    vector: Vector, exact: Arrays, version: int, steps: Sequence[Step], codec: Codec | CodecOf, layout: Layout
) -> tuple[Vector, dict[str, NDArray[Any]], int]:
    """Client half: apply the steps after ``version`` to a replica; return the new vector, buffers and version.

    ``vector`` is given: steps are added to it in place. ``exact`` is not modified.

    Steps the replica already has are skipped, so that a message whose reply was lost may be followed by another that
    repeats them.

    Raises
    ------
    StateError
        When a step is missing in between: the replica must ask for the full model.
    """
    todo = [s for s in steps if s.version > version]
    if [s.version for s in todo] != list(range(version + 1, version + 1 + len(todo))):
        raise StateError(
            f"replica holds version {version} and was offered steps {[s.version for s in steps]}; "
            "a full model is needed"
        )
    buffers = dict(exact)
    for step in todo:
        vector = _apply(codec if isinstance(codec, Codec) else codec(step), step.frame, vector, layout)
        buffers = decode_exact(step.exact, layout)
    return vector, buffers, version + len(todo)


def _apply(codec: Codec, frame: Frame, vector: Vector, layout: Layout) -> Vector:
    """Apply one step identically at both ends: a lossless frame is the model; any other frame is added in place."""
    if codec.lossless:
        return codec.decode(frame, layout)
    codec.accumulate(frame, 1.0, Update(vector, layout))
    # A replica is stored in the model's own dtypes; the reference must not know more than it can.
    layout.round_to_dtypes(vector)
    return vector


def _same(a: Arrays, b: Arrays) -> bool:
    # As bytes: NaN counts as equal to itself, and -0.0 as another value than 0.0.
    return a.keys() == b.keys() and all(np.asarray(a[k]).tobytes() == b[k].tobytes() for k in a)
