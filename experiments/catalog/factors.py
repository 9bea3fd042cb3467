"""Factors instead of gradients: is dAD one batch of all examples, what does it save, and what is rank-dAD worth?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fedcomp.experiments.experiment import Experiment, no_rows
from fedcomp.experiments.findings import Findings, Say, mean, spread
from fedcomp.experiments.kit import (
    Records,
    Sweep,
    claim,
    curves,
    learning_line,
    over_seeds,
    points,
    repetitions,
    running_mean,
    table,
)
from fedcomp.experiments.options import TEXT, Config, Option, numbers
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.rng import Key
from fedcomp.rules import Int

TASK: Final = "digits"
FEDAVG: Final = "FedAvg"

TUNING_SEED: Final = 2**32
"""Added to the seed of the trainings by which step sizes are chosen."""

KNOWN: Final[Mapping[str, Any]] = {"i_know_inputs_are_visible": True}

CHAIN: Final = "layers.0.weight:relu,layers.1.weight:relu,layers.2.weight"

ROWS_OF_A_BATCH: Final = 32

OPTIONS = {
    "seeds": Option(3, Int(1, 100), "trainings per row, with the seeds from --seed on"),
    "workers": 2,
    "task.partition": Option("iid", TEXT, "how examples are spread: iid, dirichlet:ALPHA, shards:COUNT"),
    "task.hidden": Option("256,128", TEXT, "widths of the model's two hidden layers"),
    "steps": Option(
        "0.4,0.8,1.6",
        TEXT,
        "step sizes of the clients' SGD; each row takes the one that does best on a validation split",
        check=numbers,
    ),
    "pooled_rounds": Option(20, Int(1), "rounds that are compared with one batch of all examples"),
}


def _factors(mode: str, feedback: bool = False, **more: Any) -> tuple[str, dict[str, Any]]:
    shown = KNOWN if mode != "rank" else {}
    return "factors", {"feedback": feedback, **{f"codec.{k}": v for k, v in {"mode": mode, **shown, **more}.items()}}


def _topk(density: float) -> tuple[str, dict[str, Any]]:
    return "topk", {"feedback": True, "codec.density": density, "codec.values": "q8"}


DAD: Final = "dAD"
EDAD: Final = "edAD"
RANK_2: Final = "rank-dAD, 2"
RANK_4: Final = "rank-dAD, 4"
POWER: Final = {RANK_2: "PowerSGD, 4", RANK_4: "PowerSGD, 6"}
SPARSE: Final = {RANK_2: "top-k 12 %, q8 + EF", RANK_4: "top-k 24 %, q8 + EF"}
"""By row: rivals of as many uplink bytes, to one per cent, or more."""

ROWS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    FEDAVG: ("fedavg", {}),
    DAD: _factors("dad"),
    EDAD: _factors("edad", chain=CHAIN),
    "edAD, 16 bits": _factors("edad", chain=CHAIN, values="bf16"),
    "rank-dAD, 1": _factors("rank", rank=1),
    RANK_2: _factors("rank", rank=2),
    RANK_4: _factors("rank", rank=4),
    "rank-dAD, 2 + EF": _factors("rank", feedback=True, rank=2),
    POWER[RANK_2]: ("power-sgd", {"codec.rank": 4}),
    POWER[RANK_4]: ("power-sgd", {"codec.rank": 6}),
    SPARSE[RANK_2]: _topk(0.12),
    SPARSE[RANK_4]: _topk(0.24),
    "8 bits": ("qsgd", {"feedback": False, "codec.levels": 127}),
}
"""System and settings by label, in order."""

EXACT: Final = (DAD, EDAD)

LAYERS: Final = ("layers.0.weight", "layers.1.weight", "layers.2.weight")

CURVES: Final = (FEDAVG, DAD, EDAD, RANK_2, "rank-dAD, 2 + EF", RANK_4, POWER[RANK_4], SPARSE[RANK_4])

WIDTH: Final = 10
"""Rounds over which the ranks of the curves are means: single batches differ."""

LINKS: Final = {"1 Gbit/s, 0.1 ms": (1e9, 1e-4), "50 Mbit/s, 10 ms": (5e7, 1e-2), "5 Mbit/s, 50 ms": (5e6, 5e-2)}
"""Bits a second up, and seconds of a message in one direction, by name."""

THETA: Final = 0.1
"""Part of the largest singular value above which one counts for the effective rank that is shown."""


def spec_of(label: str, lr: float, seed: int, config: Config, *, tuning: bool = False) -> RunSpec:
    """Return the run of a row, one batch per client and round; on the validation split if ``tuning``."""
    system, settings = ROWS[label]
    once = {"epochs": 1, "batch_size": ROWS_OF_A_BATCH, "max_steps": 1, "evaluate_every": 1}
    made = config.spec(system, label, TASK, take=("task.",), **settings, lr=lr, **once, **{"task.validation": tuning})
    return replace(made, seed=seed + tuning * TUNING_SEED)


def train(label: str, lr: float, seed: int, *, config: Config, tuning: bool = False) -> dict[str, Any]:
    """Train a row through Flower's messages and return its accuracies and real bytes."""
    from fedcomp.experiments.engines import inprocess
    from fedcomp.flower.logs import quiet

    with quiet():
        result = inprocess.run(spec_of(label, lr, seed, config, tuning=tuning))
    return {"points": learning_line(result), "settled": points(result), "uplink": result.uplink_payload_bytes}


def ranks(lr: float, seed: int, *, config: Config) -> dict[str, Any]:
    """Return the effective rank of every layer over the rounds of a training, mean over clients."""
    from fedcomp.experiments.engines import inprocess
    from fedcomp.flower.logs import quiet

    made = replace(spec_of(FEDAVG, lr, seed, config), system="factors")
    whole: dict[str, Any] = {
        "codec.mode": "rank",
        "codec.rank": ROWS_OF_A_BATCH,
        "codec.theta": THETA,
        "feedback": False,
    }
    with quiet():
        result = inprocess.run(replace(made, settings={**made.settings, **whole}))
    return {
        layer: [r.metrics[f"report.frames.rank of {layer}"] for r in result.rounds if r.round]
        for layer in LAYERS
        if all(f"report.frames.rank of {layer}" in r.metrics for r in result.rounds if r.round)
    }


def equalities(rounds: int, seed: int) -> dict[str, dict[str, float]]:
    """Return by model and row how far a training over messages is from one batch of all examples, relative."""
    from fedcomp.codecs import Factors
    from fedcomp.experiments import pooled
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
            row: pooled.difference(pooled.over_messages(name, codec, rounds, seed), expected)
            for row, codec in codecs.items()
        }
        for rule in pooled.RULES[1:]:
            wrong = pooled.over_messages(name, dad, rounds, seed, rule)
            found[name][f"dAD, {rule}"] = pooled.difference(wrong, expected)
    return found


def lengths(seed: int) -> dict[str, int]:
    """Return how many numbers the frames of one step of 784-256-128-10 with a batch of 32 hold, by mode."""
    import numpy as np
    import torch
    from torch import nn

    from fedcomp.codecs import Factors
    from fedcomp.factors.capture import capture, chain_of
    from fedcomp.factors.collect import collecting
    from fedcomp.layout import Layout, Update
    from fedcomp.tasks.arrays import to_arrays
    from fedcomp.tasks.base import single_thread
    from fedcomp.tasks.models import Mlp, build

    def made() -> nn.Module:
        return build(lambda: Mlp(784, (256, 128), 10), seed)

    drawn = Key(seed, "factors/lengths").generator()
    x = torch.from_numpy(drawn.standard_normal((ROWS_OF_A_BATCH, 784)).astype(np.float32))
    y = torch.from_numpy(drawn.integers(0, 10, ROWS_OF_A_BATCH))
    before = {name: array.copy() for name, array in to_arrays(made()).items()}
    layout = Layout.of(before)
    found = {"whole": layout.size}
    modes: dict[str, dict[str, Any]] = {"dad": {}, "edad": {"chain": chain_of(made(), x)}, "rank": {"rank": 4}}
    for mode, more in modes.items():
        codec, model = Factors(mode=mode, per_layer="factors", **KNOWN, **more).at_model(before), made()
        with single_thread(), collecting(codec.takes_outer) as collected, capture(model):
            loss = nn.functional.cross_entropy(model(x), y)
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                parameter.data.add_(gradient, alpha=-0.1)
        change = layout.flatten(to_arrays(model)) - layout.flatten(before)
        outer = collected.explaining({t.name: change[t.slice] for t in layout.tensors}, before)
        frame, _ = codec.encode(Update(change, layout, outer), {}, Key(seed, "factors"))
        found[mode] = sum(tensor.values.k for tensor in codec.open(frame, layout).tensors)
    return found


def layer_by_layer(rounds: int, seed: int) -> float:
    """Return how far a training with an exchange for each layer is from one with one exchange, relative."""
    from fedcomp.codecs import Factors
    from fedcomp.experiments import pooled

    name, dad = "chain of layers", Factors(mode="dad", per_layer="factors", **KNOWN)
    whole = pooled.over_messages(name, dad, rounds, seed)
    return pooled.difference(pooled.over_messages(name, dad, rounds, seed, by_layer=True), whole)


def prices() -> dict[str, list[float]]:
    """Return by link the milliseconds until the server has all factors of 784-256-128-10: in one exchange, with one for
    each layer, and with one for each layer that leaves while the others are still computed."""
    from fedcomp.timing.pipeline import layered

    sides = [(10, 128), (128, 256), (256, 784)]
    nbytes = [4.0 * ROWS_OF_A_BATCH * (out + into) for out, into in sides]
    # Two products of matrices for each layer, by a processor of ten thousand million multiplications a second.
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


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Compare with one batch of all examples, count frames, choose step sizes on a validation split, and train."""
    processes, shared = int(config.settings["workers"]), {"config": config}
    pooled_rounds = int(config.settings["pooled_rounds"])
    equal = say.cell("one batch of all examples", lambda: equalities(pooled_rounds, config.seed))
    parted = say.cell("layer by layer", lambda: layer_by_layer(pooled_rounds, config.seed))
    held = say.cell("lengths", lambda: lengths(config.seed))
    steps = numbers(str(config.settings["steps"]))
    tuned: dict[str, Any] = {"label": list(ROWS), "lr": list(steps), "seed": [config.seed]}
    tried = Sweep(train, tuned, "tuning", {**shared, "tuning": True})(say, processes)
    best = {label: max(group, key=lambda r: r.settled).lr for label, group in tried.groups("label").items()}
    cells = [{"label": label, "lr": best[label], "seed": seed} for label in ROWS for seed in repetitions(config)]
    groups: dict[str, Records] = Sweep(train, cells, shared=shared)(say, processes).groups("label")
    fading = say.cell("effective ranks", lambda: ranks(best[FEDAVG], config.seed, config=config))
    dense = groups[FEDAVG]

    def settled(label: str) -> float:
        return mean(groups[label].each("settled"))

    def times(label: str) -> float:
        return mean(dense.each("uplink")) / mean(groups[label].each("uplink"))

    def bytes_of(label: str) -> float:
        return mean(groups[label].each("uplink")) / (config.clients * config.rounds)

    wrong = [f"dAD, {rule}" for rule in ("even", "sum")]
    right = [row for row in next(iter(equal.values())) if row not in wrong]
    tenth = max(1, config.rounds // 10)
    fall = {layer: mean(line[-tenth:]) / mean(line[:tenth]) for layer, line in fading.items()}
    return Findings(
        tables=[
            table(
                "Against one batch of all examples",
                {"model": lambda name: name, **{row: partial(_error, equal, row) for row in (*right, *wrong)}},
                equal,
                f"Largest relative difference of a tensor after {pooled_rounds} rounds of plain SGD over messages, of "
                "three clients with 19, 4 and 11 examples. Even: the plain mean of the clients' mean gradients. Sum: "
                "their sum, as in published code (read). edAD is for chains of layers.",
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
                "done: that is the middle column. The last one is what a client could do that answers several "
                "questions at a time; work is small here, and a round trip is not.",
            ),
            table(
                "Rows at their step sizes",
                {
                    "row": lambda label: label,
                    "step size": lambda label: best[label],
                    "test, %": lambda label: round(settled(label), 1),
                    "±": lambda label: round(spread(groups[label].each("settled")), 1),
                    "points lost": lambda label: round(settled(FEDAVG) - settled(label), 1),
                    "uplink, bytes": lambda label: round(bytes_of(label)),
                    "times fewer up": lambda label: round(times(label), 1),
                },
                ROWS,
                "Means over seeds; test accuracy is the mean of the last five rounds, ± half the range over seeds. One "
                f"batch of {ROWS_OF_A_BATCH} per client and round; bytes are payload per client and round. The step "
                "size is the one of the grid that did best on a validation split, for every row by itself. EF: error "
                "feedback, which rank-dAD as published does not have.",
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
            curves(
                "Test accuracy against uplink bytes",
                [groups[label] for label in CURVES],
                lambda group: over_seeds(group, 2),
                lambda group: over_seeds(group, 1),
                lambda group: group[0].label,
                x_label="uplink payload so far, all clients",
                y_label="test accuracy, %",
                log_x=True,
                x_bytes=True,
            ),
        ],
        claims=[
            *(
                claim(
                    f"{name}, {row}: largest relative difference",
                    found[row],
                    "<= 1e-5",
                    "derived: exact but for float32",
                )
                for name, found in equal.items()
                for row in found
                if row not in wrong
            ),
            claim("layer by layer: relative difference from one exchange", parted, "<= 0.0", "the same frames"),
            claim(
                "smallest relative difference of a wrong rule, in those of the right one",
                min(found[row] for found in equal.values() for row in wrong) / max(f["dAD"] for f in equal.values()),
                ">= 10",
                "a comparison that no wrong scale fails would say nothing",
            ),
            claim(
                "784-256-128-10, 32 rows: times fewer numbers, dAD", held["whole"] / held["dad"], ">= 4.70", "formula"
            ),
            claim(
                "784-256-128-10, 32 rows: times fewer numbers, edAD", held["whole"] / held["edad"], ">= 6.23", "formula"
            ),
            *(
                claim(
                    f"{label}: points lost against FedAvg", settled(FEDAVG) - settled(label), "<= 0.5", "the same steps"
                )
                for label in EXACT
            ),
            *(
                made
                for row, rival in (*POWER.items(), *SPARSE.items())
                for made in (
                    # A comparison is worth nothing if the rival had fewer bytes.
                    claim(
                        f"{row}: its uplink bytes over those of {rival}",
                        bytes_of(row) / bytes_of(rival),
                        "<= 1.01",
                        "chosen",
                    ),
                    claim(
                        f"{row}: points lost against {rival}",
                        settled(rival) - settled(row),
                        "<= 0.0",
                        "a goal: as good as the rival of as many bytes",
                        gate=False,
                    ),
                )
            ),
            *(
                claim(
                    f"effective rank of {layer}, last tenth of the rounds over the first",
                    ratio,
                    "<= 0.7",
                    "measured with the specification: 10 fell to 3 of 64 in 11 epochs",
                    gate=False,
                )
                for layer, ratio in fall.items()
            ),
        ],
        answer=f"dAD sends {times(DAD):.1f} and edAD {times(EDAD):.1f} times fewer uplink bytes than FedAvg for the "
        f"same steps; rank-dAD, 4, {times(RANK_4):.0f} times, {settled(FEDAVG) - settled(RANK_4):.1f} points lost, "
        f"where {POWER[RANK_4]} loses {settled(FEDAVG) - settled(POWER[RANK_4]):.1f} and {SPARSE[RANK_4]} "
        f"{settled(FEDAVG) - settled(SPARSE[RANK_4]):.1f} (means of {len(dense)} seeds, all tuned alike).",
    )


EXPERIMENT = Experiment(
    name="factors",
    question="What do factors save in place of gradients, are they exact, and what is a low rank of them worth?",
    # Every training has a step size of its own, which is found first.
    rows=no_rows,
    measure=measure,
    options=OPTIONS,
    rounds=150,
    clients=4,
    minutes=3.0,
    quick=(
        "rounds=2",
        "clients=2",
        "seeds=1",
        "steps=0.4",
        "task.hidden=32,16",
        "pooled_rounds=2",
    ),
    notes=(
        "Digits, spread evenly; one batch per client and round, plain SGD. The first table compares trainings over "
        "messages with one that has all examples in one batch; the second trains every row at its own step size.\n\n"
        "Rank-dAD sends the nearest sum of few outer products of the update, without memory, as published. PowerSGD "
        "and top-k have theirs; 8 bits are unbiased and have none. Of dAD and edAD every tensor takes its shortest "
        "form."
    ),
)
