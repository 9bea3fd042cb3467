"""Dyna-COLD: one bit per coordinate, a scale that both ends keep equal, and what happens when it is the wrong one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from gossip_problems import problem, ring_weights, run, slope, view_of

from fedcomp import wire
from fedcomp.codecs import PositionalCodec, Stretch
from fedcomp.codecs.positional import expected_dense
from fedcomp.gossip.base import deliver, messages_of
from fedcomp.gossip.cold import COLD
from fedcomp.gossip.compressor import Compressor
from fedcomp.gossip.dyna_cold import DynaCOLD
from fedcomp.gossip.errors import OutOfStep, Saturated
from fedcomp.gossip.estimates import digests
from fedcomp.gossip.packet import HEADER_BYTES, MessageFlag, peek
from fedcomp.gossip.tuning import DivergenceWatch
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.wire import Expected, Tensor

TASK = problem(n=5, d=20, kappa=4.0)
L = TASK.smoothness
RING = ring_weights(TASK.n)
NORM = max(float(np.abs(g).max()) for g in TASK.gradients(np.zeros((TASK.n, TASK.d))))
GEOMETRIC = DynaCOLD(lr=1.0 / L, gamma=0.5, scale="geometric", rho=0.95, s0=NORM / L * 1.001)
ZOOM = DynaCOLD(lr=1.0 / L)


@pytest.mark.slow
def test_7_10_the_error_falls_at_the_rate_of_the_scale_and_a_message_has_one_bit_per_coordinate() -> None:
    ran = run(replace(GEOMETRIC, digest_every=0), TASK, 300)
    rate, straight = slope(ran.errors, low=1e-7)
    assert math.log(rate) == pytest.approx(math.log(0.95), rel=0.05)
    assert straight > 0.99
    assert ran.errors[-1] < 1e-6
    assert {size for sizes in ran.payloads.values() for size in sizes} == {HEADER_BYTES + math.ceil(TASK.d / 8)}
    assert len(ran.payloads) == 2 * TASK.n
    assert {len(sizes) for sizes in ran.payloads.values()} == {300}


@pytest.mark.parametrize("d", [1, 7, 8, 9, 65])
def test_zoom_costs_no_byte_more(d: int) -> None:
    for algorithm in (replace(ZOOM, digest_every=0), replace(ZOOM, digest_every=0, s0=1e-3)):
        state = algorithm.init(np.zeros(d), Layout.flat(d))
        _, outbox = algorithm.send(state, lambda z: np.ones(d), view_of(RING, 0, 0))
        (message, _) = messages_of(0, outbox)
        assert len(message.payload) == HEADER_BYTES + math.ceil(d / 8)
        assert bool(peek(message.payload).flags & MessageFlag.ZOOM) == (algorithm.s0 < 1.0)


@pytest.mark.slow
def test_7_11_a_schedule_that_is_too_fast_is_reported_and_ends_the_run() -> None:
    task = problem()
    largest = max(float(np.abs(g).max()) for g in task.gradients(np.zeros((task.n, task.d))))
    lr = 1.0 / task.smoothness
    fast = replace(GEOMETRIC, lr=lr, rho=0.9, s0=lr * largest * 1.001)
    saturated: list[float] = []
    watch = DivergenceWatch()

    def look(k: int, states: Any) -> None:
        facts = dict(enumerate(map(fast.facts, states)))
        saturated.append(sum(f["saturated"] for f in facts.values()))
        watch(k, facts)

    with pytest.raises(Saturated, match=r"falls faster.*larger rho.*scale='zoom'"):
        run(fast, task, 300, watch=look)
    # One node notices first; the run is ended as soon as most do, before an error has had time to grow.
    assert 20 < len(saturated) < 80
    assert saturated[-1] > task.n / 2 >= max(saturated[:-1]) > 0
    assert len(saturated) - np.flatnonzero(saturated)[0] < 20


def test_a_first_scale_that_is_too_small_is_told_from_a_fast_schedule() -> None:
    small, watch = replace(GEOMETRIC, s0=NORM / L / 100), DivergenceWatch()
    with pytest.raises(Saturated, match=r"in iteration 0 .*raise s0"):
        run(small, TASK, 3, watch=lambda k, states: watch(k, dict(enumerate(map(small.facts, states)))))


def too_fast(rho: float, **more: Any) -> tuple[Any, DynaCOLD]:
    """Return an ill-conditioned problem and a schedule for it."""
    task = problem("squares", kappa=46.0)
    largest = max(float(np.abs(g).max()) for g in task.gradients(np.zeros((task.n, task.d))))
    lr = 1.0 / task.smoothness
    return task, replace(GEOMETRIC, lr=lr, rho=rho, s0=lr * largest * 1.001, **more)


@pytest.mark.slow
def test_a_box_left_by_a_little_is_tolerated_unless_told_otherwise() -> None:
    task, strict = too_fast(0.95, tolerance=1.0)
    saturated: list[float] = []
    run(strict, task, 20, watch=lambda k, states: saturated.extend(strict.facts(s)["saturated"] for s in states))
    assert 1.0 in saturated
    watched, over = replace(strict, tolerance=2.0), []
    ran = run(watched, task, 100, watch=lambda k, states: over.extend(watched.facts(s)["overshoot"] for s in states))
    assert 1.0 < max(over) < 2.0
    assert ran.errors[-1] < 0.01


@pytest.mark.slow
def test_undetected_saturation_would_diverge() -> None:
    task, blind = too_fast(0.9, tolerance=1e300)
    errors = run(blind, task, 130).errors
    assert errors[-1] > 10 * errors.min()
    assert errors.argmin() < 60


@pytest.mark.slow
def test_7_12_any_first_scale_reaches_the_same_precision_in_about_the_same_time() -> None:
    task, found = problem(n=3, d=12, kappa=4.0), []
    for s0 in (1e-3, 1.0, 1e3):
        algorithm = DynaCOLD(lr=1.0 / task.smoothness, s0=s0)

        def done(k: int, states: Any) -> None:
            if task.error(state["x"] for state in states) < 1e-6:
                raise StopIteration

        reached: list[int] = []
        with pytest.raises(StopIteration):
            run(algorithm, task, 600, watch=lambda k, states, r=reached, stop=done: (r.append(k), stop(k, states)))
        found.append(len(reached))
    assert max(found) <= 1.7 * min(found)


def test_a_scale_that_is_not_the_senders_is_found_by_the_digest() -> None:
    algorithm = replace(ZOOM, digest_every=1)
    states = [dict(state) for state in run(algorithm, TASK, 5).states]
    states[2]["scale/1"] = states[2]["scale/1"] * 2.0
    with pytest.raises(OutOfStep) as caught:
        run(algorithm, TASK, 1, states=states, begin=5)
    assert caught.value.source == 1


@pytest.mark.slow
def test_after_a_whole_estimate_all_neighbours_begin_at_the_first_scale() -> None:
    for algorithm in (replace(ZOOM, s0=2.0), GEOMETRIC):
        algorithm = replace(algorithm, digest_every=1)
        states = run(algorithm, TASK, 30).states
        sent = []
        for i, state in enumerate(states):
            view = replace(view_of(RING, i, 30), resync=frozenset({(i + 1) % TASK.n}))
            sent.append(algorithm.send(state, lambda z, i=i: TASK.gradient(i, z), view))
        inboxes = deliver({i: outbox for i, (_, outbox) in enumerate(sent)})
        flags = {peek(message.payload).flags & MessageFlag.RESYNC for inbox in inboxes.values() for message in inbox}
        assert flags == {MessageFlag.RESYNC}
        after = [algorithm.receive(state, inboxes[i]) for i, (state, _) in enumerate(sent)]
        for i, state in enumerate(after):
            assert np.array_equal(state[f"h/{(i + 1) % TASK.n}"], after[(i + 1) % TASK.n]["h"])
        if algorithm.scale == "zoom":
            assert {float(state[f"scale/{(i + 1) % TASK.n}"]) for i, state in enumerate(after)} == {2.0 * 0.95}
        ran = run(algorithm, TASK, 60, states=after, begin=31)
        assert ran.errors[-1] < 0.5 * TASK.error(state["x"] for state in states)


@dataclass(frozen=True, repr=False, eq=False)
class Coarse(PositionalCodec):
    """Integers within [-2, 2]: good on a box of that size, not at all on smaller or larger vectors."""

    codec_id: ClassVar[str] = "coarse"

    def pack(self, values: np.ndarray, stretch: Stretch, key: Key) -> Tensor:
        return wire.dense(np.clip(np.rint(values), -2, 2))

    def expect(self, stretch: Stretch) -> Expected:
        return expected_dense(stretch.size, wire.Raw)


@pytest.mark.slow
def test_other_quantisers_are_given_the_scaled_innovation() -> None:
    ran = run(replace(ZOOM, quantiser=Coarse(), rho=0.9), TASK, 110)
    assert ran.errors[-1] < 1e-4
    # Without the division the same quantiser sees vectors that shrink out of its sight: it sends zeros from then on.
    assert run(COLD(lr=1.0 / L, gamma=0.3, compressor=Coarse()), TASK, 110).errors[-1] > 1e-2
    scaled = Compressor(Coarse()).scaled(0.125)
    data = scaled.encode(np.array([0.25, -0.13, 0.01]), 3, Key(0))
    decoded = scaled.decode(memoryview(data), 3, 3, "float64", Key(0))
    assert decoded.dense().tolist() == [0.25, -0.125, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["zoom", "geometric"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_long_after_the_precision_is_reached_nothing_drifts(scale: str, dtype: str) -> None:
    # A smaller base than usual, so that the schedule falls below rounding long before the end.
    algorithm: Any = replace(GEOMETRIC if scale == "geometric" else ZOOM, rho=0.9 if scale == "geometric" else 0.8)
    task, weights = problem(n=2, d=4, kappa=2.0), np.full((2, 2), 0.5)
    algorithm = replace(algorithm, lr=1.0 / task.smoothness, s0=1.0)
    end = 500 if dtype == "float64" else 260
    errors = run(algorithm, task, end, weights=weights, dtype=dtype).errors
    floor = 1e-12 if dtype == "float64" else 1e-5
    assert errors[end // 2 + 80 :].max() < floor


def test_the_zoom_stops_at_its_smallest_scale() -> None:
    algorithm = replace(ZOOM, rho=0.5, s_min=1e-2)
    ran = run(algorithm, problem(n=2, d=4, kappa=2.0), 40, weights=np.full((2, 2), 0.5))
    assert min(float(state["scale"]) for state in ran.states) >= 1e-2
    still, quiet = replace(ZOOM, rho=1e-6), Layout.flat(2)
    state = still.init(np.zeros(2), quiet)
    for k in range(8):
        state, _ = still.send(state, None, view_of(np.ones((1, 1)), 0, k))
        state = still.receive(state, ())
    assert 0.0 < float(state["scale"]) < 1.0
    assert np.isfinite(state["h"]).all()


def test_after_a_reset_the_schedule_restarts() -> None:
    for algorithm in (ZOOM, GEOMETRIC):
        reset = [algorithm.reset(state, TASK.layout) for state in run(algorithm, TASK, 5).states]
        assert {(float(state["scale"]), int(state["age"])) for state in reset} == {(algorithm.s0, 0)}


@pytest.mark.parametrize("algorithm", [ZOOM, GEOMETRIC], ids=["zoom", "geometric"])
def test_who_missed_messages_gets_the_scale_with_the_whole_estimate(algorithm: DynaCOLD) -> None:
    """An edge that rests while others do not: nobody says ``resync``, and both ends agree all the same."""
    algorithm = replace(algorithm, digest_every=1)
    cut = RING.copy()
    cut[0, 1] = cut[1, 0] = 0.0
    states = run(algorithm, TASK, 9).states
    states = run(algorithm, TASK, 3, weights=cut, states=states, begin=9).states
    states = run(algorithm, TASK, 9, states=states, begin=12).states
    for own, other in ((0, 1), (1, 0)):
        assert digests(states[own], ("h",))["h"] == digests(states[other], ("h",))[f"h/{own}"]
        if algorithm.scale == "zoom":
            assert float(states[other][f"scale/{own}"]) == float(states[own]["scale"])
