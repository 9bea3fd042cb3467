"""Gradients from perturbed activities: unbiased, with the variance of the formula, also between local losses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcomp.errors import ConfigError
from fedcomp.factors.capture import capture
from fedcomp.factors.collect import Captured, collecting
from fedcomp.forward.activity import activity_gradients
from fedcomp.rng import Key

KEY = Key(3, "activities")
X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(2))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    module, generator = make(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
    return module


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


class Greedy(nn.Module):
    """Two blocks with heads of their own; nothing comes back from the second to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 10), nn.Linear(10, 8)])
        self.heads = nn.ModuleList([nn.Linear(10, 3), nn.Linear(8, 3)])

    def forward(self, x: Tensor) -> list[Tensor]:
        out = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = torch.tanh(block(x.detach()))
            out.append(head(x))
        return out


def losses(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(X), Y, reduction="none")


def local_losses(model: nn.Module) -> Tensor:
    return torch.stack([nn.functional.cross_entropy(found, Y, reduction="none") for found in model(X)]).sum(0)


def exact(module: nn.Module, of: Callable[[nn.Module], Tensor]) -> dict[str, np.ndarray]:
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, (g.numpy() for g in torch.autograd.grad(of(module).mean(), parameters)), strict=True))


MANY = 20
"""Copies of the examples, each of which is perturbed by itself: their gradient is the mean of as many estimates."""


def many_losses(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(X.repeat(MANY, 1)), Y.repeat(MANY), reduction="none")


def many_local_losses(model: nn.Module) -> Tensor:
    heads = model(X.repeat(MANY, 1))
    return torch.stack([nn.functional.cross_entropy(each, Y.repeat(MANY), reduction="none") for each in heads]).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "of"), [(mlp, many_losses), (Greedy, many_local_losses)])
def test_the_mean_of_many_estimates_is_the_gradient(
    make: Callable[[], nn.Module], of: Callable[[nn.Module], Tensor]
) -> None:
    """Of every parameter within 4.5 standard errors; with local losses that of the block's own loss."""
    module = seeded(make)
    wanted = exact(module, of)
    found = [activity_gradients(module, of, KEY.at(round=r)).gradients() for r in range(36)]
    assert found[0].keys() == wanted.keys()
    for name, gradient in wanted.items():
        draws = np.stack([one[name] for one in found]).astype(np.float64)
        assert draws.shape[1:] == gradient.shape
        error = draws.std(axis=0) / 6
        assert (np.abs(draws.mean(axis=0) - gradient) <= 4.5 * error + 1e-6).all(), name
    loss = activity_gradients(module, of, KEY).loss
    assert loss == pytest.approx(float(of(module).mean().detach()), rel=1e-6)


@pytest.mark.slow
def test_the_variance_is_the_formulas_and_far_below_that_of_weights() -> None:
    """Σ |a_i|² (h - 1) |δ_i|² over the squared number of examples, within 15 %; more passes, less of it."""
    module = seeded(mlp)
    hidden = torch.tanh(module[0](X)).detach()  # type: ignore[index]
    outputs = module[2](hidden).detach().requires_grad_(True)  # type: ignore[index]
    (delta,) = torch.autograd.grad(nn.functional.cross_entropy(outputs, Y, reduction="sum"), outputs)
    formula = float((hidden.square().sum(1) * 2 * delta.square().sum(1)).sum()) / len(X) ** 2
    gradient = exact(module, losses)["2.weight"]
    spread = {}
    for count in (1, 4):
        draws = [
            activity_gradients(module, losses, KEY.at(round=r), count=count).gradients()["2.weight"] for r in range(100)
        ]
        spread[count] = np.mean([np.square(d - gradient).sum() for d in draws])
    assert spread[1] == pytest.approx(formula, rel=0.15)
    assert spread[4] == pytest.approx(formula / 4, rel=0.15)
    weights = (gradient.size - 1) * float(np.square(gradient).sum())
    assert weights > 20 * spread[1]


class Beside(nn.Module):
    """The examples enter at two places, once beside what was made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.wide, self.out = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.deep(x)) + self.wide(2.0 * x))


@pytest.mark.parametrize(
    ("make", "of", "first"),
    [
        (mlp, losses, {"0.weight"}),
        (Beside, losses, {"deep.weight", "wide.weight"}),
        # What gradients are stopped before counts as data, as where gradients are captured.
        (Greedy, local_losses, {"blocks.0.weight", "blocks.1.weight"}),
    ],
)
def test_layers_that_see_the_examples_are_known(
    make: Callable[[], nn.Module], of: Callable[[nn.Module], Tensor], first: set[str]
) -> None:
    found = activity_gradients(seeded(make), of, KEY)
    assert {name for name, outer in found.outer.items() if outer.at_input} == first
    module = seeded(make)
    with collecting(lambda *_: True) as captured, capture(module):
        of(module).mean().backward()
    assert {name for name, outer in captured.outer.items() if outer.at_input} == first


def taken(steps: int, seed: int | None) -> tuple[nn.Module, dict[str, np.ndarray], Captured]:
    module = seeded(mlp)
    before = {name: p.detach().numpy().copy() for name, p in module.named_parameters()}
    with collecting(lambda *_: True, seed) as captured, capture(module):
        for step in range(steps):
            found = activity_gradients(module, losses, KEY.at(round=step)).gradients()
            with torch.no_grad():
                for name, p in module.named_parameters():
                    p.sub_(torch.from_numpy(found[name]), alpha=0.2)
    return module, before, captured


@pytest.mark.parametrize("seed", [None, 77])
@pytest.mark.parametrize("steps", [1, 3])
def test_plain_steps_are_captured_and_recognised_as_a_multiple(steps: int, seed: int | None) -> None:
    """Of any step size; and what is captured is what travels, slopes and signs to the bit."""
    module, before, captured = taken(steps, seed)
    changes = {name: p.detach().numpy() - before[name] for name, p in module.named_parameters()}
    found = captured.explaining(changes, before)
    assert found.keys() == {"0.weight", "2.weight"}
    assert captured.notes == []
    for name, outer in found.items():
        assert outer.count == steps * len(X)
        assert np.linalg.norm(outer.matrix() - changes[name]) <= 1e-4 * np.linalg.norm(changes[name])
        # Signs of one seed go on from step to step; each of the app's own keys begins a stream of its own.
        assert (outer.signed is not None) == (seed is not None or steps == 1)
        if outer.signed is not None:
            assert outer.signed.seed == (seed or KEY.at(round=0).u64())
            assert outer.left.tobytes() == outer.signed.matrix().tobytes()
    # Momentum is no multiple, and is said.
    assert not captured.explaining({n: c + 0.1 * before[n] for n, c in changes.items()}, before)
    assert "momentum" in captured.notes[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_floats_are_estimated(dtype: torch.dtype) -> None:
    def of(kind: torch.dtype) -> dict[str, np.ndarray]:
        module, x = seeded(mlp).to(kind), X.to(kind)
        return activity_gradients(module, lambda model: model(x).square().sum(1), KEY).gradients()

    found, wanted = of(dtype), of(torch.float32)
    for name, gradient in wanted.items():
        assert np.linalg.norm(found[name] - gradient) <= 0.05 * np.linalg.norm(gradient), name


def test_what_is_refused() -> None:
    tied = mlp()
    tied.append(nn.Linear(3, 3))
    tied.append(nn.Linear(3, 3))
    tied[4].weight = tied[3].weight
    with pytest.raises(ConfigError, match="share a weight"):
        activity_gradients(tied, losses, KEY)
    with pytest.raises(ConfigError, match="count"):
        activity_gradients(seeded(mlp), losses, KEY, count=0)
    for module, of, match in (
        (nn.Sequential(nn.Conv1d(1, 2, 3)), losses, "not those of linear layers"),
        (mlp(), lambda model: losses(model).mean(), "one for each example"),
        (mlp(), lambda model: losses(model) + losses(model), "called twice"),
        (mlp(), lambda model: model(X.expand(2, 24, 6)).sum((0, 2)), "called twice"),
        (mlp(), lambda model: losses(model)[:5], "not called once"),
    ):
        with pytest.raises(ConfigError, match=match):
            activity_gradients(module, of, KEY)
    # No hook is left behind by what failed.
    module = seeded(mlp)
    with pytest.raises(ConfigError):
        activity_gradients(module, lambda model: losses(model).mean(), KEY)
    assert not module[0]._forward_hooks  # type: ignore[index, union-attr]
