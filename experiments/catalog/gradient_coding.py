"""Gradient coding: how much sooner does a round end when the slowest need not be waited for, and what does it cost?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.findings import Claim, Findings, Table, different_bytes, mean
from fedcomp.experiments.kit import Record, Records, Say, Sweep, claim, curves, table
from fedcomp.experiments.options import TEXT, Config, Option
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.rng import Key
from fedcomp.rules import Real

TASK = "digits"
SYSTEM = "gradient-code"
DENSE = "FedAvg"
# With ten clients 1 + 1 divides their number and 3 + 1 does not: fractional repetition and the cyclic code are both
# run.
LOSSES = (0, 1, 3)
FIELD = "gf31"
# From tails under which a mean hardly exists to tails so light that nobody straggles.
TAILS = (1.05, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Tail indices of the plot: P(slower than x) = x^-index."""

OPTIONS = {
    "task.partition": Option("shards:2", TEXT, "how examples are spread: iid, dirichlet:ALPHA, shards:COUNT"),
    "task.hidden": Option("", TEXT, "widths of the model's hidden layers; empty: logistic regression"),
    "lr": Option(0.5, Real(above=0.0), "step size of gradient descent"),
    "tail": Option(1.2, Real(above=1.0, most=100.0), "index of the stragglers' Pareto tail; the smaller, the heavier"),
}

_TAKE = ("task.", "lr")
_WHOLE: dict[str, Any] = {"max_steps": 1, "batch_size": 1 << 20, "timeout": 1e9}
"""One step on all data of a partition, so that the weighted mean of all is a step of full-batch gradient descent; no
deadline, so that what is waited for is what the scheme needs."""

DRAWN, FIXED = "redrawn every round", "the same in all rounds"
SPEEDS = (DRAWN, FIXED)


def coded(losses: int) -> str:
    """Return the label of the row that tolerates so many losses."""
    return f"gradient code, s = {losses}"


def over_field(losses: int) -> str:
    """Return the label of the row over GF(2^31 - 1)."""
    return f"over GF(2^31 - 1), s = {losses}"


def ignoring(losses: int) -> str:
    """Return the name of the scheme that does without the slowest."""
    return f"ignore the {losses} slowest"


def rows(config: Config) -> list[RunSpec]:
    """Flower's own mean; the code with 0, 1 and 3 losses; 0 and 3 losses over a prime field. Nobody is slow here."""
    # Flower's own mean, to show that s = 0 is no other method.
    out = [config.spec("fedavg", DENSE, TASK, take=_TAKE, **_WHOLE)]
    out += [config.spec(SYSTEM, coded(s), TASK, take=_TAKE, losses=s, **_WHOLE) for s in LOSSES]
    out += [
        config.spec(SYSTEM, over_field(s), TASK, take=_TAKE, losses=s, arithmetic=FIELD, **_WHOLE)
        for s in (LOSSES[0], LOSSES[-1])
    ]
    return out


def schemes(config: Config) -> dict[str, dict[str, Any]]:
    """Return the settings of what is run among stragglers, by name."""
    # The same strategy with s = 0 waits for all, so that only the code differs.
    out: dict[str, dict[str, Any]] = {"wait for all": {"losses": 0}}
    out |= {coded(s): {"losses": s} for s in LOSSES[1:]}
    # A server that ignores stragglers is the code without redundancy that ends a round at a quorum.
    out |= {ignoring(s): {"losses": 0, "approximate": True, "quorum": max(1, config.clients - s)} for s in LOSSES[1:]}
    out[over_field(LOSSES[-1])] = {"losses": LOSSES[-1], "arithmetic": FIELD}
    return out


def slowdown(config: Config, speeds: str, tail: float | None = None) -> Callable[[int, int], float]:
    """Return ``(round, partition) -> seconds per partition``, at least 1, with a Pareto tail."""
    index = float(config.settings["tail"]) if tail is None else tail

    def seconds(server_round: int, partition: int) -> float:
        # By partition and, if speeds are redrawn, round: every scheme meets the same stragglers.
        key = Key(config.seed, "stragglers", server_round if speeds == DRAWN else 0, partition)
        # Inverse of the Pareto distribution function; 1 - u is never 0.
        return float((1.0 - key.uniform(1)[0]) ** (-1.0 / index))

    return seconds


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Run every scheme among stragglers of both kinds; compute the times without backlog for other tails."""
    runs = Sweep(train, {"speeds": SPEEDS, "name": list(schemes(config))}, shared={"config": config})(say)
    most, exact, goals = LOSSES[-1], exactness(config, results, runs), times(runs)
    wait = [seconds(runs, coded(most), speeds) for speeds in SPEEDS]
    off = max(_off_model(runs.one(name=coded(most), speeds=speeds), results) for speeds in SPEEDS)
    return Findings(
        tables=[*(_times(config, speeds, runs.where(speeds=speeds)) for speeds in SPEEDS), _bytes(results)],
        figures=[
            *(
                curves(
                    f"Test loss over simulated time, stragglers {speeds}",
                    # Over the field the curve would cover that of the same code in floats.
                    [run for run in runs.where(speeds=speeds) if run.name != over_field(most)],
                    lambda run: np.cumsum(run.seconds).tolist(),
                    "loss",
                    "name",
                    x_label="simulated seconds",
                    y_label="test loss",
                    log_y=True,
                )
                for speeds in SPEEDS
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
                caption="Computed: the mean time until the sum is determined, with s + 1 times the work, when no "
                "device is still busy with the round before. Where tails are light, coding costs more than it gains.",
            ),
        ],
        claims=[*exact, *goals],
        answer=f"Rounds that end without {most} devices give the uncoded model to {off:.0e}, in {min(wait):.2f} to "
        f"{max(wait):.2f} times the seconds of waiting for all, by how devices straggle.",
    )


def train(speeds: str, name: str, *, config: Config) -> dict[str, Any]:
    """Run one scheme among stragglers."""
    return among_stragglers(config, name, schemes(config)[name], speeds)


def among_stragglers(config: Config, name: str, settings: Mapping[str, Any], speeds: str) -> dict[str, Any]:
    """Run one scheme with real messages on the engine in this process, whose clock is simulated.

    Returns
    -------
    dict
        Per round the seconds, those there were if all restarted, the test loss, the accuracy and the answers that came
        in time; the final weights; and the largest difference between the clock and what :func:`replay` computes from
        the drawn times alone.
    """
    from fedcomp.clients.app import app  # brings torch and Flower
    from fedcomp.experiments.serve import serve
    from fedcomp.flower.grid import InProcessGrid

    seconds = slowdown(config, speeds)
    # A device computes s + 1 partitions before it can answer.
    work = int(settings["losses"]) + 1
    spec = config.spec(SYSTEM, name, TASK, take=_TAKE, **settings, **_WHOLE)
    marks: list[float] = []

    def training(delivery: Any) -> float:
        trains = delivery.message_type.partition(".")[0] == "train"
        # Queries and evaluations take no time: the seconds of a round are those of training.
        return work * seconds(delivery.round, delivery.partition) if trains else 0.0

    with InProcessGrid(app, config.clients, seed=config.seed, compute_seconds=training) as grid:
        result = serve(replace(spec, engine="inprocess"), grid, on_round=lambda _record: marks.append(grid.clock))
    # A second way to the same seconds, without messages: the claims compare them.
    expected = replay(config.clients, config.rounds, settings, seconds)
    laps = np.diff(marks)
    return {
        "seconds": laps.tolist(),
        "restarted": replay(config.clients, config.rounds, settings, seconds, restart=True).tolist(),
        "off": float(np.max(np.abs(laps - expected), initial=0.0)),
        "loss": [record.loss for record in result.rounds[1:]],
        "accuracy": [record.accuracy for record in result.rounds[1:]],
        "answers": [record.metrics["coded.received"] for record in result.rounds[1:]],
        "weights": _flat(result.arrays).tolist(),
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

    Who is still busy with an older round begins later, unless all ``restart`` every round.
    """
    losses, quorum = int(settings["losses"]), int(settings.get("quorum", 0))
    clock, free, out = 0.0, np.zeros(clients), []
    for server_round in range(1, rounds + 1):
        drawn = np.array([seconds(server_round, partition) for partition in range(clients)])
        free = (clock if restart else np.maximum(free, clock)) + (losses + 1) * drawn
        if quorum:
            over = float(np.sort(free)[quorum - 1])
        elif clients % (losses + 1) == 0:
            # Fractional repetition is done with the first answer of every group.
            over = float(free.reshape(-1, losses + 1).min(axis=1).max())
        else:
            over = float(np.sort(free)[clients - losses - 1])
        out.append(over - clock)
        clock = over
    return np.array(out)


def expected_seconds(clients: int, losses: int, tail: float) -> float:
    """Return the mean seconds of a round in which all devices restart, with Pareto times of index ``tail``.

    The k-th smallest of n such times has the mean G(n + 1) G(n - k + 1 - 1/a) / (G(n - k + 1) G(n + 1 - 1/a)) (G: the
    gamma function; recalled, and checked against draws in the tests). Of fractional repetition a group's first answer
    counts, which has the index (s + 1) a, and the slowest group ends the round.
    """
    n, rank, index = clients, clients - losses, tail
    if clients % (losses + 1) == 0:
        n = rank = clients // (losses + 1)
        index = tail * (losses + 1)
    x = 1.0 / index
    # By logarithms: the gamma function overflows at 171.
    logs = math.lgamma(n + 1) + math.lgamma(n - rank + 1 - x) - math.lgamma(n - rank + 1) - math.lgamma(n + 1 - x)
    return (losses + 1) * math.exp(logs)


def _flat(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(array, np.float64).reshape(-1) for array in arrays.values()])


def _distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the largest difference, relative to the largest number."""
    return float(np.max(np.abs(a - b))) / max(float(np.max(np.abs(b))), 1e-300)


def _off_model(run: Record, results: Mapping[str, RunResult]) -> float:
    return _distance(np.array(run.weights), _flat(results[coded(0)].arrays))


def exactness(config: Config, results: Mapping[str, RunResult], runs: Records) -> list[Claim]:
    """The curve is that of gradient descent on all data, step by step, and no byte is saved."""
    most, field_whole = LOSSES[-1], results[over_field(0)]
    losses = np.array([record.loss for record in results[coded(0)].rounds[1:]])
    # As float32, which models are: a run's weights were widened to be kept as JSON.
    reference = {"all": _flat(field_whole.arrays).astype(np.float32)}
    bits = different_bytes(field_whole.arrays, results[over_field(most)].arrays)
    bits += sum(
        different_bytes({"all": np.array(run.weights, np.float32)}, reference)
        for run in runs.where(name=over_field(most))
    )
    among = [(s, runs.one(name=coded(s), speeds=speeds)) for s in LOSSES[1:] for speeds in SPEEDS]
    return [
        *(
            claim(
                f"s = {s}, stragglers {run.speeds}: largest difference of the final weights from uncoded ones, "
                "relative",
                _off_model(run, results),
                "<= 1e-6",
                "theory: the decoded sum is exact; float64 rounds it at 1e-12, float32 models at 6e-8",
            )
            for s, run in among
        ),
        *(
            claim(
                f"s = {s}, stragglers {run.speeds}: largest difference of a round's test loss, relative",
                float(np.max(np.abs(np.array(run.loss) - losses) / losses)),
                "<= 1e-6",
                "theory, as above: the same curve, step by step",
            )
            for s, run in among
        ),
        claim(
            f"over GF(2^31 - 1): bytes in which models with {most} losses tolerated differ from those with none",
            bits,
            "== 0",
            "theory: sums in a field are exact, whoever answered",
        ),
        claim(
            "largest difference of the final weights from Flower's FedAvg, relative",
            _distance(_flat(results[coded(0)].arrays), _flat(results[DENSE].arrays)),
            "<= 1e-4",
            "derived: Flower adds in float32, the code in float64",
        ),
        claim(
            "largest difference between the clock and the times computed from the draws, seconds",
            max(runs.each("off")),
            "<= 1e-6",
            "derived: a round lasts until the first answers that determine the sum",
        ),
        claim(
            f"uplink payload with s = {most} over that with s = 0",
            results[coded(most)].uplink_payload_bytes / max(1, results[coded(0)].uplink_payload_bytes),
            "== 1.0",
            "derived: an answer is as long as an update; there is no saving",
        ),
    ]


def seconds(runs: Records, name: str, speeds: str, column: str = "seconds") -> float:
    """Return the seconds of a scheme's rounds over those of waiting for all."""
    one, whole = (mean(runs.one(name=which, speeds=speeds)[column]) for which in (name, "wait for all"))
    return one / whole


def times(runs: Records) -> list[Claim]:
    """Rounds end sooner under heavy tails."""
    most = LOSSES[-1]
    # Where the same devices stay slow: redrawn stragglers leave out other data in every round, which averages out.
    ignored, kept = (runs.one(name=name, speeds=FIXED).loss[-1] for name in (ignoring(most), coded(most)))
    return [
        *(
            claim(
                f"s = {s}, stragglers {speeds}: seconds per round over those of waiting for all",
                seconds(runs, coded(s), speeds),
                "<= 1.0",
                "the aim of the paper; holds for heavy tails only, and depends on the draws",
                gate=False,
            )
            for s in LOSSES[1:]
            for speeds in SPEEDS
        ),
        *(
            claim(
                f"s = {s}, stragglers {DRAWN}, which stop: seconds per round over those of waiting for all",
                seconds(runs, coded(s), DRAWN, "restarted"),
                "<= 1.0",
                "as above, computed from the same draws",
                gate=False,
            )
            for s in LOSSES[1:]
        ),
        claim(
            f"{ignoring(most)}, stragglers {FIXED}: test loss over that of the code with s = {most}",
            ignored / kept,
            ">= 1.1",
            "label-sorted data: what the slow devices hold is never learnt",
        ),
    ]


def _times(config: Config, speeds: str, runs: Records) -> Table:
    columns: dict[str, Any] = {
        "scheme": "name",
        "partitions per device": lambda run: schemes(config)[run.name]["losses"] + 1,
        "seconds per round": lambda run: mean(run.seconds),
        "slowest round": lambda run: max(run.seconds),
        "if stragglers stopped": lambda run: mean(run.restarted),
        "answers": lambda run: mean(run.answers),
        "test loss": lambda run: run.loss[-1],
        "accuracy, %": lambda run: 100.0 * run.accuracy[-1],
    }
    return table(
        f"Stragglers {speeds}",
        columns,
        runs,
        f"{config.clients} devices, {config.rounds} rounds, real messages, simulated seconds. A partition takes a "
        f"device 1 s times a Pareto number of index {float(config.settings['tail']):g}, {speeds}. A device that is "
        "late goes on with its old round before it begins the new one; the column beside it is computed from the same "
        "numbers for devices that drop it and restart.",
    )


def _bytes(results: Mapping[str, RunResult]) -> Table:
    def each(result: RunResult, count: int) -> float:
        # Round 0 is the evaluation of the initial model.
        return count / (max(1, len(result.rounds) - 1) * result.spec.clients) / 1000

    columns: dict[str, Any] = {
        "row": lambda result: result.spec.label,
        "up, payload kB": lambda result: each(result, result.uplink_payload_bytes),
        "up, wire kB": lambda result: each(result, result.uplink_wire_bytes),
        "down, payload kB": lambda result: each(result, result.downlink_payload_bytes),
    }
    return table(
        "Bytes per client and round",
        columns,
        [results[label] for label in (DENSE, *(coded(s) for s in LOSSES), over_field(LOSSES[-1]))],
        "Nobody is slow. An answer is one row of numbers, however many partitions are in it: float64 takes twice "
        "FedAvg's float32, GF(2^31 - 1) as much as it. Coding saves nothing. What has to lie on the devices "
        "beforehand, s partitions of other devices' data each, is not in the table.",
    )


EXPERIMENT = Experiment(
    name="gradient_coding",
    question="Does a round that any n - s devices can end stay exact, and when is it worth s + 1 times the work?",
    rows=rows,
    measure=measure,
    options=OPTIONS,
    rounds=30,
    clients=10,
    minutes=0.9,
    quick=(
        "rounds=2",
        "clients=5",
    ),
    notes=(
        "Every client makes one step on all data of a partition, so that the mean is full-batch gradient descent. The "
        "rows of the table are runs without stragglers; the tables and curves of stragglers are runs with real "
        "messages on the engine in this process, whose clock is simulated, whatever engine the rows were run on.\n\n"
        "Fractional repetition (s + 1 divides the number of clients) may end a round before the (n - s)-th answer: one "
        "of each group is enough. A straggler is not told to stop: it finishes its old round first, which is why "
        "rounds can last longer than the order statistics of the last figure say.\n\n"
        "Gradient coding needs every partition on s + 1 devices. Where data may not leave a client it cannot be used."
    ),
)
