"""Teachers vote once for each request, learn once for each, and say nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from datalens_toy import IMAGES, PIXELS, ToyEnsemble, ToyStudent, ToyTeachers, asking, client, kept_in, model, system
from flwr.app import Context, Message, RecordDict
from private_runs import server
from toy import with_halves

from fedcomp.clients.compressed import compression
from fedcomp.clients.private.datalens import datalens_teachers
from fedcomp.errors import ConfigError
from fedcomp.flower import asks
from fedcomp.flower.payload import FRAME, NODE_RECORD
from fedcomp.flower.records import to_record
from fedcomp.privacy.votes import decode_rows
from fedcomp.systems.private.datalens import Teachers

TEACHERS = 2
OWN = system()


@pytest.fixture(autouse=True)
def identity() -> Any:
    with server():
        yield


def node(partition: int = 1) -> Context:
    return Context(1, 2, {"partition-id": partition, "num-partitions": 4}, RecordDict(), {})


def votes(reply: Message) -> np.ndarray:
    return decode_rows(bytes(asks.data_in(reply.content, FRAME)["values"]), TEACHERS * IMAGES, PIXELS, OWN.k)


def snapshot(context: Context) -> str:
    return repr({name: dict(record) for name, record in context.state.items()})


def learnt(context: Context) -> list[int]:
    return kept_in(context).state["learnt"].tolist()


def app_of(ensemble: Any) -> Any:
    return with_halves([datalens_teachers(ensemble), compression()])


class Watched:
    """Ensembles whose teachers are kept for a look; ``change`` may replace their gradients."""

    def __init__(self, change: Any = None) -> None:
        self.made: list[ToyTeachers] = []
        self.change = change

    def __call__(self, msg: Message, context: Context, request: Teachers) -> ToyEnsemble:
        teachers = ToyTeachers(int(context.node_config["partition-id"]), request.teachers)
        if self.change is not None:
            honest = teachers.gradients
            teachers.gradients = lambda *given: self.change(honest(*given))  # type: ignore[method-assign]
        self.made.append(teachers)
        return ToyEnsemble(teachers, ToyStudent())


def test_an_answer_is_one_frame_of_votes_and_who_it_comes_from() -> None:
    context = node()
    reply = client()(asking(OWN), context)
    assert sorted(reply.content) == [NODE_RECORD]
    head = asks.find_answer(reply.content)
    assert head is not None
    assert (head.partition_id, head.bare, head.record, head.memory) == (1, True, "", -1.0)
    cast = votes(reply)
    assert cast.shape == (TEACHERS * IMAGES, PIXELS)
    assert (np.count_nonzero(cast, axis=1) == OWN.k).all()
    # Teachers one after the other: without chance each votes for the pixels it wants to change most.
    wish = ToyTeachers(1, TEACHERS).wish
    plain = votes(client()(asking(replace(OWN, stochastic=False)), node())).reshape(TEACHERS, IMAGES, PIXELS)
    for teacher in range(TEACHERS):
        top = np.argsort(-wish[teacher])[: OWN.k]
        assert plain[teacher, :, top].sum() == IMAGES * OWN.k


def test_the_same_request_again_gives_the_stored_votes_and_no_step() -> None:
    watched, context = Watched(), node()
    app = app_of(watched)
    first = app(asking(OWN), context)
    state = snapshot(context)
    assert np.array_equal(votes(app(asking(OWN), context)), votes(first))
    assert snapshot(context) == state
    assert len(watched.made) == 1
    assert learnt(context) == [OWN.steps + OWN.pretrain] * TEACHERS


def test_a_lost_answer_is_not_learnt_twice_and_pretraining_comes_once() -> None:
    app, context = client(), node()
    app(asking(OWN), context)  # whose answer is lost: nothing in the next message says so
    app(asking(OWN, number=2, sequence=2), context)
    assert learnt(context) == [2 * OWN.steps + OWN.pretrain] * TEACHERS
    assert "stale" in app(asking(OWN), context).error.reason
    # Another session is another generator: its teachers know nothing of this one.
    app(asking(OWN, session=b"another!"), context)
    assert learnt(context) == [OWN.steps + OWN.pretrain] * TEACHERS


def test_a_teacher_that_breaks_leaves_everything_as_it_was() -> None:
    def broken(gradients: np.ndarray) -> np.ndarray:
        raise RuntimeError("out of memory")

    context = node()
    client()(asking(OWN), context)
    state = snapshot(context)
    assert app_of(Watched(broken))(asking(OWN, number=2, sequence=2), context).has_error()
    assert snapshot(context) == state


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_1_11_g_a_gradient_that_is_zero_or_not_finite_casts_no_vote(value: float) -> None:
    def spoilt(gradients: np.ndarray) -> np.ndarray:
        gradients[0, 1] = 0.0
        gradients[0, 1, : 1 if value else None] = value
        return gradients

    cast = votes(app_of(Watched(spoilt))(asking(OWN), node())).reshape(TEACHERS, IMAGES, PIXELS)
    assert not cast[0, 1].any()
    assert (np.count_nonzero(cast, axis=2) == OWN.k).sum() == TEACHERS * IMAGES - 1


def test_images_and_generator_give_the_same_votes_where_teachers_want_the_same() -> None:
    arrays = {name: array.numpy() for name, array in model().items()}
    images = ToyStudent().images(arrays, OWN.key(7, 1), IMAGES)
    # The toys' wishes do not depend on what they have learnt from.
    shown = asking(replace(OWN, send="images"), images=images)
    assert np.array_equal(votes(client()(asking(OWN), node())), votes(client()(shown, node())))


def test_what_is_drawn_depends_on_the_round_and_on_the_client() -> None:
    def cast(number: int = 1, partition: int = 1) -> bytes:
        gradients = np.linspace(-1.0, 1.0, PIXELS, dtype=np.float32)
        wants = Watched(lambda found: np.broadcast_to(gradients, found.shape).copy())
        return votes(app_of(wants)(asking(OWN, number=number), node(partition))).tobytes()

    assert cast() == cast()
    assert len({cast(), cast(partition=2), cast(number=2)}) == 3


def test_what_is_wrong_with_a_request_or_a_node_is_told_and_changes_nothing() -> None:
    context = node()
    with pytest.raises(ConfigError, match="92 bytes of images, expected 3"):
        client()(asking(replace(OWN, send="images"), images=np.zeros(23, np.float32)), context)
    with pytest.raises(ConfigError, match="neither images nor a generator"):
        client()(asking(OWN, images=np.zeros(24, np.float32)), context)
    with pytest.raises(ConfigError, match="more than 268435456 numbers"):
        client()(asking(replace(OWN, batch=1 << 30)), context)
    with pytest.raises(ConfigError, match="partition-id"):
        client()(asking(OWN), Context(1, 2, {}, RecordDict(), {}))
    with pytest.raises(ConfigError, match="datalens_teachers"):
        with_halves([compression()])(asking(OWN), context)
    assert not context.state
    with pytest.raises(ConfigError, match="more than 16777216 together"):
        system(teachers=1 << 16, pretrain=1 << 9)


def test_the_generic_app_has_real_teachers_and_keeps_their_optimiser() -> None:
    from fedcomp.clients.app import app
    from fedcomp.tasks import get_task
    from fedcomp.tasks.arrays import to_arrays

    task = get_task("digits-generator", hidden="16")
    message = asking(replace(OWN, k=28), task="digits-generator", clients=4, **{"task.hidden": "16"})
    message.content["arrays"] = to_record(to_arrays(task.model(0)))
    context = node()
    frame = asks.data_in(app(message, context).content, FRAME)["values"]
    assert (np.count_nonzero(decode_rows(bytes(frame), TEACHERS * IMAGES, 64, 28), axis=1) == 28).all()
    state = kept_in(context).state
    assert state["p/rows.weight"].shape == (TEACHERS, 64, 10)
    assert int(state["t"]) == OWN.steps + OWN.pretrain
    assert {a.dtype.name for a in state.values()} == {"float32", "int64"}
