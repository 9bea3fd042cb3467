"""Running statistics among compressed tensors: detecting unnamed ones, and keeping variances positive.

Statistics travel as values where the density policy knows them. Where it does not, because a model's tensors have no
names or unusual ones, the server says so and keeps what must stay positive positive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedcomp.flower.logs import log
from fedcomp.layout import Layout, hold_variances, may_be_variance, named_by_position, note_of_held


def warn_of_missing_names(layout: Layout) -> None:
    """Warn when the model's tensors are called "0", "1", ..., so that statistics cannot be told from weights."""
    if not named_by_position(layout.order):
        return
    found = [t.name for t in layout.exact if np.dtype(t.dtype).kind == "f"]
    log.warning(
        "the model's %d tensors are named by position ('0', '1', ...): %s. Running statistics of other frameworks are "
        "compressed like weights. Name the tensors (ArrayRecord(model.state_dict()), or a dictionary of Arrays) or "
        "pass a policy that returns 'exact' for them",
        len(layout.order),
        f"taken for batch statistics by their shapes: {', '.join(found)}"
        if found
        else "no batch statistics recognised",
    )


def hold_in_record(record: ArrayRecord, layout: Layout, model: Mapping[str, NDArray[Any]]) -> str:
    """Keep what may be a variance positive in the aggregated ``record``; return a note for the report, or ""."""
    suspects = [t.name for t in layout.compressed if may_be_variance(t) and t.name in record]
    values = {name: np.array(record[name].numpy()) for name in suspects}
    held = hold_variances(model, values)
    for name in held:
        record[name] = Array(values[name])
    return note_of_held(held) if held else ""
