"""The client half of record-level privacy: DP-SGD on this node's own records, and the ledger that outlives the round.

The node shows nobody its records. It bounds each of them, draws the batches and the noise itself, writes its
ledger, and refuses a training that would cross the budget before it has looked at a record. What it sends is the noisy
model and what that cost; no loss, no number of examples. Whatever a codec does to the update afterwards is
post-processing, its memory included.

The ledger lies in the node's state, written as the last act: a training whose reply is lost was paid for, one that
broke left nothing and costs nothing. A SuperNode that is restarted forgets its state; with ``privacy-ledger`` in its
node configuration the ledger is a file instead, which it does not forget. How much noise there is, the server plans; a
node that does not leave that to it has a ``privacy-budget`` of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedcomp.clients.edge import LEDGER_FILE, OWN_BUDGET
from fedcomp.clients.half import CallNext, ClientHalf
from fedcomp.clients.private.mod import ABOUT_SETTINGS
from fedcomp.errors import ConfigError, optional
from fedcomp.flower.logs import log
from fedcomp.flower.payload import put_node
from fedcomp.flower.record_dp import RECORD_DP, Account, DpSgdPlan, compact, steps_in
from fedcomp.flower.records import to_record
from fedcomp.privacy.entropy import make_entropy
from fedcomp.privacy.errors import BudgetExceeded, PrivacyError, PrivacyLedgerError
from fedcomp.rng import Key

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedcomp.privacy.ledger import PrivacyLedger
    from fedcomp.tasks.base import Split, Task


_STATE: Final = "fedcomp.record-dp"


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
    partition : int
        Which share of the data this node holds.
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
    partition: int
    key: Key
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0


TraineeOf = Callable[[Message, Context], Trainee]
"""``trainee(message, context)``: called where a message has a plan for record-level privacy."""


def record_dp(trainee_of: TraineeOf) -> ClientHalf:
    """Return the client half of record-level privacy.

    A training message with a plan is answered with the noisy model and what it cost, and nothing else; the app's own
    training function does not see it.

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
    ...     return Trainee("arrays", model, task, records, partition, Key(0, "records", partition=partition))
    >>> app = client(ClientApp(), record_dp(trainee))
    """

    def record_dp_mod(msg: Message, context: Context, call_next: CallNext) -> Message:
        # A plan that cannot be read raises: whoever cannot tell what is asked does not train without noise.
        plans = [DpSgdPlan.read(r) for r in msg.content.values() if isinstance(r, ConfigRecord) and RECORD_DP in r]
        if msg.metadata.message_type != "train" or not plans or plans[0] is None:
            return call_next(msg, context)
        # Here, since it brings torch, which clients without a plan do not need.
        from fedcomp.tasks.arrays import to_arrays

        trainee = trainee_of(msg, context)
        spent = train_privately(trainee, plans[0], context)
        reply = RecordDict({trainee.name: to_record(to_arrays(trainee.model))})
        spent.put(reply)
        put_node(reply, trainee.partition)
        return Message(reply, reply_to=msg)

    return ClientHalf("record_dp", record_dp_mod, needs=("private",))


def train_privately(trainee: Trainee, plan: DpSgdPlan, context: Context) -> Account:
    """Train the model in place as ``plan`` says; return what was spent.

    Parameters
    ----------
    context : Context
        Holds the ledger, and gets it back as the last act.

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
        When the training broke; the reason is in this node's log alone.
    """
    import torch
    from torch.utils.data import TensorDataset

    with optional("DP-SGD"):
        from fedcomp.privacy.dpsgd import StepSettings, private_training
    from fedcomp.tasks.base import EmptyPartition, single_thread

    task, model = trainee.task, trainee.model
    if not len(trainee.data):
        raise EmptyPartition(f"task {task.name!r}: this partition holds no record to train on; use fewer partitions")
    # Its gradient is the same for all records, and would be clipped and noised with theirs.
    if trainee.proximal:
        raise ConfigError("FedProx's term has no place in DP-SGD on clients; use inner=fedavg")
    if task.options.get("l2"):
        raise ConfigError(
            f"task.l2={task.options['l2']} is no part of a record's gradient; use weight_decay, which is added after "
            "the noise"
        )
    plan = _own(plan, context)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    untrained = _untrained(model)
    # Momentum and weight decay work on noisy gradients: post-processing.
    sgd = torch.optim.SGD(parameters, lr=trainee.lr, momentum=trainee.momentum, weight_decay=trainee.weight_decay)
    entropy = make_entropy(trainee.key.at(purpose="record-dp"), insecure_deterministic=plan.insecure)
    with _ledger(context, plan, len(trainee.data)) as ledger:
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
            _require_room(ledger, plan, training.optimizer.size)
            for batch in training.loader:
                training.step(batch, lambda module, pair: torch.func.vmap(one)(module(pair[0]), pair[1]))
            # What forward passes wrote into the model is made of records, and has no noise.
            with torch.no_grad():
                for tensor, before_training in untrained:
                    tensor.copy_(before_training)
        total = steps_in(ledger)
        return Account(ledger.run, total - before, total)


@contextmanager
def _reasons_stay() -> Iterator[None]:
    """Keep what an exception says on this node: Flower sends it to the server, and it may quote a record."""
    try:
        yield
    except ABOUT_SETTINGS:
        raise
    except Exception:
        log.exception("the private training of this node broke")
        # Without its cause, which a traceback would quote.
        raise PrivacyError("the training broke; the reason is in this node's log") from None


def _untrained(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors that leave with the model and are not trained, each with a copy of what it holds."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    found = model.state_dict(keep_vars=True)
    return [(tensor, tensor.detach().clone()) for name, tensor in found.items() if name not in trained]


def _own(plan: DpSgdPlan, context: Context) -> DpSgdPlan:
    """Return ``plan`` within what this node allows."""
    own = context.node_config.get(OWN_BUDGET)
    if own is None:
        return plan
    if isinstance(own, bool) or not isinstance(own, int | float) or not 0.0 < own < math.inf:
        raise ConfigError(f"{OWN_BUDGET} of this node is {own!r}; expected an epsilon above 0")
    if plan.insecure:
        raise ConfigError("the server plans noise from a seed that it knows; a node with a budget of its own draws its")
    # The stricter of both; 0 in a plan is no budget.
    return replace(plan, budget=min(float(own), plan.budget or math.inf))


def _require_room(ledger: PrivacyLedger, plan: DpSgdPlan, size: int) -> None:
    if ledger.affords(plan.event(size), plan.steps):
        return
    raise BudgetExceeded(
        f"{plan.steps} more steps would cross this client's budget of epsilon {plan.budget:g} at delta {plan.delta:g}; "
        f"{ledger.epsilon():.4g} is spent. Nothing was trained"
    )


@contextmanager
def _ledger(context: Context, plan: DpSgdPlan, records: int) -> Iterator[PrivacyLedger]:
    """Yield this node's ledger; it is back where it was when the block ends without an error."""
    ledger = plan.ledger(records)
    path = context.node_config.get(LEDGER_FILE)
    if path:
        if not isinstance(path, str) or not Path(path).is_absolute():
            raise ConfigError(f"{LEDGER_FILE} of this node is {path!r}; expected an absolute path")
        ledger.open(Path(path))
        try:
            yield ledger
        finally:
            ledger.close()
        return
    kept = context.state.config_records.get(_STATE)
    if kept is not None:
        ledger.load_state_dict(_read(kept))
    # Without a file nothing is written when the block fails: no noisy value has left the node.
    yield ledger
    # Equal steps are merged: a record of thousands of rounds stays as short as that of one.
    context.state[_STATE] = ConfigRecord({"ledger": json.dumps(compact(ledger), separators=(",", ":"))})


def _read(record: ConfigRecord) -> Mapping[str, Any]:
    try:
        document = json.loads(str(record["ledger"]))
    except (KeyError, ValueError) as error:
        raise PrivacyLedgerError(f"this node's ledger cannot be read: {error!r}; what it spent is unknown") from error
    if not isinstance(document, dict):
        raise PrivacyLedgerError("this node's ledger cannot be read; what it spent is unknown")
    return document
