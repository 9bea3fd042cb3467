"""Plans of steps and rounds: what they use, what they do without, and what they cost."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from graph_toys import cut, taught, toy_adjacency, toy_features, toy_owner, toy_parts

from fedcomp.errors import ConfigError
from fedcomp.graphs.adjacency import normalised
from fedcomp.graphs.base import Conditions, GraphError, GraphPart, Ids, StepPlan, UnknownStructure
from fedcomp.graphs.inclusion import waterfill
from fedcomp.graphs.plan import draw_batch, plan_layer, plan_round, plan_step, wanted
from fedcomp.graphs.settings import SAMPLERS, SamplerSettings
from fedcomp.rng import Key

NONE = np.zeros(0, np.int64)


def arrays(plan: StepPlan) -> list[np.ndarray]:
    layers = [(one.rows, one.columns, one.indptr, one.positions, one.values) for one in plan.layers]
    return [plan.batch, plan.remote, plan.owners, *(array for layer in layers for array in layer)]


def same(one: StepPlan, other: StepPlan) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(arrays(one), arrays(other), strict=True))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_plan_chains_its_layers_and_names_its_remote_inputs(sampler: str) -> None:
    part = toy_parts(80, 4, 6.0)[1]
    settings = SamplerSettings(sampler=sampler, n=12, fanout=2, layers=3)
    for plan in plan_round(part, settings, seed=1, round=2, steps=2, batch_size=5):
        assert plan.layers[-1].rows is plan.batch
        assert set(plan.batch) <= set(part.train)
        for below, above in zip(plan.layers[:-1], plan.layers[1:], strict=True):
            assert np.array_equal(below.rows, above.columns)
        for one in plan.layers:
            rows = part.structure.rows(one.rows)
            assert set(one.columns) <= set(rows.columns)
            assert len(one.indptr) == len(one.rows) + 1
            assert one.indptr[-1] == len(one.positions) == len(one.values)
            assert np.array_equal(np.unique(one.positions), np.arange(len(one.columns)))
        assert plan.remote.tolist() == [one for one in plan.inputs if one not in part.ids]
        assert plan.owners.tolist() == [toy_owner(80, 4)[one] for one in plan.remote]


def test_a_plan_can_be_made_again_and_steps_rounds_parts_and_purposes_differ() -> None:
    parts = toy_parts(80, 4, 6.0)
    settings = SamplerSettings(n=12)
    options: dict[str, Any] = {"seed": 1, "round": 2, "steps": 3, "batch_size": 5}
    plans = plan_round(parts[0], settings, **options)
    again = plan_round(toy_parts(80, 4, 6.0)[0], settings, **options)
    assert all(same(one, other) for one, other in zip(plans, again, strict=True))
    assert len({plan.batch.tobytes() for plan in plans}) == 3
    assert not same(plans[0], plan_round(parts[0], settings, **options | {"round": 3})[0])
    assert not same(plans[0], plan_round(parts[0], settings, **options | {"seed": 2})[0])
    other = plan_round(replace(parts[0], index=1), settings, **options)  # nothing differs but whose draws they are
    assert all(not np.array_equal(one.batch, two.batch) for one, two in zip(plans, other, strict=True))
    whole = options | {"batch_size": 0}
    one, two = (plan_round(replace(parts[0], index=index), settings, **whole)[0] for index in (0, 1))
    assert np.array_equal(one.batch, two.batch)
    assert not same(one, two)
    key = Key(1, "gcn/train/1", 2, 0)
    batch = draw_batch(parts[0].train, 5, Key(1, "gcn/train/1/batch", 2, 0))
    assert same(plans[1], plan_step(parts[0], batch, settings, key))
    [evaluation] = plan_round(parts[0], settings, **options, purpose="evaluate")
    assert np.array_equal(evaluation.batch, parts[0].test)


def test_wanted_is_the_union_over_steps_by_owner_without_what_is_here() -> None:
    part = toy_parts(80, 4, 6.0)[1]
    plans = plan_round(part, SamplerSettings(sampler="full"), seed=0, round=1, steps=3, batch_size=2)
    every = sorted({int(one) for plan in plans for one in plan.remote})
    have = np.array(every[::3])
    found = wanted(plans, have)
    assert list(found) == sorted({int(toy_owner(80, 4)[one]) for one in every if one not in have})
    assert 1 not in found
    assert sorted(int(one) for ids in found.values() for one in ids) == [one for one in every if one not in have]
    for owner, ids in found.items():
        assert (np.diff(ids) > 0).all()
        assert (toy_owner(80, 4)[ids] == owner).all()
    assert wanted(plans, np.array(every)) == {}
    assert wanted([], NONE) == {}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_batch_of_a_size_is_equally_likely(size: int) -> None:
    ids, draws = np.arange(10, 16), 1500
    seen = Counter(tuple(draw_batch(ids, size, Key(seed, "test")).tolist()) for seed in range(draws))
    assert len(seen) == 15
    p = 1.0 / 15.0
    assert max(abs(count / draws - p) for count in seen.values()) < 4.5 * np.sqrt(p * (1.0 - p) / draws)


def test_batches_are_ascending_without_repeats_and_all_when_asked_for_too_many() -> None:
    ids = np.arange(0, 3000, 3)
    for size in (1, 17, 499, 500, 501, 999):
        batch = draw_batch(ids, size, Key(size, "test"))
        assert len(batch) == size
        assert (np.diff(batch) > 0).all()
        assert set(batch) <= set(ids)
    assert np.array_equal(draw_batch(ids, 0, Key(0)), ids)
    assert np.array_equal(draw_batch(ids, 1001, Key(0)), ids)
    assert len(draw_batch(NONE, 5, Key(0))) == 0
    with pytest.raises(ConfigError, match="at least 0"):
        draw_batch(ids, -1, Key(0))


def test_norms_of_another_number_of_layers_are_refused() -> None:
    part = toy_parts(80, 4, 6.0)[1]
    with pytest.raises(ConfigError, match="one mapping per layer"):
        plan_step(part, part.train[:4], SamplerSettings(mode="measured"), Key(0), Conditions(norms=[{}]))


@pytest.mark.parametrize("sampler", ["skewed", "node", "ladies", "fastgcn", "boundary", "full"])
def test_7_14_rows_of_an_absent_owner_are_not_asked_for_unless_they_are_held(sampler: str) -> None:
    part = toy_parts(80, 4, 8.0)[1]
    settings = SamplerSettings(sampler=sampler, n=60, fanout=6, q=0.9)
    whole = plan_step(part, part.train, settings, Key(0))
    theirs = whole.remote[whole.owners == 2]
    assert len(theirs) > 1
    lost = plan_step(part, part.train, settings, Key(0), conditions=Conditions(frozenset({2})))
    assert 2 not in lost.owners
    assert 0.0 < lost.layers[0].lost_mass < 1.0
    # Their rows of P are known, and no features of hidden layers travel: the top layer is as it was.
    top, before = lost.layers[1], whole.layers[1]
    assert np.array_equal(top.columns, before.columns)
    assert np.array_equal(top.values, before.values)
    assert top.lost_mass == 0.0
    assert any(toy_owner(80, 4)[one] == 2 for one in top.columns)
    held = Conditions(frozenset({2}), np.sort(theirs[:1]))
    some = plan_layer(part, top.columns, settings, 0, lambda count: np.zeros(count), conditions=held)
    assert set(some.columns[toy_owner(80, 4)[some.columns] == 2]) <= set(theirs[:1])
    assert some.lost_mass < lost.layers[0].lost_mass
    every = Conditions(frozenset({2}), np.flatnonzero(toy_owner(80, 4) == 2))
    assert same(plan_step(part, part.train, settings, Key(0), conditions=every), whole)


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["l1", "count", "l2sq"])
@pytest.mark.parametrize("sampler", ["skewed", "node", "ladies", "fastgcn", "boundary", "full"])
def test_7_14_lost_mass_is_the_share_of_the_base_weight_of_what_cannot_be_had(sampler: str, weight: str) -> None:
    part, owner = toy_parts(80, 4, 8.0)[1], toy_owner(80, 4)
    rows = part.structure.rows(part.train)
    power = {"l1": 1, "count": 0, "l2sq": 2}["l2sq" if sampler == "ladies" else weight]
    weights = np.bincount(rows.columns, rows.values**power, 80)
    held = np.flatnonzero((owner == 2) & (weights > 0.0))[:2]
    gone = (owner == 2) & ~np.isin(np.arange(80), held)
    settings = SamplerSettings(sampler=sampler, weight=weight, n=20, layers=1)
    [found] = plan_step(part, part.train, settings, Key(0), conditions=Conditions(frozenset({2}), held)).layers
    assert found.lost_mass == pytest.approx(weights[gone].sum() / weights.sum(), rel=1e-12)
    assert found.lost_mass > 0.0


def test_7_14_other_candidates_keep_their_uniform_numbers_when_an_owner_vanishes() -> None:
    part = toy_parts(80, 4, 8.0)[1]
    settings = SamplerSettings(n=20, mode="fixed", scale=2.0, layers=1)
    rows = part.structure.rows(part.train)
    candidates, positions = np.unique(rows.columns, return_inverse=True)
    weights = np.bincount(positions, rows.values) * np.where(part.owned(candidates), 2.0, 1.0)
    gone = np.isin(toy_owner(80, 4)[candidates], [0, 3])
    for seed in range(5):
        lost = plan_step(part, part.train, settings, Key(seed), conditions=Conditions(frozenset({0, 3})))
        kept = Key(seed).uniform(len(candidates)) < waterfill(np.where(gone, 0.0, weights), 20)
        assert lost.inputs.tolist() == candidates[kept].tolist()


def test_7_14_an_absent_owner_changes_nothing_for_local_only_and_a_part_is_never_absent_from_itself() -> None:
    part = toy_parts(80, 4, 8.0)[1]
    absent = Conditions(frozenset({0, 1, 2, 3}))
    local = SamplerSettings(sampler="local")
    found = plan_step(part, part.train, local, Key(0), conditions=absent)
    assert same(found, plan_step(part, part.train, local, Key(0)))
    assert [one.lost_mass for one in found.layers] == [0.0, 0.0]
    alone = plan_step(part, part.train, SamplerSettings(), Key(0), conditions=absent)
    assert len(alone.remote) == 0
    assert len(alone.inputs) > 0


def test_a_halo_structure_names_all_unknown_rows_of_a_hop_and_of_all_steps() -> None:
    part = toy_parts(80, 4, 6.0, structure="halo")[1]
    adjacency, owner = toy_adjacency(80, 4, 6.0), toy_owner(80, 4)
    full = toy_parts(80, 4, 6.0)[1]
    settings = SamplerSettings(n=30, layers=3, mode="fixed", scale=1.0)
    options: dict[str, Any] = {"seed": 0, "round": 1, "steps": 3, "batch_size": 6}
    expected = plan_round(full, settings, **options)
    for level in (2, 1):
        with pytest.raises(UnknownStructure) as caught:
            plan_round(part, settings, **options)
        columns = np.unique(np.concatenate([plan.layers[level].columns for plan in expected]))
        assert caught.value.ids.tolist() == columns[~part.structure.known(columns)].tolist()
        part = taught(part, adjacency, owner, caught.value.ids)
    found = plan_round(part, settings, **options)
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))


def test_7_14_unknown_rows_of_an_absent_owner_are_done_without_in_a_halo_structure() -> None:
    part = toy_parts(80, 4, 6.0, structure="halo")[1]
    adjacency, owner = toy_adjacency(80, 4, 6.0), toy_owner(80, 4)
    settings = SamplerSettings(sampler="full")
    absent = Conditions(frozenset({2}))
    with pytest.raises(UnknownStructure) as caught:
        plan_step(part, part.train, settings, Key(0), conditions=absent)
    assert 2 not in owner[caught.value.ids]
    plan = plan_step(taught(part, adjacency, owner, caught.value.ids), part.train, settings, Key(0), conditions=absent)
    assert 2 not in owner[plan.layers[1].columns]
    assert plan.layers[1].lost_mass > 0.0
    known = np.flatnonzero(owner == 2)
    again = taught(taught(part, adjacency, owner, caught.value.ids), adjacency, owner, known)
    assert 2 in owner[plan_step(again, part.train, settings, Key(0), conditions=absent).layers[1].columns]


def test_favouring_a_halo_asks_a_halo_structure_for_its_ring_and_does_without_absent_owners() -> None:
    settings = SamplerSettings(n=30, favour="halo", layers=5)
    adjacency, owner = toy_adjacency(90, 6, 3.0, 2), toy_owner(90, 6)
    part = toy_parts(90, 6, 3.0, seed=2, structure="halo")[1]
    absent = Conditions(frozenset({4}))
    asked = []
    while (ids := lacking(part, settings, absent)) is not None:
        asked.append(set(ids.tolist()))
        part = taught(part, adjacency, owner, ids)
    own = part.structure.rows(part.ids).columns
    ring = np.unique(own[~part.owned(own)])
    assert asked[0] == set(ring[owner[ring] != 4].tolist())
    assert 1 < len(asked) <= 4
    assert all(4 not in owner[sorted(ids)] for ids in asked)
    plan = plan_step(part, part.train, settings, Key(0), conditions=absent)
    assert 4 not in plan.owners
    assert "reach/2" not in part.memo
    with pytest.raises(UnknownStructure):
        plan_step(part, part.train, settings, Key(0))


def test_a_plan_does_not_depend_on_what_the_process_remembers_of_rows_it_was_sent() -> None:
    """A node that plans in one process and trains in another has to come to the same rows in both."""
    settings = SamplerSettings(n=30, favour="halo", layers=5, mode="fixed", scale=4.0)
    adjacency, owner = toy_adjacency(90, 6, 2.0, 4), toy_owner(90, 6)
    bare, absent = toy_parts(90, 6, 2.0, seed=4, structure="halo")[1], Conditions(frozenset({0}))
    wise = taught(bare, adjacency, owner, np.flatnonzero(owner != 1))
    plan_step(wise, wise.train, settings, Key(0))
    older, fresh = replace(wise, structure=bare.structure), replace(bare, memo={})
    asked = [lacking(part, settings, Conditions()) for part in (older, fresh)]
    assert asked[0] is not None
    assert np.array_equal(asked[0], asked[1])
    # Now without an owner whose rows were once here.
    theirs = np.flatnonzero(owner > 1)
    plans = [
        plan_step(taught(part, adjacency, owner, theirs), part.train, settings, Key(3), conditions=absent)
        for part in (older, fresh)
    ]
    assert same(*plans)
    assert [one.local_mass for one in plans[0].layers] == [one.local_mass for one in plans[1].layers]


def lacking(part: GraphPart, settings: SamplerSettings, conditions: Conditions) -> Ids | None:
    """Return the nodes whose rows a plan asks for, None when it has all."""
    try:
        plan_step(part, part.train, settings, Key(0), conditions=conditions)
    except UnknownStructure as error:
        return error.ids
    return None


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("estimator", ["poisson", "multinomial"])
def test_7_14_isolated_nodes_and_batches_of_one_and_of_none(sampler: str, estimator: str) -> None:
    part = toy_parts(40, 4, 4.0, isolated=3)[3]
    settings = SamplerSettings(sampler=sampler, estimator=estimator, n=5, keep_self=True, mode="measured")
    for lonely in (37, 38, 39):
        plan = plan_step(part, np.array([lonely]), settings, Key(0))
        assert plan.inputs.tolist() == [lonely]
        assert plan.layers[1].values.tolist() == [1.0]
    empty = plan_step(part, NONE, settings, Key(0))
    assert [len(empty.inputs), len(empty.remote), empty.layers[1].candidates] == [0, 0, 0]
    assert np.isnan(empty.layers[1].local_mass)
    assert empty.layers[1].scale == 1.0
    # Without its own loop an isolated node has an empty row.
    pair = normalised(np.array([0, 1]), np.array([1, 0]), 4, "mean", self_loops=False)
    bare = cut(pair, toy_owner(4, 2), np.ones((4, 1)))[1]
    nothing = plan_step(bare, np.array([2, 3]), settings, Key(0))
    assert [len(one.columns) for one in nothing.layers] == [0, 0]
    assert nothing.layers[1].indptr.tolist() == [0, 0, 0]


def test_7_14_an_empty_draw_goes_down_as_it_is() -> None:
    part = toy_parts(80, 4, 8.0)[1]
    settings = SamplerSettings(n=1, mode="fixed")
    plans = [plan_step(part, part.train[:3], settings, Key(seed)) for seed in range(40)]
    empty = [plan for plan in plans if not len(plan.layers[1].columns)]
    assert 0 < len(empty) < 40
    for plan in empty:
        assert plan.layers[1].rows.tolist() == part.train[:3].tolist()
        assert [len(plan.layers[0].rows), len(plan.inputs), len(plan.remote)] == [0, 0, 0]


@pytest.mark.parametrize("structure", ["full", "halo"])
def test_7_14_batches_that_cannot_be_are_refused(structure: str) -> None:
    part = toy_parts(40, 4, 4.0, structure=structure)[1]
    with pytest.raises(GraphError, match="not of the graph's 40 nodes"):
        plan_step(part, np.array([10, 40]), SamplerSettings(), Key(0))
    with pytest.raises(GraphError, match="not of the graph's 40 nodes"):
        plan_step(part, np.array([-1]), SamplerSettings(), Key(0))
    with pytest.raises(GraphError, match="not of part 1"):
        plan_step(part, np.array([10, 3]), SamplerSettings(), Key(0))
    with pytest.raises(GraphError, match="repeats"):
        plan_step(part, np.array([10, 10]), SamplerSettings(), Key(0))
    with pytest.raises(ConfigError, match="unknown purpose"):
        plan_round(part, SamplerSettings(), seed=0, round=1, steps=1, batch_size=2, purpose="test")
    with pytest.raises(ConfigError, match="at least one"):
        plan_round(part, SamplerSettings(), seed=0, round=1, steps=0, batch_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"mode": "measured"}, {"sampler": "node"}, {"sampler": "fastgcn"}, {"favour": "halo", "layers": 3}]
)
def test_a_plan_costs_no_more_in_a_larger_graph_with_larger_parts(options: dict[str, Any]) -> None:
    settings = SamplerSettings(n=48, fanout=2, **options)
    peaks = []
    for nodes in (3000, 60000):
        part = replace(large(nodes), memo={})
        steps = [(Key(seed, "test"), part) for seed in range(2)]
        for key, one in steps:  # tables of a part are made once
            plan_step(one, draw_batch(one.train, 16, key), settings, key)
        tracemalloc.start()
        for key, one in steps:
            plan_step(one, draw_batch(one.train, 16, key), settings, key)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


@cache
def large(nodes: int) -> GraphPart:
    return cut(toy_adjacency(nodes, 2, 6.0), toy_owner(nodes, 2), toy_features(nodes, 2, 0))[0]
