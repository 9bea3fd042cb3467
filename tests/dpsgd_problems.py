"""Small private trainings for the tests of DP-SGD and of its compressed forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedcomp.privacy.dpsgd import PrivateTraining, StepSettings, private_training
from fedcomp.privacy.entropy import Entropy, make_entropy
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.sampling import Sampling
from fedcomp.rng import Key

OPTIONS: dict[str, dict[str, Any]] = {
    "dp-sgd": {},
    "topagg": {"k": 7},
    "random-mask": {"keep": 0.5},
    "lsg": {"rank": 2, "keep": 0.5},
}
"""Every method with options that fit :func:`net`."""

STEP = {field.name for field in fields(StepSettings)}


def net(features: int = 6, hidden: int = 5, classes: int = 3) -> nn.Module:
    """Return an MLP whose parameters are a function of their place alone."""
    module = nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, classes))
    with torch.no_grad():
        for layer, p in enumerate(module.parameters()):
            p.copy_(torch.from_numpy(Key(3, "net", layer=layer).uniform(p.numel()) - 0.5).reshape(p.shape))
    return module


def records(count: int, features: int = 6, classes: int = 3, seed: int = 0) -> TensorDataset:
    """Return ``count`` labelled records."""
    x = Key(seed, "x").generator().standard_normal((count, features)).astype(np.float32)
    return TensorDataset(torch.from_numpy(x), torch.from_numpy((x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)))


def ledger(rate: float, population: int = 1000, budget: float | None = None) -> PrivacyLedger:
    """Return a ledger of records under Poisson sampling."""
    sampling = Sampling("poisson", rate=rate) if rate < 1.0 else Sampling("everyone")
    return PrivacyLedger(
        delta=1e-5, population=population, adjacency="add_remove", sampling=sampling, budget=budget, unit="record"
    )


def loss(module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Mean cross entropy."""
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def seeded(purpose: str = "noise", seed: int = 0) -> Entropy:
    """Return repeatable noise."""
    return make_entropy(Key(seed, purpose), insecure_deterministic=True)


def training(
    module: nn.Module,
    data: TensorDataset,
    method: str = "dp-sgd",
    *,
    rate: float = 1.0,
    steps: int = 1,
    noise_multiplier: float = 0.0,
    lr: float = 0.1,
    budget: float | None = None,
    **options: Any,
) -> PrivateTraining:
    """Return a private training with plain SGD, and everything repeatable."""
    book = options.pop("ledger", None) or ledger(rate, max(1000, len(data)), budget)
    given = {**OPTIONS.get(method, {}), **options}
    own = {name: given.pop(name) for name in STEP if name in given}
    settings = StepSettings(**{"noise_multiplier": noise_multiplier, "rate": rate, "entropy": seeded(), **own})
    sgd = torch.optim.SGD(module.parameters(), lr=lr)
    return private_training(module, sgd, data, book, settings, steps=steps, method=method, **given)


def per_sample(module: nn.Module, data: TensorDataset) -> Tensor:
    """Return the gradient of every record by a loop over them, (records, d) in float32."""
    rows = []
    for record in data:
        module.zero_grad()
        loss(module, [part[None] for part in record]).backward()
        rows.append(torch.cat([p.grad.reshape(-1) for p in module.parameters()]))  # type: ignore[union-attr]
    module.zero_grad(set_to_none=True)
    return torch.stack(rows)


def gradient(module: nn.Module) -> np.ndarray:
    """Return the gradient that the optimiser left, (d,)."""
    return torch.cat([p.grad.reshape(-1) for p in module.parameters()]).double().numpy()  # type: ignore[union-attr]


def weights(module: nn.Module) -> np.ndarray:
    """Return the model, (d,)."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).double().numpy()
