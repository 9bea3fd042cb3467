"""B7, B8: what works alone and not together is named when the strategy is built."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    Krum,
    MultiKrum,
)

from fedcomp.codecs import DGC, QSGD, Clip, Codec, Identity, RandomBlock, RandomK, ScaledSign, TopK, chain
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.experiments.studies.sparsifiers import MEDIAN, distance
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed

ROBUST = [FedMedian(), FedTrimmedAvg(), Krum(num_malicious_nodes=1), Bulyan(num_malicious_nodes=1)]
OWN: list[Codec] = [TopK(0.01), RandomK(0.01, shared=False), chain(Clip(1.0), TopK(0.01))]
COMMON: list[Codec] = [Identity(), QSGD(7), ScaledSign(), RandomK(0.01), RandomBlock(0.01)]


def warnings(caplog: pytest.LogCaptureFixture, inner, codec: Codec) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flwr.fedcomp"):
        Compressed(inner, codec)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("codec", OWN, ids=repr)
@pytest.mark.parametrize(
    "rule", [*ROBUST, MultiKrum(num_malicious_nodes=1, num_nodes_to_select=2)], ids=lambda rule: type(rule).__name__
)
def test_b7_a_rule_that_is_no_mean_is_warned_of_own_coordinates(rule, codec, caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warnings(caplog, rule, codec)
    assert type(rule).__name__ in text
    assert "RandomK" in text


class Saving(FedAvg):
    """A mean all the same."""

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.saved = arrays
        return arrays, metrics


class Picking(FedAvg):
    """Takes one reply for all."""

    def aggregate_train(self, server_round, replies):
        return next(iter(next(iter(replies)).content.array_records.values())), None


def test_b7_a_rule_of_ones_own_that_is_no_mean_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warnings(caplog, Picking(), TopK(0.01))
    assert "Picking looks at single replies" in text


def test_b7_pairs_that_make_sense_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for rule in ROBUST:
        for codec in COMMON:
            assert warnings(caplog, rule, codec) == []
    for mean in (FedAvg(), FedAdam(), Saving(), DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 5)):
        assert warnings(caplog, mean, TopK(0.01)) == []


@pytest.mark.slow
def test_b7_a_median_follows_a_shared_support_and_stalls_on_the_clients_own() -> None:
    """With a tenth of the coordinates, forty rounds at half this rate: .995 against .265, dense .134 (measured)."""
    drawn = {"id": "randomk", "density": 0.2}
    far, near = (distance(MEDIAN, {**drawn, "shared": shared}, 5, 0) for shared in (False, True))
    assert far > 0.95
    assert near < 0.85


MOMENTUM: list[Codec] = [
    ErrorFeedback(TopK(0.01), momentum=0.9),
    DGC(0.01),
    chain(Clip(1.0), ErrorFeedback(TopK(0.01), momentum=0.9, nesterov=True)),
]


@pytest.mark.parametrize("codec", MOMENTUM, ids=repr)
def test_b8_momentum_correction_says_how_much_longer_it_makes_the_steps(
    codec, caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = warnings(caplog, FedAvg(), codec)
    assert "up to 10 times" in text
    assert "too: use FedAvg" not in text
    assert all(
        "too: use FedAvg" in warnings(caplog, server, codec)[0] for server in (FedAdam(), FedAvgM(server_momentum=0.5))
    )
    assert warnings(caplog, FedAvg(), ErrorFeedback(TopK(0.01))) == []


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True])
def test_b8_the_gain_is_what_a_constant_update_comes_to(nesterov: bool) -> None:
    codec, layout = ErrorFeedback(TopK(0.1), momentum=0.9, masking=False, nesterov=nesterov), Layout.flat(200)
    update, state, sent = Update(np.ones(200, np.float32), layout), codec.init(layout), np.zeros(200)
    for number in range(1, 1001):
        frame, state = codec.encode(update, state, Key(0, "uplink", number))
        sent += codec.decode(frame, layout)
    assert codec.gain == pytest.approx(10.0)
    assert sent.mean() / 1000 == pytest.approx(codec.gain, rel=0.05)
    assert sent.mean() / 1000 <= codec.gain


def test_adagrad_is_warned_of_codecs_that_list_coordinates(caplog: pytest.LogCaptureFixture) -> None:
    """After six rounds of top-k around it one app fell from 85 to 18 %: steps of what seldom arrives stay long."""
    (text,) = warnings(caplog, FedAdagrad(), TopK(0.01))
    assert "FedAdagrad divides" in text
    assert warnings(caplog, FedAdagrad(), QSGD(7)) == []
