"""What a node's own work costs beside training: keeping its state on disk.

Processor time of one thread, system calls included, against writing the same bytes to a file and flushing it. How long
the disk takes is the disk's; a state is written once for each message that changes it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedcomp.experiments.bench.readpass import interleaved
from fedcomp.experiments.kit import claim
from fedcomp.flower.folder import Stamp, StateFolder, pack

SIZES: Final = (3_400_000, 40_000_000)
"""Bytes of a state: error feedback of a model of 850,000 parameters, and of one of ten million."""

MOST: Final = 20.0
"""A goal: processor time of a save in that of writing and flushing the same bytes."""


def run(*, quick: bool = False, progress: Callable[[str], None] | None = None) -> Mapping[str, Any]:
    """Run the benchmark."""
    rows = []
    for size in SIZES[:1] if quick else SIZES:
        if progress is not None:
            progress(f"a state of {size / 1e6:g} MB")
        rows += state(size, 2 if quick else 9)
    worst = max(row["times write and flush"] for row in rows if row["what"] == "save")
    return {
        "rows": rows,
        "claims": [claim("processor time of a save, in plain writes", worst, f"<= {MOST}", "goal", gate=False)],
    }


def state(size: int, repetitions: int) -> list[dict[str, Any]]:
    """Return rows of saving, loading and looking at a state of ``size`` bytes, and of a plain write of as many."""
    arrays = ArrayRecord({"memory": Array(np.arange(size // 4, dtype=np.float32))})
    records = RecordDict({"fedcomp.uplink.memory": arrays, "fedcomp.uplink": ConfigRecord({"pending": 1})})
    with tempfile.TemporaryDirectory() as name:
        folder, plain = StateFolder(Path(name, "state"), 0), Path(name, "plain")
        count = 0

        def save() -> None:
            nonlocal count
            count += 1
            data, digest = pack(records)
            folder.save(Stamp(0, 1, (), "life", count, digest, len(data)), data)

        def load() -> None:
            (path,) = folder.stamps()
            folder.load(path)

        def write() -> None:
            with plain.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        data = pack(records)[0]
        calls = {"save": save, "load": load, "look at the head": folder.stamps, "write and flush": write}
        seconds = interleaved(calls, repetitions)
    base = median(seconds["write and flush"])
    return [
        {
            "state in MB": size / 1e6,
            "what": what,
            "milliseconds": round(1e3 * median(taken), 2),
            "times write and flush": round(median(taken) / base, 2),
        }
        for what, taken in seconds.items()
    ]
