"""Advice of coded rounds, graphs and codes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from advice import CODED, INTEGERS, PROMISE, Row, coded_sum, ended, local, quiet, row, same, shares, system, trains
from flwr.serverapp.strategy import (
    FedAdam,
    FedMedian,
)
from toy import model

import fedcomp as fc
from fedcomp.clients.coded.mod import coded
from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import private
from fedcomp.codecs import (
    QSGD,
    FixedPoint,
    ModularSum,
    RandomK,
    TopK,
    chain,
)
from fedcomp.coding.datacode import data_plan
from fedcomp.coding.decodability import decode_rate, loss_sets
from fedcomp.coding.gradcode import SCHEMES, Cyclic, FractionalRepetition, assignment
from fedcomp.coding.kernels.dispatch import TIERS, load, tiers
from fedcomp.coding.kernels.product import matmul, reduce
from fedcomp.coding.plan import shards
from fedcomp.kernels.tiers import ops
from fedcomp.privacy.local import Privatise
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.gcn.strategy import SkewedGCN
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.private.dp_fedavg import DpFedAvg

BYTES = np.arange(12, dtype=np.uint8).reshape(3, 4)


def read_only() -> Any:
    array = np.zeros((3, 4), np.uint8)
    array.flags.writeable = False
    return array


IDENTITY = np.eye(3, dtype=np.uint8)


CODING = (
    row(
        "strategies/coded/sums.py",
        "a coded sum adds integers, {} sends floating-point models; wrap it",
        lambda: coded_sum(quiet()),
        lambda: same(
            coded_sum(Compressed(quiet(), FixedPoint(RandomK(1.0), clip=1024.0, levels=1024))), quiet(), halves=CODED
        ),
    ),
    row(
        "strategies/coded/sums.py",
        "set threshold >= 1, so that T relays together learn nothing, or symbols >= 2",
        lambda: coded_sum(Compressed(quiet(), INTEGERS), symbols=1, threshold=0),
        lambda: (
            trains(coded_sum(Compressed(quiet(), INTEGERS), symbols=1, threshold=1), CODED)
            and trains(coded_sum(Compressed(quiet(), INTEGERS), symbols=2, threshold=0), CODED)
        ),
    ),
    row(
        "strategies/coded/sums.py",
        "mode='mask' hides updates behind masks that T relays must not know: set threshold",
        lambda: coded_sum(Compressed(quiet(), INTEGERS), mode="mask", threshold=0),
        lambda: trains(coded_sum(Compressed(quiet(), INTEGERS), mode="mask", threshold=1), CODED),
    ),
    row(
        "strategies/coded/sums.py",
        "set weighted=False, or use FixedPoint, which has none",
        lambda: coded_sum(Compressed(quiet(), ModularSum(RandomK(1.0), clip=1024.0, levels=1024))),
        lambda: (
            trains(
                coded_sum(Compressed(quiet(), ModularSum(RandomK(1.0), clip=1024.0, levels=1024)), weighted=False),
                CODED,
            )
            and trains(coded_sum(Compressed(quiet(), INTEGERS)), CODED)
        ),
    ),
    row(
        "strategies/coded/sums.py",
        "Use a model without running statistics and counters",
        lambda: ended(coded_sum(Compressed(quiet(), INTEGERS)), CODED, start=model(counter=True)),
        lambda: (
            trains(coded_sum(Compressed(quiet(), INTEGERS)), CODED)
            and trains(
                CodedFedAvg(Compressed(quiet(), INTEGERS), construction="relay", symbols=2),
                CODED,
                start=model(counter=True),
            )
        ),
    ),
    row(
        "strategies/coded/gradients.py",
        "means nothing to a gradient code; use losses=",
        lambda: CodedFedAvg(quiet(), construction="gradcode", symbols=3),
        lambda: CodedFedAvg(quiet(), construction="gradcode", losses=1),
    ),
    row(
        "strategies/coded/gradients.py",
        "put {} itself into CodedFedAvg, without Compressed",
        lambda: CodedFedAvg(Compressed(quiet(), TopK(0.1)), construction="gradcode", losses=1),
        lambda: CodedFedAvg(quiet(), construction="gradcode", losses=1),
    ),
    row(
        "strategies/coded/gradients.py",
        "of which a gradient code shows none; use one of {}",
        lambda: CodedFedAvg(quiet(FedMedian), construction="gradcode", losses=1),
        lambda: CodedFedAvg(quiet(FedAdam), construction="gradcode", losses=1),
    ),
    row(
        "strategies/coded/settings.py",
        "use arithmetic='float64', or scheme='fractional'",
        lambda: CodedFedAvg(
            quiet(), construction="gradcode", losses=1, approximate=True, arithmetic="gf31", scheme="cyclic"
        ),
        lambda: (
            CodedFedAvg(
                quiet(), construction="gradcode", losses=1, approximate=True, arithmetic="float64", scheme="cyclic"
            )
            and CodedFedAvg(
                quiet(), construction="gradcode", losses=1, approximate=True, arithmetic="gf31", scheme="fractional"
            )
        ),
    ),
    row(
        "strategies/coded/strategy.py",
        "are; use distributed_dp() or local_dp()",
        lambda: CodedFedAvg(DpFedAvg(quiet(), clip=1.0, **PROMISE), symbols=2),
        lambda: trains(shares(), CODED) and trains(CodedFedAvg(local(), symbols=2), (coded, compression, private)),
    ),
)


GRAPHS = (
    row(
        "strategies/gcn/strategy.py",
        "checks replies by itself: give it the guard, not SkewedGCN",
        lambda: SkewedGCN(Compressed(quiet(), TopK(0.1)), guard=Norms()),
        lambda: SkewedGCN(Compressed(quiet(), TopK(0.1), guard=Norms())),
    ),
    row(
        "strategies/gcn/strategy.py",
        "would not hold. Use an inner strategy without one",
        lambda: SkewedGCN(DpFedAvg(quiet(), clip=1.0, **PROMISE)),
        lambda: SkewedGCN(quiet()),
    ),
    row(
        "strategies/gcn/strategy.py",
        "promise would not hold. Use a codec that does not privatise",
        lambda: SkewedGCN(Compressed(quiet(), chain(Privatise(1.0, 0.5, insecure_deterministic=True), QSGD(7)))),
        lambda: SkewedGCN(Compressed(quiet(), QSGD(7))),
    ),
    row(
        "strategies/gcn/strategy.py",
        "measure no slopes; use Compressed with a codec",
        lambda: SkewedGCN(fc.ForwardGradients(quiet(), 8)),
        lambda: SkewedGCN(Compressed(quiet(), TopK(0.1))),
    ),
    row(
        "strategies/gossip/systems.py",
        "does not fit: {} has none; set momentum=0",
        lambda: system("beer", momentum=0.5),
        lambda: system("beer", momentum=0.0),
    ),
)


CODES = (
    row(
        "coding/gradcode.py",
        "and {} is no multiple of it; use a ",
        lambda: FractionalRepetition(5, 1),
        lambda: Cyclic(5, 1),
    ),
    row(
        "coding/gradcode.py",
        "unknown scheme {}; choose one of {}",
        lambda: assignment(6, 1, scheme="none"),
        lambda: [assignment(6, 1, scheme=scheme) for scheme in SCHEMES],
    ),
    row(
        "coding/kernels/product.py",
        "and no out was given; pass it",
        lambda: matmul(IDENTITY, BYTES, accumulate=True),
        lambda: (matmul(IDENTITY, BYTES, out=np.zeros((3, 4), np.uint8), accumulate=True) == BYTES).all(),
    ),
    row(
        "coding/kernels/product.py",
        "out is read-only; pass a writable array",
        lambda: matmul(IDENTITY, BYTES, out=read_only()),
        lambda: (matmul(IDENTITY, BYTES, out=np.zeros((3, 4), np.uint8)) == BYTES).all(),
    ),
    row(
        "coding/kernels/product.py",
        "would overwrite it while it is read; pass another array",
        lambda: matmul(IDENTITY, BYTES, out=BYTES),
        lambda: (matmul(IDENTITY, BYTES, out=np.zeros((3, 4), np.uint8)) == BYTES).all(),
    ),
    row(
        "coding/kernels/product.py",
        "has to be writable; pass a copy",
        lambda: reduce(read_only(), 3),
        lambda: reduce(read_only().copy(), 3) == 0,
    ),
    row(
        "coding/kernels/dispatch.py",
        "cannot run here: {}; use 'auto' or one of {}",
        lambda: load(next(tier for tier in TIERS if tier not in tiers())),
        lambda: all((matmul(IDENTITY, BYTES, tier=tier) == BYTES).all() for tier in ("auto", *tiers())),
    ),
    row(
        "coding/plan.py",
        "take fewer symbols, more relays or a lower target",
        lambda: shards(8, 0.5, most=9),
        lambda: shards(2, 0.5, most=20) and shards(8, 0.5, most=60) and shards(8, 0.5, most=20, target=0.5),
    ),
    row(
        "coding/decodability.py",
        "ways to lose {} of {} devices; use decode_rate() instead",
        lambda: loss_sets(60, 20),
        lambda: decode_rate(partial(data_plan, "gaussian", 60, 40), lost=20, trials=20),
    ),
    row(
        "fedcomp/kernels/tiers.py",
        "unknown kernel tier {}; use 'auto', 'numba' or 'numpy'",
        lambda: ops("none", 9),
        lambda: ops("auto", 9) and ops("numba", 9) and ops("numpy", 9),
    ),
)


ROWS: tuple[Row, ...] = (
    *CODING,
    *GRAPHS,
    *CODES,
)
