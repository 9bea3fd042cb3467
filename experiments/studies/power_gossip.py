"""PowerGossip beside CHOCO-SGD and DeepSqueeze: trainings with the consensus step that suits each, and matrices that
are averaged without gradients, where rank, warm start and spectrum show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.experiments.averaging import Track, average
from fedcomp.experiments.decentralised import Energy, GossipCell, Trained, cost_table, ratio
from fedcomp.experiments.findings import Curves, Table, largest, mean
from fedcomp.experiments.kit import curves, repetitions, table
from fedcomp.experiments.options import Config, numbers
from fedcomp.experiments.relayed import beside
from fedcomp.experiments.tables import Found, Studied
from fedcomp.gossip.power_gossip import auto_rate
from fedcomp.gossip.topology import Ring
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.rules import Real

DENSE: Final = "D-PSGD"
RANK_1: Final = "PowerGossip, rank 1"
CHOCO_TOP: Final = "CHOCO, top-k"
CHOCO_SIGNS: Final = "CHOCO, scaled signs"
FIXED: Final = (DENSE, RANK_1, "PowerGossip, rank 1, rate of the graph", "PowerGossip, rank 2")
"""Without a consensus step."""
TUNED: Final = (CHOCO_TOP, CHOCO_SIGNS, "DeepSqueeze, top-k")
"""With one, which is swept on the validation split."""

CHANCE: Final = 0.1
"""Accuracy of a model that has diverged, of ten classes."""

DECAY: Final = 0.8
# From steps that are slow to steps that diverge, a factor of two apart: the best of CHOCO must lie inside.
MATRIX_GAMMAS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)

gammas_of = partial(numbers, each=Real(above=0.0, most=1.0))


def cell(config: Config, label: str, gamma: float, seed: int, *, validation: bool = False) -> GossipCell:
    """Return a training; ``gamma`` counts for algorithms that have one.

    One for tuning has half of the iterations: a sweep at full length would cost several times the runs it prepares.
    """
    settings, rounds = config.settings, max(1, config.rounds // 2) if validation else config.rounds
    top = {"id": "topk", "density": settings["codec.density"]}
    algorithms: tuple[dict[str, Any], ...] = (
        {"name": "dpsgd"},
        {"name": "power-gossip"},
        # Computed from the graph and not tuned: nodes do not know the graph, so that a number travels.
        {"name": "power-gossip", "rate": auto_rate(Ring(config.clients))},
        {"name": "power-gossip", "rank": 2},
        {"name": "choco", "gamma": gamma, "compressor": top},
        {"name": "choco", "gamma": gamma, "compressor": {"id": "scaledsign"}},
        {"name": "deepsqueeze", "gamma": gamma, "compressor": top},
    )
    made = dict(zip((*FIXED, *TUNED), algorithms, strict=True))[label]
    return GossipCell(
        {**made, "lr": settings["lr"], "momentum": settings["momentum"]},
        "ring",
        config.clients,
        rounds,
        seed,
        "digits",
        {"hidden": str(settings["task.hidden"]), "partition": str(settings["task.partition"])},
        # Watched, since many of the swept consensus steps diverge: a run that does is ended and not carried on.
        {"batch_size": settings["batch_size"], "every": max(1, rounds // 30), "watch": True},
        validation,
    )


def train(label: str, gamma: float, seed: int, *, config: Config, validation: bool) -> dict[str, Any]:
    """Train a row with a consensus step; on a part of the training examples, judged by the rest, if ``validation``."""
    return cell(config, label, gamma, seed, validation=validation).run()


@dataclass(frozen=True)
class Group:
    """One algorithm's trainings with one consensus step, one per seed."""

    label: str
    gamma: float | None
    runs: Sequence[Trained]

    def late(self, name: str) -> float:
        """Return a figure of :class:`fedcomp.experiments.decentralised.Evaluation`, mean over the last third of the
        evaluations; NaN when a run diverged.

        Nodes' own models go up and down with their last batches: one look is not enough.
        """
        if self.ended:
            return math.nan
        return mean(getattr(p, name) for run in self.runs for p in run.points[-max(1, len(run.points) // 3) :])

    @property
    def ended(self) -> str:
        """Why the first run that was ended was ended, in a few words; empty when none was."""
        return next((run.diverged.partition(". ")[0] for run in self.runs if run.diverged), "")

    @property
    def accuracy(self) -> float:
        """Of the nodes' own models; that of guessing when a run diverged, so that such a step is ranked last."""
        return CHANCE if self.ended else self.late("accuracy")


_COLUMNS: Final[Mapping[str, Any]] = {
    "row": "label",
    "gamma": "gamma",
    "nodes, %": lambda group: 100 * group.late("accuracy"),
    "worst node, %": lambda group: 100 * group.late("worst"),
    "mean model, %": lambda group: 100 * group.late("average"),
    "loss": lambda group: group.late("loss"),
    "disagreement": lambda group: group.late("consensus"),
    "ended by the watch": "ended",
}


def study(found: Found) -> Studied:
    """Sweep the consensus steps, train every row with its best one, average matrices, and run the rows without
    messages."""
    from fedcomp.tasks import get_task

    config = found.config

    def trained(places: Sequence[tuple[str, float]], *, validation: bool) -> list[Group]:
        cells = [{"label": label, "gamma": g, "seed": seed} for label, g in places for seed in repetitions(config)]
        # Named apart: a step that was swept on the validation split is another training than the one with the best.
        done = found.sweep(train, cells, "sweep" * validation, config=config, validation=validation)
        return [
            Group(label, gamma if label in TUNED else None, [run.read(Trained) for run in runs])
            for (label, gamma), runs in done.groups("label", "gamma").items()
        ]

    gammas = gammas_of(str(config.settings["gammas"]))
    tried = trained([(label, gamma) for label in TUNED for gamma in gammas], validation=True)
    best = {label: max((t for t in tried if t.label == label), key=lambda t: t.accuracy).gamma for label in TUNED}
    # What has no consensus step is trained with 0, which nothing reads.
    rows = trained([(label, best.get(label) or 0.0) for label in (*FIXED, *TUNED)], validation=False)
    groups = {group.label: group for group in rows}
    dense = groups[DENSE].runs[0].traffic
    tracks = {
        (each.kind, each.label): each.read(Track)
        for each in found.sweep(
            averaged,
            [dict(zip(("kind", "label"), key, strict=True)) for key in matrix_runs(config)],
            "averaging",
            config=config,
        )
    }
    relayed, differ = beside(
        found,
        "With messages: through Flower's server, on the engine chosen; whole messages include the start and models.",
    )
    quantities: dict[Any, Any] = {
        (one, f"accuracy over {other}"): groups[one].accuracy - groups[other].accuracy
        for one in groups
        for other in groups
    }
    for label, group in groups.items():
        quantities[label, "messages smaller than dense ones"] = ratio(group.runs[0].traffic, dense, headers=True)
        quantities[label, "accuracy of the mean model over D-PSGD"] = group.late("average") - groups[DENSE].late(
            "average"
        )
    # From twice the best on: the claim is how narrow the range of a sparse compressor is, not that some large step
    # diverges.
    wide = [t for t in tried if t.label == CHOCO_TOP and (t.gamma or 0.0) >= 2 * (best[CHOCO_TOP] or 0.0)]
    quantities[CHOCO_TOP, "runs from twice the best gamma on that came to an end"] = sum(not t.ended for t in wide)
    signs = [t for t in tried if t.label == CHOCO_SIGNS]
    quantities[CHOCO_SIGNS, "runs of the sweep that diverged"] = sum(bool(t.ended) for t in signs)
    return Studied(
        {**quantities, **_of_matrices(config, tracks), **differ},
        tables=[
            table(
                "Accuracy on the ring of nodes",
                _COLUMNS,
                rows,
                "Test accuracy of the nodes' own models, mean and worst, and of the mean of their models, all over the "
                "last third of the evaluations. Gamma: the best of the sweep on the validation split; empty: there is "
                "none to tune. Disagreement: distance of the models to their mean, relative to its norm.",
            ),
            table(
                "The sweep, on the validation split",
                {name: _COLUMNS[name] for name in ("row", "gamma", "nodes, %", "mean model, %", "ended by the watch")},
                tried,
                "A fifth of the training examples is held out and judges, after half of the iterations; the test split "
                "is not looked at. Empty: diverged.",
            ),
            cost_table(
                "What was sent, first seed",
                "row",
                {label: (group.runs[0].traffic, dense) for label, group in groups.items()},
                Energy.of(config.settings),
            ),
            *(_matrix_table(config, kind, tracks) for kind in KINDS),
            relayed,
        ],
        figures=[
            curves(
                "Accuracy against the consensus step size, validation split",
                tried,
                "gamma",
                "accuracy",
                "label",
                x_label="gamma",
                y_label="accuracy of the nodes' models",
                log_x=True,
                caption="A run that diverged counts as guessing. D-PSGD and PowerGossip have no such step size.",
            ),
            curves(
                "Accuracy against bytes on edges",
                [(group.label, point) for group in rows for point in group.runs[0].points],
                lambda place: place[1].edge_bytes,
                lambda place: place[1].accuracy,
                lambda place: place[0],
                x_label="edge bytes so far, headers included",
                y_label="accuracy of the nodes' models",
                log_x=True,
                x_bytes=True,
                caption="First seed; the rows with a consensus step at the best of their sweeps, whose runs are not "
                "counted.",
            ),
            *(_matrix_curves(kind, tracks) for kind in KINDS),
        ],
        tasks=[get_task("digits", **cell(config, DENSE, 0.0, config.seed).options).record()],
    )


KINDS: Final = ("random", "decaying")
"""Gaussian matrices; and those of singular values 1, 0.8, 0.64, ... in random directions."""

Tracks = Mapping[tuple[str, str], Track]
"""By kind and label."""


def _kept(config: Config) -> int:
    """Return how many entries of a matrix CHOCO sends."""
    return max(1, int(config.settings["matrix"]) ** 2 // 200)


def matrix_runs(config: Config) -> dict[tuple[str, str], tuple[dict[str, Any], int]]:
    """Return algorithm and iterations by kind of matrix and label."""
    rounds = int(config.settings["matrix_rounds"])
    # Of random matrices higher ranks get fewer iterations in proportion, so that all send equally many floats.
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
            # Without digests: bytes are compared, and these belong to the protocol.
            choco = {"name": "choco", "gamma": gamma, "compressor": top, "digest_every": 0}
            out[kind, f"CHOCO, gamma {gamma:g}"] = choco, length
    return out


def averaged(kind: str, label: str, *, config: Config) -> dict[str, Any]:
    """Average one matrix per node; all algorithms average the same ones of a kind."""
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
    return asdict(average(algorithm, Ring(n), values, rounds, layout=layout, seed=config.seed, every=every))


def _of_matrices(config: Config, tracks: Tracks) -> dict[Any, float]:
    """Rank only trades rounds, a warm start helps, and what CHOCO does on the same matrices."""
    flat, steep = (tracks[kind, "rank 1"] for kind in KINDS)
    chocos = {kind: [t for (k, label), t in tracks.items() if k == kind and "CHOCO" in label] for kind in KINDS}
    best = {kind: min(track.final for track in chocos[kind]) for kind in KINDS}
    ranks = [tracks["random", f"rank {r}"].final for r in (1, 2, 4)]
    # At equal iterations: CHOCO had half as many as rank 1.
    half = int(config.settings["matrix_rounds"]) // 2
    at = next((e for k, e in zip(flat.rounds, flat.errors, strict=True) if k >= half), math.nan)
    random: dict[str, float] = {
        "largest error of ranks 1, 2 and 4 at equal floats": largest(ranks),
        "the largest of these errors over the smallest": largest(ranks) / min(ranks),
        # Of gamma from 0.2 on.
        "CHOCO's runs of gamma >= 0.2 that came to an end": sum(math.isfinite(t.final) for t in chocos["random"][-2:]),
        "error of rank 1 over the best CHOCO, as many iterations": at / best["random"],
    }
    decaying = {
        "error of rank 1": steep.final,
        "error of rank 2": tracks["decaying", "rank 2"].final,
        "error of the best CHOCO over rank 1": best["decaying"] / steep.final,
    }
    cold = {
        (f"{kind} matrices", "error of a cold start over a warm one"): tracks[kind, "rank 1, cold start"].final
        / tracks[kind, "rank 1"].final
        for kind in KINDS
    }
    moved = largest(track.moved for (_, label), track in tracks.items() if "CHOCO" not in label)
    return {
        **{("random matrices", name): value for name, value in random.items()},
        **{("decaying matrices", name): value for name, value in decaying.items()},
        **cold,
        "largest change of the sum of all matrices by PowerGossip": moved,
    }


def _matrix_table(config: Config, kind: str, tracks: Tracks) -> Table:
    size = int(config.settings["matrix"])
    what = "Gaussian" if kind == "random" else f"of singular values that fall by {DECAY}"
    columns: dict[str, Any] = {
        "row": lambda run: run[0][1],
        "iterations": lambda run: run[1].rounds[-1],
        "message, bytes": lambda run: run[1].message,
        "relative error": lambda run: run[1].final,
        "sum moved by": lambda run: run[1].moved,
    }
    return table(
        f"Averaging {kind} matrices",
        columns,
        [run for run in tracks.items() if run[0][0] == kind],
        f"No gradients; every node begins with a matrix of its own, {size} x {size}, {what}. Error: distance to the "
        f"mean over what it was, empty when it diverged. CHOCO sends the largest {_kept(config)} entries.",
    )


def _matrix_curves(kind: str, tracks: Tracks) -> Curves:
    return curves(
        f"Averaging {kind} matrices",
        [
            (label if "CHOCO" in label else f"PowerGossip, {label}", track)
            for (k, label), track in tracks.items()
            if k == kind and len(track.rounds) > 2 and math.isfinite(track.final)
        ],
        lambda run: run[1].spent[1:],
        lambda run: run[1].errors[1:],
        lambda run: run[0],
        x_label="edge bytes a node has sent",
        y_label="relative error",
        log_y=True,
        x_bytes=True,
        caption="Runs that diverged are left out.",
    )
