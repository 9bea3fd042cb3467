"""LGC: the error of an autoencoder of gradients compared with other codings at equal bytes, and trainings with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs import LGC, ScaleCom
from fedcomp.codecs.autoencoder import ConvDecoder, ConvEncoder
from fedcomp.codecs.forms import FORMS
from fedcomp.codecs.scalecom import Supports
from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import repetitions, table
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.studies import convolutions
from fedcomp.experiments.tables import Found, Training
from fedcomp.kernels import select_topk
from fedcomp.layout import EndsDense, Layout, Update, Vector
from fedcomp.local import Local
from fedcomp.program import Answer, Now, Step
from fedcomp.rng import Key
from fedcomp.systems.autoencoder import AutoencoderTraining, Halves, drawn, half_of
from fedcomp.systems.lgc import LearnedGradients
from fedcomp.systems.shared_support import SharedSupport
from fedcomp.wire import Frame

if TYPE_CHECKING:
    from fedcomp.experiments.central import Cost

FULL: Final = "shared support, float32 (ScaleCom)"
EXACT: Final = "LGC, ring, decoded memory"
LAYER: Final = "conv3"
VALUES: Final = 1024
"""Values of the layer, out of 18 432, in the comparison of codings."""

HELD_OUT: Final = 100
"""Number of held-out steps in the comparison of codings."""

DENSITY: Final = 0.05
INNOVATION: Final = 0.002

WEIGHTS: Final = 692_172
"""Bytes of an encoder's weights."""


@dataclass(frozen=True, repr=False, eq=False)
class OneForAll(SharedSupport, id="one-for-all"):
    """The strongest simple rival of one node that represents all: only its own values on its own support.

    All other clients clear their memory on that support, as with ``ef="mask"``, and only their dense tensors count. The
    state holds the bytes that a round saves, as ``spared``.
    """

    def stepped(self, now: Now, supports: Supports, support: Frame, given: Sequence[Answer]) -> Step:
        """Use the leader's values for all clients; average the tensors that are not compressed."""
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


def learned(rounds: int, **options: Any) -> LearnedGradients:
    """Return the program of LGC: the first twentieth of the rounds is dense, then values are sent until half of the
    rounds, then latents."""
    codec = LGC(**{"density": DENSITY, "innovation": INNOVATION, **options})
    return LearnedGradients(codec, rounds // 20, rounds // 2 - rounds // 20)


def shared(values: str, alone: bool = False) -> SharedSupport:
    """Return the program of values with the given bits on a common node's support; with ``alone`` only that node's
    values."""
    return (OneForAll if alone else SharedSupport)(ScaleCom(DENSITY, values=values))


def train(spec: RunSpec, training: Training) -> dict[str, Any]:
    """Train a row; ``weights`` are the bytes of the autoencoder's weights sent to nodes."""

    def sent(local: Local, cost: Cost) -> int:
        return cost.uplink - int(local.state.get("spared", 0))

    record, sending = convolutions.train(spec, training, lambda tensors: Layout.of(tensors, EndsDense()), sent)
    # These do not change after the training of the autoencoder.
    halves = dict(sending.local.state.get("halves", {}))
    frames = {half_of(ConvEncoder, halves.pop("encoder")).frame()} if halves else set()
    frames |= {half_of(ConvDecoder, half).frame() for half in halves.values()}
    return record | {"weights": sum(len(data) for held in sending.local.held.values() for data in held & frames)}


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
"""The compared trainings of a ring's autoencoder."""

TOP_QUARTER: Final = "the largest quarter of the values"
INT8: Final = "8 bits for each value"
INT4: Final = "4 bits for each value"
SHARED: Final = "its values on the common node's support"
OWN: Final = "its own largest values (third party's)"
COPY: Final = "nothing: the common node's values as they are"
ZEROS: Final = "nothing: zeros"


def codings(seed: int, *, trained: int, held_out: int) -> dict[str, Any]:
    """Return squared errors over energy, by coding, on ``held_out`` steps after the training steps.

    The data are four workers' gradients of one layer in a dense training. Workers take turns: the largest values of one
    are the support.
    """
    raw = {name for name, options in CODERS.items() if "raw" in options}
    rings = {
        name: AutoencoderTraining(**{k: v for k, v in options.items() if k != "raw"})
        for name, options in CODERS.items()
    }
    halves = {name: drawn(seed) for name in (*rings, SHARED, OWN)}
    sums: dict[str, NDArray[np.float64]] = {}
    few = max(1, round(INNOVATION / DENSITY * VALUES))

    def note(name: str, found: Vector, true: Vector) -> None:
        both = [np.square(each, dtype=np.float64).sum() for each in (found - true, true)]
        sums[name] = sums.get(name, np.zeros(2)) + both

    for number, gradients in convolutions.gradients(seed, trained + held_out):
        vectors = [gradient[LAYER].reshape(-1) for gradient in gradients]
        leader = number % len(vectors)
        support = select_topk(vectors[leader], VALUES)
        on = [vector[support] for vector in vectors]
        own = [vector[select_topk(vector, VALUES)] for vector in vectors]
        scale = _rms(on[leader])
        if number <= trained:
            for name, ring in rings.items():
                signals = on if name in raw else [v / scale for v in on]
                halves[name], _ = ring.learn_ring(halves[name], signals, [1.0] * len(on))
            for name, found in ((SHARED, on), (OWN, own)):
                unit = {node: v / _rms(v) for node, v in enumerate(found)}
                sides = {n: _side(v, few) for n, v in unit.items()}
                key = Key(seed, "autoencoder/common", number)
                halves[name], _ = AutoencoderTraining().learn_nodes(halves[name], unit, sides, key)
            continue
        true = _mean(on)
        for name in rings:
            note(name, _ring(halves[name], on, np.float32(1.0) if name in raw else scale), true)
        note(TOP_QUARTER, _mean([_side(v, VALUES // 4) for v in on]), true)
        for name, form in ((INT8, "q8"), (INT4, "q4")):
            note(name, _mean([FORMS[form].code(v).decode() for v in on]), true)
        latents = {
            name: half_of(ConvEncoder, halves[name]["encoder"]).encode(found[leader] / scale)
            for name, found in ((SHARED, on), (OWN, own))
        }
        for node, values in enumerate(on):
            true = values / _rms(values)
            side = _side(true, few)
            guesses = {COPY: on[leader] / scale, ZEROS: side}
            for name, sent in latents.items():
                guesses[name] = half_of(ConvDecoder, halves[name][str(node)]).decode(sent, VALUES, side)
            for name, guess in guesses.items():
                # If the innovation has a value, the server uses it.
                note(f"node/{name}", np.where(side != 0.0, side, guess), true)
    return {"missed": {name: missed / energy for name, (missed, energy) in sums.items()}}


def _rms(values: Vector) -> np.float32:
    return np.float32(math.sqrt(float(np.square(values, dtype=np.float64).mean())) or 1.0)


def _side(values: Vector, count: int) -> Vector:
    """Return the largest values, zeros elsewhere."""
    out = np.zeros_like(values)
    kept = select_topk(values, count)
    out[kept] = values[kept]
    return out


def _mean(vectors: Sequence[Vector]) -> Vector:
    return np.sum(vectors, axis=0) / np.float32(len(vectors))


def _ring(halves: Halves, values: Sequence[Vector], scale: np.float32) -> Vector:
    """Return the values decoded from the mean of latents."""
    encoder, decoder = half_of(ConvEncoder, halves["encoder"]), half_of(ConvDecoder, halves["decoder"])
    return decoder.decode(_mean([encoder.encode(v / scale) for v in values]), VALUES) * scale


RING_BYTES: Final[Mapping[str, float]] = {**dict.fromkeys(CODERS, 1.0), TOP_QUARTER: 1.0, INT8: 1.0, INT4: 0.5}
"""Bytes per value of a coding: latents, or values without their positions, are a quarter of the values as float32
numbers."""


def study(found: Found) -> Studied:
    """Compare codings on held-out gradients; count bytes of the last stage and of weights."""
    axes = {"seed": list(repetitions(found.config))}
    looked = found.sweep(codings, axes, "codings", trained=int(found.config.settings["trained"]), held_out=HELD_OUT)

    def error(name: str) -> float:
        return mean(record.missed[name] for record in looked)

    def last(label: str) -> float:
        return found.mean(label, "last") / convolutions.WORKERS

    held_out = "held-out error"
    return Studied(
        {
            **{(name, held_out): error(name) for name in RING_BYTES},
            ("autoencoder", held_out): error(BEST),
            ("autoencoder", "error over that of 8 bits in the same bytes"): error(BEST) / error(INT8),
            ("autoencoder", "error over that of the largest quarter of the values"): error(BEST) / error(TOP_QUARTER),
            ("decoders on a shared support", "error over those trained on each node's own values"): (
                error(f"node/{SHARED}") / error(f"node/{OWN}")
            ),
            ("server instance", "error over that of zeros beside a node's innovation"): (
                error(f"node/{SHARED}") / error(f"node/{ZEROS}")
            ),
            **{(label, "last step, bytes"): round(last(label)) for label in found.rows},
            **{(label, "weights, bytes"): round(found.mean(label, "weights")) for label in found.rows},
            **{
                (label, "bytes, last stage, over float32 on a shared support"): last(label) / last(FULL)
                for label in found.rows
            },
            **{
                (label, "times fewer, all stages"): round(found.mean(label, "dense") / found.mean(label, "uplink"), 2)
                for label in found.rows
            },
            "rounds after which the weights of an encoder are paid back": WEIGHTS / max(1.0, last(FULL) - last(EXACT)),
        },
        tables=[
            table(
                f"One layer's gradients, {VALUES} values on a shared support: error of the decoded mean",
                {
                    "what travels": str,
                    "bytes a value": lambda name: RING_BYTES[name],
                    "error": lambda name: f"{error(name):.3g}",
                },
                RING_BYTES,
                "Squared error over energy on held-out steps, means over seeds; predicting zero has 1. Bytes a value: "
                "latents are a quarter of the values, in float32; the support is known. 8 and 4 bits have a scale for "
                "each 256 values, which adds .016 bytes per value.",
            ),
            table(
                "The server instance: error of a node's values, decoded from another's latents and its own innovation",
                {"decoders are trained on": str, "error": lambda name: f"{error(f'node/{name}'):.3g}"},
                (SHARED, OWN, COPY, ZEROS),
                "On the common node's support, with values divided by their root mean square. In every row the values "
                "of an innovation are used unchanged.",
            ),
        ],
    )
