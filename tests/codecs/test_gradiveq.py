"""GradiVeQ as a codec: sums in the basis, what a frame may hold, grids, and the memory."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from fedcomp import wire
from fedcomp.codecs import GradiVeQ, get_codec
from fedcomp.codecs.coefficients import id_bytes
from fedcomp.codecs.gradiveq import SliceProjection, open_steps, steps_frame
from fedcomp.codecs.subspace import SliceBasis, Subspace
from fedcomp.errors import ConfigError, NonFiniteUpdate, StateError
from fedcomp.layout import Layout, SmallDense, TablePolicy, Update
from fedcomp.rng import Key
from fedcomp.wire import BASIS_ID, COEFFICIENTS, SchemaMismatch, Tensor

KEY = Key(3, "uplink", 1)
MODEL = {
    "a": np.zeros((16, 12, 3, 3), np.float32),
    "b": np.zeros((30, 31), np.float32),
    "small": np.zeros(70, np.float32),
    "bias": np.zeros(7, np.float32),
}
LAYOUT = Layout.of(MODEL, SmallDense(min_size=64))
"""17 slices and a tail of 28; 9 slices and a tail of 30; a vector that is not cut; a dense rest."""

GOLDEN = {
    "float32": "1785d8fd0f878a21",
    "q8": "7af30eb4d630f3b2",
    "grid": "1353077523e2b987",
}


def codec(**options) -> GradiVeQ:
    return GradiVeQ(**{"width": 100, **options})


def basis_of(own: GradiVeQ, d: int = 20, seed: int = 0) -> SliceBasis:
    slices, draw, subspaces = own.slices(LAYOUT), np.random.default_rng(seed), []
    for part in slices.parts:
        groups = part.count if own.basis == "per_slice" else 1
        columns = np.linalg.qr(draw.standard_normal((groups, slices.width, max(d, 1))))[0][..., :d]
        mean = draw.standard_normal((part.count, slices.width)).astype(np.float32) if own.center else None
        subspaces.append(Subspace(np.ascontiguousarray(columns, np.float32), mean))
    return SliceBasis(slices, tuple(subspaces))


def drawn(seed: int) -> Update:
    return Update(np.random.default_rng(seed).standard_normal(LAYOUT.size).astype(np.float32), LAYOUT)


def sent(own: GradiVeQ, basis: SliceBasis, update: Update, **options):
    return own.send(own.begin(update, own.init(LAYOUT), KEY), basis, LAYOUT, KEY, **options)


@pytest.mark.parametrize("options", [{}, {"center": True}, {"basis": "per_slice", "center": True}, {"order": "FDHW"}])
@pytest.mark.parametrize("d", [0, 1, 20, 100])
def test_1_sums_of_frames_are_projections_of_means(options: dict, d: int) -> None:
    """Random weights, any subset: gathered as coefficients and concluded once; single frames decode alike."""
    own = codec(**options)
    basis, updates = basis_of(own, d), [drawn(seed) for seed in range(5)]
    fixed = own.on(basis)
    frames = [sent(own, basis, update)[0] for update in updates]
    for chosen in ([0], [1, 3], [0, 2, 4], [0, 1, 2, 3, 4]):
        weights = np.random.default_rng(len(chosen)).uniform(0.1, 9.0, len(chosen))
        weights /= weights.sum()
        total = Update(np.zeros(LAYOUT.size, np.float32), LAYOUT)
        for weight, index in zip(weights, chosen, strict=True):
            fixed.gather(frames[index], float(weight), total)
        step = own.mean(basis).decode(fixed.sum_frame(total), LAYOUT)
        fixed.conclude(total)
        mean = np.sum([w * updates[i].vector.astype(np.float64) for w, i in zip(weights, chosen, strict=True)], axis=0)
        true = basis.reconstruct(basis.project(mean.astype(np.float32)))
        assert np.linalg.norm(total.vector - true) <= 1e-6 * np.linalg.norm(true)
        # Replicas read the frame; the server has the sum: not one bit apart.
        assert step.tobytes() == total.vector.tobytes()
    decoded = fixed.decode(frames[0], LAYOUT)
    np.testing.assert_allclose(decoded, basis.reconstruct(basis.project(updates[0].vector)), atol=1e-6)
    assert fixed.norm(frames[0], LAYOUT) == pytest.approx(np.linalg.norm(decoded.astype(np.float64)), rel=1e-5)
    entered = Update(updates[0].vector.copy(), LAYOUT)
    fixed.enter(entered)
    fixed.conclude(entered)
    np.testing.assert_allclose(entered.vector, decoded, atol=1e-5)
    doubled = drawn(9)
    expected = doubled.vector + np.float32(2.0) * decoded
    fixed.accumulate(frames[0], 2.0, doubled)
    np.testing.assert_allclose(doubled.vector, expected, atol=1e-5)
    if d == 100:
        np.testing.assert_allclose(decoded, updates[0].vector, atol=2e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"order": "FDHW"},
        {"basis": "per_slice"},
        {"center": True},
        {"levels": 3},
        {"memory": True},
        {"values": "q4"},
    ],
)
def test_it_says_of_itself_whether_a_basis_may_lengthen_an_update(options: dict) -> None:
    """A projection shortens; a mean that is added, memory, and rounding of a vector that is in the basis do not."""
    own = codec(**options)
    basis, longest = basis_of(own), 0.0
    inside = Update(basis.reconstruct(np.where(np.arange(basis.size) % 9, 0.95, 1.0).astype(np.float32)), LAYOUT)
    for update in (inside, drawn(1)):
        state, length = own.init(LAYOUT), np.linalg.norm(update.vector.astype(np.float64))
        for r in range(3):
            state = own.begin(update, state, KEY.at(round=r))
            # What the first basis missed is in the memory.
            basis_now = basis if r == 0 else basis_of(own, seed=r)
            grids = own.grids([own.peaks(state, basis_now, LAYOUT)]) if own.rounds(basis_now) else ()
            frame, state = own.send(state, basis_now, LAYOUT, KEY.at(round=r), grids)
            arrived = own.on(basis_now, grids).decode(frame, LAYOUT)
            longest = max(longest, float(np.linalg.norm(arrived.astype(np.float64)) / length))
    assert own.never_enlarges == (longest <= 1.0 + 1e-6), longest


def test_frames_have_the_bytes_they_had() -> None:
    """Of the first four coordinates of a slice, so that no library's last bit matters."""
    made = {}
    for name, options in (("float32", {}), ("q8", {"values": "q8"}), ("grid", {"levels": 15})):
        own = codec(**options)
        slices = own.slices(LAYOUT)
        first = Subspace(np.eye(100, 4, dtype=np.float32)[None], None)
        basis = SliceBasis(slices, (first,) * len(slices.parts))
        values = ((np.arange(LAYOUT.size) * 37) % 64 - 32).astype(np.float32) / 4
        update = Update(values, LAYOUT)
        state = own.begin(update, own.init(LAYOUT), KEY)
        grids = own.grids([own.peaks(state, basis, LAYOUT)]) if own.rounds(basis) else ()
        frame, _ = own.send(state, basis, LAYOUT, KEY, grids)
        made[name] = hashlib.sha256(frame).hexdigest()[:16]
        assert len(frame) <= own.on(basis, grids).longest(LAYOUT)
    assert made == GOLDEN


def test_tails_small_tensors_and_the_rest_are_exact_in_every_form() -> None:
    for options in ({}, {"values": "bf16"}, {"levels": 3}):
        own = codec(**options)
        basis, update = basis_of(own), drawn(1)
        state = own.begin(update, own.init(LAYOUT), KEY)
        grids = own.grids([own.peaks(state, basis, LAYOUT)]) if options == {"levels": 3} else ()
        frame, _ = own.send(state, basis, LAYOUT, KEY, grids)
        arrived = own.on(basis, grids).decode(frame, LAYOUT)
        rest = basis.slices.cut(update.vector)[1]
        found = basis.slices.cut(arrived)[1]
        np.testing.assert_array_equal(found[:-7], rest[:-7])


def test_rounding_on_shared_grids_is_unbiased_and_nothing_is_cut() -> None:
    own = codec(levels=5)
    basis, update = basis_of(own), drawn(1)
    state = own.begin(update, own.init(LAYOUT), KEY)
    grids = own.grids([own.peaks(state, basis, LAYOUT), np.float32([0.1, 0.2])])
    assert len(grids) == 2
    fixed, exact = own.on(basis, grids), basis.reconstruct(basis.project(update.vector))
    draws = []
    for number in range(400):
        frame, _ = own.send(state, basis, LAYOUT, KEY.at(round=number), grids)
        bundle = fixed.open(frame, LAYOUT)
        draws.append(fixed.decode(bundle, LAYOUT))
        for part, grid in zip(basis.slices.parts, grids, strict=True):
            grid.check(bundle.tensors[part.index])
    off = np.mean(draws, axis=0) - exact
    # Directions are orthonormal: each coordinate's deviation is at most half a step.
    bound = 5 * 0.5 * max(grid.step for grid in grids) / np.sqrt(400)
    assert np.abs(off).max() < bound
    assert np.abs(draws[0] - exact).max() > 0.01


def test_what_a_receiver_refuses() -> None:
    own = codec()
    basis, other = basis_of(own), basis_of(own, seed=1)
    fixed = own.on(basis)
    frame, _ = sent(own, basis, drawn(1))
    with pytest.raises(SchemaMismatch, match="two bases do not add"):
        own.on(other).open(frame, LAYOUT)
    with pytest.raises(wire.WireError):
        own.on(basis_of(own, 19)).open(frame, LAYOUT)
    bundle = fixed.open(frame, LAYOUT)
    named = ((BASIS_ID, id_bytes(basis.id)),)

    def with_first(tensor: Tensor) -> bytes:
        return wire.encode([tensor, *bundle.tensors[1:]], tlvs=named)

    first = bundle.tensors[0]
    assert fixed.open(with_first(first), LAYOUT)
    values = first.values.decode()
    for wrong in (
        replace(first, values=wire.Raw(values[:-1])),
        replace(first, values=wire.Bf16(values)),
        Tensor(wire.Raw(np.zeros(first.size, np.float32)), first.shape),
        Tensor(wire.Raw(values), (1600,), kind=COEFFICIENTS),
    ):
        with pytest.raises(wire.WireError):
            fixed.open(with_first(wrong), LAYOUT)
    with pytest.raises(SchemaMismatch, match="no basis"):
        fixed.open(wire.encode(bundle.tensors), LAYOUT)
    with pytest.raises(StateError, match="another model"):
        fixed.open(frame, Layout.flat(LAYOUT.size))
    with pytest.raises(ConfigError, match="send its basis"):
        fixed.to_config()


def test_values_on_another_grid_are_refused() -> None:
    own = codec(levels=15)
    basis = basis_of(own)
    state = own.begin(drawn(1), own.init(LAYOUT), KEY)
    grids = own.grids([own.peaks(state, basis, LAYOUT)])
    frame, _ = own.send(state, basis, LAYOUT, KEY, grids)
    others = tuple(replace(grid, step=float(np.nextafter(np.float32(grid.step), np.float32(9)))) for grid in grids)
    with pytest.raises(SchemaMismatch, match="grid"):
        own.on(basis, others).open(frame, LAYOUT)
    with pytest.raises(wire.WireError):
        codec().on(basis).open(frame, LAYOUT)
    with pytest.raises(StateError, match="grids"):
        own.send(state, basis, LAYOUT, KEY)
    with pytest.raises(ConfigError, match="no peaks"):
        own.grids([])


@pytest.mark.parametrize("options", [{}, {"center": True}, {"values": "q4"}, {"levels": 3}], ids=str)
def test_with_a_memory_nothing_is_lost_and_a_frame_can_be_taken_back(options: dict) -> None:
    own = codec(memory=True, **options)
    basis, update = basis_of(own), drawn(1)
    state = own.begin(update, own.init(LAYOUT), KEY)
    grids = own.grids([own.peaks(state, basis, LAYOUT)]) if own.rounds(basis) else ()
    frame, after = own.send(state, basis, LAYOUT, KEY, grids)
    arrived = own.on(basis, grids).decode(frame, LAYOUT)
    np.testing.assert_allclose(arrived + after["memory"], update.vector, atol=1e-5)
    back = own.rollback(after, frame, LAYOUT)
    np.testing.assert_allclose(back["memory"], update.vector, atol=1e-5)
    assert set(back) == {"memory", "round"}
    # In a dense round all of it leaves.
    nothing = SliceBasis.nothing(LAYOUT)
    later = own.begin(Update(np.zeros(LAYOUT.size, np.float32), LAYOUT), back, KEY.at(round=2))
    frame, last = own.send(later, nothing, LAYOUT, KEY.at(round=2))
    cut = slice(0, LAYOUT.compressed_size)
    np.testing.assert_allclose(own.on(nothing).decode(frame, LAYOUT)[cut], update.vector[cut], atol=1e-5)
    assert not last["memory"][cut].any()


def test_without_a_memory_nothing_is_kept() -> None:
    own = codec()
    frame, after = sent(own, basis_of(own), drawn(1))
    assert not after["memory"].any()
    assert not own.rollback(after, frame, LAYOUT)["memory"].any()


def test_a_client_without_others_sends_everything() -> None:
    own = get_codec(codec(loss=0.2).to_config())
    assert isinstance(own, GradiVeQ)
    update = drawn(2)
    frame, _ = own.encode(update, own.init(LAYOUT), KEY)
    np.testing.assert_array_equal(own.decode(frame, LAYOUT), update.vector)
    assert SliceProjection(SliceBasis.nothing(LAYOUT)).linear


def test_what_would_overflow_is_refused() -> None:
    own = codec()
    huge = Update(np.full(LAYOUT.size, 3e38, np.float32), LAYOUT)
    # Before it waits: once in the memory it could never leave.
    with pytest.raises(NonFiniteUpdate, match="overflow"):
        own.begin(huge, own.init(LAYOUT), KEY)


def test_peaks_and_steps_travel_as_floats() -> None:
    numbers = np.float32([0.0, 2.5])
    np.testing.assert_array_equal(open_steps(steps_frame(numbers), 2), numbers)
    for wrong, count in ((numbers, 3), (-numbers, 2), (np.float32([np.nan, 1]), 2)):
        with pytest.raises(wire.WireError):
            open_steps(steps_frame(wrong), count)


def test_densities_of_single_tensors_are_refused() -> None:
    layout = Layout.of({"w": np.zeros((64, 64))}, TablePolicy({"w": 0.1}))
    with pytest.raises(ConfigError, match="decides itself how much it sends"):
        GradiVeQ(width=64).slices(layout)
