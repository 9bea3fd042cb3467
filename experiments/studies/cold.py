"""COLD and Dyna-COLD on a convex problem: iterations and bits to the exact optimum, and floors of inexact methods."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.decentralised import Energy, per_message
from fedcomp.experiments.findings import largest
from fedcomp.experiments.kit import Record, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.relayed import beside
from fedcomp.experiments.tables import Found, Studied

if TYPE_CHECKING:
    # Listing the experiments needs no torch, so it is imported when one runs.
    from fedcomp.experiments.convex import Convex

TASK: Final = "digits-five"
NIDS: Final = "NIDS"
GEOMETRIC: Final = "Dyna-COLD, 1 bit, geometric"
ZOOM: Final = "Dyna-COLD, 1 bit, zoom"
TOP20: Final = "COLD, top-20 %"
TWO_BITS: Final = "COLD, 2 bits"
NORM_SIGN: Final = "COLD, 1 bit and a scale"
LEAD: Final = "LEAD, 2 bits"
FLOAT32: Final = "NIDS in float32"
RHO: Final = 0.97
"""Factor by which the geometric scale shrinks in each iteration."""

FLOOR_STEPS: Final = (1.0, 0.3, 0.1, 0.03, 0.01)
"""Step sizes of all methods that stop at a floor, in 1/L."""

SMALLER: Final = (0.003, 0.001)
"""Step sizes for which only the fixed point is computed, because reaching it takes longer than a run."""

Runs = dict[str, tuple[dict[str, Any], int]]
"""By name: the algorithm and its number of iterations. The step size is in 1/L; the first value of a geometric scale is
in units of the gradients' size times the step."""


def _top(density: float) -> dict[str, Any]:
    return {"compressor": {"id": "topk", "density": density}}


_GEOMETRIC: Final = {"name": "dyna-cold", "lr": 1.0, "scale": "geometric", "s0": 1.0, "rho": RHO, "gamma": 0.5}
_ZOOM: Final = {"name": "dyna-cold", "lr": 1.0, "scale": "zoom"}
_DITHERED: Final = {"compressor": {"id": "dithering", "bits": 2}}

# Most methods get enough iterations to come near 1e-9, where the fitted line ends. Gradient tracking is the slowest by
# far and gets hardly more than it needs for the tolerance.
ARRIVING: Final[Runs] = {
    NIDS: ({"name": "nids", "lr": 1.0}, 620),
    GEOMETRIC: (_GEOMETRIC, 660),
    ZOOM: (_ZOOM, 700),
    TOP20: ({"name": "cold", "lr": 1.0, "gamma": 0.5, **_top(0.2)}, 880),
    TWO_BITS: ({"name": "cold", "lr": 1.0, "gamma": 1.0, **_DITHERED}, 620),
    NORM_SIGN: ({"name": "cold", "lr": 1.0, "gamma": 0.5, "compressor": {"id": "normsign"}}, 750),
    LEAD: ({"name": "lead", "lr": 1.0, "gamma": 1.0, "alpha": 0.5, **_DITHERED}, 620),
    "BEER, top-20 %": ({"name": "beer", "lr": 0.5, "gamma": 0.5, **_top(0.2)}, 1250),
    "gradient tracking": ({"name": "gradient-tracking", "lr": 0.2}, 2000),
}
"""Methods that reach the optimum."""

# A larger consensus step diverges (measured). With this one consensus limits the rate.
STRONG: Final[Runs] = {
    "COLD, top-10 %, γ = 0.01": ({"name": "cold", "lr": 1.0, "gamma": 0.01, **_top(0.1)}, 1000),
    "COLD, mean magnitude times sign, γ = 0.003": (
        {"name": "cold", "lr": 1.0, "gamma": 0.003, "compressor": {"id": "scaledsign"}},
        1000,
    ),
}
"""COLD with compression that is too strong for this problem."""

INEXACT: Final[Mapping[str, Mapping[str, Any]]] = {
    "D-PSGD": {"name": "dpsgd"},
    "CHOCO, top-20 %": {"name": "choco", "gamma": 0.5, **_top(0.2)},
    "DeepSqueeze, top-20 %": {"name": "deepsqueeze", "gamma": 0.2, **_top(0.2)},
}


def _floor(label: str, step: float) -> str:
    return f"{label}, ηL = {step:g}"


FLOORS: Final[Runs] = {
    _floor(label, s): ({**own, "lr": s}, 1200) for label, own in INEXACT.items() for s in FLOOR_STEPS
}
"""Methods whose fixed point is not the optimum, all with the same step sizes and numbers of iterations."""

SCHEDULES: Final[Runs] = {
    # Faster than any method can converge here (NIDS: 0.967), so these schedules must be noticed.
    "geometric, ρ = 0.90": ({**_GEOMETRIC, "rho": 0.90}, 400),
    "geometric, ρ = 0.95": ({**_GEOMETRIC, "rho": 0.95}, 400),
    "geometric, ρ = 0.99": ({**_GEOMETRIC, "rho": 0.99}, 1000),
    "geometric, s0 / 100": ({**_GEOMETRIC, "s0": 0.01}, 400),
    "geometric, s0 · 1000": ({**_GEOMETRIC, "s0": 1000.0}, 700),
    "geometric, nothing tolerated": ({**_GEOMETRIC, "tolerance": 1.0}, 400),
    # Six orders of magnitude: a zoom has to find its scale from any start.
    "zoom, s0 = 0.001": ({**_ZOOM, "s0": 1e-3}, 700),
    "zoom, s0 = 1000": ({**_ZOOM, "s0": 1e3}, 900),
    "zoom, ρ = 0.8, γ = 0.5": ({**_ZOOM, "rho": 0.8, "gamma": 0.5}, 400),
}
"""Dyna-COLD with wrong first scales."""

FAILING: Final = ("geometric, ρ = 0.90", "geometric, ρ = 0.95", "geometric, s0 / 100")
"""Schedules that must be noticed."""

RUNS: Final[Runs] = {**ARRIVING, **STRONG, **FLOORS, **SCHEDULES}


def fixed_points(problem: Convex, config: Config) -> dict[str, float]:
    """Return the distance of the fixed points of D-PSGD and CHOCO from the optimum, by row."""
    from fedcomp.experiments.convex import fixed_point
    from fedcomp.gossip.topology import topology_of

    graph = topology_of(str(config.settings["topology"]), config.clients, config.seed)
    weights = graph.mixing_matrix(0, symmetric=True)
    found: dict[str, float] = {}
    # CHOCO mixes after the gradient step, D-PSGD before it: their fixed points differ.
    for label, last in (("D-PSGD", False), ("CHOCO, top-20 %", True)):
        gamma, x = float(INEXACT[label].get("gamma", 1.0)), None
        # From small steps to large ones, each starting at the previous fixed point, so Newton's method starts near its
        # root.
        for s in sorted((*FLOOR_STEPS, *SMALLER)):
            x = fixed_point(problem, weights, s / problem.smoothness, gamma=gamma, mixes_last=last, start=x)
            found[_floor(label, s)] = problem.distance(x)
    return found


def course(run: str, *, config: Config, problem: Convex) -> dict[str, Any]:
    """Run one algorithm from zero.

    Returns
    -------
    dict
        ``errors``, ``bits`` and ``payload_bits`` per directed edge, at the start and after every iteration; ``first``,
        the iterations to the tolerance, or None; ``rate`` and ``r2`` of the line through the logarithms of the errors
        from 1e-1 to 1e-9; ``conserved``, the largest invariant at the end; ``stopped``, the reason for an early end;
        ``saturated``, whether the scale was too small; ``message``, mean bytes of a message's body.
    """
    import numpy as np

    from fedcomp.experiments.convex import error_curve
    from fedcomp.gossip import get_algorithm
    from fedcomp.gossip.topology import topology_of

    single = run == FLOAT32
    # One run of NIDS in float32 gives the bytes of a message with 32 bits per number. It is not trained to the optimum,
    # which float32 cannot reach.
    algorithm, iterations = RUNS[NIDS if single else run]
    zero, step = np.zeros(problem.layout.size), 1.0 / problem.smoothness
    own = {**algorithm, "lr": algorithm["lr"] * step}
    if own.get("scale") == "geometric":
        # A fixed schedule has to start above the first innovations, which have the size of the gradients times the
        # step. The zoom finds its own scale.
        own["s0"] *= float(np.abs(problem.gradients(zero)).max()) / problem.smoothness
    curve = error_curve(
        problem,
        get_algorithm(own),
        topology_of(str(config.settings["topology"]), config.clients, config.seed),
        2 if single else min(iterations, int(config.settings["most"])),
        seed=config.seed,
        # At zero the largest gradient entry is known before the run; the first scale is given in this unit.
        start=zero.astype("float32" if single else "float64"),
    )
    rate, r2 = curve.fit()
    return {
        **{name: getattr(curve, name).tolist() for name in ("errors", "bits", "payload_bits")},
        "first": curve.first(float(config.settings["tolerance"])),
        "rate": rate,
        "r2": r2,
        "conserved": largest(curve.invariants.values()),
        "stopped": curve.stopped,
        "saturated": curve.saturated,
        "message": per_message(curve.traffic, headers=False),
    }


def study(found: Found) -> Studied:
    """Run all methods on the convex problem, and compare the rows with the same runs in one process."""
    from fedcomp.experiments.convex import Convex
    from fedcomp.tasks import get_task

    config, say = found.config, found.say
    task = get_task(TASK, partition="sorted", l2=config.settings["l2"])
    say("the optimum, by Newton's method")
    problem = Convex.of(task, config.clients)
    say("fixed points of inexact methods, by Newton's method")
    fixed: dict[str, float] = say.cell("fixed points", partial(fixed_points, problem, config))
    courses = {
        each.run: each for each in found.sweep(course, {"run": [*RUNS, FLOAT32]}, config=config, problem=problem)
    }
    relayed, differ = beside(
        found,
        "Whole messages include Flower's own fields, which are nearly everything for messages this small.",
    )
    # This favours the baseline: float32 would stop near 1e-6, and NIDS' messages here have 64 bits per number.
    bits = 8.0 * float(courses[FLOAT32].message) * _first(courses[NIDS])
    tolerance, per_byte = float(config.settings["tolerance"]), Energy.of(config.settings).per_byte
    # A header has 8 bytes, and every edge carries one message per iteration.
    header = 64.0 * _first(courses[NIDS])
    arrival: dict[str, Any] = {
        "row": "run",
        "iterations": "first",
        "times NIDS": lambda one: _slowdown(courses, one),
        "rate": "rate",
        "R²": "r2",
        "message, bytes": "message",
        "bits per edge": lambda one: _sent(one, headers=False),
        "times fewer": lambda one: bits / _sent(one, headers=False),
        "times fewer, with headers": lambda one: (bits + header) / _sent(one, headers=True),
        "joules per edge": lambda one: None if per_byte is None else _sent(one, headers=True) / 8.0 * per_byte,
    }

    def settling(one: Record) -> float:
        # One error does not show whether the floor is reached: the last tenth of the run must not change it.
        done = len(one.errors) - 1
        return float(one.errors[-1] / one.errors[done - done // 10])

    ends: dict[str, Any] = {
        "row": lambda row: row[0],
        "iterations": lambda row: row[1] and len(row[1].errors) - 1,
        "to the tolerance": lambda row: row[1] and row[1].first,
        "error at the end": lambda row: row[1] and row[1].errors[-1],
        "times that of a tenth of the run earlier": lambda row: row[1] and settling(row[1]),
        "fixed point": lambda row: fixed.get(row[0]),
        "ended because": lambda row: row[1] and ("saturated" * row[1].saturated or row[1].stopped.partition(":")[0]),
    }

    return Studied(
        {**quantities(courses, fixed, bits), **differ},
        tables=[
            table(
                f"To a relative error of {tolerance:g}",
                arrival,
                [courses[name] for name in (*ARRIVING, *STRONG)],
                f"Deterministic gradients, {config.clients} nodes, float64. Bits per directed edge until the error "
                "stays below the tolerance, with digests. Times fewer: compared with NIDS at 32 bits per number, "
                "although its messages here have 64. Rate and R² belong to the line through the logarithms of the "
                f"errors from 1e-1 to 1e-9. Empty: not reached within the run. The last {len(STRONG)} rows have "
                "strong compression: the error falls, but consensus is far slower than the descent.",
                optional=("joules per edge",),
            ),
            table(
                "How runs end",
                ends,
                [(name, courses.get(name)) for name in (*RUNS, *(_floor("D-PSGD", s) for s in SMALLER))],
                "When nodes hold non-IID data, D-PSGD with a constant step, and methods built on it, stop away from "
                "the optimum. A smaller step has a lower floor and reaches it later. The floor is reached if the "
                "error equals that of a tenth of the run earlier. Fixed point: where the iteration rests, computed by "
                "Newton's method; empty if none was computed or if it is the optimum. A geometric scale that falls "
                "faster than the algorithm converges, or starts too low, is noticed and ends the run. One that starts "
                "too high arrives late. An innovation of up to twice its scale is tolerated, and single nodes above "
                "this do not end a run.",
            ),
            relayed,
        ],
        tasks=[task.record()],
    )


def _first(one: Record) -> float:
    """Return the iterations to the tolerance; NaN when it was not reached."""
    return math.nan if one.first is None else float(one.first)


def _sent(one: Record, *, headers: bool) -> float:
    """Return the bits per directed edge until the tolerance was reached; NaN if it was not."""
    return math.nan if one.first is None else float((one.bits if headers else one.payload_bits)[one.first])


def _slowdown(courses: Mapping[str, Record], one: Record) -> float:
    # NaN if NIDS did not reach the optimum: without a baseline no ratio passes a claim.
    return _first(one) / (_first(courses[NIDS]) or math.nan)


def quantities(courses: Mapping[str, Record], fixed: Mapping[str, float], bits: float) -> dict[Any, float]:
    """Return the quantities of the claims. ``bits`` are the payload bits per edge of NIDS at 32 bits per number."""
    out: dict[Any, float] = {}
    for name in (GEOMETRIC, ZOOM):
        out[name, "iterations, times NIDS'"] = _slowdown(courses, courses[name])
        out[name, "times fewer payload bits than NIDS"] = bits / _sent(courses[name], headers=False)
    for kind in ("D-PSGD", "CHOCO"):
        lowest = min(one.errors[-1] for name, one in courses.items() if name.startswith(kind))
        out[kind, "lowest error of all step sizes after 1200 iterations"] = lowest
    zooms = [_first(courses[name]) for name in (ZOOM, "zoom, s0 = 0.001", "zoom, s0 = 1000")]
    ends = courses[_floor("D-PSGD", 0.1)].errors[-1] / fixed[_floor("D-PSGD", 0.1)]
    # Divided by 3, the ratio of the two steps: 1 if the floor is proportional to the step.
    falls = fixed[_floor("D-PSGD", 0.003)] / fixed[_floor("D-PSGD", 0.001)] / 3.0
    # BEER and gradient tracking have no duals; what they conserve is another sum.
    conserving = (NIDS, GEOMETRIC, ZOOM, TOP20, TWO_BITS, NORM_SIGN, LEAD)
    return {
        **out,
        ("D-PSGD", "fixed point per step size, at 0.003/L over that at 0.001/L, off 1 by"): abs(falls - 1.0),
        ("D-PSGD", "error at the end over that of the fixed point at 0.1/L, off 1 by"): abs(ends - 1.0),
        # The minimum, computed with largest(), which returns NaN if a method gave no line; min() might skip it.
        "error over iterations is a straight line: least R² of methods that arrive": -largest(
            -float(courses[name].r2) for name in ARRIVING if name != NORM_SIGN
        ),
        (NORM_SIGN, "R² of that line"): courses[NORM_SIGN].r2,
        (GEOMETRIC, "slope over the scale's, off 1 by"): abs(
            math.log(float(courses[GEOMETRIC].rate)) / math.log(RHO) - 1.0
        ),
        "zoom from first scales of 1e-3, 1 and 1e3: slowest over fastest": largest(zooms) / min(zooms),
        "schedules that are too fast or too low: noticed, of 3": sum(bool(courses[n].saturated) for n in FAILING),
        "duals sum to zero: largest sum at the end": largest(courses[name].conserved for name in conserving),
    }
