"""The autoencoder of learned gradient compression: numpy's forward pass against torch's, weights on the wire."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from fedcomp import wire
from fedcomp.codecs.autoencoder import (
    IDENTITY,
    ConvDecoder,
    ConvEncoder,
    IdentityDecoder,
    IdentityEncoder,
    latents,
)
from fedcomp.errors import ConfigError
from fedcomp.rng import Key

KEY = Key(3, "autoencoder")
SIZES = [1, 15, 16, 17, 1000]


def values(size: int, seed: int = 0) -> np.ndarray:
    return Key(seed, "values").generator().normal(size=size).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_the_forward_pass_is_torch_s(size: int) -> None:
    """Against torch's own layers, built here from the description: lengths, padding, slopes, where the side goes."""
    torch = pytest.importorskip("torch")
    encoder, decoder = ConvEncoder.draw(KEY), ConvDecoder.draw(KEY)
    nn = torch.nn
    channels = [1, 64, 128, 256, 64]
    layers: list = []
    for before, after in itertools.pairwise(channels):
        layers += [nn.Conv1d(before, after, 3, stride=2, padding=1), nn.LeakyReLU(0.01)]
    ours = nn.Sequential(*layers, nn.Conv1d(64, 4, 1))
    channels = [4, 32, 64, 128, 32]
    layers = []
    for before, after in itertools.pairwise(channels):
        layers += [nn.ConvTranspose1d(before, after, 3, stride=2, padding=1, output_padding=1), nn.LeakyReLU(0.01)]
    back, last = nn.Sequential(*layers), nn.Conv1d(33, 1, 1)
    with torch.no_grad():
        for module, weights in ((ours, encoder.weights), (nn.ModuleList([back, last]), decoder.weights)):
            for parameter, array in zip(module.parameters(), weights, strict=True):
                parameter.copy_(torch.from_numpy(array))
        padded = np.zeros(16 * math.ceil(size / 16), np.float32)
        padded[:size] = values(size)
        coded = ours(torch.from_numpy(padded)[None, None])
        assert coded.shape == (1, 4, len(padded) // 16)
        found = encoder.encode(values(size))
        np.testing.assert_allclose(found, coded.numpy().reshape(-1), atol=1e-6)
        side = np.zeros_like(padded)
        side[:size] = values(size, 1)
        both = torch.cat([back(coded), torch.from_numpy(side)[None, None]], 1)
        wanted = last(both).numpy()[0, 0, :size]
    np.testing.assert_allclose(decoder.decode(found, size, side[:size]), wanted, atol=1e-6)
    assert not np.allclose(decoder.decode(found, size), wanted)


def test_sizes() -> None:
    """172 996 numbers for the encoder, 43 682 for the decoder; a quarter of the values, rounded up to positions."""
    encoder, decoder = ConvEncoder.draw(KEY), ConvDecoder.draw(KEY)
    assert (encoder.parameters, decoder.parameters) == (172_996, 43_682)
    assert [4 * count for count in (172_996, 43_682)] < [len(encoder.frame()), len(decoder.frame())]
    assert (len(encoder.frame()), len(decoder.frame())) == (692_172, 174_908)
    assert [latents(size) for size in (0, 1, 16, 17, 1024)] == [0, 4, 4, 8, 256]
    for size in SIZES:
        found = encoder.encode(values(size))
        assert found.shape == (latents(size),) == (encoder.latents(size),)
        assert found.dtype == decoder.decode(found, size).dtype == np.float32
    assert encoder.encode(values(0)).shape == decoder.decode(values(0), 0).shape == (0,)


def test_weights_are_drawn_as_torch_draws_them() -> None:
    """Uniform in ±1/√(fan-in), of which a transposed convolution has outputs times kernel; all streams differ."""
    for half, inputs in (
        (ConvEncoder.draw(KEY), (3, 192, 384, 768, 64)),
        (ConvDecoder.draw(KEY), (96, 192, 384, 96, 33)),
    ):
        for index, array in enumerate(half.weights):
            bound = 1.0 / math.sqrt(inputs[index // 2])
            assert np.abs(array).max() <= bound
            if array.size > 1000:
                assert np.abs(array).max() > 0.99 * bound
                assert abs(float(array.mean())) < 0.05 * bound
                assert float(array.std()) == pytest.approx(bound / math.sqrt(3.0), rel=0.05)
    assert ConvEncoder.draw(KEY).id == ConvEncoder.draw(KEY).id != ConvEncoder.draw(Key(4, "autoencoder")).id


def test_weights_travel_as_frames_under_a_golden_digest() -> None:
    """What an id is made of must not change within a run, nor between versions that talk to each other."""
    for kind, number, digest in (
        (ConvEncoder, 2777261777692339948, "aac2e45268205222"),
        (ConvDecoder, 4941729758077273687, "cb99c0c37c71495e"),
    ):
        half = kind.draw(Key(0, "golden"))
        read = kind.read(half.frame())
        for ours, theirs in zip(half.weights, read.weights, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert read.id == half.id > IDENTITY
        assert (half.id, hashlib.sha256(half.frame()).hexdigest()[:16]) == (number, digest)


def test_frames_of_anything_else_are_refused() -> None:
    encoder, decoder = ConvEncoder.draw(KEY), ConvDecoder.draw(KEY)
    with pytest.raises(wire.WireError):
        ConvEncoder.read(decoder.frame())
    with pytest.raises(wire.WireError):
        ConvDecoder.read(encoder.frame())
    frame = decoder.frame()
    for damaged in (b"", frame[:-1], frame[:1000], frame + b"\0", frame[:500] + b"\xff" + frame[501:]):
        with pytest.raises(wire.WireError):
            ConvDecoder.read(damaged)
    wrong = [np.full(array.size, np.nan if i == 3 else 1.0, np.float32) for i, array in enumerate(decoder.weights)]
    with pytest.raises(wire.WireError):
        ConvDecoder.read(wire.encode([wire.dense(array) for array in wrong]))
    with pytest.raises(ConfigError, match="shapes"):
        ConvEncoder(decoder.weights)


def test_the_identity_leaves_values_as_they_are() -> None:
    encoder, decoder = IdentityEncoder(), IdentityDecoder()
    found = values(21)
    assert encoder.id == decoder.id == IDENTITY
    assert encoder.frame() == decoder.frame() == b""
    assert encoder.latents(21) == 21
    np.testing.assert_array_equal(decoder.decode(encoder.encode(found), 21), found)
    np.testing.assert_array_equal(decoder.decode(found, 21, values(21, 1)), values(21, 1))


@pytest.mark.slow
def test_the_same_numbers_with_any_number_of_threads() -> None:
    code = """
import hashlib, numpy as np
from fedcomp.codecs.autoencoder import ConvDecoder, ConvEncoder
from fedcomp.rng import Key
key = Key(3, "autoencoder")
signal = Key(0, "values").generator().normal(size=5000).astype(np.float32)
found = ConvEncoder.draw(key).encode(signal)
print(hashlib.sha256(found.tobytes() + ConvDecoder.draw(key).decode(found, 5000, signal).tobytes()).hexdigest())
import sys
assert "torch" not in sys.modules
"""
    seen = set()
    for threads in ("1", "2"):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        seen.add(done.stdout)
    assert len(seen) == 1
