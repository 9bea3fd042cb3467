"""A part of the experiment ``modular_sum``: sums over an emulated Gaussian multiple-access channel; a simulation.

Every use of the channel adds the real amplitudes of all senders and normal noise. Each sender has power 1 on average,
and the signal-to-noise ratio is that of one sender. Three ways to bring a sum of values in [-1, 1] over a few uses:

- uncoded: every sender repeats its value as an amplitude, and the receiver averages;
- coded: every sender rounds with a dither to integers, sends their digits, one in each use; the receiver rounds each
  use to the nearest sum of digits, puts the digits together, reduces modulo M and takes the dithers off. Sums of digits
  are digits of the sum, so that what the channel adds is the sum of codewords;
- separate: the senders divide the uses between them, and each sends as many bits as the capacity of its share carries,
  which no code exceeds (Shannon).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.rng import Key

BASES: Final = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
"""Values of a digit that are tried."""


@dataclass(frozen=True)
class GaussianMAC:
    """A channel that adds what all senders send, and normal noise.

    Parameters
    ----------
    snr_db : float
        Power of one sender over that of the noise.
    fading : bool
        Multiply every sender's amplitude by a gain of its own that is Rayleigh distributed, of mean square 1; senders
        that know it divide by it, cut at 3, as in channel inversion.
    """

    snr_db: float
    fading: bool = False

    @property
    def noise(self) -> float:
        """Standard deviation of the noise."""
        return float(10.0 ** (-self.snr_db / 20.0))

    def send(self, amplitudes: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
        """Return what arrives.

        Parameters
        ----------
        amplitudes : float64 array, shape (senders, values)
        """
        gain = np.ones((len(amplitudes), 1))
        if self.fading:
            drawn = rng.rayleigh(np.sqrt(0.5), size=(len(amplitudes), 1))
            gain = drawn * np.minimum(1.0 / np.maximum(drawn, 1e-9), 3.0)
        out: NDArray[np.float64] = (gain * amplitudes).sum(axis=0) + self.noise * rng.normal(size=amplitudes.shape[1])
        return out


def values(senders: int, count: int, key: Key) -> NDArray[np.float64]:
    """Return what the senders have, uniform on [-1, 1], shape (senders, count)."""
    return key.generator().uniform(-1.0, 1.0, size=(senders, count))


def uncoded(x: NDArray[np.float64], uses: int, channel: GaussianMAC, rng: np.random.Generator) -> float:
    """Return the mean squared error of the sum, sent as amplitudes and averaged over all uses."""
    scale = 1.0 / np.sqrt(np.square(x).mean())
    received = np.mean([channel.send(scale * x, rng) for _ in range(uses)], axis=0) / scale
    return float(np.square(received - x.sum(axis=0)).mean())


def coded(x: NDArray[np.float64], uses: int, base: int, channel: GaussianMAC, key: Key) -> float:
    """Return the mean squared error of the sum, sent as digits of dithered integers of ``base ** uses`` levels."""
    rng, senders = key.generator(), len(x)
    levels = base**uses
    step = 2.0 / (levels - 1)
    dither = key.at(purpose="dither").generator().uniform(-0.5, 0.5, size=x.shape)
    # From 0: digits have no sign. The ends of the interval keep their half step.
    integers = np.clip(np.floor((x + 1.0) / step + dither + 0.5), 0, levels - 1).astype(np.int64)
    modulus = senders * (levels - 1) + 1
    total = np.zeros(x.shape[1], np.int64)
    for use in range(uses):
        digit = integers // base**use % base
        middle = (base - 1) / 2.0
        scale = np.sqrt(12.0 / (base**2 - 1.0))
        arrived = channel.send(scale * (digit - middle), rng) / scale + senders * middle
        total += np.clip(np.rint(arrived), 0, senders * (base - 1)).astype(np.int64) * base**use
    found = (total % modulus - dither.sum(axis=0)) * step - senders
    return float(np.square(found - x.sum(axis=0)).mean())


def separate(senders: int, uses: int, channel: GaussianMAC) -> float:
    """Return the least squared error of the sum where each sender has a share of the uses, at its capacity.

    A sender that is silent in the others' shares has as many times the power in its own. Of a uniform value of
    variance 1/3 no code of R bits leaves less than 2^(-2R) times the power of its entropy, 4 / (2 π e) (Shannon's
    lower bound).
    """
    bits = uses / senders * 0.5 * np.log2(1.0 + senders * 10.0 ** (channel.snr_db / 10.0))
    entropy_power = 4.0 / (2.0 * np.pi * np.e)
    return float(senders * min(1.0 / 3.0, entropy_power * 2.0 ** (-2.0 * bits)))


def errors(snr_db: float, fading: bool, seed: int, *, senders: int, uses: int, count: int) -> dict[str, Any]:
    """Return the errors of the three ways; the digits' base is chosen on other draws than it is judged by."""
    channel, key = GaussianMAC(snr_db, fading), Key(seed, "airsum")
    tried = values(senders, count, key.at(round=1))
    best = min(BASES, key=lambda base: coded(tried, uses, base, channel, key.at(purpose="tuning")))
    x = values(senders, count, key.at(round=2))
    return {
        "uncoded": uncoded(x, uses, channel, key.at(purpose="noise").generator()),
        "coded": coded(x, uses, best, channel, key.at(purpose="judged")),
        "separate": separate(senders, uses, channel) if not fading else None,
        "base": best,
    }
