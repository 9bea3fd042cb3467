"""Numbers of others reach a model in every system: whatever one client sends, the run goes on, and its report says so.

One client of every row of the table lies in the second round, in all its answers but those of evaluation: they are cut,
have other shapes, types or tensors, or values that are not numbers. Nothing but the row's own checks stands in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg
from private_rows import small as private

from fedcomp.clients.app import app as honest
from fedcomp.experiments import engines
from fedcomp.experiments.engines import inprocess
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.experiments.systems import SYSTEMS
from fedcomp.flower.payload import is_frame

LIAR, CLIENTS, LIE, LAST = 1, 4, 2, 3

NAMES = [name for name in SYSTEMS if name != "fedavg"]
"""All rows but Flower's own strategy, which they are compared with: it takes replies as they come."""


def spec(name: str) -> RunSpec:
    """Return a small run of a row."""
    system = SYSTEMS[name]
    if system.private:
        return private(name, rounds=LAST, clients=CLIENTS)
    if name == "skewed-gcn":
        return RunSpec(
            name, task="digits-graph", rounds=LAST, clients=CLIENTS, settings={"task.hidden": "8", "n": "40"}
        )
    if name == "coded-linear":
        return RunSpec(name, task="breast-cancer", rounds=LAST, clients=CLIENTS, settings={})
    own: dict[str, Any] = {"evaluate_every": 1} if "topology" in system.needs else {}
    # Through the server, where the answers are.
    own |= {"transport": "hub"} if "transport" in system.defaults and not system.needs else {}
    return RunSpec(name, rounds=LAST, clients=CLIENTS, seed=3, settings={"task.hidden": "16", "lr": 0.05, **own})


def arrays_of(content: RecordDict) -> Iterator[tuple[ArrayRecord, str]]:
    for record in content.values():
        if isinstance(record, ArrayRecord):
            yield from ((record, name) for name in list(record))


def frames_of(content: RecordDict) -> Iterator[tuple[ConfigRecord, str]]:
    for record in content.values():
        if isinstance(record, ConfigRecord):
            long = [name for name, value in record.items() if isinstance(value, bytes) and len(value) > 32]
            yield from ((record, name) for name in long)


def each(change: Callable[[np.ndarray], np.ndarray], damage: Callable[[bytes], bytes]) -> Callable[[RecordDict], bool]:
    """Return what changes the arrays of models by ``change`` and all frames by ``damage``; whether there were any."""

    def lie(content: RecordDict) -> bool:
        done = False
        for record, name in arrays_of(content):
            if is_frame(record):
                held = record[name]
                record[name] = Array(held.dtype, held.shape, held.stype, damage(held.data))
            else:
                record[name] = Array(change(record[name].numpy()))
            done = True
        for config, name in frames_of(content):
            config[name] = damage(config[name])
            done = True
        return done

    return lie


def cut(content: RecordDict) -> bool:
    """Half of the bytes of everything: what is left is no array and no frame."""
    done = False
    for record, name in arrays_of(content):
        held = record[name]
        record[name] = Array(held.dtype, held.shape, held.stype, held.data[: len(held.data) // 2])
        done = True
    for config, name in frames_of(content):
        config[name] = config[name][: len(config[name]) // 2]
        done = True
    return done


def missing(content: RecordDict) -> bool:
    """One tensor of every model, and every frame."""
    models = {id(record): (record, name) for record, name in arrays_of(content)}
    frames = list(frames_of(content))
    for record, name in (*models.values(), *frames):
        del record[name]
    return bool(models or frames)


def values(number: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.full_like(array, number) if array.dtype.kind == "f" else array


LIES: dict[str, Callable[[RecordDict], bool]] = {
    "cut": cut,
    "missing": missing,
    "shape": each(lambda array: np.zeros((*array.shape, 2), array.dtype), lambda frame: frame + b"\0"),
    "dtype": each(lambda array: array.astype(np.complex128), lambda frame: bytes(len(frame))),
    "nan": each(values(np.nan), lambda frame: frame[:24] + b"\xff" * (len(frame) - 24)),
}


class Liar:
    def __init__(self, lie: Callable[[RecordDict], bool]) -> None:
        self.lie, self.lied = lie, 0
        self.round: dict[int, int] = {}
        self.phases: dict[int, int] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        config = message.content.config_records.get("config", {})
        self.round[partition] = int(config.get("server-round", self.round.get(partition, 0)))
        if message.metadata.message_type.startswith("train.coded_phase"):
            # Two a round, of which none says its number.
            self.phases[partition] = self.phases.get(partition, 0) + 1
            self.round[partition] = (self.phases[partition] + 1) // 2
        reply = honest(message, context)
        evaluates = message.metadata.message_type.startswith("evaluate")
        if partition == LIAR and self.round[partition] == LIE and not evaluates and not reply.has_error():
            self.lied += self.lie(reply.content)
        return reply


def lied_to(name: str, lie: Callable[[RecordDict], bool], monkeypatch: pytest.MonkeyPatch) -> tuple[RunResult, Liar]:
    liar = Liar(lie)
    monkeypatch.setattr(inprocess, "client_app", liar)
    return engines.run(spec(name)), liar


def said(result: RunResult) -> dict[str, Any]:
    """Return what the round of the lie, and what followed it, reports of clients that did not do as they should."""
    words = ("refused", "unanswered", "needed", "unseen", "failures", "lost", "noticed", "gone", "failed")
    return {
        key: value
        for record in result.rounds[LIE:]
        for key, value in {"failures": record.failures, **record.metrics}.items()
        if any(word in key for word in words) and value
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("topk", "skewed-gcn", "dpsgd", "choco", "sgp") else pytest.mark.long)
        for name in NAMES
    ],
)
def test_what_one_client_sends_ends_no_run_and_ruins_no_model(name, lie, monkeypatch):
    result, liar = lied_to(name, LIES[lie], monkeypatch)
    assert liar.lied, "nothing of this system was changed"
    assert [record.round for record in result] == list(range(LAST + 1))
    assert all(np.isfinite(array).all() for array in result.arrays.values())
    if not SYSTEMS[name].private:  # whose reports say nothing of single clients
        assert said(result), [record.metrics for record in result.rounds]


def test_only_flowers_own_strategy_is_not_tried():
    (left,) = set(SYSTEMS) - set(NAMES)
    assert type(SYSTEMS[left].build(SYSTEMS[left].resolve({}), 0)) is FedAvg
