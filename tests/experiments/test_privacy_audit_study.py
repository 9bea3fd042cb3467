"""The study of the privacy audit: what is counted as refuted and caught, and what the installed Flower does."""

from __future__ import annotations

import math

import flwr
import pytest

from fedcomp.experiments.audits.flower_flaws import findings
from fedcomp.experiments.studies.privacy_audit import TIERS, quantities


def verdict(tier: str, ok: bool = True) -> dict:
    return {"tier": tier, "ok": ok, "found": 1.0, "claimed": 1.0}


def test_refuted_systems_and_missed_mutants_are_counted() -> None:
    audits = {"votes": [verdict(tier) for tier in TIERS], "message": [verdict(tier, tier != "B") for tier in TIERS]}
    runs = {kind: [verdict("D", kind != "no noise")] for kind in ("votes", "clipped vectors", "no noise")}
    caught = {"original": [verdict("A")], "mutated": [verdict("A", False)]}
    missed = {"original": [verdict("A")], "mutated": [verdict("A")]}
    wrong = {"original": [verdict("A", False)], "mutated": [verdict("A", False)]}
    flower = {"clips": {"1": [1.0, 9.0]}, "ours": {"1": [5.0, 0.5]}, "moved": [1.0, 0.0], "nan": 0.25, "zero": ""}
    floats = {"float32 noise": [0.5, 0.25], "integer noise on the grid": [0.0, 0.0]}
    found = quantities(audits, runs, {"caught": caught, "missed": missed, "wrong": wrong}, floats, flower)
    against = {tier: found[f"tier {tier}", "verdicts against a system"] for tier in (*TIERS, "D")}
    assert against == {"A": 0, "B": 1, "C": 0, "E": 0, "F": 0, "D": 0}
    assert found["attacks that refute"] == found["tier D", "forgotten noise is noticed"] == 1
    assert (found["mutants caught"], found["mutants not told from their originals"]) == (1, 2)
    assert found["our adaptive clip norm, factor from the median"] == 2.0
    # No verdict is no pass.
    empty = quantities({"votes": [verdict("C")]}, runs, {}, floats, flower)
    assert math.isnan(empty["tier A", "verdicts against a system"])


@pytest.mark.long
def test_flowers_defects_are_those_of_the_installed_version() -> None:
    """Where a later version mends one, the page on privacy has to be told."""
    kept = findings(8)
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
