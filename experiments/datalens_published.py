"""What DataLens' published code promises by its own settings: costs, what passes its threshold, who holds what.

Nothing is trained here. Settings and rules are those of the authors' code (read); the figures follow from them.
"""

from __future__ import annotations

import math
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
class Published:
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
    Published("MNIST", 1.0, 4000, 200, 5000.0, 0.7, 15, 784),
    Published("F-MNIST", 1.0, 4000, 200, 5000.0, 0.9, 15, 784),
    Published("CelebA-Gender", 1.0, 6000, 700, 9000.0, 0.85, 27, 12288),
    Published("CelebA-Hair", 1.0, 8000, 700, 9000.0, 0.9, 20, 12288),
    Published("MNIST", 10.0, 4000, 300, 800.0, 0.2, 15, 784),
    Published("F-MNIST", 10.0, 4000, 350, 1000.0, 0.27, 15, 784),
    Published("CelebA-Gender", 10.0, 6000, 500, 700.0, 0.12, 27, 12288),
    Published("CelebA-Hair", 10.0, 4000, 500, 700.0, 0.25, 30, 12288),
)


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
        nothing = sum(pass_probability(0.0, p.sigma, p.beta * p.teachers))
        everything = pass_probability(float(p.teachers), p.sigma, p.beta * p.teachers)[0]
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
            "unanimous fails": 1.0 - max(row[4] for row in ones),
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


def agreement(size: int, say: Say) -> dict[str, Any]:
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
