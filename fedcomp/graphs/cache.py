"""The cache of received feature rows, and noise that stays the same however often a row is sent.

Features never change, so a row that is held need not be fetched again. Under a limit the least recently used rows go
first. Each row is held in the shortest of three exact forms: a row of Cora, 5 732 bytes dense, then takes 41.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcomp.errors import ConfigError, StateError
from fedcomp.graphs.base import GraphError, Ids, MissingRows
from fedcomp.graphs.rowcodecs import BITS, Floats, RowBlock
from fedcomp.rules import Int, OneOf, checked

POLICIES: Final = ("none", "lru", "all")

ROW_BYTES: Final = 12
"""What a held row costs beside its values: an id of 8 bytes and a length of 4."""

MIN_SECRET: Final = 16

_DENSE, _SPARSE, _SINGLE = 0, 1, 2


class FeatureCache:
    """Rows of remote nodes.

    Every operation takes time in proportion to the rows it concerns, however many are held; :attr:`ids` and
    :meth:`to_arrays`, which list everything, take time in proportion to all of them.

    Parameters
    ----------
    policy : {"none", "lru", "all"}
        Keep nothing; as many of the most recently used rows as fit; everything.
    limit_bytes : int
        Of the policy "lru": :attr:`nbytes` never exceeds it. A row that alone is larger is not kept. In memory, not in
        the state, a Python object per row takes about 150 bytes more.
    key : str
        Names what the rows are: the graph, and all that shaped the values on their way (codec, noise). Arrays of
        another key are not read.

    Raises
    ------
    ConfigError

    Examples
    --------
    >>> cache = FeatureCache("lru", limit_bytes=40)
    >>> cache.put([3, 7], np.eye(2, 64, dtype=np.float32))
    >>> cache.ids.tolist(), cache.nbytes
    ([3, 7], 36)
    >>> cache.put([9], np.eye(1, 64, dtype=np.float32))
    >>> cache.ids.tolist()
    [7, 9]
    """

    def __init__(self, policy: str, limit_bytes: int = 0, *, key: str = "") -> None:
        checked("policy", policy, OneOf(*POLICIES))
        if policy == "lru":
            checked("limit_bytes", limit_bytes, Int(1))
        self.policy = policy
        self.limit_bytes = limit_bytes
        self.key = key
        # In the order of use, the least recently used first. Rows are held one by one, so that one can go alone.
        self._held: OrderedDict[int, bytes] = OrderedDict()
        self._nbytes = 0
        self._features = 0
        self._dtype: np.dtype[Any] = np.dtype(np.float32)
        self._ids: Ids | None = None

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows that are held, with :data:`ROW_BYTES` each: those of :meth:`to_arrays` but for a header."""
        return self._nbytes

    @property
    def ids(self) -> Ids:
        """Nodes whose rows are held, ascending; read-only."""
        if self._ids is None:
            self._ids = np.fromiter(self._held, np.int64, len(self._held))
            self._ids.sort()
            self._ids.flags.writeable = False
        return self._ids

    def get(self, ids: ArrayLike) -> Floats:
        """Return rows that are held, in the order of ``ids``, which become the most recently used ones.

        Returns
        -------
        ndarray, (len(ids), d), in the dtype in which they were put
            (0, 0) when nothing was ever put and no ids are given.

        Raises
        ------
        MissingRows
            When some are not held; names them. Recency is then as before.
        """
        wanted = np.asarray(ids, np.int64)
        keys = wanted.tolist()
        absent = [key for key in keys if key not in self._held]
        if absent:
            raise MissingRows(
                f"{len(absent)} of {len(keys)} rows are not cached, the first of node {absent[0]}; fetch them",
                np.array(absent, np.int64),
            )
        for key in keys:
            self._held.move_to_end(key)
        return self._decoded([self._held[key] for key in keys])

    def put(self, ids: ArrayLike, rows: Floats) -> None:
        """Keep rows, as the most recently used ones in the order given; least recently used ones make room.

        Parameters
        ----------
        ids : array of integers, (R,)
        rows : ndarray of float32 or float64, (R, d)
            Of the same dtype and length as all others, else a GraphError.
        """
        keys = np.asarray(ids, np.int64)
        rows = np.ascontiguousarray(rows)
        if rows.ndim != 2 or len(keys) != rows.shape[0] or rows.dtype not in (np.float32, np.float64):
            raise GraphError(
                f"{rows.dtype} rows of shape {rows.shape} for {len(keys)} nodes; expected one float row each"
            )
        if self._held and (rows.shape[1] != self._features or rows.dtype != self._dtype):
            raise GraphError(
                f"{rows.dtype} rows of {rows.shape[1]} features; those held are {self._dtype} of {self._features}"
            )
        if self.policy == "none" or not len(keys):
            return
        self._features, self._dtype = rows.shape[1], rows.dtype
        self._ids = None
        for key, row in zip(keys.tolist(), _encoded(rows), strict=True):
            self._insert(key, row)

    def _insert(self, key: int, row: bytes) -> None:
        """Keep one row as the most recently used one if it fits."""
        # Out first: the old bytes of the row must not push others out to make room for the new ones.
        before = self._held.pop(key, None)
        if before is not None:
            self._nbytes -= len(before) + ROW_BYTES
        cost = len(row) + ROW_BYTES
        if self.policy == "lru":
            if cost > self.limit_bytes:
                return
            # Room is made before the row is in: the limit holds at every moment.
            while self._nbytes + cost > self.limit_bytes:
                self._nbytes -= len(self._held.popitem(last=False)[1]) + ROW_BYTES
        self._held[key] = row
        self._nbytes += cost

    def _decoded(self, rows: list[bytes]) -> Floats:
        d, dtype = self._features, self._dtype
        wide, narrow = dtype.itemsize, _column_width(d)
        out = np.zeros((len(rows), d), dtype)
        # As bits: every pattern comes back as it was put in, -0.0 and NaN included.
        bits = out.view(BITS[wide])
        # The first byte of a held row is its form.
        kinds = np.array([row[0] for row in rows], np.uint8)
        if (at := np.flatnonzero(kinds == _DENSE)).size:
            bits[at] = np.frombuffer(b"".join(rows[i][1:] for i in at), bits.dtype).reshape(at.size, d)
        for kind in (_SPARSE, _SINGLE):
            if not (at := np.flatnonzero(kinds == kind)).size:
                continue
            sizes = np.array([len(rows[i]) - 1 for i in at], np.int64)
            counts = sizes // (narrow.itemsize + wide) if kind == _SPARSE else (sizes - wide) // narrow.itemsize
            # Values stand first, so that where they end is where columns begin.
            ends = (1 + (counts * wide if kind == _SPARSE else np.full(at.size, wide))).tolist()
            pieces = [rows[i] for i in at]
            values = np.frombuffer(b"".join(p[1:e] for p, e in zip(pieces, ends, strict=True)), bits.dtype)
            columns = np.frombuffer(b"".join(p[e:] for p, e in zip(pieces, ends, strict=True)), narrow)
            places = np.repeat(at * d, counts) + columns
            bits.reshape(-1)[places] = values if kind == _SPARSE else np.repeat(values, counts)
        return out

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return everything as a few arrays for a client's state, the least recently used row first."""
        ids = np.fromiter(self._held, np.int64, len(self._held))
        lengths = np.fromiter(map(len, self._held.values()), np.uint32, len(self._held))
        rows = np.frombuffer(b"".join(self._held.values()), np.uint8)
        form = np.array([self._features, self._dtype.itemsize], np.int64)
        return {
            "key": np.frombuffer(_digest(self.key), np.uint8),
            "form": np.array([*form, _checksum(form, ids, lengths, rows)], np.int64),
            "ids": ids,
            "lengths": lengths,
            "rows": rows,
        }

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], policy: str, limit_bytes: int = 0, *, key: str = ""
    ) -> FeatureCache:
        """Return the cache that :meth:`to_arrays` wrote, with the same recency; an empty one when its key differs.

        With a lower limit the least recently used rows are left out.

        Raises
        ------
        StateError
            When the arrays are not those of a cache.
        """
        cache = cls(policy, limit_bytes, key=key)
        try:
            said, form, ids, lengths, blob = (arrays[n] for n in ("key", "form", "ids", "lengths", "rows"))
        except KeyError as error:
            raise StateError(f"array {error} of a stored cache is missing") from None
        if said.tobytes() != _digest(key) or policy == "none" or not ids.size:
            return cache
        # Against a torn write, not against an attacker: who can write the state can write its checksum, too.
        sound = form.shape == (3,) and form[2] == _checksum(form[:2], ids, lengths, blob)
        if not sound or int(lengths.sum()) != blob.size:
            raise StateError("a stored cache is damaged")
        cache._features = int(form[0])
        cache._dtype = np.dtype(f"f{form[1]}")
        whole = blob.tobytes()
        end = 0
        # In the order they were written: recency comes out as it was, and a lower limit drops the oldest.
        for node, length in zip(ids.tolist(), lengths.tolist(), strict=True):
            cache._insert(node, whole[end : end + length])
            end += length
        return cache


def _encoded(rows: Floats) -> list[bytes]:
    """Return each row in its shortest form: its kind, its values, and their columns."""
    d, wide = rows.shape[1], rows.dtype.itemsize
    block = RowBlock(*rows.shape, dense=rows)
    places, values = block.entries
    starts, counts, columns = block.starts[:-1], np.diff(block.starts), places % d
    words = values.view(BITS[wide])
    # Trailing rows without entries begin past the last one: clipped here, and repeated zero times.
    first = np.repeat(words[np.minimum(starts, max(0, words.size - 1))], counts) if words.size else words
    of = np.repeat(np.arange(counts.size), counts)
    several = np.bincount(of[words != first], minlength=counts.size) > 0
    narrow = _column_width(d)
    sizes = np.stack(
        (
            np.full(counts.size, d * wide),
            counts * (wide + narrow.itemsize),
            # Where one value cannot stand for the row, a size that never wins: above that of the dense form.
            np.where(several | (counts == 0), d * wide + 1, wide + counts * narrow.itemsize),
        )
    )
    kinds = np.argmin(sizes, axis=0).tolist()
    where, what = columns.astype(narrow).tobytes(), values.tobytes()
    heads = [bytes((kind,)) for kind in (_DENSE, _SPARSE, _SINGLE)]
    out = []
    for row, (kind, start, count) in enumerate(zip(kinds, starts.tolist(), counts.tolist(), strict=True)):
        if kind == _DENSE:
            out.append(heads[kind] + rows[row].tobytes())
            continue
        last = start + (count if kind == _SPARSE else 1)
        size = narrow.itemsize
        out.append(heads[kind] + what[start * wide : last * wide] + where[start * size : (start + count) * size])
    return out


def _column_width(d: int) -> np.dtype[Any]:
    """Return the dtype for the column numbers of ``d`` features."""
    return np.dtype("u1") if d <= 1 << 8 else np.dtype("<u2") if d <= 1 << 16 else np.dtype("<u4")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _checksum(*arrays: NDArray[Any]) -> int:
    crc = 0
    for array in arrays:
        crc = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, crc)
    return crc


def noisy_rows(rows: Floats, ids: ArrayLike, std: float, secret: bytes) -> Floats:
    """Return rows with Gaussian noise that is the same each time a row leaves its owner.

    Fresh noise would average out over fetches. The noise of a row is a function of its id, the standard deviation and
    the owner's secret, by SHAKE-256: without the secret nobody can draw it again. This is not differential privacy:
    nothing is clipped or accounted for, the last bits of floating-point noise reveal something of the value, and rows
    of neighbours are correlated.

    Parameters
    ----------
    rows : ndarray of float32 or float64, (R, d)
    ids : array of integers, (R,)
    std : float
        Standard deviation; 0 returns the rows as they are.
    secret : bytes
        The owner's own, at least 16 bytes from the operating system; never derived from the run's seed, which everybody
        has. Each graph needs its own: otherwise the difference of two rows with the same id is free of noise.

    Returns
    -------
    ndarray, (R, d), in the dtype of ``rows``

    Raises
    ------
    ConfigError
        For a standard deviation that is negative or not finite, or a short secret.
    GraphError
        When there is not one row per id.
    """
    if not 0.0 <= std < float("inf"):
        raise ConfigError(f"noise of standard deviation {std!r} is not possible; expected a finite number >= 0")
    if len(secret) < MIN_SECRET:
        raise ConfigError(f"a secret of {len(secret)} bytes is too short; take {MIN_SECRET} or more from os.urandom")
    keys = np.asarray(ids, np.int64)
    if rows.ndim != 2 or rows.shape[0] != keys.size:
        raise GraphError(f"rows of shape {rows.shape} for {keys.size} nodes; expected one row each")
    if std == 0.0 or not rows.size:
        return rows
    pairs = -(-rows.shape[1] // 2)
    # Of fixed length, so that no two (secret, std, id) read the same.
    prefix = hashlib.sha256(secret).digest() + np.float64(std).tobytes()
    drawn = b"".join(hashlib.shake_256(prefix + key.tobytes()).digest(16 * pairs) for key in keys.astype("<i8"))
    words = np.frombuffer(drawn, "<u8").reshape(-1, 2, pairs)
    # Box and Muller (1958), with a radius from (0, 1] and an angle from [0, 1).
    # 53 bits, all that a float64 holds: with 64 the largest would round to 1.
    uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log1p(-uniform[:, 0]))
    angle = 2.0 * np.pi * uniform[:, 1]
    normal = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)), axis=1)[:, : rows.shape[1]]
    return (rows + std * normal).astype(rows.dtype)
