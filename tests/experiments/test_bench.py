"""The command line of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedcomp.experiments.bench import BENCHMARKS
from fedcomp.experiments.bench.__main__ import Benchmarks, main

ROOT = Path(__file__).parents[2]

MODULE = """
from fedcomp.experiments.findings import Claim

def run(*, quick=False, progress=None):
    if progress is not None:
        progress("measuring")
    print("noise")
    rows = [{"case": "a", "bytes": 1200, "ratio": 0.5}, {"case": "b", "bytes": 3, "note": "[x]"}]
    return {"rows": rows, "claims": [Claim("small", 1200.0, "<=", 2000.0 if quick else 1000.0, "test")]}
"""

BROKEN = """
def run(*, quick=False, progress=None):
    raise RuntimeError("no\\nroom")
"""


@pytest.fixture
def benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Benchmarks:
    (tmp_path / "bench_module_small.py").write_text(MODULE)
    (tmp_path / "bench_module_broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
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


def test_a_failed_claim_is_exit_code_1(benchmarks: Benchmarks, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["small"], benchmarks=benchmarks) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out
    # Rows of other columns stand in a table of their own; text that looks like markup is shown as it is.
    assert next(line for line in out.splitlines() if line.startswith("b")).split() == ["b", "3", "[x]"]


def test_a_peer_that_is_not_installed_gates_nothing(
    benchmarks: Benchmarks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped = 'Claim("beside", 9.0, "<=", 1.0, "test", skipped="zfec is not installed: pip install zfec")'
    (tmp_path / "bench_module_alone.py").write_text(MODULE.replace('Claim("small", ', f'{skipped}, Claim("small", '))
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
