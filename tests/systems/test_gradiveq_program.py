"""GradiVeQ as a program: the phases, what travels in them, and equality with the strategy that it stands for."""

from __future__ import annotations

import numpy as np
import pytest
from beside_product import TOY, Toy, assert_equal, everybody, faults, product, program, some
from toy import SHAPES

from fedcomp.clients.programs import programs
from fedcomp.codecs import GradiVeQ, TopK
from fedcomp.codecs.gradiveq import steps_frame
from fedcomp.errors import ConfigError
from fedcomp.flower import store
from fedcomp.local import Local
from fedcomp.program import Answer, Ask, Me, Step
from fedcomp.strategies.gradiveq import FittedBasis as Strategy
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


VARIANTS = [
    {"memory": True, "levels": 15},
    {},
    {"center": True, "memory": True},
    {"basis": "per_slice", "most": 2},
    {"basis": "shared_first", "order": "FDHW", "norm_guard": 2.0, "memory": True},
    {"values": "q8", "server_lr": 0.5},
    {"levels": 127, "center": True},
    {"refresh_tol": 1e-6},
    {"width": 5000},
]


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        pytest.param(options, lost, marks=pytest.mark.long if i or not lost else pytest.mark.slow)
        for i, options in enumerate(VARIANTS)
        for lost in (0.0, 0.2)
    ],
    ids=str,
)
def test_it_is_the_strategy_bit_for_bit(options: dict, lost: float) -> None:
    """Frames that come and go, models, memories, metrics: warm-up, two cycles, absent nodes, messages lost in either
    exchange. The basis serves in rounds 6 to 8, and in 13 to 15."""
    ours = system(warmup_rounds=1, **options)
    theirs = Strategy(ours.codec, server_lr=ours.server_lr, warmup_rounds=1, fraction_evaluate=0.0, **PHASES)
    how = {"fault": faults(lost), "present": some(4, 14) if lost else everybody(4, 14)}
    new, local = program(ours, 4, 14, **how)
    assert_equal(product(theirs, programs(), 4, 14, **how), new)
    assert np.abs(local.model).max() > 1000


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


def test_a_state_that_was_stored_goes_on_to_the_bit_in_every_phase() -> None:
    """What is between rounds is plain: it passes the container of checkpoints."""
    whole = TOY.local(system(warmup_rounds=1, levels=15))
    for number in range(1, 14):
        whole.step(number)
        parts = TOY.local(
            system(warmup_rounds=1, levels=15), state=store.loads(store.dumps(whole.state, "state"), "state")
        )
        parts.model, parts.clients, parts.held = whole.model.copy(), dict(whole.clients), dict(whole.held)
        parts.sequence, whole = whole.sequence, parts
    straight = TOY.local(system(warmup_rounds=1, levels=15))
    run(straight, 13)
    assert np.array_equal(straight.model.view(np.uint32), whole.model.view(np.uint32))


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
