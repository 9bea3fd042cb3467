"""The statistical tests of the sparsifiers, 7.2: means, variances, average cases, estimates, adaptivity, draws.

Every draw is a pure function of a key: the same numbers on every machine. Standard errors are the exact ones. Where the
tests of each point are:

================  ====================================================================================================
unbiasedness      here, against the exact variance; all of float32: test_natural.py; whatever says that it is unbiased:
                  test_codec_protocol.py::test_declared_unbiasedness_holds
variance          here; worst cases: test_terngrad.py::test_the_bound_is_tight, test_qsgd.py, test_natural.py
CLT-k on average  here, through frames
SIDCo             here, through frames; among zeros: test_sidco.py::test_exact_zeros_do_not_spoil_the_gamma_fit
AdaComp           here
draws             here: layers, rounds and clients apart, no generator of the process touched
================  ====================================================================================================
"""

from __future__ import annotations

import functools
import itertools
import math
import random

import numpy as np
import pytest
from codec_examples import EXAMPLES, LAYOUTS
from codec_examples import update as an_update
from test_sidco import data
from wrong_codecs import ClipsInSecret, ComparesG, CutBlock, OneNorm, ReseedsAll, SeedsByName, caught

from fedcomp.codecs import (
    EDEN,
    QSGD,
    AdaComp,
    Auto,
    Codec,
    Dithering,
    Domain,
    Factors,
    NaturalCompression,
    RandomBlock,
    RandomK,
    RandomProjection,
    Replay,
    ScaleCom,
    SIDCo,
    TernGrad,
)
from fedcomp.codecs.scalecom import FixedSupport
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

KEY = Key(21, "codec", partition=1)
DRAWS = 4000
SIZE = 60


@functools.cache
def vector(size: int = SIZE) -> np.ndarray:
    """Heavy-tailed, with a few zeros and a largest value beyond 2.5 standard deviations."""
    x = np.random.default_rng(4).standard_t(3, size).astype(np.float32)
    x[5::20] = 0.0
    assert np.abs(x).max() > 3 * x.std()
    x.flags.writeable = False
    return x


@functools.cache
def draws(codec: Codec, size: int = SIZE) -> np.ndarray:
    """4000 independent decodings of ``vector(size)``, one per row.

    Codecs that round coordinate by coordinate draw side by side: copies in one vector have the scale of one copy.
    """
    x = vector(size)
    if isinstance(codec, TernGrad | Dithering | NaturalCompression) or (
        isinstance(codec, QSGD) and size % codec.bucket == 0
    ):
        layout = Layout.flat(DRAWS * size)
        frame, _ = codec.encode(Update(np.tile(x, DRAWS), layout), {}, KEY)
        return codec.decode(frame, layout).reshape(DRAWS, size).astype(np.float64)
    given = Update(x, Layout.flat(size))
    frames = (codec.encode(given, {}, KEY.at(round=r))[0] for r in range(DRAWS))
    return np.array([codec.decode(frame, given.layout) for frame in frames], np.float64)


def variances(codec: Codec, x: np.ndarray) -> np.ndarray:
    """The variance of each coordinate of an unbiased codec's output, by its formula."""
    a = np.abs(x.astype(np.float64))
    match codec:
        case RandomK() | CutBlock():
            (stretch,) = RandomK(codec.density).stretches(Layout.flat(x.size))
            count = codec.count(stretch) if isinstance(codec, RandomK) else int(codec.density * x.size)
            return a**2 * (x.size / count - 1)
        case QSGD():
            norms = np.sqrt(np.add.reduceat(a**2, range(0, x.size, codec.bucket))).repeat(codec.bucket)[: x.size]
            f = np.divide(a, norms, out=np.zeros_like(a), where=norms > 0) * codec.levels % 1.0
            return f * (1 - f) * (norms / codec.levels) ** 2
        case TernGrad():
            return a * (a.max() - a)
        case Dithering():
            f = a / a.max() * codec.levels % 1.0
            return f * (1 - f) * (a.max() / codec.levels) ** 2
        case NaturalCompression():
            low = np.where(a > 0, 2.0 ** np.floor(np.log2(np.where(a > 0, a, 1))), 0)
            return (a - low) * (2 * low - a)
    raise TypeError(repr(codec))


def check_unbiased(codec: Codec) -> None:
    """The mean of 4000 draws within five standard errors of x, at every coordinate."""
    x = vector()
    gap = np.abs(draws(codec).mean(axis=0) - x.astype(np.float64))
    error = np.sqrt(variances(codec, x) / DRAWS)
    assert (gap <= 5 * error + 1e-6 * np.abs(x)).all(), "biased"


UNBIASED: tuple[Codec, ...] = (
    RandomK(0.2, unbiased=True),
    RandomK(0.05, unbiased=True, scope="layer", shared=False),
    RandomBlock(0.2, unbiased=True),
    QSGD(4, bucket=20),
    QSGD(1, bucket=60),
    QSGD(127, bucket=30),
    TernGrad(),
    Dithering(1),
    Dithering(4),
    NaturalCompression(),
)


@pytest.mark.slow
@pytest.mark.parametrize("codec", UNBIASED, ids=repr)
def test_7_2_the_mean_of_draws_is_the_vector(codec: Codec) -> None:
    """Random-k and random block scaled, QSGD, dithering, TernGrad unclipped, natural: on average nothing is lost."""
    assert codec.unbiased
    check_unbiased(codec)


def test_7_2_every_unbiased_codec_is_drawn_above() -> None:
    """What says of itself that it is unbiased, Identity aside, is one of these classes.

    Of EDEN and domains no formula gives the variance of a coordinate: their draws are in test_codec_protocol.py, those
    of projections in test_projection.py, those of Auto, whose step depends on the vector, in test_auto.py.
    Of factors that are not reduced nothing is drawn.
    """
    unbiased = {type(c) for c in EXAMPLES if c.unbiased and not c.lossless}
    assert unbiased == {type(c) for c in UNBIASED} | {Auto, EDEN, Domain, Factors, RandomProjection, Replay}


@pytest.mark.slow
def test_7_2_finds_bias() -> None:
    """Clipping, which costs the largest coordinates; a block that does not wrap, which costs the first ones."""
    caught(check_unbiased, ClipsInSecret(), match="biased")
    caught(check_unbiased, CutBlock(0.2), match="biased")
    clipped = TernGrad(clip=2.5)
    assert not clipped.unbiased
    x = vector()
    largest = np.argmax(np.abs(x))
    assert abs(draws(clipped)[:, largest].mean()) == pytest.approx(2.5 * x.astype(np.float64).std(), rel=1e-6)
    assert abs(draws(clipped)[:, largest].mean()) < 0.8 * abs(x[largest])


@pytest.mark.slow
@pytest.mark.parametrize("codec", [*UNBIASED, RandomK(0.2), RandomBlock(0.05)], ids=repr)
def test_7_2_the_mean_error_is_the_formulas(codec: Codec) -> None:
    """An equality, from both sides: (n/k - 1)‖x‖², (1 - k/n)‖x‖² unscaled, Σ f(1-f)(‖x‖/s)², s‖x‖₁ - ‖x‖²; below ω."""
    x, layout = vector().astype(np.float64), Layout.flat(SIZE)
    energy = float(x @ x)
    if codec.unbiased:
        exact = float(variances(codec, vector()).sum())
        assert exact <= codec.variance(layout) * energy * (1 + 1e-6)
        if isinstance(codec, RandomK):  # of whichever vector
            assert exact == pytest.approx(codec.variance(layout) * energy)
    else:
        exact = (1 - codec.contraction(layout)) * energy
    if isinstance(codec, TernGrad):
        assert exact == pytest.approx(np.abs(x).max() * np.abs(x).sum() - energy)
    errors = ((draws(codec) - x) ** 2).sum(axis=1)
    assert abs(errors.mean() - exact) <= 5 * errors.std() / math.sqrt(DRAWS)


def check_variance_bound(codec: Codec, x: np.ndarray, rounds: int = 3) -> None:
    """‖C(x) - x‖² <= ω‖x‖² on average; for a long vector one draw is an average."""
    given = Update(x, Layout.flat(x.size))
    ratios = []
    for r in range(rounds):
        decoded = codec.decode(codec.encode(given, {}, KEY.at(round=r))[0], given.layout)
        error = (decoded.astype(np.float64) - x) ** 2
        ratios.append(error.sum() / (x.astype(np.float64) ** 2).sum())
    assert np.mean(ratios) <= codec.variance(given.layout) * (1 + 50 / math.sqrt(x.size)), (
        "beyond the declared variance"
    )


LONG = 1 << 17


@pytest.mark.slow
@pytest.mark.parametrize("codec", [QSGD(), QSGD(4), QSGD(1, bucket=64), TernGrad(), NaturalCompression()], ids=repr)
@pytest.mark.parametrize("kind", ["t(4)", "4/3", "equal"])
def test_7_2_declared_variances_hold_for_long_vectors(codec: Codec, kind: str) -> None:
    """Also at 4/3 times powers of two, where natural compression reaches its eighth, and for equal magnitudes."""
    rng = np.random.default_rng(5)
    x = {
        "t(4)": lambda: rng.standard_t(4, LONG),
        "4/3": lambda: 4 / 3 * 2.0 ** rng.integers(-9, 9, LONG),
        "equal": lambda: np.where(rng.random(LONG) < 0.5, 1.0, -1.0),
    }[kind]()
    check_variance_bound(codec, x.astype(np.float32))


def test_7_2_finds_one_norm_for_all() -> None:
    """One norm per vector exceeds the bound of buckets of 512 by far, at 127 levels and at 4."""
    x = np.random.default_rng(5).standard_t(4, LONG).astype(np.float32)
    caught(check_variance_bound, OneNorm(), x, match="beyond the declared")
    caught(check_variance_bound, OneNorm(4), x, match="beyond the declared")


@pytest.mark.slow
@pytest.mark.parametrize("missed", [0, 5, 10, 15, 20])
def test_7_2_a_support_that_misses_costs_what_the_average_case_says(missed: int) -> None:
    """With q of the k largest replaced by others at random the mean residual is at most q/k + (1 - q/k) gamma_0."""
    n, k = 200, 20
    layout = Layout.flat(n)
    x = Update(np.random.default_rng(0).standard_t(4, n).astype(np.float32), layout)
    exact = x.vector.astype(np.float64)
    energy, order = float(exact @ exact), np.argsort(-np.abs(exact))
    best = 1 - float((exact[order[:k]] ** 2).sum()) / energy
    rng = np.random.default_rng(missed)
    residuals = []
    for _ in range(1 if missed == 0 else 400):
        kept = rng.choice(order[:k], k - missed, replace=False)
        support = np.sort(np.concatenate([kept, rng.choice(order[k:], missed, replace=False)]))
        codec = FixedSupport((support,), 3)
        decoded = codec.decode(codec.encode(x, {}, KEY)[0], layout)
        residuals.append(float(((exact - decoded) ** 2).sum()) / energy)
    share = missed / k
    expected = 1 - (1 - share) * (1 - best) - missed / (n - k) * best
    error = 5 * np.std(residuals) / math.sqrt(len(residuals)) + 1e-9
    assert abs(np.mean(residuals) - expected) <= error
    assert np.mean(residuals) <= share + (1 - share) * best + 1e-9


def test_7_2_the_average_case_is_no_bound_for_one_support() -> None:
    """y = (10, 1, .9, .1) on a leader's set {1, 2} leaves .982, the formula says .504: no contraction is declared."""
    layout, codec = Layout.flat(4), ScaleCom(0.5)
    y = Update(np.float32([10, 1, 0.9, 0.1]), layout)
    leader, follower = (codec.begin(g, codec.init(layout), KEY) for g in (Update(np.float32([0, 3, 2, 1]), layout), y))
    supports = codec.choose(leader, layout, KEY)
    assert supports[0].tolist() == [1, 2]
    frame, _ = codec.send(follower, supports, 1, layout, KEY)
    exact = y.vector.astype(np.float64)
    residual = ((exact - codec.on(supports, 1).decode(frame, layout)) ** 2).sum() / (exact @ exact)
    gamma = 1 - (exact[:2] @ exact[:2]) / (exact @ exact)
    assert residual == pytest.approx(0.982, abs=1e-3)
    assert 0.5 + 0.5 * gamma == pytest.approx(0.504, abs=1e-3)
    assert codec.contraction(layout) is None


def check_estimate(codec: SIDCo, name: str, low: float, high: float) -> None:
    """What a first frame of a million coordinates holds, over what is wanted, without the net that cuts 2 k to k."""
    x = data(name)
    layout = Layout.flat(x.size)
    frame, state = codec.encode(Update(x, layout), codec.init(layout), KEY)
    sent = codec.open(frame, layout)[0].values.k
    assert low <= sent / (codec.density * x.size) <= high, f"{sent} coordinates"
    assert not any(SIDCo.events(state)["0"].values()), "the net caught it"


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_7_2_sidco_selects_what_is_wanted_of_laplace_data(stages: int) -> None:
    """With the family of the data, any number of exponential stages comes within 5 %."""
    for density in (0.001, 0.01):
        check_estimate(SIDCo(density, "exponential", stages), "laplace", 0.95, 1.05)


ROWS = (
    ("laplace", 0.001),
    ("normal", 0.01),
    ("t4", 0.001),
    ("t2.5", 0.001),
    ("layers x t4", 0.001),
    ("layers x laplace", 0.001),
)


@pytest.mark.parametrize(("name", "density"), ROWS)
def test_7_2_two_pareto_stages_select_about_what_is_wanted_of_anything(name: str, density: float) -> None:
    """Every row of the table of 3.3 lies within .6 and 1.3."""
    check_estimate(SIDCo(density, "pareto", 2), name, 0.6, 1.3)


def test_7_2_finds_a_single_exponential_stage() -> None:
    """It does for Laplace data only: more than twice too many of t(4), a fiftieth of normal data."""
    check_estimate(SIDCo(0.001, "exponential", 1), "laplace", 0.6, 1.3)
    caught(check_estimate, SIDCo(0.01, "exponential", 1), "normal", 0.6, 1.3, match="coordinates")
    caught(check_estimate, SIDCo(0.001, "exponential", 1), "t4", 0.6, 1.3, match="the net caught it")
    caught(check_estimate, SIDCo(0.001, "pareto", 1), "layers x laplace", 0.6, 1.3, match="the net caught it")


def check_adapts(codec: AdaComp) -> None:
    """Fewer elements per bin where dW opposes the residue than where it is independent, more where it agrees."""
    layout = Layout.flat(10_000)
    rng = np.random.default_rng(6)
    residue, noise = rng.normal(size=(2, layout.size)).astype(np.float32)

    def per_bin(correlation: float) -> float:
        dw = np.float32(0.3) * (np.float32(correlation) * residue + np.float32(math.sqrt(1 - correlation**2)) * noise)
        frame, _ = codec.encode(Update(dw, layout), {"memory": residue}, KEY)
        return codec.per_bin(frame, layout)["vector"]

    found = [per_bin(correlation) for correlation in (-0.95, -0.5, 0.0, 0.5, 0.95)]
    assert all(a < b for a, b in itertools.pairwise(found)), "does not follow the correlation"
    assert found[0] < 0.5 * found[2], "does not fall where dW opposes"
    assert found[4] > 1.4 * found[2], "does not rise where dW agrees"


@pytest.mark.parametrize("codec", [AdaComp(bin=50), AdaComp(bin=500), AdaComp(bin=50, factor=3.0)], ids=repr)
def test_7_2_adacomp_follows_the_correlation(codec: AdaComp) -> None:
    """Its count per bin falls when dW and residue are anti-correlated and rises when they are correlated."""
    check_adapts(codec)


def test_7_2_finds_adacomp_without_look_ahead() -> None:
    """G against the largest |G| is one per bin, whatever dW does."""
    caught(check_adapts, ComparesG(bin=50), match="does not follow")
    caught(check_adapts, AdaComp(bin=50, factor=1.0), match="does not follow")


def check_apart(codec: RandomK, rounds: int = 60) -> None:
    """Supports of layers, rounds and, unless shared, clients overlap as independent draws do."""
    layout = Layout.of({"ab": np.zeros((50, 50), np.float32), "ba": np.zeros((50, 50), np.float32)})
    given = an_update(layout)

    def supports(t: int, partition: int) -> list[np.ndarray]:
        found = codec.support(codec.encode(given, {}, KEY.at(round=t, partition=partition))[0], layout)
        return [found[found < 2500], found[found >= 2500] - 2500]

    runs = [(supports(t, 1), supports(t, 2)) for t in range(1, rounds + 1)]
    n, k = 2500, runs[0][0][0].size
    pairs = {
        "layers": [(mine[0], mine[1]) for mine, _ in runs],
        "rounds": [(a[0], b[0]) for (a, _), (b, _) in itertools.pairwise(runs)],
        "clients": [(mine[0], other[0]) for mine, other in runs],
    }
    if isinstance(codec, RandomBlock):  # two blocks on a circle: overlap i for two of the n distances, k for one
        spread = (2 * sum(i * i for i in range(k)) + k * k) / n - (k * k / n) ** 2
    else:  # hypergeometric
        spread = k * (k / n) * (1 - k / n) * (n - k) / (n - 1)
    for what, both in pairs.items():
        overlap = np.mean([np.intersect1d(a, b).size for a, b in both])
        if what == "clients" and codec.shared:
            assert overlap == k, "clients do not share"
        else:
            assert abs(overlap - k * k / n) <= 5 * math.sqrt(spread / rounds), f"{what} share their draws"


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("make", [RandomK, RandomBlock])
def test_7_2_draws_of_layers_rounds_and_clients_are_apart(make: type[RandomK], shared: bool) -> None:
    """A seed is for one layer of one round: names with the same letters do not share it."""
    check_apart(make(0.1, scope="layer", shared=shared))


def test_7_2_finds_seeds_by_name() -> None:
    """The sum of the bytes of "ab" is that of "ba"."""
    caught(check_apart, SeedsByName(0.1, scope="layer"), match="layers share")


def check_leaves_generators_alone(codec: Codec) -> None:
    """Neither numpy's nor Python's generator of the process is read or set."""
    layout = LAYOUTS["flat"]

    def seen() -> tuple:
        state = np.random.get_state()  # noqa: NPY002
        return state[1].tobytes(), state[2:], random.getstate()

    before = seen()
    codec.encode(an_update(layout), codec.init(layout), KEY)
    assert seen() == before, "a generator of the process was used"


@pytest.mark.slow
@pytest.mark.parametrize("codec", EXAMPLES, ids=repr)
def test_7_2_no_generator_of_the_process_is_touched(codec: Codec) -> None:
    """All randomness is the key's."""
    check_leaves_generators_alone(codec)


@pytest.mark.slow
def test_7_2_finds_a_reseeded_generator() -> None:
    """A draw that sets the user's generator first."""
    kept = np.random.get_state()  # noqa: NPY002
    caught(check_leaves_generators_alone, ReseedsAll(0.1), match="generator of the process")
    np.random.set_state(kept)  # noqa: NPY002
