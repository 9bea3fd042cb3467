"""A small experiment and an engine that counts instead of training, for tests of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from fedcomp.experiments.experiment import Experiment, Studied
from fedcomp.experiments.findings import Curves, Series, Table
from fedcomp.experiments.options import TEXT, Option
from fedcomp.experiments.spec import RoundRecord, RunResult, RunSpec
from fedcomp.experiments.tables import Found
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


def compare(found: Found) -> Studied:
    sent = found.results["sparse"].uplink_payload_bytes
    gain = found.results["dense"].uplink_payload_bytes / sent
    return Studied({"bytes sent": sent, "fewer bytes": gain, "very many fewer bytes": gain})


TINY = Experiment(
    name="tiny",
    question="Does <counting> work?",
    task="digits",
    rows={
        "dense": "fedavg train.lr={train.lr} train.epochs={train.epochs}",
        "sparse": "topk train.lr={train.lr} train.epochs={train.epochs} codec.density={codec.density}",
    },
    study=compare,
    claims="""
        | fewer bytes | >= 5.0 | gate: derived: 1 / density
        | very many fewer bytes | >= 1e6 | goal: wishful
    """,
    answer="Sparse sends {bytes sent} bytes <in all>.",
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


def measure(found: Found) -> Studied:
    losses = []
    for i in range(found.config.rounds):
        found.say(f"cell {i}")
        losses.append(found.say.cell(f"cell {i}", lambda i=i: 2.0 / (1 + i + found.config.seed)))
    return Studied(
        {"the last loss": losses[-1]},
        tables=[Table("Measured <losses>", ["cell", "loss"], [[str(i), loss] for i, loss in enumerate(losses)])],
        figures=[
            Curves("Loss by cell", "cell", "loss", [Series("a < b", range(len(losses)), losses)], log_y=True),
        ],
        tasks=[{"data": DATA}],
    )


MEASURED = Experiment(
    name="measured",
    question="Does measuring work?",
    rounds=4,
    clients=2,
    study=measure,
    claims="| the last loss | <= 1.0 | gate: test",
    notes="Measured.",
)

CATALOG = {"tiny": TINY, "measured": MEASURED, "quickstart": "fedcomp.experiments.catalog.quickstart"}
