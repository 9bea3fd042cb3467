"""Directional derivatives of a torch model's loss, without a backward pass.

Forward-mode differentiation gives the products of the gradient with directions exactly, at the memory of an
evaluation; central differences need nothing but the loss, also of models that cannot be differentiated. Whatever is
random in an evaluation, such as dropout, is the same in all of them, and buffers are as they were when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

from fedcomp import params
from fedcomp.errors import ConfigError, LayoutError
from fedcomp.forward import ORACLES, Oracle

Tangent = Mapping[str, NDArray[np.float32]]
"""A direction: by name of a parameter, of its shape. Parameters that it does not name stay where they are."""


@dataclass(frozen=True)
class Objective:
    """A loss and its model.

    Attributes
    ----------
    module : torch.nn.Module
        Holds the parameters at which the loss is evaluated, in the intended mode (training or evaluation).
    loss : callable
        ``loss(model) -> tensor`` without dimensions: calls ``model`` as it would call ``module``, on the same examples
        every time.
    examples : float
        Number of examples in the loss: the node's weight in a mean.

    Examples
    --------
    >>> module = nn.Linear(2, 1, bias=False)
    >>> _ = module.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
    >>> objective = Objective(module, lambda model: model(torch.tensor([1.0, 1.0])).square().sum(), examples=1)
    >>> value, found = slopes(objective, [{"weight": np.float32([[1.0, 0.0]])}])
    >>> value, found.tolist()
    (9.0, [6.0])
    """

    module: nn.Module
    loss: Callable[[Callable[..., Any]], Tensor]
    examples: float


def slopes(
    objective: Objective,
    tangents: Iterable[Tangent],
    *,
    oracle: Oracle = "jvp",
    at_once: int = 1,
    step: float = 1e-3,
) -> tuple[float, NDArray[np.float64]]:
    """Return the loss, and its derivative along each direction, shape (directions,); NaN where it is not finite.

    Parameters
    ----------
    tangents : iterable of mapping of name to float32 array
    oracle : {"jvp", "differences"}
        Forward-mode differentiation; or (L(w + h v) - L(w - h v)) / 2h, for models that cannot be differentiated.
    at_once : int
        Directions in one pass of "jvp": faster, and as many times the memory.
    step : float
        h, over the root mean square of the parameters; for "differences". A parameter of no size counts as 1.

    Raises
    ------
    LayoutError
        When a direction names what is not a parameter of the module, or has another shape.
    ConfigError
        For "differences" of parameters of fewer than 32 bits.
    """
    params.choice("oracle", oracle, ORACLES)
    params.integer("at_once", at_once, low=1)
    params.positive("step", step)
    with _same_draws() as again, torch.no_grad():
        if oracle == "differences":
            value, found = _differences(objective, tangents, step, again)
        else:
            value, found = _forward(objective, tangents, at_once, again)
    out = np.array(found, np.float64)
    out[~np.isfinite(out)] = np.nan
    return float(value), out


def _forward(
    objective: Objective, tangents: Iterable[Tangent], at_once: int, again: Callable[[], None]
) -> tuple[Tensor, list[float]]:
    module = objective.module
    held = {name: p.detach() for name, p in module.named_parameters()}
    buffers = {name: b.detach() for name, b in module.named_buffers()}

    def loss(parameters: dict[str, Tensor], own: dict[str, Tensor]) -> Tensor:
        again()
        # Batch normalisation writes into its buffers: an evaluation has copies of its own, and leaves no trace.
        state = {**parameters, **{name: b.clone() for name, b in own.items()}}
        return objective.loss(lambda *args, **kwargs: functional_call(module, state, args, kwargs))

    def slope(tangent: dict[str, Tensor], own: dict[str, Tensor]) -> Tensor:
        # Tangents of the parameters that move; the others need none.
        still = {name: p for name, p in held.items() if name not in tangent}
        moving = {name: held[name] for name in tangent}
        found: Tensor = jvp(lambda given: loss({**still, **given}, own), (moving,), (tangent,))[1]
        return found

    value = loss(held, buffers)
    out: list[float] = []
    for ready in _together((_tensors(tangent, held) for tangent in tangents), at_once):
        stacked = {name: torch.stack([tangent[name] for tangent in ready]) for name in ready[0]}
        # Of each direction's own: what is written into one buffer for all of them has no place.
        copies = {name: torch.stack([b] * len(ready)) for name, b in buffers.items()}
        # What is drawn at random is the same in all of them.
        out += vmap(slope, randomness="same")(stacked, copies).tolist()
    return value, out


def _together(tangents: Iterable[dict[str, Tensor]], at_once: int) -> Iterator[list[dict[str, Tensor]]]:
    """Yield the directions in order, in groups that are evaluated at once; a group moves the same parameters."""
    held: list[dict[str, Tensor]] = []
    for tangent in tangents:
        if held and (len(held) == at_once or held[0].keys() != tangent.keys()):
            yield held
            held = []
        held.append(tangent)
    if held:
        yield held


def _differences(
    objective: Objective, tangents: Iterable[Tangent], step: float, again: Callable[[], None]
) -> tuple[Tensor, list[float]]:
    module = objective.module
    held = dict(module.named_parameters())
    kept = {name: tensor.detach().clone() for name, tensor in [*held.items(), *module.named_buffers()]}
    buffers = dict(module.named_buffers())
    length = float(sum(kept[name].double().square().sum() for name in held))
    size = length / max(1, sum(p.numel() for p in held.values()))
    h = step * (size**0.5 or 1.0)

    def at(tangent: Mapping[str, Tensor], factor: float) -> Tensor:
        again()
        try:
            for name, direction in tangent.items():
                # From what was kept, not from where it is: sums that are taken back leave their rounding behind.
                held[name].copy_(kept[name]).add_(direction, alpha=factor)
            # Double: the difference of two losses that are nearly the same is not to be rounded again.
            return objective.loss(module).double()
        finally:
            for name in tangent:
                held[name].copy_(kept[name])
            for name, buffer in buffers.items():
                buffer.copy_(kept[name])

    value = at({}, 0.0)
    out = []
    for tangent in tangents:
        direction = _tensors(tangent, held)
        for name, moved in direction.items():
            if moved.dtype.itemsize < 4:
                raise ConfigError(
                    f"differences along the parameter {name!r}, which is {moved.dtype}, are mostly rounding; "
                    "forward-mode differentiation (oracle='jvp') has exact slopes, float32 parameters have differences"
                )
        out.append(((at(direction, h) - at(direction, -h)) / (2.0 * h)).item())
    return value, out


def _tensors(tangent: Tangent, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    out = {}
    for name, direction in tangent.items():
        if name not in held or tuple(held[name].shape) != direction.shape:
            known = f"has the shape {tuple(held[name].shape)}" if name in held else "is none of them"
            raise LayoutError(f"a direction of shape {direction.shape} moves the parameter {name!r}, which {known}")
        out[name] = torch.from_numpy(direction).to(held[name])
    return out


@contextmanager
def _same_draws() -> Iterator[Callable[[], None]]:
    """Yield a function that restores torch's current random state. On exit the state is that after one evaluation."""
    cuda = torch.cuda.is_available()
    state = torch.get_rng_state()
    others = torch.cuda.get_rng_state_all() if cuda else []

    def again() -> None:
        torch.set_rng_state(state)
        if cuda:
            torch.cuda.set_rng_state_all(others)

    yield again


def trained(module: nn.Module, names: Sequence[str]) -> None:
    """Check that tensors of those names are parameters that training moves.

    Raises
    ------
    LayoutError
        When one is not: its derivative would count as zero, and directions would move it at random.
    """
    moved = {name for name, p in module.named_parameters() if p.requires_grad}
    if wrong := [name for name in names if name not in moved]:
        raise LayoutError(
            f"{len(wrong)} tensor(s) of the model, first {wrong[0]!r}, are not trained parameters; directions would "
            "move them at random. Send only the trained ones"
        )
