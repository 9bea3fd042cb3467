"""The deterministic tests of the sparsifiers by number, 7.1.1 to 7.1.4, over every scheme they concern.

A check is a function of the implementation: the same lines judge ours and the wrong variants of ``wrong_codecs``. What
is declared is worked out a second time by ``naive_codecs``. Where the tests of a number are (tests/, tests/codecs/):

=====  ===============================================================================================================
7.1.1  here. With faults: systems/test_every_codec_conserves.py, over messages with systems/test_over_messages.py. With
       momentum: test_feedback.py::test_conservation_with_momentum
7.1.2  frames of all codecs here. Selection: kernels/test_select_topk.py. Bins, tails: kernels/test_bins.py,
       kernels/test_tails.py
7.1.3  here. What a receiver refuses: test_codec_protocol.py. Reported sizes of messages: flower/test_ledger.py
7.1.4  here. Chunks: test_chunk_top1.py::test_sends_the_largest_of_every_chunk
7.1.5  test_sparsification_limits.py. In rounds: systems/test_contract.py::test_equals_its_reference
7.1.6  test_sparsification_limits.py
7.1.7  test_sparsification_limits.py. Momentum at d = 1: test_dgc.py. N = 1 in rounds: systems/
       test_shared_support_program.py::test_one_client_is_plain_top_k. PowerSGD, which the number also names, is no
       codec here
7.1.8  test_sparsification_limits.py
7.1.9  test_sparsification_limits.py. Zeros: test_codec_protocol.py::test_a_zero_update_is_a_valid_empty_frame. Sums
       that overflow: test_feedback.py, test_adacomp.py, test_scalecom.py
7.2    test_sparsification_statistical.py
7.3    test_sparsification_convergence.py
=====  ===============================================================================================================
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from codec_examples import EXAMPLES, LAYOUTS, structured
from codec_examples import update as an_update
from naive_codecs import Naive, largest, only, parts_of, wanted
from naive_frames import Section, frame_bounds, frame_length, inmost
from wrong_codecs import (
    ClearsSent,
    ClipsInSecret,
    ComparesG,
    CutsInOrder,
    DropsWaiting,
    DropsZeros,
    ForgetsQuantisation,
    ForgetsRounding,
    MeanOverAll,
    NeverClears,
    ScaleComClearsSent,
    SendsRawValues,
    SharesSearch,
    caught,
)

from fedcomp import wire
from fedcomp.codecs import (
    DCT,
    DGC,
    EDEN,
    FFT,
    LGC,
    QSGD,
    STC,
    AdaComp,
    Auto,
    ChunkTop1,
    ChunkTopK,
    Clip,
    Codec,
    Dithering,
    Domain,
    Factors,
    FixedPoint,
    GradiVeQ,
    Identity,
    KeyRegion,
    LowRank,
    ModularSum,
    NaturalCompression,
    NormSign,
    PowerSGD,
    RandomBlock,
    RandomK,
    RandomProjection,
    Replay,
    Rotation,
    ScaleCom,
    ScaledSign,
    SIDCo,
    TernGrad,
    Threshold,
    TopK,
    chain,
    known,
)
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.kernels import tiers
from fedcomp.layout import Layout, SmallDense, Update
from fedcomp.privacy.bounded import BoundedFixedPoint
from fedcomp.privacy.votes import TopkSign
from fedcomp.rng import Key

KEY = Key(11, "codec", partition=3)
LAYOUT = LAYOUTS["model"]
CUBES = Layout.of(
    {"conv": np.zeros((6, 20, 3, 3), np.float32), "fc": np.zeros((40, 30), np.float32), "b": np.zeros(30, np.float32)},
    SmallDense(share=1.0),
)
INNER: tuple[Codec, ...] = (
    Identity(),
    TopK(0.05),
    TopK(0.1, scope="layer", values="fp16"),
    TopK(0.05, values="bf16", warmup=4),
    RandomK(0.1),
    RandomK(0.5, unbiased=True, shared=False),
    RandomBlock(0.1),
    QSGD(7, bucket=64),
    ScaledSign(),
    ScaledSign(scope="global", block=64),
    NormSign(),
    Dithering(bits=4),
    TernGrad(),
    TernGrad(clip=2.5),
    NaturalCompression(),
    STC(0.05),
    ChunkTop1(0.05),
    ChunkTop1(0.1, scope="global", values="bf16"),
    ChunkTopK(0.1, chunk=64, values="q4"),
    TopK(0.1, values="q2"),
    TopK(0.05, scope="layer", values="q8", index="rice"),
    Threshold(2.0),
    Threshold(1.0, values="sign"),
    SIDCo(0.05),
    SIDCo(0.02, "exponential", 1, scope="layer"),
    KeyRegion(sparse_density=0.02),
    EDEN(1),
    EDEN(2, scale="least"),
    Auto(0.5, feedback=True),
    RandomProjection(64, scale="least"),
    Replay(RandomProjection(9, scale="least")),
    Domain(Rotation(), TopK(0.05)),
    Domain(DCT(16), QSGD(7, bucket=64)),
    FFT(0.05, order="HWDF"),
    FixedPoint(RandomK(0.1), clip=2.0, levels=7),
    ModularSum(RandomK(0.1), clip=2.0, levels=7),
    BoundedFixedPoint(RandomK(0.1), clip=20.0, levels=400, scale=300),
    LowRank(2),
    Factors(rank=2),
)
WITH_MEMORY: tuple[Codec, ...] = (
    DGC(0.05, momentum=0.0),
    DGC(0.1, momentum=0.0, warmup=0, scope="layer", values="fp16"),
    AdaComp(),
    AdaComp(bin=30, conv_bin=7, factor=3.0, guard=True),
    ScaleCom(0.05),
    AdaComp(rest="q8"),
    ScaleCom(0.1, values="q4"),
    chain(Clip(1e9), ErrorFeedback(TopK(0.05))),
    PowerSGD(2),
    GradiVeQ(memory=True),
    LGC(0.05),
)


def assert_same(left: dict, right: dict, what: str) -> None:
    assert left.keys() == right.keys(), what
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=f"{what}: {name}")


def missing(made: np.ndarray, found: np.ndarray, reach: np.ndarray, rounds: int, beta: float) -> None:
    """A round rounds at most twelve times, each time by 2⁻²⁴ of the largest sum that coordinate has seen."""
    slack = 12 * rounds * 2.0**-24 * reach / beta
    assert (np.abs(found - made) <= slack).all(), "mass is missing"
    assert slack.max() < 1e-3 * np.abs(made).max(), "nothing would be noticed"


def check_conservation(codec: Codec, beta: float = 1.0, layout: Layout = CUBES, rounds: int = 20) -> None:
    """Σ delivered + m/beta = Σ g, elementwise, when three frames of ten are lost and rolled back."""
    rng = np.random.default_rng(1)
    state = codec.init(layout)
    made, delivered, reach = np.zeros((3, layout.size))
    lost = 0
    for t in range(1, rounds + 1):
        g = an_update(layout, seed=t)
        held = np.abs(codec.residual(state))
        frame, after = codec.encode(g, state, KEY.at(round=t))
        sent = codec.decode(frame, layout)
        reach = np.maximum(reach, np.abs(g.vector) + held + np.abs(sent))
        made += g.vector
        if rng.random() < 0.3:
            state = codec.rollback(after, frame, layout)
            learnt = {name: array for name, array in after.items() if name.startswith("codec.")}
            assert all(state[name] is array for name, array in learnt.items()), "what was learnt is forgotten"
            lost += 1
        else:
            state = after
            delivered += sent
    assert 0 < lost < rounds
    missing(made, delivered + codec.residual(state) / beta, reach, rounds, beta)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [1.0, 0.3, 0.1])
@pytest.mark.parametrize("inner", INNER, ids=repr)
def test_7_1_1_error_feedback_conserves_around_every_codec(inner: Codec, beta: float) -> None:
    """What arrived and what is remembered add up to all updates, whatever is inside and whatever was lost."""
    check_conservation(ErrorFeedback(inner, beta=beta), beta)


@pytest.mark.slow
@pytest.mark.parametrize("codec", WITH_MEMORY, ids=repr)
def test_7_1_1_codecs_with_a_memory_of_their_own_conserve(codec: Codec) -> None:
    """DGC's velocity at mu = 0, AdaComp's residue, ScaleCom's and PowerSGD's memory: the same sum."""
    check_conservation(codec)


def test_7_1_1_covers_every_scheme_of_the_registry() -> None:
    """Votes have no memory and chains none of their own; everything else that is known stands above."""
    here = {c.codec_id for c in (*INNER, *WITH_MEMORY)} | {"feedback"}
    assert here | {"signsgd", "topagg", "chain"} == set(known())


def check_step(codec: AdaComp, rounds: int = 6) -> None:
    """AdaComp, every round: q + residue' = residue + dW, to the rounding of one sum and one difference."""
    state = codec.init(CUBES)
    for t in range(1, rounds + 1):
        g = an_update(CUBES, seed=t)
        frame, after = codec.encode(g, state, KEY.at(round=t))
        q = codec.decode(frame, CUBES).astype(np.float64)
        exact = state["memory"].astype(np.float64) + g.vector
        slack = 2.0**-24 * (np.abs(exact) + np.abs(after["memory"])) * (1 + 1e-6)
        assert (np.abs(q + after["memory"] - exact) <= slack).all(), "a step loses mass"
        state = after


@pytest.mark.parametrize("codec", [AdaComp(), AdaComp(bin=30, conv_bin=7, guard=True), AdaComp(factor=1.0)], ids=repr)
def test_7_1_1_adacomp_conserves_step_by_step(codec: AdaComp) -> None:
    """What is sent of a tensor and its new residue are its old residue and the update."""
    check_step(codec)


def check_shared_conservation(codec: ScaleCom, rounds: int = 24, clients: int = 4) -> None:
    """Σ delivered + m/beta = Σ g for every client, when followers miss the indices and frames are lost."""
    rng = np.random.default_rng(2)
    states = [codec.init(CUBES) for _ in range(clients)]
    made, delivered, reach = np.zeros((3, clients, CUBES.size))
    ignorant = lost = 0
    for t in range(1, rounds + 1):
        updates = [an_update(CUBES, seed=100 * c + t) for c in range(clients)]
        made += [g.vector for g in updates]
        key = KEY.at(round=t)
        states = [codec.begin(g, s, key) for g, s in zip(updates, states, strict=True)]
        reach = np.maximum(reach, [np.abs(codec.total(s, CUBES)) + np.abs(s["memory"]) for s in states])
        supports = codec.choose(states[t % clients], CUBES, key)
        for c in range(clients):
            if c != t % clients and rng.random() < 0.3:
                ignorant += 1
                continue
            frame, after = codec.send(states[c], supports, t, CUBES, key.at(partition=c))
            if rng.random() < 0.3:
                states[c] = codec.rollback(after, frame, CUBES)
                lost += 1
            else:
                states[c] = after
                delivered[c] += codec.on(supports, t).decode(frame, CUBES)
    assert min(ignorant, lost) > 10
    owed = np.array([codec.settle(s, CUBES)["memory"] for s in states], np.float64)
    missing(made, delivered + owed / codec.beta, reach, rounds, codec.beta)


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["exact", "chunk"])
@pytest.mark.parametrize(("beta", "values"), [(1.0, "float32"), (0.3, "float32"), (0.1, "bf16"), (1.0, "fp16")])
def test_7_1_1_scalecom_conserves_when_followers_miss_the_index(beta: float, values: str, selector: str) -> None:
    """For every client the delivered and memory / beta are all its updates, also of rounds it could not send in."""
    check_shared_conservation(ScaleCom(0.05, beta=beta, values=values, selector=selector))


@pytest.mark.slow
def test_7_1_1_finds_wrong_memories() -> None:
    """Zeroed on the support, taken from unrounded values, never cleared, dropped while waiting."""
    check = check_conservation
    caught(check, ClearsSent(TopK(0.05), beta=0.3), 0.3, match="mass is missing")
    caught(check, ForgetsRounding(TopK(0.05, values="bf16")), match="mass is missing")
    caught(check, ForgetsRounding(TopK(0.05, values="bf16"), beta=0.3), 0.3, match="mass is missing")
    caught(check, NeverClears(TopK(0.05)), match="mass is missing")
    caught(check, ForgetsQuantisation(), match="mass is missing")
    caught(check_step, ForgetsQuantisation(), match="loses mass")
    caught(check_shared_conservation, ScaleComClearsSent(0.05, beta=0.3), match="mass is missing")
    caught(check_shared_conservation, DropsWaiting(0.05), match="mass is missing")
    check(ClearsSent(TopK(0.05)))  # the same thing at beta = 1 with exact values: nothing is wrong with it
    check(ForgetsRounding(TopK(0.05)))


# Without any compiled tier Auto sends another codec's frames; its own are compared in test_auto.py.
@pytest.mark.slow
@pytest.mark.parametrize("codec", [c for c in EXAMPLES if not isinstance(c, Auto)], ids=repr)
def test_7_1_2_payloads_do_not_depend_on_the_tier(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every codec's frames and states are the same bits with numba and without, above the size where that counts."""
    layout = Layout.flat(tiers.SMALL + 11)

    def run() -> tuple[list[bytes], dict]:
        state, frames = codec.init(layout), []
        for t in range(1, 4):
            frame, state = codec.encode(an_update(layout, seed=t), state, KEY.at(round=t))
            frames.append(frame)
        return frames, state

    compiled, state = run()
    monkeypatch.setattr(tiers, "has_numba", lambda: False)
    portable, other = run()
    assert compiled == portable
    assert_same(state, other, "the states differ")


def heavy_tailed(layout: Layout) -> list[Update]:
    """The updates of five rounds; in every other one there are zeros of both signs."""
    updates = [an_update(layout, seed=t) for t in range(1, 6)]
    for g in updates[::2]:
        g.vector[3::7], g.vector[5::7] = 0.0, -0.0
    return updates


def check_declared(
    codec: Codec, layout: Layout, declared: Codec | None = None, updates: list[Update] | None = None
) -> None:
    """decode(encode(x)) is what the rules of ``declared`` give, bit for bit, in frames of the formulas' length."""
    declared = codec if declared is None else declared
    naive, state = Naive(declared, layout), codec.init(layout)
    for t, g in enumerate(updates or heavy_tailed(layout), 1):
        key, before = KEY.at(round=t), naive.memory.copy()
        expected = naive.send(g, key)
        frame, state = codec.encode(g, state, key)
        decoded = codec.decode(frame, layout)
        np.testing.assert_array_equal(decoded, expected, err_msg="not what is declared")
        assert decoded.tobytes() == expected.tobytes(), "zeros of the wrong sign"
        if updates:  # what has an order of its own takes other forms
            continue
        least, most = frame_bounds(declared, layout, before + g.vector, decoded)
        assert least <= len(frame) <= most, f"{len(frame)} bytes, the formulas say {least}..{most}"
        # Ten name the dithers of a modular sum.
        named = 10 if "ModularSum" in repr(codec) else 0
        assert 21 <= len(frame) - named - sum(wire.tensor_bytes(frame)) < 31, "bytes that belong to no tensor"
        if isinstance(inmost(declared), KeyRegion):  # later rounds: 7.1.4, and its histograms in test_keyregion.py
            return


ELSEWHERE = (Auto, BoundedFixedPoint, TopkSign, EDEN, LowRank, Factors, RandomProjection, Replay)
DECLARED = [
    c
    for c in (*EXAMPLES, AdaComp(64, 7, factor=1.0), AdaComp(1, 1, factor=3.5), AdaComp(10**6, factor=1.5))
    if not isinstance(inmost(c), ELSEWHERE) and not {"Domain", "FFT"} & set(re.findall(r"\w+", repr(c)))
]

"""Those with a rule in naive_codecs.py. What a ballot and a bounded sum deliver is declared in tests/privacy: in
test_topagg_votes.py and test_distributed.py; what Auto, EDEN, projections, a domain and low ranks deliver in
test_auto.py, test_eden.py, test_projection.py, test_domain.py and test_power_sgd.py."""


@pytest.mark.slow
@pytest.mark.parametrize("codec", DECLARED, ids=repr)
def test_7_1_3_decoding_gives_the_declared_output(codec: Codec) -> None:
    """Every codec against rules written down a second time, its frames against the formulas of their size."""
    for layout in (*LAYOUTS.values(), CUBES):
        check_declared(codec, layout)


AT_THE_ENDS = ("denormal", "tiny", "huge", "largest", "huge rank one")
"""Vectors that float32 barely holds, or their sums, which the naive rules round otherwise: test_codec_protocol.py."""


@pytest.mark.slow
@pytest.mark.parametrize("codec", DECLARED, ids=repr)
def test_7_1_3_decoding_gives_the_declared_output_of_structured_updates(codec: Codec) -> None:
    """Constant, one-hot, ties, few magnitudes among zeros, low ranks and all exponents, each in a first round."""
    for layout in (LAYOUTS["model"], LAYOUTS["flat"]):
        for kind, vector in structured(layout).items():
            if kind not in AT_THE_ENDS:
                check_declared(codec, layout, updates=[Update(vector, layout)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec",
    [
        TernGrad(),
        TernGrad(clip=2.0),
        NaturalCompression(),
        QSGD(7, bucket=300),
        Dithering(),
        ScaledSign(),
        ScaledSign(block=300),
        ScaledSign(block=70_000),
        FixedPoint(RandomK(1.0), clip=1.0),
    ],
    ids=repr,
)
def test_7_1_3_what_is_drawn_or_summed_block_by_block_is_one_pass(codec: Codec) -> None:
    layout = Layout.flat((1 << 17) + 1000)
    check_declared(codec, layout, updates=[an_update(layout)])


@pytest.mark.slow
@pytest.mark.parametrize("index", ["rice", "bitmap"])
@pytest.mark.parametrize("values", ["float32", "bf16"])
def test_7_1_3_sizes_to_the_byte(index: str, values: str) -> None:
    """With a named index codec nothing is left to choose: the formulas' least and most are one number."""
    for density, n in itertools.product((0.001, 0.03, 0.4, 1.0), (1, 900, 20_000)):
        codec, given = TopK(density, index=index, values=values), an_update(Layout.flat(n))
        frame, _ = codec.encode(given, {}, KEY)
        bounds = frame_bounds(codec, given.layout, given.vector, codec.decode(frame, given.layout))
        assert bounds == (len(frame), len(frame))


@pytest.mark.slow
@pytest.mark.parametrize(("density", "bits"), [(0.001, 11.50), (0.01, 8.11), (0.1, 4.76)])
def test_7_1_3_bits_per_index_at_a_million(density: float, bits: float) -> None:
    """Rice-coded gaps cost what section 6 lists, so that a value and its index are 40.1 bits at one percent."""
    n, k = 10**6, round(density * 10**6)
    frame, _ = TopK(density, index="rice").encode(an_update(Layout.flat(n)), {}, KEY)
    rest = frame_length([Section(n, k, 1, 0, 0, 4 * k)])
    assert 8 * (len(frame) - rest) / k == pytest.approx(bits, abs=0.1)
    assert 8 * len(frame) / k - 32 < bits + 0.5


@pytest.mark.parametrize("values", ["float32", "bf16", "fp16"])
def test_7_1_3_followers_frames_are_values_on_the_leaders_support(values: str) -> None:
    """CLT-k delivers everybody's p on the leader's top k, in frames of values and eight bytes of name per tensor."""
    codec, own = ScaleCom(0.05, values=values), TopK(0.05, scope="layer", values=values)
    key, width = KEY.at(round=1), 4 if values == "float32" else 2
    updates = [an_update(CUBES, seed=c) for c in range(4)]
    states = [codec.begin(g, codec.init(CUBES), key) for g in updates]
    supports = codec.choose(states[2], CUBES, key)
    for g, state in zip(updates, states, strict=True):
        frame, _ = codec.send(state, supports, 9, CUBES, key)
        expected, sections = g.vector.copy(), []
        for part in parts_of(own, CUBES):
            support = largest(updates[2].vector[part.place], wanted(own, part))
            expected[part.place] = only(g.vector[part.place], support, values)
            sections.append(Section(part.size, support.size, 8, 0, 0, width * support.size))
        rest = CUBES.dense_size
        sections.append(Section(rest, rest, 0, 0, 0, 4 * rest, dense=True))
        assert codec.on(supports, 9).decode(frame, CUBES).tobytes() == expected.tobytes()
        assert len(frame) == frame_length(sections)


def check_alone(codec: Codec, rounds: int = 16) -> None:
    """Two clients in turn send what each would send alone: nothing is kept outside the state."""
    layout = Layout.flat(2000)

    def client(i: int, t: int) -> Update:
        g = an_update(layout, seed=10 * t + i).vector
        return Update(np.tanh(g) if i else g * np.abs(g), layout)

    def run(clients: Sequence[int]) -> dict[int, list[bytes]]:
        SharesSearch.shared.clear()
        states = {i: codec.init(layout) for i in clients}
        frames: dict[int, list[bytes]] = {i: [] for i in clients}
        for t, i in itertools.product(range(1, rounds + 1), clients):
            frame, states[i] = codec.encode(client(i, t), states[i], KEY.at(round=t, partition=i))
            frames[i].append(frame)
        return frames

    assert run((0, 1)) == run((0,)) | run((1,)), "clients share a state"


@pytest.mark.slow
@pytest.mark.parametrize("codec", EXAMPLES, ids=repr)
def test_7_1_3_frames_depend_on_update_state_and_key_only(codec: Codec) -> None:
    """Adaptation, memory and draws of one client are untouched by another one's in the same process."""
    check_alone(codec)


def test_7_1_3_finds_wrong_outputs() -> None:
    """A magnitude over all entries, raw values, zeros without a sign, an undeclared clip, a state of the class."""
    for wrong, declared in (
        (MeanOverAll(0.05), STC(0.05)),
        (ErrorFeedback(MeanOverAll(0.05)), ErrorFeedback(STC(0.05))),
        (SendsRawValues(), AdaComp()),
        (ComparesG(), AdaComp()),
        (ForgetsQuantisation(), AdaComp()),
        (DropsZeros(), ScaledSign()),
        (ErrorFeedback(DropsZeros()), ErrorFeedback(ScaledSign())),
        (ClipsInSecret(), TernGrad()),
        (ClearsSent(TopK(0.05), beta=0.3), ErrorFeedback(TopK(0.05), beta=0.3)),
    ):
        check_declared(declared, LAYOUT)
        caught(check_declared, wrong, LAYOUT, declared, match="not what is declared")
    options: dict[str, Any] = {"density": 0.01, "family": "exponential", "stages": 1}
    check_alone(SIDCo(**options))
    caught(check_alone, SharesSearch(**options), match="share a state")


def check_top_k_of_its_count(codec: Codec, rounds: int = 8) -> None:
    """Under error feedback, round by round: the output is the exact top-k of the count that the codec arrived at."""
    layout = Layout.flat(4000)
    outer = ErrorFeedback(codec)
    state = outer.init(layout)
    for t in range(1, rounds + 1):
        g = an_update(layout, seed=t)
        total = state["memory"] + g.vector
        frame, state = outer.encode(g, state, KEY.at(round=t))
        (tensor,) = codec.open(frame, layout).tensors
        exact = only(total, largest(total, tensor.values.k), getattr(codec, "values", "float32"))
        np.testing.assert_array_equal(codec.decode(frame, layout), exact, err_msg="not the top k of its own count")


ESTIMATORS = (
    SIDCo(0.01),
    SIDCo(0.05, "exponential", 1),
    SIDCo(0.02, "gamma-pareto", values="bf16"),
    SIDCo(0.001, stages=4, adapt="published"),
    SIDCo(0.01, "exponential", 1, adapt_first=True),
    Threshold(2.0),
    Threshold(3.0, values="fp16"),
    TopK(0.01),
)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ESTIMATORS, ids=repr)
def test_7_1_4_thresholds_send_the_top_k_of_their_own_count(codec: Codec) -> None:
    """However well a threshold was guessed: nothing larger than what was sent stays behind."""
    check_top_k_of_its_count(codec)


def test_7_1_4_finds_a_surplus_cut_in_index_order() -> None:
    """The first k above a threshold are not the largest."""
    caught(check_top_k_of_its_count, CutsInOrder(0.01), match="not the top k")


def test_7_1_4_key_regions_send_the_top_k_of_their_own_counts() -> None:
    """KeyRegion: within the key blocks, and within the others, nothing larger than what was sent stays behind."""
    codec, layout = KeyRegion(sparse_density=0.02), Layout.flat(8000)
    outer = ErrorFeedback(codec)
    state, sent = outer.init(layout), [0, 0]
    for t in range(1, 9):
        g = an_update(layout, seed=t)
        g.vector[1024:1792] *= 8
        total = state["memory"] + g.vector
        frame, state = outer.encode(g, state, KEY.at(round=t))
        travelled = codec.decode(frame, layout) != 0
        is_key = np.repeat(codec.key_blocks(total), 256)[: layout.size]
        for i, region in enumerate((is_key, ~is_key)):
            k = np.count_nonzero(travelled & region)
            sent[i] += k
            expected = np.flatnonzero(region)[largest(total[region], k)]
            np.testing.assert_array_equal(np.flatnonzero(travelled & region), expected)
    assert min(sent) > 100
