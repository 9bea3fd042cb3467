"""Strategies as applications write them: a loop of their own, attributes, setters; unchanged inside of Compressed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.server.strategy import FedAvgAndroid
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedXgbBagging,
    Result,
)
from toy import ONE, client_app, fedavg, model, stack

from fedcomp.clients.compressed import compression
from fedcomp.codecs import Identity, TopK
from fedcomp.errors import ConfigError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.privacy import find_private
from fedcomp.flower.rounds import fit, own_loop
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg


class Saving(FedAvg):
    """What applications do: a folder, the best model, a file of metrics, a schedule of the step size."""

    def set_path(self, path: Path) -> None:
        self.save_path = path

    def _update_best(self, current_round: int, norm: float, arrays: ArrayRecord) -> None:
        if norm > self.best:
            self.best = norm
            np.save(self.save_path / f"best_{current_round}.npy", stack(arrays))

    def configure_train(self, server_round, arrays, config, grid):
        if server_round == 2:
            config["lr"] = 0.5 * config["lr"]
        return super().configure_train(server_round, arrays, config, grid)

    def start(
        self,
        grid,
        initial_arrays,
        num_rounds=3,
        timeout=3600,
        train_config=None,
        evaluate_config=None,
        evaluate_fn=None,
    ) -> Result:
        self.best = -1.0
        self.summary()
        result = Result()
        arrays = initial_arrays
        rows = []
        for current_round in range(1, num_rounds + 1):
            replies = grid.send_and_receive(
                messages=self.configure_train(current_round, arrays, train_config, grid), timeout=timeout
            )
            aggregated, metrics = self.aggregate_train(current_round, replies)
            if aggregated is not None:
                result.arrays = arrays = aggregated
            if metrics is not None:
                result.train_metrics_clientapp[current_round] = metrics
            replies = grid.send_and_receive(
                messages=self.configure_evaluate(current_round, arrays, evaluate_config, grid), timeout=timeout
            )
            evaluated = self.aggregate_evaluate(current_round, replies)
            if evaluated is not None:
                result.evaluate_metrics_clientapp[current_round] = evaluated
            self._update_best(current_round, evaluate_fn(current_round, arrays)["norm"], arrays)
            rows.append({"round": current_round, "lr": train_config["lr"], "clients": dict(metrics or {})})
        (self.save_path / "results.json").write_text(json.dumps(rows))
        return result


def norm(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"norm": float(np.linalg.norm(stack(arrays)))})


def play(strategy, path: Path, mods=(), **options):
    """The part of a ServerApp that an application does not want to change."""
    strategy.set_path(path)
    grid = MeteredGrid(InProcessGrid(client_app(mods), 4, seed=4))
    result = strategy.start(
        grid=grid,
        initial_arrays=model(),
        train_config=ConfigRecord({"lr": 0.1}),
        evaluate_config=ConfigRecord({"lr": 0.1}),
        num_rounds=3,
        evaluate_fn=norm,
        **options,
    )
    return result, grid.ledger


@pytest.mark.slow
def test_b5_an_unchanged_strategy_with_a_loop_of_its_own_runs_compressed(tmp_path: Path) -> None:
    plain, wrapped, sparse = (tmp_path / name for name in ("plain", "identity", "sparse"))
    for folder in (plain, wrapped, sparse):
        folder.mkdir()
    expected, dense = play(Saving(**ONE), plain)
    result, _ = play(Compressed(Saving(**ONE), Identity()), wrapped, [compression()])
    assert [f.name for f in sorted(plain.iterdir())] == [f.name for f in sorted(wrapped.iterdir())]
    assert (plain / "results.json").read_text() == (wrapped / "results.json").read_text()
    assert [row["lr"] for row in json.loads((plain / "results.json").read_text())] == [0.1, 0.05, 0.05]
    np.testing.assert_array_equal(stack(result.arrays), stack(expected.arrays))
    assert {r: dict(m) for r, m in result.train_metrics_clientapp.items()} == {
        r: dict(m) for r, m in expected.train_metrics_clientapp.items()
    }
    strategy = Compressed(Saving(**ONE), TopK(0.05))
    _, ledger = play(strategy, sparse, [compression()], timeout=9)
    assert [report.compressed for report in strategy.reports.values()] == [4, 4, 4]
    up = {"value": "payload", "direction": "up"}
    assert ledger.total(**up) < dense.total(**up) / 8
    assert strategy.best == strategy.inner.best > 0.0, "what the loop keeps is the inner strategy's"
    assert own_loop(strategy)


def test_b5_a_hook_put_into_the_instance_is_still_called_and_still_compressed() -> None:
    inner = fedavg(fraction_evaluate=0.0)
    seen = []
    usual = inner.configure_train

    def configure_train(server_round, arrays, config, grid):
        seen.append(server_round)
        return usual(server_round, arrays, config, grid)

    inner.configure_train = configure_train  # type: ignore[method-assign]
    strategy = Compressed(inner, TopK(0.05))
    strategy.start(InProcessGrid(client_app([compression()]), 2, seed=4), model(), num_rounds=2, timeout=9)
    assert seen == [1, 2]
    assert [report.compressed for report in strategy.reports.values()] == [2, 2]


def test_b5_a_loop_that_goes_past_the_hooks_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Past(FedAvg):
        def start(self, grid, initial_arrays, **kwargs):
            FedAvg.configure_train(self, 1, initial_arrays, ConfigRecord(), grid)
            return Result()

    Compressed(Past(**ONE), TopK(0.05)).start(InProcessGrid(client_app(), 2, seed=4), model())
    assert any("nothing in them was compressed" in record.getMessage() for record in caplog.records)


def test_b5_attributes_are_read_called_and_set_where_they_are() -> None:
    class Noted(FedAvg):
        note = "a"

        def twice(self) -> str:
            return 2 * self.note

    inner = Noted(**ONE, fraction_train=0.5)
    strategy = Compressed(inner, TopK(0.05), seed=3)
    assert (strategy.fraction_train, strategy.twice()) == (0.5, "aa")
    strategy.note = "b"
    strategy.fraction_train = 1.0
    assert (inner.note, inner.twice(), inner.fraction_train) == ("b", "bb", 1.0)
    strategy.seed, strategy.label = 4, "mine"
    assert strategy.seed == 4
    assert not hasattr(inner, "seed")
    assert inner.label == strategy.label == "mine"
    assert "label" not in vars(strategy)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = strategy.no_such_thing
    assert copy.copy(strategy).twice() == "bb"


def test_b5_an_attribute_that_a_loop_waits_for_is_set_through_the_wrapper() -> None:
    class S(FedAvg):
        save_path: str

        def start(self, *args, **kwargs):
            result = super().start(*args, **kwargs)
            self.saved_to = self.save_path
            return result

    strategy = Compressed(S(**ONE, fraction_evaluate=0.0), TopK(0.05))
    strategy.save_path = "x"
    strategy.start(InProcessGrid(client_app([compression()]), 2, seed=4), model(), num_rounds=1, timeout=9)
    assert strategy.saved_to == strategy.inner.save_path == "x"


def test_b5_a_loop_that_wraps_a_hook_itself_runs_compressed() -> None:
    class S(FedAvg):
        def start(self, *args, **kwargs):
            usual = self.aggregate_train

            def logged(server_round, replies):
                self.seen = [*getattr(self, "seen", []), server_round]
                return usual(server_round, replies)

            self.aggregate_train = logged  # type: ignore[method-assign]
            return super().start(*args, **kwargs)

    strategy = Compressed(S(**ONE, fraction_evaluate=0.0), TopK(0.05))
    for rounds in (2, 1):
        grid = InProcessGrid(client_app([compression()]), 2, seed=4)
        strategy.start(grid, model(), num_rounds=rounds, timeout=9)
    assert strategy.seen == [1, 2, 1], "what one run wraps is not wrapped again by the next"
    assert [report.compressed for report in strategy.reports.values()] == [2], "those of the last training"
    assert "aggregate_train" not in {**vars(strategy), **vars(strategy.inner)}


def test_b5_attributes_that_are_handed_through_are_not_taken_for_the_wrappers_own() -> None:
    """Whoever looks for a privacy promise must find the strategy that makes it, not the one around it."""
    private = DpFedAvg(fedavg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=1.0, population=9)
    pair = Compressed(private, TopK(0.05))
    assert pair.privacy is private.privacy
    assert find_private(pair) is private
    with pytest.raises(ConfigError, match="trusts the server with updates"):
        CodedFedAvg(pair)

    class Counting(FedAvg):
        round = 7

    strategy = Compressed(Counting(**ONE, fraction_evaluate=0.0), TopK(0.05))
    grid = InProcessGrid(client_app([compression()]), 2, seed=4)
    fit(strategy, grid, model(), 1, timeout=9)
    assert strategy.reports[1].compressed == 2


def test_b5_whoever_would_pass_by_the_loop_refuses_it() -> None:
    with pytest.raises(ConfigError, match="own"):
        fit(Compressed(Saving(**ONE), TopK(0.05)), SimpleNamespace(), model(), 1)
    assert not own_loop(Compressed(fedavg(), TopK(0.05)))
    # It runs the loop instead.
    assert own_loop(CodedFedAvg(Compressed(Saving(**ONE), TopK(0.05))))


def around(strategy):
    return DifferentialPrivacyServerSideFixedClipping(strategy, 1.0, 1.0, 2)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: around(Compressed(fedavg(), TopK(0.05))), "already compresses"),
        (lambda: FedXgbBagging(**ONE), "FedXgbBagging exchanges the bytes of boosted trees"),
        (lambda: around(FedXgbBagging(**ONE)), "boosted trees"),
        (lambda: LegacyFedAvg(), "write 'from flwr.serverapp.strategy import FedAvg'"),
        (lambda: type("Mine", (LegacyFedAvg,), {})(), "Mine is a strategy of Flower's legacy API"),
        (lambda: FedAvgAndroid(), "from flwr.serverapp.strategy import FedAvg'"),
        (lambda: "fedavg", "Flower Strategy instance"),
    ],
)
def test_b5_what_cannot_work_inside_is_refused_at_construction(make, says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?i){says}"):
        Compressed(make(), TopK(0.05))


def test_b5_flowers_server_side_wrapper_inside_still_runs() -> None:
    """The loop runs on behalf of the wrapper; it is not one that stands around the pair."""
    strategy = Compressed(around(fedavg(fraction_evaluate=0.0)), TopK(0.05))
    strategy.start(InProcessGrid(client_app([compression()]), 2, seed=4), model(), num_rounds=1, timeout=9)
    assert strategy.reports[1].compressed == 2
