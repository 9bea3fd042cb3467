"""Bytes per tensor: they add up to the frame, and say what each tensor really costs."""

from __future__ import annotations

import numpy as np
import pytest
from frame_mutants import seal
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedcomp import wire


def some(rng: np.random.Generator) -> wire.Tensor:
    shape = tuple(rng.integers(1, 30, rng.integers(0, 3)))
    size = int(np.prod(shape, dtype=int))
    name = "" if rng.random() < 0.5 else f"tensor {rng.integers(1 << 30)}"
    values = rng.normal(size=size).astype(np.float32)
    backend = str(rng.choice(["none", "zlib"]))
    if rng.random() < 0.4:
        return wire.dense(values.reshape(shape), name, backend=backend)
    k = int(rng.integers(size + 1))
    if rng.random() < 0.3:
        return wire.seeded((size,), 3, k, wire.Raw(values[:k]), name)
    return wire.sparse(shape, np.sort(rng.choice(size, k, replace=False)), values[:k], name, backend=backend)


@pytest.mark.slow
@settings(max_examples=100)
@example(5, 3, bytes(6))  # one byte of slack
@given(st.integers(0, 10**6), st.integers(0, 6), st.binary(max_size=40))
def test_the_parts_and_the_fixed_rest_are_the_frame(seed: int, count: int, tag: bytes) -> None:
    """Header 16, end mark 1, checksum 4, the optional fields; everything else belongs to a tensor."""
    rng = np.random.default_rng(seed)
    tensors = [some(rng) for _ in range(count)]
    frame = wire.encode(tensors, tlvs=[(wire.USER_TAG, tag)])
    sizes = wire.tensor_bytes(frame)
    assert len(sizes) == count
    padding = len(frame) - sum(sizes) - 16 - 1 - 4 - (2 + len(tag))
    # The field takes two bytes at least: one byte of slack is filled by nine.
    assert padding in {0, 2, 3, 4, 5, 6, 7, 9}
    # Each tensor costs what it costs in a frame of its own, whatever stands beside it (padding apart).
    for tensor, size in zip(tensors, sizes, strict=True):
        (alone,) = wire.tensor_bytes(wire.encode([tensor]))
        assert alone == size


def test_a_frame_by_hand() -> None:
    one = wire.sparse((1000,), np.array([3, 14, 159]), np.float32([1, -2, 3]), "weights", index="raw")
    two = wire.dense(np.zeros((10, 10), np.float32))
    frame = wire.encode([one, two])
    # Name 8, dtype and dimensions 4, kind and count 2, two codecs 4, back-end 1, lengths 2; then 3 * (4 + 4).
    # No name 1, dtype and dimensions 4, kind and count 2, codecs 4, back-end 1, lengths 3; then 400.
    assert wire.tensor_bytes(frame) == (21 + 24, 15 + 400)
    assert wire.tensor_bytes(memoryview(frame)) == wire.tensor_bytes(bytearray(frame))
    assert wire.tensor_bytes(wire.encode([])) == ()


def test_damaged_frames_are_refused() -> None:
    frame = wire.encode([wire.dense(np.arange(10, dtype=np.float32)), wire.dense(np.ones(3, np.float32))])
    for bad in (b"", frame[:10], frame[:-1], frame + b"\0", b"X" + frame[1:]):
        with pytest.raises(wire.WireError):
            wire.tensor_bytes(bad)
    with pytest.raises(wire.Corrupt, match="account"):
        wire.tensor_bytes(seal(frame[:-8]))
    head = int.from_bytes(frame[12:16], "little")
    longer = frame[:12] + (head + 1).to_bytes(4, "little") + frame[16:head] + b"\0" + frame[head:-4]
    with pytest.raises(wire.Corrupt, match="account"):
        wire.tensor_bytes(seal(longer))
    many = bytearray(frame[:-4])
    many[8:12] = (1 << 31).to_bytes(4, "little")
    with pytest.raises(wire.WireError):
        wire.tensor_bytes(seal(bytes(many)))
