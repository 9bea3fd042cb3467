"""The client half: an owner requests the rows that its next steps use, provides its own, and trains.

No client has an array of all features. A step takes rows of other owners from its own ask, as bytes, or from what
earlier asks left at the node. The plan of a training is made again from its seed; rows that it does not use are
refused, and so is an ask that lacks rows: nothing is filled in with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from fedcomp.codecs import State
from fedcomp.errors import FedcompError
from fedcomp.graphs.adjacency import HaloStructure
from fedcomp.graphs.base import Conditions, GraphError, GraphPart, Ids, MissingRows, Norms, StepPlan, UnknownStructure
from fedcomp.graphs.cache import noisy_rows
from fedcomp.graphs.ids import decode_ids, decode_norms, encode_ids, encode_norms
from fedcomp.graphs.plan import feature_norms, plan_round, reach, wanted
from fedcomp.graphs.rowcodecs import get_row_codec
from fedcomp.graphs.structure_rows import decode_structure, encode_structure
from fedcomp.program import Answer, Ask, Me
from fedcomp.systems.graphs.kept import SECRET, Floats, Kept, NodeValues, hidden_of, own_secret
from fedcomp.systems.graphs.options import GraphOptions
from fedcomp.systems.graphs.words import (
    IDS,
    NORMS,
    ROWS,
    STRUCTURE,
    Fetch,
    Needs,
    Plan,
    Planned,
    Refused,
    Turn,
    by_part,
    named,
)
from fedcomp.wire import Frame

_NOBODY: Ids = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Steps:
    """What an app computes in one turn.

    Attributes
    ----------
    part : GraphPart
        With what its owner was sent of the adjacency.
    plans : sequence of StepPlan
        One for each step of training, or one for an evaluation.
    rows : tuple of (ids, rows)
        Of other owners: fetched ones, and cached ones.
    seed, number : int
        Of the run's random streams, and of the round.
    measures : bool
        Whether the norms of what nodes contribute to hidden layers are wanted.
    """

    part: GraphPart
    plans: Sequence[StepPlan]
    rows: tuple[tuple[Ids, Floats], ...]
    seed: int
    number: int
    measures: bool


class OwnsPart(Protocol):
    """What an app brings: what a node owns, and how it learns."""

    @property
    def part(self) -> GraphPart:
        """What the node owns."""
        ...

    def load(self, steps: Steps) -> None:
        """Take the steps of the training, or the evaluation, that follows."""
        ...

    @property
    def seen(self) -> Sequence[NodeValues]:
        """Norms of what nodes contributed to each hidden layer in the training, first hidden layer first."""
        ...


def planned(system: GraphOptions, memory: State, ask: Ask, me: Me, say: Plan) -> Answer:
    """Answer which rows of other owners the turn's steps use; or what the plan needs first."""
    part, turn = me.data.part, turn_of(me.number, say)
    sent = by_part(ask.frames, part.parts, NORMS, STRUCTURE)
    norms = NodeValues()
    for owner, frame in sent[NORMS].items():
        ids, values = decode_norms(frame, nodes=part.structure.nodes)
        if (part.structure.owner_of(ids) != owner).any():
            raise GraphError(f"norms come from part {owner} for nodes of other owners")
        norms = norms.updated(NodeValues(ids, values.astype(np.float64)))
    kept = Kept.of(me.kept, part, system.rows).taught(turn, norms, tuple(sent[STRUCTURE].items()))
    seen, more = _taught(part, kept.structure)
    kept = replace(kept, norms=kept.norms.updated(more))
    keep = kept.to_frames(me.kept)
    if system.sampler_of(say.purpose).measures:
        lacking = _without_norms(part, system.sampler.layers, kept.norms, frozenset(say.absent))
        if len(lacking):
            return Answer(me.node, say=Needs(NORMS), frames=_asking(part, lacking), keep=keep, bare=True)
    try:
        plans = _plans(system, seen, me, say, kept, hidden_of(memory, turn))
    except UnknownStructure as unknown:
        return Answer(me.node, say=Needs(STRUCTURE), frames=_asking(seen, unknown.ids), keep=keep, bare=True)
    wants = wanted(plans, kept.cache.ids)
    frames = named(IDS, {owner: encode_ids(ids) for owner, ids in wants.items()})
    return Answer(me.node, say=Planned.of_plans(plans), frames=frames, keep=keep, bare=True)


def handed_out(system: GraphOptions, ask: Ask, me: Me, say: Fetch) -> Answer:
    """Answer with rows of this owner's nodes, for those who asked for them, and with no others."""
    part: GraphPart = me.data.part
    asked: dict[int, Ids] = {}
    reasons: dict[int, str] = {}
    for place, frame in by_part(ask.frames, part.parts, IDS)[IDS].items():
        try:
            # Nobody can ask for more nodes than this owner has: bounded before memory is taken for them.
            ids = decode_ids(frame, nodes=part.structure.nodes, limit=len(part.ids))
            part.positions(ids)
            asked[place] = ids
        except FedcompError as error:
            # That requester's list is wrong; the others get theirs.
            reasons[place] = f"part {place}: {error}"
    noise = system.rows.noise if say.kind == ROWS else 0.0
    secret, fresh = own_secret(me.kept) if noise else (b"", False)
    frames = {place: _handed(system, part, ids, say, noise, secret) for place, ids in asked.items()}
    refused = Refused(tuple(reasons), next(iter(reasons.values()))[:4096]) if reasons else None
    keep = {SECRET: secret} if fresh else {}
    return Answer(me.node, say=refused, frames=named(say.kind, frames), keep=keep, bare=True)


def _handed(system: GraphOptions, part: GraphPart, ids: Ids, say: Fetch, noise: float, secret: bytes) -> Frame:
    at = part.positions(ids)
    if say.kind == NORMS:
        return encode_norms(ids, feature_norms(part)[at])
    if say.kind == STRUCTURE:
        rows = part.structure.rows(ids)
        owners = part.structure.owner_of(rows.columns)
        return encode_structure(rows, owners, feature_norms(part)[at] if say.norms else None)
    features = part.features[at]
    if noise:
        # A node of another graph may have the same id, and must not have the same noise.
        features = noisy_rows(features, ids, noise, secret + part.digest.encode())
    return get_row_codec(system.rows.codec).encode(ids, features)


def begun(system: GraphOptions, memory: State, ask: Ask, me: Me, say: Turn) -> tuple[Steps, Kept]:
    """Plan the turn's steps again and take the rows they use; return what is kept once they are used.

    Raises
    ------
    MissingRows
        When rows are neither in the ask nor kept here.
    GraphError, WireError
        When the ask has rows that the plan does not use, or something that is not rows.
    """
    part, turn = me.data.part, turn_of(me.number, say)
    if say.purpose == "train" and not len(part.train):
        raise GraphError(
            f"part {part.index} of the graph has no node to learn from; use fewer parts, or skip the client"
        )
    kept, measures = Kept.of(me.kept, part, system.rows), system.sampler_of(say.purpose).measures
    if measures and len(_without_norms(part, system.sampler.layers, kept.norms, frozenset(say.absent))):
        raise MissingRows("this node no longer has the feature norms it planned with; let it plan again", _NOBODY)
    fetched = by_part(ask.frames, part.parts, ROWS)[ROWS]
    # Planned again rather than kept: a plan is longer than its seed, and the process may be another one by now.
    # Norms that came with rows of the adjacency joined the others when the plan was made.
    seen, _ = _taught(part, kept.structure if kept.turn == turn else ())
    try:
        plans = _plans(system, seen, me, say, kept, hidden_of(memory, turn))
    except UnknownStructure as error:
        raise MissingRows(
            f"this node no longer has the adjacency rows it planned with ({error}); let it plan again", error.ids
        ) from error
    wants = wanted(plans, kept.cache.ids)
    unasked = sorted(set(fetched) - set(wants))
    if unasked:
        raise GraphError(f"the message brings rows of parts {unasked}, which the plan does not use")
    features, dtype = part.features.shape[1], part.features.dtype
    read = partial(get_row_codec(system.rows.codec).decode, features=features, dtype=dtype, nodes=part.structure.nodes)
    # More rows than are wanted are refused by the codec, which reads their number first.
    rows = {owner: read(frame, limit=len(wants[owner])) for owner, frame in fetched.items()}
    _check_complete({owner: ids for owner, (ids, _) in rows.items()}, wants)
    # Each node once: steps share inputs, and a cached row is read once for all of them.
    remote = np.unique(np.concatenate([_NOBODY, *(plan.remote for plan in plans)]))
    used = np.intersect1d(remote, kept.cache.ids, assume_unique=True)
    # In the order of use: what was cached before comes first, then what was fetched.
    cached = ((used, kept.cache.get(used)),) if len(used) else ()
    for ids, values in rows.values():
        kept.cache.put(ids, values)
    return Steps(seen, plans, (*rows.values(), *cached), me.seed, me.number, measures), kept


def turn_of(number: int, say: Plan) -> int:
    """Return the place of a round's training or evaluation in the order of a run: its evaluation comes after it."""
    return 2 * number + (say.purpose == "evaluate")


def _plans(
    system: GraphOptions, part: GraphPart, me: Me, say: Plan, kept: Kept, hidden: Sequence[NodeValues]
) -> list[StepPlan]:
    sampler = system.sampler_of(say.purpose)
    norms: Norms | None = None
    if sampler.measures:
        # One table per layer, empty for layers that were never seen: the plan wants as many as there are layers.
        tables = (kept.norms, *hidden, *[NodeValues()] * sampler.layers)[: sampler.layers]
        norms = [dict(zip(table.ids.tolist(), table.values.tolist(), strict=True)) for table in tables]
    return plan_round(
        part,
        sampler,
        seed=me.seed,
        round=me.number,
        steps=system.rounds.local_steps,
        batch_size=system.rounds.batch_size,
        purpose=say.purpose,
        conditions=Conditions(frozenset(say.absent), kept.cache.ids, norms),
    )


def _without_norms(part: GraphPart, layers: int, norms: NodeValues, absent: frozenset[int]) -> Ids:
    """Return the nodes of other owners whose norms the sampler needs and lacks, except those that cannot be asked."""
    # What a halo structure does not reach yet comes with the rows of the adjacency that lead there.
    near = reach(part, 1 if isinstance(part.structure, HaloStructure) else layers)
    remote = near[~part.owned(near)]
    lacking = np.setdiff1d(remote, norms.ids, assume_unique=True)
    return lacking[~np.isin(part.structure.owner_of(lacking), list(absent))]


def _taught(part: GraphPart, sent: Sequence[tuple[int, Frame]]) -> tuple[GraphPart, NodeValues]:
    """Return the part with the received rows of the adjacency, and the feature norms that came with them.

    Rows that do not belong to their sender, or that this owner must not have, raise a GraphError or WireError.
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


def _asking(part: GraphPart, ids: Ids) -> dict[str, Frame]:
    owners = part.structure.owner_of(ids)
    return named(IDS, {int(owner): encode_ids(ids[owners == owner]) for owner in np.unique(owners)})


def _check_complete(found: Mapping[int, Ids], wants: Mapping[int, Ids]) -> None:
    """Raise MissingRows unless all wanted rows arrived, each from its owner. Their number excludes any others."""
    lacking = [np.setdiff1d(ids, found.get(owner, _NOBODY), assume_unique=True) for owner, ids in wants.items()]
    missing = np.concatenate([_NOBODY, *lacking])
    if len(missing):
        raise MissingRows(
            f"{len(missing)} rows of other owners that the plan uses are neither in the message nor kept here, the "
            f"first of node {int(missing[0])}; let this node plan again",
            np.sort(missing),
        )
