"""The study ``gradiveq``: bases of later gradients, and sums on grids."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.experiments.central import Sending
from fedcomp.experiments.studies import gradiveq
from fedcomp.experiments.studies.gradiveq import KINDS, LAYERS, LAYOUTS, fits, fitted, layout_of, ring_is_star, times
from fedcomp.gossip.ring import RingSum, ring_sum
from fedcomp.rng import Key

SHAPES = {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "conv3": (64, 32, 3, 3)}


def test_ring_and_star_are_compared_where_all_rounded_on_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    sending = Sending(fitted(0, 10, 2, most=64, levels=7), layout, 4, seed=1)
    for number in range(1, 12):
        drawn = Key(0, "toy", number).generator().standard_normal((4, layout.size))
        _, cost = sending.send(number, list(drawn.astype(np.float32)))
        assert ring_is_star(sending.local)
    local, dense = sending.local, 4 * layout.size * 4
    assert cost.uplink < dense / 15

    def forgetful(vectors: list[np.ndarray], levels: int) -> RingSum:
        return ring_sum(vectors[:-1], levels)

    monkeypatch.setattr(gradiveq, "ring_sum", forgetful)
    assert not ring_is_star(local)


@pytest.mark.long
def test_bases_are_measured_after_their_window() -> None:
    found = fits(2, 0, sampled=3, later=2)
    assert set(found["missed"]) == {f"{o}/{k}/{layer}" for o in LAYOUTS for k in KINDS for layer in LAYERS}
    assert all(0.0 < share < 3.0 for share in found["missed"].values())
    assert 0.0 < found["apart"] < 2e-6


def test_a_code_that_can_be_added_gains_more_at_the_same_ratio() -> None:
    for count in (4, 16):
        at = times(count)
        assert at["summable"] < min(at["hop by hop"], at["gathered"], at["ring"])
