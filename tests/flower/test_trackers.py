"""``track``: the record of each round, on every loop, and what the record of a private run leaves out."""

from __future__ import annotations

import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gossip_toy
import pytest
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg, Strategy
from toy import client_app, fedavg, model

import fedcomp as fc
from fedcomp.clients.compressed import compression
from fedcomp.flower.faults import ScriptedFaults, late
from fedcomp.flower.rounds import evaluated

Record = dict[str, float]


def loss(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"loss": 1.0 / (1 + server_round), "curve": [1.0, 2.0], "diverged": math.inf})


def tracked(strategy: Strategy, *trackers: Any, rounds: int = 2, evaluate_fn: Any = loss) -> tuple[list[Record], Any]:
    records: list[Record] = []
    with fc.InProcessGrid(client_app([compression()]), 3) as engine:
        grid = fc.MeteredGrid(engine)
        follow = fc.track(strategy, grid, *trackers, records.append, evaluate_fn=evaluate_fn)
        result = strategy.start(grid, model(), num_rounds=rounds, evaluate_fn=follow)
    assert set(result.evaluate_metrics_serverapp) == (set(range(rounds + 1)) if evaluate_fn else set())
    return records, grid.ledger


class Own(FedAvg):
    """A strategy with a loop of its own, as applications write one."""

    def start(self, *args: Any, **kwargs: Any) -> Any:
        return super().start(*args, **kwargs)


@pytest.mark.parametrize("kind", [FedAvg, Own])
@pytest.mark.parametrize("around", [lambda inner: inner, lambda inner: fc.Compressed(inner, fc.TopK(0.1))])
def test_every_loop_gives_a_record_of_each_round(kind: type[FedAvg], around: Any) -> None:
    strategy = around(kind(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3))
    records, ledger = tracked(strategy)
    assert [record["round"] for record in records] == [0, 1, 2]
    assert [record["loss"] for record in records] == [1.0, 0.5, pytest.approx(1 / 3)]
    for number, record in enumerate(records):
        for direction in ("up", "down"):
            for value in ("wire", "payload"):
                counted = ledger.total(value, round=number, direction=direction)
                assert record[f"{direction}link_{value}_bytes"] == counted
        assert (record.get("asked", 0), record.get("answered", 0)) == ((3, 3) if number else (0, 0))
        assert all(isinstance(value, float) and math.isfinite(value) for value in record.values())


def test_a_figure_that_is_not_finite_is_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flwr.fedcomp"):
        records, _ = tracked(fedavg(fraction_evaluate=0.0), rounds=1)
    assert [("loss" in record, "diverged" in record) for record in records] == [(True, False)] * 2
    assert [text for text in caplog.messages if "round 1: not finite" in text and text.endswith(": diverged")]


def test_the_loop_of_this_project_hands_on_what_clients_and_report_say() -> None:
    records, _ = tracked(fc.Compressed(fedavg(), fc.TopK(0.1)))
    last = records[-1]
    assert (last["used"], last["lost"], last["refused"], last["report.compressed"]) == (3, 0, 0, 3)
    assert "train.partition" in last
    assert any(name.startswith("clients.") for name in last)
    assert evaluated.get() is None


@pytest.mark.parametrize(
    ("fault", "lost", "refused"), [("silent", 1, 0), (late(1), 1, 0), ("raise", 0, 1), ("offline", 0, 1)]
)
def test_whoever_said_nothing_in_time_has_not_answered(fault: Any, lost: int, refused: int) -> None:
    """Nor whoever the SuperLink answers for; an app that raises has."""
    records: list[Record] = []
    with fc.InProcessGrid(client_app([compression()]), 3, fault=ScriptedFaults({(1, 1): fault})) as engine:
        grid, strategy = fc.MeteredGrid(engine), fc.Compressed(fedavg(), fc.TopK(0.1))
        strategy.start(grid, model(), num_rounds=1, evaluate_fn=fc.track(strategy, grid, records.append))
    (found,) = records
    assert [found[name] for name in ("asked", "used", "lost", "refused")] == [3, 2, lost, refused]
    assert found["answered"] == (3 if fault == "raise" else 2)


def test_a_client_that_misses_several_exchanges_of_a_round_is_one_client() -> None:
    """It has said hello, which answers nothing of the round, and then nothing five times."""
    records: list[Record] = []
    grid = gossip_toy.grid(nodes=3, fault=ScriptedFaults({(1, 1): "silent"}))
    strategy = gossip_toy.strategy("cold")
    strategy.start(grid, gossip_toy.model(), num_rounds=2, evaluate_fn=fc.track(strategy, grid, records.append))
    assert (records[0]["lost"], records[0]["answered"]) == (5, 2)


def test_each_of_several_runs_over_one_grid_has_its_own_bytes() -> None:
    """The last one by Flower's own loop, which tells the grid of no round."""
    runs: list[list[float]] = []
    with fc.InProcessGrid(client_app([compression()]), 3) as engine:
        grid = fc.MeteredGrid(engine)
        for strategy in (fc.Compressed(fedavg(), fc.TopK(0.1)), fc.Compressed(fedavg(), fc.TopK(0.1)), fedavg()):
            records: list[Record] = []
            strategy.start(grid, model(), num_rounds=2, evaluate_fn=fc.track(strategy, grid, records.append))
            runs.append([record["uplink_payload_bytes"] for record in records])
    first, second, plain = runs
    assert first == second
    assert plain[0] == plain[1] > first[0]
    assert sum(map(sum, runs)) == grid.ledger.total("payload", direction="up")


def test_without_an_evaluation_of_the_server_round_0_has_no_record() -> None:
    records, _ = tracked(fc.Compressed(fedavg(), fc.TopK(0.1)), evaluate_fn=None)
    assert [record["round"] for record in records] == [1, 2]


def test_a_tracker_that_fails_is_a_warning_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def broken(record: Record) -> None:
        record.clear()
        raise ConnectionError("no route")

    with caplog.at_level(logging.WARNING, "flwr.fedcomp"):
        records, _ = tracked(fedavg(fraction_evaluate=0.0), broken)
    assert [record["round"] for record in records] == [0, 1, 2]
    assert "round 2 is not in a tracker: ConnectionError: no route" in caplog.text


@pytest.mark.parametrize("secret", [True, False])
def test_the_record_of_a_private_run_keeps_its_promise(secret: bool) -> None:
    """Where who takes part is secret, bytes and numbers of clients are, too: they follow who was drawn."""
    sampling = fc.Sampling("poisson", 0.9) if secret else fc.Sampling()
    strategy = fc.DpFedAvg(
        fedavg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=1.0, delta=1e-5, population=3, sampling=sampling
    )
    records, _ = tracked(strategy)
    last = records[-1]
    assert last["privacy.epsilon"] == strategy.privacy.epsilon()
    assert last["loss"] > 0
    told = {name for name in last if name.endswith("_bytes") or name in ("asked", "answered", "used", "refused")}
    assert bool(told) is not secret
    assert not {name for name in last if name.startswith("clients.") or name in ("report.changed",)}
    if secret:
        assert set(last) <= {"round", "loss", "privacy.epsilon", "privacy.releases"}


def test_what_cannot_be_tracked_is_refused() -> None:
    with fc.InProcessGrid(client_app(), 1) as engine:
        with pytest.raises(fc.ConfigError, match="InProcessGrid counts no bytes"):
            fc.track(fedavg(), engine, print)
        with pytest.raises(fc.ConfigError, match="a tracker is a function"):
            fc.track(fedavg(), fc.MeteredGrid(engine), "mlflow")  # type: ignore[arg-type]


def test_adapters_log_every_figure_with_the_round_as_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fake = SimpleNamespace(
        log_metrics=lambda metrics, step=None, run_id=None: calls.append(("mlflow", metrics, step, run_id)),
        log=lambda data, step=None: calls.append(("wandb", data, step)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = SimpleNamespace(log=lambda data, step=None: calls.append(("run", data, step)))
    for tracker in (fc.to_mlflow("abc"), fc.to_wandb(), fc.to_wandb(run)):
        tracker({"round": 3.0, "loss": 0.5})
    assert calls == [
        ("mlflow", {"loss": 0.5}, 3, "abc"),
        ("wandb", {"loss": 0.5}, 3),
        ("run", {"loss": 0.5}, 3),
    ]


@pytest.mark.parametrize("library", ["mlflow", "wandb"])
def test_a_missing_extra_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(fc.MissingExtra, match=rf"to_{library}\(\) needs {library}.*\[{library}\]"):
        getattr(fc, f"to_{library}")()


def test_mlflow_keeps_the_figures_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra `mlflow`")
    # Later releases refuse their store of files without this.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        records, _ = tracked(fc.Compressed(fedavg(), fc.TopK(0.1)), fc.to_mlflow())
    client = mlflow.MlflowClient()
    for name in ("loss", "uplink_wire_bytes"):
        kept = {point.step: point.value for point in client.get_metric_history(run.info.run_id, name)}
        assert kept == {int(record["round"]): record[name] for record in records}


def test_wandb_keeps_the_figures_offline(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="needs the extra `wandb`")
    run = wandb.init(mode="offline", dir=tmp_path, project="tracked")
    records, _ = tracked(fc.Compressed(fedavg(), fc.TopK(0.1)), fc.to_wandb(run))
    # A step is complete when the next one begins.
    run.log({"end": 1}, step=3)
    assert run.summary["uplink_wire_bytes"] == records[-1]["uplink_wire_bytes"]
    assert run.summary["loss"] == records[-1]["loss"]
    run.finish()
    assert list(tmp_path.rglob("*.wandb"))
