"""Error feedback: what a memory holds, momentum limits, rollback, refusals."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from fedcomp.codecs import QSGD, Codec, Identity, RandomK, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError, NonFiniteUpdate, StateError
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

LAYOUT = Layout.of(
    {
        "w": np.zeros((60, 40), np.float32),
        "b": np.zeros(40, np.float32),
        "v": np.zeros((50, 40), np.float32),
    }
)
KEY = Key(5, "codec", partition=1)


class Unfused(ErrorFeedback):
    """The same mathematics on the general path."""

    @property
    def _fusible(self) -> bool:
        return False


def gradients(rounds: int, layout: Layout = LAYOUT, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(4, (rounds, layout.size)).astype(np.float32)


def run(codec: Codec, updates: np.ndarray, layout: Layout = LAYOUT) -> tuple[np.ndarray, dict, list[bytes]]:
    """Return the decoded frames in float64, the last state, and the frames."""
    state, sent, frames = codec.init(layout), [], []
    for t, g in enumerate(updates):
        frame, state = codec.encode(Update(g, layout), state, KEY.at(round=t))
        sent.append(codec.decode(frame, layout).astype(np.float64))
        frames.append(frame)
    return np.array(sent), state, frames


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decay": 0.9},
        {"beta": 0.3},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "masking": False},
        {"decay": 0.5, "beta": 0.7, "momentum": 0.5, "norm_guard": 0.5},
    ],
    ids=str,
)
def test_fused_path_is_bit_identical(options: dict) -> None:
    """The one-pass kernel gives the same frames and the same memory as add, encode, decode, subtract."""
    big = Layout.of({"w": np.zeros((300, 100), np.float32), "b": np.zeros(50, np.float32)})
    for layout in (LAYOUT, big, Layout.flat(1), Layout.flat(700, density=1.0)):
        updates = gradients(6, layout)
        _, fused, frames = run(ErrorFeedback(TopK(0.03), **options), updates, layout)
        _, plain, reference = run(Unfused(TopK(0.03), **options), updates, layout)
        assert frames == reference
        for name in plain:
            np.testing.assert_array_equal(fused[name], plain[name], err_msg=name)


@pytest.mark.parametrize("inner", [TopK(0.05), TopK(0.05, values="fp16"), RandomK(0.05), QSGD(7)], ids=repr)
def test_dense_rest_leaves_no_memory(inner: Codec) -> None:
    """Tensors that travel dense are lossless: their memory is exactly zero in every round."""
    for beta in (1.0, 0.4):
        _, state, _ = run(ErrorFeedback(inner, beta=beta), gradients(5))
        assert LAYOUT.dense_size == 40
        assert not state["memory"][LAYOUT.compressed_size :].any()
        assert state["memory"][: LAYOUT.compressed_size].any()


@pytest.mark.parametrize("values", ["float32", "fp16"])
def test_memory_is_what_the_bytes_did_not_carry(values: str) -> None:
    """q comes from the bytes: the memory keeps the rounding error of every value that was sent."""
    codec = ErrorFeedback(TopK(0.1, values=values))
    updates = gradients(2)
    _, first, _ = run(codec, updates[:1])
    total = first["memory"] + updates[1]
    frame, state = codec.encode(Update(updates[1], LAYOUT), first, KEY.at(round=1))
    np.testing.assert_array_equal(state["memory"], total - codec.decode(frame, LAYOUT))
    compressed = codec.support(frame, LAYOUT)
    assert state["memory"][compressed].any() == (values == "fp16")


@pytest.mark.parametrize("nesterov", [False, True])
def test_density_one_without_masking_is_momentum_sgd(nesterov: bool) -> None:
    """Spec 5.1: deep gradient compression at d = 1 equals momentum SGD without masking, and not with it."""
    updates = gradients(20)
    sent, _, _ = run(ErrorFeedback(TopK(1.0), momentum=0.9, nesterov=nesterov, masking=False), updates)
    masked, _, _ = run(ErrorFeedback(TopK(1.0), momentum=0.9, nesterov=nesterov, masking=True), updates)
    u = np.zeros(LAYOUT.size)
    expected = []
    for g in updates.astype(np.float64):
        u = 0.9 * (u + g) if nesterov else 0.9 * u + g
        expected.append(u + g if nesterov else u)
    np.testing.assert_allclose(sent, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(masked - np.array(expected))[:, : LAYOUT.compressed_size].max() > 1.0


def test_momentum_correction_follows_the_published_lines() -> None:
    """Spec 5.1: u = mu u + g; v = v + u; send top-k of v; clear v and u there."""
    codec = ErrorFeedback(TopK(0.05), momentum=0.9)
    layout = Layout.flat(400)
    u, v = np.zeros(400, np.float32), np.zeros(400, np.float32)
    state = codec.init(layout)
    for t, g in enumerate(gradients(10, layout)):
        frame, state = codec.encode(Update(g, layout), state, KEY.at(round=t))
        u = u * np.float32(0.9) + g
        v = v + u
        chosen = np.sort(np.argsort(-np.abs(v), kind="stable")[:20])
        np.testing.assert_array_equal(codec.support(frame, layout), chosen)
        np.testing.assert_array_equal(codec.decode(frame, layout)[chosen], v[chosen])
        v[chosen] = 0.0
        u[chosen] = 0.0
        np.testing.assert_array_equal(state["memory"], v)
        np.testing.assert_array_equal(state["momentum"], u)


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rollback_is_as_if_nothing_had_left(beta: float, momentum: float) -> None:
    """Bit for bit what a client holds that added the update and sent nothing, momentum included."""
    codec = ErrorFeedback(TopK(0.05), beta=beta, momentum=momentum)
    updates = gradients(4)
    _, state, _ = run(codec, updates[:3])
    u = updates[3] if not momentum else state["momentum"] * np.float32(momentum) + updates[3]
    p = state["memory"] + u
    unsent = p if beta == 1.0 else p * np.float32(beta) + np.float32(1 - beta) * state["memory"]
    frame, after = codec.encode(Update(updates[3], LAYOUT), state, KEY.at(round=3))
    kept = {name: array.copy() for name, array in after.items()}
    back = codec.rollback(after, frame, LAYOUT)
    np.testing.assert_array_equal(back["memory"], unsent)
    if momentum:
        assert after["masked"].size == codec.support(frame, LAYOUT).size
        np.testing.assert_array_equal(back["momentum"], u)
        assert "masked" not in back
    for name, array in after.items():
        np.testing.assert_array_equal(array, kept[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"decay": 0.7},
        {"decay": 0.0, "beta": 0.5},
        {"decay": 0.9, "beta": 0.3},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "nesterov": True, "masking": False, "decay": 0.8},
        {"momentum": 0.9, "masking": False},
        {"max_age": 2},
        {"max_age": 2, "momentum": 0.5},
        {"norm_guard": 1e6, "momentum": 0.9},
        {"norm_guard": 0.8},
        {"norm_guard": 0.8, "decay": 0.9, "beta": 0.5, "momentum": 0.9, "nesterov": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("missed", [0, 1, 2])
@pytest.mark.parametrize("inner", [TopK(0.05), TopK(0.1, scope="layer"), RandomK(0.1), QSGD(3, bucket=64)], ids=repr)
def test_rollback_with_every_option(inner: Codec, options: dict, missed: int) -> None:
    """Against the published lines in float64: memory p, momentum u whole, expired memory gone, guard kept."""
    codec = ErrorFeedback(inner, **options)
    o = {"decay": 1.0, "beta": 1.0, "momentum": 0.0, "nesterov": False, "max_age": None, "norm_guard": None} | options
    updates = gradients(4)
    _, state, _ = run(codec, updates[:3])
    kept = {name: array.copy() for name, array in state.items()}
    g = updates[3]
    frame, after = codec.encode(Update(g, LAYOUT), state, KEY.at(round=3 + missed))
    back = codec.rollback(after, frame, LAYOUT)
    expired = o["max_age"] is not None and missed >= o["max_age"]
    m = np.zeros(LAYOUT.size) if expired else state["memory"].astype(np.float64)
    u = g.astype(np.float64)
    added = u
    if o["momentum"]:
        before = np.zeros(LAYOUT.size) if expired else state["momentum"] * np.float64(o["momentum"]) ** missed
        u = o["momentum"] * (before + g) if o["nesterov"] else o["momentum"] * before + g
        added = u + g if o["nesterov"] else u
        np.testing.assert_allclose(back["momentum"], u, rtol=1e-4, atol=1e-5)
        assert "masked" not in back
    unsent = (1.0 - o["beta"]) * m + o["beta"] * (o["decay"] * m + added)
    bound = np.inf if o["norm_guard"] is None else o["norm_guard"] * np.linalg.norm(g)
    if np.linalg.norm(unsent) < bound:
        np.testing.assert_allclose(back["memory"], unsent, rtol=1e-4, atol=1e-5)
    else:
        assert np.linalg.norm(back["memory"]) == pytest.approx(bound, rel=1e-5)
    for name, array in state.items():
        np.testing.assert_array_equal(array, kept[name])
    _, again = codec.encode(Update(g, LAYOUT), back, KEY.at(round=4 + missed))
    assert np.isfinite(again["memory"]).all()


def test_memory_expires() -> None:
    """Memory is dropped after max_age missed rounds, and kept one round earlier; momentum fades meanwhile."""
    codec = ErrorFeedback(TopK(0.05), max_age=3, momentum=0.5)
    updates = gradients(2)
    _, state, _ = run(codec, updates[:1])
    fresh = codec.init(LAYOUT)
    given = Update(updates[1], LAYOUT)
    dropped, _ = codec.encode(given, state, KEY.at(round=4))
    assert dropped == codec.encode(given, fresh, KEY.at(round=4))[0]
    kept, after = codec.encode(given, state, KEY.at(round=3))
    assert kept != dropped
    faded = (state["momentum"] * np.float32(0.5**2)) * np.float32(0.5) + updates[1]
    faded[codec.support(kept, LAYOUT)] = 0.0
    np.testing.assert_array_equal(after["momentum"], faded)


def test_norm_guard_bounds_the_memory() -> None:
    """Spec 5.3: ‖m‖ <= K‖g‖; a zero update sets no bound."""
    layout = Layout.flat(500)
    codec = ErrorFeedback(TopK(0.002), norm_guard=2.0)
    free = ErrorFeedback(TopK(0.002))
    updates = np.ones((40, 500), np.float32)
    _, state, _ = run(codec, updates, layout)
    _, loose, _ = run(free, updates, layout)
    assert np.linalg.norm(loose["memory"]) > 10 * np.linalg.norm(updates[0])
    assert np.linalg.norm(state["memory"]) <= 2.0 * np.linalg.norm(updates[0]) * (1 + 1e-6)
    _, after = codec.encode(Update(np.zeros(500, np.float32), layout), state, KEY.at(round=40))
    assert np.linalg.norm(after["memory"]) > 0


def test_overflowing_memory_is_refused_and_state_untouched() -> None:
    """Spec 7.1.9: two finite vectors whose sum is not; the memory the caller holds stays as it was."""
    layout = Layout.flat(100)
    huge = Update(np.full(100, 3e38, np.float32), layout)
    for codec in (ErrorFeedback(TopK(0.01)), ErrorFeedback(RandomK(0.01)), ErrorFeedback(TopK(0.01), momentum=0.9)):
        _, state = codec.encode(huge, codec.init(layout), KEY)
        kept = {name: array.copy() for name, array in state.items()}
        with pytest.raises(NonFiniteUpdate, match="overflows"):
            codec.encode(huge, state, KEY.at(round=1))
        for name, array in state.items():
            np.testing.assert_array_equal(array, kept[name])


def test_an_overflow_never_warns() -> None:
    """In the compressed part, the dense rest and the momentum: NonFiniteUpdate, also where warnings are errors."""
    for inner in (TopK(0.01), TopK(0.01, scope="layer"), RandomK(0.01), Identity()):
        for options in ({}, {"decay": 0.9}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}):
            codec = ErrorFeedback(inner, **options)
            for place in (0, LAYOUT.size - 1):
                g = np.zeros(LAYOUT.size, np.float32)
                g[place] = 3e38
                state = codec.init(LAYOUT) | {"memory": g.copy()}
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    with pytest.raises(NonFiniteUpdate, match="overflows"):
                        codec.encode(Update(g, LAYOUT), state, KEY)


@pytest.mark.parametrize("inner", [TopK(0.05), QSGD(7)], ids=repr)
@pytest.mark.parametrize("name", ["memory", "momentum"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_damaged_state_is_called_damaged(inner: Codec, name: str, bad: float) -> None:
    codec = ErrorFeedback(inner, momentum=0.9)
    for place in (0, LAYOUT.size - 1):
        state = codec.init(LAYOUT)
        state[name][place] = bad
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(StateError, match=f"{name} holds NaN"):
                codec.encode(Update(gradients(1)[0], LAYOUT), state, KEY)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory", np.zeros(3, np.float32)),
        ("memory", np.zeros(LAYOUT.size)),
        ("memory", np.zeros((LAYOUT.size, 1), np.float32)),
        ("memory", [0.0]),
        ("momentum", np.zeros(1, np.float32)),
        ("momentum", np.zeros(3, np.float32)),
        ("momentum", np.zeros(LAYOUT.size)),
        ("round", np.zeros(3, np.int64)),
        ("round", np.asarray(np.nan)),
        ("round", "5"),
        ("threshold", np.zeros(2, np.float32)),
    ],
    ids=str,
)
def test_foreign_states_are_refused(name: str, value: object) -> None:
    codec = ErrorFeedback(TopK(0.1), momentum=0.9)
    with pytest.raises(StateError, match=f"{name}.*init"):
        codec.encode(Update(gradients(1)[0], LAYOUT), codec.init(LAYOUT) | {name: value}, KEY)


def test_rollback_of_foreign_states_is_refused() -> None:
    codec = ErrorFeedback(TopK(0.1), momentum=0.9, norm_guard=1.0)
    frame, state = codec.encode(Update(gradients(1)[0], LAYOUT), codec.init(LAYOUT), KEY)
    for wrong, named in (
        ({}, "memory"),
        ({"memory": state["memory"]} | {"masked": state["masked"]}, "momentum"),
        (state | {"memory": np.zeros(3, np.float32)}, "memory"),
        (state | {"momentum": np.zeros(3, np.float32)}, "momentum"),
        (state | {"masked": state["masked"][1:]}, "masked"),
        (state | {"masked": state["masked"].astype(np.float64)}, "masked"),
        (state | {"masked": 5}, "masked"),
        (state | {"bound": np.zeros(2)}, "bound"),
    ):
        with pytest.raises(StateError, match=named):
            codec.rollback(wrong, frame, LAYOUT)


def test_momentum_that_is_switched_off_is_forgotten() -> None:
    """Parameters may change between rounds: a memory with momentum serves a codec without."""
    _, state, _ = run(ErrorFeedback(TopK(0.1), momentum=0.9), gradients(2))
    plain = ErrorFeedback(TopK(0.1))
    given = Update(gradients(3)[2], LAYOUT)
    frame, after = plain.encode(given, state, KEY.at(round=2))
    assert frame == plain.encode(given, {"memory": state["memory"]}, KEY.at(round=2))[0]
    assert "momentum" not in after


@pytest.mark.parametrize("inner", [TopK(0.5, values="fp16"), TopK(0.5), RandomK(1.0)], ids=repr)
def test_only_delivered_coordinates_lose_their_momentum(inner: Codec) -> None:
    """A value that rounds to zero, or is zero, was not sent: its momentum and memory stay, also over a rollback."""
    layout = Layout.flat(4)
    codec = ErrorFeedback(inner, momentum=0.9)
    tiny = 1e-9 if "fp16" in repr(inner) else 0.0
    g = np.array([tiny, -tiny, 0.0, 0.0], np.float32)
    state = codec.init(layout)
    state["momentum"][:] = [1e-9, 1e-9, 0.0, 0.0]
    state["memory"][:] = -(state["momentum"] * np.float32(0.9) + g) + g
    u = state["momentum"] * np.float32(0.9) + g
    frame, after = codec.encode(Update(g, layout), state, KEY)
    assert not codec.decode(frame, layout).any()
    np.testing.assert_array_equal(after["momentum"], u)
    assert u.any()
    assert after["masked"].size == 0
    np.testing.assert_array_equal(codec.rollback(after, frame, layout)["momentum"], u)


def test_masking_at_density_one_with_nesterov() -> None:
    """Not plain SGD but (1 + momentum) times as fast; dense codecs are not masked at all."""
    updates = gradients(5)
    part = slice(0, LAYOUT.compressed_size)
    sent, _, _ = run(ErrorFeedback(TopK(1.0), momentum=0.9, nesterov=True), updates)
    np.testing.assert_allclose(sent[:, part], 1.9 * updates[:, part], rtol=1e-5)
    for inner in (Identity(), QSGD(7)):
        masked = run(ErrorFeedback(inner, momentum=0.9, masking=True), updates)[2]
        assert masked == run(ErrorFeedback(inner, momentum=0.9, masking=False), updates)[2]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("beta", [1.0, 0.4])
def test_conservation_with_momentum(nesterov: bool, beta: float) -> None:
    """Σ sent + m/beta is the sum of what momentum made of the updates, not of the updates."""
    codec = ErrorFeedback(TopK(0.05), momentum=0.5, nesterov=nesterov, beta=beta)
    updates = gradients(10)
    state, total = codec.init(LAYOUT), np.zeros(LAYOUT.size)
    sent = np.zeros(LAYOUT.size)
    for t, g in enumerate(updates):
        before = state["momentum"].astype(np.float64)
        u = 0.5 * (before + g) if nesterov else 0.5 * before + g
        total += u + g if nesterov else u
        frame, state = codec.encode(Update(g, LAYOUT), state, KEY.at(round=t))
        sent += codec.decode(frame, LAYOUT)
    np.testing.assert_allclose(sent + state["memory"] / beta, total, rtol=0, atol=1e-3)
    assert np.abs(total - updates.sum(axis=0)).max() > 1.0


def test_another_models_state_is_refused() -> None:
    codec = ErrorFeedback(TopK(0.1))
    given = Update(gradients(1)[0], LAYOUT)
    with pytest.raises(StateError, match="another model"):
        codec.encode(given, codec.init(Layout.flat(10)), KEY)
    with pytest.raises(StateError, match="init"):
        codec.encode(given, {}, KEY)
    with pytest.raises(StateError, match="init"):
        ErrorFeedback(TopK(0.1), momentum=0.9).encode(given, codec.init(LAYOUT), KEY)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"beta": 1.5}, "beta"),
        ({"beta": float("nan")}, "beta"),
        ({"decay": -0.1}, "decay"),
        ({"momentum": 1.0}, "momentum"),
        ({"nesterov": True}, "nesterov"),
        ({"max_age": 0}, "max_age"),
        ({"max_age": 1.5}, "max_age"),
        ({"norm_guard": 0.0}, "norm_guard"),
        ({"masking": "yes"}, "masking"),
    ],
)
def test_bad_parameters_are_named(options: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ErrorFeedback(TopK(0.1), **options)


def test_feedback_around_feedback_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory of its own"):
        ErrorFeedback(ErrorFeedback(TopK(0.1)))


@pytest.mark.slow
def test_memory_of_local_topk_stays_bounded() -> None:
    """Spec 7.3: four constant Gaussian gradients, n = 300, k = 15, 2000 rounds: below 15 ‖g‖ (8.8 measured)."""
    layout = Layout.flat(300)
    codec = ErrorFeedback(TopK(0.05))
    for seed in range(4):
        g = Update(np.random.default_rng(seed).normal(size=300).astype(np.float32), layout)
        state = codec.init(layout)
        for t in range(2000):
            _, state = codec.encode(g, state, KEY.at(round=t, partition=seed))
        assert 2.0 < np.linalg.norm(state["memory"]) / np.linalg.norm(g.vector) < 15.0
