"""An append-only file of JSON lines whose every line is on the disk before the writer goes on.

The first line is a header, the others are entries. A line ends with a checksum over itself and the checksum of the line
before it, so that a line that was changed, left out or moved is found. One process writes at a time (a lock on the
file). What a crash can leave behind is a last line without its end: that line's :meth:`Journal.append` had not
returned, so nothing that depends on it has happened, and it is taken off again. Anything else that does not fit is
damage, and refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fedcomp.privacy.errors import LedgerError

_CHECK: Final = "check"
_DIGITS: Final = 16


class Journal:
    """One file, open and locked until :meth:`close`.

    Parameters
    ----------
    path : Path
        Created, with its folder, when it does not exist.

    Attributes
    ----------
    header : dict or None
        None until :meth:`begin`, in a new file.
    entries : list of dict
        What the file held when it was opened.
    torn : int
        Bytes of an unfinished last line that were taken off on opening.

    Raises
    ------
    LedgerError
        When the file is damaged, cannot be opened, or another process has it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._place = self.path.absolute()
        self.header: dict[str, Any] | None = None
        self.entries: list[dict[str, Any]] = []
        self.torn = 0
        self._broken = ""
        self._size = self._after_header = 0
        self._last = ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o600)
        except OSError as error:
            raise LedgerError(f"the ledger {self.path} cannot be opened: {error}; nothing may be released") from error
        self._closer = weakref.finalize(self, os.close, self._handle)
        try:
            self._lock()
            self._read()
            # The name of a new file is in its folder, which has to reach the disk as well.
            _sync_folder(self.path.parent)
        except OSError as error:
            self.close()
            raise LedgerError(f"the ledger {self.path} cannot be read: {error}; nothing may be released") from error
        except LedgerError:
            self.close()
            raise

    def close(self) -> None:
        """Give the file and its lock back. May be called again."""
        self._closer()

    def begin(self, header: Mapping[str, Any]) -> None:
        """Write the header of a new file."""
        if self.header is not None:
            raise LedgerError(f"the ledger {self.path} has a header already")
        self._write(header)
        self.header = dict(header)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one entry; when this returns it is on the disk.

        Raises
        ------
        LedgerError
            When it is not, or may not be. Every later call fails as well: what the file holds is then unknown.
        """
        if self.header is None:
            raise LedgerError(f"the ledger {self.path} has no header yet")
        self._write(entry)

    def clear(self) -> None:
        """Take the header of a file without entries off again."""
        if self.entries or self.header is None or self._size != self._after_header:
            raise LedgerError(f"the ledger {self.path} holds entries; they cannot be taken off")
        os.ftruncate(self._handle, 0)
        os.fsync(self._handle)
        self.header, self._last, self._size = None, "", 0

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError as error:
            raise LedgerError(
                "a ledger on disk needs POSIX file locks, which this system lacks; run without a ledger file"
            ) from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LedgerError(
                f"the ledger {self.path} is open elsewhere: two writers would each spend the budget; end the other run"
            ) from error

    def _read(self) -> None:
        size = os.fstat(self._handle).st_size
        data = b""
        while len(data) < size:
            part = os.pread(self._handle, size - len(data), len(data))
            if not part:
                break
            data += part
        *lines, tail = data.split(b"\n")
        self._size = 0
        for number, line in enumerate(lines, 1):
            entry = self._parse(line)
            if entry is None:
                raise LedgerError(
                    f"line {number} of the ledger {self.path} is damaged or does not follow the line before it. What "
                    "was spent is unknown: restore the file from a copy, or begin a new run on other data"
                )
            self._take(entry, len(line) + 1)
        if not tail:
            return
        entry = self._parse(tail)
        if entry is None:
            self.torn = len(tail)
            os.ftruncate(self._handle, self._size)
            os.fsync(self._handle)
            return
        # Only the end of the line is missing: the entry is whole, and counts.
        self._put(b"\n")
        self._take(entry, len(tail) + 1)

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        """Return a line's entry, None when it is not one that follows the lines before."""
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(entry, dict):
            return None
        check = entry.pop(_CHECK, None)
        return entry if check == self._check(_dump(entry)) else None

    def _take(self, entry: dict[str, Any], size: int) -> None:
        self._last = self._check(_dump(entry))
        self._size += size
        if self.header is None:
            self.header = entry
            self._after_header = self._size
        else:
            self.entries.append(entry)

    def _check(self, body: str) -> str:
        return hashlib.sha256(f"{self._last}\n{body}".encode()).hexdigest()[:_DIGITS]

    def _write(self, entry: Mapping[str, Any]) -> None:
        if not self._closer.alive:
            raise LedgerError(f"the ledger {self.path} is closed; nothing may be released")
        if self._broken:
            raise LedgerError(
                f"the ledger {self.path} could not be written before: {self._broken}; nothing is released"
            )
        body = _dump(entry)
        check = self._check(body)
        line = f'{body[:-1]},"{_CHECK}":"{check}"}}\n'.encode()
        try:
            now = os.fstat(self._handle)
            if now.st_size != self._size or not _stands_at(self._place, now):
                raise OSError("somebody else changed, moved or deleted it")
            self._put(line)
        except OSError as error:
            self._broken = str(error)
            raise LedgerError(f"the ledger {self.path} cannot be written: {error}; nothing was released") from error
        self._last = check
        self._size += len(line)
        if self.header is None:
            self._after_header = self._size

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._handle, view) :]
        os.fsync(self._handle)


def _dump(entry: Mapping[str, Any]) -> str:
    if not entry:
        raise LedgerError("an entry of a ledger has at least one field")
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _stands_at(place: Path, file: os.stat_result) -> bool:
    """Whether who resumes will find ``file`` at ``place``."""
    try:
        return os.path.samestat(os.stat(place), file)
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
