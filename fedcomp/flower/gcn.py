"""What the server of a graph run and the owners of its parts say to each other, as Flower's records.

    query.gcn_setup    hello: which part are you; norms: feature norms of nodes, asked for by others
    query.gcn_plan     which rows of other owners do your next steps use
    query.gcn_rows     rows of yours, as bytes, for those who asked
    train.gcn          the inner strategy's training message, with the rows in it
    evaluate.gcn       the same for evaluation

Scalars stand in one ConfigRecord; every list of ids and every block of rows is one frame, which the server passes on as
it came: what it costs on one link it costs on the other. What is said is checked here by name and type; what the bytes
of a frame mean, by those who read them.

A frame has a kind and a place. The place is a part of the graph: towards a requester and from one it says whose the
rows are, towards an owner and from one it says who wants them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final, Self

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedcomp.flower.payload import PayloadError, put_frame, take_frame
from fedcomp.graphs.base import StepPlan
from fedcomp.graphs.settings import MOST_LAYERS

SETUP: Final = "gcn_setup"
PLAN: Final = "gcn_plan"
ROWS: Final = "gcn_rows"
GCN: Final = "gcn"
"""Actions of the messages; ``query.``, ``train.`` or ``evaluate.`` before them makes their types."""

HEADER: Final = "fedcomp.gcn"
"""Name of the ConfigRecord with what a message says beside its frames."""

FIGURES: Final = "metrics"
"""Name of the MetricRecord of a plan."""

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

_LONGEST_NAME: Final = 256
_LONGEST_SAMPLER: Final = 4096
"""Characters of a session's or a codec's name, and of a sampler's description."""

_LISTS: Final = {"tuple[int, ...]": int}
_SCALARS: Final = {"str": str, "int": int, "float": float, "bool": bool}


class _Said:
    """A dataclass that is one record: every field an entry of its own name and type, nothing else beside them."""

    _optional: ClassVar[tuple[str, ...]] = ()
    """Numbers that are 0 in most messages, and cost nothing there."""

    def to_record(self) -> ConfigRecord:
        """Return it as a record."""
        entries: dict[str, Any] = {}
        for name, value in asdict(self).items():  # type: ignore[call-overload]
            # Flower cannot measure a record with an empty list or text in it.
            if value not in ((), "") and not (name in self._optional and not value):
                entries[name] = list(value) if isinstance(value, tuple) else value
        return ConfigRecord(entries)

    def put(self, content: RecordDict) -> None:
        """Write it under :data:`HEADER`."""
        content[HEADER] = self.to_record()

    @classmethod
    def of(cls, message: Message) -> Self:
        """Return what a message says.

        Raises
        ------
        PayloadError
            When it says nothing of the kind, has entries of other names or types, or out of range.
        """
        found = message.content.get(HEADER) if message.has_content() else None
        if not isinstance(found, ConfigRecord):
            raise PayloadError(f"the message has no record {HEADER!r}: it does not come from a graph run")
        values: dict[str, Any] = {}
        wrong = []
        for entry in fields(cls):  # type: ignore[arg-type]
            kind = str(entry.type)
            if kind in _LISTS:
                value: Any = found.get(entry.name, [])
                fits = isinstance(value, list) and all(type(item) is _LISTS[kind] for item in value)
                values[entry.name] = tuple(value) if fits else ()
            else:
                value = found.get(entry.name, "" if kind == "str" else 0 if entry.name in cls._optional else None)
                # type() and not isinstance(): True is an int.
                fits = type(value) is _SCALARS[kind]
                values[entry.name] = value
            if not fits:
                wrong.append(entry.name)
        unknown = sorted(set(found) - set(values))
        if wrong or unknown:
            raise PayloadError(
                f"record {HEADER!r} is no {cls.__name__}: entries {wrong or unknown} are missing, unknown or of "
                "another type; server and client are of different versions"
            )
        made = cls(**values)
        reason = made.refuses()
        if reason:
            raise PayloadError(f"record {HEADER!r} is no {cls.__name__}: {reason}")
        return made

    def refuses(self) -> str:
        """Return why the values are out of range; empty when they are not."""
        return ""


@dataclass(frozen=True)
class Setup(_Said):
    """What ``query.gcn_setup`` asks.

    Attributes
    ----------
    session : str
        Names the run.
    action : {"hello", "norms"}
        Who are you (answered by :class:`Hello`); or the feature norms of the nodes in the frames ``ids/{requester}``,
        answered by ``norms/{requester}``.
    norms : bool
        Of a hello: name the remote nodes whose norms the sampler uses, in frames ``ids/{owner}``.
    layers : int
        Of a hello with ``norms``: how many hops away they may be.
    """

    session: str
    action: str
    norms: bool = False
    layers: int = 1

    def refuses(self) -> str:
        if reason := _no_name("session", self.session):
            return reason
        if self.action not in ("hello", "norms"):
            return f"action {self.action!r} is neither 'hello' nor 'norms'"
        return "" if 1 <= self.layers <= MOST_LAYERS else f"a model of {self.layers} layers"


@dataclass(frozen=True)
class Hello(_Said):
    """What an owner says of itself.

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

    digest: str
    index: int
    parts: int
    nodes: int
    owned: int
    train: int
    test: int
    features: int
    structure: str

    def refuses(self) -> str:
        if not 1 <= self.parts <= MOST_PARTS or not 0 <= self.index < self.parts:
            return f"part {self.index} of {self.parts}"
        if not self.digest or self.structure not in ("full", "halo"):
            return f"digest {self.digest!r}, structure {self.structure!r}"
        if self.features < 1 or min(self.train, self.test) < 0 or not max(self.train, self.test) <= self.owned:
            return f"{self.owned} nodes of {self.features} features, {self.train} to learn from, {self.test} for tests"
        return "" if self.owned <= self.nodes else f"{self.owned} nodes of a graph of {self.nodes}"


@dataclass(frozen=True)
class Ask(_Said):
    """What a plan, a training and an evaluation message say; the same word for word in all messages of one turn.

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
        How many feature norms of other owners' nodes the client was told in this run, for a sampler that uses them.
        Who has fewer has lost its state, and says so.
    hop : int
        How many exchanges of adjacency rows have gone before, in this turn.
    """

    _optional: ClassVar[tuple[str, ...]] = ("norms",)

    session: str
    seed: int
    round: int
    purpose: str
    steps: int
    batch_size: int
    sampler: str
    row_codec: str
    cache: str = "none"
    cache_bytes: int = 0
    noise: float = 0.0
    absent: tuple[int, ...] = ()
    scale: float = 0.0
    norms: int = 0
    hop: int = 0

    @property
    def turn(self) -> int:
        """Place of this round's training or evaluation in the order of a session."""
        return 2 * self.round + (self.purpose == "evaluate")

    def refuses(self) -> str:
        if reason := _no_name("session", self.session) or _no_name("row codec", self.row_codec):
            return reason
        if self.purpose not in ("train", "evaluate"):
            return f"purpose {self.purpose!r} is neither 'train' nor 'evaluate'"
        low = min(self.batch_size, self.cache_bytes, self.norms, self.hop) < 0
        if low or not 0 <= self.round < MOST_ROUNDS or not 1 <= self.steps <= MOST_STEPS:
            return (
                f"round {self.round}, {self.steps} steps (at most {MOST_STEPS}), batches of {self.batch_size}, a cache "
                f"of {self.cache_bytes} bytes, {self.norms} norms, hop {self.hop}"
            )
        if len(self.sampler) > _LONGEST_SAMPLER:
            return f"a description of a sampler of {len(self.sampler)} characters, at most {_LONGEST_SAMPLER}"
        if self.cache not in ("none", "lru", "all"):
            return f"cache {self.cache!r} is none of 'none', 'lru', 'all'"
        if not 0.0 <= self.noise < math.inf or not (self.scale == 0.0 or 1.0 <= self.scale < math.inf):
            return f"noise {self.noise}, scale {self.scale}"
        if any(a >= b for a, b in zip((-1, *self.absent), self.absent, strict=False)):
            return f"absent owners {self.absent[:8]} are not ascending part numbers"
        return ""


@dataclass(frozen=True)
class Needs(_Said):
    """What a plan comes to: frames ``ids/{owner}`` name the rows it needs, and of which kind.

    Attributes
    ----------
    needs : {"rows", "structure", "norms"}
        Feature rows, and the plan is complete; or rows of the adjacency, or the feature norms it was told before and no
        longer has, and it has to be asked for again. Norms it does not name: who told it knows which.
    hop : int
        That of the question.
    """

    needs: str
    hop: int

    def refuses(self) -> str:
        if self.needs not in (FEATURES, STRUCTURE, NORMS):
            return f"it needs {self.needs[:64]!r}, which is none of {FEATURES!r}, {STRUCTURE!r} and {NORMS!r}"
        return "" if self.hop >= 0 else f"hop {self.hop}"


@dataclass(frozen=True)
class Fetch(_Said):
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

    session: str
    kind: str
    row_codec: str = ""
    noise: float = 0.0
    norms: bool = False

    def refuses(self) -> str:
        if reason := _no_name("session", self.session):
            return reason
        if self.kind not in (FEATURES, STRUCTURE):
            return f"kind {self.kind!r} is neither {FEATURES!r} nor {STRUCTURE!r}"
        if not 0.0 <= self.noise < math.inf:
            return f"noise {self.noise}"
        return _no_name("row codec", self.row_codec) if self.kind == FEATURES else ""


@dataclass(frozen=True)
class Refused(_Said):
    """Whom an owner gives nothing, beside the frames for all others: one wrong list must not cost everybody's rows.

    Attributes
    ----------
    requesters : tuple of int
        Ascending.
    reason : str
        Of the first.
    """

    requesters: tuple[int, ...]
    reason: str

    def refuses(self) -> str:
        if any(a >= b for a, b in zip((-1, *self.requesters), self.requesters, strict=False)):
            return f"requesters {self.requesters} are not ascending part numbers"
        return "" if self.requesters else "nobody is refused"

    @classmethod
    def among(cls, message: Message) -> Self | None:
        """Return whom a reply with rows refuses, None when it refuses nobody.

        Raises
        ------
        PayloadError
            When it says something else.
        """
        return cls.of(message) if message.has_content() and HEADER in message.content else None


def put_frames(content: RecordDict, kind: str, frames: Mapping[int, bytes]) -> None:
    """Write frames of one kind by place.

    Raises
    ------
    PayloadError
        For a kind or a place that is none.
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
        When there is a frame of another kind, at another place or at one place twice, or something that is no frame.
    """
    if not message.has_content():
        raise PayloadError("the message is an error and carries no frames")
    found: dict[str, dict[int, bytes]] = {kind: {} for kind in kinds}
    for name in message.content:
        head, slash, rest = name.partition("/")
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
class Figures:
    """What the plans of one turn came to, on one client.

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
        lambda and s, means over steps and layers; of layers without candidates nothing is counted, and 0 and 1 where
        there is no other.
    lost_mass : float
        Share of the base weight that absent owners take away: the largest of a step's layers, mean over steps.
    """

    steps: int
    examples: int
    inputs: int
    remote_inputs: int
    wanted: int
    candidates: int
    expected_remote: float
    local_mass: float
    scale: float
    lost_mass: float

    @classmethod
    def of_plans(cls, plans: Iterable[StepPlan], wanted: int) -> Self:
        """Return the figures of some steps."""
        steps = list(plans)
        layers = [layer for step in steps for layer in step.layers if layer.candidates]
        mean = _mean
        return cls(
            len(steps),
            sum(len(step.batch) for step in steps),
            sum(len(step.inputs) for step in steps),
            sum(len(step.remote) for step in steps),
            int(wanted),
            sum(layer.candidates for layer in layers),
            float(sum(step.layers[0].expected_remote for step in steps)),
            mean([layer.local_mass for layer in layers if not math.isnan(layer.local_mass)], 0.0),
            mean([layer.scale for layer in layers], 1.0),
            mean([max(layer.lost_mass for layer in step.layers) for step in steps], 0.0),
        )

    def put(self, content: RecordDict) -> None:
        """Write them under :data:`FIGURES`."""
        content[FIGURES] = MetricRecord(asdict(self))

    @classmethod
    def of(cls, message: Message) -> Self:
        """Return the figures of a plan's reply.

        Raises
        ------
        PayloadError
            When there are none, others, of another type, negative or not finite.
        """
        found = message.content.get(FIGURES) if message.has_content() else None
        if not isinstance(found, MetricRecord):
            raise PayloadError(f"the reply has no record {FIGURES!r}: it is no plan's")
        form = {entry.name: _SCALARS[str(entry.type)] for entry in fields(cls)}
        values: dict[str, Any] = dict(found)
        wrong = [name for name, kind in form.items() if type(values.get(name)) is not kind]
        if wrong or len(values) != len(form):
            raise PayloadError(
                f"record {FIGURES!r} does not tell of a plan: entries {wrong or sorted(set(values) - set(form))} are "
                "missing, unknown or of another type"
            )
        odd = [name for name, value in values.items() if not 0 <= value < math.inf]
        if odd:
            raise PayloadError(f"figures {odd} of a plan are negative or not finite: {values}")
        return cls(**values)


def _no_name(what: str, name: str) -> str:
    """Return why ``name`` is none, empty when it is one."""
    if not name:
        return f"the {what} has no name"
    return "" if len(name) <= _LONGEST_NAME else f"the name of the {what} has {len(name)} characters"


def _mean(values: list[float], otherwise: float) -> float:
    return float(sum(values) / len(values)) if values else otherwise
