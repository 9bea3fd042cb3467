"""Coded training: traffic of encoding matrices, decoding probabilities, and coded against uncoded descent.

The reconstruction of Lin et al. 2019 (arXiv:1910.10283, of which only the abstract was read) in
:mod:`fedcomp.coding.datacode`. Every figure for traffic comes with the probability of decoding.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.datacode import CodedStep, DataPlan, data_plan, encode_rows
from fedcomp.coding.datapacket import pack_partition
from fedcomp.coding.decodability import decode_rate, guaranteed_losses, mds_probability, replication_probability
from fedcomp.coding.errors import NotDecodable
from fedcomp.coding.linearloss import residuals
from fedcomp.coding.parcels import HEADER_BYTES
from fedcomp.coding.sealing import OVERHEAD
from fedcomp.coding.stream import SplitMix64, derive
from fedcomp.experiments.kit import curves, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunResult
from fedcomp.experiments.tables import Found, Rows, Studied, Training
from fedcomp.flower.links import Letter
from fedcomp.systems.coded.linear import PARTITION

Doubles = NDArray[np.float64]

LOSS_RATES: Final = (0.0, 0.1, 0.2, 0.3)
UNCODED: Final = "uncoded, FedAvg"
MDS, HALF, COPIES, NONE = "MDS", "MDS, half the parities", "replication", "no code"
BINARY, GAUSSIAN, BALANCED = "RLNC, binary", "RLNC, Gaussian", "balanced, Gaussian"
SVM: Final = "balanced, Gaussian, SVM"

SCHEMES: Final[Mapping[str, tuple[str, float]]] = {
    MDS: ("mds", 1.0),
    BINARY: ("binary", 1.0),
    GAUSSIAN: ("gaussian", 1.0),
    BALANCED: ("balanced", 1.0),
    # The rival with equal traffic: half as many parities, all of them dense.
    HALF: ("mds", 0.5),
    COPIES: ("replication", 1.0),
    # The loss without any redundancy: every device has to answer.
    NONE: ("mds", 0.0),
}
"""By label, the code and its parities as a fraction of the setting."""

SPARSE: Final = (BINARY, GAUSSIAN, BALANCED)
"""Codes whose traffic is random and whose decoding probabilities have no formula here."""


def partitions(config: Config) -> int:
    """Return k."""
    return max(1, config.clients - int(config.settings["parities"]))


def plan_of(config: Config, label: str, seed: int) -> DataPlan:
    """Return the plan that a row draws for a scheme."""
    code, share = SCHEMES[label]
    k, density = partitions(config), float(config.settings["density"])
    # Half of an odd number of parities is rounded down.
    return data_plan(code, k + int(share * int(config.settings["parities"])), k, density=density, seed=seed)


def rows(config: Config) -> Rows:
    """Return the rows: uncoded averaging of full-batch steps, every code once, and the SVM with one of them. No message
    is lost here."""
    k, r = partitions(config), int(config.settings["parities"])

    def coded(code: str, parities: int) -> str:
        shape = f"clients={k + parities} parities={parities} density={{density}}"
        return f"coded-linear code={code} {shape} transport=peers"

    return {
        # A batch larger than any partition makes each local step full-batch: FedAvg is then gradient descent.
        UNCODED: f"fedavg clients={k} batch_size=100000",
        # Without parities there is no transfer to measure, so this case needs no row.
        **{label: coded(code, int(share * r)) for label, (code, share) in SCHEMES.items() if label != NONE},
        SVM: f"{coded('balanced', r)} task.model=svm",
    }


@dataclass(frozen=True)
class LinearProblem:
    """Partitions, test rows and initial model of one linear task, with constant columns except in ``x``."""

    x: list[Doubles]
    y: list[Doubles]
    test: tuple[Doubles, Doubles]
    start: Doubles
    loss: str
    lr: float
    l2: float

    @classmethod
    def of(cls, config: Config, model: str) -> LinearProblem:
        """Return the problem of the rows with float64 data."""
        from fedcomp.tasks import get_task
        from fedcomp.tasks.arrays import to_arrays
        from fedcomp.tasks.linear import linear_rows

        l2 = float(config.settings["task.l2"])
        task = get_task("digits-zero", model=model, l2=l2)
        k = partitions(config)
        parts = [linear_rows(task, task.client(j, k)) for j in range(k)]
        # The initial model of the rows in float64, in which the coded rows compute.
        start = np.concatenate([a.astype(np.float64).ravel() for a in to_arrays(task.model(config.seed)).values()])
        return cls(
            [x for x, _ in parts],
            [y for _, y in parts],
            linear_rows(task, task.test),
            start,
            task.linear_loss,
            float(config.settings["lr"]),
            l2,
        )

    def step(self, w: Doubles, gradient: Doubles | float) -> Doubles:
        """Return the model after one step along the mean gradient."""
        # The bias is not penalised, as in the task's own objective.
        pull = np.append(w[:-1], 0.0)
        return w - self.lr * (gradient / sum(map(len, self.y)) + self.l2 * pull)

    def gradient(self, w: Doubles) -> Doubles:
        """Return the gradient summed over all rows, uncoded."""
        x, y = _with_bias(np.concatenate(self.x)), np.concatenate(self.y)
        return x.T @ residuals(self.loss, x @ w, y)

    def uncoded(self, steps: int) -> Doubles:
        """Return the model after uncoded gradient descent."""
        w = self.start
        for _ in range(steps):
            w = self.step(w, self.gradient(w))
        return w

    def off(self, result: RunResult, steps: int) -> float:
        """Return the largest distance of a run's model from the model after the same number of uncoded steps."""
        w = np.concatenate([array.astype(np.float64).ravel() for array in result.arrays.values()])
        return float(np.abs(w - self.uncoded(steps)).max())

    def accuracy(self, w: Doubles) -> float:
        """Return the fraction of test rows on the right side."""
        x, y = self.test
        return float(np.mean((_with_bias(x) @ w > 0) == (y > 0)))


def _with_bias(x: Doubles) -> Doubles:
    return np.column_stack([x, np.ones(len(x))])


def descend(problem: LinearProblem, plan: DataPlan, loss: float, steps: int, seed: int) -> dict[str, Any]:
    """Descend on coded data while every device is away in an iteration with probability ``loss``.

    Uncoded descent runs in parallel and pauses when the coded one has to. Returns the number of decoded iterations, the
    largest difference between the two models, and the final accuracy.
    """
    # Coded rows need partitions of equal length. Shorter ones are padded with zeros, which add nothing to a gradient.
    rows_ = max(map(len, problem.y))
    features = len(problem.start) - 1
    stored = [{j: problem.x[j] for j in plan.wants(i)} for i in range(plan.devices)]
    coded = [encode_rows(row, own, rows_, features) for row, own in zip(plan.matrix, stored, strict=True)]
    # The model is not in the key: logistic regression and SVM have the same losses.
    stream = SplitMix64(derive("coded training", plan.code, plan.devices, int(1000 * loss), seed))
    w = oracle = problem.start
    decoded, worst = 0, 0.0
    for _ in range(steps):
        alive = np.flatnonzero(stream.uniform(plan.devices) >= loss).tolist()
        step = CodedStep(plan, problem.y, problem.loss)
        try:
            step.decode({i: coded[i] @ w for i in alive})
        # Both models pause, because no method could compute this round.
        except NotDecodable:
            continue
        assigned = step.assign(alive)
        if not step.take({i: coded[i].T @ v for i, v in assigned.items()}):
            raise AssertionError("everybody that was asked has answered")
        w, oracle = problem.step(w, step.gradient), problem.step(oracle, problem.gradient(oracle))
        decoded += 1
        # Over all iterations, since later ones could hide an earlier error.
        worst = max(worst, float(np.abs(w - oracle).max()))
    return {"decoded": decoded, "worst": worst, "accuracy": problem.accuracy(w)}


def probability(plan: DataPlan, loss: float, draw: Any = None, **options: Any) -> float:
    """Return P(an iteration decodes): exact if there is a formula, otherwise simulated, for this plan or for the plans
    that ``draw`` makes."""
    # Without losses the result is not random; it depends on this matrix only.
    if not loss:
        return float(plan.subset(range(plan.devices)).decodes_all)
    if plan.code in ("mds", "replication"):
        exact = mds_probability if plan.code == "mds" else replication_probability
        return exact(plan.devices, plan.partitions, loss)
    return decode_rate(draw or plan, loss=loss, **options).value


def setup_bytes(plan: DataPlan, problem: LinearProblem) -> int:
    """Return the parcels of all transfers from the owners."""
    # A sealed message in a parcel; its size does not depend on the receiver.
    letters = [Letter(0, PARTITION, pack_partition(x, j, bytes(8))) for j, x in enumerate(problem.x)]
    parcels = [len(letter.to_bytes()) + OVERHEAD + HEADER_BYTES for letter in letters]
    return sum(parcels[j] for j, _ in plan.transfers)


def facts(label: str, *, config: Config) -> dict[str, Any]:
    """Return the results that do not depend on training: traffic of the plan and of many draws, tolerance,
    probabilities."""
    problem, plan, settings = LinearProblem.of(config, "logistic"), plan_of(config, label, config.seed), config.settings
    # An MDS code has no zero coefficient: its traffic is the same for every draw.
    dense = setup_bytes(plan_of(config, MDS, config.seed), problem)
    seeds = [derive("draw", config.seed, i) for i in range(int(settings["draws"]))] if label in SPARSE else []
    ratios = [setup_bytes(plan_of(config, label, seed), problem) / dense for seed in seeds]
    bytes_ = setup_bytes(plan, problem)
    # With an MDS code any k devices decode; trying all sets of a large code would take minutes.
    any_losses = plan.devices - plan.partitions if plan.code == "mds" else guaranteed_losses(plan)
    draw = partial(data_plan, plan.code, plan.devices, plan.partitions, density=float(settings["density"]))
    # One draw of losses per matrix; with several draws the trials would share a matrix and not be independent.
    options = {"trials": int(settings["trials"]), "seed": config.seed, "per_draw": 1}
    return {
        "bytes": bytes_,
        "ratio": bytes_ / dense,
        "mean": statistics.fmean(ratios) if ratios else bytes_ / dense,
        "spread": statistics.stdev(ratios) if ratios else 0.0,
        "any_losses": any_losses,
        # To survive any s losses each partition must reach s other devices: at least k s transfers.
        "over_bound": len(plan.transfers) / (plan.partitions * any_losses) if any_losses else None,
        "average": {f"{q:g}": probability(plan, q, draw, **options) for q in LOSS_RATES},
    }


def train(label: str, model: str, loss: float, *, config: Config) -> dict[str, Any]:
    """Descend on coded data under losses, and compare the fraction of decoded iterations with the probability of this
    matrix."""
    plan, trials = plan_of(config, label, config.seed), int(config.settings["trials"])
    found = descend(LinearProblem.of(config, model), plan, loss, config.rounds, config.seed)
    chance = probability(plan, loss, trials=trials, seed=derive("plan", config.seed))
    rate, rounds = found["decoded"] / max(1, config.rounds), max(1, config.rounds)
    # A simulated probability has its own error, and one of 0 or 1 may not be exact.
    usual = (chance * trials + 0.5) / (trials + 1) if label in SPARSE and loss else chance
    # The error of the decoded fraction and, for a simulated probability, of that too.
    sigma = math.sqrt(usual * (1 - usual) * (1 / rounds + 1 / trials))
    return {**found, "off": abs(rate - chance) - 4 * sigma}


def faulty(loss: float, *, training: Training) -> dict[str, Any]:
    """Run the balanced code's row in process while every message of both phases is lost with probability ``loss``."""
    from fedcomp.clients.app import app
    from fedcomp.experiments.serve import serve
    from fedcomp.flower.faults import RandomFaults
    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.rng import Key

    config = training.config
    rounds = int(config.settings["faulty_rounds"])
    # Through the server, with one evaluation.
    spec = replace(training.spec(BALANCED, rounds=rounds, transport="hub", evaluate_every=rounds), engine="inprocess")
    # Half of the losses happen on the way to the device, half on the way back.
    kinds: dict[Any, float] = {"silent": loss / 2, "lost_reply": loss / 2}
    faults = RandomFaults(Key(config.seed, "losses"), kinds, message_types=["query.coded_phase"])
    with InProcessGrid(app, config.clients, seed=config.seed, fault=faults) as grid:
        result = serve(spec, grid)
    # A skipped round leaves the model unchanged and counts no example.
    moved = sum(record.metrics["linear.examples"] > 0 for record in result.rounds[1:])
    return {
        "rounds": rounds,
        "moved": moved,
        "retries": sum(record.metrics["linear.retries"] for record in result.rounds[1:]),
        "worst": LinearProblem.of(config, "logistic").off(result, moved),
    }


def over_messages(config: Config, label: str, result: RunResult) -> dict[str, float]:
    """Return the results of a coded row: ``peer``, bytes on the peer links; ``off``, their distance from the plan's
    parcels; ``worst``, the largest distance of the model from uncoded descent."""
    problem = LinearProblem.of(config, "svm" if label == SVM else "logistic")
    # The row of the SVM is the balanced code with another loss function, the same seed and the same matrix.
    plan = plan_of(config, BALANCED if label == SVM else label, config.seed)
    peer = result.ledger.total("wire", link="peer")
    # Nothing is lost in a row, so no round was skipped.
    worst = problem.off(result, result.final.round)
    return {"peer": peer, "off": abs(peer - setup_bytes(plan, problem)), "worst": worst}


def study(found: Found) -> Studied:
    """Compare traffic with decoding probability and training under losses with uncoded training; count bytes per
    iteration."""
    config, results = found.config, found.results
    models = ("logistic", "svm")
    schemes = found.sweep(facts, {"label": list(SCHEMES)}, "facts", config=config)
    cells = {"label": list(SCHEMES), "model": models, "loss": LOSS_RATES}
    trained = found.sweep(train, cells, "train", config=config)
    training = Training.of(found.experiment, config)
    lossy = found.sweep(faulty, {"loss": (0.1, 0.2)}, "messages lost in both phases", training=training)
    coded = {label: over_messages(config, label, result) for label, result in results.items() if label != UNCODED}
    problems = {model: LinearProblem.of(config, model) for model in models}
    plain = {model: problem.accuracy(problem.uncoded(config.rounds)) for model, problem in problems.items()}
    known = {record.label: record for record in schemes}

    def decodes(label: str, other: str, loss: str) -> float:
        return float(known[label].average[loss] / known[other].average[loss])

    def average(loss: str) -> Any:
        return lambda record: record.average[loss]

    def last(value: Any, **where: Any) -> Any:
        return lambda result: int(result.ledger.total(value, round=result.final.round, **where))

    k, r = partitions(config), int(config.settings["parities"])
    return Studied(
        {
            **{(label, "mean over draws"): known[label].mean for label in SCHEMES},
            **{f"P({label})": known[label].average["0.2"] for label in SCHEMES},
            **{
                (label, "set-up bytes over MDS, mean over draws, off 0.5"): abs(known[label].mean - 0.5)
                for label in SPARSE
            },
            (BALANCED, "set-up bytes over MDS, over messages, off 0.5"): abs(
                coded[BALANCED]["peer"] / coded[MDS]["peer"] - 0.5
            ),
            "bytes on the peer links, off the plan's parcels": max(row["off"] for row in coded.values()),
            "distance from uncoded descent": max(trained.each("worst")),
            "the same over messages, nothing lost": max(row["worst"] for row in coded.values()),
            "the same over messages, messages lost in both phases": max(lossy.each("worst")),
            **{
                f"rounds that moved, {100 * run.loss:g} % of the messages lost in both phases": run.moved / run.rounds
                for run in lossy
            },
            "decoded minus computed probability, beyond four standard deviations": max(trained.each("off")),
            # A code that need not survive any loss has no bound for a comparison.
            "transfers over k times the losses any of which are survived": min(
                record.over_bound for record in schemes if record.over_bound is not None
            ),
            (BALANCED, "transfers over that bound"): known[BALANCED].over_bound,
            **{(label, "P(decodes) at loss 0.2 over half MDS's"): decodes(label, HALF, "0.2") for label in SPARSE},
            **{(label, "P(decodes) at loss 0.3 over MDS's"): decodes(label, MDS, "0.3") for label in SPARSE},
            "accuracy of uncoded descent minus coded": max(
                abs(plain[record.model] - record.accuracy) for record in trained.where(loss=0.0)
            ),
        },
        tables=[
            table(
                "Set-up traffic, and what it buys",
                {
                    "code": "label",
                    "set-up bytes": "bytes",
                    "over MDS, as run": "ratio",
                    "mean of all draws": "mean",
                    "sd of a draw": "spread",
                    "any losses survived": "any_losses",
                    **{f"P(decodes), loss {q:g}": average(f"{q:g}") for q in LOSS_RATES[1:]},
                },
                schemes,
                f"k = {k} partitions, r = {r} parities. Bytes are those of the parcels between devices, once. Any "
                "losses: the largest number of devices that may be lost, whichever they are, for the matrix in this "
                "run. P(decodes): each device is lost with the given probability; averaged over the draw of the "
                "matrix.",
            ),
            table(
                "Messages lost in both phases",
                {"loss per message": "loss", "rounds": "rounds", "moved": "moved", "retries of phase 2": "retries"},
                lossy,
                "Balanced code, at most seven retries in a round. A device that answered in the first phase may be "
                "silent in the second, and others replace it.",
            ),
            table(
                "One iteration over messages",
                {
                    "row": lambda result: result.spec.label,
                    "devices": lambda result: result.spec.clients,
                    "payload down, bytes": last("payload", direction="down", link="hub"),
                    "payload up, bytes": last("payload", direction="up", link="hub"),
                    "accuracy, %": lambda result: 100 * result.accuracy,
                },
                results.values(),
                "Payload of the last round, all devices. Vectors of the coded rows are float64; FedAvg's are float32, "
                "as the model is. Partitions go from device to device once.",
            ),
        ],
        figures=[
            curves(
                "Probability that an iteration decodes",
                schemes,
                lambda record: [float(q) for q in record.average],
                lambda record: record.average.values(),
                "label",
                x_label="probability that a device is lost",
                y_label="P(decodes)",
                caption="Averaged over the draw of the matrix. Binary, Gaussian and balanced have half the set-up "
                "traffic of MDS on average, and so does MDS with half the parities.",
            )
        ],
    )
