"""Advice of error texts and warnings: a row for each, and what the rows are made of."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp.strategy import FedAvg, Strategy
from toy import client_app, fedavg, model, stack

import fedcomp as fc
from fedcomp.clients.private.mod import private
from fedcomp.experiments.systems import SYSTEMS
from fedcomp.flower.rounds import fit
from fedcomp.layout import NONE_DENSE, Layout, Update
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.rng import Key

Followed = Callable[[Path], Any]
NODES = 4


@dataclass(frozen=True)
class Row:
    """One advice.

    Attributes
    ----------
    text : str
        A part of it as it is written, which no other advice has; one that is written in several files has as many rows.
    provoke : callable
        Raises it, or has it logged.
    follow : callable
        Does what it says; returns whether that is right.
    long : bool
        Whether it takes more than a second.
    """

    text: str
    provoke: Followed
    follow: Followed
    long: bool = False


def provoked(call: Followed, path: Path, caplog: Any) -> str:
    """Return the text of the error that is raised, else what is logged or warned of."""
    printed = io.StringIO()
    with (
        caplog.at_level(logging.WARNING, "flwr.fedcomp"),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        try:
            call(path)
        except fc.FedcompError as error:
            return str(error)
        except SystemExit:
            return " ".join(printed.getvalue().split())
    return "\n".join([*(record.getMessage() for record in caplog.records), *(str(each.message) for each in warned)])


def quiet(kind: type[FedAvg] = FedAvg, **options: Any) -> FedAvg:
    return fedavg(fraction_evaluate=0.0, **options) if kind is FedAvg else kind(**{**ALL, **options})


ALL: dict[str, Any] = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}


def ended(
    strategy: Strategy,
    halves: Any = (fc.compression,),
    rounds: int = 2,
    start: Any = None,
    mods: Any = (),
    nodes: int = NODES,
    node_config: Any = None,
) -> Any:
    """Return the model after some rounds with the toy's clients."""
    app = client_app([*mods, *(half() for half in halves)])
    with fc.InProcessGrid(app, nodes, seed=4, node_config=node_config) as grid:
        return fit(strategy, grid, model() if start is None else start, rounds, timeout=9.0).arrays


def trains(strategy: Strategy, halves: Any = (fc.compression,), **options: Any) -> bool:
    """Whether the model of a run is finite and has moved."""
    after = stack(ended(strategy, halves, **options))
    return bool(np.isfinite(after).all() and np.abs(after).max() > 0)


def same(one: Strategy, other: Strategy, **options: Any) -> bool:
    """Whether two runs end with the same model but for rounding."""
    return bool(np.allclose(stack(ended(one, **options)), stack(ended(other, **options)), rtol=1e-4, atol=0.5))


PRIVATE = (fc.compression, private)
PROMISE: dict[str, Any] = {"population": NODES, "delta": 1e-3, "insecure_deterministic": True, "noise_multiplier": 0.5}
INTEGERS = fc.FixedPoint(fc.RandomK(1.0), clip=1024.0, levels=1024)
PLAN = fc.DpSgdPlan(noise_multiplier=1.5, rate=0.1, steps=3, delta=1e-5)
LAYOUT = Layout.of({"w": np.zeros((40, 30), np.float32), "b": np.zeros(12, np.float32)}, NONE_DENSE)
VALUES = np.random.default_rng(1).standard_normal(LAYOUT.size).astype(np.float32)
KEY = Key(0, "uplink", 1, 0)


def decoded(codec: Any, values: Any = VALUES, layout: Layout = LAYOUT, state: Any = None) -> Any:
    """Return what comes out of a codec for one update."""
    before = codec.init(layout) if state is None else state
    return codec.decode(codec.encode(Update(values, layout), before, KEY)[0], layout)


def points_the_same_way(codec: Any, layout: Layout = LAYOUT) -> bool:
    return float(decoded(codec, layout=layout) @ VALUES) > 0


def system(name: str, **settings: Any) -> Strategy:
    row = SYSTEMS[name]
    return row.build(row.resolve(settings), 0)


def row(text: str, provoke: Callable[[], Any], follow: Callable[[], Any], *, long: bool = False) -> Row:
    return Row(text, lambda _: provoke(), lambda _: follow(), long)


def coded_sum(inner: Strategy | None = None, **options: Any) -> fc.CodedFedAvg:
    """Return a strategy that has relays sum integers, those of a mean where no other strategy is given."""
    own = fc.Compressed(quiet(), INTEGERS) if inner is None else inner
    return fc.CodedFedAvg(own, construction="sumcode", **{"symbols": 2, "threshold": 1, **options})


def local(**options: Any) -> Strategy:
    policy = fc.Privatise(1e4, 0.5, insecure_deterministic=True)
    return fc.local_dp(quiet(), policy, fc.QSGD(levels=7), population=NODES, delta=1e-3, **options)


def shares(**options: Any) -> Strategy:
    return fc.DistributedDp(quiet(), fc.ShareSettings(clip=500.0, tolerated=1), **{**PROMISE, **options})


DENSE = Layout.of({"w": np.zeros((40, 30), np.float32), "b": np.zeros(12, np.float32)}, lambda *_: 0.5)


def damaged(codec: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    return codec.encode(Update(VALUES, LAYOUT), change(dict(codec.init(LAYOUT))), KEY)


def ledger(**options: Any) -> PrivacyLedger:
    given = {"delta": 1e-5, "population": 10, "adjacency": "zero_out", "sampling": fc.Sampling()}
    return PrivacyLedger(**{**given, **options})
