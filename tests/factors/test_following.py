"""What is sent under ``first_layer="gradient"`` holds no row of what the model was given, wherever that enters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcomp.codecs import Factors
from fedcomp.factors.capture import capture
from fedcomp.factors.collect import collecting
from fedcomp.factors.following import Following
from fedcomp.layout import Layout, SmallDense, Update
from fedcomp.rng import Key

KEY = Key(5, "uplink")
WIDTH, ROWS, TOKENS = 8, 2, 20


class Net(nn.Module):
    """Layers by name, and a function of them and of the examples."""

    def __init__(self, run: Callable[[Net, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def written(m: Net, x: Tensor) -> Tensor:
    """A buffer that a layer's output filled, into a part of which the examples are written."""
    h = torch.relu(m.a(x))
    both = torch.zeros(len(x), 2 * WIDTH)
    both[:, :WIDTH] = h
    both[:, WIDTH:].copy_(x)
    return m.out(both)


def through_numpy(m: Net, x: Tensor) -> Tensor:
    return m.out(torch.relu(m.a(x)) + torch.from_numpy(x.detach().numpy().copy()))


class Halves(torch.autograd.Function):
    """A function with a backward of its own, which hands its second argument on."""

    @staticmethod
    def forward(ctx, h, x):
        return h * 1e-3 + x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e-3, gradient


def unrolled(m: Net, x: Tensor) -> Tensor:
    h = torch.zeros(len(x), WIDTH)
    for t in range(3):
        h = m.cell(x + 0.0 * t, h)
    return m.out(torch.cat([m.mid(h), x], 1))


def embedded(m: Net, ids: Tensor) -> Tensor:
    return m.out(torch.relu(m.a(m.norm(m.embed(ids))))).mean(1)


def tied(m: Net, ids: Tensor) -> Tensor:
    e = m.embed(ids)
    return m.read(e + 1e-3 * torch.tanh(m.a(m.norm(e)))).mean(1)


def make_tied() -> Net:
    net = Net(tied, embed=nn.Embedding(TOKENS, WIDTH), norm=nn.LayerNorm(WIDTH), a=linear())
    net.read = nn.Linear(WIDTH, TOKENS, bias=False)
    net.read.weight = net.embed.weight
    return net


def attention(m: Net, ids: Tensor) -> Tensor:
    e = m.norm(m.embed(ids))
    seen = nn.functional.scaled_dot_product_attention(m.q(e), m.k(e), e)
    return m.out(torch.relu(m.a(seen))).mean(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "mlp": (
        lambda: Net(lambda m, x: m.out(torch.relu(m.b(torch.relu(m.a(x))))), a=linear(), b=linear(), out=linear()),
        {"b", "out"},
    ),
    "skip": (
        lambda: Net(lambda m, x: m.out(torch.relu(m.b(x + 1e-4 * m.a(x)))), a=linear(), b=linear(), out=linear()),
        {"out"},
    ),
    "concatenation": (
        lambda: Net(lambda m, x: m.out(torch.cat([torch.relu(m.a(x)), x], 1)), a=linear(), out=linear(2 * WIDTH)),
        set(),
    ),
    "normalised": (
        lambda: Net(lambda m, x: m.out(torch.relu(m.a(m.n(x)))), n=nn.LayerNorm(WIDTH), a=linear(), out=linear()),
        {"out"},
    ),
    "scaled by a weight": (
        lambda: Net(lambda m, x: m.out(x * m.a.weight[0]), a=linear(), out=linear()),
        set(),
    ),
    "selected": (
        lambda: Net(lambda m, x: m.out(torch.where(x > 9.0, m.a(x), x)), a=linear(), out=linear()),
        set(),
    ),
    "written": (lambda: Net(written, a=linear(), out=linear(2 * WIDTH)), set()),
    "numpy": (lambda: Net(through_numpy, a=linear(), out=linear()), set()),
    "function": (
        lambda: Net(lambda m, x: m.out(Halves.apply(torch.relu(m.a(x)), x)), a=linear(), out=linear()),
        set(),
    ),
    "embedding": (
        lambda: Net(embedded, embed=nn.Embedding(TOKENS, WIDTH), norm=nn.LayerNorm(WIDTH), a=linear(), out=linear()),
        {"out"},
    ),
    "tied": (make_tied, set()),
    "attention": (
        lambda: Net(
            attention, embed=nn.Embedding(TOKENS, WIDTH), norm=nn.LayerNorm(WIDTH), q=linear(), k=linear(), a=linear(),
            out=linear(),
        ),
        {"out"},
    ),
    "gru": (
        lambda: Net(unrolled, cell=nn.GRUCell(WIDTH, WIDTH), mid=linear(), out=linear(2 * WIDTH)),
        set(),
    ),
    "fused gru": (
        lambda: Net(
            lambda m, x: m.out(torch.relu(m.mid(m.gru(x[None])[0].flatten(0, 1)))),
            gru=nn.GRU(WIDTH, WIDTH, batch_first=True), mid=linear(), out=linear(),
        ),
        {"out"},
    ),
    "conv": (
        lambda: Net(
            lambda m, x: m.out(torch.cat([m.two(torch.relu(m.one(x.reshape(-1, 1, 2, 4)))).flatten(1), x], 1)),
            one=nn.Conv2d(1, 64, (2, 4)), two=nn.Conv2d(64, WIDTH, 1), out=linear(2 * WIDTH),
        ),
        {"two"},
    ),
    "depthwise": (
        lambda: Net(
            lambda m, x: m.out(m.one(x.reshape(-1, WIDTH, 1, 1)).flatten(1)),
            one=nn.Conv2d(WIDTH, WIDTH, 1, groups=WIDTH), out=linear(),
        ),
        set(),
    ),
}  # fmt: skip
"""By name: a model, and the layers of which factors may travel, as nothing of the examples is left in their inputs."""

SCALED = ("scaled by a weight", "depthwise", "fused gru")
"""Whose layers see the examples with each value scaled by itself, or not at all."""

WORDS = ("embedding", "tied", "attention")


def examples(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if name in WORDS:
        return torch.randint(0, TOKENS, (1, 3), generator=generator)
    return torch.randn(ROWS, WIDTH, generator=generator)


def rows_of(model: nn.Module, given: Tensor) -> np.ndarray:
    """What must not be found: the examples, and of words what the model holds for them, plain and normalised."""
    found = [given] if given.is_floating_point() else [model.embed(given)]
    if norm := getattr(model, "norm", getattr(model, "n", None)):
        found.append(norm(found[0]))
    return np.concatenate([each.detach().reshape(-1, WIDTH).numpy() for each in found])


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-30)


def shown(arrays: list[np.ndarray], rows: np.ndarray) -> int:
    """How many of ``rows`` stand in ``arrays``, or nearly, as multiples, anywhere in a row of theirs."""
    found = np.zeros(len(rows), bool)
    for array in arrays:
        if array.shape[-1] >= WIDTH:
            windows = np.lib.stride_tricks.sliding_window_view(array, WIDTH, axis=-1).reshape(-1, WIDTH)
            found |= (np.abs(unit(windows) @ unit(rows).T) > 1.0 - 1e-5).any(axis=0)
    return int(found.sum())


def sent(codec: Factors, model: nn.Module, given: Tensor) -> tuple[list[np.ndarray], set[str], set[str]]:
    """Train for one step; return what travels in parts, the layers of which it does, and those of tokens in order."""
    before = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    with collecting(codec.takes_outer) as collected, capture(model):
        loss = nn.functional.cross_entropy(model(given), torch.arange(len(given)) % WIDTH)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad)
    layout = Layout.of(before, SmallDense(min_size=0, share=0.0))
    vector = np.zeros(layout.size, np.float32)
    for t in layout.tensors:
        vector[t.slice] = (dict(model.named_parameters())[t.name].detach().numpy() - before[t.name]).reshape(-1)
    outer = {name: each for name, each in collected.outer.items() if name in layout.by_name}
    frame, _ = codec.encode(Update(vector, layout, outer), {}, KEY)
    tensors = codec.open(frame, layout).tensors
    parts = {
        t.name: tensor.values.decoded().reshape(tensor.shape)
        for t, tensor in zip(layout.tensors, tensors, strict=True)
        if len(tensor.shape) == 2
    }
    tokens = {name: ((part == 1).sum(1) == 1) & ((part == 0).sum(1) >= TOKENS - 1) for name, part in parts.items()}
    one_hot = {name for name, rows in tokens.items() if rows.all()}
    return list(parts.values()), {name.removesuffix(".weight") for name in parts}, one_hot


def made(name: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name][0]()


@pytest.mark.parametrize("name", MODELS)
def test_no_row_of_the_examples_is_in_the_payload(name: str) -> None:
    options = {"mode": "dad", "per_layer": "factors", "i_know_inputs_are_visible": True}
    model, given = made(name), examples(name)
    rows = rows_of(model, given)
    arrays, layers, one_hot = sent(Factors(**options, first_layer="gradient"), model, given)
    assert not one_hot
    assert shown(arrays, rows) == 0
    assert layers == MODELS[name][1]
    # What is searched for is found where nothing is kept back.
    model = made(name)
    rows = rows_of(model, given)
    arrays, _, one_hot = sent(Factors(**options), model, given)
    assert one_hot or name in SCALED or shown(arrays, rows) > 0


def test_steps_may_put_other_tensors_in_the_place_of_weights() -> None:
    model = made("mlp")
    given = examples("mlp")
    seen: list[bool] = []
    with Following(model) as following:
        model.register_forward_pre_hook(following.refresh)
        model.b.register_forward_hook(lambda _, inputs, __: seen.append(following.holds_examples(inputs[0])))
        for _ in range(3):
            model(given).sum().backward()
            for p in model.parameters():
                p.data = p.data - 0.1 * p.grad
    assert seen == [False] * 3


def test_casts_of_weights_are_weights() -> None:
    model, given = made("mlp"), examples("mlp")
    seen: list[bool] = []
    with Following(model) as following, torch.autocast("cpu", torch.bfloat16):
        model.b.register_forward_hook(lambda _, inputs, __: seen.append(following.holds_examples(inputs[0])))
        model(given)
    assert seen == [False]
