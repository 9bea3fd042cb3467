"""A small convolutional autoencoder that maps sixteen values to four, in numpy so that clients need no torch.

The architecture is the one of learned gradient compression (Abrahamyan et al. 2022, arXiv 2103.08870; recalled, and
read in a third party's implementation). Padding, with which lengths match without interpolation, is derived; so is that
latents are not activated. Training is the server's (:mod:`fedcomp.systems.autoencoder`).

Both ends should get the same numbers from the same weights, and products are summed in float64 for it
(:func:`fedcomp.codecs.matrices.product`). Nothing depends on it bit for bit: what clients take for a model is never
decoded here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs.coefficients import ID_BYTES
from fedcomp.codecs.matrices import product
from fedcomp.codecs.positional import expected_dense
from fedcomp.errors import ConfigError
from fedcomp.layout import Vector
from fedcomp.rng import Key
from fedcomp.wire import Frame

STEP: Final = 16
"""Values for which one position of the latents stands: four convolutions of stride 2."""

CHANNELS: Final = 4
"""Numbers at each position of the latents."""

SLOPE: Final = 0.01
"""Of a leaky ReLU below zero."""

IDENTITY: Final = 1
"""Id of an autoencoder that leaves values as they are."""

Signal = NDArray[np.float32]
"""Channels and positions."""

H = TypeVar("H", bound="_Weights")


def latents(size: int) -> int:
    """Return how many latents stand for ``size`` values."""
    return CHANNELS * math.ceil(size / STEP)


class LatentEncoder(Protocol):
    """What makes latents of values."""

    @property
    def id(self) -> int:
        """A digest of all weights, 63 bits."""
        ...

    def frame(self) -> Frame:
        """Return the weights as they travel; empty where there are none."""
        ...

    def latents(self, size: int) -> int:
        """Return how many latents stand for ``size`` values."""
        ...

    def encode(self, values: Vector) -> Vector:
        """Return the latents of values, float32 of shape (k,)."""
        ...


class LatentDecoder(Protocol):
    """What makes values of latents."""

    @property
    def id(self) -> int:
        """A digest of all weights, 63 bits."""
        ...

    def frame(self) -> Frame:
        """Return the weights as they travel; empty where there are none."""
        ...

    def decode(self, latents: Vector, size: int, side: Vector | None = None) -> Vector:
        """Return ``size`` values; ``side`` is what is known of them besides, 0 where nothing is."""
        ...


@dataclass(frozen=True, eq=False)
class _Weights:
    """Weights and biases in the shapes that torch gives them, layer by layer."""

    KIND: ClassVar[str]
    SHAPES: ClassVar[Sequence[tuple[int, ...]]]
    INPUTS: ClassVar[Sequence[int]]

    weights: tuple[NDArray[np.float32], ...]

    def __post_init__(self) -> None:
        shapes = [array.shape for array in self.weights]
        if shapes != list(self.SHAPES):
            raise ConfigError(f"weights of shapes {shapes} are not those of {type(self).__name__}")

    @classmethod
    def draw(cls: type[H], key: Key) -> H:
        """Return random weights: uniform in ±1/√(inputs of a number), torch's default."""
        drawn = []
        for index, shape in enumerate(cls.SHAPES):
            bound = 1.0 / math.sqrt(cls.INPUTS[index // 2])
            uniform = key.at(purpose=f"{key.purpose}/{cls.KIND}", layer=index).uniform(math.prod(shape))
            drawn.append((bound * (2.0 * uniform - 1.0)).astype(np.float32).reshape(shape))
        return cls(tuple(drawn))

    @classmethod
    def read(cls: type[H], frame: Frame) -> H:
        """Return the weights of a frame; the receiver compares their :attr:`id`.

        Raises
        ------
        fedcomp.wire.WireError
            If the frame does not hold such weights.
        """
        sizes = [math.prod(shape) for shape in cls.SHAPES]
        tensors = wire.decode(frame, tuple(expected_dense(size, wire.Raw) for size in sizes)).tensors
        return cls(tuple(t.values.decode().reshape(shape) for t, shape in zip(tensors, cls.SHAPES, strict=True)))

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(array.size for array in self.weights)

    @cached_property
    def _frame(self) -> Frame:
        return bytes(wire.encode([wire.dense(array.reshape(-1)) for array in self.weights]))

    def frame(self) -> Frame:
        """Return the weights as a float32 frame."""
        return self._frame

    @cached_property
    def id(self) -> int:
        """63 bits of a SHA-256 of all weights."""
        digest = hashlib.sha256(self.KIND.encode() + self._frame).digest()
        # 0 and 1 say that there is none, and that values stay as they are.
        return max(2, int.from_bytes(digest[:ID_BYTES], "little") >> 1)


@dataclass(frozen=True, eq=False)
class ConvEncoder(_Weights):
    """Four convolutions of stride 2, and one that mixes channels: 1-64-128-256-64-4 channels, 172 996 parameters.

    Parameters
    ----------
    weights : tuple of float32 arrays
        Of shapes (outputs, inputs, 3) and (outputs,), layer by layer; the last kernel has one position.

    Examples
    --------
    >>> encoder = ConvEncoder.draw(Key(0, "autoencoder"))
    >>> encoder.parameters, encoder.encode(np.ones(33, np.float32)).shape
    (172996, (12,))
    """

    KIND = "encoder"
    SHAPES = (
        *((64, 1, 3), (64,), (128, 64, 3), (128,), (256, 128, 3), (256,), (64, 256, 3), (64,)),
        *((4, 64, 1), (4,)),
    )
    INPUTS = (3, 192, 384, 768, 64)

    def latents(self, size: int) -> int:
        """Return how many latents stand for ``size`` values."""
        return latents(size)

    def encode(self, values: Vector) -> Vector:
        """Return the latents of values, float32 of shape (k,): channel by channel, float32 of shape (4⌈k/16⌉,)."""
        if not values.size:
            return np.zeros(0, np.float32)
        signal = np.zeros((1, STEP * math.ceil(values.size / STEP)), np.float32)
        signal[0, : values.size] = values
        for kernel, bias in zip(self.weights[:-2:2], self.weights[1:-2:2], strict=True):
            signal = _leaky(_halved(signal, kernel) + bias[:, None])
        return (_mixed(signal, self.weights[-2]) + self.weights[-1][:, None]).reshape(-1)


@dataclass(frozen=True, eq=False)
class ConvDecoder(_Weights):
    """Four transposed convolutions, and one that adds what is known besides: 4-32-64-128-32 (+1) -1, 43 682 parameters.

    Parameters
    ----------
    weights : tuple of float32 arrays
        Of shapes (inputs, outputs, 3) and (outputs,), as torch has them for transposed convolutions, layer by layer;
        the last of shapes (1, 33, 1) and (1,).

    Examples
    --------
    >>> decoder = ConvDecoder.draw(Key(0, "autoencoder"))
    >>> decoder.parameters, decoder.decode(np.ones(12, np.float32), 33).shape
    (43682, (33,))
    """

    KIND = "decoder"
    SHAPES = (
        *((4, 32, 3), (32,), (32, 64, 3), (64,), (64, 128, 3), (128,), (128, 32, 3), (32,)),
        *((1, 33, 1), (1,)),
    )
    # A transposed convolution has as many inputs as its kernel has numbers for one output channel: torch's rule.
    INPUTS = (96, 192, 384, 96, 33)

    def decode(self, latents: Vector, size: int, side: Vector | None = None) -> Vector:
        """Return ``size`` values, float32, of latents (4⌈size/16⌉,); ``side`` of shape (size,), default zeros."""
        if not size:
            return np.zeros(0, np.float32)
        signal = latents.reshape(CHANNELS, -1)
        for kernel, bias in zip(self.weights[:-2:2], self.weights[1:-2:2], strict=True):
            signal = _leaky(_doubled(signal, kernel) + bias[:, None])
        both = np.zeros((signal.shape[0] + 1, signal.shape[1]), np.float32)
        both[:-1] = signal
        if side is not None:
            both[-1, :size] = side
        return (_mixed(both, self.weights[-2]) + self.weights[-1][:, None])[0, :size]


@dataclass(frozen=True)
class IdentityEncoder:
    """Leaves values as they are."""

    id: ClassVar[int] = IDENTITY

    def frame(self) -> Frame:
        """Return nothing: there are no weights."""
        return b""

    def latents(self, size: int) -> int:
        """Return ``size``."""
        return size

    def encode(self, values: Vector) -> Vector:
        """Return the values."""
        return values


@dataclass(frozen=True)
class IdentityDecoder:
    """Returns what is known of the values: the latents, or the side information alone where there is some."""

    id: ClassVar[int] = IDENTITY

    def frame(self) -> Frame:
        """Return nothing: there are no weights."""
        return b""

    def decode(self, latents: Vector, size: int, side: Vector | None = None) -> Vector:
        """Return ``latents``, or ``side``."""
        return latents if side is None else side


def _leaky(signal: Signal) -> Signal:
    return np.maximum(signal, np.float32(SLOPE) * signal)


def _mixed(signal: Signal, kernel: Signal) -> Signal:
    """Return a convolution whose kernel has one position."""
    return product(np.ascontiguousarray(signal.T), kernel[:, :, 0].T).T


def _halved(signal: Signal, kernel: Signal) -> Signal:
    """Return a convolution with kernels of three positions, stride 2 and one zero at either end."""
    channels, length = signal.shape
    padded = np.zeros((channels, length + 2), np.float32)
    padded[:, 1:-1] = signal
    taps = np.stack([padded[:, tap : tap + length : 2] for tap in range(3)], axis=1)
    return product(np.ascontiguousarray(taps.reshape(3 * channels, -1).T), kernel.reshape(len(kernel), -1).T).T


def _doubled(signal: Signal, kernel: Signal) -> Signal:
    """Return the transpose of such a convolution, with twice the length."""
    outputs, length = kernel.shape[1], signal.shape[1]
    # What each position of the input adds to three neighbouring ones of the output, the first before its beginning.
    parts = product(np.ascontiguousarray(signal.T), kernel.reshape(len(kernel), -1)).T.reshape(outputs, 3, length)
    spread = np.zeros((outputs, 2 * length + 1), np.float32)
    for tap in range(3):
        spread[:, tap : tap + 2 * length : 2][:, :length] += parts[:, tap]
    return spread[:, 1:]
