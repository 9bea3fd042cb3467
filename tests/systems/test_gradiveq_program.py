"""GradiVeQ as a program: the phases, what travels in them, and forged peaks."""

from __future__ import annotations

import numpy as np
import pytest
from beside_product import TOY, Toy
from toy import SHAPES

from fedcomp.codecs import GradiVeQ, TopK
from fedcomp.codecs.gradiveq import steps_frame
from fedcomp.errors import ConfigError
from fedcomp.local import Local
from fedcomp.program import Answer, Ask, Me, Step
from fedcomp.systems.gradiveq import Drift, FittedBasis

WIDTH = 47
"""25 slices and a tail of 25 of the toy's matrix of 1200; 12 biases travel dense."""
PHASES = {"sampling": 4, "compression": 3}


def system(*, server_lr: float = 1.0, warmup_rounds: int = 0, **options) -> FittedBasis:
    codec = GradiVeQ(**{"width": WIDTH, "loss": 0.3, **options})
    return FittedBasis(codec, server_lr=server_lr, warmup_rounds=warmup_rounds, **PHASES)


def run(local: Local, rounds: int, since: int = 1) -> list[Step | None]:
    return [local.step(number) for number in range(since, since + rounds)]


def compressed(steps: list[Step | None]) -> list[bool]:
    return [step is not None and "basis" in step.blobs for step in steps]


def test_phases_come_in_turn_and_a_round_without_a_step_counts_for_nothing() -> None:
    """Four samples, three rounds in the basis, four samples; rounds 2 and 6 are lost."""
    local = TOY.local(system(), fault=lambda number, node, exchange: "lost" if number in (2, 6) else "")
    steps = run(local, 10)
    assert [step is None for step in steps] == [number in (2, 6) for number in range(1, 11)]
    assert compressed(steps) == [False] * 4 + [False, False] + [True] * 3 + [False]


def test_a_basis_goes_once_to_each_node_and_not_in_dense_rounds() -> None:
    local = TOY.local(system())
    run(local, 4)
    assert local.bytes_down == 0
    run(local, 3, since=5)
    once = 4 * len(local.state["basis"])
    assert local.bytes_down == once
    run(local, 4, since=8)
    assert local.bytes_down == once


def test_what_fills_no_slice_arrives_bit_for_bit() -> None:
    """The toy's updates are integers: a tail that was rounded or projected would not be."""
    for options in ({}, {"values": "q8"}, {"levels": 15}):
        local = TOY.local(system(**options), 1)
        run(local, 6)
        rest = local.model[25 * WIDTH : 1200]
        assert np.array_equal(rest, sum(TOY.made(number, 0) for number in range(1, 7))[25 * WIDTH : 1200])


def test_a_basis_that_drifts_is_given_up_and_one_client_cannot_say_so_for_all() -> None:
    local = TOY.local(system(refresh_tol=1e-6))
    assert compressed(run(local, 10)) == [False] * 4 + [True] + [False] * 4 + [True]

    class Loud(FittedBasis, id="loud"):
        def client(self, memory, ask: Ask, me: Me) -> tuple:
            after, answer = super().client(memory, ask, me)
            loud = me.node == 0 and answer.say is not None
            return after, answer._replace(say=Drift(1e300)) if loud else answer

    # One of four, with the smallest weight of all.
    calm = TOY.local(Loud(GradiVeQ(width=WIDTH, loss=0.3, refresh_tol=0.9), **PHASES))
    assert compressed(run(calm, 7)) == [False] * 4 + [True] * 3


@pytest.mark.parametrize("peaks", [np.float32([-1.0]), np.float32([1.0, 2.0]), np.float32([np.inf])], ids=str)
def test_peaks_that_cannot_be_are_refused_and_their_sender_is_asked_for_nothing(peaks: np.ndarray) -> None:
    class Liar(FittedBasis, id="liar"):
        def client(self, memory, ask: Ask, me: Me) -> tuple:
            after, answer = super().client(memory, ask, me)
            if me.node == 1 and "peaks" in answer.frames:
                answer = Answer(me.node, frames={"peaks": steps_frame(peaks)})
            return after, answer

    local = TOY.local(Liar(GradiVeQ(width=WIDTH, levels=15), **PHASES))
    steps = run(local, 6)
    assert [step.consumed for step in steps[4:]] == [(0, 2, 3)] * 2
    assert [len(local.refused[number]) for number in (4, 5, 6)] == [0, 1, 1]


def test_a_model_of_other_tensors_is_sampled_anew() -> None:
    local = TOY.local(system())
    run(local, 5)
    other = Toy({**SHAPES, "more": (40, 40)}).local(system(), state=local.state)
    assert compressed(run(other, 5)) == [False] * 4 + [True]


def test_what_it_does_not_take() -> None:
    with pytest.raises(ConfigError, match="GradiVeQ"):
        FittedBasis(TopK(0.1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="center"):
        system(center=True, server_lr=0.5)
    for options in ({"sampling": 2}, {"compression": 0}):
        with pytest.raises(ConfigError, match="integer"):
            FittedBasis(GradiVeQ(), **options)
