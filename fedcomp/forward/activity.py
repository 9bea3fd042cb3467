"""Gradients of linear layers by activity perturbation: less variance than weight perturbation, but more numbers.

An example i of a layer contributes the outer product of what comes back to the layer's outputs, δ_i, and its inputs,
a_i. Moving the outputs by signs u_i changes the example's loss by s_i = <δ_i, u_i>, one number for each example and all
in one forward pass, and the mean of s_i u_i a_iᵀ is the gradient: unbiased, with variance Σ |a_i|² (h - 1) |δ_i|² for h
outputs (derived; 63 times less than for the weights of the spec's layer, measured there with normal numbers). Ren,
Kornblith, Liao, Hinton, "Scaling forward gradient with local losses", ICLR 2023 (abstract and configuration read).

Who has the numbers and the seed does not have the gradient: the inputs are the client's own. So this serves training on
a client; what leaves is the update, compressed like any other, or the inputs beside the numbers: of the factors that
distributed auto-differentiation sends (:class:`fedcomp.codecs.Factors`, mode "dad") the left ones are saved, and the
same is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import jvp

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.factors.collect import current
from fedcomp.factors.following import Following
from fedcomp.factors.outer import OuterProducts
from fedcomp.factors.signed import SignedRows
from fedcomp.rng import Key


@dataclass(frozen=True)
class ActivityEstimate:
    """What one batch says of the gradient.

    Attributes
    ----------
    loss : float
        Mean over the examples.
    outer : mapping of str to OuterProducts
        By name of a weight: the matrix that estimates its gradient, as outer products of the examples.
    vectors : mapping of str to float32 array
        By name of a bias: the estimate of its gradient.
    """

    loss: float
    outer: Mapping[str, OuterProducts]
    vectors: Mapping[str, NDArray[np.float32]]

    def gradients(self) -> dict[str, NDArray[np.float32]]:
        """Return the estimates by name of the parameter."""
        return {**{name: found.matrix() for name, found in self.outer.items()}, **self.vectors}


def activity_gradients(
    module: nn.Module, losses: Callable[[nn.Module], Tensor], key: Key, *, count: int = 1
) -> ActivityEstimate:
    """Estimate the gradients of a module's linear layers without a backward pass.

    For local losses, stop gradients between the module's blocks with ``Tensor.detach``, and let ``losses`` add the
    losses of all blocks' heads.

    On a client whose server asked for factors, estimates are captured as :func:`fedcomp.factors.capture.capture` does
    with gradients, without a block around them: an update by plain SGD, minus one step size times the sum of all
    estimates, may travel as inputs and slopes.

    Parameters
    ----------
    module : torch.nn.Module
        All its parameters belong to linear layers, each called once on a batch of vectors. Their names are those of the
        arrays that the client sends.
    losses : callable
        ``losses(module) -> tensor`` of shape (examples,), one for each example of one batch.
    key : Key
        Key of the signs; use a new one for every step. If the server asked for factors, the round's seed and a step
        counter determine the signs, so that the server draws the same.
    count : int
        Passes for each layer; the estimate is their mean.

    Raises
    ------
    ConfigError
        For other parameters, layers that share a weight, or a layer that is called in another way.

    Examples
    --------
    >>> module = nn.Linear(3, 1, bias=False)
    >>> x = torch.tensor([[1.0, 2.0, 3.0]])
    >>> found = activity_gradients(module, lambda model: 2.0 * model(x)[:, 0], Key(0, "example"))
    >>> found.gradients()["weight"]
    array([[2., 4., 6.]], dtype=float32)
    """
    layers, count = _linear_layers(module), params.integer("count", count, low=1)
    collected = current()
    seed = key.u64() if collected is None or collected.seed is None else collected.seed
    with torch.no_grad():
        reached: set[str] = set()
        seen = _Watched(layers, reached)
        with Following(module) as following:
            value = seen.run(module, losses, {})
            raw = {name for name in layers if following.holds_examples(seen.inputs[name])}
        lefts: dict[str, SignedRows] = {}
        for name in layers:
            (n, width), weight = seen.outputs[name], f"{name}.weight".lstrip(".")
            start = 0 if collected is None else collected.more_rows(weight, n)
            rows = lefts[name] = SignedRows(np.empty((n, count), np.float32), seed, weight, width, start)
            for k in range(count):
                moved = torch.from_numpy(rows.signs(k)).to(seen.inputs[name])
                slopes = _slopes(module, losses, layers, name, moved, reached)
                # NumPy has no bfloat16.
                wide = slopes.to(torch.promote_types(slopes.dtype, torch.float32))
                rows.slopes[:, k] = wide.cpu().numpy() / np.float32(count * n)
        outer: dict[str, OuterProducts] = {}
        vectors: dict[str, NDArray[np.float32]] = {}
        for name, rows in lefts.items():
            # What no other layer has a part in is the data, and so is what the data reach past the layers.
            at_input = name in raw or name not in reached
            found = OuterProducts.of_signed(rows, seen.inputs[name].float().cpu().numpy(), at_input)
            outer[rows.name] = found
            if layers[name].bias is not None:
                # As receivers add them up.
                vectors[f"{name}.bias".lstrip(".")] = found.left.sum(axis=0, dtype=np.float64).astype(np.float32)
            if collected is not None:
                collected.stack(rows.name, found)
    return ActivityEstimate(float(value.mean()), outer, vectors)


def _slopes(
    module: nn.Module,
    losses: Callable[[nn.Module], Tensor],
    layers: Mapping[str, nn.Linear],
    name: str,
    moved: Tensor,
    reached: set[str],
) -> Tensor:
    """Return the change of each example's loss when the outputs of one layer move, shape (examples,).

    Layers whose inputs move with them are added to ``reached``.
    """
    watched = _Watched(layers, reached)
    return jvp(lambda shift: watched.run(module, losses, {name: shift}), (torch.zeros_like(moved),), (moved,))[1]


class _Watched:
    """One evaluation: the layers' inputs, their moved outputs, and the inputs that move with them."""

    def __init__(self, layers: Mapping[str, nn.Linear], reached: set[str]) -> None:
        self.layers = layers
        self.reached = reached
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, tuple[int, int]] = {}

    def run(self, module: nn.Module, losses: Callable[[nn.Module], Tensor], shifts: Mapping[str, Tensor]) -> Tensor:
        handles = [layer.register_forward_hook(self._hook(name, shifts)) for name, layer in self.layers.items()]
        try:
            found = losses(module)
        finally:
            for handle in handles:
                handle.remove()
        if found.ndim != 1:
            raise ConfigError(f"losses are one for each example, of shape (examples,), not {tuple(found.shape)}")
        for name in self.layers:
            if self.outputs.get(name, (0, 0))[0] != len(found):
                raise ConfigError(f"layer {name!r} is not called once on one vector for each of {len(found)} examples")
        return found

    def _hook(self, name: str, shifts: Mapping[str, Tensor]) -> Callable[..., Tensor | None]:
        def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if name in self.inputs or output.ndim != 2:
                raise ConfigError(f"layer {name!r} is called twice, or on more than one vector for each example")
            self.inputs[name], self.outputs[name] = args[0], (output.shape[0], output.shape[1])
            if shifts and forward_ad.unpack_dual(args[0]).tangent is not None:
                self.reached.add(name)
            return output + shifts[name] if name in shifts else None

        return hook


def _linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    known = {id(p) for layer in layers.values() for p in layer.parameters()}
    if others := [name for name, p in module.named_parameters() if id(p) not in known and p.requires_grad]:
        raise ConfigError(
            f"{len(others)} parameter(s), first {others[0]!r}, are not those of linear layers; freeze them, or measure "
            "slopes along directions of the weights"
        )
    if len({id(layer.weight) for layer in layers.values()}) < len(layers):
        raise ConfigError(f"of the layers {', '.join(layers)} two share a weight, of which each estimates a part")
    return layers
