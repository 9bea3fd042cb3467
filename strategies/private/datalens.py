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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.flower import datalens
from fedcomp.flower.datalens import TrainingRequest
from fedcomp.flower.logs import log
from fedcomp.flower.payload import PayloadError, take_frame
from fedcomp.flower.privacy import LENGTHS, SECRET
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.report import Report, Reports, ReportSection, figure
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy, Push
from fedcomp.plain import Count
from fedcomp.privacy.entropy import Entropy, make_entropy
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.events import Adjacency, Event
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.mechanism import PrivateSum, Votes
from fedcomp.privacy.statement import Statement, make_statement
from fedcomp.privacy.votes import decode_rows, threshold
from fedcomp.rng import Key
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.partitions import Holders
from fedcomp.strategies.private.settings import PrivacySettings, TeacherSettings, VoteSettings
from fedcomp.strategies.replies import SentMessage, match_replies
from fedcomp.strategies.round_log import RoundLog

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
    asked, answered : int
        Clients that were sent the training request, and whose votes are in the sum.
    lost : list of str
        Why there is no answer, one entry for each client without one.
    refused : list of str
        Why votes were left out, those of nodes that declare one partition among them.
    moved : float
        Fraction of the pixels whose noisy sum passed the threshold; it may be released.
    """

    asked: int = figure(unit="nodes", public=True)
    answered: int = figure(unit="nodes", public=True)
    lost: list[str] = figure(list, unit="nodes", public=True, show="reasons")
    refused: list[str] = figure(list, unit="nodes", public=True, show="reasons")
    moved: float = figure(0.0, public=True)


class DataLens(ExchangeStrategy, Stateful):
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
    deadline : float, optional
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
    """

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
        deadline: float | None = None,
        configrecord_key: str = "config",
        **privacy: Any,
    ) -> None:
        given = PrivacySettings(**{"adjacency": "replace", **privacy})
        count, adjacency, population = teachers.teachers, given.adjacency, given.population
        if isinstance(clients, bool) or not isinstance(clients, int) or clients < 0:
            raise ConfigError(f"clients of DataLens is {clients!r}; expected a whole number, at least 0")
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
        self.student, self.votes, self.teaching = student, votes, teachers
        self.noise_multiplier, self.noise, self.pad = given.noise_multiplier, given.noise, given.pad
        self.adjacency: Adjacency = adjacency
        self.insecure_deterministic, self.seed = given.insecure_deterministic, given.seed
        self.sampling = given.drawn
        self.deadline = deadline
        self.clients, self.population = 0, population
        self.reports = Reports()
        self._log = RoundLog("DataLens")
        unit = "client" if count == 1 else "record"
        self.privacy = PrivacyLedger(
            delta=given.delta,
            population=0,
            adjacency=adjacency,
            sampling=self.sampling,
            budget=given.budget,
            unit=unit,
        )
        self.mechanism((votes.images, votes.k))  # refuses its own arguments
        self._key = configrecord_key
        self._session = secrets.token_hex(8)
        self._sequence = 0
        self._pixels = 0
        self._moments: Arrays | None = None
        self._made: StudentTrainer | None = None
        self._said: set[str] = set()
        if clients:
            self.declare(clients)

    # What is promised.

    def mechanism(self, shape: tuple[int, int]) -> Votes:
        """Return the mechanism for B images of d pixels, ``shape`` (B, d)."""
        return Votes(
            noise_multiplier=self.noise_multiplier,
            adjacency=self.adjacency,
            noise=self.noise,
            k=min(self.votes.k, shape[1]),
            shape=shape,
            by_row=True,
        )

    def event(self, pixels: int) -> Event:
        """Return what a round costs: one release for each image."""
        mechanism = self.mechanism((self.votes.images, pixels))
        return mechanism.event(
            rate=self.sampling.event_rate, size=self.votes.images * pixels, label="votes on generated images"
        )

    @property
    def expected(self) -> float:
        """Public number of teachers that vote in a round."""
        return self.sampling.expected(self.clients) * self.teaching.teachers

    def declare(self, population: int) -> None:
        """Learn the number of clients, unless the constructor was told."""
        if self.clients:
            return
        if isinstance(population, bool) or not isinstance(population, int) or population < 1:
            raise ConfigError(f"{population!r} is no number of clients: a whole number, at least 1")
        self.privacy.declare(self.population or population)
        self.clients = population

    def open_ledger(self, path: Path) -> None:
        """Keep the ledger in a file from now on; events in it that the ledger lacks were paid and count."""
        self._require_clients()
        self.privacy.open(Path(path))

    def over(self, server_round: int) -> str:
        """Return why round ``server_round`` may not be made, empty when it may.

        How many pixels an image has is known from the first round on, and matters only for what the noise sampler adds
        to delta; the round itself asks again, before any client hears of it.
        """
        if self.privacy.affords(self.event(self._pixels or self.votes.k), round=server_round):
            return ""
        return (
            f"the budget of epsilon {self.privacy.budget:g} at delta {self.privacy.delta:g} allows no further step: "
            f"{self.privacy.epsilon():.4g} is spent"
        )

    def statement(self) -> Statement:
        """Return what may be said about the run so far."""
        self._require_clients()
        one = self.teaching.teachers == 1
        return make_statement(
            self.privacy,
            mechanism=self.mechanism((self.votes.images, self._pixels or self.votes.k)),
            unit_note=(
                "a client is one teacher, so all its records together are protected"
                if one
                else f"a record is in the hands of one teacher, of which a client has "
                f"{self.teaching.teachers}, for as long as "
                "the assignment of records to clients is disjoint as well; a client as a whole is not protected"
            ),
            clip=f"at most {self.votes.k} votes of -1 or 1 on an image, counted by the server; "
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
            self.votes.images,
            self.votes.k,
            self.teaching.teachers,
            self.noise_multiplier,
            self.adjacency,
        )

    # A round.

    def round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Take one step of the generator; without one, and without a message, when the budget does not allow it."""
        self._require_clients()
        generator = to_arrays(arrays)
        student = self._student(config)
        request, images = self._request(server_round, student, generator)
        self._pixels = request.pixels
        reason = self.over(server_round)
        if reason:
            self._warn(f"no teacher is asked in round {server_round} or later: {reason}")
            return None, None
        online = list(grid.get_node_ids())
        if len(online) > self.clients:
            self._warn(
                f"no teacher is asked in round {server_round}: {len(online)} clients are online, and their number was "
                f"given as {self.clients}. The threshold and delta rest on the number of all that may ever take part"
            )
            return None, None
        for node in self.privacy.surplus(online):
            self._warn(
                f"node {node} is not asked: all {self.privacy.population} clients have taken part under other ids"
            )
        chosen = self.sampling.draw(online, self.privacy, server_round, self._entropy("sampling", server_round))
        if self.sampling.kind == "capped" and not chosen:
            self._warn(f"round {server_round}: every client that is online has taken part as often as it may")
            return None, None
        self._sequence = request.sequence
        config["server-round"] = server_round
        if self.withholds:
            config[SECRET] = True
        messages = [self._message(node, request, config, arrays, images) for node in chosen]
        # Made in each round: whom earlier rounds prefer would make one client's part in the sum depend on another's.
        holders = Holders()
        holders.meet(grid)
        replies = yield Push(messages, self.deadline)
        total = PrivateSum(self.mechanism((self.votes.images, request.pixels)), (self.votes.images, request.pixels))
        sent = [SentMessage(message, message.metadata.dst_node_id, request.sequence) for message in messages]
        whole = self.reports.begin(server_round)
        whole.asked = len(sent)
        votes = self._collect(total, request, match_replies(sent, replies, whole, holders), whole)
        noisy = total.release(
            self.privacy,
            round=server_round,
            entropy=self._entropy("noise", server_round),
            event=self.event(request.pixels),
            participants=chosen,
        )
        passed = threshold(noisy, self.votes.beta * self.expected)
        votes.moved = float(np.count_nonzero(passed)) / passed.size
        targets = (self.votes.eta * passed).astype(np.float32)
        moments = student.start() if self._moments is None else self._moments
        after, kept = student.step(generator, moments, request.key, targets)
        # Arithmetic on an array without dimensions gives a number, which no checkpoint takes for an array.
        self._moments = {name: np.asarray(array) for name, array in kept.items()}
        self._log.conclude(whole, withheld=self.withholds)
        if self.withholds:
            # The public sum shows it; who voted is forgotten with the rest.
            whole.section(Voted).moved = votes.moved
            return to_record(after), MetricRecord({"datalens.moved": votes.moved})
        return to_record(after), votes.metrics()

    @property
    def withholds(self) -> bool:
        """Whether what a round costs rests on nobody knowing who took part: then no report says it."""
        return self.sampling.event_rate < 1.0

    def _request(
        self, server_round: int, student: StudentTrainer, generator: Arrays
    ) -> tuple[TrainingRequest, NDArray[np.float32]]:
        # Below 2**63, which is the largest integer a message carries.
        draw = Key(self.seed, "datalens/draw", server_round).u64() >> 1
        images = student.images(generator, Key(draw, "datalens"), self.votes.images)
        request = TrainingRequest(
            session=self._session,
            sequence=self._sequence + 1,
            draw=draw,
            images=self.votes.images,
            pixels=images.shape[1],
            teachers=self.teaching.teachers,
            k=min(self.votes.k, images.shape[1]),
            saturation=float(self.votes.saturation or 0.0),
            stochastic=self.votes.stochastic,
            steps=self.teaching.steps,
            pretrain=self.teaching.pretrain,
            batch=self.teaching.batch,
            lr=float(self.teaching.teacher_lr),
            decay=float(self.teaching.decay),
            seed=self.seed,
            pad=self.pad,
        )
        return request, images

    def _message(
        self,
        node: int,
        request: TrainingRequest,
        config: ConfigRecord,
        arrays: ArrayRecord,
        images: NDArray[np.float32],
    ) -> Message:
        content = RecordDict({self._key: config})
        request.put(content)
        if self.teaching.send == "images":
            datalens.put_images(content, images)
        else:
            content[datalens.MODEL] = arrays
        return Message(content, node, datalens.TYPE)

    def _collect(
        self, total: PrivateSum, request: TrainingRequest, replies: Iterable[tuple[SentMessage, Message]], whole: Report
    ) -> Voted:
        """Add the votes of every reply that can be verified; whoever sent another one is left out whole."""
        votes = whole.section(Voted)
        votes.asked = whole.asked
        for sent, reply in replies:
            if reply.has_error():
                votes.lost.append(str(reply.error.reason))
                continue
            try:
                total.add_all(sent.node, self._votes(reply, request))
            except FedcompError as error:
                whole.refuse(sent.node, f"{type(error).__name__}: {error}")
        whole.used = votes.answered = len(total.participants)
        votes.lost += ["nothing came back in time"] * whole.lost
        votes.refused = list(whole.refused.values())
        # That a client failed says that it had been drawn.
        for reason in () if self.withholds else sorted({*votes.lost, *votes.refused}):
            log.warning("round %d: a client's votes are not in the sum: %s", whole.round, reason)
        return votes

    def _votes(self, reply: Message, request: TrainingRequest) -> NDArray[np.int8]:
        """Return the votes of a client, int8 ``(teachers, B, pixels)``.

        Raises
        ------
        FedcompError
            When they are missing, damaged, or too many on an image.
        """
        frame = take_frame(reply.content, datalens.VOTES)
        if frame is None:
            raise PayloadError(f"the reply has no frame {datalens.VOTES!r}")
        rows = decode_rows(frame, request.rows, request.pixels, request.k)
        if rows.shape != (request.rows, request.pixels):
            raise Unbounded(f"votes have shape {rows.shape}, expected {(request.rows, request.pixels)}")
        return rows.reshape(self.teaching.teachers, self.votes.images, request.pixels)

    def _student(self, config: ConfigRecord) -> StudentTrainer:
        if self._made is None:
            self._made = self.student(dict(config))
        return self._made

    def _entropy(self, purpose: str, server_round: int) -> Entropy:
        key = Key(self.seed, f"privacy/{purpose}", server_round)
        return make_entropy(key, insecure_deterministic=self.insecure_deterministic)

    def _warn(self, text: str) -> None:
        if text not in self._said:
            log.warning("DataLens: %s", text)
            self._said.add(text)

    def _require_clients(self) -> None:
        if not self.clients:
            raise ConfigError(
                "the public number of clients is not known: give clients=N, which the threshold and delta depend on; "
                "how many are online now is not it"
            )

    # Resuming.

    def identity(self) -> dict[str, Any]:
        """Return what must not change within a run; the ledger adds what it was begun with."""
        own = ("noise_multiplier", "adjacency", "noise", "insecure_deterministic", "seed")
        return {**asdict(self.votes), **asdict(self.teaching), **{name: getattr(self, name) for name in own}}

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Learn the number of clients, which the ledger is read with; refuse a state of another number."""
        self.declare(values["clients"])
        if self.clients != values["clients"]:
            raise StateError(f"the state is of {values['clients']} clients, this strategy of {self.clients}")
