"""Modular sums: residues that relays add on the way, their error, and the bytes that a relay sends."""

from __future__ import annotations

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.modular_sum import study
from fedcomp.rules import Int

EXPERIMENT = Experiment(
    name="modular_sum",
    question="What does it cost to let any relay on the way add updates without decoding them?",
    study=study,
    options={
        "seeds": Option(3, Int(1, 100), "draws per row, with the seeds from --seed on"),
        "workers": 2,
        "values": Option(20_000, Int(16), "values of an update"),
        "levels": Option(10, Int(1), "steps from zero to the clip, in sums without messages"),
        "trees": Option(40, Int(1), "random trees of relays that add the frames"),
        "uses": Option(4, Int(1, 8), "uses of the emulated channel for each value"),
        "senders": Option(8, Int(2), "senders in the emulated channel"),
    },
    claims="""
        | different sums along all trees | <= 1.0 | gate: specification 3.4: exact in any order
        | difference of a decoded sum from the sum of decoded frames | <= 1e-4 | gate: specification 3.4: up to float32
            rounding of a hundred values
        | mean error, standard errors | <= 4.0 | gate: specification 3.4: unbiased
        the contributors' dithers | error variance, off by | <= 0.05 | gate: spec 3.4: 1 times C δ²/12
        dithers of another round | error variance, off by | <= 0.05 | gate: spec 3.4: 3 times C δ²/12
        no dithers | error variance, off by | <= 0.05 | gate: spec 3.4: 2 times C δ²/12
        | bytes of a sum of 100 over those of one frame in it | <= 1.0 | gate: derived: one packed vector is sent for
            any number of frames received
        | coded over uncoded error at 40 dB | <= 0.1 | gate: derived: digits in several uses of the channel, compared
            with repetition
        | coded over separate error at 40 dB | <= 1.0 | gate: abstract: less distortion of the aggregate than
            separate coding
        | coded over uncoded error at 0 dB | <= 1.0 | goal: coding wins at every ratio
    """,
    answer=(
        "The sums along all trees give {different sums along all trees:g} distinct result. The error variance is "
        "{error variance over C δ²/12:.2f} times the derived one. Over a channel that adds, coded sums are better "
        "than amplitudes from {coded wins from, dB:g} dB on."
    ),
    minutes=0.5,
    quick=("seeds=1", "values=500", "trees=2", "levels=3", "senders=3", "uses=2"),
    notes=(
        "Every client rounds its update with its own dither to integers modulo M, which is large enough for the sum "
        "of all. Relays add frames along random trees without decoding. A receiver that knows the contributors of a "
        "sum subtracts their dithers.\n\n"
        "The channel is emulated in this process and is not part of the package. It adds real amplitudes and noise, "
        "as a radio does (Zhang, Tao, Wang, Shao 2023; only the abstract was read, and the scheme is derived)."
    ),
)
