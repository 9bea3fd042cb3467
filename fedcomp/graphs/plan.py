"""Plans of an owner's next steps, derived from keys: batches, operators, and the owners of the rows used.

A plan is a pure function of the part, the settings, the key, and what cannot be had. Whoever made it can make it again:
the client plans once to ask for rows, and again when it trains. It walks from the batch at the output layer to the
input layer. Every layer has its own random stream, so that draws of different layers are independent; otherwise the
expectation of two layers would not be the product of their expectations.

Apart from logarithms, no cost depends on the size of the graph or of the part, only on the rows that the plan visits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedcomp.errors import ConfigError
from fedcomp.graphs.adjacency import columns_of
from fedcomp.graphs.base import (
    Conditions,
    GraphError,
    GraphPart,
    Ids,
    Norms,
    Operator,
    StepPlan,
    UnknownStructure,
    as_ids,
    find,
)
from fedcomp.graphs.samplers import Bools, Draw, Layer, Reals, Uniforms, draw
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.rng import Key

PURPOSES = ("train", "evaluate")
MOST_ENTRIES = 1 << 26
"""Non-zeros of the operators of several steps together, 1.5 GiB: the number of steps is set by others than those whose
memory they take."""

_USUAL = Conditions()


def draw_batch(ids: Ids, size: int, key: Key) -> Ids:
    """Return ``size`` of ``ids``, int64, ascending, without repeats, in time proportional to ``size log(size)``.

    Every subset of that size is equally likely. With ``size`` 0, or not below their number, all of them.

    Raises
    ------
    ConfigError
        When ``size`` is negative.
    """
    if size < 0:
        raise ConfigError(f"a batch of {size} nodes; expected a number of at least 0, where 0 is all")
    if size == 0 or size >= len(ids):
        return np.sort(ids).astype(np.int64, copy=False)
    # Repeats would be common: sorting all ids, at most twice as many as wanted, is then the cheaper way.
    if 2 * size > len(ids):
        order = np.argsort(key.bits(len(ids)), kind="stable")
        return np.sort(ids[order[:size]]).astype(np.int64, copy=False)
    # Of twice as many draws from at least twice as many ids 1.26 times ``size`` are different on average: one try
    # nearly always does.
    count = 2 * size + 8
    while True:
        # The first different ones of independent draws. A longer stream begins with the shorter one.
        at = (key.uniform(count) * len(ids)).astype(np.int64)
        different, first = np.unique(at, return_index=True)
        if len(different) >= size:
            chosen = different[np.argsort(first)[:size]]
            return np.sort(ids[chosen]).astype(np.int64, copy=False)
        count *= 2


def plan_step(
    part: GraphPart,
    batch: Ids,
    settings: SamplerSettings,
    key: Key,
    conditions: Conditions = _USUAL,
) -> StepPlan:
    """Return the plan of one step.

    Parameters
    ----------
    part : GraphPart
    batch : ndarray of int64
        Owned nodes, without repeats; may be empty.
    settings : SamplerSettings
    key : Key
        Layer l draws from ``key.at(layer=l)``, the input layer is 0.
    conditions : Conditions
        Absent owners, and what is known of norms.

    Raises
    ------
    UnknownStructure
        When the adjacency rows of sampled remote nodes are not known here: names all of them, of one hop.
    GraphError
        For a batch with repeats, ids out of range, or nodes of another owner.
    ConfigError
        When norms do not fit the layers, or the sampler does not fit the structure.
    """
    batch = as_ids(batch, part.structure.nodes)
    if len(np.unique(batch)) != len(batch):
        raise GraphError(f"a batch of {len(batch)} nodes has repeats; give every node once")
    # Called for its check alone: a batch has nodes of this part only.
    part.positions(batch)
    if settings.skews and settings.favour == "halo":
        # Before the walk: the rows this takes are then asked for while the walk has not passed them, in the same trips.
        reach(part, (settings.layers - 1) // 2, conditions.absent)
    ids, operators = batch, []
    for level in reversed(range(settings.layers)):
        uniforms = key.at(layer=level).uniform
        one = plan_layer(part, ids, settings, level, uniforms, conditions)
        operators.append(one)
        ids = one.columns
    remote = ids[~part.owned(ids)]
    return StepPlan(batch, tuple(reversed(operators)), remote, part.structure.owner_of(remote))


def plan_layer(
    part: GraphPart,
    ids: Ids,
    settings: SamplerSettings,
    level: int,
    uniforms: Uniforms,
    conditions: Conditions = _USUAL,
) -> Operator:
    """Return the operator of one layer, whose outputs are ``ids``.

    Parameters
    ----------
    level : int
        Which layer; 0 is the input layer.
    uniforms : callable
        Returns as many uniform numbers in [0, 1) as it is asked for. Samplers of columns ask for one per candidate in
        ascending order, those that cannot be had included, so that others keep theirs when an owner vanishes.

    Other parameters and errors are those of :func:`plan_step`.
    """
    norms = conditions.norms
    if norms is not None and len(norms) != settings.layers:
        raise ConfigError(
            f"norms of {len(norms)} layers for a sampler of {settings.layers}; give one mapping per layer"
        )
    rows = part.structure.rows(ids)
    candidates, positions = columns_of(rows)
    owned = part.owned(candidates)
    usable = _usable(part, candidates, owned, level, conditions)
    favoured = _favoured(part, candidates, owned, settings, level, conditions.absent)
    certain = np.zeros(len(positions), bool)
    if settings.keep_self:
        certain = (rows.columns == np.repeat(rows.ids, np.diff(rows.indptr))) & owned[positions]
    known = None
    if settings.skews and settings.mode == "measured":
        known = _norms(part, candidates, owned, level, norms)
    layer = Layer(part, rows, candidates, positions, owned, favoured, usable, certain, known)
    drawn = draw(layer, settings, settings.draws(level), uniforms)
    return _operator(layer, drawn, _lost(layer, settings))


def plan_round(
    part: GraphPart,
    settings: SamplerSettings,
    *,
    seed: int,
    round: int,
    steps: int,
    batch_size: int,
    purpose: str = "train",
    conditions: Conditions = _USUAL,
) -> list[StepPlan]:
    """Return the plans of a round's steps.

    Parameters
    ----------
    steps, batch_size : int
        Of "train": number of steps, each with its own batch of that many of the part's training nodes (0: all).
        "evaluate" is one plan for all test nodes, whatever they are.
    purpose : str
        "train" or "evaluate".

    Other parameters are those of :func:`plan_step`. Step i draws its layers from
    ``Key(seed, f"gcn/{purpose}/{i}", round, part.index, layer)``.

    Raises
    ------
    UnknownStructure
        Names the rows that any step is missing, so that one exchange gets them for all.
    GraphError, ConfigError
        As :func:`plan_step`; for an unknown purpose, less than one step, or more than memory should be asked for.
    """
    if purpose not in PURPOSES:
        raise ConfigError(f"unknown purpose {purpose!r} of a plan; expected one of {', '.join(PURPOSES)}")
    if purpose == "train" and steps < 1:
        raise ConfigError(f"a round of {steps} steps; expected at least one")
    plans: list[StepPlan] = []
    missing: list[Ids] = []
    held = 0
    for step in range(steps if purpose == "train" else 1):
        key = Key(seed, f"gcn/{purpose}/{step}", round, part.index)
        if purpose == "train":
            batch = draw_batch(part.train, batch_size, key.at(purpose=f"{key.purpose}/batch"))
        else:
            batch = part.test
        try:
            plan = plan_step(part, batch, settings, key, conditions)
            held += sum(len(layer.values) for layer in plan.layers)
            # One step may be as large as its settings make it; what is bounded is how many steps are held at once.
            if plans and held > MOST_ENTRIES:
                raise ConfigError(
                    f"the first {step + 1} of {steps} steps of a round take more than {MOST_ENTRIES} entries of P; "
                    "take fewer steps per round, smaller batches, or fewer columns per layer"
                )
            plans.append(plan)
        except UnknownStructure as error:
            # The other steps are planned before anything is asked for: one exchange brings the rows of all.
            missing.append(error.ids)
    if missing:
        ids = np.unique(np.concatenate(missing))
        raise UnknownStructure(
            f"{len(missing)} of the steps of round {round} need adjacency rows of {len(ids)} nodes that part "
            f"{part.index} does not know, the first {int(ids[0])}; ask their owners for them and plan again",
            ids,
        )
    return plans


def wanted(plans: Sequence[StepPlan], have: Ids) -> dict[int, Ids]:
    """Return whose feature rows the plans use and are not among ``have``: owner to ids, both ascending.

    Parameters
    ----------
    plans : sequence of StepPlan
    have : ndarray of int64
        Remote nodes whose rows are here already, in any order.
    """
    ids, first = np.unique(np.concatenate([np.zeros(0, np.int64), *(plan.remote for plan in plans)]), return_index=True)
    owners = np.concatenate([np.zeros(0, np.int32), *(plan.owners for plan in plans)])[first]
    lacking = ~find(have, ids)[0]
    ids, owners = ids[lacking], owners[lacking]
    return {int(owner): ids[owners == owner] for owner in np.unique(owners)}


def _usable(part: GraphPart, candidates: Ids, owned: Bools, level: int, conditions: Conditions) -> Bools:
    usable = np.ones(len(candidates), bool)
    if not conditions.absent:
        return usable
    remote = np.flatnonzero(~owned)
    gone = np.isin(part.structure.owner_of(candidates[remote]), list(conditions.absent))
    theirs = remote[gone]
    # Above the input layer no features travel: a node of an absent owner serves where its row of P is known.
    if level > 0:
        usable[theirs] = part.structure.known(candidates[theirs])
    else:
        usable[theirs] = find(conditions.held, candidates[theirs])[0]
    return usable


def _favoured(
    part: GraphPart, candidates: Ids, owned: Bools, settings: SamplerSettings, level: int, absent: frozenset[int]
) -> Bools:
    if settings.favour == "owned" or not settings.skews or level == 0:
        return owned
    if level >= settings.layers - level:
        # The batch is owned, and what a layer chooses from is as many hops from it as there are layers from here up.
        return np.ones(len(candidates), bool)
    return owned | find(reach(part, level, absent), candidates)[0]


def reach(part: GraphPart, hops: int, absent: frozenset[int] = frozenset()) -> Ids:
    """Return the nodes that are within so many hops of an owned node along rows of P, int64, ascending.

    Computed once for a structure and kept in the part's memo, unless something had to be left out. What follows from
    rows that were sent is not kept for another structure, which may lack them: a plan that is made again without them
    has to be the same plan.

    Raises
    ------
    UnknownStructure
        When it takes rows that are not known here, of nodes whose owners are not absent.
    """
    if hops == 0:
        return part.ids
    name = f"reach/{hops}"
    made = part.memo.get(name)
    # One hop is what the owner's own rows say, which every structure of the part has.
    if made is None or (hops > 1 and made[0] is not part.structure):
        inner = reach(part, hops - 1, absent)
        known = part.structure.known(inner)
        if not known.all():
            gone = np.isin(part.structure.owner_of(inner[~known]), list(absent))
            known[np.flatnonzero(~known)[~gone]] = True  # asked for below, and missed there by name
        whole = bool(known.all())
        found = np.union1d(inner, part.structure.rows(inner[known]).columns)
        if not whole:
            return found
        part.memo[name] = made = part.structure, found
    kept: Ids = made[1]
    return kept


def feature_norms(part: GraphPart) -> Reals:
    """Return the L2 norms of the owned nodes' features, in the order of ``part.ids``; made once."""
    if "norms" not in part.memo:
        part.memo["norms"] = np.sqrt(np.einsum("ij,ij->i", part.features, part.features, dtype=np.float64))
    kept: Reals = part.memo["norms"]
    return kept


def _norms(part: GraphPart, candidates: Ids, owned: Bools, level: int, norms: Norms | None) -> Reals:
    seen = norms[level] if norms is not None else {}
    found = np.array([seen.get(one, np.nan) for one in candidates.tolist()], np.float64)
    if level == 0:
        found[owned] = feature_norms(part)[part.positions(candidates[owned])]
    # The root mean square, not the mean: energies are squares, and theirs is the expectation that counts.
    unseen = np.isnan(found)
    found[unseen] = np.sqrt(np.square(found[~unseen]).mean()) if not unseen.all() else 1.0
    return found


def _lost(layer: Layer, settings: SamplerSettings) -> float:
    useful = layer.owned if settings.sampler == "local" else np.ones(len(layer.candidates), bool)
    # With everybody present, the usual case, the weights need not be summed.
    if not (useful & ~layer.usable).any():
        return 0.0
    weights = layer.weights("l2sq" if settings.sampler == "ladies" else settings.weight)
    return float(weights[useful & ~layer.usable].sum() / weights.sum())


def _operator(layer: Layer, drawn: Draw, lost: float) -> Operator:
    entries = drawn.factors > 0.0
    used = np.zeros(len(layer.candidates), bool)
    used[layer.positions[entries]] = True
    # Kept entries before each place: read at the old ends of rows, it gives the new ones.
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(entries)])
    return Operator(
        rows=layer.rows.ids,
        columns=layer.candidates[used],
        indptr=before[layer.rows.indptr],
        positions=(np.cumsum(used) - 1)[layer.positions[entries]],
        values=layer.rows.values[entries] * drawn.factors[entries],
        candidates=len(layer.candidates),
        local_mass=drawn.local_mass,
        scale=drawn.scale,
        expected_remote=drawn.expected_remote,
        lost_mass=lost,
    )
