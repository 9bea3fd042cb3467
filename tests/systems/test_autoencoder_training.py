"""Training of the autoencoder on the server (test list B7 of the transform compressors, where it is about learning)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from fedcomp.codecs.autoencoder import ConvDecoder, ConvEncoder
from fedcomp.codecs.lgc import NodeEstimate
from fedcomp.flower import store
from fedcomp.rng import Key
from fedcomp.systems.autoencoder import AutoencoderTraining, drawn, half_of

pytest.importorskip("torch")

SIZE = 256
NODES = 4


class Trained:
    """An autoencoder, with how it is trained."""

    def __init__(self, seed: int = 0, **settings) -> None:
        self.training, self.seed, self.halves = AutoencoderTraining(**settings), seed, drawn(seed)

    def learn_ring(self, found: Sequence[np.ndarray], weights: Sequence[float]) -> float | None:
        self.halves, losses = self.training.learn_ring(self.halves, found, weights)
        return losses[0] if losses else None

    def learn_nodes(
        self, found: Mapping[int, np.ndarray], sides: Mapping[int, np.ndarray], number: int
    ) -> tuple[float, ...]:
        key = Key(self.seed, "autoencoder/common", number)
        self.halves, losses = self.training.learn_nodes(self.halves, found, sides, key)
        return losses

    @property
    def encoder(self) -> ConvEncoder:
        return half_of(ConvEncoder, self.halves["encoder"])

    def decoder(self, node: int | None) -> ConvDecoder:
        return half_of(ConvDecoder, self.halves.get(str(node), self.halves["decoder"]))

    @property
    def known(self) -> list[int]:
        return [int(name) for name in self.halves if name.isdigit()]

    def again(self) -> Trained:
        """Return what is made of the halves after they were stored."""
        other = Trained(self.seed, **self.training.get_config())
        other.halves = store.loads(store.dumps(self.halves, "halves"), "halves")
        return other


def noise(size: int, *place: int) -> np.ndarray:
    return Key(7, "noise/" + "/".join(map(str, place))).generator().normal(size=size).astype(np.float32)


BASIS = np.cos(np.pi / SIZE * np.outer(np.arange(SIZE) + 0.5, [3, 5, 8, 13, 21, 34])).astype(np.float32)
"""What all vectors have in common lies in six dimensions, and is smooth: convolutions know no positions."""


def vectors(step: int, nodes: int = NODES) -> dict[int, np.ndarray]:
    """Return one vector a node: a common part of mean square 1, and a tenth of it of noise."""
    common = BASIS @ noise(6, 1, step)
    common *= np.sqrt(SIZE) / np.linalg.norm(common)
    return {node: (common + np.float32(0.1) * noise(SIZE, 2, step, node)).astype(np.float32) for node in range(nodes)}


def side_of(vector: np.ndarray, count: int = 8) -> np.ndarray:
    side = np.zeros_like(vector)
    kept = np.argsort(np.abs(vector))[-count:]
    side[kept] = vector[kept]
    return side


def learn(training: Trained, found: dict[int, np.ndarray], step: int) -> tuple[float, ...]:
    return training.learn_nodes(found, {n: side_of(v) for n, v in found.items()}, step)


def ring_error(training: Trained, steps: range) -> float:
    """Return squared error over energy of the decoded mean, over vectors that were not trained with."""
    missed = energy = 0.0
    for step in steps:
        found = vectors(step)
        mean = sum(found.values()) / len(found)
        latents = sum(training.encoder.encode(v) for v in found.values()) / np.float32(len(found))
        missed += float(np.square(training.decoder(None).decode(latents, SIZE) - mean).sum())
        energy += float(np.square(mean).sum())
    return missed / energy


@pytest.fixture(scope="module")
def ring() -> Trained:
    training = Trained(seed=1)
    for step in range(400):
        training.learn_ring(list(vectors(step).values()), [1.0] * NODES)
    return training


@pytest.fixture(scope="module")
def nodes() -> tuple[Trained, list[tuple[float, ...]]]:
    training, losses = Trained(seed=1), []
    for step in range(400):
        lost = learn(training, vectors(step), step)
        assert lost
        losses.append(lost)
    return training, losses


@pytest.mark.long
def test_a_ring_learns_vectors_that_resemble_each_other(ring: Trained) -> None:
    """Held-out error below .1; what the decoder makes of the mean of latents is the mean."""
    assert ring_error(ring, range(1000, 1020)) < 0.1
    # A mean of vectors is not what one of them decodes to: the latents were averaged.
    assert ring_error(Trained(seed=1), range(1000, 1020)) > 0.9


@pytest.mark.long
def test_nodes_learn_their_vectors_from_one_node_s_latents(nodes) -> None:
    """Held-out error below .1 for every pair of a common node and another one."""
    training, losses = nodes
    missed = energy = 0.0
    for step in range(1000, 1010):
        found = vectors(step)
        for common in range(NODES):
            latents = training.encoder.encode(found[common])
            for node, vector in found.items():
                decoded = training.decoder(node).decode(latents, SIZE, side_of(vector))
                missed += float(np.square(decoded - vector).sum())
                energy += float(np.square(vector).sum())
    assert missed / energy < 0.1
    assert losses[-1][0] < 0.2 < losses[0][0]


@pytest.mark.long
def test_an_innovation_lowers_the_error_where_it_is(nodes) -> None:
    """At its own positions, by the decoder alone: what is known there replaces nothing yet."""
    training, _ = nodes
    with_side = without = 0.0
    for step in range(1000, 1020):
        found = vectors(step)
        latents = training.encoder.encode(found[0])
        vector = found[1]
        side = side_of(vector)
        where = side != 0.0
        decoder = training.decoder(1)
        with_side += float(np.square(decoder.decode(latents, SIZE, side) - vector)[where].sum())
        without += float(np.square(decoder.decode(latents, SIZE) - vector)[where].sum())
    assert with_side < 0.9 * without


@pytest.mark.long
def test_latents_of_different_nodes_converge(nodes) -> None:
    """Held-out latents are closer than after as many steps without the similarity loss, which falls from its peak."""

    def apart(similarity: float) -> float:
        trained = Trained(seed=1, similarity=similarity)
        for step in range(100):
            learn(trained, vectors(step), step)
        distance = energy = 0.0
        for step in range(1000, 1010):
            coded = np.stack([trained.encoder.encode(v) for v in vectors(step).values()])
            distance += float(np.square(coded - coded.mean(0)).sum())
            energy += float(np.square(coded).sum())
        return distance / energy

    assert apart(0.5) < 0.8 * apart(0.0)
    # It rises first, from the latents of random weights, which hardly depend on the values.
    blocks = np.reshape([distance for _, distance in nodes[1]], (-1, 20)).mean(1)
    assert blocks[-1] < 0.2 * blocks.max()


@pytest.mark.slow
def test_the_order_of_nodes_is_no_part_of_a_ring() -> None:
    found, weights = list(vectors(0).values()), [1.0, 2.0, 3.0, 4.0]
    one, other = Trained(), Trained()
    one.learn_ring(found, weights)
    other.learn_ring(found[::-1], weights[::-1])
    for ours, theirs in zip(one.encoder.weights, other.encoder.weights, strict=True):
        # Adam's first step is ±lr, whose sign a rounding can turn where a gradient is nothing.
        assert np.mean(np.abs(ours - theirs) > 1e-6) < 0.01
    assert one.learn_ring(found, weights) == pytest.approx(other.learn_ring(found[::-1], weights[::-1]), rel=1e-3)


def test_weights_of_clients_count() -> None:
    found = list(vectors(0).values())
    one, other, third = Trained(), Trained(), Trained()
    assert one.learn_ring(found, [1.0, 1.0, 1.0, 1.0]) == other.learn_ring(found, [10.0, 10.0, 10.0, 10.0])
    assert third.learn_ring(found, [1.0, 0.0, 0.0, 0.0]) != one.learn_ring(found, [1.0, 1.0, 1.0, 1.0])


def test_one_node_resembles_itself() -> None:
    training = Trained()
    found = vectors(0, nodes=1)
    error, distance = training.learn_nodes(found, {0: side_of(found[0])}, 1)
    assert distance == 0.0
    assert error > 0.1


@pytest.mark.slow
def test_the_first_loss_is_the_one_that_numpy_computes() -> None:
    """Both losses before the first step, by definition: over ordered pairs, and from the drawn node's latents."""
    found = vectors(0, nodes=3)
    sides = {n: side_of(v) for n, v in found.items()}
    training = Trained(seed=5)
    encoder, decoder = training.encoder, training.decoder(None)
    coded = [encoder.encode(v) for v in found.values()]
    pairs = [np.square(a - b).mean() for a in coded for b in coded if a is not b]
    common = coded[int(Key(5, "autoencoder/common", 9).uniform(1)[0] * 3)]
    errors = [np.square(decoder.decode(common, SIZE, sides[n]) - v).mean() for n, v in found.items()]
    error, distance = training.learn_nodes(found, sides, 9)
    assert distance == pytest.approx(float(np.mean(pairs)), rel=1e-4)
    assert error == pytest.approx(float(np.mean(errors)), rel=1e-4)
    ring = Trained(seed=5)
    mean = sum(found.values()) / 3
    decoded = decoder.decode(sum(coded) / np.float32(3), SIZE)
    wanted = float(np.square(decoded - mean).mean())
    assert ring.learn_ring(list(found.values()), [1.0] * 3) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_step_that_is_not_finite_changes_nothing(optimizer: str) -> None:
    training = Trained(optimizer=optimizer)
    found = list(vectors(0).values())
    training.learn_ring(found, [1.0] * NODES)
    other, before = training.again(), training.halves
    bad = [*found[:-1], np.full(SIZE, np.float32(3e38))]
    assert training.learn_ring(bad, [1.0] * NODES) is None
    assert training.halves is before
    assert training.learn_ring(found, [1.0] * NODES) == other.learn_ring(found, [1.0] * NODES)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_state_that_was_saved_goes_on_bit_for_bit(optimizer: str) -> None:
    """Weights, moments, and the order in which decoders are given up."""

    def step(training: Trained, number: int, nodes: tuple[int, ...]) -> None:
        learn(training, {n: v for n, v in vectors(number, nodes=6).items() if n in nodes}, number)

    whole = Trained(optimizer=optimizer, decoders=3, passes=2)
    step(whole, 1, (0, 1))
    step(whole, 2, (1, 2))
    other = whole.again()
    for training in (whole, other):
        # 0 was used longest ago.
        step(training, 3, (3, 1))
    assert whole.known == other.known == [2, 1, 3]
    assert whole.encoder.id == other.encoder.id
    for node in (0, 1, 2, 3, None):
        assert whole.decoder(node).id == other.decoder(node).id
    assert whole.decoder(0).id == whole.decoder(None).id != whole.decoder(1).id


def test_a_round_that_trains_nothing_gives_up_no_decoder() -> None:
    """Nodes whose values are not finite take no decoder from those that have one."""
    training = Trained(decoders=2)
    learn(training, vectors(1, nodes=2), 1)
    before = training.halves
    assert learn(training, {7: np.full(SIZE, np.float32(np.nan)), 0: vectors(2)[0]}, 2) == ()
    assert training.halves is before


@pytest.mark.slow
def test_nodes_of_one_round_do_not_give_up_each_other_s_decoders() -> None:
    """More nodes than decoders: those that have one train it in every round, and the rest use the shared one."""
    training = Trained(decoders=3)
    for step in range(3):
        before = {node: training.decoder(node).id for node in range(5)}
        learn(training, vectors(step, nodes=5), step)
        assert training.known == [0, 1, 2]
        assert all(training.decoder(node).id != before[node] for node in range(5))
        assert training.decoder(3).id == training.decoder(4).id == training.decoder(None).id
    trained = training.decoder(1)
    # 0 and 2 were used longest ago; 0 before 2.
    learn(training, {node: vectors(3, nodes=6)[node] for node in (5, 1)}, 3)
    assert training.known == [2, 5, 1]
    assert training.halves["1"]["step"] == 4.0
    assert training.decoder(1).id != trained.id
    none = Trained(decoders=0)
    assert learn(none, vectors(0), 0)
    assert none.known == []


def test_torch_has_as_many_threads_as_before() -> None:
    """And the same bits whatever their number is."""
    import torch

    before, ids = torch.get_num_threads(), set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            training = Trained()
            training.learn_ring(list(vectors(0).values()), [1.0] * NODES)
            ids.add(training.encoder.id)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(ids) == 1


def test_a_node_s_values_are_scaled_back() -> None:
    """Scale equivariance: times 1e-4, decoded values are 1e-4 of what they were; a power of two to the last bit."""
    decoder = ConvDecoder.draw(Key(1))
    latents, side = noise(64, 5), side_of(noise(SIZE, 6))
    one = NodeEstimate(latents, decoder, 1.0).of(side)
    small = NodeEstimate(latents, decoder, 2.0**-13).of(side * np.float32(2.0**-13))
    np.testing.assert_array_equal(small * np.float32(2.0**13), one)
