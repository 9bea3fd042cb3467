"""The audit tiers, applicable to any subject, and their results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcomp.experiments.audits.subjects import DELTA, Subject
from fedcomp.privacy.audit import audit_canary, audit_run, farthest, likeness, noise_scale, off_grid, project
from fedcomp.privacy.gaussian import gaussian_mu
from fedcomp.rng import Key


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of one tier, A to F, on one part of a subject's output.

    ``claimed`` and ``found`` are in the tier's own ``measure``; ``trials`` counts pairs, residuals, runs or canaries;
    ``ok`` says that the claim is not refuted, which does not prove it.
    """

    tier: str
    subject: str
    part: str
    claimed: float
    found: float
    measure: str
    trials: int
    ok: bool


def tier_a(subject: Subject) -> Verdict:
    """Search the pairs of data sets for the largest distance of the sums, in standard deviations of the noise."""

    def released(data: Any) -> Any:
        # Divided by the claimed deviation, so distances are in units of the noise for parts of any scale.
        return subject.run(data, 1, noisy=False)[0, 0] / subject.scale

    # The claim of the events of one round.
    mu = math.sqrt(math.fsum(e.releases / e.noise_multiplier**2 for e in subject.ledger(1).events))
    found = farthest(released, [(subject.worlds.absent, subject.worlds.present), *subject.worlds.pairs], mu)
    return Verdict("A", subject.name, "sum", found.claimed, found.found, "distance / sigma", found.pairs, found.ok)


def tier_b(subject: Subject, *, runs: int, seed: int = 0) -> list[Verdict]:
    """Compare the noise of every part of the output with its claimed standard deviation."""
    outputs = subject.run(subject.worlds.present, runs, seed=seed)
    # The output minus the exact output is pure noise.
    residuals = (outputs - subject.run(subject.worlds.present, 1, noisy=False)) / subject.scale
    out = []
    for part, where in subject.parts.items():
        found, count = noise_scale(residuals[..., where], 1.0), residuals[..., where].size
        out.append(Verdict("B", subject.name, part, 1.0, found.value, "deviation / sigma", count, found.ok))
    return out


def tier_c(subject: Subject, *, runs: int, rounds: int = 1, seed: int = 0, confidence: float = 0.99) -> Verdict:
    """Let an attacker distinguish the worlds by the projection on the canary, summed over the rounds."""
    # Through the ledger's epsilon, because the figure that users see must be valid.
    mu = gaussian_mu(subject.ledger(rounds).epsilon(), DELTA)
    outputs, exact = [], []
    for place, data in enumerate((subject.worlds.absent, subject.worlds.present)):
        # Even seeds for one world and odd ones for the other, so they never share noise.
        drawn = subject.run(data, runs, rounds=rounds, seed=2 * seed + place) / subject.scale
        outputs.append(drawn.reshape(runs, -1))
        exact.append((subject.run(data, 1, rounds=rounds, noisy=False) / subject.scale).ravel())
    # Along the line between the two exact outputs, on which the worlds differ most against equal noise.
    (absent, threshold), (present, _) = (project(each, *exact) for each in outputs)
    low = audit_canary(absent, present, threshold, confidence=confidence)
    return Verdict("C", subject.name, f"{rounds} rounds", mu, low, "mu", runs, low <= mu)


def tier_d(subject: Subject, canaries: Sequence[tuple[int, Any]], *, guesses: int, seed: int = 0) -> Verdict:
    """Let fair coins decide which canaries are in one run, and guess them from the releases of the run.

    Every canary is a participant and a contribution; its score is the projection of all outputs on the contribution.
    """
    coins = Key(seed, "canaries").uniform(len(canaries)) < 0.5
    data = [canary for canary, included in zip(canaries, coins, strict=True) if included]
    released = subject.run(data, 1, seed=seed)[0, 0]
    scores = np.array([released @ np.asarray(contribution, np.float64).ravel() for _, contribution in canaries])
    claimed = subject.ledger(1).epsilon()
    correct, low = audit_run(scores, coins, guesses=guesses, delta=DELTA, confidence=0.95)
    part = f"{correct} of {guesses} right"
    return Verdict("D", subject.name, part, claimed, low, "epsilon", len(canaries), low <= claimed)


def tier_e(subject: Subject, *, runs: int, seed: int = 0) -> Verdict:
    """Count outputs off the public grid in both worlds; any of them may tell the worlds apart."""
    # A single output off the grid reveals the world, so no fraction is small enough.
    worst = max(
        off_grid(subject.run(data, runs, seed=seed)[..., : subject.gridded], subject.mechanism.step)
        for data in (subject.worlds.absent, subject.worlds.present)
    )
    return Verdict("E", subject.name, "outputs", 0.0, worst, "share off the grid", runs, worst == 0.0)


def tier_f(subject: Subject, *, seed: int = 0) -> Verdict:
    """Correlate the noise of two rounds of one run, and of two runs."""
    outputs = subject.run(subject.worlds.present, 2, rounds=2, seed=seed) / subject.scale
    noise = outputs - subject.run(subject.worlds.present, 1, rounds=2, noisy=False) / subject.scale
    # Two rounds of one run, and the same round of two runs: noise must not repeat in either case.
    pairs = [(noise[0, 0], noise[0, 1]), (noise[0, 0], noise[1, 0]), (noise[0, 1], noise[1, 1])]
    # By significance, not by size, because a small correlation of many values counts more than a larger one of few.
    worst = min((likeness(*pair) for pair in pairs), key=lambda found: found.p)
    return Verdict("F", subject.name, "rounds, runs", 0.0, worst.value, "correlation", noise[0, 0].size, worst.ok)
