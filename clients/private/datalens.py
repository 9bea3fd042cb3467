"""The client half of DataLens: teachers that learn on their own records and vote on generated images.

Discriminators and their optimisers live in ``context.state``. A handler reads them, computes, and writes them as its
last act, together with its answer: what breaks before leaves the node as it was, a message that arrives again is
answered from memory without another step, and an answer that is lost costs its votes and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from flwr.app import Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.clients.half import ClientHalf
from fedcomp.clients.messages import require_partition
from fedcomp.clients.private.mod import ABOUT_SETTINGS, discreet
from fedcomp.flower import datalens
from fedcomp.flower.datalens import TeacherMemory, TrainingRequest
from fedcomp.flower.payload import put_frame, put_node
from fedcomp.flower.state import StaleMessage
from fedcomp.privacy.votes import encode_rows, longest_rows, topk_stochastic_sign
from fedcomp.rng import Key

Arrays = Mapping[str, NDArray[Any]]
Faker = Callable[[NDArray[np.int64]], NDArray[np.float32]]


class TeacherGroup(Protocol):
    """Discriminators on this node's records, such as :class:`fedcomp.tasks.gan.Teachers`."""

    def start(self) -> Mapping[str, NDArray[Any]]:
        """Return the state of teachers that have learnt nothing."""
        ...

    def learn(
        self, state: Arrays, fakes: Faker, key: Key, labels: NDArray[np.int64] | None = None
    ) -> Mapping[str, NDArray[Any]]:
        """Return the state after one step; images come from ``fakes``, of ``labels`` or of the records' own."""
        ...

    def gradients(self, state: Arrays, images: NDArray[np.float32], labels: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the direction that would make each image more real, ``(teachers, B, pixels)``."""
        ...


class ImageSource(Protocol):
    """A generator to fill with the server's weights, such as :class:`fedcomp.tasks.gan.Student`."""

    def images(self, arrays: Arrays, key: Key, count: int) -> NDArray[np.float32]:
        """Return ``count`` images of the noise and labels that ``key`` names."""
        ...

    def labels(self, key: Key, count: int) -> NDArray[np.int64]:
        """Return their labels."""
        ...

    def faker(self, arrays: Arrays, key: Key) -> Faker:
        """Return what makes an image for each of the labels it is given."""
        ...


class NodeTeachers(Protocol):
    """What a node has."""

    @property
    def teachers(self) -> TeacherGroup: ...

    @property
    def student(self) -> ImageSource: ...


TeachersOf = Callable[[Message, Context, TrainingRequest], NodeTeachers]
"""``ensemble(message, context, request)``: called only where a request is not answered from memory."""


def datalens_teachers(ensemble: TeachersOf) -> ClientHalf:
    """Return the client half of a DataLens run.

    What goes wrong while teachers are read, learn and vote stays on the node, unless it is about settings
    (:data:`fedcomp.clients.private.mod.ABOUT_SETTINGS`).

    Parameters
    ----------
    ensemble : callable
        Returns this node's teachers. What it keeps between calls is lost in a deployment.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> from fedcomp.tasks import get_task
    >>> from fedcomp.tasks.gan import Adam
    >>> task = get_task("digits-generator")
    >>> def teachers(message, context, request):
    ...     partition, clients = context.node_config["partition-id"], context.node_config["num-partitions"]
    ...     adam, key = Adam(request.lr, request.decay), Key(request.seed, "datalens")
    ...     return task.ensemble(partition, clients, request.teachers, adam, batch=request.batch, key=key)
    >>> app = client(ClientApp(), datalens_teachers(teachers))
    """

    def vote(msg: Message, context: Context) -> Message:
        # Outside of what is kept quiet below: what is wrong with a request is the server's to know.
        request, kept = TrainingRequest.take(msg), TeacherMemory.load(context)
        partition = require_partition(context, "a teacher needs to know which records are its own")
        if kept is not None and kept.session == request.session:
            if request.sequence < kept.sequence:
                raise StaleMessage(
                    f"this node has already answered request {kept.sequence}; request {request.sequence} came too late"
                )
            if request.sequence == kept.sequence:
                return _reply(msg, kept.answer, partition)
        else:
            # Another session is another generator: what teachers learnt from the last one does not count.
            kept = None

        def learn_and_vote() -> Message:
            own = ensemble(msg, context, request)
            state, votes = study(request, msg, own, None if kept is None else kept.state, partition)
            answer = encode_rows(votes)
            if request.pad:
                longest = longest_rows(request.rows, request.pixels, request.k)
                salt = Key(request.draw, "padding", partition=partition).digest()
                # The salt names the message: equal votes of two nodes are not equal bytes.
                answer = wire.pad(answer, longest + wire.FILLED, salt)
            reply = _reply(msg, answer, partition)
            # Last, and with the answer: a request that arrives again is answered with the very same votes.
            TeacherMemory(request.session, request.sequence, state, answer).save(context)
            return reply

        return discreet(msg, learn_and_vote, passing=ABOUT_SETTINGS)

    return ClientHalf("datalens", handlers={datalens.TYPE: vote})


def study(
    request: TrainingRequest, message: Message, own: NodeTeachers, state: Arrays | None, partition: int
) -> tuple[Arrays, NDArray[np.int8]]:
    """Let the teachers learn and vote; return their state and the votes, int8 ``(teachers * B, pixels)``.

    Whoever has no state yet takes the steps of the pretraining first. With a generator at hand every step looks at new
    images, of the labels of each teacher's own batch; where images were sent, at those.
    """
    key = request.key
    # Sent images are shown as they are; a generator makes new ones for each step.
    shown = datalens.take_images(message, request)
    labels = own.student.labels(key, request.images)
    arrays = datalens.generator_of(message) if shown is None else {}
    images = own.student.images(arrays, key, request.images) if shown is None else shown
    steps = request.steps if state is not None else request.steps + request.pretrain
    state = own.teachers.start() if state is None else state
    for step in range(steps):
        # Public coins: the bound on the votes holds for every outcome of them.
        batch = Key(request.draw, "datalens/batch", partition=partition, layer=step)
        if shown is None:
            fakes = own.student.faker(arrays, batch.at(purpose="datalens/fakes"))
            state = own.teachers.learn(state, fakes, batch)
        else:
            state = own.teachers.learn(state, lambda _: images, batch, labels)
    directions = own.teachers.gradients(state, images, labels)
    votes = topk_stochastic_sign(
        directions.reshape(request.rows, request.pixels),
        request.k,
        saturation=request.saturation or None,
        stochastic=request.stochastic,
        uniforms=Key(request.draw, "datalens/votes", partition=partition),
    )
    return state, votes


def _reply(msg: Message, answer: bytes, partition: int) -> Message:
    content = RecordDict()
    put_frame(content, datalens.VOTES, answer)
    put_node(content, partition)
    return Message(content, reply_to=msg)
