"""LGC: what an autoencoder of gradients loses beside codings in the same bytes, and trainings with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fedcomp.codecs import LGC, ErrorFeedback, Identity, ScaleCom, TopK
from fedcomp.codecs.autoencoder import ConvDecoder, ConvEncoder
from fedcomp.codecs.forms import FORMS
from fedcomp.codecs.scalecom import Supports
from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean, spread
from fedcomp.experiments.kit import Records, Sweep, repetitions, table
from fedcomp.experiments.options import numbers
from fedcomp.experiments.tables import TUNING_SEED, Found
from fedcomp.kernels import select_topk
from fedcomp.layout import EndsDense, Layout, Update, Vector
from fedcomp.local import Local
from fedcomp.program import Answer, Now, Step, System
from fedcomp.rng import Key
from fedcomp.systems.autoencoder import AutoencoderTraining, Halves, drawn, half_of
from fedcomp.systems.lgc import LearnedGradients
from fedcomp.systems.pair import Pair
from fedcomp.systems.shared_support import SharedSupport
from fedcomp.wire import Frame

LAYER: Final = "conv3"
VALUES: Final = 1024
"""Values of the layer, of 18 432, that are coded where codings are compared."""

HELD_OUT: Final = 100
"""Steps after the trained ones on which codings are compared."""

DENSITY: Final = 0.05
INNOVATION: Final = 0.002

WEIGHTS: Final = 692_172
"""Bytes of an encoder's weights."""


@dataclass(frozen=True, repr=False, eq=False)
class OneForAll(SharedSupport, id="one-for-all"):
    """The strongest simple rival of one node that speaks for all: its own values on its own support, and nothing else.

    All other clients clear what they have there, as with ``ef="mask"``, and of what they send the dense rest alone
    counts: what a round spares is in its state, ``spared``.
    """

    def stepped(self, now: Now, supports: Supports, support: Frame, given: Sequence[Answer]) -> Step:
        """Take the leader's values for everybody's; what no codec compresses is averaged."""
        fixed, mean = self.codec.on(supports, now.number), self.codec.mean(supports, now.number)
        end, weight, spared = now.layout.compressed_size, sum(answer.weight for answer in given), 0
        out = np.zeros(now.layout.size, np.float32)
        for answer in given:
            found = fixed.decode(answer.frames["values"], now.layout)
            out[end:] += np.float32(answer.weight / weight) * found[end:]
            if answer.node == now.told["leader"]:
                out[:end] = found[:end]
            else:
                spared += len(answer.frames["values"]) - len(fixed.frame_of([], found[end:]))
        now.state["spared"] = spared
        frame, _ = mean.encode(Update(out, now.layout), {}, Key(0))
        return Step(tuple(answer.node for answer in given), frame=frame, blobs={"support": support}, codec=mean)


Sender = Callable[[int], System]
"""What a row sends in a training of so many steps."""


def _learned(**options: Any) -> Sender:
    def made(steps: int) -> System:
        codec = LGC(**{"density": DENSITY, "innovation": INNOVATION, **options})
        # A twentieth dense, and then as many rounds of training as of latents.
        return LearnedGradients(codec, steps // 20, steps // 2 - steps // 20)

    return made


def _led(values: str) -> Sender:
    return lambda steps: SharedSupport(ScaleCom(DENSITY, values=values))


DENSE: Final = "dense"
RING: Final = "LGC, ring"
EXACT: Final = "LGC, ring, decoded memory"
SHORT: Final = "LGC, ring, decoded memory, latents in 8 bits"
SERVER: Final = "LGC, server"
SERVER_EXACT: Final = "LGC, server, decoded memory"
FULL: Final = "shared support, float32 (ScaleCom)"
EIGHT: Final = "shared support, 8 bits"
FOUR: Final = "shared support, 4 bits"
TWO: Final = "shared support, 2 bits"
ALONE: Final = "the common node's top-k only, 8 bits"

ROWS: Final[Mapping[str, Sender]] = {
    DENSE: lambda steps: Pair(Identity()),
    RING: _learned(),
    EXACT: _learned(ef="decoded"),
    SHORT: _learned(ef="decoded", values="q8"),
    SERVER: _learned(instance="server"),
    SERVER_EXACT: _learned(instance="server", ef="decoded"),
    FULL: _led("float32"),
    EIGHT: _led("q8"),
    FOUR: _led("q4"),
    TWO: _led("q2"),
    ALONE: lambda steps: OneForAll(ScaleCom(DENSITY, values="q8")),
    "top-k of its own, 8 bits, + EF": lambda steps: Pair(ErrorFeedback(TopK(DENSITY, scope="layer", values="q8"))),
}
"""What the workers send, by label, in order."""

OURS: Final = (RING, EXACT, SHORT, SERVER, SERVER_EXACT)
RIVALS: Final = {RING: EIGHT, EXACT: EIGHT, SHORT: TWO, SERVER: ALONE, SERVER_EXACT: ALONE}
"""Of each row of ours the simple one that sends as many bytes in the last stage, or fewer."""


def weights_sent(local: Local) -> int:
    """Return the bytes of the autoencoder's weights that nodes were sent; after training these do not change."""
    halves = dict(local.state.get("halves", {}))
    frames = {half_of(ConvEncoder, halves.pop("encoder")).frame()} if halves else set()
    frames |= {half_of(ConvDecoder, half).frame() for half in halves.values()}
    return sum(len(data) for held in local.held.values() for data in held & frames)


def train(label: str, rate: float, seed: int, *, steps: int, tuning: bool = False) -> dict[str, Any]:
    """Train a row and return its accuracy, last losses and bytes; on the validation split if ``tuning``."""
    from fedcomp.experiments.central import Sending
    from fedcomp.experiments.conv_gradients import Training, mean_of

    training = Training(seed + tuning * TUNING_SEED, rate=rate, held_out="validation" if tuning else "test")
    sending, uplink = None, []
    for number in range(1, steps + 1):
        gradients = training.workers()
        if sending is None:
            layout = Layout.of(mean_of(gradients), EndsDense())
            sending = Sending(ROWS[label](steps), layout, len(gradients), seed)
        mean_, cost = sending.send(number, [layout.flatten(gradient) for gradient in gradients])
        uplink.append(cost.uplink - sending.local.state.get("spared", 0))
        training.move(layout.unflatten(mean_))
        if not np.isfinite(mean_).all():
            break
    assert sending is not None
    losses = training.losses[-50:]
    finite = bool(np.isfinite(losses).all()) and len(uplink) == steps
    return {
        "accuracy": 100.0 * training.accuracy() if finite else 0.0,
        "loss": mean(losses) if finite else math.inf,
        "uplink": sum(uplink),
        "last": uplink[-1],
        "weights": weights_sent(sending.local),
        "dense": steps * len(gradients) * 4 * layout.size,
    }


BEST: Final = "latents, values divided by their root mean square, Adam"
THIRD: Final = "latents, divided, SGD"
RAW: Final = "latents, as they are, SGD (third party's)"
CODERS: Final[Mapping[str, dict[str, Any]]] = {
    BEST: {},
    THIRD: {"optimizer": "sgd"},
    RAW: {"optimizer": "sgd", "raw": True},
    "latents, as they are, Adam": {"raw": True},
    "latents, divided, Adam, three passes": {"passes": 3},
}
"""Trainings of a ring's autoencoder that are compared."""

TOP_QUARTER: Final = "the largest quarter of the values"
INT8: Final = "8 bits for each value"
INT4: Final = "4 bits for each value"
SHARED: Final = "its values on the common node's support"
OWN: Final = "its own largest values (third party's)"
COPY: Final = "nothing: the common node's values as they are"
ZEROS: Final = "nothing: zeros"


def codings(seed: int, *, trained: int) -> dict[str, Any]:
    """Return squared errors over energy on held-out steps, by what was coded how.

    Four workers' gradients of one layer of a dense training; in turn a worker's largest values are the support.
    """
    from fedcomp.experiments.conv_gradients import Training, mean_of

    training = Training(seed)
    rings = {
        name: AutoencoderTraining(**{k: v for k, v in options.items() if k != "raw"})
        for name, options in CODERS.items()
    }
    halves = {name: drawn(seed) for name in (*rings, SHARED, OWN)}
    sums: dict[str, list[float]] = {}
    few = max(1, round(INNOVATION / DENSITY * VALUES))
    for number in range(1, trained + HELD_OUT + 1):
        gradients = training.workers()
        training.move(mean_of(gradients))
        vectors = [gradient[LAYER].reshape(-1) for gradient in gradients]
        leader = number % len(vectors)
        support = select_topk(vectors[leader], VALUES)
        on = [vector[support] for vector in vectors]
        own = [vector[select_topk(vector, VALUES)] for vector in vectors]
        scale = _rms(on[leader])
        if number <= trained:
            for name, options in CODERS.items():
                signals = [v if options.get("raw") else v / scale for v in on]
                halves[name], _ = rings[name].learn_ring(halves[name], signals, [1.0] * len(on))
            for name, found in ((SHARED, on), (OWN, own)):
                unit = {node: v / _rms(v) for node, v in enumerate(found)}
                sides = {n: _side(v, few) for n, v in unit.items()}
                key = Key(seed, "autoencoder/common", number)
                halves[name], _ = AutoencoderTraining().learn_nodes(halves[name], unit, sides, key)
            continue
        true = np.sum(on, axis=0) / np.float32(len(on))
        decoded = {name: _ring(halves[name], on, 1.0 if o.get("raw") else scale) for name, o in CODERS.items()}
        decoded |= {
            TOP_QUARTER: _mean([_side(v, VALUES // 4) for v in on]),
            INT8: _mean([_rounded(v, "q8") for v in on]),
            INT4: _mean([_rounded(v, "q4") for v in on]),
        }
        for name, values in decoded.items():
            _note(sums, name, values, true)
        for name in (SHARED, OWN):
            encoder = half_of(ConvEncoder, halves[name]["encoder"])
            latents = encoder.encode((on if name == SHARED else own)[leader] / scale)
            for node, values in enumerate(on):
                true = values / _rms(values)
                side = _side(true, few)
                guesses = {
                    name: half_of(ConvDecoder, halves[name][str(node)]).decode(latents, VALUES, side),
                    COPY: on[leader] / scale,
                    ZEROS: side,
                }
                for how, values_there in guesses.items():
                    # Where the innovation has a value the server takes that one.
                    _note(sums, f"node/{how}", np.where(side != 0.0, side, values_there), true)
    return {"missed": {name: missed / energy for name, (missed, energy) in sums.items()}}


def _rms(values: Vector) -> np.float32:
    return np.float32(math.sqrt(float(np.square(values, dtype=np.float64).mean())) or 1.0)


def _side(values: Vector, count: int) -> Vector:
    """Return the largest values, zeros elsewhere."""
    out = np.zeros_like(values)
    kept = select_topk(values, count)
    out[kept] = values[kept]
    return out


def _rounded(values: Vector, form: str) -> Vector:
    return FORMS[form].code(values).decode()


def _mean(vectors: Sequence[Vector]) -> Vector:
    return np.sum(vectors, axis=0) / np.float32(len(vectors))


def _ring(halves: Halves, values: Sequence[Vector], scale: float | np.float32) -> Vector:
    """Return what is decoded of the mean of latents."""
    encoder, decoder = half_of(ConvEncoder, halves["encoder"]), half_of(ConvDecoder, halves["decoder"])
    latents = _mean([encoder.encode(v / np.float32(scale)) for v in values])
    return decoder.decode(latents, values[0].size) * np.float32(scale)


def _note(sums: dict[str, list[float]], name: str, found: Vector, true: Vector) -> None:
    held = sums.setdefault(name, [0.0, 0.0])
    held[0] += float(np.square(found - true, dtype=np.float64).sum())
    held[1] += float(np.square(true, dtype=np.float64).sum())


RING_BYTES: Final[Mapping[str, float]] = {**dict.fromkeys(CODERS, 1.0), TOP_QUARTER: 1.0, INT8: 1.0, INT4: 0.5}
"""Bytes of a coding of k values, in k: a quarter of k float32 numbers are latents, or values without their places."""


def study(found: Found) -> Studied:
    """Compare codings on gradients that were not trained with, and trainings with tuned step sizes."""
    config, say = found.config, found.say
    settings = config.settings
    processes, seeds = int(settings["workers"]), list(repetitions(config))
    looked = Sweep(codings, {"seed": seeds}, "codings", {"trained": int(settings["trained"])})(say, processes)
    rates = numbers(str(settings["rates"]))
    shared = {"steps": int(settings["steps"])}
    axes: dict[str, Sequence[Any]] = {"label": list(ROWS), "rate": rates, "seed": [config.seed]}
    tried = Sweep(train, axes, "tuning", {**shared, "tuning": True})(say, processes)
    # Of equal accuracies, which a few hundred images often give, the one with the smaller loss.
    best = {label: max(g, key=lambda r: (r.accuracy, -r.loss)).rate for label, g in tried.groups("label").items()}
    cells = [{"label": label, "rate": best[label], "seed": seed} for label in ROWS for seed in seeds]
    groups: dict[str, Records] = Sweep(train, cells, shared=shared)(say, processes).groups("label")

    def error(name: str) -> float:
        return mean(record.missed[name] for record in looked)

    def accuracy(label: str) -> float:
        return mean(groups[label].each("accuracy"))

    def ratio(label: str) -> float:
        group = groups[label]
        return mean(group.each("dense")) / mean(group.each("uplink"))

    def last(label: str) -> float:
        return mean(groups[label].each("last")) / 4

    by_coding: dict[str, Any] = {
        "what travels": str,
        "bytes a value": lambda name: RING_BYTES[name],
        "error": lambda name: f"{error(name):.3g}",
    }
    by_node: dict[str, Any] = {
        "decoders are trained on": str,
        "error": lambda name: f"{error(f'node/{name}'):.3g}",
    }
    by_row: dict[str, Any] = {
        "row": str,
        "times fewer, all stages": lambda label: round(ratio(label), 2),
        "step size": lambda label: best[label],
        "test, %": lambda label: round(accuracy(label), 1),
        "±": lambda label: round(spread(groups[label].each("accuracy")), 1),
        "training loss": lambda label: f"{mean(groups[label].each('loss')):.3g}",
        "bytes a worker, last step": lambda label: round(last(label)),
        "bytes of weights": lambda label: round(mean(groups[label].each("weights"))),
    }
    spared = {label: last(FULL) - last(label) for label in (EXACT, SERVER)}
    held_out = "held-out error"
    return Studied(
        {
            **{(name, held_out): error(name) for name in RING_BYTES},
            # The best of its trainings: values divided by their root mean square, Adam.
            ("autoencoder", held_out): error(BEST),
            ("autoencoder", "error over that of 8 bits in the same bytes"): error(BEST) / error(INT8),
            ("autoencoder", "error over that of the largest quarter of the values"): error(BEST) / error(TOP_QUARTER),
            ("decoders on a shared support", "error over those trained on each node's own values"): (
                error(f"node/{SHARED}") / error(f"node/{OWN}")
            ),
            ("server instance", "error over that of zeros beside a node's innovation"): (
                error(f"node/{SHARED}") / error(f"node/{ZEROS}")
            ),
            **{
                (label, "bytes, last stage, over float32 on a shared support"): last(label) / last(FULL)
                for label in (EXACT, SERVER)
            },
            **{(label, f"points below {rival}"): accuracy(rival) - accuracy(label) for label, rival in RIVALS.items()},
            **{(label, "points of accuracy lost"): accuracy(DENSE) - accuracy(label) for label in ROWS},
            **{(label, "test, %"): accuracy(label) for label in ROWS},
            **{(label, "times fewer bytes"): ratio(label) for label in ROWS},
            "rounds after which the weights of an encoder are paid back": WEIGHTS / max(1.0, spared[EXACT]),
        },
        tables=[
            table(
                "Training",
                by_row,
                ROWS,
                "Means over seeds, ± half the range. LGC: a twentieth of the steps dense, values until half of them, "
                "then latents. Bytes of whole frames, the dense first layer and biases included: in rows of 8 bits "
                "and fewer these travel in 8 bits, too. Weights of the autoencoder come on top, once for each worker "
                "that needs them. The step size is the one of the grid that did best on a validation split.",
            ),
            table(
                f"One layer's gradients, {VALUES} values on a shared support: error of the decoded mean",
                by_coding,
                RING_BYTES,
                "Squared error over energy on held-out steps, means over seeds; predicting zero has 1. Bytes a value: "
                "latents are a quarter of the values, in float32; the support is known. 8 and 4 bits with a scale for "
                "each 256 values, which is .016 bytes a value more.",
            ),
            table(
                "The server instance: error of a node's values, decoded from another's latents and its own innovation",
                by_node,
                (SHARED, OWN, COPY, ZEROS),
                "On the common node's support, values divided by their root mean square; in every row an innovation's "
                "values are taken as they are.",
            ),
        ],
    )
