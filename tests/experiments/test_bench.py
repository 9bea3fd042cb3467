"""The command line of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedcomp.experiments.bench import BENCHMARKS
from fedcomp.experiments.bench.__main__ import Benchmarks, main
from fedcomp.measuring import HISTORY

MODULE = """
from fedcomp.measuring import Bound, Case

def cases(quick):
    def measure(found):
        print("noise")
        return [{"case": "a", "bytes": 1200, "ratio": 0.5}, {"case": "b", "bytes": 3, "note": "[x]"}]

    size, bound = lambda found: found.of("bytes", case="a"), "<= 2000" if quick else "<= 1000"
    yield Case("measuring", measure, [Bound("small", size, bound, "test", sure=True)])
"""

BROKEN = """
def cases(quick):
    raise RuntimeError("no\\nroom")
"""


@pytest.fixture
def benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Benchmarks:
    (tmp_path / "bench_module_small.py").write_text(MODULE)
    (tmp_path / "bench_module_broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Where a run leaves its line.
    monkeypatch.chdir(tmp_path)
    return {"small": ("bench_module_small", "how small"), "broken": ("bench_module_broken", "nothing")}


def test_json_is_one_document_and_quick_reaches_the_module(
    benchmarks: Benchmarks, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["small", "--json", "--quick"], benchmarks=benchmarks) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["benchmark"] == "small"
    assert document["quick"] is True
    assert document["rows"][0] == {"case": "a", "bytes": 1200, "ratio": 0.5}
    assert document["claims"][0]["ok"] is True
    assert "measuring" in err
    assert "noise" in err


def test_every_run_leaves_a_line(benchmarks: Benchmarks, tmp_path: Path) -> None:
    assert [main(["small", *quick], benchmarks=benchmarks) for quick in ([], ["--quick"])] == [1, 0]
    lines = [json.loads(line) for line in (tmp_path / HISTORY).read_text().splitlines()]
    assert [(line["benchmark"], line["quick"], line["failed"]) for line in lines] == [
        ("small", False, ["small"]),
        ("small", True, []),
    ]
    assert lines[0]["values"] == {"small": 1200.0}
    assert lines[0]["environment"]["fedcomp"]


def test_a_history_that_cannot_be_written_is_said_and_changes_nothing(
    benchmarks: Benchmarks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / HISTORY.parent).write_text("not a folder")
    assert main(["small", "--quick"], benchmarks=benchmarks) == 0
    assert "could not be written" in capsys.readouterr().err


def test_a_failed_claim_is_exit_code_1(benchmarks: Benchmarks, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["small"], benchmarks=benchmarks) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out
    # Rows of other columns stand in a table of their own; text that looks like markup is shown as it is.
    assert next(line for line in out.splitlines() if line.startswith("b")).split() == ["b", "3", "[x]"]


def test_a_peer_that_is_not_installed_gates_nothing(
    benchmarks: Benchmarks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped = 'Bound("beside", "x / zfec", "<= 1", "test", skipped="zfec is not installed: pip install zfec")'
    (tmp_path / "bench_module_alone.py").write_text(MODULE.replace('Bound("small", ', f'{skipped}, Bound("small", '))
    known = {"alone": ("bench_module_alone", "alone")}
    assert main(["alone", "--quick"], benchmarks=known) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "not measured" in out
    assert "pip install" in out, "also on a narrow terminal"
    assert out.endswith("The one claim holds, 1 not measured.")
    assert main(["alone", "--quick", "--json"], benchmarks=known) == 0
    claim = json.loads(capsys.readouterr().out)["claims"][0]
    assert (claim["value"], claim["ok"], claim["gate"]) == (None, None, False)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["smal"], "'small'"), ([], "small"), (["small", "--jsn"], "--json"), (["small", "x"], "x")],
)
def test_wrong_input_is_one_line(
    benchmarks: Benchmarks, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    assert main(arguments, benchmarks=benchmarks) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert word in err


def test_a_broken_benchmark_is_one_line(benchmarks: Benchmarks, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broken"], benchmarks=benchmarks) == 3
    assert capsys.readouterr().err.splitlines()[-1] == "error: benchmark 'broken' broke: RuntimeError: no room"


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in BENCHMARKS)
