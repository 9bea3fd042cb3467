"""DataLens: a generator learns from the noisy votes of teachers that see data; teachers are clients.

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
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import datalens
from fedcomp.flower.datalens import TrainingRequest
from fedcomp.flower.logs import log
from fedcomp.flower.payload import PayloadError, take_frame
from fedcomp.flower.privacy import SECRET
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.report import Reports, ReportSection, figure
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy, Push
from fedcomp.layout import Layout
from fedcomp.plain import Count
from fedcomp.privacy.events import Event
from fedcomp.privacy.mechanism import Mechanism, Votes
from fedcomp.privacy.statement import Statement, make_statement
from fedcomp.privacy.votes import decode_rows, threshold
from fedcomp.rng import Key
from fedcomp.rules import Int, checked
from fedcomp.stateful import Stateful, nested, next_epoch
from fedcomp.strategies.partitions import Holders
from fedcomp.strategies.private.promise import Once
from fedcomp.strategies.private.settings import TeacherSettings, VoteSettings
from fedcomp.strategies.replies import Rejected, SentMessage, match_replies
from fedcomp.strategies.round_log import RoundLog
from fedcomp.systems.private.books import LENGTHS
from fedcomp.systems.private.rule import Private
from fedcomp.systems.private.settings import PrivacySettings

Arrays = Mapping[str, NDArray[Any]]

NOT_COVERED: Final = (
    "the test of the generated images on held-out real ones, which is not a release of this run",
    "the choice of k, of the noise, of the threshold and of the networks, and preprocessing of the data",
    "who takes part, when, and whether its app fails",
    "the server's own reports and logs (who was refused, and why)",
)
"""What the statement does not extend to."""


class StudentTrainer(Protocol):
    """The generator's side, such as :class:`fedcomp.tasks.gan.Student`."""

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


StudentOf = Callable[[Mapping[str, Any]], StudentTrainer]
"""``student(config)``: from the training configuration."""


@dataclass
class Voted(ReportSection, name="datalens"):
    """What the votes of a round came to, for the server; not for release.

    Attributes
    ----------
    answered : int
        Clients whose votes are in the sum.
    moved : float
        Fraction of the pixels whose noisy sum passed the threshold; it may be released.
    """

    answered: int = figure(unit="nodes", public=True)
    moved: float = figure(0.0, public=True)


class DataLens(Private, ExchangeStrategy, Stateful):
    """A generator that is trained on noisy votes. The model of the run is the generator.

    The clients need the half :func:`fedcomp.clients.private.datalens.datalens_teachers`; :mod:`fedcomp.clients.app`
    has it.

    Parameters
    ----------
    student : callable
        ``student(config)`` returns the generator's side, see :class:`StudentTrainer`; called once, in the first round.
    votes : VoteSettings
    teachers : TeacherSettings
    clients : int
        How many there are, of whom each makes the expected number with its teachers; 0: learnt by :meth:`declare`.
    timeout : float, optional
        Seconds to wait for votes; default the driver's timeout.
    **privacy
        The promise, see :class:`fedcomp.strategies.private.settings.PrivacySettings`. The sensitivity of a sum of votes
        is sqrt(k), twice that under ``replace``; the published code's sigma is 2 sqrt(k) z. ``adjacency`` is "replace"
        unless given, which is what holds for a record of any teacher: the number of teachers stays as it is, and one of
        them may vote otherwise in every place. ``population`` is the number of clients unless given; with several
        teachers per client records are the unit, and how many there are has to be said.

    Attributes
    ----------
    privacy : PrivacyLedger
    reports : Reports
        By round.

    Raises
    ------
    ConfigError
        For arguments out of range, and for several teachers of a client under an adjacency that only holds for clients.

    Examples
    --------
    >>> from fedcomp.tasks import get_task
    >>> from fedcomp.tasks.gan import Adam
    >>> task = get_task("digits-generator")
    >>> votes, teachers = VoteSettings(k=200, images=15), TeacherSettings(steps=2)
    >>> strategy = DataLens(
    ...     lambda config: task.student(Adam(1e-3, 0.5)), votes, teachers, clients=1000, noise_multiplier=20.0
    ... )
    """

    votes: ClassVar[bool] = True

    STATE: ClassVar[Mapping[str, Any]] = {
        "privacy": nested("privacy"),
        "clients": Count,
        "_session": str,
        "_sequence": Count,
        "_moments": dict[str, NDArray[Any]] | None,
        "reports": Reports,
    }

    def __init__(
        self,
        student: StudentOf,
        votes: VoteSettings,
        teachers: TeacherSettings = TeacherSettings(),  # noqa: B008 - immutable
        *,
        clients: int = 0,
        timeout: float | None = None,
        configrecord_key: str = "config",
        **privacy: Any,
    ) -> None:
        given = PrivacySettings(**{"adjacency": "replace", **privacy})
        count, adjacency, population = teachers.teachers, given.adjacency, given.population
        clients = checked("clients", clients, Int())
        if count > 1 and adjacency != "replace":
            raise ConfigError(
                f"adjacency={adjacency!r} does not fit {count} teachers per client: what one record changes is one "
                "teacher's vote, and their number stays as it is; say adjacency='replace'"
            )
        if count > 1 and not population:
            raise ConfigError(
                f"with {count} teachers per client a record is what is protected, and delta must be below one over "
                "the number of records: give population, the public number of records of all clients"
            )
        self.student, self.voting, self.teaching = student, votes, teachers
        super().__init__(unit="client" if count == 1 else "record", **{"adjacency": "replace", **privacy})
        self.timeout = timeout
        self.clients = 0
        self.mechanism(Layout.flat(votes.images * votes.k))  # refuses its own arguments
        self._once = Once("DataLens")
        self.reports, self._log = Reports(), RoundLog("DataLens")
        self._key = configrecord_key
        # Not from the seed: another run is another session, for which teachers start over.
        self._session = secrets.token_hex(8)
        self._sequence = 0
        self._pixels = 0
        self._moments: Arrays | None = None
        self._made: StudentTrainer | None = None
        if clients:
            self.declare(clients)

    def renumber(self) -> None:
        """Number requests so that no teacher takes one for what it has answered already."""
        super().renumber()
        self._sequence = next_epoch(self._sequence)

    def shape(self, layout: Layout) -> tuple[int, int]:
        """Return that of the votes on a round's images, (B, d)."""
        return self.voting.images, layout.size // self.voting.images

    def mechanism(self, layout: Layout, server_round: int = 1) -> Votes:
        """Return the mechanism for as many pixels as all images of a round have."""
        shape = self.shape(layout)
        return Votes(
            noise_multiplier=self.noise_multiplier,
            adjacency=self.adjacency,
            noise=self.noise,
            k=min(self.voting.k, shape[1]),
            shape=shape,
            by_row=True,
        )

    def event(self, mechanism: Mechanism, size: int) -> Event:
        """Return what a round costs: one release for each image."""
        return mechanism.event(rate=self.sampling.event_rate, size=size, label="votes on generated images")

    def released(self, noisy: NDArray[np.float64], layout: Layout, server_round: int) -> Any:
        """Return the signs of the sums that pass the threshold: -1, 0 and 1, (B, d)."""
        # Of the expected number of teachers, which is public; how many came is not.
        return threshold(noisy, self.voting.beta * self.expected)

    @property
    def expected(self) -> float:
        """Public number of teachers that vote in a round."""
        return self.sampling.expected(self.clients) * self.teaching.teachers

    def declare(self, population: int) -> None:
        """Learn the number of clients, unless the constructor was told."""
        if self.clients:
            return
        population = params.integer("clients", population, low=1)
        # With one teacher each, clients are the units; with several the constructor was told how many records there
        # are.
        if not self.privacy.population:
            self.privacy.declare(population)
        self.clients = population

    def open_ledger(self, path: Path) -> None:
        """Keep the ledger in a file from now on; events in it that the ledger lacks were paid and count."""
        self.require_population()
        super().open_ledger(path)

    def over(self, server_round: int) -> str:
        """Return why round ``server_round`` may not be made, empty when it may.

        How many pixels an image has is known from the first round on, and matters only for what the noise sampler adds
        to delta; the round itself asks again, before any client is contacted.
        """
        layout = self._on_images
        return self.unaffordable(self.event(self.mechanism(layout), layout.size), server_round)

    @property
    def _on_images(self) -> Layout:
        return Layout.flat(self.voting.images * (self._pixels or self.voting.k))

    def statement(self) -> Statement:
        """Return what may be said about the run so far."""
        self.require_population()
        one = self.teaching.teachers == 1
        return make_statement(
            self.privacy,
            mechanism=self.mechanism(self._on_images),
            unit_note=(
                "a client is one teacher, so all its records together are protected"
                if one
                else f"a record is in the hands of one teacher, of which a client has {self.teaching.teachers}, for as "
                "long as the assignment of records to clients is disjoint as well; a client as a whole is not protected"
            ),
            clip=f"at most {self.voting.k} votes of -1 or 1 on an image, counted by the server; "
            "no gradient leaves a client",
            trust="the server sees single votes and is trusted; clients and users of the generator are not",
            protects="every generator and every image made by it, so the final one and all before it",
            not_covered=NOT_COVERED if self.pad else (*NOT_COVERED, LENGTHS),
            secure=not self.insecure_deterministic,
        )

    def summary(self) -> None:
        """Log the parameters."""
        log.info(
            "\t├──> DataLens: %d images a step, %d votes on each, %d teachers a client, noise multiplier %g (%s)",
            self.voting.images,
            self.voting.k,
            self.teaching.teachers,
            self.noise_multiplier,
            self.adjacency,
        )

    def round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Take one step of the generator; without one, and without a message, when the budget does not allow it."""
        self.require_population()
        generator = to_arrays(arrays)
        # Made of the first round's configuration, which names the task; its optimiser is in the state of the run.
        student = self._made = self._made or self.student(dict(config))
        request, images = self._request(server_round, student, generator)
        # Before the budget is asked: what a round costs may depend on it.
        self._pixels = request.pixels

        def there() -> list[int]:
            nodes = list(grid.get_node_ids())
            for why in self.surplus(nodes):
                self._once.warn(why)
            return nodes

        # Teachers are contacted after the budget was asked; a release that would cross it is never prepared.
        layout = self._on_images
        chosen, reason = self.draw(there, layout, server_round, clients=self.clients)
        if reason:
            self._once.warn(reason, f"no teacher is asked in round {server_round}: {reason}")
            return None, None
        self._sequence = request.sequence
        config["server-round"] = server_round
        if self.withholds:
            config[SECRET] = True
        content = RecordDict({self._key: config})
        request.put(content)
        if self.teaching.send == "images":
            datalens.put_images(content, images)
        else:
            content[datalens.MODEL] = arrays
        # Each message has a mapping of its own over the records, which are shared.
        sent = [SentMessage(Message(RecordDict(dict(content)), node, datalens.TYPE), node, 0) for node in chosen]
        holders = Holders()
        holders.meet(grid)
        self.open(server_round, chosen)
        replies = yield Push([each.message for each in sent], self.timeout)
        if not self.close(server_round):
            return None, None
        report = self.reports.begin(server_round)
        report.asked = len(sent)
        pairs = match_replies(sent, replies, report, holders)
        # Whoever sent votes of which one cannot be verified is left out whole.
        reads = ((each.node, each.node, partial(votes_of, reply, request)) for each, reply in pairs)
        step = self.release(server_round, layout, None, reads, report.refuse)
        assert step is not None
        assert step.change is not None
        passed, votes = step.change, report.section(Voted)
        votes.answered = report.used = len(step.consumed)
        votes.moved = float(np.count_nonzero(passed)) / passed.size
        targets = (self.voting.eta * passed).astype(np.float32)
        moments = student.start() if self._moments is None else self._moments
        after, kept = student.step(generator, moments, request.key, targets)
        # Arithmetic on an array without dimensions gives a number, which no checkpoint takes for an array.
        self._moments = {name: np.asarray(array) for name, array in kept.items()}
        self._log.conclude(report, withheld=self.withholds)
        if self.withholds:
            # The public sum shows it; who voted is forgotten with the rest.
            report.section(Voted).moved = votes.moved
            return to_record(after), MetricRecord({"datalens.moved": votes.moved})
        return to_record(after), votes.metrics()

    def _request(
        self, server_round: int, student: StudentTrainer, generator: Arrays
    ) -> tuple[TrainingRequest, NDArray[np.float32]]:
        # Below 2**63, which is the largest integer a message carries.
        draw = Key(self.seed, "datalens/draw", server_round).u64() >> 1
        images = student.images(generator, Key(draw, "datalens"), self.voting.images)
        request = TrainingRequest(
            session=self._session,
            sequence=self._sequence + 1,
            draw=draw,
            images=self.voting.images,
            pixels=images.shape[1],
            teachers=self.teaching.teachers,
            k=min(self.voting.k, images.shape[1]),
            saturation=float(self.voting.saturation or 0.0),
            stochastic=self.voting.stochastic,
            steps=self.teaching.steps,
            pretrain=self.teaching.pretrain,
            batch=self.teaching.batch,
            lr=float(self.teaching.teacher_lr),
            decay=float(self.teaching.decay),
            seed=self.seed,
            pad=self.pad,
        )
        return request, images

    def require_population(self) -> None:
        """Refuse to go on without the public number of clients.

        Raises
        ------
        ConfigError
        """
        if not self.clients:
            raise ConfigError(
                "the public number of clients is not known: give clients=N, which the threshold and delta depend on; "
                "how many are online now is not it"
            )

    def identity(self) -> dict[str, Any]:
        """Return what must not change within a run; the ledger adds what it was begun with."""
        own = ("noise_multiplier", "adjacency", "noise", "insecure_deterministic", "seed")
        return {**asdict(self.voting), **asdict(self.teaching), **{name: getattr(self, name) for name in own}}

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Learn the number of clients, which the ledger is read with; refuse a state of another number."""
        self.declare(values["clients"])
        if self.clients != values["clients"]:
            raise StateError(f"the state is of {values['clients']} clients, this strategy of {self.clients}")


def votes_of(reply: Message, request: TrainingRequest) -> NDArray[np.int8]:
    """Return the votes in a client's reply, int8 ``(teachers, B, pixels)``.

    Raises
    ------
    FedcompError
        When the reply is an error, or they are missing, damaged, or too many on an image.
    """
    if reply.has_error():
        raise Rejected(f"error {reply.error.code}: {reply.error.reason}")
    frame = take_frame(reply.content, datalens.VOTES)
    if frame is None:
        raise PayloadError(f"the reply has no frame {datalens.VOTES!r}")
    rows = decode_rows(frame, request.rows, request.pixels, request.k)
    return rows.reshape(request.teachers, request.images, request.pixels)
