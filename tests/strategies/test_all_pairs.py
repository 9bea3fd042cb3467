"""Every strategy around every other: what has no effect is refused by name when it is built, and all else has one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    Strategy,
)

from fedcomp.clients import app as generic
from fedcomp.clients.client import client
from fedcomp.clients.compressed import compression
from fedcomp.clients.conditional import conditional
from fedcomp.clients.forward import forward_gradients
from fedcomp.clients.gcn import graph_owner
from fedcomp.clients.private.dpsgd import record_dp
from fedcomp.codecs import EDEN, LGC, QSGD, Factors, FixedPoint, GradiVeQ, PowerSGD, RandomK, ScaleCom, SignSGD, TopK
from fedcomp.drift.schedule import ScheduleSettings
from fedcomp.errors import ConfigError
from fedcomp.experiments import engines, systems
from fedcomp.experiments.engines import inprocess
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.privacy.local import Privatise
from fedcomp.privacy.votes import TopkSign
from fedcomp.strategies.adapters import Adapters
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.conditional import Conditional
from fedcomp.strategies.forward import ForwardGradients
from fedcomp.strategies.gcn.strategy import SkewedGCN
from fedcomp.strategies.gradiveq import FittedBasis
from fedcomp.strategies.lgc import LearnedGradients
from fedcomp.strategies.overlap import Buffered, PipelinedStrategy
from fedcomp.strategies.power_sgd import SharedBasis
from fedcomp.strategies.private.distributed_dp import DistributedDp
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.local_dp import local_dp
from fedcomp.strategies.private.lsg import Lsg
from fedcomp.strategies.private.record_dp import RecordDp
from fedcomp.strategies.private.settings import ShareSettings
from fedcomp.strategies.private.topagg import TopAgg
from fedcomp.strategies.shared_support import SharedSupport
from fedcomp.systems.private.lsg import LowRank
from fedcomp.systems.private.record import DpSgdPlan

CLIENTS, ROUNDS = 4, 3
PROMISE: dict[str, Any] = {
    "population": CLIENTS,
    "delta": 1e-3,
    "insecure_deterministic": True,
    "noise_multiplier": 0.5,
}
PLAN = DpSgdPlan(noise_multiplier=1.5, rate=0.1, steps=3, delta=1e-5, insecure=True)
BALLOT = TopkSign(k=50)
INTEGERS = FixedPoint(RandomK(1.0), clip=1.0, levels=1024)
LOCAL = Privatise(1.0, 0.5, insecure_deterministic=True)


def flowers(kind: type[FedAvg] = FedAvg) -> FedAvg:
    return kind(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)


def named(name: str) -> Callable[[], Strategy]:
    system = systems.SYSTEMS[name]
    own = {"insecure_deterministic": True} if system.private else {}
    return lambda: system.build(system.resolve(own), 0)


Wrap = Callable[[Any], Strategy]

OUTER: Mapping[str, Wrap] = {
    "pair": lambda inner: Compressed(inner, TopK(0.01)),
    "adapters": Adapters,
    "conditional": Conditional,
    "pipelined": PipelinedStrategy,
    "buffered": lambda inner: Buffered(inner, concurrency=3, buffer=2),
    "relay": lambda inner: CodedFedAvg(inner, symbols=2),
    "coded sum": lambda inner: CodedFedAvg(inner, construction="sumcode", symbols=2, threshold=1),
    "gradient code": lambda inner: CodedFedAvg(inner, construction="gradcode", losses=1),
    "dp-fedavg": lambda inner: DpFedAvg(inner, clip=1.0, **PROMISE),
    "distributed dp": lambda inner: DistributedDp(inner, ShareSettings(clip=1.0, tolerated=1), **PROMISE),
    "topagg": lambda inner: TopAgg(inner, BALLOT, server_lr=0.1, **PROMISE),
    "lsg": lambda inner: Lsg(inner, LowRank(clip=1.0, rank=2), **PROMISE),
    "local dp": lambda inner: local_dp(inner, LOCAL, QSGD(levels=7), population=CLIENTS, delta=1e-3),
    "record dp": lambda inner: RecordDp(inner, PLAN, records=1000),
    "forward": lambda inner: ForwardGradients(inner, 8),
    "graph": SkewedGCN,
}

MEANS: Mapping[str, Callable[[], Strategy]] = {
    "FedAvg": flowers,
    "FedAdam": lambda: flowers(FedAdam),
    "FedMedian": lambda: flowers(FedMedian),
    "Flower's server-side dp": lambda: DifferentialPrivacyServerSideFixedClipping(flowers(), 0.1, 1.0, 5),
    "Flower's client-side dp": lambda: DifferentialPrivacyClientSideFixedClipping(flowers(), 0.1, 1.0, 5),
}

PAIRS: Mapping[str, Callable[[], Strategy]] = {
    "pair": lambda: Compressed(flowers(), TopK(0.01)),
    "pair, downlink": lambda: Compressed(flowers(), TopK(0.01), downlink=TopK(0.1)),
    "pair of votes": lambda: Compressed(flowers(), SignSGD(step=0.01)),
    "pair of integers": lambda: Compressed(flowers(), INTEGERS),
    "pair of factors": lambda: Compressed(flowers(), Factors()),
    "pair of adapters": lambda: Adapters(flowers(), EDEN(1), None),
}


def around(outer: str, inner: Callable[[], Strategy]) -> Callable[[], Strategy]:
    return lambda: OUTER[outer](inner())


INNER: Mapping[str, Callable[[], Strategy]] = {
    **MEANS,
    **PAIRS,
    **{name: around(name, flowers) for name in OUTER if name not in ("pair", "adapters", "coded sum")},
    "coded sum": around("coded sum", PAIRS["pair of integers"]),
    "pair around dp-fedavg": lambda: Compressed(DpFedAvg(flowers(), clip=1.0, **PROMISE), TopK(0.1)),
    "record dp around the pair": around("record dp", PAIRS["pair"]),
    "shared support": lambda: SharedSupport(ScaleCom(0.05)),
    "shared basis": lambda: SharedBasis(PowerSGD(rank=2)),
    "fitted basis": lambda: FittedBasis(GradiVeQ(width=40)),
    "learned gradients": lambda: LearnedGradients(LGC(0.05)),
    "gossip": named("choco"),
    "coded linear": named("coded-linear"),
    "datalens": named("datalens"),
}

WITH_FLOWERS = ("FedAvg", "FedAdam", "FedMedian")
ACCEPTED: Mapping[str, tuple[str, ...]] = {
    "pair": (*WITH_FLOWERS, "dp-fedavg", "Flower's server-side dp"),
    "adapters": (*WITH_FLOWERS, "dp-fedavg", "Flower's server-side dp"),
    "conditional": (*WITH_FLOWERS, *PAIRS),
    "pipelined": (*WITH_FLOWERS, *PAIRS, "shared support"),
    "buffered": (*WITH_FLOWERS, *(name for name in PAIRS if name != "pair of votes")),
    "relay": (*WITH_FLOWERS, *PAIRS, "local dp"),
    "coded sum": ("pair of integers",),
    "gradient code": ("FedAvg", "FedAdam"),
    "dp-fedavg": ("FedAvg", "FedAdam"),
    "distributed dp": ("FedAvg", "FedAdam"),
    "topagg": ("FedAvg", "FedAdam"),
    "lsg": ("FedAvg", "FedAdam"),
    "local dp": ("FedAvg", "FedAdam"),
    "record dp": ("FedAvg", "FedAdam", *PAIRS),
    "forward": WITH_FLOWERS,
    "graph": (*WITH_FLOWERS, *PAIRS),
}


def names_in(strategy: Any) -> list[str]:
    """Return what a refusal may call a strategy: its class, or that of what is inside."""
    found = []
    while strategy is not None:
        found += [kind.__name__ for kind in type(strategy).__mro__ if issubclass(kind, Strategy)]
        found += re.findall(r"\w+(?=\()", repr(vars(strategy).get("codec")))
        strategy = vars(strategy).get("inner") or vars(strategy).get("strategy")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("outer", OUTER)
def test_what_is_not_accepted_is_refused_by_name_when_it_is_built(outer: str) -> None:
    texts: dict[str, str] = {}
    for name, make in INNER.items():
        inner = make()
        try:
            OUTER[outer](inner)
        except ConfigError as error:
            texts[name] = str(error)
            texts[name] += "" if any(each in texts[name] for each in names_in(inner)) else " NAMES NOBODY"
    assert [text for text in texts.values() if "NAMES NOBODY" in text] == []
    accepted = set(INNER) - set(texts)
    assert sorted(accepted) == sorted(ACCEPTED[outer])


APP = client(
    generic._app,
    compression(i_know_inputs_are_visible=True),
    forward_gradients(generic.measured, at_once=16),
    # So impatient that a node is quiet in its third round.
    conditional(generic.own_loss, settings=ScheduleSettings(window=2, low=0.5, consecutive=1, patience=0)),
    record_dp(generic.trainee),
    graph_owner(generic.graph_part, generic.graph_learner),
)


def run(make: Callable[[], Strategy], patch: pytest.MonkeyPatch, like: str, task: str, **options: Any) -> RunResult:
    """Run a strategy in process, in place of the one that the row ``like`` of the table builds."""
    with patch.context() as patched:
        system = replace(systems.SYSTEMS[like], build=lambda settings, seed: make(), check=lambda *_: None)
        patched.setattr(systems, "SYSTEMS", MappingProxyType({**systems.SYSTEMS, like: system}))
        patched.setattr(inprocess, "client_app", APP)
        settings = {"task.hidden": "16", **options}
        return engines.run(RunSpec(like, task=task, rounds=ROUNDS, clients=CLIENTS, seed=3, settings=settings))


def up(result: RunResult) -> int:
    return sum(record.uplink_payload_bytes for record in result.rounds)


def down(result: RunResult) -> int:
    return sum(record.downlink_payload_bytes for record in result.rounds)


def last(result: RunResult) -> Mapping[str, Any]:
    return result.rounds[-1].metrics


SHOWN: Mapping[str, Callable[[RunResult], bool]] = {
    "conditional": lambda r: any(record.metrics["conditional.quiet"] for record in r.rounds[1:]),
    "pipelined": lambda r: last(r)["overlap.staleness_max"] == 1,
    "buffered": lambda r: last(r)["overlap.step"] == ROUNDS - 1,
    "relay": lambda r: last(r).get("coded.shards", 4) == 4,
    "coded sum": lambda r: last(r)["coded.contributors"] == 4,
    "gradient code": lambda r: last(r)["coded.included"] == 4,
    "forward": lambda r: last(r).get("forward.signs", 1) > 0,
    "graph": lambda r: last(r)["gcn.rows_fetched"] > 0,
    **dict.fromkeys(("adapters", "pair of adapters"), lambda r: last(r)["adapters.drawn"] == 8 * (3 * 32 + 128)),
}
"""What a part's report shows where it works; privacy is shown by what was spent, compression by bytes."""

LORA: Mapping[str, Any] = {
    "task.hidden": "32",
    "task.layers": 1,
    "task.seq_len": 16,
    "task.speakers": CLIENTS,
    "task.rank": 8,
    "task.frozen_a": True,
    "max_steps": 2,
}
"""Of a small transformer's adapters: halves of 32 and 128 inputs are drawn."""

PRIVATE = ("dp-fedavg", "distributed dp", "topagg", "lsg", "local dp", "record dp")
SHORTER = {
    "pair": 10,
    "pair, downlink": 10,
    "pair of votes": 10,
    "pair of integers": 2,
    "pair of factors": 1.02,
    "pair of adapters": 20,
}
"""How many times fewer bytes go up than with whole models, at least."""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("outer", "inner"),
    # A model of a graph may have adapters, but no task here has such a one.
    [(o, i) for o in ACCEPTED for i in ACCEPTED[o] if (o, i) != ("graph", "pair of adapters")],
)
def test_each_part_of_an_accepted_pair_has_its_effect(outer: str, inner: str, monkeypatch) -> None:
    graph, forward = outer == "graph", "forward" in (outer, inner)
    like = "skewed-gcn" if graph else "forward" if forward else "identity"
    adapted = "adapters" in outer or "adapters" in inner
    task = "digits-graph" if graph else "dialects" if adapted else "digits"
    # Losses stand still where nodes are to be quiet.
    options: dict[str, Any] = {"lr": 1e-9} if outer == "conditional" else {"lr": 0.05}
    options |= LORA if adapted else {}
    result = run(lambda: OUTER[outer](INNER[inner]()), monkeypatch, like, task, **options)
    assert not any(record.metrics.get("report.refused") for record in result.rounds[1:])
    assert result.rounds[-1].failures == 0
    for part in {outer, inner} & set(SHOWN):
        assert SHOWN[part](result), (part, last(result))
    parts = {outer, inner}
    if private := parts & set(PRIVATE) or {"record dp around the pair"} & parts:
        alone = run(INNER[next(iter(private))], monkeypatch, like, task, **options)
        assert last(result)["privacy.epsilon"] == pytest.approx(last(alone)["privacy.epsilon"], rel=1e-6)
        assert last(result)["privacy.epsilon"] > 0
    if inner in SHORTER and outer != "coded sum":  # which takes nothing but integers
        whole = run(around(outer, flowers), monkeypatch, like, task, **options)
        # Of a graph the rows that nodes fetch go up as well, the same ones.
        rows = sum(record.metrics["gcn.feature_bytes_link"] for record in result.rounds[1:]) // 2 if graph else 0
        # A relay's shards are sealed: 48 bytes for each of them, however short it is.
        boxes = 48 * CLIENTS * CLIENTS * ROUNDS if outer == "relay" else 0
        assert up(whole) - rows - boxes > SHORTER[inner] * (up(result) - rows - boxes)
    if outer in ("pair", "adapters"):
        assert up(run(INNER[inner], monkeypatch, like, task, **options)) > 10 * up(result)
    if inner == "pair, downlink":
        assert down(result) < down(run(lambda: OUTER[outer](INNER["pair"]()), monkeypatch, like, task, **options))
