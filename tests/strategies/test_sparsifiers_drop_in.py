"""Every compressor in the drop-in pair survives lost, late, duplicated, damaged and crashed replies and wiped nodes."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message
from test_conservation import Sum, memory_of, residual
from toy import client_app, fedavg, model, put_sent_frame, stack

from fedcomp import wire
from fedcomp.clients.compressed import compression
from fedcomp.clients.memory import MEMORY
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
    Clip,
    Codec,
    Dithering,
    Domain,
    Factors,
    FixedPoint,
    KeyRegion,
    LowRank,
    ModularSum,
    NaturalCompression,
    NormSign,
    RandomBlock,
    RandomK,
    RandomProjection,
    Rotation,
    ScaledSign,
    SIDCo,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
    chain,
    known,
)
from fedcomp.flower.faults import RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.layout import SmallDense
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed

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
ROUNDED: tuple[Codec, ...] = (
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
# Without memory, or with momentum in it, where conservation is not about the updates.
OTHERS: tuple[Codec, ...] = (
    TernGrad(),
    Dithering(4),
    NormSign(),
    NaturalCompression(),
    RandomBlock(0.2, unbiased=True),
    EDEN(1),
    Auto(1.0),
    Domain(DCT(16), RandomK(0.2, unbiased=True)),
    SignSGD(0.5),
    chain(Clip(2000.0), SignSGD(0.5)),
    DGC(0.02, momentum=0.5, nesterov=True, warmup=3, clip=1e4, clients=4),
    EDEN(bits=2),
    RandomProjection(64),
    Domain(DCT(chunk=64), TernGrad()),
    FFT(0.1, order="HWDF", schedule=((1, 0.1), (5, 0.5), (15, 1.0))),
)
NODES, ROUNDS = 4, 24
FAULTS = {"lost_reply": 0.12, "duplicate": 0.1, "late": 0.1, "raise": 0.1, "corrupt": 0.05}


def test_every_new_codec_is_here() -> None:
    def ids(codec: Codec) -> set[str]:
        return {codec.codec_id, *(ids(codec.codec) if codec.codec_id in ("feedback", "chain") else ())}

    here = set().union(*map(ids, (*EXACT, *ROUNDED, *OTHERS)))
    elsewhere = {
        "bounded",
        "chain",
        "feedback",
        "gradiveq",
        "identity",
        "lgc",
        "power-sgd",
        "qsgd",
        "randomk",
        "replay",
        "scalecom",
        "topagg",
    }
    assert here | elsewhere >= set(known())


class Steps(Sum):
    """Leaves the model at zero, so that a reply is the toy's integers, exactly; keeps the largest value."""

    largest = 0.0

    def aggregate_train(self, server_round, replies):
        kept = list(replies)
        for reply in kept:
            if not reply.has_error():
                decoded = stack(next(iter(reply.content.array_records.values())))
                self.largest = max(self.largest, float(np.abs(decoded).max()))
        super().aggregate_train(server_round, kept)
        return self.base, None


def account(codec: Codec) -> tuple[np.ndarray, float, Compressed]:
    """Run under faults and wipes; return made - delivered - owed per partition, and the largest value in any sum."""
    plan = RandomFaults(Key(11, "faults"), FAULTS, pushes=1)
    grid = InProcessGrid(client_app([compression()]), NODES, seed=5, fault=plan)
    strategy = Compressed(Steps(), codec)
    missing = {p: np.zeros(1212) for p in range(NODES)}
    nodes = list(grid.get_node_ids())
    partition = {n: int(grid.context(n).node_config["partition-id"]) for n in nodes}
    peak = 0.0

    def settle(node: int) -> None:
        context = grid.context(node)
        if "toy.sum" in context.state:
            missing[partition[node]] += context.state.array_records["toy.sum"]["sum"].numpy()
        missing[partition[node]] -= residual(context, strategy, node)

    wipes = 0
    for round_ in range(1, ROUNDS + 1):
        replies = grid.send_and_receive(strategy.configure_train(round_, model(), ConfigRecord(), grid), timeout=9)
        strategy.aggregate_train(round_, replies)
        for node in nodes:
            held = grid.context(node).state.array_records.get(MEMORY)
            if held is not None:
                peak = max(peak, float(np.abs(memory_of({k: v.numpy() for k, v in held.items()})).max()))
            if Key(13, "wipe", round_, partition[node]).uniform(1)[0] < 0.05:
                settle(node)
                grid.wipe(node)
                wipes += 1
    for node in nodes:
        settle(node)
    assert wipes >= 3
    reports = strategy.reports.values()
    assert sum(r.lost for r in reports) >= 10
    assert sum(len(r.refused) for r in reports) >= 10
    assert sum(len(r.rolled_back) for r in reports) >= 10
    assert sum(r.duplicates for r in reports) >= 5
    assert sum(r.compressed for r in reports) >= 40
    for p in missing:
        missing[p] -= strategy.delivered[p]
        assert np.abs(strategy.delivered[p]).max() > 1000
    return np.array(list(missing.values())), peak + strategy.largest + 1000.0, strategy


@pytest.mark.slow
@pytest.mark.parametrize("codec", EXACT, ids=repr)
def test_nothing_is_lost(codec: Codec) -> None:
    """For every life of every node: updates made = delivered + owed, exactly."""
    missing, _, strategy = account(codec)
    np.testing.assert_array_equal(missing, 0.0)
    assert strategy.codec.remembers


@pytest.mark.slow
@pytest.mark.parametrize("codec", ROUNDED, ids=repr)
def test_nothing_is_lost_but_roundings(codec: Codec) -> None:
    """A round adds the update, takes out what was sent and perhaps puts it back: three roundings, each of at most 2⁻²⁴
    of the largest sum."""
    missing, largest, _ = account(codec)
    assert np.abs(missing).max() <= 3 * ROUNDS * 2.0**-24 * largest
    assert 3 * ROUNDS * 2.0**-24 * largest < 5.0, "a lost update of up to 1000 would show"


def test_a_client_cannot_go_on_with_the_first_rounds_density() -> None:
    """After the warm-up as many values as in it are refused, although they would still open."""
    honest = client_app([compression()])

    def app(msg: Message, context: Context) -> Message:
        reply = honest(msg, context)
        if context.node_config["partition-id"] == 1:
            many = [wire.sparse((1200,), np.arange(120), np.ones(120, np.float32)), wire.dense(np.ones(12, np.float32))]
            put_sent_frame(reply.content, wire.encode(many))
        return reply

    grid = InProcessGrid(app, 3, seed=4)
    strategy = Compressed(fedavg(fraction_evaluate=0.0), DGC(0.01, warmup=1), policy=SmallDense())
    strategy.start(MeteredGrid(grid, TrafficLedger()), model(), num_rounds=3, timeout=9)
    assert [r.compressed for r in strategy.reports.values()] == [3, 2, 2]
    reasons = [reason for r in strategy.reports.values() for reason in r.refused.values()]
    assert all("120 values, round" in reason and "allows 12" in reason for reason in reasons)
