"""The codecs, layouts and updates the shared protocol tests iterate over."""

from __future__ import annotations

import functools

import numpy as np

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
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
    chain,
)
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.factors.outer import OuterProducts
from fedcomp.factors.signed import SignedRows
from fedcomp.layout import Layout, SmallDense, Update
from fedcomp.privacy.bounded import BoundedFixedPoint
from fedcomp.privacy.votes import TopkSign
from fedcomp.rng import Key

KEY = Key(3, "codec", round=1, partition=2)

# Every registered codec stands here at least once; test_codec_protocol.py checks that.
EXAMPLES: tuple[Codec, ...] = (
    Identity(),
    TopK(0.05),
    TopK(0.2, scope="layer", values="bf16"),
    TopK(0.1, values="fp16", index="bitmap"),
    TopK(1.0),
    RandomK(0.1),
    RandomK(0.1, unbiased=True, scope="layer"),
    RandomK(0.3, unbiased=True, shared=False),
    QSGD(7, bucket=64),
    QSGD(1, bucket=512),
    SignSGD(0.01),
    SignSGD(2.0, scope="layer"),
    ScaledSign(),
    ScaledSign(scope="global", block=100),
    NormSign(),
    NormSign(scope="global", block=100),
    Dithering(),
    Dithering(bits=9),
    TopK(0.1, values="float64"),
    TernGrad(),
    TernGrad(clip=2.5, scope="global"),
    NaturalCompression(),
    STC(0.05),
    STC(0.6, scope="layer"),
    ErrorFeedback(ScaledSign()),
    ErrorFeedback(STC(0.05)),
    ErrorFeedback(SIDCo(0.05)),
    ErrorFeedback(KeyRegion(sparse_density=0.02)),
    TopK(0.05, warmup=3),
    DGC(0.05),
    DGC(0.1, nesterov=True, masking=False, warmup=0, clip=2.0, clients=4, scope="layer", values="bf16"),
    AdaComp(),
    AdaComp(bin=30, factor=3.0, guard=True),
    ChunkTop1(0.05),
    ChunkTop1(0.1, scope="global", values="bf16"),
    RandomBlock(0.1),
    RandomBlock(0.3, unbiased=True, scope="global", shared=False),
    ErrorFeedback(ChunkTop1(0.05, values="fp16")),
    ErrorFeedback(RandomBlock(0.2)),
    Threshold(2.0),
    Threshold(1.5, scope="layer", values="bf16", index="elias-fano"),
    SIDCo(0.05),
    SIDCo(0.02, family="exponential", stages=3, adapt="published", scope="layer", values="bf16"),
    SIDCo(0.1, family="gamma-pareto", adapt_first=True, values="fp16"),
    KeyRegion(),
    KeyRegion(0.2, 0.02, kappa=1.5, decay=0.5, scope="global", values="fp16"),
    FixedPoint(RandomK(0.1), clip=8192.0, levels=16384),
    FixedPoint(RandomBlock(0.3, scope="global"), clip=2048.0, levels=2048),
    ErrorFeedback(FixedPoint(RandomK(0.5, scope="layer"), clip=3.0, levels=100)),
    ModularSum(RandomK(0.1), clip=8192.0, levels=16384, summands=5),
    ModularSum(RandomBlock(0.3, scope="global"), clip=2048.0, levels=2048, summands=100, modulus=5000, allow_wrap=True),
    ErrorFeedback(ModularSum(RandomK(0.5, scope="layer"), clip=3.0, levels=100, summands=100)),
    ScaleCom(0.05),
    ScaleCom(0.1, beta=0.5, selector="chunk", values="bf16"),
    BoundedFixedPoint(RandomK(0.9), clip=4.0, levels=400, scale=128, sigma=20.0, least=8),
    BoundedFixedPoint(RandomK(0.4), clip=90.0, levels=900, scale=256, rotation=7, noise="skellam", sigma=50.0),
    ErrorFeedback(BoundedFixedPoint(RandomK(0.5), clip=30.0, levels=300, scale=100)),
    TopkSign(density=0.15),
    TopkSign(density=0.6, scope="layer", saturation=0.5),
    chain(Identity()),
    chain(Clip(0.5), TopK(0.1)),
    chain(Clip(0.75), TopK(0.2)),
    chain(Clip(2.0), ErrorFeedback(TopK(0.1))),
    TopK(0.05, values="q8"),
    TopK(0.3, scope="layer", values="q4"),
    TopK(0.1, values="sign", index="rice"),
    TopK(0.1, values="range8"),
    ErrorFeedback(ChunkTop1(0.05, values="range6")),
    ErrorFeedback(TopK(0.05, values="q2")),
    ErrorFeedback(STC(0.05, rest="q8")),
    ErrorFeedback(RandomK(0.3, values="q4")),
    ChunkTopK(0.1, chunk=64, values="q2"),
    ErrorFeedback(ChunkTopK(0.05, scope="global", rest="bf16")),
    DGC(0.05, values="q4", warmup=0),
    AdaComp(rest="q8"),
    ScaleCom(0.1, values="q8"),
    ErrorFeedback(TopK(0.05)),
    ErrorFeedback(TopK(0.1, scope="layer", values="fp16"), decay=0.9, beta=0.5, norm_guard=10.0, max_age=3),
    ErrorFeedback(TopK(0.05), momentum=0.9, nesterov=True),
    ErrorFeedback(RandomK(0.1), momentum=0.5, masking=False),
    ErrorFeedback(QSGD(3, bucket=32), beta=0.3),
    ErrorFeedback(TopK(0.05), memory="float16"),
    Domain(Rotation(seed=3), TopK(0.1)),
    Domain(DCT(16), TopK(0.2, scope="layer", values="bf16")),
    Domain(Rotation(scope="layer"), RandomK(0.3, unbiased=True)),
    Domain(DCT(64, scope="global"), ErrorFeedback(TopK(0.1))),
    ErrorFeedback(Domain(DCT(64, scope="global"), TopK(0.1))),
    Domain(Rotation(seed=1), SignSGD(0.01)),
    FFT(),
    FFT(0.1, values="float32", order="HWDF", schedule=((1, 0.4), (2, 0.2))),
    ErrorFeedback(FFT(0.2, values="range6")),
    TopK(0.05, schedule=((1, 0.3), (3, 0.1))),
    GradiVeQ(),
    GradiVeQ(64, order="FDHW", basis="per_slice", most=5, levels=7, memory=True, norm_guard=5.0),
    LGC(),
    LGC(0.1, beta=0.5, innovation=0.01, instance="server", ef="decoded", values="q8", raw=2),
    LowRank(),
    LowRank(3, min_rate=1.0),
    PowerSGD(),
    PowerSGD(1, form="two-exchange", memory="aggregated", min_rate=0.0, values="q8", norm_guard=5.0),
    Factors(),
    Factors(rank=3, iterations=1, theta=0.0, solver="power", values="q8"),
    Factors(mode="dad", i_know_inputs_are_visible=True),
    RandomProjection(),
    RandomProjection(5, scope="layer", scale="least"),
    RandomProjection(64, shared=True, clip=400.0),
    ErrorFeedback(RandomProjection(40, scale="least")),
    Replay(RandomProjection(3)),
    EDEN(),
    EDEN(3),
    EDEN(2, scope="layer"),
    EDEN(1, scale="least"),
    ErrorFeedback(EDEN(4, scale="least")),
    Auto(),
    Auto(0.1),
    Auto(4.0),
    Auto(feedback=True),
    ErrorFeedback(Auto(0.1, feedback=True)),
    FixedPoint(Domain(Rotation(seed=2), RandomK(0.5)), clip=2048.0, levels=2048),
)


def model(seed: int = 0) -> dict[str, np.ndarray]:
    """A small model: matrices of different scale, biases and statistics that travel dense, an integer buffer."""
    rng = np.random.default_rng(seed)
    return {
        "embed.weight": rng.standard_t(3, (40, 30)).astype(np.float32),
        "embed.bias": rng.normal(size=30).astype(np.float32),
        "norm.running_mean": rng.normal(size=30).astype(np.float32),
        "norm.num_batches_tracked": np.array(7),
        "head.weight": (0.01 * rng.normal(size=(50, 30))).astype(np.float32),
        "head.bias": np.zeros(50, np.float32),
    }


LAYOUTS: dict[str, Layout] = {
    "model": Layout.of(model(), SmallDense(share=1.0)),
    "flat": Layout.flat(1500),
    "one element": Layout.flat(1),
    "all dense": Layout.of(model(), SmallDense(min_size=10**6, share=1.0)),
}


WIDE = Layout.of(
    {"wide.weight": np.zeros((140, 150), np.float32), "wide.bias": np.zeros(150, np.float32)}, SmallDense(share=1.0)
)
"""A matrix both of whose sides are longer than what small exact solvers take."""

EMPTY = Layout.of({"nothing": np.zeros((0, 5), np.float32)}, SmallDense(share=1.0))
"""A tensor without elements, and nothing else."""


def structured(layout: Layout) -> dict[str, np.ndarray]:
    """By what they are: vectors as trained models produce them and random ones are not, float32."""
    rng, n = np.random.default_rng(5), layout.size
    places = np.arange(n)
    signs = np.where(rng.random(n) < 0.5, -1.0, 1.0)
    found = {
        "constant": np.ones(n),
        "one-hot": np.where(places == n // 3, -2.5, 0.0),
        "mask": np.where((places >= n // 4) & (places < n // 2), 1.0, 0.0),
        "signs": signs,
        "two magnitudes": np.where(places % 5 == 0, 3.0, -0.1),
        "two magnitudes among zeros": np.where(places % 7 == 1, 3.0, np.where(places % 3 == 0, 0.3, 0.0)),
        "ties": np.round(2.0 * rng.normal(size=n)),
        "denormal": np.full(n, 2.0**-149),
        "tiny": signs * 1e-38,
        "huge": signs * 1e37,
        "largest": signs * float(np.finfo(np.float32).max),
        "all exponents": rng.normal(size=n) * 10.0 ** rng.uniform(-30.0, 30.0, n),
    }
    matrices = {
        name: np.zeros(n) for name in ("rank two", "outer product of signs", "blocks", "diagonal", "huge rank one")
    }
    for t in layout.tensors:
        if len(t.shape) < 2 or not t.size:
            continue
        rows, columns = t.shape[0], t.size // t.shape[0]
        blocks = np.zeros((rows, columns))
        blocks[: rows // 3, : columns // 2] = 1.0
        blocks[rows // 2 :, columns // 3 :] = -2.0
        one = np.outer(np.where(rng.random(rows) < 0.5, -1.0, 1.0), np.where(rng.random(columns) < 0.5, -1.0, 1.0))
        two = rng.normal(size=(rows, 2)) @ rng.normal(size=(2, columns))
        for name, matrix in zip(matrices, (two, one, blocks, np.eye(rows, columns), 1e38 * one), strict=True):
            matrices[name][t.slice] = matrix.reshape(-1)
    return {name: vector.astype(np.float32) for name, vector in (found | matrices).items()}


@functools.cache
def _heavy_tailed(size: int, seed: int, scale: float) -> np.ndarray:
    vector = np.random.default_rng([seed, size]).standard_t(3, size) * scale
    return vector.astype(np.float32)


def update(layout: Layout, seed: int = 0, scale: float = 1.0) -> Update:
    """A heavy-tailed update for ``layout``."""
    return Update(_heavy_tailed(layout.size, seed, scale).copy(), layout)


def measured(layout: Layout, key: Key) -> Update:
    """An update whose matrices are slopes times signs of ``key``, beside inputs; the rest is heavy-tailed."""
    vector, outer = update(layout).vector, {}
    for t in layout.compressed:
        rows, columns = t.shape
        slopes, inputs = (_heavy_tailed(6 * n, n, 1.0).reshape(6, n) for n in (2, columns))
        outer[t.name] = OuterProducts.of_signed(SignedRows(slopes, key.u64(), t.name, rows), inputs)
        vector[t.slice] = outer[t.name].matrix().reshape(-1)
    return Update(vector, layout, outer)


def sent(codec: Codec, given: Update, key: Key = KEY) -> tuple[bytes, np.ndarray]:
    """The frame of a first round, and what arrives."""
    frame, _ = codec.encode(given, codec.init(given.layout), key)
    return frame, codec.decode(frame, given.layout)


def through(codec: Codec, vector: np.ndarray, key: Key = KEY) -> np.ndarray:
    """What arrives of a vector that is one tensor."""
    return sent(codec, Update(vector.astype(np.float32), Layout.flat(vector.size)), key)[1]
