"""What feature rows and id lists cost as bytes and in time, beside what numpy and byte compressors make of the same."""

from __future__ import annotations

import io
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.graphs.base import GraphError, Ids
from fedcomp.graphs.ids import decode_ids, encode_ids
from fedcomp.graphs.rowcodecs import ROW_CODECS, RowCodec, codec_of
from fedcomp.rng import Key
from fedcomp.wire import available_backends

Floats = NDArray[np.floating[Any]]


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
    for name, codec in ROW_CODECS.items():
        try:
            frame = codec.encode(ids, rows)
        except GraphError:
            continue
        line = _line(name, ids, rows, _encoder(codec, ids, rows), _decoder(codec, rows), repeats)
        lines.append({**line, "chosen": codec_of(frame) if name == "auto" else ""})
    for name, make, read in _others(ids, rows):
        lines.append({**_line(name, ids, rows, make, read, repeats), "chosen": ""})
    return lines


def id_table(ids: Ids, *, repeats: int = 5) -> list[dict[str, Any]]:
    """Return ``what``, ``bytes``, ``per_id`` and times in microseconds per id of an id list, and of int32 with zlib."""

    def plain() -> bytes:
        return zlib.compress(ids.astype("<i4").tobytes())

    def read(data: bytes) -> Ids:
        return np.frombuffer(zlib.decompress(data), "<i4").astype(np.int64)

    def gaps() -> bytes:
        return encode_ids(ids)

    ways: tuple[tuple[str, Callable[[], bytes], Callable[[bytes], Ids]], ...] = (
        ("gaps", gaps, decode_ids),
        ("int32 + zlib", plain, read),
    )
    lines = []
    for what, make, back in ways:
        data = make()
        if not np.array_equal(back(data), ids):
            raise AssertionError(f"{what} does not give the ids back")
        lines.append(
            {
                "what": what,
                "bytes": len(data),
                "per_id": len(data) / ids.size,
                "encode_us": _best(make, repeats) / ids.size,
                "decode_us": _best(partial(back, data), repeats) / ids.size,
            }
        )
    return lines


def _line(
    what: str, ids: Ids, rows: Floats, make: Callable[[], bytes], read: Callable[[bytes], Floats], repeats: int
) -> dict[str, Any]:
    data = make()
    found = read(data)
    same = found.tobytes() == np.ascontiguousarray(rows).tobytes()
    return {
        "what": what,
        "bytes": len(data),
        "per_row": len(data) / ids.size,
        "encode_us": _best(make, repeats) / ids.size,
        "decode_us": _best(partial(read, data), repeats) / ids.size,
        "error": 0.0 if same else float(np.abs(found.astype(np.float64) - rows).max()),
    }


def _best(call: Callable[[], Any], repeats: int) -> float:
    """Return the least time of a call in microseconds."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best


def _encoder(codec: RowCodec, ids: Ids, rows: Floats) -> Callable[[], bytes]:
    return lambda: codec.encode(ids, rows)


def _decoder(codec: RowCodec, rows: Floats) -> Callable[[bytes], Floats]:
    return lambda frame: codec.decode(frame, features=rows.shape[1], dtype=rows.dtype, limit=rows.shape[0])[1]


def _others(ids: Ids, rows: Floats) -> list[tuple[str, Callable[[], bytes], Callable[[bytes], Floats]]]:
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

    found: list[tuple[str, Callable[[], bytes], Callable[[bytes], Floats]]] = [
        ("np.savez_compressed", archive, unarchive),
        ("zlib", lambda: zlib.compress(raw + rows.tobytes()), lambda data: values(zlib.decompress(data))),
    ]
    if "zstd" in available_backends():
        import zstandard

        small, big = zstandard.ZstdCompressor(level=3), zstandard.ZstdCompressor(level=19)
        reader = zstandard.ZstdDecompressor()
        sparse = ROW_CODECS["csr"]
        read = _decoder(sparse, rows)
        found += [
            ("zstd", lambda: small.compress(raw + rows.tobytes()), lambda data: values(reader.decompress(data))),
            (
                "csr + zstd -19",
                lambda: big.compress(sparse.encode(ids, rows)),
                lambda data: read(reader.decompress(data)),
            ),
        ]
    return found


def tables(task: str = "cora") -> dict[str, Any]:
    """Return the tables of a graph's features: all rows, and as many as one step may fetch.

    Returns
    -------
    dict
        ``source`` of the data, ``non_zeros`` per row, ``rows``: per number of rows and normalisation the lines of
        :func:`row_table`, ``ids``: per number of rows those of :func:`id_table`.
    """
    from fedcomp.tasks.graph import GraphTask
    from fedcomp.tasks.registry import get_task

    rows, ids, features = {}, {}, {}
    for kind in ("binary", "rows"):
        loaded = get_task(task, features=kind)
        if not isinstance(loaded, GraphTask):
            raise ConfigError(f"task {task!r} has no graph; take cora, citeseer or cora-ml")
        features[kind] = loaded.graph.features
    nodes = features["binary"].shape[0]
    for count in (nodes, 128, 20):
        some = np.sort(np.argsort(Key(0, "bench/rows").bits(nodes), kind="stable")[:count])
        ids[count] = id_table(some)
        for kind, values in features.items():
            rows[count, kind] = row_table(some, values[some])
    non_zeros = np.count_nonzero(features["binary"]) / nodes
    return {"source": loaded.record()["data"]["note"], "non_zeros": non_zeros, "rows": rows, "ids": ids}


def main() -> None:
    """Print them."""
    found = tables()
    print(f"{found['source']}; {found['non_zeros']:.1f} non-zeros per row")
    for (count, kind), lines in found["rows"].items():
        print(f"\n{count} rows, features={kind}")
        print(f"{'':22}{'bytes':>10}{'per row':>9}{'encode us':>11}{'decode us':>11}  error")
        for line in lines:
            head = f"{line['what']:22}{line['bytes']:10d}{line['per_row']:9.1f}"
            print(f"{head}{line['encode_us']:11.2f}{line['decode_us']:11.2f}  {line['error']:.1e} {line['chosen']}")
    for count, lines in found["ids"].items():
        print(f"\n{count} ids: " + ", ".join(f"{line['what']} {line['per_id']:.2f} bytes each" for line in lines))


if __name__ == "__main__":
    main()
