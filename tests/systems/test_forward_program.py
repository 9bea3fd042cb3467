"""Forward gradients as a program: the rounds of the strategy over messages, bit for bit, and what halves refuse."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from over_messages import Fault, product
from torch import Tensor, nn
from toy import fedavg

from fedcomp.clients.client import client
from fedcomp.clients.forward import forward_gradients
from fedcomp.codecs import RandomProjection
from fedcomp.errors import ConfigError, LayoutError
from fedcomp.forward.evaluate import Objective
from fedcomp.layout import NONE_DENSE, Layout, Update, Vector
from fedcomp.local import Local
from fedcomp.program import Ask, Me, Now, Single, Step
from fedcomp.rng import Key
from fedcomp.strategies.forward import ForwardGradients
from fedcomp.systems import get_system
from fedcomp.systems.forward import Forward, Measure, Measured, slopes_along

SIZES = {"w": 600, "b": 4}
NODES = 3


class Point(nn.Module):
    """A point in space, and a second one of few coordinates."""

    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        super().__init__()
        self.w, self.b = (nn.Parameter(torch.from_numpy(np.array(arrays[name]))) for name in SIZES)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.w, self.b


def objective(arrays: dict[str, NDArray[Any]], partition: int, steep: bool = False) -> Objective:
    """Half the squared distance to this node's own point; ``steep`` along one coordinate beyond what float32 holds."""
    drawn = Key(7, "target", partition=partition).uniform(SIZES["w"]).astype(np.float32) * 2 - 1
    goal = torch.from_numpy(drawn)

    def loss(model: Any) -> Tensor:
        w, b = model()
        beyond = (b[:1] * 1e38 * 10).sum() if steep else 0.0
        return 0.5 * (w - goal).square().sum() + 0.5 * (b - 1).square().sum() + beyond

    return Objective(Point(arrays), loss, examples=partition + 1)


def measures(steep: bool = False) -> Any:
    def slopes(me: Me, directions: Iterable[Vector]) -> NDArray[np.float64]:
        return slopes_along(objective(me.layout.unflatten(me.start), me.node, steep), directions, me.layout)[1]

    return slopes


def start() -> dict[str, NDArray[np.float32]]:
    return {name: np.zeros(size, np.float32) for name, size in SIZES.items()}


LAYOUT = Layout.of(start(), NONE_DENSE)


def local(system: Forward, *, steep: bool = False, **options: Any) -> Local:
    def train(number: int, node: int, model: Vector) -> Vector:
        raise AssertionError("nobody trains in a round of forward gradients")

    brought = {node: measures(steep) for node in range(NODES)}
    model = np.zeros(LAYOUT.size, np.float32)
    return Local(system, LAYOUT, model, train, lambda node: node + 1.0, NODES, data=brought, **options)


def app(steep: bool = False) -> ClientApp:
    def of(msg: Message, context: Context) -> Objective:
        (record,) = msg.content.array_records.values()
        partition = int(context.node_config["partition-id"])
        return objective({name: array.numpy() for name, array in record.items()}, partition, steep)

    return client(ClientApp(), forward_gradients(of))


def faulty(number: int, node: int, exchange: int) -> str:
    return {(2, 0): "silent", (3, 1): "lost", (4, 2): "crash"}.get((number, node), "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"scope": "layer", "clip": 0.25},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"shared": True, "lr_scale": 0.02}, marks=pytest.mark.long),
        pytest.param({"replay": False, "directions": 3}, marks=pytest.mark.long),
        pytest.param({"scope": "layer", "shared": True}, marks=pytest.mark.long),
    ],
    ids=repr,
)
@pytest.mark.parametrize("fault", [faulty, pytest.param(Local.fault, marks=pytest.mark.long)], ids=["faults", "none"])
def test_rounds_are_those_over_messages(options: dict[str, Any], fault: Fault) -> None:
    system = Forward(**{"directions": 8, "lr": 0.5, **options})
    given = system.get_config()
    strategy = ForwardGradients(fedavg(fraction_evaluate=0.0), given.pop("directions"), **given)
    here = local(system, fault=fault)
    expected = product(strategy, app(), NODES, LAYOUT, here.model, 4, fault)
    for number, seen in enumerate(expected, start=1):
        made = here.step(number)
        assert here.model.tobytes() == seen.model
        assert {a.node: [a.frames["values"]] for a in here.answers} == seen.frames
        assert (made.frame is not None) == system.replay


@pytest.mark.slow
def test_what_goes_down_is_the_sum_bit_for_bit_and_does_not_grow_with_the_model() -> None:
    whole, replayed = (local(Forward(directions=4, lr=0.5, replay=replay)) for replay in (False, True))
    for number in range(1, 5):
        (one, other) = whole.step(number), replayed.step(number)
        assert isinstance(one, Step)
        assert isinstance(other, Step)
        assert other.frame is not None
        assert len(other.frame) <= NODES * (4 * 4 + 16) + 100
        assert whole.model.tobytes() == replayed.model.tobytes()


@pytest.mark.slow
def test_numbers_that_are_longer_than_the_model_are_not_repeated() -> None:
    here = local(Forward(directions=200, lr=0.5))
    here.data = dict.fromkeys(range(NODES), lambda me, directions: np.ones(200))
    made = here.step(1)
    assert made.frame is None
    assert made.change is not None


@pytest.mark.slow
def test_single_updates_are_no_sum() -> None:
    here, steps = local(Forward(directions=4), rule=Single()), []
    here._move = lambda step, number: steps.append(step)  # type: ignore[method-assign]
    here.step(1)
    assert [sorted(step.single) for step in steps] == [[0, 1, 2]]
    assert steps[0].frame is None


@pytest.mark.slow
def test_slopes_that_are_no_numbers_are_left_out_and_cut_ones_are_counted() -> None:
    notes: list[str] = []
    system = Forward(directions=8, lr=0.5, scope="layer", clip=0.25)
    here = local(system, steep=True)
    now = Now(1, tuple(range(NODES)), LAYOUT, lambda: np.zeros(LAYOUT.size, np.float32), note=notes.append)
    rounds = system.round(now)
    answers = []
    for ask in next(rounds):
        me = Me(ask.node, 1, 0, LAYOUT, lambda: now.model, lambda *_: pytest.fail("trained"), here.data[ask.node])
        memory, answer = system.client({}, ask, me)
        assert memory == {}
        assert isinstance(answer.say, Measured)
        assert answer.say.left_out == 1
        answers.append(answer._replace(weight=1.0))
    with pytest.raises(StopIteration) as end:
        rounds.send(answers)
    moved = LAYOUT.unflatten(end.value.value.change)
    assert moved["b"][0] == 0.0
    np.testing.assert_allclose(moved["b"][1:], 0.25 * system.step(LAYOUT, NODES), rtol=1e-6)
    measured = now.told["measured"]
    assert (measured["left_out"], measured["signs"]) == (3, 3 * system.codec.signs(LAYOUT))
    assert measured["cut"] > 3
    assert notes == [
        "3 clients evaluate 12 directions of 604 parameters each; the server draws 1.44e+04 signs a round, about "
        "1.44e-05 s; 48 bytes of numbers up, 2416 of model"
    ]


def test_one_direction_for_all_has_no_slope_without_a_coordinate() -> None:
    here = local(Forward(directions=8), steep=True)
    assert here.step(1) is None
    assert len(here.refused[1]) == NODES
    assert not here.model.any()


def test_directions_that_cost_too_much_are_refused_before_anybody_is_asked() -> None:
    here = local(Forward(directions=16, most_signs=1000))
    with pytest.raises(ConfigError, match=r"the server draws 2\.9e\+04 signs a round.*over most_signs=1e\+03"):
        here.step(1)
    assert not here.clients


@pytest.mark.slow
def test_what_a_client_half_refuses() -> None:
    here = replace(local(Forward(directions=8)), data={1: measures()})
    here.step(1)
    assert [line.partition(":")[0] for line in here.refused[1]] == ["0", "2"]
    system, me = (
        Forward(directions=8),
        Me(0, 1, 0, LAYOUT, lambda: here.model, lambda *_: pytest.fail("trained"), measures()),
    )
    with pytest.raises(ValueError, match="by which step"):
        system.client({}, Ask(0), me)
    frozen = Point(start())
    frozen.b.requires_grad_(False)
    with pytest.raises(LayoutError, match="not trained parameters"):
        slopes_along(Objective(frozen, lambda model: model()[0].sum(), 1), [], LAYOUT)
    # What travels dense has no directions.
    dense = Layout.of(start())
    assert dense.dense_size
    bad = replace(me, layout=dense, data=lambda me, directions: np.ones(len(list(directions))))
    with pytest.raises(LayoutError, match="travel dense"):
        system.client({}, Ask(0, say=Measure(0.1)), bad)


def test_the_step_falls_with_the_longest_stretch() -> None:
    """By m C / (m C + n - 1); the tensor of four travels as it is."""
    assert Forward(directions=8, lr=0.5).step(LAYOUT, 3) == 0.5 * (24 / (24 + 603))
    assert Forward(directions=8, lr=0.5, scope="layer").step(LAYOUT, 3) == 0.5 * (24 / (24 + 599))
    assert Forward(directions=8, lr=0.5, shared=True).step(LAYOUT, 3) == 0.5 * (8 / (8 + 603))
    assert Forward(directions=8, lr=0.5, lr_scale=0.25).step(LAYOUT, 3) == 0.125


def test_a_replay_has_the_shares_of_the_mean() -> None:
    system = Forward(directions=4)
    now = Now(1, (0, 1), LAYOUT, lambda: np.ones(LAYOUT.size, np.float32), scales={1: 0.25})
    rounds = system.round(now)
    answers = []
    for ask in next(rounds):
        me = Me(ask.node, 1, 0, LAYOUT, now.model, lambda *_: pytest.fail("trained"), lambda *_: np.arange(4.0))
        answers.append(system.client({}, ask, me)[1]._replace(weight=ask.node + 1.0))
    with pytest.raises(StopIteration) as end:
        rounds.send(answers)
    step = end.value.value
    codec, moved = system.reads(step.blobs, 1, LAYOUT), now.model.copy()
    codec.accumulate(step.frame, 1.0, Update(moved, LAYOUT))
    assert moved.tobytes() == (now.model + step.change).tobytes()


def test_options_come_back_and_bad_ones_are_refused() -> None:
    for system in (Forward(), Forward(directions=3, lr=0.2, lr_scale=0.1, scope="layer", shared=True, clip=1.0)):
        assert get_system(system.to_config()) == system
        assert eval(repr(system)) == system
    for options in ({"lr": 0.0}, {"lr_scale": -1.0}, {"clip": -1.0}, {"clip": float("inf")}, {"directions": 0}):
        with pytest.raises(ConfigError):
            Forward(**options)
    assert Forward().get_config() == {
        "directions": 32,
        "lr": 0.1,
        "lr_scale": None,
        "scope": "global",
        "shared": False,
        "clip": 0.0,
        "replay": True,
        "most_signs": 10**12,
    }
    assert Measured.of({}) == Measured() == Measured(0, 0)
    assert (Forward().makes_steps, Forward(replay=False).makes_steps) == (True, False)
    assert Forward(scope="layer", shared=True).codec == RandomProjection(scope="layer", shared=True)
