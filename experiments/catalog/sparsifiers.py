"""Every sparsifying compressor and the standard baselines beside dense averaging, on one task."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.codecs import State
from fedcomp.codecs.scalecom import support_frame
from fedcomp.experiments import adaptive_servers, robust_rules, small_cnn
from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.findings import Claim, Findings, Table, mean, spread
from fedcomp.experiments.kit import Records, Say, Sweep, claim, curves, over_seeds, repetitions, table
from fedcomp.experiments.options import TEXT, Config, Option
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.layout import Vector
from fedcomp.program import Answer, Ask, Me, Now, Round, Said
from fedcomp.rules import Int, Real
from fedcomp.systems.shared_support import Lead, SharedSupport

if TYPE_CHECKING:
    # Listing the experiments needs no torch: it is imported when one is run.
    from fedcomp.experiments.central import Beside
    from fedcomp.tasks.base import Task

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
    "seeds": Option(3, Int(1, 100), "trainings per scheme and partition, with the seeds from --seed on"),
    "baseline_seeds": Option(1, Int(1, 100), "the same for the baselines, the lower part of the table"),
    "workers": 1,
    "task.hidden": Option("256", TEXT, "widths of the model's hidden layers"),
    "lr": Option(0.05, Real(above=0.0), "step size of the clients' SGD"),
    "batch_size": Option(16, Int(1), "examples per step; a client makes one step a round"),
    "density": Option(0.01, Real(above=0.0, most=1.0), "share of the coordinates that schemes with a density send"),
    "check_rounds": Option(40, Int(1), "rounds of the runs that are also made with messages"),
    **adaptive_servers.OPTIONS,
    **robust_rules.OPTIONS,
    **small_cnn.OPTIONS,
}

CodecOf = Callable[[float, float], dict[str, Any]]


@dataclass(frozen=True)
class Candidate:
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
        return repetitions(config, "baseline_seeds" if self.baseline else "seeds")


def partition_of(name: str, config: Config) -> str:
    """Return the task's partition for a name of :data:`PARTITIONS`."""
    # With fewer than five clients two digits each would leave some digits to nobody.
    return "iid" if name == IID else f"shards:{max(2, math.ceil(DIGITS / config.clients))}"


def _feedback(codec_id: str, **options: Any) -> CodecOf:
    """Error feedback around a codec with a density."""
    return lambda density, lr: {"id": "feedback", "codec": {"id": codec_id, "density": density, **options}}


def _scalecom(**options: Any) -> CodecOf:
    return lambda density, lr: {"id": "scalecom", "density": density, **options}


def _dgc(density: float, lr: float) -> dict[str, Any]:
    return {"id": "dgc", "density": density, "warmup": 0}


def _fixed(codec_id: str, **options: Any) -> CodecOf:
    """A codec without a density."""
    return lambda density, lr: {"id": codec_id, **options}


class Totals(Said):
    """What no message could say: all that a client would have to send."""

    def __init__(self, vector: Vector) -> None:
        self.vector = vector


@dataclass(frozen=True, repr=False, eq=False)
class Oracle(SharedSupport, id="oracle"):
    """A shared support that is the true top k of the mean of all clients' memory plus update: no leader beats it.

    Its index block travels as if the leader had chosen it.
    """

    def round(self, now: Now) -> Round:
        """Let all train; choose; let all send."""
        leader = (now.number - 1) % len(now.nodes)
        trained = yield [Ask(node) for node in now.nodes]
        total, weight = np.zeros(now.layout.size), sum(answer.weight for answer in trained)
        for answer in trained:
            assert isinstance(answer.say, Totals)
            total += answer.weight / weight * answer.say.vector
        supports = self.codec.choose_from(total.astype(np.float32), now.layout, now.key("uplink", leader))
        blobs = {"support": support_frame(supports, self.codec, now.layout)}
        answers = yield [Ask(node, "query", Lead(lead=node == leader), blobs=blobs) for node in now.nodes]
        return self.stepped(now, supports, blobs["support"], answers)

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        """Show everything, or send on the support; the leader sends that, too."""
        leads = isinstance(ask.say, Lead) and ask.say.lead
        memory, answer = super().client(memory, ask._replace(say=None), me)
        if ask.kind == "train":
            return memory, answer._replace(say=Totals(self.codec.total(memory, me.layout)))
        return memory, answer._replace(frames={**ask.blobs, **answer.frames}) if leads else answer


CANDIDATES: Final = (
    Candidate(DENSE, _fixed("identity")),
    # A reference that no client could send: nobody knows the mean before it was sent.
    Candidate(ORACLE, _scalecom(scope="global"), 1.15),
    Candidate("top-k + EF", _feedback("topk"), 1.15),
    Candidate("CLT-k", _scalecom(scope="global"), 1.15),
    Candidate("CLT-k, chunks", _scalecom(selector="chunk"), 1.15),
    Candidate("CLT-k, beta 0.3", _scalecom(scope="global", beta=0.3), 1.15),
    # A wider bound: the filter delays what is not sent by a number of rounds, of which a short training has few.
    Candidate("CLT-k, beta 0.1", _scalecom(scope="global", beta=0.1), 1.5),
    # No bound from above: it is there to be worse, and a claim of its own says by how much.
    Candidate(NO_MEMORY, _scalecom(scope="global", memory=False)),
    # Blind choices need more rounds than choices by size: hence the wider bound.
    Candidate("random-k + EF, shared", _feedback("randomk", shared=True), 1.4),
    # Stages fixed: what is judged is the estimate and not the search for their number.
    Candidate("SIDCo-E, 3 stages + EF", _feedback("sidco", family="exponential", stages=3, adapt="off"), 1.15),
    Candidate("AdaComp, bins of 50", _fixed("adacomp", bin=50), 1.15),
    Candidate("AdaComp, bins of 500", _fixed("adacomp", bin=500), 1.15),
    Candidate("AdaComp, bins of 50, factor 1", _fixed("adacomp", bin=50, factor=1.0), 1.15),
    Candidate("DGC", _dgc, baseline=True),
    Candidate("DGC, a tenth of the step", _dgc, baseline=True, lr=0.1),
    Candidate("random-block + EF, shared", _feedback("randomblock", shared=True), baseline=True),
    # A threshold is in units of the update, which are the step size's.
    Candidate("threshold + EF", lambda d, lr: _ef({"id": "threshold", "level": 0.1 * lr}), baseline=True),
    Candidate("STC + EF", _feedback("stc"), baseline=True),
    Candidate("key-region + EF", lambda d, lr: _ef({"id": "keyregion"}), baseline=True),
    Candidate("EF-signSGD", lambda d, lr: _ef({"id": "scaledsign"}), baseline=True),
    # Every coordinate moves by this much in every round, whatever its gradient: the clients' step size itself would be
    # far too long.
    Candidate("signSGD, majority vote", lambda d, lr: {"id": "signsgd", "step": 0.01 * lr}, baseline=True),
    Candidate("TernGrad", _fixed("terngrad"), baseline=True),
    Candidate("natural compression", _fixed("natural"), baseline=True),
    Candidate("QSGD", _fixed("qsgd"), baseline=True),
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


def train(partition: str, label: str, seed: int, *, config: Config) -> dict[str, Any]:
    """Train with one method on one partition."""
    from fedcomp.codecs import ScaleCom
    from fedcomp.experiments.central import Plan, measured

    method, settings = next(m for m in CANDIDATES if m.label == label), config.settings
    lr = method.lr * float(settings["lr"])
    plan = Plan(
        _task(partition, config),
        config.clients,
        config.rounds,
        seed,
        {"lr": lr, "batch_size": int(settings["batch_size"]), "max_steps": 1},
        max(1, config.rounds // LOOKS),
    )
    codec = method.codec(float(settings["density"]), lr)
    if label != ORACLE:
        return measured(plan, codec)
    del codec["id"]
    return measured(plan, Oracle(ScaleCom(**codec)))


def _task(partition: str, config: Config) -> Task:
    from fedcomp.tasks import get_task

    return get_task(TASK, hidden=str(config.settings["task.hidden"]), partition=partition_of(partition, config))


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Train every method on both partitions, and the systems that were run as messages once more without them."""
    from fedcomp.experiments.central import beside

    # No product of axes: baselines have fewer seeds.
    cells = [
        {"partition": partition, "label": method.label, "seed": seed}
        for partition in PARTITIONS
        for method in CANDIDATES
        for seed in method.seeds(config)
    ]
    records = Sweep(train, cells, shared={"config": config})(say, int(config.settings["workers"]))
    groups: dict[tuple[str, str], Records] = records.groups("partition", "label")
    checked, differ = beside(results, "With messages: through Flower, on the engine chosen.")
    servers, kept = adaptive_servers.measure(config, say)
    rules, followed = robust_rules.measure(config, say)
    cnn, saved = small_cnn.measure(config, say)

    def relative(partition: str, label: str) -> float:
        """Return the mean loss over the mean loss of dense averaging with the same seeds."""
        group = groups[partition, label]
        # Over the same seeds only: the loss of dense averaging varies with the seed as well.
        return mean(group.each("loss")) / mean(groups[partition, DENSE][: len(group)].each("loss"))

    def ratio(partition: str, label: str) -> float:
        return mean(groups[partition, DENSE].each("uplink")) / mean(groups[partition, label].each("uplink"))

    def schemes(partition: str) -> Table:
        columns: dict[str, Any] = {
            "scheme": lambda group: group[0].label,
            "test, %": lambda group: round(100 * mean(group.each("accuracy")), 1),
            "train loss": lambda group: round(mean(group.each("loss")), 4),
            "±": lambda group: round(spread(group.each("loss")), 4) if len(group) > 1 else None,
            "loss / dense": lambda group: round(relative(partition, group[0].label), 3),
            "uplink ratio": lambda group: round(ratio(partition, group[0].label), 1),
            "sent": lambda group: round(mean(group.each("kept"))),
            "union": lambda group: round(mean(group.each("union"))),
            "q/k": lambda group: None if group[0].label == ORACLE else round(1 - mean(group.each("overlap")), 3),
        }
        return table(
            f"Schemes on {partition} data",
            columns,
            [groups[partition, method.label] for method in CANDIDATES],
            "Means over seeds; ± is half the range of the losses. Test: accuracy on held-out images. The ratio "
            "compares real bytes of frames with dense. Sent: weights per client and round. Union: weights that change "
            "per round. q/k: share of the true top k of the mean that the shared support misses, in the rounds that "
            "were looked at.",
        )

    lost = min(relative(partition, NO_MEMORY) for partition in PARTITIONS)
    said = [
        f"{label} {min(ratio(p, label) for p in PARTITIONS):.0f} times at "
        f"{max(relative(p, label) for p in PARTITIONS):.2f}"
        for label in SUMMARY
    ]
    return Findings(
        tables=[*map(schemes, PARTITIONS), cnn, servers, rules, checked],
        figures=[
            curves(
                f"Train loss against uplink bytes, {partition}",
                [groups[partition, label] for label in CURVES],
                lambda group: over_seeds(group, 2),
                lambda group: over_seeds(group, 1),
                lambda group: group[0].label,
                x_label="uplink so far, all clients",
                y_label="train loss",
                log_x=True,
                log_y=True,
                x_bytes=True,
            )
            for partition in PARTITIONS
        ],
        claims=[
            *(
                claim(
                    f"{m.label}: train loss over dense, the worse partition",
                    # The worse of both: a scheme has to cope with data that are alike and with data that are not.
                    max(relative(partition, m.label) for partition in PARTITIONS),
                    f"<= {m.bound}",
                    "goal for this task, on either partition",
                )
                for m in CANDIDATES
                if m.bound is not None
            ),
            claim(
                f"{NO_MEMORY}: train loss over dense, the better partition",
                lost,
                ">= 3.0",
                "goal: what is never sent must be missed; a memory that works by accident gives about 1",
            ),
            *(*saved, *kept, *followed),
            *(made for label, found in differ.items() for made in _same(label, found)),
        ],
        answer="Fewer bytes sent, and train loss over that of dense averaging, on the worse of two partitions: "
        f"{', '.join(said)}; without memory the loss is at least {lost:.1f} times.",
        tasks=[_task(partition, config).record() for partition in PARTITIONS],
    )


def _same(label: str, found: Beside) -> list[Claim]:
    return [
        claim(
            f"{label}: bytes of the final model that differ from the run with messages",
            found.model,
            "== 0.0",
            "theory: the same arithmetic in the same order",
        ),
        claim(
            f"{label}: bytes of frames that differ from the ledger's", found.frames, "== 0.0", "theory: the same frames"
        ),
    ]


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
    measure=measure,
    notes=(
        "Eight clients make one step of 16 images a round; the model, 64-256-10, has 19 210 parameters. Ten biases, "
        "which are less than a hundredth of them, travel whole in every frame; the other 19 200 are compressed.\n\n"
        "The inputs are standardised. A step of 0.05 moves the first layer as one of 0.2 does on pixels between 0 and "
        "1, whose mean square is 4.3 times smaller. The filter of CLT-k (beta) delays what is not sent, by a number of "
        "rounds and not by a share of them: with label-sorted data and after 400 rounds beta 0.3 is at 1.15 times "
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
        "Flower's own rule, which goes on moving coordinates that no client sent."
    ),
)
