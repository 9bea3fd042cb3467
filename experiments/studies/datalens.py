"""DataLens: cost and accuracy with the settings of the authors' code (read), and the results of a run's rows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fedcomp.experiments.findings import Findings, Pictures, Table, largest, mean, spread
from fedcomp.experiments.kit import Record, Records, table
from fedcomp.experiments.options import Config, numbers
from fedcomp.experiments.spec import RunResult, RunSpec, format_settings
from fedcomp.experiments.tables import Found, Rows, Studied
from fedcomp.privacy.accounting import (
    classical_epsilon,
    gaussian_epsilon,
    noise_multiplier_for,
    prv_epsilon,
    rdp_epsilon,
    releases_for,
)
from fedcomp.privacy.events import Event
from fedcomp.privacy.votes import encode_rows, entropy_bits, longest_rows, pass_probability, topk_stochastic_sign
from fedcomp.rng import Key
from fedcomp.strategies.parts import TASK_PREFIX, below
from fedcomp.tasks.teachers import MNIST_CLASSES, shared_records, wrapping_deal
from fedcomp.wire import FILLED

if TYPE_CHECKING:
    from fedcomp.tasks.generator import GeneratorTask

DELTA: Final = 1e-5
NOISELESS: Final = math.inf
"""The epsilon of rows without noise."""

FOUND: Final[Mapping[str, Any]] = {
    # Threshold as a share of the teachers.
    "beta": 0.2,
    "generator_lr": 0.01,
    "teacher_lr": 0.005,
    # Small networks learn nothing from fifteen records in so few steps.
    "task.discriminator": "bilinear",
}
"""Settings found at epsilon 10 on other seeds."""


class PublishedSettings(NamedTuple):
    """One command of the authors' published code (read): the epsilon at which it stops, teachers, k, sigma, beta,
    images per step (B; if the size of the data is not given, the teachers' share of it, assumed), pixels times
    channels."""

    name: str
    epsilon: float
    teachers: int
    k: int
    sigma: float
    beta: float
    images: int
    size: int

    @property
    def passes(self) -> tuple[float, float, float]:
        """Return the probabilities that pure noise passes (either sign), and that a unanimous vote passes with the
        right or the wrong sign."""
        limit = self.beta * self.teachers
        return sum(pass_probability(0.0, self.sigma, limit)), *pass_probability(self.teachers, self.sigma, limit)

    @property
    def z(self) -> float:
        """Return the noise multiplier: the code charges 2 k alpha / sigma^2 a release, which means a sensitivity of 2
        sqrt(k)."""
        return self.sigma / (2.0 * math.sqrt(self.k))

    def events(self, steps: int) -> list[Event]:
        """Return the events of ``steps`` steps: one release for each image."""
        return [Event("gaussian", self.z, releases=steps * self.images)]

    def steps(self) -> int:
        """Return the largest number of steps that the rule in the code allows."""
        return bisect_right(range(1, 10_000), self.epsilon, key=lambda n: classical_epsilon(self.events(n), DELTA))

    def exact(self, moved: float = 1.0) -> float:
        """Return the exact epsilon after all steps for a record that moves a sum by ``moved`` times the assumed
        sensitivity."""
        return gaussian_epsilon(moved * math.sqrt(self.steps() * self.images) / self.z, DELTA)


PUBLISHED: Final = (
    PublishedSettings("MNIST", 1.0, 4000, 200, 5000.0, 0.7, 15, 784),
    PublishedSettings("Fashion-MNIST", 1.0, 4000, 200, 5000.0, 0.9, 15, 784),
    PublishedSettings("CelebA-Gender", 1.0, 6000, 700, 9000.0, 0.85, 27, 12288),
    PublishedSettings("CelebA-Hair", 1.0, 8000, 700, 9000.0, 0.9, 20, 12288),
    PublishedSettings("MNIST", 10.0, 4000, 300, 800.0, 0.2, 15, 784),
    PublishedSettings("Fashion-MNIST", 10.0, 4000, 350, 1000.0, 0.27, 15, 784),
    PublishedSettings("CelebA-Gender", 10.0, 6000, 500, 700.0, 0.12, 27, 12288),
    PublishedSettings("CelebA-Hair", 10.0, 4000, 500, 700.0, 0.25, 30, 12288),
)
"""The commands in the authors' repository (read)."""


def budgets(config: Config) -> tuple[float, ...]:
    """Return the epsilons of the rows, the largest first."""
    return tuple(sorted(numbers(str(config.settings["epsilons"])), reverse=True))


def named(epsilon: float) -> str:
    """Return the label of rows with this epsilon."""
    return "no noise" if epsilon == NOISELESS else f"epsilon {epsilon:g}"


def labels(config: Config, epsilon: float) -> list[str]:
    """Return the rows with an epsilon, one for each seed."""
    return [f"{named(epsilon)}, run {run + 1}" for run in range(int(config.settings["seeds"]))]


def variations(config: Config) -> tuple[str, str, str]:
    """Return the first row at the largest epsilon, the row that sends images, and the row that ends at half the
    budget."""
    most = budgets(config)[0]
    first = labels(config, most)[0]
    return first, f"{first}, images down", f"{first}, budget {most / 2:g}"


def rows(config: Config) -> Rows:
    """Return the rows: for each seed one without noise and one per epsilon; one that sends images; one that ends
    early."""
    out = {}
    for epsilon in (NOISELESS, *budgets(config)):
        settings = settings_of(config, epsilon)
        for run, label in enumerate(labels(config, epsilon)):
            out[label] = f"datalens seed={config.seed + run} {format_settings(settings)}"
    # Each varies the first run at the largest epsilon, which learns most, in one respect: the content of the downlink,
    # or the end.
    first, images, stopped = variations(config)
    most = budgets(config)[0]
    early = format_settings({**settings_of(config, most), "budget": most / 2})
    return {**out, images: f"{out[first]} send=images", stopped: f"datalens seed={config.seed} {early}"}


def settings_of(config: Config, epsilon: float) -> dict[str, Any]:
    """Return the settings of a row, with the noise that the budget needs for all of its rounds."""
    said = config.settings
    # Experiments must be repeatable. The statement says so in capitals, and the cost equals that of real noise.
    own: dict[str, Any] = {"insecure_deterministic": True, "delta": DELTA, **FOUND}
    own |= {name: said[name] for name in ("teachers", "k", "images")}
    # The population is all records, and delta has to be below one over it.
    own |= {"task.records": said["records"], "population": said["records"]}
    own["evaluate_every"] = max(1, config.rounds // 4)
    # Every generated image is a release, because teachers vote on each.
    own["noise_multiplier"] = _noise(epsilon, max(1, config.rounds) * int(said["images"]))
    return own | ({"noise_multiplier": 0.0} if epsilon == NOISELESS else {"budget": epsilon})


@cache
def _noise(epsilon: float, releases: int) -> float:
    # The noise comes from bisection and is accurate up to the last bits, but a budget is exact.
    return 0.0 if epsilon == NOISELESS else noise_multiplier_for(epsilon, DELTA, releases=releases) * (1.0 + 1e-9)


def study(found: Found) -> Studied:
    """Measure accuracy, privacy cost and bytes; compute the published settings and which teacher has which record; draw
    pictures."""
    config, results, say = found.config, found.results, found.say
    first, images, stopped = variations(config)
    first_spec = results[first].spec
    sent = Records([sent_by(results[first]), sent_by(results[images])])
    # Stored as data, so a resumed run shows the earlier computation.
    costs = Records(map(Record, say.cell("published", published)))
    sizes = Records(map(Record, say.cell("packed", packed)))
    twice, never = say.cell("held", lambda: held(first_spec))
    pictures = Findings.from_json(say.cell("pictures", lambda: Findings(figures=drawn(found)).to_json()))
    dealt = shared_records(wrapping_deal(np.repeat(np.arange(10), MNIST_CLASSES), 4000, 15), sum(MNIST_CLASSES))
    records = len(_task(first_spec).train_split)
    doubled = [p.exact(moved=2.0) for p in PUBLISHED if p.name == "MNIST"]
    # The lowest seed, because a claim on the mean could hide a seed that learnt nothing.
    lowest = {e: min(results[label].accuracy for label in labels(config, e)) for e in budgets(config)}
    quantities: dict[Any, float] = {
        **spending(results, results[stopped]),
        **{(named(e), "lowest accuracy of the seeds"): accuracy for e, accuracy in lowest.items()},
        "bytes by which votes differ from what the settings say": max(sent.each("beyond")),
        "packed votes over 1.05 times the entropy bound and the header": largest(sizes.each("over")),
        "records here that two teachers hold": twice,
        "records with two teachers under the published deal": dealt[0],
        "PRV above the exact epsilon": largest(r["PRV"] - r["exact"] for r in costs),
        "violation of exact <= PRV <= RDP <= their rule": largest(
            max(r["exact"] - r["PRV"], r["PRV"] - r["RDP"], r["RDP"] - r["their rule"]) for r in costs
        ),
        "chance that a pixel without a vote passes at budget 1": max(costs.where(budget=1.0).each("no vote, passes")),
    }
    return Studied(
        quantities,
        tables=[
            _learnt(found),
            table(
                "Bytes of one step and one client",
                _columns(sent),
                sent,
                f"Payload of a client with {config.settings['teachers']} teachers. Their votes are in one frame, "
                "which is padded to a length that depends only on the settings.",
            ),
            table(
                "Votes on one image, in bytes",
                _columns(sizes),
                sizes,
                "Measured on 15 images of random directions, per image. The bound is log2 C(d, k) + k bits: any "
                "support and any signs.",
            ),
            table(
                "What the published settings cost and show",
                _columns(costs),
                costs,
                f"Epsilon at delta {DELTA:g} after the number of steps that their rule allows, for the exchange of "
                "one teacher (sensitivity 2 sqrt(k)) and one release for each image. Images per step are assumed for "
                "CelebA. Next, probabilities for one pixel in closed form: without a vote it passes only by noise, "
                "with either sign; with all votes every teacher votes for it with the same sign.",
            ),
            Table(
                "Records with two teachers",
                ("deal", "records", "two teachers", "no teacher", "epsilon 1 is", "epsilon 10 is"),
                [
                    ["published: class by class in turn, MNIST", sum(MNIST_CLASSES), *dealt, *doubled],
                    ["here: a keyed hash of each record, this run", records, twice, never, None, None],
                ],
                "The last two columns have the exact epsilon of a record that two teachers hold, at the published "
                "settings for MNIST with budgets 1 and 10. Such a record moves a sum by 4 sqrt(k), while the "
                "accounting assumes 2 sqrt(k).",
            ),
        ],
        figures=pictures.figures,
    )


def _columns(records: Records) -> dict[str, Any]:
    """Return all fields as columns, except those for claims."""
    return {name: name for name in records[0] if name not in ("beyond", "over", "budget")}


def spending(results: Mapping[str, RunResult], stopped: RunResult) -> dict[str, float]:
    """Return how far budgets are exceeded, how many images are not in the ledger, and how far a row ends from its
    budget."""
    private = [result for result in results.values() if result.spec.settings["noise_multiplier"]]
    said = stopped.spec.settings
    z, images = float(said["noise_multiplier"]), int(said["images"])
    # Standard deviation of the integer noise in votes: z times 2 sqrt(k), the distance by which an exchanged record may
    # move the sum.
    grid_sigma = 2.0 * z * math.sqrt(float(said["k"]))
    allowed = releases_for(float(said["budget"]), DELTA, z, grid_sigma=grid_sigma) // images
    return {
        "epsilon that was spent over the budget, any row": largest(
            float(r.notes["privacy"]["epsilon"]) / float(r.spec.settings["budget"]) for r in private
        ),
        "releases in the ledger that are not one for each generated image, any row": largest(
            abs(float(r.notes["privacy"]["releases"]) - int(r.spec.settings["images"]) * r.final.round) for r in private
        ),
        # With few rounds the run may end before its budget is used.
        "steps of the row that ends early, less those its budget allows": (
            stopped.final.round - min(allowed, stopped.spec.rounds)
        ),
    }


def sent_by(result: RunResult) -> Record:
    """Return the bytes of one step and one client; None if no step was made."""
    said, messages = result.spec.settings, result.spec.clients * result.final.round
    task = _task(result.spec)
    votes, k = int(said["teachers"]) * int(said["images"]), int(said["k"])
    # Padded to the longest frame, whose length follows from public numbers. Any other length would reveal something
    # about votes.
    length = longest_rows(votes, task.pixels, k) + FILLED
    return Record(
        {
            "what goes down": said.get("send", "generator"),
            "votes up": round(result.uplink_payload_bytes / messages) if messages else None,
            "entropy bound": round(entropy_bits(task.pixels, k, votes) / 8),
            "float32 gradients": 4 * votes * task.pixels,
            "down": round(result.downlink_payload_bytes / messages) if messages else None,
            "beyond": abs(result.uplink_payload_bytes - messages * length),
        }
    )


def _learnt(found: Found) -> Table:
    config, results = found.config, found.results
    epsilons = (NOISELESS, *budgets(config))
    reached = {e: [100 * results[label].accuracy for label in labels(config, e)] for e in epsilons}
    first = {e: results[labels(config, e)[0]] for e in epsilons}
    columns: dict[str, Any] = {
        "noise": named,
        "z": lambda epsilon: first[epsilon].spec.settings["noise_multiplier"],
        "steps": lambda epsilon: first[epsilon].final.round,
        "accuracy, mean %": lambda epsilon: mean(reached[epsilon]),
        "half the range": lambda epsilon: spread(reached[epsilon]),
        "lowest": lambda epsilon: min(reached[epsilon]),
        "highest": lambda epsilon: max(reached[epsilon]),
    }
    return table(
        "What the generator is worth",
        columns,
        epsilons,
        "Accuracy on the real test images of a classifier that has seen generated ones only, after its last epoch, "
        f"over {config.settings['seeds']} seeds. Chance is 10 %. Budgets are at delta {DELTA:g}; what they promise is "
        "stated below.",
    )


def _task(spec: RunSpec) -> GeneratorTask:
    from fedcomp.tasks import get_task
    from fedcomp.tasks.generator import GeneratorTask

    task = get_task(spec.task, **below(spec.settings, TASK_PREFIX))
    assert isinstance(task, GeneratorTask)
    return task


def held(spec: RunSpec) -> tuple[int, int]:
    """Return how many records of a row are held by two teachers, and how many by none."""
    from fedcomp.tasks.gan import Adam

    task, count = _task(spec), int(spec.settings["teachers"])
    # Counted at the teachers, since the assignment rule itself is under test.
    holders = np.zeros(len(task.train_split), np.int64)
    for partition in range(spec.clients):
        own = task.ensemble(partition, spec.clients, count, Adam(), batch=1, key=Key(spec.seed, "datalens")).teachers
        records = task.client(partition, spec.clients).indices
        for teacher in range(count):
            holders[records[own.records_of(teacher)]] += 1
    return int((holders > 1).sum()), int((holders == 0).sum())


def packed() -> list[dict[str, Any]]:
    """Return sizes of votes on one of 15 images of random directions, measured and as a bound, in bytes."""
    found = []
    for d, k in ((784, 200), (784, 300), (12288, 700)):
        directions = Key(1, "packed", layer=k).uniform(15 * d).reshape(15, d) - 0.5
        size = len(encode_rows(topk_stochastic_sign(directions, k, uniforms=Key(2, "packed", layer=k))))
        sizes = {"pixels": d, "k": k, "packed": size / 15, "entropy bound": entropy_bits(d, k) / 8}
        sizes |= {"bitmap and signs": (d + k) / 8, "fixed width and signs": (k * math.ceil(math.log2(d)) + k) / 8}
        header = len(encode_rows(np.zeros((15, d), np.int8)))
        found.append({**sizes, "float32": 4 * d, "over": size / (1.05 * entropy_bits(d, k, 15) / 8 + header)})
    return found


def published() -> list[dict[str, Any]]:
    """Return epsilons of the published settings, and the probabilities of their sums for one pixel."""
    found = []
    for p in PUBLISHED:
        events = p.events(p.steps())
        noise, right, _ = p.passes
        found.append(
            {
                "data": f"{p.name}, budget {p.epsilon:g}",
                "teachers": p.teachers,
                "z": p.z,
                "images a step": p.images,
                "steps": p.steps(),
                "their rule": classical_epsilon(events, DELTA),
                "RDP": rdp_epsilon(events, DELTA),
                "PRV": prv_epsilon(events, DELTA),
                "exact": p.exact(),
                "teachers / sigma": p.teachers / p.sigma,
                "no vote, passes": noise,
                "all votes, passes rightly": right,
                "budget": p.epsilon,
            }
        )
    return found


def drawn(found: Found) -> list[Pictures]:
    """Return pictures of records and of the generators of the first seed."""
    from fedcomp.tasks.arrays import load_arrays

    first = found.results[variations(found.config)[0]].spec
    task = _task(first)
    columns, names, split = 10, [str(c) for c in range(task.classes)], task.train_split
    picked = [split.x[np.flatnonzero(split.y == c)[:columns]] for c in range(task.classes)]
    real = np.stack(picked).reshape(task.classes, columns, task.side, task.side)
    note = "simulated: one Gaussian per class" if task.options["records"] else task.data.served
    out = [Pictures.of("Records the teachers learn from", real, names, f"{note}; no generator has seen them")]
    for epsilon in (NOISELESS, *budgets(found.config)):
        label = labels(found.config, epsilon)[0]
        model = task.model(first.seed)
        load_arrays(model, found.results[label].arrays)
        caption = "Every image comes from public noise and a label, through the generator after its last step."
        # One key for all rows, so every generator gets the same noise and labels.
        out.append(Pictures.of(f"Generated: {label}", task.samples(model, columns, Key(4, "pictures")), names, caption))
    return out
