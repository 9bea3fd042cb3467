"""Trainings whose rounds should equal steps on one batch of all clients' examples, and this central reference.

Clients have batches of different sizes and take one step of plain SGD a round, because any other optimiser would hide a
wrong scale. The models cover the difficult cases for gradients as factors: layers of equal shape, a recurrent cell,
convolutions, and attention with embeddings whose weights the output layer shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcomp.codecs import Codec
from fedcomp.codecs.factors import at_model, wanted_by
from fedcomp.factors.capture import capture
from fedcomp.factors.collect import collecting
from fedcomp.layout import NONE_DENSE, Layout, Update, Vector
from fedcomp.local import Local
from fedcomp.rng import Key
from fedcomp.systems.factors import FactorSharing
from fedcomp.systems.pair import Pair
from fedcomp.tasks.arrays import to_arrays
from fedcomp.tasks.base import single_thread

SIZES: Final = (19, 4, 11)
"""Number of examples in each client's batches."""

RATE: Final = 0.2
CLASSES: Final = 5

RULES: Final = ("examples", "even", "sum")
"""How clients' mean gradients are combined: weighted by their numbers of examples; with equal weights; or summed, as in
published code (read)."""


class Recurrent(nn.Module):
    """A gated recurrent cell of linear layers over six steps, and an output layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.x2h, self.h2h, self.out = nn.Linear(8, 48), nn.Linear(16, 48), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of inputs of shape (B, 6, 8)."""
        h = torch.zeros(len(x), 16)
        for t in range(x.shape[1]):
            # Separate, since the reset gate multiplies only the part from the state.
            (xr, xz, xn), (hr, hz, hn) = self.x2h(x[:, t]).chunk(3, 1), self.h2h(h).chunk(3, 1)
            z = torch.sigmoid(xz + hz)
            h = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
        return self.out(h)


class Transformer(nn.Module):
    """One causal block on tokens; the output layer has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 12)
        self.query, self.key, self.value, self.mix = (nn.Linear(12, 12) for _ in range(4))
        self.up, self.down, self.norm = nn.Linear(12, 24), nn.Linear(24, 12), nn.LayerNorm(12)
        self.read = nn.Linear(12, CLASSES, bias=False)
        self.read.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits at the last position, for tokens of shape (B, 6)."""
        x = self.embed(tokens)
        seen = nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)
        x = x + self.mix(seen)
        return self.read(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))[:, -1]


def _chain() -> nn.Module:
    layers = [nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Linear(16, CLASSES))


def _convolutions() -> nn.Module:
    features = [nn.Conv2d(2, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 2), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(8 * 9, CLASSES))


MODELS: Final[Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]] = {
    "chain of layers": (_chain, (20,)),
    "recurrent cell": (Recurrent, (6, 8)),
    "convolutions": (_convolutions, (2, 8, 8)),
    "transformer": (Transformer, (6,)),
}
"""By name, the model and the shape of an example, which is tokens for a transformer."""


def model_of(name: str, seed: int) -> nn.Module:
    """Return a model whose values are a pure function of ``seed``."""
    model = MODELS[name][0]()
    drawn = Key(seed, "pooled/model").generator()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.0 / np.sqrt(parameter.shape[-1])
            parameter.copy_(torch.from_numpy(scale * drawn.standard_normal(tuple(parameter.shape))))
    return model


def examples(name: str, partition: int, round_: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a client's batch of a round: inputs and classes."""
    drawn, n = Key(seed, "pooled/examples", round_, partition).generator(), SIZES[partition]
    shape = (n, *MODELS[name][1])
    x = drawn.integers(0, CLASSES, shape) if name == "transformer" else drawn.standard_normal(shape).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(drawn.integers(0, CLASSES, n))


def descend(model: nn.Module, x: Tensor, y: Tensor, rate: float) -> None:
    """Take one step of SGD on the mean loss of a batch."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.add_(gradient, alpha=-rate)


def pooled(name: str, rounds: int, seed: int) -> dict[str, NDArray[Any]]:
    """Return the model after steps on one batch of all examples of a round."""
    model = model_of(name, seed)
    with single_thread():
        for round_ in range(1, rounds + 1):
            parts = [examples(name, partition, round_, seed) for partition in range(len(SIZES))]
            descend(model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), RATE)
    return to_arrays(model)


def trained(codec: Codec, model: nn.Module, layout: Layout, x: Tensor, y: Tensor, rate: float) -> Update:
    """Return a model after a step of SGD, as an update with the layer data that ``codec`` needs."""
    before = {name: array.copy() for name, array in to_arrays(model).items()}
    with single_thread(), collecting(wanted_by(at_model(codec, lambda: before))) as collected, capture(model):
        descend(model, x, y, rate)
    after = layout.flatten(to_arrays(model))
    change = after - layout.flatten(before)
    return Update(after, layout, collected.explaining({t.name: change[t.slice] for t in layout.tensors}, before))


def in_rounds(
    name: str, codec: Codec, rounds: int, seed: int, rule: str = "examples", *, by_layer: bool = False
) -> dict[str, NDArray[Any]]:
    """Return the model after a number of rounds with frames of ``codec``. ``rule`` combines the clients; ``by_layer``
    makes one exchange for each layer."""
    model = model_of(name, seed)
    layout = Layout.of(to_arrays(model), NONE_DENSE)

    def train(number: int, node: int, start: Vector) -> Update:
        arrays = layout.unflatten(start)
        model.load_state_dict({key: torch.from_numpy(np.array(value)) for key, value in arrays.items()})
        rate = RATE * (len(SIZES) if rule == "sum" else 1)
        return trained(codec, model, layout, *examples(name, node, number, seed), rate)

    system = FactorSharing(codec, by_layer=True) if by_layer else Pair(codec)
    begin = layout.flatten(to_arrays(model))
    local = Local(system, layout, begin, train, lambda node: SIZES[node] if rule == "examples" else 1, len(SIZES), seed)
    for number in range(1, rounds + 1):
        if local.step(number) is None:
            raise RuntimeError(f"round {number} made no step: {local.refused[number]}")
    return layout.unflatten(local.model)


def difference(found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> float:
    """Return the largest relative difference of any tensor."""
    return max(
        float(np.linalg.norm(found[name] - value.astype(np.float64)) / np.linalg.norm(value))
        for name, value in expected.items()
    )
