"""The benchmark's own rules, on tiny sizes: what is printed, what gates, what is skipped and why."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

from fedcomp.coding import kernels
from fedcomp.coding.bench import __main__ as bench
from fedcomp.coding.bench import parts
from fedcomp.measuring import Bound, Case, run

TINY = parts.Size(4096, 2, 0.0)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run leaves its line."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_json_is_one_document_with_every_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # galois compiles for every field, which takes most of a minute; its products are oracles elsewhere.
    monkeypatch.setattr(parts, "_galois", lambda order, a, b: lambda: a.sum())
    assert bench.main(["--json", "--quick"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert set(document) == {"benchmark", "quick", "rows", "claims", "environment"}
    measured = {row["part"] for row in document["rows"]}
    assert measured >= {"encode", "many symbols", "small generation", "decode", "end to end"}
    encoded = {(row["K"], row["method"]) for row in document["rows"] if row["part"] == "encode"}
    for k in (16, 64):
        for method in (*[t for t in kernels.tiers() if t != "isal"], "galois", "numpy table, take and XOR", "memcpy"):
            assert (k, method) in encoded
    assert {r["method"] for r in document["rows"] if r["part"] == "product, GF(251)"} == {"GF(251)", "galois"}
    assert all(row["microseconds"] > 0 for row in document["rows"])
    assert not any(claim["gate"] for claim in document["claims"]), "figures of a quick run mean nothing"
    assert "encode" in printed.err, "progress is on standard error"


def only(monkeypatch: pytest.MonkeyPatch, bound: Bound) -> None:
    """Let the benchmark consist of this claim."""
    monkeypatch.setattr(parts, "cases", lambda quick: [Case(bounds=[bound])])


@pytest.mark.parametrize(
    ("bound", "code", "shown"),
    [
        (Bound("faster", lambda _: 2.0, ">= 1.5", "us"), 0, "holds"),
        (Bound("faster", lambda _: 1.4, ">= 1.5", "us"), 1, "FAILED"),
        (Bound("faster", lambda _: math.nan, ">= 1.5", "us"), 1, "FAILED"),
        (Bound("stretch", lambda _: 1.4, ">= 1.5", "us", gate=False), 0, "missed"),
        (Bound("absent", "a / b", ">= 1.5", "us", skipped="this CPU lacks gfni"), 0, "this CPU lacks gfni"),
    ],
)
def test_only_a_failed_claim_that_gates_fails_the_run(
    bound: Bound, code: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, bound)
    assert bench.main([]) == code
    printed = capsys.readouterr().out
    assert shown in printed
    assert ("1 of 1 claims were not measured" in printed) == bool(bound.skipped)
    assert ("every claim that gates holds" in printed) == (code == 0 and not bound.skipped)
    assert bench.main(["--json"]) == code
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert (claim["name"], claim["gate"]) == (bound.name, bound.gate and not bound.skipped)
    assert (claim["ok"] is None) == bool(bound.skipped)


@pytest.mark.slow
def test_what_is_missing_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.isal, "libraries", tuple)
    monkeypatch.setattr(parts.kernels, "tiers", lambda: ("swar", "numpy"))
    monkeypatch.setattr(parts.kernels, "why_not", lambda tier: f"no {tier} here")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    found = run(parts.encoding(TINY))
    assert {row["method"] for row in found.rows} == {"swar", "numpy", "numpy table, take and XOR", "memcpy"}
    skipped = {claim.name: claim.skipped for claim in found.claims if claim.ok is None}
    assert skipped["encode, K = 16: gfni512 times as fast as ISA-L"] == "no gfni512 here"
    assert skipped["encode, K = 16: swar times as fast as zfec"] == ("zfec is not installed: pip install zfec")
    primes = run(parts.primes(TINY)).claims
    assert {claim.skipped for claim in primes} == {"galois is not installed: pip install galois"}
    assert {claim.ok for claim in primes} == {None}
    assert parts.environment()["galois"] == "not installed"
    assert [claim.name for claim in found.claims if claim.ok is not None] == [
        f"encode, K = {k}: swar times as fast as numpy table, take and XOR" for k in (16, 64)
    ]
