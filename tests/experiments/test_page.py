"""The pages: one file that loads nothing, in which nobody's text is more than text, and what stands where."""

from __future__ import annotations

import dataclasses
import re

import pytest
from fake_engine import TINY
from pages import Page, facts, make, results

from fedcomp.experiments.findings import LONG, Claim, Curves, Findings, Series, Table
from fedcomp.experiments.page import FEW, render_report
from fedcomp.experiments.report import mark, summarise
from fedcomp.experiments.tables import specs_of

HOSTILE = "<script>alert(1)</script>'\"</style>&{{ 'ab'*2 }}{% raw %}"


def found(rows: int = 3) -> Findings:
    table = Table("Cells <&>", ["cell", "loss"], [[f"cell {i}", 0.5 + i] for i in range(rows)], "a & b")
    lines = [Series(f"line {i} <b>", [1, 10, 100], [1.0, 0.5, 0.1 * (i + 1)]) for i in range(3)]
    return Findings(
        tables=[table],
        figures=[
            Curves("Loss", "bytes", "loss", lines, log_x=True, log_y=True, x_bytes=True, caption="as it falls"),
        ],
    )


@pytest.mark.slow
def test_the_page_loads_and_runs_nothing() -> None:
    text = render_report(*make(findings=found()))
    page = Page(text)
    assert {target for target in page.loads if not target.startswith("#")} == {"../index.html"}
    assert not {"script", "link", "iframe", "object", "embed", "form"} & set(page.tags)
    assert not [name for name in page.attributes if name.startswith("on")]
    assert re.search(r"https?:|//[a-z]|@import|url\((?!#)", text) is None
    assert "default-src 'none'" in text
    assert "/somewhere/private" not in text


@pytest.mark.slow
def test_nobodys_text_breaks_out_of_its_place() -> None:
    """Names, labels, settings, notes and captions are whatever a user or an app writes."""
    hostile = dataclasses.replace(
        TINY,
        name=HOSTILE,
        question=HOSTILE,
        notes=HOSTILE,
        baseline=HOSTILE,
        rows={HOSTILE: "fedavg", HOSTILE + "2": "topk"},
    )
    config = hostile.configure(assignments=[f"link={HOSTILE}"])
    specs = specs_of(hostile, config)
    measured = Findings(
        claims=[Claim(HOSTILE, 0.0, ">=", 1.0, HOSTILE)],
        answer=HOSTILE,
        tables=[Table(HOSTILE, [HOSTILE, "n"], [[HOSTILE, 1.0]], HOSTILE)],
        figures=[
            Curves(HOSTILE, HOSTILE, HOSTILE, [Series(HOSTILE, [1, 2], [1, 2])], caption=HOSTILE),
        ],
    )
    runs = results(specs)
    summary = summarise(hostile, config, specs, runs, measured, facts(run=HOSTILE, command=HOSTILE))
    summary["config"]["settings"]["link"] = "10mbit"  # what is shown is parsed
    summary["config"]["settings"]["other"] = HOSTILE
    text = render_report(summary, {label: result.rounds for label, result in runs.items()})
    page, harmless = Page(text), Page(render_report(*make(findings=found())))
    assert set(page.tags) == set(harmless.tags)
    assert page.attributes <= harmless.attributes | {"colspan"}
    assert text.count("</style>") == 1
    assert page.text.count(HOSTILE) > 20
    assert "abab" not in page.text


@pytest.mark.slow
def test_the_answer_and_what_was_missed_stand_above_a_chart_and_a_chart_above_every_table() -> None:
    for measured in (None, found()):
        text = render_report(*make(findings=measured))
        text = text[text.index("<main>") :]
        places = [
            text.index(part)
            for part in ("Sparse sends 80000 bytes", "very many fewer bytes: 10, not", '<svg class="plot"', "<table")
        ]
        assert places == sorted(places)
    held = Page(render_report(*make(claims=[Claim("rule", 2.0, ">=", 1.0, "test")])))
    assert "missed" not in held.text


SKIPPED = Claim("beside", 0.0, ">=", 1.0, "test", skipped="zfec is not installed: pip install zfec")


@pytest.mark.parametrize(
    ("claims", "state"),
    [
        ([Claim("goal", 0.0, ">=", 1.0, "test", gate=False), Claim("rule", 0.0, ">=", 1.0, "test")], "bad"),
        ([Claim("goal", 0.0, ">=", 1.0, "test", gate=False)], "plain"),
        ([Claim("rule", 2.0, ">=", 1.0, "test")], "good"),
        ([Claim("rule", 2.0, ">=", 1.0, "test"), SKIPPED], "plain"),
        ([], "plain"),
    ],
)
@pytest.mark.slow
def test_the_answer_is_coloured_by_its_claims(claims: list[Claim], state: str) -> None:
    text = render_report(*make(claims=claims))
    assert f'class="verdict {state}"' in text
    marks = re.findall('<span class="mark ([a-z ]+)">', text)
    ended = [mark(claim.to_json()).lower() for claim in claims]
    assert sorted(marks) == sorted(ended + [word for word in ended if word != "holds"]), "in the list and at the top"


@pytest.mark.slow
def test_the_page_holds_figures_claims_settings_versions_and_the_command() -> None:
    text = Page(render_report(*make())).text
    for words in (
        "Does <counting> work?",
        "800 kB",
        "802 kB",
        "10x",
        "derived: 1 / density",
        "numbers made by formula",
        "First.",
        "codec.density",
        "fedcomp run tiny",
        "took 47.2 s",
        "Payload is",
        "Wire is",
        *("fedcomp", "flwr", "torch", "numpy", "python", "seed"),
    ):
        assert words in text
    changed = make()[0] | {"changed": ["codec.density=0.5"]}
    assert "Changed from the defaults" in Page(render_report(changed, {})).text
    assert 'class="changed"><dt>codec.density' in render_report(changed, {})


@pytest.mark.slow
def test_one_system_has_one_style_in_plots_legends_and_tables() -> None:
    summary, rounds = make()
    table = Table("Again", ["system", "x"], [["sparse", 1.0], ["dense", 2.0], ["third", 3.0], ["no series", 4.0]])
    lines = [Series(name, [1, 2], [1, 2]) for name in ("third", "sparse", "dense")]
    measured = Findings(tables=[table], figures=[Curves("Curve", "x", "y", lines)])
    page = Page(render_report(summary | {"findings": measured.to_json()}, rounds))
    assert set(page.swatches) == {"dense", "sparse", "third"}
    assert [len(drawings) for drawings in page.swatches.values()] == [1, 1, 1]
    assert len({drawing for drawings in page.swatches.values() for drawing in drawings}) == 3


@pytest.mark.slow
def test_the_page_shows_what_was_measured() -> None:
    text = render_report(*make(findings=found()))
    page = Page(text)
    for words in ("Cells <&>", "cell 2", "2.5", "a & b", "line 2 <b>", "as it falls"):
        assert words in page.text
    assert page.tags.count("figure") == 3, "few rows: accuracy is plotted, too"
    for name in set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text)):
        assert len(re.findall(f'id="{re.escape(name)}"', text)) == 1


@pytest.mark.slow
def test_long_tables_are_folded_and_many_rows_are_not_plotted_beside_other_figures() -> None:
    summary, rounds = make(findings=found(rows=LONG + 1))
    assert Page(render_report(summary, rounds)).tags.count("details") == 1
    many = [dict(row, label=f"{row['label']} {i}") for i in range(FEW) for row in summary["rows"]]
    page = Page(render_report(summary | {"rows": many}, {row["label"]: rounds["dense"] for row in many}))
    assert page.tags.count("figure") == 1, "the experiment has a figure of its own"
    plain = summary | {"rows": many, "findings": Findings().to_json()}
    assert Page(render_report(plain, {row["label"]: rounds["dense"] for row in many})).tags.count("figure") == 2


@pytest.mark.slow
def test_only_a_long_cell_takes_room_of_its_own() -> None:
    rows = [["short", "a reason that is longer than any name", 1.0]]
    text = render_report(make(findings=Findings(tables=[Table("T", ["a", "b", "c"], rows)]))[0] | {"rows": []}, {})
    assert '<th scope="row">short</th><td class=" long">a reason' in text


@pytest.mark.slow
def test_the_caption_says_how_long_the_rows_were() -> None:
    summary, rounds = make()
    assert "Totals over 5 rounds and 4 clients." in Page(render_report(summary, rounds)).text
    summary["rows"][1] |= {"rounds": 2, "clients": 8}
    assert "Totals over 2 to 5 rounds and 4 to 8 clients." in Page(render_report(summary, rounds)).text


@pytest.mark.slow
def test_pages_of_little() -> None:
    """No rows, no rounds, no values."""
    summary, _ = make(findings=found())
    page = Page(render_report(summary | {"rows": []}, {}))
    assert page.tags.count("figure") == 1
    assert "uplink payload" not in page.text
    summary, rounds = make()
    page = Page(render_report(summary, {label: records[:1] for label, records in rounds.items()}))
    assert "figure" not in page.tags, "a plot of single points says less than the table"
    claims = [Claim("lost", float("nan"), ">=", 1.0, "test"), Claim("huge", float("inf"), ">=", 1.0, "test")]
    text = Page(render_report(*make(claims=claims))).text
    assert "not measured" in text
    assert "inf" in text
