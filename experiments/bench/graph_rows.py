"""Size and time of encoded feature rows and id lists, against numpy and byte compressors."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.graphs.base import GraphError, Ids
from fedcomp.graphs.ids import decode_ids, encode_ids
from fedcomp.graphs.rowcodecs import ROW_CODECS, RowCodec, codec_of
from fedcomp.measuring import Case, Row, Times
from fedcomp.rng import Key
from fedcomp.wire import available_backends

Floats = NDArray[np.floating[Any]]

Ways = dict[str, tuple[Callable[[], bytes], Callable[[bytes], Any]]]
"""By name what makes bytes, and what reads them."""


def row_table(ids: Ids, rows: Floats, *, repeats: int = 5) -> list[dict[str, Any]]:
    """Return one line per row codec that can hold ``rows``, then those of the others.

    Parameters
    ----------
    ids : ndarray of int64, (R,)
        Ascending.
    rows : ndarray of float32 or float64, (R, d)
    repeats : int
        Times are the best of so many.

    Returns
    -------
    list of dict
        ``what``, ``bytes`` (of the whole frame, ids included), ``per_row``, ``encode_us`` and ``decode_us`` per row,
        ``error`` (largest absolute one; 0 where all bits are the same), ``chosen`` ("auto" only: what it is).
    """
    raw = ids.astype("<i4").tobytes()

    def archive() -> bytes:
        data = io.BytesIO()
        np.savez_compressed(data, ids=ids.astype(np.int32), rows=rows)
        return data.getvalue()

    def unarchive(data: bytes) -> Any:
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            return stored["rows"]

    def values(data: bytes) -> Floats:
        return np.frombuffer(data, rows.dtype, offset=len(raw)).reshape(rows.shape)

    ways: Ways = {}
    for name, codec in ROW_CODECS.items():
        # Not every codec can hold every row: one for words takes zeros and ones only.
        with suppress(GraphError):
            codec.encode(ids, rows)
            ways[name] = partial(codec.encode, ids, rows), partial(_decode, codec, rows)
    # What one would do without codecs: numpy's archive, and a byte compressor on ids and values.
    ways["np.savez_compressed"] = archive, unarchive
    ways["zlib"] = lambda: zlib.compress(raw + rows.tobytes()), lambda data: values(zlib.decompress(data))
    if "zstd" in available_backends():
        import zstandard

        # The usual level, and the highest that is not "ultra": what general compressors can do, whatever it takes.
        small, big = zstandard.ZstdCompressor(level=3), zstandard.ZstdCompressor(level=19)
        unpack, (make, read) = zstandard.ZstdDecompressor().decompress, ways["csr"]
        ways["zstd"] = lambda: small.compress(raw + rows.tobytes()), lambda data: values(unpack(data))
        ways["csr + zstd -19"] = lambda: big.compress(make()), lambda data: read(unpack(data))
    lines = []
    for what, (make_it, read_it) in ways.items():
        data, line = _measured(what, "per_row", ids.size, make_it, read_it, repeats)
        found = read_it(data)
        # By bytes: "exact" means every bit, signs of zeros included.
        same = found.tobytes() == np.ascontiguousarray(rows).tobytes()
        line["error"] = 0.0 if same else float(np.abs(found.astype(np.float64) - rows).max())
        lines.append({**line, "chosen": codec_of(data) if what == "auto" else ""})
    return lines


def _decode(codec: RowCodec, rows: Floats, frame: bytes) -> Floats:
    return codec.decode(frame, features=rows.shape[1], dtype=rows.dtype, limit=rows.shape[0])[1]


def id_table(ids: Ids, *, repeats: int = 5) -> list[dict[str, Any]]:
    """Return ``what``, ``bytes``, ``per_id`` and times in microseconds per id of an id list, and of int32 with zlib."""
    raw, lines = ids.astype("<i4").tobytes(), []
    ways: Ways = {
        "gaps": (partial(encode_ids, ids), decode_ids),
        "int32 + zlib": (partial(zlib.compress, raw), lambda data: np.frombuffer(zlib.decompress(data), "<i4")),
    }
    for what, (make, read) in ways.items():
        data, line = _measured(what, "per_id", ids.size, make, read, repeats)
        if not np.array_equal(read(data), ids):
            raise AssertionError(f"{what} does not give the ids back")
        lines.append(line)
    return lines


def _measured(
    what: str, per: str, count: int, make: Callable[[], bytes], read: Callable[[bytes], Any], repeats: int
) -> tuple[bytes, dict[str, Any]]:
    data = make()
    times = Times({"encode_us": make, "decode_us": partial(read, data)}, repeats)
    taken = {name: 1e6 * min(seconds) / count for name, seconds in times.seconds.items()}
    return data, {"what": what, "bytes": len(data), per: len(data) / count, **taken}


def cases(quick: bool) -> Iterator[Case]:
    """Yield Cora's features, as zeros and ones and divided by their sum, and ids: of all rows, and of as many as one
    step may fetch."""
    from fedcomp.tasks import get_task

    tasks: dict[str, Any] = {kind: get_task("cora", features=kind) for kind in ("binary", "rows")}
    features = {kind: task.graph.features for kind, task in tasks.items()}
    nodes, repeats = len(features["binary"]), 1 if quick else 5
    note, sums = tasks["rows"].record()["data"]["note"], np.count_nonzero(features["binary"]) / nodes
    for count in (128, 20) if quick else (nodes, 128, 20):
        some = np.sort(np.argsort(Key(0, "bench/rows").bits(nodes), kind="stable")[:count])
        for kind, values in features.items():
            text, head = f"{note}; {sums:.1f} non-zeros a row: {count} rows, {kind}", {"rows": count, "features": kind}
            yield Case(text, partial(_under, head, partial(row_table, some, values[some], repeats=repeats)))
        yield Case(f"{count} ids", partial(_under, {"ids": count}, partial(id_table, some, repeats=repeats)))


def _under(head: Row, table: Callable[[], list[dict[str, Any]]], _: Any) -> list[Row]:
    return [{**head, **line} for line in table()]
