"""The deterministic tests of the sparsifiers by number, 7.1.5 to 7.1.9, over every scheme they concern.

Continues ``test_sparsification_deterministic.py``, whose first lines say where the tests of every number are. The round
of a shared support is judged from outside, by the mean it delivers: the same check takes the codec's own exchanges, the
system in this process and two rounds that are not ScaleCom's. PowerSGD is no codec of this
package yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from codec_examples import EXAMPLES, LAYOUTS
from codec_examples import update as an_update
from naive_codecs import largest, parts_of, wanted
from wrong_codecs import (
    AddsInPlace,
    ClearsSent,
    ForgetsRounding,
    LetsNaNPass,
    NeverClears,
    RoundsDown,
    ScaleComClearsSent,
    SendsRawValues,
    SharesInNameOnly,
    caught,
)

from fedcomp.codecs import (
    DGC,
    LGC,
    STC,
    AdaComp,
    ChunkTop1,
    Codec,
    GradiVeQ,
    Identity,
    KeyRegion,
    PowerSGD,
    RandomBlock,
    RandomK,
    ScaleCom,
    SIDCo,
    Threshold,
    TopK,
    chain,
)
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.scalecom import FixedSupport
from fedcomp.codecs.waiting import Waiting
from fedcomp.errors import NonFiniteUpdate
from fedcomp.kernels import tiers
from fedcomp.layout import Layout, Update
from fedcomp.local import Local
from fedcomp.rng import Key
from fedcomp.systems.shared_support import SharedSupport

KEY = Key(11, "codec", partition=3)
LAYOUT = LAYOUTS["model"]
PART = slice(0, LAYOUT.compressed_size)
Round = Callable[[ScaleCom, list[dict], list[Update], int], tuple[np.ndarray, list[dict]]]
"""One round of a shared support: codec, states, updates and the round's number give the mean and the new states."""


def snapshot(state: dict) -> dict:
    return {name: array.copy() for name, array in state.items()}


def assert_same(left: dict, right: dict, what: str) -> None:
    assert left.keys() == right.keys(), what
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=f"{what}: {name}")


def exchanges(
    codec: ScaleCom, states: list[dict], updates: list[Update], t: int, *, lead: Callable[[int, int], int]
) -> tuple[np.ndarray, list[dict]]:
    """The codec's own two exchanges; ``lead`` says who leads round t of N clients."""
    layout, key, n = updates[0].layout, KEY.at(round=t), len(updates)
    waiting = [codec.begin(g, s, key) for g, s in zip(updates, states, strict=True)]
    supports = codec.choose(waiting[lead(t, n)], layout, key)
    sent = [codec.send(w, supports, t, layout, key) for w in waiting]
    out = Update(np.zeros(layout.size, np.float32), layout)
    for frame, _ in sent:
        codec.on(supports, t).accumulate(frame, 1.0 / n, out)
    return out.vector, [state for _, state in sent]


def system(codec: ScaleCom, states: list[dict], updates: list[Update], t: int) -> tuple[np.ndarray, list[dict]]:
    """The round of the system, in this process."""
    layout = updates[0].layout
    # From a model of zeros what is trained is the update.
    local = Local(
        SharedSupport(codec),
        layout,
        np.zeros(layout.size, np.float32),
        lambda number, node, start: updates[node].vector,
        lambda node: 1.0,
        len(updates),
    )
    for node, state in enumerate(states):
        local.client(node).memory = dict(state)
    local.step(t)
    return local.model, [local.clients[node].memory for node in range(len(updates))]


def everybody_for_himself(
    codec: ScaleCom, states: list[dict], updates: list[Update], t: int
) -> tuple[np.ndarray, list[dict]]:
    """Wrong: every client selects its own top k, which is called CLT-k all the same."""
    out, after = np.zeros(updates[0].layout.size, np.float32), []
    for g, s in zip(updates, states, strict=True):
        frame, state = codec.encode(g, s, KEY.at(round=t))
        out += codec.decode(frame, g.layout) / np.float32(len(updates))
        after.append(state)
    return out, after


cyclic: Round = functools.partial(exchanges, lead=lambda t, n: t % n)
fixed: Round = functools.partial(exchanges, lead=lambda t, n: 0)


def totals_of(codec: ScaleCom, states: list[dict], updates: list[Update]) -> list[np.ndarray]:
    return [codec.settle(s, g.layout)["memory"] + g.vector for s, g in zip(states, updates, strict=True)]


def own_support(codec: ScaleCom, total: np.ndarray) -> np.ndarray:
    """What a client would choose by itself, as a mask: top k or the largest of each chunk, tensor by tensor."""
    out = np.zeros(LAYOUT.size, np.bool_)
    for part in parts_of(TopK(codec.density, scope="layer"), LAYOUT):
        x = total[part.place]
        if codec.selector == "exact":
            out[part.place][largest(x, wanted(codec, part))] = True
        else:
            c = round(1 / codec.density)
            out[part.place][[a + int(np.argmax(np.abs(x[a : a + c]))) for a in range(0, x.size, c)]] = True
    return out


def check_clt_k(step: Round, codec: ScaleCom, clients: int) -> None:
    """The mean's non-zeros are one support, the leader's own; on it stands the mean of all; the leaders take turns."""
    states, leaders = [codec.init(LAYOUT) for _ in range(clients)], []
    k = np.count_nonzero(own_support(codec, an_update(LAYOUT).vector))
    for t in range(1, clients + 3):
        updates = [an_update(LAYOUT, seed=1000 * c + t) for c in range(clients)]
        totals = totals_of(codec, states, updates)
        mean, after = step(codec, states, updates, t)
        support = mean[PART] != 0
        assert np.count_nonzero(support) == k, "the union is not one support"
        exact = np.mean(totals, axis=0, dtype=np.float64)[PART]
        slack = 1e-6 * np.abs(totals).sum(axis=0)[PART]
        assert (np.abs(mean[PART] - np.where(support, exact, 0)) <= slack).all(), "not the mean on the support"
        chose = [c for c in range(clients) if np.array_equal(own_support(codec, totals[c])[PART], support)]
        assert len(chose) == 1, "nobody's own support, or everybody's"
        leaders += chose
        for other in {0, t % clients, (t + 1) % clients}:
            changed = [Update(-9 * g.vector, LAYOUT) if c == other else g for c, g in enumerate(updates)]
            again = step(codec, states, changed, t)[0][PART] != 0
            # The first round's memories are zero, and -9 g has the top k of g.
            moves = other == chose[0] and t > 1
            assert np.array_equal(again, support) != moves, "a follower's gradient moved the support"
        states = after
    assert set(leaders) == set(range(clients)), "not every client leads"
    assert leaders[:2] == leaders[clients : clients + 2], "the turns do not repeat"


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 2, 5, 9])
@pytest.mark.parametrize("selector", ["exact", "chunk"])
@pytest.mark.parametrize("step", [cyclic, system], ids=["exchanges", "system"])
def test_7_1_5_clt_k_commutes_with_the_mean(step: Round, selector: str, clients: int) -> None:
    """One support for all, whatever N, chosen by each client in turn and by nobody else, and linear on it."""
    check_clt_k(step, ScaleCom(0.05, selector=selector, beta=0.5), clients)


@pytest.mark.slow
def test_7_1_5_finds_other_supports() -> None:
    """Supports of everybody's own, and a leader who never changes, are not CLT-k."""
    codec = ScaleCom(0.05)
    for clients in (2, 5):
        caught(check_clt_k, everybody_for_himself, codec, clients, match="not one support")
        caught(check_clt_k, fixed, codec, clients, match="not every client leads")
    check_clt_k(everybody_for_himself, codec, 1)  # of one client they are the same thing


def check_commutes(codec: Codec, clients: int = 5) -> None:
    """Mean of the decoded = decoded mean, for frames of one round."""
    updates = [an_update(LAYOUT, seed=c) for c in range(clients)]
    mean = Update(np.mean([g.vector for g in updates], axis=0, dtype=np.float64).astype(np.float32), LAYOUT)
    keys = [KEY.at(round=1, partition=c if getattr(codec, "shared", False) else 0) for c in range(clients)]
    state = codec.init(LAYOUT)
    each = [codec.decode(codec.encode(g, state, key)[0], LAYOUT) for g, key in zip(updates, keys, strict=True)]
    together = codec.decode(codec.encode(mean, state, keys[0])[0], LAYOUT)
    np.testing.assert_allclose(np.mean(each, axis=0), together, rtol=1e-5, atol=1e-5, err_msg="does not commute")


SUPPORTS = tuple(np.arange(0, t.size, 7) for t in LAYOUT.compressed)


@pytest.mark.parametrize(
    "codec",
    [
        *(c for c in EXAMPLES if c.linear),
        RandomK(0.1, scope="layer"),
        RandomBlock(0.2, scope="global"),
        FixedSupport(SUPPORTS, 5),
    ],
    ids=repr,
)
def test_7_1_5_shared_supports_commute_with_the_mean(codec: Codec) -> None:
    """Everything that calls itself linear: a support drawn by the round's key, or named, decodes linearly."""
    check_commutes(codec)


def test_7_1_5_finds_what_does_not_commute() -> None:
    """Own top k, own draws."""
    for wrong in (TopK(0.05), STC(0.05), ChunkTop1(0.05)):
        caught(check_commutes, wrong, match="does not commute")
    caught(check_commutes, SharesInNameOnly(0.1), match="does not commute")


def check_low_pass(codec: Codec, beta: float, rounds: int = 4) -> None:
    """On the support the memory becomes (1 - beta) of what it was: bit for bit, and not zero."""
    state = codec.init(LAYOUT)
    for t in range(1, rounds + 1):
        old = state["memory"]
        frame, state = codec.encode(an_update(LAYOUT, seed=t), state, KEY.at(round=t))
        sent = codec.support(frame, LAYOUT)
        assert sent.size > 0
        np.testing.assert_array_equal(
            state["memory"][sent], np.float32(1.0 - beta) * old[sent], err_msg="not (1 - beta) of the memory"
        )
    assert np.abs(state["memory"][sent]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.5, 0.1])
@pytest.mark.parametrize(
    "inner",
    [TopK(0.1), TopK(0.1, scope="layer"), RandomK(0.2), RandomBlock(0.2), ChunkTop1(0.1), SIDCo(0.1), KeyRegion()],
    ids=repr,
)
def test_7_1_6_filtered_memory_keeps_its_share(inner: Codec, beta: float) -> None:
    """Around every codec that sends values as they are, a sent coordinate keeps (1 - beta) of its memory."""
    check_low_pass(ErrorFeedback(inner, beta=beta), beta)


def check_shared_low_pass(codec: ScaleCom, clients: int = 3) -> None:
    """The same for leader and followers of CLT-k."""
    states = [codec.init(LAYOUT) for _ in range(clients)]
    for t in range(1, 2 * clients):
        updates = [an_update(LAYOUT, seed=10 * t + c) for c in range(clients)]
        mean, after = cyclic(codec, states, updates, t)
        sent = np.flatnonzero(mean[PART])
        for old, new in zip(states, after, strict=True):
            expected = np.float32(1.0 - codec.beta) * old["memory"][sent]
            np.testing.assert_array_equal(new["memory"][sent], expected, err_msg="not (1 - beta) of the memory")
            assert t == 1 or np.abs(expected).max() > 0.1
        states = after


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.5, 0.1])
@pytest.mark.parametrize("selector", ["exact", "chunk"])
def test_7_1_6_leader_and_followers_keep_their_share(selector: str, beta: float) -> None:
    """After a round of CLT-k the memory on I is (1 - beta) m_old for everybody."""
    check_shared_low_pass(ScaleCom(0.1, beta=beta, selector=selector))


def test_7_1_6_finds_a_cleared_memory() -> None:
    """Zeroing it, as at beta = 1, is not the filter."""
    caught(check_low_pass, ClearsSent(TopK(0.1), beta=0.5), 0.5, match=r"not \(1 - beta\)")
    caught(check_shared_low_pass, ScaleComClearsSent(0.1, beta=0.5), match=r"not \(1 - beta\)")


class Quadratics:
    """Three clients, each with a curvature and an optimum of its own, whose gradients depend on the model."""

    def __init__(self, layout: Layout) -> None:
        rng = np.random.default_rng(0)
        self.layout = layout
        self.curvature = rng.uniform(0.2, 1.0, (3, layout.size)).astype(np.float32)
        self.optimum = rng.normal(0.0, 3.0, (3, layout.size)).astype(np.float32)

    def updates(self, weights: np.ndarray) -> list[Update]:
        gradients = (a * (weights - x) for a, x in zip(self.curvature, self.optimum, strict=True))
        return [Update(g, self.layout) for g in gradients]

    def uncompressed(self, rounds: int) -> list[bytes]:
        """The weights after each round, by the lines anybody would write."""
        w, out = np.zeros(self.layout.size, np.float32), []
        for _ in range(rounds):
            mean = np.zeros_like(w)
            for g in self.updates(w):
                mean = mean + np.float32(1 / 3) * g.vector
            w = w - np.float32(0.3) * mean
            out.append(w.tobytes())
        return out


def check_uncompressed(codec: Codec, layout: Layout, rounds: int = 20) -> None:
    """A run of three clients at density 1 is the uncompressed run, bit for bit, and nothing is ever remembered."""
    task = Quadratics(layout)
    states = [codec.init(layout) for _ in range(3)]
    w = np.zeros(layout.size, np.float32)
    for t, expected in enumerate(task.uncompressed(rounds), 1):
        out = Update(np.zeros_like(w), layout)
        for i, g in enumerate(task.updates(w)):
            frame, states[i] = codec.encode(g, states[i], KEY.at(round=t, partition=i))
            codec.accumulate(frame, 1 / 3, out)
        w = w - np.float32(0.3) * out.vector
        # A bare boolean: on a build server pytest would explain the difference byte by byte, for half a minute.
        same = w.tobytes() == expected
        assert same, f"another run from round {t} on"
        for state in states:
            memory = codec.residual(state)
            assert memory is None or not memory.any(), "something is remembered"


EVERYTHING: tuple[Codec, ...] = (
    *(
        ErrorFeedback(inner)
        for inner in (
            Identity(),
            TopK(1.0),
            TopK(1.0, scope="layer", index="rice"),
            TopK(1.0, warmup=5),
            RandomK(1.0),
            RandomK(1.0, unbiased=True, scope="layer", shared=False),
            RandomBlock(1.0),
            ChunkTop1(1.0),
            ChunkTop1(1.0, scope="global"),
            Threshold(1e-300),
            SIDCo(1.0),
            SIDCo(1.0, "exponential"),
            SIDCo(1.0, "gamma-pareto", scope="layer"),
        )
    ),
    ErrorFeedback(TopK(1.0), beta=0.3),
    ErrorFeedback(RandomBlock(1.0), beta=0.1, decay=0.5, norm_guard=2.0, max_age=3),
    DGC(1.0, momentum=0.0),
    DGC(1.0, momentum=0.0, warmup=0, scope="layer"),
    ScaleCom(1.0),
    ScaleCom(1.0, beta=0.1, selector="chunk"),
    chain(ErrorFeedback(TopK(1.0))),
)


@pytest.mark.slow
@pytest.mark.parametrize("codec", EVERYTHING, ids=repr)
@pytest.mark.parametrize("name", ["model", "flat"])
def test_7_1_7_density_one_is_the_uncompressed_run(codec: Codec, name: str) -> None:
    """Twenty rounds with a sparsifier that sends everything end in the same bits as without one."""
    check_uncompressed(codec, LAYOUTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["exact", "chunk"])
@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("step", [cyclic, system], ids=["exchanges", "system"])
def test_7_1_7_clt_k_at_density_one_is_the_uncompressed_run(step: Round, beta: float, selector: str) -> None:
    """The same over two exchanges, for three clients with one leader a round."""
    codec, task = ScaleCom(1.0, beta=beta, selector=selector), Quadratics(LAYOUT)
    states = [codec.init(LAYOUT) for _ in range(3)]
    w = np.zeros(LAYOUT.size, np.float32)
    for t, expected in enumerate(task.uncompressed(20), 1):
        mean, states = step(codec, states, task.updates(w), t)
        w = w - np.float32(0.3) * mean
        assert w.tobytes() == expected
        assert not any(state["memory"].any() for state in states)


def test_7_1_7_finds_runs_that_are_not_the_same() -> None:
    """A memory that is never cleared, values that are rounded, one coordinate left out."""
    wrong = (NeverClears(TopK(1.0)), ErrorFeedback(TopK(1.0, values="bf16")), ErrorFeedback(TopK(0.999)))
    for codec in wrong:
        caught(check_uncompressed, codec, LAYOUT, match="another run|something is remembered")


def check_one_client(step: Round, codec: ScaleCom, alone: Codec, rounds: int = 8) -> None:
    """What one client delivers and remembers is what ``alone`` does, bit for bit."""
    states, own = [codec.init(LAYOUT)], alone.init(LAYOUT)
    for t in range(1, rounds + 1):
        g = an_update(LAYOUT, seed=t)
        mean, states = step(codec, states, [g], t)
        frame, own = alone.encode(g, own, KEY.at(round=t))
        np.testing.assert_array_equal(mean, alone.decode(frame, LAYOUT), err_msg="another mean")
        np.testing.assert_array_equal(states[0]["memory"], own["memory"], err_msg="another memory")


@pytest.mark.slow
@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("step", [cyclic, system], ids=["exchanges", "system"])
def test_7_1_7_one_clients_clt_k_is_top_k(step: Round, scope: str, beta: float) -> None:
    """N = 1: the leader has no followers, and its rounds are error feedback around top-k (or chunk top-1)."""
    exact, chunk = (ScaleCom(0.05, beta=beta, scope=scope, selector=selector) for selector in ("exact", "chunk"))
    check_one_client(step, exact, ErrorFeedback(TopK(0.05, scope=scope), beta=beta))
    check_one_client(step, chunk, ErrorFeedback(ChunkTop1(0.05, scope=scope), beta=beta))
    caught(check_one_client, step, exact, ErrorFeedback(ChunkTop1(0.05, scope=scope), beta=beta), match="another mean")


def by_codec(make: Callable[..., AdaComp], g: np.ndarray, length: int) -> np.ndarray:
    """What ``make``'s codec delivers of ``g`` without look-ahead and residue."""
    layout = Layout.flat(g.size)
    made = make(bin=length, factor=1.0)
    return made.decode(made.encode(Update(g, layout), made.init(layout), KEY)[0], layout)


def at_the_largest(g: np.ndarray, length: int) -> np.ndarray:
    """Wrong: the scale is the largest magnitude of the layer, not the mean of the bins' largest."""
    q = by_codec(AdaComp, g, length)
    return np.sign(q) * np.abs(g).max()


def check_one_per_bin(step: Callable[[np.ndarray, int], np.ndarray], length: int, n: int = 1030) -> None:
    """One element per bin, and error = ‖G‖² - B s² with s the mean of the bins' largest magnitudes."""
    rng = np.random.default_rng(length)
    g = (rng.permutation(np.arange(1, n + 1)) * rng.choice([-1, 1], n)).astype(np.float32)
    bins = range(0, n, length)
    peaks = [float(np.abs(g[a : a + length]).max()) for a in bins]
    q = step(g, length)
    assert [np.count_nonzero(q[a : a + length]) for a in bins] == [1] * len(peaks), "not one per bin"
    energy = float((g.astype(np.float64) ** 2).sum())
    error = float(((g.astype(np.float64) - q) ** 2).sum())
    expected = energy - len(peaks) * float(np.mean(peaks)) ** 2
    assert error == pytest.approx(expected, abs=1e-6 * energy), "not the identity"


@pytest.mark.parametrize("length", [1, 7, 50, 500, 1030, 5000])
@pytest.mark.parametrize("guard", [False, True])
def test_7_1_8_error_of_one_element_per_bin(length: int, guard: bool) -> None:
    """Without look-ahead AdaComp's error is what the B largest take out at their common least-squares scale."""
    check_one_per_bin(functools.partial(by_codec, functools.partial(AdaComp, guard=guard)), length)


@pytest.mark.parametrize("length", [7, 50])
def test_7_1_8_finds_other_scales(length: int) -> None:
    """Raw values and the layer's largest magnitude do not fulfil the identity."""
    caught(check_one_per_bin, functools.partial(by_codec, SendsRawValues), length, match="not the identity")
    caught(check_one_per_bin, at_the_largest, length, match="not the identity")


def check_refuses(codec: Codec, layout: Layout) -> None:
    """NaN and infinity anywhere raise, and state, update and the next frame are as if nothing had been asked."""
    _, state = codec.encode(an_update(layout), codec.init(layout), KEY.at(round=1))
    good, key = an_update(layout, seed=2), KEY.at(round=2)
    frame, kept = codec.encode(good, state, key)[0], snapshot(state)
    for bad in (np.nan, np.inf, -np.inf):
        for at in {0, layout.size // 2, layout.compressed_size - 1, layout.size - 1}:
            given = Update(good.vector.copy(), layout)
            given.vector[at] = bad
            before = given.vector.copy()
            (name,) = (t.name for t in layout.tensors if t.slice.start <= at < t.slice.stop)
            said = ""
            try:
                codec.encode(given, state, key)
            except NonFiniteUpdate as error:
                said = str(error)
            assert said, "was sent"
            assert name in said
            assert_same(state, kept, "the state was touched")
            np.testing.assert_array_equal(given.vector, before, err_msg="the update was touched")
    assert codec.encode(good, state, key)[0] == frame, "the next frame is another"


@pytest.mark.slow
@pytest.mark.parametrize("codec", EXAMPLES, ids=repr)
def test_7_1_9_numbers_that_are_none_change_nothing(codec: Codec) -> None:
    """Every codec refuses NaN and both infinities in any place, by both tiers, before any state is touched, and names
    the tensor."""
    for layout in (LAYOUT, Layout.flat(1), Layout.flat(tiers.SMALL)):
        check_refuses(codec, layout)


@pytest.mark.parametrize("codec", [ScaleCom(0.05), PowerSGD(), GradiVeQ(), LGC()], ids=lambda codec: codec.codec_id)
def test_7_1_9_waiting_updates_and_named_supports_are_refused_alike(codec: Waiting) -> None:
    """The first exchange of codecs with several, and the values of ScaleCom's second."""
    state = codec.begin(an_update(LAYOUT), codec.init(LAYOUT), KEY)
    kept = snapshot(state)
    for bad in (np.nan, np.inf, -np.inf):
        for at in (0, PART.stop - 1, LAYOUT.size - 1):
            g = an_update(LAYOUT, seed=2)
            g.vector[at] = bad
            with pytest.raises(NonFiniteUpdate):
                codec.begin(g, state, KEY)
            with pytest.raises(NonFiniteUpdate):
                FixedSupport(SUPPORTS, 1).encode(g, {}, KEY)
            assert_same(state, kept, "the state was touched")


def check_sends_something(codec: Codec, n: int) -> None:
    """A single coordinate that is not zero travels, however low the density and the coordinate."""
    layout = Layout.flat(n)
    for value in (1e-42, -3.0):
        x = np.zeros(n, np.float32)
        x[n // 3] = value
        frame, _ = codec.encode(Update(x, layout), codec.init(layout), KEY)
        assert codec.decode(frame, layout)[n // 3] == np.float32(value), "nothing was sent"


LOW = 1e-6


@pytest.mark.parametrize(
    "codec",
    [
        TopK(LOW),
        TopK(LOW, scope="layer", index="bitmap"),
        STC(LOW),
        ChunkTop1(LOW),
        SIDCo(LOW),
        SIDCo(LOW, "exponential", 1),
        SIDCo(LOW, "gamma-pareto"),
        KeyRegion(LOW, LOW),
        DGC(LOW, warmup=0),
        ScaleCom(LOW),
        ErrorFeedback(TopK(LOW)),
        ErrorFeedback(STC(LOW, scope="layer"), beta=0.1),
    ],
    ids=repr,
)
def test_7_1_9_k_is_never_zero(codec: Codec) -> None:
    """Where d n is far below one, the largest coordinate still goes."""
    for n in (1, 300, 30_000):
        check_sends_something(codec, n)


def test_7_1_9_finds_silent_failures() -> None:
    """NaN that a comparison passes over, a memory that is changed before the refusal, a k of zero."""
    caught(check_refuses, LetsNaNPass(0.05), LAYOUT, match="was sent")
    caught(check_refuses, ErrorFeedback(LetsNaNPass(0.05)), LAYOUT, match="was sent")
    caught(check_refuses, AddsInPlace(TopK(0.05)), LAYOUT, match="state was touched")
    caught(check_sends_something, RoundsDown(LOW), 300, match="nothing was sent")
    caught(check_sends_something, ForgetsRounding(RoundsDown(0.003)), 300, match="nothing was sent")
