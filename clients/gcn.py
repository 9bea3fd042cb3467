"""What an app provides for a graph run: the part of the graph that its node owns, and the training step.

What rows are needed, handed out and kept is the system's (:mod:`fedcomp.systems.graphs`); here its steps are computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from flwr.app import Context, Message, MetricRecord, RecordDict

from fedcomp.clients.half import CallNext, ClientHalf
from fedcomp.clients.programs import Brought, bring
from fedcomp.flower.logs import log
from fedcomp.flower.payload import PayloadError
from fedcomp.flower.records import to_record
from fedcomp.graphs.base import GraphPart, StepPlan
from fedcomp.rng import Key
from fedcomp.systems.graphs.kept import NodeValues
from fedcomp.systems.graphs.owner import Steps
from fedcomp.systems.graphs.system import Graphs
from fedcomp.systems.graphs.words import EVALUATE_TYPE, TRAIN_TYPE

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Learner:
    """A message's model, and how it learns.

    Attributes
    ----------
    name : str
        Of the ArrayRecord with the model; the reply has it under the same.
    model : Module
        Called as ``model(x, operators)``, see :class:`fedcomp.graphs.layers.GraphConvolutions`; in training,
        ``generator`` and ``visit`` are passed as well where its ``forward`` takes them.
    objective : callable
        ``objective(outputs, labels)`` is the mean loss of a batch, a scalar.
    correct : callable
        ``correct(outputs, labels)`` says which predictions are right, boolean.
    rates : dict of str to float
        Of :class:`fedcomp.tasks.sgd.Sgd`.

    Examples
    --------
    >>> from torch.nn.functional import cross_entropy
    >>> from fedcomp.graphs.layers import GraphConvolutions
    >>> network = GraphConvolutions(features=64, hidden=16, classes=10)
    >>> def correct(outputs, labels):
    ...     return outputs.argmax(1) == labels
    >>> learner = Learner("arrays", network, cross_entropy, correct, {"lr": 0.1})
    """

    name: str
    model: nn.Module
    objective: Callable[[Tensor, Tensor], Tensor]
    correct: Callable[[Tensor, Tensor], Tensor]
    rates: Mapping[str, float]


PartOf = Callable[[Message, Context], GraphPart]
"""``part_of(message, context)``: what this node owns. Called for every message; in a deployment, what it keeps in
memory between calls is lost."""

LearnerOf = Callable[[Message, Context], Learner]
"""``learner_of(message, context)``: called for training and evaluation, once all rows are known to be there."""


def graph_owner(part_of: PartOf, learner_of: LearnerOf) -> ClientHalf:
    """Return the client half of a graph run.

    The node that owns part i of the graph has the partition id i.

    Parameters
    ----------
    part_of, learner_of : callable
        See :data:`PartOf` and :data:`LearnerOf`.

    Examples
    --------
    An owner of a part of the karate club, with a model of its own:

    >>> from flwr.clientapp import ClientApp
    >>> from torch.nn.functional import cross_entropy
    >>> from fedcomp.clients.client import client
    >>> from fedcomp.flower.records import to_arrays
    >>> from fedcomp.graphs.layers import GraphConvolutions
    >>> from fedcomp.tasks import get_task
    >>> from fedcomp.tasks.arrays import load_arrays
    >>> shared = get_task("karate", cut="greedy").shared(2)
    >>> def part_of(message, context):
    ...     return shared.part(context.node_config["partition-id"])
    >>> def correct(outputs, labels):
    ...     return outputs.argmax(1) == labels
    >>> def learner_of(message, context):
    ...     network = GraphConvolutions(features=34, hidden=16, classes=4)
    ...     load_arrays(network, to_arrays(message.content["arrays"]), cast=True)
    ...     return Learner("arrays", network, cross_entropy, correct, {"lr": 0.1})
    >>> app = client(ClientApp(), graph_owner(part_of, learner_of))
    """

    # Functions of this module, not of this call: what an app holds travels to Ray's processes, and a ContextVar cannot.
    handlers = {TRAIN_TYPE: partial(_train, learner_of), EVALUATE_TYPE: partial(_evaluate, learner_of)}
    mod = partial(_owning, part_of)
    return ClientHalf("gcn", mod, handlers, outside=("compression",), needs=("compression",))


class _Owner:
    """A node in one message: :class:`fedcomp.systems.graphs.owner.OwnsPart`."""

    def __init__(self, part_of: PartOf) -> None:
        self._part_of = part_of
        self.steps: Steps | None = None
        self.seen: Sequence[NodeValues] = ()

    def brought(self, msg: Message, context: Context) -> Brought:
        self._asked = msg, context
        return Brought(self)

    @cached_property
    def part(self) -> GraphPart:
        return self._part_of(*self._asked)

    def load(self, steps: Steps) -> None:
        self.steps = steps


_OWNER: ContextVar[_Owner | None] = ContextVar("fedcomp-owner", default=None)


def _owning(part_of: PartOf, msg: Message, context: Context, call_next: CallNext) -> Message:
    owner = _Owner(part_of)
    token = _OWNER.set(owner)
    try:
        return bring(Graphs.ID, owner.brought, lambda: call_next(msg, context))
    finally:
        _OWNER.reset(token)


def _loaded() -> tuple[_Owner, Steps]:
    """Return the node of the message, and the steps that the system has loaded."""
    owner = _OWNER.get()
    if owner is None or owner.steps is None:
        raise PayloadError("the message does not say which graph steps to run")
    return owner, owner.steps


def _tensors(steps: Steps, plan: StepPlan) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return inputs, operators and labels of a step."""
    import torch

    from fedcomp.graphs.layers import gather, operators_of

    x = gather(steps.part, plan, steps.rows)
    labels = steps.part.labels[steps.part.positions(plan.batch)]
    return x, operators_of(plan, x.dtype), torch.from_numpy(labels)


def _train(learner_of: LearnerOf, msg: Message, context: Context) -> Message:
    """Take the turn's steps of SGD; reply with the model, the mean loss and the number of examples."""
    import torch

    from fedcomp.tasks.arrays import to_arrays
    from fedcomp.tasks.base import single_thread
    from fedcomp.tasks.sgd import Sgd

    owner, steps = _loaded()
    part = steps.part
    learner = learner_of(msg, context)
    model = learner.model
    descent = Sgd(model.parameters(), **learner.rates)
    takes = _keywords(model)
    watch = _Watch() if steps.measures else None
    if watch is not None and "visit" not in takes and len(steps.plans[0].layers) > 1:
        log.warning(
            "%s.forward takes no 'visit': norms of hidden layers stay unknown, and their columns are treated as "
            "never seen",
            type(model).__name__,
        )
    total, seen = 0.0, 0
    model.train()
    with single_thread():
        for step, plan in enumerate(steps.plans):
            x, operators, labels = _tensors(steps, plan)
            key = Key(steps.seed, f"gcn/train/{step}/dropout", steps.number, part.index)
            # torch's seeds are signed, so one bit is dropped.
            generator = torch.Generator().manual_seed(key.u64() >> 1)
            visit = None if watch is None else partial(watch.visit, plan)
            offered = {"generator": generator, "visit": visit}
            outputs = model(x, operators, **{name: offered[name] for name in takes})
            loss = learner.objective(outputs, labels)
            descent.step(loss)
            total += loss.item() * len(labels)
            seen += len(labels)
    owner.seen = () if watch is None else watch.seen
    content = RecordDict({learner.name: to_record(to_arrays(model))})
    # seen is positive: there is a node to learn from, and a plan has at least one step.
    content["metrics"] = MetricRecord({"train_loss": total / seen, "num-examples": seen})
    return Message(content, reply_to=msg)


def _keywords(model: nn.Module) -> tuple[str, ...]:
    """Return which of the two optional arguments ``model.forward`` takes; a user's own module may take neither."""
    parameters = inspect.signature(model.forward).parameters.values()
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return tuple(name for name in ("generator", "visit") if anything or name in named)


def _evaluate(learner_of: LearnerOf, msg: Message, context: Context) -> Message:
    """Reply with loss and accuracy on the part's test nodes; zeros, which weigh nothing, where there are none."""
    import torch

    from fedcomp.tasks.base import single_thread

    _, steps = _loaded()
    learner = learner_of(msg, context)
    model = learner.model
    model.eval()
    loss, right, count = 0.0, 0, 0
    with torch.no_grad(), single_thread():
        for plan in steps.plans:
            # A part without test nodes: the mean loss of nothing would be NaN.
            if not len(plan.batch):
                continue
            x, operators, labels = _tensors(steps, plan)
            outputs = model(x, operators)
            loss += learner.objective(outputs, labels).item() * len(labels)
            right += int(learner.correct(outputs, labels).sum())
            count += len(labels)
    content = RecordDict()
    content["metrics"] = MetricRecord(
        {"loss": loss / max(count, 1), "accuracy": right / max(count, 1), "num-examples": count}
    )
    return Message(content, reply_to=msg)


class _Watch:
    """Norms of what nodes contribute to hidden layers, each as the last step that used the node saw it."""

    def __init__(self) -> None:
        self.seen: list[NodeValues] = []

    def visit(self, plan: StepPlan, level: int, inputs: Tensor) -> None:
        # What goes into the first layer are features, whose norms their owners tell.
        if level == 0:
            return
        while len(self.seen) < level:
            self.seen.append(NodeValues())
        # In float64: squares of float32 activations overflow above about 1e19.
        norms = inputs.detach().double().norm(dim=1).numpy()
        self.seen[level - 1] = self.seen[level - 1].updated(NodeValues(plan.layers[level].columns, norms))
