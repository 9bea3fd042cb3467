"""Private systems: their settings, and their construction from them.

Everything about the promise itself (sensitivity, noise, ledger, statement) is the strategy's; here settings become its
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from fedcomp.codecs import RandomK
from fedcomp.errors import ConfigError
from fedcomp.flower.privacy import find_private
from fedcomp.layout import Layout
from fedcomp.privacy.adaptive import AdaptiveClip
from fedcomp.privacy.local import Privatise
from fedcomp.privacy.sampling import Sampling
from fedcomp.privacy.votes import TopkSign
from fedcomp.rng import Key
from fedcomp.rules import Real, checked
from fedcomp.strategies.parts import (
    BUDGET,
    CODEC_PREFIXES,
    DOWNLINK_PREFIX,
    PLAIN_PREFIXES,
    TASK_PREFIX,
    Scalar,
    Settings,
    around,
    below,
    downlink,
    make_inner,
    uplink,
)
from fedcomp.strategies.private.datalens import DataLens, Generating
from fedcomp.strategies.private.distributed_dp import DistributedDp
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.local_dp import local_dp
from fedcomp.strategies.private.lsg import Lsg
from fedcomp.strategies.private.record_dp import RecordDp
from fedcomp.strategies.private.settings import (
    ShareSettings,
    TeacherSettings,
    VoteSettings,
)
from fedcomp.strategies.private.topagg import topagg
from fedcomp.strategies.system import TRAINING, System, arguments, refuse_others, settings_of
from fedcomp.systems.private.ballots import Ballots
from fedcomp.systems.private.lsg import LowRank
from fedcomp.systems.private.record import DpSgdPlan
from fedcomp.systems.private.rule import Private
from fedcomp.systems.private.settings import PrivacySettings

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy

PRIVATE: Final[Settings] = MappingProxyType(
    {
        "noise_multiplier": 1.0,
        **settings_of(PrivacySettings, "delta", "adjacency"),
        "sampling": settings_of(Sampling, "kind")["kind"],
        **settings_of(Sampling, "rate", "cap", "reveal_participation"),
        **settings_of(PrivacySettings, "pad", "budget", "insecure_deterministic"),
    }
)
"""Settings of every private system.

``noise_multiplier`` is the standard deviation of the noise over the sensitivity of the sum; ``adjacency`` one of
:data:`fedcomp.privacy.events.ADJACENCIES`; ``sampling`` "everyone", "poisson" (with ``rate``) or "capped" (with ``cap``
participations per client); ``reveal_participation`` whether Poisson rounds may show who took part, and are then
accounted without amplification; ``pad`` whether frames are padded to one length; ``budget`` an epsilon at ``delta``
that no round crosses, 0 for none. ``insecure_deterministic`` takes noise and samples from the seed: for experiments
that must repeat, never for a promise.
"""


def promise(settings: Settings, seed: int) -> dict[str, Any]:
    """Return the arguments that all private strategies take, from the settings of :data:`PRIVATE`."""
    names = ("noise_multiplier", "delta", "adjacency", "insecure_deterministic", "pad")
    drawn = {key: settings[key] for key in ("rate", "cap", "reveal_participation")}
    sampling = Sampling(settings["sampling"], **drawn)  # type: ignore[arg-type]
    own = {key: settings[key] for key in names}
    return {**own, "sampling": sampling, "budget": budget_of(settings), "seed": seed}


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
    # Settings are numbers and words, so 0 stands for none.
    return budget or None


def _dp_fedavg(settings: Settings, seed: int) -> Strategy:
    first: Any = settings["clip"]
    figures: dict[str, Any] = {name: settings[key] for name, key in _ADAPTIVE.items()}
    clip = AdaptiveClip(initial=first, **figures) if settings["adaptive"] else first
    strategy = DpFedAvg(make_inner(settings), clip=clip, count=settings["count"], **promise(settings, seed))
    return around(strategy, settings, seed)


_ADAPTIVE: Final = {"quantile": "quantile", "rate": "clip_rate", "count_noise": "count_noise"}
"""Parameters of adaptive clipping, and the settings that give them; ``clip`` is then the first round's."""


def _random_mask(settings: Settings, seed: int) -> Strategy:
    codec = uplink(settings, str(settings["codec"]))
    # Of any layout: that a support is common does not depend on the model.
    if codec.common_support(Layout.flat(2), Key(seed)) is None:
        raise ConfigError(
            f"{codec!r} has no coordinates that are drawn for all clients: use codec=randomk or codec=randomblock, "
            "with codec.shared=true, or the system dp-fedavg"
        )
    own: dict[str, Any] = {key: settings[key] for key in ("clip", "count")}
    return around(DpFedAvg(make_inner(settings), **own, **promise(settings, seed)), settings, seed)


def _local_dp(settings: Settings, seed: int) -> Strategy:
    given = promise(settings, seed)
    insecure = given.pop("insecure_deterministic")
    own: dict[str, Any] = {key: settings[key] for key in ("clip", "releases")}
    # Clients add the noise: both are the transform's parameters, and the mean takes them from it.
    noise = Privatise(**own, noise_multiplier=given.pop("noise_multiplier"), insecure_deterministic=insecure)
    codec = uplink(settings, str(settings["codec"]))
    count: Any = settings["count"]
    return local_dp(make_inner(settings), noise, codec, downlink=downlink(settings), count=count, **given)


def _lsg(settings: Settings, seed: int) -> Strategy:
    own = [name for name in _SHORTENED if name != "whole"]
    shortened = LowRank(**arguments(LowRank, settings, own), whole_tensors=str(settings["whole"]))
    count: Any = settings["count"]
    return Lsg(make_inner(settings), shortened, count=count, **promise(settings, seed))


def _distributed_dp(settings: Settings, seed: int) -> Strategy:
    shares = ShareSettings(**arguments(ShareSettings, settings, _SHARES))
    own: dict[str, Any] = {key: settings[key] for key in ("feedback", "transport", "noise", "count")}
    codec = RandomK(float(settings["density"]))
    return DistributedDp(make_inner(settings), shares, codec=codec, **own, **promise(settings, seed))


def _datalens(settings: Settings, seed: int) -> Strategy:
    refuse_others(
        settings,
        {**TRAINING, "inner": "fedavg"},
        "a round is one step of a generator; use generator_lr, teacher_lr, teacher_steps, batch, and more rounds",
    )

    def student(config: Mapping[str, Any]) -> Generating:
        # Here, since it brings torch.
        from fedcomp.tasks import get_task
        from fedcomp.tasks.gan import Adam
        from fedcomp.tasks.generator import GeneratorTask

        task = get_task(str(config["task"]), **below(config, TASK_PREFIX))
        if not isinstance(task, GeneratorTask):
            raise ConfigError(f"task {task.name!r} has no generator; use one that has, such as 'digits-generator'")
        return task.student(Adam(float(settings["generator_lr"]), float(settings["decay"])))

    votes = VoteSettings(**arguments(VoteSettings, settings, ["k", *_VOTES]))
    taught = arguments(TeacherSettings, settings, _TEACHERS)
    teachers = TeacherSettings(steps=int(settings["teacher_steps"]), **taught)
    return DataLens(student, votes, teachers, population=settings["population"], **promise(settings, seed))


def _topagg(settings: Settings, seed: int) -> Strategy:
    given = arguments(TopkSign, settings, _BALLOT)
    # A ballot takes one of the two; k where it is given.
    ballot = TopkSign(**given, density=None if settings["k"] else float(settings["density"]))
    own: dict[str, Any] = {key: settings[key] for key in ("server_lr", *_TOPAGG)}
    return topagg(make_inner(settings), ballot, downlink=downlink(settings), **own, **promise(settings, seed))


def _record_dp(settings: Settings, seed: int) -> Strategy:
    for key in ("sampling", "rate", "cap", "reveal_participation"):
        if settings[key] != PRIVATE[key]:
            raise ConfigError(
                f"{key}={settings[key]!r} samples clients, but this system samples records; use record_rate"
            )
    given = settings["record_rate"]
    rate = checked("record_rate", given, Real(above=0.0, most=1.0))
    own: dict[str, Any] = {key: settings[key] for key in ("noise_multiplier", "clip", "delta", "adjacency")}
    method = str(settings["method"])
    options = {"topagg": ("k",), "random-mask": ("keep",), "lsg": ("keep", "rank")}.get(method, ())
    plan = DpSgdPlan(
        method=method,
        rate=rate,
        # A step sees ``rate`` of the records on average, so a pass over them takes 1 / rate steps.
        steps=int(settings["max_steps"]) or max(1, round(int(settings["epochs"]) / rate)),
        budget=budget_of(settings) or 0.0,
        insecure=bool(settings["insecure_deterministic"]),
        options={key: settings[key] for key in options},
        **own,
    )
    return RecordDp(around(make_inner(settings), settings, seed), plan)


def _system(
    build: Callable[[Settings, int], Strategy],
    name: str,
    title: str,
    paper: str,
    summary: str,
    defaults: Settings,
    task: str = "",
) -> System:
    """Return a private system; with a setting ``codec`` it has those of the drop-in pair's codecs as well."""

    def checked(settings: Settings, seed: int) -> Strategy:
        # Settings that every system has, and that would break a promise.
        for key, only, why in _REFUSED:
            refuse_others(settings, {key: only}, why, where=" a private system")
        strategy = build(settings, seed)
        # What is listed as private has a ledger that a run opens and a statement that it stores.
        if find_private(strategy) is None:
            raise TypeError(f"{name} is no private strategy: fedcomp.flower.privacy.Private says what one has")
        return strategy

    downwards = (*PLAIN_PREFIXES, DOWNLINK_PREFIX) if "downlink" in defaults else PLAIN_PREFIXES
    prefixes = CODEC_PREFIXES if "codec" in defaults else downwards
    needs = {"task": task} if task else {}
    return System(name, title, paper, summary, checked, {**PRIVATE, **defaults}, prefixes, needs, private=True)


_REFUSED: Final = (
    ("fraction", 1.0, "cohorts drawn from a seed are not a secret sample; use sampling, rate and cap"),
    ("fraction_evaluate", 0.0, "metrics of clients would be released beside the noise; the server evaluates"),
)
_CODED: Final[Settings] = MappingProxyType({"codec": "", "feedback": False, "downlink": "", "adapters": False})
_COUNT: Final = settings_of(Private, "count")
_SHORTENED: Final[Mapping[str, Scalar]] = {
    "clip": 1.0,
    "rank": 8,
    "keep": 0.5,
    **settings_of(LowRank, "schedule", "schedule_rounds", "mask", "history"),
    "whole": "",
}
_SHARES: Final[Mapping[str, Scalar]] = {
    "clip": 1.0,
    **settings_of(ShareSettings, "tolerated", "honest", "threshold", "scale", "rotate"),
}
_DISTRIBUTED: Final[Mapping[str, Scalar]] = {
    **_SHARES,
    **settings_of(DistributedDp, "feedback", "transport"),
    **settings_of(PrivacySettings, "noise"),
    **_COUNT,
}
_BALLOT: Final = settings_of(TopkSign, "k", "scope", "saturation", "stochastic")
_TOPAGG: Final = settings_of(Ballots, "mode", "beta")
_VOTES: Final = settings_of(VoteSettings, "images", "eta", "beta", "saturation", "stochastic")
_TEACHERS: Final = settings_of(TeacherSettings, "teachers", "teacher_lr", "decay", "pretrain", "batch", "send")

SYSTEMS: Final = (
    _system(
        _dp_fedavg,
        "dp-fedavg",
        "DP-FedAvg",
        "McMahan et al. 2018, Learning differentially private recurrent language models",
        "the clipped update, alone: no metrics and no number of examples; noise is added to the sum of all updates",
        {
            **_CODED,
            "clip": 1.0,
            "adaptive": False,
            **{key: settings_of(AdaptiveClip, name)[name] for name, key in _ADAPTIVE.items()},
            **_COUNT,
        },
    ),
    _system(
        _random_mask,
        "random-mask",
        "random mask",
        "derived here: DP-FedAvg on coordinates that a public seed draws for all clients of a round",
        "the update on the round's coordinates, clipped there; noise is added on these coordinates alone",
        {"codec": "randomk", "feedback": False, "downlink": "", "clip": 1.0, **_COUNT, "codec.density": 0.1},
    ),
    _system(
        _lsg,
        "lsg",
        "LSG-style",
        "Ito et al. 2022, Scaling private deep learning with low-rank and sparse gradients (abstract); low rank after "
        "Yu et al. 2021, Large scale private learning via low-rank reparametrization (their code); the sparse half is "
        "derived here",
        "kept coordinates of the update's products with low-rank carriers of the model, clipped together; which ones "
        "are kept, a public seed says. rank of 0 factors nothing",
        {**_SHORTENED, **_COUNT},
    ),
    _system(
        _distributed_dp,
        "distributed-dp",
        "distributed DP",
        "Kairouz, Liu and Steinke 2021, The distributed discrete Gaussian mechanism for federated learning with secure "
        "aggregation; Agarwal, Kairouz and Liu 2021, The Skellam mechanism (recalled)",
        "the clipped update in integers with a share of the noise, cut into coded shards: the server decodes a sum "
        "that is noisy already",
        {**_DISTRIBUTED, "density": 1.0},
    ),
    _system(
        _local_dp,
        "local-dp",
        "local DP",
        "the Gaussian mechanism on every client, before any codec; with integer noise (Canonne, Kamath, Steinke 2020)",
        "the update, clipped and noised on the client, then compressed: a message that needs no trusted server",
        {
            "codec": "qsgd",
            "feedback": False,
            "downlink": "",
            "clip": 1.0,
            **settings_of(Privatise, "releases"),
            **_COUNT,
            "adjacency": "replace",
        },
    ),
    _system(
        _topagg,
        "topagg",
        "TopAgg",
        "Wang et al. 2021, DataLens: scalable privacy preserving training via gradient compression and aggregation "
        "(abstract); its form for models of clients is derived here",
        "one vote: signs of the k largest coordinates of the update, drawn at random, packed; noise is added to the "
        "count of all votes. k of 0 takes the share density of the coordinates, a saturation of 0 turns it off",
        {**_BALLOT, "density": 0.1, **_TOPAGG, "server_lr": 0.1, "downlink": ""},
    ),
    _system(
        _datalens,
        "datalens",
        "DataLens",
        "Wang et al. 2021, DataLens: scalable privacy preserving training via gradient compression and aggregation "
        "(abstract and the authors' code)",
        "votes of teachers that learn on the client: for each generated image, top-k stochastic signs of the direction "
        "in which its pixels should move",
        {
            "adjacency": "replace",
            "k": 200,
            **_VOTES,
            **_TEACHERS,
            **settings_of(PrivacySettings, "population"),
            "generator_lr": 1e-3,
            "teacher_steps": settings_of(TeacherSettings, "steps")["steps"],
        },
        task="generator",
    ),
    _system(
        _record_dp,
        "record-dp",
        "DP-SGD on clients",
        "Abadi et al. 2016, Deep learning with differential privacy",
        "the model after DP-SGD on the client's own records, noise added there, and what it cost; no metrics",
        {
            **_CODED,
            **settings_of(DpSgdPlan, "adjacency", "method", "clip"),
            "record_rate": 0.1,
            "k": 100,
            "keep": 0.5,
            "rank": 4,
        },
    ),
)
