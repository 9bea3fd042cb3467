"""Rounds in flight: trainings compared with their recursions, the law of the period, delayed gradients, and time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import Records, repetitions, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.tables import Found

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WIDTHS: Final = (1, 2, 3)
GRID: Final = ((0.1, 0.0), (0.5, 0.0), (1.0, 0.0), (0.3, 0.9))
"""Step sizes and momenta of the accuracy table."""

COLUMNS: Final[Mapping[str, tuple[int, int]]] = {
    "no delay": (0, 0),
    "one step": (1, 0),
    "one step, warm-up 40": (1, 40),
}
"""Delay and warm-up by heading."""

SYNCHRONOUS: Final = "synchronous"
PIPED: Final = "two cohorts"
ASYNCHRONOUS: Final = "asynchronous"

ROWS: Final = (SYNCHRONOUS, PIPED, "four cohorts", ASYNCHRONOUS)

TIMES: Final = ((1.0, 0.3), (1.0, 1.0), (1.0, 2.5), (0.2, 3.0))
"""Seconds of work and of the collective, from the table of the specification."""

OVER: Final = "seconds to the target over those of synchronous rounds"
OFF: Final = "largest distance of a weight from the recursion, deployed"
RATIO: Final = "seconds over those of width 1, deployed"


def strategy_of(row: str, clients: int) -> Any:
    """Return the strategy of a row on the virtual clock."""
    from flwr.serverapp.strategy import FedAvg

    from fedcomp.strategies.overlap import Buffered, PipelinedStrategy

    inner = FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
    if row == ASYNCHRONOUS:
        # An asynchronous parameter server: every update makes a step at any age.
        return Buffered(inner, clients, 1, max_staleness=10**6, weight="constant", server_lr=1.0 / clients)
    return PipelinedStrategy(inner, {SYNCHRONOUS: 1, PIPED: 2, "four cohorts": 4}[row])


def paced(row: str, lr: float, seed: int, *, config: Config, tuning: bool = False) -> dict[str, Any]:
    """Train a row on the virtual clock."""
    from fedcomp.experiments.paced import train

    strategy = strategy_of(row, config.clients)
    return train(strategy, config, lr, seed, tuning=tuning, jitter=0.2, batch_size=32, max_steps=1)


def over_messages(
    width: int, nodes: int, rounds: int, seed: int, seconds: float = 0.0
) -> tuple[NDArray[Any], list[float]]:
    """Train with cohorts over messages that take ``seconds`` each; return the weights and the clock after every
    round."""
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord

    from fedcomp.experiments import slept
    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.logs import quiet
    from fedcomp.flower.metered import MeteredGrid
    from fedcomp.flower.rounds import fit

    marks: list[float] = []
    config = ConfigRecord({"seed": seed, "sleep": 1e-9, "variation": 0.0})
    start = ArrayRecord({"w": Array(np.zeros(slept.SIZE, np.float32))})
    with quiet(), InProcessGrid(slept.client, nodes, seed=seed, compute_seconds=seconds) as grid:
        result = fit(
            slept.build("pipelined", {"width": width}),
            MeteredGrid(grid),
            start,
            rounds,
            train_config=config,
            on_round=lambda *_: marks.append(float(grid.clock)),
        )
    return result.arrays["w"].numpy(), marks


def recursions(rounds: int, seed: int) -> dict[str, float]:
    """Return, by name, the relative distance of trainings over messages from their recursion in one process."""
    import numpy as np

    from fedcomp.experiments import slept

    nodes = 3
    expected = {width: slept.recursion(seed, range(nodes), rounds, width) for width in WIDTHS}

    def apart(weights: NDArray[Any], width: int) -> float:
        return float(np.linalg.norm(weights - expected[width]) / np.linalg.norm(expected[width]))

    trained = {width: over_messages(width, nodes, rounds, seed)[0] for width in WIDTHS}
    # The result of averaging models: two separate trainings, each with every other round and one cohort.
    averaged = slept.recursion(seed, range(0, nodes, 2), (rounds + 1) // 2, 1)
    return {
        **{f"width {width}": apart(weights, width) for width, weights in trained.items()},
        "width 2 against no delay": apart(trained[2], 1),
        "averaged models against width 2": apart(averaged, 2),
    }


def laws(seed: int) -> list[dict[str, Any]]:
    """Return the laws and the measured values: ``kind``, ``of`` what, the value ``found``, and the value of the
    ``law``."""
    import numpy as np

    from fedcomp.experiments.delayed import largest_stable
    from fedcomp.rng import Key
    from fedcomp.timing.pipeline import Pipeline, log_normal, simulate, stable_step

    def period(work: NDArray[np.float64], transfer: NDArray[np.float64], width: int) -> float:
        ends = simulate(work, transfer, width)
        half = ends.size // 2
        return float(ends[-1] - ends[half - 1]) / (ends.size - half)

    rows: list[tuple[str, str, float, float | None]] = []
    for a, b in TIMES:
        for width in (1, 2, 3, 4):
            events = period(np.full(400, a), np.full(400, b), width)
            rows.append(("period", f"{a:g} + {b:g}, K = {width}", events, Pipeline(a, b, width).period))
    for width in (1, 2, 4):
        _, marks = over_messages(width, 4, 41, seed, seconds=1.0)
        # From a step to the next step of the same cohort, which is a whole period.
        rows.append(("clock", f"width {width} by cohorts", (marks[39] - marks[19]) / 20, 1.0 / width))
    rows += [("stable", f"{delay} steps of delay", largest_stable(delay), stable_step(delay)) for delay in range(4)]
    work, transfer = (log_normal(1.0, 1.0, 20_000, Key(seed, "pipe/times", layer=i)) for i in (0, 1))
    alone = simulate(work, transfer, 1)[-1]
    rows += [("gain", f"K = {k}", float(alone / simulate(work, transfer, k)[-1]), None) for k in (2, 3, 4, 8)]
    return [dict(zip(("kind", "of", "found", "law"), row, strict=True)) for row in rows]


KINDS: Final[Mapping[str, str]] = {
    "period": "seconds per iteration, work + collective, by events",
    "clock": "seconds per step of one second, on the virtual clock",
    "stable": "largest stable step size times curvature, by bisection",
    "gain": "times faster than K = 1, log-normal times of variation 1",
}


def deployed(rounds: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return seconds and weights of rows in a real deployment of two nodes."""
    import numpy as np

    from fedcomp.experiments import slept

    rows: dict[str, Any] = {
        f"width {width}": {"kind": "pipelined", "options": {"width": width}, "rounds": rounds} for width in (1, 2)
    }
    # The same number of updates, each a step of half the size.
    options = {"concurrency": 2, "buffer": 1, "max_staleness": 1000, "weight": "constant", "server_lr": 0.5}
    rows[ASYNCHRONOUS] = {"kind": "buffered", "options": options, "rounds": 2 * rounds}
    found = slept.deployed(rows, nodes=2, seed=seed, sleep=0.5, variation=0.0, work=1.5)
    for width in (1, 2):
        row = found[f"width {width}"]
        # Either node may connect first and be in the first cohort.
        expected = [slept.recursion(seed, order, rounds, width) for order in ((0, 1), (1, 0))]
        row["off"] = float(min(np.abs(np.subtract(row["weights"], each)).max() for each in expected))
    return found


def study(found: Found) -> Studied:
    """Compare with the recursion and the laws, train with delays, then measure time on simulated and real clocks."""
    from fedcomp.experiments import delayed
    from fedcomp.experiments.paced import shown_seconds, timed
    from fedcomp.timing.pipeline import Pipeline

    config, say = found.config, found.say
    exact = say.cell("recursion", lambda: recursions(config.rounds // 10 + 4, config.seed))
    law: list[dict[str, Any]] = say.cell("laws", lambda: laws(config.seed))
    cells = [
        {"rate": rate, "momentum": momentum, "delay": delay, "warmup": warmup, "seed": seed}
        for rate, momentum in GRID
        for delay, warmup in COLUMNS.values()
        for seed in repetitions(config)
    ]
    late = found.sweep(delayed.train, cells, "delay", steps=config.rounds)
    against = timed(paced, ROWS, found)
    sooner, asynchronous = against.sooner, against.sooner[ASYNCHRONOUS]
    skipped = dict.fromkeys((RATIO, OFF), "set deployment=true")
    nothing = {"seconds": float("nan"), "off": float("nan")}
    real: dict[str, dict[str, Any]] = {}
    if config.settings["deployment"]:
        skipped = {}
        real = say.cell("deployment", lambda: deployed(int(config.settings["deployed_rounds"]), config.seed))
    if sooner[SYNCHRONOUS] == float("inf"):
        skipped[OVER] = "synchronous rounds do not reach the target"
    widths = {f"width {width}": real.get(f"width {width}", nothing) for width in (1, 2)}
    ratio = widths["width 2"]["seconds"] / widths["width 1"]["seconds"]

    def by_law(row: str) -> float | None:
        """Return the seconds per round that the law gives for a width, from the work and the waiting at width one."""
        if row == ASYNCHRONOUS:
            return None
        alone = real["width 1"]
        return round(Pipeline(alone["period"] - alone["idle"], alone["idle"], int(row[-1])).period, 2)

    def lost(rate: float, momentum: float, heading: str = "no delay") -> float:
        return median(late, rate, momentum, heading) - median(late, rate, momentum, "one step")

    wrong = min(exact["width 2 against no delay"], exact["averaged models against width 2"])
    hidden = (
        "In a real deployment two rounds in flight take {:.2f} times the time of one, because they hide the server's "
        "work and Flower's polling; "
    )
    return Studied(
        {
            "target, %": against.target,
            "where": hidden.format(ratio) if real else "On the simulated clock ",
            **{(row, "seconds to the target"): shown_seconds(sooner[row]) for row in ROWS},
            **{(f"width {w}", "relative distance from its recursion"): exact[f"width {w}"] for w in WIDTHS},
            "wrong recursions: times further from width 2, least": wrong / exact["width 2"],
            "period, events against law: largest relative difference": max(
                abs(each["found"] - each["law"]) / each["law"] for each in law if each["kind"] == "period"
            ),
            **{
                (each["of"], "seconds per step on the clock, over the law's"): each["found"] / each["law"]
                for each in law
                if each["kind"] == "clock"
            },
            **{
                (each["of"], "largest stable step, by bisection over the formula, off 1 by"): abs(
                    each["found"] / each["law"] - 1
                )
                for each in law
                if each["kind"] == "stable"
            },
            ("step size .1", "points lost by one step of delay"): lost(0.1, 0.0),
            ("step size 1", "points lost by one step of delay"): lost(1.0, 0.0),
            ("step size 1", "of these, points that a warm-up of 40 steps brings back"): lost(
                1.0, 0.0, "one step, warm-up 40"
            ),
            ("step size .3 and momentum .9", "points lost by one step of delay"): lost(0.3, 0.9),
            (PIPED, OVER): sooner[PIPED] / sooner[SYNCHRONOUS],
            # If the server never reaches the target, any time is faster.
            (PIPED, "seconds to the target over those of the asynchronous server"): (
                sooner[PIPED] / asynchronous if asynchronous < float("inf") else 0.0
            ),
            ("width 2", RATIO): ratio,
            **{(width, OFF): row["off"] for width, row in widths.items()},
        },
        tables=[
            table(
                "Test accuracy with gradients that are applied late, %",
                {
                    "step size, momentum": lambda pair: f"{pair[0]:g}, {pair[1]:g}",
                    **{heading: partial(_shown, late, heading) for heading in COLUMNS},
                },
                GRID,
                f"{delayed.WORKERS} workers, a perceptron on digits, {config.rounds} steps, median over seeds; chance "
                "is 10 %. All run in one process, and only the delay differs.",
            ),
            table(
                "The laws beside what they summarise",
                {
                    "what": lambda each: KINDS[each["kind"]],
                    "of": "of",
                    "found": lambda each: round(each["found"], 3),
                    "by the law": lambda each: each["law"] and round(each["law"], 3),
                },
                law,
                "The period is max(a, b, (a + b)/K), the largest stable step 2 sin(pi / (2(2D + 1))). For log-normal "
                "work and collectives of equal mean there is no law: two in flight are enough only if times are "
                "nearly constant.",
            ),
            against.table(
                {"uplink, MB": lambda row: round(mean(against.groups[row].each("uplink")) / 1e6, 2)},
                f"{config.clients} clients whose paces vary by {config.settings['variation']:g}, with one second a "
                "message on average; the server takes no time. Cohorts step more often, with fewer clients each. "
                "Asynchronous: each update makes a step of 1/n at once.",
            ),
            *(
                [
                    table(
                        "In a real deployment",
                        {
                            "row": lambda row: row,
                            "seconds": lambda row: round(real[row]["seconds"], 1),
                            "steps": lambda row: real[row]["steps"],
                            "seconds per step": lambda row: round(real[row]["period"], 2),
                            "by the law": by_law,
                            "of these idle, %": lambda row: round(100 * real[row]["idle"] / real[row]["period"]),
                            "last loss": lambda row: f"{real[row]['line'][-1][1]:.3g}",
                        },
                        real,
                        "Two SuperNodes on loopback learn least squares; clients sleep half a second, and the server "
                        "works 1.5 s after every step. The law is max(a, b, (a + b)/K), where a is the server's work "
                        "and b its waiting time in a round of width one. b contains gaps in which no node has a "
                        "message, and with more rounds in flight there are fewer gaps. The asynchronous row has the "
                        "same number of updates, each a step of half the size, and so twice the server's work.",
                    )
                ]
                if real
                else []
            ),
        ],
        figures=[against.curve()],
        skipped=skipped,
    )


def median(late: Records, rate: float, momentum: float, heading: str) -> float:
    """Return the median accuracy over seeds of a training with late gradients."""
    delay, warmup = COLUMNS[heading]
    chosen = late.where(rate=rate, momentum=momentum, delay=delay, warmup=warmup).each("accuracy")
    return float(sorted(chosen)[len(chosen) // 2])


def _shown(late: Records, heading: str, pair: tuple[float, float]) -> float:
    return round(median(late, *pair, heading), 1)
