"""The server half of coded gradient descent: linear models on coded data, exact while enough devices answer.

**Privacy.** Raw training data leave their owners; with the transport "hub" they even pass through this server. The
server learns the label of every example, and its margin in every iteration. Use it within one trust domain only.
:mod:`fedcomp.coding.datacode` says what is computed and why it is exact; of the paper only the abstract was read, the
construction is our reconstruction.

One round is one iteration of full-batch gradient descent:

    set-up       devices that are new, or lost what they held: join, share, build (their own messages, counted apart)
    phase 1      w down to every device that is set up, margins up
    phase 2      projected residuals down to as few devices as decode, parts of the gradient up; when one of them is
                 lost, others make up for it (a retry), for which all that has arrived stays valid

A device whose second answer does not fit its first (see :meth:`fedcomp.coding.datacode.CodedStep.contradicts`) is left
out of the round, with both of them.

A round whose answers do not determine the gradient is skipped and the model is unchanged, unless ``approximate`` is
set: then it goes on with the partitions that are determined, and the report says how many examples are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedcomp.coding.datacode import CONDITION_OF, CodedStep, DataPlan
from fedcomp.coding.errors import CodingError, NotDecodable
from fedcomp.coding.stream import SplitMix64, derive
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower import linear
from fedcomp.flower.logs import log
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.report import Reports, shorten
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.coded.linear_setup import Descent, LinearSetup, LinearShape, exchange
from fedcomp.strategies.coded.settings import LinearSettings
from fedcomp.strategies.parts import TASK_PREFIX, Settings
from fedcomp.strategies.round_log import RoundLog
from fedcomp.strategies.system import TRAINING, System, arguments, refuse_others, settings_of

if TYPE_CHECKING:
    from fedcomp.tasks.base import Task

Real = NDArray[np.float64]

__all__ = ["CodedLinearGD", "Descent", "LinearModel"]


class CodedLinearGD(ExchangeStrategy, Stateful):
    """Full-batch gradient descent for a linear model whose training data are coded over the devices.

    The clients need the half :func:`fedcomp.clients.coded.linear.linear_device`;
    :mod:`fedcomp.clients.app` has it. Device i is the node with partition id i; the first ``partitions`` devices own
    one partition each, the others hold parities.

    Parameters
    ----------
    **settings
        See :class:`fedcomp.strategies.coded.settings.LinearSettings`.

    Attributes
    ----------
    reports : Reports
        By round, with the section ``linear``.

    Examples
    --------
    >>> strategy = CodedLinearGD(partitions=6, parities=4, code="balanced", lr=0.3)
    """

    STATE: ClassVar[Mapping[str, Any]] = {"_setup": nested("_setup"), "reports": Reports}

    def __init__(self, **settings: Any) -> None:
        self.settings = LinearSettings(**settings)
        self.reports = Reports()
        self._log = RoundLog("CodedLinearGD")
        self._setup = LinearSetup(self.settings)

    @property
    def plan(self) -> DataPlan | None:
        """The encoding matrix and who owns what; None until every owner has joined once."""
        return self._setup.plan

    def summary(self) -> None:
        """Log the code and the loss."""
        s = self.settings
        log.info("\t├──> CodedLinearGD: %s, %d parities, %s, lr %g", s.code, s.parities, s.loss, s.lr)

    def round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Set up who is not, then make one step of gradient descent; return the new model and the round's figures."""
        whole = self.reports.begin(server_round)
        report = whole.section(Descent)
        moved, metrics = yield from self._step(arrays, config, grid, report)
        whole.asked, whole.used = report.asked, len(report.used) if moved is not None else 0
        if report.skipped:
            whole.notes.append(f"the model is unchanged: {report.skipped}")
        self._log.conclude(whole)
        return moved, metrics

    def _step(
        self, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, report: Descent
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        server_round = report.round
        model = LinearModel(arrays)
        # As Flower's own strategies do, in the configuration that clients may go by.
        config["server-round"] = server_round
        nodes = list(grid.get_node_ids())
        yield from self._setup.run(nodes, config, model.shape, grid, report)
        if self.plan is None:
            return self._skip(report)
        labels = [self._setup.labels[j] for j in range(self.plan.partitions)]
        limit = CONDITION_OF[self.settings.payload]
        # With a model of zeros all answers would be zero, right or wrong.
        sent = model.vector if model.vector.any() else self._probe(server_round, len(model.vector))
        step = CodedStep(
            self.plan,
            labels,
            self.settings.loss,
            self.settings.approximate,
            max_condition=limit,
            probe=sent is not model.vector,
        )
        online = {self._setup.devices[n]: n for n in nodes if n in self._setup.devices}
        try:
            answers = yield from self._phase1(online, sent, step, report)
            step.decode(answers)
            for device in step.odd:
                report.refuse(device, NotDecodable("its margins contradict those of all others"))
            yield from self._phase2(sorted(answers.keys() - step.odd), online, sent, step, report)
            report.condition = step.condition
        # The round is lost, not the run: devices stay set up, and the next round asks them again.
        except CodingError as reason:
            report.skipped = shorten(f"{type(reason).__name__}: {reason}")
            return self._skip(report)
        # The mean over the examples that are in the gradient, which in an approximate step are not all.
        moved = model.step(step.gradient / step.included, self.settings.lr, self.settings.l2)
        if moved is None:
            report.skipped = "the step is not finite; lower lr"
            return self._skip(report)
        report.examples = step.included
        report.missing = sum(map(len, labels)) - step.included
        if report.missing:
            report.notes.append(f"approximate: the gradient lacks {report.missing} examples")
        metrics = report.metrics()
        metrics["train_loss"] = step.mean_loss
        return moved, metrics

    def _probe(self, server_round: int, size: int) -> Real:
        return SplitMix64(derive("probe", self.settings.seed, server_round)).normal(size)

    def _skip(self, report: Descent) -> tuple[None, MetricRecord]:
        return None, report.metrics()

    def _phase1(
        self, online: Mapping[int, int], sent: Real, step: CodedStep, report: Descent
    ) -> Exchanges[dict[int, Real]]:
        """Send the model to every device that is set up; return their products with it."""
        vectors = dict.fromkeys(sorted(online.keys() & self._setup.ready), sent)
        report.asked = len(vectors)
        answers = yield from self._ask(
            linear.PHASE1, vectors, (linear.MODEL, linear.MARGINS), step.margins_size, online, report
        )
        report.answered = len(answers)
        return answers

    def _phase2(
        self, alive: list[int], online: Mapping[int, int], sent: Real, step: CodedStep, report: Descent
    ) -> Exchanges[None]:
        """Ask a decodable subset for its parts of the gradient; what is lost, others of those left make up for."""
        used, silences = set[int](), Counter[int]()
        assigned = step.assign(alive)
        names = linear.RESIDUALS, linear.GRADIENT
        while True:
            answers = yield from self._ask(linear.PHASE2, assigned, names, len(sent), online, report)
            wrong = step.contradicts(sent, answers)
            for i in wrong:
                del answers[i]
                report.refuse(i, NotDecodable("its part of the gradient does not fit its margins"))
            report.lost += wrong
            used |= answers.keys()
            if step.take(answers):
                report.used = sorted(used)
                return
            silent = [i for i in assigned if i not in answers]
            if report.retries == self.settings.retries:
                raise NotDecodable(f"devices {silent} did not answer phase 2 usably, after {report.retries} retries")
            # Who was silent once may have lost a message; who was silent twice is asked only in a repeat.
            silences.update(silent)
            alive = [i for i in alive if i not in wrong]
            never = [i for i in alive if not silences[i]]
            once = [i for i in alive if silences[i] < 2 and i not in silent]
            report.retries += 1
            assigned = _again(step, (never, once), report.retries, again=not wrong)

    def _ask(
        self,
        phase: str,
        vectors: Mapping[int, Real],
        names: tuple[str, str],
        size: int,
        online: Mapping[int, int],
        report: Descent,
    ) -> Exchanges[dict[int, Real]]:
        """Send each device its vector; return the usable answers of ``size`` numbers, note why others are not."""
        take, give = names[1], names[0]
        contents: dict[int, RecordDict | None] = {}
        for device, vector in vectors.items():
            content = contents[online[device]] = RecordDict()
            linear.put_vector(content, give, vector, self.settings.payload)
        header = linear.Phase(self._setup.plan_id, self.settings.payload)
        replies = yield from exchange(contents, f"train.{phase}", header, timeout=self.settings.timeout)
        answers: dict[int, Real] = {}
        for node, reply in replies:
            device = self._setup.devices[node]
            try:
                content = self._setup.content(reply, device)
                answers[device] = linear.take_vector(content, take, size, self.settings.payload)
            except FedcompError as reason:
                report.refuse(device, reason)
        report.lost += [i for i in vectors if i not in answers]
        return answers

    # Resuming.

    def identity(self) -> str:
        """Return code and loss, which must not change within a run."""
        s = self.settings
        return repr((s.code, s.partitions, s.parities, s.density, s.seed, s.loss))


def _again(step: CodedStep, pools: tuple[list[int], ...], attempt: int, *, again: bool) -> dict[int, Real]:
    """Return whom a retry asks: others in place of the lost devices, from the first of ``pools`` that suffices.

    Every second time, and when there are no others, the same devices are asked again (if ``again``), as if only
    messages were lost. An approximate step gives up what nobody else has from the third retry on.

    Raises
    ------
    NotDecodable
        When nobody is left to be asked.
    """
    if again and attempt % 2 == 0:
        return step.repeat()
    for pool in pools:
        try:
            return step.assign(pool, whole=True)
        except NotDecodable:
            continue
    if again and (attempt == 1 or not step.approximate):
        return step.repeat()
    # Without ``whole``: from here on an approximate step may give up partitions.
    return step.assign(pools[0])


class LinearModel:
    """A linear model in an ArrayRecord: one tensor of weights and, optionally, one number after it as bias.

    Attributes
    ----------
    vector : ndarray of float64
        Weights, then the bias if there is one.
    shape : LinearShape

    Raises
    ------
    ConfigError
        When the record holds anything else.
    """

    def __init__(self, arrays: ArrayRecord) -> None:
        named = to_arrays(arrays)
        sizes = [array.size for array in named.values()]
        floats = all(array.dtype.kind == "f" for array in named.values())
        if not floats or len(sizes) not in (1, 2) or sizes[1:] not in ([], [1]) or not sizes[0]:
            shapes = {name: array.shape for name, array in named.items()}
            raise ConfigError(
                f"the model has tensors {shapes}, expected one of weights and at most one number after it as bias: "
                "coded gradient descent is exact for linear models only; use a linear task, such as 'digits-zero'"
            )
        self._named = named
        self.shape = LinearShape(sizes[0], len(sizes) == 2)
        self.vector: Real = np.concatenate([array.astype(np.float64).ravel() for array in named.values()])

    def step(self, gradient: Real | float, lr: float, l2: float) -> ArrayRecord | None:
        """Return the model after one step, in float64 and the former shapes; None when it is not finite."""
        features = self.shape.features
        with np.errstate(over="ignore", invalid="ignore"):
            # The bias is not regularised.
            full = gradient + l2 * np.where(np.arange(len(self.vector)) < features, self.vector, 0.0)
            moved = self.vector - lr * full
        if not np.isfinite(moved).all():
            return None
        parts = moved[:features], moved[features:]
        named = zip(self._named.items(), parts, strict=False)
        return to_record({name: part.reshape(old.shape) for (name, old), part in named})


_UNUSED: Final = {**TRAINING, "inner": "fedavg", "fraction_evaluate": 0.0}
"""Settings of a client that trains by itself, without a meaning here but for ``lr``."""

_OWN: Final = settings_of(
    LinearSettings, "code", "parities", "density", "payload", "transport", "approximate", "retries"
)


def _build(settings: Settings, seed: int) -> CodedLinearGD:
    """Return the strategy; loss and regulariser are the task's."""
    only = {key: default for key, default in _UNUSED.items() if key != "lr"}
    refuse_others(
        settings,
        only,
        "a round is one step of full-batch gradient descent, made by the server; use lr and task.l2, and more rounds",
    )
    # The server makes the steps, so it has to minimise what the clients' task does.
    loss = "hinge" if settings.get("task.model") == "svm" else "logistic"
    l2 = float(settings.get("task.l2", 0.0))
    own = arguments(LinearSettings, settings, _OWN)
    return CodedLinearGD(loss=loss, lr=float(settings["lr"]), l2=l2, seed=seed, **own)


def _check(strategy: CodedLinearGD, task: Task, clients: int) -> None:
    _ = task.linear_loss  # a task that has none says so


SYSTEM: Final = System(
    "coded-linear",
    "Coded gradient descent",
    "Lin et al. 2019, Train where the data is: a case for bandwidth efficient coded training (abstract only; our "
    "reconstruction)",
    "linear models: products with combinations of data partitions, stored ahead, from which margins and gradient "
    "are solved for",
    _build,
    _OWN,
    (TASK_PREFIX,),
    {"task": "linear"},
    check=_check,
)
