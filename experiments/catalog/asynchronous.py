"""Clients of very unlike pace: is it worth stepping as soon as some updates are there, and who is left out?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fedcomp.experiments.experiment import Experiment, no_rows
from fedcomp.experiments.findings import Findings, Say, mean
from fedcomp.experiments.kit import claim, curves, table
from fedcomp.experiments.options import TEXT, Config, Option, numbers
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.experiments.tables import TUNING_SEED
from fedcomp.rules import Flag, Int, Real

SYNCHRONOUS: Final = "synchronous"
DEADLINES: Final[Mapping[str, float]] = {f"deadline, {share} %": share / 100 for share in (50, 70, 90)}
"""Quantile of the clients' own past times by row: the best of them is the rival."""

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

OPTIONS = {
    "seeds": Option(3, Int(1, 100), "trainings per row, with the seeds from --seed on"),
    "workers": 2,
    "task.partition": Option("dirichlet:0.3", TEXT, "how examples are spread: iid, dirichlet:ALPHA, shards:COUNT"),
    "steps": Option(
        "0.1,0.3,0.6,1.2",
        TEXT,
        "step sizes of the clients; each row takes the one that does best on a validation split",
        check=numbers,
    ),
    "seconds": Option(60.0, Real(above=0.0), "simulated seconds of a training; a message takes one on average"),
    "variation": Option(1.0, Real(least=0.0, most=5.0), "coefficient of variation of the clients' paces"),
    "target": Option(93.0, Real(above=0.0, most=100.0), "accuracy to reach, %"),
    "deployment": Option(True, Flag(), "time three rows in a real deployment, too: some 100 s"),
    "deployed_steps": Option(6, Int(2), "rounds there, of four clients each"),
}


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
        # Steps for single updates are as small as their part of a buffer.
        return Buffered(inner, busy, 1, max_staleness=10**6, server_lr=1.0 / buffer)
    weight = "constant" if "constant" in row else "1/sqrt"
    return Buffered(inner, busy, buffer, weight=weight)


def paced(row: str, lr: float, seed: int, *, config: Config, tuning: bool = False) -> dict[str, Any]:
    """Train a row on the virtual clock."""
    from fedcomp.experiments.paced import Pace, evenness, train
    from fedcomp.flower.logs import quiet

    settings: dict[str, Any] = {"task.hidden": "64", "task.validation": tuning, "lr": lr, "batch_size": 16, "epochs": 1}
    settings["task.partition"] = config.settings["task.partition"]
    seed += tuning * TUNING_SEED
    spec = RunSpec("fedavg", task="digits", clients=config.clients, seed=seed, settings=settings)
    pace = Pace(seed, config.clients, variation=float(config.settings["variation"]))
    with quiet():
        found = train(strategy_of(row, config.clients), spec, pace, float(config.settings["seconds"]))
    # From the quickest client to the slowest, whatever partition they hold.
    order = sorted(range(config.clients), key=pace.of)
    shares = [found["shares"][partition] for partition in order]
    return {
        **found,
        "shares": [share / max(1, sum(shares)) for share in shares],
        "even": evenness(shares),
        "settled": mean(point[1] for point in found["line"][-5:]),
    }


def deployed(rounds: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return seconds, updates and losses of three rows in a real deployment of four nodes."""
    from fedcomp.experiments import slept

    nodes = 4
    rows: dict[str, dict[str, Any]] = {
        SYNCHRONOUS: {"kind": "pipelined", "options": {"width": 1}, "rounds": rounds},
        DEADLINE: {"kind": "pipelined", "options": {"width": 1, "quantile": DEADLINES[DEADLINE]}, "rounds": rounds},
        # As many updates as synchronous rounds have.
        BUFFERED: {"kind": "buffered", "options": {"concurrency": nodes, "buffer": 2}, "rounds": 2 * rounds},
    }
    return slept.deployed(rows, nodes=nodes, seed=seed, sleep=2.0, variation=1.0, work=0.0)


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Choose step sizes on a validation split, train against the simulated clock, and time three rows for real."""
    from fedcomp.experiments import slept
    from fedcomp.experiments.paced import seconds_to, shown_seconds, timed

    target = float(config.settings["target"])
    against = timed(paced, ROWS, config, say)
    best, groups, sooner = against.best, against.groups, against.sooner
    even = {row: mean(group.each("even")) for row, group in groups.items()}
    rival = min(DEADLINES, key=lambda row: sooner[row])
    quarter = max(1, config.clients // 4)

    def slow(row: str) -> float:
        """Return the share of the slowest quarter of the clients in a row's updates."""
        return mean(sum(shares[-quarter:]) for shares in groups[row].each("shares"))

    def bytes_to(row: str) -> float:
        """Return the uplink bytes until the target, which flow evenly."""
        return mean(
            record.uplink * min(1.0, seconds_to(record.line, target) / record.line[-1][0]) for record in groups[row]
        )

    asked = bool(config.settings["deployment"])
    skipped = "" if asked else "set deployment=true"
    real: dict[str, dict[str, Any]] = {}
    ratio = float("nan")
    if asked:
        real = say.cell("deployment", lambda: deployed(int(config.settings["deployed_steps"]), config.seed))
        # The loss that all three reach: the largest of their last ones.
        common = max(row["line"][-1][1] for row in real.values())
        for row in real.values():
            row["to"] = slept.seconds_below(row["line"], common)
        ratio = real[BUFFERED]["to"] / real[SYNCHRONOUS]["to"]
    known = sooner[SYNCHRONOUS] < float("inf")
    return Findings(
        tables=[
            table(
                "Against the simulated clock",
                {
                    "row": lambda row: row,
                    "step size": lambda row: best[row],
                    f"seconds to {target:g} %, median": lambda row: shown_seconds(sooner[row]),
                    "test, %": lambda row: round(mean(groups[row].each("settled")), 1),
                    "steps": lambda row: round(mean(groups[row].each("steps"))),
                    "uplink to there, MB": lambda row: round(bytes_to(row) / 1e6, 2),
                    "evenness": lambda row: round(even[row], 2),
                    "slowest quarter's share, %": lambda row: round(100 * slow(row), 1),
                },
                ROWS,
                f"{config.clients} clients with log-normal paces, one second a message on average, coefficient of "
                f"variation {config.settings['variation']:g}; means over seeds. Test accuracy: mean of the last five "
                "points. Evenness is Jain's index of the updates used of each client, 1 for all alike; a quarter of "
                "the clients would have 25 %. The step size is the one of the grid that is soonest at the target on a "
                "validation split, for every row by itself.",
            ),
            table(
                "What the rows do",
                {"row": lambda item: item[0], "what": lambda item: item[1]},
                ROWS.items(),
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
                        "Four SuperNodes on loopback, least squares, clients that sleep two seconds on average, by the "
                        "same law. The common loss is the largest of the rows' last ones.",
                    )
                ]
                if asked
                else []
            ),
        ],
        figures=[
            curves(
                "Test accuracy against the simulated clock",
                [(row, record) for row, group in groups.items() for record in group[:1]],
                lambda pair: [point[0] for point in pair[1].line],
                lambda pair: [point[1] for point in pair[1].line],
                lambda pair: pair[0],
                x_label="simulated seconds, first seed",
                y_label="test accuracy, %",
            ),
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
        claims=[
            claim(
                "buffered: seconds to the target over synchronous rounds",
                sooner[BUFFERED] / sooner[SYNCHRONOUS] if known else 0.0,
                "<= 0.7",
                "chosen: nobody waits for the slowest",
                skipped="" if known else "synchronous rounds do not reach the target",
            ),
            claim(
                "buffered: seconds to the target over rounds with the best deadline",
                sooner[BUFFERED] / sooner[rival],
                "<= 1.0",
                "a goal: the strongest simple rival",
                gate=False,
            ),
            claim(
                "buffered: seconds to the target over single updates",
                sooner[BUFFERED] / sooner[SINGLE],
                "<= 1.0",
                "a goal",
                gate=False,
            ),
            claim(
                "buffered, top-k: uplink bytes to the target over buffered",
                bytes_to(SPARSE) / bytes_to(BUFFERED),
                "<= 0.2",
                "chosen: any codec, with its memory",
            ),
            claim(
                "synchronous rounds: evenness of the clients' updates", even[SYNCHRONOUS], ">= 0.999", "all take part"
            ),
            claim(
                "buffered: evenness over that of rounds with the best deadline",
                even[BUFFERED] / even[rival],
                ">= 1.0",
                "a goal: the slow are late, not left out",
                gate=False,
            ),
            claim(
                "deployment: buffered, seconds to the common loss over synchronous rounds",
                ratio,
                "<= 0.9",
                "a goal",
                gate=False,
                skipped=skipped,
            ),
        ],
        answer=f"Steps of buffered updates reach {target:g} % after {shown_seconds(sooner[BUFFERED])} simulated "
        "seconds, "
        f"synchronous rounds after {shown_seconds(sooner[SYNCHRONOUS])}, rounds with the best deadline after "
        f"{shown_seconds(sooner[rival])}; of the updates the slowest quarter of the clients makes "
        f"{100 * slow(BUFFERED):.0f}, {100 * slow(SYNCHRONOUS):.0f} and {100 * slow(rival):.0f} %.",
    )


EXPERIMENT = Experiment(
    name="async",
    question="Where clients are of very unlike pace, is it worth not waiting for them, and who is left out?",
    # Trainings have step sizes and clocks of their own.
    rows=no_rows,
    measure=measure,
    options=OPTIONS,
    rounds=1,
    clients=20,
    minutes=4.0,
    quick=("clients=4", "seeds=1", "steps=0.3", "seconds=4", "deployment=false"),
    notes=(
        "Trainings last for seconds of the simulated clock, not for rounds: the setting of rounds counts for nothing. "
        "The server takes no time there.\n\n"
        "A buffered step weighs its updates by examples, as FedAvg does, and by 1/sqrt(1 + age). What is refused for "
        "its age goes back into its client's memory."
    ),
)
