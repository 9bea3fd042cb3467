"""Sources of randomness for privacy noise and private sampling.

Noise that somebody can draw again protects nothing, so the source is the operating system's, stretched by ChaCha20.
A seed is for tests and experiments that must repeat; it has to be asked for by its full name, and a privacy statement
then says so. Nothing here reads or writes a global generator.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.rng import Key

_KEY_BYTES = 32
# The same for all: every key makes one stream.
_NONCE = bytes(16)
_REKEY = 1 << 30
"""Number of bytes after which a new key is drawn, far below the overflow of ChaCha20's block counter of 32 bits."""


class Entropy(ABC):
    """A stream of random bytes.

    Attributes
    ----------
    secure : bool
        Whether nobody else can draw the same bytes.
    description : str
        For the privacy statement.
    """

    secure: ClassVar[bool]
    description: ClassVar[str]

    @abstractmethod
    def bytes(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return ``count`` uniform 64-bit words, shape ``(count,)``."""
        return np.frombuffer(self.bytes(8 * count), "<u8").astype(np.uint64, copy=False)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Return ``count`` doubles in [0, 1) with 53 random bits each, shape ``(count,)``."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class _ChaCha(Entropy):
    def __init__(self, key: bytes) -> None:
        self._start(key)

    def _start(self, key: bytes) -> None:
        self._stream = Cipher(algorithms.ChaCha20(key, _NONCE), mode=None).encryptor()
        self._left = _REKEY

    def _next_key(self) -> bytes:
        raise AssertionError("a subclass says where the next key comes from")

    def bytes(self, count: int) -> bytes:
        """Return the next ``count`` bytes of the key stream."""
        parts = []
        while count > 0:
            if self._left == 0:
                self._start(self._next_key())
            taken = min(count, self._left)
            # Zeros under a stream cipher are its key stream.
            parts.append(self._stream.update(bytes(taken)))
            self._left -= taken
            count -= taken
        return b"".join(parts)


class SystemEntropy(_ChaCha):
    """ChaCha20 under a key from the operating system, which no fork of the process shares."""

    secure = True
    description = "operating-system entropy, ChaCha20"

    def __init__(self) -> None:
        super().__init__(os.urandom(_KEY_BYTES))
        self._owner = os.getpid()

    def _next_key(self) -> bytes:
        return os.urandom(_KEY_BYTES)

    def bytes(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        if os.getpid() != self._owner:
            # A fork would otherwise add its parent's noise once more, and the difference would show the data.
            self._start(self._next_key())
            self._owner = os.getpid()
        return super().bytes(count)


class SeededEntropy(_ChaCha):
    """ChaCha20 under a key that a seed names: for tests and repeatable experiments, never for a promise.

    Parameters
    ----------
    key : Key
        Names the stream.
    insecure_deterministic : bool
        Must be True.

    Raises
    ------
    ConfigError
        Without ``insecure_deterministic=True``.

    Examples
    --------
    >>> from fedcomp.rng import Key
    >>> noise = SeededEntropy(Key(7, "test"), insecure_deterministic=True)
    >>> noise.words(2).tolist() == SeededEntropy(Key(7, "test"), insecure_deterministic=True).words(2).tolist()
    True
    """

    secure = False
    description = "INSECURE: a seed; anybody who knows it can remove the noise"

    def __init__(self, key: Key, *, insecure_deterministic: bool = False) -> None:
        if insecure_deterministic is not True:
            raise ConfigError(
                "noise from a seed protects nothing: anybody who knows the seed can remove it. Leave the seed out, "
                "or set insecure_deterministic=True where only repeatability matters"
            )
        super().__init__(key.digest())
        self._key = key
        self._generation = 0

    def named(self, purpose: str) -> SeededEntropy:
        """Return another stream of the same key."""
        return SeededEntropy(self._key.at(purpose=f"{self._key.purpose}/{purpose}"), insecure_deterministic=True)

    def _next_key(self) -> bytes:
        self._generation += 1
        # Another purpose, not another layer: the next layer may be a stream of its own.
        return self._key.at(purpose=f"{self._key.purpose}/key {self._generation}").digest()


def coins_of(entropy: Entropy) -> Entropy:
    """Return a source for what models draw that leaves ``entropy`` where it is: named by the same key, or as secret."""
    if isinstance(entropy, SeededEntropy):
        return entropy.named("coins")
    return SystemEntropy() if entropy.secure else entropy


def make_entropy(key: Key | None = None, *, insecure_deterministic: bool = False) -> Entropy:
    """Return the operating system's entropy; with ``insecure_deterministic=True`` the stream that ``key`` names.

    Raises
    ------
    ConfigError
        When a deterministic stream is asked for without a key.
    """
    if not insecure_deterministic:
        return SystemEntropy()
    if key is None:
        raise ConfigError("insecure_deterministic=True needs a key that names the stream")
    return SeededEntropy(key, insecure_deterministic=True)
