"""Graph data sets: read from files, embedded, or drawn from documented formulas. The same arrays in every process.

Drawn ones use raw Philox words with arithmetic spelled out, never numpy's distributions: every client draws the graph
for itself, and they have to agree.
"""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.rng import Key

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LabelledGraph:
    """Nodes with features and labels, and the edges between them.

    Attributes
    ----------
    features : ndarray of float32, (N, d)
    labels : ndarray of int64, (N,)
        ``0 .. classes - 1``, or -1 for a node without one.
    sources, targets : ndarray of int64, (E,)
        Ends of the edges; loops and repeats may occur.
    classes : int
    directed : bool
        Whether ``sources[e]`` has ``targets[e]`` as its neighbour and not the other way round.
    public : pair of ndarray of int64, optional
        Training and test nodes of the split that publications use.
    owner : ndarray of int32, (N,), optional
        Who owns which node, where the graph was made of parts.
    """

    features: NDArray[np.float32]
    labels: Ids
    sources: Ids
    targets: Ids
    classes: int
    directed: bool = False
    public: tuple[Ids, Ids] | None = None
    owner: NDArray[np.int32] | None = None

    def freeze(self) -> None:
        """Make all arrays read-only."""
        given = (self.features, self.labels, self.sources, self.targets, *(self.public or ()), self.owner)
        for array in given:
            if array is not None:
                array.flags.writeable = False


def read_cora_ml(files: Mapping[str, bytes]) -> LabelledGraph:
    """Return Cora-ML (Bojchevski and Guennemann 2018) from its npz, without unpickling: fields of objects stay unread.

    Who cites whom is given, 8,416 edges; as is usual, both ends are neighbours of each other here.
    """
    (data,) = files.values()
    with np.load(io.BytesIO(data), allow_pickle=False) as held:
        attributes = {name: held[f"attr_matrix.{name}"] for name in ("data", "indices", "indptr", "shape")}
        indptr, targets = held["adj_matrix.indptr"], held["adj_matrix.indices"]
        labels = held["labels"].astype(np.int64)
    features = np.zeros(tuple(attributes["shape"]), np.float32)
    rows = np.repeat(np.arange(len(features)), np.diff(attributes["indptr"]))
    features[rows, attributes["indices"]] = attributes["data"]
    sources = np.repeat(np.arange(len(indptr) - 1, dtype=np.int64), np.diff(indptr))
    return LabelledGraph(features, labels, sources, targets.astype(np.int64), int(labels.max()) + 1)


def fetch_planetoid(name: str) -> Callable[[str | None], LabelledGraph]:
    """Return what lets torch_geometric fetch Cora or CiteSeer."""

    def fetch(root: str | None) -> LabelledGraph:
        data = importlib.import_module("torch_geometric.datasets").Planetoid(_folder(root, "planetoid-pyg"), name)[0]
        public = tuple(np.flatnonzero(mask.numpy()) for mask in (data.train_mask, data.test_mask))
        return _from_pyg(data, (public[0], public[1]))

    return fetch


def fetch_cora_ml(root: str | None) -> LabelledGraph:
    """Let torch_geometric fetch Cora-ML; it makes every feature 0 or 1 and every edge undirected."""
    return _from_pyg(
        importlib.import_module("torch_geometric.datasets").CitationFull(_folder(root, "citation-pyg"), "Cora_ML")[0]
    )


def _folder(root: str | None, name: str) -> str:
    return str((Path(root) if root else Path.home() / ".cache" / "fedcomp") / name)


def _from_pyg(data: Any, public: tuple[Ids, Ids] | None = None) -> LabelledGraph:
    features = data.x.numpy().astype(np.float32)
    sources, targets = data.edge_index.numpy().astype(np.int64)
    labels = data.y.numpy().astype(np.int64)
    # Nodes without a row in the files get zeros and class 0 there.
    nothing = np.asarray(~features.any(axis=1))
    classes = int(labels.max()) + 1
    labels[nothing] = -1
    if public is not None:
        public = (public[0][labels[public[0]] >= 0], public[1][labels[public[1]] >= 0])
    return LabelledGraph(features, labels, sources, targets, classes, public=public)


def nearest_neighbours(features: NDArray[Any], k: int) -> tuple[Ids, Ids]:
    """Return an edge from every node to each of the ``k`` others nearest to it (Euclidean; ties to the smaller id).

    Exact where the features are small whole numbers, as pixels are: then no rounding decides.

    Raises
    ------
    ConfigError
        When there are not that many others.
    """
    count = len(features)
    if not 1 <= k < count:
        raise ConfigError(f"k={k} neighbours of {count} nodes; expected 1 to {count - 1}")
    x = features.astype(np.float64)
    squares = (x**2).sum(1)
    targets = np.empty((count, k), np.int64)
    # In blocks: all distances at once would be N^2 numbers.
    for start in range(0, count, 1024):
        block = x[start : start + 1024]
        # |a - b|^2 as a product of matrices; no array of differences has to be held.
        distance = squares[start : start + 1024, None] - 2.0 * (block @ x.T) + squares[None]
        distance[np.arange(len(block)), np.arange(start, start + len(block))] = np.inf
        # argpartition leaves open which of several equal ones it takes: below the k-th all, at it the smallest ids.
        limit = np.partition(distance, k - 1, axis=1)[:, k - 1 : k]
        rank = (distance >= limit).astype(np.int8) + (distance > limit)
        targets[start : start + 1024] = np.sort(np.argsort(rank, axis=1, kind="stable")[:, :k], axis=1)
    return np.repeat(np.arange(count, dtype=np.int64), k), targets.reshape(-1)


_KARATE: Final = (
    "1-8,10-13,17,19,21,31;2,3,7,13,17,19,21,30;3,7-9,13,27,28,32;7,12,13;6,10;6,10,16;16;;30,32,33;33;;;"
    ";33;32,33;32,33;;;32,33;33;32,33;;32,33;25,27,29,32,33;25,27,31;31;29,33;33;31,33;32,33;32,33;32,33;33;"
)
"""Edges by smaller end, nodes counted from 0; a semicolon ends the list of one node."""

_OFFICER: Final = (9, 14, 15, 18, 20, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33)
_FOUR: Final = "1111333101311100310101002200200200"


def karate() -> LabelledGraph:
    """Return Zachary's karate club (1977): 34 members, 78 friendships, one-hot features.

    Labels are the four communities that modularity finds and that Kipf and Welling's first figure (2017) shows; see
    :func:`karate_clubs` for the two clubs it split into.
    """
    sources, targets = [], []
    for node, text in enumerate(_KARATE.split(";")):
        for piece in filter(None, text.split(",")):
            first, _, last = piece.partition("-")
            ends = range(int(first), int(last or first) + 1)
            sources += [node] * len(ends)
            targets += list(ends)
    labels = np.array([int(letter) for letter in _FOUR], np.int64)
    return LabelledGraph(np.eye(34, dtype=np.float32), labels, np.array(sources), np.array(targets), 4)


def karate_clubs() -> Ids:
    """Return which club each member joined when it split: 0 Mr. Hi's, 1 the officer's."""
    labels = np.zeros(34, np.int64)
    labels[list(_OFFICER)] = 1
    return labels


def citations(nodes: int, edges: int, features: int, words: int, classes: int) -> LabelledGraph:
    """Return a graph with the sizes of a citation graph: what stands in for one whose files are not there.

    Nodes stand on a ring in random order, class c holding the c-th arc. An edge starts anywhere; nine in ten end a
    distance away that has a density proportional to 1 / distance up to an eighth of the ring (Kleinberg 2000, in one
    dimension), on either side, the tenth anywhere. Of a node's words six in ten are of its class's share of the
    vocabulary and four of all of it, the low ranks of either more often; features say which words occur. The public
    split has 20 nodes of each class to train on and 1,000 others to test.
    """
    key = Key(0, "graphs/citations")
    place = np.argsort(key.at(layer=1).bits(nodes), kind="stable")
    # Arcs of one size on the ring: near in place is then mostly alike in label, as citations are.
    label_at = np.arange(nodes) * classes // nodes
    labels = np.empty(nodes, np.int64)
    labels[place] = label_at

    # Twice as many edges as asked for: loops and repeats are dropped.
    draws = key.at(layer=2).uniform(4 * 2 * edges).reshape(4, 2 * edges)
    start = (draws[0] * nodes).astype(np.int64)
    # A uniform logarithm has a density proportional to 1 / distance.
    distance = np.exp(draws[1] * math.log(nodes / 8)).astype(np.int64) * np.where(draws[2] < 0.5, 1, -1)
    # What is left of the fourth number, rescaled to [0, 1), says where "anywhere" is.
    end = np.where(draws[3] < 0.9, start + distance, (draws[3] - 0.9) * 10 * nodes).astype(np.int64) % nodes
    low, high = np.minimum(start, end), np.maximum(start, end)
    first = np.unique(low * nodes + high, return_index=True)[1]
    # Back in the order of drawing: cut off in order of place, the end of the ring would lose its edges.
    first = np.sort(first[low[first] != high[first]])[:edges]

    # A word drawn twice is one word, so a few more are drawn.
    count = round(1.05 * words)
    words_of = key.at(layer=3).uniform(2 * nodes * count).reshape(2, nodes, count)
    share = features // classes
    own = labels[:, None] * share + (words_of[1] ** 2 * share).astype(np.int64)
    chosen = np.where(words_of[0] < 0.6, own, (words_of[1] ** 2 * features).astype(np.int64))
    x = np.zeros((nodes, features), np.float32)
    x[np.arange(nodes)[:, None], chosen] = 1.0

    order = np.argsort(key.at(layer=4).bits(nodes), kind="stable")
    train = np.concatenate([order[labels[order] == c][:20] for c in range(classes)])
    rest = order[~np.isin(order, train)]
    public = (np.sort(train), np.sort(rest[:1000]))
    return LabelledGraph(x, labels, place[low[first]], place[high[first]], classes, public=public)


def cross_partition(
    nodes: int, parts: int, classes: int, noise: float, own: int, telling: int, other: int, key: Key
) -> LabelledGraph:
    """Return a graph on which only neighbours of other owners tell a node's label. Made here.

    A node v has a colour c(v) and, independent of it, a label y(v), both uniform, and a random owner. Its features are
    the colour, one-hot, and as many columns of noise. Its neighbours, one way, are ``own`` random nodes of its own
    owner, ``telling`` nodes of other owners whose colour is y(v), and ``other`` random nodes of other owners, all
    different. Their mean therefore points to y(v), and the mean over owned neighbours tells nothing.

    Raises
    ------
    ConfigError
        When a part or a colour has too few nodes for that, or there is one owner only.
    """
    if not 2 <= parts <= nodes:
        raise ConfigError(f"parts={parts}; labels are in other parts, so expected 2 to {nodes}")
    owner = np.empty(nodes, np.int32)
    owner[np.argsort(key.at(layer=1).bits(nodes), kind="stable")] = np.arange(nodes) % parts
    colour, label = (key.at(layer=2).uniform(2 * nodes) * classes).astype(np.int64).reshape(2, nodes)
    x = np.zeros((nodes, 2 * classes), np.float32)
    x[np.arange(nodes), colour] = 1.0
    x[:, classes:] = noise * _normal(nodes * classes, key.at(layer=3)).reshape(nodes, classes)

    home = owner[:, None] == owner[None]
    right = label[:, None] == colour[None]
    order, another = (key.at(layer=i).uniform(nodes * nodes).reshape(nodes, nodes) for i in (4, 5))
    # Both may use `order`: one chooses in the node's own part, the other in the rest.
    near = _smallest(np.where(home & ~np.eye(nodes, dtype=bool), order, 2.0), own, "nodes of its own part")
    tell = _smallest(np.where(~home & right, order, 2.0), telling, "nodes of its label's colour in other parts")
    # Numbers of their own: those of `order` that are left are large where the colour is right.
    another[np.arange(nodes)[:, None], tell] = 2.0
    far = _smallest(np.where(~home, another, 2.0), other, "further nodes in other parts")
    targets = np.concatenate([near, tell, far], axis=1)
    sources = np.repeat(np.arange(nodes, dtype=np.int64), targets.shape[1])
    return LabelledGraph(x, label, sources, targets.reshape(-1), classes, directed=True, owner=owner)


def _smallest(scores: NDArray[np.float64], count: int, what: str) -> Ids:
    """Return the columns of the ``count`` smallest scores of each row, ascending; a score of 2 excludes a column."""
    if not count:
        return np.zeros((len(scores), 0), np.int64)
    if (have := int((scores < 2.0).sum(1).min())) < count:
        raise ConfigError(
            f"a node was to have {count} {what} as neighbours and there are {have}; use more nodes or fewer neighbours"
        )
    # argpartition leaves the order open: sorted, the edges are listed the same way everywhere.
    return np.sort(np.argpartition(scores, count - 1, axis=1)[:, :count], axis=1).astype(np.int64)


def planted(nodes: int, degree: int, parts: int, cross: float, features: int, classes: int, key: Key) -> LabelledGraph:
    """Return a graph of planted parts, of any size: nodes * degree / 2 edges in time proportional to them. Made here.

    Nodes are dealt at random to ``parts`` times ``classes`` groups of one size. An edge starts at a random node; with
    probability ``cross`` its other end is in another part, else in its own; two in five have the label of their start
    and three any. Features are a label's centre plus standard normal noise, centres being normal with variance
    1 / ``features``: the expected squared distance of two is 2, the noise's along the line between them 1. Repeats and
    loops are drawn like any edge and dropped later: of 2,000,000 edges between 200,000 nodes one in two thousand.

    Raises
    ------
    ConfigError
        When a group would be empty.
    """
    groups = parts * classes
    if nodes < groups:
        raise ConfigError(
            f"nodes={nodes} are too few for {parts} parts of {classes} labels; expected at least {groups}"
        )
    if parts == 1 and cross:
        raise ConfigError(f"cross={cross:g} of the edges cannot leave the only part; use cross=0 or more parts")
    order = np.argsort(key.at(layer=1).bits(nodes), kind="stable")
    group = np.empty(nodes, np.int64)
    group[order] = np.arange(nodes) * groups // nodes
    begin = -(-np.arange(groups + 1) * nodes // groups)  # the first place of each group in `order`
    owner, label = np.divmod(group, classes)

    edges = nodes * degree // 2
    draws = key.at(layer=2).uniform(6 * edges).reshape(6, edges)
    sources = (draws[0] * nodes).astype(np.int64)
    # 1 to parts - 1 parts further on, so never the edge's own.
    away = 1 + (draws[2] * (parts - 1)).astype(np.int64)
    part = np.where(draws[1] < cross, (owner[sources] + away) % parts, owner[sources])
    like = np.where(draws[3] < 0.4, label[sources], (draws[4] * classes).astype(np.int64))
    target = part * classes + like
    targets = order[begin[target] + (draws[5] * (begin[target + 1] - begin[target])).astype(np.int64)]

    centres = _normal(classes * features, key.at(layer=3)).reshape(classes, features) / math.sqrt(features)
    x = centres.astype(np.float32)[label] + _normal(nodes * features, key.at(layer=4)).reshape(nodes, features)
    return LabelledGraph(x.astype(np.float32), label, sources, targets, classes, owner=owner.astype(np.int32))


def _normal(count: int, key: Key) -> NDArray[np.float32]:
    """Return standard normal numbers (Box and Muller 1958)."""
    u = key.uniform(2 * count).reshape(2, count)
    # 1 - u is never 0, so the logarithm is finite.
    return (np.sqrt(-2.0 * np.log(1.0 - u[0])) * np.cos(2.0 * math.pi * u[1])).astype(np.float32)
