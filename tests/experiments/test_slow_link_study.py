"""The study ``slow_link``: its training, its arithmetic, and that claims catch what they are about."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from fedcomp.experiments import links, slow
from fedcomp.experiments.catalog.slow_link import EXPERIMENT
from fedcomp.experiments.findings import Findings, Say
from fedcomp.experiments.links import HEADERS, unavailable
from fedcomp.experiments.studies import slow_link as module
from fedcomp.experiments.studies.slow_link import (
    BOTH,
    EMPTY,
    FEDAVG,
    LARGE_KBIT,
    ROWS,
    STOCK,
    TRAINED,
)
from fedcomp.experiments.tables import findings as findings_of

ASKED = {"hidden": 16, "seed": 0, "rounds": 30, "steps": 8, "rate": 0.1, "target": 80.0}


def config(*assignments: str) -> Any:
    return EXPERIMENT.configure(assignments=("workers=1", "links=1", "steps=0.1", "rates=64,1000", *assignments))


def test_every_row_learns_and_ends_at_its_target_and_those_that_train_alike_do_so_alike() -> None:
    assert module.TRAINS_AS.keys() - {STOCK} == set(ROWS) == slow.ROWS.keys()
    found = {row: slow.here(row=row, **ASKED) for row in ROWS}
    for row, each in found.items():
        assert each["needed"] == len(each["line"]) <= 30, row
        assert each["line"][-1] >= 80.0 > max(each["line"][:-1]), row
        assert each == found[module.TRAINS_AS[row]], row


def test_a_training_that_is_never_there_needs_infinity() -> None:
    found = slow.here(row=FEDAVG, **{**ASKED, "rounds": 2, "target": 101.0})
    assert found["needed"] == math.inf
    assert len(found["line"]) == 2


def test_the_validation_split_is_apart_from_what_is_trained_on_and_from_the_test_split() -> None:
    (x, _), (validation, _) = slow.examples(True)
    (whole, _), (test, _) = slow.examples(False)
    assert len(x) + len(validation) == len(whole)
    rows = {each.tobytes() for each in whole}
    assert all(each.tobytes() in rows for each in validation)
    assert len(test) != len(validation)


def test_a_model_has_the_size_that_was_asked_for() -> None:
    for size in (2e5, 8e5, 4e6):
        held = sum(array.numpy().nbytes for array in slow.begin(0, module.hidden_of(size)).values())
        assert held == pytest.approx(size, rel=1e-3)


def test_a_row_that_was_ended_is_continued_at_its_pace_and_no_other() -> None:
    line = [[50.0, 10.0], [54.0, 20.0], [59.0, 30.0], [63.0, 40.0]]
    assert links.pace(line) == 4.0
    # Before three rounds nothing is known of the others.
    assert [links.projected(line[:n], 9) for n in (0, 2, 3, 4)] == [0.0, 0.0, 50.0 + 8 * 4.5, 50.0 + 8 * 4.0]
    assert links.projected(line, math.inf) == math.inf
    assert module.seconds_to({"line": line}, 40.0, 9) == (63.0, True)
    assert module.seconds_to({"line": line}, 90.0, 9) == (50.0 + 8 * 4.0, False)
    assert module.seconds_to({"line": line}, 90.0, math.inf) == (math.inf, False)
    assert module.seconds_to({"line": []}, 90.0, 9) == (math.inf, False)
    # Rounds without a reply have no accuracy, and end nothing.
    assert module.seconds_to({"line": [[9.0, math.nan]]}, 90.0, math.inf) == (math.inf, False)


def test_bytes_without_a_name_are_found_and_so_are_those_counted_twice() -> None:
    for named, share in ((1000.0, 0.0), (750.0, 0.25), (1400.0, 0.4)):
        assert module.unexplained({"interfaces": 1000.0, "named": named}) == pytest.approx(share)


def counted(up: float, down: float, packets: int) -> dict[str, Any]:
    return {"up_bytes": up, "down_bytes": down, "up_packets": packets, "down_packets": packets}


def measured(monkeypatch: pytest.MonkeyPatch, *assignments: str, **changes: Any) -> Findings:
    """Return what is found when all comes out as it should, but for ``changes``."""
    accuracies = [20.0, 50.0, 80.0, 96.0]
    monkeypatch.setattr(module, "unavailable", lambda: changes.get("unavailable", ""))

    def known(row: str, hidden: int, rate: float, seed: int, tuning: bool, *, config: Any) -> Any:
        return {"line": accuracies, "needed": 9 if tuning and rate != 0.1 else 4}

    def over_link(row: str, kbit: float, hidden: int, rate: float, *, config: Any, needed: Any) -> Any:
        tuned = hidden not in (EMPTY, module.hidden_of(module.LARGE))
        assert needed.get((row, hidden)) == (4 if tuned else None)
        assert rate == (0.02 if hidden == EMPTY and "steps=0.02,0.1" in assignments else 0.1)
        period = {FEDAVG: 60.0, STOCK: 300.0, BOTH: 4.0}.get(row, 20.0)
        if row == STOCK:
            line = [[300.0, math.nan]]
        else:
            line = [[period * (i + 1), value] for i, value in enumerate(accuracies)]
        line = changes.get("line", {}).get(row, line)
        messages, packets, bundle = 2 * len(line), 100, 2000.0
        ledger = 340.0 if hidden == EMPTY else {FEDAVG: 2e6}.get(row, 1e5)
        polls = 400.0 * line[-1][0]
        # More arrays, more calls: what a message costs besides is its row's.
        besides = 9000.0 if row in TRAINED[:2] else 1000.0
        unnamed = 0.0 if hidden == EMPTY else changes.get("hidden", {}).get(row, 0.0)
        both = ledger + 2 * HEADERS * packets + bundle + polls + besides * messages
        return {
            "line": line,
            "seconds": line[-1][0],
            "up": ledger / 2,
            "down": ledger / 2,
            "messages": messages,
            "interface": counted(unnamed + both / 2, both / 2, packets),
            "everything": counted(both / 2, both / 2, packets),
            "quiet": counted(12000.0 + 10 * HEADERS, 12000.0, 5),
            "bundle": bundle,
            "error": "not in 420 s" if row == STOCK else "",
        }

    monkeypatch.setattr(module, "known", known)
    monkeypatch.setattr(module, "over_link", over_link)
    return findings_of(EXPERIMENT, config(*assignments), {}, Say())


def failing(findings: Findings) -> list[str]:
    return [claim.name.split(":")[0] for claim in findings.claims if claim.ok is False]


def test_claims_hold_when_all_is_as_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = measured(monkeypatch, "steps=0.02,0.1")
    assert failing(findings) == []
    assert "15.0 times sooner" in findings.answer
    assert "stock Flower had 0 rounds after 300 s, top-k both ways is there after 16 s" in findings.answer
    seconds = {(row[0], row[1]): row[8] for row in findings.tables[0].rows}
    assert seconds["1000", BOTH] == "16"
    assert findings.tables[1].rows[0][3] == "not in 420 s"


def test_who_leaves_the_first_model_out_is_held_against_a_fedavg_that_does_so_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = {module.AT_NODES: [[4.0 * (i + 1), v] for i, v in enumerate([20.0, 50.0, 80.0, 96.0])]}
    table = measured(monkeypatch, "steps=0.1", line=fast).tables[0]
    factors = {(row[0], row[1]): row[-1] for row in table.rows}
    # Four rounds of 60 s, of which the first model's way is 32 s.
    assert factors["1000", module.AT_NODES] == round((240.0 - 32.0) / 16.0, 1)
    assert factors["1000", BOTH] == 15.0


def test_claims_catch_what_they_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_rival = {BOTH: [[30.0 * (i + 1), v] for i, v in enumerate([20.0, 50.0, 80.0, 96.0])]}
    assert failing(measured(monkeypatch, line=slow_rival)) == ["1 Mbit/s"]
    # A transport that sends everything twice.
    twice = measured(monkeypatch, hidden={FEDAVG: 2e6})
    assert failing(twice) == [
        "share of the bytes at the interfaces without a name",
        "bytes at the interfaces of FedAvg over the ledger's",
    ]
    other = {BOTH: [[4.0 * (i + 1), v] for i, v in enumerate([20.0, 50.0, 70.0, 96.0])]}
    assert failing(measured(monkeypatch, line=other)) == ["accuracies over links, points off those in this process"]
    # A node of Flower's that has ended is no sooner there for that: the limit counts.
    ended = measured(monkeypatch, line={STOCK: [[30.0, math.nan]]})
    assert failing(ended) == []
    assert next(claim.value for claim in ended.claims if claim.name.startswith("8 MB")) == 420.0 / 16.0
    quick_stock = {STOCK: [[10.0, 96.0]]}
    assert failing(measured(monkeypatch, line=quick_stock)) == [f"8 MB at {LARGE_KBIT:g} kbit/s"]


def test_without_links_the_reason_is_shown_and_claims_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = measured(monkeypatch, unavailable="slow links need root, for network namespaces")
    assert findings.answer == "slow links need root, for network namespaces"
    assert {claim.skipped for claim in findings.claims} == {findings.answer}
    assert failing(findings) == []


def test_without_stock_flower_its_claim_alone_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = measured(monkeypatch, "stock=false")
    assert [bool(claim.skipped) for claim in findings.claims] == [False, False, False, False, True]
    assert "stock" not in findings.answer


REASON = unavailable()


@pytest.mark.parametrize(
    ("needed", "last", "rounds", "error"),
    [
        (None, 80.0, 200, ""),
        (1e6, 80.0, links.ENOUGH, "not in 90 s"),
        (100.0, 80.0, 200, ""),
        (None, 79.9, 200, "not after all 200 rounds"),
        (None, math.nan, 200, "not after all 200 rounds"),
    ],
)
def test_a_training_is_ended_when_its_pace_shows_that_it_comes_too_late(
    needed: float | None, last: float, rounds: int, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a million rounds as soon as the pace is known; else at the limit, and here all rounds are over before."""

    def run_app(config: object, *, watch: Callable[[], None], **others: object) -> str:
        """End a round every tenth of a second of the clock that is written."""
        line: list[list[float]] = []
        for number in range(1, 201):
            line.append([0.1 * number, last if number == 200 else 50.0])
            (tmp_path / slow.FILE).write_text(json.dumps({"began": time.time(), "line": line}))
            watch()
        return ""

    deployment = MagicMock(folder=tmp_path, home=lambda name: tmp_path, run_app=run_app)
    deployment.runs.return_value = [{"status": "finished:completed"}]
    made = MagicMock()
    made.__enter__.return_value.name.return_value = "hub"
    monkeypatch.setattr(slow, "SlowLinks", lambda *_, **__: made)
    monkeypatch.setattr(slow, "counted", lambda hub: {0: dict.fromkeys(links.COUNTED, 1)})
    monkeypatch.setattr("fedcomp.experiments.engines.linked.LinkedDeployment", lambda *_, **__: nullcontext(deployment))
    found = slow.linked({**ASKED, "row": BOTH}, rate=1e7, down=None, limit=90.0, settings={}, needed=needed)
    assert len(found["line"]) == rounds
    assert found["error"] == error


@pytest.mark.engines
@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.long
def test_a_training_over_links_is_that_of_this_process_and_its_bytes_have_names() -> None:
    asked = {**ASKED, "row": BOTH, "hidden": 200, "rounds": 2, "target": 101.0}
    found = slow.linked(asked, rate=1e7, down=None, limit=120.0, settings=module.settings(1e4), idle=3.0)
    assert found["error"] == "not after all 2 rounds"
    np.testing.assert_allclose([point[1] for point in found["line"]], slow.here(**asked)["line"], atol=0.3)
    seen = found["interface"]
    assert found["down"] + found["bundle"] < seen["down_bytes"]
    assert found["up"] < seen["up_bytes"]
    assert found["messages"] == 4
