"""One driver for both kinds of strategy: rounds end normally whatever the network does."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, Result
from plain_grid import PlainGrid
from toy import client_app, fedavg, model, stack

from fedcomp.errors import ConfigError
from fedcomp.flower.faults import Fault, RandomFaults, ScriptedFaults, late
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import put_node
from fedcomp.flower.rounds import ExchangeStrategy, Push, RoundOutcome, drive, drive_many, fit, over
from fedcomp.rng import Key

NODES = 6


def echo(message: Message, context: Context) -> Message:
    """Reply with the partition id and the number that was sent."""
    partition = int(context.node_config["partition-id"])
    number = int(message.content["ask"]["n"])
    content = RecordDict({"metrics": MetricRecord({"partition": partition, "n": number})})
    put_node(content, partition)
    return Message(content, reply_to=message)


def ask(nodes, number: int = 0) -> list[Message]:
    return [Message(RecordDict({"ask": ConfigRecord({"n": number})}), n, "query") for n in nodes]


def answers(replies: list[Message]) -> list[tuple[int, int]]:
    return [(r.content["metrics"]["partition"], r.content["metrics"]["n"]) for r in replies if r.has_content()]


class MeanOfMeans(ExchangeStrategy):
    """Two exchanges per round: collect the sum of the updates, then tell it and collect how many heard it."""

    def round(self, server_round, arrays, config, grid):
        record = RecordDict({"arrays": arrays, "config": ConfigRecord({**config, "server-round": server_round})})
        replies = yield [Message(record, n, "train") for n in grid.get_node_ids()]
        good = [r for r in replies if r.has_content()]
        if not good:
            return None, None
        stacked = [{k: a.numpy() for k, a in r.content["arrays"].items()} for r in good]
        mean = ArrayRecord({k: Array(sum(s[k] for s in stacked) / np.float32(len(stacked))) for k in stacked[0]})
        record = RecordDict({"arrays": mean})
        heard = yield (Message(record, n, "evaluate") for n in grid.get_node_ids())
        return mean, MetricRecord({"heard": len(heard)})


def run(strategy, *, rounds: int = 3, engine: dict | None = None, **options) -> tuple[Result, MeteredGrid]:
    with InProcessGrid(client_app(), NODES, **{"seed": 1, **(engine or {})}) as inner:
        grid = MeteredGrid(inner)
        return fit(strategy, grid, model(), rounds, **options), grid


def bits(result: Result) -> bytes:
    return b"".join(a.numpy().tobytes() for a in result.arrays.values())


def test_a_round_reads_as_straight_line_code() -> None:
    def two_phases(grid):
        first = yield ask(grid.get_node_ids(), 1)
        none = yield []
        second = yield ask(grid.get_node_ids()[:2], 2)
        return answers(first), none, answers(second)

    with InProcessGrid(echo, 4) as grid:
        first, none, second = drive(two_phases(grid), grid)
        assert first == [(p, 1) for p in range(4)]
        assert none == []
        assert second == [(0, 2), (1, 2)]
        assert grid.exchange == 2


def test_replies_reach_the_round_joined_once_and_in_order() -> None:
    faults = {(0, 0): "duplicate", (0, 1): "silent", (0, 2): "offline", (0, 3): late(1)}

    def one(grid):
        messages = ask(grid.get_node_ids()[::-1], 5)
        replies = yield messages
        return messages, replies

    with InProcessGrid(echo, 6, fault=ScriptedFaults(faults, message_types=None)) as grid:
        messages, replies = drive(one(grid), grid, timeout=1.0)
        assert answers(replies) == [(0, 5), (4, 5), (5, 5)]
        (error,) = [r for r in replies if r.has_error()]
        assert error.metadata.src_node_id == grid.node_id_of(2)
        assert len({r.metadata.reply_to_message_id for r in replies}) == len(replies) == 4
        assert {m.metadata.message_id for m in messages} > {r.metadata.reply_to_message_id for r in replies}


class Patient:
    """Notes how long each exchange may wait."""

    def __init__(self, inner) -> None:
        self.inner, self.timeouts = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def send_and_receive(self, messages, *, timeout=None):
        self.timeouts.append(timeout)
        return self.inner.send_and_receive(messages, timeout=timeout)


def test_an_exchange_may_have_a_shorter_deadline_of_its_own() -> None:
    def exchanges(nodes, *limits):
        seen = []
        for i, limit in enumerate(limits):
            seen.append(answers((yield Push(ask(nodes, i), timeout=limit))))
        return seen

    with InProcessGrid(echo, 4) as inner:
        grid = Patient(inner)
        nodes = inner.get_node_ids()
        assert drive(exchanges(nodes, 2.0, None, 90.0), grid, timeout=30.0) == [
            [(p, i) for p in range(4)] for i in range(3)
        ]
        assert grid.timeouts == [2.0, 30.0, 30.0], "the shorter of the exchange's and the driver's"
        drive(exchanges(nodes, 2.0, None), grid)
        assert grid.timeouts[3:] == [2.0, None]
        # Exchanges that share a push wait for the most patient among them; an empty one does not count.
        drive_many([exchanges(nodes[:1], 2.0), exchanges(nodes[1:], 7.0), exchanges([], None)], grid)
        drive_many([exchanges(nodes[:1], 2.0), exchanges(nodes[1:], None)], grid)
        assert grid.timeouts[5:] == [7.0, None]


def test_a_slow_reply_misses_the_short_deadline_only() -> None:
    def exchanges(nodes):
        short = yield Push(ask(nodes, 1), timeout=1.0)
        late_ = yield ask(nodes, 2)
        return len(short), len(late_)

    with InProcessGrid(echo, 3, compute_seconds=5.0) as grid:
        assert drive(exchanges(grid.get_node_ids()), grid, timeout=60.0) == (0, 3)


def test_a_generator_is_closed_on_success_on_its_own_error_and_on_the_engines() -> None:
    closed: list[str] = []

    def exchange(name, grid, fail=False):
        try:
            yield ask(grid.get_node_ids())
            if fail:
                raise ArithmeticError(name)
            yield ["nonsense"]
        finally:
            closed.append(name)

    with InProcessGrid(echo, 1) as grid:
        with pytest.raises(ArithmeticError):
            drive(exchange("own", grid, fail=True), grid)
        with pytest.raises(ConfigError, match="str"):
            drive(exchange("nonsense", grid), grid)

        def broken(messages, *, timeout=None):
            raise ConnectionError("engine is gone")

        grid.send_and_receive = broken  # type: ignore[method-assign]
        with pytest.raises(ConnectionError):
            drive(exchange("engine", grid), grid)
    assert closed == ["own", "nonsense", "engine"]


def test_several_rounds_share_pushes_and_keep_their_replies_apart() -> None:
    def part(nodes, phases):
        seen = []
        for phase in range(phases):
            seen.append(answers((yield ask(nodes, phase))))
        return seen

    with InProcessGrid(echo, 5) as grid:
        ids = grid.get_node_ids()
        left, right, nothing = drive_many([part(ids[:2], 3), part(ids[2:], 1), part([], 0)], grid)
        assert left == [[(0, p), (1, p)] for p in range(3)]
        assert right == [[(2, 0), (3, 0), (4, 0)]]
        assert nothing == []
        assert grid.exchange == 3
        with pytest.raises(ConfigError, match="two rounds address node"):
            drive_many([part(ids[:2], 1), part(ids[1:], 1)], grid)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [fedavg, lambda: FedAdam(eta=0.1), MeanOfMeans])
def test_shuffled_replies_change_nothing(strategy) -> None:
    shuffled, grid_a = run(strategy())
    ordered, grid_b = run(strategy(), engine={"shuffle_replies": False})
    assert bits(shuffled) == bits(ordered)
    assert shuffled.train_metrics_clientapp == ordered.train_metrics_clientapp
    assert grid_a.ledger == grid_b.ledger
    assert bits(shuffled) != bits(run(strategy(), rounds=2)[0])


@pytest.mark.slow
def test_the_driver_gives_what_flowers_own_loop_gives() -> None:
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"norm": float(np.linalg.norm(stack(arrays))), "round": server_round})

    for make in (fedavg, lambda: FedAdam(eta=0.1)):
        ours, _ = run(make(), evaluate_fn=evaluate)
        with InProcessGrid(client_app(), NODES, seed=1) as engine:
            theirs = make().start(MeteredGrid(engine), model(), num_rounds=3, evaluate_fn=evaluate)
        assert bits(ours) == bits(theirs)
        assert ours.train_metrics_clientapp == theirs.train_metrics_clientapp
        assert ours.evaluate_metrics_clientapp == theirs.evaluate_metrics_clientapp
        assert ours.evaluate_metrics_serverapp == theirs.evaluate_metrics_serverapp
        assert sorted(ours.evaluate_metrics_serverapp) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_client_needs_nothing_but_its_context() -> None:
    # A new app object for every message is what a deployment's process per message amounts to.
    kept, _ = run(fedavg())
    with InProcessGrid(lambda m, c: client_app()(m, c), NODES, seed=1) as engine:
        fresh = fit(fedavg(), MeteredGrid(engine), model(), 3)
        sums = [engine.context(p).state["toy.sum"]["sum"].numpy() for p in range(NODES)]
    assert bits(kept) == bits(fresh)
    assert all(np.count_nonzero(s) for s in sums)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["offline", "raise", "silent", "lost_reply", late(1), late(3), "duplicate", "duplicate_reply"]
)
@pytest.mark.parametrize("strategy", [fedavg, MeanOfMeans])
def test_a_fault_of_some_nodes_leaves_the_mean_of_the_others(fault, strategy) -> None:
    script = {(2, 1): fault, (2, 4): fault}
    result, grid = run(strategy(), rounds=2, engine={"fault": ScriptedFaults(script)}, timeout=1.0)
    lost = fault not in ("duplicate", "duplicate_reply")

    with InProcessGrid(client_app(), NODES, seed=1) as plain:
        reference = fit(fedavg() if strategy is fedavg else strategy(), MeteredGrid(plain), model(), 1)
        if lost:
            plain.remove_node(1)
            plain.remove_node(4)
        expected = fit(strategy(), MeteredGrid(plain), reference.arrays, 2, start_round=2)
    assert bits(result) == bits(expected)
    assert grid.ledger.total("messages", round=2, direction="down", message_type="train") == NODES


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["offline", "raise", "silent", "lost_reply", late(5)])
@pytest.mark.parametrize("strategy", [fedavg, lambda: FedAdam(eta=0.1), MeanOfMeans])
def test_when_every_node_fails_the_run_ends_and_the_model_stays(fault, strategy) -> None:
    seen = []
    result, _ = run(
        strategy(),
        engine={"fault": lambda d: fault},
        timeout=1.0,
        on_round=lambda r, arrays, outcome: seen.append((r, stack(arrays).tolist(), outcome.arrays)),
    )
    assert stack(result.arrays).tolist() == stack(model()).tolist()
    assert seen == [(r, stack(model()).tolist(), None) for r in (1, 2, 3)]
    assert result.train_metrics_clientapp == {}


@pytest.mark.slow
def test_random_faults_end_normally_and_repeat_exactly() -> None:
    kinds = ("offline", "raise", "silent", "lost_reply", "late", "duplicate", "duplicate_reply")
    plan = RandomFaults(Key(3, "faults"), dict.fromkeys(kinds, 0.1), pushes=2)
    for strategy in (fedavg, MeanOfMeans):
        first, grid = run(strategy(), rounds=6, engine={"fault": plan}, timeout=1.0)
        again, _ = run(strategy(), rounds=6, engine={"fault": plan, "shuffle_replies": False}, timeout=1.0)
        assert bits(first) == bits(again)
        assert bits(first) != bits(run(strategy(), rounds=6)[0])
        assert grid.ledger.total("messages", direction="up") < grid.ledger.total("messages", direction="down")


def test_a_node_addressed_twice_does_not_end_the_run() -> None:
    class Twice(MeanOfMeans):
        def round(self, server_round, arrays, config, grid):
            nodes = [*grid.get_node_ids(), grid.get_node_ids()[0]]
            replies = yield ask(nodes, server_round)
            return None, MetricRecord({"replies": len(replies)})

    with InProcessGrid(echo, 3) as grid:
        result = fit(Twice(), MeteredGrid(grid), model(), 2)
    assert [m["replies"] for m in result.train_metrics_clientapp.values()] == [4, 4]


def test_zero_rounds_return_the_initial_arrays() -> None:
    initial = model(3.0)
    with InProcessGrid(client_app(), 2) as grid:
        called: list[tuple] = []
        for strategy in (fedavg(), MeanOfMeans()):
            result = fit(strategy, grid, initial, 0, on_round=lambda *report: called.append(report))
            assert result.arrays is initial
        assert called == []
        assert grid.exchange == 0
        with pytest.raises(ConfigError, match="start_round"):
            fit(fedavg(), grid, initial, 3, start_round=0)


def test_the_loop_numbers_rounds_and_reports_each() -> None:
    reports: list[tuple[int, RoundOutcome]] = []
    history = Result(train_metrics_clientapp={1: MetricRecord({"old": 1.0})})
    result, grid = run(
        MeanOfMeans(),
        rounds=4,
        start_round=3,
        result=history,
        evaluate_fn=lambda r, a: MetricRecord({"r": r}),
        on_round=lambda r, a, o: reports.append((r, o)),
    )
    assert result is history
    assert sorted(result.train_metrics_clientapp) == [1, 3, 4]
    assert sorted(result.evaluate_metrics_serverapp) == [3, 4]
    assert [r for r, _ in reports] == [3, 4]
    assert [o.server["r"] for _, o in reports] == [3, 4]
    assert all(o.train["heard"] == NODES for _, o in reports)
    assert grid.ledger.by("round", "messages") == {3: 4 * NODES, 4: 4 * NODES}
    assert grid.round is None


def test_an_exchange_strategy_starts_like_flowers_and_refuses_hooks() -> None:
    with InProcessGrid(client_app(), 3) as grid:
        strategy = MeanOfMeans()
        config = ConfigRecord({"lr": 0.1})
        result = strategy.start(MeteredGrid(grid), model(), num_rounds=1, timeout=5, train_config=config)
        assert result.train_metrics_clientapp[1]["heard"] == 3
        for call in (
            lambda: strategy.configure_train(1, model(), config, grid),
            lambda: strategy.aggregate_train(1, []),
            lambda: strategy.configure_evaluate(1, model(), config, grid),
            lambda: strategy.aggregate_evaluate(1, []),
        ):
            with pytest.raises(ConfigError, match="several exchanges"):
                call()


def test_an_exchange_strategy_may_evaluate_on_its_clients() -> None:
    class Evaluated(MeanOfMeans):
        def evaluate_round(self, server_round, arrays, config, grid):
            replies = yield [Message(RecordDict({"a": arrays}), n, "evaluate") for n in grid.get_node_ids()]
            return MetricRecord({"seen": float(len({r.content["metrics"]["seen"] for r in replies}))})

    result, _ = run(Evaluated(), rounds=2)
    assert [m["seen"] for m in result.evaluate_metrics_clientapp.values()] == [1.0, 1.0]


class Collecting(MeanOfMeans):
    """Trains without an answer; what came of it is collected in every second round and in the last."""

    def __init__(self) -> None:
        self.closed: list[tuple[int, bool]] = []
        self.evaluated: list[bytes] = []

    def round(self, server_round, arrays, config, grid):
        aggregated, _ = yield from super().round(server_round, arrays, config, grid)
        self.waiting = aggregated
        return None, MetricRecord({"trained": server_round, "both": 1})

    def close_round(self, server_round, arrays, config, grid, *, last):
        self.closed.append((server_round, last))
        heard = yield ask(grid.get_node_ids())
        if not last and server_round % 2:
            return None, None
        return self.waiting, MetricRecord({"closed": len(heard), "both": 2})

    def evaluate_round(self, server_round, arrays, config, grid):
        self.evaluated.append(stack(arrays).tobytes())
        return None
        yield


@pytest.mark.slow
def test_a_strategy_may_close_its_rounds_and_is_told_the_last() -> None:
    strategy, plain = Collecting(), MeanOfMeans()
    seen: list[bool] = []
    result, _ = run(strategy, rounds=3, on_round=lambda r, arrays, outcome: seen.append(outcome.arrays is not None))
    assert strategy.closed == [(1, False), (2, False), (3, True)]
    assert seen == [False, True, True]
    # What closing returns is the round's model: evaluated after it, and passed on to the next round.
    assert strategy.evaluated == [stack(model()).tobytes()] + [stack(a).tobytes() for a in after(plain, strategy)]
    assert dict(result.train_metrics_clientapp[1]) == {"trained": 1, "both": 1}
    assert dict(result.train_metrics_clientapp[3]) == {"trained": 3, "closed": NODES, "both": 2}


def after(plain: MeanOfMeans, strategy: Collecting) -> list[ArrayRecord]:
    """Return the models of rounds 2 and 3 when the round before the first of them brought nothing."""

    class Skipping(MeanOfMeans):
        def round(self, server_round, arrays, config, grid):
            aggregated, metrics = yield from plain.round(server_round, arrays, config, grid)
            return (None if server_round == 1 else aggregated), metrics

    models: list[ArrayRecord] = []
    run(Skipping(), rounds=3, on_round=lambda r, arrays, outcome: models.append(arrays))
    return models[1:]


class Frugal(Collecting):
    """Promises privacy, and can pay for two rounds."""

    def __init__(self, allowed: int = 2) -> None:
        super().__init__()
        self.allowed = allowed
        self.made = 0
        self.privacy = None

    def round(self, server_round, arrays, config, grid):
        self.made += 1
        return (yield from super().round(server_round, arrays, config, grid))

    def declare(self, population):
        pass

    def open_ledger(self, path):
        pass

    def over(self, server_round):
        return "it is spent" if self.made >= self.allowed else ""

    def statement(self):
        return None


class Around:
    """What a wrapper looks like from outside."""

    def __init__(self, inner):
        self.inner = inner
        self.round = inner.round


def test_a_private_strategy_ends_the_run_before_the_round_it_refuses() -> None:
    strategy = Frugal()
    seen: list[int] = []
    result, _ = run(strategy, rounds=9, on_round=lambda r, arrays, outcome: seen.append(r))
    assert seen == [1, 2]
    # The round before the refused one is the last: what waits on the nodes is brought home in it.
    assert strategy.closed == [(1, False), (2, True)]
    whole = Collecting()
    same, _ = run(whole, rounds=2)
    assert stack(result.arrays).tobytes() == stack(same.arrays).tobytes()


def test_a_private_strategy_is_found_inside_of_others_and_may_refuse_the_first_round() -> None:
    assert over(Around(Around(Frugal(0))), 1) == "it is spent"
    assert over(Collecting(), 1) == ""
    strategy = Frugal(0)
    result, _ = run(strategy, rounds=3)
    assert strategy.made == 0
    assert stack(result.arrays).tobytes() == stack(model()).tobytes()


def test_faults_are_scripted_in_the_drivers_rounds() -> None:
    # MeanOfMeans' second exchange says no round of its own; the driver tells the engine.
    plan = ScriptedFaults({(2, 0): Fault("silent")}, message_types=("evaluate",))
    result, _ = run(MeanOfMeans(), engine={"fault": plan}, timeout=1.0)
    assert [m["heard"] for m in result.train_metrics_clientapp.values()] == [NODES, NODES - 1, NODES]


# An exchange that is over when there are enough replies, on simulated time and on an engine that runs by itself.

SECONDS = [4.0, 1.0, 9.0, 2.0]


def answer(msg: Message, context: Context) -> Message:
    return Message(RecordDict(), reply_to=msg)


def grid_of(**options) -> InProcessGrid:
    return InProcessGrid(answer, 4, compute_seconds=lambda d: SECONDS[d.partition], **options)


def messages(grid: InProcessGrid) -> list[Message]:
    return [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]


def at_least(count: int):
    return lambda replies: len(replies) >= count


def exchange(push: Push) -> Generator[Push, list[Message], list[Message]]:
    return (yield push)


@pytest.mark.parametrize(("count", "clock"), [(1, 1.0), (2, 2.0), (3, 4.0), (4, 9.0)])
@pytest.mark.parametrize("metered", [False, True])
def test_an_exchange_ends_with_the_reply_that_is_enough(count: int, clock: float, metered: bool) -> None:
    with grid_of() as grid:
        engine = MeteredGrid(grid) if metered else grid
        replies = drive(exchange(Push(messages(grid), None, at_least(count))), engine, timeout=100.0)
        assert len(replies) == count
        assert grid.clock == clock


def test_what_is_never_enough_waits_for_all_and_then_for_the_deadline() -> None:
    with grid_of() as grid:
        assert len(drive(exchange(Push(messages(grid), None, at_least(5))), grid)) == 4
        assert grid.clock == 9.0
    with grid_of() as grid:
        assert len(drive(exchange(Push(messages(grid), 3.0, at_least(3))), grid)) == 2
        assert grid.clock == 3.0


def test_replies_are_shown_in_the_order_they_arrive_and_lost_ones_never() -> None:
    shown: list[list[int]] = []

    def enough(replies: Sequence[Message]) -> bool:
        shown.append([grid.partition_of(reply.metadata.src_node_id) for reply in replies])
        return False

    lost: dict[int, str] = {1: "lost_reply"}
    with grid_of(fault=lambda d: lost.get(d.partition)) as grid:
        drive(exchange(Push(messages(grid), None, enough)), grid)
    assert shown == [[3], [3, 0], [3, 0, 2]]


def test_a_slow_reply_of_an_exchange_that_is_over_is_not_mixed_into_the_next() -> None:
    with grid_of() as grid:
        first, second = messages(grid), messages(grid)
        drive(exchange(Push(first, None, at_least(1))), grid)
        replies = drive(exchange(Push(second, None, None)), grid)
        wanted = {message.metadata.message_id for message in second}
        assert {reply.metadata.reply_to_message_id for reply in replies} == wanted
        # The slowest node begins its second message when it has finished its first.
        assert grid.clock == 18.0


def test_rounds_that_share_a_push_wait_for_all_of_it() -> None:
    with grid_of() as grid:
        batch = messages(grid)
        pushes = [Push(batch[:2], None, at_least(1)), Push(batch[2:], None, at_least(1))]
        replies = drive_many([exchange(push) for push in pushes], grid)
        assert [len(r) for r in replies] == [2, 2]


def test_an_engine_that_runs_by_itself_is_not_asked_again_once_it_is_enough() -> None:
    class ByItself(PlainGrid):
        """Hands out one more reply at every look, as a SuperLink does while nodes work."""

        looks = 0

        def push_messages(self, messages):
            ids = super().push_messages(messages)
            self.waiting = super().pull_messages(ids)
            return ids

        def pull_messages(self, message_ids):
            self.looks += 1
            return [self.waiting.pop()] if self.waiting else []

    with InProcessGrid(answer, 4) as grid:
        engine = ByItself(grid)
        metered = MeteredGrid(engine, poll_seconds=0.001)
        replies = drive(exchange(Push(messages(grid), None, at_least(3))), metered, timeout=5.0)
    assert len(replies) == engine.looks == 3
    assert metered.ledger.columns()["wire"].size == 4 + 3


def test_a_grid_that_cannot_stop_early_waits_for_all() -> None:
    class Flowers:
        def __init__(self, inner: InProcessGrid) -> None:
            self.inner = inner

        def send_and_receive(self, batch, *, timeout=None):
            return self.inner.send_and_receive(batch, timeout=timeout)

    with grid_of() as grid:
        assert len(drive(exchange(Push(messages(grid), None, at_least(1))), Flowers(grid))) == 4
