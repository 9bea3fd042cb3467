"""The spool: a directory of parcels shared by several processes, which the listener fills and the client app reads.

A parcel is one file whose name says where it belongs, so that finding a round's parcels opens no others. It is written
beside its place and renamed into it: a reader sees all of it or nothing. Everybody who writes holds one lock, so that
the limit holds with several writers, and a half-written file found under the lock belongs to a writer that died.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from fedcomp.coding.errors import PacketError, TransportError
from fedcomp.coding.parcels import (
    HEADER_BYTES,
    MAX_STORE_BYTES,
    RUN_BYTES,
    Parcel,
    Parcels,
    StoreFull,
)
from fedcomp.errors import ConfigError

KEEP_SECONDS: Final = 86_400.0
LOCK_SECONDS: Final = 30.0
MAX_PARCELS: Final = 1 << 13
"""The default limit of parcels in one directory, whatever their size.

A file takes a block of the disk, however short it is, and every writer looks through the directory: without this limit
empty parcels, 36 bytes each, would take a hundred times ``max_store_bytes`` and all of a listener's time.
"""

_LOG: Final = logging.getLogger(__name__)
_SUFFIX: Final = ".parcel"
_PARTIAL: Final = ".partial"
_LOCK: Final = ".lock"
_MARK: Final = "parcel-spools"
_SCHEME: Final = "spool:"
_LONGEST: Final = 4096
# Never through a link that somebody else put in the way.
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)

Files = list[tuple[str, int]]


class Spool:
    """Parcels as files in one directory, where a receiver keeps them until their round is over.

    Two parcels that are equal in every field are one. Two with the same coordinates and different bodies are two: which
    of them is right is for whoever decodes them to find out.

    Parameters
    ----------
    directory : Path
        Made when it does not exist, for this user alone.
    max_store_bytes : int
        Limit of all parcels together, headers included; it holds for all writers together when all were given the same.
    keep_seconds : float
        Parcels of other runs than the one whose round advances are removed when they are older than this.
    max_parcels : int
        Limit of their number; holds for all writers together likewise.
    durable : bool
        Flush a parcel to the disk before it appears, so that it survives a power failure and not only the process.

    Raises
    ------
    ConfigError
        When the directory cannot be made or used, or the system has no file locks.

    Notes
    -----
    Network file systems whose locks are not shared between machines do not keep the limit.
    """

    def __init__(
        self,
        directory: Path,
        max_store_bytes: int = MAX_STORE_BYTES,
        *,
        keep_seconds: float = KEEP_SECONDS,
        max_parcels: int = MAX_PARCELS,
        durable: bool = False,
    ) -> None:
        self.directory = Path(directory)
        if isinstance(max_store_bytes, bool) or not isinstance(max_store_bytes, int) or max_store_bytes < HEADER_BYTES:
            raise ConfigError(
                f"max_store_bytes is {max_store_bytes!r}; expected a whole number of at least {HEADER_BYTES}, one "
                "header"
            )
        self.max_store_bytes = max_store_bytes
        if isinstance(max_parcels, bool) or not isinstance(max_parcels, int) or max_parcels < 1:
            raise ConfigError(f"max_parcels is {max_parcels!r}; expected a whole number of at least 1")
        self.keep_seconds = keep_seconds
        self.max_parcels = max_parcels
        self.durable = durable
        try:
            import fcntl  # noqa: F401  only asked for here, so that a missing one is found at the start
        except ImportError as error:
            raise ConfigError("parcels in a directory need POSIX file locks; use transport='hub' here") from error
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the parcel store {directory} cannot be made: {error}; choose another folder") from error

    @property
    def held(self) -> int:
        """Bytes kept, headers included."""
        return self._usage(self._names())[1]

    def put(self, parcel: Parcel) -> bool:
        """Keep ``parcel``; return False when it was there already.

        Raises
        ------
        StoreFull
            When it does not fit beside what is kept, which never exceeds the two limits.
        TransportError
            When it cannot be written.
        """
        data = parcel.to_bytes()
        path = self.directory / file_name(parcel, data)
        with self._locked() as names:
            # The name holds a digest of the parcel: one that is delivered twice is kept once.
            if path.name in names:
                return False
            count, held = self._usage(names)
            if held + len(data) > self.max_store_bytes or count >= self.max_parcels:
                # Only when room runs out: looking at the age of every file is what makes a put slow.
                self._remove_stale(parcel.run)
                count, held = self._usage(self._names())
            if held + len(data) > self.max_store_bytes:
                raise StoreFull(
                    f"a parcel of {len(data)} bytes does not fit beside {held} of at most {self.max_store_bytes} "
                    f"bytes; raise max_store_bytes, or send smaller or fewer shards (the parcel store {self.directory})"
                )
            if count >= self.max_parcels:
                raise StoreFull(
                    f"the parcel store {self.directory} holds {count} parcels, as many as it may; send fewer shards, "
                    "or drop those of rounds that are over with drop_before()"
                )
            partial = path.with_suffix(_PARTIAL)
            try:
                with os.fdopen(os.open(partial, _NEW, 0o600), "wb") as file:
                    file.write(data)
                    if self.durable:
                        file.flush()
                        os.fsync(file.fileno())
                # Readers take no lock: a rename lets them see the whole parcel or none.
                os.replace(partial, path)
                if self.durable:
                    # A rename survives a power failure only with the directory that records it.
                    _flush_directory(self.directory)
            except OSError as error:
                with contextlib.suppress(FileNotFoundError):
                    partial.unlink()
                raise TransportError(f"a parcel of {len(data)} bytes could not be kept in {path}: {error}") from error
        return True

    def list(self, run: bytes, round: int) -> Parcels:
        """Return what is kept for a round, ordered by kind, source and destination.

        A file that no longer holds what its name promises is removed and logged: it is a loss like any other.
        """
        found = []
        for name, size in self._files(run):
            if _place(name) != (run, round):
                continue
            path = self.directory / name
            try:
                data = path.read_bytes()
                parcel = Parcel.from_bytes(data, max(size, HEADER_BYTES))
                if file_name(parcel, data) != path.name:
                    raise PacketError("its name does not match its content")
            except FileNotFoundError:
                # Taken or dropped between the look at the directory and now.
                continue
            except PacketError as error:
                _LOG.warning("removed the damaged parcel %s: %s", path, error)
                path.unlink(missing_ok=True)
                continue
            found.append(parcel)
        return sorted(found, key=lambda parcel: parcel.order)

    def remove(self, parcel: Parcel) -> bool:
        """Forget one parcel, as if it had never come; return whether it was there."""
        path = self.directory / file_name(parcel)
        with self._locked():
            kept = path.exists()
            path.unlink(missing_ok=True)
        return kept

    def drop_before(self, run: bytes, round: int) -> int:
        """Remove the run's parcels of rounds before ``round``, and stale ones of other runs; return the bytes freed."""
        with self._locked():
            freed = self._remove_stale(run)
            for name, size in self._files(run):
                place = _place(name)
                if place is not None and place[1] < round:
                    (self.directory / name).unlink(missing_ok=True)
                    freed += size
        return freed

    def _files(self, run: bytes | None = None) -> Files:
        """Return name and size of every parcel, of one run or of all.

        The size is in the name: asking the system for it takes most of the time a writer would hold the lock.
        """
        start = "" if run is None else run.hex()
        return self._sized(name for name in self._names() if name.startswith(start))

    def _sized(self, names: Iterable[str]) -> Files:
        found = []
        for name in names:
            if name.endswith(_SUFFIX):
                # One that was taken meanwhile is not there any more.
                with contextlib.suppress(FileNotFoundError):
                    found.append((name, _size(self.directory, name)))
        return found

    def names(self) -> set[str]:
        """Return the names of all files here, see :func:`file_name`."""
        return set(self._names())

    def _names(self) -> Iterable[str]:
        try:
            return os.listdir(self.directory)
        except OSError as error:
            raise TransportError(f"the parcel store {self.directory} cannot be read: {error}") from error

    def _usage(self, names: Iterable[str]) -> tuple[int, int]:
        """Return how many of these are parcels, and their bytes."""
        files = self._sized(names)
        return len(files), sum(size for _, size in files)

    def _remove_stale(self, run: bytes) -> int:
        """Remove what other runs left behind long ago; return the bytes freed. The lock is held."""
        before, freed = time.time() - self.keep_seconds, 0
        for name, size in self._files():
            place, path = _place(name), self.directory / name
            # The run's own parcels never go by age: a round may last longer than keep_seconds.
            if place is not None and place[0] == run:
                continue
            with contextlib.suppress(FileNotFoundError):
                # Of a link its own age counts, since the link is what would be removed.
                if path.lstat().st_mtime < before:
                    path.unlink()
                    freed += size
        return freed

    @contextlib.contextmanager
    def _locked(self) -> Iterator[set[str]]:
        """Hold the directory's lock, and yield the names in it. The system releases it when this process dies."""
        import fcntl

        deadline = time.monotonic() + LOCK_SECONDS
        try:
            file = (self.directory / _LOCK).open("ab")
        except OSError as error:
            raise TransportError(f"the parcel store {self.directory} cannot be written: {error}") from error
        with file as lock:
            while True:
                try:
                    # Asked for again and again: a blocking flock() knows no timeout.
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise TransportError(
                            f"the parcel store {self.directory} was locked by another process for {LOCK_SECONDS:g} s"
                        ) from error
                    time.sleep(0.005)
            # Whoever wrote these held the lock, and no longer does.
            names = set(self._names())
            for name in [name for name in names if name.endswith(_PARTIAL)]:
                (self.directory / name).unlink(missing_ok=True)
            yield names


class SpoolRoot:
    """Spools of several receivers below one folder of this machine: the peer links of a simulated federation.

    The folder carries a mark that :meth:`create` leaves in it. Addresses arrive in messages; without the mark a client
    would make files wherever a server says.
    """

    def __init__(self, root: Path, max_store_bytes: int = MAX_STORE_BYTES) -> None:
        self.root = Path(root)
        self.max_store_bytes = max_store_bytes
        if not self.root.is_absolute() or not os.path.isfile(self.root / _MARK):
            raise ConfigError(
                f"{root} is not a folder of simulated peer links on this machine; peers of a deployment need "
                "'python -m fedcomp.clients.edge --peer HOST:PORT', or use transport='hub'"
            )

    @classmethod
    def create(cls, root: Path, max_store_bytes: int = MAX_STORE_BYTES) -> SpoolRoot:
        """Make the folder, or take an existing one, and mark it."""
        folder = Path(root).resolve()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / _MARK).write_text("Each folder beside this file holds the parcels of one simulated client.\n")
        return cls(folder, max_store_bytes)

    def spool(self, destination: int) -> Spool:
        """Return the spool of ``destination``."""
        return Spool(self._folder(destination), self.max_store_bytes)

    def address(self, destination: int) -> str:
        """Return the address of ``destination`` as :func:`parse_spool` reads it."""
        return _SCHEME + quote(str(self._folder(destination)))

    def _folder(self, destination: int) -> Path:
        if isinstance(destination, bool) or not isinstance(destination, int) or destination < 0:
            raise ConfigError(f"destination is {destination!r}; expected a partition, 0 or more")
        return self.root / f"{destination:08d}"


def parse_spool(address: str) -> Path:
    """Return the absolute folder of ``spool:/folder``, percent-encoded where it holds unusual characters.

    Raises
    ------
    ConfigError
        When ``address`` is not one.
    """
    # Addresses arrive in messages: an endless one is refused before it is decoded.
    name = unquote(address.removeprefix(_SCHEME)) if len(address) <= _LONGEST else ""
    path = Path(name)
    # ".." could climb out of the marked folder; with a NUL every system call would raise ValueError.
    if not address.startswith(_SCHEME) or not path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ConfigError(f"peer address {address[:80]!r} is not a spool; expected 'spool:/absolute/folder'")
    return path


def file_name(parcel: Parcel, data: bytes | None = None) -> str:
    """Return the name of a parcel's file; ``data``: the parcel's bytes, where they are known already."""
    data = parcel.to_bytes() if data is None else data
    digest = hashlib.blake2b(data, digest_size=12).hexdigest()
    return (
        f"{parcel.run.hex()}-{parcel.round:08x}-{parcel.kind:02x}-{parcel.source:08x}-{parcel.destination:08x}-"
        f"{len(data):08x}-{digest}{_SUFFIX}"
    )


def _size(directory: Path, name: str) -> int:
    """Return a parcel's size as its file's name says, that of another file from the system."""
    try:
        return int(name.split("-")[5], 16)
    except (IndexError, ValueError):
        return (directory / name).lstat().st_size


def _place(name: str) -> tuple[bytes, int] | None:
    """Return run and round of a parcel's file name, None for the name of something else."""
    run, _, rest = name.partition("-")
    round_, dash, _ = rest.partition("-")
    try:
        place = bytes.fromhex(run), int(round_, 16)
    except ValueError:
        return None
    return place if dash and len(place[0]) == RUN_BYTES else None


def _flush_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
