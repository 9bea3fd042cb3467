"""The study of modular sums: a sum that depends on the tree is noticed."""

from __future__ import annotations

import pytest

from fedcomp.codecs import ModularSum
from fedcomp.experiments.studies.modular_sum import exact


def test_sums_that_differ_with_the_tree_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exact(20, 1, size=200, levels=3, trees=4)["sums"] == 1
    add = ModularSum.add

    def careless(self, frames, layout):
        # The last of many is forgotten: which one that is depends on the tree.
        return add(self, frames[:-1] if len(frames) > 2 else frames, layout)

    monkeypatch.setattr(ModularSum, "add", careless)
    assert exact(20, 1, size=200, levels=3, trees=4)["sums"] > 1
