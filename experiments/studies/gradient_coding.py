"""Gradient coding: rounds among stragglers on a simulated clock, with the resulting models and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.experiments.findings import Table, different_bytes, mean
from fedcomp.experiments.kit import Records, curves, table
from fedcomp.experiments.spec import RunResult
from fedcomp.experiments.tables import Found, Studied, Training
from fedcomp.rng import Key

# With ten clients, 1 + 1 divides their number and 3 + 1 does not, so both fractional repetition and the cyclic code
# run.
LOSSES: Final = (0, 1, 3)
MOST: Final = LOSSES[-1]
# From tails with hardly any mean to tails so light that no device straggles.
TAILS: Final = (1.05, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Tail indices of the plot: P(slower than x) = x^-index."""

DRAWN, FIXED = "redrawn every round", "the same in all rounds"
SPEEDS: Final = (DRAWN, FIXED)
ALL: Final = "wait for all"


def coded(losses: int) -> str:
    """Return the label of the row that tolerates this many losses."""
    return f"gradient code, s = {losses}"


def over_field(losses: int) -> str:
    """Return the label of the row over GF(2^31 - 1)."""
    return f"over GF(2^31 - 1), s = {losses}"


def ignoring(losses: int) -> str:
    """Return the name of the scheme that ignores the slowest devices."""
    return f"ignore the {losses} slowest"


def schemes(clients: int) -> dict[str, dict[str, Any]]:
    """Return the settings of the schemes that run among stragglers, by name."""
    # The same strategy with s = 0 waits for all, so only the code differs.
    out: dict[str, dict[str, Any]] = {ALL: {"losses": 0}}
    out |= {coded(s): {"losses": s} for s in LOSSES[1:]}
    # A server that ignores stragglers equals a code without redundancy that ends a round at a quorum.
    out |= {ignoring(s): {"losses": 0, "approximate": True, "quorum": max(1, clients - s)} for s in LOSSES[1:]}
    out[over_field(MOST)] = {"losses": MOST, "arithmetic": "gf31"}
    return out


def study(found: Found) -> Studied:
    """Run every scheme with stragglers of both kinds; compute the times without backlog for other tails."""
    config, results = found.config, found.results
    training = Training.of(found.experiment, config)
    runs = found.sweep(among_stragglers, {"speeds": SPEEDS, "name": list(schemes(config.clients))}, training=training)
    wait = [_seconds(runs, coded(MOST), speeds) for speeds in SPEEDS]
    off = max(_distance(run.weights, results[coded(0)]) for run in runs.where(name=coded(MOST)))
    return Studied(
        {
            **_quantities(results, runs),
            "off": f"{off:.0e}",
            "least wait": min(wait),
            "most wait": max(wait),
        },
        tables=[_stragglers(found, runs)],
        figures=[
            curves(
                f"Test loss over simulated time, stragglers {FIXED}",
                # The curve over the field would cover the curve of the same code in floats.
                [run for run in runs.where(speeds=FIXED) if run.name != over_field(MOST)],
                lambda run: np.cumsum(run.seconds).tolist(),
                "loss",
                "name",
                x_label="simulated seconds",
                y_label="test loss",
                log_y=True,
            ),
            curves(
                "Seconds of a round against the stragglers' tail",
                LOSSES,
                lambda s: TAILS,
                lambda s: [expected_seconds(config.clients, s, tail) for tail in TAILS],
                coded,
                x_label="index of the Pareto tail",
                y_label="mean seconds of a round",
                log_x=True,
                log_y=True,
                caption="Computed: the mean time until the sum is determined, with s + 1 times the work, if no device "
                "is still busy with the previous round. With light tails coding costs more than it saves.",
            ),
        ],
    )


def slowdown(seed: int, speeds: str, tail: float) -> Callable[[int, int], float]:
    """Return ``(round, partition) -> seconds per partition``, at least 1, with a Pareto tail of index ``tail``."""

    def seconds(server_round: int, partition: int) -> float:
        # The key has the partition and, if speeds are redrawn, the round, so every scheme has the same stragglers.
        key = Key(seed, "stragglers", server_round if speeds == DRAWN else 0, partition)
        # The inverse of the Pareto distribution function; 1 - u is never 0.
        return float((1.0 - key.uniform(1)[0]) ** (-1.0 / tail))

    return seconds


def among_stragglers(speeds: str, name: str, *, training: Training) -> dict[str, Any]:
    """Run one scheme with real messages on the in-process engine with a simulated clock.

    Returns
    -------
    dict
        For each round the seconds, the seconds if all devices restarted, the test loss, the accuracy and the answers
        that were in time; the final weights; and the largest difference between the clock and the times that
        :func:`replay` computes from the drawn times.
    """
    from fedcomp.clients.app import app  # imports torch and Flower
    from fedcomp.experiments.serve import serve
    from fedcomp.flower.grid import InProcessGrid

    config = training.config
    settings = schemes(config.clients)[name]
    seconds = slowdown(config.seed, speeds, float(config.settings["tail"]))
    # A device computes s + 1 partitions before it can answer.
    work = int(settings["losses"]) + 1
    spec = replace(training.spec(coded(0), **settings), engine="inprocess")
    marks: list[float] = []

    def computing(delivery: Any) -> float:
        trains = delivery.message_type.partition(".")[0] == "train"
        # Queries and evaluations take no time, so the seconds of a round are those of training.
        return work * seconds(delivery.round, delivery.partition) if trains else 0.0

    with InProcessGrid(app, config.clients, seed=config.seed, compute_seconds=computing) as grid:
        result = serve(spec, grid, on_round=lambda _record: marks.append(grid.clock))
    # A second way to compute the same seconds, without messages; the claims compare both.
    expected = replay(config.clients, config.rounds, settings, seconds)
    laps = np.diff(marks)
    return {
        "seconds": laps.tolist(),
        "restarted": replay(config.clients, config.rounds, settings, seconds, restart=True).tolist(),
        "off": float(np.max(np.abs(laps - expected), initial=0.0)),
        "loss": [record.loss for record in result.rounds[1:]],
        "accuracy": [record.accuracy for record in result.rounds[1:]],
        "answers": [record.metrics["coded.received"] for record in result.rounds[1:]],
        "weights": _flat(result).tolist(),
    }


def replay(
    clients: int,
    rounds: int,
    settings: Mapping[str, Any],
    seconds: Callable[[int, int], float],
    *,
    restart: bool = False,
) -> NDArray[np.float64]:
    """Return the seconds of every round from the drawn times.

    A device that is still busy with an older round starts later, unless all ``restart`` every round.
    """
    losses, quorum = int(settings["losses"]), int(settings.get("quorum", 0))
    clock, free, out = 0.0, np.zeros(clients), []
    for server_round in range(1, rounds + 1):
        drawn = np.array([seconds(server_round, partition) for partition in range(clients)])
        free = (clock if restart else np.maximum(free, clock)) + (losses + 1) * drawn
        if quorum:
            over = float(np.sort(free)[quorum - 1])
        elif clients % (losses + 1) == 0:
            # Fractional repetition ends with the first answer of every group.
            over = float(free.reshape(-1, losses + 1).min(axis=1).max())
        else:
            over = float(np.sort(free)[clients - losses - 1])
        out.append(over - clock)
        clock = over
    return np.array(out)


def expected_seconds(clients: int, losses: int, tail: float) -> float:
    """Return the mean seconds of a round in which all devices restart, with Pareto times of index ``tail``.

    The k-th smallest of n such times has as its mean the product of j / (j - 1/a) over j from n - k + 1 to n (recalled,
    and checked against draws in the tests). With fractional repetition the first answer of each group counts; its time
    has the index (s + 1) a, and the slowest group ends the round.
    """
    n, rank, index = clients, clients - losses, tail
    if clients % (losses + 1) == 0:
        n = rank = clients // (losses + 1)
        index = tail * (losses + 1)
    j = np.arange(n - rank + 1, n + 1)
    return (losses + 1) * float(np.prod(j / (j - 1.0 / index)))


def _flat(result: RunResult) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(array, np.float64).reshape(-1) for array in result.arrays.values()])


def _distance(weights: Any, other: RunResult) -> float:
    """Return the largest difference, relative to the largest number."""
    flat = _flat(other)
    return float(np.max(np.abs(np.asarray(weights) - flat))) / max(float(np.max(np.abs(flat))), 1e-300)


def _seconds(runs: Records, name: str, speeds: str, column: str = "seconds") -> float:
    """Return the seconds of a scheme's rounds divided by those of waiting for all."""
    one, whole = (mean(runs.one(name=which, speeds=speeds)[column]) for which in (name, ALL))
    return one / whole


def _quantities(results: Mapping[str, RunResult], runs: Records) -> dict[Any, float]:
    """Return the quantities of the claims: the curve equals gradient descent on all data, no byte is saved, and rounds
    end sooner."""
    whole, field_whole = results[coded(0)], results[over_field(0)]
    losses = np.array([record.loss for record in whole.rounds[1:]])
    # As float32, the type of models; the weights of a run were widened for JSON.
    narrow = {"all": _flat(field_whole).astype(np.float32)}
    bits = different_bytes(field_whole.arrays, results[over_field(MOST)].arrays) + sum(
        different_bytes({"all": np.array(run.weights, np.float32)}, narrow) for run in runs.where(name=over_field(MOST))
    )
    # With the same slow devices: redrawn stragglers leave out different data in every round, which averages out.
    ignored, kept = (runs.one(name=name, speeds=FIXED).loss[-1] for name in (ignoring(MOST), coded(MOST)))
    found: dict[Any, float] = {
        (over_field(MOST), "bytes of models that differ from those with s = 0"): bits,
        "off Flower's FedAvg": _distance(_flat(whole), results["FedAvg"]),
        "clock off the times computed from the draws, seconds": max(runs.each("off")),
        (coded(MOST), "uplink payload over that with s = 0"): (
            results[coded(MOST)].uplink_payload_bytes / max(1, whole.uplink_payload_bytes)
        ),
        (ignoring(MOST), f"test loss over that of the code, {FIXED}"): ignored / kept,
    }
    for run in (run for s in LOSSES[1:] for run in runs.where(name=coded(s))):
        off = float(np.max(np.abs(np.array(run.loss) - losses) / losses))
        found[run.name, f"off in weights, {run.speeds}"] = _distance(run.weights, whole)
        found[run.name, f"off in a round's loss, {run.speeds}"] = off
        over = f"seconds over waiting for all, {run.speeds}"
        found[run.name, over] = _seconds(runs, run.name, run.speeds)
        found[run.name, f"{over}, if they stop"] = _seconds(runs, run.name, run.speeds, "restarted")
    return found


def _stragglers(found: Found, runs: Records) -> Table:
    config = found.config
    columns: dict[str, Any] = {
        "scheme": "name",
        "stragglers": "speeds",
        "partitions per device": lambda run: schemes(config.clients)[run.name]["losses"] + 1,
        "seconds per round": lambda run: mean(run.seconds),
        "if stragglers stopped": lambda run: mean(run.restarted),
        "answers": lambda run: mean(run.answers),
        "test loss": lambda run: run.loss[-1],
        "accuracy, %": lambda run: 100.0 * run.accuracy[-1],
    }
    return table(
        "Rounds among stragglers",
        columns,
        runs,
        f"{config.clients} devices, {config.rounds} rounds, real messages, simulated seconds. A device needs 1 s "
        f"times a Pareto number of index {float(config.settings['tail']):g} for a partition, redrawn or not. A late "
        "device finishes its old round before it starts the new one. The next column is computed from the same "
        "numbers for devices that drop the old round and restart.",
    )
