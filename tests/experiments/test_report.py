"""What a run's summary says: totals, the answer, how its claims ended, and figures a reader can trust."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

import pytest
import typer
from fake_engine import CATALOG, DATA, TINY
from pages import facts, make, recorded

from fedcomp.experiments.catalog import get_experiment
from fedcomp.experiments.findings import Claim, Findings
from fedcomp.experiments.options import Config
from fedcomp.experiments.report import (
    aligned,
    data_sentence,
    duration,
    failed_claims,
    link_name,
    number,
    outcome,
    percent,
    ratio,
    rerun,
    short_bytes,
    shortfalls,
    summarise,
    takes,
    verdict,
)
from fedcomp.experiments.run import Request, app
from fedcomp.experiments.sheets import claims_sheet
from fedcomp.experiments.spec import RoundRecord
from fedcomp.experiments.store import to_json_text
from fedcomp.experiments.tables import specs_of


def test_numbers_of_a_column_have_equally_many_decimals() -> None:
    assert aligned([1.0, 1.05, None, "diverged", 20]) == ["1.00", "1.05", "–", "diverged", "20.00"]
    assert aligned([18944, 1.5]) == ["18 944", "1.5"]
    assert aligned([1e-6, 1.5]) == ["1e-06", "1.5"]
    assert aligned(["a", None]) == ["a", "–"]
    assert aligned([]) == []


def test_where_data_come_from_is_said_once_and_substitutes_are_called_so() -> None:
    note = "mnist: read from local files, SHA-256 verified"
    local = {"data": DATA | {"used": "local", "verified": True, "note": note}}
    assert data_sentence([local] * 2) == f"{note}."
    text = data_sentence([{"data": DATA | {"used": "offline", "substitute": True}}])
    assert text.startswith(f"{DATA['note']} (nothing downloaded). This is a substitute")
    assert data_sentence([]) == ""


def test_totals_are_sums_over_rounds_and_the_accuracy_is_the_last_evaluated() -> None:
    config = TINY.configure()
    specs = specs_of(TINY, config)
    records = [
        RoundRecord(0, 0.1, 2.0, downlink_wire_bytes=5),
        RoundRecord(1, 0.4, 1.0, 10, 20, 30, 40, failures=2),
        RoundRecord(2, math.nan, math.nan, 1, 2, 3, 4, failures=1),
    ]
    results = {"dense": recorded(specs[0], records), "sparse": recorded(specs[1], [])}
    summary = summarise(TINY, config, specs, results, Findings(), facts())
    dense, sparse = summary["rows"]
    assert (dense["accuracy"], dense["loss"], dense["rounds"], dense["failures"]) == (0.4, 1.0, 2, 3)
    assert [dense[key] for key in ("uplink_payload_bytes", "uplink_wire_bytes")] == [11, 22]
    assert [dense[key] for key in ("downlink_payload_bytes", "downlink_wire_bytes")] == [33, 49]
    assert (sparse["accuracy"], sparse["uplink_ratio"]) == (None, None)


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
        (1.5e12, "1.5 TB"),
    ],
)
def test_bytes_are_shown_with_three_digits(count: float, text: str) -> None:
    assert short_bytes(count) == text


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ("", "no claim is made"),
        ("g", "the one claim holds"),
        ("gg", "all 2 claims hold"),
        ("G", "the one claim failed"),
        ("gGg", "1 of 3 claims failed"),
        ("GG", "all 2 claims failed"),
        ("n", "1 goal reached"),
        ("nN", "1 goal missed"),
        ("ggNN", "all 2 claims hold, 2 goals missed"),
        ("gGn", "1 of 2 claims failed, 1 goal reached"),
        ("-", "1 not measured"),
        ("gN--", "the one claim holds, 1 goal missed, 2 not measured"),
    ],
)
def test_the_end_of_claims_in_words(ended: str, said: str) -> None:
    """``g`` a claim that gates, ``n`` a goal, capital where it does not hold, ``-`` what was not measured."""
    rest = {"name": "", "value": 0, "op": "", "bound": 0, "skipped": ""}
    claims = [{"gate": letter in "gG", "ok": None if letter == "-" else letter.islower(), **rest} for letter in ended]
    assert outcome(claims) == said
    words = ["FAILED"] * ended.count("G") + ["missed"] * ended.count("N") + ["not measured"] * ended.count("-")
    assert [word for word, _ in shortfalls(claims)] == words


def test_the_verdict_is_one_sentence_with_what_was_missed() -> None:
    summary = make()[0]
    assert summary["answer"] == "Sparse sends 80000 bytes <in all>."
    assert verdict(summary) == "Sparse sends 80000 bytes <in all>; the one claim holds, 1 goal missed."
    quick = summary | {"config": summary["config"] | {"quick": True}}
    assert verdict(quick).endswith("no figure of this run answers the question.")


def test_what_failed_goes_before_what_was_missed() -> None:
    claims = [Claim("goal", 0.0, ">=", 1.0, "test", gate=False), Claim("rule", 0.0, ">=", 1.0, "test")]
    summary = make(claims=claims)[0]
    assert failed_claims(summary) == ["rule"]
    assert shortfalls(summary["claims"]) == [("FAILED", "rule: 0, not >= 1"), ("missed", "goal: 0, not >= 1")]


def test_what_was_not_measured_gates_nothing_and_names_the_package() -> None:
    skipped = Claim("beside", 3.0, ">=", 1.0, "test", skipped="zfec is not installed: pip install zfec")
    assert (skipped.ok, skipped.gate) == (None, False)
    assert math.isnan(skipped.value), "a value beside the reason would be one that nobody measured"
    summary = make(claims=[skipped, Claim("rule", 2.0, ">=", 1.0, "test")])[0]
    document = json.loads(to_json_text(summary["claims"][0]))
    assert (document["value"], document["ok"], document["gate"]) == (None, None, False)
    assert Claim.from_json(document).to_json()["skipped"] == skipped.skipped
    assert failed_claims(summary) == []
    assert shortfalls(summary["claims"]) == [("not measured", "beside: zfec is not installed: pip install zfec")]
    for wide in (True, False):
        first = claims_sheet(summary["claims"], wide=wide).rows[0]
        assert first[0] == "not measured"
        assert "pip install zfec" in first[1]


def test_a_measured_nan_still_fails() -> None:
    claim = Claim("rule", math.nan, ">=", 1.0, "test")
    assert failed_claims({"claims": [claim.to_json()]}) == ["rule"]
    older = {key: value for key, value in claim.to_json().items() if key != "skipped"}
    assert Claim.from_json(older).ok is False, "summaries of earlier versions have no reason in them"


def read_back(text: str) -> Config:
    """Return what a command asks for, by the program's own parser."""
    words = shlex.split(text)
    given = typer.main.get_command(app).make_context("run", words[words.index("tiny") :]).params
    request = Request(**given)
    return request.configure(get_experiment(str(request.name), CATALOG))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"rounds": 7, "clients": 1, "seed": 3, "engine": "ray", "budget": 0.1 + 0.2},
        {"quick": True, "assignments": ["train.lr=0.30000000000000004", "feedback=no"]},
        {"quick": True, "rounds": 1, "assignments": ["codec.density=0.1"]},
        {"assignments": ["link=", "train.epochs=12345678", "codec.density=1e-9"]},
        {"assignments": ["link='; rm -rf $HOME` \"<b>"]},
    ],
)
@pytest.mark.parametrize("program", ["fedcomp run", "python -m experiments.run"])
def test_the_command_asks_for_the_same_run_again(asked: dict[str, Any], program: str) -> None:
    config = TINY.configure(**asked)
    command = rerun(TINY, config, program)
    assert command.startswith(f"{program} tiny")
    assert read_back(command) == config


def test_how_long_a_run_takes() -> None:
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
