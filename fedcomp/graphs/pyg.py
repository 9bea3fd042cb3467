"""The node-wise sampler for users of torch_geometric: a ``BaseSampler`` for its ``NodeLoader`` and ``LinkLoader``.

Needs no compiled package. What is drawn, and with which weights, is worked out by the same code as everywhere in
fedcomp (:func:`fedcomp.graphs.plan.plan_step`); this file only writes it down as torch_geometric wants it:

* The weights ``P[v, u] / pi`` come as ``edge_weight``. Probabilities of the node-wise Poisson sampler depend on the row
  alone, so that they are attributes of edges, which the loader picks by edge like any other: it has to be given
  :attr:`SkewedSampler.data`, not the data the sampler was made from.
* Every layer of the network draws for itself, and a node that two layers use is in the batch once for each. A draw
  shared by two layers would bias their product; torch_geometric's own sampler draws each node's neighbours once.

A convolution has to use the weights, and to sum: ``SimpleConv(aggr="sum")``, ``GraphConv(aggr="add")``,
``GCNConv(normalize=False)``. One that ignores the weights (``SAGEConv``) learns more from local nodes than it should.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info
from torch_geometric.data import Data
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NegativeSampling, NodeSamplerInput, SamplerOutput

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.graphs.adjacency import KINDS, Adjacency, FullStructure, normalised
from fedcomp.graphs.base import GraphError, GraphPart, Ids, as_ids
from fedcomp.graphs.plan import plan_layer, plan_step
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.rng import Key

NORMALISATIONS: Final = (*KINDS, "given")


class SkewedSampler(BaseSampler):
    """Draws neighbours per node, those of one owner more often, and weighs them so that sums stay unbiased.

    After Jiang and Rumi (arXiv 2101.07706, abstract); by how much owned neighbours are favoured is derived here
    (:mod:`fedcomp.graphs.scale`).

    Parameters
    ----------
    data : torch_geometric.data.Data
        Homogeneous, with ``edge_index``; an edge (u, v) carries u's message to v, and is an entry of v's row of P.
    owner : array of int, (N,)
        Which part owns each node.
    part : int
        Whose sampler this is: its nodes are favoured, and all seeds have to be among them.
    settings : SamplerSettings
        ``sampler="node"`` with the Poisson estimator; one draw per layer of the network (``layers``), of ``fanout``
        expected neighbours each.
    normalisation : str
        "sym" or "mean" make P from the edges (:func:`~fedcomp.graphs.adjacency.normalised`), and replace the edges.
        "given": P is ``data.edge_weight``, or 1 for every edge, and edges keep all their attributes.
    self_loops : bool
        Of "sym" and "mean".
    seed : int
        Draws depend on it and on how often the sampler was asked before. In a worker process of a loader they also
        depend on the worker's seed, which torch draws from the loader's ``generator``.

    Attributes
    ----------
    data : torch_geometric.data.Data
        What to give to the loader: the data as they were, but with the edges of P and their ``edge_weight``.

    Examples
    --------
    >>> from torch_geometric.loader import NodeLoader
    >>> data = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
    >>> sampler = SkewedSampler(data, owner=[0, 0, 1, 1], part=0, settings=SamplerSettings(sampler="node", fanout=9))
    >>> loader = NodeLoader(sampler.data, sampler, input_nodes=torch.tensor([0, 1]), batch_size=2)
    >>> [batch.input_id.tolist() for batch in loader]
    [[0, 1]]

    Raises
    ------
    ConfigError
        For data of another kind, an unknown normalisation, or settings whose weights are not constant per edge.
    GraphError
        For ids out of range, parallel edges with weights of their own, or weights that are 0 or not finite.
    """

    def __init__(
        self,
        data: Data,
        owner: Any,
        part: int,
        settings: SamplerSettings = SamplerSettings(sampler="node"),  # noqa: B008 - immutable
        *,
        normalisation: str = "sym",
        self_loops: bool = True,
        seed: int = 0,
    ) -> None:
        _check_settings(settings)
        params.choice("normalisation", normalisation, NORMALISATIONS)
        if not isinstance(data, Data) or data.edge_index is None:
            raise ConfigError(f"a homogeneous Data with an edge_index is needed, not {type(data).__name__}")
        nodes = data.num_nodes
        edges = data.edge_index.cpu().numpy()
        src, dst = as_ids(edges[0], nodes), as_ids(edges[1], nodes)
        kept = [name for name in data.edge_attrs() if name not in ("edge_index", "edge_weight")]
        if normalisation in KINDS:
            if kept or data.edge_weight is not None:
                raise ConfigError(
                    f"normalisation {normalisation!r} replaces the edges, and these have attributes "
                    f"{data.edge_attrs()}; remove them, or normalise the graph yourself and say 'given'"
                )
            # Targets first: the row an edge stands in is that of the node its message goes to.
            adjacency, order = normalised(dst, src, nodes, normalisation, self_loops), None
        else:
            adjacency, order = _given(dst, src, data.edge_weight, nodes)
        structure = FullStructure(adjacency, np.asarray(owner))
        none = np.zeros(0, np.int64)
        ids = np.flatnonzero(structure.owner == part)
        self._part = GraphPart(
            index=part,
            parts=int(structure.owner.max(initial=0)) + 1,
            ids=ids,
            features=np.zeros((len(ids), 0), np.float32),  # a plan is made of ids alone
            labels=np.zeros(len(ids), np.int64),
            train=none,
            test=none,
            structure=structure,
            digest="",
            boundary=none,
        )
        self._settings = settings
        self._seed = seed
        self._calls = 0
        rows = np.repeat(np.arange(nodes), np.diff(adjacency.indptr))
        self._edges = rows * nodes + adjacency.columns  # ascending: entry of P by row and column
        self.data = self._weighted(data, adjacency, rows, order, kept)

    def _weighted(self, data: Data, adjacency: Adjacency, rows: Ids, order: Ids | None, kept: list[str]) -> Data:
        # A uniform number of 0 is below every probability: all entries are kept, each with the weight it always has.
        every = np.arange(adjacency.nodes)
        settings = replace(self._settings, n=1, layers=1)
        weights = plan_layer(self._part, every, settings, 0, np.zeros).values
        assert len(weights) == len(rows)
        ready = data.clone()
        device = data.edge_index.device
        if data.edge_weight is not None:
            dtype = data.edge_weight.dtype
        else:
            # Weights multiply features, so they have the features' type.
            dtype = data.x.dtype if data.x is not None and data.x.is_floating_point() else torch.get_default_dtype()
        columns = adjacency.columns.astype(np.int64, copy=False)
        ready.edge_index = torch.from_numpy(np.stack([columns, rows])).to(device)
        ready.edge_weight = torch.from_numpy(weights).to(device, dtype)
        if order is not None:
            for name in kept:
                ready[name] = data[name][torch.from_numpy(order).to(device)]
        return ready

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> SamplerOutput:
        """Return the subgraph of seeds that this part owns, without repeats; the seeds come first.

        Raises
        ------
        GraphError
            For a seed of another part, or twice the same.
        ConfigError
            For timestamps or node types.
        """
        _check_plain(index)
        out = self._sample(index.node.numpy())
        out.metadata = (index.input_id, index.time)
        return out

    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None) -> SamplerOutput:
        """Return the subgraph of the ends of links, which this part owns.

        Raises
        ------
        GraphError
            For an end that another part owns.
        ConfigError
            For negative sampling (it draws from torch's global generator: give negative links with a label of their
            own), timestamps or node types.
        """
        _check_plain(index)
        if neg_sampling is not None:
            raise ConfigError("negative links are not drawn here; add them to edge_label_index, with their own label")
        # Links share ends, while the seeds of a plan are without repeats.
        ends = torch.stack([index.row, index.col])
        seeds, where = ends.unique(return_inverse=True)
        out = self._sample(seeds.numpy())
        out.metadata = (index.input_id, where, index.label, index.time)
        return out

    def _sample(self, seeds: NDArray[np.int64]) -> SamplerOutput:
        worker = get_worker_info()
        # A worker has a copy of this sampler, made again in every epoch: its count of calls alone would repeat.
        purpose = "pyg" if worker is None else f"pyg/{worker.seed}"
        plan = plan_step(self._part, seeds, self._settings, Key(self._seed, purpose, self._calls, self._part.index))
        self._calls += 1
        groups, sources, targets, entries, sizes = [plan.batch], [], [], [], []
        below = 0
        for layer in reversed(plan.layers):
            row = np.repeat(np.arange(len(layer.rows)), np.diff(layer.indptr))
            targets.append(below + row)
            # Groups stand one after the other in the list of nodes: a layer's columns begin where its rows end.
            below += len(layer.rows)
            sources.append(below + layer.positions)
            # Entries of P are in ascending order, so a binary search finds the number of each edge.
            entries.append(
                np.searchsorted(self._edges, layer.rows[row] * self.data.num_nodes + layer.columns[layer.positions])
            )
            groups.append(layer.columns)
            sizes.append(len(row))
        return SamplerOutput(
            node=torch.from_numpy(np.concatenate(groups)),
            row=torch.from_numpy(np.concatenate(sources)),
            col=torch.from_numpy(np.concatenate(targets)),
            edge=torch.from_numpy(np.concatenate(entries)),
            num_sampled_nodes=[len(group) for group in groups],
            num_sampled_edges=sizes,
        )


def _check_settings(settings: SamplerSettings) -> None:
    if settings.sampler != "node":
        raise ConfigError(
            f"sampler {settings.sampler!r} is not node-wise: its weights are no attributes of edges; use 'node'"
        )
    if settings.estimator != "poisson":
        raise ConfigError(
            f"estimator {settings.estimator!r} counts draws, which no attribute of an edge can; use 'poisson'"
        )
    if settings.mode in ("measured", "adaptive"):
        raise ConfigError(f"mode {settings.mode!r} changes from layer to layer or in time; use matched, worst or fixed")
    if settings.favour != "owned":
        raise ConfigError(f"favour={settings.favour!r} changes from layer to layer; use 'owned'")


def _check_plain(index: NodeSamplerInput | EdgeSamplerInput) -> None:
    if index.time is not None or index.input_type is not None:
        raise ConfigError("timestamps and node types are not supported; sample a homogeneous, static graph")


def _given(rows: Ids, columns: Ids, weight: Any, nodes: int) -> tuple[Adjacency, Ids]:
    """Return P as its edges say it, and which edge each entry is."""
    # By row, then by column: lexsort sorts by its last key first.
    order = np.lexsort((columns, rows))
    rows, columns = rows[order], columns[order]
    if ((rows[1:] == rows[:-1]) & (columns[1:] == columns[:-1])).any():
        raise GraphError("there are parallel edges; coalesce() the data first, which says how their weights add up")
    values = np.ones(len(rows)) if weight is None else weight.detach().cpu().numpy().astype(np.float64)[order]
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(rows, minlength=nodes))])
    return Adjacency(indptr, columns, values, nodes), order
