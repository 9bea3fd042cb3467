"""Several training exchanges of one ``Compressed`` wait for their replies at a time."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian
from toy import client_app, fedavg, model, stack, update

from fedcomp.clients.compressed import compression
from fedcomp.codecs import Codec, Identity, RandomK, TopK
from fedcomp.errors import ConfigError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.strategies.announcing import MAX_WAITING
from fedcomp.strategies.hooked import Hooked

NODES = 3
ONE = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}
QUIET = ConfigRecord()


def send(strategy: Hooked, server_round: int, arrays: ArrayRecord, grid: InProcessGrid) -> list[Message]:
    return list(grid.send_and_receive(list(strategy.configure_train(server_round, arrays, ConfigRecord(), grid))))


def mean_update(server_round: int, *, weighted: bool) -> np.ndarray:
    parts = [
        np.concatenate([update(server_round, p, s, i).reshape(-1) for i, s in enumerate(((40, 30), (12,)))])
        for p in range(NODES)
    ]
    return np.average(parts, axis=0, weights=[p + 1 for p in range(NODES)] if weighted else None)


@pytest.mark.parametrize("plain", [False, True], ids=["mod", "plain"])
@pytest.mark.parametrize("codec", [Identity(), TopK(density=1.0), RandomK(density=1.0)], ids=repr)
def test_an_update_is_added_to_the_model_of_now_and_not_to_the_one_it_began_with(codec: Codec, plain: bool) -> None:
    app = client_app() if plain else client_app([compression()])
    with InProcessGrid(app, NODES, seed=3) as grid:
        strategy = Hooked(fedavg(**ONE), codec, feedback=False)
        start = model(5.0)
        first, second = send(strategy, 1, start, grid), send(strategy, 2, start, grid)
        after, _ = strategy.aggregate_train(1, first)
        assert after is not None
        strategy.follow(2, after, ConfigRecord(), grid)
        last, _ = strategy.aggregate_train(2, second)
        assert last is not None
    wanted = 5.0 + mean_update(1, weighted=True) + mean_update(2, weighted=True)
    np.testing.assert_allclose(stack(last), wanted, atol=1e-3)
    assert [strategy.reports[r].used for r in (1, 2)] == [NODES, NODES]


@pytest.mark.parametrize("inner", [FedAvg, FedAvgM, FedAdam, FedMedian], ids=lambda kind: kind.__name__)
def test_every_server_optimiser_steps_from_the_model_it_is_shown(inner: type[FedAvg]) -> None:
    """Exchanges that overlap make the steps of those that follow each other: these clients' updates are fixed."""
    ends = []
    for overlapping in (False, True):
        with InProcessGrid(client_app([compression()]), NODES, seed=3) as grid:
            strategy = Hooked(inner(**ONE), TopK(density=1.0), feedback=False)
            arrays, replies = model(5.0), {}
            if overlapping:
                replies = {r: send(strategy, r, arrays, grid) for r in (1, 2, 3)}
            for number in (1, 2, 3):
                if overlapping:
                    strategy.follow(number, arrays, ConfigRecord(), grid)
                else:
                    replies[number] = send(strategy, number, arrays, grid)
                stepped, _ = strategy.aggregate_train(number, replies[number])
                assert stepped is not None
                arrays = stepped
            ends.append(stack(arrays))
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-5, atol=2e-3)
    assert np.abs(ends[0] - 5.0).max() > 0.01


def test_a_lossy_downlink_keeps_what_each_exchange_was_trained_from() -> None:
    with InProcessGrid(client_app(), NODES, seed=3) as grid:
        strategy = Hooked(fedavg(**ONE), TopK(density=1.0), downlink=TopK(density=0.01))
        arrays = model(5.0)
        for number in (1, 2):
            stepped, _ = strategy.aggregate_train(number, send(strategy, number, arrays, grid))
            assert stepped is not None
            arrays = stepped
        # Whole models come back, of which only the difference to what was sent may count.
        third, fourth = send(strategy, 3, arrays, grid), send(strategy, 4, arrays, grid)
        stepped, _ = strategy.aggregate_train(3, third)
        assert stepped is not None
        strategy.follow(4, stepped, ConfigRecord(), grid)
        last, _ = strategy.aggregate_train(4, fourth)
    assert last is not None
    wanted = 5.0 + sum(mean_update(r, weighted=True) for r in (1, 2, 3, 4))
    np.testing.assert_allclose(stack(last), wanted, atol=2e-3)


def test_replies_to_a_round_that_nobody_configured_are_refused() -> None:
    with InProcessGrid(client_app(), NODES, seed=3) as grid:
        strategy = Hooked(fedavg(**ONE), Identity())
        replies = send(strategy, 1, model(), grid)
        with pytest.raises(ConfigError, match=r"round 2 was not configured.*\[1\]"):
            strategy.aggregate_train(2, replies)


def test_rounds_that_are_never_aggregated_are_given_up_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with InProcessGrid(client_app(), 1, seed=3) as grid:
        strategy = Hooked(fedavg(**ONE), Identity())
        for number in range(1, MAX_WAITING + 2):
            strategy.configure_train(number, model(), ConfigRecord(), grid)
    assert next(iter(strategy.announcer.waiting)) == 2
    assert "round 1: 64 later rounds were configured" in caplog.text
