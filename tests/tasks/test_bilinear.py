"""Thousands of bilinear teachers as products: each one learns as one network alone would, from its own records."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fedcomp.errors import ConfigError
from fedcomp.privacy.votes import topk_stochastic_sign
from fedcomp.rng import Key
from fedcomp.tasks import gan
from fedcomp.tasks.base import Split
from fedcomp.tasks.bilinear import BilinearTeachers

CLASSES, PIXELS, COUNT = 3, 7, 4
OWNER = np.array([0, 0, 1, 1, 1, 3, 3, 0, 1])
"""Teacher 2 has no record."""


def records(changed: int | None = None) -> Split:
    x = Key(1, "x").uniform(len(OWNER) * PIXELS).reshape(len(OWNER), PIXELS).astype(np.float32)
    y = np.array([0, 1, 1, 1, 2, 0, 0, 0, 2])
    if changed is not None:
        x[changed], y[changed] = 1.0 - x[changed], (y[changed] + 1) % CLASSES
    return Split(x, y)


def pool(step: int) -> torch.Tensor:
    drawn = Key(2, "pool", step).uniform(CLASSES * 5 * PIXELS).astype(np.float32)
    return torch.from_numpy(drawn.reshape(CLASSES, 5, PIXELS))


def alone(teacher: int, adam: gan.Adam, steps: int) -> tuple[gan.Bilinear, dict[str, torch.Tensor]]:
    """Train one network by automatic differentiation; return it, and the gradient of its first step."""
    data, net = records(), gan.Bilinear(CLASSES, PIXELS)
    mine = torch.from_numpy(np.flatnonzero(teacher == OWNER))
    x, y = (t[mine] for t in data.tensors)
    for p in net.parameters():
        p.data.zero_()
    moments = adam.start(dict(net.named_parameters()))
    first: dict[str, torch.Tensor] = {}
    for step in range(steps):
        made = pool(step)
        loss = functional.softplus(-net(x, functional.one_hot(y, CLASSES).float())).mean()
        for label in y:
            hot = functional.one_hot(label, CLASSES).float().expand(made.shape[1], -1)
            loss = loss + functional.softplus(net(made[label], hot)).mean() / len(y)
        named = dict(net.named_parameters())
        found = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        first = first or found
        after, moments = adam.step({n: p.detach() for n, p in named.items()}, found, moments)
        for name, p in named.items():
            p.data.copy_(after[name])
    return net, first


@pytest.mark.parametrize("teacher", [0, 1, 3])
def test_f_a_teacher_learns_what_one_network_alone_does(teacher: int) -> None:
    adam = gan.Adam(0.01, 0.5)
    teachers = BilinearTeachers(records(), OWNER, COUNT, classes=CLASSES, adam=adam)
    for step in range(3):
        teachers.learn(pool(step))
    net, first = alone(teacher, adam, 3)
    # Entries of classes a teacher lacks have no gradient, and stay zero.
    assert teachers.rows[:, teacher].numpy() == pytest.approx(net.rows.weight.detach().numpy().T, abs=1e-5)
    assert teachers.offsets[:, teacher].numpy() == pytest.approx(net.offsets.weight.detach().numpy()[0], abs=1e-5)
    fresh = BilinearTeachers(records(), OWNER, COUNT, classes=CLASSES)
    for step in (2, 1, 0):  # What it thought before is forgotten.
        fresh.learn(pool(step))
    assert fresh.rows[:, teacher].numpy() == pytest.approx(-first["rows.weight"].numpy().T, abs=1e-6)


def test_f_votes_per_class_are_those_on_every_image_of_it() -> None:
    """The gradient of each image by automatic differentiation casts the votes of its class's row."""
    adam = gan.Adam(0.01, 0.5)
    teachers = BilinearTeachers(records(), OWNER, COUNT, classes=CLASSES, adam=adam)
    for step in range(3):
        teachers.learn(pool(step))
    net, _ = alone(0, adam, 3)
    labels = np.array([0, 1, 0, 1])
    images = torch.from_numpy(Key(3, "images").uniform(4 * PIXELS).reshape(4, PIXELS).astype(np.float32))
    loss = functional.softplus(-net(images.requires_grad_(), gan.one_hot(labels, CLASSES))).sum()
    wanted = topk_stochastic_sign(-torch.autograd.grad(loss, images)[0].numpy(), 3, stochastic=False)
    rows = np.stack([teachers.directions(int(label))[0] for label in labels])
    assert np.array_equal(topk_stochastic_sign(rows, 3, stochastic=False), wanted)
    assert np.abs(wanted).sum() == 12


@pytest.mark.parametrize("adam", [None, gan.Adam(0.01, 0.5)])
def test_f_an_exchanged_record_moves_its_own_teacher_alone(adam: gan.Adam | None) -> None:
    def rows(data: Split) -> NDArray[np.float32]:
        teachers = BilinearTeachers(data, OWNER, COUNT, classes=CLASSES, adam=adam)
        for step in range(3):
            teachers.learn(pool(step))
        return teachers.rows.numpy()

    before, after = rows(records()), rows(records(changed=3))
    moved = [bool((before[:, t] != after[:, t]).any()) for t in range(COUNT)]
    assert moved == [False, True, False, False]
    assert not before[:, 2].any()  # Without records there is no opinion, and no vote.
    assert not before[2, 0].any()  # Nor on a class of which there are none.


def test_f_a_record_without_a_teacher_is_refused() -> None:
    with pytest.raises(ConfigError, match="one owner of 0 to 2"):
        BilinearTeachers(records(), OWNER, 3, classes=CLASSES)
