"""The contract of every algorithm: configuration, purity, conservation, resuming, and refusal of what cannot be.

What is an algorithm's own, its formula first of all, is in its own file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedcomp.errors import ConfigError, NonFiniteUpdate, StateError
from fedcomp.gossip import ALGORITHMS, AVERAGING, algorithm_class, get_algorithm
from fedcomp.gossip.base import Algorithm, GossipMessage, State, View, largest_message, messages_of
from fedcomp.gossip.errors import MessageError, OutOfStep
from fedcomp.gossip.packet import MessageFlag, peek
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
DECODED: list[dict[str, Any]] = [
    {"name": "choco", "gamma": 0.3, "compressor": compressor}
    for compressor in (
        {"id": "identity"},
        *(
            {"id": "topk", "density": 3 / 8, "values": v, "index": i}
            for v, i in (("float64", "fixed"), ("fp16", "bitmap"))
        ),
        {"id": "topk", "density": 3 / 8, "index": "elias-fano"},
        {"id": "normsign"},
        {"id": "qsgd", "levels": 4},
        {"id": "terngrad"},
        {"id": "stc", "density": 3 / 8},
    )
]
"""What no other configuration has to read."""
SYNCHRONOUS = {name for name in (*ALGORITHMS, *AVERAGING) if not algorithm_class(name).asynchronous}
EXACT = ("nids", "cold", "dyna-cold", "lead", "beer", "gradient-tracking")
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


def after_messages(algorithm: Algorithm, dtype: str = "float64") -> tuple[list[State], list[list[GossipMessage]]]:
    """Return both states in an iteration without a gradient, and their inboxes."""
    states, inboxes = begun(algorithm, 3, dtype)
    sent = [algorithm.step(states[i], inboxes[i], None, view(i, 3)) for i in (0, 1)]
    return [state for state, _ in sent], [messages_of(1 - i, sent[1 - i][1]) for i in (0, 1)]


def mean(algorithm: Algorithm, states: Sequence[State]) -> np.ndarray:
    """Return what averaging keeps: the sum of the numerators of push-sum, or of the models."""
    parts = [state["x"] if algorithm.asynchronous else algorithm.model(state) for state in states]
    return np.sum(parts, axis=0, dtype=np.float64)


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_the_mean_and_what_is_conserved_stay_where_there_is_no_gradient(config: dict[str, Any]) -> None:
    algorithm = get_algorithm(config)
    draw = Key(2, "mean").generator()
    start = held = [algorithm.init(draw.standard_normal(D), LAYOUT, common=np.zeros(D)) for _ in (0, 1)]
    total = mean(algorithm, start)
    inboxes: list[list[GossipMessage]] = [[], []]
    for t in range(4):
        sent = [algorithm.step(held[i], inboxes[i], None, view(i, t)) for i in (0, 1)]
        held = [state for state, _ in sent]
        inboxes = [messages_of(1 - i, sent[1 - i][1]) for i in (0, 1)]
    ended = [algorithm.receive(state, inbox) for state, inbox in zip(held, inboxes, strict=True)]
    assert np.abs(mean(algorithm, ended) - total).max() < 1e-12
    assert np.abs(algorithm.model(ended[0]) - algorithm.model(start[0])).max() > 1e-3
    for name, value in algorithm.invariants(ended).items():
        assert value == pytest.approx(algorithm.invariants(start)[name], abs=1e-12)


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_a_step_is_receive_and_send_and_a_state_goes_on_from_its_bytes(config: dict[str, Any]) -> None:
    algorithm = get_algorithm(config)
    (state, _), (inbox, _) = begun(algorithm, 3, "float32")
    gradient = None if algorithm.name in AVERAGING else (lambda z: z - z.dtype.type(1))
    stepped, outbox = algorithm.step(state, inbox, gradient, view(0, 3))
    kept = {key: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape) for key, array in state.items()}
    resumed = get_algorithm(json.loads(json.dumps(algorithm.to_config())))
    again, sent = resumed.send(resumed.receive(kept, inbox), gradient, view(0, 3))
    assert frozen(again) == frozen(stepped)
    assert sent == outbox


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_the_dtype_is_the_models_and_no_message_is_longer_than_the_largest(config: dict[str, Any], dtype: str) -> None:
    algorithm = get_algorithm(config)
    if hasattr(algorithm, "lr"):  # a numpy scalar would make float64 of a float32 model
        algorithm = get_algorithm({**config, "lr": np.float64(0.1)})
    (state, _), (inbox, _) = begun(algorithm, 3, dtype)
    assert algorithm.model(algorithm.receive(state, inbox)).dtype == dtype
    assert {peek(message.payload).dtype for message in inbox} == {np.dtype(dtype)}
    assert max(len(m.payload) for m in inbox) <= largest_message(algorithm, D, np.dtype(dtype).itemsize)


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_what_is_not_finite_is_not_sent_and_changes_nothing(config: dict[str, Any]) -> None:
    algorithm = get_algorithm(config)
    (state, _), (inbox, _) = begun(algorithm, 3, "float32")
    state = algorithm.receive(state, inbox)
    before = frozen(state)
    for value in (np.nan, np.inf) if algorithm.name not in AVERAGING else ():
        with pytest.raises(NonFiniteUpdate):
            algorithm.send(state, lambda z, value=value: np.full_like(z, value), view(0, 3))
    with pytest.raises(NonFiniteUpdate):
        algorithm.send({**state, "x": np.full_like(state["x"], np.nan)}, None, view(0, 3))
    wrong = "only averages" if algorithm.name in AVERAGING else "shape"
    with pytest.raises(ConfigError, match=wrong):
        algorithm.send(state, lambda z: z[:-1], view(0, 3))
    assert frozen(state) == before


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_a_model_that_moves_by_itself_moves_what_becomes_of_it_and_not_what_was_sent(config: dict[str, Any]) -> None:
    algorithm, change = get_algorithm(config), np.arange(float(D))
    (state, _), (inbox, _) = after_messages(algorithm)
    halves = algorithm.shift(algorithm.shift(state, change / 2), change / 2)
    np.testing.assert_allclose(algorithm.model(halves), algorithm.model(state) + change, rtol=0, atol=1e-12)
    plain, moved = (algorithm.receive(start, inbox) for start in (state, halves))
    np.testing.assert_allclose(
        algorithm.model(algorithm.shift(plain, change)), algorithm.model(plain) + change, rtol=0, atol=1e-12
    )
    if algorithm.asynchronous:  # the numerator moves by the weight the node has kept
        weight = state["weights"] if "weights" in state else float(state["w"])
        np.testing.assert_allclose(moved["x"] - plain["x"], weight * change, rtol=0, atol=1e-12)
    else:
        np.testing.assert_allclose(algorithm.model(moved), algorithm.model(plain) + change, rtol=0, atol=1e-12)
    others = {key: value.tobytes() for key, value in plain.items() if key != "x"}
    assert {key: value.tobytes() for key, value in moved.items() if key != "x"} == others


@pytest.mark.parametrize("name", [*EXACT, "sgp", "sparse-push", "coordinate-push"])
def test_a_model_of_another_layout_is_refused(name: str) -> None:
    with pytest.raises(StateError, match="12 elements"):
        get_algorithm({"name": name}).init(np.ones(12), Layout.flat(13))


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_at_the_common_start_there_is_nothing_to_tell(config: dict[str, Any]) -> None:
    algorithm = get_algorithm(config)
    state, _ = algorithm.send(algorithm.init(np.ones(D), LAYOUT, common=np.ones(D)), None, view(0, 0))
    facts = algorithm.facts(state)
    # A sign is never nothing, and DeepSqueeze compresses the model itself.
    assert facts.get("innovation", 0.0) < 1e-6 or config["name"] in ("dyna-cold", "deepsqueeze")
    assert all(np.isfinite(value) for value in facts.values())


DAMAGE: Mapping[str, Callable[[bytes], bytes]] = {
    "nothing": lambda p: b"",
    "half a header": lambda p: p[:4],
    "a byte short": lambda p: p[:-1],
    "a byte more": lambda p: p + b"\0",
    "eight bytes more": lambda p: p + bytes(8),
    "an unknown flag": lambda p: p[:6] + b"\x80" + p[7:],
    "no dtype": lambda p: p[:7] + b"\7" + p[8:],
    "another dtype": lambda p: p[:7] + (b"\1" if p[7] == 2 else b"\2") + p[8:],
    "no number at its end": lambda p: p[:-8] + struct.pack("<d", np.nan),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_damaged_messages_are_refused_and_change_nothing(config: dict[str, Any], damage: str) -> None:
    algorithm = get_algorithm(config)
    (state, _), (inbox, _) = after_messages(algorithm)
    before = frozen(state)
    for message in inbox:
        with pytest.raises((MessageError, OutOfStep)):
            algorithm.receive(state, [replace(message, payload=DAMAGE[damage](message.payload))])
    assert frozen(state) == before


@pytest.mark.parametrize("name", ["sgp", "sparse-push"])
@pytest.mark.parametrize("share", [-0.1, np.nan, np.inf])
def test_a_share_that_is_none_is_refused_and_changes_nothing(name: str, share: float) -> None:
    algorithm = get_algorithm({"name": name, **MORE.get(name, {})})
    (state, _), (inbox, _) = after_messages(algorithm)
    before = frozen(state)
    for message in inbox:
        forged = message.payload[:8] + struct.pack("<d", share) + message.payload[16:]
        with pytest.raises(MessageError):
            algorithm.receive(state, [replace(message, payload=forged)])
    assert frozen(state) == before


@pytest.mark.parametrize("config", [c for c in CONFIGS if c["name"] in SYNCHRONOUS], ids=named)
def test_an_iteration_needs_exactly_its_messages(config: dict[str, Any]) -> None:
    algorithm = get_algorithm(config)
    (state, other), (inbox, back) = after_messages(algorithm)
    finished = algorithm.receive(other, back)
    later = messages_of(1, algorithm.send(finished, None, view(1, 4))[1])
    stranger = [GossipMessage(5, 0, message.payload) for message in inbox]
    for messages in ([], [*inbox, *stranger], stranger, later, [*inbox, *later]):
        with pytest.raises((MessageError, StateError)):
            algorithm.receive(state, messages)
    assert algorithm.receive(finished, []) is finished
    with pytest.raises((MessageError, StateError)):
        algorithm.receive(finished, back)


@pytest.mark.parametrize("config", [c for c in CONFIGS if c["name"] not in SYNCHRONOUS], ids=named)
def test_mass_counts_once_and_comes_back_with_messages_and_goes_with_a_node_that_leaves(config: dict[str, Any]) -> None:
    algorithm = get_algorithm(config)
    states, inboxes = begun(algorithm, 3, "float64")
    whole = [algorithm.receive(states[i], inboxes[i]) for i in (0, 1)]
    total = algorithm.invariants(whole)
    once, twice = algorithm.receive(states[0], inboxes[0]), algorithm.receive(whole[0], inboxes[0])
    assert frozen(once) == frozen(twice)
    sent, outbox = algorithm.send(whole[0], None, view(0, 3))
    lost = algorithm.take_back(sent, messages_of(0, outbox))
    assert algorithm.invariants([lost, whole[1]]) == pytest.approx(total, abs=1e-12)
    assert algorithm.invariants([sent, whole[1]])["sum_w"] < total["sum_w"] - 1e-3
    empty, last = algorithm.leave(whole[0], view(0, 3))
    heir = algorithm.receive(whole[1], messages_of(0, last))
    assert algorithm.invariants([heir]) == pytest.approx(total, abs=1e-12)
    assert algorithm.invariants([empty])["sum_w"] == 0.0
    assert algorithm.leave(empty, view(0, 4))[1] == ()
    assert algorithm.invariants([algorithm.join(np.ones(D), LAYOUT)])["sum_w"] == 0.0
    closing, messages = algorithm.send(whole[0], unasked(algorithm), replace(view(0, 3), dense=True))
    assert {peek(m.payload).flags for m in messages_of(0, messages)} == {MessageFlag.DENSE}
    assert algorithm.invariants([closing])["sum_w"] < algorithm.invariants([whole[0]])["sum_w"]
    with pytest.raises(StateError, match="reset"):
        algorithm.reset(whole[0], LAYOUT)


def unasked(algorithm: Algorithm) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return a gradient that nobody may ask for; what only averages is given none."""

    def gradient(z: np.ndarray) -> np.ndarray:
        raise AssertionError("asked for a gradient")

    return None if algorithm.name in AVERAGING else gradient


OTHER: list[dict[str, Any]] = [
    {"name": "dpsgd", "lr": 0.3, "momentum": 0.9, "gamma": 0.5},
    {"name": "choco", "lr": 0.2, "gamma": 0.3, "compressor": {"id": "topk", "density": 0.3}, "copies": False},
    {"name": "deepsqueeze", "gamma": 0.02, "momentum": 0.9},
    {"name": "sgp", "lr": 0.3, "momentum": 0.9, "w_min": 0.01},
    {"name": "sparse-push", "density": 0.1, "gamma": 0.01, "estimates": "broadcast", "adapt": True},
    {"name": "sparse-push", "compressor": {"id": "scaledsign"}, "gamma": 0.1, "lr": 0.3, "momentum": 0.9},
    {"name": "cold", "lr": 0.3, "gamma": 0.4, "compressor": {"id": "dithering", "bits": 3}},
    {"name": "dyna-cold", "lr": 0.25, "rho": 0.9, "s_min": 1e-4, "quantiser": {"id": "normsign"}},
    {"name": "power-gossip", "rank": 2, "rate": 1.308, "warm_start": False, "lr": 0.05, "momentum": 0.9},
    {"name": "coordinate-push", "density": 0.5, "values": "float32", "w_min": 0.01},
]


@pytest.mark.parametrize("config", CONFIGS + OTHER, ids=named)
def test_configurations_recreate_the_algorithm(config: dict[str, Any]) -> None:
    algorithm = get_algorithm(config)
    written = json.loads(json.dumps(algorithm.to_config()))
    again = get_algorithm(written)
    assert again == algorithm
    assert hash(again) == hash(algorithm)
    assert again.to_config() == written
    # What was asked for is what there is, and a parameter more than there are is refused.
    for name, value in config.items():
        assert value == written[name] or (isinstance(value, dict) and value.items() <= written[name].items())
    with pytest.raises(ConfigError, match="no parameter 'momentums'"):
        get_algorithm({**config, "momentums": 0.9})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"compressor": {"id": "none"}}) for name in ("choco", "deepsqueeze", "sparse-push", "beer", "lead")),
        *((name, {"w_min": 0.5, "w_start": 0.1}) for name in ("sgp", "sparse-push")),
        *((name, {"momentum": 0.9}) for name in ("cold", "beer")),
        ("sparse-push", {"compressor": {"id": "identity"}, "density": 0.1}),
        ("dyna-cold", {"s_min": 2.0}),
        ("dyna-cold", {"copies": False}),
        ("dyna-cold", {"compressor": {"id": "identity"}}),
    ],
)
def test_parameters_that_contradict_each_other_or_are_unknown_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        get_algorithm({"name": name, **options})


def test_an_unknown_algorithm_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'coordinate-push'"):
        get_algorithm({"name": "coordinate_push"})


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("config", CONFIGS + DECODED, ids=named)
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
            assert finite(after)  # it cannot restart
        assert finite({key: after[key] for key in after if key.startswith("h/")})
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
