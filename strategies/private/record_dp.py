"""Record-level privacy: clients train with DP-SGD on their own records, and the server keeps all ledgers.

``RecordDp(FedAvg(fraction_evaluate=0.0), plan)``, or around the drop-in pair:
``RecordDp(Compressed(FedAvg(...), codec), plan)``. The server adds no noise and is trusted with no record; the mean of
noisy models, and whatever a codec does to them, is post-processing. What it does is this: it says how to train, asks
only clients that can still afford a training, takes no reply that does not say what it cost, and states what all of it
came to. Clients hold disjoint records, so the run costs what its dearest client spent, never the sum over clients.

A training may have cost something though its reply was lost: clients say what they spent in all. One that forgot
(another ledger) is accounted as having spent both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp.codecs import Identity
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower import asks
from fedcomp.flower.asks import AnswerHead
from fedcomp.flower.logs import log
from fedcomp.flower.payload import take_node
from fedcomp.flower.privacy import find_private
from fedcomp.flower.protocol import app_failure
from fedcomp.flower.records import to_arrays
from fedcomp.flower.report import Report, ReportSection, figure
from fedcomp.layout import NONE_DENSE, Layout
from fedcomp.privacy.events import Event
from fedcomp.privacy.parallel import ParallelLedger
from fedcomp.privacy.statement import Statement, make_statement
from fedcomp.program import Answer, Ask
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.inbox import Inbox
from fedcomp.strategies.means import MEANS, is_mean, weight_key_of
from fedcomp.strategies.nodes import NodesShown, asked_for, online
from fedcomp.strategies.partitions import Holders
from fedcomp.strategies.private.promise import NoClientEvaluation
from fedcomp.strategies.replies import SentMessage
from fedcomp.strategies.running import Running, Trained, copies_of
from fedcomp.strategies.server import Server
from fedcomp.strategies.update_rules import MeanRule
from fedcomp.strategies.wrapping import require_inner
from fedcomp.systems.private.record import Account, DpSgdPlan, Records
from fedcomp.wire import Frame

NOT_COVERED: Final = (
    "the choice of hyper-parameters and of the model, and preprocessing of the data",
    "the number of records of each client, which is taken as public",
    "who takes part, when, and how large its messages are",
    "a person with several records, or with records on several clients",
    "the server's evaluation of released models on data of its own",
)
"""What the statement does not extend to."""

DELIVERIES: Final = 2
"""How often a message may have been delivered and answered by a training, on average over a run."""

_NOBODY: Final = -1  # A party that has spent nothing.
_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")


class WrongAccount(FedcompError):
    """What a client says it spent cannot be true."""


class Claims(Stateful):
    """What clients said they spent, by their ledgers; two ledgers of one client are two clients' worth.

    Attributes
    ----------
    parties : dict of int to int
        The partition on whose records each node answered.
    steps : dict of int to dict of str to int
        Steps so far, by partition and by the name of the ledger.
    booked : dict of int to int
        Steps that were taken for this run's, by partition.
    asked : dict of int to int
        How many trainings each node was asked for.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "parties": dict[int, int],
        "steps": dict[int, dict[str, int]],
        "booked": dict[int, int],
        "asked": dict[int, int],
    }

    def __init__(self) -> None:
        self.parties: dict[int, int] = {}
        self.steps: dict[int, dict[str, int]] = {}
        self.booked: dict[int, int] = {}
        self.asked: dict[int, int] = {}

    def ask(self, nodes: Iterable[int]) -> None:
        """Take note of who is asked for a training."""
        for node in nodes:
            self.asked[node] = self.asked.get(node, 0) + 1

    def take(
        self, node: int, declared: int | None, account: Account, holders: Holders, steps: int
    ) -> tuple[int, int, str]:
        """Return on whose records a node trained, how many steps were not known of before, and what is wrong with it.

        Of nodes that declare one partition each is counted, used or not: their records may be the same. A node's word
        counts up to :data:`DELIVERIES` times what it was asked for, so that nobody can make a run's epsilon anything.

        Parameters
        ----------
        steps : int
            Of one training.

        Returns
        -------
        (int, int, str)
            The last is empty where nothing is wrong.

        Raises
        ------
        WrongAccount
            When it is not clear on whose records, or the training is not the one that was asked for.
        """
        if account.now != steps:
            raise WrongAccount(f"the node says that it took {account.now} steps, it was asked for {steps}")
        if declared is None:
            raise WrongAccount("the reply does not name its partition")
        # Where the engine knows whose they are, nobody can spend what is another's.
        party = holders.known.get(node, declared)
        if self.parties.setdefault(node, party) != party:
            raise WrongAccount(f"the node answered for partition {self.parties[node]} before, now for {party}")
        # By ledger: what one of two says was not spent before is not what the other one spent.
        claims = self.steps.setdefault(party, {})
        known = claims.get(account.run, 0)
        # Put back to an older state, as a resumed run does with its clients: what was spent since stays spent.
        put_back = account.total - account.now < known
        new, booked = account.now if put_back else account.total - known, self.booked.get(party, 0)
        room = (
            DELIVERIES * steps * sum(count for n, count in self.asked.items() if self.parties.get(n) == party) - booked
        )
        wrong = ""
        if new > room:
            if account.run in claims:
                wrong = (
                    f"the node says that {new} steps were taken since its last word, and {max(0, room)} at most were "
                    "asked for"
                )
            # A ledger that is new to this run may hold what other runs spent: of that it is asked for its own alone.
            new = max(0, room if wrong else min(room, steps * self.asked.get(node, 1)))
        claims[account.run], self.booked[party] = account.total, booked + new
        return party, new, wrong


@dataclass
class Spent(ReportSection, name="record_dp"):
    """What a round of record-level privacy adds to a report.

    Attributes
    ----------
    heads : dict of int to str
        By node, what names its ledger after the training: beside the node's own file or bytes it shows whether these
        are what the round was paid from.
    """

    heads: dict[int, str] = figure(dict, unit="nodes", show="none")


class RecordDp(NoClientEvaluation, Server):
    """Record-level privacy: clients train with DP-SGD, and the server accounts for it.

    The clients' apps need :func:`fedcomp.clients.private.dpsgd.record_dp`; replies of others are refused.

    Parameters
    ----------
    inner : Strategy
        One of Flower's weighted means, made with ``fraction_evaluate=0.0``, or the drop-in pair around one. All replies
        weigh the same.
    plan : DpSgdPlan
        How clients train.
    records : int
        Public total number of records of all clients. 0: set by :meth:`declare_records`, called by the driver of the
        rounds.
    guard : Norms, optional
        Refuses updates with an unusually large norm; by default none is refused. The pair has its own guard.

    Attributes
    ----------
    privacy : ParallelLedger
        The spending that clients reported, by partition.

    Raises
    ------
    ConfigError
        For a plan without a guarantee, and for inner strategies that would release more than models.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> plan = DpSgdPlan(noise_multiplier=2.0, rate=0.1, steps=20, delta=1e-5, budget=3.0)
    >>> strategy = RecordDp(FedAvg(fraction_evaluate=0.0), plan, records=5000)
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "privacy": nested("privacy"),
        "_claims": nested("_claims"),
        "_asked": list[int],
    }

    # Coded rounds stand around the hooks.
    by_hooks: ClassVar[bool] = True

    def __init__(self, inner: Strategy, plan: DpSgdPlan, *, records: int = 0, guard: Norms | None = None) -> None:
        # Coding, relays and graphs go around this strategy, where they go together with it at all.
        require_inner(inner, "RecordDp")
        if (private := find_private(inner)) is not None:
            raise ConfigError(
                f"{type(private).__name__} promises privacy in its own way, and its clients would not train as the "
                "plan says; use one of the two"
            )
        pair = inner if isinstance(inner, Compressed) else None
        # The mean itself, or the one in the drop-in pair.
        mean = inner if pair is None else pair.inner
        if not isinstance(mean, Strategy) or not is_mean(mean):
            raise ConfigError(
                f"{type(mean).__name__} is not a weighted mean; use one of {', '.join(MEANS)}, or Compressed around one"
            )
        if getattr(mean, "fraction_evaluate", 0.0) != 0.0:
            raise ConfigError(
                "evaluation on clients would release metrics of their records; make the inner strategy with "
                "fraction_evaluate=0.0, and evaluate on the server (evaluate_fn)"
            )
        if plan.adjacency == "replace":
            raise ConfigError(
                "adjacency='replace' gets no amplification by sampling here; specify add_remove or zero_out"
            )
        if guard is not None and pair is not None:
            raise ConfigError(
                f"{type(inner).__name__} checks the updates: write Compressed(..., guard=...) around the mean"
            )
        given: dict[str, Any] = {"guard": guard, "policy": NONE_DENSE}
        if pair is not None:
            given = {**pair.surroundings, "first_model_at_nodes": pair.first_model_at_nodes}
        super().__init__(Records(plan, Identity() if pair is None else pair.codec), mean, **given)
        self.plan = plan
        self.clients = 0
        self.privacy = ParallelLedger(
            delta=plan.delta,
            population=records,
            adjacency=plan.adjacency,
            sampling=plan.sampling,
            budget=plan.budget or None,
            unit="record",
        )
        self._claims = Claims()
        self._asked: list[int] = []
        self._size = 0
        # By the id of a message: what the reply to it said.
        self._said: dict[str, Account] = {}
        self._rule = Affording(mean, self)
        # Refuses wrong figures now, not at the first round.
        plan.event(max(1, int(plan.options.get("k", 1))))

    def declare(self, population: int) -> None:
        """Learn the number of clients, which the promise does not depend on."""
        self.clients = population

    def declare_records(self, records: int) -> None:
        """Learn the public number of records of all clients, unless the constructor was told.

        Raises
        ------
        ConfigError
            When delta is not below one over it.
        """
        if not self.privacy.population:
            self.privacy.declare(records)

    def adopt(self, arrays: ArrayRecord) -> None:
        """Learn the model, whose size a step's event may depend on.

        Raises
        ------
        ConfigError
            When it keeps statistics of batches.
        """
        tracked = [name for name in arrays if name.rpartition(".")[2] in _STATISTICS]
        if tracked:
            raise ConfigError(
                f"the model keeps {tracked[0]}: BatchNorm mixes the records of a batch, so that one record's influence "
                "has no bound. Use GroupNorm instead (task.batch_norm=false where the task has that option; "
                "opacus.validators.ModuleValidator.fix replaces it)"
            )
        self._size = Layout.of(to_arrays(arrays, copy=False)).size

    def open_ledger(self, path: Path) -> None:
        """Keep the books in a file from now on."""
        self.privacy.open(path)

    def over(self, server_round: int) -> str:
        """Return why round ``server_round`` may not be made: nobody who is known to be here can afford it."""
        if not self.plan.budget:
            return ""
        # A budget too small for a single training is so for clients, too, that nobody has asked yet.
        if self.privacy.allows(_NOBODY, self._event, self.plan.steps) and (
            not self._asked or any(map(self._affords, self._asked))
        ):
            return ""
        return (
            f"the budget of epsilon {self.plan.budget:g} at delta {self.plan.delta:g} allows no client a further "
            f"training of {self.plan.steps} steps: {self.privacy.epsilon():.4g} is spent"
        )

    def _affords(self, node: int) -> bool:
        # Who has never answered has spent nothing that anybody knows of, and asks its own ledger.
        return self.privacy.allows(self._claims.parties.get(node, _NOBODY), self._event, self.plan.steps)

    @property
    def _event(self) -> Event:
        return self.plan.event(max(self._size, 1))

    def statement(self) -> Statement:
        """Return what may be said about the run so far."""
        plan = self.plan
        bounded = (
            f"each record casts at most {plan.options.get('k')} votes on its gradient"
            if plan.method == "topagg"
            else f"each record's gradient clipped to L2 norm {plan.clip:g}"
        )
        return make_statement(
            self.privacy,
            mechanism=plan.mechanism(max(self._size, 1)),
            trust=(
                "nobody but its own client sees a record; the server plans how much noise there is, which nodes with a "
                "budget of their own check"
            ),
            protects="all that clients send, so for every model",
            not_covered=NOT_COVERED,
            clip=f"{plan.method}, {plan.steps} steps a round on clients: {bounded}",
            unit_note="records of different clients are disjoint: the figures are those of the client that spent most",
            secure=not plan.insecure,
            dropouts="a training is charged even if its reply was lost; its client accounts for it",
        )

    def summary(self) -> None:
        """Log what is promised, then the inner strategy's own summary."""
        plan = self.plan
        log.info(
            "\t├──> RecordDp: %s on clients, noise multiplier %g, rate %g, %d steps",
            plan.method,
            plan.noise_multiplier,
            plan.rate,
            plan.steps,
        )
        super().summary()

    def able(self, nodes: Sequence[int], server_round: int) -> list[int]:
        """Return those of the nodes that are there who can afford a training; log why nobody can."""
        self._asked, self._said = list(nodes), {}
        able = [node for node in nodes if self._affords(node)]
        if not able:
            log.warning("RecordDp: no client is asked in round %d: %s", server_round, self.over(server_round))
        return able

    def ask(self, nodes: Iterable[int]) -> None:
        """Take note of who is asked for a training."""
        self._claims.ask(nodes)

    def _receive(
        self,
        x: Running,
        sent: list[SentMessage],
        asked: Mapping[int, Ask],
        replies: Iterable[Message],
        answers: dict[int, Answer],
    ) -> list[int]:
        return super()._receive(x, sent, asked, self._paid(x.report, sent, replies), answers)

    def _paid(self, report: Report, sent: Sequence[SentMessage], replies: Iterable[Message]) -> list[Message]:
        """Book what the replies cost, whatever becomes of them: a training that was made was paid for.

        One that does not say what it cost becomes an error.
        """
        asked = {each.message.metadata.message_id: each for each in sent}
        passed: list[Message] = []
        for reply in replies:
            number = reply.metadata.reply_to_message_id
            message = asked.get(number)
            # An answer to nothing that was asked in this round is counted where replies are matched.
            if message is None or reply.has_error():
                passed.append(reply)
                continue
            try:
                account = self._account_in(reply)
                # The same reply, delivered again, is not another training.
                if self._said.get(number) != account:
                    self._charge(message.node, take_node(reply), account)
                self._said[number] = account
                report.section(Spent).heads[message.node] = account.head
            except FedcompError as reason:
                passed.append(app_failure(message.message, str(reason)))
                continue
            passed.append(reply)
        return passed

    def _account_in(self, reply: Message) -> Account:
        """Return what a reply says it cost.

        Raises
        ------
        FedcompError
            When it says nothing of the kind.
        """
        head = asks.find_answer(reply.content)
        if head is not None and head.unsupported:
            raise WrongAccount(f"its app cannot take part in RecordDp ({head.unsupported})")
        said = None if head is None else asks.say_of(reply.content, head, self.system)
        if not isinstance(said, Account):
            raise WrongAccount(
                "the reply does not say what its training cost: its app lacks record_dp(...), or was not made by "
                "client(app)"
            )
        return said

    def _charge(self, node: int, declared: int | None, account: Account) -> None:
        """Write down what a training cost.

        Raises
        ------
        WrongAccount
            When what it says cannot be true; what may be is written down all the same.
        """
        party, steps, wrong = self._claims.take(node, declared, account, self.roster, self.plan.steps)
        # Steps draw records of their own, so they are rounds of the ledger that no entry has.
        at = max(1, self.privacy.next_round)
        if steps:
            self.privacy.record(self._event, round=at, times=steps, participants=[party])
        if wrong:
            raise WrongAccount(wrong)

    def identity(self) -> dict[str, str]:
        """Return what must not change within a run; the budget may."""
        system = Records(replace(self.plan, budget=0.0), self.system.codecs[0])
        return {"system": repr(system), "downlink": repr(self.downlink)}


class Paid(Inbox):
    """What was paid for is read of replies: the update, and which tensors it leaves alone."""

    def trained(self, x: Running, head: AnswerHead, reply: Message, exact: Frame | None) -> Trained:
        """Return an update that weighs as much as any other, without metrics; buffers keep the server's values."""
        content = RecordDict({"metrics": MetricRecord({weight_key_of(self._inner) or "num-examples": 1.0})})
        own = {t.name: x.model[t.name] for t in x.layout.exact}
        trained = Trained(reply, content, x.record, head.sequence, own, "metrics", 1.0)
        trained.unchanged, trained.copies = frozenset(head.unchanged), copies_of(head.copies, x.layout)
        return trained


class Affording(MeanRule):
    """The weighted mean of clients that can afford a training.

    Parameters
    ----------
    mean : Strategy
    books : RecordDp
    """

    inbox: ClassVar[type[Inbox]] = Paid

    def __init__(self, mean: Strategy, books: RecordDp) -> None:
        super().__init__(mean)
        self._books = books

    def configure(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Let the mean ask those clients alone."""
        self._books.adopt(arrays)
        able = self._books.able(online(grid, self.strategy), server_round)
        if not able:
            return []
        with asked_for(self.strategy, len(able)):
            messages = super().configure(server_round, arrays, config, NodesShown(grid, lambda: able))
        self._books.ask(message.metadata.dst_node_id for message in messages)
        return messages
