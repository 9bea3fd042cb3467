"""What is captured while a model trains adds up to what changed (the spec's list B7: 1, 9, 11)."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn

from fedcomp.errors import ConfigError
from fedcomp.factors.capture import capture, chain_of
from fedcomp.factors.collect import Captured, collecting, current

RATE = 0.1


class GruCell(nn.Module):
    """A cell of linear maps: the candidate's gate multiplies what comes from the state, so these are apart."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.x2h, self.h2h = nn.Linear(inputs, 3 * hidden), nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, 3)
        self.hidden = hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(len(x), self.hidden)
        for t in range(x.shape[1]):
            (xr, xz, xn), (hr, hz, hn) = self.x2h(x[:, t]).chunk(3, 1), self.h2h(h).chunk(3, 1)
            r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
            h = (1 - z) * torch.tanh(xn + r * hn) + z * h
        return self.out(h)


class Attention(nn.Module):
    """Causal attention from linear maps, on embeddings whose weight the read-out shares."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.read = nn.Linear(8, 30, bias=False)
        self.read.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        seen = nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True)
        return self.read(self.norm(x + self.o(seen))).flatten(0, 1)


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, padding=1, dilation=1), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 2), nn.Flatten(),
        nn.Linear(4 * 9, 3),
    )  # fmt: skip


def everything(*sizes: int) -> bool:
    return True


def trained(model: nn.Module, batches: list, *, optimizer=None, told: bool = True) -> tuple:
    """Train by plain SGD, or by an optimizer of which the capture is ``told`` or not; return what was collected, what
    explains the change, the change, and the model before."""
    before = {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
    with collecting(everything) as collected, capture(model, optimizer if told else None):
        for x, y in batches:
            loss = nn.functional.cross_entropy(model(x), y)
            model.zero_grad()
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            else:
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            parameter.add_(parameter.grad, alpha=-RATE)
    changes = {name: value.detach().numpy() - before[name] for name, value in model.state_dict().items()}
    return collected, collected.explaining(changes, before), changes, before


def batch(model: str, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    if model == "attention":
        ids = torch.randint(0, 30, (n, 5))
        return ids, torch.randint(0, 30, (n * 5,))
    shape = {"mlp": (12,), "gru": (4, 7), "conv": (2, 8, 8)}[model]
    return torch.randn(n, *shape), torch.randint(0, 3, (n,))


def made(model: str) -> nn.Module:
    torch.manual_seed(7)
    mlp = [nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 9), nn.Sigmoid(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 3)]
    return {"mlp": lambda: nn.Sequential(*mlp), "gru": lambda: GruCell(7, 6), "conv": conv, "attention": Attention}[
        model
    ]()


@pytest.mark.parametrize("name", ["mlp", "gru", "conv", "attention"])
@pytest.mark.parametrize("steps", [1, 3])
def test_1_what_was_captured_is_what_changed(name: str, steps: int) -> None:
    model = made(name)
    collected, found, changes, _ = trained(model, [batch(name, 5 + s, s) for s in range(steps)])
    matrices = {n for n, p in model.named_parameters(remove_duplicate=False) if p.dim() > 1}
    assert set(found) == matrices
    assert not collected.notes
    for key, outer in found.items():
        change = changes[key].reshape(outer.left.shape[1], -1)
        assert np.linalg.norm(outer.matrix() - change) <= 2e-5 * np.linalg.norm(change)
        bias = key.removesuffix("weight") + "bias"
        if bias in changes:
            assert np.allclose(outer.left.sum(axis=0), changes[bias], atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "gru", "conv", "attention"])
def test_1_clients_with_unequal_batches_have_the_pooled_gradient(name: str) -> None:
    """Weighted by the number of examples; the authors' rule, a sum of mean losses, is far off, and so is their mean."""
    sizes = (7, 2)
    parts = [batch(name, n, n) for n in sizes]
    pooled = tuple(torch.cat([part[i] for part in parts]) for i in (0, 1))
    _, _, expected, _ = trained(made(name), [pooled])
    found = [trained(made(name), [part])[1] for part in parts]
    for key in found[0]:
        by_rule = {
            rule: sum(w * outers[key].matrix().astype(np.float64) for w, outers in zip(weights, found, strict=True))
            for rule, weights in {"n": [n / sum(sizes) for n in sizes], "sum": (1, 1), "mean": (0.5, 0.5)}.items()
        }
        change = expected[key].reshape(by_rule["n"].shape)
        off = {rule: np.linalg.norm(given - change) / np.linalg.norm(change) for rule, given in by_rule.items()}
        assert off["n"] <= 3e-5
        assert off["sum"] > 0.1
        assert off["mean"] > 0.02


def test_9_a_layer_used_twice_has_both_uses_and_equal_layers_stay_apart() -> None:
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.one, self.other, self.last = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.other(torch.relu(self.one(self.shared(torch.tanh(self.shared(x)))))))

    _, found, changes, _ = trained(Twice(), [(torch.randn(4, 6), torch.randint(0, 6, (4,)))])
    assert found["shared.weight"].count == 8
    assert found["one.weight"].count == 4
    for name in ("shared.weight", "one.weight", "other.weight"):
        assert np.allclose(found[name].matrix(), changes[name], atol=1e-6)
    assert not np.allclose(found["one.weight"].matrix(), found["other.weight"].matrix(), atol=1e-3)


def test_11_batch_normalisation_warns(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with caplog.at_level(logging.WARNING, "flwr.fedcomp"):
        collected, *_ = trained(model, [(torch.randn(8, 6), torch.randint(0, 3, (8,)))])
    assert "BatchNorm in training mode" in caplog.text
    assert "BatchNorm" in " ".join(collected.notes)
    caplog.clear()
    model[1].eval()  # frozen statistics
    collected, found, *_ = trained(model, [(torch.randn(8, 6), torch.randint(0, 3, (8,)))])
    assert not caplog.text
    assert not collected.notes
    assert len(found) == 2


def test_rates_that_change_within_a_training_need_the_optimizer() -> None:
    model, batches = made("mlp"), [batch("mlp", 6, s) for s in range(3)]

    class Falling(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["lr"] *= 0.3

    optimizer = Falling(model.parameters(), lr=RATE)
    _, found, changes, _ = trained(model, batches, optimizer=optimizer)
    assert len(found) == 4
    assert np.allclose(found["0.weight"].matrix(), changes["0.weight"], atol=1e-6)
    model = made("mlp")
    optimizer = Falling(model.parameters(), lr=RATE)
    collected, found, *_ = trained(model, batches, optimizer=optimizer, told=False)
    assert not found
    assert len(collected.notes) == 4


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("told", [True, False])
def test_what_is_no_plain_sgd_is_noticed_and_said(options: dict, told: bool) -> None:
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": RATE, **options})
    batches = [batch("mlp", 6, s) for s in range(3)]
    collected, found, *_ = trained(model, batches, optimizer=optimizer, told=told)
    assert not found
    assert collected.notes


def test_what_cannot_be_captured_is_named() -> None:
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.odd, self.idle = nn.GRU(4, 6, batch_first=True), Odd(6, 6), nn.Linear(6, 6)
            self.last = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.odd(self.gru(x)[0][:, -1]))

    collected, found, *_ = trained(Fused(), [(torch.randn(5, 3, 4), torch.randint(0, 3, (5,)))])
    assert set(found) == {"last.weight"}
    assert "gru" in collected.notes[0]
    assert "idle" in collected.notes[0]


def test_without_anybody_who_asked_nothing_is_captured() -> None:
    model = made("mlp")
    with capture(model):
        assert not model[0]._forward_hooks
    assert current() is None
    with collecting(lambda *_: False) as collected:
        assert current() is None
        with capture(model):
            assert not model[0]._forward_hooks
    assert current() is None
    assert not collected.outer


def test_hooks_are_gone_when_training_fails() -> None:
    model = made("mlp")
    with pytest.raises(RuntimeError, match="boom"), collecting(everything), capture(model):
        raise RuntimeError("boom")
    assert not model[0]._forward_hooks
    assert current() is None


def test_a_name_the_model_does_not_have_is_said() -> None:
    collected = Captured(everything)
    _, found, changes, before = trained(made("mlp"), [batch("mlp", 4, 0)])
    collected.outer = {"module.0.weight": found["0.weight"]}
    assert not collected.explaining(changes, before)
    assert "module.0.weight" in collected.notes[0]


def test_chains_are_recognised_wherever_functions_are_called() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.d(self.c(torch.sigmoid(self.b(torch.relu(self.a(x.flatten(1)))))))

    x = torch.randn(9, 5)
    assert chain_of(Functional(), x) == ("a.weight:relu", "b.weight:sigmoid", "c.weight", "d.weight")
    bent = nn.Sequential(nn.Linear(5, 6), nn.Softsign(), nn.Linear(6, 2))
    with pytest.raises(ConfigError, match=r"between 0\.weight and 2\.weight"):
        chain_of(bent, x)
    shared = nn.Linear(5, 5)
    for model in (nn.Sequential(nn.Linear(5, 2)), nn.Sequential(shared, nn.ReLU(), shared)):
        with pytest.raises(ConfigError, match="a chain has two or more"):
            chain_of(model, x)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_dtype_of_torch_does_not_matter(default: torch.dtype, dtype: torch.dtype) -> None:
    ids, targets = batch("attention", 5, 0)
    model = made("attention").to(dtype)
    torch.set_default_dtype(default)
    try:
        _, found, changes, _ = trained(model, [(ids, targets)])
    finally:
        torch.set_default_dtype(torch.float32)
    outer = found["embed.weight"]
    change = changes["embed.weight"].reshape(outer.left.shape[1], -1)
    assert np.linalg.norm(outer.matrix() - change) <= 2e-5 * np.linalg.norm(change)


def test_an_embedding_is_gathered_where_its_gradient_is() -> None:
    """As on a GPU, where new tensors do not lie by themselves."""
    ids, targets = batch("attention", 5, 0)
    model = made("attention")
    with collecting(everything) as collected:
        captured = capture(model)
        captured.__enter__()
        nn.functional.cross_entropy(model(ids), targets).backward()
        with torch.device("meta"):
            captured.__exit__(None, None, None)
    assert "embed.weight" in collected.outer
