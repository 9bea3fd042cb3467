"""Codecs in other coordinates: one way back per round, sums that agree, and transforms against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from codec_examples import LAYOUTS, update
from flwr.serverapp.strategy import FedAvg, FedMedian, Krum
from toy import client_app, model, stack

from fedcomp.clients.compressed import compression
from fedcomp.codecs import (
    DCT,
    DFT,
    QSGD,
    Codec,
    Domain,
    FixedPoint,
    Orthonormal,
    RandomK,
    Rotation,
    ScaleCom,
    SignSGD,
    TopK,
    get_codec,
)
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.orthonormal import SHORTEST, blocks, rotate
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.flower.grid import InProcessGrid
from fedcomp.layout import Layout, SmallDense, Update
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed

ONE = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}
TRANSFORMS = [Rotation(seed=5), Rotation(scope="layer"), DCT(64), DCT(16, scope="global"), DCT(256)]
TRANSFORMS += [DCT(16, order="HWFD"), DFT(), DFT(scope="global"), DFT(order="HWDF")]


@pytest.fixture
def ways_back(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for every transform that is undone."""
    found: list[bool] = []
    apply = Orthonormal.apply

    def counted(self: Orthonormal, vector: np.ndarray, layout: Layout, *, inverse: bool = False) -> None:
        if inverse:
            found.append(True)
        apply(self, vector, layout, inverse=inverse)

    monkeypatch.setattr(Orthonormal, "apply", counted)
    return found


def _inverted(transform: Orthonormal, vector: np.ndarray, layout: Layout) -> np.ndarray:
    """The inverse in float64, by the matrix of every block: of the code under test nothing but its draws."""
    parts = [t.slice for t in layout.compressed] if transform.scope == "layer" else [slice(0, layout.compressed_size)]
    out = vector.astype(np.float64)
    for layer, part in enumerate(parts):
        values, start = out[part], 0
        if isinstance(transform, Rotation):
            words = Key(transform.seed, "rotation", layer=layer).bits(-(-values.size // 64))
            for block in blocks(values.size):
                sign = [1.0 - 2.0 * (int(words[i // 64]) >> i % 64 & 1) for i in range(block.start, block.stop)]
                values[block] = np.array(sign) * (_hadamard(block.stop - block.start) @ values[block])
            continue
        if isinstance(transform, DFT):
            values[...] = _waves(values.size).T @ values
        while isinstance(transform, DCT) and start < values.size:
            length = min(transform.chunk, 1 << (values.size - start).bit_length() - 1)
            values[start : start + length] = _cosines(length).T @ values[start : start + length]
            start += length
        _from_order(values, layout.compressed[layer].shape if transform.scope == "layer" else (), transform.order)
    return out


def _from_order(values: np.ndarray, shape: tuple[int, ...], order: str) -> None:
    """Put elements that were read in another order back, one by one."""
    if len(shape) != 4 or order == "FDHW":
        return
    sizes = dict(zip("FDHW", shape, strict=True))
    places = np.ndindex(*(sizes[letter] for letter in order))
    found = {tuple(place[order.index(letter)] for letter in "FDHW"): values[i] for i, place in enumerate(places)}
    values[...] = [found[place] for place in np.ndindex(*shape)]


def _waves(n: int) -> np.ndarray:
    """Every row a cosine or a sine of unit length, frequencies ascending, the cosine first."""
    t = 2 * np.pi * np.arange(n) / n
    rows = [np.ones(n)]
    for frequency in range(1, n // 2 + 1):
        rows += [np.cos(frequency * t), -np.sin(frequency * t)]
    rows = rows[:n]
    return np.array([row / np.linalg.norm(row) for row in rows])


def _hadamard(n: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / np.sqrt(2.0)
    return matrix


def _cosines(n: int) -> np.ndarray:
    k, i = np.mgrid[:n, :n]
    matrix = np.sqrt(2.0 / n) * np.cos(np.pi * (2 * i + 1) * k / (2 * n))
    matrix[0] /= np.sqrt(2.0)
    return matrix


def test_blocks_are_powers_of_two_largest_first() -> None:
    for size in (0, 1, 63, 64, 65, 127, 128, 1000, 65_536, 25_000_000):
        lengths = [b.stop - b.start for b in blocks(size)]
        assert all(n & (n - 1) == 0 and n >= SHORTEST for n in lengths)
        assert lengths == sorted(set(lengths), reverse=True)
        assert 0 <= size - sum(lengths) < SHORTEST


@pytest.mark.parametrize("size", [1, 63, 64, 1000, 40_001])
def test_a_rotation_keeps_lengths_and_depends_on_every_part_of_its_key(size: int) -> None:
    given = update(Layout.flat(size)).vector
    turned = given.copy()
    rotate(turned, Key(3, "a"))
    assert np.linalg.norm(turned) == pytest.approx(np.linalg.norm(given), rel=1e-6)
    for other in (Key(4, "a"), Key(3, "b"), Key(3, "a", round=1), Key(3, "a", partition=1), Key(3, "a", layer=1)):
        another = given.copy()
        rotate(another, other)
        assert (another == turned).all() == (size < 64)
    rotate(turned, Key(3, "a"), inverse=True)
    np.testing.assert_allclose(turned, given, atol=1e-5 * np.abs(given).max())


@pytest.mark.parametrize("clients", [2, 9])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
@pytest.mark.parametrize("inner", [TopK(0.1), QSGD(3), RandomK(0.2), ErrorFeedback(TopK(0.1))], ids=repr)
def test_a_round_goes_back_once_and_is_the_sum_in_float64(
    inner: Codec, transform: Orthonormal, clients: int, ways_back: list[bool]
) -> None:
    layout = LAYOUTS["model"]
    codec = Domain(transform, inner)
    weights = np.arange(1, clients + 1) / (clients * (clients + 1) / 2)
    oracle, single = np.zeros(layout.size), np.zeros(layout.size)
    added = Update(np.full(layout.size, -0.0, np.float32), layout)
    frames = []
    for i, weight in enumerate(weights):
        frame, _ = codec.encode(update(layout, seed=i), codec.init(layout), Key(1, "codec", partition=i))
        frames.append(frame)
        codec.gather(frame, float(weight), added)
        oracle += weight * inner.decode(frame, layout).astype(np.float64)
    codec.conclude(added)
    assert len(ways_back) == 1
    oracle = _inverted(transform, oracle, layout)
    length = np.linalg.norm(oracle)
    assert np.linalg.norm(added.vector - oracle) <= 1e-5 * length
    for frame, weight in zip(frames, weights, strict=True):
        single += weight * codec.decode(frame, layout)
    assert np.linalg.norm(added.vector - single) <= 1e-5 * length
    assert len(ways_back) == 1 + clients


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_frame_is_that_of_the_transformed_update(transform: Orthonormal, name: str) -> None:
    """What the codec delivers of it is declared with the codec; the way back is the transform's, +0.0 where nothing
    was sent."""
    layout, inner = LAYOUTS[name], TopK(0.1)
    given = update(layout)
    turned = Update(given.vector.copy(), layout)
    transform.apply(turned.vector, layout)
    codec = Domain(transform, inner)
    frame, _ = codec.encode(given, {}, Key(0))
    assert frame == inner.encode(turned, {}, Key(0))[0]
    expected = _inverted(transform, inner.decode(frame, layout), layout)
    decoded = codec.decode(frame, layout)
    assert np.linalg.norm(decoded - expected) <= 1e-6 * np.linalg.norm(expected)
    nothing = codec.encode(Update(np.zeros(layout.size, np.float32), layout), {}, Key(0))[0]
    assert codec.decode(nothing, layout).tobytes() == bytes(4 * layout.size)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_memory_inside_is_memory_outside(transform: Orthonormal) -> None:
    """Spec: equal to 1e-5, because lengths and sums are kept. Both memories hold the same mass, too."""
    layout = LAYOUTS["model"]
    inside = Domain(transform, ErrorFeedback(TopK(0.1)))
    outside = ErrorFeedback(Domain(transform, TopK(0.1)))
    states = [inside.init(layout), outside.init(layout)]
    for number in range(5):
        given = update(layout, seed=number)
        sent = []
        for i, codec in enumerate((inside, outside)):
            frame, states[i] = codec.encode(given, states[i], Key(2, "codec", round=number + 1))
            sent.append(codec.decode(frame, layout))
        assert np.linalg.norm(sent[0] - sent[1]) <= 1e-5 * np.linalg.norm(sent[1])
    held = inside.residual(states[0]).copy()
    transform.apply(held, layout, inverse=True)
    assert np.linalg.norm(held - states[1]["memory"]) <= 1e-5 * np.linalg.norm(held)
    for codec, state in zip((inside, outside), states, strict=True):
        back = codec.rollback(state, frame, layout)
        assert np.linalg.norm(codec.residual(back)) > np.linalg.norm(codec.residual(state))


def _run(strategy: Compressed, nodes: int, rounds: int = 2, app: object = None) -> np.ndarray:
    with InProcessGrid(app or client_app([compression()]), nodes, seed=3) as grid:
        result = strategy.start(grid, model(), num_rounds=rounds, timeout=60)
    assert all(not report.refused for report in strategy.reports.values())
    return stack(result.arrays)


@pytest.mark.parametrize("nodes", [2, 12])
def test_a_server_goes_back_once_per_round(nodes: int, ways_back: list[bool]) -> None:
    """RandomK(1.0) loses nothing: the run is FedAvg's but for rounding. The clients transform, they do not go back."""
    codec = Domain(Rotation(), RandomK(1.0))
    moved = _run(Compressed(FedAvg(**ONE), codec, feedback=False), nodes)
    assert len(ways_back) == 2
    plain = _run(Compressed(FedAvg(**ONE), RandomK(1.0), feedback=False), nodes)
    np.testing.assert_allclose(moved, plain, rtol=1e-5, atol=1e-2)


def test_whole_models_enter_the_sum_in_its_coordinates() -> None:
    """Some clients have no mod and reply with their model: it is transformed before it is added."""
    sparse, exact = (
        _run(Compressed(FedAvg(**ONE), codec, feedback=False), 3, app=client_app())
        for codec in (Domain(DCT(8), TopK(0.01)), TopK(0.01))
    )
    np.testing.assert_allclose(sparse, exact, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("kind", [FedMedian, Krum])
def test_strategies_that_look_at_single_updates_see_updates(kind: type) -> None:
    moved = _run(Compressed(kind(**ONE), Domain(DCT(16), RandomK(1.0)), feedback=False), 5)
    plain = _run(Compressed(kind(**ONE), RandomK(1.0), feedback=False), 5)
    np.testing.assert_allclose(moved, plain, rtol=1e-5, atol=1e-2)


def test_votes_in_a_domain_are_a_step_there() -> None:
    layout = Layout.flat(128)
    codec = Domain(Rotation(), SignSGD(0.5))
    moved = codec.preview(update(layout).vector)
    Rotation().apply(moved, layout)
    np.testing.assert_allclose(np.abs(moved), 0.5, rtol=1e-5)
    with pytest.raises(ConfigError, match="votes"):
        Compressed(FedMedian(), codec)


def test_integers_are_summed_in_a_domain_that_is_inside() -> None:
    """What is added in coded form never meets the codec outside; FixedPoint's own mean goes back."""
    layout = LAYOUTS["model"]
    codec = FixedPoint(Domain(DCT(16), RandomK(0.5)), clip=16.0, levels=1 << 14)
    total, expected = 0, np.zeros(layout.size)
    for i in range(3):
        frame, _ = codec.encode(update(layout, seed=i), {}, Key(0, "codec", partition=i))
        total = total + codec.grid.integers(codec.open(frame, layout))
        expected += codec.decode(frame, layout) / 3.0
    mean = codec.place(total, 3.0, layout, Key(0, "codec"))
    assert np.linalg.norm(mean - expected) <= 1e-5 * np.linalg.norm(expected)
    for inner in (FixedPoint(RandomK(0.5), clip=1.0), ErrorFeedback(FixedPoint(RandomK(0.5), clip=1.0))):
        with pytest.raises(ConfigError, match="inside"):
            Domain(DCT(16), inner)


def test_wrong_configurations_are_refused() -> None:
    for chunk in (0, 1, 3, 48, 2048):
        with pytest.raises(ConfigError, match="chunk"):
            DCT(chunk)
    with pytest.raises(ConfigError, match="scope"):
        Rotation(scope="tensor")
    with pytest.raises(ConfigError, match="exchanges"):
        Domain(DCT(), ScaleCom(0.1))
    with pytest.raises(ConfigError, match="orthonormal 'wavelet'"):
        get_codec({"id": "domain", "transform": {"id": "wavelet"}, "codec": {"id": "identity"}})


@pytest.mark.parametrize("transform", [DCT(2), DCT(64), Rotation()], ids=repr)
def test_what_would_overflow_on_the_way_back_is_refused(transform: Orthonormal) -> None:
    """A spike of 3e38 fits, and so do its cosines; their sums on the way back do not."""
    codec, layout = Domain(transform, TopK(density=1.0)), Layout.flat(64)
    for size in (3e38, 8e37):
        given = np.zeros(64, np.float32)
        given[30] = size
        try:
            frame, _ = codec.encode(Update(given, layout), {}, Key(0))
        except NonFiniteUpdate:
            assert size == 3e38
        else:
            assert np.isfinite(codec.decode(frame, layout)).all()


def test_what_overflows_in_the_domain_is_refused_and_no_state_is_changed() -> None:
    layout = Layout.flat(1 << 10)
    codec = Domain(DCT(1024), ErrorFeedback(TopK(0.1)))
    with pytest.raises(NonFiniteUpdate, match="transformed"):
        codec.encode(Update(np.full(layout.size, 1e38, np.float32), layout), codec.init(layout), Key(0))


def test_nothing_of_the_dense_rest_is_transformed() -> None:
    layout = Layout.of({"w": np.zeros((40, 5)), "b": np.zeros(70)}, SmallDense(min_size=100, share=1.0))
    vector = update(layout).vector
    before = vector.copy()
    for transform in TRANSFORMS:
        transform.apply(vector, layout)
    np.testing.assert_array_equal(vector[200:], before[200:])
    assert (vector[:200] != before[:200]).all()


@pytest.mark.parametrize("transform", [Rotation(), DCT(16)], ids=repr)
def test_a_downlink_in_a_domain_leaves_server_and_clients_with_one_model(transform: Orthonormal) -> None:
    """Both ends go back from the same frame: models are compared by digest, and nobody asks for a whole one again."""
    strategy = Compressed(FedAvg(**ONE), TopK(0.1), Domain(transform, TopK(0.2)))
    _run(strategy, 3, rounds=5)
    assert all(report.compressed == 3 for report in strategy.reports.values())
    assert {peer.version for peer in strategy.roster.peers.values()} == {max(strategy.reports)}
