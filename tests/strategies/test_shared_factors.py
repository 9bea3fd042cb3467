"""Factors over messages: rounds as pooled training, consent, and what a server is told (the spec's B7: 1, 2, 10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, FedAvg, Strategy
from torch import nn
from toy import fedavg, stack

from fedcomp import wire
from fedcomp.clients.client import client
from fedcomp.clients.compressed import compression
from fedcomp.clients.half import ClientHalf
from fedcomp.codecs import Codec, Factors, TopK
from fedcomp.errors import ConfigError
from fedcomp.factors.capture import capture, chain_of
from fedcomp.factors.collect import current
from fedcomp.flower import asks
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME, NODE_RECORD
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key
from fedcomp.strategies.by_layer import LayerByLayer
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.timing.pipeline import layered

SIZES = (5, 12, 9)
RATE = 0.2
KNOWN = {"i_know_inputs_are_visible": True}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 4))


def examples(partition: int, round_: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = Key(9, "factors/examples", round_, partition).generator()
    n = SIZES[partition]
    x = drawn.normal(size=(n, 40)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(drawn.integers(0, 4, n))


def record_of(model: nn.Module) -> ArrayRecord:
    return ArrayRecord({name: Array(value.numpy()) for name, value in model.state_dict().items()})


def descend(model: nn.Module, x: torch.Tensor, y: torch.Tensor, momentum: dict | None = None) -> None:
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    with torch.no_grad():
        for number, (parameter, gradient) in enumerate(zip(model.parameters(), gradients, strict=True)):
            if momentum is not None:
                momentum[number] = gradient = 0.9 * momentum.get(number, 0.0) + gradient
            parameter.add_(gradient, alpha=-RATE)


def app(*, visible: bool = True, steps: int = 1, momentum: bool = False, captured: bool = True) -> ClientApp:
    inner = ClientApp()

    @inner.train()
    def train(msg: Message, context: Context) -> Message:
        (name, arrays), config = next(iter(msg.content.array_records.items())), msg.content["config"]
        partition = int(context.node_config["partition-id"])
        model = network()
        model.load_state_dict({n: torch.from_numpy(a.numpy().copy()) for n, a in arrays.items()})
        x, y = examples(partition, int(config["server-round"]))
        with capture(model) if captured else torch.enable_grad():
            velocity: dict | None = {} if momentum else None
            for _ in range(steps):
                descend(model, x, y, velocity)
        metrics = MetricRecord({"num-examples": len(y)})
        return Message(RecordDict({name: record_of(model), "metrics": metrics}), reply_to=msg)

    return client(inner, compression(i_know_inputs_are_visible=visible))


def pooled(rounds: int, clients: int = 3) -> np.ndarray:
    model = network()
    for round_ in range(1, rounds + 1):
        parts = [examples(partition, round_) for partition in range(clients)]
        descend(model, *(torch.cat([part[i] for part in parts]) for i in (0, 1)))
    return stack(record_of(model))


def run(strategy: Strategy, *, rounds: int = 3, client_app: ClientApp | None = None, **options) -> np.ndarray:
    grid = InProcessGrid(client_app or app(), 3, seed=4, **options)
    metered = MeteredGrid(grid)
    result = strategy.start(metered, record_of(network()), num_rounds=rounds, timeout=9)
    return stack(result.arrays)


def codec(mode: str, **options) -> Factors:
    if mode == "rank":
        return Factors(mode="rank", rank=40, theta=0.0, **options)
    chain = chain_of(network(), examples(1, 1)[0]) if mode == "edad" else ()
    return Factors(mode=mode, chain=chain, per_layer="factors", **KNOWN, **options)


def pair(inner: Strategy | None = None, mode: str = "dad", **options) -> Compressed:
    return Compressed(inner or fedavg(fraction_evaluate=0.0), codec(mode), feedback=False, **options)


@pytest.mark.parametrize("mode", ["dad", "edad", "rank"])
def test_2_rounds_are_steps_of_sgd_on_all_batches_together(mode: str) -> None:
    """Plain SGD, in which a wrong scale shows; batches of unequal sizes."""
    expected = pooled(3)
    found = run(strategy := pair(mode=mode))
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
    report = strategy.reports[3]
    assert report.compressed == 3
    assert not report.remarks
    assert not report.unsupported
    assert report.frames["matrices whole"] == dict.fromkeys(report.frames["matrices whole"], 0.0)


def test_2_weights_that_are_not_the_numbers_of_examples_are_another_training() -> None:
    expected = pooled(3)
    even = pair(fedavg(fraction_evaluate=0.0, weighted_by_key="one"))

    def alike(msg: Message, context: Context, call_next: Callable) -> Message:
        reply = call_next(msg, context)
        reply.content["metrics"]["one"] = 1
        return reply

    inner = app()
    wrapped = client(ClientApp(), ClientHalf("alike", alike, inside=("compression",)), compression(**KNOWN))
    wrapped.train()(lambda msg, context: inner(msg, context))
    assert np.linalg.norm(run(even, client_app=wrapped) - expected) > 1e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("mode", ["dad", "edad"])
def test_a_client_that_has_not_agreed_shows_nothing(mode: str) -> None:
    found = run(strategy := pair(mode=mode), client_app=app(visible=False))
    expected = pooled(3)
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
    report = strategy.reports[1]
    assert report.plain == 3
    assert all("has not agreed" in why for why in report.unsupported.values())
    # Reduced factors are a function of the gradient, for which nobody has to be asked.
    run(reduced := pair(mode="rank"), client_app=app(visible=False))
    assert reduced.reports[1].compressed == 3


def test_several_steps_of_plain_sgd_are_one_sum_and_edad_falls_back_to_factors() -> None:
    expected = run(fedavg(fraction_evaluate=0.0), client_app=app(steps=2))
    for mode in ("dad", "edad"):
        found = run(strategy := pair(mode=mode), client_app=app(steps=2))
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
        ranks = strategy.reports[1].frames["rows of 2.weight"]
        assert min(ranks.values()) == 2.0 * min(SIZES)


@pytest.mark.parametrize("options", [{"momentum": True, "steps": 2}, {"captured": False}])
def test_what_cannot_be_sent_as_factors_is_sent_whole_and_said(options: dict) -> None:
    expected = run(fedavg(fraction_evaluate=0.0), client_app=app(**options))
    found = run(strategy := pair(), client_app=app(**options))
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
    report = strategy.reports[1]
    assert set(report.frames) == {"matrices whole"}
    if options.get("momentum"):
        assert len(report.remarks) == 3
        assert all("momentum" in said for said in report.remarks.values())
        assert report.figures()["report.remarks"] == 3


@pytest.mark.parametrize("private", [False, True])
def test_in_a_private_round_a_reply_says_nothing_of_it(private: bool) -> None:
    """What could not be captured follows from the training, and no noise is on it."""
    inner, said = app(momentum=True, steps=2), []

    def look(msg: Message, context: Context) -> Message:
        reply = inner(msg, context)
        said.append(str(reply.content[NODE_RECORD].get("remark", "")))
        return reply

    rounds: Strategy = fedavg(fraction_evaluate=0.0)
    if private:
        rounds = DpFedAvg(rounds, clip=1.0, noise_multiplier=1.0, delta=1e-3, population=3)
    grid = MeteredGrid(InProcessGrid(look, 3, seed=4))
    pair(rounds, mode="rank").start(grid, record_of(network()), num_rounds=1, timeout=9)
    assert ["momentum" in remark for remark in said] == [not private] * 3
    assert not (private and any(said))


@pytest.mark.parametrize("codec", [TopK(0.1), Factors(mode="dad", **KNOWN)])
def test_other_codecs_have_nothing_captured(codec: Codec) -> None:
    """Inputs of every layer are much to hold for nothing."""
    seen = []

    def look(msg: Message, context: Context, call_next: Callable) -> Message:
        seen.append(current() is not None)
        return call_next(msg, context)

    inner = app(captured=False)
    watched = client(ClientApp(), ClientHalf("look", look, inside=("compression",)), compression(**KNOWN))
    watched.train()(lambda msg, context: inner(msg, context))
    run(Compressed(fedavg(fraction_evaluate=0.0), codec), rounds=1, client_app=watched)
    assert seen == [isinstance(codec, Factors)] * 3


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers so wide that the rows of all clients together are shorter than they."""

    def network() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(40, 150), nn.Tanh(), nn.Linear(150, 120), nn.ReLU(), nn.Linear(120, 4))

    monkeypatch.setitem(globals(), "network", network)


def last_step(strategy: Compressed) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that went down last, by name."""
    known, layout = strategy.down.broadcast, strategy.layout
    assert {peer.version for peer in strategy.roster.peers.values()} == {known.version}
    bundle = codec("dad").open(known._steps[-1].frame, layout)
    return {t.name: tensor.shape for t, tensor in zip(layout.tensors, bundle.tensors, strict=True)}


@pytest.mark.usefixtures("wide")
def test_factors_of_those_who_are_in_the_sum_go_down_and_of_nobody_else() -> None:
    """A reply whose metrics are not the others' is refused when it was added already: the sum is begun anew."""
    inner = app()

    def odd(message: Message, context: Context) -> Message:
        number = int(message.content["config"]["server-round"])
        reply = inner(message, context)
        if (number, context.node_config["partition-id"]) == (3, 1):
            reply.content["metrics"]["more"] = 1
        return reply

    strategy, whole = pair(downlink=Factors(mode="dad", **KNOWN)), pair()
    found, expected = (run(each, rounds=4, client_app=odd) for each in (strategy, whole))  # type: ignore[arg-type]
    assert len(strategy.reports[3].refused) == 1
    assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)
    # What the fourth round was sent: two clients' rows.
    assert last_step(strategy)["2.weight"] == (SIZES[0] + SIZES[2], 270)


@pytest.mark.usefixtures("wide")
def test_factors_go_down_only_as_long_as_they_are_the_step(caplog: pytest.LogCaptureFixture) -> None:
    options = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}
    caplog.set_level("INFO")
    strategy = pair(FedAdam(**options), downlink=Factors(mode="dad", **KNOWN))
    found = run(strategy, rounds=4)
    expected = run(pair(FedAdam(**options)), rounds=4)
    assert np.linalg.norm(found - expected) <= 1e-3 * np.linalg.norm(expected)
    # A step as long as the model is not kept: whoever lacks it gets the model.
    assert strategy.down.broadcast._steps == []
    assert "not made of factors: 2.weight" in caplog.text


@pytest.mark.parametrize("mode", ["dad", "edad"])
def test_a_bias_that_is_frozen_stays_where_it_is(mode: str) -> None:
    """What came back to a layer says how its bias would change, which is not how it did."""
    inner = ClientApp()

    @inner.train()
    def train(msg: Message, context: Context) -> Message:
        (name, arrays), config = next(iter(msg.content.array_records.items())), msg.content["config"]
        model = network()
        model.load_state_dict({n: torch.from_numpy(a.numpy().copy()) for n, a in arrays.items()})
        free = [p for n, p in model.named_parameters() if n != "2.bias"]
        x, y = examples(int(context.node_config["partition-id"]), int(config["server-round"]))
        with capture(model):
            gradients = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), free)
            with torch.no_grad():
                for parameter, gradient in zip(free, gradients, strict=True):
                    parameter.add_(gradient, alpha=-RATE)
        return Message(
            RecordDict({name: record_of(model), "metrics": MetricRecord({"num-examples": len(y)})}), reply_to=msg
        )

    frozen = client(inner, compression(i_know_inputs_are_visible=True))
    strategy = pair(mode=mode)
    found = run(strategy, client_app=frozen)
    start = 30 * 40 + 30 + 24 * 30
    np.testing.assert_array_equal(found[start : start + 24], network()[2].bias.detach().numpy())
    assert strategy.reports[3].used == 3


def test_the_ranks_of_rounds_are_in_the_report() -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), Factors(rank=3), feedback=False)
    run(strategy, rounds=2)
    ranks = strategy.reports[2].frames["rank of 0.weight"]
    assert len(ranks) == 3
    assert set(ranks.values()) <= {1.0, 2.0, 3.0}
    assert strategy.reports[2].figures()["report.frames.rank of 0.weight"] == sum(ranks.values()) / 3


# Layer by layer over messages: the same bits as one exchange, memories, a server that is restarted, and refusals.


def remembering() -> Compressed:
    return Compressed(fedavg(fraction_evaluate=0.0), Factors(rank=2), feedback=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        remembering,
        *(pytest.param(lambda m=m: pair(mode=m), id=m, marks=pytest.mark.long) for m in ("dad", "edad", "rank")),
    ],
)
def test_what_comes_of_it_is_what_comes_of_one_exchange_bit_for_bit(made: Callable[[], Compressed]) -> None:
    strategy = LayerByLayer(made())
    assert run(strategy, rounds=2).tobytes() == run(made(), rounds=2).tobytes()
    for report in strategy.reports.values():
        assert report.used == 3
        assert not report.notes
        # What is in the model is acknowledged: no memory puts it back.
        assert not report.rolled_back


def test_the_last_layer_comes_first_and_every_byte_is_counted() -> None:
    strategy = LayerByLayer(pair())
    seen: list[tuple[str, list[Any]]] = []

    class Watching(MeteredGrid):
        def send_and_receive(self, messages: Any, **options: Any) -> list[Message]:
            replies = super().send_and_receive(messages, **options)
            for reply in replies:
                (frame,) = asks.data_in(reply.content, FRAME).values()
                seen.append((messages[0].metadata.message_type, [t.shape for t in wire.decode(frame).tensors]))
            return replies

    with InProcessGrid(app(), 3, seed=4) as inner:
        grid = Watching(inner)
        fit(strategy, grid, record_of(network()), 1)
        fetched = grid.ledger.total("messages", message_type="query", direction="up")
        payload = grid.ledger.total("payload", direction="up")
    assert [kind for kind, _ in seen] == ["train"] * 3 + ["query"] * 6
    # Clients have batches of 5, 12 and 9 rows; each layer's bias follows from its factors.
    assert [shapes for _, shapes in seen[::3]] == [[(5, 28), (0,)], [(5, 54), (0,)], [(5, 70), (0,)]]
    assert fetched == 6
    assert strategy.reports[1].payload_bytes == payload


def test_what_layers_cost_is_a_round_trip_each_and_what_they_may_hide_is_work() -> None:
    work, transfer = [3.0, 2.0, 1.0], [0.5, 1.0, 2.0]
    by_layer, at_once = layered(work, transfer, 0.25)
    assert at_once == 6.0 + 3.5 + 0.5
    assert by_layer == at_once + 2 * 2 * 0.25
    hidden, _ = layered(work, transfer, 0.25, during=True)
    # 3.25 the first answer leaves, at 4 it is there; the second, ready at 5.25, is there at 6.5; the third at 9.
    assert hidden == 9.0
    assert layered(work, transfer, 0.0, during=True)[0] < layered(work, transfer, 0.0)[0]


def compressed(codec: Codec, inner: Any = None, **options: Any) -> Compressed:
    return Compressed(inner or FedAvg(), codec, **options)


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda: fedavg(), "whose frames are divided"),
        (lambda: compressed(TopK(density=0.2)), "expected Factors"),
        (lambda: compressed(Factors(), downlink=TopK(0.5), first_model_at_nodes=True), "the first model whole"),
        (
            lambda: compressed(Factors(), DpFedAvg(fedavg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=1.0)),
            "promises privacy",
        ),
        (
            lambda: compressed(Factors(), DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 3)),
            "promises privacy",
        ),
    ],
)
def test_it_divides_the_factors_of_compressed_alone(made: Callable[[], Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LayerByLayer(made())
