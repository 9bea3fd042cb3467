"""What factors are compared with: lengths by formula, rules that are wrong, and exchanges layer by layer."""

from __future__ import annotations

import pytest

from fedcomp.experiments.studies import pooled
from fedcomp.experiments.studies.factors import layer_by_layer, lengths, prices


def test_frames_hold_the_numbers_of_the_formulas() -> None:
    assert lengths(3) == {"whole": 235_146, "dad": 49_984, "edad": 37_696, "rank": 4 * (1040 + 384 + 138) + 394}


@pytest.mark.parametrize("name", pooled.MODELS)
def test_wrong_rules_are_far_from_one_batch_of_all_examples(name: str) -> None:
    from fedcomp.codecs import Identity

    expected = pooled.pooled(name, 2, 5)
    off = {rule: pooled.difference(pooled.in_rounds(name, Identity(), 2, 5, rule), expected) for rule in pooled.RULES}
    assert off["examples"] <= 1e-5
    assert min(off["even"], off["sum"]) > 1e-3


def test_an_exchange_for_each_layer_changes_nothing_but_time() -> None:
    assert layer_by_layer(2, 3) == 0.0
    for at_once, by_layer, during in prices().values():
        assert by_layer > during > 0
        assert by_layer > at_once
