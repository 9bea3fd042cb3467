"""Numbers of others reach a model in every system: whatever one client sends, the run goes on, and its report says so.

One client of every row of the table lies in the second round, in all its answers but those of evaluation: they are cut,
have other shapes, types or tensors, or values that are not numbers. Nothing but the row's own checks stands in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg
from page_reading import ROOT
from private_rows import small as private

from fedcomp.clients.app import app as honest
from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments.engines import inprocess
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.experiments.systems import SYSTEMS
from fedcomp.flower.payload import is_frame
from fedcomp.strategies import pair_systems
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.forward import ForwardGradients
from fedcomp.strategies.gradiveq import FittedBasis
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.lgc import LearnedGradients
from fedcomp.strategies.power_sgd import SharedBasis
from fedcomp.strategies.shared_support import SharedSupport
from fedcomp.tasks.base import Classification, Task

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
        if message.metadata.message_type.startswith("query.coded_phase"):
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
    words = ("refused", "unanswered", "needed", "unseen", "failures", "lost", "noticed", "gone", "failed", "excluded")
    return {
        key: value
        for record in result.rounds[LIE:]
        for key, value in {"failures": record.failures, **record.metrics}.items()
        if any(word in key for word in words) and value
    }


PAIRS = [system.name for system in pair_systems.SYSTEMS if system.name in NAMES and system.name != "topk"]
EVERY_DAY = ("topk", "skewed-gcn", "dpsgd", "choco", "sgp")
"""Rows that are told all lies."""


def lies_of(name: str) -> list[str]:
    """Return which lies a row is told: pairs, which differ by what their codecs read, one in turn; others also numbers
    that are none."""
    if name in EVERY_DAY:
        return list(LIES)
    if name in PAIRS:
        return [list(LIES)[PAIRS.index(name) % len(LIES)]]
    return [[*LIES][NAMES.index(name) % 4], "nan"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "lie"),
    [
        pytest.param(name, lie, marks=() if name in EVERY_DAY else pytest.mark.long)
        for name in NAMES
        for lie in lies_of(name)
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


class Absurd(Liar):
    """One client trains to 1e30 everywhere: finite, and what its half of the system then makes of it."""

    VALUE = 1e30

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(lambda content: False)
        self.now = False
        train, objective = Task.train, Classification.objective

        def absurd(task: Task, model: torch.nn.Module, *args: Any, **options: Any) -> Any:
            metrics = train(task, model, *args, **options)
            if self.now:
                self.lied += 1
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(self.VALUE)
            return metrics

        def measured(task: Any, *args: Any) -> torch.Tensor:
            self.lied += self.now
            return objective(task, *args) * (self.VALUE if self.now else 1.0)

        monkeypatch.setattr(Task, "train", absurd)
        # Which forward gradients measure instead of training.
        monkeypatch.setattr(Classification, "objective", measured)
        monkeypatch.setattr(inprocess, "client_app", self)

    def __call__(self, message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        config = message.content.config_records.get("config", {})
        number = int(config.get("server-round", self.round.get(partition, 0)))
        self.now = partition == LIAR and number == LIE and message.metadata.message_type.startswith("train")
        try:
            return super().__call__(message, context)
        finally:
            self.now = False


def with_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every strategy that takes a guard be built with one."""
    for kind in (Compressed, SharedSupport, SharedBasis, FittedBasis, LearnedGradients, ForwardGradients):
        init = kind.__init__

        @wraps(init)
        def guarded(self: Any, *args: Any, _init: Any = init, **options: Any) -> None:
            _init(self, *args, **{"guard": Norms(), **options})

        monkeypatch.setattr(kind, "__init__", guarded)


def largest(result: RunResult) -> float:
    return max(float(np.abs(array).max()) for array in result.arrays.values() if array.size)


TRAINED_OTHERWISE = ("record-dp", "skewed-gcn", "coded-linear", "datalens")
"""Systems whose clients do not call a task's training, and are absurd in other ways, in tests of their own (of
coded-linear, which believes its rows, in none); so are all decentralised ones, whose nodes have a guard."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("topk", "scalecom", "sumcode") else pytest.mark.long)
        for name in NAMES
        if name not in TRAINED_OTHERWISE and "topology" not in SYSTEMS[name].needs
    ],
)
def test_a_client_that_trains_to_1e30_is_refused_by_a_guard_or_bounded_by_the_system(name, monkeypatch):
    bare = Absurd(monkeypatch)
    without = largest(engines.run(spec(name)))
    assert bare.lied
    # Nothing in between: the model is ruined, or bounded by what the system makes of every update.
    assert without > 1e20 or without < 100
    with monkeypatch.context() as patched:
        with_guards(patched)
        guarded, refusal = Absurd(patched), ""
        try:
            result = engines.run(spec(name))
        except ConfigError as error:
            refusal = str(error)
    if refusal:
        assert "leave guard out" in refusal
        assert without < 100
        return
    assert guarded.lied
    assert largest(result) < 100
    if without > 1e20:
        assert "times the usual" in str(said(result))


UNGUARDED = {"GossipRelay", "CodedLinearGD", "GradientCoded", "DpFedAvg", "DistributedDp", "Lsg", "DataLens"}
"""Classes of systems that take no guard, each with the reason on the page."""


OWN = ("promise", "settings")
"""What constructors call options that they do not pass on to their base."""


def takes_guard(kind: type) -> bool:
    """Whether a constructor takes a guard, or passes it on."""
    for base in kind.__mro__:
        taken = inspect.signature(base.__init__).parameters
        # What is promised, or set, is read by others than the base.
        passed = any(each.kind is each.VAR_KEYWORD and each.name not in OWN for each in taken.values())
        if "guard" in taken or not passed:
            return "guard" in taken
    return False


def test_every_system_takes_a_guard_or_the_page_says_why_not():
    built = {}
    for name in NAMES:
        strategy = SYSTEMS[name].build(SYSTEMS[name].resolve(spec(name).settings), 0)
        # What stands around another strategy takes the guard of that.
        while type(strategy) is CodedFedAvg and isinstance(strategy.inner, Compressed):
            strategy = strategy.inner
        built[name] = type(strategy)
    without = {kind.__name__ for kind in built.values() if not takes_guard(kind)}
    text = (ROOT / "docs" / "reference" / "messages.md").read_text()
    page = text.split("## A guard against absurd replies")[1].split("\n## ")[0]
    # Conditional takes that of the pair around which it stands.
    assert without - {"CodedFedAvg", "Conditional"} == UNGUARDED
    # What hooks make of a pair is no class that anybody names.
    for kind in ["CodedFedAvg", "Conditional", *(kind.__name__ for kind in built.values())]:
        assert f"`{kind}" in page or f" {kind}(" in page, kind
