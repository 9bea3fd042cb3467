"""PowerSGD's mathematics: what a wrong iteration, a wrong memory or a second basis would break."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedcomp import wire
from fedcomp.codecs import LowRank, PowerSGD
from fedcomp.codecs.coefficients import basis_id_of
from fedcomp.codecs.lowrank import LEFT, RIGHT, Basis, Projection, Ranks
from fedcomp.codecs.matrices import add_product, orthonormal, product
from fedcomp.codecs.positional import stretches
from fedcomp.codecs.power_sgd import nothing_factored
from fedcomp.codecs.waiting import LONGEST
from fedcomp.errors import ConfigError, NonFiniteUpdate, StateError
from fedcomp.layout import Layout, TensorSpec, Update
from fedcomp.rng import Key

KEY = Key(3, "uplink", 1)


def layout_of(*shapes: tuple[int, ...], rest: int = 0) -> Layout:
    specs, offset = [], 0
    for i, shape in enumerate(shapes):
        size = int(np.prod(shape))
        specs.append(TensorSpec(f"w{i}", shape, "float32", offset, size))
        offset += size
    if rest:
        specs.append(TensorSpec("rest", (rest,), "float32", offset, rest, 1.0))
    return Layout(tuple(specs), (), tuple(s.name for s in specs))


# A matrix, a convolution's kernel (20 x 54), a vector and a small matrix that travel whole, and biases.
MIXED = layout_of((40, 30), (20, 6, 3, 3), (50,), (2, 3), rest=7)


def drawn(layout: Layout, seed: int = 0) -> Update:
    return Update(np.random.default_rng(seed).standard_normal(layout.size).astype(np.float32), layout)


def one(matrix: np.ndarray) -> Update:
    return Update(matrix.astype(np.float32).reshape(-1).copy(), layout_of(matrix.shape))


def play(
    codec: PowerSGD, rounds: list[list[Update]], weights: list[float], *, seed: int = 5
) -> tuple[list[np.ndarray], list[dict]]:
    """Play rounds without messages; return the steps, and the clients' states after them."""
    layout = rounds[0][0].layout
    states, last, steps = [codec.init(layout) for _ in weights], None, []
    shares = [weight / sum(weights) for weight in weights]
    for t, updates in enumerate(rounds, 1):
        key, drawing = Key(seed, "uplink", t), Key(seed, "basis", t)
        waiting = [codec.begin(u, s, key) for u, s in zip(updates, states, strict=True)]
        basis = codec.start(last, layout, drawing)
        if codec.two_exchanges:
            total = Update(np.zeros(layout.size, np.float32), layout)
            for state, share in zip(waiting, shares, strict=True):
                codec.mean(basis).gather(codec.first(state, basis, layout, key), share, total)
            factors = codec.mean(basis).coefficients(codec.mean(basis).sum_frame(total), layout)
            basis = codec.between(factors, layout, drawing)
        total = Update(np.zeros(layout.size, np.float32), layout)
        sent = [codec.send(state, basis, layout, key) for state in waiting]
        for (frame, _), share in zip(sent, shares, strict=True):
            codec.on(basis).gather(frame, share, total)
        step = codec.mean(basis).sum_frame(total)
        codec.on(basis).conclude(total)
        np.testing.assert_array_equal(codec.mean(basis).decode(step, layout), total.vector)
        states = [codec.correct(state, step, layout) for _, state in sent]
        last = basis, codec.mean(basis).coefficients(step, layout)
        steps.append(total.vector)
    return steps, states


def matrices(vector: np.ndarray, layout: Layout = MIXED) -> list[np.ndarray]:
    return [vector[t.slice].reshape(t.shape[0], -1) for t in layout.tensors]


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (3, 7), (64, 64), (5000, 3), (3, 5000)])
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_products_are_those_of_float64_whatever_the_shape(shape: tuple[int, int], rank: int) -> None:
    draws = np.random.default_rng(1)
    matrix = draws.standard_normal(shape).astype(np.float32)
    u, v = (draws.standard_normal((n, rank)).astype(np.float32) for n in shape)
    for given, basis in ((matrix, v), (matrix.T, u), (np.asfortranarray(matrix), v)):
        found = product(given, basis)
        assert found.dtype == np.float32
        assert found.flags.c_contiguous
        # One rounding of a sum in float64.
        np.testing.assert_array_equal(found, (given.astype(np.float64) @ basis.astype(np.float64)).astype(np.float32))
    out = matrix.copy()
    add_product(out, u, v, 0.5)
    np.testing.assert_allclose(out, matrix + 0.5 * (u.astype(np.float64) @ v.T), rtol=0, atol=1e-5)


def test_what_two_factors_stand_for_has_the_same_bits_however_it_is_cut() -> None:
    """The server adds into its sum, a replica into its model: one order of additions for all."""
    draws = np.random.default_rng(2)
    u, v = draws.standard_normal((3000, 3)).astype(np.float32), draws.standard_normal((50, 3)).astype(np.float32)
    whole, rows = np.zeros((3000, 50), np.float32), np.zeros((3000, 50), np.float32)
    add_product(whole, u, v)
    for i in range(3000):
        add_product(rows[i : i + 1], u[i : i + 1], v)
    np.testing.assert_array_equal(whole, rows)
    by_hand = u[:, :1] * v[:, 0]
    for c in (1, 2):
        by_hand += u[:, c : c + 1] * v[:, c]
    np.testing.assert_array_equal(whole, by_hand)


@pytest.mark.parametrize("side", [LEFT, RIGHT])
def test_bases_are_orthonormal_and_span_the_factor(side: int) -> None:
    ranks = Ranks(4, 0.0)
    draws = np.random.default_rng(3)
    factor = []
    for stretch in Projection(Basis(side, ()), 4, 0.0).stretches(MIXED):
        matrix = ranks.matrix(stretch)
        factor.append(
            np.zeros((0, 0), np.float32)
            if matrix is None
            # Ill-conditioned: the last columns nearly repeat the first.
            else (draws.standard_normal((matrix[side], matrix[2])) + 100.0).astype(np.float32)
        )
    basis = Basis.of(factor, side, ranks, MIXED, KEY)
    for part, given in zip(basis.parts, factor, strict=True):
        assert part.shape == given.shape
        if part.size:
            wide = part.astype(np.float64)
            np.testing.assert_allclose(wide.T @ wide, np.eye(part.shape[1]), atol=1e-6)
            np.testing.assert_allclose(wide @ (wide.T @ given), given, atol=1e-3)


def test_a_basis_depends_on_its_bytes_and_its_side_alone() -> None:
    ranks = Ranks(2, 2.0)
    basis = Basis.of(None, LEFT, ranks, layout_of((30, 30)), KEY)
    assert basis.id == Basis.of(None, LEFT, ranks, layout_of((30, 30)), KEY).id
    assert basis.id & 1 == LEFT
    # A square matrix: the shapes are the same on both sides.
    other = Basis(RIGHT, basis.parts)
    assert other.id == basis.id | 1
    nudged = (np.nextafter(basis.parts[0], np.float32(2.0)),)
    assert Basis(LEFT, nudged).id != basis.id
    assert 0 < basis.id < 2**63


def test_a_basis_travels_and_is_refused_under_any_other_name() -> None:
    codec = PowerSGD(3)
    for side in (LEFT, RIGHT):
        basis = Basis.of(None, side, codec.ranks, MIXED, KEY)
        again = codec.open_basis(basis.frame(), basis.id, MIXED)
        assert again.id == basis.id
        for wrong in (basis.id ^ 1, basis.id ^ 2, 0):
            with pytest.raises(wire.WireError):
                codec.open_basis(basis.frame(), wrong, MIXED)
        with pytest.raises(wire.WireError):
            PowerSGD(2).open_basis(basis.frame(), basis.id, MIXED)
    nothing = nothing_factored(codec, MIXED)
    assert codec.open_basis(b"", nothing.id, MIXED).id == nothing.id
    assert nothing.id == Basis(RIGHT, nothing.parts).id


def test_what_is_factored_and_what_travels_whole() -> None:
    """Kernels are out x rest; vectors and matrices that factors would not shorten are left alone; ranks have bounds."""
    found = {s.name: Ranks(2, 2.0).matrix(s) for s in LowRank().stretches(MIXED)}
    assert found == {"w0": (40, 30, 2), "w1": (20, 54, 2), "w2": None, "w3": None}
    # r (m + p) * min_rate < m p, as PyTorch's hook has it: equality is not enough.
    (stretch,) = LowRank().stretches(layout_of((12, 6)))
    assert Ranks(2, 2.0).matrix(stretch) is None
    assert Ranks(2, 1.99).matrix(stretch) == (12, 6, 2)
    assert Ranks(99, 0.0).matrix(stretch) == (12, 6, 6)
    (line,) = LowRank().stretches(layout_of((1, 500)))
    assert Ranks(3, 2.0).matrix(line) is None
    assert Ranks(3, 0.0).matrix(line) == (1, 500, 1)
    assert LowRank().schema(layout_of((0, 5)))[:0] == ()


@pytest.mark.parametrize("shape", [(12, 6), (12, 7), (6, 4), (8, 9), (64, 10), (16, 3, 3, 3), (100, 100)])
@pytest.mark.parametrize("rank", [1, 2, 4, 50])
@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0, 3.0])
def test_the_rate_is_that_of_the_authors_package_and_of_the_hook(
    shape: tuple[int, ...], rank: int, rate: float
) -> None:
    """epfml/powersgd ``_should_compress``, ``avg_compressed_size`` and PyTorch's ``_should_compress``, written down."""
    m, p = shape[0], int(np.prod(shape[1:]))
    least = min(rank, m, p)
    (stretch,) = LowRank().stretches(layout_of(shape))
    authors = m * p / (0.5 * 1 * least * sum((m, p))) > rate
    hook = (m + p) * min(rank, m, p) * rate < m * p
    if len(shape) == 2:  # of a kernel they add up all its sizes, which is not what travels
        assert (PowerSGD(rank, min_rate=rate).ranks.matrix(stretch) is not None) == authors
    assert (PowerSGD(rank, form="two-exchange", min_rate=rate).ranks.matrix(stretch) is not None) == hook


@pytest.mark.parametrize("rank", [1, 2, 7])
def test_low_rank_never_adds_error_and_is_exact_up_to_its_rank(rank: int) -> None:
    codec, draws = LowRank(rank, min_rate=1.0), np.random.default_rng(rank)
    for seed in range(20):
        given = drawn(MIXED, seed)
        frame, _ = codec.encode(given, {}, KEY.at(round=seed))
        for before, after in zip(matrices(given.vector), matrices(codec.decode(frame, MIXED)), strict=True):
            assert np.linalg.norm(before - after) <= np.linalg.norm(before) * (1 + 1e-6)
    for have in range(1, rank + 1):
        exact = one(draws.standard_normal((40, have)) @ draws.standard_normal((have, 60)))
        frame, _ = codec.encode(exact, {}, KEY)
        np.testing.assert_allclose(codec.decode(frame, exact.layout), exact.vector, atol=1e-4)
    # One more than the codec has cannot be.
    more = one(draws.standard_normal((40, rank + 1)) @ draws.standard_normal((rank + 1, 60)))
    frame, _ = codec.encode(more, {}, KEY)
    assert np.abs(codec.decode(frame, more.layout) - more.vector).max() > 0.1


@pytest.mark.parametrize("exponent", [-100, -41, 60])
def test_low_rank_finds_the_same_basis_at_every_length_of_an_update(exponent: int) -> None:
    """What counts as zero depends on the update: a power of two before encoding is one after it, bit for bit."""
    codec, given = LowRank(2, min_rate=1.0), drawn(MIXED)
    scaled = Update(np.ldexp(given.vector, exponent), MIXED)
    found = [codec.decode(codec.encode(each, {}, KEY)[0], MIXED) for each in (given, scaled)]
    np.testing.assert_array_equal(np.ldexp(found[0], exponent), found[1])


def test_low_rank_delivers_what_it_declares_in_as_many_bytes() -> None:
    """Written down once more, by LAPACK: P P'M with P a basis of M Q, and whole what has no rank to save."""
    codec, given = LowRank(3, min_rate=1.0), drawn(MIXED)
    frame, _ = codec.encode(given, {}, KEY)
    values, expected = 0, given.vector.astype(np.float64)
    for i, (matrix, tensor) in enumerate(zip(matrices(given.vector), MIXED.tensors, strict=True)):
        m, p = matrix.shape
        if p < 2 or 3 * (m + p) >= m * p:
            values += tensor.size
            continue
        start = orthonormal(np.zeros((p, 3), np.float32), KEY.at(purpose="low-rank", layer=i))
        basis, _ = np.linalg.qr(matrix @ start)
        expected[tensor.slice] = (basis @ (basis.T @ matrix)).reshape(-1)
        values += 3 * (m + p)
    np.testing.assert_allclose(codec.decode(frame, MIXED), expected, rtol=0, atol=1e-5)
    assert values == 3 * 70 + 3 * 74 + 50 + 6 + 7
    assert 4 * values < len(frame) < 4 * values + 120


@pytest.mark.parametrize("side", [LEFT, RIGHT])
@pytest.mark.parametrize("values", ["float32", "bf16", "q8", "q4"])
def test_error_in_a_common_basis_is_at_most_the_matrix(side: int, values: str) -> None:
    codec = PowerSGD(2, values=values)
    basis = Basis.of(None, side, codec.ranks, MIXED, KEY)
    given = drawn(MIXED)
    frame, _ = codec.on(basis).encode(given, {}, KEY)
    for before, after in zip(matrices(given.vector), matrices(codec.on(basis).decode(frame, MIXED)), strict=True):
        assert np.linalg.norm(before - after) ** 2 <= np.linalg.norm(before) ** 2


@pytest.mark.parametrize("side", [LEFT, RIGHT])
def test_frames_of_one_basis_add_up(side: int) -> None:
    """decode(Σ a_i enc_i) == enc-decode of Σ a_i M_i, for weights of any subset; factors are added, not matrices."""
    codec = PowerSGD(3)
    fixed = codec.on(Basis.of(None, side, codec.ranks, MIXED, KEY))
    assert fixed.linear
    given = [drawn(MIXED, seed) for seed in range(5)]
    for chosen in ((0,), (0, 3), (0, 1, 2, 3, 4)):
        share = {i: (i + 1) / sum(j + 1 for j in chosen) for i in chosen}
        total = Update(np.zeros(MIXED.size, np.float32), MIXED)
        apart = np.zeros(MIXED.size)
        for i in chosen:
            frame, _ = fixed.encode(given[i], {}, KEY)
            fixed.gather(frame, share[i], total)
            apart += share[i] * fixed.decode(frame, MIXED).astype(np.float64)
        step = fixed.sum_frame(total)
        fixed.conclude(total)
        mean = Update(np.sum([share[i] * given[i].vector for i in chosen], axis=0).astype(np.float32), MIXED)
        frame, _ = fixed.encode(mean, {}, KEY)
        for found in (total.vector, fixed.decode(step, MIXED), fixed.decode(frame, MIXED)):
            np.testing.assert_allclose(found, apart, rtol=0, atol=1e-5)
        # As dense updates enter the same coordinates.
        fixed.enter(mean)
        fixed.conclude(mean)
        np.testing.assert_allclose(mean.vector, apart, rtol=0, atol=1e-5)


def test_the_cost_of_adding_a_client_is_that_of_its_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 clients form each matrix once, as 2 do."""
    formed = []
    monkeypatch.setattr("fedcomp.codecs.lowrank.add_product", lambda *args: formed.append(1))
    codec = PowerSGD(2)
    fixed = codec.on(Basis.of(None, RIGHT, codec.ranks, MIXED, KEY))
    frame, _ = fixed.encode(drawn(MIXED), {}, KEY)
    for clients in (2, 64):
        formed.clear()
        total = Update(np.zeros(MIXED.size, np.float32), MIXED)
        for _ in range(clients):
            bundle = fixed.open(frame, MIXED)
            assert fixed.norm(bundle, MIXED) > 0
            fixed.gather(bundle, 1 / clients, total)
        fixed.conclude(total)
        assert len(formed) == 2, "of the two matrices that are factored"


def test_frames_of_another_basis_are_refused_and_change_nothing() -> None:
    codec = PowerSGD(2)
    mine, other = (Basis.of(None, RIGHT, codec.ranks, MIXED, KEY.at(partition=p)) for p in (1, 2))
    frame, _ = codec.on(other).encode(drawn(MIXED), {}, KEY)
    assert basis_id_of(frame, stretches(MIXED, "layer"), MIXED) == other.id
    total = Update(np.zeros(MIXED.size, np.float32), MIXED)
    for use in (codec.on(mine).gather, codec.on(mine).accumulate):
        with pytest.raises(wire.SchemaMismatch, match="two bases do not add"):
            use(frame, 1.0, total)
        with pytest.raises(wire.WireError):
            use(wire.encode(list(wire.decode(frame).tensors)), 1.0, total)
    assert not total.vector.any()


@pytest.mark.parametrize("form", ["alternating", "two-exchange"])
@pytest.mark.parametrize("values", ["float32", "q4"])
def test_local_memories_keep_what_each_client_did_not_send(
    form: str, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elementwise, for every client: all that was sent plus the memory is the sum of its updates."""
    codec, shares = PowerSGD(2, form=form, values=values), (1 / 6, 2 / 6, 3 / 6)
    rounds = [[drawn(MIXED, 10 * t + c) for c in range(3)] for t in range(6)]
    frames: list[np.ndarray] = []
    send = PowerSGD.send

    def noted(self, state, basis, layout, key):
        out = send(self, state, basis, layout, key)
        frames.append(self.on(basis).decode(out[0], layout).astype(np.float64))
        return out

    monkeypatch.setattr(PowerSGD, "send", noted)
    steps, states = play(codec, rounds, [1.0, 2.0, 3.0])
    sent = [np.sum(frames[c::3], axis=0) for c in range(3)]
    assert len(frames) == 18
    for c in range(3):
        made = np.sum([updates[c].vector.astype(np.float64) for updates in rounds], axis=0)
        np.testing.assert_allclose(sent[c] + states[c]["memory"], made, rtol=0, atol=2e-4)
    weighed = sum(w * s for w, s in zip(shares, sent, strict=True))
    np.testing.assert_allclose(np.sum(steps, axis=0), weighed, rtol=0, atol=2e-4)


@pytest.mark.parametrize("form", ["alternating", "two-exchange"])
@pytest.mark.parametrize("memory", ["local", "aggregated"])
def test_both_memories_conserve_the_sum_over_clients(form: str, memory: str) -> None:
    """Σ a_i memory_i + Σ steps = Σ a_i Σ updates_i: FedAvg's weights, matrices and tensors that travel whole."""
    codec, weights = PowerSGD(2, form=form, memory=memory), [1.0, 5.0, 2.0]
    rounds = [[drawn(MIXED, 7 * t + c) for c in range(3)] for t in range(8)]
    steps, states = play(codec, rounds, weights)
    shares = np.array(weights) / sum(weights)
    made = sum(s * np.sum([u[c].vector for u in rounds], axis=0, dtype=np.float64) for c, s in enumerate(shares))
    left = sum(s * state["memory"].astype(np.float64) for s, state in zip(shares, states, strict=True))
    np.testing.assert_allclose(np.sum(steps, axis=0, dtype=np.float64) + left, made, rtol=0, atol=5e-4)
    # What travels whole leaves nothing behind, under either.
    whole = slice(MIXED.tensors[2].offset, None)
    assert all(not np.abs(state["memory"][whole]).max() > 1e-5 for state in states)
    assert np.abs(left[:1200]).max() > 0.1


def longest(codec: PowerSGD, updates: list[Update], rounds: int) -> float:
    """Return the longest memory after rounds with constant updates, in updates."""
    _, states = play(codec, [updates] * rounds, [1.0] * len(updates))
    pairs = zip(states, updates, strict=True)
    return max(float(np.linalg.norm(s["memory"]) / np.linalg.norm(u.vector)) for s, u in pairs)


@pytest.mark.parametrize("form", ["alternating", "two-exchange"])
def test_opposite_clients_fill_the_aggregated_memory_and_not_the_local_one(form: str) -> None:
    """The spec's measurement: after t rounds t‖A‖ in PyTorch's form; bounded where a client's own product is taken."""
    draws = np.random.default_rng(4)
    a = np.outer(draws.standard_normal(20), draws.standard_normal(15))
    for memory, least, most in (("local", 0.0, 40.0), ("aggregated", 99.9, 100.1)):
        codec = PowerSGD(1, form=form, memory=memory, min_rate=0.0)
        assert least <= longest(codec, [one(a), one(-a)], 100) <= most


@pytest.mark.parametrize(
    ("form", "memory"), [("two-exchange", "local"), ("two-exchange", "aggregated"), ("alternating", "aggregated")]
)
def test_the_guard_bounds_a_memory_that_diverges(form: str, memory: str) -> None:
    """Four unlike clients of full rank: what cancels in the mean is never sent. What a guard cuts away is lost."""
    unlike = [one(np.random.default_rng(c).standard_normal((20, 15))) for c in range(4)]
    plain = PowerSGD(2, form=form, memory=memory, min_rate=0.0)
    assert longest(plain, unlike, 100) > 3.0 * longest(plain, unlike, 10) > 3.0 * 5.0
    guarded = replace(plain, norm_guard=3.0)
    for rounds in (10, 100):
        # Reached, and not crossed.
        assert longest(guarded, unlike, rounds) == pytest.approx(3.0, rel=1e-4)


def test_the_alternating_form_with_a_local_memory_stays_short() -> None:
    """Measured, and only of this pair: the sides take turns, and every direction is sent sooner or later."""
    unlike = [one(np.random.default_rng(c).standard_normal((20, 15))) for c in range(4)]
    assert longest(PowerSGD(2, min_rate=0.0), unlike, 300) < 12


def test_alternating_every_other_round_is_the_two_exchange_form() -> None:
    """Of a constant matrix without memory: from one Q, M Q becomes a basis and M is sent in it, in both forms."""
    given = one(np.random.default_rng(6).standard_normal((60, 40)))
    forms = {}
    for form, rounds in (("alternating", 8), ("two-exchange", 4)):
        codec = PowerSGD(2, form=form, norm_guard=1e-30)  # a memory of nothing
        forms[form] = play(codec, [[given]] * rounds, [1.0])[0]
    key = Key(5, "basis", 1)
    start = [PowerSGD(2, form=form).start(None, given.layout, key).id for form in forms]
    assert start[0] == start[1]
    for t in range(4):
        np.testing.assert_allclose(forms["alternating"][2 * t + 1], forms["two-exchange"][t], rtol=0, atol=2e-5)
    assert np.abs(forms["alternating"][0] - forms["two-exchange"][0]).max() > 0.01


@pytest.mark.parametrize("form", ["alternating", "two-exchange"])
def test_warm_start_finds_the_top_singular_vectors(form: str) -> None:
    """Without memory the step converges to the best approximation of the rank; a cold start never gets there."""
    draws = np.random.default_rng(8)
    u, _ = np.linalg.qr(draws.standard_normal((50, 40)))
    v, _ = np.linalg.qr(draws.standard_normal((40, 40)))
    matrix = u * (10.0 * 0.7 ** np.arange(40)) @ v.T
    best = u[:, :2] * (10.0 * 0.7 ** np.arange(2)) @ v[:, :2].T
    given = one(matrix)
    found = {}
    for warm in (True, False):
        codec = PowerSGD(2, form=form, warm_start=warm, norm_guard=1e-30)
        steps, _ = play(codec, [[given]] * 60, [1.0])
        found[warm] = np.linalg.norm(steps[-1] - best.reshape(-1)) / np.linalg.norm(best)
    assert found[True] < 1e-4
    assert found[False] > 0.05


@pytest.mark.parametrize("form", ["alternating", "two-exchange"])
def test_full_rank_is_the_mean_itself(form: str) -> None:
    """Spec 7.1.7: r = min(rows, columns) is exact, to 1e-5 - on the side where the basis is square, or after both."""
    layout = layout_of((6, 40), rest=3)
    codec = PowerSGD(6, form=form, min_rate=0.0)
    rounds = [[drawn(layout, 3 * t + c) for c in range(3)] for t in range(4)]
    steps, _ = play(codec, rounds, [1.0, 2.0, 1.0])
    wanted = [np.average([u.vector for u in updates], axis=0, weights=[1.0, 2.0, 1.0]) for updates in rounds]
    if form == "two-exchange":
        for step, mean in zip(steps, wanted, strict=True):
            np.testing.assert_allclose(step, mean, rtol=0, atol=1e-5)
    # The alternating form sees all of it from the left, and there brings what the last round left as well.
    for t in (1, 3):
        np.testing.assert_allclose(np.sum(steps[: t + 1], axis=0), np.sum(wanted[: t + 1], axis=0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ["alternating", "two-exchange"])
def test_zero_matrices_and_zero_columns_are_no_nan(form: str) -> None:
    """Epsilon 0 divides zero by zero in PyTorch's hook; here a direction that is zero is drawn again."""
    nothing = Update(np.zeros(MIXED.size, np.float32), MIXED)
    steps, states = play(PowerSGD(3, form=form), [[nothing] * 2] * 3, [1.0, 1.0])
    assert not np.any(steps)
    assert not any(state["memory"].any() for state in states)
    # A matrix of rank 1 in a codec of rank 3, after nothing: the other columns must not stay dead.
    later = drawn(MIXED)
    steps, _ = play(PowerSGD(3, form=form), [[nothing]] * 2 + [[later]] * 30, [1.0])
    assert np.isfinite(steps).all()
    sent, made = np.sum(steps, axis=0, dtype=np.float64), 30 * later.vector.astype(np.float64)
    assert np.linalg.norm(made - sent) < 0.5 * np.linalg.norm(made)


def test_an_update_that_still_waits_joins_the_memory_and_nothing_is_lost() -> None:
    codec, first, second = PowerSGD(2), drawn(MIXED, 1), drawn(MIXED, 2)
    state = codec.begin(second, codec.begin(first, codec.init(MIXED), KEY), KEY.at(round=2))
    np.testing.assert_array_equal(codec.total(state, MIXED), first.vector + second.vector)
    with pytest.raises(StateError, match="train first"):
        codec.send(codec.init(MIXED), Basis.of(None, RIGHT, codec.ranks, MIXED, KEY), MIXED, KEY)


@pytest.mark.parametrize("memory", ["local", "aggregated"])
@pytest.mark.parametrize("values", ["float32", "q8"])
def test_a_frame_that_was_lost_goes_back_whole(memory: str, values: str) -> None:
    codec = PowerSGD(2, memory=memory, values=values)
    basis = Basis.of(None, LEFT, codec.ranks, MIXED, KEY)
    given = drawn(MIXED)
    waiting = codec.begin(given, codec.init(MIXED), KEY)
    frame, after = codec.send(waiting, basis, MIXED, KEY)
    back = codec.rollback(after, frame, MIXED)
    np.testing.assert_allclose(back["memory"], given.vector, rtol=0, atol=1e-6)
    assert back.keys() == codec.settle(waiting, MIXED).keys() - set() | {"round"}
    # Once rolled back there is nothing that a mean could correct.
    step = codec.mean(basis).sum_frame(Update(np.zeros(MIXED.size, np.float32), MIXED))
    np.testing.assert_array_equal(codec.correct(back, step, MIXED)["memory"], back["memory"])


def test_the_aggregated_memory_takes_the_mean_of_its_own_basis_only() -> None:
    codec = PowerSGD(2, memory="aggregated")
    mine, other = (Basis.of(None, LEFT, codec.ranks, MIXED, KEY.at(partition=p)) for p in (1, 2))
    waiting = codec.begin(drawn(MIXED), codec.init(MIXED), KEY)
    _, after = codec.send(waiting, mine, MIXED, KEY)
    step = codec.mean(other).sum_frame(Update(np.zeros(MIXED.size, np.float32), MIXED))
    with pytest.raises(wire.SchemaMismatch, match="two bases"):
        codec.correct(after, step, MIXED)


@pytest.mark.parametrize("length", [1e-30, 1e-3, 1.0, 1e3, 1e25])
def test_what_is_multiplied_first_has_a_length_of_its_own(length: float) -> None:
    """The basis that is found does not depend on how long the last factors were, to the last bit."""
    codec = PowerSGD(2, form="two-exchange")
    given = drawn(MIXED)
    key = Key(0, "basis", 1)
    basis = codec.start(None, MIXED, key)
    factors = [part * np.float32(3.7) for part in basis.parts]
    power = np.float32(2.0 ** round(np.log2(length)))
    found = []
    for parts in (factors, [part * power for part in factors]):
        start = codec.start((basis, parts), MIXED, key)
        assert all(np.linalg.norm(part.astype(float), axis=0).max() <= 1.0 for part in start.parts if part.size)
        frame = codec.first(codec.begin(given, codec.init(MIXED), key), start, MIXED, key)
        found.append(codec.between(codec.mean(start).coefficients(frame, MIXED), MIXED, key).id)
    assert found[0] == found[1]


@pytest.mark.parametrize("form", ["alternating", "two-exchange"])
@pytest.mark.parametrize("value", [1e37, 1e38, 3e38])
def test_what_could_overflow_in_a_basis_never_waits(form: str, value: float) -> None:
    """Refused before it is kept: the state is what it was, and the next update is sent as if nothing had been."""
    codec = PowerSGD(2, form=form)
    state = codec.init(MIXED)
    huge = Update(np.full(MIXED.size, value, np.float32), MIXED)
    with pytest.raises(NonFiniteUpdate, match="overflow"):
        codec.begin(huge, state, KEY)
    assert not state["memory"].any()


def test_a_memory_that_could_not_be_sent_stays_the_local_one() -> None:
    codec = PowerSGD(1, memory="aggregated", min_rate=0.0)
    layout = layout_of((4, 5))
    basis = codec.start(None, layout, KEY)
    near = 0.9 * LONGEST
    one = np.zeros(20, np.float32)
    one[0] = near
    _, state = codec.send(codec.begin(Update(one, layout), codec.init(layout), KEY), basis, layout, KEY)
    mean = codec.mean(basis)
    total = Update(-one, layout)
    mean.enter(total)
    total.vector[...] *= np.float32(4.0)
    after = codec.correct(state, mean.sum_frame(total), layout)
    # The mean of others, subtracted, would pass what can be sent; the next update can.
    codec.begin(Update(np.ones(20, np.float32), layout), after, KEY)


def test_dense_rounds_factor_nothing() -> None:
    codec = replace(PowerSGD(2), dense=True)
    given = drawn(MIXED)
    (step,), (state,) = play(codec, [[given]], [1.0])
    np.testing.assert_array_equal(step, given.vector)
    assert not state["memory"].any()
    # What comes after one begins with a draw, on both sides of the wire.
    last = nothing_factored(codec, MIXED), tuple(np.zeros((0, 0), np.float32) for _ in range(4))
    assert PowerSGD(2).start(last, MIXED, KEY).id == PowerSGD(2).start(None, MIXED, KEY).id


def test_a_projection_has_no_configuration() -> None:
    with pytest.raises(ConfigError, match="send its basis"):
        Projection(Basis(LEFT, ()), 1, 2.0).get_config()


def test_columns_that_repeat_are_drawn_again_at_both_ends_alike() -> None:
    given = np.zeros((9, 3), np.float32)
    given[:, 0] = 1.0
    given[:, 1] = 1.0
    bases = [orthonormal(given, KEY) for _ in range(2)]
    np.testing.assert_array_equal(*bases)
    np.testing.assert_allclose(bases[0].T @ bases[0], np.eye(3), atol=1e-12)


@pytest.mark.parametrize("exponent", [-100, -50, 90])
def test_a_basis_is_that_of_the_directions_however_small_or_large_they_are(exponent: int) -> None:
    ranks = PowerSGD(2).ranks
    factor = [np.float32(np.random.default_rng(i).standard_normal((rows, 2))) for i, rows in enumerate((40, 20))]
    given = [*factor, *[np.zeros((0, 0), np.float32)] * 2]
    scaled = [np.ldexp(part, exponent) for part in given]
    assert Basis.of(scaled, LEFT, ranks, MIXED, KEY).id == Basis.of(given, LEFT, ranks, MIXED, KEY).id
