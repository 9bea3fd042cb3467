"""GradiVeQ: which slices of a gradient have low rank, how much a cycle saves, and whether training suffers."""

from __future__ import annotations

from typing import Final

from fedcomp.experiments.experiment import Curve, Experiment
from fedcomp.experiments.options import Config, Option
from fedcomp.experiments.studies import convolutions
from fedcomp.experiments.studies.gradiveq import GRIDS, POOLED, fitted, study, train
from fedcomp.experiments.tables import Found, of_codec
from fedcomp.rules import Int

_CLAIMS: Final = """
    all subsets of workers | decoded mean off the projection of the mean, relative | <= 1e-6 | gate: specification;
        derived: the mean convention
    conv3, pooled | torch over depth fastest, missed, late | >= 5.0 | gate: specification: .115 against .017
    conv3, pooled | torch over depth fastest, missed, early | >= 5.0 | goal: the same, right after the warm-up
    conv2, shared-first | torch over depth fastest, missed, late | >= 5.0 | gate: specification: .604 against .017
    pooled, 20 + 130 | times fewer bytes over a whole cycle, least | >= 2.5 | gate: specification: 3.15 without the
        basis
    # Bytes of convolutions, with basis and warm-up.
    pooled, 20 + 130 | times fewer bytes | >= 2.5 | gate: specification
    pooled, 20 + 130 | points lost | <= 1.0 | gate: specification: .35 in two seeds
    pooled, 20 + 130, 4 bits on a shared scale | points lost | <= 1.5 | gate: specification: .55 in two seeds
    pooled, 20 + 130, 4 bits on a shared scale | integer sums that differ between ring and star | <= 0 | gate: derived,
        integers can be added in any order
"""

_RIVALS: Final = {
    "8 bits, a scale for every 256, + EF": "codec.id=topk codec.density=1.0 codec.values=q8 codec.scope=layer",
    "top-k 10 %, q8, + EF": "codec.id=topk codec.density=0.1 codec.values=q8 codec.scope=layer",
    "low rank 4, + EF": "codec.id=low-rank codec.rank=4 codec.min_rate=1.0",
}


def rows(config: Config) -> dict[str, str]:
    """Return what the workers send for their convolutions. The warm-up of a basis takes a tenth of the steps, at most
    50."""
    basis = f"basis codec.warmup={min(50, config.rounds // 10)} codec.sampling={{}} codec.compression={{}} {{}}".format
    return {
        "dense": "codec codec.id=identity",
        POOLED: basis(20, 130, "codec.most=64"),
        "pooled, 50 + 100": basis(50, 100, "codec.most=64"),
        "pooled, 20 + 130, centred": basis(20, 130, "codec.most=64 codec.center=true"),
        "pooled, 20 + 130, torch's order": basis(20, 130, "codec.most=64 codec.order=FDHW"),
        "shared-first, 50 + 100": basis(50, 100, "codec.most=40 codec.basis=shared_first"),
        GRIDS: basis(20, 130, "codec.most=64 codec.levels=7"),
        "pooled, 20 + 130, 5 % loss": basis(20, 130, "codec.loss=0.05"),
        **{label: f"codec codec.feedback=true {options}" for label, options in _RIVALS.items()},
    }


def _claims(found: Found) -> str:
    """Return the rivals that send fewer bytes in this run."""
    sent = {label: found.number(label, "times fewer bytes") for label in found.rows}
    lines = [
        f"{label} | bytes of a cycle off the formula, relative | <= 1e-9 | gate: derived: dense frames and short ones, "
        "headers and all, have one length each in a cycle"
        for label, row in found.rows.items()
        if row.startswith("basis ")
    ]
    lines += [
        f"{count} workers | gain by a code that can be added over that {way} | >= 1.2 | gate: the paper's point "
        "(abstract): under one ratio a code that can be added gains more; simulated"
        for count in (4, 16)
        for way in ("hop by hop", "gathered")
    ]
    lines += [
        f"{POOLED} | points lost against {rival} | <= 0.0 | goal: no worse than a simple code at "
        f"{sent[rival]:.1f} times fewer bytes"
        for rival in _RIVALS
        if sent[rival] >= sent[POOLED]
    ]
    return "\n".join([_CLAIMS, *lines])


EXPERIMENT = Experiment(
    **convolutions.PAGE,
    name="gradiveq",
    question="Which slices of a gradient lie in a few directions, how much does a cycle save, and does training "
    "suffer?",
    rows=rows,
    rivals={"basis": fitted, "codec": of_codec},
    train=train,
    study=study,
    options={
        "seeds": 3,
        "workers": 1,
        # At 0.08 one of three seeds of four rows, dense training among them, leaves its minimum again, two for good.
        "steps": "0.01,0.02,0.04",
        "later": Option(400, Int(1, 10_000), "steps after the sampled ones, on which bases are measured"),
        "sampled": Option(100, Int(3, 10_000), "steps that are sampled where bases are compared"),
    },
    columns={
        "step size": "step size",
        "test, %": "test, %",
        "±": "±",
        "times fewer": lambda found, row: round(found.ratio(row, "uplink"), 2),
        "with the basis": lambda found, row: round(found.number(row, "times fewer bytes"), 2),
    },
    curves=[Curve(rows=("dense", POOLED, GRIDS, *_RIVALS))],
    claims=_claims,
    answer=(
        f"{POOLED}: {{{POOLED} | times fewer bytes:.1f}} times fewer bytes of convolutions, basis, samples and warm-up "
        f"counted, {{{POOLED} | points lost:.1f}} points lost against {{dense | test, %:.1f}} %. "
        + "; ".join(f"{r}: {{{r} | times fewer bytes:.1f}} times, {{{r} | test, %:.1f}} %" for r in _RIVALS)
        + ". Of later gradients of conv3 a pooled basis misses {conv3, pooled | missed, depth fastest:.3f} with the "
        "depth fastest, {conv3, pooled | missed, torch's order:.3f} in torch's order."
    ),
    minutes=10.0,
    quick=("rounds=10", "seeds=1", "steps=0.02", "sampled=6", "later=5"),
    notes=(
        "Yu et al. (2018) project slices of a convolution's gradient onto the leading directions of earlier "
        "aggregated gradients, so a ring can add the messages. Labels of phases are steps sampled + steps "
        "compressed. Bytes are those of convolutions, and the basis counts once for each worker. The rest of the "
        "model is sent uncompressed in every row and is not counted.\n\n"
        f"{convolutions.NOTES}\n\n"
        "Rivals have error feedback; GradiVeQ has none, as in the paper. A basis and its samples are common to all "
        "workers. Counting the basis once for all workers, as for a ring that broadcasts it, gives larger ratios."
    ),
)
