"""An append-only file, of JSON lines or of bytes, in which every entry is on disk before the writer continues.

The first line is the head: how many entries there are, and the checksum of the last one. The second line is a header,
the others are entries. A line ends with a checksum over itself and the checksum of the line before it, so that a line
that was changed, left out or moved is found. The head is written over in place after every line, so that lines that
were cut off at the end are found as well. One process writes at a time (a lock on the file).

What a crash can leave behind, and what is made of it:

- a last line without its end, and a head that does not count it: :meth:`Journal.append` had not returned, nothing that
  depends on it has happened, and it is taken off again;
- one whole line more than the head counts: the same, but the line counts, and the head is written again;
- a file that ends within its first two lines, with a head of no entries or none: a new file.

Anything else that does not fit is damage, and refused. The head is shorter than a sector and written by one call: a
kill does not leave half of it, and neither does a disk that writes sectors whole. What no file can tell by itself: that
it is an older copy as a whole, or that it was emptied. A checkpoint of the run can.

Where there is no file, :func:`to_bytes` and :func:`from_bytes` write and read the same lines under the same head.

Files of earlier releases begin with their header. They are read and continued as they are; whether lines were cut off
at their end is unknown (:attr:`Journal.counted`).
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fedcomp.files import flush_folder
from fedcomp.privacy.errors import PrivacyLedgerError

_CHECK: Final = "check"
# 64 bits find accidents, not forgers: who can write the file can also compute checksums.
_DIGITS: Final = 16

_HEAD: Final = '{{"events":{events:>20},"last":"{last}","check":"{check}"}}\n'
"""Format of the head, which has the same length for any number of events and can be overwritten in place."""

_KEY: Final = b'{"events":'
_NONE: Final = _KEY + b"%20d" % 0
"""The start of the head of a file without entries."""


class Chain:
    """The checksums of lines, each over a line and the one before it.

    Attributes
    ----------
    checks : list of str
        Of the header, then of each entry.
    """

    def __init__(self) -> None:
        self.checks: list[str] = []

    @property
    def last(self) -> str:
        """The last checksum, which names all lines; empty where there are none."""
        return self.checks[-1] if self.checks else ""

    def check(self, body: str) -> str:
        """Return the checksum that a line would have as the next one."""
        return hashlib.sha256(f"{self.last}\n{body}".encode()).hexdigest()[:_DIGITS]

    def line(self, entry: Mapping[str, Any]) -> tuple[str, bytes]:
        """Return the next line of an entry, and its checksum, which :attr:`checks` lacks until the line is written."""
        body = _dump(entry)
        check = self.check(body)
        return check, f'{body[:-1]},"{_CHECK}":"{check}"}}\n'.encode()

    def parse(self, line: bytes) -> dict[str, Any] | None:
        """Return a line's entry, None when it is not one that follows the lines before."""
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(entry, dict):
            return None
        # Of the canonical form, sorted and without spaces, in which every line is written.
        check = entry.pop(_CHECK, None)
        return entry if entry and check == self.check(_dump(entry)) else None

    def head(self) -> bytes:
        """Return the head of a file with these lines."""
        return _head_line(len(self.checks) - 1, self.last)


def to_bytes(header: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> tuple[bytes, str]:
    """Return a file's content as bytes, and the checksum of its last line."""
    chain, lines = Chain(), []
    for each in (header, *entries):
        check, line = chain.line(each)
        chain.checks.append(check)
        lines.append(line)
    return chain.head() + b"".join(lines), chain.last


def from_bytes(data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Return header and entries of what :func:`to_bytes` made, and the checksum of the last line.

    Raises
    ------
    PrivacyLedgerError
        For anything else: bytes are written at once, so that no crash leaves a part of them.
    """
    head, _, rest = data.partition(b"\n")
    chain, found = Chain(), []
    for line in rest.splitlines():
        entry = chain.parse(line)
        if entry is None:
            break
        chain.checks.append(chain.check(_dump(entry)))
        found.append(entry)
    if not found or chain.head() != head + b"\n" or not rest.endswith(b"\n") or len(found) != rest.count(b"\n"):
        raise PrivacyLedgerError("this node's ledger cannot be read; what it spent is unknown")
    return found[0], found[1:], chain.last


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
    counted : bool
        Whether the file has a head, which lines cut off at the end do not agree with.

    Raises
    ------
    PrivacyLedgerError
        When the file is damaged, cannot be opened, or another process has it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        # Fixed now: a later change of the working directory must not change which file is looked for.
        self._place = self.path.absolute()
        self.header: dict[str, Any] | None = None
        self.entries: list[dict[str, Any]] = []
        self.torn = 0
        self.counted = True
        self._broken = ""
        self._size = self._after_header = 0
        self._chain = Chain()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # For its owner alone, since the file says who took part; and not inherited, since a child would keep the
            # lock.
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        except OSError as error:
            raise PrivacyLedgerError(
                f"the ledger {self.path} cannot be opened: {error}; nothing may be released"
            ) from error
        # Also for a ledger that is dropped without close(): its lock would keep the run's own continuation out.
        self._closer = weakref.finalize(self, os.close, self._handle)
        try:
            _lock(self._handle, self.path)
            self._read()
            # The name of a new file is in its folder, which has to reach the disk as well.
            flush_folder(self.path.parent)
        except OSError as error:
            self.close()
            raise PrivacyLedgerError(
                f"the ledger {self.path} cannot be read: {error}; nothing may be released"
            ) from error
        except PrivacyLedgerError:
            self.close()
            raise

    def close(self) -> None:
        """Give the file and its lock back. May be called again."""
        self._closer()

    def begin(self, header: Mapping[str, Any]) -> None:
        """Write the header of a new file."""
        if self.header is not None:
            raise PrivacyLedgerError(f"the ledger {self.path} has a header already")
        self._write(header, begin=True)
        self.header = dict(header)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one entry; when this returns it is on the disk.

        Raises
        ------
        PrivacyLedgerError
            When it is not, or may not be. Every later call fails as well: what the file holds is then unknown.
        """
        if self.header is None:
            raise PrivacyLedgerError(f"the ledger {self.path} has no header yet")
        self._write(entry)

    def clear(self) -> None:
        """Take the header of a file without entries off again."""
        if self.entries or self.header is None or self._size != self._after_header:
            raise PrivacyLedgerError(f"the ledger {self.path} holds entries; they cannot be taken off")
        # Nothing was paid for, so nothing is lost; what is exchanged is the name of the run.
        os.ftruncate(self._handle, 0)
        os.fsync(self._handle)
        self.header, self._size, self.counted = None, 0, True
        self._chain.checks.clear()

    def _read(self) -> None:
        size = os.fstat(self._handle).st_size
        data = b""
        while len(data) < size:
            part = os.pread(self._handle, size - len(data), len(data))
            if not part:
                break
            data += part
        *lines, tail = data.split(b"\n")
        # A crash may have left less of the head than its first key: such a file is new, not one of an earlier release.
        self.counted = data.startswith(_KEY) or _KEY.startswith(data)
        head = self._read_head(lines.pop(0)) if self.counted and lines else None
        unfinished = self.counted and head is None
        if unfinished and not _NONE.startswith(tail[: len(_NONE)]):
            raise _cut_off(self.path, f"{len(tail)} bytes of its head are left, which counts events")
        for number, line in enumerate(lines, 2 if self.counted else 1):
            entry = self._chain.parse(line)
            if entry is None:
                raise PrivacyLedgerError(
                    f"line {number} of the ledger {self.path} is damaged or does not follow the line before it. What "
                    "was spent is unknown: restore the file from a copy, or begin a new run on other data"
                )
            self._take(entry, len(line) + 1)
        # Only the end of the line may be missing: the entry is whole, and counts.
        whole = self._chain.parse(tail) if tail and not unfinished else None
        if whole is not None:
            self._take(whole, len(tail) + 1)
        if head is not None:
            self._compare(*head)
        # Nothing is changed in a file that is refused.
        if whole is not None:
            self._put(b"\n", self._size - 1)
        elif tail or (data and self.header is None):
            self.torn = len(tail)
            self._size = self._size if self.header is not None else 0
            os.ftruncate(self._handle, self._size)
            os.fsync(self._handle)
        # Whatever is begun from here on gets a head.
        if self.header is None:
            self.counted = True
        # The crash fell between the line and the head. The line counts, so the head is brought up to it.
        elif head is not None and head[0] != len(self.entries):
            self._put(self._chain.head(), 0)

    def _read_head(self, line: bytes) -> tuple[int, str]:
        """Return the number of entries by the head, and the checksum of the last one.

        Raises
        ------
        PrivacyLedgerError
            If the head is damaged.
        """
        try:
            document = json.loads(line)
            count, last = int(document["events"]), str(document["last"])
        except (ValueError, KeyError, TypeError, RecursionError):
            count, last = -1, ""
        if count < 0 or _head_line(count, last) != line + b"\n":
            raise PrivacyLedgerError(
                f"the head of the ledger {self.path} is damaged, and with it the number of its events. Restore the "
                "file from a copy, or begin a new run on other data"
            )
        self._size = len(line) + 1
        return count, last

    def _compare(self, count: int, last: str) -> None:
        """Refuse lines that disagree with the head, except for one that a crash may leave after its end.

        Raises
        ------
        PrivacyLedgerError
        """
        found = len(self.entries)
        if count > found:
            raise _cut_off(self.path, f"its head counts {count} events, and {found} are left")
        # The checksum at index 0 is the header's, so the one at ``count`` belongs to the last entry that the head
        # counts.
        if self.header is not None and (count < found - 1 or last != self._chain.checks[count]):
            raise PrivacyLedgerError(
                f"the head of the ledger {self.path} counts {count} events and is not that of its {found}: it is from "
                "another time than they are. Restore the file from a copy, or begin a new run on other data"
            )

    @property
    def head(self) -> str:
        """The checksum of the last line, which names all that the file holds."""
        return self._chain.last

    def _take(self, entry: dict[str, Any], size: int) -> None:
        self._follow(self._chain.check(_dump(entry)), size)
        if self.header is None:
            self.header = entry
        else:
            self.entries.append(entry)

    def _follow(self, check: str, size: int) -> None:
        """Add one more line of the chain, ``size`` bytes long with its end."""
        self._chain.checks.append(check)
        self._size += size
        if len(self._chain.checks) == 1:
            self._after_header = self._size

    def _write(self, entry: Mapping[str, Any], *, begin: bool = False) -> None:
        if not self._closer.alive:
            raise PrivacyLedgerError(f"the ledger {self.path} is closed; nothing may be released")
        if self._broken:
            raise PrivacyLedgerError(
                f"the ledger {self.path} could not be written before: {self._broken}; nothing is released"
            )
        check, line = self._chain.line(entry)
        if begin:
            # In one write: what a crash leaves of it is the beginning of a new file.
            line = _head_line(0, check) + line
        try:
            # A file that was exchanged or appended to by somebody else is not this run's record any more.
            now = os.fstat(self._handle)
            if now.st_size != self._size or not _stands_at(self._place, now):
                raise OSError("somebody else changed, moved or deleted it")
            # First the line, then the head that counts it: a crash in between leaves a line too many, none too few.
            self._put(line, self._size)
            self._follow(check, len(line))
            if self.counted and not begin:
                self._put(self._chain.head(), 0)
        except OSError as error:
            # How much of the line reached the disk is unknown; another one after it could follow a torn line.
            self._broken = str(error)
            raise PrivacyLedgerError(
                f"the ledger {self.path} cannot be written: {error}; nothing was released"
            ) from error

    def _put(self, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            # A write may take less than it was given.
            written = os.pwrite(self._handle, view, at)
            view, at = view[written:], at + written
        os.fsync(self._handle)


def _lock(handle: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError as error:
        raise PrivacyLedgerError(
            "a ledger on disk needs POSIX file locks, which this system lacks; run without a ledger file"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PrivacyLedgerError(
            f"the ledger {path} is open elsewhere: two writers would each spend the budget; end the other run"
        ) from error


def _cut_off(path: Path, why: str) -> PrivacyLedgerError:
    return PrivacyLedgerError(
        f"the ledger {path} was cut off at its end: {why}. What was spent is unknown: restore the file from a copy, or "
        "begin a new run on other data"
    )


def _head_line(events: int, last: str) -> bytes:
    check = hashlib.sha256(f"{events}\n{last}".encode()).hexdigest()[:_DIGITS]
    return _HEAD.format(events=events, last=last, check=check).encode()


def _dump(entry: Mapping[str, Any]) -> str:
    if not entry:
        raise PrivacyLedgerError("an entry of a ledger has at least one field")
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _stands_at(place: Path, file: os.stat_result) -> bool:
    """Whether a resumed run will find ``file`` at ``place``."""
    try:
        return os.path.samestat(os.stat(place), file)
    except FileNotFoundError:
        return False
