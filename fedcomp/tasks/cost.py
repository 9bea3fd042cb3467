"""The cost of a layer per weight, by which ScaleCom's authors choose densities per layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedcomp.errors import ConfigError
from fedcomp.layout import DENSE, Density, SmallDense, TablePolicy, TensorShape

_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
_WEIGHTED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.Embedding, *_RECURRENT)


def multiplies_per_weight(model: nn.Module, example: Tensor) -> dict[str, float]:
    """Return per weight tensor how many multiplications one example's forward pass makes with each of its elements.

    That is the number of positions at which a weight is used: height times width of a convolution's output, the length
    of the sequence for recurrent layers and what follows them, 1 for a fully connected layer. Forward and backward pass
    together make three times as many.

    Parameters
    ----------
    model : torch.nn.Module
        Left as it is; evaluated once, without gradients.
    example : Tensor of shape (B, ...)
        Any batch of inputs.
    """
    found: dict[str, float] = {}

    def record(path: str, module: nn.Module, output: Any) -> None:
        # Recurrent modules return all states and the last one.
        states = output[0] if isinstance(output, tuple) else output
        channels = states.shape[1] if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) else states.shape[-1]
        # The output has one element per example, channel and position: the ratio leaves the positions.
        positions = states.numel() / (example.shape[0] * channels)
        for name, _ in module.named_parameters(recurse=False):
            # A recurrent layer's weights are called weight_ih_l0, weight_hh_l0 and so on.
            if name.startswith("weight"):
                full = f"{path}.{name}" if path else name
                # A module that is used several times in one pass uses its weights several times.
                found[full] = found.get(full, 0.0) + positions

    # path=path binds the name of this module: without it all hooks would report the last one.
    handles = [
        module.register_forward_hook(lambda m, _inputs, output, path=path: record(path, m, output))
        for path, module in model.named_modules()
        if isinstance(module, _WEIGHTED)
    ]
    training = model.training
    try:
        # In training mode the pass would move running statistics of the caller's model.
        model.eval()
        with torch.no_grad():
            model(example)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return found


def scalecom_policy(multiplies: Mapping[str, float], *, uncompressed: Collection[str] | None = None) -> TablePolicy:
    """Return the density per layer that ScaleCom's authors recommend.

    Compression of about 25x for layers with at least 196 multiplications per weight, 50x from 128 to 196, 400x below;
    first and last layer and biases uncompressed (recalled; that the figure counts one example's forward pass is our
    reading: 196 = 14 x 14 then is a middle layer of a ResNet on ImageNet). Densities of single layers need a codec with
    ``scope="layer"``. Small tensors and statistics are treated as by :class:`fedcomp.layout.SmallDense`.

    Parameters
    ----------
    multiplies : mapping of tensor name to float
        :func:`multiplies_per_weight`, in the order in which the layers are used.
    uncompressed : collection of str, optional
        Tensors that travel dense; default the first and the last.

    Raises
    ------
    ConfigError
        When ``uncompressed`` names a tensor that is not in ``multiplies``, or there is no layer.
    """
    names = list(multiplies)
    if not names:
        raise ConfigError("no layer with weights was found; pass what multiplies_per_weight() returns")
    dense = {names[0], names[-1]} if uncompressed is None else set(uncompressed)
    unknown = sorted(dense - set(names))
    if unknown:
        raise ConfigError(f"uncompressed={unknown} are not layers of the model; its layers are {names}")
    table: dict[str, Density] = {}
    for name, count in multiplies.items():
        compression = 25.0 if count >= 196 else 50.0 if count >= 128 else 400.0
        table[name] = DENSE if name in dense else 1.0 / compression
    return _Guided(table)


@dataclass(frozen=True, slots=True)
class _Guided(TablePolicy):
    """The policy of the table where it has an entry, and the default policy elsewhere."""

    default: SmallDense = field(default_factory=SmallDense)

    def fit(self, model: Mapping[str, TensorShape]) -> _Guided:
        return replace(self, default=self.default.fit(model))

    def __call__(self, name: str, shape: tuple[int, ...], dtype: str) -> Density:
        default = self.default(name, shape, dtype)
        return default if default is not None else self.table.get(name)
