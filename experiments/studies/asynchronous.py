"""Clients of different speeds: rounds with and without a deadline, and buffered steps, on simulated and real clocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import curves, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.tables import Found

SYNCHRONOUS: Final = "synchronous"
DEADLINES: Final[Mapping[str, float]] = {f"deadline, {share} %": share / 100 for share in (50, 70, 90)}
"""By row, the quantile of the clients' own past times; the best row is the rival."""

DEADLINE: Final = "deadline, 70 %"
BUFFERED: Final = "buffered"
SPARSE: Final = "buffered, top-k 5 % + EF"
SINGLE: Final = "asynchronous"

ROWS: Final[Mapping[str, str]] = {
    SYNCHRONOUS: "every round waits for all",
    **{
        row: f"a round ends at 1.2 times the {100 * q:g} % quantile of the clients' own past times"
        for row, q in DEADLINES.items()
    },
    BUFFERED: "half of the clients busy, a step for every quarter of them",
    "buffered, constant weights": "the same, without less weight for old updates",
    SPARSE: "the same as buffered, of every update the largest twentieth",
    SINGLE: "half of the clients busy, a step for every update",
}
"""What each row does."""

OVER: Final = "seconds to the target over synchronous rounds"
DEPLOYED: Final = "seconds to the common loss over synchronous rounds, deployed"


def strategy_of(row: str, clients: int) -> Any:
    """Return the strategy of a row."""
    from flwr.serverapp.strategy import FedAvg

    from fedcomp.codecs import TopK
    from fedcomp.strategies.compressed import Compressed
    from fedcomp.strategies.deadlines import Deadline
    from fedcomp.strategies.overlap import Buffered, PipelinedStrategy

    inner: Any = FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
    if row == SYNCHRONOUS:
        return PipelinedStrategy(inner, 1)
    if row in DEADLINES:
        return PipelinedStrategy(inner, 1, deadline=Deadline(DEADLINES[row], slack=1.2))
    if row == SPARSE:
        inner = Compressed(inner, TopK(density=0.05))
    busy, buffer = max(1, clients // 2), max(1, clients // 4)
    if row == SINGLE:
        # The step for a single update is as small as its part of a buffer.
        return Buffered(inner, busy, 1, max_staleness=10**6, server_lr=1.0 / buffer)
    weight = "constant" if "constant" in row else "1/sqrt"
    return Buffered(inner, busy, buffer, weight=weight)


def paced(row: str, lr: float, seed: int, *, config: Config, tuning: bool = False) -> dict[str, Any]:
    """Train a row on the virtual clock. ``even`` is Jain's index of the updates used from each client: 1 if all are
    equal, 1/n if one client does all the work."""
    from fedcomp.experiments.paced import train

    own = {"batch_size": 16, "epochs": 1, "task.partition": config.settings["task.partition"]}
    found = train(strategy_of(row, config.clients), config, lr, seed, tuning=tuning, jitter=0.3, **own)
    shares, total = found["shares"], max(1, sum(found["shares"]))
    squares = len(shares) * sum(share**2 for share in shares)
    return {**found, "shares": [share / total for share in shares], "even": sum(shares) ** 2 / max(1, squares)}


def deployed(rounds: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return seconds, updates and losses of three rows in a real deployment of four nodes."""
    from fedcomp.experiments import slept

    nodes = 4
    rows: dict[str, dict[str, Any]] = {
        SYNCHRONOUS: {"kind": "pipelined", "options": {"width": 1}, "rounds": rounds},
        DEADLINE: {"kind": "pipelined", "options": {"width": 1, "quantile": DEADLINES[DEADLINE]}, "rounds": rounds},
        # The same number of updates as in the synchronous rounds.
        BUFFERED: {"kind": "buffered", "options": {"concurrency": nodes, "buffer": 2}, "rounds": 2 * rounds},
    }
    return slept.deployed(rows, nodes=nodes, seed=seed, sleep=2.0, variation=1.0, work=0.0)


def study(found: Found) -> Studied:
    """Choose step sizes on a validation split, train against the simulated clock, and time three rows for real."""
    from fedcomp.experiments import slept
    from fedcomp.experiments.paced import seconds_to, shown_seconds, timed

    config, say = found.config, found.say
    against = timed(paced, ROWS, found)
    groups, sooner, target = against.groups, against.sooner, against.target
    even = {row: mean(group.each("even")) for row, group in groups.items()}
    rival = min(DEADLINES, key=lambda row: sooner[row])
    quarter = max(1, config.clients // 4)

    def slow(row: str) -> float:
        """Return the share of the slowest quarter of the clients in a row's updates."""
        return mean(sum(shares[-quarter:]) for shares in groups[row].each("shares"))

    def bytes_to(row: str) -> float:
        """Return the uplink bytes until the target, assuming that bytes flow evenly."""
        return mean(
            record.uplink * min(1.0, seconds_to(record.line, target) / record.line[-1][0]) for record in groups[row]
        )

    skipped = {DEPLOYED: "set deployment=true"}
    real: dict[str, dict[str, Any]] = {}
    ratio = float("nan")
    if config.settings["deployment"]:
        skipped = {}
        real = say.cell("deployment", lambda: deployed(int(config.settings["deployed_steps"]), config.seed))
        # The loss that all three reach: the largest of their final losses.
        common = max(row["line"][-1][1] for row in real.values())
        for row in real.values():
            row["to"] = slept.seconds_below(row["line"], common)
        ratio = real[BUFFERED]["to"] / real[SYNCHRONOUS]["to"]
    if sooner[SYNCHRONOUS] == float("inf"):
        skipped[OVER] = "synchronous rounds do not reach the target"
    named = {SYNCHRONOUS: SYNCHRONOUS, BUFFERED: BUFFERED, "best deadline": rival}
    return Studied(
        {
            "target, %": target,
            **{(name, "seconds to the target"): shown_seconds(sooner[row]) for name, row in named.items()},
            **{(name, "slowest quarter's share, %"): 100 * slow(row) for name, row in named.items()},
            (BUFFERED, OVER): sooner[BUFFERED] / sooner[SYNCHRONOUS],
            (BUFFERED, "seconds to the target over rounds with the best deadline"): sooner[BUFFERED] / sooner[rival],
            (BUFFERED, "seconds to the target over single updates"): sooner[BUFFERED] / sooner[SINGLE],
            (SPARSE, "uplink bytes to the target over buffered"): bytes_to(SPARSE) / bytes_to(BUFFERED),
            (SYNCHRONOUS, "evenness of the clients' updates"): even[SYNCHRONOUS],
            (BUFFERED, "evenness over that of rounds with the best deadline"): even[BUFFERED] / even[rival],
            (BUFFERED, DEPLOYED): ratio,
        },
        tables=[
            against.table(
                {
                    "uplink to there, MB": lambda row: round(bytes_to(row) / 1e6, 2),
                    "evenness": lambda row: round(even[row], 2),
                    "slowest quarter's share, %": lambda row: round(100 * slow(row), 1),
                    "what it does": lambda row: ROWS[row],
                },
                f"{config.clients} clients with log-normal paces, one second a message on average, coefficient of "
                f"variation {config.settings['variation']:g}. Evenness is Jain's index of the updates used from each "
                "client: 1 if all are equal. With equal clients the slowest quarter would contribute 25 %.",
            ),
            *(
                [
                    table(
                        "In a real deployment",
                        {
                            "row": lambda row: row,
                            "seconds to the common loss": lambda row: shown_seconds(real[row]["to"]),
                            "seconds in all": lambda row: round(real[row]["seconds"], 1),
                            "updates used": lambda row: real[row]["used"],
                            "late": lambda row: real[row]["late"],
                            "last loss": lambda row: f"{real[row]['line'][-1][1]:.3g}",
                        },
                        real,
                        "Four SuperNodes on loopback learn least squares; clients sleep two seconds on average, with "
                        "the same distribution. The common loss is the largest final loss of the rows.",
                    )
                ]
                if real
                else []
            ),
        ],
        figures=[
            against.curve(),
            curves(
                "Whose updates are used",
                groups.items(),
                lambda item: list(range(1, config.clients + 1)),
                lambda item: [100 * mean(column) for column in zip(*item[1].each("shares"), strict=True)],
                lambda item: item[0],
                x_label="client, from the quickest to the slowest",
                y_label="share of the updates, %",
            ),
        ],
        skipped=skipped,
    )
