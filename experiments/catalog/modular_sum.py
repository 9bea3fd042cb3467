"""Sums that wrap: residues that anybody adds on the way, their error, and what leaves a relay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.experiments.experiment import Experiment, no_rows
from fedcomp.experiments.findings import Findings, Say, mean
from fedcomp.experiments.kit import Sweep, claim, curves, repetitions, table
from fedcomp.experiments.options import Config, Option
from fedcomp.experiments.spec import RunResult
from fedcomp.rules import Int

if TYPE_CHECKING:
    from fedcomp.codecs import ModularSum
    from fedcomp.layout import Layout, Vector
    from fedcomp.wire import Frame

RIGHT: Final = "the contributors' dithers"
WRONG: Final = "dithers of another round"
NONE: Final = "no dithers"
EXPECTED: Final[Mapping[str, float]] = {RIGHT: 1.0, WRONG: 3.0, NONE: 2.0}
"""Error variance over C δ²/12 by what the server takes off (spec, derived)."""

SNRS: Final = tuple(range(0, 45, 5))

OPTIONS = {
    "seeds": Option(3, Int(1, 100), "draws per row, with the seeds from --seed on"),
    "workers": 2,
    "values": Option(20_000, Int(16), "values of an update"),
    "levels": Option(10, Int(1), "steps from zero to the clip, in sums without messages"),
    "trees": Option(40, Int(1), "random trees of relays by which the frames are added"),
    "uses": Option(4, Int(1, 8), "uses of the emulated channel for each value"),
    "senders": Option(8, Int(2), "senders in the emulated channel"),
}


def exact(clients: int, seed: int, *, size: int, levels: int, trees: int) -> dict[str, Any]:
    """Add the frames of some clients along random trees; return errors, bytes, and how many trees differ."""
    from fedcomp.codecs import ModularSum, RandomK
    from fedcomp.layout import Layout, Update
    from fedcomp.rng import Key

    codec, layout = ModularSum(RandomK(1.0), clip=1.0, levels=levels, summands=clients), Layout.flat(size)
    key, rng = Key(seed, "uplink", 1), Key(seed, "modular-sum").generator()
    updates: list[Vector] = [rng.uniform(-1.0, 1.0, size).astype(np.float32) for _ in range(clients)]
    frames = [codec.encode(Update(u, layout), {}, key.at(partition=c))[0] for c, u in enumerate(updates)]
    totals = {_along_a_tree(codec, frames, layout, rng) for _ in range(trees)}
    decoded = sum(codec.decode(frame, layout).astype(np.float64) for frame in frames)
    total = codec.total(next(iter(totals)), layout)
    contributors = dict.fromkeys(range(clients), 1)
    true = np.sum(updates, axis=0, dtype=np.float64)
    unit = clients * codec.step**2 / 12
    found = {
        RIGHT: codec.place(total, 1, layout, key, contributors),
        WRONG: codec.place(total, 1, layout, key.at(round=2), contributors),
        NONE: total * codec.step,
    }
    return {
        "sums": len(totals),
        "off": float(np.abs(found[RIGHT] - decoded).max()),
        "variance": {name: float(np.square(vector - true).mean()) / unit for name, vector in found.items()},
        "bias": float((found[RIGHT] - true).mean() / np.sqrt(unit / size)),
        "frame": len(frames[0]),
        "sum": len(next(iter(totals))),
        "packed": -(-codec.grid.bits * size // 8),
        "plain": sum(map(len, frames)),
    }


def _along_a_tree(codec: ModularSum, frames: list[Frame], layout: Layout, rng: np.random.Generator) -> Frame:
    """Add frames as relays would: some that are there are taken, their sum is put back, until one is left."""
    left = [frames[i] for i in rng.permutation(len(frames))]
    while len(left) > 1:
        count = int(rng.integers(2, len(left) + 1))
        left = [*left[count:], codec.add(left[:count], layout)]
    return left[0]


def air(snr: float, fading: bool, seed: int, *, senders: int, uses: int, size: int) -> dict[str, Any]:
    """Send sums over the emulated channel."""
    from fedcomp.experiments.airsum import errors

    return errors(snr, fading, seed, senders=senders, uses=uses, count=size)


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Add frames, also with wrong dithers; emulate a channel."""
    given = {name: int(config.settings[name]) for name in ("values", "levels", "trees", "uses", "senders", "workers")}
    size, seeds = given["values"], repetitions(config)
    sums = Sweep(
        exact,
        {"clients": [2, 5, 20, 100], "seed": list(seeds)},
        shared={"size": size, "levels": given["levels"], "trees": given["trees"]},
    )(say, given["workers"])
    shared = {"senders": given["senders"], "uses": given["uses"], "size": size}
    over = Sweep(air, {"snr": list(SNRS), "fading": [False, True], "seed": list(seeds)}, "air", shared)(
        say, given["workers"]
    )
    groups = sums.groups("clients")
    by_snr = over.groups("snr", "fading")

    def variance(name: str) -> float:
        return mean([run.variance[name] for run in sums])

    def error(way: str, snr: float, fading: bool = False) -> float:
        return mean(by_snr[snr, fading].each(way))

    worst = max(abs(run.bias) for run in sums)
    high, low = SNRS[-1], SNRS[0]
    lines = [
        {"way": way + (", fading" if fading else ""), "snr": snr, "error": error(way, snr, fading)}
        for fading in (False, True)
        for way in ("uncoded", "coded", "separate")
        if not (fading and way == "separate")
        for snr in SNRS
    ]
    crossing = next((snr for snr in SNRS if error("coded", snr) < error("uncoded", snr)), float("inf"))
    return Findings(
        tables=[
            table(
                "What leaves a relay",
                {
                    "clients below": lambda clients: clients,
                    "a client's frame, bytes": lambda clients: round(mean(groups[clients].each("frame"))),
                    "their sum, bytes": lambda clients: round(mean(groups[clients].each("sum"))),
                    "⌈log2 M⌉ bits each": lambda clients: round(mean(groups[clients].each("packed"))),
                    "unadded, bytes": lambda clients: round(mean(groups[clients].each("plain"))),
                    "times fewer": lambda clients: round(
                        mean(groups[clients].each("plain")) / mean(groups[clients].each("sum")), 1
                    ),
                },
                groups,
                f"Updates of {size} values in {given['levels']} levels either way. A sum is as long as each of the "
                "frames in it, whatever their number; a modulus with room for more summands takes log2 of their number "
                "more bits of everybody.",
            ),
            table(
                "The error of a decoded sum",
                {
                    "the server takes off": lambda name: name,
                    "variance over C δ²/12": lambda name: round(variance(name), 3),
                    "expected": lambda name: EXPECTED[name],
                },
                EXPECTED,
                "Means over numbers of clients and seeds.",
            ),
            table(
                "A channel that adds",
                {
                    "signal to noise, dB": lambda snr: snr,
                    "uncoded": lambda snr: float(f"{error('uncoded', snr):.2g}"),
                    "coded": lambda snr: float(f"{error('coded', snr):.2g}"),
                    "values of a digit": lambda snr: by_snr[snr, False][0].base,
                    "separate, at capacity": lambda snr: float(f"{error('separate', snr):.2g}"),
                    "uncoded, fading": lambda snr: float(f"{error('uncoded', snr, True):.2g}"),
                    "coded, fading": lambda snr: float(f"{error('coded', snr, True):.2g}"),
                },
                SNRS,
                f"Simulated. Mean squared error of a sum of {given['senders']} values in [-1, 1] over {given['uses']} "
                "uses of the channel. The base of the coded digits is chosen for each ratio on other draws. Separate "
                "coding is the bound that no code can beat; under fading senders invert their gain up to 3.",
            ),
        ],
        figures=[
            curves(
                "Error of a sum over a channel that adds",
                lines,
                "snr",
                "error",
                "way",
                x_label="signal to noise, dB",
                y_label="mean squared error",
                log_y=True,
            ),
        ],
        claims=[
            claim("different sums along all trees", max(sums.each("sums")), "<= 1.0", "spec 3.4: exact, any order"),
            claim(
                "largest difference of a decoded sum from the sum of decoded frames",
                max(run.off for run in sums),
                "<= 1e-4",
                "spec 3.4: up to float32's rounding of a hundred values",
            ),
            claim("mean error, standard errors", worst, "<= 4.0", "spec 3.4: unbiased"),
            *(
                claim(
                    f"error variance over C δ²/12, off by: {name}",
                    abs(variance(name) / expected - 1.0),
                    "<= 0.05",
                    f"spec 3.4: {expected:g} times",
                )
                for name, expected in EXPECTED.items()
            ),
            claim(
                "bytes of a sum of 100 over those of one frame in it",
                mean([run.sum / run.frame for run in groups[100]]),
                "<= 1.0",
                "derived: one packed vector leaves, whatever came",
            ),
            claim(
                f"coded over uncoded error at {high} dB",
                error("coded", high) / error("uncoded", high),
                "<= 0.1",
                "derived: digits in several uses against repetition",
            ),
            claim(
                f"coded over separate error at {high} dB",
                error("coded", high) / error("separate", high),
                "<= 1.0",
                "abstract: less distortion of the aggregate than separate coding",
            ),
            claim(
                f"coded over uncoded error at {low} dB",
                error("coded", low) / error("uncoded", low),
                "<= 1.0",
                "goal: at every ratio",
                gate=False,
            ),
        ],
        answer=f"All trees along which frames are added give {max(sums.each('sums')):g} sum. Its error is "
        f"{variance(RIGHT):.2f} times the one derived; over a channel that adds, coded sums beat amplitudes from "
        f"{crossing:g} dB on.",
    )


EXPERIMENT = Experiment(
    name="modular_sum",
    question="What does it take to let anybody on the way add updates without decoding them?",
    rows=no_rows,
    measure=measure,
    options=OPTIONS,
    rounds=0,
    clients=1,
    minutes=0.5,
    quick=(
        "seeds=1",
        "values=500",
        "trees=2",
        "levels=3",
        "senders=3",
        "uses=2",
    ),
    notes=(
        "Clients round their updates with a dither of their own to integers modulo M, which has room for the sum of "
        "all. Relays add frames without decoding, along random trees. Whoever knows whose frames are in a sum takes "
        "their dithers off.\n\n"
        "The channel is emulated in this process and is no part of the package: it adds real amplitudes and noise, as "
        "a radio does (Zhang, Tao, Wang, Shao 2023, of which the abstract was read; the scheme is derived)."
    ),
)
