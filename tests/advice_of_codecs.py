"""Advice of codecs, layouts and versions."""

from __future__ import annotations

from typing import Any

import numpy as np
from advice import (
    CODED,
    DENSE,
    LAYOUT,
    VALUES,
    Row,
    coded_sum,
    damaged,
    decoded,
    ended,
    points_the_same_way,
    quiet,
    row,
    same,
    trains,
)
from flwr.app import Array, ArrayRecord

import fedcomp as fc
from fedcomp.codecs import (
    EDEN,
    QSGD,
    Clip,
    Domain,
    FixedPoint,
    GradiVeQ,
    ModularSum,
    NaturalCompression,
    RandomK,
    Rotation,
    ScaleCom,
    TopK,
    chain,
)
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.layout import NONE_DENSE, EndsDense, Layout, TensorShape
from fedcomp.strategies.compressed import Compressed


def close(codec: Any, tolerance: float = 0.01, values: Any = VALUES, layout: Layout = LAYOUT) -> bool:
    return bool(np.allclose(decoded(codec, values, layout), values, atol=tolerance))


SPARSE = ErrorFeedback(TopK(0.1))


HUGE = np.full(LAYOUT.size, 3e38, np.float32)


NAN = np.full(LAYOUT.size, np.nan, np.float32)


CODECS = (
    row(
        "Lower the learning rate or clip gradients before communicating",
        lambda: decoded(TopK(0.1), NAN),
        lambda: points_the_same_way(chain(Clip(1.0), TopK(0.1))),
    ),
    row(
        "overflows float32 when it is transformed; nothing was sent",
        lambda: decoded(Domain(Rotation(), TopK(0.1)), HUGE),
        lambda: points_the_same_way(chain(Clip(1.0), Domain(Rotation(), TopK(0.5)))),
    ),
    row(
        "put the domain inside: FixedPoint(Domain(transform, codec), ...)",
        lambda: Domain(Rotation(), FixedPoint(RandomK(1.0), clip=8.0)),
        lambda: close(FixedPoint(Domain(Rotation(), RandomK(1.0)), clip=8.0, levels=4096)),
    ),
    row(
        "has memory; put it outside: ErrorFeedback(FixedPoint(...))",
        lambda: FixedPoint(ErrorFeedback(RandomK(0.5)), clip=8.0),
        lambda: points_the_same_way(ErrorFeedback(FixedPoint(RandomK(0.5), clip=8.0))),
    ),
    row(
        "beyond any clip that suits the others; use unbiased=False",
        lambda: FixedPoint(RandomK(0.5, unbiased=True), clip=8.0),
        lambda: points_the_same_way(FixedPoint(RandomK(0.5, unbiased=False), clip=8.0)),
    ),
    row(
        "are integers on one grid. Use FixedPoint({}, clip=...)",
        lambda: coded_sum(Compressed(quiet(), RandomK(1.0))),
        lambda: same(
            coded_sum(Compressed(quiet(), FixedPoint(RandomK(1.0), clip=1024.0, levels=1024))), quiet(), halves=CODED
        ),
    ),
    row(
        "beyond 2**32; use fewer levels, or smaller weights",
        lambda: ModularSum(RandomK(1.0), clip=8.0, levels=1 << 14, summands=1 << 20),
        lambda: (
            close(ModularSum(RandomK(1.0), clip=8.0, levels=1 << 10, summands=1 << 20))
            and close(ModularSum(RandomK(1.0), clip=8.0, levels=1 << 14, summands=100))
        ),
    ),
    row(
        "leave it out, or let sums wrap with allow_wrap=True",
        lambda: ModularSum(RandomK(1.0), clip=8.0, levels=4096, summands=100, modulus=9000),
        lambda: (
            close(ModularSum(RandomK(1.0), clip=8.0, levels=4096, summands=100))
            and close(ModularSum(RandomK(1.0), clip=8.0, levels=4096, summands=100, modulus=9000, allow_wrap=True))
        ),
    ),
    row(
        "cannot be rounded up without bias; nothing was sent. Lower the learning rate",
        lambda: decoded(NaturalCompression(), HUGE),
        lambda: points_the_same_way(chain(Clip(1.0), NaturalCompression())),
    ),
    row(
        "but a codec with scope='global' treats the model as one vector; use scope='layer'",
        lambda: decoded(TopK(0.1, scope="global"), layout=DENSE),
        lambda: points_the_same_way(TopK(0.1, scope="layer"), DENSE) and points_the_same_way(TopK(0.1, scope="global")),
    ),
    row(
        "decides by itself how much it sends; use a policy of only None and 1.0",
        lambda: decoded(fc.codecs.Threshold(0.5, scope="layer"), layout=DENSE),
        lambda: points_the_same_way(fc.codecs.Threshold(0.5)),
    ),
    row(
        "codec; start from init(layout)", lambda: damaged(SPARSE, lambda state: {}), lambda: points_the_same_way(SPARSE)
    ),
    row(
        "another model's state; start from init(layout)",
        lambda: decoded(SPARSE, state=SPARSE.init(Layout.flat(7))),
        lambda: points_the_same_way(SPARSE),
    ),
    row(
        "codec's state: start from init(layout)",
        lambda: decoded(chain(Clip(1.0), SPARSE), state={"x.memory": VALUES}),
        lambda: points_the_same_way(chain(Clip(1.0), SPARSE)),
    ),
    row(
        "is not valid: give pairs of a round and a density",
        lambda: TopK(0.1, schedule=((1, 2, 3),)),
        lambda: points_the_same_way(TopK(0.1, schedule=((1, 0.5), (3, 0.1)))),
    ),
    row(
        "filters a memory, but memory=False keeps none; leave beta at 1",
        lambda: ScaleCom(0.1, memory=False, beta=0.5),
        lambda: ScaleCom(0.1, memory=False, beta=1.0),
    ),
    row("a form of its own; leave values={} out", lambda: GradiVeQ(levels=7, values="q8"), lambda: GradiVeQ(levels=7)),
    row(
        "Convert it before it is sent (bfloat16 to float32, complex numbers",
        lambda: ended(Compressed(quiet(), TopK(0.1)), start=ArrayRecord({"c": Array(np.zeros(9, np.complex64))})),
        lambda: (
            decoded(
                TopK(1.0),
                np.ones(18, np.float32),
                Layout.of({"c": np.zeros(9, np.complex64).view(np.float32)}, NONE_DENSE),
            ).sum()
            == 18
        ),
    ),
    row(
        "Convert it before it is sent (bfloat16 to float32, whole numbers to int32)",
        lambda: ended(Compressed(quiet(), TopK(0.1)), start=ArrayRecord({"c": Array(np.zeros(9, np.uint16))})),
        lambda: trains(
            Compressed(quiet(), TopK(0.1)),
            start=ArrayRecord({"w": Array(np.zeros(9, np.float32)), "n": Array(np.zeros(9, np.int32))}),
        ),
    ),
    row(
        "EndsDense decides about whole models; use fit(model)",
        lambda: EndsDense()("w", (9,), "float32"),
        lambda: EndsDense().fit({"w": TensorShape((9,), "float32")})("w", (9,), "float32") == 1.0,
    ),
    row(
        "already is error feedback on the downlink; pass the inner codec",
        lambda: Compressed(quiet(), TopK(0.1), downlink=ErrorFeedback(TopK(0.2))),
        lambda: trains(Compressed(quiet(), TopK(0.1), downlink=TopK(0.2))),
    ),
    row(
        'Use EDEN(scale="least"), TopK, RandomK(unbiased=False), or QSGD with more levels',
        lambda: Compressed(quiet(), downlink=QSGD(levels=1)),
        lambda: all(
            trains(Compressed(quiet(), downlink=down))
            for down in (
                EDEN(scale="least"),
                TopK(0.2),
                RandomK(0.2, unbiased=False),
                QSGD(levels=127),
                QSGD(levels=7, bucket=16),
            )
        ),
    ),
)


ROWS: tuple[Row, ...] = (*CODECS,)
