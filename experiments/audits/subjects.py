"""Subjects of the audit: mechanisms and private systems, driven by an attacker.

A subject runs the code path of a training any number of times and states the claims about it: the standard deviation of
every coordinate of its output, the cost of one round by the mechanism's own event, and the epsilon from the ledger. The
tiers (:mod:`fedcomp.experiments.audits.tiers`) compare both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.logs import quiet
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.layout import Layout
from fedcomp.privacy.entropy import SeededEntropy
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.events import Adjacency
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.mechanism import Mechanism, PrivateSum
from fedcomp.privacy.sampling import Sampling
from fedcomp.rng import Key
from fedcomp.strategies.private.strategy import PrivateStrategy

Floats = NDArray[np.float64]
Data = Sequence[tuple[int, Any]]
"""A data set: contributions by participant."""

Changed = TypeVar("Changed", bound=Mechanism)

DELTA: Final = 1e-5
POPULATION: Final = 1000


def new_ledger(adjacency: Adjacency) -> PrivacyLedger:
    """Return an empty ledger in memory in which all clients take part every time, since the audited rounds do not
    sample."""
    return PrivacyLedger(delta=DELTA, population=POPULATION, adjacency=adjacency, sampling=Sampling("everyone"))


@dataclass(frozen=True)
class Worlds:
    """Neighbouring data sets. ``absent`` and ``present`` are the worst pair found; ``pairs`` are for the search of tier
    A."""

    absent: Data
    present: Data
    pairs: Sequence[tuple[Data, Data]] = ()


@dataclass(frozen=True)
class Subject:
    """A private system under audit: independent runs of several rounds each.

    Attributes
    ----------
    name : str
    worlds : Worlds
    mechanism : Mechanism
        Its standard deviation is the claim about every output; its step is the public grid of the outputs.
    parts : dict of str to slice
        Segments of the output (tensors) whose noise is tested separately.
    width : int
        Number of outputs of one round.
    start : callable
        From a flag for noise, a seed and a trial number to a new run; ``privacy`` is its ledger.
    play : callable
        From a run, the result of ``nodes``, a data set and the number of the round, from 1, to the release of the
        round, float64 (width,).
    nodes : callable
        From a data set to the object that ``play`` needs, such as a grid.
    gridded : int, optional
        Number of leading outputs that lie on the grid; None for all.
    scale : ndarray of float, (width,)
        Claimed standard deviation of every output.
    """

    name: str
    worlds: Worlds
    mechanism: Mechanism
    parts: dict[str, slice]
    width: int
    start: Callable[[bool, int, int], Any]
    play: Callable[[Any, Any, Data, int], Floats]
    nodes: Callable[[Data], AbstractContextManager[Any]] = lambda data: nullcontext()
    gridded: int | None = None
    scale: Floats = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", np.full(self.width, self.mechanism.sigma))

    def run(self, data: Data, runs: int, *, rounds: int = 1, noisy: bool = True, seed: int = 0) -> Floats:
        """Return the releases of ``runs`` independent runs of ``rounds`` rounds, shape (runs, rounds, width)."""
        out = np.empty((runs, rounds, self.width))
        with quiet(), self.nodes(data) as nodes:
            for trial in range(runs):
                # A new run each time, because memory, ledger and clip norms must not carry over.
                run = self.start(noisy, seed, trial)
                for place in range(rounds):
                    out[trial, place] = self.play(run, nodes, data, place + 1)
        return out

    def ledger(self, rounds: int) -> PrivacyLedger:
        """Return the ledger of one run of ``rounds`` rounds over the world with the canary."""
        # With noise, because without noise there is no event to account for.
        run = self.start(True, 0, 0)
        with quiet(), self.nodes(self.worlds.present) as nodes:
            for place in range(rounds):
                self.play(run, nodes, self.worlds.present, place + 1)
        ledger: PrivacyLedger = run.privacy
        return ledger


def numbered(seed: int, trial: int) -> int:
    """Return one seed for a trial of a seeded series."""
    # A prime larger than any number of trials, so no two pairs give the same seed.
    return seed * 1_000_003 + trial


def seeded(key: Key) -> SeededEntropy:
    """Return noise that repeats, because an audit must be repeatable."""
    return SeededEntropy(key, insecure_deterministic=True)


def changed(mechanism: Mechanism, kind: Callable[..., Changed], **more: Any) -> Changed:
    """Return a mechanism of another kind with the same settings."""
    return kind(**{entry.name: getattr(mechanism, entry.name) for entry in fields(mechanism)}, **more)


def sums(name: str, mechanism: Mechanism, shape: tuple[int, ...], worlds: Worlds) -> Subject:
    """Return a mechanism behind :class:`fedcomp.privacy.mechanism.PrivateSum`, without a strategy around it."""

    def start(noisy: bool, seed: int, trial: int) -> Any:
        # The same mechanism without noise, so the exact sum goes through the same bounds and rounding.
        drawn = mechanism if noisy else replace(mechanism, noise_multiplier=0.0)
        entropy = seeded(Key(seed, "audit", trial))
        return SimpleNamespace(mechanism=drawn, privacy=new_ledger(mechanism.adjacency), entropy=entropy)

    def play(run: Any, nodes: Any, data: Data, number: int) -> Floats:
        held = PrivateSum(run.mechanism, shape)
        for participant, contribution in data:
            # Contributions that the mechanism refuses are left out, as in a strategy.
            with suppress(Unbounded):
                held.add(participant, contribution)
        return held.release(run.privacy, round=number, entropy=run.entropy).ravel()

    return Subject(name, worlds, mechanism, {"sum": slice(None)}, math.prod(shape), start, play)


# Strategies: their rounds on synthetic replies, through Flower's own hooks.


@cache
def mean() -> FedAvg:
    """Return Flower's mean, which keeps no state between rounds."""
    with quiet():
        return FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_evaluate_nodes=0, min_available_nodes=1)


def nobody(message: Message, context: Context) -> Message:
    """Answer nothing; this is the app of nodes with synthetic replies."""
    raise AssertionError("replies are made by hand")


def reply_by_hand(message: Message, arrays: Mapping[str, NDArray[Any]], **metrics: Any) -> Message:
    """Return a reply with a trained model and metrics."""
    content = RecordDict({"arrays": to_record(arrays), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


@dataclass(frozen=True)
class ClientReply:
    """A client's reply: its update and the other contents of a reply.

    ``update`` is the difference to the model, one float for each of the model's floats. ``buffers`` is added to every
    element of the integer buffers. If ``lost``, an error replaces the reply.
    """

    update: NDArray[Any]
    examples: int = 1
    loss: float = 1.0
    buffers: int = 0
    lost: bool = False


def rounds(
    name: str,
    make: Callable[[float | None, int], PrivateStrategy],
    worlds: Worlds,
    model: Mapping[str, NDArray[Any]],
    clients: int,
    *,
    messages: bool = False,
    width: int = 0,
    sum_of: Callable[[Any, Floats], Floats] = lambda strategy, step: step * strategy.expected,
    told: Callable[[Any], Sequence[float]] = lambda strategy: (),
    told_scale: Sequence[float] = (),
) -> Subject:
    """Return a private strategy as a subject; its releases follow from the models that it returns.

    The outputs of a round are the noisy sum, the change of the buffers, the sum of all released metrics, and the other
    releases of ``told``.

    Parameters
    ----------
    name : str
    make : callable
        From a noise multiplier (None: the strategy's own) and a seed to a new strategy with a declared population.
    worlds : Worlds
        Participants are partitions; contributions are updates, or a :class:`ClientReply` with ``messages``.
    model : mapping of arrays
        The model before every round; its floats are zero, so the step is not rounded away.
    clients : int
        Number of nodes; those without a contribution do not answer.
    messages : bool
        Whether updates arrive as ordinary replies through ``aggregate_train``. Otherwise they go through
        ``aggregate_updates``, which also receives these and all decoded frames.
    width : int
        Number of coordinates of the noisy sum; 0 for the model's floats.
    sum_of : callable
        From a strategy after a round and the model's step to the noisy sum.
    told, told_scale : callable and sequence of float
        From a strategy after a round to its other releases, each with its own noise, and the claimed standard
        deviations of these figures.
    """
    layout = Layout.of(model)
    size, exact = width or layout.size, sum(math.prod(t.shape) for t in layout.exact)
    buffers, further = slice(size, size + exact), slice(size + exact + 1, size + exact + 1 + len(told_scale))
    parts = {"sum": slice(0, size)} if width else {t.name: t.slice for t in layout.tensors}
    if told_scale:
        parts["told"] = further

    def replies(asked: Sequence[Message], nodes: InProcessGrid, data: Mapping[int, ClientReply]) -> list[Message]:
        out = []
        for message in asked:
            reply = data.get(nodes.partition_of(message.metadata.dst_node_id) or 0)
            # Nodes without a contribution are absent, as in a round with absent clients.
            if reply is None:
                continue
            if reply.lost:
                out.append(Message(Error(0, "lost"), reply_to=message))
                continue
            # A client returns its model and the strategy takes the difference, so rounding to float32 is part of the
            # audit.
            vector = (layout.flatten(model) + reply.update).astype(np.float32)
            arrays = layout.unflatten(vector, {t.name: model[t.name] + reply.buffers for t in layout.exact})
            out.append(reply_by_hand(message, arrays, **{"num-examples": reply.examples, "loss": reply.loss}))
        return out

    def play(run: PrivateStrategy, nodes: InProcessGrid, data: Data, number: int) -> Floats:
        # Every round starts from the same model, so rounds can be compared.
        asked = list(run.configure_train(number, to_record(model), ConfigRecord(), nodes))
        if messages:
            found, metrics = run.aggregate_train(number, replies(asked, nodes, dict(data)))
        else:
            ids = nodes.get_node_ids()
            found, metrics = run.aggregate_updates(number, ((ids[at], update) for at, update in data), layout)
        if found is None:
            raise AssertionError(f"{name}: round {number} released nothing")
        arrays = to_arrays(found)
        step = (layout.flatten(arrays) - layout.flatten(model)).astype(np.float64)
        moved = [(np.asarray(arrays[t.name], np.float64) - model[t.name]).ravel() for t in layout.exact]
        # All metrics as one figure. A private round releases none, and any metric that appears must be audited.
        released = math.fsum(float(v) for v in dict(metrics or {}).values() if isinstance(v, int | float))
        return np.concatenate([sum_of(run, step), *moved, [released], list(told(run))])

    strategy = make(None, 0)
    # A strategy knows the mechanism of a round only when it knows the model.
    strategy.adopt(to_record(model))
    subject = Subject(
        name,
        worlds,
        strategy.mechanism(Layout.flat(size) if width else layout, 1),
        parts,
        further.stop,
        lambda noisy, seed, trial: make(None if noisy else 0.0, numbered(seed, trial)),
        play,
        lambda data: InProcessGrid(nobody, clients),
        size,
    )
    # Buffers and metrics must be zero, so any number serves as their deviation.
    subject.scale[size : further.start] = 1.0
    subject.scale[further] = told_scale
    # Only if a strategy moves its buffers, because noise is tested on released values.
    if exact and subject.run(worlds.present, 1, noisy=False)[0, 0][buffers].any():
        parts["buffers"] = buffers
    return subject
