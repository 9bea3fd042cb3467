"""Reports: sections join the round's report; a field alone decides what a record, and a private one, shows of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import pytest

from fedcomp.flower.report import WITHHELD, EventSection, Report, Reports, ReportSection, figure
from fedcomp.plain import PlainError


@dataclass
class Tried(EventSection, name="tried"):
    waves: int = figure(unit="exchanges", public=True)
    skipped: str = figure("", show="reasons")
    members: list[int] = figure(list, public=True, show="count")
    why: dict[int, str] = figure(dict, public=True, show="reasons")
    sizes: dict[str, int] = figure(dict, unit="bytes", show="total")
    spent: float = figure(0.0, unit="seconds", show="seconds")


def report() -> Report:
    found = Report(3, asked=4, used=2, norms={11: 1.5}, memory={11: 1.0, 12: 3.0}, notes=["b", "a"])
    found.refuse(12, "x" * 1000)
    tried = found.section(Tried)
    tried.waves, tried.skipped, tried.members, tried.spent = 2, "no power", [11, 12], 0.25
    tried.why, tried.sizes = {12: "late", 13: "late"}, {"up": 3, "down": 4}
    tried.note("gone", "node 13")
    return found


def test_a_report_survives_json_with_its_sections() -> None:
    again = Report.from_json(json.loads(json.dumps(report().to_json())))
    assert again == report()
    assert again.tried == report().tried
    assert again.refused[12].endswith("...")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"asked": "4"}, r"report\.asked"),
        ({"refused": {"node": "why"}}, "not a whole number"),
        ({"sections": {"unheard": {}}}, r"unknown sections \['unheard'\]"),
        ({"sections": {"tried": {**report().tried.to_json(), "waves": None}}}, r"tried\.waves"),
        ({"sections": {"tried": {}}}, "tried lacks"),
        ({"sections": []}, "sections"),
        ({"concluded": True}, "unknown fields"),
    ],
)
def test_a_damaged_report_is_refused(change: dict, said: str) -> None:
    with pytest.raises(PlainError, match=said):
        Report.from_json({**report().to_json(), **change})


def test_a_record_shows_what_the_fields_say() -> None:
    found = report().figures()
    assert {k: v for k, v in found.items() if k.startswith("tried.")} == {
        "tried.gone": 1,
        "tried.gone_because": ["node 13"],
        "tried.waves": 2,
        "tried.skipped": 1,
        "tried.skipped_because": ["no power"],
        "tried.members": 2,
        "tried.why": 2,
        "tried.why_because": ["late"],
        "tried.sizes": 7,
    }
    assert (found["report.memory_mean"], found["report.memory_max"]) == (2.0, 3.0)
    assert found["report.notes"] == ["b", "a"]
    assert not {"report.norms", "report.asked", "report.seconds"} & set(found)
    assert report().times() == {"tried.spent": 0.25}
    assert dict(report().tried.metrics()) == {
        k: v for k, v in found.items() if k.startswith("tried.") and isinstance(v, int)
    }


def test_a_private_run_shows_counts_of_public_fields_and_no_reason() -> None:
    found = report().figures(public=True)
    assert {k for k in found if k.startswith("tried.")} == {"tried.waves", "tried.members", "tried.why"}
    assert not [name for name in found if name.endswith("_because")]
    assert "late" in report().reasons()


def test_no_field_of_any_system_that_is_public_shows_texts_or_figures_of_single_nodes() -> None:
    # Their sections are known once they are imported.
    import fedcomp.strategies.coded.linear
    import fedcomp.strategies.coded.report
    import fedcomp.strategies.gcn.report
    import fedcomp.strategies.gossip.report
    import fedcomp.strategies.private.datalens  # noqa: F401

    assert {"coded", "linear", "gcn", "gossip", "datalens"} <= set(ReportSection.known)
    for kind in (Report, *ReportSection.known.values()):
        for each in fields(kind):
            if each.metadata.get("public"):
                assert each.metadata["show"] in ("value", "count", "reasons", "table", "total"), (kind, each.name)


def test_what_is_withheld_is_forgotten_with_its_sections() -> None:
    secret = report()
    secret.withhold()
    assert secret == Report(3, notes=[WITHHELD])
    assert secret.sections == {}


def test_a_round_begun_by_an_outer_strategy_is_joined_until_it_is_concluded() -> None:
    reports = Reports()
    outer = reports.begin(1)
    assert reports.join(1) is outer
    outer.concluded = True
    assert reports.join(1) is not outer
    assert [found.round for found in (reports.begin(2), *reports.before(2))] == [2, 1]
    assert Reports.from_json(reports.to_json()) == reports


def test_a_section_that_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match=r"no field or section 'tried'; its sections: \[\]"):
        _ = Report(1).tried
