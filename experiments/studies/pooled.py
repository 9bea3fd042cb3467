"""Trainings over messages whose rounds ought to be steps on one batch of all clients' examples, and that training.

Clients have batches of unequal sizes, and take one step of plain SGD a round: any other optimiser would hide a wrong
scale. The models have what gradients as factors have to cope with: layers of one shape, a recurrent cell, convolutions,
attention with embeddings whose weights the read-out shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcomp.clients.client import client
from fedcomp.clients.compressed import compression
from fedcomp.codecs import Codec
from fedcomp.factors.capture import capture
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.logs import quiet
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.rng import Key
from fedcomp.strategies.by_layer import LayerByLayer
from fedcomp.strategies.compressed import Compressed
from fedcomp.tasks.base import single_thread

SIZES: Final = (19, 4, 11)
"""Examples of each client's batches."""

RATE: Final = 0.2
CLASSES: Final = 5

RULES: Final = ("examples", "even", "sum")
"""How clients' mean gradients are put together: by their numbers of examples; all alike; added up, as published code
does (read)."""


class Recurrent(nn.Module):
    """A gated recurrent cell of linear layers, six steps, and a read-out of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.x2h, self.h2h, self.out = nn.Linear(8, 48), nn.Linear(16, 48), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of inputs of shape (B, 6, 8)."""
        h = torch.zeros(len(x), 16)
        for t in range(x.shape[1]):
            # Apart, since the reset gate multiplies what comes from the state alone.
            (xr, xz, xn), (hr, hz, hn) = self.x2h(x[:, t]).chunk(3, 1), self.h2h(h).chunk(3, 1)
            z = torch.sigmoid(xz + hz)
            h = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
        return self.out(h)


class Transformer(nn.Module):
    """One causal block on tokens; the read-out has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 12)
        self.query, self.key, self.value, self.mix = (nn.Linear(12, 12) for _ in range(4))
        self.up, self.down, self.norm = nn.Linear(12, 24), nn.Linear(24, 12), nn.LayerNorm(12)
        self.read = nn.Linear(12, CLASSES, bias=False)
        self.read.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the last place, of tokens of shape (B, 6)."""
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
"""By name: the model, and the shape of an example; tokens where it is a transformer."""


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


def arrays_of(model: nn.Module) -> dict[str, NDArray[Any]]:
    """Return the model's tensors by name."""
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def pooled(name: str, rounds: int, seed: int) -> dict[str, NDArray[Any]]:
    """Return the model after steps on one batch of all examples of a round."""
    model = model_of(name, seed)
    with single_thread():
        for round_ in range(1, rounds + 1):
            parts = [examples(name, partition, round_, seed) for partition in range(len(SIZES))]
            descend(model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), RATE)
    return arrays_of(model)


def over_messages(
    name: str, codec: Codec, rounds: int, seed: int, rule: str = "examples", *, by_layer: bool = False
) -> dict[str, NDArray[Any]]:
    """Return the model after as many rounds over messages, with frames of ``codec``, clients put together by ``rule``,
    and if ``by_layer`` an exchange for each layer."""
    inner = ClientApp()

    @inner.train()
    def train(msg: Message, context: Context) -> Message:
        (record, arrays), config = next(iter(msg.content.array_records.items())), msg.content.config_records["config"]
        partition, round_ = context.node_config["partition-id"], config["server-round"]
        assert isinstance(partition, int) and isinstance(round_, int)  # noqa: PT018
        model = model_of(name, seed)
        model.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in to_arrays(arrays).items()})
        x, y = examples(name, partition, round_, seed)
        with single_thread(), capture(model):
            descend(model, x, y, RATE * (len(SIZES) if rule == "sum" else 1))
        metrics = MetricRecord({"num-examples": len(y) if rule == "examples" else 1})
        return Message(RecordDict({record: to_record(arrays_of(model)), "metrics": metrics}), reply_to=msg)

    app = client(inner, compression(i_know_inputs_are_visible=True))
    least: dict[str, Any] = {
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "min_available_nodes": 1,
        "fraction_evaluate": 0.0,
    }
    pair = Compressed(FedAvg(**least), codec, feedback=False, seed=seed)
    strategy = LayerByLayer(pair) if by_layer else pair
    with quiet():
        grid = InProcessGrid(app, len(SIZES), seed=seed)
        result = strategy.start(grid, to_record(arrays_of(model_of(name, seed))), num_rounds=rounds, timeout=60)
    return to_arrays(result.arrays)


def difference(found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> float:
    """Return the largest relative difference of a tensor."""
    return max(
        float(np.linalg.norm(found[name] - value.astype(np.float64)) / np.linalg.norm(value))
        for name, value in expected.items()
    )
