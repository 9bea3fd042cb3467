"""Finished runs without running anything, and a reader of HTML pages that sees what a browser would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from fake_engine import TINY, FakeEngine

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.findings import Claim, Findings, Say
from fedcomp.experiments.report import rerun, summarise
from fedcomp.experiments.spec import RoundRecord, RunResult, RunSpec
from fedcomp.experiments.tables import findings as find
from fedcomp.experiments.tables import specs_of

VOID = {"meta", "br", "hr", "img", "input", "link"}
Rounds = Mapping[str, Sequence[RoundRecord]]


class Page(HTMLParser):
    """Collects what a browser would load and run, and whether every element is closed where it should be.

    Attributes
    ----------
    loads : list of str
        Targets of attributes that load or link something.
    tags, text : list of str, str
    attributes : set of str
        Names of all attributes.
    swatches : dict of str to set of str
        By the text that follows it, the drawing of every swatch.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.attributes: set[str] = set()
        self.swatches: dict[str, set[str]] = {}
        self._open: list[str] = []
        self._swatch: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)
        self.attributes |= {name for name, _ in attrs}
        for name, value in attrs:
            if name in {"src", "href", "xlink:href", "srcset", "action", "data", "poster"}:
                self.loads.append(value or "")
        if ("class", "swatch") in attrs or self._swatch:
            self._swatch.append(repr(attrs))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "style":
            return
        self.text += data
        if self._swatch and data.strip():
            self.swatches.setdefault(data.strip(), set()).add("".join(self._swatch))
            self._swatch = []


def results(specs: Sequence[RunSpec]) -> dict[str, RunResult]:
    return {spec.label: FakeEngine()(spec, on_round=None, checkpoint=None) for spec in specs}


def recorded(spec: RunSpec, records: list[RoundRecord]) -> RunResult:
    """Return a result of these rounds and nothing else."""
    from fedcomp.flower.ledger import TrafficLedger

    return RunResult(spec, records, {}, TrafficLedger(), seconds=0.0, simulated_seconds=0.0)


def facts(experiment: Experiment = TINY, **changed: Any) -> dict[str, Any]:
    """Return what only a run knows of itself."""
    command = rerun(experiment, experiment.configure())
    return {"run": "/somewhere/private/runs/x-tiny", "began": "", "seconds": 47.2, "command": command} | changed


def make(claims: list[Claim] | None = None, findings: Findings | None = None) -> tuple[dict[str, Any], Rounds]:
    """Return summary and rounds of a finished run of ``TINY``."""
    config = TINY.configure()
    specs = specs_of(TINY, config)
    found = results(specs)
    told = find(TINY, config, found, Say())
    measured = replace(findings or Findings(), claims=told.claims if claims is None else claims, answer=told.answer)
    summary = summarise(TINY, config, specs, found, measured, facts())
    return summary, {label: result.rounds for label, result in found.items()}
