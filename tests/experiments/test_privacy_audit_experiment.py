"""The experiment on the privacy audit, with few subjects and few runs."""

from __future__ import annotations

import math

import flwr
import pytest
from experiment_runs import Ran, ran, resumes

from fedcomp.experiments.audits import cases, mutants, systems
from fedcomp.experiments.catalog import privacy_audit
from fedcomp.experiments.catalog.privacy_audit import claims

SMALL = ("runs=60", "noise_runs=5", "canaries=150", "guesses=40", "clip_rounds=8", "float_draws=2000")


@pytest.fixture(scope="module")
def run() -> Ran:
    """Two systems, two mutants, and the installed Flower."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "SUBJECTS", {"votes": cases.votes_sum})
        patch.setattr(systems, "SUBJECTS", {"message": systems.PrivateMessages})
        patch.setattr(mutants, "MUTANTS", {name: mutants.MUTANTS[name] for name in ("no clip", "no root of k")})
        made = ran(privacy_audit.EXPERIMENT, *SMALL, judging=privacy_audit)
        assert resumes(privacy_audit.EXPERIMENT, made)
    return made


@pytest.mark.long
def test_tables_say_what_was_audited_and_what_was_caught(run) -> None:
    findings = run.findings
    tables = {table.title: table for table in findings.tables}
    audited = tables["Audited systems"]
    assert [row[0] for row in audited.rows] == ["votes", "message"]
    assert {row[-1] for row in audited.rows} == {"stands"}
    assert {row[-1] for row in tables["Mutants"].rows} == {"yes"}
    runs = {row[0]: row[-1] for row in tables["D: one run with many canaries"].rows}
    assert runs == {"votes": "stands", "clipped vectors": "stands", "no noise": "REFUTED"}
    power = {row[0]: row for row in tables["Power of the canary audit"].rows}
    assert power[2000][1] == pytest.approx(0.85, abs=0.005)
    assert power[5000][3] == pytest.approx(0.547, abs=0.002)


@pytest.mark.long
def test_claims_read_the_findings_and_refuted_systems_fail_them(run) -> None:
    _, _, findings, _, (audits, runs, tried, floats, flower) = run
    found = {claim.name: claim for claim in findings.claims}
    promised = [claim for name, claim in found.items() if name.startswith("tier") and "weakest" not in name]
    assert len(promised) == 7
    assert all(claim.ok for claim in promised)
    assert found["mutants not told from their originals"].ok
    # Two of nineteen were tried, and eight rounds are too few for a clip norm to arrive.
    assert not found["mutants tried"].ok
    assert not found["our adaptive clip norm, factor from the median"].ok
    refuted = {name: [{**v, "ok": v["tier"] != "B"} for v in audit] for name, audit in audits.items()}
    missed = {name: {**mutant, "mutated": mutant["original"]} for name, mutant in tried.items()}
    worse = {claim.name: claim for claim in claims(refuted, runs, missed, floats, flower)}
    lost = {name for name, claim in worse.items() if found[name].ok and not claim.ok}
    assert lost == {"tier B: verdicts against a system", "mutants not told from their originals"}
    of_flower = [claim for name, claim in found.items() if name.startswith("Flower")]
    assert len(of_flower) == 4
    assert not any(claim.gate for claim in of_flower)


@pytest.mark.long
def test_flowers_defects_are_those_of_the_installed_version(run) -> None:
    """Where a later version mends one, the page on privacy has to be told."""
    kept = run.kept["Flower"]
    assert kept["version"] == flwr.__version__
    assert kept["zero"] == "ZeroDivisionError"
    assert kept["integer"] == "UFuncTypeError"
    assert kept["moved"] == [1.0, 0.0]
    assert kept["nan"] == kept["inf"] == 0.25
    assert kept["metric"] == 1.0
    assert kept["missing"] == pytest.approx(0.25, rel=0.05)
    assert kept["heavy"] == pytest.approx(9.17, rel=0.05)
    all_clipped, none_clipped = kept["adaptive"]
    assert all_clipped == pytest.approx(math.exp(-0.1), rel=0.1)
    assert none_clipped == pytest.approx(math.exp(0.1), rel=0.1)
    assert kept["local"]["1/1"] == pytest.approx(1.61, rel=0.02)
    # Away from the median in either direction, where ours goes towards it.
    for start, clips in kept["clips"].items():
        ours = kept["ours"][start]
        assert abs(math.log(clips[-1])) > abs(math.log(clips[0]))
        assert abs(math.log(ours[-1])) < abs(math.log(ours[0]))
