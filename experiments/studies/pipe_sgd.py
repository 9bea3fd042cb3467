"""Rounds in flight: trainings beside their recursions, the law of the period, late gradients, and the clock."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import Sweep, curves, repetitions, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.tables import TUNING_SEED, Found

WIDTHS: Final = (1, 2, 3)
GRID: Final = ((0.1, 0.0), (0.25, 0.0), (0.5, 0.0), (1.0, 0.0), (0.1, 0.9), (0.3, 0.9))
"""Step sizes and momenta of the accuracy table."""

COLUMNS: Final[Mapping[str, tuple[int, int, str]]] = {
    "no delay": (0, 0, ""),
    "one step": (1, 0, ""),
    "one step, warm-up 40": (1, 40, ""),
    "one step, 8 bits": (1, 0, "8 bits"),
    "one step, upper half": (1, 0, "upper half"),
    "four steps": (4, 0, ""),
}
"""Delay, warm-up and code by heading."""

SYNCHRONOUS: Final = "synchronous"
PIPED: Final = "two cohorts"
ASYNCHRONOUS: Final = "asynchronous"

ROWS: Final = (SYNCHRONOUS, PIPED, "four cohorts", ASYNCHRONOUS)

TIMES: Final = ((1.0, 0.3), (1.0, 1.0), (1.0, 2.5), (0.2, 3.0))
"""Seconds of work and of the collective, as in the specification's table."""

VARIATIONS: Final = (0.1, 0.5, 1.0)

OVER: Final = "seconds to the target over those of synchronous rounds"
OFF: Final = "largest distance of a weight from the recursion, deployed"
RATIO: Final = "seconds over those of width 1, deployed"
DEPLOYED: Final = (RATIO, OFF)


def strategy_of(row: str, clients: int) -> Any:
    """Return the strategy of a row on the virtual clock."""
    from flwr.serverapp.strategy import FedAvg

    from fedcomp.strategies.overlap import Buffered, PipelinedStrategy

    inner = FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
    if row == ASYNCHRONOUS:
        # An asynchronous parameter server: every update makes a step, whatever its age.
        return Buffered(inner, clients, 1, max_staleness=10**6, weight="constant", server_lr=1.0 / clients)
    return PipelinedStrategy(inner, {SYNCHRONOUS: 1, PIPED: 2, "four cohorts": 4}[row])


def paced(row: str, lr: float, seed: int, *, config: Config, tuning: bool = False) -> dict[str, Any]:
    """Train a row on the virtual clock."""
    from fedcomp.experiments.paced import Pace, train
    from fedcomp.flower.logs import quiet

    settings: dict[str, Any] = {
        "task.hidden": "64",
        "task.validation": tuning,
        "lr": lr,
        "batch_size": 32,
        "max_steps": 1,
    }
    seed += tuning * TUNING_SEED
    spec = RunSpec("fedavg", task="digits", clients=config.clients, seed=seed, settings=settings)
    pace = Pace(seed, config.clients, variation=float(config.settings["variation"]), jitter=0.2)
    with quiet():
        found = train(strategy_of(row, config.clients), spec, pace, float(config.settings["seconds"]))
    line = found["line"]
    return {**found, "settled": mean(point[1] for point in line[-5:])}


def recursions(rounds: int, seed: int) -> dict[str, float]:
    """Return how far trainings over messages are from their recursion in one process, relative, by name."""
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord

    from fedcomp.experiments import slept
    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.logs import quiet
    from fedcomp.flower.metered import MeteredGrid
    from fedcomp.flower.rounds import fit

    nodes, found = 3, {}
    config = ConfigRecord({"seed": seed, "sleep": 1e-9, "variation": 0.0})
    expected = {width: slept.recursion(seed, range(nodes), rounds, width) for width in WIDTHS}

    def apart(weights: Any, width: int) -> float:
        return float(np.linalg.norm(weights - expected[width]) / np.linalg.norm(expected[width]))

    for width in WIDTHS:
        strategy = slept.build("pipelined", {"width": width})
        with quiet(), InProcessGrid(slept.client, nodes, seed=seed) as grid:
            start = ArrayRecord({"w": Array(np.zeros(slept.SIZE, np.float32))})
            result = fit(strategy, MeteredGrid(grid), start, rounds, train_config=config)
        weights = result.arrays["w"].numpy()
        found[f"width {width}"] = apart(weights, width)
        if width == 2:
            found["width 2 against no delay"] = apart(weights, 1)
    # What comes of averaging models: two trainings, each of every other round, and of one cohort.
    found["averaged models against width 2"] = apart(slept.recursion(seed, range(0, nodes, 2), (rounds + 1) // 2, 1), 2)
    return found


def periods(seed: int) -> dict[str, list[float]]:
    """Return by width of cohorts the seconds per step on the virtual clock, and those of the law."""
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord

    from fedcomp.experiments import slept
    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.logs import quiet
    from fedcomp.flower.metered import MeteredGrid
    from fedcomp.flower.rounds import fit

    found = {}
    for width in (1, 2, 4):
        marks: list[float] = []
        config = ConfigRecord({"seed": seed, "sleep": 1e-9, "variation": 0.0})
        with quiet(), InProcessGrid(slept.client, 4, seed=seed, compute_seconds=1.0) as grid:
            start = ArrayRecord({"w": Array(np.zeros(slept.SIZE, np.float32))})
            # Read when called, at the end of every round.
            note = partial(_mark, marks, grid)
            strategy = slept.build("pipelined", {"width": width})
            fit(strategy, MeteredGrid(grid), start, 41, train_config=config, on_round=note)
        # From a step to one of the same cohort, so that all of a period is in it.
        found[str(width)] = [(marks[39] - marks[19]) / 20, 1.0 / width]
    return found


def _mark(marks: list[float], grid: Any, *_: Any) -> None:
    marks.append(float(grid.clock))


def laws(seed: int) -> dict[str, Any]:
    """Return the period's law against its events, the gain with log-normal times, and the stable steps."""
    import numpy as np

    from fedcomp.experiments.delayed import largest_stable
    from fedcomp.rng import Key
    from fedcomp.timing.pipeline import Pipeline, log_normal, simulate, stable_step

    def period(work: Any, transfer: Any, width: int) -> float:
        ends = simulate(work, transfer, width)
        half = ends.size // 2
        return float(ends[-1] - ends[half - 1]) / (ends.size - half)

    off = 0.0
    constant = {}
    for a, b in TIMES:
        row = [period(np.full(400, a), np.full(400, b), width) for width in (1, 2, 3, 4)]
        constant[f"{a:g} + {b:g}"] = row
        law = [Pipeline(a, b, width).period for width in (1, 2, 3, 4)]
        off = max(off, *(abs(x - y) / y for x, y in zip(row, law, strict=True)))
    gains = {}
    for variation in VARIATIONS:
        work, transfer = (log_normal(1.0, variation, 20_000, Key(seed, "pipe/times", layer=i)) for i in (0, 1))
        alone = simulate(work, transfer, 1)[-1]
        gains[f"{variation:g}"] = [float(alone / simulate(work, transfer, width)[-1]) for width in (2, 3, 4, 8)]
    stable = {str(delay): [largest_stable(delay), stable_step(delay)] for delay in range(4)}
    return {"off": off, "constant": constant, "gains": gains, "stable": stable}


def deployed(rounds: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return seconds and weights of rows in a real deployment of two nodes."""
    import numpy as np

    from fedcomp.experiments import slept

    rows: dict[str, Any] = {
        f"width {width}": {"kind": "pipelined", "options": {"width": width}, "rounds": rounds} for width in (1, 2)
    }
    # As many updates, each a step of half the size.
    options = {"concurrency": 2, "buffer": 1, "max_staleness": 1000, "weight": "constant", "server_lr": 0.5}
    rows[ASYNCHRONOUS] = {"kind": "buffered", "options": options, "rounds": 2 * rounds}
    found = slept.deployed(rows, nodes=2, seed=seed, sleep=0.5, variation=0.0, work=1.5)
    for width in (1, 2):
        row = found[f"width {width}"]
        # Which of the two nodes connects first, and is in the first cohort, is chance.
        expected = [slept.recursion(seed, order, rounds, width) for order in ((0, 1), (1, 0))]
        row["off"] = float(min(np.abs(np.subtract(row["weights"], each)).max() for each in expected))
    return found


def study(found: Found) -> Studied:
    """Compare with the recursion and the laws, train with delays, then against the clock, simulated and real."""
    from fedcomp.experiments import delayed
    from fedcomp.experiments.paced import shown_seconds, timed
    from fedcomp.timing.pipeline import Pipeline

    config, say = found.config, found.say
    processes = int(config.settings["workers"])
    exact = say.cell("recursion", lambda: recursions(config.rounds // 10 + 4, config.seed))
    law = say.cell("laws", lambda: laws(config.seed))
    clock = say.cell("periods", lambda: periods(config.seed))

    cells = [
        {"rate": rate, "momentum": momentum, "delay": delay, "warmup": warmup, "code": code, "seed": seed}
        for rate, momentum in GRID
        for delay, warmup, code in COLUMNS.values()
        for seed in repetitions(config)
    ]
    late = Sweep(delayed.train, cells, "delay", {"steps": config.rounds})(say, processes)

    def median(rate: float, momentum: float, heading: str) -> float:
        delay, warmup, code = COLUMNS[heading]
        chosen = late.where(rate=rate, momentum=momentum, delay=delay, warmup=warmup, code=code).each("accuracy")
        return float(sorted(chosen)[len(chosen) // 2])

    target = float(config.settings["target"])
    against = timed(paced, ROWS, config, say)
    best, groups, sooner = against.best, against.groups, against.sooner
    asked = bool(config.settings["deployment"])
    skipped = {} if asked else dict.fromkeys(DEPLOYED, "set deployment=true")
    if sooner[SYNCHRONOUS] == float("inf"):
        skipped[OVER] = "synchronous rounds do not reach the target"
    nothing = {"seconds": float("nan"), "off": float("nan"), "line": [[0.0, float("nan")]], "steps": 0}
    real: dict[str, dict[str, Any]] = (
        say.cell("deployment", lambda: deployed(int(config.settings["deployed_rounds"]), config.seed))
        if asked
        else dict.fromkeys(("width 1", "width 2", ASYNCHRONOUS), nothing)
    )
    ratio = real["width 2"]["seconds"] / real["width 1"]["seconds"]

    def by_law(row: str) -> float | None:
        """Return the seconds per round that the law has for a width, from what width one worked and waited."""
        if row == ASYNCHRONOUS:
            return None
        alone = real["width 1"]
        return round(Pipeline(alone["period"] - alone["idle"], alone["idle"], int(row[-1])).period, 2)

    def lost(rate: float, momentum: float, heading: str = "one step", against: str = "no delay") -> float:
        return median(rate, momentum, against) - median(rate, momentum, heading)

    wrong = min(exact["width 2 against no delay"], exact["averaged models against width 2"])
    hidden = (
        "In a real deployment two rounds in flight take {:.2f} of the time of one at a time, by hiding the server's "
    )
    asynchronous = sooner[ASYNCHRONOUS]
    return Studied(
        {
            "target, %": target,
            "where": (hidden + "work and Flower's polling; ").format(ratio) if asked else "On the simulated clock ",
            **{(row, "seconds to the target"): shown_seconds(sooner[row]) for row in ROWS},
            **{(f"width {w}", "relative distance from its recursion"): exact[f"width {w}"] for w in WIDTHS},
            "wrong recursions: times further from width 2, least": wrong / exact["width 2"],
            "period, events against law: largest relative difference": law["off"],
            **{
                (f"width {width} by cohorts", "seconds per step on the clock, over the law's"): measured / wanted
                for width, (measured, wanted) in clock.items()
            },
            **{
                (f"{delay} steps of delay", "largest stable step, by bisection over the formula, off 1 by"): abs(
                    by / formula - 1
                )
                for delay, (by, formula) in law["stable"].items()
            },
            ("step size .1", "points lost by one step of delay"): lost(0.1, 0.0),
            ("step size 1", "points lost by one step of delay"): lost(1.0, 0.0),
            ("step size 1", "of these, points that a warm-up of 40 steps brings back"): lost(
                1.0, 0.0, against="one step, warm-up 40"
            ),
            ("step size .3 and momentum .9", "points lost by one step of delay"): lost(0.3, 0.9),
            (PIPED, OVER): sooner[PIPED] / sooner[SYNCHRONOUS],
            # Where the server never gets there, any time is sooner.
            (PIPED, "seconds to the target over those of the asynchronous server"): (
                sooner[PIPED] / asynchronous if asynchronous < float("inf") else 0.0
            ),
            ("width 2", RATIO): ratio,
            **{(f"width {w}", OFF): real[f"width {w}"]["off"] for w in (1, 2)},
        },
        tables=[
            table(
                "Test accuracy with gradients that are applied late, %",
                {
                    "step size, momentum": lambda pair: f"{pair[0]:g}, {pair[1]:g}",
                    **{heading: partial(_shown, median, heading) for heading in COLUMNS},
                },
                GRID,
                f"{delayed.WORKERS} workers, a perceptron on digits, {config.rounds} steps, median over seeds; chance "
                "is 10 %. In one process: nothing but the delay differs. Upper half: floats cut to 16 bits.",
            ),
            table(
                "Seconds per iteration by width, one processor and one link",
                {
                    "work + collective": lambda item: item[0],
                    **{f"K = {w}": partial(_at, i) for i, w in enumerate((1, 2, 3, 4))},
                },
                law["constant"].items(),
                "By playing the events; the law is max(a, b, (a + b)/K).",
            ),
            table(
                "Times faster than K = 1 where times vary",
                {
                    "coefficient of variation": lambda item: item[0],
                    **{f"K = {w}": partial(_at, i) for i, w in enumerate((2, 3, 4, 8))},
                },
                law["gains"].items(),
                "Log-normal work and collectives of equal mean, independent: two in flight are enough for "
                "near-constant times alone.",
            ),
            table(
                "Largest stable step size times curvature",
                {
                    "delay, steps": lambda item: item[0],
                    "by bisection": partial(_at, 0, digits=3),
                    "2 sin(pi / (2(2D + 1)))": partial(_at, 1, digits=3),
                },
                law["stable"].items(),
            ),
            table(
                "Against the simulated clock",
                {
                    "row": lambda row: row,
                    "step size": lambda row: best[row],
                    f"seconds to {target:g} %, median": lambda row: shown_seconds(sooner[row]),
                    "test, %": lambda row: round(mean(groups[row].each("settled")), 1),
                    "steps of the model": lambda row: round(mean(groups[row].each("steps"))),
                    "uplink, MB": lambda row: round(mean(groups[row].each("uplink")) / 1e6, 2),
                },
                ROWS,
                f"{config.clients} clients whose paces vary by {config.settings['variation']:g}, one second a message "
                "on average; the server takes no time. Cohorts step more often, on fewer clients each. Asynchronous: "
                "each update makes a step of 1/n at once. The step size is the one of the grid that is soonest at the "
                "target on a validation split, for every row by itself.",
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
                        "Two SuperNodes on loopback, least squares, clients that sleep half a second, a server that "
                        "works 1.5 s after every step. The law is max(a, b, (a + b)/K), where a is what the server "
                        "worked and b what it waited in a round of width one; b has gaps in it in which nobody has a "
                        "message, and more rounds in flight have fewer of them. The asynchronous row has as many "
                        "updates, each a step of half the size, and so twice the server's work.",
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
        ],
        skipped=skipped,
    )


def _shown(median: Any, heading: str, pair: tuple[float, float]) -> float:
    return round(float(median(*pair, heading)), 1)


def _at(index: int, item: Any, digits: int = 2) -> float:
    return round(float(item[1][index]), digits)
