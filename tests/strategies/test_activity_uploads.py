"""Clients that train without back-propagation, in the drop-in pair: what they send, to whom, and that it learns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from toy import fedavg, put_sent_frame, sent_frame

from fedcomp import wire
from fedcomp.clients.client import client
from fedcomp.clients.compressed import compression
from fedcomp.clients.half import ClientHalf
from fedcomp.codecs import Codec, Factors, TopK
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.forward.activity import activity_gradients
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed

ROWS, RATE, COUNT = 20, 0.3, 2
KNOWN = {"i_know_inputs_are_visible": True}
DAD = Factors(mode="dad", **KNOWN)
TRUE = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def without_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on this page back-propagates."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a client back-propagated")

    # Behind Tensor.backward and torch.autograd.grad.
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", refuse)
    with pytest.raises(AssertionError, match="back-propagated"):
        torch.ones(1, requires_grad=True).sum().backward()


class Local(nn.Module):
    """Two blocks with heads of their own. Heads are part of the model; nothing comes back from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(40, 64), nn.Linear(64, 64)])
        self.heads = nn.ModuleList([nn.Linear(64, 4), nn.Linear(64, 4)])

    def forward(self, x: Tensor) -> list[Tensor]:
        out = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = torch.tanh(block(x.detach()))
            out.append(head(x))
        return out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 4))


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def examples(*place: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    drawn = Key(9, "activity/examples", *place).generator()
    x = torch.from_numpy(drawn.normal(size=(rows, 40)).astype(np.float32))
    return x, (x @ TRUE).argmax(1)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One for each example: the sum over the heads."""
    found = model(x)
    heads = found if isinstance(found, list) else [found]
    return torch.stack([nn.functional.cross_entropy(z, y, reduction="none") for z in heads]).sum(0)


def record_of(model: nn.Module) -> ArrayRecord:
    return ArrayRecord({name: Array(value.numpy()) for name, value in model.state_dict().items()})


def load(kind: Callable[[], nn.Module], arrays: ArrayRecord) -> nn.Module:
    model = made(kind)
    model.load_state_dict({name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()})
    return model


def app(kind: Callable[[], nn.Module], *halves: ClientHalf, visible: bool = True, steps: int = 1) -> ClientApp:
    inner = ClientApp()

    @inner.train()
    def train(msg: Message, context: Context) -> Message:
        round_, partition = int(msg.content["config"]["server-round"]), int(context.node_config["partition-id"])
        name, arrays = next(iter(msg.content.array_records.items()))
        model = load(kind, arrays)
        for step in range(steps):
            batch = examples(round_, partition, step)
            key = Key(7, "signs", round_, partition, step)
            found = activity_gradients(model, lambda m, batch=batch: losses(m, *batch), key, count=COUNT).gradients()
            with torch.no_grad():
                for own, parameter in model.named_parameters():
                    parameter.sub_(torch.from_numpy(found[own]), alpha=RATE)
        metrics = MetricRecord({"num-examples": ROWS * steps})
        return Message(RecordDict({name: record_of(model), "metrics": metrics}), reply_to=msg)

    return client(inner, *halves, compression(i_know_inputs_are_visible=visible))


def run(
    kind: Callable[[], nn.Module], codec: Codec = DAD, rounds: int = 3, *halves: ClientHalf, **options
) -> tuple[Compressed, ArrayRecord]:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), codec, feedback=False)
    grid = MeteredGrid(InProcessGrid(app(kind, *halves, **options), 3, seed=4))
    return strategy, strategy.start(grid, record_of(made(kind)), num_rounds=rounds, timeout=9).arrays


def accuracy(model: nn.Module) -> float:
    x, y = examples(99, rows=1000)
    with torch.no_grad():
        found = model(x)
    return float(((found[-1] if isinstance(found, list) else found).argmax(1) == y).float().mean())


@pytest.mark.long
@pytest.mark.parametrize("kind", [mlp, Local])
@pytest.mark.parametrize("codec", [DAD, TopK(0.2)])
def test_it_learns_with_every_codec_also_from_local_losses(kind: Callable[[], nn.Module], codec: Codec) -> None:
    strategy, arrays = run(kind, codec, 40)
    assert accuracy(load(kind, arrays)) > 0.7 > 0.5 > accuracy(made(kind))
    report = strategy.reports[40]
    assert (report.compressed, report.used) == (3, 3)
    assert not report.remarks


def test_hidden_layers_travel_as_slopes_and_what_is_too_small_whole_and_both_are_in_the_report() -> None:
    strategy, _ = run(Local)
    frames = {name: set(found.values()) for name, found in strategy.reports[3].frames.items()}
    # Heads count: they are tensors of the model, here shorter than their inputs.
    slopes = {f"slopes of blocks.{i}.weight": {float(COUNT)} for i in (0, 1)}
    assert frames == slopes | {f"rows of blocks.{i}.weight": {float(ROWS)} for i in (0, 1)} | {"matrices whole": {2.0}}


def test_the_server_takes_the_clients_own_step() -> None:
    """One client, one round: what the model changed by is what the client changed, to rounding of the model."""
    strategy = Compressed(fedavg(fraction_evaluate=0.0), DAD, feedback=False)
    kept: list[np.ndarray] = []

    def keep(msg: Message, context: Context, call_next: Callable) -> Message:
        reply = call_next(msg, context)
        kept.extend(array.numpy().copy() for array in next(iter(reply.content.array_records.values())).values())
        return reply

    half = ClientHalf("keep", keep, inside=("compression",))
    grid = InProcessGrid(app(mlp, half), 1, seed=4)
    found = strategy.start(grid, record_of(made(mlp)), num_rounds=1, timeout=9).arrays
    assert "slopes of 0.weight" in strategy.reports[1].frames
    for ours, theirs in zip(found.values(), kept, strict=True):
        assert np.abs(ours.numpy() - theirs).max() <= 1e-6


def test_several_steps_are_one_sum_as_long_as_it_is_shorter() -> None:
    frames = [run(mlp, DAD, 1, steps=steps)[0].reports[1].frames for steps in (2, 4)]
    assert set(frames[0]["rows of 0.weight"].values()) == {2.0 * ROWS}
    assert set(frames[0]["slopes of 0.weight"].values()) == {float(COUNT)}
    assert [set(found["matrices whole"].values()) for found in frames] == [{1.0}, {2.0}]


def test_signs_that_are_a_clients_choice_are_refused() -> None:
    def choose(msg: Message, context: Context, call_next: Callable) -> Message:
        reply = call_next(msg, context)
        frame = sent_frame(reply.content)
        assert frame is not None
        if context.node_config["partition-id"] == 1:
            tensors = wire.decode(frame).tensors
            put_sent_frame(reply.content, wire.encode(tensors, tlvs=((wire.SEED, bytes(8)),)))
        return reply

    half = ClientHalf("choose", choose, outside=("compression",))
    report = run(mlp, DAD, 1, half)[0].reports[1]
    assert report.used == 2
    (why,) = report.refused.values()
    assert "signs is not that of this round and sender" in why
