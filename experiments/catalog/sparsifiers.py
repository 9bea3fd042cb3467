"""Every sparsifying compressor and the standard baselines beside dense averaging, on one task."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fedcomp.experiments import adaptive_servers, robust_rules, small_cnn
from fedcomp.experiments.experiment import Config, Experiment, Option
from fedcomp.experiments.findings import Claim, Curves, Findings, Say, Series, Table, different_bytes, mean, spread
from fedcomp.experiments.grid import Cell, Measured, run_cells
from fedcomp.experiments.kit import judged
from fedcomp.experiments.spec import RunResult, RunSpec

TASK: Final = "digits"
DENSE: Final = "dense"
ORACLE: Final = "true top-k of the mean"
ADAM: Final = "top-k + EF, FedAdam"
NO_MEMORY: Final = "CLT-k, no memory"
IID: Final = "IID"
SORTED: Final = "label-sorted"
PARTITIONS: Final = (IID, SORTED)
"""How the examples are spread: at random, or one or two digits per client."""

DIGITS: Final = 10

LOOKS: Final = 20
"""Evaluations per training."""

OPTIONS = {
    "seeds": Option(3, "trainings per scheme and partition, with the seeds from --seed on", least=1, most=100),
    "baseline_seeds": Option(1, "the same for the baselines, the lower part of the table", least=1, most=100),
    "workers": Option(
        1, "processes that train side by side; changes nothing but the time", least=1, most=256, neutral=True
    ),
    "task.hidden": Option("256", "widths of the model's hidden layers"),
    "lr": Option(0.05, "step size of the clients' SGD", above=0.0),
    "batch_size": Option(16, "examples per step; a client makes one step a round", least=1),
    "density": Option(0.01, "share of the coordinates that schemes with a density send", above=0.0, most=1.0),
    "check_rounds": Option(40, "rounds of the runs that are also made with messages", least=1),
    **adaptive_servers.OPTIONS,
    **robust_rules.OPTIONS,
    **small_cnn.OPTIONS,
}

CodecOf = Callable[[float, float], dict[str, Any]]


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes
    ----------
    label : str
    codec : callable
        From the density and the step size to a codec's configuration.
    bound : float or None
        The train loss must stay within so many times that of dense averaging, on either partition.
    baseline : bool
        Stands in the lower part of the table.
    lr : float
        Factor of the step size.
    """

    label: str
    codec: CodecOf
    bound: float | None = None
    baseline: bool = False
    lr: float = 1.0

    def seeds(self, config: Config) -> range:
        """Return the seeds it is trained with."""
        count = int(config.settings["baseline_seeds" if self.baseline else "seeds"])
        return range(config.seed, config.seed + count)

    def cell(self, config: Config, partition: str, seed: int) -> Cell:
        """Return one training."""
        lr = self.lr * float(config.settings["lr"])
        return Cell(
            name=f"{partition}, {self.label}, seed {seed}",
            codec=self.codec(float(config.settings["density"]), lr),
            task=TASK,
            options={"hidden": str(config.settings["task.hidden"]), "partition": _partition(partition, config)},
            clients=config.clients,
            rounds=config.rounds,
            seed=seed,
            training={"lr": lr, "batch_size": int(config.settings["batch_size"]), "max_steps": 1},
            every=max(1, config.rounds // LOOKS),
            oracle=self.label == ORACLE,
        )


def _partition(name: str, config: Config) -> str:
    # With fewer than five clients two digits each would leave some digits to nobody.
    return "iid" if name == IID else f"shards:{max(2, math.ceil(DIGITS / config.clients))}"


def _feedback(codec_id: str, **options: Any) -> CodecOf:
    """Error feedback around a codec with a density."""
    return lambda density, lr: {"id": "feedback", "codec": {"id": codec_id, "density": density, **options}}


def _scalecom(**options: Any) -> CodecOf:
    return lambda density, lr: {"id": "scalecom", "density": density, **options}


def _fixed(codec_id: str, **options: Any) -> CodecOf:
    """A codec without a density."""
    return lambda density, lr: {"id": codec_id, **options}


METHODS: Final = (
    Method(DENSE, _fixed("identity")),
    Method(ORACLE, _scalecom(scope="global"), 1.15),
    Method("top-k + EF", _feedback("topk"), 1.15),
    Method("CLT-k", _scalecom(scope="global"), 1.15),
    Method("CLT-k, chunks", _scalecom(selector="chunk"), 1.15),
    Method("CLT-k, beta 0.3", _scalecom(scope="global", beta=0.3), 1.15),
    Method("CLT-k, beta 0.1", _scalecom(scope="global", beta=0.1), 1.5),
    Method(NO_MEMORY, _scalecom(scope="global", memory=False)),
    Method("random-k + EF, shared", _feedback("randomk", shared=True), 1.4),
    Method("SIDCo-E, 3 stages + EF", _feedback("sidco", family="exponential", stages=3, adapt="off"), 1.15),
    Method("AdaComp, bins of 50", _fixed("adacomp", bin=50), 1.15),
    Method("AdaComp, bins of 500", _fixed("adacomp", bin=500), 1.15),
    Method("AdaComp, bins of 50, factor 1", _fixed("adacomp", bin=50, factor=1.0), 1.15),
    Method("DGC", lambda d, lr: {"id": "dgc", "density": d, "warmup": 0}, baseline=True),
    Method("DGC, a tenth of the step", lambda d, lr: {"id": "dgc", "density": d, "warmup": 0}, baseline=True, lr=0.1),
    Method("random-block + EF, shared", _feedback("randomblock", shared=True), baseline=True),
    Method("threshold + EF", lambda d, lr: _ef({"id": "threshold", "level": 0.1 * lr}), baseline=True),
    Method("STC + EF", _feedback("stc"), baseline=True),
    Method("key-region + EF", lambda d, lr: _ef({"id": "keyregion"}), baseline=True),
    Method("EF-signSGD", lambda d, lr: _ef({"id": "scaledsign"}), baseline=True),
    Method("signSGD, majority vote", lambda d, lr: {"id": "signsgd", "step": 0.01 * lr}, baseline=True),
    Method("TernGrad", _fixed("terngrad"), baseline=True),
    Method("natural compression", _fixed("natural"), baseline=True),
    Method("QSGD", _fixed("qsgd"), baseline=True),
)
"""The rows of the table, in order."""


def _ef(codec: dict[str, Any]) -> dict[str, Any]:
    return {"id": "feedback", "codec": codec}


CURVES: Final = (
    DENSE,
    "top-k + EF",
    "CLT-k",
    "CLT-k, beta 0.1",
    NO_MEMORY,
    "random-k + EF, shared",
    "AdaComp, bins of 50",
    "EF-signSGD",
)
"""What is drawn."""

SUMMARY: Final = ("top-k + EF", "CLT-k", "AdaComp, bins of 500", "STC + EF", "EF-signSGD")
"""What the answer names; all are in the tables."""

_SHARED = ("task.", "lr", "batch_size")


def rows(config: Config) -> list[RunSpec]:
    """A few systems as messages, over fewer rounds: they show that the simulation of the others can be trusted."""
    rounds = min(config.rounds, int(config.settings["check_rounds"]))
    density = {"codec.density": config.settings["density"]}
    every = {"max_steps": 1, "evaluate_every": max(1, rounds // LOOKS)}
    specs = [
        config.spec("identity", DENSE, TASK, take=_SHARED, **every),
        config.spec("topk", "top-k + EF", TASK, take=_SHARED, feedback=True, **density, **every),
        config.spec(
            "topk", "top-k + EF, FedAdam", TASK, take=_SHARED, feedback=True, inner="fedadam", **density, **every
        ),
        config.spec("scalecom", "CLT-k", TASK, take=_SHARED, **{"codec.scope": "global"}, **density, **every),
    ]
    return [dataclasses.replace(spec, rounds=rounds) for spec in specs]


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Train every method on both partitions, and the systems that were run as messages once more without them."""
    from fedcomp.tasks import get_task

    cells = {
        (partition, method.label): [method.cell(config, partition, seed) for seed in method.seeds(config)]
        for partition in PARTITIONS
        for method in METHODS
    }
    found = run_cells([cell for group in cells.values() for cell in group], say, int(config.settings["workers"]))
    groups = {key: [found[cell.name] for cell in group] for key, group in cells.items()}
    checked, values = _checks(results)
    for (partition, label), group in groups.items():
        dense = groups[partition, DENSE]
        values[f"{partition}, {label}: loss / dense"] = _relative(group, dense)
        values[f"{partition}, {label}: uplink ratio"] = mean(m.uplink for m in dense) / mean(m.uplink for m in group)
    servers, lost = adaptive_servers.measure(config, say)
    rules, distances = robust_rules.measure(config, say)
    cnn, costs = small_cnn.measure(config, say)
    values |= lost | distances | costs
    options = {cell.options["partition"]: dict(cell.options) for group in cells.values() for cell in group}
    return Findings(
        tables=[*(_table(partition, groups) for partition in PARTITIONS), cnn, servers, rules, checked],
        figures=[_curves(partition, groups) for partition in PARTITIONS],
        values=values,
        tasks=[get_task(TASK, **chosen).record() for chosen in options.values()],
    )


def _relative(group: Sequence[Measured], dense: Sequence[Measured]) -> float:
    """Return the mean loss over the mean loss of dense averaging with the same seeds."""
    return mean(m.loss for m in group) / mean(m.loss for m in dense[: len(group)])


def _table(partition: str, groups: Mapping[tuple[str, str], list[Measured]]) -> Table:
    dense = groups[partition, DENSE]
    sent = mean(m.uplink for m in dense)
    table: list[list[Any]] = []
    for method in METHODS:
        group = groups[partition, method.label]
        overlap = mean(m.overlap for m in group)
        table.append(
            [
                method.label,
                round(100 * mean(m.accuracy for m in group), 1),
                round(mean(m.loss for m in group), 4),
                round(spread(m.loss for m in group), 4) if len(group) > 1 else None,
                round(_relative(group, dense), 3),
                round(sent / mean(m.uplink for m in group), 1),
                round(mean(m.kept for m in group)),
                round(mean(m.union for m in group)),
                None if method.label == ORACLE else round(1 - overlap, 3),
            ]
        )
    return Table(
        f"Schemes on {partition} data",
        ("scheme", "test, %", "train loss", "±", "loss / dense", "uplink ratio", "sent", "union", "q/k"),
        table,
        "Means over seeds; ± is half the range of the losses. Test: accuracy on held-out images. The ratio compares "
        "real bytes of frames with dense. Sent: weights per client and round. Union: weights that change per round. "
        "q/k: share of the true top k of the mean that the shared support misses, in the rounds that were looked at.",
    )


def _curves(partition: str, groups: Mapping[tuple[str, str], list[Measured]]) -> Curves:
    series = []
    for label in CURVES:
        group = groups[partition, label]
        points = list(zip(*(m.points for m in group), strict=False))
        sent = [mean(p[2] for p in at) for at in points]
        series.append(Series(label, sent, [mean(p[1] for p in at) for at in points]))
    return Curves(
        f"Train loss against uplink bytes, {partition}",
        "uplink so far, all clients",
        "train loss",
        series,
        log_x=True,
        log_y=True,
        x_bytes=True,
    )


def _checks(results: Mapping[str, RunResult]) -> tuple[Table, dict[str, float]]:
    """Simulate the rows that were run as messages; return both sides' bytes and how many bytes of the models differ."""
    from fedcomp.experiments.central import Plan, simulate

    table: list[list[Any]] = []
    values: dict[str, float] = {}
    for label, result in results.items():
        out = simulate(*Plan.of(result.spec))
        sent = result.uplink_payload_bytes
        differ = different_bytes(result.arrays, out.arrays)
        values[f"{label}: bytes of the model that differ"] = float(differ)
        values[f"{label}: bytes of frames that differ"] = float(abs(sent - out.uplink))
        table.append([label, result.spec.rounds, sent, out.uplink, result.uplink_wire_bytes, differ])
    title = "The same runs with messages and without"
    columns = (
        "system",
        "rounds",
        "frames in the ledger, bytes",
        "frames simulated, bytes",
        "whole messages, bytes",
        "model bytes that differ",
    )
    return Table(title, columns, table, "With messages: through Flower, on the engine chosen."), values


def claims(config: Config, results: Mapping[str, RunResult], findings: Findings) -> list[Claim]:
    """Memory keeps the loss, no memory does not, and the simulation is what messages would have done."""
    values = findings.values

    def ratios(label: str) -> list[float]:
        return [values[f"{partition}, {label}: loss / dense"] for partition in PARTITIONS]

    goal = "goal for this task, on either partition"
    made = [
        Claim(f"{m.label}: train loss over dense, the worse partition", max(ratios(m.label)), "<=", m.bound, goal)
        for m in METHODS
        if m.bound is not None
    ]
    made.append(
        Claim(
            f"{NO_MEMORY}: train loss over dense, the better partition",
            min(ratios(NO_MEMORY)),
            ">=",
            3.0,
            "goal: what is never sent must be missed; a memory that works by accident gives about 1",
        )
    )
    made += [*small_cnn.claims(values), *adaptive_servers.claims(values), *robust_rules.claims(values)]
    for label in results:
        made += [
            Claim(
                f"{label}: bytes of the final model that differ from the run with messages",
                values[f"{label}: bytes of the model that differ"],
                "==",
                0.0,
                "theory: the same arithmetic in the same order",
            ),
            Claim(
                f"{label}: bytes of frames that differ from the ledger's",
                values[f"{label}: bytes of frames that differ"],
                "==",
                0.0,
                "theory: the same frames",
            ),
        ]
    return made


def answer(config: Config, results: Mapping[str, RunResult], findings: Findings) -> str:
    """Return what came out, in this run's figures."""
    values = findings.values
    said = []
    for label in SUMMARY:
        ratio = min(values[f"{partition}, {label}: uplink ratio"] for partition in PARTITIONS)
        loss = max(values[f"{partition}, {label}: loss / dense"] for partition in PARTITIONS)
        said.append(f"{label} {ratio:.0f} times at {loss:.2f}")
    lost = min(values[f"{partition}, {NO_MEMORY}: loss / dense"] for partition in PARTITIONS)
    return (
        f"Fewer bytes sent, and train loss over that of dense averaging, on the worse of two partitions: "
        f"{', '.join(said)}; without memory the loss is at least {lost:.1f} times."
    )


EXPERIMENT = Experiment(
    name="sparsifiers",
    question="What does each way of sending a hundredth of an update cost, and what does it save?",
    rows=rows,
    options=OPTIONS,
    rounds=500,
    clients=8,
    minutes=19.0,
    quick=(
        "rounds=2",
        "clients=3",
        "seeds=1",
        "task.hidden=20",
        "check_rounds=2",
        "server_rounds=1",
        "rule_rounds=1",
        "cnn_rounds=1",
        "cnn_seeds=1",
    ),
    measure=judged(measure, claims, answer),
    notes=(
        "Eight clients make one step of 16 images a round; the model, 64-256-10, has 19 210 parameters. Ten biases, "
        "which are less than a hundredth of them, travel whole in every frame; the other 19 200 are compressed.\n\n"
        "The inputs are standardised. A step of 0.05 moves the first layer as one of 0.2 does on pixels between 0 and "
        "1, whose mean square is 4.3 times smaller. The filter of CLT-k (beta) delays what is not sent, by a number of "
        "rounds and not by a share of them: with label-sorted data and after 400 rounds beta 0.3 stands at 1.15 times "
        "the loss of dense averaging and beta 0.1 at 1.6 times, after 500 at 1.11 and 1.47 (measured).\n\n"
        "Every scheme has the same step size; none diverges with it. DGC's momentum of 0.9 makes steps up to ten times "
        "as long; it is also shown with a tenth of the step. signSGD moves every weight by a hundredth of the step "
        "size: further than dense where clients agree, and in wrong directions where few of them know a digit. The "
        "threshold is a tenth of the step size.\n\n"
        "The schemes were trained without messages, by the arithmetic of client and strategy; the systems below were "
        "run both ways and end in the same model, bit for bit. The true top k of the mean cannot be sent: nobody knows "
        "the mean before it was sent. Its index block counts as if a leader had sent it.\n\n"
        "The last tables are about other settings: a CNN whose clients make a pass a round with momentum, adaptive "
        "servers, and rules that are no mean. Step sizes were chosen on a validation split of the training images. "
        'Inside of FedAdam and FedYogi the pair keeps moments and steps to what arrived; "moments everywhere" is '
        "Flower's rule as it stands, which goes on moving coordinates that no client spoke of."
    ),
)
