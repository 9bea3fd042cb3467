"""Relayed shards in Flower: whoever shared is in the sum, bit for bit, and acknowledged, whatever became of it."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import numpy as np
import pytest
from coded_runs import after_sharing, before_sharing, bits, break_links, coded_app, either, run
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam
from test_conservation import Sum, residual
from test_sparsifiers_drop_in import EXACT, OTHERS, ROUNDED
from toy import client_app, fedavg, model, stack, with_halves

from fedcomp.clients.coded.mod import coded
from fedcomp.clients.compressed import compression
from fedcomp.codecs import QSGD, Identity, RandomK, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.coding.packet import Packet, PacketLimits
from fedcomp.coding.sealing import OVERHEAD
from fedcomp.coding.transport import HEADER_BYTES, SpoolTransport
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import checkpoint
from fedcomp.flower.coded import take_bundle
from fedcomp.flower.faults import Delivery, RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.hooked import hooked

DEAD = list(combinations(range(10), 3))
# Every registered codec of one exchange: tests/strategies/test_sparsifiers_drop_in.py checks that these are all.
CODECS = (*EXACT, *ROUNDED, *OTHERS, Identity(), QSGD(levels=4), RandomK(0.1))


def pair(codec=None, **options) -> Compressed:
    return Compressed(fedavg(**options), codec or QSGD(levels=4))


def relay(inner=None, **options) -> CodedFedAvg:
    return CodedFedAvg(inner or pair(), **{"code": "mds", "symbols": 7, "collect_timeout": 5.0, **options})


def uncoded(nodes: int = 10, lost=(), rounds: int = 1, codec=None, **options) -> bytes:
    """Return the final model of the same run without coding, with some clients away from the start."""
    result, _ = run(pair(codec), nodes, rounds=rounds, fault=before_sharing(lost), **options)
    return bits(result)


@pytest.mark.slow
def test_all_ways_to_lose_three_after_sharing_leave_the_sum_as_it_is() -> None:
    """Every tenth of the 120 (all of them in tests/coding/test_relay_plan.py): all ten updates, the very same bits."""
    whole = uncoded()
    for number, dead in enumerate(DEAD[::10]):
        strategy = relay(transport=("peers", "hub")[number % 2], seal=bool(number % 3))
        result, _ = run(strategy, fault=after_sharing(dead))
        assert bits(result) == whole, dead
        report = strategy.reports[1].coded
        assert (report.planned, len(report.included), report.excluded) == (10, 10, {})
        assert 2 <= report.waves <= 4, "a wave replaces those that did not answer the one before"


@pytest.mark.slow
def test_random_codes_do_the_same() -> None:
    whole = uncoded()
    for dead in (DEAD[0], DEAD[57], DEAD[119]):
        strategy = relay(code="rlnc", transport="peers", seed=1)
        result, _ = run(strategy, fault=after_sharing(dead))
        assert bits(result) == whole
        assert strategy.reports[1].coded.excluded == {}


def singular_seed() -> tuple[int, int, tuple[int, ...]]:
    """Return a seed, a source that is alive and three lost relays with which its shards have rank 6 of 7."""
    from fedcomp.coding.elimination import rank
    from fedcomp.coding.relay import RelayPlan

    for seed in range(100):
        plan = RelayPlan("rlnc", 7, 10, 1, seed=seed)
        for source in range(10):
            rows = [Packet.from_bytes(p, plan.limits).row() for p in plan.packets(source, bytes(2000))]
            for dead in DEAD:
                alive = [i for i, relay in enumerate(plan.holders(source, 10)) if relay not in dead]
                if source not in dead and rank(np.stack([rows[i] for i in alive])) < 7:
                    return seed, source, dead
    raise AssertionError("no singular matrix among 120 000 is impossible")


@pytest.mark.slow
def test_seven_random_shards_that_depend_on_each_other_take_one_recollection() -> None:
    seed, source, dead = singular_seed()
    strategy = relay(code="rlnc", seed=seed)
    result, _ = run(strategy, fault=after_sharing(dead))
    report = strategy.reports[1].coded
    assert bits(result) == uncoded()
    assert report.recollects >= 1
    assert report.dependent >= 1
    # The same contributor gone as well: nobody can make the shard that is lacking, and nothing of its update is used.
    away = relay(code="rlnc", seed=seed)

    def silent_twice(delivery: Delivery) -> str | None:
        late = delivery.message_type == "query.coded_collect" and delivery.partition == source
        return "silent" if late and delivery.exchange > 4 else after_sharing(dead)(delivery)

    result, _ = run(away, fault=silent_twice)
    assert len(away.reports[1].coded.excluded) == 1
    assert "6 independent shards" in next(iter(away.reports[1].coded.excluded.values()))
    assert bits(result) == uncoded(lost=[source])


def too_few(partition: int, shards: int):
    """Return an app in which one client's links break after so many shards, and the client then vanishes."""
    app, count = coded_app(), [0]
    original = SpoolTransport.send

    def send(self, address, parcel, whose=None):
        if parcel.source == partition:
            count[0] += 1
            if count[0] > shards:
                from fedcomp.coding.transport import DeliveryFailed

                raise DeliveryFailed("the link broke")
        return original(self, address, parcel)

    return app, send


@pytest.mark.slow
@pytest.mark.parametrize(("landed", "included"), [(6, 9), (7, 10)])
def test_a_client_counts_from_the_shard_that_completes_it_on(monkeypatch, landed: int, included: int) -> None:
    """With K - 1 shards shared it is excluded with its weight, with K it is in; it vanishes either way."""
    app, send = too_few(4, landed)
    monkeypatch.setattr(SpoolTransport, "send", send)
    strategy = relay(transport="peers")
    gone = either(
        lambda d: "lost_reply" if d.partition == 4 and d.message_type == "train" else None, after_sharing([4])
    )
    result, _ = run(strategy, app=app, fault=gone)
    report = strategy.reports[1].coded
    assert len(report.included) == included
    assert bits(result) == uncoded(lost=[] if included == 10 else [4])
    if included == 9:
        (reason,) = report.excluded.values()
        assert reason == "no reply in time; 6 independent shards of source 4 came, 7 are needed"


@pytest.mark.slow
def test_four_lost_of_ten_skips_the_round_and_leaves_the_model_as_it_was() -> None:
    for transport in ("hub", "peers"):
        strategy = relay(transport=transport)
        lost = after_sharing([1, 4, 5, 8], rounds=[2])
        result, _ = run(strategy, rounds=3, fault=lost)
        alone, _ = run(relay(transport=transport), rounds=3, fault=after_sharing([0, 1, 4, 5, 8], rounds=[2]))
        assert len(strategy.reports[2].coded.excluded) == 10
        assert "the model is unchanged" in strategy.reports[2].coded.notes[0]
        assert strategy.inner.reports[2].compressed == 0
        assert len(strategy.reports[3].coded.included) == 10
        assert bits(result) == bits(alone), "it does not matter which ones are missing when nobody is decodable"
        once, _ = run(relay(transport=transport), rounds=1)
        twice, _ = run(relay(transport=transport), rounds=2, fault=lost)
        assert bits(twice) == bits(once)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS[::4], ids=repr)
def test_every_codec_rides_in_the_shards(codec) -> None:
    """Frames of every kind and length, two rounds, a client that vanishes after sharing in each of them."""
    strategy = CodedFedAvg(Compressed(fedavg(), codec), code="mds", symbols=2, seal=False)
    result, _ = run(strategy, 3, rounds=2, fault=after_sharing([1]))
    assert [len(strategy.reports[r].coded.included) for r in (1, 2)] == [3, 3]
    plain, _ = run(Compressed(fedavg(), codec), 3, rounds=2)
    assert bits(result) == bits(plain)
    assert strategy.inner.reports[2].refused == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hub", "peers"])
def test_counted_bytes_are_the_lengths_of_what_was_handed_over(monkeypatch, kind: str) -> None:
    handed: list[int] = []
    collected: list[int] = []
    original = SpoolTransport.send

    def send(self, address, parcel, whose=None):
        size = original(self, address, parcel)
        assert size == len(parcel.to_bytes())
        handed.append(size)
        return size

    monkeypatch.setattr(SpoolTransport, "send", send)
    app = coded_app()

    def listening(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        items = take_bundle(reply.content, most=100, longest=1 << 20)
        if msg.metadata.message_type == "query.coded_collect":
            for data in items:
                Packet.from_bytes(data, PacketLimits())
            collected.extend(map(len, items))
        elif msg.metadata.message_type == "train":
            handed.extend(map(len, items))
        return reply

    strategy = relay(transport=kind)
    _, grid = run(strategy, app=listening)
    counted = strategy.reports[1].coded.payload_bytes
    assert len(handed) == 10 * 9
    assert len(collected) == 10 * 7, "seven relays were asked, each for one shard of everybody"
    if kind == "hub":
        assert counted == {"hub_up": sum(handed) + sum(collected), "hub_down": sum(handed)}
        assert grid.ledger.total("wire", link="peer") == 0
    else:
        assert counted == {"peer": sum(handed), "hub_up": sum(collected)}
        assert grid.ledger.total("wire", link="peer") == sum(handed)
        assert grid.ledger.total("payload", link="peer") == sum(handed) - 90 * HEADER_BYTES
    clear = relay(transport=kind, seal=False)
    _, bare = run(clear)
    assert sum(counted.values()) - sum(clear.reports[1].coded.payload_bytes.values()) == OVERHEAD * 90 * (
        2 if kind == "hub" else 1
    ), "a sealed shard is so much longer on every link it is sealed on"
    assert bare.ledger.total("wire", direction="up") < grid.ledger.total("wire", direction="up")


@pytest.mark.slow
def test_bytes_of_a_sender_that_vanished_are_counted_by_those_who_hold_them() -> None:
    def lost(delivery: Delivery) -> str | None:
        return "lost_reply" if delivery.partition == 3 and delivery.message_type == "train" else None

    whole, reported, partly = (relay(transport="peers") for _ in range(3))
    _, grid = run(whole)
    run(reported, fault=lost)
    assert reported.reports[1].coded.payload_bytes["peer"] == whole.reports[1].coded.payload_bytes["peer"]
    # With three relays gone the sender itself is asked as one: what it keeps of its own was never sent to anybody, and
    # what those three got of it nobody has seen.
    run(partly, fault=either(lost, after_sharing([0, 1, 2])))
    one = grid.ledger.total("wire", link="peer", node=3) // 9
    assert len(partly.reports[1].coded.included) == 10
    assert partly.reports[1].coded.payload_bytes["peer"] == whole.reports[1].coded.payload_bytes["peer"] - 3 * one


@pytest.mark.slow
@pytest.mark.parametrize("seal", [True, False])
def test_what_passes_the_server_is_sealed(seal: bool) -> None:
    """With seal=True no parcel the server forwards holds a packet it can read."""
    app, readable = coded_app(), []

    def watching(msg: Message, context: Context) -> Message:
        if msg.metadata.message_type == "query.coded_put":
            for data in take_bundle(msg.content, most=100, longest=1 << 20):
                readable.append(data[HEADER_BYTES : HEADER_BYTES + 2] == b"RL")
        return app(msg, context)

    run(relay(seal=seal), app=watching)
    assert readable
    assert any(readable) is not seal
    assert relay().construction.seal is True, "sealing is the default"


@pytest.mark.slow
def test_a_plain_fedavg_inside_gives_plain_fedavgs_bits_and_takes_nan_as_it_is() -> None:
    strategy = CodedFedAvg(fedavg(), symbols=2)
    result, _ = run(strategy, 4, rounds=2, fault=after_sharing([2]))
    plain, _ = run(fedavg(), 4, rounds=2)
    assert bits(result) == bits(plain)
    assert result.train_metrics_clientapp == plain.train_metrics_clientapp

    def broken(mods):
        app = with_halves(mods)

        @app.train()
        def train(msg: Message, context: Context) -> Message:
            p = int(context.node_config["partition-id"])
            weight = np.zeros((4, 4), np.float32) if p else np.full((4, 4), np.nan, np.float32)
            content = RecordDict({"arrays": ArrayRecord({"w": Array(weight)}), "m": MetricRecord({"num-examples": 1})})
            return Message(content, reply_to=msg)

        return app

    initial = ArrayRecord({"w": Array(np.ones((4, 4), np.float32))})
    coded_run, _ = run(CodedFedAvg(fedavg(fraction_evaluate=0.0)), 3, app=broken([coded()]), initial=initial)
    plain_run, _ = run(fedavg(fraction_evaluate=0.0), 3, app=broken([]), initial=initial)
    assert bits(coded_run) == bits(plain_run)
    assert np.isnan(coded_run.arrays["w"].numpy()).all()


@pytest.mark.slow
def test_fedadam_inside_keeps_its_moments() -> None:
    def inner():
        return Compressed(FedAdam(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0), TopK(density=0.1))

    result, _ = run(CodedFedAvg(inner(), symbols=3), 5, rounds=3, fault=after_sharing([0]))
    plain, _ = run(inner(), 5, rounds=3)
    assert bits(result) == bits(plain)


@pytest.mark.slow
def test_evaluation_is_the_inner_strategys_own() -> None:
    coded_run, _ = run(relay(pair(fraction_evaluate=0.5)), rounds=2)
    plain, _ = run(pair(fraction_evaluate=0.5), rounds=2)
    assert coded_run.evaluate_metrics_clientapp == plain.evaluate_metrics_clientapp
    assert coded_run.train_metrics_clientapp == plain.train_metrics_clientapp


@pytest.mark.slow
def test_a_compressed_downlink_goes_on_when_clients_vanish() -> None:
    def inner():
        return Compressed(fedavg(), TopK(density=0.05), downlink=TopK(density=0.1))

    result, _ = run(relay(inner()), rounds=3, fault=after_sharing([2, 6], rounds=[2]))
    plain, _ = run(inner(), rounds=3)
    assert bits(result) == bits(plain)


@pytest.mark.slow
def test_the_order_of_arrival_changes_nothing() -> None:
    results = {bits(run(relay(code="rlnc"), rounds=2, seed=3, shuffle_replies=shuffle)[0]) for shuffle in (True, False)}
    assert len(results) == 1


@pytest.mark.slow
def test_private_shards_need_reed_solomon_and_survive_what_is_left() -> None:
    strategy = relay(symbols=4, threshold=2)
    result, _ = run(strategy, rounds=2, fault=after_sharing([0, 4, 9]))
    assert bits(result) == uncoded(rounds=2)
    assert (strategy.reports[1].coded.symbols, strategy.reports[1].coded.threshold) == (4, 2)
    with pytest.raises(ConfigError, match="needs code='mds'"):
        relay(code="rlnc", threshold=2)


@pytest.mark.slow
def test_fewer_shards_than_clients_go_to_those_that_follow() -> None:
    strategy = relay(symbols=3, shards=4)
    result, _ = run(strategy, rounds=3, fault=after_sharing([7]))
    assert bits(result) == uncoded(rounds=3)
    report = strategy.reports[1].coded
    assert (report.symbols, report.shards, report.relays) == (3, 4, 10)
    assert report.received == 10 * 3


def test_too_few_clients_skip_the_round_with_the_reason_in_the_report() -> None:
    for options in ({"symbols": 7}, {"symbols": 2, "shards": 9}, {"symbols": 4, "loss": 0.3}):
        strategy = relay(**options)
        result, _ = run(strategy, 4)
        assert bits(result) == b"".join(a.numpy().tobytes() for a in model().values())
        assert "the round is skipped, the model is unchanged" in strategy.reports[1].coded.notes[0]
        assert len(strategy.reports[1].coded.excluded) == 4
    with pytest.raises(ConfigError, match="fewer than the 7"):
        relay(shards=6)


def test_what_was_chosen_wrongly_is_refused_at_once() -> None:
    for options, reason in (
        ({"construction": "relais"}, "did you mean 'relay'"),
        ({"code": "raptor"}, "known: mds, rlnc"),
        ({"transport": "pigeon"}, "transport='pigeon'"),
        ({"stragglers": 3}, "no option 'stragglers'; none are known"),
        ({"spool": "/tmp/x"}, "transport='peers'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            relay(**options)
    with pytest.raises(ConfigError, match="exchanges of its own"):
        CodedFedAvg(relay())
    with pytest.raises(ConfigError, match="Flower Strategy"):
        CodedFedAvg("fedavg")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_lost_reply_after_sharing_between_peers_still_counts_and_is_acknowledged() -> None:
    def lost(delivery: Delivery) -> str | None:
        return "lost_reply" if delivery.partition in (2, 5) and delivery.message_type == "train" else None

    inner = pair(ErrorFeedback(TopK(density=0.1)))
    strategy = relay(inner, transport="peers")
    inner = strategy.inner
    result, _ = run(strategy, rounds=3, fault=lost)
    assert bits(result) == uncoded(rounds=3, codec=ErrorFeedback(TopK(density=0.1)))
    assert [inner.reports[r].rolled_back for r in (1, 2, 3)] == [[], [], []]
    # Through the server the shards are in the lost reply.
    strategy = relay(pair(ErrorFeedback(TopK(density=0.1))))
    run(strategy, rounds=2, fault=lost)
    assert [len(strategy.reports[r].coded.included) for r in (1, 2)] == [8, 8]
    assert len(strategy.inner.reports[2].rolled_back) == 0, "they never answered again"


@pytest.mark.slow
def test_a_client_that_says_it_failed_is_not_counted_although_its_shards_are_there() -> None:
    """Its memory may be what it was before the message: counting the shards would count that mass twice."""

    def crash(delivery: Delivery) -> str | None:
        return "raise" if delivery.partition == 1 and delivery.message_type == "train" else None

    strategy = relay(transport="peers")
    result, _ = run(strategy, fault=crash)
    assert bits(result) == uncoded(lost=[1])
    (reason,) = strategy.reports[1].coded.excluded.values()
    assert "error 2" in reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "broken"), [("hub", False), pytest.param("peers", False, marks=pytest.mark.long), ("peers", True)]
)
@pytest.mark.parametrize("error_state", ["discard", pytest.param("keep", marks=pytest.mark.long)])
def test_conservation_with_clients_that_vanish_before_and_after_sharing(
    transport: str, broken: bool, error_state: str, monkeypatch
) -> None:
    """Updates made = delivered + owed, exactly, for every life of every node, under every fault in every exchange."""
    if broken:
        break_links(monkeypatch)
    plan = RandomFaults(
        Key(23, "faults"),
        {
            "lost_reply": 0.05,
            "silent": 0.05,
            "duplicate": 0.03,
            "late": 0.03,
            "raise": 0.03,
            "corrupt": 0.02,
            "offline": 0.02,
        },
    )
    rounds, nodes_ = 25, 8
    inner = Sum()
    pair_ = hooked(Compressed(inner, ErrorFeedback(TopK(density=0.01))))
    strategy = CodedFedAvg(pair_, code="mds", symbols=4, transport=transport, collect_timeout=5.0)
    made: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(1212))
    owed: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(1212))
    wipes = 0
    with InProcessGrid(coded_app(), nodes_, seed=5, fault=plan, error_state=error_state) as grid:  # type: ignore[arg-type]

        def settle(partition: int) -> None:
            context = grid.context(partition)
            if "toy.sum" in context.state:
                made[partition] += context.state.array_records["toy.sum"]["sum"].numpy()
            owed[partition] += residual(context, pair_, grid.node_id_of(partition))

        def wipe(server_round, arrays, outcome) -> None:
            nonlocal wipes
            for partition in range(nodes_):
                if Key(13, "wipe", server_round, partition).uniform(1)[0] < 0.03:
                    settle(partition)
                    grid.wipe(partition)
                    wipes += 1

        result = fit(strategy, grid, model(), rounds, timeout=9, on_round=wipe)
        for partition in range(nodes_):
            settle(partition)
    assert wipes >= 2
    reports = [report.coded for report in strategy.reports.values()]
    assert sum(len(r.included) for r in reports) > rounds * nodes_ // 2
    assert sum(len(r.excluded) for r in reports) > rounds // 4
    if (transport, error_state) != (
        "peers",
        "discard",
    ):  # there a frame that was not consumed was not remembered either
        assert sum(len(r.rolled_back) for r in pair_.reports.values()) > 0
    for partition in range(nodes_):
        np.testing.assert_array_equal(inner.delivered[partition] + owed[partition], made[partition])
    np.testing.assert_array_equal(stack(result.arrays), sum(inner.delivered.values()))


@pytest.mark.slow
def test_a_run_that_is_interrupted_and_resumed_gives_the_same_bits(tmp_path) -> None:
    def build(transport):
        faults = RandomFaults(Key(3, "resume"), {"lost_reply": 0.1, "silent": 0.05})
        grid = MeteredGrid(InProcessGrid(coded_app(), 6, seed=3, fault=faults), TrafficLedger())
        strategy = CodedFedAvg(pair(TopK(density=0.1)), symbols=3, transport=transport, seed=4, collect_timeout=3.0)
        return strategy, grid

    for transport in ("hub", "peers"):
        strategy, grid = build(transport)
        whole = fit(strategy, grid, model(), 6, timeout=9)
        first, first_grid = build(transport)

        def keep(server_round, arrays, outcome, first=first, first_grid=first_grid) -> None:
            if server_round == 3:
                checkpoint.save(tmp_path / "run", server_round=3, arrays=arrays, strategy=first, grid=first_grid)

        fit(first, first_grid, model(), 3, timeout=9, on_round=keep)
        second, second_grid = build(transport)
        held = checkpoint.load(tmp_path / "run")
        held.apply(second, second_grid)
        resumed = fit(second, second_grid, held.arrays, 6, start_round=4, timeout=9)
        assert bits(resumed) == bits(whole)
        assert second.reports == strategy.reports
        if transport == "hub":
            assert second_grid.ledger.total("wire") == grid.ledger.total("wire")
        other = CodedFedAvg(pair(TopK(density=0.1)), code="mds", symbols=3)
        with pytest.raises(StateError, match="saved with"):
            other.load_state_dict(second.state_dict())


@pytest.mark.slow
def test_a_node_that_joins_says_hello_once_and_takes_part_in_the_next_round() -> None:
    with InProcessGrid(coded_app(), 5, seed=3) as inner:
        grid = MeteredGrid(inner, TrafficLedger())
        strategy = CodedFedAvg(pair(), symbols=3)

        def join(server_round, arrays, outcome) -> None:
            if server_round == 1:
                inner.add_node()

        fit(strategy, grid, model(), 3, timeout=9, on_round=join)
    assert [strategy.reports[r].coded.planned for r in (1, 2, 3)] == [5, 6, 6]
    assert grid.ledger.by("round", "messages", message_type="query.coded_hello", direction="down") == {1: 5, 2: 1}


@pytest.mark.slow
def test_a_node_that_lost_its_state_says_its_new_key_and_is_a_relay_again() -> None:
    with InProcessGrid(coded_app(), 6, seed=3) as inner:
        strategy = CodedFedAvg(pair(), code="mds", symbols=3, collect_timeout=5.0)

        def wipe(server_round, arrays, outcome) -> None:
            if server_round == 1:
                inner.wipe(2)

        result = fit(strategy, MeteredGrid(inner, TrafficLedger()), model(), 3, timeout=9, on_round=wipe)
    assert [len(strategy.reports[r].coded.included) for r in (1, 2, 3)] == [6, 6, 6]
    assert any("does not open" in reason for reason in strategy.reports[2].coded.refused)
    assert strategy.reports[3].coded.refused == []
    plain, _ = run(pair(), 6, rounds=3)
    assert bits(result) == bits(plain)


@pytest.mark.slow
def test_apps_without_the_mod_answer_directly_and_are_reported() -> None:
    """Half of the clients know nothing of coding: their replies are ordinary ones and count as such."""
    with_mod, without = coded_app(), client_app([compression()])

    def mixed(msg: Message, context: Context) -> Message:
        return (with_mod if context.node_config["partition-id"] < 5 else without)(msg, context)

    strategy = relay(symbols=3)
    result, grid = run(strategy, app=mixed, rounds=2, fault=after_sharing([1]))
    assert bits(result) == uncoded(rounds=2)
    assert len(strategy.reports[2].coded.included) == 5
    assert len(strategy.reports[2].coded.direct) == 5
    assert all("wrap it in fedcomp.client()" in reason for reason in strategy.reports[2].coded.direct.values())
    assert grid.ledger.total("messages", message_type="query.coded_hello", direction="down") == 10, "asked once"

    nobody = relay()
    result, _ = run(nobody, app=without)
    assert bits(result) == uncoded()
    assert "an ordinary one" in nobody.reports[1].coded.notes[0]


@pytest.mark.slow
def test_nodes_that_are_silent_at_the_hello_are_asked_again() -> None:
    def shy(delivery: Delivery) -> str | None:
        return "silent" if delivery.message_type == "query.coded_hello" and delivery.round == 1 else None

    strategy = relay()
    result, _ = run(strategy, rounds=2, fault=shy)
    assert [strategy.reports[r].coded.planned for r in (1, 2)] == [0, 10]
    assert bits(result) == uncoded(rounds=2)


@pytest.mark.slow
def test_integer_buffers_and_statistics_ride_along() -> None:
    strategy = CodedFedAvg(Compressed(fedavg(), Identity()), symbols=2)
    result, _ = run(strategy, 4, rounds=2, initial=model(counter=True), fault=after_sharing([3]))
    plain, _ = run(Compressed(fedavg(), Identity()), 4, rounds=2, initial=model(counter=True))
    assert bits(result) == bits(plain)
    assert result.arrays["num_batches_tracked"].numpy().dtype == np.int64
