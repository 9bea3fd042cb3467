"""DataLens: what a generator learns from the noisy votes of teachers, what that costs, and what was published of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.errors import ConfigError
from fedcomp.experiments.ballots import DELTA, PUBLISHED, dealt, packed, published, surviving_signs
from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.findings import Claim, Curves, Findings, Pictures, Say, Table, largest, mean, spread
from fedcomp.experiments.kit import claim, curves, table
from fedcomp.experiments.options import TEXT, Config, Option, numbers
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.privacy.accounting import noise_multiplier_for, releases_for
from fedcomp.privacy.votes import entropy_bits, longest_rows
from fedcomp.rng import Key
from fedcomp.rules import Flag, Int, OneOf, Real
from fedcomp.tasks.teachers import MNIST_CLASSES
from fedcomp.wire import FILLED

if TYPE_CHECKING:
    from fedcomp.tasks.generator import GeneratorTask

NOISELESS: Final = math.inf
"""An epsilon: no noise is added."""

STOPPED: Final = 0.5
"""Share of its epsilon at which the row that is to end early has to."""

FULL: Final[Mapping[str, Any]] = {
    "images": 15,
    "saturation": 1e-5,
    "generator_lr": 1e-3,
    "teacher_lr": 1e-3,
    "population": sum(MNIST_CLASSES),
    "task.noise": 50,
    "task.width": 32,
    "task.teacher_width": 4,
    "task.classifier": "cnn",
    "task.synthetic": 100_000,
    "task.classifier_epochs": 600,
    "task.classifier_lr": 2e-3,
    "task.classifier_momentum": 0.0,
    "task.classifier_batch": 512,
}
"""The published settings for MNIST that do not depend on epsilon; widths of the networks are ours."""


OPTIONS = {
    "full": Option(
        False, Flag(), "MNIST with the published settings, where its files are; more than a day of one core a row"
    ),
    "epsilons": Option("10,1", TEXT, "budgets at delta 1e-5, one row for each and each seed", check=numbers),
    "seeds": Option(3, Int(1, 20), "runs for each epsilon"),
    "teachers": Option(150, Int(1), "teachers of each client"),
    "records": Option(22_500, Int(100), "simulated records of all clients together (not with full)"),
    "k": Option(28, Int(1), "votes of a teacher on an image (not with full)"),
    "images": Option(15, Int(1), "generated images of a step (not with full)"),
    "beta": Option(0.2, Real(least=0.0), "threshold as a share of the teachers (not with full)"),
    "generator_lr": Option(0.01, Real(above=0.0), "step size of the generator's Adam (not with full)"),
    "teacher_lr": Option(0.005, Real(above=0.0), "step size of the teachers' Adam (not with full)"),
    "discriminator": Option("bilinear", OneOf("bilinear", "mlp", "conv"), "a teacher's network (not with full)"),
    "pixels": Option(784, Int(50), "size of the vectors on which signs are compared"),
}


def label(epsilon: float, run: int) -> str:
    """Return the label of a row; runs count from 0 and differ by their seeds."""
    return f"no noise, run {run + 1}" if epsilon == NOISELESS else f"epsilon {epsilon:g}, run {run + 1}"


def budgets(config: Config) -> tuple[float, ...]:
    """Return the epsilons of the rows, the largest first."""
    return tuple(sorted(numbers(str(config.settings["epsilons"])), reverse=True))


def runs(config: Config) -> range:
    """Return the runs of every epsilon."""
    return range(int(config.settings["seeds"]))


def images_label(config: Config) -> str:
    """Return the label of the row in which images go down."""
    return f"{label(budgets(config)[0], 0)}, images down"


def stopped_label(config: Config) -> str:
    """Return the label of the row whose budget ends it early."""
    epsilon = budgets(config)[0]
    return f"{label(epsilon, 0)}, budget {STOPPED * epsilon:g}"


def rows(config: Config) -> list[RunSpec]:
    """One row without noise and one per epsilon, for each seed; one that sends images; one that ends early."""
    out = [_row(config, epsilon, run) for epsilon in (NOISELESS, *budgets(config)) for run in runs(config)]
    # One variation at a time, of the first run at the largest epsilon, where most is learnt: anything else would differ
    # in more than what goes down or where it ends.
    first = _row(config, budgets(config)[0], 0)
    out.append(replace(first, label=images_label(config), settings={**first.settings, "send": "images"}))
    early = {**first.settings, "budget": STOPPED * budgets(config)[0]}
    return [*out, replace(first, label=stopped_label(config), settings=early)]


def _row(config: Config, epsilon: float, run: int) -> RunSpec:
    chosen = _full(config, epsilon) if config.settings["full"] else _small(config, epsilon)
    rounds = chosen.pop("rounds")
    settings = {
        # Experiments must repeat. The statement says so in capitals, and what it costs is that of real noise.
        "insecure_deterministic": True,
        "delta": DELTA,
        "teachers": config.settings["teachers"],
        # The published evaluation is the largest part of a full row: once before the first step, once after the last.
        "evaluate_every": max(1, rounds if config.settings["full"] else rounds // 4),
        **chosen,
    }
    task = "mnist-generator" if config.settings["full"] else "digits-generator"
    spec = config.spec("datalens", label(epsilon, run), task, **settings)
    return replace(spec, rounds=rounds, seed=config.seed + run)


def _small(config: Config, epsilon: float) -> dict[str, Any]:
    """Return the settings of a small row: as much noise as the budget needs for all of its rounds."""
    names = ("k", "images", "beta", "generator_lr", "teacher_lr")
    own = {name: config.settings[name] for name in names}
    records = int(config.settings["records"])
    # The population is all records: delta has to be below one over it.
    own |= {"task.records": records, "population": records, "rounds": config.rounds}
    own["task.discriminator"] = config.settings["discriminator"]
    if epsilon == NOISELESS:
        return {**own, "noise_multiplier": 0.0}
    # Every generated image is a release: a teacher votes on each of them.
    releases = max(1, config.rounds) * int(config.settings["images"])
    return {**own, "noise_multiplier": _noise(epsilon, releases), "budget": epsilon}


@cache
def _noise(epsilon: float, releases: int) -> float:
    # Found by bisection, up to the last bits; a budget is kept to all of them.
    return noise_multiplier_for(epsilon, DELTA, releases=releases) * (1.0 + 1e-9)


def _full(config: Config, epsilon: float) -> dict[str, Any]:
    """Return the published settings for MNIST, and as many rounds as their own rule allows."""
    # Without noise there is no published setting: the first one, without its noise.
    wanted = PUBLISHED[0].epsilon if epsilon == NOISELESS else epsilon
    found = next((p for p in PUBLISHED if p.name == "MNIST" and p.epsilon == wanted), None)
    if found is None:
        raise ConfigError(f"full=true has published settings for epsilon 1 and 10, not {epsilon:g}; set epsilons=10,1")
    noisy = {"noise_multiplier": found.z, "budget": epsilon} if epsilon != NOISELESS else {"noise_multiplier": 0.0}
    return {**FULL, **noisy, "k": found.k, "beta": found.beta, "rounds": found.steps() if config.rounds else 0}


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """What was learnt, bytes, the published epsilons, who holds which record; curves; pictures."""

    def kept(name: str, make: Callable[[], Findings]) -> Findings:
        # As findings, tables and all: a resumed run shows what was computed then.
        return Findings.from_json(say.cell(name, lambda: make().to_json()))

    costs, sizes = kept("published", published), kept("packed", packed)
    signs = kept("agreement", lambda: surviving_signs(int(config.settings["pixels"]), say))
    images = kept("pictures", lambda: Findings(figures=_pictures(config, results)))
    deals = [say.cell("records", dealt), say.cell("held", lambda: _held(config, results))]
    sent = [_sent(results[name]) for name in (label(budgets(config)[0], 0), images_label(config))]
    shared = Table(
        "Records with two teachers",
        ("deal", "records", "two teachers", "no teacher", "epsilon 1 is", "epsilon 10 is"),
        deals,
        "The last two columns: exact epsilon of a record in two teachers' hands, which moves a sum by 4 sqrt(k) where "
        "2 sqrt(k) were paid for, at the published settings for MNIST of budget 1 and 10.",
    )
    # The lowest seed, not the mean: a claim on a mean could hide a seed that learnt nothing.
    lowest = {epsilon: min(_accuracies(config, results, epsilon)) for epsilon in budgets(config)}
    reached = ", ".join(f"{100 * accuracy:.1f} % at epsilon {epsilon:g}" for epsilon, accuracy in lowest.items())
    return Findings(
        tables=[_learnt(config, results), _sent_table(config, sent), *sizes.tables, *costs.tables, shared],
        figures=[*images.figures, _accuracy(config, results), *costs.figures, *signs.figures],
        claims=[
            *spending(results, results[stopped_label(config)]),
            *(
                claim(
                    f"accuracy of a classifier trained on images at epsilon {epsilon:g}, lowest of the seeds",
                    accuracy,
                    "> 0.2",
                    "twice chance: a smoke test, from small simulations; no order of epsilons is claimed",
                )
                for epsilon, accuracy in lowest.items()
            ),
            claim(
                "bytes by which a client's votes differ from what the settings alone say",
                largest(found["beyond"] for found in sent if found["beyond"] is not None),
                "== 0",
                "derived: the longest frame that any votes could make",
            ),
            *sizes.claims,
            claim(
                "records of this experiment that two teachers hold",
                deals[1][2],
                "== 0",
                "a hash of the record says who has it; counted over the teachers of all clients",
            ),
            claim(
                "records with two teachers under the published deal, MNIST's class counts",
                deals[0][2],
                "== 1138",
                "derived from its order of dealing: classes that have run out start over",
            ),
            *costs.claims,
        ],
        answer=f"A classifier that learnt from generated images reaches at least {reached} (the lowest seed).",
    )


def spending(results: Mapping[str, RunResult], stopped: RunResult) -> list[Claim]:
    """No budget is crossed, every image is paid for, and a row ends where its budget does."""
    private = [result for result in results.values() if result.spec.settings["noise_multiplier"]]
    said = stopped.spec.settings
    z, images = float(said["noise_multiplier"]), int(said["images"])
    # Deviation of the integer noise in votes: z times 2 sqrt(k), by which an exchanged record may move their sum.
    grid_sigma = 2.0 * z * math.sqrt(float(said["k"]))
    allowed = releases_for(float(said["budget"]), DELTA, z, grid_sigma=grid_sigma) // images
    return [
        claim(
            "epsilon that was spent over the budget, any row",
            largest(float(r.notes["privacy"]["epsilon"]) / float(r.spec.settings["budget"]) for r in private),
            "<= 1.0",
            "a step that would cross the budget is not made; its noise is not drawn",
        ),
        claim(
            "releases in the ledger that are not one for each generated image, any row",
            largest(
                abs(float(r.notes["privacy"]["releases"]) - int(r.spec.settings["images"]) * r.final.round)
                for r in private
            ),
            "== 0",
            "derived: a teacher votes on every image of a batch, so each is a release",
        ),
        claim(
            "steps made by the row that ends early, less those its budget allows",
            # At few rounds the run may end before its budget does.
            stopped.final.round - min(allowed, stopped.spec.rounds),
            "== 0",
            "closed form of the Gaussian mechanism, solved for the number of releases",
        ),
    ]


def _named(epsilon: float) -> str:
    return "no noise" if epsilon == NOISELESS else f"epsilon {epsilon:g}"


def _accuracies(config: Config, results: Mapping[str, RunResult], epsilon: float) -> list[float]:
    return [results[label(epsilon, run)].accuracy for run in runs(config)]


def _learnt(config: Config, results: Mapping[str, RunResult]) -> Table:
    def found(epsilon: float) -> list[RunResult]:
        return [results[label(epsilon, run)] for run in runs(config)]

    def percent(epsilon: float) -> list[float]:
        return [100 * accuracy for accuracy in _accuracies(config, results, epsilon)]

    columns: dict[str, Any] = {
        "noise": _named,
        "z": lambda epsilon: float(found(epsilon)[0].spec.settings["noise_multiplier"]),
        "steps": lambda epsilon: max(result.final.round for result in found(epsilon)),
        "accuracy, mean %": lambda epsilon: mean(percent(epsilon)),
        "half the range": lambda epsilon: spread(percent(epsilon)),
        "lowest": lambda epsilon: min(percent(epsilon)),
        "highest": lambda epsilon: max(percent(epsilon)),
    }
    return table(
        "What the generator is worth",
        columns,
        (NOISELESS, *budgets(config)),
        f"Accuracy on the real test images of a classifier that has seen generated ones only, after its last epoch, "
        f"over {config.settings['seeds']} seeds. Chance is 10 %. Budgets are at delta {DELTA:g}; what they promise "
        "is stated below.",
    )


def _sent(result: RunResult) -> dict[str, Any]:
    """Return bytes of one step and one client; None where no step was made."""
    said, messages = result.spec.settings, result.spec.clients * result.final.round
    votes, pixels, k = int(said["teachers"]) * int(said["images"]), _pixels(result), int(said["k"])
    up, down = (
        total / messages if messages else math.nan
        for total in (result.uplink_payload_bytes, result.downlink_payload_bytes)
    )
    return {
        "what": "images" if said.get("send") == "images" else "generator",
        "up": round(up) if messages else None,
        "bound": round(entropy_bits(pixels, k, votes) / 8),
        "dense": round(4.0 * votes * pixels),
        "fewer": 4.0 * votes * pixels / up,
        "down": round(down) if messages else None,
        # Padded to the longest frame, whose length follows from public numbers: a byte more or less would say something
        # about votes.
        "beyond": abs(up - longest_rows(votes, pixels, k) - FILLED) if messages else None,
    }


def _sent_table(config: Config, sent: Sequence[Mapping[str, Any]]) -> Table:
    columns = {
        "what goes down": "what",
        "votes up": "up",
        "entropy bound": "bound",
        "float32 gradients": "dense",
        "times fewer": "fewer",
        "down": "down",
    }
    return table(
        "Bytes of one step and one client",
        columns,
        sent,
        f"Payload of a client with {config.settings['teachers']} teachers. Votes of all of them are in one frame, "
        "which is padded to a length that follows from the settings alone.",
    )


def _pixels(result: RunResult) -> int:
    return 784 if result.spec.task == "mnist-generator" else 64


def _accuracy(config: Config, results: Mapping[str, RunResult]) -> Curves:
    points = []
    for epsilon in (NOISELESS, *budgets(config)):
        by_round: dict[int, list[float]] = {}
        for run in runs(config):
            for record in results[label(epsilon, run)].rounds:
                # Most steps are not evaluated.
                if not math.isnan(record.accuracy):
                    by_round.setdefault(record.round, []).append(100 * record.accuracy)
        points += [(_named(epsilon), number, mean(by_round[number])) for number in sorted(by_round)]
    return curves(
        "Accuracy over the steps",
        points,
        lambda point: point[1],
        lambda point: point[2],
        lambda point: point[0],
        x_label="step of the generator",
        y_label="accuracy (%)",
        caption=f"Mean over {len(runs(config))} seeds; the epsilon is that of the last step.",
    )


def _task(spec: RunSpec) -> GeneratorTask:
    from fedcomp.tasks import get_task
    from fedcomp.tasks.generator import GeneratorTask

    options = {k.removeprefix("task."): v for k, v in spec.settings.items() if k.startswith("task.")}
    task = get_task(spec.task, **options)
    assert isinstance(task, GeneratorTask)
    return task


def _held(config: Config, results: Mapping[str, RunResult]) -> list[Any]:
    """Return how many records of the first row two teachers hold, and how many none, counted at the teachers."""
    from fedcomp.tasks.gan import Adam

    spec = results[label(budgets(config)[0], 0)].spec
    task, count = _task(spec), int(spec.settings["teachers"])
    # Counted at the teachers and not derived from the rule that assigns them, which is what is to be checked.
    held = np.zeros(len(task.train_split), np.int64)
    for partition in range(spec.clients):
        own = task.ensemble(partition, spec.clients, count, Adam(), batch=1, key=Key(spec.seed, "datalens")).teachers
        rows = task.client(partition, spec.clients).indices
        for teacher in range(count):
            held[rows[own.records_of(teacher)]] += 1
    twice, never = int((held > 1).sum()), int((held == 0).sum())
    return ["here: a keyed hash of each record, this run", len(held), twice, never, None, None]


def _pictures(config: Config, results: Mapping[str, RunResult]) -> list[Pictures]:
    """Return records, and what the generators of the first seed make."""
    from fedcomp.tasks.arrays import load_arrays

    first = results[label(budgets(config)[0], 0)].spec
    task = _task(first)
    columns, names = 10, [str(c) for c in range(task.classes)]
    split = task.train_split
    picked = [split.x[np.flatnonzero(split.y == c)[:columns]] for c in range(task.classes)]
    real = np.stack(picked).reshape(task.classes, columns, task.side, task.side)
    note = "simulated: one Gaussian per class" if task.options["records"] else task.data.served
    out = [Pictures.of("Records the teachers learn from", real, names, f"{note}; no generator has seen them")]
    for epsilon in (NOISELESS, *budgets(config)):
        name = label(epsilon, 0)
        model = task.model(first.seed)
        load_arrays(model, results[name].arrays)
        caption = "Every image is public noise and a label, through the generator after its last step."
        # One key for all rows: the same noise and labels through every generator.
        out.append(Pictures.of(f"Generated: {name}", task.samples(model, columns, Key(4, "pictures")), names, caption))
    return out


EXPERIMENT = Experiment(
    name="datalens",
    question="Can a generator learn digits from the noisy votes of teachers that never show a record?",
    rows=rows,
    measure=measure,
    options=OPTIONS,
    rounds=60,
    clients=10,
    minutes=5.3,
    quick=(
        "rounds=4",
        "clients=2",
        "seeds=1",
        "epsilons=10",
        "teachers=10",
        "records=100",
        "images=2",
        "pixels=60",
        "k=32",
    ),
    notes=(
        "Small by default: 8x8 digits, of which there are too few for an ensemble, so that 22 500 records are drawn "
        "from one Gaussian per class; 1500 teachers with about fifteen of them each, 150 on every client; teachers are "
        "bilinear in label and pixels, since small networks learn nothing from fifteen records in so few steps (set "
        "discriminator=mlp). The test images are real. Step sizes, k and the number of steps were found at epsilon 10 "
        "on other seeds than these. What is measured is the mechanism and not the paper's accuracy, and no order of "
        "epsilons is claimed: without noise less was learnt than at epsilon 10.\n\n"
        "Noise is drawn from seeds so that the report repeats, and every statement says so. The epsilon is that of one "
        "record of one teacher, which is what a client with several teachers can promise; with one teacher on every "
        "client it is the client's.\n\n"
        "--set full=true takes the published settings for MNIST (4000 teachers with --set teachers=400, k, sigma, "
        "threshold, 600 epochs of the classifier on 100 000 images) and convolutional networks, from files under "
        "$FEDCOMP_DATA; without the files the digits are enlarged, and the report says so. One evaluation is 60 "
        "million images through a convolutional network, about 12.7 hours of one core, and a row makes two; with 400 "
        "teachers a client it takes several gigabytes as well. No full row was run to its end: the experiment "
        "datalens_mnist is about MNIST at a cost that can be paid."
    ),
)
