"""Mechanisms and simple strategies under audit, each with the worst pair of data sets found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.experiments.audits.subjects import ClientReply, Subject, Worlds, mean, rounds, sums
from fedcomp.privacy.adaptive import AdaptiveClip
from fedcomp.privacy.audit import adversarial
from fedcomp.privacy.events import Adjacency
from fedcomp.privacy.mechanism import GridGaussian, Votes
from fedcomp.privacy.votes import TopkSign
from fedcomp.rng import Key
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.strategy import PrivateStrategy
from fedcomp.strategies.private.topagg import TopAgg

Float32 = NDArray[np.float32]
Int8 = NDArray[np.int8]

CLIP: Final = 2.0
NODES: Final = 4
"""Number of clients that reply; fewer than expected, so a wrong denominator shows."""
EXPECTED: Final = 8

MODEL: Final[dict[str, NDArray[Any]]] = {
    # Two tensors of floats, so clipping each differs from clipping all, and an integer buffer, which must not change.
    "weight": np.zeros((6, 8), np.float32),
    "bias": np.zeros(16, np.float32),
    "count": np.array([3, 4], np.int64),
}
WIDTH: Final = 64
"""Number of floats in the model."""


def updates(count: int, width: int = WIDTH, *, length: float = 1.5 * CLIP) -> list[Float32]:
    """Return random float32 updates of this L2 length, by default 1.5 times the clip norm, so the other clients are
    clipped too."""
    # A fixed key, because worlds are part of the audit and the seed changes only the noise.
    draws = Key(0, "audit updates").generator().standard_normal((count, width))
    return [(length * draw / np.linalg.norm(draw)).astype(np.float32) for draw in draws]


def vote(place: int, width: int, k: int) -> Int8:
    """Return ``k`` random votes of -1 and 1."""
    generator = Key(0, "audit votes", place).generator()
    out = np.zeros(width, np.int8)
    out[generator.choice(width, k, replace=False)] = generator.choice(np.array([-1, 1], np.int8), k)
    return out


def worlds(
    adjacency: Adjacency, base: Sequence[tuple[int, Any]], place: int, tried: Sequence[Any], canary: Any, other: Any
) -> Worlds:
    """Return both worlds, without and with the canary of a participant, or with ``other`` in its place for "replace".
    Also return pairs for tier A: every tried contribution present or absent, or against the next one, its opposite."""
    held = list(base)
    if adjacency != "replace":
        return Worlds(held, [*held, (place, canary)], [(held, [*held, (place, one)]) for one in tried])
    # Contributions come in pairs, each before its opposite. An exchange of the two moves a sum as far as possible.
    twos = zip(tried[::2], tried[1::2], strict=False)
    pairs = [([*held, (place, a)], [*held, (place, b)]) for a, b in twos]
    return Worlds([*held, (place, other)], [*held, (place, canary)], pairs)


def votes_sum(
    adjacency: Adjacency = "zero_out",
    *,
    kind: type[Votes] = Votes,
    z: float = 1.0,
    noise: str = "discrete_gaussian",
    width: int = 200,
    k: int = 20,
    rows: int = 0,
) -> Subject:
    """Return a sum of votes; ``rows`` makes each row a separate release."""
    shape = (rows, width) if rows else (width,)
    mechanism = kind(noise_multiplier=z, adjacency=adjacency, noise=noise, k=k, shape=shape, by_row=rows > 0)

    def contribution(place: int) -> Int8:
        return np.stack([vote(100 * place + row, width, k) for row in range(rows)]) if rows else vote(place, width, k)

    base, canary = [(place, contribution(place)) for place in range(3)], contribution(9)
    tried = [sign * contribution(place) for place in range(10, 14) for sign in (1, -1)]
    name = f"votes{' by row' if rows else ''}, {adjacency}, {noise.replace('_', ' ')}"
    return sums(name, mechanism, shape, worlds(adjacency, base, 9, tried, canary, -canary))


def grid_sum(
    adjacency: Adjacency = "zero_out",
    *,
    kind: type[GridGaussian] = GridGaussian,
    z: float = 1.0,
    noise: str = "discrete_gaussian",
    width: int = 50,
) -> Subject:
    """Return a sum of clipped vectors."""
    mechanism = kind(noise_multiplier=z, adjacency=adjacency, noise=noise, clip=CLIP, size=width)
    tried = adversarial(width, CLIP, Key(0, "adversarial"), count=8)
    both = worlds(adjacency, list(enumerate(updates(3, width))), 9, tried, tried[0], tried[1])
    return sums(f"clipped vectors, {adjacency}, {noise.replace('_', ' ')}", mechanism, (width,), both)


def promise(z: float | None, seed: int, **more: Any) -> dict[str, Any]:
    """Return the arguments of every private strategy; the noise multiplier is 1 unless one is given."""
    return {
        "noise_multiplier": 1.0 if z is None else z,
        "population": EXPECTED,
        "insecure_deterministic": True,
        "seed": seed,
        **more,
    }


def canaries(width: int = WIDTH) -> list[Float32]:
    """Return contributions that a clip norm of :data:`CLIP` has to bound, each before its opposite."""
    # The longest leave the range of float32 and are dropped below.
    with np.errstate(over="ignore"):
        found = [one.astype(np.float32) for one in adversarial(width, CLIP, Key(0, "adversarial"), count=4)]
    # One vector with every tensor at the clip norm; clipping tensor by tensor would let it pass.
    first = np.zeros(width, np.float32)
    first[[0, -1]] = CLIP
    # Non-finite values are refused and are no contribution; they have separate tests.
    return [one for one in [first, -first, *found] if np.isfinite(one).all()]


def dp_fedavg(
    adjacency: Adjacency = "zero_out",
    *,
    kind: Callable[..., PrivateStrategy] = DpFedAvg,
    messages: bool = False,
    canary: Any = None,
) -> Subject:
    """Return DP-FedAvg on updates (or messages) of half of the expected clients.

    If the caller gives a ``canary``, only this contribution is tried.
    """

    def make(given: float | None, seed: int) -> PrivateStrategy:
        return kind(mean(), clip=CLIP, **promise(given, seed, adjacency=adjacency))

    found, last = canaries(), NODES - 1
    base: list[tuple[int, Any]] = list(enumerate(updates(last)))
    spare: Any = found[0] if canary is None else canary
    other: Any = -found[0]
    tried: list[Any] = found if canary is None else []
    if messages:
        base = [(i, ClientReply(update, examples=1 + 5 * i, loss=float(i), buffers=i)) for i, update in base]
        # The canary also reports extreme values besides its update: many examples, a large loss, other buffers.
        spare = ClientReply(spare, examples=1000, loss=50.0, buffers=40)
        other = ClientReply(other, examples=1, loss=0.0, buffers=0)
        tried = [ClientReply(one, examples=100, loss=3.0, buffers=7) for one in tried]
    name, both = f"DP-FedAvg, {adjacency}{', replies' if messages else ''}", (base, last, tried, spare, other)
    return rounds(name, make, worlds(adjacency, *both), MODEL, NODES, messages=messages)


SHARE_NOISE: Final = 0.8
"""Standard deviation of the noise on the count of norm bits, in clients."""


def adaptive(*, kind: type[DpFedAvg] = DpFedAvg) -> Subject:
    """Return DP-FedAvg with adaptive clipping. A round releases the sum and the fraction within the clip norm.

    The fraction is derived from the change of the clip norm.
    """
    rule = AdaptiveClip(initial=CLIP, count_noise=SHARE_NOISE)

    def make(given: float | None, seed: int) -> PrivateStrategy:
        return kind(mean(), clip=rule, **promise(given, seed))

    def share(strategy: DpFedAvg) -> list[float]:
        # The rule moves the logarithm of the clip norm by its rate times the fraction beyond the quantile. This is
        # solved for the fraction.
        moved = -math.log(strategy.clip / strategy.clips[max(strategy.clips)]) / rule.rate
        return [(moved + rule.quantile) * EXPECTED]

    # At the clip norm, not above: a full contribution and a bit that says "within".
    canary = np.zeros(WIDTH, np.float32)
    canary[0] = CLIP
    base = list(enumerate(updates(NODES - 1)))
    both = worlds("zero_out", base, NODES - 1, [canary, -canary, *canaries()], canary, None)
    return rounds("DP-FedAvg, adaptive clip", make, both, MODEL, NODES, told=share, told_scale=(SHARE_NOISE,))


def spread_norms(count: int) -> list[float]:
    """Return update norms with median 1, between about 0.6 and 1.6."""
    places = (np.arange(count) + 0.5) / count
    # Quantiles of a logistic distribution of the logarithms, which 1.702 makes nearly normal. The median is exactly 1,
    # without a random draw.
    return [float(n) for n in np.exp(0.25 * np.log(places / (1.0 - places)) / 1.702)]


def tracked(kind: type[DpFedAvg], *, start: float = 0.5, count: int = 60) -> list[float]:
    """Return the clip norms over ``count`` rounds of a strategy without noise; clients' updates have a median norm of
    1."""
    rows = [(place, np.array([norm, 0, 0, 0], np.float32)) for place, norm in enumerate(spread_norms(20))]

    def make(given: float | None, seed: int) -> DpFedAvg:
        said = promise(given, seed) | {"population": len(rows)}
        return kind(mean(), clip=AdaptiveClip(initial=start), **said)

    both, model = Worlds(rows, rows), {"w": np.zeros(4, np.float32)}
    read: Any = {"told": lambda strategy: [strategy.clip], "told_scale": (1.0,)}
    subject = rounds("clip norm", make, both, model, len(rows), **read)
    return [start, *subject.run(rows, 1, rounds=count, noisy=False)[0, :, -1].tolist()]


def topagg(adjacency: Adjacency = "zero_out") -> Subject:
    """Return TopAgg on decoded votes. The outcome is the mean, from which the noisy sum follows."""

    def make(given: float | None, seed: int) -> PrivateStrategy:
        return TopAgg(mean(), TopkSign(k=8), server_lr=1.0, **promise(given, seed, adjacency=adjacency))

    votes = [vote(place, WIDTH, 8).astype(np.float32) for place in range(14)]
    canary, tried = votes[9], [sign * one for one in votes[10:] for sign in (1, -1)]
    # Invalid votes must not be counted: a vote of two, and one vote too many.
    tried += [2.0 * canary, np.ones(WIDTH, np.float32)]
    both = worlds(adjacency, list(enumerate(votes[: NODES - 1])), NODES - 1, tried, canary, -canary)
    return rounds(f"TopAgg, {adjacency}", make, both, MODEL, NODES)


SUBJECTS: Final[dict[str, Callable[[], Subject]]] = {
    "votes": votes_sum,
    "votes, replace": lambda: votes_sum("replace"),
    "votes, Skellam": lambda: votes_sum(noise="skellam"),
    "votes by row": lambda: votes_sum(rows=4, width=60, k=6),
    "clipped vectors": grid_sum,
    "clipped vectors, replace": lambda: grid_sum("replace"),
    "clipped vectors, Skellam": lambda: grid_sum(noise="skellam"),
    "DP-FedAvg": dp_fedavg,
    "DP-FedAvg, replace": lambda: dp_fedavg("replace"),
    "DP-FedAvg, replies": lambda: dp_fedavg(messages=True),
    "DP-FedAvg, adaptive clip": adaptive,
    "TopAgg": topagg,
    "TopAgg, replace": lambda: topagg("replace"),
}
"""Functions that make the subjects at noise multiplier 1."""
