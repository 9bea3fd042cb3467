"""The server trains an autoencoder on values that clients sent anyway.

Losses and defaults are those of learned gradient compression (Abrahamyan et al. 2022, arXiv 2103.08870; recalled, and
read in a third party's implementation). Values come divided by their root mean square: raw gradients are so small that
their squared error trains nothing (measured). Adam is derived; the third party's code uses SGD.

torch is imported for the first step of training, and on the server alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.codecs.autoencoder import CHANNELS, SLOPE, STEP, ConvDecoder, ConvEncoder
from fedcomp.codecs.lgc import LGC, scale_of
from fedcomp.codecs.scalecom import Supports
from fedcomp.errors import StateError, optional
from fedcomp.layout import Layout, Vector
from fedcomp.rng import Key
from fedcomp.stateful import Stateful, each, nested

if TYPE_CHECKING:
    import torch

OPTIMIZERS: Final = ("adam", "sgd")

Kind = type[ConvEncoder] | type[ConvDecoder]


@dataclass(frozen=True)
class Losses:
    """What a step of training began with.

    Attributes
    ----------
    reconstruction : float
        Mean squared error of a value, mean over nodes. Values have a mean square of 1: predicting zero has 1.
    similarity : float
        Mean squared distance of two nodes' latents, mean over pairs; 0 for one node.
    """

    reconstruction: float
    similarity: float


class _Half(Stateful):
    """Weights of one half as one vector, with the moments of their optimiser."""

    STATE: ClassVar[Mapping[str, Any]] = {
        "weights": NDArray[np.float32],
        "moments": dict[str, NDArray[np.float32]],
    }

    def __init__(self, kind: Kind, weights: Iterable[NDArray[np.float32]]) -> None:
        self.kind = kind
        self.weights: Vector = np.concatenate([array.reshape(-1) for array in weights])
        self.moments: dict[str, NDArray[np.float32]] = {}
        self._made: ConvEncoder | ConvDecoder | None = None

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Refuse weights of another architecture, and moments of other weights."""
        size, shape = values["weights"].size, self.weights.shape
        if values["weights"].shape != shape:
            raise StateError(f"{size} weights are not those of {self.kind.__name__}, which has {self.weights.size}")
        # None before the first step, and with SGD always.
        shapes = {name: moment.shape for name, moment in values["moments"].items()}
        if shapes not in ({}, {"step": (1,), "exp_avg": shape, "exp_avg_sq": shape}):
            raise StateError(f"moments of shapes {shapes} are not those of {self.weights.size} weights")

    def restored(self) -> None:
        """Forget what was made of other weights."""
        self._made = None

    def take(self, weights: Vector, moments: Mapping[str, NDArray[np.float32]]) -> None:
        """Take what a step of training made."""
        self.weights, self.moments, self._made = weights, dict(moments), None

    def made(self) -> Any:
        """Return the half as codecs use it."""
        if self._made is None:
            ends = np.cumsum([math.prod(shape) for shape in self.kind.SHAPES])[:-1]
            parts = np.split(self.weights, ends)
            self._made = self.kind(tuple(p.reshape(s) for p, s in zip(parts, self.kind.SHAPES, strict=True)))
        return self._made


class AutoencoderTraining(Stateful):
    """Trains one encoder, and a decoder: for a ring, or one for each node and one for nodes that it does not know.

    Parameters
    ----------
    optimizer : {"adam", "sgd"}
    lr : float
    passes : int
        Steps of training on each round's values.
    reconstruction, similarity : float
        Weights of the losses, at least 0.
    decoders : int
        Nodes that have a decoder of their own, at most. The one that was used longest ago is given up for a node of a
        later round; when a round has more nodes than that, the rest of them use the shared decoder.
    seed : int
        Of the first weights, and of the node whose latents all are decoded from.

    Attributes
    ----------
    steps : int
        Steps of training so far.
    known : list of int
        Nodes with a decoder of their own.

    Examples
    --------
    >>> training = AutoencoderTraining(seed=3)
    >>> training.steps, training.encoder.parameters, training.decoder(None).parameters
    (0, 172996, 43682)
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "_encoder": nested("_encoder"),
        "_shared": nested("_shared"),
        "_own": each("_own", lambda owner, node: owner._own.setdefault(node, owner._copy())),
        "steps": int,
    }

    def __init__(
        self,
        *,
        optimizer: str = "adam",
        lr: float = 0.001,
        passes: int = 1,
        reconstruction: float = 0.5,
        similarity: float = 0.5,
        decoders: int = 64,
        seed: int = 0,
    ) -> None:
        self.optimizer = params.choice("optimizer", optimizer, OPTIMIZERS)
        self.lr = params.positive("lr", lr)
        self.passes = params.integer("passes", passes, low=1)
        self.reconstruction = _weight("reconstruction", reconstruction)
        self.similarity = _weight("similarity", similarity)
        self.decoders = params.integer("decoders", decoders, low=0)
        self.seed = params.seed(seed)
        key = Key(seed, "autoencoder")
        self._encoder = _Half(ConvEncoder, ConvEncoder.draw(key).weights)
        self._shared = _Half(ConvDecoder, ConvDecoder.draw(key).weights)
        # In the order of their last use.
        self._own: dict[int, _Half] = {}
        self.steps = 0

    def identity(self) -> list[Any]:
        """Return the settings: moments of another optimiser, or weights of another loss, are not continued."""
        return [self.optimizer, self.lr, self.passes, self.reconstruction, self.similarity, self.decoders]

    def afresh(self, seed: int) -> AutoencoderTraining:
        """Return a training with these settings and another seed that has taken no step."""
        return AutoencoderTraining(
            optimizer=self.optimizer,
            lr=self.lr,
            passes=self.passes,
            reconstruction=self.reconstruction,
            similarity=self.similarity,
            decoders=self.decoders,
            seed=seed,
        )

    @property
    def encoder(self) -> ConvEncoder:
        """The encoder as it is now."""
        made: ConvEncoder = self._encoder.made()
        return made

    @property
    def known(self) -> list[int]:
        """Nodes that have a decoder of their own."""
        return list(self._own)

    def decoder(self, node: int | None) -> ConvDecoder:
        """Return the decoder of a node: its own, or the one that unknown nodes share."""
        made: ConvDecoder = (self._shared if node is None else self._own.get(node, self._shared)).made()
        return made

    def learn_ring(self, vectors: Sequence[Vector], weights: Sequence[float]) -> float | None:
        """Train D(Σ wᵢ E(vᵢ)) to be Σ wᵢ vᵢ; return the mean squared error before the last step.

        Parameters
        ----------
        vectors : sequence of float32 arrays, all of shape (k,)
            Clients' values on one support, divided by one scale.
        weights : sequence of float
            Of the clients; their sum need not be 1, but is positive.

        Returns
        -------
        float or None
            None when the loss or a gradient was not finite in the first step; such a step changes nothing.
        """
        shares = np.asarray(weights, np.float64)
        shares = shares / shares.sum()
        size = vectors[0].size

        def losses(tensor: Any, _: int, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            batch, share = tensor(_padded(vectors)), tensor(shares.astype(np.float32))
            mixed = (_encode(batch, leaves[0]) * share[:, None, None]).sum(0, keepdim=True)
            wanted = (batch[:, 0, :size] * share[:, None]).sum(0)
            found = _decode(mixed, leaves[1], batch.new_zeros(1, 1, batch.shape[2]))[0, 0, :size]
            error = (found - wanted).square().mean()
            return error, error

        found = self._train([self._encoder, self._shared], losses)
        return None if found is None else found[0]

    def learn_nodes(self, vectors: Mapping[int, Vector], sides: Mapping[int, Vector], number: int) -> Losses | None:
        """Train every node's decoder to make its values of one node's latents and its own innovation.

        Parameters
        ----------
        vectors : mapping of int to float32 array, all of shape (k,)
            By node: its values on one support, divided by their own scale.
        sides : mapping of int to float32 array
            By node: its innovation, zeros where it has none.
        number : int
            Of the round; whose latents are decoded is drawn for each step.

        Returns
        -------
        Losses or None
            As for :meth:`learn_ring`.
        """
        # In the order given, which is that of partitions: ids of nodes are redrawn in every run.
        nodes = list(vectors)
        own = self._halves(nodes)
        batch_of, sides_of = [vectors[n] for n in nodes], [sides[n] for n in nodes]
        size, count = batch_of[0].size, len(nodes)
        draws = Key(self.seed, "autoencoder/common", number).uniform(self.passes)

        def losses(tensor: Any, step: int, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            batch, side = tensor(_padded(batch_of)), tensor(_padded(sides_of))
            latents = _encode(batch, leaves[0])
            common = latents[int(draws[step] * count)][None]
            # What unknown nodes share learns from all, but has no say in what the encoder learns.
            shared = _decode(common.detach().expand(count, -1, -1), leaves[1], side)
            halves = dict(zip(own, leaves[2:], strict=True))
            errors = []
            for index, node in enumerate(nodes):
                weights = halves.get(node, leaves[1])
                found = _decode(common, weights, side[index : index + 1])
                errors.append((found - batch[index : index + 1])[..., :size].square().mean())
            error = sum(errors[1:], errors[0])
            # The sum over ordered pairs of their mean squared distance is this one over distances from the mean.
            distance = 2.0 * count * (latents - latents.mean(0, keepdim=True)).square().sum() / latents[0].numel()
            alike = (shared - batch)[..., :size].square().mean((1, 2)).sum()
            total = self.reconstruction * (error + alike) + self.similarity * distance
            return total, error / count, distance / max(1, count * (count - 1))

        found = self._train([self._encoder, self._shared, *own.values()], losses)
        if found is None:
            return None
        kept = [(node, half) for node, half in self._own.items() if node not in own] + list(own.items())
        self._own = dict(kept[max(0, len(kept) - self.decoders) :])
        return Losses(*found)

    def _copy(self) -> _Half:
        """Return what a node's own decoder begins as: the one that unknown nodes share, as it is now."""
        return _Half(ConvDecoder, [self._shared.weights])

    def _halves(self, nodes: Sequence[int]) -> dict[int, _Half]:
        """Return the decoders that nodes of a round train, in their order; new ones are not kept yet."""
        # Known nodes come first: if nodes of one round gave up each other's decoders, none would be trained twice.
        ranked = sorted(nodes, key=lambda node: node not in self._own)[: self.decoders]
        return {node: self._own.get(node) or self._copy() for node in nodes if node in ranked}

    def _train(
        self, halves: Sequence[_Half], losses: Callable[..., tuple[torch.Tensor, ...]]
    ) -> tuple[float, ...] | None:
        """Take the steps of a round; return what the last one began with, after the total: None if there was none."""
        with optional("the training of an autoencoder"):
            import torch

            from fedcomp.tasks.base import single_thread
        found: tuple[float, ...] | None = None
        # Sums of several threads would depend on how many there are.
        with single_thread():
            leaves = [torch.from_numpy(half.weights.copy()).requires_grad_() for half in halves]
            optimizer = self._resumed(leaves, halves)
            for step in range(self.passes):
                optimizer.zero_grad()
                total, *parts = losses(torch.from_numpy, step, leaves)
                total.backward()
                grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
                if not all(bool(torch.isfinite(each).all()) for each in (total, *grads)):
                    break
                optimizer.step()
                self.steps += 1
                found = tuple(float(part.detach()) for part in parts)
            moments = optimizer.state_dict()["state"]
        for index, (half, leaf) in enumerate(zip(halves, leaves, strict=True)):
            kept = {name: v.numpy().reshape(-1).copy() for name, v in moments.get(index, {}).items() if v is not None}
            half.take(leaf.detach().numpy(), kept)
        return found

    def _resumed(self, leaves: list[torch.Tensor], halves: Sequence[_Half]) -> torch.optim.Optimizer:
        """Return the optimiser of ``leaves`` with the moments of ``halves``."""
        import torch

        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.SGD
        optimizer = kind(leaves, lr=self.lr)
        state = {
            # The count of steps is a single number, all else as long as the weights.
            index: {
                name: torch.from_numpy(v.copy()).reshape(() if v.size == 1 else -1) for name, v in h.moments.items()
            }
            for index, h in enumerate(halves)
            if h.moments
        }
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return optimizer


def learn(
    training: AutoencoderTraining,
    codec: LGC,
    layout: Layout,
    supports: Supports,
    vectors: Mapping[int, Vector],
    weights: Sequence[float],
    number: int,
) -> dict[str, float]:
    """Train on what the nodes of round ``number`` sent of their coded tensors; return the losses, none if not finite.

    Parameters
    ----------
    codec : LGC
        Of the round, with its scale.
    vectors : mapping of int to float32 array
        By node, in the order of partitions.
    """
    if codec.instance == "ring":
        loss = training.learn_ring([v / np.float32(codec.scale) for v in vectors.values()], weights)
        return {} if loss is None else {"autoencoder-loss": loss}
    innovations = codec.innovations(layout)
    unit = {node: v / np.float32(scale_of(v)) for node, v in vectors.items()}
    sides = {node: innovations.on_support(v, supports, layout) for node, v in unit.items()}
    both = training.learn_nodes(unit, sides, number)
    return {} if both is None else {"autoencoder-loss": both.reconstruction, "latent-distance": both.similarity}


def _weight(name: str, value: float) -> float:
    return params.number(name, value, rule="a number of at least 0", ok=lambda v: 0.0 <= v < float("inf"))


def _padded(vectors: Sequence[Vector]) -> NDArray[np.float32]:
    """Return signals as torch takes them: (nodes, 1, positions), zeros at the end."""
    out = np.zeros((len(vectors), 1, STEP * math.ceil(vectors[0].size / STEP)), np.float32)
    for row, vector in zip(out, vectors, strict=True):
        row[0, : vector.size] = vector
    return out


def _layers(leaf: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    parts = leaf.split([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _encode(batch: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Return latents, (nodes, 4, positions / 16): what :class:`ConvEncoder` computes."""
    from torch.nn import functional as f

    *layers, kernel, bias = _layers(leaf, ConvEncoder.SHAPES)
    for weight, add in zip(layers[::2], layers[1::2], strict=True):
        batch = f.leaky_relu(f.conv1d(batch, weight, add, stride=2, padding=1), SLOPE)
    return f.conv1d(batch, kernel, bias)


def _decode(latents: torch.Tensor, leaf: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
    """Return signals, (nodes, 1, positions): what :class:`ConvDecoder` computes."""
    import torch
    from torch.nn import functional as f

    *layers, kernel, bias = _layers(leaf, ConvDecoder.SHAPES)
    assert latents.shape[1] == CHANNELS
    for weight, add in zip(layers[::2], layers[1::2], strict=True):
        latents = f.leaky_relu(f.conv_transpose1d(latents, weight, add, stride=2, padding=1, output_padding=1), SLOPE)
    return f.conv1d(torch.cat([latents, side], 1), kernel, bias)
