"""Capture of layer inputs and output gradients while a torch model trains.

Captured are calls of ``nn.Linear`` (recurrent cells and attention built from it included, on any number of leading
axes), of ``nn.Conv2d`` as the linear map of its patches, and, where its weight is a linear layer's too, of
``nn.Embedding``. A layer that is called several times has all its calls added up. Everything else is sent as the change
of the parameters, as always: fused recurrent layers and ``nn.MultiheadAttention``, which do not show what comes back to
their parts, normalisation, grouped convolutions, subclasses with a forward of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcomp.errors import ConfigError
from fedcomp.factors.backprop import ACTIVATIONS
from fedcomp.factors.collect import Captured, collecting, current
from fedcomp.factors.following import Following
from fedcomp.factors.outer import OuterProducts
from fedcomp.logs import log

BATCH_NORM: Final = (
    "BatchNorm in training mode: its statistics are each client's own, so that the mean of the clients' updates is not "
    "that of one batch of all examples, with factors or without. Freeze it, or use GroupNorm"
)

_FUSED: Final = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Bilinear, nn.Conv1d, nn.Conv3d)


@dataclass
class _Call:
    """One call of a layer: its input, and the gradient of its output once back-propagation has reached it."""

    entered: Tensor
    back: Tensor | None = None
    scale: float | None = None


@dataclass
class _Layer:
    """A parameter, its names, and the calls in which it was used."""

    parameter: nn.Parameter
    names: list[str]
    calls: list[tuple[nn.Module, _Call]] = field(default_factory=list)
    at_input: bool = False


@contextmanager
def capture(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Capture layer inputs and output gradients of ``model`` while it trains in the body.

    Costs nothing if the server did not ask for factors. The inputs and output gradients of every layer are held in
    memory for all steps until the body ends.

    Parameters
    ----------
    model : Module
        Its parameters have the names of the arrays that the client sends.
    optimizer : Optimizer, optional
        Plain SGD whose learning rate changes within the body or differs between parameters. Without it, all steps of
        the body have the same rate, which need not be known.

    Examples
    --------
    >>> model = nn.Linear(3, 2)
    >>> with capture(model):  # around the loop that trains
    ...     model(torch.ones(4, 3)).sum().backward()
    """
    collected = current()
    if collected is None:
        yield
        return
    with ExitStack() as hooks:
        following = Following(model)
        layers = _watch(model, collected, hooks, following)
        if optimizer is not None:
            handle = optimizer.register_step_pre_hook(lambda taken, *_: _scale(taken, layers, collected))
            hooks.callback(handle.remove)
        with following:
            yield
    _note_others(model, layers, collected)
    for layer in layers:
        for _, call in layer.calls:
            # Without an optimizer all have one scale; with one, nothing came of what no step followed.
            if call.scale is None:
                call.scale = 1.0 if optimizer is None else 0.0
        _gather(layer, collected)


def chain_of(model: nn.Module, example: Tensor) -> tuple[str, ...]:
    """Return the layers of a chain of linear maps, as ``Factors(mode="edad", chain=...)`` takes them.

    Functions between the layers are recognised by their effect on a layer's output, wherever they are called.

    Parameters
    ----------
    example : Tensor
        A batch of inputs; of two examples or more, or functions might be mistaken for each other.

    Raises
    ------
    ConfigError
        When the model is not such a chain: its layers are not called once each, in a row, with one of the known
        functions between them.

    Examples
    --------
    >>> chain_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(16, 4))
    ('0.weight:relu', '2.weight')
    """
    calls: list[tuple[str, Tensor, Tensor]] = []
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((f"{names[module]}.weight".lstrip("."), inputs[0].detach().clone(), output.detach().clone()))

    with ExitStack() as hooks, torch.no_grad():
        for module in model.modules():
            if _is(module, nn.Linear):
                hooks.callback(module.register_forward_hook(note).remove)
        training = model.training
        model.eval()
        try:
            model(example)
        finally:
            model.train(training)
    if len(calls) < 2 or len({name for name, _, _ in calls}) < len(calls):
        raise ConfigError(f"the model calls {len(calls)} linear layers; a chain has two or more, each called once")
    chain = []
    for (name, _, left), (following, entered, _) in pairwise(calls):
        found = [known for known, function in _FUNCTIONS.items() if _same(function(left), entered)]
        if not found:
            raise ConfigError(
                f"between {name} and {following} there is something else than one of {', '.join(ACTIVATIONS)}; use "
                "mode='dad'"
            )
        chain.append(name if found[0] == "identity" else f"{name}:{found[0]}")
    return (*chain, calls[-1][0])


_FUNCTIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": nn.functional.gelu,
    "gelu-tanh": lambda z: nn.functional.gelu(z, approximate="tanh"),
    "silu": nn.functional.silu,
}
assert tuple(_FUNCTIONS) == ACTIVATIONS


def _same(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and torch.allclose(a.reshape(-1), b.reshape(-1), rtol=1e-5, atol=1e-6)


def _is(module: nn.Module, kind: type[nn.Module]) -> bool:
    # A subclass that computes something else has a forward of its own.
    return isinstance(module, kind) and type(module).forward is kind.forward


def _captured(module: nn.Module) -> bool:
    if _is(module, nn.Conv2d):
        assert isinstance(module, nn.Conv2d)
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return _is(module, nn.Linear) or (_is(module, nn.Embedding) and not _renormalised(module))


def _renormalised(module: nn.Module) -> bool:
    return getattr(module, "max_norm", None) is not None or bool(getattr(module, "scale_grad_by_freq", False))


def _watch(model: nn.Module, collected: Captured, hooks: ExitStack, following: Following) -> list[_Layer]:
    """Put hooks on every layer that can be captured; return the weights of these layers."""
    hooks.callback(model.register_forward_pre_hook(following.refresh).remove)
    names: dict[nn.Parameter, list[str]] = {}
    # A weight of two layers has two names, and is sent under both.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    layers: dict[nn.Parameter, _Layer] = {}
    state = {"first": True}

    def watched(layer: _Layer) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not (torch.is_grad_enabled() and output.requires_grad):
                return
            entered = inputs[0].detach()
            # What no gradient leads to counts as the data; and so does what the first layer sees, whatever came before.
            layer.at_input |= state["first"] or not inputs[0].requires_grad or following.holds_examples(inputs[0])
            state["first"] = False
            call = _Call(entered)
            layer.calls.append((module, call))

            def came_back(gradient: Tensor) -> None:
                # Graphs may be walked through several times, and each adds to the gradient.
                call.back = gradient.detach() if call.back is None else call.back + gradient.detach()

            output.register_hook(came_back)

        return hook

    warned = False
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and not warned:
            collected.notes.append(BATCH_NORM)
            log.warning("%s", BATCH_NORM)
            warned = True
        if _captured(module) and isinstance(module.weight, nn.Parameter) and module.weight.requires_grad:
            layer = layers.setdefault(module.weight, _Layer(module.weight, names[module.weight]))
            hooks.callback(module.register_forward_hook(watched(layer)).remove)
    return list(layers.values())


def _scale(optimizer: torch.optim.Optimizer, layers: list[_Layer], collected: Captured) -> None:
    """Multiply the gradients since the last step by minus the rate of this one."""
    rates: dict[Any, float] = {}
    for group in optimizer.param_groups:
        plain = isinstance(optimizer, torch.optim.SGD) and not (
            group["momentum"] or group["weight_decay"] or group["maximize"]
        )
        rates |= dict.fromkeys(group["params"], -float(group["lr"]) if plain else 0.0)
    for layer in layers:
        for _, call in layer.calls:
            if call.scale is None:
                call.scale = rates.get(layer.parameter, 0.0)
    if not any(rates.values()):
        note = f"{type(optimizer).__name__} with these settings is not plain SGD: its steps are not sums of gradients"
        if note not in collected.notes:
            collected.notes.append(note)


def _gather(layer: _Layer, collected: Captured) -> None:
    """Combine the calls of one parameter if they are usable."""
    calls = [(module, call) for module, call in layer.calls if call.back is not None and call.scale]
    # Of an embedding alone the rows that changed are all there is to send.
    if not calls or all(isinstance(module, nn.Embedding) for module, _ in calls):
        return
    rows = layer.parameter.shape[0]
    columns = layer.parameter.numel() // rows
    count = sum(_count(module, call) for module, call in calls)
    if not collected.wanted(count, rows, columns, 0):
        return
    sides = [_sides(module, call) for module, call in calls]
    left, right = (np.concatenate([pair[side] for pair in sides]) for side in (0, 1))
    outer = OuterProducts(left, right, layer.at_input)
    collected.outer |= dict.fromkeys(layer.names, outer)


def _count(module: nn.Module, call: _Call) -> int:
    """Return the number of outer products in a call, without computing them."""
    assert call.back is not None
    if isinstance(module, nn.Conv2d):
        return call.back.numel() // module.out_channels
    if isinstance(module, nn.Embedding):
        return int(call.entered.unique().numel())
    return call.back.numel() // call.back.shape[-1]


def _sides(module: nn.Module, call: _Call) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return left and right sides of a call's outer products, float32 of shapes (n, rows) and (n, columns)."""
    assert call.back is not None
    back, entered = call.back.float() * (call.scale or 0.0), call.entered
    if isinstance(module, nn.Conv2d):
        sizes: Any = (module.kernel_size, module.dilation, module.padding, module.stride)
        lone = entered.dim() == 3
        patches = nn.functional.unfold((entered[None] if lone else entered).float(), *sizes)
        outputs = (back[None] if lone else back).flatten(2)
        return _rows(outputs.transpose(1, 2)), _rows(patches.transpose(1, 2))
    if isinstance(module, nn.Embedding):
        ids, places = entered.reshape(-1).unique(return_inverse=True)
        summed = torch.zeros(len(ids), back.shape[-1], dtype=back.dtype, device=back.device).index_add_(
            0, places, back.reshape(-1, back.shape[-1])
        )
        if module.padding_idx is not None:
            summed[ids == module.padding_idx] = 0.0
        return _rows(nn.functional.one_hot(ids, module.num_embeddings).float()), _rows(summed)
    return _rows(back), _rows(entered.float())


def _rows(tensor: Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(tensor.reshape(-1, tensor.shape[-1]).cpu().numpy())


def _note_others(model: nn.Module, layers: list[_Layer], collected: Captured) -> None:
    """Record the layers with matrices that train but do not expose the gradients of their outputs."""
    silent = [layer.names[0] for layer in layers if not layer.calls and layer.names[0] not in collected.outer]
    fused: Sequence[str] = [name for name, module in model.named_modules() if isinstance(module, _FUSED)]
    if silent or fused:
        collected.notes.append(f"nothing was captured of {', '.join([*fused, *silent][:10])}: it is sent as a gradient")


__all__ = ["BATCH_NORM", "capture", "chain_of", "collecting"]
