"""One absurd reply: every report names its norm and weight, and with a guard it costs nobody but its sender."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedMedian
from private_runs import inner as bare_mean
from toy import ONE, SHAPES, bias_of, client_app, fedavg, model, stack, update

from fedcomp.clients.app import app as generic
from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import private
from fedcomp.codecs import QSGD, Identity, ScaleCom, SignSGD, TopK
from fedcomp.errors import ConfigError, NoUsableReply
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME, NODE_RECORD
from fedcomp.flower.report import Report
from fedcomp.flower.rounds import fit
from fedcomp.layout import NONE_DENSE, Layout, SmallDense, Update
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.local import Privatise
from fedcomp.privacy.votes import TopkSign
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.private.distributed_dp import NoisyMean
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.local_dp import LocalMean, local_dp
from fedcomp.strategies.private.lsg import Lsg
from fedcomp.strategies.private.topagg import TopAgg
from fedcomp.strategies.shared_support import SharedSupport
from fedcomp.systems.private.lsg import LowRank
from fedcomp.tasks import get_task

log = logging.getLogger("flwr.fedcomp")
ONES = {**ONE, "fraction_evaluate": 0.0}
Client = Callable[[Message, Context], Message]


def number(msg: Message) -> int:
    return int(msg.content["config"]["server-round"]) if "config" in msg.content else 0


def broken(mods: Any, when: int = 2, *, value: float = 1e25, weight: int | None = None, culprit: int = 1) -> Client:
    """Return the toy app, of which one client trains to ``value`` everywhere in one round, inside of the mods."""

    def absurd(msg: Message, context: Context, call_next: Any) -> Message:
        train = msg.metadata.message_type == "train" and number(msg) == when
        reply = call_next(msg, context)
        if train and context.node_config["partition-id"] == culprit:
            if weight is None:
                broken = {name: Array(np.full(shape, value, np.float32)) for name, shape in SHAPES.items()}
                reply.content["arrays"] = ArrayRecord(broken)
            else:
                reply.content["metrics"]["num-examples"] = weight
        return reply

    return client_app([*mods, absurd])


def play(strategy: Any, app: Client, rounds: int = 3, nodes: int = 5) -> tuple[ArrayRecord, int]:
    """Run; return the model and the id of the node of partition 1."""
    with InProcessGrid(app, nodes, seed=4) as grid:
        arrays = fit(strategy, MeteredGrid(grid), model(), rounds, timeout=9).arrays
        return arrays, grid.node_id_of(min(1, nodes - 1))


SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())
ALL = (0, 1, 2, 3, 4)
OTHERS = (0, 2, 3, 4)
FRAMES = {
    "top-k": (lambda **o: Compressed(fedavg(fraction_evaluate=0.0), TopK(1.0), **o), [compression()]),
    "identity": (lambda **o: Compressed(fedavg(fraction_evaluate=0.0), Identity(), **o), [compression()]),
    "plain": (lambda **o: Compressed(fedavg(fraction_evaluate=0.0), TopK(1.0), **o), []),
    "downlink": (
        lambda **o: Compressed(fedavg(fraction_evaluate=0.0), TopK(1.0), downlink=QSGD(levels=127), **o),
        [compression()],
    ),
    "shared support": (lambda **o: SharedSupport(ScaleCom(1.0), **o), [compression()]),
}


def app_of(path: str, **options: Any) -> Client:
    return broken(FRAMES[path][1], **options)


@pytest.mark.slow
@pytest.mark.parametrize("path", FRAMES)
def test_d2_without_a_guard_the_report_names_the_norm_and_with_it_the_reply_is_refused(path: str) -> None:
    made, _ = FRAMES[path]
    bare = made()
    ruined, node = play(bare, app_of(path))
    assert np.abs(stack(ruined)).max() > 1e22
    assert max(bare.reports[2].norms, key=bare.reports[2].norms.get) == node
    assert bare.reports[2].norms[node] == pytest.approx(1e25 * np.sqrt(SIZE), rel=1e-6)
    assert bare.reports[2].refused == {}

    guarded = made(guard=Norms())
    arrays, node = play(guarded, app_of(path))
    assert guarded.reports[2].refused.keys() == {node}
    assert "times the usual" in guarded.reports[2].refused[node]
    assert guarded.reports[2].norms[node] == pytest.approx(1e25 * np.sqrt(SIZE), rel=1e-6)
    assert guarded.reports[2].compressed + guarded.reports[2].plain == 4
    # What was refused does not come again from the client's memory.
    assert [guarded.reports[r].refused for r in (1, 3)] == [{}, {}]
    tolerance = {"rtol": 1e-5, "atol": 0.05} if path != "downlink" else {"atol": 60.0}
    np.testing.assert_allclose(arrays["bias"].numpy(), bias_of((1, ALL), (2, OTHERS), (3, ALL)), **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("path", FRAMES)
def test_d2_norms_and_weights_are_those_of_the_updates(path: str) -> None:
    strategy = FRAMES[path][0]()
    with InProcessGrid(app_of(path, when=9), 5, seed=4) as grid:
        fit(strategy, MeteredGrid(grid), model(), 1, timeout=9)
        for p in ALL:
            node = grid.node_id_of(p)
            parts = [update(1, p, SHAPES[name], layer) for layer, name in enumerate(SHAPES)]
            assert strategy.reports[1].norms[node] == pytest.approx(np.sqrt(sum((a**2).sum() for a in parts)), rel=1e-5)
            assert strategy.reports[1].weights[node] == 10 * (p + 1)
    again = Report.from_json(strategy.reports[1].to_json())
    assert again == strategy.reports[1]


@pytest.mark.parametrize("mods", [[compression()], []], ids=["frames", "plain"])
def test_d2_strategies_that_look_at_single_updates_see_no_outlier(mods: Any) -> None:
    """A median of three is moved by one: dense replies are guarded, too."""
    strategy = Compressed(FedMedian(**ONES), TopK(1.0), guard=Norms())
    arrays, node = play(strategy, broken(mods), rounds=2, nodes=3)
    assert strategy.reports[2].refused.keys() == {node}
    assert np.abs(stack(arrays)).max() < 1e4


@pytest.mark.slow
@pytest.mark.parametrize("path", ["top-k", "plain", "shared support"])
def test_d2_a_weight_that_captures_the_mean_is_refused(path: str) -> None:
    """2**62 examples: before, the model was that client's alone."""
    bare = FRAMES[path][0]()
    play(bare, app_of(path, weight=2**62), rounds=2)
    assert max(bare.reports[2].weights.values()) == 2**62
    strategy = FRAMES[path][0](guard=Norms())
    arrays, node = play(strategy, app_of(path, weight=2**62), rounds=2)
    assert strategy.reports[2].refused.keys() == {node}
    assert "the weight is 4.612e+18" in strategy.reports[2].refused[node]
    np.testing.assert_allclose(arrays["bias"].numpy(), bias_of((1, ALL), (2, OTHERS)), rtol=1e-5, atol=0.05)


@pytest.mark.parametrize("nodes", [1, 2])
def test_d2_with_one_or_two_replies_the_past_decides(nodes: int) -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(1.0), guard=Norms())
    arrays, _ = play(strategy, broken([compression()], culprit=0), nodes=nodes)
    assert [len(report.refused) for report in strategy.reports.values()] == [0, 1, 0]
    assert np.abs(stack(arrays)).max() < 1e4


def test_d2_a_divided_first_round_uses_nobody() -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(1.0), guard=Norms())
    with pytest.raises(NoUsableReply, match="it is unclear which half is right"):
        play(strategy, broken([compression()], when=1), nodes=2, rounds=1)
    assert len(strategy.reports[1].refused) == 2


def report(number: int, norms: list[float], rejected: tuple[int, ...] = ()) -> Report:
    found = Report(number, norms=dict(enumerate(norms)), weights=dict.fromkeys(range(len(norms)), 1.0))
    for node in rejected:
        found.refuse(node, "refused")
    return found


@pytest.mark.parametrize(
    ("norms", "past", "refused"),
    [
        ([1.0, 2.0, 25.0], [], {2}),
        ([1.0, 2.0, 19.0], [], set()),
        ([1e-9, 1.0, 1.0], [], set()),  # what is too small harms nobody
        ([0.0, 0.0, 0.0, 1.0], [], set()),  # who changes nothing does not say what is usual
        ([1.0, 1.0, 1e9, 1e9], [], {0, 1, 2, 3}),  # as many against as many
        ([1.0, 1.0, 1e9, 1e9], [[1.0, 1.0]], {2, 3}),
        ([1e-9, 1e-9, 1.0, 1.0], [[1.0, 1.0]], set()),  # tiny ones do not make the others outliers
        ([1e-9, 1.0], [[1.0, 1.0]], set()),
        ([1e-9, 1.0], [], {0, 1}),
        ([1.0, 11.0], [[1.0]], {1}),
        ([11.0, 12.0], [[1.0]], set()),  # two that agree are a majority: honest norms may grow
        ([11.0], [[1.0]], {0}),
        ([11.0], [], set()),
        ([50.0, 50.0, 60.0], [[1.0, 1.0, 1.0]] * 3, set()),
        ([5.0, 5.0, 60.0], [[10.0, 10.0, 10.0]], set()),  # as training converges the past is the larger measure
        ([5.0, 5.0, 60.0], [[10.0, 10.0, 10.0], [5.0] * 12], {2}),
    ],
)
def test_d2_what_is_refused(norms: list[float], past: list[list[float]], refused: set[int]) -> None:
    """The order of the replies decides nothing, except by name."""
    earlier = [report(i, values) for i, values in enumerate(past)]
    for order in itertools.islice(itertools.permutations(range(len(norms))), 24):
        now = report(9, [norms[i] for i in order])
        assert {order[node] for node in Norms().outliers(now, earlier)} == refused


def test_d2_what_was_refused_is_no_measure_and_what_is_long_past_neither() -> None:
    refused = [report(i, [1.0, 1.0, 1e9], rejected=(2,)) for i in range(5)]
    assert Norms().outliers(report(9, [1e8]), refused).keys() == {0}
    assert Norms(window=2).outliers(report(9, [30.0]), [report(0, [9.0] * 9), *refused[:2]]).keys() == {0}
    assert Norms(window=3).outliers(report(9, [30.0]), [report(0, [9.0] * 9), *refused[:2]]) == {}


def test_d2_no_node_keeps_a_persistent_outlier_from_being_one() -> None:
    """An outlier in every round does not become the usual, nor do tiny replies of one of two make the other one."""
    for value, expected in ((1e9, {1}), (1e-9, set())):
        history: list[Report] = [report(0, [1.0, 1.0])]
        for i in range(1, 60):
            now = report(i, [1.0, value])
            found = Norms().outliers(now, history)
            assert found.keys() == expected
            for node, reason in found.items():
                now.refuse(node, reason)
            history.append(now)


def test_d2_a_private_round_tells_nothing_and_takes_no_guard() -> None:
    inner = DpFedAvg(bare_mean(), clip=1.0, noise_multiplier=1.0, population=5, insecure_deterministic=True)
    with pytest.raises(ConfigError, match="bounds every update itself"):
        Compressed(inner, TopK(0.5), guard=Norms())
    clipped = DifferentialPrivacyServerSideFixedClipping(fedavg(), 1.0, 1.0, num_sampled_clients=5)
    with pytest.raises(ConfigError, match="bounds every update itself"):
        Compressed(clipped, TopK(0.5), guard=Norms())
    strategy = Compressed(inner, TopK(0.5))
    play(strategy, client_app([compression(), private()]), rounds=1)
    assert strategy.reports[1].compressed == 5
    assert (strategy.reports[1].norms, strategy.reports[1].weights) == ({}, {})


def forged(culprit: int, when: int, value: float) -> Any:
    """Return a mod, outside of all others, whose node puts a frame of its own making in place of the noised one."""

    def hostile(msg: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(msg, context)
        if number(msg) == when and context.node_config["partition-id"] == culprit:
            layout = Layout.of({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, NONE_DENSE)
            vector = np.full(layout.size, value, np.float32)
            reply.content.pop(FRAME + "values", None)
            reply.content[NODE_RECORD][FRAME + "values"] = QSGD(7).encode(Update(vector, layout), {}, Key(0))[0]
        return reply

    return hostile


def test_d2_a_hostile_message_of_local_privacy_is_named_and_with_a_guard_refused() -> None:
    """Nobody bounds what a client noised itself: before, the model was ruined and nobody named."""

    def run(**options: Any) -> tuple[Compressed, ArrayRecord, int]:
        noise = Privatise(clip=1.0, noise_multiplier=4.0, insecure_deterministic=True)
        pair = local_dp(bare_mean(), noise, QSGD(levels=7), population=5, delta=1e-3, **options)
        mods = [forged(1, 2, 1e25), compression(), private()]
        arrays, node = play(pair, client_app(mods))
        return pair, arrays, node

    bare, ruined, node = run()
    assert np.abs(stack(ruined)).max() > 1e22
    assert max(bare.reports[2].norms, key=bare.reports[2].norms.__getitem__) == node
    assert bare.reports[2].norms[node] > 1e26 > 1e23 * sorted(bare.reports[2].norms.values())[-2]
    assert set(bare.reports[2].weights.values()) == {1.0}

    guarded, arrays, node = run(guard=Norms())
    assert [set(found.refused) for found in guarded.reports.values()] == [set(), {node}, set()]
    assert "times the usual" in guarded.reports[2].refused[node]
    assert [found.used for found in guarded.reports.values()] == [5, 4, 5]
    assert np.abs(stack(arrays)).max() < 1e3
    assert guarded.inner.privacy.epsilon() == bare.inner.privacy.epsilon()
    assert [len(entry.participants) for entry in guarded.inner.privacy.entries] == [5, 5, 5]


def test_d2_who_bounds_updates_says_so() -> None:
    """A strategy that adds a vote or a vector of any size must say that it does."""
    assert {made.__name__: made.bounds_updates for made in (DpFedAvg, Lsg, TopAgg, LocalMean, NoisyMean)} == {
        "DpFedAvg": True,
        "Lsg": True,
        "TopAgg": True,
        "LocalMean": False,
        "NoisyMean": False,
    }
    layout, huge = Layout.flat(4), np.full(4, 1e25, np.float32)
    options: dict[str, Any] = {"noise_multiplier": 1.0, "population": 5}
    strategies = [
        DpFedAvg(bare_mean(), clip=1.0, **options),
        TopAgg(bare_mean(), TopkSign(k=2), server_lr=1.0, **options),
        Lsg(bare_mean(), LowRank(clip=1.0, rank=0), **options),
    ]
    for strategy in strategies:
        admit = strategy.mechanism(layout, 1).admit
        try:
            given = admit(strategy.contribution(huge, layout, 1))
        except Unbounded:
            continue
        usual = admit(strategy.contribution(np.full(4, 0.5, np.float32), layout, 1))
        assert np.linalg.norm(given) <= 1.02 * np.linalg.norm(usual)


def test_d2_votes_are_bounded_already_and_what_travels_dense_beside_them_is_guarded() -> None:
    """1200 coordinates vote, whatever was trained; the bias travels as it is."""
    strategy = Compressed(fedavg(fraction_evaluate=0.0), SignSGD(step=0.1), guard=Norms(), policy=SmallDense())
    arrays, node = play(strategy, broken([compression()]))
    assert [set(found.refused) for found in strategy.reports.values()] == [set(), {node}, set()]
    assert np.abs(stack(arrays)).max() < 1e4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "split"), [(TopK(0.05), "dirichlet:0.1"), (QSGD(levels=7), "shards:2")], ids=["top-k", "qsgd"]
)
def test_d2_honest_clients_are_not_refused_however_different_their_data(codec: Any, split: str) -> None:
    """Digits by skewed labels and sizes, some clients with several times the steps of others; no false positive."""
    config = {"task": "digits", "task.hidden": "32", "task.partition": split, "clients": 12, "seed": 1, "lr": 0.2}
    task = get_task("digits", hidden="32", partition=split)
    initial = ArrayRecord({n: Array(t.detach().numpy()) for n, t in task.model(1).state_dict().items()})
    strategy = Compressed(fedavg(fraction_evaluate=0.0), codec, guard=Norms(), seed=1)
    with InProcessGrid(generic, 12, seed=1) as grid:
        fit(strategy, MeteredGrid(grid), initial, 4, timeout=60, train_config=ConfigRecord(config))
    for r, found in strategy.reports.items():
        ordered = sorted(found.norms.values())
        log.info("round %d: largest norm %.2f times the median", r, ordered[-1] / ordered[len(ordered) // 2])
        assert found.refused == {}
        assert len(found.norms) == 12
