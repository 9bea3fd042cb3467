"""The experiment on modular sums: its claims hold at a small size, and a sum that depends on the tree is noticed."""

from __future__ import annotations

import pytest
from experiment_runs import ran

from fedcomp.codecs import ModularSum
from fedcomp.experiments.catalog import modular_sum
from fedcomp.experiments.findings import Findings

SMALL = ("seeds=1", "values=4000", "trees=2", "uses=2", "senders=3", "workers=1")


def measured() -> Findings:
    return ran(modular_sum.EXPERIMENT, *SMALL).findings


def failed(found: Findings) -> set[str]:
    return {claim.name for claim in found.claims if claim.gate and not claim.ok}


@pytest.mark.long
def test_claims_hold_but_for_those_about_the_size() -> None:
    names = failed(measured())
    assert names <= {name for name in names if "error" in name}


@pytest.mark.long
def test_sums_that_differ_with_the_tree_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    add = ModularSum.add

    def careless(self, frames, layout):
        # The last of many is forgotten: which one that is depends on the tree.
        return add(self, frames[:-1] if len(frames) > 2 else frames, layout)

    monkeypatch.setattr(ModularSum, "add", careless)
    assert "different sums along all trees" in failed(measured())
