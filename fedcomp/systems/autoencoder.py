"""Training of LGC's autoencoder on the server: the only part of LGC that needs torch.

The losses are those of Abrahamyan et al., recalled, and read in a third party's implementation, which trains by SGD;
Adam is derived. Values come divided by their root mean square: raw gradients are so small that their squared error
trains nothing (measured). What the halves compute, in numpy, is in :mod:`fedcomp.codecs.autoencoder`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs.autoencoder import SLOPE, STEP, ConvDecoder, ConvEncoder
from fedcomp.errors import optional
from fedcomp.layout import Vector
from fedcomp.rng import Key
from fedcomp.rules import Configured, Int, NotNegative, OneOf, Positive

if TYPE_CHECKING:
    import torch

H = TypeVar("H", ConvEncoder, ConvDecoder)

Half = Mapping[str, NDArray[np.float32]]
"""The ``"weights"`` of an encoder or decoder as one vector, with the moments of their optimiser."""

Halves = Mapping[str, Half]
"""By name: "encoder", "decoder" and, in the order of their last use, decoders of single nodes by their numbers."""


@dataclass(frozen=True, repr=False, eq=False)
class AutoencoderTraining(Configured):
    """How an autoencoder is trained. Between steps its halves are plain data; a step returns others.

    Parameters
    ----------
    optimizer : {"adam", "sgd"}
    lr : float
    passes : int
        Steps of training on each round's values.
    reconstruction, similarity : float
        Weights of the losses of :meth:`learn_nodes`.
    decoders : int
        Nodes that have a decoder of their own, at most. The one that was used longest ago is given up for a node of a
        later round; when a round has more nodes than that, the rest of them use the shared decoder.
    """

    optimizer: Annotated[str, OneOf("adam", "sgd")] = "adam"
    lr: Positive = 0.001
    passes: Annotated[int, Int(1)] = 1
    reconstruction: NotNegative = 0.5
    similarity: NotNegative = 0.5
    decoders: Annotated[int, Int()] = 64

    def learn_ring(
        self, halves: Halves, vectors: Sequence[Vector], weights: Sequence[float]
    ) -> tuple[Halves, tuple[float, ...]]:
        """Train D(Σ wᵢ E(vᵢ)) to be Σ wᵢ vᵢ; return the halves and the mean squared error before the last step.

        Parameters
        ----------
        vectors : sequence of float32 arrays, all of shape (k,)
            Clients' values on one support, divided by one scale.
        weights : sequence of float
            Of the clients; their sum need not be 1, but is positive.

        Returns
        -------
        halves, losses
            Without losses when a loss or gradient was not finite in the first step; such a step changes nothing.
        """
        shares = np.asarray(weights, np.float64)
        shares, size = (shares / shares.sum()).astype(np.float32), vectors[0].size

        def losses(step: int, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            batch, share = _signals(vectors), leaves[0].new_tensor(shares)
            mixed = (_encode(batch, leaves[0]) * share[:, None, None]).sum(0, keepdim=True)
            wanted = (batch[:, 0, :size] * share[:, None]).sum(0)
            found = _decode(mixed, leaves[1], batch.new_zeros(1, 1, batch.shape[2]))[0, 0, :size]
            error = (found - wanted).square().mean()
            return error, error

        return self._train(halves, ("encoder", "decoder"), losses)

    def learn_nodes(
        self, halves: Halves, vectors: Mapping[int, Vector], sides: Mapping[int, Vector], key: Key
    ) -> tuple[Halves, tuple[float, ...]]:
        """Train every node's decoder to make its values of one node's latents and its own innovation.

        Parameters
        ----------
        vectors : mapping of int to float32 array, all of shape (k,)
            By node: its values on one support, divided by their own scale.
        sides : mapping of int to float32 array
            By node: its innovation, zeros where it has none.
        key : Key
            By which is drawn whose latents are decoded, for each step.

        Returns
        -------
        halves, losses
            As of :meth:`learn_ring`: the mean squared error of a value, mean over nodes, where predicting zero has 1;
            the mean squared distance of two nodes' latents, mean over pairs, 0 for one node.
        """
        size, count, draws = next(iter(vectors.values())).size, len(vectors), key.uniform(self.passes)
        # Known nodes come first: if nodes of one round gave up each other's decoders, none would be trained twice.
        ranked = sorted(vectors, key=lambda node: str(node) not in halves)[: self.decoders]
        names = ("encoder", "decoder", *(str(node) for node in vectors if node in ranked))

        def losses(step: int, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            batch, side = _signals(list(vectors.values())), _signals([sides[node] for node in vectors])
            latents = _encode(batch, leaves[0])
            common = latents[int(draws[step] * count)][None]
            # What unknown nodes share learns from all, but has no say in what the encoder learns.
            shared = _decode(common.detach().expand(count, -1, -1), leaves[1], side)
            errors = []
            for index, node in enumerate(vectors):
                own = leaves[names.index(str(node)) if node in ranked else 1]
                made = _decode(common, own, side[index : index + 1])
                errors.append((made - batch[index : index + 1])[..., :size].square().mean())
            error = sum(errors[1:], errors[0])
            # The sum over ordered pairs of their mean squared distance is this one over distances from the mean.
            distance = 2.0 * count * (latents - latents.mean(0, keepdim=True)).square().sum() / latents[0].numel()
            alike = (shared - batch)[..., :size].square().mean((1, 2)).sum()
            total = self.reconstruction * (error + alike) + self.similarity * distance
            return total, error / count, distance / max(1, count * (count - 1))

        return self._train(halves, names, losses)

    def _train(
        self, halves: Halves, names: Sequence[str], losses: Callable[..., Sequence[torch.Tensor]]
    ) -> tuple[Halves, tuple[float, ...]]:
        """Take the steps of a round on the halves ``names``, which are from then on the last to be evicted."""
        # A node's own decoder begins as the one that unknown nodes share, as it is now.
        begun = [halves.get(name) or {"weights": halves["decoder"]["weights"]} for name in names]
        with optional("the training of an autoencoder"):
            import torch
        leaves = [torch.from_numpy(half["weights"].copy()).requires_grad_() for half in begun]
        optimizer = (torch.optim.Adam if self.optimizer == "adam" else torch.optim.SGD)(leaves, lr=self.lr)
        moments = [{key: v for key, v in half.items() if key != "weights"} for half in begun]
        state = {
            # The count of steps is a single number, all else as long as the weights.
            index: {key: torch.from_numpy(v.copy()).reshape(() if v.size == 1 else -1) for key, v in each.items()}
            for index, each in enumerate(moments)
            if each
        }
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        found: tuple[float, ...] = ()
        threads = torch.get_num_threads()
        # Sums of several threads would depend on how many there are.
        torch.set_num_threads(1)
        try:
            for step in range(self.passes):
                optimizer.zero_grad()
                loss, *parts = losses(step, leaves)
                loss.backward()
                grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
                if not all(bool(torch.isfinite(each).all()) for each in (loss, *grads)):
                    break
                optimizer.step()
                found = tuple(float(part.detach()) for part in parts)
        finally:
            torch.set_num_threads(threads)
        if not found:
            return halves, found
        after: dict[str, Half] = {}
        for index, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            kept = optimizer.state_dict()["state"].get(index, {})
            kept = {key: v.numpy().reshape(-1).copy() for key, v in kept.items() if v is not None}
            after[name] = {"weights": leaf.detach().numpy(), **kept}
        older = [name for name in halves if name not in after]
        older = older[max(0, len(older) + len(after) - 2 - self.decoders) :]
        return {**{name: halves[name] for name in older}, **after}, found


ADAM: Final = AutoencoderTraining()
"""How an autoencoder is trained where nothing else is said."""


def drawn(seed: int) -> Halves:
    """Return an encoder, and a decoder that all nodes share, which have not learnt anything."""
    both = {"encoder": ConvEncoder.draw(key := Key(seed, "autoencoder")), "decoder": ConvDecoder.draw(key)}
    return {name: {"weights": np.concatenate([w.reshape(-1) for w in made.weights])} for name, made in both.items()}


def half_of(kind: type[H], half: Half) -> H:
    """Return a half as codecs use it."""
    ends = np.cumsum([math.prod(shape) for shape in kind.SHAPES])[:-1]
    parts = zip(np.split(half["weights"], ends), kind.SHAPES, strict=True)
    return kind(tuple(part.reshape(shape) for part, shape in parts))


def _signals(vectors: Sequence[Vector]) -> torch.Tensor:
    """Return signals in torch's shape (nodes, 1, positions), padded with zeros."""
    import torch

    out = torch.zeros(len(vectors), 1, STEP * math.ceil(vectors[0].size / STEP))
    for row, vector in zip(out, vectors, strict=True):
        row[0, : vector.size] = torch.from_numpy(vector)
    return out


def _layers(leaf: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    parts = leaf.split([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _encode(batch: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Return latents of shape (nodes, 4, positions / 16), as :class:`ConvEncoder` computes them."""
    from torch.nn import functional as f

    *layers, kernel, bias = _layers(leaf, ConvEncoder.SHAPES)
    for weight, add in zip(layers[::2], layers[1::2], strict=True):
        batch = f.leaky_relu(f.conv1d(batch, weight, add, stride=2, padding=1), SLOPE)
    return f.conv1d(batch, kernel, bias)


def _decode(latents: torch.Tensor, leaf: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
    """Return signals of shape (nodes, 1, positions), as :class:`ConvDecoder` computes them."""
    import torch
    from torch.nn import functional as f

    *layers, kernel, bias = _layers(leaf, ConvDecoder.SHAPES)
    for weight, add in zip(layers[::2], layers[1::2], strict=True):
        latents = f.leaky_relu(f.conv_transpose1d(latents, weight, add, stride=2, padding=1, output_padding=1), SLOPE)
    return f.conv1d(torch.cat([latents, side], 1), kernel, bias)
