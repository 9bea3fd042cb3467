"""The part of the experiment ``sparsifiers`` about the server: FedAvg, FedAdam and its kin on dense and sparse updates.

Each row has the server's step size and tau that did best on a validation split of the training images, over one grid
for all. What the drop-in pair does with a sparse mean (:mod:`fedcomp.strategies.adaptive`) stands beside Flower's own
rule, which takes a coordinate of which nothing arrived for one without a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from fedcomp.experiments.experiment import Config, Option
from fedcomp.experiments.findings import Claim, Say, Table, mean
from fedcomp.experiments.grid import Cell, Measured, run_cells

SERVERS: Final = {"FedAvg": "fedavg", "FedAdam": "fedadam", "FedYogi": "fedyogi", "FedAdagrad": "fedadagrad"}
DENSE: Final = "dense"
SPARSE: Final = "top-k + EF"
EVERYWHERE: Final = "top-k + EF, moments everywhere"
WAYS: Final = (DENSE, SPARSE, EVERYWHERE)

GRID: Final = tuple(product((0.01, 0.03, 0.1, 0.3, 1.0), (1e-3, 1e-2)))
"""Pairs of the server's step size and tau that every row with moments is tuned over."""

TUNING_SEED: Final = 2**32
"""Added to the seed of the trainings that the settings are chosen by."""

LOST: Final = 2.0
"""Goal: points of accuracy that sparse updates may cost an adaptive server."""

OPTIONS: Final = {
    "server_rounds": Option(25, "rounds of the rows with an adaptive server", least=1),
    "server_lr": Option(0.1, "step size of the clients' SGD there: one pass over their images a round", above=0.0),
}


@dataclass(frozen=True)
class Row:
    """A server and what reaches it."""

    server: str
    way: str

    @property
    def grid(self) -> Sequence[tuple[float, float]]:
        """The step sizes and taus to choose from; FedAvg has none."""
        return GRID if self.server != "FedAvg" else ((1.0, 0.0),)

    def cell(self, config: Config, setting: tuple[float, float], seed: int, *, tuning: bool = False) -> Cell:
        """Return one training, on the validation split if ``tuning``."""
        eta, tau = setting
        density = float(config.settings["density"])
        codec: dict[str, Any] = {"id": "feedback", "codec": {"id": "topk", "density": density}}
        server: dict[str, Any] = {"inner": SERVERS[self.server], "inner.eta": eta, "inner.tau": tau}
        return Cell(
            name=f"{self.server}, {self.way}, eta {eta:g}, tau {tau:g}, {'tuning ' * tuning}seed {seed}",
            codec={"id": "identity"} if self.way == DENSE else codec,
            task="digits",
            options={"hidden": str(config.settings["task.hidden"]), "validation": tuning},
            clients=config.clients,
            rounds=int(config.settings["server_rounds"]),
            seed=seed + tuning * TUNING_SEED,
            training={"lr": float(config.settings["server_lr"]), "batch_size": 32, "epochs": 1},
            every=1,
            server={} if self.server == "FedAvg" else server,
            everywhere=self.way == EVERYWHERE,
        )


# FedAvg has no moments; FedAdagrad's do not move where nothing arrived.
ROWS: Final = tuple(
    Row(server, way) for server, way in product(SERVERS, WAYS) if way != EVERYWHERE or server in ("FedAdam", "FedYogi")
)


def measure(config: Config, say: Say) -> tuple[Table, dict[str, float]]:
    """Tune every row, train it with the experiment's seeds, and return the table and what the claims read."""
    workers = int(config.settings["workers"])
    tried = {
        row: {setting: row.cell(config, setting, config.seed, tuning=True) for setting in row.grid}
        for row in ROWS
        if len(row.grid) > 1
    }
    found = run_cells([cell for cells in tried.values() for cell in cells.values()], say, workers)
    chosen = {row: row.grid[0] for row in ROWS}
    for row, options in tried.items():
        reached = {setting: found[cell.name].settled for setting, cell in options.items()}
        chosen[row] = max(reached, key=reached.__getitem__)
    seeds = range(config.seed, config.seed + int(config.settings["seeds"]))
    cells = {row: [row.cell(config, chosen[row], seed) for seed in seeds] for row in ROWS}
    done = run_cells([cell for group in cells.values() for cell in group], say, workers)
    groups = {row: [done[cell.name] for cell in group] for row, group in cells.items()}
    values = {_key(row): _lost(row, groups) for row in ROWS}
    return _table(chosen, groups), values


def _key(row: Row) -> str:
    return f"{row.server}, {row.way}: points lost"


def _lost(row: Row, groups: Mapping[Row, Sequence[Measured]]) -> float:
    dense = groups[Row(row.server, DENSE)]
    return 100 * (mean(m.settled for m in dense) - mean(m.settled for m in groups[row]))


def _table(chosen: Mapping[Row, tuple[float, float]], groups: Mapping[Row, Sequence[Measured]]) -> Table:
    rows = []
    for row, group in groups.items():
        dense = groups[Row(row.server, DENSE)]
        tuned = row.server != "FedAvg"
        rows.append(
            [
                f"{row.server}, {row.way}",
                chosen[row][0] if tuned else None,
                chosen[row][1] if tuned else None,
                round(100 * mean(m.settled for m in group), 1),
                round(_lost(row, groups), 1),
                round(100 * mean(m.stale for m in group)) if tuned and row.way != DENSE else None,
                round(mean(m.uplink for m in dense) / mean(m.uplink for m in group), 1),
            ]
        )
    return Table(
        "Server optimisers on sparse updates",
        ("server", "eta", "tau", "test, %", "points lost", "stale step, %", "uplink ratio"),
        rows,
        "Clients make one pass over their images a round. Step size eta and tau are the best of the same grid on a "
        "validation split, for every row by itself. Test: the mean over the last five rounds and all seeds; points "
        "lost: against the same server with dense updates. Stale step: share of the server's step, squared, on "
        "coordinates of which nothing arrived in that round.",
    )


def claims(values: Mapping[str, float]) -> list[Claim]:
    """Sparse updates cost an adaptive server little."""
    source = "goal: both tuned over the same grid; the mean over the last five rounds"
    return [
        Claim(f"{row.server}, {row.way}: points of accuracy lost against dense", values[_key(row)], "<=", LOST, source)
        for row in ROWS
        if row.way == SPARSE and row.server != "FedAvg"
    ]
