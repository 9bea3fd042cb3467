"""The benchmark's own rules, on tiny sizes: what is printed, what gates, what is skipped and why."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import time
from typing import Any

import pytest

from fedcomp.coding import kernels
from fedcomp.coding.bench import __main__ as bench
from fedcomp.coding.bench import parts
from fedcomp.coding.bench.measuring import BenchClaim, CallTimes, Prepared, Size
from fedcomp.experiments.findings import Claim
from fedcomp.experiments.report import mark

TINY = Size(generation=4096, repetitions=2, quick=True)


@pytest.mark.slow
def test_json_is_one_document_with_every_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # galois compiles for every field, which takes most of a minute; the slow test has it.
    monkeypatch.setattr(parts, "_galois", lambda order, a, b: lambda: a.sum())
    assert bench.main(["--json"], size=TINY) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert set(document) == {"rows", "claims", "environment"}
    measured = {row["part"] for row in document["rows"]}
    assert measured >= {"encode", "few rows", "small generation", "decode", "for scale", "end to end"}
    encoded = {(row["K"], row["method"]) for row in document["rows"] if row["part"] == "encode"}
    for k in (16, 64):
        for method in (*[t for t in kernels.tiers() if t != "isal"], "galois", "numpy table, take and XOR", "memcpy"):
            assert (k, method) in encoded
    assert all(row["microseconds"] > 0 for row in document["rows"])
    assert not any(claim["gate"] for claim in document["claims"]), "figures of a quick run mean nothing"
    assert "encoding" in printed.err, "progress is on standard error"


@pytest.mark.long
def test_the_quick_run_from_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "coding.bench", "--quick", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)["rows"]
    assert {row["method"] for row in rows if row["part"] == "product, GF(251)"} == {"GF(251)", "galois"}


def only(monkeypatch: pytest.MonkeyPatch, claims: list[BenchClaim]) -> None:
    """Let the benchmark consist of these claims."""
    for part in (
        "encoding",
        "few_rows",
        "many_symbols",
        "small_generations",
        "decoding",
        "primes",
        "scale",
        "end_to_end",
    ):
        monkeypatch.setattr(parts, part, _named(part, claims if part == "encoding" else []))


def _named(name: str, claims: list[BenchClaim]) -> Any:
    def part(_size: Size) -> Any:
        return [], claims

    part.__name__ = name
    return part


@pytest.mark.parametrize(
    ("claim", "code", "shown"),
    [
        (BenchClaim("faster", 2.0, ">=", 1.5, "us"), 0, "holds"),
        (BenchClaim("faster", 1.4, ">=", 1.5, "us"), 1, "FAILED"),
        (BenchClaim("faster", float("nan"), ">=", 1.5, "us"), 1, "FAILED"),
        (BenchClaim("stretch", 1.4, ">=", 1.5, "us", gate=False), 0, "missed"),
        (BenchClaim("absent", None, ">=", 1.5, "us", skipped="this CPU lacks gfni"), 0, "this CPU lacks gfni"),
    ],
)
def test_only_a_failed_claim_that_gates_fails_the_run(
    claim: BenchClaim, code: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, [claim])
    assert bench.main([], size=Size(repetitions=1)) == code
    assert shown in capsys.readouterr().out


@pytest.mark.slow
def test_what_is_missing_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.isal, "libraries", tuple)
    monkeypatch.setattr(parts.kernels, "tiers", lambda: ("swar", "numpy"))
    monkeypatch.setattr(parts.kernels, "why_not", lambda tier: f"no {tier} here")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    rows, claims = parts.encoding(TINY)
    assert {row["method"] for row in rows} == {"swar", "numpy", "numpy table, take and XOR", "memcpy"}
    skipped = {claim.name: claim.skipped for claim in claims if claim.ok is None}
    assert skipped["encode, K = 16: gfni512 times as fast as ISA-L"] == "no gfni512 here"
    assert skipped["encode, K = 16: swar times as fast as zfec"] == ("zfec is not installed: pip install zfec")
    _, primes = parts.primes(TINY)
    assert {claim.skipped for claim in primes} == {"galois is not installed: pip install galois"}
    assert {claim.ok for claim in primes} == {None}
    assert parts.environment()["galois"] == "not installed"
    assert [claim.name for claim in claims if claim.ok is not None] == [
        f"encode, K = {k}: swar times as fast as numpy table, take and XOR" for k in (16, 64)
    ]


def test_claims_end_in_the_words_of_the_other_benchmarks() -> None:
    """``coding`` is a layer below :mod:`fedcomp.experiments.report` and cannot take them from there."""
    for value, gate, skipped in ((2.0, True, ""), (1.0, True, ""), (1.0, False, ""), (None, True, "no zfec")):
        ours = BenchClaim("faster", value, ">=", 1.5, "us", gate, skipped)
        theirs = Claim("faster", math.nan if value is None else value, ">=", 1.5, "us", gate, skipped)
        assert theirs.ok is ours.ok
        assert bench._ended({"ok": ours.ok, "gate": gate}) == mark(theirs.to_json())


def test_what_was_not_measured_gates_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, [BenchClaim("absent", None, ">=", 1.5, "us", skipped="zfec is not installed: pip install zfec")])
    assert bench.main(["--json"], size=Size(repetitions=1)) == 0
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert (claim["ok"], claim["gate"], claim["value"]) == (None, False, None)
    assert bench.main([], size=Size(repetitions=1)) == 0
    printed = capsys.readouterr().out
    assert "not measured" in printed
    assert "pip install zfec" in printed
    assert "every claim that gates holds" not in printed


def test_ratios_are_medians_within_repetitions() -> None:
    times = CallTimes({}, TINY)
    times.seconds = {"a": [1.0, 10.0, 3.0], "b": [2.0, 30.0, 3.0], "c": [1.0, 0.0, 1.0]}
    assert times.time("a") == 3.0
    assert times.faster("a", "b") == 2.0
    assert times.ratio(["a", "c"], ["b"]) == 1.0


@pytest.mark.slow
def test_a_sample_begins_warm_unless_its_call_is_long() -> None:
    """Otherwise a method below a millisecond a call would be timed warm, one just above it cold."""
    seen: list[str] = []

    def busy(name: str, seconds: float) -> None:
        seen.append(name)
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    size = Size(generation=4096, repetitions=1)
    times = CallTimes({"medium": lambda: busy("medium", 0.003), "long": lambda: busy("long", 0.08)}, size)
    # Two calls each to see how long they take; then a warm one and a timed one, or a timed one only.
    assert seen == ["medium"] * 2 + ["long"] * 2 + ["medium"] * 2 + ["long"]
    assert len(times.seconds["medium"]) == len(times.seconds["long"]) == 1


def test_preparing_is_not_timed() -> None:
    def prepare() -> int:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return 7

    seen: list[int] = []
    times = CallTimes({"use": Prepared(prepare, seen.append)}, TINY)
    assert times.time("use") < 0.01
    assert seen == [7, 7]
