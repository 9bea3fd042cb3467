"""The client half of DataLens: votes once for each request, learns once for each, and says nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from datalens_toy import IMAGES, PIXELS, ToyEnsemble, ToyStudent, ToyTeachers, client, model
from flwr.app import ConfigRecord, Context, Message, RecordDict
from message_examples import all_damages
from toy import with_halves

from fedcomp.clients.private.datalens import datalens_teachers
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import datalens
from fedcomp.flower._private import adopt_identity
from fedcomp.flower.datalens import TeacherMemory, TrainingRequest
from fedcomp.flower.payload import NODE_RECORD, PayloadError, take_frame
from fedcomp.flower.records import to_record
from fedcomp.flower.state import StaleMessage
from fedcomp.privacy.votes import decode_rows

TEACHERS = 2
REQUEST = TrainingRequest("s", 1, 77, IMAGES, PIXELS, TEACHERS, 4, 0.0, True, 2, 3, 30, 0.001, 0.5, 5)


@pytest.fixture(autouse=True)
def identity() -> None:
    adopt_identity((1, 1, 1))


def node(partition: int = 1) -> Context:
    return Context(1, 2, {"partition-id": partition, "num-partitions": 4}, RecordDict(), {})


def message(request: TrainingRequest = REQUEST, images: np.ndarray | None = None) -> Message:
    content = RecordDict()
    request.put(content)
    if images is None:
        content[datalens.MODEL] = model()
    else:
        datalens.put_images(content, images)
    return Message(content, 2, datalens.TYPE)


def votes(reply: Message) -> np.ndarray:
    frame = take_frame(reply.content, datalens.VOTES)
    assert frame is not None
    return decode_rows(frame, REQUEST.rows, PIXELS, REQUEST.k)


def snapshot(context: Context) -> str:
    return repr({name: dict(record) for name, record in context.state.items()})


def learnt(context: Context) -> list[int]:
    found = TeacherMemory.load(context)
    assert found is not None
    return found.state["learnt"].tolist()


class Watched:
    """Ensembles whose teachers are kept for a look; ``change`` may replace their gradients."""

    def __init__(self, change: Any = None) -> None:
        self.made: list[ToyTeachers] = []
        self.change = change

    def __call__(self, msg: Message, context: Context, request: TrainingRequest) -> ToyEnsemble:
        teachers = ToyTeachers(int(context.node_config["partition-id"]), request.teachers)
        if self.change is not None:
            honest = teachers.gradients
            teachers.gradients = lambda *given: self.change(honest(*given))  # type: ignore[method-assign]
        self.made.append(teachers)
        return ToyEnsemble(teachers, ToyStudent())


def test_an_answer_is_one_frame_of_votes_and_who_it_comes_from() -> None:
    context = node()
    reply = client()(message(), context)
    assert sorted(reply.content) == sorted([datalens.VOTES, NODE_RECORD])
    assert dict(reply.content[NODE_RECORD]) == {"partition-id": 1}
    cast = votes(reply)
    assert cast.shape == (TEACHERS * IMAGES, PIXELS)
    assert (np.count_nonzero(cast, axis=1) == REQUEST.k).all()
    # Teachers one after the other: without chance each votes for the pixels it wants to change most.
    wish = ToyTeachers(1, TEACHERS).wish
    plain = votes(client()(message(replace(REQUEST, stochastic=False)), node())).reshape(TEACHERS, IMAGES, PIXELS)
    for teacher in range(TEACHERS):
        top = np.argsort(-wish[teacher])[: REQUEST.k]
        assert plain[teacher, :, top].sum() == IMAGES * REQUEST.k


def test_the_same_request_again_gives_the_stored_votes_and_no_step() -> None:
    watched, context = Watched(), node()
    app = with_halves([datalens_teachers(watched)])
    first = app(message(), context)
    state = snapshot(context)
    again = app(message(), context)
    assert take_frame(again.content, datalens.VOTES) == take_frame(first.content, datalens.VOTES)
    assert snapshot(context) == state
    assert len(watched.made) == 1
    assert learnt(context) == [REQUEST.steps + REQUEST.pretrain] * TEACHERS


def test_a_lost_answer_is_not_learnt_twice_and_pretraining_comes_once() -> None:
    app, context = client(), node()
    app(message(), context)  # whose answer is lost: nothing in the next message says so
    app(message(replace(REQUEST, sequence=2, draw=78)), context)
    assert learnt(context) == [2 * REQUEST.steps + REQUEST.pretrain] * TEACHERS
    with pytest.raises(StaleMessage, match="already answered request 2"):
        app(message(), context)
    # Another session is another generator: its teachers know nothing of this one.
    app(message(replace(REQUEST, session="t")), context)
    assert learnt(context) == [REQUEST.steps + REQUEST.pretrain] * TEACHERS


def test_a_teacher_that_breaks_leaves_everything_as_it_was() -> None:
    def broken(gradients: np.ndarray) -> np.ndarray:
        raise RuntimeError("out of memory")

    context = node()
    client()(message(), context)
    state = snapshot(context)
    assert with_halves([datalens_teachers(Watched(broken))])(message(replace(REQUEST, sequence=2)), context).has_error()
    assert snapshot(context) == state


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_1_11_g_a_gradient_that_is_zero_or_not_finite_casts_no_vote(value: float) -> None:
    def spoilt(gradients: np.ndarray) -> np.ndarray:
        gradients[0, 1] = 0.0
        gradients[0, 1, : 1 if value else None] = value
        return gradients

    cast = votes(with_halves([datalens_teachers(Watched(spoilt))])(message(), node())).reshape(TEACHERS, IMAGES, PIXELS)
    assert not cast[0, 1].any()
    assert (np.count_nonzero(cast, axis=2) == REQUEST.k).sum() == TEACHERS * IMAGES - 1


def test_images_and_generator_give_the_same_votes_where_teachers_want_the_same() -> None:
    arrays = {name: array.numpy() for name, array in model().items()}
    images = ToyStudent().images(arrays, REQUEST.key, IMAGES)
    # The toys' wishes do not depend on what they have learnt from.
    assert np.array_equal(votes(client()(message(), node())), votes(client()(message(images=images), node())))


def test_what_is_drawn_depends_on_the_request_and_on_the_client() -> None:
    def cast(request: TrainingRequest = REQUEST, partition: int = 1) -> bytes:
        gradients = np.linspace(-1.0, 1.0, PIXELS, dtype=np.float32)
        wants = Watched(lambda found: np.broadcast_to(gradients, found.shape).copy())
        return votes(with_halves([datalens_teachers(wants)])(message(request), node(partition))).tobytes()

    assert cast() == cast()
    assert len({cast(), cast(partition=2), cast(replace(REQUEST, draw=78))}) == 3


def without(name: str) -> Message:
    out = message()
    del out.content[name]
    return out


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda: without(datalens.MODEL), "neither images nor a generator"),
        (lambda: message(images=np.zeros((2, PIXELS), np.float32)), "96 bytes of images, expected 3 of 12 pixels"),
    ],
)
def test_a_request_of_another_form_is_refused_and_changes_nothing(asked: Any, said: str) -> None:
    context = node()
    with pytest.raises(PayloadError, match=said):
        client()(asked(), context)
    assert not context.state


def test_a_damaged_request_is_refused_and_changes_nothing() -> None:
    context = node()
    for what, content in all_damages(REQUEST):
        content[datalens.MODEL] = model()
        with pytest.raises(PayloadError):
            print(what, client()(Message(content, 2, datalens.TYPE), context))
    assert not context.state


def test_a_node_without_a_partition_and_a_damaged_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="partition-id"):
        client()(message(), Context(1, 2, {}, RecordDict(), {}))
    context = node()
    client()(message(), context)
    del context.state[datalens._ANSWER]
    with pytest.raises(StateError, match="restart the node"):
        client()(message(), context)


def test_the_generic_app_has_real_teachers_and_keeps_their_optimiser() -> None:
    from fedcomp.clients.app import app
    from fedcomp.tasks import get_task
    from fedcomp.tasks.arrays import to_arrays

    task = get_task("digits-generator", hidden="16")
    request = replace(REQUEST, pixels=64, k=28)
    content = RecordDict({"config": ConfigRecord({"task": "digits-generator", "task.hidden": "16", "clients": 4})})
    request.put(content)
    content[datalens.MODEL] = to_record(to_arrays(task.model(0)))
    context = node()
    first = app(Message(content, 2, datalens.TYPE), context)
    frame = take_frame(first.content, datalens.VOTES)
    assert frame is not None
    assert (np.count_nonzero(decode_rows(frame, request.rows, 64, 28), axis=1) == 28).all()
    kept = TeacherMemory.load(context)
    assert kept is not None
    assert kept.state["p/rows.weight"].shape == (TEACHERS, 64, 10)
    assert int(kept.state["t"]) == request.steps + request.pretrain
    assert {a.dtype.name for a in kept.state.values()} == {"float32", "int64"}
