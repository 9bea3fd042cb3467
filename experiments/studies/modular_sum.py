"""Modular sums: their error and the bytes of a relay, and sums over an emulated Gaussian multiple-access channel.

The channel is a simulation. Every use adds the real amplitudes of all senders and normal noise. Each sender has power 1
on average, and the signal-to-noise ratio is that of one sender. There are three ways to send a sum of values in [-1, 1]
with a few uses:

- uncoded: every sender repeats its value as an amplitude, and the receiver averages;
- coded: every sender rounds with a dither to integers, sends their digits, one in each use; the receiver rounds each
  use to the nearest sum of digits, puts the digits together, reduces modulo M and takes the dithers off. Sums of digits
  are digits of the sum, so that what the channel adds is the sum of codewords;
- separate: the senders divide the uses between them, and each sends as many bits as the capacity of its share carries,
  which no code exceeds (Shannon).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import curves, repetitions, table
from fedcomp.experiments.tables import Found, Studied
from fedcomp.rng import Key

if TYPE_CHECKING:
    from fedcomp.codecs import ModularSum
    from fedcomp.layout import Layout, Vector
    from fedcomp.wire import Frame

Doubles = NDArray[np.float64]

EXPECTED: Final[Mapping[str, float]] = {
    "the contributors' dithers": 1.0,
    "dithers of another round": 3.0,
    "no dithers": 2.0,
}
"""Error variance over C δ²/12, by the dithers that the server subtracts (specification, derived)."""

SNRS: Final = tuple(range(0, 45, 5))

BASES: Final = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
"""Bases of the digits to try."""


def study(found: Found) -> Studied:
    """Add frames, also with wrong dithers; emulate a channel."""
    given = {name: int(found.config.settings[name]) for name in ("values", "levels", "trees", "uses", "senders")}
    size, seeds = given["values"], list(repetitions(found.config))
    sums = found.sweep(
        exact, {"clients": [2, 5, 20, 100], "seed": seeds}, size=size, levels=given["levels"], trees=given["trees"]
    )
    axes = {"snr": list(SNRS), "seed": seeds}
    over = found.sweep(errors, axes, "air", senders=given["senders"], uses=given["uses"], count=size)
    groups, by_snr = sums.groups("clients"), over.groups("snr")
    variances = {name: mean([run.variance[name] for run in sums]) for name in EXPECTED}

    def error(way: str, snr: float) -> float:
        return mean(by_snr[snr].each(way))

    def bytes_of(name: str) -> Any:
        return lambda clients: round(mean(groups[clients].each(name)))

    high, low = SNRS[-1], SNRS[0]
    wins = (snr for snr in SNRS if error("coded", snr) < error("uncoded", snr))
    return Studied(
        {
            "different sums along all trees": max(sums.each("sums")),
            "difference of a decoded sum from the sum of decoded frames": max(sums.each("off")),
            "mean error, standard errors": max(abs(run.bias) for run in sums),
            **{(name, "error variance, off by"): abs(variances[name] / EXPECTED[name] - 1.0) for name in EXPECTED},
            "error variance over C δ²/12": next(iter(variances.values())),
            "bytes of a sum of 100 over those of one frame in it": mean([run.sum / run.frame for run in groups[100]]),
            f"coded over uncoded error at {high} dB": error("coded", high) / error("uncoded", high),
            f"coded over separate error at {high} dB": error("coded", high) / error("separate", high),
            f"coded over uncoded error at {low} dB": error("coded", low) / error("uncoded", low),
            "coded wins from, dB": next(wins, float("inf")),
        },
        tables=[
            table(
                "What leaves a relay",
                {
                    "clients below": lambda clients: clients,
                    "a client's frame, bytes": bytes_of("frame"),
                    "their sum, bytes": bytes_of("sum"),
                    "unadded, bytes": bytes_of("plain"),
                },
                groups,
                f"Updates of {size} values in {given['levels']} levels either way. A sum is as long as each of its "
                "frames, for any number of frames. A modulus with room for more summands costs every client log2 of "
                "their number in additional bits.",
            )
        ],
        figures=[
            curves(
                "Error of a sum over a channel that adds",
                [(way, snr) for way in ("uncoded", "coded", "separate") for snr in SNRS],
                lambda point: point[1],
                lambda point: error(*point),
                lambda point: point[0],
                x_label="signal to noise, dB",
                y_label="mean squared error",
                log_y=True,
                caption=f"Simulated: a sum of {given['senders']} values in [-1, 1] over {given['uses']} uses of the "
                "channel. The base of the coded digits is chosen for each ratio on other draws. Separate coding at "
                "capacity is a bound that no separate code can beat.",
            )
        ],
    )


def exact(clients: int, seed: int, *, size: int, levels: int, trees: int) -> dict[str, Any]:
    """Add the frames of some clients along random trees; return errors, bytes, and the number of trees that differ."""
    from fedcomp.codecs import ModularSum, RandomK
    from fedcomp.layout import Layout, Update

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
    right, wrong = (codec.place(total, 1, layout, each, contributors) for each in (key, key.at(round=2)))
    found = dict(zip(EXPECTED, (right, wrong, total * codec.step), strict=True))
    return {
        "sums": len(totals),
        "off": float(np.abs(right - decoded).max()),
        "variance": {name: float(np.square(vector - true).mean()) / unit for name, vector in found.items()},
        "bias": float((right - true).mean() / np.sqrt(unit / size)),
        "frame": len(frames[0]),
        "sum": len(next(iter(totals))),
        "plain": sum(map(len, frames)),
    }


def _along_a_tree(codec: ModularSum, frames: list[Frame], layout: Layout, rng: np.random.Generator) -> Frame:
    """Add frames as relays would: replace some frames by their sum until one is left."""
    left = [frames[i] for i in rng.permutation(len(frames))]
    while len(left) > 1:
        count = int(rng.integers(2, len(left) + 1))
        left = [*left[count:], codec.add(left[:count], layout)]
    return left[0]


def send(amplitudes: Doubles, snr_db: float, rng: np.random.Generator) -> Doubles:
    """Return the output of the channel: the sum of all amplitudes plus normal noise.

    Parameters
    ----------
    amplitudes : float64 array, shape (senders, values)
    snr_db : float
        Power of one sender over that of the noise.
    """
    noise: Doubles = 10.0 ** (-snr_db / 20.0) * rng.normal(size=amplitudes.shape[1])
    return amplitudes.sum(axis=0) + noise


def uncoded(x: Doubles, uses: int, snr_db: float, rng: np.random.Generator) -> float:
    """Return the mean squared error of the sum, sent as amplitudes and averaged over all uses."""
    scale = 1.0 / np.sqrt(np.square(x).mean())
    received = np.mean([send(scale * x, snr_db, rng) for _ in range(uses)], axis=0) / scale
    return float(np.square(received - x.sum(axis=0)).mean())


def coded(x: Doubles, uses: int, base: int, snr_db: float, key: Key) -> float:
    """Return the mean squared error of the sum, sent as digits of dithered integers of ``base ** uses`` levels."""
    rng, senders = key.generator(), len(x)
    levels = base**uses
    step = 2.0 / (levels - 1)
    dither = key.at(purpose="dither").generator().uniform(-0.5, 0.5, size=x.shape)
    # Shifted to start at 0, since digits have no sign. The ends of the interval keep their half step.
    integers = np.clip(np.floor((x + 1.0) / step + dither + 0.5), 0, levels - 1).astype(np.int64)
    modulus = senders * (levels - 1) + 1
    total = np.zeros(x.shape[1], np.int64)
    for use in range(uses):
        digit = integers // base**use % base
        middle = (base - 1) / 2.0
        scale = np.sqrt(12.0 / (base**2 - 1.0))
        arrived = send(scale * (digit - middle), snr_db, rng) / scale + senders * middle
        total += np.clip(np.rint(arrived), 0, senders * (base - 1)).astype(np.int64) * base**use
    found = (total % modulus - dither.sum(axis=0)) * step - senders
    return float(np.square(found - x.sum(axis=0)).mean())


def separate(senders: int, uses: int, snr_db: float) -> float:
    """Return the smallest squared error of the sum if each sender has a share of the uses, at its capacity.

    A sender that is silent in the others' shares has correspondingly more power in its own. For a uniform value of
    variance 1/3, the error of any code of R bits is at least 2^(-2R) times its entropy power, 4 / (2 π e) (Shannon's
    lower bound).
    """
    bits = uses / senders * 0.5 * np.log2(1.0 + senders * 10.0 ** (snr_db / 10.0))
    entropy_power = 4.0 / (2.0 * np.pi * np.e)
    return float(senders * min(1.0 / 3.0, entropy_power * 2.0 ** (-2.0 * bits)))


def errors(snr: float, seed: int, *, senders: int, uses: int, count: int) -> dict[str, float]:
    """Return the errors of the three ways. The base of the digits is chosen on draws other than those of the result."""
    key = Key(seed, "airsum")
    tried, x = (key.at(round=r).generator().uniform(-1.0, 1.0, size=(senders, count)) for r in (1, 2))
    best = min(BASES, key=lambda base: coded(tried, uses, base, snr, key.at(purpose="tuning")))
    return {
        "uncoded": uncoded(x, uses, snr, key.at(purpose="noise").generator()),
        "coded": coded(x, uses, best, snr, key.at(purpose="judged")),
        "separate": separate(senders, uses, snr),
    }
