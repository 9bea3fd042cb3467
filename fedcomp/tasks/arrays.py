"""A torch model as named numpy arrays and back, for :class:`fedcomp.layout.Layout`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcomp.errors import LayoutError


def to_arrays(model: torch.nn.Module) -> dict[str, NDArray[Any]]:
    """Return a copy of the model's state dict as numpy arrays, in the model's own order.

    Buffers are included: running statistics as float32, ``num_batches_tracked`` as a 0-d int64 array.
    """
    # numpy() shares the model's memory, which training goes on to change.
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in model.state_dict().items()}


def load_arrays(model: torch.nn.Module, arrays: Mapping[str, NDArray[Any]], *, cast: bool = False) -> None:
    """Copy ``arrays`` into the model's parameters and buffers.

    With ``cast``, numbers of another type are converted, to integers by rounding: Flower's averages turn integer
    buffers into float64, and its FedAdam, FedYogi and QFedAvg turn everything into float64.

    Raises
    ------
    LayoutError
        When names, shapes or dtypes are not exactly the model's; the model is then unchanged.
    """
    state = model.state_dict()
    missing = [name for name in state if name not in arrays]
    extra = [name for name in arrays if name not in state]
    if missing or extra:
        raise LayoutError(
            f"arrays do not fit the model: missing {missing[:5]}, unexpected {extra[:5]}; "
            "both sides must build the same model with the same options"
        )
    # Gathered first and copied in at the end: a bad array found late must not leave half a new model behind.
    incoming = {}
    for name, tensor in state.items():
        array = np.asarray(arrays[name])
        if tuple(array.shape) != tuple(tensor.shape):
            raise LayoutError(
                f"array {name!r} has shape {tuple(array.shape)}, the model needs {tuple(tensor.shape)}; "
                "both sides must build the same model with the same options"
            )
        wanted = str(tensor.dtype).removeprefix("torch.")
        # A dtype works its name out at every access.
        found = array.dtype.name
        if cast and found != wanted and array.dtype.kind in "fiu":
            # An average of equal counters can come back as 99.99999: truncating it would lose one.
            whole = not tensor.dtype.is_floating_point and array.dtype.kind == "f"
            array = (np.rint(array) if whole else array).astype(wanted)
            found = wanted
        if found != wanted:
            raise LayoutError(f"array {name!r} has dtype {array.dtype}, the model needs {wanted}; cast it first")
        # Read alone, but torch warns of what may not be written to: arrays decoded from a frame are views of its bytes.
        incoming[name] = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(incoming[name])
