"""Incorrect variants of the private code, each with the audit tier that must detect it.

Every mutant changes one thing in a class of the product and is audited together with its original: the audit has to
flag the mutant and pass the original. :data:`MUTANTS` says what is wrong with each. They exist only to test the audit;
nothing else may use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from flwr.app import Message, MetricRecord
from numpy.typing import NDArray

from fedcomp.codecs import ErrorFeedback, TopK
from fedcomp.experiments.audits import cases, systems
from fedcomp.experiments.audits.subjects import Subject, changed
from fedcomp.experiments.audits.tiers import Verdict, tier_a, tier_b, tier_c, tier_d, tier_f
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.layout import Layout, Update
from fedcomp.privacy.adaptive import AdaptiveClip, NormBits
from fedcomp.privacy.bounds import clip_arrays, to_grid
from fedcomp.privacy.entropy import Entropy, make_entropy
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.events import Event
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.mechanism import GridGaussian, Votes
from fedcomp.privacy.noise import draw, gaussian
from fedcomp.rng import Key
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.systems.private.lsg import LowRank
from fedcomp.tasks.teachers import by_hash, wrapping_deal

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


# Bounds.


class NoClip(GridGaussian):
    """Sums all contributions without a bound."""

    def admit(self, contribution: NDArray[Any]) -> Integers:
        # A mutant also refuses non-finite values, because otherwise there would be no sum to audit.
        if not np.isfinite(contribution).all():
            raise Unbounded("not finite")
        # Bounded far above any clip norm, so the conversion to integers cannot overflow.
        return np.rint(np.clip(contribution / self.step, -(2.0**50), 2.0**50)).astype(np.int64)


def using(variant: type[GridGaussian], strategy: Any = DpFedAvg) -> Any:
    """Return a strategy with another mechanism."""

    class Using(strategy):
        def mechanism(self, layout: Layout, server_round: int) -> GridGaussian:
            return changed(super().mechanism(layout, server_round), variant)

    return Using


class ClipPerTensor(using(NoClip)):  # type: ignore[misc]  # a class made on the spot
    def contribution(self, update: NDArray[Any], layout: Layout, server_round: int) -> NDArray[Any]:
        out = np.array(update, np.float64)
        for tensor in layout.tensors:
            length = float(np.linalg.norm(out[tensor.slice]))
            # The canary of the cases has both tensors at the clip norm; together their norm is sqrt(2) C.
            out[tensor.slice] *= min(1.0, self.clip / length) if length > 0.0 else 1.0
        return out


def remembered(count: int = 12) -> NDArray[np.float32]:
    """Return the messages of a client that clips each update to C and then adds the part that it did not send before.

    Error feedback around top-1 with the project's own codec: accumulated mass is sent at once.
    """
    # Flat, because the default policy would send tensors this small whole.
    layout = Layout.flat(cases.WIDTH)
    codec = ErrorFeedback(TopK(density=1.0 / layout.size))
    # The first coordinates get equal values and are sent in turn. Each update has exactly the clip norm and passes the
    # clip; only the part from the memory makes it too long.
    gradient = np.zeros(layout.size, np.float32)
    gradient[:count] = cases.CLIP / np.linalg.norm(np.ones(count, np.float32))
    state, sent = codec.init(layout), []
    for place in range(3 * count):
        frame, state = codec.encode(Update(gradient, layout), state, Key(0, "audit memory", place))
        sent.append(codec.decode(frame, layout))
    # The longest message, because sensitivity is about the worst round.
    return np.asarray(max(sent, key=lambda vector: float(np.linalg.norm(vector))), np.float32)


# Denominators and weights.


@dataclass(frozen=True, kw_only=True)
class MeanOverReplies(GridGaussian):
    """Adds the noise for a mean over the expected clients to a mean over those that replied."""

    came: list[int]
    expected: float

    def perturb(self, total: Integers, entropy: Entropy) -> Floats:
        noisy, exact = super().perturb(total, entropy), total * self.step
        # Only the exact part is scaled up. The noise stays that for the expected number, which is the mistake.
        return np.asarray(exact * (self.expected / max(1, len(self.came))) + (noisy - exact), np.float64)


class NoiseOnMean(DpFedAvg):
    def mechanism(self, layout: Layout, server_round: int) -> MeanOverReplies:
        # Grows as replies arrive.
        self._came: list[int] = []
        right = super().mechanism(layout, server_round)
        return changed(right, MeanOverReplies, came=self._came, expected=self.expected)

    def added(self, contribution: NDArray[Any]) -> None:
        super().added(contribution)
        self._came.append(1)


class NoisePerClient(GridGaussian):
    def perturb(self, total: Integers, entropy: Entropy) -> Floats:
        # Tier A runs without noise, so there is nothing to divide.
        if self.noise_multiplier == 0.0:
            return super().perturb(total, entropy)
        count = cases.EXPECTED
        shares = [draw(self.noise, self.grid_sigma, total.size, entropy) / count for _ in range(count)]
        return np.asarray((total + np.sum(shares, axis=0)) * self.step, np.float64)


class _FromReplies(DpFedAvg):
    """DP-FedAvg that also reads data that private rounds must not read."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        self._read = [reply for reply in replies if not reply.has_error()]
        return super().aggregate_train(server_round, self._read)

    def reported(self, name: str) -> list[Any]:
        """Return a metric of every reply."""
        return [r.content.metric_records["metrics"][name] for r in getattr(self, "_read", ())]


class WeightedByExamples(_FromReplies):
    def mechanism(self, layout: Layout, server_round: int) -> GridGaussian:
        counts = self.reported("num-examples")
        # In the order of the replies, in which contributions are requested.
        self._weights = iter([count * len(counts) / sum(counts) for count in counts])
        # A weighted contribution exceeds the clip norm on purpose, so the mechanism must not clip it again: updates are
        # clipped before they are weighted.
        return changed(super().mechanism(layout, server_round), NoClip)

    def contribution(self, update: NDArray[Any], layout: Layout, server_round: int) -> NDArray[Any]:
        right = super().mechanism(layout, server_round)
        clipped = to_grid(update, clip=right.clip, step=right.step, bound=int(right.bound)) * right.step
        return clipped * next(self._weights)


# Buffers and metrics.


class NoiseCastToIntegers(_FromReplies):
    """Averages integer buffers and casts their noise to integers. At the deviation of the updates, no noise is left."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        found = to_arrays(arrays)
        sigma = self.mechanism(Layout.of(found), server_round).sigma / self.expected
        for name, array in found.items():
            if array.dtype.kind == "i":
                seen = [to_arrays(r.content.array_records["arrays"])[name] for r in self._read]
                noise = gaussian(sigma, array.size, self.entropy("buffers", server_round)) if sigma else np.zeros(1)
                found[name] = np.mean(seen, axis=0).astype(array.dtype) + noise.astype(array.dtype)
        return to_record(found), metrics


class MetricLeak(_FromReplies):
    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        arrays, _ = super().aggregate_train(server_round, replies)
        return arrays, MetricRecord({"loss": math.fsum(self.reported("loss")) / len(self._read)})


# Sensitivity.


class OnlyC(GridGaussian):
    @property
    def sensitivity(self) -> float:
        return self.bound


class ForgotRootK(Votes):
    @property
    def bound(self) -> float:
        return float(self.resolution)


# Adaptive clipping.


class FlowersSign(DpFedAvg):
    """Uses the bit "was clipped" in the rule for the bit "was within", as the wrappers in Flower 1.41 do."""

    def concluded(self, server_round: int, entropy: Entropy) -> None:
        before = self.clip
        super().concluded(server_round, entropy)
        assert self.adaptive is not None
        # The fraction that the correct rule used, derived from its step; the mutant uses one minus it.
        share = self.adaptive.quantile - math.log(self.clip / before) / self.adaptive.rate
        self.clip = self.adaptive.move(before, 1.0 - share)


class _Uncentred(NormBits):
    def add(self, within: bool) -> None:
        # 1 or 0: one client moves the count by 1, not by 1/2.
        self.votes += 2 * int(within)


class UncentredBits(DpFedAvg):
    def new_bits(self, adaptive: AdaptiveClip) -> NormBits:
        right = super().new_bits(adaptive).mechanism
        return _Uncentred(right.noise_multiplier, right.adjacency, right.noise)


# Accounting.


class OneEventPerBatch(Votes):
    def event(self, *, rate: float = 1.0, size: int = 0, label: str = "update") -> Event:
        return replace(super().event(rate=rate, size=size, label=label), releases=1)


class ForgetfulAccountant(DpFedAvg):
    def configure_train(self, *arguments: Any) -> Any:
        promise = ("delta", "population", "adjacency", "sampling", "budget")
        self.privacy = PrivacyLedger(**{name: getattr(self.privacy, name) for name in promise})
        return super().configure_train(*arguments)


# Supports.


class PrivateSupport(GridGaussian):
    def perturb(self, total: Integers, entropy: Entropy) -> Floats:
        noisy = super().perturb(total, entropy)
        # By the exact sum, so the choice of released coordinates depends on data without noise.
        kept = np.argsort(-np.abs(total), kind="stable")[: total.size // 4]
        out = np.zeros(total.shape)
        out[kept] = noisy[kept]
        return out


# Low-rank updates.


class TwoClips(LowRank, id="lsg"):
    """Bounds updates as usual, but clips the left products and the rest separately."""

    def kept(self, update: Any, plan: Any, pairs: Any, chosen: Any) -> Any:
        # A clip without effect; the two parts are clipped below instead.
        out = np.array(replace(self, clip=1e6 * self.clip).loose(update, plan, pairs, chosen))
        left = np.zeros(plan.short, np.bool_)
        for piece in plan.factored:
            left[piece.at : piece.at + piece.matrix[0] * piece.rank] = True
        for part in (left[chosen], ~left[chosen]):
            out[part] = clip_arrays([out[part]], self.clip)[0][0]
        return out

    def loose(self, *arguments: Any) -> Any:
        """Return the coordinates that the correct system keeps."""
        return super().kept(*arguments)


class SeparateClips(using(NoClip, systems.Steady)):  # type: ignore[misc]  # a class made on the spot
    def program(self) -> LowRank:
        return TwoClips(**self.settings.get_config())

    def contribution(self, update: Any, layout: Layout, server_round: int) -> Any:
        return update


# Randomness.


class SameSeed(DpFedAvg):
    def entropy(self, purpose: str, server_round: int) -> Entropy:
        return make_entropy(Key(self.seed, f"privacy/{purpose}"), insecure_deterministic=True)


# The mutants by tier.


@dataclass(frozen=True)
class Mutant:
    """An incorrect variant and its original under the tier that must distinguish them: a short description of the
    error, and functions that audit the variant and the original."""

    wrong: str
    tier: str
    original: Callable[[], list[Verdict]]
    mutated: Callable[[], list[Verdict]]


def _tracks(kind: type[DpFedAvg]) -> list[Verdict]:
    found = cases.tracked(kind)[-1]
    return [Verdict("clip", kind.__name__, "60 rounds", 1.0, found, "clip norm / median", 60, 0.9 < found < 1.1)]


class Silent(Votes):
    """Draws no noise but claims it."""

    def perturb(self, total: Any, entropy: Any) -> Any:
        return total * self.step


def whole_run(kind: str, canaries: int, guesses: int, *, seed: int = 0) -> Verdict:
    """Audit one run of a sum at noise multiplier 2 with this number of canaries. Each has its own coordinate, so no
    other canary changes its score.

    Parameters
    ----------
    kind : {"votes", "clipped vectors", "no noise"}
    """
    if kind == "clipped vectors":
        subject, rows = cases.grid_sum(z=2.0, width=canaries), cases.CLIP * np.eye(canaries)
    else:
        variant = Silent if kind == "no noise" else Votes
        subject, rows = cases.votes_sum(z=2.0, width=canaries, k=1, kind=variant), np.eye(canaries, dtype=np.int8)
    return tier_d(subject, [(100 + i, row) for i, row in enumerate(rows)], guesses=guesses, seed=seed)


def _check(tier: str, subject: Subject, runs: int = 1000, count: int = 1) -> list[Verdict]:
    if tier == "B":
        return tier_b(subject, runs=20)
    if tier == "C":
        return [tier_c(subject, runs=runs, rounds=count)]
    return [(tier_a if tier == "A" else tier_f)(subject)]


def _caught(
    wrong: str, tier: str, case: Callable[..., Subject], kind: Any, *, runs: int = 1000, count: int = 1, **how: Any
) -> Mutant:
    """Return a mutant of a class: the same case, made with another kind. Tier C makes ``runs`` of ``count`` rounds."""
    check = partial(_check, tier, runs=runs, count=count)
    return Mutant(wrong, tier, lambda: check(subject=case(**how)), lambda: check(subject=case(kind=kind, **how)))


def _held(dealt: list[NDArray[np.int64]]) -> list[Verdict]:
    """Audit DataLens in two worlds that differ in one record, held by as many teachers as hold any of these records."""
    return _check("A", systems.datalens(3, changed_teachers=int(np.bincount(np.concatenate(dealt)).max())))


def _by_hash() -> list[Verdict]:
    owner = by_hash(range(_LABELS.size), 4, Key(0, "audit owners"))
    return _held([np.flatnonzero(owner == teacher) for teacher in range(4)])


_LABELS: Final = np.repeat(np.arange(4), (12, 16, 10, 14))
"""Classes of unequal size, as in MNIST."""

_FEDAVG: Final = cases.dp_fedavg
_REPLIES: Final = partial(cases.dp_fedavg, messages=True)

MUTANTS: Final[dict[str, Mutant]] = {
    "no clip": _caught("updates are summed as they come", "A", _FEDAVG, using(NoClip)),
    "clip per tensor": _caught("every tensor clipped to C, not the update", "A", _FEDAVG, ClipPerTensor),
    "clip before memory": Mutant(
        "clipped, then error feedback adds what was not sent",
        "A",
        lambda: _check("A", _FEDAVG(canary=remembered())),
        lambda: _check("A", _FEDAVG(canary=remembered(), kind=using(NoClip))),
    ),
    "noise on the mean": _caught("noise for those expected, mean over those that came", "A", _FEDAVG, NoiseOnMean),
    "noise per client": _caught("clients add the noise, and it is averaged away", "B", _FEDAVG, using(NoisePerClient)),
    "noise in integers": _caught("noise of buffers cast to integers", "B", _REPLIES, NoiseCastToIntegers),
    "weights": _caught("clipped updates weighted by num-examples", "A", _REPLIES, WeightedByExamples),
    "C for 2C": _caught(
        "replace adjacency with the sensitivity of zero_out", "C", cases.grid_sum, OnlyC, adjacency="replace"
    ),
    "no root of k": _caught("noise of z, not of z sqrt(k)", "C", cases.votes_sum, ForgotRootK),
    "event per batch": _caught(
        "one event for a batch of images", "C", cases.votes_sum, OneEventPerBatch, rows=4, width=60, k=6
    ),
    # Nine rounds have three times the mu of one round, which 40 runs detect.
    "accountant reset": _caught("a new accountant in every round", "C", _FEDAVG, ForgetfulAccountant, runs=40, count=9),
    "private support": _caught("top-k of the exact sum, noise on those alone", "B", _FEDAVG, using(PrivateSupport)),
    "same seed": _caught("the same noise in every round", "F", _FEDAVG, SameSeed),
    # Two worlds without noise need few runs: 100 show a mu of 3.2.
    "metric leak": _caught("the exact mean loss is released", "C", _REPLIES, MetricLeak, runs=100),
    "Flower's sign": Mutant(
        'the bit "was clipped" in the rule for "was within"',
        "clip",
        lambda: _tracks(DpFedAvg),
        lambda: _tracks(FlowersSign),
    ),
    "uncentred bits": _caught("norm bits counted around 0, noise for 1/2", "A", cases.adaptive, UncentredBits),
    "separate clips": _caught(
        "both low-rank products clipped to C, not together", "A", systems.lsg, SeparateClips, keep=1.0
    ),
    "private support, low rank": _caught(
        "largest of the exact low-rank sum, noise on those alone",
        "B",
        systems.lsg,
        using(PrivateSupport, systems.Steady),
    ),
    "record twice": Mutant(
        "one record in two teachers",
        "A",
        _by_hash,
        # As the published code of DataLens assigns them.
        lambda: _held(list(wrapping_deal(_LABELS, 4, _LABELS.size // 4))),
    ),
}
"""All mutants; each is audited together with its original on the same data."""
