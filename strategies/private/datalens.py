"""DataLens as a Flower strategy: :mod:`fedcomp.systems.private.datalens` over messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedcomp.codecs import Codec
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower.records import to_arrays
from fedcomp.flower.report import ReportSection, figure
from fedcomp.layout import Layout
from fedcomp.plain import Count
from fedcomp.stateful import StatePart, nested, next_epoch
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.private.settings import TeacherSettings, VoteSettings
from fedcomp.strategies.private.strategy import PrivateStrategy
from fedcomp.systems.private.datalens import Generating, Teachers, TeacherVotes

StudentOf = Callable[[Mapping[str, Any]], Generating]
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


def _run_of(owner: DataLens) -> dict[str, Any]:
    alone = owner.alone
    own = {"session": alone._session, "sequence": alone.sequence, "moments": dict(alone.state)}
    return {**own, "roster": alone.roster.state_dict()}


def _go_on(owner: DataLens, saved: dict[str, Any]) -> None:
    alone = owner.alone
    alone._session, alone.sequence, alone.state = saved["session"], saved["sequence"], dict(saved["moments"])
    alone.roster.load_state_dict(saved["roster"])


def _renumber(owner: DataLens) -> None:
    # So that no teacher takes a request for one that it has answered already.
    owner.alone.sequence = next_epoch(owner.alone.sequence)
    owner.alone.roster.renumber()


class DataLens(PrivateStrategy, TeacherVotes):
    """Train a generator on noisy votes of teachers. The run's model is the generator.

    The clients need :func:`fedcomp.clients.private.datalens.datalens_teachers`; :mod:`fedcomp.clients.app` has it.

    Parameters
    ----------
    student : callable
        ``student(config)`` returns the generator's side, see :class:`fedcomp.systems.private.datalens.Generating`;
        called once, in the first round.
    votes : VoteSettings
    teachers : TeacherSettings
    clients : int
        Number of clients, each with the expected number of teachers; 0: set by :meth:`declare`.
    **privacy
        As :class:`fedcomp.systems.private.datalens.TeacherVotes`.

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

    STATE: ClassVar[Mapping[str, Any]] = {
        "privacy": nested("privacy"),
        "clients": Count,
        "run": StatePart(_run_of, _go_on, _renumber),
    }

    takes_plain: ClassVar[bool] = False

    def __init__(
        self,
        student: StudentOf,
        votes: VoteSettings,
        teachers: TeacherSettings = TeacherSettings(),  # noqa: B008 - immutable
        *,
        clients: int = 0,
        **privacy: Any,
    ) -> None:
        self.student = student
        system = Teachers(
            k=votes.k,
            images=votes.images,
            eta=votes.eta,
            saturation=votes.saturation,
            stochastic=votes.stochastic,
            teachers=teachers.teachers,
            lr=teachers.teacher_lr,
            decay=teachers.decay,
            steps=teachers.steps,
            pretrain=teachers.pretrain,
            batch=teachers.batch,
            send=teachers.send,
            seed=privacy.get("seed", 0),
        )
        # Says whom to ask, and takes the generator; every client that is there may be drawn.
        inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=0, min_available_nodes=0)
        super().__init__(inner, system=system, beta=votes.beta, clients=clients, **privacy)
        self._released = self._images

    def program(self) -> Teachers:
        """Return the system that its clients take part in."""
        return self.teaching

    def check_codec(self, codec: Codec) -> None:
        """Refuse any codec: what is sent is decided by the system."""
        raise ConfigError("clients of DataLens send votes on images, so there is no update for a codec to encode")

    def ask(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Draw the nodes whose teachers are asked; nobody when the run is over."""
        # Made of the first round's configuration, which names the task; its optimiser is in the state of the run.
        self.generator = self.generator or self.student(dict(config))
        return super().ask(server_round, arrays, config, grid)

    def _images(self, arrays: ArrayRecord, server_round: int) -> Layout:
        # How many pixels an image has.
        key = self.teaching.key(self.seed, server_round)
        return Layout.flat(self.teaching.images * self.generator.images(to_arrays(arrays), key, 1).shape[1])

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Outcome:
        """Release the noisy votes, and return the generator after its step; None and None where nobody was asked."""
        arrays, _ = super().aggregate_train(server_round, replies)
        if arrays is None:
            return None, None
        votes = self.reports[server_round].section(Voted)
        votes.moved = self.moved
        if self.withholds:
            # The public sum shows what moved; who voted is forgotten with the rest.
            return arrays, MetricRecord({"datalens.moved": self.moved})
        votes.answered = self.answered
        return arrays, votes.metrics()

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Learn the number of clients, which the ledger is read with; refuse a state of another number."""
        self.declare(values["clients"])
        if self.clients != values["clients"]:
            raise StateError(f"the state is of {values['clients']} clients, this strategy of {self.clients}")
