"""What the differential-privacy wrappers of the installed Flower do, measured on the wrappers themselves.

Replies are made by hand and handed to the wrappers' own ``aggregate_train``. Their noise comes from numpy's global
generator, which nobody here may seed: figures that contain it vary a little from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)
from numpy.typing import NDArray

from fedcomp.experiments.audits.rounds import mean, nobody, reply_by_hand
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.logs import quiet
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.privacy.accounting import gaussian_epsilon
from fedcomp.privacy.audit import off_grid

Named = Mapping[str, NDArray[Any]]
Arrays = dict[str, NDArray[Any]]

CLIENTS: Final = 20
WIDE: Final = 100_000
"""Coordinates where a standard deviation is measured: its relative error is 0.2 %."""

# Flower's own defaults, as a user who sets nothing has them.
LR: Final = 0.2
QUANTILE: Final = 0.5


def play(
    strategy: Strategy,
    clients: int,
    model: Named,
    replies: Sequence[Named],
    *,
    examples: Sequence[int] = (),
    metrics: Sequence[float] = (),
) -> tuple[Arrays | None, dict[str, Any]]:
    """Return what a strategy makes of one round's replies: arrays and metrics."""
    # Only nodes to address: nothing is sent to them.
    with quiet(), InProcessGrid(nobody, clients) as grid:
        asked = strategy.configure_train(1, to_record(model), ConfigRecord(), grid)
        answers = []
        # Fewer replies than were asked for is what a round with lost clients looks like.
        for place, (message, reply) in enumerate(zip(asked, replies, strict=False)):
            said: dict[str, Any] = {"num-examples": examples[place] if examples else 1}
            answers.append(reply_by_hand(message, reply, **said, **({"loss": metrics[place]} if metrics else {})))
        # NaN and infinity are among the things that are measured.
        with np.errstate(all="ignore"):
            found, told = strategy.aggregate_train(1, answers)
    return None if found is None else to_arrays(found), {} if told is None else dict(told)


def _fixed(
    clients: int, model: Named, replies: Sequence[Named], *, noise_multiplier: float = 1.0, **said: Any
) -> tuple[Arrays | None, dict[str, Any]]:
    """Play a round of fixed clipping, with a clip norm of 1."""
    wrapper = DifferentialPrivacyServerSideFixedClipping(mean(), noise_multiplier, 1.0, clients)
    return play(wrapper, clients, model, replies, **said)


def spread_norms(count: int = CLIENTS) -> list[float]:
    """Return update norms with median 1, between about 0.6 and 1.6."""
    places = (np.arange(count) + 0.5) / count
    # Quantiles of a logistic distribution of the logarithms (1.702 makes it close to a normal one): median exactly 1,
    # no random draw.
    return [float(n) for n in np.exp(0.25 * np.log(places / (1.0 - places)) / 1.702)]


def clip_norms(start: float, rounds: int) -> list[float]:
    """Return Flower's clip norm after 0, 1, ... rounds on updates whose median norm is 1, without any noise."""
    wrapper = DifferentialPrivacyServerSideAdaptiveClipping(
        mean(), 0.0, CLIENTS, initial_clipping_norm=start, target_clipped_quantile=QUANTILE, clip_norm_lr=LR
    )
    model = {"w": np.zeros(4, np.float32)}
    replies = [{"w": np.array([norm, 0, 0, 0], np.float32)} for norm in spread_norms()]
    out = [start]
    for _ in range(rounds):
        play(wrapper, CLIENTS, model, replies)
        out.append(float(wrapper.clipping_norm))
    return out


def integer_buffers() -> tuple[float, float, str]:
    """Return the share of float and of integer elements that ``LocalDpMod``'s noise moved, and a wrapper's dtype.

    The noise of standard deviation 0.1 is cast to an array's dtype before it is added. On the server Flower's mean has
    made floats of the integers before the wrapper adds noise, and they stay floats.
    """
    model: Arrays = {"w": np.zeros(1000, np.float32), "count": np.full(1000, 7, np.int64)}
    trained: Arrays = model | {"w": np.full(1000, 1e-3, np.float32)}
    noisy = _local(model, trained, noise=0.1)
    moved = {k: float(np.mean(noisy[k] != model[k])) for k in model}
    out, _ = _fixed(10, model, [trained] * 10)
    assert out is not None
    return moved["w"], moved["count"], str(out["count"].dtype)


def raises(replies: Sequence[Named], model: Named) -> str:
    """Return the name of the exception that a round with these replies ends with, empty for none."""
    try:
        _fixed(len(replies), model, replies)
    except (ArithmeticError, TypeError, ValueError) as error:
        return type(error).__name__
    return ""


def zero_update() -> str:
    """Return what a round raises in which one of three clients changed nothing."""
    still = {"w": np.zeros(4, np.float32)}
    return raises([still, {"w": np.ones(4, np.float32)}, {"w": np.ones(4, np.float32)}], still)


def integer_update() -> str:
    """Return what a round raises whose model has an integer buffer."""
    model: Arrays = {"w": np.zeros(4, np.float32), "count": np.array([0], np.int64)}
    trained: Arrays = {"w": np.ones(4, np.float32), "count": np.array([1], np.int64)}
    return raises([trained] * 2, model)


def not_finite(value: float) -> float:
    """Return the share of the aggregate that is NaN when one of three updates holds ``value`` in one coordinate."""
    model = {"w": np.zeros(4, np.float32)}
    bad = np.ones(4, np.float32)
    bad[0] = value
    right = {"w": np.ones(4, np.float32)}
    out, _ = _fixed(3, model, [{"w": bad}, right, right])
    return 0.0 if out is None else float(np.mean(np.isnan(out["w"])))


def missing_replies(sampled: int = 20, replied: int = 5) -> float:
    """Return the noise over what the mean of those who replied needs: 1 is right."""
    model = {"w": np.zeros(WIDE, np.float32)}
    out, _ = _fixed(sampled, model, [_unit()] * replied)
    if out is None:
        return math.nan
    # One of the clients that replied moves their mean by C / replied.
    # Without the first coordinate, in which the update is; the others hold noise alone.
    return float(np.std(out["w"][1:])) * replied


def heavy_client(heavy: int = 1000, light: int = 10, clients: int = 10) -> float:
    """Return how far one client with many examples moves the mean, over the standard deviation of the noise; z is 1."""
    model = {"w": np.zeros(WIDE, np.float32)}
    examples = [heavy] + [light] * (clients - 1)
    # Not exactly zero: an update of norm 0 ends Flower's round (zero_update).
    still = {"w": np.full(WIDE, 1e-12, np.float32)}
    replies = [_unit(), *[still] * (clients - 1)]
    # Once with noise and once without: one gives the deviation, the other how far the client moves the mean.
    out, exact = (_fixed(clients, model, replies, noise_multiplier=z, examples=examples)[0] for z in (1.0, 0.0))
    if out is None or exact is None:
        return math.nan
    return float(exact["w"][0]) / float(np.std(out["w"][1:]))


def adaptive_noise() -> tuple[float, float]:
    """Return the noise over what the clip norm needs under which the updates were clipped, all clipped and none.

    1 is right. The wrapper moves the clip norm on before it draws the noise.
    """
    model = {"w": np.zeros(WIDE, np.float32)}
    ratios = []
    # All updates have norm 1: below the first clip norm none of them is, below the second all are.
    for clip in (0.5, 2.0):
        # So little noise on the count, relative to 4000 clients, that it decides nothing.
        wrapper = DifferentialPrivacyServerSideAdaptiveClipping(
            mean(), 1.0, CLIENTS, initial_clipping_norm=clip, clip_norm_lr=LR, clipped_count_stddev=1.0
        )
        out, _ = play(wrapper, CLIENTS, model, [_unit()] * CLIENTS)
        assert out is not None
        needed = wrapper.noise_multiplier * clip / CLIENTS
        ratios.append(float(np.std(out["w"][1:])) / needed)
    return ratios[0], ratios[1]


def leaked_metric() -> float:
    """Return the share of the clients' mean loss that the wrapper passes on: 0 is none of it, 1 all of it exactly."""
    model = {"w": np.zeros(4, np.float32)}
    _, told = _fixed(2, model, [{"w": np.ones(4, np.float32)}] * 2, metrics=[1.0, 3.0])
    return float(told.get("loss", 0.0)) / 2.0


def last_bits() -> tuple[float, float]:
    """Return the shares of noisy outputs that are not a multiple of 2^-24, where the model is 0 and where it is 1."""
    shares = []
    for value in (0.0, 1.0):
        model = {"w": np.full(WIDE, value, np.float32)}
        # A single coordinate moves, so that nothing but noise is added to the others; sigma is 1.
        reply = {"w": model["w"].copy()}
        reply["w"][0] += 1.0
        out, _ = _fixed(1, model, [reply])
        assert out is not None
        shares.append(off_grid(out["w"][1:], 2.0**-24))
    return shares[0], shares[1]


def local_epsilon(nominal: float, rounds: int = 1, *, delta: float = 1e-5) -> float:
    """Return the true epsilon of ``rounds`` messages of Flower's ``LocalDpMod``, ``sensitivity`` set to the clip norm.

    The noise is measured on a message; any two messages of a client can be 2 C apart.
    """
    sent = _local({"w": np.zeros(WIDE, np.float32)}, _unit(), epsilon=nominal, delta=delta)
    noise = float(np.std(sent["w"][1:]))
    # Sensitivity 2: any two messages of norm 1 may be that far apart; of several messages the squares of mu add.
    return gaussian_epsilon(math.sqrt(rounds) * 2.0 / noise, delta)


def _local(
    model: Named, trained: Named, *, epsilon: float = 1.0, delta: float = 1e-5, noise: float = 0.0
) -> dict[str, NDArray[Any]]:
    """Return what leaves a client behind ``LocalDpMod``; ``noise`` sets the standard deviation through sensitivity."""
    # The mod's own formula for its deviation, solved for the sensitivity that gives this noise.
    sensitivity = noise * epsilon / math.sqrt(2.0 * math.log(1.25 / delta)) if noise else 1.0
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=sensitivity, epsilon=epsilon, delta=delta)

    def app(message: Message, context: Context) -> Message:
        return reply_by_hand(message, trained)

    with quiet(), InProcessGrid(nobody, 1) as grid:
        message = Message(RecordDict({"arrays": to_record(model)}), grid.get_node_ids()[0], "train")
        reply = mod(message, grid.context(0), app)
    return to_arrays(reply.content.array_records["arrays"])


def _unit() -> dict[str, NDArray[np.float32]]:
    moved = np.zeros(WIDE, np.float32)
    moved[0] = 1.0
    return {"w": moved}
