"""Every mutant is caught by the tier that is there for it, and its original is not."""

from __future__ import annotations

import pytest

from fedcomp.experiments.audits.mutants import MUTANTS

pytestmark = pytest.mark.audit


QUICK = {"clip before memory", "same seed", "record twice"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MUTANTS]
)
def test_a_mutant_is_caught_and_its_original_is_not(name: str) -> None:
    right = MUTANTS[name].original()
    assert right
    assert [v for v in right if not v.ok] == []
    wrong = MUTANTS[name].mutated()
    assert [v for v in wrong if not v.ok], wrong
