"""Coded sums: does the server's traffic stay constant when clients are added, and is the decoded sum correct?"""

from __future__ import annotations

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.sumcode import shape, study
from fedcomp.rules import Int

# All clients have equal weight, as with equal amounts of data; other weights would need the field of four bytes.
_SENT = "codec.density=1.0 codec.clip=0.1 codec.levels=127"
_CODED = f"sumcode weighted=false {_SENT}"

EXPERIMENT = Experiment(
    name="sumcode",
    question="Does the server receive the same number of bytes when clients are added, and does it decode the right "
    "sum?",
    task="digits",
    each=lambda config: f"task.partition=iid evaluate_every={max(1, config.rounds)}",
    rows={
        # Up to fifty: with ten times the clients, linear growth cannot be mistaken for a constant.
        **{f"8-bit uploads, {n} clients": f"fixedpoint clients={n} {_SENT}" for n in (5, 10, 20, 50)},
        **{f"coded sum, {n} clients": f"{_CODED} clients={n} {shape(n)}" for n in (5, 10, 20, 50)},
        # Every masked client uploads its own vector, so fifty clients show nothing that twenty do not.
        **{f"LightSecAgg, {n} clients": f"{_CODED} mode=mask clients={n} {shape(n)}" for n in (5, 10, 20)},
        "coded sum through the server, 10 clients": f"{_CODED} transport=hub clients=10 {shape(10)}",
    },
    study=study,
    options={
        "task.hidden": "1024",
        "lr": 0.2,
        "max_steps": 4,
        "exact_rounds": Option(3, Int(1), "rounds to compare with the sum of integers"),
    },
    claims="""
        coded sum | server receives, 50 clients over 5 | <= 1.1 | gate: derived: (K + T)/K vectors for any number of
            clients, 52 bytes for each of the K + T sums and 33 for the tag and report of each client
        # One per cent is for headers, which do not grow with the update.
        8-bit uploads | server receives, 50 clients over 5 | >= 9.9 | gate: derived: one vector per client; without this
            growth the constant of the code would show nothing
        # Two bytes a symbol and K + T = 4/3 K; a tenth more for headers and for the tags of the sums.
        | coded sum over 8-bit uploads: server receives, 50 clients | <= 0.05866666666666667 | gate: derived: two
            bytes a symbol and K + T = 4/3 K, against one byte a coordinate and client
        | coded sum over 8-bit uploads: bytes on the wire, 50 clients | <= 0.15 | gate: measured 0.10: the framing of
            three answers per client grows with the clients, and weighs more for smaller models
        # K is three fifths of N, so that N/K is 5/3; a tenth more for the headers of parcels.
        | vectors that one client sends to others | <= 1.8333333333333333 | gate: derived: N/K shards; this is the cost
            of the code
        LightSecAgg | server receives, 20 clients over 5 | >= 2.5 | gate: derived: every client uploads its own masked
            vector, in addition to the 4/3 for the sum of the masks
        | sum through the server: it receives, over that with links between clients | >= 5.0 | gate: derived: all N (N -
            1) shards cross the server's link; without links between clients the code saves nothing
        | exact rounds, mode share & exact rounds, mode mask | == 1.0 | gate: a sum in the field is the exact sum of
            integers, or decoding fails
        | clients missing | == 0.0 | gate: every update is in the sum
        | difference of accuracy | <= 0.03 | gate: the same integers are added as with 8-bit uploads; weights differ by
            one example, so roundings differ after the first round
    """,
    answer=(
        "With 50 clients instead of 5 the server receives {coded sum | server receives, 50 clients over 5:.2f} times "
        "the bytes of coded sums, {8-bit uploads | server receives, 50 clients over 5:.1f} times those of 8-bit "
        "uploads; {exact rounds:.0%} of the sums are exact."
    ),
    rounds=4,
    clients=5,
    minutes=1.0,
    quick=("rounds=1", "task.hidden=32", "max_steps=1", "exact_rounds=1"),
    notes=(
        "The number of clients is part of each row; the option --clients changes nothing here. K is three fifths of "
        "the clients and T one fifth, so one fifth of them may be lost. All rows send the same integers, one for "
        "every coordinate, with error feedback. Coded sums are over GF(65521) with equal weights.\n\n"
        "The bytes that the server receives stay constant. The bytes that it sends do not, because every client still "
        "gets the whole model.\n\n"
        "The cost is traffic between clients: each sends N/K vectors of two bytes per coordinate to the others."
    ),
)
