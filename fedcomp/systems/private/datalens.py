"""DataLens: a generator learns from noisy votes of teachers that see the data; the teachers are clients.

B. Wang, F. Wu, Y. Long, L. Rimanic, C. Zhang, B. Li, "DataLens: Scalable Privacy Preserving Training via Gradient
Compression and Aggregation", CCS 2021, arXiv:2103.11109. The order of things is that of the authors' published code
(read); the paper itself only by its abstract. One round is one step of the generator:

1. B images of public noise and uniform labels;
2. every teacher learns from its own records, and votes on every image, top-k stochastic signs of the direction in which
   its pixels should move;
3. votes are verified and summed, the event is written down, noise is added to every pixel of every image;
4. the targets are eta * sign(V) where |V| exceeds beta times the expected number of teachers, and the generator takes
   an Adam step towards them.

Each image is a release of its own, and an event stands for B of them. The cost of a round is known before it is made,
so the budget is asked before any teacher is, and a noisy value that would cross it is never drawn. Everything after the
noise, the generator and all it makes, is post-processing.

Discriminators and their optimisers are a client's memory. An answer that is lost costs its votes and nothing else: the
teacher has learnt, once, and there is nothing to be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs import Codec, State
from fedcomp.codecs.base import padded
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Update, Vector
from fedcomp.privacy.events import Event
from fedcomp.privacy.mechanism import Mechanism, Votes
from fedcomp.privacy.statement import Statement, make_statement
from fedcomp.privacy.votes import decode_rows, encode_rows, expected_rows, longest_rows, threshold, topk_stochastic_sign
from fedcomp.program import Answer, Ask, Me, Now, Released, Round, System
from fedcomp.rng import Key
from fedcomp.rules import Int, Maybe, OneOf, Positive, Real, Switch, checked
from fedcomp.systems.private.books import LENGTHS
from fedcomp.systems.private.rule import Contribution, Private
from fedcomp.wire import Bundle, Frame, Schema

Arrays = Mapping[str, NDArray[Any]]
Faker = Callable[[NDArray[np.int64]], NDArray[np.float32]]

SENDS: Final = ("generator", "images")
"""What goes down."""

MOST_STEPS: Final = 1 << 24
"""Steps of all teachers of a node together that one message may ask for."""

MOST_VALUES: Final = 1 << 28
"""Numbers of all teachers' images together, in a step or a vote."""

NOT_COVERED: Final = (
    "the test of the generated images on held-out real ones, which is not a release of this run",
    "the choice of k, of the noise, of the threshold and of the networks, and preprocessing of the data",
    "who takes part, when, and whether its app fails",
    "the server's own reports and logs (who was refused, and why)",
)
"""What the statement does not extend to."""


class Generating(Protocol):
    """The generator's side on the server, such as :class:`fedcomp.tasks.gan.Student`: :attr:`fedcomp.program.Now.data`
    of a round."""

    def images(self, arrays: Arrays, key: Key, count: int) -> NDArray[np.float32]:
        """Return ``count`` images, ``(count, pixels)``, of the noise and labels that ``key`` names."""
        ...

    def start(self) -> Mapping[str, NDArray[Any]]:
        """Return the optimiser's state before the first step."""
        ...

    def step(
        self, arrays: Arrays, moments: Arrays, key: Key, targets: NDArray[np.float32]
    ) -> tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]:
        """Return model and optimiser state after one step towards the images changed by ``targets``."""
        ...


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


@dataclass(frozen=True, repr=False, eq=False)
class Ballot(Codec):
    """How the votes of a client's teachers travel, one row for each teacher and image, teachers one after the other.

    A layout is that of the images, flat; what is decoded are all rows.

    Parameters
    ----------
    teachers, images : int
    k : int
        The most votes in a row.
    """

    votes = True

    teachers: Annotated[int, Int(1)]
    images: Annotated[int, Int(1)]
    k: Annotated[int, Int(1)]

    def rows(self, layout: Layout) -> tuple[int, int, int]:
        """Return how many rows of how many pixels there are, and the most votes in one."""
        return self.teachers * self.images, layout.size // self.images, self.k

    def schema(self, layout: Layout) -> Schema:
        return (expected_rows(*self.rows(layout)),)

    def longest(self, layout: Layout) -> int:
        return longest_rows(*self.rows(layout))

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        """Parse a frame, and count the votes of every row."""
        bundle = super().open(frame, layout)
        decode_rows(bundle, *self.rows(layout))
        return bundle

    def decode(self, frame: Frame | Bundle, layout: Layout) -> Vector:
        """Return all rows, float32 ``(teachers * layout.size,)``."""
        return decode_rows(super().open(frame, layout), *self.rows(layout)).reshape(-1).astype(np.float32)

    def accumulate(self, frame: Frame | Bundle, weight: float, out: Update) -> None:
        """Add the sum over the teachers."""
        votes = self.decode(frame, out.layout).reshape(self.teachers, -1)
        np.add(out.vector, np.float32(weight) * votes.sum(0), out=out.vector)

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        """Pack votes, as many as :meth:`decode` returns."""
        return encode_rows(update.vector.reshape(self.teachers * self.images, -1).astype(np.int8)), state


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Teachers(System, id="datalens"):
    """DataLens: clients' teachers vote on generated images, and the run's model is the generator.

    Parameters
    ----------
    k : int
        Votes of a teacher on an image; all pixels where there are fewer.
    images : int
        B, generated images of a round.
    eta : float
        Length of a target's step per pixel.
    saturation : float, optional
        Magnitudes above it vote with certainty (the published code's max_grad).
    stochastic : bool
        False casts the plain signs.
    teachers : int
        Of each client.
    lr, decay : float
        Of the discriminators' Adam.
    steps, pretrain : int
        Steps of the discriminators before they vote, and as many more before their first votes.
    batch : int
        Records of a step; a teacher with fewer takes all it has.
    send : {"generator", "images"}
        What goes down.
    seed : int
        Names who holds which record, and initial values.

    Raises
    ------
    ConfigError
        For a value out of range, and for more steps than a node takes for one message.

    Examples
    --------
    >>> Teachers(k=28, steps=2)
    Teachers(k=28)
    """

    APP: ClassVar[str] = "app = fc.client(app, fc.datalens_teachers(...))"
    RULES: ClassVar[tuple[type, ...]] = (Released,)
    KEEPS: ClassVar[bool] = True
    DISCREET: ClassVar[bool] = True

    k: Annotated[int, Int(1, 1 << 24)]
    images: Annotated[int, Int(1, 1 << 20)] = 15
    eta: Positive = 1e-3
    saturation: Annotated[float | None, Maybe(Real(above=0.0))] = None
    stochastic: Switch = True
    teachers: Annotated[int, Int(1, 1 << 16)] = 1
    lr: Annotated[float, Real()] = 1e-3
    decay: Annotated[float, Real()] = 0.5
    steps: Annotated[int, Int(most=1 << 20)] = 2
    pretrain: Annotated[int, Int(most=1 << 20)] = 10
    batch: Annotated[int, Int(1, 1 << 31)] = 30
    send: Annotated[str, OneOf(*SENDS)] = "generator"
    seed: Annotated[int, Int(least=-(2**63))] = 0

    def conflict(self) -> str:
        """Every teacher makes its steps."""
        if self.teachers * (self.steps + self.pretrain) > MOST_STEPS:
            return (
                f"{self.teachers} teachers with {self.steps} + {self.pretrain} steps: more than {MOST_STEPS} together"
            )
        return ""

    def key(self, seed: int, number: int) -> Key:
        """Return what everything public of a round is drawn from: noise, labels and batches."""
        return Key(Key(seed, "datalens/draw", number).u64() >> 1, "datalens")

    def ballot(self, pixels: int) -> Ballot:
        """Return how votes on images of so many pixels travel."""
        return Ballot(self.teachers, self.images, min(self.k, pixels))

    def round(self, now: Now) -> Round:
        student: Generating = now.data
        model, key = now.tensors(), self.key(now.seed, now.number)
        images = student.images(model, key, self.images)
        if self.send == "images":
            # Little-endian on every machine: the same bytes have to be the same images to all teachers.
            shown = {"images": np.ascontiguousarray(images, "<f4").tobytes()}
            answers = yield [Ask(node, frames=shown, model=False) for node in now.nodes]
        else:
            answers = yield [Ask(node) for node in now.nodes]
        # Every client's votes weigh alike.
        given = [each._replace(weight=1.0) for each in now.give(answers)]
        part = Layout.flat(images.size)
        on_images = replace(now, layout=part, start=lambda: np.zeros(part.size, np.float32))
        step = on_images.total(self.ballot(images.shape[1]), given)
        if step is None:
            return None
        assert step.change is not None
        targets = (self.eta * step.change.reshape(images.shape)).astype(np.float32)
        moments = now.state or student.start()
        after, kept = student.step(model, moments, key, targets)
        # Arithmetic on an array without dimensions gives a number, which no checkpoint takes for an array.
        now.state.update({name: np.asarray(array) for name, array in kept.items()})
        return replace(step, change=None, tensors=after)

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        if me.data is None:
            raise ConfigError("this app has no teachers: client(app, datalens_teachers(teachers))")
        # Of what the app brings for this message: its teachers, and the generator's arrays where they came.
        own, arrays = me.data(me, self)
        state, votes = self.study(memory, ask, me, own, arrays)
        ballot, part = self.ballot(votes.shape[1]), Layout.flat(self.images * votes.shape[1])
        frame, _ = ballot.encode(Update(votes.reshape(-1).astype(np.float32), Layout.flat(votes.size)), {}, me.key)
        if me.padded:
            frame = padded(frame, ballot, part, me.key)
        return state, Answer(me.node, frames={"values": frame}, bare=True)

    def study(
        self, memory: State, ask: Ask, me: Me, own: NodeTeachers, arrays: Arrays
    ) -> tuple[State, NDArray[np.int8]]:
        """Let the teachers learn and vote; return their state and the votes, int8 ``(teachers * B, pixels)``.

        Whoever has no state yet takes the steps of the pretraining first. With a generator at hand every step looks at
        new images, of the labels of each teacher's own batch; where images were sent, at those.
        """
        key = self.key(me.seed, me.number)
        # Sent images are shown as they are; a generator makes new ones for each step.
        shown = images_in(ask, self.images) if self.send == "images" else None
        if shown is None and not arrays:
            raise ConfigError("the message holds neither images nor a generator")
        labels = own.student.labels(key, self.images)
        images = own.student.images(arrays, key, self.images) if shown is None else shown
        # A step has the images of every teacher in memory, and so has a vote; a batch is as long as it was asked for.
        most = max(self.images, self.batch)
        if self.teachers * images.shape[1] * most > MOST_VALUES:
            each = f"{self.teachers} teachers with {most} images of {images.shape[1]} pixels"
            raise ConfigError(f"{each}: more than {MOST_VALUES} numbers")
        state: Arrays = {name: array.copy() for name, array in memory.items()} or own.teachers.start()
        for step in range(self.steps if memory else self.steps + self.pretrain):
            # Public coins: the bound on the votes holds for every outcome of them.
            batch = Key(key.seed, "datalens/batch", partition=me.node, layer=step)
            if shown is None:
                state = own.teachers.learn(state, own.student.faker(arrays, batch.at(purpose="datalens/fakes")), batch)
            else:
                state = own.teachers.learn(state, lambda _: images, batch, labels)
        directions = own.teachers.gradients(state, images, labels)
        votes = topk_stochastic_sign(
            directions.reshape(self.teachers * self.images, images.shape[1]),
            min(self.k, images.shape[1]),
            saturation=self.saturation,
            stochastic=self.stochastic,
            uniforms=Key(key.seed, "datalens/votes", partition=me.node),
        )
        return {name: np.asarray(array) for name, array in state.items()}, votes


def images_in(ask: Ask, count: int) -> NDArray[np.float32]:
    """Return the images of an ask, float32 ``(count, pixels)``.

    Raises
    ------
    ConfigError
        When the bytes are not so many images of float32.
    """
    data = ask.frames.get("images", b"")
    if not data or len(data) % (4 * count):
        raise ConfigError(f"{len(data)} bytes of images, expected {count} of as many pixels of 4 bytes each")
    # astype() copies: a view of the frame would be read-only.
    return np.frombuffer(data, "<f4").astype(np.float32).reshape(count, -1)


class TeacherVotes(Private):
    """The noisy sum of teachers' votes, by the signs that pass the threshold.

    Parameters
    ----------
    system : Teachers
    beta : float
        Threshold, as a fraction of the expected number of teachers.
    clients : int
        How many there are, of whom each makes the expected number with its teachers; 0: learnt by :meth:`declare`.
    **privacy
        As :class:`fedcomp.systems.private.rule.Private`. The sensitivity of a sum of votes is sqrt(k), twice that under
        ``replace``; the published code's sigma is 2 sqrt(k) z. ``adjacency`` is "replace" unless given, which is what
        holds for a record of any teacher: the number of teachers stays as it is, and one of them may vote otherwise in
        every place. ``population`` is the number of clients unless given; with several teachers per client records are
        the unit, and how many there are has to be said.

    Attributes
    ----------
    answered : int
        Clients whose votes are in the current sum.
    moved : float
        Fraction of the pixels whose noisy sum passed the threshold; it may be released.

    Raises
    ------
    ConfigError
        For arguments out of range, and for several teachers of a client under an adjacency that only holds for clients.
    """

    votes: ClassVar[bool] = True

    def __init__(self, system: Teachers, *, beta: float = 0.2, clients: int = 0, **privacy: Any) -> None:
        self.teaching, self.beta, self.clients = system, beta, 0
        self.answered, self.moved = 0, 0.0
        count = system.teachers
        adjacency = privacy.setdefault("adjacency", "replace")
        if count > 1 and adjacency != "replace":
            raise ConfigError(
                f"adjacency={adjacency!r} does not fit {count} teachers per client: what one record changes is one "
                "teacher's vote, and their number stays as it is; say adjacency='replace'"
            )
        if count > 1 and not privacy.get("population"):
            raise ConfigError(
                f"with {count} teachers per client a record is what is protected, and delta must be below one over "
                "the number of records: give population, the public number of records of all clients"
            )
        super().__init__(unit="client" if count == 1 else "record", **privacy)
        # Refuses its own arguments.
        self.mechanism(Layout.flat(system.images * system.k))
        if clients:
            self.declare(clients)

    def shape(self, layout: Layout) -> tuple[int, int]:
        """Return that of the votes on a round's images, (B, d)."""
        return self.teaching.images, layout.size // self.teaching.images

    def mechanism(self, layout: Layout, server_round: int = 1) -> Votes:
        """Return the mechanism for as many pixels as all images of a round have."""
        shape = self.shape(layout)
        return Votes(
            noise_multiplier=self.noise_multiplier,
            adjacency=self.adjacency,
            noise=self.noise,
            k=min(self.teaching.k, shape[1]),
            shape=shape,
            by_row=True,
        )

    def event(self, mechanism: Mechanism, size: int) -> Event:
        """Return what a round costs: one release for each image."""
        return mechanism.event(rate=self.sampling.event_rate, size=size, label="votes on generated images")

    def contribution(self, update: Vector, layout: Layout, server_round: int) -> Contribution:
        """Return the votes of a client's teachers, int8 ``(teachers, B, d)``: each is bounded by itself."""
        return update.astype(np.int8).reshape(self.teaching.teachers, *self.shape(layout))

    def begun(self, server_round: int) -> None:
        """Count from nobody on."""
        self.answered = 0

    def added(self, contribution: Contribution) -> None:
        """Count a client."""
        self.answered += 1

    def released(self, noisy: NDArray[np.float64], layout: Layout, server_round: int) -> Any:
        """Return the signs of the sums that pass the threshold: -1, 0 and 1, (B, d)."""
        # Of the expected number of teachers, which is public; how many came is not.
        passed = threshold(noisy, self.beta * self.expected)
        self.moved = float(np.count_nonzero(passed)) / passed.size
        return passed

    @property
    def expected(self) -> float:
        """Public number of teachers that vote in a round."""
        return self.sampling.expected(self.clients, count=self.count) * self.teaching.teachers

    def declare(self, population: int) -> None:
        """Learn the number of clients, unless the constructor was told."""
        if self.clients:
            return
        population = checked("clients", population, Int(1))
        # With one teacher each, clients are the units; with several the constructor was told how many records there
        # are.
        if not self.privacy.population:
            self.privacy.declare(population)
        self.clients = self.privacy.clients = population

    def open_ledger(self, path: Path) -> None:
        """Keep the ledger in a file from now on; events in it that the ledger lacks were paid and count."""
        self.require_population()
        super().open_ledger(path)

    def draw(
        self, nodes: Callable[[], Sequence[int]], layout: Layout, server_round: int, *, clients: int = 0
    ) -> tuple[list[int], str]:
        """Return who is asked, and why nobody is; default of :attr:`clients` that may ever take part."""
        return super().draw(nodes, layout, server_round, clients=clients or self.clients)

    @property
    def _on_images(self) -> Layout:
        # How many pixels an image has is known from the first round on, and matters only for what the noise sampler
        # adds to delta; the round itself asks the budget again, before any client is contacted.
        return Layout.flat(self.teaching.images * self.teaching.k) if self._layout is None else self._layout

    def over(self, server_round: int) -> str:
        layout = self._on_images
        return self.exhausted or self.unaffordable(self.event(self.mechanism(layout), layout.size))

    def require_population(self) -> None:
        if not self.clients:
            raise ConfigError(
                "the public number of clients is not known: give clients=N, which the threshold and delta depend on; "
                "the number online now does not count"
            )

    def statement(self) -> Statement:
        self.require_population()
        own = self.teaching
        return make_statement(
            self.privacy,
            mechanism=self.mechanism(self._on_images),
            unit_note=(
                "a client is one teacher, so all its records together are protected"
                if own.teachers == 1
                else f"a record is in the hands of one teacher, of which a client has {own.teachers}, for as "
                "long as the assignment of records to clients is disjoint as well; a client as a whole is not protected"
            ),
            clip=f"at most {own.k} votes of -1 or 1 on an image, counted by the server; no gradient leaves a client",
            trust="the server sees single votes and is trusted; clients and users of the generator are not",
            protects="every generator and every image made by it, so the final one and all before it",
            not_covered=NOT_COVERED if self.pad else (*NOT_COVERED, LENGTHS),
            secure=not self.insecure_deterministic,
        )

    def identity(self) -> dict[str, Any]:
        """Return what must not change within a run; the ledger adds what it was begun with."""
        own = ("noise_multiplier", "adjacency", "noise", "count", "insecure_deterministic", "seed", "beta")
        return {"system": repr(self.teaching), **{name: getattr(self, name) for name in own}}

    def describe(self) -> str:
        """Return what is voted on."""
        own = self.teaching
        return f"{own.images} images a step, {own.k} votes on each, {own.teachers} teachers a client"
