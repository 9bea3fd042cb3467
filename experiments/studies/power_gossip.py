"""PowerGossip compared with CHOCO-SGD and DeepSqueeze: tuned trainings, and averaging of matrices without gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.experiments.averaging import average
from fedcomp.experiments.decentralised import Energy, GossipTraining, cost_table, ratio, run, traffic_of
from fedcomp.experiments.findings import largest, mean
from fedcomp.experiments.kit import Record, Records, curves, repetitions, table
from fedcomp.experiments.options import Config, numbers
from fedcomp.experiments.relayed import beside
from fedcomp.experiments.tables import Found, Studied
from fedcomp.gossip import get_algorithm
from fedcomp.gossip.power_gossip import auto_rate
from fedcomp.gossip.topology import Ring
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.rules import Real

DENSE: Final = "D-PSGD"
CHOCO_TOP: Final = "CHOCO, top-k"
CHOCO_SIGNS: Final = "CHOCO, scaled signs"
FIXED: Final = (DENSE, "PowerGossip, rank 1", "PowerGossip, rank 1, rate of the graph", "PowerGossip, rank 2")
"""Algorithms without a consensus step."""
TUNED: Final = (CHOCO_TOP, CHOCO_SIGNS, "DeepSqueeze, top-k")
"""Algorithms with a consensus step, which is tuned on the validation split."""

CHANCE: Final = 0.1
"""Accuracy of a diverged model on ten classes."""

KINDS: Final = ("random", "decaying")
"""Gaussian matrices, and matrices with singular values 1, 0.8, 0.64, ... in random directions."""

DECAY: Final = 0.8
# From slow steps to diverging ones, a factor of two apart; CHOCO's best must lie inside.
MATRIX_GAMMAS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)

gammas_of = partial(numbers, each=Real(above=0.0, most=1.0))


def plan(config: Config, label: str, gamma: float, seed: int, *, validation: bool = False) -> GossipTraining:
    """Return a training; ``gamma`` is used by algorithms that have one.

    A training for tuning has half of the iterations and is judged by a part of the training examples. A sweep at full
    length would cost several times the runs that it prepares.
    """
    from fedcomp.tasks import get_task

    settings, rounds = config.settings, max(1, config.rounds // 2) if validation else config.rounds
    top = {"id": "topk", "density": settings["codec.density"]}
    algorithms: tuple[dict[str, Any], ...] = (
        {"name": "dpsgd"},
        {"name": "power-gossip"},
        # Computed from the graph, not tuned; nodes do not know the graph, so the number is sent to them.
        {"name": "power-gossip", "rate": auto_rate(Ring(config.clients))},
        {"name": "power-gossip", "rank": 2},
        {"name": "choco", "gamma": gamma, "compressor": top},
        {"name": "choco", "gamma": gamma, "compressor": {"id": "scaledsign"}},
        {"name": "deepsqueeze", "gamma": gamma, "compressor": top},
    )
    made = dict(zip((*FIXED, *TUNED), algorithms, strict=True))[label]
    task = get_task("digits", hidden=str(settings["task.hidden"]), partition=str(settings["task.partition"]))
    return GossipTraining(
        task.validating() if validation else task,
        get_algorithm({**made, "lr": settings["lr"], "momentum": settings["momentum"]}),
        Ring(config.clients),
        rounds,
        seed=seed,
        batch_size=int(settings["batch_size"]),
        every=max(1, rounds // 30),
    )


def train(label: str, gamma: float, seed: int, *, config: Config, validation: bool) -> dict[str, Any]:
    """Train a row with a consensus step. If ``validation``, train on a part of the training examples and evaluate on
    the rest."""
    return run(plan(config, label, gamma, seed, validation=validation))


def late(runs: Records, name: str) -> float:
    """Return a figure of :func:`fedcomp.experiments.decentralised.train` as the mean over the last third of the
    evaluations of all seeds; NaN if a run diverged.

    The models of nodes fluctuate with their last batches, so one evaluation is not enough.
    """
    if any(runs.each("diverged")):
        return math.nan
    return mean(point[name] for run in runs for point in run.points[-max(1, len(run.points) // 3) :])


def accuracy(runs: Records) -> float:
    """Return the accuracy of the nodes' own models, or of guessing if a run diverged, so such a step ranks last."""
    return CHANCE if any(runs.each("diverged")) else late(runs, "accuracy")


_COLUMNS: Final[Mapping[str, Any]] = {
    "row": lambda runs: runs[0].label,
    "gamma": lambda runs: runs[0].gamma if runs[0].label in TUNED else None,
    "nodes, %": lambda runs: 100 * late(runs, "accuracy"),
    "mean model, %": lambda runs: 100 * late(runs, "average"),
    "ended by the watch": lambda runs: next(filter(None, runs.each("diverged")), "").partition(". ")[0],
}


def study(found: Found) -> Studied:
    """Tune the consensus steps, train every row with its best one, average matrices, and run the rows without
    messages."""
    config = found.config

    def trained(places: Sequence[tuple[str, float]], *, validation: bool) -> dict[Any, Records]:
        cells = [{"label": label, "gamma": g, "seed": seed} for label, g in places for seed in repetitions(config)]
        # Separate names, because a training on the validation split differs from the one with the best step.
        done = found.sweep(train, cells, "sweep" * validation, config=config, validation=validation)
        return done.groups("label", "gamma")

    gammas = gammas_of(str(config.settings["gammas"]))
    tried = trained([(label, gamma) for label in TUNED for gamma in gammas], validation=True)
    best = {label: max(gammas, key=lambda gamma: accuracy(tried[label, gamma])) for label in TUNED}
    # Algorithms without a consensus step get 0, which is not used.
    rows = trained([(label, best.get(label, 0.0)) for label in (*FIXED, *TUNED)], validation=False)
    groups = {label: runs for (label, _), runs in rows.items()}
    sent = {label: traffic_of(runs[0]) for label, runs in groups.items()}
    tracks = {
        (each.kind, each.label): each
        for each in found.sweep(
            averaged,
            [{"kind": kind, "label": label} for kind, label in matrix_runs(config)],
            "averaging",
            config=config,
        )
    }
    relayed, differ = beside(
        found,
        "These rows run through Flower's server on the chosen engine; whole messages include the start and models.",
    )
    quantities: dict[Any, Any] = {
        (one, f"accuracy over {other}"): accuracy(groups[one]) - accuracy(groups[other])
        for one in groups
        for other in groups
    }
    for label, runs in groups.items():
        quantities[label, "messages smaller than dense ones"] = ratio(sent[label], sent[DENSE], headers=True)
        over = late(runs, "average") - late(groups[DENSE], "average")
        quantities[label, "accuracy of the mean model over D-PSGD"] = over

    def diverged(label: str, least: float = 0.0) -> list[bool]:
        return [any(runs.each("diverged")) for (name, g), runs in tried.items() if name == label and g >= least]

    # From twice the best on, because the claim is about the narrow range of a sparse compressor; any large step would
    # diverge.
    wide = diverged(CHOCO_TOP, 2 * best[CHOCO_TOP])
    quantities[CHOCO_TOP, "runs from twice the best gamma on that came to an end"] = wide.count(False)
    quantities[CHOCO_SIGNS, "runs of the sweep that diverged"] = sum(diverged(CHOCO_SIGNS))
    size = int(config.settings["matrix"])
    return Studied(
        {**quantities, **_of_matrices(config, tracks), **differ},
        tables=[
            table(
                "Accuracy on the ring of nodes",
                {**_COLUMNS, "worst node, %": lambda runs: 100 * late(runs, "worst")},
                rows.values(),
                "Test accuracy of the nodes' own models, mean and worst, and of the mean of their models, all over "
                "the last third of the evaluations. Gamma: the best of the sweep on the validation split; empty if "
                "there is none to tune.",
            ),
            table(
                "The sweep, on the validation split",
                _COLUMNS,
                tried.values(),
                "Accuracy is on a held-out fifth of the training examples after half of the iterations; the test "
                "split is not used. Empty: diverged.",
            ),
            cost_table(
                "What was sent, first seed",
                "row",
                {label: (traffic, sent[DENSE]) for label, traffic in sent.items()},
                Energy.of(config.settings),
            ),
            table(
                "Averaging matrices",
                {
                    "matrices": "kind",
                    "row": "label",
                    "iterations": lambda run: run.rounds[-1],
                    "message, bytes": "message",
                    "relative error": "last",
                },
                tracks.values(),
                f"No gradients. Every node starts with its own matrix, {size} x {size}, Gaussian or with singular "
                f"values that fall by {DECAY}. Error: distance to the mean over its start; empty if it diverged. "
                f"CHOCO sends the largest {_kept(config)} entries.",
            ),
            relayed,
        ],
        figures=[
            curves(
                "Accuracy against bytes on edges",
                [(label, point) for label, runs in groups.items() for point in runs[0].points],
                lambda place: place[1]["edge_bytes"],
                lambda place: place[1]["accuracy"],
                lambda place: place[0],
                x_label="edge bytes so far, headers included",
                y_label="accuracy of the nodes' models",
                log_x=True,
                x_bytes=True,
                caption="First seed. Rows with a consensus step use the best of their sweep; the runs of the sweep "
                "are not counted.",
            ),
        ],
        tasks=[plan(config, DENSE, 0.0, config.seed).task.record()],
    )


def _kept(config: Config) -> int:
    """Return the number of entries of a matrix that CHOCO sends."""
    return max(1, int(config.settings["matrix"]) ** 2 // 200)


def matrix_runs(config: Config) -> dict[tuple[str, str], tuple[dict[str, Any], int]]:
    """Return the algorithm and the iterations by kind of matrix and label."""
    rounds = int(config.settings["matrix_rounds"])
    # On random matrices higher ranks get proportionally fewer iterations, so all send the same number of floats.
    half, short = rounds // 2, max(2, 3 * rounds // 10)
    power = {"name": "power-gossip", "values": "float32"}
    top = {"id": "topk", "density": _kept(config) / int(config.settings["matrix"]) ** 2}
    out: dict[tuple[str, str], tuple[dict[str, Any], int]] = {
        **{("random", f"rank {r}"): ({**power, "rank": r}, rounds // r) for r in (1, 2, 4)},
        ("random", "rank 1, cold start"): ({**power, "warm_start": False}, rounds),
        **{("decaying", f"rank {r}"): ({**power, "rank": r}, short) for r in (1, 2)},
        ("decaying", "rank 1, cold start"): ({**power, "warm_start": False}, short),
    }
    for kind, length in (("random", half), ("decaying", short)):
        for gamma in MATRIX_GAMMAS:
            # Without digests, because bytes are compared and digests belong to the protocol.
            choco = {"name": "choco", "gamma": gamma, "compressor": top, "digest_every": 0}
            out[kind, f"CHOCO, gamma {gamma:g}"] = choco, length
    return out


def averaged(kind: str, label: str, *, config: Config) -> dict[str, Any]:
    """Average one matrix per node; all algorithms average the same matrices of a kind."""
    n, m = config.clients, int(config.settings["matrix"])
    algorithm, rounds = matrix_runs(config)[kind, label]
    generator = Key(config.seed, f"power-gossip/{kind}").generator()

    def decaying() -> NDArray[Any]:
        left, right = (np.linalg.qr(generator.standard_normal((m, m)))[0] for _ in range(2))
        return np.asarray((left * DECAY ** np.arange(m) @ right.T).reshape(-1))

    values = generator.standard_normal((n, m * m)) if kind == "random" else np.stack([decaying() for _ in range(n)])
    # As matrices, since PowerGossip works on their rows and columns.
    layout = Layout.of({"m": np.zeros((m, m), np.float32)}, lambda *_: None)
    every = max(1, rounds // 40)
    return average(algorithm, Ring(n), values, rounds, layout=layout, seed=config.seed, every=every)


def _of_matrices(config: Config, tracks: Mapping[tuple[str, str], Record]) -> dict[Any, float]:
    """Return the quantities of the claims: the effect of rank at equal floats, of a warm start, and CHOCO on the same
    matrices."""
    out: dict[Any, float] = {}
    for kind in KINDS:
        cold = tracks[kind, "rank 1, cold start"].last / tracks[kind, "rank 1"].last
        out[f"{kind} matrices", "error of a cold start over a warm one"] = cold
    flat, steep = (tracks[kind, "rank 1"] for kind in KINDS)
    chocos = {kind: [t.last for (k, label), t in tracks.items() if k == kind and "CHOCO" in label] for kind in KINDS}
    ranks = [tracks["random", f"rank {r}"].last for r in (1, 2, 4)]
    # At equal iterations: CHOCO had half as many as rank 1.
    half = int(config.settings["matrix_rounds"]) // 2
    at = next((e for k, e in zip(flat.rounds, flat.errors, strict=True) if k >= half), math.nan)
    random = {
        "largest error of ranks 1, 2 and 4 at equal floats": largest(ranks),
        "the largest of these errors over the smallest": largest(ranks) / min(ranks),
        "CHOCO's runs of gamma >= 0.2 that came to an end": sum(map(math.isfinite, chocos["random"][-2:])),
        "error of rank 1 over the best CHOCO, as many iterations": at / min(chocos["random"]),
    }
    decaying = {
        "error of rank 1": steep.last,
        "error of rank 2": tracks["decaying", "rank 2"].last,
        "error of the best CHOCO over rank 1": min(chocos["decaying"]) / steep.last,
    }
    return {
        **out,
        **{("random matrices", name): value for name, value in random.items()},
        **{("decaying matrices", name): value for name, value in decaying.items()},
        "largest change of the sum of all matrices by PowerGossip": largest(
            track.moved for (_, label), track in tracks.items() if "CHOCO" not in label
        ),
    }
