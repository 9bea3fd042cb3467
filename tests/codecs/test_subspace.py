"""Fitted bases of slices (part A of the transform compressors): what of test list A7 needs no server, by number.

Of item 8 the basis and the state that a message and a restart would carry; of item 9 the formula, not payload lengths.
"""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest

from fedcomp import wire
from fedcomp.codecs.axes import ORDERS
from fedcomp.codecs.cycle import COMPRESSION, SAMPLING, WARM_UP, Cycle
from fedcomp.codecs.slices import Slices
from fedcomp.codecs.subspace import KINDS, BasisFit, Moments, SliceBasis, Subspace, shared_grid
from fedcomp.errors import ConfigError, LayoutError, StateError
from fedcomp.gossip.ring import ring_sum, sum_bits
from fedcomp.layout import Layout, SmallDense
from fedcomp.rng import Key
from fedcomp.wire import WireError

MODEL = {"conv": np.zeros((16, 12, 3, 3), np.float32), "bias": np.zeros(7, np.float32)}
LAYOUT = Layout.of(MODEL, SmallDense(min_size=64))
WIDTH = 100
SLICES = Slices.of(LAYOUT, WIDTH)
"""17 slices and a tail of 28."""

GOLDEN_IDS = {"HWFD": 0x4D35E7B838621AAF, "FDHW": 0x3AA1736A639C1ECF}
"""Of the first four coordinates of a slice, without a mean."""


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def low_rank(seed: int, rank: int, count: int) -> list[np.ndarray]:
    """Updates in one subspace of ``rank`` dimensions, beside a mean."""
    draw = rng(99)
    directions, mean = draw.standard_normal((rank, LAYOUT.size)), draw.standard_normal(LAYOUT.size)
    coefficients = rng(seed).standard_normal((count, rank))
    return list((coefficients @ directions + 3 * mean).astype(np.float32))


def basis_of(updates: list[np.ndarray], fit: BasisFit, fitted: int = 20) -> SliceBasis:
    moments = Moments(SLICES, fit, fitted)
    for update in updates:
        moments.add(update)
    return moments.basis()


def random_basis(d: int, center: bool = True, slices: Slices = SLICES) -> SliceBasis:
    subspaces = []
    for part in slices.parts:
        columns = np.linalg.qr(rng(d).standard_normal((slices.width, max(d, 1))))[0][:, :d]
        mean = rng(5).standard_normal((part.count, slices.width)).astype(np.float32) if center else None
        subspaces.append(Subspace(np.ascontiguousarray(columns[None], np.float32), mean))
    return SliceBasis(slices, tuple(subspaces))


def off(found: np.ndarray, true: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - true) / np.linalg.norm(true))


@pytest.mark.parametrize("kind", KINDS)
def test_1_linear_for_every_subset_of_clients(kind: str) -> None:
    basis = basis_of(low_rank(1, 6, 25), BasisFit(kind, most=8))
    clients = [rng(i).standard_normal(LAYOUT.size).astype(np.float32) for i in range(5)]
    sent = [basis.project(g).astype(np.float64) for g in clients]
    for size in range(1, 6):
        for chosen in itertools.combinations(range(5), size):
            weights = rng(size).random(size)
            weights /= weights.sum()
            mean = sum(w * clients[i].astype(np.float64) for w, i in zip(weights, chosen, strict=True))
            found = basis.reconstruct(sum(w * sent[i] for w, i in zip(weights, chosen, strict=True)))
            assert off(found, basis.reconstruct(basis.project(mean.astype(np.float32)))) < 1e-6


def test_1_the_whole_mean_in_place_of_its_share_fails() -> None:
    """The measured bug: in the sum convention every one of N clients must subtract ``mu / N``, not ``mu``."""
    basis = random_basis(20)
    clients = [rng(i).standard_normal(LAYOUT.size).astype(np.float32) for i in range(4)]
    total = np.sum(clients, axis=0)
    slices, rest = SLICES.cut(total)
    (subspace,) = basis.subspaces
    carriers, mean = subspace.carriers[0], subspace.mean
    assert mean is not None
    true = (slices[0] - mean) @ carriers @ carriers.T + mean

    def summed(share: float) -> np.ndarray:
        codes = sum((SLICES.cut(g)[0][0] - share * mean) @ carriers for g in clients)
        return codes @ carriers.T + mean

    assert off(summed(1 / 4), true) < 1e-6
    assert off(summed(1.0), true) > 0.1
    assert rest.size == basis.slices.rest_size


def test_2_a_full_basis_leaves_a_whole_trajectory_unchanged() -> None:
    basis = random_basis(WIDTH)
    target = rng(3).standard_normal(LAYOUT.size).astype(np.float32)
    plain = compressed = np.zeros(LAYOUT.size, np.float32)
    for _ in range(40):
        plain = plain + np.float32(0.1) * (target - plain)
        compressed = compressed + np.float32(0.1) * basis.reconstruct(basis.project(target - compressed))
    assert np.abs(plain - compressed).max() < 2e-5


@pytest.mark.parametrize("center", [True, False])
def test_3_a_projector(center: bool) -> None:
    basis = random_basis(13, center)
    code = rng(1).standard_normal(basis.size).astype(np.float32)
    np.testing.assert_allclose(basis.project(basis.reconstruct(code)), code, atol=2e-5)
    mean = basis.reconstruct(np.zeros(basis.size, np.float32))
    for seed in range(5):
        g = 10.0 ** (seed - 2) * rng(seed).standard_normal(LAYOUT.size).astype(np.float32)
        once = basis.reconstruct(basis.project(g))
        np.testing.assert_allclose(basis.reconstruct(basis.project(once)), once, atol=1e-5 * (1 + np.abs(g).max()))
        assert np.linalg.norm(g - once) <= np.linalg.norm(g - mean) * (1 + 1e-6)


@pytest.mark.parametrize("kind", ["pooled", "per_slice"])
def test_4_a_subspace_is_found(kind: str) -> None:
    rank = 4
    draw = rng(8)
    shared = draw.standard_normal((rank, WIDTH))

    def sample(t: int) -> np.ndarray:
        slices = rng(t).standard_normal((17, rank)) @ shared
        return SLICES.join([slices.astype(np.float32)], rng(t).standard_normal(35).astype(np.float32))

    basis = basis_of([sample(t) for t in range(25)], BasisFit(kind, loss=1e-9))
    assert basis.dimensions == (rank,)
    new = sample(1000)
    assert off(basis.reconstruct(basis.project(new)), new) < 1e-5
    assert basis.drift(new) < 1e-9


def test_5_tails_travel_as_they_are() -> None:
    basis = random_basis(2)
    g = rng(2).standard_normal(LAYOUT.size).astype(np.float32)
    slices, rest = SLICES.cut(g)
    assert rest.size == 28 + 7
    np.testing.assert_array_equal(SLICES.join(slices, rest), g)
    np.testing.assert_array_equal(SLICES.cut(basis.reconstruct(basis.project(g)))[1], rest)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [1, 7, 100, 864, 865, 5000])
def test_6_every_cut_round_trips(order: str, width: int) -> None:
    slices = Slices.of(LAYOUT, width, order)
    g = rng(width).standard_normal(LAYOUT.size).astype(np.float32)
    before = g.copy()
    np.testing.assert_array_equal(slices.join(*slices.cut(g)), g)
    np.testing.assert_array_equal(g, before)
    assert bool(slices.parts) == (width <= 864)


def test_6_only_the_right_order_compresses_what_is_alike_along_the_depth() -> None:
    layout = Layout.of({"conv": np.zeros((16, 32, 3, 3), np.float32)}, SmallDense(min_size=1))
    along = rng(0).standard_normal(32)
    missed = {}
    for order in ("HWFD", "FDHW"):
        slices = Slices.of(layout, 32, order)
        moments = Moments(slices, BasisFit(most=1, center=False), 10)
        for t in range(15):
            moments.add(np.einsum("fhw,d->fdhw", rng(t).standard_normal((16, 3, 3)), along).astype(np.float32).ravel())
        new = np.einsum("fhw,d->fdhw", rng(77).standard_normal((16, 3, 3)), along).astype(np.float32).ravel()
        missed[order] = moments.basis().drift(new)
    assert missed["HWFD"] < 1e-9
    assert missed["FDHW"] > 0.5


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_7_ring_star_and_centre_agree_and_no_sum_outgrows_its_width(workers: int) -> None:
    basis = random_basis(9)
    clients = [rng(i).standard_normal(LAYOUT.size).astype(np.float32) for i in range(workers)]
    sent = [basis.project(g) / np.float32(workers) for g in clients]
    grid = shared_grid([float(np.abs(c).max()) for c in sent], 2**15)
    integers = [grid.round(c, Key(3, partition=i)) for i, c in enumerate(sent)]
    star = np.sum(integers, axis=0, dtype=np.int64)
    around = ring_sum(integers, grid.levels)
    for found in around.sums:
        np.testing.assert_array_equal(found, star)
    # The worst case: all at the same end.
    for end in (-grid.levels, grid.levels):
        extreme = ring_sum([np.full(11, end)] * workers, grid.levels).sums[0]
        assert int(np.abs(extreme).max()) + grid.levels * workers < 2 ** sum_bits(grid.levels, workers)
    center = basis.project(np.mean(clients, axis=0, dtype=np.float64).astype(np.float32))
    assert np.abs(star * grid.step - center).max() <= workers * grid.step + 1e-6
    moved = 2 * (workers - 1) * basis.size * sum_bits(grid.levels, workers)
    assert sum(around.bits_sent) == moved


def test_7_rounding_on_the_shared_grid_is_unbiased() -> None:
    grid = shared_grid([1.0, 0.3], 3)
    x = rng(0).uniform(-1, 1, 50).astype(np.float32)
    draws = np.array([grid.round(x, Key(1, round=i)) for i in range(4000)]) * grid.step
    assert np.abs(draws.mean(0) - x).max() < 4 * grid.step / 2 / np.sqrt(4000)
    assert grid.saturated(grid.round(np.float32([1.0, -1.0]), Key(1))) == 2
    assert not grid.round(np.zeros(3, np.float32), Key(1)).any()
    assert shared_grid([0.0], 3).step == 1.0
    for peaks in ([], [float("nan")], [-1.0], [float("inf")]):
        with pytest.raises(ConfigError, match="peaks"):
            shared_grid(peaks, 3)


def test_7_a_ring_refuses_what_would_overflow() -> None:
    for vectors in ([np.array([8])], [np.array([-8]), np.array([1])], [np.array([-(2**63)])]):
        with pytest.raises(LayoutError, match="beyond 7 levels"):
            ring_sum(vectors, 7)
    for vectors in ([], [np.zeros(2, int), np.zeros(3, int)], [np.zeros((2, 2), int)]):
        with pytest.raises(LayoutError, match="flat vector"):
            ring_sum(vectors, 7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("center", [True, False])
def test_8_a_late_client_reads_the_basis_and_a_stale_one_is_refused(kind: str, center: bool) -> None:
    basis = basis_of(low_rank(1, 3, 25), BasisFit(kind, center=center))
    per_slice = kind == "per_slice"

    def read(frame: bytes) -> SliceBasis:
        return SliceBasis.read(frame, SLICES, per_slice=per_slice, center=center)

    late = read(basis.frame())
    assert late.id == basis.id
    g = low_rank(50, 3, 1)[0]
    np.testing.assert_array_equal(late.project(g), basis.project(g))
    other = basis_of(low_rank(2, 3, 25), BasisFit(kind, center=center))
    assert read(other.frame()).id == other.id != basis.id
    # One byte, on its way or where it was kept: another basis by its id, or no basis at all.
    damaged = bytearray(basis.frame())
    damaged[-9] ^= 1
    with contextlib.suppress(WireError):
        assert read(bytes(damaged)).id != basis.id
    carriers = basis.subspaces[0].carriers
    wrong = {
        "another group": np.concatenate([carriers, carriers]),
        "another width": carriers[:, 1:],
        "too many dimensions": np.zeros((len(carriers), WIDTH, WIDTH + 1), np.float32),
        "a matrix": carriers[0],
        "float64": carriers.astype(np.float64),
    }
    for array in wrong.values():
        more = [np.zeros((17, WIDTH), np.float32)] if center else []
        with pytest.raises(WireError):
            read(wire.encode([wire.dense(a) for a in (array, *more)]))
    with pytest.raises(WireError, match="tensors"):
        read(wire.encode([]))
    with pytest.raises(LayoutError, match="expected"):
        basis.reconstruct(np.zeros(basis.size + 1, np.float32))


def test_8_ids_differ_by_the_order_of_axes_and_stay_what_they_are() -> None:
    """An id that changed with a release would have every running client's basis refused."""
    ids = {}
    for order in ("HWFD", "FDHW"):
        slices = Slices.of(LAYOUT, WIDTH, order)
        ids[order] = SliceBasis(slices, (Subspace(np.eye(WIDTH, 4, dtype=np.float32)[None], None),)).id
    assert ids == GOLDEN_IDS


def test_8_phases_and_sums_survive_a_restart() -> None:
    updates = low_rank(1, 3, 25)
    straight, cycle = Moments(SLICES, BasisFit(), 20), Cycle(2, 3, 4)
    phases = []
    resumed, again = Moments(SLICES, BasisFit(), 20), Cycle(2, 3, 4)
    for update in updates:
        straight.add(update)
        resumed.add(update)
        phases.append(again.phase)
        assert again.phase == cycle.phase
        cycle.advance()
        again.advance()
        sums, count = resumed.state_dict(), again.state_dict()
        resumed, again = Moments(SLICES, BasisFit(), 20), Cycle(2, 3, 4)
        resumed.load_state_dict(sums)
        again.load_state_dict(count)
    assert resumed.basis().id == straight.basis().id
    assert phases[:10] == [WARM_UP] * 2 + [SAMPLING] * 3 + [COMPRESSION] * 4 + [SAMPLING]
    with pytest.raises(StateError):
        Cycle(2, 3, 5).load_state_dict(cycle.state_dict())
    with pytest.raises(StateError):
        Cycle(2, 3, 4).load_state_dict(cycle.state_dict() | {"done": 7})
    with pytest.raises(StateError):
        Moments(SLICES, BasisFit("shared_first"), 20).load_state_dict(straight.state_dict())
    with pytest.raises(StateError):
        Moments(SLICES, BasisFit(), 20).load_state_dict(straight.state_dict() | {"count": 3})


def test_8_an_early_fit_begins_a_cycle_and_only_out_of_compression() -> None:
    cycle = Cycle(1, 2, 5)
    seen = []
    for t in range(9):
        seen.append(cycle.phase)
        cycle.advance(refit=t in (0, 1, 4))
    assert seen == [WARM_UP, *[SAMPLING] * 2, *[COMPRESSION] * 2, *[SAMPLING] * 2, *[COMPRESSION] * 2]


def test_9_average_ratio() -> None:
    assert Cycle(0, 100, 400).average_ratio(8) == pytest.approx(10 / 3)
    assert Cycle(0, 20, 130).average_ratio(8) == pytest.approx(4.1379, abs=1e-4)


def test_held_out_samples_choose_the_dimension() -> None:
    """Chosen on the window, four directions of pure noise would look sufficient for half of the energy."""
    noise = [rng(t).standard_normal(LAYOUT.size).astype(np.float32) for t in range(40)]
    basis = basis_of(noise, BasisFit("per_slice", loss=0.5), fitted=10)
    assert basis.dimensions == (9,)
    pooled = basis_of(noise, BasisFit("pooled", loss=0.05), fitted=20)
    assert pooled.dimensions[0] > 90


def test_samples_that_are_not_finite_are_dropped_and_counted() -> None:
    clean = low_rank(1, 3, 25)
    bad = clean[0].copy()
    bad[-1] = np.inf
    moments = Moments(SLICES, BasisFit(), 20)
    for update in [*clean[:5], bad, np.full_like(bad, np.nan), *clean[5:]]:
        moments.add(update)
    assert (moments.count, moments.held, moments.dropped) == (20, 5, 2)
    assert moments.basis().id == basis_of(clean, BasisFit()).id


def test_too_few_samples_are_refused() -> None:
    moments = Moments(SLICES, BasisFit("per_slice", most=10), 10)
    for update in low_rank(1, 3, 10):
        moments.add(update)
    with pytest.raises(StateError, match="held out"):
        moments.basis()
    moments.add(low_rank(2, 3, 1)[0])
    with pytest.raises(ConfigError, match="too few"):
        moments.basis()


def test_constant_slices_send_nothing_and_decode_to_their_mean() -> None:
    g = rng(1).standard_normal(LAYOUT.size).astype(np.float32)
    basis = basis_of([g] * 25, BasisFit())
    assert basis.dimensions == (0,)
    assert basis.size == SLICES.rest_size
    np.testing.assert_array_equal(basis.reconstruct(basis.project(g)), g)
    late = SliceBasis.read(basis.frame(), SLICES, per_slice=False, center=True)
    assert late.id == basis.id
    assert basis.drift(g) == 0.0 == random_basis(3, center=False).drift(np.zeros_like(g))


def test_bases_cost_what_the_formulas_say() -> None:
    per_part = {kind: basis_of(low_rank(1, 3, 25), BasisFit(kind, loss=0.5)) for kind in KINDS}
    for kind, basis in per_part.items():
        (d,) = basis.dimensions
        floats = (17 if kind == "per_slice" else 1) * WIDTH * d + 17 * WIDTH
        assert 0 <= len(basis.frame()) - 4 * floats < 80
        assert basis.size == 17 * d + 35
