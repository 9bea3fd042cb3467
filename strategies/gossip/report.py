"""What a decentralised run reports of a round, and the nodes' models when they are observed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from numpy.typing import NDArray

from fedcomp.errors import LayoutError, StateError
from fedcomp.flower import gossip
from fedcomp.flower.payload import PayloadError
from fedcomp.flower.records import read_array
from fedcomp.flower.report import EventSection, figure
from fedcomp.gossip.protocol import NodeAnswer
from fedcomp.gossip.receiving import FARTHEST
from fedcomp.gossip.relay import Relay
from fedcomp.plain import fields_of

_MOST_FIGURES: Final = 32

_EVENTS: Final = ("gone", "joined", "left", "failed", "refused", "needed", "lost", "doubted", "noticed")
"""What :class:`fedcomp.gossip.events.RelayReport` lists."""


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
    link_bytes : dict of str to int
        Bytes that nodes handed to their links in this round, by edge ("0>1"), by their own word; failed attempts
        included. Edges whose messages took the server instead are among the events, as ``mailbox``.
    observed : dict of str to float
        Of the observation, if there was one.
    """

    iteration: int = figure()
    epoch: int = figure()
    exchanges: int = figure(unit="exchanges")
    answers: int = figure(unit="nodes")
    members: list[int] = figure(list, unit="nodes", show="count")
    traffic: dict[str, int] = figure(dict, unit="bytes", show="flat")
    link_bytes: dict[str, int] = figure(dict, unit="bytes", show="table")
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

    @classmethod
    def of(cls, reply: Message, initial: ArrayRecord, dtype: str) -> Observed:
        """Read the reply to an observation of a run in ``dtype`` that began with ``initial``.

        Raises
        ------
        PayloadError, AnswerError
            When it holds none, or too many figures.
        StateError
            When the node has no model to show.
        LayoutError
            When it shows another model than the run's, or one that is not finite.
        """
        answer = answer_of(reply)
        if answer.fresh or answer.failed:
            raise StateError(answer.failed or "it has no memory of the run")
        record = reply.content.get(gossip.MODEL)
        if not isinstance(record, ArrayRecord):
            raise PayloadError(f"the message has no model under {gossip.MODEL!r}")
        if set(record) != set(initial):
            raise LayoutError(f"its model has tensors {list(record)[:5]}, not those of the run: {list(initial)[:5]}")
        arrays: dict[str, NDArray[Any]] = {}
        for name, array in initial.items():
            # Float tensors come in the run's dtype, which may not be the model's own; integer buffers in theirs.
            own = np.dtype(array.dtype)
            arrays[name] = read_array(record[name], name, tuple(array.shape), dtype if own.kind == "f" else own)
            # One such model would make the mean of all of them NaN.
            if not np.isfinite(arrays[name]).all():
                raise LayoutError(f"its tensor {name!r} holds non-finite values")
        figures = reply.content.get(gossip.FIGURES)
        found = dict(figures) if isinstance(figures, MetricRecord) else {}
        if len(found) > _MOST_FIGURES:
            raise PayloadError(f"it reports {len(found)} figures; at most {_MOST_FIGURES} are taken")
        return cls(arrays, {k: float(v) for k, v in found.items() if isinstance(v, int | float)}, answer.facts)


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
        out[name] = (total / len(models)).astype(array.dtype)
    return out


def figures_of(seen: Sequence[Observed], middle: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Return mean, least and most of each of the nodes' figures; how far the nodes are from the mean model; what is
    conserved.

    ``distance`` is the root of the mean squared Euclidean distance over nodes, ``sum_w`` the sum of push-sum's weights.
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


def answer_of(reply: Message) -> NodeAnswer:
    """Return the answer a reply carries.

    Raises
    ------
    StateError
        When the reply is an error.
    PayloadError, AnswerError
        When it carries no answer.
    """
    if reply.has_error():
        raise StateError(f"error {reply.error.code}: {reply.error.reason}")
    return gossip.take_answer(reply)


@dataclass(frozen=True)
class Before:
    """How far a run was when a round began: what has happened since then is the round's.

    Attributes
    ----------
    traffic : dict
        The fields of its :class:`~fedcomp.gossip.traffic.GossipTraffic`.
    events : dict of str to int
        How many events of each kind its report had.
    """

    traffic: Mapping[str, Any]
    events: Mapping[str, int]

    @classmethod
    def of(cls, relay: Relay) -> Before:
        """Return how far ``relay`` is."""
        return cls(fields_of(relay.traffic), {kind: len(getattr(relay.report, kind)) for kind in _EVENTS})

    def close(self, relay: Relay, report: Iterations) -> None:
        """Write what has happened since then into a round's report."""
        # Seeing off leavers counts iterations beyond the last one.
        report.iteration = min(relay.iteration, relay.iterations + relay.skew_rounds)
        report.epoch, report.members = relay.epochs.number, list(relay.members)
        for name, value in _difference(fields_of(relay.traffic), self.traffic).items():
            # Added, since a round reports twice: its exchanges, and what closes it.
            report.traffic[name] = report.traffic.get(name, 0) + value
        for kind in _EVENTS:
            for _, vertex, reason in getattr(relay.report, kind)[self.events[kind] :]:
                report.note(kind, f"vertex {vertex}: {reason}")


def _difference(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of messages between two states of the counters, by name."""

    def size(count: Mapping[str, int]) -> int:
        return count["headers"] + count["bodies"]

    out: dict[str, int] = {}
    for side in ("edge", "node"):
        phases = now[side]
        out |= {f"{side}.{phase}": size(phases[phase]) - size(before[side][phase]) for phase in phases}
        out[side] = sum(out[f"{side}.{phase}"] for phase in phases)
        for name in ("messages", "headers"):
            out[f"{side}.{name}"] = sum(phases[phase][name] - before[side][phase][name] for phase in phases)
    out |= {name: size(now[name]) - size(before[name]) for name in ("up", "down", "undelivered")}
    return out
