"""The messages between the server of a graph run and the owners of its parts.

A part of the graph is owned by the node of that number. Every list of ids and every block of rows is one frame, called
by its kind and by a part: ``rows/3``. In asks and answers of a requester the part says whose the rows are; in those of
an owner it says who wants them. The server passes frames on unchanged; what their bytes mean is checked by those who
read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Self

from fedcomp.graphs.adjacency import HaloStructure
from fedcomp.graphs.base import GraphError, GraphPart, StepPlan
from fedcomp.program import Frames, Said
from fedcomp.rules import Flag, Int, Many, OneOf, Real, Text
from fedcomp.wire import Frame

IDS: Final = "ids"
ROWS: Final = "rows"
NORMS: Final = "norms"
STRUCTURE: Final = "structure"
"""Kinds of frames: lists of ids, blocks of feature rows, feature norms, rows of the adjacency."""

MOST_PARTS: Final = 65_536
"""Parts a graph may have."""

TRAIN_TYPE: Final = "train.gcn"
EVALUATE_TYPE: Final = "evaluate.gcn"
"""Types of the messages that bring a model: an app may have other handlers for trainings without a graph."""

PURPOSES: Final = ("train", "evaluate")

_Part = Int(most=MOST_PARTS - 1)
Parts = Annotated[tuple[int, ...], Many(_Part, MOST_PARTS, ascending=True)]
Count = Annotated[int, Int(absent=0)]
Amount = Annotated[float, Real(least=0.0, absent=0.0)]
Purpose = Annotated[str, OneOf(*PURPOSES)]


@dataclass(frozen=True, repr=False, eq=False)
class Who(Said):
    """Which part are you? Answered by :class:`Owner`."""


@dataclass(frozen=True, repr=False, eq=False)
class Owner(Said):
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

    digest: Annotated[str, Text(256, least=1)]
    index: Annotated[int, _Part]
    parts: Annotated[int, Int(1, MOST_PARTS)]
    nodes: Annotated[int, Int()]
    owned: Annotated[int, Int()]
    train: Annotated[int, Int()]
    test: Annotated[int, Int()]
    features: Annotated[int, Int(1)]
    structure: Annotated[str, OneOf("full", "halo")]

    @classmethod
    def of_part(cls, part: GraphPart) -> Self:
        """Return what is announced about a part."""
        known = "halo" if isinstance(part.structure, HaloStructure) else "full"
        counts = part.structure.nodes, len(part.ids), len(part.train), len(part.test), int(part.features.shape[1])
        return cls(part.digest, part.index, part.parts, *counts, known)

    def conflict(self) -> str:
        if self.index >= self.parts:
            return f"part {self.index} of {self.parts}"
        if max(self.train, self.test) > self.owned:
            return f"{self.owned} nodes, {self.train} to learn from, {self.test} for tests"
        return "" if self.owned <= self.nodes else f"{self.owned} nodes of a graph of {self.nodes}"

    @property
    def common(self) -> tuple[str, int, int, int, str]:
        """What all owners of a run have in common: digest, parts, nodes, features, structure."""
        return self.digest, self.parts, self.nodes, self.features, self.structure


@dataclass(frozen=True, repr=False, eq=False)
class Plan(Said):
    """Which rows of other owners do your next steps use?

    With it come norms and rows of the adjacency that the last answer asked for. Answered by :class:`Needs` where the
    plan cannot go on without more of them, and by :class:`Planned`.

    Attributes
    ----------
    purpose : {"train", "evaluate"}
    absent : tuple of int
        Owners to do without.
    """

    purpose: Purpose
    absent: Parts = ()


@dataclass(frozen=True, repr=False, eq=False)
class Turn(Plan):
    """Train, or evaluate, by the plan that was made last of this very question: the rows come with it."""


@dataclass(frozen=True, repr=False, eq=False)
class Needs(Said):
    """What a plan cannot go on without; frames ``ids/{owner}`` name the nodes.

    Attributes
    ----------
    kind : {"structure", "norms"}
        Rows of the adjacency, or feature norms.
    """

    kind: Annotated[str, OneOf(STRUCTURE, NORMS)]


@dataclass(frozen=True, repr=False, eq=False)
class Planned(Said):
    """Figures of the plans of one turn, on one client; frames ``ids/{owner}`` name the feature rows that they lack.

    Attributes
    ----------
    steps, examples : int
        Steps, and nodes in their batches together.
    inputs, remote_inputs : int
        Nodes whose features are used, and those of them that other owners have, summed over steps.
    candidates : int
        Of all layers, summed over steps.
    expected_remote : float
        Sum of the inclusion probabilities of remote candidates of the input layer, summed over steps.
    local_mass, scale : float
        lambda and s, means over steps and layers that have candidates; 0 and 1 where none has.
    lost_mass : float
        Share of the base weight that absent owners take away: the largest of a step's layers, mean over steps.
    """

    steps: Count = 0
    examples: Count = 0
    inputs: Count = 0
    remote_inputs: Count = 0
    candidates: Count = 0
    expected_remote: Amount = 0.0
    local_mass: Amount = 0.0
    scale: Amount = 0.0
    lost_mass: Amount = 0.0

    @classmethod
    def of_plans(cls, plans: Iterable[StepPlan]) -> Self:
        """Return the figures of some steps."""
        steps = list(plans)
        # A layer without candidates chose nothing; its NaN and its scale of 1 would only blur the means.
        layers = [layer for step in steps for layer in step.layers if layer.candidates]
        return cls(
            len(steps),
            sum(len(step.batch) for step in steps),
            sum(len(step.inputs) for step in steps),
            sum(len(step.remote) for step in steps),
            sum(layer.candidates for layer in layers),
            # Layer 0 is the input layer: only its remote nodes have rows to be fetched.
            float(sum(step.layers[0].expected_remote for step in steps)),
            _mean([layer.local_mass for layer in layers if not math.isnan(layer.local_mass)], 0.0),
            _mean([layer.scale for layer in layers], 1.0),
            _mean([max(layer.lost_mass for layer in step.layers) for step in steps], 0.0),
        )


@dataclass(frozen=True, repr=False, eq=False)
class Fetch(Said):
    """Hand out rows of the nodes in the frames ``ids/{requester}``: frames of the kind, for the same requesters.

    Attributes
    ----------
    kind : {"rows", "structure", "norms"}
    norms : bool
        Of structure: with the feature norms of the nodes.
    """

    kind: Annotated[str, OneOf(ROWS, STRUCTURE, NORMS)]
    norms: Annotated[bool, Flag(absent=False)] = False


@dataclass(frozen=True, repr=False, eq=False)
class Refused(Said):
    """The requesters that an owner refuses. Its answer still has the frames of all others.

    Attributes
    ----------
    requesters : tuple of int
        Ascending.
    reason : str
        Of the first.
    """

    requesters: Annotated[tuple[int, ...], Many(_Part, MOST_PARTS, least=1, ascending=True)]
    reason: Annotated[str, Text(4096)]


def named(kind: str, frames: Mapping[int, Frame]) -> dict[str, Frame]:
    """Return frames of one kind by name, from frames by part."""
    return {f"{kind}/{part}": data for part, data in frames.items()}


def by_part(frames: Frames, parts: int, *kinds: str) -> dict[str, dict[int, Frame]]:
    """Return frames by kind (those of ``kinds``, each of them) and part, parts ascending.

    Parameters
    ----------
    parts : int
        Of the graph.

    Raises
    ------
    GraphError
        When there is a frame of another kind, or of no part of the graph.
    """
    found: dict[str, dict[int, Frame]] = {kind: {} for kind in kinds}
    for name, data in frames.items():
        kind, _, part = name.partition("/")
        if kind not in found:
            raise GraphError(f"there is a frame {name[:80]!r}; expected were {', '.join(kinds) or 'none'}")
        # Digits alone: int() reads signs, spaces and digits of other scripts, and "01" would be part 1 a second time.
        if not (part.isascii() and part.isdigit() and len(part) < 9 and str(int(part)) == part):
            raise GraphError(f"frame {name[:80]!r} names a part that is not a number")
        if int(part) >= parts:
            raise GraphError(f"frame {name!r} is of part {part}, and there are {parts} parts")
        found[kind][int(part)] = data
    return {kind: dict(sorted(at.items())) for kind, at in found.items()}


def _mean(values: list[float], otherwise: float) -> float:
    return float(sum(values) / len(values)) if values else otherwise
