"""Where noise comes from: nobody else's bytes, unless that was asked for by its name."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.privacy.entropy import Entropy, SeededEntropy, SystemEntropy, make_entropy
from fedcomp.privacy.noise import discrete_gaussian
from fedcomp.rng import Key


def seeded(layer: int = 0) -> SeededEntropy:
    return SeededEntropy(Key(1, "test/entropy", layer=layer), insecure_deterministic=True)


def test_a_seed_must_be_asked_for_by_its_full_name() -> None:
    for flag in (False, 1, "yes", None):
        with pytest.raises(ConfigError, match="insecure_deterministic"):
            SeededEntropy(Key(1), insecure_deterministic=flag)
    with pytest.raises(ConfigError, match="key"):
        make_entropy(insecure_deterministic=True)
    assert isinstance(make_entropy(Key(1)), SystemEntropy)
    assert isinstance(make_entropy(Key(1), insecure_deterministic=True), SeededEntropy)


def test_what_is_secure_says_so() -> None:
    assert SystemEntropy().secure
    assert not seeded().secure
    assert "INSECURE" in seeded().description


def test_a_key_names_its_stream() -> None:
    assert seeded().bytes(100) == seeded().bytes(100)
    assert seeded().bytes(100) != seeded(1).bytes(100)
    assert SystemEntropy().bytes(32) != SystemEntropy().bytes(32)


@pytest.mark.parametrize("make", [seeded, SystemEntropy])
def test_a_stream_goes_on_and_does_not_repeat(make) -> None:
    entropy = make()
    words = np.concatenate([entropy.words(n) for n in (1, 1000, 7)])
    assert np.unique(words).size == 1008
    assert entropy.bytes(0) == b""


def test_bytes_do_not_depend_on_how_they_are_asked_for() -> None:
    one, other = seeded(), seeded()
    assert b"".join(one.bytes(n) for n in (1, 63, 64, 65, 807)) == other.bytes(1000)


def test_a_new_key_is_no_other_streams_key() -> None:
    entropy = seeded()
    entropy._left = 0
    assert entropy.bytes(64) not in {seeded(layer).bytes(64) for layer in range(4)}


def test_threads_never_get_the_same_bytes() -> None:
    entropy = SystemEntropy()

    def take(_: int) -> list[bytes]:
        return [entropy.bytes(16) for _ in range(500)]

    with ThreadPoolExecutor(4) as pool:
        taken = [part for parts in pool.map(take, range(4)) for part in parts]
    assert len(set(taken)) == 2000


def test_a_new_key_is_drawn_in_time() -> None:
    for entropy, again in ((seeded(), seeded()), (SystemEntropy(), None)):
        first = entropy.bytes(64)
        entropy._left = 32
        rest = entropy.bytes(96)
        assert len(rest) == 96
        if again is not None:
            assert again.bytes(96) == first + rest[:32]
            # A run without the new key would go on with these.
            assert again.bytes(64) != rest[32:]


def test_uniforms_are_in_the_unit_interval_with_all_bits() -> None:
    values = seeded().uniform(100_000)
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert abs(values.mean() - 0.5) < 0.005
    assert np.mean(np.mod(values * 2.0**52, 1.0) != 0) == pytest.approx(0.5, abs=0.01)


def in_a_fork(entropy: Entropy) -> tuple[bytes, bytes]:
    """Return what the parent and its fork draw next from the same object."""
    entropy.bytes(5)
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(into, discrete_gaussian(1000.0, 8, entropy).tobytes())
        os._exit(0)
    os.close(into)
    theirs = os.read(out, 1000)
    os.close(out)
    assert os.waitpid(child, 0)[1] == 0
    return discrete_gaussian(1000.0, 8, entropy).tobytes(), theirs


def test_audit_F_a_fork_draws_other_noise() -> None:
    ours, theirs = in_a_fork(SystemEntropy())
    assert len(ours) == len(theirs) == 64
    assert ours != theirs


def test_without_the_check_a_fork_would_draw_the_same() -> None:
    # What the test above guards against: a stream that does not notice.
    ours, theirs = in_a_fork(seeded())
    assert ours == theirs
