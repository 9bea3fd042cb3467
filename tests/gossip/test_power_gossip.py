"""PowerGossip: the published iteration against naive code, its invariants, and the edge cases of its edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from gossip_problems import gossip, ring_weights, view_of, views_of

from fedcomp.codecs.matrices import normals, orthonormal
from fedcomp.errors import ConfigError
from fedcomp.gossip.base import State, View, deliver
from fedcomp.gossip.errors import TopologyError
from fedcomp.gossip.packet import HEADER_BYTES, MessageFlag, peek
from fedcomp.gossip.power_gossip import PowerGossip, auto_rate
from fedcomp.gossip.topology import Complete, DirectedRing, RandomDigraph, Ring
from fedcomp.gossip_simulation import simulate
from fedcomp.layout import DENSE, Layout
from fedcomp.rng import Key

PAIR = np.full((2, 2), 0.5)


def layout_of(*shapes: tuple[int, ...]) -> Layout:
    """Lay out tensors of these shapes; those of fewer than two dimensions travel whole."""
    arrays = {f"t{i}": np.zeros(shape, np.float32) for i, shape in enumerate(shapes)}
    return Layout.of(arrays, lambda name, shape, dtype: DENSE if len(shape) < 2 else None)


def draws(n: int, d: int, seed: int = 0) -> list[np.ndarray]:
    return list(Key(seed, "models").generator().standard_normal((n, d)))


def decaying(n: int, m: int, seed: int = 0) -> list[np.ndarray]:
    """Square matrices whose singular values fall by 0.8 each, of random directions."""
    made = []
    for i in range(n):
        normal = Key(seed, "spectrum", i).generator().standard_normal((2, m, m))
        (left, _), (right, _) = np.linalg.qr(normal[0]), np.linalg.qr(normal[1])
        made.append((left * 0.8 ** np.arange(m) @ right.T).reshape(-1))
    return made


Views = Callable[[int, int], View]


def ring_views(n: int) -> Views:
    return views_of(ring_weights(n) if n > 2 else PAIR)


def models(states: Sequence[State]) -> np.ndarray:
    return np.stack([state["x"] for state in states])


def disagreement(states: Sequence[State], at_first: np.ndarray) -> float:
    """Return the distance to the mean over what it was."""
    mean = at_first.mean(axis=0)
    return float(np.linalg.norm(models(states) - mean) / np.linalg.norm(at_first - mean))


def opened(algorithm: PowerGossip, starts: Sequence[np.ndarray], layout: Layout) -> list[State]:
    return [algorithm.init(start, layout) for start in starts]


def test_7_14_what_one_end_adds_the_other_subtracts_bit_for_bit() -> None:
    layout = layout_of((9, 4), (3,))
    for dtype in ("float32", "float64"):
        starts = [np.zeros(layout.size, dtype), draws(1, layout.size)[0].astype(dtype)]
        algorithm = PowerGossip(rank=2, rate=0.7)
        first = opened(algorithm, starts, layout)
        begun = [algorithm.send(state, None, ring_views(2)(i, 0)) for i, state in enumerate(first)]
        inboxes = deliver({i: outbox for i, (_, outbox) in enumerate(begun)})
        # A model of zero shows the change itself, without a rounding of the addition.
        zeroed = [{**state, "x": np.zeros_like(state["x"])} for state, _ in begun]
        ends = [algorithm.receive(state, inboxes[i]) for i, state in enumerate(zeroed)]
        assert np.any(ends[0]["x"] != 0)
        assert np.array_equal(ends[0]["x"], -ends[1]["x"])
        assert ends[0]["x"].dtype == dtype


@pytest.mark.slow
def test_7_14_full_rank_is_dense_gossip() -> None:
    """Of square matrices, and vectors; see below for others."""
    layout = layout_of((6, 6), (3, 3), (2,))
    starts = draws(5, layout.size)
    weights = ring_weights(5)
    algorithm = PowerGossip(rank=9)
    expected = np.stack(starts)

    def compare(k: int, begun: list[State], states: list[State]) -> None:
        nonlocal expected
        expected = weights @ expected
        assert np.abs(models(states) - expected).max() < 1e-12

    gossip(algorithm, opened(algorithm, starts, layout), ring_views(5), 30, watch=compare)


def test_7_14_two_nodes_that_differ_by_rank_one_agree_after_two_rounds() -> None:
    layout = layout_of((30, 20))
    base = draws(1, 600)[0]
    left, right = draws(1, 30, 1)[0], draws(1, 20, 2)[0]
    starts = [base, base + np.outer(left, right).reshape(-1)]
    algorithm = PowerGossip()
    states = gossip(algorithm, opened(algorithm, starts, layout), ring_views(2), 2)
    assert disagreement(states, np.stack(starts)) < 1e-14


@pytest.mark.slow
def test_7_14_a_warm_start_beats_a_cold_one_twofold() -> None:
    layout = layout_of((30, 30))
    starts = decaying(4, 30)
    reached = {}
    for warm in (True, False):
        algorithm = PowerGossip(warm_start=warm)
        states = gossip(algorithm, opened(algorithm, starts, layout), ring_views(4), 60)
        reached[warm] = disagreement(states, np.stack(starts))
    assert reached[True] < 0.5 * reached[False]
    assert reached[True] < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("quiet", [0, 1, 4])
def test_7_14_an_edge_whose_ends_agreed_comes_back_to_life(dtype: str, quiet: int) -> None:
    layout = layout_of((8, 6))
    start = draws(1, 48)[0].astype(dtype)
    algorithm = PowerGossip()
    states = gossip(algorithm, opened(algorithm, [start, start], layout), ring_views(2), quiet)
    if quiet:
        assert not np.any(states[0]["factor/1"])
    states[0] = algorithm.shift(states[0], draws(1, 48, 5)[0].astype(dtype))
    before = models(states)
    states = gossip(algorithm, states, ring_views(2), 40, begin=quiet)
    assert disagreement(states, before) < (1e-3 if dtype == "float32" else 1e-4)


@pytest.mark.slow
def test_7_15_both_ends_hold_the_same_factor_and_basis_in_every_iteration() -> None:
    layout = layout_of((7, 5), (4, 6), (3,))
    for dtype in ("float32", "float64"):
        starts = [start.astype(dtype) for start in draws(5, layout.size)]
        algorithm = PowerGossip(rank=2, digest_every=1)
        seen = []

        def equal(k: int, begun: list[State], states: list[State], seen: list[int] = seen) -> None:
            for i in range(5):
                j = (i + 1) % 5
                assert np.array_equal(begun[i][f"begun.basis/{j}"], begun[j][f"begun.basis/{i}"])
                assert states[i][f"factor/{j}"].tobytes() == states[j][f"factor/{i}"].tobytes()
                assert states[i][f"turn/{j}"] == states[j][f"turn/{i}"] == k + 1
            if k == 7:  # as a store does: bytes and back
                for i, state in enumerate(states):
                    states[i] = {n: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape) for n, a in state.items()}
            seen.append(k)

        gossip(algorithm, opened(algorithm, starts, layout), ring_views(5), 20, watch=equal)
        assert len(seen) == 20


@pytest.mark.parametrize(
    ("dtype", "values", "itemsize"), [("float32", "model", 4), ("float64", "float32", 4), ("float64", "model", 8)]
)
def test_7_17_the_bytes_of_a_message(dtype: str, values: str, itemsize: int) -> None:
    layout = layout_of((32, 64), (10, 3), (2, 9), (32,))
    rank = 3
    algorithm = PowerGossip(rank=rank, values=values, digest_every=4)
    states = opened(algorithm, [s.astype(dtype) for s in draws(2, layout.size)], layout)
    columns = [3, 3, 2]
    sides = {0: (64, 3, 9), 1: (32, 10, 2)}
    for k in range(9):
        begun = [algorithm.send(state, None, ring_views(2)(i, k)) for i, state in enumerate(states)]
        for _, outbox in begun:
            payload = outbox[0].payload
            numbers = sum(r * side for r, side in zip(columns, sides[k % 2], strict=True)) + 32
            digest = 8 if k and k % 4 == 0 else 0
            assert len(payload) == HEADER_BYTES + digest + itemsize * numbers
            assert bool(peek(payload).flags & MessageFlag.DIGEST) == bool(digest)
        inboxes = deliver({i: outbox for i, (_, outbox) in enumerate(begun)})
        states = [algorithm.receive(state, inboxes[i]) for i, (state, _) in enumerate(begun)]


def naive(
    starts: Sequence[np.ndarray], shape: tuple[int, int], weights: np.ndarray, bases: dict, steps: int
) -> np.ndarray:
    """PowerGossip of rank 1 on one matrix as published, from its formula: QR-free, dense, all edges at once."""
    now = [start.reshape(shape) for start in starts]
    n = len(now)
    factors = dict(bases)
    for k in range(steps):
        old = [matrix.copy() for matrix in now]
        for small in range(n):
            for large in range(small + 1, n):
                if not weights[small, large]:
                    continue
                given = factors[small, large] / np.linalg.norm(factors[small, large])
                gap = old[large] - old[small]
                found = gap.T @ given if k % 2 == 0 else gap @ given
                change = np.outer(given, found) if k % 2 == 0 else np.outer(found, given)
                now[large] = now[large] - weights[small, large] * change
                now[small] = now[small] + weights[small, large] * change
                factors[small, large] = found
    return np.stack([matrix.reshape(-1) for matrix in now])


def test_the_iteration_is_the_published_one() -> None:
    layout, weights = layout_of((6, 9)), ring_weights(5)
    starts = draws(5, 54)
    algorithm = PowerGossip()
    states = opened(algorithm, starts, layout)
    first = [algorithm.send(state, None, view_of(weights, i, 0))[0] for i, state in enumerate(states)]
    bases = {(i, j): first[i][f"begun.basis/{j}"] for i in range(5) for j in range(i + 1, 5) if weights[i, j]}
    ended = models(gossip(algorithm, states, ring_views(5), 12))
    assert np.abs(ended - naive(starts, (6, 9), weights, bases, 12)).max() < 1e-12


def test_streams_of_edges_do_not_collide() -> None:
    """Edges (1, 112) and (11, 12) share a seed when ids are written one behind the other."""
    layout, algorithm = layout_of((5, 5)), PowerGossip()
    state = algorithm.init(np.ones(25), layout)
    drawn = {}
    for i, j in ((1, 112), (11, 12), (111, 2), (112, 1)):
        begun, _ = algorithm.send(state, None, View(i, 0, {j: 0.5}, {j: 0.5}))
        drawn[i, j] = begun[f"begun.basis/{j}"]
    assert np.array_equal(drawn[1, 112], drawn[112, 1])
    assert not np.array_equal(drawn[1, 112], drawn[11, 12])
    assert not np.array_equal(drawn[1, 112], drawn[111, 2])


def test_signs_follow_node_ids_not_the_order_of_neighbours() -> None:
    layout = layout_of((4, 4))
    starts, algorithm = draws(3, 16), PowerGossip()
    weights = np.full((3, 3), 1 / 3)

    def views(node: int, k: int) -> View:
        view = view_of(weights, node, k)
        turned = dict(reversed(view.row.items()))
        return View(node, k, turned, turned)

    straight = gossip(algorithm, opened(algorithm, starts, layout), views_of(weights), 6)
    assert np.array_equal(models(gossip(algorithm, opened(algorithm, starts, layout), views, 6)), models(straight))


@pytest.mark.slow
def test_edges_may_come_and_go() -> None:
    """On an undirected graph that changes the edge state rests with its edge, and no byte is needed when it returns."""
    layout = layout_of((6, 6), (4,))
    starts, algorithm = draws(6, layout.size), PowerGossip(digest_every=1)
    pairings = [((0, 1), (2, 3), (4, 5)), ((1, 2), (3, 4)), ((0, 5), (1, 4)), ((0, 3), (2, 5))]

    def views(node: int, k: int) -> View:
        row = {a + b - node: 0.5 for a, b in pairings[k % 4] if node in (a, b)}
        return View(node, k, row, row)

    states = gossip(algorithm, opened(algorithm, starts, layout), views, 200)
    assert np.abs(models(states).mean(axis=0) - np.mean(starts, axis=0)).max() < 1e-14
    assert disagreement(states, np.stack(starts)) < 1e-3
    assert all(state["restarts"] == 0 for state in states)
    assert states[0]["turn/1"] == 50


@pytest.mark.slow
def test_ends_out_of_step_apply_nothing_and_restart() -> None:
    layout = layout_of((6, 6), (4,))
    starts, algorithm = draws(4, layout.size), PowerGossip(digest_every=1)
    states = gossip(algorithm, opened(algorithm, starts, layout), ring_views(4), 5)
    lost = {key: value for key, value in states[2].items() if not key.endswith("/1")}
    spoilt = {**states[3], "factor/0": states[3]["factor/0"] * 1.5}  # another factor, same step: the digest shows it
    states[2], states[3] = lost, spoilt
    states = gossip(algorithm, states, ring_views(4), 1, begin=5)
    assert [int(s["restarts"]) for s in states] == [1, 1, 1, 1]
    assert "factor/1" not in states[2]
    assert "factor/2" not in states[1]
    assert "factor/0" not in states[3]
    states = gossip(algorithm, states, ring_views(4), 120, begin=6)
    assert np.abs(models(states).mean(axis=0) - np.mean(starts, axis=0)).max() < 1e-14
    assert disagreement(states, np.stack(starts)) < 1e-3
    assert [int(s["restarts"]) for s in states] == [1, 1, 1, 1]


def test_resync_restarts_an_edge_at_both_ends() -> None:
    layout = layout_of((6, 6))
    algorithm = PowerGossip()
    states = gossip(algorithm, opened(algorithm, draws(2, 36), layout), ring_views(2), 3)
    both = [algorithm.send(state, None, view_of(PAIR, i, 3, resync=[1 - i])) for i, state in enumerate(states)]
    inboxes = deliver({i: outbox for i, (_, outbox) in enumerate(both)})
    states = [algorithm.receive(state, inboxes[i]) for i, (state, _) in enumerate(both)]
    assert [int(s["restarts"]) for s in states] == [0, 0]
    assert states[0]["turn/1"] == 1
    assert np.array_equal(states[0]["factor/1"], states[1]["factor/0"])
    again = [algorithm.reset(state, layout) for state in states]
    assert not any(key.startswith(("turn/", "factor/")) for state in again for key in state)


def test_the_rank_is_at_most_the_shorter_side() -> None:
    """Of a matrix that is not square one step sees the whole difference through the shorter side only."""
    layout = layout_of((1, 5), (5, 1), (3, 2), (2, 3))
    starts, algorithm = draws(2, layout.size), PowerGossip(rank=4)
    states = gossip(algorithm, opened(algorithm, starts, layout), ring_views(2), 1)
    off = np.abs(models(states) - np.mean(starts, axis=0))
    assert off[:, [0, 1, 2, 3, 4, *range(16, 22)]].max() < 1e-14
    assert off[:, 5:16].max() > 0.1
    states = gossip(algorithm, states, ring_views(2), 1, begin=1)
    assert np.abs(models(states) - np.mean(starts, axis=0)).max() < 1e-14


def test_vectors_alone_are_gossiped_whole() -> None:
    layout = Layout.flat(7)
    starts, algorithm = draws(4, 7), PowerGossip()
    states = gossip(algorithm, opened(algorithm, starts, layout), ring_views(4), 1)
    assert np.abs(models(states) - ring_weights(4) @ np.stack(starts)).max() < 1e-15


def test_a_training_step_takes_as_many_iterations_as_power_steps() -> None:
    layout = layout_of((4, 4))
    algorithm = PowerGossip(steps=3, lr=0.5)
    state = algorithm.init(np.ones(16), layout)
    calls = []
    for k in range(7):
        state, _ = algorithm.step(state, [], lambda z, k=k: calls.append(k) or np.ones_like(z), View(0, k))
    assert calls == [0, 3, 6]
    assert np.array_equal(state["x"], np.full(16, 1 - 3 * 0.5))


@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_decides_which_model_is_sent(overlap: bool) -> None:
    layout, weights = layout_of((3, 3), (2,)), PAIR
    algorithm = PowerGossip(rank=3, lr=0.1, momentum=0.9, overlap=overlap)
    x = np.stack(draws(2, layout.size))
    states, v = opened(algorithm, list(x), layout), np.zeros_like(x)
    for k in range(4):
        states = gossip(algorithm, states, views_of(weights), 1, np.sin, begin=k)
        v = 0.9 * v + np.sin(x)
        x = weights @ x - 0.1 * v if overlap else weights @ (x - 0.1 * v)
        assert np.abs(models(states) - x).max() < 1e-13


def test_the_rate_of_the_ring_of_eight_is_the_authors() -> None:
    assert auto_rate(Ring(8)) == pytest.approx(1.308, abs=5e-4)
    assert auto_rate(Complete(5)) == pytest.approx(1.0)
    for graph in (DirectedRing(4), RandomDigraph(5, 0.6, 0)):
        with pytest.raises(ConfigError, match="no rate follows"):
            auto_rate(graph)


def test_a_graph_without_edges_is_refused_as_one_that_is_not_connected() -> None:
    class Lonely(Ring):
        def targets(self, t: int) -> list[list[int]]:
            return [[] for _ in range(self.n)]

    with pytest.raises(TopologyError, match=r"not strongly connected .* add edges"):
        simulate(PowerGossip(rate="auto"), Lonely(3), None, np.zeros(4), 1, layout=Layout.flat(4), seed=0)


def test_an_auto_rate_is_that_of_the_graph_and_of_nothing_else() -> None:
    automatic = PowerGossip(rank=2, rate="auto")
    assert automatic.fitted(Ring(8)) == PowerGossip(rank=2, rate=auto_rate(Ring(8)))
    assert PowerGossip(rate=0.7).fitted(Ring(8)).rate == 0.7
    state = automatic.init(np.ones(6), Layout.flat(6))
    with pytest.raises(ConfigError, match="fitted"):
        automatic.send(state, None, Ring(8).view(0, 0, seed=0, directed_algorithm=False))


def test_float32_on_the_wire_keeps_the_mean_and_floors_agreement() -> None:
    layout, starts = layout_of((5, 5), (5,)), draws(2, 30)
    algorithm = PowerGossip(rank=5, values="float32")
    states = gossip(algorithm, opened(algorithm, starts, layout), ring_views(2), 10)
    assert np.abs(models(states).mean(axis=0) - np.mean(starts, axis=0)).max() < 1e-15
    assert 1e-12 < disagreement(states, np.stack(starts)) < 1e-6


def test_orthonormal_columns_whatever_the_factor() -> None:
    key = Key(3, "columns")
    random = key.generator().standard_normal((12, 4))
    for factor in (
        random,
        np.zeros((12, 4)),
        np.outer(np.arange(12.0), np.ones(4)),
        random[:, :1] + 1e-7 * random,  # nearly dependent: one pass would leave 1e-9 of the first in the others
        random * 1e-9,
        random * 1e12,
        random * 1e154,  # squares are finite, their sum is not
        random * 1e200,
        random * 1e12,
        np.eye(4)[::-1],
    ):
        basis = orthonormal(factor, key)
        assert np.abs(basis.T @ basis - np.eye(basis.shape[1])).max() < 1e-14
    assert np.allclose(np.abs(np.linalg.qr(random)[0].T @ orthonormal(random, key)), np.eye(4), atol=1e-12)


def test_normals_are_centred_with_unit_variance() -> None:
    drawn = normals(Key(1, "n"), 20000)
    assert abs(drawn.mean()) < 0.03
    assert abs(drawn.std() - 1.0) < 0.02
    assert abs((drawn**4).mean() - 2.7) < 0.1  # a sum of four uniforms: a kurtosis of 2.7, a Gaussian's is 3
