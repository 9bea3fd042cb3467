"""What a noisy count of votes tells, without any training: pass probabilities and the signs it gets right.

Both are functions of public numbers and of synthetic gradients, so they say what to expect of a number of clients and
an epsilon before anybody trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fedcomp.privacy.votes import pass_probability, threshold, topk_stochastic_sign
from fedcomp.rng import Key


@dataclass(frozen=True)
class Published:
    """One setting of DataLens' published commands: clients (there: teachers), votes, noise, threshold."""

    name: str
    clients: int
    k: int
    sigma: float
    beta: float

    @property
    def passes(self) -> tuple[float, float, float]:
        """Probabilities that pure noise passes (either sign), that a unanimous vote passes rightly, and wrongly."""
        limit = self.beta * self.clients
        return sum(pass_probability(0.0, self.sigma, limit)), *pass_probability(self.clients, self.sigma, limit)


PUBLISHED: Final = (
    Published("MNIST, epsilon 1", 4000, 200, 5000.0, 0.7),
    Published("Fashion-MNIST, epsilon 1", 4000, 200, 5000.0, 0.9),
    Published("CelebA-Gender, epsilon 1", 6000, 700, 9000.0, 0.85),
    Published("CelebA-Hair, epsilon 1", 8000, 700, 9000.0, 0.9),
    Published("MNIST, epsilon 10", 4000, 300, 800.0, 0.2),
    Published("Fashion-MNIST, epsilon 10", 4000, 350, 1000.0, 0.27),
    Published("CelebA-Gender, epsilon 10", 6000, 500, 700.0, 0.12),
    Published("CelebA-Hair, epsilon 10", 4000, 500, 700.0, 0.25),
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
    from fedcomp.privacy.accounting import noise_multiplier_for

    out: dict[str, list[float]] = {f"{share:g}": [] for share in SHARES}
    for epsilon in epsilons:
        sigma = math.sqrt(k) * noise_multiplier_for(epsilon, delta, releases=releases, grid_sigma=math.inf)
        for share in SHARES:
            right, wrong = pass_probability(share * clients, sigma, beta * clients)
            out[f"{share:g}"].append(right if share else right + wrong)
    return out


def drawn_difference(published: Published, draws: int, key: Key) -> float:
    """Return the largest distance of the closed form to ``draws`` draws of the integer noise through the threshold."""
    from fedcomp.privacy.entropy import SeededEntropy
    from fedcomp.privacy.noise import draw

    noise = draw("discrete_gaussian", published.sigma, draws, SeededEntropy(key, insecure_deterministic=True))
    limit = published.beta * published.clients
    quiet = float(np.mean(threshold(noise, limit) != 0))
    passed = threshold(noise + published.clients, limit)
    found = (quiet, float(np.mean(passed == 1)), float(np.mean(passed == -1)))
    return max(abs(a - b) for a, b in zip(found, published.passes, strict=True))


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
