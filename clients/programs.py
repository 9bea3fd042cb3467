"""Message handling in the client half of all systems written as programs (:mod:`fedcomp.systems`).

What is asked names the system and its options; the half makes it, lets its ``client`` answer and keeps its memory
(:mod:`fedcomp.clients.memory`). A message without an ask passes through untouched.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.adapters import Halves, returned
from fedcomp.asks import mark_of
from fedcomp.clients.half import CallNext, ClientHalf
from fedcomp.clients.links import Links, introduced
from fedcomp.clients.memory import (
    Memory,
    answered,
    asked_of,
    held_blob,
    held_model,
    hold_model,
    keep_blobs,
    keep_in,
    kept_in,
)
from fedcomp.clients.messages import (
    NOT_WITHOUT_NOISE,
    AppError,
    changed,
    made,
    partition_of,
    reply_arrays,
    uplink_of,
)
from fedcomp.clients.optimizer import answering
from fedcomp.clients.peers import IDENTITY, identity_in, identity_record
from fedcomp.clients.personal import Followed, ease, kept_note, names_note
from fedcomp.clients.private.mod import ABOUT_SETTINGS, discreet, only_update, wants_padding, wants_private
from fedcomp.codecs import Codec, get_codec
from fedcomp.codecs.base import norm, require_finite
from fedcomp.device import device_of, on_host
from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.exact import encode_exact
from fedcomp.factors.collect import collecting
from fedcomp.flower import asks
from fedcomp.flower.asks import AnswerHead, AskHead, OwnStep, digest_of, digests_of
from fedcomp.flower.coded import pack_content
from fedcomp.flower.links import Book
from fedcomp.flower.logs import log
from fedcomp.flower.payload import BLOB, EXACT, FRAME, MAIL, NODE_RECORD, POST, STEP, models
from fedcomp.flower.protocol import RESYNC, STALE, refusal
from fedcomp.flower.records import Place, TensorArray, completed, to_arrays, to_record, unpacked, widened, without
from fedcomp.flower.schema import OtherVersion, SchemaError
from fedcomp.flower.state import UNSETTLED, StaleMessage
from fedcomp.layout import Layout, Update, Vector, policy_from_config
from fedcomp.privacy.local import asks_for_noise
from fedcomp.program import EVALUATE, HELLO, NO_FRAMES, Answer, Ask, Collect, Frames, Me, System
from fedcomp.rng import Key
from fedcomp.systems import get_system
from fedcomp.systems.private.distributed import shared_only
from fedcomp.systems.private.local import Local
from fedcomp.versions import FIRST, Step, advance, digest
from fedcomp.wire import Frame

if TYPE_CHECKING:
    from fedcomp.coding.sealing import PeerIdentity

FirstModel = Callable[[Message, Context], ArrayRecord]


@dataclass
class Brought:
    """What an app brings to one ask of a system, beside training or in its place.

    Attributes
    ----------
    data : object
        :attr:`fedcomp.program.Me.data`.
    reply : RecordDict
        What stands for the app's reply where it does not train, its metrics above all: looked at once the system has
        answered.
    trained : ArrayRecord, optional
        The model that the app has trained, once it has.
    instead : callable, optional
        What trains in place of the app and its own mods: ``instead(message, context)`` returns a reply with the model.
    """

    data: Any
    reply: RecordDict = field(default_factory=RecordDict)
    trained: ArrayRecord | None = None
    instead: Callable[[Message, Context], Message] | None = None


Brings = Callable[[Message, Context], Brought]
"""What makes it, of the message as the app would see it, the model first, and of the context."""

ANY_APP: Final[Mapping[str, str]] = {"gradient-code": "fedcomp.clients.coded.gradients:partitions"}
"""By system, what makes that which any app brings, of message, context and what calls the app."""

_BROUGHT: ContextVar[Mapping[str, Brings]] = ContextVar("fedcomp-brought", default=MappingProxyType({}))

_LONGEST_REMARK: Final = 4096
_LOOK: Final = 256


def bringing(name: str, system: str, data: Brings) -> ClientHalf:
    """Return a half by which an app brings something to asks of one system, beside
    :func:`~fedcomp.clients.compressed.compression`.

    Nothing is brought to private rounds, in which an update leaves and nothing else, but for systems that are made for
    them (:attr:`fedcomp.program.System.DISCREET`).

    Parameters
    ----------
    name : str
        The half's.
    system : str
        The system's id.
    data : callable
        Takes the message as the app would see it, without a model in a query, and the context.
    """

    def bringing_mod(msg: Message, context: Context, call_next: CallNext) -> Message:
        return bring(system, data, lambda: call_next(msg, context))

    return ClientHalf(name, bringing_mod, outside=("compression",), needs=("compression",))


def bring(system: str, data: Brings, answer: Callable[[], Message]) -> Message:
    """Return an answer to which ``data`` is brought; of a module, since what an app holds travels, and this variable
    cannot."""
    token = _BROUGHT.set({**_BROUGHT.get(), system: data})
    try:
        return answer()
    finally:
        _BROUGHT.reset(token)


def handle(
    msg: Message,
    context: Context,
    call_next: CallNext,
    agreed: Collection[str] | None,
    visible: bool,
    first_model: FirstModel | None,
    base: Callable[[], str] | None = None,
) -> Message:
    """Answer a message; the last four are as of :func:`fedcomp.clients.compressed.compression`."""
    try:
        head = asks.find_ask(msg.content)
    except OtherVersion as error:
        return refusal(msg, f"{type(error).__name__}: {error}")
    if head is None:
        return call_next(msg, context)
    system, why = made(head.system, get_system, agreed)
    downlink, why_not = made(head.downlink, get_codec, agreed)
    exposed = "" if system is None or visible else next((c.exposes for c in system.codecs if c.exposes), "")
    if exposed:
        system, why = None, f"this client has not agreed to show the server {exposed}, as {system!r} does"
    # By way of other clients it is still its system's.
    noised = isinstance(getattr(system, "inner", system), Local)
    if asks_for_noise(head.system) and not noised:
        # What was sent from this node is counted for messages of local privacy, which such a one would pass by.
        return refusal(msg, f"{NOT_WITHOUT_NOISE} ({why or f'the system is {Local.ID!r}'})")
    if shared_only(head.system):
        return refusal(msg, "updates that get their noise in a sum are not sent outside one")
    # Noise on the update does not help where something else leaves beside it.
    private = wants_private(msg.content) or noised
    halves = Halves.from_config(head.drawn) if head.drawn else None
    if halves is not None and halves.base and base is not None and (own := base()) != halves.base:
        return refusal(
            msg, f"the run adapts the base model {halves.base}, and this node has {own}: the same weights are needed"
        )
    exchange = _Exchange(msg, context, call_next, head, system, downlink, (why, why_not), private, first_model, halves)
    if not private:
        return exchange.answer()
    return discreet(msg, exchange.answer, ABOUT_SETTINGS if system is not None and system.DISCREET else ())


GUARDS: Final = ("votes_only", "local_privacy")
"""Halves that stand outside: what they do not allow must not pass them by."""

OUTSIDE: Final = ("private",)


@dataclass
class _Exchange:
    """One ask and what this node answers.

    Attributes
    ----------
    system, downlink : System, Codec, optional
        What is asked for, as far as this client can and may use it.
    refused : (str, str)
        Why it cannot or may not use the one or the other.
    private : bool
        The update leaves, and nothing else of the data.
    halves : Halves, optional
        Halves of adapters that the app's model has and that do not travel.
    blobs : dict of str to bytes
        By digest, those that the ask names, that followed from the message or that this node made.
    """

    msg: Message
    context: Context
    call_next: CallNext
    head: AskHead
    system: System | None
    downlink: Codec | None
    refused: tuple[str, str]
    private: bool
    first_model: FirstModel | None
    halves: Halves | None = None
    blobs: dict[str, Frame] = field(default_factory=dict)

    def answer(self) -> Message:
        """Return the reply; the node's state changes as the last act."""
        msg, context, head, system = self.msg, self.context, self.head, self.system
        kind = msg.metadata.message_type.partition(".")[0]
        if msg.metadata.message_type == HELLO and not head.system:
            return self._introduced()
        if kind == "evaluate" or (kind == "train" and self.refused[0]):
            return self._app_alone()
        if system is None:
            return refusal(msg, self.refused[0] or "the message does not name the system that it is for")
        if not head.sequence:
            raise SchemaError("a request without a sequence number", "sequence")
        try:
            content = answered(context, head)
        except StaleMessage as error:
            return refusal(msg, f"{STALE}: {error}")
        if content is not None:
            return Message(content, reply_to=msg)
        if msg.metadata.message_type == HELLO:
            return self._greeted(system)
        if kind != "train" and head.needs_model:
            try:
                memory = Memory.resume(context, head, system)
            except StateError as error:
                return refusal(msg, str(error))
            return self._answered(system, memory, None)
        if not head.needs_model:
            memory = Memory.without_model(context, head, system, self._asked(system, {}), train=kind == "train")
            if memory.what == "repeated":
                return Message(memory.repeat(context, head, 0, self._store(None)), reply_to=msg)
            return self._answered(system, memory, None, train=kind == "train")
        try:
            record, version, laid = self._receive()
        except FedcompError as error:
            # The server sends the whole model next time; training from a model it does not know would spoil the mean.
            return refusal(msg, f"{RESYNC}: {error}")
        before = to_arrays(record, copy=False)
        # The model that steps lead to is laid out already, unless changes of it are laid out in another way.
        layout = laid or Layout.of(before, policy_from_config(head.policy), cast_floats=head.cast)
        memory = Memory.begin(context, head, system, layout, self._asked(system, before))
        if memory.what == "repeated":
            log.info("round %d: answered before the server restarted; the same answer is sent again", head.number)
            return Message(memory.repeat(context, head, version, self._store(record, version)), reply_to=msg)
        return self._answered(system, memory, _Training(self, record, version, before, system, memory))

    def _asked(self, system: System, model: Mapping[str, NDArray[Any]]) -> bytes:
        """Return a name of what is asked for; with all that is said where asks are repeated until they are answered."""
        if system.LOST != "again":
            return asked_of(self.head, model)
        content = self.msg.content
        data = [sorted((n, digest_of(d)) for n, d in asks.data_in(content, kind).items()) for kind in (FRAME, MAIL)]
        return asked_of(self.head, model, repr((asks.say_of(content, self.head, system), data)).encode())

    def _answered(self, system: System, memory: Memory, training: _Training | None, *, train: bool = False) -> Message:
        """Let the client half of the system answer, with an app to train in a training message with a model."""
        head, number, train = self.head, partition_of(self.context), train or training is not None
        sent, lacks = self._blobs()
        if lacks:
            out = RecordDict()
            asks.put(out, AnswerHead(number, head.sequence, lacks=lacks))
            return Message(out, reply_to=self.msg)
        content = self.msg.content
        book, mail = sent.pop(Book.NAME, None), asks.posts_in(content, MAIL, number)
        links = None
        if book is not None:
            place = self.context, number, Book.of(book), head.session
            links = Links(*place, head.number, head.sequence, system.TRACED, head.oldest)
            mail = links.opened(mail)
        ask = Ask(
            number,
            "train" if train else "query",
            asks.say_of(content, head, system),
            asks.data_in(content, FRAME),
            sent,
            mail=mail,
            model=head.needs_model,
        )
        model, learn = (_no_model, _no_model) if training is None else (training.start, training.learn)
        if training is not None:
            app = training.brought()
        else:
            app = None if head.needs_model else self.brought(asks.without(content))

        def pack(answer: Answer) -> bytes:
            if answer.say is not None or training is None:
                raise StateError("requests and answers without training belong to an exchange")
            out, fields, framed = self._content(training, answer)
            fields["generation"] = memory.generation
            asks.put(out, AnswerHead(number, head.sequence, **fields), None, framed)
            return pack_content(out)

        me = Me(
            number,
            head.number,
            head.seed,
            memory.layout,
            model,
            learn,
            None if app is None else app.data,
            wants_padding(content),
            kept_in(self.context.state),
            head.session,
            self.identity if system.KEYS else None,
            pack,
            lambda: mark_of(head.sequence, memory.generation),
            lambda metric: 0.0 if training is None else training.weight(metric),
            partial(uplink_of, self.context),
            lambda: 0.0 if training is None else training.spent,
        )
        try:
            state, answer = system.client(dict(memory.state), ask, me)
        except AppError as error:
            return error.reply
        out, said, framed = self._content(None if answer.bare else training, answer)
        said["sent"] = answer.sent is not None
        if training is not None and training.version:
            said["version"] = training.version
        if state or memory.state:
            said |= {"generation": memory.generation, "state": memory.what}
            ratio = None if self.private else memory.ratio(system, state, answer)
            if ratio is not None and not answer.bare:
                said["memory"] = ratio
        posts = answer.post if links is None else links.sent(answer.post)
        framed |= asks.named_posts(posts, POST)
        if links is not None:
            said |= {"handed": links.handed, "parcels": links.parcels}
            said["missed"] = tuple(f"{to} {why}" for to, why in links.failed.items())
        if (system.KEYS or book is not None) and IDENTITY not in self.context.state:
            # It has lost the one that others know.
            said |= self._introduction(book)
        asks.put(
            out,
            AnswerHead(number, head.sequence, say=asks.id_of(answer.say), bare=answer.bare, **said),
            answer.say,
            framed,
        )
        for name in system.SHARED:
            if name in answer.frames:
                self.blobs[digest_of(answer.frames[name])] = answer.frames[name]
        store = self._store(None) if training is None else self._store(training.record, training.version)
        if training is not None and training.followed is not None:
            training.followed.save(store)
        if links is not None:
            links.write(store)
        memory.commit(self.context, head, system, state, answer, out, store, train=train)
        if links is not None:
            links.forget()
        return Message(out, reply_to=self.msg)

    def _content(
        self, training: _Training | None, answer: Answer
    ) -> tuple[RecordDict, dict[str, Any], dict[str, Frame]]:
        """Return what goes beside an answer: the app's reply without the model, fields of the head, frames."""
        framed = {FRAME + name: frame for name, frame in answer.frames.items()}
        if training is None:
            return RecordDict(), {}, framed
        if training.app is not None and answer.frames and "record" not in training.said:
            training.stand_in(training.app)
        if training.exact is not None:
            framed[EXACT] = training.exact
        return RecordDict(dict(training.beside.items())), dict(training.said), framed

    def _introduced(self) -> Message:
        """Say this node's public key, and where others reach it."""
        out, number = RecordDict(), partition_of(self.context)
        asks.put(out, AnswerHead(number, self.head.sequence, **self._introduction(self._blobs()[0].get(Book.NAME))))
        self.context.state = self._store(None)
        return Message(out, reply_to=self.msg)

    def _introduction(self, book: Frame | None) -> dict[str, Any]:
        """Return this node's public key, and where there is a book its signature of it and where others reach it."""
        public = self.identity.public
        reached = {} if book is None else introduced(self.context, Book.of(book), partition_of(self.context), public)
        return {"key": public, **reached}

    @cached_property
    def identity(self) -> PeerIdentity:
        """The node's key pair; made, where there is none yet, and kept with whatever is written next."""
        return identity_in(self.context)

    def _greeted(self, system: System) -> Message:
        """Let the client half of the system answer in words; nothing changes."""
        head, number = self.head, partition_of(self.context)
        memory = Memory.look(self.context, head, system)
        state, layout = ({}, Layout(())) if memory is None else (memory.state, memory.layout)
        app = self.brought(asks.without(self.msg.content))
        data = None if app is None else app.data
        ask = Ask(number, HELLO, asks.say_of(self.msg.content, head, system))
        _, answer = system.client(
            dict(state), ask, Me(number, head.number, head.seed, layout, _no_model, _no_model, data)
        )
        out = RecordDict()
        asks.put(out, AnswerHead(number, head.sequence, say=asks.id_of(answer.say)), answer.say)
        return Message(out, reply_to=self.msg)

    def plain(self, model: ArrayRecord) -> RecordDict:
        """Return the message's content as the app would have seen it without this project."""
        name, model = self.head.model, widened(model)
        others = {k: v for k, v in asks.without(self.msg.content).items() if k != name}
        found = {k: widened(v) if isinstance(v, ArrayRecord) else v for k, v in others.items()}
        whole = model if self.halves is None else completed(model, self.halves, self.head.seed)
        return RecordDict({name: whole, **found})

    def travelling(self, content: RecordDict, before: Mapping[str, NDArray[Any]]) -> RecordDict:
        """Return an app's reply with what travels of the model; what it did not change is not looked at twice.

        Raises
        ------
        ConfigError
            When a half of an adapter that is drawn came back changed.
        """
        if self.halves is None:
            return content
        drawn = self.halves.drawn({name: array.shape for name, array in before.items()}, self.head.seed)
        whole = {**before, **drawn}
        name, after = reply_arrays(content, whole, self.head.model)
        return RecordDict({**content, name: to_record(returned(whole, drawn, after, self.halves.pairs))})

    def brought(self, content: RecordDict) -> Brought | None:
        """Return what the app brings, None for nothing; ``content`` is from here on what it sees."""
        self.msg.content = content
        if self.system is None or (self.private and not self.system.DISCREET):
            return None
        if self.system.ID in ANY_APP:
            module, _, name = ANY_APP[self.system.ID].partition(":")
            return Brought(getattr(importlib.import_module(module), name)(self.msg, self.context, self.call_next))
        brings = _BROUGHT.get().get(self.system.ID)
        return None if brings is None else brings(self.msg, self.context)

    def _app_alone(self) -> Message:
        """Return the app's own reply, and what it is to know of this node."""
        try:
            record, version, _ = self._receive()
        except FedcompError as error:
            return refusal(self.msg, f"{RESYNC}: {error}")
        talks = self.system is not None and type(self.system).evaluation is not System.evaluation
        if self.system is not None and talks and self.head.sequence and not self.refused[0]:
            # Asked for by the system's own conversation: its half reads what came for the app.
            kept = self._prepared(self.system, record)
        else:
            kept = NO_FRAMES
            self.msg.content = self.plain(record)
        reply = self.call_next(self.msg, self.context)
        if reply.has_error():
            return reply
        content = reply.content
        if self.private:
            before = to_arrays(record, copy=False)
            content = only_update(content, before, Layout.of(before, policy_from_config(self.head.policy)))
        content = _beside(content)
        number, head = partition_of(self.context), self.head
        asks.put(
            content,
            AnswerHead(number, head.sequence, version=version, unsupported="; ".join(filter(None, self.refused))),
        )
        store = self._store(record, version)
        keep_in(store, kept)
        self.context.state = store
        reply.content = content
        return reply

    def _prepared(self, system: System, record: ArrayRecord) -> Frames:
        """Let the system's half see what came for the app's evaluation; return what the node keeps of it."""
        head, number, content = self.head, partition_of(self.context), self.msg.content
        sent, lacks = self._blobs()
        if lacks:
            raise StateError(f"this node lacks the blobs {sorted(digests_of(head.blobs))}, which evaluation needs")
        say, frames = asks.say_of(content, head, system), asks.data_in(content, FRAME)
        memory = Memory.look(self.context, head, system)
        before = to_arrays(record, copy=False)
        layout = Layout.of(before, policy_from_config(head.policy), cast_floats=head.cast)
        app = self.brought(self.plain(record))
        me = Me(
            number,
            head.number,
            head.seed,
            layout,
            lambda: layout.flatten(before),
            _no_model,
            None if app is None else app.data,
            kept=kept_in(self.context.state),
            run=head.session,
        )
        state = {} if memory is None else dict(memory.state)
        _, answer = system.client(state, Ask(number, EVALUATE, say, frames, sent), me)
        return answer.keep

    def _store(self, record: ArrayRecord | None, version: int = 0) -> RecordDict:
        """Return a copy of the node's state with the blobs and the model of this message."""
        store = RecordDict(dict(self.context.state.items()))
        keep_blobs(store, self.blobs)
        if "identity" in vars(self):
            store[IDENTITY] = identity_record(self.identity)
        if version and record is not None:
            hold_model(store, version, record)
        return store

    def _blobs(self) -> tuple[dict[str, Frame], tuple[str, ...]]:
        """Return the blobs that the ask names, and the digests of those that are nowhere."""
        wanted, brought = digests_of(self.head.blobs), asks.data_in(self.msg.content, BLOB)
        found = {name: self._blob(digest, brought.get(digest)) for name, digest in wanted.items()}
        lacks = tuple(digest for name, digest in wanted.items() if found[name] is None)
        held = {name: data for name, data in found.items() if data is not None}
        for name, data in held.items():
            # What an ask names is the newest; what a step alone is read by pushes nothing out: once is enough.
            self.blobs.pop(wanted[name], None)
            self.blobs[wanted[name]] = data
        return held, lacks

    def _blob(self, digest: str, brought: Frame | None) -> Frame | None:
        """Return a blob: what the message brought, or what is kept; None where it is not what its digest says."""
        for data in (brought, self.blobs.get(digest), held_blob(self.context.state, digest)):
            if data is not None and digest_of(data) == digest:
                return data
        return None

    def _receive(self) -> tuple[ArrayRecord, int, Layout | None]:
        """Return the model of the message, the version to keep it as, and how changes of it are laid out, where that is
        known. Version 0: it is not to be kept.

        Raises
        ------
        FedcompError
            When it cannot be had, or is not the announced model.
        """
        head, codec = self.head, self.downlink
        sent = models(self.msg.content).get(head.model)
        sent = None if sent is None else unpacked(sent)
        # Base 0 is no version: the message holds the whole model.
        if sent is None and (codec is None or not head.base):
            raise StateError(f"the message holds no ArrayRecord {head.model!r} and no steps this node can use")
        if codec is None:
            assert sent is not None
            return sent, 0, None
        if not head.base:
            assert sent is not None
            return self._advanced(codec, head.version, sent)
        held = held_model(self.context.state)
        if head.base != FIRST or self.first_model is None:
            if held is None:
                unmade = "; it makes the first one with fc.compression(first_model=...)" if head.base == FIRST else ""
                raise StateError(f"this node holds no model, but the message starts from version {head.base}{unmade}")
            return self._advanced(codec, *held)
        if held is not None and held[0] == FIRST:
            try:
                return self._advanced(codec, *held)
            except FedcompError as error:
                log.info(
                    "round %d: the first model of another run is held here (%s); it is made again", head.number, error
                )
        made = self.first_model(self.msg, self.context)
        return self._advanced(codec, FIRST, made if self.halves is None else without(made, self.halves))

    def _advanced(self, codec: Codec, own: int, record: ArrayRecord) -> tuple[ArrayRecord, int, Layout | None]:
        """Return what :meth:`_receive` does, of the version ``own`` and the steps in the message.

        Raises
        ------
        FedcompError
            When these do not lead to the announced model.
        """
        head = self.head
        arrays = to_arrays(record, copy=False)
        # Laid out as the server lays out its reference: the digest is over this very vector.
        layout = Layout.of(arrays, policy_from_config(head.policy), cast_floats=not codec.lossless)
        exact = {t.name: arrays[t.name] for t in layout.exact}
        steps = self._steps() if head.base else []
        vector, exact, version = advance(layout.flatten(arrays), exact, own, steps, self._reader(codec, layout), layout)
        # Without this check a model that differs in one bit would drift from the server's for the rest of the run.
        if version != head.version or digest(vector, exact) != head.digest:
            raise StateError(
                f"the replica (version {version}) is not the server's model of version {head.version}: digests differ"
            )
        laid = layout if head.cast == (not codec.lossless) else None
        return record if version == own else to_record(layout.unflatten(vector, exact)), version, laid

    def _steps(self) -> list[Step]:
        """Return the steps of the model in the message."""
        data = asks.data_in(self.msg.content, STEP)
        numbers = range(self.head.base + 1, self.head.version + 1)
        if missing := [number for number in numbers if str(number) not in data]:
            raise StateError(f"the message lacks step {missing[0]} of the model")
        return [Step(number, data[str(number)], data.get(f"{number}.exact")) for number in numbers]

    def _reader(self, codec: Codec, layout: Layout) -> Callable[[Step], Codec]:
        """Return what reads a step of the model: the downlink's codec, or the system where it made the step."""
        own = {step.version: step for step in map(OwnStep.of, self.head.steps)}
        brought = asks.data_in(self.msg.content, BLOB) if own else {}

        def reads(step: Step) -> Codec:
            made = own.get(step.version)
            if made is None:
                return codec
            if self.system is None:
                raise StateError(
                    f"step {step.version} belongs to a system that this client does not use: {self.refused[0]}"
                )
            blobs = {}
            for name, wanted in made.blobs.items():
                data = self._blob(wanted, brought.get(wanted))
                if data is None:
                    raise StateError(f"this node lacks the {name} needed to read step {step.version}")
                blobs[name] = data
            derived = self.system.after(step.frame, blobs, made.number, self.head.seed, layout)
            self.blobs |= {digest_of(data): data for data in derived.values()}
            return self.system.reads(blobs, made.number, layout)

        return reads


@dataclass
class _Training:
    """The app's part in an answer: what it is given, and what of its reply goes beside the frames.

    Attributes
    ----------
    record, version : ArrayRecord, int
        The model that it is given.
    before : dict of str to ndarray
        The same, to be read.
    beside : RecordDict
        Its reply without the model.
    said : dict
        Fields of the answer's head.
    exact : bytes, optional
        The frame of the exact buffers.
    followed : Followed, optional
        What the node remembers to know its own tensors by.
    app : Brought, optional
        What the app brings beside training, or in its place.
    spent : float
        Seconds that it has trained.
    """

    exchange: _Exchange
    record: ArrayRecord
    version: int
    before: dict[str, NDArray[Any]]
    system: System
    memory: Memory
    beside: RecordDict = field(default_factory=RecordDict)
    said: dict[str, Any] = field(default_factory=dict)
    exact: Frame | None = None
    followed: Followed | None = None
    app: Brought | None = None
    spent: float = 0.0

    def __post_init__(self) -> None:
        if self.version:
            self.said["version"] = self.version

    def start(self) -> Vector:
        """Return the model as a vector."""
        return self.memory.layout.flatten(self.before)

    def brought(self) -> Brought | None:
        """Return what the app brings; the message is from here on what the app sees."""
        exchange = self.exchange
        self.app = exchange.brought(exchange.plain(self.record))
        return self.app

    def weight(self, metric: str) -> float:
        """Return what the app's reply says that its update weighs, by the name of the metric.

        Raises
        ------
        ConfigError
            When it says so in no MetricRecord, in several, or by no number.
        """
        found = [record[metric] for record in self.beside.metric_records.values() if metric in record]
        # Where two records have such a metric, which of them weighs the update cannot be told.
        value = found[0] if len(found) == 1 else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            # The value itself is only logged here: the server may be meant to learn of sums alone.
            log.warning("metric %r is %r: it cannot weigh an update", metric, value)
            raise ConfigError(
                f"metric {metric!r} must be a number in exactly one MetricRecord: it is the weight of the update"
            )
        return float(value)

    def stand_in(self, app: Brought) -> None:
        """Take what the app brought for its reply, where frames were made of it without training."""
        self.beside, self.said["record"] = app.reply, self.exchange.head.model
        # Who does not train changes no buffer.
        self.exact = encode_exact(self.before, self.memory.layout)

    def learn(self, whole: bool, collect: Collect | None) -> Update:
        """Let the app train; see :attr:`fedcomp.program.Me.learn`.

        Raises
        ------
        NonFiniteUpdate
            When the update holds NaN or infinity, and is not privatised.
        """
        exchange, memory, before = self.exchange, self.memory, self.before
        msg, context, head, private = exchange.msg, exchange.context, exchange.head, exchange.private
        layout = memory.layout
        key = Key(head.seed, "uplink", head.number, partition_of(context))
        train = exchange.call_next if self.app is None or self.app.instead is None else self.app.instead
        told: list[str] = []
        began = time.perf_counter()
        with collecting(collect, key.u64()) as collected, answering(head.session, head.number, told):
            reply = train(msg, context)
        self.spent = time.perf_counter() - began
        if reply.has_error():
            raise AppError(reply)
        content = exchange.travelling(reply.content, before)
        content = only_update(content, before, layout) if private else content
        stay = self.system.on_device and not whole and not private
        origin = to_arrays(self.record, copy=False, stay=stay)
        name, after = reply_arrays(content, origin, head.model, stay=stay)
        device = device_of(after.values())
        if device is None and any(isinstance(array, TensorArray) for array in content[name].values()):
            log.info(
                "round %d: the trained model was copied to the host, where %r forms updates", head.number, self.system
            )
        self.said["record"] = name
        self.beside = _beside(content, name)
        if self.app is not None:
            # As the app would load it.
            trained = content.array_records[name]
            self.app.trained = trained if exchange.halves is None else reply.content.array_records[name]
        # Where the system remembers, what is left of the update may become the memory: once in memory, and not copied.
        remembers = memory.state and not whole and device is None
        place = Place((layout.size,), np.float32) if remembers else None
        memory.places += [] if place is None else [place]
        out = None if place is None else place.values
        update, exact = changed(after, origin, layout, lossless=whole, out=out)
        notes = [UNSETTLED] if memory.unsettled else []
        if exchange.refused[1]:
            self.said["unsupported"] = exchange.refused[1]
        # Where the model itself is sent nothing adds up; of a private round nothing is said of single tensors.
        owed = None if whole or private else self.system.residual(memory.state, layout)
        if owed is not None:
            # One look says both: of finite values the norm is finite.
            memory.length = norm(update.vector)
        # Of an update without bounds noise alone is sent: an error in its place would be an answer about the data.
        if not isinstance(self.system, Local) and (owed is None or not math.isfinite(memory.length)):
            require_finite(update)
        if not whole and not private:
            update = self._eased(update, after, owed, notes)
        if collected.outer:
            changes = {t.name: update.vector[t.slice] for t in layout.tensors}
            update = replace(update, outer=collected.explaining(changes, before))
        notes += collected.notes
        for note in notes:
            log.info("round %d: %s", head.number, note)
        if (notes := [*told, *notes]) and not private:
            self.said["remark"] = "; ".join(notes)[:_LONGEST_REMARK]
        # Buffers would be a release that no ledger accounts for.
        self.exact = None if private else encode_exact(exact, layout)
        return replace(update, given=True)

    def _eased(
        self, update: Update, after: Mapping[str, NDArray[Any]], owed: Vector | None, notes: list[str]
    ) -> Update:
        """Return the update without what this node keeps to itself; note what is new, and what did not change."""
        memory, before, layout = self.memory, self.before, self.memory.layout
        followed = self.followed = Followed.load(self.exchange.context.state, layout)
        copies, proven = followed.second_names(after, before)
        notes += [names_note(proven, layout)] if proven else []
        kept = followed.judge(update, before)
        notes += [kept_note(kept, followed)] if kept else []
        if followed.kept or copies:
            # In norms, whose last digits are another device's.
            update, owed = replace(update, vector=on_host(update.vector)), on_host(owed)
        eased = ease(update, followed.kept, copies, owed)
        if owed is not None and eased is not update:
            memory.length = norm(eased.vector)
        update = eased
        parts = [update.vector] if owed is None else [update.vector, owed]
        # A codec that turns or rounds all coordinates together brings something other than zero of frozen ones, too.
        unchanged = [i for i, t in enumerate(layout.tensors) if not any(_moves(part[t.slice]) for part in parts)]
        self.said |= {"unchanged": tuple(unchanged), "copies": tuple(n for pair in copies.items() for n in pair)}
        return update


def _moves(values: Vector) -> bool:
    """Whether a value differs from zero; mostly the first ones do."""
    return bool(values[:_LOOK].any() or values.any())


def _beside(content: RecordDict, model: str = NODE_RECORD) -> RecordDict:
    """Return an app's reply without the model, and without what it says of the node: that is the head's."""
    return RecordDict({k: v for k, v in content.items() if k not in (model, NODE_RECORD)})


def _no_model(*args: object) -> Any:
    raise StateError("a query brings no model, and no app trains in it")
