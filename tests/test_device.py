"""Arrays on a device and the device tier: the bits of the host's tiers, and nothing but what is kept comes back.

torch's own CPU device stands for a GPU: the code is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedcomp.adapters import nearest
from fedcomp.codecs import EDEN, Codec, ErrorFeedback, TopK
from fedcomp.codecs.base import State, norm
from fedcomp.device import DeviceArray, beside, device_of, on_host, room_beside
from fedcomp.errors import ConfigError, LayoutError, NonFiniteUpdate, StateError
from fedcomp.kernels import add_scaled, feedback_step, scatter_add, select_topk
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

torch = pytest.importorskip("torch")
from torch.overrides import TorchFunctionMode  # noqa: E402  # after it is known to be there

Vector = np.ndarray
SIZES = (1, 2, 17, 1000, 30_011)


def there(array: Any) -> DeviceArray:
    """Return an array's copy on the device."""
    return DeviceArray(torch.tensor(array))


def same(found: Any, wanted: Vector) -> None:
    """Require the bits of ``wanted``, the signs of zeros included."""
    got = np.asarray(found)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert got.tobytes() == wanted.tobytes()


class Crossing(TorchFunctionMode):
    """Counts the elements that leave tensors for the host, call by call."""

    LEAVING = ("numpy", "cpu", "tolist", "item", "__array__", "__float__", "__int__", "__bool__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A copy to the host, and then numpy's view of it, are one crossing.
        if getattr(function, "__name__", "") in self.LEAVING and function.__name__ != "numpy":
            self.counts.append(args[0].numel())
        return function(*args, **(kwargs or {}))


KINDS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "heavy tails": lambda rng, n: rng.standard_t(2, n),
    "ties": lambda rng, n: rng.integers(-3, 4, n),
    "constant": lambda rng, n: np.full(n, -1.5),
    "signed zeros": lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, -0.0),
    "few": lambda rng, n: np.where(rng.random(n) < 0.01, rng.normal(size=n), 0.0),
    "huge": lambda rng, n: rng.choice([-3e38, 1e38, 3e38], n),
    "denormal": lambda rng, n: rng.integers(-9, 10, n) * 1.4e-45,
}


def values(kind: str, n: int, seed: int = 0) -> Vector:
    found: Vector = np.asarray(KINDS[kind](np.random.default_rng([seed, n]), n)).astype(np.float32)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_selection_has_the_bits_of_the_hosts(kind: str) -> None:
    for n in SIZES:
        x = values(kind, n)
        # No sum of the largest overflows.
        m = values(kind, n, 1) / np.float32(16)
        for k in sorted({0, 1, n // 100, n // 3, n - 1, n}):
            wanted = select_topk(x, k)
            same(select_topk(there(x), k), wanted)  # type: ignore[arg-type]
            # Every second element of a longer tensor: what is not contiguous.
            spread = torch.zeros(2 * n)
            spread[::2] = torch.tensor(x)
            same(select_topk(DeviceArray(spread[::2]), k), wanted)  # type: ignore[arg-type]
            for decay in (1.0, 0.9, 0.0):
                on = feedback_step(there(m), there(x), k, decay=decay)  # type: ignore[arg-type]
                off = feedback_step(m, x, k, decay=decay)
                same(on.indices, off.indices)
                same(on.values, off.values)
                same(on.memory, off.memory)
                assert on.threshold == off.threshold
                assert isinstance(on.memory, DeviceArray)


def test_vectors_without_values_and_wrong_arguments_are_treated_as_on_the_host() -> None:
    empty = np.zeros(0, np.float32)
    assert select_topk(there(empty), 0).size == 0  # type: ignore[arg-type]
    assert feedback_step(there(empty), there(empty), 0).values.size == 0  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"k = 4 lies outside \[0, 3\]"):
        select_topk(there(np.ones(3, np.float32)), 4)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="they must agree"):
        feedback_step(there(np.ones(3, np.float32)), there(np.ones(4, np.float32)), 1)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="must be a float32 array"):
        select_topk(there(np.ones(3, np.int32)), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("k", [0, 5, 1000])
def test_what_is_not_finite_is_refused_in_the_same_words(bad: float, k: int) -> None:
    x = values("heavy tails", 1000)
    x[[7, 900]] = bad
    with pytest.raises(NonFiniteUpdate) as off:
        select_topk(x, k)
    with pytest.raises(NonFiniteUpdate) as on:
        select_topk(there(x), k)  # type: ignore[arg-type]
    assert str(on.value) == str(off.value)
    with pytest.raises(NonFiniteUpdate):
        feedback_step(np.zeros(1000, np.float32), there(x), k)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [1.0, -1.0, 0.3])
def test_sums_have_the_bits_of_the_hosts(weight: float) -> None:
    x, y = values("heavy tails", 30_011), values("heavy tails", 30_011, 1)
    on, off = there(x), x.copy()
    add_scaled(on, y, weight)  # type: ignore[arg-type]
    add_scaled(off, y, weight)
    same(on, off)
    indices = np.arange(3, 30_011, 7)
    scatter_add(on, indices, y[indices], weight)  # type: ignore[arg-type]
    scatter_add(off, indices, y[indices], weight)
    same(on, off)
    assert norm(on) == pytest.approx(norm(off), rel=1e-12)  # type: ignore[arg-type]
    assert norm(there(x), y) == pytest.approx(norm(x, y), rel=1e-12)  # type: ignore[arg-type]


def test_arithmetic_has_numpys_bits_and_dtypes() -> None:
    x, y = values("heavy tails", 999), values("huge", 999)
    with np.errstate(over="ignore"):
        for found, wanted in (
            (there(x) + y, x + y),
            (x - there(y), x - y),
            (there(x) * np.float32(0.3), x * np.float32(0.3)),
            (np.float32(0.3) * there(x), np.float32(0.3) * x),
            (np.subtract(there(x.astype(np.float16)), y, dtype=np.float32), x.astype(np.float16) - y),
            (np.abs(there(x)), np.abs(x)),
            (np.where(there(x) == x, there(y), x), y),
            (np.zeros_like(there(x)), np.zeros_like(x)),
        ):
            assert isinstance(found, DeviceArray)
            same(found, wanted)
    out = there(np.zeros(999, np.float32))
    np.subtract(x.astype(np.float64), there(y), out=out, dtype=np.float64, casting="unsafe")
    same(out, (x.astype(np.float64) - y).astype(np.float32))
    assert np.count_nonzero(there(np.float32([0, 1, -0.0]))) == 1
    assert np.array_equal(there(x), x)
    assert not np.array_equal(x, there(y))
    for kind in KINDS:
        x = values(kind, 1000)
        for short in ("bfloat16", "float16"):
            same(there(x).nearest(short), nearest(x, short))


@pytest.mark.parametrize(
    "call",
    [
        lambda a: np.sqrt(a),
        lambda a: np.concatenate([a, a]),
        lambda a: np.add.reduce(a),
        # Of a float32 array numpy would make float64 of it, torch would not.
        lambda a: a * np.float64(0.1),
        lambda a: np.add(np.ones(3, np.float32), a, out=np.ones(3, np.float32)),
        lambda a: a + "b",
    ],
)
def test_what_is_not_known_is_refused_and_never_done_on_a_copy(call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError):
        call(there(np.ones(3, np.float32)))


def test_a_copy_on_the_host_cannot_be_written_to() -> None:
    held = there(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(held)[0] = 2.0
    own = np.array(held)
    own[0] = 2.0
    taken = held[np.array([0, 1])]
    taken[0] = 5.0
    same(held, np.ones(3, np.float32))


def test_where_arrays_are() -> None:
    host, held = np.ones(3, np.float32), there(np.ones(3, np.float32))
    assert device_of([host, held]) == torch.device("cpu")
    assert device_of([host]) is None
    assert isinstance(room_beside([host, held], 4), DeviceArray)
    assert isinstance(room_beside([host], 4), np.ndarray)
    assert beside(host, host) is host
    assert beside(held, held) is held
    assert isinstance(beside(held, host), np.ndarray)
    assert isinstance(beside(host, held), DeviceArray)
    assert on_host(host) is host


# Codecs.

LAYOUT = Layout.of({"w": np.zeros((300, 300), np.float32), "b": np.zeros(300, np.float32)})
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"decay": 0.9},
    {"beta": 0.5},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "masking": False},
    {"max_age": 1},
)


@pytest.mark.parametrize("form", ["float32", "q2", "bf16", "sign"])
@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_frames_and_states_of_error_feedback_have_the_bits_of_the_hosts(
    options: dict[str, Any], form: str, scope: str
) -> None:
    """Over rounds, one of them missed and one rolled back; the memory begins on the host and stays on the device."""
    codec = ErrorFeedback(TopK(0.01, values=form, scope=scope), **options)
    assert codec.on_device
    off = on = codec.init(LAYOUT)
    for number in (1, 2, 4, 5):
        g = values("heavy tails", LAYOUT.size, number)
        wanted, off = codec.encode(Update(g.copy(), LAYOUT, given=True), off, Key(0, round=number))
        given = number != 5
        frame, on = codec.encode(Update(there(g), LAYOUT, given=given), on, Key(0, round=number))  # type: ignore[arg-type]
        assert frame == wanted
        if number == 2:
            off, on = codec.rollback(off, wanted, LAYOUT), codec.rollback(on, frame, LAYOUT)
        assert isinstance(on["memory"], DeviceArray)
        assert on.keys() == off.keys()
        for name, array in off.items():
            same(on[name], array)
    # An update on the host brings the memory back.
    wanted, off = codec.encode(Update(g, LAYOUT), off, Key(0, round=6))
    frame, on = codec.encode(Update(g, LAYOUT), on, Key(0, round=6))
    assert frame == wanted
    assert isinstance(on["memory"], np.ndarray)


@pytest.mark.parametrize("codec", [TopK(0.01), TopK(0.02, scope="layer", values="q8")], ids=repr)
def test_frames_of_topk_alone(codec: Codec) -> None:
    g = values("heavy tails", LAYOUT.size)
    wanted, _ = codec.encode(Update(g, LAYOUT), {}, Key(0))
    assert codec.encode(Update(there(g), LAYOUT), {}, Key(0))[0] == wanted  # type: ignore[arg-type]


def test_who_works_on_devices() -> None:
    class Own(TopK):
        pass

    assert TopK(0.1).on_device
    for codec in (Own(0.1), ErrorFeedback(Own(0.1)), EDEN(1)):
        assert not codec.on_device
    assert not ErrorFeedback(TopK(0.1), norm_guard=1.0).on_device
    assert not ErrorFeedback(TopK(0.1), memory="float16").on_device


def refused(codec: Codec, update: Update, state: State) -> Exception:
    before = {name: np.array(array) for name, array in state.items()}
    with pytest.raises((NonFiniteUpdate, StateError)) as error:
        codec.encode(update, state, Key(0, round=2))
    for name, array in before.items():
        same(state[name], array)
    return error.value


@pytest.mark.parametrize("damage", ["update", "memory", "sum"])
def test_errors_are_the_hosts_and_leave_the_state_whole(damage: str) -> None:
    codec = ErrorFeedback(TopK(0.01))
    g, memory = values("heavy tails", LAYOUT.size), np.zeros(LAYOUT.size, np.float32)
    if damage == "update":
        g[5] = np.nan
    elif damage == "memory":
        memory[5] = np.inf
    else:
        g[5] = memory[5] = 3e38
    state = {**codec.init(LAYOUT), "memory": memory}
    off = refused(codec, Update(g, LAYOUT), state)
    on = refused(codec, Update(there(g), LAYOUT), {**state, "memory": there(memory)})  # type: ignore[arg-type, dict-item]
    assert (type(on), str(on)) == (type(off), str(off))


def test_nothing_but_what_is_kept_comes_to_the_host() -> None:
    layout, k = Layout.flat(100_000), 1000
    codec = ErrorFeedback(TopK(0.01))
    state = codec.init(layout)
    for number in (1, 2):
        update = Update(there(values("heavy tails", layout.size, number)), layout, given=True)  # type: ignore[arg-type]
        with Crossing() as crossed:
            _, state = codec.encode(update, state, Key(0, round=number))
        # Indices and values; all else is single numbers.
        assert sorted(crossed.counts)[-2:] == [k, k]
        assert sum(crossed.counts[:]) - 2 * k == sum(count == 1 for count in crossed.counts) <= 20
    # A wrong way is noticed: the whole vector.
    with Crossing() as crossed:
        np.asarray(state["memory"])
    assert crossed.counts == [layout.size]
