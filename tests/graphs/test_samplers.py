"""What samplers choose, favour and report, and what settings refuse."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from graph_toys import toy_parts

from fedcomp.errors import ConfigError
from fedcomp.graphs.base import Conditions, GraphPart, Operator
from fedcomp.graphs.inclusion import local_mass, waterfill
from fedcomp.graphs.plan import plan_layer, plan_step, reach
from fedcomp.graphs.samplers import column_ends, row_probabilities
from fedcomp.graphs.scale import scale
from fedcomp.graphs.settings import SAMPLERS, SamplerSettings
from fedcomp.rng import Key


def columns(part: GraphPart, ids: Any) -> tuple[Any, Any, Any]:
    """Return U as a dense matrix over its candidates, the candidates, and which of them the part owns."""
    rows = part.structure.rows(np.asarray(ids))
    candidates, positions = np.unique(rows.columns, return_inverse=True)
    u = np.zeros((len(ids), len(candidates)))
    u[np.repeat(np.arange(len(ids)), np.diff(rows.indptr)), positions] = rows.values
    return u, candidates, np.isin(candidates, part.ids)


@pytest.mark.parametrize("weight", ["l1", "count", "l2sq"])
@pytest.mark.parametrize(
    "rule", [{"mode": "fixed"}, {"mode": "matched", "budget": 1.0}, {"mode": "worst", "budget": 1.0}]
)
def test_7_05_scale_one_selects_the_columns_of_the_unskewed_sampler(weight: str, rule: dict[str, Any]) -> None:
    part = toy_parts(80, 4, 8.0)[1]
    batch = part.train[:6]
    u, candidates, _ = columns(part, batch)
    base = {"l1": np.abs(u).sum(0), "count": (u != 0).sum(0), "l2sq": np.square(u).sum(0)}[weight]
    for seed in range(5):
        operator = plan_layer(part, batch, SamplerSettings(n=9, weight=weight, **rule), 1, Key(seed, "test").uniform)
        pi = waterfill(base.astype(float), 9)
        kept = Key(seed, "test").uniform(len(candidates)) < pi
        assert operator.columns.tolist() == candidates[kept].tolist()
        assert operator.scale == 1.0


@pytest.mark.parametrize("estimator", ["poisson", "multinomial"])
def test_local_mass_and_scale_are_those_of_this_batch_and_layer(estimator: str) -> None:
    part = toy_parts(80, 4, 8.0)[2]
    settings = SamplerSettings(n=12, budget=1.3, estimator=estimator)
    plans = [plan_step(part, part.train[at : at + 4], settings, Key(at, "test")) for at in (0, 4, 8)]
    for plan in plans:
        for operator in plan.layers:
            u, _, owned = columns(part, operator.rows)
            weights = np.abs(u).sum(0)
            lam = weights[owned].sum() / weights.sum()
            assert operator.local_mass == pytest.approx(lam, rel=1e-12)
            assert operator.scale == pytest.approx(scale("matched", lam, 1.3), rel=1e-9)
    assert len({operator.scale for plan in plans for operator in plan.layers}) == 6


def test_measured_takes_norms_from_features_and_from_what_was_seen_and_the_mean_for_the_rest() -> None:
    part = toy_parts(60, 3, 6.0)[0]
    batch = part.train[:5]
    u, candidates, owned = columns(part, batch)
    remote = candidates[~owned]
    norms_of = {int(one): 3.0 + at for at, one in enumerate(remote[::2])}
    settings = SamplerSettings(n=5, mode="measured", budget=1.4, layers=1)

    def expected(norms: Any) -> float:
        weights = np.abs(u).sum(0)
        ratio = np.square(u).sum(0) * np.square(norms) * weights.sum() / weights
        lam = weights[owned].sum() / weights.sum()
        near, far = ratio[owned].sum(), ratio[~owned].sum()
        return scale("measured", lam, 1.4, a_local=near, a_remote=far)

    norms = np.full(len(candidates), np.nan)
    norms[owned] = np.linalg.norm(part.features[np.searchsorted(part.ids, candidates[owned])], axis=1)
    norms[~owned] = [norms_of.get(int(one), np.nan) for one in remote]
    norms[np.isnan(norms)] = np.sqrt(np.nanmean(np.square(norms)))
    found = plan_step(part, batch, settings, Key(0), Conditions(norms=[norms_of])).layers[0].scale
    assert found == pytest.approx(expected(norms), rel=1e-9)
    # No features are of a hidden layer: there, without any norm, all count alike.
    hidden = plan_step(part, batch, SamplerSettings(n=5, mode="measured", budget=1.4), Key(0)).layers[1].scale
    assert hidden == pytest.approx(expected(np.ones(len(candidates))), rel=1e-9)
    assert 1.0 < found != hidden


def test_measured_in_rows_is_the_rule_of_every_row() -> None:
    part = toy_parts(60, 3, 8.0)[0]
    batch = part.train[:4]
    norms = {one: 1.0 + one % 5 for one in range(60)}
    settings = SamplerSettings(sampler="node", fanout=3, mode="measured", budget=1.2)
    found = plan_step(part, batch, settings, Key(0), Conditions(norms=[{}, norms])).layers[1]
    expected = []
    for row in batch:
        u, candidates, owned = columns(part, [row])
        energy = np.square(u[0] * [norms[int(one)] for one in candidates]) * len(candidates)
        lam = float(owned.mean())
        expected.append(scale("measured", lam, 1.2, a_local=energy[owned].sum(), a_remote=energy[~owned].sum()))
    assert found.scale == pytest.approx(np.mean(expected), rel=1e-9)
    assert len({round(one, 6) for one in expected}) > 1


@pytest.mark.parametrize("seed", range(3))
def test_inclusion_of_rows_is_water_filling_row_by_row(seed: int) -> None:
    u = Key(seed, "test").uniform(300).reshape(3, 100)
    degree = (u[0] * 12).astype(int)
    local = (u[1] * (degree + 1)).astype(int)
    s = np.where((local > 0) & (local < degree), 1.0 + 15.0 * u[2], 1.0)
    s[::10] = np.where((local > 0) & (local < degree), 1e9, 1.0)[::10]
    for fanout in (1, 3, 5, 20):
        total = np.where(degree > 0, s * local + degree - local, 1.0)
        near, far = row_probabilities(degree, local, s, total, fanout)
        for one in range(100):
            weights = np.array([s[one]] * local[one] + [1.0] * (degree[one] - local[one]))
            pi = np.array([near[one]] * local[one] + [far[one]] * (degree[one] - local[one]))
            assert np.allclose(pi, waterfill(weights, fanout), rtol=1e-9, atol=0.0)
            assert (pi > 0.0).all()


@pytest.mark.parametrize("mode", ["matched", "worst", "fixed"])
def test_every_row_has_the_scale_of_its_own_local_mass(mode: str) -> None:
    part = toy_parts(80, 4, 8.0)[1]
    settings = SamplerSettings(sampler="node", fanout=2, mode=mode, budget=1.2, scale=3.0)
    # A uniform number of 0 keeps every entry, with the weight it always has.
    found = plan_layer(part, part.train, settings, 0, np.zeros)
    masses = set()
    for at, row in enumerate(part.train):
        u, _, owned = columns(part, [row])
        masses.add(lam := float(owned.mean()))
        pi = waterfill(np.where(owned, scale(mode, lam, 1.2, s=3.0), 1.0), 2)
        assert np.allclose(found.values[found.indptr[at] : found.indptr[at + 1]], u[0] / pi, rtol=1e-12, atol=0.0)
    assert len(masses) > 5


def test_inclusion_of_rows_leaves_no_entry_out_where_rounding_would() -> None:
    # fanout * s and the total are the same number here, although one entry is not favoured.
    near, far = row_probabilities(np.array([3]), np.array([2]), np.array([1e300]), np.array([2e300]), 2)
    assert 0.0 < far[0] < 1e-290
    assert near[0] == 1.0


def test_kept_own_columns_count_neither_in_the_weights_nor_towards_n() -> None:
    part = toy_parts(80, 4, 8.0)[1]
    batch = part.train[:6]
    u, candidates, owned = columns(part, batch)
    weights = np.where(np.isin(candidates, batch), 0.0, np.abs(u).sum(0))
    for estimator in ("poisson", "multinomial"):
        settings = SamplerSettings(n=10, keep_self=True, mode="fixed", scale=3.0, estimator=estimator)
        found = plan_layer(part, batch, settings, 0, Key(2, "test").uniform)
        assert found.local_mass == pytest.approx(local_mass(weights, owned), rel=1e-12)
        skewed = np.where(owned, 3.0 * weights, weights)
        p = skewed / skewed.sum()
        pi = waterfill(skewed, 10) if estimator == "poisson" else 1.0 - (1.0 - p) ** 10
        assert found.expected_remote == pytest.approx(pi[~owned].sum(), rel=1e-9)
        if estimator == "poisson":
            kept = (Key(2, "test").uniform(len(candidates)) < pi) | np.isin(candidates, batch)
            assert found.columns.tolist() == candidates[kept].tolist()


def counted(part: GraphPart, settings: SamplerSettings, draws: int) -> tuple[np.ndarray, list[Operator]]:
    found = [plan_layer(part, part.train, settings, 0, Key(seed, "test").uniform) for seed in range(draws)]
    return np.array([int((~part.owned(one.columns)).sum()) for one in found]), found


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"n": 20},
        {"n": 20, "mode": "fixed", "scale": 8.0},
        {"n": 20, "estimator": "multinomial"},
        {"sampler": "node", "fanout": 3},
        {"sampler": "node", "fanout": 3, "estimator": "multinomial"},
        {"sampler": "fastgcn", "n": 30},
        {"sampler": "boundary", "q": 0.3},
    ],
)
def test_7_09_mean_remote_count_is_the_sum_of_remote_inclusion_probabilities(options: dict[str, Any]) -> None:
    part = toy_parts(60, 3, 6.0)[0]
    remote, found = counted(part, SamplerSettings(**options), 500)
    assert len({one.expected_remote for one in found}) == 1
    assert abs(remote.mean() - found[0].expected_remote) < 4.0 * remote.std() / np.sqrt(500)
    assert remote.std() > 0.0


def test_boundary_keeps_all_that_is_owned_and_local_and_full_what_they_say() -> None:
    part = toy_parts(60, 3, 6.0)[0]
    _, candidates, owned = columns(part, part.train)
    for sampler, least, most in (
        ("boundary", candidates[owned], candidates),
        ("local", candidates[owned], candidates[owned]),
        ("full", candidates, candidates),
    ):
        operator = plan_layer(part, part.train, SamplerSettings(sampler=sampler, q=0.3), 0, Key(1).uniform)
        assert set(least) <= set(operator.columns) <= set(most)
        chance = {"boundary": 0.3, "local": 0.0, "full": 1.0}[sampler]
        assert operator.expected_remote == pytest.approx(chance * (~owned).sum(), rel=1e-12)


def test_ladies_keeps_n_and_renormalised_rows_sum_as_rows_of_p() -> None:
    part = toy_parts(60, 3, 6.0)[0]
    for renormalise in (False, True):
        settings = SamplerSettings(sampler="ladies", n=15, renormalise=renormalise)
        operator = plan_layer(part, part.train, settings, 1, Key(3).uniform)
        assert len(operator.columns) == 15
        assert operator.expected_remote == (~part.owned(operator.columns)).sum()
        at = np.repeat(np.arange(len(part.train)), np.diff(operator.indptr))
        sums = np.bincount(at, operator.values, len(part.train))
        u, _, _ = columns(part, part.train)
        has = sums > 0.0
        assert np.allclose(sums[has], u.sum(1)[has]) is renormalise
    # With n above the number of candidates all are kept, and still weigh as if they had been drawn with replacement.
    u, candidates, _ = columns(part, part.train)
    every = plan_layer(part, part.train, SamplerSettings(sampler="ladies", n=1000), 1, Key(3).uniform)
    p = np.square(u).sum(0) / np.square(u).sum()
    assert np.array_equal(every.columns, candidates)
    assert np.allclose(every.values, u[u > 0.0] / (len(p) * np.broadcast_to(p, u.shape)[u > 0.0]))
    assert "without replacement" in SamplerSettings(sampler="ladies").biased
    assert [name for name in SAMPLERS if SamplerSettings(sampler=name).biased] == ["ladies", "local"]


def test_fastgcn_draws_from_column_norms_of_all_of_p_by_a_table_that_is_made_once() -> None:
    part = toy_parts(60, 3, 6.0, kind="mean")[0]
    ends = column_ends(part)
    p = np.zeros((60, 60))
    rows = part.structure.rows(np.arange(60))
    p[np.repeat(np.arange(60), np.diff(rows.indptr)), rows.columns] = rows.values
    assert np.allclose(np.diff(ends, prepend=0.0), np.square(p).sum(0) / np.square(p).sum())
    plan_step(part, part.train[:3], SamplerSettings(sampler="fastgcn", n=5), Key(0))
    assert column_ends(part) is ends
    halo = toy_parts(60, 3, 6.0, structure="halo")[0]
    with pytest.raises(ConfigError, match="structure 'full'"):
        plan_step(halo, halo.train[:3], SamplerSettings(sampler="fastgcn", n=5), Key(0))


def test_favour_halo_favours_what_is_so_many_hops_from_owned_nodes() -> None:
    part = toy_parts(90, 6, 3.0, seed=2)[1]
    settings = SamplerSettings(n=40, favour="halo", mode="fixed", scale=4.0, layers=5)
    near = {0: set(part.ids.tolist())}
    for hop in (1, 2, 3):
        near[hop] = near[hop - 1] | set(part.structure.rows(np.array(sorted(near[hop - 1]))).columns.tolist())
        assert set(reach(part, hop).tolist()) == near[hop]
    plan = plan_step(part, part.train, settings, Key(3))
    for level, operator in enumerate(plan.layers):
        u, candidates, _ = columns(part, operator.rows)
        weights = np.abs(u).sum(0)
        favoured = np.isin(candidates, sorted(near.get(level, set(range(90)))))
        assert operator.local_mass == pytest.approx(weights[favoured].sum() / weights.sum(), rel=1e-12)
        assert favoured.all() == (level >= 3)
        assert operator.scale == (1.0 if level >= 3 else 4.0)
    owned = plan_step(part, part.train, SamplerSettings(n=40, mode="fixed", scale=4.0, layers=5), Key(3))
    assert owned.layers[3].local_mass < 1.0


def test_settings_travel_as_plain_data() -> None:
    settings = SamplerSettings(sampler="node", n=(5, 6, 7), layers=3, budget=2, q=np.float32(0.5), keep_self=True)
    assert SamplerSettings.from_config(json.loads(json.dumps(settings.to_config()))) == settings
    assert [settings.draws(layer) for layer in range(3)] == [5, 6, 7]
    assert SamplerSettings(n=9).draws(1) == 9
    assert SamplerSettings.from_config({"n": [3, 4]}) == SamplerSettings(n=(3, 4))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n": 0}, r"integer in \[1, "),
        ({"n": 2.5}, "n=2.5 .* integer"),
        ({"n": (1, 2, 3)}, "3 numbers for 2 layers"),
        ({"n": (1, True)}, r"n=\(1, True\) .* integer"),
    ],
)
def test_settings_refuse_what_cannot_work(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SamplerSettings(**options)


def test_settings_refuse_unknown_names() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fanout'"):
        SamplerSettings.from_config({"fanot": 3})
