"""Slopes without a backward pass: forward mode and differences against autograd, and no trace left behind."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcomp.errors import ConfigError, LayoutError
from fedcomp.forward.directions import Directions
from fedcomp.forward.evaluate import Objective, slopes, trained
from fedcomp.rng import Key

COUNT = 7


@pytest.fixture(autouse=True)
def state() -> Iterator[None]:
    """Start from one state of torch's generator, and leave it as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch.Generator().manual_seed(4).get_state())
        yield


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Dropout(0.4), nn.Linear(20, 4, bias=False)
    )


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 6, 2), nn.BatchNorm2d(6), nn.Tanh(), nn.Flatten(), nn.Linear(36, 4)
    )


def objective(module: nn.Module) -> Objective:
    x, y = torch.randn(32, 12), torch.randint(0, 4, (32,))
    return Objective(module, lambda model: nn.functional.cross_entropy(model(x), y), 32)


def tangents(module: nn.Module, seed: int = 0) -> list[dict[str, np.ndarray]]:
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    directions = Directions(Key(seed, "test"), [sum(sizes)], COUNT)
    ends = np.cumsum(sizes)[:-1]
    return [
        {
            name: part.reshape(shape)
            for (name, shape), part in zip(shapes.items(), np.split(directions.signs(0, k), ends), strict=True)
        }
        for k in range(COUNT)
    ]


def expected(found: Objective, given: list[dict[str, np.ndarray]]) -> list[float]:
    """The products of autograd's gradient, at the random state as it is now."""
    kept = [b.clone() for b in found.module.buffers()]
    names, parameters = zip(*found.module.named_parameters(), strict=True)
    gradient = torch.autograd.grad(found.loss(found.module), parameters)
    for buffer, before in zip(found.module.buffers(), kept, strict=True):
        buffer.copy_(before)
    by_name = dict(zip(names, gradient, strict=True))
    return [sum(float((by_name[n].double() * torch.from_numpy(d)).sum()) for n, d in one.items()) for one in given]


@pytest.mark.parametrize("at_once", [1, 3, COUNT])
@pytest.mark.parametrize("make", [mlp, conv])
def test_forward_mode_is_the_product_with_the_gradient(make: type, at_once: int) -> None:
    """2.6: within 1e-5, with dropout and batch normalisation in training mode, whatever is evaluated at once."""
    found = objective(make())
    given = tangents(found.module)
    start = torch.get_rng_state()
    wanted = expected(found, given)
    torch.set_rng_state(start)
    loss, products = slopes(found, given, at_once=at_once)
    np.testing.assert_allclose(products, wanted, rtol=1e-5, atol=1e-5)
    torch.set_rng_state(start)
    assert loss == pytest.approx(float(found.loss(found.module)), rel=1e-6)
    # Another draw of dropout has another gradient: what is random was the same in all evaluations.
    if make is mlp:
        other = expected(found, given)
        assert np.abs(np.array(other) - wanted).max() > 1e-2


@pytest.mark.parametrize("make", [mlp, conv])
@pytest.mark.parametrize("oracle", ["jvp", "differences"])
def test_nothing_of_the_module_changes(make: type, oracle: str) -> None:
    """Parameters and statistics are bit for bit what they were; the generator has moved by one evaluation."""
    found = objective(make())
    before = {name: tensor.clone() for name, tensor in found.module.state_dict().items()}
    start = torch.get_rng_state()
    slopes(found, tangents(found.module), oracle=oracle)  # type: ignore[arg-type]
    after = torch.get_rng_state()
    for name, tensor in found.module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    torch.set_rng_state(start)
    found.loss(found.module)
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("make", [mlp, conv])
def test_differences_are_near(make: type) -> None:
    """2.6: within 1e-3; both sides on the same draw of dropout and the same statistics."""
    found = objective(make().double())
    x, y = torch.randn(32, 12).double(), torch.randint(0, 4, (32,))
    found = Objective(found.module, lambda model: nn.functional.cross_entropy(model(x), y), 32)
    given, start = tangents(found.module), torch.get_rng_state()
    exact = slopes(found, given)[1]
    torch.set_rng_state(start)
    near = slopes(found, given, oracle="differences")[1]
    np.testing.assert_allclose(near, exact, rtol=1e-3, atol=1e-3)
    torch.set_rng_state(start)
    coarse = slopes(found, given, oracle="differences", step=0.5)[1]
    assert np.abs(coarse - exact).max() > 5 * np.abs(near - exact).max()


def test_differences_take_what_cannot_be_differentiated() -> None:
    """A scripted module whose outputs are rounded: its derivative is zero everywhere, its differences are not."""

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-2.0, 2.0, 9))

        def forward(self, x: Tensor) -> Tensor:
            return torch.round(self.weight * x * 100.0) / 100.0

    module = torch.jit.script(Rounded())
    x = torch.ones(9) * 3.0
    found = Objective(module, lambda model: model(x).sum(), 1)
    given = [{"weight": np.ones(9, np.float32)}]
    assert slopes(found, given, oracle="differences", step=0.1)[1][0] == pytest.approx(27.0, rel=0.01)
    flat = Objective(Rounded(), lambda model: model(x).sum(), 1)
    assert slopes(flat, given)[1][0] == 0.0


def test_a_loss_that_fails_leaves_the_parameters_where_they_were() -> None:
    found, calls = objective(mlp()), iter(range(9))
    before = {name: tensor.clone() for name, tensor in found.module.state_dict().items()}

    def loss(model: nn.Module) -> Tensor:
        if next(calls) == 2:
            raise MemoryError
        return found.loss(model)

    with pytest.raises(MemoryError):
        slopes(Objective(found.module, loss, 32), tangents(found.module), oracle="differences")
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.module.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_differences_of_few_bits_are_refused_and_slopes_are_not(dtype: torch.dtype) -> None:
    """A step of a thousandth of a weight is lost in bfloat16: every slope was 0."""
    module, x = nn.Linear(3, 2).to(dtype), torch.ones(4, 3, dtype=dtype)
    found = Objective(module, lambda model: model(x).square().sum(), 4)
    given = [{"weight": np.ones((2, 3), np.float32)}]
    with pytest.raises(ConfigError, match="mostly rounding"):
        slopes(found, given, oracle="differences")
    assert slopes(found, given)[1][0] == pytest.approx(expected(found, given)[0], rel=0.05)


def test_a_slope_that_is_no_number_is_none() -> None:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))

        def forward(self) -> Tensor:
            return self.a.sqrt().sum() + self.b.square().sum()

    given = [{"a": np.float32([1, 0])}, {"b": np.float32([1, 0])}, {"b": np.float32([1, -1])}]
    value, products = slopes(Objective(Called(), lambda model: model(), 1), given)
    assert value == 2.0
    np.testing.assert_array_equal(products, [np.nan, 2.0, 0.0])


def test_what_is_refused() -> None:
    found = objective(mlp())
    for wrong in ({"0.weight": np.ones((3, 3), np.float32)}, {"none": np.ones(3, np.float32)}):
        with pytest.raises(LayoutError, match="which"):
            slopes(found, [wrong])
    with pytest.raises(ConfigError, match="oracle"):
        slopes(found, [], oracle="backward")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at_once"):
        slopes(found, [], at_once=0)
    trained(found.module, ["0.weight", "4.weight"])
    next(found.module.parameters()).requires_grad_(False)
    for name in ("0.weight", "1.running_mean"):
        with pytest.raises(LayoutError, match="directions would move them at random"):
            trained(found.module, [name])
