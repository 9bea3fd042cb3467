"""Tasks on one graph of several owners: every node has one owner, and edges may cross owners.

What is learnt is the class of a node, from its features and those of the nodes around it. An owner has the features and
labels of its own nodes alone: :meth:`SharedGraph.part` copies them out, so that whoever needs another owner's row has
to ask for it. The task itself holds the whole graph to measure with (:meth:`GraphTask.evaluate`); no client learns from
it, and :meth:`GraphTask.train` and :meth:`GraphTask.gradient` say so. Held-out nodes keep their features and edges;
only their labels are held out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcomp.errors import ConfigError
from fedcomp.graphs import partition as sharing
from fedcomp.graphs.adjacency import Adjacency, FullStructure, HaloStructure, normalised
from fedcomp.graphs.base import GraphPart, Ids, Structure
from fedcomp.graphs.layers import GraphConvolutions
from fedcomp.graphs.layers import whole as whole_operators
from fedcomp.rng import Key
from fedcomp.rules import Flag, Int, OneOf, Real
from fedcomp.tasks.base import COMMON_OPTIONS, Classification, Split, single_thread
from fedcomp.tasks.gan import Adam
from fedcomp.tasks.graph_sources import LabelledGraph, cross_partition, karate_clubs, nearest_neighbours, planted
from fedcomp.tasks.options import TaskOption
from fedcomp.tasks.partition import Assignment, permutation
from fedcomp.tasks.sources import DataSource, load

PLANTED: Final = "planted"
"""Name of the partition that a graph was drawn with."""

OPTIONS: Final[Mapping[str, TaskOption]] = {
    "root": COMMON_OPTIONS["root"],
    "download": COMMON_OPTIONS["download"],
    "cut": TaskOption("auto", OneOf("auto", *sharing.METHODS), "how nodes get owners: auto, metis, kernighan-lin, ..."),
    "partition_seed": COMMON_OPTIONS["partition_seed"],
    "normalisation": TaskOption("sym", OneOf("sym", "mean"), "of the adjacency: sym, or mean over a node's neighbours"),
    "self_loops": TaskOption(True, Flag(), "whether a node is a neighbour of itself"),
    "features": TaskOption(
        "given",
        OneOf("given", "binary", "rows"),
        "given; binary: 1 for all that is not 0; rows: divided by their row's sum",
    ),
    "structure": TaskOption("full", OneOf("full", "halo"), "what an owner knows of the edges: all, or its own rows"),
    "split": TaskOption("random", OneOf("random"), "which nodes are held out"),
    "split_seed": TaskOption(0, Int(0), "names the draw of the held-out nodes"),
    "held_out": TaskOption(0.2, Real(least=0.0, most=0.99), "share of the labelled nodes that is held out"),
    "hidden": TaskOption(64, Int(1), "width of the hidden layers"),
    "layers": TaskOption(2, Int(1, 16), "graph convolutions"),
    "dropout": TaskOption(0.0, Real(least=0.0, most=0.99), "share of inputs to each layer that training drops"),
    "dtype": TaskOption("float32", OneOf("float32", "float64"), "of features and model"),
}
"""Options of every graph task."""

_NOT_THE_ROWS: Final = (
    *("root", "download", "structure", "hidden", "layers", "dropout", "split", "split_seed", "held_out"),
    *("cut", "partition_seed", "normalisation", "self_loops"),
)
"""Options that do not change feature rows. The digest covers the effect of the last four by its arrays."""


_REFUSAL: Final = (
    "task {!r} is learnt by owners of parts of a graph, who ask each other for rows; use the system 'skewed-gcn', or "
    "train_centrally() on the whole graph"
)


class GraphTask(Classification):
    """Classes of the nodes of one graph; the model is a stack of graph convolutions.

    Examples are ids of nodes: ``train_split.x`` and ``test.x``, ascending.

    Attributes
    ----------
    graph : LabelledGraph
        As loaded or drawn, features as the option ``features`` and ``dtype`` say.
    nodes : int
        N.
    planted_only : bool
        Whether the graph makes sense only with the owners it was drawn with.
    """

    needs = "graph"
    planted_only: ClassVar[bool] = False
    # However many of them are asked for, a forward pass is over all nodes.
    evaluation_batch = 2**62
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = OPTIONS

    def __init__(self, options: Mapping[str, Any]) -> None:
        graph, source = self._load(options)
        self.graph = replace(graph, features=_prepared(graph.features, options["features"], options["dtype"]))
        self.graph.freeze()
        self.nodes = len(graph.labels)
        train, test = _split(self.graph, options)
        examples = [(ids, graph.labels[ids]) for ids in (train, test)]
        super().__init__(options, source, *examples, classes=graph.classes)
        self._shared: dict[int, SharedGraph] = {}

    def _load(self, options: Mapping[str, Any]) -> tuple[LabelledGraph, DataSource]:
        graph, source = load(self.name, options["root"], options["download"])
        assert isinstance(graph, LabelledGraph)
        return graph, source

    @cached_property
    def adjacency(self) -> Adjacency:
        """P: the normalised adjacency of the whole graph, read-only."""
        graph, options = self.graph, self.options
        ends = graph.sources, graph.targets
        if not graph.directed:
            # Whatever side an edge is written from, its ends are neighbours of each other, in a mean too.
            ends = np.concatenate(ends), np.concatenate(ends[::-1])
        adjacency = normalised(*ends, self.nodes, options["normalisation"], options["self_loops"])
        # All parts of one process share these arrays.
        for array in (adjacency.indptr, adjacency.columns, adjacency.values):
            array.flags.writeable = False
        return adjacency

    @cached_property
    def neighbours(self) -> sharing.Neighbours:
        """The graph as partitioning sees it: undirected."""
        return sharing.Neighbours.of(self.graph.sources, self.graph.targets, self.nodes)

    def shared(self, parts: int) -> SharedGraph:
        """Return the graph as ``parts`` owners share it; kept for the next call. Errors: :class:`SharedGraph`."""
        if parts not in self._shared:
            self._shared[parts] = SharedGraph(self, parts)
        return self._shared[parts]

    def _test_on(self, out: NDArray[np.bool_]) -> None:
        super()._test_on(out)
        # Parts name the nodes to learn from, which are fewer then.
        self._shared = {}

    def assignment(self, num_partitions: int) -> Assignment:
        """Return the owner of every training node, int64, in the order of ``train_split``."""
        if num_partitions not in self._assignments:
            self._assignments[num_partitions] = self.shared(num_partitions).owner[self.train_split.x].astype(np.int64)
        return self._assignments[num_partitions]

    def client_test(self, partition: int, num_partitions: int) -> Split:
        """Return the held-out nodes of one owner; the weighted mean of the owners' metrics is the metric on
        :attr:`test`."""
        shared = self.shared(num_partitions)
        mine = shared.owner[self.test.x] == shared.checked(partition)
        return Split(self.test.x[mine], self.test.y[mine])

    def _make_model(self) -> nn.Module:
        option = self.options
        width, features = option["hidden"], self.graph.features.shape[1]
        return GraphConvolutions(features, width, self.classes, layers=option["layers"], dropout=option["dropout"])

    def model(self, seed: int) -> nn.Module:
        """Return a new model whose values are a pure function of ``seed``, in the task's dtype."""
        # Drawn in float32 and widened afterwards, so that both dtypes start from the same values.
        return super().model(seed).to(getattr(torch, self.options["dtype"]))

    @cached_property
    def whole(self) -> tuple[Tensor, list[Tensor]]:
        """All features and the operator of every layer, as tensors."""
        # A copy: tensors share memory with writable arrays only.
        x = torch.from_numpy(np.array(self.graph.features))
        return x, whole_operators(self.adjacency, self.options["layers"], x.dtype)

    def outputs(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the logits of nodes ``x``: a forward pass over the whole graph, every neighbour used."""
        features, operators = self.whole
        return model(features, operators)[x]

    def train(self, model: nn.Module, data: Split, **settings: Any) -> dict[str, float]:
        """Raise ConfigError: an owner does not have the feature rows of its nodes' neighbours."""
        raise ConfigError(_REFUSAL.format(self.name))

    def gradient(
        self, model: nn.Module, data: Split, *, batch_size: int | None = None, key: Key | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], float]:
        """Raise ConfigError, as :meth:`train` does."""
        raise ConfigError(_REFUSAL.format(self.name))

    def record(self) -> dict[str, Any]:
        """Return the task's record, with the size of the graph and every partition that was asked for so far."""
        partitions = {str(n): {"method": one.method, "cut": one.cut} for n, one in sorted(self._shared.items())}
        graph = {
            "nodes": self.nodes,
            "edges": self.neighbours.edges,
            "features": self.graph.features.shape[1],
            "directed": self.graph.directed,
            "partitions": partitions,
        }
        return {**super().record(), "graph": graph}


class SharedGraph:
    """A task's graph as a number of owners share it. Digests and parts are made once, on demand.

    Parameters
    ----------
    task : GraphTask
    parts : int
        Number of owners.

    Attributes
    ----------
    method : str
        The partition method that the task's option ``cut`` stands for.
    owner : ndarray of int32, (N,)
        The owner of every node, read-only.

    Raises
    ------
    ConfigError
        For an impossible number of parts, a method whose library is not installed, or a graph that is to keep its own
        partition and has another number of parts.

    Examples
    --------
    >>> from fedcomp.tasks import get_task
    >>> shared = get_task("karate", cut="greedy").shared(2)
    >>> shared.part(0).ids[:5].tolist(), round(shared.cut, 2)
    ([2, 8, 9, 14, 15], 0.19)
    """

    def __init__(self, task: GraphTask, parts: int) -> None:
        planted_owner = task.graph.owner
        made_of = 0 if planted_owner is None else int(planted_owner.max()) + 1
        method = str(task.options["cut"])
        if method == "auto":
            method = PLANTED if task.planted_only or parts == made_of else sharing.available(task.nodes)
        if method == PLANTED and parts != made_of:
            raise ConfigError(
                f"this graph of task {task.name!r} was made of {made_of} parts and has no partition into {parts}; set "
                f"the task's option parts={parts}"
            )
        self.task, self.parts, self.method = task, parts, method
        if method == PLANTED:
            assert planted_owner is not None
            self.owner = planted_owner
        else:
            self.owner = sharing.partition(task.neighbours, parts, method, seed=task.options["partition_seed"])
            self.owner.flags.writeable = False
        self._made: dict[int, GraphPart] = {}

    @cached_property
    def cut(self) -> float:
        """The share of edges between two owners."""
        return sharing.cut(self.task.neighbours, self.owner)

    @cached_property
    def digest(self) -> str:
        """A name for the feature rows, the adjacency and the partition, 32 hexadecimal digits.

        The same for every owner and whatever structure it knows, and whatever is held out. Rows are named by where
        they came from and by the options that shape them, not by their values: an owner has seen only its own.
        """
        task, adjacency = self.task, self.task.adjacency
        named = {key: value for key, value in task.options.items() if key not in _NOT_THE_ROWS}
        source = repr((task.name, task.data.used, task.data.served, sorted(named.items()), self.parts))
        digest = hashlib.sha256(source.encode())
        for array in (adjacency.indptr, adjacency.columns, adjacency.values, self.owner):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:32]

    @cached_property
    def boundary(self) -> Ids:
        """Every node that has an entry in a row of another owner, ascending."""
        adjacency = self.task.adjacency
        rows = np.repeat(self.owner, np.diff(adjacency.indptr))
        return np.unique(adjacency.columns[rows != self.owner[adjacency.columns]]).astype(np.int64)

    def checked(self, index: int) -> int:
        """Return ``index``; raise ConfigError when there is no such part."""
        if not 0 <= index < self.parts:
            raise ConfigError(f"partition {index} is not in range({self.parts})")
        return index

    def part(self, index: int) -> GraphPart:
        """Return what one owner has; kept for the next call.

        Its features and labels are copies of the owned rows. Nothing in it leads to those of another owner.

        Raises
        ------
        ConfigError
            When ``index`` is not in ``range(parts)``.
        """
        if self.checked(index) not in self._made:
            task, owner = self.task, self.owner
            ids = np.flatnonzero(owner == index)
            train, test = (split.x[owner[split.x] == index] for split in (task.train_split, task.test))
            part = GraphPart(
                index=index,
                parts=self.parts,
                ids=ids,
                features=task.graph.features[ids],
                labels=task.graph.labels[ids],
                train=train,
                test=test,
                structure=self._structure(index, ids),
                digest=self.digest,
                boundary=self.boundary[owner[self.boundary] == index],
            )
            # Handed to clients of one process by reference: none of them may change what another one reads.
            for array in (part.ids, part.features, part.labels, part.train, part.test, part.boundary):
                array.flags.writeable = False
            self._made[index] = part
        return self._made[index]

    def _structure(self, index: int, ids: Ids) -> Structure:
        task = self.task
        if task.options["structure"] == "full":
            return FullStructure(task.adjacency, self.owner)
        rows = task.adjacency.rows(ids)
        return HaloStructure(rows, self.owner[rows.columns], task.nodes, index)


def train_centrally(
    task: GraphTask, model: nn.Module, *, steps: int, lr: float, weight_decay: float = 0.0, seed: int = 0
) -> dict[str, float]:
    """Train ``model`` in place on the whole graph, as if one owner had all of it.

    Adam (Kingma and Ba 2015), all training nodes in every step, every neighbour used.

    Parameters
    ----------
    task : GraphTask
    model : Module
    steps : int
    lr, weight_decay : float
        Step size; coefficient of |w|^2 / 2 over all parameters, added to the loss.
    seed : int
        Names the draw of dropout, where there is any.

    Returns
    -------
    dict
        ``train_loss`` before the last step and ``num-examples``.
    """
    # The published rate; the class's default of 0.5 is the one usual for GANs.
    adam = Adam(lr, decay=0.9)
    named = dict(model.named_parameters())
    features, operators = task.whole
    ids, labels = task.train_split.tensors
    moments = adam.start({name: p.detach() for name, p in named.items()})
    # torch's seeds are signed, so one bit is dropped.
    generator = torch.Generator().manual_seed(Key(seed, "graphs/dropout").u64() >> 1)
    last = 0.0
    model.train()
    with single_thread():
        for _ in range(steps):
            outputs = model(features, operators, generator=generator)
            loss = task.objective(model, outputs[ids], labels)
            slopes = torch.autograd.grad(loss, list(named.values()))
            values = {name: p.detach() for name, p in named.items()}
            with torch.no_grad():
                decayed = {
                    name: slope.add(values[name], alpha=weight_decay) for name, slope in zip(named, slopes, strict=True)
                }
                after, moments = adam.step(values, decayed, moments)
                # The step returns new tensors; the model goes on with its own.
                for name, p in named.items():
                    p.copy_(after[name])
            last = loss.item()
    return {"train_loss": last, "num-examples": len(task.train_split)}


def _split(graph: LabelledGraph, options: Mapping[str, Any]) -> tuple[Ids, Ids]:
    """Return the training nodes and the held-out nodes, ascending."""
    if options["split"] == "public":
        assert graph.public is not None
        return graph.public
    labelled = np.flatnonzero(graph.labels >= 0)
    # Nodes without a label have features and edges, and nothing to learn from or to be tested on.
    order = labelled[permutation(len(labelled), Key(options["split_seed"], "graphs/split"))]
    tested = round(options["held_out"] * len(order))
    if tested == len(order):
        raise ConfigError(f"held_out={options['held_out']} of {len(order)} nodes leaves none to learn from")
    return np.sort(order[tested:]), np.sort(order[:tested])


def _prepared(features: NDArray[np.float32], kind: str, dtype: str) -> NDArray[np.floating]:
    """Return the features in the requested form; an empty row stays unchanged."""
    if kind == "binary":
        return (features != 0).astype(dtype)
    if kind == "rows":
        total = features.sum(1, dtype=np.float64)[:, None]
        return (features / np.where(total == 0, 1.0, total)).astype(dtype)
    return features.astype(dtype, copy=False)


_PUBLIC: Final[Mapping[str, TaskOption]] = {
    **OPTIONS,
    "split": TaskOption("random", OneOf("random", "public"), "which nodes are held out: random, or public"),
}


class Cora(GraphTask):
    """2,708 papers, 5,278 citations, 1,433 words that occur or not, seven subjects."""

    name = "cora"
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = _PUBLIC


class CiteSeer(GraphTask):
    """3,327 papers, 4,552 citations, 3,703 words that occur or not, six subjects; 15 papers have neither words
    nor a subject, only citations."""

    name = "citeseer"
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = _PUBLIC


class CoraMl(GraphTask):
    """2,995 papers of machine learning, 8,158 undirected of 8,416 citations, 2,879 words, seven subjects.

    The file has weights of words; by default they become 1, which is what torch_geometric makes of it.
    """

    name = "cora-ml"
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = {
        **OPTIONS,
        "features": replace(OPTIONS["features"], default="binary"),
    }


class DigitsGraph(GraphTask):
    """The 1,797 embedded digits, each joined to the ``k`` nearest in pixels, in both directions; needs no file.

    Features are the 64 pixels in [0, 1].
    """

    name = "digits-graph"
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = {
        **OPTIONS,
        "k": TaskOption(10, Int(1), "nearest digits that one is joined to"),
    }

    def _load(self, options: Mapping[str, Any]) -> tuple[LabelledGraph, DataSource]:
        graph, source = super()._load(options)
        # Sixteenths: times 16 they are whole numbers, and distances are exact.
        sources, targets = nearest_neighbours(graph.features * 16.0, options["k"])
        return replace(graph, sources=sources, targets=targets), source


class Karate(GraphTask):
    """34 members of a karate club and 78 friendships; features say who somebody is and nothing else."""

    name = "karate"
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = {
        **OPTIONS,
        "labels": TaskOption(4, Int(2, 4), "2: the clubs it split into; 4: communities by modularity"),
        "hidden": replace(OPTIONS["hidden"], default=16),
    }

    def _load(self, options: Mapping[str, Any]) -> tuple[LabelledGraph, DataSource]:
        graph, source = super()._load(options)
        # The option's parser takes a range, which lets 3 through.
        if options["labels"] == 3:
            raise ConfigError("labels=3; expected 2 (the clubs it split into) or 4 (communities)")
        return (graph if options["labels"] == 4 else replace(graph, labels=karate_clubs(), classes=2)), source


def _drawn(name: str, what: str) -> DataSource:
    return DataSource(name, "offline", what, verified=False, substitute=False, note=f"{name}: {what}")


class CrossPartition(GraphTask):
    """A graph on which a node's label can be told from neighbours in other parts, and from nothing else.

    Where dropping remote neighbours costs nothing, as on the citation graphs, accuracy cannot tell a right sampler from
    one that ignores them. Here it can. One layer, the mean over 20 neighbours; see
    :func:`fedcomp.tasks.graph_sources.cross_partition`. Another number of owners is another graph: option ``parts``.
    """

    name = "cross-partition"
    planted_only = True
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = {
        **OPTIONS,
        "cut": TaskOption("auto", OneOf("auto", PLANTED), "auto and planted are the parts the graph is made of"),
        "normalisation": replace(OPTIONS["normalisation"], default="mean"),
        "self_loops": replace(OPTIONS["self_loops"], default=False),
        "held_out": replace(OPTIONS["held_out"], default=0.25),
        "layers": replace(OPTIONS["layers"], default=1),
        "nodes": TaskOption(1200, Int(1, 8192), "N; memory grows with its square"),
        "parts": TaskOption(4, Int(2), "owners the graph is made for, at least two"),
        "classes": TaskOption(4, Int(2), "colours, and labels"),
        "noise": TaskOption(0.3, Real(least=0.0), "standard deviation of the columns of noise"),
        "own": TaskOption(10, Int(0), "neighbours of the same owner"),
        "telling": TaskOption(7, Int(0), "neighbours of other owners that have the label's colour"),
        "other": TaskOption(3, Int(0), "neighbours of other owners of any colour"),
        "graph_seed": TaskOption(0, Int(0), "names the draw of the graph"),
    }

    def _load(self, options: Mapping[str, Any]) -> tuple[LabelledGraph, DataSource]:
        names = ("nodes", "parts", "classes", "noise", "own", "telling", "other")
        chosen = {name: options[name] for name in names}
        graph = cross_partition(**chosen, key=Key(options["graph_seed"], "graphs/cross-partition"))
        return graph, _drawn(self.name, "a drawn graph whose labels stand in other parts")


class SyntheticGraph(GraphTask):
    """A graph of planted parts, of any size: for what happens when graphs grow."""

    name = "synthetic-graph"
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = {
        **OPTIONS,
        "cut": TaskOption(
            "auto",
            OneOf("auto", PLANTED, *sharing.METHODS),
            "planted, which auto is for as many owners as the graph is made of; metis, ...",
        ),
        "nodes": TaskOption(4000, Int(1), "N"),
        "degree": TaskOption(20, Int(1), "mean number of neighbours"),
        "parts": TaskOption(4, Int(1), "parts the graph is made of"),
        "cross": TaskOption(0.05, Real(least=0.0, most=1.0), "share of edges between them"),
        "columns": TaskOption(16, Int(1), "features of a node"),
        "classes": TaskOption(8, Int(2), "labels"),
        "graph_seed": TaskOption(0, Int(0), "names the draw of the graph"),
    }

    def _load(self, options: Mapping[str, Any]) -> tuple[LabelledGraph, DataSource]:
        names = ("nodes", "degree", "parts", "cross", "classes")
        chosen = {name: options[name] for name in names}
        key = Key(options["graph_seed"], "graphs/planted")
        graph = planted(**chosen, features=options["columns"], key=key)
        return graph, _drawn(self.name, "a drawn graph of planted parts")
