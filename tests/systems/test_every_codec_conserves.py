"""Every compressor in a pair loses nothing of what is lost, late, doubled, damaged or broken on the way.

On the driver in memory, as the contract; over messages the pair is the same bit for bit (``test_over_messages.py``).
"""

from __future__ import annotations

import pytest
from registry import ROUNDED, Entry
from test_contract import conserves

from fedcomp.codecs import (
    DCT,
    DGC,
    EDEN,
    FFT,
    STC,
    AdaComp,
    Auto,
    ChunkTop1,
    ChunkTopK,
    Codec,
    Domain,
    ErrorFeedback,
    Factors,
    FixedPoint,
    KeyRegion,
    LowRank,
    ModularSum,
    RandomBlock,
    RandomK,
    RandomProjection,
    Rotation,
    ScaledSign,
    SIDCo,
    TernGrad,
    Threshold,
    TopK,
    known,
)
from fedcomp.systems.pair import Pair

# Whatever they send of integer updates is integers: nothing is rounded anywhere.
EXACT: tuple[Codec, ...] = (
    TopK(0.02, warmup=10),
    RandomBlock(0.05),
    ChunkTop1(0.02),
    ChunkTopK(0.02, chunk=256),
    Threshold(1500.0),
    SIDCo(0.02, scope="layer"),
    KeyRegion(),
    DGC(0.02, momentum=0.0, warmup=10),
    FixedPoint(RandomK(0.05), clip=2.0**12, levels=2**11),
)
# They send a common magnitude or transform: each sum with the memory rounds.
NEAR: tuple[Codec, ...] = (
    AdaComp(bin=50),
    ModularSum(RandomK(0.05), clip=2.0**12, levels=2**11, summands=1),
    ScaledSign(),
    STC(0.02),
    TopK(0.02, values="q2"),
    TernGrad(clip=2.5),
    EDEN(2, scale="least"),
    Auto(4.0, feedback=True),
    RandomProjection(64, scale="least"),
    Domain(DCT(16), TopK(0.02)),
    Domain(Rotation(), TopK(0.02, values="q4")),
    FFT(0.05),
    LowRank(2),
    Factors(rank=2),
)
# Codecs without memory, wrappers, and those that are in the registry of systems or for systems of their own.
ELSEWHERE = {
    *("dithering", "natural", "normsign", "signsgd"),
    *("chain", "feedback"),
    *("bounded", "gradiveq", "identity", "lgc", "power-sgd", "qsgd", "randomk", "replay", "scalecom", "topagg"),
}


def test_every_new_codec_is_here() -> None:
    assert {codec.codec_id for codec in (*EXACT, *NEAR)} | ELSEWHERE >= set(known())


@pytest.mark.slow
@pytest.mark.parametrize("codec", [*EXACT, *NEAR], ids=repr)
def test_nothing_is_lost_but_roundings(codec: Codec) -> None:
    law = 0.0 if codec in EXACT else ROUNDED
    conserves(Entry(Pair(codec if codec.remembers else ErrorFeedback(codec)), law=law), "all")
