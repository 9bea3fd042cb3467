"""What holds in every run of a synchronous algorithm on a ring, whichever algorithm it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gossip_problems import problem, ring_weights, run, view_of

from fedcomp.errors import StateError
from fedcomp.gossip.base import Algorithm, State
from fedcomp.gossip.beer import BEER
from fedcomp.gossip.choco import CHOCO
from fedcomp.gossip.cold import COLD
from fedcomp.gossip.dyna_cold import DynaCOLD
from fedcomp.gossip.gradient_tracking import GradientTracking
from fedcomp.gossip.lead import LEAD
from fedcomp.gossip.nids import NIDS

TASK = problem(n=6, d=20)
L = TASK.smoothness
TOP20 = {"id": "topk", "density": 0.2}
FARTHEST = max(float(np.abs(g).max()) for g in TASK.gradients(np.zeros((TASK.n, TASK.d)))) / L
EXACT: Mapping[str, Algorithm] = {
    "NIDS": NIDS(lr=1.0 / L),
    "COLD": COLD(lr=0.5 / L, gamma=0.5, compressor=TOP20),
    "COLD, two bits": COLD(lr=0.5 / L, gamma=0.2, compressor={"id": "dithering", "bits": 2}),
    "COLD, signs": COLD(lr=0.5 / L, gamma=0.2, compressor={"id": "scaledsign"}),
    # Out first, then in: both branches of its rule are taken.
    "Dyna-COLD, zoom": DynaCOLD(lr=1.0 / L, s0=1e-4, digest_every=1),
    "Dyna-COLD, geometric": DynaCOLD(lr=1.0 / L, gamma=0.5, scale="geometric", rho=0.95, s0=1.001 * FARTHEST),
    "gradient tracking": GradientTracking(lr=0.2 / L),
    "BEER": BEER(lr=0.1 / L),
    "LEAD": LEAD(lr=0.5 / L),
}
"""Algorithms whose fixed point is the optimum of all nodes."""

TOLD: Mapping[str, Algorithm] = {**EXACT, "CHOCO": CHOCO(lr=0.1 / L, gamma=0.3, compressor=TOP20)}
"""Algorithms whose nodes hold what their neighbours told them."""


def neighbours(i: int) -> tuple[int, int]:
    return (i - 1) % TASK.n, (i + 1) % TASK.n


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_7_15_what_a_node_holds_of_another_is_what_that_one_holds_in_every_iteration(name: str, dtype: str) -> None:
    """Estimates, gradients and scales, bit for bit; and numbers of settings make no float64 of a float32 model."""
    held: set[str] = set()

    def equal(k: int, states: Sequence[State]) -> None:
        for i, state in enumerate(states):
            for j in neighbours(i):
                for own in [key.removesuffix(f"/{i}") for key in states[j] if key.endswith(f"/{i}")]:
                    if own in state and "." not in own:  # numbers of messages are each node's own
                        assert states[j][f"{own}/{i}"].tobytes() == state[own].tobytes(), (k, own)
                        held.add(own)

    algorithm: Any = TOLD[name]
    ran = run(replace(algorithm, lr=np.float64(algorithm.lr)), TASK, 40, dtype=dtype, watch=equal)
    assert held >= ({"h"} if hasattr(algorithm, "compressor") else set())
    assert ("scale" in held) == (name == "Dyna-COLD, zoom")
    kept = {key: ran.states[0][key].dtype for key in ("x", "y", "dual", "h", "g", "gradient") if key in ran.states[0]}
    assert set(kept.values()) == {np.dtype(dtype)}
    assert ran.errors[-1] < ran.errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_7_09_duals_sum_to_zero_and_what_is_tracked_to_the_gradients_in_every_iteration(name: str) -> None:
    algorithm, off = EXACT[name], []
    ran = run(algorithm, TASK, 40, watch=lambda k, states: off.extend(algorithm.invariants(states).values()))
    assert len(off) == 40
    assert max(off) < 1e-10
    assert max(np.abs(state[key]).max() for state in ran.states for key in ("y", "dual") if key in state) > 1e-3
    begun = [
        algorithm.send(s, lambda z, i=i: TASK.gradient(i, z), view_of(ring_weights(TASK.n), i, 40))[0]
        for i, s in enumerate(ran.states)
    ]
    assert max(algorithm.invariants(begun).values()) < 1e-10
    first, *others = ran.states
    spoilt = {**first, **{key: first[key] + 1.0 for key in ("y", "dual") if key in first}}
    assert max(algorithm.invariants([spoilt, *others]).values()) > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_after_a_reset_the_others_go_on_to_their_own_optimum(name: str) -> None:
    algorithm = EXACT[name]
    states = run(algorithm, TASK, 20).states
    reset = [algorithm.reset(state, TASK.layout) for state in states[:-1]]
    for old, new in zip(states, reset, strict=False):
        assert np.array_equal(old["x"], new["x"])
        assert not any(new[key].any() for key in ("dual", "y", "gradient") if key in new)
    ran = run(algorithm, TASK.without(TASK.n - 1), 100, states=reset, begin=20, resync=True)
    assert ran.errors[-1] < 0.1 < ran.errors[0]
    assert max(algorithm.invariants(ran.states).values()) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CHOCO, COLD])
def test_the_sum_of_estimates_replaces_the_copies_on_a_graph_that_stays(kind: type[Algorithm]) -> None:
    settings: dict[str, Any] = {"lr": 0.1 / L, "gamma": 0.3, "compressor": TOP20}
    kept, lean = (run(kind(**settings, copies=copies), TASK, 40).states for copies in (True, False))
    for a, b in zip(kept, lean, strict=True):
        np.testing.assert_allclose(a["x"], b["x"], atol=1e-12)
    assert not any(key.startswith("h/") for key in lean[0])
    assert sum(v.size == TASK.d for v in lean[0].values()) < sum(v.size == TASK.d for v in kept[0].values())
    changed = view_of(0.5 * ring_weights(TASK.n) + 0.5 * np.eye(TASK.n), 0, 40)
    with pytest.raises(StateError, match=r"weights|neighbours"):
        kind(**settings, copies=False).send(lean[0], None, changed)
