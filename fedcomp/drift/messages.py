"""The messages between a sensor and its edge, as bytes.

A sensor's message begins with nine: its number, the version of the model it runs (two uint32), and what it says
(:class:`Says`). A window follows as one frame: samples, labels, sketch. A deployment begins with version, base,
threshold and digest (uint32, uint32, float32, 16 bytes), and goes on with its frames, each behind its length (uint32):
the sketch (of length 0 where there is none), then the whole model, or the steps from ``base`` on, every step with its
exact buffers behind it (of length 0 as well). All numbers are little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from fedcomp import wire
from fedcomp.drift.distance import QUANTILES, QuantileSketch
from fedcomp.drift.sensor import Upload
from fedcomp.errors import FedcompError
from fedcomp.versions import Step
from fedcomp.wire import DENSE, Expected, Limits

HEADER: Final = struct.Struct("<IIB")
_DEPLOYMENT: Final = struct.Struct("<IIf16s")
_LENGTH: Final = struct.Struct("<I")

MAX_BYTES: Final = 1 << 28
"""Longest message of either side."""

_MAX_STEPS: Final = 1 << 10
_SKETCH: Final = (Expected("", (QUANTILES,), kinds=frozenset({DENSE})),)


class SensorError(FedcompError, ValueError):
    """A message between a sensor and its edge is not one."""


class Says(IntEnum):
    """What a sensor's message is."""

    HEARTBEAT = 0
    """It is there, and runs this version."""
    DRIFT = 1
    """Its window is unlike the reference; the window follows."""
    COLLECTED = 2
    """It has no reference; the window follows."""
    RESYNC = 3
    """It cannot use what it was sent, and needs the whole model."""
    ODD = 4
    """As DRIFT, of a window in which figures were NaN: there is no sketch of it."""


@dataclass(frozen=True, eq=False)
class SensorMessage:
    """One message of a sensor.

    Attributes
    ----------
    sensor : int
        Its number below its edge.
    version : int
        Of the model it runs; 0 for none.
    says : Says
    upload : Upload or None
        With DRIFT, COLLECTED and ODD.
    """

    sensor: int
    version: int
    says: Says
    upload: Upload | None = None

    @classmethod
    def of(cls, sensor: int, upload: Upload) -> SensorMessage:
        """Return the message that brings a window."""
        says = Says.ODD if upload.sketch is None else Says.COLLECTED if math.isnan(upload.distance) else Says.DRIFT
        return cls(sensor, upload.version, says, upload)

    def to_bytes(self) -> bytes:
        """Return the message's bytes: nine where nothing is sent but a sign of life."""
        head = HEADER.pack(self.sensor, self.version, self.says)
        if self.upload is None:
            return head
        window = [wire.dense(self.upload.samples), wire.dense(self.upload.labels)]
        if self.upload.sketch is not None:
            window.append(wire.dense(self.upload.sketch.quantiles))
        return head + wire.encode(window)

    @classmethod
    def from_bytes(cls, data: bytes) -> SensorMessage:
        """Read a message.

        Raises
        ------
        SensorError
            When it is none.
        """
        if not HEADER.size <= len(data) <= MAX_BYTES:
            raise SensorError(f"a sensor's message has {len(data)} bytes, expected {HEADER.size} to {MAX_BYTES}")
        sensor, version, says = HEADER.unpack_from(data)
        if says not in tuple(Says):
            raise SensorError(f"a sensor's message says {says}, which is unknown here; run the same release on both")
        kind = Says(says)
        if kind in (Says.HEARTBEAT, Says.RESYNC):
            if len(data) > HEADER.size:
                raise SensorError(f"{len(data) - HEADER.size} bytes follow a sign of life")
            return cls(sensor, version, kind)
        return cls(sensor, version, kind, _upload(data[HEADER.size :], version, kind))


def _upload(frame: bytes, version: int, kind: Says) -> Upload:
    try:
        # Inputs may be anything; a sensor that sees NaN has to be able to show it.
        tensors = wire.decode(frame, limits=Limits(MAX_BYTES, max_tensors=3, non_finite="allow")).tensors
        found = [tensor.dense() for tensor in tensors]
        count = 2 if kind is Says.ODD else 3
        if len(found) != count or [a.dtype.name for a in found[:2]] != ["float32", "int64"] or not found[0].ndim:
            raise SensorError("a window holds float32 samples, int64 labels and a sketch; this one does not")
        samples, labels = found[:2]
        if labels.shape not in ((0,), samples.shape[:1]):
            raise SensorError(f"a window has {samples.shape} samples and {labels.shape} labels")
        sketch = None if kind is Says.ODD else QuantileSketch(found[2])
    except SensorError:
        raise
    except FedcompError as error:
        raise SensorError(f"a sensor's window cannot be read: {error}") from error
    return Upload(version, samples, labels, sketch)


@dataclass(frozen=True, eq=False)
class ModelMessage:
    """A model on its way to a sensor.

    Attributes
    ----------
    version, base : int
        Of the model, and the one its steps start from; base 0 means that the model is whole.
    threshold : float
        Distance above which a window is unlike ``sketch``.
    digest : bytes
        Names the model (:func:`fedcomp.versions.digest`).
    sketch : QuantileSketch or None
        Of the figures that this very model had on held-out data; None where there were too few, and the sensor is to
        collect.
    steps : sequence of Step
        The whole model is one step, in a frame of float32.
    """

    version: int
    base: int
    threshold: float
    digest: bytes
    sketch: QuantileSketch | None
    steps: Sequence[Step]

    def to_bytes(self) -> bytes:
        """Return the message's bytes."""
        parts = [b"" if self.sketch is None else wire.encode([wire.dense(self.sketch.quantiles)])]
        for step in self.steps:
            parts += [step.frame, step.exact or b""]
        head = _DEPLOYMENT.pack(self.version, self.base, self.threshold, self.digest)
        return head + b"".join(_LENGTH.pack(len(part)) + part for part in parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> ModelMessage:
        """Read a message; what its steps hold is checked when they are applied.

        Raises
        ------
        SensorError
            When it is none.
        """
        if not _DEPLOYMENT.size <= len(data) <= MAX_BYTES:
            raise SensorError(f"a deployment has {len(data)} bytes, expected {_DEPLOYMENT.size} to {MAX_BYTES}")
        version, base, threshold, digest = _DEPLOYMENT.unpack_from(data)
        first, *parts = _parts(data[_DEPLOYMENT.size :])
        if base >= version or not 0.0 <= threshold <= 1.0 or len(parts) != 2 * (version - base if base else 1):
            raise SensorError(
                f"a deployment of version {version} from {base} has threshold {threshold:g} and {len(parts)} frames"
            )
        sketch = None
        try:
            if first:
                (quantiles,) = wire.decode(first, _SKETCH).tensors
                sketch = QuantileSketch(np.asarray(quantiles.dense(), np.float32))
        except FedcompError as error:
            raise SensorError(f"the sketch of a deployment cannot be read: {error}") from error
        start = base + 1 if base else version
        steps = [Step(start + i, parts[2 * i], parts[2 * i + 1] or None) for i in range(len(parts) // 2)]
        return cls(version, base, threshold, digest, sketch, steps)


def _parts(data: bytes) -> list[bytes]:
    """Return the frames after a header, at least one."""
    parts: list[bytes] = []
    at = 0
    while at < len(data) and len(parts) <= 2 * _MAX_STEPS:
        if at + _LENGTH.size > len(data):
            raise SensorError("a deployment ends within the length of a frame")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length > len(data) - at:
            raise SensorError(f"a frame of {length} bytes is announced where {len(data) - at} are left")
        parts.append(data[at : at + length])
        at += length
    if at < len(data) or not parts:
        raise SensorError(f"a deployment holds {'no frame' if not parts else 'too many frames'}")
    return parts
