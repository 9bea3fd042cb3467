"""Advice of error texts and warnings, one row each: what provokes it, and what comes of following it."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from flwr.server import strategy as legacy
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    Strategy,
)
from toy import client_app, fedavg, model, stack

import fedcomp as fc
from fedcomp.clients.client import client
from fedcomp.clients.coded.mod import coded
from fedcomp.clients.compressed import compression
from fedcomp.clients.edge import prepare
from fedcomp.clients.forward import forward_gradients
from fedcomp.clients.gradiveq import fitted_basis
from fedcomp.clients.lgc import learned_gradients
from fedcomp.clients.power_sgd import shared_basis
from fedcomp.clients.private.lsg import lsg
from fedcomp.clients.private.mod import private
from fedcomp.clients.private.topagg import votes_only
from fedcomp.clients.shared_support import shared_support
from fedcomp.codecs import (
    EDEN,
    LGC,
    QSGD,
    Clip,
    Domain,
    FixedPoint,
    GradiVeQ,
    Identity,
    ModularSum,
    NaturalCompression,
    PowerSGD,
    RandomK,
    RandomProjection,
    Replay,
    Rotation,
    ScaleCom,
    ScaledSign,
    SignSGD,
    TopK,
    chain,
)
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.coding.datacode import data_plan
from fedcomp.coding.decodability import decode_rate, loss_sets
from fedcomp.coding.gradcode import SCHEMES, Cyclic, FractionalRepetition, assignment
from fedcomp.coding.kernels.dispatch import TIERS, load, tiers
from fedcomp.coding.kernels.product import matmul, reduce
from fedcomp.coding.plan import shards
from fedcomp.errors import FedcompError
from fedcomp.experiments.systems import SYSTEMS
from fedcomp.flower.checkpoint import capture_strategy, restore_strategy
from fedcomp.flower.folder import StateFolder
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.record_dp import DpSgdPlan
from fedcomp.flower.rounds import Push, fit
from fedcomp.flower.wrapper import as_batch
from fedcomp.gossip.topology import Edges, topology_of
from fedcomp.kernels.tiers import ops
from fedcomp.layout import NONE_DENSE, EndsDense, Layout, TensorShape, Update
from fedcomp.privacy.adaptive import AdaptiveClip
from fedcomp.privacy.distributed import DistributedSum
from fedcomp.privacy.entropy import SeededEntropy
from fedcomp.privacy.events import Event
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.local import Privatise
from fedcomp.privacy.sampling import Sampling
from fedcomp.privacy.votes import TopkSign, topk_stochastic_sign
from fedcomp.rng import Key
from fedcomp.strategies.buffered import Buffered
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.conditional import Conditional
from fedcomp.strategies.deadlines import Deadline
from fedcomp.strategies.gcn.strategy import SkewedGCN
from fedcomp.strategies.gradiveq import FittedBasis
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.lgc import LearnedGradients
from fedcomp.strategies.pipelined import PipelinedStrategy
from fedcomp.strategies.power_sgd import SharedBasis
from fedcomp.strategies.private.distributed_dp import DistributedDp
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.local_dp import local_dp
from fedcomp.strategies.private.lsg import Lsg
from fedcomp.strategies.private.record_dp import RecordDp
from fedcomp.strategies.private.settings import LsgSettings, ShareSettings
from fedcomp.strategies.private.topagg import TopAgg
from fedcomp.strategies.shared_support import SharedSupport
from fedcomp.tasks.partition import parse_partitioner
from fedcomp.timing.links import parse_link

Followed = Callable[[Path], Any]
NODES = 4


@dataclass(frozen=True)
class Row:
    """One advice.

    Attributes
    ----------
    file, text : str
        Where it is written, and a part of it as it is written.
    provoke : callable
        Raises it, or has it logged.
    follow : callable
        Does what it says; returns whether that is right.
    long : bool
        Whether it takes more than a second.
    """

    file: str
    text: str
    provoke: Followed
    follow: Followed
    long: bool = False


def provoked(call: Followed, path: Path, caplog: Any) -> str:
    """Return the text of the error that is raised, else what is logged."""
    printed = io.StringIO()
    with caplog.at_level(logging.WARNING, "flwr.fedcomp"), contextlib.redirect_stderr(printed):
        try:
            call(path)
        except FedcompError as error:
            return str(error)
        except SystemExit:
            return " ".join(printed.getvalue().split())
    return "\n".join(record.getMessage() for record in caplog.records)


def quiet(kind: type[FedAvg] = FedAvg, **options: Any) -> FedAvg:
    return fedavg(fraction_evaluate=0.0, **options) if kind is FedAvg else kind(**{**ALL, **options})


ALL: dict[str, Any] = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}
HALVES = (compression,)


def ended(strategy: Strategy, halves: Any = (compression,), rounds: int = 2, start: Any = None, mods: Any = ()) -> Any:
    """Return the model after some rounds with the toy's clients."""
    app = client_app([*mods, *(half() for half in halves)])
    with InProcessGrid(app, NODES, seed=4) as grid:
        return fit(strategy, grid, model() if start is None else start, rounds, timeout=9.0).arrays


def trains(strategy: Strategy, halves: Any = (compression,), **options: Any) -> bool:
    """Whether the model of a run is finite and has moved."""
    after = stack(ended(strategy, halves, **options))
    return bool(np.isfinite(after).all() and np.abs(after).max() > 0)


def same(one: Strategy, other: Strategy, **options: Any) -> bool:
    """Whether two runs end with the same model but for rounding."""
    return bool(np.allclose(stack(ended(one, **options)), stack(ended(other, **options)), rtol=1e-4, atol=0.5))


CODED = (coded, compression)
PRIVATE = (compression, private)
PROMISE: dict[str, Any] = {"population": NODES, "delta": 1e-3, "insecure_deterministic": True, "noise_multiplier": 0.5}
INTEGERS = FixedPoint(RandomK(1.0), clip=1024.0, levels=1024)
PLAN = DpSgdPlan(noise_multiplier=1.5, rate=0.1, steps=3, delta=1e-5)
BALLOT = TopkSign(k=50)
LAYOUT = Layout.of({"w": np.zeros((40, 30), np.float32), "b": np.zeros(12, np.float32)}, NONE_DENSE)
VALUES = np.random.default_rng(1).standard_normal(LAYOUT.size).astype(np.float32)
KEY = Key(0, "uplink", 1, 0)


def decoded(codec: Any, values: Any = VALUES, layout: Layout = LAYOUT, state: Any = None) -> Any:
    """Return what comes out of a codec for one update."""
    before = codec.init(layout) if state is None else state
    return codec.decode(codec.encode(Update(values, layout), before, KEY)[0], layout)


def close(codec: Any, tolerance: float = 0.01, values: Any = VALUES, layout: Layout = LAYOUT) -> bool:
    return bool(np.allclose(decoded(codec, values, layout), values, atol=tolerance))


def points_the_same_way(codec: Any, layout: Layout = LAYOUT) -> bool:
    return float(decoded(codec, layout=layout) @ VALUES) > 0


def system(name: str, **settings: Any) -> Strategy:
    row = SYSTEMS[name]
    return row.build(row.resolve(settings), 0)


def row(file: str, text: str, provoke: Callable[[], Any], follow: Callable[[], Any], *, long: bool = False) -> Row:
    return Row(file, text, lambda _: provoke(), lambda _: follow(), long)


class TwoRecords(FedAvg):
    """A server that sends something beside the model."""

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            message.content["beside"] = ArrayRecord({"x": Array(np.zeros(2, np.float32))})
        return messages


def numbered() -> ArrayRecord:
    return ArrayRecord([array.numpy() for array in model().values()])


def coded_sum(inner: Strategy, **options: Any) -> CodedFedAvg:
    return CodedFedAvg(inner, construction="sumcode", **{"symbols": 2, "threshold": 1, **options})


PAIR = (
    row(
        "strategies/wrapping.py",
        "has no hooks that {} could stand around; run it by itself",
        lambda: Compressed(SharedSupport(ScaleCom(0.1))),
        lambda: trains(SharedSupport(ScaleCom(0.1)), (shared_support, compression)),
    ),
    row(
        "strategies/wrapping.py",
        "expected a Flower Strategy instance: write {}(...)",
        lambda: Compressed(FedAvg),
        lambda: trains(Compressed(quiet())),
    ),
    row(
        "strategies/wrapping.py",
        "Write 'from flwr.serverapp.strategy import {}', and a ServerApp",
        lambda: Compressed(legacy.FedAvg()),
        lambda: trains(Compressed(quiet())),
    ),
    row(
        "strategies/compressed.py",
        "put one Compressed around the strategy, with chain(...) for several steps",
        lambda: Compressed(Compressed(quiet(), TopK(0.1)), TopK(0.1)),
        lambda: trains(Compressed(quiet(), chain(Clip(1e6), TopK(0.1)), downlink=TopK(0.5))),
    ),
    row(
        "strategies/compressed.py",
        "judges single updates, of which a coded sum shows none; leave guard out",
        lambda: coded_sum(Compressed(quiet(), INTEGERS, guard=Norms())),
        lambda: same(coded_sum(Compressed(quiet(), INTEGERS)), quiet(), halves=CODED),
    ),
    row(
        "strategies/compressed.py",
        "exchanges per round; Flower's hooks offer one. Use its own strategy",
        lambda: Compressed(quiet(), PowerSGD(form="two-exchange")),
        lambda: trains(SharedBasis(PowerSGD(form="two-exchange")), (shared_basis, compression)),
    ),
    row(
        "strategies/compressed.py",
        "is for the way down, not for what clients send; use downlink={}",
        lambda: Compressed(quiet(), Replay(RandomProjection(64))),
        lambda: trains(Compressed(quiet(), RandomProjection(64), downlink=Replay(RandomProjection(64)))),
    ),
    row(
        "strategies/compressed.py",
        "leaves nothing out, so nothing is to be remembered; leave feedback=True out",
        lambda: Compressed(quiet(), Identity(), feedback=True),
        lambda: same(Compressed(quiet(), Identity()), quiet()),
    ),
    row(
        "strategies/sinks.py",
        "looks at single updates, of which a coded sum shows none; use one of {}",
        lambda: coded_sum(Compressed(quiet(FedMedian), INTEGERS)),
        lambda: trains(coded_sum(Compressed(quiet(FedAdam), INTEGERS)), CODED),
    ),
    row(
        "strategies/sinks.py",
        "bounds every update by itself, and a guard would make one client's",
        lambda: Compressed(DpFedAvg(quiet(), clip=1.0, **PROMISE), TopK(0.1), guard=Norms()),
        lambda: trains(Compressed(DpFedAvg(quiet(), clip=1.0, **PROMISE), TopK(0.1)), PRIVATE),
    ),
    row(
        "strategies/sinks.py",
        "looks at single updates. Use one of {}",
        lambda: Compressed(quiet(FedMedian), SignSGD(step=0.5)),
        lambda: trains(Compressed(quiet(FedAvgM), SignSGD(step=0.5))),
    ),
    row(
        "strategies/announcing.py",
        "Name a downlink, Identity() for models without loss",
        lambda: Compressed(quiet(), TopK(0.1), first_model_at_nodes=True),
        lambda: trains(
            Compressed(quiet(), TopK(0.1), downlink=Identity(), first_model_at_nodes=True),
            [lambda: compression(first_model=lambda *_: model())],
        ),
    ),
    row(
        "strategies/announcing.py",
        "Name it with record=...; the others pass through untouched",
        lambda: ended(Compressed(TwoRecords(**ALL), QSGD(levels=7))),
        lambda: trains(Compressed(quiet(), QSGD(levels=7), record="arrays")),
    ),
    row(
        "strategies/statistics.py",
        "Name the tensors (ArrayRecord(model.state_dict()), or a dictionary of Arrays)",
        lambda: ended(Compressed(quiet(), QSGD(levels=7)), start=numbered()),
        lambda: trains(Compressed(quiet(), QSGD(levels=7))),
    ),
    row(
        "strategies/pairings.py",
        "training may collapse within a few rounds. Use EDEN() or QSGD(levels=7), or FedAdam",
        lambda: Compressed(quiet(FedAdagrad), TopK(0.01)),
        lambda: all(
            trains(Compressed(inner, codec))
            for inner, codec in (
                (quiet(FedAdagrad), EDEN()),
                (quiet(FedAdagrad), QSGD(levels=7)),
                (quiet(FedAdam), TopK(0.1)),
            )
        ),
    ),
    row(
        "strategies/pairings.py",
        "has momentum, too: use FedAvg",
        lambda: Compressed(quiet(FedAdam), ErrorFeedback(TopK(0.1), momentum=0.9)),
        lambda: trains(Compressed(quiet(), ErrorFeedback(TopK(0.1)))),
    ),
    row(
        "strategies/pairings.py",
        "what the rule discards is lost. Use RandomK or RandomBlock",
        lambda: Compressed(quiet(FedMedian), TopK(0.1)),
        lambda: all(
            trains(Compressed(inner, codec))
            for inner, codec in (
                (quiet(FedMedian), RandomK(0.5)),
                (quiet(FedMedian), fc.RandomBlock(0.5)),
                (quiet(FedMedian), QSGD(7)),
                (quiet(FedMedian), ScaledSign()),
                (quiet(), TopK(0.1)),
            )
        ),
    ),
    row(
        "strategies/buffered.py",
        "use a codec without votes, or PipelinedStrategy",
        lambda: Buffered(Compressed(quiet(), SignSGD(0.5)), concurrency=3, buffer=2),
        lambda: (
            trains(Buffered(Compressed(quiet(), QSGD(7)), concurrency=3, buffer=2))
            and trains(PipelinedStrategy(Compressed(quiet(), SignSGD(0.5))))
        ),
    ),
    row(
        "strategies/pipelined.py",
        'stateless_clients=True if the app keeps nothing there, or use mode="cohort"',
        lambda: PipelinedStrategy(quiet(), mode="node"),
        lambda: (
            trains(PipelinedStrategy(quiet(), mode="node", stateless_clients=True))
            and trains(PipelinedStrategy(quiet(), mode="cohort"))
        ),
    ),
    row(
        "strategies/pipelined.py",
        'use Compressed(..., feedback=False) without downlink, or mode="cohort"',
        lambda: PipelinedStrategy(Compressed(quiet(), TopK(0.1)), mode="node", stateless_clients=True),
        lambda: (
            trains(
                PipelinedStrategy(Compressed(quiet(), TopK(0.1), feedback=False), mode="node", stateless_clients=True)
            )
            and trains(PipelinedStrategy(Compressed(quiet(), TopK(0.1)), mode="cohort"))
        ),
    ),
    row(
        "strategies/pipelined.py",
        "compensation is for the mean update, and {} looks at single ones; use one of",
        lambda: PipelinedStrategy(quiet(FedMedian), compensation=0.1),
        lambda: trains(PipelinedStrategy(quiet(), compensation=1e-9)),
    ),
    row(
        "strategies/overlapping.py",
        "which is not shown for overlapping rounds; run it",
        lambda: PipelinedStrategy(DpFedAvg(quiet(), clip=1.0, **PROMISE)),
        lambda: trains(DpFedAvg(quiet(), clip=1.0, **PROMISE), PRIVATE),
    ),
    row(
        "strategies/deadlines.py",
        "is not valid: write 'auto', or with a quantile and slack 'auto:0.9:2'",
        lambda: Deadline.parse("auto:"),
        lambda: Deadline.parse("auto") and Deadline.parse("auto:0.9:2"),
    ),
    row(
        "strategies/guard.py",
        "is not valid: give a finite number > 1",
        lambda: Norms(times_median=1.0),
        lambda: trains(Compressed(quiet(), guard=Norms(times_median=1e6))),
    ),
    row(
        "strategies/guard.py",
        "is not valid: give a whole number of rounds >= 1",
        lambda: Norms(window=0),
        lambda: trains(Compressed(quiet(), guard=Norms(window=1))),
    ),
    row(
        "strategies/power_sgd.py",
        "which memory='aggregated' subtracts; use 1, or memory='local'",
        lambda: SharedBasis(PowerSGD(form="two-exchange", memory="aggregated"), server_lr=0.5),
        lambda: (
            trains(
                SharedBasis(PowerSGD(form="two-exchange", memory="aggregated"), server_lr=1.0),
                (shared_basis, compression),
            )
            and trains(SharedBasis(PowerSGD(memory="local"), server_lr=0.5), (shared_basis, compression))
        ),
    ),
    row(
        "strategies/gradiveq.py",
        "the mean that they are measured from; use 1, or center=False",
        lambda: FittedBasis(GradiVeQ(width=40, center=True), server_lr=0.5),
        lambda: (
            trains(FittedBasis(GradiVeQ(width=40, center=True), server_lr=1.0), (fitted_basis, compression))
            and trains(FittedBasis(GradiVeQ(width=40, center=False), server_lr=0.5), (fitted_basis, compression))
        ),
    ),
    row(
        "strategies/lgc.py",
        "common node's latents, which ef='decoded' needs; use ef='mask'",
        lambda: LearnedGradients(LGC(0.1, instance="server", innovation=0.01, ef="decoded"), stale_leader=True),
        lambda: LearnedGradients(LGC(0.1, instance="server", innovation=0.01, ef="mask"), stale_leader=True),
    ),
    row(
        "strategies/conditional.py",
        "let it send small differences instead, with a sparse",
        lambda: Conditional(system("choco")),
        lambda: system("choco", compressor="topk", **{"compressor.density": 0.1}),
    ),
)

PRIVACY = (
    row(
        "strategies/private/promise.py",
        "A codec goes outside: Compressed({}(...), codec)",
        lambda: DpFedAvg(Compressed(quiet(), TopK(0.1)), clip=1.0, **PROMISE),
        lambda: trains(Compressed(DpFedAvg(quiet(), clip=1.0, **PROMISE), TopK(0.1)), PRIVATE),
    ),
    row(
        "strategies/private/promise.py",
        "make the inner strategy with fraction_evaluate=0.0",
        lambda: DpFedAvg(fedavg(), clip=1.0, **PROMISE),
        lambda: trains(DpFedAvg(fedavg(fraction_evaluate=0.0), clip=1.0, **PROMISE), PRIVATE),
    ),
    row(
        "strategies/private/promise.py",
        "leave it at 1.0 and give sampling=Sampling(...)",
        lambda: DpFedAvg(quiet(fraction_train=0.5), clip=1.0, **PROMISE),
        lambda: trains(
            DpFedAvg(quiet(fraction_train=1.0), clip=1.0, sampling=Sampling("poisson", rate=0.9), **PROMISE),
            PRIVATE,
            rounds=4,
        ),
    ),
    row(
        "strategies/private/promise.py",
        "is not known: give population=N",
        lambda: ended(DpFedAvg(quiet(), clip=1.0, **{**PROMISE, "population": 0}), PRIVATE),
        lambda: trains(DpFedAvg(quiet(), clip=1.0, **{**PROMISE, "population": NODES}), PRIVATE),
    ),
    row(
        "strategies/private/dp_fedavg.py",
        "adaptive clipping needs Gaussian noise; use noise='discrete_gaussian'",
        lambda: DpFedAvg(quiet(), clip=AdaptiveClip(count_noise=1.0), noise="skellam", **PROMISE),
        lambda: trains(
            DpFedAvg(quiet(), clip=AdaptiveClip(count_noise=1.0), noise="discrete_gaussian", **PROMISE), PRIVATE
        ),
    ),
    row(
        "strategies/private/flower_dp.py",
        "Put it inside: {}({}(FedAvg(...), ...), codec)",
        lambda: ended(DifferentialPrivacyServerSideFixedClipping(Compressed(quiet(), QSGD(7)), 0.1, 1.0, 4)),
        lambda: trains(Compressed(DifferentialPrivacyServerSideFixedClipping(quiet(), 0.1, 1.0, 4), QSGD(7))),
    ),
    row(
        "strategies/private/local_dp.py",
        "is the one that is not trusted. Use sampling='capped' or 'everyone'",
        lambda: local(sampling=Sampling("poisson", rate=0.5)),
        lambda: (
            trains(local(sampling=Sampling("capped", cap=9)), PRIVATE)
            and trains(local(sampling=Sampling("everyone")), PRIVATE)
        ),
    ),
    row(
        "strategies/private/lsg.py",
        "Lsg sends bytes of its own; use it without Compressed, or DpFedAvg with a codec",
        lambda: Compressed(Lsg(quiet(), LsgSettings(clip=1.0, rank=2), **PROMISE), TopK(0.1)),
        lambda: (
            trains(Lsg(quiet(), LsgSettings(clip=1.0, rank=2), **PROMISE), (lsg, private))
            and trains(Compressed(DpFedAvg(quiet(), clip=1.0, **PROMISE), TopK(0.1)), PRIVATE)
        ),
    ),
    row(
        "strategies/private/topagg.py",
        "is a threshold, which mode={} does not have; use mode='threshold'",
        lambda: TopAgg(quiet(), BALLOT, server_lr=0.1, mode="mean", beta=0.5, **PROMISE),
        lambda: trains(TopAgg(quiet(), BALLOT, server_lr=0.1, mode="threshold", beta=0.1, **PROMISE), (private,)),
    ),
    row(
        "strategies/private/distributed_dp.py",
        "use Sampling('capped') or everyone",
        lambda: shares(sampling=Sampling("poisson", rate=0.5)),
        lambda: trains(shares(sampling=Sampling("everyone")), CODED),
    ),
    row(
        "strategies/private/record_dp.py",
        "is no weighted mean; use one of {}, or Compressed around one",
        lambda: RecordDp(quiet(FedMedian), PLAN, records=100),
        lambda: RecordDp(quiet(), PLAN, records=100) and RecordDp(Compressed(quiet(), TopK(0.1)), PLAN, records=100),
    ),
    row(
        "strategies/private/record_dp.py",
        "evaluation on clients would release metrics of their records; make",
        lambda: RecordDp(fedavg(), PLAN, records=100),
        lambda: RecordDp(fedavg(fraction_evaluate=0.0), PLAN, records=100),
    ),
    row(
        "strategies/private/record_dp.py",
        "checks the updates: write Compressed(..., guard=...) around the mean",
        lambda: RecordDp(Compressed(quiet(), TopK(0.1)), PLAN, records=100, guard=Norms()),
        lambda: RecordDp(Compressed(quiet(), TopK(0.1), guard=Norms()), PLAN, records=100),
    ),
    row(
        "strategies/private/record_dp.py",
        "RecordDp inside of Compressed would book no training: put it outside",
        lambda: Compressed(RecordDp(quiet(), PLAN, records=100), TopK(0.1)),
        lambda: RecordDp(Compressed(quiet(), TopK(0.1)), PLAN, records=100),
    ),
    row(
        "strategies/private/record_dp.py",
        "the plan says; use one of the two",
        lambda: RecordDp(DpFedAvg(quiet(), clip=1.0, **PROMISE), PLAN, records=100),
        lambda: RecordDp(quiet(), PLAN, records=100) and DpFedAvg(quiet(), clip=1.0, **PROMISE),
    ),
)


def local(**options: Any) -> Strategy:
    policy = Privatise(1e4, 0.5, insecure_deterministic=True)
    return local_dp(quiet(), policy, QSGD(levels=7), population=NODES, delta=1e-3, **options)


def shares(**options: Any) -> Strategy:
    return DistributedDp(quiet(), ShareSettings(clip=500.0, tolerated=1), **PROMISE, **options)


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
        "strategies/coded/groups.py",
        "groups add integers, {} sends floating-point models; wrap it",
        lambda: CodedFedAvg(quiet(), code="mds", symbols=2, groups=2),
        lambda: same(
            CodedFedAvg(Compressed(quiet(), INTEGERS), code="mds", symbols=2, groups=2), quiet(), halves=CODED
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
        "strategies/coded/mixing.py",
        "mix=True combines what relays hold at random; code={} cannot, use 'rlnc'",
        lambda: CodedFedAvg(quiet(), mix=True, code="mds"),
        lambda: trains(CodedFedAvg(quiet(), mix=True, code="rlnc"), CODED),
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

SPARSE = ErrorFeedback(TopK(0.1))
DENSE = Layout.of({"w": np.zeros((40, 30), np.float32), "b": np.zeros(12, np.float32)}, lambda *_: 0.5)
HUGE = np.full(LAYOUT.size, 3e38, np.float32)
NAN = np.full(LAYOUT.size, np.nan, np.float32)


def damaged(codec: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    return codec.encode(Update(VALUES, LAYOUT), change(dict(codec.init(LAYOUT))), KEY)


CODECS = (
    row(
        "fedcomp/codecs/base.py",
        "Lower the learning rate or clip gradients before communicating",
        lambda: decoded(TopK(0.1), NAN),
        lambda: points_the_same_way(chain(Clip(1.0), TopK(0.1))),
    ),
    row(
        "fedcomp/codecs/domain.py",
        "overflows float32 when it is transformed; nothing was sent",
        lambda: decoded(Domain(Rotation(), TopK(0.1)), HUGE),
        lambda: points_the_same_way(chain(Clip(1.0), Domain(Rotation(), TopK(0.5)))),
    ),
    row(
        "fedcomp/codecs/domain.py",
        "put the domain inside: FixedPoint(Domain(transform, codec), ...)",
        lambda: Domain(Rotation(), FixedPoint(RandomK(1.0), clip=8.0)),
        lambda: close(FixedPoint(Domain(Rotation(), RandomK(1.0)), clip=8.0, levels=4096)),
    ),
    row(
        "fedcomp/codecs/fixedpoint.py",
        "has memory; put it outside: ErrorFeedback(FixedPoint(...))",
        lambda: FixedPoint(ErrorFeedback(RandomK(0.5)), clip=8.0),
        lambda: points_the_same_way(ErrorFeedback(FixedPoint(RandomK(0.5), clip=8.0))),
    ),
    row(
        "fedcomp/codecs/fixedpoint.py",
        "beyond any clip that suits the others; use unbiased=False",
        lambda: FixedPoint(RandomK(0.5, unbiased=True), clip=8.0),
        lambda: points_the_same_way(FixedPoint(RandomK(0.5, unbiased=False), clip=8.0)),
    ),
    row(
        "fedcomp/codecs/fixedpoint.py",
        "are integers on one grid. Use FixedPoint({}, clip=...)",
        lambda: coded_sum(Compressed(quiet(), RandomK(1.0))),
        lambda: same(
            coded_sum(Compressed(quiet(), FixedPoint(RandomK(1.0), clip=1024.0, levels=1024))), quiet(), halves=CODED
        ),
    ),
    row(
        "fedcomp/codecs/modular.py",
        "beyond 2**32; use fewer levels, or smaller weights",
        lambda: ModularSum(RandomK(1.0), clip=8.0, levels=1 << 14, summands=1 << 20),
        lambda: (
            close(ModularSum(RandomK(1.0), clip=8.0, levels=1 << 10, summands=1 << 20))
            and close(ModularSum(RandomK(1.0), clip=8.0, levels=1 << 14, summands=100))
        ),
    ),
    row(
        "fedcomp/codecs/modular.py",
        "leave it out, or let sums wrap with allow_wrap=True",
        lambda: ModularSum(RandomK(1.0), clip=8.0, levels=4096, summands=100, modulus=9000),
        lambda: (
            close(ModularSum(RandomK(1.0), clip=8.0, levels=4096, summands=100))
            and close(ModularSum(RandomK(1.0), clip=8.0, levels=4096, summands=100, modulus=9000, allow_wrap=True))
        ),
    ),
    row(
        "fedcomp/codecs/natural.py",
        "cannot be rounded up without bias; nothing was sent. Lower the learning rate",
        lambda: decoded(NaturalCompression(), HUGE),
        lambda: points_the_same_way(chain(Clip(1.0), NaturalCompression())),
    ),
    row(
        "fedcomp/codecs/positional.py",
        "but a codec with scope='global' treats the model as one vector; use scope='layer'",
        lambda: decoded(TopK(0.1, scope="global"), layout=DENSE),
        lambda: points_the_same_way(TopK(0.1, scope="layer"), DENSE) and points_the_same_way(TopK(0.1, scope="global")),
    ),
    row(
        "fedcomp/codecs/listed.py",
        "decides by itself how much it sends; use a policy of only None and 1.0",
        lambda: decoded(fc.codecs.Threshold(0.5, scope="layer"), layout=DENSE),
        lambda: points_the_same_way(fc.codecs.Threshold(0.5)),
    ),
    row(
        "fedcomp/codecs/memory.py",
        "holds no {} of this codec; start from init(layout)",
        lambda: damaged(SPARSE, lambda state: {}),
        lambda: points_the_same_way(SPARSE),
    ),
    row(
        "fedcomp/codecs/memory.py",
        "another model's state; start from init(layout)",
        lambda: decoded(SPARSE, state=SPARSE.init(Layout.flat(7))),
        lambda: points_the_same_way(SPARSE),
    ),
    row(
        "fedcomp/codecs/chain.py",
        "codec's state: start from init(layout)",
        lambda: decoded(chain(Clip(1.0), SPARSE), state={"x.memory": VALUES}),
        lambda: points_the_same_way(chain(Clip(1.0), SPARSE)),
    ),
    row(
        "fedcomp/codecs/topk.py",
        "is not valid: give pairs of a round and a density",
        lambda: TopK(0.1, schedule=((1, 2, 3),)),
        lambda: points_the_same_way(TopK(0.1, schedule=((1, 0.5), (3, 0.1)))),
    ),
    row(
        "fedcomp/codecs/scalecom.py",
        "filters a memory, but memory=False keeps none; leave beta at 1",
        lambda: ScaleCom(0.1, memory=False, beta=0.5),
        lambda: ScaleCom(0.1, memory=False, beta=1.0),
    ),
    row(
        "fedcomp/codecs/gradiveq.py",
        "is a form of its own; leave values={} out",
        lambda: GradiVeQ(levels=7, values="q8"),
        lambda: GradiVeQ(levels=7),
    ),
    row(
        "fedcomp/layout.py",
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
        "fedcomp/layout.py",
        "Convert it before it is sent (bfloat16 to float32, whole numbers to int32)",
        lambda: ended(Compressed(quiet(), TopK(0.1)), start=ArrayRecord({"c": Array(np.zeros(9, np.uint16))})),
        lambda: trains(
            Compressed(quiet(), TopK(0.1)),
            start=ArrayRecord({"w": Array(np.zeros(9, np.float32)), "n": Array(np.zeros(9, np.int32))}),
        ),
    ),
    row(
        "fedcomp/layout.py",
        "EndsDense decides about whole models; use fit(model)",
        lambda: EndsDense()("w", (9,), "float32"),
        lambda: EndsDense().fit({"w": TensorShape((9,), "float32")})("w", (9,), "float32") == 1.0,
    ),
    row(
        "fedcomp/versions.py",
        "already is error feedback on the downlink; pass the inner codec",
        lambda: Compressed(quiet(), TopK(0.1), downlink=ErrorFeedback(TopK(0.2))),
        lambda: trains(Compressed(quiet(), TopK(0.1), downlink=TopK(0.2))),
    ),
    row(
        "fedcomp/versions.py",
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

CLIENTS = (
    row(
        "clients/client.py",
        "stands twice among the halves of one app; leave one out",
        lambda: client(ClientApp(), only=["compression", "compression"]),
        lambda: client(ClientApp(), only=["compression"]),
    ),
    row(
        "clients/client.py",
        "this app came out of client() already; name all halves in one call",
        lambda: client(client(ClientApp()), only=["private"]),
        lambda: client(ClientApp(), only=["compression", "private"]),
    ),
    row(
        "clients/client.py",
        "write {}(), or its name in quotes",
        lambda: client(ClientApp(), only=[compression]),
        lambda: client(ClientApp(), only=[compression()]) and client(ClientApp(), only=["compression"]),
    ),
    row(
        "clients/client.py",
        "take it out of ",
        lambda: client(ClientApp(mods=[compression()])),
        lambda: client(ClientApp()),
    ),
    row(
        "clients/client.py",
        "does not work without {}; add it to only=[...]",
        lambda: client(ClientApp(), only=[votes_only(), "private"]),
        lambda: client(ClientApp(), only=[votes_only(), "private", "compression"]),
    ),
)

PRIVATE_PARTS = (
    row(
        "fedcomp/privacy/sampling.py",
        "say sampling='poisson', or leave the rate out",
        lambda: Sampling("everyone", rate=0.5),
        lambda: Sampling("poisson", rate=0.5) and Sampling("everyone"),
    ),
    row(
        "fedcomp/privacy/sampling.py",
        "does not fit Poisson sampling, whose rounds vary in size; use its rate",
        lambda: Sampling("poisson", rate=0.5).check("zero_out", count=3),
        lambda: Sampling("poisson", rate=0.5).check("zero_out") is None,
    ),
    row(
        "fedcomp/privacy/sampling.py",
        "sampling='poisson' with rate = count / population, or adjacency='replace'",
        lambda: Sampling().check("add_remove", count=3),
        lambda: [Sampling("poisson", rate=3 / 9).check("add_remove"), Sampling().check("replace", count=3)],
    ),
    row(
        "fedcomp/privacy/votes.py",
        "pass uniforms=Key(...) or an array, or stochastic=False",
        lambda: topk_stochastic_sign(VALUES, 10),
        lambda: all(
            np.count_nonzero(topk_stochastic_sign(VALUES, 10, **how)) == 10
            for how in ({"uniforms": KEY}, {"uniforms": np.full(10, 0.5)}, {"stochastic": False})
        ),
    ),
    row(
        "fedcomp/privacy/votes.py",
        "give either k or density, the number of votes",
        lambda: TopkSign(),
        lambda: decoded(TopkSign(k=10)).size and decoded(TopkSign(density=0.1)).size,
    ),
    row(
        "fedcomp/privacy/votes.py",
        "with at least one each; raise k, or use ",
        lambda: decoded(TopkSign(k=1, scope="layer")),
        lambda: decoded(TopkSign(k=2, scope="layer")).any() and decoded(TopkSign(k=1, scope="global")).any(),
    ),
    row(
        "fedcomp/privacy/votes.py",
        "use scope='layer', or a policy of only None and 1.0",
        lambda: decoded(TopkSign(k=10), layout=DENSE),
        lambda: decoded(TopkSign(k=10, scope="layer"), layout=DENSE).any() and decoded(TopkSign(k=10)).any(),
    ),
    row(
        "fedcomp/privacy/distributed.py",
        "shares of noise are integers: use noise='discrete_gaussian' or 'skellam'",
        lambda: noise_shares(noise="gaussian"),
        lambda: noise_shares(noise="discrete_gaussian") and noise_shares(noise="skellam"),
    ),
    row(
        "fedcomp/privacy/distributed.py",
        "Use adjacency='zero_out' or 'replace'",
        lambda: noise_shares(adjacency="add_remove"),
        lambda: noise_shares(adjacency="zero_out") and noise_shares(adjacency="replace"),
    ),
    row(
        "fedcomp/privacy/distributed.py",
        "nobody's is left to count on; lower tolerated, or ask more clients",
        lambda: noise_shares(tolerated=4),
        lambda: noise_shares(tolerated=1) and noise_shares(tolerated=4, contributors=6),
    ),
    row(
        "fedcomp/privacy/distributed.py",
        "Raise scale (now {}), or use noise='skellam'",
        lambda: noise_shares(noise_multiplier=0.01, scale=1),
        lambda: (
            noise_shares(noise_multiplier=0.01, scale=1 << 12)
            and noise_shares(noise_multiplier=0.01, scale=1, noise="skellam")
        ),
    ),
    row(
        "fedcomp/privacy/entropy.py",
        "Leave the seed out, or say insecure_deterministic=True",
        lambda: SeededEntropy(KEY),
        lambda: (
            SeededEntropy(KEY, insecure_deterministic=True).words(2).size == 2
            and trains(DpFedAvg(quiet(), clip=1.0, **{**PROMISE, "insecure_deterministic": False}), PRIVATE)
            and trains(DpFedAvg(quiet(), clip=1.0, seed=7, **PROMISE), PRIVATE)
        ),
    ),
)


def noise_shares(**options: Any) -> DistributedSum:
    given = {"noise_multiplier": 1.0, "clip": 1.0, "size": 100, "contributors": 4, "noise": "discrete_gaussian"}
    return DistributedSum(**{**given, **options})


GOOD = ("--superlink", "localhost:9092", "--partition", "0", "--of", "2", "--insecure")


def option(text: str, wrong: Any, right: Any) -> Row:
    """Return a row of the command line of a node; ``wrong`` and ``right`` may be functions of a folder."""

    def called(words: Any) -> Followed:
        return lambda path: prepare([*GOOD, *(words(path) if callable(words) else words)])

    return Row("clients/edge/options.py", text, called(wrong), called(right))


COMMAND = (
    option(
        "expected HOST:PORT without a scheme, e.g. 10.0.0.1:8000",
        ["--superlink", "http://10.0.0.1:8000"],
        ["--superlink", "10.0.0.1:8000"],
    ),
    option("it left a process that never connected again; use --give-up S", ["--max-wait", "9"], ["--give-up", "9"]),
    option(
        "--privacy-ledger FILE, or --state-dir DIR",
        ["--privacy-budget", "1.5"],
        lambda path: ["--privacy-budget", "1.5", "--privacy-ledger", str(path / "spent")],
    ),
    option(
        "--privacy-delta is of no use without --privacy-budget",
        ["--privacy-delta", "1e-5"],
        lambda path: ["--privacy-delta", "1e-5", "--privacy-budget", "1", "--state-dir", str(path)],
    ),
    option(
        "configuration cannot hold; choose another",
        lambda path: ["--state-dir", str(path / "a'b")],
        lambda path: ["--state-dir", str(path / "ab")],
    ),
    option(
        "--peer-announce and --peer-store are of no use without --peer",
        ["--peer-announce", "a.b:9500"],
        ["--peer-announce", "a.b:9500", "--peer", "0.0.0.0:9500"],
    ),
    option(
        "which others cannot dial; say where they can with --peer-announce",
        ["--peer", "0.0.0.0:9500"],
        ["--peer", "0.0.0.0:9500", "--peer-announce", "a.b:9500"],
    ),
)

LABELS = np.arange(60) % 6


def split(text: str, parts: int = 3, labels: Any = LABELS, **options: Any) -> bool:
    """Whether every example is in one partition."""
    given = {"n": len(LABELS), **options}
    found = parse_partitioner(text).assign(parts, KEY, labels=labels, **given)
    return len(found) == len(LABELS)


TASKS = (
    row(
        "fedcomp/tasks/partition.py",
        "classes; use more shards per client",
        lambda: split("shards:1"),
        lambda: split("shards:2"),
    ),
    row(
        "fedcomp/tasks/partition.py",
        "shards are too many for {} examples; use fewer partitions or shards per client",
        lambda: split("shards:40"),
        lambda: split("shards:4", 2) and split("shards:2"),
    ),
    row(
        "fedcomp/tasks/partition.py",
        "pieces are too many for {} examples; use fewer partitions or pieces per client",
        lambda: split("pieces:40"),
        lambda: split("pieces:40", 1) and split("pieces:2"),
    ),
    row(
        "fedcomp/tasks/partition.py",
        "this data has no natural ids; use 'iid', 'dirichlet:0.5' or 'shards:2'",
        lambda: split("natural"),
        lambda: split("iid") and split("dirichlet:0.5") and split("shards:2"),
    ),
    row(
        "fedcomp/tasks/partition.py",
        "iid needs the number of examples: give labels, ids or n",
        lambda: split("iid", labels=None, n=None),
        lambda: split("iid", n=None) and split("iid", labels=None) and split("iid", labels=None, n=None, ids=LABELS),
    ),
    row(
        "fedcomp/tasks/partition.py",
        "an example of this data has no single class; use 'natural'",
        lambda: split("shards:2", labels=None),
        lambda: split("natural", labels=None, ids=LABELS),
    ),
    row(
        "fedcomp/tasks/partition.py", "takes no number, got {}; write {}", lambda: split("iid:2"), lambda: split("iid")
    ),
    row(
        "fedcomp/tasks/partition.py",
        "were asked for; ",
        lambda: split("natural", 9, ids=LABELS),
        lambda: split("natural", 1, ids=LABELS) and split("natural", 6, ids=LABELS),
    ),
    row(
        "fedcomp/tasks/partition.py",
        "partitions at least {} each; ",
        lambda: split("iid", min_examples=50),
        lambda: split("iid", 1, min_examples=50) and split("iid", min_examples=20),
    ),
    row(
        "fedcomp/timing/links.py",
        "is not a bandwidth; write e.g. '10mbit', '250kbit' or '1.5g'",
        lambda: parse_link("fast"),
        lambda: [parse_link(text).up_bits_per_s for text in ("10mbit", "250kbit", "1.5g")] == [1e7, 2.5e5, 1.5e9],
    ),
    row(
        "fedcomp/timing/links.py",
        "is not a latency; write e.g. '20ms' or '0.5s'",
        lambda: parse_link("1mbit@soon"),
        lambda: (parse_link("1mbit@20ms").latency_s, parse_link("1mbit@0.5s").latency_s) == (0.02, 0.5),
    ),
)

BYTES = np.arange(12, dtype=np.uint8).reshape(3, 4)


def read_only() -> Any:
    array = np.zeros((3, 4), np.uint8)
    array.flags.writeable = False
    return array


IDENTITY = np.eye(3, dtype=np.uint8)

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


GOSSIP = (
    row(
        "fedcomp/gossip/topology.py",
        "fills no grid but 1 x {}; use ring, or ",
        lambda: topology_of("torus", 7),
        lambda: topology_of("ring", 7) and topology_of("torus", 8),
    ),
    row(
        "fedcomp/gossip/topology.py",
        "together may not be connected; ",
        lambda: topology_of("digraph:0.000001", 9).window,
        lambda: topology_of("digraph:0.5", 9).window,
    ),
    row(
        "fedcomp/gossip/topology.py",
        "takes no parameter; write {}",
        lambda: topology_of("ring:3", 5),
        lambda: topology_of("ring", 5),
    ),
    row(
        "fedcomp/gossip/topology.py",
        "every node keeps a share of its own; give edges to others only",
        lambda: topology_of("edges:0-0,0-1", 2),
        lambda: topology_of("edges:0-1", 2),
    ),
    row(
        "fedcomp/gossip/topology.py",
        "weights for {} edges; give one weight per edge",
        lambda: Edges(3, [(0, 1), (1, 2)], [0.3], directed=False),
        lambda: Edges(3, [(0, 1), (1, 2)], [0.3, 0.3], directed=False),
    ),
)


class Looping(FedAvg):
    """A server with a loop of its own."""

    def start(self, *arguments, **options):
        return super().start(*arguments, **options)


class Remembering(FedAvg):
    """A server that keeps something which is no plain data."""

    def __init__(self, **options):
        super().__init__(**options)
        self.kept = {object()}


class Stored(Remembering):
    """It says what of it is stored."""

    def state_dict(self):
        return {"kept": len(self.kept)}

    def load_state_dict(self, state):
        self.kept = {object() for _ in range(state["kept"])}


def started_again(other: bool) -> Any:
    strategy = SharedSupport(ScaleCom(0.1))
    with InProcessGrid(client_app([shared_support(), compression()]), NODES) as grid:
        arrays = strategy.start(grid, model(), num_rounds=2).arrays
        return strategy.start(grid, model(5.0) if other else arrays, num_rounds=2).arrays


def looped() -> bool:
    with InProcessGrid(client_app([compression()]), NODES) as grid:
        result = Compressed(Looping(**ALL)).start(grid, model(), num_rounds=2)
    return bool(np.abs(stack(result.arrays)).max() > 0)


def kept(strategy: Any) -> bool:
    """Whether what is stored of a strategy is there in another one."""
    state = capture_strategy(strategy)
    fresh = type(strategy)(**ALL)
    fresh.kept = set()
    restore_strategy(fresh, state)
    return len(fresh.kept) == 1


def folder(path: Path, mode: int) -> StateFolder:
    path = path / "state"
    path.mkdir()
    path.chmod(mode)
    return StateFolder(path, 0)


def below_a_file(path: Path) -> StateFolder:
    (path / "file").write_text("")
    return StateFolder(path / "file" / "state", 0)


def grid_of(partitions: int, **options: Any) -> InProcessGrid:
    return InProcessGrid(client_app(), partitions, **options)


def replaced_node() -> bool:
    with grid_of(2) as grid:
        grid.remove_node(grid.node_id_of(1))
        return grid.add_node(1) in set(grid.get_node_ids())


def ledger(**options: Any) -> PrivacyLedger:
    given = {"delta": 1e-5, "population": 10, "adjacency": "zero_out", "sampling": Sampling()}
    return PrivacyLedger(**{**given, **options})


NOISE = Event("gaussian", noise_multiplier=1.0)


def rounds_of(found: PrivacyLedger, rounds: int, nodes: Any = (1, 2), event: Event = NOISE) -> bool:
    for number in range(1, rounds + 1):
        found.record(event, round=number, participants=list(nodes))
    return found.epsilon() > 0


FLOWER = (
    row("fedcomp/flower/rounds.py", "which fit() would pass by; call its ", lambda: ended(Looping(**ALL)), looped),
    row(
        "fedcomp/flower/rounds.py",
        "to continue, start it with the arrays it ended with",
        lambda: started_again(True),
        lambda: (
            np.abs(stack(started_again(False))).max() > 0
            and trains(SharedSupport(ScaleCom(0.1)), (shared_support, compression), start=model(5.0))
        ),
    ),
    row(
        "fedcomp/flower/rounds.py",
        "of an exchange is not valid: give seconds > 0, or None",
        lambda: Push([], timeout=0.0),
        lambda: Push([], timeout=1.0).timeout == 1.0 and Push([]).timeout is None,
    ),
    row(
        "fedcomp/flower/wrapper.py",
        "messages is a {}; pass a list",
        lambda: as_batch(iter([])),
        lambda: as_batch([]) == [],
    ),
    row(
        "fedcomp/flower/grid.py",
        "Give InProcessGrid more nodes, or the strategy smaller min_available_nodes",
        lambda: ended(quiet(min_available_nodes=9)),
        lambda: trains(quiet(min_available_nodes=4)),
        long=True,
    ),
    row(
        "fedcomp/flower/nodes.py",
        "partition {} already has a node; remove it first",
        lambda: grid_of(2).add_node(1),
        replaced_node,
    ),
    row(
        "fedcomp/flower/checkpoint.py",
        "which cannot be stored; give the ",
        lambda: capture_strategy(Remembering(**ALL)),
        lambda: kept(Stored(**ALL)),
    ),
    Row(
        "fedcomp/flower/folder.py",
        "make it the node's own: chmod 700",
        lambda path: folder(path, 0o777),
        lambda path: folder(path / "x", 0o700) if (path / "x").mkdir() is None else None,
    ),
    Row(
        "fedcomp/flower/folder.py",
        "the state folder cannot be made: {}; name another one",
        below_a_file,
        lambda path: StateFolder(path / "other", 0),
    ),
    row(
        "clients/forward.py",
        "give objective=..., records=... for rounds with noise, or both",
        lambda: forward_gradients(),
        lambda: (
            forward_gradients(print) and forward_gradients(records=print) and forward_gradients(print, records=print)
        ),
    ),
    row(
        "clients/half.py",
        "where nothing checks its order; use ",
        lambda: learned_gradients()(None, None, None),
        lambda: client(ClientApp(), only=[learned_gradients(), "compression"]),
    ),
)

LEDGERS = (
    row(
        "fedcomp/privacy/ledger.py", "would satisfy it. Use at ", lambda: ledger(delta=0.2), lambda: ledger(delta=1e-2)
    ),
    row(
        "fedcomp/privacy/ledger.py",
        "participants, the population was declared as {}. Declare the number of all",
        lambda: rounds_of(ledger(population=1), 1),
        lambda: rounds_of(ledger(population=2), 1),
    ),
    row(
        "fedcomp/privacy/ledger.py",
        "Nothing was released: end the run, or plan it with more noise",
        lambda: rounds_of(ledger(budget=6.0), 9),
        lambda: rounds_of(ledger(budget=6.0), 9, event=Event("gaussian", noise_multiplier=9.0)),
    ),
    row(
        "fedcomp/privacy/ledger.py",
        "the cap is {}; choose participants by ",
        lambda: rounds_of(ledger(sampling=Sampling("capped", cap=1)), 2),
        lambda: rounds_of(ledger(sampling=Sampling("capped", cap=1)), 1),
    ),
    row(
        "fedcomp/privacy/adaptive.py",
        "Set count_noise above {}, or have more than {} clients",
        lambda: AdaptiveClip(count_noise=0.01).sum_multiplier(1.0, 4),
        lambda: AdaptiveClip(count_noise=0.6).sum_multiplier(1.0, 4) > 1.0,
    ),
)

ROWS: tuple[Row, ...] = (
    *(
        *PAIR,
        *PRIVACY,
        *CODING,
        *GRAPHS,
        *CODECS,
        *CLIENTS,
        *PRIVATE_PARTS,
        *COMMAND,
        *TASKS,
        *CODES,
        *GOSSIP,
        *FLOWER,
        *LEDGERS,
    ),
)
