"""The client half of a graph run: an owner that says which rows its next steps use, hands out its own, and trains.

No client has an array of all features. A step takes rows of other owners from its own message, as bytes, or from what
earlier messages left in ``context.state``. The plan of a training message is made again from its seed; rows that it
does not use are refused, and so is a message that lacks rows: nothing is filled in with zeros. State is written once,
as the last act of a handler.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcomp.clients.half import ClientHalf
from fedcomp.errors import FedcompError
from fedcomp.flower import gcn
from fedcomp.flower.gcn import (
    Fetch,
    Figures,
    GraphHello,
    GraphSetup,
    Needs,
    PlanRequest,
    Refused,
    put_frames,
    take_frames,
)
from fedcomp.flower.gcn_state import NodeValues, OwnerState, PastTurn, keep_secret, own_secret
from fedcomp.flower.logs import log
from fedcomp.flower.payload import PayloadError, put_node
from fedcomp.flower.records import to_record
from fedcomp.graphs.adjacency import HaloStructure
from fedcomp.graphs.base import Conditions, GraphError, GraphPart, Ids, MissingRows, Norms, StepPlan, UnknownStructure
from fedcomp.graphs.cache import noisy_rows
from fedcomp.graphs.ids import decode_ids, decode_norms, encode_ids, encode_norms
from fedcomp.graphs.plan import feature_norms, plan_round, reach, wanted
from fedcomp.graphs.rowcodecs import get_row_codec
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.graphs.structure_rows import decode_structure, encode_structure
from fedcomp.rng import Key

if TYPE_CHECKING:
    from torch import Tensor, nn

Floats = NDArray[np.floating[Any]]


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

    def set_up(msg: Message, context: Context) -> Message:
        return _set_up(msg, part_of(msg, context))

    def plan(msg: Message, context: Context) -> Message:
        return _plan(msg, context, part_of(msg, context))

    def rows(msg: Message, context: Context) -> Message:
        return _hand_out(msg, context, part_of(msg, context))

    def train(msg: Message, context: Context) -> Message:
        return _train(_Turn.begin(msg, context, part_of, "train"), partial(learner_of, msg, context))

    def evaluate(msg: Message, context: Context) -> Message:
        return _evaluate(_Turn.begin(msg, context, part_of, "evaluate"), partial(learner_of, msg, context))

    handlers = {
        gcn.SETUP_TYPE: set_up,
        gcn.PLAN_TYPE: plan,
        gcn.ROWS_TYPE: rows,
        gcn.TRAIN_TYPE: train,
        gcn.EVALUATE_TYPE: evaluate,
    }
    return ClientHalf("gcn", handlers=handlers)


def _set_up(msg: Message, part: GraphPart) -> Message:
    """Reply who this owner is and whose norms it needs, or the norms that others need."""
    setup = GraphSetup.take(msg)
    # A hello brings no frames: of any kind they would be refused.
    asked = take_frames(msg, part.parts, *([gcn.IDS] if setup.action == "norms" else []))
    content = RecordDict()
    put_node(content, part.index)
    if setup.action == "norms":
        norms = feature_norms(part)
        lists = _asked_of(part, asked[gcn.IDS], content)
        frames = {place: encode_norms(ids, norms[part.positions(ids)]) for place, ids in lists.items()}
        put_frames(content, gcn.NORMS, frames)
        return Message(content, reply_to=msg)
    structure = part.structure
    GraphHello(
        digest=part.digest,
        index=part.index,
        parts=part.parts,
        nodes=structure.nodes,
        owned=len(part.ids),
        train=len(part.train),
        test=len(part.test),
        features=int(part.features.shape[1]),
        structure="halo" if isinstance(structure, HaloStructure) else "full",
    ).put(content)
    if setup.norms:
        # What a halo structure does not reach yet comes with the rows of the adjacency that lead there.
        hops = 1 if isinstance(structure, HaloStructure) else setup.layers
        near = reach(part, hops)
        remote = near[~part.owned(near)]
        put_frames(content, gcn.IDS, _by_owner(part, remote))
    return Message(content, reply_to=msg)


def _plan(msg: Message, context: Context, part: GraphPart) -> Message:
    """Reply which rows of other owners the turn's steps use; or which rows of the adjacency the plan needs first."""
    ask = PlanRequest.take(msg)
    sent = take_frames(msg, part.parts, gcn.NORMS, gcn.STRUCTURE)
    kept = OwnerState.load(context, ask, part, row_reader(part, ask))
    norms, structure = NodeValues(), tuple(sent[gcn.STRUCTURE].items())
    for owner, frame in sent[gcn.NORMS].items():
        ids, values = decode_norms(frame, nodes=part.structure.nodes)
        if (part.structure.owner_of(ids) != owner).any():
            raise GraphError(f"norms come from part {owner} for nodes of other owners")
        norms = norms.updated(NodeValues(ids, values.astype(np.float64)))
    # Not stored: there is none yet, or since it was written another turn has joined it or the limit has changed.
    changed = bool(sent[gcn.NORMS] or sent[gcn.STRUCTURE]) or not kept.stored
    kept = kept.received(ask, norms, structure)
    content = RecordDict()
    put_node(content, part.index)
    if kept.lacks_norms(ask):
        # Before anything is kept: norms that come with rows of the adjacency would be taken for those that are lost.
        Needs(gcn.NORMS, ask.hop).put(content)
        return Message(content, reply_to=msg)
    seen, more = _taught(part, kept.structure_at(ask))
    kept = replace(kept, norms=kept.norms.updated(more))
    try:
        plans = _plans(seen, ask, kept)
    except UnknownStructure as unknown:
        Needs(gcn.STRUCTURE, ask.hop).put(content)
        put_frames(content, gcn.IDS, _by_owner(seen, unknown.ids))
    else:
        wants = wanted(plans, kept.cache.ids)
        Needs(gcn.FEATURES, ask.hop).put(content)
        put_frames(content, gcn.IDS, {owner: encode_ids(ids) for owner, ids in wants.items()})
        Figures.of_plans(plans, sum(map(len, wants.values()))).put(content)
    reply = Message(content, reply_to=msg)
    # Nothing is written before the reply is made: a message that is refused changes nothing.
    if changed:
        kept.save(context)
    return reply


def _hand_out(msg: Message, context: Context, part: GraphPart) -> Message:
    """Reply with rows of this owner's nodes, for those who asked for them, and with no others."""
    fetch = Fetch.take(msg)
    content = RecordDict()
    put_node(content, part.index)
    asked = _asked_of(part, take_frames(msg, part.parts, gcn.IDS)[gcn.IDS], content)
    secret, fresh = own_secret(context) if fetch.noise else (b"", False)
    if fetch.kind == gcn.FEATURES:
        codec = get_row_codec(fetch.row_codec)
        frames = {}
        for place, ids in asked.items():
            rows = part.features[part.positions(ids)]
            if fetch.noise:
                # A node of another graph may have the same id, and must not have the same noise.
                rows = noisy_rows(rows, ids, fetch.noise, secret + part.digest.encode())
            frames[place] = codec.encode(ids, rows)
    else:
        frames = {place: _structure_frame(part, ids, norms=fetch.norms) for place, ids in asked.items()}
    put_frames(content, fetch.kind, frames)
    reply = Message(content, reply_to=msg)
    if fresh:
        keep_secret(context, secret)
    return reply


def _structure_frame(part: GraphPart, ids: Ids, *, norms: bool) -> bytes:
    at = part.positions(ids)
    rows = part.structure.rows(ids)
    return encode_structure(rows, part.structure.owner_of(rows.columns), feature_norms(part)[at] if norms else None)


@dataclass(frozen=True)
class _Turn:
    """A training or an evaluation with all that it needs at hand.

    Attributes
    ----------
    msg, context, part, ask
    kept : OwnerState
        As it was when the turn began.
    plans : list of StepPlan
    rows : tuple of (ids, rows)
        Of other owners: fetched ones, and cached ones.
    fetched : dict of int to bytes
    used : ndarray of int64
        Cached rows that the plans use.
    """

    msg: Message
    context: Context
    part: GraphPart
    ask: PlanRequest
    kept: OwnerState
    plans: Sequence[StepPlan]
    rows: tuple[tuple[Ids, Floats], ...]
    fetched: Mapping[int, bytes]
    used: Ids

    @classmethod
    def begin(cls, msg: Message, context: Context, part_of: PartOf, purpose: str) -> _Turn:
        """Plan the message's steps again and take the rows they use.

        Raises
        ------
        MissingRows
            When rows are neither in the message nor kept here.
        GraphError, WireError
            When the message has rows that the plan does not use, or something that is not rows.
        """
        ask = PlanRequest.take(msg)
        if ask.purpose != purpose:
            raise PayloadError(f"the plan of a message to {purpose} is one to {ask.purpose}")
        part = part_of(msg, context)
        read = row_reader(part, ask)
        kept = OwnerState.load(context, ask, part, read)
        if kept.lacks_norms(ask) and _measures(_settings(ask)):
            raise MissingRows(
                "this node no longer has the feature norms it planned with; let it plan again", np.zeros(0, np.int64)
            )
        fetched = take_frames(msg, part.parts, gcn.FEATURES)[gcn.FEATURES]
        # Planned again rather than kept: a plan is longer than its seed, and the process may be another one by now.
        # Norms that came with adjacency rows joined the state when the plan was made.
        seen, _ = _taught(part, kept.structure_at(ask))
        try:
            plans = _plans(seen, ask, kept)
        except UnknownStructure as error:
            raise MissingRows(
                f"this node no longer has the adjacency rows it planned with ({error}); let it plan again", error.ids
            ) from error
        wants = wanted(plans, kept.cache.ids)
        unasked = sorted(set(fetched) - set(wants))
        if unasked:
            raise GraphError(f"the message brings rows of parts {unasked}, of which the plan uses none")
        # More rows than are wanted are refused by the codec, which reads their number first.
        rows = {owner: read(frame, limit=len(wants[owner])) for owner, frame in fetched.items()}
        _check_complete({owner: ids for owner, (ids, _) in rows.items()}, wants)
        # Each node once: steps share inputs, and a cached row is read once for all of them.
        remote = np.unique(np.concatenate([np.zeros(0, np.int64), *(plan.remote for plan in plans)]))
        used = np.intersect1d(remote, kept.cache.ids, assume_unique=True)
        cached = ((used, kept.cache.get(used)),) if len(used) else ()
        return cls(msg, context, seen, ask, kept, plans, (*rows.values(), *cached), fetched, used)

    def tensors(self, plan: StepPlan) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return inputs, operators and labels of a step."""
        import torch

        from fedcomp.graphs.layers import gather, operators_of

        x = gather(self.part, plan, self.rows)
        labels = self.part.labels[self.part.positions(plan.batch)]
        return x, operators_of(plan, x.dtype), torch.from_numpy(labels)

    def end(self, seen: Sequence[NodeValues] = ()) -> None:
        """Keep what was fetched and seen; the last act of a handler."""
        kept, ask = self.kept, self.ask
        rows = {} if ask.cache == "none" else self.fetched
        # The state already says all of this; it is large, and is not written for nothing.
        if kept.stored and not rows and not len(self.used) and not seen and kept.last is None:
            return
        turn = PastTurn(ask.session, ask.turn, kept.rows_of, rows, self.used, tuple(seen))
        replace(kept, last=turn).save(self.context)


def _train(turn: _Turn, learner_of: Callable[[], Learner]) -> Message:
    """Take the turn's steps of SGD; reply with the model, the mean loss and the number of examples."""
    import torch

    from fedcomp.tasks.arrays import to_arrays
    from fedcomp.tasks.base import EmptyPartition, single_thread
    from fedcomp.tasks.sgd import Sgd

    part, ask = turn.part, turn.ask
    if not len(part.train):
        raise EmptyPartition(
            f"part {part.index} of the graph has no node to learn from; use fewer parts, or skip the client"
        )
    learner = learner_of()
    model = learner.model
    descent = Sgd(model.parameters(), **learner.rates)
    takes = _keywords(model)
    watch = _Watch() if _measures(_settings(ask)) else None
    if watch is not None and "visit" not in takes and _settings(ask).layers > 1:
        log.warning(
            "%s.forward takes no 'visit': norms of hidden layers stay unknown, and columns count there as if they had "
            "never been seen",
            type(model).__name__,
        )
    total, seen = 0.0, 0
    model.train()
    with single_thread():
        for step, plan in enumerate(turn.plans):
            x, operators, labels = turn.tensors(plan)
            key = Key(ask.seed, f"gcn/train/{step}/dropout", ask.round, part.index)
            # torch's seeds are signed, so one bit is dropped.
            generator = torch.Generator().manual_seed(key.u64() >> 1)
            visit = None if watch is None else partial(watch.visit, plan)
            offered = {"generator": generator, "visit": visit}
            outputs = model(x, operators, **{name: offered[name] for name in takes})
            loss = learner.objective(outputs, labels)
            descent.step(loss)
            total += loss.item() * len(labels)
            seen += len(labels)
    content = RecordDict({learner.name: to_record(to_arrays(model))})
    # seen is positive: there is a node to learn from, and a plan has at least one step.
    content["metrics"] = MetricRecord({"train_loss": total / seen, "num-examples": seen})
    put_node(content, part.index)
    reply = Message(content, reply_to=turn.msg)
    turn.end(() if watch is None else watch.seen)
    return reply


def _keywords(model: nn.Module) -> tuple[str, ...]:
    """Return which of the two optional arguments ``model.forward`` takes; a user's own module may take neither."""
    parameters = inspect.signature(model.forward).parameters.values()
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return tuple(name for name in ("generator", "visit") if anything or name in named)


def _evaluate(turn: _Turn, learner_of: Callable[[], Learner]) -> Message:
    """Reply with loss and accuracy on the part's test nodes; zeros, which weigh nothing, where there are none."""
    import torch

    from fedcomp.tasks.base import single_thread

    learner = learner_of()
    model = learner.model
    model.eval()
    loss, right, count = 0.0, 0, 0
    with torch.no_grad(), single_thread():
        for plan in turn.plans:
            # A part without test nodes: the mean loss of nothing would be NaN.
            if not len(plan.batch):
                continue
            x, operators, labels = turn.tensors(plan)
            outputs = model(x, operators)
            loss += learner.objective(outputs, labels).item() * len(labels)
            right += int(learner.correct(outputs, labels).sum())
            count += len(labels)
    content = RecordDict()
    content["metrics"] = MetricRecord(
        {"loss": loss / max(count, 1), "accuracy": right / max(count, 1), "num-examples": count}
    )
    put_node(content, turn.part.index)
    reply = Message(content, reply_to=turn.msg)
    turn.end()
    return reply


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


def _plans(part: GraphPart, ask: PlanRequest, kept: OwnerState) -> list[StepPlan]:
    settings = _settings(ask)
    norms: Norms | None = None
    if _measures(settings):
        # One table per layer, empty for layers that were never seen: the plan wants as many as there are layers.
        tables = (kept.norms, *kept.hidden, *[NodeValues()] * settings.layers)[: settings.layers]
        norms = [dict(zip(table.ids.tolist(), table.values.tolist(), strict=True)) for table in tables]
    return plan_round(
        part,
        settings,
        seed=ask.seed,
        round=ask.round,
        steps=ask.steps,
        batch_size=ask.batch_size,
        purpose=ask.purpose,
        conditions=Conditions(frozenset(ask.absent), kept.cache.ids, norms, ask.scale or None),
    )


def _settings(ask: PlanRequest) -> SamplerSettings:
    try:
        config = json.loads(ask.sampler)
    except (ValueError, RecursionError) as error:
        # Beside what is no JSON: numbers of too many digits, and nesting without end.
        raise PayloadError(f"the sampler is described by {ask.sampler[:60]!r}, which is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise PayloadError(f"the sampler is described by {ask.sampler[:60]!r}, expected an object")
    return SamplerSettings.from_config(config)


def _measures(settings: SamplerSettings) -> bool:
    return settings.skews and settings.mode == "measured"


def _taught(part: GraphPart, sent: Sequence[tuple[int, bytes]]) -> tuple[GraphPart, NodeValues]:
    """Return the part with what its owner was sent of the adjacency, and the feature norms that came with it.

    Rows that are not of the owner they came from, or that this owner cannot learn, are a GraphError or WireError.
    """
    norms = NodeValues()
    structure = part.structure
    for owner, frame in sent:
        if not isinstance(structure, HaloStructure):
            raise GraphError("rows of the adjacency were sent to an owner that knows all of them")
        rows, owners, values = decode_structure(frame, nodes=structure.nodes, parts=part.parts)
        if (structure.owner_of(rows.ids) != owner).any():
            raise GraphError(f"rows of the adjacency come from part {owner} for nodes of other owners")
        structure = structure.learn(rows, owners)
        if values is not None:
            norms = norms.updated(NodeValues(rows.ids, values.astype(np.float64)))
    return (replace(part, structure=structure) if sent else part), norms


def _asked_of(part: GraphPart, frames: Mapping[int, bytes], content: RecordDict) -> dict[int, Ids]:
    """Return the ids that this owner is asked for, by requester.

    Who asks for other nodes than its own is refused in ``content``; the others get theirs.
    """
    found: dict[int, Ids] = {}
    reasons: dict[int, str] = {}
    for place, frame in frames.items():
        try:
            # Nobody can ask for more nodes than this owner has: bounded before memory is taken for them.
            ids = decode_ids(frame, nodes=part.structure.nodes, limit=len(part.ids))
            part.positions(ids)
            found[place] = ids
        except FedcompError as error:
            reasons[place] = f"part {place}: {error}"
    if reasons:
        Refused(tuple(reasons), next(iter(reasons.values()))).put(content)
    return found


def _by_owner(part: GraphPart, ids: Ids) -> dict[int, bytes]:
    owners = part.structure.owner_of(ids)
    return {int(owner): encode_ids(ids[owners == owner]) for owner in np.unique(owners)}


def _check_complete(found: Mapping[int, Ids], wants: Mapping[int, Ids]) -> None:
    """Raise MissingRows unless all wanted rows came, each from its owner; there are no others by their number."""
    nothing = np.zeros(0, np.int64)
    lacking = [np.setdiff1d(ids, found.get(owner, nothing), assume_unique=True) for owner, ids in wants.items()]
    missing = np.concatenate([nothing, *lacking])
    if len(missing):
        raise MissingRows(
            f"{len(missing)} rows of other owners that the plan uses are neither in the message nor kept here, the "
            f"first of node {int(missing[0])}; let this node plan again",
            np.sort(missing),
        )


def row_reader(part: GraphPart, ask: PlanRequest) -> Callable[..., tuple[Ids, Floats]]:
    codec = get_row_codec(ask.row_codec)
    return partial(codec.decode, features=part.features.shape[1], dtype=part.features.dtype, nodes=part.structure.nodes)
