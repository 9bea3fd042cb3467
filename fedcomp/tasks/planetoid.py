"""The planetoid files of Cora and CiteSeer (Yang, Cohen and Salakhutdinov 2016): the only module that reads pickles.

The files are Python 2 pickles of numpy arrays, scipy matrices and dicts. They are read here only after their SHA-256
was compared with the recorded one, and even then with an unpickler that knows six names and refuses every other. A
matrix is not made by scipy but kept as its three arrays.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import FedcompError
from fedcomp.tasks.graph_sources import LabelledGraph


class PlanetoidError(FedcompError, ValueError):
    """A planetoid file holds something else than such a file does."""


class _Matrix:
    """The arrays of a pickled scipy csr_matrix, without anything else."""

    shape: tuple[int, int]
    data: NDArray[Any]
    indices: NDArray[Any]
    indptr: NDArray[Any]

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.shape = tuple(state["_shape"])
        self.data, self.indices, self.indptr = (state[name] for name in ("data", "indices", "indptr"))

    def dense(self) -> NDArray[np.float32]:
        """Return the whole matrix as dense rows."""
        out = np.zeros(self.shape, np.float32)
        out[np.repeat(np.arange(self.shape[0]), np.diff(self.indptr)), self.indices] = self.data
        return out


# What a pickled array calls to make an empty one, from an array: numpy's own name for it is private and has moved.
_EMPTY_ARRAY: Final[Callable[..., Any]] = np.empty(0).__reduce__()[0]  # type: ignore[assignment]

_KNOWN: Final[Mapping[tuple[str, str], Any]] = {
    ("scipy.sparse.csr", "csr_matrix"): _Matrix,
    ("numpy.core.multiarray", "_reconstruct"): _EMPTY_ARRAY,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,
}
"""Every name in the published files, and its replacement here."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise PlanetoidError(f"the file names {module}.{name}, which no planetoid file uses; reading stops")
        return _KNOWN[module, name]


def unpickle(data: bytes) -> Any:
    """Return what a planetoid file holds.

    Raises
    ------
    PlanetoidError
        When it names anything else than arrays, matrices, dicts and lists.
    """
    # Python 2 pickled the bytes of arrays as str; latin1 keeps every byte as one character.
    return _Unpickler(io.BytesIO(data), encoding="latin1").load()


def read(files: Mapping[str, bytes]) -> LabelledGraph:
    """Return the graph of the files ``ind.NAME.*``, whose SHA-256 have been verified.

    The rows of ``tx`` are those of the nodes in ``test.index``, in that order. Of CiteSeer's nodes, 15 have edges
    and no row: their features are zeros and their label is -1, so that they are neither trained nor tested on. Loops
    and repeated edges stand in the lists; whoever makes an adjacency of them drops both.
    """
    parts = {name.rpartition(".")[2]: data for name, data in files.items()}
    tested = np.array(parts.pop("index").split(), np.int64)
    held = {name: unpickle(data) for name, data in parts.items()}
    lists: Mapping[int, list[int]] = held["graph"]
    known, others = held["allx"].dense(), held["tx"].dense()
    # As many rows as the graph has nodes, not as the files have: those without a row stay zero.
    features = np.zeros((len(lists), known.shape[1]), np.float32)
    features[: len(known)], features[tested] = known, others
    labels = np.full(len(lists), -1, np.int64)
    labels[: len(known)], labels[tested] = _classes(held["ally"]), _classes(held["ty"])
    sources = np.repeat(np.fromiter(lists, np.int64), [len(near) for near in lists.values()])
    targets = np.array([node for near in lists.values() for node in near], np.int64)
    # The first nodes, whose labels are in y, are the public split's training nodes. The 500 after them it keeps for
    # choosing a model: they are neither trained nor tested on.
    train = np.arange(len(held["y"]), dtype=np.int64)
    return LabelledGraph(features, labels, sources, targets, held["ally"].shape[1], public=(train, np.sort(tested)))


def _classes(one_hot: NDArray[Any]) -> NDArray[np.int64]:
    """Return the class of each row, or -1 if it has none."""
    return np.where(one_hot.any(1), one_hot.argmax(1), -1).astype(np.int64)
