"""The privacy audit: the leakage that an attacker measures on every private system, and tests with incorrect
variants."""

from __future__ import annotations

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.privacy_audit import study
from fedcomp.rules import Int, Real

EXPERIMENT = Experiment(
    name="privacy_audit",
    question="Does any private system leak more than it states, and would this audit notice?",
    study=study,
    options={
        "runs": Option(300, Int(50), "runs of every attack, half of them with the canary"),
        "noise_runs": Option(30, Int(5), "runs whose noise is measured"),
        "canaries": Option(1000, Int(100), "canaries of the audits in one run"),
        "guesses": Option(100, Int(10), "guesses of the audits in one run"),
        "confidence": Option(0.99, Real(least=0.5, most=0.9999), "of the lower bounds on mu"),
        "clip_rounds": Option(60, Int(5), "rounds of the clip norms' trajectories"),
        "float_draws": Option(100_000, Int(1000), "noisy values whose last bits are looked at"),
    },
    claims="""
        tier A & tier B & tier C & tier E & tier F & tier D | verdicts against a system | == 0 | gate: what the system
            itself states
        tier D | forgotten noise is noticed | == 1 | gate: goal
        tier C | weakest attack's bound over mu | >= 0.2 | gate: an attack that detects nothing cannot refute anything
        | mutants not told from their originals | == 0 | gate: goal: all are caught
        # Otherwise the claim above could hold because there are no mutants.
        | mutants tried | >= 19 | gate: 15 published mistakes and four others
        | probability that 2000 runs notice sqrt(2) for 1 | >= 0.99 | gate: computed
        integer noise | outputs that tell 0 from 1 | == 0 | gate: derived: all lie on one grid
        float noise | outputs that tell 0 from 1 | >= 0.2 | gate: measured: a quarter of them
        | our adaptive clip norm, factor from the median | <= 1.1 | gate: the published rule
        # The behaviour of another package must not fail a run of this one.
        Flower | adaptive clip norm, smallest factor from the median | >= 10.0 | goal: measured on the installed Flower,
            whose version is in the tables; other versions may have fixed it
        Flower | share of integers that local noise moved | == 0 | goal: measured on the installed Flower, whose version
            is in the tables; other versions may have fixed it
        Flower | share of the mean that one client's NaN makes NaN | > 0 | goal: measured on the installed Flower, whose
            version is in the tables; other versions may have fixed it
        Flower | an unchanged model ends the round | == 1 | goal: measured on the installed Flower, whose version is in
            the tables; other versions may have fixed it
    """,
    answer=(
        "{attacks that refute} attacks refute the statement of a system; {mutants caught} of {mutants tried} "
        "incorrect variants are caught."
    ),
    minutes=0.75,
    quick=("runs=60", "noise_runs=5", "canaries=150", "guesses=40", "clip_rounds=8", "float_draws=2000"),
    engines=("inprocess",),
    notes=(
        "Every system runs on the code a training runs, thousands of times, in two worlds that differ by one unit. An "
        "attacker who knows everything else tries to tell them apart. What they achieve is a lower bound on what the "
        "system gives away; where it exceeds the ledger's claim, the claim is refuted. An audit refutes, it proves "
        "nothing.\n\n"
        "Noise comes from the run's seed here, so that the run repeats; the tests use noise of the operating system as "
        "well. What is measured of Flower contains noise of numpy's global generator and varies a little.\n\n"
        "mu is the parameter of Gaussian differential privacy: telling the two worlds apart is as hard as telling "
        "N(0, 1) from N(mu, 1). With noise multiplier z, one release has mu = 1 / z."
    ),
)
