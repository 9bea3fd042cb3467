"""The section of a round's report for decentralised runs, and the nodes' models when they are observed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedcomp.flower.report import EventSection, figure
from fedcomp.gossip.receiving import FARTHEST
from fedcomp.gossip.traffic import GossipTraffic


@dataclass
class Iterations(EventSection, name="gossip"):
    """One round of a decentralised run.

    Attributes
    ----------
    iteration, epoch : int
        Iterations begun by the end of the round; how often the set of nodes had changed.
    exchanges, answers : int
        Exchanges of training messages; usable answers to them.
    members : list of int
        The vertices that take part, after the round.
    traffic : dict of str to int
        Bytes of this round's messages: ``edge``, ``node``, ``up`` and ``down`` (the relay's) and ``undelivered``; of
        the first two also by phase (``edge.train``, ``edge.dense``, ``edge.resync``), how many there were
        (``edge.messages``), and how many of the bytes are headers (``edge.headers``).
    start : int
        Bytes of the initial model, to nodes that begin or join.
    observed : dict of str to float
        Of the observation, if there was one.
    """

    iteration: int = figure()
    epoch: int = figure()
    exchanges: int = figure(unit="exchanges")
    answers: int = figure(unit="nodes")
    members: list[int] = figure(list, unit="nodes", show="count")
    traffic: dict[str, int] = figure(dict, unit="bytes", show="flat")
    start: int = figure(unit="bytes")
    observed: dict[str, float] = figure(dict, show="flat")

    def line(self) -> str:
        """Return how far the run is."""
        return f"iteration {self.iteration}, {len(self.members)} nodes, {self.answers} answers"


@dataclass(frozen=True)
class Observed:
    """One node's model, as it reported it.

    Attributes
    ----------
    arrays : dict of str to ndarray
        The whole model, the node's own buffers included.
    figures : dict of str to float
        The node's figures for it, on the data that all nodes have in common.
    facts : dict of str to float
        See :meth:`fedcomp.gossip.Algorithm.facts`.
    """

    arrays: Mapping[str, NDArray[Any]]
    figures: Mapping[str, float]
    facts: Mapping[str, float]


def far_out(seen: Mapping[int, Observed]) -> dict[int, str]:
    """Return the vertices whose models would decide the mean alone, with the reason: finite, and absurdly large."""
    norms: dict[int, float] = {}
    size = 0
    for vertex, found in seen.items():
        floats = [array.astype(np.float64).ravel() for array in found.arrays.values() if array.dtype.kind == "f"]
        size = sum(array.size for array in floats)
        # A norm beyond float64 is infinite, and far out.
        norms[vertex] = math.hypot(*(float(np.linalg.norm(array)) for array in floats))
    # The lower of two middle values: what half of the nodes cannot push up. Values of 1 are the least scale, as for
    # what nodes take from each other.
    usual = max(sorted(norms.values())[(len(norms) - 1) // 2], math.sqrt(size)) if norms else 0.0
    return {
        vertex: f"its model has norm {value:.3g}, {value / usual:.3g} times the usual; at most {FARTHEST:g} times are "
        "part of the mean"
        for vertex, value in norms.items()
        if not value <= FARTHEST * usual
    }


def why_not_finite(seen: Sequence[Observed], middle: Mapping[str, NDArray[Any]]) -> str:
    """Return why what nodes have learnt is of no use: its mean is not finite, or a figure of most is infinite.

    Figures that are not a number may be so for an honest reason, such as a mean over no example.
    """
    for name, array in middle.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return f"the mean of the nodes' models is not finite in {name!r}"
    for name in dict.fromkeys(name for found in seen for name in found.figures):
        count = sum(math.isinf(found.figures.get(name, 0.0)) for found in seen)
        if 2 * count > len(seen):
            return f"{name!r} of {count} of {len(seen)} nodes is infinite"
    return ""


def mean_of(models: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Return the mean of models with the same tensors, added up in the order given in float64, in their own dtypes;
    integers of the first."""
    first = models[0]
    out: dict[str, NDArray[Any]] = {}
    for name, array in first.items():
        if array.dtype.kind != "f":
            out[name] = array
            continue
        total = np.zeros(array.shape)
        for model in models:
            total += model[name]
        # Arithmetic on an array without dimensions gives a number, which no record takes for an array.
        out[name] = np.asarray(total / len(models), array.dtype)
    return out


def figures_of(seen: Sequence[Observed], middle: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Return mean, least and most of each of the nodes' figures; how far the nodes are from the mean model; what is
    conserved.

    ``distance`` is the root of the mean squared Euclidean distance over nodes, ``sum_w`` the sum of push-sum's weights.
    Both are of the nodes that answered, ``observed`` in number: where messages were lost, ``sum_w`` is less than the
    weight of all nodes although no weight is lost.
    """
    out: dict[str, float] = {"observed": float(len(seen))}
    for name in dict.fromkeys(name for found in seen for name in found.figures):
        values = [found.figures[name] for found in seen if name in found.figures]
        out |= {f"{name}_mean": _sum(values) / len(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    squares = [
        float(np.sum(np.square(np.asarray(found.arrays[name], np.float64) - array)))
        for found in seen
        for name, array in middle.items()
        if array.dtype.kind == "f"
    ]
    out["distance"] = math.sqrt(_sum(squares) / len(seen))
    weights = [found.facts["weight"] for found in seen if "weight" in found.facts]
    # A sum over some of the nodes would look like lost mass.
    if len(weights) == len(seen):
        out["sum_w"] = _sum(weights)
    return out


def _sum(values: Sequence[float]) -> float:
    """Return the sum; not a number, or infinite, where math.fsum raises: what nodes say has not been looked at."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def close(report: Iterations, told: Mapping[str, Any], initial: ArrayRecord) -> None:
    """Write what a program told into a round's report; a round may have several, and their figures are added up."""
    course = told["course"]
    report.iteration, report.epoch, report.members = course.iteration, course.epoch, sorted(course.members)
    report.exchanges += told["exchanges"]
    report.answers += told["answers"]
    report.start += told["started"] * sum(len(array.data) for array in initial.values())
    for name, value in _bytes(told["traffic"]).items():
        report.traffic[name] = report.traffic.get(name, 0) + value
    for kind, vertex, reason in told["events"]:
        report.note(kind, f"vertex {vertex}: {reason}")


def _bytes(traffic: GossipTraffic) -> dict[str, int]:
    """Return the bytes of messages by name."""
    out: dict[str, int] = {}
    for side, phases in (("edge", traffic.edge), ("node", traffic.node)):
        out |= {f"{side}.{phase}": count.bytes for phase, count in phases.items()}
        out[side] = sum(count.bytes for count in phases.values())
        out[f"{side}.messages"] = sum(count.messages for count in phases.values())
        out[f"{side}.headers"] = sum(count.headers for count in phases.values())
    return out | {name: getattr(traffic, name).bytes for name in ("up", "down", "undelivered")}
