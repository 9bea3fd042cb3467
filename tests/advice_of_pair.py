"""Advice of the drop-in pair and of strategies around it."""

from __future__ import annotations

import numpy as np
import torch
from advice import ALL, INTEGERS, PRIVATE, PROMISE, Row, coded_sum, ended, quiet, row, same, system, trains
from flwr.app import Array, ArrayRecord, Context, RecordDict
from flwr.server import strategy as legacy
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedMedian
from round_paths import Personal
from toy import model

import fedcomp as fc
from fedcomp.strategies.server import Server
from fedcomp.systems import shared_support as systems
from fedcomp.systems.pair import Pair


class TwoRecords(FedAvg):
    """A server that sends something beside the model."""

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            message.content["beside"] = ArrayRecord({"x": Array(np.zeros(2, np.float32))})
        return messages


def keeps(name: str) -> bool:
    """Whether a step of torch's optimizer of this name is kept."""
    context, w = Context(0, 0, {}, RecordDict(), {}), torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(torch.optim, name)([w], lr=0.1)
    with fc.kept(context, optimizer):
        w.grad = torch.ones(3)
        optimizer.step(lambda: w.grad.sum())
    return bool(context.state)


def numbered() -> ArrayRecord:
    return ArrayRecord([array.numpy() for array in model().values()])


PAIR = (
    row(
        "has no hooks that {} could wrap; run it alone",
        lambda: fc.Compressed(fc.SharedSupport(fc.ScaleCom(0.1))),
        lambda: trains(fc.SharedSupport(fc.ScaleCom(0.1))),
    ),
    row(
        "a Flower Strategy instance: write {}(...)",
        lambda: fc.Compressed(FedAvg),
        lambda: trains(fc.Compressed(quiet())),
    ),
    row("import {}', and a ServerApp", lambda: fc.Compressed(legacy.FedAvg()), lambda: trains(fc.Compressed(quiet()))),
    row(
        "put one of the two around the strategy, with chain(...) for several steps",
        lambda: fc.Compressed(fc.Compressed(quiet(), fc.TopK(0.1)), fc.TopK(0.1)),
        lambda: trains(fc.Compressed(quiet(), fc.chain(fc.Clip(1e6), fc.TopK(0.1)), downlink=fc.TopK(0.5))),
    ),
    row(
        "checks single updates, which a coded sum does not show; leave guard out",
        lambda: coded_sum(fc.Compressed(quiet(), INTEGERS, guard=fc.Norms())),
        lambda: same(coded_sum(), quiet()),
    ),
    row(
        "exchanges per round; Flower's hooks offer one. Use its own strategy",
        lambda: fc.Compressed(quiet(), fc.PowerSGD(form="two-exchange")),
        lambda: trains(fc.SharedBasis(fc.PowerSGD(form="two-exchange"))),
    ),
    row(
        "is a downlink codec, not one for client updates; use downlink={}",
        lambda: fc.Compressed(quiet(), fc.Replay(fc.RandomProjection(64))),
        lambda: trains(fc.Compressed(quiet(), fc.RandomProjection(64), downlink=fc.Replay(fc.RandomProjection(64)))),
    ),
    row(
        "drops nothing, so there is nothing to remember; leave feedback=True out",
        lambda: fc.Compressed(quiet(), fc.Identity(), feedback=True),
        lambda: same(fc.Compressed(quiet(), fc.Identity()), quiet()),
    ),
    row(
        "looks at single updates, which a coded sum does not show; use one of {}",
        lambda: coded_sum(fc.Compressed(quiet(FedMedian), INTEGERS)),
        lambda: trains(coded_sum(fc.Compressed(quiet(FedAdam), INTEGERS))),
    ),
    row(
        "bounds every update itself, and a guard would make one client's",
        lambda: fc.Compressed(fc.DpFedAvg(quiet(), clip=1.0, **PROMISE), fc.TopK(0.1), guard=fc.Norms()),
        lambda: trains(fc.Compressed(fc.DpFedAvg(quiet(), clip=1.0, **PROMISE), fc.TopK(0.1)), PRIVATE),
    ),
    row(
        "looks at single updates. Use one of {}",
        lambda: fc.Compressed(quiet(FedMedian), fc.SignSGD(step=0.5)),
        lambda: trains(fc.Compressed(quiet(FedAvgM), fc.SignSGD(step=0.5))),
    ),
    row(
        "Set a downlink (Identity() for models without loss)",
        lambda: fc.Compressed(quiet(), fc.TopK(0.1), first_model_at_nodes=True),
        lambda: trains(
            fc.Compressed(quiet(), fc.TopK(0.1), downlink=fc.Identity(), first_model_at_nodes=True),
            [lambda: fc.compression(first_model=lambda *_: model())],
        ),
    ),
    row(
        "Name it with record=...; the others pass through untouched",
        lambda: ended(fc.Compressed(TwoRecords(**ALL), fc.QSGD(levels=7))),
        lambda: trains(fc.Compressed(quiet(), fc.QSGD(levels=7), record="arrays")),
    ),
    row(
        "Set a downlink (Identity() for models without loss)",
        lambda: Server(Pair(fc.TopK(0.1)), quiet(), first_model_at_nodes=True),
        lambda: trains(
            Server(Pair(fc.TopK(0.1)), quiet(), downlink=fc.Identity(), first_model_at_nodes=True),
            [lambda: fc.compression(first_model=lambda *_: model())],
        ),
    ),
    row(
        "Name it with record=...; the others pass through untouched",
        lambda: ended(Server(Pair(fc.QSGD(levels=7)), TwoRecords(**ALL))),
        lambda: trains(Server(Pair(fc.QSGD(levels=7)), TwoRecords(**ALL), record="arrays")),
    ),
    row(
        "shows no single updates, but {} looks at them; use one of",
        lambda: Server(systems.SharedSupport(fc.ScaleCom(0.1)), FedMedian(**ALL)),
        lambda: trains(Server(systems.SharedSupport(fc.ScaleCom(0.1)), quiet())),
    ),
    row(
        "Name the tensors (ArrayRecord(model.state_dict()), or a dictionary of Arrays)",
        lambda: ended(fc.Compressed(quiet(), fc.QSGD(levels=7)), start=numbered()),
        lambda: trains(fc.Compressed(quiet(), fc.QSGD(levels=7))),
    ),
    row(
        "training may collapse within a few rounds. Use EDEN() or QSGD(levels=7), or FedAdam",
        lambda: fc.Compressed(quiet(FedAdagrad), fc.TopK(0.01)),
        lambda: all(
            trains(fc.Compressed(inner, codec))
            for inner, codec in (
                (quiet(FedAdagrad), fc.EDEN()),
                (quiet(FedAdagrad), fc.QSGD(levels=7)),
                (quiet(FedAdam), fc.TopK(0.1)),
            )
        ),
    ),
    row(
        "has momentum, too: use FedAvg",
        lambda: fc.Compressed(quiet(FedAdam), fc.ErrorFeedback(fc.TopK(0.1), momentum=0.9)),
        lambda: trains(fc.Compressed(quiet(), fc.ErrorFeedback(fc.TopK(0.1)))),
    ),
    row(
        "what the rule discards is lost. Use RandomK or RandomBlock",
        lambda: fc.Compressed(quiet(FedMedian), fc.TopK(0.1)),
        lambda: all(
            trains(fc.Compressed(inner, codec))
            for inner, codec in (
                (quiet(FedMedian), fc.RandomK(0.5)),
                (quiet(FedMedian), fc.RandomBlock(0.5)),
                (quiet(FedMedian), fc.QSGD(7)),
                (quiet(FedMedian), fc.ScaledSign()),
                (quiet(), fc.TopK(0.1)),
            )
        ),
    ),
    row(
        "use a codec without votes, or PipelinedStrategy",
        lambda: fc.Buffered(fc.Compressed(quiet(), fc.SignSGD(0.5)), concurrency=3, buffer=2),
        lambda: (
            trains(fc.Buffered(fc.Compressed(quiet(), fc.QSGD(7)), concurrency=3, buffer=2))
            and trains(fc.PipelinedStrategy(fc.Compressed(quiet(), fc.SignSGD(0.5))))
        ),
    ),
    row(
        "which a buffer does not support; use PipelinedStrategy",
        lambda: fc.Buffered(fc.SharedSupport(fc.ScaleCom(0.1), **ALL), concurrency=3, buffer=2),
        lambda: trains(fc.PipelinedStrategy(fc.SharedSupport(fc.ScaleCom(0.1), **ALL), 1)),
    ),
    row(
        "write deadline=fc.Deadline(0.8)",
        lambda: fc.PipelinedStrategy(quiet(), width=1, deadline=0.8),
        lambda: trains(fc.PipelinedStrategy(quiet(), width=1, deadline=fc.Deadline(0.8))),
    ),
    row(
        "and rounds in flight do not see it; run it without",
        lambda: fc.PipelinedStrategy(fc.SharedBasis(fc.PowerSGD(2), **ALL)),
        lambda: trains(fc.SharedBasis(fc.PowerSGD(2), **ALL)),
    ),
    row(
        "sends models of their own to some nodes, and a buffer adds to one; use PipelinedStrategy",
        lambda: trains(fc.Buffered(fc.Compressed(Personal(**ALL), fc.QSGD(7)), concurrency=3, buffer=2)),
        lambda: trains(fc.PipelinedStrategy(fc.Compressed(Personal(**ALL), fc.QSGD(7)), 1)),
    ),
    row(
        "and the promise does not cover overlapping rounds; run it",
        lambda: fc.PipelinedStrategy(fc.DpFedAvg(quiet(), clip=1.0, **PROMISE)),
        lambda: trains(fc.DpFedAvg(quiet(), clip=1.0, **PROMISE), PRIVATE),
    ),
    row(
        "is not valid: write 'auto', or with a quantile and slack 'auto:0.9:2'",
        lambda: fc.Deadline.parse("auto:"),
        lambda: fc.Deadline.parse("auto") and fc.Deadline.parse("auto:0.9:2"),
    ),
    row(
        "which memory='aggregated' subtracts; use 1, or memory='local'",
        lambda: fc.SharedBasis(fc.PowerSGD(form="two-exchange", memory="aggregated"), server_lr=0.5),
        lambda: (
            trains(fc.SharedBasis(fc.PowerSGD(form="two-exchange", memory="aggregated"), server_lr=1.0))
            and trains(fc.SharedBasis(fc.PowerSGD(memory="local"), server_lr=0.5))
        ),
    ),
    row(
        "the mean that they are measured from; use 1, or center=False",
        lambda: fc.FittedBasis(fc.GradiVeQ(width=40, center=True), server_lr=0.5),
        lambda: (
            trains(fc.FittedBasis(fc.GradiVeQ(width=40, center=True), server_lr=1.0))
            and trains(fc.FittedBasis(fc.GradiVeQ(width=40, center=False), server_lr=0.5))
        ),
    ),
    row(
        "is a parameter of FedAvgM; use lr and momentum",
        lambda: fc.Nesterov(server_momentum=0.5),
        lambda: trains(fc.Compressed(fc.Nesterov(lr=0.9, momentum=0.5, **ALL), fc.TopK(0.1))),
    ),
    row(
        "Use an optimizer whose state consists of them, such as AdamW or SGD",
        lambda: keeps("LBFGS"),
        lambda: keeps("AdamW") and keeps("SGD"),
    ),
    row(
        "leave first_model_at_nodes=True out",
        lambda: fc.Conditional(fc.Compressed(quiet(), fc.TopK(0.1), fc.TopK(0.2), first_model_at_nodes=True)),
        lambda: trains(fc.Conditional(fc.Compressed(quiet(), fc.TopK(0.1), fc.TopK(0.2)))),
    ),
    row(
        "let it send small differences instead, with a sparse",
        lambda: fc.Conditional(system("choco")),
        lambda: system("choco", compressor="topk", **{"compressor.density": 0.1}),
    ),
)


ROWS: tuple[Row, ...] = (*PAIR,)
