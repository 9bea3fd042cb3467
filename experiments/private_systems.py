"""The rows of the table that promise privacy: what their settings are, and how a row becomes a strategy.

A row has ``strategy="private"`` in :mod:`fedcomp.experiments.rows`, and a function in :data:`MAKERS` under its name.
Everything about the promise itself (sensitivity, noise, ledger, statement) is the strategy's; here settings become its
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from fedcomp.errors import ConfigError
from fedcomp.experiments.parts import (
    CODEC_PREFIX,
    DOWNLINK_PREFIX,
    FEEDBACK_PREFIX,
    TASK_PREFIX,
    Settings,
    below,
    downlink,
    make_inner,
    uplink,
)
from fedcomp.experiments.rows import Row

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy

PRIVATE: Final[Settings] = MappingProxyType(
    {
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "adjacency": "zero_out",
        "sampling": "everyone",
        "rate": 1.0,
        "cap": 0,
        "reveal_participation": False,
        "pad": True,
        "budget": 0.0,
        "insecure_deterministic": False,
    }
)
"""Settings of every private row.

``noise_multiplier`` is the standard deviation of the noise over the sensitivity of the sum; ``adjacency`` one of
:data:`fedcomp.privacy.events.ADJACENCIES`; ``sampling`` "everyone", "poisson" (with ``rate``) or "capped" (with ``cap``
participations per client); ``reveal_participation`` whether Poisson rounds may show who took part, and are then
accounted without amplification; ``pad`` whether frames are padded to one length; ``budget`` an epsilon at ``delta``
that no round crosses, 0 for none. ``insecure_deterministic`` takes noise and samples from the seed: for experiments
that must repeat, never for a promise.
"""

BUDGET: Final = "budget"


def private_settings(row: Row) -> dict[str, Any]:
    """Return the settings of a private row with their defaults: the common ones, changed or completed by its own."""
    return {**PRIVATE, **row.defaults}


def make_private(settings: Settings, seed: int, *, row: Row) -> Strategy:
    """Return the strategy of a private row.

    Raises
    ------
    ConfigError
        For settings that the strategy refuses, or that have no place where privacy is promised.
    """
    from fedcomp.flower.privacy import find_private

    refused = {
        "fraction": (1.0, "cohorts of a seed are no secret sample; use sampling, rate and cap"),
        "fraction_evaluate": (0.0, "metrics of clients would be released beside the noise; the server evaluates"),
    }
    for key, (only, why) in refused.items():
        if settings[key] != only:
            raise ConfigError(f"{key}={settings[key]!r} does not fit a private system: {why}")
    strategy = MAKERS[row.name](settings, seed)
    if find_private(strategy) is None:
        raise TypeError(f"{row.name} is no private strategy: fedcomp.flower.privacy.Private says what one has")
    return strategy


def promise(settings: Settings, seed: int) -> dict[str, Any]:
    """Return the arguments that all private strategies take, from the settings of :data:`PRIVATE`."""
    from fedcomp.privacy.sampling import Sampling

    kind, rate, cap = str(settings["sampling"]), float(settings["rate"]), int(settings["cap"])
    own = {key: settings[key] for key in ("noise_multiplier", "delta", "adjacency", "insecure_deterministic")}
    shown = bool(settings["reveal_participation"])
    sampling = Sampling(kind, rate=rate, cap=cap, reveal_participation=shown)  # type: ignore[arg-type]
    return {**own, "pad": bool(settings["pad"]), "sampling": sampling, "budget": budget_of(settings), "seed": seed}


def budget_of(settings: Settings) -> float | None:
    """Return the epsilon that must not be crossed, None where there is none.

    Raises
    ------
    ConfigError
        When it is negative or not finite.
    """
    budget = float(settings[BUDGET])
    if not 0.0 <= budget < float("inf"):
        raise ConfigError(f"{BUDGET}={budget!r} is not valid: an epsilon > 0, or 0 for no budget")
    return budget or None


def around(strategy: Strategy, settings: Settings, seed: int) -> Strategy:
    """Return ``strategy`` inside the drop-in pair with the codec that the settings name, or itself without one.

    Raises
    ------
    ConfigError
        When there are parameters of a codec but no codec.
    """
    from fedcomp.strategies.compressed import Compressed

    name = str(settings["codec"])
    if name:
        return Compressed(strategy, uplink(settings, name), downlink(settings), feedback=False, seed=seed)
    idle = [prefix for prefix in (CODEC_PREFIX, FEEDBACK_PREFIX, DOWNLINK_PREFIX) if below(settings, prefix)]
    idle += [key for key in ("feedback", "downlink") if settings[key]]
    if idle:
        raise ConfigError(f"settings {idle} need a codec around which they stand; set codec, for instance codec=qsgd")
    return strategy


def _dp_fedavg(settings: Settings, seed: int) -> Strategy:
    from fedcomp.privacy.adaptive import AdaptiveClip
    from fedcomp.strategies.private.dp_fedavg import DpFedAvg

    first = float(settings["clip"])
    figures = {name: float(settings[key]) for name, key in _ADAPTIVE.items()}
    clip = AdaptiveClip(initial=first, **figures) if settings["adaptive"] else first
    strategy = DpFedAvg(make_inner(settings), clip=clip, count=int(settings["count"]), **promise(settings, seed))
    return around(strategy, settings, seed)


_ADAPTIVE: Final = {"quantile": "quantile", "rate": "clip_rate", "count_noise": "count_noise"}
"""Parameters of adaptive clipping, and the settings that give them; ``clip`` is then the first round's."""


def _random_mask(settings: Settings, seed: int) -> Strategy:
    from fedcomp.layout import Layout
    from fedcomp.rng import Key
    from fedcomp.strategies.private.dp_fedavg import DpFedAvg

    codec = uplink(settings, str(settings["codec"]))
    if codec.common_support(Layout.flat(2), Key(seed)) is None:
        raise ConfigError(
            f"{codec!r} has no coordinates that are drawn for all clients: use codec=randomk or codec=randomblock, "
            "with codec.shared=true, or the system dp-fedavg"
        )
    clip, count = float(settings["clip"]), int(settings["count"])
    return around(DpFedAvg(make_inner(settings), clip=clip, count=count, **promise(settings, seed)), settings, seed)


def _local_dp(settings: Settings, seed: int) -> Strategy:
    from fedcomp.strategies.private.local_dp import local_dp

    return local_dp(
        make_inner(settings),
        uplink(settings, str(settings["codec"])),
        downlink=downlink(settings),
        clip=float(settings["clip"]),
        releases=int(settings["releases"]),
        count=int(settings["count"]),
        **promise(settings, seed),
    )


def _lsg(settings: Settings, seed: int) -> Strategy:
    from fedcomp.strategies.private.lsg import Lsg

    whole = ("rank", "schedule_rounds", "history", "count")
    return Lsg(
        make_inner(settings),
        clip=float(settings["clip"]),
        keep=float(settings["keep"]),
        schedule=str(settings["schedule"]),
        mask=str(settings["mask"]),
        whole=str(settings["whole"]),
        **{name: int(settings[name]) for name in whole},
        **promise(settings, seed),
    )


def _distributed_dp(settings: Settings, seed: int) -> Strategy:
    from fedcomp.codecs import RandomK
    from fedcomp.strategies.private.distributed_dp import DistributedDp

    names = ("noise", "tolerated", "private", "count", "scale", "rotate", "feedback", "transport")
    own: dict[str, Any] = {name: settings[name] for name in names}
    return DistributedDp(
        make_inner(settings),
        clip=float(settings["clip"]),
        honest=float(settings["honest"]),
        codec=RandomK(float(settings["density"])),
        **own,
        **promise(settings, seed),
    )


def _datalens(settings: Settings, seed: int) -> Strategy:
    from fedcomp.strategies.private.datalens import DataLens, Student

    unused = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "epochs": 1, "batch_size": 32, "max_steps": 0}
    for key, default in {**unused, "inner": "fedavg"}.items():
        if settings[key] != default:
            raise ConfigError(
                f"{key}={settings[key]!r} does not fit: a round is one step of a generator; use generator_lr, "
                "teacher_lr, teacher_steps, batch, and more rounds"
            )

    def student(config: Mapping[str, Any]) -> Student:
        from fedcomp.tasks import get_task
        from fedcomp.tasks.gan import Adam
        from fedcomp.tasks.generator import GeneratorTask

        task = get_task(str(config["task"]), **below(config, TASK_PREFIX))
        if not isinstance(task, GeneratorTask):
            raise ConfigError(f"task {task.name!r} has no generator; use one that has, such as 'digits-generator'")
        return task.student(Adam(float(settings["generator_lr"]), float(settings["decay"])))

    names = ("k", "images", "eta", "beta", "teachers", "stochastic", "teacher_lr", "decay", "pretrain", "batch", "send")
    own: dict[str, Any] = {name: settings[name] for name in (*names, "population")}
    return DataLens(
        student,
        saturation=float(settings["saturation"]) or None,
        steps=int(settings["teacher_steps"]),
        **own,
        **promise(settings, seed),
    )


def _topagg(settings: Settings, seed: int) -> Strategy:
    from fedcomp.privacy.votes import TopkSign
    from fedcomp.strategies.private.topagg import topagg

    k = int(settings["k"])
    ballot = TopkSign(
        k=k or None,
        density=None if k else float(settings["density"]),
        scope=str(settings["scope"]),
        saturation=float(settings["saturation"]) or None,
        stochastic=bool(settings["stochastic"]),
    )
    own: dict[str, Any] = {key: settings[key] for key in ("server_lr", "mode", "beta")}
    return topagg(make_inner(settings), ballot, downlink=downlink(settings), **own, **promise(settings, seed))


def _record_dp(settings: Settings, seed: int) -> Strategy:
    from fedcomp.flower.record_dp import Plan
    from fedcomp.strategies.private.record_dp import RecordDp

    if settings["sampling"] != "everyone":
        raise ConfigError(
            f"sampling={settings['sampling']!r} is about clients, and here records are drawn; use record_rate"
        )
    rate = float(settings["record_rate"])
    if not 0.0 < rate <= 1.0:
        raise ConfigError(f"record_rate={rate!r} is not valid: a probability in (0, 1]")
    own: dict[str, Any] = {key: settings[key] for key in ("method", "noise_multiplier", "clip", "delta", "adjacency")}
    options = {"topagg": ("k",), "random-mask": ("keep",), "lsg": ("keep", "rank")}.get(str(settings["method"]), ())
    plan = Plan(
        rate=rate,
        steps=int(settings["max_steps"]) or max(1, round(int(settings["epochs"]) / rate)),
        budget=budget_of(settings) or 0.0,
        insecure=bool(settings["insecure_deterministic"]),
        options={key: settings[key] for key in options},
        **own,
    )
    return RecordDp(around(make_inner(settings), settings, seed), plan)


MAKERS: Final[Mapping[str, Callable[[Settings, int], Strategy]]] = MappingProxyType(
    {
        "dp-fedavg": _dp_fedavg,
        "random-mask": _random_mask,
        "lsg": _lsg,
        "local-dp": _local_dp,
        "distributed-dp": _distributed_dp,
        "topagg": _topagg,
        "datalens": _datalens,
        "record-dp": _record_dp,
    }
)
"""From the name of a private row to what makes its strategy of resolved settings and the seed."""
