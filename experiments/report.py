"""The result of a run as one JSON document, and the wording of its numbers."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.findings import Findings
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.measuring import UNMEASURED, mark
from fedcomp.privacy.statement import Statement

COUNTED = {
    "payload": "Payload is what the system itself wrote: the frames its codec produced, or the tensors as Flower packs "
    "them (one .npy each) where no codec is used.",
    "wire": "Wire is every byte of the serialised Flower messages that carried it: payload, metrics, configuration "
    "and Flower's own envelope, training and evaluation together.",
    "simulated": "Simulated time is computed from the wire bytes and each client's own link (bandwidth and latency; "
    "all clients at once, a round as long as its slowest); it contains no computing time.",
}
"""What the columns mean, in the words every report uses."""

_BYTE_COLUMNS = [f"{way}_{what}_bytes" for way in ("uplink", "downlink", "peer") for what in ("payload", "wire")]
_PACKAGES = ("fedcomp", "flwr", "torch", "numpy", "numba", "scikit-learn")


def _row(spec: RunSpec, result: RunResult) -> dict[str, Any]:
    """Return one row of the table: totals over all rounds and the accuracy after the last evaluated round.

    ``accuracy`` and ``loss`` are ``None`` when nothing was evaluated. The row of a private system also holds its
    statement (``privacy``) and why it made fewer rounds than were asked for (``ended``, empty when it made them all).
    """
    evaluated = [record for record in result.rounds if not math.isnan(record.accuracy)]
    return {
        "system": spec.system,
        "label": spec.label,
        "rounds": sum(record.round > 0 for record in result.rounds),
        "clients": spec.clients,
        "accuracy": evaluated[-1].accuracy if evaluated else None,
        "loss": evaluated[-1].loss if evaluated else None,
        **{name: getattr(result, name) for name in _BYTE_COLUMNS},
        "seconds": result.seconds,
        "simulated_seconds": result.simulated_seconds,
        "replies": sum(record.replies for record in result.rounds),
        "failures": sum(record.failures for record in result.rounds),
        **{key: result.notes[key] for key in ("privacy", "ended") if "privacy" in result.notes},
    }


def summarise(
    experiment: Experiment,
    config: Config,
    specs: Sequence[RunSpec],
    results: Mapping[str, RunResult],
    findings: Findings,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the summary of a run as one JSON-able document.

    ``results`` go by label; ``facts`` are what only the run itself knows: its folder (``run``), its ``definition``,
    when it ``began``, how many ``seconds`` it took, and the ``command`` that repeats it. Each row's ``uplink_ratio`` is
    the baseline's uplink payload over its own, ``None`` where either sent nothing.
    """
    found = findings.to_json()
    for beside in ("answer", "claims"):
        del found[beside]
    rows = [_row(spec, results[spec.label]) for spec in specs]
    baseline = experiment.baseline or (specs[0].label if specs else "")
    sent = {row["label"]: row["uplink_payload_bytes"] for row in rows}
    for row in rows:
        both = sent.get(baseline) and sent[row["label"]]
        row["uplink_ratio"] = sent[baseline] / sent[row["label"]] if both else None
    return {
        "experiment": experiment.name,
        "question": experiment.question,
        "config": config.to_json(),
        "changed": experiment.changed(config),
        "baseline": baseline,
        "rows": rows,
        "findings": found,
        "claims": [claim.to_json() for claim in findings.claims],
        "environment": environment(),
        "data": data_sentence([*(r.notes.get("task", {}) for r in results.values()), *findings.tasks]),
        "notes": experiment.notes,
        **facts,
        "answer": findings.answer,
    }


def rerun(experiment: Experiment, config: Config, program: str = "fedcomp run") -> str:
    """Return the command that asks for ``config`` again, with everything that differs from the defaults.

    Parameters
    ----------
    program : str
        What the command line is called by.
    """
    # Against the defaults of the same mode: --quick has sizes of its own.
    usual = experiment.configure(quick=config.quick)
    words = [*program.split(), experiment.name] + ["--quick"] * config.quick
    for name in ("engine", "rounds", "clients", "seed", "budget"):
        value = getattr(config, name)
        if value != getattr(usual, name):
            words += [f"--{name}", str(value)]
    for key, value in config.settings.items():
        if value != usual.settings[key]:
            words += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    return shlex.join(words)


def environment() -> dict[str, str]:
    """Return the versions and the machine a result depends on."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        **versions,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "finished": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }


class StatedPromise(NamedTuple):
    """What is promised of one row, or of one training of a measurement.

    Attributes
    ----------
    label : str
    statement : Statement
    ended : str
        Why it made fewer rounds than were asked for, as a sentence; empty when it made them all.
    """

    label: str
    statement: Statement
    ended: str = ""

    @property
    def head(self) -> list[str]:
        """The sentences of the statement, and why the row ended."""
        first = self.statement.prose().partition("\n\n")[0]
        return [line for line in [*first.splitlines(), self.ended] if line]

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The facts below them: name and text."""
        facts = self.statement.prose().partition("\n\n")[2].splitlines()
        return [(name, text.strip()) for name, _, text in (line.partition(":") for line in facts if line)]


def promises(summary: Mapping[str, Any]) -> list[StatedPromise]:
    """Return what a run promises: of its private rows, then of what it measured."""
    asked, found = summary["config"]["rounds"], []
    for row in summary["rows"]:
        if "privacy" in row:
            ended = f"Ended after round {row['rounds']} of {asked}: {row['ended']}." if row["ended"] else ""
            found.append(StatedPromise(row["label"], Statement.from_json(row["privacy"]), ended))
    said = summary["findings"].get("statements", {})
    return found + [StatedPromise(label, Statement.from_json(document)) for label, document in said.items()]


def shown_epsilon(value: float) -> str:
    """Return an epsilon for a reader, never rounded down."""
    return "infinite" if math.isinf(value) else f"{math.ceil(value * 1e4) / 1e4:.4f}"


def failed_claims(summary: Mapping[str, Any]) -> list[str]:
    """Return the names of the claims that gate the exit code and did not hold."""
    return [claim["name"] for claim in summary["claims"] if claim["gate"] and not claim["ok"]]


def shortfalls(claims: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return what did not hold, gates before goals, and then what was not measured: its :func:`mark`, and the claim in
    one line."""
    found = []
    for claim in sorted(claims, key=lambda claim: (claim["ok"] is None, not claim["gate"])):
        if claim["ok"] is None:
            found.append((mark(claim), f"{claim['name']}: {claim['skipped']}"))
        elif not claim["ok"]:
            why = f"{number(claim['value'])}, not {claim['op']} {number(claim['bound'])}"
            found.append((mark(claim), f"{claim['name']}: {why}"))
    return found


def count(number_of: int, what: str) -> str:
    """Return ``"1 round"``, ``"2 rounds"``."""
    return f"{number_of} {what}{'s' * (number_of != 1)}"


def percent(fraction: float | None) -> str:
    """Return an accuracy for a reader, a dash when there is none."""
    return "–" if fraction is None or math.isnan(fraction) else f"{100 * fraction:.1f} %"


def ratio(value: float | None) -> str:
    """Return how many times fewer bytes were sent, a dash when that is undefined."""
    if value is None:
        return "–"
    # From 1000 on, .3g would write an exponent.
    return f"{value:.0f}x" if value >= 99.5 else f"{value:.3g}x"


def short_bytes(count: float) -> str:
    """Return a byte count in decimal units, three digits: ``"1.25 MB"``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # From here on three digits would round up to 1000 of the smaller unit.
        if abs(count) >= 0.9995 * size:
            value = count / size
            digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
            text = f"{value:.{digits}f}"
            return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Return a duration for a reader: milliseconds, seconds, minutes or hours."""
    # Each limit is where the rounded figure would get another digit: 1000 ms, 100.0 s.
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{seconds / 3600:.1f} h"


def takes(minutes: float) -> str:
    """Return how long a run takes, for a reader who decides whether to wait; a dash where nobody has measured it."""
    if minutes <= 0.0:
        return "–"
    if minutes < 1.5:
        return f"about {60 * minutes:.0f} s"
    return f"about {minutes:.0f} min" if minutes < 90 else f"about {minutes / 60:.0f} h"


def number(value: float | None) -> str:
    """Return a measured value or a bound with four digits, whole and large numbers in full."""
    if value is None or math.isnan(value):
        return UNMEASURED
    if math.isinf(value):
        return str(value)
    if (value == int(value) or abs(value) >= 1e4) and abs(value) < 1e15:
        return f"{round(value):,}".replace(",", " ")
    return f"{value:.4g}"


def aligned(values: Sequence[float | str | None]) -> list[str]:
    """Return the cells of a column for a reader: :func:`number` with equally many decimals where they are few."""
    texts = ["–" if value is None else value if isinstance(value, str) else number(value) for value in values]
    numbers = [value for value in values if isinstance(value, int | float)]
    plain = [text for text, value in zip(texts, values, strict=True) if isinstance(value, int | float)]
    decimals = max((len(text.partition(".")[2]) for text in plain), default=0)
    if not 0 < decimals <= 4 or any("e" in text for text in plain) or any(abs(value) >= 1000 for value in numbers):
        return texts
    return [
        f"{value:.{decimals}f}" if isinstance(value, int | float) else text
        for text, value in zip(texts, values, strict=True)
    ]


def link_name(settings: Mapping[str, Any]) -> str:
    """Return the simulated uplink in words, ``"10 Mbit/s uplink"``; empty when none is set."""
    text = str(settings.get("link", ""))
    if not text:
        return ""
    from fedcomp.timing.links import parse_link

    return f"{bit_rate(parse_link(text).up_bits_per_s)} uplink"


def bit_rate(bits_per_s: float) -> str:
    """Return a link's rate in decimal units: ``"10 Mbit/s"``."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_s >= size:
            return f"{bits_per_s / size:g} {unit}"
    return f"{bits_per_s:g} bit/s"


def verdict(summary: Mapping[str, Any]) -> str:
    """Return how the run ended as one sentence: the answer to its question, and what of its claims did not hold."""
    if summary["config"]["quick"]:
        return "Ran to its end at its smallest size: no figure of this run answers the question."
    said = "; ".join(filter(None, (summary["answer"].removesuffix("."), outcome(summary["claims"]))))
    return f"{said[0].upper()}{said[1:]}."


def outcome(claims: Sequence[Mapping[str, Any]]) -> str:
    """Return how many of ``claims`` failed, how many goals, which decide no exit code, were missed, and how many of
    both were not measured.

    Examples
    --------
    >>> outcome([{"ok": True, "gate": True}, {"ok": False, "gate": False}, {"ok": None, "gate": False}])
    'the one claim holds, 1 goal missed, 1 not measured'
    """
    gates = [claim["ok"] for claim in claims if claim["gate"]]
    goals = [claim["ok"] for claim in claims if not claim["gate"] and claim["ok"] is not None]
    failed, missed, skipped = gates.count(False), goals.count(False), len(claims) - len(gates) - len(goals)
    parts = []
    if gates:
        every = "the one claim" if len(gates) == 1 else f"all {len(gates)} claims"
        held = f"{every} hold" + "s" * (len(gates) == 1)
        some = every if failed == len(gates) else f"{failed} of {len(gates)} claims"
        parts.append(f"{some} failed" if failed else held)
    if missed:
        parts.append(f"{count(missed, 'goal')} missed")
    elif goals:
        parts.append(f"{count(len(goals), 'goal')} reached")
    if skipped:
        parts.append(f"{skipped} {UNMEASURED}")
    return ", ".join(parts) or "no claim is made"


def data_sentence(tasks: Iterable[Mapping[str, Any]]) -> str:
    """Return which data the records of ``tasks`` name, one sentence per data set; empty when none does."""
    # A dictionary as an ordered set: data that several tasks share is named once.
    sentences: dict[str, None] = {}
    for task in tasks:
        source = task.get("data")
        if not source:
            continue
        # Where the data were read or fetched, the note says from where, and whether checksums were verified.
        offline = " (nothing downloaded)" if source["used"] == "offline" else ""
        instead = " This is a substitute for the data that was asked for." if source["substitute"] else ""
        sentences[f"{source['note'].rstrip('.')}{offline}.{instead}"] = None
    return " ".join(sentences)
