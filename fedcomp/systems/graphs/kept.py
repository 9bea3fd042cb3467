"""An owner's stored state: cached rows, feature norms and its secret, and norms of hidden layers in its memory.

Rows and feature norms belong to the graph, and stay from run to run; norms of hidden layers belong to one run's model,
as all of a memory does. A client that has lost everything makes a plan that asks for more.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs import State
from fedcomp.errors import FedcompError, StateError
from fedcomp.graphs.base import GraphPart, Ids
from fedcomp.graphs.cache import FeatureCache
from fedcomp.graphs.settings import RowSettings
from fedcomp.program import Frames
from fedcomp.wire import Frame

Reals = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]

SECRET: Final = "secret"
"""Name of what an owner's noise comes from: never the run's seed, which everybody has."""

SECRET_BYTES: Final = 32

HIDDEN: Final = "graph/"
"""Before the names of what a memory holds of hidden layers."""

_CACHE: Final = {"key": "u1", "form": "<i8", "ids": "<i8", "lengths": "<u4", "rows": "u1"}
_DAMAGED: Final = "what this node keeps of the graph cannot be read: {}; restart the node"


@dataclass(frozen=True)
class NodeValues:
    """A number for each of some nodes.

    Attributes
    ----------
    ids : ndarray of int64
        Ascending.
    values : ndarray of float64
    """

    ids: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    values: Reals = field(default_factory=lambda: np.zeros(0))

    def updated(self, other: NodeValues) -> NodeValues:
        """Return both together; where both know a node, ``other``'s number."""
        if not len(other.ids):
            return self
        # unique points to the first of equals: with ``other`` in front its number wins.
        ids, first = np.unique(np.concatenate([other.ids, self.ids]), return_index=True)
        return NodeValues(ids, np.concatenate([other.values, self.values])[first])


@dataclass(frozen=True)
class Kept:
    """What an owner keeps beside its memory.

    Attributes
    ----------
    digest : str
        Of graph and partition; what is kept of another one says nothing here.
    cache : FeatureCache
        Rows of other owners.
    norms : NodeValues
        Feature norms of other owners' nodes.
    structure : tuple of (int, bytes)
        Rows of the adjacency that were sent for the turn ``turn``: owner and frame, in the order they came.
    turn : int
        A round's training, or its evaluation, which comes after it.
    """

    digest: str
    cache: FeatureCache
    norms: NodeValues = field(default_factory=NodeValues)
    structure: tuple[tuple[int, Frame], ...] = ()
    turn: int = -1

    @classmethod
    def of(cls, frames: Frames, part: GraphPart, rows: RowSettings) -> Kept:
        """Return what frames of :meth:`to_frames` say; nothing where they are of another graph.

        Rows that were cached with another codec or noise are not those that owners would send now, and are left out.

        Raises
        ------
        StateError
            When they are damaged.
        """
        # As JSON, in which no two triples read the same.
        key = json.dumps([part.digest, rows.codec, rows.noise])
        if frames.get("digest", b"").decode("utf-8", "replace") != part.digest:
            return cls(part.digest, FeatureCache(rows.cache, rows.limit, key=key))
        try:
            arrays = {
                name: np.frombuffer(frames[f"cache/{name}"], dtype).astype(dtype.removeprefix("<"))
                for name, dtype in _CACHE.items()
                if f"cache/{name}" in frames
            }
            empty = FeatureCache(rows.cache, rows.limit, key=key)
            cache = FeatureCache.from_arrays(arrays, rows.cache, rows.limit, key=key) if arrays else empty
            turn, structure = _structure_of(frames.get("structure", b""))
            return cls(part.digest, cache, _values_of(frames.get("norms", b"")), structure, turn)
        # Damaged bytes fail in whatever way the first wrong one brings about.
        except (FedcompError, KeyError, ValueError, TypeError) as error:
            raise StateError(_DAMAGED.format(error)) from error

    def taught(self, turn: int, norms: NodeValues, structure: Sequence[tuple[int, Frame]]) -> Kept:
        """Return this with feature norms and rows of the adjacency that were sent for a turn."""
        before = self.structure if self.turn == turn else ()
        # A question may come twice, and its rows must not be kept twice.
        more = tuple(frame for frame in structure if frame not in before)
        return replace(self, norms=self.norms.updated(norms), structure=before + more, turn=turn)

    def to_frames(self, before: Frames) -> dict[str, Frame]:
        """Return what differs from frames that are kept already."""
        found = {
            "digest": self.digest.encode(),
            "norms": self.norms.ids.astype("<i8").tobytes() + self.norms.values.astype("<f8").tobytes(),
            "structure": _structure_bytes(self.turn, self.structure),
        }
        if len(self.cache) or "cache/ids" in before:
            arrays = self.cache.to_arrays()
            found |= {f"cache/{name}": arrays[name].astype(dtype).tobytes() for name, dtype in _CACHE.items()}
        return {name: data for name, data in found.items() if before.get(name, b"") != data}


def _values_of(data: Frame) -> NodeValues:
    half = len(data) // 2
    ids, values = np.frombuffer(data[:half], "<i8"), np.frombuffer(data[half:], "<f8")
    if len(ids) != len(values) or (ids[1:] <= ids[:-1]).any():
        raise StateError("norms without their nodes")
    return NodeValues(ids.astype(np.int64), values.astype(np.float64))


def _structure_bytes(turn: int, frames: Sequence[tuple[int, Frame]]) -> Frame:
    if not frames:
        return b""
    heads = [turn, len(frames), *(number for owner, data in frames for number in (owner, len(data)))]
    return np.array(heads, "<i8").tobytes() + b"".join(data for _, data in frames)


def _structure_of(data: Frame) -> tuple[int, tuple[tuple[int, Frame], ...]]:
    if not data:
        return -1, ()
    turn, count = np.frombuffer(data[:16], "<i8").tolist()
    heads = np.frombuffer(data[16 : 16 + 16 * count], "<i8").reshape(count, 2).tolist()
    at, found = 16 + 16 * count, []
    for owner, length in heads:
        found.append((owner, data[at : at + length]))
        at += length
    if at != len(data):
        raise StateError("rows of the adjacency without their ends")
    return turn, tuple(found)


def own_secret(frames: Frames) -> tuple[bytes, bool]:
    """Return the secret that this owner's noise comes from, and whether it is new and has to be kept.

    Noise that is redrawn at every fetch would average out.

    Raises
    ------
    StateError
        When what is kept is not a secret.
    """
    held = frames.get(SECRET)
    if held is None:
        return secrets.token_bytes(SECRET_BYTES), True
    if len(held) != SECRET_BYTES:
        raise StateError("the secret that this owner's noise comes from is damaged; restart the node")
    return held, False


# Norms of hidden layers.


def hidden_of(memory: State, turn: int) -> tuple[NodeValues, ...]:
    """Return the norms of hidden layers as they were when a turn began, first hidden layer first.

    What a turn has seen joins the rest only with another turn: one that is made again has to find what it first found.
    """
    tables = _tables(memory, "hidden")
    if turn == int(memory.get(f"{HIDDEN}turn", np.array([turn]))[0]):
        return tables
    seen = _tables(memory, "seen")
    return tuple(_at(tables, layer).updated(_at(seen, layer)) for layer in range(max(len(tables), len(seen))))


def remembered(hidden: Sequence[NodeValues], seen: Iterable[NodeValues], turn: int) -> dict[str, NDArray[Any]]:
    """Return what a memory holds of hidden layers after a turn: what there was before it, and what it has seen."""
    found: dict[str, NDArray[Any]] = {f"{HIDDEN}turn": np.array([turn], np.int64)}
    for what, tables in (("hidden", hidden), ("seen", seen)):
        for layer, table in enumerate(tables):
            found[f"{HIDDEN}{what}/{layer}/ids"] = table.ids
            found[f"{HIDDEN}{what}/{layer}/values"] = table.values
    return found


def _tables(memory: Mapping[str, NDArray[Any]], what: str) -> tuple[NodeValues, ...]:
    found = list[NodeValues]()
    while (name := f"{HIDDEN}{what}/{len(found)}/") + "ids" in memory:
        found.append(NodeValues(memory[f"{name}ids"], memory[f"{name}values"]))
    return tuple(found)


def _at(tables: Sequence[NodeValues], layer: int) -> NodeValues:
    return tables[layer] if layer < len(tables) else NodeValues()
