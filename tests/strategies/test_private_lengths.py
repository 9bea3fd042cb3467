"""What a private reply costs on the wire says nothing of the update in it, by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datalens_toy
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from private_runs import inner
from toy import training, with_halves

from fedcomp.clients.compressed import compression
from fedcomp.clients.private.datalens import datalens_teachers
from fedcomp.clients.private.mod import private
from fedcomp.clients.private.topagg import votes_only
from fedcomp.codecs import QSGD, Codec, Identity, RandomK, TernGrad, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.privacy.local import Privatise
from fedcomp.privacy.votes import TopkSign
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.local_dp import local_dp
from fedcomp.strategies.private.lsg import Lsg
from fedcomp.strategies.private.topagg import topagg
from fedcomp.systems.private.books import LENGTHS
from fedcomp.systems.private.lsg import LowRank

NODES, SHAPE = 6, (60, 50)


def learnt(partition: int) -> np.ndarray:
    """Return six updates that are as different as updates can be."""
    rng = np.random.default_rng(3)
    out = np.zeros(SHAPE)
    if partition == 1:
        out = rng.standard_t(3, SHAPE)
    elif partition == 2:
        out[:10] = rng.normal(size=(10, SHAPE[1]))  # 500 of 3000 coordinates, side by side
    elif partition == 3:
        out.flat[-1] = 1.0
    elif partition == 4:
        out.flat[::7] = 1.0
    elif partition == 5:
        out = np.full(SHAPE, -1e-20)
    return out.astype(np.float32)


def app_of(mods: list[Any]) -> ClientApp:
    step = lambda arrays, number, partition: {"w": arrays["w"] + learnt(partition)}  # noqa: E731
    return training(step, mods, examples=lambda partition: 1 + partition)


def lengths(strategy: Any, app: Callable, model: ArrayRecord, rounds: int = 2) -> list[tuple[set[int], set[int]]]:
    """Return, per round, the distinct payload and wire bytes of the clients' training replies."""
    ledger = TrafficLedger()
    grid = MeteredGrid(InProcessGrid(app, NODES, seed=4), ledger)
    strategy.start(grid, model, num_rounds=rounds, timeout=9)
    found = []
    for server_round in range(1, rounds + 1):
        of = {"round": server_round, "direction": "up"}
        found.append(tuple(set(ledger.by("node", value, **of).values()) for value in ("payload", "wire")))
    return found


def model() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(SHAPE, np.float32))})


PROMISE = {"noise_multiplier": 1.0, "population": NODES, "delta": 1e-3, "insecure_deterministic": True}
CODECS = (TopK(0.05), ErrorFeedback(TopK(0.05)), TopK(0.05, values="fp16", index="rice"), QSGD(7), TernGrad())


@pytest.mark.slow
@pytest.mark.parametrize("codec", [*CODECS, RandomK(0.1), Identity()], ids=repr)
def test_a7_replies_of_a_private_round_are_equally_long_whatever_was_learnt(codec: Codec) -> None:
    strategy = Compressed(DpFedAvg(inner(), clip=1.0, **PROMISE), codec, feedback=False)
    for payload, wire in lengths(strategy, app_of([compression(), private()]), model()):
        assert len(payload) == len(wire) == 1
        assert payload == {strategy.reports[1].padded_bytes}
    assert strategy.reports[1].compressed == NODES
    assert not any(LENGTHS in str(line) for line in strategy.inner.statement().to_json()["not_covered"])


@pytest.mark.parametrize(
    ("strategy", "halves"),
    [
        (topagg(inner(), TopkSign(k=100), server_lr=0.1, **PROMISE), [votes_only(), compression(), private()]),
        (Lsg(inner(), LowRank(rank=2, keep=0.5, clip=1.0), **PROMISE), [compression(), private()]),
    ],
    ids=["votes", "low rank"],
)
def test_a7_what_a_strategy_encodes_itself_is_equally_long_whatever_was_learnt(strategy: Any, halves: Any) -> None:
    for payload, wire in lengths(strategy, app_of(halves), model()):
        assert len(payload) == len(wire) == 1


def test_a7_teachers_votes_are_equally_long_whatever_they_hold() -> None:
    def ensemble(msg: Message, context: Context, request: Any) -> Any:
        own = datalens_toy.ensemble(msg, context, request)
        partition = int(context.node_config["partition-id"])
        honest = own.teachers.gradients
        scale = (0.0, 1.0, np.nan, 1.0, 1.0, 1.0)[partition]
        shift = np.arange(datalens_toy.PIXELS)[None, None] * (partition == 4)
        own.teachers.gradients = lambda *given: honest(*given) * np.float32(scale) + shift  # type: ignore[method-assign]
        return own

    for pad, distinct in ((True, 1), (False, 2)):
        strategy = datalens_toy.strategy(clients=NODES, pad=pad)
        (payload, wire), _ = lengths(
            strategy, with_halves([datalens_teachers(ensemble), compression()]), datalens_toy.model()
        )
        assert min(len(payload), len(wire)) >= distinct
        assert pad == (len(payload) == 1 == len(wire))
        assert pad == (LENGTHS not in strategy.statement().to_json()["not_covered"])


def test_a7_without_padding_lengths_tell_and_the_statement_says_so() -> None:
    strategy = Compressed(DpFedAvg(inner(), clip=1.0, pad=False, **PROMISE), TopK(0.05), feedback=False)
    (payload, _), _ = lengths(strategy, app_of([compression(), private()]), model())
    assert len(payload) == NODES
    assert max(payload) > 10 * min(payload)
    assert strategy.reports[1].padded_bytes == 0
    assert LENGTHS in strategy.inner.statement().to_json()["not_covered"]


def test_a7_a_codec_that_knows_no_longest_frame_is_refused_unless_lengths_may_tell() -> None:
    class Unbounded(TopK):
        def longest(self, layout) -> None:  # type: ignore[override]
            return None

    with pytest.raises(ConfigError, match="pad=False"):
        Compressed(DpFedAvg(inner(), clip=1.0, **PROMISE), Unbounded(0.1))
    Compressed(DpFedAvg(inner(), clip=1.0, pad=False, **PROMISE), Unbounded(0.1))
    Compressed(inner(), Unbounded(0.1))


def test_frames_that_clients_noised_are_not_padded_and_no_report_says_so() -> None:
    strategy = local_dp(inner(), Privatise(1.0, 1.0), TopK(0.05, index="rice"), population=NODES, delta=1e-3)
    (payload, _), _ = lengths(strategy, app_of([compression(), private()]), model())
    assert len(payload) > 1
    assert strategy.reports[1].compressed == NODES
    assert strategy.reports[1].padded_bytes == 0
