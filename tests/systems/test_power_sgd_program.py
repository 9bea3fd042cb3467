"""PowerSGD as a program: what travels, and the memory of the mean."""

from __future__ import annotations

import numpy as np
import pytest
from beside_product import LAYOUT, TOY

from fedcomp.codecs import PowerSGD, TopK
from fedcomp.errors import ConfigError
from fedcomp.systems.power_sgd import SharedBasis

FORMS = ("alternating", "two-exchange")


def test_a_basis_travels_to_nodes_alone_that_did_not_apply_the_step_it_follows_from() -> None:
    local = TOY.local(SharedBasis(PowerSGD(2)), 3)
    for number in (1, 2, 3, 4):
        local.step(number)
    # The first one all draw by themselves.
    assert local.bytes_down == 0
    local.held[1].clear()
    local.step(5)
    assert 4 * 2 * 30 < local.bytes_down < 4 * 2 * 40 + 120


def test_the_two_exchanges_send_one_basis_each_and_the_step_is_read_in_it() -> None:
    system = SharedBasis(PowerSGD(2, form="two-exchange"))
    local = TOY.local(system, 3)
    local.step(1), local.step(2)
    before = local.model.copy()
    step = local.step(3)
    codec = system.reads(step.blobs, 3, LAYOUT)
    assert np.array_equal(local.model, before + codec.decode(step.frame, LAYOUT))
    assert [sorted(answer.frames) for answer in local.answers] == [["first"]] * 3 + [["values"]] * 3


@pytest.mark.parametrize("form", FORMS)
def test_the_aggregated_memory_is_what_was_made_minus_the_means_even_of_a_node_that_was_away(form: str) -> None:
    """Nodes 0 and 2 are away in rounds 3 and 4: the mean that corrects them comes when they are back."""
    codec = PowerSGD(2, form=form, memory="aggregated")
    present = [[0, 1, 2], [0, 1, 2], [1, 2], [1], [0, 1, 2]]
    local = TOY.local(SharedBasis(codec), 3)
    delivered, made = np.zeros((3, LAYOUT.size)), np.zeros((3, LAYOUT.size))
    for number, nodes in enumerate(present, 1):
        before = local.model.astype(np.float64)
        assert local.step(number, nodes) is not None
        for node in nodes:
            delivered[node] += local.model - before
            made[node] += TOY.made(number, node)
    assert local.state["sent"] == {"0": "5", "1": "5", "2": "5"}
    weight, bias = slice(0, LAYOUT.compressed_size), slice(LAYOUT.compressed_size, None)
    for node, client in local.clients.items():
        corrected = codec.correct(dict(client.memory), local.state["means"]["5"], LAYOUT)["memory"]
        assert np.abs(made[node] - delivered[node] - corrected)[weight].max() < 0.5
        assert np.abs(corrected - client.memory["memory"])[weight].max() > 1.0
        # What travels whole leaves nothing.
        assert not corrected[bias].any()


def test_means_are_kept_for_those_alone_that_need_them_and_never_more_than_a_model() -> None:
    codec = PowerSGD(2, memory="aggregated")
    present = [list(range(24)), *([node] for node in range(24)), *[[0]] * 3]
    local = TOY.local(SharedBasis(codec), 24)
    for number, nodes in enumerate(present, 1):
        local.step(number, nodes)
    assert set(local.state["means"]) == set(local.state["sent"].values())
    kept = [len(mean) for mean in local.state["means"].values()]
    assert 4 * LAYOUT.size - max(kept) < sum(kept) <= 4 * LAYOUT.size, "the oldest one went for want of room"
    assert local.state["sent"]["23"] == "25"


def test_other_codecs_and_a_step_size_that_the_memory_contradicts_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs PowerSGD as its codec, got TopK"):
        SharedBasis(TopK(0.1))
    with pytest.raises(ConfigError, match="makes another step than the mean"):
        SharedBasis(PowerSGD(memory="aggregated"), server_lr=0.5)
