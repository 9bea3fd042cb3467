"""COLD and Dyna-COLD: iterations and bits to an exact optimum, their peers, and the floors of inexact methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.decentralised import ENERGY_OPTIONS, Energy
from fedcomp.experiments.experiment import Config, Experiment, Option
from fedcomp.experiments.findings import Claim, Curves, Findings, Say, Series, Table, different_bytes, largest, mean
from fedcomp.experiments.kit import judged, table
from fedcomp.experiments.spec import RunResult, RunSpec

if TYPE_CHECKING:
    # Listing the experiments needs no torch: it is imported when one is run.
    from fedcomp.experiments.convex import Convex

TASK: Final = "digits-five"
NIDS: Final = "NIDS"
GEOMETRIC: Final = "Dyna-COLD, 1 bit, geometric"
ZOOM: Final = "Dyna-COLD, 1 bit, zoom"
TOP20: Final = "COLD, top-20 %"
TWO_BITS: Final = "COLD, 2 bits"
NORM_SIGN: Final = "COLD, 1 bit and a scale"
LEAD: Final = "LEAD, 2 bits"
BEER: Final = "BEER, top-20 %"
TRACKING: Final = "gradient tracking"
TOP10: Final = "COLD, top-10 %, γ = 0.01"
SIGN: Final = "COLD, mean magnitude times sign, γ = 0.003"
FLOAT32: Final = "NIDS in float32"
SCALES: Final = (1e-3, 1.0, 1e3)
"""First scales of the zoom."""

LINEAR: Final = (NIDS, GEOMETRIC, ZOOM, TOP20, TWO_BITS, LEAD, BEER, TRACKING)
"""Whose logarithms of errors must lie on a straight line."""

OVER_FLOWER: Final = (NIDS, ZOOM)
ROW_STEP: Final = 0.29
"""Step size of the rows: a little below 1/L of the default problem."""

GOAL: Final = "goal of this package"
THEORY: Final = "theory"
DERIVED: Final = "derived"

OPTIONS = {
    "tolerance": Option(1e-6, "relative distance to the optimum that counts as reached", above=1e-12, most=0.1),
    "l2": Option(0.1, "coefficient of the regulariser", above=0.0),
    "topology": Option("ring", "undirected graph: ring, torus, complete or edges:0-1,1-2"),
    "rho": Option(0.97, "what the geometric scale shrinks by per iteration", above=0.0, most=0.9999),
    "gamma": Option(0.5, "consensus step beside the geometric scale", above=0.0, most=1.0),
    "floor_iterations": Option(1200, "iterations of methods that stop at a floor", least=10),
    "strong_iterations": Option(1000, "iterations with strong compression, which do not arrive", least=10),
    "most": Option(4000, "no run is longer than so many iterations", least=3),
    **ENERGY_OPTIONS,
}

Algorithm = Mapping[str, Any]
Step = Callable[[float, float], Algorithm]
"""From 1/L and the largest ‖∇f_i(0)‖∞ / L to the configuration of an algorithm."""


@dataclass(frozen=True)
class Course:
    """How a run came to the optimum; see :class:`fedcomp.experiments.convex.ErrorCurve`.

    Attributes
    ----------
    errors, bits, payload_bits : sequence of float
        After every iteration, the beginning first. Bits are per directed edge.
    first : int or None
        Iterations to the tolerance.
    rate, r2 : float
        Of the line through the logarithms of the errors from 1e-1 to 1e-9; NaN without one.
    conserved : float
        The largest of the algorithm's invariants at the end; NaN when it has none, or did not get there.
    stopped : str
        Why it ended early.
    saturated : bool
    letter : float
        Mean bytes of a letter's body.
    """

    errors: Sequence[float]
    bits: Sequence[float]
    payload_bits: Sequence[float]
    first: int | None
    rate: float
    r2: float
    conserved: float
    stopped: str
    saturated: bool
    letter: float

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Course:
        """Read what was kept of a run."""
        errors = [math.inf if error is None else error for error in document["errors"]]
        missing = {name: math.nan for name in ("rate", "r2", "conserved", "letter") if document[name] is None}
        return cls(**{**document, **missing, "errors": errors})

    @property
    def last(self) -> float:
        """The error at the end."""
        return self.errors[-1]

    @property
    def iterations(self) -> int:
        """How many were finished."""
        return len(self.errors) - 1

    def sent(self, *, headers: bool) -> float:
        """Return the bits per directed edge until the tolerance was reached; NaN when it was not."""
        return math.nan if self.first is None else (self.bits if headers else self.payload_bits)[self.first]


def dyna(scale: str, **own: Any) -> Step:
    """Return Dyna-COLD with step size 1/L; ``s0`` of a geometric scale counts in the gradients' size."""

    def make(step: float, size: float) -> Algorithm:
        first = {"s0": own.get("s0", 1.0) * size} if scale == "geometric" else {}
        return {"name": "dyna-cold", "lr": step, "scale": scale, **own, **first}

    return make


def steps(name: str, share: float, **own: Any) -> Step:
    """Return an algorithm with step size ``share / L``."""
    return lambda step, size: {"name": name, "lr": share * step, **own}


def top(density: float) -> dict[str, Any]:
    """Return top-k's configuration."""
    return {"compressor": {"id": "topk", "density": density}}


def arriving(config: Config) -> dict[str, tuple[Step, int]]:
    """Return the methods that reach the optimum, and how many iterations they get."""
    rho, gamma = float(config.settings["rho"]), float(config.settings["gamma"])
    return {
        NIDS: (steps("nids", 1.0), 620),
        GEOMETRIC: (dyna("geometric", rho=rho, gamma=gamma), 660),
        ZOOM: (dyna("zoom"), 700),
        TOP20: (steps("cold", 1.0, gamma=0.5, **top(0.2)), 880),
        TWO_BITS: (steps("cold", 1.0, gamma=1.0, compressor={"id": "dithering", "bits": 2}), 620),
        NORM_SIGN: (steps("cold", 1.0, gamma=0.5, compressor={"id": "normsign"}), 750),
        LEAD: (steps("lead", 1.0, gamma=1.0, alpha=0.5, compressor={"id": "dithering", "bits": 2}), 620),
        BEER: (steps("beer", 0.5, gamma=0.5, **top(0.2)), 1250),
        TRACKING: (steps("gradient-tracking", 0.2), 2000),
    }


def strong(config: Config) -> dict[str, tuple[Step, int]]:
    """Return COLD with compression that is too strong for this problem."""
    iterations = int(config.settings["strong_iterations"])
    return {
        TOP10: (steps("cold", 1.0, gamma=0.01, **top(0.1)), iterations),
        SIGN: (steps("cold", 1.0, gamma=0.003, compressor={"id": "scaledsign"}), iterations),
    }


FLOOR_STEPS: Final = (1.0, 0.3, 0.1, 0.03, 0.01)
"""Step sizes of methods that stop at a floor, in 1/L; the same for all of them."""

SMALLER: Final = (0.003, 0.001)
"""Step sizes at which only the fixed point is computed: to come near it takes longer than a run."""

INEXACT: Final[Mapping[str, Mapping[str, Any]]] = {
    "D-PSGD": {"name": "dpsgd"},
    "CHOCO, top-20 %": {"name": "choco", "gamma": 0.5, **top(0.2)},
    "DeepSqueeze, top-20 %": {"name": "deepsqueeze", "gamma": 0.2, **top(0.2)},
}


def floors(config: Config) -> dict[str, tuple[Step, int]]:
    """Return methods whose fixed point is not the optimum, each with the same steps and as many iterations."""
    iterations = int(config.settings["floor_iterations"])
    return {
        _floor(label, s): (steps(share=s, **own), iterations) for label, own in INEXACT.items() for s in FLOOR_STEPS
    }


def _floor(label: str, step: float) -> str:
    return f"{label}, ηL = {step:g}"


def fixed_points(problem: Convex, config: Config) -> dict[str, float]:
    """Return how far the fixed points of D-PSGD and CHOCO are from the optimum, by the names of their rows."""
    from fedcomp.experiments.convex import fixed_point
    from fedcomp.gossip.topology import topology_of

    graph = topology_of(str(config.settings["topology"]), config.clients, config.seed)
    weights = graph.mixing_matrix(0, symmetric=True)
    found: dict[str, float] = {}
    for label, last in (("D-PSGD", False), ("CHOCO, top-20 %", True)):
        gamma, x = float(INEXACT[label].get("gamma", 1.0)), None
        for s in sorted((*FLOOR_STEPS, *SMALLER)):
            x = fixed_point(problem, weights, s / problem.smoothness, gamma=gamma, mixes_last=last, start=x)
            found[_floor(label, s)] = problem.distance(x)
    return found


def schedules(config: Config) -> dict[str, tuple[Step, int]]:
    """Return Dyna-COLD with other scales than the right one."""
    rho, gamma = float(config.settings["rho"]), float(config.settings["gamma"])
    usual = partial(dyna, "geometric", rho=rho, gamma=gamma)
    return {
        "geometric, ρ = 0.90": (dyna("geometric", rho=0.90, gamma=gamma), 400),
        "geometric, ρ = 0.95": (dyna("geometric", rho=0.95, gamma=gamma), 400),
        "geometric, ρ = 0.99": (dyna("geometric", rho=0.99, gamma=gamma), 1000),
        "geometric, s0 / 100": (usual(s0=0.01), 400),
        "geometric, s0 · 1000": (usual(s0=1000.0), 700),
        "geometric, nothing tolerated": (usual(tolerance=1.0), 400),
        **{_zoom(s0): (dyna("zoom", s0=s0), 900 if s0 > 1.0 else 700) for s0 in SCALES if s0 != 1.0},
        "zoom, ρ = 0.8, γ = 0.5": (dyna("zoom", rho=0.8, gamma=0.5), 400),
    }


FAILING: Final = ("geometric, ρ = 0.90", "geometric, ρ = 0.95", "geometric, s0 / 100")
"""Schedules that must be noticed."""


def _zoom(s0: float) -> str:
    return ZOOM if s0 == 1.0 else f"zoom, s0 = {s0:g}"


def rows(config: Config) -> list[RunSpec]:
    """Two of the runs over Flower's messages, in float64, with the gradients of all examples."""
    Energy.of(config.settings)  # what cannot be is refused before anything runs
    shared: dict[str, Any] = {"lr": ROW_STEP, "momentum": 0.0, "batch_size": 0, "dtype": "float64", "dense_below": 0}
    shared |= {"task.partition": "sorted", "task.l2": config.settings["l2"], "topology": config.settings["topology"]}
    shared["evaluate_every"] = max(1, config.rounds)
    return [config.spec("nids", NIDS, TASK, **shared), config.spec("dyna-cold", ZOOM, TASK, **shared)]


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Run everything on the convex problem, and compare the rows with the same runs in one process."""
    from fedcomp.experiments.convex import Convex
    from fedcomp.tasks import get_task

    task = get_task(TASK, partition="sorted", l2=config.settings["l2"])
    say("the optimum, by Newton's method")
    problem = Convex.of(task, config.clients)
    plan = {"arrive": arriving(config), "strong": strong(config), "floor": floors(config), "scale": schedules(config)}
    say("fixed points of inexact methods, by Newton's method")
    fixed: dict[str, float] = say.cell("fixed points", partial(fixed_points, problem, config))
    courses: dict[str, Course] = {}
    for name, (make, iterations) in (item for group in plan.values() for item in group.items()):
        say(f"{name}: up to {iterations} iterations")
        run = partial(_course, problem, make, min(iterations, int(config.settings["most"])), config)
        courses[name] = Course.from_json(say.cell(name, run))
    say("the same as Flower's rows, in one process")
    short = say.cell(FLOAT32, partial(_course, problem, steps("nids", 1.0), 2, config, dtype="float32"))
    apart = {label: _apart(config, problem, result) for label, result in results.items()}
    letter = Course.from_json(short).letter
    return Findings(
        tables=[
            _arrival_table(config, courses, letter),
            _floor_table(config, courses, fixed),
            _scale_table(config, courses),
            _row_table(results, apart),
        ],
        figures=_figures(config, courses),
        values={
            **_values(config, courses, letter),
            **{f"fixed/{name}": distance for name, distance in fixed.items()},
            **{f"apart/{label}": float(count) for label, count in apart.items()},
            "smoothness": problem.smoothness,
        },
        tasks=[task.record()],
    )


def _course(problem: Convex, make: Step, iterations: int, config: Config, *, dtype: str = "float64") -> dict[str, Any]:
    """Run one algorithm from zero."""
    import numpy as np

    from fedcomp.experiments.convex import error_curve
    from fedcomp.experiments.decentralised import per_letter
    from fedcomp.gossip import get_algorithm
    from fedcomp.gossip.topology import topology_of

    zero = np.zeros(problem.layout.size)
    size = float(np.abs(problem.gradients(zero)).max()) / problem.smoothness
    algorithm = get_algorithm(make(1.0 / problem.smoothness, size))
    graph = topology_of(str(config.settings["topology"]), config.clients, config.seed)
    start = zero.astype(dtype)
    curve = error_curve(problem, algorithm, graph, iterations, seed=config.seed, start=start)
    fit = curve.fit()
    return asdict(
        Course(
            errors=curve.errors.tolist(),
            bits=curve.bits.tolist(),
            payload_bits=curve.payload_bits.tolist(),
            first=curve.first(float(config.settings["tolerance"])),
            rate=fit.rate,
            r2=fit.r2,
            conserved=largest(curve.invariants.values()),
            stopped=curve.stopped,
            saturated=curve.saturated,
            letter=per_letter(curve.traffic, headers=False),
        )
    )


def _apart(config: Config, problem: Convex, result: RunResult) -> int:
    """Return how many bytes of a row's model differ from those of the same run in one process."""
    from fedcomp.gossip import get_algorithm
    from fedcomp.gossip.central import simulate
    from fedcomp.gossip.local import FlatObjective
    from fedcomp.gossip.topology import topology_of
    from fedcomp.gossip.vector import flatten, unflatten
    from fedcomp.strategies.gossip.strategy import mean_of

    layout = problem.layout
    arrays = problem.objectives[0].start()
    outcome = simulate(
        get_algorithm({"name": result.spec.system, "lr": result.spec.settings["lr"]}),
        topology_of(str(config.settings["topology"]), config.clients, config.seed),
        [FlatObjective(f, layout) for f in problem.objectives],
        flatten(arrays, layout, "float64"),
        config.rounds,
        layout=layout,
        seed=config.seed,
    )
    middle = mean_of([unflatten(outcome.models[node], layout) for node in sorted(outcome.models)])
    return different_bytes({name: middle[name] for name in result.arrays}, result.arrays)


def _values(config: Config, courses: Mapping[str, Course], letter: float) -> dict[str, float]:
    plain = courses[NIDS]
    out: dict[str, float] = {"letter32": letter, "nids_bits": _nids_bits(plain, letter)}
    for name, course in courses.items():
        first = math.nan if course.first is None else float(course.first)
        out |= {
            f"first/{name}": first,
            f"slowdown/{name}": first / (plain.first or math.nan),
            f"fewer/{name}": out["nids_bits"] / course.sent(headers=False),
            f"rate/{name}": course.rate,
            f"r2/{name}": course.r2,
            f"last/{name}": course.last,
            f"conserved/{name}": course.conserved,
            f"saturated/{name}": float(course.saturated),
        }
    best = {kind: [c.last for name, c in courses.items() if name.startswith(kind)] for kind in ("D-PSGD", "CHOCO")}
    out |= {f"floor/{kind}": min(errors, default=math.nan) for kind, errors in best.items()}
    zooms = [out[f"first/{_zoom(s0)}"] for s0 in SCALES]
    out["zoom_spread"] = max(zooms) / min(zooms) if all(map(math.isfinite, zooms)) else math.nan
    return out


def _nids_bits(course: Course, letter: float) -> float:
    """Return NIDS' payload bits per edge, 32 to a number: what it would need where float32 were precise enough."""
    return math.nan if course.first is None else 8.0 * letter * course.first


def _arrival_table(config: Config, courses: Mapping[str, Course], letter: float) -> Table:
    per_byte = Energy.of(config.settings).per_byte
    plain = courses[NIDS]
    first, bits, header = plain.first or math.nan, _nids_bits(plain, letter), 64.0
    columns: dict[str, Any] = {
        "system": lambda name: name,
        "iterations": lambda name: courses[name].first,
        "times NIDS": lambda name: (courses[name].first or math.nan) / first,
        "rate": lambda name: courses[name].rate,
        "R²": lambda name: courses[name].r2,
        "letter, bytes": lambda name: courses[name].letter,
        "bits per edge": lambda name: courses[name].sent(headers=False),
        "times fewer": lambda name: bits / courses[name].sent(headers=False),
        "bits with headers": lambda name: courses[name].sent(headers=True),
        "times fewer, with headers": lambda name: (bits + header * first) / courses[name].sent(headers=True),
        "joules per edge": lambda name: None if per_byte is None else courses[name].sent(headers=True) / 8.0 * per_byte,
        "error at the end": lambda name: courses[name].last,
    }
    return table(
        f"To a relative error of {float(config.settings['tolerance']):g}",
        columns,
        (*arriving(config), *strong(config)),
        f"Deterministic gradients, {config.clients} nodes, float64. Bits per directed edge until the error stays below "
        "the tolerance, digests included; times fewer: against NIDS with 32 bits to a number, although its letters "
        "here have 64. Rate and R² of the line through the logarithms of the errors from 1e-1 to 1e-9. Empty: not "
        f"reached within the run. The last {len(strong(config))} rows are strong compression: the error falls, but "
        "consensus is slower by far than the descent.",
        optional=("joules per edge",),
    )


def _floor_table(config: Config, courses: Mapping[str, Course], fixed: Mapping[str, float]) -> Table:
    def row(name: str) -> list[Any]:
        course = courses[name]
        before = course.errors[course.iterations - course.iterations // 10]
        return [name, course.iterations, course.last, course.last / before, fixed.get(name)]

    known = [[_floor(label, s), None, None, None, fixed[_floor(label, s)]] for label in ("D-PSGD",) for s in SMALLER]
    return Table(
        "Who stops where",
        ("system", "iterations", "relative error", "times that of a tenth of the run earlier", "fixed point"),
        [*(row(name) for name in floors(config)), *known, *(row(name) for name in arriving(config))],
        "With a constant step D-PSGD and what inherits its iteration stop away from the optimum when nodes hold unlike "
        "data: the smaller the step the lower the floor, without an end, and the later it is reached. A fourth column "
        "of 1 says that the floor is reached; where it is less the error still falls. Fixed point: where the iteration "
        "rests, computed by Newton's method; empty: none was computed, or it is the optimum.",
    )


def _scale_table(config: Config, courses: Mapping[str, Course]) -> Table:
    names = (GEOMETRIC, *schedules(config))
    return Table(
        "Dyna-COLD's scale",
        ("scale", "iterations", "to the tolerance", "error at the end", "ended because"),
        [[n, courses[n].iterations, courses[n].first, courses[n].last, _reason(courses[n])] for n in names],
        "The first row is the right one: s0 is the largest gradient entry at the beginning times the step size. A "
        "schedule that falls faster than the algorithm converges, or begins too low, is noticed and ends the run; one "
        "that begins too high arrives late. An innovation of up to twice its scale is tolerated, and single nodes that "
        "pass it end nothing: the right schedule leaves the box by a little, too.",
    )


def _reason(course: Course) -> str:
    if not course.stopped:
        return ""
    return f"saturated in iteration {course.iterations}" if course.saturated else course.stopped.partition(":")[0]


def _row_table(results: Mapping[str, RunResult], apart: Mapping[str, int]) -> Table:
    def per_round(result: RunResult, name: str) -> float:
        # The first round has no letters to deliver, and the last one is observed.
        return mean(record.metrics.get(name, math.nan) for record in result.rounds[2:-1])

    def letter(result: RunResult, name: str) -> float:
        return per_round(result, name) / per_round(result, "gossip.edge.messages")

    return Table(
        "Over Flower's messages",
        (
            "system",
            "rounds",
            "letter with header, bytes",
            "edge bytes a round",
            "node bytes",
            "relay bytes",
            "overhead bytes",
            "bytes that differ from one process",
        ),
        [
            [
                label,
                len(result.rounds) - 1,
                letter(result, "gossip.edge"),
                per_round(result, "gossip.edge"),
                per_round(result, "gossip.node"),
                per_round(result, "gossip.up") + per_round(result, "gossip.down"),
                per_round(result, "gossip.overhead"),
                apart[label],
            ]
            for label, result in results.items()
        ],
        "Means over rounds. Edge bytes count every letter on every directed edge, node bytes every distinct letter "
        "once. Relay bytes are what the star moves and never an algorithm's cost; overhead is what Flower's messages "
        "weigh beside letters, which for letters this small is nearly all.",
    )


_EVERY: Final = 4
"""Iterations between two points of a curve."""


def _figures(config: Config, courses: Mapping[str, Course]) -> list[Curves]:
    def lines(names: Sequence[str], x: str = "") -> list[Series]:
        out = []
        for name in names:
            course = courses[name]
            places = [*range(0, course.iterations, _EVERY), course.iterations]
            across = [float(k) for k in places] if not x else [getattr(course, x)[k] for k in places]
            out.append(Series(name, across, [course.errors[k] for k in places]))
        return out

    exact, label = tuple(arriving(config)), "relative error"
    return [
        Curves("Error over iterations", "iteration", label, lines(exact), log_y=True),
        Curves(
            "Error over bits",
            "payload bits per directed edge",
            label,
            lines(exact, "payload_bits"),
            log_x=True,
            log_y=True,
            caption="Vectors that travel whole have 64 bits to a number here.",
        ),
        Curves(
            "Floors of inexact methods",
            "iteration",
            label,
            lines(tuple(floors(config))),
            log_y=True,
        ),
        Curves("Strong compression", "iteration", label, lines((NIDS, TOP20, *strong(config))), log_y=True),
        Curves("Schedules of the scale", "iteration", label, lines((GEOMETRIC, *schedules(config))), log_y=True),
    ]


def claims(config: Config, results: Mapping[str, RunResult], findings: Findings) -> list[Claim]:
    """One bit per coordinate at nearly NIDS' iterations; floors where there must be some; no silent divergence."""
    values = findings.values
    rho = float(config.settings["rho"])
    out = [
        Claim(f"{GEOMETRIC}: iterations, times NIDS'", values[f"slowdown/{GEOMETRIC}"], "<=", 1.2, GOAL),
        Claim(f"{GEOMETRIC}: times fewer payload bits than NIDS", values[f"fewer/{GEOMETRIC}"], ">=", 25.0, GOAL),
        Claim(f"{ZOOM}: iterations, times NIDS'", values[f"slowdown/{ZOOM}"], "<=", 1.2, GOAL),
        Claim(f"{ZOOM}: times fewer payload bits than NIDS", values[f"fewer/{ZOOM}"], ">=", 25.0, GOAL),
        *(
            Claim(
                f"{kind}: lowest error of all step sizes after {config.settings['floor_iterations']} iterations",
                values[f"floor/{kind}"],
                ">",
                0.05,
                "measured, three times as many as NIDS takes to the optimum; not a bound: a smaller step has a lower "
                "floor, and takes longer to it",
            )
            for kind in ("D-PSGD", "CHOCO")
        ),
        Claim(
            "D-PSGD: distance of the fixed point per step size, at 0.003/L over that at 0.001/L, off 1 by",
            abs(values["fixed/" + _floor("D-PSGD", 0.003)] / values["fixed/" + _floor("D-PSGD", 0.001)] / 3.0 - 1.0),
            "<=",
            0.1,
            f"{THEORY}: the floor falls in proportion to the step, and is zero at none",
        ),
        Claim(
            "D-PSGD at 0.1/L: error at the end over that of the fixed point, off 1 by",
            abs(values["last/" + _floor("D-PSGD", 0.1)] / values["fixed/" + _floor("D-PSGD", 0.1)] - 1.0),
            "<=",
            0.05,
            f"{DERIVED}: the run ends where Newton's method says",
        ),
        Claim(
            "error over iterations is a straight line: least R² of " + ", ".join(LINEAR),
            min((values[f"r2/{name}"] for name in LINEAR), key=lambda r2: r2 if r2 == r2 else -math.inf),
            ">",
            0.99,
            GOAL,
        ),
        Claim(f"{NORM_SIGN}: R² of that line", values[f"r2/{NORM_SIGN}"], ">", 0.99, GOAL, gate=False),
        Claim(
            f"{GEOMETRIC}: slope over the scale's, off by",
            abs(math.log(values[f"rate/{GEOMETRIC}"]) / math.log(rho) - 1.0),
            "<=",
            0.05,
            f"{DERIVED}: the error cannot fall faster than the scale, and must keep up with it",
        ),
        Claim(
            "zoom from first scales of 1e-3, 1 and 1e3: slowest over fastest",
            values["zoom_spread"],
            "<=",
            1.7,
            f"{DERIVED}: each factor of 1000 costs as many iterations as the scale needs to cross it",
        ),
        Claim(
            "schedules that are too fast or too low: noticed, of " + str(len(FAILING)),
            sum(values[f"saturated/{name}"] for name in FAILING),
            "==",
            float(len(FAILING)),
            "requirement: no silent divergence",
        ),
        Claim(
            "duals sum to zero: largest sum at the end",
            largest(values[f"conserved/{name}"] for name in (NIDS, GEOMETRIC, ZOOM, TOP20, TWO_BITS, NORM_SIGN, LEAD)),
            "<",
            1e-10,
            f"{THEORY}: what one end of an edge adds the other subtracts",
        ),
    ]
    return [
        *out,
        *(
            Claim(
                f"{label}: bytes of the model over Flower's messages that differ from the run in one process",
                values[f"apart/{label}"],
                "==",
                0.0,
                "requirement: the same letters, the same bits",
            )
            for label in OVER_FLOWER
        ),
    ]


def answer(config: Config, results: Mapping[str, RunResult], findings: Findings) -> str:
    """Return what came out, in this run's figures."""
    values = findings.values
    if math.isnan(values[f"slowdown/{GEOMETRIC}"]):
        return f"One bit per coordinate did not reach the optimum in {config.settings['most']} iterations."
    return (
        f"One bit per coordinate reaches the optimum with {values[f'fewer/{GEOMETRIC}']:.1f} times fewer payload bits "
        f"than whole vectors (NIDS), in {values[f'slowdown/{GEOMETRIC}']:.2f} times its iterations; without correction "
        f"D-PSGD came no nearer than {values['floor/D-PSGD']:.2g}."
    )


EXPERIMENT = Experiment(
    name="cold",
    question="How few bits reach the exact optimum when every neighbour of a ring holds other classes?",
    rows=rows,
    options=OPTIONS,
    rounds=60,
    clients=8,
    minutes=6.0,
    quick=(
        "rounds=4",
        "clients=4",
        "most=14",
        "tolerance=0.09",
        "l2=5",
        "topology=complete",
    ),
    notes=(
        "Logistic regression on the digits, five and more against the rest, in order of the digit over eight nodes of "
        "a ring: no node holds what its neighbours hold, and no node's own optimum is the common one. 65 parameters, "
        "regularised, L/µ = 34; gradients of all of a node's examples, float64. The optimum is computed by Newton's "
        "method, and errors are relative distances to it, root mean square over the nodes.\n\n"
        "The baseline is NIDS: COLD without compression. Mild compression keeps its rate. Strong compression does not: "
        "γ must shrink much faster than what the compressor keeps, and then consensus decides the rate. One bit per "
        "coordinate works because the scale is known, not because signs are a good compressor.\n\n"
        "Two rows run over Flower's messages, for fewer rounds, from the task's initial model instead of zero; their "
        "accuracy says nothing here, and their models must be those of the same run in one process, bit for bit."
    ),
    measure=judged(measure, claims, answer),
)
