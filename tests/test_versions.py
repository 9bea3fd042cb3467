"""Versioned replicas without Flower: both ends of the difference-coded broadcast."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.codecs import QSGD, Identity, TopK
from fedcomp.errors import NonFiniteUpdate, StateError
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.versions import Broadcast, advance, digest

LAYOUT = Layout.flat(3000)


def models(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return list(np.cumsum(rng.normal(size=(count, 3000)), axis=0).astype(np.float32))


@pytest.mark.parametrize("codec", [TopK(density=0.05), QSGD(levels=64, bucket=128), Identity()], ids=repr)
def test_replicas_equal_the_reference_bit_for_bit(codec) -> None:
    """Whoever joins at any version, with any gap the history covers, holds the server's bytes."""
    server = Broadcast(codec)
    replicas: dict[int, tuple[np.ndarray, int]] = {}
    for t, target in enumerate(models(8)):
        server.publish(target, {}, LAYOUT, Key(0, "downlink", t))
        replicas[t] = (server.reference.copy(), server.version)
        for joined, (vector, version) in list(replicas.items()):
            if t % (joined + 1):
                continue  # this replica is away
            steps = server.steps_from(version)
            if steps is None:
                vector, version = server.reference.copy(), server.version
            else:
                vector, _, version = advance(vector, {}, version, steps, codec, LAYOUT)
            assert version == server.version
            assert digest(vector, {}) == server.digest
            replicas[joined] = (vector, version)


def test_error_feedback_contracts_to_a_still_target() -> None:
    """The reference reaches a model that no longer changes geometrically: (1 - density) per version at worst."""
    server = Broadcast(TopK(density=0.1))
    server.publish(np.zeros(3000, np.float32), {}, LAYOUT, Key(0))
    target = models(1)[0].copy()
    errors = []
    for t in range(60):
        target[0] = t  # a new version each time
        server.publish(target.copy(), {}, LAYOUT, Key(0, "downlink", t))
        errors.append(float(np.linalg.norm(target[1:] - server.reference[1:])))
    assert errors[-1] < 1e-5 * errors[0]


def test_an_unchanged_model_is_not_a_new_version() -> None:
    server = Broadcast(TopK(density=0.1))
    target = models(1)[0]
    assert [server.publish(target.copy(), {}, LAYOUT, Key(0, "d", t)) for t in range(3)] == [1, 1, 1]
    moved = target + 1
    assert server.publish(moved, {}, LAYOUT, Key(0)) == 2
    with pytest.raises(ValueError, match="read-only"):
        moved += 1


def test_a_model_that_differs_in_its_last_value_alone_is_a_new_version() -> None:
    layout = Layout.flat(70_000)
    server, target = Broadcast(TopK(density=0.1)), np.zeros(70_000, np.float32)
    assert server.publish(target.copy(), {}, layout, Key(0)) == 1
    target[-1] = 1.0
    assert [server.publish(target.copy(), {}, layout, Key(0)) for _ in range(2)] == [2, 2]


def test_gaps_and_repeats() -> None:
    server = Broadcast(TopK(density=0.01))
    held = models(1)[0]
    for t, target in enumerate(models(4)):
        server.publish(target, {}, LAYOUT, Key(0, "d", t))
    steps = server.steps_from(1)
    assert steps is not None
    assert [s.version for s in steps] == [2, 3, 4]
    vector, _, version = advance(held, {}, 1, steps[:2], server.codec, LAYOUT)
    again, _, _ = advance(vector, {}, version, steps, server.codec, LAYOUT)
    assert digest(again, {}) == server.digest, "steps already applied are skipped"
    with pytest.raises(StateError, match="full model"):
        advance(held, {}, 1, steps[1:], server.codec, LAYOUT)
    assert np.array_equal(held, models(1)[0]), "a failed advance leaves the replica as it was"


def test_a_digest_names_every_bit_its_place_and_the_buffers() -> None:
    vector = models(1)[0]
    exact = {"a": np.arange(6), "b": np.zeros(3, np.uint8)}
    found = digest(vector, exact)
    assert found == digest(vector.copy(), dict(reversed(exact.items())))
    others = [vector[::-1], np.roll(vector, 1024), np.concatenate([vector[1000:2000], vector[:1000], vector[2000:]])]
    for place in (0, 1500, 2999):
        for bit in (0, 22, 31):
            other = vector.copy()
            other.view(np.uint32)[place] ^= np.uint32(1) << np.uint32(bit)
            others.append(other)
    # Two zeros with a sign in one column of any table: what a sum of products loses.
    others.append(np.where(np.arange(3000) % 1024 == 5, -vector, vector))
    named = [found, *(digest(other, exact) for other in others)]
    named += [digest(vector, {**exact, "b": np.ones(3, np.uint8)}), digest(vector, {"a": exact["a"]})]
    assert len(set(named)) == len(named)
    assert {len(each) for each in named} == {16}


def test_history_never_outgrows_the_model() -> None:
    server = Broadcast(TopK(density=0.2))
    for t, target in enumerate(models(30)):
        server.publish(target, {}, LAYOUT, Key(0, "d", t))
    assert sum(s.nbytes for s in server._steps) <= 4 * 3000
    assert server.steps_from(1) is None
    assert server.steps_from(0) is None


def test_a_non_finite_model_is_refused() -> None:
    server = Broadcast(TopK(density=0.2))
    bad = models(1)[0].copy()
    bad[7] = np.nan
    with pytest.raises(NonFiniteUpdate):
        server.publish(bad, {}, LAYOUT, Key(0))
    assert server.version == 0


def test_state_dict_round_trip() -> None:
    """A restored server goes on exactly as the original would have."""
    a, b = Broadcast(TopK(density=0.01)), Broadcast(TopK(density=0.01))
    targets = models(6)
    for t in range(4):
        a.publish(targets[t], {}, LAYOUT, Key(0, "d", t))
    b.load_state_dict(a.state_dict())
    for server in (a, b):
        for t in (4, 5):
            server.publish(targets[t], {}, LAYOUT, Key(0, "d", t))
    assert (a.version, a.digest) == (b.version, b.digest)
    assert a.steps_from(3) == b.steps_from(3)
