"""DP-SGD at equal epsilon: private trainings on records, what is tried for each method, and what they come to.

The training is that of :func:`fedcomp.privacy.dpsgd.private_training`; what is added here is the data, the model, the
statement, and how long a client's message with such a contribution would be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

from fedcomp.experiments.findings import Curves, Say, Table, largest, mean, spread
from fedcomp.experiments.kit import Record, curves, named, repetitions, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.tables import Found, Studied

TASK: Final = "digits"

LAST: Final = 0.2
"""Share of the training records that the validation split holds."""

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
"""What is compared, and what :func:`fedcomp.privacy.dpsgd.private_training` calls it."""

TARGETS: Final = (1.0, 3.0, 10.0, math.inf)
"""Epsilons; at infinity nothing is added to the sums."""

TUNING_SEEDS: Final = (1000, 1001)
"""Settings are chosen on a validation split with these; reported are others, on the test split."""

Options = Mapping[str, Any]

# One grid for all methods, so that none wins by being tuned more finely; it moves up with epsilon because less noise
# allows larger steps.
STEPS: Final[Mapping[float, tuple[float, ...]]] = {
    1.0: (0.03, 0.05, 0.12, 0.3),
    3.0: (0.05, 0.1, 0.25, 0.6),
    10.0: (0.15, 0.4, 1.0, 2.0),
    math.inf: (0.3, 0.8, 2.0),
}
"""Step sizes tried, by epsilon, for contributions of norm 1: clipped gradients, and votes over sqrt(k)."""

VARIANTS: Final[Mapping[str, tuple[Options, ...]]] = {
    DP_SGD: ({},),
    TOPAGG: tuple({"k": k} for k in (10, 30, 100, 500)),
    PLAIN: tuple({"k": k, "stochastic": False} for k in (30, 100, 500, 2410)),
    MASK: tuple({"keep": keep} for keep in (0.2, 0.5)),
    LOW_RANK: tuple({"rank": rank} for rank in (4, 8)),
    LSG: tuple({"rank": rank, "keep": keep} for rank, keep in ((4, 0.25), (4, 0.5), (8, 0.5))),
}
"""What ``--set tune=true`` tries with each step size; 2410 votes are all coordinates of the default model."""

CHOSEN: Final[Mapping[str, tuple[Options, ...]]] = {
    DP_SGD: ({"lr": 0.05}, {"lr": 0.1}, {"lr": 0.15}, {"lr": 0.8}),
    TOPAGG: ({"lr": 0.3, "k": 10}, {"lr": 0.25, "k": 10}, {"lr": 1.0, "k": 100}, {"lr": 2.0, "k": 500}),
    PLAIN: (
        {"lr": 0.12, "k": 500, "stochastic": False},
        {"lr": 0.25, "k": 500, "stochastic": False},
        {"lr": 0.4, "k": 2410, "stochastic": False},
        {"lr": 0.3, "k": 500, "stochastic": False},
    ),
    MASK: tuple({"lr": lr, "keep": 0.5} for lr in (0.12, 0.25, 0.4, 2.0)),
    LOW_RANK: ({"lr": 0.12, "rank": 4}, {"lr": 0.1, "rank": 8}, {"lr": 0.4, "rank": 8}, {"lr": 2.0, "rank": 4}),
    LSG: tuple({"lr": lr, "rank": rank, "keep": 0.5} for lr, rank in ((0.12, 4), (0.25, 8), (0.4, 8), (0.8, 8))),
}
"""What it found, in the order of :data:`TARGETS`."""


def grid(method: str, target: float) -> list[Options]:
    """Return what is tried for a method and an epsilon."""
    return [{"lr": lr, **options} for options in VARIANTS[method] for lr in STEPS[target]]


def label(method: str, target: float) -> str:
    """Return what a training is called in tables and claims."""
    return f"{method}, epsilon {target:g}"


def study(found: Found) -> Studied:
    """Train everything, and choose before what is to be chosen."""
    from fedcomp.tasks import get_task

    config, say = found.config, found.say
    multipliers = {target: _multiplier(config, target, say) for target in TARGETS}
    tried: dict[str, Record] = {}
    tuned = bool(config.settings["tune"])
    if tuned:
        # All methods in one sweep, so that processes are busy to the end.
        cells = [
            cell
            for method in METHODS
            for target in TARGETS
            for options in grid(method, target)
            for cell in _cells(config, method, target, multipliers[target], options, TUNING_SEEDS, validation=True)
        ]
        tried = {record.name: record for record in named(cells)(say, found.workers)}
    choice = _choose(config, multipliers, tried) if tuned else {m: list(chosen) for m, chosen in CHOSEN.items()}
    seeds = repetitions(config)
    reported = {
        label(method, target): _cells(config, method, target, multipliers[target], choice[method][i], seeds)
        for method in METHODS
        for i, target in enumerate(TARGETS)
    }
    asked = [cell for cells in reported.values() for cell in cells]
    made = {record.name: record for record in named(asked)(say, found.workers)}
    outcomes = {name: [made[cell.name] for cell in cells] for name, cells in reported.items()}
    tables = [_accuracy_table(outcomes), _message_table(outcomes), _settings_table(outcomes, choice, multipliers)]
    if tuned:
        tables.append(_tuning_table(config, multipliers, tried))
    return Studied(
        quantities(outcomes, choice),
        tables=tables,
        figures=[_against_epsilon(outcomes), _against_bytes(outcomes)],
        tasks=[get_task(TASK, hidden=str(config.settings["task.hidden"])).record()],
        statements={name: runs[0].statement for name, runs in outcomes.items() if runs[0].statement},
    )


def _multiplier(config: Config, target: float, say: Say) -> float:
    """Return the smallest noise multiplier for ``target``."""
    from fedcomp.privacy.accounting import noise_multiplier_for

    # No noise multiplier gives an infinite epsilon: at 0 nothing is added.
    if target == math.inf:
        return 0.0
    name = f"noise multiplier for epsilon {target:g}"
    if not say.has(name):
        say(name)
    delta, rate = float(config.settings["delta"]), float(config.settings["rate"])
    # Kept: the search for a multiplier evaluates the accountant many times, and a resumed run must get the same number.
    return float(say.cell(name, lambda: noise_multiplier_for(target, delta, releases=config.rounds, rate=rate)))


def _cells(
    config: Config,
    method: str,
    target: float,
    multiplier: float,
    options: Options,
    seeds: Sequence[int],
    *,
    validation: bool = False,
) -> list[RecordCell]:
    settings = config.settings
    shown = " ".join(f"{name}={value:g}" for name, value in options.items())
    return [
        RecordCell(
            # Everything that tells two trainings apart is in the name, by which a finished one is found again.
            name=f"{'validation: ' if validation else ''}{label(method, target)}, {shown}, seed {seed}",
            method=METHODS[method],
            options=options,
            noise_multiplier=multiplier,
            rate=float(settings["rate"]),
            delta=float(settings["delta"]),
            clip=float(settings["clip"]),
            steps=config.rounds,
            seed=seed,
            hidden=str(settings["task.hidden"]),
            validation=validation,
            secure=bool(settings["secure"]),
            budget=config.budget or 0.0,
        )
        for seed in seeds
    ]


def _validated(
    config: Config, multipliers: Mapping[float, float], tried: Mapping[str, Record], method: str, target: float
) -> list[float]:
    """Return the mean validation accuracy of each entry of a method's grid."""
    return [
        mean(
            tried[cell.name].accuracy
            for cell in _cells(config, method, target, multipliers[target], options, TUNING_SEEDS, validation=True)
        )
        for options in grid(method, target)
    ]


def _choose(
    config: Config, multipliers: Mapping[float, float], tried: Mapping[str, Record]
) -> dict[str, list[Options]]:
    """Return the best of each grid; of equally good ones the first."""

    def best(method: str, target: float) -> Options:
        accuracies = _validated(config, multipliers, tried, method, target)
        return grid(method, target)[accuracies.index(max(accuracies))]

    return {method: [best(method, target) for target in TARGETS] for method in METHODS}


def _shown(options: Options) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in options.items())


Outcomes = Mapping[str, Sequence[Record]]


def _accuracy(outcomes: Outcomes, method: str, target: float) -> float:
    return mean(run.accuracy for run in outcomes[label(method, target)])


def _accuracy_table(outcomes: Outcomes) -> Table:
    columns: dict[str, Any] = {"method": str}
    for t in TARGETS:
        # Bound as a default: a closure would see the last target of the loop only.
        columns[f"epsilon {t:g}"] = lambda m, t=t: _accuracy(outcomes, m, t)
        columns[f"± at {t:g}"] = lambda m, t=t: spread(run.accuracy for run in outcomes[label(m, t)])
    return table(
        "Accuracy on the test split after the last step",
        columns,
        METHODS,
        "Means over the seeds; ±: half the distance between the best and the worst. Never the best step: the last one.",
    )


def _message_table(outcomes: Outcomes) -> Table:
    first = {pair: outcomes[label(*pair)][0] for pair in product(METHODS, TARGETS[:-1])}
    columns: dict[str, Any] = {
        "training": lambda pair: label(*pair),
        "coordinates with noise": lambda pair: first[pair].coordinates,
        "message, bytes": lambda pair: first[pair].frame,
        "dense over it": lambda pair: first[DP_SGD, pair[1]].frame / first[pair].frame,
        "carriers down, bytes": lambda pair: first[pair].downlink,
        "accuracy": lambda pair: _accuracy(outcomes, *pair),
    }
    return table(
        "What one contribution would cost as a client's message",
        columns,
        first,
        "Lengths of real frames: of one vote, or of as many floats as have noise on them. Carriers go down with the "
        "model. In a training on one machine nothing is sent.",
    )


def _settings_table(
    outcomes: Outcomes, choice: Mapping[str, Sequence[Options]], multipliers: Mapping[float, float]
) -> Table:
    def unsampled(name: str) -> float | None:
        plain = outcomes[name][0].statement.get("epsilon_unamplified")
        return plain if isinstance(plain, float) else None

    trainings = {label(m, t): (choice[m][i], multipliers[t]) for m in METHODS for i, t in enumerate(TARGETS)}
    columns: dict[str, Any] = {
        "training": str,
        "settings": lambda name: _shown(trainings[name][0]),
        "noise multiplier": lambda name: trainings[name][1],
        "releases": lambda name: outcomes[name][0].releases,
        "epsilon": lambda name: largest(run.epsilon for run in outcomes[name]),
        "by Rényi alone": lambda name: largest(run.rdp for run in outcomes[name]),
        "without sampling": unsampled,
    }
    return table(
        "Settings, and what the ledger says",
        columns,
        trainings,
        "Epsilon of the run's ledger at its delta, the largest over the seeds; the last column is what holds without "
        "the assumption that nobody knows which records were drawn. Empty: infinite.",
    )


def _tuning_table(config: Config, multipliers: Mapping[float, float], tried: Mapping[str, Record]) -> Table:
    rows = [
        (f"{label(method, target)}, {_shown(options)}", accuracy)
        for method, target in product(METHODS, TARGETS)
        for options, accuracy in zip(
            grid(method, target), _validated(config, multipliers, tried, method, target), strict=True
        )
    ]
    return Table(
        "Accuracy on the validation split",
        ("settings", "accuracy"),
        rows,
        f"Means over the seeds {', '.join(map(str, TUNING_SEEDS))}; a fifth of the training records is held out.",
    )


def _against_epsilon(outcomes: Outcomes) -> Curves:
    return curves(
        "Accuracy against epsilon",
        product(METHODS, TARGETS[:-1]),
        lambda pair: pair[1],
        lambda pair: _accuracy(outcomes, *pair),
        lambda pair: pair[0],
        x_label="epsilon",
        y_label="test accuracy",
        log_x=True,
        caption="Means over the seeds, at the target that the noise was made for; the ledger's epsilon is just below.",
    )


def _against_bytes(outcomes: Outcomes) -> Curves:
    # Lines join points of one epsilon by the bytes of their messages.
    points = sorted(
        (t, outcomes[label(m, t)][0].frame, _accuracy(outcomes, m, t)) for m, t in product(METHODS, TARGETS[:-1])
    )
    return curves(
        "Accuracy against the bytes of one contribution",
        points,
        lambda point: point[1],
        lambda point: point[2],
        lambda point: f"epsilon {point[0]:g}",
        x_label="bytes of a client's message",
        y_label="test accuracy",
        log_x=True,
        x_bytes=True,
        caption="One point per method and epsilon, in the order of their bytes.",
    )


def quantities(outcomes: Outcomes, choice: Mapping[str, Sequence[Options]]) -> dict[Any, float]:
    """Return epsilons, accuracies, what statements and ledgers have, and the longest vote over its bound."""
    private = [run for method, target in product(METHODS, TARGETS[:-1]) for run in outcomes[label(method, target)]]
    promised = [run for run in private if run.statement]
    return {
        **{
            f"epsilon {target:g}: the largest of all ledgers": largest(
                run.epsilon for method in METHODS for run in outcomes[label(method, target)]
            )
            for target in TARGETS[:-1]
        },
        "PRV over Rényi, the largest of all trainings": largest(run.epsilon / run.rdp for run in promised if run.steps),
        # A budget may allow no step at all, and then nothing can be released either.
        "releases recorded, over steps made": min(
            (run.releases / run.steps for run in promised if run.steps), default=math.nan
        ),
        "private trainings that have a statement": len(promised) / len(private),
        "bytes of votes over 1.05 times the entropy bound plus header": _largest_vote(outcomes, choice),
        **{(label(*pair), "accuracy"): _accuracy(outcomes, *pair) for pair in product(METHODS, TARGETS)},
        **{
            (label(m, t), "accuracy over DP-SGD's"): _accuracy(outcomes, m, t) - _accuracy(outcomes, DP_SGD, t)
            for m, t in product(METHODS, TARGETS)
        },
    }


def _largest_vote(outcomes: Outcomes, choice: Mapping[str, Sequence[Options]]) -> float:
    """Return the bytes of a vote over its bound, the largest."""
    from fedcomp.privacy.votes import entropy_bits

    def ratio(run: Record, k: int) -> float:
        bits = entropy_bits(run.coordinates, min(k, run.coordinates))
        # Rounded up to whole bytes, since a frame has no half ones.
        return float(run.frame / math.ceil(1.05 * bits / 8.0 + run.header))

    return largest(
        ratio(run, int(choice[method][i]["k"]))
        for method in (TOPAGG, PLAIN)
        for i, target in enumerate(TARGETS)
        for run in outcomes[label(method, target)]
    )


@dataclass(frozen=True)
class RecordCell:
    """One private training on records.

    Attributes
    ----------
    name : str
    method : str
        As :func:`fedcomp.privacy.dpsgd.private_training` calls it.
    options : mapping of str to number
        ``lr``, and what the method takes.
    noise_multiplier, rate, delta, clip : float
    steps, seed : int
    hidden : str
        Widths of the hidden layers.
    validation : bool
        Train on a part of the training records and evaluate on the others; else evaluate on the test split.
    secure : bool
    budget : float
        Epsilon at which it ends early; 0: none. A training without noise promises nothing, and is not ended by one.
    """

    name: str
    method: str
    options: Mapping[str, Any]
    noise_multiplier: float
    rate: float
    delta: float
    clip: float
    steps: int
    seed: int
    hidden: str
    validation: bool
    secure: bool
    budget: float = 0.0

    def run(self) -> RecordOutcome:
        """Train, and say what it came to."""
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

        task = get_task(TASK, hidden=self.hidden)
        x, y = task.train_split.tensors
        held_x, held_y = task.test.tensors
        if self.validation:
            # A fixed key: all settings are judged on the same records, whatever their seed.
            order = torch.from_numpy(Key(0, "topagg_dpsgd/validation").uniform(len(x)).argsort())
            last = round(LAST * len(x))
            held_x, held_y = x[order[:last]], y[order[:last]]
            x, y = x[order[last:]], y[order[last:]]
        key = Key(self.seed, "topagg_dpsgd")
        entropy = make_entropy(None if self.secure else key.at(purpose="noise"), insecure_deterministic=not self.secure)
        ledger = PrivacyLedger(
            delta=self.delta,
            population=len(x),
            adjacency="add_remove",
            # At a rate of 1 there is nothing to sample, and amplification may not be claimed.
            sampling=Sampling("poisson", rate=self.rate) if self.rate < 1.0 else Sampling("everyone"),
            unit="record",
            budget=(self.budget or None) if self.noise_multiplier else None,
        )
        options = {name: value for name, value in self.options.items() if name != "lr"}
        # Votes over sqrt(k) are contributions of norm 1, as clipped gradients are: one range of step sizes for all.
        step = self.options["lr"] / math.sqrt(options.get("k", 1))
        with single_thread():
            module = task.model(self.seed)
            before = _flat(module)
            sgd = torch.optim.SGD(module.parameters(), lr=step, momentum=MOMENTUM)
            with private_training(
                module,
                sgd,
                TensorDataset(x, y),
                ledger,
                StepSettings(
                    noise_multiplier=self.noise_multiplier,
                    rate=self.rate,
                    max_grad_norm=self.clip,
                    loss_reduction="none",
                    entropy=entropy,
                    key=key,
                ),
                steps=self.steps,
                method=self.method,
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
                # What the training moved stands in for a client's update: it has the shape and the sparsity of one.
                frame, header, extra = _message(private, _flat(module) - before, key)
                mechanism = private.mechanism()
            module.eval()
            with torch.no_grad():
                loss = float(functional.cross_entropy(module(x), y))
                accuracy = float((module(held_x).argmax(1) == held_y).double().mean())
        statement: dict[str, Any] = {}
        if self.noise_multiplier:
            statement = make_statement(
                ledger,
                mechanism=mechanism,
                entropy=entropy,
                trust="whoever trains sees the records and is trusted; users of the models are not",
                protects="every model of the training, so the final one and all before it",
                clip=_bounded(self.method, self.options),
                not_covered=(
                    "step sizes, k, rank and kept fraction, chosen on records that were trained on",
                    "the accuracies and losses in this report",
                    "preprocessing of the data",
                    "time a step takes",
                ),
            ).to_json()
        return RecordOutcome(
            loss=loss if math.isfinite(loss) else math.inf,
            accuracy=accuracy,
            epsilon=ledger.epsilon(),
            rdp=rdp_epsilon(ledger.events, self.delta) if self.noise_multiplier else math.inf,
            steps=made,
            releases=ledger.releases,
            coordinates=private.length(),
            frame=frame,
            header=header,
            downlink=extra,
            statement=statement,
        )


@dataclass(frozen=True)
class RecordOutcome:
    """What a private training came to.

    Attributes
    ----------
    loss, accuracy : float
        After the last step: on the training records, and on those held out.
    epsilon, rdp : float
        The ledger's, and by Rényi divergences alone.
    steps, releases : int
        Steps that were made, fewer than asked where the budget ended the training; and events in the ledger.
    coordinates : int
        That noise was on in the last step.
    frame, header, downlink : int
        Bytes of a client's message with such a contribution, of a vote without votes, and of carriers sent to it.
    statement : mapping
        Empty where nothing is promised.
    """

    loss: float
    accuracy: float
    epsilon: float
    rdp: float
    steps: int
    releases: int
    coordinates: int
    frame: int
    header: int
    downlink: int
    statement: Mapping[str, Any] = field(default_factory=dict)


def _flat(module: Any) -> Any:
    import torch

    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()


def _message(private: Any, update: Any, key: Any) -> tuple[int, int, int]:
    """Return the bytes of a message with a contribution of this kind, of one without votes, and of its carriers.

    The messages are those that the client-level systems of the same names send; here none is sent.
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
        "dp-sgd": "every record's gradient clipped over all parameters together",
        "topagg": "every record votes for k signs; the norm sqrt(k) follows from counting",
        "random-mask": "every record's gradient clipped over the coordinates that a public seed keeps",
        "lsg": f"every record's products with carriers of the public model clipped together{kept}",
    }[method]
