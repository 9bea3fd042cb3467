"""A node's own cost beside training: keeping its state on disk.

System calls are included, against writing the same bytes to a file and flushing it. How long the disk takes is the
disk's; a state is written once for each message that changes it.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedcomp.flower.folder import Stamp, StateFolder, pack
from fedcomp.measuring import Bound, Case, Found, timed

SIZES: Final = (3_400_000, 40_000_000)
"""Bytes of a state: error feedback of a model of 850,000 parameters, and of one of ten million."""

PLAIN: Final = "write and flush"
OVER: Final = f"times {PLAIN}"


def cases(quick: bool) -> Iterator[Case]:
    """Yield saving, loading and looking at a state of each size, and a plain write of as many bytes."""
    for size in SIZES[:1] if quick else SIZES:
        with tempfile.TemporaryDirectory() as name:
            yield _state(Path(name), size, 2 if quick else 9)

    def most(found: Found) -> float:
        return max(row[OVER] for row in found.rows if row["what"] == "save")

    name = "processor time of a save, in plain writes"
    yield Case(bounds=[Bound(name, most, "<= 20", "goal", gate=False)])


def _state(home: Path, size: int, repetitions: int) -> Case:
    arrays = ArrayRecord({"memory": Array(np.arange(size // 4, dtype=np.float32))})
    records = RecordDict({"fedcomp.uplink.memory": arrays, "fedcomp.uplink": ConfigRecord({"pending": 1})})
    folder, written, count = StateFolder(home / "state", 0), b"".join(pack(records)[0]), itertools.count(1)

    def save() -> None:
        data, digest = pack(records)
        folder.save(Stamp(0, 1, (), "life", next(count), digest, sum(map(len, data))), *data)

    def load() -> None:
        (path,) = folder.stamps()
        folder.load(path)

    def write() -> None:
        with (home / "plain").open("wb") as file:
            file.write(written)
            file.flush()
            os.fsync(file.fileno())

    return timed(
        f"a state of {size / 1e6:g} MB",
        {"save": save, "load": load, "look at the head": folder.stamps, PLAIN: write},
        repetitions,
        lambda times, method: {
            "state in MB": size / 1e6,
            "what": method,
            "milliseconds": round(1e3 * times.median(method), 2),
            OVER: round(times.median(method) / times.median(PLAIN), 2),
        },
    )
