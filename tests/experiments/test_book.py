"""The book of results: what is stored, what is stale, and what becomes of a paper's claim."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedcomp.coding.bench import parts
from fedcomp.errors import ConfigError
from fedcomp.experiments import book, report, run
from fedcomp.experiments.book import (
    RESULTS,
    Beside,
    BookRequest,
    beside_fedavg,
    finished,
    judge,
    keep_benchmarks,
    missing,
    pages,
    store,
    stored,
    write_book,
)
from fedcomp.experiments.catalog import CATALOG, get_experiment
from fedcomp.experiments.definition import definition, digest_of, sources_of
from fedcomp.experiments.published import PUBLISHED, Published
from fedcomp.experiments.store import RunFolder

ROOT = Path(__file__).parents[2]
KNOWN = {name: get_experiment(name) for name in ("scalecom", "modular_sum")}


def claim(name: str, ok: bool | None) -> dict[str, Any]:
    return {"name": name, "ok": ok, "value": 2.0, "op": "<=", "bound": 3.0}


def system(*evidence: str) -> Published:
    return Published("S", "A, 2000", "It is small", "abstract", "Bytes", "scalecom", evidence, "systems/scalecom.md")


def summary(**changed: Any) -> dict[str, Any]:
    asked = {"quick": False, "engine": "inprocess", "seed": 0, "settings": {}} | changed.pop("config", {})
    return {
        "experiment": "scalecom",
        "config": asked,
        "changed": [],
        "definition": definition(KNOWN["scalecom"]),
        "findings": {"tables": [], "figures": [{"kind": "curves"}], "tasks": []},
        "claims": [
            {**claim(name, True), "source": "derived", "gate": True, "skipped": ""}
            for name in ("CLT-k: downlink grows, times", "CLT-k, rotating leader: memory norm")
        ],
        "rows": [],
        "environment": {
            "finished": "2026-01-02 03:04:05 UTC",
            "system": "Linux",
            "cores": "2",
            "flwr": "1",
            "torch": "2",
        },
        "data": "",
        "seconds": 2.0,
        "answer": "It does.",
        "notes": "long",
        "run": "runs/1",
        **changed,
    }


def keep(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "summary.json").write_text(json.dumps(content), "utf-8")


@pytest.mark.parametrize(
    ("ended", "word"),
    [([True, True], "reproduced"), ([True, False], "partly"), ([False, None], "not reproduced")],
)
def test_a_papers_claim_is_judged_by_all_claims_that_speak_to_it(ended: list[bool | None], word: str) -> None:
    claims = [*(claim(f"points lost {i}", ok) for i, ok in enumerate(ended)), claim("other", False)]
    found, why = judge(system("points lost ?"), claims)
    assert found == word
    assert "other" not in why
    assert ("Missed: “points lost" in why) == (False in ended)


def test_evidence_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no claim of 'scalecom' is called like 'points'"):
        judge(system("points"), [claim("points lost", True)])
    with pytest.raises(ConfigError, match="nothing of its evidence could be measured"):
        judge(system("points*"), [claim("points lost", None)])


CODE = """
'''What it asks.'''
CLAIMS = '''
    row | points lost | <= 1.0 | gate: measured .5 here
'''
NOTES = "These are eight words for a reader, not code"
ROWS = {"top-k": "topk codec.density=0.01 feedback=true a=1 b=2 c=3 d=4 e=5"}
TABLE = Experiment(rows=ROWS, minutes=3.0)
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("What it asks", "What it answers", True),
        ("measured .5 here", "measured .6 here", True),
        ("for a reader", "for every reader", True),
        ("\nROWS", "\n# A comment.\nROWS", True),
        ("minutes=3.0", "minutes=9.0", True),
        ("<= 1.0", "<= 2.0", False),
        ("| gate", "| goal", False),
        ("density=0.01", "density=0.02", False),
        ("ROWS = {", "ROWS = 3 * {", False),
    ],
)
def test_a_definition_changes_with_what_is_computed_and_not_with_texts(old: str, new: str, same: bool) -> None:
    assert old in CODE
    assert (digest_of([CODE]) == digest_of([CODE.replace(old, new)])) is same


def test_a_study_counts_however_it_is_imported(tmp_path: Path) -> None:
    package = "fedcomp.experiments.studies"
    files = {
        "catalog/a.py": f"from {package}.one import x",
        "studies/one.py": f"def x():\n    from {package} import two, three",
        "studies/two.py": f"from {package}.one import x",
        "studies/three.py": "import numpy",
        "studies/four.py": "",
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    assert sources_of("catalog/a.py", tmp_path) == list(files.values())[:-1]


def test_only_finished_runs_at_default_settings_are_kept_and_the_newest(tmp_path: Path) -> None:
    out, results = tmp_path / "runs", tmp_path / "docs" / "results"
    keep(out, "1-scalecom", summary(answer="old"))
    keep(out, "2-scalecom", summary(answer="new"))
    keep(out, "3-scalecom", summary(answer="quick", config={"quick": True}))
    keep(out, "4-scalecom", summary(answer="other engine", config={"engine": "ray"}))
    keep(out, "5-scalecom", summary(answer="other settings", changed=["lr=1"]))
    keep(out, "6-gone", summary(experiment="gone"))
    keep(out, "7-scalecom", summary(answer="other seed", config={"seed": 1}))
    (out / "8-scalecom").mkdir()
    store(finished(out, KNOWN), results)
    kept = stored(results)
    assert [each["answer"] for each in kept.values()] == ["new"]
    assert kept["scalecom"]["findings"]["figures"] == []
    assert not {"run", "notes"} & set(kept["scalecom"])
    assert missing(KNOWN, results) == ["modular_sum"]


def test_an_experiment_on_another_engine_is_kept_as_that_runs_by_default(tmp_path: Path) -> None:
    known = {"slow_link": get_experiment("slow_link")}
    assert known["slow_link"].engines == ("superlink",)
    keep(tmp_path, "1", summary(experiment="slow_link", config={"engine": "superlink"}))
    assert set(finished(tmp_path, known)) == {"slow_link"}


def test_an_older_run_does_not_take_the_place_of_a_newer_one(tmp_path: Path) -> None:
    for day, answer in (("2026-02-02", "new"), ("2026-01-01", "old")):
        made = {**summary()["environment"], "finished": f"{day} 00:00:00 UTC"}
        store({"scalecom": summary(answer=answer, environment=made)}, tmp_path)
    assert stored(tmp_path)["scalecom"]["answer"] == "new"


def test_only_an_unfinished_run_of_today_at_default_settings_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    ended = SimpleNamespace(returncode=0)
    monkeypatch.setattr(book.subprocess, "run", lambda words, **_: calls.append(words) or ended)
    experiment = KNOWN["scalecom"]
    today, out = definition(experiment), tmp_path / "runs"

    def begin(of: str, **asked: Any) -> RunFolder:
        return RunFolder.create(out, experiment.configure(**asked), [], of)

    right = begin(today)
    others = [begin("0"), *(begin(today, **each) for each in ({"quick": True}, {"seed": 1}, {"rounds": 3}))]
    for i, folder in enumerate(others):
        # Begun later.
        folder.path.rename(out / f"9{i}-scalecom")
    (out / "95-scalecom").mkdir()
    (out / "95-scalecom" / "config.json").write_text("{", "utf-8")
    book._made(experiment, out)
    assert calls[-1][-2:] == ["--resume", right.name]
    (right.path / "summary.json").write_text("{}", "utf-8")
    book._made(experiment, out)
    assert "--resume" not in calls[-1]


def test_a_stale_run_is_named_and_made_again(tmp_path: Path) -> None:
    store({"scalecom": summary(definition="0")}, tmp_path)
    assert missing(KNOWN, tmp_path) == ["modular_sum", "scalecom"]
    made = pages(KNOWN, tmp_path)
    assert "**stale**: the experiment has changed since" in made["index.md"]
    assert "**stale**" in made["scalecom.md"]
    store(
        {"scalecom": summary(environment={**summary()["environment"], "finished": "2026-02-02 00:00:00 UTC"})}, tmp_path
    )
    assert "stale**:" not in pages(KNOWN, tmp_path)["index.md"]


def test_what_was_missed_comes_first_on_a_page(tmp_path: Path) -> None:
    held = summary()["claims"]
    store({"scalecom": summary(claims=[*held, {**held[0], "name": "a missed one", "ok": False}])}, tmp_path)
    page = pages(KNOWN, tmp_path)["scalecom.md"]
    assert "`python -m experiments.run scalecom`" in page
    assert page.index("a missed one") < page.index("CLT-k: downlink")


def trained(system: str, up: int, accuracy: float | None, **other: Any) -> dict[str, Any]:
    bytes_sent = {"uplink_payload_bytes": up, "peer_payload_bytes": 0}
    return {"system": system, "label": system, "accuracy": accuracy, "clients": 4, "rounds": 9, **bytes_sent, **other}


def test_rows_stand_beside_the_fedavg_of_their_own_experiment() -> None:
    """Not beside that of another one, and not beside one with other clients or rounds."""
    coded = trained("coded", 50, 0.75, peer_payload_bytes=150)
    others = [trained("few", 1, 0.9, clients=2), trained("short", 1, 0.9, rounds=3), trained("regression", 1, None)]
    first = {"data": "digits: here. mnist: there.", "rows": [trained("fedavg", 400, 0.9), coded, *others]}
    second = {"data": "digits: here.", "rows": [trained("fedavg", 4000, 0.5), trained("a", 400, 0.5)]}
    third = {"data": "digits: here.", "rows": [trained("b", 400, 0.5), trained("c", 400, 0.5)]}
    fourth = {**second, "rows": [trained("d", 100, 0.45), trained("fedavg", 4000, 0.5)]}
    rare = {**second, "data": "rare: here."}
    has = {"first": first, "second": second, "third": third, "fourth": fourth, "rare": rare}
    found = beside_fedavg(has)
    assert list(found) == ["digits"], "one row of a task is no picture of it"
    expected = [
        Beside("d", "fourth", 40.0, pytest.approx(-5.0)),
        Beside("a", "second", 10.0, 0.0),
        Beside("coded", "first", 2.0, pytest.approx(-15.0)),
    ]
    assert found["digits"] == expected


def test_full_runs_of_benchmarks_are_added_once(tmp_path: Path) -> None:
    line = {"benchmark": "wire", "quick": False, "commit": "abc", "finished": "2026-01-02T00:00", "failed": []}
    line |= {"values": {"ratio": 2.0}, "environment": {"system": "Linux", "cores": "2"}}
    other = {**line, "commit": "def", "values": {"ratio": 3.0}}
    history = tmp_path / "bench.jsonl"
    history.write_text("".join(json.dumps(each) + "\n" for each in (line, {**line, "quick": True}, other)), "utf-8")
    for _ in range(2):
        keep_benchmarks(history, tmp_path)
    assert len((tmp_path / "benchmarks.jsonl").read_text("utf-8").splitlines()) == 2
    page = pages(KNOWN, tmp_path)["benchmarks.md"]
    assert "| ratio | 3 | 2 |" in page
    assert "(def)" in page


@pytest.mark.parametrize("environment", [report.environment, parts.environment])
def test_the_book_says_on_what_each_benchmark_was_measured(environment: Any, tmp_path: Path) -> None:
    line = {"benchmark": "one", "quick": False, "commit": "abc", "finished": "2026-01-02T00:00", "failed": []}
    line |= {"values": {"ratio": 2.0}, "environment": environment()}
    (tmp_path / "bench.jsonl").write_text(json.dumps(line) + "\n", "utf-8")
    keep_benchmarks(tmp_path / "bench.jsonl", tmp_path)
    assert f"{platform.system()} {platform.machine()}, " in pages(KNOWN, tmp_path)["benchmarks.md"]


def test_a_book_is_written_in_a_checkout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert run.main(["book", "--minutes", "0"]) == 2
    assert "the book is written in a checkout" in capsys.readouterr().err
    assert run.main(["book", "--quick"]) == 2


def test_what_does_not_fit_into_the_time_is_named(tmp_path: Path, capsys: Any) -> None:
    results = tmp_path / "docs" / "results"
    results.parent.mkdir()
    assert write_book(BookRequest(minutes=0.0, out=tmp_path / "runs"), results) == 0
    said = capsys.readouterr().err
    assert all(f"left for --full or --minutes: {name} " in said for name in CATALOG if name != "compare")
    assert "not run yet" in (results / "index.md").read_text("utf-8")


def test_every_published_system_has_an_experiment_and_a_page() -> None:
    assert len({each.name for each in PUBLISHED}) == len(PUBLISHED) >= 24
    for each in PUBLISHED:
        assert each.experiment in CATALOG
        assert (ROOT / "docs" / each.page).is_file(), each.page


@pytest.mark.slow
def test_the_pages_of_the_repository_are_those_of_what_is_stored() -> None:
    known = {name: get_experiment(name) for name in CATALOG}
    results = ROOT / RESULTS
    for place, text in pages(known, results).items():
        assert (results / place).read_text("utf-8") == text, f"{place}: run python -m experiments.run book --minutes 0"
