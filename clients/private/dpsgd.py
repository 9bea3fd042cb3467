"""The client half of record-level privacy: DP-SGD on the node's own records.

The node shows nobody its records. It bounds each of them, draws the batches and the noise itself, writes its
ledger, and refuses a training that would cross the budget before it has looked at a record. What it sends is the noisy
model and what that cost; no loss, no number of examples (:mod:`fedcomp.systems.private.record`).

The ledger outlives the round, and a node may have a budget of its own (:mod:`fedcomp.clients.private.node_ledger`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flwr.app import Context, Message, RecordDict

from fedcomp.asks import NO_FRAMES, Frames
from fedcomp.clients.edge.node_config import OWN_BUDGET
from fedcomp.clients.half import CallNext, ClientHalf
from fedcomp.clients.private.mod import ABOUT_SETTINGS, discreet
from fedcomp.clients.private.node_ledger import node_ledger, require_room, steps_in, within_own
from fedcomp.clients.programs import Brought, bring
from fedcomp.errors import ConfigError, optional
from fedcomp.flower.asks import system_asked
from fedcomp.flower.logs import log
from fedcomp.flower.records import to_record
from fedcomp.layout import Update
from fedcomp.privacy.entropy import make_entropy
from fedcomp.privacy.errors import PrivacyError
from fedcomp.program import Me
from fedcomp.rng import Key
from fedcomp.systems.private.record import Account, DpSgdPlan, Records

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedcomp.tasks.base import Split, Task


@dataclass(frozen=True)
class Trainee:
    """What a client trains with noise.

    Attributes
    ----------
    name : str
        Of the message's ArrayRecord with the model; the reply has it under the same.
    model : Module
    task : Task
        Gives the loss.
    data : Split
        Every example is one record.
    key : Key
        Names public randomness; noise and batches as well where the plan is insecure.
    lr, momentum, weight_decay : float
        Of SGD on the noisy gradients.
    proximal : float
        Must be 0.
    """

    name: str
    model: nn.Module
    task: Task
    data: Split
    key: Key
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0

    def check(self) -> None:
        """Refuse what has no record, or a loss of which a part is no record's.

        Raises
        ------
        EmptyPartition, ConfigError
        """
        from fedcomp.tasks.base import EmptyPartition

        if not len(self.data):
            raise EmptyPartition(
                f"task {self.task.name!r}: this partition holds no record; use fewer partitions, or min_examples >= 1"
            )
        # Its gradient is the same for all records, and would be clipped and noised with theirs.
        if self.proximal:
            raise ConfigError("FedProx's term is not part of a record's gradient; use FedAvg (inner=fedavg)")
        if self.task.options.get("l2"):
            raise ConfigError(
                f"task.l2={self.task.options['l2']} is not part of a record's gradient; use weight_decay, which is "
                "added after the noise"
            )


TraineeOf = Callable[[Message, Context], Trainee]
"""``trainee(message, context)``: called where a message has a plan for record-level privacy."""


def record_dp(trainee_of: TraineeOf) -> ClientHalf:
    """Return the client half of record-level privacy, which trains on this node's records.

    Requests of :class:`~fedcomp.systems.private.record.Records` are answered with the noisy model and its privacy cost
    only; the app's own training function is not called. Errors appear in this node's log only, except errors about
    settings.

    Parameters
    ----------
    trainee_of : callable
        ``trainee_of(message, context)`` returns the message's model and this node's records, see :class:`Trainee`.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> from fedcomp.tasks import get_task
    >>> from fedcomp.tasks.arrays import load_arrays
    >>> task = get_task("digits")
    >>> def trainee(message, context):
    ...     model, partition = task.model(0), context.node_config["partition-id"]
    ...     load_arrays(model, {name: array.numpy() for name, array in message.content["arrays"].items()})
    ...     records = task.client(partition, context.node_config["num-partitions"])
    ...     return Trainee("arrays", model, task, records, Key(0, "records", partition=partition))
    >>> app = client(ClientApp(), record_dp(trainee))
    """

    def record_dp_mod(msg: Message, context: Context, call_next: CallNext) -> Message:
        kind, system = msg.metadata.message_type, system_asked(msg.content)
        asked = kind == "train" and system == Records.ID
        # Other systems use records in queries, too: owners of a graph hand out its rows.
        other = kind.partition(".")[0] in ("train", "evaluate") or system not in ("", Records.ID)
        if not asked and OWN_BUDGET in context.node_config and other:
            raise ConfigError(
                f"this node has a privacy budget of its own ({OWN_BUDGET} in its node configuration): it trains with "
                "noise (record-dp), and uses its records for nothing else"
            )
        if not asked:
            return call_next(msg, context)

        def answer() -> Message:
            return bring(Records.ID, lambda m, c: _Training(trainee_of, c).brought, lambda: call_next(msg, context))

        return discreet(msg, answer, passing=ABOUT_SETTINGS)

    return ClientHalf("record_dp", record_dp_mod, outside=("compression", "private"), needs=("compression",))


class _Training:
    """One training of this node, in place of the app's own."""

    def __init__(self, trainee_of: TraineeOf, context: Context) -> None:
        self._trainee_of, self._context = trainee_of, context
        self.brought = Brought(self.noised, instead=self.train)

    def noised(self, me: Me, plan: DpSgdPlan, learn: Callable[[], Update]) -> tuple[Update, Account, Frames]:
        """Let ``learn()`` train as the plan says; :data:`fedcomp.systems.private.record.Noised`."""
        self._plan, self._kept = plan, me.kept
        update = learn()
        return update, self._account, self._keep

    def train(self, msg: Message, context: Context) -> Message:
        """Return the noisy model alone."""
        # Here, since it brings torch, which clients without a plan do not need.
        from fedcomp.tasks.arrays import to_arrays

        trainee = self._trainee_of(msg, context)
        self._account, self._keep = train_privately(trainee, self._plan, self._context, self._kept)
        return Message(RecordDict({trainee.name: to_record(to_arrays(trainee.model))}), reply_to=msg)


def train_privately(
    trainee: Trainee, plan: DpSgdPlan, context: Context, kept: Frames = NO_FRAMES
) -> tuple[Account, Frames]:
    """Train the model in place as ``plan`` says; return what was spent, and what the node keeps of its ledger.

    Parameters
    ----------
    context : Context
        Its configuration names the node's budget and the ledger's file, where it has one.
    kept : mapping of str to bytes
        What the node kept of its ledger.

    Raises
    ------
    BudgetExceeded
        When the training would cross the budget, the plan's or the node's. No record was looked at.
    ConfigError
        When the model or the task cannot be trained privately, delta is too large for so few records, or the node has
        a budget of its own and the plan's noise would come from a seed.
    PrivacyLedgerError
        When the node's ledger is of another run, or damaged.
    PrivacyError
        When the training failed; the reason is in this node's log alone.
    """
    import torch
    from torch.utils.data import TensorDataset

    with optional("DP-SGD"):
        from fedcomp.privacy.dpsgd import StepSettings, private_training
    from fedcomp.tasks.base import single_thread

    task, model = trainee.task, trainee.model
    trainee.check()
    plan = within_own(plan, context)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    untrained = _untrained(model)
    # Momentum and weight decay work on noisy gradients: post-processing.
    sgd = torch.optim.SGD(parameters, lr=trainee.lr, momentum=trainee.momentum, weight_decay=trainee.weight_decay)
    entropy = make_entropy(trainee.key.at(purpose="record-dp"), insecure_deterministic=plan.insecure)
    with node_ledger(context, plan, len(trainee.data), kept) as book:
        ledger = book.ledger
        before = steps_in(ledger)
        training = private_training(
            model,
            sgd,
            TensorDataset(*trainee.data.tensors),
            ledger,
            StepSettings(
                noise_multiplier=plan.noise_multiplier,
                rate=plan.rate,
                max_grad_norm=plan.clip,
                noise=plan.noise,
                adjacency=plan.adjacency,
                loss_reduction="none",
                entropy=entropy,
                key=trainee.key,
            ),
            steps=plan.steps,
            method=plan.method,
            **plan.options,
        )

        def one(output: Tensor, target: Tensor) -> Tensor:
            # A batch of one: vmap then gives each record a loss of its own.
            return task.objective(model, output[None], target[None])

        with training, single_thread(), _reasons_stay():
            # The whole training is asked for before its first batch is drawn: one that stops half-way would waste what
            # it spent.
            require_room(ledger, plan, training.optimizer.length())
            for batch in training.loader:
                training.step(batch, lambda module, pair: torch.func.vmap(one)(module(pair[0]), pair[1]))
            # What forward passes wrote into the model is made of records, and has no noise.
            with torch.no_grad():
                for tensor, before_training in untrained:
                    tensor.copy_(before_training)
        total = steps_in(ledger)
    return Account(ledger.run, total - before, total, book.head), book.keep


@contextmanager
def _reasons_stay() -> Iterator[None]:
    """Keep what an exception says on this node: Flower sends it to the server, and it may quote a record."""
    try:
        yield
    except ABOUT_SETTINGS:
        raise
    except Exception:
        log.exception("the private training of this node failed")
        # Without its cause, which a traceback would quote.
        raise PrivacyError("the training failed; the reason is in this node's log") from None


def _untrained(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors that leave with the model and are not trained, each with a copy of what it holds."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    found = model.state_dict(keep_vars=True)
    return [(tensor, tensor.detach().clone()) for name, tensor in found.items() if name not in trained]
