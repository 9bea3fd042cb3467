"""Flower's weighted means, and how a strategy takes over an average that was computed elsewhere.

Frames are summed in one buffer (:mod:`fedcomp.strategies.compressed`), or by the clients themselves (coded sums).
Either way the inner strategy runs once, on one synthetic reply: FedAvg stores the mean, FedAdam makes its step from it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi, Strategy
from numpy.typing import NDArray

from fedcomp.flower.logs import flowers
from fedcomp.layout import Layout, Vector
from fedcomp.strategies.adaptive import Outcome, arrived_in, has_moments, step_on_support
from fedcomp.strategies.outer import Nesterov, SignStep

_MEANS: Final = (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi, Nesterov, SignStep)

_WEIGHTED_MEANS: Final = tuple(strategy.aggregate_train for strategy in _MEANS)
"""Aggregations that see the replies only through their weighted mean: Flower's, and the outer steps."""

MEANS: Final = tuple(strategy.__name__ for strategy in _MEANS)
"""Their names, for messages."""


_RECEIVED: Final = "%s: Received %s results and %s failures"
"""What Flower's FedAvg logs of the replies it was given."""

_RECEIVED_SUM: Final = "%s: Received the sum of the round's updates"
"""What is logged in its place where nobody may know how many there were."""

_AGGREGATION: Final = ("aggregate_train", "_check_and_log_replies")
"""The methods of Flower's FedAvg by which replies become a model."""


def is_mean(strategy: Strategy) -> bool:
    """Whether the strategy aggregates as one of Flower's weighted means does, with no hook set on the instance."""
    return type(strategy).aggregate_train in _WEIGHTED_MEANS and "aggregate_train" not in vars(strategy)


def returns_mean(strategy: Strategy) -> bool:
    """Whether the strategy's model is the weighted mean itself: Flower's FedAvg, its aggregation unchanged.

    FedAvgM and the adaptive ones make a step from the mean; a subclass, or a method put into the instance, may do
    anything.
    """
    own = [getattr(type(strategy), name, None) is getattr(FedAvg, name, None) for name in _AGGREGATION]
    return isinstance(strategy, FedAvg) and all(own) and not any(name in vars(strategy) for name in _AGGREGATION)


def adds_to_mean(strategy: Strategy) -> bool:
    """Whether the strategy is a weighted mean, or one of Flower's with something about it: to save the model, say.

    Its own ``aggregate_train`` has to be named in every one that stands in for it, as ``super().aggregate_train``: one
    that is not makes something else of the replies.
    """
    for cls in type(strategy).__mro__:
        method = vars(cls).get("aggregate_train")
        if method in _WEIGHTED_MEANS:
            return True
        own = cls.__module__.partition(".")[0] != "flwr"
        # The names a function uses: super().aggregate_train is among them where it is called.
        named = getattr(getattr(method, "__code__", None), "co_names", ())
        if method is not None and not (own and "aggregate_train" in named):
            return False
    return False


def weight_key_of(strategy: Strategy) -> str | None:
    """Return the name of the metric a strategy, or the one it wraps, weighs by; None when it has no such notion."""
    for candidate in (strategy, getattr(strategy, "strategy", None)):
        key = getattr(candidate, "weighted_by_key", None)
        if isinstance(key, str):
            return key
    return None


def aggregate_once(
    inner: Strategy,
    server_round: int,
    model: tuple[str, ArrayRecord],
    reply_to: Message,
    contents: Sequence[RecordDict],
    *,
    metrics_name: str = "metrics",
    received: tuple[int, int] | None = None,
    sparse: bool = False,
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """Let ``inner``, a weighted mean, aggregate one reply that is the mean already.

    FedAvg itself (:func:`returns_mean`) is not run: it would multiply the reply by 1, and copy it twice. What it does
    beside that, its metrics and its line in the log, is done here. The model may then hold the arrays of ``model``.

    Parameters
    ----------
    model : tuple of str and ArrayRecord
        Name of the replies' record, and the mean of the models in it.
    reply_to : Message
        One of the round's messages.
    contents : sequence of RecordDict
        What the clients really replied: their metrics go through the inner strategy's own aggregation, each of them
        once. None of them gives no metrics.
    received : tuple of int and int, optional
        How many replies the mean stands for, and how many could not be used: Flower's log tells of one result
        otherwise. None where that is not to be known.
    sparse : bool
        Whether the mean is the model itself wherever nothing arrived: an adaptive strategy then keeps to the rest
        (:mod:`fedcomp.strategies.adaptive`).
    """
    key = str(weight_key_of(inner))
    metrics_of = inner.train_metrics_aggr_fn  # type: ignore[attr-defined]
    metrics = metrics_of(list(contents), key) if contents else MetricRecord()
    name, arrays = model
    if returns_mean(inner):
        flowers.info(*_said("aggregate_train", received))
        return arrays, metrics
    # The inner strategy averages one reply of weight 1, which changes nothing.
    mean = RecordDict({name: arrays, metrics_name: MetricRecord({key: 1.0})})
    # The synthetic reply has no metrics but its weight; those of the clients were aggregated above.
    inner.train_metrics_aggr_fn = lambda records, key: metrics  # type: ignore[attr-defined]

    def step() -> Outcome:
        return inner.aggregate_train(server_round, [Message(mean, reply_to=reply_to)])

    try:
        with _counts(received):
            if sparse and has_moments(inner):
                return step_on_support(inner, arrived_in(arrays, inner), step)
            return step()
    finally:
        inner.train_metrics_aggr_fn = metrics_of  # type: ignore[attr-defined]


@contextmanager
def _counts(received: tuple[int, int] | None) -> Iterator[None]:
    """Let Flower's line about the replies say how many there were; the inner strategy sees one, their mean."""
    # The logger is the whole process's: lines of a strategy in another thread stay as they are.
    thread = get_ident()

    def correct(record: logging.LogRecord) -> bool:
        if record.thread == thread and record.msg == _RECEIVED and isinstance(record.args, tuple):
            record.msg, *said = _said(record.args[0], received)
            record.args = tuple(said)
        return True

    flowers.addFilter(correct)
    try:
        yield
    finally:
        flowers.removeFilter(correct)


def _said(hook: Any, received: tuple[int, int] | None) -> tuple[Any, ...]:
    """Return Flower's line about the replies, and what is put into it."""
    return (_RECEIVED_SUM, hook) if received is None else (_RECEIVED, hook, *received)


def mean_of_constants(exact: Mapping[str, NDArray[Any]], model: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the mean buffers with the infinities that are the model's own constants (masks).

    Times a weight of 0 these are not numbers.
    """
    return {n: np.where(np.isnan(v) & ~np.isfinite(model[n]), model[n], v) for n, v in exact.items()}


def copy_names(step: Vector, model: Vector, layout: Layout, copies: Mapping[int, int]) -> None:
    """Make the second name of a tensor what the first will be once ``step`` is added to ``model``, in place."""
    for second, first in copies.items():
        to, of = layout.tensors[second].slice, layout.tensors[first].slice
        np.subtract(model[of], model[to], out=step[to])
        step[to] += step[of]


def leave(vector: Vector, layout: Layout, unchanged: frozenset[int]) -> None:
    """Take from an update, in place, what a codec has made of tensors that nobody has changed."""
    for number, tensor in enumerate(layout.tensors):
        if number in unchanged:
            vector[tensor.slice] = 0.0


def not_held(layout: Layout, before: Vector, step: Vector, after: Vector) -> str:
    """Return a note that names tensors of which float32 replicas lose a fourth of a step's energy or more."""
    names = []
    for t in layout.wide:
        given = step[t.slice].astype(np.float64)
        off = given - (after[t.slice].astype(np.float64) - before[t.slice])
        if off @ off > 0.25 * (given @ given):
            names.append(t.name)
    if not names:
        return ""
    return (
        f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}: every node keeps the model as float32 here, and "
        "float32 loses such small steps of such large values; Compressed keeps float64 models as they are, and so "
        "does a policy that returns 'exact' for these tensors"
    )
