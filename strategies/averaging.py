"""Systems that average by themselves: what goes down is their own step, and who takes part is drawn by the seed."""

from __future__ import annotations

from typing import Any, ClassVar

from fedcomp.codecs import Codec
from fedcomp.layout import DensityPolicy
from fedcomp.program import System
from fedcomp.strategies.cohort import Cohort, CohortSettings
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.server import Server


class Averaging(Server):
    """A system with a codec, warm-up and a step size of its own, around FedAvg with a drawn cohort.

    Parameters
    ----------
    codec : Codec or dict, optional
        Of the class :attr:`CODEC`; default one with its own defaults.
    server_lr : float
        Step size of the server: model += server_lr * mean.
    warmup_rounds : int
        The first rounds are sent dense. For PowerSGD the authors' package begins with 100 steps of this kind, PyTorch's
        hook with 1000 (read).
    policy : DensityPolicy, optional
        Per tensor: what travels dense, and which density the others have; default
        :class:`fedcomp.layout.SmallDense`.
    guard : Norms, optional
        Refuses values that are far larger, or weigh far more, than is usual; default nobody does.
    seed : int
        Seed of the random streams.
    **cohort
        Who takes part and how metrics are averaged, as in :class:`fedcomp.strategies.cohort.CohortSettings`:
        ``fraction_train=0.5, fraction_evaluate=1.0``.

    Raises
    ------
    ConfigError
        For a codec of another class, and what the system refuses.
    """

    CODEC: ClassVar[type[Codec]]
    SYSTEM: ClassVar[type[System]]

    def __init__(
        self,
        codec: Codec | dict[str, Any] | None = None,
        *,
        server_lr: float = 1.0,
        warmup_rounds: int = 0,
        policy: DensityPolicy | None = None,
        guard: Norms | None = None,
        seed: int = 0,
        **cohort: Any,
    ) -> None:
        options = {"server_lr": server_lr, "warmup_rounds": warmup_rounds}
        system: Any = self.SYSTEM.from_config({"codec": self.CODEC() if codec is None else codec, **options})
        self.codec, self.server_lr, self.warmup_rounds = system.codec, system.server_lr, system.warmup_rounds
        self.cohort = CohortSettings(**cohort)
        super().__init__(
            system, Cohort(self.cohort, seed), downlink=system.codec, policy=policy, guard=guard, seed=seed
        )
