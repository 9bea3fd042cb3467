"""Forward gradients in rounds: what the server makes of slopes, what goes down, and whose replies are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian
from torch import Tensor, nn
from toy import fedavg

from fedcomp.clients.client import HALVES, client, in_order
from fedcomp.clients.compressed import compression
from fedcomp.clients.forward import forward_gradients
from fedcomp.clients.private.topagg import votes_only
from fedcomp.codecs import RandomProjection
from fedcomp.errors import NoUsableReply
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.rounds import fit
from fedcomp.forward.directions import step_scale
from fedcomp.forward.evaluate import Objective, slopes
from fedcomp.layout import NONE_DENSE, Layout
from fedcomp.rng import Key
from fedcomp.strategies.forward import ForwardGradients, Slopes

P = 600
NODES = 3


class Point(nn.Module):
    """A point in space, and a second one of few coordinates."""

    def __init__(self, size: int = P) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))
        self.b = nn.Parameter(torch.zeros(4))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.w, self.b


def target(partition: int, size: int = P) -> Tensor:
    return torch.from_numpy(Key(7, "target", partition=partition).uniform(size).astype(np.float32) * 2 - 1)


def point(msg: Message, context: Context, common: bool = False) -> Objective:
    """Half the squared distance to this node's own point, or all nodes' common one."""
    (record,) = msg.content.array_records.values()
    module = Point(record["w"].numpy().size)
    module.load_state_dict({name: torch.from_numpy(a.numpy().copy()) for name, a in record.items()})
    partition = int(context.node_config["partition-id"])
    goal = target(0 if common else partition, module.w.numel())

    def loss(model: Any) -> Tensor:
        w, b = model()
        return 0.5 * (w - goal).square().sum() + 0.5 * (b - 1).square().sum()

    return Objective(module, loss, examples=partition + 1)


def app(common: bool = False, **options: Any) -> ClientApp:
    plain = ClientApp()

    @plain.train()
    def train(msg: Message, context: Context) -> Message:
        raise AssertionError("nobody trains in a round of forward gradients")

    return client(plain, forward_gradients(lambda msg, context: point(msg, context, common), **options))


def start(size: int = P) -> ArrayRecord:
    return to_record({"w": np.zeros(size, np.float32), "b": np.zeros(4, np.float32)})


def made(inner: Any = None, directions: int = 16, lr: float = 0.5, **options: Any) -> ForwardGradients:
    return ForwardGradients(inner or fedavg(fraction_evaluate=0.0), directions, lr=lr, **options)


def run(
    strategy: Any, made_app: ClientApp | None = None, rounds: int = 4, fault: Any = None, size: int = P
) -> tuple[dict[str, np.ndarray], MeteredGrid]:
    with InProcessGrid(made_app or app(), NODES, seed=4, fault=fault) as inner:
        grid = MeteredGrid(inner)
        found = fit(strategy, grid, start(size), rounds).arrays
    return to_arrays(found), grid


def by_hand(rounds: int, directions: int, lr: float, who: Any = lambda r: range(NODES), scope: str = "global") -> Any:
    """The model after some rounds: each client's estimate as it would make it, and their weighted mean."""
    arrays = to_arrays(start())
    layout, codec = Layout.of(arrays, NONE_DENSE), RandomProjection(directions, scope=scope)
    vector = layout.flatten(arrays)
    step = lr * step_scale(P + 4 if scope == "global" else P, directions * NODES)
    for r in range(1, rounds + 1):
        nodes, total = list(who(r)), np.full(layout.size, -0.0, np.float32)
        for partition in nodes:
            module = Point()
            module.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in layout.unflatten(vector, {}).items()})
            goal = target(partition)

            def loss(model: Any, goal: Tensor = goal) -> Tensor:
                w, b = model()
                return 0.5 * (w - goal).square().sum() + 0.5 * (b - 1).square().sum()

            key = Key(0, "uplink", r, partition)
            found = slopes(Objective(module, loss, 1), [layout.unflatten(v, {}) for v in codec.tangents(layout, key)])
            estimate = codec.decode(codec.frame_of_products(-step * found[1], layout, key), layout)
            total += np.float32((partition + 1) / sum(p + 1 for p in nodes)) * estimate
        vector = vector + total
    return layout.unflatten(vector, {})


@pytest.mark.parametrize("at_once", [1, 5, 64])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_the_server_makes_what_the_clients_would_have_made(scope: str, at_once: int) -> None:
    """2.6: bit for bit, whatever is evaluated at once. Nobody trains, and the loss falls."""
    found, _ = run(made(scope=scope), app(at_once=at_once), rounds=3)
    expected = by_hand(3, 16, 0.5, scope=scope)
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name])
    if scope == "layer":
        # As many coordinates as directions at most: the slopes of its own coordinates, exactly.
        far = 1 - (1 - 0.5 * step_scale(P, 16 * NODES)) ** 3
        np.testing.assert_allclose(found["b"], np.full(4, far), rtol=1e-5)


@pytest.mark.long
def test_it_converges_where_clients_agree_and_nears_the_mean_where_they_do_not() -> None:
    """Directions of gradients that cancel leave their noise behind, and a smaller step less of it."""
    goal = target(0).numpy()
    found, _ = run(made(directions=64, lr=1.0), app(common=True, at_once=64), rounds=40)
    assert np.square(found["w"] - goal).sum() < 1e-3 * np.square(goal).sum()
    # Without the smaller step it would not.
    wild, _ = run(made(directions=64, lr=1.0, lr_scale=1.0), app(common=True, at_once=64), rounds=12)
    assert np.square(wild["w"] - goal).sum() > np.square(goal).sum()
    mean = sum((p + 1) * target(p).numpy() for p in range(NODES)) / 6
    off = []
    for lr in (0.5, 0.05):
        found, _ = run(made(directions=64, lr=lr), app(at_once=64), rounds=int(25 / lr**0.5))
        off.append(np.square(found["w"] - mean).sum() / np.square(mean).sum())
    assert off[1] < 0.4 * off[0]
    assert off[1] < 0.2


def test_bytes_do_not_depend_on_the_size() -> None:
    """2.6: up. Down the first model is whole, and every other round takes the numbers of all."""
    ups, downs = [], []
    for size in (P, 50 * P):
        _, grid = run(made(), rounds=5, size=size)
        ups.append(grid.ledger.total("payload", round=5, direction="up"))
        downs.append(grid.ledger.total("payload", round=5, direction="down"))
        assert grid.ledger.total("payload", round=1, direction="down") >= 4 * size * NODES
    assert abs(ups[1] - ups[0]) <= 3 * NODES
    assert ups[0] <= NODES * (4 * 16 + 60)
    assert downs[0] == downs[1] <= NODES * (NODES * (4 * 16 + 16) + 100)


@pytest.mark.parametrize(
    ("inner", "replayed"),
    [
        (fedavg(fraction_evaluate=0.0), True),
        (FedAvgM(fraction_evaluate=0.0, server_momentum=0.9), False),
        (FedAdam(fraction_evaluate=0.0), False),
        (FedMedian(fraction_evaluate=0.0), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_a_sum_is_replayed(inner: FedAvg, replayed: bool, caplog: Any) -> None:
    """Any strategy can be inside; the step of another server goes down as the whole model, and the log says so."""
    inner.min_available_nodes = inner.min_train_nodes = NODES
    strategy = made(inner, lr=0.05)
    with caplog.at_level("INFO", "flwr.fedcomp"):
        found, grid = run(strategy, rounds=4)
    assert np.isfinite(found["w"]).all()
    assert (grid.ledger.total("payload", round=3, direction="down") < 4 * P) == replayed
    assert ("is sent as the whole model" in caplog.text) == (not replayed)
    # Numbers come up either way.
    assert grid.ledger.total("payload", round=3, direction="up") <= NODES * 130
    assert [report.used for report in strategy.reports.values()] == [NODES] * 4


def test_shared_directions_are_fewer() -> None:
    strategy = made(shared=True)
    found, _ = run(strategy, rounds=2)
    assert strategy.reports[1].section(Slopes).step == 0.5 * step_scale(P + 4, 16)
    assert np.linalg.matrix_rank(np.stack([found["w"]])) == 1
    # All three estimates of a round lie in the span of sixteen directions.
    codec, layout = strategy.codec, Layout.of(to_arrays(start()), NONE_DENSE)
    one, _ = run(made(shared=True), rounds=1)
    span = np.stack(list(codec.tangents(layout, Key(0, "uplink", 1, 2))))
    left = layout.flatten(one) - span.T @ np.linalg.lstsq(span.T, layout.flatten(one), rcond=None)[0]
    assert np.abs(left).max() < 1e-5


def test_differences_do_without_derivatives() -> None:
    exact, _ = run(made(), rounds=3)
    near, _ = run(made(), app(oracle="differences"), rounds=3)
    length = np.linalg.norm(exact["w"])
    assert 0.0 < np.linalg.norm(near["w"] - exact["w"]) < 0.05 * length


def test_apps_without_the_half_are_refused_and_named(caplog: Any) -> None:
    """They would train and project what they learnt: an update of another kind, with another step."""
    plain = ClientApp()

    @plain.train()
    def train(msg: Message, context: Context) -> Message:
        (name,) = msg.content.array_records
        arrays = {n: a.numpy() + 1.0 for n, a in msg.content.array_records[name].items()}
        msg.content[name] = to_record(arrays)
        msg.content["metrics"] = MetricRecord({"num-examples": 1})
        return Message(msg.content, reply_to=msg)

    other = client(plain, compression())
    strategy = made()
    with pytest.raises(NoUsableReply):
        run(strategy, other, rounds=1)
    assert len(strategy.reports[1].refused) == NODES
    assert all("lacks forward_gradients()" in reason for reason in strategy.reports[1].refused.values())


def test_guards_of_a_node_stand_outside() -> None:
    """Else the half would answer before a guard has seen the message."""
    half = forward_gradients(point)
    guards = {"votes_only": votes_only(), **{name: make() for name, make in HALVES.items()}}
    for named in ({half.name: half, **guards}, {**guards, half.name: half}):
        order = [each.name for each in in_order(named)]
        assert order.index("compression") > max(map(order.index, ("votes_only", "local_privacy", half.name)))
    strategy = made()
    with pytest.raises(NoUsableReply, match="only answers requests for private votes"):
        run(strategy, client(ClientApp(), half, votes_only()), rounds=1)
