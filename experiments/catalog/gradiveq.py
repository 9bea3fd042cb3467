"""GradiVeQ: which slices of a gradient fit into few directions, what a cycle saves, and whether training notices."""

from __future__ import annotations

from typing import Final

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import TEXT, Option, numbers
from fedcomp.experiments.studies.gradiveq import POOLED, RIVALS, ROWS, study
from fedcomp.experiments.tables import Found
from fedcomp.rules import Int

_CLAIMS: Final = """
    all subsets of workers | decoded mean off the projection of the mean, relative | <= 1e-6 | gate: specification;
        derived: the mean convention
    conv3, pooled | torch over depth fastest, missed, late | >= 5.0 | gate: specification: .115 against .017
    conv3, pooled | torch over depth fastest, missed, early | >= 5.0 | goal: the same right after the warm-up
    conv2, shared-first | torch over depth fastest, missed, late | >= 5.0 | gate: specification: .604 against .017
    pooled, 20 + 130 | times fewer bytes over a whole cycle, least | >= 2.5 | gate: specification: 3.15 without the
        basis
    # Of convolutions, basis and warm-up counted.
    pooled, 20 + 130 | times fewer bytes | >= 2.5 | gate: specification
    pooled, 20 + 130 | points of accuracy lost | <= 1.0 | gate: specification: .35 in two seeds
    pooled, 20 + 130, 4 bits on a shared scale | points of accuracy lost | <= 1.5 | gate: specification: .55 in two
        seeds
    pooled, 20 + 130, 4 bits on a shared scale | integer sums that differ between ring and star | <= 0 | gate: derived,
        integers may be added in any order
"""


def _claims(found: Found) -> str:
    """Of the rivals those that send fewer bytes in this run."""
    sent = {label: found.number(label, "times fewer bytes") for label in ROWS}
    lines = [
        f"{label} | bytes of a cycle off the formula, relative | <= 1e-9 | gate: derived: dense frames and short ones, "
        "headers and all, have one length each in a cycle"
        for label, row in ROWS.items()
        if row.sampling
    ]
    lines += [
        f"{count} workers | gain by a code that can be added over that {way} | >= 1.2 | gate: the paper's point "
        "(abstract): under one ratio a code that can be added gains more; simulated"
        for count in (4, 16)
        for way in ("hop by hop", "gathered")
    ]
    lines += [
        f"{POOLED} | points of accuracy below {rival} | <= 0.0 | goal: no worse than a simple code at "
        f"{sent[rival]:.1f} times fewer bytes"
        for rival in RIVALS
        if sent[rival] >= sent[POOLED]
    ]
    return "\n".join([_CLAIMS, *lines])


EXPERIMENT = Experiment(
    name="gradiveq",
    question="Which slices of a gradient fit into few directions, what does a cycle save, and does training notice?",
    # Every training has a step size of its own, which is found first.
    study=study,
    repeats=False,
    options={
        "seeds": 3,
        "workers": 1,
        "rates": Option(
            "0.01,0.02,0.04,0.08",
            TEXT,
            "step sizes; each row takes the one that does best on a validation split",
            check=numbers,
        ),
        "steps": Option(500, Int(5, 100_000), "steps of a training"),
        "later": Option(400, Int(1, 10_000), "steps after the sampled ones on which bases are measured"),
        "sampled": Option(100, Int(3, 10_000), "steps that are sampled where bases are compared"),
    },
    claims=_claims,
    answer=(
        f"{POOLED}: {{{POOLED} | times fewer bytes:.1f}} times fewer bytes of convolutions, basis, samples and warm-up "
        f"counted, {{{POOLED} | points of accuracy lost:.1f}} points lost against {{dense | test, %:.1f}} %. "
        + "; ".join(f"{r}: {{{r} | times fewer bytes:.1f}} times, {{{r} | test, %:.1f}} %" for r in RIVALS)
        + ". Of later gradients of conv3 a pooled basis misses {conv3, pooled | missed, depth fastest:.3f} with the "
        "depth fastest, {conv3, pooled | missed, torch's order:.3f} in torch's order."
    ),
    rounds=1,
    clients=4,
    minutes=10.0,
    quick=("seeds=1", "steps=10", "rates=0.02", "sampled=6", "later=5"),
    notes=(
        "Yu et al. (2018) project slices of a convolution's gradient onto the leading directions of former aggregated "
        "gradients, so that a ring can add what it sends. Four workers train a network of three convolutions, 16, 32 "
        "and 64 filters, on the digits enlarged to 12 x 12, with momentum .9; the mean gradient takes a step. Training "
        "runs without messages, with the codec's real frames; rounds over messages are the matter of the tests.\n\n"
        "Rivals have error feedback, GradiVeQ has not, as in the paper. The test split has 359 images: one image makes "
        ".28 points. A basis and its samples are common to all workers; who counts the basis once for all, as a ring "
        "that broadcasts it may, finds larger ratios."
    ),
)
