"""Conditional generators and discriminators, and ensembles of discriminators trained in parallel.

A *student* (the generator) never sees data. A *teacher* (a discriminator) sees its own records only, and says of every
generated image in which direction its pixels should move. What leaves a teacher is made from that direction elsewhere
(:mod:`fedcomp.privacy.votes`); here are the networks, their losses and their steps.

Labels go in as one-hot rows, at every level of the larger networks. No discriminator has batch normalisation: the
direction for one image must not depend on the others of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedcomp.errors import ConfigError
from fedcomp.rng import Key
from fedcomp.rules import BelowOne, Configured, Positive
from fedcomp.tasks import models
from fedcomp.tasks.base import Split, single_thread

Arrays = Mapping[str, NDArray[Any]]
Faker = Callable[[NDArray[np.int64]], NDArray[np.float32]]
"""``fakes(labels)``: one image for each label, float32 ``(len(labels), pixels)``."""

EPSILON: Final = 1e-8
SECOND: Final = 0.999
"""Adam's epsilon and second decay rate, which the published settings leave at their defaults (Kingma, Ba 2015)."""

_SLOPE: Final = 0.2
"""Slope of leaky ReLU in the discriminators."""

_REFERENCE: Final = 64
"""Number of public images whose statistics replace those of a batch when the labels are those of records."""


class Generator(nn.Module):
    """G(z, y): images in [0, 1] as rows.

    Attributes
    ----------
    noise, classes, pixels : int
        Sizes of z, of a one-hot label, and of an image.
    """

    def __init__(self, noise: int, classes: int, pixels: int) -> None:
        super().__init__()
        self.noise, self.classes, self.pixels = noise, classes, pixels


class MlpGenerator(Generator):
    """Fully connected, ReLU between the layers, a sigmoid at the end."""

    def __init__(self, noise: int, classes: int, hidden: Sequence[int], pixels: int) -> None:
        super().__init__(noise, classes, pixels)
        widths = [noise + classes, *hidden, pixels]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Return images ``(B, pixels)`` of noise ``(B, noise)`` and one-hot labels ``(B, classes)``."""
        x = torch.cat([z, y], 1)
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return torch.sigmoid(self.layers[-1](x))


class ConvGenerator(Generator):
    """Two fully connected layers, then two transposed convolutions, batch normalisation between; labels at every level.

    Parameters
    ----------
    side : int
        Height and width, a multiple of 4.
    width : int
        Channels: 2 ``width`` before the first transposed convolution, ``width`` after it; 16 ``width`` units in the
        first layer.
    """

    def __init__(self, noise: int, classes: int, side: int, width: int) -> None:
        super().__init__(noise, classes, side * side)
        self.side, self.width = side, width
        self.first = nn.Linear(noise + classes, 16 * width)
        self.first_norm = nn.BatchNorm1d(16 * width)
        self.second = nn.Linear(16 * width + classes, 2 * width * (side // 4) ** 2)
        self.second_norm = nn.BatchNorm1d(2 * width * (side // 4) ** 2)
        # Kernel 4, stride 2, padding 1 doubles a side exactly, and halves an even one in the discriminator.
        self.third = nn.ConvTranspose2d(2 * width + classes, width, 4, stride=2, padding=1)
        self.third_norm = nn.BatchNorm2d(width)
        self.fourth = nn.ConvTranspose2d(width + classes, 1, 4, stride=2, padding=1)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Return images ``(B, side * side)``."""
        x = torch.relu(self.first_norm(self.first(torch.cat([z, y], 1))))
        x = torch.relu(self.second_norm(self.second(torch.cat([x, y], 1))))
        x = x.reshape(len(x), 2 * self.width, self.side // 4, self.side // 4)
        x = torch.relu(self.third_norm(self.third(_with_label(x, y))))
        return torch.sigmoid(self.fourth(_with_label(x, y))).flatten(1)


class Bilinear(nn.Module):
    """D(x, y) = x . A[y] + c[y]: one linear score per class.

    650 numbers for 8x8 digits. With fifteen records a teacher, this learns where a small network does not.
    """

    def __init__(self, classes: int, pixels: int) -> None:
        super().__init__()
        self.rows = nn.Linear(classes, pixels, bias=False)
        self.offsets = nn.Linear(classes, 1, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the logits of being real, ``(B,)``."""
        return (self.rows(y) * x).sum(1) + self.offsets(y)[:, 0]


class MlpDiscriminator(nn.Module):
    """Fully connected, leaky ReLU between the layers; pixels and label enter together."""

    def __init__(self, classes: int, pixels: int, hidden: Sequence[int]) -> None:
        super().__init__()
        widths = [pixels + classes, *hidden, 1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the logits of being real, ``(B,)``."""
        x = torch.cat([x, y], 1)
        for layer in self.layers[:-1]:
            x = functional.leaky_relu(layer(x), _SLOPE)
        return self.layers[-1](x)[:, 0]


class ConvDiscriminator(nn.Module):
    """Two convolutions of stride 2 and a fully connected layer, leaky ReLU between, labels at every level."""

    def __init__(self, classes: int, side: int, width: int) -> None:
        super().__init__()
        self.side = side
        self.first = nn.Conv2d(1 + classes, width, 4, stride=2, padding=1)
        self.second = nn.Conv2d(width + classes, 2 * width, 4, stride=2, padding=1)
        self.third = nn.Linear(2 * width * (side // 4) ** 2 + classes, 16 * width)
        self.fourth = nn.Linear(16 * width + classes, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the logits of being real, ``(B,)``."""
        x = x.reshape(len(x), 1, self.side, self.side)
        x = functional.leaky_relu(self.first(_with_label(x, y)), _SLOPE)
        x = functional.leaky_relu(self.second(_with_label(x, y)), _SLOPE)
        x = functional.leaky_relu(self.third(torch.cat([x.flatten(1), y], 1)), _SLOPE)
        return self.fourth(torch.cat([x, y], 1))[:, 0]


def _with_label(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x`` with one more channel per class, constant over the image."""
    return torch.cat([x, y[:, :, None, None].expand(-1, -1, x.shape[2], x.shape[3])], 1)


def noise_and_labels(key: Key, count: int, noise: int, classes: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return z, float32 ``(count, noise)``, uniform in [-1, 1), and labels, int64 ``(count,)``, uniform.

    Both are public and depend on no data.
    """
    # Separate purposes: another size of noise leaves the labels as they are.
    z = (2.0 * key.at(purpose=f"{key.purpose}/noise").uniform(count * noise) - 1.0).astype(np.float32)
    drawn = key.at(purpose=f"{key.purpose}/labels").uniform(count)
    return z.reshape(count, noise), (drawn * classes).astype(np.int64)


def one_hot(labels: NDArray[np.int64], classes: int) -> Tensor:
    """Return float32 rows with a one at the label, shape ``(*labels.shape, classes)``."""
    return torch.from_numpy(np.eye(classes, dtype=np.float32)[labels])


@dataclass(frozen=True, slots=True)
class Adam(Configured):
    """Adam (Kingma, Ba 2015, algorithm 1) on arrays by name; the same for one network and for many stacked ones.

    Parameters
    ----------
    lr, decay : float
        Step size and the decay rate of the first moment.

    Examples
    --------
    >>> adam, w = Adam(lr=0.5), {"w": torch.tensor([2.0])}
    >>> after, moments = adam.step(w, {"w": torch.tensor([4.0])}, adam.start(w))
    >>> after["w"].item(), moments["t"].item()
    (1.5, 1)
    """

    lr: Positive = 1e-3
    decay: BelowOne = 0.5

    def start(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the moments and the step count before the first step."""
        moments = {f"{kind}/{name}": torch.zeros_like(p) for name, p in parameters.items() for kind in ("m", "v")}
        return {**moments, "t": torch.zeros((), dtype=torch.int64)}

    def step(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], moments: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return parameters and moments after one step; nothing is changed in place."""
        t = int(moments["t"]) + 1
        after: dict[str, Tensor] = {}
        kept: dict[str, Tensor] = {"t": torch.tensor(t, dtype=torch.int64)}
        for name, gradient in gradients.items():
            m = torch.lerp(moments[f"m/{name}"], gradient, 1.0 - self.decay)
            v = moments[f"v/{name}"] * SECOND + gradient * gradient * (1.0 - SECOND)
            # Epsilon is added after root and correction, as in algorithm 1.
            scale = (v / (1.0 - SECOND**t)).sqrt_().add_(EPSILON)
            after[name] = parameters[name] - (self.lr / (1.0 - self.decay**t)) * m / scale
            kept |= {f"m/{name}": m, f"v/{name}": v}
        return after, kept


class Student:
    """The generator's side: images down, one step towards the voted targets.

    Parameters
    ----------
    module : Generator
        Scratch memory; every call fills it first.
    adam : Adam
    """

    def __init__(self, module: Generator, adam: Adam) -> None:
        self.module = module.train()
        self.adam = adam

    def images(self, arrays: Arrays, key: Key, count: int) -> NDArray[np.float32]:
        """Return ``count`` images, float32 ``(count, pixels)``, of the noise and labels that ``key`` names."""
        self._load(arrays)
        z, y = self._inputs(key, count)
        # Training mode, as in step(): the same batch gives the same images. The statistics it moves are scratch.
        with torch.no_grad(), single_thread():
            return self.module(z, y).numpy()

    def labels(self, key: Key, count: int) -> NDArray[np.int64]:
        """Return the labels of :meth:`images`, int64 ``(count,)``."""
        return noise_and_labels(key, count, self.module.noise, self.module.classes)[1]

    def faker(self, arrays: Arrays, key: Key) -> Faker:
        """Return what makes an image for each of the labels it is given, of noise that ``key`` names.

        Labels are those of records. So no image depends on the labels of the others, which are other teachers':
        batch normalisation takes its statistics from a batch of public noise and labels.
        """
        self._load(arrays)
        # A generator without batch normalisation has nothing that couples the images of a batch.
        norms = [m for m in self.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if norms:
            usual = [m.momentum for m in norms]
            for m in norms:
                # With momentum 1 the running statistics are those of this one batch alone.
                m.momentum = 1.0
            with torch.no_grad(), single_thread():
                self.module(*self._inputs(key.at(purpose=f"{key.purpose}/reference"), _REFERENCE))
            for m, momentum in zip(norms, usual, strict=True):
                m.momentum = momentum

        def fakes(labels: NDArray[np.int64]) -> NDArray[np.float32]:
            z, _ = noise_and_labels(key, len(labels), self.module.noise, self.module.classes)
            self.module.eval()
            try:
                with torch.no_grad(), single_thread():
                    return self.module(torch.from_numpy(z), one_hot(labels, self.module.classes)).numpy()
            finally:
                self.module.train()

        return fakes

    def start(self) -> dict[str, NDArray[Any]]:
        """Return the optimiser's state before the first step."""
        return _numpy(self.adam.start(dict(self.module.named_parameters())))

    def step(
        self, arrays: Arrays, moments: Arrays, key: Key, targets: NDArray[np.float32]
    ) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Take one Adam step on the sum over the images of || X_j + t_j - G(z, y)_j ||^2, with X the same images held
        fixed, and return model and optimiser state.

        Parameters
        ----------
        targets : ndarray of float32, (count, pixels)
            t, what the images are to change by.
        """
        self._load(arrays)
        z, y = self._inputs(key, len(targets))
        named = dict(self.module.named_parameters())
        with single_thread():
            images = self.module(z, y)
            # Its derivative by the images is -2 t: descent moves them along the voted targets, wherever they are.
            loss = (images.detach() + torch.from_numpy(targets) - images).square().sum()
            found = torch.autograd.grad(loss, list(named.values()))
            with torch.no_grad():
                current = {name: p.detach() for name, p in named.items()}
                gradients = dict(zip(named, found, strict=True))
                after, kept = self.adam.step(current, gradients, _tensors(moments))
        # The forward pass has moved the running statistics of the normalisation layers along.
        state = {name: tensor.detach().numpy().copy() for name, tensor in self.module.state_dict().items()}
        return {**state, **_numpy(after)}, _numpy(kept)

    def _inputs(self, key: Key, count: int) -> tuple[Tensor, Tensor]:
        z, labels = noise_and_labels(key, count, self.module.noise, self.module.classes)
        return torch.from_numpy(z), one_hot(labels, self.module.classes)

    def _load(self, arrays: Arrays) -> None:
        from fedcomp.tasks.arrays import load_arrays

        load_arrays(self.module, arrays, cast=True)


class Teachers:
    """Discriminators that learn side by side, each from records of its own.

    Parameters
    ----------
    make : callable
        Returns a discriminator.
    data : Split
        The records of all of them.
    owner : ndarray of int64, (N,)
        Which teacher holds each record, 0 to ``count`` - 1; a record has one owner.
    count, classes : int
    adam : Adam
    batch : int
        Records and generated images of a step; a teacher with fewer records takes all it has.
    key : Key
        Names the initial values and the order of the records.

    Notes
    -----
    State is a flat mapping of arrays whose first axis is the teacher. A teacher without records learns nothing, and its
    gradients are zero.

    What one teacher learns depends on its own records alone: not on those of the others, nor on how many they have. A
    record that is exchanged, added or taken out moves one teacher's votes, whoever else is computed with it.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        data: Split,
        owner: NDArray[np.int64],
        count: int,
        *,
        classes: int,
        adam: Adam,
        batch: int,
        key: Key,
    ) -> None:
        if owner.shape != (len(data),) or (owner.size and not 0 <= owner.min() <= owner.max() < count):
            raise ConfigError(f"expected one owner of 0 to {count - 1} for each record")
        self.count, self.classes, self.adam, self.batch, self.key = count, classes, adam, batch, key
        self._make, self._data = make, data
        # Only its structure counts: each teacher's parameters are put in when it is called.
        self._module = models.build(make, 0)
        order = np.argsort(owner, kind="stable")
        self.sizes = np.bincount(owner, minlength=count)
        # Row t lists the records of teacher t, padded with zeros; sizes tell which are padding. At least a batch wide,
        # so that every draw has the same shape.
        self._records = np.zeros((count, max(batch, int(self.sizes.max(initial=0)))), np.int64)
        # A record's column is its place in the sorted order, less the records of all teachers before its own.
        self._records[owner[order], np.arange(len(order)) - (np.cumsum(self.sizes) - self.sizes)[owner[order]]] = order

    def records_of(self, teacher: int) -> NDArray[np.int64]:
        """Return which of the records, by their position in the data, ``teacher`` holds."""
        return self._records[teacher, : self.sizes[teacher]]

    def start(self) -> dict[str, NDArray[Any]]:
        """Return the state of teachers that have learnt nothing."""
        parameters = models.build_many(self._make, self.key.at(purpose=f"{self.key.purpose}/initial").u64(), self.count)
        return _numpy({**{f"p/{name}": p for name, p in parameters.items()}, **self.adam.start(parameters)})

    def learn(
        self, state: Arrays, fakes: Faker, key: Key, labels: NDArray[np.int64] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Return the state after one step of every teacher on a batch of its records and on generated images.

        Parameters
        ----------
        fakes : callable
        key : Key
            Names the batch.
        labels : ndarray of int64, (batch,), optional
            Labels of generated images that are the same for all teachers; default: those of each teacher's own batch.
        """
        # Padding points to record 0, which an empty split does not have.
        if not len(self._data):
            return dict(state)
        rows, weights = self._batch(key)
        x, y = (t[torch.from_numpy(rows)] for t in self._data.tensors)
        # Padding has no weight, but nothing times NaN is NaN: it must not be another teacher's record.
        x[torch.from_numpy(weights == 0.0)] = 0.0
        y[torch.from_numpy(weights == 0.0)] = 0
        if labels is None:
            made = torch.from_numpy(fakes(y.numpy().T.reshape(-1))).reshape(*y.T.shape, -1).transpose(0, 1)
            said, share = y.numpy(), weights
        else:
            made = torch.from_numpy(fakes(labels)).expand(self.count, -1, -1)
            said = np.broadcast_to(labels, (self.count, len(labels)))
            # The labels are the same for all teachers; those without records still learn nothing.
            share = np.repeat((self.sizes > 0)[:, None] / max(1, len(labels)), len(labels), axis=1)
        parameters, moments = self._split(state)
        leaves = {name: p.requires_grad_() for name, p in parameters.items()}
        with single_thread():
            real = self._scores(leaves, x, one_hot(y.numpy(), self.classes))
            fake = self._scores(leaves, made, one_hot(said, self.classes))
            # Sums over teachers: the gradient of each is its own mean's.
            loss = (functional.softplus(-real) * _weights(weights)).sum() + (
                functional.softplus(fake) * _weights(share)
            ).sum()
            found = torch.autograd.grad(loss, list(leaves.values()))
            with torch.no_grad():
                current = {name: p.detach() for name, p in leaves.items()}
                after, kept = self.adam.step(current, dict(zip(leaves, found, strict=True)), moments)
        return _numpy({**{f"p/{name}": p for name, p in after.items()}, **kept})

    def gradients(self, state: Arrays, images: NDArray[np.float32], labels: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return -dL_G/dX of every teacher and image, float32 ``(count, B, pixels)``: the direction that would make the
        image more real, with L_G = log(1 + exp(-D(X, y))).
        """
        parameters, _ = self._split(state)
        x = torch.from_numpy(images).expand(self.count, -1, -1).contiguous().requires_grad_()
        y = one_hot(labels, self.classes).expand(self.count, -1, -1)
        with single_thread():
            # No image's score depends on another image or teacher, so the sum's gradient holds that of each.
            loss = functional.softplus(-self._scores(parameters, x, y)).sum()
            (found,) = torch.autograd.grad(loss, [x])
        directions = -found.numpy()
        # A teacher without records still has its random initial network: it must not vote by that.
        directions[self.sizes == 0] = 0.0
        return directions

    def _batch(self, key: Key) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return records ``(count, b)`` without repetition within a teacher, and their weights in its mean loss."""
        # As many places as the step may need, record by record over all teachers: the number of the j-th record of a
        # teacher does not depend on how many the largest has.
        width = self._records.shape[1]
        words = np.ascontiguousarray(key.uniform(self.count * width).reshape(width, self.count).T)
        # Above every uniform number, so that padding is drawn last.
        words[np.arange(width) >= self.sizes[:, None]] = 2.0
        places = np.argsort(words, axis=1, kind="stable")[:, : self.batch]
        rows = np.take_along_axis(self._records, places, axis=1)
        drawn = np.minimum(self.sizes, self.batch)[:, None]
        # The mean is over what was drawn, so a teacher with few records does not learn less than the others.
        return rows, (np.arange(self.batch) < drawn) / np.maximum(drawn, 1)

    def _scores(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        def one(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return torch.func.functional_call(self._module, own, (x, y))

        if self.count == 1:
            return one({name: p[0] for name, p in parameters.items()}, x[0], y[0])[None]
        return torch.func.vmap(one)(dict(parameters), x, y)

    def _split(self, state: Arrays) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        tensors = _tensors(state)
        parameters = {name.removeprefix("p/"): t for name, t in tensors.items() if name.startswith("p/")}
        return parameters, {name: t for name, t in tensors.items() if not name.startswith("p/")}


def _weights(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def _numpy(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}
