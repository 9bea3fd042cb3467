"""Relayed updates, coded sums and modular sums over messages: what stands inside, who takes no part, what is said."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from coded_runs import after_sharing, before_sharing, bits, run, tapped
from flwr.serverapp.strategy import FedAdam, FedMedian
from toy import SHAPES, by_partition, client_app, fedavg, model, stack, update

from fedcomp.clients.compressed import compression
from fedcomp.codecs import QSGD, FixedPoint, Identity, ModularSum, RandomK, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError, NoUsableReply
from fedcomp.experiments.systems import SYSTEMS
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.flower.tracking import track
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.replies import MAX_RECORDS

NODES = 6
INTEGERS = FixedPoint(RandomK(0.3), clip=2.0**12, levels=2**11)


def relay(inner: Any = None, **options: Any) -> CodedFedAvg:
    return CodedFedAvg(inner or Compressed(fedavg(), QSGD(levels=4)), **{"code": "mds", "symbols": 4, **options})


def coded_sum(codec: Any = INTEGERS, inner: Any = None, **options: Any) -> CodedFedAvg:
    around = inner or Compressed(fedavg(fraction_evaluate=0.0), codec)
    return CodedFedAvg(around, construction="sumcode", **{"symbols": 3, "threshold": 1, **options})


def included(strategy: CodedFedAvg, number: int = 1) -> list[int]:
    return strategy.reports[number].coded.partitions


# What stands inside.


INSIDE: dict[str, Any] = {
    "moments": lambda: Compressed(FedAdam(fraction_evaluate=0.0), TopK(0.1)),
    "median": lambda: Compressed(FedMedian(fraction_evaluate=0.0), QSGD(levels=7)),
    "a downlink": lambda: Compressed(fedavg(), QSGD(levels=7), downlink=TopK(0.1)),
    "whole models": lambda: Compressed(fedavg(), Identity()),
    "buffers": lambda: Compressed(fedavg(), TopK(0.1)),
}


@pytest.mark.parametrize("inside", INSIDE)
def test_a_relay_gives_the_bits_of_the_pair_inside(inside: str) -> None:
    start = {"initial": model(counter=inside == "buffers")}
    for options in ({"symbols": 3}, {"symbols": 2, "threshold": 1}, {"symbols": 2, "code": "rlnc"}):
        strategy = relay(INSIDE[inside](), **options)
        result, _ = run(strategy, NODES, rounds=3, fault=after_sharing([1, 4]), **start)
        assert bits(result) == bits(run(INSIDE[inside](), NODES, rounds=3, **start)[0])
    assert strategy.reports[3].rolled_back == []


def test_a_plain_fedavg_inside_gives_plain_fedavgs_model() -> None:
    result, _ = run(relay(fedavg(), symbols=2), NODES, rounds=2)
    assert bits(result) == bits(run(Compressed(fedavg(), Identity()), NODES, rounds=2)[0])


def test_nodes_make_the_first_model_of_coded_rounds_as_of_those_of_the_pair_inside() -> None:
    sent = []
    for at_nodes in (False, True):
        inner = Compressed(fedavg(), QSGD(levels=7), downlink=TopK(0.1), first_model_at_nodes=at_nodes)
        app = client_app([compression(first_model=lambda msg, context: model())])
        result, grid = run(relay(inner, symbols=2), NODES, rounds=2, app=app)
        sent.append((bits(result), grid.ledger.total("payload", round=1, direction="down", message_type="train")))
    (whole, paid), (without, saved) = sent
    assert whole == without
    assert paid - saved > NODES * 4 * sum(math.prod(shape) for shape in SHAPES.values())


def test_evaluation_is_the_inner_strategys_own() -> None:
    result, _ = run(relay(symbols=2), NODES, rounds=2)
    plain, _ = run(Compressed(fedavg(), QSGD(levels=4)), NODES, rounds=2)
    assert result.evaluate_metrics_clientapp == plain.evaluate_metrics_clientapp
    assert result.train_metrics_clientapp == plain.train_metrics_clientapp


# What is reported.


def test_a_report_says_what_was_planned_and_who_is_in() -> None:
    strategy = relay(symbols=3)
    run(strategy, NODES, rounds=2, fault=before_sharing([2]))
    report = strategy.reports[2].coded
    assert (report.planned, report.symbols, report.shards, report.threshold) == (NODES, 3, NODES, 0)
    assert report.partitions == [0, 1, 3, 4, 5]
    assert (report.received, report.innovative, report.dependent) == (15, 15, 0)
    assert len(report.included) == 5
    assert len(report.excluded) == 1
    assert report.line().startswith("5 of 6 coded updates in ")


def test_a_sum_shows_weights_and_metrics_only_when_it_is_asked_for() -> None:
    quiet = run(coded_sum(), NODES)[0].train_metrics_clientapp[1]
    assert set(quiet) == {"coded.contributors", "coded.weight", "coded.cut"}
    assert quiet["coded.weight"] == 210
    even = run(coded_sum(weighted=False), NODES)[0].train_metrics_clientapp[1]
    assert even["coded.weight"] == NODES
    told = run(coded_sum(metrics=True), NODES)[0].train_metrics_clientapp[1]
    assert {"partition", "seen"} <= set(told)


@pytest.mark.slow
def test_more_clients_may_post_large_shards_than_a_reply_has_other_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each large shard is a record of its own."""
    monkeypatch.setattr("fedcomp.flower.asks.INLINE_LIMIT", 64)
    strategy = relay(symbols=4)
    run(strategy, MAX_RECORDS + 1)
    assert strategy.reports[1].refused == {}
    assert strategy.reports[1].used == MAX_RECORDS + 1


# Who takes no part.


def test_apps_without_keys_answer_directly_and_are_reported() -> None:
    """Half of the clients are of no release of this project: their replies are ordinary ones and count as such."""
    ours, others = client_app([compression()]), client_app()
    strategy = relay(Compressed(fedavg(), Identity()), symbols=2)
    mixed = by_partition(lambda partition: ours if partition < 3 else others)
    result, _ = run(strategy, NODES, app=mixed, rounds=2, fault=after_sharing([1]))
    plain, _ = run(Compressed(fedavg(), Identity()), NODES, rounds=2)
    assert bits(result) == bits(plain)
    assert included(strategy, 2) == [0, 1, 2]
    assert len(strategy.reports[2].coded.direct) == 3
    nobody = relay(Compressed(fedavg(), Identity()), symbols=2)
    assert bits(run(nobody, NODES, app=others)[0]) == bits(run(Compressed(fedavg(), Identity()), NODES)[0])
    assert "an ordinary one; write app = fc.client(app)" in nobody.reports[1].notes[0]
    # Of a sum they have no part.
    strategy = coded_sum(symbols=2)
    run(strategy, NODES, app=by_partition(lambda partition: others if partition == 5 else ours))
    assert included(strategy) == [0, 1, 2, 3, 4]
    (reason,) = strategy.reports[1].coded.excluded.values()
    assert "lacks the client half of CodedFedAvg; write app = fc.client(app)" in reason
    with pytest.raises(NoUsableReply, match=r"round 1: none of the 6 clients .*write app = fc.client\(app\)"):
        run(coded_sum(symbols=2), NODES, app=others)


@pytest.mark.parametrize("kind", ["silent", "raise", "lost_reply"])
def test_nodes_that_are_silent_at_the_hello_are_asked_again(kind: str) -> None:
    def shy(delivery: Delivery) -> str | None:
        return kind if delivery.message_type == "query.hello" and delivery.round == 1 else None

    strategy = relay()
    result, _ = run(strategy, NODES, rounds=2, fault=shy)
    assert [strategy.reports[number].coded.planned for number in (1, 2)] == [0, NODES]
    assert bits(result) == bits(run(Compressed(fedavg(), QSGD(levels=4)), NODES, rounds=2)[0])


@pytest.mark.parametrize(
    ("make", "needed"),
    [
        (lambda: coded_sum(symbols=12, threshold=4), 16),
        (lambda: relay(symbols=12, code="mds"), 12),
        (lambda: relay(symbols=2, shards=9), 9),
    ],
)
def test_clients_that_can_never_suffice_end_the_run_in_its_first_round(make: Any, needed: int) -> None:
    strategy = make()
    with pytest.raises(NoUsableReply, match=f"round 1: 5 clients take part, the code needs {needed}.* lower .*or ask"):
        run(strategy, 5, rounds=3)
    assert list(strategy.reports) == [1]


@pytest.mark.parametrize("make", [lambda: coded_sum(symbols=4, threshold=1), lambda: relay(symbols=5, code="mds")])
def test_losses_skip_a_round_and_a_run_of_such_rounds_alone_is_an_error(make: Any) -> None:
    def lost(delivery: Delivery) -> str | None:
        return "silent" if delivery.partition < 2 and delivery.message_type != "query.hello" else None

    strategy = make()
    run(strategy, NODES, rounds=2, fault=lambda d: lost(d) if d.round == 1 else None)
    assert [report.used for report in strategy.reports.values()] == [0, NODES]
    strategy = make()
    with pytest.raises(NoUsableReply, match="learnt nothing: clients were asked in 2 rounds, no update was used"):
        run(strategy, NODES, rounds=2, fault=lost)
    assert len(strategy.reports) == 2


# What is refused.


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"construction": "relais"}, "did you mean 'relay'"),
        ({"code": "raptor"}, "known: mds, rlnc|one of"),
        ({"transport": "pigeon"}, "transport='pigeon'"),
        ({"stragglers": 3}, "no option 'stragglers'; none are known"),
        ({"spool": "/tmp/x"}, "transport='peers'"),
    ],
)
def test_what_was_chosen_wrongly_is_refused_at_once(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        relay(**options)


@pytest.mark.parametrize(
    ("inner", "options", "message"),
    [
        (Compressed(fedavg(), TopK(0.1)), {}, "is not linear"),
        (Compressed(fedavg(), QSGD(7)), {}, "is not linear"),
        (Compressed(fedavg(), Identity()), {}, "sends whole models"),
        (Compressed(fedavg(), RandomK(0.1, shared=False)), {}, "draws a support for every client"),
        (None, {"min_contributor": 3}, "did you mean 'min_contributors'"),
        (None, {"shards": 3}, "shards=3 are fewer than the 4"),
    ],
)
def test_what_cannot_be_summed_is_refused_with_the_reason(inner: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        coded_sum(inner=inner, **options)


def test_buffers_of_which_there_is_no_sum_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'num_batches_tracked'.*, or construction='relay'$"):
        run(coded_sum(), NODES, initial=model(counter=True))


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_inside_a_sum_shares_its_support_or_is_refused(name: str) -> None:
    """Whatever strategy stands inside: a codec of one grid and one support, or no sum, before any node is asked."""
    system = SYSTEMS[name]
    try:
        inner = system.build(system.resolve({}), 0)
    except ConfigError:
        pytest.skip("cannot be built without a task of its own")
    if isinstance(inner, CodedFedAvg):
        inner = Compressed(inner.inner, inner.system.codecs[0], feedback=False)
    try:
        outer = CodedFedAvg(inner, construction="sumcode", symbols=3, threshold=1, min_contributors=4, weighted=False)
    except ConfigError:
        return
    assert outer.system.fixed.codec.shared is True
    assert outer.system.fixed.codec.linear
    assert np.isfinite(outer.system.fixed.step)


WEIGHT = 10 * NODES * (NODES + 1) // 2
"""Of all clients together: the toy's have 10, 20, ... examples."""


def pair(summands: int = WEIGHT, *, memory: bool = False, levels: int = 1024, **options: Any) -> Compressed:
    codec = ModularSum(RandomK(1.0), clip=1024.0, levels=levels, summands=summands)
    return Compressed(fedavg(**options), ErrorFeedback(codec) if memory else codec, feedback=memory)


def test_the_pair_takes_every_clients_dither_off() -> None:
    """Clients' own integers are on the grid of whole steps: what is left of an update is half a step at most."""
    with InProcessGrid(client_app([compression()]), 3, seed=4) as grid:
        found = stack(fit(pair(1, fraction_evaluate=0.0), MeteredGrid(grid), model(), 1).arrays)
    with InProcessGrid(client_app([compression()]), 3, seed=4) as grid:
        exact = stack(fit(fedavg(fraction_evaluate=0.0), MeteredGrid(grid), model(), 1).arrays)
    error = found - exact
    assert 0 < np.abs(error).max() <= 0.5 + 1e-4
    # Weights 1, 2 and 3 of 6, each error uniform: what a server that forgot the dithers would not have.
    assert error.var() == pytest.approx((1 + 4 + 9) / 36 / 12, rel=0.15)


def test_memory_keeps_what_the_dither_left() -> None:
    """Under error feedback nothing is lost: after many rounds the sum of all updates is there, within a step."""
    with InProcessGrid(client_app([compression()]), 1, seed=4) as grid:
        strategy = pair(1, memory=True, fraction_evaluate=0.0)
        found = stack(fit(strategy, MeteredGrid(grid), model(), 20).arrays)
        (node,) = grid.get_node_ids()
        made = grid.context(node).state.array_records["toy.sum"]["sum"].numpy()
    assert np.abs(found - made).max() <= 0.5 + 1e-2


@pytest.mark.slow
def test_a_sum_in_a_prime_field_takes_the_contributors_dithers_off() -> None:
    """Of equal weights, since the server of a coded sum knows no single one."""
    # Steps of which the toy's whole numbers are no multiples: of those the dither would be all of the error.
    inner = pair(NODES, levels=100, fraction_evaluate=0.0)
    coded = CodedFedAvg(inner, construction="sumcode", symbols=2, threshold=1, weighted=False)
    there, _ = run(coded, NODES, rounds=1)
    assert len(coded.reports[1].coded.included) == NODES
    parts = [[update(1, c, shape, i).reshape(-1) for i, shape in enumerate(SHAPES.values())] for c in range(NODES)]
    exact = np.mean([np.concatenate(part) for part in parts], axis=0)
    # Without the dithers it would be twice as much, with others' three times.
    assert (stack(there.arrays) - exact).var() == pytest.approx(10.24**2 / 12 / NODES, rel=0.2)


def test_a_coded_sum_of_weights_that_nobody_knows_is_refused() -> None:
    options = {"construction": "sumcode", "symbols": 2, "threshold": 1}
    with pytest.raises(ConfigError, match="knows no single weight"):
        CodedFedAvg(pair(), **options)
    CodedFedAvg(Compressed(fedavg(), FixedPoint(RandomK(1.0), clip=1.0)), **options)


def test_a_run_whose_sums_never_fit_ends_in_its_first_round() -> None:
    coded = CodedFedAvg(pair(NODES - 1), construction="sumcode", symbols=2, threshold=1, weighted=False)
    with pytest.raises(ConfigError, match=f"raise summands={NODES - 1} to {NODES}"):
        run(coded, NODES, rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: relay(symbols=2), coded_sum])
def test_a_first_round_in_which_everybody_is_silent_does_not_end_the_run(make: Any) -> None:
    """As with every strategy: that devices vanish says nothing of the set-up, however often they are asked."""
    for silent in (("train", "query"), ("train", "query", "query.hello")):

        def away(delivery: Delivery, silent: tuple[str, ...] = silent) -> str | None:
            return "silent" if delivery.round == 1 and delivery.message_type in silent else None

        strategy = make()
        run(strategy, NODES, rounds=2, fault=away)
        assert [report.used for report in strategy.reports.values()] == [0, NODES]


def test_a_client_that_leaves_several_messages_unanswered_is_one_client_without_a_reply(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def away(delivery: Delivery) -> str | None:
        return "silent" if delivery.partition < 2 and delivery.message_type in ("train", "query") else None

    strategy, grid = relay(symbols=2), tapped(NODES, fault=away)
    shown: list[dict[str, float]] = []
    with caplog.at_level("INFO", logger="flwr"):
        strategy.start(grid, model(), num_rounds=1, timeout=9, evaluate_fn=track(strategy, grid, shown.append))
    assert strategy.reports[1].lost > 2
    assert "6 asked, 4 used, 2 without a reply, " in caplog.text
    assert (shown[-1]["asked"], shown[-1]["answered"]) == (NODES, 4)
