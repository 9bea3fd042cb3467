"""An outer optimizer: Nesterov's momentum on the mean of the clients' changes.

Where clients take many local steps between two exchanges, minus the mean of their changes is a gradient that the server
steps by: the outer step of DiLoCo (Douillard et al. 2023, "DiLoCo: Distributed low-communication training of language
models", arXiv:2311.08105; recalled). Flower's FedAvgM has plain momentum alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg, FedAvgM

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.flower.records import restore_dtypes, to_arrays, to_record
from fedcomp.layout import EXACT, NONE_DENSE, TensorShape, fitted


class Nesterov(FedAvgM):
    """FedAvg whose mean change D becomes a step: ``u ← momentum u + D; θ ← θ + lr (D + momentum u)``.

    The same as ``torch.optim.SGD(lr=lr, momentum=momentum, nesterov=True)`` with the gradient -D. Integer tensors and
    running statistics of normalisation layers take the mean itself, since a step beyond it can turn a variance
    negative. With ``lr=1`` and ``momentum=0`` the model is the mean, bit for bit.

    Parameters
    ----------
    lr : float
        Outer learning rate, above 0.
    momentum : float
        In [0, 1). In the long run a change moves the model by lr / (1 - momentum) times itself: 1.8 times with the
        defaults. DiLoCo published (0.7, 0.9), which is 7 times and meant for runs of many rounds.
    **options
        Of Flower's FedAvg, such as ``fraction_train`` and ``min_train_nodes``.

    Raises
    ------
    ConfigError
        For values that are out of range.

    Examples
    --------
    >>> strategy = Nesterov(lr=0.9, momentum=0.5, fraction_evaluate=0.0)
    >>> strategy.server_momentum
    0.5
    """

    def __init__(self, lr: float = 0.9, momentum: float = 0.5, **options: Any) -> None:
        lr = params.positive("lr", lr)
        momentum = params.number("momentum", momentum, rule="a number in [0, 1)", ok=lambda v: 0.0 <= v < 1.0)
        if taken := sorted({"server_learning_rate", "server_momentum"} & set(options)):
            raise ConfigError(f"{taken[0]} is a parameter of FedAvgM; use lr and momentum")
        super().__init__(server_learning_rate=lr, server_momentum=momentum, **options)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model after the outer step, and the clients' metrics; None where no reply could be used."""
        mean, metrics = FedAvg.aggregate_train(self, server_round, replies)
        if mean is None or not self.server_opt or self.current_arrays is None:
            return mean, metrics
        before, after = to_arrays(self.current_arrays, copy=False), to_arrays(mean)
        policy = fitted(NONE_DENSE, {n: TensorShape(a.shape, str(a.dtype)) for n, a in before.items()})
        momenta = []
        mu, lr = self.server_momentum, self.server_learning_rate
        for number, (name, old) in enumerate(before.items()):
            if old.dtype.kind != "f" or policy(name, old.shape, str(old.dtype)) == EXACT:
                # Kept in place, so that momenta are found by their number.
                momenta.append(np.zeros(0, np.float32))
                continue
            # The steps of torch's SGD in its order, on the gradient; half floats are too short for the sums.
            wide = np.result_type(old.dtype, np.float32)
            gradient = old.astype(wide) - after[name].astype(wide)
            momentum = gradient.copy() if self.momentum_vector is None else self.momentum_vector[number] * wide.type(mu)
            if self.momentum_vector is not None:
                momentum += gradient
            momenta.append(momentum)
            after[name] = (old - wide.type(lr) * (gradient + wide.type(mu) * momentum)).astype(old.dtype)
        self.momentum_vector = momenta
        # The mean of integers is no integer: what is a counter would be a number to step along in the next round.
        self.current_arrays = restore_dtypes(to_record(after), before, [])
        return self.current_arrays, metrics
