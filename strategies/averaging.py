"""Systems that compute the average themselves: they broadcast their own step, and sample clients by the seed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

from fedcomp import program
from fedcomp.codecs import Codec
from fedcomp.errors import ConfigError
from fedcomp.layout import DensityPolicy
from fedcomp.rules import rules_of
from fedcomp.strategies.cohort import Cohort, CohortSettings
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.parts import CODEC_PREFIX, TASK_PREFIX, Settings, below
from fedcomp.strategies.server import Server
from fedcomp.strategies.system import System, arguments, codec_settings, settings_of


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
    **options
        The system's own; and who takes part and how metrics are averaged, as in
        :class:`fedcomp.strategies.cohort.CohortSettings`: ``fraction_train=0.5, fraction_evaluate=1.0``.

    Raises
    ------
    ConfigError
        For a codec of another class, and what the system refuses.
    """

    CODEC: ClassVar[type[Codec]]
    SYSTEM: ClassVar[type[program.System]]

    def __init__(
        self,
        codec: Codec | dict[str, Any] | None = None,
        *,
        server_lr: float = 1.0,
        warmup_rounds: int = 0,
        policy: DensityPolicy | None = None,
        guard: Norms | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        kind: Any = self.SYSTEM
        own = {name: options.pop(name) for name in rules_of(kind) if name in options}
        own |= {"server_lr": server_lr, "warmup_rounds": warmup_rounds}
        system = kind(codec=self.CODEC() if codec is None else codec, **own)
        self.codec, self.server_lr, self.warmup_rounds = system.codec, system.server_lr, system.warmup_rounds
        self.cohort = CohortSettings(**options)
        super().__init__(
            system, Cohort(self.cohort, seed), downlink=system.codec, policy=policy, guard=guard, seed=seed
        )


def averaging_system(
    name: str,
    title: str,
    paper: str,
    summary: str,
    strategy: type[Averaging],
    codec: Sequence[str],
    own: Sequence[str] = (),
) -> System:
    """Return the declaration of a system that such a strategy makes whole.

    Parameters
    ----------
    name, title, paper, summary
        As of :class:`fedcomp.strategies.system.System`.
    codec : sequence of str
        Parameters of the codec that are settings by name; all others can be set below its prefix.
    own : sequence of str
        The strategy's, beside the step size and the rounds before compression starts.
    """
    codec_id = strategy.CODEC.codec_id
    # Of a constructor that passes on what it does not name, the next one names it.
    makers = {
        name: next(kind for kind in strategy.__mro__ if name in inspect.signature(kind).parameters)
        for name in ("server_lr", "warmup_rounds", *own)
    }
    defaults = {name: value for name, kind in makers.items() for value in settings_of(kind, name).values()}

    def build(settings: Settings, seed: int) -> Averaging:
        if settings["inner"] != "fedavg":
            raise ConfigError(
                f"inner={settings['inner']!r} does not fit: {strategy.__name__} does its own averaging; use "
                "server_lr, or a system of the drop-in pair"
            )
        # As for inner strategies, the server draws cohorts.
        evaluated = 1.0 if settings["fraction_evaluate"] else 0.0
        chosen = {"id": codec_id, **below(settings, CODEC_PREFIX)}
        given = {name: arguments(kind, settings, (name,))[name] for name, kind in makers.items()}
        return strategy(chosen, fraction_evaluate=evaluated, seed=seed, **given)

    return System(
        name,
        title,
        paper,
        summary,
        build,
        {**codec_settings(codec_id, *codec), **defaults},
        (TASK_PREFIX, CODEC_PREFIX),
    )
