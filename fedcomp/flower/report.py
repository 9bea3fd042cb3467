"""The report of a round: one format for all strategies, which systems extend with fields.

A :class:`Report` has what all rounds have: who was asked, whose update is used, what was refused and why, bytes and
seconds, and figures by node. A system declares what it has beside that as a :class:`ReportSection`, a dataclass of
:func:`figure` fields, found in the report by its name: ``report.coded.included``. A field says once how it is written
into a run's records and whether a private run may show it; nobody else keeps lists of names.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeVar

from flwr.app import MetricRecord

from fedcomp.codecs import Codec
from fedcomp.codecs.positional import DENSE_REST
from fedcomp.flower.store import Lasting
from fedcomp.layout import Layout
from fedcomp.plain import PlainError, fields_of, from_fields, from_plain
from fedcomp.wire import FrameSizes

S = TypeVar("S", bound="ReportSection")

MAX_REASON: Final = 300
"""Characters of a reason that a report keeps."""

SETTLED: Final = 64
"""Rounds after which nothing comes any more that could change a report."""

MAX_REASONS: Final = 100
"""How many reasons of one kind a section keeps."""

WITHHELD: Final = "private, who took part is withheld: the stated epsilon assumes that it stays secret"
"""What log and report say of a round whose participants are secret."""

Show = Literal["value", "count", "reasons", "texts", "spread", "means", "table", "total", "flat", "seconds", "none"]


def figure(default: Any = 0, *, unit: str = "", public: bool = False, show: Show = "value") -> Any:
    """Return a dataclass field that says how it is shown.

    Parameters
    ----------
    default : object or callable
        The value of a new report; a callable makes it.
    unit : str
        What it counts: "bytes", "nodes", "seconds".
    public : bool
        Whether a private run that may say who took part shows it. Sizes of memories, changed coordinates and the
        reasons that clients give depend on their data, and no privacy ledger accounts for them.
    show : str
        How a run's record holds it. "value": as it is; "count": its length; "reasons": its length, and beside it, where
        there are any, the distinct texts, under the name with ``_because``, which no private run shows; "texts": the
        texts alone, in order; "spread": mean and largest of its values; "means": of figures by name and node, an entry
        for each name, the mean over nodes; "table": the mapping, where it is not empty;
        "total": the sum of its values; "flat": one entry for each of its keys, a number as its value and a list as
        reasons; "seconds": not there, but in the run's notes, since times never repeat; "none": not at all, as for all
        that names nodes, whose ids mean nothing after a run.
    """
    # A time never repeats: two reports that differ in it are equal.
    compare = show != "seconds"
    made: dict[str, Any] = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, compare=compare, metadata={"unit": unit, "public": public, "show": show})


def shorten(text: str) -> str:
    """Return ``text`` cut to what a report keeps: reasons come from clients, and reports are kept for the whole run."""
    text = str(text)
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 3]}..."


def _shown(name: str, value: Any, show: Show) -> Iterator[tuple[str, Any]]:
    """Yield the entries of one field in a run's record."""
    if show == "value":
        yield name, value
    elif show == "count":
        yield name, len(value)
    elif show == "reasons":
        reasons = value.values() if isinstance(value, dict) else [value] if isinstance(value, str) else value
        found = [reason for reason in reasons if reason]
        yield name, len(found)
        if found:
            yield f"{name}_because", sorted(set(found))
    elif show == "texts" and value:
        yield name, list(value)
    elif show == "spread" and value:
        values = list(value.values())
        # Divided first: clients may claim any finite ratio, and the sum of such ratios might not be finite.
        yield f"{name}_mean", sum(each / len(values) for each in values)
        yield f"{name}_max", max(values)
    elif show == "means":
        for key in sorted(value):
            yield f"{name}.{key}", sum(each / len(value[key]) for each in value[key].values())
    elif show == "table" and value:
        yield name, dict(value)
    elif show == "total":
        yield name, sum(value.values())
    elif show == "flat":
        # Beside the field, not below it: an event of the coded system is "coded.lost", not "coded.events.lost".
        prefix = name.rpartition(".")[0]
        for key in sorted(value):
            yield from _shown(f"{prefix}.{key}", value[key], "reasons" if isinstance(value[key], list) else "value")


class _Figures:
    """Common base of reports and their sections; subclasses define the fields."""

    def _figures(self, prefix: str, *, public: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for each in fields(self):  # type: ignore[arg-type]
            show = each.metadata.get("show", "none")
            if public and not each.metadata.get("public"):
                continue
            found |= _shown(f"{prefix}.{each.name}", getattr(self, each.name), show)
        return {name: value for name, value in found.items() if not (public and name.endswith("_because"))}

    def _times(self, prefix: str) -> dict[str, float]:
        # Apart from the figures: those of two equal runs are equal, times never are.
        named = [each.name for each in fields(self) if each.metadata.get("show") == "seconds"]  # type: ignore[arg-type]
        return {f"{prefix}.{name}": value for name in named if (value := getattr(self, name))}


@dataclass
class ReportSection(_Figures):
    """One system's section of a round's report: a dataclass whose fields are :func:`figure`.

    Attributes
    ----------
    round : int

    Examples
    --------
    >>> @dataclass
    ... class Waiting(ReportSection, name="waiting"):
    ...     waves: int = figure(unit="exchanges", public=True)
    >>> report = Report(1)
    >>> report.section(Waiting).waves += 2
    >>> report.waiting.waves, report.figures(public=True)["waiting.waves"]
    (2, 2)
    """

    name: ClassVar[str] = ""
    known: ClassVar[dict[str, type[ReportSection]]] = {}

    round: int = figure(show="none")

    def __init_subclass__(cls, *, name: str = "") -> None:
        """Make the section known by its name, which reports are restored by; without a name it is a base of others."""
        cls.name = name
        if name:
            ReportSection.known[name] = cls

    def figures(self, *, public: bool = False) -> dict[str, Any]:
        """Return what a run's record shows of the section; with ``public`` that alone which a private run may show."""
        return self._figures(self.name, public=public)

    def times(self) -> dict[str, float]:
        """Return the seconds that something took, where it did."""
        return self._times(self.name)

    def metrics(self) -> MetricRecord:
        """Return the figures that are numbers, as the metrics of a round."""
        return MetricRecord({k: v for k, v in self.figures().items() if isinstance(v, int | float)})

    def to_json(self) -> dict[str, Any]:
        """Return the section as a JSON-able dictionary."""
        return fields_of(self)

    def line(self) -> str:
        """Return the section in a few words for the round's line in the log; default nothing."""
        return ""


@dataclass
class EventSection(ReportSection):
    """A section in which things happen that are named by their kind.

    Attributes
    ----------
    events : dict of str to list of str
        What happened, by kind, each with its reason.
    """

    events: dict[str, list[str]] = figure(dict, show="flat")

    def note(self, kind: str, reason: str) -> None:
        """Add an event; a flood of one kind is cut."""
        reasons = self.events.setdefault(kind, [])
        if len(reasons) < MAX_REASONS:
            reasons.append(shorten(reason))


@dataclass
class Report(_Figures):
    """The report of one round, by node id.

    Attributes
    ----------
    round : int
    asked : int
        Messages sent.
    used : int
        Updates that are in the new model; 0 when the model was kept.
    compressed, plain : int
        Updates that arrived as frames, and as ordinary arrays from clients without the mod.
    without_mod : list
        Clients that sent ordinary arrays without a reason: their app lacks the mod. Those with a reason are in
        ``unsupported``.
    lost : int
        Messages without any reply in time.
    refused : dict
        Replies that could not be used, error replies among them, with the reason.
    unsupported : dict
        Clients that have the mod but could not use the codec, with their reason.
    rolled_back, fresh : list
        Clients that put an unacknowledged update back into their memory; clients whose memory began in this round.
    duplicates, unmatched : int
        Second replies of a node, and replies without a request.
    changed : int
        Compressible coordinates that the round's updates together changed: of the summed update those that are not
        zero; where the inner strategy gets dense replies, those that at least one of them changed. Sparse updates of
        many clients build up: from k when all send the same coordinates to clients times k.
    tensor_bytes : dict
        Bytes of each tensor of the frame, entry, indices and values, in all frames of the round together. Only of a
        codec that works by layer (such as ``TopK(scope="layer")``) these are the model's tensors. All others put what
        they compress into one tensor of the frame, which does not say how many bytes belong to which of the model's:
        of these it is "the compressed part" and "the dense rest".
    padded_bytes : int
        Length of every client's frame in a private round, padding included; 0 where frames are as long as their
        updates make them.
    memory : dict
        ‖memory‖ / ‖update‖ of the clients that report it: it stays bounded as long as unsent parts are sent later.
    frames : dict of str to dict
        Properties of the frames that a codec reports, by name and node, such as the ranks of their matrices.
    remarks : dict
        Clients' remarks on updates that could not be sent in their codec's preferred form, with the reason.
    payload_bytes, model_bytes : int
        Payload of the replies that passed all checks, and the size of as many full models.
    frame_bytes, dense_bytes : int
        Bytes of their frames, and how many of these travelled dense: the dense rest of an update and the tensors that
        travel as values; all of them with a lossless codec.
    seconds : float
        Time in which the server checked, decoded and aggregated. It is ignored when reports are compared.
    norms, weights : dict
        Euclidean norm of each update as it arrived (of a vote, of the vote), and the weight it was given with: of all
        that could be used, those a guard then refused included. Empty in private rounds that bound every update (all
        but those of local privacy), and where sums are decoded instead of updates.
    sections : dict of str to ReportSection
        Additional sections of systems, by name; ``report.coded`` is the section "coded".
    missed : set of int
        While the round lasts: the nodes that left one message or several without a reply in time.
    """

    round: int
    asked: int = figure(unit="nodes", show="none")
    used: int = figure(unit="nodes", show="none")
    compressed: int = figure(unit="nodes", public=True)
    plain: int = figure(unit="nodes", public=True)
    without_mod: list[int] = figure(list, unit="nodes", show="none")
    lost: int = figure(unit="nodes", public=True)
    duplicates: int = figure(unit="messages", public=True)
    unmatched: int = figure(unit="messages", show="none")
    refused: dict[int, str] = figure(dict, unit="nodes", public=True, show="reasons")
    unsupported: dict[int, str] = figure(dict, unit="nodes", public=True, show="reasons")
    rolled_back: list[int] = figure(list, unit="nodes", public=True, show="count")
    fresh: list[int] = figure(list, unit="nodes", public=True, show="count")
    notes: list[str] = figure(list, show="texts")
    changed: int = figure(unit="coordinates")
    tensor_bytes: dict[str, int] = figure(dict, unit="bytes", show="table")
    padded_bytes: int = figure(unit="bytes", show="none")
    memory: dict[int, float] = figure(dict, show="spread")
    frames: dict[str, dict[int, float]] = figure(dict, show="means")
    remarks: dict[int, str] = figure(dict, unit="nodes", show="reasons")
    payload_bytes: int = figure(unit="bytes", show="none")
    model_bytes: int = figure(unit="bytes", show="none")
    frame_bytes: int = figure(unit="bytes", show="none")
    dense_bytes: int = figure(unit="bytes", show="none")
    seconds: float = figure(0.0, unit="seconds", show="seconds")
    norms: dict[int, float] = figure(dict, show="none")
    weights: dict[int, float] = figure(dict, show="none")
    sections: dict[str, ReportSection] = field(default_factory=dict)
    missed: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    concluded: bool = field(default=False, init=False, repr=False, compare=False)
    _lasting: Lasting | None = field(default=None, init=False, repr=False, compare=False)

    if not TYPE_CHECKING:  # or no attribute of this class would be checked

        def __getattr__(self, name: str) -> ReportSection:
            """Return the section of a name."""
            # Through __dict__: while a copy is made there are no sections, and asking for them would end here again.
            sections = self.__dict__.get("sections", {})
            if name not in sections:
                raise AttributeError(f"the report has no field or section {name!r}; its sections: {sorted(sections)}")
            return sections[name]

    @property
    def ratio(self) -> float:
        """The compression ratio of the replies against full models; 0 without replies."""
        return self.model_bytes / self.payload_bytes if self.payload_bytes else 0.0

    def section(self, kind: type[S]) -> S:
        """Return the system's own section, created if the report has none yet."""
        found = self.sections.setdefault(kind.name, kind(self.round))
        assert isinstance(found, kind)
        return found

    def withhold(self) -> None:
        """Remove, in place, everything that depends on who took part."""
        blank = Report(self.round, padded_bytes=self.padded_bytes, notes=[WITHHELD])
        for entry in fields(self):
            # Not what is no constructor's argument: ``concluded`` has to stay.
            if entry.init:
                setattr(self, entry.name, getattr(blank, entry.name))
        self.missed = set()

    def refuse(self, node: int, reason: str) -> None:
        """Record that the reply of ``node`` was not used."""
        self.refused[node] = shorten(reason)

    def account(self, codec: Codec, layout: Layout, frames: Iterable[FrameSizes], *, exact_bytes: int = 0) -> None:
        """Add up how many bytes of frames of ``codec`` each tensor took, and how many were dense.

        ``exact_bytes`` are those of the frames beside them, of tensors that travel as values.
        """
        names = codec.tensor_names(layout)
        # Buffers that travel as values are never compressed: all their bytes count as dense.
        self.frame_bytes += exact_bytes
        self.dense_bytes += exact_bytes
        for frame in frames:
            self.frame_bytes += frame.frame
            self.dense_bytes += frame.frame if codec.lossless else 0
            for name, size in zip(names, frame.tensors, strict=True):
                self.tensor_bytes[name] = self.tensor_bytes.get(name, 0) + size
                self.dense_bytes += size if name == DENSE_REST else 0

    def figures(self, *, public: bool = False) -> dict[str, Any]:
        """Return what a run's record shows of the round, those of its sections included.

        Parameters
        ----------
        public : bool
            That alone which a private run may show.
        """
        found = self._figures("report", public=public)
        for section in self.sections.values():
            found |= section.figures(public=public)
        return found

    def reasons(self) -> list[str]:
        """Return the distinct reasons that :meth:`figures` gives: for the server, not for release."""
        return [text for name, texts in self.figures().items() if name.endswith("_because") for text in texts]

    def times(self) -> dict[str, float]:
        """Return the seconds that the server spent on the round, by what they were spent on."""
        found = self._times("report")
        for section in self.sections.values():
            found |= section.times()
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-able dictionary; node ids become strings, as JSON keys are."""
        return fields_of(self)

    def lasting(self) -> Lasting:
        """Return the report as a lasting value, always the same one."""
        if self._lasting is None:
            self._lasting = Lasting(self.to_json)
        return self._lasting

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Report:
        """Restore what :meth:`to_json` returned.

        Raises
        ------
        PlainError
            When it is not a report.
        """
        given = dict(value)
        sections = from_plain(dict[str, dict], given.get("sections"), "sections")
        if unknown := sorted(set(sections) - set(ReportSection.known)):
            raise PlainError(f"the report has unknown sections {unknown[:5]}; known: {sorted(ReportSection.known)}")
        # Sections are read by their own classes, which the field's type does not name.
        report = from_fields(cls, {**given, "sections": {}}, "report")
        report.sections = {name: from_fields(ReportSection.known[name], part, name) for name, part in sections.items()}
        return report


class Reports(dict[int, Report]):
    """Reports by round."""

    def begin(self, server_round: int) -> Report:
        """Return a new report, in place of any that the round had."""
        report = self[server_round] = Report(server_round)
        return report

    def join(self, server_round: int) -> Report:
        """Return the round's report that a strategy around this one has begun, else a new one."""
        found = self.get(server_round)
        # The concluded report of an earlier run is replaced: adding to it would count the round twice.
        return self.begin(server_round) if found is None or found.concluded else found

    def before(self, server_round: int) -> list[Report]:
        """Return the reports of earlier rounds, in their order."""
        return [self[number] for number in sorted(self) if number < server_round]

    def sections(self, name: str) -> dict[int, Any]:
        """Return the sections of a name by round, of the rounds that have it."""
        return {number: report.sections[name] for number, report in self.items() if name in report.sections}

    def _repr_html_(self) -> str:
        """Return a table for notebooks with a row for each round; secret values stay hidden."""
        titles = ("round", "asked", "used", "refused", "lost", "payload bytes", "times fewer", "notes")
        rows = [
            (r.round, r.asked, r.used, len(r.refused), r.lost, f"{r.payload_bytes:,}", f"{r.ratio:.3g}", _because(r))
            for _, r in sorted(self.items())
        ]
        lines = [("th", titles), *(("td", row) for row in rows)]
        cells = ("".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in line) for tag, line in lines)
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"

    def to_json(self) -> dict[str, Any]:
        """Return the reports as plain data; those that will not change any more are lasting values."""
        newest = max(self, default=0)
        return {
            str(number): report.lasting() if report.concluded or number < newest - SETTLED else report.to_json()
            for number, report in self.items()
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Reports:
        """Restore what :meth:`to_json` returned.

        Raises
        ------
        PlainError
            When it holds something else.
        """
        if isinstance(value, Mapping):
            value = {number: each.read() if isinstance(each, Lasting) else each for number, each in value.items()}
        return cls(from_plain(dict[int, Report], value, "reports"))


def _because(report: Report) -> str:
    return "; ".join([*report.notes, *sorted(set(report.refused.values()))])


def reports_of(strategy: object, otherwise: Reports) -> Reports:
    """Return a strategy's reports of training; ``otherwise`` where it makes none, as Flower's own do."""
    found = getattr(strategy, "reports", None)
    return found if isinstance(found, Reports) else otherwise
