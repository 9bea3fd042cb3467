"""Synthetic data from documented formulas, used where a data set's files are missing. The same arrays in every
process."""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from fedcomp.rng import Key

ALPHABET = "\n .abcdefghijklmnopqrstuvwxyz"


def speakers(count: int = 20, longest: int = 9000) -> dict[str, str]:
    """Return text of ``count`` speakers, each a first-order Markov chain over 29 characters.

    Every character has five likely successors, weighted 16 : 8 : 4 : 2 : 1, three shared by all speakers and
    two of the speaker's own, plus a uniform background of 3 %. The speakers are therefore alike but not
    identically distributed. Speaker i has ``longest / (1 + i / 4)`` characters. The text means nothing.

    Returns
    -------
    dict of str to str
        ``{"SPEAKER 00": text, ...}``.
    """
    size = len(ALPHABET)
    weights = np.array([16.0, 8.0, 4.0, 2.0, 1.0])
    shared = _successors(Key(0, "synthetic/shared"), size)
    out = {}
    for speaker in range(count):
        key = Key(0, "synthetic/speaker", partition=speaker)
        own = _successors(key, size)
        chain = np.full((size, size), 0.03 / size)
        for char in range(size):
            # The speaker's own successors take the second and the fourth place.
            order = [shared[char, 0], own[char, 0], shared[char, 1], own[char, 1], shared[char, 2]]
            # A speaker's own successor may be a shared one, too: add.at adds both weights, indexing would keep one.
            np.add.at(chain[char], order, 0.97 * weights / weights.sum())
        edges = [list(accumulate(row)) for row in chain.tolist()]
        length = int(longest / (1 + speaker / 4))
        out[f"SPEAKER {speaker:02d}"] = _walk(edges, key.at(purpose="synthetic/walk").uniform(length))
    return out


def _successors(key: Key, size: int) -> NDArray[np.int64]:
    """Return a random ranking of the ``size`` characters for each character, shape ``(size, size)``."""
    return np.argsort(key.bits(size * size).reshape(size, size), axis=1, kind="stable")


def _walk(edges: list[list[float]], uniforms: NDArray[np.float64]) -> str:
    from bisect import bisect_right

    state, out = 0, []
    last = len(edges) - 1
    for u in uniforms.tolist():
        # Rounded, a row's running sum may end just below 1.
        state = min(bisect_right(edges[state], u), last)
        out.append(ALPHABET[state])
    return "".join(out)


def path_loss(rows: int = 2000) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return signal strengths of seven access points as a phone in one of four rooms sees them, and the room.

    The log-distance model with log-normal shadowing (Rappaport, Wireless Communications, section 4.9
    [recalled]):

        P(d) = P0 - 10 n log10(d / 1 m) - w L + X,   X ~ N(0, s^2)

    in dBm, with P0 = -40 dBm at one metre, exponent n = 2.7, w = 1 if room and access point are in different
    rooms with wall loss L = 5 dB, and s = 4 dB. The floor is 20 m x 20 m, the rooms its quarters; four access
    points stand in room centres, three on the walls between. Values are rounded to whole dBm, as phones
    report them.

    Returns
    -------
    x : ndarray of float64, shape (rows, 7)
        Signal strengths in dBm.
    y : ndarray of int64, shape (rows,)
        Room 0..3, equally many rows each.
    """
    points = np.array([[5, 5], [15, 5], [5, 15], [15, 15], [10, 4], [4, 10], [14, 11]], float)
    key = Key(0, "synthetic/path-loss")
    room = np.arange(rows, dtype=np.int64) % 4
    corner = np.stack([room % 2, room // 2], axis=1) * 10.0
    place = corner + 10.0 * key.at(layer=1).uniform(2 * rows).reshape(rows, 2)
    # The formula's reference is one metre; without a floor a phone at the access point would have no finite strength.
    distance = np.maximum(np.linalg.norm(place[:, None] - points[None], axis=2), 1.0)
    point_room = (points[:, 0] >= 10).astype(int) + 2 * (points[:, 1] >= 10)
    walls = room[:, None] != point_room[None]
    u = key.at(layer=2).uniform(2 * distance.size).reshape(2, *distance.shape)
    normal = np.sqrt(-2.0 * np.log(1.0 - u[0])) * np.cos(2.0 * math.pi * u[1])
    # 27 is 10 n, for the exponent n = 2.7.
    return np.round(-40.0 - 27.0 * np.log10(distance) - 5.0 * walls + 4.0 * normal), room
