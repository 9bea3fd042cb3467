"""Outer optimizers: the server's step from the mean of the clients' changes.

Where clients take many local steps between two exchanges, minus the mean of their changes is a gradient that the server
steps by: the outer step of DiLoCo (Douillard et al. 2023, "DiLoCo: Distributed low-communication training of language
models", arXiv:2311.08105; recalled). Flower's FedAvgM has plain momentum alone. Where they send momenta of gradients
after every step, it is the sign that the server steps by: DeMo (Peng, Quesnelle, Kingma 2024, "Decoupled momentum
optimization", arXiv:2411.19870; abstract read, details recalled).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedAvgM
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.flower.records import restore_dtypes, same_model, to_arrays, to_record
from fedcomp.layout import EXACT, NONE_DENSE, TensorShape, fitted
from fedcomp.rates import falling


class OuterStep(FedAvgM):
    """Base of strategies that step by the clients' mean change in place of taking it; Flower's FedAvg says who trains.

    Integer tensors and running statistics of normalisation layers take the mean itself, since a step beyond it can turn
    a variance negative.
    """

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of a round, whose step will be from ``arrays``. A first round with another model than the
        one of the last step begins without momentum."""
        if server_round == 1 and self.current_arrays is not None and not same_model(arrays, self.current_arrays):
            self.momentum_vector = None
        self.current_arrays = arrays
        return super().configure_train(server_round, arrays, config, grid)

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
        for number, (name, old) in enumerate(before.items()):
            if old.dtype.kind != "f" or policy(name, old.shape, str(old.dtype)) == EXACT:
                # Kept in place, so that momenta are found by their number.
                momenta.append(np.zeros(0, np.float32))
                continue
            # Half floats are too short for the sums.
            wide = np.result_type(old.dtype, np.float32)
            momentum = None if self.momentum_vector is None else self.momentum_vector[number]
            new, momentum = self._step(server_round, old, old.astype(wide) - after[name].astype(wide), momentum)
            momenta.append(momentum)
            after[name] = new.astype(old.dtype)
        self.momentum_vector = momenta
        # The mean of integers is no integer: what is a counter would be a number to step along in the next round.
        self.current_arrays = restore_dtypes(to_record(after), before, [])
        return self.current_arrays, metrics

    def _step(
        self, server_round: int, old: NDArray[Any], gradient: NDArray[Any], momentum: NDArray[Any] | None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return a tensor after a step down ``gradient``, and its momentum; None stands for that of the first round."""
        raise NotImplementedError


class Nesterov(OuterStep):
    """FedAvg whose mean change D becomes a step: ``u ← momentum u + D; θ ← θ + lr (D + momentum u)``.

    The same as ``torch.optim.SGD(lr=lr, momentum=momentum, nesterov=True)`` with the gradient -D. Integer tensors and
    running statistics take the mean itself. With ``lr=1`` and ``momentum=0`` the model is the mean, bit for bit.

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
        momentum = params.number("momentum", momentum, rule="a number in [0, 1)", ok=lambda v: 0.0 <= v < 1.0)
        super().__init__(**_of_fedavgm(options, lr, momentum))

    def _step(
        self, server_round: int, old: NDArray[Any], gradient: NDArray[Any], momentum: NDArray[Any] | None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        # The steps of torch's SGD in its order.
        real, mu = gradient.dtype.type, self.server_momentum
        if momentum is None:
            momentum = gradient.copy()
        else:
            momentum = momentum * real(mu)
            momentum += gradient
        return old - real(self.server_learning_rate) * (gradient + real(mu) * momentum), momentum


class SignStep(OuterStep):
    """FedAvg whose mean change D becomes a step of one length for every value: ``θ ← θ + lr sign(D)``.

    Values of which nothing arrived stay as they are. Integer tensors and running statistics take the mean itself.

    Parameters
    ----------
    lr : float
        What a value moves by in a round, above 0.
    falls : int
        Rounds over which ``lr`` falls: :func:`fedcomp.rates.falling`; 0 keeps it.
    **options
        Of Flower's FedAvg, such as ``fraction_train`` and ``min_train_nodes``.

    Raises
    ------
    ConfigError
        For values that are out of range.

    Examples
    --------
    >>> SignStep(lr=0.001, falls=1000, fraction_evaluate=0.0).falls
    1000
    """

    def __init__(self, lr: float = 0.001, falls: int = 0, **options: Any) -> None:
        self.falls = params.integer("falls", falls, low=0)
        super().__init__(**_of_fedavgm(options, lr, 0.0))

    def _step(
        self, server_round: int, old: NDArray[Any], gradient: NDArray[Any], momentum: NDArray[Any] | None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        lr = self.server_learning_rate * (falling(server_round - 1, self.falls) if self.falls else 1.0)
        return old - gradient.dtype.type(lr) * np.sign(gradient), np.zeros(0, np.float32)


def _of_fedavgm(options: Mapping[str, Any], lr: float, momentum: float) -> dict[str, Any]:
    """Return the arguments of FedAvgM for rates that have names of their own here."""
    if taken := sorted({"server_learning_rate", "server_momentum"} & set(options)):
        raise ConfigError(f"{taken[0]} is a parameter of FedAvgM; use lr and momentum")
    return {**options, "server_learning_rate": params.positive("lr", lr), "server_momentum": momentum}
