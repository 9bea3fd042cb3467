"""Advice of the drop-in pair and of strategies around it."""

from __future__ import annotations

import numpy as np
from advice import ALL, CODED, INTEGERS, PRIVATE, PROMISE, Row, coded_sum, ended, quiet, row, same, system, trains
from flwr.app import Array, ArrayRecord
from flwr.server import strategy as legacy
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedMedian
from toy import model

import fedcomp as fc
from fedcomp.clients.compressed import compression
from fedcomp.codecs import (
    EDEN,
    QSGD,
    Clip,
    GradiVeQ,
    Identity,
    PowerSGD,
    RandomK,
    RandomProjection,
    Replay,
    ScaleCom,
    ScaledSign,
    SignSGD,
    TopK,
    chain,
)
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.conditional import Conditional
from fedcomp.strategies.deadlines import Deadline
from fedcomp.strategies.gradiveq import FittedBasis
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.overlap import Buffered, PipelinedStrategy
from fedcomp.strategies.power_sgd import SharedBasis
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.server import Server
from fedcomp.strategies.shared_support import SharedSupport
from fedcomp.systems import shared_support as systems
from fedcomp.systems.pair import Pair


class OwnModels(FedAvg):
    """A server that sends every other node a model of its own."""

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages[::2]:
            message.content["arrays"] = ArrayRecord({k: Array(v.numpy() + 1) for k, v in arrays.items()})
        return messages


class TwoRecords(FedAvg):
    """A server that sends something beside the model."""

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            message.content["beside"] = ArrayRecord({"x": Array(np.zeros(2, np.float32))})
        return messages


def numbered() -> ArrayRecord:
    return ArrayRecord([array.numpy() for array in model().values()])


PAIR = (
    row(
        "has no hooks that {} could stand around; run it by itself",
        lambda: Compressed(SharedSupport(ScaleCom(0.1))),
        lambda: trains(SharedSupport(ScaleCom(0.1)), (compression,)),
    ),
    row("a Flower Strategy instance: write {}(...)", lambda: Compressed(FedAvg), lambda: trains(Compressed(quiet()))),
    row("import {}', and a ServerApp", lambda: Compressed(legacy.FedAvg()), lambda: trains(Compressed(quiet()))),
    row(
        "put one Compressed around the strategy, with chain(...) for several steps",
        lambda: Compressed(Compressed(quiet(), TopK(0.1)), TopK(0.1)),
        lambda: trains(Compressed(quiet(), chain(Clip(1e6), TopK(0.1)), downlink=TopK(0.5))),
    ),
    row(
        "judges single updates, of which a coded sum shows none; leave guard out",
        lambda: coded_sum(Compressed(quiet(), INTEGERS, guard=Norms())),
        lambda: same(coded_sum(Compressed(quiet(), INTEGERS)), quiet(), halves=CODED),
    ),
    row(
        "exchanges per round; Flower's hooks offer one. Use its own strategy",
        lambda: Compressed(quiet(), PowerSGD(form="two-exchange")),
        lambda: trains(SharedBasis(PowerSGD(form="two-exchange")), (compression,)),
    ),
    row(
        "is for the way down, not for what clients send; use downlink={}",
        lambda: Compressed(quiet(), Replay(RandomProjection(64))),
        lambda: trains(Compressed(quiet(), RandomProjection(64), downlink=Replay(RandomProjection(64)))),
    ),
    row(
        "leaves nothing out, so nothing is to be remembered; leave feedback=True out",
        lambda: Compressed(quiet(), Identity(), feedback=True),
        lambda: same(Compressed(quiet(), Identity()), quiet()),
    ),
    row(
        "looks at single updates, of which a coded sum shows none; use one of {}",
        lambda: coded_sum(Compressed(quiet(FedMedian), INTEGERS)),
        lambda: trains(coded_sum(Compressed(quiet(FedAdam), INTEGERS)), CODED),
    ),
    row(
        "bounds every update by itself, and a guard would make one client's",
        lambda: Compressed(DpFedAvg(quiet(), clip=1.0, **PROMISE), TopK(0.1), guard=Norms()),
        lambda: trains(Compressed(DpFedAvg(quiet(), clip=1.0, **PROMISE), TopK(0.1)), PRIVATE),
    ),
    row(
        "looks at single updates. Use one of {}",
        lambda: Compressed(quiet(FedMedian), SignSGD(step=0.5)),
        lambda: trains(Compressed(quiet(FedAvgM), SignSGD(step=0.5))),
    ),
    row(
        "Name a downlink, Identity() for models without loss",
        lambda: Compressed(quiet(), TopK(0.1), first_model_at_nodes=True),
        lambda: trains(
            Compressed(quiet(), TopK(0.1), downlink=Identity(), first_model_at_nodes=True),
            [lambda: compression(first_model=lambda *_: model())],
        ),
    ),
    row(
        "Name it with record=...; the others pass through untouched",
        lambda: ended(Compressed(TwoRecords(**ALL), QSGD(levels=7))),
        lambda: trains(Compressed(quiet(), QSGD(levels=7), record="arrays")),
    ),
    row(
        "Name a downlink, Identity() for models without loss",
        lambda: Server(Pair(TopK(0.1)), quiet(), first_model_at_nodes=True),
        lambda: trains(
            Server(Pair(TopK(0.1)), quiet(), downlink=Identity(), first_model_at_nodes=True),
            [lambda: compression(first_model=lambda *_: model())],
        ),
    ),
    row(
        "Name it with record=...; the others pass through untouched",
        lambda: ended(Server(Pair(QSGD(levels=7)), TwoRecords(**ALL)), (compression,)),
        lambda: trains(Server(Pair(QSGD(levels=7)), TwoRecords(**ALL), record="arrays"), (compression,)),
    ),
    row(
        "has no single updates, which {} looks at; use one of",
        lambda: Server(systems.SharedSupport(ScaleCom(0.1)), FedMedian(**ALL)),
        lambda: trains(Server(systems.SharedSupport(ScaleCom(0.1)), quiet()), (compression,)),
    ),
    row(
        "Name the tensors (ArrayRecord(model.state_dict()), or a dictionary of Arrays)",
        lambda: ended(Compressed(quiet(), QSGD(levels=7)), start=numbered()),
        lambda: trains(Compressed(quiet(), QSGD(levels=7))),
    ),
    row(
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
        "has momentum, too: use FedAvg",
        lambda: Compressed(quiet(FedAdam), ErrorFeedback(TopK(0.1), momentum=0.9)),
        lambda: trains(Compressed(quiet(), ErrorFeedback(TopK(0.1)))),
    ),
    row(
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
        "use a codec without votes, or PipelinedStrategy",
        lambda: Buffered(Compressed(quiet(), SignSGD(0.5)), concurrency=3, buffer=2),
        lambda: (
            trains(Buffered(Compressed(quiet(), QSGD(7)), concurrency=3, buffer=2))
            and trains(PipelinedStrategy(Compressed(quiet(), SignSGD(0.5))))
        ),
    ),
    row(
        "which a buffer has no place for; use PipelinedStrategy",
        lambda: Buffered(SharedSupport(ScaleCom(0.1), **ALL), concurrency=3, buffer=2),
        lambda: trains(PipelinedStrategy(SharedSupport(ScaleCom(0.1), **ALL), 1)),
    ),
    row(
        "of which rounds in flight know nothing; run it without",
        lambda: PipelinedStrategy(SharedBasis(PowerSGD(2), **ALL)),
        lambda: trains(SharedBasis(PowerSGD(2), **ALL)),
    ),
    row(
        "sends models of their own to some nodes, and a buffer adds to one; use PipelinedStrategy",
        lambda: trains(Buffered(Compressed(OwnModels(**ALL), QSGD(7)), concurrency=3, buffer=2)),
        lambda: trains(PipelinedStrategy(Compressed(OwnModels(**ALL), QSGD(7)), 1)),
    ),
    row(
        "compensation is for the mean update, and {} looks at single ones; use one of",
        lambda: PipelinedStrategy(quiet(FedMedian), compensation=0.1),
        lambda: trains(PipelinedStrategy(quiet(), compensation=1e-9)),
    ),
    row(
        "which is not shown for overlapping rounds; run it",
        lambda: PipelinedStrategy(DpFedAvg(quiet(), clip=1.0, **PROMISE)),
        lambda: trains(DpFedAvg(quiet(), clip=1.0, **PROMISE), PRIVATE),
    ),
    row(
        "is not valid: write 'auto', or with a quantile and slack 'auto:0.9:2'",
        lambda: Deadline.parse("auto:"),
        lambda: Deadline.parse("auto") and Deadline.parse("auto:0.9:2"),
    ),
    row(
        "which memory='aggregated' subtracts; use 1, or memory='local'",
        lambda: SharedBasis(PowerSGD(form="two-exchange", memory="aggregated"), server_lr=0.5),
        lambda: (
            trains(SharedBasis(PowerSGD(form="two-exchange", memory="aggregated"), server_lr=1.0), (compression,))
            and trains(SharedBasis(PowerSGD(memory="local"), server_lr=0.5), (compression,))
        ),
    ),
    row(
        "the mean that they are measured from; use 1, or center=False",
        lambda: FittedBasis(GradiVeQ(width=40, center=True), server_lr=0.5),
        lambda: (
            trains(FittedBasis(GradiVeQ(width=40, center=True), server_lr=1.0), (compression,))
            and trains(FittedBasis(GradiVeQ(width=40, center=False), server_lr=0.5), (compression,))
        ),
    ),
    row(
        "leave first_model_at_nodes=True out",
        lambda: Conditional(Compressed(quiet(), TopK(0.1), TopK(0.2), first_model_at_nodes=True)),
        lambda: trains(Conditional(Compressed(quiet(), TopK(0.1), TopK(0.2))), (compression,)),
    ),
    row(
        "let it send small differences instead, with a sparse",
        lambda: Conditional(system("choco")),
        lambda: system("choco", compressor="topk", **{"compressor.density": 0.1}),
    ),
)


ROWS: tuple[Row, ...] = (*PAIR,)
