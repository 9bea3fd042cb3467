"""DP-SGD: private training of a torch module with Opacus' per-sample gradients and this package's mechanisms.

:func:`private_training` puts together what a training loop needs: hooks for per-sample gradients on the module itself,
whose state-dict keys stay what they are; a loader that samples as the accountant assumes; and one of four optimisers
(:mod:`fedcomp.privacy.optimizers`), which writes the ledger before it draws noise.

Opacus gives the per-sample gradients and the order of a step. Not used are its samplers, which draw with a Mersenne
twister; its expected batch size, which is truncated (200 records in batches of 3 on average are divided by 2); and its
noise. This file and the optimisers import torch and Opacus; nobody imports them before they are needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from opacus.accountants import RDPAccountant
from opacus.data_loader import wrap_collate_with_empty
from opacus.grad_sample import GradSampleHooks
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.privacy.coins import secret_draws
from fedcomp.privacy.entropy import Entropy, SystemEntropy, coins_of
from fedcomp.privacy.optimizers import LsgOptimizer, MaskedOptimizer, PrivateOptimizer, StepSettings, TopAggOptimizer
from fedcomp.privacy.sampling import poisson
from fedcomp.rules import Int, Real, checked

if TYPE_CHECKING:
    from fedcomp.privacy.ledger import PrivacyLedger

_OPTIMIZERS: Final[Mapping[str, Callable[..., PrivateOptimizer]]] = {
    "dp-sgd": PrivateOptimizer,
    "topagg": TopAggOptimizer,
    "random-mask": MaskedOptimizer,
    "lsg": LsgOptimizer,
}


class PoissonLoader:
    """Batches in which each record is independently with probability ``rate``; some may be empty.

    Parameters
    ----------
    data : Dataset or DataLoader
        Of a loader its data set and its collate function are taken; its batches are not.
    rate : float
        In (0, 1].
    steps : int
        Batches of one iteration.
    entropy : Entropy
        The amplification by sampling needs that nobody else can tell who was in a batch.

    Attributes
    ----------
    drawn : int
        Batches drawn so far, over all iterations.

    Raises
    ------
    ConfigError
        For data without a length or without records, or a rate that is not a probability.

    Examples
    --------
    >>> from torch.utils.data import TensorDataset
    >>> loader = PoissonLoader(TensorDataset(torch.zeros(100, 3)), rate=0.1, steps=5)
    >>> [batch[0].shape[1] for batch in loader], loader.drawn
    ([3, 3, 3, 3, 3], 5)
    """

    def __init__(
        self, data: Dataset[Any] | DataLoader[Any], *, rate: float, steps: int, entropy: Entropy | None = None
    ) -> None:
        collate: Callable[[Any], Any] = default_collate
        if isinstance(data, DataLoader):
            collate, data = data.collate_fn, data.dataset
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            raise ConfigError("Poisson sampling draws records by their number; the data set has no length")
        checked("rate", rate, Real(above=0.0, most=1.0))
        steps = checked("steps", steps, Int())
        self.records = len(data)
        if not self.records:
            raise ConfigError("the data set holds no records")
        self.dataset: Dataset[Any] = data
        self.rate = rate
        self.steps = steps
        self.drawn = 0
        self._entropy = SystemEntropy() if entropy is None else entropy
        # Of the first record: a batch without any has the same arrays, with no rows.
        shapes, dtypes = zip(*((tuple(np.shape(x)), torch.as_tensor(x).dtype) for x in data[0]), strict=True)
        self._collate = wrap_collate_with_empty(
            collate_fn=collate, sample_empty_shapes=[(0, *shape) for shape in shapes], dtypes=list(dtypes)
        )

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.steps):
            chosen = np.flatnonzero(poisson(self.records, self.rate, self._entropy))
            self.drawn += 1
            if isinstance(self.dataset, TensorDataset) and self._collate.wrapped_collator_fn is default_collate:
                where = torch.from_numpy(chosen)
                yield [tensor[where] for tensor in self.dataset.tensors]
            else:
                yield self._collate([self.dataset[int(index)] for index in chosen])


@dataclass
class PrivateTraining:
    """What a training loop needs: ``for batch in training.loader: training.step(batch, loss)``, then ``close()``.

    Attributes
    ----------
    module : torch.nn.Module
        The one that was given; hooks are on it until :meth:`close`, and its state-dict keys are what they were.
    optimizer : PrivateOptimizer
    loader : PoissonLoader
    accountant : opacus.accountants.RDPAccountant
        Told of every step as well, to check the ledger against; it keeps nothing and refuses nothing.
    hooks : opacus.grad_sample.GradSampleHooks
    per_record : bool
        Whether losses are not reduced.
    coins : Entropy
        Of what the module draws from torch's global generators, such as dropout's masks.
    """

    module: nn.Module
    optimizer: PrivateOptimizer
    loader: PoissonLoader
    accountant: RDPAccountant
    hooks: GradSampleHooks
    per_record: bool = False
    coins: Entropy = field(default_factory=SystemEntropy)

    def step(self, batch: Sequence[Any], loss: Callable[[nn.Module, Any], Tensor]) -> None:
        """Make one private step on ``batch``; one without records releases noise, and costs, like any other.

        Another step on the batch that was drawn last is recorded in the same round of the ledger: it is on the same
        records, and costs more than one on records that were redrawn. Buffers of the module keep what they hold:
        what a forward pass writes into them is made of records, has no noise, and reaches the gradients of others.
        What the module draws from torch's global generators is secret and fresh, whatever seed they were given; one
        that draws from a generator of its own has to keep that secret itself.

        Parameters
        ----------
        batch : sequence
            One of :attr:`loader`'s. The first entry has the records along its first axis.
        loss : callable
            ``loss(module, batch)``, reduced over the batch as the optimiser was told. Its value is not returned: it
            is a release of its own.

        Raises
        ------
        BudgetExceeded, PrivacyLedgerError
            The step was not made.
        ConfigError
            When losses that should be one for each record are not.
        """
        # What a failed step left behind must not be summed again.
        self.optimizer.zero_grad(set_to_none=True)
        if len(batch[0]):
            held = _buffers(self.module)
            # Both passes: a module may draw again in the second one, as checkpointed layers do.
            with secret_draws(self.coins), warnings.catch_warnings():
                # Opacus hooks every layer, and the first one's inputs need no gradients: nothing is missed.
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                self._reduced(loss(self.module, batch), len(batch[0])).backward()
            for owner, name, buffer, before in held:
                # Written in place, or exchanged for another one.
                owner._buffers[name] = buffer
                with torch.no_grad():
                    buffer.copy_(before)
        else:
            self.optimizer.skip_backward()
        self.optimizer.step()

    def _reduced(self, value: Tensor, records: int) -> Tensor:
        if not self.per_record:
            return value
        if value.shape != (records,):
            raise ConfigError(
                # How many records were drawn is nobody's to know, and the server may be told of settings.
                f"loss_reduction='none' means one loss for each record of a batch, and the loss has {value.ndim} axes, "
                "or another length; use reduction='none', or say how it is reduced"
            )
        return value.sum()

    def close(self) -> None:
        """Take the hooks off the module."""
        self.optimizer.zero_grad(set_to_none=True)
        self.hooks.cleanup()

    def __enter__(self) -> PrivateTraining:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def private_training(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Dataset[Any] | DataLoader[Any],
    ledger: PrivacyLedger,
    settings: StepSettings,
    *,
    steps: int,
    method: str = "dp-sgd",
    **options: Any,
) -> PrivateTraining:
    """Assemble private training of ``module``.

    Parameters
    ----------
    module : torch.nn.Module
        In training mode. Layers that mix the records of a batch are refused.
    optimizer : torch.optim.Optimizer
        Over all parameters of the module that require gradients.
    data : Dataset or DataLoader
        Records; every record is one unit. Sums are divided by ``settings.rate * len(data)``, not rounded.
    ledger : PrivacyLedger
        Is written before a step's noise is drawn. Its budget is the budget.
    settings : StepSettings
    steps : int
        Batches of one iteration of the loader; schedules run over ``schedule_steps``, default the same.
    method : {"dp-sgd", "topagg", "random-mask", "lsg"}
    **options
        Those of the method: ``k``, ``saturation``, ``stochastic``, ``threshold``; ``keep``, ``schedule``, ``mask``;
        ``rank``, ``whole``, ``history``, ``refresh``; and ``start``.

    Raises
    ------
    ConfigError
        When the module cannot be trained privately, or an argument is out of range.
    """
    check_module(module)
    named = {p: name for name, p in module.named_parameters() if p.requires_grad}
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if set(held) != set(named):
        raise ConfigError(
            f"the optimiser holds {len(held)} parameters and the module {len(named)} that require gradients; they must "
            "be the same: a parameter outside would be trained without noise, or not at all. Freeze what is not trained"
        )
    # One source for batches, secret votes and noise.
    source = SystemEntropy() if settings.entropy is None else settings.entropy
    reduction = settings.loss_reduction
    per_record = reduction == "none"
    loader = PoissonLoader(data, rate=settings.rate, steps=steps, entropy=source)
    # Losses one by one are summed before the backward pass, so the hooks rescale nothing; the optimiser still divides
    # by the expected batch.
    own = replace(settings, entropy=source, loss_reduction="mean" if per_record else reduction)
    given: dict[str, Any] = {
        "expected_batch_size": settings.rate * loader.records,
        "drawn": lambda: loader.drawn,
        **({"schedule_steps": steps} if method in ("random-mask", "lsg") else {}),
        **({"names": [named[p] for p in held]} if method == "lsg" else {}),
        **options,
    }
    private = _OPTIMIZERS[params.choice("method", method, _OPTIMIZERS)](optimizer, ledger, own, **given)
    hooks = GradSampleHooks(module, loss_reduction="sum" if per_record else reduction)
    # A second backward pass before the step would give each record two contributions.
    hooks.forbid_grad_accumulation()
    accountant = RDPAccountant()
    private.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=settings.rate))
    return PrivateTraining(module, private, loader, accountant, hooks, per_record, coins_of(source))


def check_module(module: nn.Module) -> None:
    """Raise :class:`ConfigError` for a module whose per-sample gradients do not exist, with what to do about it."""
    mixing = [name or type(m).__name__ for name, m in module.named_modules() if _mixes(m)]
    if mixing:
        raise ConfigError(
            f"{', '.join(mixing[:3])}: normalises over the records of a batch or keeps statistics of them, so that one "
            "record's influence has no bound. Use GroupNorm or LayerNorm; "
            "opacus.validators.ModuleValidator.fix(module) returns a copy with GroupNorm in place of BatchNorm, "
            "unless that was made with affine=False"
        )
    errors = ModuleValidator.validate(module, strict=False)
    if errors:
        raise ConfigError(
            f"the module cannot be trained privately: {'; '.join(str(e) for e in errors[:3])}. "
            "opacus.validators.ModuleValidator.fix(module) replaces what it can"
        )


def _buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
    """Return every buffer with its module and name, and a copy of its values."""
    return [
        (owner, name, buffer, buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]


def _mixes(module: nn.Module) -> bool:
    # Also where it has no parameters of its own, and Opacus' validator would not look at it.
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return True
    return isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
