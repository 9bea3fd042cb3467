"""Coded gradient descent: :class:`fedcomp.systems.coded.linear.CodedLinear` over Flower's messages, with all nodes in
every round.

**Privacy.** Raw training data leave their owners; with the transport "hub" they even pass through this server. The
server learns the label of every example, and its margin in every iteration. Use it within one trust domain only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedcomp.coding.datacode import DataPlan
from fedcomp.errors import ConfigError
from fedcomp.flower.asks import AnswerHead
from fedcomp.flower.logs import log
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.report import ReportSection, figure, shorten
from fedcomp.flower.rounds import Exchanges
from fedcomp.program import Now, Step
from fedcomp.rules import TIMEOUT, Int, OneOf, checked
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.coded.settings import TRANSPORTS, spool_conflict
from fedcomp.strategies.links import Links
from fedcomp.strategies.parts import TASK_PREFIX, Settings
from fedcomp.strategies.replies import SentMessage
from fedcomp.strategies.server import Running, Server
from fedcomp.strategies.system import TRAINING, System, refuse_others, settings_of
from fedcomp.systems.coded.linear import CodedLinear, LinearModel

if TYPE_CHECKING:
    from fedcomp.tasks.base import Task


@dataclass
class Descent(ReportSection, name="linear"):
    """What one step of coded gradient descent was made of. Devices are numbered by partition id.

    Attributes
    ----------
    asked, answered : int
        Devices asked in phase 1, and usable answers.
    used : list of int
        The devices whose parts of the gradient were added.
    lost : list of int
        Devices that were asked and did not answer usably, once per phase or retry they were lost in.
    retries : int
        Further attempts at phase 2.
    skipped : str
        Why the model is unchanged; empty when it moved.
    examples, missing : int
        Examples in the gradient, and those left out of an approximate one.
    condition : float
        Of the rows the margins were solved from.
    joined, built : list of int
        Devices that said who they are, and that made their combination, in this round.
    setup_bytes : dict
        Packed partitions in this round, by link class: "hub-up", "hub-down"; "peer" is all that devices say they
        handed to their links.
    transfers : int
        How many of them went to a device that combines them.
    refused : dict of int to str
        Why an answer was not used; as the report says it by node.
    """

    asked: int = figure(unit="devices")
    answered: int = figure(unit="devices")
    used: list[int] = figure(list, unit="devices", show="count")
    lost: list[int] = figure(list, unit="devices", show="count")
    retries: int = figure()
    skipped: str = figure("", show="reasons")
    examples: int = figure(unit="examples")
    missing: int = figure(unit="examples")
    condition: float = figure(float("inf"))
    joined: list[int] = figure(list, unit="devices", show="count")
    built: list[int] = figure(list, unit="devices", show="count")
    setup_bytes: dict[str, int] = figure(dict, unit="bytes", show="total")
    transfers: int = figure(unit="partitions")
    refused: dict[int, str] = figure(dict, unit="devices", show="none")

    def line(self) -> str:
        """Return what a step was made of."""
        return f"{self.answered} answers, {self.retries} retries, {self.examples} examples"


class _Everybody(FedAvg):
    """Asks all nodes that are there, whoever they are; the step is the program's."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each node."""
        # As Flower's own strategies do, in the configuration that clients may go by.
        config["server-round"] = server_round
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return [Message(content, node, "train") for node in grid.get_node_ids()]


class CodedLinearGD(Server):
    """Full-batch gradient descent for a linear model whose training data are coded over the devices.

    The clients need the half :func:`fedcomp.clients.coded.linear.linear_device`;
    :mod:`fedcomp.clients.app` has it. Device i is the node with partition id i; the first ``partitions`` devices own
    one partition each, the others hold parities.

    Parameters
    ----------
    partitions : int
        k; 0 takes the entry "clients" of the training configuration, less ``parities``.
    parities, code, density, loss, lr, l2, approximate, retries, payload
        As of :class:`fedcomp.systems.coded.linear.CodedLinear`.
    timeout : float, optional
        Seconds for the replies of each exchange; default: the driver's timeout alone.
    transport : str
        "hub": partitions pass this server. "peers": they go from device to device, sealed, by the nodes' own peer
        addresses or, where these have none, by simulated links on this machine.
    spool : path, optional
        Folder of the simulated links; default a temporary one.
    seed : int
        Names the draw of the encoding matrix.
    configrecord_key : str
        Name of the training configuration in the messages.

    Raises
    ------
    ConfigError
        For a value out of range, or a code and a density that do not fit.

    Attributes
    ----------
    reports : Reports
        By round, with the section ``linear``.

    Examples
    --------
    >>> strategy = CodedLinearGD(partitions=6, parities=4, code="balanced", lr=0.3)
    """

    system: CodedLinear

    def __init__(
        self,
        *,
        partitions: int = 0,
        parities: int = 2,
        code: str = "balanced",
        density: float = 0.5,
        loss: str = "logistic",
        lr: float = 0.1,
        l2: float = 0.0,
        approximate: bool = False,
        retries: int = 7,
        timeout: float | None = None,
        payload: str = "float64",
        transport: str = "hub",
        spool: str | os.PathLike[str] | None = None,
        seed: int = 0,
        configrecord_key: str = "config",
    ) -> None:
        self.partitions = checked("partitions", partitions, Int())
        checked("transport", transport, OneOf(*TRANSPORTS))
        if why := spool_conflict(transport, spool):
            raise ConfigError(why)
        seconds = checked("timeout", timeout, TIMEOUT)
        system = CodedLinear(
            # Until the configuration of the first round says how many there are.
            self.partitions or 1,
            parities,
            code,
            density,
            loss,
            lr,
            l2,
            approximate,
            retries,
            payload,
            transport == "peers",
            seed=seed,
            seconds=None if seconds == float("inf") else seconds,
        )
        super().__init__(
            system,
            _Everybody(fraction_evaluate=0.0, configrecord_key=configrecord_key),
            seed=seed,
            links=Links(spool) if system.direct else None,
        )

    @property
    def plan(self) -> DataPlan | None:
        """The encoding matrix and who owns what; None until every owner has joined once."""
        return self.system.plan if self.state.get("plan") else None

    def summary(self) -> None:
        """Log the code and the loss."""
        s = self.system
        log.info("\t├──> CodedLinearGD: %s, %d parities, %s, lr %g", s.code, s.parities, s.loss, s.lr)

    def round(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Exchanges[Outcome]:
        """Set up who is not, then make one step of gradient descent; return the new model and the round's figures."""
        self.system = replace(self.system, partitions=self._count(config), task=_task_in(config))
        named = to_arrays(arrays)
        # Before anybody is asked.
        LinearModel(named)
        # Steps are in float64, whatever the first model was in.
        doubles = {name: array.astype("float64") for name, array in named.items()}
        return (yield from super().round(server_round, to_record(doubles), config, grid))

    def _count(self, config: ConfigRecord) -> int:
        """Return the number of partitions."""
        if self.state.get("plan"):
            return len(self.state["labels"])
        if self.partitions:
            return self.partitions
        clients, parities = config.get("clients"), self.system.parities
        if not isinstance(clients, int) or clients <= parities:
            raise ConfigError(
                f"partitions=0 takes the number of clients less {parities} parities; the configuration says "
                f"clients={clients!r}; give partitions, or a configuration with clients=N and fewer parities"
            )
        return clients - parities

    def _take(self, x: Running, now: Now, step: Step | None) -> Outcome:
        outcome, metrics = super()._take(x, now, step)
        section = x.report.section(Descent)
        peer = section.setup_bytes
        for name, value in now.told["linear"].items():
            setattr(section, name, value)
        section.setup_bytes |= peer
        section.skipped = shorten(section.skipped)
        refused = x.report.refused
        section.refused = {node: refused[at] for node, at in x.addresses.items() if at in refused}
        return outcome, MetricRecord({**section.metrics(), **(metrics or {})})

    def _note_links(self, x: Running, sent: SentMessage, head: AnswerHead) -> None:
        super()._note_links(x, sent, head)
        if head.handed:
            sizes = x.report.section(Descent).setup_bytes
            sizes["peer"] = sizes.get("peer", 0) + head.handed

    def identity(self) -> dict[str, str]:
        """Return code and loss, which must not change within a run."""
        s = self.system
        return {"system": repr((s.code, self.partitions, s.parities, s.density, s.seed, s.loss))}


def _task_in(config: ConfigRecord) -> str:
    """Return what the clients make their rows from; the round and how they would train otherwise are no part of it."""
    return repr(sorted((k, repr(v)) for k, v in config.items() if k == "task" or k.startswith("task.")))


_UNUSED: Final = {**TRAINING, "inner": "fedavg", "fraction_evaluate": 0.0}
"""Settings of a client that trains by itself, without a meaning here but for ``lr``."""

_OWN: Final = settings_of(
    CodedLinearGD, "code", "parities", "density", "payload", "transport", "approximate", "retries"
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
    own: dict[str, Any] = {name: settings[name] for name in _OWN}
    return CodedLinearGD(loss=loss, lr=float(settings["lr"]), l2=float(settings.get("task.l2", 0.0)), seed=seed, **own)


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
