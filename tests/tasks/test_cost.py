"""Multiplications per weight, and the densities that follow from them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, policy_config, policy_from_config
from fedcomp.tasks.arrays import to_arrays
from fedcomp.tasks.cost import multiplies_per_weight, scalecom_policy
from fedcomp.tasks.models import CharLstm, Cnn


def test_positions_of_convolutions_and_matrices() -> None:
    model = Cnn(28, (16, 32), 64, 10)
    model.train()
    found = multiplies_per_weight(model, torch.zeros(3, 784))
    assert found == {"conv1.weight": 784.0, "conv2.weight": 196.0, "hidden.weight": 1.0, "output.weight": 1.0}
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())


def test_sequences_use_their_weights_at_every_step() -> None:
    found = multiplies_per_weight(CharLstm(20, 8, 16), torch.zeros(2, 7, dtype=torch.int64))
    assert set(found.values()) == {7.0}
    assert "lstm.weight_hh_l0" in found


def test_a_shared_module_counts_every_use() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    assert multiplies_per_weight(Twice(), torch.zeros(5, 4)) == {"layer.weight": 2.0}


def test_densities_by_cost() -> None:
    policy = scalecom_policy({"a": 784.0, "b": 196.0, "c": 150.0, "d": 49.0, "e": 1.0})
    shape, dtype = (64, 64), "float32"
    assert [policy(name, shape, dtype) for name in "abcde"] == [1.0, 1 / 25, 1 / 50, 1 / 400, 1.0]
    assert policy("d", (10, 10), dtype) == 1.0  # small tensors stay whole
    assert policy("bn.running_mean", (4096,), dtype) == "exact"
    assert policy("another", shape, dtype) is None
    kept = scalecom_policy({"a": 784.0, "b": 1.0}, uncompressed=())
    assert kept("a", shape, dtype) == 1 / 25
    for wrong in ({}, {"a": 1.0}):
        with pytest.raises(ConfigError):
            scalecom_policy(wrong, uncompressed=["z"])


def test_the_policy_travels_as_its_decisions() -> None:
    model = Cnn(28, (16, 32), 64, 10)
    policy = scalecom_policy(multiplies_per_weight(model, torch.zeros(1, 784)))
    arrays = to_arrays(model)
    layout = Layout.of(arrays, policy)
    again = Layout.of(arrays, policy_from_config(policy_config(policy, layout)))
    assert again == layout
    assert {t.name: t.density for t in layout.compressed} == {"conv2.weight": 1 / 25, "hidden.weight": 1 / 400}
