"""The small models of the tasks, initialised from explicit generators only.

A model is built on the ``meta`` device, where torch's own initialisers draw nothing, and then filled here:
weights uniform in +-sqrt(1/fan_in) (torch's default for linear, convolutional and, with the hidden size,
recurrent layers), biases zero. Every tensor has a generator of its own, seeded by the model's seed and the
tensor's name, so that adding a layer leaves the others as they were and no global generator is read or
written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from fedcomp.errors import ConfigError
from fedcomp.rng import Key


class Mlp(nn.Module):
    """Fully connected network with ReLU between the layers.

    Parameters
    ----------
    features : int
        Input size; inputs of any shape ``(B, ...)`` with that many elements are flattened.
    hidden : sequence of int
        Widths of the hidden layers; empty gives a linear model.
    outputs : int
        Number of logits.
    """

    def __init__(self, features: int, hidden: Sequence[int], outputs: int) -> None:
        super().__init__()
        widths = [features, *hidden, outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape ``(B, outputs)``."""
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


class Cnn(nn.Module):
    """Two convolutions with ReLU and 2x2 max pooling, then a hidden and an output layer.

    Parameters
    ----------
    side : int
        Height and width of the one-channel input; inputs ``(B, side * side)`` are reshaped.
    channels : pair of int
        Output channels of the two convolutions.
    hidden : int
        Width of the fully connected layer.
    outputs : int
        Number of logits.
    kernel : int
        Odd kernel size; the padding keeps the side.
    batch_norm : bool
        Whether a batch normalisation follows each convolution.
    """

    def __init__(
        self,
        side: int,
        channels: tuple[int, int],
        hidden: int,
        outputs: int,
        *,
        kernel: int = 3,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.side = side
        first, second = channels
        self.conv1 = nn.Conv2d(1, first, kernel, padding=kernel // 2)
        self.conv2 = nn.Conv2d(first, second, kernel, padding=kernel // 2)
        self.norm1 = nn.BatchNorm2d(first) if batch_norm else nn.Identity()
        self.norm2 = nn.BatchNorm2d(second) if batch_norm else nn.Identity()
        # Two poolings quarter the side, rounded down.
        self.hidden = nn.Linear(second * (side // 4) ** 2, hidden)
        self.output = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape ``(B, outputs)``."""
        x = x.reshape(-1, 1, self.side, self.side)
        x = nn.functional.max_pool2d(torch.relu(self.norm1(self.conv1(x))), 2)
        x = nn.functional.max_pool2d(torch.relu(self.norm2(self.conv2(x))), 2)
        return self.output(torch.relu(self.hidden(x.flatten(1))))


class QuickstartCnn(nn.Module):
    """The CNN of Flower's PyTorch quickstart, for 32x32 pixels in three colours: 62,006 parameters.

    Two convolutions of 5x5 with 6 and 16 channels and 2x2 max pooling, then layers of 120, 84 and ten. Inputs of 64
    features, 8x8 pixels in one colour, are enlarged to that shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        # 32 pixels a side: 28 after the first convolution, 14 pooled, 10, and 5 pooled.
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape ``(B, 10)``."""
        if x.shape[1] == 64:
            x = x.reshape(-1, 1, 8, 8).repeat_interleave(4, 2).repeat_interleave(4, 3).expand(-1, 3, -1, -1)
        x = x.reshape(-1, 3, 32, 32)
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x.flatten(1))))))


class CharLstm(nn.Module):
    """Next-character model: embedding, LSTM, linear read-out.

    Parameters
    ----------
    vocabulary : int
        Number of distinct characters.
    embedding, hidden, layers : int
        Sizes of the embedding and of the recurrent layers.
    """

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape ``(B, T, vocabulary)`` for characters ``x`` of shape ``(B, T)``, int64."""
        states, _ = self.lstm(self.embedding(x))
        return self.output(states)


class Block(nn.Module):
    """Causal self-attention and a layer of four times the width, each added to its input after normalising it.

    Parameters
    ----------
    width : int
        Features of every character.
    heads : int
        Attention heads, a divisor of ``width``.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape, ``(B, T, width)``."""
        batch, length, width = x.shape
        # Normalised without gains and offsets, for which the initialisation below has no rule.
        normal = nn.functional.layer_norm(x, (width,))
        parts = self.attention(normal).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(nn.functional.layer_norm(x, (width,)))))


class CharTransformer(nn.Module):
    """Next-character model: embeddings of characters and places, causal blocks, linear read-out.

    Parameters
    ----------
    vocabulary : int
        Number of distinct characters.
    length : int
        The most characters of an input.
    width, layers, heads : int
        Features of every character; blocks; attention heads of a block, a divisor of ``width``.
    """

    def __init__(self, vocabulary: int, length: int, width: int, layers: int = 1, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.output = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape ``(B, T, vocabulary)`` for characters ``x`` of shape ``(B, T)``, int64."""
        # Embeddings begin with standard normal values, which would drown what the blocks add.
        both = (self.characters(x) + self.places.weight[: x.shape[1]]) / math.sqrt(2.0)
        features = self.blocks(both)
        return self.output(nn.functional.layer_norm(features, features.shape[-1:]))


def build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return ``make()`` on the CPU, initialised as a pure function of ``seed`` and the tensors' names.

    Raises
    ------
    ConfigError
        When the module holds a parameter of a layer type this function has no rule for.
    """
    # On the meta device nothing is drawn: a constructor's own initialisation would use torch's global generator.
    with torch.device("meta"):
        model = make()
    with torch.no_grad():
        for path, module in model.named_modules():
            # Not ``to_empty``: its first use on a meta tensor imports sympy and more, half a second in every process of
            # a client.
            for name, meta in list(module.named_parameters(recurse=False)):
                tensor = nn.Parameter(torch.empty(meta.shape, dtype=meta.dtype), meta.requires_grad)
                _init_parameter(module, name, tensor, _generator(seed, f"{path}.{name}"))
                setattr(module, name, tensor)
            for name, meta in list(module.named_buffers(recurse=False)):
                if not isinstance(module, nn.modules.batchnorm._NormBase):
                    raise ConfigError(f"no initial value is known for buffer {path}.{name}")
                # As torch begins: means and counters of batches at 0, variances at 1.
                value = 1 if name == "running_var" else 0
                setattr(module, name, torch.full(meta.shape, value, dtype=meta.dtype))
    return model


def build_many(make: Callable[[], nn.Module], seed: int, count: int) -> dict[str, Tensor]:
    """Return the parameters of ``count`` modules by name, stacked along a new first axis, initialised as :func:`build`
    does it: independent of each other, and a pure function of ``seed``.

    Raises
    ------
    ConfigError
        When the module holds a parameter of a layer type without a rule, or a buffer.
    """
    with torch.device("meta"):
        model = make()
    out: dict[str, Tensor] = {}
    with torch.no_grad():
        for path, module in model.named_modules():
            if any(True for _ in module.buffers(recurse=False)):
                raise ConfigError(f"{type(module).__name__} {path!r} has buffers; stacked modules have parameters only")
            for name, tensor in module.named_parameters(recurse=False):
                full = f"{path}.{name}" if path else name
                # One generator for all, module after module: the first ones stay the same when there are more.
                generator, stacked = _generator(seed, f"{path}.{name}"), torch.empty((count, *tensor.shape))
                for one in stacked:
                    _init_parameter(module, name, one, generator)
                out[full] = stacked
    return out


def _generator(seed: int, name: str) -> torch.Generator:
    generator = torch.Generator()
    # torch's seeds are signed: 63 bits.
    return generator.manual_seed(Key(seed, f"model/{name}").u64() >> 1)


def _init_parameter(module: nn.Module, name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if isinstance(module, nn.modules.batchnorm._NormBase):
        tensor.fill_(1.0 if name == "weight" else 0.0)
    elif isinstance(module, nn.LSTM):
        if name.startswith("bias"):
            tensor.zero_()
        else:
            _uniform(tensor, module.hidden_size, generator)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(tensor, 0.0, 1.0, generator)
    elif isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
        if name == "bias":
            tensor.zero_()
        else:
            # torch's fan-in is all but the first axis, also for transposed convolutions, whose first axis is the
            # input's.
            _uniform(tensor, tensor[0].numel(), generator)
    else:
        raise ConfigError(f"no initialisation is known for {type(module).__name__}.{name}")


def _uniform(tensor: Tensor, fan_in: int, generator: torch.Generator) -> None:
    bound = 1.0 / math.sqrt(fan_in)
    nn.init.uniform_(tensor, -bound, bound, generator)
