"""Factors compared with one batch of all examples: deviation, bytes, arrival time at the server, and rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import curves, running_mean, table
from fedcomp.experiments.tables import Found, Training
from fedcomp.rng import Key

KNOWN: Final[Mapping[str, Any]] = {"i_know_inputs_are_visible": True}
ROWS_OF_A_BATCH: Final = 32
LAYERS: Final = ("layers.0.weight", "layers.1.weight", "layers.2.weight")
WRONG: Final = ("dAD, even", "dAD, sum")

WIDTH: Final = 10
"""Ranks in curves are means over this number of rounds, because single batches differ."""

LINKS: Final = {"1 Gbit/s, 0.1 ms": (1e9, 1e-4), "50 Mbit/s, 10 ms": (5e7, 1e-2), "5 Mbit/s, 50 ms": (5e6, 5e-2)}
"""Uplink bits per second and seconds of a message in one direction, by name."""

THETA: Final = 0.1
"""Singular values above this fraction of the largest count for the effective rank in figures."""


def exactness(found: Found) -> Studied:
    """Compare with one batch of all examples, count the numbers in frames, time the exchanges, and compute ranks."""
    config, say = found.config, found.say
    rounds = int(config.settings["pooled_rounds"])
    equal = say.cell("one batch of all examples", lambda: equalities(rounds, config.seed))
    parted = say.cell("layer by layer", lambda: layer_by_layer(rounds, config.seed))
    held = say.cell("lengths", lambda: lengths(config.seed))
    fading = say.cell("effective ranks", lambda: ranks(found))
    right = [row for row in next(iter(equal.values())) if row not in WRONG]
    tenth = max(1, config.rounds // 10)
    fall = "effective rank of {}, last tenth of the rounds over the first".format
    return Studied(
        quantities={
            **{f"{model}, {row}: relative difference": d for model, rows in equal.items() for row, d in rows.items()},
            "layer by layer: relative difference from one exchange": parted,
            "smallest relative difference of a wrong rule, in those of the right one": (
                min(rows[rule] for rows in equal.values() for rule in WRONG)
                / max(rows["dAD"] for rows in equal.values())
            ),
            "784-256-128-10, 32 rows: times fewer numbers, dAD": held["whole"] / held["dad"],
            "784-256-128-10, 32 rows: times fewer numbers, edAD": held["whole"] / held["edad"],
            **{fall(layer): mean(line[-tenth:]) / mean(line[:tenth]) for layer, line in fading.items()},
        },
        skipped={fall(layer): "the layer is so small that it is sent whole" for layer in LAYERS if layer not in fading},
        tables=[
            table(
                "Against one batch of all examples",
                {"model": lambda name: name, **{row: partial(_error, equal, row) for row in (*right, *WRONG)}},
                equal,
                f"Largest relative difference of a tensor after {rounds} rounds of plain SGD with real frames, of "
                "three clients with 19, 4 and 11 examples. Even: the plain mean of the clients' mean gradients. Sum: "
                "their sum, as in published code (read). edAD works on chains of layers only.",
            ),
            table(
                "Averaging during back-propagation: milliseconds until all factors are at the server",
                {
                    "link": lambda item: item[0],
                    "one exchange": lambda item: round(item[1][0], 2),
                    "one for each layer": lambda item: round(item[1][1], 2),
                    "the same, overlapping work": lambda item: round(item[1][2], 2),
                },
                prices().items(),
                "dAD of 784-256-128-10 with 32 rows, by the timing model. A Flower client answers when its work is "
                "done, as in the middle column. The last column is for a client that could answer several requests at "
                "a time. Computing is short here, compared with a round trip.",
            ),
        ],
        figures=[
            curves(
                "Effective rank over training",
                fading.items(),
                lambda line: _smooth(line[1])[0],
                lambda line: _smooth(line[1])[1],
                lambda line: line[0],
                x_label=f"round (running means over {WIDTH})",
                y_label=f"singular values above {THETA}, mean",
            ),
        ],
    )


def ranks(found: Found) -> dict[str, Any]:
    """Return the effective rank of every layer over the rounds of a training, mean over clients."""
    from fedcomp.experiments.engines import inprocess
    from fedcomp.flower.logs import quiet

    whole = {"codec.mode": "rank", "codec.rank": ROWS_OF_A_BATCH, "codec.theta": THETA, "feedback": False}
    training = Training.of(found.experiment, found.config)
    spec = training.spec(found.baseline, **found.chosen[found.baseline], **whole, **{"task.validation": False})
    with quiet():
        result = inprocess.run(replace(spec, system="factors"))
    named = {layer: f"report.frames.rank of {layer}" for layer in LAYERS}
    trained = [r.metrics for r in result.rounds if r.round]
    return {
        layer: [metrics[name] for metrics in trained]
        for layer, name in named.items()
        if all(name in metrics for metrics in trained)
    }


def equalities(rounds: int, seed: int) -> dict[str, dict[str, float]]:
    """Return by model and row the relative distance of a training in rounds from one batch of all examples."""
    from fedcomp.codecs import Factors
    from fedcomp.experiments.studies import pooled
    from fedcomp.factors.capture import chain_of

    found: dict[str, dict[str, float]] = {}
    for name in pooled.MODELS:
        dad = Factors(mode="dad", per_layer="factors", **KNOWN)
        codecs = {"dAD": dad, "rank-dAD, all ranks": Factors(rank=10_000, theta=0.0)}
        if name == "chain of layers":
            chain = chain_of(pooled.model_of(name, seed), pooled.examples(name, 0, 1, seed)[0])
            codecs["edAD"] = Factors(mode="edad", chain=chain, per_layer="factors", **KNOWN)
        expected = pooled.pooled(name, rounds, seed)
        found[name] = {
            row: pooled.difference(pooled.in_rounds(name, codec, rounds, seed), expected)
            for row, codec in codecs.items()
        }
        for rule in pooled.RULES[1:]:
            wrong = pooled.in_rounds(name, dad, rounds, seed, rule)
            found[name][f"dAD, {rule}"] = pooled.difference(wrong, expected)
    return found


def lengths(seed: int) -> dict[str, int]:
    """Return, by mode, how many numbers the frames of one step of 784-256-128-10 with a batch of 32 hold."""
    import numpy as np
    import torch

    from fedcomp.codecs import Factors
    from fedcomp.experiments.studies.pooled import trained
    from fedcomp.factors.capture import chain_of
    from fedcomp.layout import Layout, Update
    from fedcomp.tasks.arrays import to_arrays
    from fedcomp.tasks.models import Mlp, build

    drawn = Key(seed, "factors/lengths").generator()
    x = torch.from_numpy(drawn.standard_normal((ROWS_OF_A_BATCH, 784)).astype(np.float32))
    y = torch.from_numpy(drawn.integers(0, 10, ROWS_OF_A_BATCH))
    found: dict[str, int] = {}
    modes: dict[str, dict[str, Any]] = {"dad": {}, "edad": {"chain": True}, "rank": {"rank": 4}}
    for mode, more in modes.items():
        model = build(lambda: Mlp(784, (256, 128), 10), seed)
        options = {"chain": chain_of(model, x)} if "chain" in more else more
        before = {name: array.copy() for name, array in to_arrays(model).items()}
        codec = Factors(mode=mode, per_layer="factors", **KNOWN, **options).at_model(before)
        layout = Layout.of(before)
        update = trained(codec, model, layout, x, y, 0.1)
        change = Update(update.vector - layout.flatten(before), layout, update.outer)
        frame, _ = codec.encode(change, {}, Key(seed, "factors"))
        found["whole"], found[mode] = layout.size, sum(t.values.k for t in codec.open(frame, layout).tensors)
    return found


def layer_by_layer(rounds: int, seed: int) -> float:
    """Return the relative distance of a training with an exchange for each layer from one with a single exchange."""
    from fedcomp.codecs import Factors
    from fedcomp.experiments.studies import pooled

    name, dad = "chain of layers", Factors(mode="dad", per_layer="factors", **KNOWN)
    whole = pooled.in_rounds(name, dad, rounds, seed)
    return pooled.difference(pooled.in_rounds(name, dad, rounds, seed, by_layer=True), whole)


def prices() -> dict[str, list[float]]:
    """Return by link the milliseconds until the server has all factors of 784-256-128-10: in one exchange, with one for
    each layer, and with one for each layer that is sent while the others are still being computed."""
    from fedcomp.timing.pipeline import layered

    sides = [(10, 128), (128, 256), (256, 784)]
    nbytes = [4.0 * ROWS_OF_A_BATCH * (out + into) for out, into in sides]
    # Two matrix products for each layer, on a processor with ten thousand million multiplications a second.
    work = [2.0 * ROWS_OF_A_BATCH * out * into / 1e10 for out, into in sides]
    found = {}
    for link, (bits, latency) in LINKS.items():
        transfer = [8.0 * n / bits for n in nbytes]
        by_layer, at_once = layered(work, transfer, latency)
        during, _ = layered(work, transfer, latency, during=True)
        found[link] = [1e3 * at_once, 1e3 * by_layer, 1e3 * during]
    return found


def _smooth(line: list[float]) -> tuple[list[float], list[float]]:
    return running_mean([float(r + 1) for r in range(len(line))], line, WIDTH)


def _error(found: Mapping[str, Mapping[str, float]], row: str, name: str) -> str:
    return f"{found[name][row]:.1e}" if row in found[name] else ""
