"""Low-bit values on a chosen support and in the dense rest: what arrives, the declared bounds, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from codec_examples import LAYOUTS, update
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp import wire
from fedcomp.codecs import STC, ChunkTopK, RandomK, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.forms import BLOCK, FORMS, RESTS, rest_form
from fedcomp.errors import ConfigError
from fedcomp.kernels import select_of_bins, select_topk
from fedcomp.layout import Layout, SmallDense, Update
from fedcomp.rng import Key

KEY = Key(3, "forms", round=1, partition=2)
LOW = ("q8", "q4", "q2", "sign", "range8", "range6", "range4")


def energy(x: np.ndarray) -> float:
    return float(np.square(x.astype(np.float64)).sum())


def spike(k: int, level: float) -> np.ndarray:
    """One value of 1 and k - 1 of ``level``."""
    x = np.full(k, level, np.float32)
    x[k // 2] = 1.0
    return x


WORST = {
    "q8": spike(BLOCK, 0.4999 / 127),
    "q4": spike(BLOCK, 0.4999 / 7),
    "q2": np.float32([i**-0.5 for i in range(1, 400)]),
    "sign": spike(300, 1e-6),
    "range8": spike(3000, 0.499 * 2.0**-8),
    "range6": spike(3000, 0.499 * 2.0**-8),
    "range4": spike(300, 0.499 * 2.0**-8),
}


@pytest.mark.parametrize("name", LOW)
def test_the_declared_fraction_of_the_energy_always_arrives(name: str) -> None:
    """On random values of many shapes and on the worst ones; for levels and signs the bound is reached."""
    form = FORMS[name]
    rng = np.random.default_rng(1)
    inputs = [WORST[name], -WORST[name], np.float32([1.0]), np.float32([3.0, -3.0]), np.geomspace(1e-30, 1e30, 700)]
    inputs += [rng.standard_t(2, int(k)) for k in rng.integers(1, 900, 40)]
    for x in inputs:
        x = np.asarray(x, np.float32)
        decoded = form.code(x).decode()
        left = energy(x - decoded)
        assert left <= (1.0 - form.kept(x.size)) * energy(x) * (1 + 1e-9)
        largest = float(np.abs(x).max()) ** 2
        assert left <= energy(x) - form.kept_of_largest(x.size) * largest * (1 - 1e-9)
        assert bool(np.all((decoded == 0) | (np.sign(decoded) == np.sign(x))))
        if form.never_enlarges:
            assert energy(decoded) <= energy(x) * (1 + 1e-6)
    if name in ("q8", "q4", "sign"):
        x = WORST[name]
        reached = 1.0 - energy(x - form.code(x).decode()) / energy(x)
        assert form.kept(x.size) == pytest.approx(reached, rel=2e-3)


@pytest.mark.parametrize("name", ["q8", "q4", "q2", "sign"])
def test_few_values_beside_others_are_off_by_half_a_step_at_most(name: str) -> None:
    """Levels: half a step of the block's own scale. A block that shares its scale with a larger one would be off."""
    rng = np.random.default_rng(2)
    x = (
        rng.normal(size=4 * BLOCK + 5).astype(np.float32)
        * np.repeat([1e-4, 1.0, 1e4, 1e-20, 1e30], BLOCK)[: 4 * BLOCK + 5]
    )
    x = x.astype(np.float32)
    decoded = FORMS[name].code(x).decode()
    if name in ("q8", "q4"):
        for a in range(0, x.size, BLOCK):
            part = slice(a, a + BLOCK)
            step = np.abs(x[part]).max() / (127 if name == "q8" else 7)
            assert np.abs(decoded[part] - x[part]).max() <= 0.5001 * step
    else:
        assert np.unique(np.abs(decoded)).size == (2 if name == "q2" else 1)


def test_stc_is_top_k_with_signs() -> None:
    for scope in ("global", "layer"):
        given_ = update(LAYOUTS["model"])
        ours = TopK(0.07, scope, "sign", rest="float32").encode(given_, {}, KEY)[0]
        assert ours == STC(0.07, scope).encode(given_, {}, KEY)[0]


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("rest", RESTS)
def test_error_feedback_keeps_what_is_rounded_away(name: str, rest: str) -> None:
    """The fused step and the general one leave the same memory: what was added less what arrived, in every part."""
    layout = Layout.of({"w": np.zeros((60, 50)), "b": np.zeros(30)}, SmallDense(share=0.05))
    assert layout.compressed_size == 3000
    assert layout.size == 3030
    codec = ErrorFeedback(TopK(0.1, values=name, rest=rest))
    state = codec.init(layout)
    memory = np.zeros(layout.size, np.float32)
    for t in range(4):
        g = update(layout, seed=t)
        frame, state = codec.encode(g, state, KEY.at(round=t))
        memory = memory + g.vector - codec.decode(frame, layout)
        np.testing.assert_array_equal(codec.residual(state), memory)
        own, dense = codec.open(frame, layout).tensors
        assert type(own.values) is FORMS[name].values
        assert type(dense.values) is rest_form(name, rest).values
        exact = rest == "float32"
        assert exact == (not memory[layout.compressed_size :].any())
    back = codec.rollback(state, frame, layout)
    np.testing.assert_allclose(back["memory"], memory + codec.decode(frame, layout), rtol=0, atol=1e-6)


def test_the_rest_of_old_codecs_is_as_it_was() -> None:
    assert rest_form("float32") is rest_form("bf16") is rest_form("fp16") is FORMS["float32"]
    assert all(rest_form(name) is FORMS["q8"] for name in LOW)


@pytest.mark.parametrize("name", LOW)
def test_values_of_another_form_are_refused(name: str) -> None:
    layout = Layout.flat(500)
    x = np.ones(20, np.float32)
    others = [
        *(FORMS[other].code(x) for other in FORMS if other not in (name, "float64")),
        wire.QsgdLevels.nearest(x, 100, BLOCK),
        wire.QsgdLevels.nearest(x, 127 if name == "q8" else 7, 64),
        wire.Codebook(np.zeros(20, int), np.ones(1, np.float32), 1),
        wire.Codebook(np.zeros(20, int), np.ones(4, np.float32), 3),
        wire.SignScale.quantise(x, 5),
    ]
    for codec in (TopK(0.1, values=name), ChunkTopK(0.1, values=name)):
        own = wire.encode([wire.sparse((500,), np.arange(20), FORMS[name].code(x))])
        codec.open(own, layout)
        for values in others:
            with pytest.raises(wire.WireError):
                codec.open(wire.encode([wire.sparse((500,), np.arange(20), values)]), layout)


def test_random_k_of_low_bit_values_is_neither_linear_nor_unbiased() -> None:
    assert RandomK(0.1).linear
    assert not RandomK(0.1, values="q8").linear
    assert not RandomK(0.1, values="q8").unbiased
    with pytest.raises(ConfigError, match="biased"):
        RandomK(0.1, unbiased=True, values="q8")
    with pytest.raises(ConfigError, match="did you mean 'q2' or 'q4' or 'q8'"):
        TopK(0.1, values="q3")
    # Which has as many letters of "sign" as "q3" has of "q2".
    with pytest.raises(ConfigError, match=r"^(?!.*did you mean).*values must be one of"):
        TopK(0.1, values="int8")
    with pytest.raises(ConfigError, match="rest"):
        TopK(0.1, rest="q2")


def naive_of_bins(x: np.ndarray, length: int, k: int, last: int) -> list[int]:
    found = []
    for start in range(0, x.size, length):
        part = x[start : start + length]
        wanted = k if part.size == length else last
        found += sorted(start + int(i) for i in np.argsort(-np.abs(part.astype(np.float64)), kind="stable")[:wanted])
    return found


@settings(max_examples=60)
@given(st.integers(0, 300), st.integers(1, 90), st.data(), st.sampled_from(["heavy", "ties", "zeros"]))
def test_the_largest_of_every_bin(n: int, length: int, data: st.DataObject, kind: str) -> None:
    k = data.draw(st.integers(1, length))
    last = data.draw(st.integers(1, n % length)) if n % length else 0
    rng = np.random.default_rng(n)
    made = {"heavy": rng.standard_t(2, n), "ties": rng.integers(-2, 3, n), "zeros": np.zeros(n)}
    x = made[kind].astype(np.float32)
    assert select_of_bins(x, length, k, last).tolist() == naive_of_bins(x, length, k, last)


def test_bins_of_many_elements_are_ranked_part_by_part() -> None:
    x = np.random.default_rng(5).standard_t(3, 300_001).astype(np.float32)
    assert select_of_bins(x, 4096, 41, 10).tolist() == naive_of_bins(x, 4096, 41, 10)
    assert select_of_bins(x, x.size, 300, 0).tolist() == select_topk(x, 300).tolist()
    for k, last in ((0, 1), (4097, 1), (5, 0), (5, 4096)):
        with pytest.raises(ConfigError, match="cannot be selected"):
            select_of_bins(x, 4096, k, last)


def test_every_chunk_sends_its_share() -> None:
    """Also a quiet one, and the short last one no more than the density asks of it."""
    layout = Layout.flat(10_000)
    x = np.random.default_rng(6).normal(size=10_000).astype(np.float32)
    x[4096:8192] *= 1e-6
    codec = ChunkTopK(0.01)
    frame, _ = codec.encode(Update(x, layout), {}, KEY)
    support = codec.support(frame, layout)
    assert [int(np.count_nonzero(support // 4096 == i)) for i in range(3)] == [41, 41, 19]
    decoded = codec.decode(frame, layout)
    assert energy(x - decoded) <= (1 - codec.contraction(layout)) * energy(x)
    assert codec.contraction(layout) == pytest.approx(0.01, rel=0.06)
