"""The pages of the reference: which name stands where, its docstring and verdict, and what its options may be."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

from roles import linked

import fedcomp
from fedcomp.experiments import program
from fedcomp.experiments.systems import SYSTEMS as ROWS
from fedcomp.gossip import ALGORITHMS, AVERAGING
from fedcomp.rules import Rule, rules_of
from fedcomp.systems import SYSTEMS
from fedcomp.verdicts import VERDICTS, Verdict

VERDICT_OF: Final = {
    name: verdict
    for section in VERDICTS.values()
    for key, verdict in section.items()
    for name in (key, re.sub(r"[-_ ]", "", key).lower())
}
"""Verdicts by their name, and by that name as a class would spell it, in small letters."""

KNOWN_AS: Final = {
    "CodedFedAvg": "relay-mds",
    "CodedLinearGD": "coded-linear",
    "FittedBasis": "gradiveq",
    "ForwardGradients": "forward",
    "LearnedGradients": "lgc",
    "SharedBasis": "power-sgd",
    "SharedSupport": "scalecom",
}
"""Classes of `fedcomp` that a row of another name builds: the verdict is the row's."""


class Area(NamedTuple):
    """One page of the reference.

    ``modules`` are those whose names in ``import fedcomp as fc`` stand here; the longest prefix of a module decides.
    ``also`` are dotted names of other things that the pages use or that contributors derive from.
    """

    title: str
    about: str
    modules: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


def of(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names)


AREAS: Final[Mapping[str, Area]] = {
    "codecs": Area(
        "Codecs and policies",
        "Codecs that compress updates, and policies that choose the tensors to compress.",
        ("fedcomp.codecs", "fedcomp.layout"),
        (
            *of("fedcomp.codecs", "get_codec", "register"),
            *of("fedcomp.layout", "Layout", "TensorSpec", "Update"),
            "fedcomp.rng.Key",
        ),
    ),
    "strategies": Area("Strategies", "The server's side.", ("fedcomp.strategies",)),
    "clients": Area(
        "Clients",
        "The clients' side.",
        (*of("fedcomp", "clients", "factors", "forward", "adapters"), "fedcomp.flower.records"),
    ),
    "coding": Area(
        "Coded rounds",
        "Updates stored as coded shards on other clients, secure sums, and codes over finite fields.",
        ("fedcomp.strategies.coded", "fedcomp.clients.coded"),
        (
            "fedcomp.coding.encoder.encoder",
            "fedcomp.coding.decoder.Decoder",
            "fedcomp.coding.rlnc.Recoder",
            *of("fedcomp.coding.packet", "Packet", "PacketLimits"),
            *of("fedcomp.coding.relay", "RelayPlan", "Collector"),
            *of("fedcomp.coding.sumcode", "SumPlan", "contribution", "shares", "decode", "prime_for"),
            *of("fedcomp.coding.datacode", "DataPlan", "CodedStep", "data_plan", "encode_rows"),
            *of("fedcomp.coding.gradcode", "Assignment", "FractionalRepetition", "Cyclic", "assignment"),
        ),
    ),
    "gossip": Area(
        "Gossip",
        "Decentralised learning without a central model: algorithms, graphs and the simulation.",
        ("fedcomp.strategies.gossip", "fedcomp.clients.gossip"),
        (
            *(place.replace(":", ".") for place in (*ALGORITHMS.values(), *AVERAGING.values())),
            *of("fedcomp.gossip.topology", "Ring", "DirectedRing", "Exponential", "OnePeerExponential", "Complete"),
            *of("fedcomp.gossip.topology", "Torus", "RandomDigraph", "Edges", "topology_of"),
            *of("fedcomp.gossip_simulation", "simulate", "SimulationSettings", "FaultPlan", "GossipOutcome"),
            *of("fedcomp.gossip.base", "Algorithm", "GossipMessage", "View"),
            *of("fedcomp.gossip.vector", "GossipPolicy", "flatten", "unflatten"),
        ),
    ),
    "graphs": Area(
        "Graphs of several owners",
        "Graph convolutions on a graph whose parts belong to different owners.",
        ("fedcomp.strategies.gcn", "fedcomp.clients.gcn"),
        ("fedcomp.graphs.base.GraphPart", "fedcomp.graphs.settings.SamplerSettings"),
    ),
    "privacy": Area(
        "Privacy",
        "Private strategies, their client halves, and privacy accounting.",
        ("fedcomp.strategies.private", "fedcomp.clients.private", "fedcomp.privacy", "fedcomp.systems.private"),
        (
            *of("fedcomp.strategies.private.settings", "VoteSettings", "TeacherSettings"),
            "fedcomp.privacy.local.LocalPolicy",
            "fedcomp.privacy.ledger.PrivacyLedger",
            "fedcomp.privacy.statement.Statement",
            *of("fedcomp.privacy.accounting", "Cost", "compose", "noise_multiplier_for", "releases_for"),
            "fedcomp.privacy.distributed.DistributedSum",
            "fedcomp.privacy.bounded.BoundedFixedPoint",
        ),
    ),
    "running": Area(
        "Running and counting",
        "In-process grids, injected faults, byte counts and reports.",
        ("fedcomp.flower", "fedcomp.experiments.advise"),
        (
            *of("fedcomp.experiments.advise", "Advice", "Candidate"),
            *of("fedcomp.flower.report", "Report", "ReportSection"),
            *of("fedcomp.flower.ledger", "TrafficLedger", "wire_bytes"),
        ),
    ),
    "program": Area(
        "Programs and rules",
        "Building blocks of a new system: its two halves, the messages between them, and rules of fields.",
        (),
        (
            *of("fedcomp.program", "System", "Now", "Me", "Step", "Given", "Mean", "Single"),
            *of("fedcomp.asks", "Said", "Ask", "Answer", "AnswerError", "Post", "Wait"),
            *of("fedcomp.local", "Local", "Node"),
            *of("fedcomp.rules", "Configured", "Int", "Size", "Real", "Flag", "OneOf", "Text", "Many", "Maybe", "Made"),
        ),
    ),
    "systems": Area(
        "Systems",
        "One file for each system, with its options and both halves of a round.",
        (),
        tuple(f"fedcomp.systems.{place.replace(':', '.')}" for place in SYSTEMS.values() if isinstance(place, str)),
    ),
    "wire": Area(
        "Frames",
        "The bytes of an update: see [the format](../formats/wire.md).",
        (),
        (
            *of("fedcomp.wire", "encode", "Frame", "Bundle", "Tensor", "FrameSizes", "Expected", "Limits"),
            *of("fedcomp.wire", "dense", "sparse", "seeded", "shared", "pad", "tensor_bytes", "WireError"),
            *of("fedcomp.wire", "available_backends"),
            "fedcomp.wire.decode.decode",
            "fedcomp.wire.longest.longest",
        ),
    ),
    "errors": Area(
        "Errors",
        "All derive from `FedcompError`.",
        ("fedcomp.errors",),
        of("fedcomp.errors", "LayoutError", "NonFiniteUpdate", "StateError"),
    ),
}
"""By the name of the page."""

OPEN: Final = frozenset(
    {
        *of("fedcomp", "Codec", "MeteredGrid", "PositionalCodec", "Transform"),
        *of("fedcomp.program", "Me", "Now", "System"),
        "fedcomp.asks.Said",
        "fedcomp.flower.ledger.TrafficLedger",
        "fedcomp.flower.report.Report",
        "fedcomp.gossip.base.Algorithm",
        "fedcomp.layout.Layout",
        "fedcomp.local.Local",
    }
)
"""Entries whose methods a reader derives from or calls. Of all others, the constructor is the interface."""


def attributes(owner: Any) -> dict[str, str]:
    """Return the texts that stand below assignments in a module or a class, by name."""
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    if inspect.isclass(owner) and isinstance(body[0], ast.ClassDef):
        body = body[0].body
    found: dict[str, str] = {}
    for line, below in itertools.pairwise(body):
        named = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found |= {each.id: inspect.cleandoc(below.value.value) for each in named if isinstance(each, ast.Name)}
    return found


class Entry(NamedTuple):
    """A name of the reference: as it is shown there, what it is, and the module that it is imported from."""

    name: str
    found: Any
    module: str

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def place(self) -> str:
        """Where it is defined, as a dotted name."""
        if inspect.isclass(self.found) or inspect.isfunction(self.found):
            return f"{self.found.__module__}.{self.found.__qualname__}"
        return f"{self.module}.{self.short}"

    @property
    def doc(self) -> str:
        """Its own docstring, empty without one: of a name for a type, the text below the line that gives it."""
        if inspect.isclass(self.found):
            return inspect.cleandoc(vars(self.found).get("__doc__") or "")
        if inspect.isroutine(self.found):
            return inspect.getdoc(self.found) or ""
        return attributes(importlib.import_module(self.module)).get(self.short, "")

    def members(self) -> dict[str, str]:
        """Return the docstrings of what its class defines for others: methods, properties, attributes."""
        found = attributes(self.found)
        for name, member in vars(self.found).items():
            if isinstance(member, property | staticmethod | classmethod) or inspect.isfunction(member):
                found[name] = inspect.getdoc(getattr(self.found, name)) or ""
        return {name: text for name, text in found.items() if text and not name.startswith("_")}

    @property
    def names(self) -> set[str]:
        """The dotted names under which docstrings speak of it: as it is shown, defined, and offered by its package."""
        return {self.name, self.place, f"{self.module.rpartition('.')[0]}.{self.short}"}

    def verdicts(self) -> Iterator[tuple[str, Verdict]]:
        """Yield the verdict on it, and those on its forms, each with its words of code."""
        ids = (vars(self.found).get(key) for key in ("codec_id", "name")) if isinstance(self.found, type) else ()
        for known in (*ids, KNOWN_AS.get(self.short), self.short, self.short.replace("_", "").lower()):
            if isinstance(known, str) and known in VERDICT_OF:
                yield self.short, VERDICT_OF[known]
                break
        yield from ((key, found) for key, found in VERDICT_OF.items() if key.startswith(f"{self.short}("))


def _area_of(module: str) -> str:
    fitting = [(len(p), key) for key, area in AREAS.items() for p in area.modules if f"{module}.".startswith(f"{p}.")]
    if not fitting:
        raise LookupError(f"{module} is on no page of the reference: add it to AREAS of docs/site/reference.py")
    return max(fitting)[1]


def entries() -> dict[str, list[Entry]]:
    """Return the entries of each page, in the order in which they stand there.

    Raises
    ------
    LookupError
        For a name of ``fedcomp`` that no page has, for an entry without a docstring of its own, and for one that is
        called like a module, which builders would show in its place.
    """
    found: dict[str, list[Entry]] = {key: [] for key in AREAS}
    for name, module in fedcomp._PLACES.items():
        found[_area_of(module)].append(Entry(f"fedcomp.{name}", getattr(fedcomp, name), module))
    for key, area in AREAS.items():
        for place in area.also:
            module, _, name = place.rpartition(".")
            found[key].append(Entry(place, getattr(importlib.import_module(module), name), module))
    modules = [e.name for page in found.values() for e in page if e.name in sys.modules]
    if modules:
        raise LookupError(f"modules are called alike, write module.name: {', '.join(modules)}")
    bare = [entry.name for page in found.values() for entry in page if not entry.doc]
    if bare:
        raise LookupError(f"without a docstring: {', '.join(bare)}")
    return found


def names_of(pages: Mapping[str, list[Entry]]) -> dict[str, str]:
    """Return for every dotted name of an entry the name that it has in the reference."""
    return {name: entry.name for page in pages.values() for entry in page for name in entry.names}


def prepared(pages: Mapping[str, list[Entry]]) -> dict[str, str]:
    """Return docstrings as they are shown, by the dotted name of what they describe: links, and verdicts on top."""
    shown = names_of(pages)
    texts: dict[str, str] = {}
    for entry in itertools.chain.from_iterable(pages.values()):
        where = {"module": entry.place.rpartition(".")[0], "owner": entry.place}
        first, _, rest = linked(entry.doc, shown, **where).partition("\n\n")
        boxes = []
        for words, verdict in entry.verdicts():
            title = f"{words}: {verdict.word}".replace('"', "'")
            boxes.append(f'!!! {verdict.word} "{title}"\n    {verdict.reason}')
        texts[entry.place] = "\n\n".join([first, *boxes, rest]).rstrip()
        for name, text in entry.members().items() if entry.name in OPEN else ():
            texts[f"{entry.place}.{name}"] = linked(text, shown, **where)
    return texts


def page(key: str, listed: list[Entry]) -> str:
    """Return a page of the reference: a table of its names, then each with its signature and docstring."""
    area = AREAS[key]
    lines = [f"# {area.title}", "", area.about, "", "| name | verdict | |", "|---|---|---|"]
    for entry in listed:
        word = next((verdict.word for _, verdict in entry.verdicts()), "")
        lines.append(f"| [`{entry.short}`][{entry.name}] | {word} | {_first(entry)} |")
    for entry in listed:
        lines += ["", f"::: {entry.name}"]
        if entry.name in OPEN:
            lines += ["    options:", "      members: true"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return a text as it stands in a cell of a table, where bars inside of code are no borders."""
    parts = re.split(r"(`[^`]*`)", re.sub(r"``([^`]*)``", r"`\1`", " ".join(text.split())))
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in parts)


def _first(entry: Entry) -> str:
    """Return the first paragraph of a docstring, without links."""
    return _cell(linked(entry.doc.partition("\n\n")[0], {}))


def described(doc: str) -> dict[str, tuple[str, str]]:
    """Return type and text of each name in the section "Parameters" of a numpydoc docstring."""
    section = re.search(r"^(?:Parameters|Attributes)\n-+\n(.*?)(?=^\w[^\n]*\n---|\Z)", doc, re.DOTALL | re.MULTILINE)
    named = re.compile(r"^(\w+(?:, \w+)*)(?: : ([^\n]*))?\n((?:[ \n][^\n]*\n?)*)", re.MULTILINE)
    found: dict[str, tuple[str, str]] = {}
    for names, kind, text in named.findall(f"{section[1]}\n" if section else ""):
        found |= dict.fromkeys(names.split(", "), (kind, text))
    return found


def options(entry: Entry, shown: Mapping[str, str]) -> str:
    """Return the table of a class's fields: what each may be, by its rule, its default, and what it means."""
    told = described(entry.doc)
    rules: Mapping[str, Rule] = rules_of(entry.found)
    lines = [f"## {entry.short}", "", f"[`{entry.short}`][{entry.name}]: {_first(entry)}", ""]
    lines += ["| option | may be | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(entry.found):
        if field.init:
            kind, text = told.get(field.name, ("", ""))
            may_be = _cell(str(rules[field.name])) if field.name in rules else _cell(kind)
            default = "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
            meaning = _cell(linked(text, shown, module=entry.module, owner=entry.place))
            lines.append(f"| `{field.name}` | {may_be} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def with_options(listed: list[Entry]) -> list[Entry]:
    """Return the entries that have rules."""
    return [e for e in listed if dataclasses.is_dataclass(e.found) and isinstance(e.found, type) and rules_of(e.found)]


def settings() -> str:
    """Return the page of what every row takes after its name on the command line."""
    lines = [
        "# Settings of systems",
        "",
        "What `--set` and a row of an experiment take, with defaults. Settings of all systems are in "
        "[experiments](../how-to/run-experiments.md#run-one).",
    ]
    for name, row in sorted(ROWS.items()):
        lines += ["", f"## {name}", "", f"{row.title} ({row.paper}): {row.summary}", ""]
        lines += [f"**{row.verdict.word}**: {row.verdict.reason}", ""]
        if row.defaults:
            lines += ["| setting | default |", "|---|---|"]
            lines += [f"| `{key}` | `{value!r}` |" for key, value in row.defaults.items()]
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Return the page of the command line: what each command says of itself."""
    lines = [
        "# Command line",
        "",
        "What an installation has as `fedcomp`. Exit statuses are on the pages of "
        "[experiments](../how-to/run-experiments.md#run-one) and [nodes](../how-to/run-a-node.md#exit-status).",
        "",
        "```text",
        program.USAGE,
        "```",
    ]
    for command in program.COMMANDS:
        if command != "edge":  # another name of "node"
            said = io.StringIO()
            # As wide as a block of code on a page, and without colours.
            with (
                mock.patch.dict(os.environ, {"COLUMNS": "79", "TERM": "dumb", "NO_COLOR": "1"}),
                contextlib.redirect_stdout(said),
                contextlib.suppress(SystemExit),
            ):
                program.main([*command.split(), "--help"])
            text = "\n".join(line.rstrip() for line in said.getvalue().strip().splitlines())
            if not text:
                raise LookupError(f"fedcomp {command} --help says nothing")
            lines += ["", f"## fedcomp {command}", "", "```text", text, "```"]
    return "\n".join(lines) + "\n"


ROOT: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = ("fedcomp", "coding", "strategies", "clients", "experiments")
"""The folders that hold the package, lowest layer first."""


def sentences() -> dict[str, dict[str, str]]:
    """Return the first sentence of every module, by package and by the module's own name, packages in layer order.

    The name of the package itself is empty.

    Raises
    ------
    LookupError
        For a module without a docstring.
    """
    found: dict[str, dict[str, str]] = {}
    bare = []
    for folder in FOLDERS:
        for path in sorted(
            (ROOT / folder).rglob("*.py"), key=lambda each: (each.parent, each.stem != "__init__", each.stem)
        ):
            inside = path.relative_to(ROOT).parent.parts
            package = ".".join(inside if folder == "fedcomp" else ("fedcomp", *inside))
            text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            sentence = re.match(
                r".+?(?<!et al)[.!?](?=\s|$)|.+", " ".join(linked(text.partition("\n\n")[0], {}).split())
            )
            if sentence is None:
                bare.append(path.relative_to(ROOT).as_posix())
                continue
            found.setdefault(package, {})[path.stem.replace("__init__", "")] = sentence[0]
    if bare:
        raise LookupError(f"modules without a docstring: {', '.join(bare)}")
    return found


def modules() -> str:
    """Return the page of all modules: the first sentence that each says of itself, package by package."""
    lines = [
        "# Modules",
        "",
        "The first sentence of every module, package by package. [Architecture](../architecture.md) explains how they "
        "fit together.",
    ]
    for package, said in sentences().items():
        lines += ["", f"## {package}", "", said.get("", ""), "", "| module | |", "|---|---|"]
        lines += [f"| `{name}` | {_cell(text)} |" for name, text in said.items() if name]
    return "\n".join(lines) + "\n"
