"""Coded gradient descent over messages: losses in both phases, forgetful devices, set-up bytes, bad replies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from clients.app import app as generic_app
from clients.coded_linear import LinearRows, answer_coded_linear
from coding.spool import Spool
from coding.stream import SplitMix64
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower import checkpoint, linear
from fedcomp.flower.faults import Delivery, Fault, RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import Ledger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import put_frame, take_frame
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key
from fedcomp.tasks import get_task
from strategies.coded_linear import CodedLinearGD, LinearModel

FEATURES = 5
PHASE1, PHASE2 = f"train.{linear.PHASE1}", f"train.{linear.PHASE2}"
SETUP = f"query.{linear.SETUP}"


def data(partition: int, loss: str = "logistic") -> LinearRows:
    stream = SplitMix64(100 + partition)
    m = 12 + partition % 3
    x = stream.normal(m * FEATURES).reshape(m, FEATURES)
    score = x @ np.arange(1.0, FEATURES + 1) + stream.normal(m)
    return LinearRows(x, score if loss == "squares" else (score > 0).astype(float), loss)


def client(loss: str = "logistic") -> ClientApp:
    def rows(msg: Message, context: Context, partitions: int) -> LinearRows:
        return data(int(context.node_config["partition-id"]), loss)

    return answer_coded_linear(ClientApp(), rows)


def model() -> ArrayRecord:
    return ArrayRecord({"weight": Array(np.zeros((1, FEATURES), np.float32)), "bias": Array(np.zeros(1, np.float32))})


def vector(arrays: ArrayRecord) -> np.ndarray:
    return np.concatenate([array.numpy().ravel() for array in arrays.values()])


def metered(nodes: int, *, fault=None, app: Callable | None = None, **options) -> MeteredGrid:
    return MeteredGrid(InProcessGrid(app or client(), nodes, seed=4, fault=fault, **options), Ledger())


def uncoded(partitions: int, moves: list[bool], loss: str = "logistic", lr: float = 0.5, l2: float = 0.0) -> np.ndarray:
    """Gradient descent on all rows at once; one entry of ``moves`` per round, False where the round was skipped."""
    parts = [data(j, loss) for j in range(partitions)]
    x = np.concatenate([np.c_[p.x, np.ones(len(p.x))] for p in parts])
    y = np.concatenate([p.y for p in parts])
    w = np.zeros(FEATURES + 1)
    for moved in moves:
        z = x @ w
        if loss == "logistic":
            slope = 1 / (1 + np.exp(-z)) - y
        elif loss == "squares":
            slope = z - y
        else:
            slope = np.where((2 * y - 1) * z < 1, 1 - 2 * y, 0)
        if moved:
            w = w - lr * (x.T @ slope / len(y) + l2 * np.r_[w[:-1], 0.0])
    return w


def run(strategy: CodedLinearGD, grid: MeteredGrid, rounds: int = 10):
    return strategy.start(grid, model(), num_rounds=rounds, timeout=9)


def moves(strategy: CodedLinearGD) -> list[bool]:
    return [not report.skipped for report in strategy.iterations.values()]


@pytest.mark.parametrize(("code", "loss"), [("balanced", "logistic"), ("mds", "squares"), ("general", "hinge")])
def test_equals_uncoded_descent_with_random_losses_in_both_phases(code: str, loss: str) -> None:
    faults = RandomFaults(Key(2, "losses"), {"silent": 0.05, "lost_reply": 0.05}, message_types=["train"])
    lr = 0.1 if loss == "squares" else 0.5
    density = 1.0 if code == "general" else 0.5
    strategy = CodedLinearGD(partitions=6, parities=6, code=code, density=density, loss=loss, lr=lr, l2=0.01)
    result = run(strategy, metered(12, fault=faults, app=client(loss)), 40)
    reports = strategy.iterations.values()
    assert sum(moves(strategy)) > 25
    assert sum(report.retries for report in reports) > 10
    assert any(report.answered < 12 for report in reports)
    assert np.abs(vector(result.arrays) - uncoded(6, moves(strategy), loss, lr, 0.01)).max() < 1e-10
    assert np.abs(vector(result.arrays)).max() > 0.05
    skipped = [number for number, report in strategy.iterations.items() if report.skipped]
    assert all(result.train_metrics_clientapp[number]["coded.skipped"] == 1 for number in skipped)


@pytest.mark.parametrize("kind", ["silent", "lost_reply", "offline", "raise"])
def test_a_device_lost_between_the_phases_is_made_up_for(kind: str) -> None:
    def fault(delivery: Delivery) -> Fault:
        gone = delivery.message_type == PHASE2 and delivery.partition in (0, 3)
        return Fault(kind if gone else "none")

    strategy = CodedLinearGD(partitions=5, parities=5, code="gaussian", density=0.8, lr=0.5)
    grid = metered(10, fault=fault)
    result = run(strategy, grid, 4)
    assert moves(strategy) == [True] * 4
    for report in strategy.iterations.values():
        assert (report.answered, report.retries, sorted(report.lost)) == (10, 1, [0, 3])
        assert not {0, 3} & set(report.used)
    assert np.abs(vector(result.arrays) - uncoded(5, [True] * 4)).max() < 1e-10
    # Phase 1 was not asked again.
    assert grid.ledger.by("round", "messages", message_type=PHASE1, direction="down") == dict.fromkeys(range(1, 5), 10)


def test_a_message_that_gets_lost_is_repeated_when_nobody_can_make_up_for_it() -> None:
    seen: dict[int, int] = {}

    def fault(delivery: Delivery) -> str:
        if delivery.message_type == PHASE2 and delivery.partition == 1:
            seen[delivery.round] = seen.get(delivery.round, 0) + 1
            return "lost_reply" if seen[delivery.round] == 1 else "none"
        return "none"

    strategy = CodedLinearGD(partitions=3, parities=0, code="mds", lr=0.5)
    result = run(strategy, metered(3, fault=fault), 3)
    assert [report.retries for report in strategy.iterations.values()] == [1, 1, 1]
    assert np.abs(vector(result.arrays) - uncoded(3, [True] * 3)).max() < 1e-10


def test_what_does_not_decode_is_skipped_and_the_model_stays() -> None:
    def fault(delivery: Delivery) -> str:
        pair = delivery.partition in (2, 5)
        return "silent" if delivery.message_type == PHASE1 and delivery.round == 2 and pair else "none"

    strategy = CodedLinearGD(partitions=3, parities=3, code="replication", lr=0.5)
    result = run(strategy, metered(6, fault=fault), 3)
    assert moves(strategy) == [True, False, True]
    assert "rank 2, 3 partitions need rank 3" in strategy.iterations[2].skipped
    assert np.abs(vector(result.arrays) - uncoded(3, [True, False, True])).max() < 1e-10
    assert np.abs(uncoded(3, [True] * 3) - uncoded(3, [True] * 2)).max() > 1e-3


def test_approximate_says_what_is_missing() -> None:
    def fault(delivery: Delivery) -> str:
        return "silent" if delivery.message_type == PHASE1 and delivery.partition in (2, 5) else "none"

    strategy = CodedLinearGD(partitions=3, parities=3, code="replication", lr=0.5, approximate=True)
    result = run(strategy, metered(6, fault=fault), 3)
    assert [report.missing for report in strategy.iterations.values()] == [len(data(2).x)] * 3
    assert all("lacks 14 examples" in report.notes[0] for report in strategy.iterations.values())
    assert result.train_metrics_clientapp[1]["coded.missing"] == 14
    # It is the exact gradient of the other partitions.
    assert np.abs(vector(result.arrays) - uncoded(2, [True] * 3)).max() < 1e-10


@pytest.mark.parametrize("transport", ["hub", "peers"])
def test_a_device_that_lost_its_state_is_set_up_again(transport: str) -> None:
    strategy = CodedLinearGD(partitions=4, parities=3, code="mds", lr=0.5, transport=transport)
    grid = metered(7)

    def forget(number: int, arrays: ArrayRecord, outcome: object) -> None:
        if number == 2:
            grid.inner.wipe(1)
            grid.inner.wipe(5)

    result = fit(strategy, grid, model(), 5, on_round=forget)
    assert moves(strategy) == [True] * 5
    assert [report.built for report in strategy.iterations.values()] == [list(range(7)), [], [], [1, 5], []]
    assert [report.transfers for report in strategy.iterations.values()] == [12, 0, 0, 4, 0]
    assert "set up again" in strategy.iterations[3].rejected[5]
    assert strategy.iterations[3].answered == 5
    assert np.abs(vector(result.arrays) - uncoded(4, [True] * 5)).max() < 1e-10


def test_a_node_in_the_place_of_another_is_set_up_and_one_that_kept_its_rows_is_not() -> None:
    strategy = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5)
    grid = metered(5)

    def exchange(number: int, arrays: ArrayRecord, outcome: object) -> None:
        if number == 1:
            grid.inner.remove_node(4)
        if number == 2:
            grid.inner.add_node(4)

    fit(strategy, grid, model(), 3, on_round=exchange)
    assert moves(strategy) == [True] * 3
    assert strategy.iterations[3].joined == strategy.iterations[3].built == [4]
    # Another server with the same plan on the same nodes: they join, and have all they need.
    second = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5)
    run(second, grid, 2)
    assert (second.iterations[1].joined, second.iterations[1].built, second.iterations[1].setup_bytes) == (
        [0, 1, 2, 3, 4],
        [],
        {},
    )
    assert moves(second) == [True, True]
    # With another matrix, or rows made from other options of the task, they have nothing.
    third = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5, seed=1)
    run(third, grid, 1)
    assert third.iterations[1].built == [0, 1, 2, 3, 4]
    fourth = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5, seed=1)
    fourth.start(grid, model(), num_rounds=1, train_config=ConfigRecord({"task.partition": "iid"}))
    assert fourth.iterations[1].built == [0, 1, 2, 3, 4]


def test_rows_of_another_plan_are_never_multiplied_with() -> None:
    """Two servers take turns on the same nodes; each finds the other's rows and sets the devices up again."""
    grid = metered(5)
    first, second = (CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5, seed=seed) for seed in (0, 1))
    arrays = fit(first, grid, model(), 2).arrays
    run(second, grid, 1)
    result = fit(first, grid, arrays, 4, start_round=3)
    assert moves(first) == [True, True, False, True]
    assert "set up again" in first.iterations[3].rejected[0]
    assert first.iterations[4].built == [0, 1, 2, 3, 4]
    assert np.abs(vector(result.arrays) - uncoded(3, [True] * 3)).max() < 1e-10


def test_a_parity_waits_for_an_owner_that_is_away() -> None:
    strategy = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5)
    grid = metered(5)

    def leave(number: int, arrays: ArrayRecord, outcome: object) -> None:
        if number == 1:
            grid.inner.remove_node(0)
            grid.inner.wipe(4)
        if number == 3:
            grid.inner.add_node(0)

    result = fit(strategy, grid, model(), 5, on_round=leave)
    assert strategy.iterations[3].notes == ["device 4 waits for partitions [0], whose owners are not there"]
    assert [report.answered for report in strategy.iterations.values()] == [5, 3, 3, 5, 5]
    assert strategy.iterations[4].built == [0, 4]
    assert np.abs(vector(result.arrays) - uncoded(3, [True] * 5)).max() < 1e-10


def test_nothing_begins_before_every_owner_has_joined_once() -> None:
    strategy = CodedLinearGD(partitions=3, parities=1, code="mds")
    grid = metered(4)
    grid.inner.remove_node(2)
    result = fit(strategy, grid, model(), 1)
    assert strategy.plan is None
    assert strategy.iterations[1].skipped == "the owners of partitions [2] have not joined yet"
    assert not vector(result.arrays).any()


class Weighed(MeteredGrid):
    """Adds up the packed partitions in all messages and replies."""

    weighed: dict[str, int]

    def send_and_receive(self, messages, **options):
        batch = list(messages)
        replies = super().send_and_receive(batch, **options)
        self.weighed = getattr(self, "weighed", {"down": 0, "up": 0})
        for direction, those in (("down", batch), ("up", replies)):
            for message in those:
                for name in list(message.content if message.has_content() else ()):
                    if name.startswith(linear.PARTITION):
                        self.weighed[direction] += len(take_frame(message.content, name) or b"")
        return replies


@pytest.mark.parametrize("code", ["mds", "balanced"])
def test_set_up_bytes_are_those_handed_over_through_the_hub(code: str) -> None:
    strategy = CodedLinearGD(partitions=6, parities=4, code=code)
    grid = Weighed(InProcessGrid(client(), 10, seed=4), Ledger())
    run(strategy, grid, 3)
    sizes = [29 + 8 * data(j).x.size for j in range(6)]
    transfers = strategy.plan.transfers
    assert len(transfers) == (24 if code == "mds" else 12)
    assert strategy.iterations[1].setup_bytes == {"hub-up": grid.weighed["up"], "hub-down": grid.weighed["down"]}
    assert grid.weighed == {"up": sum(sizes), "down": sum(sizes[j] for j, _ in transfers)}
    # The ledger counts them under the set-up's own message type, with labels and rows of the matrix.
    down = grid.ledger.total("payload", message_type=SETUP, direction="down")
    assert down == grid.weighed["down"] + 10 * (6 * 8 + 4)
    up = grid.ledger.total("payload", message_type=SETUP, direction="up")
    assert up == grid.weighed["up"] + sum(len(data(j).y) + 4 for j in range(6))
    assert grid.ledger.total("payload", round=(2, 3), message_type=SETUP) == 0
    # The two phases: one vector and its checksum each way.
    assert grid.ledger.total("payload", round=2, message_type=PHASE1, direction="down") == 10 * (6 * 8 + 4)
    assert grid.ledger.total("payload", round=2, message_type=PHASE1, direction="up") == 10 * (14 * 8 + 4)


def test_partitions_that_go_from_peer_to_peer_give_the_same_bits_and_pass_no_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed: list[int] = []
    put = Spool.put

    def counted(self: Spool, parcel):
        handed.append(len(parcel.to_bytes()))
        return put(self, parcel)

    monkeypatch.setattr(Spool, "put", counted)
    results = {}
    for transport in ("hub", "peers"):
        strategy = CodedLinearGD(partitions=6, parities=4, code="balanced", transport=transport)
        grid = Weighed(InProcessGrid(client(), 10, seed=4), Ledger())
        results[transport] = vector(run(strategy, grid, 3).arrays).tobytes()
    assert results["hub"] == results["peers"]
    assert grid.weighed == {"down": 0, "up": 0}
    assert strategy.iterations[1].setup_bytes == {"peer": sum(handed)}
    assert strategy.iterations[1].transfers == len(handed) == 12
    assert sum(handed) == sum(36 + 29 + 8 * data(j).x.size for j, _ in strategy.plan.transfers)


def tampered(action: str, partition: int, change: Callable[[Message], None]) -> Callable:
    """A client whose replies to one kind of message are changed."""
    honest = client()

    def call(msg: Message, context: Context) -> Message:
        reply = honest(msg, context)
        if msg.metadata.message_type == action and context.node_config["partition-id"] == partition:
            change(reply)
        return reply

    return call


def with_vector(name: str, values: np.ndarray, dtype: str = "float64") -> Callable[[Message], None]:
    return lambda reply: linear.put_vector(reply.content, name, values, dtype)


def set_header(**entries) -> Callable[[Message], None]:
    return lambda reply: reply.content.config_records[linear.HEADER].update(entries)


def drop_header(reply: Message) -> None:
    del reply.content[linear.HEADER]


def damage(name: str) -> Callable[[Message], None]:
    def change(reply: Message) -> None:
        frame = bytearray(take_frame(reply.content, name) or b"")
        frame[3] ^= 16
        put_frame(reply.content, name, bytes(frame))

    return change


ROWS = 14
WRONG = {
    "another shape": (with_vector("NAME", np.ones(3)), "expected"),
    "NaN": (with_vector("NAME", np.full(99, np.nan)), "expected"),
    "another type": (with_vector("NAME", np.ones(99), "float32"), "expected"),
    "another plan": (set_header(plan=b"wrongone"), "belongs to plan"),
    "a plan that is no plan": (set_header(plan="text"), "expected 8 bytes"),
    "no header": (drop_header, "no header"),
    "damaged": (damage("NAME"), "checksum"),
}


@pytest.mark.parametrize("phase", [1, 2])
@pytest.mark.parametrize("kind", WRONG)
def test_hostile_replies_are_left_out_with_a_reason(phase: int, kind: str) -> None:
    name, size = (linear.MARGINS, ROWS) if phase == 1 else (linear.GRADIENT, FEATURES + 1)
    change, said = {
        "another shape": (with_vector(name, np.ones(3)), "expected"),
        "NaN": (with_vector(name, np.r_[np.nan, np.ones(size - 1)]), "not all finite"),
        "another type": (with_vector(name, np.ones(size), "float32"), "expected"),
        "damaged": (damage(name), "checksum"),
    }.get(kind, WRONG[kind])
    strategy = CodedLinearGD(partitions=4, parities=3, code="mds", lr=0.5)
    result = run(strategy, metered(7, app=tampered(PHASE1 if phase == 1 else PHASE2, 2, change)), 3)
    assert moves(strategy) == [True] * 3
    for report in strategy.iterations.values():
        assert said in report.rejected[2]
        assert report.lost == [2]
        assert 2 not in report.used
    assert np.abs(vector(result.arrays) - uncoded(4, [True] * 3)).max() < 1e-10


def test_a_wrong_answer_among_more_than_needed_stops_the_step() -> None:
    change = with_vector(linear.MARGINS, np.ones(ROWS))
    strategy = CodedLinearGD(partitions=4, parities=3, code="mds", lr=0.5)
    run(strategy, metered(7, app=tampered(PHASE1, 2, change)), 2)
    # In round 1 the model is zero, and so are all honest answers.
    assert moves(strategy) == [False, False]
    assert "contradict each other" in strategy.iterations[2].skipped


def test_wrong_owners_are_not_taken_in() -> None:
    wrong: dict[str, tuple[Callable[[Message], None], str]] = {
        "loss": (set_header(loss="hinge"), "has loss 'hinge', this server minimises 'logistic'"),
        "features": (set_header(columns=4), "has 4 features, the model has 5"),
        "labels": (with_vector(linear.LABELS, np.full(14, 2.0), "int8"), "other than 0 and 1"),
        "number": (with_vector(linear.LABELS, np.ones(3), "int8"), "expected 14 numbers"),
        "rows": (set_header(rows=-1), "expected a whole number"),
        "type": (set_header(**{"label-type": "object"}), "labels of type 'object'"),
    }
    for change, said in wrong.values():
        strategy = CodedLinearGD(partitions=4, parities=1)
        run(strategy, metered(5, app=tampered(SETUP, 2, change)), 1)
        assert said in strategy.iterations[1].rejected[2]
        assert "[2] have not joined" in strategy.iterations[1].skipped


def test_a_second_node_for_the_same_partition_does_not_replace_the_first() -> None:
    def twins(delivery: Delivery) -> str:
        return "none"

    honest = client()

    def liar(msg: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 4:
            context.node_config["partition-id"] = 1
        return honest(msg, context)

    class Blind(MeteredGrid):
        """An engine that does not know which partitions its nodes hold, as a deployment."""

        def partition_of(self, node_id: int) -> None:
            return None

    strategy = CodedLinearGD(partitions=3, parities=2, code="mds", lr=0.5)
    result = run(strategy, Blind(InProcessGrid(liar, 5, seed=4, fault=twins), Ledger()), 2)
    assert "two nodes online hold partition 1" in strategy.iterations[1].rejected[1]
    assert moves(strategy) == [True, True]
    assert np.abs(vector(result.arrays) - uncoded(3, [True] * 2)).max() < 1e-10


@pytest.mark.parametrize("kind", ["duplicate", "duplicate_reply", "late"])
def test_repeated_and_late_messages_change_nothing(kind: str) -> None:
    def fault(delivery: Delivery) -> Fault:
        return Fault(kind if delivery.partition in (1, 4) else "none")

    broken: list[str] = []
    honest = client()

    def watched(msg: Message, context: Context) -> Message:
        try:
            return honest(msg, context)
        except FedcompError as error:
            broken.append(str(error))
            raise

    strategy = CodedLinearGD(partitions=3, parities=3, code="mds", lr=0.5, transport="peers")
    result = run(strategy, metered(6, fault=fault, app=watched), 4)
    assert broken == []
    if kind == "late":
        # Device 1 owns a partition; it never joins.
        assert moves(strategy) == [False] * 4
    else:
        assert moves(strategy) == [True] * 4
        assert np.abs(vector(result.arrays) - uncoded(3, [True] * 4)).max() < 1e-10


def test_float32_vectors_halve_the_bytes_and_cost_digits() -> None:
    found = {}
    for payload in ("float64", "float32"):
        strategy = CodedLinearGD(partitions=4, parities=4, code="balanced", lr=0.5, payload=payload)
        grid = metered(8)
        error = np.abs(vector(run(strategy, grid, 20).arrays) - uncoded(4, [True] * 20)).max()
        found[payload] = error, grid.ledger.total("payload", round=3) - 4 * grid.ledger.total("messages", round=3)
    assert found["float32"][1] * 2 == found["float64"][1]
    assert found["float64"][0] < 1e-12 < found["float32"][0] < 1e-5


def test_a_resumed_run_gives_the_same_bits(tmp_path: Path) -> None:
    faults = RandomFaults(Key(3, "losses"), {"silent": 0.1}, message_types=["train"])

    def make() -> tuple[CodedLinearGD, MeteredGrid]:
        return CodedLinearGD(partitions=4, parities=4, code="gaussian", lr=0.5), metered(8, fault=faults)

    strategy, grid = make()
    whole = fit(strategy, grid, model(), 8)
    reports = strategy.iterations
    strategy, grid = make()
    half = fit(strategy, grid, model(), 4)
    path = tmp_path / "checkpoint"
    checkpoint.save(path, server_round=4, arrays=half.arrays, strategy=strategy, grid=grid)
    strategy, grid = make()
    found = checkpoint.load(path)
    found.apply(strategy, grid)
    rest = fit(strategy, grid, found.arrays, 8, start_round=5)
    assert vector(rest.arrays).tobytes() == vector(whole.arrays).tobytes()
    assert strategy.iterations == reports
    other = CodedLinearGD(partitions=4, parities=4, code="mds")
    with pytest.raises(FedcompError, match="saved with"):
        other.load_state_dict(strategy.state_dict())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"code": "vandermonde"}, "refused"),
        ({"code": "msd"}, "did you mean 'mds'"),
        ({"loss": "cross-entropy"}, "not the loss of a linear model"),
        ({"payload": "float16"}, "no type of vectors"),
        ({"density": 1.5}, "density"),
        ({"parities": -1}, "parities=-1"),
        ({"retries": True}, "retries=True"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"deadline": 0.0}, "deadline"),
        ({"transport": "pigeon"}, "transport='pigeon'"),
        ({"spool": "/nowhere"}, "needs transport='peers'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CodedLinearGD(**options)


def test_models_that_are_not_linear_are_refused() -> None:
    two = ArrayRecord({"a": Array(np.zeros((2, 3), np.float32)), "b": Array(np.zeros(2, np.float32))})
    three = ArrayRecord({name: Array(np.zeros(1, np.float32)) for name in "abc"})
    integers = ArrayRecord({"a": Array(np.zeros(3, np.int64))})
    for wrong in (two, three, integers, ArrayRecord({})):
        with pytest.raises(ConfigError, match="exact for linear models only"):
            LinearModel(wrong)
    with pytest.raises(ConfigError, match="linear task"):
        CodedLinearGD(partitions=2).start(metered(4), two, num_rounds=1)
    assert not LinearModel(ArrayRecord({"w": Array(np.zeros(3))})).shape.bias


@pytest.mark.filterwarnings("ignore::fedcomp.tasks.sources.DataWarning")
def test_tasks_that_are_not_linear_say_so_and_linear_ones_give_their_rows() -> None:
    strategy = CodedLinearGD(partitions=2, parities=1)
    config = ConfigRecord({"task": "wifi", "clients": 3})
    grid = metered(3, app=generic_app)
    strategy.start(grid, model(), num_rounds=1, train_config=config)
    assert "not linear in its inputs" in strategy.iterations[1].rejected[0]
    task = get_task("digits-zero", model="svm")
    x, y = task.linear_rows(task.client(0, 4))
    assert (x.dtype, y.dtype, set(np.unique(y))) == (np.float64, np.float64, {0.0, 1.0})
    assert task.linear_loss == "hinge"
    digits = get_task("digits")
    np.testing.assert_array_equal(task.train_split.x, digits.train_split.x)
    np.testing.assert_array_equal(task.test.y, (digits.test.y == 0).astype(int))


def test_an_app_without_the_handlers_is_told_what_it_lacks() -> None:
    strategy = CodedLinearGD(partitions=2, parities=1)
    run(strategy, metered(3, app=ClientApp()), 1)
    assert "answer_coded_linear()" in strategy.iterations[1].rejected[0]


def test_partitions_follow_from_the_number_of_clients() -> None:
    strategy = CodedLinearGD(parities=2, lr=0.5)
    strategy.start(metered(5), model(), num_rounds=1, train_config=ConfigRecord({"clients": 5}))
    assert (strategy.plan.partitions, strategy.plan.devices) == (3, 5)
    with pytest.raises(ConfigError, match="clients=2"):
        CodedLinearGD(parities=2).start(metered(2), model(), num_rounds=1, train_config=ConfigRecord({"clients": 2}))


def test_a_step_that_is_not_finite_keeps_the_model() -> None:
    strategy = CodedLinearGD(partitions=3, parities=1, loss="squares", lr=1e308)
    result = run(strategy, metered(4, app=client("squares")), 2)
    assert "not finite" in strategy.iterations[1].skipped
    assert not vector(result.arrays).any()
