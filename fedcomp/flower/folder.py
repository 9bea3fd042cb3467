"""The state folder of a node: one file per run series, written atomically, from which a restarted node continues.

A file is a head and the records of ``context.state`` in the format of :mod:`fedcomp.flower.growing`, never pickle: of
any size that the disk has room for, written from the arrays where they lie and read one by one. The head is a few
hundred bytes: whose state it is, how often it was written, and a digest of the records, so that a message which finds
its own copy up to date reads no more than that. Whatever is damaged, of another release or not such a file at all is
set aside under another name, and said; nothing is removed because it cannot be read.

What a reply owes to the disk is the business of :mod:`fedcomp.clients.kept`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from flwr.app import ConfigRecord, RecordDict

from fedcomp import files
from fedcomp.errors import ConfigError, FedcompError, StateError
from fedcomp.flower.growing import packed, pieces, read
from fedcomp.flower.logs import log
from fedcomp.flower.protocol import PREFIX
from fedcomp.flower.schema import Schema
from fedcomp.plain import Count, fields_of, from_fields
from fedcomp.rules import Int, Many, Text

VERSION: Final = 2
"""Version of the files; a reader refuses others."""

SERIES_KEPT: Final = 3
"""How many run series of a partition keep their files: the latest ones."""

SESSIONS_KEPT: Final = 8
"""How many sessions a file remembers to be of: the latest ones."""

LOCK_SECONDS: Final = 60.0
"""How long a process waits for another one of the same node."""

_KIND: Final = "client state"
_MAGIC: Final = b"fedcomp.state\n"
_HEAD: Final = struct.Struct("<HII")
"""Version, length of the stamp, CRC-32 of the stamp."""

_MAX_STAMP: Final = 1 << 16
_LONGEST_HEAD: Final = len(_MAGIC) + _HEAD.size + _MAX_STAMP
_SUFFIX: Final = ".state"


class FolderError(StateError):
    """A state folder cannot be read, written or locked."""


IN_USE: Final[ContextVar[StateFolder | None]] = ContextVar("fedcomp-folder", default=None)
"""The folder that keeps the state with which a message is being answered; None without one."""


class _Unreadable(FedcompError):
    """A file is damaged, comes from a newer release, or does not belong to this project."""


@dataclass(frozen=True)
class Stamp:
    """What a file says before its records.

    Attributes
    ----------
    partition, series : int
        Whose state it is, and of which run series.
    sessions : tuple of str
        Sessions of the servers whose messages it has answered, in hexadecimal, the latest last.
    life : str
        Drawn when the state began; states of two lives do not follow each other.
    number : int
        Counts the files written for a partition, from 1: of two states of one life the higher one is newer.
    digest : str
        BLAKE2b of the records, 16 bytes in hexadecimal.
    size : int
        Bytes of the records.
    """

    partition: Count
    series: Count
    sessions: tuple[str, ...]
    life: str
    number: Count
    digest: str
    size: Count


@dataclass(frozen=True)
class KeptRecord(Schema, key="fedcomp.kept"):
    """Which file ``context.state`` is as new as.

    Attributes
    ----------
    life, number
        Fields of :class:`Stamp`.
    apart : tuple of str
        Names of the records that are in that file alone, because a message cannot carry them.
    """

    life: Annotated[str, Text(64, least=1)]
    number: Annotated[int, Int()]
    apart: Annotated[tuple[str, ...], Many(Text(4096, least=1), 65_536)] = ()


def pack(records: RecordDict) -> tuple[list[bytes | memoryview], str]:
    """Return records as the bytes of a file, in parts, and their digest; equal records in one order give equal bytes.

    Large arrays are parts without a copy.

    Raises
    ------
    StoreError
        When an entry is not plain data.
    """
    data = packed(records, _KIND)
    return data, _digest(data)


def sessions_in(content: RecordDict) -> tuple[str, ...]:
    """Return the sessions that a message belongs to, in hexadecimal: those which this project's records name."""
    found = []
    for name, record in content.items():
        if not isinstance(record, ConfigRecord):
            continue
        own = [record.get(f"{PREFIX}session")]
        # Records of the systems' own schemas name theirs without the prefix.
        own += [record.get("session")] if name.startswith(PREFIX) else []
        found += [each if isinstance(each, bytes) else each.encode() for each in own if isinstance(each, bytes | str)]
    return tuple(dict.fromkeys(each.hex() for each in found if each))


class StateFolder:
    """One partition's files in a node's state folder.

    Parameters
    ----------
    path : Path
        Made when it is not there, for its owner alone.
    partition : int

    Attributes
    ----------
    remarks : list of str
        What was wrong with the folder since it was opened: without paths, for the server's report.

    Raises
    ------
    ConfigError
        When the path is not absolute or the partition negative, when others may write to the folder, or when the system
        has no file locks.
    FolderError
        When it cannot be made.
    """

    def __init__(self, path: Path, partition: int) -> None:
        try:
            import fcntl  # noqa: F401  only asked for here, so that a missing one is found at the start
        except ImportError as error:
            raise ConfigError(
                "a state folder needs POSIX file locks, which this system lacks; start the node without --state-dir "
                "and --home"
            ) from error
        if not path.is_absolute() or partition < 0:
            raise ConfigError(
                f"the state folder is {str(path)!r} of partition {partition}; expected an absolute path, and a "
                "partition from 0"
            )
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = path.stat().st_mode
        except OSError as error:
            raise FolderError(f"the state folder cannot be made: {error.strerror}; name another one") from error
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(f"others may write to the state folder {path}; make it the node's own: chmod 700")
        self.path = path
        self.partition = partition
        self.remarks: list[str] = []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the partition's lock. The system releases it when this process dies.

        Raises
        ------
        FolderError
            When another process of this node has it for :data:`LOCK_SECONDS`.
        """
        import fcntl

        deadline = time.monotonic() + LOCK_SECONDS
        try:
            handle = os.open(self.path / f"{self.partition}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FolderError(f"the state folder cannot be written: {error.strerror}") from error
        try:
            while True:
                try:
                    # Asked for again and again: a blocking flock() knows no timeout.
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise FolderError(
                            f"another process of this node has used the state folder for {LOCK_SECONDS:g} s; end it, "
                            "or give each node a folder of its own"
                        ) from error
                    time.sleep(0.02)
            # Whoever wrote these held the lock, and was killed before it could rename them.
            for partial in self.path.glob(f".{self.partition}-*"):
                partial.unlink(missing_ok=True)
            yield
        finally:
            os.close(handle)

    def stamps(self) -> dict[Path, Stamp]:
        """Return what the partition's files say of themselves, the newest first; damaged ones are set aside.

        Raises
        ------
        FolderError
            When one cannot be read.
        """
        found: dict[Path, Stamp] = {}
        for path in sorted(self.path.glob(f"{self.partition}-*{_SUFFIX}")):
            with self._whole(path), path.open("rb") as file:
                found[path] = self._stamp(file.read(_LONGEST_HEAD), path)[0]
        return dict(sorted(found.items(), key=lambda item: -item[1].number))

    def others(self) -> list[int]:
        """Return the other partitions that have a file here."""
        parts = (path.name.partition("-")[0] for path in self.path.glob(f"*-*{_SUFFIX}"))
        return sorted({int(each) for each in parts if each.isdecimal()} - {self.partition})

    def load(self, path: Path) -> RecordDict | None:
        """Return the records of a file; None, and the file set aside, when it is damaged.

        Raises
        ------
        FolderError
            When it cannot be read.
        """
        with self._whole(path):
            with path.open("rb") as file:
                stamp, start = self._stamp(file.read(_LONGEST_HEAD), path)
                file.seek(start)
                size = os.fstat(file.fileno()).st_size - start
                if size != stamp.size or _digest(pieces(file, size)) != stamp.digest:
                    raise _Unreadable("its records are not those that were written")
            state = read(path, _KIND, start)
            if not isinstance(state, RecordDict):
                raise _Unreadable(f"it holds a {type(state).__name__}, no records")
            return state
        return None

    def save(self, stamp: Stamp, *data: bytes | memoryview) -> None:
        """Write a file in place of the series' former one; when it returns, the file is on the disk.

        Parameters
        ----------
        data : bytes or memoryview
            The records, in parts.

        Raises
        ------
        FolderError
            When it cannot be written, or the disk has no room for it. The former file is then as it was.
        """
        said = json.dumps(fields_of(stamp), separators=(",", ":")).encode()
        head = _MAGIC + _HEAD.pack(VERSION, len(said), zlib.crc32(said)) + said
        path, size = self.path / f"{self.partition}-{stamp.series:x}{_SUFFIX}", len(head) + sum(map(len, data))
        try:
            if size > (room := self.room()):
                raise FolderError(f"No space left: the state has {size:,} bytes, the state folder's disk {room:,} free")
            files.write(path, head, *data)
            self._prune(path)
        except OSError as error:
            raise FolderError(f"{path} could not be written: {error.strerror}; the former state is kept") from error

    def room(self) -> int:
        """Return how many bytes a state may have, which is written beside the former one."""
        return shutil.disk_usage(self.path).free

    def _prune(self, latest: Path) -> None:
        """Remove the files of old series."""
        for path in [path for path in self.stamps() if path != latest][SERIES_KEPT - 1 :]:
            path.unlink()
            log.info("state folder %s: removed %s of an earlier run", self.path, path.name)

    def _stamp(self, data: bytes, path: Path) -> tuple[Stamp, int]:
        """Return the stamp at the start of a file, and the position of the first record."""
        start = len(_MAGIC) + _HEAD.size
        if data[: len(_MAGIC)] != _MAGIC or len(data) < start:
            raise _Unreadable("it is no state of a node")
        version, length, checksum = _HEAD.unpack(data[len(_MAGIC) : start])
        if version != VERSION:
            raise _Unreadable(f"it has version {version}, this release reads {VERSION}")
        said = data[start : start + length]
        if length > _MAX_STAMP or len(said) < length or zlib.crc32(said) != checksum:
            raise _Unreadable("its head is damaged")
        stamp = from_fields(Stamp, json.loads(said), "its head")
        if path.name != f"{stamp.partition}-{stamp.series:x}{_SUFFIX}":
            raise _Unreadable(f"it is of partition {stamp.partition} and was renamed")
        return stamp, start + length

    @contextlib.contextmanager
    def _whole(self, path: Path) -> Iterator[None]:
        """Move ``path`` aside if reading it shows damage."""
        try:
            yield
        except OSError as error:
            raise FolderError(f"the state of this node cannot be read: {error.strerror}") from error
        except (FedcompError, ValueError, RecursionError) as error:
            # One name: damage that comes back must not fill the disk.
            os.replace(path, self.path / f"{self.partition}.damaged")
            log.warning("state folder: %s was set aside as %d.damaged: %s", path, self.partition, error)
            self.remarks.append(f"the state of this node was damaged and was set aside: {error}")


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()
