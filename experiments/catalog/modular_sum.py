"""Modular sums: residues that relays add on the way, their error, and a relay's output bytes."""

from __future__ import annotations

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.modular_sum import study
from fedcomp.rules import Int

EXPERIMENT = Experiment(
    name="modular_sum",
    question="What does it take to let anybody on the way add updates without decoding them?",
    study=study,
    options={
        "seeds": Option(3, Int(1, 100), "draws per row, with the seeds from --seed on"),
        "workers": 2,
        "values": Option(20_000, Int(16), "values of an update"),
        "levels": Option(10, Int(1), "steps from zero to the clip, in sums without messages"),
        "trees": Option(40, Int(1), "random trees of relays by which the frames are added"),
        "uses": Option(4, Int(1, 8), "uses of the emulated channel for each value"),
        "senders": Option(8, Int(2), "senders in the emulated channel"),
    },
    claims="""
        | different sums along all trees | <= 1.0 | gate: spec 3.4: exact, any order
        | difference of a decoded sum from the sum of decoded frames | <= 1e-4 | gate: spec 3.4: up to float32's
            rounding of a hundred values
        | mean error, standard errors | <= 4.0 | gate: spec 3.4: unbiased
        the contributors' dithers | error variance, off by | <= 0.05 | gate: spec 3.4: 1 times C δ²/12
        dithers of another round | error variance, off by | <= 0.05 | gate: spec 3.4: 3 times C δ²/12
        no dithers | error variance, off by | <= 0.05 | gate: spec 3.4: 2 times C δ²/12
        | bytes of a sum of 100 over those of one frame in it | <= 1.0 | gate: derived: one packed vector leaves,
            whatever came
        | coded over uncoded error at 40 dB | <= 0.1 | gate: derived: digits in several uses against repetition
        | coded over separate error at 40 dB | <= 1.0 | gate: abstract: less distortion of the aggregate than
            separate coding
        | coded over uncoded error at 0 dB | <= 1.0 | goal: at every ratio
    """,
    answer=(
        "All trees along which frames are added give {different sums along all trees:g} sum. Its error is "
        "{error variance over C δ²/12:.2f} times the one derived; over a channel that adds, coded sums beat amplitudes "
        "from {coded wins from, dB:g} dB on."
    ),
    minutes=0.5,
    quick=("seeds=1", "values=500", "trees=2", "levels=3", "senders=3", "uses=2"),
    notes=(
        "Clients round their updates with a dither of their own to integers modulo M, which has room for the sum of "
        "all. Relays add frames without decoding, along random trees. Whoever knows whose frames are in a sum takes "
        "their dithers off.\n\n"
        "The channel is emulated in this process and is no part of the package: it adds real amplitudes and noise, as "
        "a radio does (Zhang, Tao, Wang, Shao 2023, of which the abstract was read; the scheme is derived)."
    ),
)
