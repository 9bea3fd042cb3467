"""What a noisy count of votes reveals and costs, without any training.

Probabilities to pass a threshold, signs that are right, sizes of packed votes, epsilons: functions of public numbers
and of synthetic gradients, so they say what to expect of a number of clients and an epsilon before anybody trains. The
published settings and rules of DataLens are those of the authors' code (read); the figures follow from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from fedcomp.experiments.findings import Curves, Findings, Say, Series, Table, largest
from fedcomp.experiments.kit import claim
from fedcomp.privacy.accounting import (
    classical_epsilon,
    gaussian_epsilon,
    noise_multiplier_for,
    prv_epsilon,
    rdp_epsilon,
)
from fedcomp.privacy.events import Event
from fedcomp.privacy.votes import encode_rows, entropy_bits, pass_probability, threshold, topk_stochastic_sign
from fedcomp.rng import Key
from fedcomp.tasks.teachers import MNIST_CLASSES, shared_records, wrapping_deal

DELTA: Final = 1e-5


@dataclass(frozen=True)
class PublishedSettings:
    """One command of the authors' published code (read).

    Attributes
    ----------
    name : str
    epsilon : float
        What it stops at.
    teachers, k : int
    sigma, beta : float
    images : int
        B; where the data's size is not given, the teachers' share of it (assumed).
    size : int
        Pixels times channels.
    """

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
        """Probabilities that pure noise passes (either sign), that a unanimous vote passes rightly, and wrongly."""
        limit = self.beta * self.teachers
        return sum(pass_probability(0.0, self.sigma, limit)), *pass_probability(self.teachers, self.sigma, limit)

    @property
    def z(self) -> float:
        """Noise multiplier: the code charges 2 k alpha / sigma^2 a release, which is a sensitivity of 2 sqrt(k)."""
        return self.sigma / (2.0 * math.sqrt(self.k))

    def events(self, steps: int) -> list[Event]:
        """Return what ``steps`` steps cost: one release for each image."""
        return [Event("gaussian", self.z, releases=steps * self.images)]

    def steps(self) -> int:
        """Return the largest number of steps that the code's own rule allows."""
        low, high = 0, 1
        while classical_epsilon(self.events(high), DELTA) <= self.epsilon:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = classical_epsilon(self.events(middle), DELTA) <= self.epsilon
            low, high = (middle, high) if fits else (low, middle)
        return low


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
"""From the commands in the authors' repository (read)."""


SHARES: Final = (1.0, 0.5, 0.25, 0.0)
"""Net shares of the clients that vote for a sign."""


def passing(
    clients: int, k: int, beta: float, releases: int, delta: float, epsilons: Sequence[float]
) -> dict[str, list[float]]:
    """Return, by net share of the clients, the probability to pass with the right sign at each epsilon; closed form.

    For the share 0 it is the probability to pass at all, which is pure noise.
    """
    out: dict[str, list[float]] = {f"{share:g}": [] for share in SHARES}
    for epsilon in epsilons:
        sigma = math.sqrt(k) * noise_multiplier_for(epsilon, delta, releases=releases, grid_sigma=math.inf)
        for share in SHARES:
            right, wrong = pass_probability(share * clients, sigma, beta * clients)
            out[f"{share:g}"].append(right if share else right + wrong)
    return out


def drawn_difference(setting: PublishedSettings, draws: int, key: Key) -> float:
    """Return the largest distance of the closed form to ``draws`` draws of the integer noise through the threshold."""
    from fedcomp.privacy.entropy import SeededEntropy
    from fedcomp.privacy.noise import draw

    noise = draw("discrete_gaussian", setting.sigma, draws, SeededEntropy(key, insecure_deterministic=True))
    limit = setting.beta * setting.teachers
    quiet = float(np.mean(threshold(noise, limit) != 0))
    passed = threshold(noise + setting.teachers, limit)
    found = (quiet, float(np.mean(passed == 1)), float(np.mean(passed == -1)))
    return max(abs(a - b) for a, b in zip(found, setting.passes, strict=True))


def agreement(
    clients: int, size: int, densities: Sequence[float], multipliers: Mapping[str, float], key: Key
) -> dict[str, dict[str, float]]:
    """Return how often the noisy outcome has the sign of the true mean gradient, weighed by the mean's magnitude.

    Clients hold the same Student-t(4) gradient plus independent noise three times as large. Weighed by magnitude, a
    coin is right half of the time, and coordinates that hardly matter hardly count.

    Parameters
    ----------
    densities : sequence of float
        Votes of a client over ``size``.
    multipliers : mapping
        Noise multipliers by name.

    Returns
    -------
    dict
        By method ("votes, density", "signs, density" for plain signs, "clipped sum") and name of the multiplier.
    """
    rng = key.generator()
    common = rng.standard_t(4, size)
    gradients = common + 3.0 * rng.normal(size=(clients, size))
    weight = np.abs(gradients.mean(axis=0))
    truth = np.sign(gradients.mean(axis=0))
    noise = rng.normal(size=size)
    norms = np.linalg.norm(gradients, axis=1)
    clip = float(np.median(norms))
    clipped = (gradients * np.minimum(1.0, clip / norms)[:, None]).sum(axis=0)

    def right(total: Any) -> float:
        return float(weight[np.sign(total) == truth].sum() / weight.sum())

    out = {"clipped sum": {name: right(clipped + z * clip * noise) for name, z in multipliers.items()}}
    for density in densities:
        k = max(1, round(density * size))
        for kind, stochastic in (("votes", True), ("signs", False)):
            votes = topk_stochastic_sign(gradients, k, stochastic=stochastic, uniforms=key.at(purpose="votes"))
            total = votes.sum(axis=0, dtype=np.int64)
            found = {name: right(total + z * math.sqrt(k) * noise) for name, z in multipliers.items()}
            out[f"{kind}, {density:g}"] = found
    return out


def packed() -> Findings:
    """Return sizes of votes on one image, measured and as bounds, in bytes."""
    rows: list[list[Any]] = []
    ratios = []
    for d, k in ((784, 200), (784, 300), (12288, 700)):
        directions = Key(1, "packed", layer=k).uniform(15 * d).reshape(15, d) - 0.5
        frame = encode_rows(topk_stochastic_sign(directions, k, uniforms=Key(2, "packed", layer=k)))
        header = len(encode_rows(np.zeros((15, d), np.int8)))
        fixed = k * math.ceil(math.log2(d))
        bits = [entropy_bits(d, k), d + k, fixed + k, 32 * d]
        rows.append([d, k, len(frame) / 15, *(b / 8 for b in bits)])
        ratios.append(len(frame) / (1.05 * entropy_bits(d, k, 15) / 8 + header))
    table = Table(
        "Votes on one image, in bytes",
        ("pixels", "k", "packed", "entropy bound", "bitmap and signs", "fixed width and signs", "float32"),
        rows,
        "Measured on 15 images of random directions, per image. The bound is log2 C(d, k) + k bits: a support and "
        "signs of which nothing is known.",
    )
    short = claim(
        "bytes of packed votes at published sizes, over 1.05 times the entropy bound plus the header",
        largest(ratios),
        "<= 1.0",
        "goal: log2 C(d, k) + k bits an image, and five per cent",
    )
    return Findings([table], claims=[short])


def published() -> Findings:
    """Return the costs of the published settings, what their sums show, and how that depends on epsilon."""
    costs: list[list[Any]] = []
    floor: list[list[Any]] = []
    for p in PUBLISHED:
        steps = p.steps()
        events = p.events(steps)
        exact = gaussian_epsilon(math.sqrt(steps * p.images) / p.z, DELTA)
        bounds = [f(events, DELTA) for f in (classical_epsilon, rdp_epsilon, prv_epsilon)]
        costs.append([f"{p.name}, budget {p.epsilon:g}", p.teachers, p.z, p.images, steps, *bounds, exact])
        floor.append([p.name, f"{p.epsilon:g}", p.teachers / p.sigma, *p.passes[:2]])
    return Findings(
        tables=[
            Table(
                "What the published settings cost",
                ("data", "teachers", "z", "images a step", "steps", "their rule", "RDP", "PRV", "exact"),
                costs,
                f"Epsilon at delta {DELTA:g} after as many steps as their rule allows, for the exchange of one teacher "
                "(sensitivity 2 sqrt(k)) and one release for each image. Images a step are assumed for CelebA.",
            ),
            Table(
                "What a noisy sum of the published settings shows",
                ("data", "budget", "teachers / sigma", "no vote, passes", "all votes, passes rightly"),
                floor,
                "Probabilities for one pixel, closed form. With no vote it passes by noise alone, with either sign; "
                "all votes means that every teacher votes for it, with the same sign.",
            ),
        ],
        figures=[_passing_by_epsilon(PUBLISHED[0])],
        claims=[
            claim(
                "published settings: by how much PRV exceeds the exact epsilon, at most",
                largest(prv - exact for *_, prv, exact in costs),
                "<= 0.0105",
                "PRV's own error bound of 0.01 is part of its figure",
            ),
            claim(
                "published settings: exact <= PRV <= RDP <= their rule, largest violation",
                largest(max(exact - prv, prv - rdp, rdp - rule) for *_, rule, rdp, prv, exact in costs),
                "<= 0",
                "theory: each is an upper bound of the one before",
            ),
            claim(
                "published settings at budget 1: chance that a pixel without a vote passes, largest",
                max(p.passes[0] for p in PUBLISHED if p.epsilon == 1.0),
                "<= 0.6",
                "closed form; 0.42 to 0.58, so that much of every step is noise",
            ),
        ],
    )


def _passing_by_epsilon(setting: PublishedSettings) -> Curves:
    releases = setting.steps() * setting.images
    x = [float(e) for e in np.geomspace(0.3, 30.0, 25)]
    sigmas = [
        noise_multiplier_for(e, DELTA, releases=releases, grid_sigma=math.inf) * 2 * math.sqrt(setting.k) for e in x
    ]
    at = {e: replace(setting, sigma=sigma) for e, sigma in zip(x, sigmas, strict=True)}
    half, limit = setting.teachers / 2, setting.beta * setting.teachers
    return Curves(
        "What passes the threshold",
        f"epsilon of {releases} releases, delta {DELTA:g}",
        "probability, one pixel",
        [
            Series("all votes, passes rightly", x, [one.passes[1] for one in at.values()]),
            Series("no vote, passes", x, [one.passes[0] for one in at.values()]),
            Series("half of the votes, passes rightly", x, [pass_probability(half, s, limit)[0] for s in sigmas]),
        ],
        log_x=True,
        caption=f"{setting.teachers} teachers, k = {setting.k}, threshold {setting.beta:g} of the teachers.",
    )


def dealt() -> list[Any]:
    """Return how many of MNIST's records two teachers get in the published deal, and what they are protected by: a row
    of a table."""
    labels = np.repeat(np.arange(10), MNIST_CLASSES)
    shared = shared_records(wrapping_deal(labels, 4000, 15), len(labels))
    mnist = [p for p in PUBLISHED if p.name == "MNIST"]
    doubled = [gaussian_epsilon(2.0 * math.sqrt(p.steps() * p.images) / p.z, DELTA) for p in mnist]
    return ["published: class by class in turn, MNIST", len(labels), *shared, *doubled]


def surviving_signs(size: int, say: Say) -> Findings:
    """Return how often the noisy sum's sign is the true direction's, on the k largest coordinates of that."""
    k, images = size // 4, 1290
    truth = Key(5, "agreement/truth").generator().standard_t(4, size)
    top = np.argsort(-np.abs(truth))[:k]
    x = [float(e) for e in np.geomspace(0.3, 30.0, 13)]
    series = []
    for teachers in (400, 1500, 4000):
        say(f"agreement of signs, {teachers} teachers")
        noise = Key(6, "agreement/teachers", teachers).generator().standard_normal((teachers, size))
        votes = topk_stochastic_sign(truth + 3.0 * noise, k, uniforms=Key(7, "agreement/votes", teachers))
        total = votes.sum(0, dtype=np.int64)
        draws = Key(8, "agreement/noise", teachers).generator().standard_normal((8, size))
        found = []
        for epsilon in x:
            sigma = noise_multiplier_for(epsilon, DELTA, releases=images, grid_sigma=math.inf) * 2.0 * math.sqrt(k)
            signs = threshold(total + sigma * draws, 0.0)
            found.append(float((signs[:, top] == np.sign(truth[top])).mean()))
        series.append(Series(f"{teachers} teachers", x, found))
    caption = (
        f"{size} coordinates, k = {k}: each teacher sees the true direction under three times as much noise of its "
        "own. Counted on the k largest coordinates of the truth, without a threshold."
    )
    curves = Curves(
        "Signs that survive the noise",
        f"epsilon of {images} releases, delta {DELTA:g}",
        "share of right signs",
        series,
        log_x=True,
        caption=caption,
    )
    return Findings(figures=[curves])
