"""How the devices of coded gradient descent get their combinations: join, share, build; and a round's report.

**Privacy.** Raw training data leave their owners here. With the transport "hub" they pass this server, with "peers"
they go straight to the devices that combine them; the labels come to the server either way. One trust domain only.

A device that is set up keeps its combination and the id of its plan in its own state. One that comes back with the same
plan goes on at once; one that lost its state, or a new node in its place, is set up again in the next round, as soon as
the owners of the partitions it combines are there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedcomp.coding.datacode import DataPlan, data_plan
from fedcomp.coding.datapacket import packed_bytes, unpack_partition
from fedcomp.coding.parcels import HEADER_BYTES
from fedcomp.coding.transport import MAX_STORE_BYTES
from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.flower import linear
from fedcomp.flower.coded import NO_HANDLER
from fedcomp.flower.payload import put_frame, take_frame, take_node
from fedcomp.flower.report import ReportSection, figure, shorten
from fedcomp.flower.rounds import Exchanges, Push
from fedcomp.flower.schema import Schema
from fedcomp.plain import Count
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.coded.links import SimulatedLinks, record_peer
from fedcomp.strategies.coded.settings import LinearSettings
from fedcomp.strategies.partitions import Holders
from fedcomp.strategies.replies import first_replies

Real = NDArray[np.float64]


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
        Packed partitions handed over in this round, by link class: "hub-up", "hub-down", "peer".
    transfers : int
        How many of them went to a device that combines them.
    refused : dict of int to str
        Why an answer was not used; -1 for a node that does not say which device it is.
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
    refused: dict[int, str] = figure(dict, unit="devices", show="reasons")
    notes: list[str] = figure(list, show="texts")

    def count(self, link: str, size: int) -> None:
        """Add bytes that were handed over on a link class."""
        self.setup_bytes[link] = self.setup_bytes.get(link, 0) + size

    def refuse(self, device: int | None, reason: Exception) -> None:
        """Note why what a device said was not used."""
        self.refused[-1 if device is None else device] = shorten(str(reason))

    def line(self) -> str:
        """Return what a step was made of."""
        return f"{self.answered} answers, {self.retries} retries, {self.examples} examples"


@dataclass(frozen=True)
class LinearShape:
    """What the model says about the data: number of features, and whether a constant column is added."""

    features: int
    bias: bool


def exchange(
    contents: Mapping[int, RecordDict | None],
    message_type: str,
    header: Schema,
    *,
    config: ConfigRecord | None = None,
    config_key: str = "config",
    timeout: float | None = None,
) -> Exchanges[list[tuple[int, Message]]]:
    """Send one message to each node, header first; return the replies with the nodes they come from."""
    messages = []
    for node, given in contents.items():
        content = RecordDict()
        header.put(content)
        if config is not None:
            content[config_key] = ConfigRecord(dict(config))
        for name, record in (given or RecordDict()).items():
            content[name] = record
        messages.append(Message(content, node, message_type))
    return list(first_replies(messages, (yield Push(messages, timeout))).items())


@dataclass(frozen=True)
class _Join:
    """What a node that joins says: which device it is, and of an owner its labels if they are not known."""

    device: int
    header: linear.Joined
    labels: Real | None = None


class LinearSetup(Stateful):
    """Who the devices are, what they own, and whether they hold their combination.

    Parameters
    ----------
    settings : LinearSettings

    Attributes
    ----------
    plan : DataPlan or None
        Known when every owner has joined once: the stored rows are padded to the longest partition.
    plan_id : bytes
    labels : dict of int to ndarray
        y by partition.
    devices : dict of int to int
        Device by node id.
    holders : Holders
        What the nodes say, and who holds a partition that several declare.
    ready : set of int
        Devices that hold their combination of this plan, as far as is known.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "_planned": Count,
        "plan_id": bytes,
        "labels": dict[int, NDArray[np.float64]],
        "_data": dict[int, bytes],
        "devices": dict[int, int],
        "holders": nested("holders"),
        "_addresses": dict[int, str],
        "ready": set[int],
    }

    def __init__(self, settings: LinearSettings) -> None:
        self.settings = settings
        self.plan: DataPlan | None = None
        self.plan_id = b""
        self.labels: dict[int, Real] = {}
        self.devices: dict[int, int] = {}
        self.holders = Holders()
        self.ready: set[int] = set()
        self._data: dict[int, bytes] = {}
        self._addresses: dict[int, str] = {}
        self._links = SimulatedLinks(settings.transport, settings.spool, MAX_STORE_BYTES)

    @property
    def _peers(self) -> bool:
        """Whether partitions go from device to device."""
        return self.settings.transport == "peers"

    @property
    def _planned(self) -> int:
        """Partitions of the plan, from which it is made again; 0 without one."""
        return 0 if self.plan is None else self.plan.partitions

    @_planned.setter
    def _planned(self, count: int) -> None:
        self.plan = self._plan_of(count) if count else None

    def _plan_of(self, count: int) -> DataPlan:
        s = self.settings
        return data_plan(s.code, count + s.parities, count, density=s.density, seed=s.seed)

    def run(
        self, nodes: list[int], config: ConfigRecord, shape: LinearShape, grid: Grid, report: Descent
    ) -> Exchanges[None]:
        """Bring as many of ``nodes`` as possible to where they hold their combination."""
        count = self._count(config)
        yield from self._join(nodes, count, config, shape, grid, report)
        if self.plan is None:
            return
        online = {self.devices[n]: n for n in nodes if n in self.devices}
        # What a device owns itself costs no transfer; for the rest the owners have to be there.
        needs: dict[int, list[int]] = {}
        for i in sorted(online.keys() - self.ready):
            wanted = [j for j in self.plan.wants(i) if j != i]
            absent = [j for j in wanted if j not in online]
            if absent:
                report.notes.append(f"device {i} waits for partitions {absent}, whose owners are not there")
            else:
                needs[i] = wanted
        if needs:
            parts = yield from self._share(needs, online, config, shape, grid, report)
            yield from self._build(needs, parts, online, shape, config, report)

    def content(self, reply: Message, device: int) -> RecordDict:
        """Return a reply's content; a device that holds another plan or none is set up again in the next round.

        Raises
        ------
        FedcompError
            When it is an error or does not belong to this plan.
        """
        if reply.has_error():
            raise StateError(str(reply.error.reason))
        done = linear.Done.take(reply)
        if done.unready:
            self.ready.discard(device)
            raise StateError("the device holds no rows of this plan: it is set up again in the next round")
        if done.plan != self.plan_id:
            raise StateError(f"the reply belongs to plan {done.plan!r}, not to this one")
        return reply.content

    def _count(self, config: ConfigRecord) -> int:
        if self.plan is not None:
            return self.plan.partitions
        if self.settings.partitions:
            return self.settings.partitions
        clients = config.get("clients")
        if not isinstance(clients, int) or clients <= self.settings.parities:
            raise ConfigError(
                f"partitions=0 takes the number of clients less {self.settings.parities} parities; the configuration "
                f"says clients={clients!r}; give partitions, or a configuration with clients=N and fewer parities"
            )
        return clients - self.settings.parities

    def _exchange(
        self,
        contents: Mapping[int, RecordDict | None],
        header: linear.Join | linear.Share | linear.Build,
        config: ConfigRecord,
    ) -> Exchanges[list[tuple[int, Message]]]:
        if self._peers:
            # Used by nodes that have no address of their own, and only if they find the mark in this folder.
            header = replace(header, peers=True, spool=self._links.root)
        return (
            yield from exchange(
                contents,
                f"query.{linear.SETUP}",
                header,
                config=config,
                config_key=self.settings.configrecord_key,
                timeout=self.settings.timeout,
            )
        )

    def _join(
        self, nodes: list[int], count: int, config: ConfigRecord, shape: LinearShape, grid: Grid, report: Descent
    ) -> Exchanges[None]:
        """Ask nodes that are not known who they are, and owners for their labels, once; then make the plan."""
        self.holders.meet(grid)
        # Who was offline is asked again: it may have lost what it held, and another may have come.
        known = self.devices.keys() & self.holders.claims.keys()
        unknown: dict[int, RecordDict | None] = {n: None for n in nodes if n not in known}
        # Labels are long and never change: they are asked for until all are here.
        header = linear.Join(partitions=count, labels=len(self.labels) < count)
        replies = yield from self._exchange(unknown, header, config)
        joins: dict[int, _Join] = {}
        for node, reply in replies:
            # A node may claim any partition; where the engine knows better, its word counts.
            device = self.holders.known.get(node, take_node(reply))
            try:
                joins[node] = self._read(reply, device, count, shape)
            except FedcompError as error:
                report.refuse(device, error)
        # Who could not be the device it declares has no say in who holds it.
        refused = self.holders.settle(unknown, {node: join.device for node, join in joins.items()})
        for node, reason in refused.items():
            report.refuse(joins[node].device, StateError(reason))
        held: dict[int, bytes] = {}
        for device, node in sorted(self.holders.held.items()):
            if node not in joins:
                continue
            joined, labels = joins[node].header, joins[node].labels
            holder = next((n for n, d in self.devices.items() if d == device), None)
            if holder not in (None, node):
                # Another node in its place: what the former one stored is gone with it.
                del self.devices[holder]
                self.ready.discard(device)
            if isinstance(joined, linear.Owner) and labels is not None:
                self.labels[device], self._data[device] = labels, joined.data
            self._addresses[device] = joined.address
            self.devices[node] = device
            report.joined.append(device)
            held[device] = joined.plan
        self._make_plan(count, config, shape, report)
        if self.plan is not None:
            # Only now: before the plan is made there is no id to compare with what the devices say they hold.
            self.ready |= {device for device, plan in held.items() if plan == self.plan_id}

    def _read(self, reply: Message, device: int | None, count: int, shape: LinearShape) -> _Join:
        """Return what a node that joins says.

        Raises
        ------
        FedcompError
            When it cannot be the device it declares.
        """
        if reply.has_error():
            reason = str(reply.error.reason)
            hint = "; the app needs fedcomp.client(app, linear_device(rows))" if NO_HANDLER in reason else ""
            raise StateError(shorten(reason)[:200] + hint)
        devices = count + self.settings.parities
        if device is None or device >= devices:
            raise StateError(f"a node holds partition {device}, expected 0 to {devices - 1}")
        if device >= count:
            return _Join(device, linear.Joined.take(reply))
        owner = linear.Owner.take(reply)
        return _Join(device, owner, self._labels_of(owner, device, reply, shape))

    def _labels_of(self, owner: linear.Owner, device: int, reply: Message, shape: LinearShape) -> Real | None:
        """Check what an owner says about its partition; return its labels if they are not known."""
        rows = owner.rows
        if owner.loss != self.settings.loss:
            raise StateError(
                f"the task of device {device} has loss {owner.loss!r}, this server has {self.settings.loss!r}"
            )
        if owner.columns != shape.features:
            raise StateError(f"device {device} has {owner.columns} features, the model has {shape.features}")
        # The plan's name binds labels and data: within a plan an owner cannot come back with others.
        if device in self.labels:
            if len(self.labels[device]) != rows:
                raise StateError(f"device {device} came back with {rows} examples, not {len(self.labels[device])}")
            if self._data[device] != owner.data:
                raise StateError(f"device {device} came back with other examples than those the others have combined")
            return None
        if not owner.label_type:
            raise StateError(f"device {device} sent no labels")
        y = linear.take_vector(reply.content, linear.LABELS, rows, owner.label_type)
        if self.settings.loss != "squares" and not np.isin(y, (0.0, 1.0)).all():
            raise StateError(f"device {device} sent labels other than 0 and 1")
        return y

    def _make_plan(self, count: int, config: ConfigRecord, shape: LinearShape, report: Descent) -> None:
        if self.plan is not None:
            return
        absent = [j for j in range(count) if j not in self.labels]
        if absent:
            report.skipped = f"the owners of partitions {absent} have not joined yet"
            return
        if not any(len(y) for y in self.labels.values()):
            raise ConfigError("no device owns a single example")
        plan = self._plan_of(count)
        # The plan's name binds the data: rows of other examples must not pass for this plan's.
        data = hashlib.blake2b(repr(shape).encode(), digest_size=16)
        for j in range(count):
            # With its length, or the labels of two partitions could be divided otherwise under the same name.
            data.update(len(self.labels[j]).to_bytes(8, "little") + self.labels[j].tobytes() + self._data[j])
        # What the clients make their rows from; the round and how they would train otherwise are no part of it.
        task = sorted((k, repr(v)) for k, v in config.items() if k == "task" or k.startswith("task."))
        self.plan, self.plan_id = plan, plan.plan_id(data.digest(), repr(task).encode())

    def _share(
        self,
        needs: Mapping[int, list[int]],
        online: Mapping[int, int],
        config: ConfigRecord,
        shape: LinearShape,
        grid: Grid,
        report: Descent,
    ) -> Exchanges[dict[int, bytes]]:
        """Have each wanted partition sent by its owner: here, once, or to the devices; return what came here."""
        assert self.plan is not None
        header = linear.Share(partitions=self.plan.partitions, plan=self.plan_id)
        contents: dict[int, RecordDict | None] = {}
        for j in sorted({j for wanted in needs.values() for j in wanted}):
            to = [i for i, wanted in needs.items() if j in wanted]
            addresses = [self._links.address(self._addresses[i], i) for i in to] if self._peers else []
            contents[online[j]] = content = RecordDict()
            linear.Targets(tuple(to), tuple(addresses)).put(content)
        replies = yield from self._exchange(contents, header, config)
        parts: dict[int, bytes] = {}
        for node, reply in replies:
            owner = self.devices[node]
            try:
                answered = self.content(reply, owner)
                if self._peers:
                    for size in self._sent(reply, owner, needs, shape):
                        report.count("peer", size)
                        # Nothing is handed over where no connection comes about.
                        report.transfers += size > 0
                        record_peer(grid, report.round, node, f"query.{linear.SETUP}", [size])
                    continue
                data = take_frame(answered, linear.PARTITION)
                if data is None:
                    raise StateError("the reply holds no partition")
                # Read only to be checked: what is damaged is refused here, before it is forwarded to several devices.
                unpack_partition(data, self.plan_id, {owner: (len(self.labels[owner]), shape.features)})
            except FedcompError as reason:
                report.refuse(owner, reason)
                continue
            parts[owner] = data
            report.count("hub-up", len(data))
        return parts

    def _sent(self, reply: Message, owner: int, needs: Mapping[int, list[int]], shape: LinearShape) -> tuple[int, ...]:
        """Return the bytes an owner says it handed over, one number per receiver."""
        sizes = linear.Done.take(reply).sent
        receivers = sum(owner in wanted for wanted in needs.values())
        # A parcel that is not acknowledged is sent once more.
        most = 2 * (HEADER_BYTES + packed_bytes(len(self.labels[owner]), shape.features))
        if len(sizes) != receivers or max(sizes, default=0) > most:
            said = shorten(repr(sizes))
            raise StateError(f"says it handed over {said} bytes, expected {receivers} numbers from 0 to {most}")
        return sizes

    def _build(
        self,
        needs: Mapping[int, list[int]],
        parts: Mapping[int, bytes],
        online: Mapping[int, int],
        shape: LinearShape,
        config: ConfigRecord,
        report: Descent,
    ) -> Exchanges[None]:
        """Send every waiting device its row, and what it combines unless that came from its peers."""
        assert self.plan is not None
        header = linear.Build(
            plan=self.plan_id,
            sizes=tuple(len(self.labels[j]) for j in range(self.plan.partitions)),
            columns=shape.features,
            bias=shape.bias,
        )
        contents: dict[int, RecordDict | None] = {}
        for i, wanted in needs.items():
            forwarded = [] if self._peers else wanted
            absent = [j for j in forwarded if j not in parts]
            if absent:
                report.notes.append(f"device {i} waits for partitions {absent}, which did not arrive")
                continue
            content = contents[online[i]] = RecordDict()
            # Exact, also where vectors travel as float32: what is built by a rounded row is not the code's.
            linear.put_vector(content, linear.ROW, self.plan.matrix[i], "float64")
            for j in forwarded:
                put_frame(content, f"{linear.PARTITION}.{j}", parts[j])
                report.count("hub-down", len(parts[j]))
                report.transfers += 1
        replies = yield from self._exchange(contents, header, config)
        for node, reply in replies:
            device = self.devices[node]
            try:
                self.content(reply, device)
            except FedcompError as reason:
                report.refuse(device, reason)
                continue
            self.ready.add(device)
            report.built.append(device)
