"""The first thing a new user runs: digits on ten unlike clients, five ways of sending the update."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from experiments.claims import Claim
from experiments.experiment import Config, Experiment, Option
from experiments.spec import RunResult, RunSpec

TASK = "digits"
FEDAVG = "FedAvg"
IDENTITY = "identity codec"

OPTIONS = {
    "task.partition": Option("dirichlet:0.5", "how examples are spread: iid, dirichlet:ALPHA, shards:COUNT"),
    "task.hidden": Option("256,256", "widths of the model's hidden layers"),
    "lr": Option(0.1, "step size of the clients' SGD", above=0.0),
    "momentum": Option(0.0, "momentum of the clients' SGD", least=0.0, most=0.999),
    "epochs": Option(1, "passes over its data a client makes in one round", least=1),
    "batch_size": Option(32, "examples per step", least=1),
    "fraction": Option(1.0, "share of the clients that train in a round", above=0.0, most=1.0),
    "codec.density": Option(0.01, "share of the coordinates top-k sends", above=0.0, most=1.0),
    "codec.levels": Option(127, "positive levels of QSGD", least=1, most=32767),
    "link": Option("10mbit", "every client's link: a preset or UP[/DOWN][@LATENCY]; empty for none"),
}

_SHARED = ("task.", "lr", "momentum", "epochs", "batch_size", "fraction", "link")


def rows(config: Config) -> list[RunSpec]:
    """Plain Flower FedAvg first: every other row is compared with it."""
    density = ("codec.density",)
    return [
        config.spec("fedavg", FEDAVG, TASK, take=_SHARED),
        config.spec("identity", IDENTITY, TASK, take=_SHARED),
        config.spec("topk", with_feedback(config), TASK, take=_SHARED + density, feedback=True),
        config.spec("topk", without_feedback(config), TASK, take=_SHARED + density, feedback=False),
        config.spec("qsgd", "QSGD", TASK, take=(*_SHARED, "codec.levels")),
    ]


def claims(config: Config, results: Mapping[str, RunResult]) -> list[Claim]:
    """Feedback keeps the accuracy, the bytes are few, and a codec that drops nothing changes nothing."""
    dense, kept, lost = (results[label] for label in (FEDAVG, with_feedback(config), without_feedback(config)))
    return [
        Claim(
            f"{kept.spec.label}: accuracy lost against FedAvg",
            dense.accuracy - kept.accuracy,
            "<=",
            0.01,
            "goal: within one point",
        ),
        Claim(
            f"{kept.spec.label}: times fewer uplink payload bytes",
            dense.uplink_payload_bytes / kept.uplink_payload_bytes,
            ">=",
            50.0,
            "derived: 4 bytes a coordinate against 1 % of 4 bytes and an index of about one",
        ),
        Claim(
            f"{lost.spec.label}: accuracy lost against the same with feedback",
            kept.accuracy - lost.accuracy,
            ">=",
            0.05,
            "measured",
        ),
        Claim(
            "identity codec: bytes of the final model that differ from FedAvg's",
            float(different_bytes(dense, results[IDENTITY])),
            "==",
            0.0,
            "theory: a codec that drops nothing changes nothing",
        ),
    ]


def with_feedback(config: Config) -> str:
    """Return the label of the top-k row whose clients remember what they did not send."""
    return f"top-k {_density(config)} with feedback"


def without_feedback(config: Config) -> str:
    """Return the label of the top-k row whose clients forget it."""
    return f"top-k {_density(config)} without"


def different_bytes(first: RunResult, second: RunResult) -> int:
    """Return how many bytes of two final models differ; every byte counts when names, shapes or types do."""
    same_layout = list(first.arrays) == list(second.arrays) and all(
        a.shape == b.shape and a.dtype == b.dtype
        for a, b in zip(first.arrays.values(), second.arrays.values(), strict=True)
    )
    if not same_layout:
        return sum(array.nbytes for array in first.arrays.values())
    return sum(
        int(np.count_nonzero(_bytes(a) != _bytes(b)))
        for a, b in zip(first.arrays.values(), second.arrays.values(), strict=True)
    )


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8)


def _density(config: Config) -> str:
    return f"{100 * float(config.settings['codec.density']):.3g} %"


EXPERIMENT = Experiment(
    name="quickstart",
    question="Can ten unlike clients send a fiftieth of the bytes and still learn what federated averaging learns?",
    rows=rows,
    claims=claims,
    baseline=FEDAVG,
    options=OPTIONS,
    rounds=30,
    clients=10,
    notes="",
)
