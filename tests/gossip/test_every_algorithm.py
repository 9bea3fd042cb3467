"""What holds for every algorithm: any integer is a seed, steps are pure, and hostile messages end in typed errors."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fedcomp.errors import NonFiniteUpdate
from fedcomp.gossip import ALGORITHMS, AVERAGING, get_algorithm
from fedcomp.gossip.base import Algorithm, GossipMessage, State, View, messages_of
from fedcomp.gossip.errors import MessageError, OutOfStep
from fedcomp.layout import Layout, TensorSpec
from fedcomp.rng import Key

D = 10
LAYOUT = Layout((TensorSpec("a", (2, 4), "float64", 0, 8), TensorSpec("b", (2,), "float64", 8, 2, 1.0)))
MORE: Mapping[str, Mapping[str, Any]] = {
    "sparse-push": {"gamma": 0.3, "density": 3 / 8},
    "power-gossip": {"rank": 2, "digest_every": 2},
    "coordinate-push": {"density": 3 / 8},
    "dyna-cold": {"s0": 10.0},
}
CONFIGS: list[dict[str, Any]] = [{"name": name, **MORE.get(name, {})} for name in (*ALGORITHMS, *AVERAGING)]
CONFIGS += [
    {"name": "sparse-push", "gamma": 0.3, "density": 3 / 8, "estimates": "broadcast", "digest_every": 2},
    {"name": "choco", "compressor": {"id": "scaledsign"}, "copies": False},
    {"name": "lead", "compressor": {"id": "topk", "density": 3 / 8, "index": "rice"}},
    {"name": "beer", "compressor": {"id": "randomk", "density": 3 / 8}, "gamma": 0.3},
    {"name": "deepsqueeze", "compressor": {"id": "dithering", "bits": 3}},
]
HUGE = (1.79e308, -1.79e308, 1.3e154, 1e300, np.inf, np.nan, 5e-324)


def named(config: Mapping[str, Any]) -> str:
    return "-".join(map(str, config.values()))


def view(node: int, t: int, seed: int = 3) -> View:
    share = {1 - node: 0.4}
    return View(node, t, share, share, seed=seed)


def begun(
    algorithm: Algorithm, iterations: int, dtype: str, seed: int = 3
) -> tuple[list[State], list[list[GossipMessage]]]:
    """Return the states and inboxes of two nodes in the middle of an iteration."""
    draw = Key(1, "start").generator()
    models = draw.standard_normal((2, D)).astype(dtype)
    states = [algorithm.init(model, LAYOUT, common=np.zeros(D, dtype)) for model in models]
    inboxes: list[list[GossipMessage]] = [[], []]
    for t in range(iterations):
        gradient = None if algorithm.name in AVERAGING else (lambda z: (0.1 * (z - 2.0)).astype(z.dtype))
        sent = [algorithm.step(states[i], inboxes[i], gradient, view(i, t, seed)) for i in (0, 1)]
        states = [state for state, _ in sent]
        inboxes = [messages_of(1 - i, sent[1 - i][1]) for i in (0, 1)]
    return states, inboxes


def frozen(state: State) -> dict[str, bytes]:
    return {key: value.tobytes() for key, value in state.items()}


def finite(state: State) -> bool:
    return all(bool(np.isfinite(value).all()) for value in state.values() if value.dtype.kind == "f")


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_any_integer_is_a_seed(config: dict[str, Any]) -> None:
    algorithm = get_algorithm(config)
    for seed in (-1, 2**64, 10**30):
        states, inboxes = begun(algorithm, 2, "float32", seed)
        assert finite(algorithm.receive(states[0], inboxes[0]))


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_steps_write_to_nothing_they_are_given_and_are_the_same_every_time(config: dict[str, Any]) -> None:
    algorithm = get_algorithm(config)
    (state, _), (inbox, back) = begun(algorithm, 3, "float32")
    for value in state.values():
        value.setflags(write=False)
    gradient = None if algorithm.name in AVERAGING else (lambda z: z - z.dtype.type(1))
    once, again = (algorithm.step(state, inbox, gradient, view(0, 3)) for _ in range(2))
    assert frozen(once[0]) == frozen(again[0])
    assert once[1] == again[1]
    algorithm.facts(once[0])
    algorithm.invariants([once[0]])
    if algorithm.asynchronous:
        left, left_again = (algorithm.leave(algorithm.take_back(state, back), view(0, 3)) for _ in range(2))
        assert frozen(left[0]) == frozen(left_again[0])
        assert left[1] == left_again[1]
    else:
        assert frozen(algorithm.reset(state, LAYOUT)) == frozen(algorithm.reset(state, LAYOUT))


@pytest.mark.parametrize("name", ["dpsgd", "choco", "deepsqueeze", "power-gossip"])
def test_a_reset_keeps_model_and_momentum(name: str) -> None:
    algorithm = get_algorithm({"name": name, "momentum": 0.9})
    (state, _), (inbox, _) = begun(algorithm, 3, "float32")
    state = algorithm.receive(state, inbox)
    anew = algorithm.reset(state, LAYOUT)
    assert np.any(state["v"])
    assert anew["x"].tobytes() == state["x"].tobytes()
    assert anew["v"].tobytes() == state["v"].tobytes()


def mutant(payload: bytes, draw: np.random.Generator) -> bytes:
    """Return ``payload`` with a bit flipped, bytes cut off, appended or replaced, or with numbers at the limits."""
    bad, kind = bytearray(payload), int(draw.integers(6))
    if kind == 0:
        bad[int(draw.integers(len(bad)))] ^= 1 << int(draw.integers(8))
    elif kind == 1:
        del bad[int(draw.integers(len(bad))) :]
    elif kind == 2:
        bad += draw.bytes(int(draw.integers(1, 20)))
    elif kind == 3:
        bad[8:] = draw.bytes(len(bad) - 8)
    else:
        code = "<d" if kind == 4 or draw.random() < 0.5 else "<f"
        at = 8 if kind == 4 else int(draw.integers(8, len(bad)))
        for _ in range(int(draw.integers(1, 5))):
            number = float(HUGE[int(draw.integers(len(HUGE)))])
            word = struct.pack(code, number if code == "<d" or not np.isfinite(number) else np.sign(number) * 3.4e38)
            if at + len(word) <= len(bad):
                bad[at : at + len(word)] = word
            at += len(word)
    return bytes(bad)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_hostile_messages_are_refused_or_do_no_harm_that_travels(config: dict[str, Any], dtype: str) -> None:
    algorithm = get_algorithm(config)
    draw = Key(5, named(config) + dtype).generator()
    (state, _), (inbox, theirs) = begun(algorithm, 3, dtype)
    before = frozen(state)
    refused = 0
    for _ in range(150):
        bad = [GossipMessage(message.source, 0, mutant(message.payload, draw)) for message in inbox]
        try:
            after = algorithm.receive(state, bad)
        except (MessageError, OutOfStep):
            refused += 1
            continue
        if algorithm.asynchronous:
            assert finite(after)  # it cannot begin anew
        try:
            sent, _ = algorithm.send(after, None, view(0, 3))
        except NonFiniteUpdate:
            continue
        assert finite(after)
        assert finite({key: sent[key] for key in sent if key not in ("innovation", "trend")})
        if algorithm.asynchronous:
            back = [GossipMessage(0, 1, mutant(message.payload, draw)) for message in theirs]
            try:
                assert finite(algorithm.take_back(state, back))
            except (MessageError, OutOfStep):
                refused += 1
    assert refused > 40
    assert frozen(state) == before
