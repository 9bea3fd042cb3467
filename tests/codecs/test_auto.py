"""Auto: within its budget, nearer than what it replaces, unbiased where it says so, and readable for every receiver."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import math
from collections import Counter

import numpy as np
import pytest

from fedcomp import wire
from fedcomp.codecs import DCT, EDEN, Auto, Domain, ErrorFeedback, FixedPoint, ModularSum, TopK, ratecontrol
from fedcomp.codecs import auto as module
from fedcomp.codecs.orthonormal import rotate
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.kernels import compiled_contexts as _loaded  # so that short vectors are coded by compiled code, too
from fedcomp.kernels import contexts
from fedcomp.layout import Layout, TensorSpec, Update
from fedcomp.rng import Key
from fedcomp.wire import modelled
from fedcomp.wire.modelled import DITHERED, PART, ROUNDED, Head, Levels, Terms

KEY = Key(12, "codec", round=3, partition=1)
assert _loaded

SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "network": ((128, 64), (128,), (64, 128), (64,), (10, 64), (10,)),
    "convolutions": ((16, 3, 3, 3), (32, 16, 3, 3), (32,), (10, 1152)),
    "unlike rows": ((90, 100), (80, 100)),
    "white": ((100, 200),),
    "embedding": ((500, 32), (64, 32), (32, 64)),
}


@functools.cache
def spectrum(name: str) -> tuple[Layout, np.ndarray]:
    """Values as updates have them: heavy tails, rows and columns of unlike scale; an embedding of few touched rows."""
    arrays = {}
    for index, shape in enumerate(SHAPES[name]):
        key = Key(77, f"spectrum {name}", layer=index)
        size = math.prod(shape)
        rows, columns = shape[0], size // shape[0]
        u = key.uniform(size)
        signs = 1.0 - 2.0 * (key.at(purpose="signs").uniform(size) < 0.5)
        if name == "white":
            values = signs * np.sqrt(-2.0 * np.log(1.0 - u)) * np.cos(np.pi * key.at(purpose="turn").uniform(size))
        else:
            values = signs * ((1.0 - u) ** -0.3 - 1.0)
            apart = 6.0 if name == "unlike rows" else 3.0
            scale = np.exp(apart * (key.at(purpose="rows").uniform(rows) - 0.5))
            values = values.reshape(rows, columns) * scale[:, None]
            values = values * np.exp(3.0 * (key.at(purpose="columns").uniform(columns) - 0.5))
            if name == "embedding" and not index:
                values[key.at(purpose="touched").uniform(rows) < 0.8] = 0.0
        arrays[f"{index}"] = (0.01 * values).reshape(shape).astype(np.float32)
    layout = Layout.of({f"t{i}": a for i, a in arrays.items()}, lambda *_: None)
    return layout, layout.flatten({f"t{i}": a for i, a in arrays.items()})


def sent(codec: Auto, layout: Layout, vector: np.ndarray, key: Key = KEY) -> tuple[Levels, np.ndarray]:
    """What travels, and what arrives."""
    frame, _ = codec.encode(Update(vector, layout), codec.init(layout), key)
    bundle = codec.open(frame, layout)
    values = bundle.tensors[0].values
    assert isinstance(values, Levels)
    assert len(frame) <= codec.longest(layout)
    return values, codec.decode(bundle, layout)


def error(arrived: np.ndarray, vector: np.ndarray) -> float:
    off, wide = arrived.astype(np.float64) - vector, vector.astype(np.float64)
    return float(off @ off) / float(wide @ wide)


def frames() -> list[str]:
    """Digests of frames of every form."""
    found = []
    for name in ("network", "embedding"):
        layout, vector = spectrum(name)
        # Matrices in the order of Fortran are the same values.
        given = {t.name: np.asfortranarray(vector[t.offset :][: t.size].reshape(t.shape)) for t in layout.tensors}
        vector = layout.flatten(given)
        for codec in (Auto(0.4, feedback=True), Auto(0.4), Auto(1.0)):
            values, arrived = sent(codec, layout, vector)
            found.append(hashlib.sha256(bytes(values.section) + arrived.tobytes()).hexdigest()[:16])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("feedback", [False, True])
def test_a_budget_is_filled_and_never_exceeded(name: str, feedback: bool) -> None:
    layout, vector = spectrum(name)
    # Where values are white, levels are not what is sent without feedback at one bit and less.
    for bits in (0.1, 0.5, 1.0, 2.0) if feedback or name != "white" else (0.1, 2.0):
        codec = Auto(bits, feedback=feedback)
        values, _ = sent(codec, layout, vector)
        budget = codec.budget(layout.size)
        assert budget == max(256, int(bits * layout.size / 8))
        # Where chance decides what a draw takes, a few per cent are kept for it.
        least = 0.96 if feedback else 0.85 if budget < 600 else 0.92
        assert least * budget <= values.nbytes <= budget, (bits, values.nbytes / budget)


@pytest.mark.slow
def test_a_sample_of_the_rows_leads_to_a_filled_budget() -> None:
    """From 262,144 values on: rows of unlike scale, one long row, and few columns."""
    rng = np.random.default_rng(4)
    shapes = {"wide": (400, 500), "long": (100_000,), "narrow": (20_000, 5)}
    arrays = {name: rng.standard_t(3, shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["wide"] *= np.exp(rng.normal(size=(400, 1))).astype(np.float32)
    layout = Layout.of(arrays, lambda *_: None)
    vector = layout.flatten(arrays)
    for bits in (0.02, 0.1, 0.5, 2.0):
        for feedback in (True, False):
            codec = Auto(bits, feedback=feedback)
            frame, _ = codec.encode(Update(vector, layout), {}, KEY)
            assert 0.95 * codec.budget(layout.size) <= len(frame) <= codec.longest(layout), (bits, feedback)
    few = Auto(0.02, feedback=True)
    frame, _ = few.encode(Update(vector, layout), {}, KEY)
    found = error(few.decode(frame, layout), vector)
    for rival in (TopK(0.02 / 13.0, values="q2"), TopK(0.02 / 15.0, values="q4")):
        other, _ = rival.encode(Update(vector, layout), {}, KEY)
        assert 0.95 * len(frame) < len(other) <= len(frame)
        assert found < error(rival.decode(other, layout), vector)


ERRORS: dict[str, tuple[float, ...]] = {
    "network": (0.3236, 0.08989, 0.006018),
    "convolutions": (0.3540, 0.1015, 0.006535),
    "unlike rows": (0.1993, 0.03421, 0.0009388),
    "white": (0.9144, 0.6294, 0.09644),
    "embedding": (0.1845, 0.01865, 5e-05),
}
"""Squared error over the squared length at 0.1, 0.5 and 2 bits, as it was when this was written (measured)."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_error_stays_and_is_below_that_of_top_k_in_two_or_four_bits(name: str) -> None:
    layout, vector = spectrum(name)
    for bits, before in zip((0.1, 0.5, 2.0), ERRORS[name], strict=True):
        values, arrived = sent(Auto(bits, feedback=True), layout, vector)
        found = error(arrived, vector)
        assert found <= 1.02 * before
        for form, each in (("q2", 5.0), ("q4", 7.0)):
            rival = TopK(min(1.0, bits / each), values=form)
            frame, _ = rival.encode(Update(vector, layout), {}, KEY)
            while len(frame) > values.nbytes + 60:
                rival = dataclasses.replace(rival, density=rival.density * 0.97)
                frame, _ = rival.encode(Update(vector, layout), {}, KEY)
            # Of values without any order there is nothing to model.
            limit = 1.01 if name == "white" else 1.0
            assert found < limit * error(rival.decode(frame, layout), vector), (bits, form)


def hard_vectors(count: int) -> list[np.ndarray]:
    """Constants, spikes, ties at 0.6 and at halves, powers of two, small and large ones."""
    rng = np.random.default_rng(0)
    makers = [
        lambda n: rng.standard_t(2, n),
        lambda n: rng.normal(size=n),
        lambda n: np.full(n, rng.normal()),
        lambda n: rng.choice([0.6, 1.0, 1.5, 2.5, 0.59999, 1.4999], n) * rng.choice([-1, 1], n),
        lambda n: np.where(rng.random(n) < 0.1, rng.normal(size=n) * 100, 0.0),
        lambda n: 2.0 ** rng.integers(-20, 20, n),
        lambda n: rng.normal(size=n) * 1e-28,
        lambda n: np.arange(n) * 1e30,
        lambda n: np.where(np.arange(n) % 3, 1e-41, 1e-27),
        lambda n: np.full(n, 66.0 / 110.0) * rng.choice([1.0, 1.0 - 2.0**-24], n),
    ]
    return [makers[i % 10](int(rng.integers(1, 120))).astype(np.float32) for i in range(count)]


@pytest.mark.long
def test_the_largest_arrives_and_nothing_is_further_off_than_declared() -> None:
    """Whatever the step, the square of x - Q(x) is less than that of x by 5/9 of what is not rounded to 0: in integers,
    and but for the rounding of 0.6 steps, 2**-20 of it."""
    for number, vector in enumerate(hard_vectors(10_000)):
        largest = float(np.abs(vector).max())
        if not largest:
            continue
        step = ratecontrol.step_of(1.6 * largest) - (0, 86, 230, 700)[number // 10 % 4]
        levels = contexts.tier_of(1).quantise(vector, 1.0 / float(modelled.width(step)))
        assert levels.any()
        head = modelled.with_shifts(Head(ROUNDED, ratecontrol.bits_of(levels), step), vector, levels)
        arrived = Levels.coded(head, levels, Terms(((1, vector.size),), 1 << 20)).decode()
        exact = [[int(x) for x in np.ldexp(each.astype(np.float64), 149)] for each in (vector, arrived)]
        error = sum((x - q) ** 2 for x, q in zip(*exact, strict=True))
        kept = sum(x * x for x, level in zip(exact[0], levels, strict=True) if level)
        assert 9 * 2**20 * error <= 9 * 2**20 * sum(x * x for x in exact[0]) - 5 * (2**20 - 1) * kept


def test_scales_by_powers_of_two_change_the_step_alone() -> None:
    layout, vector = spectrum("network")
    for codec in (Auto(0.3, feedback=True), Auto(0.3), Auto(1.5)):
        values, _ = sent(codec, layout, vector)
        for power in (-40, 1, 60):
            other, _ = sent(codec, layout, np.ldexp(vector, power))
            assert bytes(other.section) == bytes(values.section)
            assert other.head == dataclasses.replace(values.head, step=values.head.step + 128 * power)


def test_what_is_too_large_is_refused_and_what_is_too_small_is_zero() -> None:
    layout = Layout.flat(100)
    vector = np.full(100, 2.0**125, np.float32)
    for codec in (Auto(), Auto(feedback=True)):
        with pytest.raises(NonFiniteUpdate, match="levels reach to"):
            sent(codec, layout, vector)
        assert np.isfinite(sent(codec, layout, vector / 128)[1]).all()
        assert not sent(codec, layout, np.full(100, 2.0**-110, np.float32))[1].any()
        values, arrived = sent(codec, layout, np.zeros(100, np.float32))
        assert (len(values.section), arrived.any()) == (0, False)


@pytest.mark.slow
def test_ties_are_sent_in_part_and_all_of_them_in_time() -> None:
    """Spec 14b: one step of Adam, ± the same everywhere, in less than a bit a value; the memory empties by and by."""
    layout = Layout.of({"w": np.zeros((60, 80), np.float32)}, lambda *_: None)
    signs = np.where(Key(5, "signs").uniform(4800) < 0.5, -1.0, 1.0).astype(np.float32)
    codec = ErrorFeedback(Auto(0.5, feedback=True))
    state, total = codec.init(layout), np.zeros(4800)
    shares = []
    for number in range(1, 21):
        frame, state = codec.encode(Update(signs * np.float32(number == 1), layout), state, KEY.at(round=number))
        values = codec.open(frame, layout).tensors[0].values
        assert isinstance(values, Levels)
        assert values.nbytes <= 300
        total += codec.decode(frame, layout)
        shares.append(error(total.astype(np.float32), signs))
    assert 0.5 < shares[0] < 0.85
    assert shares[4] < 0.2
    assert shares[-1] < 1e-3


def means(vector: np.ndarray, terms: Terms, draws: int, part: bool) -> tuple[float, float]:
    """Return how many standard errors the mean of the worst coordinate is off, and the mean square over D²/12."""
    total, squares, widths = np.zeros(terms.size), np.zeros(terms.size), 0.0
    for draw in range(draws):
        now = dataclasses.replace(terms, seed=Key(9, "mean", round=draw).u64())
        found = module._dithered(vector, now)
        assert found is not None
        assert found.head.form == (PART if part else DITHERED)
        arrived = found.decode().astype(np.float64)
        total += arrived
        squares += (arrived - vector) ** 2
        widths += float(found.head.width) ** 2
    off = np.abs(total / draws - vector) / (np.sqrt(squares) / draws)
    return float(off.max()), float(squares.sum()) / (widths * terms.size / 12)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["one", "two", "seven", "many", "sparse", "equal"])
def test_the_mean_of_dithered_levels_is_the_vector(kind: str) -> None:
    rng = np.random.default_rng(3)
    vectors = {
        "one": [0.3],
        "two": [0.3, -1.7],
        "seven": rng.normal(size=7),
        "many": rng.standard_t(3, 64),
        "sparse": np.where(np.arange(64) % 9 == 2, 2.0, 0.0),
        "equal": np.full(64, 0.7),
    }
    vector = np.array(vectors[kind], np.float32)
    rows = 8 if vector.size == 64 else 1
    # As many as levels of the longest step may take: with fewer signs are sent.
    terms = Terms(((rows, vector.size // rows),), budget=34 + vector.size // 8)
    sigmas, variance = means(vector, terms, 2000, part=False)
    assert sigmas < 5.0
    assert variance == pytest.approx(1.0, abs=0.02 if vector.size > 7 else 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [0.4, 1.5])
def test_a_step_does_not_depend_on_the_draws_it_is_used_with(bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the mean would be off, by too little for thousands of draws to show."""
    layout, vector = spectrum("network")
    codec, real = Auto(bits), ratecontrol.draws

    def turned(seed: int, count: int, start: int = 0, purpose: str = "dither") -> np.ndarray:
        return real(seed, count, start, purpose) ^ np.uint32(0xFFFFFF if purpose == "dither" else 0)

    def found(number: int) -> tuple[int, bytes]:
        frame, _ = codec.encode(Update(vector, layout), {}, KEY.at(round=number))
        values = wire.decode(frame).tensors[0].values
        assert isinstance(values, Levels)
        return values.head.step, bytes(values.section)

    before = [found(number) for number in range(8)]
    monkeypatch.setattr(ratecontrol, "draws", turned)
    for number, (step, section) in enumerate(before):
        other = found(number)
        assert other[0] == step
        assert other[1] != section
    assert len({step for step, _ in before}) > 1, "or this test shows nothing"


@pytest.mark.long
def test_a_part_of_the_columns_is_unbiased_and_follows_from_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_head_of", lambda _: Head(PART, fraction=40_000))
    shapes = ((6, 9), (1, 10))
    vector = np.random.default_rng(4).normal(size=64).astype(np.float32)
    sigmas, _ = means(vector, Terms(shapes, budget=40), 2500, part=True)
    assert sigmas < 5.0
    counts, chance = np.zeros(2), np.zeros(9)
    for draw in range(4000):
        (_, _, (_, first)), (_, _, (_, second)) = modelled.parts_of(20_000, Terms(shapes, 40, seed=draw))
        counts += first.size, second.size
        chance[first] += 1
    f = 20_000 / 65_536
    np.testing.assert_allclose(counts / 4000, [9 * f, 10 * f], atol=5 * 0.5 / math.sqrt(4000))
    np.testing.assert_allclose(chance / 4000, f, atol=5 * math.sqrt(f * (1 - f) / 4000))


def white(kind: str, size: int) -> np.ndarray:
    """Values that neither rows nor columns tell anything of."""
    rng = np.random.default_rng(6)
    if kind == "turned":
        found = rng.standard_t(2, size).astype(np.float32)
        rotate(found, Key(8))
        return found
    made = {"normal": rng.normal, "laplace": rng.laplace}[kind]
    return made(size=size).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "laplace", "turned"])
def test_white_values_arrive_as_near_as_by_eden(kind: str) -> None:
    layout, vector = Layout.of({"w": np.zeros((400, 500), np.float32)}, lambda *_: None), white(kind, 200_000)
    for bits, rival in ((0.5, EDEN(1)), (1.0, EDEN(1)), (2.0, EDEN(2))):
        frame, _ = rival.encode(Update(vector, layout), {}, KEY)
        others = (1.0 + error(rival.decode(frame, layout), vector)) / min(bits, 1.0) - 1.0
        codec = Auto(bits)
        frame, _ = codec.encode(Update(vector, layout), {}, KEY)
        assert len(frame) <= codec.longest(layout)
        assert error(codec.decode(frame, layout), vector) <= 1.03 * others
        assert isinstance(codec.verify(frame, layout, KEY).tensors[0].values, Levels if bits == 2.0 else wire.SignScale)


@pytest.mark.long
def test_what_is_sent_does_not_choose_between_levels_and_signs() -> None:
    """Of this vector both are about as near, so that a trial decides once so and once so: the mean is the vector."""
    layout = Layout.of({"w": np.zeros((64, 64), np.float32)}, lambda *_: None)
    rng = np.random.default_rng(2)
    vector = (rng.normal(size=(64, 64)) * np.exp(SPREAD * rng.normal(size=64))).astype(np.float32).reshape(-1)
    codec, counts, total, squares = Auto(1.0), Counter[str](), np.zeros(4096), np.zeros(4096)
    for draw in range(1200):
        frame, _ = codec.encode(Update(vector, layout), {}, KEY.at(round=draw))
        bundle = codec.open(frame, layout)
        counts[type(bundle.tensors[0].values).__name__] += 1
        arrived = codec.decode(bundle, layout).astype(np.float64)
        total += arrived
        squares += (arrived - vector) ** 2
    assert min(counts[name] for name in ("Levels", "SignScale")) > 200
    assert float((np.abs(total / 1200 - vector) / (np.sqrt(squares) / 1200)).max()) < 5.0


SPREAD = 0.47


def test_signs_in_other_blocks_are_refused() -> None:
    layout, vector = Layout.flat(5000), white("normal", 5000)
    frame, _ = Auto(1.0).encode(Update(vector, layout), {}, KEY)
    bundle = Auto(1.0).open(frame, layout)
    values, seed = bundle.tensors[0].values, KEY.at(layer=0).u64()
    assert isinstance(values, wire.SignScale)
    for signs, block in ((values.k, 0), (3000, 1024), (values.k, 1000), (512, 512)):
        other = wire.SignScale(np.zeros(signs, bool), np.ones(-(-signs // block) if block else 1, np.float32), block)
        mutant = wire.encode([wire.seeded((5000,), seed, signs, other)], tlvs=bundle.tlvs)
        with pytest.raises(wire.SchemaMismatch, match="do not encode levels"):
            Auto(1.0).open(mutant, layout)
    with pytest.raises(wire.LimitExceeded, match="takes at most"):
        Auto(0.5).open(frame, layout)


def test_a_frame_is_that_of_its_key_and_of_one_form() -> None:
    layout, vector = spectrum("embedding")
    for codec, form in ((Auto(0.3), PART), (Auto(1.0), DITHERED), (Auto(0.3, feedback=True), ROUNDED)):
        frame, _ = codec.encode(Update(vector, layout), {}, KEY)
        assert codec.verify(frame, layout, KEY).tensors[0].values.head.form == form
        if form != ROUNDED:
            with pytest.raises(wire.SchemaMismatch, match="not that of this round"):
                codec.verify(frame, layout, KEY.at(round=9))
        with pytest.raises(wire.WireError):
            Auto(1.0, feedback=not codec.rounded).open(frame, layout)
        # A client may take fewer bits than it was told, not more.
        np.testing.assert_array_equal(dataclasses.replace(codec, bits=3.0).decode(frame, layout).any(), True)
        with pytest.raises(wire.LimitExceeded):
            dataclasses.replace(codec, bits=0.11).open(frame, layout)


def test_levels_without_shapes_are_not_values() -> None:
    layout, vector = spectrum("embedding")
    frame, _ = Auto(0.3).encode(Update(vector, layout), {}, KEY)
    tensor = wire.decode(frame).tensors[0]
    with pytest.raises(wire.SchemaMismatch, match="shapes of their matrices"):
        tensor.values.decode()


@pytest.mark.parametrize("feedback", [False, True])
def test_without_compiled_code_the_same_receiver_is_served(
    feedback: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout, vector = spectrum("network")
    codec = Auto(0.5, feedback=feedback)
    levels, _ = codec.encode(Update(vector, layout), {}, KEY)
    monkeypatch.setattr(contexts, "compiled", lambda: False)
    module._say_portable.cache_clear()
    with caplog.at_level(logging.WARNING, logger="flwr.fedcomp"):
        caplog.handler.setLevel(logging.WARNING)
        logging.getLogger("flwr.fedcomp").addHandler(caplog.handler)
        found = [codec.encode(Update(vector, layout), {}, KEY.at(round=r))[0] for r in range(40)]
        logging.getLogger("flwr.fedcomp").removeHandler(caplog.handler)
    assert len({r.message for r in caplog.records}) == 1
    assert "numba" in caplog.records[0].message
    assert all(len(frame) <= codec.longest(layout) + 40 for frame in found)
    monkeypatch.undo()
    arrived = np.array([codec.decode(frame, layout) for frame in found], np.float64)
    assert codec.norm(found[0], layout) == pytest.approx(np.linalg.norm(arrived[0]), rel=1e-6)
    if feedback:
        assert error(codec.decode(levels, layout), vector) < error(arrived[0].astype(np.float32), vector) < 0.9
    else:
        # The error of the mean of forty is a fortieth.
        assert error(arrived.mean(0).astype(np.float32), vector) < error(arrived[0].astype(np.float32), vector) / 25
    out = Update(np.zeros(layout.size, np.float32), layout)
    for frame in (levels, found[0]):
        codec.accumulate(frame, 0.5, out)
    np.testing.assert_allclose(out.vector, 0.5 * (codec.decode(levels, layout) + arrived[0]), rtol=1e-5, atol=1e-7)


def test_what_cannot_hold_is_refused() -> None:
    for codec in (Auto(), Domain(DCT(), Auto(2.0))):
        with pytest.raises(ConfigError, match="would grow without bound"):
            ErrorFeedback(codec)
    ErrorFeedback(Auto(feedback=True))
    for codec in (Auto(), Auto(feedback=True)):
        with pytest.raises(ConfigError, match="is not linear"):
            FixedPoint(codec, clip=1.0, levels=10)
        with pytest.raises(ConfigError, match="is not linear"):
            ModularSum(codec, clip=1.0, levels=10)
    for bits in (0.0, 17.0, math.nan):
        with pytest.raises(ConfigError):
            Auto(bits)


@pytest.mark.slow
def test_frames_do_not_depend_on_how_denormal_numbers_are_taken() -> None:
    """Spec 2: with numbers below 2**-126 flushed to zero, on the way in and out."""
    torch = pytest.importorskip("torch")
    layout, vector = spectrum("network")
    tiny = np.where(np.arange(layout.size) % 5 == 0, np.float32(1e-41), vector * np.float32(2.0**-90))

    def found() -> list[bytes]:
        both = []
        for codec in (Auto(0.4, feedback=True), Auto(0.4), Auto(1.0)):
            values, arrived = sent(codec, layout, tiny)
            both += [bytes(values.section), arrived.tobytes()]
        return both

    before = found()
    assert torch.set_flush_denormal(True)
    try:
        assert found() == before
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "bits"), [((20_000, 1), 0.05), ((20_000, 2), 0.1)])
def test_of_few_long_columns_every_draw_fits_the_budget_and_the_declared_error(
    shape: tuple[int, int], bits: float
) -> None:
    """A draw holds no column, or many more values than the part says: equal magnitudes cost the most."""
    layout, codec = Layout.of({"w": np.zeros(shape, np.float32)}, lambda *_: None), Auto(bits)
    given = Update(np.ones(layout.size, np.float32), layout)
    errors = []
    for number in range(40):
        key = KEY.at(round=number)
        frame, _ = codec.encode(given, {}, key)
        assert len(frame) <= codec.longest(layout)
        decoded = codec.decode(codec.verify(frame, layout, key), layout)
        errors.append(float(np.square(decoded.astype(np.float64) - given.vector).mean()))
    variance = codec.variance(layout)
    assert variance is not None
    assert np.mean(errors) <= variance


def test_a_row_of_which_no_column_is_drawn_arrives_as_zero_and_unbiased() -> None:
    """Biases of one and three values beside a matrix: in half of the frames no column of them travels."""
    layout = Layout(
        (
            TensorSpec("w", (100, 50), "float32", 0, 5000),
            TensorSpec("b", (1,), "float32", 5000, 1),
            TensorSpec("c", (3,), "float32", 5001, 3),
        )
    )
    rng = np.random.default_rng(2)
    scales = np.exp(1.5 * rng.normal(size=(100, 1)) + 1.5 * rng.normal(size=(1, 50)))
    x = np.append((scales * rng.normal(size=(100, 50))).reshape(-1), [4.0, -3.0, 5.0, 2.0]).astype(np.float32)
    codec, sums, without = Auto(0.5), np.zeros(x.size), 0
    for number in range(300):
        key = Key(3, "uplink", number, 1)
        frame, _ = codec.encode(Update(x, layout), {}, key)
        bundle = codec.verify(frame, layout, key)
        decoded = codec.decode(bundle, layout)
        codec.norm(bundle, layout)
        added = Update(np.full(x.size, 1.0, np.float32), layout)
        codec.accumulate(frame, 1.0, added)
        np.testing.assert_allclose(added.vector - 1.0, decoded, atol=1e-4)
        without += not decoded[5000:].all()
        sums += decoded
    assert without > 100, "or this test shows nothing"
    spread = np.abs(sums / 300 - x)[5000:]
    assert (spread < 5.0 * np.sqrt(2.0 * 25.0 / 300)).all()
