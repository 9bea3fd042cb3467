"""Running statistics among compressed tensors: what names do not tell, and variances that turned negative.

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
from fedcomp.layout import Layout, hold_variances, may_be_variance, named_by_position


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
    return _note(held)


def hold_in_step(step: NDArray[np.float32], layout: Layout, model: NDArray[np.float32]) -> str:
    """The same for a ``step`` that is to be added to ``model``, both of the layout's size: 0 where a value is held."""
    suspects = [t for t in layout.compressed if may_be_variance(t)]
    before = {t.name: model[t.slice] for t in suspects}
    after = {t.name: model[t.slice] + step[t.slice] for t in suspects}
    held = hold_variances(before, after)
    for t in suspects:
        if t.name in held:
            step[t.slice][after[t.name] == before[t.name]] = 0.0
    return _note(held)


def _note(held: list[str]) -> str:
    if not held:
        return ""
    return (
        f"values of {', '.join(held[:5])}{' ...' if len(held) > 5 else ''} would no longer have been positive and keep "
        "what they were: if these are running variances, name them so that they travel as values (see SmallDense), or "
        "pass a policy that returns 'exact' for them"
    )
