"""A round as a program on plain values: it yields asks and reads answers. Drivers deliver it.

A system is two pure halves in one file (:mod:`fedcomp.systems`). ``round`` yields asks and receives answers; ``client``
takes a memory and an ask and returns the memory after it and an answer. Who crashed, what was lost, what is sent again,
how bytes travel, what is logged and what a mean is handed to are the driver's business, once for all systems:
:class:`fedcomp.local.Local` in this process, and Flower's messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

# A system's file finds all its words here.
from fedcomp.asks import EVALUATE as EVALUATE
from fedcomp.asks import HELLO as HELLO
from fedcomp.asks import NO_FRAMES as NO_FRAMES
from fedcomp.asks import SHOW as SHOW
from fedcomp.asks import Answer, AnswerError, Ask, Frames, Said, Wait
from fedcomp.asks import Post as Post
from fedcomp.codecs import Codec, State
from fedcomp.codecs.base import all_finite
from fedcomp.errors import FedcompError
from fedcomp.layout import Layout, Update, Vector, hold_in_step, note_of_held
from fedcomp.mailbox import Mailbox
from fedcomp.rng import Key
from fedcomp.rules import Configured
from fedcomp.wire import Bundle, Frame

T = TypeVar("T")

HEAVIEST = 2**63
"""No weight is as large: a sum of weights stays finite, and an integer of a message holds it."""

Collect = Callable[[int, int, int, int], bool]
"""Whether a matrix that is known as so many outer products is captured; :func:`fedcomp.codecs.factors.wanted_by`."""


class Origin(NamedTuple):
    """What a client trained from, where that is not the model of the round that its part is used in.

    Attributes
    ----------
    number : int
        Of the round in which it was asked.
    model : float32 array, shape (layout size,)
    """

    number: int
    model: Vector


class Given(NamedTuple):
    """One client's contribution to a sum: a frame, or :attr:`Answer.update` in its place, which may be overwritten."""

    node: int
    weight: float
    frame: Frame | Bundle
    update: Vector | None = None


@dataclass(frozen=True)
class Step:
    """The result of a round: a change of the model, or the model itself, or single updates.

    Attributes
    ----------
    consumed : tuple of int
        The nodes whose frames are in the step, so that their memories may forget them.
    change, model : float32 array, shape (layout size,), optional
        The new model or its change; both are None if ``single``, ``frame`` or ``tensors`` is given.
    single : mapping of int to float32 array, optional
        Every node's own change, for strategies that need single updates; with ``whole`` its model.
    frame : bytes, optional
        The encoded change, if the program knows a shorter form than the driver would make; it is sent with ``blobs``,
        which :meth:`System.reads` needs.
    support : bool
        Whether the change lists coordinates and says nothing about the others.
    metrics : mapping of str to float or list of float
        The program's own measurements of the round, reported with the clients' metrics.
    whole : bool
        Whether single updates are models.
    tensors : mapping of str to array, optional
        The model by its tensors, if float32 is not precise enough: :attr:`Now.tensors`.
    """

    consumed: tuple[int, ...]
    change: Vector | None = None
    model: Vector | None = None
    single: Mapping[int, Vector] | None = None
    frame: Frame | None = None
    blobs: Frames = field(default_factory=dict)
    codec: Codec | None = None
    support: bool = False
    metrics: Mapping[str, float | list[float]] = field(default_factory=dict)
    whole: bool = False
    tensors: Mapping[str, NDArray[Any]] | None = None


Round = Generator[Sequence[Ask] | Wait, Sequence[Answer], Step | None]
"""Each yield is one exchange; the answers come in the order of nodes. None: the round came to nothing."""


class Verified(list[Given]):
    """Contributions that can be used.

    Attributes
    ----------
    added : Update, optional
        Their weighted sum by :meth:`Mean.add`, where it was taken while they were verified: what is decoded to measure
        a frame is then what is added.
    """

    added: Update | None = None


class Rule(Protocol):
    """What becomes of contributions: a mean, single updates, a private sum. The driver's choice, not the program's.

    Attributes
    ----------
    adds : bool
        Whether it is the weighted sum of all contributions that it needs, and none by itself.
    """

    @property
    def adds(self) -> bool: ...

    def total(self, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return the step that contributions come to, taken in the order of nodes; None where nothing can be taken.

        Their frames are verified (:meth:`Now.verified`). ``raw`` leaves the sum in the coordinates in which the codec
        adds (:meth:`fedcomp.codecs.Codec.gather`), for a program that sends it down in them.
        """
        ...


class Mean:
    """The weighted mean, in one buffer for any number of clients."""

    adds = True

    def total(self, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return the mean; None where all weights are 0."""
        weight = sum(g.weight for g in given)
        if weight <= 0:
            return None
        added = given.added if isinstance(given, Verified) else None
        out = self.nothing(now) if added is None else added
        for g in given if added is None else ():
            self.add(now, codec, g, weight, out)
        if not raw:
            codec.conclude(out)
        consumed = tuple(g.node for g in given)
        if codec.lossless and not now.origins:
            return Step(consumed, model=out.vector)
        return Step(consumed, change=out.vector, support=codec.sparse(now.layout))

    @staticmethod
    def nothing(now: Now) -> Update:
        """Return the sum of no contributions."""
        # -0.0 is the exact identity of addition.
        return Update(np.full(now.layout.size, -0.0, np.float32), now.layout)

    @staticmethod
    def add(now: Now, codec: Codec, g: Given, weight: float, out: Update) -> None:
        """Add one of several contributions that weigh ``weight`` together to ``out``, in place."""
        factor = g.weight / weight * now.scales.get(g.node, 1.0)
        if codec.lossless and now.origins:
            # Models that grew from several ones have no mean; what they changed has.
            np.add(out.vector, np.float32(factor) * now.changed(codec, g), out=out.vector)
        elif g.update is None:
            codec.gather(g.frame, factor, out)
        else:
            codec.enter(Update(g.update, now.layout))
            np.multiply(g.update, np.float32(factor), out=g.update)
            # In place: a sum in a new array would cost a model for each client.
            np.add(out.vector, g.update, out=out.vector)


class Single:
    """Single updates, for strategies such as a median; memory grows with the number of clients."""

    adds = False

    def total(self, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return all updates as changes of the model, or as models where clients send these, grown from one alone."""
        support = codec.sparse(now.layout)
        if not (now.origins or now.scales):
            single = {g.node: codec.decode(g.frame, now.layout) if g.update is None else g.update for g in given}
            return Step(tuple(single), single=single, support=support, whole=codec.lossless) if single else None
        single = {g.node: np.float32(now.scales.get(g.node, 1.0)) * now.changed(codec, g) for g in given}
        return Step(tuple(single), single=single, support=support) if single else None


class Released:
    """A sum of bounded updates that is released with noise; what clients send may not tell more by its length."""

    adds = False


@dataclass(frozen=True)
class Now:
    """One round, as seen by the server half.

    Attributes
    ----------
    number : int
        Number of the round, from 1.
    nodes : tuple of int
        The participants, ascending.
    layout : Layout
    start : callable
        ``start()`` returns :attr:`model`.
    tensors : callable
        ``tensors()`` returns the model by its tensors, in their own dtypes; not to be written to.
    seed : int
        Of the random streams of both halves.
    rule : Rule
    state : dict
        The system's state between rounds, as plain data. A failed round restores the previous state, so replace values
        and never change them in place.
    refuse : callable
        ``refuse(node, reason)``: do not use or acknowledge that node's answer.
    note : callable
        ``note(text)``: one line of the round's report.
    scales : mapping of int to float
        Additional factors of single nodes' contributions, such as for staleness.
    origins : mapping of int to Origin
        For nodes asked in an earlier round: its number, and the model they trained from.
    strangers : set of int
        The nodes that have never answered, and may answer under another number, their partition.
    seen : callable
        ``seen(node, codec, contribution)``: called for each verified contribution.
    told : dict
        What the program reports about its round to its driver; unlike :attr:`state`, later rounds do not see it.
    keys : mapping of int to bytes
        With :attr:`System.KEYS`: the public keys that nodes have announced, 32 bytes each.
    mailbox : Mailbox
        Messages waiting for clients, and the nodes whose answer is outstanding.
    unpack : callable
        ``unpack(node, data)`` returns the answer of a node from the bytes of :attr:`Me.pack` that arrived by another
        route; raises a FedcompError for invalid bytes.
    data : object, optional
        Data of the server's app, such as a generator and its optimiser. The system defines its type.
    credit : callable
        ``credit(node, mark)``: the node's content with this mark (:attr:`Me.mark`) arrived by another route, in a sum;
        if the step names the node as consumed, this content is consumed.
    """

    number: int
    nodes: tuple[int, ...]
    layout: Layout
    start: Callable[[], Vector]
    seed: int = 0
    rule: Rule = field(default_factory=Mean)
    state: dict[str, Any] = field(default_factory=dict)
    refuse: Callable[[int, str], None] = lambda node, reason: None
    note: Callable[[str], None] = lambda text: None
    scales: Mapping[int, float] = field(default_factory=dict)
    origins: Mapping[int, Origin] = field(default_factory=dict)
    strangers: Set[int] = frozenset()
    seen: Callable[[int, Codec, Bundle | Vector], None] = lambda node, codec, contribution: None
    told: dict[str, Any] = field(default_factory=dict)
    tensors: Callable[[], Mapping[str, NDArray[Any]]] = dict
    keys: Mapping[int, bytes] = field(default_factory=dict)
    mailbox: Mailbox = field(default_factory=Mailbox)
    unpack: Callable[[int, bytes], Answer] = lambda node, data: Answer(node)
    credit: Callable[[int, bytes], None] = lambda node, mark: None
    data: Any = None

    @property
    def open(self) -> Mapping[int, int]:
        """Nodes with an ask that is repeated until they answer, and how often it has gone out."""
        return {node: stamped.times for node, stamped in self.mailbox.asked.items()}

    def skip(self, why: str, *, too_few: bool = False) -> None:
        """Note that the round is skipped.

        Parameters
        ----------
        too_few : bool
            Even if all nodes of the round had answered they would not have sufficed. A driver whose run has learnt
            nothing yet ends it with an error, in place of skipping every round.
        """
        if too_few:
            self.told["too_few"] = why
        self.note(f"the round is skipped, the model is unchanged: {why}")

    def changed(self, codec: Codec, given: Given) -> Vector:
        """Return a contribution as a change: a lossless codec's frames hold models."""
        vector = codec.decode(given.frame, self.layout) if given.update is None else given.update
        if not codec.lossless:
            return vector
        origin = self.origins.get(given.node)
        return vector - (self.model if origin is None else origin.model)

    @cached_property
    def model(self) -> Vector:
        """What clients train from, float32 of the layout's size; not to be written to. Most sums do without."""
        return self.start()

    def key(self, purpose: str, node: int = 0) -> Key:
        """Return this round's key for a purpose; "uplink" gives the key of ``node``'s client half."""
        return Key(self.seed, purpose, self.number, node)

    def verified(self, codec: Codec, given: Sequence[Given], *, add: bool = False) -> Verified:
        """Return the parsed contributions whose frames are valid for ``codec``; refuse the others one by one.

        With ``add`` they are added on the way, and stay the bytes that they were; in vain where one of them is refused.
        """
        good = Verified()
        weight = sum(g.weight for g in given)
        # An update that is no frame is scaled where it lies, and could not be added a second time.
        whole = add and not codec.lossless and weight > 0 and all(g.update is None for g in given)
        out = Mean.nothing(self) if whole else None
        # Parsed once, as far as the bytes of a quarter of the model go: beyond it memory would grow with the number of
        # clients, and the others are parsed again when they are added.
        room = self.layout.size
        for g in given:
            try:
                # Every comparison with NaN is false.
                if not 0 <= g.weight < HEAVIEST:
                    raise AnswerError(f"weight {g.weight!r} is not valid")
                if g.update is not None:
                    self.seen(g.node, codec, g.update)
                    good.append(g)
                    continue
                asked_in = self.origins[g.node].number if g.node in self.origins else self.number
                key = Key(self.seed, "uplink", asked_in, g.node)
                bundle = codec.verify(g.frame, self.layout, key)
                self.seen(g.node, codec, bundle)
            except FedcompError as why:
                self.refuse(g.node, f"{type(why).__name__}: {why}")
                out = None
                continue
            if out is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    Mean.add(self, codec, g._replace(frame=bundle), weight, out)
                # Not needed parsed any more, but where a later one is refused.
                good.append(g)
                continue
            room -= bundle.held_bytes()
            good.append(g._replace(frame=bundle) if room >= 0 else g)
        good.added = out
        return good

    def read(self, answers: Sequence[Answer], name: str, read: Callable[[Frame], T]) -> dict[int, T]:
        """Return what ``read`` makes of the frame ``name``, by node, of answers that hold it; refuse where it raises a
        FedcompError."""
        found = {}
        for answer in answers:
            if name not in answer.frames:
                continue
            try:
                found[answer.node] = read(answer.frames[name])
            except FedcompError as why:
                self.refuse(answer.node, f"{name}: {why}")
        return found

    def total(self, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return the total of the usable contributions by the round's rule; see :meth:`Rule.total`."""
        return self.rule.total(self, codec, self.verified(codec, given, add=self.rule.adds), raw=raw)

    def mean_of(
        self, codec: Codec, answers: Sequence[Answer], name: str = "values", *, raw: bool = False
    ) -> Step | None:
        """Return :meth:`total` of what answers :meth:`give`."""
        return self.total(codec, self.give(answers, name), raw=raw)

    def give(self, answers: Sequence[Answer], name: str = "values") -> list[Given]:
        """Return the frames ``name`` of answers, or their updates; refuse those with neither."""
        given = []
        for answer in answers:
            if name in answer.frames:
                given.append(Given(answer.node, answer.weight, answer.frames[name]))
            elif answer.update is not None:
                given.append(Given(answer.node, answer.weight, b"", answer.update))
            else:
                self.refuse(answer.node, f"its answer holds no {name}")
        return given

    def downward(self, total: Step, rate: float) -> Update | None:
        """Return a raw sum times the server's step size, of which what goes down is made; None where it is not finite.

        What may be a running variance stays positive.
        """
        assert total.change is not None
        out = Update(total.change, self.layout)
        if rate != 1.0:
            with np.errstate(over="ignore", invalid="ignore"):
                out.vector[...] *= np.float32(rate)
        if held := hold_in_step(out.vector, self.layout, self.model):
            self.note(note_of_held(held))
        if all_finite(out.vector):
            return out
        self.note("the mean is not finite: the model is unchanged")
        return None


class KeyPair(Protocol):
    """What a node opens sealed posts with.

    Attributes
    ----------
    public : bytes
        The half that others may know, 32 bytes.
    """

    public: bytes

    @classmethod
    def generate(cls) -> KeyPair:
        """Return a new one, of the operating system's randomness."""
        ...

    def open(self, sealed: bytes, context: bytes) -> bytes:
        """Return what was sealed for this key pair in ``context``; raise a FedcompError where it was not."""
        ...


@dataclass(frozen=True)
class Me:
    """One client, as seen by its half.

    Attributes
    ----------
    node, number, seed
        Its partition; the round's number; the seed of the random streams.
    layout : Layout
    model : callable
        ``model()`` returns :attr:`start`.
    learn : callable
        ``learn(whole, collect)`` lets the app train; :meth:`update`.
    padded : bool
        Whether the length of the answer must not depend on the update.
    data : object, optional
        Data or functions of the app besides training, or in its place, such as a way to measure slopes. The system
        defines their type.
    kept : mapping of str to bytes
        The data stored by :attr:`Answer.keep`.
    run : bytes
        Name of the run: content sealed for one run opens in no other.
    identity : KeyPair, optional
        With :attr:`System.KEYS`: the node's own key pair, whose public half others know.
    pack : callable
        ``pack(answer)`` returns the whole answer as bytes for another route.
    mark : callable
        ``mark()`` returns the 16 bytes that identify this answer for :attr:`Now.credit`.
    weight : callable
        ``weight(metric)`` returns the app's metric of that name: the weight of its update, for systems that do not send
        it to the server. Only after training; a ConfigError if the metric is missing, ambiguous or not a number.
    uplink : callable
        ``uplink()`` returns the uplink rate in bytes per second that the node's operator configured; 0 if unknown.
    spent : callable
        ``spent()`` returns the app's training time in seconds; 0 if time is not measured.
    """

    node: int
    number: int
    seed: int
    layout: Layout
    model: Callable[[], Vector]
    learn: Callable[[bool, Collect | None], Update]
    data: Any = None
    padded: bool = False
    kept: Frames = field(default_factory=dict)
    run: bytes = b""
    identity: KeyPair | None = None
    pack: Callable[[Answer], bytes] = lambda answer: b""
    mark: Callable[[], bytes] = lambda: bytes(16)
    weight: Callable[[str], float] = lambda metric: 1.0
    uplink: Callable[[], float] = lambda: 0.0
    spent: Callable[[], float] = lambda: 0.0

    @cached_property
    def start(self) -> Vector:
        """The model that the round begins with, float32 of the layout's size; not to be written to."""
        return self.model()

    @property
    def key(self) -> Key:
        """The key of this client's codec; the server half knows it, too."""
        return Key(self.seed, "uplink", self.number, self.node)

    def update(self, *, whole: bool = False, collect: Collect | None = None) -> Update:
        """Let the app train; return the update, or with ``whole`` the trained model, to be encoded once.

        ``collect`` says which matrices are captured as outer products while it trains.
        """
        return self.learn(whole, collect)


class System(Configured, ABC):
    """One algorithm with both halves: a frozen dataclass whose fields are its options, each with a rule.

    A driver sends the options to clients, which build their halves from them. ``id`` is the system's name in messages.
    """

    ID: ClassVar[str] = ""

    APP: ClassVar[str] = "app = fc.client(app)"
    """The line that an app needs to take part; messages about an app without the client half name it."""

    SAYS: ClassVar[tuple[type[Said], ...]] = ()
    """What its asks and answers may say."""

    RULES: ClassVar[tuple[type, ...]] = (Mean,)
    """What may become of its contributions."""

    SENT: ClassVar[str] = "values"
    """The frame by which mass leaves a client's memory: what :meth:`rollback` puts back."""

    KEEPS: ClassVar[bool] = False
    """Whether a round leaves something in :attr:`Now.state`: the next one has to see it."""

    KEYS: ClassVar[type[KeyPair] | None] = None
    """What makes the key pairs of nodes, :attr:`Me.identity` and :attr:`Now.keys`; None: they have none."""

    LOST: ClassVar[str] = "rollback"
    """What becomes of an ask without an answer. "rollback": nothing; what left a memory in vain is put back into it.
    "again": the same ask goes out, in place of any other one, until it is answered (:attr:`Now.open`)."""

    TRACED: ClassVar[bool] = False
    """Whether the server must know of each post that clients bring each other by themselves: what does not arrive goes
    back to its sender. Else it knows of none."""

    DISCREET: ClassVar[bool] = False
    """Whether it is for private rounds alone, in which its half bounds by itself what leaves of what the app brings. Of
    what goes wrong settings may then be named. Of other systems the update alone leaves, and nothing is brought."""

    SEVERAL: ClassVar[bool] = False
    """Whether a round may take several exchanges."""

    SHARED: ClassVar[tuple[str, ...]] = ()
    """Frames of answers that are blobs from then on: whoever made one holds it."""

    def __init_subclass__(cls, *, id: str = "") -> None:
        super().__init_subclass__()
        cls.ID = id or cls.ID

    def to_config(self) -> dict[str, Any]:
        """Return ``{"id": ID, **options}``: JSON-able, what :func:`fedcomp.systems.get_system` takes."""
        return {"id": self.ID, **self.get_config()}

    @property
    def makes_steps(self) -> bool:
        """Whether steps have frames of their own, which :meth:`reads` reads; it may hang on the options."""
        return type(self).reads is not System.reads

    @property
    def several(self) -> bool:
        """:attr:`SEVERAL`, where it does not hang on the options."""
        return self.SEVERAL

    @property
    def codecs(self) -> list[Codec]:
        """The codecs among the options."""
        kind: Any = type(self)
        return [value for f in fields(kind) if isinstance(value := getattr(self, f.name), Codec)]

    @property
    def on_device(self) -> bool:
        """Whether the client half takes updates and memories that are on a device; it may hang on the options."""
        return False

    @property
    def whole(self) -> bool:
        """Whether clients send the trained models instead of differences: floats of other sizes than float32 are then
        sent as values, beside the vector."""
        return False

    def start(self, layout: Layout) -> State:
        """Return the initial memory of a client; refuse a layout that is not supported."""
        return {}

    @abstractmethod
    def round(self, now: Now) -> Round:
        """Yield asks, receive answers, return the round's step."""

    @abstractmethod
    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        """Return the memory after an ask, and the answer.

        ``memory`` is never changed in place. A FedcompError refuses the ask; the memory is then as it was.
        """

    def rollback(self, memory: State, frame: Frame, layout: Layout) -> State:
        """Return ``memory`` with the mass of a frame that was not consumed."""
        return memory

    def residual(self, memory: State, layout: Layout) -> Vector | None:
        """Return the unsent part of the updates, float32 of the layout's size: made = delivered + residual. None:
        nothing is conserved."""
        return None

    def reads(self, blobs: Frames, number: int, layout: Layout) -> Codec:
        """Return the codec that reads the frame of round ``number``'s step; the same at both ends."""
        raise NotImplementedError

    def after(self, frame: Frame, blobs: Frames, number: int, seed: int, layout: Layout) -> Frames:
        """Return blobs that follow from round ``number``'s step: nodes that applied it do not need to receive them."""
        return {}

    def evaluation(self, now: Now) -> Round | None:
        """Return what is asked and answered for clients to evaluate :attr:`Now.model`, where that takes more than the
        model: its last asks are of kind :data:`EVALUATE`, and what it returns is not used. None: it takes no more."""
        return None


class Encoded(System):
    """A system with one codec, whose memory a client keeps.

    Attributes
    ----------
    codec : Codec
    """

    BESIDE: ClassVar[tuple[str, ...]] = ()
    """How the names of what a client remembers beside it begin; it stays where a frame is put back."""

    codec: Codec

    def own(self, memory: State) -> State:
        """Return the codec's part of a memory."""
        return {name: array for name, array in memory.items() if not name.startswith(self.BESIDE)}

    def start(self, layout: Layout) -> State:
        return self.codec.init(layout)

    def rollback(self, memory: State, frame: Frame, layout: Layout) -> State:
        beside = {name: array for name, array in memory.items() if name.startswith(self.BESIDE)}
        return {**self.codec.rollback(self.own(memory), frame, layout), **beside}

    def residual(self, memory: State, layout: Layout) -> Vector | None:
        return self.codec.residual(self.own(memory))
