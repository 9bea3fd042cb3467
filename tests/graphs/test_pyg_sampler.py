"""The sampler inside of torch_geometric's own loaders and convolutions."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.nn import GCNConv, GraphConv, SimpleConv
from torch_geometric.sampler import NegativeSampling

from fedcomp.errors import ConfigError
from fedcomp.graphs.base import GraphError
from fedcomp.graphs.inclusion import waterfill
from fedcomp.graphs.pyg import SkewedSampler
from fedcomp.graphs.scale import scale
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.rng import Key

NODES, PARTS = 90, 3
OWNER = np.arange(NODES) % PARTS
NODE = SamplerSettings(sampler="node", fanout=3, layers=1)
UNSKEWED: dict[str, Any] = {"mode": "fixed", "scale": 1.0}


def graph(edges: int = 400, width: int = 4) -> Data:
    """A random undirected graph without loops and repeats; the last node is isolated, features are positive."""
    bits = Key(4, "test/edges").bits(2 * edges).astype(np.int64) & 0xFFFF
    src, dst = bits[:edges] % (NODES - 1), bits[edges:] % (NODES - 1)
    pairs = np.unique(np.stack([np.minimum(src, dst), np.maximum(src, dst)])[:, src != dst], axis=1)
    both = np.concatenate([pairs, pairs[::-1]], axis=1)
    x = 1.0 + Key(5, "test/features").uniform(NODES * width).reshape(NODES, width)
    return Data(x=torch.from_numpy(x), edge_index=torch.from_numpy(both), y=torch.arange(NODES))


GRAPH = graph()


def settings(**changes: Any) -> SamplerSettings:
    return SamplerSettings(**(NODE.to_config() | changes))


def loader(sampler: SkewedSampler, seeds: Any = None, **more: Any) -> NodeLoader:
    seeds = np.flatnonzero(OWNER == 0) if seeds is None else np.asarray(seeds)
    return NodeLoader(sampler.data, node_sampler=sampler, input_nodes=torch.from_numpy(seeds), **more)


def dense(data: Data) -> torch.Tensor:
    """P from the loader's own edges, which are given their exact weights."""
    whole = torch.zeros(NODES, NODES, dtype=torch.float64)
    whole[data.edge_index[1], data.edge_index[0]] = data.edge_weight
    return whole


def exact(data: Data, **how: Any) -> torch.Tensor:
    """P: with a fanout above all degrees nothing is drawn and every weight is P's."""
    return dense(SkewedSampler(data, OWNER, 0, settings(fanout=NODES), **how).data)


def moments(outputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    stacked = torch.stack(outputs)
    return stacked.mean(0), stacked.std(0) / len(outputs) ** 0.5


def test_the_loader_gives_every_seed_once_with_its_edges() -> None:
    seeds = np.flatnonzero(OWNER == 1)
    sampler = SkewedSampler(GRAPH, OWNER, 1, settings(layers=2))
    seen: list[torch.Tensor] = []
    for batch in loader(sampler, seeds, batch_size=8):
        seen.append(batch.n_id[: batch.batch_size])
        assert torch.equal(batch.x, GRAPH.x[batch.n_id])
        assert torch.equal(batch.y, batch.n_id)
        assert torch.equal(batch.edge_weight, sampler.data.edge_weight[batch.e_id])
        assert torch.equal(batch.n_id[batch.edge_index], sampler.data.edge_index[:, batch.e_id])
        # Three groups, each fed by the next one alone: what torch_geometric's trim_to_layer relies on.
        ends = np.cumsum([0, *batch.num_sampled_nodes])
        assert ends[-1] == len(batch.n_id)
        assert batch.num_sampled_nodes[0] == batch.batch_size
        first = 0
        for hop, count in enumerate(batch.num_sampled_edges):
            source, target = batch.edge_index[:, first : first + count]
            assert ((ends[hop + 1] <= source) & (source < ends[hop + 2])).all()
            assert ((ends[hop] <= target) & (target < ends[hop + 1])).all()
            first += count
        assert first == batch.edge_index.shape[1]
    assert torch.cat(seen).tolist() == seeds.tolist()


@pytest.mark.slow
def test_weights_undo_the_probabilities_of_every_row() -> None:
    """P / pi with pi of each row's own local mass, scale and fanout, worked out row by row."""
    for how in ({}, {"mode": "worst", "budget": 2.0}, UNSKEWED, {"keep_self": True}):
        chosen = settings(budget=1.5) if not how else settings(**how)
        sampler = SkewedSampler(GRAPH, OWNER, 2, chosen)
        p, found = exact(GRAPH), dense(sampler.data)
        for v in range(NODES):
            near = np.flatnonzero(p[v].numpy())
            drawn = near[(near != v) | (OWNER[v] != 2)] if chosen.keep_self else near
            pi = dict.fromkeys(near.tolist(), 1.0)
            local = OWNER[drawn] == 2
            if len(drawn):
                s = scale(chosen.mode, float(local.mean()), chosen.budget, s=chosen.scale)
                pi |= dict(zip(drawn.tolist(), waterfill(np.where(local, s, 1.0), 3).tolist(), strict=True))
            expected = p[v, near] / torch.tensor([pi[int(u)] for u in near], dtype=torch.float64)
            torch.testing.assert_close(found[v, near], expected, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_one_layer_is_unbiased_and_only_with_its_weights() -> None:
    """1 000 draws through SimpleConv; leaving the weights out, or taking P's own, is far away."""
    sampler = SkewedSampler(GRAPH, OWNER, 0, settings(mode="fixed", scale=4.0), seed=1)
    batches = loader(sampler, batch_size=30)
    p = exact(GRAPH)
    own = torch.zeros_like(sampler.data.edge_weight).copy_(p[sampler.data.edge_index[1], sampler.data.edge_index[0]])
    conv = SimpleConv(aggr="sum")
    outputs: dict[str, list[torch.Tensor]] = {"weights": [], "without": [], "of P": []}
    for i in range(1000):
        batch = batches(list(range(30)))
        weights = {"weights": batch.edge_weight} | ({} if i % 5 else {"without": None, "of P": own[batch.e_id]})
        for name, weight in weights.items():
            outputs[name].append(conv(batch.x, batch.edge_index, weight)[:30])
    truth = (p @ GRAPH.x)[OWNER == 0]
    mean, error = moments(outputs["weights"])
    assert ((mean - truth).abs() <= 4.5 * error + 1e-12).all()
    assert float(error.norm() / truth.norm()) < 0.03  # which is all that is between the mean and the truth
    assert float((mean - truth).norm() / error.norm()) < 1.5
    for name in ("without", "of P"):
        mean, error = moments(outputs[name])
        assert float((mean - truth).norm() / truth.norm()) > 0.3


@pytest.mark.slow
def test_two_linear_layers_are_unbiased_because_layers_draw_for_themselves() -> None:
    """GraphConv with root weights, self loops included: each path uses each layer's draw once."""
    torch_rng = torch.Generator().manual_seed(0)
    convs = [GraphConv(4, 4, aggr="add", bias=False).double() for _ in range(2)]
    for conv in convs:
        for parameter in conv.parameters():
            parameter.data = torch.randn(4, 4, generator=torch_rng, dtype=torch.float64)
    sampler = SkewedSampler(GRAPH, OWNER, 0, settings(layers=2, mode="fixed", scale=3.0), seed=2)
    batches = loader(sampler, batch_size=30)
    p = exact(GRAPH)
    with torch.no_grad():
        truth = GRAPH.x
        for conv in convs:
            truth = p @ conv.lin_rel(truth) + conv.lin_root(truth)
        truth = truth[OWNER == 0][:10]
        outputs = []
        for _ in range(700):
            batch = batches(list(range(10)))
            h = batch.x
            for conv in convs:
                h = conv(h, batch.edge_index, batch.edge_weight)
            outputs.append(h[:10])
    mean, error = moments(outputs)
    assert ((mean - truth).abs() <= 4.5 * error).all()
    assert float(error.norm() / truth.norm()) < 0.03
    assert float((mean - truth).norm() / error.norm()) < 1.5


def test_a_node_that_two_layers_use_draws_its_neighbours_for_each() -> None:
    """Own columns are kept, so that every seed is a row of both layers; what it keeps there is uncorrelated."""
    sampler = SkewedSampler(GRAPH, OWNER, 0, settings(layers=2, keep_self=True), seed=4)
    batches = loader(sampler, batch_size=30)
    pi = (exact(GRAPH) / dense(sampler.data))[sampler.data.edge_index[1], sampler.data.edge_index[0]]
    drawn = (pi < 1) & torch.from_numpy(OWNER[sampler.data.edge_index[1]] == 0)
    products = torch.zeros_like(pi)
    count = 40
    for _ in range(count):
        batch = batches(list(range(30)))
        kept = torch.zeros(2, len(pi), dtype=torch.float64)
        kept[0, batch.e_id[: batch.num_sampled_edges[0]]] = 1.0
        kept[1, batch.e_id[batch.num_sampled_edges[0] :]] = 1.0
        products += (kept[0] - pi) * (kept[1] - pi)
    correlation = products[drawn].sum() / (count * (pi * (1 - pi))[drawn].sum())
    assert int(drawn.sum()) > 150
    assert abs(float(correlation)) < 4 / (count * int(drawn.sum())) ** 0.5


def test_without_anything_to_draw_it_is_torch_geometrics_own_network() -> None:
    """A fanout above all degrees: outputs and gradients of two GCNConv layers with its own normalisation, to 1e-10."""
    torch_rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(4, 4, generator=torch_rng, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def network(x: torch.Tensor, edges: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        for layer, w in enumerate(weights):
            conv = GCNConv(4, 4, bias=False, normalize=weight is None).double()
            conv.lin = torch.nn.Identity()
            x = conv(x @ w, edges, weight)
            x = x.relu() if layer == 0 else x
        return x

    sampler = SkewedSampler(GRAPH, OWNER, 0, settings(layers=2, fanout=NODES))
    mine = torch.from_numpy(np.flatnonzero(OWNER == 0))
    whole = network(GRAPH.x, GRAPH.edge_index, None)[mine]
    batch = next(iter(loader(sampler, batch_size=30)))
    sampled = network(batch.x, batch.edge_index, batch.edge_weight)[:30]
    torch.testing.assert_close(sampled, whole, rtol=0, atol=1e-10)
    gradients = [torch.autograd.grad(out.square().sum(), weights) for out in (sampled, whole)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_skew_lowers_the_number_of_distinct_remote_nodes() -> None:
    def remote(**how: Any) -> float:
        sampler = SkewedSampler(GRAPH, OWNER, 0, settings(layers=2, **how), seed=3)
        batches = loader(sampler, batch_size=10)
        counts = [int((OWNER[batch.n_id.unique()] != 0).sum()) for _ in range(20) for batch in batches]
        return float(np.mean(counts))

    unskewed, some, more = remote(**UNSKEWED), remote(budget=1.5), remote(mode="fixed", scale=16.0)
    assert more < some < unskewed
    assert unskewed / some > 1.2
    assert unskewed / more > 2.0


def test_draws_are_new_at_each_call_and_the_same_for_the_same_seed() -> None:
    def epochs(seed: int) -> list[list[int]]:
        batches = loader(SkewedSampler(GRAPH, OWNER, 0, NODE, seed=seed), batch_size=30)
        return [batch.e_id.tolist() for _ in range(2) for batch in batches]

    first, second = epochs(0)
    assert first != second
    assert epochs(0) == [first, second]
    assert epochs(1)[0] != first


@pytest.mark.slow
def test_worker_processes_draw_for_themselves_and_anew_in_every_epoch() -> None:
    """Each has a copy of the sampler: without its own seed all would draw alike, in every epoch."""
    seeds = [0, 3, 6, 9]
    sampler = SkewedSampler(GRAPH, OWNER, 0, NODE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some Python versions warn of fork() in a process with threads
        twice = [
            [batch.e_id.tolist() for batch in loader(sampler, seeds + seeds, batch_size=4, num_workers=2, generator=g)]
            for g in (torch.Generator().manual_seed(k) for k in (0, 1, 0))
        ]
    assert twice[0] == twice[2]
    assert twice[0][0] != twice[0][1]
    assert twice[0] != twice[1]


def test_given_edges_keep_their_weights_and_attributes() -> None:
    order = np.argsort(Key(6, "test/order").bits(GRAPH.num_edges))
    data = GRAPH.clone()
    data.edge_index = data.edge_index[:, order]
    data.edge_weight = torch.from_numpy(2 * Key(7, "test/weights").uniform(GRAPH.num_edges) - 1)
    data.edge_attr = data.edge_index.t().clone()
    sampler = SkewedSampler(data, OWNER, 0, NODE, normalisation="given")
    p = exact(data, normalisation="given")
    assert torch.equal(p[data.edge_index[1], data.edge_index[0]], data.edge_weight)
    batch = next(iter(loader(sampler, batch_size=30)))
    assert torch.equal(batch.edge_attr, batch.n_id[batch.edge_index].t())
    assert (batch.edge_weight.sign() == p[batch.edge_attr[:, 1], batch.edge_attr[:, 0]].sign()).all()
    plain = GRAPH.clone()
    ones = exact(plain, normalisation="given")
    assert torch.equal(ones[plain.edge_index[1], plain.edge_index[0]], torch.ones(plain.num_edges, dtype=torch.float64))
    data.edge_weight = data.edge_weight.float()
    assert SkewedSampler(data, OWNER, 0, NODE, normalisation="given").data.edge_weight.dtype == torch.float32


def test_directions_are_those_of_messages() -> None:
    data = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 2], [1, 1]]), num_nodes=3)
    for normalisation, expected in (("mean", 0.5), ("given", 1.0)):
        sampler = SkewedSampler(data, [0, 0, 0], 0, NODE, normalisation=normalisation, self_loops=False)
        batch = next(iter(NodeLoader(sampler.data, node_sampler=sampler, batch_size=3)))
        out = SimpleConv(aggr="sum")(batch.x, batch.edge_index, batch.edge_weight)[:3, 0]
        assert out.tolist() == [0.0, 2 * expected, 0.0]


def test_7_14_an_isolated_seed_and_a_batch_of_one() -> None:
    isolated = NODES - 1
    part = int(OWNER[isolated])
    for self_loops, edges in ((True, 2), (False, 0)):
        sampler = SkewedSampler(GRAPH, OWNER, part, settings(layers=2), self_loops=self_loops)
        (batch,) = loader(sampler, [isolated])
        assert batch.edge_index.shape == (2, edges)
        assert batch.n_id.tolist() == [isolated] * (1 + edges)
        assert batch.edge_weight.tolist() == [1.0] * edges


def test_links_are_sampled_by_their_ends() -> None:
    mine = np.flatnonzero(OWNER == 0)
    links = torch.from_numpy(np.stack([mine[:20], mine[10:]]))
    labels = torch.arange(20)
    sampler = SkewedSampler(GRAPH, OWNER, 0, NODE)
    batches = LinkLoader(sampler.data, sampler, edge_label_index=links, edge_label=labels, batch_size=8)
    seen = []
    for batch in batches:
        assert torch.equal(batch.n_id[batch.edge_label_index], links[:, batch.input_id])
        assert torch.equal(batch.edge_label, labels[batch.input_id])
        assert torch.equal(batch.n_id[batch.edge_index], sampler.data.edge_index[:, batch.e_id])
        seen += batch.input_id.tolist()
    assert seen == list(range(20))
    negative = LinkLoader(sampler.data, sampler, edge_label_index=links, neg_sampling=NegativeSampling("binary"))
    with pytest.raises(ConfigError, match="negative links are not drawn here"):
        next(iter(negative))


def test_seeds_of_other_owners_and_repeated_ones_are_refused() -> None:
    sampler = SkewedSampler(GRAPH, OWNER, 0, NODE)
    with pytest.raises(GraphError, match="not of part 0"):
        next(iter(loader(sampler, [0, 1], batch_size=2)))
    with pytest.raises(GraphError, match="repeats"):
        next(iter(loader(sampler, [0, 0], batch_size=2)))
    timed = loader(sampler, [0, 3], input_time=torch.zeros(2))
    with pytest.raises(ConfigError, match="timestamps"):
        next(iter(timed))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "skewed"}, "not node-wise"),
        ({"estimator": "multinomial"}, "counts draws"),
        ({"mode": "measured"}, "use matched, worst or fixed"),
        ({"mode": "adaptive"}, "use matched, worst or fixed"),
        ({"favour": "halo"}, "use 'owned'"),
    ],
)
def test_settings_that_are_no_constants_of_an_edge_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SkewedSampler(GRAPH, OWNER, 0, settings(**changes))


def test_data_that_cannot_be_sampled_is_refused() -> None:
    with pytest.raises(ConfigError, match="homogeneous"):
        SkewedSampler(HeteroData(), OWNER, 0, NODE)
    with pytest.raises(ConfigError, match="edge_index"):
        SkewedSampler(Data(x=GRAPH.x), OWNER, 0, NODE)
    with pytest.raises(ConfigError, match="did you mean 'given'"):
        SkewedSampler(GRAPH, OWNER, 0, NODE, normalisation="givn")
    with pytest.raises(GraphError, match="expected one integer per 90 nodes"):
        SkewedSampler(GRAPH, OWNER[1:], 0, NODE)
    attributed = GRAPH.clone()
    attributed.edge_attr = torch.ones(GRAPH.num_edges)
    with pytest.raises(ConfigError, match="replaces the edges"):
        SkewedSampler(attributed, OWNER, 0, NODE)
    double = GRAPH.clone()
    double.edge_index = torch.cat([GRAPH.edge_index, GRAPH.edge_index[:, :1]], 1)
    with pytest.raises(GraphError, match="coalesce"):
        SkewedSampler(double, OWNER, 0, NODE, normalisation="given")
