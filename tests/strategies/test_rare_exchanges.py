"""Rare exchanges: numbers 13 to 19 of the list of properties. What a client keeps, the outer step, and the presets."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedAvgM, Strategy
from toy import ONE, fedavg, stack, training

import fedcomp as fc
from fedcomp.clients.edge.node_config import STATE_FOLDER
from fedcomp.clients.optimizer import ARRAYS, OptimizerRecord, kept
from fedcomp.codecs import EDEN, ChunkTopK, ErrorFeedback, Identity, TopK
from fedcomp.errors import ConfigError
from fedcomp.flower import checkpoint
from fedcomp.flower.faults import Fault, RandomFaults, ScriptedFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.records import to_arrays
from fedcomp.layout import Layout, Update
from fedcomp.rates import falling
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.outer import Nesterov
from fedcomp.strategies.rare import DeMo, DiLoCo, SparseLoCo

ALL = {**ONE, "fraction_evaluate": 0.0}
SIZES = {"weight": (16, 12), "bias": (16,)}
ADAMW = partial(torch.optim.AdamW, betas=(0.9, 0.99), weight_decay=0.01)


def start(value: float = 0.0) -> ArrayRecord:
    """Return a linear model."""
    return ArrayRecord({name: Array(np.full(shape, value, np.float32)) for name, shape in SIZES.items()})


def batch(partition: int, step: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a client's step, which depend on nothing else; clients are unlike."""
    key = Key(3, "batch", step, partition)
    x = torch.from_numpy((key.uniform(size * 12).reshape(size, 12) - 0.5).astype(np.float32))
    truth = Key(3, "truth").uniform(16 * 12) + 0.3 * Key(3, "own", 0, partition).uniform(16 * 12)
    return x, x @ torch.from_numpy(truth.reshape(12, 16).astype(np.float32))


def loss_of(arrays: ArrayRecord, clients: int) -> float:
    """Return the mean loss over clients, of batches that nobody trains on."""
    found = to_arrays(arrays)
    pairs = [batch(partition, 10_000, 256) for partition in range(clients)]
    return float(
        np.mean([np.square(x.numpy() @ found["weight"].T + found["bias"] - y.numpy()).mean() for x, y in pairs])
    )


def training_app(steps=lambda partition: 4, make=ADAMW, keeps: bool = True, lr: float = 0.02) -> ClientApp:
    """Return an app that takes local steps at a rate that falls with the server's round number."""
    app = fc.client(ClientApp())

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        (name, record), partition = next(iter(msg.content.array_records.items())), context.node_config["partition-id"]
        number, count = int(msg.content["config"]["server-round"]), steps(partition)
        # Of float32, as a torch model's are, whatever a mean was made in.
        parameters = {k: torch.nn.Parameter(torch.from_numpy(np.float32(v))) for k, v in to_arrays(record).items()}
        optimizer = make(parameters.values(), lr=lr)
        context.state["app.trainings"] = MetricRecord(
            {"count": 1 + int(context.state.get("app.trainings", {"count": 0})["count"])}
        )

        def learn() -> None:
            for step in range((number - 1) * count, number * count):
                x, y = batch(partition, step)
                optimizer.param_groups[0]["lr"] = lr / (1.0 + 0.05 * step)
                optimizer.zero_grad()
                (x @ parameters["weight"].T + parameters["bias"] - y).square().mean().backward()
                optimizer.step()

        if keeps:
            with kept(context, optimizer):
                learn()
        else:
            learn()
        arrays = {k: Array(p.detach().numpy()) for k, p in parameters.items()}
        # Weights are tokens: what a client really trained on.
        content = {name: ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 16 * count})}
        return Message(RecordDict(content), reply_to=msg)

    return app


def optimizer_of(grid: InProcessGrid, node: int = 0) -> dict[str, np.ndarray]:
    """Return the arrays that a node keeps of its optimizer."""
    return to_arrays(grid.context(list(grid.get_node_ids())[node]).state[ARRAYS])


def run(strategy, rounds: int, *, clients: int = 4, app: ClientApp | None = None, arrays=None, **grid_options):
    with InProcessGrid(app or training_app(), clients, seed=1, **grid_options) as grid:
        result = strategy.start(grid, arrays or start(), num_rounds=rounds)
    return result.arrays, grid


# 13


@pytest.mark.parametrize("beta", [1.0, 0.95, 0.5])
def test_a_rolled_back_round_is_update_plus_decayed_memory_and_decays_once(beta: float) -> None:
    codec = ErrorFeedback(ChunkTopK(density=1 / 4, chunk=64, values="float32"), decay=beta)
    layout, key = Layout.flat(256), Key(5, "decay")
    update = [Update((key.at(round=r).uniform(256) - 0.5).astype(np.float32), layout) for r in range(3)]
    _, first = codec.encode(update[0], codec.init(layout), key)
    memory = first["memory"].copy()
    frame, second = codec.encode(update[1], first, key.at(round=1))
    back = codec.rollback(second, frame, layout)
    expected = np.float32(beta) * memory + update[1].vector
    np.testing.assert_array_equal(back["memory"], expected)
    frame, third = codec.encode(update[2], back, key.at(round=2))
    np.testing.assert_array_equal(
        codec.decode(frame, layout) + third["memory"], np.float32(beta) * expected + update[2].vector
    )


# 14


@pytest.mark.parametrize("make", [ADAMW, partial(torch.optim.SGD, momentum=0.9)], ids=["AdamW", "SGD"])
def test_two_rounds_of_one_client_are_one_of_twice_as_many_steps(make) -> None:
    outer = {"codec": Identity(), "downlink": None, "outer": (1.0, 0.0), **ALL}
    two, grid = run(DiLoCo(**outer), 2, clients=1, app=training_app(lambda p: 5, make))
    one, whole = run(DiLoCo(**outer), 1, clients=1, app=training_app(lambda p: 10, make))
    np.testing.assert_array_equal(stack(two), stack(one))
    for name, array in optimizer_of(whole).items():
        np.testing.assert_array_equal(optimizer_of(grid)[name], array, name)
    without, _ = run(DiLoCo(**outer), 2, clients=1, app=training_app(lambda p: 5, make, keeps=False))
    assert not np.array_equal(stack(without), stack(one))


# 15


def test_a_lost_reply_gives_the_memory_back_and_keeps_the_moments() -> None:
    """Round 2's reply of client 0 is lost: its memory is put back in round 3, its optimizer goes on from round 2."""
    strategy = Compressed(fedavg(fraction_evaluate=0.0), ErrorFeedback(TopK(density=0.1)))
    _, grid = run(strategy, 3, clients=2, fault=ScriptedFaults({(2, 0): "lost_reply"}))
    node = next(iter(grid.get_node_ids()))
    assert list(strategy.reports[3].rolled_back) == [node]
    assert OptimizerRecord.take(grid.context(node).state).number == 3
    assert float(optimizer_of(grid)["0.step"]) == 12.0


@pytest.mark.parametrize("codec", [EDEN(), ErrorFeedback(TopK(density=0.1))], ids=["without memory", "with memory"])
def test_a_message_that_comes_twice_trains_once(codec) -> None:
    once, _ = run(Compressed(fedavg(fraction_evaluate=0.0), codec), 3)
    twice, grid = run(Compressed(fedavg(fraction_evaluate=0.0), codec), 3, fault=lambda delivery: Fault("duplicate"))
    np.testing.assert_array_equal(stack(twice), stack(once))
    for node in grid.get_node_ids():
        assert grid.context(node).state["app.trainings"]["count"] == 3
    assert float(optimizer_of(grid)["0.step"]) == 12.0


@pytest.mark.parametrize("codec", [EDEN(), ErrorFeedback(TopK(density=0.1))], ids=["without memory", "with memory"])
def test_a_restarted_server_gets_the_same_answers_and_nobody_trains_again(codec, tmp_path) -> None:
    """The server loses round 3 after the clients trained, and repeats it from its checkpoint of round 2."""

    def strategy() -> Compressed:
        return Compressed(Nesterov(**ALL), codec, downlink=EDEN(scale="least"))

    whole, _ = run(strategy(), 4)
    with InProcessGrid(training_app(), 4, seed=1) as grid:
        first = strategy()
        first.start(grid, start(), num_rounds=2)
        model = first.current_arrays
        checkpoint.save(tmp_path / "two", server_round=2, arrays=model, strategy=first)
        grid.send_and_receive(first.configure_train(3, model, _config(3), grid), timeout=9)
        second = strategy()
        found = checkpoint.load(tmp_path / "two")
        # Without the grid, whose clients live on as those of a deployment do.
        found.apply(second)
        arrays = found.arrays
        for number in (3, 4):
            replies = grid.send_and_receive(second.configure_train(number, arrays, _config(number), grid), timeout=9)
            arrays, _ = second.aggregate_train(number, replies)
        np.testing.assert_array_equal(stack(arrays), stack(whole))
        assert {int(grid.context(n).state["app.trainings"]["count"]) for n in grid.get_node_ids()} == {4}


def _config(number: int) -> ConfigRecord:
    return ConfigRecord({"server-round": number})


@pytest.mark.slow
def test_lost_late_and_duplicate_replies_cost_no_loss() -> None:
    """One reply in ten is lost or late: within 1 % of a run without. ``test_every_codec_conserves`` counts the mass."""
    plan = RandomFaults(Key(11, "faults"), {"lost_reply": 0.05, "late": 0.05, "duplicate": 0.05, "raise": 0.02})

    def strategy() -> SparseLoCo:
        return SparseLoCo(density=1 / 8, chunk=64, values="float32", decay=1.0, downlink=None, **ALL)

    faulty = strategy()
    arrays, grid = run(faulty, 40, fault=plan)
    without, _ = run(strategy(), 40)
    assert sum(report.lost for report in faulty.reports.values()) > 5
    assert sum(len(report.rolled_back) for report in faulty.reports.values()) > 5
    assert loss_of(start(), 4) > 20 * loss_of(without, 4)
    assert loss_of(arrays, 4) <= 1.01 * loss_of(without, 4)
    assert all(np.isfinite(array).all() for node in range(4) for array in optimizer_of(grid, node).values())


# 16


@pytest.mark.parametrize(("lr", "momentum"), [(0.9, 0.5), (0.7, 0.9), (1.0, 0.0), (0.5, 0.0)])
def test_the_outer_step_is_torchs_nesterov_on_minus_the_mean_change(lr: float, momentum: float) -> None:
    strategy = Nesterov(lr, momentum, **ALL)
    w = torch.nn.Parameter(torch.from_numpy(to_arrays(start(0.5))["weight"]))
    sgd = torch.optim.SGD([w], lr=lr, momentum=momentum, nesterov=momentum > 0)
    arrays = start(0.5)
    with InProcessGrid(training_app(keeps=False), 3, seed=1) as grid:
        for number in range(1, 5):
            replies = list(grid.send_and_receive(strategy.configure_train(number, arrays, _config(number), grid)))
            mean = np.mean(
                [to_arrays(reply.content["arrays"])["weight"] for reply in replies], axis=0, dtype=np.float64
            )
            w.grad = w.detach() - torch.from_numpy(mean.astype(np.float32))
            sgd.step()
            arrays, _ = strategy.aggregate_train(number, replies)
            found = to_arrays(arrays)["weight"]
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, w.detach().numpy(), atol=2e-7, rtol=0)


def test_the_outer_step_by_hand() -> None:
    """Changes of 1, 2 and -1 with (0.5, 0.5): u = 1, 2.5, 0.25; steps 0.5 (D + u/2) = 0.75, 1.625, -0.4375."""
    strategy = Nesterov(0.5, 0.5, **ALL)
    model, found = 0.0, []

    def step(arrays, number, partition):
        return {k: (v + {1: 1.0, 2: 2.0, 3: -1.0}[number]).astype(v.dtype) for k, v in arrays.items()}

    app = fc.client(training(step, None))
    arrays = ArrayRecord({"w": Array(np.zeros(1)), "bn.running_var": Array(np.ones(1)), "n": Array(np.array([4]))})
    with InProcessGrid(app, 2, seed=1) as grid:
        for number in (1, 2, 3):
            replies = grid.send_and_receive(strategy.configure_train(number, arrays, _config(number), grid))
            arrays, _ = strategy.aggregate_train(number, replies)
            found.append(float(arrays["w"].numpy()[0]) - model)
            model += found[-1]
    assert found == [0.75, 1.625, -0.4375]
    # Statistics and counters are the mean itself.
    assert (float(arrays["bn.running_var"].numpy()[0]), float(arrays["n"].numpy()[0])) == (3.0, 6.0)


def rising(by: dict[int, float]) -> ClientApp:
    """Return an app that adds to every value what a round's number says."""
    return fc.client(
        training(lambda arrays, number, _: {k: np.float32(v + by[number]) for k, v in arrays.items()}, None)
    )


def vector(value: float) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.full(50, value, np.float32))})


class Around(Strategy):
    """A strategy that passes everything on."""

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner

    def configure_train(self, *args):
        return self.inner.configure_train(*args)

    def aggregate_train(self, *args):
        return self.inner.aggregate_train(*args)

    def configure_evaluate(self, *args):
        return self.inner.configure_evaluate(*args)

    def aggregate_evaluate(self, *args):
        return self.inner.aggregate_evaluate(*args)

    def summary(self) -> None:
        self.inner.summary()


@pytest.mark.parametrize("around", [lambda inner: inner, lambda inner: Compressed(inner, Identity())])
def test_a_second_training_begins_at_its_own_model_without_momentum(around) -> None:
    strategy = around(Nesterov(0.5, 0.5, **ALL))
    steps = rising({1: 1.0, 2: 2.0})
    for begin in (0.0, 100.0):
        arrays, _ = run(strategy, 2, clients=2, app=steps, arrays=vector(begin))
        np.testing.assert_array_equal(stack(arrays), np.float32(begin + 0.75 + 1.625))


@pytest.mark.parametrize(
    ("inner", "end"),
    [
        (lambda: Nesterov(1.0, 0.5, **ALL), 1.5 + 1.75),
        (lambda: FedAvgM(server_learning_rate=1.5, server_momentum=0.5, **ALL), 1.5 + 2.25),
        # Inside another strategy, too.
        (lambda: Around(Nesterov(1.0, 0.5, **ALL)), 1.5 + 1.75),
    ],
    ids=["Nesterov", "FedAvgM", "one around it"],
)
def test_a_step_that_is_not_finite_leaves_no_momentum(inner, end: float) -> None:
    """The change of round 2 is finite and its step is not; round 3 goes on from what was there after round 1."""
    strategy = Compressed(inner(), Identity())
    arrays, _ = run(strategy, 3, clients=2, app=rising({1: 1.0, 2: 3e38, 3: 1.0}), arrays=vector(0.0))
    assert [strategy.reports[number].used for number in (1, 2, 3)] == [2, 0, 2]
    np.testing.assert_allclose(stack(arrays), end, rtol=1e-6)


# 17


def test_without_outer_step_and_codec_diloco_is_fedavg() -> None:
    # Of two clients: sums of more depend on the order, and Flower adds in that of arrival.
    plain, _ = run(fedavg(fraction_evaluate=0.0), 3, clients=2)
    found, _ = run(DiLoCo(Identity(), None, outer=(1.0, 0.0), **ALL), 3, clients=2)
    np.testing.assert_array_equal(stack(found), np.float32(stack(plain)))
    stepped, _ = run(DiLoCo(Identity(), None, **ALL), 3, clients=2)
    assert not np.array_equal(stack(stepped), stack(found))


def test_sparseloco_that_sends_all_values_is_fedavg() -> None:
    plain, _ = run(fedavg(fraction_evaluate=0.0), 3)
    options = {"density": 1.0, "values": "float32", "decay": 1.0, "downlink": None, "outer": (1.0, 0.0)}
    found, _ = run(SparseLoCo(**options, **ALL), 3)
    np.testing.assert_allclose(stack(found), stack(plain), atol=1e-6)


# 18


def test_a_client_that_stopped_at_half_its_steps_weighs_half() -> None:
    app = training_app(lambda partition: 2 if partition == 0 else 4, keeps=False)
    seen = []

    class Looking(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            seen.extend(
                (r.content["metrics"]["num-examples"], to_arrays(r.content["arrays"])["weight"]) for r in replies
            )
            return super().aggregate_train(server_round, replies)

    arrays, _ = run(Looking(**ALL), 1, clients=2, app=app)

    def coded() -> DiLoCo:
        return DiLoCo(Identity(), None, outer=(1.0, 0.0), **ALL)

    around = (coded(), fc.PipelinedStrategy(coded(), 1, quorum=2), fc.Buffered(coded(), concurrency=2, buffer=2))
    (half, first), (full, second) = sorted(seen, key=lambda pair: pair[0])
    assert (half, full) == (32, 64)
    for found in (arrays, *(run(strategy, 1, clients=2, app=app)[0] for strategy in around)):
        np.testing.assert_allclose(to_arrays(found)["weight"], (first + 2 * second) / 3, atol=1e-6)


def test_the_local_step_size_is_that_of_the_servers_round_also_for_a_client_that_missed_some() -> None:
    """Client 1 gets no message in rounds 2 to 4; in round 5 both take their steps at the rates of round 5."""
    rates: dict[int, list[float]] = {0: [], 1: []}

    class Watched(torch.optim.SGD):
        partition = 0

        def step(self, *args, **options):
            rates[self.partition].append(self.param_groups[0]["lr"])
            return super().step(*args, **options)

    def steps(partition: int) -> int:
        Watched.partition = partition
        return 4

    away = ScriptedFaults({(number, 1): "offline" for number in (2, 3, 4)})
    strategy = DiLoCo(Identity(), None, **ALL)
    run(strategy, 5, clients=2, app=training_app(steps, partial(Watched, momentum=0.9)), fault=away)
    assert [strategy.reports[number].used for number in range(1, 6)] == [2, 1, 1, 1, 2]
    assert rates[0] == [0.02 / (1.0 + 0.05 * step) for step in range(20)]
    assert rates[1] == [*rates[0][:4], *rates[0][16:]]


@pytest.mark.parametrize(
    "around",
    [
        lambda: fc.PipelinedStrategy(DiLoCo(**ALL), width=1, deadline=fc.Deadline(0.8, slack=1.5)),
        lambda: fc.PipelinedStrategy(DiLoCo(**ALL), width=2),
        lambda: fc.Buffered(DiLoCo(**ALL), concurrency=4, buffer=3),
    ],
    ids=["deadline", "pipeline", "quorum"],
)
def test_a_quorum_a_deadline_and_a_pipeline_step_by_nesterov_too(around) -> None:
    found, grid = run(around(), 12)
    assert loss_of(found, 4) < 0.2 * loss_of(start(), 4)
    assert all(np.isfinite(array).all() for array in optimizer_of(grid).values())


# 19


def naive_demo(rounds: int, kept: int, beta: float, lr: float, lost: frozenset[int] = frozenset()) -> np.ndarray:
    """Return a model of 128 values after DeMo's lines in float64. Gradients of its three clients are (w - target) / 2;
    what client 0 sent in the rounds ``lost`` goes back into its momentum.
    """
    chunk = 64
    place = np.arange(chunk)
    basis = np.cos(np.pi / chunk * (place[None] + 0.5) * place[:, None]) * np.sqrt(2 / chunk)
    basis[0] /= np.sqrt(2)
    w, m = np.zeros(128), np.zeros((3, 128))
    for number in range(1, rounds + 1):
        sent = []
        for client in range(3):
            m[client] = beta * m[client] + 0.5 * (w - demo_target(client))
            q = m[client].reshape(2, chunk) @ basis.T
            least = np.sort(np.abs(q), axis=1)[:, chunk - kept][:, None]
            back = (np.where(np.abs(q) >= least, q, 0.0) @ basis).ravel()
            if not (client == 0 and number in lost):
                m[client] -= back
                sent.append(back)
        w = w - lr * np.sign(np.mean(sent, axis=0))
    return w


def demo_target(client: int) -> np.ndarray:
    return 4.0 * Key(8, "demo", 0, client).uniform(128) - 2.0


def demo_app() -> ClientApp:
    """Return an app that takes one step of SGD at rate 1 on |w - target|² / 4."""

    def step(arrays, number, partition):
        return {"w": np.float32(arrays["w"] - 0.5 * (arrays["w"] - demo_target(partition)))}

    return fc.client(training(step, None))


def run_demo(strategy, rounds: int, **grid_options) -> np.ndarray:
    zero = ArrayRecord({"w": Array(np.zeros(128, np.float32))})
    return stack(run(strategy, rounds, clients=3, app=demo_app(), arrays=zero, **grid_options)[0])


@pytest.mark.parametrize("kept", [1, 2, 64])
def test_demo_is_the_papers_lines(kept: int) -> None:
    found = run_demo(DeMo(kept, values="float32", lr=0.05, **ALL), 12)
    np.testing.assert_allclose(found, naive_demo(12, kept, 0.95, 0.05), atol=1e-5)
    # Without what a client keeps, or with a memory that does not fade, it would be another model.
    assert kept == 64 or np.abs(found - naive_demo(12, kept, 0.0, 0.05)).max() > 0.04
    assert kept == 64 or np.abs(found - naive_demo(12, kept, 1.0, 0.05)).max() > 0.04


def test_demo_that_sends_all_cosines_is_descent_by_signs_of_the_mean_gradient() -> None:
    w, target = np.zeros(128), np.mean([demo_target(client) for client in range(3)], axis=0)
    for number in range(10):
        w -= 0.1 * falling(number, 10) * np.sign(w - target)
    np.testing.assert_allclose(run_demo(DeMo(64, values="float32", lr=0.1, falls=10, **ALL), 10), w, atol=1e-5)


def test_a_lost_reply_gives_demos_momentum_back_what_was_sent() -> None:
    strategy = DeMo(2, values="float32", lr=0.05, **ALL)
    found = run_demo(strategy, 6, fault=ScriptedFaults({(2, 0): "lost_reply", (4, 0): "lost_reply"}))
    np.testing.assert_allclose(found, naive_demo(6, 2, 0.95, 0.05, frozenset({2, 4})), atol=1e-5)
    assert np.abs(found - naive_demo(6, 2, 0.95, 0.05)).max() > 0.04


def test_values_that_nobody_trains_stay_under_demo_and_replicas_are_off_by_less_than_a_step() -> None:
    given: list[np.ndarray] = []

    def step(arrays, number, partition):
        given.append(arrays["w"][64:].copy())
        pull = np.where(np.arange(128) < 64, 0.5 * (arrays["w"] - demo_target(partition)), 0.0)
        return {"w": np.float32(arrays["w"] - pull)}

    zero = ArrayRecord({"w": Array(np.zeros(128, np.float32))})
    app = fc.client(training(step, None))
    arrays, _ = run(DeMo(2, lr=0.05, **ALL), 16, clients=3, app=app, arrays=zero)
    assert np.abs(stack(arrays)[:64]).max() > 0.2
    assert not stack(arrays)[64:].any()
    assert 0.0 < np.abs(given).max() < 0.05


def test_demos_downlink_of_one_bit_is_its_step() -> None:
    whole, strategy = DeMo(2, downlink=None, lr=0.05, **ALL), DeMo(2, lr=0.05, **ALL)
    np.testing.assert_allclose(run_demo(strategy, 8), run_demo(whole, 8), atol=1e-6)


# What is kept.


def context_of() -> Context:
    return Context(0, 0, {}, RecordDict(), {})


def stepped(context: Context, w: torch.nn.Parameter, make=ADAMW, gradient: float = 1.0):
    """Take one kept step; return the optimizer and the round that its state was from."""
    optimizer = make([w], lr=0.1)
    with kept(context, optimizer) as since:
        w.grad = torch.full_like(w, gradient)
        optimizer.step()
    return optimizer, since


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_moments_come_back_in_their_own_dtype(dtype: torch.dtype) -> None:
    context, w = context_of(), torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer, _ = stepped(context, w)
    # As optimizers of half floats do it: moments that are wider than their parameter.
    wide = optimizer.state[w]["exp_avg"].double().add(1e-9)
    optimizer.state[w]["exp_avg"] = wide
    with kept(context, optimizer):
        optimizer.state[w]["exp_avg"] = wide
    other = ADAMW([w], lr=0.1)
    with kept(context, other):
        assert torch.equal(other.state[w]["exp_avg"], wide)
        assert other.state[w]["exp_avg"].dtype == torch.float64
        assert torch.equal(other.state[w]["exp_avg_sq"], optimizer.state[w]["exp_avg_sq"])
        assert other.state[w]["exp_avg_sq"].dtype == dtype
        assert float(other.state[w]["step"]) == 1.0


def test_hyperparameters_are_not_restored() -> None:
    context, w = context_of(), torch.nn.Parameter(torch.ones(3))
    stepped(context, w)
    other = ADAMW([w], lr=0.7)
    with kept(context, other):
        assert other.param_groups[0]["lr"] == 0.7


@pytest.mark.parametrize("what", ["shape", "order", "class", "dtype", "damaged", "not finite"])
def test_a_state_that_does_not_fit_is_dropped_with_one_line(what: str, caplog: pytest.LogCaptureFixture) -> None:
    context, w, b = context_of(), torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    optimizer = ADAMW([w, b], lr=0.1)
    with kept(context, optimizer):
        for p in (w, b):
            p.grad = torch.full_like(p, float("nan") if what == "not finite" else 1.0)
        optimizer.step()
    if what == "damaged":
        del context.state[ARRAYS]
        context.state[ARRAYS] = ArrayRecord({"7.exp_avg": Array(np.ones(3))})
    others = {
        "shape": lambda: ADAMW([torch.nn.Parameter(torch.ones(4)), b], lr=0.1),
        "order": lambda: ADAMW([b, w], lr=0.1),
        "class": lambda: torch.optim.SGD([w, b], lr=0.1, momentum=0.9),
        "dtype": lambda: ADAMW([torch.nn.Parameter(torch.ones(3, dtype=torch.float64)), b], lr=0.1),
    }
    with (
        caplog.at_level(logging.WARNING, logger="fedcomp"),
        kept(context, other := others.get(what, lambda: ADAMW([w, b], lr=0.1))()),
    ):
        assert not other.state
    lines = [record.getMessage() for record in caplog.records if "optimizer's state was dropped" in record.getMessage()]
    assert len(lines) == 1
    assert len([name for name in context.state if name.startswith("fedcomp.optimizer")]) == 2


def test_training_that_fails_changes_nothing_of_what_is_kept() -> None:
    context, w = context_of(), torch.nn.Parameter(torch.ones(3))
    stepped(context, w)
    before = {name: array.copy() for name, array in to_arrays(context.state[ARRAYS]).items()}

    optimizer = ADAMW([w], lr=0.1)

    def failing() -> None:
        with kept(context, optimizer):
            w.grad = torch.ones(3)
            optimizer.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    for name, array in to_arrays(context.state[ARRAYS]).items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_node_that_lost_its_state_goes_on_from_its_folder(on_disk: bool, tmp_path) -> None:
    """The node is killed after two rounds of four steps; without a folder it begins again with no moments."""
    config = {STATE_FOLDER: str(tmp_path)} if on_disk else {}
    strategy, arrays = DiLoCo(**ALL), start()
    with InProcessGrid(training_app(), 1, seed=1, node_config=config) as grid:
        (node,) = grid.get_node_ids()
        for number in (1, 2, 3, 4):
            if number == 3:
                grid.wipe(node)
            replies = grid.send_and_receive(strategy.configure_train(number, arrays, _config(number), grid), timeout=9)
            new, _ = strategy.aggregate_train(number, replies)
            arrays = arrays if new is None else new
        steps = {int(array) for name, array in optimizer_of(grid).items() if name.endswith(".step")}
    # Without its replica the node sits out round 3, and asks for the whole model.
    assert steps == {16 if on_disk else 4}


def test_another_strategy_object_begins_with_no_moments_and_its_report_says_so() -> None:
    def strategy() -> DiLoCo:
        return DiLoCo(**ALL)

    with InProcessGrid(training_app(), 2, seed=1) as grid:
        strategy().start(grid, start(), num_rounds=2)
        second = strategy()
        second.start(grid, start(), num_rounds=2)
        assert {float(optimizer_of(grid, node)["0.step"]) for node in (0, 1)} == {8.0}
        assert len(second.reports[1].remarks) == 2
        assert all("another strategy object" in remark for remark in second.reports[1].remarks.values())
        assert not second.reports[2].remarks


def test_an_optimizer_whose_state_is_no_tensors_is_refused_by_name() -> None:
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([w], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    with pytest.raises(ConfigError, match=r"LBFGS keeps '[a-z_]+' as a list"), kept(context_of(), optimizer):
        optimizer.step(closure)


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"momentum": 1.0}, {"momentum": -0.1}, {"server_momentum": 0.5}])
def test_outer_rates_that_cannot_be_are_refused(wrong) -> None:
    with pytest.raises(ConfigError, match=r"lr|momentum"):
        Nesterov(**wrong)
