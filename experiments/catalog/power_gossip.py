"""PowerGossip beside CHOCO-SGD and DeepSqueeze at the consensus step that suits each.

After Vogels, Karimireddy and Jaggi, "PowerGossip: Practical Low-Rank Communication Compression in Decentralized Deep
Learning", arXiv:2008.01425.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from fedcomp.experiments.averaging import Track, average
from fedcomp.experiments.decentralised import (
    COST_CAPTION,
    COST_COLUMNS,
    COST_OPTIONAL,
    ENERGY_OPTIONS,
    Energy,
    GossipCell,
    Trained,
    cost_cells,
    ratio,
    table_of,
)
from fedcomp.experiments.experiment import Config, Experiment, Option
from fedcomp.experiments.findings import Claim, Curves, Findings, Say, Series, Table, largest, mean
from fedcomp.experiments.grid import run_cells
from fedcomp.experiments.kit import judged
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.gossip.power_gossip import auto_rate
from fedcomp.gossip.topology import Ring
from fedcomp.layout import Layout
from fedcomp.rng import Key

TASK: Final = "digits"
TAKE: Final = ("task.", "lr", "momentum", "batch_size")

DENSE: Final = "D-PSGD"
RANK_1: Final = "PowerGossip, rank 1"
RANK_1_AUTO: Final = "PowerGossip, rank 1, rate of the graph"
RANK_2: Final = "PowerGossip, rank 2"
FIXED: Final = (DENSE, RANK_1, RANK_1_AUTO, RANK_2)
"""Without a consensus step."""
CHOCO_TOP: Final = "CHOCO, top-k"
CHOCO_SIGNS: Final = "CHOCO, scaled signs"
SQUEEZE: Final = "DeepSqueeze, top-k"
TUNED: Final = (CHOCO_TOP, CHOCO_SIGNS, SQUEEZE)
"""With one, which is swept on the validation split."""
ROWS: Final[Mapping[str, str]] = {DENSE: "dpsgd", RANK_1: "power-gossip", "CHOCO, top-k, gamma 0.1": "choco"}
"""What is also run as messages, with all settings of its row, and its system."""

CHANCE: Final = 0.1
"""Accuracy of a model that has diverged, of ten classes."""

SIZE: Final = 100
DECAY: Final = 0.8
RANDOM_GAMMAS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)


def _gammas(text: str) -> list[float]:
    values = sorted({float(part) for part in text.split(",")})
    if not all(0.0 < value <= 1.0 for value in values):
        raise ValueError("consensus step sizes are numbers above 0 and at most 1, parted by commas")
    return values


OPTIONS = {
    "seeds": Option(1, "trainings per setting, with the seeds from --seed on", least=1, most=100),
    "workers": Option(
        1, "processes that train side by side; changes nothing but the time", least=1, most=256, neutral=True
    ),
    "gammas": Option(
        "0.05,0.1,0.2,0.4,0.6,0.8,1.0", "consensus step sizes every row that has one is tried with", check=_gammas
    ),
    "fraction": Option(0.02, "density of CHOCO's and DeepSqueeze's top-k", above=0.0, most=1.0),
    "task.partition": Option("shards:3", "how examples are spread: iid, dirichlet:ALPHA, shards:COUNT, sorted"),
    "task.hidden": Option("32", "widths of the model's hidden layers"),
    "lr": Option(0.05, "step size", above=0.0),
    "momentum": Option(0.9, "heavy ball", least=0.0),
    "batch_size": Option(32, "examples of a gradient; 0: all of a node", least=0),
    "relay_rounds": Option(8, "iterations of the runs that go through messages", least=1),
    "matrix": Option(SIZE, "rows and columns of the matrices that are averaged without gradients", least=8),
    "matrix_rounds": Option(
        2000, "iterations of averaging at rank 1; fewer at higher ranks, for equal floats", least=8
    ),
    **ENERGY_OPTIONS,
}


def rows(config: Config) -> list[RunSpec]:
    """Return a few systems to be run as messages, for as many rounds as ``relay_rounds`` says."""
    Energy.of(config.settings)  # what cannot be is refused before anything runs
    short = replace(config, rounds=min(config.rounds, int(config.settings["relay_rounds"])))
    return [
        short.spec(system, label, TASK, take=TAKE, evaluate_every=short.rounds or 1) for label, system in ROWS.items()
    ]


def _algorithm(config: Config, label: str, gamma: float = 0.0) -> dict[str, Any]:
    """Return a row's algorithm; ``gamma`` counts for those that have one."""
    top = {"id": "topk", "density": config.settings["fraction"]}
    made: dict[str, dict[str, Any]] = {
        DENSE: {"name": "dpsgd"},
        RANK_1: {"name": "power-gossip"},
        RANK_1_AUTO: {"name": "power-gossip", "rate": auto_rate(Ring(config.clients))},
        RANK_2: {"name": "power-gossip", "rank": 2},
        CHOCO_TOP: {"name": "choco", "gamma": gamma, "compressor": top},
        CHOCO_SIGNS: {"name": "choco", "gamma": gamma, "compressor": {"id": "scaledsign"}},
        SQUEEZE: {"name": "deepsqueeze", "gamma": gamma, "compressor": top},
    }
    return {**made[label], "lr": config.settings["lr"], "momentum": config.settings["momentum"]}


def _cell(config: Config, label: str, gamma: float, seed: int, *, validation: bool = False) -> GossipCell:
    settings, rounds = config.settings, max(1, config.rounds // 2) if validation else config.rounds
    name = f"{label}, gamma {gamma:g}" if label in TUNED else label
    return GossipCell(
        f"{name}, seed {seed}" + ", validation split" * validation,
        _algorithm(config, label, gamma),
        "ring",
        config.clients,
        rounds,
        seed,
        TASK,
        {"hidden": str(settings["task.hidden"]), "partition": str(settings["task.partition"])},
        {"batch_size": settings["batch_size"], "every": max(1, rounds // 30), "watch": True},
        validation,
    )


@dataclass(frozen=True)
class Group:
    """One algorithm's trainings, one per seed."""

    runs: Sequence[Trained]

    @property
    def diverged(self) -> bool:
        """Whether one of them was ended because it grew."""
        return any(run.diverged for run in self.runs)

    def late(self, name: str) -> float:
        """Return a figure of :class:`fedcomp.experiments.decentralised.Point`, mean over the last third of the
        evaluations.

        NaN when a run diverged. Nodes' own models go up and down with their last batches: one look is not enough.
        """
        if self.diverged:
            return math.nan
        return mean(getattr(p, name) for run in self.runs for p in run.points[-max(1, len(run.points) // 3) :])

    @property
    def accuracy(self) -> float:
        """Of the nodes' own models; that of guessing when a run diverged."""
        return CHANCE if self.diverged else self.late("accuracy")


Sweep = Mapping[str, Mapping[float, Group]]
"""By row and consensus step: trainings judged on the validation split."""


def best(sweep: Mapping[float, Group]) -> float:
    """Return the consensus step with the highest accuracy of the nodes' models."""
    return max(sweep, key=lambda gamma: sweep[gamma].accuracy)


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Sweep the consensus steps, train every row with its best one, average matrices, and run the rows without
    messages."""
    from fedcomp.experiments.relayed import beside
    from fedcomp.tasks import get_task

    workers = int(config.settings["workers"])
    seeds = range(config.seed, config.seed + int(config.settings["seeds"]))

    def trained(places: Mapping[Any, tuple[str, float]], *, validation: bool) -> dict[Any, Group]:
        cells = {
            place: [_cell(config, *what, seed, validation=validation) for seed in seeds]
            for place, what in places.items()
        }
        found = run_cells([cell for group in cells.values() for cell in group], say, workers)
        return {place: Group([found[cell.name] for cell in group]) for place, group in cells.items()}

    gammas = _gammas(str(config.settings["gammas"]))
    tried = trained({(label, gamma): (label, gamma) for label in TUNED for gamma in gammas}, validation=True)
    sweep = {label: {gamma: tried[label, gamma] for gamma in gammas} for label in TUNED}
    chosen = {label: best(sweep[label]) for label in TUNED}
    groups = trained({label: (label, chosen.get(label, 0.0)) for label in (*FIXED, *TUNED)}, validation=False)
    averaging = Averaging(config, say)
    relayed, bits = beside(results, say, _RELAYED)
    options = _cell(config, DENSE, 0.0, config.seed).options
    return Findings(
        tables=[
            _accuracy(groups, chosen),
            _tried(sweep),
            _costs(groups, Energy.of(config.settings)),
            *averaging.tables(),
            relayed,
        ],
        figures=[_sweep_figure(sweep), _training(groups), *averaging.figures()],
        values={**_values(groups, sweep), **averaging.values(), **bits},
        tasks=[get_task(TASK, **options).record()],
    )


def _percent(value: float) -> float:
    return round(100 * value, 2)


def _ended(group: Group) -> str:
    return next((run.diverged.partition(". ")[0] for run in group.runs if run.diverged), "")


def _accuracy(groups: Mapping[str, Group], chosen: Mapping[str, float]) -> Table:
    table: list[list[Any]] = []
    for label, group in groups.items():
        shown = (_percent(group.late(name)) for name in ("accuracy", "worst", "average"))
        late = (group.late("loss"), group.late("consensus"))
        table.append([label, chosen.get(label), *shown, *late, _ended(group)])
    columns = (
        "algorithm",
        "gamma",
        "nodes, %",
        "worst node, %",
        "mean model, %",
        "loss",
        "disagreement",
        "ended by the watch",
    )
    return Table(
        "Accuracy on the ring of nodes",
        columns,
        table,
        "Test accuracy of the nodes' own models, mean and worst, and of the mean of their models, all over the last "
        "third of the evaluations. Gamma: the best of the sweep on the validation split; empty: there is none to tune. "
        "Disagreement: distance of the models to their mean, relative to its norm.",
    )


def _tried(sweep: Sweep) -> Table:
    table: list[list[Any]] = [
        [label, gamma, _percent(group.late("accuracy")), _percent(group.late("average")), _ended(group)]
        for label, tried in sweep.items()
        for gamma, group in tried.items()
    ]
    return Table(
        "The sweep, on the validation split",
        ("algorithm", "gamma", "nodes, %", "mean model, %", "ended by the watch"),
        table,
        "A fifth of the training examples is held out and judges, after half of the iterations; the test split is not "
        "looked at. Empty: diverged.",
    )


def _sweep_figure(sweep: Sweep) -> Curves:
    series = [
        Series(label, list(tried), [group.accuracy for group in tried.values()]) for label, tried in sweep.items()
    ]
    return Curves(
        "Accuracy against the consensus step size, validation split",
        "gamma",
        "accuracy of the nodes' models",
        series,
        log_x=True,
        caption="A run that diverged counts as guessing. D-PSGD and PowerGossip have no such step size.",
    )


def _training(groups: Mapping[str, Group]) -> Curves:
    series = []
    for label, group in groups.items():
        points = group.runs[0].points
        series.append(Series(label, [p.edge_bytes for p in points], [p.accuracy for p in points]))
    return Curves(
        "Accuracy against bytes on edges",
        "edge bytes so far, headers included",
        "accuracy of the nodes' models",
        series,
        log_x=True,
        x_bytes=True,
        caption="First seed; the rows with a consensus step at the best of their sweeps, whose runs are not counted.",
    )


def _costs(groups: Mapping[str, Group], energy: Energy) -> Table:
    dense = groups[DENSE].runs[0].traffic
    table = [[label, *cost_cells(group.runs[0].traffic, dense, energy)] for label, group in groups.items()]
    columns = ("algorithm", *COST_COLUMNS)
    return table_of("What was sent, first seed", columns, table, COST_CAPTION, optional=COST_OPTIONAL)


def _values(groups: Mapping[str, Group], sweep: Sweep) -> dict[str, float]:
    dense, traffic = groups[DENSE], groups[DENSE].runs[0].traffic
    values: dict[str, float] = {}
    for label, tried in sweep.items():
        gamma = best(tried)
        doubled = [group for other, group in tried.items() if other >= 2 * gamma]
        values |= {
            f"{label}: best gamma": gamma,
            f"{label}: runs from twice the best gamma on that came to an end": float(
                sum(not group.diverged for group in doubled)
            ),
            f"{label}: runs of the sweep that diverged": float(sum(group.diverged for group in tried.values())),
            f"{label}: the sweep over the run that is used, edge bytes": sum(
                run.traffic.edge_bytes for group in tried.values() for run in group.runs
            )
            / sum(run.traffic.edge_bytes for run in groups[label].runs),
        }
    for label in (RANK_1, RANK_1_AUTO, RANK_2):
        group = groups[label]
        values |= {f"{label} over {other}": group.accuracy - groups[other].accuracy for other in TUNED}
        values[f"{label}: nodes over D-PSGD"] = group.accuracy - dense.accuracy
        values[f"{label}: mean model over D-PSGD"] = group.late("average") - dense.late("average")
        values[f"{label}: times smaller"] = ratio(group.runs[0].traffic, traffic, headers=True)
    return values


class Averaging:
    """Matrices averaged without gradients: what rank, warm start and spectrum do, and CHOCO with its sweep."""

    def __init__(self, config: Config, say: Say) -> None:
        self.config, self.say = config, say
        self.size, self.rounds = int(config.settings["matrix"]), int(config.settings["matrix_rounds"])
        self.half, self.short = self.rounds // 2, max(2, 3 * self.rounds // 10)
        self.k = max(1, self.size**2 // 200)
        power = {"name": "power-gossip", "values": "float32"}
        self.random = {
            "rank 1": self._run("random", "rank 1", power, self.rounds),
            "rank 2": self._run("random", "rank 2", {**power, "rank": 2}, self.half),
            "rank 4": self._run("random", "rank 4", {**power, "rank": 4}, self.half // 2),
            "rank 1, cold start": self._run("random", "rank 1, cold", {**power, "warm_start": False}, self.rounds),
        }
        self.decaying = {
            "rank 1": self._run("decaying", "rank 1", power, self.short),
            "rank 2": self._run("decaying", "rank 2", {**power, "rank": 2}, self.short),
            "rank 1, cold start": self._run("decaying", "rank 1, cold", {**power, "warm_start": False}, self.short),
        }
        self.chocos = {
            kind: {gamma: self._choco(kind, gamma, rounds) for gamma in RANDOM_GAMMAS}
            for kind, rounds in (("random", self.half), ("decaying", self.short))
        }

    def _choco(self, kind: str, gamma: float, rounds: int) -> Track:
        top = {"id": "topk", "density": self.k / self.size**2}
        algorithm = {"name": "choco", "gamma": gamma, "compressor": top, "digest_every": 0}
        return self._run(kind, f"CHOCO {gamma:g}", algorithm, rounds)

    def _run(self, kind: str, label: str, algorithm: Mapping[str, Any], rounds: int) -> Track:
        def make() -> dict[str, Any]:
            values = self._matrices(kind)
            layout = Layout.of({"m": np.zeros((self.size, self.size), np.float32)}, lambda *_: None)
            graph, every = Ring(self.config.clients), max(1, rounds // 40)
            return average(
                algorithm, graph, values, rounds, layout=layout, seed=self.config.seed, every=every
            ).to_json()

        name = f"averaging {kind} matrices, {label}"
        if not self.say.has(name):
            self.say(name)
        return Track.from_json(self.say.cell(name, make))

    def _matrices(self, kind: str) -> np.ndarray:
        """Return one matrix per node, flat: Gaussian, or of singular values 1, 0.8, 0.64, ... in random directions."""
        n, m = self.config.clients, self.size
        generator = Key(self.config.seed, f"power-gossip/{kind}").generator()
        if kind == "random":
            return generator.standard_normal((n, m * m))
        made = []
        for _ in range(n):
            left, right = (np.linalg.qr(generator.standard_normal((m, m)))[0] for _ in range(2))
            made.append((left * DECAY ** np.arange(m) @ right.T).reshape(-1))
        return np.stack(made)

    def at(self, track: Track, rounds: int) -> float:
        """Return the error after ``rounds``, or the next look after it."""
        return next((e for k, e in zip(track.rounds, track.errors, strict=True) if k >= rounds), math.nan)

    def best(self, kind: str) -> float:
        """Return the smallest error of CHOCO's sweep."""
        return min(track.final for track in self.chocos[kind].values())

    def tables(self) -> list[Table]:
        """Return one table per kind of matrix."""
        made = []
        for kind, power in (("random", self.random), ("decaying", self.decaying)):
            table: list[list[Any]] = [
                [label, track.rounds[-1], track.letter, track.final, track.moved] for label, track in power.items()
            ]
            for gamma, track in self.chocos[kind].items():
                final = track.final if math.isfinite(track.final) else None
                table.append([f"CHOCO, gamma {gamma:g}", track.rounds[-1], track.letter, final, track.moved])
            shape = f"{self.size} x {self.size}"
            what = f"Gaussian {shape}" if kind == "random" else f"{shape} with singular values that fall by {DECAY}"
            made.append(
                Table(
                    f"Averaging {kind} matrices",
                    ("algorithm", "iterations", "letter, bytes", "relative error", "sum moved by"),
                    table,
                    f"No gradients; every node begins with a {what} of its own. Error: distance to the mean over what "
                    f"it was, empty when it diverged. CHOCO sends the largest {self.k} entries.",
                )
            )
        return made

    def figures(self) -> list[Curves]:
        """Return error against bytes, one plot per kind."""
        made = []
        for kind, power in (("random", self.random), ("decaying", self.decaying)):
            shown = {f"PowerGossip, {label}": track for label, track in power.items()}
            shown |= {f"CHOCO, {gamma:g}": track for gamma, track in self.chocos[kind].items()}
            series = [
                Series(label, [k * t.sent for k in t.rounds][1:], list(t.errors)[1:])
                for label, t in shown.items()
                if len(t.rounds) > 2 and math.isfinite(t.final)
            ]
            caption = "Runs that diverged are left out."
            title, x_label = f"Averaging {kind} matrices", "edge bytes a node has sent"
            made.append(Curves(title, x_label, "relative error", series, log_y=True, x_bytes=True, caption=caption))
        return made

    def values(self) -> dict[str, float]:
        """Return what the claims are about."""
        ranks = [self.random[f"rank {r}"].final for r in (1, 2, 4)]
        late = [gamma for gamma in RANDOM_GAMMAS if gamma >= 0.2]
        tracks = [*self.random.values(), *self.decaying.values()]
        return {
            "random: largest error of three ranks": largest(ranks),
            "random: spread of three ranks": largest(ranks) / min(ranks),
            "random: cold over warm": self.random["rank 1, cold start"].final / self.random["rank 1"].final,
            "random: rank 1 over the best CHOCO": self.at(self.random["rank 1"], self.half) / self.best("random"),
            "random: CHOCO runs of gamma >= 0.2 that came to an end": float(
                sum(math.isfinite(self.chocos["random"][gamma].final) for gamma in late)
            ),
            "decaying: rank 1": self.decaying["rank 1"].final,
            "decaying: rank 2": self.decaying["rank 2"].final,
            "decaying: cold over warm": self.decaying["rank 1, cold start"].final / self.decaying["rank 1"].final,
            "decaying: best CHOCO over rank 1": self.best("decaying") / self.decaying["rank 1"].final,
            "sum of all matrices moved by": largest(track.moved for track in tracks),
        }


_RELAYED: Final = (
    "With messages: through Flower's server, on the engine chosen; whole messages include the start and models."
)


def claims(config: Config, results: Mapping[str, RunResult], findings: Findings) -> list[Claim]:
    """Untuned PowerGossip is as good as dense gossip at rank 2; CHOCO with signs at gamma 1 is better than rank 1."""
    values = findings.values
    design = "design study, other data and seeds"
    made = [
        Claim(
            "rank 1, rate of the graph: accuracy of the nodes' models over D-PSGD's",
            values[f"{RANK_1_AUTO}: nodes over D-PSGD"],
            ">=",
            -0.01,
            f"goal, as in the {design}: 0.979 against 0.975; met or missed by some tenths, see the notes",
            gate=False,
        ),
        Claim(
            "rank 1, rate 1: accuracy of the nodes' models over D-PSGD's",
            values[f"{RANK_1}: nodes over D-PSGD"],
            ">=",
            -0.01,
            f"goal, as in the {design}: 0.979 against 0.975; missed, see the notes",
            gate=False,
        ),
        Claim(
            "rank 2: accuracy of the nodes' models over D-PSGD's",
            values[f"{RANK_2}: nodes over D-PSGD"],
            ">=",
            -0.01,
            f"{design}: 0.982 against 0.975",
        ),
        Claim(
            "rank 1: accuracy of the mean model over D-PSGD's",
            values[f"{RANK_1}: mean model over D-PSGD"],
            ">=",
            -0.01,
            "on par, as the authors say",
        ),
        Claim(
            "rank 1: letters smaller than dense ones, headers included",
            values[f"{RANK_1}: times smaller"],
            ">=",
            20.0,
            f"{design}: 21.7 without headers",
        ),
        Claim(
            "rank 2: letters smaller than dense ones, headers included",
            values[f"{RANK_2}: times smaller"],
            ">=",
            12.5,
            f"{design}: 13.4 without headers",
        ),
        Claim(
            "rank 1, untuned: accuracy over CHOCO's with top-k, tuned",
            values[f"{RANK_1} over {CHOCO_TOP}"],
            ">=",
            -0.01,
            f"{design}: 0.979 against 0.976",
        ),
        Claim(
            "rank 1, untuned: accuracy over CHOCO's with scaled signs, tuned",
            values[f"{RANK_1} over {CHOCO_SIGNS}"],
            ">=",
            -0.01,
            "goal: on par with tuned compressors, as the authors say; missed: on the nodes' own models signs of nearly "
            "the same length are better, and bear a gamma of 1",
            gate=False,
        ),
        Claim(
            "rank 2, untuned: accuracy over CHOCO's with scaled signs, tuned",
            values[f"{RANK_2} over {CHOCO_SIGNS}"],
            ">=",
            -0.01,
            "the same goal, with messages half as long again as those of signs",
            gate=False,
        ),
        Claim(
            "CHOCO, top-k: runs of the sweep from twice the best gamma on that came to an end",
            values[f"{CHOCO_TOP}: runs from twice the best gamma on that came to an end"],
            "==",
            0.0,
            f"{design}: 0.976 at 0.1, 0.112 at 0.3",
        ),
        Claim(
            "CHOCO, scaled signs: runs of the sweep that diverged",
            values[f"{CHOCO_SIGNS}: runs of the sweep that diverged"],
            "==",
            0.0,
            "measured before: 0.45 to 1 converge on this ring, so that there is little to tune",
        ),
        Claim(
            "rank 1, untuned: accuracy over DeepSqueeze's, tuned",
            values[f"{RANK_1} over {SQUEEZE}"],
            ">=",
            0.02,
            f"{design}: 0.979 against 0.939",
        ),
        Claim(
            "random matrices, ranks 1, 2 and 4 at equal floats: the largest relative error",
            values["random: largest error of three ranks"],
            "<=",
            6e-3,
            f"{design}: 4.8e-3 to 4.9e-3",
        ),
        Claim(
            "random matrices: the largest of these errors over the smallest",
            values["random: spread of three ranks"],
            "<=",
            1.25,
            "rank only trades rounds",
        ),
        Claim(
            "random matrices: error of a cold start over a warm one",
            values["random: cold over warm"],
            ">=",
            2.0,
            f"{design}: 1.4e-2 over 4.9e-3",
        ),
        Claim(
            "random matrices: CHOCO's runs of gamma >= 0.2 that came to an end",
            values["random: CHOCO runs of gamma >= 0.2 that came to an end"],
            "<=",
            0.0,
            f"{design}: diverges from 0.2 on",
        ),
        Claim(
            "random matrices: error of rank 1 over the best CHOCO, same number of iterations",
            values["random: rank 1 over the best CHOCO"],
            "<=",
            1.0,
            f"goal; {design} has 4.3e-2 over 2.3e-2: on a flat spectrum a tuned top-k is better",
            gate=False,
        ),
        Claim("decaying spectrum: error of rank 1", values["decaying: rank 1"], "<=", 5e-2, f"{design}: 4.2e-2"),
        Claim("decaying spectrum: error of rank 2", values["decaying: rank 2"], "<=", 1.2e-2, f"{design}: 9.2e-3"),
        Claim(
            "decaying spectrum: error of a cold start over a warm one",
            values["decaying: cold over warm"],
            ">=",
            2.0,
            f"{design}: 0.196 over 4.2e-2",
        ),
        Claim(
            "decaying spectrum: error of the best CHOCO over rank 1",
            values["decaying: best CHOCO over rank 1"],
            ">=",
            1.0,
            f"{design}: 8.4e-2 over 4.2e-2",
        ),
        Claim(
            "the sum of all matrices moved by, the largest coordinate of all runs of PowerGossip",
            values["sum of all matrices moved by"],
            "<=",
            1e-10,
            "theory: what one end adds the other subtracts, bit for bit",
        ),
    ]
    for label in results:
        for what in ("model", "letters"):
            name = (
                f"{label}: bytes of the {what} that differ"
                if what == "model"
                else f"{label}: bytes of letters that differ"
            )
            text = f"{label}: bytes of the {what} that differ with messages and without"
            made.append(Claim(text, values[name], "<=", 0.0, "the same relay and the same nodes"))
    return made


def answer(config: Config, results: Mapping[str, RunResult], findings: Findings) -> str:
    """Return what came out, in this run's figures."""
    values = findings.values
    return (
        f"Untuned, rank 1 sends messages {values[f'{RANK_1}: times smaller']:.0f} times smaller than dense ones; its "
        f"nodes' models are {100 * values[f'{RANK_1}: nodes over D-PSGD']:+.1f} points from D-PSGD's, "
        f"{100 * values[f'{RANK_1} over {CHOCO_TOP}']:+.1f} from tuned CHOCO's with top-k and "
        f"{100 * values[f'{RANK_1} over {CHOCO_SIGNS}']:+.1f} with scaled signs."
    )


EXPERIMENT = Experiment(
    name="power_gossip",
    question="Does low-rank gossip without a number to tune hold what CHOCO holds at its best consensus step size?",
    rows=rows,
    options=OPTIONS,
    rounds=1500,
    clients=8,
    minutes=6.0,
    quick=(
        "rounds=3",
        "clients=3",
        "gammas=0.1,0.3",
        "task.hidden=8",
        "task.partition=iid",
        "relay_rounds=2",
        "matrix=8",
        "matrix_rounds=16",
    ),
    measure=judged(measure, claims, answer),
    notes=(
        "The nodes form a ring; each holds the digits of about three classes, so that a node's own data teach it "
        "about a third of the task. Every algorithm has the same step size and momentum, chosen once for D-PSGD. CHOCO "
        "and DeepSqueeze are tried with the same consensus steps for half of the iterations, judged by a fifth of the "
        "training examples on which nobody trains, and then trained on all of them with the best; the test split is "
        "looked at once. The runs through messages are short and compared with the same runs in one process.\n\n"
        "A node's own model has just been moved towards its own data, and at rank 1 neighbours pull it back less than "
        "whole models do: it is one to two points behind D-PSGD's, while the mean of the models is not, nor are the "
        "nodes' own at rank 2 (seed 0)."
    ),
)
