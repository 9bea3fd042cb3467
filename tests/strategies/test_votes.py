"""Codecs that vote: only the weighted sum of all votes is an update, whoever sends them."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedYogi,
)
from private_runs import forged
from toy import ONE, by_partition, client_app, fedavg, model, put_sent_frame, stack, update

from fedcomp import wire
from fedcomp.clients.compressed import compression
from fedcomp.codecs import Clip, ErrorFeedback, ScaledSign, SignSGD, TopK, chain
from fedcomp.errors import ConfigError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.layout import SmallDense
from fedcomp.strategies.compressed import Compressed

STEP = np.float32(0.25)


def run(strategy, app=None, *, nodes=5, rounds=3, initial=None):
    grid = InProcessGrid(app or client_app([compression()]), nodes, seed=4)
    return strategy.start(MeteredGrid(grid), initial or model(), num_rounds=rounds, timeout=9).arrays


def voting(step: float = float(STEP), **options) -> Compressed:
    return Compressed(fedavg(fraction_evaluate=0.0), SignSGD(step), **options)


def mixed(plain: set[int]):
    """Return an app that is without the mod on some partitions."""
    bare, modded = client_app(), client_app([compression()])
    return by_partition(lambda partition: bare if partition in plain else modded)


def majority(rounds: int, nodes: int) -> np.ndarray:
    """Return the weights of the toy model after ``rounds`` weighted majorities, from the definition."""
    out = np.zeros((40, 30), np.float32)
    for r in range(1, rounds + 1):
        votes = sum((p + 1) * np.where(np.signbit(update(r, p, (40, 30))), -1, 1) for p in range(nodes))
        out += STEP * np.sign(votes).astype(np.float32)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("codec", [SignSGD(0.25), chain(Clip(1e9), SignSGD(0.25))], ids=repr)
def test_the_model_moves_by_the_sign_of_the_weighted_majority(codec) -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), codec, policy=SmallDense())
    arrays = run(strategy)
    expected = majority(3, 5)
    np.testing.assert_array_equal(arrays["weight"].numpy(), expected)
    # What travels dense is averaged as always.
    mean = sum(sum((p + 1) * update(r, p, (12,), 1).astype(np.float64) for p in range(5)) / 15 for r in range(1, 4))
    np.testing.assert_allclose(arrays["bias"].numpy(), mean, rtol=1e-5, atol=1e-3)
    assert [r.compressed for r in strategy.reports.values()] == [5, 5, 5]
    # 5 voters of weights 1..5 can tie; a mean of signs without the final sign would show thirds and fifths of a step.
    assert set(np.unique(expected / STEP)) <= {-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0}


def test_wrappers_vote_as_their_codec_does() -> None:
    assert SignSGD(0.1).votes
    assert chain(Clip(1.0), SignSGD(0.1)).votes
    assert not chain(Clip(1.0), TopK(0.1)).votes
    assert not ErrorFeedback(TopK(0.1)).votes


def test_votes_are_not_remembered() -> None:
    """A memory of update minus vote would add quantities of different units."""
    with pytest.raises(ConfigError, match="not in the update's unit"):
        ErrorFeedback(SignSGD(0.1))
    with pytest.raises(ConfigError, match="not in the update's unit"):
        voting(feedback=True)
    assert isinstance(voting().codec, SignSGD), "although it is biased, the default puts no feedback around it"
    assert isinstance(Compressed(fedavg(), ScaledSign()).codec, ErrorFeedback)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [FedAvg, FedAvgM, FedAdam, FedAdagrad, FedYogi, FedProx])
def test_weighted_means_are_accepted(inner) -> None:
    options = {"proximal_mu": 0.1} if inner is FedProx else {}
    strategy = Compressed(inner(**ONE, **options), SignSGD(0.1))
    arrays = run(strategy, rounds=2)
    assert np.isfinite(stack(arrays)).all()
    assert stack(arrays).any()
    assert strategy.reports[2].compressed == 5


@pytest.mark.slow
@pytest.mark.parametrize("downlink", [None, TopK(0.3)], ids=["plain", "downlink"])
def test_a_plain_reply_is_a_vote_like_any_other(downlink) -> None:
    """Some clients lack the mod: the model is that of a fleet in which all have it, bit for bit."""
    # A step far above the updates' 1000: measured from the model instead of what the node got of it through the
    # downlink, signs would be the downlink's.
    everyone, some = voting(65536.0, downlink=downlink), voting(65536.0, downlink=downlink)
    expected = run(everyone)
    found = run(some, mixed({1, 3}))
    assert [(r.plain, r.compressed) for r in some.reports.values()] == [(2, 3)] * 3
    # The votes the server made of plain replies were never on the wire.
    for r in (1, 2, 3):
        full, part = (sum(s.reports[r].tensor_bytes.values()) for s in (everyone, some))
        assert part == full * 3 / 5
    np.testing.assert_array_equal(found["weight"].numpy(), expected["weight"].numpy())
    # Added as an update, a plain reply would leave fractions of a step.
    assert set(np.unique(found["weight"].numpy() / 65536)) <= {-3, -2, -1, 0, 1, 2, 3}


def test_a_plain_reply_that_cannot_vote_costs_itself_only() -> None:
    """Its difference to the model overflows although both are finite."""

    def overflowing(content: RecordDict) -> RecordDict:
        arrays = {"weight": Array(np.full((40, 30), 3e38, np.float32)), "bias": Array(np.zeros(12, np.float32))}
        return RecordDict({"arrays": ArrayRecord(arrays), "metrics": content["metrics"]})

    strategy = voting()
    found = run(strategy, forged(client_app([compression()]), overflowing, 2), nodes=4, rounds=1, initial=model(-3e38))
    report = strategy.reports[1]
    assert (report.compressed, report.plain) == (3, 0)
    assert all("more than float32 holds" in reason for reason in report.refused.values())
    assert len(report.refused) == 1
    assert np.isfinite(stack(found)).all()


def test_nobody_has_more_than_one_vote() -> None:
    def loud(content: RecordDict) -> None:
        votes = wire.Tensor(wire.SignScale(np.zeros(1200, np.bool_), np.full(1, 99, np.float32)), (1200,))
        put_sent_frame(content, wire.encode([votes, wire.dense(np.zeros(12, np.float32))]))

    strategy = voting()
    arrays = run(strategy, forged(client_app([compression()]), loud, 4), rounds=2)
    assert [(r.compressed, len(r.refused)) for r in strategy.reports.values()] == [(4, 1)] * 2
    np.testing.assert_array_equal(arrays["weight"].numpy(), majority(2, 4))
