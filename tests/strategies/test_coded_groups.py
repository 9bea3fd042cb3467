"""Relayed shards of group sums: exact whatever the grouping, and a whole group is in or out."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from coded_runs import after_sharing, before_sharing, bits, coded_app, either, run
from flwr.app import Context, Message
from flwr.serverapp.strategy import FedAdam, FedMedian
from test_conservation import residual
from toy import SHAPES, client_app, fedavg, model, stack, update

from fedcomp.clients.coded.mod import coded
from fedcomp.clients.compressed import compression
from fedcomp.codecs import FixedPoint, ModularSum, RandomK, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.coding.partial import PartialSum
from fedcomp.coding.transport import HEADER_BYTES
from fedcomp.errors import ConfigError
from fedcomp.flower.coded import SUM, take_bundle
from fedcomp.flower.faults import RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import put_frame
from fedcomp.flower.protocol import UPDATE
from fedcomp.flower.rounds import fit
from fedcomp.layout import NONE_DENSE, Layout, Update
from fedcomp.rng import Key
from fedcomp.strategies.coded.groups import groups_of
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed

NODES = 9


def codec():
    return FixedPoint(RandomK(1.0), clip=1024.0, levels=1024)


def grouped(inner=None, **options) -> CodedFedAvg:
    settings = {"code": "mds", "symbols": 4, "groups": 3, "collect_timeout": 5.0, **options}
    return CodedFedAvg(Compressed(inner or fedavg(), codec()), **settings)


@pytest.mark.long
def test_however_clients_are_grouped_the_result_has_the_same_bits() -> None:
    runs = {}
    for count in (1, 3, 4, 50):
        transport = ("hub", "peers")[count % 2]
        strategy = grouped(groups=count, transport=transport, seal=bool(count % 3))
        result, _ = run(strategy, NODES, rounds=2, fault=after_sharing([0, 4, 8]))
        assert [len(strategy.reports[r].coded.included) for r in (1, 2)] == [NODES, NODES]
        assert strategy.reports[2].coded.received == min(count, NODES) * 4, "K packets of every group are collected"
        runs[count] = bits(result)
    assert len(set(runs.values())) == 1
    # The float sum of the uncoded pair differs by float32's rounding only.
    plain, _ = run(Compressed(fedavg(), codec()), NODES, rounds=2)
    coded_run, _ = run(grouped(), NODES, rounds=2)
    np.testing.assert_allclose(stack(coded_run.arrays), stack(plain.arrays), rtol=1e-6, atol=1e-3)


@pytest.mark.long
def test_metrics_and_other_means_go_on() -> None:
    coded_run, _ = run(grouped(), NODES)
    plain, _ = run(Compressed(fedavg(), codec()), NODES)
    assert coded_run.train_metrics_clientapp == plain.train_metrics_clientapp

    def adam():
        return FedAdam(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)

    coded_run, _ = run(grouped(adam()), NODES, rounds=3)
    plain, _ = run(Compressed(adam(), codec()), NODES, rounds=3)
    np.testing.assert_allclose(stack(coded_run.arrays), stack(plain.arrays), rtol=1e-5, atol=1e-4)


@pytest.mark.long
def test_the_sum_is_weighted_by_whole_numbers_and_exact() -> None:
    """Against integers: every update of the toy is one, and the step is 1."""
    result, _ = run(grouped(), NODES)
    weights = [10 * (p + 1) for p in range(NODES)]
    for layer, (name, shape) in enumerate(SHAPES.items()):
        exact = sum(w * update(1, p, shape, layer).astype(np.int64) for p, w in enumerate(weights))
        mean = (exact * (1.0 / sum(weights))).astype(np.float32)
        np.testing.assert_array_equal(result.arrays[name].numpy(), mean)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["hub", "peers"])
def test_an_aggregator_lost_before_it_shared_takes_its_group_with_it_and_nobody_else(transport: str) -> None:
    """Round 1: aggregators are partitions 0, 3 and 6; 3 goes before it adds, or before it trains."""

    def before_adding(delivery):
        return "silent" if delivery.partition == 3 and delivery.message_type == SUM else None

    for fault in (before_adding, before_sharing([3])):
        strategy = grouped(transport=transport)
        result, _ = run(strategy, NODES, fault=fault)
        assert len(strategy.reports[1].coded.included) == 6
        assert len(strategy.reports[1].coded.excluded) == 3
        alone, _ = run(grouped(groups=1), NODES, fault=before_sharing([3, 4, 5]))
        assert bits(result) == bits(alone)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["hub", "peers"])
def test_a_member_lost_before_it_joined_is_left_out_with_its_weight(transport: str) -> None:
    strategy = grouped(transport=transport)
    result, _ = run(strategy, NODES, fault=either(before_sharing([4]), after_sharing([1, 7])))
    assert len(strategy.reports[1].coded.included) == 8
    assert list(strategy.reports[1].coded.excluded.values()) == ["no reply in time"]
    alone, _ = run(grouped(groups=1), NODES, fault=before_sharing([4]))
    assert bits(result) == bits(alone)


@pytest.mark.long
def test_a_member_whose_reply_was_lost_is_in_the_sum_between_peers() -> None:
    strategy = grouped(transport="peers")
    result, _ = run(
        strategy, NODES, fault=lambda d: "lost_reply" if (d.partition, d.message_type) == (4, "train") else None
    )
    assert len(strategy.reports[1].coded.included) == NODES
    assert strategy.reports[1].coded.excluded == {}
    whole, _ = run(grouped(), NODES)
    assert bits(result) == bits(whole)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["hub", "peers"])
@pytest.mark.parametrize("error_state", ["discard", pytest.param("keep", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("groups", "integers"),
    [
        (2, FixedPoint(RandomK(0.05), clip=4096.0, levels=4096)),
        ((4, 2), ModularSum(RandomK(0.05), clip=4096.0, levels=4096, summands=6)),
    ],
    ids=["groups", "tree"],
)
def test_conservation_over_groups_under_faults(groups, integers, transport: str, error_state: str) -> None:
    """Integer updates, weight 1, step 1: the model is the exact mean of what was delivered, the rest is owed.

    Of a modular sum what is delivered and what is owed have fractions, which float32 rounds.
    """
    faults = {"lost_reply": 0.05, "silent": 0.05, "raise": 0.04, "duplicate": 0.03, "late": 0.03, "corrupt": 0.02}
    inner = Compressed(
        fedavg(fraction_evaluate=0.0, weighted_by_key="one"),
        ErrorFeedback(integers),
    )
    strategy = CodedFedAvg(inner, code="mds", symbols=3, groups=groups, transport=transport, collect_timeout=5.0)
    taken: dict[int, int] = defaultdict(int)

    def one(msg, context, call_next):
        reply = call_next(msg, context)
        for record in reply.content.metric_records.values() if reply.has_content() else ():
            record["one"] = 1
        return reply

    app = client_app([coded(), compression(), one])
    total = np.zeros(1212)
    consumed = np.zeros(1212)
    nodes_ = 6
    with InProcessGrid(
        app,
        nodes_,
        seed=5,
        fault=RandomFaults(Key(31, "groups"), faults),
        error_state=error_state,  # type: ignore[arg-type]
    ) as grid:
        before = [model()]

        def note(server_round, arrays, outcome) -> None:
            nonlocal consumed
            included = len(strategy.reports[server_round].coded.included)
            consumed = consumed + included * (stack(arrays) - stack(before[0]))
            before[0] = arrays
            taken[server_round] = included

        fit(strategy, grid, model(), 14, timeout=9, on_round=note)
        for partition in range(nodes_):
            context = grid.context(partition)
            if "toy.sum" in context.state:
                total += context.state.array_records["toy.sum"]["sum"].numpy()
            total -= residual(context, inner, grid.node_id_of(partition))
    assert sum(taken.values()) > 28
    assert min(taken.values()) < nodes_
    np.testing.assert_allclose(consumed, total, atol=0.05 * 20)


@pytest.mark.long
def test_a_corrupt_aggregator_can_only_harm_its_own_group() -> None:
    """It can leave members out or put wrong integers in; it cannot name others or exceed the levels."""
    app = coded_app()
    original = PartialSum.to_bytes
    lies = {
        "too large": lambda s: PartialSum(s.integers + 10**9, s.parts),
        "another's member": lambda s: PartialSum(s.integers, tuple(p.__class__(0, *_rest(p)) for p in s.parts[:1])),
        "stale": lambda s: PartialSum(s.integers, tuple(p.__class__(p.index, p.weight, 7, 7, p.note) for p in s.parts)),
        "no metrics": lambda s: PartialSum(s.integers, tuple(p.__class__(*_first(p), b"\xff") for p in s.parts)),
    }

    def _rest(p):
        return p.weight, p.sequence, p.generation, p.note

    def _first(p):
        return p.index, p.weight, p.sequence, p.generation

    for name, lie in lies.items():

        def lying(msg: Message, context: Context, lie=lie) -> Message:
            if msg.metadata.message_type != SUM or context.node_config["partition-id"] != 3:
                return app(msg, context)
            PartialSum.to_bytes = lambda self: original(lie(self))  # type: ignore[method-assign]
            try:
                return app(msg, context)
            finally:
                PartialSum.to_bytes = original  # type: ignore[method-assign]

        strategy = grouped()
        result, _ = run(strategy, NODES, app=lying)
        assert len(strategy.reports[1].coded.included) == 6, name
        alone, _ = run(grouped(groups=1), NODES, fault=before_sharing([3, 4, 5]))
        assert bits(result) == bits(alone), name


@pytest.mark.long
def test_forged_and_damaged_replies_of_members_are_left_out_by_the_aggregator() -> None:
    app = coded_app()

    def dishonest(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        if msg.metadata.message_type == "train" and context.node_config["partition-id"] == 4:
            from fedcomp.coding.transport import Parcel
            from fedcomp.flower.coded import BUNDLE, put_bundle

            (data,) = take_bundle(reply.content, most=1, longest=1 << 20)
            parcel = Parcel.from_bytes(data)
            del reply.content[BUNDLE]
            forged = Parcel(parcel.run, parcel.round, parcel.kind, parcel.source, parcel.destination, parcel.body[:-40])
            put_bundle(reply.content, [forged.to_bytes()])
        return reply

    for seal in (True, False):
        strategy = grouped(seal=seal)
        result, _ = run(strategy, NODES, app=dishonest)
        assert list(strategy.reports[1].coded.excluded.values()) == ["its aggregator did not get its update"]
        assert any("member 4" in reason for reason in strategy.reports[1].coded.refused)
        alone, _ = run(grouped(groups=1), NODES, fault=before_sharing([4]))
        assert bits(result) == bits(alone)


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("sequence", "answers message 1000, expected"),
        ("support", "member 4"),
        ("grid", "member 4"),
        ("weight", "whole number"),
    ],
)
def test_replies_that_are_sound_but_not_of_this_round_are_left_out(change: str, reason: str) -> None:
    """A stale update, one on coordinates of the client's own choice, on another grid, or with half an example."""
    sparse = FixedPoint(RandomK(0.1), clip=1024.0, levels=1024)

    def liar(msg: Message, context: Context, call_next) -> Message:
        reply = call_next(msg, context)
        if context.node_config["partition-id"] != 4 or msg.metadata.message_type != "train":
            return reply
        layout = Layout.of({k: a.numpy() for k, a in model().items()}, NONE_DENSE)
        zero = Update(np.ones(layout.size, np.float32), layout)
        other = {"support": (sparse, 99), "grid": (FixedPoint(RandomK(0.1), clip=512.0, levels=1024), 1)}
        if change in other:
            codec_, round_ = other[change]
            put_frame(reply.content, UPDATE, codec_.encode(zero, codec_.init(layout), Key(0, "uplink", round_, 4))[0])
        elif change == "sequence":
            # Sent to nobody: which node is asked with which number depends on node ids.
            reply.content["fedcomp.node"]["sequence"] = 1000
        else:
            reply.content["metrics"]["num-examples"] = 0.5
        return reply

    app = client_app([coded(), liar, compression()])
    strategy = CodedFedAvg(Compressed(fedavg(), sparse, feedback=False), code="mds", symbols=3, groups=3)
    run(strategy, NODES, app=app)
    assert list(strategy.reports[1].coded.excluded.values()) == ["its aggregator did not get its update"]
    assert any(reason in refusal for refusal in strategy.reports[1].coded.refused), strategy.reports[1].coded.refused
    assert len(strategy.reports[1].coded.included) == NODES - 1


@pytest.mark.long
def test_bytes_are_those_handed_over() -> None:
    strategy = grouped(transport="peers", seal=False)
    _, grid = run(strategy, NODES)
    counted = strategy.reports[1].coded.payload_bytes
    assert grid.ledger.total("wire", link="peer") == counted["peer"]
    # Six members send one reply each, three aggregators eight shards each; headers of all are in the figure.
    assert grid.ledger.total("payload", link="peer") == counted["peer"] - (6 + 3 * 8) * HEADER_BYTES


def test_what_cannot_be_summed_is_refused_with_the_way_out() -> None:
    for inner, reason in (
        (fedavg(), "wrap it: Compressed"),
        (Compressed(fedavg(), TopK(density=0.1)), "not linear"),
        (Compressed(FedMedian(), codec()), "looks at single updates"),
        (Compressed(fedavg(), RandomK(0.1)), "FixedPoint"),
    ):
        with pytest.raises(ConfigError, match=reason):
            CodedFedAvg(inner, groups=2)
    with pytest.raises(ConfigError, match="buffers that travel as values"):
        run(grouped(), NODES, initial=model(counter=True))


def test_groups_are_as_equal_as_can_be() -> None:
    for members in range(1, 20):
        for count in range(1, 25):
            groups = groups_of(list(range(members)), count)  # type: ignore[arg-type]
            assert [m for group in groups for m in group] == list(range(members))
            sizes = [len(group) for group in groups]
            assert len(groups) == min(count, members)
            assert max(sizes) - min(sizes) <= 1
            assert min(sizes) >= 1
