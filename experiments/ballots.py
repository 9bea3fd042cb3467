"""What a noisy count of votes tells and costs, without any training.

Probabilities to pass a threshold, signs that are right, sizes of packed votes, epsilons: functions of public numbers
and of synthetic gradients, so they say what to expect of a number of clients and an epsilon before anybody trains. The
published settings and rules of DataLens are those of the authors' code (read); the figures follow from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fedcomp.experiments.findings import Say, largest
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


def packed() -> dict[str, Any]:
    """Return sizes of votes on one image, measured and as bounds, in bytes; and the largest measured size over 1.05
    times the entropy bound plus the frame's header."""
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
    return {"rows": rows, "ratio": largest(ratios)}


def published() -> dict[str, Any]:
    """Return the costs of the published settings, what their sums show, and how that depends on epsilon."""
    table: list[list[Any]] = []
    floor: list[list[Any]] = []
    excess: list[float] = []
    order: list[float] = []
    for p in PUBLISHED:
        steps = p.steps()
        events = p.events(steps)
        rule, rdp, prv = (f(events, DELTA) for f in (classical_epsilon, rdp_epsilon, prv_epsilon))
        exact = gaussian_epsilon(math.sqrt(steps * p.images) / p.z, DELTA)
        table.append([f"{p.name}, budget {p.epsilon:g}", p.teachers, p.z, p.images, steps, rule, rdp, prv, exact])
        excess.append(prv - exact)
        order.append(max(exact - prv, prv - rdp, rdp - rule))
        nothing, everything, _ = p.passes
        floor.append([p.name, f"{p.epsilon:g}", p.teachers / p.sigma, nothing, everything])
    first = PUBLISHED[0]
    releases = first.steps() * first.images
    x = [float(e) for e in np.geomspace(0.3, 30.0, 25)]
    sigmas = [
        noise_multiplier_for(e, DELTA, releases=releases, grid_sigma=math.inf) * 2 * math.sqrt(first.k) for e in x
    ]
    limit = first.beta * first.teachers
    series = {
        "all votes, passes rightly": [pass_probability(float(first.teachers), s, limit)[0] for s in sigmas],
        "no vote, passes": [sum(pass_probability(0.0, s, limit)) for s in sigmas],
        "half of the votes, passes rightly": [pass_probability(first.teachers / 2, s, limit)[0] for s in sigmas],
    }
    ones = [row for row in floor if row[1] == "1"]
    return {
        "rows": table,
        "floor": floor,
        "curve": {
            "title": "What passes the threshold",
            "x_label": f"epsilon of {releases} releases, delta {DELTA:g}",
            "y_label": "probability, one pixel",
            "x": x,
            "series": series,
            "caption": f"{first.teachers} teachers, k = {first.k}, threshold {first.beta:g} of the teachers.",
        },
        "values": {
            "prv": largest(excess),
            "order": largest(order),
            "noise passes": max(row[3] for row in ones),
        },
    }


def dealt() -> dict[str, Any]:
    """Return how many of MNIST's records two teachers get in the published deal, and what they are protected by."""
    labels = np.repeat(np.arange(10), MNIST_CLASSES)
    twice, never = shared_records(wrapping_deal(labels, 4000, 15), len(labels))
    doubled = []
    for p in (p for p in PUBLISHED if p.name == "MNIST"):
        doubled.append(gaussian_epsilon(2.0 * math.sqrt(p.steps() * p.images) / p.z, DELTA))
    return {"row": ["published: class by class in turn, MNIST", len(labels), twice, never, *doubled], "twice": twice}


def surviving_signs(size: int, say: Say) -> dict[str, Any]:
    """Return how often the noisy sum's sign is the true direction's, on the k largest coordinates of that."""
    k, images = size // 4, 1290
    truth = Key(5, "agreement/truth").generator().standard_t(4, size)
    top = np.argsort(-np.abs(truth))[:k]
    x = [float(e) for e in np.geomspace(0.3, 30.0, 13)]
    series: dict[str, list[float]] = {}
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
        series[f"{teachers} teachers"] = found
    return {
        "title": "Signs that survive the noise",
        "x_label": f"epsilon of {images} releases, delta {DELTA:g}",
        "y_label": "share of right signs",
        "x": x,
        "series": series,
        "caption": f"{size} coordinates, k = {k}: each teacher sees the true direction under three times as much noise "
        "of its own. Counted on the k largest coordinates of the truth, without a threshold.",
    }
