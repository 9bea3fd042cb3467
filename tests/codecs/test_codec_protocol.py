"""What every registered codec promises, checked for each of them; a codec without an example here does not pass."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy as np
import pytest
from codec_examples import EMPTY, EXAMPLES, LAYOUTS, WIDE, measured, structured, update
from frame_mutants import seal
from naive_frames import inmost

import fedcomp.codecs
from fedcomp import wire
from fedcomp.codecs import (
    EDEN,
    Clip,
    Codec,
    Factors,
    GradiVeQ,
    ModularSum,
    PositionalCodec,
    TopK,
    chain,
    get_codec,
    known,
)
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.kernels import tiers
from fedcomp.layout import Layout, TablePolicy, Update
from fedcomp.privacy.bounded import BoundedFixedPoint
from fedcomp.privacy.votes import TopkSign
from fedcomp.rng import Key

KEY = Key(11, "codec", round=2, partition=3)
NAMES = {name: getattr(fedcomp.codecs, name) for name in vars(fedcomp.codecs) if not name.startswith("_")} | {
    "ErrorFeedback": ErrorFeedback,
    "BoundedFixedPoint": BoundedFixedPoint,
    "TopkSign": TopkSign,
}


TURNED = ("Domain", "EDEN", "FFT", "Factors", "RandomProjection")
"""Codecs whose coordinates are not those of the update: what they deliver is dense."""


NOT_AS_GIVEN = ("chain(Clip", "momentum", "nesterov", "FixedPoint", "ModularSum", "TopkSign")
"""In the names of codecs whose dense rest is not what was given to them."""

_LOSSY = {"low-rank": "model"}
"""By id: the layout of which a codec loses something, where a vector is not one."""


def _snapshot(state: dict) -> dict:
    return {name: array.copy() for name, array in state.items()}


def _assert_same_state(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_every_known_codec_has_an_example() -> None:
    inner = {c.codec.codec_id for c in EXAMPLES if hasattr(c, "codec")}
    assert {c.codec_id for c in EXAMPLES} | inner >= set(known())


@pytest.mark.slow
def test_configuration_is_faithful(codec: Codec) -> None:
    """from_config(get_config()), a JSON round trip and eval(repr) all give an equal codec; hashes agree."""
    assert type(codec).from_config(codec.get_config()) == codec
    again = get_codec(json.loads(json.dumps(codec.to_config())))
    assert again == codec
    assert hash(again) == hash(codec)
    assert eval(repr(codec), NAMES) == codec
    assert sum(codec == other for other in EXAMPLES) == 1


@pytest.mark.slow
def test_decoding_is_deterministic_and_complete(codec: Codec) -> None:
    """Spec 7.1.3: same input, state and key give the same bytes; the dense rest arrives bit for bit. Shapes are the
    layout's, never the frame's; their sizes add up to the vector."""
    for layout in LAYOUTS.values():
        assert sum(e.size for e in codec.schema(layout)) == layout.size
        assert all(e.name == "" for e in codec.schema(layout))
        given = update(layout)
        before = given.vector.copy()
        state = codec.init(layout)
        kept = _snapshot(state)
        frame, after = codec.encode(given, state, KEY)
        assert isinstance(frame, bytes)
        np.testing.assert_array_equal(given.vector, before)
        _assert_same_state(state, kept)
        assert codec.encode(given, state, KEY)[0] == frame
        decoded = codec.decode(frame, layout)
        assert decoded.dtype == np.float32
        assert decoded.shape == (layout.size,)
        assert decoded.flags.writeable
        np.testing.assert_array_equal(decoded, codec.decode(codec.open(frame, layout), layout))
        # Of TopkSign everything votes: a number that travels has no bounded influence.
        if not any(word in repr(codec) for word in NOT_AS_GIVEN):
            rest = slice(layout.compressed_size, None)
            form = inmost(codec).rest_form
            # In eight bits a value may be off by half a level of the largest one.
            off = 0.0 if form.exact else 2.0**-7 * np.abs(given.vector[rest]).max(initial=0.0)
            np.testing.assert_allclose(decoded[rest], given.vector[rest], rtol=0, atol=off)
        for array in after.values():
            assert isinstance(array, np.ndarray)
            assert array.dtype != object
        # A norm is taken before the way back to the update's coordinates, which rounds.
        turned = any(word in repr(codec) for word in TURNED)
        length = np.linalg.norm(decoded.astype(np.float64))
        assert codec.norm(frame, layout) == pytest.approx(length, rel=1e-6 if turned else 1e-12)


@pytest.mark.slow
def test_a_preview_is_what_one_client_alone_delivers(codec: Codec) -> None:
    layout = LAYOUTS["flat"]
    given = update(layout)
    before = given.vector.copy()
    out = Update(np.full(layout.size, -0.0, np.float32), layout)
    codec.gather(codec.encode(given, codec.init(layout), KEY)[0], 1.0, out)
    codec.conclude(out)
    np.testing.assert_array_equal(codec.preview(given.vector, KEY), out.vector)
    np.testing.assert_array_equal(given.vector, before)


@pytest.mark.slow
def test_accumulate_is_weight_times_decode(codec: Codec) -> None:
    """Spec 7.1.3: bit equal to float32(weight) * decode, added in place to what is there."""
    for layout in LAYOUTS.values():
        frame, _ = codec.encode(update(layout), codec.init(layout), KEY)
        decoded = codec.decode(frame, layout)
        for weight in (1.0, -1.0, 0.1, 1 / 3):
            out = Update(update(layout, seed=5).vector, layout)
            expected = out.vector + np.float32(weight) * decoded
            codec.accumulate(frame, weight, out)
            np.testing.assert_array_equal(out.vector, expected)


@pytest.mark.slow
def test_bad_frames_leave_the_buffer_untouched(codec: Codec) -> None:
    """Every truncation, damaged byte and foreign frame raises WireError before the first element is added."""
    layout = LAYOUTS["model"]
    frame, _ = codec.encode(update(layout), codec.init(layout), KEY)
    rng = np.random.default_rng(0)
    bad = [frame[:end] for end in rng.integers(0, len(frame), 20)] + [frame + b"\0", b""]
    for at in rng.integers(0, len(frame), 10):
        flipped = bytearray(frame)
        flipped[at] ^= 1 << int(rng.integers(8))
        bad.append(bytes(flipped))
    small = Layout.flat(layout.size - 1)
    bad.append(codec.encode(update(small), codec.init(small), KEY)[0])
    out = update(layout, seed=9)
    before = out.vector.copy()
    for damaged in bad:
        with pytest.raises(wire.WireError):
            codec.accumulate(damaged, 1.0, out)
        np.testing.assert_array_equal(out.vector, before)


def _refused(codec: Codec, frame: bytes, layout: Layout) -> bool:
    """Whether ``frame`` raises WireError and nothing else; either way ``accumulate`` adds all of it or nothing."""
    out = update(layout, seed=9)
    before = out.vector.copy()
    try:
        codec.accumulate(frame, 0.5, out)
    except wire.WireError:
        assert out.vector.tobytes() == before.tobytes()
        with pytest.raises(wire.WireError):
            codec.decode(frame, layout)
        return True
    np.testing.assert_array_equal(out.vector, before + np.float32(0.5) * codec.decode(frame, layout))
    return False


@pytest.mark.slow
def test_sealed_mutants_are_refused_or_added_whole(codec: Codec) -> None:
    """Anyone can compute a checksum: flipped bits of header and sections, the last tensor's too, sealed again."""
    layout = LAYOUTS["model"]
    assert _refused_mutants(codec, codec.encode(update(layout), codec.init(layout), KEY)[0], layout) >= 40


def test_sealed_mutants_of_slopes_and_inputs_are_refused_or_added_whole() -> None:
    """Factors of an update that is known as slopes times signs: their frames have another form, and a seed."""
    codec, layout = Factors(mode="dad", i_know_inputs_are_visible=True), LAYOUTS["model"]
    given = measured(layout, KEY)
    frame, _ = codec.encode(given, codec.init(layout), KEY)
    assert wire.decode(frame).tlv(wire.SEED) == KEY.u64().to_bytes(8, "little")
    np.testing.assert_array_equal(codec.decode(frame, layout), given.vector)
    assert _refused_mutants(codec, frame, layout) >= 40


def _refused_mutants(codec: Codec, frame: bytes, layout: Layout) -> int:
    """Return how many of a hundred are refused."""
    head = int.from_bytes(frame[12:16], "little")
    rng = np.random.default_rng(1)
    places = [
        *rng.integers(0, head, 60),
        *rng.integers(head, len(frame) - 4, 20),
        *rng.integers(len(frame) - 200, len(frame) - 4, 20),
    ]
    refused = 0
    for at in places:
        body = bytearray(frame[:-4])
        body[at] ^= 1 << int(rng.integers(8))
        with np.errstate(over="ignore"):  # a flipped exponent bit is a huge, but finite value
            refused += _refused(codec, seal(bytes(body)), layout)
    return refused


def _tensors(frame: bytes) -> list[wire.Tensor]:
    return list(wire.decode(frame).tensors)


def _instead(frame: bytes, tensors: list[wire.Tensor]) -> bytes:
    """A frame with the optional fields of ``frame`` and other tensors."""
    return wire.encode(tensors, tlvs=wire.decode(frame).tlvs)


@pytest.mark.slow
def test_every_other_dense_rest_is_refused_before_the_first_stretch_is_added(codec: Codec) -> None:
    """The last tensor as coefficients, on a shared support, sparse, in another format or another dtype."""
    layout = LAYOUTS["model"]
    frame, _ = codec.encode(update(layout), codec.init(layout), KEY)
    tensors = _tensors(frame)
    n = tensors[-1].size
    ones = wire.Raw(np.ones(n, np.float32))
    wrong = [wire.Tensor(wire.Raw(np.full(k, 7, np.float32)), (n,), kind=wire.COEFFICIENTS) for k in (1, 2, n)]
    wrong += [wire.shared((n,), 5, wire.Raw(np.ones(k, np.float32))) for k in (1, n)]
    wrong += [
        wire.sparse((n,), np.arange(n), ones),
        wire.Tensor(wire.Bf16(np.ones(n, np.float32)), (n,)),
        wire.dense(np.ones(n)),
        wire.dense(np.ones(n, np.int32)),
        wire.dense(np.full(n, np.nan, np.float32)),
        wire.dense(np.ones((1, n), np.float32)),
        wire.dense(np.ones(n + 1, np.float32)),
    ]
    for tensor in wrong:
        own = tensor.kind is wire.DENSE and type(tensor.values) is type(tensors[-1].values)
        if not own or tensor.dtype != "float32" or tensor.shape != (n,) or tensor.values.count_non_finite():
            assert _refused(codec, _instead(frame, [*tensors[:-1], tensor]), layout)
    for other in ([], tensors[:-1], [*tensors, tensors[-1]]):
        assert _refused(codec, _instead(frame, other), layout)


@pytest.mark.slow
def test_frames_of_other_codecs_are_refused(codec: Codec) -> None:
    """A codec takes the kind, value format, index codec and number of values it makes and no other; shapes agree."""
    layout = LAYOUTS["flat"]
    frame, _ = codec.encode(update(layout), codec.init(layout), KEY)
    own, *more_of_it = _tensors(frame)
    assert not _refused(codec, _instead(frame, [own, *more_of_it]), layout)
    n = own.size
    k = own.values.k
    one = wire.Raw(np.ones(1, np.float32))
    own_raw, full = wire.Raw(np.ones(k, np.float32)), wire.Raw(np.ones(n, np.float32))
    listed = wire.sparse((n,), np.arange(k), own_raw)
    seeded = wire.seeded((n,), 3, k, own_raw)
    others = [
        wire.dense(np.full(n, np.nan, np.float32)),
        wire.sparse((n,), np.array([5]), wire.Natural(np.zeros(1, np.uint16))),
        *(wire.Tensor(values, (n,), kind=wire.COEFFICIENTS) for values in (one, own_raw, full, own.values)),
        *(wire.shared((n,), 5, values) for values in (one, own_raw, full, own.values)),
    ]
    if own.kind is wire.COEFFICIENTS:
        # Its own, with other numbers.
        others = [tensor for tensor in others if tensor.kind is not wire.COEFFICIENTS or tensor.values.k != k]
    elif own.kind is wire.DENSE:
        others += [listed, seeded, wire.sparse((n,), np.arange(n), own.values)]
        foreign = wire.Ternary if isinstance(own.values, wire.SignScale) else wire.SignScale
        others.append(wire.Tensor(foreign.quantise(np.ones(n, np.float32)), (n,)))
    else:
        assert k < n or codec == TopK(1.0)
        others += [wire.dense(np.ones(n, np.float32)), wire.Tensor(wire.Natural.quantise(np.ones(n)), (n,))]
        others.append(wire.Tensor(wire.Ternary.quantise(np.ones(k)), (n,), kind=wire.SPARSE, indices=np.arange(k)))
        others.append(listed if isinstance(own.index, wire.Seeded) else seeded)
        most = codec.schema(layout)[0].most_values  # k, or more where the rounds differ
        if most < n:
            more = wire.Raw(np.ones(most + 1, np.float32))
            make = getattr(type(own.values), "quantise", type(own.values))
            if isinstance(own.values, wire.Uniform | wire.RangeFloat):
                make = partial(make, bits=own.values.bits)
            if isinstance(own.values, wire.QsgdLevels):
                make = partial(wire.QsgdLevels.nearest, s=own.values.s, bucket=own.values.bucket)
            if isinstance(own.values, wire.Residues):
                make = partial(wire.Residues, modulus=own.values.modulus, step=own.values.step)
            own_form = make(np.ones(most + 1, np.float32))
            others += [wire.sparse((n,), np.arange(most + 1), own_form), wire.seeded((n,), 3, most + 1, more)]
    for tensor in others:
        assert _refused(codec, _instead(frame, [tensor, *more_of_it]), layout), tensor
    assert _refused(codec, _instead(frame, []), layout)


@pytest.mark.slow
def test_bundles_opened_for_others_are_refused(codec: Codec) -> None:
    layout = LAYOUTS["model"]
    for tensors in ([], [wire.dense(np.ones(3, np.float32))], [wire.dense(np.ones(layout.size))]):
        bundle = wire.decode(wire.encode(tensors))
        out = update(layout)
        before = out.vector.copy()
        with pytest.raises(wire.SchemaMismatch, match="bundle"):
            codec.accumulate(bundle, 1.0, out)
        np.testing.assert_array_equal(out.vector, before)


def _random_values(rng: np.random.Generator, k: int) -> wire.Values:
    x = rng.normal(size=k).astype(np.float32)
    makers = (
        lambda: wire.Raw(x),
        lambda: wire.Fp16(x),
        lambda: wire.Bf16(x),
        lambda: wire.Uniform.quantise(x, 4, int(rng.choice([0, 16]))),
        lambda: wire.SignScale.quantise(x, 0),
        lambda: wire.Ternary.quantise(x),
        lambda: wire.QsgdLevels(rng.integers(-1, 2, k), 7, 64, np.ones(-(-k // 64), np.float32)),
        lambda: wire.Natural.quantise(x),
    )
    # Half of them in the formats codecs use, so that not every frame falls at the first hurdle.
    return makers[int(rng.integers(len(makers)) if rng.random() < 0.5 else rng.choice([0, 0, 0, 1, 2, 6]))]()


def _random_tensor(rng: np.random.Generator, n: int, honest: wire.Tensor, share: float) -> wire.Tensor:
    """A well-formed tensor of n elements: any kind, value format, index codec and number of values."""
    if rng.random() < share:
        return honest
    kind = wire.Kind(int(rng.integers(4)))
    k = n if kind is wire.DENSE else min(n, int(rng.choice([0, 1, 2, n // 2, n, honest.values.k])))
    values = _random_values(rng, k)
    if kind is wire.SHARED:
        return wire.shared((n,), 5, values)
    if kind is not wire.SPARSE:
        return wire.Tensor(values, (n,), kind=kind)
    if rng.random() < 0.3:
        return wire.seeded((n,), int(rng.integers(99)), k, values)
    index = str(rng.choice(["auto", *wire.PLAIN, "complement:rice"]))
    return wire.sparse((n,), np.sort(rng.choice(n, k, replace=False)), values, index=index)


FUZZED = {repr(c): c for c in EXAMPLES if c.codec_id not in ("chain", "feedback")} | {
    "wrapped": chain(Clip(2.0), ErrorFeedback(TopK(0.1)))
}


@pytest.mark.slow
@pytest.mark.parametrize("codec", FUZZED.values(), ids=FUZZED)
def test_structured_random_frames(codec: Codec) -> None:
    """Frames that decode, of any kind and format: each is of the codec's own form, or refused without a trace."""
    layout = LAYOUTS["model"]
    rng = np.random.default_rng(7)
    frame, _ = codec.encode(update(layout), codec.init(layout), KEY)
    honest = _tensors(frame)
    own = [(t.kind, type(t.values), isinstance(t.index, wire.Seeded)) for t in honest]
    # Of many tensors more are honest, so that some frames are throughout.
    share = max(0.3, 0.02 ** (1 / len(honest)))
    refused = 0
    for _ in range(120):
        tensors = [_random_tensor(rng, t.size, t, share) for t in honest]
        if _refused(codec, _instead(frame, tensors), layout):
            refused += 1
        else:
            # Of factors every tensor travels in one of several forms.
            if "Factors" not in repr(codec):
                assert [(t.kind, type(t.values), isinstance(t.index, wire.Seeded)) for t in tensors] == own
            assert all(t.values.k <= e.most_values for t, e in zip(tensors, codec.schema(layout), strict=True))
    assert 40 < refused < 120


@pytest.mark.slow
def test_a_zero_update_is_a_valid_empty_frame(codec: Codec) -> None:
    """Spec 7.1.9: it lists nothing and decodes to +0.0; nothing is remembered of it. Also of a tensor without elements,
    and of one that takes the compiled kernels."""
    # A dither that is taken off again leaves half a step, of zero as of any other value.
    dithered = codec if isinstance(codec, ModularSum) else getattr(codec, "codec", None)
    for layout in (*LAYOUTS.values(), EMPTY, Layout.flat(tiers.SMALL)):
        zero = Update(np.zeros(layout.size, np.float32), layout)
        frame, state = codec.encode(zero, codec.init(layout), KEY)
        decoded = codec.decode(frame, layout)
        assert all(np.isfinite(array).all() for array in state.values())
        if isinstance(dithered, ModularSum):
            assert np.abs(decoded).max(initial=0.0) <= dithered.step / 2
            continue
        assert not decoded.any()
        assert not np.signbit(decoded).any(), "a zero with a sign"
        for tensor in codec.open(frame, layout).tensors:
            if tensor.kind is wire.SPARSE and not isinstance(tensor.index, wire.Seeded):
                assert tensor.values.k == 0, "zeros travel"
        assert codec.residual(state) is None or not codec.residual(state).any()


def test_a_density_that_the_policy_sets_is_honoured_or_refused(codec: Codec) -> None:
    """By what a receiver expects; where everything travels as it is there is none."""
    layouts = [Layout.of({"w": np.zeros((30, 40))}, TablePolicy({"w": density})) for density in (0.1, 0.4)]
    try:
        few, more = (codec.schema(layout) for layout in layouts)
    except ConfigError:
        return
    assert few != more or all(e.kinds == {wire.DENSE} and e.value_codecs == {"raw"} for e in few)


@pytest.mark.slow
def test_lossless_means_bit_equal(codec: Codec) -> None:
    for layout in LAYOUTS.values():
        given = update(layout)
        given.vector[::7] = -0.0
        frame, _ = codec.encode(given, codec.init(layout), KEY)
        same = codec.decode(frame, layout).tobytes() == given.vector.tobytes()
        if codec.lossless:
            assert same
        # Of factors a vector has none: it travels whole.
        elif layout is LAYOUTS[_LOSSY.get(inmost(codec).codec_id, "flat")] and "TopK(density=1.0" not in repr(codec):
            assert not same, f"{codec!r} lost nothing of a generic vector; does it not declare lossless?"


@pytest.mark.long
def test_an_update_that_is_given_makes_the_same_frames_and_states(codec: Codec) -> None:
    """A codec may write to it, and to nothing else; the state that came before stays whole."""
    for layout in LAYOUTS.values():
        state = codec.init(layout)
        for number in range(3):
            key, sent = Key(3, "uplink", number + 1), update(layout, number)
            frame, expected = codec.encode(sent, state, key)
            kept = _snapshot(state)
            again, found = codec.encode(Update(sent.vector.copy(), layout, sent.outer, given=True), state, key)
            assert frame == again
            _assert_same_state(found, expected)
            _assert_same_state(state, kept)
            state = found


def test_a_sum_that_overflows_is_not_the_fault_of_the_update_that_was_given() -> None:
    layout, codec = Layout.flat(300), ErrorFeedback(TopK(density=0.01))
    large = np.full(300, 3e38, np.float32)
    _, state = codec.encode(Update(large, layout), codec.init(layout), KEY)
    kept = _snapshot(state)
    with pytest.raises(NonFiniteUpdate, match="update plus memory"):
        codec.encode(Update(large, layout, given=True), state, KEY)
    _assert_same_state(state, kept)


@pytest.mark.slow
def test_linear_means_frames_commute_with_addition(codec: Codec) -> None:
    """Spec 7.1.5 for one key: decode(x) + decode(y) == decode(x + y); up to rounding of sums."""
    layout = LAYOUTS["model"]
    rng = np.random.default_rng(3)
    x, y = (rng.integers(-(2**10), 2**10, layout.size).astype(np.float32) for _ in range(2))

    def through(vector: np.ndarray) -> np.ndarray:
        return codec.decode(codec.encode(Update(vector, layout), codec.init(layout), KEY)[0], layout)

    holds = np.allclose(through(x) + through(y), through(x + y), rtol=1e-6, atol=0.01)
    if codec.linear:
        assert holds
    elif not codec.lossless and not any(
        word in repr(codec) for word in ("density=1.0", "RandomK", "RandomBlock", "Projection")
    ):
        assert not holds, f"{codec!r} acts linearly on random vectors; it should say so"


def _relative_error(codec: Codec, given: Update, key: Key) -> float:
    frame, _ = codec.encode(given, codec.init(given.layout), key)
    difference = codec.decode(frame, given.layout).astype(np.float64) - given.vector
    return float(difference @ difference) / float(given.vector.astype(np.float64) @ given.vector)


FLOOR = 2.0**-125
"""What a coordinate may lose, or gain, where values are too small for float32's normal range."""

_DRAWS = ("randomk", "randomblock", "dithering", "eden", "lowrank", "projection", "factors")
"""In the names of codecs whose contraction is one on average over the draw."""


def _declares(codec: Codec) -> bool:
    layouts = (*LAYOUTS.values(), WIDE)
    return codec.never_enlarges or any(codec.contraction(t) or codec.variance(t) is not None for t in layouts)


UNBIASED = pytest.mark.parametrize("codec", [c for c in EXAMPLES if c.unbiased], ids=repr)


def _energy(vector: np.ndarray) -> float:
    return float(np.square(vector.astype(np.float64)).sum())


def _decoded(codec: Codec, given: Update, key: Key) -> np.ndarray | None:
    """Return what arrives, which is finite; None of an update that is refused, as too large for float32."""
    try:
        frame, _ = codec.encode(given, codec.init(given.layout), key)
    except NonFiniteUpdate:
        assert np.abs(given.vector).max() > 1e30
        return None
    decoded = codec.decode(frame, given.layout)
    assert np.isfinite(decoded).all()
    return decoded


@pytest.mark.slow
@pytest.mark.parametrize("codec", [c for c in EXAMPLES if _declares(c)], ids=repr)
@pytest.mark.parametrize(
    "layouts", [[WIDE], pytest.param(LAYOUTS.values(), marks=pytest.mark.long)], ids=["wide", "all"]
)
def test_declarations_hold_for_structured_updates(codec: Codec, layouts: list[Layout]) -> None:
    """Contraction, variance and length, of vectors that no random draw gives."""
    for layout in layouts:
        contraction, variance = codec.contraction(layout), codec.variance(layout)
        bound = 1.0 - contraction if contraction is not None else variance
        draws = 16 if variance or any(word in repr(codec).lower().replace("-", "") for word in _DRAWS) else 2
        for kind, vector in structured(layout).items():
            given, length = Update(vector, layout), math.sqrt(_energy(vector))
            if not length:
                continue
            arrived = [_decoded(codec, given, KEY.at(round=r)) for r in range(draws)]
            found = [each for each in arrived if each is not None]
            floor = FLOOR * math.sqrt(layout.size)
            if codec.never_enlarges:
                longest = max((math.sqrt(_energy(each)) for each in found), default=0.0)
                assert longest <= (1.0 + 2.0**-22) * length + floor, kind
            if bound is None or not found:
                continue
            errors = [(math.sqrt(_energy(each.astype(np.float64) - vector)) / length) ** 2 for each in found]
            spread = max(float(np.std(errors)), math.sqrt(bound * abs(1.0 - bound))) if draws > 2 else 0.0
            assert np.mean(errors) <= bound + 5.0 * spread / math.sqrt(draws) + 1e-6 + (floor / length) ** 2, kind


def _inputs(layout: Layout) -> list[Update]:
    """A heavy-tailed vector, equal magnitudes (the worst case of top-k) and a single spike."""
    equal = np.where(np.arange(layout.size) % 3 == 0, -1.0, 1.0).astype(np.float32)
    spike = np.full(layout.size, 1e-3, np.float32)
    spike[layout.size // 2] = 10.0
    return [update(layout), *(Update(v, layout) for v in (equal, spike))]


def _draws(layout: Layout) -> int:
    """Return how often to draw: what is declared is one formula for all layouts, which many draws test on one."""
    return 100 if layout is LAYOUTS["flat"] else 24


@pytest.mark.slow
def test_declared_contraction_and_variance_hold(codec: Codec) -> None:
    """E‖C(x) - x‖² <= (1 - δ)‖x‖²: for every draw of a deterministic codec, on average for a random one; <= ω‖x‖² of
    unbiased codecs, which alone declare it (spec 7.2)."""
    for layout in LAYOUTS.values():
        contraction, variance = codec.contraction(layout), codec.variance(layout)
        assert contraction is None or 0.0 < contraction <= 1.0
        assert (variance is None) == (not codec.unbiased)
        if contraction is None and variance is None:
            continue
        random = codec.unbiased or codec.codec_id in ("randomk", "randomblock", "eden", "low-rank", "projection")
        for given in _inputs(layout):
            errors = [_relative_error(codec, given, KEY.at(round=r)) for r in range(_draws(layout) if random else 1)]
            found = np.mean(errors) - 5.0 * np.std(errors) / math.sqrt(len(errors))
            assert contraction is None or found <= 1.0 - contraction + 1e-6
            assert variance is None or found <= variance + 1e-12


@pytest.mark.slow
@UNBIASED
def test_declared_unbiasedness_holds(codec: Codec) -> None:
    """Spec 7.2: the mean of R = 4000 draws lies within five standard errors of x at every coordinate."""
    # Every frame draws for 40 copies of each coordinate: a fortieth of the frames, and as many draws.
    copies = 40
    once = update(Layout.flat(60), scale=0.1).vector
    layout = Layout.flat(60 * copies)
    given = Update(np.tile(once, copies), layout)
    frames = 1 if codec.lossless else 100
    total, squares = np.zeros(60), np.zeros(60)
    for r in range(frames):
        frame, _ = codec.encode(given, {}, KEY.at(round=r))
        decoded = codec.decode(frame, layout).astype(np.float64).reshape(copies, 60)
        total += decoded.sum(0)
        squares += (decoded**2).sum(0)
    draws = frames * copies
    mean = total / draws
    deviation = np.sqrt(np.maximum(squares / draws - mean**2, 0.0) / draws)
    assert (np.abs(mean - once) <= 5.0 * deviation + 1e-6 * np.abs(once)).all()


@pytest.mark.slow
@UNBIASED
def test_declared_unbiasedness_holds_for_structured_updates(codec: Codec) -> None:
    """The mean of R draws is within four times √(ω/R) of the vector; EDEN's rotation leaves what its page says."""
    layout = Layout.flat(192)
    variance, draws = codec.variance(layout), 60
    assert variance is not None
    bias = {1: 0.4, 2: 0.3, 3: 0.15, 4: 0.1}[codec.bits] if isinstance(codec, EDEN) else 0.0
    for kind, vector in structured(layout).items():
        given, length = Update(vector, layout), math.sqrt(_energy(vector))
        found = [_decoded(codec, given, KEY.at(round=r)) for r in range(draws if length else 0)]
        if any(each is None for each in found) or not found:
            continue
        mean = np.mean(np.asarray(found, np.float64), axis=0)
        off = math.sqrt(_energy(mean - vector)) - FLOOR * math.sqrt(layout.size)
        assert off <= (bias + 4.0 * math.sqrt(variance / draws) + 1e-6) * length, kind


def _growth(codec: Codec, layout: Layout) -> float:
    """Return the largest ‖decode(encode(x))‖ / ‖x‖ found, with vectors that lengthen whatever can be lengthened."""
    alone = np.zeros(layout.size, np.float32)
    alone[layout.size // 3] = 4.0 + 3.0 * 2.0**-7 + 3.0 * 2.0**-10  # bf16 and fp16 both round it up
    # The largest of all, and others that are nearer to the next of 7 or 127 levels above.
    levels = np.zeros(layout.size, np.float32)
    levels[-40:] = np.where(np.arange(40) == 7, 1.0, 100.6 / 127.0)[-layout.size :]
    most = [Update(vector, layout) for vector in (levels, levels[::-1].copy(), alone)]
    found = 0.0
    for given in (*_inputs(layout), *most, update(layout, scale=1e-3)):
        length = np.linalg.norm(given.vector.astype(np.float64))
        state = codec.init(layout)
        for r in range(5 if state else 2):
            frame, state = codec.encode(given, state, KEY.at(round=r))
            out = Update(codec.decode(frame, layout), layout)
            codec.conclude(out)
            found = max(found, float(np.linalg.norm(out.vector.astype(np.float64)) / length))
    if inmost(codec).linear:
        # What a linear map enlarges the most is what it makes of a vector again and again.
        vector = update(layout).vector
        for _ in range(20):
            length = np.linalg.norm(vector.astype(np.float64))
            vector = (vector / np.float32(length)).astype(np.float32)
            vector = codec.decode(codec.encode(Update(vector, layout), codec.init(layout), KEY)[0], layout)
            found = max(found, float(np.linalg.norm(vector.astype(np.float64))))
    return found


@pytest.mark.slow
def test_a2_a_codec_never_enlarges_an_update_exactly_where_it_says_so(codec: Codec) -> None:
    """A clip before the codec holds after it, in any round; with memory, rounding or scaling some update grows."""
    layouts = LAYOUTS.values() if codec.never_enlarges else (LAYOUTS["model"], LAYOUTS["flat"])
    growth = max(_growth(codec, layout) for layout in layouts)
    if isinstance(codec, GradiVeQ):
        # Without others nothing is in a basis; what is, in test_gradiveq.py.
        growth = max(growth, 1.0 if codec.never_enlarges else 2.0)
    assert codec.never_enlarges == (growth <= 1.0 + 2.0**-22), growth


@pytest.mark.slow
def test_support_is_what_travelled(codec: Codec) -> None:
    layout = LAYOUTS["model"]
    frame, _ = codec.encode(update(layout), codec.init(layout), KEY)
    support = codec.support(frame, layout)
    assert (np.diff(support) > 0).all()
    listed = any(tensor.kind is wire.SPARSE for tensor in codec.open(frame, layout).tensors)
    if listed and not any(word in repr(codec) for word in TURNED):
        decoded = codec.decode(frame, layout)
        decoded[support] = 0.0
        assert not decoded[: layout.compressed_size].any()
        assert support.size > 0
    else:
        assert support.size == 0


def test_rollback_of_a_codec_without_memory_changes_nothing() -> None:
    layout = LAYOUTS["model"]
    for codec in EXAMPLES:
        if isinstance(codec, PositionalCodec) and not codec.remembers:
            frame, state = codec.encode(update(layout), codec.init(layout), KEY)
            _assert_same_state(codec.rollback(state, frame, layout), state)


@pytest.mark.slow
def test_numbers_too_small_for_float32_end_nothing_and_change_no_bit(codec: Codec) -> None:
    """An application may have numpy raise at everything, to find faults of its own; to underflow is none."""
    layout = LAYOUTS["model"]
    rng = np.random.default_rng(3)
    spread = rng.standard_normal(layout.size) * 10.0 ** rng.integers(-44, 20, layout.size)
    for given in (spread, np.full(layout.size, 1e-42), spread * 1e-30):
        vector, found = Update(given.astype(np.float32), layout), []
        for under in ("ignore", "raise"):
            with np.errstate(all="raise", under=under):
                frame, state = codec.encode(vector, codec.init(layout), KEY)
                second, _ = codec.encode(vector, state, KEY)
                out = Update(np.full(layout.size, -0.0, np.float32), layout)
                codec.gather(second, 0.3, out)
                codec.conclude(out)
                decoded = codec.decode(frame, layout)
                found.append((frame, second, decoded.tobytes(), out.vector.tobytes(), codec.norm(frame, layout)))
        assert found[0] == found[1]
