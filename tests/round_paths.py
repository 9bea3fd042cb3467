"""Every path on which updates reach a model, as one table: the strategy, and the app that answers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, FedTrimmedAvg, Result, Strategy
from toy import client_app

from fedcomp.asks import Frames
from fedcomp.clients.compressed import compression
from fedcomp.clients.half import ClientHalf
from fedcomp.clients.private.mod import private
from fedcomp.clients.private.topagg import votes_only
from fedcomp.clients.programs import Brought, bringing
from fedcomp.codecs import LGC, QSGD, FixedPoint, GradiVeQ, Identity, PowerSGD, RandomK, ScaleCom, SignSGD, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.layout import SmallDense, Update
from fedcomp.privacy.adaptive import AdaptiveClip
from fedcomp.privacy.local import Privatise
from fedcomp.privacy.votes import TopkSign
from fedcomp.program import Me
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.gradiveq import FittedBasis
from fedcomp.strategies.lgc import LearnedGradients
from fedcomp.strategies.power_sgd import SharedBasis
from fedcomp.strategies.private.distributed_dp import DistributedDp
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.local_dp import local_dp
from fedcomp.strategies.private.lsg import Lsg
from fedcomp.strategies.private.record_dp import RecordDp
from fedcomp.strategies.private.settings import ShareSettings
from fedcomp.strategies.private.topagg import TopAgg, topagg
from fedcomp.strategies.shared_support import SharedSupport
from fedcomp.systems.private.lsg import LowRank
from fedcomp.systems.private.record import Account, DpSgdPlan, Records

NODES = 5
PLAN = DpSgdPlan(noise_multiplier=1.5, rate=0.1, steps=3, delta=1e-5)
PROMISE: dict[str, Any] = {"population": NODES, "delta": 1e-3, "insecure_deterministic": True, "seed": 7}
NOISY = {**PROMISE, "noise_multiplier": 0.5}
BALLOT = TopkSign(k=50)
INTEGERS = FixedPoint(RandomK(1.0), clip=1024.0, levels=1024)


class Stepping(FedAvg):
    """A user's own strategy: it looks at every reply and lets Flower's mean do the rest."""

    def aggregate_train(self, server_round, replies):
        kept = list(replies)
        self.seen = [sorted(reply.content) for reply in kept if not reply.has_error()]
        return super().aggregate_train(server_round, kept)


class Personal(FedAvg):
    """Sends every other node a model of its own."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Any:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages[::2]:
            message.content["arrays"] = ArrayRecord({k: Array(v.numpy() + 1) for k, v in arrays.items()})
        return messages


def quiet(kind: type[FedAvg] = FedAvg, **options: Any) -> FedAvg:
    """Return one of Flower's strategies that trains on everybody and evaluates nowhere."""
    return kind(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0, **options)


def accounted() -> ClientHalf:
    """Return a half that says what a training of the app's own cost, as DP-SGD's does."""

    def data(msg: Message, context: Context) -> Brought:
        def noised(me: Me, plan: DpSgdPlan, learn: Callable[[], Update]) -> tuple[Update, Account, Frames]:
            total = int(me.kept.get("spent", b"0")) + plan.steps
            return learn(), Account(f"ledger {me.node}", plan.steps, total), {"spent": b"%d" % total}

        return Brought(noised)

    return bringing("accounted", Records.ID, data)


@dataclass(frozen=True)
class Path:
    """One path.

    Attributes
    ----------
    strategy : callable
        Makes it.
    app : callable
        Makes the app that answers, given the mods a test puts around it.
    updates_only : bool
        Whether nothing but the update of a reply is read.
    buffers : bool
        Whether the model may have tensors that travel as values.
    """

    strategy: Callable[[], Strategy]
    app: Callable[..., Any]
    updates_only: bool = False
    buffers: bool = True


def plain(*mods: Any) -> Callable[..., Any]:
    return lambda *outer: client_app([*outer, *mods])


def pair(inner: Callable[[], Strategy], codec: Any, **options: Any) -> Callable[[], Strategy]:
    return lambda: Compressed(inner(), codec, policy=DENSE_BIAS, **options)


def latents(codec: LGC) -> LearnedGradients:
    """Return LGC whose last stage begins with the second round, with the toy's one matrix coded."""
    return LearnedGradients(codec, warmup_rounds=0, training_rounds=1, policy=DENSE_BIAS)


COMPRESSED, PRIVATE = plain(compression()), plain(compression(), private())
SPARSE = ErrorFeedback(TopK(density=0.1))
DENSE_BIAS = SmallDense()
"""Of the model below the bias travels dense: paths are to bring both parts of an update."""

PATHS: dict[str, Path] = {
    "mean": Path(pair(quiet, SPARSE), COMPRESSED),
    "mean of whole models": Path(pair(quiet, Identity(), downlink=TopK(density=0.2)), COMPRESSED),
    "mean of votes": Path(pair(quiet, SignSGD(step=0.5)), COMPRESSED),
    "mean with momentum": Path(pair(lambda: quiet(FedAvgM, server_momentum=0.5), QSGD(levels=16)), COMPRESSED),
    "adaptive": Path(pair(lambda: quiet(FedAdam, eta=0.5), TopK(density=0.1)), COMPRESSED),
    "median": Path(pair(lambda: quiet(FedMedian), QSGD(levels=16)), COMPRESSED),
    "trimmed mean": Path(
        pair(lambda: quiet(FedTrimmedAvg, beta=0.2), Identity(), downlink=TopK(density=0.2)), COMPRESSED
    ),
    "a strategy of one's own": Path(pair(lambda: quiet(Stepping), RandomK(density=0.3)), COMPRESSED),
    "shared support": Path(lambda: SharedSupport(ScaleCom(density=0.05), policy=DENSE_BIAS), COMPRESSED),
    "shared basis": Path(lambda: SharedBasis(PowerSGD(rank=2), policy=DENSE_BIAS), COMPRESSED),
    "shared basis, two exchanges": Path(
        lambda: SharedBasis(PowerSGD(rank=2, form="two-exchange", memory="aggregated"), policy=DENSE_BIAS), COMPRESSED
    ),
    "fitted basis": Path(
        lambda: FittedBasis(GradiVeQ(width=40), sampling=3, compression=2, policy=DENSE_BIAS), COMPRESSED
    ),
    "fitted basis, shared grids": Path(
        lambda: FittedBasis(GradiVeQ(width=40, levels=127), sampling=3, compression=2, policy=DENSE_BIAS), COMPRESSED
    ),
    "latents in a ring": Path(lambda: latents(LGC(0.05, raw=0, ef="decoded")), COMPRESSED),
    "latents of a common node": Path(
        lambda: latents(LGC(0.05, raw=0, innovation=0.005, instance="server")), COMPRESSED
    ),
    "relay": Path(lambda: CodedFedAvg(Compressed(quiet(), SPARSE, policy=DENSE_BIAS), symbols=2), COMPRESSED),
    "coded sum": Path(
        lambda: CodedFedAvg(
            Compressed(quiet(), INTEGERS, policy=DENSE_BIAS), construction="sumcode", symbols=2, threshold=1
        ),
        COMPRESSED,
        buffers=False,
    ),
    "distributed noise": Path(
        lambda: DistributedDp(quiet(), ShareSettings(clip=500.0, tolerated=2), **NOISY),
        COMPRESSED,
        updates_only=True,
        buffers=False,
    ),
    "private mean": Path(
        pair(lambda: DpFedAvg(quiet(), clip=1e4, **NOISY), TopK(density=0.2)), PRIVATE, updates_only=True
    ),
    "private mean on a support of all": Path(
        pair(lambda: DpFedAvg(quiet(FedAdam), clip=1e4, **NOISY), RandomK(density=0.3), downlink=TopK(density=0.2)),
        PRIVATE,
        updates_only=True,
    ),
    "private mean, adaptive clip": Path(
        pair(lambda: DpFedAvg(quiet(), clip=AdaptiveClip(initial=1e4, count_noise=1.0), **NOISY), Identity()),
        PRIVATE,
        updates_only=True,
    ),
    "private mean alone": Path(lambda: DpFedAvg(quiet(), clip=1e4, **NOISY), PRIVATE, updates_only=True),
    "private votes": Path(
        lambda: topagg(quiet(), BALLOT, server_lr=0.25, policy=DENSE_BIAS, **NOISY),
        plain(votes_only(), compression(), private()),
        updates_only=True,
    ),
    "private votes alone": Path(
        lambda: TopAgg(quiet(), BALLOT, server_lr=0.25, **NOISY), plain(private()), updates_only=True
    ),
    "private factors": Path(
        lambda: Lsg(quiet(), LowRank(clip=2000.0, rank=5, keep=0.5, mask="noisy_magnitude"), **NOISY),
        PRIVATE,
        updates_only=True,
    ),
    "local privacy": Path(
        lambda: local_dp(
            quiet(),
            Privatise(1e4, 0.5, insecure_deterministic=True),
            TopK(density=0.2),
            population=NODES,
            delta=1e-3,
            seed=7,
            policy=DENSE_BIAS,
        ),
        PRIVATE,
        updates_only=True,
    ),
    "private records": Path(lambda: RecordDp(quiet(), PLAN, records=1000), plain(accounted(), compression())),
    "private records, compressed": Path(
        lambda: RecordDp(Compressed(quiet(), SPARSE, policy=DENSE_BIAS), PLAN, records=1000),
        plain(accounted(), compression()),
    ),
}


def run(
    path: Path, rounds: int, *, mods: Sequence[Any] = (), metered: bool = True, **engine: Any
) -> tuple[Strategy, Result]:
    """Run a path in process, ``mods`` around its clients; return its strategy and Flower's result."""
    strategy = path.strategy()
    arrays = ArrayRecord({"weight": Array(np.arange(1200, dtype=np.float32).reshape(40, 30) % 7 - 3)})
    arrays["bias"] = Array(np.zeros(12, np.float32))
    if path.buffers:
        arrays["steps"] = Array(np.array(0, np.int64))
    with InProcessGrid(path.app(*mods), NODES, seed=4, **engine) as grid:
        if not metered:
            return strategy, strategy.start(grid, arrays, num_rounds=rounds, timeout=9.0)
        return strategy, fit(strategy, MeteredGrid(grid, TrafficLedger()), arrays, rounds, timeout=9.0)
