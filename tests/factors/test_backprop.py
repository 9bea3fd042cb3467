"""The server's half of edAD against autograd, for every function that may stand between layers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from fedcomp.codecs import Factors
from fedcomp.factors.backprop import ACTIVATIONS, DERIVATIVES, OF_SUMS, explained, lefts, parse_chain
from fedcomp.factors.capture import capture, chain_of
from fedcomp.factors.collect import collecting
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.tasks.arrays import to_arrays

MODULES = {
    "identity": nn.Identity(),
    "relu": nn.ReLU(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "gelu": nn.GELU(),
    "gelu-tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
}
KNOWN = {"i_know_inputs_are_visible": True}


def chain(name: str, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    sizes = (12, 10, 9, 8, 3)
    layers: list[nn.Module] = []
    for into, out in pairwise(sizes):
        layers += [nn.Linear(into, out, bias=bias), MODULES[name]]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_1_what_is_worked_out_is_what_autograd_says(name: str, bias: bool) -> None:
    """Over messages' own path: captured inputs and the last layer's returns, frame, server; nothing else travels."""
    model = chain(name, bias=bias)
    x, y = torch.randn(7, 12), torch.randint(0, 3, (7,))
    before = {key: value.copy() for key, value in to_arrays(model).items()}
    layout = Layout.of(before)
    codec = Factors(mode="edad", chain=chain_of(model, x), per_layer="factors", **KNOWN).at_model(before)
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    expected = layout.flatten(
        {key: -0.1 * g.numpy() for (key, _), g in zip(model.named_parameters(), gradients, strict=True)}
    )
    with collecting(codec.takes_outer) as collected, capture(model):
        loss = nn.functional.cross_entropy(model(x), y)
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.data.add_(gradient, alpha=-0.1)
    change = layout.flatten(to_arrays(model)) - layout.flatten(before)
    outer = collected.explaining({t.name: change[t.slice] for t in layout.tensors}, before)
    frame, _ = codec.encode(Update(change, layout, outer), {}, Key(0))
    bundle = codec.open(frame, layout)
    shapes = {t.name: tensor.shape for t, tensor in zip(layout.tensors, bundle.tensors, strict=True)}
    assert shapes["0.weight"] == (7, 12), "inputs alone: what came back to this layer did not travel"
    found = codec.decode(bundle, layout)
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", OF_SUMS)
def test_slopes_are_those_of_finite_differences(name: str) -> None:
    z = np.linspace(-30, 30, 601)
    function = MODULES[name]
    steps = (function(torch.from_numpy(z + 1e-5)) - function(torch.from_numpy(z - 1e-5))).numpy() / 2e-5
    np.testing.assert_allclose(np.asarray(OF_SUMS[name](z), float), steps, atol=1e-6)


def test_sums_need_the_bias_and_functions_are_told_apart() -> None:
    layers = parse_chain(["0.weight:silu", "2.weight"])
    drawn = np.random.default_rng(3)
    weights = {"0.weight": drawn.normal(size=(4, 5)), "2.weight": drawn.normal(size=(2, 4))}
    inputs = [drawn.normal(size=(6, 5)).astype(np.float32), drawn.normal(size=(6, 4)).astype(np.float32)]
    last = drawn.normal(size=(6, 2)).astype(np.float32)
    without = lefts(layers, weights, inputs, last)[0]
    shifted = lefts(layers, {**weights, "0.bias": np.ones(4)}, inputs, last)[0]
    assert np.abs(without - shifted).max() > 1e-2
    x = torch.randn(40, 12)
    for name in ACTIVATIONS:
        assert {part.partition(":")[2] or "identity" for part in chain_of(chain(name), x)[:-1]} == {name}
    assert set(DERIVATIVES).isdisjoint(OF_SUMS)
    assert explained(layers, weights, {}) == "nothing was captured of 0.weight"
