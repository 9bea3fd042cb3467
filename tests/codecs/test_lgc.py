"""LGC as a codec: latents on a support, innovations, what a frame may hold, and the memory (test list B7, B4)."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from fedcomp import wire
from fedcomp.codecs import LGC, ErrorFeedback, ScaleCom, TopK, get_codec
from fedcomp.codecs.autoencoder import ConvDecoder, ConvEncoder, IdentityDecoder, IdentityEncoder, latents
from fedcomp.codecs.lgc import LatentSupport, NodeEstimate, scale_of, side_of
from fedcomp.codecs.scalecom import support_frame
from fedcomp.errors import ConfigError, NonFiniteUpdate, StateError
from fedcomp.layout import Layout, TablePolicy, Update
from fedcomp.rng import Key

KEY = Key(3, "uplink", 5, 2)
LAYOUT = Layout.of(
    {
        "conv": np.zeros((30, 40), np.float32),
        "deep": np.zeros((25, 40), np.float32),
        "out": np.zeros((20, 30), np.float32),
        "bias": np.zeros(7, np.float32),
    }
)
CODED, SIZE = 2200, LAYOUT.size
ENCODER, DECODER = ConvEncoder.draw(Key(1, "a")), ConvDecoder.draw(Key(1, "a"))


def codec(**options) -> LGC:
    return LGC(**{"density": 0.05, "innovation": 0.004, "encoder": ENCODER.id, **options})


def drawn(seed: int = 0, scale: float = 1.0) -> Update:
    return Update((scale * Key(seed, "update").generator().normal(size=SIZE)).astype(np.float32), LAYOUT)


def waiting(own: LGC, update: Update) -> dict:
    return own.begin(update, own.init(LAYOUT), KEY)


def delivered(state: dict) -> np.ndarray:
    return TopK(1.0, "layer").decode(state["delivered"].tobytes(), LAYOUT)


# Frames.


def test_a_frame_holds_latents_of_the_coded_tensors_values_of_the_others_and_the_rest() -> None:
    own = codec()
    supports = own.choose(waiting(own, drawn()), LAYOUT, KEY)
    fixed = own.latents_on(supports, 9, LAYOUT, ENCODER, DECODER)
    frame, _ = fixed.encode(drawn(), {}, KEY)
    bundle = fixed.open(frame, LAYOUT)
    where = own.coded_support(supports, LAYOUT)
    assert where.size == 60 + 50
    assert [t.values.k for t in bundle.tensors] == [4 * 7, 30, 7]
    np.testing.assert_array_equal(bundle.tensors[0].values.decode(), ENCODER.encode(drawn().vector[where]))
    found = fixed.decode(frame, LAYOUT)
    wanted = np.zeros(SIZE, np.float32)
    wanted[where] = DECODER.decode(ENCODER.encode(drawn().vector[where]), where.size)
    last = supports[2] + CODED
    wanted[last], wanted[2800:] = drawn().vector[last], drawn().vector[2800:]
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(fixed.support(frame, LAYOUT), np.flatnonzero(wanted[:2800]))


@pytest.mark.parametrize("values", ["float32", "bf16", "q8", "q4"])
def test_latents_are_added_before_they_are_decoded(values: str) -> None:
    """Shared scale: D(Σ wᵢ zᵢ), not Σ wᵢ D(zᵢ); values of the others and the rest are weighted sums."""
    own = codec(values=values, scale=2.0)
    supports = own.choose(waiting(own, drawn()), LAYOUT, KEY)
    fixed = own.latents_on(supports, 9, LAYOUT, ENCODER, DECODER)
    total, mixed, singly = Update(np.zeros(SIZE, np.float32), LAYOUT), 0.0, 0.0
    for client, weight in ((1, 0.25), (2, 0.5), (3, 0.25)):
        frame, _ = fixed.encode(drawn(client), {}, KEY)
        fixed.gather(frame, weight, total)
        mixed = mixed + np.float32(weight) * fixed.open(frame, LAYOUT).tensors[0].values.decode()
        singly = singly + weight * fixed.decode(frame, LAYOUT).astype(np.float64)
    fixed.conclude(total)
    where = own.coded_support(supports, LAYOUT)
    np.testing.assert_allclose(total.vector[where], 2.0 * DECODER.decode(mixed, where.size), rtol=1e-6)
    np.testing.assert_allclose(total.vector[CODED:], singly[CODED:], rtol=1e-4, atol=1e-6)
    assert np.abs(total.vector[where] - singly[where]).max() > 1e-6
    # An update that was not encoded joins by its latents.
    entered, plain = Update(drawn(4).vector.copy(), LAYOUT), Update(np.zeros(SIZE, np.float32), LAYOUT)
    fixed.enter(entered)
    if values == "float32":
        fixed.gather(fixed.encode(drawn(4), {}, KEY)[0], 1.0, plain)
        np.testing.assert_array_equal(entered.vector[:28], plain.vector[:28])
        assert not entered.vector[28:CODED].any()


def test_an_identity_makes_the_frames_of_a_fixed_support() -> None:
    """The same values in the same order, exactly linear, without an id and without a scale."""
    own = codec(encoder=1, scale=3.0)
    supports = own.choose(waiting(own, drawn()), LAYOUT, KEY)
    coded = own.latents_on(supports, 9, LAYOUT, IdentityEncoder(), None)
    plain = own.on(supports, 9)
    one, other = coded.encode(drawn(), {}, KEY)[0], plain.encode(drawn(), {}, KEY)[0]
    np.testing.assert_array_equal(coded.decode(one, LAYOUT), plain.decode(other, LAYOUT))
    assert coded.linear
    assert not own.latents_on(supports, 9, LAYOUT, ENCODER, DECODER).linear
    assert coded.norm(one, LAYOUT) == pytest.approx(plain.norm(other, LAYOUT), rel=1e-6)


def test_frames_of_another_encoder_form_or_number_are_refused() -> None:
    own = codec()
    supports = own.choose(waiting(own, drawn()), LAYOUT, KEY)
    fixed = own.latents_on(supports, 9, LAYOUT, ENCODER, DECODER)
    others = [
        own.latents_on(supports, 9, LAYOUT, ConvEncoder.draw(Key(2)), DECODER),
        own.latents_on(supports, 9, LAYOUT, IdentityEncoder(), None),
        replace(own, values="q8").latents_on(supports, 9, LAYOUT, ENCODER, DECODER),
        own.latents_on((supports[0][:-20], *supports[1:]), 9, LAYOUT, ENCODER, DECODER),
        own.latents_on(supports, 10, LAYOUT, ENCODER, DECODER),
        replace(own, raw=2).latents_on(supports, 9, LAYOUT, ENCODER, DECODER),
    ]
    for other in others:
        frame, _ = other.encode(drawn(), {}, KEY)
        with pytest.raises(wire.WireError):
            fixed.open(frame, LAYOUT)
        with pytest.raises(wire.WireError):
            fixed.open(other.open(frame, LAYOUT), LAYOUT)
    with pytest.raises(StateError, match="no decoder"):
        replace(fixed, decoder=None).decode(fixed.encode(drawn(), {}, KEY)[0], LAYOUT)
    with pytest.raises(StateError, match="not one of this model"):
        fixed.encode(Update(np.zeros(5000, np.float32), Layout.flat(5000)), {}, KEY)
    with pytest.raises(ConfigError):
        fixed.get_config()


def test_fewer_than_sixteen_values_travel_as_they_are() -> None:
    own = codec(density=0.005)
    supports = own.choose(waiting(own, drawn()), LAYOUT, KEY)
    fixed = own.latents_on(supports, 9, LAYOUT, ENCODER, DECODER)
    where = own.coded_support(supports, LAYOUT)
    assert where.size == 6 + 5
    found = fixed.decode(fixed.encode(drawn(), {}, KEY)[0], LAYOUT)
    np.testing.assert_array_equal(found[where], drawn().vector[where])
    assert own.shared_positions(supports, LAYOUT).size == 0
    sixteen = (supports[0], np.arange(10), supports[2])
    assert own.latents_on(sixteen, 9, LAYOUT, ENCODER, DECODER).encoder is ENCODER


def test_an_update_of_zeros_has_nothing_to_send() -> None:
    own, nothing = codec(), Update(np.zeros(SIZE, np.float32), LAYOUT)
    supports = own.choose(waiting(own, nothing), LAYOUT, KEY)
    assert sum(s.size for s in supports) == 0
    assert scale_of(np.zeros(0, np.float32)) == scale_of(np.zeros(5, np.float32)) == 1.0
    for send in (
        lambda: own.send_latents(waiting(own, nothing), supports, 9, LAYOUT, KEY, ENCODER, DECODER),
        lambda: codec(instance="server").send_innovation(waiting(own, nothing), supports, 9, LAYOUT, KEY),
    ):
        _, after = send()
        assert not after["memory"].any()


def test_values_far_above_the_scale_are_refused() -> None:
    own = codec(scale=1e-30)
    big = drawn(scale=1e30)
    supports = own.choose(waiting(own, big), LAYOUT, KEY)
    with pytest.raises(NonFiniteUpdate, match="overflow at scale"):
        own.send_latents(waiting(own, big), supports, 9, LAYOUT, KEY, ENCODER, DECODER)


@pytest.mark.parametrize(
    ("name", "size", "digest"),
    [
        ("latents", 366, "d068730323663c8a"),
        ("latents q8", 175, "dcef27595a5b35e1"),
        ("innovation", 298, "95f3f7992d60a8ea"),
        ("common latents", 173, "efe68d608f40e994"),
    ],
)
def test_golden_bytes(name: str, size: int, digest: str) -> None:
    own = codec(values="q8" if "q8" in name else "float32", scale=2.0)
    vector = ((np.arange(SIZE) * 7919) % 2003 - 1001).astype(np.float32) / np.float32(512)
    update = Update(vector, LAYOUT)
    supports = tuple(np.arange(0, stretch.size, 19) for stretch in own.leader.stretches(LAYOUT))
    # Weights of one value each: products and sums are the same on every machine.
    plain = ConvEncoder(tuple(np.full(a.shape, 1.0 / 1024, np.float32) for a in ENCODER.weights))
    frame = {
        "innovation": lambda: own.innovations(LAYOUT).encode(update, {}, KEY)[0],
        "common latents": lambda: own.latents_frame(vector[own.coded_support(supports, LAYOUT)], plain),
    }.get(name, lambda: own.latents_on(supports, 9, LAYOUT, plain, None).encode(update, {}, KEY)[0])()
    assert (len(frame), hashlib.sha256(frame).hexdigest()[:16]) == (size, digest)


# The memory.


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("ef", ["mask", "decoded"])
@pytest.mark.parametrize("values", ["float32", "q8"])
def test_what_leaves_and_what_stays_add_up_in_a_ring(ef: str, values: str, beta: float) -> None:
    """Σ given + memory / β = Σ updates; what is given away is all there was, or what the server decodes."""
    own = codec(ef=ef, values=values, beta=beta)
    state, given, made = own.init(LAYOUT), np.zeros(SIZE), np.zeros(SIZE)
    for number in range(5):
        update = drawn(number)
        state = own.begin(update, state, KEY.at(round=number))
        made += update.vector
        total, supports = own.total(state, LAYOUT), own.choose(state, LAYOUT, KEY)
        frame, state = own.send_latents(state, supports, number, LAYOUT, KEY, ENCODER, DECODER)
        where, found = own.coded_support(supports, LAYOUT), delivered(state)
        given += found
        decoded = own.latents_on(supports, number, LAYOUT, ENCODER, DECODER).decode(frame, LAYOUT)
        np.testing.assert_array_equal(found[where], total[where] if ef == "mask" else decoded[where])
        np.testing.assert_array_equal(found[CODED:], decoded[CODED:])
        np.testing.assert_allclose(given + state["memory"] / beta, made, atol=1e-4)
    if ef == "mask" and beta == 1.0:
        assert not state["memory"][where].any()


@pytest.mark.parametrize("ef", ["mask", "decoded"])
@pytest.mark.parametrize("values", ["float32", "q8"])
def test_what_leaves_and_what_stays_add_up_at_a_server(ef: str, values: str) -> None:
    """Innovations as they are, wherever they lie; on the common node's support what is left of the values, or what the
    server decodes for this node."""
    own = codec(instance="server", ef=ef, values=values)
    supports = own.choose(waiting(own, drawn(50)), LAYOUT, KEY)
    where = own.coded_support(supports, LAYOUT)
    common = own.open_latents(own.latents_frame(drawn(50).vector[where], ENCODER), where.size)
    update = drawn(1)
    state = waiting(own, update)
    frame, after = own.send_innovation(state, supports, 9, LAYOUT, KEY, common, DECODER)
    innovations = own.innovations(LAYOUT)
    sent, found = innovations.decode(frame, LAYOUT), delivered(after)
    assert [t.values.k for t in innovations.open(frame, LAYOUT).tensors] == [5, 4, 30, 7]
    np.testing.assert_array_equal(found[sent != 0], sent[sent != 0])
    side, known = side_of(innovations, innovations.open(frame, LAYOUT), where, LAYOUT)
    np.testing.assert_array_equal(side, sent[where])
    np.testing.assert_array_equal(known, sent[where] != 0)
    decoded = NodeEstimate(common, DECODER, scale_of(update.vector[where])).of(side)
    wanted = update.vector[where] if ef == "mask" else decoded
    np.testing.assert_array_equal(found[where[~known]], wanted[~known])
    elsewhere = np.setdiff1d(np.arange(CODED), np.union1d(where, np.flatnonzero(sent)))
    assert not found[elsewhere].any()
    np.testing.assert_allclose(found + after["memory"], update.vector, atol=1e-6)


def test_no_density_of_a_tensor_bounds_what_two_nodes_choose_together() -> None:
    """The policy's density is that of one choice; the common node's and the innovation hold more."""
    layout = Layout.of({"a": np.zeros((30, 40)), "b": np.zeros((30, 40))}, TablePolicy({"a": 0.05, "b": 0.05}))
    own = codec(instance="server", innovation=0.05)
    update, other = (np.float32(Key(seed, "u").generator().normal(size=layout.size)) for seed in (1, 2))
    state = own.begin(Update(update, layout), own.init(layout), KEY)
    supports = own.choose_from(other, layout, KEY)
    frame, after = own.send_innovation(state, supports, 9, layout, KEY)
    np.testing.assert_allclose(own.rollback(after, frame, layout)["memory"], update, atol=1e-6)


@pytest.mark.parametrize("instance", ["ring", "server"])
@pytest.mark.parametrize("ef", ["mask", "decoded"])
def test_a_frame_that_was_lost_goes_back(instance: str, ef: str) -> None:
    own = codec(instance=instance, ef=ef)
    state = waiting(own, drawn())
    supports = own.choose(state, LAYOUT, KEY)
    where = own.coded_support(supports, LAYOUT)
    common = ENCODER.encode(drawn().vector[where])
    if instance == "ring":
        frame, after = own.send_latents(state, supports, 9, LAYOUT, KEY, ENCODER, DECODER)
    else:
        frame, after = own.send_innovation(state, supports, 9, LAYOUT, KEY, common, DECODER)
    # The server may announce another stage by now: what was delivered is in the state.
    back = replace(own, encoder=0).rollback(after, frame, LAYOUT)
    np.testing.assert_allclose(back["memory"], drawn().vector, atol=1e-6)
    assert "delivered" not in back
    damaged = {**after, "delivered": after["delivered"][:-2]}
    with pytest.raises(wire.WireError):
        own.rollback(damaged, frame, LAYOUT)


def test_earlier_stages_are_scalecom_bit_for_bit() -> None:
    for dense in (False, True):
        own, other = codec(encoder=0, dense=dense), ScaleCom(0.05, dense=dense)
        ours, theirs = waiting(own, drawn()), other.begin(drawn(), other.init(LAYOUT), KEY)
        supports = own.choose(ours, LAYOUT, KEY)
        for mine, yours in zip(supports, other.choose(theirs, LAYOUT, KEY), strict=True):
            np.testing.assert_array_equal(mine, yours)
        assert own.on(supports, 9).encode(drawn(), {}, KEY) == other.on(supports, 9).encode(drawn(), {}, KEY)
        one, two = own.send(ours, supports, 9, LAYOUT, KEY), other.send(theirs, supports, 9, LAYOUT, KEY)
        assert one[0] == two[0]
        assert one[1].keys() == two[1].keys()
        for name, array in one[1].items():
            np.testing.assert_array_equal(array, two[1][name])
    alone = ErrorFeedback(TopK(0.05, scope="layer"))
    assert codec().encode(drawn(), codec().init(LAYOUT), KEY)[0] == alone.encode(drawn(), alone.init(LAYOUT), KEY)[0]


def test_the_oracle_at_a_server_gives_the_innovation_alone() -> None:
    own = codec(instance="server", ef="decoded", encoder=1, innovation=0.05)
    state = waiting(own, drawn())
    supports = own.choose(state, LAYOUT, KEY)
    where = own.coded_support(supports, LAYOUT)
    common = own.open_latents(own.latents_frame(drawn(2).vector[where], IdentityEncoder()), where.size)
    np.testing.assert_array_equal(common, drawn(2).vector[where])
    frame, after = own.send_innovation(state, supports, 9, LAYOUT, KEY, common, IdentityDecoder())
    alone = ErrorFeedback(TopK(0.05, scope="layer"))
    theirs, memory = alone.encode(drawn(), alone.init(LAYOUT), KEY)
    np.testing.assert_array_equal(own.innovations(LAYOUT).decode(frame, LAYOUT), alone.decode(theirs, LAYOUT))
    np.testing.assert_array_equal(after["memory"], memory["memory"])


def test_what_is_missing_is_said() -> None:
    own = codec(instance="server", ef="decoded")
    state = waiting(own, drawn())
    supports = own.choose(state, LAYOUT, KEY)
    with pytest.raises(StateError, match="latents or decoder are missing"):
        own.send_innovation(state, supports, 9, LAYOUT, KEY)
    with pytest.raises(StateError, match="no update waits"):
        own.send_innovation(own.init(LAYOUT), supports, 9, LAYOUT, KEY)
    with pytest.raises(StateError, match="no decoder"):
        codec(ef="decoded").send_latents(state, supports, 9, LAYOUT, KEY, ENCODER)


def test_forged_latents_of_a_common_node_are_refused() -> None:
    own = codec(instance="server")
    values = drawn().vector[:110]
    frame = own.latents_frame(values, ENCODER)
    assert own.open_latents(frame, 110).size == latents(110)
    for other, size in (
        (frame, 90),
        (frame, 113),
        (own.latents_frame(values, ConvEncoder.draw(Key(5))), 110),
        (replace(own, values="q8").latents_frame(values, ENCODER), 110),
        (wire.encode([wire.dense(np.zeros(28, np.float32))]), 110),
        (frame[:-1], 110),
        (b"", 110),
    ):
        with pytest.raises(wire.WireError):
            own.open_latents(other, size)


def test_all_settings_travel() -> None:
    own = codec(instance="server", ef="decoded", decoder=DECODER.id, scale=0.1)
    assert get_codec(own.to_config()) == own or repr(get_codec(own.to_config())) == repr(own)


# Bytes.


@pytest.mark.slow
def test_b4_bytes_of_a_model_of_25_million() -> None:
    """0.1 % of 25 557 032, an innovation of 255, 8 nodes; a frame has 64 bytes beside its sections (derived)."""
    n, k, few = 25_557_032, 25_557, 255
    layout = Layout.of({"all": np.zeros(n, np.float32)})
    own = LGC(k / n, innovation=few / n, raw=0, encoder=ENCODER.id)
    drawn = Key(0, "support").generator()
    support = np.sort(drawn.choice(n, k, replace=False))
    vector = np.zeros(n, np.float32)
    vector[support] = drawn.normal(size=k)
    update, supports = Update(vector, layout), (support,)
    ring, _ = own.latents_on(supports, 9, layout, ENCODER, None).encode(update, {}, KEY)
    positions = support_frame(supports, own, layout)
    innovation, _ = own.innovations(layout).encode(update, {}, KEY)
    common = own.latents_frame(vector[support], ENCODER)
    topk, _ = TopK(k / n).encode(update, {}, KEY)
    server = len(common) + len(positions) + len(innovation)
    assert len(ring) == pytest.approx(25_557 + 64, rel=0.01)
    assert len(topk) == pytest.approx(138_672, rel=0.01)
    assert server == pytest.approx(63_660, rel=0.01)
    assert len(innovation) == pytest.approx(1_659, rel=0.05)
    mean = (server + 7 * len(innovation)) / 8
    assert 4 * n / mean == pytest.approx(10_864, rel=0.03)
    assert 4 * n / len(ring) == pytest.approx(4_000, rel=0.01)
    assert 4 * n / (len(ring) + len(positions)) == pytest.approx(1_649, rel=0.01)


def test_it_is_no_support_of_its_own_class() -> None:
    """Frames of latents are of a class of their own, whose places are those of the coded tensors together."""
    own = codec()
    fixed = own.latents_on(own.choose(waiting(own, drawn()), LAYOUT, KEY), 9, LAYOUT, ENCODER, None)
    assert isinstance(fixed, LatentSupport)
    assert fixed.tensor_names(LAYOUT) == ("the coded tensors", "out", "the dense rest")
