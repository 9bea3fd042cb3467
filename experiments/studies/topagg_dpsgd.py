"""DP-SGD at equal epsilon: private trainings on records, the settings to try for each method, and the results.

The training is :func:`fedcomp.privacy.dpsgd.private_training`. This module adds the data, the model, the statement, and
the size of a client's message with such a contribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any, Final

from fedcomp.experiments.findings import largest, mean, spread
from fedcomp.experiments.kit import Record, Records, curves, repetitions, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import parse_settings
from fedcomp.experiments.tables import Found, Studied

TASK: Final = "digits"

LAST: Final = 0.2
"""Fraction of the training records in the validation split."""

MOMENTUM: Final = 0.9

DP_SGD: Final = "DP-SGD"
TOPAGG: Final = "TopAgg"
PLAIN: Final = "TopAgg, plain signs"
MASK: Final = "random mask"
LOW_RANK: Final = "low rank"
LSG: Final = "LSG"
METHODS: Final[Mapping[str, str]] = {
    DP_SGD: "dp-sgd",
    TOPAGG: "topagg",
    PLAIN: "topagg",
    MASK: "random-mask",
    LOW_RANK: "lsg",
    LSG: "lsg",
}
"""By label, the name of the method in :func:`fedcomp.privacy.dpsgd.private_training`."""

TARGETS: Final = (1.0, 3.0, 10.0, math.inf)
"""The epsilons; at infinity no noise is added to the sums."""

TUNING_SEEDS: Final = (1000, 1001)
"""Seeds for choosing settings on a validation split. The report uses other seeds and the test split."""

# One grid for all methods, so none wins by finer tuning. It moves up with epsilon because less noise allows larger
# steps.
STEPS: Final[Mapping[float, tuple[float, ...]]] = {
    1.0: (0.03, 0.05, 0.12, 0.3),
    3.0: (0.05, 0.1, 0.25, 0.6),
    10.0: (0.15, 0.4, 1.0, 2.0),
    math.inf: (0.3, 0.8, 2.0),
}
"""Step sizes to try, by epsilon, for contributions of norm 1: clipped gradients, and votes over sqrt(k)."""

VARIANTS: Final[Mapping[str, tuple[str, ...]]] = {
    DP_SGD: ("",),
    TOPAGG: ("k=10", "k=30", "k=100", "k=500"),
    PLAIN: tuple(f"k={k} stochastic=false" for k in (30, 100, 500, 2410)),
    MASK: ("keep=0.2", "keep=0.5"),
    LOW_RANK: ("rank=4", "rank=8"),
    LSG: ("rank=4 keep=0.25", "rank=4 keep=0.5", "rank=8 keep=0.5"),
}
"""The settings that ``--set tune=true`` tries with each step size; 2410 votes are all coordinates of the default
model."""

CHOSEN: Final[Mapping[str, tuple[str, ...]]] = {
    DP_SGD: ("lr=0.05", "lr=0.1", "lr=0.15", "lr=0.8"),
    TOPAGG: ("lr=0.3 k=10", "lr=0.25 k=10", "lr=1 k=100", "lr=2 k=500"),
    PLAIN: tuple(f"lr={lr} k={k} stochastic=false" for lr, k in ((0.12, 500), (0.25, 500), (0.4, 2410), (0.3, 500))),
    MASK: tuple(f"lr={lr} keep=0.5" for lr in (0.12, 0.25, 0.4, 2)),
    LOW_RANK: ("lr=0.12 rank=4", "lr=0.1 rank=8", "lr=0.4 rank=8", "lr=2 rank=4"),
    LSG: tuple(f"lr={lr} rank={rank} keep=0.5" for lr, rank in ((0.12, 4), (0.25, 8), (0.4, 8), (0.8, 8))),
}
"""The result of the tuning, in the order of :data:`TARGETS`."""


def grid(method: str, target: float) -> list[str]:
    """Return the settings to try for a method and an epsilon."""
    return [f"lr={lr:g} {options}".strip() for options in VARIANTS[method] for lr in STEPS[target]]


def label(method: str, target: float) -> str:
    """Return the label of a training in tables and claims."""
    return f"{method}, epsilon {target:g}"


def study(found: Found) -> Studied:
    """Choose settings if asked, then train everything."""
    from fedcomp.tasks import get_task

    config, pairs = found.config, list(product(METHODS, TARGETS))
    multipliers = {target: _multiplier(found, target) for target in TARGETS}
    shared: dict[str, Any] = {"config": config, "multipliers": multipliers}
    choice = {(method, target): CHOSEN[method][TARGETS.index(target)] for method, target in pairs}
    if config.settings["tune"]:
        # All methods in one sweep, so processes are busy until the end.
        tried = [
            {"method": method, "epsilon": target, "settings": settings, "seed": seed}
            for method, target in pairs
            for settings in grid(method, target)
            for seed in TUNING_SEEDS
        ]
        groups = found.sweep(train, tried, "validation", **shared, validation=True).groups("method", "epsilon")
        choice = {pair: _best(group) for pair, group in groups.items()}
    seeds = repetitions(config)
    cells = [
        {"method": method, "epsilon": target, "settings": settings, "seed": seed}
        for (method, target), settings in choice.items()
        for seed in seeds
    ]
    runs = found.sweep(train, cells, **shared).groups("method", "epsilon")
    first = {pair: group[0] for pair, group in runs.items()}
    private = [pair for pair in pairs if pair[1] < math.inf]

    def accuracy(*pair: Any) -> float:
        return mean(runs[pair].each("accuracy"))

    return Studied(
        quantities(runs),
        tables=[
            table(
                "Accuracy on the test split after the last step",
                {
                    "method": str,
                    **{
                        heading: cell
                        for t in TARGETS
                        for heading, cell in (
                            (f"epsilon {t:g}", lambda m, t=t: accuracy(m, t)),
                            (f"± at {t:g}", lambda m, t=t: spread(runs[m, t].each("accuracy"))),
                        )
                    },
                },
                METHODS,
                "Means over the seeds; ±: half the distance between the best and the worst. Accuracy is that of the "
                "last step, not of the best.",
            ),
            table(
                "What one contribution would cost as a client's message",
                {
                    "training": lambda pair: label(*pair),
                    "coordinates with noise": lambda pair: first[pair].coordinates,
                    "message, bytes": lambda pair: first[pair].frame,
                    "dense over it": lambda pair: first[DP_SGD, pair[1]].frame / first[pair].frame,
                    "carriers down, bytes": lambda pair: first[pair].downlink,
                },
                private,
                "Lengths of real frames: one vote, or all floats with noise. Carriers are sent down with the model. "
                "In a training on one machine nothing is sent.",
            ),
            table(
                "Settings, and what the ledger says",
                {
                    "training": lambda pair: label(*pair),
                    "settings": lambda pair: choice[pair],
                    "noise multiplier": lambda pair: multipliers[pair[1]],
                    "releases": lambda pair: first[pair].releases,
                    "epsilon": lambda pair: largest(runs[pair].each("spent")),
                    "by Rényi alone": lambda pair: largest(runs[pair].each("rdp")),
                    "without sampling": lambda pair: first[pair].statement.get("epsilon_unamplified"),
                },
                pairs,
                "Epsilon of the run's ledger at its delta, the largest over the seeds. The last column also holds if "
                "it is known which records were drawn. Empty: infinite.",
            ),
        ],
        figures=[
            curves(
                "Accuracy against the bytes of one contribution",
                # Lines connect the points of one epsilon, sorted by the bytes of their messages.
                sorted((t, first[m, t].frame, accuracy(m, t)) for m, t in private),
                lambda point: point[1],
                lambda point: point[2],
                lambda point: f"epsilon {point[0]:g}",
                x_label="bytes of a client's message",
                y_label="test accuracy",
                log_x=True,
                x_bytes=True,
                caption="One point per method and epsilon, sorted by bytes.",
            )
        ],
        tasks=[get_task(TASK, hidden=str(config.settings["task.hidden"])).record()],
        statements={label(*pair): run.statement for pair, run in first.items() if run.statement},
    )


def _multiplier(found: Found, target: float) -> float:
    """Return the smallest noise multiplier for ``target``."""
    from fedcomp.privacy.accounting import noise_multiplier_for

    # An infinite epsilon needs no noise: at 0 nothing is added.
    if target == math.inf:
        return 0.0
    say, settings, name = found.say, found.config.settings, f"noise multiplier for epsilon {target:g}"
    if not say.has(name):
        say(name)
    delta, rate, releases = float(settings["delta"]), float(settings["rate"]), found.config.rounds
    # Cached, because the search for a multiplier evaluates the accountant many times and a resumed run must get the
    # same number.
    return float(say.cell(name, lambda: noise_multiplier_for(target, delta, releases=releases, rate=rate)))


def _best(tried: Records) -> str:
    """Return the best settings on the validation split; the first of equally good ones."""
    groups = tried.groups("settings")
    return max(groups, key=lambda settings: mean(groups[settings].each("accuracy")))


def quantities(runs: Mapping[tuple[str, float], Records]) -> dict[Any, float]:
    """Return epsilons, accuracies, figures from statements and ledgers, and the longest vote over its bound."""
    accuracy = {pair: mean(group.each("accuracy")) for pair, group in runs.items()}
    private = [run for (_, target), group in runs.items() if target < math.inf for run in group]
    promised = [run for run in private if run.statement]
    return {
        **{
            f"epsilon {target:g}: the largest of all ledgers": largest(
                run.spent for run in private if run.epsilon == target
            )
            for target in TARGETS[:-1]
        },
        "PRV over Rényi, the largest of all trainings": largest(run.spent / run.rdp for run in promised if run.steps),
        # A budget may allow no step at all, and then nothing is released.
        "releases recorded, over steps made": min(
            (run.releases / run.steps for run in promised if run.steps), default=math.nan
        ),
        "private trainings that have a statement": len(promised) / len(private),
        "bytes of votes over 1.05 times the entropy bound plus header": largest(
            _over_bound(run) for (method, _), group in runs.items() if method in (TOPAGG, PLAIN) for run in group
        ),
        **{(label(*pair), "accuracy"): value for pair, value in accuracy.items()},
        **{
            (label(method, target), "accuracy over DP-SGD's"): value - accuracy[DP_SGD, target]
            for (method, target), value in accuracy.items()
        },
    }


def _over_bound(run: Record) -> float:
    """Return the bytes of a vote over its bound, which is rounded up to whole bytes."""
    from fedcomp.privacy.votes import entropy_bits

    bits = entropy_bits(run.coordinates, min(int(parse_settings(run.settings)["k"]), run.coordinates))
    return float(run.frame / math.ceil(1.05 * bits / 8.0 + run.header))


def train(
    method: str,
    epsilon: float,
    settings: str,
    seed: int,
    *,
    config: Config,
    multipliers: Mapping[float, float],
    validation: bool = False,
) -> dict[str, Any]:
    """Run one private training on records.

    Parameters
    ----------
    method : str
        One of :data:`METHODS`.
    epsilon : float
        The target epsilon, whose noise multiplier is in ``multipliers``.
    settings : str
        ``lr`` and the settings of the method, as ``"key=value key=value"``.
    config : Config
        Rate, delta, clip, widths of the hidden layers, the source of the noise, and the epsilon at which a private
        training ends early.
    validation : bool
        Train on a part of the training records and evaluate on the rest; otherwise evaluate on the test split.

    Returns
    -------
    dict
        ``loss`` on the training records and ``accuracy`` on the held-out ones after the last step; ``spent``, the
        ledger's epsilon, and ``rdp``, the epsilon by Rényi divergences only; ``steps``, fewer than requested if the
        budget ended the training, and ``releases`` in the ledger; ``coordinates`` with noise in the last step;
        ``frame``, ``header`` and ``downlink``, bytes of a client's message with such a contribution, of an empty vote,
        and of the carriers sent to the client; ``statement``, empty if nothing is guaranteed.
    """
    import torch
    from torch.nn import functional
    from torch.utils.data import TensorDataset

    from fedcomp.privacy.accounting import rdp_epsilon
    from fedcomp.privacy.dpsgd import StepSettings, private_training
    from fedcomp.privacy.entropy import make_entropy
    from fedcomp.privacy.errors import BudgetExceeded
    from fedcomp.privacy.ledger import PrivacyLedger
    from fedcomp.privacy.sampling import Sampling
    from fedcomp.privacy.statement import make_statement
    from fedcomp.rng import Key
    from fedcomp.tasks import get_task
    from fedcomp.tasks.base import single_thread

    multiplier, secure = multipliers[epsilon], bool(config.settings["secure"])
    delta, rate = float(config.settings["delta"]), float(config.settings["rate"])
    task = get_task(TASK, hidden=str(config.settings["task.hidden"]))
    x, y = task.train_split.tensors
    held_x, held_y = task.test.tensors
    if validation:
        # A fixed key, so settings with any seed are judged on the same records.
        order = torch.from_numpy(Key(0, "topagg_dpsgd/validation").uniform(len(x)).argsort())
        last = round(LAST * len(x))
        held_x, held_y = x[order[:last]], y[order[:last]]
        x, y = x[order[last:]], y[order[last:]]
    key = Key(seed, "topagg_dpsgd")
    entropy = make_entropy(None if secure else key.at(purpose="noise"), insecure_deterministic=not secure)
    ledger = PrivacyLedger(
        delta=delta,
        population=len(x),
        adjacency="add_remove",
        # At a rate of 1 nothing is sampled, so no amplification may be claimed.
        sampling=Sampling("poisson", rate=rate) if rate < 1.0 else Sampling("everyone"),
        unit="record",
        budget=config.budget if multiplier else None,
    )
    options: dict[str, Any] = parse_settings(settings)
    # Votes over sqrt(k) have norm 1 like clipped gradients, so one range of step sizes suits all.
    step = options.pop("lr") / math.sqrt(options.get("k", 1))
    with single_thread():
        module = task.model(seed)
        before = _flat(module)
        sgd = torch.optim.SGD(module.parameters(), lr=step, momentum=MOMENTUM)
        with private_training(
            module,
            sgd,
            TensorDataset(x, y),
            ledger,
            StepSettings(
                noise_multiplier=multiplier,
                rate=rate,
                max_grad_norm=float(config.settings["clip"]),
                loss_reduction="none",
                entropy=entropy,
                key=key,
            ),
            steps=config.rounds,
            method=METHODS[method],
            **options,
        ) as training:
            made = 0
            for batch in training.loader:
                try:
                    training.step(batch, lambda m, b: functional.cross_entropy(m(b[0]), b[1], reduction="none"))
                except BudgetExceeded:
                    break
                made += 1
            private = training.optimizer
            # The change of the model replaces a client's update; it has the same shape and sparsity.
            frame, header, extra = _message(private, _flat(module) - before, key)
            mechanism = private.mechanism()
        module.eval()
        with torch.no_grad():
            loss = float(functional.cross_entropy(module(x), y))
            accuracy = float((module(held_x).argmax(1) == held_y).double().mean())
    statement: dict[str, Any] = {}
    if multiplier:
        statement = make_statement(
            ledger,
            mechanism=mechanism,
            entropy=entropy,
            trust="whoever trains sees the records and is trusted; users of the models are not",
            protects="every model of the training, so the final one and all before it",
            clip=_bounded(METHODS[method], options),
            not_covered=(
                "step sizes, k, rank and kept fraction, chosen on records that were trained on",
                "the accuracies and losses in this report",
                "preprocessing of the data",
                "time a step takes",
            ),
        ).to_json()
    return {
        "loss": loss if math.isfinite(loss) else math.inf,
        "accuracy": accuracy,
        "spent": ledger.epsilon(),
        "rdp": rdp_epsilon(ledger.events, delta) if multiplier else math.inf,
        "steps": made,
        "releases": ledger.releases,
        "coordinates": private.length(),
        "frame": frame,
        "header": header,
        "downlink": extra,
        "statement": statement,
    }


def _flat(module: Any) -> Any:
    import torch

    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()


def _message(private: Any, update: Any, key: Any) -> tuple[int, int, int]:
    """Return the bytes of a message with a contribution of this kind, of an empty vote, and of its carriers.

    The messages are those of the client-level systems with the same names; none is sent here.
    """
    import numpy as np

    from fedcomp import wire
    from fedcomp.layout import Layout, Update
    from fedcomp.privacy.optimizers import LsgOptimizer, TopAggOptimizer
    from fedcomp.privacy.votes import TopkSign

    if isinstance(private, TopAggOptimizer):
        ballot, layout = TopkSign(k=private.k, stochastic=private.stochastic), Layout.flat(update.size)
        frames = [ballot.encode(Update(vector, layout), {}, key)[0] for vector in (update, np.zeros_like(update))]
        return len(frames[0]), len(frames[1]), 0
    extra = 0
    if isinstance(private, LsgOptimizer):
        carriers = [carrier for pair in private.carriers() if pair is not None for carrier in pair]
        extra = len(wire.encode([wire.dense(carrier) for carrier in carriers])) if carriers else 0
    return len(wire.encode([wire.dense(np.zeros(private.length(), np.float32))])), 0, extra


def _bounded(method: str, options: Mapping[str, Any]) -> str:
    kept = "" if options.get("keep", 1.0) == 1.0 else ", over what a public seed keeps of them"
    return {
        "dp-sgd": "every record's gradient, clipped over all parameters together",
        "topagg": "every record votes for k signs, so the norm is sqrt(k)",
        "random-mask": "every record's gradient, clipped over the coordinates that a public seed keeps",
        "lsg": f"every record's products with carriers of the public model clipped together{kept}",
    }[method]
