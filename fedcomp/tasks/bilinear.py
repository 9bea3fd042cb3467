"""Thousands of bilinear teachers as batched matrix products: all teachers of a federation in one process.

A bilinear teacher (:class:`fedcomp.tasks.gan.Bilinear`) scores an image with one row per class,
``D(x, y) = x . A[y] + c[y]``. So the direction that would make an image more real, ``sigmoid(-D(x, y)) A[y]``, is the
same for all images of a class up to a positive factor, which does not change a vote: what a teacher votes is worked out
once per class, not once per image.

Three things differ from :class:`fedcomp.tasks.gan.Teachers`, which train any network. Generated images to learn from
are one public pool, some of each class, instead of as many as each teacher has records: 4000 teachers of 15 records
would need 60,000 images a step. Rows start at zero: a linear score has no symmetry that must be broken, and random rows
are noise that many small steps have to overcome first. And a teacher may restart before every vote, so that it judges
the generator as it is and not as it was.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcomp.errors import ConfigError
from fedcomp.tasks.base import Split, single_thread
from fedcomp.tasks.gan import EPSILON, SECOND, Adam


class BilinearTeachers:
    """``count`` teachers, each on all of its own records in every step.

    Parameters
    ----------
    data : Split
        The records of all of them, ``x`` float32 ``(N, pixels)``, ``y`` int64 ``(N,)``.
    owner : ndarray of int64, (N,)
        Which teacher holds each record; a record has one owner.
    count, classes : int
    adam : Adam, optional
        None for teachers that start afresh, from zero, in every step: their rows are then the negative gradient.

    Attributes
    ----------
    rows : Tensor of float32, (classes, count, pixels)
        A of every teacher. Changed in place.
    offsets : Tensor of float32, (classes, count)
        c of every teacher.

    Raises
    ------
    ConfigError
        When a record has no owner among the teachers.
    """

    def __init__(
        self, data: Split, owner: NDArray[np.int64], count: int, *, classes: int, adam: Adam | None = None
    ) -> None:
        if owner.shape != (len(data),) or (owner.size and not 0 <= owner.min() <= owner.max() < count):
            raise ConfigError(f"expected one owner of 0 to {count - 1} for each record")
        pixels = data.x.shape[1]
        self.adam = adam
        self.rows = torch.zeros(classes, count, pixels)
        self.offsets = torch.zeros(classes, count)
        # A teacher without records divides by 1 instead of 0: all its sums are zero.
        sizes = np.bincount(owner, minlength=count).clip(min=1)
        x, y = data.tensors
        held = torch.from_numpy(owner)
        # Sorted by class once: every step goes through the records class by class.
        self._records = [(x[y == label], held[y == label]) for label in range(classes)]
        counts = np.stack([np.bincount(owner[data.y == label], minlength=count) for label in range(classes)])
        self._one = torch.from_numpy((1.0 / sizes).astype(np.float32))
        self._share = torch.from_numpy((counts / sizes).astype(np.float32))
        self._moments = [tuple(torch.zeros_like(p) for _ in range(2)) for p in (self.rows, self.offsets) if adam]
        # Teachers that restart score their records zero in every step, so the records' part is worked out once.
        self._sums = None if adam else self._mean_records()
        self._steps = 0

    def _mean_records(self) -> Tensor:
        """Return half the part of each class in each teacher's mean record: minus the gradient at zero."""
        out = torch.zeros_like(self.rows)
        for label, (x, held) in enumerate(self._records):
            # 0.5 is sigmoid(0), the slope of both loss terms at a score of zero; learn() uses it for the pool's part.
            out[label].index_add_(0, held, x * self._one[held][:, None], alpha=0.5)
        return out

    def learn(self, pool: Tensor) -> None:
        """Take one step of every teacher, on its records and on the public images of their classes.

        The loss is that of a conditional GAN: the mean over its records of log(1 + exp(-D(x, y))), and over the same
        labels the mean of log(1 + exp(D)) over the pool's images of that class. Depends on its own records alone.

        Parameters
        ----------
        pool : Tensor of float32, (classes, images, pixels)
        """
        self._steps += 1
        with torch.no_grad(), single_thread():
            for label in range(len(self._records)):
                if self._sums is not None:
                    share = -0.5 * self._share[label][:, None]
                    torch.addcmul(self._sums[label], share, pool[label].mean(0), out=self.rows[label])
                else:
                    self._descend(label, pool[label])

    def _descend(self, label: int, images: Tensor) -> None:
        x, held = self._records[label]
        a, c = self.rows[label], self.offsets[label]
        # The slopes of the two loss terms by the score: -sigmoid(-D) on records, sigmoid(D) on generated images.
        real = torch.sigmoid(-((a[held] * x).sum(1) + c[held])) * self._one[held]
        fake = torch.sigmoid(torch.addmm(c[:, None], a, images.T)) * (self._share[label][:, None] / len(images))
        gradients = (
            (fake @ images).index_add_(0, held, x * real[:, None], alpha=-1.0),
            fake.sum(1).index_add_(0, held, real, alpha=-1.0),
        )
        assert self.adam is not None
        # Adam's two bias corrections are scalars here: they go into the rate and the root, not into arrays of this
        # size.
        rate, second = self.adam.lr / (1.0 - self.adam.decay**self._steps), math.sqrt(1.0 - SECOND**self._steps)
        # fedcomp.tasks.gan.Adam.step in place: 4000 teachers of MNIST have 31 million entries.
        for p, gradient, moments in zip((a, c), gradients, self._moments, strict=True):
            m, v = moments[0][label], moments[1][label]
            m.lerp_(gradient, 1.0 - self.adam.decay)
            v.mul_(SECOND).addcmul_(gradient, gradient, value=1.0 - SECOND)
            # The gradient is used up, so its memory takes the denominators.
            torch.sqrt(v, out=gradient).div_(second).add_(EPSILON)
            p.addcdiv_(m, gradient, value=-rate)

    def directions(self, label: int) -> NDArray[np.float32]:
        """Return -dL_G/dX of every teacher on images of ``label``, float32 ``(count, pixels)``, up to a positive factor
        for each image; zero of a teacher that has no record of the class. Shares its memory with :attr:`rows`."""
        return self.rows[label].numpy()
