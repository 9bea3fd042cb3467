"""The report: one file that loads nothing, and figures a reader can trust."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from fake_engine import DATA, TINY, FakeEngine

from fedcomp.experiments.findings import Claim, Curves, Findings, HeatMap, Say, Series, Table
from fedcomp.experiments.page import render_html
from fedcomp.experiments.plots import line_plot
from fedcomp.experiments.report import (
    aligned,
    data_sentence,
    duration,
    failed_claims,
    link_name,
    number,
    percent,
    ratio,
    short_bytes,
    shortfalls,
    summarise,
    takes,
    verdict,
)
from fedcomp.experiments.spec import RoundRecord, RunResult

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Collects what a browser would load, and whether every element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in {"src", "href", "xlink:href", "srcset", "action", "data", "poster"}:
                self.loads.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def make(
    rounds: int = 5, claims: list[Claim] | None = None, findings: Findings | None = None
) -> tuple[dict[str, Any], Mapping[str, list[RoundRecord]]]:
    config = TINY.configure(rounds=rounds)
    specs = TINY.specs(config)
    engine = FakeEngine()
    results: dict[str, RunResult] = {spec.label: engine(spec, on_round=None, checkpoint=None) for spec in specs}
    told = TINY.measure(config, results, Say()) if rounds else Findings()
    found = replace(findings or Findings(), claims=told.claims if claims is None else claims, answer=told.answer)
    series = {label: result.rounds for label, result in results.items()}
    return summarise(TINY, config, specs, series, results, found, "/somewhere/private/runs/x-tiny"), series


@pytest.mark.long
def test_the_page_loads_nothing_and_is_well_formed() -> None:
    text = render_html(*make())
    page = Page(text)
    assert page.open == []
    assert [target for target in page.loads if not target.startswith("#")] == []
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert re.search(r"https?:|//[a-z]|@import|url\((?!#)", text) is None
    assert "/somewhere/private" not in text


@pytest.mark.long
def test_the_page_holds_question_figures_claims_and_plots() -> None:
    summary, series = make()
    page = Page(render_html(summary, series))
    for words in (
        "Does <counting> work?",  # escaped, so that it reads as written
        "800 kB",
        "802 kB",
        "10x",
        "fewer bytes",
        "derived: 1 / density",
        "Sparse sends 80000 bytes <in all>. 1 of 1 claims hold, 0 of 1 goals were reached.",
        "numbers made by formula",
        "First.",
        "codec.density",
        "flwr",
        "Payload is",
        "Wire is",
    ):
        assert words in page.text
    assert len([tag for tag in page.tags if tag == "figure"]) == 2


def found(rows: int = 3) -> Findings:
    table = Table("Cells <&>", ["cell", "loss"], [[f"cell {i}", 0.5 + i] for i in range(rows)], "a & b")
    lines = [Series(f"line {i} <b>", [1, 10, 100], [1.0, 0.5, 0.1 * (i + 1)]) for i in range(3)]
    return Findings(
        tables=[table],
        figures=[
            HeatMap("Grid", ["0.01", "0.1"], ["a<b", "c"], [[1.0, None], [4.0, 2.5]], "loss / dense", log=True),
            Curves("Loss", "bytes", "loss", lines, log_x=True, log_y=True, x_bytes=True, caption="as it falls"),
        ],
        values={"x": 1.0},
    )


@pytest.mark.long
def test_the_page_shows_what_was_measured() -> None:
    summary, series = make(findings=found())
    text = render_html(summary, series)
    page = Page(text)
    assert page.open == []
    for words in ("Cells <&>", "cell 2", "2.5", "a & b", "Grid", "a<b", "loss / dense", "line 2 <b>", "as it falls"):
        assert words in page.text
    assert 'style="--depth: 1.000">4.0<' in text
    assert 'style="--depth: 0.661">2.5<' in text  # ln 2.5 / ln 4
    assert 'style="--depth: 0.000">–<' in text
    assert page.tags.count("figure") == 3, "few rows: accuracy is plotted, too"
    assert "details" not in page.tags
    for name in set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text)):
        assert len(re.findall(f'id="{re.escape(name)}"', text)) == 1


def test_numbers_of_a_column_have_equally_many_decimals() -> None:
    assert aligned([1.0, 1.05, None, "diverged", 20]) == ["1.00", "1.05", "–", "diverged", "20.00"]
    assert aligned([18944, 1.5]) == ["18 944", "1.5"]
    assert aligned([1e-6, 1.5]) == ["1e-06", "1.5"]
    assert aligned(["a", None]) == ["a", "–"]
    assert aligned([]) == []


@pytest.mark.long
def test_long_tables_are_folded_and_many_rows_are_not_plotted() -> None:
    summary, series = make(findings=found(rows=25))
    assert Page(render_html(summary, series)).tags.count("details") == 1
    many = summary | {"rows": [dict(row, label=f"{row['label']} {i}") for i in range(13) for row in summary["rows"]]}
    page = Page(render_html(many, {row["label"]: series["dense"] for row in many["rows"]}))
    assert page.tags.count("details") == 2
    assert page.tags.count("figure") == 1, "the experiment has a figure of its own"
    plain = many | {"findings": Findings().to_json()}
    assert Page(render_html(plain, {row["label"]: series["dense"] for row in many["rows"]})).tags.count("figure") == 2


@pytest.mark.long
def test_the_caption_says_how_long_the_rows_were() -> None:
    summary, series = make()
    assert "Totals over 5 rounds and 4 clients." in Page(render_html(summary, series)).text
    summary["rows"][1] |= {"rounds": 2, "clients": 8}
    assert "Totals over 2 to 5 rounds and 4 to 8 clients." in Page(render_html(summary, series)).text


@pytest.mark.long
def test_a_page_without_rows_has_no_empty_table() -> None:
    summary, _ = make(findings=found())
    page = Page(render_html(summary | {"rows": []}, {}))
    assert page.tags.count("figure") == 1
    assert "Uplink payload" not in page.text


@pytest.mark.long
def test_element_ids_that_are_referred_to_are_unique_on_the_page() -> None:
    text = render_html(*make())
    referred = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    assert referred
    for name in referred:
        assert len(re.findall(f'id="{re.escape(name)}"', text)) == 1


@pytest.mark.long
def test_a_page_of_no_rounds_and_no_claims() -> None:
    summary, series = make(rounds=0)
    assert verdict(summary).startswith("No round was run")
    assert "No round was run" in Page(render_html(summary, series)).text


@pytest.mark.long
def test_a_claim_without_a_value_and_one_without_a_bound_are_shown() -> None:
    claims = [Claim("lost", math.nan, ">=", 1.0, "test"), Claim("huge", math.inf, ">=", 1.0, "test")]
    summary, series = make(claims=claims)
    assert failed_claims(summary) == ["lost"]
    text = Page(render_html(summary, series)).text
    assert "not measured" in text
    assert "inf" in text


@pytest.mark.long
def test_a_goal_that_does_not_gate_is_no_failed_claim() -> None:
    claims = [Claim("goal", 0.0, ">=", 1.0, "test", gate=False), Claim("rule", 0.0, ">=", 1.0, "test")]
    summary = make(claims=claims)[0]
    assert failed_claims(summary) == ["rule"]
    assert shortfalls(summary["claims"]) == [("FAILED", "rule: 0, not >= 1"), ("missed", "goal: 0, not >= 1")]
    for made, state, marks in ((claims, "bad", {"missed", "fails"}), (claims[:1], "plain", {"missed"})):
        text = render_html(*make(claims=made))
        assert f'class="verdict {state}"' in text
        assert set(re.findall("class='mark ([a-z]+)'", text)) == marks


def test_substituted_data_are_called_so() -> None:
    result = FakeEngine()(TINY.specs(TINY.configure())[0], on_round=None, checkpoint=None)
    result.notes = {"task": {"data": DATA | {"used": "local", "verified": True, "substitute": True}}}
    text = data_sentence([result.notes["task"]] * 2)
    assert text.count("numbers made by formula (read from local files, checksums verified).") == 1
    assert "substitute" in text
    assert data_sentence([]) == ""


def test_totals_are_sums_over_rounds_and_the_accuracy_is_the_last_evaluated() -> None:
    config = TINY.configure()
    specs = TINY.specs(config)
    records = [
        RoundRecord(0, 0.1, 2.0, downlink_wire_bytes=5),
        RoundRecord(1, 0.4, 1.0, 10, 20, 30, 40, failures=2),
        RoundRecord(2, math.nan, math.nan, 1, 2, 3, 4, failures=1),
    ]
    summary = summarise(TINY, config, specs, {"dense": records, "sparse": []}, {}, Findings(), "x")
    dense, sparse = summary["rows"]
    assert (dense["accuracy"], dense["loss"], dense["rounds"], dense["failures"]) == (0.4, 1.0, 2, 3)
    assert [dense[key] for key in ("uplink_payload_bytes", "uplink_wire_bytes")] == [11, 22]
    assert [dense[key] for key in ("downlink_payload_bytes", "downlink_wire_bytes")] == [33, 49]
    assert (sparse["accuracy"], sparse["uplink_ratio"]) == (None, None)


@pytest.mark.long
def test_a_plot_draws_every_series_once_in_the_pages_colours() -> None:
    lines = [Series(f"line {i}", [0, 1, 2], [0.1 * i, math.nan, 0.5]) for i in range(3)]
    curves = Curves('accuracy "now"', "round", "%", lines)
    svg = line_plot(curves, salt="a")
    assert [svg.count(f"var(--series-{i})") > 0 for i in range(4)] == [True, True, True, False]
    assert re.search(r"#[0-9a-f]{6}\b", svg) is None  # a fixed colour would be unreadable on one of the two faces
    assert "&quot;now&quot;" in svg
    assert svg == line_plot(curves, salt="a")


@pytest.mark.long
def test_a_logarithmic_plot_leaves_out_what_has_no_logarithm() -> None:
    def draw(x: list[float], y: list[float]) -> str:
        return line_plot(Curves("t", "x", "y", [Series("a", x, y)], log_x=True, log_y=True, x_bytes=True), salt="s")

    with_zeros = draw([0, 5, 10, 100], [1, 0, 2, 3])
    assert with_zeros == draw([10, 100], [2, 3])
    assert "100 B" in with_zeros


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1250, "1.25 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (3_400_000, "3.4 MB"),
        (1.5e12, "1500 GB"),
    ],
)
def test_bytes_are_shown_with_three_digits(count: float, text: str) -> None:
    assert short_bytes(count) == text


def test_e4_an_experiment_without_an_answer_is_answered_by_its_first_claim() -> None:
    config = TINY.configure()
    goal, rule = Claim("goal", 0.0, ">=", 1.0, "test", gate=False), Claim("times fewer", 12.5, ">=", 1.0, "test")
    for claims, said in (([goal, rule], "times fewer: 12.5."), ([goal], "goal: 0."), ([], "")):
        summary = summarise(TINY, config, [], {}, {}, Findings(claims=claims), "x")
        assert summary["answer"] == said
        assert verdict(summary).startswith(said)


@pytest.mark.long
def test_e4_what_was_missed_stands_above_every_table_of_the_page() -> None:
    text = render_html(*make())
    answer, missed = text.index("Sparse sends 80000 bytes"), text.index("very many fewer bytes: 10, not")
    assert answer < missed < text.index("<h2>") < text.index("<table")
    kept = render_html(*make(claims=[Claim("rule", 2.0, ">=", 1.0, "test")]))
    assert 'class="verdict good"' in kept
    assert "class='shortfalls'" not in kept


def test_e2_how_long_a_run_takes() -> None:
    assert [takes(minutes) for minutes in (0.0, 0.5, 1.4, 1.5, 8.2, 89.0, 240.0)] == [
        "–", "about 30 s", "about 84 s", "about 2 min", "about 8 min", "about 89 min", "about 4 h",
    ]  # fmt: skip


def test_the_other_figures_for_a_reader() -> None:
    assert [percent(value) for value in (None, math.nan, 0.0, 0.9547)] == ["–", "–", "0.0 %", "95.5 %"]
    assert [ratio(value) for value in (None, 1.0, 11.14, 83.26, 99.6, 1234.0)] == [
        "–", "1x", "11.1x", "83.3x", "100x", "1234x",
    ]  # fmt: skip
    assert [duration(value) for value in (0.0, 0.064, 0.9996, 12.34, 99.96, 7200)] == [
        "0 ms", "64 ms", "1.0 s", "12.3 s", "2 min", "2.0 h",
    ]  # fmt: skip
    assert [number(value) for value in (None, 0.0, 1234567.0, 0.012345, 1234.56, -22170.4, 1.5e20)] == [
        "not measured", "0", "1 234 567", "0.01235", "1235", "-22 170", "1.5e+20",
    ]  # fmt: skip
    assert [link_name({"link": text}) for text in ("10mbit", "200kbit/1mbit", "", "lte")] == [
        "10 Mbit/s uplink", "200 kbit/s uplink", "", "12 Mbit/s uplink",
    ]  # fmt: skip
