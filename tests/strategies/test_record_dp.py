"""Record-level privacy on the server: what clients say they spent is written down, never added up over clients."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedAvgM, Strategy
from plain_grid import Blind
from round_paths import accounted
from toy import with_halves

from fedcomp.clients.app import app as node_app
from fedcomp.clients.compressed import compression
from fedcomp.clients.memory import MEMORY, Held, kept_in
from fedcomp.codecs import TopK
from fedcomp.errors import ConfigError, NoUsableReply, StateError
from fedcomp.experiments import engines, serve
from fedcomp.experiments.spec import RunSpec
from fedcomp.flower.asks import SAY
from fedcomp.flower.faults import ScriptedFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import FRAME, NODE_RECORD
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.rounds import fit
from fedcomp.privacy.accounting import compose
from fedcomp.privacy.journal import from_bytes
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.private.record_dp import RecordDp
from fedcomp.strategies.private.systems import SYSTEMS
from fedcomp.systems.private.record import DpSgdPlan
from fedcomp.tasks import get_task
from fedcomp.tasks.arrays import to_arrays as task_arrays

PLAN = DpSgdPlan(noise_multiplier=1.5, rate=0.1, steps=3, delta=1e-5)
RECORDS = 1000

Alter = Callable[[RecordDict, int, int], None]


def moves(partition: int, array: np.ndarray) -> np.ndarray:
    return array + np.asarray(partition, array.dtype)


def client(alter: Alter | None = None, move: Callable[[int, np.ndarray], np.ndarray] = moves) -> ClientApp:
    """Return an app that pays for its steps as a client does, and moves every coordinate by its partition's number.

    ``alter(content, round, partition)`` may change its replies as they leave, ``move`` what it trains.
    """

    def altered(msg: Message, context: Context, call_next: Any) -> Message:
        server_round = int(msg.content.config_records["config"]["server-round"])
        reply = call_next(msg, context)
        if alter is not None and not reply.has_error():
            content = RecordDict({name: copy.copy(record) for name, record in reply.content.items()})
            alter(content, server_round, int(context.node_config["partition-id"]))
            reply.content = content
        return reply

    app = with_halves([altered, accounted(), compression()])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        name, model = next(iter(msg.content.array_records.items()))
        trained = {key: move(partition, array) for key, array in to_arrays(model).items()}
        return Message(RecordDict({name: to_record(trained)}), reply_to=msg)

    return app


def says(content: RecordDict, run: str, now: Any, total: Any) -> None:
    """Exchange what a reply says its training cost."""
    content[NODE_RECORD].update({SAY + "run": run, SAY + "now": now, SAY + "total": total})


def declares(content: RecordDict, partition: int) -> None:
    content[NODE_RECORD]["partition-id"] = partition


def record_dp(plan: DpSgdPlan = PLAN, codec: Any = None, **changes: Any) -> RecordDp:
    plan = dataclasses.replace(plan, **changes)
    mean = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    return RecordDp(mean if codec is None else Compressed(mean, codec), plan, records=RECORDS)


def play(strategy: RecordDp, rounds: int = 2, clients: int = 3, alter: Alter | None = None, **grid: Any) -> Any:
    with InProcessGrid(client(alter), clients, **grid) as nodes:
        return fit(strategy, nodes, toy.model(), rounds)


def epsilon(steps: int) -> float:
    return compose([PLAN.event(1212)] * steps, PLAN.delta).epsilon


def weight(result: Any) -> np.ndarray:
    return result.arrays["weight"].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("codec", [None, TopK(density=1.0)])
def test_disjoint_records_cost_what_the_dearest_client_spent_and_not_the_sum(codec):
    strategy = record_dp(codec=codec)
    result = play(strategy, rounds=2, clients=3)
    assert strategy.privacy.releases == strategy.privacy.rounds == 6
    assert strategy.privacy.epsilon() == pytest.approx(epsilon(6))
    assert strategy.privacy.epsilon() < epsilon(18) - 0.5
    assert strategy.privacy.participations == {0: 6, 1: 6, 2: 6}
    # Equal weights: two rounds of the mean of 0, 1 and 2.
    assert weight(result) == pytest.approx(2.0)


def test_a_client_that_took_part_more_often_is_the_one_that_counts():
    strategy = record_dp()
    play(strategy, rounds=3, clients=2, fault=ScriptedFaults({(1, 0): "offline", (2, 0): "offline"}))
    assert strategy.privacy.participations == {0: 3, 1: 9}
    assert strategy.privacy.epsilon() == pytest.approx(epsilon(9))


def test_a_training_whose_reply_was_lost_has_cost_what_it_cost():
    strategy = record_dp()
    play(strategy, rounds=3, clients=2, fault=ScriptedFaults({(1, 1): "lost_reply", (2, 1): "lost_reply"}))
    assert strategy.privacy.participations == {0: 9, 1: 9}


@pytest.mark.parametrize(("ledger", "since"), [("another ledger", 3), ("ledger 1", 1)], ids=["forgot", "put back"])
def test_a_client_that_forgot_what_it_spent_has_spent_both(ledger: str, since: int):
    """Or was put back to an older state: it pays for what it does again."""

    def forgets(reply: RecordDict, server_round: int, partition: int) -> None:
        if partition == 1 and server_round >= since:
            says(reply, ledger, 3, 3)

    strategy = record_dp()
    play(strategy, rounds=3, clients=2, alter=forgets)
    assert strategy.privacy.participations == {0: 9, 1: 9}


@pytest.mark.slow
@pytest.mark.parametrize("codec", [None, TopK(density=1.0)])
@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (lambda reply: reply[NODE_RECORD].pop("say"), "does not say what its training cost"),
        (lambda reply: reply.pop(NODE_RECORD), "does not say what its training cost"),
        (lambda reply: says(reply, "ledger", 4, 4), "took 4 steps, it was asked for 3"),
        (lambda reply: says(reply, "ledger", 2, 2), "took 2 steps, it was asked for 3"),
        (lambda reply: says(reply, "ledger", 3, 2), "3 of 2 steps"),
        (lambda reply: says(reply, "ledger", 3, 3.0), "'total' of Account is 3.0"),
    ],
)
def test_an_update_that_does_not_say_what_it_cost_is_no_part_of_the_model(lie, said, codec):
    def alter(reply: RecordDict, server_round: int, partition: int) -> None:
        if partition == 2:
            lie(reply)

    strategy = record_dp(codec=codec)
    result = play(strategy, rounds=1, clients=3, alter=alter)
    assert weight(result) == pytest.approx(0.5)
    assert set(strategy.privacy.participations) == {0, 1}
    (reason,) = strategy.reports[1].refused.values()
    assert said in reason


@pytest.mark.parametrize("codec", [None, TopK(density=1.0)], ids=["dense", "pair"])
def test_a_frame_that_cannot_be_used_is_paid_for_and_the_run_goes_on(codec):
    def alter(reply: RecordDict, server_round: int, partition: int) -> None:
        if partition == 2:
            for record in reply.values():
                for name in [name for name in record if name.startswith(FRAME)]:
                    del record[name]
            for name in [name for name in reply if name.startswith(FRAME)]:
                del reply[name]

    strategy = record_dp(codec=codec)
    result = play(strategy, rounds=2, clients=3, alter=alter)
    assert weight(result) == pytest.approx(1.0)
    assert strategy.privacy.participations == {0: 6, 1: 6, 2: 6}
    assert len(strategy.reports[2].refused) == 1


def test_an_app_that_does_not_say_what_its_records_are_trains_on_none():
    trained = []
    app = with_halves([compression()])
    app.train()(lambda msg, context: trained.append(msg))
    with InProcessGrid(app, 2) as nodes, pytest.raises(NoUsableReply, match="record_dp"):
        fit(record_dp(), nodes, toy.model(), 1, timeout=9)
    assert trained == []


@pytest.mark.parametrize("codec", [None, TopK(density=1.0)], ids=["dense", "pair"])
def test_buffers_of_clients_are_no_part_of_a_model(codec):
    model = ArrayRecord({**toy.model(), "steps": Array(np.array(5))})
    strategy = record_dp(codec=codec)
    with InProcessGrid(client(move=lambda partition, array: moves(partition + 41, array)), 2) as nodes:
        result = fit(strategy, nodes, model, 1)
    steps = result.arrays["steps"].numpy()
    assert (int(steps), steps.dtype) == (5, np.dtype(np.int64))
    assert weight(result) == pytest.approx(41.5)


TWIN = 7
"""Nodes of this partition and those after it declare partition 2."""


def blind(clients: int, alter: Alter | None = None) -> Blind:
    config = lambda p: {"partition-id": 2 if p >= TWIN else p}  # noqa: E731
    return Blind(client(alter), clients, seed=4, node_config=config)


BOTH = pytest.mark.parametrize("codec", [None, TopK(density=1.0)], ids=["dense", "pair"])


def test_a_node_cannot_spend_what_is_anothers_where_the_engine_knows_whose_it_is():
    def alter(reply: RecordDict, server_round: int, partition: int) -> None:
        if partition == 1:
            declares(reply, 0)
            says(reply, "another ledger", 3, 10**6)

    strategy = record_dp(budget=epsilon(6) + 1e-6)
    play(strategy, rounds=2, clients=2, alter=alter)
    assert strategy.privacy.participations == {0: 6, 1: 6}


def test_nobody_makes_the_epsilon_of_a_run_what_it_likes():
    """A stated total counts up to twice what was asked for; who says more is named, and not used."""

    def alter(reply: RecordDict, server_round: int, partition: int) -> None:
        if partition == 1:
            says(reply, "ledger 1", 3, 3 if server_round == 1 else 1 << 40)
        if partition == 2:
            # What other runs spent is in a node's own ledger, and no news of this one.
            says(reply, "ledger of years", 3, (1 << 39) + 3 * server_round)

    strategy = record_dp()
    result = play(strategy, rounds=2, clients=3, alter=alter)
    assert strategy.privacy.participations == {0: 6, 1: 12, 2: 6}
    assert strategy.privacy.epsilon() == pytest.approx(epsilon(12))
    (reason,) = strategy.reports[2].refused.values()
    assert "1099511627773 steps were taken since its last word, and 9 at most were asked for" in reason
    # The means of 0, 1, 2 and of 0 and 2.
    assert weight(result) == pytest.approx(2.0)


@pytest.mark.slow
@BOTH
def test_d1_both_of_two_twins_are_paid_for_and_neither_is_used(codec, caplog):
    for reverse in (False, True):
        strategy = record_dp(codec=codec)
        with blind(3) as nodes:
            twins = {nodes.node_id_of(2), nodes.add_node(TWIN)}
            real, step = nodes.send_and_receive, -1 if reverse else 1
            turned = lambda *given, real=real, step=step, **rest: list(real(*given, **rest))[::step]  # noqa: E731
            nodes.send_and_receive = turned  # type: ignore[method-assign]
            caplog.clear()
            with caplog.at_level("WARNING", "flwr"):
                result = strategy.start(nodes, toy.model(), num_rounds=2)
        # Twice the mean of 0 and 1.
        assert weight(result) == pytest.approx(1.0)
        assert strategy.privacy.participations == {0: 6, 1: 6, 2: 12}
        for report in strategy.reports.values():
            assert report.refused.keys() == twins
            assert all("2 nodes declare partition 2" in reason for reason in report.refused.values())
            assert report.used == 2
        (told,) = [m for m in caplog.messages if "declare partition 2" in m and "reply not used" in m]
        assert all(str(node) in told for node in twins)


def test_d1_twins_with_ledgers_of_their_own_are_not_taken_for_one_that_forgot():
    """Their replies alternate: what each ledger said before is known, so that nothing is paid for twice."""
    replies = itertools.count()

    def alter(reply: RecordDict, server_round: int, partition: int) -> None:
        if partition == 2:
            says(reply, f"ledger {next(replies) % 2}", 3, 3 * server_round)

    strategy = record_dp()
    config = lambda p: {"partition-id": 2 if p else 0}  # noqa: E731
    with Blind(client(alter), 3, seed=4, node_config=config) as nodes:
        result = fit(strategy, nodes, toy.model(), 4, timeout=9)
    assert weight(result) == pytest.approx(0.0)
    assert strategy.privacy.participations == {0: 4 * 3, 2: 2 * 4 * 3}


def test_a_node_answers_for_one_partition():
    def alter(reply: RecordDict, server_round: int, partition: int) -> None:
        if server_round == 2 and partition == 1:
            declares(reply, 0)

    strategy = record_dp()
    with blind(2, alter) as nodes:
        fit(strategy, nodes, toy.model(), 2)
    assert strategy.privacy.participations == {0: 6, 1: 3}
    assert "answered for partition 1 before" in next(iter(strategy.reports[2].refused.values()))


def absurd(partition: int, array: np.ndarray) -> np.ndarray:
    return np.full_like(array, 1e25) if partition == 0 else moves(partition, array)


def test_d1_a_guard_refuses_an_absurd_update_and_its_training_is_paid_for():
    mean = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy = RecordDp(mean, PLAN, records=RECORDS, guard=Norms())
    with InProcessGrid(client(move=absurd), 3, seed=4) as nodes:
        result = fit(strategy, nodes, toy.model(), 2)
        first = nodes.node_id_of(0)
    assert weight(result) == pytest.approx(2 * 1.5)
    assert all(report.refused.keys() == {first} and report.used == 2 for report in strategy.reports.values())
    assert "guard" in strategy.reports[1].refused[first]
    assert strategy.privacy.participations == {0: 6, 1: 6, 2: 6}
    with pytest.raises(ConfigError, match=r"Compressed\(\.\.\., guard=\.\.\.\)"):
        RecordDp(Compressed(mean, TopK(density=1.0)), PLAN, records=RECORDS, guard=Norms())
    with pytest.raises(ConfigError, match="guard=3 is not valid"):
        RecordDp(mean, PLAN, records=RECORDS, guard=3)  # type: ignore[arg-type]


def test_d1_an_aggregate_that_is_not_finite_is_no_model():
    """Each reply is finite; what the server's step makes of them is not."""
    mean = FedAvgM(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, server_learning_rate=1e20)
    strategy = RecordDp(mean, PLAN, records=RECORDS)
    with InProcessGrid(client(move=absurd), 3, seed=4) as nodes:
        result = fit(strategy, nodes, toy.model(), 1)
    assert weight(result) == pytest.approx(0.0)
    assert (strategy.reports[1].used, len(strategy.reports[1].norms)) == (0, 3)
    assert "not finite" in strategy.reports[1].notes[0]
    assert strategy.privacy.participations == {0: 3, 1: 3, 2: 3}


def test_metrics_and_weights_of_clients_count_for_nothing():
    def boasts(reply: RecordDict, server_round: int, partition: int) -> None:
        reply["metrics"] = MetricRecord({"num-examples": 10**6 if partition == 2 else 1, "train_loss": 0.25})

    strategy = record_dp()
    result = play(strategy, rounds=1, clients=3, alter=boasts)
    assert weight(result) == pytest.approx(1.0)
    assert all(not metrics for metrics in result.train_metrics_clientapp.values())


def test_clients_that_cannot_afford_a_training_are_not_asked_and_the_run_ends():
    strategy = record_dp(budget=epsilon(6) + 1e-6)
    fault = ScriptedFaults({(1, 0): "offline"})
    with InProcessGrid(client(), 2, fault=fault) as nodes:
        asked: list[int] = []
        real = nodes.send_and_receive

        def counted(messages: Any, **rest: Any) -> Any:
            batch = list(messages)
            asked.append(len(batch))
            return real(batch, **rest)

        nodes.send_and_receive = counted  # type: ignore[method-assign]
        fit(strategy, nodes, toy.model(), 9)
    # Partition 1 has spent it after two rounds, partition 0, which was away in the first, after three.
    assert [count for count in asked if count] == [2, 2, 1]
    assert strategy.privacy.epsilon() <= strategy.plan.budget
    assert "allows no client a further training" in strategy.over(4)


def test_a_budget_too_small_for_one_training_asks_nobody():
    def never(reply: RecordDict, server_round: int, partition: int) -> None:
        raise AssertionError("nobody is to train")

    strategy = record_dp(budget=epsilon(3) - 1e-3)
    result = play(strategy, rounds=3, alter=never)
    assert not strategy.reports
    assert "allows no client a further training" in strategy.over(1)
    assert weight(result) == pytest.approx(0.0)


def test_books_in_a_file_outlive_the_server(tmp_path: Path):
    first = record_dp()
    first.open_ledger(tmp_path / "books")
    play(first, rounds=2)
    state = first.state_dict()
    first.privacy.close()
    # A server that has only the file does not know that these are the clients it knew: it counts them again.
    forgetful = record_dp()
    forgetful.open_ledger(tmp_path / "books")
    assert forgetful.privacy.epsilon() == first.privacy.epsilon()
    play(forgetful, rounds=1)
    assert forgetful.privacy.participations == {0: 9, 1: 9, 2: 9}
    forgetful.privacy.close()
    restored = record_dp(budget=50.0)
    restored.load_state_dict(state)
    assert restored.privacy.participations == {0: 6, 1: 6, 2: 6}
    restored.open_ledger(tmp_path / "books")
    assert restored.privacy.participations == {0: 9, 1: 9, 2: 9}
    restored.privacy.close()
    with pytest.raises(StateError, match="resume with the same"):
        record_dp(rate=0.2).load_state_dict(state)


@pytest.mark.slow
def test_a_run_that_repeats_a_round_pays_for_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = {"task.hidden": "16", "max_steps": 2, "insecure_deterministic": True}
    spec = RunSpec("record-dp", rounds=2, clients=2, settings=settings)

    class Killed(Exception):
        pass

    real, calls = serve.checkpoints.CheckpointFile.save, [0]

    def save(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise Killed
        real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(serve.checkpoints.CheckpointFile, "save", save)
        with pytest.raises(Killed):
            engines.run(spec, checkpoint=tmp_path / "checkpoint")
    # The clients are put back to their state after round 1, and train for round 2 again.
    result = engines.run(spec, checkpoint=tmp_path / "checkpoint")
    assert result.final.metrics["privacy.releases"] == 6
    assert result.notes["privacy"]["unit"] == "record"
    assert result.notes["privacy"]["population"] > 1000
    whole = engines.run(spec)
    assert whole.final.metrics["privacy.releases"] == 4
    assert {k: v.tobytes() for k, v in result.arrays.items()} == {k: v.tobytes() for k, v in whole.arrays.items()}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: record_dp(adjacency="replace"), "specify add_remove"),
        (lambda: record_dp(method="sgd"), "method='sgd' is not valid"),
        (lambda: record_dp(steps=0), "steps=0 is not valid"),
        (lambda: record_dp(rate=0.0), "rate"),
        (lambda: record_dp(noise_multiplier=-1.0), "noise_multiplier"),
        (lambda: record_dp(clip=0.0), "clip"),
        (lambda: record_dp(delta=0.001), "not below 1/1000"),
        (lambda: record_dp(budget=-1.0), "budget"),
        # Clients would answer that they could not train, and keep to themselves why.
        (lambda: record_dp(method="topagg"), "'topagg' needs options={'k': ...}"),
        (lambda: record_dp(method="random-mask"), "'random-mask' needs options={'keep': ...}"),
        (lambda: record_dp(method="lsg", options={"keep": 0.5}), "'lsg' needs options={'rank': ...}"),
        (lambda: record_dp(method="topagg", options={"k": "many"}), "k='many' is not valid"),
        (lambda: record_dp(method="random-mask", options={"keep": 2.0}), "keep=2.0 is not valid"),
        (lambda: record_dp(method="random-mask", options={"kept": 0.5}), "no option 'kept'; it has keep, schedule"),
        (lambda: record_dp(options={"k": 3}), "'dp-sgd' has no option 'k'; it has none"),
    ],
)
def test_what_promises_nothing_is_refused(make, said):
    with pytest.raises(ConfigError) as refused:
        make()
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [{"sampling": "poisson", "rate": 0.5}, {"rate": 0.01}, {"cap": 3}, {"reveal_participation": True}],
    ids=str,
)
def test_a_row_refuses_to_sample_clients_where_records_are_sampled(settings):
    (row,) = (system for system in SYSTEMS if system.name == "record-dp")
    with pytest.raises(ConfigError, match=r"samples clients.*use record_rate"):
        row.build(row.resolve(settings), 0)
    assert row.build(row.resolve({"record_rate": 0.01}), 0).plan.rate == 0.01


def test_the_statement_says_whose_records_and_who_is_trusted():
    strategy = record_dp()
    play(strategy, rounds=1)
    said = strategy.statement()
    assert (said.unit, said.population, said.adjacency) == ("record", RECORDS, "add_remove")
    assert (said.sampling, said.rate) == ("poisson", 0.1)
    assert said.epsilon_unamplified > said.epsilon == pytest.approx(epsilon(3))
    assert "nobody but its own client sees a record" in said.prose()
    assert "the client that spent most" in said.prose()


@pytest.mark.parametrize("codec", [None, TopK(density=1.0)], ids=["dense", "pair"])
def test_a_reply_counts_once_and_in_its_own_round(codec):
    class Repeating(InProcessGrid):
        """Delivers each reply twice, and those of the round before once more."""

        before: tuple[Message, ...] | list[Message] = ()

        def send_and_receive(self, messages: Any, **options: Any) -> list[Message]:
            found = list(super().send_and_receive(messages, **options))
            if not found:
                return []
            late, self.before = self.before, copy.deepcopy(found)
            return [*late, *found, *copy.deepcopy(found)]

    strategy = record_dp(codec=codec)
    with Repeating(client(), 3) as nodes:
        # Flower's own loop hands over whatever came.
        result = Strategy.start(strategy, nodes, toy.model(), num_rounds=3)
    assert weight(result) == pytest.approx(3.0)
    assert [r.unmatched for r in strategy.reports.values()] == [0, 3, 3]
    assert [r.duplicates for r in strategy.reports.values()] == [3, 3, 3]
    assert strategy.privacy.participations == {0: 9, 1: 9, 2: 9}


def test_neither_a_new_session_nor_a_lost_memory_renews_a_nodes_budget():
    """And the report names the ledger that a training was paid from, as the node keeps it."""
    plan = dataclasses.replace(PLAN, noise_multiplier=8.0, insecure=True)
    budget = compose([plan.event(650)] * plan.steps, plan.delta).epsilon + 1e-6
    start = to_record(task_arrays(get_task("digits-zero").model(0)))
    given = ConfigRecord({"task": "digits-zero", "clients": 1, "seed": 0})
    with InProcessGrid(node_app, 1, seed=4) as grid:
        (node,) = grid.get_node_ids()

        def run() -> RecordDp:
            # A server that has forgotten everything.
            strategy = record_dp(plan, budget=budget)
            fit(strategy, grid, start, 1, train_config=given, timeout=9.0)
            return strategy

        paid = run()
        _, entries, head = from_bytes(kept_in(grid.context(node).state)["record-dp.ledger"])
        assert [entry["times"] for entry in entries] == [plan.steps]
        assert paid.reports[1].record_dp.heads == {node: head}
        for name in (None, MEMORY, Held.KEY):
            grid.context(node).state.pop(name, None)
            with pytest.raises(NoUsableReply, match="3 more steps would cross this client's budget"):
                run()
