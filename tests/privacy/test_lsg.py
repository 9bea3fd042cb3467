"""Low-rank plus sparse updates: projections, masks, one joint clip, and what a step costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from dpsgd_problems import gradient, loss, net, records, training, weights
from torch import nn

from fedcomp.errors import ConfigError, LayoutError, NonFiniteUpdate
from fedcomp.privacy.lsg import LowRankPlan, carriers, fraction, kept, project, reconstruct
from fedcomp.privacy.mechanism import GridGaussian
from fedcomp.rng import Key

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return Key(seed, "normal").generator().standard_normal(shape)


def orthonormal(p: int, q: int, r: int) -> tuple[np.ndarray, np.ndarray]:
    """Return carriers in float64, for identities that hold to its precision."""
    return np.linalg.qr(normal(p, r, seed=1))[0], np.linalg.qr(normal(q, r, seed=2))[0].T


def test_2_6_reconstruction_is_the_orthogonal_projection_onto_what_the_carriers_span() -> None:
    g, (left, right) = normal(64, 32), orthonormal(64, 32, 4)
    once = reconstruct(*project(g, left, right), left, right)
    twice = reconstruct(*project(once, left, right), left, right)
    np.testing.assert_allclose(twice, once, atol=1e-13)
    inside = left @ normal(4, 32, seed=3) + normal(64, 4, seed=4) @ right
    np.testing.assert_allclose(reconstruct(*project(inside, left, right), left, right), inside, atol=1e-13)
    assert abs(np.vdot(g - once, inside)) < 1e-11 * np.linalg.norm(inside)
    assert np.linalg.norm(once) < 0.9 * np.linalg.norm(g)
    # Without the cross term what both carriers see counts twice.
    a, b = project(g, left, right)
    assert np.linalg.norm(a @ right + left @ b - once) > 1.0


def test_carriers_are_orthonormal_and_find_the_directions_of_their_target() -> None:
    low = normal(40, 3) @ normal(3, 30, seed=1)
    left, right = carriers(low, 3, Key(0))
    assert left.shape == (40, 3)
    assert right.shape == (3, 30)
    assert left.dtype == right.dtype == np.float32
    np.testing.assert_allclose(left.T @ left, np.eye(3), atol=1e-6)
    np.testing.assert_allclose(right @ right.T, np.eye(3), atol=1e-6)
    # Rank 3 is found whole: all of the target is in the span.
    np.testing.assert_allclose(reconstruct(*project(low, left, right), left, right), low, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_carriers_of_extreme_targets_are_orthonormal(scale: float) -> None:
    left, right = carriers(scale * normal(9, 8), 2, Key(0))
    np.testing.assert_allclose(left.T @ left, np.eye(2), atol=1e-6)
    np.testing.assert_allclose(right @ right.T, np.eye(2), atol=1e-6)


def test_carriers_depend_on_public_matter_alone() -> None:
    a, b = carriers(normal(9, 8), 2, Key(0)), carriers(normal(9, 8), 2, Key(0))
    for first, second in zip(a, b, strict=True):
        np.testing.assert_array_equal(first, second)
    with pytest.raises(NonFiniteUpdate):
        carriers(np.full((4, 4), np.nan), 2, Key(0))
    for wrong in (0, 9):
        with pytest.raises(ConfigError, match="rank"):
            carriers(normal(9, 8), wrong, Key(0))


def test_carriers_of_a_history_follow_the_way_the_model_went() -> None:
    plan = LowRankPlan.of({"w": (20, 15)}, 1)
    before = normal(300)
    went = np.outer(normal(20, seed=5), normal(15, seed=6)).reshape(-1)
    # One that keeps the norm: the difference of the normed models is then the way itself.
    model = before + went
    model *= np.linalg.norm(before) / np.linalg.norm(model)
    target = model / np.linalg.norm(model) - before / np.linalg.norm(before)
    (pair,) = plan.carriers(model, Key(0), before)
    best = np.linalg.svd(target.reshape(20, 15))[0][:, 0]
    assert abs(float(best @ pair[0][:, 0])) > 0.9
    (alone,) = plan.carriers(model, Key(0))
    assert abs(float(best @ alone[0][:, 0])) < 0.9


def test_a_plan_factors_matrices_and_convolutions_and_leaves_the_rest_whole() -> None:
    shapes = {"conv": (16, 3, 5, 5), "bias": (16,), "last": (10, 16), "small": (3, 40), "scalar": ()}
    plan = LowRankPlan.of(shapes, 3, whole=["la*"])
    assert [piece.rank for piece in plan.pieces] == [3, 0, 0, 0, 0]
    assert plan.pieces[0].matrix == (16, 75)
    assert [piece.short for piece in plan.pieces] == [3 * 91, 16, 160, 120, 1]
    assert plan.size == 1200 + 16 + 160 + 120 + 1
    model = normal(plan.size)
    pairs = plan.carriers(model, Key(0))
    rows = normal(5, plan.size, seed=9)
    short = np.concatenate(plan.project(rows, pairs), axis=-1)
    assert short.shape == (5, plan.short)
    for row, one in zip(rows, short, strict=True):
        np.testing.assert_array_equal(np.concatenate(plan.project(row, pairs)), one)
        back = plan.reconstruct(one, pairs)
        np.testing.assert_allclose(back[1200:], row[1200:])
        left, right = pairs[0]
        matrix = row[:1200].reshape(16, 75)
        np.testing.assert_allclose(
            back[:1200].reshape(16, 75), reconstruct(*project(matrix, left, right), left, right), atol=1e-5
        )
    with pytest.raises(LayoutError):
        plan.reconstruct(short[0, 1:], pairs)


def test_schedules_go_from_everything_to_the_fraction_by_the_step_alone() -> None:
    for schedule in ("linear", "cosine"):
        shares = [fraction(schedule, step, 11, 0.2) for step in range(13)]
        assert shares[0] == 1.0
        assert shares[10:] == pytest.approx([0.2] * 3)
        assert all(a > b for a, b in itertools.pairwise(shares[:11]))
        assert shares[5] == pytest.approx(0.6)
    assert fraction("constant", 3, 0, 0.2) == 0.2
    for wrong in (("linear", 0, 0, 0.5), ("step", 0, 5, 0.5), ("constant", 0, 5, 0.0), ("constant", 0, 5, 1.5)):
        with pytest.raises(ConfigError):
            fraction(*wrong)


def test_2_6_a_mask_comes_from_the_seed_and_the_step_and_is_another_in_every_step() -> None:
    masks = [kept(1000, 0.25, Key(0, round=step)) for step in range(40)]
    assert all(len(mask) == 250 and (np.diff(mask) > 0).all() for mask in masks)
    counts = np.bincount(np.concatenate(masks), minlength=1000)
    # Each coordinate is in a quarter of 40 masks; the standard deviation is 2.7.
    assert counts.min() > 0
    assert counts.max() < 10 + 5.5 * 2.74
    assert len({mask.tobytes() for mask in masks}) == 40
    np.testing.assert_array_equal(kept(5, 1.0, Key(0)), np.arange(5))
    assert kept(5, 1e-9, Key(0)).size == 1


def test_masks_by_noisy_magnitude_keep_the_large_and_leave_no_coordinate_out_for_ever() -> None:
    magnitude = np.zeros(200)
    magnitude[::4] = np.linspace(1.0, 2.0, 50) * (-1.0) ** np.arange(50)
    masks = [kept(200, 0.5, Key(0, round=step), magnitude) for step in range(60)]
    assert all(mask.size == 100 for mask in masks)
    assert all(np.isin(np.arange(0, 200, 4), mask).all() for mask in masks)
    assert np.unique(np.concatenate(masks)).size == 200
    with pytest.raises(LayoutError):
        kept(200, 0.5, Key(0), np.zeros(10))


# In DP-SGD.


@pytest.mark.slow
@pytest.mark.parametrize("method", ["random-mask", "lsg"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_2_6_the_mask_is_independent_of_the_data(method: str, schedule: str) -> None:
    masks = []
    for seed in (0, 1):
        module = net()
        with training(
            module, records(8, seed=seed), method, keep=0.3, schedule=schedule, steps=4, noise_multiplier=0.5
        ) as t:
            found = []
            for batch in t.loader:
                t.step(batch, loss) if seed else t.step([x[:0] for x in batch], loss)
                found.append(t.optimizer.kept())
            masks.append(found)
    for a, b in zip(*masks, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(masks[0][0], masks[0][1])


def test_2_6_noise_is_on_the_kept_coordinates_alone_and_clipping_comes_after_the_mask() -> None:
    module = net()
    data = records(1)
    with training(module, data, "random-mask", keep=0.25, noise_multiplier=1.0, max_grad_norm=1e-3) as t:
        chosen = t.optimizer.kept()
        t.step([x[:0] for x in data.tensors], loss)
        noise = gradient(module)
    assert chosen.size == 14
    assert np.count_nonzero(np.delete(noise, chosen)) == 0
    assert np.count_nonzero(noise[chosen]) == 14
    module = net()
    with training(module, data, "random-mask", keep=0.25, max_grad_norm=1e-3) as t:
        t.step([*data.tensors], loss)
        given = gradient(module)
    # All of the norm C is in the kept coordinates; clipped before, it would be the half of it.
    assert np.linalg.norm(given) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.slow
def test_2_6_full_rank_and_no_mask_is_dp_sgd_exactly() -> None:
    found = []
    for method, options in (("dp-sgd", {}), ("lsg", {"rank": 99, "keep": 1.0}), ("random-mask", {"keep": 1.0})):
        module = net()
        with training(module, records(9), method, max_grad_norm=100.0, steps=3, **options) as t:
            for batch in t.loader:
                t.step(batch, loss)
        found.append(weights(module))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_2_6_square_carriers_in_dp_sgd_change_nothing_beyond_rounding() -> None:
    """Factored with rank one below full: what is lost is what no carrier of that rank can hold."""
    data = records(9)
    module = net()
    with training(module, data, max_grad_norm=100.0) as t:
        t.step([*data.tensors], loss)
        plain = gradient(module)
    module = net()
    with training(module, data, "lsg", rank=2, keep=1.0, max_grad_norm=100.0) as t:
        pairs = t.optimizer.carriers()
        assert sum(pair is not None for pair in pairs) == 2
        t.step([*data.tensors], loss)
        found = gradient(module)
        plan = t.optimizer.plan
    naive = plan.reconstruct(np.concatenate(plan.project(plain, pairs)), pairs)
    np.testing.assert_allclose(found, naive, atol=100.0 / 256 / 2)


def test_2_6_the_joint_clip_bounds_all_layers_and_both_carriers_together() -> None:
    data, clip = records(1), 0.5
    module = net()
    with training(module, data, "lsg", keep=1.0, max_grad_norm=clip, loss_reduction="sum") as t:
        mechanism = t.optimizer.mechanism()
        assert isinstance(mechanism, GridGaussian)
        t.optimizer.zero_grad()
        (1e20 * nn.functional.cross_entropy(module(data.tensors[0]), data.tensors[1], reduction="sum")).backward()
        (rows,) = (t.optimizer.rows(),)
        t.optimizer.zero_grad()
        short = t.optimizer.reduce(rows)
        (1e20 * nn.functional.cross_entropy(module(data.tensors[0]), data.tensors[1], reduction="sum")).backward()
        t.optimizer.clip_and_accumulate()
        joint = t.optimizer.total * mechanism.step
    assert torch.linalg.vector_norm(short) > 1e15
    assert 0.98 * clip <= np.linalg.norm(joint) <= clip * (1 + 1e-6)


def test_carriers_stay_for_as_many_steps_as_they_are_to_serve() -> None:
    module = net()
    with training(module, records(9), "lsg", refresh=2, steps=4, history=2, noise_multiplier=0.1) as t:
        seen = []
        for batch in t.loader:
            seen.append(t.optimizer.carriers()[0][0])
            t.step(batch, loss)
    assert np.array_equal(seen[0], seen[1])
    assert np.array_equal(seen[2], seen[3])
    assert not np.array_equal(seen[1], seen[2])


def test_noisy_magnitude_follows_what_was_released() -> None:
    module = net()
    with training(module, records(9), "random-mask", mask="noisy_magnitude", keep=0.2, steps=6, lr=1e-6) as t:
        for batch in t.loader:
            t.step(batch, loss)
        former, chosen = t.optimizer.former(), t.optimizer.kept()
    largest = np.argsort(-np.abs(former), kind="stable")[: chosen.size // 2]
    assert np.isin(largest, chosen).all()
    assert np.count_nonzero(former) > chosen.size
