"""Gradient descent on coded data for linear models, exact while enough devices answer.

**Privacy.** Raw training data leave their owners; by way of the server they even pass it. The server learns the label
of every example, and its margin in every iteration. Use it within one trust domain only.
:mod:`fedcomp.coding.datacode` says what is computed and why it is exact; of the paper (Lin et al. 2019,
arXiv:1910.10283) only the abstract was read, the construction is our reconstruction.

One round is one iteration of full-batch gradient descent:

    set-up       devices that are new, or lost what they held: join, share, build
    phase 1      w down to every device that is set up, margins up
    phase 2      projected residuals down to as few devices as decode, parts of the gradient up; when one of them is
                 lost, others make up for it (a retry), for which all that has arrived stays valid

A device keeps its combination and the id of its plan beside its memory. One that comes back with the same plan goes on
at once; one that lost it, or a new node in its place, is set up again in the next round, as soon as the owners of the
partitions it combines are there.

A device whose second answer does not fit its first (:meth:`fedcomp.coding.datacode.CodedStep.contradicts`) is left out
of the round, with both of them. A round whose answers do not determine the gradient is skipped and the model is
unchanged, unless ``approximate`` is set: then it goes on with the partitions that are determined.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs import State
from fedcomp.coding.checked import checked_bytes, doubles_of
from fedcomp.coding.datacode import CONDITION_OF, CodedStep, DataPlan, data_plan, encode_rows
from fedcomp.coding.datapacket import pack_partition, unpack_partition
from fedcomp.coding.encodings import CODES, encoding_matrix
from fedcomp.coding.errors import CodingError, NotDecodable, PacketError
from fedcomp.coding.linearloss import LOSSES
from fedcomp.coding.stream import SplitMix64, derive
from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.program import Answer, AnswerError, Ask, Me, Now, Post, Round, Said, Step, System, Wait
from fedcomp.rules import Data, Density, Flag, Int, Many, Maybe, NotNegative, OneOf, Positive, Real, Seed, Switch, Text

Doubles = NDArray[np.float64]
Tensors = Mapping[str, NDArray[Any]]

VECTOR_TYPES: Final = ("float64", "float32")
"""Types in which vectors of the two phases may travel."""

DIGEST: Final = 16
"""Bytes of the digest by which an owner says which examples it has."""

PLAN: Final = 8
"""Bytes of a plan's name."""

PARTITION: Final = "partition"
"""Name of a post that brings a partition from its owner to a device that combines it."""

MOST_DEVICES: Final = 1 << 20
"""Devices a plan may have."""

MOST_VALUES: Final = 1 << 28
"""Numbers that one device may be asked to keep."""

PHASE1: Final = "query.coded_phase1"
PHASE2: Final = "query.coded_phase2"
"""Kinds of the asks of a step; those of the set-up come with what the app makes its rows from. None brings the
model."""

PlanId = Annotated[bytes, Data(PLAN, least=PLAN)]
Marked = Annotated[bool, Flag(absent=False)]
Devices = Annotated[tuple[int, ...], Many(Int(), MOST_DEVICES)]


@dataclass(frozen=True)
class LinearRows:
    """The examples a device owns.

    Attributes
    ----------
    x : ndarray of float64, shape (m, d)
        Without a constant column; the server says whether there is a bias.
    y : ndarray of float64, shape (m,)
        0 and 1 for classes.
    loss : str
        What the device's task minimises: "logistic", "hinge" or "squares"; the server compares it with its own.
    """

    x: Doubles
    y: Doubles
    loss: str


class Brings(Protocol):
    """What an app brings."""

    def rows(self, me: Me, partitions: int) -> LinearRows:
        """Return the examples of this device's own partition, of so many."""
        ...


# What is said.


@dataclass(frozen=True, repr=False, eq=False)
class Join(Said):
    """Who are you, what do you hold?

    Attributes
    ----------
    partitions : int
        Devices with numbers below it own the partition of that number.
    labels : bool
        Owners are to send theirs.
    """

    partitions: Annotated[int, Int(1, MOST_DEVICES)]
    labels: Switch


@dataclass(frozen=True, repr=False, eq=False)
class Joined(Said):
    """The plan a device holds rows of; empty where there is none."""

    plan: Annotated[bytes, Data(PLAN)] = b""


@dataclass(frozen=True, repr=False, eq=False)
class Owner(Joined):
    """What an owner says beside that; its labels are the frame "labels".

    Attributes
    ----------
    rows, columns : int
        Of its partition.
    loss : str
    data : bytes
        Tells apart data of which all that the server sees is equal.
    label_type : {"", "int8", "float64"}
        Of the labels that come along.
    """

    rows: Annotated[int, Int(most=2**31 - 1)] = 0
    columns: Annotated[int, Int(1, 2**31 - 1)] = 1
    loss: Annotated[str, Text(64)] = ""
    data: Annotated[bytes, Data(DIGEST, least=DIGEST)] = bytes(DIGEST)
    label_type: Annotated[str, OneOf("", "int8", "float64")] = ""

    def conflict(self) -> str:
        # What one owner states decides how much every device holds.
        return _too_large(self.rows, self.columns)


@dataclass(frozen=True, repr=False, eq=False)
class Share(Said):
    """Send your partition: in the answer, or to these devices.

    Attributes
    ----------
    partitions : int
    plan : bytes
    to : tuple of int
        The devices that combine it; none where the server forwards it.
    """

    partitions: Annotated[int, Int(1, MOST_DEVICES)]
    plan: PlanId
    to: Devices = ()


@dataclass(frozen=True, repr=False, eq=False)
class Build(Said):
    """Make and keep your combination.

    Attributes
    ----------
    sizes : tuple of int
        Rows of each partition.
    columns : int
        Of all of them, without the constant one that ``bias`` adds.
    """

    plan: PlanId
    sizes: Annotated[tuple[int, ...], Many(Int(most=2**31 - 1), MOST_DEVICES, least=1)]
    columns: Annotated[int, Int(1, 2**31 - 1)]
    bias: Switch

    def conflict(self) -> str:
        # A combination is as long as the longest partition, whichever of them go into it.
        return _too_large(max(self.sizes), self.columns)


@dataclass(frozen=True, repr=False, eq=False)
class Multiply(Said):
    """Multiply the rows of a plan, or with ``back`` their transpose, with the vector that comes along."""

    plan: PlanId
    back: Marked = False


@dataclass(frozen=True, repr=False, eq=False)
class Done(Said):
    """How a device answers what is not a join.

    Attributes
    ----------
    unready : bool
        It holds no rows of the plan: it is to be set up again, and not taken for one that fails.
    """

    unready: Marked = False


def _too_large(rows: int, columns: int) -> str:
    return f"{rows} rows of {columns} columns: more than {MOST_VALUES} numbers" if rows * columns > MOST_VALUES else ""


@dataclass(frozen=True, repr=False, eq=False)
class CodedLinear(System, id="coded-linear"):
    """Full-batch gradient descent for a linear model whose training data are coded over the devices.

    Device i is the node of partition i; the first ``partitions`` devices own one partition each, the others hold
    parities. Clients bring :class:`Brings`.

    Parameters
    ----------
    partitions : int
        k.
    parities : int
        r = n - k.
    code : str
        One of :data:`fedcomp.coding.encodings.CODES`.
    density : float
        Density of nonzero coefficients.
    loss : str
        "logistic", "squares" (least squares) or "hinge" (linear SVM); must be that of the clients' task.
    lr, l2 : float
        Step size; coefficient of |w|^2/2 (the bias is not regularised).
    approximate : bool
        Continue with the determined partitions instead of skipping a round. Partitions lost in phase 2 only are dropped
        from the third retry on.
    retries : int
        How often phase 2 may be repeated in a round. With a fifth of all messages lost 3 leave a seventh of the rounds
        undone, 7 hardly any.
    payload : str
        "float64", exact, or "float32": type of the vectors of both phases. Solves are in float64 anyway.
    direct : bool
        Devices post their partitions to each other. Else each goes to the server once, which forwards it.
    task : str
        Name of the data that clients make their rows from; rows of another task are refused.
    seed : int
        Names the draw of the encoding matrix.
    seconds : float, optional
        Timeout for answers. Default: the driver's.

    Examples
    --------
    >>> CodedLinear(partitions=6, parities=4).plan.devices
    10
    """

    APP: ClassVar[str] = "app = fc.client(app, fc.linear_device(...))"
    SAYS: ClassVar[tuple[type[Said], ...]] = (Join, Joined, Owner, Share, Build, Multiply, Done)
    SENT: ClassVar[str] = ""
    KEEPS: ClassVar[bool] = True
    SEVERAL: ClassVar[bool] = True

    partitions: Annotated[int, Int(1)] = 1
    parities: Annotated[int, Int()] = 2
    code: Annotated[str, OneOf(*CODES)] = "balanced"
    density: Density = 0.5
    loss: Annotated[str, OneOf(*LOSSES)] = "logistic"
    lr: Positive = 0.1
    l2: NotNegative = 0.0
    approximate: Switch = False
    retries: Annotated[int, Int()] = 7
    payload: Annotated[str, OneOf(*VECTOR_TYPES)] = "float64"
    direct: Switch = False
    task: Annotated[str, Text(1 << 16)] = ""
    seed: Seed = 0
    seconds: Annotated[float | None, Maybe(Real(above=0.0))] = None

    def conflict(self) -> str:
        """Code and density have to fit, which shows before any node is asked."""
        encoding_matrix(self.code, self.parities + 1, 1, density=self.density)
        return ""

    @property
    def plan(self) -> DataPlan:
        """The encoding matrix and who owns what."""
        return data_plan(
            self.code, self.partitions + self.parities, self.partitions, density=self.density, seed=self.seed
        )

    # The server.

    def round(self, now: Now) -> Round:
        made = _Iteration(self, now)
        try:
            yield from made.set_up()
            step = yield from made.descend()
        # The round is lost, not the run: devices stay set up, and the next round asks them again.
        except CodingError as reason:
            made.skip(f"{type(reason).__name__}: {reason}")
            return None
        return step

    # A device.

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        say = ask.say
        if isinstance(say, Multiply):
            return memory, self._multiplied(ask, say, me)
        brings: Brings | None = me.data
        if brings is None:
            raise AnswerError("this client's app provides no rows: it lacks linear_device(rows)")
        if isinstance(say, Join):
            return memory, self._joined(say, me, brings)
        if isinstance(say, Share):
            return memory, self._shared(say, me, brings)
        if isinstance(say, Build):
            return memory, self._built(ask, say, me, brings)
        raise AnswerError("the ask is none of coded gradient descent")

    def _joined(self, asked: Join, me: Me, brings: Brings) -> Answer:
        """Report what this device already holds; an owner also reports size, loss and labels."""
        held = me.kept.get("plan", b"")
        if me.node >= asked.partitions:
            return Answer(me.node, say=Joined(held), bare=True)
        own = brings.rows(me, asked.partitions)
        # Classes travel as a byte each, real targets as doubles.
        kind = "int8" if bool(np.isin(own.y, (0.0, 1.0)).all()) else "float64"
        # In one byte order and layout: the same examples have the same digest on every machine.
        data = hashlib.blake2b(own.x.astype("<f8").tobytes("C"), digest_size=DIGEST).digest()
        owner = Owner(held, len(own.x), int(own.x.shape[1]), own.loss, data, kind if asked.labels else "")
        frames = {"labels": checked_bytes(own.y, kind)} if asked.labels else {}
        return Answer(me.node, say=owner, frames=frames, bare=True)

    def _shared(self, asked: Share, me: Me, brings: Brings) -> Answer:
        """Send the device's own partition to each device that combines it, or to the server, which forwards it."""
        packed = pack_partition(brings.rows(me, asked.partitions).x, me.node, asked.plan)
        if not self.direct:
            return Answer(me.node, say=Done(), frames={"partition": packed}, bare=True)
        posts = tuple(Post(me.node, to, PARTITION, packed) for to in asked.to)
        return Answer(me.node, say=Done(), post=posts, bare=True)

    def _built(self, ask: Ask, asked: Build, me: Me, brings: Brings) -> Answer:
        """Combine the device's own partition with those of others, and keep the result with the plan's id."""
        done = Answer(me.node, say=Done(), bare=True)
        if me.kept.get("plan") == asked.plan:
            # Asked again because the answer was lost.
            return done
        sizes, columns = asked.sizes, asked.columns
        row = doubles_of(ask.frames.get("row", b""), len(sizes), "float64")
        wanted = np.flatnonzero(row).tolist()
        shapes = {j: (sizes[j], columns) for j in wanted if j != me.node}
        came = [ask.frames[name] for j in shapes if (name := f"partition.{j}") in ask.frames]
        parts = dict(unpack_partition(data, asked.plan, shapes) for data in came)
        parts |= _readable([bytes(post.data) for post in ask.mail if post.name == PARTITION], asked.plan, shapes)
        if me.node in wanted:
            own = brings.rows(me, len(sizes))
            if own.x.shape != (sizes[me.node], columns):
                raise StateError(
                    f"this device's partition has shape {own.x.shape}, the plan says {(sizes[me.node], columns)}; all "
                    "nodes must use the same task options and data"
                )
            parts[me.node] = own.x
        # Padded to the longest partition, so that the answers of all devices have one length.
        coded = encode_rows(row, parts, max(sizes), columns, bias=asked.bias)
        shape = np.array(coded.shape, np.int64)
        keep = {"plan": asked.plan, "shape": checked_bytes(shape, np.int64), "rows": checked_bytes(coded, np.float64)}
        return done._replace(keep=keep)

    def _multiplied(self, ask: Ask, asked: Multiply, me: Me) -> Answer:
        """Answer one phase: the stored rows, or their transpose, times the vector of the message."""
        if me.kept.get("plan") != asked.plan:
            return Answer(me.node, say=Done(unready=True), bare=True)
        rows, columns = doubles_of(me.kept["shape"], 2, np.int64).astype(int).tolist()
        coded = doubles_of(me.kept["rows"], rows * columns, np.float64).reshape(rows, columns)
        matrix = coded.T if asked.back else coded
        vector = doubles_of(ask.frames.get("vector", b""), matrix.shape[1], self.payload)
        frames = {"product": checked_bytes(matrix @ vector, self.payload)}
        return Answer(me.node, say=Done(), frames=frames, bare=True)


def _readable(came: Sequence[bytes], plan: bytes, shapes: Mapping[int, tuple[int, int]]) -> dict[int, Doubles]:
    """Return the partitions that others have posted; other posts are ignored."""
    parts: dict[int, Doubles] = {}
    for data in came:
        try:
            j, x = unpack_partition(data, plan, shapes)
        except PacketError:
            # Of a former plan, or nonsense. A partition that is missing is named by who combines it.
            continue
        parts[j] = x
    return parts


class LinearModel:
    """A linear model: one tensor of weights and, optionally, one number after it as bias.

    Attributes
    ----------
    vector : ndarray of float64
        Weights, then the bias if there is one.
    features : int
    bias : bool

    Raises
    ------
    ConfigError
        When the tensors are anything else.
    """

    def __init__(self, named: Tensors) -> None:
        sizes = [array.size for array in named.values()]
        floats = all(array.dtype.kind == "f" for array in named.values())
        if not floats or len(sizes) not in (1, 2) or sizes[1:] not in ([], [1]) or not sizes[0]:
            shapes = {name: array.shape for name, array in named.items()}
            raise ConfigError(
                f"the model has tensors {shapes}, expected one of weights and at most one number after it as bias: "
                "coded gradient descent is exact for linear models only, such as that of the task 'digits-zero'"
            )
        self._named = named
        self.features, self.bias = sizes[0], len(sizes) == 2
        self.vector: Doubles = np.concatenate([array.astype(np.float64).ravel() for array in named.values()])

    def step(self, gradient: Doubles | float, lr: float, l2: float) -> dict[str, Doubles] | None:
        """Return the model after one step, in float64 and the former shapes; None when it is not finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            # The bias is not regularised.
            full = gradient + l2 * np.where(np.arange(len(self.vector)) < self.features, self.vector, 0.0)
            moved = self.vector - lr * full
        if not np.isfinite(moved).all():
            return None
        parts = moved[: self.features], moved[self.features :]
        named = zip(self._named.items(), parts, strict=False)
        return {name: part.reshape(old.shape) for (name, old), part in named}


@dataclass
class _Iteration:
    """One round on the server.

    Devices are nodes. :attr:`fedcomp.program.Now.state` keeps between rounds: the labels and digests of the owners'
    data, the devices that have joined and are present, and those that hold their combination.

    Attributes
    ----------
    told : dict
        What the round was made of: :class:`fedcomp.strategies.coded.linear.Descent`.
    """

    system: CodedLinear
    now: Now
    told: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        now = self.now
        self.told = now.told["linear"] = {"setup_bytes": {}, "lost": [], "retries": 0, "transfers": 0}
        self.model = LinearModel(now.tensors())
        self.plan = self.system.plan
        state = now.state
        self.labels: dict[str, Doubles] = dict(state.get("labels", {}))
        self.data: dict[str, bytes] = dict(state.get("data", {}))
        self.plan_id: bytes = state.get("plan", b"")
        # Who was offline is asked again: it may have lost what it held, and another may have come.
        self.joined = set(state.get("joined", ())) & set(now.nodes) - set(now.strangers)
        self.ready = set(state.get("ready", ())) & self.joined

    def _keep(self) -> None:
        self.now.state.update(
            labels=self.labels,
            data=self.data,
            plan=self.plan_id,
            joined=sorted(self.joined),
            ready=sorted(self.ready & self.joined),
        )

    def skip(self, reason: str) -> None:
        """Report that the model is unchanged."""
        self.told["skipped"] = reason
        self.now.note(f"the model is unchanged: {reason}")
        self._keep()

    def _exchange(self, asks: Sequence[Ask]) -> Generator[Wait, Sequence[Answer], Sequence[Answer]]:
        return (yield Wait(asks, self.system.seconds)) if asks else ()

    def _holds(self, answer: Answer) -> bool:
        """Whether a device holds rows of this plan; one without them is set up again in the next round."""
        assert isinstance(answer.say, Done)
        if not answer.say.unready:
            return True
        self.ready.discard(answer.node)
        self.now.refuse(answer.node, "the device holds no rows of this plan: it is set up again in the next round")
        return False

    # Set-up.

    def set_up(self) -> Generator[Wait, Sequence[Answer], None]:
        """Set up as many devices as possible, so that they hold their combination."""
        yield from self._join()
        if not self.plan_id:
            return
        # What a device owns itself costs no transfer; for the rest the owners have to be there.
        needs: dict[int, list[int]] = {}
        for i in sorted(self.joined - self.ready):
            wanted = [j for j in self.plan.wants(i) if j != i]
            absent = [j for j in wanted if j not in self.joined]
            if absent:
                self.now.note(f"device {i} waits for partitions {absent}, whose owners are not there")
            else:
                needs[i] = wanted
                # What was posted for a former attempt comes again with this one.
                self.now.mailbox.take(i)
        if needs:
            parts = yield from self._share(needs)
            yield from self._build(needs, parts)

    def _join(self) -> Generator[Wait, Sequence[Answer], None]:
        """Ask unknown nodes once to identify themselves, and owners for their labels; then name the plan."""
        now, count = self.now, self.system.partitions
        # Labels are long and never change: they are asked for until all are here.
        say = Join(count, len(self.labels) < count)
        unknown = [node for node in now.nodes if node not in self.joined]
        answers = yield from self._exchange([Ask(n, "train", say, expects=Joined, model=False) for n in unknown])
        held: dict[int, bytes] = {}
        for answer in answers:
            said = answer.say
            assert isinstance(said, Joined)
            try:
                self._admit(answer, said)
            except FedcompError as error:
                now.refuse(answer.node, str(error))
                continue
            self.joined.add(answer.node)
            self.ready.discard(answer.node)
            held[answer.node] = said.plan
        self.told["joined"] = sorted(held)
        self._name_plan()
        if self.plan_id:
            # Only now: before there is a plan there is no id to compare with what the devices say they hold.
            self.ready |= {device for device, plan in held.items() if plan == self.plan_id}

    def _admit(self, answer: Answer, said: Joined) -> None:
        """Check what a device reports about itself; store the labels of an owner.

        Raises
        ------
        FedcompError
            If it cannot be the device that it declares.
        """
        device, count, loss = answer.node, self.system.partitions, self.system.loss
        if device >= self.plan.devices:
            raise StateError(f"a node holds partition {device}, expected 0 to {self.plan.devices - 1}")
        if device >= count:
            return
        if not isinstance(said, Owner):
            raise StateError(f"device {device} did not describe its partition")
        if said.loss != loss:
            raise StateError(f"the task of device {device} has loss {said.loss!r}, this server has {loss!r}")
        if said.columns != self.model.features:
            raise StateError(f"device {device} has {said.columns} features, the model has {self.model.features}")
        # The plan's name binds labels and data: within a plan an owner cannot come back with others.
        if (known := self.labels.get(str(device))) is not None:
            if len(known) != said.rows:
                raise StateError(f"device {device} came back with {said.rows} examples, not {len(known)}")
            if self.data[str(device)] != said.data:
                raise StateError(f"device {device} returned with other examples than those the others have combined")
            return
        if not said.label_type:
            raise StateError(f"device {device} sent no labels")
        y = doubles_of(answer.frames.get("labels", b""), said.rows, said.label_type)
        if loss != "squares" and not np.isin(y, (0.0, 1.0)).all():
            raise StateError(f"device {device} sent labels other than 0 and 1")
        self.labels[str(device)], self.data[str(device)] = y, said.data

    def _name_plan(self) -> None:
        """Name the plan once every owner has joined, because stored rows are padded to the longest partition."""
        if self.plan_id:
            return
        absent = [j for j in range(self.system.partitions) if str(j) not in self.labels]
        if absent:
            return
        if not any(len(y) for y in self.labels.values()):
            raise ConfigError("no device owns a single example")
        # The plan's name binds the data: rows of other examples must not pass for this plan's.
        data = hashlib.blake2b(repr((self.model.features, self.model.bias)).encode(), digest_size=16)
        for j in range(self.system.partitions):
            # With its length, or the labels of two partitions could be divided otherwise under the same name.
            y = self.labels[str(j)]
            data.update(len(y).to_bytes(8, "little") + y.tobytes() + self.data[str(j)])
        self.plan_id = self.plan.plan_id(data.digest(), self.system.task.encode())

    def _share(self, needs: Mapping[int, list[int]]) -> Generator[Wait, Sequence[Answer], dict[int, bytes]]:
        """Ask each owner to send its wanted partition, once to the server or to the devices; return those that arrived
        at the server."""
        direct, asks, receivers = self.system.direct, [], {}
        for j in sorted({j for wanted in needs.values() for j in wanted}):
            receivers[j] = tuple(i for i, wanted in needs.items() if j in wanted)
            say = Share(self.system.partitions, self.plan_id, receivers[j] if direct else ())
            asks.append(Ask(j, "train", say, expects=Done, model=False))
        parts: dict[int, bytes] = {}
        for answer in (yield from self._exchange(asks)):
            owner = answer.node
            if direct:
                self.told["transfers"] += len(receivers[owner])
                continue
            try:
                data = answer.frames.get("partition")
                if data is None:
                    raise StateError("the reply holds no partition")
                # Read only to be checked: what is damaged is refused here, before it goes to several devices.
                unpack_partition(data, self.plan_id, {owner: (len(self.labels[str(owner)]), self.model.features)})
            except FedcompError as reason:
                self.now.refuse(owner, str(reason))
                continue
            parts[owner] = data
            self._count("hub-up", len(data))
        return parts

    def _count(self, link: str, size: int) -> None:
        sizes = self.told["setup_bytes"]
        sizes[link] = sizes.get(link, 0) + size

    def _build(
        self, needs: Mapping[int, list[int]], parts: Mapping[int, bytes]
    ) -> Generator[Wait, Sequence[Answer], None]:
        """Send every waiting device its row, and the partitions to combine unless others have sent them."""
        sizes = tuple(len(self.labels[str(j)]) for j in range(self.plan.partitions))
        say, asks = Build(self.plan_id, sizes, self.model.features, self.model.bias), []
        for i, wanted in needs.items():
            forwarded = [] if self.system.direct else wanted
            absent = [j for j in forwarded if j not in parts]
            if absent:
                self.now.note(f"device {i} waits for partitions {absent}, which did not arrive")
                continue
            # Exact, also where vectors travel as float32: what is built by a rounded row is not the code's.
            frames = {"row": checked_bytes(self.plan.matrix[i], "float64")}
            frames |= {f"partition.{j}": parts[j] for j in forwarded}
            for j in forwarded:
                self._count("hub-down", len(parts[j]))
                self.told["transfers"] += 1
            asks.append(Ask(i, "train", say, frames, expects=Done, model=False))
        built = [answer.node for answer in (yield from self._exchange(asks))]
        self.ready.update(built)
        self.told["built"] = sorted(built)

    # A step.

    def descend(self) -> Generator[Wait, Sequence[Answer], Step | None]:
        """Make one step of gradient descent."""
        system, model, now = self.system, self.model, self.now
        if not self.plan_id:
            absent = [j for j in range(system.partitions) if str(j) not in self.labels]
            why = f"the owners of partitions {absent} have not joined yet"
            if len(now.nodes) < system.partitions:
                now.told["too_few"] = (
                    f"{len(now.nodes)} clients take part, one for each of {system.partitions} partitions is needed: "
                    f"{why}. Lower partitions, or connect more clients"
                )
            self.skip(why)
            return None
        labels = [self.labels[str(j)] for j in range(system.partitions)]
        # With a model of zeros all answers would be zero, right or wrong.
        probe = not model.vector.any()
        sent = SplitMix64(derive("probe", now.seed, now.number)).normal(len(model.vector)) if probe else model.vector
        limit = CONDITION_OF[system.payload]
        step = CodedStep(self.plan, labels, system.loss, system.approximate, max_condition=limit, probe=probe)
        asked = dict.fromkeys(sorted(self.joined & self.ready), sent)
        answers = yield from self._ask(asked, step.margins_size, back=False)
        self.told |= {"asked": len(asked), "answered": len(answers)}
        step.decode(answers)
        for device in step.odd:
            now.refuse(device, "its margins contradict those of all others")
        used = yield from self._gather(sorted(answers.keys() - step.odd), sent, step)
        # The mean over the examples that are in the gradient, which in an approximate step are not all.
        moved = model.step(step.gradient / step.included, system.lr, system.l2)
        self.told |= {"used": used, "condition": step.condition}
        if moved is None:
            self.skip("the step is not finite; lower lr")
            return None
        missing = sum(map(len, labels)) - step.included
        self.told |= {"examples": step.included, "missing": missing}
        if missing:
            now.note(f"approximate: the gradient lacks {missing} examples")
        self._keep()
        return Step(tuple(used), tensors=moved, metrics={"train_loss": step.mean_loss})

    def _gather(self, alive: list[int], sent: Doubles, step: CodedStep) -> Generator[Wait, Sequence[Answer], list[int]]:
        """Ask a decodable subset for its parts of the gradient; remaining devices replace those that are lost."""
        used, silences = set[int](), Counter[int]()
        assigned = step.assign(alive)
        while True:
            answers = yield from self._ask(assigned, len(sent), back=True)
            wrong = step.contradicts(sent, answers)
            for i in wrong:
                del answers[i]
                self.now.refuse(i, "its part of the gradient does not fit its margins")
            self.told["lost"] += wrong
            used |= answers.keys()
            if step.take(answers):
                return sorted(used)
            silent = [i for i in assigned if i not in answers]
            retries = self.told["retries"]
            if retries == self.system.retries:
                raise NotDecodable(f"devices {silent} did not answer phase 2 usably, after {retries} retries")
            # Who was silent once may have lost a message; who was silent twice is asked only in a repeat.
            silences.update(silent)
            alive = [i for i in alive if i not in wrong]
            never = [i for i in alive if not silences[i]]
            once = [i for i in alive if silences[i] < 2 and i not in silent]
            self.told["retries"] = retries + 1
            assigned = _again(step, (never, once), retries + 1, again=not wrong)

    def _ask(
        self, vectors: Mapping[int, Doubles], size: int, *, back: bool
    ) -> Generator[Wait, Sequence[Answer], dict[int, Doubles]]:
        """Send each device its vector; return the usable answers of ``size`` numbers."""
        kind, payload = PHASE2 if back else PHASE1, self.system.payload
        asks = [
            Ask(i, kind, Multiply(self.plan_id, back), {"vector": checked_bytes(v, payload)}, expects=Done, model=False)
            for i, v in vectors.items()
        ]
        came = [answer for answer in (yield from self._exchange(asks)) if self._holds(answer)]
        for answer in came:
            if "product" not in answer.frames:
                self.now.refuse(answer.node, "the reply holds no product")
        answers = self.now.read(came, "product", lambda data: doubles_of(data, size, payload))
        self.told["lost"] += [i for i in vectors if i not in answers]
        return answers


def _again(step: CodedStep, pools: tuple[list[int], ...], attempt: int, *, again: bool) -> dict[int, Doubles]:
    """Return the devices for a retry: replacements of the lost devices from the first of ``pools`` that suffices.

    Every second time, and if there are no replacements, the same devices are asked again (if ``again``), as if only
    messages were lost. From the third retry on, an approximate step gives up rows that no other device has.

    Raises
    ------
    NotDecodable
        If no device is left to ask.
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
