"""Tasks on one graph that several owners share: every node has one owner, and edges go between owners.

What is learnt is the class of a node, from its features and those of the nodes around it. An owner has the features and
labels of its own nodes alone: :meth:`GraphTask.part` copies them out, so that whoever needs another owner's row has to
ask for it. The task itself holds the whole graph; that is the ruler an experiment measures with
(:meth:`GraphTask.evaluate`), not something a client learns from, and :meth:`GraphTask.train` and
:meth:`GraphTask.gradient` say so. Nodes that are held out keep their features and edges: what is held out are labels.
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
from fedcomp.graphs.base import Ids, Part, Structure
from fedcomp.graphs.layers import GraphConvolutions, whole
from fedcomp.rng import Key
from fedcomp.tasks.base import COMMON_OPTIONS, Classification, Split, single_thread
from fedcomp.tasks.gan import Adam
from fedcomp.tasks.graph_sources import Graph, cross_partition, karate_clubs, nearest_neighbours, planted
from fedcomp.tasks.options import Option, choice, flag, integer, number
from fedcomp.tasks.partition import Assignment, permutation
from fedcomp.tasks.sources import DataSource, load

PLANTED: Final = "planted"
"""The partition that a graph was made of."""

OPTIONS: Final[Mapping[str, Option]] = {
    "root": COMMON_OPTIONS["root"],
    "download": COMMON_OPTIONS["download"],
    "cut": Option("auto", choice("auto", *sharing.METHODS), "how nodes get owners: auto, metis, kernighan-lin, ..."),
    "partition_seed": COMMON_OPTIONS["partition_seed"],
    "normalisation": Option("sym", choice("sym", "mean"), "of the adjacency: sym, or mean over a node's neighbours"),
    "self_loops": Option(True, flag, "whether a node is a neighbour of itself"),
    "features": Option(
        "given",
        choice("given", "binary", "rows"),
        "given; binary: 1 for all that is not 0; rows: divided by their row's sum",
    ),
    "structure": Option("full", choice("full", "halo"), "what an owner knows of the edges: all, or its own rows"),
    "split": Option("random", choice("random"), "which nodes are held out"),
    "split_seed": Option(0, integer(0), "names the draw of the held-out nodes"),
    "held_out": Option(0.2, number(0.0, 0.99), "share of the labelled nodes that is held out"),
    "hidden": Option(64, integer(1), "width of the hidden layers"),
    "layers": Option(2, integer(1, 16), "graph convolutions"),
    "dropout": Option(0.0, number(0.0, 0.99), "share of inputs to each layer that training drops"),
    "dtype": Option("float32", choice("float32", "float64"), "of features and model"),
}
"""Options of every graph task."""

_NOT_THE_ROWS: Final = (
    *("root", "download", "structure", "hidden", "layers", "dropout", "split", "split_seed", "held_out"),
    *("cut", "partition_seed", "normalisation", "self_loops"),
)
"""Options that change no row of features. What the last four change is in the digest itself."""


class GraphTask(Classification):
    """Classes of the nodes of one graph; the model is a stack of graph convolutions.

    Examples are ids of nodes: ``train_split.x`` and ``test.x``, ascending.

    Attributes
    ----------
    graph : Graph
        As loaded or drawn, features as the option ``features`` and ``dtype`` say.
    nodes : int
        N.
    planted_only : bool
        Whether the graph means something with the owners it was made of and with no others.
    """

    needs = "graph"
    planted_only: ClassVar[bool] = False
    # However many of them are asked for, a forward pass is over all nodes.
    evaluation_batch = 2**62
    OPTIONS: ClassVar[Mapping[str, Option]] = OPTIONS

    def __init__(self, options: Mapping[str, Any]) -> None:
        graph, source = self._load(options)
        self.graph = replace(graph, features=_prepared(graph.features, options["features"], options["dtype"]))
        self.graph.freeze()
        self.nodes = len(graph.labels)
        train, test = self._split(options)
        examples = [(ids, graph.labels[ids]) for ids in (train, test)]
        super().__init__(options, source, *examples, classes=graph.classes)
        self._owners: dict[int, sharing.Owner] = {}
        self._parts: dict[tuple[int, int], Part] = {}
        self._boundaries: dict[int, Ids] = {}
        self._digests: dict[int, str] = {}

    def _load(self, options: Mapping[str, Any]) -> tuple[Graph, DataSource]:
        graph, source = load(self.name, options["root"], options["download"])
        assert isinstance(graph, Graph)
        return graph, source

    def _split(self, options: Mapping[str, Any]) -> tuple[Ids, Ids]:
        if options["split"] == "public":
            assert self.graph.public is not None
            return self.graph.public
        labelled = np.flatnonzero(self.graph.labels >= 0)
        order = labelled[permutation(len(labelled), Key(options["split_seed"], "graphs/split"))]
        tested = round(options["held_out"] * len(order))
        if tested == len(order):
            raise ConfigError(f"held_out={options['held_out']} of {len(order)} nodes leaves none to learn from")
        return np.sort(order[tested:]), np.sort(order[:tested])

    @cached_property
    def adjacency(self) -> Adjacency:
        """P: the normalised adjacency of the whole graph, read-only."""
        graph, options = self.graph, self.options
        ends = graph.sources, graph.targets
        if not graph.directed:
            # Whatever side an edge is written from, its ends are neighbours of each other, in a mean too.
            ends = np.concatenate(ends), np.concatenate(ends[::-1])
        adjacency = normalised(*ends, self.nodes, options["normalisation"], options["self_loops"])
        for array in (adjacency.indptr, adjacency.columns, adjacency.values):
            array.flags.writeable = False
        return adjacency

    @cached_property
    def neighbours(self) -> sharing.Neighbours:
        """The graph as partitioning sees it: undirected."""
        return sharing.Neighbours.of(self.graph.sources, self.graph.targets, self.nodes)

    def method(self, parts: int) -> str:
        """Return the partition method that the option ``cut`` stands for.

        Raises
        ------
        ConfigError
            When it is the graph's own partition, and that has another number of parts.
        """
        made_of = self._made_of()
        chosen = str(self.options["cut"])
        if chosen == "auto":
            chosen = PLANTED if self.planted_only or parts == made_of else sharing.available(self.nodes)
        if chosen == PLANTED and parts != made_of:
            raise ConfigError(
                f"this graph of task {self.name!r} was made of {made_of} parts and has no partition into {parts}; set "
                f"the task's option parts={parts}"
            )
        return chosen

    def _made_of(self) -> int:
        return 0 if self.graph.owner is None else int(self.graph.owner.max()) + 1

    def owner(self, parts: int) -> sharing.Owner:
        """Return the owner of every node, int32 ``(N,)``, read-only; kept for the next call.

        Raises
        ------
        ConfigError
            For an impossible number of parts, or a method whose library is not installed.
        """
        if parts not in self._owners:
            method = self.method(parts)
            if method == PLANTED:
                assert self.graph.owner is not None
                owner = self.graph.owner
            else:
                owner = sharing.partition(self.neighbours, parts, method, seed=self.options["partition_seed"])
            owner.flags.writeable = False
            self._owners[parts] = owner
        return self._owners[parts]

    def cut(self, parts: int) -> float:
        """Return the share of edges between two owners."""
        return sharing.cut(self.neighbours, self.owner(parts))

    def digest(self, parts: int) -> str:
        """Return what names the rows of features, the adjacency and who has what, 32 hexadecimal digits.

        The same for every owner and whatever structure it knows, and whatever is held out. Rows are named by where
        they came from and by the options that shape them, not by their values: an owner has seen only its own.
        """
        if parts not in self._digests:
            named = {key: value for key, value in self.options.items() if key not in _NOT_THE_ROWS}
            said = repr((self.name, self.data.used, self.data.served, sorted(named.items()), parts))
            digest = hashlib.sha256(said.encode())
            adjacency = self.adjacency
            for array in (adjacency.indptr, adjacency.columns, adjacency.values, self.owner(parts)):
                digest.update(np.ascontiguousarray(array).data)
            self._digests[parts] = digest.hexdigest()[:32]
        return self._digests[parts]

    def part(self, partition: int, parts: int) -> Part:
        """Return what one owner has; kept for the next call.

        Its features and labels are copies of the owned rows. Nothing in it leads to those of another owner.

        Raises
        ------
        ConfigError
            When ``partition`` is not in ``range(parts)``.
        """
        self._check_place(partition, parts)
        if (partition, parts) not in self._parts:
            owner = self.owner(parts)
            ids = np.flatnonzero(owner == partition)
            features, labels = self.graph.features[ids], self.graph.labels[ids]
            train, test = (split.x[owner[split.x] == partition] for split in (self.train_split, self.test))
            boundary = self._boundary(parts)
            part = Part(
                index=partition,
                parts=parts,
                ids=ids,
                features=features,
                labels=labels,
                train=train,
                test=test,
                structure=self._structure(partition, parts, ids),
                digest=self.digest(parts),
                boundary=boundary[owner[boundary] == partition],
            )
            for array in (ids, features, labels, train, test, part.boundary):
                array.flags.writeable = False
            self._parts[partition, parts] = part
        return self._parts[partition, parts]

    def _structure(self, partition: int, parts: int, ids: Ids) -> Structure:
        owner = self.owner(parts)
        if self.options["structure"] == "full":
            return FullStructure(self.adjacency, owner)
        rows = self.adjacency.rows(ids)
        return HaloStructure(rows, owner[rows.columns], self.nodes, partition)

    def _boundary(self, parts: int) -> Ids:
        """Return every node that has an entry in a row of another owner, ascending."""
        if parts not in self._boundaries:
            owner, adjacency = self.owner(parts), self.adjacency
            rows = np.repeat(owner, np.diff(adjacency.indptr))
            self._boundaries[parts] = np.unique(adjacency.columns[rows != owner[adjacency.columns]]).astype(np.int64)
        return self._boundaries[parts]

    def _check_place(self, partition: int, parts: int) -> None:
        if not 0 <= partition < parts:
            raise ConfigError(f"partition {partition} is not in range({parts})")

    def assignment(self, num_partitions: int) -> Assignment:
        """Return the owner of every training node, int64, in the order of ``train_split``."""
        if num_partitions not in self._assignments:
            self._assignments[num_partitions] = self.owner(num_partitions)[self.train_split.x].astype(np.int64)
        return self._assignments[num_partitions]

    def client_test(self, partition: int, num_partitions: int) -> Split:
        """Return the held-out nodes of one owner; the weighted mean of the owners' metrics is the metric on
        :attr:`test`."""
        self._check_place(partition, num_partitions)
        mine = self.owner(num_partitions)[self.test.x] == partition
        return Split(self.test.x[mine], self.test.y[mine])

    def _make_model(self) -> nn.Module:
        option = self.options
        width, features = option["hidden"], self.graph.features.shape[1]
        return GraphConvolutions(features, width, self.classes, layers=option["layers"], dropout=option["dropout"])

    def model(self, seed: int) -> nn.Module:
        """Return a new model whose values are a pure function of ``seed``, in the task's dtype."""
        return super().model(seed).to(getattr(torch, self.options["dtype"]))

    @cached_property
    def _whole(self) -> tuple[Tensor, list[Tensor]]:
        """All features and the operator of every layer, as tensors."""
        # A copy: tensors share memory with writable arrays only.
        x = torch.from_numpy(np.array(self.graph.features))
        return x, whole(self.adjacency, self.options["layers"], x.dtype)

    def outputs(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the logits of nodes ``x``: a forward pass over the whole graph, every neighbour used."""
        features, operators = self._whole
        return model(features, operators)[x]

    def train(self, model: nn.Module, data: Split, **settings: Any) -> dict[str, float]:
        """Refused.

        Raises
        ------
        ConfigError
            Always: an owner has not the rows that its nodes' neighbours stand in.
        """
        raise self._refusal()

    def gradient(
        self, model: nn.Module, data: Split, *, batch_size: int | None = None, key: Key | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], float]:
        """Refused, as :meth:`train` is.

        Raises
        ------
        ConfigError
            Always.
        """
        raise self._refusal()

    def _refusal(self) -> ConfigError:
        return ConfigError(
            f"task {self.name!r} is learnt by owners of parts of a graph, who ask each other for rows; use the system "
            "'skewed-gcn', or train_centrally() on the whole graph"
        )

    def train_centrally(
        self, model: nn.Module, *, steps: int, lr: float, weight_decay: float = 0.0, seed: int = 0
    ) -> dict[str, float]:
        """Train ``model`` in place on the whole graph, as if one owner had all of it.

        Adam (Kingma and Ba 2015), all training nodes in every step, every neighbour used.

        Parameters
        ----------
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
        adam = Adam(lr, decay=0.9)
        named = dict(model.named_parameters())
        features, operators = self._whole
        ids, labels = self.train_split.tensors
        moments = adam.start({name: p.detach() for name, p in named.items()})
        generator = torch.Generator().manual_seed(Key(seed, "graphs/dropout").u64() >> 1)
        last = 0.0
        model.train()
        with single_thread():
            for _ in range(steps):
                outputs = model(features, operators, generator=generator)
                loss = self.objective(model, outputs[ids], labels)
                slopes = torch.autograd.grad(loss, list(named.values()))
                values = {name: p.detach() for name, p in named.items()}
                with torch.no_grad():
                    decayed = {
                        name: slope.add(values[name], alpha=weight_decay)
                        for name, slope in zip(named, slopes, strict=True)
                    }
                    after, moments = adam.step(values, decayed, moments)
                    for name, p in named.items():
                        p.copy_(after[name])
                last = loss.item()
        return {"train_loss": last, "num-examples": len(self.train_split)}

    def record(self) -> dict[str, Any]:
        """Return the task's record, with the size of the graph and every partition that was asked for so far."""
        partitions = {
            str(parts): {"method": self.method(parts), "cut": self.cut(parts)} for parts in sorted(self._owners)
        }
        graph = {
            "nodes": self.nodes,
            "edges": self.neighbours.edges,
            "features": self.graph.features.shape[1],
            "directed": self.graph.directed,
            "partitions": partitions,
        }
        return {**super().record(), "graph": graph}


def _prepared(features: NDArray[np.float32], kind: str, dtype: str) -> NDArray[np.floating]:
    """Return features as asked for; a row without any stays as it is."""
    if kind == "binary":
        return (features != 0).astype(dtype)
    if kind == "rows":
        total = features.sum(1, dtype=np.float64)[:, None]
        return (features / np.where(total == 0, 1.0, total)).astype(dtype)
    return features.astype(dtype, copy=False)


_PUBLIC: Final[Mapping[str, Option]] = {
    **OPTIONS,
    "split": Option("random", choice("random", "public"), "which nodes are held out: random, or public"),
}


class Cora(GraphTask):
    """2,708 papers, 5,278 citations, 1,433 words that occur or not, seven subjects."""

    name = "cora"
    OPTIONS: ClassVar[Mapping[str, Option]] = _PUBLIC


class CiteSeer(GraphTask):
    """3,327 papers, 4,552 citations, 3,703 words that occur or not, six subjects; 15 papers have neither words
    nor a subject, only citations."""

    name = "citeseer"
    OPTIONS: ClassVar[Mapping[str, Option]] = _PUBLIC


class CoraMl(GraphTask):
    """2,995 papers of machine learning, 8,158 undirected of 8,416 citations, 2,879 words, seven subjects.

    The file has weights of words; by default they become 1, which is what torch_geometric makes of it.
    """

    name = "cora-ml"
    OPTIONS: ClassVar[Mapping[str, Option]] = {**OPTIONS, "features": replace(OPTIONS["features"], default="binary")}


class DigitsGraph(GraphTask):
    """The 1,797 embedded digits, each joined to the ``k`` nearest in pixels, in both directions; needs no file.

    Features are the 64 pixels in [0, 1].
    """

    name = "digits-graph"
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **OPTIONS,
        "k": Option(10, integer(1), "nearest digits that one is joined to"),
    }

    def _load(self, options: Mapping[str, Any]) -> tuple[Graph, DataSource]:
        graph, source = super()._load(options)
        # Sixteenths: times 16 they are whole numbers, and distances are exact.
        sources, targets = nearest_neighbours(graph.features * 16.0, options["k"])
        return replace(graph, sources=sources, targets=targets), source


class Karate(GraphTask):
    """34 members of a karate club and 78 friendships; features say who somebody is and nothing else."""

    name = "karate"
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **OPTIONS,
        "labels": Option(4, integer(2, 4), "2: the clubs it split into; 4: communities by modularity"),
        "hidden": replace(OPTIONS["hidden"], default=16),
    }

    def _load(self, options: Mapping[str, Any]) -> tuple[Graph, DataSource]:
        graph, source = super()._load(options)
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
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **OPTIONS,
        "cut": Option("auto", choice("auto", PLANTED), "auto and planted are the parts the graph is made of"),
        "normalisation": replace(OPTIONS["normalisation"], default="mean"),
        "self_loops": replace(OPTIONS["self_loops"], default=False),
        "held_out": replace(OPTIONS["held_out"], default=0.25),
        "layers": replace(OPTIONS["layers"], default=1),
        "nodes": Option(1200, integer(1, 8192), "N; memory grows with its square"),
        "parts": Option(4, integer(2), "owners the graph is made for, at least two"),
        "classes": Option(4, integer(2), "colours, and labels"),
        "noise": Option(0.3, number(0.0), "standard deviation of the columns of noise"),
        "own": Option(10, integer(0), "neighbours of the same owner"),
        "telling": Option(7, integer(0), "neighbours of other owners that have the label's colour"),
        "other": Option(3, integer(0), "neighbours of other owners of any colour"),
        "graph_seed": Option(0, integer(0), "names the draw of the graph"),
    }

    def _load(self, options: Mapping[str, Any]) -> tuple[Graph, DataSource]:
        names = ("nodes", "parts", "classes", "noise", "own", "telling", "other")
        chosen = {name: options[name] for name in names}
        graph = cross_partition(**chosen, key=Key(options["graph_seed"], "graphs/cross-partition"))
        return graph, _drawn(self.name, "a drawn graph whose labels stand in other parts")


class SyntheticGraph(GraphTask):
    """A graph of planted parts, of any size: for what happens when graphs grow."""

    name = "synthetic-graph"
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **OPTIONS,
        "cut": Option(
            "auto",
            choice("auto", PLANTED, *sharing.METHODS),
            "planted, which auto is for as many owners as the graph is made of; metis, ...",
        ),
        "nodes": Option(4000, integer(1), "N"),
        "degree": Option(20, integer(1), "mean number of neighbours"),
        "parts": Option(4, integer(1), "parts the graph is made of"),
        "cross": Option(0.05, number(0.0, 1.0), "share of edges between them"),
        "columns": Option(16, integer(1), "features of a node"),
        "classes": Option(8, integer(2), "labels"),
        "graph_seed": Option(0, integer(0), "names the draw of the graph"),
    }

    def _load(self, options: Mapping[str, Any]) -> tuple[Graph, DataSource]:
        names = ("nodes", "degree", "parts", "cross", "classes")
        chosen = {name: options[name] for name in names}
        key = Key(options["graph_seed"], "graphs/planted")
        graph = planted(**chosen, features=options["columns"], key=key)
        return graph, _drawn(self.name, "a drawn graph of planted parts")
