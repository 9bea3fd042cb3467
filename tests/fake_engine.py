"""A small experiment and an engine that counts instead of training, for tests of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from fedcomp.experiments.experiment import Experiment, no_rows
from fedcomp.experiments.findings import Claim, Curves, Findings, HeatMap, Say, Series, Table
from fedcomp.experiments.options import TEXT, Config, Option
from fedcomp.experiments.spec import RoundRecord, RunResult, RunSpec
from fedcomp.rules import Flag, Int, OneOf, Real

DATA = {"note": "numbers made by formula", "used": "offline", "verified": False, "substitute": False}


class FakeEngine:
    """Runs a spec by formula: bytes from the settings, accuracy from round and seed.

    ``fail`` maps ``(label, round)`` to the exception raised instead of that round, once. A checkpoint holds the records
    so far, every second round, so that a resumed row repeats one that was already recorded.
    """

    def __init__(self, fail: Mapping[tuple[str, int], BaseException] | None = None) -> None:
        self.fail = dict(fail or {})
        self.ran: list[tuple[str, int]] = []

    def __call__(
        self,
        spec: RunSpec,
        *,
        on_round: Callable[[RoundRecord], None] | None,
        checkpoint: Path | None,
        privacy: Path | None = None,
    ) -> RunResult:
        # Brings Flower in, which has to wait until the command line has switched its telemetry off.
        from fedcomp.flower.ledger import TrafficLedger

        records: list[RoundRecord] = []
        if checkpoint is not None and checkpoint.exists():
            records = [RoundRecord.from_json(item) for item in json.loads(checkpoint.read_text())]
        for index in range(len(records), spec.rounds + 1):
            self.ran.append((spec.label, index))
            if (spec.label, index) in self.fail:
                raise self.fail.pop((spec.label, index))
            records.append(self.record(spec, index))
            if checkpoint is not None and index % 2 == 0:
                checkpoint.write_text(json.dumps([record.to_json() for record in records]))
            if on_round is not None:
                on_round(records[-1])
        return RunResult(
            spec=spec,
            rounds=records,
            arrays={"weight": np.full(3, records[-1].accuracy, np.float32)},
            ledger=TrafficLedger(),
            seconds=0.25 * len(records),
            simulated_seconds=sum(record.simulated_seconds for record in records),
            notes={"task": {"data": DATA}},
        )

    def record(self, spec: RunSpec, index: int) -> RoundRecord:
        payload = int(40_000 * float(spec.settings.get("codec.density", 1.0))) * spec.clients if index else 0
        return RoundRecord(
            round=index,
            accuracy=min(1.0, 0.1 + 0.1 * index + 0.001 * (spec.seed % 7)),
            loss=2.0 / (1 + index),
            uplink_payload_bytes=payload,
            uplink_wire_bytes=payload + 500 * bool(index),
            downlink_payload_bytes=40_000 * spec.clients,
            downlink_wire_bytes=40_300 * spec.clients,
            simulated_seconds=payload * 8e-7,
            wall_seconds=0.25,
            replies=spec.clients if index else 0,
            failures=1 if index == 2 else 0,
        )


def rows(config: Config) -> list[RunSpec]:
    return [
        config.spec("fedavg", "dense", "digits", take=("train.", "link")),
        config.spec("topk", "sparse", "digits", take=("train.", "codec.density", "link")),
    ]


def compare(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    sent = results["sparse"].uplink_payload_bytes
    gain = results["dense"].uplink_payload_bytes / sent
    return Findings(
        claims=[
            Claim("fewer bytes", gain, ">=", 5.0, "derived: 1 / density"),
            Claim("very many fewer bytes", gain, ">=", 1e6, "wishful", gate=False),
        ],
        answer=f"Sparse sends {sent} bytes <in all>.",
    )


TINY = Experiment(
    name="tiny",
    question="Does <counting> work?",
    rows=rows,
    measure=compare,
    options={
        "train.lr": Option(0.1, Real(above=0.0), "learning rate"),
        "train.epochs": Option(1, Int(1), "passes over the client's data"),
        "codec.density": Option(0.1, Real(above=0.0, most=1.0), "fraction kept"),
        "feedback": Option(True, Flag(), "error feedback"),
        "task.model": Option("mlp", OneOf("mlp", "cnn"), "model"),
        "link": Option("10mbit", TEXT, "link of every client"),
    },
    rounds=5,
    clients=4,
    notes="First.\n\nSecond.",
    minutes=0.5,
    quick=("rounds=1", "clients=2", "codec.density=0.5"),
)


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    losses = []
    for i in range(config.rounds):
        say(f"cell {i}")
        losses.append(say.cell(f"cell {i}", lambda i=i: 2.0 / (1 + i + config.seed)))
    return Findings(
        tables=[Table("Measured <losses>", ["cell", "loss"], [[str(i), loss] for i, loss in enumerate(losses)])],
        figures=[
            Curves("Loss by cell", "cell", "loss", [Series("a < b", range(len(losses)), losses)], log_y=True),
            HeatMap("Loss again", [str(i) for i in range(len(losses))], ["loss"], [losses], "nats", log=True),
        ],
        claims=[Claim("the last loss", losses[-1], "<=", 1.0, "test")],
        tasks=[{"data": DATA}],
    )


MEASURED = Experiment(
    name="measured",
    question="Does measuring work?",
    rows=no_rows,
    options={},
    rounds=4,
    clients=2,
    measure=measure,
    notes="Measured.",
)

CATALOG = {"tiny": TINY, "measured": MEASURED, "quickstart": "fedcomp.experiments.catalog.quickstart"}
