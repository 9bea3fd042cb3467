"""What feature rows and id lists cost as bytes and in time, beside what numpy and byte compressors make of the same."""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Callable, Iterator
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


Way = tuple[str, Callable[[], bytes], Callable[[bytes], Any]]
"""A name, what makes bytes, and what reads them."""


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
    lines = []
    for what, make, read in (*_codecs(ids, rows), *_others(ids, rows)):
        data = make()
        found = read(data)
        # By bytes: "exact" means every bit, signs of zeros included.
        same = found.tobytes() == np.ascontiguousarray(rows).tobytes()
        line = _measured(what, "per_row", ids.size, make, partial(read, data), repeats)
        line["error"] = 0.0 if same else float(np.abs(found.astype(np.float64) - rows).max())
        lines.append({**line, "chosen": codec_of(data) if what == "auto" else ""})
    return lines


def id_table(ids: Ids, *, repeats: int = 5) -> list[dict[str, Any]]:
    """Return ``what``, ``bytes``, ``per_id`` and times in microseconds per id of an id list, and of int32 with zlib."""
    raw = ids.astype("<i4").tobytes()
    ways: tuple[Way, ...] = (
        ("gaps", partial(encode_ids, ids), decode_ids),
        ("int32 + zlib", partial(zlib.compress, raw), lambda data: np.frombuffer(zlib.decompress(data), "<i4")),
    )
    lines = []
    for what, make, read in ways:
        data = make()
        if not np.array_equal(read(data), ids):
            raise AssertionError(f"{what} does not give the ids back")
        lines.append(_measured(what, "per_id", ids.size, make, partial(read, data), repeats))
    return lines


def _measured(
    what: str, per: str, count: int, make: Callable[[], bytes], read: Callable[[], Any], repeats: int
) -> dict[str, Any]:
    size = len(make())
    times = Times({"encode_us": make, "decode_us": read}, repeats)
    taken = {name: 1e6 * min(seconds) / count for name, seconds in times.seconds.items()}
    return {"what": what, "bytes": size, per: size / count, **taken}


def _codecs(ids: Ids, rows: Floats) -> list[Way]:
    """Return the row codecs that can hold the rows."""
    found: list[Way] = []
    for name, codec in ROW_CODECS.items():
        try:
            codec.encode(ids, rows)
        # Not every codec can hold every row: one for words takes zeros and ones only.
        except GraphError:
            continue
        found.append((name, partial(codec.encode, ids, rows), partial(_decode, codec, rows)))
    return found


def _decode(codec: RowCodec, rows: Floats, frame: bytes) -> Floats:
    return codec.decode(frame, features=rows.shape[1], dtype=rows.dtype, limit=rows.shape[0])[1]


def _others(ids: Ids, rows: Floats) -> list[Way]:
    """Return what one would do without codecs: numpy's archive, and a byte compressor on ids and values."""
    raw = ids.astype("<i4").tobytes()

    def archive() -> bytes:
        data = io.BytesIO()
        np.savez_compressed(data, ids=ids.astype(np.int32), rows=rows)
        return data.getvalue()

    def unarchive(data: bytes) -> Floats:
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            found: Floats = stored["rows"]
        return found

    def values(data: bytes) -> Floats:
        return np.frombuffer(data, rows.dtype, offset=len(raw)).reshape(rows.shape)

    found: list[Way] = [
        ("np.savez_compressed", archive, unarchive),
        ("zlib", lambda: zlib.compress(raw + rows.tobytes()), lambda data: values(zlib.decompress(data))),
    ]
    if "zstd" in available_backends():
        import zstandard

        # The usual level, and the highest that is not "ultra": what general compressors can do, whatever it takes.
        small, big = zstandard.ZstdCompressor(level=3), zstandard.ZstdCompressor(level=19)
        unpack, csr = zstandard.ZstdDecompressor().decompress, ROW_CODECS["csr"]
        found += [
            ("zstd", lambda: small.compress(raw + rows.tobytes()), lambda data: values(unpack(data))),
            ("csr + zstd -19", lambda: big.compress(csr.encode(ids, rows)), lambda d: _decode(csr, rows, unpack(d))),
        ]
    return found


def cases(quick: bool) -> Iterator[Case]:
    """Yield Cora's features, as zeros and ones and divided by their sum, and ids: of all rows, and of as many as one
    step may fetch."""
    from fedcomp.tasks import get_task

    tasks: dict[str, Any] = {kind: get_task("cora", features=kind) for kind in ("binary", "rows")}
    features = {kind: task.graph.features for kind, task in tasks.items()}
    nodes, repeats = len(features["binary"]), 1 if quick else 5
    about = (
        f"{tasks['rows'].record()['data']['note']}; {np.count_nonzero(features['binary']) / nodes:.1f} non-zeros a row"
    )
    for count in (128, 20) if quick else (nodes, 128, 20):
        some = np.sort(np.argsort(Key(0, "bench/rows").bits(nodes), kind="stable")[:count])
        for kind, values in features.items():
            head: Row = {"rows": count, "features": kind}
            yield Case(f"{about}: {count} rows, {kind}", partial(_under, head, row_table, some, values[some], repeats))
        yield Case(f"{count} ids", partial(_under, {"ids": count}, id_table, some, repeats))


def _under(head: Row, table: Callable[..., list[dict[str, Any]]], *given: Any) -> list[Row]:
    *values, repeats, _ = given
    return [{**head, **line} for line in table(*values, repeats=repeats)]


if __name__ == "__main__":
    from fedcomp.experiments.bench.__main__ import main

    sys.exit(main(["graph_rows", *sys.argv[1:]]))
