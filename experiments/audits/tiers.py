"""The tiers of the audit on any subject, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcomp.experiments.audits.subjects import DELTA, Subject
from fedcomp.privacy.audit import audit_canary, audit_run, farthest, likeness, noise_scale, off_grid, project
from fedcomp.rng import Key


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one tier says of one subject.

    Attributes
    ----------
    tier : str
        A to F.
    subject, part : str
        What was audited, and which part of its output.
    claimed, found : float
        In the tier's own measure (:attr:`measure`).
    measure : str
    trials : int
        Pairs, residuals, runs or canaries.
    ok : bool
        Whether the claim stands; this does not prove it.
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
        # Over the claimed deviation: distances are then in units of the noise, whatever the parts' scales.
        return subject.run(data, 1, noisy=False)[0, 0] / subject.scale

    found = farthest(released, [(subject.absent, subject.present), *subject.pairs], subject.release_mu())
    return Verdict("A", subject.name, "sum", found.claimed, found.found, "distance / sigma", found.pairs, found.ok)


def tier_b(subject: Subject, *, runs: int, rounds: int = 1, seed: int = 0) -> list[Verdict]:
    """Compare the noise of every part of the output with the standard deviation that was claimed for it."""
    outputs = subject.run(subject.present, runs, rounds=rounds, seed=seed)
    exact = subject.run(subject.present, 1, rounds=rounds, noisy=False)
    # What is left when the exact output is taken away is noise alone.
    residuals = (outputs - exact) / subject.scale
    out = []
    for part, where in subject.parts.items():
        found = noise_scale(residuals[..., where], 1.0)
        out.append(Verdict("B", subject.name, part, 1.0, found.ratio, "deviation / sigma", found.count, found.ok))
    return out


def tier_c(subject: Subject, *, runs: int, rounds: int = 1, seed: int = 0, confidence: float = 0.99) -> Verdict:
    """Let an attacker tell both worlds apart by the projection on the canary, summed over the rounds."""
    mu = subject.run_mu(rounds)
    scores = []
    for place, data in enumerate((subject.absent, subject.present)):
        # Even seeds for one world, odd ones for the other: no noise is drawn in both.
        outputs = subject.run(data, runs, rounds=rounds, seed=2 * seed + place) / subject.scale
        scores.append(outputs.reshape(runs, -1))
    without, within = (
        (subject.run(data, 1, rounds=rounds, noisy=False) / subject.scale).ravel()
        for data in (subject.absent, subject.present)
    )
    # Along the line between the two exact outputs, on which the worlds differ most against equal noise.
    absent, threshold = project(scores[0], without, within)
    present, _ = project(scores[1], without, within)
    found = audit_canary(absent, present, threshold, confidence=confidence)
    return Verdict("C", subject.name, f"{rounds} rounds", mu, found.mu_low, "mu", runs, not found.refutes(mu))


def tier_d(
    subject: Subject,
    canaries: Sequence[tuple[int, Any]],
    *,
    guesses: int,
    rounds: int = 1,
    seed: int = 0,
    confidence: float = 0.95,
) -> Verdict:
    """Let fair coins decide which canaries are in one run, and guess them from what the run released.

    Every canary is a participant and a contribution; its score is the projection of all outputs on the contribution.
    """
    coins = Key(seed, "canaries").uniform(len(canaries)) < 0.5
    data = [canary for canary, included in zip(canaries, coins, strict=True) if included]
    released = subject.run(data, 1, rounds=rounds, seed=seed)[0].sum(axis=0)
    scores = np.array([released @ np.asarray(contribution, np.float64).ravel() for _, contribution in canaries])
    ledger = subject.ledger(rounds)
    claimed = ledger.epsilon()
    found = audit_run(scores, coins, guesses=guesses, delta=DELTA, confidence=confidence)
    return Verdict(
        "D",
        subject.name,
        f"{found.correct} of {guesses} right",
        claimed,
        found.epsilon_low,
        "epsilon",
        len(canaries),
        not found.refutes(claimed),
    )


def tier_e(subject: Subject, *, runs: int, seed: int = 0) -> Verdict:
    """Count outputs off the public grid in both worlds; any of them may tell the worlds apart."""
    shares = [
        off_grid(subject.run(data, runs, seed=seed)[..., subject.gridded], subject.step)
        for data in (subject.absent, subject.present)
    ]
    # A single output off the grid tells what was added to: there is no share that would be small enough.
    worst = max(shares)
    return Verdict("E", subject.name, "outputs", 0.0, worst, "share off the grid", runs, worst == 0.0)


def tier_f(subject: Subject, *, seed: int = 0) -> Verdict:
    """Correlate the noise of two rounds of one run, and of two runs."""
    outputs = subject.run(subject.present, 2, rounds=2, seed=seed) / subject.scale
    exact = subject.run(subject.present, 1, rounds=2, noisy=False) / subject.scale
    noise = outputs - exact
    # Two rounds of one run, the same round of two runs: noise must repeat along neither.
    pairs = [(noise[0, 0], noise[0, 1]), (noise[0, 0], noise[1, 0]), (noise[0, 1], noise[1, 1])]
    # By significance, not by size: a small correlation of many values counts more than a larger one of few.
    worst = min((likeness(*pair) for pair in pairs), key=lambda found: found.p)
    return Verdict("F", subject.name, "rounds, runs", 0.0, worst.correlation, "correlation", noise[0, 0].size, worst.ok)
