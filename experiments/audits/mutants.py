"""Wrong variants of the private code, each of which looks right and trains well, and the tier that must catch it.

Every mutant changes one thing in a class of the product and is audited beside its original: the audit has to flag the
one and pass the other. They are here to test the audit; nothing else may use them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord
from numpy.typing import NDArray

from fedcomp.codecs import TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.experiments.audits import cases
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.layout import Layout, Update
from fedcomp.privacy.adaptive import AdaptiveClip, NormBits
from fedcomp.privacy.bounds import to_grid
from fedcomp.privacy.entropy import Entropy, make_entropy
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.events import Event
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.mechanism import GridGaussian, Votes
from fedcomp.privacy.noise import draw, gaussian
from fedcomp.rng import Key
from fedcomp.strategies.private.dp_fedavg import DpFedAvg

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


def _rounded(vector: NDArray[Any], step: float) -> Integers:
    """Round without a bound."""
    if not np.isfinite(vector).all():
        raise Unbounded("not finite")
    return np.rint(np.clip(vector / step, -(2.0**50), 2.0**50)).astype(np.int64)


# Bounds.


@dataclass(frozen=True, kw_only=True)
class NoClip(GridGaussian):
    """Sums what comes."""

    def admit(self, contribution: NDArray[Any]) -> Integers:
        """Round, nothing else."""
        return _rounded(contribution, self.step)


class _With(DpFedAvg):
    """DP-FedAvg with another mechanism."""

    variant: type[GridGaussian] = GridGaussian

    def mechanism(self, layout: Layout, server_round: int) -> GridGaussian:
        """Return the variant with the same arguments."""
        right = super().mechanism(layout, server_round)
        return self.variant(**{name: getattr(right, name) for name in right.__dataclass_fields__})


class NoClipStrategy(_With):
    """DP-FedAvg that forgets to clip."""

    variant = NoClip


class ClipPerTensor(NoClipStrategy):
    """Clips every tensor to C, and not the update."""

    def contribution(self, update: NDArray[Any], layout: Layout, server_round: int) -> NDArray[Any]:
        """Clip tensor by tensor."""
        out = np.array(update, np.float64)
        for tensor in layout.tensors:
            length = float(np.linalg.norm(out[tensor.slice]))
            out[tensor.slice] *= min(1.0, self.clip / length) if length > 0.0 else 1.0
        return out


def remembered(rounds: int = 12) -> NDArray[np.float32]:
    """Return what a client sends that clips each of its updates to C, and then adds what it did not send before.

    Error feedback around top-1, with the project's own codec: mass that waited comes at once.
    """
    # Flat: the default policy would send tensors this small whole.
    layout = Layout.flat(cases.WIDTH)
    codec = ErrorFeedback(TopK(density=1.0 / layout.size))
    state = codec.init(layout)
    # All coordinates but the first get the same; each waits for its turn.
    gradient = np.zeros(layout.size, np.float32)
    gradient[:rounds] = 1.0
    gradient *= np.float32(cases.CLIP / np.linalg.norm(gradient))
    sent = np.zeros(layout.size, np.float32)
    for place in range(3 * rounds):
        frame, state = codec.encode(Update(gradient, layout), state, Key(0, "audit memory", place))
        now = codec.decode(frame, layout)
        sent = now if np.linalg.norm(now) > np.linalg.norm(sent) else sent
    return np.asarray(sent, np.float32)


# Denominators and weights.


@dataclass(frozen=True, kw_only=True)
class MeanOverReplies(GridGaussian):
    """Adds the noise of a mean over those expected to a mean over those that came."""

    came: list[int]
    expected: float

    def perturb(self, total: Integers, entropy: Entropy) -> Floats:
        """Return the sum that such a mean stands for."""
        noisy = super().perturb(total, entropy)
        exact = total * self.step
        return np.asarray(exact * (self.expected / max(1, len(self.came))) + (noisy - exact), np.float64)


class NoiseOnMean(DpFedAvg):
    """Divides by the replies, draws the noise for the clients that were expected."""

    def mechanism(self, layout: Layout, server_round: int) -> MeanOverReplies:
        """Return the mechanism with a count that grows as replies come."""
        right = super().mechanism(layout, server_round)
        self._came: list[int] = []
        fields = {name: getattr(right, name) for name in right.__dataclass_fields__}
        return MeanOverReplies(came=self._came, expected=self.expected, **fields)

    def added(self, contribution: NDArray[Any]) -> None:
        """Count one."""
        super().added(contribution)
        self._came.append(1)


@dataclass(frozen=True, kw_only=True)
class NoisePerClient(GridGaussian):
    """Every client adds its share of the noise, and then the noise is averaged like the updates."""

    def perturb(self, total: Integers, entropy: Entropy) -> Floats:
        """Add the noise of eight clients, each divided by eight."""
        if self.noise_multiplier == 0.0:
            return super().perturb(total, entropy)
        count = cases.EXPECTED
        shares = [draw(self.noise, self.grid_sigma, total.size, entropy) / count for _ in range(count)]
        return np.asarray((total + np.sum(shares, axis=0)) * self.step, np.float64)


class NoisePerClientStrategy(_With):
    """DP-FedAvg with noise that was divided once too often."""

    variant = NoisePerClient


class _FromReplies(DpFedAvg):
    """DP-FedAvg that also reads what private rounds never read."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Remember the replies."""
        self._read = [reply for reply in replies if not reply.has_error()]
        return super().aggregate_train(server_round, self._read)


def _metric(reply: Message, name: str) -> float:
    value = reply.content.metric_records["metrics"][name]
    assert isinstance(value, int | float)
    return value


class WeightedByExamples(_FromReplies):
    """Weighs every clipped update by the number of examples its client reports."""

    def mechanism(self, layout: Layout, server_round: int) -> GridGaussian:
        """Return a mechanism that trusts what it is given: updates are clipped before they are weighed."""
        right = super().mechanism(layout, server_round)
        fields = {name: getattr(right, name) for name in right.__dataclass_fields__}
        counts = [int(_metric(r, "num-examples")) for r in getattr(self, "_read", ())]
        self._weights = iter([count * len(counts) / sum(counts) for count in counts])
        return NoClip(**fields)

    def contribution(self, update: NDArray[Any], layout: Layout, server_round: int) -> NDArray[Any]:
        """Clip, then weigh."""
        right = super().mechanism(layout, server_round)
        clipped = to_grid(update, clip=right.clip, step=right.step, bound=int(right.bound)) * right.step
        return clipped * next(self._weights)


# Buffers and metrics.


class NoiseCastToIntegers(_FromReplies):
    """Averages integer buffers and casts their noise to integers: there is none left."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Add the mean of the buffers, and noise of the updates' standard deviation."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        found = to_arrays(arrays)
        sigma = self.mechanism(Layout.of(self._model), server_round).sigma / self.expected
        for name, array in found.items():
            if array.dtype.kind == "i":
                seen = [to_arrays(r.content.array_records["arrays"])[name] for r in self._read]
                noise = gaussian(sigma, array.size, self.entropy("buffers", server_round)) if sigma else np.zeros(1)
                found[name] = np.mean(seen, axis=0).astype(array.dtype) + noise.astype(array.dtype)
        return to_record(found), metrics


class MetricLeak(_FromReplies):
    """Releases the mean of the clients' losses, exactly."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Return the loss beside the model."""
        arrays, _ = super().aggregate_train(server_round, replies)
        losses = [_metric(r, "loss") for r in self._read]
        return arrays, MetricRecord({"loss": math.fsum(losses) / len(losses)})


# Sensitivity.


@dataclass(frozen=True, kw_only=True)
class OnlyC(GridGaussian):
    """Takes C for the sensitivity of "replace", which is 2C."""

    @property
    def sensitivity(self) -> float:
        """The bound, whatever the adjacency."""
        return self.bound


@dataclass(frozen=True, kw_only=True)
class ForgotRootK(Votes):
    """Draws noise of z for votes whose norm is sqrt(k)."""

    @property
    def bound(self) -> float:
        """One vote."""
        return float(self.resolution)


# Adaptive clipping.


class FlowersSign(DpFedAvg):
    """Uses the bit "was clipped" in the rule for the bit "was within", as Flower 1.41's wrappers do."""

    def concluded(self, server_round: int, entropy: Entropy) -> None:
        """Move the clip norm the wrong way."""
        before = self.clip
        super().concluded(server_round, entropy)
        assert self.adaptive is not None
        share = self.adaptive.quantile - math.log(self.clip / before) / self.adaptive.rate
        self.clip = self.adaptive.move(before, 1.0 - share)


class _Uncentred(NormBits):
    def add(self, within: bool) -> None:
        """Count 1 or 0: one client moves the count by 1, not by 1/2."""
        self._votes += 2 * int(within)


class UncentredBits(DpFedAvg):
    """Counts norm bits around 0, with the noise of a count around 1/2."""

    def _new_bits(self, adaptive: AdaptiveClip) -> NormBits:
        right = super()._new_bits(adaptive).mechanism
        return _Uncentred(right.noise_multiplier, right.adjacency, right.noise)


# Accounting.


@dataclass(frozen=True, kw_only=True)
class OneEventPerBatch(Votes):
    """Charges a batch of images as one release."""

    def event(self, *, rate: float = 1.0, size: int = 0, label: str = "update") -> Event:
        """Return the event of one row."""
        return replace(super().event(rate=rate, size=size, label=label), releases=1)


class ForgetfulAccountant(DpFedAvg):
    """Makes its accountant anew in every round."""

    def configure_train(self, *arguments: Any) -> Any:
        """Forget what was spent."""
        old = self.privacy
        self.privacy = PrivacyLedger(
            delta=old.delta,
            population=old.population,
            adjacency=old.adjacency,
            sampling=old.sampling,
            budget=old.budget,
        )
        return super().configure_train(*arguments)


# Supports.


@dataclass(frozen=True, kw_only=True)
class PrivateSupport(GridGaussian):
    """Releases the largest quarter of the sum, with noise on it, and nothing elsewhere."""

    def perturb(self, total: Integers, entropy: Entropy) -> Floats:
        """Choose by the exact sum, then add noise to what was chosen."""
        noisy = super().perturb(total, entropy)
        kept = np.argsort(-np.abs(total), kind="stable")[: total.size // 4]
        out = np.zeros(total.shape)
        out[kept] = noisy[kept]
        return out


class PrivateSupportStrategy(_With):
    """DP-FedAvg that leaves the support of its top-k un-noised."""

    variant = PrivateSupport


# Randomness.


class SameSeed(DpFedAvg):
    """Draws the same noise in every round."""

    def entropy(self, purpose: str, server_round: int) -> Entropy:
        """Forget the round."""
        return make_entropy(Key(self.seed, f"privacy/{purpose}"), insecure_deterministic=True)
