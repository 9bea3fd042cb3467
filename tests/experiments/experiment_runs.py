"""Small runs of experiments, of which all that holds for every experiment is checked as they are made."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from fedcomp.experiments import engines
from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.findings import Findings, Say
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunResult
from fedcomp.experiments.tables import findings as find
from fedcomp.experiments.tables import specs_of


class Read(Mapping[str, Any]):
    """Settings that note which of them were asked for."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self.settings[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.settings)

    def __len__(self) -> int:
        return len(self.settings)

    def items(self) -> Any:
        return self.settings.items()  # a row that takes settings by prefix sees all of them; that is no reading


class Ran(NamedTuple):
    """A finished run: its rows, what was found, every finished cell by name, and what the claims were made of."""

    config: Config
    results: dict[str, RunResult]
    findings: Findings
    kept: dict[str, Any]
    judged: tuple[Any, ...]


def ran(
    experiment: Experiment,
    *assignments: str,
    judging: ModuleType | None = None,
    unread: Collection[str] = (),
    **sizes: Any,
) -> Ran:
    """Return a run on data that need no file. Its rows or its measurement read every option but those named ``unread``,
    and what it found survives JSON. ``judging`` is the module whose ``claims`` are listened to."""
    kept: dict[str, Any] = {}
    judged: list[tuple[Any, ...]] = [()]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FEDCOMP_DATA", raising=False)
        if judging is not None:
            claims = judging.claims
            patch.setattr(judging, "claims", lambda *given: judged.append(given) or claims(*given))
        config = experiment.configure(assignments=assignments, **sizes)
        settings = Read(config.settings)
        config = dataclasses.replace(config, settings=settings)
        specs = specs_of(experiment, config)
        results = {spec.label: engines.run(spec) for spec in specs}
        findings = find(experiment, config, results, Say(keep=kept.__setitem__))
    used = settings.read | {key for spec in specs for key in spec.settings}
    assert set(experiment.options) - set(unread) <= used, "a setting that nothing reads"
    assert (
        Findings.from_json(json.loads(json.dumps(findings.to_json(), allow_nan=False))).to_json() == findings.to_json()
    )
    assert re.search(r"\d", findings.answer), "the answer is made of figures"
    return Ran(config, results, findings, kept, judged[-1])
