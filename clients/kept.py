"""Persistence of a node's state: the outermost mod writes it to disk before the reply leaves.

Flower's ``context.state`` is in the SuperNode's memory: a node that is restarted has lost it, and an app process that
is killed between its reply and its context has answered with something the node does not remember. With ``state-dir``
in the node configuration the whole state, records of the app's own included, is a file as well. For every message:

1. the node's lock is taken, which waits for another process of the same node;
2. the file is taken in place of ``context.state`` where it is newer;
3. the message is handled;
4. the state is written, where it has changed: beside the file, flushed, renamed over it, the folder flushed;
5. the reply is returned.

In this order a node that is killed at any point has answered nothing that it does not remember: what it remembers and
did not deliver is not acknowledged and rolled back (:mod:`fedcomp.flower.state`). Writing after the reply would lose
that frame's mass. Where the state cannot be written, the reply is an error instead.

A state that is larger than a message can be (:data:`fedcomp.flower.state.MOST_BYTES`) is whole in the file alone:
between messages ``context.state`` has the small records and the names of the others. Such a node goes on from a file of
exactly the number that its context names, or a newer one. Where that is missing the memory begins anew, said in the
report, and what a message that failed has changed is as it was before.

Without ``state-dir`` nothing is done. Apps need nothing for it: ``client(app)`` and a half in ``ClientApp(mods=[...])``
run :func:`keep` around all they do.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedcomp.clients.edge.node_config import STATE_FOLDER
from fedcomp.clients.memory import Held, bytes_of
from fedcomp.clients.messages import partition_of
from fedcomp.errors import ConfigError
from fedcomp.flower.folder import (
    IN_USE,
    SESSIONS_KEPT,
    FolderError,
    KeptRecord,
    Stamp,
    StateFolder,
    pack,
    sessions_in,
)
from fedcomp.flower.logs import log
from fedcomp.flower.payload import NODE_RECORD
from fedcomp.flower.privacy import is_private
from fedcomp.flower.protocol import app_failure, refusal
from fedcomp.flower.schema import SchemaError
from fedcomp.flower.state import MOST_BYTES

_kept: ContextVar[Context | None] = ContextVar("fedcomp-kept", default=None)
"""The context that is being kept: of two halves in one list the outer one keeps it."""


def keep(msg: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Handle a message with the state of the node's folder; a mod, the outermost of all.

    Raises
    ------
    ConfigError
        When ``state-dir`` is no absolute path, or a folder that cannot be used.
    """
    path = context.node_config.get(STATE_FOLDER)
    if path is None or _kept.get() is context:
        return call_next(msg, context)
    if not isinstance(path, str):
        raise ConfigError(f"{STATE_FOLDER} of this node is {path!r}; expected an absolute path")
    try:
        folder = StateFolder(Path(path), int(partition_of(context)))
        with folder.locked():
            return _Kept(folder, msg, context).answer(call_next)
    except FolderError as error:
        log.error("%s %s: %s", STATE_FOLDER, path, error)
        # The app has not seen the message, or this would not be the error of reading or locking.
        return refusal(msg, str(error))


class _Kept:
    """One message's way between folder and context, under the folder's lock."""

    def __init__(self, folder: StateFolder, msg: Message, context: Context) -> None:
        self.folder, self.msg, self.context = folder, msg, context
        # Grids in one process have no series; there a run's state goes with the run.
        self.series = context.series_id or context.run_id
        self.sessions = sessions_in(msg.content) if msg.has_content() else ()
        self.last = 0
        """Highest number of any file of the partition."""
        self.stored: Stamp | None = None
        """What the disk holds of this series or session, the newest of it."""
        self.former = context.state
        """As it came, without the records that are in the file alone."""

    def answer(self, call_next: Callable[[Message, Context], Message]) -> Message:
        """Load, handle, write, return the reply."""
        self._load()
        token, folder = _kept.set(self.context), IN_USE.set(self.folder)
        private = self.msg.has_content() and any(
            is_private(record) for record in self.msg.content.values() if isinstance(record, ConfigRecord)
        )
        try:
            reply = call_next(self.msg, self.context)
        except BaseException:
            # With the large records in it the context could not be sent back.
            if _apart(self.context.state):
                self.context.state = self.former
            raise
        finally:
            _kept.reset(token)
            IN_USE.reset(folder)
        try:
            self._save()
        except FolderError as error:
            # Of the node's disk alone, so that it may be said of a private round, too.
            log.error("%s %s: %s", STATE_FOLDER, self.folder.path, error)
            return app_failure(self.msg, f"this node keeps its state on disk and did not answer: {error}")
        header = reply.content.get(NODE_RECORD) if not reply.has_error() else None
        if isinstance(header, ConfigRecord) and self.folder.remarks and not private:
            remark = header.get("remark")
            said = [remark] if isinstance(remark, str) else []
            # A record of its own: the one in the reply may be among those that were written.
            reply.content[NODE_RECORD] = ConfigRecord({**header, "remark": "; ".join([*said, *self.folder.remarks])})
        return reply

    def _load(self) -> None:
        """Take the newest file of this series or session where it is newer than the context; of one that is as new,
        what the context does not have."""
        stamps = self.folder.stamps()
        self.last = max((stamp.number for stamp in stamps.values()), default=0)
        path, self.stored = next(
            ((p, s) for p, s in stamps.items() if s.series == self.series or set(s.sessions) & set(self.sessions)),
            (None, None),
        )
        held, state = _mark(self.context), self.context.state
        if path is None or self.stored is None:
            others = self.folder.others()
            if not state and stamps:
                self._remark("the state folder holds the state of other runs and sessions only")
            elif not state and others:
                of = f"partitions {', '.join(map(str, others[:5]))}, not of {self.folder.partition}"
                self._remark(f"the state folder holds the state of {of}")
            return self._miss(held)
        # Without the mark, a context that is not empty is what the node has answered with since. The number of another
        # life says nothing: the folder is a copy from before this node began again.
        own = held is not None and held.life == self.stored.life
        newer = not state if held is None else own and held.number < self.stored.number
        if not newer and not (own and held is not None and held.apart and held.number == self.stored.number):
            return self._miss(held)
        records = self.folder.load(path)
        if records is None:
            self.stored = None
            return self._miss(held)
        if not newer and held is not None:
            # In the order of the file, or equal states would have two digests.
            there = {name: record for name, record in records.items() if name in state or name in held.apart}
            self.context.state = RecordDict({**there, **state})
            return None
        if self.sessions and not set(self.sessions) & set(self.stored.sessions):
            self._remark("the state folder holds the state of another session of this run")
        self.context.state = records
        KeptRecord(self.stored.life, self.stored.number).put(records)
        return None

    def _miss(self, held: KeptRecord | None) -> None:
        """Begin a new memory where records of this one are in no file any more."""
        if held is None or not held.apart:
            return
        self._remark(f"the state folder lacks {len(held.apart)} records of this node's state, which are lost")
        left = {name: record for name, record in self.context.state.items() if name != Held.KEY}
        self.context.state = RecordDict(left)

    def _remark(self, text: str) -> None:
        log.info("%s: %s", STATE_FOLDER, text)
        self.folder.remarks.append(text)

    def _save(self) -> None:
        """Write what the context holds now, unless the disk holds it."""
        held, context = _mark(self.context), self.context
        records = RecordDict({name: record for name, record in context.state.items() if name != KeptRecord.KEY})
        if not records and self.stored is None:
            return
        data, digest = pack(records)
        apart = _apart(records)
        life = secrets.token_hex(8) if held is None else held.life
        there = self.stored
        own = there is not None and there.life == life
        sessions = tuple(dict.fromkeys([*(there.sessions if there is not None and own else ()), *self.sessions]))
        if (
            there is not None
            and (life, digest, self.series) == (there.life, there.digest, there.series)
            and set(sessions) == set(there.sessions)
        ):
            self._lighten(records, KeptRecord(life, there.number, apart))
            return
        number = 1 + max(self.last, 0 if held is None else held.number)
        # Also when writing fails: then this context is newer than the file, and what it owes is in it alone.
        KeptRecord(life, number).put(context.state)
        size, sessions = sum(map(len, data)), sessions[-SESSIONS_KEPT:]
        stamp = Stamp(self.folder.partition, self.series, sessions, life, number, digest, size)
        try:
            self.folder.save(stamp, *data)
        except FolderError:
            if apart:
                # It has no other place: as if this message had not come, which is what its reply says.
                context.state = self.former
            raise
        self._lighten(records, KeptRecord(life, number, apart))

    def _lighten(self, records: RecordDict, mark: KeptRecord) -> None:
        """Leave what no message can carry to the file."""
        if mark.apart:
            light = RecordDict({name: record for name, record in records.items() if name not in mark.apart})
            mark.put(light)
            self.context.state = light


def _apart(records: RecordDict) -> tuple[str, ...]:
    """Return the names of the largest records, without which the others are small enough for a message."""
    sizes = {name: bytes_of(record) for name, record in records.items()}
    names, left = [], sum(sizes.values())
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if left <= MOST_BYTES:
            break
        names.append(name)
        left -= sizes[name]
    return tuple(names)


def _mark(context: Context) -> KeptRecord | None:
    try:
        return KeptRecord.find(context.state)
    except SchemaError:
        # Damaged by the app: as if the context had begun without the folder.
        return None
