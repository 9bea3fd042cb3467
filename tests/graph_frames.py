"""Damage to frames of graph learning, and what a receiver may make of it: a value or a WireError, in bounded memory."""

from __future__ import annotations

import contextlib
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from fedcomp.rng import Key
from fedcomp.wire import WireError

Decode = Callable[[bytes], Any]

_BYTES = (0x00, 0x01, 0x7F, 0x80, 0xFE, 0xFF)


def sealed(body: bytes) -> bytes:
    """Return ``body`` with a correct checksum after it, as anyone can compute it."""
    return body + zlib.crc32(body).to_bytes(4, "little")


def refuses_every_truncation_and_flip(decode: Decode, frame: bytes) -> None:
    """Each shorter frame and each frame with one bit flipped is refused with a WireError."""
    for length in range(len(frame)):
        with pytest.raises(WireError):
            decode(frame[:length])
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(WireError):
            decode(bytes(damaged))


def refuses_every_sealed_truncation(decode: Decode, frame: bytes, but: int = -1) -> None:
    """A frame that ends early, or late, is refused although its checksum is right; ``but`` the one that ends there."""
    for length in sorted({*range(len(frame) - 4)} - {but}):
        with pytest.raises(WireError):
            decode(sealed(frame[:length]))
    for tail in (b"\x00", b"\x01", b"\xff" * 8):
        with pytest.raises(WireError):
            decode(sealed(frame[:-4] + tail))


def mutants(frames: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Yield frames that were edited and still have a correct checksum."""
    words = Key(seed, "mutants of graph frames").bits(5 * count).tolist()
    for i in range(0, len(words), 5):
        pick, a, b, c, d = words[i : i + 5]
        body = bytearray(frames[pick % len(frames)][:-4])
        # Lengths and counts stand near the front.
        place = 3 + a % ((min(24, len(body)) if b & 1 else len(body)) - 3)
        action = c % 6
        if action == 0:
            body[place] ^= 1 << d % 8
        elif action == 1:
            body[place] = _BYTES[d % 6]
        elif action == 2:
            body[place : place + 1] = b"\xff" * (d % 9) + bytes((b >> 8 & 0x7F,))
        elif action == 3:
            del body[place : place + 1 + d % 6]
        elif action == 4:
            body[place:place] = d.to_bytes(8, "little")[: 1 + b % 8]
        else:
            other = frames[b % len(frames)]
            body[place:] = other[min(place, len(other)) : -4]
        yield sealed(bytes(body))


def survives_mutants(decode: Decode, frames: Sequence[bytes], count: int, seed: int, most: int) -> None:
    """Mutants are values or WireErrors, and none of them takes more than ``most`` bytes of memory."""
    refused = 0
    tracemalloc.start()
    try:
        for mutant in mutants(frames, count, seed):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                decode(mutant)
            except WireError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error} from {mutant.hex()}") from error
            assert tracemalloc.get_traced_memory()[1] - before <= most, mutant.hex()
    finally:
        tracemalloc.stop()
    # Otherwise the mutants would tell nothing, or would not get beyond the checksum.
    assert count // 3 < refused < count


def memory_of(call: Callable[[], Any]) -> int:
    """Return the most memory that ``call`` takes while it is refused, or not, in bytes."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with contextlib.suppress(WireError):
            call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
