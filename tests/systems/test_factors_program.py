"""Factors as a program: the rounds of the pair over messages bit for bit, layer by layer and down, and wrong parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from over_messages import product
from registry import Unsettled
from torch import nn
from toy import fedavg

from fedcomp import wire
from fedcomp.clients.client import client
from fedcomp.clients.compressed import compression
from fedcomp.codecs import ErrorFeedback, Factors, TopK
from fedcomp.codecs.factors import wanted_by
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.factors.capture import capture, chain_of
from fedcomp.factors.collect import collecting
from fedcomp.forward.activity import activity_gradients
from fedcomp.layout import NONE_DENSE, Layout, Update, Vector
from fedcomp.local import Local
from fedcomp.program import Answer, Ask, Me, Now, Single
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.systems import get_system
from fedcomp.systems.conditional import ConditionalRounds
from fedcomp.systems.factors import DOWN, FactorSharing, FetchPart, FramePart, joined, layers, split
from fedcomp.systems.pair import Pair

SIZES = (5, 12, 9)
KNOWN = {"i_know_inputs_are_visible": True}
WIDTHS = {"narrow": (40, 30, 24, 4), "wide": (40, 150, 120, 4)}
Step = Callable[[nn.Module, torch.Tensor, torch.Tensor, Key], None]


def network(shape: str = "narrow") -> nn.Module:
    torch.manual_seed(3)
    a, b, c, d = WIDTHS[shape]
    return nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, d))


def examples(number: int, node: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = Key(9, "factors/examples", number, node).generator()
    n = SIZES[node]
    x = drawn.normal(size=(n, 40)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(drawn.integers(0, 4, n))


def backprop(model: nn.Module, x: torch.Tensor, y: torch.Tensor, key: Key) -> None:
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.add_(gradient, alpha=-0.2)


def activities(model: nn.Module, x: torch.Tensor, y: torch.Tensor, key: Key) -> None:
    """A step by perturbed activities, whose left sides are slopes times signs that both ends draw."""

    def losses(module: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(module(x), y, reduction="none")

    found = activity_gradients(model, losses, key, count=2).gradients()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.sub_(torch.from_numpy(found[name]), alpha=0.2)


def trained(arrays: dict[str, np.ndarray], number: int, node: int, shape: str, step: Step) -> dict[str, np.ndarray]:
    model = network(shape)
    model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
    watched: AbstractContextManager[None] = capture(model) if step is backprop else nullcontext()
    with watched:
        step(model, *examples(number, node), Key(7, "signs", number, node))
    return {name: value.numpy() for name, value in model.state_dict().items()}


def app(shape: str, step: Step) -> ClientApp:
    inner = ClientApp()

    @inner.train()
    def train(msg: Message, context: Context) -> Message:
        (name, arrays), config = next(iter(msg.content.array_records.items())), msg.content["config"]
        node, number = int(context.node_config["partition-id"]), int(config["server-round"])
        found = trained({n: a.numpy() for n, a in arrays.items()}, number, node, shape, step)
        record = ArrayRecord({n: Array(array) for n, array in found.items()})
        metrics = MetricRecord({"num-examples": SIZES[node]})
        return Message(RecordDict({name: record, "metrics": metrics}), reply_to=msg)

    return client(inner, compression(i_know_inputs_are_visible=True))


def local(system: FactorSharing | Pair, shape: str = "narrow", step: Step = backprop, **options: Any) -> Local:
    arrays = {name: value.numpy() for name, value in network(shape).state_dict().items()}
    layout = Layout.of(arrays, NONE_DENSE)
    codec = system.codec

    def train(number: int, node: int, start: Vector) -> Update:
        # As the client's half does around an app.
        key = Key(0, "uplink", number, node)
        with collecting(wanted_by(codec), key.u64()) as collected:
            after = layout.flatten(trained(layout.unflatten(start), number, node, shape, step))
        changes = {t.name: (after - start)[t.slice] for t in layout.tensors}
        return Update(after, layout, collected.explaining(changes, layout.unflatten(start)))

    return Local(system, layout, layout.flatten(arrays), train, lambda node: SIZES[node], len(SIZES), **options)


def made(mode: str, **options: Any) -> Factors:
    if mode == "rank":
        return Factors(rank=3, **options)
    chain = chain_of(network(), examples(1, 1)[0]) if mode == "edad" else ()
    return Factors(mode=mode, chain=chain, per_layer="factors", **KNOWN, **options)


SYSTEMS = {
    "dad": FactorSharing(made("dad")),
    "edad": FactorSharing(made("edad")),
    "rank": FactorSharing(made("rank")),
    "rank with memory": FactorSharing(ErrorFeedback(made("rank"))),
    "dad, first layer's gradient, bf16": FactorSharing(made("dad", first_layer="gradient", values="bf16")),
    "edad in bf16": FactorSharing(made("edad", values="bf16")),
}


def faulty(number: int, node: int, exchange: int) -> str:
    return {(2, 0, 1): "silent", (3, 1, 1): "lost", (3, 2, 2): "lost", (4, 2, 1): "crash", (4, 0, 3): "silent"}.get(
        (number, node, exchange), ""
    )


def pair(system: FactorSharing, **options: Any) -> Compressed:
    """Return the strategy that does the same over messages."""
    return Compressed(fedavg(fraction_evaluate=0.0), system.codec, feedback=system.codec.remembers, **options)


def compare(system: FactorSharing, step: Step = backprop, shape: str = "narrow", rounds: int = 4) -> Local:
    """Compare models, frames and memories, with faults in every exchange."""
    here = local(system, shape, step, fault=faulty)
    expected = product(pair(system), app(shape, step), len(SIZES), here.layout, here.model, rounds, faulty)
    for number, seen in enumerate(expected, start=1):
        here.step(number)
        assert here.model.tobytes() == seen.model
        frames: dict[int, list[bytes]] = {}
        for answer in here.answers:
            frames.setdefault(answer.node, []).extend(answer.frames.values())
        assert frames == seen.frames
        assert bool(seen.memories) == system.codec.remembers
        for node, memory in seen.memories.items():
            held = system.residual(here.clients[node].memory, here.layout)
            assert held.tobytes() == memory
    return here


@pytest.mark.long
@pytest.mark.parametrize("name", SYSTEMS)
def test_rounds_are_those_over_messages(name: str) -> None:
    compare(SYSTEMS[name])


@pytest.mark.parametrize("aware", [False, True])
def test_conditional_rounds_back_propagate_as_the_pair_does(aware: bool) -> None:
    data = {node: Unsettled() for node in range(len(SIZES))} if aware else {}
    both = [local(kind(made("edad")), data=data) for kind in (Pair, ConditionalRounds)]
    for number in (1, 2):
        steps = [here.step(number) for here in both]
        assert all(step is not None and step.consumed == (0, 1, 2) for step in steps)
        assert both[0].model.tobytes() == both[1].model.tobytes()


@pytest.mark.long
@pytest.mark.parametrize("name", SYSTEMS)
def test_an_exchange_for_each_layer_comes_to_the_same(name: str) -> None:
    """Whoever misses an exchange misses the round, and a memory takes back what was in it."""

    def of_one(number: int, node: int, exchange: int) -> str:
        later = any(faulty(number, node, each) for each in (2, 3))
        return faulty(number, node, 1) or "lost" * later

    parted = local(replace(SYSTEMS[name], by_layer=True), fault=faulty)
    whole = local(SYSTEMS[name], fault=of_one)
    for number in range(1, 5):
        parted.step(number)
        whole.step(number)
        assert parted.model.tobytes() == whole.model.tobytes()
        for node in whole.clients:
            one, other = (each.system.residual(each.settled(node), each.layout) for each in (parted, whole))
            assert (one is None) == (other is None) == (name != "rank with memory")
            assert one is None or other is None or one.tobytes() == other.tobytes()


@pytest.mark.long
@pytest.mark.parametrize("by_layer", [False, True])
def test_slopes_of_perturbed_activities_travel_in_one_part(by_layer: bool) -> None:
    system = FactorSharing(Factors(mode="dad", **KNOWN), by_layer)
    here = local(system, "wide", activities) if by_layer else compare(system, activities, "wide")
    here.step(5)
    frame = here.answers[0].frames["values"]
    assert wire.decode(frame).tlv(wire.SEED)
    assert len(here.answers) == len(SIZES)


@pytest.mark.long
def test_what_goes_down_is_the_factors_of_those_in_the_sum() -> None:
    """The factors of the first step are those of today, bit for bit; models differ by what float32 rounds of a step,
    which a server that adds to a model of its own makes up for."""
    system = FactorSharing(made("dad"), down=True)
    strategy, here = pair(system, downlink=DOWN), local(system, "wide")
    seen = product(strategy, app("wide", backprop), len(SIZES), here.layout, here.model, 2)
    whole = local(replace(system, down=False), "wide")
    steps = []
    for number in (1, 2):
        before = here.model
        made_here = here.step(number)
        whole.step(number)
        assert made_here.frame is not None
        steps.append(made_here.frame)
        moved = before + DOWN.decode(made_here.frame, here.layout)
        assert moved.tobytes() == here.model.tobytes()
        for other in (np.frombuffer(seen[number - 1].model, np.float32), whole.model):
            assert np.linalg.norm(here.model - other) <= 1e-6 * np.linalg.norm(other)
        assert DOWN.figures(made_here.frame, here.layout, 1.0)["rows of 2.weight"] == sum(SIZES)
    (kept,) = strategy.down.broadcast._steps
    pairs = zip(*(DOWN.open(frame, here.layout).tensors for frame in (kept.frame, steps[0])), strict=True)
    for theirs, ours in pairs:
        assert theirs.shape == ours.shape
        # What is whole they take from two models, ours is the mean itself.
        allowed = 0.0 if len(ours.shape) == 2 else 1e-7
        np.testing.assert_allclose(theirs.values.decode(), ours.values.decode(), rtol=0.0, atol=allowed)
    # One that is lost is in no step.
    here.fault = lambda number, node, exchange: "lost" if node == 1 else ""
    last = here.step(3)
    assert last.frame is not None
    assert DOWN.figures(last.frame, here.layout, 1.0)["rows of 2.weight"] == SIZES[0] + SIZES[2]


@pytest.mark.long
def test_reduced_factors_go_down_with_a_memory_around_them() -> None:
    here = local(FactorSharing(ErrorFeedback(Factors(rank=2)), down=True), "wide")
    step = here.step(1)
    assert step.frame is not None
    assert DOWN.figures(step.frame, here.layout, 1.0)["rows of 2.weight"] == 2 * len(SIZES)


@pytest.mark.slow
def test_rows_of_all_clients_that_are_longer_than_the_model_stay_up() -> None:
    here = local(FactorSharing(made("dad"), down=True))
    step = here.step(1)
    assert step.frame is None
    assert step.change is not None


def test_single_updates_have_no_common_step() -> None:
    system, here = FactorSharing(made("rank"), down=True), local(SYSTEMS["rank"])
    now = Now(1, (0, 1), here.layout, lambda: here.model, rule=Single())
    rounds = system.round(now)
    next(rounds)
    vector = np.ones(here.layout.size, np.float32)
    answers = [
        Answer(n, 1.0, frames={"values": system.codec.encode(Update(vector, here.layout), {}, now.key("uplink", n))[0]})
        for n in (0, 1)
    ]
    with pytest.raises(StopIteration) as end:
        rounds.send(answers)
    assert sorted(end.value.value.single) == [0, 1]
    assert end.value.value.frame is None


WRONG = {
    "another part": lambda answer: answer._replace(say=FramePart(2, 3)),
    "a part of more": lambda answer: answer._replace(say=FramePart(answer.say.part, 7)),
    "one part after the first": lambda answer: answer._replace(say=FramePart(0, 1)),
    "no frame": lambda answer: answer._replace(frames={}),
    "not a frame": lambda answer: answer._replace(frames={"part": b"nothing"}),
    "too many tensors": lambda answer: answer._replace(
        frames={"part": wire.encode([*wire.decode(answer.frames["part"]).tensors] * 2)}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_part_costs_its_sender_alone(wrong: str) -> None:
    class Hostile(FactorSharing, id="hostile"):
        def client(self, memory: Any, ask: Ask, me: Me) -> Any:
            memory, answer = super().client(memory, ask, me)
            spoiled = me.node == 1 and isinstance(ask.say, FetchPart) and ask.say.part == 1
            return memory, WRONG[wrong](answer) if spoiled else answer

    here = local(Hostile(ErrorFeedback(made("rank")), by_layer=True))
    assert here.step(1).consumed == (0, 2)
    assert [line.partition(":")[0] for line in here.refused[1]] == ["1"]
    assert np.isfinite(here.model).all()
    # What it sent is in its memory again before it trains anew.
    assert here.clients[1].pending is not None
    assert not here.acknowledged(1)


def test_a_node_answers_for_its_last_frame_alone() -> None:
    system, here = FactorSharing(made("rank"), by_layer=True), local(SYSTEMS["rank"])
    count = len(layers(here.layout))
    assert layers(here.layout) == (2, 2, 2)
    update = Update(np.ones(here.layout.size, np.float32), here.layout)
    me = Me(0, 5, 0, here.layout, lambda: here.model, lambda whole, collect: update)
    memory, answer = system.client(system.start(here.layout), Ask(0), me)
    assert answer.say == FramePart(0, count)
    assert answer.sent == system.codec.encode(update, {}, me.key)[0]
    parts = [system.client(memory, Ask(0, "query", FetchPart(n)), me)[1].frames["part"] for n in range(1, count)]
    assert sum(len(wire.decode(part)) for part in (answer.frames["values"], *parts)) == len(here.layout.tensors)
    for other, ask in ((me, FetchPart(count)), (replace(me, number=6), FetchPart(1))):
        with pytest.raises(FedcompError, match="has no part"):
            system.client(memory, Ask(0, "query", ask), other)
    # The next frame's parts replace them, and what comes back does not hold them.
    flat = Update(np.zeros(here.layout.size, np.float32), here.layout)
    again, _ = system.client(memory, Ask(0), replace(me, number=6, learn=lambda whole, collect: flat))
    assert again["parts"][0] == 6
    assert system.rollback(memory, answer.sent or b"", here.layout) == {}


@pytest.mark.parametrize("mode", ["rank", "dad", "q8"])
def test_split_and_joined_frames_are_the_same_bytes(mode: str) -> None:
    codec = Factors(mode="dad", values="q8", **KNOWN) if mode == "q8" else made(mode)
    layout = local(SYSTEMS["rank"]).layout
    vector = Key(3, "parts").generator().standard_normal(layout.size).astype(np.float32)
    frame, _ = codec.encode(Update(vector, layout), codec.init(layout), Key(3, "parts/encode"))
    parts = split(frame, layers(layout))
    assert len(parts) == 3
    assert joined(parts, codec.limits(layout)) == joined(parts) == frame
    assert split(frame, (5,)) == split(frame, (2, 2)) == split(frame, (6,)) == [frame]
    with pytest.raises(wire.WireError):
        joined(parts, replace(codec.limits(layout), max_tensors=1))
    # The last layer's is the first, and one that says more than its tensors do is not divided.
    assert wire.decode(parts[0]).tensors[0].shape == wire.decode(frame).tensors[-2].shape
    more = wire.encode(wire.decode(frame).tensors, tlvs=[(3, b"more")])
    assert split(more, layers(layout)) == [more]


def test_what_goes_down_has_the_shares_of_the_mean() -> None:
    """Weights and the factors of what is late: the factors add up to the mean, or they would not go down."""
    system, here = FactorSharing(made("rank"), down=True), local(SYSTEMS["rank"], "wide")
    notes: list[str] = []
    now = Now(1, (0, 1), here.layout, lambda: here.model, note=notes.append, scales={1: 0.25})
    rounds = system.round(now)
    next(rounds)
    answers = []
    for node in (0, 1):
        vector = Key(3, "shares", node).generator().standard_normal(here.layout.size).astype(np.float32)
        frame, _ = system.codec.encode(Update(vector, here.layout), {}, now.key("uplink", node))
        answers.append(Answer(node, node + 1.0, frames={"values": frame}))
    with pytest.raises(StopIteration) as end:
        rounds.send(answers)
    step = end.value.value
    assert notes == []
    expected = sum(
        share * system.codec.decode(a.frames["values"], here.layout).astype(np.float64)
        for a, share in zip(answers, (1 / 3, 0.25 * 2 / 3), strict=True)
    )
    found = DOWN.decode(step.frame, here.layout)
    assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)


def test_options_come_back_and_other_codecs_are_refused() -> None:
    for system in (*SYSTEMS.values(), FactorSharing(made("rank"), by_layer=True, down=True)):
        assert get_system(system.to_config()) == system
        assert eval(repr(system)) == system
        assert system.makes_steps == system.down
    for codec in (TopK(0.1), ErrorFeedback(TopK(0.1))):
        with pytest.raises(ConfigError, match="expected Factors"):
            FactorSharing(codec)
