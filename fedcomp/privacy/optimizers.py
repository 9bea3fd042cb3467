"""Opacus optimisers on this package's mechanisms, with four kinds of contribution of a record to a DP-SGD step.

Every one sums contributions that are integer vectors of a bounded norm, one per record; its mechanism says what the
release costs, which is recorded, and draws integer noise on that sum; the result is divided by the *expected* batch
size. They differ in what a contribution is:

- :class:`PrivateOptimizer`: the gradient, clipped (Abadi et al. 2016; Opacus' flat clipping).
- :class:`TopAggOptimizer`: votes for the signs of its largest coordinates. The abstract of Wang et al., CCS 2021, says
  that TopAgg was used inside DP-SGD; how is derived here.
- :class:`MaskedOptimizer`: the coordinates that a public seed keeps, clipped (derived).
- :class:`LsgOptimizer`: the kept coordinates of the products with low-rank carriers, clipped together
  (:mod:`fedcomp.privacy.lsg`).

Opacus' noise is not used: it is of floating point, and added to sums that are. This file and
:mod:`fedcomp.privacy.dpsgd`, which assembles a training, import torch and Opacus; nobody imports them before they are
needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor

from fedcomp.errors import ConfigError
from fedcomp.privacy.entropy import Entropy, SeededEntropy, SystemEntropy
from fedcomp.privacy.events import Adjacency
from fedcomp.privacy.lsg import (
    Carriers,
    LowRankPlan,
    check_fraction,
    check_mask,
    count_kept,
    fraction,
    kept,
    remembered,
)
from fedcomp.privacy.mechanism import GridGaussian, Mechanism, Votes
from fedcomp.privacy.votes import threshold as cut
from fedcomp.rng import Key
from fedcomp.rules import Int, OneOf, Real, checked

if TYPE_CHECKING:
    from fedcomp.privacy.ledger import PrivacyLedger


def clip_rows(rows: Tensor, mechanism: GridGaussian) -> Tensor:
    """Clip and round each row as :meth:`GridGaussian.admit` does one vector; a row that is not finite becomes zero.

    Parameters
    ----------
    rows : Tensor of float32, (B, d)
        Overwritten.
    mechanism : GridGaussian
        Of ``size`` d.

    Returns
    -------
    Tensor of float32, (B, d)
        Whole numbers; the L2 norm of each row is at most ``mechanism.bound``, checked exactly.
    """
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    finite = torch.isfinite(norms)
    if not bool(finite.all()):
        # Not a product with zero, which would keep the NaN.
        rows[~finite] = 0.0
        norms = torch.where(finite, norms, 0.0)
    bound = mechanism.bound
    # Rounding raises a norm by d / (24 bound) steps on average, 0.3 steps more or less: few rows end outside.
    radius = bound - mechanism.size / (24.0 * bound) - 1.5
    # The clamp keeps short rows from being stretched: they are only converted to steps.
    scale = radius / norms.clamp(min=mechanism.clip * radius / bound)
    # Exact in float32: the bound in steps is far below 2^24 for any model that fits into memory.
    steps = (rows * scale.to(rows.dtype)[:, None]).round_()
    over = _norms(steps) > bound
    if bool(over.any()):
        # It moves a row by sqrt(d) / 2 steps at most, so from this radius none ends outside.
        radius = bound - 0.5 * math.sqrt(mechanism.size) - 1.0
        again = rows[over].double() * (radius / norms[over].clamp(min=mechanism.clip * radius / bound))[:, None]
        steps[over] = again.round_().to(steps.dtype)
    return steps


def _norms(whole: Tensor) -> Tensor:
    """Return the L2 norms of rows of integers, whose squares and sums are exact in float64."""
    return torch.linalg.vector_norm(whole, dim=1, dtype=torch.float64)


def _finite(rows: Tensor) -> Tensor:
    """Return which rows contain neither NaN nor infinity, (B,)."""
    # A sum is finite only if all its terms are; it may overflow where they are.
    suspect = ~torch.isfinite(rows.sum(dim=1))
    if bool(suspect.any()):
        suspect[suspect.clone()] = ~torch.isfinite(rows[suspect]).all(dim=1)
    return ~suspect


def vote_rows(
    rows: Tensor, k: int, *, saturation: float | None = None, uniforms: Tensor | NDArray[np.float64] | None = None
) -> Tensor:
    """Return the votes of each row: :func:`fedcomp.privacy.votes.topk_stochastic_sign` on a whole batch at once.

    Parameters
    ----------
    rows : Tensor, (B, d)
        Finite or not; a row that is not, or that is zero, casts no vote.
    k : int
    saturation : float, optional
    uniforms : float64, (B, min(k, d)), optional
        Numbers in [0, 1) for each row's support in ascending order of indices; None casts the plain signs.

    Returns
    -------
    Tensor of int8, (B, d)
        At most k entries of -1 and 1 in each row. Of equal magnitudes any may be taken.
    """
    votes = torch.zeros(rows.shape, dtype=torch.int8, device=rows.device)
    if not rows.shape[0]:
        return votes
    finite = _finite(rows)
    if not bool(finite.all()):
        rows = torch.where(finite[:, None], rows, 0.0)
    kept = min(k, rows.shape[1])
    columns = torch.topk(rows.abs(), kept, dim=1, sorted=False).indices
    # Of a mask, values come in ascending order of indices; sorting them takes longer.
    chosen = torch.zeros(rows.shape, dtype=torch.bool, device=rows.device).scatter_(1, columns, True)
    values = rows[chosen].reshape(-1, kept).double()
    signs = values.sign()
    if uniforms is not None:
        largest = values.abs().amax(dim=1, keepdim=True)
        scale = largest if saturation is None else largest.clamp(max=saturation)
        chance = 0.5 + torch.where(scale > 0.0, 0.5 * values / scale, 0.0)
        up = torch.as_tensor(uniforms, dtype=torch.float64, device=rows.device) < chance
        signs = torch.where(signs != 0.0, torch.where(up, 1.0, -1.0), 0.0)
    votes[chosen] = signs.to(torch.int8).reshape(-1)
    return votes


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What a step of private training does to gradients, and what its batches are.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise over the sensitivity.
    rate : float
        Probability with which a record is in a batch (Poisson sampling).
    max_grad_norm : float
        Clip norm C of one record's gradient over all parameters; votes have none, theirs is sqrt(k).
    noise : str
        As in :class:`~fedcomp.privacy.mechanism.Mechanism`.
    adjacency : str, optional
        The ledger's, which is the default.
    loss_reduction : {"mean", "sum", "none"}
        What the loss does over a batch; after "sum" nothing is divided. "none", for :func:`private_training
        <fedcomp.privacy.dpsgd.private_training>` alone: the loss is one number for each record, and the sum is divided
        by the expected batch size, as with "mean". A mean divides by the batch's own size and per-sample hooks multiply
        by it again, which in floating point is not quite 1: then the last bits of every record's gradient depend on how
        many others there are.
    label : str
        Of the event.
    entropy : Entropy, optional
        Of noise and batches; default: the operating system's.
    key : Key
        Public randomness: masks, carriers. The step's number becomes its round. With a seed for entropy, votes too.

    Examples
    --------
    >>> settings = StepSettings(noise_multiplier=1.1, rate=0.01, max_grad_norm=0.5, loss_reduction="none")
    """

    noise_multiplier: float
    rate: float
    max_grad_norm: float = 1.0
    noise: str = "discrete_gaussian"
    adjacency: Adjacency | None = None
    loss_reduction: str = "mean"
    label: str = "gradient"
    entropy: Entropy | None = None
    key: Key | None = None


class PrivateOptimizer(DPOptimizer):
    """Flat DP-SGD on a grid: each record's gradient is clipped, rounded, summed exactly, and noise is drawn once.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Makes the step from the noisy gradient.
    ledger : PrivacyLedger
        Is written before a step's noise is drawn. Its budget is the budget.
    settings : StepSettings
    expected_batch_size : float
        ``rate * records``, not rounded: the sum is divided by it.
    start : int, optional
        Number of the first step. A step redraws its batch, and is a round of its own in the ledger; default: after
        the rounds the ledger holds.
    drawn : callable, optional
        Returns how many batches were drawn so far. Steps on one batch are then recorded in one round: they are on the
        same records, and cost more than steps on batches of their own. 0 says nothing.

    Attributes
    ----------
    steps : int
        Number of the next step: of its key, and of the round it is recorded under unless batches are counted.
    refused : int
        Records left out because their gradient was not finite. It is a statistic of the data: not to be released.

    Raises
    ------
    ConfigError
        When an argument is out of range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ledger: PrivacyLedger,
        settings: StepSettings,
        *,
        expected_batch_size: float,
        start: int | None = None,
        drawn: Callable[[], int] | None = None,
    ) -> None:
        if settings.adjacency not in (None, ledger.adjacency):
            raise ConfigError(
                f"adjacency={settings.adjacency!r} is not the ledger's, {ledger.adjacency!r}: the noise would be "
                "scaled for one and epsilon computed for the other"
            )
        if ledger.sampling.cap:
            raise ConfigError(
                f"the ledger counts {ledger.sampling.cap} participations of a record, and any record may be in any "
                "step: use Sampling('poisson', rate=...), or Sampling('everyone')"
            )
        if not 0.0 < expected_batch_size < math.inf:
            raise ConfigError(f"expected_batch_size={expected_batch_size!r} is not valid: rate * records, above 0")
        # Losses one by one were summed before the backward pass, where they are allowed: here it is "mean" then.
        checked("loss_reduction", settings.loss_reduction, OneOf("mean", "sum"))
        super().__init__(
            optimizer,
            noise_multiplier=settings.noise_multiplier,
            max_grad_norm=settings.max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=settings.loss_reduction,
        )
        self.batch = float(expected_batch_size)
        self.settings = settings
        self.ledger = ledger
        self.entropy = SystemEntropy() if settings.entropy is None else settings.entropy
        self.adjacency: Adjacency = ledger.adjacency
        self.key = (Key(0) if settings.key is None else settings.key).at(purpose="dp-sgd")
        self.steps = ledger.next_round if start is None else start
        self._first = self.steps
        self._drawn = drawn
        self.refused = 0
        self._shapes = [tuple(p.shape) for p in self.params]
        self.size = sum(math.prod(shape) for shape in self._shapes)
        if not self.size:
            raise ConfigError("the optimiser holds no parameters that require gradients")
        self._using: Mechanism | None = None
        self._parts = 0
        self.total: NDArray[np.int64] | None = None
        self.mechanism()  # refuses wrong arguments now, not at the first step

    def mechanism(self) -> Mechanism:
        """Return what bounds this step's contributions, draws its noise and says what it costs."""
        return GridGaussian(
            noise_multiplier=self.noise_multiplier,
            adjacency=self.adjacency,
            noise=self.settings.noise,
            clip=self.max_grad_norm,
            size=self.length(),
        )

    def length(self) -> int:
        """Return how many coordinates a contribution to this step has."""
        return self.size

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the contributions' coordinates, (B, length), of the gradients ``rows`` (B, size), before clipping.

        May look at one row at a time and at public data, at nothing else.
        """
        return rows

    def expand(self, noisy: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the gradient, (size,), of the noisy sum, (length,): post-processing."""
        return noisy

    def clip_and_accumulate(self) -> None:
        """Add the bounded contribution of each record to the step's sum."""
        mechanism = self._begin()
        assert isinstance(mechanism, GridGaussian)
        self._add(clip_rows(self.reduce(self.rows()), mechanism))

    def add_noise(self) -> None:
        """Record what this step costs, and only then draw its noise and set ``p.grad``.

        Raises
        ------
        BudgetExceeded, PrivacyLedgerError
            Nothing was released; the gradients are gone.
        """
        assert self._using is not None
        assert self.total is not None
        # The mechanism that bounded these contributions, also where a schedule has moved on since.
        mechanism, total = self._using, self.total
        # Whatever happens next, no gradient without noise is left for the optimiser beneath.
        for p in self.params:
            p.grad = None
        self._using = self.total = None
        batch = 0 if self._drawn is None else self._drawn()
        # Rounds then count batches: two steps on one batch are two events on the same records.
        number = self._first + batch - 1 if batch else self.steps
        event = mechanism.event(rate=self.settings.rate, size=total.size, label=self.settings.label)
        self.ledger.record(event, round=number)
        self.steps += 1
        gradient = torch.from_numpy(self.expand(mechanism.perturb(total, self.entropy)))
        start = 0
        for p, shape in zip(self.params, self._shapes, strict=True):
            stop = start + math.prod(shape)
            p.grad = gradient[start:stop].reshape(shape).to(p.device, p.dtype)
            start = stop

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear gradients; and the sum, unless the step was put off to gather more of the same batch."""
        if not self._is_last_step_skipped:
            self._using = self.total = None
        super().zero_grad(set_to_none)

    def skip_backward(self) -> None:
        """Stand in for the backward pass of an empty batch, which not every module survives: no contributions."""
        for p in self.params:
            p.grad_sample = p.new_zeros((0, *p.shape))

    def _begin(self) -> Mechanism:
        # One mechanism per step: a schedule that changes a norm between clip and noise changes the next step.
        if self._using is None:
            self._using = self.mechanism()
            self._parts = 0
        return self._using

    def rows(self) -> Tensor:
        """Return the gradients of the batch, (B, size) in float32, and mark them as used."""
        parts = []
        for p in self.params:
            # Opacus' own guard: gradients that were summed already must not be summed again.
            _check_processed_flag(p.grad_sample)
            sample = self._get_flat_grad_sample(p)
            parts.append(sample.reshape(sample.shape[0], p.numel()).to(torch.float32))
            _mark_as_processed(p.grad_sample)
        rows = torch.cat(parts, dim=1)
        finite = _finite(rows)
        if not bool(finite.all()):
            self.refused += int((~finite).sum())
            rows[~finite] = 0.0
        return rows

    def _add(self, whole: Tensor, times: int = 1) -> None:
        # Sums of whole numbers in float64 are exact below 2^53.
        total = whole.sum(dim=0, dtype=torch.float64).to("cpu", torch.int64).numpy() * times
        self.total = total if self.total is None else self.total + total
        self._parts += 1


class TopAggOptimizer(PrivateOptimizer):
    """DP-SGD on votes: each record votes for the signs of the ``k`` largest coordinates of its gradient.

    Parameters
    ----------
    optimizer, ledger, settings, **rest
        As in :class:`PrivateOptimizer`; there is no clip norm to choose, ``max_grad_norm`` is sqrt(k).
    k : int
        Votes of a record; the number of parameters and more means all.
    saturation : float, optional
        Magnitudes above it vote with certainty.
    stochastic : bool
        False casts the plain signs.
    threshold : float, optional
        The gradient is then the sign of each noisy sum beyond this fraction of the expected batch, 0 of the others;
        None takes the noisy sum over the expected batch.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ledger: PrivacyLedger,
        settings: StepSettings,
        *,
        k: int,
        saturation: float | None = None,
        stochastic: bool = True,
        threshold: float | None = None,
        **rest: Any,
    ) -> None:
        k = checked("k", k, Int(1))
        if saturation is not None:
            checked("saturation", saturation, Real(above=0.0))
        if threshold is not None and not 0.0 <= threshold < math.inf:
            raise ConfigError(f"threshold={threshold!r} is not valid: a finite fraction >= 0, or None")
        size = sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        # Before the base class, which asks for the mechanism at once.
        self.k = max(1, min(k, size))
        self.saturation = saturation
        self.stochastic = stochastic
        self.threshold = threshold
        super().__init__(optimizer, ledger, replace(settings, max_grad_norm=math.sqrt(self.k)), **rest)

    def mechanism(self) -> Votes:
        """Return the mechanism of a sum of votes: the bound sqrt(k) is structural."""
        return Votes(
            noise_multiplier=self.noise_multiplier,
            adjacency=self.adjacency,
            noise=self.settings.noise,
            k=self.k,
            shape=(self.length(),),
        )

    def clip_and_accumulate(self) -> None:
        """Add each record's votes to the step's sum."""
        mechanism = self._begin()
        assert isinstance(mechanism, Votes)
        rows = self.rows()
        uniforms = None
        if self.stochastic:
            # Secret coins, like the noise: which ones a record gets depends on who is before it in the batch. Were they
            # public, a record that is there or not would change the votes of all behind it.
            key = self.key.at(purpose="dp-sgd votes", round=self.steps, layer=self._parts)
            coins = self.entropy if self.entropy.secure else SeededEntropy(key, insecure_deterministic=True)
            uniforms = coins.uniform(rows.shape[0] * self.k).reshape(-1, self.k)
        self._add(vote_rows(rows, self.k, saturation=self.saturation, uniforms=uniforms), mechanism.resolution)

    def expand(self, noisy: NDArray[np.float64]) -> NDArray[np.float64]:
        """Apply the threshold, if there is one."""
        if self.threshold is None:
            return noisy
        passed = cut(noisy, self.threshold * self.batch).astype(np.float64)
        # What follows divides a mean by the expected batch; a sign is not divided.
        return passed * self.batch if self.loss_reduction == "mean" else passed


class MaskedOptimizer(PrivateOptimizer):
    """DP-SGD on a part of the coordinates: those that a public seed keeps, other ones in every step (derived).

    Clipping comes after masking, over the kept coordinates alone, and noise is on them alone. The mask depends on the
    seed and the step, never on the data.

    Parameters
    ----------
    optimizer, ledger, settings, **rest
        As in :class:`PrivateOptimizer`.
    keep : float
        Fraction kept, at the end of the schedule.
    schedule : {"constant", "linear", "cosine"}
    schedule_steps : int
        Steps of the training that the schedule runs over; not needed for "constant".
    schedule_start : int
        Number of the step that it begins with.
    mask : {"random", "noisy_magnitude"}
        The second keeps half of its coordinates where the noisy gradients of former steps were large: what was
        released may be looked at (post-processing).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ledger: PrivacyLedger,
        settings: StepSettings,
        *,
        keep: float,
        schedule: str = "constant",
        schedule_steps: int = 0,
        schedule_start: int = 0,
        mask: str = "random",
        **rest: Any,
    ) -> None:
        check_fraction(schedule, schedule_steps, keep)
        check_mask(mask)
        self.keep = keep
        self.schedule = schedule
        self.schedule_steps = schedule_steps
        self.schedule_start = schedule_start
        self.mask = mask
        # All of it before the base class, which asks for the mechanism, whose size is that of the mask.
        self._kept: NDArray[np.int64] | None = None
        self._former: NDArray[np.float64] | None = None
        super().__init__(optimizer, ledger, settings, **rest)

    def full(self) -> int:
        """Return how many coordinates there are to choose from."""
        return self.size

    def length(self) -> int:
        """Return how many coordinates this step keeps."""
        return count_kept(self.full(), self._share())

    def former(self) -> NDArray[np.float64] | None:
        """Return the running sum of noisy gradients where the mask is chosen; None before there is one."""
        return self._former

    def kept(self) -> NDArray[np.int64]:
        """Return the coordinates this step keeps, ascending."""
        if self._kept is None:
            magnitude = self.former() if self.mask == "noisy_magnitude" else None
            key = self.key.at(purpose="dp-sgd mask", round=self.steps)
            self._kept = kept(self.full(), self._share(), key, magnitude)
        return self._kept

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the kept coordinates of each row."""
        chosen = self.kept()
        return rows if chosen.size == self.full() else rows[:, torch.from_numpy(chosen).to(rows.device)]

    def expand(self, noisy: NDArray[np.float64]) -> NDArray[np.float64]:
        """Put the kept coordinates back in their places; the others are zero."""
        out = self.scatter(noisy)
        self.remember(out)
        return out

    def scatter(self, noisy: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the kept coordinates among zeros, and let the next step choose again."""
        out = np.zeros(self.full())
        out[self.kept()] = noisy
        self._kept = None
        return out

    def remember(self, gradient: NDArray[np.float64]) -> None:
        """Add a noisy gradient to the running sum that the next mask may look at."""
        if self.mask == "noisy_magnitude":
            self._former = remembered(self._former, gradient)

    def _share(self) -> float:
        return fraction(self.schedule, self.steps - self.schedule_start, self.schedule_steps, self.keep)


class LsgOptimizer(MaskedOptimizer):
    """DP-SGD on the kept coordinates of low-rank products: one clip over all tensors and both carriers.

    Carriers come from the current model, which is private already. Per-sample gradients are made in full and
    projected then, so the memory is that of DP-SGD.

    Parameters
    ----------
    optimizer, ledger, settings, **rest
        As in :class:`MaskedOptimizer`; ``keep=1`` is low rank alone.
    rank : int
        Of the carriers; tensors of one dimension, and matrices no larger than that, stay whole.
    names : sequence of str
        Names of the optimiser's parameters, in its order; numbers, where none are given.
    whole : sequence of str
        Patterns of names that stay whole.
    history : int
        From this step on the carriers follow the way the model went since it was given; before, the model itself.
        0 leaves them with the model itself.
    refresh : int
        Steps that the same carriers serve.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ledger: PrivacyLedger,
        settings: StepSettings,
        *,
        rank: int,
        names: Sequence[str] = (),
        whole: Sequence[str] = (),
        history: int = 0,
        refresh: int = 1,
        **rest: Any,
    ) -> None:
        tensors = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        labels = list(names) or [str(number) for number in range(len(tensors))]
        if len(labels) != len(tensors) or len(set(labels)) != len(labels):
            raise ConfigError(f"{len(labels)} names for {len(tensors)} parameters; expected one each, all different")
        history = checked("history", history, Int())
        refresh = checked("refresh", refresh, Int(1))
        shapes = {label: tuple(p.shape) for label, p in zip(labels, tensors, strict=True)}
        self.plan = LowRankPlan.of(shapes, rank, whole)
        self.history = history
        self.refresh = refresh
        self._pairs: Carriers | None = None
        super().__init__(optimizer, ledger, settings, **{"keep": 1.0, **rest})
        # After the base class, whose parameters these are.
        self._before = self._model() if history else None

    def full(self) -> int:
        """Return the length of the products of all tensors."""
        return self.plan.short

    def former(self) -> NDArray[np.float64] | None:
        """Return the running sum of noisy gradients, projected by this step's carriers."""
        if self._former is None:
            return None
        return np.concatenate(self.plan.project(self._former, self.carriers()))

    def carriers(self) -> Carriers:
        """Return this step's carriers."""
        if self._pairs is None:
            key = self.key.at(purpose="dp-sgd carriers", round=self.steps)
            before = self._before if self.history and self.steps - self._first >= self.history else None
            self._pairs = self.plan.carriers(self._model(), key, before)
        return self._pairs

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the kept coordinates of each row's products with the carriers."""
        pairs = [
            None if pair is None else tuple(torch.from_numpy(carrier).to(rows.device) for carrier in pair)
            for pair in self.carriers()
        ]
        return super().reduce(torch.cat(self.plan.project(rows, pairs), dim=1))

    def expand(self, noisy: NDArray[np.float64]) -> NDArray[np.float64]:
        """Reconstruct the gradient."""
        out = self.plan.reconstruct(self.scatter(noisy), self.carriers())
        # ``steps`` counts this step already.
        if (self.steps - self._first) % self.refresh == 0:
            self._pairs = None
        self.remember(out)
        return out

    def _model(self) -> NDArray[np.float64]:
        return np.concatenate([p.detach().to("cpu", torch.float64).reshape(-1).numpy() for p in self.params])
