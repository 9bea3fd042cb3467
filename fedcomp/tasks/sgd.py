"""Stochastic gradient descent, written out: the step that every trainer of a torch model here takes.

It is that of ``torch.optim.SGD``, bit for bit. It is written out because the first optimiser a process builds imports
torch's compiler, which costs a client process more than a second (measured).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedcomp.rules import Real, checked


class Sgd:
    """Descent on a model's parameters: g += weight_decay w; g += proximal (w - w0); v = momentum v + g; w -= lr v.

    Parameters
    ----------
    parameters : iterable of Parameter
        Those that need no gradient stay as they are.
    lr, momentum, weight_decay : float
        The momentum buffer starts at zero.
    proximal : float
        mu of FedProx's term mu/2 ||w - w0||^2 (Li et al. 2020, arXiv 1812.06127), w0 the values now.

    Raises
    ------
    ConfigError
        When a rate is negative, not a number or not finite.

    Examples
    --------
    >>> w = nn.Parameter(torch.tensor([2.0]))
    >>> Sgd([w], lr=0.25).step(w.square().sum())
    >>> w.item()
    1.0
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        proximal: float = 0.0,
    ) -> None:
        # torch multiplies float32 tensors with them and fails with an error of its own above that type's range.
        most = torch.finfo(torch.float32).max
        rates = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "proximal": proximal}
        for name, value in rates.items():
            checked(name, value, Real(least=0.0, most=most))
        self.parameters = [p for p in parameters if p.requires_grad]
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.proximal = proximal
        # A copy of the whole model, made only where the proximal term needs it.
        self._start = [p.detach().clone() for p in self.parameters] if proximal else []
        self._velocity: list[Tensor] = []

    def step(self, loss: Tensor) -> None:
        """Take one step down ``loss``, a scalar."""
        parameters = self.parameters
        gradients = list(torch.autograd.grad(loss, parameters))
        with torch.no_grad():
            if self.weight_decay:
                gradients = [g.add(p, alpha=self.weight_decay) for g, p in zip(gradients, parameters, strict=True)]
            if self.proximal:
                pulled = zip(gradients, parameters, self._start, strict=True)
                gradients = [g.add(p - w, alpha=self.proximal) for g, p, w in pulled]
            if self.momentum:
                # The first step's velocity is its gradient, as in torch; without a dampening factor.
                if self._velocity:
                    for v, g in zip(self._velocity, gradients, strict=True):
                        v.mul_(self.momentum).add_(g)
                else:
                    self._velocity = [g.clone() for g in gradients]
                gradients = self._velocity
            for p, g in zip(parameters, gradients, strict=True):
                p.add_(g, alpha=-self.lr)
