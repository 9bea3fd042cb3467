"""Programs over Flower's messages: the pair's bits, nothing lost under faults, nobody believed beyond the rules."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, Strategy
from message_examples import all_damages
from plain_grid import PlainGrid
from round_paths import Personal
from toy import by_partition, client_app, model, stack

from fedcomp.clients import memory as kept
from fedcomp.clients.compressed import compression
from fedcomp.codecs import Codec, ErrorFeedback, Identity, PowerSGD, ScaleCom, SignSGD, TopK
from fedcomp.errors import ConfigError, NoUsableReply, StateError
from fedcomp.flower import asks, checkpoint
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import EXACT, FRAME, NODE_RECORD, frames, payload_bytes, put_frame, take_frame
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.rounds import fit
from fedcomp.layout import NONE_DENSE, Layout
from fedcomp.program import Ask, Now, Round
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.inbox import Inbox
from fedcomp.strategies.server import Server
from fedcomp.systems.pair import Pair
from fedcomp.systems.power_sgd import SharedBasis
from fedcomp.systems.shared_support import SharedSupport
from fedcomp.versions import Broadcast

NODES, ROUNDS = 4, 5
ONE: dict[str, Any] = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
QUIET = {**ONE, "fraction_evaluate": 0.0}
SPARSE = ErrorFeedback(TopK(density=0.02))
LAYOUT = Layout.of({name: array.numpy() for name, array in model().items()})

SYSTEMS: dict[str, Callable[[], Server]] = {
    "pair": lambda: Server(Pair(ErrorFeedback(TopK(0.05))), FedAvg(**QUIET)),
    "pair, lossless steps": lambda: Server(Pair(ErrorFeedback(TopK(0.05))), FedAvg(**QUIET), downlink=Identity()),
    "shared support": lambda: Server(SharedSupport(ScaleCom(0.05)), FedAvg(**QUIET), downlink=ScaleCom(0.05)),
    "shared basis": lambda: Server(SharedBasis(PowerSGD(rank=2)), FedAvg(**QUIET), downlink=PowerSGD(rank=2)),
}


def grid_of(*halves: Any, nodes: int = NODES, **engine: Any) -> MeteredGrid:
    return MeteredGrid(InProcessGrid(client_app(halves or [compression()]), nodes, seed=4, **engine))


def bits(arrays: ArrayRecord) -> dict[str, tuple[str, bytes]]:
    return {name: (array.dtype, array.numpy().tobytes()) for name, array in arrays.items()}


def play(strategy: Strategy, grid: Any, rounds: int = ROUNDS, **options: Any) -> ArrayRecord:
    return fit(strategy, grid, options.pop("arrays", None) or model(), rounds, timeout=9, **options).arrays


# Faults.


@pytest.mark.parametrize("which", [pytest.param(n, marks=() if n == "pair" else pytest.mark.long) for n in SYSTEMS])
@pytest.mark.parametrize("restart", [False, True], ids=["resumed", "crashed"])
def test_a_run_that_goes_on_elsewhere_ends_the_same(which: str, restart: bool, tmp_path: Path) -> None:
    """A run that is resumed; and a server that crashes once its clients have answered, whose round is made again."""
    whole, path = SYSTEMS[which](), tmp_path / "run.ckpt"
    expected = play(whole, grid_of())
    first, grid = SYSTEMS[which](), grid_of()

    def save(number: int, arrays: ArrayRecord, outcome: Any) -> None:
        if number == 2:
            checkpoint.save(path, server_round=2, arrays=arrays, strategy=first, grid=grid)

    play(first, grid, 3 if restart else 2, on_round=save)
    second = SYSTEMS[which]()
    held = checkpoint.load(path)
    if restart:
        # The nodes are as they were left.
        held.apply(second)
        assert second.sequence > first.sequence
    else:
        grid = grid_of()
        held.apply(second, grid)
        assert second.sequence < first.sequence + 1
    assert bits(play(second, grid, start_round=3, arrays=held.arrays)) == bits(expected)
    if not restart:
        assert second.reports == whole.reports
    with pytest.raises(StateError, match="resume with the same"):
        Server(Pair(ErrorFeedback(TopK(0.5))), FedAvg(**QUIET)).load_state_dict(second.state_dict())


# Nobody is believed beyond the rules.


def lying(about: Callable[[Message], None], *, node: int = 2) -> Callable[..., Message]:
    """Return a mod by which one client changes its reply to training."""

    def mod(msg: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(msg, context)
        if context.node_config["partition-id"] == node and msg.metadata.message_type == "train":
            about(reply)
        return reply

    return mod


def of_honest(missing: int) -> ArrayRecord:
    """Return the model after a round without one client."""

    def refuse(reply: Message) -> None:
        del reply.content[NODE_RECORD]

    return play(Server(Pair(SPARSE), FedAvg(**QUIET)), grid_of(lying(refuse, node=missing), compression()), 1)


@pytest.mark.long
def test_a_damaged_head_refuses_that_answer_alone_and_by_name() -> None:
    head = asks.AnswerHead(partition_id=2, sequence=1, generation=1, record="arrays", state="begun", memory=0.5)
    without, tried = bits(of_honest(2)), 0
    for what, content in all_damages(head):
        damaged = content.config_records.get(NODE_RECORD)
        # An optional field that is left out, or of the right type and range, is no damage.
        if damaged is None or len(damaged) > 1000:
            continue

        def about(reply: Message, damaged: ConfigRecord = damaged) -> None:
            frames = {k: v for k, v in reply.content[NODE_RECORD].items() if k.startswith(FRAME)}
            reply.content[NODE_RECORD] = ConfigRecord({**damaged, **frames})

        server, grid = Server(Pair(SPARSE), FedAvg(**QUIET)), grid_of(lying(about), compression())
        assert bits(play(server, grid, 1)) == without, what
        (reason,) = server.reports[1].refused.values()
        assert len(reason) < 400, what
        tried += 1
    assert tried > 50


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sequence": 7}, "answers message 7, expected 1: a stale reply"),
        ({"partition-id": 1}, "says that it is partition 1, and it is 2"),
        ({"record": "fedcomp.x"}, "named 'fedcomp.x', like another record"),
        ({"record": "metrics"}, "named 'metrics', like another record"),
        ({"lacks": ["0" * 32]}, "says that it lacks the blobs that this message holds"),
        ({"say": "Lead"}, "has no words 'Lead'"),
        ({FRAME + "values": b"junk"}, "Error: "),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_refused(change: dict[str, Any], why: str) -> None:
    def about(reply: Message) -> None:
        reply.content[NODE_RECORD] = ConfigRecord({**reply.content[NODE_RECORD], **change})

    server = Server(Pair(SPARSE), FedAvg(**QUIET))
    assert bits(play(server, grid_of(lying(about), compression()), 1)) == bits(of_honest(2))
    (reason,) = server.reports[1].refused.values()
    assert why.removesuffix(": ") in reason or why == "Error: "
    assert server.reports[1].used == NODES - 1


def test_values_of_an_app_that_has_not_trained_are_refused() -> None:
    """Neither with words in place of a training nor in a later exchange: nothing says what they weigh."""

    def about(reply: Message) -> None:
        words = {"partition-id": 2, "sequence": 1, "say": "Lead", asks.SAY + "lead": False}
        reply.content[NODE_RECORD] = ConfigRecord(words)

    server = SYSTEMS["shared support"]()
    play(server, grid_of(lying(about), compression()), 1)
    assert list(server.reports[1].refused.values()) == ["sends ['values'], but its app has not trained"]
    assert server.reports[1].used == NODES - 1


def test_clients_without_the_half_are_named_and_a_run_that_learns_nothing_ends() -> None:
    lacking = r"none of the 4 clients .*lacks the client half of SharedSupport; write app = fc.client\(app\)\. Nothing"
    with pytest.raises(NoUsableReply, match=lacking):
        play(Server(SharedSupport(ScaleCom(0.05)), FedAvg(**QUIET)), InProcessGrid(client_app(), NODES), 1)
    why = "the client answered with a model: its app cannot take part in SharedSupport"
    refusing = Server(SharedSupport(ScaleCom(0.05)), FedAvg(**QUIET))
    with pytest.raises(NoUsableReply, match=f"{why} \\(this client accepts .*'qsgd'"):
        play(refusing, grid_of(compression(accept=["qsgd"])), 1)


@pytest.mark.parametrize(
    ("inner", "codec", "downlink", "halves"),
    [
        pytest.param(lambda: FedAvg(**ONE), SPARSE, None, 3, id="a client without the half"),
        pytest.param(lambda: FedAvg(**ONE), SPARSE, TopK(0.05), 3, id="and a downlink", marks=pytest.mark.long),
        pytest.param(lambda: FedAvg(**ONE), SignSGD(step=0.1), None, 3, id="and votes", marks=pytest.mark.long),
        pytest.param(lambda: FedAvg(**ONE), Identity(), TopK(0.05), 3, id="and models", marks=pytest.mark.long),
        pytest.param(lambda: FedMedian(**ONE), SPARSE, None, 3, id="and a median", marks=pytest.mark.long),
        pytest.param(lambda: Personal(**ONE), SPARSE, TopK(0.05), 4, id="models of their own"),
        pytest.param(lambda: Personal(**ONE), Identity(), None, 4, id="and whole models", marks=pytest.mark.long),
    ],
)
def test_what_others_send_is_taken_beside_frames(
    inner: Callable[[], Strategy], codec: Codec, downlink: Codec | None, halves: int
) -> None:
    """Of clients without the half, or with a model of their own."""
    random.seed(1)
    apps = [client_app([compression()] if node < halves else []) for node in range(NODES)]
    strategy = Compressed(inner(), codec, downlink, feedback=False)
    grid = MeteredGrid(InProcessGrid(by_partition(apps.__getitem__), NODES, seed=4))
    assert bits(play(strategy, grid, 3)) != bits(model())
    found = [(r.used, r.plain, r.compressed) for r in strategy.reports.values()]
    assert found == [(NODES, NODES - halves, halves)] * 3
    assert not any(r.refused for r in strategy.reports.values())


def test_reports_count_the_bytes_of_replies_that_are_used() -> None:
    """Frames and buffers of those with the half; whole replies, also of one without it; what evaluations bring."""
    apps = [client_app([compression()] if node < 3 else []) for node in range(NODES)]
    framed: dict[int, int] = {}
    buffers: dict[int, int] = {}
    whole: dict[str, dict[int, int]] = {"train": {}, "evaluate": {}}

    def app(msg: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        reply = apps[node](msg, context)
        if msg.metadata.message_type == "evaluate":
            reply.content["more"] = to_record({"w": np.zeros(10 + node, np.float32)})
        else:
            framed[node] = sum(map(len, frames(reply.content).values()))
            buffers[node] = sum(map(len, asks.data_in(reply.content, EXACT).values()))
        whole[msg.metadata.message_type][node] = payload_bytes(reply)
        return reply

    server = Server(Pair(SPARSE), FedAvg(**ONE), policy=NONE_DENSE)
    play(server, MeteredGrid(InProcessGrid(app, NODES, seed=4)), 1, arrays=model(counter=True))
    report, evaluation = server.reports[1], server.evaluations[1]
    assert (report.used, report.plain) == (NODES, 1)
    assert framed[3] == buffers[3] == 0
    assert report.frame_bytes == sum(framed.values())
    assert report.payload_bytes == sum(whole["train"].values())
    assert report.model_bytes == NODES * sum(array.numpy().nbytes for array in model(counter=True).values())
    # No tensor of these is dense but the buffers that travel as values.
    assert report.dense_bytes == sum(buffers.values()) > 0
    assert evaluation.payload_bytes == sum(whole["evaluate"].values()) >= 4 * sum(10 + node for node in range(NODES))


# Who is there.


def test_on_a_grid_that_knows_no_partitions_their_own_word_gives_the_same_bits() -> None:
    """With two exchanges and blobs, from the first round on."""
    for which in ("pair", "shared basis"):
        plain = PlainGrid(InProcessGrid(client_app([compression()]), NODES, seed=4))
        assert bits(play(SYSTEMS[which](), MeteredGrid(plain))) == bits(play(SYSTEMS[which](), grid_of()))


# What a node holds.


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_a_node_that_lost_its_blobs_is_asked_once_more_in_the_same_round(how: str) -> None:
    """It holds the model, since it has evaluated it, and the basis follows from the last step."""

    def make() -> Server:
        return Server(SharedBasis(PowerSGD(rank=2)), FedAvg(**ONE), downlink=PowerSGD(rank=2))

    server, grid = make(), grid_of()
    forgetting: list[str] = []

    def forget(number: int, arrays: ArrayRecord, outcome: Any) -> None:
        if number == 2:
            node = grid.inner.node(0)
            state = (context := node.context()).state
            for key in [key for key in state if key.startswith(kept.BLOB)]:
                data = take_frame(state, key)
                if how == "damaged":
                    put_frame(state, key, data[:-1] + b"?")
                else:
                    state.pop(key, None)
                forgetting.append(key)
            node.commit(context)

    assert bits(play(server, grid, on_round=forget)) == bits(play(make(), grid_of()))
    assert forgetting
    assert all(report.used == NODES and not report.refused for report in server.reports.values())


def test_of_a_whole_model_no_node_is_believed_to_know_what_follows_from_the_step_to_it() -> None:
    """A dense step and another are longer than the model: a node whose answers were lost evaluates the whole one, and
    the basis comes with the next message, not after a refusal."""

    asked: list[str] = []

    def fault(delivery: Delivery) -> str | None:
        if delivery.partition != 1:
            return None
        asked.extend([delivery.message_type] if delivery.round == 4 else [])
        return "lost_reply" if delivery.round == 2 or (delivery.round, delivery.message_type) == (3, "train") else None

    system = SharedBasis(PowerSGD(rank=2), warmup_rounds=2)
    server = Server(system, FedAvg(**ONE), downlink=system.codec)
    play(server, grid_of(fault=fault), 4)
    assert asked == ["train", "evaluate"]
    assert server.reports[4].used == NODES


def test_a_model_that_somebody_changed_goes_down_whole_and_steps_go_on() -> None:
    server, grid = SYSTEMS["shared support"](), grid_of()
    play(server, grid, 2)
    changed = play(server, grid, 4, start_round=3, arrays=model(3.0))
    assert all(report.used == NODES for report in server.reports.values())
    assert np.array_equal(server.down.broadcast.reference, LAYOUT.flatten(to_arrays(changed)))


@pytest.mark.parametrize("codec", [Identity(), SPARSE], ids=["whole models", "changes"])
def test_an_open_round_keeps_what_its_clients_train_from_while_the_reference_moves(codec: Codec) -> None:
    """The reference is moved in place; a round that another one, or an evaluation, overtakes has begun before that."""

    def run(*, overtaken: bool) -> tuple[dict[str, tuple[str, bytes]], bool]:
        server, grid = Server(Pair(codec), FedAvg(**ONE), downlink=TopK(0.05)), grid_of()
        # So that the reference is not the model.
        arrays = play(server, grid, 3)
        asked = list(server.configure_train(4, arrays, ConfigRecord(), grid))
        replies = list(grid.send_and_receive(asked, timeout=9))
        before = server.down.broadcast.reference.copy()
        if overtaken:
            assert server.configure_evaluate(4, model(3.0), ConfigRecord(), grid)
        moved = not np.array_equal(before, server.down.broadcast.reference)
        made, _ = server.aggregate_train(4, replies)
        assert made is not None
        return bits(made), moved

    (plain, still), (late, moved) = run(overtaken=False), run(overtaken=True)
    assert (still, moved) == (False, True)
    assert plain == late


# What is refused before a run.


def test_what_does_not_fit_is_refused_with_reason() -> None:
    with pytest.raises(ConfigError, match=r"makes steps \(changes of the model"):
        Server(SharedSupport(ScaleCom(0.05)), FedAvg(), downlink=Identity())
    server = Server(Pair(SPARSE), FedAvg(**QUIET))
    with pytest.raises(ConfigError, match="round 3 was not configured"):
        server.aggregate_train(3, [])


def test_another_training_begins_with_nothing_known(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = Server(Pair(SPARSE), FedAvg(**QUIET))
    once = server.start(grid_of(), model(), num_rounds=2, timeout=9).arrays
    assert "restarted" not in caplog.text
    grid = grid_of()
    again = server.start(grid, model(), num_rounds=2, timeout=9).arrays
    assert caplog.text.count("restarted with another model") == 1
    assert bits(once) == bits(again)
    assert len(server.reports) == 2
    more = server.start(grid, again, num_rounds=2, timeout=9).arrays
    assert caplog.text.count("restarted") == 1
    assert stack(more).any()
    assert not any(report.fresh for report in server.reports.values() if report.round > 2)


@pytest.mark.parametrize(
    ("inner", "downlink", "steps"),
    [(FedAvg, ScaleCom(0.05), 2), (FedAvg, None, 0), (FedAdam, ScaleCom(0.05), 0)],
    ids=["the mean", "no downlink", "no mean"],
)
def test_a_systems_own_step_goes_down_where_it_is_what_the_model_moved_by(
    inner: type[FedAvg], downlink: Codec | None, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[int] = []
    push = Broadcast.push

    def counted(self: Broadcast, *args: Any) -> int:
        pushed.append(1)
        return push(self, *args)

    monkeypatch.setattr(Broadcast, "push", counted)
    server = Server(SharedSupport(ScaleCom(0.05)), inner(**QUIET), downlink=downlink)
    play(server, grid_of(), 2)
    assert len(pushed) == steps
    assert [report.used for report in server.reports.values()] == [NODES] * 2


def test_a_report_says_how_long_the_server_worked_and_not_how_long_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def slowly(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **options: Any) -> Any:
            clock[0] += seconds
            return work(*args, **options)

        return slow

    class Slow(Pair):
        def round(self, now: Now) -> Round:
            clock[0] += 1.0
            answers = yield [Ask(node) for node in now.nodes]
            clock[0] += 2.0
            return now.mean_of(self.codec, answers)

    monkeypatch.setattr("fedcomp.strategies.server.time.perf_counter", lambda: clock[0])
    inner = FedAvg(**QUIET)
    monkeypatch.setattr(inner, "aggregate_train", slowly(4.0, inner.aggregate_train))
    server = Server(Slow(SPARSE), inner)
    monkeypatch.setattr(Inbox, "agree", slowly(8.0, Inbox.agree))
    app = client_app([compression()])
    grid = MeteredGrid(InProcessGrid(slowly(1000.0, app), NODES, seed=4))
    play(server, grid, 2)
    assert [report.seconds for report in server.reports.values()] == [15.0, 15.0]


def test_updates_that_wait_for_a_lost_exchange_do_not_end_a_run() -> None:
    def fault(delivery: Delivery) -> str | None:
        if delivery.round > 1 or delivery.message_type != "query":
            return None
        return "raise" if delivery.partition == 0 else "lost_reply"

    server = SYSTEMS["shared support"]()
    play(server, grid_of(nodes=3, fault=fault), 2)
    assert [report.used for report in server.reports.values()] == [0, 3]
    assert "no client could choose a support" in server.reports[1].notes[0]
