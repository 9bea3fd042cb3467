"""Advice of codecs, layouts and versions."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
from advice import (
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
from fedcomp.codecs import auto
from fedcomp.kernels import contexts, tiers
from fedcomp.layout import NONE_DENSE, EndsDense, Layout, TensorShape


def close(codec: Any, tolerance: float = 0.01, values: Any = VALUES, layout: Layout = LAYOUT) -> bool:
    return bool(np.allclose(decoded(codec, values, layout), values, atol=tolerance))


SPARSE = fc.ErrorFeedback(fc.TopK(0.1))
HUGE = np.full(LAYOUT.size, 3e38, np.float32)
NAN = np.full(LAYOUT.size, np.nan, np.float32)


def without_compiled_code() -> None:
    auto._say_portable.cache_clear()
    with mock.patch.object(contexts, "compiled", return_value=False):
        fc.Auto().preview(np.ones(contexts.PORTABLE_MOST + 1))
    auto._say_portable.cache_clear()


CODECS = (
    row(
        "without bound; use Auto(feedback=True), or no error feedback",
        lambda: fc.ErrorFeedback(fc.Auto()),
        lambda: (
            points_the_same_way(fc.ErrorFeedback(fc.Auto(4.0, feedback=True))) and points_the_same_way(fc.Auto(4.0))
        ),
    ),
    row(
        "{} of Auto both set the budget; give one of them",
        lambda: fc.Auto(bits=1.0, bytes="20 kB"),
        lambda: fc.Auto(bits=1.0).budget(160_000) == fc.Auto(bytes="20 kB").budget(160_000) == 20_000,
    ),
    row(
        "which loses more; install fedcomp[fast]",
        without_compiled_code,
        lambda: tiers.has_numba() and contexts.compiled(),
    ),
    row(
        "unknown kernel tier {}; use 'auto', 'c', 'numba' or 'numpy'",
        lambda: contexts.tier_of(1, "fastest"),
        lambda: len({contexts.tier_of(1, tier) for tier in ("auto", "numba", "numpy")}) >= 2,
    ),
    row(
        "Lower the learning rate or clip gradients before communicating",
        lambda: decoded(fc.TopK(0.1), NAN),
        lambda: points_the_same_way(fc.chain(fc.Clip(1.0), fc.TopK(0.1))),
    ),
    row(
        "overflows float32 when it is transformed; nothing was sent",
        lambda: decoded(fc.Domain(fc.Rotation(), fc.TopK(0.1)), HUGE),
        lambda: points_the_same_way(fc.chain(fc.Clip(1.0), fc.Domain(fc.Rotation(), fc.TopK(0.5)))),
    ),
    row(
        "put the domain inside: FixedPoint(Domain(transform, codec), ...)",
        lambda: fc.Domain(fc.Rotation(), fc.FixedPoint(fc.RandomK(1.0), clip=8.0)),
        lambda: close(fc.FixedPoint(fc.Domain(fc.Rotation(), fc.RandomK(1.0)), clip=8.0, levels=4096)),
    ),
    row(
        "has memory; put it outside: ErrorFeedback(FixedPoint(...))",
        lambda: fc.FixedPoint(fc.ErrorFeedback(fc.RandomK(0.5)), clip=8.0),
        lambda: points_the_same_way(fc.ErrorFeedback(fc.FixedPoint(fc.RandomK(0.5), clip=8.0))),
    ),
    row(
        "beyond any clip that suits the others; use unbiased=False",
        lambda: fc.FixedPoint(fc.RandomK(0.5, unbiased=True), clip=8.0),
        lambda: points_the_same_way(fc.FixedPoint(fc.RandomK(0.5, unbiased=False), clip=8.0)),
    ),
    row(
        "are integers on one grid. Use FixedPoint({}, clip=...)",
        lambda: coded_sum(fc.Compressed(quiet(), fc.RandomK(1.0))),
        lambda: same(
            coded_sum(fc.Compressed(quiet(), fc.FixedPoint(fc.RandomK(1.0), clip=1024.0, levels=1024))), quiet()
        ),
    ),
    row(
        "beyond 2**32; use fewer levels, or smaller weights",
        lambda: fc.ModularSum(fc.RandomK(1.0), clip=8.0, levels=1 << 14, summands=1 << 20),
        lambda: (
            close(fc.ModularSum(fc.RandomK(1.0), clip=8.0, levels=1 << 10, summands=1 << 20))
            and close(fc.ModularSum(fc.RandomK(1.0), clip=8.0, levels=1 << 14, summands=100))
        ),
    ),
    row(
        "leave it out, or let sums wrap with allow_wrap=True",
        lambda: fc.ModularSum(fc.RandomK(1.0), clip=8.0, levels=4096, summands=100, modulus=9000),
        lambda: (
            close(fc.ModularSum(fc.RandomK(1.0), clip=8.0, levels=4096, summands=100))
            and close(
                fc.ModularSum(fc.RandomK(1.0), clip=8.0, levels=4096, summands=100, modulus=9000, allow_wrap=True)
            )
        ),
    ),
    row(
        "cannot be rounded up without bias; nothing was sent. Lower the learning rate",
        lambda: decoded(fc.NaturalCompression(), HUGE),
        lambda: points_the_same_way(fc.chain(fc.Clip(1.0), fc.NaturalCompression())),
    ),
    row(
        "but a codec with scope='global' treats the model as one vector; use scope='layer'",
        lambda: decoded(fc.TopK(0.1, scope="global"), layout=DENSE),
        lambda: (
            points_the_same_way(fc.TopK(0.1, scope="layer"), DENSE)
            and points_the_same_way(fc.TopK(0.1, scope="global"))
        ),
    ),
    row(
        "decides itself how much it sends; use a policy of only None and 1.0",
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
        lambda: decoded(fc.chain(fc.Clip(1.0), SPARSE), state={"x.memory": VALUES}),
        lambda: points_the_same_way(fc.chain(fc.Clip(1.0), SPARSE)),
    ),
    row(
        "is not valid: give pairs of a round and a density",
        lambda: fc.TopK(0.1, schedule=((1, 2, 3),)),
        lambda: points_the_same_way(fc.TopK(0.1, schedule=((1, 0.5), (3, 0.1)))),
    ),
    row(
        "filters a memory, but memory=False keeps none; leave beta at 1",
        lambda: fc.ScaleCom(0.1, memory=False, beta=0.5),
        lambda: fc.ScaleCom(0.1, memory=False, beta=1.0),
    ),
    row(
        "already sets the form; leave values={} out",
        lambda: fc.GradiVeQ(levels=7, values="q8"),
        lambda: fc.GradiVeQ(levels=7),
    ),
    row(
        "Convert it before it is sent (bfloat16 to float32, complex numbers",
        lambda: ended(fc.Compressed(quiet(), fc.TopK(0.1)), start=ArrayRecord({"c": Array(np.zeros(9, np.complex64))})),
        lambda: (
            decoded(
                fc.TopK(1.0),
                np.ones(18, np.float32),
                Layout.of({"c": np.zeros(9, np.complex64).view(np.float32)}, NONE_DENSE),
            ).sum()
            == 18
        ),
    ),
    row(
        "Convert it before it is sent (bfloat16 to float32, whole numbers to int32)",
        lambda: ended(fc.Compressed(quiet(), fc.TopK(0.1)), start=ArrayRecord({"c": Array(np.zeros(9, np.uint16))})),
        lambda: trains(
            fc.Compressed(quiet(), fc.TopK(0.1)),
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
        lambda: fc.Compressed(quiet(), fc.TopK(0.1), downlink=fc.ErrorFeedback(fc.TopK(0.2))),
        lambda: trains(fc.Compressed(quiet(), fc.TopK(0.1), downlink=fc.TopK(0.2))),
    ),
    row(
        'Use EDEN(scale="least"), TopK, RandomK(unbiased=False), or QSGD with more levels',
        lambda: fc.Compressed(quiet(), downlink=fc.QSGD(levels=1)),
        lambda: all(
            trains(fc.Compressed(quiet(), downlink=down))
            for down in (
                fc.EDEN(scale="least"),
                fc.TopK(0.2),
                fc.RandomK(0.2, unbiased=False),
                fc.QSGD(levels=127),
                fc.QSGD(levels=7, bucket=16),
            )
        ),
    ),
)


ROWS: tuple[Row, ...] = (*CODECS,)
