"""The part of the experiment ``sparsifiers`` about the server: FedAvg, FedAdam and its kin on dense and sparse updates.

Each row has the server's step size and tau that did best on a validation split of the training images, over one grid
for all. What the drop-in pair does with a sparse mean (:mod:`fedcomp.strategies.adaptive`) is shown beside Flower's own
rule, which takes a coordinate of which nothing arrived for one without a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from fedcomp.experiments.findings import Claim, Table, mean
from fedcomp.experiments.kit import Records, Say, Sweep, claim, repetitions, table
from fedcomp.experiments.options import Config, Option
from fedcomp.rules import Int, Real

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
    "server_rounds": Option(25, Int(1), "rounds of the rows with an adaptive server"),
    "server_lr": Option(
        0.1, Real(above=0.0), "step size of the clients' SGD there: one pass over their images a round"
    ),
}


@dataclass(frozen=True)
class ServerRow:
    """A server and what reaches it."""

    server: str
    way: str

    @property
    def grid(self) -> Sequence[tuple[float, float]]:
        """The step sizes and taus to choose from; FedAvg has none."""
        return GRID if self.server != "FedAvg" else ((1.0, 0.0),)


def train(
    server: str, way: str, eta: float, tau: float, seed: int, *, config: Config, tuning: bool = False
) -> dict[str, Any]:
    """Train a row with a step size and tau; on the validation split if ``tuning``."""
    from fedcomp.experiments.central import Plan, measured
    from fedcomp.tasks import get_task

    top = {"id": "feedback", "codec": {"id": "topk", "density": float(config.settings["density"])}}
    moments = {"inner": SERVERS[server], "inner.eta": eta, "inner.tau": tau}
    plan = Plan(
        get_task("digits", hidden=str(config.settings["task.hidden"]), validation=tuning),
        config.clients,
        int(config.settings["server_rounds"]),
        seed + tuning * TUNING_SEED,
        {"lr": float(config.settings["server_lr"]), "batch_size": 32, "epochs": 1},
        1,
        {} if server == "FedAvg" else moments,
        way == EVERYWHERE,
    )
    return measured(plan, {"id": "identity"} if way == DENSE else top)


# FedAvg has no moments; FedAdagrad's do not move where nothing arrived.
ROWS: Final = tuple(
    ServerRow(server, way)
    for server, way in product(SERVERS, WAYS)
    if way != EVERYWHERE or server in ("FedAdam", "FedYogi")
)


def measure(config: Config, say: Say) -> tuple[Table, list[Claim]]:
    """Tune every row and train it with the experiment's seeds: sparse updates cost an adaptive server little."""
    processes = int(config.settings["workers"])

    def cells(chosen: Mapping[ServerRow, Sequence[tuple[float, float]]], seeds: Sequence[int]) -> list[dict[str, Any]]:
        return [
            {"server": row.server, "way": row.way, "eta": eta, "tau": tau, "seed": seed}
            for row, settings in chosen.items()
            for eta, tau in settings
            for seed in seeds
        ]

    tuned = {row: row.grid for row in ROWS if len(row.grid) > 1}
    shared: dict[str, Any] = {"config": config, "tuning": True}
    tried = Sweep(train, cells(tuned, [config.seed]), "tuning servers", shared)(say, processes)
    # Each server and way by itself: one step size for all would favour the one that it fits.
    best = {key: max(group, key=lambda r: r.settled) for key, group in tried.groups("server", "way").items()}
    chosen = {row: row.grid for row in ROWS} | {
        row: [(best[row.server, row.way].eta, best[row.server, row.way].tau)] for row in tuned
    }
    done = Sweep(train, cells(chosen, repetitions(config)), "servers", {"config": config})(say, processes)
    groups = {ServerRow(*key): group for key, group in done.groups("server", "way").items()}
    source = "goal: both tuned over the same grid; the mean over the last five rounds"
    return _table(groups), [
        claim(
            f"{row.server}, {row.way}: points of accuracy lost against dense",
            _lost(row, groups),
            f"<= {LOST}",
            source,
        )
        for row in ROWS
        if row.way == SPARSE and row.server != "FedAvg"
    ]


def _lost(row: ServerRow, groups: Mapping[ServerRow, Records]) -> float:
    dense = groups[ServerRow(row.server, DENSE)]
    return 100 * (mean(dense.each("settled")) - mean(groups[row].each("settled")))


def _table(groups: Mapping[ServerRow, Records]) -> Table:
    def sent(row: ServerRow) -> float:
        return mean(groups[row].each("uplink"))

    def tuned(row: ServerRow, name: str) -> float | None:
        return None if row.server == "FedAvg" else groups[row][0][name]

    columns: dict[str, Any] = {
        "server": lambda row: f"{row.server}, {row.way}",
        "eta": lambda row: tuned(row, "eta"),
        "tau": lambda row: tuned(row, "tau"),
        "test, %": lambda row: round(100 * mean(groups[row].each("settled")), 1),
        "points lost": lambda row: round(_lost(row, groups), 1),
        "stale step, %": lambda row: (
            None if row.server == "FedAvg" or row.way == DENSE else round(100 * mean(groups[row].each("stale")))
        ),
        "uplink ratio": lambda row: round(sent(ServerRow(row.server, DENSE)) / sent(row), 1),
    }
    return table(
        "Server optimisers on sparse updates",
        columns,
        groups,
        "Clients make one pass over their images a round. Step size eta and tau are the best of the same grid on a "
        "validation split, for every row by itself. Test: the mean over the last five rounds and all seeds; points "
        "lost: against the same server with dense updates. Stale step: share of the server's step, squared, on "
        "coordinates of which nothing arrived in that round.",
    )
