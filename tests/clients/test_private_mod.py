"""What leaves a client in a private round: the update, and nothing else of its data."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from private_runs import server
from toy import with_halves

from fedcomp.clients.compressed import compression
from fedcomp.clients.edge import STATE_FOLDER
from fedcomp.clients.half import ClientHalf
from fedcomp.clients.memory import MEMORY, Held
from fedcomp.clients.private.local_dp import local_privacy
from fedcomp.clients.private.mod import STAYS, private
from fedcomp.codecs import Identity, TopK, chain
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError, LayoutError
from fedcomp.flower import asks as heads
from fedcomp.flower.payload import EXACT, FRAME, NODE_RECORD, frames, put_frame
from fedcomp.flower.privacy import PRIVATE
from fedcomp.privacy.errors import PrivacyLedgerError
from fedcomp.privacy.journal import Journal
from fedcomp.privacy.local import LocalPolicy, Privatise, privatised
from fedcomp.systems.pair import Pair
from fedcomp.systems.private.local import Local

MODEL = {
    "w": np.zeros(8, np.float32),
    "bn.running_mean": np.float32([0.25, -0.5]),
    "num_batches_tracked": np.array(3, np.int64),
}


def record(arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(a)) for name, a in arrays.items()})


def talkative(content: RecordDict) -> RecordDict:
    """What an app answers that tells all it knows."""
    after = {name: np.asarray(a.numpy() + 5, a.numpy().dtype) for name, a in content["arrays"].items()}
    return RecordDict(
        {
            "arrays": record(after),
            "metrics": MetricRecord({"num-examples": 17, "loss": 0.4321}),
            "notes": ConfigRecord({"labels": [3, 4]}),
            NODE_RECORD: ConfigRecord({"partition-id": 2, "histogram": [1, 2]}),
        }
    )


def app_of(mods, answer=talkative, kind="train") -> ClientApp:
    app = with_halves(mods)

    def handler(msg: Message, context: Context) -> Message:
        out = answer(msg.content)
        return Message(out, reply_to=msg)

    getattr(app, kind)()(handler)
    return app


def node() -> Context:
    return Context(1, 1, {"partition-id": 2}, RecordDict(), {})


def ask(app, *, codec=None, asks=True, sequence=1, kind="train", context=None, session=b"s", model=MODEL) -> Message:
    content = RecordDict({"arrays": record(model), "config": ConfigRecord({PRIVATE: True} if asks else {})})
    if codec is not None:
        system = Pair(codec) if privatised(codec) is None else Local(codec)
        heads.put(content, head_of(system.to_config(), session, sequence))
    with server():
        msg = Message(content, 1, kind)
        return app(msg, node() if context is None else context)


def head_of(system: dict[str, Any], session: bytes, sequence: int = 1) -> heads.AskHead:
    """Return what asks for training."""
    return heads.AskHead(sequence, 0, session.ljust(8), sequence, system=system, model="arrays")


def sent(reply: Message) -> bytes | None:
    """Return the frame of a system in a message."""
    return heads.data_in(reply.content, FRAME).get("values")


def everything(reply: Message) -> bytes:
    return repr({k: list(dict(v).items()) for k, v in reply.content.items()}).encode() + b"".join(
        frames(reply.content).values()
    )


BOTH = [compression(), private()]


@pytest.mark.parametrize(
    ("mods", "codec"),
    [
        ([private()], None),
        (BOTH, None),
        ([private()], TopK(density=0.5)),
        *((mods, codec) for mods in (BOTH, [compression()]) for codec in (TopK(density=0.5), Identity())),
        (BOTH, ErrorFeedback(TopK(density=0.5))),
        ([compression()], ErrorFeedback(TopK(density=0.5))),
    ],
)
def test_a_private_reply_holds_the_update_and_the_partition(mods, codec) -> None:
    reply = ask(app_of(mods), codec=codec)
    plain = codec is None or (len(mods) == 1 and mods[0].name == "private")
    assert set(reply.content) == ({"arrays", NODE_RECORD} if plain else {NODE_RECORD})
    assert (sent(reply) is None) == plain
    assert not heads.data_in(reply.content, EXACT)
    header = {name for name in reply.content[NODE_RECORD] if not name.startswith("fedcomp.")}
    assert header <= {"partition-id", "record", "sequence", "generation", "state"}
    if "arrays" in reply.content:
        after = {name: a.numpy() for name, a in reply.content["arrays"].items()}
        np.testing.assert_array_equal(after["w"], MODEL["w"] + 5)
        for name in ("bn.running_mean", "num_batches_tracked"):
            np.testing.assert_array_equal(after[name], MODEL[name])
            assert after[name].dtype == MODEL[name].dtype


def test_a_message_that_does_not_ask_passes_through_untouched() -> None:
    reply = ask(app_of([compression(), private()]), asks=False)
    assert set(reply.content) == {"arrays", "metrics", "notes", NODE_RECORD}
    assert reply.content["arrays"]["num_batches_tracked"].numpy() == 8
    reply = ask(app_of([compression(), private()]), asks=False, codec=ErrorFeedback(TopK(density=0.5)))
    assert "metrics" in reply.content
    assert sent(reply)
    assert heads.data_in(reply.content, EXACT)
    assert heads.find_answer(reply.content).memory > 0
    evaluated = ask(app_of([private()], kind="evaluate"), kind="evaluate")
    assert "metrics" in evaluated.content


@pytest.mark.parametrize("value", ["yes", 1, False])
def test_only_true_asks_for_privacy(value) -> None:
    content = RecordDict({"arrays": record(MODEL), "config": ConfigRecord({PRIVATE: value})})
    with server():
        reply = app_of([private()])(Message(content, 1, "train"), node())
    assert "metrics" in reply.content


def test_an_app_that_writes_into_what_it_was_given_does_not_move_the_buffers() -> None:
    def in_place(content: RecordDict) -> RecordDict:
        given = content["arrays"]
        for name in list(given):
            given[name] = Array(np.asarray(given[name].numpy() + 9, given[name].numpy().dtype))
        return RecordDict({"arrays": given, "metrics": MetricRecord({"num-examples": 1})})

    for mods, codec in (([private()], None), ([compression()], TopK(density=0.5))):
        reply = ask(app_of(mods, in_place), codec=codec)
        if codec is None:
            np.testing.assert_array_equal(reply.content["arrays"]["bn.running_mean"].numpy(), MODEL["bn.running_mean"])
        assert not heads.data_in(reply.content, EXACT)


def test_what_is_not_the_model_does_not_leave(caplog) -> None:
    def smuggle(content: RecordDict) -> RecordDict:
        return RecordDict({"arrays": record({**MODEL, "activations": np.ones(3, np.float32)})})

    two = lambda content: RecordDict({"arrays": record(MODEL), "gradients": record(MODEL)})  # noqa: E731
    for mods, codec in (([private()], None), ([compression()], TopK(density=0.5))):
        for answer, words in ((smuggle, "activations"), (two, "2 ArrayRecords")):
            caplog.clear()
            with caplog.at_level(logging.ERROR, "flwr.fedcomp"):
                reply = ask(app_of(mods, answer), codec=codec)
            assert (reply.error.code, reply.error.reason) == (2, STAYS)
            assert any(words in str(r.exc_info) for r in caplog.records)


# Local privacy: the client's own word.

POLICY = LocalPolicy(noise_multiplier=2.0, releases=3)
LOCAL = chain(Privatise(1.0, 2.0), TopK(density=0.5))


class Folder:
    """The state folder of this test's nodes."""

    path = Path()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Folder, "path", tmp_path / "state")
    return Folder.path


def local_app(policy=POLICY, *, mods=None, answer=talkative) -> ClientApp:
    return app_of(
        [local_privacy(policy, state_dir=Folder.path), *([compression(), private()] if mods is None else mods)], answer
    )


def test_a_locally_private_reply_holds_a_frame_and_nothing_beside_it() -> None:
    # The server does not even ask for privacy: it is the client that wants it.
    for asks in (True, False):
        reply = ask(local_app(), codec=LOCAL, asks=asks)
        assert set(reply.content) == {NODE_RECORD}
        assert sent(reply)
        assert b"4321" not in everything(reply)


def test_a_second_frame_does_not_leave_beside_the_private_one() -> None:
    def smuggling(msg: Message, context: Context, call_next) -> Message:
        reply = call_next(msg, context)
        put_frame(reply.content, EXACT, b"4321")
        return reply

    reply = ask(local_app(mods=[smuggling, compression(), private()]), codec=LOCAL)
    assert "produced something else" in reply.error.reason


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (None, "does not privatise"),
        (TopK(density=0.5), "does not privatise"),
        (chain(Privatise(1.0, 1.9), TopK(density=0.5)), "multiplier 2 or more, the announced codec 1.9"),
        (chain(Privatise(1.0, 0.0), Identity()), "multiplier 2 or more"),
        (chain(Privatise(1.0, 2.0, insecure_deterministic=True), Identity()), "takes it from a seed"),
    ],
    ids=["nothing", "no noise", "less noise", "zero noise", "seeded"],
)
def test_a_client_with_a_policy_refuses_what_does_not_satisfy_it(codec, said) -> None:
    reply = ask(local_app(), codec=codec)
    assert reply.has_error()
    assert said in reply.error.reason


@pytest.mark.parametrize("kind", ["evaluate", "query", "train.other"])
def test_a_client_with_a_policy_answers_nothing_else(kind) -> None:
    app = local_app()

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        raise AssertionError("nothing is evaluated for a server that is not trusted")

    app.query()(evaluate)
    app.train("other")(evaluate)
    assert ask(app, codec=LOCAL, kind=kind).has_error()


def test_the_limit_outlives_sessions_and_codecs() -> None:
    context, app = node(), local_app()
    other = chain(Privatise(5.0, 4.0), Identity())
    for session, codec in ((b"a", LOCAL), (b"b", LOCAL), (b"c", other)):
        assert not ask(app, codec=codec, session=session, context=context).has_error()
    for session, codec in ((b"d", LOCAL), (b"c", other)):
        reply = ask(app, codec=codec, session=session, sequence=2, context=context)
        assert "sends no more" in reply.error.reason
    # The state of the codec alone begins anew with each session: it would have gone on for ever.
    assert int(context.state[MEMORY]["0.releases"].numpy()) == 1


def test_a_redelivered_message_gets_the_stored_frame_and_is_counted_once() -> None:
    context, app = node(), local_app()
    for sequence in (1, 2, 3):
        first = sent(ask(app, codec=LOCAL, sequence=sequence, context=context))
        again = sent(ask(app, codec=LOCAL, sequence=sequence, context=context))
        assert first == again
    # At its limit the client still answers the last message, and only with what has left already.
    assert sent(ask(app, codec=LOCAL, sequence=3, context=context)) == first
    assert ask(app, codec=LOCAL, sequence=4, context=context).has_error()
    # With the memory gone the same message would be noised anew: another release, which is over the limit.
    del context.state[Held.KEY]
    assert "sends no more" in ask(app, codec=LOCAL, sequence=3, context=context).error.reason


@pytest.mark.parametrize("where", ["the node's configuration", "the app, as in a simulation"])
def test_a_limit_holds_over_runs_and_restarts(where, folder) -> None:
    """Flower gives an app a new context in every run, and a restarted node one, too."""
    named = where.startswith("the node")
    app = app_of([local_privacy(POLICY, state_dir=None if named else folder), compression(), private()])

    def fresh(run: int) -> Context:
        return Context(run, 1, {"partition-id": 2, **({STATE_FOLDER: str(folder)} if named else {})}, RecordDict(), {})

    left = set()
    for run in (1, 2, 3):
        reply = ask(app, codec=LOCAL, session=b"run %d" % run, context=fresh(run))
        left.add(sent(reply))
    assert len(left) == 3
    for run in (4, 1, 5):
        reply = ask(app, codec=LOCAL, session=b"run %d" % run, context=fresh(run))
        assert "has sent 3 private messages and sends no more" in reply.error.reason
    # Another partition has other data, and a count of its own.
    other = fresh(1)
    other.node_config["partition-id"] = 3
    assert not ask(app, codec=LOCAL, context=other).has_error()
    # And so has a node with an older copy of its folder, of which no node can know: the page says so.
    (folder / "2.messages.jsonl").unlink()
    assert not ask(app, codec=LOCAL, context=fresh(5)).has_error()


def test_a_limit_without_a_place_to_count_is_refused_with_what_to_add() -> None:
    def never(content: RecordDict) -> RecordDict:
        raise AssertionError("nothing is trained for an answer that cannot leave")

    app = app_of([local_privacy(POLICY), compression(), private()], never)
    for folder, said in ((None, "start it with --state-dir DIR"), (7, "expected an absolute"), ("here", "absolute")):
        context = Context(1, 1, {} if folder is None else {STATE_FOLDER: folder}, RecordDict(), {})
        try:
            reason = ask(app, codec=LOCAL, context=context).error.reason
        except ConfigError as error:
            # What keeps the whole state says it first.
            reason = str(error)
        assert said in reason


def test_a_message_is_counted_on_the_disk_before_it_leaves(folder, monkeypatch) -> None:
    app = local_app()
    with monkeypatch.context() as patch:

        def full(self: Journal, entry: Any) -> None:
            raise PrivacyLedgerError("the disk is full; nothing was released")

        patch.setattr(Journal, "append", full)
        reply = ask(app, codec=LOCAL, context=node())
        assert "the disk is full" in reply.error.reason
    for _ in range(3):
        assert not ask(app, codec=LOCAL, context=node()).has_error()
    assert ask(app, codec=LOCAL, context=node()).has_error()
    # Cut off at its end, it is not read as fewer messages.
    path = folder / "2.messages.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert "was cut off at its end" in ask(app, codec=LOCAL, context=node()).error.reason


def test_nodes_without_a_partition_count_under_one_name(folder) -> None:
    """A node id is another one after a restart without a key."""
    app = local_app()
    for node_id in (1, 2, 3):
        assert not ask(app, codec=LOCAL, context=Context(1, node_id, {}, RecordDict(), {})).has_error()
    assert ask(app, codec=LOCAL, context=Context(1, 4, {}, RecordDict(), {})).has_error()


def test_the_servers_limit_is_kept_without_a_policy() -> None:
    context, app = node(), local_app(None)
    limited = chain(Privatise(1.0, 2.0, releases=2), TopK(density=0.5))
    for session in (b"a", b"b"):
        assert not ask(app, codec=limited, session=session, context=context).has_error()
    assert ask(app, codec=limited, session=b"c", context=context).has_error()
    assert not ask(app, codec=TopK(density=0.5), session=b"d", context=context).has_error()


def test_an_app_whose_mods_do_not_compress_sends_nothing() -> None:
    """It cannot be built without compression; here something else bears its name."""
    for mods in ([ClientHalf("compression")], [ClientHalf("compression"), private()]):
        reply = ask(local_app(mods=mods), codec=LOCAL)
        assert reply.has_error()
        assert "something else" in reply.error.reason


@pytest.mark.parametrize(
    ("mods", "inner"),
    [
        ([local_privacy(), compression(), private()], {"id": "of-a-later-release"}),
        ([compression(), private()], {"id": "of-a-later-release"}),
        ([compression(accept=["topk"]), private()], {"id": "topk", "density": 0.5}),
    ],
    ids=["unknown", "unknown to the pair alone", "not accepted"],
)
def test_a_client_that_cannot_use_the_codec_that_privatises_sends_nothing_without_noise(mods, inner) -> None:
    def never(content: RecordDict) -> RecordDict:
        raise AssertionError("nothing is trained for an answer that cannot leave")

    content = RecordDict({"arrays": record(MODEL), "config": ConfigRecord({PRIVATE: True})})
    codec = {**LOCAL.to_config(), "codec": inner}
    heads.put(content, head_of({"id": Local.ID, "codec": codec}, b"s"))
    with server():
        reply = app_of(mods, never)(Message(content, 1, "train"), node())
    assert reply.has_error()
    assert "same release" in reply.error.reason


def test_a_private_round_with_two_models_is_refused() -> None:
    """Against which of them a reply's buffers are checked is not defined: nothing leaves."""
    app = app_of([private()])
    content = RecordDict({"arrays": record(MODEL), "teacher": record(MODEL), "config": ConfigRecord({PRIVATE: True})})
    with server(), pytest.raises(LayoutError, match="holds 2 ArrayRecords, expected one"):
        app(Message(content, 1, "train"), node())
