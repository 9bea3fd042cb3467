"""What the server of a graph run and the owners of its parts say to each other, as Flower's records.

    query.gcn_setup    hello: which part are you; norms: feature norms of nodes, asked for by others
    query.gcn_plan     which rows of other owners do your next steps use
    query.gcn_rows     rows of yours, as bytes, for those who asked
    train.gcn          the inner strategy's training message, with the rows in it
    evaluate.gcn       the same for evaluation

Scalars are in one ConfigRecord; every list of ids and every block of rows is one frame, which the server passes on
unchanged, so that it costs the same on both links. What the bytes of a frame mean is checked by those who read them.

A frame has a kind and a place. The place is a part of the graph. In messages to and from a requester it says whose the
rows are; in messages to and from an owner it says who wants them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Self

from flwr.app import Message, MetricRecord, RecordDict

from fedcomp.flower.payload import PayloadError, put_frame, take_frame
from fedcomp.flower.schema import Schema
from fedcomp.graphs.base import StepPlan
from fedcomp.graphs.settings import MOST_LAYERS
from fedcomp.rules import Flag, Int, Many, OneOf, Real, Text

SETUP: Final = "gcn_setup"
PLAN: Final = "gcn_plan"
ROWS: Final = "gcn_rows"
GCN: Final = "gcn"
"""Actions of the messages; ``query.``, ``train.`` or ``evaluate.`` before them makes their types."""

HEADER: Final = "fedcomp.gcn"
"""Name of the ConfigRecord with a message's scalars."""

FIGURES: Final = "metrics"
"""Name of the MetricRecord with a plan's figures."""

SETUP_TYPE: Final = f"query.{SETUP}"
PLAN_TYPE: Final = f"query.{PLAN}"
ROWS_TYPE: Final = f"query.{ROWS}"
TRAIN_TYPE: Final = f"train.{GCN}"
EVALUATE_TYPE: Final = f"evaluate.{GCN}"

IDS: Final = "ids"
FEATURES: Final = "rows"
NORMS: Final = "norms"
STRUCTURE: Final = "structure"
KINDS: Final = (IDS, FEATURES, NORMS, STRUCTURE)
"""Kinds of frames: lists of ids, blocks of feature rows, feature norms, rows of the adjacency."""

MOST_PARTS: Final = 65_536
"""Parts a graph may have."""

MOST_STEPS: Final = 65_536
"""Steps a message may ask for: plans of all of them are in memory at once."""

MOST_ROUNDS: Final = 1 << 61
"""Rounds are below it: twice as many are an integer that records can hold."""

Name = Annotated[str, Text(256, least=1)]
Part = Annotated[int, Int(most=MOST_PARTS - 1)]
Parts = Annotated[tuple[int, ...], Many(Int(most=MOST_PARTS - 1), MOST_PARTS, ascending=True)]
Count = Annotated[int, Int()]
Switch = Annotated[bool, Flag()]
Amount = Annotated[float, Real(least=0.0)]


@dataclass(frozen=True)
class GraphSetup(Schema, key=HEADER):
    """What ``query.gcn_setup`` asks.

    Attributes
    ----------
    session : str
        Names the run.
    action : {"hello", "norms"}
        Who are you (answered by :class:`GraphHello`); or the feature norms of the nodes in the frames
        ``ids/{requester}``, answered by ``norms/{requester}``.
    norms : bool
        Of a hello: name the remote nodes whose norms the sampler uses, in frames ``ids/{owner}``.
    layers : int
        Of a hello with ``norms``: how many hops away they may be.
    """

    session: Name
    action: Annotated[str, OneOf("hello", "norms")]
    norms: Switch = False
    layers: Annotated[int, Int(1, MOST_LAYERS)] = 1


@dataclass(frozen=True)
class GraphHello(Schema, key=HEADER):
    """What an owner announces about its part.

    Attributes
    ----------
    digest : str
        Of graph, normalisation and partition; the same at all owners of a run.
    index, parts : int
        Which part, of how many.
    nodes : int
        N, of the whole graph.
    owned, train, test : int
        How many nodes it has, learns from, and is tested on.
    features : int
        d, length of a feature row.
    structure : {"full", "halo"}
        What it knows of the edges.
    """

    digest: Name
    index: Part
    parts: Annotated[int, Int(1, MOST_PARTS)]
    nodes: Count
    owned: Count
    train: Count
    test: Count
    features: Annotated[int, Int(1)]
    structure: Annotated[str, OneOf("full", "halo")]

    def conflict(self) -> str:
        if self.index >= self.parts:
            return f"part {self.index} of {self.parts}"
        if max(self.train, self.test) > self.owned:
            return f"{self.owned} nodes, {self.train} to learn from, {self.test} for tests"
        return "" if self.owned <= self.nodes else f"{self.owned} nodes of a graph of {self.nodes}"


@dataclass(frozen=True)
class PlanRequest(Schema, key=HEADER):
    """What a plan, a training and an evaluation message say; the last message of a turn repeats that of its plan.

    Attributes
    ----------
    session : str
        Names the run.
    seed, round : int
        Coordinates of the draws.
    purpose : {"train", "evaluate"}
    steps, batch_size : int
        Of training; a batch of 0 takes all training nodes. An evaluation is one step on all test nodes.
    sampler : str
        :class:`fedcomp.graphs.settings.SamplerSettings` as JSON.
    row_codec : str
        How feature rows are written.
    cache : {"none", "lru", "all"}
        Which rows of other owners are kept.
    cache_bytes : int
        The limit of "lru".
    noise : float
        Standard deviation of the noise an owner adds to its rows.
    absent : tuple of int
        Owners to do without.
    scale : float
        s where the server decides it; 0: the sampler does.
    norms : int
        How many feature norms of other owners' nodes the client was sent in this run, for a sampler that uses them. A
        client that has fewer has lost its state, and says so.
    hop : int
        How many exchanges of adjacency rows there were before, in this turn.
    """

    session: Name
    # Any integer that a record can hold: its integers are signed, of 64 bits.
    seed: Annotated[int, Int(least=-(2**63))]
    round: Annotated[int, Int(most=MOST_ROUNDS - 1)]
    purpose: Annotated[str, OneOf("train", "evaluate")]
    steps: Annotated[int, Int(1, MOST_STEPS)]
    batch_size: Count
    sampler: Annotated[str, Text(4096)]
    row_codec: Name
    cache: Annotated[str, OneOf("none", "lru", "all")] = "none"
    cache_bytes: Count = 0
    noise: Amount = 0.0
    absent: Parts = ()
    scale: Amount = 0.0
    norms: Annotated[int, Int(absent=0)] = 0
    hop: Count = 0

    @property
    def turn(self) -> int:
        """Place of this round's training or evaluation in the order of a session."""
        # A round's evaluation comes after its training.
        return 2 * self.round + (self.purpose == "evaluate")

    def conflict(self) -> str:
        return f"scale {self.scale} is neither 0 nor at least 1" if 0.0 < self.scale < 1.0 else ""


@dataclass(frozen=True)
class Needs(Schema, key=HEADER):
    """What a plan needs: frames ``ids/{owner}`` name the rows.

    Attributes
    ----------
    needs : {"rows", "structure", "norms"}
        Of which kind. Feature rows: the plan is complete. Rows of the adjacency, or the feature norms that the client
        was sent before and no longer has: it has to be asked for a plan again. It does not name the norms, since the
        server knows which it sent.
    hop : int
        That of the question.
    """

    needs: Annotated[str, OneOf(FEATURES, STRUCTURE, NORMS)]
    hop: Count


@dataclass(frozen=True)
class Fetch(Schema, key=HEADER):
    """What ``query.gcn_rows`` asks, of the nodes in its frames ``ids/{requester}``.

    Attributes
    ----------
    session : str
    kind : {"rows", "structure"}
        Feature rows, or rows of the adjacency; the reply has frames of that kind, for the same requesters.
    row_codec : str
        Of feature rows.
    noise : float
        Standard deviation of the noise on feature rows.
    norms : bool
        Of structure: with the feature norms of the nodes.
    """

    session: Name
    kind: Annotated[str, OneOf(FEATURES, STRUCTURE)]
    row_codec: Annotated[str, Text(256)] = ""
    noise: Amount = 0.0
    norms: Switch = False

    def conflict(self) -> str:
        return "feature rows without a row codec" if self.kind == FEATURES and not self.row_codec else ""


@dataclass(frozen=True)
class Refused(Schema, key=HEADER):
    """The requesters that an owner refuses. Its reply still has the frames of all others.

    Attributes
    ----------
    requesters : tuple of int
        Ascending.
    reason : str
        Of the first.
    """

    requesters: Annotated[tuple[int, ...], Many(Int(most=MOST_PARTS - 1), MOST_PARTS, least=1, ascending=True)]
    reason: Annotated[str, Text(4096)]


def put_frames(content: RecordDict, kind: str, frames: Mapping[int, bytes]) -> None:
    """Write frames of one kind by place.

    Raises
    ------
    PayloadError
        For an unknown kind or a place out of range.
    """
    if kind not in KINDS:
        raise PayloadError(f"kind {kind!r} of frames is none of {', '.join(KINDS)}")
    for place, data in frames.items():
        if not 0 <= place < MOST_PARTS:
            raise PayloadError(f"place {place} of a frame is no part of a graph")
        put_frame(content, f"{HEADER}/{kind}/{int(place)}", data)


def take_frames(message: Message, parts: int, *kinds: str) -> dict[str, dict[int, bytes]]:
    """Return the frames of a message, by kind (those of ``kinds``, each of them) and place, places ascending.

    Parameters
    ----------
    parts : int
        Places are below it.

    Raises
    ------
    PayloadError
        When there is a frame of another kind, at another place or at one place twice, or something that is not a frame.
    """
    if not message.has_content():
        raise PayloadError("the message is an error and carries no frames")
    found: dict[str, dict[int, bytes]] = {kind: {} for kind in kinds}
    for name in message.content:
        head, slash, rest = name.partition("/")
        # Other records belong to the inner strategy or to another system, and are theirs to check.
        if head != HEADER or not slash:
            continue
        kind, _, place = rest.partition("/")
        if kind not in found:
            raise PayloadError(f"the message has a frame {name!r}; expected were {', '.join(kinds) or 'none'}")
        # Digits alone: int() reads signs, spaces and digits of other scripts, and "01" would be place 1 a second time.
        if not (place.isascii() and place.isdigit() and len(place) < 9 and str(int(place)) == place):
            raise PayloadError(f"frame {name!r} is at a place that is no number")
        if int(place) >= parts:
            raise PayloadError(f"frame {name!r} is at place {place}, and there are {parts} parts")
        data = take_frame(message.content, name)
        # The name is one of the message's own.
        assert data is not None
        found[kind][int(place)] = data
    return {kind: dict(sorted(at.items())) for kind, at in found.items()}


def expect(frames: Mapping[int, bytes], places: Iterable[int], kind: str) -> None:
    """Check that ``frames`` are at exactly these places.

    Raises
    ------
    PayloadError
        When one is missing or there is one more.
    """
    wanted: Collection[int] = set(places)
    missing, extra = sorted(set(wanted) - set(frames)), sorted(set(frames) - set(wanted))
    if missing or extra:
        raise PayloadError(
            f"frames of kind {kind!r} at places {sorted(frames)}, expected {sorted(wanted)}: "
            f"{missing} are missing, {extra} were not asked for"
        )


@dataclass(frozen=True)
class Figures(Schema, key=FIGURES, holder=MetricRecord):
    """Figures of the plans of one turn, on one client.

    Attributes
    ----------
    steps, examples : int
        Steps, and nodes in their batches together.
    inputs, remote_inputs : int
        Nodes whose features are used, and those of them that other owners have, summed over steps.
    wanted : int
        Rows that have to be fetched: distinct over the steps, without those at hand.
    candidates : int
        Of all layers, summed over steps.
    expected_remote : float
        Sum of the inclusion probabilities of remote candidates of the input layer, summed over steps.
    local_mass, scale : float
        lambda and s, means over steps and layers that have candidates; 0 and 1 where none has.
    lost_mass : float
        Share of the base weight that absent owners take away: the largest of a step's layers, mean over steps.
    """

    steps: Count
    examples: Count
    inputs: Count
    remote_inputs: Count
    wanted: Count
    candidates: Count
    expected_remote: Amount
    local_mass: Amount
    scale: Amount
    lost_mass: Amount

    @classmethod
    def of_plans(cls, plans: Iterable[StepPlan], wanted: int) -> Self:
        """Return the figures of some steps."""
        steps = list(plans)
        # A layer without candidates chose nothing; its NaN and its scale of 1 would only blur the means.
        layers = [layer for step in steps for layer in step.layers if layer.candidates]
        return cls(
            len(steps),
            sum(len(step.batch) for step in steps),
            sum(len(step.inputs) for step in steps),
            sum(len(step.remote) for step in steps),
            int(wanted),
            sum(layer.candidates for layer in layers),
            # Layer 0 is the input layer: only its remote nodes have rows to be fetched.
            float(sum(step.layers[0].expected_remote for step in steps)),
            _mean([layer.local_mass for layer in layers if not math.isnan(layer.local_mass)], 0.0),
            _mean([layer.scale for layer in layers], 1.0),
            _mean([max(layer.lost_mass for layer in step.layers) for step in steps], 0.0),
        )


def _mean(values: list[float], otherwise: float) -> float:
    return float(sum(values) / len(values)) if values else otherwise
