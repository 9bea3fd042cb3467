"""Poisson rounds: nothing that leaves the server follows who took part, unless it is asked for and paid for."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datalens_toy
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from plain_grid import Blind
from private_runs import inner
from toy import client_app, model, with_halves

from fedcomp.clients.compressed import compression
from fedcomp.clients.private.datalens import datalens_teachers
from fedcomp.clients.private.mod import private
from fedcomp.codecs import TopK
from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments.spec import RoundRecord, RunSpec
from fedcomp.flower.asks import find_ask
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.privacy import SECRET as MARK
from fedcomp.flower.privacy import find_private
from fedcomp.layout import Layout
from fedcomp.privacy.sampling import Sampling
from fedcomp.privacy.votes import TopkSign
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.lsg import Lsg
from fedcomp.strategies.private.topagg import topagg
from fedcomp.systems.private.datalens import Teachers
from fedcomp.systems.private.lsg import LowRank

NODES, ROUNDS = 12, 3
SECRET = Sampling("poisson", rate=0.5)
SHOWN = Sampling("poisson", rate=0.5, reveal_participation=True)


def twins(app: ClientApp | None = None) -> MeteredGrid:
    """Return a metered grid of nodes whose configuration was copied: all of them declare partition 0."""
    app = client_app([compression(), private()]) if app is None else app
    return MeteredGrid(Blind(app, NODES, seed=4, node_config=lambda _partition: {"partition-id": 0}))


SYSTEMS: dict[str, Callable[..., Any]] = {
    "clipped": lambda **promise: DpFedAvg(inner(), clip=1.0, **promise),
    "clipped, in the pair": lambda **promise: Compressed(DpFedAvg(inner(), clip=1.0, **promise), TopK(0.05)),
    "votes": lambda **promise: topagg(inner(), TopkSign(k=50), server_lr=0.25, **promise),
    "low rank": lambda **promise: Lsg(inner(), LowRank(clip=1.0, rank=3, keep=0.5), **promise),
    "teachers": lambda population, delta, **promise: datalens_toy.strategy(
        adjacency="zero_out", clients=population, **promise
    ),
}
"""Every system of which one round costs less where nobody knows who took part."""


def told(
    sampling: Sampling, seed: int, system: str, caplog: pytest.LogCaptureFixture, grid: Grid | None = None
) -> tuple[str, str, list[int]]:
    """Return what the log and the reports of a run say, and how many clients took part in each round."""
    strategy: Any = SYSTEMS[system](
        noise_multiplier=4.0, population=NODES, delta=1e-3, sampling=sampling, insecure_deterministic=True, seed=seed
    )
    ledger = find_private(strategy).privacy  # type: ignore[union-attr]
    caplog.clear()
    if grid is None:
        app = datalens_toy.client() if system == "teachers" else client_app([compression(), private()])
        grid = InProcessGrid(app, NODES, seed=4)
    start = datalens_toy.model() if system == "teachers" else model()
    with caplog.at_level(logging.INFO, "flwr"):
        strategy.start(grid, start, num_rounds=ROUNDS)
    reports = json.dumps({r: report.to_json() for r, report in strategy.reports.items()})
    counts = [len(entry.participants) for entry in ledger.entries]
    return without_times(caplog), re.sub(r'"moved": [0-9.]+', "", reports), counts


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_a8_log_and_reports_are_the_same_whoever_was_drawn(system: str, caplog: pytest.LogCaptureFixture) -> None:
    runs = [told(SECRET, seed, system, caplog) for seed in (1, 2, 3)]
    assert len({tuple(counts) for _, _, counts in runs}) > 1, "different clients took part"
    assert len({reports for _, reports, _ in runs}) == 1
    assert len({log for log, _, _ in runs}) == 1
    assert "withheld" in runs[0][1]


@pytest.mark.parametrize("system", ["clipped", "clipped, in the pair", "teachers"])
def test_a8_the_log_of_nodes_with_one_configuration_names_nobody_who_was_drawn(
    system: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = datalens_toy.client() if system == "teachers" else None
    runs = [told(SECRET, seed, system, caplog, twins(app)) for seed in (1, 2, 3)]
    assert len({tuple(counts) for _, _, counts in runs}) > 1, "different clients took part"
    assert len({log for log, _, _ in runs}) == 1
    assert "claims" not in runs[0][0]
    # Where nothing rests on it the line is there.
    assert "claims partition 0" in told(SHOWN, 1, system, caplog, twins(app))[0]


@pytest.mark.parametrize("secret", [True, False])
def test_a8_a_meter_that_continues_knows_which_late_replies_are_secret(
    secret: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The replies of a secret round may come after the meter was stored and restored."""
    content = RecordDict({"config": ConfigRecord({MARK: secret, "server-round": 1}), "arrays": model()})
    grid, again = twins(), twins()
    ids = grid.push_messages([Message(content, node, "train") for node in grid.get_node_ids()])
    again.restore(grid.snapshot())
    with caplog.at_level(logging.INFO, "flwr"):
        assert not any(reply.has_error() for reply in again.pull_messages(ids))
    assert ("claims partition 0" in caplog.text) != secret


@pytest.mark.slow
@pytest.mark.parametrize("system", ["clipped", "clipped, in the pair"])
def test_a8_who_asks_for_participation_sees_it(system: str, caplog: pytest.LogCaptureFixture) -> None:
    runs = [told(SHOWN, seed, system, caplog) for seed in (1, 2, 3)]
    assert len({reports for _, reports, _ in runs}) > 1
    assert len({log for log, _, _ in runs}) > 1


@pytest.mark.slow
def test_a8_a_clients_messages_do_not_count_the_others() -> None:
    """What a client is sent in a round is the same whether it was drawn alone or among many."""
    seen: dict[int, set[int]] = {}

    def spy(msg, context, call_next):
        head = find_ask(msg.content)
        seen.setdefault(head.number, set()).add(head.sequence)
        return call_next(msg, context)

    strategy = DpFedAvg(inner(), clip=1.0, noise_multiplier=4.0, population=NODES, delta=1e-3, sampling=SECRET)
    grid = InProcessGrid(client_app([spy, compression(), private()]), NODES, seed=4)
    Compressed(strategy, TopK(0.05)).start(grid, model(), num_rounds=ROUNDS)
    asked = {entry.round for entry in strategy.privacy.entries if entry.participants}
    assert seen == {r: {r} for r in asked}


@pytest.mark.slow
def test_a8_participation_that_is_shown_amplifies_nothing() -> None:
    def epsilon(sampling: Sampling | None) -> float:
        strategy = DpFedAvg(inner(), clip=1.0, noise_multiplier=4.0, population=NODES, delta=1e-3, sampling=sampling)
        for r in (1, 2):
            strategy.privacy.record(strategy.event(strategy.mechanism(Layout.flat(4), r), 4), round=r)
        return strategy.privacy.epsilon()

    assert epsilon(SECRET) < 0.7 * epsilon(SHOWN)
    assert epsilon(SHOWN) == epsilon(None)
    assert SHOWN.expected(NODES) == SECRET.expected(NODES) == 6.0, "the divisor is the rate's all the same"
    assert SHOWN.describe() == Sampling().describe()
    with pytest.raises(ConfigError, match="reveal_participation"):
        Sampling("everyone", reveal_participation=True)


def test_a8_a_generators_rounds_tell_nothing_of_who_voted() -> None:
    for sampling, distinct in ((SECRET, False), (SHOWN, True)):
        seen = set()
        for seed in (1, 2, 3):
            strategy = datalens_toy.strategy(sampling=sampling, adjacency="zero_out", seed=seed, clients=NODES)
            over = datalens_toy.grid(nodes=NODES)
            result = strategy.start(over, datalens_toy.model(), num_rounds=1, timeout=9)
            report = strategy.reports[1]
            seen.add((report.asked, report.used, report.lost, report.datalens.answered))
            shown = dict(result.train_metrics_clientapp[1])
            assert ("datalens.answered" in shown) == distinct
        assert (len(seen) > 1) == distinct


def without_times(caplog: pytest.LogCaptureFixture) -> str:
    """Return the log without addresses, seconds, and what moved, which may be released and depends on the seed.

    The messages alone: what a handler writes before them, a time for one, is for who set the handler up.
    """
    changing = r"finished in [0-9.]+s|0x[0-9a-f]+|datalens.moved[^}]*}"
    return re.sub(changing, "", "\n".join(caplog.messages), flags=re.DOTALL)


def told_of_a_generator(sampling: Sampling, seed: int, caplog: pytest.LogCaptureFixture) -> tuple[str, int]:
    """Return the log of a round in which the first six clients fail if drawn, and how many of them were drawn."""

    def failing(message: Message, context: Context, request: Teachers) -> datalens_toy.ToyEnsemble:
        if int(context.node_config["partition-id"]) < NODES // 2:
            raise RuntimeError("its own words")
        return datalens_toy.ensemble(message, context, request)

    strategy = datalens_toy.strategy(sampling=sampling, adjacency="zero_out", seed=seed, clients=NODES)
    over = datalens_toy.grid(with_halves([datalens_teachers(failing), compression()]), nodes=NODES)
    fail = {over.node_id_of(partition) for partition in range(NODES // 2)}
    # What a client logs is on its own node; here that is the same process.
    logging.getLogger("flwr.fedcomp").addFilter(_of_the_server)
    caplog.clear()
    try:
        with caplog.at_level(logging.INFO, "flwr"):
            strategy.start(over, datalens_toy.model(), num_rounds=1, timeout=9)
    finally:
        logging.getLogger("flwr.fedcomp").removeFilter(_of_the_server)
    return without_times(caplog), len(fail & set(strategy.privacy.entries[0].participants))


def _of_the_server(record: logging.LogRecord) -> bool:
    return "this client failed" not in record.getMessage()


def test_a8_a_generators_log_does_not_say_whether_a_failing_client_was_drawn(caplog: pytest.LogCaptureFixture) -> None:
    few = Sampling("poisson", rate=0.15)
    runs = [told_of_a_generator(few, seed, caplog) for seed in range(6)]
    assert len({drawn > 0 for _, drawn in runs}) == 2, "in some runs a failing client was drawn, in others none"
    assert len({log for log, _ in runs}) == 1
    shown, drawn = told_of_a_generator(SHOWN, 1, caplog)
    assert drawn > 0
    assert "reply not used" in shown


SETTINGS = {
    "task.hidden": "8",
    "codec": "topk",
    "codec.density": 0.1,
    "sampling": "poisson",
    "rate": 0.5,
    "delta": 1e-2,
    "noise_multiplier": 2.0,
    "insecure_deterministic": True,
    "max_steps": 1,
}


@pytest.mark.slow
def test_a8_records_of_a_run_hold_the_expected_bytes_and_nobody() -> None:
    results = [engines.run(RunSpec("dp-fedavg", rounds=3, clients=8, seed=seed, settings=SETTINGS)) for seed in (0, 5)]
    rounds = [record for result in results for record in result if record.round]
    for result in results:
        kept = result.rounds[1:]
        assert len({(r.uplink_payload_bytes, r.uplink_wire_bytes, r.downlink_wire_bytes) for r in kept}) == 1
    assert rounds[0].uplink_payload_bytes > 0
    assert all(r.replies == r.failures == 0 and r.wall_seconds == r.simulated_seconds == 0.0 for r in rounds)
    assert not any(key.startswith(("report.", "clients.")) for r in rounds for key in r.metrics)
    assert all(len(result.ledger) == 0 and "payload_up" not in result.notes for result in results)
    shown = engines.run(RunSpec("dp-fedavg", rounds=2, clients=8, settings={**SETTINGS, "reveal_participation": True}))
    assert any(record.replies for record in shown)
    assert shown.notes["privacy"]["epsilon"] == shown.notes["privacy"]["epsilon_unamplified"]


def rare(rounds: int) -> RunSpec:
    """Return a run whose rounds draw 0, 0, 1 and 0 clients."""
    return RunSpec("dp-fedavg", rounds=rounds, clients=8, seed=13, settings={**SETTINGS, "rate": 0.1})


def sizes(records: Sequence[RoundRecord]) -> set[tuple[int, ...]]:
    """Return the bytes that the records of rounds show, without round 0."""
    return {
        (r.uplink_payload_bytes, r.uplink_wire_bytes, r.downlink_payload_bytes, r.downlink_wire_bytes)
        for r in records
        if r.round
    }


def test_a8_rounds_before_anybody_was_drawn_show_the_same_bytes_and_are_reported_once() -> None:
    reported: list[RoundRecord] = []
    result = engines.run(rare(4), on_round=reported.append)
    (seen,) = sizes(reported)
    assert min(seen) > 0
    assert [record.to_json() for record in reported] == [record.to_json() for record in result.rounds]


@pytest.mark.parametrize("before", [2, 3])
def test_a8_a_run_that_is_resumed_knows_the_bytes_of_a_round_that_draws_nobody(tmp_path: Path, before: int) -> None:
    engines.run(rare(before), checkpoint=tmp_path / "checkpoint")
    resumed = engines.run(rare(4), checkpoint=tmp_path / "checkpoint")
    assert sizes(resumed.rounds) == sizes(engines.run(rare(4)).rounds)
    assert len(sizes(resumed.rounds)) == 1
