"""A client that fails in a private round tells the server one fixed text, on every path; its log has the reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datalens_toy
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from private_runs import server
from toy import with_halves

from fedcomp.clients.compressed import compression
from fedcomp.clients.private.datalens import datalens_teachers
from fedcomp.clients.private.dpsgd import record_dp
from fedcomp.clients.private.local_dp import local_privacy
from fedcomp.clients.private.mod import STAYS, private
from fedcomp.clients.private.topagg import votes_only
from fedcomp.codecs import Codec, TopK, chain
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError, FedcompError, LayoutError, NonFiniteUpdate, StateError
from fedcomp.flower import asks as heads
from fedcomp.flower.asks import AskHead
from fedcomp.flower.payload import FRAME, PayloadError
from fedcomp.flower.privacy import PRIVATE
from fedcomp.flower.protocol import RESYNC
from fedcomp.privacy.accounting import Unaccountable
from fedcomp.privacy.errors import BudgetExceeded, PrivacyError, PrivacyLedgerError, Unbounded
from fedcomp.privacy.local import LocalPolicy, Privatise
from fedcomp.privacy.votes import TopkSign
from fedcomp.systems.pair import Pair
from fedcomp.systems.private.datalens import Teachers
from fedcomp.systems.private.local import Local
from fedcomp.systems.private.lsg import LowRank
from fedcomp.systems.private.record import DpSgdPlan, Records

WORDS = "patient 4711 has a broken record"
SIZE = 40


class OfTheApp(Exception):
    """An exception of an app's own."""


def raise_value(msg: Message) -> Message:
    raise ValueError(WORDS)


def raise_own(msg: Message) -> Message:
    raise OfTheApp(WORDS)


def raise_ours(msg: Message) -> Message:
    raise NonFiniteUpdate(WORDS)


def return_error(msg: Message) -> Message:
    return Message(Error(6, WORDS), reply_to=msg)


def return_nan(msg: Message) -> Message:
    vector = np.zeros(SIZE, np.float32)
    vector[17] = np.nan
    return answer(msg, {"w": vector})


def return_another(msg: Message) -> Message:
    return answer(msg, {"w": np.zeros(SIZE, np.float32), WORDS: np.ones(3, np.float32)})


def answer(msg: Message, arrays: dict[str, np.ndarray]) -> Message:
    record = ArrayRecord({name: Array(a) for name, a in arrays.items()})
    return Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)


FAILURES = (raise_value, raise_own, raise_ours, return_error, return_another)

LOCAL = chain(Privatise(1.0, 2.0), TopK(density=0.5))
POLICY = LocalPolicy(noise_multiplier=2.0, releases=3)

PATHS: dict[str, tuple[list[Any], Codec | None, bool]] = {
    "private": ([private()], None, True),
    "the pair": ([compression(), private()], TopK(density=0.5), True),
    "the pair with memory": ([compression(), private()], ErrorFeedback(TopK(density=0.5)), True),
    "compression alone": ([compression()], TopK(density=0.5), True),
    "the other way round": ([private(), compression()], TopK(density=0.5), True),
    "topagg": ([votes_only(), compression(), private()], TopkSign(k=5), True),
    "lsg": ([compression(), private()], None, True),
    # The half with a folder for this test stands before these.
    "local": ([compression(), private()], LOCAL, False),
    "local, the pair alone": ([compression()], LOCAL, False),
}


def app_of(mods: list[Any], act: Callable[[Message], Message]) -> ClientApp:
    app = with_halves(mods)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        return act(msg)

    return app


def node() -> Context:
    return Context(1, 1, {"partition-id": 2, "num-partitions": 4}, RecordDict(), {})


def ask(path: str, act: Callable[[Message], Message], folder: Path) -> Message:
    mods, codec, asked = PATHS[path]
    if path == "local":
        mods = [local_privacy(POLICY, state_dir=folder), *mods]
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))})})
    content["config"] = ConfigRecord({PRIVATE: asked})
    if path.startswith("local"):
        system = Local(codec).to_config()
        heads.put(content, AskHead(1, 0, b"session!", sequence=1, system=system, model="arrays"))
    elif codec is not None:
        heads.put(content, AskHead(1, 0, b"session!", sequence=1, system=Pair(codec).to_config(), model="arrays"))
    if path.startswith("lsg"):
        system = LowRank(clip=1.0, rank=0, keep=0.5).to_config()
        heads.put(content, AskHead(number=1, seed=5, session=bytes(8), sequence=1, system=system, model="arrays"))
    with server():
        return app_of(mods, act)(Message(content, 1, "train"), node())


@pytest.mark.parametrize("path", PATHS)
def test_a9_a_failure_of_any_kind_is_one_and_the_same_answer(
    path: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Neither words nor type nor code of what went wrong reach the server; the node's log has them."""
    # Without a codec it is the server that looks at values; with local noise, zero is noised and sent instead.
    sent = path.startswith(("private", "local"))
    for act in FAILURES if sent else (*FAILURES, return_nan):
        caplog.clear()
        with caplog.at_level(logging.ERROR, "flwr.fedcomp"):
            reply = ask(path, act, tmp_path)
        assert reply.has_error()
        assert (reply.error.code, reply.error.reason) == (2, STAYS), act.__name__
        assert act is return_nan or "4711" in caplog.text


def test_a9_what_the_pair_refuses_before_the_app_keeps_its_words() -> None:
    """The server acts on them: it sends the model whole to a client whose replica is out of date."""
    content = RecordDict({"config": ConfigRecord({PRIVATE: True})})
    downlink = TopK(density=0.5).to_config()
    of_round = {"number": 2, "seed": 0, "session": b"session!", "sequence": 2, "model": "arrays"}
    system = Pair(TopK(density=0.5)).to_config()
    heads.put(content, AskHead(**of_round, system=system, downlink=downlink, version=2, base=1))
    with server():
        reply = app_of([compression(), private()], raise_value)(Message(content, 1, "train"), node())
    assert reply.error.reason.startswith(RESYNC)


def test_a9_teachers_tell_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def reading(msg: Message, context: Context, request: Teachers) -> Any:
        raise ValueError(WORDS)

    def learning(msg: Message, context: Context, request: Teachers) -> Any:
        own = datalens_toy.ensemble(msg, context, request)
        own.teachers.learn = lambda *given: raise_own(msg)  # type: ignore[method-assign]
        return own

    for own in (reading, learning):
        context = node()
        with server(), caplog.at_level(logging.ERROR, "flwr.fedcomp"):
            app = with_halves([datalens_teachers(own), compression()])
            reply = app(datalens_toy.asking(datalens_toy.system()), context)
        assert (reply.error.code, reply.error.reason) == (2, STAYS)
        assert not context.state, "the node is as it was"
        assert "4711" in caplog.text
        caplog.clear()
    with server():
        honest = datalens_toy.client()(datalens_toy.asking(datalens_toy.system()), node())
    assert heads.data_in(honest.content, FRAME)["values"]


OF_SETTINGS = (ConfigError, BudgetExceeded, PrivacyLedgerError, StateError, LayoutError, PayloadError)
OF_DATA = (Unbounded, PrivacyError, Unaccountable, NonFiniteUpdate, FedcompError, ValueError, OfTheApp)


def with_record_level_privacy(act: Callable[[Message], Message]) -> Message:
    system = Records(DpSgdPlan(noise_multiplier=1.0, rate=0.1, steps=3, delta=1e-5)).to_config()
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))}), "config": ConfigRecord()})
    heads.put(content, AskHead(1, 0, b"session!", sequence=1, system=system, model="arrays"))

    def never(msg: Message) -> Message:
        raise AssertionError("an app does not train without noise on records that it is to protect")

    halves = [record_dp(lambda msg, context: act(msg)), compression()]  # type: ignore[arg-type, return-value]
    with server():
        return app_of(halves, never)(Message(content, 1, "train"), node())


def among_teachers(act: Callable[[Message], Message]) -> Message:
    halves = [datalens_teachers(lambda msg, context, request: act(msg)), compression()]  # type: ignore[arg-type, return-value]
    with server():
        return with_halves(halves)(datalens_toy.asking(datalens_toy.system()), node())


@pytest.mark.parametrize("send", [with_record_level_privacy, among_teachers])
@pytest.mark.parametrize("kind", [*OF_SETTINGS, *OF_DATA], ids=lambda kind: kind.__name__)
def test_a9_errors_of_settings_are_told_and_those_with_figures_of_the_data_are_not(
    send: Callable[[Callable[[Message], Message]], Message], kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def act(msg: Message) -> Message:
        raise kind("a rounding of a vector of norm 4711 steps met no bound")

    with caplog.at_level(logging.ERROR, "flwr.fedcomp"):
        if kind in OF_SETTINGS:
            with pytest.raises(kind, match="4711"):
                send(act)
            return
        reply = send(act)
    assert (reply.error.code, reply.error.reason) == (2, STAYS)
    assert "4711" in caplog.text
