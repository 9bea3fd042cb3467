"""Sampled layers against plain linear algebra, the limit of no sampling, and rows that are missing."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from graph_toys import CLASSES, cut, toy_adjacency, toy_features, toy_owner, toy_parts
from torch import Tensor

from fedcomp.errors import ConfigError
from fedcomp.graphs.base import GraphError, GraphPart, Ids, MissingRows, StepPlan
from fedcomp.graphs.layers import GraphConvolutions, gather, operators_of, to_torch, whole
from fedcomp.graphs.plan import plan_layer, plan_round, plan_step, wanted
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.rng import Key

NONE = np.zeros(0, np.int64)


def model(features: int, *, layers: int = 2, dropout: float = 0.0) -> GraphConvolutions:
    made = GraphConvolutions(features, 5, CLASSES, layers, dropout).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for values in made.parameters():
            values.copy_(torch.rand(values.shape, generator=generator, dtype=torch.float64) - 0.5)
    return made


def fetch(parts: list[GraphPart], plans: list[StepPlan]) -> dict[int, tuple[Ids, Any]]:
    return {
        owner: (ids, parts[owner].features[parts[owner].positions(ids)]) for owner, ids in wanted(plans, NONE).items()
    }


def loss_of(made: GraphConvolutions, part: GraphPart, parts: list[GraphPart], plan: StepPlan) -> Tensor:
    x = gather(part, plan, fetch(parts, [plan]))
    logits = made(x, operators_of(plan, torch.float64))
    targets = torch.from_numpy(part.labels[part.positions(plan.batch)])
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


def step(made: GraphConvolutions, loss: Tensor, rate: float = 0.2) -> list[Tensor]:
    made.zero_grad()
    loss.backward()
    gradients = [values.grad.clone() for values in made.parameters() if values.grad is not None]
    with torch.no_grad():
        for values, gradient in zip(made.parameters(), gradients, strict=True):
            values -= rate * gradient
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [{"scale": 1.0}, {"scale": 16.0}, {"mode": "matched"}, {"sampler": "node", "scale": 4.0}, {"keep_self": True}],
)
def test_7_06_with_n_of_all_candidates_training_is_that_of_the_whole_graph(parts: int, options: dict[str, Any]) -> None:
    nodes, features = 40, 6
    adjacency, x = toy_adjacency(nodes, parts, 5.0), torch.from_numpy(toy_features(nodes, features, 0))
    owners = cut(adjacency, toy_owner(nodes, parts), x.numpy())
    labels = torch.from_numpy(np.concatenate([part.labels for part in owners]))
    settings = SamplerSettings(**{"n": nodes, "fanout": nodes, "mode": "fixed", **options})
    sampled = model(features)
    full = copy.deepcopy(sampled)
    for at in range(5):
        plans = [plan_round(one, settings, seed=at, round=at, steps=1, batch_size=7)[0] for one in owners]
        batch = torch.from_numpy(np.concatenate([plan.batch for plan in plans]))
        total = sum(
            (loss_of(sampled, *pair) for pair in zip(owners, [owners] * parts, plans, strict=True)), torch.zeros(())
        )
        logits = full(x, whole(adjacency, 2, torch.float64))[batch]
        expected = torch.nn.functional.cross_entropy(logits, labels[batch], reduction="sum")
        assert abs(float((total - expected).detach())) < 1e-10
        for one, other in zip(step(sampled, total / len(batch)), step(full, expected / len(batch)), strict=True):
            assert float((one - other).abs().max()) < 1e-10
    for one, other in zip(sampled.parameters(), full.parameters(), strict=True):
        assert float((one - other).detach().abs().max()) < 1e-10
    assert any(len(plan.remote) for plan in plans) == (parts > 1)


def test_forward_and_gradient_are_those_of_dense_matrices() -> None:
    parts = toy_parts(60, 3, 5.0)
    plan = plan_step(parts[1], parts[1].train[:5], SamplerSettings(n=9, layers=3), Key(3))
    made, x = model(6, layers=3), gather(parts[1], plan, fetch(parts, [plan]))
    x.requires_grad_(True)
    seen: dict[int, Tensor] = {}
    made(x, operators_of(plan, torch.float64), visit=seen.__setitem__).square().sum().backward()
    found = [x.grad, *(values.grad for values in made.parameters())]
    dense = [one.to_dense() for one in operators_of(plan, torch.float64)]
    again = x.detach().clone().requires_grad_(True)
    h = again
    for level, (layer, matrix) in enumerate(zip(made.layers, dense, strict=True)):
        assert torch.allclose(seen[level], h, rtol=0.0, atol=1e-12)
        h = matrix @ h @ layer.weight.T + layer.bias
        h = h if level == 2 else torch.relu(h)
    made.zero_grad()
    h.square().sum().backward()
    for one, other in zip(found, [again.grad, *(values.grad for values in made.parameters())], strict=True):
        assert torch.allclose(one, other, rtol=0.0, atol=1e-11)


def test_the_whole_graph_is_p_times_features_in_every_layer() -> None:
    adjacency = toy_adjacency(30, 3, 4.0)
    p = np.zeros((30, 30))
    p[np.repeat(np.arange(30), np.diff(adjacency.indptr)), adjacency.columns] = adjacency.values
    made, x = model(6), toy_features(30, 6, 0)
    first, second = (layer.weight.detach().numpy().T for layer in made.layers)
    biases = [layer.bias.detach().numpy() for layer in made.layers]
    expected = p @ np.maximum(p @ x @ first + biases[0], 0.0) @ second + biases[1]
    found = made(torch.from_numpy(x), whole(adjacency, 2, torch.float64)).detach().numpy()
    assert np.abs(found - expected).max() < 1e-12
    single = made.float()(torch.from_numpy(x).float(), whole(adjacency, 2, torch.float32))
    assert single.dtype == torch.float32
    assert np.abs(single.detach().numpy() - expected).max() < 1e-5


def test_7_11_gather_takes_exactly_the_wanted_rows_and_names_every_missing_one() -> None:
    parts = toy_parts(60, 3, 6.0)
    plan = plan_step(parts[0], parts[0].train, SamplerSettings(n=40), Key(0))
    rows = fetch(parts, [plan])
    x = gather(parts[0], plan, rows)
    assert np.array_equal(x.numpy(), toy_features(60, 6, 0)[plan.inputs])
    assert sum(len(ids) for ids, _ in rows.values()) == len(plan.remote) > 4
    assert len(rows) == 2
    for owner, (ids, values) in rows.items():
        less = rows | {owner: (ids[1:], values[1:])}
        with pytest.raises(MissingRows) as caught:
            gather(parts[0], plan, less)
        assert caught.value.ids.tolist() == [ids[0]]
    with pytest.raises(MissingRows, match="fetch them") as caught:
        gather(parts[0], plan, {})
    assert caught.value.ids.tolist() == plan.remote.tolist()


def test_gather_takes_rows_in_any_grouping_the_first_of_two_and_never_anothers_for_its_own() -> None:
    parts = toy_parts(60, 3, 6.0, dtype=np.float32)
    plan = plan_step(parts[0], parts[0].train, SamplerSettings(n=40), Key(0))
    everything = toy_features(60, 6, 0, np.float32)
    every = np.arange(60)
    x = gather(parts[0], plan, [(plan.remote, everything[plan.remote].astype(np.float16)), (every, everything + 1.0)])
    assert x.dtype == torch.float32
    here = parts[0].owned(plan.inputs)
    assert np.array_equal(x.numpy()[here], everything[plan.inputs[here]])
    assert np.array_equal(x.numpy()[~here], everything[plan.remote].astype(np.float16).astype(np.float32))
    with pytest.raises(GraphError, match="6 features"):
        gather(parts[0], plan, [(plan.remote, everything[plan.remote][:, :5])])
    with pytest.raises(GraphError, match="rows of shape"):
        gather(parts[0], plan, [(plan.remote[1:], everything[plan.remote])])


def test_gather_does_not_hand_out_the_parts_own_memory() -> None:
    part = toy_parts(20, 1, 3.0)[0]
    plan = plan_step(part, NONE, SamplerSettings(sampler="full"), Key(0))
    assert gather(part, plan, {}).shape == (0, 6)
    plan = plan_step(part, part.ids, SamplerSettings(sampler="full"), Key(0))
    before = part.features.copy()
    gather(part, plan, {}).zero_()
    assert np.array_equal(part.features, before)


def test_7_14_an_empty_draw_gives_what_the_biases_give() -> None:
    part = toy_parts(80, 4, 8.0)[1]
    settings = SamplerSettings(n=1, mode="fixed")
    plans = (plan_step(part, part.train[:3], settings, Key(seed)) for seed in range(40))
    plan = next(plan for plan in plans if not len(plan.layers[1].columns))
    made = model(6)
    logits = made(gather(part, plan, {}), operators_of(plan, torch.float64))
    assert torch.equal(logits, made.layers[1].bias.expand(3, -1))
    logits.sum().backward()
    assert torch.equal(made.layers[1].bias.grad, torch.full((CLASSES,), 3.0, dtype=torch.float64))
    assert not made.layers[1].weight.grad.any()
    empty = plan_step(part, NONE, settings, Key(0))
    assert made(gather(part, empty, {}), operators_of(empty, torch.float64)).shape == (0, CLASSES)


@pytest.mark.slow
def test_dropout_is_drawn_from_the_generator_that_is_handed_over_and_only_in_training() -> None:
    adjacency, x = toy_adjacency(30, 3, 4.0), torch.from_numpy(toy_features(30, 6, 0))
    operators = whole(adjacency, 2, torch.float64)
    made, plain = model(6, dropout=0.5), model(6)
    before = torch.random.get_rng_state()
    outputs = [made(x, operators, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    with pytest.raises(ConfigError, match="needs a generator"):
        made(x, operators)
    assert torch.equal(made.eval()(x, operators), plain(x, operators))
    assert torch.equal(torch.random.get_rng_state(), before)
    # Scaled so that its mean is the input: of one linear layer the mean output is the output without dropout.
    one, steady = model(6, layers=1, dropout=0.3), model(6, layers=1)
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([one(x, operators[:1], generator=generator) for _ in range(400)]).detach()
    off = (draws.mean(0) - steady(x, operators[:1]).detach()).abs()
    assert bool((off < 4.5 * draws.std(0) / 20.0).all())


def test_convolutions_refuse_what_does_not_fit() -> None:
    operators = whole(toy_adjacency(30, 3, 4.0), 2, torch.float64)
    x = torch.from_numpy(toy_features(30, 6, 0))
    with pytest.raises(ConfigError, match="1 operators for 2 layers"):
        model(6)(x, operators[:1])
    with pytest.raises(ConfigError, match="30 columns for 29 inputs"):
        model(6)(x[:29], operators)
    for options in ({"hidden": 0}, {"layers": 0}, {"dropout": 1.0}, {"dropout": float("nan")}, {"classes": 0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            GraphConvolutions(**{"features": 3, "hidden": 4, "classes": 2, **options})


def test_making_operators_warns_of_nothing() -> None:
    adjacency = toy_adjacency(20, 2, 3.0)
    for array in (adjacency.indptr, adjacency.columns, adjacency.values):
        array.flags.writeable = False
    part = toy_parts(20, 2, 3.0)[0]
    operator = plan_layer(part, part.train, SamplerSettings(n=4), 0, Key(0).uniform)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = to_torch(operator, torch.float32)
        made @ torch.ones((made.shape[1], 1))
        whole(adjacency, 1, torch.float64)
    assert made.layout == torch.sparse_csr
    assert made.shape == (len(operator.rows), len(operator.columns))
