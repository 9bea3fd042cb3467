"""A small DataLens run: a generator that is a table of images, and teachers that want one image each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from toy import with_halves

from fedcomp.clients.compressed import compression
from fedcomp.clients.memory import MEMORY, REPLY
from fedcomp.clients.private.datalens import datalens_teachers
from fedcomp.flower import asks
from fedcomp.flower.asks import AskHead
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME
from fedcomp.flower.privacy import PRIVATE
from fedcomp.flower.records import to_arrays
from fedcomp.rng import Key
from fedcomp.strategies.private.datalens import DataLens
from fedcomp.strategies.private.settings import TeacherSettings, VoteSettings
from fedcomp.systems.private.datalens import Teachers

NODES, PIXELS, IMAGES, SEED = 4, 12, 3, 5

Arrays = Mapping[str, NDArray[Any]]


class ToyStudent:
    """G(z, y) = one row for all: images differ by their labels only."""

    def images(self, arrays: Arrays, key: Key, count: int) -> NDArray[np.float32]:
        return arrays["row"][None] + 0.01 * self.labels(key, count)[:, None].astype(np.float32)

    def labels(self, key: Key, count: int) -> NDArray[np.int64]:
        return (key.at(purpose="toy/labels").uniform(count) * 3).astype(np.int64)

    def faker(self, arrays: Arrays, key: Key) -> Callable[[NDArray[np.int64]], NDArray[np.float32]]:
        return lambda labels: arrays["row"][None] + 0.01 * labels[:, None].astype(np.float32)

    def start(self) -> dict[str, NDArray[Any]]:
        return {"momentum": np.zeros(PIXELS, np.float32), "steps": np.zeros((), np.int64)}

    def step(
        self, arrays: Arrays, moments: Arrays, key: Key, targets: NDArray[np.float32]
    ) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        momentum = np.float32(0.5) * moments["momentum"] + targets.sum(0)
        return {"row": arrays["row"] + momentum}, {"momentum": momentum, "steps": moments["steps"] + 1}


class ToyTeachers:
    """Teacher t of partition p pulls towards an image of its own; what it has learnt is how often it was asked to."""

    def __init__(self, partition: int, count: int) -> None:
        drawn = Key(1, "toy/wish", partition=partition).uniform(count * PIXELS)
        self.wish = drawn.reshape(count, PIXELS).astype(np.float32)
        self.count = count
        self.calls = 0

    def start(self) -> dict[str, NDArray[Any]]:
        return {"learnt": np.zeros(self.count, np.int64)}

    def learn(self, state: Arrays, fakes: Any, key: Key, labels: NDArray[np.int64] | None = None) -> Arrays:
        self.calls += 1
        seen = fakes(np.zeros(2, np.int64) if labels is None else labels)
        assert seen.shape[1] == PIXELS
        return {"learnt": state["learnt"] + 1}

    def gradients(self, state: Arrays, images: NDArray[np.float32], labels: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.wish[:, None] - images[None]


class ToyEnsemble(NamedTuple):
    teachers: ToyTeachers
    student: ToyStudent


def ensemble(message: Message, context: Context, request: Teachers) -> ToyEnsemble:
    return ToyEnsemble(ToyTeachers(int(context.node_config["partition-id"]), request.teachers), ToyStudent())


def system(**options: Any) -> Teachers:
    """Return what two teachers of a client are asked."""
    return Teachers(**{"k": 4, "images": IMAGES, "teachers": 2, "pretrain": 3, "seed": SEED, **options})


def asking(
    of: Teachers, number: int = 1, sequence: int = 1, session: bytes = b"session!", images: Any = None, **config: Any
) -> Message:
    """Return a message of a private round to the teachers of a node; with ``images`` these, and no generator."""
    content = RecordDict({"config": ConfigRecord({PRIVATE: True, **config})})
    where = {"model": "arrays"} if images is None else {"needs_model": False}
    data = {} if images is None else {FRAME + "images": images.astype("<f4").tobytes()}
    if images is None:
        content["arrays"] = model()
    head = AskHead(number, 7, session, sequence, system=of.to_config(), cast=True, **where)
    asks.put(content, head, None, data)
    return Message(content, 2, "train")


def client() -> ClientApp:
    return with_halves([datalens_teachers(ensemble), compression()])


def model() -> ArrayRecord:
    return ArrayRecord({"row": Array(np.zeros(PIXELS, np.float32))})


def strategy(made: type[DataLens] = DataLens, **options: Any) -> DataLens:
    usual: dict[str, Any] = {"k": 4, "noise_multiplier": 1.0, "images": IMAGES, "eta": 0.01, "clients": NODES}
    usual |= {"insecure_deterministic": True, "seed": SEED}
    if options.get("teachers", 1) > 1:
        usual["population"] = 15 * NODES * options["teachers"]
    given = {**usual, **options}
    votes, teachers = (
        kind(**{field.name: given.pop(field.name) for field in fields(kind) if field.name in given})
        for kind in (VoteSettings, TeacherSettings)
    )
    return made(lambda config: ToyStudent(), votes, teachers, **given)


def grid(app: Callable | None = None, nodes: int = NODES, **options: Any) -> MeteredGrid:
    return MeteredGrid(InProcessGrid(app or client(), nodes, **{"seed": 2, **options}))


class Kept(NamedTuple):
    """What a teacher has: its state, and the votes that it answered with last."""

    state: dict[str, NDArray[Any]]
    answer: bytes


def kept_in(context: Context) -> Kept:
    answer = asks.data_in(RecordDict({k.removeprefix(REPLY): v for k, v in context.state.items()}), FRAME)["values"]
    return Kept(to_arrays(context.state[MEMORY]), bytes(answer))


def kept(over: MeteredGrid, partition: int) -> Kept:
    return kept_in(over.context(partition))


def row(arrays: ArrayRecord) -> NDArray[np.float32]:
    return arrays["row"].numpy()
