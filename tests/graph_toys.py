"""Small graphs and the parts of their owners, made directly from arrays: no task, no partitioner, no files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.graphs.adjacency import Adjacency, FullStructure, HaloStructure, normalised
from fedcomp.graphs.base import GraphPart, Ids
from fedcomp.rng import Key

CLASSES = 3


def toy_edges(nodes: int, parts: int, degree: float, seed: int, *, inside: float = 0.7, isolated: int = 0) -> Any:
    """Return sources and targets of about ``nodes * degree / 2`` undirected edges, int64.

    ``inside`` of them stay within one block of :func:`toy_owner`; the last ``isolated`` nodes have none.
    """
    linked, count = nodes - isolated, round(nodes * degree / 2)
    u = Key(seed, "toy/edges").uniform(3 * count).reshape(3, count)
    src = np.minimum((u[0] * linked).astype(np.int64), linked - 1)
    width = max(nodes // parts, 1)
    start = np.minimum(src // width, parts - 1) * width
    end = np.minimum(np.where(start == (parts - 1) * width, nodes, start + width), linked)
    near = start + (u[1] * (end - start)).astype(np.int64)
    far = np.minimum((u[1] * linked).astype(np.int64), linked - 1)
    dst = np.where(u[2] < inside, near, far)
    apart = src != dst
    return src[apart], dst[apart]


def toy_owner(nodes: int, parts: int) -> NDArray[np.int32]:
    """Return the owner of every node: blocks of consecutive ids, the last one takes the rest."""
    return np.minimum(np.arange(nodes) // max(nodes // parts, 1), parts - 1).astype(np.int32)


def toy_adjacency(
    nodes: int, parts: int, degree: float, seed: int = 0, *, kind: str = "sym", isolated: int = 0
) -> Adjacency:
    """Return P of the graph that :func:`toy_parts` cuts, with the same arguments."""
    src, dst = toy_edges(nodes, parts, degree, seed, isolated=isolated)
    return normalised(src, dst, nodes, kind=kind)


def toy_features(nodes: int, features: int, seed: int, dtype: Any = np.float64) -> NDArray[np.floating]:
    """Return the features of all nodes, in (-1, 1), ``(nodes, features)``: what a test compares with."""
    u = Key(seed, "toy/features").uniform(nodes * features).reshape(nodes, features)
    return (2.0 * u - 1.0).astype(dtype)


def toy_parts(
    nodes: int = 40,
    parts: int = 4,
    degree: float = 5.0,
    features: int = 6,
    seed: int = 0,
    structure: str = "full",
    dtype: Any = np.float64,
    *,
    kind: str = "sym",
    isolated: int = 0,
) -> list[GraphPart]:
    """Return the parts of a random graph: four of five owned nodes are for training, the fifth for testing."""
    adjacency = toy_adjacency(nodes, parts, degree, seed, kind=kind, isolated=isolated)
    everything = toy_features(nodes, features, seed, dtype)
    return cut(adjacency, toy_owner(nodes, parts), everything, structure=structure, seed=seed)


def cut(
    adjacency: Adjacency,
    owner: NDArray[np.int32],
    features: NDArray[np.floating],
    *,
    structure: str = "full",
    seed: int = 0,
) -> list[GraphPart]:
    """Return the parts of ``adjacency`` that ``owner`` makes; each has a copy of its own rows of ``features``."""
    nodes, parts = len(owner), int(owner.max()) + 1
    labels = (Key(seed, "toy/labels").uniform(nodes) * CLASSES).astype(np.int64)
    full = FullStructure(adjacency, owner)
    every = adjacency.rows(np.arange(nodes))
    rows_of_entries = np.repeat(np.arange(nodes), np.diff(every.indptr))
    crossing = owner[rows_of_entries] != owner[every.columns]
    seen = np.unique(every.columns[crossing])
    out = []
    for index in range(parts):
        ids = np.flatnonzero(owner == index).astype(np.int64)
        test = ids[4::5]
        out.append(
            GraphPart(
                index=index,
                parts=parts,
                ids=ids,
                features=features[ids].copy(),
                labels=labels[ids],
                train=np.setdiff1d(ids, test),
                test=test,
                structure=full if structure == "full" else halo(adjacency, owner, ids),
                digest=f"toy-{nodes}-{parts}-{seed}",
                boundary=np.intersect1d(seen, ids),
            )
        )
    return out


def halo(adjacency: Adjacency, owner: NDArray[np.int32], ids: Ids) -> HaloStructure:
    """Return what the owner of ``ids`` knows at the start: its own rows, and who owns their columns."""
    own = adjacency.rows(ids)
    return HaloStructure(own, owner[own.columns], adjacency.nodes, int(owner[ids[0]]))


def taught(part: GraphPart, adjacency: Adjacency, owner: NDArray[np.int32], ids: Ids) -> GraphPart:
    """Return ``part`` of a halo structure after it was sent the rows of ``ids``."""
    rows = adjacency.rows(ids)
    assert isinstance(part.structure, HaloStructure)
    return replace(part, structure=part.structure.learn(rows, owner[rows.columns]))
