"""The tables of row codecs: sizes are lengths of what was made, and everything that is exact comes back."""

from __future__ import annotations

import numpy as np

from fedcomp.experiments.bench.graph_rows import id_table, row_table
from fedcomp.graphs.ids import encode_ids
from fedcomp.graphs.rowcodecs import ROW_CODECS
from fedcomp.rng import Key

IDS = np.arange(2, 200, 9)
WORDS = (Key(1, "bench words").uniform(IDS.size * 300).reshape(IDS.size, 300) < 0.05).astype(np.float32)


def test_row_tables_measure_frames() -> None:
    lines = {line["what"]: line for line in row_table(IDS, WORDS / 3, repeats=1)}
    assert {*ROW_CODECS, "np.savez_compressed", "zlib"} <= set(lines)
    for name, codec in ROW_CODECS.items():
        assert lines[name]["bytes"] == len(codec.encode(IDS, WORDS / 3))
        assert lines[name]["per_row"] == lines[name]["bytes"] / IDS.size
    exact = {name for name, line in lines.items() if line["error"] == 0.0}
    assert exact >= {n for n, c in ROW_CODECS.items() if c.exact_for(np.float32)} | {"np.savez_compressed", "zlib"}
    assert 0 < lines["csr-f16"]["error"] < 1e-3
    assert lines["auto"]["chosen"] == "binary-rice"
    # Codecs that cannot hold the rows are left out.
    mixed = WORDS * np.arange(1, 301, dtype=np.float32)
    assert {line["what"] for line in row_table(IDS, mixed, repeats=1)} == set(lines) - {"binary-rice"}


def test_id_tables_measure_frames() -> None:
    gaps, plain = id_table(IDS, repeats=1)
    assert gaps["bytes"] == len(encode_ids(IDS)) == round(gaps["per_id"] * IDS.size)
    assert plain["what"] == "int32 + zlib"
