"""A memory kept as float16: half the bytes, nothing lost but its rounding, no overflow at any scale."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.codecs import QSGD, Codec, RandomK, TopK
from fedcomp.codecs import feedback as module
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.memory import kept, recalled
from fedcomp.errors import ConfigError, StateError
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

LAYOUT = Layout.of({"w": np.zeros((60, 40), np.float32), "b": np.zeros(10, np.float32)})
KEY = Key(5, "codec", partition=1)
SCALES = (1e-30, 1e-7, 1.0, 1e6, 1e30)


def gradients(rounds: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(0).standard_t(4, (rounds, LAYOUT.size))).astype(np.float32)


def half(memory: np.ndarray) -> np.ndarray:
    found = recalled(kept(memory, "float16"))
    assert found is not None
    return found


def allowed(memory: np.ndarray) -> np.ndarray:
    """What one rounding may lose of each value."""
    size = np.abs(memory.astype(np.float64))
    return np.maximum(2.0**-11 * size, max(2.0**-39 * size.max(initial=0.0), 2.0**-125))


def conserves(codec: ErrorFeedback, scale: float, rounds: int = 12) -> bool:
    """Σ sent + m == Σ g up to one rounding of the memory in each round, and float32's own."""
    updates = gradients(rounds, scale)
    state, sent, bound = codec.init(LAYOUT), np.zeros(LAYOUT.size), np.zeros(LAYOUT.size)
    for t, g in enumerate(updates):
        held = codec.residual(state)
        assert held is not None
        with np.errstate(over="ignore", invalid="ignore"):
            frame, state = codec.encode(Update(g, LAYOUT), state, KEY.at(round=t))
        left = codec.residual(state)
        assert left is not None
        sent += codec.decode(frame, LAYOUT)
        # What was rounded is near what is left, and sums of float32 are exact to their own last digits.
        summed = np.abs(held) + np.abs(g) + np.abs(left)
        bound += 1.001 * allowed(left) + 2.0**-22 * summed.max()
    return bool((np.abs(sent + left - updates.sum(axis=0, dtype=np.float64)) <= bound).all())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("inner", [TopK(0.05), TopK(0.1, "layer", "bf16"), RandomK(0.1), QSGD(63)], ids=repr)
def test_nothing_is_lost_but_the_rounding(inner: Codec, scale: float) -> None:
    assert conserves(ErrorFeedback(inner, memory="float16"), scale)


@pytest.mark.parametrize("scale", [1e-7, 1e6])
def test_without_its_exponent_a_float16_loses_small_updates_and_overflows_on_large_ones(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(memory: np.ndarray, dtype: str) -> dict:
        with np.errstate(over="ignore"):
            return {"memory": memory.astype(np.float16), "exponent": np.asarray(0, np.int16)}

    monkeypatch.setattr(module, "kept", plain)
    codec = ErrorFeedback(TopK(0.05), memory="float16")
    if scale > 1:
        # Infinity in the memory: the next round is refused, and so would be all after it.
        with pytest.raises(StateError, match="damaged"):
            conserves(codec, scale)
    else:
        assert not conserves(codec, scale)


@pytest.mark.parametrize("scale", SCALES)
def test_one_rounding_is_within_its_bound_and_a_second_changes_nothing(scale: float) -> None:
    # Over fifty orders of magnitude, so that most of them are far below the largest.
    spread = np.float32(10.0) ** np.linspace(-25, 0, LAYOUT.size, dtype=np.float32)
    memory = gradients(1, scale)[0] * spread
    once = half(memory)
    assert (np.abs(once.astype(np.float64) - memory) <= allowed(memory)).all()
    np.testing.assert_array_equal(half(once), once)


def test_the_ends_of_float32_are_kept() -> None:
    most, least = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    for values in ([most, -most, 1.0], [least, -least, 0.0], [0.0, -0.0, 0.0]):
        memory = np.float32(values)
        once = half(memory)
        assert np.isfinite(once).all()
        assert (np.abs(once.astype(np.float64) - memory) <= allowed(memory)).all()
    assert not half(np.zeros(0, np.float32)).size


def test_it_takes_half_the_bytes() -> None:
    sizes = {}
    for memory in ("float32", "float16"):
        codec = ErrorFeedback(TopK(0.05), memory=memory)
        _, state = codec.encode(Update(gradients(1)[0], LAYOUT), codec.init(LAYOUT), KEY)
        sizes[memory] = sum(array.nbytes for array in state.values())
        assert {n: (a.dtype, a.shape) for n, a in codec.init(LAYOUT).items()} == {
            n: (a.dtype, a.shape) for n, a in state.items() if n not in ("round", "threshold")
        }
    assert sizes["float32"] - sizes["float16"] == 2 * LAYOUT.size - 2


@pytest.mark.parametrize(
    "options", [{}, {"beta": 0.3}, {"decay": 0.5}, {"momentum": 0.9}, {"norm_guard": 0.8}], ids=str
)
def test_rollback_brings_the_mass_back_up_to_the_rounding(options: dict) -> None:
    whole, halved = (ErrorFeedback(TopK(0.05), memory=memory, **options) for memory in ("float32", "float16"))
    *earlier, last = gradients(4)
    state = halved.init(LAYOUT)
    for t, g in enumerate(earlier):
        _, state = halved.encode(Update(g, LAYOUT), state, KEY.at(round=t))
    before = {name: array.copy() for name, array in state.items()}
    # From one memory, which a codec of either form continues.
    backs = []
    for codec in (whole, halved):
        frame, after = codec.encode(Update(last, LAYOUT), state, KEY.at(round=3))
        backs.append(codec.rollback(after, frame, LAYOUT))
    exact, found = (codec.residual(back) for codec, back in zip((whole, halved), backs, strict=True))
    assert exact is not None
    # Twice: after encoding, and after the mass was put back.
    assert (np.abs(exact - found) <= 2.1 * allowed(np.abs(exact) + np.abs(last))).all()
    for name in ("momentum",) if "momentum" in options else ():
        np.testing.assert_array_equal(backs[0][name], backs[1][name])
    for name, array in before.items():
        np.testing.assert_array_equal(state[name], array)


def test_a_memory_of_the_other_form_is_continued() -> None:
    whole, halved = (ErrorFeedback(TopK(0.05), memory=memory) for memory in ("float32", "float16"))
    state = whole.init(LAYOUT)
    for t, (codec, g) in enumerate(zip((whole, halved, whole, halved), gradients(4), strict=True)):
        held = codec.residual(state)
        assert held is not None
        frame, after = codec.encode(Update(g, LAYOUT), state, KEY.at(round=t))
        left = codec.residual(after)
        assert left is not None
        expected = held + g - codec.decode(frame, LAYOUT)
        assert (np.abs(left - expected) <= allowed(expected) + 1e-5).all()
        state = after
    assert state["memory"].dtype == np.float16


@pytest.mark.parametrize(
    "exponent", [None, np.asarray(114), np.asarray(-101), np.asarray(0.0), np.zeros(2, np.int16), 3]
)
def test_a_damaged_exponent_is_refused(exponent: object) -> None:
    codec = ErrorFeedback(TopK(0.05), memory="float16")
    frame, state = codec.encode(Update(gradients(1)[0], LAYOUT), codec.init(LAYOUT), KEY)
    damaged = {k: a for k, a in state.items() if k != "exponent"} | ({} if exponent is None else {"exponent": exponent})
    for use in (
        lambda: codec.encode(Update(gradients(1)[0], LAYOUT), damaged, KEY.at(round=1)),
        lambda: codec.rollback(damaged, frame, LAYOUT),
        lambda: codec.residual(damaged),
    ):
        with pytest.raises(StateError, match=r"exponent.*init"):
            use()


def test_other_forms_are_no_memory() -> None:
    for memory in ("bf16", "float64", 16, None, "mmap"):
        with pytest.raises(ConfigError, match="memory"):
            ErrorFeedback(TopK(0.05), memory=memory)  # type: ignore[arg-type]
