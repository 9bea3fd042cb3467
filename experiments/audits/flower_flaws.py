"""Measurements of the differential-privacy wrappers in the installed Flower.

Synthetic replies go into the wrappers' own ``aggregate_train``. The noise comes from numpy's global generator, which
this project must not seed, so figures that contain noise vary slightly between runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import flwr
import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping as Adaptive
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as Fixed
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp.experiments.audits.cases import spread_norms, tracked
from fedcomp.experiments.audits.subjects import DELTA, mean, nobody, reply_by_hand
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.logs import quiet
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.privacy.accounting import gaussian_epsilon
from fedcomp.privacy.audit import off_grid
from fedcomp.strategies.private.dp_fedavg import DpFedAvg

Arrays = Mapping[str, NDArray[Any]]

CLIENTS: Final = 20
WIDE: Final = 100_000
"""Number of coordinates in the measurement of a standard deviation; its relative error is 0.2 %."""

STARTS: Final = (0.1, 0.9, 1.2, 5.0)
"""Initial clip norms for clients whose updates have a median norm of 1: below, near and far above the right one. A
correct rule reaches it from each of them."""

SMALL: Final[Arrays] = {"w": np.zeros(4, np.float32)}
ONES: Final[Arrays] = {"w": np.ones(4, np.float32)}
LARGE: Final[Arrays] = {"w": np.zeros(WIDE, np.float32)}
UNIT: Final[Arrays] = {"w": np.eye(1, WIDE, dtype=np.float32)[0]}
"""An update of norm 1 in the first coordinate; the other coordinates get only noise."""


def play(
    strategy: Strategy, clients: int, model: Arrays, replies: Sequence[Arrays], metrics: Sequence[dict[str, Any]] = ()
) -> tuple[Any, dict[str, Any]]:
    """Return the result of a strategy for one round's replies: arrays, or None if there are none, and metrics."""
    # Nodes are only addressed; nothing is sent to them.
    with quiet(), InProcessGrid(nobody, clients) as grid:
        asked = strategy.configure_train(1, to_record(model), ConfigRecord(), grid)
        # A round with lost clients has fewer replies than requests.
        answers = [
            reply_by_hand(message, reply, **{"num-examples": 1, **(metrics[place] if metrics else {})})
            for place, (message, reply) in enumerate(zip(asked, replies, strict=False))
        ]
        # NaN and infinity are part of the measurement.
        with np.errstate(all="ignore"):
            found, told = strategy.aggregate_train(1, answers)
    return None if found is None else to_arrays(found), dict(told or {})


def fixed(model: Arrays, replies: Sequence[Arrays], *, clients: int = 0, z: float = 1.0, **said: Any) -> Any:
    """Run a round of fixed clipping with a clip norm of 1. All clients reply unless more are asked."""
    asked = clients or len(replies)
    return play(Fixed(mean(), z, 1.0, asked), asked, model, replies, **said)


def raises(replies: Sequence[Arrays], model: Arrays = SMALL) -> str:
    """Return the name of the exception that ends a round with these replies; empty if there is none."""
    try:
        fixed(model, replies)
    except (ArithmeticError, TypeError, ValueError) as error:
        return type(error).__name__
    return ""


def clip_norms(start: float, rounds: int) -> list[float]:
    """Return Flower's clip norm after 0, 1, ... rounds on updates whose median norm is 1, without any noise.

    The quantile and the rate are Flower's defaults.
    """
    wrapper, out = Adaptive(mean(), 0.0, CLIENTS, initial_clipping_norm=start), [start]
    replies = [{"w": np.array([norm, 0, 0, 0], np.float32)} for norm in spread_norms(CLIENTS)]
    for _ in range(rounds):
        play(wrapper, CLIENTS, SMALL, replies)
        out.append(float(wrapper.clipping_norm))
    return out


def _not_finite(value: float) -> float:
    """Return the fraction of the aggregate that is NaN when one of three updates has ``value`` in one coordinate."""
    out, _ = fixed(SMALL, [{"w": np.array([value, 1, 1, 1], np.float32)}, ONES, ONES])
    return 0.0 if out is None else float(np.mean(np.isnan(out["w"])))


def _missing_replies() -> float:
    """Return the noise over the noise that the mean of 5 of 20 clients needs; 1 is right."""
    out, _ = fixed(LARGE, [UNIT] * 5, clients=20)
    # One of the clients that replied moves their mean by C / 5.
    return float(np.std(out["w"][1:])) * 5


def _heavy_client() -> float:
    """Return the distance by which one client with 1000 of 1090 examples moves the mean, over the noise; z is 1."""
    said = [{"num-examples": count} for count in (1000, *[10] * 9)]
    # Not exactly zero: an update of norm 0 ends Flower's round.
    replies = [UNIT, *[{"w": np.full(WIDE, 1e-12, np.float32)}] * 9]
    # Once with noise for the deviation, and once without for the distance by which the client moves the mean.
    out, exact = (fixed(LARGE, replies, z=z, metrics=said)[0]["w"] for z in (1.0, 0.0))
    return float(exact[0]) / float(np.std(out[1:]))


def _adaptive_noise(clip: float) -> float:
    """Return the noise over the noise that the clip norm of this round requires, for updates of norm 1; 1 is right.

    The wrapper updates the clip norm before it draws the noise.
    """
    # The noise on the count is negligible relative to 4000 clients.
    wrapper = Adaptive(mean(), 1.0, CLIENTS, initial_clipping_norm=clip, clipped_count_stddev=1.0)
    out, _ = play(wrapper, CLIENTS, LARGE, [UNIT] * CLIENTS)
    return float(np.std(out["w"][1:])) / (wrapper.noise_multiplier * clip / CLIENTS)


def _last_bits(value: float) -> float:
    """Return the fraction of noisy outputs that are not a multiple of 2^-24 if the model is ``value``."""
    # A single coordinate moves, so the others get only noise; sigma is 1.
    model = {"w": np.full(WIDE, value, np.float32)}
    out, _ = fixed(model, [{"w": model["w"] + UNIT["w"]}])
    return off_grid(out["w"][1:], 2.0**-24)


def _local_epsilon(nominal: float, messages: int) -> float:
    """Return the true epsilon of a number of messages of Flower's ``LocalDpMod`` with ``sensitivity`` set to the clip
    norm.

    The noise is measured on a message; any two messages of a client can be 2 C apart.
    """
    noise = float(np.std(_local(LARGE, UNIT, epsilon=nominal)["w"][1:]))
    # For several messages the squares of mu add up.
    return gaussian_epsilon(math.sqrt(messages) * 2.0 / noise, DELTA)


def _local(model: Arrays, trained: Arrays, *, epsilon: float = 1.0, sensitivity: float = 1.0) -> Arrays:
    """Return the output of a client with ``LocalDpMod``."""
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=sensitivity, epsilon=epsilon, delta=DELTA)
    with quiet(), InProcessGrid(nobody, 1) as grid:
        message = Message(RecordDict({"arrays": to_record(model)}), grid.get_node_ids()[0], "train")
        reply = mod(message, grid.context(0), lambda message, context: reply_by_hand(message, trained))
    return to_arrays(reply.content.array_records["arrays"])


def findings(rounds: int) -> dict[str, Any]:
    """Return the measurements of the wrappers as plain data, with clip norms over a number of rounds."""
    counted: Arrays = {"w": np.zeros(1000, np.float32), "count": np.full(1000, 7, np.int64)}
    trained: Arrays = {**counted, "w": np.full(1000, 1e-3, np.float32)}
    # The mod's own formula for its deviation, solved for the sensitivity that gives noise of 0.1. Noise is cast to an
    # array's dtype before it is added.
    noisy = _local(counted, trained, sensitivity=0.1 / math.sqrt(2.0 * math.log(1.25 / DELTA)))
    buffer: Arrays = {**SMALL, "count": np.array([0], np.int64)}
    return {
        "version": flwr.__version__,
        "clips": {f"{start:g}": clip_norms(start, rounds) for start in STARTS},
        # From the same initial clip norms as Flower's.
        "ours": {f"{start:g}": tracked(DpFedAvg, start=start, count=rounds) for start in STARTS},
        # One of three clients changed nothing; then an integer buffer that changed.
        "zero": raises([SMALL, ONES, ONES]),
        "integer": raises([{**ONES, "count": np.array([1], np.int64)}] * 2, buffer),
        "nan": _not_finite(math.nan),
        "inf": _not_finite(math.inf),
        "moved": [float(np.mean(noisy[name] != counted[name])) for name in counted],
        # Flower's mean converts the integers to floats before the wrapper adds noise, and they stay floats.
        "dtype": str(fixed(counted, [trained] * 10)[0]["count"].dtype),
        "missing": _missing_replies(),
        "heavy": _heavy_client(),
        # All updates have norm 1: above the first clip norm, below the second.
        "adaptive": [_adaptive_noise(clip) for clip in (0.5, 2.0)],
        # The fraction of the clients' mean loss, 2, that is passed on.
        "metric": float(fixed(SMALL, [ONES] * 2, metrics=[{"loss": 1.0}, {"loss": 3.0}])[1].get("loss", 0.0)) / 2.0,
        "bits": [_last_bits(value) for value in (0.0, 1.0)],
        "local": {f"{e:g}/{t}": _local_epsilon(e, t) for e in (1.0, 10.0) for t in (1, 10)},
    }
